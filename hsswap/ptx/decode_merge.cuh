// How attend_decode folds parts: in registers, in a block, and by the last block of a pair over global memory.
#pragma once

#define MOST_PARTS 256  // of a pair, folded in the launch; beyond, merge_spans (finalize.cu) does it
#define SKIP (-1.f)     // the weight of a part of which the row sees nothing

__device__ __forceinline__ float2* leaf_sums(u8* memory) { return (float2*)(memory + WARPS * RING); }

__device__ __forceinline__ void fold_leaf(Part& span, const Part& leaf) {
#pragma unroll
  for (int y = 0; y < 2; y++) {
    if (is_empty(leaf.reference[y], leaf.sum[y])) continue;
    const Weights w = fold_weights(&span.reference[y], leaf.reference[y]);
    span.sum[y] = fold(span.sum[y], leaf.sum[y], w);
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
      span.o[k][y] = fold(span.o[k][y], leaf.o[k][y], w);
      span.o[k][y + 2] = fold(span.o[k][y + 2], leaf.o[k][y + 2], w);
    }
  }
}

// The first row of a block's pair: [S, Q].
__device__ __forceinline__ i64 first_row() { return (i64)(blockIdx.y / KV_HEADS) * Q_HEADS + blockIdx.y % KV_HEADS * GROUP; }

__device__ __forceinline__ void write_global(const AttendParams& p, const Part& part, int number, int g, int c) {
  const i64 at = first_row() * p.parts + number;
  write_part(part, p.partial + at * D, (i64)p.parts * D, p.partial_sums + at, p.parts, g, c);
}

#if FOLD_LEAVES
// The leaves of a block's warps are one span.
__device__ __forceinline__ void fold_block(const AttendParams& p, u8* memory) {
  const i64 at = first_row() * p.parts + blockIdx.x;
  for (int e = threadIdx.x; e < GROUP * D / 2; e += THREADS) {
    const int head = e / (D / 2);
    float reference = NOTHING, sum = 0.f;
    float2 o = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < WARPS; i++) {
      const float2 s = leaf_sums(memory)[i * 8 + head];
      if (is_empty(s.x, s.y)) continue;
      const float2 x = *(const float2*)(memory + i * RING + e * 8);
      const Weights w = fold_weights(&reference, s.x);
      sum = fold(sum, s.y, w);
      o = make_float2(fold(o.x, x.x, w), fold(o.y, x.y, w));
    }
    *(float2*)(p.partial + (at + (i64)head * p.parts) * D + e % (D / 2) * 2) = o;
    if (e % (D / 2) == 0) p.partial_sums[at + (i64)head * p.parts] = make_float2(reference, sum);
  }
}
#endif

__device__ __forceinline__ float2 load_cg(const float2* from) {
  float2 v;
  asm volatile("ld.global.cg.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(from) : "memory");
  return v;
}

// Weights of a left fold over `count` references in memory, by one warp: the running maximum is a prefix maximum.
__device__ __forceinline__ float fold_many(Weights* w, const float2* sums, int count, float reference) {
  const int lane = threadIdx.x & 31;
  for (int first = 0; first < count; first += 32) {
    const float2 s = first + lane < count ? sums[first + lane] : make_float2(NOTHING, 0.f);
    float top = fmaxf(reference, s.x);
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
      const float before = __shfl_up_sync(ALL, top, o);
      if (lane >= o) top = fmaxf(top, before);
    }
    float old = __shfl_up_sync(ALL, top, 1);
    if (lane == 0) old = reference;
    Weights x = fold_weights(&old, s.x);
    if (is_empty(s.x, s.y)) x.part = SKIP;
    if (first + lane < count) w[first + lane] = x;
    reference = __shfl_sync(ALL, top, 31);
  }
  return reference;
}

// The last block of a pair folds its parts into the state, or ends the attention if `out` is given.
//
// Shared: sums of the spans [GROUP][spans], weights of the spans [GROUP][spans], weights of the leaves [GROUP][parts],
// state [GROUP]: 8 bytes each.
__device__ __forceinline__ void merge(const AttendParams& p, u8* memory) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#if WHOLE_SPANS || FOLD_LEAVES
  const int inner = 1, spans = p.parts;
