// gather and scatter: any number of scattered units between host slots (mapped memory, or a staging
// ring on the device) and device slots, in one launch.
//
//   gather:  units[device_slots[i]] = blocks[host_slots[i], heads[i]]
//   scatter: blocks[host_slots[i], heads[i]] = units[device_slots[i]]
//
// list [3, n] int32: host slots, heads, device slots. The work is cut in pieces of PIECE bytes, one a
// warp and turn, 16 loads of each lane in flight. A PCIe link of gen 5 needs some 80 KiB in flight (51
// GB/s x 1.5 us), so a small grid suffices and leaves the other multiprocessors to attention. Large
// pieces matter: with 4 loads (2 KiB) units of 64 KiB reached 0.81 to 0.91 of a plain copy from one
// run to the next, with 16 loads 0.91 to 0.92 (H200, 64 MiB, 24 to 66 thread blocks, 2026-11-30).
// CHUNK: 16 where all addresses divide by it, else 2.
// No shared memory. NumPy reference: hsswap.driver.host_ops.gather, .scatter.
#include "common.cuh"

#ifndef CHUNK
#define CHUNK 16
#endif

struct Params {
    u8* blocks;
    u8* units;
    const int* list;
    i64 unit_bytes, block_bytes;
    i64 pieces; // n * pieces_per_unit
    int count, pieces_per_unit;
};

constexpr int WARPS = 8;
constexpr int IN_FLIGHT = 16;
constexpr int PIECE = WARP * IN_FLIGHT * CHUNK;

template <bool TO_DEVICE> __device__ __forceinline__ void move(const Params& p) {
    i64 warp = static_cast<i64>(blockIdx.x) * WARPS + threadIdx.x / WARP;
    i64 warps = static_cast<i64>(gridDim.x) * WARPS;
    for (i64 piece = warp; piece < p.pieces; piece += warps) {
        int i = static_cast<int>(piece / p.pieces_per_unit);
        i64 offset = (piece % p.pieces_per_unit) * PIECE + lane_index() * CHUNK;
        u8* in_block = p.blocks + p.list[i] * p.block_bytes + p.list[p.count + i] * p.unit_bytes;
        u8* in_units = p.units + p.list[2 * p.count + i] * p.unit_bytes;
        const u8* from = TO_DEVICE ? in_block : in_units;
        u8* to = TO_DEVICE ? in_units : in_block;
        Chunk<CHUNK> chunks[IN_FLIGHT];
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++) {
            if (offset + k * WARP * CHUNK < p.unit_bytes) {
                load_chunk(chunks[k], from + offset + k * WARP * CHUNK);
            }
        }
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++) {
            if (offset + k * WARP * CHUNK < p.unit_bytes) {
                store_chunk(to + offset + k * WARP * CHUNK, chunks[k]);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(WARPS* WARP)
    gather(const __grid_constant__ Params p) {
    move<true>(p);
}

extern "C" __global__ void __launch_bounds__(WARPS* WARP)
    scatter(const __grid_constant__ Params p) {
    move<false>(p);
}
