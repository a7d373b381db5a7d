// select_few: select for lists that fit in registers; a fraction of the time of select.cu.
//
// What is computed, and the order of keys: select.cu. A thread has KEYS blocks in a row:
//
//   1 places     of owners by block, a table as long as the list of blocks
//   2 bound      by a histogram of the best key of each few blocks: k of them are at or above it
//   3 candidates keys at or above it, some more than N, listed in order of blocks; if there are too many, the N
//                best by radix, as in select.cu
//   4 cut        the N-th largest of them, by 32 thresholds at a time
//   5 chosen     those above, and equal ones from the lowest block up
//   6 victims    only where something is missing: a cut again, of masses
//
// Each step waits for the one before: what counts is how few instructions follow each other in a thread, of which a
// multiprocessor starts four at a time. A top-k step over 2,048 blocks: 35.3 us by 512 threads with 4 blocks each, 35.8
// by 256 with 8, 36.3 by 256 with room for 16; by 1,024 select takes a fifth longer.
//
// Dynamic shared memory: `Memory`; hsswap.driver.cuda_top_k.few_bytes says how much. Grid: H thread blocks of THREADS.
// Constants: THREADS (512), KEYS (4, 8, 16). blocks <= KEYS * THREADS, N <= LISTED.
#include "select_lists.cuh"

struct Words { // of a step each
    u32 listed[WARPS], best[WARPS];
    u32 chosen[2 * WARPS], missing[2 * WARPS], victims[2 * WARPS];
    u32 cuts[3][2 * WARP];
};

constexpr u32 FREE = PINNED - 1; // above every mass

// What a place is worth giving away, 0 where a chosen block is: the largest first.
__device__ __forceinline__ u32 worth_of(const Params& p, const Memory& m, int place) {
    int owner = m.cache.owner[place];
    if (owner < 0) {
        return FREE;
    }
    bool is_kept = owner < p.blocks && (m.marks[owner] & IS_CHOSEN) != 0;
    return is_kept ? 0 : ~static_cast<u32>(victim_key(m.cache.mass[place], 0) >> 32);
}

// order[n]: the place that the n-th missing block takes, `wanted` of them of the `all` that no chosen block has.
// Overwrites the list of keys.
__device__ void find_victims(const Params& p, const Memory& m, u32 wanted, u32 all, Words& words) {
#pragma unroll 1
    for (int place = threadIdx.x; place < p.places; place += THREADS) {
        m.list[place] = worth_of(p, m, place);
    }
    __syncthreads();
    Threshold least{1, EVERY};
    if (all > wanted) {
        least = cut(m.list, p.places, wanted, 0, PINNED, 0, words.cuts[1]);
    }
    if (least.equal != EVERY && least.key != FREE) { // of equal masses the least recent use
#pragma unroll 1
        for (int place = threadIdx.x; place < p.places; place += THREADS) {
            u32 worth = m.list[place];
            u32 use = max(1u, ~(static_cast<u32>(m.cache.used[place]) ^ 0x80000000u));
            m.list[place] = worth > least.key ? PINNED : worth == least.key ? use : 0;
        }
        __syncthreads();
        least = cut(m.list, p.places, wanted, 0, PINNED, 0, words.cuts[2]);
    }
    u32 before = 0;
    int turn = 0;
#pragma unroll 1
    for (int base = 0; base < p.places; base += THREADS, turn ^= WARPS) {
        int place = base + threadIdx.x;
        u32 worth = place < p.places ? m.list[place] : 0;
        Place at = placed(worth > least.key, worth == least.key, words.victims + turn);
        u32 above = (before + at.before) >> 16, equal = (before + at.before) & 0xffffu;
        if (worth > least.key || (worth == least.key && equal < least.equal)) {
            m.order[above + min(equal, least.equal)] = place;
        }
        before += at.total;
    }
    __syncthreads();
}

// Shares of a thread's blocks: over all, and over what is left out. best: the largest of all.
__device__ __forceinline__ float2 shares_of(const Mine& shares, float best, const Memory& m, int blocks) {
    bool is_finite = (__float_as_uint(best) & 0x7f800000u) != 0x7f800000u;
    float2 sum = {0, 0};
    u32 marks[KEYS / 4];
    m.own_marks(marks);
#pragma unroll
    for (int k = 0; k < KEYS; k++) {
        float weight = __expf(shares.values[k] - best); // past the last block 0
        if (!is_finite) {
            weight = shares.values[k] == best && Mine::block(k) < blocks ? 1.0f : 0.0f;
        }
        sum.x += weight;
        sum.y += (marks[k / 4] & IS_CHOSEN << 8 * (k % 4)) == 0 ? weight : 0.0f;
    }
    return sum;
}

