// What the kernels of the predictor "codes" share: a layer's tables and where a block's codes are.
//
// Tables are parts of what hsswap.driver.codes_operations.table_bytes gives; H heads, M code dims at most,
// P planes at most:
//   encode f32 [H, dk, M] | bias f32 [H, M] | query f32 [H, M, dk] | centre f32 [H, dk] |
//   bits u8 [H, M] | dim of each bit u8 [H, 16 P] | its place in the dim u8 [H, 16 P] |
//   fields u32 [H, 2 P, 8] | planes i32 [H] | first plane in a row i32 [H]
// A field: bits of one byte of a token's string that are neighbours in one dim. Its mask in the byte, its dim,
// and from bit 16 on EXPONENT + e: the byte, masked, counts 2^e levels of the dim; 0: none.
// A row of codes is heads in order, each planes [n, T] of u16.
#pragma once
#include "common.cuh"

constexpr int PAGE_BLOCKS = 256;
constexpr int PLANE_BITS = 16;
constexpr int FIELDS = 8; // of a byte
constexpr int EXPONENT = 16;
constexpr float TRUST = 0.8f; // as in hsswap.codec
constexpr float FADE = 0.9f;

#define INFINITE __int_as_float(0x7f800000)

// As lane_index() of common.cuh; divisions of it are shifts.
__device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x % WARP); }

// An address that is in registers from here on: what comes before a wait need not be computed after it.
template <class T> __device__ __forceinline__ T* pinned_here(T* base, i64 offset) {
    asm volatile("" : "+l"(offset));
    return base + offset;
}

struct Tables {
    const float* encodes; // null: there is no codec
    const float* biases;
    const float* queries;
    const float* centres;
    const u8* all_bits;
    const u8* dims;
    const u8* places;
    const u32* all_fields;
    const int* counts;
    const int* firsts;
    int heads, dim, most, planes; // H, dk, M, P

    __device__ __forceinline__ bool are_there() const { return encodes != nullptr; }
    __device__ __forceinline__ const float* encode(int h) const { return encodes + h * dim * most; }
    __device__ __forceinline__ const float* bias(int h) const { return biases + h * most; }
    __device__ __forceinline__ const float* query(int h) const { return queries + h * dim * most; }
    __device__ __forceinline__ const float* centre(int h) const { return centres + h * dim; }
    __device__ __forceinline__ const u8* bits(int h) const { return all_bits + h * most; }
    __device__ __forceinline__ const u8* dim_of(int h) const { return dims + h * PLANE_BITS * planes; }
    __device__ __forceinline__ const u8* bit_of(int h) const { return places + h * PLANE_BITS * planes; }
    __device__ __forceinline__ const u32* fields(int h) const { return all_fields + h * 2 * planes * FIELDS; }
    __device__ __forceinline__ int plane_count(int h) const { return counts[h]; }
    __device__ __forceinline__ int first_plane(int h) const { return firsts[h]; }
};

// A block's codes of one head, [n, T] u16.
__device__ __forceinline__ u16* codes_of(const u64* pages, i64 row_bytes, int index, int first_plane,
                                         int block_size) {
    u8* row = reinterpret_cast<u8*>(pages[index / PAGE_BLOCKS]) + index % PAGE_BLOCKS * row_bytes;
    return reinterpret_cast<u16*>(row) + first_plane * block_size;
}
