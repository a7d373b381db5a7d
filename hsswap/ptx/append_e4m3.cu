// append_e4m3, append_at_e4m3: append and append_at (append.cu) into units of E4M3.
//
//   unit: K [T, dk], V [T, dv] codes, then float32 scales of K [T] and of V [T], aux
//
// keys [rows, H, dk] and values [rows, H, dv] are BF16 or FP16 (FP16 1), which are rounded here as
// hsswap/e4m3.py says, or E4M3 where scales [rows, H] are given, which are kept as they are. Byte
// strides. Units lie on 8 bytes.
//
// Grid: one warp a (row, head), WARPS warps a block; a lane has 8 dims. No shared memory.
// NumPy reference: hsswap.driver.host_ops.append and append_at.
#include "e4m3.cuh"

struct Source {
    const u8* memory;
    i64 row_stride, head_stride, element_stride; // bytes
};

struct Scales {
    const u8* memory; // null: rows are rounded here
    i64 row_stride, head_stride;
};

constexpr int WARPS = 8;
constexpr int DIMS = 8; // of a lane

struct Row {
    u64 codes;
    float scale;
};

// This lane's codes of a row, and the row's scale.
__device__ __forceinline__ Row load_codes(const u8* from, i64 element_stride, const u8* scale, int dim) {
    Row row = {0, *reinterpret_cast<const float*>(scale)};
    int first = lane_index() * DIMS;
    for (int k = 0; first < dim && k < DIMS; k++) {
        row.codes |= static_cast<u64>(from[(first + k) * element_stride]) << (8 * k);
    }
    return row;
}

__device__ __forceinline__ Row round_row(const u8* from, i64 element_stride, int dim) {
    float values[DIMS] = {};
    int first = lane_index() * DIMS;
    if (first < dim) {
        if (element_stride == 2 && reinterpret_cast<u64>(from) % 16 == 0) {
            Chunk<16> chunk;
            load_chunk(chunk, from + first * 2);
            u32 pairs[4] = {chunk.a, chunk.b, chunk.c, chunk.d};
#pragma unroll
            for (int k = 0; k < DIMS; k++) {
                values[k] = half_to_float(static_cast<u16>(pairs[k / 2] >> (k % 2 * 16)));
            }
        } else {
#pragma unroll
            for (int k = 0; k < DIMS; k++) {
                values[k] = half_to_float(*reinterpret_cast<const u16*>(from + (first + k) * element_stride));
            }
        }
    }
    u32 largest = 0;
#pragma unroll
    for (int k = 0; k < DIMS; k++) {
        u32 bits = __float_as_uint(values[k]) & 0x7fffffffu;
        largest = max(largest, bits < 0x7f800000u ? bits : 0u);
    }
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) {
        largest = max(largest, __shfl_xor_sync(ALL, largest, step));
    }
    Row row = {0, scale_by(__uint_as_float(largest))};
#pragma unroll
    for (int k = 0; k < DIMS; k++) {
        row.codes |= static_cast<u64>(float_to_e4m3(__fdiv_rn(values[k], row.scale))) << (8 * k);
    }
    return row;
}

// A row of one head to both places (null: not there): codes at one offset of the unit, the scale at another.
__device__ __forceinline__ void keep_row(const Source& source, const Scales& scales, i64 row, int head, int dim,
                                         u8* unit, u8* host_unit, i64 codes_at, i64 scale_at) {
    const u8* from = source.memory + row * source.row_stride + head * source.head_stride;
    Row kept;
    if (scales.memory != nullptr) {
        const u8* scale = scales.memory + row * scales.row_stride + head * scales.head_stride;
        kept = load_codes(from, source.element_stride, scale, dim);
    } else {
        kept = round_row(from, source.element_stride, dim);
    }
    int first = lane_index() * DIMS;
#pragma unroll
    for (int place = 0; place < 2; place++) {
        u8* to = place == 0 ? unit : host_unit;
        if (to != nullptr && first < dim) {
            *reinterpret_cast<u64*>(to + codes_at + first) = kept.codes;
        }
        if (to != nullptr && first == 0) {
            *reinterpret_cast<float*>(to + scale_at) = kept.scale;
        }
    }
}

struct Sizes {
    int heads, block_size, head_dim, value_dim;
};

struct Sources {
    Source keys, values;
    Scales key_scales, value_scales;
};

