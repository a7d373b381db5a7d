// The parts of select_few.cu up to a list of the best blocks: shared memory, a thread's numbers, bound and cut.
#pragma once
#include "select_cache.cuh"

#ifndef KEYS
#define KEYS 2 // or 4 or 8
#endif

constexpr int LISTED = THREADS; // a candidate a thread
constexpr int BINS = 512;
constexpr u32 PINNED = 0xffffffffu;
constexpr u32 LEAST = 0x007fffffu; // -inf
constexpr int NOWHERE = 0xffff;
constexpr int IS_PINNED = 1, IS_CHOSEN = 2; // marks

struct Memory {
    Cache cache;
    u32* list;   // [LISTED or places] keys
    int* listed; // [the same] blocks or places
    u32* keys;   // of all blocks; or:
    u8* kept;    // [places] whether a chosen block is there
    int* order;  // [N] what missing blocks take
    u16* place_of; // of each block
    u8* marks;     // of each block
    int blocks;    // rounded up to a whole number of 16

    __device__ __forceinline__ Memory(const Params& p, u8* shared) {
        int longest = max(LISTED, p.places);
        blocks = (p.blocks + 15) / 16 * 16;
        place_of = reinterpret_cast<u16*>(shared);
        marks = reinterpret_cast<u8*>(place_of + blocks);
        list = reinterpret_cast<u32*>(marks + blocks);
        listed = reinterpret_cast<int*>(list + longest);
        order = listed + longest;
        kept = reinterpret_cast<u8*>(order + p.count);
        keys = reinterpret_cast<u32*>(order);
        int* columns = order + max(p.blocks, p.count + (p.places + 3) / 4);
        cache = {columns, columns + p.places, reinterpret_cast<float*>(columns + 2 * p.places),
                 columns + 3 * p.places};
    }
    // Those of a thread's blocks, a byte each; there is room for whole threads.
    __device__ __forceinline__ u64 own_marks() const {
        const u8* from = marks + KEYS * static_cast<int>(threadIdx.x);
        if constexpr (KEYS == 8) {
            return *reinterpret_cast<const u64*>(from);
        } else if constexpr (KEYS == 4) {
            return *reinterpret_cast<const u32*>(from);
        } else {
            return *reinterpret_cast<const u16*>(from);
        }
    }
    __device__ __forceinline__ void clear() {
#pragma unroll 1
        for (int at = threadIdx.x; at < blocks / 8; at += THREADS) {
            reinterpret_cast<uint4*>(place_of)[at] = make_uint4(~0u, ~0u, ~0u, ~0u);
        }
#pragma unroll 1
        for (int at = threadIdx.x; at < blocks / 16; at += THREADS) {
            reinterpret_cast<uint4*>(marks)[at] = make_uint4(0, 0, 0, 0);
        }
    }
};

// A thread's numbers: of blocks that are there.
struct Mine {
    float values[KEYS];

    __device__ __forceinline__ static int block(int k) { return KEYS * static_cast<int>(threadIdx.x) + k; }

    __device__ __forceinline__ void load(const float* from, int blocks) {
        constexpr int WIDE = KEYS < 4 ? 2 : 4;
        if (reinterpret_cast<u64>(from) % (4 * WIDE) == 0 && block(KEYS) <= blocks) {
#pragma unroll
            for (int k = 0; k < KEYS; k += WIDE) {
                if constexpr (WIDE == 4) {
                    float4 four = *reinterpret_cast<const float4*>(from + block(k));
                    values[k] = four.x, values[k + 1] = four.y, values[k + 2] = four.z, values[k + 3] = four.w;
                } else {
                    float2 two = *reinterpret_cast<const float2*>(from + block(k));
                    values[k] = two.x, values[k + 1] = two.y;
                }
            }
        } else {
#pragma unroll
            for (int k = 0; k < KEYS; k++) {
                values[k] = block(k) < blocks ? from[block(k)] : __uint_as_float(0xff800000u);
            }
        }
    }
    // NaN as -inf, once all is asked for.
    __device__ __forceinline__ void clean() {
#pragma unroll
        for (int k = 0; k < KEYS; k++) {
            values[k] = fmaxf(values[k], __uint_as_float(0xff800000u)); // of a number and NaN the number
        }
    }
    __device__ __forceinline__ float largest() const {
        float best = values[0];
#pragma unroll
        for (int k = 1; k < KEYS; k++) {
            best = fmaxf(best, values[k]);
        }
        return best;
    }
};

