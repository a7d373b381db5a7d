// Where attend_tile's rows come from and go to.
#pragma once

__device__ __forceinline__ void clear(Rows& rows, float (&o)[DV_PAD / 8][4]) {
#pragma unroll
  for (int y = 0; y < 2; y++) {
    rows.reference[y] = NOTHING;
    rows.sum[y] = 0.f;
  }
#pragma unroll
  for (int n = 0; n < DV_PAD / 8; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) o[n][i] = 0.f;
}

// Where a pair of a tile lies in the state.
__device__ __forceinline__ i64 state_row(const AttendParams& p, int pair) {
  const int sequence = blockIdx.y / KV_HEADS, head = blockIdx.y % KV_HEADS;
  return ((i64)sequence * p.rows + pair / GROUP) * Q_HEADS + head * GROUP + pair % GROUP;
}

// Parts and state of rows that see nothing.
__device__ __noinline__ void write_nothing(const AttendParams& p, const Tile& tile, int pair0, int first_span,
                                           int last_span) {
  for (int m = threadIdx.x; m < tile.pairs; m += THREADS) {
    const i64 at = state_row(p, pair0 + m);
    if (gridDim.z > 1) {
      for (int span = first_span; span < last_span; span++)
        p.partial_sums[at * p.parts + span] = make_float2(NOTHING, 0.f);
    } else if (p.begin) {
      p.maximum[at] = NOTHING;
      p.total[at] = 0.f;
      for (int d = 0; d < VALUE_DIM; d++) p.weighted[at * VALUE_DIM + d] = 0.f;
    }
  }
}

// The end of the attention for a tile whose state is in memory.
__device__ __noinline__ void write_outputs(const AttendParams& p, const Tile& tile, int pair0) {
  const int sequence = blockIdx.y / KV_HEADS, head = blockIdx.y % KV_HEADS;
  __syncthreads();
  for (int i = threadIdx.x; i < tile.pairs * VALUE_DIM; i += THREADS) {
    const int pair = pair0 + i / VALUE_DIM, d = i % VALUE_DIM, q = head * GROUP + pair % GROUP;
    const i64 at = state_row(p, pair);
    const End end = end_of(p.maximum[at], p.total[at], p.sinks, q);
    u16* out = p.out + sequence * p.out_stride[0] + pair / GROUP * p.out_stride[1] + q * p.out_stride[2];
    out[d * p.out_stride[3]] = output_of(p.weighted[at * VALUE_DIM + d] * end.factor, end.total);
    if (p.lse && d == 0) p.lse[at] = lse_of(end.reference, end.total);
  }
}

// A span is done: into the state, or to the parts. Leaves the rows empty.
__device__ __forceinline__ void flush(const AttendParams& p, const Tile& tile, Rows& rows, float (&o)[DV_PAD / 8][4],
                                      int pair0, int span, bool fresh) {
  const int lane = threadIdx.x & 31, c = lane & 3;
#pragma unroll
  for (int y = 0; y < 2; y++) {
    const int m = (threadIdx.x >> 5) * 16 + (lane >> 2) + y * 8;
    const i64 at = state_row(p, pair0 + m);
    const bool valid = m < tile.pairs, empty = is_empty(rows.reference[y], rows.sum[y]);
    if (gridDim.z > 1) {
      const i64 part = at * p.parts + span;
      if (valid && c == 0) p.partial_sums[part] = make_float2(rows.reference[y], rows.sum[y]);
      if (valid && !empty) {
#pragma unroll
        for (int n = 0; n < VALUE_DIM / 8; n++)
          *(float2*)(p.partial + part * VALUE_DIM + n * 8 + 2 * c) = make_float2(o[n][2 * y], o[n][2 * y + 1]);
      }
      continue;
    }
    float reference = NOTHING, sum = 0.f;
    if (valid && !fresh) {
      reference = p.maximum[at];
      sum = p.total[at];
    }
    Weights w = {1.f, 0.f};
    if (!empty) w = fold_weights(&reference, rows.reference[y]);
    __syncwarp();  // all four lanes of a row have read
    if (valid && (fresh || !empty)) {
      if (c == 0) {
        p.maximum[at] = reference;
        p.total[at] = empty ? sum : fold(sum, rows.sum[y], w);
      }
      // All loads before the first store: they are in flight together.
      float2* to = (float2*)(p.weighted + at * VALUE_DIM) + c;
      float2 x[VALUE_DIM / 8];
      if (fresh) {
#pragma unroll
        for (int n = 0; n < VALUE_DIM / 8; n++) x[n] = make_float2(0.f, 0.f);
      } else {
#pragma unroll
        for (int n = 0; n < VALUE_DIM / 8; n++) x[n] = to[n * 4];
      }
      if (!empty) {
#pragma unroll
        for (int n = 0; n < VALUE_DIM / 8; n++)
          x[n] = make_float2(fold(x[n].x, o[n][2 * y], w), fold(x[n].y, o[n][2 * y + 1], w));
      }
#pragma unroll
      for (int n = 0; n < VALUE_DIM / 8; n++) to[n * 4] = x[n];
    }
  }
  clear(rows, o);
}

#if !E4M3
__device__ __forceinline__ void load_queries(const AttendParams& p, const Shared& sh, const Tile& tile, int pair0,
                                             int sequence, int head) {
  const bool whole = p.query_stride[3] == 1 && ((u64)p.queries | 2 * (u64)(p.query_stride[0] | p.query_stride[1] | p.query_stride[2])) % 16 == 0;
#pragma unroll 4
  for (int i = threadIdx.x; i < TILE * (DK_PAD / 8); i += THREADS) {
    const int m = i / (DK_PAD / 8), chunk = i % (DK_PAD / 8), pair = pair0 + m;
    uint4 x = make_uint4(0, 0, 0, 0);
    if (m < tile.pairs && chunk * 8 < HEAD_DIM) {
      const u16* from = p.queries + sequence * p.query_stride[0] + (pair / GROUP) * p.query_stride[1] +
                        (head * GROUP + pair % GROUP) * p.query_stride[2] + chunk * 8 * p.query_stride[3];
      if (whole) {
        x = *(const uint4*)from;
      } else {
        u16 e[8];
        for (int d = 0; d < 8; d++) e[d] = from[d * p.query_stride[3]];
        x = make_uint4(e[0] | (u32)e[1] << 16, e[2] | (u32)e[3] << 16, e[4] | (u32)e[5] << 16, e[6] | (u32)e[7] << 16);
      }
    }
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(sh.q + m * K_ROW + chunk * 16), "r"(x.x), "r"(x.y), "r"(x.z),
                 "r"(x.w)
                 : "memory");
  }
}
#endif
