// What decode kernels leave of single blocks: their logsumexps, and with a cluster their shares of the attention.
#pragma once

// Logsumexps of N units of a leaf from the weights of their tokens: v are sums of tokens g and g + 8, for the heads 2 c and
// 2 c + 1. Lanes of one c have the same heads: they halve the units among them step by step, so that lane g ends with the
// sum of one. A block that weighs less than 2^-126 of its leaf's heaviest token counts as not seen.
template <int N>
__device__ __forceinline__ void write_block_lse(const AttendParams& p, float (&v)[N][2], const float (&reference)[2],
                                                int first_entry, i64 row, int g, int c) {
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
  const int entry = first_entry + unit;
  if (g % (8 / N) || entry >= p.entries) return;
#pragma unroll
  for (int y = 0; y < 2; y++)
    if (2 * c + y < GROUP)
      p.block_lse[(row + 2 * c + y) * p.entries + entry] = v[0][y] == 0.f ? NOTHING : lse_of(reference[y], v[0][y]);
}

// The same of a leaf of which nothing is seen.
__device__ __forceinline__ void write_no_lse(const AttendParams& p, int first_entry, i64 row, int g, int c) {
  if (first_entry + g >= p.entries) return;
#pragma unroll
  for (int y = 0; y < 2; y++)
    if (2 * c + y < GROUP) p.block_lse[(row + 2 * c + y) * p.entries + first_entry + g] = NOTHING;
}

// The sum of a group's shares in the order in which block_masses (finalize.cu) adds them, over the lanes of a warp.
__device__ __forceinline__ float sum_of_group(float (&x)[8]) {
#pragma unroll
  for (int apart = 4; apart; apart >>= 1)
#pragma unroll
    for (int i = 0; i < apart; i++) x[i] = __fadd_rn(x[i], x[i + apart]);
  return x[0];
}

// Shares of the attention of every block, exp(block_lse - lse), averaged over the group. Threads take entries in turn,
// `first`-th of `step`; what others wrote of block_lse was made visible by a barrier.
__device__ __forceinline__ void write_masses(const AttendParams& p, i64 row, i64 pair, const float* lse, int first, int step) {
  for (int entry = first; entry < p.entries; entry += step) {
    float shares[8] = {};
#pragma unroll
    for (int head = 0; head < GROUP; head++) {
      const float x = load_from_others(p.block_lse + (row + head) * p.entries + entry);
      shares[head] = expf(x - (lse[head] == NOTHING ? 0.f : lse[head]));
    }
    p.block_mass[pair * p.entries + entry] = sum_of_group(shares) / GROUP;
  }
}
