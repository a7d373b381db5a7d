// Decode attention over K and V of E4M3: one query row a sequence, units straight into registers.
//
// Formula: attention.cuh and attention_e4m3.cuh. Reference: hsswap/driver/host_attention.py. sm_90 and newer.
//
// Grid     x: H; y: spans of the list; z: S
// Block    WARPS warps, one for each leaf of the span; they fold them into one part in memory, for merge_decode
// Shared   float [WARPS][GROUP][D], then float2 [WARPS][8]: R and l of each head
// Constants  HEAD_DIM (64 or 128, = dv) GROUP (1 to 8) KV_HEADS BLOCK (16) WARPS
//
// Matrix steps are transposed, S^T = K q^T and O^T = V^T P^T: tokens, then dims, are rows, the heads of the group columns.
// Lane (g, c) = (lane / 4, lane % 4). Of K it loads 16 bytes of tokens g and g + 8 from byte 16 c of each 64: a word of
// four codes is what it holds of a step. Of V it loads D / 8 bytes of tokens 2 c, 2 c + 1, 2 c + 8 and 2 c + 9 from byte
// g D / 8 on: bytes of two tokens, side by side, are what it holds of a dim. So nothing goes through shared memory.

#include "attention.cuh"

#if __CUDA_ARCH__ < 900  // cuda_attention_e4m3.py does not launch it there
extern "C" __global__ void attend_decode_e4m3(const __grid_constant__ AttendParams p) {}
#else

#include "ring.cuh"

#define D HEAD_DIM
#define HALVES (D / 64)
#define UNITS (LEAF / BLOCK)
#define THREADS (WARPS * 32)
#define DEPTH 2  // pieces (K or V of a unit) in flight of a warp

// What lane (g, c) has of K or of V of a unit.
struct Piece {
  u32 x[4 * D / 32];  // K: [token g, g + 8][64 dims][4]; V: [token 2 c, 2 c + 1, 2 c + 8, 2 c + 9][D / 32]
};

// Of the units that lanes 0 to 7 have.
__device__ __forceinline__ const u8* unit_in(const u8* mine, int lane) { return (const u8*)__shfl_sync(ALL, (u64)mine, lane); }

// Units are read once. Volatile, so that loads stay where they are ahead of the steps that need them.
__device__ __forceinline__ uint4 load16(const u8* from, u64 policy) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from), "l"(policy));
  return v;
}

__device__ __forceinline__ uint2 load8(const u8* from, u64 policy) {
  uint2 v;
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v2.u32 {%0,%1}, [%2], %3;" : "=r"(v.x), "=r"(v.y) : "l"(from), "l"(policy));
  return v;
}

__device__ __forceinline__ void load_key_piece(Piece& piece, const u8* unit, u64 policy, int g, int c) {
#pragma unroll
  for (int i = 0; i < 2 * HALVES; i++) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (unit) v = load16(unit + (g + i / HALVES * 8) * D + i % HALVES * 64 + c * 16, policy);
    piece.x[4 * i] = v.x;
    piece.x[4 * i + 1] = v.y;
    piece.x[4 * i + 2] = v.z;
    piece.x[4 * i + 3] = v.w;
  }
}

__device__ __forceinline__ void load_value_piece(Piece& piece, const u8* unit, u64 policy, int g, int c) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const u8* from = unit + BLOCK * D + (2 * c + i % 2 + i / 2 * 8) * D + g * (D / 8);
#if HEAD_DIM == 128
    uint4 v = make_uint4(0, 0, 0, 0);
    if (unit) v = load16(from, policy);
    piece.x[4 * i] = v.x;
    piece.x[4 * i + 1] = v.y;
    piece.x[4 * i + 2] = v.z;
    piece.x[4 * i + 3] = v.w;
#else
    uint2 v = make_uint2(0, 0);
    if (unit) v = load8(from, policy);
    piece.x[2 * i] = v.x;
    piece.x[2 * i + 1] = v.y;
#endif
  }
}

__device__ __forceinline__ u32 low_codes(u32 word) { return e4m3_to_f16x2((u16)word); }
__device__ __forceinline__ u32 high_codes(u32 word) { return e4m3_to_f16x2((u16)(word >> 16)); }

