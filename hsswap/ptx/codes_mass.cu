// codes_mass: logsumexp of each block's logits by its codes, and its mass in this step.
//
//   weights[q, k]   = (sum over i of query[q, i] * table[dim_of[k], i]) * 2^bit_of[k] of each bit k of a token's
//                     string; constant[q] = sum over i of query[q, i] * centre[i]
//   predicted[q, b] = logsumexp over t of (constant[q] + sum over bits k of weights[q, k] bit(b, t, k)),
//                     -inf for a block without a code
//   mass[q, b]      = logsumexp of the logits of pinned block b if the cache holds it, else predicted[q, b]; without a
//                     code lse[q, e] if the last step attended b as entry e
//   correction[q, b] = TRUST * (lse[q, e] - what predicted was) if the last step attended b as entry e and that is
//                     finite, else FADE times what it was; 0 without a code or with exact logits, and past the blocks
//                     if `first`
//   partial[q, x]   = (maximum of the masses that thread block x has met and of the block being filled, sum of their
//                     exponentials, both of masses and corrections)
//
// Codes as codes.cuh says; mass [Q, B], partial [Q, gridDim.x] float32 (four) in the workspace; predicted and
// correction [Q, C]. Grid: (x, H, query groups of QUERIES); a thread block `span` blocks at a time, a warp eight
// of them at once, whose codes come a turn before they are needed.
//
// A tile of mma.m16n8k32 takes one token of 8 blocks from each half of 16 tokens: lane (g, t) of a warp holds the
// words of planes 2 t and 2 t + 1 of tokens i and i + 8 of block g. Two planes side by side make four bytes; a byte
// `& mask` is a whole number, a field of one dim, and the matrix of queries has its weight as 32-bit fixed-point
// numbers in four bytes: the columns are 4 queries times 4 bytes in two mma, whose sums are exact. All of a block's
// logits for query t end in lane (g, t), so that nothing is exchanged. Where a head has no more than two pairs of
// planes, the lanes of a quad share a pair and each takes a part of its fields. T is a multiple of 16;
// codes_mass_any.cu is for any other.
//
// Shared memory: 68 KiB of codes on their way, 2,176 bytes for each 8 planes of weights and masks, and a float a query
// and dim. NumPy reference: hsswap.codec.logits_of and log_mass.
#include "codes_weights.cuh"

constexpr int BLOCKS_AN_SM = 1; // 128 registers a thread
constexpr int TILE = 8;   // blocks of a warp at a time
constexpr int STAGES = 2; // of a warp's codes
constexpr float LN_2 = 0.693147181f;
constexpr int MAGIC = 0x4b400000; // as float 1.5 * 2^23: an integer added to it is added to its value
constexpr float MAGIC_VALUE = 12582912.0f;

