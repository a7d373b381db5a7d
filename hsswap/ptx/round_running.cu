// Whether any sequence of a round goes on, for the IF node in front of it: a sequence runs if it has no flag, and room
// for its pending token or none pending. One warp. NumPy reference: hsswap.driver.host_rounds.is_running.
#include "common.cuh"

constexpr u32 NO_TOKEN = 0xffffffffu;

// Of the CUDA device runtime; the cubin leaves it to the driver's loader.
extern "C" __device__ void cudaGraphSetConditional(u64 handle, u32 value);

struct Params {
    u64 handle;
    const u32* flags;
    const int* pos;
    const u32* pend;
    const int* capacity;
    int sequences;
    int pad;
};

extern "C" __global__ void __launch_bounds__(32) running(const __grid_constant__ Params p) {
    bool runs = false;
    for (int s = lane_index(); s < p.sequences; s += WARP)
        runs |= p.flags[s] == 0 && (p.pend[s] == NO_TOKEN || p.pos[s] < p.capacity[s]);
    const u32 any = __any_sync(ALL, runs);
    if (lane_index() == 0) cudaGraphSetConditional(p.handle, any);
}
