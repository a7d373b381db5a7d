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
//   5 places    of chosen blocks by the table; missing ones take the first by (free, mass, use, place), in ascending order
//   6 results   slots, flags, share left out
//
// Dynamic shared memory: sort_size keys and places; count places, count blocks; the cache's four
// columns; the table; a bit a block; a key a block where that fits. Grid: H thread blocks of THREADS.
#include "select_cache.cuh"

// 1 and 2. The arrays of `load_cache`, the keys and zeroed flags are in place.
__device__ __forceinline__ void account(const Params& p, int h, const Cache& cache, Table& table,
                                        Keys& scores) {
    for (int i = threadIdx.x; i < p.pinned_count; i += THREADS) {
        int block = p.pinned == nullptr ? p.few_pinned[i] : p.pinned[i];
        if (block >= 0) {
            scores.pin(block);
        }
    }
    Gain first = gain_of(p, h, threadIdx.x);
    insert_owners(p, cache, table);
    __syncthreads();
    add_gains(p, h, cache, table, first);
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
    follow();
    int step = p.steps == nullptr ? p.step : p.steps[h];
    load_cache(p, h, step, cache, Columns(p, h, threadIdx.x));
    scores.keep();
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
