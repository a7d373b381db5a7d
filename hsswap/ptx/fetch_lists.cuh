// What select chose, and which of it is missing or absent: for fetch and for attention that fetches.
//
//   what is computed: hsswap.driver.operations.FetchWork; NumPy reference hsswap.driver.host_select.fetch
#pragma once

#include "common.cuh"

struct FetchLists {
    const int* chosen;         // [H, N]
    const int* chosen_slots;   // [H, N]
    const u8* missing;         // [H, N]
    const int* cache_slots;    // [H, C]
    int* owner;                // [H, C]
    const int* tail_slots;     // [H, W]
    int* absent;               // [H, N]
    const int* host_slots;     // [B]
    const int* tail_positions; // [W]
    int* absent_count;         // [H]
    // Elements from head to head.
    i64 chosen_stride, chosen_slots_stride, missing_stride, cache_slots_stride, owner_stride;
    i64 tail_slots_stride, absent_stride;
    int count, tail, places, blocks;
    int pad;
    int early; // attention may begin before select has ended: entries are there once they are not UNTOLD
};

__device__ __forceinline__ bool is_absent(const FetchLists& f, int head, int entry) {
    return f.missing[head * f.missing_stride + entry] != 0 &&
           f.host_slots[f.chosen[head * f.chosen_stride + entry]] < 0;
}

// By a warp: a head's absent blocks in ascending order. Their places in the cache are free again, since
// their units did not come.
__device__ __forceinline__ void list_absent(const FetchLists& f, int head) {
    int thread = lane_index();
    bool any = false;
#pragma unroll 4
    for (int entry = thread; entry < f.count; entry += WARP) {
        any |= is_absent(f, head, entry);
    }
    if (!__any_sync(ALL, any)) {
        if (thread == 0) {
            f.absent_count[head] = 0;
        }
        return;
    }
    int before = 0;
    for (int base = 0; base < f.count; base += WARP) {
        int entry = base + thread;
        bool absent = entry < f.count && is_absent(f, head, entry);
        u32 found = __ballot_sync(ALL, absent);
        if (absent) {
            int here = before + __popc(found & ((1u << thread) - 1));
            f.absent[head * f.absent_stride + here] = f.chosen[head * f.chosen_stride + entry];
            int slot = f.chosen_slots[head * f.chosen_slots_stride + entry];
            for (int place = 0; place < f.places; place++) {
                if (f.cache_slots[head * f.cache_slots_stride + place] == slot) {
                    f.owner[head * f.owner_stride + place] = -1;
                }
            }
        }
        before += __popc(found);
    }
    if (thread == 0) {
        f.absent_count[head] = before;
    }
}
