// select_few: select for lists that fit in registers; a third of the time of select.cu at 2,048 blocks.
//
// What is computed, and the order of keys: select.cu. A thread has up to KEYS blocks, every THREADS-th:
//
//   bound       the upper half of the N-th largest of the threads' best keys: the threshold is not below
//   candidates  keys at or above it, some more than N, into a list; too many: all keys, as select.cu
//   choose      candidates with fewer than N above, by counting, equal ones from the lowest block up; flags as
//               bits, whose prefix sums give ascending order
//
// Dynamic shared memory: as select.cu, and the pins (a bit a block), and the list or all keys. Grid: H
// thread blocks of THREADS. Constant: KEYS. blocks <= KEYS * THREADS, N <= THREADS.
#include "select_cache.cuh"

#ifndef KEYS
#define KEYS 2
#endif

constexpr int LIST = 640; // counting takes 1.5 us for 300 candidates, 5 for all of these

constexpr u32 PINNED = 0xffffffffu;

// Keys of a thread's blocks, pinned ones above all; past the last block 0, below every key.
struct Mine {
    u32 key[KEYS];

    __device__ __forceinline__ static int block(int k) { return k * THREADS + static_cast<int>(threadIdx.x); }

    // NaN as -inf.
    __device__ __forceinline__ void load(const float* scores, int blocks) {
#pragma unroll
        for (int k = 0; k < KEYS; k++) {
            key[k] = block(k) < blocks ? ordered(number_of(scores[block(k)])) : 0;
        }
    }
    // Returns the best.
    __device__ __forceinline__ u32 pin(const u32* pins, int blocks) {
        u32 best = 0;
#pragma unroll
        for (int k = 0; k < KEYS; k++) {
            bool is_pinned = block(k) < blocks && (pins[block(k) / 32] >> block(k) % 32 & 1u) != 0;
            key[k] = is_pinned ? PINNED : key[k];
            best = max(best, key[k]);
        }
        return best;
    }
};

__device__ __forceinline__ void flag(u32* flags, int block) { atomicOr(&flags[block / 32], 1u << block % 32); }

// Of candidates, the `wanted` best, equal ones from the lowest block up. keys: aligned to 16 bytes.
__device__ __forceinline__ void flag_listed(u32* keys, const int* blocks, int count, int wanted, u32* flags) {
    int at = threadIdx.x;
    if (at < 4) {
        keys[count + at] = 0; // to a whole number of four; below every key
    }
    __syncthreads();
    if (at >= count) {
        return;
    }
    u32 mine = keys[at];
    int above = 0, equal = 0;
#pragma unroll 4
    for (int first = 0; first < count; first += 4) {
        uint4 x = *reinterpret_cast<const uint4*>(keys + first);
        above += (x.x > mine) + (x.y > mine) + (x.z > mine) + (x.w > mine);
        equal += (x.x == mine) + (x.y == mine) + (x.z == mine) + (x.w == mine);
    }
    if (above >= wanted) {
        return;
    }
    if (above + equal > wanted) { // not all of the equal ones
        for (int other = 0; other < count; other++) {
            above += keys[other] == mine && blocks[other] < blocks[at];
        }
        if (above >= wanted) {
            return;
        }
    }
    flag(flags, blocks[at]);
}

// The flagged blocks in ascending order.
__device__ __forceinline__ void list_flagged(const u32* flags, int words, int* chosen, u64* sums) {
    int at = threadIdx.x;
    u32 word = at < words ? flags[at] : 0;
    u64 total;
    int place = static_cast<int>(exclusive_sum(static_cast<u64>(__popc(word)), total, sums));
    for (; word != 0; word &= word - 1) {
        chosen[place++] = at * 32 + __ffs(word) - 1;
    }
}

