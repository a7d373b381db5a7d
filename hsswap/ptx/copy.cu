// copy_words: target[i] = source[i] + plus, words of 32 bits. Either may be mapped memory; they may be one.
// Grid: threads take words in turn. NumPy reference: hsswap.driver.host_rounds.copy.
#include "common.cuh"

struct Params {
    const u32* source;
    u32* target;
    i64 words;
    u32 plus;
    int pad;
};

extern "C" __global__ void __launch_bounds__(256) copy_words(const __grid_constant__ Params p) {
    follow();
    i64 threads = static_cast<i64>(gridDim.x) * blockDim.x;
    for (i64 at = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; at < p.words; at += threads) {
        p.target[at] = p.source[at] + p.plus;
    }
}
