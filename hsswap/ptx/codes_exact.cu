// codes_exact: logsumexp of the blocks whose keys are in device slots, for one query.
//
//   exact[q, j] = logsumexp of the logits of pinned block j if the cache holds it, else NaN;
//   exact[q, pinned_count] = that of the block being filled, -inf without one
//
// It follows codes_mass, of which it reads nothing, and may run beside it. queries [Q, dk] BF16 or FP16 with byte strides, exact [Q, pinned_count + 1] float32 in the workspace. Grid
// (pinned_count + 1, H); a warp a query of the group in turns. Shared memory: the group's queries in float32.
// Keys of E4M3 (E4M3 1) have scales at byte scales_at of a unit. CHUNK: 16 where keys in units divide by it. NumPy reference: hsswap.driver.host_codes._exact_logits.
#include "codes.cuh"
#include "e4m3.cuh"

#ifndef CHUNK
#define CHUNK 16
#endif

struct Params {
    const u8* queries;
    i64 query_stride, element_stride; // bytes
    const u8* units;
    i64 unit_bytes, scales_at;
    const int* owner;  // [H, places], null: nothing is held
    const int* slots;  // [H, places]
    const int* pinned; // [pinned_count]
    const int* active; // [H]
    float* exact;
    i64 owner_stride, slot_stride; // items
    int group, dim, block_size, places, pinned_count, active_tokens;
    float scale, soft_cap;
};

constexpr int THREADS = 64;
constexpr int WARPS = THREADS / WARP;

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
            for (int i = lane_index() % 2 * 8; i < p.dim; i += 16) {
                float values[8];
                load_eight(unit, token * p.dim + i, values);
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

extern "C" __global__ void __launch_bounds__(THREADS)
    codes_exact(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) float queries[]; // [group, dk]
    __shared__ int found;
    int head = blockIdx.y;
    int column = blockIdx.x;
    bool is_pinned = column < p.pinned_count;
    launch_next();
    found = -1;
    for (int at = threadIdx.x; at < p.group * p.dim; at += THREADS) {
        const u8* row = p.queries + (head * p.group + at / p.dim) * p.query_stride;
        queries[at] = half_to_float(*reinterpret_cast<const u16*>(row + at % p.dim * p.element_stride));
    }
    int block = is_pinned ? p.pinned[column] : -1;
    __syncthreads();
    // A block lies in one place at most.
    for (int place = threadIdx.x; block >= 0 && p.owner != nullptr && place < p.places; place += THREADS) {
        if (p.owner[head * p.owner_stride + place] == block) {
            found = place;
        }
    }
    __syncthreads();
    int unit = found >= 0 ? p.slots[head * p.slot_stride + found] : -1;
    int tokens = p.block_size;
    if (!is_pinned && p.active_tokens > 0) {
        unit = p.active[head];
        tokens = p.active_tokens;
    }
    // A block that is not held is NaN; no block being filled has no mass.
    float absent = is_pinned ? __int_as_float(0x7fc00000) : -INFINITE;
    const u8* keys = p.units + unit * p.unit_bytes;
    for (int g = threadIdx.x / WARP; g < p.group; g += WARPS) {
        float value = unit >= 0 ? unit_lse(p, queries + g * p.dim, keys, tokens) : absent;
        if (lane_index() == 0) {
            p.exact[(head * p.group + g) * (p.pinned_count + 1) + column] = value;
        }
    }
    if (blockIdx.x == 0 && blockIdx.y == 0) { // one is enough, and others make room
        wait_for_last(); // so that who waits for this kernel waits for codes_mass too
    }
}
