// select_few: select for lists that fit in registers; a fraction of the time of select.cu.
//
// What is computed, and the order of keys: select.cu. A thread has KEYS blocks in a row:
//
//   1 places     of owners by block, a table as long as the list of blocks
//   2 bound      by a histogram of the threads' best keys: k of them are at or above it
//   3 candidates keys at or above it, some more than N, listed in order of blocks; if there are too many, the N
//                best by radix, as in select.cu
//   4 cut        the N-th largest of them, by 32 thresholds at a time, a warp each
//   5 chosen     those above, and equal ones from the lowest block up
//   6 victims    only where something is missing
//
// Dynamic shared memory: `Memory`; hsswap.driver.cuda_top_k.few_bytes says how much. Grid: H thread blocks of THREADS. Constant: KEYS.
// blocks <= KEYS * THREADS, N <= THREADS.
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

// order[n]: the place that the n-th missing block takes, `wanted` of them, none that is kept. Overwrites both lists.
__device__ void find_victims(const Params& p, const Memory& m, u32 wanted, u32* counts, int* listed) {
    const Cache& cache = m.cache;
#pragma unroll 1
    for (int base = 0; base < p.places; base += THREADS) {
        int place = base + threadIdx.x;
        bool is_in = place < p.places && m.kept[place] == 0;
        u32 in = __ballot_sync(ALL, is_in);
        int at = 0;
        if (lane_index() == 0 && in != 0) {
            at = atomicAdd(listed, __popc(in));
        }
        at = __shfl_sync(ALL, at, 0) + __popc(in & ((1u << lane_index()) - 1));
        if (is_in) {
            u64 key = cache.owner[place] < 0 ? 0 : victim_key(cache.mass[place], cache.used[place]);
            m.list[at] = ~static_cast<u32>(key >> 32); // the least first
            m.listed[at] = place;
        }
    }
    __syncthreads();
    int count = *listed;
    u32 least = cut(m.list, count, wanted, 0, PINNED, counts).key;
    // When a block of equal mass was used, which decides among few.
    auto use_of = [&](int place) {
        return cache.owner[place] < 0 ? 0 : static_cast<u32>(cache.used[place]) ^ 0x80000000u;
    };
    for (int base = threadIdx.x / WARP * WARP; base < count; base += THREADS) {
        int at = base + lane_index();
        u32 candidates = __ballot_sync(ALL, at < count && m.list[min(at, count - 1)] >= least);
        for (; candidates != 0; candidates &= candidates - 1) { // each by the whole warp
            int mine = base + __ffs(candidates) - 1;
            u32 key = m.list[mine];
            int place = m.listed[mine];
            u32 before = 0;
#pragma unroll 1
            for (int other = lane_index(); other < count; other += WARP) {
                u32 theirs = m.list[other];
                before += theirs > key;
                if (theirs == key && other != mine) {
                    int their_place = m.listed[other];
                    u32 use = use_of(place), their_use = use_of(their_place);
                    before += their_use < use || (their_use == use && their_place < place);
                }
            }
            before = __reduce_add_sync(ALL, before);
            if (before < wanted) {
                m.order[before] = place;
            }
        }
    }
    __syncthreads();
}

