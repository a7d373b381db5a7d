// append: rows of K and V, in an engine's layout, into units of device slots and of host slots.
//
//   unit(block, head).K[token] = keys[row, head, :]      unit: K [T, dk], V [T, dv], aux
//   unit(block, head).V[token] = values[row, head, :]    block, token = divmod(first + row, T)
//
// keys [rows, H, dk] and values [rows, H, dv] BF16, byte strides. device_slots [B, H] and host_slots
// [B] int32, -1: none. Host slots are mapped memory: one launch writes both tiers.
// append_at: the same at token positions, and by tables, in device memory. Row r of sequence s goes to token
// position[s] + r; its unit is slots[s, h, token / T], -2 and below: in place in a host slot, as attention
// reads it. host_slots [S, B], or null, gets it as well. NumPy reference: host_ops.append_at.
//
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

struct AtParams {
    Source keys;
    i64 key_sequence_stride;
    Source values;
    i64 value_sequence_stride;
    u8* units;
    u8* blocks;
    const int* slots;
    const int* host_slots; // null: none
    const u8* positions;
    i64 unit_bytes, block_bytes;
    i64 list_stride, host_list_stride; // elements, from (sequence, head) to the next, from sequence to the next
    i64 pairs;                         // sequences * rows * heads
    int rows, entries, position_stride, position_bytes, heads, block_size, key_bytes, value_bytes;
};

extern "C" __global__ void __launch_bounds__(WARPS* WARP)
    append_at(const __grid_constant__ AtParams p) {
    i64 pair = static_cast<i64>(blockIdx.x) * WARPS + threadIdx.x / WARP;
    if (pair >= p.pairs) {
        return;
    }
    int head = static_cast<int>(pair % p.heads);
    i64 row = pair / p.heads % p.rows, sequence = pair / p.heads / p.rows;
    const u8* at = p.positions + sequence * p.position_stride;
    i64 token = p.position_bytes == 4 ? *reinterpret_cast<const int*>(at) : *reinterpret_cast<const i64*>(at);
    token += row;
    i64 block = token / p.block_size;
    if (token < 0 || block >= p.entries) {
        return;
    }
    token %= p.block_size;
    int slot = p.slots[(sequence * p.heads + head) * p.list_stride + block];
    u8* unit = nullptr;
    if (slot >= 0) {
        unit = p.units + slot * p.unit_bytes;
    } else if (slot < -1) {
        int away = -2 - slot;
        unit = p.blocks + away / p.heads * p.block_bytes + away % p.heads * p.unit_bytes;
    }
    int host_slot = p.host_slots == nullptr ? -1 : p.host_slots[sequence * p.host_list_stride + block];
    u8* host_unit =
        host_slot < 0 ? nullptr : p.blocks + host_slot * p.block_bytes + head * p.unit_bytes;
    if (unit == nullptr && host_unit == nullptr) {
        return;
    }
    Source keys = p.keys, values = p.values;
    keys.memory += sequence * p.key_sequence_stride;
    values.memory += sequence * p.value_sequence_stride;
    copy_row(keys, row, head, p.key_bytes, unit, host_unit, token * p.key_bytes);
    copy_row(values, row, head, p.value_bytes, unit, host_unit,
             static_cast<i64>(p.block_size) * p.key_bytes + token * p.value_bytes);
}
