// What both kernels of the blocks' masses share: codes_mass.cu and codes_mass_any.cu.
#pragma once
#include "codes.cuh"

#ifndef CHUNK
#define CHUNK 16
#endif

struct Params {
    Tables tables;
    const u8* queries;
    i64 query_stride, element_stride; // bytes
    const u64* pages;      // null: few_pages
    const int* code_index; // [B]
    const int* pinned;
    const int* chosen; // [H, entries], null: nothing was attended
    const float* lse;
    float* predicted;
    float* correction;
    float* mass;
    float4* partial;
    const u8* units;
    const int* owner;  // [H, places], null: nothing is held
    const int* slots;  // [H, places]
    const int* active; // [H], null: few_active
    i64 row_bytes, chosen_stride, lse_stride;
    i64 unit_bytes, scales_at, owner_stride, slot_stride;
    int blocks, group, block_size, pinned_count, entries, first, remembered;
    int memory_stride;
    int span; // blocks that a thread block takes at a time, THREADS at most
    int places, active_tokens;
    float scale, soft_cap;
    u64 few_pages[64];
    int few_active[64];
};

constexpr int THREADS = 512;
constexpr int WARPS = THREADS / WARP;
constexpr int QUERIES = 4;
constexpr int MOST_DIM = 256;

__device__ __forceinline__ float power_of_2(float value) {
    float out;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(value));
    return out;
}
__device__ __forceinline__ float exponential(float value) { return power_of_2(value * 1.44269504f); }

struct Sum {
    float best, total;
    __device__ __forceinline__ void add(float value) {
        if (value > best) {
            total = total * __expf(best - value) + 1.0f;
            best = value;
        } else if (value != -INFINITE) {
            total += __expf(value - best); // NaN for NaN
        }
    }
    // The same of a sum whose best is a number.
    __device__ __forceinline__ void join(float value) {
        float top = fmaxf(best, value);
        total = total * exponential(best - top) + exponential(value - top);
        best = top;
    }
    __device__ __forceinline__ void merge(const Sum& other) {
        float top = fmaxf(best, other.best);
        float shift = top == -INFINITE ? 0.0f : top;
        total = total * __expf(best - shift) + other.total * __expf(other.best - shift);
        best = top;
    }
};

constexpr float NOTHING = -3.4e38f; // less than any mass, but a number

// Of masses without and with corrections.
struct Sums {
    Sum plain, corrected;
};

// Where `memory` has what is remembered of a query and block.
__device__ __forceinline__ float* remembered(float* memory, const Params& p, int query, int block) {
    return memory + static_cast<u64>(static_cast<u32>(query)) * static_cast<u32>(p.memory_stride) + block;
}

__device__ __forceinline__ float load_float(const float* from) {
    float out;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(out) : "l"(from) : "memory");
    return out;
}

// Of several lanes, of equal lane number in each `from` of them, in all of these.
__device__ __forceinline__ void over_lanes(Sum& own, int from, int to) {
    float top = own.best;
#pragma unroll
    for (int step = from; step < to; step *= 2) {
        top = fmaxf(top, __shfl_xor_sync(ALL, top, step));
    }
    own.total *= __expf(own.best - (top == -INFINITE ? 0.0f : top));
    own.best = top;
#pragma unroll
    for (int step = from; step < to; step *= 2) {
        own.total += __shfl_xor_sync(ALL, own.total, step);
    }
}
