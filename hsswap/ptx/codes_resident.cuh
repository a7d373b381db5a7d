// Exact logits of blocks whose keys are in device slots, for both kernels of the blocks' masses.
//
// Items of a head: its pinned blocks, then the block being filled. Thread block x of a head takes items x, x + gridDim.x
// and so on, ITEMS at a time: half a warp a token of an item. The logsumexp of a pinned block that the cache holds becomes
// its mass; that and the filled block's are part of the sum of everything. Keys that give NaN count as nothing. Keys of E4M3
// (E4M3 1) have scales at byte scales_at of a unit. CHUNK: 16 where keys in units divide by it.
#pragma once
#include "codes_lists.cuh"
#include "codes_queries.cuh"
#include "e4m3.cuh"

constexpr int ITEMS = 4;
constexpr int PAIRS = ITEMS / 2; // an item each half of a warp

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
    Sum parts[ITEMS][QUERIES][WARPS]; // of the tokens of a warp
    float values[ITEMS][QUERIES];
    Sum sums[QUERIES]; // of all items of earlier turns

    // Of all items, when all threads have met since join_keys.
    __device__ __forceinline__ Sum all(int g) const {
        Sum sum = sums[g];
#pragma unroll
        for (int k = 0; k < ITEMS; k++) {
            sum.add(values[k][g]);
        }
        return sum;
    }
    // Before a turn.
    __device__ __forceinline__ void clear() {
        if (threadIdx.x < ITEMS) {
            slots[threadIdx.x] = -1;
        }
        if (threadIdx.x < ITEMS * QUERIES * WARPS) {
            (&parts[0][0][0])[threadIdx.x] = {-INFINITE, 0.0f};
        }
    }
};

// The items of a turn, and which blocks they are.
struct Items {
    int first; // item
    int blocks[ITEMS];

    __device__ __forceinline__ int item(int k) const { return first + k * static_cast<int>(gridDim.x); }
    // Asks for the blocks.
    __device__ __forceinline__ Items(const Params& p, int first) : first(first) {
#pragma unroll
        for (int k = 0; k < ITEMS; k++) {
            blocks[k] = item(k) < p.pinned_count ? p.pinned[item(k)] : -1;
        }
    }
    // Puts them, after `clear`, when all threads have met.
    __device__ __forceinline__ void put(const Params& p, int head, Resident& resident) const {
        if (threadIdx.x == 0) {
#pragma unroll
            for (int k = 0; k < ITEMS; k++) {
                resident.blocks[k] = blocks[k];
            }
            u32 behind = p.pinned_count - first; // the block being filled
            u32 k = behind / gridDim.x;
            if (p.active_tokens > 0 && behind % gridDim.x == 0 && k < ITEMS) {
                resident.slots[k] = p.active == nullptr ? p.few_active[head] : p.active[head];
            }
        }
    }
    // The cache holds a block.
    __device__ __forceinline__ void find(int block, int slot, Resident& resident) const {
#pragma unroll
        for (int k = 0; k < ITEMS; k++) { // a block lies in one place at most
            if (block == blocks[k]) {
                resident.slots[k] = slot;
            }
        }
    }
    __device__ __forceinline__ int tokens(const Params& p, int k) const {
        return item(k) == p.pinned_count ? p.active_tokens : p.block_size;
    }
};

// Dims of the keys of a token of each item, a part of which each lane has. Warp w has tokens w, w + WARPS and so on.
struct Keys {
    FourDims parts[PAIRS][PARTS];
    float scales[PAIRS];

    __device__ __forceinline__ static int item(int pair) { return 2 * pair + lane() / LANES; }
    // Whether a warp has any.
    __device__ __forceinline__ static bool has_items(const Resident& resident) {
        return max(max(resident.slots[0], resident.slots[1]), max(resident.slots[2], resident.slots[3])) >= 0;
    }
    // From dim i on.
    __device__ __forceinline__ void ask(const Params& p, const Resident& resident, int token, int i) {
        int first = i + dim_of_part(0);
#pragma unroll
        for (int n = 0; n < PAIRS; n++) {
            int slot = token < p.block_size ? resident.slots[item(n)] : -1;
            const u8* unit = p.units + slot * p.unit_bytes;
#pragma unroll
            for (int k = 0; k < PARTS; k++) {
                parts[n][k] = FourDims{};
                if (slot >= 0 && first + 4 * LANES * k < p.tables.dim) {
                    parts[n][k].load(unit, token * p.tables.dim + first + 4 * LANES * k);
                }
            }
            scales[n] = p.scale;
#if E4M3
            scales[n] *= slot >= 0 ? reinterpret_cast<const float*>(unit + p.scales_at)[token] : 0.0f;
#endif
        }
    }
};

