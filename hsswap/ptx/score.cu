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
#include "common.cuh"

#ifndef CHUNK
#define CHUNK 8
#endif

struct Params {
    const u8* queries;
    i64 query_stride, element_stride; // bytes
    const u16* matrix;
    float* projected;
    const u16* codes;
    const int* index;
    float* scores;
    i64 score_stride; // floats
    int count, heads, q_heads, block_size, rank, dim;
    float scale;
    int pad;
};

constexpr int THREADS = 256;
constexpr int COLUMNS = 8;
constexpr int QUERIES = 4;
constexpr int MAX_RANK = 128;
constexpr int MAX_DIM = 256;

extern "C" __global__ void __launch_bounds__(THREADS)
    project(const __grid_constant__ Params p) {
    __shared__ float slice[MAX_DIM][COLUMNS];
    int first = blockIdx.x * COLUMNS;
    int columns = min(COLUMNS, p.rank - first);
    for (int at = threadIdx.x; at < p.dim * COLUMNS; at += THREADS) {
        int column = at % COLUMNS;
        slice[at / COLUMNS][column] =
            column < columns ? bf16_to_float(p.matrix[at / COLUMNS * p.rank + first + column]) : 0;
    }
    __syncthreads();
    int column = threadIdx.x % COLUMNS;
    for (int q = threadIdx.x / COLUMNS; q < p.q_heads; q += THREADS / COLUMNS) {
        const u8* query = p.queries + q * p.query_stride;
        float sum = 0;
#pragma unroll 16
        for (int d = 0; d < p.dim; d++) {
            u16 code = *reinterpret_cast<const u16*>(query + d * p.element_stride);
            sum = fmaf(bf16_to_float(code), slice[d][column], sum);
        }
        if (column < columns) {
            p.projected[q * p.rank + first + column] = sum * p.scale;
        }
    }
}

// CHUNK codes of one token times the same places of QUERIES projected queries.
__device__ __forceinline__ void multiply_chunk(const u16* code, const float (*query)[MAX_RANK],
                                               int at, float (&sums)[QUERIES]) {
    float values[CHUNK];
    if constexpr (CHUNK == 8) {
        Chunk<16> chunk;
        load_chunk(chunk, reinterpret_cast<const u8*>(code + at));
        u32 pairs[4] = {chunk.a, chunk.b, chunk.c, chunk.d};
#pragma unroll
        for (int k = 0; k < 4; k++) {
            values[2 * k] = bf16_low(pairs[k]);
            values[2 * k + 1] = bf16_high(pairs[k]);
        }
    } else {
        values[0] = bf16_to_float(code[at]);
    }
#pragma unroll
    for (int g = 0; g < QUERIES; g++) {
#pragma unroll
        for (int k = 0; k < CHUNK; k++) {
            sums[g] = fmaf(values[k], query[g][at + k], sums[g]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    score(const __grid_constant__ Params p) {
    __shared__ __align__(16) float queries[QUERIES][MAX_RANK];
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
            const u16* codes =
                p.codes + (static_cast<i64>(block) * p.heads + head) * p.block_size * p.rank;
            float best = 0;
            for (int t = token; t < p.block_size; t += side) {
                float sums[QUERIES] = {};
                for (int at = 0; at < p.rank; at += CHUNK) {
                    multiply_chunk(codes + t * p.rank, queries, at, sums);
                }
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
                *out = first_query == 0 ? best : max_nan(*out, best);
            }
        }
    }
}
