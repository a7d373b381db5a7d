// What the decode kernels share: which leaves a warp takes, copies of units, a leaf's matrix steps and weights.
//
// Constants: attention.cu.
#pragma once

#define D HEAD_DIM
#define UNITS (LEAF / BLOCK)
#define THREADS (WARPS * 32)
#define PIECE (BLOCK * D * 2)
#define RING (STAGES * PIECE)
#define AT_ONCE (STAGES >= 4 ? 2 : 1)
#define BLOCKS (CLUSTER ? CLUSTER : 1)  // of a cluster

__device__ __forceinline__ int rank_of() { return blockIdx.x % BLOCKS; }
__device__ __forceinline__ int head_of() { return blockIdx.x / BLOCKS; }

// By the whole thread block, before it reads what others wrote: lists and units.
__device__ __forceinline__ void begin(const AttendParams& p) {
#if FETCH
  const FetchLists& f = p.fetch;
#pragma unroll 1
  for (int at = (threadIdx.x * BLOCKS + rank_of()) * 32; at < f.blocks; at += THREADS * BLOCKS * 32) prefetch(f.host_slots + at);
#pragma unroll 1
  for (int at = threadIdx.x * 32; at < f.count; at += THREADS * 32) {
    prefetch(f.chosen + head_of() * f.chosen_stride + at);
    prefetch(f.chosen_slots + head_of() * f.chosen_slots_stride + at);
    prefetch(f.missing + head_of() * f.missing_stride + at);
  }
  if (f.early) return;  // all else but what select writes is there: select has waited for it
#endif
  follow();
}

// Once the first copies are on their way.
__device__ __forceinline__ void begun(const AttendParams& p) {
#if FETCH
  if (p.fetch.early) launch_next();
#endif
}

// Of a block's pair, in [S, Q].
__device__ __forceinline__ i64 row_of_pair() { return (i64)blockIdx.z * Q_HEADS + head_of() * GROUP; }

__device__ __forceinline__ void load_queries(const AttendParams& p, u32 (&q)[D / 16][2], int g, int c) {
  const u16* from = p.queries + blockIdx.z * p.query_stride[0] + (head_of() * GROUP + min(g, GROUP - 1)) * p.query_stride[2];
#pragma unroll
  for (int k = 0; k < D / 16; k++) {
    const uint2 x = *(const uint2*)(from + k * 16 + c * 4);
    q[k][0] = g < GROUP ? x.x : 0;
    q[k][1] = g < GROUP ? x.y : 0;
  }
}

__device__ __forceinline__ i64 list_of(const AttendParams& p) {
  return ((i64)blockIdx.z * KV_HEADS + head_of()) * p.list_stride;
}

// An entry of a leaf, in the lanes 0 to 7.
struct Entry {
  const u8* unit;
  int first;  // its first token; NOWHERE - BLOCK without a unit
#if FETCH
  int kept;  // of a unit that is missing and lies in a host slot: its device slot, -2 - entry while it has none; else -1
#endif
};

// Whether it is copied into the ring. What is missing is brought even where no token of it is seen.
__device__ __forceinline__ bool is_wanted(const Entry& e, Sight see) {
#if FETCH
  if (e.kept != -1) return true;
#endif
  return e.first < see.end && e.first + BLOCK > see.start;
}

// Which leaves a warp takes, one after the other.
struct Leaves {
  int first, count, leaves_a_span, stride;  // stride: leaves from the end of a span to the next of this warp
  __device__ __forceinline__ int operator()(int i) const { return first + i + i / leaves_a_span * stride; }
};

#if FETCH
// The lists that fetch would write, taken from what it would read.
__device__ __forceinline__ void find_entry(const AttendParams& p, Entry& e, int entry) {
  const FetchLists& f = p.fetch;
  const int head = head_of();
  int slot, block, missing = 0;
  if (entry < f.count) {
    slot = load_relaxed(f.chosen_slots + head * f.chosen_slots_stride + entry);
    block = load_relaxed(f.chosen + head * f.chosen_stride + entry);
    missing = load_relaxed(f.missing + head * f.missing_stride + entry);
    if (f.early)  // each of the three says itself that it is there
      while (block == UNTOLD || missing == MISSING_UNTOLD || (missing == 0 && slot == UNTOLD)) {
        slot = load_relaxed(f.chosen_slots + head * f.chosen_slots_stride + entry);
        block = load_relaxed(f.chosen + head * f.chosen_stride + entry);
        missing = load_relaxed(f.missing + head * f.missing_stride + entry);
      }
  } else {
    slot = load_int(f.tail_slots + head * f.tail_slots_stride + entry - f.count);
    block = load_int(f.tail_positions + entry - f.count);
  }
  e.unit = unit_of(p, slot);
  if (missing) {
    const int away = load_int(f.host_slots + block);
    e.kept = away < 0 ? -1 : slot == UNTOLD ? -2 - entry : max(slot, -1);
    e.unit = away < 0 ? nullptr : p.blocks + away * p.block_bytes + head * p.unit_bytes;
  }
  if (e.unit) e.first = first_token_of(block);
}
#endif

__device__ __forceinline__ Entry entry_of(const AttendParams& p, i64 list, const Leaves& leaves, int i, int lane) {
  Entry e = {nullptr, NOWHERE - BLOCK};
#if FETCH
  e.kept = -1;
#endif
  if (lane < UNITS && i < leaves.count) {
    const int entry = leaves(i) * UNITS + lane;
    if (entry < p.entries) {
#if FETCH
      find_entry(p, e, entry);
#else
      e.unit = unit_of(p, load_int(p.slots + list + entry));
      if (e.unit) e.first = first_token_of(p, list, entry);
#endif
    }
  }
  return e;
}

