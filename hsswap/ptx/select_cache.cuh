// A head's unit cache in select: parameters, masses, places for what is missing, and the way back.
#pragma once
#include "select_parts.cuh"

struct Params {
    const float* scores;
    const float* shares;
    const int* slots; // the cache's, [H, C]
    int* owner;
    float* mass;
    int* used;
    const int* pinned;
    int* steps;             // [H], read and advanced, or null: `step`
    const int* last_chosen; // null: none
    const float* last_mass;
    int* chosen;
    int* chosen_slots;
    u8* missing;
    float* left_out;
    u32* keys; // [H, blocks], null: in shared memory
    i64 score_stride, share_stride, last_chosen_stride, last_mass_stride, left_out_stride; // elements
    i64 slots_stride, owner_stride, mass_stride, used_stride;
    i64 chosen_stride, chosen_slots_stride, missing_stride;
    int blocks, count, pinned_count, last_count, places, step;
    int table_size, sort_size; // powers of two
    float decay;
    int few_pinned[32]; // the pinned blocks, where `pinned` is null
    int ahead; // 1: the kernel ahead writes nothing of what is read here but scores and shares, and has waited itself
};

// One head's part of the cache, in shared memory while the kernel runs.
struct Cache {
    int* slots;
    int* owner;
    float* mass;
    int* used;
};

// What the last select and fetch left of a place, as it lies in memory.
struct Columns {
    int slot = 0, owner = -1, used = 0;
    float mass = 0;
    __device__ __forceinline__ Columns(const Params& p, int h, int place) {
        if (place < p.places) {
            slot = p.slots[h * p.slots_stride + place];
            owner = p.owner[h * p.owner_stride + place];
            mass = p.mass[h * p.mass_stride + place];
            used = p.used[h * p.used_stride + place];
        }
    }
};

// `first`: of the place of this thread's number.
__device__ __forceinline__ void load_cache(const Params& p, int h, int step, const Cache& cache, Columns first) {
#pragma unroll 1
    for (int place = threadIdx.x; place < p.places; place += THREADS) {
        if (place >= THREADS) {
            first = Columns(p, h, place);
        }
        bool is_empty = step == 0;
        cache.slots[place] = first.slot;
        cache.owner[place] = is_empty ? -1 : first.owner;
        cache.mass[place] = is_empty ? 0 : first.mass * p.decay;
        cache.used[place] = is_empty ? 0 : first.used;
    }
}

// What attention measured of a block, asked for before it is needed.
struct Gain {
    int block;
    float mass;
};

__device__ __forceinline__ Gain gain_of(const Params& p, int h, int i) {
    if (p.last_chosen == nullptr || i >= p.last_count) {
        return {-1, 0};
    }
    return {p.last_chosen[h * p.last_chosen_stride + i], p.last_mass[h * p.last_mass_stride + i]};
}

__device__ __forceinline__ void insert_owners(const Params& p, const Cache& cache, Table& table) {
    for (int place = threadIdx.x; place < p.places; place += THREADS) {
        if (cache.owner[place] >= 0) {
            table.insert(cache.owner[place], place);
        }
    }
}

// `first`: the gain of this thread's number.
__device__ __forceinline__ void add_gains(const Params& p, int h, const Cache& cache,
                                          const Table& table, Gain first) {
    for (int i = threadIdx.x; i < p.last_count; i += THREADS) {
        Gain gain = i < THREADS ? first : gain_of(p, h, i);
        int place = gain.block < 0 ? -1 : table.find(cache.owner, gain.block);
        if (place >= 0) {
            cache.mass[place] += gain.mass;
        }
    }
}

constexpr int FEW_PLACES = 512; // that are ranked by counting: 2 us at 512; more are sorted

