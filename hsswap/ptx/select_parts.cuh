// The parts of select: keys, the owners' table, threshold, compaction, sort, and the share left out.
#pragma once
#include "common.cuh"

#ifndef THREADS
#define THREADS 1024 // select_few.cu takes fewer where they are enough
#endif

constexpr int WARPS = THREADS / WARP;
constexpr int NEW = 1 << 30; // bit of a place that was given to a missing block

// An unsigned integer in the order of the numbers; -0 and 0 are one. NaN must not come in.
__device__ __forceinline__ u32 ordered(float value) {
    u32 bits = __float_as_uint(value + 0.0f); // -0 + 0 is 0
    return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

// A score as a number: -inf for NaN.
__device__ __forceinline__ float number_of(float score) {
    return score != score ? __uint_as_float(0xff800000u) : score;
}

// Scores as keys, kept in shared memory, or in global memory where they are too many.
struct Keys {
    const float* scores;
    u32* kept;
    int count;

    __device__ __forceinline__ u32 key(int block) const { return kept[block]; }
    __device__ __forceinline__ void keep() {
        for (int block = threadIdx.x; block < count; block += THREADS) {
            kept[block] = ordered(number_of(scores[block]));
        }
    }
    // Pinned blocks are above all (+inf is 0xff800000). Any thread, once all keys are kept.
    __device__ __forceinline__ void pin(int block) { kept[block] = 0xffffffffu; }
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

// Sums of `value` over the threads before this one, and over all. sums: WARPS + 1 words. T: u64 for
// two sums of 32 bits side by side.
template <typename T> __device__ __forceinline__ T exclusive_sum(T value, T& total, T* sums) {
    T inclusive = value;
    for (int step = 1; step < WARP; step *= 2) {
        T below = __shfl_up_sync(ALL, inclusive, step);
        inclusive += lane_index() >= step ? below : 0;
    }
    int warp = threadIdx.x / WARP;
    if (lane_index() == WARP - 1) {
        sums[warp] = inclusive;
    }
    __syncthreads();
    // Every warp adds up the warps' sums: cheaper than one that does and a barrier more.
    T own = sums[lane_index()];
    T running = own;
    for (int step = 1; step < WARP; step *= 2) {
        T below = __shfl_up_sync(ALL, running, step);
        running += lane_index() >= step ? below : 0;
    }
    total = __shfl_sync(ALL, running, WARP - 1);
    T before = __shfl_sync(ALL, running - own, warp);
    __syncthreads(); // sums may be used again
    return before + inclusive - value;
}

// The key of the count-th largest block, and how many equal to it are among the count largest.
struct Threshold {
    u32 key, equal;
};

// bins: 4 x 256 zeros. found: 2 words. LAST 16: only the key's upper half is found, the lower is 0.
template <int LAST = 0>
__device__ __forceinline__ Threshold nth_largest(const Keys& keys, int count, u32* bins,
                                                 u32* found) {
    u32 prefix = 0;
    u32 wanted = static_cast<u32>(count);
    for (int shift = 24; shift >= LAST; shift -= 8, bins += 256) {
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
        // Bins from the largest, eight a lane: the one in which the wanted-th key lies.
        if (threadIdx.x < WARP) {
            int top = 255 - 8 * static_cast<int>(threadIdx.x);
            u32 own = 0;
            for (int k = 0; k < 8; k++) {
                own += bins[top - k];
            }
            u32 running = own;
            for (int step = 1; step < WARP; step *= 2) {
                u32 below = __shfl_up_sync(ALL, running, step);
                running += lane_index() >= step ? below : 0;
            }
            u32 before = running - own;
            for (int k = 0; k < 8; k++) {
                u32 here = bins[top - k];
                if (before < wanted && wanted <= before + here) {
                    found[0] = static_cast<u32>(top - k);
                    found[1] = wanted - before;
                }
                before += here;
            }
        }
        __syncthreads();
        prefix |= found[0] << shift;
        wanted = found[1]; // written again only behind the next pass's barrier
    }
    return {prefix, wanted};
}

// Flags and the ascending list of the blocks above the threshold and the first equal ones. A warp
// takes a run of blocks, 32 at a time: a ballot is a word of flags.
__device__ __forceinline__ void choose(const Keys& keys, Threshold threshold, u32* flags,
                                       int* chosen, u64* sums) {
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
    u64 total;
    u64 both = first ? static_cast<u64>(above) << 32 | equal : 0;
    both = __shfl_sync(ALL, exclusive_sum(both, total, sums), 0);
    above = static_cast<u32>(both >> 32);
    equal = static_cast<u32>(both);
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

struct Ranked {
    u64 key;
    int place;

    __device__ __forceinline__ bool after(const Ranked& other) const {
        return key > other.key || (key == other.key && place > other.place);
    }
};

// Bitonic sort (Batcher 1968) of places by (key, place), `size` a power of two; order gets the places.
// Partners within a warp exchange by shuffles, others through shared memory.
__device__ __forceinline__ void sort_places(u64* keys, int* order, int size) {
    for (int at = threadIdx.x; at < size; at += THREADS) {
        order[at] = at;
    }
    __syncthreads();
    for (int run = 2; run <= size; run *= 2) {
        int step = run / 2;
        for (; step >= WARP; step /= 2) {
            for (int at = threadIdx.x; at < size; at += THREADS) {
                int other = at ^ step;
                if (other > at) {
                    Ranked mine{keys[at], order[at]}, theirs{keys[other], order[other]};
                    if (mine.after(theirs) == ((at & run) == 0)) {
                        keys[at] = theirs.key;
                        keys[other] = mine.key;
                        order[at] = theirs.place;
                        order[other] = mine.place;
                    }
                }
            }
            __syncthreads();
        }
        for (int base = 0; base < size; base += THREADS) {
            int at = base + threadIdx.x;
            bool is_in = at < size;
            Ranked mine{is_in ? keys[at] : ~0ull, is_in ? order[at] : 0};
            for (int near = step; near > 0; near /= 2) {
                Ranked theirs{__shfl_xor_sync(ALL, mine.key, near),
                              __shfl_xor_sync(ALL, mine.place, near)};
                bool is_lower = (at & near) == 0;
                bool wants_less = is_lower == ((at & run) == 0);
                if (mine.after(theirs) == wants_less) {
                    mine = theirs;
                }
            }
            if (is_in) {
                keys[at] = mine.key;
                order[at] = mine.place;
            }
        }
        __syncthreads();
    }
}

// The sum or the like over all threads, for all of them. parts: WARPS values.
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
    return value;
}

// Softmax of the shares, summed over blocks without a flag; in double, in a fixed order. With all
// shares -inf every block counts the same; shares of +inf have everything. 0 if there are no blocks.
// parts: 3 x WARPS doubles.
__device__ __forceinline__ float share_left_out(const float* shares, int count, const u32* flags,
                                                double* parts) {
    float best = __uint_as_float(0xff800000u);
    for (int block = threadIdx.x; block < count; block += THREADS) {
        best = fmaxf(best, number_of(shares[block]));
    }
    best = reduce(best, [](float a, float b) { return fmaxf(a, b); },
                  reinterpret_cast<float*>(parts));
    bool is_finite = (__float_as_uint(best) & 0x7f800000u) != 0x7f800000u;
    double all = 0, left = 0;
    for (int block = threadIdx.x; block < count; block += THREADS) {
        float score = number_of(shares[block]);
        float weight = is_finite ? expf(score - best) : (score == best ? 1.0f : 0.0f);
        all += weight;
        left += (flags[block / 32] >> block % 32 & 1u) != 0 ? 0.0f : weight;
    }
    auto add = [](double a, double b) { return a + b; };
    all = reduce(all, add, parts + WARPS);
    left = reduce(left, add, parts + 2 * WARPS);
    return count == 0 ? 0.0f : static_cast<float>(left / all);
}
