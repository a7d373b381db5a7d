// Decode attention: one query row a sequence over scattered units, bulk copies into private rings of warps.
//
// Formula and tree: attention.cuh. Reference: hsswap/driver/host_attention.py. sm_90 and newer.
//
// Grid     x: H, so that heads of one block are read together (5 % at 131,072 tokens); y: shares of a list; z: S
// Block    WARPS warps, of which WORKERS attend; all merge. A worker takes a leaf (WHOLE_SPANS 0) or every gridDim.y * WORKERS-th span (WHOLE_SPANS 1), copies
//          its pieces (K or V of a unit: 16 tokens) through STAGES stages of its own and never waits for another warp.
//          The last block of a pair (a counter) folds the parts in order.
// Shared   WORKERS * STAGES pieces of PIECE bytes (4 KiB at d 128), at least MERGE_BYTES; barriers are static
// Parts    of spans, or of leaves if FOLD_LEAVES is 0 and WHOLE_SPANS is 0; with FOLD_LEAVES 1 a block is one span
// Constants  HEAD_DIM (64 or 128, = dv) GROUP (1 to 8) KV_HEADS BLOCK (16) WARPS WORKERS STAGES WHOLE_SPANS FOLD_LEAVES
//
// Matrix steps are transposed, S^T = K q^T and O^T = V^T P^T: the 16 tokens of a unit are rows, the heads of the group
// columns. K and V keep their plain layout: rows are 128 or 256 bytes, so lanes of one column of rows would meet in
// the same banks. Lane (g, c) = (lane / 4, lane % 4) therefore reads the 32-byte pieces of a K row in the order i ^ (g % 4), the
// 16-byte chunks of a V row in the order of g % 2, and puts them back with selects.

#include "attention.cuh"

#if __CUDA_ARCH__ < 900  // cuda_attention.py does not launch it there
extern "C" __global__ void attend_decode(const __grid_constant__ AttendParams p) {}
#else

#include "ring.cuh"

#define D HEAD_DIM
#define UNITS (LEAF / BLOCK)
#define THREADS (WARPS * 32)
#define PIECE (BLOCK * D * 2)
#define RING (STAGES * PIECE)
#define AT_ONCE (STAGES >= 4 ? 2 : 1)
#ifndef BLOCKS_A_SM
#define BLOCKS_A_SM 1
#endif

__device__ __forceinline__ int pair_index() { return blockIdx.z * KV_HEADS + blockIdx.x; }

// An entry of a leaf, in the lanes 0 to 7.
struct Entry {
  const u8* unit;
  int first;  // its first token; NOWHERE - BLOCK without a unit
};

// Which leaves a warp takes, one after the other.
struct Leaves {
  int first, count, leaves_a_span, stride;  // stride: leaves from the end of a span to the next of this warp
  __device__ __forceinline__ int operator()(int i) const { return first + i + i / leaves_a_span * stride; }
};

__device__ __forceinline__ Entry entry_of(const AttendParams& p, i64 list, const Leaves& leaves, int i, int lane) {
  Entry e = {nullptr, NOWHERE - BLOCK};
  if (lane < UNITS && i < leaves.count) {
    const int entry = leaves(i) * UNITS + lane;
    if (entry < p.entries) {
      e.unit = unit_of(p, load_int(p.slots + list + entry));
      if (e.unit) e.first = first_token_of(p, list, entry);
    }
  }
  return e;
}

// Lane `piece % 8` copies a piece, or lets its barrier go where no token is seen.
__device__ __forceinline__ void issue(const Entry& e, int piece, u32 ring, u32 barriers, Sight see, u64 policy, int lane) {
  const int stage = piece % STAGES;
  if (lane == piece % UNITS) {
    if (e.first < see.end && e.first + BLOCK > see.start) {
      expect(barriers + stage * 8, PIECE);
      copy_bulk(ring + stage * PIECE, e.unit + (piece / UNITS % 2) * PIECE, PIECE, barriers + stage * 8, policy);
    } else {
      arrive(barriers + stage * 8);
    }
  }
}

