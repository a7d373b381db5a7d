// fetch: the missing units of what select chose, out of host slots, and the lists that attention takes.
//
//   what is computed: hsswap.driver.operations.FetchWork; NumPy reference hsswap.driver.host_select.fetch
//
// Grid: H thread blocks that write a head's lists, then thread blocks that copy; WARPS warps. A warp
// looks at ENTRIES chosen units, one a lane, and copies those that are missing, all its loads in
// flight. Entries next to each other in a head's list go to different warps. CHUNK: 16 where all
// addresses divide by it, else 2. No dynamic shared memory.
#include "fetch_lists.cuh"

#ifndef CHUNK
#define CHUNK 16
#endif

struct Params {
    FetchLists lists;
    u8* units;
    const u8* blocks;
    int* slots;     // [H, N + W]
    int* positions; // [H, N + W]
    i64 slots_stride, positions_stride; // elements
    i64 unit_bytes, block_bytes;
    int heads, pad;
};

constexpr int WARPS = 4;
constexpr int THREADS = WARPS * WARP;
constexpr int ENTRIES = 8;
constexpr int IN_FLIGHT = 16;

// A unit, by a warp.
__device__ __forceinline__ void copy_unit(u8* to, const u8* from, int bytes) {
    for (int base = lane_index() * CHUNK; base < bytes; base += WARP * IN_FLIGHT * CHUNK) {
        Chunk<CHUNK> chunks[IN_FLIGHT];
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++) {
            if (base + k * WARP * CHUNK < bytes) {
                load_chunk(chunks[k], from + base + k * WARP * CHUNK);
            }
        }
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++) {
            if (base + k * WARP * CHUNK < bytes) {
                store_chunk(to + base + k * WARP * CHUNK, chunks[k]);
            }
        }
    }
}

__device__ __forceinline__ void copy_missing(const Params& p) {
    int warp = (blockIdx.x - p.heads) * WARPS + threadIdx.x / WARP;
    int warps = (gridDim.x - p.heads) * WARPS;
    int at = lane_index() * warps + warp; // of the H * N entries
    const FetchLists& f = p.lists;
    bool is_mine = lane_index() < ENTRIES && at < p.heads * f.count;
    int head = is_mine ? at / f.count : 0;
    int entry = is_mine ? at % f.count : 0;
    bool is_missing = is_mine && f.missing[head * f.missing_stride + entry] != 0;
    int from = -1;
    int to = 0;
    if (is_missing) {
        from = f.host_slots[f.chosen[head * f.chosen_stride + entry]];
        to = f.chosen_slots[head * f.chosen_slots_stride + entry];
    }
    for (u32 left = __ballot_sync(ALL, from >= 0); left != 0; left &= left - 1) {
        int lane = __ffs(left) - 1;
        i64 unit = __shfl_sync(ALL, to, lane);
        i64 block = __shfl_sync(ALL, from, lane);
        i64 in_block = __shfl_sync(ALL, head, lane);
        copy_unit(p.units + unit * p.unit_bytes,
                  p.blocks + block * p.block_bytes + in_block * p.unit_bytes,
                  static_cast<int>(p.unit_bytes));
    }
}

// What attention takes of a head.
__device__ __forceinline__ void list(const Params& p, int head) {
    const FetchLists& f = p.lists;
    int* slots = p.slots + head * p.slots_stride;
    int* positions = p.positions + head * p.positions_stride;
    for (int entry = threadIdx.x; entry < f.count; entry += THREADS) {
        int slot = f.chosen_slots[head * f.chosen_slots_stride + entry];
        slots[entry] = is_absent(f, head, entry) ? -1 : slot;
        positions[entry] = f.chosen[head * f.chosen_stride + entry];
    }
    for (int entry = threadIdx.x; entry < f.tail; entry += THREADS) {
        slots[f.count + entry] = f.tail_slots[head * f.tail_slots_stride + entry];
        positions[f.count + entry] = f.tail_positions[entry];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) fetch(const __grid_constant__ Params p) {
    follow();
    if (static_cast<int>(blockIdx.x) < p.heads) {
        list(p, blockIdx.x);
        if (threadIdx.x < WARP) {
            list_absent(p.lists, blockIdx.x);
        }
    } else {
        copy_missing(p);
    }
}
