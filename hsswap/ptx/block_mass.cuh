// What decode kernels leave of single blocks: their logsumexps, and with parts of leaves their shares of the attention.
#pragma once

#if LEAF_PARTS
#define KEPT (TOGETHER * UNITS * GROUP)  // logsumexps [leaf of this thread block][unit][head]
#else
#define KEPT 1
#endif

__device__ __forceinline__ void put_lse(const AttendParams& p, int first_entry, int unit, int head, float lse, float* kept) {
  if (head >= GROUP) return;
#if LEAF_PARTS
  kept[unit * GROUP + head] = lse;
#endif
  if (first_entry + unit < p.entries) p.block_lse[(row_of_pair() + head) * p.entries + first_entry + unit] = lse;
}

// Logsumexps of N units of a leaf from the weights of their tokens: v are sums of tokens g and g + 8, for the heads 2 c and
// 2 c + 1. Lanes of one c have the same heads: they halve the units among them step by step, so that lane g ends with the
// sum of one. A block that weighs less than 2^-126 of its leaf's heaviest token counts as not seen. `kept`: of the first.
template <int N>
__device__ __forceinline__ void write_block_lse(const AttendParams& p, float (&v)[N][2], const float (&reference)[2],
                                                int first_entry, float* kept, int g, int c) {
  int unit = 0, left = N;
#pragma unroll
  for (int o = 16; o >= 4; o >>= 1) {
    const bool upper = g & (o / 4), halve = left > 1;
    left = halve ? left / 2 : 1;
#pragma unroll
    for (int n = 0; n < left; n++)
#pragma unroll
      for (int y = 0; y < 2; y++) {
        const float low = v[n][y], high = halve ? v[n + left][y] : low;
        v[n][y] = (upper ? high : low) + __shfl_xor_sync(ALL, upper ? low : high, o);
      }
    if (halve && upper) unit += left;
  }
  if (g % (8 / N)) return;
#pragma unroll
  for (int y = 0; y < 2; y++)
    put_lse(p, first_entry, unit, 2 * c + y, v[0][y] == 0.f ? NOTHING : lse_of(reference[y], v[0][y]), kept);
}

// The same of a leaf of which nothing is seen.
__device__ __forceinline__ void write_no_lse(const AttendParams& p, int first_entry, float* kept, int g, int c) {
#pragma unroll
  for (int y = 0; y < 2; y++) put_lse(p, first_entry, g, 2 * c + y, NOTHING, kept);
}

#if LEAF_PARTS
// The sum of a group's shares in the order in which block_masses (finalize.cu) adds them, over the lanes of a warp.
__device__ __forceinline__ float sum_of_group(float (&x)[8]) {
#pragma unroll
  for (int apart = 4; apart; apart >>= 1)
#pragma unroll
    for (int i = 0; i < apart; i++) x[i] = __fadd_rn(x[i], x[i + apart]);
  return x[0];
}

// Shares of the attention, exp(block_lse - lse) averaged over the group, of the blocks that this thread block took.
__device__ __forceinline__ void write_masses(const AttendParams& p, const float* kept, const float* lse) {
  for (int i = threadIdx.x; i < TOGETHER * UNITS; i += THREADS) {
    const int entry = (i / UNITS * BLOCKS + rank_of()) * UNITS + i % UNITS;
    if (entry >= p.entries) continue;
    float shares[8] = {};
#pragma unroll
    for (int head = 0; head < GROUP; head++)
      shares[head] = expf(kept[i * GROUP + head] - (lse[head] == NOTHING ? 0.f : lse[head]));
    p.block_mass[((i64)blockIdx.z * KV_HEADS + head_of()) * p.entries + entry] = sum_of_group(shares) / GROUP;
  }
}
#endif
