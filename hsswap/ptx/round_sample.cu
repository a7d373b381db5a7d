// Tokens at random: a row's race, and the choices of a verify that accept or reject drafts. One thread block a row.
// NumPy reference: hsswap.driver.host_rounds_sampling.
#include "round_weights.cuh"

constexpr u32 TARGET = 0, ACCEPT = 1, RESIDUAL = 2;

struct SampleParams {
    Sampling sampling;
    const float* logits;
    const int* position;
    u32* tokens;
    float* probabilities;  // or null
    float* distribution;   // or null
    i64 vocab;
    int rows;  // of a sequence
    int plus;
    u32 purpose;
    int pad;
};

extern "C" __global__ void __launch_bounds__(ROW_THREADS, 1) sample(const __grid_constant__ SampleParams p) {
    __shared__ RowMemory memory;
    const i64 at = blockIdx.x;
    const int s = static_cast<int>(at / p.rows), r = static_cast<int>(at % p.rows);
    u64 total;
    const Row row = row_of(p.logits + at * p.vocab, p.vocab, p.sampling, s, memory, total);
    const u32 index = static_cast<u32>(p.position[s]) + static_cast<u32>(p.plus + r);
    u32 token = NO_TOKEN;
    if (row.token != NO_TOKEN)
        token = race(p.vocab, index, p.purpose, p.sampling.seed + 2 * s, memory, [&](i64 v) { return weight(row, v); });
    const double scale = total ? static_cast<double>(1ull << row.shift) / static_cast<double>(total) : 0.;
    if (threadIdx.x == 0) {
        p.tokens[at] = token;
        if (p.probabilities) p.probabilities[at] = token == NO_TOKEN ? 0.f : static_cast<float>(weight(row, token) * scale);
    }
    if (!p.distribution) return;
    for (i64 v = threadIdx.x; v < p.vocab; v += ROW_THREADS)
        p.distribution[at * p.vocab + v] = total ? static_cast<float>(weight(row, v) * scale) : 0.f;
}

struct RejectParams {
    Sampling sampling;
    const float* logits;
    const int* pos_start;
    const u32* vtok;
    const u32* brk;
    u32* preds;
    const float* draft_distribution;  // or null
    i64 vocab;
    int rows;  // K + 1
    int pad;
};

extern "C" __global__ void __launch_bounds__(ROW_THREADS, 1) reject(const __grid_constant__ RejectParams p) {
    __shared__ RowMemory memory;
    const i64 at = blockIdx.x;
    const int s = static_cast<int>(at / p.rows), r = static_cast<int>(at % p.rows);
    const i64 used = p.brk[2 * s], base = p.brk[2 * s + 1], draft = r + 1 - base;
    if (r >= used + base) return;
    u64 total;
    const Row row = row_of(p.logits + at * p.vocab, p.vocab, p.sampling, s, memory, total);
    const u32 index = static_cast<u32>(p.pos_start[s]) + static_cast<u32>(r + 1);
    const u32* key = p.sampling.seed + 2 * s;
    u32 chosen = NO_TOKEN;
    if (total && draft >= used) {
        chosen = race(p.vocab, index, TARGET, key, memory, [&](i64 v) { return weight(row, v); });
    } else if (total) {
        const u32 token = p.vtok[at + 1];
        const float sum = static_cast<float>(static_cast<double>(total) / static_cast<double>(1ull << row.shift));
        const float* q = nullptr;
        if (p.draft_distribution) q = p.draft_distribution + (static_cast<i64>(s) * (p.rows - 1) + draft) * p.vocab;
        const auto drafted = [&](i64 v) { return q ? q[v] : v == token ? 1.f : 0.f; };
        const auto target = [&](i64 v) { return __fdiv_rn(weight(row, v), sum); };
        const float u = uniform(philox(index, 0, ACCEPT, key[0], key[1]).word[0]);
        chosen = token;
        if (!(__fmul_rn(u, drafted(token)) < target(token))) {
            chosen = race(p.vocab, index, RESIDUAL, key, memory, [&](i64 v) { return target(v) - drafted(v); });
            if (chosen == NO_TOKEN) chosen = token;
        }
    }
    if (threadIdx.x == 0) p.preds[at] = chosen;
}
