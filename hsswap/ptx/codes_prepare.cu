// codes_prepare: what scores of one query need before the codes are read. Three jobs, by blockIdx.x, for
// head blockIdx.y:
//
//   0: weights[q, bit] = (sum over i of q[i] * query[dim_of[bit], i]) * 2^bit_of[bit], of each bit of a
//      token's string, and constant[q] = sum over i of q[i] * centre[i], for the head's query group
//   1 to pinned + 1: exact[q, j] = logsumexp of the logits of pinned block j, if the cache holds it, else
//      NaN; and, last, of the block being filled, -inf without one
//   more: correction[q, b] = TRUST * (lse[q, e] - predicted[q, b]) of a block b that the last step
//      attended as its entry e, where that is finite, else FADE * correction[q, b]; 0 if `first`
//
// queries [Q, dk] BF16 with byte strides; weights [Q, 16 P], constant [Q], exact [Q, pinned + 1] float32
// in the workspace. predicted and correction [Q, C] float32. A warp a code dim in job 0, a warp a
// query in the next ones, a thread a block in the others. CHUNK: 16 where keys in units divide by it.
// NumPy reference: hsswap.driver.host_codes.score.
#include "codes.cuh"

#ifndef CHUNK
#define CHUNK 16
#endif

struct Params {
    const u8* queries;
    i64 query_stride, element_stride; // bytes
    Tables tables;
    const u8* units;
    i64 unit_bytes;
    const int* owner;  // [H, places], null: nothing is held
    const int* slots;  // [H, places]
    const int* pinned; // [pinned_count]
    const int* active; // [H]
    const float* predicted;
    float* correction;
    const int* chosen; // [H, entries], null: nothing was attended
    const float* lse;  // [Q, entries]
    float* weights;
    float* constant;
    float* exact;
    i64 owner_stride, slot_stride, memory_stride, chosen_stride, lse_stride; // items
    int group, block_size, places, pinned_count, active_tokens, entries, blocks, remembered, first;
    float scale, soft_cap;
};

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / WARP;
constexpr float TRUST = 0.8f;
constexpr float FADE = 0.9f;

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) {
        value += __shfl_xor_sync(ALL, value, step);
    }
    return value;
}

__device__ __forceinline__ float query_at(const Params& p, int q, int i) {
    return bf16_to_float(
        *reinterpret_cast<const u16*>(p.queries + q * p.query_stride + i * p.element_stride));
}

__device__ void make_weights(const Params& p, int head) {
    __shared__ float of_dim[256];
    const Tables& tables = p.tables;
    int lane = lane_index();
    for (int g = 0; g < p.group; g++) {
        int q = head * p.group + g;
        __syncthreads(); // the last query's are used up
        for (int d = threadIdx.x / WARP; d <= tables.most; d += WARPS) {
            const float* row = d < tables.most ? tables.query(head) + d * tables.dim : tables.centre(head);
            float sum = 0;
            for (int i = lane; i < tables.dim; i += WARP) {
                sum = fmaf(query_at(p, q, i), row[i], sum);
            }
            sum = warp_sum(sum);
            if (lane == 0) {
                if (d < tables.most) {
                    of_dim[d] = sum;
                } else {
                    p.constant[q] = sum;
                }
            }
        }
        __syncthreads();
        int bits = PLANE_BITS * tables.planes;
        int used = PLANE_BITS * tables.plane_count(head);
        for (int bit = threadIdx.x; bit < bits; bit += THREADS) {
            float value = of_dim[tables.dim_of(head)[bit]] * (1 << tables.bit_of(head)[bit]);
            p.weights[q * bits + bit] = bit < used ? value : 0.0f;
        }
    }
}

// Eight elements of a key.
__device__ __forceinline__ void load_eight(const u16* from, float (&values)[8]) {
    if constexpr (CHUNK == 16) {
        Chunk<16> chunk;
        load_chunk(chunk, reinterpret_cast<const u8*>(from));
        u32 pairs[4] = {chunk.a, chunk.b, chunk.c, chunk.d};
#pragma unroll
        for (int k = 0; k < 4; k++) {
            values[2 * k] = bf16_low(pairs[k]);
            values[2 * k + 1] = bf16_high(pairs[k]);
        }
    } else {
#pragma unroll
        for (int k = 0; k < 8; k++) {
            values[k] = bf16_to_float(from[k]);
        }
    }
}

