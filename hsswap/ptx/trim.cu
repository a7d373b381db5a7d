// trim: of what select chose, what a bound on the share left out does not need.
//
// A chosen block that is not pinned is given up if the shares of it and of all worse ones (lower score, of
// equal ones the higher block) fit under `bound` beside what is left out already, and `least` better ones
// stay. Shares are a softmax over blocks; NaN counts as -inf. One thread block a KV head:
// each thread looks at one entry and sums over all of them, in entry order, so that nothing depends on
// timing. Shared memory: a score and a share an entry, 8 N bytes.
// What is computed: hsswap.driver.operations.TrimWork; NumPy reference hsswap.driver.host_select.trim.
#include "common.cuh"

struct Params {
    const float* scores;
    const float* shares;
    const int* pinned;
    const int* slots; // the cache's, [H, C]
    int* owner;
    int* chosen;
    int* chosen_slots;
    u8* missing;
    float* left_out;
    i64 score_stride, slots_stride, owner_stride, chosen_stride, chosen_slots_stride, missing_stride;
    i64 share_stride, left_out_stride; // elements
    int blocks, count, places, pinned_count, least;
    float bound;
};

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / WARP;
#define INFINITE __int_as_float(0x7f800000)

__device__ __forceinline__ float number_of(float value) { return value != value ? -INFINITE : value; }

// The weight of a score in the softmax; with no finite best one, all best scores count the same.
__device__ __forceinline__ float weight_of(float score, float best) {
    return fabsf(best) == INFINITE ? static_cast<float>(score == best) : expf(score - best);
}

// The maximum or the sum over the thread block of a value a thread, the same in all.
template <bool SUM> __device__ float over_all(float value, float* parts) {
    for (int step = WARP / 2; step > 0; step /= 2) {
        float other = __shfl_xor_sync(ALL, value, step);
        value = SUM ? value + other : fmaxf(value, other);
    }
    __syncthreads(); // the last result was read by all
    parts[threadIdx.x / WARP] = value;
    __syncthreads();
    value = parts[0];
    for (int w = 1; w < WARPS; w++) {
        value = SUM ? value + parts[w] : fmaxf(value, parts[w]);
    }
    return value;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    trim(const __grid_constant__ Params p) {
    extern __shared__ float entries[];
    __shared__ float parts[WARPS];
    follow();
    int h = blockIdx.x;
    float* scores = entries;            // [N]; NaN: pinned
    float* shares = entries + p.count;  // [N]
    const float* own_scores = p.scores + h * p.score_stride;
    const float* own_shares = p.shares + h * p.share_stride;
    float best = -INFINITE;
    for (int b = threadIdx.x; b < p.blocks; b += THREADS) {
        best = fmaxf(best, number_of(own_shares[b]));
    }
    best = over_all<false>(best, parts);
    float total = 0;
    for (int b = threadIdx.x; b < p.blocks; b += THREADS) {
        total += weight_of(number_of(own_shares[b]), best);
    }
    total = over_all<true>(total, parts);
    int* chosen = p.chosen + h * p.chosen_stride;
    for (int e = threadIdx.x; e < p.count; e += THREADS) {
        bool is_pinned = false;
        for (int j = 0; j < p.pinned_count; j++) {
            is_pinned |= p.pinned[j] == chosen[e];
        }
        float score = number_of(own_scores[chosen[e]]);
        scores[e] = is_pinned ? __int_as_float(0x7fc00000) : score;
        shares[e] = weight_of(number_of(own_shares[chosen[e]]), best) / total;
    }
    float left_out = p.left_out[h * p.left_out_stride];
    __syncthreads();
    float most = left_out; // with everything that this thread's entries let go
    for (int first = 0; first < p.count; first += THREADS) {
        int e = first + static_cast<int>(threadIdx.x);
        bool mine = e < p.count && scores[e] == scores[e];
        float lost = left_out;
        int better = 0;
        for (int i = 0; mine && i < p.count; i++) {
            // Entries ascend by block.
            bool worse = scores[i] < scores[e] || (scores[i] == scores[e] && i >= e);
            lost += worse ? shares[i] : 0.0f;
            better += scores[i] > scores[e] || (scores[i] == scores[e] && i < e);
        }
        if (mine && lost <= p.bound && better >= p.least) {
            most = fmaxf(most, lost);
            if (p.missing[h * p.missing_stride + e] != 0) {
                for (int place = 0; place < p.places; place++) {
                    if (p.owner[h * p.owner_stride + place] == chosen[e]) {
                        p.owner[h * p.owner_stride + place] = -1;
                    }
                }
                p.missing[h * p.missing_stride + e] = 0;
            }
            chosen[e] = -1;
            p.chosen_slots[h * p.chosen_slots_stride + e] = -1;
        }
    }
    most = over_all<false>(most, parts);
    if (threadIdx.x == 0) {
        p.left_out[h * p.left_out_stride] = most;
    }
}
