// codes_encode: keys of full blocks to packed codes.
//
//   level(t, d) = floor(sum over i of K[t, i] * encode[i, d] + bias[d]), within 0 .. 2^bits(d) - 1
//   bit k of plane p of token t = bit bit_of[16 p + k] of level(t, dim_of[16 p + k])
//
// K [T, dk] BF16, FP16 (FP16 1) or E4M3 (E4M3 1: scales at byte scales_at of the unit) at the start of unit h
// of a host slot (mapped memory); tables and codes as codes.cuh
// says. Sums in float32, over i in order. Grid: thread blocks take (block, head) pairs in turn, a head's
// all in a row, TILE tokens at a time; a thread is a code dim, then a word of a plane. Shared memory:
// keys f32 [dk, TILE] and levels u8 [TILE, M + 4].
// NumPy reference: hsswap.codec.encode.
#include "codes.cuh"
#include "e4m3.cuh"

#ifndef CHUNK
#define CHUNK 16
#endif

struct Params {
    const u8* blocks;
    Tables tables;
    const u64* pages;
    const int* host_slots;
    const int* code_index;
    i64 unit_bytes, block_bytes, row_bytes, scales_at;
    int count, block_size;
};

constexpr int THREADS = 128;
constexpr int BLOCKS_AN_SM = 4; // 128 registers a thread
constexpr int TILE = 16;        // tokens

__device__ __forceinline__ u8 level_of(float value, int bits) {
    // NaN compares false with everything and becomes 0, as in the reference.
    float top = static_cast<float>((1 << bits) - 1);
    float floored = floorf(value);
    return static_cast<u8>(floored > 0 ? (floored < top ? floored : top) : 0.0f);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_AN_SM)
    codes_encode(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) float keys[];
    const Tables& tables = p.tables;
    u8* levels = reinterpret_cast<u8*>(keys + tables.dim * TILE);
    int row = tables.most + 4; // bytes of a token's levels: neighbours lie in different banks
    for (int pair = blockIdx.x; pair < p.count * tables.heads; pair += gridDim.x) {
        int head = pair / p.count;
        int i = pair % p.count;
        const u8* from = p.blocks + p.host_slots[i] * p.block_bytes + head * p.unit_bytes;
        int planes = tables.plane_count(head);
        u16* to = codes_of(p.pages, p.row_bytes, p.code_index[i], tables.first_plane(head), p.block_size);
        for (int first = 0; first < p.block_size; first += TILE) {
            int tokens = min(TILE, p.block_size - first);
            __syncthreads(); // the last tile's levels were read by all
            for (int at = threadIdx.x; at < tables.dim * TILE; at += THREADS) {
                keys[at] = 0; // a short tile's other tokens
            }
            __syncthreads();
#if E4M3
            const float* scales = reinterpret_cast<const float*>(from + p.scales_at) + first;
            for (int at = threadIdx.x * 4; at < tokens * tables.dim; at += THREADS * 4) {
                u32 four = *reinterpret_cast<const u32*>(from + first * tables.dim + at);
                int token = at / tables.dim; // dims are multiples of 8
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    float value = e4m3_to_float(static_cast<u8>(four >> (8 * k))) * scales[token];
                    keys[(at + k) % tables.dim * TILE + token] = value;
                }
            }
#else
            constexpr int WORDS = CHUNK / 2;
            for (int at = threadIdx.x * WORDS; at < tokens * tables.dim; at += THREADS * WORDS) {
                union {
                    Chunk<CHUNK> chunk;
                    u16 words[WORDS];
                } loaded;
                load_chunk(loaded.chunk, from + 2 * (first * tables.dim + at));
#pragma unroll
                for (int k = 0; k < WORDS; k++) {
                    int token = (at + k) / tables.dim;
                    keys[(at + k) % tables.dim * TILE + token] = half_to_float(loaded.words[k]);
                }
            }
#endif
            __syncthreads();
            const float* encode = tables.encode(head);
            for (int d = threadIdx.x; d < tables.most; d += THREADS) {
                float sums[TILE] = {};
#pragma unroll 4
                for (int k = 0; k < tables.dim; k++) {
                    float weight = encode[k * tables.most + d];
                    const float4* at = reinterpret_cast<const float4*>(keys + k * TILE);
#pragma unroll
                    for (int quad = 0; quad < TILE / 4; quad++) {
                        float4 four = at[quad];
                        sums[4 * quad] = fmaf(four.x, weight, sums[4 * quad]);
                        sums[4 * quad + 1] = fmaf(four.y, weight, sums[4 * quad + 1]);
                        sums[4 * quad + 2] = fmaf(four.z, weight, sums[4 * quad + 2]);
                        sums[4 * quad + 3] = fmaf(four.w, weight, sums[4 * quad + 3]);
                    }
                }
                float bias = tables.bias(head)[d];
                int bits = tables.bits(head)[d];
#pragma unroll
                for (int t = 0; t < TILE; t++) {
                    levels[t * row + d] = level_of(sums[t] + bias, bits);
                }
            }
            __syncthreads();
            for (int at = threadIdx.x; at < planes * tokens; at += THREADS) {
                int plane = at / tokens;
                int token = at % tokens;
                const u8* dims = tables.dim_of(head) + plane * PLANE_BITS;
                const u8* places = tables.bit_of(head) + plane * PLANE_BITS;
                u32 word = 0;
#pragma unroll
                for (int k = 0; k < PLANE_BITS; k++) {
                    word |= (static_cast<u32>(levels[token * row + dims[k]]) >> places[k] & 1u) << k;
                }
                to[plane * p.block_size + first + token] = static_cast<u16>(word);
            }
        }
    }
}
