// How attend_tile brings a leaf into shared memory.
#pragma once

struct Shared {
  u32 q, k, v;     // addresses in shared memory
  u64* source;     // [2][LEAF]: a token's unit, or page
  int* position;   // [2][LEAF]: NOWHERE where no row of the tile sees the token
  const u8* any;   // an address that may be read
#if E4M3
  float* scales;       // [2][2][LEAF]: a token's K, and V
  float* query_scale;  // [TILE]
  u32 key_codes, value_codes;  // where APART is 1
#endif
};

struct Tile {
  int first_row, pairs;   // of the tile's first pair; pairs that exist
  Sight all, every;       // what some row sees, what every row sees
};

__device__ __forceinline__ void copy16(u32 to, const u8* from, bool valid) {
#if WIDE
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
#else
  u32 w[4] = {0, 0, 0, 0};
  if (valid) {
    const u16* x = (const u16*)from;
#pragma unroll
    for (int i = 0; i < 4; i++) w[i] = (u32)x[2 * i] | (u32)x[2 * i + 1] << 16;
  }
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3])
               : "memory");
#endif
}

__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int N>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

#if E4M3
template <int DIM, int PAD, bool VALUES>
__device__ __forceinline__ void load_rows(const AttendParams& p, u32 to, const Shared& sh, int leaf, Sight see);
__device__ __forceinline__ float scale_of(const AttendParams& p, bool values, u64 unit, int inside);
#else
// Rows of K or V of a leaf; zero for tokens outside `see` and in the padding of the dim.
template <int DIM, int PAD, bool VALUES>
__device__ __forceinline__ void load_rows(const AttendParams& p, u32 to, const Shared& sh, int leaf, Sight see) {
  constexpr int CHUNKS = PAD / 8;
  const u64* source = sh.source + (leaf & 1) * LEAF;
  const int* position = sh.position + (leaf & 1) * LEAF;
  const int first_inside = BLOCK > LEAF ? leaf * LEAF % BLOCK : 0;
  for (int i = threadIdx.x; i < LEAF * CHUNKS; i += THREADS) {
    const int token = i / CHUNKS, chunk = i % CHUNKS, inside = first_inside + token % BLOCK;
    const bool valid = is_in(position[token], see) && chunk * 8 < DIM;
#if PAGES
    const u8* from = sh.any;
    if (valid)
      from = page_of(p, VALUES, (int)source[token], blockIdx.y % KV_HEADS) +
             inside * (VALUES ? p.value_stride : p.key_stride)[2] + chunk * 16;
#else
    const int at = (VALUES ? BLOCK * HEAD_DIM * 2 : 0) + inside * DIM * 2 + chunk * 16;
    const u8* from = valid ? (const u8*)source[token] + at : sh.any;
#endif
    copy16(to + token * (PAD + 8) * 2 + chunk * 16, from, valid);
  }
}
#endif

// What a leaf's tokens are to the rows of a tile.
enum { SOME_SEEN = 1, NOT_WHOLE = 2, MIXED = 4 };  // MIXED: some are seen by some rows and not by others

// Sources and positions of a leaf's tokens; thread t has token t.
__device__ __forceinline__ int plan_leaf(const AttendParams& p, const Shared& sh, const Tile& tile, int leaf, i64 list) {
  const int at = (leaf & 1) * LEAF + threadIdx.x;
  const i64 token = (i64)leaf * LEAF + threadIdx.x;
  const int entry = (int)(token / BLOCK);
  int position = NOWHERE;
  if (entry < p.entries) {
    const int slot = p.slots[list + entry];
#if PAGES
    const bool there = slot >= 0;
    sh.source[at] = slot;
#else
    const u8* unit = unit_of(p, slot);
    const bool there = unit;
    sh.source[at] = (u64)unit;
#endif
    if (there) position = first_token_of(p, list, entry) + (int)(token % BLOCK);
  }
  const bool some = is_in(position, tile.all), every = is_in(position, tile.every);
  sh.position[at] = some ? position : NOWHERE;
#if E4M3
  float* scales = sh.scales + (leaf & 1) * 2 * LEAF + threadIdx.x;
  scales[0] = some ? scale_of(p, false, sh.source[at], (int)(token % BLOCK)) : 0.f;
  scales[LEAF] = some ? scale_of(p, true, sh.source[at], (int)(token % BLOCK)) : 0.f;
#endif
  return (__syncthreads_or(some) ? SOME_SEEN : 0) | (__syncthreads_and(every) ? 0 : NOT_WHOLE) |
         (__syncthreads_or(some && !every) ? MIXED : 0);
}
