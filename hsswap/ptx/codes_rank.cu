// codes_rank: the score of each block, the log of its predicted share of the attention, and the same
// without corrections.
//
//   m[q, b]      = exact[q, j] where b is pinned block j and that is no NaN, else mass[q, b]
//   Z[q]         = logsumexp over x of partial[q, x], of the pinned blocks, and of exact[q, pinned_count]: the
//                  block being filled
//   scores[h, b] = log of the mean over the head's queries of exp(m[q, b] + correction[q, b] - Z[q]); at
//                  least LEAST; UNKNOWN - (B - 1 - b) where every query's m is -inf
//   uncorrected  = the same with masses only, and their own Z
//
// Where exact is taken, the correction becomes 0. mass [Q, B], partial [Q, parts] (maximum, sum of masses; with
// corrections), exact [Q, pinned_count + 1] float32 in the workspace; correction [Q, C]; scores and uncorrected
// [H, B] float32 with a row stride. Grid (x, H): a thread a block. Shared memory: Z, 8 G bytes.
// NumPy reference: hsswap.driver.host_codes.score.
#include "codes.cuh"

struct Params {
    const float* mass;
    float* correction;
    const float4* partial;
    const float* exact;
    const int* pinned;
    float* scores;
    float* uncorrected;
    i64 memory_stride, score_stride, uncorrected_stride;
    int blocks, group, parts, pinned_count;
};

constexpr int THREADS = 256;
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
        for (int step = WARP / 2; step > 0; step /= 2) {
            top = max_nan(top, __shfl_xor_sync(ALL, top, step));
        }
        float shift = top == -INFINITE ? 0.0f : top;
        float sum = total * __expf(best - shift);
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

// What a block, pinned block j or -1, is worth to query q, without and with its correction.
struct Worth {
    float plain, corrected;
    bool is_exact;
};

__device__ __forceinline__ Worth worth_of(const Params& p, int q, int j, float mass, float correction) {
    float exact = j < 0 ? __int_as_float(0x7fc00000) : p.exact[q * (p.pinned_count + 1) + j];
    bool is_exact = exact == exact;
    return {is_exact ? exact : mass, is_exact ? exact : mass + correction, is_exact};
}

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

// What a lane asks of memory for the total of a query, before anything waits: its first items.
struct Asked {
    float4 part;
    int pinned;
    float exact, beside;

    __device__ __forceinline__ Asked(const Params& p, int q) {
        int lane = lane_index();
        const float* of_query = p.exact + q * (p.pinned_count + 1);
        part = lane < p.parts ? p.partial[q * p.parts + lane] : make_float4(-INFINITE, 0, -INFINITE, 0);
        pinned = lane < p.pinned_count ? p.pinned[lane] : -1;
        exact = lane < p.pinned_count ? of_query[lane] : 0.0f;
        beside = of_query[p.pinned_count];
    }
};

__device__ __forceinline__ float2 total_of(const Params& p, int q, const Asked& asked) {
    Sum plain{-INFINITE, 0.0f}, corrected{-INFINITE, 0.0f};
#pragma unroll 1
    for (int x = lane_index(); x < p.parts; x += WARP) {
        float4 part = x < WARP ? asked.part : p.partial[q * p.parts + x];
        plain.add(part.x, part.y);
        corrected.add(part.z, part.w);
    }
#pragma unroll 1
    for (int j = lane_index(); j < p.pinned_count; j += WARP) {
        int b = j < WARP ? asked.pinned : p.pinned[j];
        float exact = j < WARP ? asked.exact : p.exact[q * (p.pinned_count + 1) + j];
        float with_correction = exact;
        if (exact != exact && b >= 0) { // not held: asks for more, which is rare
            exact = p.mass[static_cast<i64>(q) * p.blocks + b];
            with_correction = exact + p.correction[q * p.memory_stride + b];
        }
        if (b >= 0) {
            plain.add(exact, 1.0f);
            corrected.add(with_correction, 1.0f);
        }
    }
    if (lane_index() == 0) {
        plain.add(asked.beside, 1.0f);
        corrected.add(asked.beside, 1.0f);
    }
    return make_float2(plain.over_warp(), corrected.over_warp());
}

extern "C" __global__ void __launch_bounds__(THREADS)
    codes_rank(const __grid_constant__ Params p) {
    extern __shared__ float2 z[]; // without and with corrections
    __shared__ short pin_of[THREADS];
    int head = blockIdx.y;
    int first = blockIdx.x * THREADS;
    int b = first + threadIdx.x;
    pin_of[threadIdx.x] = -1;
    follow();
    Found found(p, head * p.group, b, p.group);
    int warp = threadIdx.x / WARP;
    Asked asked(p, head * p.group + min(warp, p.group - 1));
    int pinned = threadIdx.x < p.pinned_count ? p.pinned[threadIdx.x] : -1;
    __syncthreads();
#pragma unroll 1
    for (int j = threadIdx.x; j < p.pinned_count; j += THREADS) {
        u32 i = static_cast<u32>((j < THREADS ? pinned : p.pinned[j]) - first);
        if (i < THREADS) {
            pin_of[i] = static_cast<short>(j);
        }
    }
#pragma unroll 1
    for (int g = warp; g < p.group; g += WARPS) {
        if (g >= WARPS) {
            asked = Asked(p, head * p.group + g);
        }
        float2 total = total_of(p, head * p.group + g, asked);
        if (lane_index() == 0) {
            z[g] = total;
        }
    }
    __syncthreads();
    if (b >= p.blocks) {
        return;
    }
    int pin = pin_of[threadIdx.x];
    bool known = false;
    Sum plain{-INFINITE, 0.0f}, corrected{-INFINITE, 0.0f};
    for (int base = 0; base < p.group; base += QUERIES) {
        int q = head * p.group + base;
        if (base > 0) {
            found = Found(p, q, b, p.group - base);
        }
#pragma unroll
        for (int g = 0; g < QUERIES; g++) {
            if (base + g < p.group) {
                Worth worth = worth_of(p, q + g, pin, found.mass[g], found.correction[g]);
                known |= worth.plain != -INFINITE;
                if (worth.is_exact) { // no other thread reads it
                    p.correction[(q + g) * p.memory_stride + b] = 0;
                }
                plain.add(worth.plain - z[base + g].x, 1.0f);
                corrected.add(worth.corrected - z[base + g].y, 1.0f);
            }
        }
    }
    float unknown = UNKNOWN - (p.blocks - 1 - b);
    p.scores[head * p.score_stride + b] = known ? corrected.score(p.group) : unknown;
    p.uncorrected[head * p.uncorrected_stride + b] = known ? plain.score(p.group) : unknown;
}
