// Attention over K and V of E4M3: what every kernel that takes them computes alike, beside attention.cuh.
//
// A leaf, with codes k and v, scales a of K and b of V of each token, and a query q = 2^x q', q' in FP16:
//
//     s = (q'.k) a 2^x      P as in attention.cuh      u = P b      U = 2^y, the largest |u| of the leaf is 2^14 U to 2^15 U
//     o = (rounded(u / U) V) U, rounded to FP16        l = sum of P
//
// so that the products are of FP16, whose matrix steps need no more than a conversion of the codes, and nothing is lost:
// codes are FP16, q' keeps 31 binades of q whole, and of weights 28 below the largest are rounded to 11 bits. Where
// head_dim is a multiple of 64, matrix steps of QK take dims 16 c + 4 j + (0..3) of 64, c = 0..3, at step j, which
// a lane then has in 16 bytes of a row.
#pragma once

#define STEPS_CROSS (HEAD_DIM % 64 == 0)

// The exponent x of a query, of the bits of its largest finite size.
__device__ __forceinline__ int exponent_of_query(u32 largest) {
  return largest ? max((int)(largest >> 23) - 127, -112) - 14 : 0;
}

// The same of eight dims of a query a lane, in all lanes.
__device__ __forceinline__ int query_exponent(const float (&q)[8]) {
  u32 largest = 0;
#pragma unroll
  for (int k = 0; k < 8; k++) {
    const u32 bits = __float_as_uint(q[k]) & 0x7fffffffu;
    largest = max(largest, bits < 0x7f800000u ? bits : 0u);
  }
#pragma unroll
  for (int o = 16; o; o >>= 1) largest = max(largest, __shfl_xor_sync(~0u, largest, o));
  return exponent_of_query(largest);
}

__device__ __forceinline__ float scaled_logit(float s, float of_key, float of_query) {
  return __fmul_rn(__fmul_rn(s, of_key), of_query);
}

// Unseen tokens have no weight, whatever their scale.
__device__ __forceinline__ float scaled_weight(float weight, float of_value) {
  return weight == 0.f ? 0.f : __fmul_rn(weight, of_value);
}

// The exponent y, of the largest size of a scaled weight.
__device__ __forceinline__ int weight_exponent(float top) {
  return max((int)(__float_as_uint(top) >> 23) - 127, -112) - 14;
}
