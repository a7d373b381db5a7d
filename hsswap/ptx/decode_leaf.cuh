// A leaf by LEAF_WARPS warps of attend_decode: each takes some of its units, then some of its dims.
//
// K of a unit, then its V, lie in the stage of the unit: STAGES is UNITS. Constants: attention.cu.
#pragma once

#define OWN_UNITS (UNITS / LEAF_WARPS)

// What the warps of a leaf exchange.
struct Exchange {
  uint4 weights[TOGETHER][UNITS][32];    // a unit's packed weights of a lane, and its two sums
  float tops[TOGETHER][LEAF_WARPS][8];
};

#define VALUE_WARPS (LEAF_WARPS < D / 32 ? LEAF_WARPS : D / 32)  // that share a leaf's dims
#define VALUE_DIMS (D / VALUE_WARPS)

// The warps of a leaf wait for each other.
__device__ __forceinline__ void meet(int group) {
  __syncwarp();
  asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(LEAF_WARPS * 32) : "memory");
}

__device__ __forceinline__ void copy_piece(const Entry& e, u32 to, int kind, u32 barrier, Sight see, u64 policy) {
  if (is_wanted(e, see)) {
    expect(barrier, PIECE);
    copy_bulk(to, e.unit + kind * PIECE, PIECE, barrier, policy);
  } else {
    arrive(barrier);
  }
}

// o += V^T P^T of 32 dims of one unit, as values_64.
template <bool MASKED>
__device__ __forceinline__ void values_32(float (*o)[4], u32 v, u32 p0, u32 p1, bool low, bool high, int g, int c) {
  const u32 from = v + g * (D * 2) + c * 16;
  uint4 x = load_shared16(from), y = load_shared16(from + 8 * D * 2);
  if (MASKED && !low) x = make_uint4(0, 0, 0, 0);
  if (MASKED && !high) y = make_uint4(0, 0, 0, 0);
  const u32 a[2][4] = {{x.x, x.z, y.x, y.z}, {x.y, x.w, y.y, y.w}};
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const u32 t[4] = {transpose(a[i][0]), transpose(a[i][1]), transpose(a[i][2]), transpose(a[i][3])};
    mma(o[i], t, p0, p1);
  }
}

// A leaf's sums and weighted sums of VALUE_DIMS dims.
template <bool MASKED>
__device__ __forceinline__ void leaf_values(float (&o)[VALUE_DIMS / 16][4], float (&sum)[2], const uint4* weights, u32 ring,
                                            u32 barriers, u32 seen, int g, int c) {
#pragma unroll
  for (int u = 0; u < UNITS; u++) {
    const uint4 w = weights[u * 32];
    sum[0] = __fadd_rn(sum[0], __uint_as_float(w.z));
    sum[1] = __fadd_rn(sum[1], __uint_as_float(w.w));
    wait(barriers + u * 8, 1);
    const bool low = seen >> (2 * u) & 1, high = seen >> (2 * u + 1) & 1;
    if (VALUE_DIMS == 64) values_64<MASKED>(o, ring + u * PIECE, w.x, w.y, low, high, g, c);
    else values_32<MASKED>(o, ring + u * PIECE, w.x, w.y, low, high, g, c);
  }
}

// V of missing units of this warp to their slots, before another takes the ring's place.
__device__ __forceinline__ void keep_values(const AttendParams& p, Entry& e, bool mine, u32 ring, u32 barriers, int lane) {
#if FETCH
  if (mine && e.kept != -1) {
    wait(barriers + lane * 8, 1);
    keep_piece(p, e, 1, ring + lane * PIECE);
    wait_stored();
  }
#endif
}

#if BLOCK_LSE
#define FREE_WARPS (LEAF_WARPS - VALUE_WARPS)
#define LSE_WARPS (FREE_WARPS == 0 ? LEAF_WARPS : FREE_WARPS >= 4 ? 4 : FREE_WARPS)

// Logsumexps of a leaf's units, by the warps that take no dims, or by all while V is on its way.
__device__ __forceinline__ void leaf_lse(const AttendParams& p, const uint4* weights, const float (&reference)[2],
                                         int first_entry, float* kept, int part, int g, int c) {
  constexpr int N = UNITS / LSE_WARPS;
  const int first = (FREE_WARPS ? part - VALUE_WARPS : part) * N;
  if (first < 0 || first >= UNITS) return;
  float v[N][2];
#pragma unroll
  for (int n = 0; n < N; n++) {
    const uint4 w = weights[(first + n) * 32];
    v[n][0] = __uint_as_float(w.z);
    v[n][1] = __uint_as_float(w.w);
  }
  write_block_lse<N>(p, v, reference, first_entry + first, kept + first * GROUP, g, c);
}
#endif

