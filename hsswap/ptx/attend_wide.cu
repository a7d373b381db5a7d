// Attention of many query rows over units in device slots: wgmma, tensor-map copies. sm_90a, d 128.
//
// Formula and tree: attention.cuh; the same bits as attend_tile, which takes what this does not: lists, windows, units in
// host slots, and what is behind the last whole span where V that not every row sees is not finite. `done` says how
// far a tile is. Reference: hsswap/driver/host_attention.py.
//
// Grid     x: tiles of 128 of the R * GROUP (row, query head) pairs of a KV head; y: S * H
// Block    two warpgroups of 64 pairs each, and one of which a warp copies
// Shared   1,024-aligned: Q [2 halves of d][128][128 B], K [STAGES][2 halves of d][128 tokens][128 B], V [STAGES][8
//          blocks][2 halves of d][16 tokens][128 B], rows of 128 bytes swizzled; the state's weighted
//          rows, 64 KiB; barriers are static
// Constants  HEAD_DIM VALUE_DIM (128) GROUP KV_HEADS BLOCK (16) TRANSFORM
//
// A warpgroup issues P V of a leaf, then S of the next, folds beside that, and takes turns with the other one, whose softmax
// runs meanwhile.

#include "attention.cuh"

#define TILE 128
#define THREADS 256
#define DK_PAD HEAD_DIM
#define DV_PAD VALUE_DIM
#define K_ROW 256
#define V_ROW 256
#define APART 1
#define WIDE 1
#include "ring.cuh"
#include "tile_softmax.cuh"
#include "tile_loads.cuh"
#include "tile_ends.cuh"

#if !defined(__CUDA_ARCH_FEAT_SM90_ALL)  // cuda_attention.py does not launch it there
struct __align__(64) WideParams { u64 maps[32]; AttendParams p; };
extern "C" __global__ void attend_wide(const __grid_constant__ WideParams given) {}
#else
#include "wgmma.cuh"

struct __align__(64) WideParams {
  TensorMap keys, values;  // boxes of 64 dims x 16 tokens, and of 64 x 16 x 2 halves
  AttendParams p;
};

#define STAGES 2
#define HALF (TILE * 128)      // of Q or K
#define PIECE_BYTES (2 * HALF)  // K or V of a leaf
#define CONSUMER_WARPS 8

struct Barriers {
  u32 full_k, full_v, empty_k, empty_v;
};

__device__ __forceinline__ void produce(const WideParams& given, const Barriers& b, u32 k, u32 v, int leaves) {
  const int lane = threadIdx.x & 31;
  const int* slots = given.p.slots + (i64)blockIdx.y * given.p.list_stride;
  const int block = lane < 16 ? lane >> 1 : lane & 7;
  const int most = given.p.entries - 1;
  int slot = slots[min(block, most)];
  for (int i = 0; i < leaves; i++) {
    const int stage = i % STAGES;
    const u32 parity = (i / STAGES - 1) & 1;
    const int next = i + 1 < leaves ? slots[min((i + 1) * (LEAF / BLOCK) + block, most)] : 0;
    const int row = slot * 2 * BLOCK;
    if (i >= STAGES) wait(b.empty_k + stage * 8, parity);
    if (lane == 0) expect(b.full_k + stage * 8, PIECE_BYTES);
    __syncwarp();
    if (lane < 16)
      copy_box(k + stage * PIECE_BYTES + (lane & 1) * HALF + block * BLOCK * 128, &given.keys, 0, row, lane & 1,
               b.full_k + stage * 8);
    if (i >= STAGES) wait(b.empty_v + stage * 8, parity);
    if (lane == 0) expect(b.full_v + stage * 8, PIECE_BYTES);
    __syncwarp();
    if (lane >= 16 && lane < 24)
      copy_box(v + stage * PIECE_BYTES + block * BLOCK * 256, &given.values, 0, row + BLOCK, 0, b.full_v + stage * 8);
    slot = next;
  }
}

// Q of the tile into swizzled rows, by both warpgroups.
__device__ __forceinline__ void load_wide_queries(const AttendParams& p, const Tile& tile, u32 q, int pair0) {
  const int sequence = blockIdx.y / KV_HEADS, head = blockIdx.y % KV_HEADS;
#pragma unroll 8
  for (int i = threadIdx.x; i < TILE * (HEAD_DIM / 8); i += THREADS) {
    const int m = i / (HEAD_DIM / 8), chunk = i % (HEAD_DIM / 8), pair = pair0 + m;
    uint4 x = make_uint4(0, 0, 0, 0);
    if (m < tile.pairs)
      x = *(const uint4*)(p.queries + sequence * p.query_stride[0] + (pair / GROUP) * p.query_stride[1] +
                          (head * GROUP + pair % GROUP) * p.query_stride[2] + chunk * 8);
    const u32 to = q + chunk / 8 * HALF + m * 128 + (((chunk & 7) ^ (m & 7)) << 4);
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
  }
  asm volatile("fence.proxy.async.shared::cta;\nbar.sync 3, 256;" ::: "memory");
}

