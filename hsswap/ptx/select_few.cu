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
#include "select_lists.cuh"

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
