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
// of them at once, whose codes are asked for a turn before they are needed.
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
#include "codes_ring.cuh"

constexpr int BLOCKS_AN_SM = 1; // 128 registers a thread
constexpr float LN_2 = 0.693147181f;
constexpr int MAGIC = 0x4b400000; // as float 1.5 * 2^23: an integer added to it is added to its value
constexpr float MAGIC_VALUE = 12582912.0f;

__device__ __forceinline__ void multiply(int (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
                 "{%8, %9}, {%0, %1, %2, %3};"
                 : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The first product of a sum, which begins with `from` in each place.
__device__ __forceinline__ void begin_product(int (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, int from) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
                 "{%8, %9}, {%10, %10, %10, %10};"
                 : "=r"(sums[0]), "=r"(sums[1]), "=r"(sums[2]), "=r"(sums[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(from));
}

// Weights and masks of a round in registers.
template <int USED> struct Held {
    uint4 weights[USED];
    uint2 masks[USED];
    __device__ __forceinline__ explicit Held(const Round& round) {
#pragma unroll
        for (int step = 0; step < USED; step++) {
            weights[step] = round.weights[step][lane()];
            masks[step] = round.masks[step][lane() % 4];
        }
    }
};

// Adds what a round says to the logits of 4 tokens of each half of a lane's 16, from token 4 * quarter on. first: the first
// pair of planes of the round; unit: what the lowest byte of a weight counts. The lower two bytes are joined with MAGIC in
// them, to 2^-23 of the largest weight; `begin` takes it away.
template <int USED>
__device__ __forceinline__ void add_round(float (&logits)[8], const Part& part, int quarter, int first, int planes,
                                          const Held<USED>& held, float unit) {
    int block = lane() / 4;
    int pair = lane() & (ROUND >> halvings_of(first, (planes + 1) / 2)) - 1;
    const uint4* own = part.codes[threadIdx.x / WARP][block];
    int first_chunk = Part::place(block, 4 * pair);
    uint2 codes[4]; // of tokens 0 to 7 and 8 to 15 of the even plane, then of the odd one
#pragma unroll
    for (int k = 0; k < 4; k++) {
        codes[k] = reinterpret_cast<const uint2*>(&own[first_chunk ^ k])[quarter];
    }
#pragma unroll
    for (int token = 0; token < 4; token++) {
        u32 pick = token % 2 == 0 ? 0x5410 : 0x7632;
        u32 x = token < 2 ? __byte_perm(codes[0].x, codes[2].x, pick) : __byte_perm(codes[0].y, codes[2].y, pick);
        u32 y = token < 2 ? __byte_perm(codes[1].x, codes[3].x, pick) : __byte_perm(codes[1].y, codes[3].y, pick);
        int upper[4], lower[4];
#pragma unroll
        for (int step = 0; step < USED; step++) {
            u32 a0 = x & held.masks[step].x, a1 = y & held.masks[step].x;
            u32 a2 = x & held.masks[step].y, a3 = y & held.masks[step].y;
            const uint4& weights = held.weights[step];
            if (step == 0) {
                begin_product(upper, a0, a1, a2, a3, weights.x, weights.y, MAGIC);
                begin_product(lower, a0, a1, a2, a3, weights.z, weights.w, MAGIC);
            } else {
                multiply(upper, a0, a1, a2, a3, weights.x, weights.y);
                multiply(lower, a0, a1, a2, a3, weights.z, weights.w);
            }
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
        float upper = fmaxf(fmaxf(logits[0], logits[1]), fmaxf(logits[2], logits[3]));
        float lower = fmaxf(fmaxf(logits[4], logits[5]), fmaxf(logits[6], logits[7]));
        float top = fmaxf(best, fmaxf(upper, lower));
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
__device__ __forceinline__ void add_tokens(Sum2& sum, const Part& part, int planes, const Round& round, float unit) {
    Held<USED> held(round);
#pragma unroll 1
    for (int quarter = 0; quarter < 2; quarter++) {
        float logits[8];
        begin(logits, 1, unit);
        add_round(logits, part, quarter, 0, planes, held, unit);
        sum.add(logits);
    }
}

// The same of a head with several.
__device__ __forceinline__ void add_rounds(Sum2& sum, Ring& ring, const Params& p, const Range& range, int first, int query,
                                           const Round* rounds, float unit) {
#pragma unroll 1
    for (int quarter = 0; quarter < 2; quarter++) {
        float logits[8];
        begin(logits, rounds_of(ring.planes), unit);
#pragma unroll 1
        for (int r = 0; r < rounds_of(ring.planes); r++) {
            add_round(logits, ring.take(p, range, first, query), quarter, r * ROUND, ring.planes, Held<STEPS>(rounds[r]), unit);
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
    int head = blockIdx.y;
    int first_query = blockIdx.z * QUERIES;
    int count = min(QUERIES, p.group - first_query);
    int warp = threadIdx.x / WARP;
    int first = blockIdx.x * p.span;
    Weights w(p, shared + STAGES * sizeof(Part));
    w.clear(p);
    range.clear(first);
    resident.clear();
    if (threadIdx.x < QUERIES) {
        most.largest[threadIdx.x] = 0;
        resident.sums[threadIdx.x] = {-INFINITE, 0.0f};
    }
    most.used = 0;
    sums[threadIdx.x] = {{NOTHING, 0.0f}, {NOTHING, 0.0f}};
    Lists lists(p, head, first);
    Queries own_queries(p, head * p.group + first_query);
    Projection projection(p.tables, head);
    int fields = 2 * p.tables.planes * FIELDS;
    const u32* own_field = pinned_here(p.tables.fields(head), threadIdx.x % WEIGHERS);
    __syncthreads();
    follow();
    lists.ask(p, head, first);
    own_queries.ask(p, count);
    projection.ask(p.tables, 0, 0);
    u32 field = static_cast<int>(threadIdx.x % WEIGHERS) < fields ? *own_field : 0;
    int planes = p.tables.are_there() ? p.tables.plane_count(head) : 0;
    Items items(p, blockIdx.x);
    items.put(p, head, resident);
    lists.put(p, range, [&](int block, int slot) { items.find(block, slot, resident); });
    own_queries.put(queries);
    __syncthreads();
    int g = lane() % 4; // the lane's query
    int q = g < count ? head * p.group + first_query + g : -1;
    Ring ring;
    ring.parts = reinterpret_cast<Part*>(shared);
    ring.planes = planes;
    ring.stage = 0;
    ring.begin(p, range, first, q);
    Keys keys;
    bool has_items = keys.has_items(resident);
    if (has_items) {
        keys.ask(p, resident, warp, 0);
    }
    // While the first codes are on their way:
    if (planes > 0) {
        projection.run(p.tables, queries, w.of_dim);
    }
    if (has_items) {
        add_keys(p, items, keys, queries, resident);
    }
    __syncthreads();
    make_weights(p, head, planes, w, field, most);
    float unit = LOG2_E * most.unit(g); // what the lowest byte of a weight counts, to the base 2
    int used = most.used;
    for (;;) {
        int blocks = min(p.span, p.blocks - first);
        for (int tile = warp * TILE; tile < blocks; tile += TILE * WARPS) {
            int i = tile + lane() / 4; // the lane's block
            bool is_mine = i < blocks && q >= 0;
            Known known(p, q, range, first, i);
            Sum2 sum{-INFINITE, 0.0f};
#pragma unroll 1
            for (int token = 0; token < p.block_size; token += 16) {
                if (planes > 2 * ROUND) {
                    add_rounds(sum, ring, p, range, first, q, w.rounds, unit);
                    continue;
                }
                const Part& part = ring.take(p, range, first, q);
                if (used > 2) {
                    if (used == 3) {
                        add_tokens<3>(sum, part, planes, w.rounds[0], unit);
                    } else {
                        add_tokens<4>(sum, part, planes, w.rounds[0], unit);
                    }
                } else if (used == 2) {
                    add_tokens<2>(sum, part, planes, w.rounds[0], unit);
                } else if (used == 1) {
                    add_tokens<1>(sum, part, planes, w.rounds[0], unit);
                }
            }
            if (is_mine) {
                float constant = planes > 0 ? w.of_dim[g * (w.most + 1) + w.most] : 0.0f;
                float value = fmaf(sum.best + __log2f(sum.total), LN_2, constant);
                float correction = ring.parts[ring.stage].correction[threadIdx.x];
                settle(p, q, first + i, value, correction, known, sums[threadIdx.x]);
            }
        }
        first += gridDim.x * p.span;
        if (first >= p.blocks) {
            break;
        }
        asm volatile("cp.async.wait_all;" ::: "memory"); // what the last range asked for past its end
        stage_next(p, head, first, range);
        ring.begin(p, range, first, q);
    }
    if (warp < PAIRS) {
        join_keys(p, head, first_query, count, resident);
    }
    add_more_items(p, head, first_query, count, queries, resident);
    Sums all = sums[threadIdx.x];
    over_lanes(all.plain, QUERIES, WARP); // those of a query
    over_lanes(all.corrected, QUERIES, WARP);
    finish(p, head, first_query, count, all, resident);
    forget_the_rest(p, head, first_query, count);
}