__device__ __forceinline__ void issue_logits(float (&s)[16][4], u32 q, u32 k) {
  begin_steps();
#pragma unroll
  for (int d = 0; d < HEAD_DIM / 16; d++) {
    const u64 a = operand(q, d / 4 * HALF + d % 4 * 32, 1024), b = operand(k, d / 4 * HALF + d % 4 * 32, 1024);
    if (d == 0) first_step_shared(s, a, b);
    else step_shared(s, a, b);
  }
  commit_steps();
}

// The state of a thread's two rows during the kernel: weighted in shared memory, [16 dims / 8][THREADS] float4.
struct Carried {
  float4* weighted;
  float reference[2], sum[2];
};

__device__ __forceinline__ int row_of(int y) { return (threadIdx.x >> 5) * 16 + (threadIdx.x & 31) / 4 + y * 8; }

__device__ __forceinline__ void load_state(const AttendParams& p, const Tile& tile, Carried& state, int pair0) {
  const int c = threadIdx.x & 3;
#pragma unroll
  for (int y = 0; y < 2; y++) {
    state.reference[y] = NOTHING;
    state.sum[y] = 0.f;
    const bool have = !p.begin && row_of(y) < tile.pairs;
    const i64 at = state_row(p, pair0 + row_of(y));
    if (have) {
      state.reference[y] = p.maximum[at];
      state.sum[y] = p.total[at];
    }
#pragma unroll
    for (int n = 0; n < DV_PAD / 8; n++)
      ((float2*)&state.weighted[n * THREADS + threadIdx.x])[y] =
          have ? ((const float2*)(p.weighted + at * VALUE_DIM))[n * 4 + c] : make_float2(0.f, 0.f);
  }
}

__device__ __forceinline__ void store_state(const AttendParams& p, const Tile& tile, const Carried& state, int pair0) {
  const int c = threadIdx.x & 3;
#pragma unroll
  for (int y = 0; y < 2; y++) {
    if (row_of(y) >= tile.pairs) continue;
    const i64 at = state_row(p, pair0 + row_of(y));
    if (c == 0) {
      p.maximum[at] = state.reference[y];
      p.total[at] = state.sum[y];
    }
#pragma unroll
    for (int n = 0; n < DV_PAD / 8; n++)
      ((float2*)(p.weighted + at * VALUE_DIM))[n * 4 + c] = ((const float2*)&state.weighted[n * THREADS + threadIdx.x])[y];
  }
}

// The end of the attention for a thread's two rows.
__device__ __forceinline__ void store_outputs(const AttendParams& p, const Tile& tile, const Carried& state, int pair0) {
  const int c = threadIdx.x & 3, sequence = blockIdx.y / KV_HEADS, head = blockIdx.y % KV_HEADS;
  const bool pairs = p.out_stride[3] == 1 && ((u64)p.out | 2 * (u64)(p.out_stride[0] | p.out_stride[1] | p.out_stride[2])) % 4 == 0;
#pragma unroll
  for (int y = 0; y < 2; y++) {
    if (row_of(y) >= tile.pairs) continue;
    const int pair = pair0 + row_of(y), q = head * GROUP + pair % GROUP;
    const End end = end_of(state.reference[y], state.sum[y], p.sinks, q);
    if (p.lse && c == 0) p.lse[state_row(p, pair)] = lse_of(end.reference, end.total);
    u16* out = p.out + sequence * p.out_stride[0] + pair / GROUP * p.out_stride[1] + q * p.out_stride[2];
#pragma unroll
    for (int n = 0; n < DV_PAD / 8; n++) {
      const float2 x = ((const float2*)&state.weighted[n * THREADS + threadIdx.x])[y];
      const u16 low = output_of(x.x * end.factor, end.total), high = output_of(x.y * end.factor, end.total);
      const int d = n * 8 + 2 * c;
      if (pairs) {
        *(u32*)(out + d) = low | (u32)high << 16;
      } else {
        out[d * p.out_stride[3]] = low;
        out[(d + 1) * p.out_stride[3]] = high;
      }
    }
  }
}

