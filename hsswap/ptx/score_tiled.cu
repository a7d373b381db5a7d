// score_tiled: project and score of score.cu in one launch, by matrix steps: blocks of whole 16 tokens, ranks of whole
// 32, dims of whole 16, groups up to 8, BF16.
//
//   scores[h, b] = max over t, g of sum over r of projected[h G + g, r] * codes[index[b], h, t, r]
//   projected    = scale * queries * matrix
//
// Parameters: score.cuh. Shapes: score.cu. S = C q^T: 16 tokens are rows, the queries of the group columns (the last one again
// past their end: a maximum does not mind). A projected query is the sum of two BF16 numbers, so that products are exact
// to 2^-16 of it; codes that are infinite may give NaN. Lane (g, c) = (lane / 4, lane % 4) loads the 16-byte chunks c,
// c + 4, ... of the codes of tokens g and g + 8: the order of r in a step is a permutation, the same for both operands.
// A warp has BLOCKS blocks in flight, the first of them while the thread block projects, and the next while it matches.
//
// Grid: x: thread blocks that take BLOCKS blocks a warp in turn, WARPS warps; y: H. Constants: RANK, DIM. Shared memory: the head's queries [16][DIM + 8]
// and the matrix [DIM][RANK + 8] BF16, projected queries [8][RANK] float32. NumPy reference: hsswap.driver.host_ops.score.
#include "score.cuh"

#ifndef RANK
#define RANK 32
#define DIM 128
#endif

constexpr int WARPS = 8;
constexpr int CHUNKS = RANK / 32; // of a lane and token
constexpr int BLOCKS = CHUNKS == 1 ? 4 : CHUNKS == 2 ? 2 : 1;
constexpr u32 MINUS_INFINITY = 0xff800000u;

__device__ __forceinline__ void step(float (&s)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// A number as two of BF16; the second is 0 where the first is not finite.
struct Split {
    u16 high, low;
};

__device__ __forceinline__ Split split(float value) {
    u16 high = float_to_bf16(value);
    bool is_finite = (high & 0x7f80u) != 0x7f80u;
    return {high, is_finite ? float_to_bf16(value - bf16_to_float(high)) : static_cast<u16>(0)};
}

// Column g of the projected queries, pairs as the codes' chunks have them.
struct Query {
    u32 high[CHUNKS][4], low[CHUNKS][4];
};

__device__ __forceinline__ void load_query(Query& q, const float (*projected)[RANK], int group) {
    int g = lane_index() / 4, c = lane_index() % 4;
    const float* row = projected[min(g, group - 1)];
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
        const float2* pairs = reinterpret_cast<const float2*>(row + i * 32 + c * 8);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            float2 pair = pairs[k];
            Split even = split(pair.x), odd = split(pair.y);
            q.high[i][k] = even.high | static_cast<u32>(odd.high) << 16;
            q.low[i][k] = even.low | static_cast<u32>(odd.low) << 16;
        }
    }
}

constexpr int Q_ROW = DIM + 8, M_ROW = RANK + 8; // 16 bytes of padding: neighbouring rows in other banks

// The group's queries and the matrix into shared memory.
__device__ __forceinline__ void stage(const Params& p, int head, int group, u16 (*queries)[Q_ROW],
                                      u16 (*matrix)[M_ROW]) {
    for (int at = threadIdx.x; at < DIM * (RANK / 8); at += WARPS * WARP) {
        int d = at / (RANK / 8), r = at % (RANK / 8) * 8;
        load_chunk(*reinterpret_cast<Chunk<16>*>(&matrix[d][r]),
                   reinterpret_cast<const u8*>(p.matrix + d * RANK + r));
    }
    for (int at = threadIdx.x; at < 16 * DIM; at += WARPS * WARP) {
        int g = at / DIM, d = at % DIM;
        u16 value = 0;
        if (g < group) {
            value = *reinterpret_cast<const u16*>(p.queries + (head * group + g) * p.query_stride +
                                                  d * p.element_stride);
        }
        queries[g][d] = value;
    }
}

// Columns 8 n ... 8 n + 7 of the projected queries, by a warp.
__device__ __forceinline__ void project_columns(const u16 (*queries)[Q_ROW], const u16 (*matrix)[M_ROW],
                                                float (*projected)[RANK], int n, float scale) {
    int lane = lane_index();
    float s[4] = {};
#pragma unroll
    for (int d = 0; d < DIM; d += 16) {
        u32 a[4], b0, b1;
        u32 from = static_cast<u32>(__cvta_generic_to_shared(&queries[lane & 15][d + (lane >> 4) * 8]));
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                     : "r"(from)
                     : "memory");
        from = static_cast<u32>(__cvta_generic_to_shared(&matrix[d + (lane & 15)][n * 8]));
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                     : "=r"(b0), "=r"(b1)
                     : "r"(from)
                     : "memory");
        step(s, a, b0, b1);
    }
    int g = lane / 4, c = lane % 4;
    projected[g][n * 8 + 2 * c] = s[0] * scale;
    projected[g][n * 8 + 2 * c + 1] = s[1] * scale;
}

