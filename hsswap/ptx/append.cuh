// Where a row of one head goes: what append and append_at share in every format. A warp finds out for its
// (row, head); -1 in a table and a null pointer here: not there.
#pragma once
#include "common.cuh"

constexpr int WARPS = 8;

struct Source {
    const u8* memory;
    i64 row_stride, head_stride, element_stride; // bytes
};

// key_bytes, value_bytes: of a row of K and of V in a unit.
struct Sizes {
    int heads, block_size, key_bytes, value_bytes;
};

// append: by slots of the blocks that the rows lie in, [B, H] and [B].
struct Target {
    u8* units;
    u8* blocks;
    const int* device_slots;
    const int* host_slots;
    i64 unit_bytes, block_bytes;
    i64 first, pairs; // pairs: rows * heads
    Sizes sizes;
};

// append_at: by tables and positions that the device holds.
struct AtTarget {
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

// Both units null: nowhere.
struct Place {
    u8* unit;
    u8* host_unit;
    i64 sequence, row, token; // token: of its block
    int head;

    __device__ __forceinline__ bool is_nowhere() const { return unit == nullptr && host_unit == nullptr; }
};

__device__ __forceinline__ i64 pair_index() { return static_cast<i64>(blockIdx.x) * WARPS + threadIdx.x / WARP; }

// A head's unit in a host slot.
__device__ __forceinline__ u8* unit_in(u8* blocks, int host_slot, i64 block_bytes, int head, i64 unit_bytes) {
    return host_slot < 0 ? nullptr : blocks + host_slot * block_bytes + head * unit_bytes;
}

__device__ __forceinline__ Place place_of(const Target& to) {
    Place place = {};
    const i64 pair = pair_index();
    if (pair >= to.pairs) {
        return place;
    }
    place.row = pair / to.sizes.heads;
    place.head = static_cast<int>(pair % to.sizes.heads);
    const i64 block = (to.first + place.row) / to.sizes.block_size;
    place.token = (to.first + place.row) % to.sizes.block_size;
    const int slot = to.device_slots[block * to.sizes.heads + place.head];
    place.unit = slot < 0 ? nullptr : to.units + slot * to.unit_bytes;
    place.host_unit = unit_in(to.blocks, to.host_slots[block], to.block_bytes, place.head, to.unit_bytes);
    return place;
}

__device__ __forceinline__ Place place_of(const AtTarget& to) {
    Place place = {};
    const i64 pair = pair_index();
    if (pair >= to.pairs) {
        return place;
    }
    const int heads = to.sizes.heads;
    place.head = static_cast<int>(pair % heads);
    place.row = pair / heads % to.rows;
    place.sequence = pair / heads / to.rows;
    const u8* at = to.positions + place.sequence * to.position_stride;
    i64 token = to.position_bytes == 4 ? *reinterpret_cast<const int*>(at) : *reinterpret_cast<const i64*>(at);
    token += place.row;
    const i64 block = token / to.sizes.block_size;
    if (token < 0 || block >= to.entries) {
        return place;
    }
    place.token = token % to.sizes.block_size;
    const int slot = to.slots[(place.sequence * heads + place.head) * to.list_stride + block];
    if (slot >= 0) {
        place.unit = to.units + slot * to.unit_bytes;
    } else if (slot < -1) { // in place in a host slot
        const int away = -2 - slot;
        place.unit = unit_in(to.blocks, away / heads, to.block_bytes, away % heads, to.unit_bytes);
    }
    if (to.host_slots != nullptr) {
        const int host_slot = to.host_slots[place.sequence * to.host_list_stride + block];
        place.host_unit = unit_in(to.blocks, host_slot, to.block_bytes, place.head, to.unit_bytes);
    }
    return place;
}
