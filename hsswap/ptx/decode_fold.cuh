// A left fold of parts, as one thread does it.
#pragma once

// One element being folded, and the reference and sum beside it.
struct Folded {
  float o, reference, sum;
};

// The next eight parts: their elements, references and sums. All weights first: only the additions wait for each other.
__device__ __forceinline__ void fold_eight(Folded& f, const float (&x)[8], const float2 (&s)[8]) {
  float old[8];
#pragma unroll
  for (int i = 0; i < 8; i++) {
    old[i] = f.reference;
    f.reference = fmaxf(f.reference, s[i].x);
  }
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const Weights w = fold_weights(&old[i], s[i].x);
    const bool empty = is_empty(s[i].x, s[i].y);
    f.o = empty ? f.o : fold(f.o, x[i], w);
    f.sum = empty ? f.sum : fold(f.sum, s[i].y, w);
  }
}
