// What the attention kernels share: parameters, the arithmetic that fixes every bit, loads, matrix steps.
//
// The tree of a row's result (reference for its meaning: hsswap/driver/host_attention.py). Entries of a
// call are cut into leaves of 128 tokens and spans of span_blocks entries, both at fixed logical places:
//
//     leaf    R = max(s) c rounded down, P = 2^(s c - R), l = sum of P in one order, o = rounded(P) V from zero
//     span    left fold of its leaves, from nothing          c = logit scale times log2(e), s = q.k
//     state   left fold of the spans, carried between calls
//
//     fold    R' = max(R, Rp)   a = 2^(R - R')   b = 2^(Rp - R')   l' = l a + lp b   o' = o a + op b
//
// Every kernel computes a leaf with the same sequence of operations: matrix steps of 16 dims (16 tokens) in
// ascending order into one accumulator, each of which rounds alike for a product and its transpose; sums of P by
// tokens g and g + 8 of 16, over the units, then pairwise over g. So tiles, splits, rows beside a row and the
// choice of the kernel change no bit. R and `maximum` of the state are in units of log 2. A part of which a row
// sees nothing (R = -inf and l = 0) is skipped.

#pragma once

#include "e4m3.cuh"
#if FETCH
#include "fetch_lists.cuh"
#endif

#define LEAF 128
#define NOTHING __int_as_float(0xff800000)
#define LOG2_E 1.4426950408889634f
#define LN_2 0.6931471805599453f
#define NOWHERE 0x7fffffff

// Mirrors hsswap/driver/cuda_attention.py; shapes in letters of hsswap/driver/operations.py.
struct AttendParams {
  const u16* queries;       // [S, R, Q, dk], strides below, in elements
  const u8* units;          // [slots, unit_bytes]
  const u8* blocks;         // [host slots, block_bytes], or null
  const int* slots;         // [S, H, B], list_stride elements between the lists of KV heads, also of positions
  const int* positions;     // [S, H, B], or null
  const u8* lengths;        // [S], length_bytes each (4 or 8; 0: it is length_more), length_stride bytes apart; length_more is added
  float* maximum;           // [S, R, Q]
  float* total;             // [S, R, Q]
  float* weighted;          // [S, R, Q, dv]
  float* block_lse;         // [S, R, Q, B], or null; attend_decode: BLOCK_LSE 1
  float* block_mass;        // [S, H, B], or null: by attend_decode with parts of leaves, where `out` is given
  float* partial;           // [S, R, Q, parts, dv]
  float2* partial_sums;     // [S, R, Q, parts]: R, l
  int* done;                // [S * H][tiles of 128 pairs]: spans that attend_wide has folded, where `wide` is 1
  u16* out;                 // [S, R, Q, dv] in elements, or null: output of the last tile, fused
  float* lse;               // [S, R, Q], or null
  const float* sinks;       // [Q], or null: logits that join the softmax of a head, natural, at `out`
  i64 query_stride[4];
  i64 out_stride[4];
  i64 unit_bytes;
  i64 block_bytes;
  i64 list_stride;
  const u8* values;         // of an engine's pages, whose keys `units` has: PAGES 1
  i64 key_stride[3];        // bytes from page to page, from head to head, from token to token
  i64 value_stride[3];
  int sequences, rows, entries, first_block, span_blocks, begin, window, parts, wide;
  int length_bytes, length_stride, length_more;
  float scale, soft_cap;
  const u8* key_scales;     // of pages of E4M3
  const u8* value_scales;
  i64 scale_stride[6];      // bytes from page to page, from head to head, from token to token, of K, then of V
#if FETCH
  FetchLists fetch;  // in place of slots and positions
#endif
};

