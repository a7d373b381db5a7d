// codes_mass: logsumexp of each block's logits by its codes, and its mass in this step.
//
//   predicted[q, b] = logsumexp over t of (constant[q] + sum over bits k of weights[q, k] bit(b, t, k)),
//                     -inf for a block without a code
//   mass[q, b]      = exact[q, j] where b is pinned block j and that is no NaN; else predicted[q, b];
//                     without a code lse[q, e] if the last step attended b as entry e
//   correction[q, b] = FADE times what it was; 0 where the mass is no prediction
//   partial[q, x]   = (maximum of the masses that thread block x has met, sum of their exponentials, both of
//                     masses and corrections)
//
// Codes as codes.cuh says; weights [Q, 16 P], constant [Q], exact [Q, pinned + 1], rows [B], mass [Q, B],
// partial [Q, gridDim.x] float32 (four) in the workspace. Grid: (x, H, query groups of QUERIES); a warp CHUNK
// blocks at a time, whose codes are in flight while the last ones are multiplied, and then a lane a
// (block, query). Shared memory: 256 bytes a plane of a whole number of rounds, and 256 P of weights.
//
// A block's tokens are the rows of mma.m16n8k16: two planes side by side make 32-bit words of a token,
// `word & 0x00010001 << k` are two FP16 numbers 2^(k - 24) or 0, and the columns are 4 queries' weights,
// each as the sum of two FP16 numbers (22 bits). Lane (g, t) of a quad holds the planes 2 t and 2 t + 1 of
// tokens 2 g and 2 g + 1, so that nothing is read twice; where a head has no more than two pairs of
// planes, the lanes of a quad share a pair and each takes a part of its bits. T is a multiple of 16;
// codes_mass_any.cu is for any other.
// NumPy reference: hsswap.codec.logits_of and log_mass.
#include "codes_mass.cuh"

constexpr int BLOCKS_AN_SM = 2; // 128 registers a thread
constexpr int STEPS = 8; // of mma for the bits of four pairs of planes
constexpr int CHUNK = 8; // blocks of a warp at a time

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
// A round has room for STEPS. weights: QUERIES rows of them, in shared memory; scale[g]: what a product
// is divided by.
__device__ void make_fragments(const Params& p, int head, int first_query, int count, int planes,
                              uint2* fragments, float* weights, float* scale) {
    int pairs = (planes + 1) / 2;
    int bits = PLANE_BITS * p.tables.planes; // weights past the head's own planes are 0
    const float* from = p.weights + static_cast<i64>(head * p.group + first_query) * bits;
    for (int at = threadIdx.x; at < QUERIES * bits; at += THREADS) {
        weights[at] = at < count * bits ? from[at] : 0.0f;
    }
    __syncthreads();
    for (int g = threadIdx.x / WARP; g < QUERIES; g += WARPS) {
        float most = 0;
        for (int k = lane_index(); k < bits; k += WARP) {
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
                    if (plane < planes) {
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
        total += STEPS;
    }
    __syncthreads();
}

__device__ __forceinline__ void multiply(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, uint2 b) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
                 "{%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b.x), "r"(b.y));
}

// Of CHUNK blocks' tiles the planes 2 pair and 2 pair + 1 of a lane's two tokens, as they lie in memory.
struct Loaded {
    u32 low[CHUNK], high[CHUNK];
};

// Ask for them. codes: of block lane / 4 of the chunk, 0: none; a block without is read as if it were the
// first one with, and what comes of it is not used.
__device__ __forceinline__ void load(Loaded& loaded, u64 codes, int pair, int planes, int token,
                                     int block_size) {
    u32 coded = __ballot_sync(ALL, codes != 0);
    if (coded == 0) {
        return;
    }
    codes = __shfl_sync(ALL, codes, codes != 0 ? lane_index() : __ffs(coded) - 1);
    bool has_low = 2 * pair < planes;
    bool has_high = 2 * pair + 1 < planes;
    int offset = 2 * (2 * pair * block_size + token + lane_index() / 4 * 2);
#pragma unroll
    for (int i = 0; i < CHUNK; i++) {
        const u8* tile = reinterpret_cast<const u8*>(__shfl_sync(ALL, codes, 4 * i)) + offset;
        loaded.low[i] = has_low ? *reinterpret_cast<const u32*>(tile) : 0;
        loaded.high[i] = has_high ? *reinterpret_cast<const u32*>(tile + 2 * block_size) : 0;
    }
}

// The products of one round of four pairs of planes. x, y: the words of a lane's two tokens.
__device__ __forceinline__ void add_round(const u32 (&x)[CHUNK], const u32 (&y)[CHUNK], int steps,
                                          const uint2* fragments, float (&sums)[CHUNK][4]) {
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        if (step < steps) {
            uint2 weights = fragments[step * WARP + lane_index()];
            u32 low = 0x00010001u << (2 * step % 8);
            u32 high = low << 1;
#pragma unroll
            for (int i = 0; i < CHUNK; i++) {
                u32 a = step < 4 ? x[i] : x[i] >> 8;
                u32 b = step < 4 ? y[i] : y[i] >> 8;
                multiply(sums[i], a & low, b & low, a & high, b & high, weights);
            }
        }
    }
}

