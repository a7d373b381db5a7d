// The weights of a row of logits, what the filters keep of them, and the race among them: one thread block a row.
// Definitions: hsswap.driver.sampling_operations. A filter keeps the weights from a threshold up, so the row is never
// sorted: the threshold's bits are found eight at a time, from histograms. Sums are of whole numbers, so that their
// order changes nothing.
#pragma once
#include "round_rows.cuh"

constexpr int BINS = 256;

struct Sampling {
    const float* temperature;
    const u32* top_k;
    const float* top_p;
    const float* min_p;
    const u32* seed;  // [S, 2]
};

struct RowMemory {
    Best best[ROW_THREADS / WARP];
    u64 bins[BINS];
    u64 total;
    u64 above;
    u32 bits;
};

// One row's weights. `kind` 0: exponentials, 1: infinite logits are certain, 2: only `token` (temperature 0).
struct Row {
    const float* logits;
    i64 vocab;
    float temperature;
    float peak;
    float least;  // weights under it are 0
    u32 token;    // the likeliest; NO_TOKEN: a row of NaN
    int kind;
    int shift;    // a weight is a whole number of 2^-shift in sums
};

__device__ __forceinline__ float unfiltered(const Row& row, i64 v) {
    if (row.kind == 2) return v == row.token ? 1.f : 0.f;
    const float logit = row.logits[v];
    if (is_nan(logit)) return 0.f;
    const float x = __fdiv_rn(logit, row.temperature);
    if (x == row.peak) return 1.f;
    return row.kind ? 0.f : expf(x - row.peak);
}

__device__ __forceinline__ float weight(const Row& row, i64 v) {
    const float w = unfiltered(row, v);
    return w < row.least ? 0.f : w;
}

__device__ __forceinline__ u64 whole(const Row& row, float w) {
    return static_cast<u64>(static_cast<double>(w) * static_cast<double>(1ull << row.shift));
}

// The bits of the weight at which the sum of `of(w)` over greater weights is still under `limit` and with it no longer,
// among weights that `row` keeps; 0 where all of them stay under it. All threads get the result.
template <class Of>
__device__ __forceinline__ u32 threshold(const Row& row, RowMemory& m, double limit, Of of) {
    u32 prefix = 0;
    u64 above = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (int i = threadIdx.x; i < BINS; i += ROW_THREADS) m.bins[i] = 0;
        __syncthreads();
        for (i64 v = threadIdx.x; v < row.vocab; v += ROW_THREADS) {
            const float w = weight(row, v);
            const u32 bits = __float_as_uint(w);
            if (shift == 24 || (bits ^ prefix) >> (shift + 8) == 0) atomicAdd(&m.bins[bits >> shift & 255], of(w));
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            u64 sum = above;
            int bin = BINS - 1;
            while (bin >= 0 && static_cast<double>(sum + m.bins[bin]) < limit) sum += m.bins[bin--];
            m.bits = bin < 0 ? NO_TOKEN : prefix | static_cast<u32>(bin) << shift;
            m.above = sum;
        }
        __syncthreads();
        if (m.bits == NO_TOKEN) return 0;
        prefix = m.bits;
        above = m.above;
        __syncthreads();
    }
    return prefix;
}

// Sum of the weights that the filters keep, in units of 2^-shift.
__device__ __forceinline__ u64 total_of(const Row& row, RowMemory& m) {
    if (threadIdx.x == 0) m.total = 0;
    __syncthreads();
    u64 sum = 0;
    for (i64 v = threadIdx.x; v < row.vocab; v += ROW_THREADS) sum += whole(row, weight(row, v));
    atomicAdd(&m.total, sum);
    __syncthreads();
    sum = m.total;
    __syncthreads();
    return sum;
}

// The row of sequence s, its filters applied; `total` of what is kept.
__device__ __forceinline__ Row row_of(const float* logits, i64 vocab, const Sampling& sampling, int s, RowMemory& m, u64& total) {
    Row row = {logits, vocab, sampling.temperature[s], 0.f, 0.f, NO_TOKEN, 0, 0};
    Best best = none();
    for (i64 v = threadIdx.x; v < vocab; v += ROW_THREADS) take(best, logits[v], static_cast<u32>(v));
    best = fold_block(best, m.best);
    __syncthreads();
    row.token = best.token;
    row.shift = min(44, __clzll(vocab) - 2);  // the sum of V weights of 1 stays under 2^62
    total = 0;
    if (row.token == NO_TOKEN) return row;
    row.kind = 2;
    if (row.temperature > 0.f) {
        row.peak = __fdiv_rn(best.value, row.temperature);
        row.kind = is_finite(row.peak) ? 0 : 1;
        const u32 count = sampling.top_k[s];
        if (count && count < vocab) {
            const u32 bits = threshold(row, m, static_cast<double>(count), [](float) { return 1ull; });
            row.least = __uint_as_float(bits);
        }
        const float share = sampling.top_p[s];
        if (share < 1.f) {
            const double limit = static_cast<double>(share) * static_cast<double>(total_of(row, m));
            const u32 bits = limit > 0. ? threshold(row, m, limit, [&](float w) { return whole(row, w); }) : __float_as_uint(1.f);
            row.least = max(row.least, __uint_as_float(bits));
        }
        row.least = max(row.least, min(sampling.min_p[s], 1.f));
    }
    total = total_of(row, m);
    return row;
}

struct Words {
    u32 word[4];
};

// Philox4x32-10.
__device__ __forceinline__ Words philox(u32 c0, u32 c1, u32 c2, u32 k0, u32 k1) {
    u32 c3 = 0;
#pragma unroll
    for (int i = 0; i < 10; i++) {
        const u32 left = 0xD2511F53u * c0, left_high = __umulhi(0xD2511F53u, c0);
        const u32 right = 0xCD9E8D57u * c2, right_high = __umulhi(0xCD9E8D57u, c2);
        c0 = right_high ^ c1 ^ k0;
        c1 = right;
        c2 = left_high ^ c3 ^ k1;
        c3 = left;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return {c0, c1, c2, c3};
}

__device__ __forceinline__ float uniform(u32 word) {
    return fminf(__fmul_rn(__fadd_rn(__uint2float_rn(word), 0.5f), 2.3283064365386963e-10f), 0.99999994039535522f);
}

// The place that wins among weights `of(v)`; NO_TOKEN where none is positive. All threads get it.
template <class Of>
__device__ __forceinline__ u32 race(i64 vocab, u32 index, u32 purpose, const u32* key, RowMemory& m, Of of) {
    Best best = none();
    for (i64 block = threadIdx.x; 4 * block < vocab; block += ROW_THREADS) {
        float w[4];
        bool is_any = false;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            w[i] = 4 * block + i < vocab ? of(4 * block + i) : 0.f;
            is_any |= w[i] > 0.f;
        }
        if (!is_any) continue;
        const Words words = philox(index, static_cast<u32>(block), purpose, key[0], key[1]);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (!(w[i] > 0.f)) continue;
            const float score = logf(w[i]) - logf(-log1pf(-uniform(words.word[i])));
            const u32 v = static_cast<u32>(4 * block + i);
            if (best.token == NO_TOKEN || score > best.value) best = {score, 0.f, v};
        }
    }
    best = fold_block(best, m.best);
    __syncthreads();
    return best.token;
}
