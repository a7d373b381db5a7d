// codes_mass: logsumexp of each block's logits by its codes, and its mass in this step.
//
//   predicted[q, b] = logsumexp over t of (constant[q] + sum over bits k of weights[q, k] bit(b, t, k)),
//                     -inf for a block without a code
//   mass[q, b]      = exact[q, j] where b is pinned block j and that is no NaN; else predicted[q, b] +
//                     correction[q, b]; without a code lse[q, e] if the last step attended b as entry e
//   partial[q, x]   = (maximum of the masses that thread block x has met, sum of their exponentials)
//
// Codes as codes.cuh says; weights [Q, 16 P], constant [Q], exact [Q, pinned + 1], mass [Q, B], partial
// [Q, gridDim.x] float32 (pairs) in the workspace. Grid: (x, H, query groups of QUERIES); a warp a block.
//
// With TILED a block's tokens are the rows of mma.m16n8k16: two planes side by side make 32-bit words of
// a token, `word & 0x00010001 << k` are two FP16 numbers 2^(k - 24) or 0, and the columns are 4 queries'
// weights, each as the sum of two FP16 numbers (22 bits). Lane (g, t) of a quad holds the planes 2 t and
// 2 t + 1 of tokens 2 g and 2 g + 1, so that nothing is read twice; where a head has no more than two
// pairs of planes, the lanes of a quad share a pair and each takes a part of its bits. T is a multiple
// of 16 then. Without TILED: any T, a lane a token.
// NumPy reference: hsswap.codec.logits_of and log_mass.
#include "codes.cuh"

#ifndef TILED
#define TILED 1
#endif

struct Params {
    Tables tables;
    const u64* pages;
    const int* code_index; // [B]
    const float* weights;
    const float* constant;
    const float* exact;
    const int* pinned;
    const int* chosen; // [H, entries], null: nothing was attended
    const float* lse;
    float* predicted;
    const float* correction;
    float* mass;
    float2* partial;
    i64 row_bytes, memory_stride, chosen_stride, lse_stride;
    int blocks, group, block_size, pinned_count, entries;
};

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / WARP;
constexpr int QUERIES = 4;
constexpr int BLOCKS_AN_SM = 4; // 64 registers a thread

struct Sum {
    float best, total;
    __device__ __forceinline__ void add(float value) {
        if (value > best) {
            total = total * __expf(best - value) + 1.0f;
            best = value;
        } else if (value != -INFINITE) {
            total += __expf(value - best); // NaN for NaN
        }
    }
};

// What block b is worth to query q = head * group + g in this step, and what is remembered of it.
__device__ __forceinline__ float settle(const Params& p, int head, int q, int b, bool coded, float value) {
    float own = coded ? value : -INFINITE;
    p.predicted[q * p.memory_stride + b] = own;
    float now = own + p.correction[q * p.memory_stride + b];
    if (!coded && p.chosen != nullptr) {
        for (int entry = 0; entry < p.entries; entry++) {
            if (p.chosen[head * p.chosen_stride + entry] == b) {
                now = p.lse[q * p.lse_stride + entry];
            }
        }
    }
    for (int j = 0; j < p.pinned_count; j++) {
        if (p.pinned[j] == b) {
            float exact = p.exact[q * (p.pinned_count + 1) + j];
            now = exact == exact ? exact : now;
        }
    }
    p.mass[static_cast<i64>(q) * p.blocks + b] = now;
    return now;
}

// The sums of all warps' leaders to partial; q is -1 in lanes without a query.
__device__ __forceinline__ void finish(const Params& p, int q, Sum sum) {
    __shared__ Sum sums[QUERIES][WARPS];
    int warp = threadIdx.x / WARP;
    int g = lane_index();
    if (g < QUERIES) {
        sums[g][warp] = sum;
    }
    __syncthreads();
    if (warp > 0 || g >= QUERIES || q < 0) {
        return;
    }
    Sum all = sums[g][0];
    for (int w = 1; w < WARPS; w++) {
        Sum other = sums[g][w];
        float top = fmaxf(all.best, other.best);
        float shift = top == -INFINITE ? 0.0f : top;
        all.total = all.total * __expf(all.best - shift) + other.total * __expf(other.best - shift);
        all.best = top;
    }
    p.partial[q * gridDim.x + blockIdx.x] = make_float2(all.best, all.total);
}

#if TILED

constexpr int STEPS = 8; // of mma for the bits of four pairs of planes

__device__ __forceinline__ u32 half_bits(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
__device__ __forceinline__ float half_value(u32 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<u16>(bits)));
    return value;
}

// How the lanes of a quad share the pairs of planes from `pair` on: each takes `steps` * 2 bits from
// `shift` on of one pair.
struct Share {
    int pair, shift, steps;
    __device__ __forceinline__ Share(int first, int left, int t) {
        int ways = left == 1 ? 4 : left == 2 ? 2 : 1;
        pair = first + t % (4 / ways);
        shift = 16 / ways * (t / (4 / ways));
        steps = STEPS / ways;
    }
};