// The first copies, each by a lane of its own at once: pieces of one kind, or all of them.
__device__ __forceinline__ void issue_first(const Entry& e, u32 ring, u32 barriers, Sight see, u64 policy, int lane) {
#pragma unroll
  for (int kind = 0; kind < (STAGES + UNITS - 1) / UNITS; kind++) {
    const int stage = kind * UNITS + lane;
    if (lane < UNITS && stage < STAGES) {
      if (e.first < see.end && e.first + BLOCK > see.start) {
        expect(barriers + stage * 8, PIECE);
        copy_bulk(ring + stage * PIECE, e.unit + kind * PIECE, PIECE, barriers + stage * 8, policy);
      } else {
        arrive(barriers + stage * 8);
      }
    }
  }
}

// The operands of 64 dims of a unit's K: rows g and g + 8.
struct Keys {
  uint2 x[2][4];
};

__device__ __forceinline__ Keys load_keys(u32 from, u32 turn) {
  Keys k;
#pragma unroll
  for (int y = 0; y < 2; y++) {
#pragma unroll
    for (int i = 0; i < 4; i++) k.x[y][i] = load_shared8(from + y * 8 * D * 2 + ((i ^ turn) * 32));
    swap_if(turn & 1, k.x[y][0], k.x[y][1]);
    swap_if(turn & 1, k.x[y][2], k.x[y][3]);
    swap_if(turn & 2, k.x[y][0], k.x[y][2]);
    swap_if(turn & 2, k.x[y][1], k.x[y][3]);
  }
  return k;
}

// s[4] = K q^T of each of N units: tokens g and g + 8, heads 2 c and 2 c + 1. Matrix steps of several units alternate,
// since those of one follow each other.
template <int N>
__device__ __forceinline__ void unit_logits(float (*s)[4], const u32 (&k)[N], const u32 (&q)[D / 16][2], int g, int c) {
  const u32 turn = g & 3, row = g * (D * 2) + c * 8;
#pragma unroll
  for (int n = 0; n < N; n++) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.f;
#pragma unroll
  for (int h = 0; h < D / 64; h++) {
    Keys keys[N];
#pragma unroll
    for (int n = 0; n < N; n++) keys[n] = load_keys(k[n] + row + h * 128, turn);
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
      for (int n = 0; n < N; n++) {
        const u32 a[4] = {keys[n].x[0][i].x, keys[n].x[1][i].x, keys[n].x[0][i].y, keys[n].x[1][i].y};
        mma(s[n], a, q[h * 4 + i][0], q[h * 4 + i][1]);
      }
    }
  }
}

// o += V^T P^T of one unit; rows of tokens that are not seen are taken as zero.
__device__ __forceinline__ void unit_values(float (&o)[D / 16][4], u32 v, u32 p0, u32 p1, bool low, bool high, int g,
                                            int c) {
  const bool odd = g & 1;
#pragma unroll
  for (int h = 0; h < D / 64; h++) {
    const u32 from = v + g * (D * 2) + h * 128 + c * 16;
    uint4 x[2][2];
#pragma unroll
    for (int y = 0; y < 2; y++) {
      x[y][0] = load_shared16(from + y * 8 * D * 2 + (odd ? 64 : 0));
      x[y][1] = load_shared16(from + y * 8 * D * 2 + (odd ? 0 : 64));
      swap_if(odd, x[y][0], x[y][1]);
    }
    if (!low) x[0][0] = x[0][1] = make_uint4(0, 0, 0, 0);
    if (!high) x[1][0] = x[1][1] = make_uint4(0, 0, 0, 0);
    const u32 a[4][4] = {{x[0][0].x, x[0][1].x, x[1][0].x, x[1][1].x}, {x[0][0].y, x[0][1].y, x[1][0].y, x[1][1].y},
                         {x[0][0].z, x[0][1].z, x[1][0].z, x[1][1].z}, {x[0][0].w, x[0][1].w, x[1][0].w, x[1][1].w}};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 t[4] = {transpose(a[i][0]), transpose(a[i][1]), transpose(a[i][2]), transpose(a[i][3])};
      mma(o[h * 4 + i], t, p0, p1);
    }
  }
}

// Two heads of a lane: 2 c and 2 c + 1.
struct Part {
  float o[D / 16][4];
  float reference[2], sum[2];
};

__device__ __forceinline__ void clear(Part& part) {
#pragma unroll
  for (int k = 0; k < D / 16; k++) part.o[k][0] = part.o[k][1] = part.o[k][2] = part.o[k][3] = 0.f;
  part.reference[0] = part.reference[1] = NOTHING;
  part.sum[0] = part.sum[1] = 0.f;
}

