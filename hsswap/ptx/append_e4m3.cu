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
#include "append.cuh"
#include "e4m3.cuh"

struct Scales {
    const u8* memory; // null: rows are rounded here
    i64 row_stride, head_stride;
};

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

// A row of one head to both units: codes at one offset of the unit, the scale at another.
__device__ __forceinline__ void keep_row(const Source& source, const Scales& scales, const Place& to, int dim,
                                         i64 codes_at, i64 scale_at) {
    const u8* from = source.memory + to.row * source.row_stride + to.head * source.head_stride;
    Row kept;
    if (scales.memory != nullptr) {
        const u8* scale = scales.memory + to.row * scales.row_stride + to.head * scales.head_stride;
        kept = load_codes(from, source.element_stride, scale, dim);
    } else {
        kept = round_row(from, source.element_stride, dim);
    }
    int first = lane_index() * DIMS;
#pragma unroll
    for (int place = 0; place < 2; place++) {
        u8* unit = place == 0 ? to.unit : to.host_unit;
        if (unit != nullptr && first < dim) {
            *reinterpret_cast<u64*>(unit + codes_at + first) = kept.codes;
        }
        if (unit != nullptr && first == 0) {
            *reinterpret_cast<float*>(unit + scale_at) = kept.scale;
        }
    }
}

struct Sources {
    Source keys, values;
    Scales key_scales, value_scales;
};

// K and V of one row and head. A code is a byte, so that a row has as many dims.
__device__ __forceinline__ void keep(const Sources& from, const Place& to, const Sizes& sizes) {
    i64 values = static_cast<i64>(sizes.block_size) * sizes.key_bytes;
    i64 scales = values + static_cast<i64>(sizes.block_size) * sizes.value_bytes;
    keep_row(from.keys, from.key_scales, to, sizes.key_bytes, to.token * sizes.key_bytes, scales + to.token * 4);
    keep_row(from.values, from.value_scales, to, sizes.value_bytes, values + to.token * sizes.value_bytes,
             scales + (sizes.block_size + to.token) * 4);
}

struct Params {
    Sources from;
    Target to;
};

extern "C" __global__ void __launch_bounds__(WARPS* WARP)
    append_e4m3(const __grid_constant__ Params p) {
    const Place place = place_of(p.to);
    if (place.is_nowhere()) {
        return;
    }
    keep(p.from, place, p.to.sizes);
}

struct AtParams {
    Sources from;
    i64 key_sequence_stride, value_sequence_stride, key_scale_sequence_stride, value_scale_sequence_stride;
    AtTarget to;
};

extern "C" __global__ void __launch_bounds__(WARPS* WARP)
    append_at_e4m3(const __grid_constant__ AtParams p) {
    const Place place = place_of(p.to);
    if (place.is_nowhere()) {
        return;
    }
    Sources from = p.from;
    from.keys.memory += place.sequence * p.key_sequence_stride;
    from.values.memory += place.sequence * p.value_sequence_stride;
    if (from.key_scales.memory != nullptr) {
        from.key_scales.memory += place.sequence * p.key_scale_sequence_stride;
        from.value_scales.memory += place.sequence * p.value_scale_sequence_stride;
    }
    keep(from, place, p.to.sizes);
}