__device__ __forceinline__ float exp2_of(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

__device__ __forceinline__ bool is_empty(float reference, float sum) { return reference == NOTHING && sum == 0.f; }

// The weights of a fold; the state's reference becomes *reference.
struct Weights {
  float old, part;
};

__device__ __forceinline__ Weights fold_weights(float* reference, float part) {
  const float top = fmaxf(*reference, part);
  const float base = top == NOTHING ? 0.f : top;
  const Weights w = {exp2_of(*reference - base), exp2_of(part - base)};
  *reference = top;
  return w;
}

__device__ __forceinline__ float fold(float old, float part, Weights w) {
  return __fmaf_rn(old, w.old, __fmul_rn(part, w.part));
}

// Beyond 2^20 the rounding of max(s) c is felt: there exponents are cut at 0, row by row.
#define BIG_REFERENCE 1048576.f

__device__ __forceinline__ float leaf_reference(float top, float factor) { return __fmul_rd(top, factor); }

// ITEM: of operands of matrix steps.
#if FP16 || E4M3
#define ITEM "f16"
#define EXPONENT 0x7c00
#else
#define ITEM "bf16"
#define EXPONENT 0x7f80
#endif

__device__ __forceinline__ u32 pack(float low, float high) {
  u32 r;
  asm("cvt.rn." ITEM "x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// Of outputs.
__device__ __forceinline__ u16 half_of(float x) {
  u16 r;
#if FP16
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(x));
#else
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x));
#endif
  return r;
}

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// c[16 x 8] += a[16 x 16] b[16 x 8]
__device__ __forceinline__ void mma(float* c, const u32* a, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32." ITEM "." ITEM ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void ldmatrix(u32* r, u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void ldmatrix_transposed(u32* r, u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

#ifdef KV_HEADS
#if E4M3
#include "attention_e4m3.cuh"
#endif
#define Q_HEADS (KV_HEADS * GROUP)

// Where entry `entry` of a list lies: its unit, or null where there is none.
__device__ __forceinline__ const u8* unit_of(const AttendParams& p, int slot) {
  if (slot >= 0) return p.units + (i64)slot * p.unit_bytes;
  if (slot == -1) return nullptr;
  const int away = -2 - slot;
  return p.blocks + (i64)(away / KV_HEADS) * p.block_bytes + (i64)(away % KV_HEADS) * p.unit_bytes;
}

#ifndef PAGES
#define PAGES 0
#endif

// Keys or values of a page.
__device__ __forceinline__ const u8* page_of(const AttendParams& p, bool values, int page, int head) {
  const i64* stride = values ? p.value_stride : p.key_stride;
  return (values ? p.values : p.units) + page * stride[0] + head * stride[1];
}

// The first token of a block, NOWHERE for those that no length reaches.
__device__ __forceinline__ int first_token_of(i64 block) {
  const i64 token = block * BLOCK;
  return token < 0 || token >= NOWHERE - BLOCK ? NOWHERE - BLOCK : (int)token;
}

__device__ __forceinline__ int first_token_of(const AttendParams& p, i64 list, int entry) {
  return first_token_of(p.positions ? (i64)p.positions[list + entry] : (i64)p.first_block + entry);
}

// Tokens that the last row of a sequence sees: from the host, or from a counter that earlier kernels wrote.
__device__ __forceinline__ i64 length_of(const AttendParams& p, int sequence) {
  if (p.length_bytes == 0) return p.length_more;
  const u8* at = p.lengths + (i64)sequence * p.length_stride;
  i64 length;
  if (p.length_bytes == 4) {
    int narrow;
    asm volatile("ld.global.s32 %0, [%1];" : "=r"(narrow) : "l"(at));
    length = narrow;
  } else {
    asm volatile("ld.global.s64 %0, [%1];" : "=l"(length) : "l"(at));
  }
  return length + p.length_more;
}

// Tokens a row sees: start to end (exclusive).
struct Sight {
  int start, end;
};

__device__ __forceinline__ bool is_in(int position, Sight see) { return position >= see.start && position < see.end; }

__device__ __forceinline__ Sight sight_of(const AttendParams& p, i64 length, int row) {
  i64 end = length - (p.rows - 1 - row);
  end = end < 0 ? 0 : end > NOWHERE - 512 ? NOWHERE - 512 : end;
  const i64 start = p.window > 0 && end > p.window ? end - p.window : 0;
  return {(int)start, (int)end};
}

// Tokens of a call's entries that a row sees, if it sees from the first on.
__device__ __forceinline__ int seen_of(const AttendParams& p, i64 length, int row) {
  const i64 seen = sight_of(p, length, row).end - (i64)p.first_block * BLOCK;
  return (int)min((i64)p.entries * BLOCK, max(0ll, seen));
}

#define WIDE_PAIRS 128

#endif

// Output of one element, as finalize writes it.
__device__ __forceinline__ u16 output_of(float weighted, float total) {
  return total == 0.f ? (u16)0 : half_of(__fdiv_rn(weighted, total));
}

// Not left to the compiler to fuse: every kernel writes the same bits.
__device__ __forceinline__ float lse_of(float reference, float total) {
  return __fmul_rn(__fadd_rn(reference, log2f(total)), LN_2);
}

// A row's reference and sum with the sink of its head, and what its weighted sum is multiplied with.
struct End {
  float reference, total, factor;
};

__device__ __forceinline__ End end_of(float reference, float total, const float* sinks, int q) {
  if (!sinks) return {reference, total, 1.f};
  const float sink = sinks[q] * LOG2_E, top = fmaxf(reference, sink), base = top == NOTHING ? 0.f : top;
  const float factor = exp2_of(reference - base);
  return {top, __fmaf_rn(total, factor, exp2_of(sink - base)), factor};
}
