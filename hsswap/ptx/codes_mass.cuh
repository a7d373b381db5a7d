// What both kernels of the blocks' masses share: codes_mass.cu and codes_mass_any.cu.
#pragma once
#include "codes.cuh"

struct Params {
    Tables tables;
    const u64* rows; // [B], where a block's codes are, 0: it has none
    const float* weights;
    const float* constant;
    const float* exact;
    const int* pinned;
    const int* chosen; // [H, entries], null: nothing was attended
    const float* lse;
    float* predicted;
    float* correction;
    float* mass;
    float4* partial;
    i64 memory_stride, chosen_stride, lse_stride;
    int blocks, group, block_size, pinned_count, entries, first;
};

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / WARP;
constexpr int QUERIES = 4;

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
    __device__ __forceinline__ void merge(const Sum& other) {
        float top = fmaxf(best, other.best);
        float shift = top == -INFINITE ? 0.0f : top;
        total = total * __expf(best - shift) + other.total * __expf(other.best - shift);
        best = top;
    }
};

// Of masses without and with corrections.
struct Sums {
    Sum plain, corrected;
    __device__ __forceinline__ void merge(const Sums& other) {
        plain.merge(other.plain);
        corrected.merge(other.corrected);
    }
};

__device__ __forceinline__ float remembered(const Params& p, int q, int b) {
    return p.first ? 0.0f : p.correction[q * p.memory_stride + b];
}

// What block b is worth to query q = head * group + g in this step, and what is remembered of it.
// value: what its codes say; near: it may be pinned; correction: of the step before.
__device__ __forceinline__ void settle(const Params& p, int head, int q, int b, bool coded, float value,
                                       float correction, bool near, Sums& sums) {
    float now = coded ? value : -INFINITE;
    p.predicted[q * p.memory_stride + b] = now;
    correction = coded ? FADE * correction : 0.0f;
    if (!coded && p.chosen != nullptr) {
        for (int entry = 0; entry < p.entries; entry++) {
            if (p.chosen[head * p.chosen_stride + entry] == b) {
                now = p.lse[q * p.lse_stride + entry];
            }
        }
    }
    for (int j = 0; near && j < p.pinned_count; j++) {
        if (p.pinned[j] == b) {
            float exact = p.exact[q * (p.pinned_count + 1) + j];
            bool held = exact == exact;
            now = held ? exact : now;
            correction = held ? 0.0f : correction;
        }
    }
    p.correction[q * p.memory_stride + b] = correction;
    p.mass[static_cast<i64>(q) * p.blocks + b] = now;
    sums.plain.add(now);
    sums.corrected.add(now + correction);
}

// The sums of all warps' leaders to partial; q is -1 in lanes without a query.
__device__ __forceinline__ void finish(const Params& p, int q, Sums own) {
    __shared__ Sums sums[QUERIES][WARPS];
    int warp = threadIdx.x / WARP;
    int g = lane_index();
    if (g < QUERIES) {
        sums[g][warp] = own;
    }
    __syncthreads();
    if (warp > 0 || g >= QUERIES || q < 0) {
        return;
    }
    Sums all = sums[g][0];
    for (int w = 1; w < WARPS; w++) {
        all.merge(sums[g][w]);
    }
    p.partial[q * gridDim.x + blockIdx.x] =
        make_float4(all.plain.best, all.plain.total, all.corrected.best, all.corrected.total);
}