// K and V of one row and head to token `token` of its units.
__device__ __forceinline__ void keep(const Sources& from, const Sizes& sizes, i64 row, int head, u8* unit,
                                     u8* host_unit, i64 token) {
    if (unit == nullptr && host_unit == nullptr) {
        return;
    }
    i64 values = static_cast<i64>(sizes.block_size) * sizes.head_dim;
    i64 scales = values + static_cast<i64>(sizes.block_size) * sizes.value_dim;
    keep_row(from.keys, from.key_scales, row, head, sizes.head_dim, unit, host_unit, token * sizes.head_dim,
             scales + token * 4);
    keep_row(from.values, from.value_scales, row, head, sizes.value_dim, unit, host_unit,
             values + token * sizes.value_dim, scales + (sizes.block_size + token) * 4);
}

struct Params {
    Sources from;
    u8* units;
    u8* blocks;
    const int* device_slots;
    const int* host_slots;
    i64 unit_bytes, block_bytes;
    i64 first, pairs; // pairs: rows * heads
    Sizes sizes;
};

extern "C" __global__ void __launch_bounds__(WARPS* WARP)
    append_e4m3(const __grid_constant__ Params p) {
    i64 pair = static_cast<i64>(blockIdx.x) * WARPS + threadIdx.x / WARP;
    if (pair >= p.pairs) {
        return;
    }
    int heads = p.sizes.heads, head = static_cast<int>(pair % heads);
    i64 row = pair / heads;
    i64 block = (p.first + row) / p.sizes.block_size, token = (p.first + row) % p.sizes.block_size;
    int slot = p.device_slots[block * heads + head];
    int host_slot = p.host_slots[block];
    u8* unit = slot < 0 ? nullptr : p.units + slot * p.unit_bytes;
    u8* host_unit = host_slot < 0 ? nullptr : p.blocks + host_slot * p.block_bytes + head * p.unit_bytes;
    keep(p.from, p.sizes, row, head, unit, host_unit, token);
}

struct AtParams {
    Sources from;
    i64 key_sequence_stride, value_sequence_stride, key_scale_sequence_stride, value_scale_sequence_stride;
    u8* units;
    u8* blocks;
    const int* slots;
    const int* host_slots; // null: none
    const u8* positions;
    i64 unit_bytes, block_bytes;
    i64 list_stride, host_list_stride; // elements, from (sequence, head) to the next, from sequence to the next
    i64 pairs;                         // sequences * rows * heads
    int rows, entries, position_stride, position_bytes;
    Sizes sizes;
};

extern "C" __global__ void __launch_bounds__(WARPS* WARP)
    append_at_e4m3(const __grid_constant__ AtParams p) {
    i64 pair = static_cast<i64>(blockIdx.x) * WARPS + threadIdx.x / WARP;
    if (pair >= p.pairs) {
        return;
    }
    int heads = p.sizes.heads, head = static_cast<int>(pair % heads);
    i64 row = pair / heads % p.rows, sequence = pair / heads / p.rows;
    const u8* at = p.positions + sequence * p.position_stride;
    i64 token = p.position_bytes == 4 ? *reinterpret_cast<const int*>(at) : *reinterpret_cast<const i64*>(at);
    token += row;
    i64 block = token / p.sizes.block_size;
    if (token < 0 || block >= p.entries) {
        return;
    }
    int slot = p.slots[(sequence * heads + head) * p.list_stride + block];
    u8* unit = nullptr;
    if (slot >= 0) {
        unit = p.units + slot * p.unit_bytes;
    } else if (slot < -1) {
        int away = -2 - slot;
        unit = p.blocks + away / heads * p.block_bytes + away % heads * p.unit_bytes;
    }
    int host_slot = p.host_slots == nullptr ? -1 : p.host_slots[sequence * p.host_list_stride + block];
    u8* host_unit = host_slot < 0 ? nullptr : p.blocks + host_slot * p.block_bytes + head * p.unit_bytes;
    Sources from = p.from;
    from.keys.memory += sequence * p.key_sequence_stride;
    from.values.memory += sequence * p.value_sequence_stride;
    if (from.key_scales.memory != nullptr) {
        from.key_scales.memory += sequence * p.key_scale_sequence_stride;
        from.value_scales.memory += sequence * p.value_scale_sequence_stride;
    }
    keep(from, p.sizes, row, head, unit, host_unit, token % p.sizes.block_size);
}