// Which tokens of a leaf are seen: bits 2 u and 2 u + 1 of the result are tokens g and g + 8 of unit u. 0xffff is all of
// them, and that in every lane: a lane that sees its own tokens has bit 16 where another lane does not see its. Who asks
// for 0xffff takes matrix steps by the answer, which a warp takes as one or not at all.
__device__ __forceinline__ u32 seen_tokens(const Entry& e, Sight see, int g, int lane) {
  if (__all_sync(ALL, lane >= UNITS || (e.first >= see.start && e.first + BLOCK <= see.end))) return 0xffff;
  u32 seen = 1u << 16;
#pragma unroll
  for (int u = 0; u < UNITS; u++) {
    const int token = __shfl_sync(ALL, e.first, u) + g;
    seen |= (u32)is_in(token, see) << (2 * u) | (u32)is_in(token + 8, see) << (2 * u + 1);
  }
  return seen;
}

// Lane `piece % 8` copies a piece, or lets its barrier go where no token is seen.
__device__ __forceinline__ void issue(const Entry& e, int piece, u32 ring, u32 barriers, Sight see, u64 policy, int lane) {
  const int stage = piece % STAGES;
  if (lane == piece % UNITS) {
    if (is_wanted(e, see)) {
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
      if (is_wanted(e, see)) {
        expect(barriers + stage * 8, PIECE);
        copy_bulk(ring + stage * PIECE, e.unit + kind * PIECE, PIECE, barriers + stage * 8, policy);
      } else {
        arrive(barriers + stage * 8);
      }
    }
  }
}

#if FETCH
// A piece of a missing unit, which has arrived at `from`, to its device slot: select may be about to say which.
__device__ __forceinline__ void keep_piece(const AttendParams& p, Entry& e, int kind, u32 from) {
  while (e.kept < -1) {
    const FetchLists& f = p.fetch;
    const int slot = load_relaxed(f.chosen_slots + head_of() * f.chosen_slots_stride + (-2 - e.kept));
    if (slot != UNTOLD) e.kept = max(slot, -1);
  }
  if (e.kept != -1) store_bulk((u8*)p.units + (i64)e.kept * p.unit_bytes + kind * PIECE, from, PIECE);
}

// What fetch does beside, by the warp that has least to do.
__device__ __forceinline__ void fetch_beside(const AttendParams& p) {
  const bool last = rank_of() == BLOCKS - 1 && blockIdx.y == gridDim.y - 1 && threadIdx.x >= THREADS - WARP;
  if (last) list_absent(p.fetch, head_of());
}
#endif

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

// o += V^T P^T of 64 dims of one unit. MASKED: rows of tokens that are not seen (`low` and `high`: those of tokens g and
// g + 8) are taken as zero.
template <bool MASKED>
__device__ __forceinline__ void values_64(float (*o)[4], u32 v, u32 p0, u32 p1, bool low, bool high, int g, int c) {
  const bool odd = g & 1;
  const u32 from = v + g * (D * 2) + c * 16;
  uint4 x[2][2];
#pragma unroll
  for (int y = 0; y < 2; y++) {
    x[y][0] = load_shared16(from + y * 8 * D * 2 + (odd ? 64 : 0));
    x[y][1] = load_shared16(from + y * 8 * D * 2 + (odd ? 0 : 64));
    swap_if(odd, x[y][0], x[y][1]);
  }
  if (MASKED && !low) x[0][0] = x[0][1] = make_uint4(0, 0, 0, 0);
  if (MASKED && !high) x[1][0] = x[1][1] = make_uint4(0, 0, 0, 0);
  const u32 a[4][4] = {{x[0][0].x, x[0][1].x, x[1][0].x, x[1][1].x}, {x[0][0].y, x[0][1].y, x[1][0].y, x[1][1].y},
                       {x[0][0].z, x[0][1].z, x[1][0].z, x[1][1].z}, {x[0][0].w, x[0][1].w, x[1][0].w, x[1][1].w}};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const u32 t[4] = {transpose(a[i][0]), transpose(a[i][1]), transpose(a[i][2]), transpose(a[i][3])};
    mma(o[i], t, p0, p1);
  }
}

// Of all dims.
template <bool MASKED>
__device__ __forceinline__ void unit_values(float (&o)[D / 16][4], u32 v, u32 p0, u32 p1, bool low, bool high, int g,
                                            int c) {
#pragma unroll
  for (int h = 0; h < D / 64; h++) values_64<MASKED>(o + h * 4, v + h * 128, p0, p1, low, high, g, c);
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

__device__ __forceinline__ float weight_of_token(float s, float factor, float base, bool big) {
  const float x = __fmaf_rn(s, factor, -base);
  return exp2_of(big && fabsf(base) > BIG_REFERENCE && x > 0.f ? 0.f : x);
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
      s[u][i] = weight_of_token(s[u][i], factor, base[i & 1], big);
    }
#pragma unroll
    for (int y = 0; y < 2; y++) leaf.sum[y] = __fadd_rn(leaf.sum[y], __fadd_rn(s[u][y], s[u][y + 2]));
    w[u][0] = transpose(pack(s[u][0], s[u][1]));
    w[u][1] = transpose(pack(s[u][2], s[u][3]));
  }
#pragma unroll
  for (int y = 0; y < 2; y++)
#pragma unroll
    for (int o = 4; o < 32; o <<= 1) leaf.sum[y] = __fadd_rn(leaf.sum[y], __shfl_xor_sync(ALL, leaf.sum[y], o));
}

// A leaf into its span.
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
