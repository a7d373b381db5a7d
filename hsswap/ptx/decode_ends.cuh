// Where parts of attend_decode go: to memory, for merge_decode, or to the blocks of a cluster.
//
// Constants: attention.cu.
#pragma once

#if CLUSTER
#define SLICE (D / CLUSTER)
#define OWNED (GROUP * SLICE)  // elements of a part that a block owns

__device__ __forceinline__ u32 address_at(u32 address, int rank) {
#if CLUSTER == 1
  return address;
#else
  u32 r;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(address), "r"(rank));
  return r;
#endif
}

__device__ __forceinline__ void send(u32 address, float x, float y) {
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}

__device__ __forceinline__ void send(u32 address, float4 x) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
               : "memory");
}

// Every block has begun: its shared memory may be written.
__device__ __forceinline__ void arrive_begun() {
#if CLUSTER > 1
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void wait_begun() {
#if CLUSTER > 1
  __syncwarp();
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// All that was sent has arrived.
__device__ __forceinline__ void exchange() {
#if CLUSTER > 1
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

// Where parts arrive: addresses in shared memory.
struct Parts {
  u32 values;  // float [parts][GROUP][SLICE]
  u32 sums;    // float2 [parts][GROUP]: R, l
};

// Four dims of a part to their owner.
__device__ __forceinline__ void put(const Parts& to, int number, int head, int dim, float4 row) {
  send(address_at(to.values + ((number * GROUP + head) * SLICE + dim % SLICE) * 4, dim / SLICE), row);
}

// Its reference and sum to every block.
__device__ __forceinline__ void put_sums(const Parts& to, int number, int head, float2 sums, int g) {
#pragma unroll
  for (int first = 0; first < CLUSTER; first += 8)
    if (first + g < CLUSTER) send(address_at(to.sums + (number * GROUP + head) * 8, first + g), sums.x, sums.y);
}

// 64 dims (N 4) or 32 (N 2) of two heads of a part, as values_64 and values_32 leave them.
template <int N>
__device__ __forceinline__ void send_dims(const Parts& to, int number, const float (*o)[4], int first_dim, int g, int c) {
#pragma unroll
  for (int y = 0; y < 2; y++) {
#pragma unroll
    for (int half = 0; half < N / 2; half++) {
      // A lane and the one of the next g have the even and the odd ones of 8 dims: each takes 4 in a row.
      float x[4];
#pragma unroll
      for (int i = 0; i < 4; i++) x[i] = N == 4 ? o[i][y + 2 * half] : o[i % 2][y + i / 2 * 2];
      const bool odd = g & 1;
      const float a = __shfl_xor_sync(ALL, odd ? x[0] : x[2], 4), b = __shfl_xor_sync(ALL, odd ? x[1] : x[3], 4);
      const float4 row = odd ? make_float4(a, x[2], b, x[3]) : make_float4(x[0], a, x[1], b);
      if (2 * c + y < GROUP) put(to, number, 2 * c + y, first_dim + g / 2 * 8 + (odd ? 4 : 0) + half * 32, row);
    }
  }
}

__device__ __forceinline__ void send_sums(const Parts& to, int number, const float* reference, const float* sum, int g, int c) {
#pragma unroll
  for (int y = 0; y < 2; y++)
    if (2 * c + y < GROUP) put_sums(to, number, 2 * c + y, make_float2(reference[y], sum[y]), g);
}

__device__ __forceinline__ void send_part(const Parts& to, int number, const Part& part, int g, int c) {
  send_sums(to, number, part.reference, part.sum, g, c);
#pragma unroll
  for (int h = 0; h < D / 64; h++) send_dims<4>(to, number, part.o + h * 4, h * 64, g, c);
}

// One element being folded, and the reference and sum beside it.
struct Folded {
  float o, reference, sum;
};

// The next N parts of those that are there: their elements, references and sums. All weights first: only the additions
// wait for each other.
template <int N>
__device__ __forceinline__ void fold_some(Folded& f, const float* values, const float2* sums, int count) {
  float2 s[N];
  float x[N], old[N];
#pragma unroll
  for (int i = 0; i < N; i++) {
    s[i] = i < count ? sums[i * GROUP] : make_float2(NOTHING, 0.f);
    x[i] = i < count ? values[i * OWNED] : 0.f;
  }
#pragma unroll
  for (int i = 0; i < N; i++) {
    old[i] = f.reference;
    f.reference = fmaxf(f.reference, s[i].x);
  }
#pragma unroll
  for (int i = 0; i < N; i++) {
    const Weights w = fold_weights(&old[i], s[i].x);
    const bool empty = is_empty(s[i].x, s[i].y);
    f.o = empty ? f.o : fold(f.o, x[i], w);
    f.sum = empty ? f.sum : fold(f.sum, s[i].y, w);
  }
}

// A left fold of `count` parts. Every thread weighs them itself: that takes less time than to wait for another.
__device__ __forceinline__ void fold_run(Folded& f, const float* values, const float2* sums, int count) {
  int first = 0;
  for (; count - first > 2; first += 8) fold_some<8>(f, values + first * OWNED, sums + first * GROUP, count - first);
  if (first < count) fold_some<2>(f, values + first * OWNED, sums + first * GROUP, count - first);
}

// The parts of this block's dims into the state, or the end of the attention if `out` is given. `memory` may be
// overwritten; `before`: reference and sum of the state.
__device__ __forceinline__ void fold_parts(const AttendParams& p, u8* memory, const float* values, const float2* sums,
                                           const float2* before, const float* kept) {
  const int sequence = blockIdx.z;
  const i64 row0 = (i64)sequence * Q_HEADS + head_of() * GROUP;
#if LEAF_PARTS
  const int inner = p.span_blocks / UNITS, spans = (p.parts + inner - 1) / inner;
  float2* span_sums = (float2*)memory;                         // [spans][GROUP]
  float* span_values = (float*)(span_sums + GROUP * spans);    // [spans][OWNED]
  for (int i = threadIdx.x; i < OWNED * spans; i += THREADS) {
    const int e = i % OWNED, head = e / SLICE, span = i / OWNED, first = span * inner;
    Folded f = {0.f, NOTHING, 0.f};
    fold_run(f, values + first * OWNED + e, sums + first * GROUP + head, min(inner, p.parts - first));
    span_values[i] = f.o;
    if (e % SLICE == 0) span_sums[span * GROUP + head] = make_float2(f.reference, f.sum);
  }
  __syncthreads();
  sums = span_sums;
  values = span_values;
#else
  const int spans = p.parts;
#endif
#if BLOCK_LSE && LEAF_PARTS
  __shared__ float lse[GROUP];
#endif
  for (int e = threadIdx.x; e < OWNED; e += THREADS) {
    const int head = e / SLICE, dim = rank_of() * SLICE + e % SLICE;
    const i64 row = row0 + head;
    Folded f = {p.begin ? 0.f : p.weighted[row * D + dim], before[head].x, before[head].y};
    fold_run(f, values + e, sums + head, spans);
    if (p.out) {
      u16* out = p.out + sequence * p.out_stride[0] + (head_of() * GROUP + head) * p.out_stride[2];
      const End end = end_of(f.reference, f.sum, p.sinks, head_of() * GROUP + head);
      out[dim * p.out_stride[3]] = output_of(f.o * end.factor, end.total);
      if (p.lse && dim == 0) p.lse[row] = lse_of(end.reference, end.total);
#if BLOCK_LSE && LEAF_PARTS
      if (e % SLICE == 0) lse[head] = lse_of(end.reference, end.total);
#endif
    } else {
      p.weighted[row * D + dim] = f.o;
      if (dim == 0) {
        p.maximum[row] = f.reference;
        p.total[row] = f.sum;
      }
    }
  }
#if BLOCK_LSE && LEAF_PARTS
  if (p.out && p.block_mass) {
    __syncthreads();
    write_masses(p, kept, lse);
  }
#endif
}
#else

struct Parts {};
__device__ __forceinline__ void wait_begun() {}

__device__ __forceinline__ float2* leaf_sums(u8* memory) { return (float2*)(memory + WARPS * RING); }

// A leaf to shared memory: [GROUP][D], dims as unit_values leaves them, and eight sums.
__device__ __forceinline__ void keep_leaf(const Part& leaf, float* to, float2* sums, int g, int c) {
#pragma unroll
  for (int y = 0; y < 2; y++) {
    const int head = 2 * c + y;
    if (head < GROUP) {
      if (g == 0) sums[head] = make_float2(leaf.reference[y], leaf.sum[y]);
#pragma unroll
      for (int k = 0; k < D / 16; k++) {
        float* at = to + head * D + k / 4 * 64 + g / 2 * 8 + k % 4 * 2 + g % 2;
        at[0] = leaf.o[k][y];
        at[32] = leaf.o[k][y + 2];
      }
    }
  }
}

// The leaves of a block's workers are one span.
__device__ __forceinline__ void fold_block(const AttendParams& p, u8* memory) {
  const i64 at = row_of_pair() * p.parts + blockIdx.y;
  for (int e = threadIdx.x; e < GROUP * D / 2; e += THREADS) {
    const int head = e / (D / 2);
    // All loads, then all references, then all weights: only the additions wait for each other.
    float reference = NOTHING, sum = 0.f;
    float2 o = {0.f, 0.f}, s[WARPS], x[WARPS];
    Weights w[WARPS];
#pragma unroll
    for (int i = 0; i < WARPS; i++) {
      s[i] = leaf_sums(memory)[i * 8 + head];
      x[i] = *(const float2*)(memory + i * RING + e * 8);
    }
#pragma unroll
    for (int i = 0; i < WARPS; i++) w[i] = fold_weights(&reference, s[i].x);
#pragma unroll
    for (int i = 0; i < WARPS; i++) {
      if (is_empty(s[i].x, s[i].y)) continue;
      sum = fold(sum, s[i].y, w[i]);
      o = make_float2(fold(o.x, x[i].x, w[i]), fold(o.y, x[i].y, w[i]));
    }
    *(float2*)(p.partial + (at + (i64)head * p.parts) * D + e % (D / 2) * 2) = o;
    if (e % (D / 2) == 0) p.partial_sums[at + (i64)head * p.parts] = make_float2(reference, sum);
  }
}
#endif
