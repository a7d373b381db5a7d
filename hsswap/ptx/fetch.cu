// fetch: the missing units of what select chose, out of host slots, and the lists that attention takes.
//
//   what is computed: hsswap.driver.operations.FetchWork; NumPy reference hsswap.driver.host_select.fetch
//
// Grid: H thread blocks that write a head's lists, then thread blocks that copy; WARPS warps. A warp
// looks at ENTRIES chosen units, one a lane, and copies those that are missing, all its loads in
// flight. Entries next to each other in a head's list go to different warps. CHUNK: 16 where all
// addresses divide by it, else 2. No dynamic shared memory.
#include "common.cuh"

#ifndef CHUNK
#define CHUNK 16
#endif

struct Params {
    u8* units;
    const u8* blocks;
    const int* chosen;       // [H, N]
    const int* chosen_slots; // [H, N]
    const u8* missing;       // [H, N]
    const int* cache_slots;  // [H, C]
    int* owner;              // [H, C]
    const int* tail_slots;   // [H, W]
    int* slots;              // [H, N + W]
    int* positions;          // [H, N + W]
    int* absent;             // [H, N]
    const int* host_slots;   // [B]
    const int* tail_positions; // [W]
    int* absent_count;         // [H]
    i64 chosen_stride, chosen_slots_stride, missing_stride, cache_slots_stride, owner_stride;
    i64 tail_slots_stride, slots_stride, positions_stride, absent_stride; // elements
    i64 unit_bytes, block_bytes;
    int heads, count, tail, places, pad0, pad1;
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
    bool is_mine = lane_index() < ENTRIES && at < p.heads * p.count;
    int head = is_mine ? at / p.count : 0;
    int entry = is_mine ? at % p.count : 0;
    bool is_missing = is_mine && p.missing[head * p.missing_stride + entry] != 0;
    int from = -1;
    int to = 0;
    if (is_missing) {
        from = p.host_slots[p.chosen[head * p.chosen_stride + entry]];
        to = p.chosen_slots[head * p.chosen_slots_stride + entry];
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

// The place that holds `slot` is free again: its unit did not come.
__device__ __forceinline__ void give_up(const Params& p, int head, int slot) {
    for (int place = 0; place < p.places; place++) {
        if (p.cache_slots[head * p.cache_slots_stride + place] == slot) {
            p.owner[head * p.owner_stride + place] = -1;
        }
    }
}

__device__ __forceinline__ void list(const Params& p, int head) {
    __shared__ int counts[WARPS];
    int* slots = p.slots + head * p.slots_stride;
    int* positions = p.positions + head * p.positions_stride;
    int before = 0; // absent ones of earlier turns
    for (int base = 0; base < p.count; base += THREADS) {
        int entry = base + static_cast<int>(threadIdx.x);
        bool is_absent = false;
        int block = 0;
        int slot = 0;
        if (entry < p.count) {
            block = p.chosen[head * p.chosen_stride + entry];
            slot = p.chosen_slots[head * p.chosen_slots_stride + entry];
            is_absent = p.missing[head * p.missing_stride + entry] != 0 && p.host_slots[block] < 0;
            slots[entry] = is_absent ? -1 : slot;
            positions[entry] = block;
        }
        u32 found = __ballot_sync(ALL, is_absent);
        if (lane_index() == 0) {
            counts[threadIdx.x / WARP] = __popc(found);
        }
        __syncthreads();
        int here = before;
        for (int warp = 0; warp < WARPS; warp++) {
            here += warp < static_cast<int>(threadIdx.x) / WARP ? counts[warp] : 0;
            before += counts[warp];
        }
        if (is_absent) {
            p.absent[head * p.absent_stride + here + __popc(found & ((1u << lane_index()) - 1))] = block;
            give_up(p, head, slot);
        }
        __syncthreads(); // counts may be written again
    }
    for (int entry = threadIdx.x; entry < p.tail; entry += THREADS) {
        slots[p.count + entry] = p.tail_slots[head * p.tail_slots_stride + entry];
        positions[p.count + entry] = p.tail_positions[entry];
    }
    if (threadIdx.x == 0) {
        p.absent_count[head] = before;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) fetch(const __grid_constant__ Params p) {
    follow();
    if (static_cast<int>(blockIdx.x) < p.heads) {
        list(p, blockIdx.x);
    } else {
        copy_missing(p);
    }
}