// Sums of `value` over the threads before this one, and over all. sums: WARPS words, not in use by others. Both
// halves of a word may be sums of their own.
struct Place {
    u32 before, total;
};
__device__ __forceinline__ Place placed(u32 value, u32* sums) {
    u32 inclusive = value;
#pragma unroll
    for (int step = 1; step < WARP; step *= 2) {
        u32 below = __shfl_up_sync(ALL, inclusive, step);
        inclusive += lane_index() >= step ? below : 0;
    }
    int warp = threadIdx.x / WARP;
    if (lane_index() == WARP - 1) {
        sums[warp] = inclusive;
    }
    __syncthreads();
    u32 own = sums[lane_index()];
    u32 before = __reduce_add_sync(ALL, lane_index() < warp ? own : 0);
    return {before + inclusive - value, __reduce_add_sync(ALL, own)};
}

// The same of a flag a thread.
__device__ __forceinline__ Place placed(bool flag, u32* sums) {
    u32 flags = __ballot_sync(ALL, flag);
    int warp = threadIdx.x / WARP;
    if (lane_index() == 0) {
        sums[warp] = __popc(flags);
    }
    __syncthreads();
    u32 own = sums[lane_index()];
    u32 before = __reduce_add_sync(ALL, lane_index() < warp ? own : 0);
    return {before + __popc(flags & ((1u << lane_index()) - 1)), __reduce_add_sync(ALL, own)};
}

// The maximum over all threads; parts: WARPS words.
__device__ __forceinline__ u32 largest(u32 value, u32* parts) {
    value = __reduce_max_sync(ALL, value);
    if (lane_index() == 0) {
        parts[threadIdx.x / WARP] = value;
    }
    __syncthreads();
    return __reduce_max_sync(ALL, parts[lane_index()]);
}

// Of a list of keys the n-th largest, or any key at or above which there are n: `equal` is how many of those equal to
// it are among the n largest. 1 <= n <= count; n keys or more are at or above low, and fewer at or above high (else
// high - 1 is the answer). counts: 2 x WARPS words.
__device__ Threshold cut(const u32* keys, int count, u32 n, u32 low, u32 high, u32* counts) {
    int warp = threadIdx.x / WARP;
    u32 beyond = 0; // keys at or above high
    for (int turn = 0; high - low > 1; turn ^= WARPS) {
        u32 step = max(1u, (high - low) / (WARPS + 1));
        auto threshold = [&](u32 i) { return i < high - low && i * step < high - low ? low + i * step : high; };
        u32 mine = threshold(warp + 1);
        u32 found = 0;
#pragma unroll 4
        for (int at = lane_index(); at < count; at += WARP) {
            found += keys[at] >= mine;
        }
        found = __reduce_add_sync(ALL, found);
        if (lane_index() == 0) {
            counts[turn + warp] = found;
        }
        __syncthreads();
        found = counts[turn + lane_index()];
        u32 exact = __ballot_sync(ALL, found == n);
        if (exact != 0) {
            return {threshold(__ffs(exact)), 0xffffu};
        }
        // Thresholds rise, so that counts fall.
        u32 enough = __popc(__ballot_sync(ALL, found >= n));
        u32 lower = min(threshold(enough), high - 1);
        if (enough < WARPS) {
            beyond = __shfl_sync(ALL, found, enough);
            high = threshold(enough + 1);
        }
        low = lower;
    }
    return {low, n - beyond};
}

