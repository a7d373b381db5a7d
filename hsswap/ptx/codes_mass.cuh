// What both kernels of the blocks' masses share: codes_mass.cu and codes_mass_any.cu.
#pragma once
#include "codes.cuh"
#include "e4m3.cuh"

#ifndef CHUNK
#define CHUNK 16
#endif

struct Params {
    Tables tables;
    const u8* queries;
    i64 query_stride, element_stride; // bytes
    const u64* pages;      // null: few_pages
    const int* code_index; // [B]
    const int* pinned;
    const int* chosen; // [H, entries], null: nothing was attended
    const float* lse;
    float* predicted;
    float* correction;
    float* mass;
    float4* partial;
    const u8* units;
    const int* owner;  // [H, places], null: nothing is held
    const int* slots;  // [H, places]
    const int* active; // [H], null: few_active
    i64 row_bytes, memory_stride, chosen_stride, lse_stride;
    i64 unit_bytes, scales_at, owner_stride, slot_stride;
    int blocks, group, block_size, pinned_count, entries, first, remembered;
    int span; // blocks that a thread block takes at a time, THREADS at most
    int places, active_tokens;
    float scale, soft_cap;
    u64 few_pages[64];
    int few_active[64];
};

constexpr int THREADS = 512;
constexpr int WARPS = THREADS / WARP;
constexpr int QUERIES = 4;
constexpr int MOST_DIM = 256;

struct Sum {
    float best, total;
    __device__ __forceinline__ void add(float value) {
        if (value > best) {
            total = total * __expf(best - value) + 1.0f;
            best = value;
        } else if (value != -INFINITE) {
            total += __expf(value - best); // NaN for NaN
        }
    }
    __device__ __forceinline__ void merge(const Sum& other) {
        float top = fmaxf(best, other.best);
        float shift = top == -INFINITE ? 0.0f : top;
        total = total * __expf(best - shift) + other.total * __expf(other.best - shift);
        best = top;
    }
};

// Of masses without and with corrections.
struct Sums {
    Sum plain, corrected;
    __device__ __forceinline__ void merge(const Sums& other) {
        plain.merge(other.plain);
        corrected.merge(other.corrected);
    }
};

// The blocks of a thread block: where their codes of its head are (0: nowhere), as which entry the last
// step attended them (-1: not), whether they are pinned, and whether the cache holds them.
struct Range {
    u64 rows[THREADS];
    short entries[THREADS];
    u32 pins[THREADS / WARP], held[THREADS / WARP];
    int first;

    __device__ __forceinline__ void mark(u32 (&bits)[THREADS / WARP], int block, int span) {
        u32 at = static_cast<u32>(block - first);
        if (block >= 0 && at < static_cast<u32>(span)) {
            atomicOr(&bits[at / 32], 1u << at % 32);
        }
    }
    // Whether block i counts with its exact logits: resident.cuh.
    __device__ __forceinline__ bool is_exact(int i) const { return (pins[i / 32] & held[i / 32]) >> i % 32 & 1u; }
};

// What a thread asks of memory for a range, before anything waits.
struct Asked {
    int index, chosen, pinned, plane, owner;
    __device__ __forceinline__ Asked(const Params& p, int head, int first) {
        int i = threadIdx.x;
        bool is_coded = p.tables.are_there();
        index = is_coded && i < p.span && first + i < p.blocks ? p.code_index[first + i] : -1;
        chosen = p.chosen != nullptr && i < p.entries ? p.chosen[head * p.chosen_stride + i] : -1;
        pinned = i < p.pinned_count ? p.pinned[i] : -1;
        plane = is_coded ? p.tables.first_plane(head) : 0;
        owner = i < p.places ? p.owner[head * p.owner_stride + i] : -1;
    }
};

