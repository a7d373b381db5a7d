// score: how well blocks' codes match a query, per KV head. Two kernels.
//
//   project: projected[q, r] = scale * sum over d of queries[q, d] * matrix[d, r]
//   score:   scores[h, b] = max over t, g of sum over r of
//                           projected[h G + g, r] * codes[index[b], h, t, r]
//
// queries [Q, dk] BF16 with byte strides, matrix [dk, rank] BF16, projected [Q, rank] float32 in the
// stream's workspace, codes [ids, H, T, rank] BF16, scores [H, B] float32 with a row stride. A NaN
// anywhere gives NaN, as NumPy's maximum does. Sums in float32 over d or r in order, so that a score
// does not depend on how many blocks are ranked.
//
// project: a thread block a COLUMNS columns of the matrix, which lies in mapped host memory perhaps, so
// that each byte of it crosses the link twice at most. score: grid (x, H); a lane a token, T tokens of
// a block side by side, the head's projected queries in shared memory, QUERIES of them at a time.
// CHUNK: codes of one load, 8 (16 bytes) or 1. NumPy reference: hsswap.driver.host_ops.score.
#include "score.cuh"

#ifndef CHUNK
#define CHUNK 8
#endif

constexpr int THREADS = 256;
constexpr int COLUMNS = 8;
constexpr int QUERIES = 4;                     // of score at a time
constexpr int QUERY_TILE = THREADS / COLUMNS;  // of project at a time
constexpr int LOADS = 4;                       // in flight of a lane
constexpr int MAX_RANK = 128;
// Thread blocks of score on a multiprocessor; before sm_90 the compiler would spill to fit three. On
// sm_90 NVRTC 13.0 fits four without spills and 13.5 does not; bench/results has the time with four.
#if __CUDA_ARCH__ >= 900
constexpr int SCORE_BLOCKS = 3;
#else
constexpr int SCORE_BLOCKS = 2;
#endif
constexpr int MAX_DIM = 256;