// Of a value a (block, lane) the maximum or the sum over lanes of equal lane % 4, block lane / 4's, by
// halves: 7 exchanges for 8 blocks instead of 24.
template <bool SUM> __device__ __forceinline__ float of_my_block(float (&values)[CHUNK]) {
#pragma unroll
    for (int half = CHUNK / 2; half > 0; half /= 2) {
        bool upper = (lane_index() / 4 & half) != 0;
#pragma unroll
        for (int i = 0; i < half; i++) {
            float mine = upper ? values[i + half] : values[i];
            float other = upper ? values[i] : values[i + half];
            other = __shfl_xor_sync(ALL, other, 4 * half);
            values[i] = SUM ? mine + other : max_nan(mine, other);
        }
    }
    return values[0];
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_AN_SM)
    codes_mass(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) uint2 fragments[];
    __shared__ float scale[QUERIES];
    int head = blockIdx.y;
    int first_query = blockIdx.z * QUERIES;
    int count = min(QUERIES, p.group - first_query);
    int lane = lane_index();
    int g = lane % 4; // the lane's query
    int q = g < count ? head * p.group + first_query + g : -1;
    int stride = gridDim.x * WARPS * CHUNK;
    int begin = (blockIdx.x * WARPS + threadIdx.x / WARP) * CHUNK;
    int mine = lane < p.pinned_count ? p.pinned[lane] : -1;
    int planes = p.tables.base == nullptr ? 0 : p.tables.plane_count(head);
    u64 offset = planes == 0 ? 0 : 2ull * p.tables.first_plane(head) * p.block_size;
    // Where the lane's block of a chunk has this head's codes, 0: nowhere.
    auto codes_at = [&](int first) {
        int b = first + lane / 4;
        u64 row = b < p.blocks ? p.rows[b] : 0;
        return row == 0 ? 0 : row + offset;
    };
    // Codes come a step before they are needed, and where they are another step before.
    u64 here = codes_at(begin);
    u64 next = codes_at(begin + stride);
    Loaded loaded = {};
    int pairs = (planes + 1) / 2;
    load(loaded, here, Share(0, pairs, lane % 4).pair, planes, 0, p.block_size);
    float constant = planes > 0 && q >= 0 ? p.constant[q] : 0.0f;
    if (planes > 0) {
        float* weights = reinterpret_cast<float*>(fragments + (pairs + 3) / 4 * STEPS * WARP);
        make_fragments(p, head, first_query, count, planes, fragments, weights, scale);
    }
    float unit = planes > 0 ? 16777216.0f / scale[g] : 0.0f; // 2^24
    Sums all{{-INFINITE, 0.0f}, {-INFINITE, 0.0f}};
    for (; begin < p.blocks; begin += stride) {
        int b = begin + lane / 4; // the lane's block
        bool is_mine = b < p.blocks && q >= 0;
        u64 after = codes_at(begin + 2 * stride);
        float correction = is_mine ? remembered(p, q, b) : 0.0f;
        float best = -INFINITE;
        float total = 0;
        if (__ballot_sync(ALL, here != 0) == 0) {
            load(loaded, next, Share(0, pairs, lane % 4).pair, planes, 0, p.block_size);
        } else {
#pragma unroll 1
            for (int token = 0; token < p.block_size; token += 16) {
                float sums[CHUNK][4] = {};
                const uint2* weights = fragments;
#pragma unroll 1
                for (int pair = 0; pair < pairs; pair += 4) {
                    Share share(pair, pairs - pair, g);
                    u32 x[CHUNK], y[CHUNK];
#pragma unroll
                    for (int i = 0; i < CHUNK; i++) {
                        x[i] = __byte_perm(loaded.low[i], loaded.high[i], 0x5410) >> share.shift;
                        y[i] = __byte_perm(loaded.low[i], loaded.high[i], 0x7632) >> share.shift;
                    }
                    bool last_pair = pair + 4 >= pairs;
                    bool last_tile = token + 16 >= p.block_size;
                    int pair2 = last_pair ? 0 : pair + 4;
                    load(loaded, last_pair && last_tile ? next : here,
                         Share(pair2, pairs - pair2, g).pair, planes,
                         !last_pair ? token : last_tile ? 0 : token + 16, p.block_size);
                    add_round(x, y, share.steps, weights, sums);
                    weights += STEPS * WARP;
                }
                float values[CHUNK];
#pragma unroll
                for (int i = 0; i < CHUNK; i++) {
                    // Columns 2 g and 2 g + 1 are the parts of query g; rows lane / 4 and that + 8.
                    sums[i][0] = (sums[i][0] + sums[i][1]) * unit;
                    sums[i][2] = (sums[i][2] + sums[i][3]) * unit;
                    values[i] = max_nan(sums[i][0], sums[i][2]);
                }
                float top = of_my_block<false>(values);
#pragma unroll
                for (int i = 0; i < CHUNK; i++) {
                    float of_block = __shfl_sync(ALL, top, 4 * i + g);
                    values[i] = __expf(sums[i][0] - of_block) + __expf(sums[i][2] - of_block);
                }
                float more = of_my_block<true>(values);
                float both = max_nan(best, top);
                total = total * __expf(best - both) + more * __expf(top - both);
                best = both;
            }
        }
        bool near = p.pinned_count > WARP || __any_sync(ALL, mine >= begin && mine < begin + CHUNK);
        if (is_mine) {
            settle(p, head, q, b, here != 0, best + __logf(total) + constant, correction, near, all);
        }
        here = next;
        next = after;
    }
    // The lanes of a query together.
    for (int step = 4; step < WARP; step *= 2) {
        Sums other;
        other.plain = {__shfl_xor_sync(ALL, all.plain.best, step),
                       __shfl_xor_sync(ALL, all.plain.total, step)};
        other.corrected = {__shfl_xor_sync(ALL, all.corrected.best, step),
                           __shfl_xor_sync(ALL, all.corrected.total, step)};
        all.merge(other);
    }
    finish(p, q, all);
}
