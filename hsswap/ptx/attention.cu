// Decode attention: one query row a sequence over scattered units, bulk copies into private rings of warps.
//
// Formula and tree: attention.cuh. Reference: hsswap/driver/host_attention.py. sm_90 and newer.
//
// Grid     x: for each of H heads the blocks of its cluster, CLUSTER of them; y: shares of a list; z: S
// Block    WARPS warps. LEAF_WARPS 2, 4, 8: so many warps share a leaf, and a block takes WARPS / LEAF_WARPS leaves once
//          (decode_leaf.cuh). LEAF_WARPS 1: a warp takes leaves (WHOLE_SPANS 0) or whole spans (1), one of every
//          grid's warps, and copies their pieces (K or V of a unit: 16 tokens) through STAGES stages of its own.
// Ends     decode_ends.cuh. CLUSTER 0: a block's leaves are one span, which goes to memory, for merge_decode. Else each block of a cluster owns some dims, is sent these of every part (leaf, or whole span), and folds them.
// Shared   rings of PIECE bytes (4 KiB at d 128); what warps of a leaf exchange; CLUSTER: dims of the parts, and their
//          sums. CLUSTER 0: 64 bytes a warp. Barriers are static. Folds use the rings' place.
// Constants  HEAD_DIM (64 or 128, = dv) GROUP (1 to 8) KV_HEADS BLOCK (16) WARPS LEAF_WARPS STAGES WHOLE_SPANS CLUSTER
//          BLOCKS_A_SM BLOCK_LSE (1: block_lse is written) FETCH (1: what fetch would do first is done here: missing units
//          are read out of their host slots, over the link, and go from the rings on to their device slots)
//
// Matrix steps are transposed, S^T = K q^T and O^T = V^T P^T: the 16 tokens of a unit are rows, the heads of the group
// columns. K and V keep their plain layout: rows are 128 or 256 bytes, so lanes of one column of rows would meet in
// the same banks. Lane (g, c) = (lane / 4, lane % 4) therefore reads the 32-byte pieces of a K row in the order i ^ (g % 4), the
// 16-byte chunks of a V row in the order of g % 2, and puts them back with selects.

#include "attention.cuh"

#if __CUDA_ARCH__ < 900  // cuda_attention.py does not launch it there
extern "C" __global__ void attend_decode(const __grid_constant__ AttendParams p) {}
#else

#define TOGETHER (WARPS / LEAF_WARPS)  // leaves of a block at a time
#define LEAF_PARTS (CLUSTER && !WHOLE_SPANS)

#include "ring.cuh"
#include "decode_parts.cuh"
#if BLOCK_LSE
#include "block_mass.cuh"
#endif
#include "decode_ends.cuh"

#if LEAF_WARPS > 1
#include "decode_leaf.cuh"
#define EXCHANGE_BYTES ((int)sizeof(Exchange))
#else
#define EXCHANGE_BYTES 0