// B fragments of every step, column n = 2 * query + (0: high part, 1: low part), into shared memory.
// Returns the number of steps; scale[g]: what a product is divided by.
__device__ int make_fragments(const Params& p, int head, int first_query, int count, uint2* fragments,
                              float* scale) {
    int planes = p.tables.plane_count(head);
    int pairs = (planes + 1) / 2;
    int bits = PLANE_BITS * p.tables.planes;
    const float* weights = p.weights + static_cast<i64>(head * p.group + first_query) * bits;
    for (int g = threadIdx.x / WARP; g < QUERIES; g += WARPS) {
        float most = 0;
        for (int k = lane_index(); g < count && k < PLANE_BITS * planes; k += WARP) {
            most = fmaxf(most, fabsf(weights[g * bits + k]));
        }
        for (int step = WARP / 2; step > 0; step /= 2) {
            most = fmaxf(most, __shfl_xor_sync(ALL, most, step));
        }
        if (lane_index() == 0) {
            // A power of two that brings the largest weight to 2^13 .. 2^14.
            int exponent = static_cast<int>(__float_as_uint(most) >> 23) - 127;
            bool usable = most > 0 && exponent > -100 && exponent < 100;
            scale[g] = usable ? __uint_as_float(static_cast<u32>(127 + 13 - exponent) << 23) : 1.0f;
        }
    }
    __syncthreads();
    int total = 0;
    for (int first = 0; first < pairs; first += 4) {
        int steps = Share(first, pairs - first, 0).steps;
        for (int at = threadIdx.x; at < steps * WARP; at += THREADS) {
            int lane = at % WARP;
            int step = at / WARP;
            int g = lane / 4 / 2;
            Share share(first, pairs - first, lane % 4);
            u32 parts[2];
#pragma unroll
            for (int half = 0; half < 2; half++) { // the two bits of a step
                u32 pair_of[2];
#pragma unroll
                for (int side = 0; side < 2; side++) { // the two planes
                    int plane = 2 * share.pair + side;
                    int bit = share.shift + 2 * step + half;
                    float weight = 0;
                    if (plane < planes && g < count) {
                        weight = weights[g * bits + plane * PLANE_BITS + bit] * scale[g];
                        // In its word the bit then counts 2^(place - 24).
                        u32 place = (2 * step + half) % 8;
                        weight *= __uint_as_float((127 - place) << 23);
                    }
                    u32 high = half_bits(weight);
                    pair_of[side] = lane / 4 % 2 == 0 ? high : half_bits(weight - half_value(high));
                }
                parts[half] = pair_of[0] | pair_of[1] << 16;
            }
            fragments[(total + step) * WARP + lane] = make_uint2(parts[0], parts[1]);
        }
        total += steps;
    }
    __syncthreads();
    return total;
}

__device__ __forceinline__ void multiply(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, uint2 b) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
                 "{%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b.x), "r"(b.y));
}

// Words of planes 2 pair and 2 pair + 1 for tokens 2 g and 2 g + 1 of a tile.
__device__ __forceinline__ uint2 words_of(const u16* tile, int pair, int planes, int block_size, int g) {
    u32 low = 0;
    u32 high = 0;
    if (2 * pair < planes) {
        low = *reinterpret_cast<const u32*>(tile + 2 * pair * block_size + 2 * g);
    }
    if (2 * pair + 1 < planes) {
        high = *reinterpret_cast<const u32*>(tile + (2 * pair + 1) * block_size + 2 * g);
    }
    return make_uint2(__byte_perm(low, high, 0x5410), __byte_perm(low, high, 0x7632));
}