// `also`: what all threads do after one meeting and before another.
template <class Also>
__device__ __forceinline__ void stage(const Params& p, int head, int first, const Asked& asked, Range& range,
                                      const Also& also) {
    __syncthreads(); // the last range was read by all
    int i = threadIdx.x;
    if (asked.index >= 0) {
        int page = asked.index / PAGE_BLOCKS;
        u64 base = p.pages == nullptr ? p.few_pages[page] : p.pages[page];
        range.rows[i] = base + asked.index % PAGE_BLOCKS * p.row_bytes + 2ll * asked.plane * p.block_size;
    } else {
        range.rows[i] = 0;
    }
    range.entries[i] = -1;
    if (i < WARPS) {
        range.pins[i] = 0;
        range.held[i] = 0;
    }
    range.first = first;
    __syncthreads();
    auto attended = [&](int entry, int block) {
        u32 at = static_cast<u32>(block - first);
        if (block >= 0 && at < static_cast<u32>(p.span)) {
            range.entries[at] = static_cast<short>(entry);
        }
    };
    attended(i, asked.chosen);
    range.mark(range.pins, asked.pinned, p.span);
    range.mark(range.held, asked.owner, p.span);
#pragma unroll 1
    for (int entry = THREADS + i; p.chosen != nullptr && entry < p.entries; entry += THREADS) {
        attended(entry, p.chosen[head * p.chosen_stride + entry]);
    }
#pragma unroll 1
    for (int j = THREADS + i; j < p.pinned_count; j += THREADS) {
        range.mark(range.pins, p.pinned[j], p.span);
    }
#pragma unroll 1
    for (int place = THREADS + i; place < p.places; place += THREADS) {
        range.mark(range.held, p.owner[head * p.owner_stride + place], p.span);
    }
    also();
    __syncthreads();
}

__device__ __forceinline__ float remembered(const Params& p, int q, int b) {
    return p.first ? 0.0f : p.correction[q * p.memory_stride + b];
}

__device__ __forceinline__ float load_float(const float* from) {
    float out;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(out) : "l"(from) : "memory");
    return out;
}

// What the last step showed of block i of the range to query q, -1: none; asked for before it is needed.
struct Shown {
    int entry;
    float seen, before;
    __device__ __forceinline__ Shown(const Params& p, int q, const Range& range, int i) {
        entry = q >= 0 ? range.entries[i] : -1;
        seen = before = 0;
        if (entry >= 0) {
            seen = load_float(p.lse + q * p.lse_stride + entry);
            before = load_float(p.predicted + q * p.memory_stride + range.first + i);
        }
    }
};

// What block i of the range is worth to query q = head * group + g in this step, and what is remembered
// of it. value: what its codes say; correction: of the step before.
__device__ __forceinline__ void settle(const Params& p, int q, const Range& range, int i, float value,
                                       float correction, const Shown& shown, Sums& sums) {
    bool coded = range.rows[i] != 0;
    int b = range.first + i;
    float now = coded ? value : -INFINITE;
    correction = coded ? FADE * correction : 0.0f;
    if (shown.entry >= 0) {
        if (!coded) {
            now = shown.seen == shown.seen ? shown.seen : now;
        } else if (!p.first) {
            float error = TRUST * (shown.seen - shown.before);
            correction = isfinite(error) ? error : correction;
        }
    }
    p.predicted[q * p.memory_stride + b] = coded ? value : -INFINITE;
    if (range.is_exact(i)) { // its mass is put there by whoever has its logits
        p.correction[q * p.memory_stride + b] = 0;
        return;
    }
    p.correction[q * p.memory_stride + b] = correction;
    p.mass[static_cast<i64>(q) * p.blocks + b] = now;
    sums.plain.add(now);
    sums.corrected.add(now + correction);
}

// Of several lanes, of equal lane number in each `from` of them, in all of these.
__device__ __forceinline__ void over_lanes(Sum& own, int from, int to) {
    float top = own.best;
#pragma unroll
    for (int step = from; step < to; step *= 2) {
        top = fmaxf(top, __shfl_xor_sync(ALL, top, step));
    }
    own.total *= __expf(own.best - (top == -INFINITE ? 0.0f : top));
    own.best = top;
#pragma unroll
    for (int step = from; step < to; step *= 2) {
        own.total += __shfl_xor_sync(ALL, own.total, step);
    }
}

// The sums of all warps to partial. own: in lane g that of query first_query + g of the group; exact: of a query,
// those of blocks with exact logits.
__device__ __forceinline__ void finish(const Params& p, int head, int first_query, int count, const Sums& own,
                                       const Sum (&exact)[QUERIES]) {
    __shared__ Sums sums[QUERIES][WARPS];
    int warp = threadIdx.x / WARP;
    int lane = lane_index();
    if (lane < QUERIES) {
        sums[lane][warp] = own;
    }
    __syncthreads();
    if (warp >= count) {
        return;
    }
    Sums all = sums[warp][lane % WARPS];
    over_lanes(all.plain, 1, WARPS);
    over_lanes(all.corrected, 1, WARPS);
    if (lane == 0) {
        all.plain.merge(exact[warp]);
        all.corrected.merge(exact[warp]);
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
            p.correction[(head * p.group + first_query + g) * p.memory_stride + p.blocks + i] = 0;
        }
    }
}

