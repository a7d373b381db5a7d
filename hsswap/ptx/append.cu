// append: rows of K and V, in an engine's layout, into units of device slots and of host slots.
//
//   unit(block, head).K[token] = keys[row, head, :]      unit: K [T, dk], V [T, dv], aux
//   unit(block, head).V[token] = values[row, head, :]    block, token = divmod(first + row, T)
//
// keys [rows, H, dk] and values [rows, H, dv] BF16, byte strides. device_slots [B, H] and host_slots
// [B] int32, -1: none. Host slots are mapped memory: one launch writes both tiers.
// Grid: one warp a (row, head), WARPS warps a block. CHUNK: 16 where every address and stride
// divides by it, else 2. No shared memory. NumPy reference: hsswap.driver.host_ops.append.
#include "common.cuh"

#ifndef CHUNK
#define CHUNK 16
#endif

struct Source {
    const u8* memory;
    i64 row_stride, head_stride, element_stride; // bytes
};

struct Params {
    Source keys, values;
    u8* units;
    u8* blocks;
    const int* device_slots;
    const int* host_slots;
    i64 unit_bytes, block_bytes;
    i64 first, pairs; // pairs: rows * heads
    int heads, block_size, key_bytes, value_bytes;
};

constexpr int WARPS = 8;

// One row of one head: row_bytes bytes, to both places (null: not there).
__device__ __forceinline__ void copy_row(const Source& source, i64 row, int head, int row_bytes,
                                         u8* unit, u8* host_unit, i64 offset) {
    const u8* from = source.memory + row * source.row_stride + head * source.head_stride;
    for (int at = lane_index() * CHUNK; at < row_bytes; at += WARP * CHUNK) {
        Chunk<CHUNK> chunk;
        // With CHUNK 16 elements are adjacent (the launch checks it).
        load_chunk(chunk, CHUNK == 2 ? from + (at / 2) * source.element_stride : from + at);
        if (unit != nullptr) {
            store_chunk(unit + offset + at, chunk);
        }
        if (host_unit != nullptr) {
            store_chunk(host_unit + offset + at, chunk);
        }
    }
}

extern "C" __global__ void __launch_bounds__(WARPS* WARP)
    append(const __grid_constant__ Params p) {
    i64 pair = static_cast<i64>(blockIdx.x) * WARPS + threadIdx.x / WARP;
    if (pair >= p.pairs) {
        return;
    }
    i64 row = pair / p.heads;
    int head = static_cast<int>(pair % p.heads);
    i64 block = (p.first + row) / p.block_size;
    i64 token = (p.first + row) % p.block_size;
    int slot = p.device_slots[block * p.heads + head];
    int host_slot = p.host_slots[block];
    u8* unit = slot < 0 ? nullptr : p.units + slot * p.unit_bytes;
    u8* host_unit =
        host_slot < 0 ? nullptr : p.blocks + host_slot * p.block_bytes + head * p.unit_bytes;
    if (unit == nullptr && host_unit == nullptr) {
        return;
    }
    copy_row(p.keys, row, head, p.key_bytes, unit, host_unit, token * p.key_bytes);
    copy_row(p.values, row, head, p.value_bytes, unit, host_unit,
             static_cast<i64>(p.block_size) * p.key_bytes + token * p.value_bytes);
}
