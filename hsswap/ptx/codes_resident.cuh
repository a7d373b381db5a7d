// Exact logits of blocks whose keys are in device slots, for both kernels of the blocks' masses.
//
// Items of a head: its pinned blocks, then the block being filled. Thread block x of a head takes items x, x + gridDim.x
// and so on, ITEMS at a time, a warp a token. The logsumexp of a pinned block that the cache holds becomes its mass; that
// and the filled block's are part of the sum of everything. Keys that give NaN count as nothing. Keys of E4M3 (E4M3 1)
// have scales at byte scales_at of a unit. CHUNK: 16 where keys in units divide by it.
#pragma once
#include "codes_mass.cuh"

constexpr int ITEMS = 4;

// Four elements of a key, without its scale.
struct FourDims {
#if E4M3
    u32 codes;
    __device__ __forceinline__ void load(const u8* unit, int at) { codes = *reinterpret_cast<const u32*>(unit + at); }
    __device__ __forceinline__ float4 wide() const {
        u32 low = e4m3_to_f16x2(static_cast<u16>(codes)), high = e4m3_to_f16x2(static_cast<u16>(codes >> 16));
        return make_float4(key_to_float(static_cast<u16>(low)), key_to_float(static_cast<u16>(low >> 16)),
                           key_to_float(static_cast<u16>(high)), key_to_float(static_cast<u16>(high >> 16)));
    }
#else
    u32 low, high;
    __device__ __forceinline__ void load(const u8* unit, int at) {
        const u16* from = reinterpret_cast<const u16*>(unit) + at;
        if constexpr (CHUNK == 16) {
            uint2 both = *reinterpret_cast<const uint2*>(from);
            low = both.x;
            high = both.y;
        } else {
            low = from[0] | static_cast<u32>(from[1]) << 16;
            high = from[2] | static_cast<u32>(from[3]) << 16;
        }
    }
    __device__ __forceinline__ float4 wide() const {
        return make_float4(half_to_float(static_cast<u16>(low)), half_to_float(static_cast<u16>(low >> 16)),
                           half_to_float(static_cast<u16>(high)), half_to_float(static_cast<u16>(high >> 16)));
    }
#endif
};

struct Resident {
    int blocks[ITEMS], slots[ITEMS]; // -1: none
    float logits[ITEMS][QUERIES][WARPS];
    float values[ITEMS][QUERIES];
    Sum sums[QUERIES]; // of all items so far
};

// The items of a turn: which blocks they are, and what the thread's first place in the cache holds. The constructor
// asks for that.
struct Items {
    int first; // item
    int blocks[ITEMS];
    int owner, slot;

    __device__ __forceinline__ int item(int k) const { return first + k * static_cast<int>(gridDim.x); }
    __device__ __forceinline__ Items(const Params& p, int head, int first) : first(first) {
#pragma unroll
        for (int k = 0; k < ITEMS; k++) {
            blocks[k] = item(k) < p.pinned_count ? p.pinned[item(k)] : -1;
        }
        bool is_in = static_cast<int>(threadIdx.x) < p.places;
        owner = is_in ? p.owner[head * p.owner_stride + threadIdx.x] : -1;
        slot = is_in ? p.slots[head * p.slot_stride + threadIdx.x] : -1;
    }
    // Nothing is found yet, but for the block being filled.
    __device__ __forceinline__ void begin(const Params& p, int head, Resident& resident) const {
#pragma unroll
        for (int k = 0; k < ITEMS; k++) {
            if (threadIdx.x == k) {
                bool is_filling = item(k) == p.pinned_count && p.active_tokens > 0;
                resident.slots[k] = !is_filling ? -1 : p.active == nullptr ? p.few_active[head] : p.active[head];
                resident.blocks[k] = blocks[k];
            }
        }
    }
    // After `begin`, when all threads have met.
    __device__ __forceinline__ void look_up(const Params& p, int head, Resident& resident) const {
#pragma unroll 1
        for (int place = threadIdx.x; place < p.places; place += THREADS) {
            bool is_first = place < THREADS;
            int block = is_first ? owner : p.owner[head * p.owner_stride + place];
#pragma unroll
            for (int k = 0; k < ITEMS; k++) { // a block lies in one place at most
                if (block == blocks[k] && block >= 0 && block < p.blocks) {
                    resident.slots[k] = is_first ? slot : p.slots[head * p.slot_stride + place];
                }
            }
        }
    }
    __device__ __forceinline__ int tokens(const Params& p, int k) const {
        return item(k) == p.pinned_count ? p.active_tokens : p.block_size;
    }
};

