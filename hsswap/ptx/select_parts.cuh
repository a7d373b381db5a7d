// The parts of select: keys, the owners' table, threshold, compaction, sort, and the share left out.
#pragma once
#include "common.cuh"

constexpr int THREADS = 1024;
constexpr int WARPS = THREADS / WARP;
constexpr int NEW = 1 << 30; // bit of a place that was given to a missing block

// An unsigned integer in the order of the numbers; -0 and 0 are one. NaN must not come in.
__device__ __forceinline__ u32 ordered(float value) {
    u32 bits = __float_as_uint(value + 0.0f); // -0 + 0 is 0
    return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

// Scores as keys; pinned blocks are above all (+inf is 0xff800000). The keys of up to KEPT_KEYS blocks
// are kept in shared memory; more are made again from the scores each time.
struct Keys {
    const float* scores;
    const u32* pinned; // bits
    u32* kept;         // null: too many
    int count;

    __device__ __forceinline__ float score(int block) const {
        float value = scores[block];
        return value != value ? __uint_as_float(0xff800000u) : value; // NaN: -inf
    }
    __device__ __forceinline__ u32 make(int block) const {
        bool is_pinned = (pinned[block / 32] >> block % 32 & 1u) != 0;
        return is_pinned ? 0xffffffffu : ordered(score(block));
    }
    __device__ __forceinline__ u32 key(int block) const {
        return kept != nullptr ? kept[block] : make(block);
    }
    __device__ __forceinline__ void keep() {
        for (int block = threadIdx.x; kept != nullptr && block < count; block += THREADS) {
            kept[block] = make(block);
        }
        __syncthreads();
    }
};

// Open addressing; entries are places, whose owners are the keys. At most half full.
struct Table {
    int* places;
    int size;

    __device__ __forceinline__ int start(int block) const {
        return static_cast<int>((static_cast<u32>(block) * 0x9e3779b1u >> 8) & (size - 1));
    }
    __device__ __forceinline__ void insert(int block, int place) {
        int at = start(block);
        while (atomicCAS(&places[at], -1, place) != -1) {
            at = (at + 1) & (size - 1);
        }
    }
    // The place that held `block` when the table was made, if it still does, else -1.
    __device__ __forceinline__ int find(const int* owner, int block) const {
        for (int at = start(block); places[at] != -1; at = (at + 1) & (size - 1)) {
            if (owner[places[at]] == block) {
                return places[at];
            }
        }
        return -1;
    }
};

// Sum of `value` over the threads before this one, and over all. sums: WARPS + 1 words.
__device__ __forceinline__ u32 exclusive_sum(u32 value, u32& total, u32* sums) {
    u32 inclusive = value;
    for (int step = 1; step < WARP; step *= 2) {
        u32 below = __shfl_up_sync(ALL, inclusive, step);
        inclusive += lane_index() >= step ? below : 0;
    }
    int warp = threadIdx.x / WARP;
    if (lane_index() == WARP - 1) {
        sums[warp] = inclusive;
    }
    __syncthreads();
    if (warp == 0) {
        u32 own = sums[lane_index()];
        u32 running = own;
        for (int step = 1; step < WARP; step *= 2) {
            u32 below = __shfl_up_sync(ALL, running, step);
            running += lane_index() >= step ? below : 0;
        }
        sums[lane_index()] = running - own;
        if (lane_index() == WARP - 1) {
            sums[WARPS] = running;
        }
    }
    __syncthreads();
    total = sums[WARPS];
    u32 before = sums[warp] + inclusive - value;
    __syncthreads(); // sums may be used again
    return before;
}

// The key of the count-th largest block, and how many equal to it are among the count largest.
struct Threshold {
    u32 key, equal;
};

__device__ __forceinline__ Threshold nth_largest(const Keys& keys, int count, u32* bins, u32* sums) {
    u32 prefix = 0;
    u32 wanted = static_cast<u32>(count);
    for (int shift = 24; shift >= 0; shift -= 8) {
        if (threadIdx.x < 256) {
            bins[threadIdx.x] = 0;
        }
        __syncthreads();
        u32 above = shift == 24 ? 0 : ~0u << (shift + 8);
        for (int base = 0; base < keys.count; base += THREADS) {
            int block = base + threadIdx.x;
            u32 key = block < keys.count ? keys.key(block) : 0;
            bool counts = block < keys.count && (key & above) == prefix;
            // Scores share few exponents: one lane adds for all of a warp that have the same bin.
            u32 bin = counts ? key >> shift & 0xffu : 256u;
            u32 same = __match_any_sync(ALL, bin);
            if (counts && lane_index() == __ffs(same) - 1) {
                atomicAdd(&bins[bin], __popc(same));
            }
        }
        __syncthreads();
        // Bins from the largest: the one in which the wanted-th key lies.
        u32 own = threadIdx.x < 256 ? bins[255 - threadIdx.x] : 0;
        u32 total;
        u32 before = exclusive_sum(own, total, sums);
        if (threadIdx.x < 256 && before < wanted && wanted <= before + own) {
            sums[WARPS + 2] = 255 - threadIdx.x;
            sums[WARPS + 3] = wanted - before;
        }
        __syncthreads();
        prefix |= sums[WARPS + 2] << shift;
        wanted = sums[WARPS + 3];
        __syncthreads();
    }
    return {prefix, wanted};
}

// Flags and the ascending list of the blocks above the threshold and the first equal ones. A warp
// takes a run of blocks, 32 at a time: a ballot is a word of flags.
__device__ __forceinline__ void choose(const Keys& keys, Threshold threshold, u32* flags,
                                       int* chosen, u32* sums) {
    int warp = threadIdx.x / WARP;
    int run = (keys.count + THREADS - 1) / THREADS * WARP;
    int begin = min(keys.count, warp * run);
    int end = min(keys.count, begin + run);
    u32 above = 0, equal = 0;
    for (int base = begin; base < end; base += WARP) {
        int block = base + lane_index();
        u32 key = block < end ? keys.key(block) : 0;
        above += __popc(__ballot_sync(ALL, block < end && key > threshold.key));
        equal += __popc(__ballot_sync(ALL, block < end && key == threshold.key));
    }
    bool first = lane_index() == 0;
    u32 total;
    above = exclusive_sum(first ? above : 0, total, sums);
    equal = exclusive_sum(first ? equal : 0, total, sums);
    above = __shfl_sync(ALL, above, 0);
    equal = __shfl_sync(ALL, equal, 0);
    u32 at = above + min(equal, threshold.equal);
    u32 lower = (1u << lane_index()) - 1;
    for (int base = begin; base < end; base += WARP) {
        int block = base + lane_index();
        u32 key = block < end ? keys.key(block) : 0;
        u32 same = __ballot_sync(ALL, block < end && key == threshold.key);
        bool taken = block < end && key > threshold.key;
        if (same >> lane_index() & 1u) {
            taken = equal + __popc(same & lower) < threshold.equal;
        }
        equal += __popc(same);
        u32 word = __ballot_sync(ALL, taken);
        if (taken) {
            chosen[at + __popc(word & lower)] = block;
        }
        at += __popc(word);
        if (first) {
            flags[base / 32] = word;
        }
    }
}

// Least first: by mass, then by last use. NaN masses last, but before ~0. Free places are 0.
__device__ __forceinline__ u64 victim_key(float mass, int used) {
    u32 high = mass != mass ? 0xff800001u : ordered(mass);
    return static_cast<u64>(high) << 32 | (static_cast<u32>(used) ^ 0x80000000u);
}

// Bitonic sort (Batcher 1968) of places by (key, place).
__device__ __forceinline__ void sort_places(u64* keys, int* order, int size) {
    for (int at = threadIdx.x; at < size; at += THREADS) {
        order[at] = at;
    }
    for (int run = 2; run <= size; run *= 2) {
        for (int step = run / 2; step > 0; step /= 2) {
            __syncthreads();
            for (int at = threadIdx.x; at < size; at += THREADS) {
                int other = at ^ step;
                if (other > at) {
                    bool greater = keys[at] > keys[other] ||
                                   (keys[at] == keys[other] && order[at] > order[other]);
                    if (greater == ((at & run) == 0)) {
                        u64 key = keys[at];
                        keys[at] = keys[other];
                        keys[other] = key;
                        int place = order[at];
                        order[at] = order[other];
                        order[other] = place;
                    }
                }
            }
        }
    }
    __syncthreads();
}

template <typename T, typename F> __device__ __forceinline__ T reduce(T value, F join, T* parts) {
    for (int step = WARP / 2; step > 0; step /= 2) {
        value = join(value, __shfl_xor_sync(ALL, value, step));
    }
    if (lane_index() == 0) {
        parts[threadIdx.x / WARP] = value;
    }
    __syncthreads();
    value = parts[lane_index()];
    for (int step = WARP / 2; step > 0; step /= 2) {
        value = join(value, __shfl_xor_sync(ALL, value, step));
    }
    __syncthreads();
    return value;
}

// Softmax of the scores, summed over blocks without a flag; in double, in a fixed order. With all
// scores -inf every block counts the same; scores of +inf share everything. 0 if there are no blocks.
__device__ __forceinline__ float share_left_out(const Keys& keys, const u32* flags, double* parts) {
    float best = __uint_as_float(0xff800000u);
    for (int block = threadIdx.x; block < keys.count; block += THREADS) {
        best = fmaxf(best, keys.score(block));
    }
    best = reduce(best, [](float a, float b) { return fmaxf(a, b); },
                  reinterpret_cast<float*>(parts));
    bool is_finite = (__float_as_uint(best) & 0x7f800000u) != 0x7f800000u;
    double all = 0, left = 0;
    for (int block = threadIdx.x; block < keys.count; block += THREADS) {
        float score = keys.score(block);
        double weight = is_finite ? expf(score - best) : (score == best ? 1.0f : 0.0f);
        all += weight;
        left += (flags[block / 32] >> block % 32 & 1u) != 0 ? 0.0 : weight;
    }
    auto add = [](double a, double b) { return a + b; };
    all = reduce(all, add, parts);
    left = reduce(left, add, parts);
    return keys.count == 0 ? 0.0f : static_cast<float>(left / all);
}
