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
// Dynamic shared memory: sort_size keys and places, count places, count blocks, the table, two bits a
// block, and a key a block where that fits. Grid: H thread blocks of THREADS.
#include "common.cuh"
#include "select_parts.cuh"

struct Params {
    const float* scores;
    const int* slots; // the cache's, [H, C]
    int* owner;
    float* mass;
    int* used;
    const int* pinned;
    const int* last_chosen; // null: none
    const float* last_mass;
    int* chosen;
    int* chosen_slots;
    u8* missing;
    float* left_out;
    i64 score_stride, last_chosen_stride, last_mass_stride, left_out_stride; // elements
    i64 slots_stride, owner_stride, mass_stride, used_stride;
    i64 chosen_stride, chosen_slots_stride, missing_stride;
    int blocks, count, pinned_count, last_count, places, step;
    int table_size, sort_size; // powers of two
    float decay;
    int keep_keys; // whether shared memory holds the keys of all blocks
};

struct Head {
    const float* scores;
    const int* slots;
    int* owner;
    float* mass;
    int* used;
    int* chosen;
    int* chosen_slots;
    u8* missing;
};

__device__ __forceinline__ Head head_of(const Params& p, int h) {
    return {p.scores + h * p.score_stride,
            p.slots + h * p.slots_stride,
            p.owner + h * p.owner_stride,
            p.mass + h * p.mass_stride,
            p.used + h * p.used_stride,
            p.chosen + h * p.chosen_stride,
            p.chosen_slots + h * p.chosen_slots_stride,
            p.missing + h * p.missing_stride};
}

// 1 and 2.
__device__ __forceinline__ void account(const Params& p, const Head& head, int h, Table& table) {
    for (int place = threadIdx.x; place < p.places; place += THREADS) {
        if (p.step == 0) {
            head.owner[place] = -1;
            head.mass[place] = 0;
            head.used[place] = 0;
        } else {
            head.mass[place] *= p.decay;
        }
    }
    __syncthreads();
    for (int place = threadIdx.x; place < p.places; place += THREADS) {
        if (head.owner[place] >= 0) {
            table.insert(head.owner[place], place);
        }
    }
    __syncthreads();
    if (p.last_chosen != nullptr) {
        const int* last = p.last_chosen + h * p.last_chosen_stride;
        const float* gained = p.last_mass + h * p.last_mass_stride;
        for (int i = threadIdx.x; i < p.last_count; i += THREADS) {
            int place = last[i] < 0 ? -1 : table.find(head.owner, last[i]);
            if (place >= 0) {
                head.mass[place] += gained[i];
            }
        }
    }
}

// 5 and 6: places of all chosen blocks, written as slots. place_of and chosen are in shared memory.
__device__ __forceinline__ void place(const Params& p, const Head& head, const Table& table,
                                      const int* chosen, int* place_of, u64* keys, u32* sums) {
    int missing = 0;
    int per_thread = (p.count + THREADS - 1) / THREADS;
    int begin = min(p.count, static_cast<int>(threadIdx.x) * per_thread);
    int end = min(p.count, begin + per_thread);
    for (int entry = begin; entry < end; entry++) {
        int found = table.find(head.owner, chosen[entry]);
        place_of[entry] = found;
        missing += found < 0;
    }
    u32 total;
    u32 nth = exclusive_sum(static_cast<u32>(missing), total, sums);
    if (total != 0) {
        for (int at = threadIdx.x; at < p.sort_size; at += THREADS) {
            keys[at] = ~0ull;
            if (at < p.places) {
                bool is_free = head.owner[at] < 0;
                keys[at] = is_free ? 0 : victim_key(head.mass[at], head.used[at]);
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
                head.owner[taken] = chosen[entry];
                head.mass[taken] = 0;
            }
        }
    }
    for (int entry = begin; entry < end; entry++) {
        int taken = place_of[entry] & ~NEW;
        head.used[taken] = p.step;
        head.chosen[entry] = chosen[entry];
        head.chosen_slots[entry] = head.slots[taken];
        head.missing[entry] = (place_of[entry] & NEW) != 0;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    select(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) u8 shared[];
    __shared__ u32 sums[2 * WARP + 2];
    __shared__ __align__(8) u32 bins[256];
    int h = blockIdx.x;
    Head head = head_of(p, h);
    u64* keys = reinterpret_cast<u64*>(shared); // sort_size keys, sort_size places
    int* place_of = reinterpret_cast<int*>(shared + 12ll * p.sort_size);
    int* chosen = place_of + p.count;
    Table table{chosen + p.count, p.table_size};
    u32* pinned = reinterpret_cast<u32*>(table.places + p.table_size);
    int words = (p.blocks + 31) / 32;
    u32* flags = pinned + words;
    Keys scores{head.scores, pinned, p.keep_keys != 0 ? flags + words : nullptr, p.blocks};
    for (int at = threadIdx.x; at < p.table_size; at += THREADS) {
        table.places[at] = -1;
    }
    for (int at = threadIdx.x; at < 2 * words; at += THREADS) {
        pinned[at] = 0;
    }
    __syncthreads();
    account(p, head, h, table);
    for (int i = threadIdx.x; i < p.pinned_count; i += THREADS) {
        atomicOr(&pinned[p.pinned[i] / 32], 1u << p.pinned[i] % 32);
    }
    __syncthreads();
    if (p.count != 0) {
        scores.keep();
        Threshold threshold = nth_largest(scores, p.count, bins, sums);
        choose(scores, threshold, flags, chosen, sums);
        __syncthreads();
        place(p, head, table, chosen, place_of, keys, sums);
    }
    float share = share_left_out(scores, flags, reinterpret_cast<double*>(bins));
    if (threadIdx.x == 0) {
        p.left_out[h * p.left_out_stride] = share;
    }
}
