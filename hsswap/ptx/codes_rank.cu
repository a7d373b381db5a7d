// codes_rank: the score of each block, the log of its predicted share of the attention.
//
//   Z[q]         = logsumexp over x of partial[q, x], and of exact[q, last]: the block being filled
//   scores[h, b] = log of the mean over the head's queries of exp(mass[q, b] - Z[q]); at least LEAST;
//                  UNKNOWN - (B - 1 - b) where every query's mass is -inf
//
// mass [Q, B], partial [Q, parts] (maximum, sum), exact [Q, columns] float32 in the workspace; scores
// [H, B] float32 with a row stride. Grid (x, H): a thread a block. Shared memory: Z, 4 G bytes.
// NumPy reference: hsswap.driver.host_codes.score.
#include "codes.cuh"

struct Params {
    const float* mass;
    const float2* partial;
    const float* exact;
    float* scores;
    i64 score_stride;
    int blocks, group, parts, columns;
};

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / WARP;
constexpr float UNKNOWN = -1000.0f;
constexpr float LEAST = -690.7755f; // log of 1e-300

extern "C" __global__ void __launch_bounds__(THREADS)
    codes_rank(const __grid_constant__ Params p) {
    extern __shared__ float z[];
    int head = blockIdx.y;
    for (int g = threadIdx.x / WARP; g < p.group; g += WARPS) {
        int q = head * p.group + g;
        float beside = p.exact[q * p.columns + p.columns - 1];
        float best = lane_index() == 0 ? beside : -INFINITE;
        for (int x = lane_index(); x < p.parts; x += WARP) {
            best = fmaxf(best, p.partial[q * p.parts + x].x);
        }
        for (int step = WARP / 2; step > 0; step /= 2) {
            best = fmaxf(best, __shfl_xor_sync(ALL, best, step));
        }
        float shift = best == -INFINITE ? 0.0f : best;
        float sum = lane_index() == 0 ? __expf(beside - shift) : 0.0f;
        for (int x = lane_index(); x < p.parts; x += WARP) {
            float2 part = p.partial[q * p.parts + x];
            sum += part.x == -INFINITE ? part.y : part.y * __expf(part.x - shift);
        }
        for (int step = WARP / 2; step > 0; step /= 2) {
            sum += __shfl_xor_sync(ALL, sum, step);
        }
        if (lane_index() == 0) {
            z[g] = shift + logf(sum);
        }
    }
    __syncthreads();
    float log_group = logf(static_cast<float>(p.group));
    for (int b = blockIdx.x * THREADS + threadIdx.x; b < p.blocks; b += gridDim.x * THREADS) {
        const float* mass = p.mass + static_cast<i64>(head) * p.group * p.blocks + b;
        float best = -INFINITE;
        bool known = false;
        for (int g = 0; g < p.group; g++) {
            float value = mass[static_cast<i64>(g) * p.blocks];
            known |= value != -INFINITE;
            best = max_nan(best, value == -INFINITE ? value : value - z[g]);
        }
        float sum = 0;
        for (int g = 0; g < p.group; g++) {
            float value = mass[static_cast<i64>(g) * p.blocks];
            sum += value == -INFINITE ? 0.0f : __expf(value - z[g] - best);
        }
        float score = best + __logf(sum) - log_group;
        score = score < LEAST ? LEAST : score; // NaN stays
        p.scores[head * p.score_stride + b] = known ? score : UNKNOWN - (p.blocks - 1 - b);
    }
}