__device__ __forceinline__ void tile_logits(const u16* tile, int planes, int block_size,
                                            const uint2* fragments, float (&sums)[4]) {
    int lane = lane_index();
    int pairs = (planes + 1) / 2;
#pragma unroll 1
    for (int first = 0; first < pairs; first += 4) {
        Share share(first, pairs - first, lane % 4);
        uint2 words = words_of(tile, share.pair, planes, block_size, lane / 4);
        u32 x = words.x >> share.shift;
        u32 y = words.y >> share.shift;
        int steps = share.steps;
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            if (step == 4) { // the upper byte
                x >>= 8;
                y >>= 8;
            }
            if (step < steps) {
                u32 low = 0x00010001u << (2 * step % 8);
                u32 high = low << 1;
                multiply(sums, x & low, y & low, x & high, y & high, fragments[lane]);
                fragments += WARP;
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_AN_SM)
    codes_mass(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) uint2 fragments[];
    __shared__ float scale[QUERIES];
    int head = blockIdx.y;
    int first_query = blockIdx.z * QUERIES;
    int count = min(QUERIES, p.group - first_query);
    int planes = p.tables.base == nullptr ? 0 : p.tables.plane_count(head);
    if (planes > 0) {
        make_fragments(p, head, first_query, count, fragments, scale);
    }
    int lane = lane_index();
    int g = lane % 4; // the query whose logits the lane has
    int q = g < count ? head * p.group + first_query + g : -1;
    float constant = planes > 0 && q >= 0 ? p.constant[q] : 0.0f;
    float unit = planes > 0 ? 16777216.0f / scale[g] : 0.0f; // 2^24
    int first_plane = planes > 0 ? p.tables.first_plane(head) : 0;
    Sum sum{-INFINITE, 0.0f};
    int stride = gridDim.x * WARPS;
    for (int b = blockIdx.x * WARPS + threadIdx.x / WARP; b < p.blocks; b += stride) {
        int index = p.code_index[b];
        bool coded = index >= 0 && planes > 0;
        float best = -INFINITE;
        float total = 0;
        if (coded) {
            const u16* codes = codes_of(p.pages, p.row_bytes, index, first_plane, p.block_size);
            for (int first = 0; first < p.block_size; first += 16) {
                float sums[4] = {};
                tile_logits(codes + first, planes, p.block_size, fragments, sums);
                // Columns 2 g and 2 g + 1 are the two parts of query g; rows lane / 4 and that + 8.
                float one = (sums[0] + sums[1]) * unit;
                float two = (sums[2] + sums[3]) * unit;
                float top = max_nan(one, two);
#pragma unroll
                for (int step = 4; step < WARP; step *= 2) {
                    top = max_nan(top, __shfl_xor_sync(ALL, top, step));
                }
                float more = __expf(one - top) + __expf(two - top);
#pragma unroll
                for (int step = 4; step < WARP; step *= 2) {
                    more += __shfl_xor_sync(ALL, more, step);
                }
                float both = max_nan(best, top);
                total = total * __expf(best - both) + more * __expf(top - both);
                best = both;
            }
        }
        if (lane < 4 && q >= 0) {
            sum.add(settle(p, head, q, b, coded, best + __logf(total) + constant));
        }
    }
    finish(p, q, sum);
}

#else

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_AN_SM)
    codes_mass(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) float4 weights[]; // [16 P], a query a component
    int head = blockIdx.y;
    int first_query = blockIdx.z * QUERIES;
    int count = min(QUERIES, p.group - first_query);
    int planes = p.tables.base == nullptr ? 0 : p.tables.plane_count(head);
    int bits = PLANE_BITS * p.tables.planes;
    for (int k = threadIdx.x; k < PLANE_BITS * planes; k += THREADS) {
        const float* row = p.weights + static_cast<i64>(head * p.group + first_query) * bits + k;
        weights[k] = make_float4(row[0], count > 1 ? row[bits] : 0, count > 2 ? row[2 * bits] : 0,
                                 count > 3 ? row[3 * bits] : 0);
    }
    __syncthreads();
    int lane = lane_index();
    int first_plane = planes > 0 ? p.tables.first_plane(head) : 0;
    int q = lane < count ? head * p.group + first_query + lane : -1;
    Sum sum{-INFINITE, 0.0f};
    int stride = gridDim.x * WARPS;
    for (int b = blockIdx.x * WARPS + threadIdx.x / WARP; b < p.blocks; b += stride) {
        int index = p.code_index[b];
        bool coded = index >= 0 && planes > 0;
        float mine = -INFINITE;
        if (coded) {
            const u16* codes = codes_of(p.pages, p.row_bytes, index, first_plane, p.block_size);
            Sum own[QUERIES];
#pragma unroll
            for (int g = 0; g < QUERIES; g++) {
                own[g] = Sum{-INFINITE, 0.0f};
            }
            for (int t = lane; t < p.block_size; t += WARP) {
                float logits[QUERIES] = {};
                for (int plane = 0; plane < planes; plane++) {
                    u32 word = codes[plane * p.block_size + t];
#pragma unroll
                    for (int k = 0; k < PLANE_BITS; k++) {
                        float bit = static_cast<float>(word >> k & 1u);
                        float4 four = weights[plane * PLANE_BITS + k];
                        logits[0] = fmaf(bit, four.x, logits[0]);
                        logits[1] = fmaf(bit, four.y, logits[1]);
                        logits[2] = fmaf(bit, four.z, logits[2]);
                        logits[3] = fmaf(bit, four.w, logits[3]);
                    }
                }
#pragma unroll
                for (int g = 0; g < QUERIES; g++) {
                    own[g].add(logits[g]);
                }
            }
#pragma unroll
            for (int g = 0; g < QUERIES; g++) {
                float top = own[g].best;
                for (int step = WARP / 2; step > 0; step /= 2) {
                    top = fmaxf(top, __shfl_xor_sync(ALL, top, step));
                }
                float total = own[g].best == -INFINITE ? own[g].total : own[g].total * __expf(own[g].best - top);
                for (int step = WARP / 2; step > 0; step /= 2) {
                    total += __shfl_xor_sync(ALL, total, step);
                }
                if (lane == g) {
                    mine = top + __logf(total);
                }
            }
        }
        if (q >= 0) {
            float constant = coded ? p.constant[q] : 0.0f;
            sum.add(settle(p, head, q, b, coded, mine + constant));
        }
    }
    finish(p, q, sum);
}

#endif
