// Attention of any number of query rows over scattered units: mma.sync, every dim, block size and group.
//
// Formula: attention.cuh. Reference: hsswap/driver/host_attention.py.
//
// Grid     x: tiles of 64 of the R * GROUP (row, query head) pairs of a KV head; y: S * H; z: chunks of spans
// Block    128 threads, a warp for 16 pairs
// Shared   Q [64][DK_PAD + 8], K [128][DK_PAD + 8], V [128][DV_PAD + 8] bf16 (K and V one behind the other in one
//          place if APART is 0), then u64 source[2][128], int position[2][128]; 16 bytes of padding a row make ldmatrix
//          free of bank conflicts. E4M3: K and V in one place always; behind it all float scales[2][2][128],
//          query_scale[64], and, if APART is 1, codes [128][DK_PAD] and [128][DV_PAD] that are on their way
// Constants  HEAD_DIM VALUE_DIM GROUP KV_HEADS BLOCK; PAGES 1: an engine's pages; WIDE 1: rows lie on 16 bytes; APART; TRANSFORM 0: logits
//          are s * scale, 1: scaled before the maximum is taken (scale <= 0), 2: soft cap
//
// With gridDim.z > 1 every span's part goes to `partial`, and merge_spans (finalize.cu) folds them; else they are
// folded into the state here. Both are the same operations in the same order.

#include "attention.cuh"

#define TILE 64
#define THREADS 128
#define DK_PAD ((HEAD_DIM + 15) / 16 * 16)
#define DV_PAD ((VALUE_DIM + 15) / 16 * 16)
#define K_ROW ((DK_PAD + 8) * 2)
#define V_ROW ((DV_PAD + 8) * 2)
#define Q_BYTES (TILE * K_ROW)
#define K_BYTES (LEAF * K_ROW)
#define V_BYTES (LEAF * V_ROW)
#define SPLIT (APART && !E4M3)
#define STAGED (APART && E4M3)
#define KV_BYTES (SPLIT ? K_BYTES + V_BYTES : (K_BYTES > V_BYTES ? K_BYTES : V_BYTES))

#include "tile_softmax.cuh"
#include "tile_loads.cuh"
#include "tile_ends.cuh"
#if E4M3
#include "tile_e4m3.cuh"
#endif

// acc = P V for dims 16 d to 16 d + 15.
__device__ __forceinline__ void values_step(float (&acc)[8], const u32 (&weights)[LEAF / 16][4], u32 v, int d) {
  const int lane = threadIdx.x & 31;
  const u32 from = v + (lane & 15) * V_ROW + d * 32 + (lane >> 4) * 16;
#pragma unroll
  for (int i = 0; i < 8; i++) acc[i] = 0.f;
#pragma unroll
  for (int u = 0; u < LEAF / 16; u++) {
    u32 f[4];
    ldmatrix_transposed(f, from + u * 16 * V_ROW);
    mma(acc, weights[u], f[0], f[1]);
    mma(acc + 4, weights[u], f[2], f[3]);
  }
}

// Whether V of some token that not every row sees is not finite. 0 times infinity is NaN, so such V must not be
// multiplied for rows that do not see it. They are faults of the engine's.
__device__ __forceinline__ bool has_bad_values(const Shared& sh, const Tile& tile, int leaf) {
  const int position = sh.position[(leaf & 1) * LEAF + threadIdx.x];
  bool bad = false;
  if (is_in(position, tile.all) && !is_in(position, tile.every)) {
    for (int d = 0; d < VALUE_DIM; d++) {
      u16 x;
      asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(sh.v + threadIdx.x * V_ROW + d * 2) : "memory");
      bad |= (x & EXPONENT) == EXPONENT;
    }
  }
  return __syncthreads_or(bad);
}

// s = Q K^T of a warp's 16 pairs and the leaf.
__device__ __forceinline__ void logits(float (&s)[LEAF / 8][4], const Shared& sh, int warp, int lane) {
#pragma unroll
  for (int n = 0; n < LEAF / 8; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) s[n][i] = 0.f;
  const u32 q = sh.q + (warp * 16 + (lane & 15)) * K_ROW + (lane >> 4) * 16;
  const u32 k = sh.k + ((lane & 7) + (lane >> 4) * 8) * K_ROW + ((lane >> 3) & 1) * 16;
#pragma unroll
  for (int d = 0; d < DK_PAD / 16; d++) {
    u32 a[4];
    ldmatrix(a, q + d * 32);
#pragma unroll
    for (int u = 0; u < LEAF / 16; u++) {
      u32 f[4];
      ldmatrix(f, k + u * 16 * K_ROW + d * 32);
      mma(s[2 * u], a, f[0], f[1]);
      mma(s[2 * u + 1], a, f[2], f[3]);
    }
  }
}