// A span into the state; leaves the span empty.
__device__ __forceinline__ void fold_span(Carried& state, Rows& rows, float (&o)[DV_PAD / 8][4]) {
  Weights w[2];
#pragma unroll
  for (int y = 0; y < 2; y++) {
    w[y] = {1.f, 0.f};
    if (!is_empty(rows.reference[y], rows.sum[y])) {
      w[y] = fold_weights(&state.reference[y], rows.reference[y]);
      state.sum[y] = fold(state.sum[y], rows.sum[y], w[y]);
    }
  }
#pragma unroll
  for (int n = 0; n < DV_PAD / 8; n++) {
    float4 x = state.weighted[n * THREADS + threadIdx.x];
    x.x = fold(x.x, o[n][0], w[0]);
    x.y = fold(x.y, o[n][1], w[0]);
    x.z = fold(x.z, o[n][2], w[1]);
    x.w = fold(x.w, o[n][3], w[1]);
    state.weighted[n * THREADS + threadIdx.x] = x;
  }
  clear(rows, o);
}


// Logits of tokens that a thread's two rows do not see; the leaf begins with token `first`.
__device__ __forceinline__ void mask(float (&s)[LEAF / 8][4], const int (&limit)[2], int first) {
  const int c = threadIdx.x & 3;
#pragma unroll
  for (int n = 0; n < LEAF / 8; n++)
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (first + n * 8 + 2 * c + (i & 1) >= limit[i >> 1]) s[n][i] = NOTHING;
}

// acc = P V
__device__ __forceinline__ void issue_values(float (&acc)[16][4], const u32 (&weights)[LEAF / 16][4], u32 v) {
  begin_steps();
#pragma unroll
  for (int u = 0; u < LEAF / 16; u++) {
    const u64 b = operand(v, u * BLOCK * 256, 1024);
    if (u == 0) first_step_registers(acc, weights[u], b);
    else step_registers(acc, weights[u], b);
  }
  commit_steps();
}

// A leaf into its span.
__device__ __forceinline__ void fold_leaf(float (&o)[16][4], const float (&acc)[16][4], const Weights (&w)[2]) {
#pragma unroll
  for (int n = 0; n < 16; n++)
#pragma unroll
    for (int j = 0; j < 4; j++) o[n][j] = fold(o[n][j], acc[n][j], w[j >> 1]);
}

__device__ __forceinline__ void take_turn(int group) {
  asm volatile("bar.sync %0, 256;" ::"r"(4 + group) : "memory");
}

__device__ __forceinline__ void pass_turn(int group) {
  asm volatile("bar.arrive %0, 256;" ::"r"(5 - group) : "memory");
}

// V of a leaf of which `every` tokens are seen by every row of the tile and `all` by some: zero behind these. Returns
// whether some between the two is not finite: 0 times infinity is NaN, so no row may be multiplied with it that does
// not see it, and attend_tile has to take it.
__device__ __forceinline__ bool bad_values(u32 v, int every, int all) {
  const int token = threadIdx.x >> 1;
  const u32 row = v + token / BLOCK * BLOCK * 256 + (threadIdx.x & 1) * BLOCK * 128 + token % BLOCK * 128;
  u32 bad = 0;
  if (token >= every) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      if (token >= all) {
        asm volatile("st.shared.v4.u32 [%0], {%1,%1,%1,%1};" ::"r"(row + i * 16), "r"(0) : "memory");
      } else {
        const uint4 x = load_shared16(row + i * 16);
        const u32 words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int j = 0; j < 4; j++) bad |= (words[j] & EXPONENT) == EXPONENT || (words[j] >> 16 & EXPONENT) == EXPONENT;
      }
    }
  }
  u32 some;
  asm volatile(
      "{\n.reg .pred mine, any;\nfence.proxy.async.shared::cta;\nsetp.ne.u32 mine, %1, 0;\n"
      "bar.red.or.pred any, 6, 256, mine;\nselp.u32 %0, 1, 0, any;\n}"
      : "=r"(some)
      : "r"(bad)
      : "memory");
  return some;
}