// Over the first `lanes` lanes, a power of two; in every one of them.
__device__ __forceinline__ float2 add_up(float2 sum, int lanes) {
#pragma unroll
    for (int apart = lanes / 2; apart > 0; apart /= 2) {
        sum.x += __shfl_xor_sync(ALL, sum.x, apart);
        sum.y += __shfl_xor_sync(ALL, sum.y, apart);
    }
    return sum;
}

// What attention measured goes to the block's place, if it has one.
__device__ __forceinline__ void gain(const Params& p, const Memory& m, Gain gained) {
    if (gained.block >= 0 && gained.block < p.blocks) {
        int place = m.place_of[gained.block];
        if (place != NOWHERE) {
            m.cache.mass[place] += gained.mass;
        }
    } else if (gained.block >= 0) { // of a sequence that was cut back since
#pragma unroll 1
        for (int place = 0; place < p.places; place++) {
            if (m.cache.owner[place] == gained.block) {
                m.cache.mass[place] += gained.mass;
            }
        }
    }
}

// Keys of a thread's blocks, and the best of each few that are not pinned.
__device__ __forceinline__ void rank(const Params& p, const Memory& m, const Mine& scores, u32 (&keys)[KEYS],
                                     u32 (&best)[BESTS]) {
#pragma unroll
    for (int k = 0; k < KEYS; k++) {
        keys[k] = ordered(scores.values[k]);
    }
    u32 marks[KEYS / 4], any = 0;
    m.own_marks(marks);
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++) {
        any |= marks[i];
    }
    if (Mine::block(KEYS) > p.blocks || any != 0) {
#pragma unroll
        for (int k = 0; k < KEYS; k++) {
            bool is_pinned = (marks[k / 4] & 0xffu << 8 * (k % 4)) != 0;
            keys[k] = is_pinned ? PINNED : Mine::block(k) < p.blocks ? keys[k] : 0;
        }
    }
#pragma unroll
    for (int i = 0; i < BESTS; i++) {
        best[i] = 0;
#pragma unroll
        for (int k = i * TOGETHER; k < (i + 1) * TOGETHER; k++) {
            best[i] = max(best[i], keys[k] == PINNED ? 0 : keys[k]);
        }
    }
}

// Marks what is chosen and tells attention, what is missing still without a slot; numbers that in the list, and returns
// how much it is.
__device__ __forceinline__ u32 find_missing(const Params& p, const Memory& m, int h, int step, u32* sums) {
    u32 missing = 0;
    int turn = 0;
#pragma unroll 1
    for (int base = 0; base < p.count; base += THREADS, turn ^= WARPS) {
        int at = base + threadIdx.x;
        bool is_missing = false;
        int block = 0;
        if (at < p.count) {
            block = m.listed[at];
            m.marks[block] |= IS_CHOSEN;
            int place = m.place_of[block];
            is_missing = place == NOWHERE;
            store_relaxed(&p.chosen_slots[h * p.chosen_slots_stride + at], is_missing ? UNTOLD : m.cache.slots[place]);
            store_relaxed(&p.missing[h * p.missing_stride + at], is_missing);
            store_relaxed(&p.chosen[h * p.chosen_stride + at], block);
            if (!is_missing) {
                m.cache.used[place] = step;
            }
        }
        Place nth = placed(false, is_missing, sums + turn);
        if (is_missing) {
            m.listed[at] = block | static_cast<int>(missing + nth.before + 1) << 16;
        }
        missing += nth.total;
    }
    return missing;
}