// The codes of a tile of 16 tokens of a warp's blocks.
struct Codes {
    Chunk<16> x[BLOCKS][2][CHUNKS];
};

__device__ __forceinline__ void load_codes(Codes& codes, const Params& p, const int (&index)[BLOCKS], int head, int tile) {
    int g = lane_index() / 4, c = lane_index() % 4;
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
        const u16* from = p.codes + (static_cast<i64>(max(index[b], 0)) * p.heads + head) * p.block_size * RANK;
#pragma unroll
        for (int y = 0; y < 2; y++) {
#pragma unroll
            for (int i = 0; i < CHUNKS; i++) {
                load_chunk(codes.x[b][y][i],
                           reinterpret_cast<const u8*>(from + (tile + g + y * 8) * RANK + i * 32 + c * 8));
            }
        }
    }
}

__device__ __forceinline__ void load_index(int (&index)[BLOCKS], const Params& p, int first) {
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
        index[b] = first + b < p.count ? p.index[first + b] : -1;
    }
}

// The best match of each block's tokens with the queries, of a lane's tokens and queries.
__device__ __forceinline__ void match(float (&best)[BLOCKS], const Codes& codes, const Query& q) {
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
        float s[4] = {0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) {
            const Chunk<16>&low = codes.x[b][0][i], &high = codes.x[b][1][i];
            const u32 first_half[4] = {low.a, high.a, low.b, high.b};
            const u32 second_half[4] = {low.c, high.c, low.d, high.d};
            step(s, first_half, q.high[i][0], q.high[i][1]);
            step(s, second_half, q.high[i][2], q.high[i][3]);
            step(s, first_half, q.low[i][0], q.low[i][1]);
            step(s, second_half, q.low[i][2], q.low[i][3]);
        }
        best[b] = max_nan(best[b], max_nan(max_nan(s[0], s[1]), max_nan(s[2], s[3])));
    }
}

__device__ __forceinline__ void write_best(float (&best)[BLOCKS], const int (&index)[BLOCKS], const Params& p, int head,
                                           int first) {
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
#pragma unroll
        for (int apart = WARP / 2; apart > 0; apart /= 2) {
            best[b] = max_nan(best[b], __shfl_xor_sync(ALL, best[b], apart));
        }
        if (lane_index() == 0 && first + b < p.count) {
            p.scores[head * p.score_stride + first + b] =
                index[b] < 0 ? __uint_as_float(MINUS_INFINITY) : best[b];
        }
    }
}

extern "C" __global__ void __launch_bounds__(WARPS* WARP)
    score_tiled(const __grid_constant__ Params p) {
    __shared__ __align__(16) u16 queries[16][Q_ROW];
    __shared__ __align__(16) u16 matrix[DIM][M_ROW];
    __shared__ __align__(16) float projected[8][RANK];
    follow();
    int head = blockIdx.y, group = p.q_heads / p.heads, warp = threadIdx.x / WARP;
    int first = (static_cast<int>(blockIdx.x) * WARPS + warp) * BLOCKS;
    int stride = static_cast<int>(gridDim.x) * WARPS * BLOCKS;
    int index[BLOCKS], next[BLOCKS];
    load_index(index, p, first);
    Codes codes;
    load_codes(codes, p, index, head, 0); // in flight while the queries are projected
    load_index(next, p, first + stride);
    stage(p, head, group, queries, matrix);
    __syncthreads();
    for (int n = warp; n < RANK / 8; n += WARPS) {
        project_columns(queries, matrix, projected, n, p.scale);
    }
    __syncthreads();
    Query q;
    load_query(q, projected, group);
    float best[BLOCKS];
    int tile = 0; // of the first blocks' tokens, whose codes are on their way
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
        best[b] = __uint_as_float(MINUS_INFINITY);
    }
    while (first < p.count) {
        Codes now = codes;
        bool is_last = tile + 16 >= p.block_size;
        if (is_last) {
            load_codes(codes, p, next, head, 0);
        } else {
            load_codes(codes, p, index, head, tile + 16);
        }
        match(best, now, q);
        tile += 16;
        if (is_last) {
            write_best(best, index, p, head, first);
            first += stride;
            tile = 0;
#pragma unroll
            for (int b = 0; b < BLOCKS; b++) {
                best[b] = __uint_as_float(MINUS_INFINITY);
                index[b] = next[b];
            }
            load_index(next, p, first + stride);
        }
    }
}