// As share_left_out, in float32, of a thread's own shares. parts: 3 x WARPS floats.
__device__ __forceinline__ float share_out(const float (&mine)[KEYS], const u32* flags, int blocks, float* parts) {
    float best = __uint_as_float(0xff800000u);
#pragma unroll
    for (int k = 0; k < KEYS; k++) {
        if (Mine::block(k) < blocks) {
            best = fmaxf(best, mine[k]);
        }
    }
    best = reduce(best, [](float a, float b) { return fmaxf(a, b); }, parts);
    bool is_finite = (__float_as_uint(best) & 0x7f800000u) != 0x7f800000u;
    float2 sum = {0, 0}; // over all, and over what is left out
#pragma unroll
    for (int k = 0; k < KEYS; k++) {
        int block = Mine::block(k);
        if (block < blocks) {
            float score = mine[k];
            float weight = is_finite ? expf(score - best) : (score == best ? 1.0f : 0.0f);
            sum.x += weight;
            sum.y += (flags[block / 32] >> block % 32 & 1u) == 0 ? weight : 0;
        }
    }
    float2* sums = reinterpret_cast<float2*>(parts + WARPS);
#pragma unroll
    for (int apart = WARP / 2; apart > 0; apart /= 2) {
        sum.x += __shfl_xor_sync(ALL, sum.x, apart);
        sum.y += __shfl_xor_sync(ALL, sum.y, apart);
    }
    if (lane_index() == 0) {
        sums[threadIdx.x / WARP] = sum;
    }
    __syncthreads();
    sum = sums[lane_index()];
#pragma unroll
    for (int apart = WARP / 2; apart > 0; apart /= 2) {
        sum.x += __shfl_xor_sync(ALL, sum.x, apart);
        sum.y += __shfl_xor_sync(ALL, sum.y, apart);
    }
    return blocks == 0 ? 0.0f : sum.y / sum.x;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    select_few(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) u8 shared[];
    __shared__ u64 sums[WARPS];
    __shared__ u32 found[2];
    __shared__ u32 bins[2 * 4 * 256];
    __shared__ __align__(8) float parts[3 * WARPS];
    __shared__ u32 best_keys[THREADS];
    __shared__ int listed;
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
    u32* pins = flags + words;
    // LIST keys and LIST blocks, or a key of every block.
    u32* list_keys = pins + words + (-2 * words - p.table_size - 4 * p.places - 2 * p.count - 3 * p.sort_size & 3);
    int* list_blocks = reinterpret_cast<int*>(list_keys + LIST + 4);
    const float* scores = p.scores + h * p.score_stride;
    follow();
    Mine mine;
    mine.load(scores, p.blocks);
    const float* own_shares = p.shares + h * p.share_stride;
    float shares[KEYS];
#pragma unroll
    for (int k = 0; k < KEYS; k++) {
        shares[k] = Mine::block(k) < p.blocks ? number_of(own_shares[Mine::block(k)]) : 0;
    }
    Gain first = gain_of(p, h, threadIdx.x);
    int step = p.steps == nullptr ? p.step : p.steps[h];
    load_cache(p, h, step, cache);
    for (int at = threadIdx.x; at < p.table_size; at += THREADS) {
        table.places[at] = -1;
    }
    for (int at = threadIdx.x; at < 2 * words; at += THREADS) {
        flags[at] = 0;
    }
    bins[threadIdx.x] = 0;
    bins[THREADS + threadIdx.x] = 0;
    if (threadIdx.x == 0) {
        listed = 0;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < p.pinned_count; i += THREADS) {
        int block = p.pinned == nullptr ? p.few_pinned[i] : p.pinned[i];
        if (block >= 0) {
            flag(pins, block);
        }
    }
    insert_owners(p, cache, table);
    __syncthreads();
    add_gains(p, h, cache, table, first);
    best_keys[threadIdx.x] = mine.pin(pins, p.blocks);
    __syncthreads();
    if (p.count != 0) {
        u32 bound = nth_largest<16>({nullptr, best_keys, THREADS}, p.count, bins, found).key;
#pragma unroll
        for (int k = 0; k < KEYS; k++) {
            bool is_in = Mine::block(k) < p.blocks && mine.key[k] >= bound;
            u32 in = __ballot_sync(ALL, is_in);
            int at = 0;
            if (lane_index() == 0 && in != 0) {
                at = atomicAdd(&listed, __popc(in));
            }
            at = __shfl_sync(ALL, at, 0) + __popc(in & ((1u << lane_index()) - 1));
            if (is_in && at < LIST) {
                list_keys[at] = mine.key[k];
                list_blocks[at] = Mine::block(k);
            }
        }
        __syncthreads();
        int count = listed;
        if (count <= LIST) {
            flag_listed(list_keys, list_blocks, count, p.count, flags);
            __syncthreads();
            list_flagged(flags, words, chosen, sums);
        } else { // many equal scores
#pragma unroll
            for (int k = 0; k < KEYS; k++) {
                if (Mine::block(k) < p.blocks) {
                    list_keys[Mine::block(k)] = mine.key[k];
                }
            }
            __syncthreads();
            Keys all{nullptr, list_keys, p.blocks};
            choose(all, nth_largest(all, p.count, bins + 1024, found), flags, chosen, sums);
        }
        __syncthreads();
        place(p, cache, table, chosen, place_of, keys, sums);
        __syncthreads();
    }
    store(p, h, step, cache, chosen, place_of);
    float share = share_out(shares, flags, p.blocks, parts);
    if (threadIdx.x == 0) {
        p.left_out[h * p.left_out_stride] = share;
        if (p.steps != nullptr) {
            p.steps[h] = step + 1; // all threads are past the barriers behind their load
        }
    }
}