__device__ __forceinline__ void consume(const AttendParams& p, const Barriers& b, const Tile& tile, int pair0, u32 q, u32 k,
                                        u32 v, int leaves, float4* weighted) {
  const int lane = threadIdx.x & 31, group = uniform(threadIdx.x >> 7), leaves_a_span = p.span_blocks * BLOCK / LEAF;
  load_wide_queries(p, tile, q, pair0);
  const u32 q_place = place_of(q + group * 64 * 128, 16), k_place = place_of(k, 16), v_place = place_of(v, BLOCK * 128);
  Rows rows;
  float o[DV_PAD / 8][4], s[LEAF / 8][4], reference[2], sum[2];
  const i64 length = length_of(p, blockIdx.y / KV_HEADS);
  int limit[2];
#pragma unroll
  for (int y = 0; y < 2; y++) limit[y] = row_of(y) < tile.pairs ? seen_of(p, length, (pair0 + row_of(y)) / GROUP) : 0;
  const int every = seen_of(p, length, pair0 / GROUP), all = seen_of(p, length, (pair0 + tile.pairs - 1) / GROUP);
  int folded = 0;
  bool bad = false;
  u32 weights[LEAF / 16][4];
  clear(rows, o);
  Carried state;
  state.weighted = weighted;
  load_state(p, tile, state, pair0);
  if (group == 1) pass_turn(1);
  wait(b.full_k, 0);
  issue_logits(s, q_place, k_place);
  wait_steps(s);
  if (lane == 0) arrive(b.empty_k);
  if (LEAF > every) mask(s, limit, 0);
  softmax<false>(p, s, weights, rows, reference, sum, nullptr);
  int left = leaves_a_span;
  for (int i = 0; i < leaves; i++) {
    const int stage = i % STAGES, ahead = (i + 1) % STAGES;
    float acc[16][4];
    wait(b.full_v + stage * 8, (i / STAGES) & 1);
    if (i + 1 < leaves) wait(b.full_k + ahead * 8, ((i + 1) / STAGES) & 1);
    if ((i + 1) * LEAF > every) bad |= bad_values(v + stage * PIECE_BYTES, every - i * LEAF, all - i * LEAF);
    const u32 v_here = v_place + stage * (PIECE_BYTES >> 4), k_ahead = k_place + ahead * (PIECE_BYTES >> 4);
    take_turn(group);
    // Behind the last leaf S of what lies there, for nothing: a branch here would make the compiler serialise the steps.
    issue_values(acc, weights, v_here);
    wait_steps(acc);
    if (lane == 0) arrive(b.empty_v + stage * 8);
    issue_logits(s, q_place, k_ahead);
    pass_turn(group);
    Weights w[2];
#pragma unroll
    for (int y = 0; y < 2; y++) {
      const bool empty = is_empty(reference[y], sum[y]);
      w[y] = fold_weights(&rows.reference[y], reference[y]);
      if (empty) w[y] = {1.f, 0.f};
      rows.sum[y] = fold(rows.sum[y], sum[y], w[y]);
    }
    fold_leaf(o, acc, w);
    wait_steps(s);
    if (lane == 0 && i + 1 < leaves) arrive(b.empty_k + ahead * 8);
    if ((i + 2) * LEAF > every) mask(s, limit, (i + 1) * LEAF);
    leaf_references<false>(p, s, rows, reference, nullptr);
    leaf_weights(p, s, reference, sum);
    pack_weights(weights, s);
    if (--left == 0 || i == leaves - 1) {
      if (!bad) {
        fold_span(state, rows, o);
        folded++;
      }
      left = leaves_a_span;
    }
  }
  if (threadIdx.x == 0) p.done[blockIdx.y * gridDim.x + pair0 / TILE] = bad ? folded : p.parts;
  if (p.out && !bad) {
    store_outputs(p, tile, state, pair0);
    return;
  }
  store_state(p, tile, state, pair0);
}
extern "C" __global__ void __launch_bounds__(THREADS + 128, 1) attend_wide(const __grid_constant__ WideParams given) {
  extern __shared__ __align__(1024) u8 memory[];
  __shared__ __align__(8) u64 barriers[4 * STAGES];
  const AttendParams& p = given.p;
  const u32 q = shared_address(memory), k = q + 2 * HALF, v = k + STAGES * PIECE_BYTES;
  Barriers b;
  b.full_k = shared_address(barriers);
  b.full_v = b.full_k + STAGES * 8;
  b.empty_k = b.full_v + STAGES * 8;
  b.empty_v = b.empty_k + STAGES * 8;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      init_barrier(b.full_k + i * 8, 1);
      init_barrier(b.full_v + i * 8, 1);
      init_barrier(b.empty_k + i * 8, CONSUMER_WARPS);
      init_barrier(b.empty_v + i * 8, CONSUMER_WARPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  Tile tile;
  const int pair0 = (gridDim.x - 1 - blockIdx.x) * TILE;
  tile.pairs = min(TILE, p.rows * GROUP - pair0);
  const int all = seen_of(p, length_of(p, blockIdx.y / KV_HEADS), (pair0 + tile.pairs - 1) / GROUP);
  const int leaves = (all + LEAF - 1) / LEAF;
  if (leaves == 0 && threadIdx.x == 0) p.done[blockIdx.y * gridDim.x + pair0 / TILE] = 0;
  if (leaves == 0) return;
  if (threadIdx.x >= THREADS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x < THREADS + 32) produce(given, b, k, v, leaves);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    consume(p, b, tile, pair0, q, k, v, leaves, (float4*)(memory + 2 * HALF + 2 * STAGES * PIECE_BYTES));
  }
}
#endif