// Places, and slots, of what is missing.
__device__ __forceinline__ void place_missing(const Params& p, const Memory& m, int h, int step) {
#pragma unroll 1
    for (int at = threadIdx.x; at < p.count; at += THREADS) {
        int block = m.listed[at] & 0xffff, nth = m.listed[at] >> 16;
        if (nth != 0) {
            int taken = m.order[nth - 1];
            m.cache.owner[taken] = block;
            m.cache.mass[taken] = 0;
            m.cache.used[taken] = step;
            store_relaxed(&p.chosen_slots[h * p.chosen_slots_stride + at], m.cache.slots[taken]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    select_few(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) u8 shared[];
    __shared__ __align__(16) u32 bins[4 * 256];
    __shared__ uint4 extents[WARPS];
    __shared__ Words words;
    __shared__ float2 parts[WARPS];
    __shared__ u32 found[2];
    int h = blockIdx.x;
    Memory m(p, shared);
    const Cache& cache = m.cache;
    m.clear();
#pragma unroll 1
    for (int at = threadIdx.x; at < BINS; at += THREADS) {
        bins[at] = 0;
    }
    __syncthreads();
    if (p.ahead == 0) {
        wait_for_last();
    }
    Columns own(p, h, threadIdx.x); // asked for before anything waits
    int pinned = -1;
    if (threadIdx.x < p.pinned_count) {
        pinned = p.pinned == nullptr ? p.few_pinned[threadIdx.x] : p.pinned[threadIdx.x];
    }
    Gain first = gain_of(p, h, threadIdx.x);
    int step = p.steps == nullptr ? p.step : p.steps[h];
    load_cache(p, h, step, cache, own);
#pragma unroll 1
    for (int place = threadIdx.x; place < p.places; place += THREADS) {
        int owner = cache.owner[place];
        if (owner >= 0 && owner < p.blocks) {
            m.place_of[owner] = static_cast<u16>(place);
        }
    }
    u32 pins = pinned >= 0;
    if (pinned >= 0) {
        m.marks[pinned] = IS_PINNED;
    }
#pragma unroll 1
    for (int j = THREADS + threadIdx.x; j < p.pinned_count; j += THREADS) {
        if (p.pinned[j] >= 0) {
            m.marks[p.pinned[j]] = IS_PINNED;
            pins++;
        }
    }
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < p.last_count; i += THREADS) {
        gain(p, m, i < THREADS ? first : gain_of(p, h, i));
    }
    if (Mine::block(0) < p.blocks) {
        prefetch(p.scores + h * p.score_stride + Mine::block(0));
        prefetch(p.shares + h * p.share_stride + Mine::block(0));
    }
#pragma unroll 1
    for (int at = threadIdx.x * WARP; at < p.count; at += THREADS * WARP) {
        prefetch(p.chosen_slots + h * p.chosen_slots_stride + at);
        prefetch(p.missing + h * p.missing_stride + at);
    }
    if (p.ahead != 0) {
        wait_for_last();
    }
    Mine scores, shares;
    scores.load(p.scores + h * p.score_stride, p.blocks);
    shares.load(p.shares + h * p.share_stride, p.blocks);
    // Attention that begins before this ends reads each of these once it is told: no longer what the last step left,
    // which is read above.
    if (p.count <= THREADS && threadIdx.x < p.count) {
        p.chosen_slots[h * p.chosen_slots_stride + threadIdx.x] = UNTOLD;
        p.missing[h * p.missing_stride + threadIdx.x] = MISSING_UNTOLD;
        p.chosen[h * p.chosen_stride + threadIdx.x] = UNTOLD;
        __threadfence();
    }
    scores.clean();
    shares.clean();
    u32 keys[KEYS], best[BESTS];
    rank(p, m, scores, keys, best);
    Extent extent = extent_of(best, ordered(shares.largest()), pins, extents);
    launch_next(); // behind a barrier, and so behind all of the above
    if (p.count != 0) {
        u32 k = p.count - extent.pins;
        Bound bound = k == 0 ? Bound{PINNED, 1} : bound_of(best, extent, k, bins);
        int count = list_from(keys, max(bound.key, 1u), m, words.listed);
        if (count > LISTED) { // many equal scores
            list_best(keys, p, m, bins, found, words.best);
            count = p.count;
        }
        __syncthreads();
        if (count > p.count) {
            Threshold threshold = cut(m.list, count, p.count, bound.key, PINNED, bound.step, words.cuts[0]);
            keep_best(count, threshold, m, words.chosen);
        }
        u32 missing = find_missing(p, m, h, step, words.missing);
        if (missing != 0) {
            find_victims(p, m, missing, p.places - p.count + missing, words);
            place_missing(p, m, h, step);
        }
    }
    __syncthreads();
#pragma unroll 1
    for (int place = threadIdx.x; place < p.places; place += THREADS) {
        p.owner[h * p.owner_stride + place] = cache.owner[place];
        p.mass[h * p.mass_stride + place] = cache.mass[place];
        p.used[h * p.used_stride + place] = cache.used[place];
    }
    u32 top = extent.share;
    float largest = __uint_as_float((top & 0x80000000u) != 0 ? top ^ 0x80000000u : ~top);
    float2 sum = add_up(shares_of(shares, largest, m, p.blocks), WARP);
    if (lane_index() == 0) {
        parts[threadIdx.x / WARP] = sum;
    }
    __syncthreads();
    if (threadIdx.x < WARP) {
        sum = add_up(lane_index() < WARPS ? parts[lane_index()] : float2{0, 0}, WARPS);
        if (threadIdx.x == 0) {
            p.left_out[h * p.left_out_stride] = p.blocks == 0 ? 0.0f : sum.y / sum.x;
            if (p.steps != nullptr) {
                p.steps[h] = step + 1; // all threads are past the barriers behind their load
            }
        }
    }
}