// What one of the warps of a leaf does.
__device__ __forceinline__ void attend_leaf(const AttendParams& p, u8* memory, u64* barrier_words, const Parts& to,
                                            float* kept, int lane, int warp, int g, int c) {
  const int group = warp / LEAF_WARPS, part = warp % LEAF_WARPS, first_unit = part * OWN_UNITS;
  const u32 ring = shared_address(memory) + group * RING, barriers = shared_address(barrier_words) + group * STAGES * 8;
  Exchange& exchange = *(Exchange*)(memory + TOGETHER * RING);
  Leaves leaves = {group * BLOCKS + rank_of(), 0, 1, 0};  // as many for each block of the cluster
  leaves.count = leaves.first < p.parts;
  const i64 length = length_of(p, blockIdx.z);
  Entry now = entry_of(p, list_of(p), leaves, 0, lane);
  if (lane == 0) {  // while the numbers are on their way
    init_barriers(barriers + first_unit * 8, OWN_UNITS);
  }
  __syncwarp();
  const Sight see = sight_of(p, length, 0);
  const u64 policy = evict_first();
  const bool mine = lane >= first_unit && lane < first_unit + OWN_UNITS;
  if (leaves.count && mine) {
    copy_piece(now, ring + lane * PIECE, 0, barriers + lane * 8, see, policy);
  }
  begun(p);
  u32 q[D / 16][2];
  load_queries(p, q, g, c);
  wait_begun();
  if (!leaves.count) return;

  constexpr int N = OWN_UNITS < 2 ? 1 : 2;
  float s[OWN_UNITS][4];
#pragma unroll
  for (int u = 0; u < OWN_UNITS; u += N) {
    u32 from[N];
#pragma unroll
    for (int n = 0; n < N; n++) {
      wait(barriers + (first_unit + u + n) * 8, 0);
      from[n] = ring + (first_unit + u + n) * PIECE;
    }
    unit_logits<N>(s + u, from, q, g, c);
    const bool done = lane >= first_unit + u && lane < first_unit + u + N;
#if FETCH
    if (done) keep_piece(p, now, 0, ring + lane * PIECE);
    wait_stored();
#endif
    __syncwarp();
    if (done) copy_piece(now, ring + lane * PIECE, 1, barriers + lane * 8, see, policy);
  }
  const u32 seen = seen_tokens(now, see, g, lane);
#pragma unroll
  for (int u = 0; u < OWN_UNITS; u++) {
    if (!(seen >> (2 * (first_unit + u)) & 1)) s[u][0] = s[u][1] = NOTHING;
    if (!(seen >> (2 * (first_unit + u) + 1) & 1)) s[u][2] = s[u][3] = NOTHING;
  }
#pragma unroll
  for (int y = 0; y < 2; y++) {
    float top = NOTHING;
#pragma unroll
    for (int u = 0; u < OWN_UNITS; u++) top = fmaxf(top, fmaxf(s[u][y], s[u][y + 2]));
#pragma unroll
    for (int o = 4; o < 32; o <<= 1) top = fmaxf(top, __shfl_xor_sync(ALL, top, o));
    if (g == 0) exchange.tops[group][part][2 * c + y] = top;
  }
  meet(group);
  const float factor = p.scale * LOG2_E;
  float reference[2], base[2], sum[2] = {0.f, 0.f};
  bool big = false;
#pragma unroll
  for (int y = 0; y < 2; y++) {
    float top = NOTHING;
#pragma unroll
    for (int i = 0; i < LEAF_WARPS; i++) top = fmaxf(top, exchange.tops[group][i][2 * c + y]);
    reference[y] = leaf_reference(top, factor);
    base[y] = reference[y] == NOTHING ? 0.f : reference[y];
    big |= fabsf(base[y]) > BIG_REFERENCE;
  }
#pragma unroll
  for (int u = 0; u < OWN_UNITS; u++) {
#pragma unroll
    for (int i = 0; i < 4; i++) s[u][i] = weight_of_token(s[u][i], factor, base[i & 1], big);
    exchange.weights[group][first_unit + u][lane] =
        make_uint4(transpose(pack(s[u][0], s[u][1])), transpose(pack(s[u][2], s[u][3])),
                   __float_as_uint(__fadd_rn(s[u][0], s[u][2])), __float_as_uint(__fadd_rn(s[u][1], s[u][3])));
  }
  meet(group);
#if BLOCK_LSE
  leaf_lse(p, &exchange.weights[group][0][lane], reference, leaves.first * UNITS, kept + group * UNITS * GROUP, part, g, c);
#endif
  if (part >= VALUE_WARPS) {
    keep_values(p, now, mine, ring, barriers, lane);
    return;
  }
  float o[VALUE_DIMS / 16][4] = {};
  const uint4* weights = &exchange.weights[group][0][lane];
  const u32 v = ring + part * (VALUE_DIMS * 2);
  if (seen == 0xffff) leaf_values<false>(o, sum, weights, v, barriers, seen, g, c);
  else leaf_values<true>(o, sum, weights, v, barriers, seen, g, c);
#pragma unroll
  for (int y = 0; y < 2; y++)
#pragma unroll
    for (int n = 4; n < 32; n <<= 1) sum[y] = __fadd_rn(sum[y], __shfl_xor_sync(ALL, sum[y], n));
  keep_values(p, now, mine, ring, barriers, lane);
  if (part == 0) send_sums(to, leaves.first, reference, sum, g, c);
  send_dims<VALUE_DIMS / 16>(to, leaves.first, o, part * VALUE_DIMS, g, c);
}
