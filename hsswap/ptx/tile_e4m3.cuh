// What attend_tile does otherwise where K and V are E4M3 (attention.cuh says what is computed).
//
// Codes become FP16 on their way into shared memory, exactly. Scales lie beside them in float32, a token's two.
#pragma once

#define AT_ONCE 8  // chunks of 8 codes of a thread, in flight together

// Where four dims of a row of Q or K lie in shared memory, in elements.
__device__ __forceinline__ int place_of(int dim) {
  return STEPS_CROSS ? dim / 64 * 64 + dim / 4 % 4 * 16 + dim / 16 % 4 * 4 : dim;
}

__device__ __forceinline__ void store_shared8(u32 to, u32 x, u32 y) {
  asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(to), "r"(x), "r"(y) : "memory");
}

__device__ __forceinline__ uint2 load_eight_codes(const u8* from, bool valid) {
  uint2 x = make_uint2(0, 0);
  if (!valid) return x;
#if WIDE
  asm volatile("ld.global.v2.u32 {%0,%1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(from) : "memory");
#else
#pragma unroll
  for (int i = 0; i < 4; i++) {
    x.x |= (u32)from[i] << (8 * i);
    x.y |= (u32)from[4 + i] << (8 * i);
  }
#endif
  return x;
}

// The scale of a token's K or V: `unit` is a unit, or the number of a page.
__device__ __forceinline__ float scale_of(const AttendParams& p, bool values, u64 unit, int inside) {
#if PAGES
  const i64* stride = p.scale_stride + (values ? 3 : 0);
  const int head = blockIdx.y % KV_HEADS;
  return *(const float*)((values ? p.value_scales : p.key_scales) + (i64)unit * stride[0] + head * stride[1] + inside * stride[2]);
#else
  return ((const float*)((const u8*)unit + BLOCK * (HEAD_DIM + VALUE_DIM)))[(values ? BLOCK : 0) + inside];
#endif
}

// Where chunk i of a leaf's rows is, null outside `see` and in the padding of the dim.
template <int DIM, int PAD, bool VALUES>
__device__ __forceinline__ const u8* codes_at(const AttendParams& p, const Shared& sh, int leaf, Sight see, int i) {
  const int token = i / (PAD / 8), chunk = i % (PAD / 8), buffer = (leaf & 1) * LEAF;
  const int inside = (BLOCK > LEAF ? leaf * LEAF % BLOCK : 0) + token % BLOCK;
  if (chunk * 8 >= DIM || !is_in(sh.position[buffer + token], see)) return nullptr;
#if PAGES
  return page_of(p, VALUES, (int)sh.source[buffer + token], blockIdx.y % KV_HEADS) +
         inside * (VALUES ? p.value_stride : p.key_stride)[2] + chunk * 8;
#else
  return (const u8*)sh.source[buffer + token] + (VALUES ? BLOCK * HEAD_DIM : 0) + inside * DIM + chunk * 8;
#endif
}

// Eight codes to their place in a leaf of FP16.
template <int PAD, bool VALUES>
__device__ __forceinline__ void unpack(u32 to, int i, uint2 codes) {
  const int token = i / (PAD / 8), dim = i % (PAD / 8) * 8;
  const u32 row = to + token * (PAD + 8) * 2;
#pragma unroll
  for (int four = 0; four < 2; four++) {
    const u32 x = four ? codes.y : codes.x;
    const int at = VALUES ? dim + 4 * four : place_of(dim + 4 * four);
    store_shared8(row + at * 2, e4m3_to_f16x2((u16)x), e4m3_to_f16x2((u16)(x >> 16)));
  }
}

#if STAGED
// Codes of a leaf on their way into shared memory, zero where there are none.
template <int DIM, int PAD, bool VALUES>
__device__ __forceinline__ void stage(const AttendParams& p, u32 to, const Shared& sh, const Tile& tile, int leaf) {
#pragma unroll 4
  for (int i = threadIdx.x; i < LEAF * PAD / 8; i += THREADS) {
    const u8* from = codes_at<DIM, PAD, VALUES>(p, sh, leaf, tile.all, i);
#if WIDE
    const int bytes = from ? 8 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to + i * 8), "l"(from ? from : sh.any), "r"(bytes) : "memory");
#else
    const uint2 x = load_eight_codes(from, from);
    store_shared8(to + i * 8, x.x, x.y);
#endif
  }
  commit();
}

template <int PAD, bool VALUES>
__device__ __forceinline__ void unpack_leaf(u32 to, u32 from) {
#pragma unroll 8
  for (int i = threadIdx.x; i < LEAF * PAD / 8; i += THREADS) {
    uint2 x;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(from + i * 8));
    unpack<PAD, VALUES>(to, i, x);
  }
}

__device__ __forceinline__ void stage_keys(const AttendParams& p, const Shared& sh, const Tile& tile, int leaf) {
  stage<HEAD_DIM, DK_PAD, false>(p, sh.key_codes, sh, tile, leaf);
}

