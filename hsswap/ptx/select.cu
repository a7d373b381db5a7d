// select: the best blocks of each KV head, and the places of the head's cache that will hold them.
//
// What is computed: hsswap.driver.operations.SelectWork; NumPy reference hsswap.driver.host_select.
// One thread block a KV head. Scores become integers whose order is the scores' (NaN counts as -inf,
// pinned blocks above all), so that ties and infinities need no case of their own.
//
//   1 table     hash table of the cache's owners: block -> place
//   2 account   masses decay, and gain what attention measured
//   3 threshold the N-th largest key by radix, 8 bits a pass over the scores
//   4 choose    flags as bits, equal keys to the lower block; prefix sums give ascending order
//   5 places    of chosen blocks by the table; missing ones take places by (free, mass, use, place)
//   6 results   slots, flags, share left out
//
// Dynamic shared memory: sort_size keys and places; count places, count blocks; the cache's four
// columns; the table; a bit a block; a key a block where that fits. Grid: H thread blocks of THREADS.
#include "common.cuh"
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
    int pad;
};

// One head's part of the cache, in shared memory while the kernel runs.
struct Cache {
    int* slots;
    int* owner;
    float* mass;
    int* used;
};

// Everything that lies in global or mapped memory and depends on nothing: one latency for all of it.
__device__ __forceinline__ void load(const Params& p, int h, int step, const Cache& cache,
                                     Keys& scores) {
    for (int place = threadIdx.x; place < p.places; place += THREADS) {
        bool is_empty = step == 0;
        cache.slots[place] = p.slots[h * p.slots_stride + place];
        cache.owner[place] = is_empty ? -1 : p.owner[h * p.owner_stride + place];
        cache.mass[place] = is_empty ? 0 : p.mass[h * p.mass_stride + place] * p.decay;
        cache.used[place] = is_empty ? 0 : p.used[h * p.used_stride + place];
    }
    scores.keep();
}

// 1 and 2. The arrays of `load` and zeroed flags are in place.
__device__ __forceinline__ void account(const Params& p, int h, const Cache& cache, Table& table,
                                        Keys& scores) {
    for (int i = threadIdx.x; i < p.pinned_count; i += THREADS) {
        int block = p.pinned == nullptr ? p.few_pinned[i] : p.pinned[i];
        if (block >= 0) {
            scores.pin(block);
        }
    }
    // Asked for before the barrier, used behind it.
    bool has_last = p.last_chosen != nullptr;
    const int* last = p.last_chosen + h * p.last_chosen_stride;
    const float* gained = p.last_mass + h * p.last_mass_stride;
    bool is_mine = has_last && static_cast<int>(threadIdx.x) < p.last_count;
    int first_block = is_mine ? last[threadIdx.x] : -1;
    float first_gain = is_mine ? gained[threadIdx.x] : 0;
    for (int place = threadIdx.x; place < p.places; place += THREADS) {
        if (cache.owner[place] >= 0) {
            table.insert(cache.owner[place], place);
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; has_last && i < p.last_count; i += THREADS) {
        int block = i < THREADS ? first_block : last[i];
        int place = block < 0 ? -1 : table.find(cache.owner, block);
        if (place >= 0) {
            cache.mass[place] += i < THREADS ? first_gain : gained[i];
        }
    }
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
    sort_places(keys, order, p.sort_size);
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

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    select(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) u8 shared[];
    __shared__ u64 sums[WARPS];
    __shared__ u32 found[2];
    __shared__ u32 bins[4 * 256];
    __shared__ double parts[3 * WARPS];
    int h = blockIdx.x;
    u64* keys = reinterpret_cast<u64*>(shared); // sort_size keys, sort_size places
    int* place_of = reinterpret_cast<int*>(shared + 12ll * p.sort_size);
    int* chosen = place_of + p.count;
    int* columns = chosen + p.count;
    Cache cache{columns, columns + p.places, reinterpret_cast<float*>(columns + 2 * p.places),
                columns + 3 * p.places};
    Table table{columns + 4 * p.places, p.table_size};
    u32* flags = reinterpret_cast<u32*>(table.places + p.table_size);
    int words = (p.blocks + 31) / 32;
    u32* kept = p.keys == nullptr ? flags + words : p.keys + static_cast<i64>(h) * p.blocks;
    Keys scores{p.scores + h * p.score_stride, kept, p.blocks};
    int step = p.steps == nullptr ? p.step : p.steps[h];
    load(p, h, step, cache, scores);
    for (int at = threadIdx.x; at < p.table_size; at += THREADS) {
        table.places[at] = -1;
    }
    for (int at = threadIdx.x; at < words; at += THREADS) {
        flags[at] = 0;
    }
    bins[threadIdx.x] = 0;
    __syncthreads();
    account(p, h, cache, table, scores);
    if (p.count != 0) {
        Threshold threshold = nth_largest(scores, p.count, bins, found);
        choose(scores, threshold, flags, chosen, sums);
        __syncthreads();
        place(p, cache, table, chosen, place_of, keys, sums);
        __syncthreads();
    }
    store(p, h, step, cache, chosen, place_of);
    float share = share_left_out(p.shares + h * p.share_stride, p.blocks, flags, parts);
    if (threadIdx.x == 0) {
        p.left_out[h * p.left_out_stride] = share;
        if (p.steps != nullptr) {
            p.steps[h] = step + 1; // all threads are past the barriers behind their load
        }
    }
}