// s = K q^T of a unit: tokens g and g + 8, heads 2 c and 2 c + 1.
__device__ __forceinline__ void key_steps(float (&s)[4], const Piece& k, const u32 (&q)[D / 16][2]) {
  s[0] = s[1] = s[2] = s[3] = 0.f;
#pragma unroll
  for (int step = 0; step < D / 16; step++) {
    const u32 low = k.x[step], high = k.x[D / 16 + step];
    const u32 a[4] = {low_codes(low), low_codes(high), high_codes(low), high_codes(high)};
    mma(s, a, q[step][0], q[step][1]);
  }
}

// o += V^T P^T of a unit: of o[i], dims g D / 8 + 2 i and the next, heads 2 c and 2 c + 1.
__device__ __forceinline__ void value_steps(float (&o)[D / 16][4], const Piece& v, const u32 (&w)[2]) {
  constexpr int WORDS = D / 32;
#pragma unroll
  for (int i = 0; i < WORDS; i++) {
#pragma unroll
    for (int pair = 0; pair < 2; pair++) {
      const u32 order = pair ? 0x7362 : 0x5140;
      const u32 near = __byte_perm(v.x[i], v.x[WORDS + i], order), far = __byte_perm(v.x[2 * WORDS + i], v.x[3 * WORDS + i], order);
      const u32 a[4] = {low_codes(near), high_codes(near), low_codes(far), high_codes(far)};
      mma(o[2 * i + pair], a, w[0], w[1]);
    }
  }
}

// The queries of head g in FP16 as operands; returns the exponent that they were divided by.
__device__ __forceinline__ int load_query(const AttendParams& p, u32 (&q)[D / 16][2], int g, int c) {
  const u16* from = p.queries + blockIdx.z * p.query_stride[0] + (blockIdx.x * GROUP + min(g, GROUP - 1)) * p.query_stride[2];
  u32 largest = 0;
#pragma unroll
  for (int step = 0; step < D / 16; step++) {
    const uint2 four = *(const uint2*)(from + step / 4 * 64 + c * 16 + step % 4 * 4);
    q[step][0] = g < GROUP ? four.x : 0;
    q[step][1] = g < GROUP ? four.y : 0;
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const u32 bits = __float_as_uint(half_to_float((u16)(q[step][k / 2] >> (k % 2 * 16)))) & 0x7fffffffu;
      largest = max(largest, bits < 0x7f800000u ? bits : 0u);
    }
  }
  largest = max(largest, __shfl_xor_sync(ALL, largest, 1));
  largest = max(largest, __shfl_xor_sync(ALL, largest, 2));
  const int exponent = FP16 ? 0 : exponent_of_query(largest);
  const float by = power_of_two(-exponent);
#pragma unroll
  for (int step = 0; step < D / 16; step++)
#pragma unroll
    for (int k = 0; k < 2; k++)
      q[step][k] = pack(half_to_float((u16)q[step][k]) * by, half_to_float((u16)(q[step][k] >> 16)) * by);
  return exponent;
}

// Which tokens of a leaf are seen, as seen_tokens of decode_parts.cuh: bits 2 u and 2 u + 1 are tokens g and g + 8.
__device__ __forceinline__ u32 seen_of_lane(int first_of_lane, Sight see, int g, int lane) {
  if (__all_sync(ALL, lane >= UNITS || (first_of_lane >= see.start && first_of_lane + BLOCK <= see.end))) return 0xffff;
  u32 seen = 1u << 16;
#pragma unroll
  for (int u = 0; u < UNITS; u++) {
    const int token = __shfl_sync(ALL, first_of_lane, u) + g;
    seen |= (u32)is_in(token, see) << (2 * u) | (u32)is_in(token + 8, see) << (2 * u + 1);
  }
  return seen;
}

__device__ __forceinline__ float weight_of(float s, float factor, float base, bool big) {
  const float x = __fmaf_rn(s, factor, -base);
  return exp2_of(big && fabsf(base) > BIG_REFERENCE && x > 0.f ? 0.f : x);
}

struct Leaf {
  float o[D / 16][4], reference[2], sum[2];
};