__device__ __forceinline__ void stage_values(const AttendParams& p, const Shared& sh, const Tile& tile, int leaf) {
  stage<VALUE_DIM, DV_PAD, true>(p, sh.value_codes, sh, tile, leaf);
}

__device__ __forceinline__ void unpack_keys(const Shared& sh) { unpack_leaf<DK_PAD, false>(sh.k, sh.key_codes); }
__device__ __forceinline__ void unpack_values(const Shared& sh) { unpack_leaf<DV_PAD, true>(sh.v, sh.value_codes); }
#endif

// Rows of K or V of a leaf at once; zero for tokens outside `see` and in the padding of the dim.
template <int DIM, int PAD, bool VALUES>
__device__ __forceinline__ void load_rows(const AttendParams& p, u32 to, const Shared& sh, int leaf, Sight see) {
  constexpr int CHUNKS = PAD / 8;
  for (int first = threadIdx.x; first < LEAF * CHUNKS; first += THREADS * AT_ONCE) {
    uint2 codes[AT_ONCE];
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) {
      const int i = first + k * THREADS;
      const u8* from = i < LEAF * CHUNKS ? codes_at<DIM, PAD, VALUES>(p, sh, leaf, see, i) : nullptr;
      codes[k] = load_eight_codes(from, from);
    }
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) {
      if (first + k * THREADS < LEAF * CHUNKS) unpack<PAD, VALUES>(to, first + k * THREADS, codes[k]);
    }
  }
}

// Queries in FP16, BF16 ones by a power of two so that none is too large or too small for it; sh.query_scale undoes it.
__device__ __forceinline__ void load_queries(const AttendParams& p, const Shared& sh, const Tile& tile, int pair0,
                                             int sequence, int head) {
  const int lane = threadIdx.x & 31;
  for (int m = threadIdx.x >> 5; m < TILE; m += THREADS / 32) {
    const int pair = pair0 + m;
    const u16* from = p.queries + sequence * p.query_stride[0] + (pair / GROUP) * p.query_stride[1] +
                      (head * GROUP + pair % GROUP) * p.query_stride[2];
    float x[8] = {};
    if (m < tile.pairs && lane * 8 < HEAD_DIM) {
#pragma unroll
      for (int k = 0; k < 8; k++) x[k] = half_to_float(from[(lane * 8 + k) * p.query_stride[3]]);
    }
    const int exponent = FP16 ? 0 : query_exponent(x);
    if (lane == 0) sh.query_scale[m] = power_of_two(exponent);
    const float by = power_of_two(-exponent);
    if (lane * 8 >= DK_PAD) continue;
#pragma unroll
    for (int four = 0; four < 2; four++) {
      const float* y = x + 4 * four;
      const u32 to = sh.q + m * K_ROW + place_of(lane * 8 + 4 * four) * 2;
      store_shared8(to, pack(y[0] * by, y[1] * by), pack(y[2] * by, y[3] * by));
    }
  }
}

// Logits of codes become those of what they stand for.
__device__ __forceinline__ void scale_logits(float (&s)[LEAF / 8][4], const float* scales, const float (&query_scale)[2]) {
  const int c = threadIdx.x & 3;
#pragma unroll
  for (int n = 0; n < LEAF / 8; n++) {
    const float2 of_key = *(const float2*)(scales + n * 8 + 2 * c);
#pragma unroll
    for (int i = 0; i < 4; i++) s[n][i] = scaled_logit(s[n][i], i & 1 ? of_key.y : of_key.x, query_scale[i >> 1]);
  }
}

// Weights become those of codes of V, as large as FP16 likes them; `up` is what weighted sums are multiplied with.
__device__ __forceinline__ void scale_weights(float (&s)[LEAF / 8][4], const float* scales, float (&up)[2]) {
  const int c = threadIdx.x & 3;
  float top[2] = {0.f, 0.f};
#pragma unroll
  for (int n = 0; n < LEAF / 8; n++) {
    const float2 of_value = *(const float2*)(scales + n * 8 + 2 * c);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      s[n][i] = scaled_weight(s[n][i], i & 1 ? of_value.y : of_value.x);
      top[i >> 1] = fmaxf(top[i >> 1], fabsf(s[n][i]));
    }
  }
  float down[2];
#pragma unroll
  for (int y = 0; y < 2; y++) {
    top[y] = fmaxf(top[y], __shfl_xor_sync(~0u, top[y], 1));
    top[y] = fmaxf(top[y], __shfl_xor_sync(~0u, top[y], 2));
    const int exponent = weight_exponent(top[y]);
    up[y] = power_of_two(exponent);
    down[y] = power_of_two(-exponent);
  }
#pragma unroll
  for (int n = 0; n < LEAF / 8; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) s[n][i] *= down[i >> 1];
}