// What one warp does, from its first copy to its last part.
__device__ __forceinline__ void attend_leaves(const AttendParams& p, u8* memory, u64* barrier_words, const Parts& to,
                                              float* kept, int lane, int warp, int g, int c) {
  const u32 ring = shared_address(memory) + warp * RING, barriers = shared_address(barrier_words) + warp * STAGES * 8;
  if (lane == 0) init_barriers(barriers, STAGES);
  __syncwarp();
  const i64 list = list_of(p);
  const int all = (int)(((i64)p.entries * BLOCK + LEAF - 1) / LEAF), items = WHOLE_SPANS ? p.parts : all;
  // The blocks of a cluster get as many as each other; those of a block without one are a span.
  const int item = CLUSTER ? warp * BLOCKS + rank_of() : blockIdx.y * WARPS + warp, step = gridDim.y * BLOCKS * WARPS;
  const int mine = item < items ? (items - 1 - item) / step + 1 : 0;
  Leaves leaves;
  leaves.leaves_a_span = WHOLE_SPANS ? p.span_blocks / UNITS : 1;
  leaves.first = item * leaves.leaves_a_span;
  leaves.stride = (step - 1) * leaves.leaves_a_span;
  leaves.count = mine * leaves.leaves_a_span;
  if (mine && item + (mine - 1) * step == items - 1) leaves.count -= items * leaves.leaves_a_span - all;
  const i64 length = length_of(p, blockIdx.z);
  Entry now = entry_of(p, list, leaves, 0, lane);
  const Sight see = sight_of(p, length, 0);
  const u64 policy = evict_first();
  if (leaves.count > 0) issue_first(now, ring, barriers, see, policy, lane);
  Entry next = entry_of(p, list, leaves, 1, lane);
  begun(p);
  u32 q[D / 16][2];
  load_queries(p, q, g, c);
  wait_begun();
#if WHOLE_SPANS
  Part span;
  clear(span);
#endif
  for (int i = 0; i < leaves.count; i++) {
    const Entry after = entry_of(p, list, leaves, i + 2, lane);
    const bool more = i + 1 < leaves.count;
    const u32 turn = (16 / STAGES) % 2 ? i & 1 : 0;
    if (!__any_sync(ALL, lane < UNITS && is_wanted(now, see))) {
      // No copies are on their way.
#pragma unroll
      for (int piece = 0; piece < 2 * UNITS; piece++) {
        __syncwarp();  // two pieces of a stage are of different lanes
        if (piece + STAGES < 2 * UNITS) issue(now, piece + STAGES, ring, barriers, see, policy, lane);
        else if (more) issue(next, piece + STAGES - 2 * UNITS, ring, barriers, see, policy, lane);
      }
      now = next;
      next = after;
#if BLOCK_LSE
      write_no_lse(p, leaves(i) * UNITS, kept + warp * UNITS * GROUP, g, c);
#endif
#if LEAF_PARTS
      const float reference[2] = {NOTHING, NOTHING}, sum[2] = {0.f, 0.f};
      send_sums(to, leaves(i), reference, sum, g, c);
#elif WHOLE_SPANS
      if (i % leaves.leaves_a_span == leaves.leaves_a_span - 1 || !more) {
        send_part(to, leaves(i) / leaves.leaves_a_span, span, g, c);
        clear(span);
      }
#endif
      continue;
    }
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
#if FETCH
      if (lane >= u && lane < u + AT_ONCE) {
        keep_piece(p, now, 0, ring + lane % STAGES * PIECE);
        wait_stored();
      }
#endif
      __syncwarp();
#pragma unroll
      for (int piece = u; piece < u + AT_ONCE; piece++) {
        if (piece + STAGES < 2 * UNITS) issue(now, piece + STAGES, ring, barriers, see, policy, lane);
        else if (more) issue(next, piece + STAGES - 2 * UNITS, ring, barriers, see, policy, lane);
      }
    }
    const u32 seen = seen_tokens(now, see, g, lane);
    if (seen != 0xffff) {
#pragma unroll
      for (int u = 0; u < UNITS; u++) {
        if (!(seen >> (2 * u) & 1)) s[u][0] = s[u][1] = NOTHING;
        if (!(seen >> (2 * u + 1) & 1)) s[u][2] = s[u][3] = NOTHING;
      }
    }
    Part leaf;
    clear(leaf);
    u32 w[UNITS][2];
    leaf_weights(p, s, w, leaf);
#if BLOCK_LSE
    float sums[UNITS][2];
#pragma unroll
    for (int u = 0; u < UNITS; u++)
#pragma unroll
      for (int y = 0; y < 2; y++) sums[u][y] = __fadd_rn(s[u][y], s[u][y + 2]);
    write_block_lse<UNITS>(p, sums, leaf.reference, leaves(i) * UNITS, kept + warp * UNITS * GROUP, g, c);
#endif
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
      const int piece = UNITS + u;
      wait(barriers + piece % STAGES * 8, (piece / STAGES + turn) & 1);
      const u32 v = ring + piece % STAGES * PIECE;
      if (seen == 0xffff) unit_values<false>(leaf.o, v, w[u][0], w[u][1], true, true, g, c);
      else unit_values<true>(leaf.o, v, w[u][0], w[u][1], seen >> (2 * u) & 1, seen >> (2 * u + 1) & 1, g, c);
#if FETCH
      if (lane == u) {
        keep_piece(p, now, 1, v);
        wait_stored();
      }
#endif
      __syncwarp();
      if (piece + STAGES < 2 * UNITS) issue(now, piece + STAGES, ring, barriers, see, policy, lane);
      else if (more) issue(next, piece + STAGES - 2 * UNITS, ring, barriers, see, policy, lane);
    }
    now = next;
    next = after;
#if LEAF_PARTS
    send_part(to, leaves(i), leaf, g, c);
#elif WHOLE_SPANS
    fold_leaf(span, leaf);
    if (i % leaves.leaves_a_span == leaves.leaves_a_span - 1 || !more) {
      send_part(to, leaves(i) / leaves.leaves_a_span, span, g, c);
      clear(span);
    }
#else
    keep_leaf(leaf, (float*)(memory + warp * RING), leaf_sums(memory) + warp * 8, g, c);
    return;
#endif
  }
#if CLUSTER == 0
  if (lane < 8) leaf_sums(memory)[warp * 8 + lane] = make_float2(NOTHING, 0.f);
#endif
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_A_SM) attend_decode(const __grid_constant__ AttendParams p) {
  extern __shared__ __align__(128) u8 memory[];
  __shared__ __align__(8) u64 barrier_words[TOGETHER * STAGES];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, c = lane & 3;
#if BLOCK_LSE
  __shared__ float kept[KEPT];
#else
  float* const kept = nullptr;
#endif
  begin(p);  // merge_decode waits for the end of this
#if CLUSTER
  __shared__ float2 before[GROUP];
  arrive_begun();
  u8* arrived = memory + TOGETHER * RING + EXCHANGE_BYTES;
  const Parts to = {shared_address(arrived), shared_address(arrived) + p.parts * (OWNED * 4)};
  if (threadIdx.x < GROUP) {
    const i64 row = (i64)blockIdx.z * Q_HEADS + head_of() * GROUP + threadIdx.x;
    before[threadIdx.x] = p.begin ? make_float2(NOTHING, 0.f) : make_float2(p.maximum[row], p.total[row]);
  }
#else
  const Parts to;
#endif
#if LEAF_WARPS == 1
  attend_leaves(p, memory, barrier_words, to, kept, lane, warp, g, c);
#else
  attend_leaf(p, memory, barrier_words, to, kept, lane, warp, g, c);
#endif
#if FETCH
  if (p.fetch.early) wait_for_last();  // for all that select writes
  fetch_beside(p);
#endif
#if CLUSTER
  exchange();
  fold_parts(p, memory, (const float*)arrived, (const float2*)(arrived + p.parts * (OWNED * 4)), before, kept);
#else
  __syncthreads();
  fold_block(p, memory);
#endif
}
#endif