// Weights as operands, from the logits of a leaf; scales: of the tokens of a unit, K of 16, then V of 16, a lane each.
__device__ __forceinline__ void weigh(const AttendParams& p, float (&s)[UNITS][4], const float (&scales)[UNITS], u32 (&w)[UNITS][2],
                                      Leaf& leaf, float (&up)[2], int g) {
  const float factor = p.scale * LOG2_E;
  float base[2], top[2] = {0.f, 0.f}, down[2];
  bool big = false;
#pragma unroll
  for (int y = 0; y < 2; y++) {
    float highest = NOTHING;
#pragma unroll
    for (int u = 0; u < UNITS; u++) highest = fmaxf(highest, fmaxf(s[u][y], s[u][y + 2]));
#pragma unroll
    for (int o = 4; o < 32; o <<= 1) highest = fmaxf(highest, __shfl_xor_sync(ALL, highest, o));
    leaf.reference[y] = leaf_reference(highest, factor);
    base[y] = leaf.reference[y] == NOTHING ? 0.f : leaf.reference[y];
    big |= fabsf(base[y]) > BIG_REFERENCE;
    leaf.sum[y] = 0.f;
  }
  big = __any_sync(ALL, big);
#pragma unroll
  for (int u = 0; u < UNITS; u++) {
#pragma unroll
    for (int i = 0; i < 4; i++) s[u][i] = weight_of(s[u][i], factor, base[i & 1], big);
#pragma unroll
    for (int y = 0; y < 2; y++) leaf.sum[y] = __fadd_rn(leaf.sum[y], __fadd_rn(s[u][y], s[u][y + 2]));
    const float near = __shfl_sync(ALL, scales[u], 16 + g), far = __shfl_sync(ALL, scales[u], 24 + g);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      s[u][i] = scaled_weight(s[u][i], i < 2 ? near : far);
      top[i & 1] = fmaxf(top[i & 1], fabsf(s[u][i]));
    }
  }
#pragma unroll
  for (int y = 0; y < 2; y++) {
#pragma unroll
    for (int o = 4; o < 32; o <<= 1) {
      leaf.sum[y] = __fadd_rn(leaf.sum[y], __shfl_xor_sync(ALL, leaf.sum[y], o));
      top[y] = fmaxf(top[y], __shfl_xor_sync(ALL, top[y], o));
    }
    const int exponent = weight_exponent(top[y]);
    up[y] = power_of_two(exponent);
    down[y] = power_of_two(-exponent);
  }
#pragma unroll
  for (int u = 0; u < UNITS; u++) {
    w[u][0] = transpose(pack(s[u][0] * down[0], s[u][1] * down[1]));
    w[u][1] = transpose(pack(s[u][2] * down[0], s[u][3] * down[1]));
  }
}

// V of tokens that are not seen becomes zero: their codes may be NaN.
__device__ __forceinline__ void hide(Piece& v, int first, Sight see, int c) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const bool seen = is_in(first + 2 * c + i % 2 + i / 2 * 8, see);
#pragma unroll
    for (int k = 0; k < D / 32; k++) v.x[i * (D / 32) + k] = seen ? v.x[i * (D / 32) + k] : 0;
  }
}

// One leaf by a warp.
__device__ __forceinline__ void attend_leaf(const AttendParams& p, Leaf& leaf, int number, int lane) {
  const int g = lane >> 2, c = lane & 3;
  const i64 list = ((i64)blockIdx.z * KV_HEADS + blockIdx.x) * p.list_stride;
  const int entry = number * UNITS + lane;
  const u8* mine = nullptr;
  int first_of_lane = NOWHERE - BLOCK;
  if (lane < UNITS && entry < p.entries) {
    mine = unit_of(p, p.slots[list + entry]);
    if (mine) first_of_lane = first_token_of(p, list, entry);
  }
  const Sight see = sight_of(p, length_of(p, blockIdx.z), 0);
  if (!(first_of_lane < see.end && first_of_lane + BLOCK > see.start)) mine = nullptr;
  leaf.reference[0] = leaf.reference[1] = NOTHING;
  leaf.sum[0] = leaf.sum[1] = 0.f;
  if (!__any_sync(ALL, mine != nullptr)) return;
  const u64 policy = evict_first();
  Piece ring[DEPTH];
  float scales[UNITS];
#pragma unroll
  for (int u = 0; u < DEPTH; u++) load_key_piece(ring[u], unit_in(mine, u), policy, g, c);
#pragma unroll
  for (int u = 0; u < UNITS; u++) {
    const u8* unit = unit_in(mine, u);
    scales[u] = unit ? ((const float*)(unit + 2 * BLOCK * D))[lane] : 0.f;
  }
  u32 q[D / 16][2];
  const float query_scale = power_of_two(load_query(p, q, g, c));
  const float of_query[2] = {__shfl_sync(ALL, query_scale, 8 * c), __shfl_sync(ALL, query_scale, 8 * c + 4)};
  float s[UNITS][4];
#pragma unroll
  for (int u = 0; u < UNITS; u++) {
    key_steps(s[u], ring[u % DEPTH], q);
    if (u + DEPTH < UNITS) load_key_piece(ring[u % DEPTH], unit_in(mine, u + DEPTH), policy, g, c);
    else load_value_piece(ring[u % DEPTH], unit_in(mine, u + DEPTH - UNITS), policy, g, c);
    const float near = __shfl_sync(ALL, scales[u], g), far = __shfl_sync(ALL, scales[u], 8 + g);
#pragma unroll
    for (int i = 0; i < 4; i++) s[u][i] = scaled_logit(s[u][i], i < 2 ? near : far, of_query[i & 1]);
  }
  const u32 seen = seen_of_lane(first_of_lane, see, g, lane);
  if (seen != 0xffff) {
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
      if (!(seen >> (2 * u) & 1)) s[u][0] = s[u][1] = NOTHING;
      if (!(seen >> (2 * u + 1) & 1)) s[u][2] = s[u][3] = NOTHING;
    }
  }
  u32 w[UNITS][2];
  float up[2];
  weigh(p, s, scales, w, leaf, up, g);
