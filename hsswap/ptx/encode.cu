// encode: keys of full blocks times the predictor's matrix.
//
//   codes[code_index[i], h, t, r] = bf16(sum over d of K[host_slots[i], h][t, d] * matrix[d, r])
//
// K [T, dk] BF16, FP16 (FP16 1) or E4M3 (E4M3 1: scales at byte scales_at of the unit, by which the sum is
// multiplied) at the start of unit h of a host slot (mapped memory); matrix [dk, rank] BF16; codes
// [ids, H, T, rank] BF16, contiguous. Sums in float32, over d in order: a code does not depend on how
// many blocks are encoded. Grid: thread blocks of THREADS take (block, head) pairs in turn; each keeps
// the matrix in shared memory, its rows padded to COLUMNS: 2 dk rank bytes, then 2 TILE dk for a tile
// of keys. CHUNK: 16 where the units' addresses divide by it, else 2.
// NumPy reference: hsswap.driver.host_ops.encode.
#include "e4m3.cuh"

#ifndef CHUNK
#define CHUNK 16
#endif

struct Params {
    const u8* blocks;
    const u16* matrix;
    u16* codes;
    const int* host_slots;
    const int* code_index;
    i64 unit_bytes, block_bytes, scales_at;
    int pairs, heads, block_size, dim, rank; // pairs: n * heads
};

constexpr int THREADS = 256;
constexpr int TILE = 16;    // tokens
constexpr int COLUMNS = 4; // of the matrix a thread

extern "C" __global__ void __launch_bounds__(THREADS)
    encode(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) u16 shared[];
    u16* matrix = shared;
    int padded = (p.rank + COLUMNS - 1) / COLUMNS * COLUMNS; // columns of the matrix in shared memory
    u16* keys = shared + p.dim * padded;
    // dk is a multiple of 8, so the matrix is a whole number of 16 bytes.
    if (padded == p.rank && reinterpret_cast<u64>(p.matrix) % 16 == 0) {
        for (int at = 8 * threadIdx.x; at < p.dim * p.rank; at += 8 * THREADS) {
            load_chunk(*reinterpret_cast<Chunk<16>*>(matrix + at),
                       reinterpret_cast<const u8*>(p.matrix + at));
        }
    } else {
        for (int at = threadIdx.x; at < p.dim * padded; at += THREADS) {
            int column = at % padded;
            matrix[at] = column < p.rank ? p.matrix[at / padded * p.rank + column] : 0;
        }
    }
    for (int pair = blockIdx.x; pair < p.pairs; pair += gridDim.x) {
        int i = pair / p.heads;
        int head = pair % p.heads;
        const u8* from = p.blocks + p.host_slots[i] * p.block_bytes + head * p.unit_bytes;
        u16* to = p.codes +
                  (static_cast<i64>(p.code_index[i]) * p.heads + head) * p.block_size * p.rank;
        for (int first = 0; first < p.block_size; first += TILE) {
            int tokens = min(TILE, p.block_size - first);
            __syncthreads(); // the last tile was read by all
#if E4M3
            for (int at = threadIdx.x * 2; at < tokens * p.dim; at += THREADS * 2) {
                u16 codes = *reinterpret_cast<const u16*>(from + first * p.dim + at);
                *reinterpret_cast<u32*>(keys + at) = e4m3_to_f16x2(codes);
            }
#else
            for (int at = threadIdx.x * CHUNK; at < 2 * tokens * p.dim; at += THREADS * CHUNK) {
                auto* to_shared = reinterpret_cast<Chunk<CHUNK>*>(reinterpret_cast<u8*>(keys) + at);
                load_chunk(*to_shared, from + 2 * first * p.dim + at);
            }
#endif
            __syncthreads();
            int quads = padded / COLUMNS;
            for (int at = threadIdx.x; at < tokens * quads; at += THREADS) {
                int token = at / quads;
                int column = at % quads * COLUMNS;
                const u16* key = keys + token * p.dim;
                float sums[COLUMNS] = {};
#pragma unroll 8
                for (int d = 0; d < p.dim; d++) {
                    float value = key_to_float(key[d]);
                    uint2 pairs = *reinterpret_cast<const uint2*>(matrix + d * padded + column);
                    sums[0] = fmaf(value, bf16_low(pairs.x), sums[0]);
                    sums[1] = fmaf(value, bf16_high(pairs.x), sums[1]);
                    sums[2] = fmaf(value, bf16_low(pairs.y), sums[2]);
                    sums[3] = fmaf(value, bf16_high(pairs.y), sums[3]);
                }
                float scale = 1;
#if E4M3
                scale = reinterpret_cast<const float*>(from + p.scales_at)[first + token];
#endif
                for (int k = 0; k < COLUMNS && column + k < p.rank; k++) {
                    to[(first + token) * p.rank + column + k] = float_to_bf16(sums[k] * scale);
                }
            }
        }
    }
}