// The leaf's partial into the span's: rows of `take` only.
__device__ __forceinline__ void add_values(float (&o)[DV_PAD / 8][4], const u32 (&weights)[LEAF / 16][4], u32 v,
                                           const Weights (&w)[2], const float (&up)[2], const bool (&take)[2]) {
#pragma unroll
  for (int d = 0; d < DV_PAD / 16; d++) {
    float acc[8];
    values_step(acc, weights, v, d);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      float& to = o[2 * d + (i >> 2)][i & 3];
      const float part = E4M3 ? __fmul_rn(acc[i], up[(i >> 1) & 1]) : acc[i];
      if (take[(i >> 1) & 1]) to = fold(to, part, w[(i >> 1) & 1]);
    }
  }
}

__device__ __forceinline__ void load_keys(const AttendParams& p, const Shared& sh, const Tile& tile, int leaf) {
  load_rows<HEAD_DIM, DK_PAD, false>(p, sh.k, sh, leaf, tile.all);
  commit();
}

__device__ __forceinline__ void load_values(const AttendParams& p, const Shared& sh, int leaf, Sight see) {
  load_rows<VALUE_DIM, DV_PAD, true>(p, sh.v, sh, leaf, see);
  commit();
}

extern "C" __global__ void __launch_bounds__(THREADS) attend_tile(const __grid_constant__ AttendParams p) {
  extern __shared__ __align__(128) u8 memory[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2;
  const int sequence = blockIdx.y / KV_HEADS, head = blockIdx.y % KV_HEADS;
  // Late tiles see most: they go first.
  const int pair0 = (gridDim.x - 1 - blockIdx.x) * TILE;
  const i64 length = length_of(p, sequence), list = ((i64)sequence * KV_HEADS + head) * p.list_stride;

  Shared sh;
  sh.q = shared_address(memory);
  sh.k = sh.q + Q_BYTES;
  sh.v = SPLIT ? sh.k + K_BYTES : sh.k;
  sh.source = (u64*)(memory + Q_BYTES + KV_BYTES);
  sh.position = (int*)(sh.source + 2 * LEAF);
  sh.any = p.units;
#if E4M3
  sh.scales = (float*)(sh.position + 2 * LEAF);
  sh.query_scale = sh.scales + 4 * LEAF;
  sh.key_codes = shared_address(sh.query_scale + TILE);
  sh.value_codes = sh.key_codes + LEAF * DK_PAD;
#endif

  Tile tile;
  tile.pairs = min(TILE, p.rows * GROUP - pair0);
  tile.first_row = pair0 / GROUP;
  const int last_row = (pair0 + tile.pairs - 1) / GROUP;
  const Sight early = sight_of(p, length, tile.first_row), late = sight_of(p, length, last_row);
  tile.all = {early.start, late.end};
  tile.every = {late.start, early.end};

  const int leaves_a_span = p.span_blocks * BLOCK / LEAF;
  const int leaves = (int)(((i64)p.entries * BLOCK + LEAF - 1) / LEAF);
  // Never with splits.
  const int done = p.wide ? p.done[blockIdx.y * ((p.rows * GROUP + WIDE_PAIRS - 1) / WIDE_PAIRS) + pair0 / WIDE_PAIRS] : 0;
  const int first_span = max(done, (int)((i64)p.parts * blockIdx.z / gridDim.z));
  const int last_span = (int)((i64)p.parts * (blockIdx.z + 1) / gridDim.z);
  int first = first_span * leaves_a_span, last = min(leaves, last_span * leaves_a_span);
  if (!p.positions) {
    const i64 base = (i64)p.first_block * BLOCK;
    first = max(first, (int)max(0ll, (tile.all.start - base) / LEAF));
    last = min(last, (int)max(0ll, (tile.all.end - base + LEAF - 1) / LEAF));
  }

  if (first >= last) {
    if (done == 0) write_nothing(p, tile, pair0, first_span, last_span);
    if (done == 0 && p.out) write_outputs(p, tile, pair0);
    return;
  }
  if (gridDim.z > 1) {  // spans before and behind what is seen
    write_nothing(p, tile, pair0, first_span, first / leaves_a_span);
    write_nothing(p, tile, pair0, (last + leaves_a_span - 1) / leaves_a_span, last_span);
  }
  Rows rows;
  float o[DV_PAD / 8][4];
  clear(rows, o);
#pragma unroll
  for (int y = 0; y < 2; y++) {
    const int m = warp * 16 + g + y * 8;
    rows.sight[y] = m < tile.pairs ? sight_of(p, length, (pair0 + m) / GROUP) : Sight{0, 0};
  }
  bool fresh = p.begin && done == 0;
  load_queries(p, sh, tile, pair0, sequence, head);
  int flags = plan_leaf(p, sh, tile, first, list);
  if (SPLIT) load_keys(p, sh, tile, first);
#if STAGED
  stage_keys(p, sh, tile, first);
  stage_values(p, sh, tile, first);
#endif
  for (int leaf = first; leaf < last; leaf++) {
    const int now = flags;
#if STAGED
    wait_copies<1>();
    __syncthreads();
    unpack_keys(sh);
#else
    if (APART) {
      load_values(p, sh, leaf, tile.all);
      wait_copies<1>();
    } else {
      load_keys(p, sh, tile, leaf);
      wait_copies<0>();
    }
#endif
    __syncthreads();
    float s[LEAF / 8][4], reference[2], sum[2], up[2];
    u32 weights[LEAF / 16][4];
    if (now & SOME_SEEN) logits(s, sh, warp, lane);
    __syncthreads();
    if (!APART) load_values(p, sh, leaf, tile.all);
    if (leaf + 1 < last) {
      flags = plan_leaf(p, sh, tile, leaf + 1, list);
      if (SPLIT) load_keys(p, sh, tile, leaf + 1);
#if STAGED
      stage_keys(p, sh, tile, leaf + 1);
#endif
    } else if (APART) {
      commit();
    }
    if (now & SOME_SEEN) {
      const int* position = sh.position + (leaf & 1) * LEAF;
#if E4M3
      const float* scales = sh.scales + (leaf & 1) * 2 * LEAF;
      const float query_scale[2] = {sh.query_scale[warp * 16 + g], sh.query_scale[warp * 16 + g + 8]};
      scale_logits(s, scales, query_scale);
      if (now & NOT_WHOLE) leaf_references<true>(p, s, rows, reference, position);
      else leaf_references<false>(p, s, rows, reference, position);
      leaf_weights(p, s, reference, sum);
      scale_weights(s, scales + LEAF, up);
      pack_weights(weights, s);
#else
      if (now & NOT_WHOLE) softmax<true>(p, s, weights, rows, reference, sum, position);
      else softmax<false>(p, s, weights, rows, reference, sum, position);
#endif
    }
    wait_copies<APART>();
    __syncthreads();
#if STAGED
    unpack_values(sh);
    __syncthreads();
#endif
    if (now & SOME_SEEN) {
      Weights w[2];
      bool full[2];
#pragma unroll
      for (int y = 0; y < 2; y++) {
        full[y] = !is_empty(reference[y], sum[y]);
        if (full[y]) {
          w[y] = fold_weights(&rows.reference[y], reference[y]);
          rows.sum[y] = fold(rows.sum[y], sum[y], w[y]);
        }
      }
      const bool bad = (now & MIXED) && has_bad_values(sh, tile, leaf);
      for (int row = tile.first_row; row <= (bad ? last_row : tile.first_row); row++) {
        bool take[2] = {full[0], full[1]};
        if (bad) {
          __syncthreads();
          load_values(p, sh, leaf, sight_of(p, length, row));
          wait_copies<0>();
          __syncthreads();
#pragma unroll
          for (int y = 0; y < 2; y++) take[y] = full[y] && (pair0 + warp * 16 + g + y * 8) / GROUP == row;
        }
        add_values(o, weights, sh.v, w, up, take);
      }
    }
    __syncthreads();
#if STAGED
    if (leaf + 1 < last) stage_values(p, sh, tile, leaf + 1);
#endif
    if ((leaf + 1) % leaves_a_span == 0 || leaf + 1 == last) {
      flush(p, tile, rows, o, pair0, leaf / leaves_a_span, fresh);
      fresh = false;
    }
  }
  if (p.out) write_outputs(p, tile, pair0);
}
