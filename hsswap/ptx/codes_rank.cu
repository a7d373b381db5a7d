// codes_rank: the score of each block, the log of its predicted share of the attention, and the same
// without corrections.
//
//   Z[q]         = logsumexp over x of partial[q, x], and of exact[q, last]: the block being filled
//   scores[h, b] = log of the mean over the head's queries of exp(mass[q, b] + correction[q, b] - Z[q]); at
//                  least LEAST; UNKNOWN - (B - 1 - b) where every query's mass is -inf
//   uncorrected  = the same with masses only, and their own Z
//
// mass [Q, B], partial [Q, parts] (maximum, sum of masses; with corrections), exact [Q, columns] float32 in
// the workspace; correction [Q, C]; scores and uncorrected [H, B] float32 with a row stride. Grid (x, H): a
// thread a block. Shared memory: Z, 8 G bytes. NumPy reference: hsswap.driver.host_codes.score.
#include "codes.cuh"

struct Params {
    const float* mass;
    const float* correction;
    const float4* partial;
    const float* exact;
    float* scores;
    float* uncorrected;
    i64 memory_stride, score_stride, uncorrected_stride;
    int blocks, group, parts, columns;
};

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / WARP;
constexpr float UNKNOWN = -1000.0f;
constexpr float LEAST = -690.7755f; // log of 1e-300

// Logsumexp over a warp of a maximum and a sum a lane, the same in all lanes.
__device__ __forceinline__ float over_warp(float best, float sum) {
    float top = best;
    for (int step = WARP / 2; step > 0; step /= 2) {
        top = fmaxf(top, __shfl_xor_sync(ALL, top, step));
    }
    float shift = top == -INFINITE ? 0.0f : top;
    sum = best == -INFINITE ? sum : sum * __expf(best - shift);
    for (int step = WARP / 2; step > 0; step /= 2) {
        sum += __shfl_xor_sync(ALL, sum, step);
    }
    return shift + logf(sum);
}

// Adds a maximum and a sum to others.
__device__ __forceinline__ void join(float& best, float& sum, float other_best, float other_sum) {
    float top = fmaxf(best, other_best);
    float shift = top == -INFINITE ? 0.0f : top;
    sum = sum * __expf(best - shift) + other_sum * __expf(other_best - shift);
    best = top;
}

// Log of the mean of exponentials of a value a query.
template <typename F> __device__ __forceinline__ float log_mean(int group, F value_of) {
    float best = -INFINITE;
    for (int g = 0; g < group; g++) {
        best = max_nan(best, value_of(g));
    }
    float shift = best == -INFINITE ? 0.0f : best;
    float sum = 0;
    for (int g = 0; g < group; g++) {
        sum += __expf(value_of(g) - shift);
    }
    float score = shift + __logf(sum) - logf(static_cast<float>(group));
    return score < LEAST ? LEAST : score; // NaN stays
}

extern "C" __global__ void __launch_bounds__(THREADS)
    codes_rank(const __grid_constant__ Params p) {
    extern __shared__ float2 z[]; // without and with corrections
    int head = blockIdx.y;
    for (int g = threadIdx.x / WARP; g < p.group; g += WARPS) {
        int q = head * p.group + g;
        float beside = lane_index() == 0 ? p.exact[q * p.columns + p.columns - 1] : -INFINITE;
        float4 all = make_float4(beside, beside == -INFINITE ? 0.0f : 1.0f, beside,
                                 beside == -INFINITE ? 0.0f : 1.0f);
        for (int x = lane_index(); x < p.parts; x += WARP) {
            float4 part = p.partial[q * p.parts + x];
            join(all.x, all.y, part.x, part.y);
            join(all.z, all.w, part.z, part.w);
        }
        float plain = over_warp(all.x, all.y);
        float corrected = over_warp(all.z, all.w);
        if (lane_index() == 0) {
            z[g] = make_float2(plain, corrected);
        }
    }
    __syncthreads();
    for (int b = blockIdx.x * THREADS + threadIdx.x; b < p.blocks; b += gridDim.x * THREADS) {
        const float* mass = p.mass + static_cast<i64>(head) * p.group * p.blocks + b;
        const float* correction = p.correction + head * p.group * p.memory_stride + b;
        bool known = false;
        for (int g = 0; g < p.group; g++) {
            known |= mass[static_cast<i64>(g) * p.blocks] != -INFINITE;
        }
        float plain = log_mean(p.group, [&](int g) {
            return mass[static_cast<i64>(g) * p.blocks] - z[g].x;
        });
        float score = log_mean(p.group, [&](int g) {
            return mass[static_cast<i64>(g) * p.blocks] + correction[g * p.memory_stride] - z[g].y;
        });
        float unknown = UNKNOWN - (p.blocks - 1 - b);
        p.scores[head * p.score_stride + b] = known ? score : unknown;
        p.uncorrected[head * p.uncorrected_stride + b] = known ? plain : unknown;
    }
}
