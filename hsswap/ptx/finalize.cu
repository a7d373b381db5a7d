// The ends of an attention: fold parts into the state, write outputs, block logsumexps and masses, make up for what
// was left out.
//
// Formula: attention.cuh. References: hsswap/driver/host_attention.py (_accumulate, _block_lse) and
// hsswap/driver/host_finalize.py. No shared memory. Constants: HEAD_DIM VALUE_DIM GROUP KV_HEADS BLOCK TRANSFORM for
// merge_spans and block_logsumexp, none for the others.

#include "attention.cuh"

#define WARPS 4

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int o = 16; o; o >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, o));
  return x;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int o = 16; o; o >>= 1) x += __shfl_xor_sync(~0u, x, o);
  return x;
}

#ifdef VALUE_DIM
// Parts of the spans into the state, in order. Grid: a block for each (s, r, q); a thread for each of dv dims.
extern "C" __global__ void __launch_bounds__(256) merge_spans(const __grid_constant__ AttendParams p) {
  const i64 row = blockIdx.x;
  const int d = threadIdx.x;
  float reference = p.begin ? NOTHING : p.maximum[row], sum = p.begin ? 0.f : p.total[row];
  float o = p.begin || d >= VALUE_DIM ? 0.f : p.weighted[row * VALUE_DIM + d];
  __syncthreads();
  const float2* sums = p.partial_sums + row * p.parts;
  const float* parts = p.partial + row * p.parts * VALUE_DIM + d;
  for (int first = 0; first < p.parts; first += 8) {
    float2 s[8];
    float x[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      s[i] = first + i < p.parts ? sums[first + i] : make_float2(NOTHING, 0.f);
      x[i] = d < VALUE_DIM && !is_empty(s[i].x, s[i].y) ? parts[(i64)(first + i) * VALUE_DIM] : 0.f;
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
      if (is_empty(s[i].x, s[i].y)) continue;
      const Weights w = fold_weights(&reference, s[i].x);
      sum = fold(sum, s[i].y, w);
      o = fold(o, x[i], w);
    }
  }
  if (d < VALUE_DIM) p.weighted[row * VALUE_DIM + d] = o;
  if (d == 0) {
    p.maximum[row] = reference;
    p.total[row] = sum;
  }
}

// Logsumexp of every entry for every row, each with a maximum of its own: far ones must not underflow. A warp for
// each (s, r, q, entry), a lane for a token at a time. Grid: x: entries / 4, y: S * R * Q.
extern "C" __global__ void __launch_bounds__(32 * WARPS) block_logsumexp(const __grid_constant__ AttendParams p) {
  const int entry = blockIdx.x * WARPS + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  if (entry >= p.entries) return;
  for (i64 row = blockIdx.y; row < (i64)p.sequences * p.rows * Q_HEADS; row += gridDim.y) {
    const int q = (int)(row % Q_HEADS), r = (int)(row / Q_HEADS % p.rows), s = (int)(row / Q_HEADS / p.rows);
    const i64 list = ((i64)s * KV_HEADS + q / GROUP) * p.list_stride;
#if PAGES
    const int page = p.slots[list + entry];
    const u8* unit = page < 0 ? nullptr : page_of(p, false, page, q / GROUP);
    const i64 apart = p.key_stride[2];
#else
    const u8* unit = unit_of(p, p.slots[list + entry]);
    constexpr i64 apart = HEAD_DIM * (E4M3 ? 1 : 2);
#endif
    const Sight see = sight_of(p, length_of(p, s), r);
    const int first = unit ? first_token_of(p, list, entry) : NOWHERE - BLOCK;
    const u16* query = p.queries + s * p.query_stride[0] + r * p.query_stride[1] + q * p.query_stride[2];
    float top = NOTHING, sum = 0.f;
    for (int t = lane; t < BLOCK; t += 32) {
      if (!is_in(first + t, see)) continue;
      float x = 0.f;
#if E4M3
      const u8* key = unit + t * apart;
      for (int d = 0; d < HEAD_DIM; d++) x = __fmaf_rn(half_to_float(query[d * p.query_stride[3]]), e4m3_to_float(key[d]), x);
#if PAGES
      x *= *(const float*)(p.key_scales + page * p.scale_stride[0] + q / GROUP * p.scale_stride[1] + t * p.scale_stride[2]);
#else
      x *= ((const float*)(unit + BLOCK * (HEAD_DIM + VALUE_DIM)))[t];
#endif
#else
      const u16* key = (const u16*)(unit + t * apart);
      for (int d = 0; d < HEAD_DIM; d++) x = __fmaf_rn(half_to_float(query[d * p.query_stride[3]]), half_to_float(key[d]), x);
#endif
      x *= p.scale;
#if TRANSFORM == 2
      x = p.soft_cap * tanhf(x / p.soft_cap);
#endif
      const float higher = fmaxf(top, x);
      if (higher != NOTHING) sum = sum * expf(top - higher) + expf(x - higher);
      top = higher;
    }
    const float all = warp_max(top), base = all == NOTHING ? 0.f : all;
    const float total = warp_sum(sum * expf(top - base));
    if (lane == 0) p.block_lse[row * p.entries + entry] = base + logf(total);
  }
}
#endif

// Mirrors hsswap/driver/cuda_attention.py.
struct FinalizeParams {
  const float* maximum;     // [S, R, Q], units of log 2
  const float* total;       // [S, R, Q]
  const float* weighted;    // [S, R, Q, dv]
  u16* out;                 // [S, R, Q, dv], strides below, in elements
  float* lse;               // [S, R, Q], or null
  const float* block_lse;   // [S, R, Q, B]
  float* block_mass;        // [S, H, B]
  const float* sinks;       // [Q], or null
  i64 out_stride[4];
  int sequences, rows, q_heads, value_dim, kv_heads, entries;
};