// From the logits of a leaf to packed weights [unit][2] as operands.
__device__ __forceinline__ void leaf_weights(const AttendParams& p, float (&s)[UNITS][4], u32 (&w)[UNITS][2], Part& leaf) {
  const float factor = p.scale * LOG2_E;
  float base[2];
  bool big = false;
#pragma unroll
  for (int y = 0; y < 2; y++) {
    float top = NOTHING;
#pragma unroll
    for (int u = 0; u < UNITS; u++) top = fmaxf(top, fmaxf(s[u][y], s[u][y + 2]));
#pragma unroll
    for (int o = 4; o < 32; o <<= 1) top = fmaxf(top, __shfl_xor_sync(ALL, top, o));
    leaf.reference[y] = leaf_reference(top, factor);
    base[y] = leaf.reference[y] == NOTHING ? 0.f : leaf.reference[y];
    big |= fabsf(base[y]) > BIG_REFERENCE;
  }
  big = __any_sync(ALL, big);
#pragma unroll
  for (int u = 0; u < UNITS; u++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float x = __fmaf_rn(s[u][i], factor, -base[i & 1]);
      s[u][i] = exp2_of(big && fabsf(base[i & 1]) > BIG_REFERENCE && x > 0.f ? 0.f : x);
    }
#pragma unroll
    for (int y = 0; y < 2; y++) leaf.sum[y] = __fadd_rn(leaf.sum[y], __fadd_rn(s[u][y], s[u][y + 2]));
    w[u][0] = transpose(pack_bf16(s[u][0], s[u][1]));
    w[u][1] = transpose(pack_bf16(s[u][2], s[u][3]));
  }
#pragma unroll
  for (int y = 0; y < 2; y++)
#pragma unroll
    for (int o = 4; o < 32; o <<= 1) leaf.sum[y] = __fadd_rn(leaf.sum[y], __shfl_xor_sync(ALL, leaf.sum[y], o));
}

// Writes [GROUP] rows `row_stride` floats apart; dims as unit_values leaves them.
__device__ __forceinline__ void write_part(const Part& part, float* to, i64 row_stride, float2* sums, i64 sum_stride, int g,
                                           int c) {
#pragma unroll
  for (int y = 0; y < 2; y++) {
    const int head = 2 * c + y;
    if (head < GROUP) {
      if (g == 0) sums[head * sum_stride] = make_float2(part.reference[y], part.sum[y]);
#pragma unroll
      for (int k = 0; k < D / 16; k++) {
        float* at = to + head * row_stride + k / 4 * 64 + g / 2 * 8 + k % 4 * 2 + g % 2;
        at[0] = part.o[k][y];
        at[32] = part.o[k][y + 2];
      }
    }
  }
}

#include "decode_merge.cuh"

// What one worker does, from its first copy to its last part.
__device__ __forceinline__ void work(const AttendParams& p, u8* memory, u64* barrier_words, int lane, int warp, int g, int c) {
  const int sequence = blockIdx.z, head = blockIdx.x;
  const u32 ring = shared_address(memory) + warp * RING, barriers = shared_address(barrier_words) + warp * STAGES * 8;
  if (lane == 0) init_barriers(barriers, STAGES);
  __syncwarp();

  const i64 list = (i64)pair_index() * p.list_stride;
  const int all = (int)(((i64)p.entries * BLOCK + LEAF - 1) / LEAF), item = blockIdx.y * WORKERS + warp;
  Leaves leaves;
  leaves.leaves_a_span = p.span_blocks / UNITS;
#if WHOLE_SPANS
  const int spans = p.parts, step = gridDim.y * WORKERS;
  leaves.first = item * leaves.leaves_a_span;
  leaves.stride = (step - 1) * leaves.leaves_a_span;
  const int mine = item < spans ? (spans - 1 - item) / step + 1 : 0;
  leaves.count = mine * leaves.leaves_a_span;
  if (mine && item + (mine - 1) * step == spans - 1) leaves.count -= spans * leaves.leaves_a_span - all;
#else
  leaves.first = item;
  leaves.stride = 0;
  leaves.count = item < all ? 1 : 0;
#endif
  const i64 length = length_of(p, sequence);
  Entry now = entry_of(p, list, leaves, 0, lane);
  const Sight see = sight_of(p, length, 0);
  const u64 policy = evict_first();
  if (leaves.count > 0) issue_first(now, ring, barriers, see, policy, lane);
  Entry next = entry_of(p, list, leaves, 1, lane);

  u32 q[D / 16][2];
  {
    const u16* from = p.queries + sequence * p.query_stride[0] + (head * GROUP + min(g, GROUP - 1)) * p.query_stride[2];
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
      const uint2 x = *(const uint2*)(from + k * 16 + c * 4);
      q[k][0] = g < GROUP ? x.x : 0;
      q[k][1] = g < GROUP ? x.y : 0;
    }
  }
