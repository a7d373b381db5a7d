// codes_rank: the score of each block, the log of its predicted share of the attention, and the same
// without corrections.
//
//   Z[q]         = logsumexp over x of partial[q, x]
//   scores[h, b] = log of the mean over the head's queries of exp(mass[q, b] + correction[q, b] - Z[q]); at
//                  least LEAST; UNKNOWN - (B - 1 - b) where every query's mass is -inf
//   uncorrected  = the same with masses only, and their own Z
//
// mass [Q, B], partial [Q, parts] (maximum, sum of masses; with corrections) float32 in the workspace; correction
// [Q, C]; scores and uncorrected [H, B] float32 with a row stride. Grid (x, H): a thread a block. Shared memory: Z,
// 8 G bytes. NumPy reference: hsswap.driver.host_codes.score.
#include "codes.cuh"

struct Params {
    const float* mass;
    const float* correction;
    const float4* partial;
    float* scores;
    float* uncorrected;
    i64 memory_stride, score_stride, uncorrected_stride;
    int blocks, group, parts;
};

constexpr int THREADS = 128;
constexpr int WARPS = THREADS / WARP;
constexpr int QUERIES = 4; // at a time
constexpr float UNKNOWN = -1000.0f;
constexpr float LEAST = -690.7755f; // log of 1e-300

// A logsumexp: its maximum, and the sum of the others relative to that.
struct Sum {
    float best, total;
    __device__ __forceinline__ void add(float value, float count) {
        float top = max_nan(best, value);
        float shift = top == -INFINITE ? 0.0f : top;
        total = total * __expf(best - shift) + count * __expf(value - shift);
        best = top;
    }
    // Over a warp, the same in all lanes.
    __device__ __forceinline__ float over_warp() const {
        float top = best;
#pragma unroll
        for (int step = WARP / 2; step > 0; step /= 2) {
            top = max_nan(top, __shfl_xor_sync(ALL, top, step));
        }
        float shift = top == -INFINITE ? 0.0f : top;
        float sum = total * __expf(best - shift);
#pragma unroll
        for (int step = WARP / 2; step > 0; step /= 2) {
            sum += __shfl_xor_sync(ALL, sum, step);
        }
        return shift + logf(sum);
    }
    // Of a mean over `group`. NaN stays.
    __device__ __forceinline__ float score(int group) const {
        float shift = best == -INFINITE ? 0.0f : best;
        float value = shift + __logf(total / static_cast<float>(group));
        return value < LEAST ? LEAST : value;
    }
};

// What codes_mass left of a block, for QUERIES queries from q on.
struct Found {
    float mass[QUERIES], correction[QUERIES];
    __device__ __forceinline__ Found(const Params& p, int q, int b, int count) {
#pragma unroll
        for (int g = 0; g < QUERIES; g++) {
            bool is_in = b < p.blocks && g < count;
            mass[g] = is_in ? p.mass[static_cast<i64>(q + g) * p.blocks + b] : 0.0f;
            correction[g] = is_in ? p.correction[(q + g) * p.memory_stride + b] : 0.0f;
        }
    }
};

__device__ __forceinline__ float4 part_of(const Params& p, int q, int x) {
    return x < p.parts ? p.partial[q * p.parts + x] : make_float4(-INFINITE, 0, -INFINITE, 0);
}

// Z of query q, without and with corrections. part: the lane's first.
__device__ __forceinline__ float2 total_of(const Params& p, int q, const float4& part) {
    Sum plain{part.x, part.y}, corrected{part.z, part.w};
#pragma unroll 1
    for (int x = WARP + lane_index(); x < p.parts; x += WARP) {
        float4 more = part_of(p, q, x);
        plain.add(more.x, more.y);
        corrected.add(more.z, more.w);
    }
    return make_float2(plain.over_warp(), corrected.over_warp());
}

extern "C" __global__ void __launch_bounds__(THREADS)
    codes_rank(const __grid_constant__ Params p) {
    extern __shared__ float2 z[]; // without and with corrections
    int head = blockIdx.y;
    int b = blockIdx.x * THREADS + threadIdx.x;
    int warp = threadIdx.x / WARP;
    follow();
    float4 part = part_of(p, head * p.group + min(warp, p.group - 1), lane_index());
    Found found(p, head * p.group, b, p.group);
#pragma unroll 1
    for (int g = warp; g < p.group; g += WARPS) {
        float2 total = total_of(p, head * p.group + g, part);
        part = part_of(p, head * p.group + min(g + WARPS, p.group - 1), lane_index());
        if (lane_index() == 0) {
            z[g] = total;
        }
    }
    __syncthreads();
    if (b >= p.blocks) {
        return;
    }
    bool known = false;
    Sum plain{-INFINITE, 0.0f}, corrected{-INFINITE, 0.0f};
#pragma unroll 1
    for (int base = 0; base < p.group; base += QUERIES) {
        if (base > 0) {
            found = Found(p, head * p.group + base, b, p.group - base);
        }
#pragma unroll
        for (int g = 0; g < QUERIES; g++) {
            if (base + g < p.group) {
                known |= found.mass[g] != -INFINITE;
                plain.add(found.mass[g] - z[base + g].x, 1.0f);
                corrected.add(found.mass[g] + found.correction[g] - z[base + g].y, 1.0f);
            }
        }
    }
    float unknown = UNKNOWN - (p.blocks - 1 - b);
    p.scores[head * p.score_stride + b] = known ? corrected.score(p.group) : unknown;
    p.uncorrected[head * p.uncorrected_stride + b] = known ? plain.score(p.group) : unknown;
}
