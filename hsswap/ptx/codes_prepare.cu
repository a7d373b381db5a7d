// codes_prepare: what scores of one query need before the codes are read. Jobs, by blockIdx.x, for head
// blockIdx.y:
//
//   one a pinned block, and one more: exact[q, j] = logsumexp of the logits of pinned block j if the
//     cache holds it, else NaN; and, last, of the block being filled, -inf without one
//   one: correction[q, b] = TRUST * (lse[q, e] - predicted[q, b]) / FADE of a block b that the last step
//     attended as its entry e, where that is finite: codes_mass fades all of them; 0 past the blocks if
//     `first`
//   one a query of the group and DIMS code dims: weights[q, k] = (sum over i of q[i] * query[dim_of[k],
//     i]) * 2^bit_of[k] of each bit k of a token's string, and constant[q] = sum over i of q[i] * centre[i]
//   the others: rows[b] = the address of block b's codes, 0 without
//
// queries [Q, dk] BF16 or FP16 with byte strides; weights [Q, 16 P], constant [Q], exact [Q, pinned + 1] float32,
// rows [B] u64 in the workspace. Keys of E4M3 (E4M3 1) have scales at byte scales_at of a unit. predicted and correction [Q, C] float32. CHUNK: 16 where keys in units
// divide by it.
// NumPy reference: hsswap.driver.host_codes.score.
#include "codes.cuh"
#include "e4m3.cuh"

#ifndef CHUNK
#define CHUNK 16
#endif

struct Params {
    const u8* queries;
    i64 query_stride, element_stride; // bytes
    Tables tables;
    const u8* units;
    i64 unit_bytes, scales_at;
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
    u64* rows; // [blocks]
    const u64* pages;
    const int* code_index; // [blocks]
    i64 owner_stride, slot_stride, memory_stride, chosen_stride, lse_stride; // items
    i64 row_bytes;
    int group, block_size, places, pinned_count, active_tokens, entries, blocks, remembered, first;
    int slices;
    float scale, soft_cap;
};

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / WARP;
constexpr int DIMS = 32; // code dims of a job
constexpr int DIMS_A_WARP = DIMS / WARPS;

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) {
        value += __shfl_xor_sync(ALL, value, step);
    }
    return value;
}

__device__ __forceinline__ float query_at(const Params& p, int q, int i) {
    return half_to_float(
        *reinterpret_cast<const u16*>(p.queries + q * p.query_stride + i * p.element_stride));
}

__device__ void make_weights(const Params& p, int head, int g, int slice) {
    __shared__ float of_dim[DIMS];
    const Tables& tables = p.tables;
    int q = head * p.group + g;
    int first = threadIdx.x / WARP * DIMS_A_WARP;
    const float* rows[DIMS_A_WARP];
    float sums[DIMS_A_WARP] = {};
#pragma unroll
    for (int k = 0; k < DIMS_A_WARP; k++) {
        int d = slice * DIMS + first + k;
        rows[k] = d < tables.most ? tables.query(head) + d * tables.dim : tables.centre(head);
    }
#pragma unroll 4
    for (int i = lane_index(); i < tables.dim; i += WARP) {
        float of_query = query_at(p, q, i);
#pragma unroll
        for (int k = 0; k < DIMS_A_WARP; k++) {
            sums[k] = fmaf(of_query, rows[k][i], sums[k]);
        }
    }
#pragma unroll
    for (int k = 0; k < DIMS_A_WARP; k++) {
        sums[k] = warp_sum(sums[k]);
        if (lane_index() == 0) {
            of_dim[first + k] = sums[k];
            if (slice * DIMS + first + k == tables.most) {
                p.constant[q] = sums[k];
            }
        }
    }
    __syncthreads();
    int bits = PLANE_BITS * tables.planes;
    int used = PLANE_BITS * tables.plane_count(head);
    for (int bit = threadIdx.x; bit < bits; bit += THREADS) {
        int d = bit < used ? tables.dim_of(head)[bit] : 0;
        if (d / DIMS == slice) {
            float value = of_dim[d % DIMS] * (1 << tables.bit_of(head)[bit]);
            p.weights[q * bits + bit] = bit < used ? value : 0.0f;
        }
    }
}