// Sums of the logits of a warp's tokens, of which the first are asked for.
__device__ __forceinline__ void add_keys(const Params& p, const Items& items, Keys& keys,
                                         const float (&queries)[QUERIES][MOST_DIM], Resident& resident) {
    int warp = threadIdx.x / WARP;
    Sum own[PAIRS];
#pragma unroll
    for (int n = 0; n < PAIRS; n++) {
        own[n] = {-INFINITE, 0.0f};
    }
#pragma unroll 1
    for (int token = warp; token < p.block_size; token += WARPS) {
        float sums[PAIRS][QUERIES] = {};
#pragma unroll 1
        for (int i = 0; i < p.tables.dim; i += DIMS) {
            if (token != warp || i > 0) {
                keys.ask(p, resident, token, i);
            }
            QueryParts of_queries(queries, i);
#pragma unroll
            for (int n = 0; n < PAIRS; n++) {
#pragma unroll
                for (int k = 0; k < PARTS; k++) {
                    of_queries.add(sums[n], k, keys.parts[n][k].wide());
                }
            }
        }
#pragma unroll
        for (int n = 0; n < PAIRS; n++) {
            float logit = over_dims(sums[n]) * keys.scales[n];
            if (p.soft_cap > 0) {
                logit = tanhf(logit / p.soft_cap) * p.soft_cap;
            }
            if (resident.slots[keys.item(n)] >= 0 && token < items.tokens(p, keys.item(n))) {
                own[n].add(logit);
            }
        }
    }
    if (query_of_lane() >= 0) {
#pragma unroll
        for (int n = 0; n < PAIRS; n++) {
            resident.parts[keys.item(n)][query_of_lane()][warp] = own[n];
        }
    }
}

// The logsumexps of the items of a turn, an item a half of the first PAIRS warps, when all threads have met since add_keys.
__device__ __forceinline__ void join_keys(const Params& p, int head, int first_query, int count, Resident& resident) {
    int g = lane() % LANES / 4, item = static_cast<int>(threadIdx.x / LANES);
    Sum own{-INFINITE, 0.0f};
#pragma unroll
    for (int k = 0; k < WARPS / 4; k++) {
        own.merge(resident.parts[item][g][lane() % 4 + 4 * k]);
    }
    over_lanes(own, 1, 4);
    float value = own.best + logf(own.total);
    value = value == value ? value : -INFINITE;
    int block = resident.blocks[item];
    if (query_of_lane() >= 0) {
        if (resident.slots[item] >= 0 && block >= 0 && g < count) {
            p.mass[static_cast<i64>(head * p.group + first_query + g) * p.blocks + block] = value;
        }
        resident.values[item][g] = value;
    }
}

// The turns of a thread block after its first one.
__device__ __noinline__ void add_more_items(const Params& p, int head, int first_query, int count,
                                            const float (&queries)[QUERIES][MOST_DIM], Resident& resident) {
    int step = ITEMS * gridDim.x;
#pragma unroll 1
    for (int first = blockIdx.x + step; first <= p.pinned_count; first += step) {
        Items items(p, first);
        __syncthreads(); // the last turn's were read by all
        if (threadIdx.x < QUERIES) {
            resident.sums[threadIdx.x] = resident.all(threadIdx.x);
        }
        resident.clear();
        __syncthreads();
        items.put(p, head, resident);
#pragma unroll 1
        for (int place = threadIdx.x; place < p.places; place += THREADS) {
            int block = p.owner[head * p.owner_stride + place];
            if (block >= 0 && block < p.blocks) {
                items.find(block, p.slots[head * p.slot_stride + place], resident);
            }
        }
        __syncthreads();
        if (Keys::has_items(resident)) {
            Keys keys;
            keys.ask(p, resident, threadIdx.x / WARP, 0);
            add_keys(p, items, keys, queries, resident);
        }
        __syncthreads();
        if (threadIdx.x < PAIRS * WARP) {
            join_keys(p, head, first_query, count, resident);
        }
    }
}

// The sums of all warps and of blocks with exact logits to partial. own: in lane g that of query first_query + g of the
// group. Threads have put what join_keys finds.
__device__ __forceinline__ void finish(const Params& p, int head, int first_query, int count, const Sums& own,
                                       const Resident& resident) {
    __shared__ Sums sums[QUERIES][WARPS];
    int warp = threadIdx.x / WARP;
    if (lane() < QUERIES) {
        sums[lane()][warp] = own;
    }
    __syncthreads();
    if (warp >= count) {
        return;
    }
    Sums all = sums[warp][lane() % WARPS];
    over_lanes(all.plain, 1, WARPS);
    over_lanes(all.corrected, 1, WARPS);
    Sum exact = resident.all(warp);
    all.plain.merge(exact);
    all.corrected.merge(exact);
    if (lane() == 0) {
        p.partial[(head * p.group + first_query + warp) * gridDim.x + blockIdx.x] =
            make_float4(all.plain.best, all.plain.total, all.corrected.best, all.corrected.total);
    }
}

// What is remembered past the blocks begins with the first step, too.
__device__ __forceinline__ void forget_the_rest(const Params& p, int head, int first_query, int count) {
    int rest = p.first ? p.remembered - p.blocks : 0;
#pragma unroll 1
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < rest; i += gridDim.x * THREADS) {
#pragma unroll 1
        for (int g = 0; g < count; g++) {
            *remembered(p.correction, p, head * p.group + first_query + g, p.blocks + i) = 0;
        }
    }
}
