// From the logits of a leaf to its weights: rows in fragments of matrix steps, for attend_tile and attend_wide.
//
// Lane (g, c) holds rows g and g + 8 of 16, tokens 8 n + 2 c and the next. Constants: TRANSFORM (attend_tile.cu).
#pragma once

// A thread's two rows of 16: g and g + 8.
struct Rows {
  Sight sight[2];
  float reference[2], sum[2];
};

// What is done to logits before their maximum is taken, and the exponent's factor.
#if TRANSFORM
#define FACTOR(p) 1.f
#else
#define FACTOR(p) ((p).scale * LOG2_E)
#endif

// References of a thread's two rows of a leaf.
template <bool MASKED>
__device__ __forceinline__ void leaf_references(const AttendParams& p, float (&s)[LEAF / 8][4], const Rows& rows,
                                                float* reference, const int* position) {
  const int c = threadIdx.x & 3;
  float tops[2][2] = {{NOTHING, NOTHING}, {NOTHING, NOTHING}}, top[2];  // two chains a row: each waits for itself
#pragma unroll
  for (int n = 0; n < LEAF / 8; n++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
#if TRANSFORM == 1
      s[n][i] *= p.scale * LOG2_E;
#elif TRANSFORM == 2
      s[n][i] = p.soft_cap * tanhf(s[n][i] * p.scale / p.soft_cap) * LOG2_E;
#endif
      if (MASKED && !is_in(position[n * 8 + 2 * c + (i & 1)], rows.sight[i >> 1])) s[n][i] = NOTHING;
      tops[i >> 1][i & 1] = fmaxf(tops[i >> 1][i & 1], s[n][i]);
    }
  }
#pragma unroll
  for (int y = 0; y < 2; y++) {
    top[y] = fmaxf(tops[y][0], tops[y][1]);
    top[y] = fmaxf(top[y], __shfl_xor_sync(~0u, top[y], 1));
    top[y] = fmaxf(top[y], __shfl_xor_sync(~0u, top[y], 2));
    reference[y] = leaf_reference(top[y], FACTOR(p));
  }
}

// Weights in place of logits, and their sums.
__device__ __forceinline__ void leaf_weights(const AttendParams& p, float (&s)[LEAF / 8][4], const float* reference,
                                             float* sum) {
  float factor = FACTOR(p), base[2], even[2] = {0.f, 0.f}, odd[2] = {0.f, 0.f};
  bool big[2];
#pragma unroll
  for (int y = 0; y < 2; y++) {
    base[y] = reference[y] == NOTHING ? 0.f : reference[y];
    big[y] = fabsf(base[y]) > BIG_REFERENCE;
  }
  if (__any_sync(~0u, big[0] || big[1])) {
    // Exponents here, and no more is done to them below.
#pragma unroll
    for (int n = 0; n < LEAF / 8; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float x = __fmaf_rn(s[n][i], factor, -base[i >> 1]);
        s[n][i] = big[i >> 1] && x > 0.f ? 0.f : x;
      }
    factor = 1.f;
    base[0] = base[1] = 0.f;
  }
#pragma unroll
  for (int u = 0; u < LEAF / 16; u++) {
#pragma unroll
    for (int n = 2 * u; n < 2 * u + 2; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) s[n][i] = exp2_of(__fmaf_rn(s[n][i], factor, -base[i >> 1]));
#pragma unroll
    for (int y = 0; y < 2; y++) {
      even[y] = __fadd_rn(even[y], __fadd_rn(s[2 * u][2 * y], s[2 * u + 1][2 * y]));
      odd[y] = __fadd_rn(odd[y], __fadd_rn(s[2 * u][2 * y + 1], s[2 * u + 1][2 * y + 1]));
    }
  }
#pragma unroll
  for (int y = 0; y < 2; y++) {
    sum[y] = __fadd_rn(even[y], odd[y]);
    sum[y] = __fadd_rn(sum[y], __shfl_xor_sync(~0u, sum[y], 1));
    sum[y] = __fadd_rn(sum[y], __shfl_xor_sync(~0u, sum[y], 2));
  }
}

// Weights as operands of matrix steps.
__device__ __forceinline__ void pack_weights(u32 (&weights)[LEAF / 16][4], const float (&s)[LEAF / 8][4]) {
#pragma unroll
  for (int u = 0; u < LEAF / 16; u++)
#pragma unroll
    for (int y = 0; y < 2; y++) {
      weights[u][y] = pack(s[2 * u][2 * y], s[2 * u][2 * y + 1]);
      weights[u][y + 2] = pack(s[2 * u + 1][2 * y], s[2 * u + 1][2 * y + 1]);
    }
}

template <bool MASKED>
__device__ __forceinline__ void softmax(const AttendParams& p, float (&s)[LEAF / 8][4], u32 (&weights)[LEAF / 16][4],
                                        const Rows& rows, float* reference, float* sum, const int* position) {
  leaf_references<MASKED>(p, s, rows, reference, position);
  leaf_weights(p, s, reference, sum);
  pack_weights(weights, s);
}
