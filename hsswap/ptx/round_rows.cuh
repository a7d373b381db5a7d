// Reductions over a row of logits by one thread block: the largest, of equals the first, and the sum of exponentials.
#pragma once
#include "common.cuh"

#define ROW_THREADS 512

constexpr u32 NO_TOKEN = 0xffffffffu, BAD_TOKEN = 2;

struct Best {
    float value;  // largest
    float sum;    // of exp(x - value), where value is finite
    u32 token;    // its place; NO_TOKEN: there is no number
};

__device__ __forceinline__ bool is_finite(float x) { return (__float_as_uint(x) & 0x7fffffffu) < 0x7f800000u; }
__device__ __forceinline__ bool is_nan(float x) { return x != x; }
__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }

__device__ __forceinline__ Best none() { return {-infinity(), 0.f, NO_TOKEN}; }

__device__ __forceinline__ Best fold(const Best& a, const Best& b) {
    const bool is_b = a.token == NO_TOKEN || (b.token != NO_TOKEN && (b.value > a.value || (b.value == a.value && b.token < a.token)));
    Best out = is_b ? b : a;
    const Best other = is_b ? a : b;
    if (is_finite(out.value) && is_finite(other.value)) out.sum += other.sum * expf(other.value - out.value);
    return out;
}

__device__ __forceinline__ void take(Best& best, float x, u32 token) {
    if (!is_nan(x)) best = fold(best, {x, 1.f, token});
}

// All threads get the result; `memory` holds one for each warp, and is free again behind the next __syncthreads.
__device__ __forceinline__ Best fold_block(Best best, Best* memory) {
    for (int apart = WARP / 2; apart; apart /= 2) {
        const Best other = {__shfl_down_sync(ALL, best.value, apart), __shfl_down_sync(ALL, best.sum, apart),
                            __shfl_down_sync(ALL, best.token, apart)};
        if (lane_index() < apart) best = fold(best, other);
    }
    if (lane_index() == 0) memory[threadIdx.x / WARP] = best;
    __syncthreads();
    best = memory[0];
    for (int i = 1; i < ROW_THREADS / WARP; i++) best = fold(best, memory[i]);
    return best;
}