// A key that k of the threads' bests are not below, 0 if there are not so many. bins: BINS + 1 zeros.
__device__ __forceinline__ u32 bound_of(u32 best, int k, u32* bins, u32* parts) {
    bool counts = best > LEAST;
    u32 top = largest(counts ? best : 0, parts);
    u32 bottom = ~largest(counts ? ~best : 0, parts + WARPS);
    int shift = max(0, 32 - __clz(top - bottom) - 9); // of BINS
    if (counts) {
        atomicAdd(&bins[(best - bottom) >> shift], 1u);
    }
    __syncthreads();
    if (threadIdx.x < WARP) {
        constexpr int OWN = BINS / WARP;
        u32 own[OWN], sum = 0;
#pragma unroll
        for (int i = 0; i < OWN; i += 4) {
            uint4 four = reinterpret_cast<const uint4*>(bins)[(threadIdx.x * OWN + i) / 4];
            own[i] = four.x, own[i + 1] = four.y, own[i + 2] = four.z, own[i + 3] = four.w;
            sum += four.x + four.y + four.z + four.w;
        }
        u32 from = sum; // over this lane's bins and all above
#pragma unroll
        for (int step = 1; step < WARP; step *= 2) {
            u32 above = __shfl_down_sync(ALL, from, step);
            from += lane_index() + step < WARP ? above : 0;
        }
        u32 wanted = static_cast<u32>(k);
        u32 above = from - sum;
        if (above < wanted && from >= wanted) {
            int bin = OWN - 1;
#pragma unroll
            for (int i = OWN - 1; i >= 0; i--) {
                bin = above < wanted ? i : bin;
                above += own[i];
            }
            bins[BINS] = bottom + ((threadIdx.x * OWN + bin) << shift);
        }
    }
    __syncthreads();
    return bins[BINS];
}

// Lists the keys at or above `bound` in order of blocks, the first LISTED of them; returns how many there are. They are
// in place after the next barrier.
__device__ __forceinline__ int list_from(const u32 (&keys)[KEYS], u32 bound, const Memory& m, u32* sums) {
    u32 own = 0;
#pragma unroll
    for (int k = 0; k < KEYS; k++) {
        own += keys[k] >= bound;
    }
    Place place = placed(own, sums);
    u32 at = place.before;
#pragma unroll
    for (int k = 0; k < KEYS; k++) {
        if (keys[k] >= bound) {
            if (at < LISTED) {
                m.list[at] = keys[k];
                m.listed[at] = Mine::block(k);
            }
            at++;
        }
    }
    return static_cast<int>(place.total);
}

// Where too many are: the keys above the threshold and the first equal ones, `count` in all.
__device__ void list_best(const u32 (&keys)[KEYS], const Params& p, const Memory& m, u32* bins, u32* found, u32* sums) {
#pragma unroll
    for (int k = 0; k < KEYS; k++) {
        if (Mine::block(k) < p.blocks) {
            m.keys[Mine::block(k)] = keys[k];
        }
    }
    bins[threadIdx.x] = 0;
    __syncthreads();
    Threshold threshold = nth_largest({nullptr, m.keys, p.blocks}, p.count, bins, found);
    u32 own = 0;
#pragma unroll
    for (int k = 0; k < KEYS; k++) {
        own += keys[k] > threshold.key ? 0x10000u : keys[k] == threshold.key ? 1u : 0u;
    }
    u32 before = placed(own, sums).before;
    u32 above = before >> 16, equal = before & 0xffffu;
#pragma unroll
    for (int k = 0; k < KEYS; k++) {
        bool is_equal = keys[k] == threshold.key;
        if (keys[k] > threshold.key || (is_equal && equal < threshold.equal)) {
            u32 at = above + min(equal, threshold.equal);
            m.list[at] = keys[k];
            m.listed[at] = Mine::block(k);
        }
        above += keys[k] > threshold.key;
        equal += is_equal;
    }
}