__device__ __forceinline__ void multiply(int (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
                 "{%8, %9}, {%0, %1, %2, %3};"
                 : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Where a warp is: 8 blocks from `tile` on, 16 tokens from `token` on, a round of planes. A head of several rounds
// has two turns of all of them, each for half of the tokens: registers hold the logits of no more.
struct Place {
    int tile, token, turn;
    __device__ __forceinline__ void advance(int block_size, int rounds) {
        turn++;
        if (turn >= (rounds > 1 ? 2 * rounds : 1)) {
            turn = 0;
            token += 16;
            if (token >= block_size) {
                token = 0;
                tile += TILE * WARPS;
            }
        }
    }
};

// What is on its way for a thread: 16 tokens of its pair of planes, tokens 0 to 7 and 8 to 15 of the even plane, then
// of the odd one; and, with the last of a block, what is remembered of it.
struct Part {
    uint4 codes[4][THREADS];
    float correction[THREADS];
};

// 16 bytes, or zeros.
__device__ __forceinline__ void copy_16(uint4* to, const u8* from, bool is_there) {
    u32 at = static_cast<u32>(__cvta_generic_to_shared(to));
    int bytes = is_there ? 16 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copy_4(float* to, const float* from, bool is_there) {
    u32 at = static_cast<u32>(__cvta_generic_to_shared(to));
    int bytes = is_there ? 4 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(at), "l"(from), "r"(bytes) : "memory");
}

// STAGES parts of a head's codes in turns, asked for in the order in which they are needed.
struct Ring {
    Part* parts;
    int query; // the lane's, -1: none
    int planes, stage;
    Place ahead;

    __device__ __forceinline__ void ask(const Params& p, const Range& range) {
        int i = ahead.tile + lane_index() / 4;
        u64 row = i < p.span ? range.rows[i] : 0;
        int rounds = rounds_of(planes);
        int round = ahead.turn < rounds ? ahead.turn : ahead.turn - rounds;
        int first = round * ROUND;
        int pairs_apart = ROUND >> halvings_of(first, (planes + 1) / 2);
        int plane = 2 * (first + (lane_index() & pairs_apart - 1));
        const u8* from = reinterpret_cast<const u8*>(row) + 2 * (plane * p.block_size + ahead.token);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            bool is_there = row != 0 && plane + k / 2 < planes;
            copy_16(&parts[stage].codes[k][threadIdx.x], from + k / 2 * 2 * p.block_size + k % 2 * 16, is_there);
        }
        int b = range.first + i;
        ahead.advance(p.block_size, rounds);
        if (ahead.token == 0 && ahead.turn == 0) {
            copy_4(&parts[stage].correction[threadIdx.x], p.correction + query * p.memory_stride + b,
                   query >= 0 && p.first == 0 && i < p.span && b < p.blocks);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    __device__ __forceinline__ void begin(const Params& p, const Range& range) {
        ahead = {static_cast<int>(threadIdx.x) / WARP * TILE, 0, 0};
#pragma unroll 1
        for (int k = 0; k < STAGES - 1; k++) {
            ask(p, range);
        }
    }
    // The next part; the one taken before it is given up.
    __device__ __forceinline__ const Part& take(const Params& p, const Range& range) {
        ask(p, range);
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
        return parts[stage]; // the oldest of them
    }
};

// Weights and masks of a round in registers.
template <int USED> struct Held {
    uint4 weights[USED];
    uint2 masks[USED];
    __device__ __forceinline__ explicit Held(const Round& round) {
#pragma unroll
        for (int step = 0; step < USED; step++) {
            weights[step] = round.weights[step][lane_index()];
            masks[step] = round.masks[step][lane_index() % 4];
        }
    }
};

// Adds what a round says to the logits of 4 tokens of each half of a lane's 16, from token 4 * quarter on.
// unit: what the lowest byte of a weight counts. The lower two bytes are joined with MAGIC in them, to 2^-23 of the
// largest weight; `begin` takes it away.
template <int USED>
__device__ __forceinline__ void add_round(float (&logits)[8], const Part& part, int quarter, const Held<USED>& held,
                                          float unit) {
    uint2 codes[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
        codes[k] = reinterpret_cast<const uint2*>(&part.codes[k][threadIdx.x])[quarter];
    }
#pragma unroll
    for (int token = 0; token < 4; token++) {
        u32 pick = token % 2 == 0 ? 0x5410 : 0x7632;
        u32 x = token < 2 ? __byte_perm(codes[0].x, codes[2].x, pick) : __byte_perm(codes[0].y, codes[2].y, pick);
        u32 y = token < 2 ? __byte_perm(codes[1].x, codes[3].x, pick) : __byte_perm(codes[1].y, codes[3].y, pick);
        int upper[4] = {MAGIC, MAGIC, MAGIC, MAGIC};
        int lower[4] = {MAGIC, MAGIC, MAGIC, MAGIC};
#pragma unroll
        for (int step = 0; step < USED; step++) {
            u32 a0 = x & held.masks[step].x, a1 = y & held.masks[step].x;
            u32 a2 = x & held.masks[step].y, a3 = y & held.masks[step].y;
            multiply(upper, a0, a1, a2, a3, held.weights[step].x, held.weights[step].y);
            multiply(lower, a0, a1, a2, a3, held.weights[step].z, held.weights[step].w);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float of_upper = fmaf(__int_as_float(upper[2 * half]) - MAGIC_VALUE, 256.0f,
                                  __int_as_float(upper[2 * half + 1]) - MAGIC_VALUE);
            float of_lower = fmaf(__int_as_float(lower[2 * half]), 256.0f, __int_as_float(lower[2 * half + 1]));
            float& logit = logits[token + 4 * half];
            logit = fmaf(of_upper, 65536.0f * unit, fmaf(of_lower, unit, logit));
        }
    }
}

__device__ __forceinline__ float power_of_2(float value) {
    float out;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(value));
    return out;
}

// Logits before any of `rounds` rounds.
__device__ __forceinline__ void begin(float (&logits)[8], int rounds, float unit) {
#pragma unroll
    for (int k = 0; k < 8; k++) {
        logits[k] = -257.0f * MAGIC_VALUE * unit * static_cast<float>(rounds);
    }
}

// A logsumexp to the base 2.
struct Sum2 {
    float best, total;
    __device__ __forceinline__ void add(const float (&logits)[8]) {
        float top = best;
#pragma unroll
        for (int k = 0; k < 8; k++) {
            top = fmaxf(top, logits[k]);
        }
        float more[2] = {};
#pragma unroll
        for (int k = 0; k < 8; k++) {
            more[k % 2] += power_of_2(logits[k] - top);
        }
        total = total * power_of_2(best - top) + (more[0] + more[1]);
        best = top;
    }
};

// Adds a lane's 16 tokens, of a head with one round.
template <int USED>
__device__ __forceinline__ void add_tokens(Sum2& sum, const Part& part, const Round& round, float unit) {
    Held<USED> held(round);
#pragma unroll 1
    for (int quarter = 0; quarter < 2; quarter++) {
        float logits[8];
        begin(logits, 1, unit);
        add_round(logits, part, quarter, held, unit);
        sum.add(logits);
    }
}

// The same of a head with several.
__device__ __forceinline__ void add_rounds(Sum2& sum, Ring& ring, const Params& p, const Range& range,
                                           const Round* rounds, float unit) {
#pragma unroll 1
    for (int quarter = 0; quarter < 2; quarter++) {
        float logits[8];
        begin(logits, rounds_of(ring.planes), unit);
#pragma unroll 1
        for (int r = 0; r < rounds_of(ring.planes); r++) {
            add_round(logits, ring.take(p, range), quarter, Held<STEPS>(rounds[r]), unit);
        }
        sum.add(logits);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_AN_SM)
    codes_mass(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) u8 shared[];
    __shared__ __align__(16) float queries[QUERIES][MOST_DIM];
    __shared__ Range range;
    __shared__ Resident resident;
    __shared__ Most most;
    __shared__ Sums sums[THREADS]; // a thread's own, for want of registers
    follow();
    int head = blockIdx.y;
    int first_query = blockIdx.z * QUERIES;
    int count = min(QUERIES, p.group - first_query);
    int g = lane_index() % 4; // the lane's query
    int q = g < count ? head * p.group + first_query + g : -1;
    int first = blockIdx.x * p.span;
    Asked asked(p, head, first);
    Items items(p, head, blockIdx.x);
    int planes = p.tables.are_there() ? p.tables.plane_count(head) : 0;
    u32 field = static_cast<int>(threadIdx.x) < 2 * p.tables.planes * FIELDS ? p.tables.fields(head)[threadIdx.x] : 0;
    Queries own_queries(p, head, first_query, count);
    Projection projection(p, head);

    Weights w(p, shared + STAGES * sizeof(Part));
    w.clear(p);
    if (threadIdx.x < QUERIES) {
        most.largest[threadIdx.x] = 0;
        resident.sums[threadIdx.x] = {-INFINITE, 0.0f};
    }
    most.used = 0;
    sums[threadIdx.x] = {{-INFINITE, 0.0f}, {-INFINITE, 0.0f}};
    items.begin(p, head, resident);
    stage(p, head, first, asked, range, [&] { items.look_up(p, head, resident); });
    Ring ring{reinterpret_cast<Part*>(shared), q, planes, 0, {}};
    ring.begin(p, range);
    Keys keys;
    keys.ask(p, items, resident, threadIdx.x / WARP, 4 * lane_index());
    // While the first codes are on their way:
    own_queries.put(queries);
    __syncthreads();
    if (planes > 0) {
        projection.run(p, head, queries, w.of_dim);
    }
    add_items(p, head, first_query, count, items, keys, queries, resident);
    make_weights(p, head, planes, w, field, most);
    float unit = LOG2_E / most.scale(g); // what the lowest byte of a weight counts, to the base 2
    float constant = planes > 0 ? w.of_dim[g * (w.most + 1) + w.most] : 0.0f;
    for (;;) {
        int blocks = min(p.span, p.blocks - first);
        for (int tile = static_cast<int>(threadIdx.x) / WARP * TILE; tile < blocks; tile += TILE * WARPS) {
            int i = tile + lane_index() / 4; // the lane's block
            bool is_mine = i < blocks && q >= 0;
            Shown shown(p, is_mine ? q : -1, range, i);
            Sum2 sum{-INFINITE, 0.0f};
#pragma unroll 1
            for (int token = 0; token < p.block_size; token += 16) {
                if (planes > 2 * ROUND) {
                    add_rounds(sum, ring, p, range, w.rounds, unit);
                    continue;
                }
                const Part& part = ring.take(p, range);
                if (most.used == 4) {
                    add_tokens<4>(sum, part, w.rounds[0], unit);
                } else if (most.used == 3) {
                    add_tokens<3>(sum, part, w.rounds[0], unit);
                } else if (most.used == 2) {
                    add_tokens<2>(sum, part, w.rounds[0], unit);
                } else if (most.used == 1) {
                    add_tokens<1>(sum, part, w.rounds[0], unit);
                }
            }
            if (is_mine) {
                float value = fmaf(sum.best + __log2f(sum.total), LN_2, constant);
                float correction = ring.parts[ring.stage].correction[threadIdx.x];
                settle(p, q, range, i, value, correction, shown, sums[threadIdx.x]);
            }
        }
        first += gridDim.x * p.span;
        if (first >= p.blocks) {
            break;
        }
        asm volatile("cp.async.wait_all;" ::: "memory"); // what the last range asked for past its end
        stage(p, head, first, Asked(p, head, first), range, [] {});
        ring.begin(p, range);
    }
    add_more_items(p, head, first_query, count, queries, resident);
    Sums all = sums[threadIdx.x];
    over_lanes(all.plain, QUERIES, WARP); // those of a query
    over_lanes(all.corrected, QUERIES, WARP);
    finish(p, head, first_query, count, all, resident.sums);
    forget_the_rest(p, head, first_query, count);
}
