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
#include "append.cuh"

#ifndef CHUNK
#define CHUNK 16
#endif

// One row of one head: row_bytes bytes, to both units.
__device__ __forceinline__ void copy_row(const Source& source, const Place& to, int row_bytes, i64 offset) {
    const u8* from = source.memory + to.row * source.row_stride + to.head * source.head_stride;
    for (int at = lane_index() * CHUNK; at < row_bytes; at += WARP * CHUNK) {
        Chunk<CHUNK> chunk;
        // With CHUNK 16 elements are adjacent (the launch checks it).
        load_chunk(chunk, CHUNK == 2 ? from + (at / 2) * source.element_stride : from + at);
        if (to.unit != nullptr) {
            store_chunk(to.unit + offset + at, chunk);
        }
        if (to.host_unit != nullptr) {
            store_chunk(to.host_unit + offset + at, chunk);
        }
    }
}

__device__ __forceinline__ void copy_rows(const Source& keys, const Source& values, const Place& to,
                                          const Sizes& sizes) {
    copy_row(keys, to, sizes.key_bytes, to.token * sizes.key_bytes);
    copy_row(values, to, sizes.value_bytes,
             static_cast<i64>(sizes.block_size) * sizes.key_bytes + to.token * sizes.value_bytes);
}

struct Params {
    Source keys, values;
    Target to;
};

extern "C" __global__ void __launch_bounds__(WARPS* WARP)
    append(const __grid_constant__ Params p) {
    const Place place = place_of(p.to);
    if (place.is_nowhere()) {
        return;
    }
    copy_rows(p.keys, p.values, place, p.to.sizes);
}

struct AtParams {
    Source keys;
    i64 key_sequence_stride;
    Source values;
    i64 value_sequence_stride;
    AtTarget to;
};

extern "C" __global__ void __launch_bounds__(WARPS* WARP)
    append_at(const __grid_constant__ AtParams p) {
    const Place place = place_of(p.to);
    if (place.is_nowhere()) {
        return;
    }
    Source keys = p.keys, values = p.values;
    keys.memory += place.sequence * p.key_sequence_stride;
    values.memory += place.sequence * p.value_sequence_stride;
    copy_rows(keys, values, place, p.to.sizes);
}