// As share_left_out, in float32, of a thread's own shares. best: the largest of all. parts: WARPS pairs.
__device__ __forceinline__ float share_out(const Mine& shares, float best, const Memory& m, int blocks, float2* parts) {
    bool is_finite = (__float_as_uint(best) & 0x7f800000u) != 0x7f800000u;
    float2 sum = {0, 0}; // over all, and over what is left out
    u64 marks = Mine::block(0) < blocks ? m.own_marks() : 0;
#pragma unroll
    for (int k = 0; k < KEYS; k++) {
        float weight = __expf(shares.values[k] - best); // past the last block 0
        if (!is_finite) {
            weight = shares.values[k] == best && Mine::block(k) < blocks ? 1.0f : 0.0f;
        }
        sum.x += weight;
        sum.y += (static_cast<u32>(marks >> 32 * (k / 4)) & IS_CHOSEN << 8 * (k % 4)) == 0 ? weight : 0.0f;
    }
#pragma unroll
    for (int apart = WARP / 2; apart > 0; apart /= 2) {
        sum.x += __shfl_xor_sync(ALL, sum.x, apart);
        sum.y += __shfl_xor_sync(ALL, sum.y, apart);
    }
    if (lane_index() == 0) {
        parts[threadIdx.x / WARP] = sum;
    }
    __syncthreads();
    if (threadIdx.x >= WARP) {
        return 0;
    }
    sum = parts[lane_index()];
#pragma unroll
    for (int apart = WARP / 2; apart > 0; apart /= 2) {
        sum.x += __shfl_xor_sync(ALL, sum.x, apart);
        sum.y += __shfl_xor_sync(ALL, sum.y, apart);
    }
    return blocks == 0 ? 0.0f : sum.y / sum.x;
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

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    select_few(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) u8 shared[];
    __shared__ __align__(16) u32 bins[4 * 256];
    __shared__ u32 words[12 * WARPS]; // of a step each
    __shared__ float2 parts[WARPS];
    __shared__ u32 found[2];
    __shared__ int listed;
    int h = blockIdx.x;
    Memory m(p, shared);
    const Cache& cache = m.cache;
    m.clear();
    bins[threadIdx.x] = 0;
    listed = 0;
    int pins = 0;
    wait_for_last();
    launch_next();
    Columns own(p, h, threadIdx.x); // asked for before anything waits
    Mine scores, shares;
    scores.load(p.scores + h * p.score_stride, p.blocks);
    shares.load(p.shares + h * p.share_stride, p.blocks);
    int pinned = -1;
    if (threadIdx.x < p.pinned_count) {
        pinned = p.pinned == nullptr ? p.few_pinned[threadIdx.x] : p.pinned[threadIdx.x];
    }
    Gain first = gain_of(p, h, threadIdx.x);
    int step = p.steps == nullptr ? p.step : p.steps[h];
    load_cache(p, h, step, cache, own);
    scores.clean();
    shares.clean();
    __syncthreads(); // cleared
#pragma unroll 1
    for (int place = threadIdx.x; place < p.places; place += THREADS) {
        int owner = cache.owner[place];
        if (owner >= 0 && owner < p.blocks) {
            m.place_of[owner] = static_cast<u16>(place);
        }
    }
    if (pinned >= 0) {
        m.marks[pinned] = IS_PINNED;
        pins++;
    }
#pragma unroll 1
    for (int j = THREADS + threadIdx.x; j < p.pinned_count; j += THREADS) {
        if (p.pinned[j] >= 0) {
            m.marks[p.pinned[j]] = IS_PINNED;
            pins++;
        }
    }
    u32 top_share = largest(ordered(shares.largest()), words); // and a barrier
#pragma unroll 1
    for (int i = threadIdx.x; i < p.last_count; i += THREADS) {
        gain(p, m, i < THREADS ? first : gain_of(p, h, i));
    }
    u32 keys[KEYS], best = 0; // best: of those that are not pinned
#pragma unroll
    for (int k = 0; k < KEYS; k++) {
        keys[k] = ordered(scores.values[k]);
    }
    bool is_plain = Mine::block(KEYS) <= p.blocks && m.own_marks() == 0;
    if (is_plain) {
        best = ordered(scores.largest());
    } else {
#pragma unroll
        for (int k = 0; k < KEYS; k++) {
            bool is_there = Mine::block(k) < p.blocks;
            bool is_pinned = is_there && m.marks[Mine::block(k)] != 0;
            best = is_there && !is_pinned ? max(best, keys[k]) : best;
            keys[k] = is_pinned ? PINNED : is_there ? keys[k] : 0;
        }
    }
    int taken = -1; // the place of this thread's chosen block
    int block = -1, at = 0;
    bool is_chosen = false, is_missing = false;
    if (p.count != 0) {
        int k = p.count - static_cast<int>(placed(static_cast<u32>(pins), words + WARPS).total);
        u32 bound = k == 0 ? PINNED : bound_of(best, k, bins, words + 2 * WARPS);
        int count = list_from(keys, max(bound, 1u), m, words + 4 * WARPS);
        if (count > LISTED) { // many equal scores
            list_best(keys, p, m, bins, found, words + 5 * WARPS);
            count = p.count;
        }
        __syncthreads();
        Threshold threshold{1, 0xffffu};
        if (count > p.count) {
            threshold = cut(m.list, count, p.count, bound, PINNED, words + 6 * WARPS);
        }
        u32 key = threadIdx.x < count ? m.list[threadIdx.x] : 0;
        block = threadIdx.x < count ? m.listed[threadIdx.x] : -1;
        bool is_above = key > threshold.key, is_equal = key == threshold.key;
        u32 both = is_above ? 0x10000u : is_equal ? 1u : 0u;
        Place place = placed(both, words + 8 * WARPS);
        u32 equal = place.before & 0xffffu;
        is_chosen = is_above || (is_equal && equal < threshold.equal);
        at = static_cast<int>((place.before >> 16) + min(equal, threshold.equal));
        if (is_chosen) {
            m.marks[block] |= IS_CHOSEN;
            int held = m.place_of[block];
            is_missing = held == NOWHERE;
            taken = is_missing ? -1 : held;
        }
        if (__syncthreads_or(is_missing)) {
            for (int i = threadIdx.x; i < p.places; i += THREADS) {
                m.kept[i] = 0;
            }
            __syncthreads();
            if (taken >= 0) {
                m.kept[taken] = 1;
            }
            Place nth = placed(is_missing, words + 9 * WARPS); // and a barrier
            find_victims(p, m, nth.total, words + 10 * WARPS, &listed);
            if (is_missing) {
                taken = m.order[nth.before];
                cache.owner[taken] = block;
                cache.mass[taken] = 0;
            }
        }
    }
    if (is_chosen) {
        cache.used[taken] = step;
        p.chosen[h * p.chosen_stride + at] = block;
        p.chosen_slots[h * p.chosen_slots_stride + at] = cache.slots[taken];
        p.missing[h * p.missing_stride + at] = is_missing;
    }
    __syncthreads();
#pragma unroll 1
    for (int place = threadIdx.x; place < p.places; place += THREADS) {
        p.owner[h * p.owner_stride + place] = cache.owner[place];
        p.mass[h * p.mass_stride + place] = cache.mass[place];
        p.used[h * p.used_stride + place] = cache.used[place];
    }
    float best_share = __uint_as_float((top_share & 0x80000000u) != 0 ? top_share ^ 0x80000000u : ~top_share);
    float share = share_out(shares, best_share, m, p.blocks, parts);
    if (threadIdx.x == 0) {
        p.left_out[h * p.left_out_stride] = share;
        if (p.steps != nullptr) {
            p.steps[h] = step + 1; // all threads are past the barriers behind their load
        }
    }
}
