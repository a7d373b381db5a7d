// The parts of select_few.cu up to a list of the best blocks: shared memory, a thread's numbers, bound and cut.
#pragma once
#include "select_cache.cuh"

#ifndef KEYS
#define KEYS 8 // or 4, 16
#endif

constexpr int LISTED = 1024; // candidates
constexpr int TOGETHER = KEYS > 8 ? 4 : 2; // blocks whose best key counts for the bound
constexpr int BESTS = KEYS / TOGETHER;
constexpr int BINS = 256;
constexpr u32 PINNED = 0xffffffffu;
constexpr u32 LEAST = 0x007fffffu; // -inf
constexpr u32 EVERY = 0xffffu;     // of equal keys: all of them
constexpr int NOWHERE = 0xffff;
constexpr int IS_PINNED = 1, IS_CHOSEN = 2; // marks

struct Memory {
    Cache cache;
    u32* list;   // [LISTED or places] keys
    int* listed; // [LISTED] blocks; in the upper half, of what is missing, which it is, from 1
    u32* keys;   // of all blocks; or:
    int* order;  // [N] what missing blocks take
    u16* place_of; // of each block
    u8* marks;     // of each block
    int blocks;    // rounded up to a whole number of 16

    __device__ __forceinline__ Memory(const Params& p, u8* shared) {
        blocks = (p.blocks + 15) / 16 * 16;
        place_of = reinterpret_cast<u16*>(shared);
        marks = reinterpret_cast<u8*>(place_of + blocks);
        list = reinterpret_cast<u32*>(marks + blocks);
        listed = reinterpret_cast<int*>(list + (max(LISTED, p.places) + 3) / 4 * 4);
        order = listed + LISTED;
        keys = reinterpret_cast<u32*>(order);
        int* columns = order + max(p.blocks, p.count);
        cache = {columns, columns + p.places, reinterpret_cast<float*>(columns + 2 * p.places),
                 columns + 3 * p.places};
    }
    // Those of a thread's blocks, a byte each; there is room for whole threads.
    __device__ __forceinline__ void own_marks(u32 (&own)[KEYS / 4]) const {
        const u8* from = marks + KEYS * static_cast<int>(threadIdx.x);
        bool is_there = KEYS * static_cast<int>(threadIdx.x) < blocks;
        if constexpr (KEYS == 16) {
            uint4 four = is_there ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
            own[0] = four.x, own[1] = four.y, own[2] = four.z, own[3] = four.w;
        } else if constexpr (KEYS == 8) {
            uint2 two = is_there ? *reinterpret_cast<const uint2*>(from) : make_uint2(0, 0);
            own[0] = two.x, own[1] = two.y;
        } else {
            own[0] = is_there ? *reinterpret_cast<const u32*>(from) : 0;
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
        if (reinterpret_cast<u64>(from) % 16 == 0 && block(KEYS) <= blocks) {
#pragma unroll
            for (int k = 0; k < KEYS; k += 4) {
                float4 four = *reinterpret_cast<const float4*>(from + block(k));
                values[k] = four.x, values[k + 1] = four.y, values[k + 2] = four.z, values[k + 3] = four.w;
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
// halves of a word may be sums of their own. A barrier is in it.
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
    u32 own = lane_index() < WARPS ? sums[lane_index()] : 0;
    u32 before = __reduce_add_sync(ALL, lane_index() < warp ? own : 0);
    return {before + inclusive - value, __reduce_add_sync(ALL, own)};
}

// The same of two flags a thread, in the halves of a word.
__device__ __forceinline__ Place placed(bool upper, bool lower, u32* sums) {
    u32 high = __ballot_sync(ALL, upper), low = __ballot_sync(ALL, lower), below = (1u << lane_index()) - 1;
    int warp = threadIdx.x / WARP;
    if (lane_index() == 0) {
        sums[warp] = __popc(high) << 16 | __popc(low);
    }
    __syncthreads();
    u32 own = lane_index() < WARPS ? sums[lane_index()] : 0;
    u32 before = __reduce_add_sync(ALL, lane_index() < warp ? own : 0);
    return {before + (__popc(high & below) << 16 | __popc(low & below)), __reduce_add_sync(ALL, own)};
}

// Of a list of keys the n-th largest, or any key at or above which there are n: `equal` is how many of those equal to
// it are among the n largest. 1 <= n <= count; n keys or more are at or above low, and fewer at or above high (else
// high - 1 is the answer). 32 thresholds a turn: above low by `step` each, 0 and later: over all that is left.
// counts: 2 x WARP words.
__device__ __noinline__ Threshold cut(const u32* keys, int count, u32 n, u32 low, u32 high, u32 step, u32* counts) {
    constexpr int TESTS = WARP / WARPS; // thresholds of a warp
    int first = threadIdx.x / WARP * TESTS;
    u32 beyond = 0; // keys at or above high
    for (int turn = 0; high - low > 1; turn ^= WARP) {
        u32 wide = step != 0 ? step : max(1u, (high - low) / (WARP + 1));
        step = 0;
        auto threshold = [&](u32 i) { return i < high - low && i * wide < high - low ? low + i * wide : high; };
        u32 found[TESTS] = {}, least[TESTS];
#pragma unroll
        for (int i = 0; i < TESTS; i++) {
            least[i] = threshold(first + i + 1);
        }
#pragma unroll 4
        for (int at = lane_index(); at < count; at += WARP) {
            u32 key = keys[at];
#pragma unroll
            for (int i = 0; i < TESTS; i++) {
                found[i] += key >= least[i];
            }
        }
#pragma unroll
        for (int i = 0; i < TESTS; i++) {
            found[i] = __reduce_add_sync(ALL, found[i]);
            if (lane_index() == 0) {
                counts[turn + first + i] = found[i];
            }
        }
        __syncthreads();
        u32 here = counts[turn + lane_index()];
        u32 exact = __ballot_sync(ALL, here == n);
        if (exact != 0) {
            return {threshold(__ffs(exact)), EVERY};
        }
        // Thresholds rise, so that counts fall.
        u32 enough = __popc(__ballot_sync(ALL, here >= n));
        u32 lower = min(threshold(enough), high - 1);
        if (enough < WARP) {
            beyond = __shfl_sync(ALL, here, enough);
            high = threshold(enough + 1);
        }
        low = lower;
    }
    return {low, n - beyond};
}

// Of all threads: the largest and least key that counts for the bound, the largest share, the pinned blocks.
struct Extent {
    u32 top, bottom, share, pins;
};

// parts: WARPS words of 16 bytes, not in use by others. A barrier is in it.
__device__ __forceinline__ Extent extent_of(const u32 (&best)[BESTS], u32 share, u32 pins, uint4* parts) {
    u32 top = 0, bottom = ~0u;
#pragma unroll
    for (int i = 0; i < BESTS; i++) {
        top = max(top, best[i] > LEAST ? best[i] : 0);
        bottom = min(bottom, best[i] > LEAST ? best[i] : ~0u);
    }
    top = __reduce_max_sync(ALL, top), bottom = __reduce_min_sync(ALL, bottom);
    share = __reduce_max_sync(ALL, share), pins = __reduce_add_sync(ALL, pins);
    if (lane_index() == 0) {
        parts[threadIdx.x / WARP] = make_uint4(top, bottom, share, pins);
    }
    __syncthreads();
    uint4 own = lane_index() < WARPS ? parts[lane_index()] : make_uint4(0, ~0u, 0, 0);
    return {__reduce_max_sync(ALL, own.x), __reduce_min_sync(ALL, own.y), __reduce_max_sync(ALL, own.z),
            __reduce_add_sync(ALL, own.w)};
}

struct Bound {
    u32 key, step; // step: between keys of two bins
};

// A key that k of the bests are not below, 0 if there are not so many. bins: BINS zeros.
__device__ __forceinline__ Bound bound_of(const u32 (&best)[BESTS], const Extent& extent, u32 k, u32* bins) {
    int shift = max(0, 32 - __clz(extent.top - extent.bottom) - 8); // of BINS
#pragma unroll
    for (int i = 0; i < BESTS; i++) {
        if (best[i] > LEAST) {
            atomicAdd(&bins[(best[i] - extent.bottom) >> shift], 1u);
        }
    }
    __syncthreads();
    // By every warp: that takes less time than to wait for one.
    constexpr int EACH = BINS / WARP;
    u32 own[EACH], sum = 0;
#pragma unroll
    for (int i = 0; i < EACH; i += 4) {
        uint4 four = reinterpret_cast<const uint4*>(bins)[(lane_index() * EACH + i) / 4];
        own[i] = four.x, own[i + 1] = four.y, own[i + 2] = four.z, own[i + 3] = four.w;
        sum += four.x + four.y + four.z + four.w;
    }
    u32 from = sum; // over this lane's bins and all above
#pragma unroll
    for (int step = 1; step < WARP; step *= 2) {
        u32 above = __shfl_down_sync(ALL, from, step);
        from += lane_index() + step < WARP ? above : 0;
    }
    u32 above = from - sum;
    int bin = EACH - 1;
#pragma unroll
    for (int i = EACH - 1; i >= 0; i--) {
        bin = above < k ? i : bin;
        above += own[i];
    }
    u32 key = extent.bottom + (static_cast<u32>(lane_index() * EACH + bin) << shift);
    u32 here = __ballot_sync(ALL, from - sum < k && from >= k);
    key = __shfl_sync(ALL, key, __ffs(here) - 1);
    return {here == 0 ? 0 : key, 1u << shift};
}

// keys[k] of 2 HALF keys, by bits of k and not by an address: keys stay in registers.
template <int HALF> __device__ __forceinline__ u32 pick(const u32* keys, int k) {
    if constexpr (HALF == 0) {
        return keys[0];
    } else {
        u32 left[HALF], other = (k & HALF) != 0 ? ~0u : 0;
#pragma unroll
        for (int i = 0; i < HALF; i++) {
            left[i] = keys[i] ^ ((keys[i] ^ keys[i + HALF]) & other);
        }
        return pick<HALF / 2>(left, k);
    }
}

// Lists the keys at or above `bound` in order of blocks, the first LISTED of them; returns how many there are. They are
// in place after the next barrier.
__device__ __forceinline__ int list_from(const u32 (&keys)[KEYS], u32 bound, const Memory& m, u32* sums) {
    u32 own = 0; // a bit a key
#pragma unroll
    for (int k = 0; k < KEYS; k++) {
        own |= static_cast<u32>(keys[k] >= bound) << k;
    }
    Place place = placed(static_cast<u32>(__popc(own)), sums);
#pragma unroll 1
    for (u32 at = place.before; own != 0 && at < LISTED; own &= own - 1, at++) {
        int k = __ffs(own) - 1;
        m.list[at] = pick<KEYS / 2>(keys, k);
        m.listed[at] = Mine::block(0) + k;
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
#pragma unroll 1
    for (int at = threadIdx.x; at < 4 * 256; at += THREADS) {
        bins[at] = 0;
    }
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

// Of the `count` listed, those above the threshold and the first equal ones, in order of blocks: where the list begins.
// sums: 2 x WARPS words.
__device__ void keep_best(int count, Threshold threshold, const Memory& m, u32* sums) {
    u32 before = 0;
    int turn = 0;
#pragma unroll 1
    for (int base = 0; base < count; base += THREADS, turn ^= WARPS) {
        int from = base + threadIdx.x;
        u32 key = from < count ? m.list[from] : 0;
        int block = from < count ? m.listed[from] : 0;
        Place place = placed(key > threshold.key, key == threshold.key, sums + turn);
        u32 above = (before + place.before) >> 16, equal = (before + place.before) & 0xffffu;
        if (key > threshold.key || (key == threshold.key && equal < threshold.equal)) {
            m.listed[above + min(equal, threshold.equal)] = block; // no entry behind `from`
        }
        before += place.total;
    }
    __syncthreads();
}
