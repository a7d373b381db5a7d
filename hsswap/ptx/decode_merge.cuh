// How attend_decode folds parts: in registers, in a block, and by the last block of a pair over global memory.
#pragma once

#define MOST_PARTS 256  // of a pair, folded in the launch; beyond, merge_spans (finalize.cu) does it
#define SKIP (-1.f)     // the weight of a part of which the row sees nothing

__device__ __forceinline__ float2* leaf_sums(u8* memory) { return (float2*)(memory + WORKERS * RING); }

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
__device__ __forceinline__ i64 first_row() { return (i64)blockIdx.z * Q_HEADS + blockIdx.x * GROUP; }

__device__ __forceinline__ void write_global(const AttendParams& p, const Part& part, int number, int g, int c) {
  const i64 at = first_row() * p.parts + number;
  write_part(part, p.partial + at * D, (i64)p.parts * D, p.partial_sums + at, p.parts, g, c);
}

#if FOLD_LEAVES
// The leaves of a block's workers are one span.
__device__ __forceinline__ void fold_block(const AttendParams& p, u8* memory) {
  const i64 at = first_row() * p.parts + blockIdx.y;
  for (int e = threadIdx.x; e < GROUP * D / 2; e += THREADS) {
    const int head = e / (D / 2);
    // All loads, then all references, then all weights: only the additions wait for each other.
    float reference = NOTHING, sum = 0.f;
    float2 o = {0.f, 0.f}, s[WORKERS], x[WORKERS];
    Weights w[WORKERS];
#pragma unroll
    for (int i = 0; i < WORKERS; i++) {
      s[i] = leaf_sums(memory)[i * 8 + head];
      x[i] = *(const float2*)(memory + i * RING + e * 8);
    }
#pragma unroll
    for (int i = 0; i < WORKERS; i++) w[i] = fold_weights(&reference, s[i].x);
#pragma unroll
    for (int i = 0; i < WORKERS; i++) {
      if (is_empty(s[i].x, s[i].y)) continue;
      sum = fold(sum, s[i].y, w[i]);
      o = make_float2(fold(o.x, x[i].x, w[i]), fold(o.y, x[i].y, w[i]));
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

#define AHEAD 16  // parts of a thread's two dims in flight, twice

__device__ __forceinline__ void load_parts(float2 (&v)[AHEAD], const float2* from, int first, int count) {
#pragma unroll
  for (int i = 0; i < AHEAD; i++)
    if (first + i < count) v[i] = load_cg(from + (i64)(first + i) * (D / 2));
}

// What the merge keeps in shared memory: MERGE_BYTES of cuda_attention.py.
struct MergeMemory {
  float2 *given, *sums;    // R, l: of the parts [GROUP][parts], of the spans [GROUP][spans]
  Weights *inner, *outer;  // of the parts and of the spans, likewise
  float2* state;           // [GROUP]: R behind, l before
};

// References, sums and weights of everything that is folded, from the parts' references and sums.
__device__ __forceinline__ void weigh(const AttendParams& p, const MergeMemory& m, int inner, int spans) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const float2* from = p.partial_sums + first_row() * p.parts;
  for (int i = threadIdx.x; i < GROUP * p.parts; i += THREADS) m.given[i] = load_cg(from + i);
  __syncthreads();
  if (inner > 1) {
    for (int i = threadIdx.x; i < GROUP * spans; i += THREADS) {
      const int head = i / spans, span = i % spans;
      float2 s = {NOTHING, 0.f};
      for (int k = span * inner; k < min(p.parts, span * inner + inner); k++) {
        const float2 x = m.given[head * p.parts + k];
        Weights w = {1.f, SKIP};
        if (!is_empty(x.x, x.y)) {
          w = fold_weights(&s.x, x.x);
          s.y = fold(s.y, x.y, w);
        }
        m.inner[head * p.parts + k] = w;
      }
      m.sums[i] = s;
    }
    __syncthreads();
  }
  for (int head = warp; head < GROUP; head += WARPS) {
    const i64 row = first_row() + head;
    const float before = p.begin ? NOTHING : p.maximum[row];
    const float after = fold_many(m.outer + head * spans, m.sums + head * spans, spans, before);
    if (lane == 0) m.state[head] = make_float2(after, p.begin ? 0.f : p.total[row]);
  }
  __syncthreads();
}

// Two dims of a head being folded.
struct Folded {
  float2 o, span;
  float sum;
};

__device__ __forceinline__ void fold_parts(const MergeMemory& m, Folded& f, const float2 (&v)[AHEAD], int first, int parts,
                                           int head, int inner, int spans) {
#pragma unroll
  for (int i = 0; i < AHEAD; i++) {
    const int k = first + i;
    if (k >= parts) break;
    if (inner == 1) {
      f.span = v[i];
    } else {
      const Weights w = m.inner[head * parts + k];
      if (k % inner == 0) f.span = make_float2(0.f, 0.f);
      if (w.part != SKIP) f.span = make_float2(fold(f.span.x, v[i].x, w), fold(f.span.y, v[i].y, w));
      if (k % inner != inner - 1 && k != parts - 1) continue;
    }
    const int span = head * spans + k / inner;
    const Weights w = m.outer[span];
    if (w.part == SKIP) continue;
    f.o = make_float2(fold(f.o.x, f.span.x, w), fold(f.o.y, f.span.y, w));
    f.sum = fold(f.sum, m.sums[span].y, w);
  }
}

// The last block of a pair folds its parts into the state, or ends the attention if `out` is given.
__device__ __forceinline__ void merge(const AttendParams& p, u8* memory) {
#if WHOLE_SPANS || FOLD_LEAVES
  constexpr int inner = 1;
  const int spans = p.parts;
#else
  const int inner = p.span_blocks / UNITS, spans = (p.parts + inner - 1) / inner;
#endif
  MergeMemory m;
  m.given = (float2*)memory;
  m.sums = inner == 1 ? m.given : m.given + GROUP * p.parts;
  m.inner = (Weights*)(m.given + GROUP * (p.parts + spans));
  m.outer = m.inner + GROUP * p.parts;
  m.state = (float2*)(m.outer + GROUP * spans);
  bool weighed = false;
  for (int first_e = 0; first_e < GROUP * D / 2; first_e += THREADS) {
    const int e = first_e + threadIdx.x, head = min(e / (D / 2), GROUP - 1), pair = e % (D / 2);
    const bool mine = e < GROUP * D / 2;
    const i64 row = first_row() + head;
    const float2* x = (const float2*)(p.partial + row * p.parts * D) + pair;
    const int count = mine ? p.parts : 0;
    float2 v[AHEAD], next[AHEAD];
    load_parts(v, x, 0, count);  // in flight while the weights are found
    load_parts(next, x, AHEAD, count);
    if (!weighed) weigh(p, m, inner, spans);
    weighed = true;
    if (!mine) continue;
    Folded f = {{0.f, 0.f}, {0.f, 0.f}, m.state[head].y};
    if (!p.begin) f.o = ((const float2*)(p.weighted + row * D))[pair];
    for (int first = 0; first < count; first += 2 * AHEAD) {
      fold_parts(m, f, v, first, count, head, inner, spans);
      load_parts(v, x, first + 2 * AHEAD, count);
      fold_parts(m, f, next, first + AHEAD, count, head, inner, spans);
      load_parts(next, x, first + 3 * AHEAD, count);
    }
    if (p.out) {
      u16* out = p.out + blockIdx.z * p.out_stride[0] + (blockIdx.x * GROUP + head) * p.out_stride[2];
      out[2 * pair * p.out_stride[3]] = output_of(f.o.x, f.sum);
      out[(2 * pair + 1) * p.out_stride[3]] = output_of(f.o.y, f.sum);
      if (p.lse && pair == 0) p.lse[row] = lse_of(m.state[head].x, f.sum);
    } else {
      ((float2*)(p.weighted + row * D))[pair] = f.o;
      if (pair == 0) {
        p.maximum[row] = m.state[head].x;
        p.total[row] = f.sum;
      }
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
                 : "l"(p.counters + pair_index()), "r"(gridDim.y - 1)
                 : "memory");
    is_last = before == gridDim.y - 1;
  }
  __syncthreads();
  if (is_last) merge(p, memory);
}