// Eight elements of a key, without its scale.
__device__ __forceinline__ void load_eight(const u8* unit, int at, float (&values)[8]) {
#if E4M3
    uint2 codes = *reinterpret_cast<const uint2*>(unit + at);
#pragma unroll
    for (int k = 0; k < 4; k++) {
        u32 pair = e4m3_to_f16x2(static_cast<u16>((k < 2 ? codes.x : codes.y) >> (k % 2 * 16)));
        values[2 * k] = key_to_float(static_cast<u16>(pair));
        values[2 * k + 1] = key_to_float(static_cast<u16>(pair >> 16));
    }
#else
    const u16* from = reinterpret_cast<const u16*>(unit) + at;
    if constexpr (CHUNK == 16) {
        Chunk<16> chunk;
        load_chunk(chunk, reinterpret_cast<const u8*>(from));
        u32 pairs[4] = {chunk.a, chunk.b, chunk.c, chunk.d};
#pragma unroll
        for (int k = 0; k < 4; k++) {
            values[2 * k] = half_to_float(static_cast<u16>(pairs[k]));
            values[2 * k + 1] = half_to_float(static_cast<u16>(pairs[k] >> 16));
        }
    } else {
#pragma unroll
        for (int k = 0; k < 8; k++) {
            values[k] = half_to_float(from[k]);
        }
    }
#endif
}

// Logsumexp of the first `tokens` keys of a unit for one query [dk] in shared memory, the same in all
// lanes. A token a pair of lanes, which take every other eight dims.
__device__ float unit_lse(const Params& p, const float* query, const u8* unit, int tokens) {
    float best = -INFINITE;
    float sum = 0;
    for (int first = 0; first < tokens; first += WARP / 2) {
        int token = first + lane_index() / 2;
        float logit = 0;
        if (token < tokens) {
#pragma unroll 4
            for (int i = lane_index() % 2 * 8; i < p.tables.dim; i += 16) {
                float values[8];
                load_eight(unit, token * p.tables.dim + i, values);
#pragma unroll
                for (int k = 0; k < 8; k++) {
                    logit = fmaf(query[i + k], values[k], logit);
                }
            }
        }
        logit = (logit + __shfl_xor_sync(ALL, logit, 1)) * p.scale;
#if E4M3
        logit *= reinterpret_cast<const float*>(unit + p.scales_at)[min(token, tokens - 1)];
#endif
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
    const u8* keys = p.units + unit * p.unit_bytes;
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

__device__ void correct(const Params& p, int head) {
    for (int g = 0; p.first && g < p.group; g++) {
        float* row = p.correction + (head * p.group + g) * p.memory_stride;
        for (int b = p.blocks + threadIdx.x; b < p.remembered; b += THREADS) {
            row[b] = 0;
        }
    }
    if (p.first || p.chosen == nullptr) {
        return;
    }
    for (int at = threadIdx.x; at < p.entries * p.group; at += THREADS) {
        int entry = at / p.group;
        int q = head * p.group + at % p.group;
        int b = p.chosen[head * p.chosen_stride + entry];
        if (b >= 0 && b < p.blocks) {
            float shown =
                TRUST * (p.lse[q * p.lse_stride + entry] - p.predicted[q * p.memory_stride + b]);
            if (isfinite(shown)) {
                p.correction[q * p.memory_stride + b] = shown / FADE;
            }
        }
    }
}

__device__ void find_rows(const Params& p, int b) {
    if (b < p.blocks) {
        int index = p.tables.base == nullptr ? -1 : p.code_index[b];
        u64 row = index < 0 ? 0 : reinterpret_cast<u64>(codes_of(p.pages, p.row_bytes, index, 0, 0));
        p.rows[b] = row;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 4)
    codes_prepare(const __grid_constant__ Params p) {
    int head = blockIdx.y;
    int job = blockIdx.x;
    int columns = p.pinned_count + 1;
    if (job < columns) {
        exact_masses(p, head, job);
    } else if (job == columns) {
        correct(p, head);
    } else if (job <= columns + p.group * p.slices) {
        job -= columns + 1;
        make_weights(p, head, job % p.group, job / p.group);
    } else {
        job -= columns + 1 + p.group * p.slices;
        find_rows(p, (job * gridDim.y + head) * THREADS + threadIdx.x);
    }
}