// The queries of a thread block in float32, zeros past the last dim and query.
struct Queries {
    u16 own[QUERIES]; // a dim of each, as it lies in memory

    // Asks for them.
    __device__ __forceinline__ Queries(const Params& p, int head, int first_query, int count) {
        int i = threadIdx.x;
#pragma unroll
        for (int g = 0; g < QUERIES; g++) {
            const u8* from = p.queries + (head * p.group + first_query + g) * p.query_stride;
            own[g] = 0;
            if (g < count && i < p.tables.dim) {
                own[g] = *reinterpret_cast<const u16*>(from + i * p.element_stride);
            }
        }
    }
    __device__ __forceinline__ void put(float (&queries)[QUERIES][MOST_DIM]) const {
        if (threadIdx.x < MOST_DIM) {
#pragma unroll
            for (int g = 0; g < QUERIES; g++) {
                queries[g][threadIdx.x] = half_to_float(own[g]);
            }
        }
    }
};

// A sum of each query over the lanes; lane 8 g of a warp gets that of query g.
__device__ __forceinline__ float over_dims(const float (&sums)[QUERIES]) {
    bool upper = (lane_index() & 16) != 0;
    float two[2];
#pragma unroll
    for (int g = 0; g < 2; g++) {
        float mine = upper ? sums[g + 2] : sums[g];
        float other = upper ? sums[g] : sums[g + 2];
        two[g] = mine + __shfl_xor_sync(ALL, other, 16);
    }
    bool odd = (lane_index() & 8) != 0;
    float sum = odd ? two[1] : two[0];
    sum += __shfl_xor_sync(ALL, odd ? two[0] : two[1], 8);
#pragma unroll
    for (int step = 4; step > 0; step /= 2) {
        sum += __shfl_xor_sync(ALL, sum, step);
    }
    return sum;
}

__device__ __forceinline__ void add_dims(float& sum, const float4& query, const float4& row) {
    sum = fmaf(query.x, row.x, sum);
    sum = fmaf(query.y, row.y, sum);
    sum = fmaf(query.z, row.z, sum);
    sum = fmaf(query.w, row.w, sum);
}

constexpr int ROWS = 5; // of the table that a warp has on their way, 80 in all

// of_dim[g][d] = sum over i of query[g][i] * table[d][i]; of_dim[g][most] the same with the centre. A row of the
// table a warp. The constructor asks for the first rows.
struct Projection {
    float4 row[ROWS];

    __device__ __forceinline__ void ask(const Tables& tables, int head, int base, int i) {
#pragma unroll
        for (int k = 0; k < ROWS; k++) {
            int d = base + k * WARPS;
            const float* from = d < tables.most ? tables.query(head) + d * tables.dim : tables.centre(head);
            bool is_in = tables.are_there() && i < tables.dim && d <= tables.most;
            row[k] = is_in ? *reinterpret_cast<const float4*>(from + i) : make_float4(0, 0, 0, 0);
        }
    }
    __device__ __forceinline__ Projection(const Params& p, int head) {
        ask(p.tables, head, threadIdx.x / WARP, 4 * lane_index());
    }
    __device__ __forceinline__ void run(const Params& p, int head, const float (&queries)[QUERIES][MOST_DIM],
                                        float* of_dim) {
        const Tables& tables = p.tables;
        int lane = lane_index();
        int warp = threadIdx.x / WARP;
#pragma unroll 1
        for (int base = warp; base <= tables.most; base += ROWS * WARPS) {
            float sums[ROWS][QUERIES] = {};
            for (int i = 4 * lane; i < (tables.dim + 127) / 128 * 128; i += 4 * WARP) {
                if (base != warp || i != 4 * lane) {
                    ask(tables, head, base, i);
                }
#pragma unroll
                for (int g = 0; g < QUERIES; g++) {
                    float4 query = *reinterpret_cast<const float4*>(&queries[g][i]); // times 0 past the end
#pragma unroll
                    for (int k = 0; k < ROWS; k++) {
                        add_dims(sums[k][g], query, row[k]);
                    }
                }
            }
#pragma unroll
            for (int k = 0; k < ROWS; k++) {
                float sum = over_dims(sums[k]);
                int d = base + k * WARPS;
                if (lane % 8 == 0 && d <= tables.most) {
                    of_dim[lane / 8 * (tables.most + 1) + d] = sum;
                }
            }
        }
    }
};
