// The weights of codes_mass.cu: of each field of a byte and query, as B fragments of an int8 mma.
#pragma once
#include "codes_mass.cuh"

constexpr int STEPS = 4; // of two fields a byte
constexpr int ROUND = 4; // pairs of planes
constexpr float LOG2_E = 1.44269504f;
constexpr int SCALE_BITS = 29; // the largest weight becomes 2^29 .. 2^30

// How the lanes of a quad share the pairs of planes from `first` on.
struct Share {
    int ways, pair, way;
    __device__ __forceinline__ Share(int first, int pairs, int t) {
        int left = pairs - first;
        int halvings = left == 1 ? 2 : left == 2 ? 1 : 0;
        ways = 1 << halvings;
        pair = first + (t & (ROUND >> halvings) - 1);
        way = t >> 2 - halvings;
    }
};

__device__ __forceinline__ int rounds_of(int planes) { return (planes + 2 * ROUND - 1) / (2 * ROUND); }

// What a round of ROUND pairs is multiplied by.
struct Round {
    uint4 weights[STEPS][WARP]; // B fragments of both mma
    uint2 masks[STEPS][4];      // of the lanes of a quad
};

// Weights in shared memory, and their parts while they are made.
struct Weights {
    Round* rounds;
    u32* fields; // [2 P, FIELDS]
    float* of_dim;
    int most; // dims
    __device__ __forceinline__ Weights(const Params& p, u8* shared) {
        rounds = reinterpret_cast<Round*>(shared);
        fields = reinterpret_cast<u32*>(rounds + rounds_of(p.tables.planes));
        of_dim = reinterpret_cast<float*>(fields + 2 * p.tables.planes * FIELDS);
        most = p.tables.most;
    }
    // Of query g, not yet scaled.
    __device__ __forceinline__ float of_field(int g, u32 field) const {
        float power = __uint_as_float((field >> 16) + (127 - EXPONENT) << 23);
        return of_dim[g * (most + 1) + (field >> 8 & 0xff)] * power;
    }
};

// A byte of a weight, 0 the lowest: digits from -128 to 127.
__device__ __forceinline__ u32 digit(int weight, int which) {
    int carry = which == 0 ? 0 : static_cast<int>(0x00808080u >> 8 * (3 - which));
    return static_cast<u32>(weight + carry) >> 8 * which & 0xffu;
}

// Fields into shared memory, the first one of a thread is there; scale[g]: what weights are multiplied by; used: the most steps of any round.
__device__ void load_fields(const Params& p, int head, int planes, const Weights& w, u32 first, float* scale, int* used) {
    int pairs = (planes + 1) / 2;
    u32 largest[QUERIES] = {};
#pragma unroll 1
    for (int at = threadIdx.x; at < 2 * planes * FIELDS; at += THREADS) {
        u32 field = at < THREADS ? first : p.tables.fields(head)[at];
        w.fields[at] = field;
        if (field != 0) {
            int pair = at / FIELDS / 4;
            Share share(pair / ROUND * ROUND, pairs, 0);
            atomicMax(used, at % FIELDS / share.ways / 2 + 1);
#pragma unroll
            for (int g = 0; g < QUERIES; g++) {
                largest[g] = max(largest[g], __float_as_uint(w.of_field(g, field)) & 0x7fffffffu);
            }
        }
    }
#pragma unroll
    for (int g = 0; g < QUERIES; g++) {
        u32 over_warp = __reduce_max_sync(ALL, largest[g]);
        if (lane_index() == 0) {
            atomicMax(reinterpret_cast<u32*>(scale) + g, over_warp);
        }
    }
    __syncthreads();
    if (threadIdx.x < QUERIES) {
        // Weights of less than 2^-90 become 0; one that is no number makes all logits such.
        int exponent = static_cast<int>(__float_as_uint(scale[threadIdx.x]) >> 23) - 127;
        float power = __uint_as_float(static_cast<u32>(127 + SCALE_BITS - max(exponent, -90)) << 23);
        scale[threadIdx.x] = exponent == 128 ? __int_as_float(0x7fc00000) : power;
    }
    __syncthreads();
}

// Weights and masks; scale[g] becomes what the lowest byte of a weight counts, to the base 2. Column n of mma 0 is bytes 3 and 2 of query n / 2, of mma 1 bytes 1 and 0.
__device__ void make_weights(const Params& p, int head, int planes, const Weights& w, u32 first, float* scale,
                             int* used) {
    int pairs = (planes + 1) / 2;
    load_fields(p, head, planes, w, first, scale, used);
#pragma unroll 1
    for (int at = threadIdx.x; at < rounds_of(planes) * STEPS * WARP * 2; at += THREADS) {
        int mma = at % 2;
        int lane = at / 2 % WARP;
        int step = at / 2 / WARP % STEPS;
        int round = at / 2 / WARP / STEPS;
        int g = lane / 8;
        int which = 3 - 2 * mma - lane / 4 % 2;
        Share share(round * ROUND, pairs, lane % 4);
        u32 parts[2] = {}, masks[2] = {};
#pragma unroll 1
        for (int byte = 0; byte < 4; byte++) {
            bool is_there = 2 * share.pair + byte / 2 < planes;
            const u32* fields = w.fields + (4 * share.pair + byte) * FIELDS;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int number = (2 * step + half) * share.ways + share.way;
                u32 field = is_there && number < FIELDS ? fields[number] : 0;
                int weight = field == 0 ? 0 : __float2int_rn(w.of_field(g, field) * scale[g]);
                parts[half] |= digit(weight, which) << 8 * byte;
                masks[half] |= (field & 0xff) << 8 * byte;
            }
        }
        uint2* to = reinterpret_cast<uint2*>(&w.rounds[round].weights[step][lane]);
        to[mma] = make_uint2(parts[0], parts[1]);
        if (mma == 0 && lane < 4) {
            w.rounds[round].masks[step][lane] = make_uint2(masks[0], masks[1]);
        }
    }
    __syncthreads();
    if (threadIdx.x < QUERIES) {
        scale[threadIdx.x] = LOG2_E / scale[threadIdx.x];
    }
    __syncthreads();
}