// out = weighted / total. A warp for each (s, r, q).
extern "C" __global__ void __launch_bounds__(32 * WARPS) finalize(const __grid_constant__ FinalizeParams p) {
  const i64 row = (i64)blockIdx.x * WARPS + (threadIdx.x >> 5);
  const int lane = threadIdx.x & 31;
  if (row >= (i64)p.sequences * p.rows * p.q_heads) return;
  const int q = (int)(row % p.q_heads), r = (int)(row / p.q_heads % p.rows), s = (int)(row / p.q_heads / p.rows);
  const End end = end_of(p.maximum[row], p.total[row], p.sinks, q);
  u16* out = p.out + s * p.out_stride[0] + r * p.out_stride[1] + q * p.out_stride[2];
  for (int d = lane; d < p.value_dim; d += 32)
    out[d * p.out_stride[3]] = output_of(p.weighted[row * p.value_dim + d] * end.factor, end.total);
  if (p.lse && lane == 0) p.lse[row] = lse_of(end.reference, end.total);
}

// Each block's share of the attention: exp(block_lse - lse), averaged over rows and group. A warp for each
// (s, h, b), a lane for a (row, query head) at a time.
extern "C" __global__ void __launch_bounds__(32 * WARPS) block_masses(const __grid_constant__ FinalizeParams p) {
  const i64 at = (i64)blockIdx.x * WARPS + (threadIdx.x >> 5);
  const int lane = threadIdx.x & 31, group = p.q_heads / p.kv_heads;
  if (at >= (i64)p.sequences * p.kv_heads * p.entries) return;
  const int block = (int)(at % p.entries), h = (int)(at / p.entries % p.kv_heads), s = (int)(at / p.entries / p.kv_heads);
  float sum = 0.f;
  for (int i = lane; i < p.rows * group; i += 32) {
    const i64 row = ((i64)s * p.rows + i / group) * p.q_heads + h * group + i % group;
    const End end = end_of(p.maximum[row], p.total[row], p.sinks, h * group + i % group);
    const float lse = lse_of(end.reference, end.total);
    sum += expf(p.block_lse[row * p.entries + block] - (lse == NOTHING ? 0.f : lse));
  }
  sum = warp_sum(sum);
  if (lane == 0) p.block_mass[at] = sum / (p.rows * group);
}

// Mirrors hsswap/driver/cuda_attention.py.
struct MakeUpParams {
  const float* maximum;    // [Q], units of log 2
  const float* total;      // [Q]
  const float* weighted;   // [Q, dv]
  u16* out;                // [Q, dv], strides below, in elements
  const float* sinks;      // [Q], or null
  const float* predicted;  // [Q, B], natural, rows predicted_stride apart
  const int* chosen;       // [H, chosen_count], -1: none
  const float* scale;      // [Q]
  const float* value;      // [Q, dv]
  i64 out_stride[2], predicted_stride;
  int blocks, chosen_count, group, value_dim;
};

#define MAKE_UP_WARPS 8
#define TAKEN_WORDS 1024  // chosen blocks are marked in shared memory, 32,768 blocks at a time

// out = o + R / (R + A) (scale o + value): o as finalize gives it, A the sum of exponentials behind it, R that of the
// blocks that were not chosen, as predicted. A block for each q. Reference: hsswap/driver/host_finalize.py (_made_up).
extern "C" __global__ void __launch_bounds__(32 * MAKE_UP_WARPS) make_up(const __grid_constant__ MakeUpParams p) {
  __shared__ unsigned taken[TAKEN_WORDS];
  __shared__ float sums[MAKE_UP_WARPS];
  const int q = blockIdx.x, threads = 32 * MAKE_UP_WARPS;
  const End end = end_of(p.maximum[q], p.total[q], p.sinks, q);
  if (end.total == 0.f) return;  // it saw nothing, and stays 0
  const float lse = lse_of(end.reference, end.total);
  const float* predicted = p.predicted + q * p.predicted_stride;
  const int* chosen = p.chosen + (i64)(q / p.group) * p.chosen_count;
  float rest = 0.f;
  for (int first = 0; first < p.blocks; first += 32 * TAKEN_WORDS) {
    for (int i = threadIdx.x; i < TAKEN_WORDS; i += threads) taken[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < p.chosen_count; i += threads) {
      const int at = chosen[i] - first;
      if (chosen[i] >= 0 && at >= 0 && at < 32 * TAKEN_WORDS) atomicOr(&taken[at / 32], 1u << at % 32);
    }
    __syncthreads();
    const int count = min(p.blocks - first, 32 * TAKEN_WORDS);
    for (int b = threadIdx.x; b < count; b += threads)
      if (!(taken[b / 32] >> b % 32 & 1)) rest += expf(predicted[first + b] - lse);
    __syncthreads();
  }
  rest = warp_sum(rest);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = rest;
  __syncthreads();
  float all = 0.f;
  for (int i = 0; i < MAKE_UP_WARPS; i++) all += sums[i];
  const float share = 1.f - 1.f / (1.f + all), scale = p.scale[q];
  for (int d = threadIdx.x; d < p.value_dim; d += threads) {
    const float near = __fdiv_rn(p.weighted[(i64)q * p.value_dim + d] * end.factor, end.total);
    const float lacking = scale * near + p.value[(i64)q * p.value_dim + d];
    p.out[q * p.out_stride[0] + d * p.out_stride[1]] = half_of(near + share * lacking);
  }
}
