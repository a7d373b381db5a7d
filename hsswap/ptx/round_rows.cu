// The likeliest token of each row of logits, and its probability. Grid: (parts, rows); the last thread block of a row
// folds its parts, so that one long row does not wait for one multiprocessor. NumPy: hsswap.driver.host_rounds.argmax.
#include "common.cuh"
#include "round_rows.cuh"

struct Params {
    const float* logits;
    u32* tokens;
    float* probabilities;  // or null
    u32* flags;            // or null
    Best* partial;         // [rows, parts]
    u32* arrived;          // [rows], zero before and after
    i64 vocab;
    i64 part;  // logits of a part
    int rows;  // of a sequence
    int pad;
};

extern "C" __global__ void __launch_bounds__(ROW_THREADS) argmax(const __grid_constant__ Params p) {
    __shared__ Best memory[ROW_THREADS / WARP];
    __shared__ bool is_last;
    const i64 row = blockIdx.y, first = blockIdx.x * p.part, end = min(p.vocab, first + p.part);
    const float* logits = p.logits + row * p.vocab;
    Best best = none();
    for (i64 v = first + threadIdx.x; v < end; v += ROW_THREADS) take(best, logits[v], static_cast<u32>(v));
    best = fold_block(best, memory);
    if (threadIdx.x == 0) {
        is_last = true;
        if (gridDim.x > 1) {
            p.partial[row * gridDim.x + blockIdx.x] = best;
            __threadfence();
            is_last = atomicAdd(p.arrived + row, 1u) == gridDim.x - 1;
        }
    }
    __syncthreads();
    if (!is_last || threadIdx.x) return;
    if (gridDim.x > 1) {
        __threadfence();
        best = none();
        for (int i = 0; i < static_cast<int>(gridDim.x); i++) {
            const volatile Best* part = p.partial + row * gridDim.x + i;
            best = fold(best, {part->value, part->sum, part->token});
        }
        p.arrived[row] = 0;
    }
    p.tokens[row] = best.token;
    if (p.probabilities) p.probabilities[row] = is_finite(best.value) ? 1.f / best.sum : 0.f;
    if (p.flags && best.token == NO_TOKEN) atomicOr(p.flags + row / p.rows, BAD_TOKEN);
}
