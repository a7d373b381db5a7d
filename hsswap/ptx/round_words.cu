// Words of speculative rounds, one thread each: drafts, maps of vocabularies, counters, rings, and the look-up of the
// last tokens in a sequence's own. NumPy reference: hsswap.driver.host_rounds.
#include "common.cuh"

constexpr u32 NO_TOKEN = 0xffffffffu, BAD_DRAFT = 16;
constexpr int LONGEST = 8;  // NGRAM_LONGEST of round_checks.py

struct WordParams {
    u32* target;
    const u32* source;  // token, counter
    const u32* other;   // probability, map, pos_start
    u32* more;          // flags, entry
    i64 rows;           // sequences
    i64 columns;        // words a sequence of the target; entries of the map
    i64 index;          // slot, column, plus
    u32 value;
    int pad;
};

__device__ __forceinline__ i64 thread_index() { return static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; }

extern "C" __global__ void __launch_bounds__(256) pack_tok_p(const __grid_constant__ WordParams p) {
    const i64 s = thread_index();
    if (s >= p.rows) return;
    p.target[s * p.columns + 2 * p.index] = p.source[s];
    p.target[s * p.columns + 2 * p.index + 1] = p.other[s];
}

extern "C" __global__ void __launch_bounds__(256) tok_map(const __grid_constant__ WordParams p) {
    const i64 s = thread_index();
    if (s >= p.rows) return;
    const u32 token = p.target[s];
    const bool is_known = token < p.columns;
    if (!is_known && token != NO_TOKEN) p.more[s] |= BAD_DRAFT;
    p.target[s] = is_known ? p.other[token] : NO_TOKEN;
}

extern "C" __global__ void __launch_bounds__(256) token_ring(const __grid_constant__ WordParams p) {
    const i64 s = thread_index();
    if (s >= p.rows) return;
    i64 at = (static_cast<i64>(static_cast<int>(p.other[s])) - static_cast<int>(p.more[s])) % p.columns;
    if (at < 0) at += p.columns;
    p.target[s * p.columns + at] = p.source[s];
}

extern "C" __global__ void __launch_bounds__(256) iota(const __grid_constant__ WordParams p) {
    const i64 i = thread_index();
    if (i >= p.rows * p.columns) return;
    p.target[i] = p.source[i / p.columns] + static_cast<u32>(p.index + i % p.columns);
}

extern "C" __global__ void __launch_bounds__(256) set_word(const __grid_constant__ WordParams p) {
    const i64 s = thread_index();
    if (s < p.rows) p.target[s * p.columns + p.index] = p.value;
}

struct NgramParams {
    const u32* history;
    const int* pos;
    const u32* pend;
    u32* drafts;
    i64 tokens;  // T
    int count;   // K
    int shortest;
    int longest;
    int pad;
};

// One thread block a sequence. A place is its end e < L; its key is how many tokens before e equal the last ones,
// then e: the largest key is the longest n-gram's last place.
extern "C" __global__ void __launch_bounds__(256) ngram(const __grid_constant__ NgramParams p) {
    __shared__ u64 best_of[8];
    const int s = blockIdx.x;
    const u32* history = p.history + s * p.tokens;
    const i64 length = min(p.tokens, max(0ll, static_cast<i64>(p.pos[s]) + (p.pend[s] != NO_TOKEN)));
    u32 tail[LONGEST];
#pragma unroll
    for (int k = 0; k < LONGEST; k++) tail[k] = k < length ? history[length - 1 - k] : NO_TOKEN;
    u64 best = 0;
    for (i64 e = 1 + threadIdx.x; e < length; e += blockDim.x) {
        int same = 0;
#pragma unroll
        for (int k = 0; k < LONGEST; k++)
            if (same == k && k < p.longest && k < e && history[e - 1 - k] == tail[k]) same = k + 1;
        if (same >= p.shortest) best = max(best, static_cast<u64>(same) << 56 | static_cast<u64>(e));
    }
    for (int apart = WARP / 2; apart; apart /= 2) best = max(best, __shfl_xor_sync(ALL, best, apart));
    if (lane_index() == 0) best_of[threadIdx.x / WARP] = best;
    __syncthreads();
    for (int i = 0; i < static_cast<int>(blockDim.x) / WARP; i++) best = max(best, best_of[i]);
    const i64 place = static_cast<i64>(best & 0xffffffffffffffull);
    u32* drafts = p.drafts + static_cast<i64>(s) * 2 * p.count;
    for (int j = threadIdx.x; j < p.count; j += blockDim.x) {
        drafts[2 * j] = best ? history[place + j % (length - place)] : NO_TOKEN;
        drafts[2 * j + 1] = best ? __float_as_uint(1.f) : 0;
    }
}
