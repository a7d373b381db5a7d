// What stands in for blocks that a choice leaves out, fitted to rows whose attention over everything is known.
//
// Formula and sums: hsswap/fitting.py; reference: hsswap/driver/host_finalize.py (learn). Constants: FP16, or none.

#include "attention.cuh"

#define LEARN_WARPS 8
#define LEARN_THREADS (32 * LEARN_WARPS)  // a dim each: value_dim is 256 at most
#define RIDGE 0.05f
#define TRUST 0.5f
#define TINY 1.17549435e-38f
#define LARGEST 3.40282347e38f

// Mirrors hsswap/driver/cuda_attention.py.
struct LearnParams {
  const float* maximum;   // [N, Q], units of log 2
  const float* total;     // [N, Q]
  const float* weighted;  // [N, Q, dv]
  const u16* full;        // [N, Q, dv], strides below, in elements
  const float* full_lse;  // [N, Q], rows lse_stride apart
  float* sums;            // [Q, 2 dv + 3]
  float* scale;           // [Q]
  float* value;           // [Q, dv]
  i64 full_stride[2], lse_stride;
  int rows, q_heads, value_dim, begin;
};

// The sum over a thread block, in one order; every thread gets it.
__device__ __forceinline__ float block_sum(float x, float* shared) {
#pragma unroll
  for (int o = 16; o; o >>= 1) x += __shfl_xor_sync(~0u, x, o);
  __syncthreads();  // the last sum was read
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < LEARN_WARPS; i++) sum += shared[i];
  return sum;
}

// Grid: a block for each q; a thread for each of dv dims.
extern "C" __global__ void __launch_bounds__(LEARN_THREADS) learn(const __grid_constant__ LearnParams p) {
  __shared__ float shared[LEARN_WARPS];
  const int q = blockIdx.x, d = threadIdx.x;
  const bool is_dim = d < p.value_dim;
  float ones = 0.f, near_sum = 0.f, lacking_sum = 0.f, square = 0.f, product = 0.f;
  for (int n = 0; n < p.rows; n++) {
    const i64 row = (i64)n * p.q_heads + q;
    const float total = p.total[row];
    if (!(total > 0.f)) continue;  // it saw nothing of the choice, or what is no number: the same for every thread
    const float full = is_dim ? half_to_float(p.full[n * p.full_stride[0] + q * p.full_stride[1] + d]) : 0.f;
    const float near = is_dim ? __fdiv_rn(p.weighted[row * p.value_dim + d], total) : 0.f;
    const float size = sqrtf(block_sum(full * full, shared)), near_square = block_sum(near * near, shared);
    if (!(size > 0.f && size <= LARGEST && near_square <= LARGEST)) continue;  // NaN is none of these
    const float share = fmaxf(0.f, 1.f - expf(lse_of(p.maximum[row], total) - p.full_lse[n * p.lse_stride + q]));
    const float weight = share / size, x = weight * near, y = (full - near) / size;
    ones += weight * weight;
    near_sum += weight * x;
    lacking_sum += weight * y;
    square += x * x;
    product += x * y;
  }
  square = block_sum(square, shared);
  product = block_sum(product, shared);
  float* sums = p.sums + (i64)q * (2 * p.value_dim + 3);
  float *near_sums = sums + 1, *lacking_sums = near_sums + p.value_dim, *dots = lacking_sums + p.value_dim;
  if (!p.begin) {
    ones += sums[0];
    square += dots[0];
    product += dots[1];
    if (is_dim) {
      near_sum += near_sums[d];
      lacking_sum += lacking_sums[d];
    }
  }
  const float near_squares = block_sum(near_sum * near_sum, shared);  // and everything above was read
  const float near_lacking = block_sum(near_sum * lacking_sum, shared);
  const float many = fmaxf((1.f + RIDGE) * ones, TINY);
  const float around = (1.f + RIDGE) * square - near_squares / many;
  const float scale = around > 0.f ? (product - near_lacking / many) / around : 0.f;
  if (is_dim) {
    near_sums[d] = near_sum;
    lacking_sums[d] = lacking_sum;
    p.value[(i64)q * p.value_dim + d] = TRUST * (lacking_sum - scale * near_sum) / many;
  }
  if (d == 0) {
    sums[0] = ones;
    dots[0] = square;
    dots[1] = product;
    p.scale[q] = TRUST * scale;
  }
}