// Places in the order in which they are given away, at least the first `wanted` of them.
__device__ __forceinline__ void order_places(u64* keys, int* order, int places, int size, int wanted) {
    if (places > FEW_PLACES) {
        sort_places(keys, order, size);
        return;
    }
    int at = threadIdx.x % FEW_PLACES;
    bool is_mine = at < places && threadIdx.x < FEW_PLACES;
    u64 mine = is_mine ? keys[at] : 0;
    int before = 0;
    if (is_mine) {
#pragma unroll 8
        for (int other = 0; other < places; other++) {
            u64 theirs = keys[other];
            before += theirs < mine || (theirs == mine && other < at);
        }
        if (before < wanted) {
            order[before] = at;
        }
    }
    __syncthreads();
}

// The first `wanted` of them, in the order in which they lie. Overwrites the keys.
__device__ __forceinline__ void by_place(u64* keys, int* order, int places, int wanted, u64* sums) {
    for (int at = threadIdx.x; at < places; at += THREADS) {
        keys[at] = 0;
    }
    __syncthreads();
    for (int at = threadIdx.x; at < wanted; at += THREADS) {
        keys[order[at]] = 1;
    }
    __syncthreads();
    int each = (places + THREADS - 1) / THREADS;
    int begin = min(places, static_cast<int>(threadIdx.x) * each), end = min(places, begin + each);
    u64 own = 0, total;
    for (int at = begin; at < end; at++) {
        own += keys[at];
    }
    u64 before = exclusive_sum(own, total, sums);
    for (int at = begin; at < end; at++) {
        if (keys[at] != 0) {
            order[before++] = at;
        }
    }
    __syncthreads();
}

// 5: the place of every chosen block, with NEW where it was missing.
__device__ __forceinline__ void place(const Params& p, const Cache& cache, const Table& table,
                                      const int* chosen, int* place_of, u64* keys, u64* sums) {
    int missing = 0;
    int per_thread = (p.count + THREADS - 1) / THREADS;
    int begin = min(p.count, static_cast<int>(threadIdx.x) * per_thread);
    int end = min(p.count, begin + per_thread);
    for (int entry = begin; entry < end; entry++) {
        int found = table.find(cache.owner, chosen[entry]);
        place_of[entry] = found;
        missing += found < 0;
    }
    u64 total;
    u64 nth = exclusive_sum(static_cast<u64>(missing), total, sums);
    if (total == 0) {
        return;
    }
    for (int at = threadIdx.x; at < p.sort_size; at += THREADS) {
        keys[at] = ~0ull;
        if (at < p.places) {
            bool is_free = cache.owner[at] < 0;
            keys[at] = is_free ? 0 : victim_key(cache.mass[at], cache.used[at]);
        }
    }
    __syncthreads();
    for (int entry = begin; entry < end; entry++) {
        if (place_of[entry] >= 0) {
            keys[place_of[entry]] = ~0ull; // chosen: kept
        }
    }
    int* order = reinterpret_cast<int*>(keys + p.sort_size);
    __syncthreads();
    order_places(keys, order, p.places, p.sort_size, static_cast<int>(total));
    by_place(keys, order, p.places, static_cast<int>(total), sums);
    for (int entry = begin; entry < end; entry++) {
        if (place_of[entry] < 0) {
            int taken = order[nth++];
            place_of[entry] = taken | NEW;
            cache.owner[taken] = chosen[entry];
            cache.mass[taken] = 0;
        }
    }
}

// 6, and the cache back to where it came from.
__device__ __forceinline__ void store(const Params& p, int h, int step, const Cache& cache,
                                      const int* chosen, const int* place_of) {
    for (int entry = threadIdx.x; entry < p.count; entry += THREADS) {
        int taken = place_of[entry] & ~NEW;
        cache.used[taken] = step;
        p.chosen[h * p.chosen_stride + entry] = chosen[entry];
        p.chosen_slots[h * p.chosen_slots_stride + entry] = cache.slots[taken];
        p.missing[h * p.missing_stride + entry] = (place_of[entry] & NEW) != 0;
    }
    __syncthreads();
    for (int place = threadIdx.x; place < p.places; place += THREADS) {
        p.owner[h * p.owner_stride + place] = cache.owner[place];
        p.mass[h * p.mass_stride + place] = cache.mass[place];
        p.used[h * p.used_stride + place] = cache.used[place];
    }
}