// Four dims of a warp's token of each item, zeros for what is not there.
struct Keys {
    FourDims dims[ITEMS];
    float scales[ITEMS];

    __device__ __forceinline__ void ask(const Params& p, const Items& items, const Resident& resident, int token, int i) {
#pragma unroll
        for (int k = 0; k < ITEMS; k++) {
            int slot = resident.slots[k];
            dims[k] = FourDims{};
            scales[k] = p.scale;
            if (slot >= 0 && token < items.tokens(p, k)) {
                const u8* unit = p.units + slot * p.unit_bytes;
                if (i < p.tables.dim) {
                    dims[k].load(unit, token * p.tables.dim + i);
                }
#if E4M3
                scales[k] = p.scale * reinterpret_cast<const float*>(unit + p.scales_at)[token];
#endif
            }
        }
    }
};

// Adds the logsumexps of the items of a turn. keys: of the warp's first token, the lane's first dims.
__device__ __forceinline__ void add_items(const Params& p, int head, int first_query, int count, const Items& items,
                                          Keys& keys, const float (&queries)[QUERIES][MOST_DIM], Resident& resident) {
    int lane = lane_index();
    int warp = threadIdx.x / WARP;
    int item = warp / QUERIES, g = warp % QUERIES; // whose tokens the warp adds
    Sum own{-INFINITE, 0.0f};
#pragma unroll 1
    for (int first = 0; first < p.block_size; first += WARPS) {
        float sums[ITEMS][QUERIES] = {};
#pragma unroll 1
        for (int i = 4 * lane; i < (p.tables.dim + 127) / 128 * 128; i += 4 * WARP) {
            if (first > 0 || i != 4 * lane) {
                keys.ask(p, items, resident, first + warp, i);
            }
#pragma unroll
            for (int k = 0; k < ITEMS; k++) {
                if (resident.slots[k] >= 0) {
                    float4 key = keys.dims[k].wide();
#pragma unroll
                    for (int n = 0; n < QUERIES; n++) {
                        add_dims(sums[k][n], *reinterpret_cast<const float4*>(&queries[n][i]), key);
                    }
                }
            }
        }
#pragma unroll
        for (int k = 0; k < ITEMS; k++) {
            if (resident.slots[k] >= 0) { // of the whole thread block
                float logit = over_dims(sums[k]) * keys.scales[k];
                if (lane % 8 == 0) {
                    resident.logits[k][lane / 8][warp] = p.soft_cap > 0 ? tanhf(logit / p.soft_cap) * p.soft_cap : logit;
                }
            }
        }
        __syncthreads();
        if (lane < WARPS && resident.slots[item] >= 0 && first + lane < items.tokens(p, item)) {
            own.add(resident.logits[item][g][lane]);
        }
        __syncthreads();
    }
    over_lanes(own, 1, WARPS);
    if (lane == 0) {
        float value = own.best + logf(own.total);
        value = value == value ? value : -INFINITE;
        int block = resident.blocks[item];
        if (resident.slots[item] >= 0 && block >= 0 && g < count) {
            p.mass[static_cast<i64>(head * p.group + first_query + g) * p.blocks + block] = value;
        }
        resident.values[item][g] = value;
    }
    __syncthreads();
    if (threadIdx.x < QUERIES) {
#pragma unroll
        for (int k = 0; k < ITEMS; k++) {
            resident.sums[threadIdx.x].add(resident.values[k][threadIdx.x]);
        }
    }
}

// The turns of a thread block after its first one.
__device__ __noinline__ void add_more_items(const Params& p, int head, int first_query, int count,
                                            const float (&queries)[QUERIES][MOST_DIM], Resident& resident) {
    int step = ITEMS * gridDim.x;
#pragma unroll 1
    for (int first = blockIdx.x + step; first <= p.pinned_count; first += step) {
        Items items(p, head, first);
        __syncthreads(); // the last turn's were read by all
        items.begin(p, head, resident);
        __syncthreads();
        items.look_up(p, head, resident);
        __syncthreads();
        Keys keys;
        keys.ask(p, items, resident, threadIdx.x / WARP, 4 * lane_index());
        add_items(p, head, first_query, count, items, keys, queries, resident);
    }
}
