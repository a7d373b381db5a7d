// What decode kernels leave of single blocks: their logsumexps, and with a cluster their shares of the attention.
#pragma once

// Of a block's pair, in [S, Q].
__device__ __forceinline__ i64 row_of_pair() { return (i64)blockIdx.z * Q_HEADS + head_of() * GROUP; }

// Logsumexps of N units of a leaf from the weights of their tokens, s as unit_logits leaves them. Lanes of one c have the
// same heads: they halve the units among them step by step, so that lane g ends with the sum of one. A block that weighs
// less than 2^-126 of its leaf's heaviest token counts as not seen.
template <int N>
__device__ __forceinline__ void write_block_lse(const AttendParams& p, const float (&s)[N][4], const float (&reference)[2],
                                                int first_entry, i64 row, int g, int c) {
  float v[N][2];
#pragma unroll
  for (int n = 0; n < N; n++)
#pragma unroll
    for (int y = 0; y < 2; y++) v[n][y] = __fadd_rn(s[n][y], s[n][y + 2]);
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

// Shares of the attention of every block, exp(block_lse - lse), averaged over the group. Threads take entries in turn,
// `first`-th of `step`; what others wrote of block_lse was made visible by a barrier.
__device__ __forceinline__ void write_masses(const AttendParams& p, i64 row, i64 pair, const float* lse, int first, int step) {
  for (int entry = first; entry < p.entries; entry += step) {
    float sum = 0.f;
#pragma unroll
    for (int head = 0; head < GROUP; head++) {
      float x;
      asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(x) : "l"(p.block_lse + (row + head) * p.entries + entry) : "memory");
      sum += expf(x - (lse[head] == NOTHING ? 0.f : lse[head]));
    }
    p.block_mass[pair * p.entries + entry] = sum / GROUP;
  }
}