// COLUMNS columns of the matrix as float32; past its last column zeros.
__device__ __forceinline__ void load_columns(const Params& p, int first, float (*slice)[COLUMNS]) {
    if constexpr (CHUNK == 8) {
        for (int d = threadIdx.x; d < p.dim; d += THREADS) {
            Chunk<16> chunk;
            load_chunk(chunk, reinterpret_cast<const u8*>(p.matrix + d * p.rank + first));
            u32 pairs[4] = {chunk.a, chunk.b, chunk.c, chunk.d};
#pragma unroll
            for (int k = 0; k < 4; k++) {
                slice[d][2 * k] = bf16_low(pairs[k]);
                slice[d][2 * k + 1] = bf16_high(pairs[k]);
            }
        }
    } else {
        for (int at = threadIdx.x; at < p.dim * COLUMNS; at += THREADS) {
            int column = first + at % COLUMNS;
            slice[at / COLUMNS][at % COLUMNS] =
                column < p.rank ? bf16_to_float(p.matrix[at / COLUMNS * p.rank + column]) : 0;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    project(const __grid_constant__ Params p) {
    __shared__ float slice[MAX_DIM][COLUMNS];
    // Rows are 16 bytes longer than they need be, so that four of them lie in different banks.
    __shared__ __align__(16) u16 rows[QUERY_TILE][MAX_DIM + 8];
    follow();
    int first = blockIdx.x * COLUMNS;
    load_columns(p, first, slice);
    bool by_16 = p.element_stride == 2 &&
                 (reinterpret_cast<u64>(p.queries) | static_cast<u64>(p.query_stride)) % 16 == 0;
    int column = threadIdx.x % COLUMNS;
    int row = threadIdx.x / COLUMNS;
    for (int base = 0; base < p.q_heads; base += QUERY_TILE) {
        int count = min(QUERY_TILE, p.q_heads - base);
        const u8* queries = p.queries + base * p.query_stride;
        __syncthreads(); // the last tile was read by all
        if (by_16) {
            int chunks = p.dim / 8;
            for (int at = threadIdx.x; at < count * chunks; at += THREADS) {
                int q = at / chunks;
                int d = at % chunks * 8;
                load_chunk(*reinterpret_cast<Chunk<16>*>(&rows[q][d]),
                           queries + q * p.query_stride + d * 2);
            }
        } else {
            for (int at = threadIdx.x; at < count * p.dim; at += THREADS) {
                int q = at / p.dim;
                int d = at % p.dim;
                rows[q][d] = *reinterpret_cast<const u16*>(queries + q * p.query_stride +
                                                           d * p.element_stride);
            }
        }
        __syncthreads();
        float sum = 0;
#pragma unroll 16
        for (int d = 0; d < p.dim; d++) {
            sum = fmaf(half_to_float(rows[row][d]), slice[d][column], sum);
        }
        if (row < count && first + column < p.rank) {
            p.projected[(base + row) * p.rank + first + column] = sum * p.scale;
        }
    }
}

// Codes of one token times the same places of QUERIES projected queries, all of `rank`.
__device__ __forceinline__ void multiply(const u16* code, const float (*query)[MAX_RANK], int rank,
                                         float (&sums)[QUERIES]) {
    if constexpr (CHUNK == 8) {
        for (int base = 0; base < rank; base += LOADS * CHUNK) {
            Chunk<16> chunks[LOADS];
#pragma unroll
            for (int k = 0; k < LOADS; k++) {
                if (base + k * CHUNK < rank) {
                    load_chunk(chunks[k], reinterpret_cast<const u8*>(code + base + k * CHUNK));
                }
            }
#pragma unroll
            for (int k = 0; k < LOADS; k++) {
                int at = base + k * CHUNK;
                if (at < rank) {
                    u32 pairs[4] = {chunks[k].a, chunks[k].b, chunks[k].c, chunks[k].d};
#pragma unroll
                    for (int g = 0; g < QUERIES; g++) {
                        float4 low = *reinterpret_cast<const float4*>(&query[g][at]);
                        float4 high = *reinterpret_cast<const float4*>(&query[g][at + 4]);
                        float values[8] = {low.x,  low.y,  low.z,  low.w,
                                               high.x, high.y, high.z, high.w};
#pragma unroll
                        for (int i = 0; i < 4; i++) {
                            sums[g] = fmaf(bf16_low(pairs[i]), values[2 * i], sums[g]);
                            sums[g] = fmaf(bf16_high(pairs[i]), values[2 * i + 1], sums[g]);
                        }
                    }
                }
            }
        }
    } else {
        for (int at = 0; at < rank; at++) {
            float value = bf16_to_float(code[at]);
#pragma unroll
            for (int g = 0; g < QUERIES; g++) {
                sums[g] = fmaf(value, query[g][at], sums[g]);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, SCORE_BLOCKS)
    score(const __grid_constant__ Params p) {
    __shared__ __align__(16) float queries[QUERIES][MAX_RANK];
    follow();
    int head = blockIdx.y;
    int group = p.q_heads / p.heads;
    // Tokens side by side in a warp: blocks_per_warp blocks of `side` tokens each.
    int side = min(p.block_size, WARP);
    int blocks_per_warp = WARP / side;
    int token = lane_index() % side;
    int stride = static_cast<int>(gridDim.x) * (THREADS / WARP) * blocks_per_warp;
    int mine = (static_cast<int>(blockIdx.x) * (THREADS / WARP) + threadIdx.x / WARP) *
                   blocks_per_warp + lane_index() / side;
    for (int first_query = 0; first_query < group; first_query += QUERIES) {
        __syncthreads(); // all have read the queries before
        for (int at = threadIdx.x; at < QUERIES * p.rank; at += THREADS) {
            // Past the group's end its first query again: a maximum does not mind.
            int g = first_query + at / p.rank < group ? first_query + at / p.rank : 0;
            queries[at / p.rank][at % p.rank] =
                p.projected[(head * group + g) * p.rank + at % p.rank];
        }
        __syncthreads();
        // All lanes of a warp take the same number of turns, for the shuffles.
        for (int b = mine; b - lane_index() / side < p.count; b += stride) {
            int block = p.index[min(b, p.count - 1)];
            bool is_none = block < 0;
            block = max(block, 0);
            const u16* codes =
                p.codes + (static_cast<i64>(block) * p.heads + head) * p.block_size * p.rank;
            float best = 0;
            for (int t = token; t < p.block_size; t += side) {
                float sums[QUERIES] = {};
                multiply(codes + t * p.rank, queries, p.rank, sums);
#pragma unroll
                for (int g = 0; g < QUERIES; g++) {
                    best = t == token && g == 0 ? sums[0] : max_nan(best, sums[g]);
                }
            }
            for (int step = side / 2; step > 0; step /= 2) {
                best = max_nan(best, __shfl_xor_sync(ALL, best, step));
            }
            if (token == 0 && b < p.count) {
                float* out = p.scores + head * p.score_stride + b;
                float all = first_query == 0 ? best : max_nan(*out, best);
                *out = is_none ? __uint_as_float(0xff800000u) : all;
            }
        }
    }
}