#if WHOLE_SPANS
  Part span;
  clear(span);
#endif
  for (int i = 0; i < leaves.count; i++) {
    const Entry after = entry_of(p, list, leaves, i + 2, lane);
    const bool whole = __all_sync(ALL, lane >= UNITS || (now.first >= see.start && now.first + BLOCK <= see.end));
    const bool more = i + 1 < leaves.count;
    const u32 turn = (16 / STAGES) % 2 ? i & 1 : 0;
    float s[UNITS][4];
#pragma unroll
    for (int u = 0; u < UNITS; u += AT_ONCE) {
      u32 from[AT_ONCE];
#pragma unroll
      for (int n = 0; n < AT_ONCE; n++) {
        wait(barriers + (u + n) % STAGES * 8, ((u + n) / STAGES + turn) & 1);
        from[n] = ring + (u + n) % STAGES * PIECE;
      }
      unit_logits<AT_ONCE>(s + u, from, q, g, c);
      __syncwarp();
#pragma unroll
      for (int piece = u; piece < u + AT_ONCE; piece++) {
        if (piece + STAGES < 2 * UNITS) issue(now, piece + STAGES, ring, barriers, see, policy, lane);
        else if (more) issue(next, piece + STAGES - 2 * UNITS, ring, barriers, see, policy, lane);
      }
    }
    u32 seen = 0xffff;  // bits 2 u and 2 u + 1: tokens g and g + 8 of unit u
    if (!whole) {
#pragma unroll
      for (int u = 0; u < UNITS; u++) {
        const int token = __shfl_sync(ALL, now.first, u) + g;
        if (!is_in(token, see)) s[u][0] = s[u][1] = NOTHING, seen &= ~(1u << (2 * u));
        if (!is_in(token + 8, see)) s[u][2] = s[u][3] = NOTHING, seen &= ~(2u << (2 * u));
      }
    }
    Part leaf;
    clear(leaf);
    u32 w[UNITS][2];
    leaf_weights(p, s, w, leaf);
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
      const int piece = UNITS + u;
      wait(barriers + piece % STAGES * 8, (piece / STAGES + turn) & 1);
      unit_values(leaf.o, ring + piece % STAGES * PIECE, w[u][0], w[u][1], seen >> (2 * u) & 1, seen >> (2 * u + 1) & 1, g, c);
      __syncwarp();
      if (piece + STAGES < 2 * UNITS) issue(now, piece + STAGES, ring, barriers, see, policy, lane);
      else if (more) issue(next, piece + STAGES - 2 * UNITS, ring, barriers, see, policy, lane);
    }
    now = next;
    next = after;
#if WHOLE_SPANS
    fold_leaf(span, leaf);
    if (i % leaves.leaves_a_span == leaves.leaves_a_span - 1 || !more) {
      write_global(p, span, leaves(i) / leaves.leaves_a_span, g, c);
      clear(span);
    }
#elif FOLD_LEAVES
    write_part(leaf, (float*)(memory + warp * RING), D, leaf_sums(memory) + warp * 8, 1, g, c);
#else
    write_global(p, leaf, item, g, c);
#endif
  }
#if FOLD_LEAVES
  if (leaves.count == 0 && lane < 8) leaf_sums(memory)[warp * 8 + lane] = make_float2(NOTHING, 0.f);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_A_SM) attend_decode(const __grid_constant__ AttendParams p) {
  extern __shared__ __align__(128) u8 memory[];
  __shared__ __align__(8) u64 barrier_words[WORKERS * STAGES];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, c = lane & 3;
  if (warp < WORKERS) work(p, memory, barrier_words, lane, warp, g, c);
#if FOLD_LEAVES
  __syncthreads();
  fold_block(p, memory);
#endif
  finish(p, memory);
}
#endif
