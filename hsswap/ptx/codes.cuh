// What the kernels of the predictor "codes" share: a layer's tables and where a block's codes are.
//
// Tables are as hsswap.driver.codes_operations.table_bytes lays them out; H heads, M code dims at most,
// P planes at most, each part on 16 bytes:
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

struct Tables {
    const u8* base;
    int heads, dim, most, planes; // H, dk, M, P

    __device__ __forceinline__ static i64 padded(i64 bytes) { return (bytes + 15) / 16 * 16; }
    __device__ __forceinline__ const float* encode(int h) const {
        return reinterpret_cast<const float*>(base) + static_cast<i64>(h) * dim * most;
    }
    __device__ __forceinline__ i64 bias_at() const { return padded(4ll * heads * dim * most); }
    __device__ __forceinline__ i64 query_at() const { return bias_at() + padded(4ll * heads * most); }
    __device__ __forceinline__ i64 centre_at() const {
        return query_at() + padded(4ll * heads * dim * most);
    }
    __device__ __forceinline__ i64 bits_at() const { return centre_at() + padded(4ll * heads * dim); }
    __device__ __forceinline__ i64 dims_at() const { return bits_at() + padded(heads * most); }
    __device__ __forceinline__ i64 places_at() const {
        return dims_at() + padded(heads * PLANE_BITS * planes);
    }
    __device__ __forceinline__ i64 fields_at() const {
        return places_at() + padded(heads * PLANE_BITS * planes);
    }
    __device__ __forceinline__ i64 counts_at() const {
        return fields_at() + 4ll * heads * 2 * planes * FIELDS;
    }
    __device__ __forceinline__ const float* bias(int h) const {
        return reinterpret_cast<const float*>(base + bias_at()) + h * most;
    }
    __device__ __forceinline__ const float* query(int h) const {
        return reinterpret_cast<const float*>(base + query_at()) + static_cast<i64>(h) * dim * most;
    }
    __device__ __forceinline__ const float* centre(int h) const {
        return reinterpret_cast<const float*>(base + centre_at()) + h * dim;
    }
    __device__ __forceinline__ const u8* bits(int h) const { return base + bits_at() + h * most; }
    __device__ __forceinline__ const u8* dim_of(int h) const {
        return base + dims_at() + h * PLANE_BITS * planes;
    }
    __device__ __forceinline__ const u8* bit_of(int h) const {
        return base + places_at() + h * PLANE_BITS * planes;
    }
    __device__ __forceinline__ const u32* fields(int h) const {
        return reinterpret_cast<const u32*>(base + fields_at()) + h * 2 * planes * FIELDS;
    }
    __device__ __forceinline__ int plane_count(int h) const {
        return reinterpret_cast<const int*>(base + counts_at())[h];
    }
    __device__ __forceinline__ int first_plane(int h) const {
        return reinterpret_cast<const int*>(base + counts_at() + padded(4 * heads))[h];
    }
};

// A block's codes of one head, [n, T] u16.
__device__ __forceinline__ u16* codes_of(const u64* pages, i64 row_bytes, int index, int first_plane,
                                         int block_size) {
    u8* row = reinterpret_cast<u8*>(pages[index / PAGE_BLOCKS]) + index % PAGE_BLOCKS * row_bytes;
    return reinterpret_cast<u16*>(row) + first_plane * block_size;
}
