// The end of attend_decode: the spans of a row into its state, in order, or into the output.
//
// Formula and tree: attention.cuh. sm_90 and newer. Launched so that it may begin before attend_decode ends: it waits itself.
//
// Grid     x: S * Q clusters of D / SLICE blocks; a block folds SLICE dims
// Block    128 threads: all load PARTS parts at once and weigh them, a warp folds the dims, another the sums
// Shared   static
// Constants  HEAD_DIM (64 or 128) GROUP KV_HEADS BLOCK

#include "attention.cuh"

#if __CUDA_ARCH__ < 900  // cuda_attention.py does not launch it there
extern "C" __global__ void merge_decode(const __grid_constant__ AttendParams p) {}
#else

#define D HEAD_DIM
#define SLICE 32
#define SLICES (D / SLICE)
#define THREADS 128
#define WARPS (THREADS / 32)
#define PARTS 128  // at once
#define OWN (PARTS * SLICE / 4 / THREADS)  // quads of dims of a thread

__device__ __forceinline__ float4 load_quad(const float* from) {
  float4 v;
  asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(from) : "memory");
  return v;
}

// How parts are folded. A part of which the row sees nothing changes no bit: x 1 + -0 is x.
struct Steps {
  float old[PARTS], part[PARTS], sum[PARTS];
  float values[PARTS][SLICE];  // times their weight
  float tops[WARPS];
};

// The weights of parts `first` on, a thread each; returns the reference behind them.
__device__ __forceinline__ float weigh(Steps& steps, float2 s, float reference) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  float top = s.x;
#pragma unroll
  for (int o = 1; o < 32; o <<= 1) {
    const float before = __shfl_up_sync(ALL, top, o);
    if (lane >= o) top = fmaxf(top, before);
  }
  if (lane == 31) steps.tops[warp] = top;
  float old = __shfl_up_sync(ALL, top, 1);
  __syncthreads();
  float base = reference, after = reference;
#pragma unroll
  for (int i = 0; i < WARPS; i++) {
    after = fmaxf(after, steps.tops[i]);
    if (i < warp) base = after;
  }
  old = lane == 0 ? base : fmaxf(base, old);
  const bool empty = is_empty(s.x, s.y);
  const Weights w = fold_weights(&old, s.x);
  steps.old[threadIdx.x] = empty ? 1.f : w.old;
  steps.part[threadIdx.x] = empty ? -1.f : w.part;
  steps.sum[threadIdx.x] = empty ? -0.f : __fmul_rn(s.y, w.part);
  return after;
}

__device__ __forceinline__ float weighted_value(float x, float w) { return w < 0.f ? -0.f : __fmul_rn(x, w); }

// By the whole block: one dim a lane of warp 0.
__device__ __forceinline__ void store_end(const AttendParams& p, i64 row, int dim, float o, float reference, float sum) {
  const int head = (int)(row % Q_HEADS);
  const bool first = threadIdx.x < 32;
  if (p.out) {
    if (!first) return;
    const End end = end_of(reference, sum, p.sinks, head);
    u16* out = p.out + row / Q_HEADS * p.out_stride[0] + head * p.out_stride[2];
    out[dim * p.out_stride[3]] = output_of(o * end.factor, end.total);
    if (p.lse && dim == 0) p.lse[row] = lse_of(end.reference, end.total);
    return;
  }
  // Every block of the row has read its state.
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  if (!first) return;
  p.weighted[row * D + dim] = o;
  if (dim == 0) {
    p.maximum[row] = reference;
    p.total[row] = sum;
  }
}

__device__ __forceinline__ float2 load_sums(const float2* from) {
  float2 v;
  asm volatile("ld.global.cg.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(from) : "memory");
  return v;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) merge_decode(const __grid_constant__ AttendParams p) {
  __shared__ Steps steps;
  __shared__ float total;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, slice = blockIdx.x % SLICES;
  const i64 row = blockIdx.x / SLICES;
  const int dim = slice * SLICE + lane;
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const float* from = p.partial + row * p.parts * D + slice * SLICE;
  const float2* sums = p.partial_sums + row * p.parts;
  float reference = NOTHING, sum = 0.f, o = 0.f;
  if (!p.begin) {
    reference = p.maximum[row];
    sum = p.total[row];
    o = p.weighted[row * D + dim];
  }
  for (int first = 0; first < p.parts; first += PARTS) {
    const int mine = first + threadIdx.x, count = min(PARTS, p.parts - first);
    float4 x[OWN];
    float2 s = {NOTHING, 0.f};
    if (mine < p.parts) s = load_sums(sums + mine);
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      const int part = i * (THREADS / 8) + threadIdx.x / 8;
      if (part < count) x[i] = load_quad(from + (i64)(first + part) * D + threadIdx.x % 8 * 4);
    }
    reference = weigh(steps, s, reference);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      const int part = i * (THREADS / 8) + threadIdx.x / 8;
      if (part < count) {
        const float w = steps.part[part];
        *(float4*)&steps.values[part][threadIdx.x % 8 * 4] =
            make_float4(weighted_value(x[i].x, w), weighted_value(x[i].y, w), weighted_value(x[i].z, w), weighted_value(x[i].w, w));
      }
    }
    __syncthreads();
    if (warp == 0) {
#pragma unroll 16
      for (int k = 0; k < count; k++) o = __fmaf_rn(o, steps.old[k], steps.values[k][lane]);
    } else if (warp == 1) {
#pragma unroll 16
      for (int k = 0; k < count; k++) sum = __fmaf_rn(sum, steps.old[k], steps.sum[k]);
      if (lane == 0) total = sum;
    }
    __syncthreads();
    sum = total;
  }
  store_end(p, row, dim, o, reference, sum);
}
#endif
