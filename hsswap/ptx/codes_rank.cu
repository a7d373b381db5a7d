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
constexpr float LOG2_E = 1.44269504f, LN_2 = 0.693147181f;

__device__ __forceinline__ float power_of_2(float value) {
    float out;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(value));
    return out;
}
__device__ __forceinline__ float log_of_2(float value) {
    float out;
    asm("lg2.approx.f32 %0, %1;" : "=f"(out) : "f"(value));
    return out;
}
// What is subtracted from numbers with this maximum.
__device__ __forceinline__ float shift_of(float top) { return top == -INFINITE ? 0.0f : top; }

// A logsumexp to the base 2.
struct Sum {
    float best, total;
    __device__ __forceinline__ void merge(float top, float sum) {
        float all = fmaxf(best, top), shift = shift_of(all);
        total = total * power_of_2(best - shift) + sum * power_of_2(top - shift);
        best = all;
    }
    __device__ __forceinline__ void add(const float (&values)[QUERIES]) {
        float top = fmaxf(fmaxf(values[0], values[1]), fmaxf(values[2], values[3]));
        float shift = shift_of(top), sum = 0;
#pragma unroll
        for (int g = 0; g < QUERIES; g++) {
            sum += power_of_2(values[g] - shift);
        }
        if (best == -INFINITE) {
            best = top;
            total = sum;
        } else {
            merge(top, sum);
        }
    }
    // Of a mean over `group`, to the base e. NaN stays.
    __device__ __forceinline__ float score(int group) const {
        float value = LN_2 * (shift_of(best) + (log_of_2(total) - log_of_2(static_cast<float>(group))));
        return value < LEAST ? LEAST : value;
    }
};

// What codes_mass left of a block, for `count` of QUERIES queries.
struct Found {
    float masses[QUERIES], corrections[QUERIES];
    __device__ __forceinline__ Found(const Params& p, const float* mass, const float* correction, int count) {
#pragma unroll
        for (int g = 0; g < QUERIES; g++) {
            masses[g] = g < count ? mass[static_cast<i64>(g) * p.blocks] : -INFINITE;
            corrections[g] = g < count ? correction[g * p.memory_stride] : 0.0f;
        }
    }
};

constexpr int HALF = WARP / 2;

__device__ __forceinline__ const float2* partial_of(const Params& p, int q) {
    return reinterpret_cast<const float2*>(p.partial + q * p.parts) + lane() / HALF;
}

__device__ __forceinline__ float2 part_of(const float2* partial, int parts, int x) {
    return x < parts ? partial[2 * x] : make_float2(-INFINITE, 0);
}
// Z of a query to the base 2 by one warp: in its lower half without corrections, in its upper half with them. part: the
// lane's first.
__device__ __forceinline__ float total_of(const float2* partial, int parts, const float2& part) {
    Sum sum{part.x * LOG2_E, part.y};
#pragma unroll 1
    for (int x = HALF + lane() % HALF; x < parts; x += HALF) {
        float2 more = part_of(partial, parts, x);
        sum.merge(more.x * LOG2_E, more.y);
    }
    float top = sum.best;
#pragma unroll
    for (int step = HALF / 2; step > 0; step /= 2) {
        top = fmaxf(top, __shfl_xor_sync(ALL, top, step));
    }
    float shift = shift_of(top);
    float total = sum.total * power_of_2(sum.best - shift);
#pragma unroll
    for (int step = HALF / 2; step > 0; step /= 2) {
        total += __shfl_xor_sync(ALL, total, step);
    }
    return shift + log2f(total);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) // all loads at once want registers
    codes_rank(const __grid_constant__ Params p) {
    extern __shared__ float z[]; // without corrections and with them
    int head = blockIdx.y;
    int b = blockIdx.x * THREADS + threadIdx.x;
    int warp = threadIdx.x / WARP;
    // Where the lane's first ones are, before the wait.
    const float* mass = pinned_here(p.mass, static_cast<i64>(head * p.group) * p.blocks + b);
    const float* correction = pinned_here(p.correction, head * p.group * p.memory_stride + b);
    const float2* partial = pinned_here(partial_of(p, head * p.group + warp), 0);
    follow();
    float2 part = part_of(partial, warp < p.group ? p.parts : 0, lane() % HALF);
    Found found(p, mass, correction, b < p.blocks ? p.group : 0);
    float total = total_of(partial, p.parts, part);
    if (lane() % HALF == 0 && warp < p.group) {
        z[2 * warp + lane() / HALF] = total;
    }
#pragma unroll 1
    for (int g = warp + WARPS; g < p.group; g += WARPS) {
        partial = partial_of(p, head * p.group + g);
        total = total_of(partial, p.parts, part_of(partial, p.parts, lane() % HALF));
        if (lane() % HALF == 0) {
            z[2 * g + lane() / HALF] = total;
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
            int q = head * p.group + base;
            found = Found(p, p.mass + static_cast<i64>(q) * p.blocks + b, p.correction + q * p.memory_stride + b, p.group - base);
        }
        float values[QUERIES], changed[QUERIES];
#pragma unroll
        for (int g = 0; g < QUERIES; g++) {
            bool is_in = base + g < p.group;
            known |= found.masses[g] != -INFINITE;
            values[g] = fmaf(found.masses[g], LOG2_E, is_in ? -z[2 * (base + g)] : 0.0f);
            changed[g] = fmaf(found.masses[g] + found.corrections[g], LOG2_E, is_in ? -z[2 * (base + g) + 1] : 0.0f);
        }
        plain.add(values);
        corrected.add(changed);
    }
    float unknown = UNKNOWN - (p.blocks - 1 - b);
    p.scores[head * p.score_stride + b] = known ? corrected.score(p.group) : unknown;
    p.uncorrected[head * p.uncorrected_stride + b] = known ? plain.score(p.group) : unknown;
}