// Logsumexp of the first `tokens` keys of a unit for one query [dk] in shared memory, the same in all
// lanes. A token a pair of lanes, which take every other eight dims.
__device__ float unit_lse(const Params& p, const float* query, const u16* keys, int tokens) {
    float best = -INFINITE;
    float sum = 0;
    for (int first = 0; first < tokens; first += WARP / 2) {
        int token = first + lane_index() / 2;
        float logit = 0;
        if (token < tokens) {
#pragma unroll 4
            for (int i = lane_index() % 2 * 8; i < p.tables.dim; i += 16) {
                float values[8];
                load_eight(keys + token * p.tables.dim + i, values);
#pragma unroll
                for (int k = 0; k < 8; k++) {
                    logit = fmaf(query[i + k], values[k], logit);
                }
            }
        }
        logit = (logit + __shfl_xor_sync(ALL, logit, 1)) * p.scale;
        if (p.soft_cap > 0) {
            logit = tanhf(logit / p.soft_cap) * p.soft_cap;
        }
        logit = token < tokens ? logit : -INFINITE;
        float top = logit;
        for (int step = 2; step < WARP; step *= 2) {
            top = max_nan(top, __shfl_xor_sync(ALL, top, step));
        }
        float more = expf(logit - top);
        for (int step = 2; step < WARP; step *= 2) {
            more += __shfl_xor_sync(ALL, more, step);
        }
        float both = max_nan(best, top);
        sum = sum * expf(best - both) + more * expf(top - both);
        best = both;
    }
    return best + logf(sum);
}

// The place in the cache that holds a block for a head, -1: none. The same in all lanes.
__device__ int place_of(const Params& p, int head, int block) {
    if (p.owner == nullptr || block < 0) {
        return -1;
    }
    for (int first = 0; first < p.places; first += WARP) {
        int place = first + lane_index();
        bool here = place < p.places && p.owner[head * p.owner_stride + place] == block;
        u32 votes = __ballot_sync(ALL, here);
        if (votes != 0) {
            return first + __ffs(votes) - 1;
        }
    }
    return -1;
}

__device__ void exact_masses(const Params& p, int head, int column) {
    __shared__ float queries[WARPS][256];
    int warp = threadIdx.x / WARP;
    int columns = p.pinned_count + 1;
    int unit = -1;
    int tokens = p.block_size;
    if (column == p.pinned_count) {
        unit = p.active_tokens > 0 ? p.active[head] : -1;
        tokens = p.active_tokens;
    } else {
        int place = place_of(p, head, p.pinned[column]);
        unit = place >= 0 ? p.slots[head * p.slot_stride + place] : -1;
    }
    // A block that is not held is NaN; no block being filled has no mass.
    float absent = column == p.pinned_count ? -INFINITE : __int_as_float(0x7fc00000);
    const u16* keys = reinterpret_cast<const u16*>(p.units + unit * p.unit_bytes);
    for (int g = warp; g < p.group; g += WARPS) {
        int q = head * p.group + g;
        for (int i = lane_index(); i < p.tables.dim; i += WARP) {
            queries[warp][i] = query_at(p, q, i);
        }
        __syncwarp();
        float value = unit >= 0 ? unit_lse(p, queries[warp], keys, tokens) : absent;
        if (lane_index() == 0) {
            p.exact[q * columns + column] = value;
        }
        __syncwarp();
    }
}

__device__ void correct(const Params& p, int head, int slice, int slices) {
    int length = (p.remembered + slices - 1) / slices;
    int begin = slice * length;
    int end = min(p.remembered, begin + length);
    for (int g = 0; g < p.group; g++) {
        float* row = p.correction + (head * p.group + g) * p.memory_stride;
        for (int b = begin + threadIdx.x; b < end; b += THREADS) {
            row[b] = p.first ? 0.0f : FADE * row[b];
        }
    }
    __syncthreads();
    if (p.first || p.chosen == nullptr) {
        return;
    }
    for (int at = threadIdx.x; at < p.entries * p.group; at += THREADS) {
        int entry = at / p.group;
        int q = head * p.group + at % p.group;
        int b = p.chosen[head * p.chosen_stride + entry];
        if (b >= begin && b < end && b < p.blocks) {
            float shown =
                TRUST * (p.lse[q * p.lse_stride + entry] - p.predicted[q * p.memory_stride + b]);
            if (isfinite(shown)) {
                p.correction[q * p.memory_stride + b] = shown;
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    codes_prepare(const __grid_constant__ Params p) {
    int head = blockIdx.y;
    int job = blockIdx.x;
    int columns = p.pinned_count + 1;
    if (job == 0) {
        if (p.tables.base != nullptr) {
            make_weights(p, head);
        }
    } else if (job <= columns) {
        exact_masses(p, head, job - 1);
    } else {
        correct(p, head, job - 1 - columns, gridDim.x - 1 - columns);
    }
}