#pragma unroll
  for (int i = 0; i < D / 16; i++) leaf.o[i][0] = leaf.o[i][1] = leaf.o[i][2] = leaf.o[i][3] = 0.f;
#pragma unroll
  for (int u = 0; u < UNITS; u++) {
    Piece& v = ring[(UNITS + u) % DEPTH];
    if (seen != 0xffff) hide(v, __shfl_sync(ALL, first_of_lane, u), see, c);
    value_steps(leaf.o, v, w[u]);
    if (u + DEPTH < UNITS) load_value_piece(v, unit_in(mine, u + DEPTH), policy, g, c);
  }
#pragma unroll
  for (int i = 0; i < D / 16; i++)
#pragma unroll
    for (int k = 0; k < 4; k++) leaf.o[i][k] = __fmul_rn(leaf.o[i][k], up[k & 1]);
}

// The leaves of the block into one part.
__device__ __forceinline__ void fold_leaves(const AttendParams& p, const float* values, const float2* sums) {
  const i64 at = ((i64)blockIdx.z * Q_HEADS + blockIdx.x * GROUP) * p.parts + blockIdx.y;
  for (int e = threadIdx.x; e < GROUP * D / 2; e += THREADS) {
    const int head = e / (D / 2);
    float reference = NOTHING, sum = 0.f;
    float2 o = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < WARPS; i++) {
      const float2 s = sums[i * 8 + head];
      if (is_empty(s.x, s.y)) continue;
      const float2 x = ((const float2*)(values + i * GROUP * D))[e];
      const Weights w = fold_weights(&reference, s.x);
      sum = fold(sum, s.y, w);
      o = make_float2(fold(o.x, x.x, w), fold(o.y, x.y, w));
    }
    *(float2*)(p.partial + (at + (i64)head * p.parts) * D + e % (D / 2) * 2) = o;
    if (e % (D / 2) == 0) p.partial_sums[at + (i64)head * p.parts] = make_float2(reference, sum);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, WARPS <= 8 ? 2 : 1)
    attend_decode_e4m3(const __grid_constant__ AttendParams p) {
  extern __shared__ __align__(16) float values[];
  float2* sums = (float2*)(values + WARPS * GROUP * D);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, c = lane & 3;
  follow();  // merge_decode waits for the end of this
  Leaf leaf;
  attend_leaf(p, leaf, blockIdx.y * WARPS + warp, lane);
#pragma unroll
  for (int y = 0; y < 2; y++) {
    const int head = 2 * c + y;
    if (head >= GROUP) continue;
    if (g == 0) sums[warp * 8 + head] = make_float2(leaf.reference[y], leaf.sum[y]);
    if (is_empty(leaf.reference[y], leaf.sum[y])) continue;
    float* to = values + (warp * GROUP + head) * D + g * (D / 8);
#pragma unroll
    for (int i = 0; i < D / 16; i++) *(float2*)(to + 2 * i) = make_float2(leaf.o[i][y], leaf.o[i][y + 2]);
  }
  __syncthreads();
  fold_leaves(p, values, sums);
}
#endif