#else
  const int inner = p.span_blocks / UNITS, spans = (p.parts + inner - 1) / inner;
#endif
  float2* sums = (float2*)memory;
  Weights* outer_w = (Weights*)(sums + GROUP * spans);
  Weights* inner_w = outer_w + GROUP * spans;
  float2* state = (float2*)(inner_w + GROUP * p.parts);  // reference behind, sum before
  const float2* given = p.partial_sums + first_row() * p.parts;
  for (int i = threadIdx.x; i < GROUP * spans; i += THREADS) {
    const int head = i / spans, span = i % spans;
    float2 s = {NOTHING, 0.f};
    if (inner == 1) {
      s = load_cg(given + i);
    } else {
#pragma unroll 8
      for (int k = span * inner; k < min(p.parts, span * inner + inner); k++) {
        const float2 x = load_cg(given + (i64)head * p.parts + k);
        Weights w = {1.f, SKIP};
        if (!is_empty(x.x, x.y)) {
          w = fold_weights(&s.x, x.x);
          s.y = fold(s.y, x.y, w);
        }
        inner_w[head * p.parts + k] = w;
      }
    }
    sums[i] = s;
  }
  __syncthreads();
  for (int head = warp; head < GROUP; head += WARPS) {
    const float before = p.begin ? NOTHING : p.maximum[first_row() + head];
    const float after = fold_many(outer_w + head * spans, sums + head * spans, spans, before);
    if (lane == 0) state[head] = make_float2(after, p.begin ? 0.f : p.total[first_row() + head]);
  }
  __syncthreads();
  for (int e = threadIdx.x; e < GROUP * D / 2; e += THREADS) {
    const int head = e / (D / 2), pair = e % (D / 2);
    const i64 row = first_row() + head;
    const float2* x = (const float2*)(p.partial + row * p.parts * D) + pair;
    float2 o = {0.f, 0.f}, part = {0.f, 0.f};
    float sum = state[head].y;
    if (!p.begin) o = ((const float2*)(p.weighted + row * D))[pair];
    for (int first = 0; first < p.parts; first += 16) {
      float2 v[16];
#pragma unroll
      for (int i = 0; i < 16; i++)
        if (first + i < p.parts) v[i] = load_cg(x + (i64)(first + i) * (D / 2));
#pragma unroll
      for (int i = 0; i < 16; i++) {
        const int k = first + i;
        if (k >= p.parts) break;
        if (inner == 1) {
          part = v[i];
        } else {
          const Weights w = inner_w[head * p.parts + k];
          if (k % inner == 0) part = make_float2(0.f, 0.f);
          if (w.part != SKIP) part = make_float2(fold(part.x, v[i].x, w), fold(part.y, v[i].y, w));
          if (k % inner != inner - 1 && k != p.parts - 1) continue;
        }
        const int span = k / inner;
        const Weights w = outer_w[head * spans + span];
        if (w.part == SKIP) continue;
        o = make_float2(fold(o.x, part.x, w), fold(o.y, part.y, w));
        sum = fold(sum, sums[head * spans + span].y, w);
      }
    }
    if (p.out) {
      u16* out = p.out + blockIdx.y / KV_HEADS * p.out_stride[0] + (blockIdx.y % KV_HEADS * GROUP + head) * p.out_stride[2];
      out[2 * pair * p.out_stride[3]] = output_of(o.x, sum);
      out[(2 * pair + 1) * p.out_stride[3]] = output_of(o.y, sum);
      if (p.lse && pair == 0) p.lse[row] = lse_of(state[head].x, sum);
    } else {
      ((float2*)(p.weighted + row * D))[pair] = o;
    }
    if (!p.out && pair == 0) {
      p.maximum[row] = state[head].x;
      p.total[row] = sum;
    }
  }
}

__device__ __forceinline__ void finish(const AttendParams& p, u8* memory) {
  __shared__ bool is_last;
  if (p.parts > MOST_PARTS) return;
  __syncthreads();
  if (threadIdx.x == 0) {
    u32 before;  // the counter turns to 0 by itself
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(p.counters + blockIdx.y), "r"(gridDim.x - 1)
                 : "memory");
    is_last = before == gridDim.x - 1;
  }
  __syncthreads();
  if (is_last) merge(p, memory);
}
