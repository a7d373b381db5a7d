// The weights of codes_mass.cu: of each field of a byte and query, as B fragments of an int8 mma.
#pragma once
#include "codes_resident.cuh"

constexpr int STEPS = 4; // of two fields a byte
constexpr int ROUND = 4; // pairs of planes
constexpr float LOG2_E = 1.44269504f;
constexpr int WEIGHERS = THREADS / QUERIES; // threads of a query
constexpr int SCALE_BITS = 29; // the largest weight becomes 2^29 .. 2^30

// The lanes of a quad that share a pair of planes in the round from `first` on are 2^halvings.
__device__ __forceinline__ int halvings_of(int first, int pairs) {
    int left = pairs - first;
    return left == 1 ? 2 : left == 2 ? 1 : 0;
}

__device__ __forceinline__ int rounds_of(int planes) { return (planes + 2 * ROUND - 1) / (2 * ROUND); }

// What a round of ROUND pairs is multiplied by.
struct Round {
    uint4 weights[STEPS][WARP]; // B fragments of both mma
    uint2 masks[STEPS][4];      // of the lanes of a quad
};

// Weights in shared memory, and what they are made of.
struct Weights {
    Round* rounds;
    float* of_dim;
    int most; // dims
    __device__ __forceinline__ Weights(const Params& p, u8* shared) {
        rounds = reinterpret_cast<Round*>(shared);
        of_dim = reinterpret_cast<float*>(rounds + rounds_of(p.tables.planes));
        most = p.tables.most;
    }
    // Of query g, not yet scaled.
    __device__ __forceinline__ float of_field(int g, u32 field) const {
        float power = __uint_as_float((field >> 16) + (127 - EXPONENT) << 23);
        return of_dim[g * (most + 1) + (field >> 8 & 0xff)] * power;
    }
    // Fields are added to zeros.
    __device__ __forceinline__ void clear(const Params& p) const {
        uint4* words = reinterpret_cast<uint4*>(rounds);
        for (int at = threadIdx.x; at < rounds_of(p.tables.planes) * static_cast<int>(sizeof(Round) / 16); at += THREADS) {
            words[at] = make_uint4(0, 0, 0, 0);
        }
    }
};

// What the threads of a thread block find of all fields. largest: bits of the largest weight of a query; used: the most
// steps of any round.
struct Most {
    u32 largest[QUERIES];
    int used;

    // Weights of query g are multiplied by 2^power_of(g). Those of less than 2^-90 become 0.
    __device__ __forceinline__ int power_of(int g) const {
        return SCALE_BITS - max(static_cast<int>(largest[g] >> 23) - 127, -90);
    }
    // What their lowest byte counts; a weight that is no number makes all logits such.
    __device__ __forceinline__ float unit(int g) const {
        return largest[g] >= 0x7f800000 ? __int_as_float(0x7fc00000) : power_of_two(-power_of(g));
    }
};

// Where a field is: field `number` of byte `byte` of a token's string.
struct Spot {
    int round, step, half, t, byte; // t: the lane of a quad; byte: of its four
    __device__ __forceinline__ Spot(int at, int pairs) {
        int number = at % FIELDS, pair = at / FIELDS / 4;
        byte = at / FIELDS % 4;
        round = pair / ROUND;
        int halvings = halvings_of(round * ROUND, pairs);
        int turn = number >> halvings;
        step = turn / 2;
        half = turn % 2;
        t = pair % ROUND | (number & (1 << halvings) - 1) << 2 - halvings;
    }
};

// Weights and masks of a head, WEIGHERS threads a query. first: the thread's first field. Column n of mma 0 is bytes 3 and
// 2 of query n / 2, of mma 1 bytes 1 and 0. All threads have met since `clear` and since of_dim was written, and meet at
// the end.
__device__ __forceinline__ void make_weights(const Params& p, int head, int planes, const Weights& w, u32 first,
                                             Most& most) {
    int pairs = (planes + 1) / 2, fields = 2 * planes * FIELDS;
    int g = threadIdx.x / WEIGHERS, begin = threadIdx.x % WEIGHERS;
    u32 largest = 0;
    int used = 0;
#pragma unroll 1
    for (int at = begin; at < fields; at += WEIGHERS) {
        u32 field = at == begin ? first : p.tables.fields(head)[at];
        if (field != 0) {
            used = max(used, Spot(at, pairs).step + 1);
            largest = max(largest, __float_as_uint(w.of_field(g, field)) & 0x7fffffffu);
        }
    }
    used = __reduce_max_sync(ALL, used);
    largest = __reduce_max_sync(ALL, largest);
    if (lane() == 0 && used > 0) {
        atomicMax(&most.used, used);
        atomicMax(&most.largest[g], largest);
    }
    __syncthreads();
    float scale = power_of_two(most.power_of(g));
#pragma unroll 1
    for (int at = begin; at < fields; at += WEIGHERS) {
        u32 field = at == begin ? first : p.tables.fields(head)[at];
        if (field != 0) {
            Spot spot(at, pairs);
            Round& round = w.rounds[spot.round];
            u8* to = reinterpret_cast<u8*>(&round.weights[spot.step][spot.t]) + 4 * spot.half + spot.byte;
            u8* column = to + 2 * g * 4 * sizeof(uint4);
            // Digits from -128 to 127.
            u32 digits = (__float2int_rn(w.of_field(g, field) * scale) + 0x00808080u) ^ 0x00808080u;
            column[0] = static_cast<u8>(digits >> 24);
            column[4 * sizeof(uint4)] = static_cast<u8>(digits >> 16);
            column[8] = static_cast<u8>(digits >> 8);
            column[4 * sizeof(uint4) + 8] = static_cast<u8>(digits);
            if (g == 0) {
                u8* mask = reinterpret_cast<u8*>(&round.masks[spot.step][spot.t]);
                mask[4 * spot.half + spot.byte] = static_cast<u8>(field);
            }
        }
    }
    __syncthreads();
}
