// What both kernels of the blocks' masses share: codes_mass.cu and codes_mass_any.cu.
#pragma once
#include "codes.cuh"

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
    i64 row_bytes, memory_stride, chosen_stride, lse_stride;
    int blocks, group, block_size, pinned_count, entries, first, remembered;
    int span; // blocks that a thread block takes at a time, THREADS at most
    u64 few_pages[64];
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
// step attended them (-1: not), and whether they are pinned.
struct Range {
    u64 rows[THREADS];
    short entries[THREADS];
    u32 pins[THREADS / WARP];
    int first;
};

// What a thread asks of memory for a range, before anything waits.
struct Asked {
    int index, chosen, pinned, plane;
    __device__ __forceinline__ Asked(const Params& p, int head, int first) {
        int i = threadIdx.x;
        bool is_coded = p.tables.are_there();
        index = is_coded && i < p.span && first + i < p.blocks ? p.code_index[first + i] : -1;
        chosen = p.chosen != nullptr && i < p.entries ? p.chosen[head * p.chosen_stride + i] : -1;
        pinned = i < p.pinned_count ? p.pinned[i] : -1;
        plane = is_coded ? p.tables.first_plane(head) : 0;
    }
};

__device__ __forceinline__ void stage(const Params& p, int head, int first, const Asked& asked, Range& range) {
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
    }
    range.first = first;
    __syncthreads();
    auto attended = [&](int entry, int block) {
        u32 at = static_cast<u32>(block - first);
        if (block >= 0 && at < static_cast<u32>(p.span)) {
            range.entries[at] = static_cast<short>(entry);
        }
    };
    auto pin = [&](int block) {
        u32 at = static_cast<u32>(block - first);
        if (block >= 0 && at < static_cast<u32>(p.span)) {
            atomicOr(&range.pins[at / 32], 1u << at % 32);
        }
    };
    attended(i, asked.chosen);
    pin(asked.pinned);
#pragma unroll 1
    for (int entry = THREADS + i; p.chosen != nullptr && entry < p.entries; entry += THREADS) {
        attended(entry, p.chosen[head * p.chosen_stride + entry]);
    }
#pragma unroll 1
    for (int j = THREADS + i; j < p.pinned_count; j += THREADS) {
        pin(p.pinned[j]);
    }
    __syncthreads();
}

__device__ __forceinline__ float remembered(const Params& p, int q, int b) {
    return p.first ? 0.0f : p.correction[q * p.memory_stride + b];
}

// What block i of the range is worth to query q = head * group + g in this step, and what is remembered
// of it. value: what its codes say; correction: of the step before. Pinned blocks count in codes_rank.
__device__ __forceinline__ void settle(const Params& p, int q, const Range& range, int i, float value,
                                       float correction, Sums& sums) {
    bool coded = range.rows[i] != 0;
    int entry = range.entries[i];
    int b = range.first + i;
    float* predicted = p.predicted + q * p.memory_stride + b;
    float now = coded ? value : -INFINITE;
    correction = coded ? FADE * correction : 0.0f;
    if (entry >= 0) {
        float seen = p.lse[q * p.lse_stride + entry];
        if (!coded) {
            now = seen == seen ? seen : now;
        } else if (!p.first) {
            float shown = TRUST * (seen - *predicted);
            correction = isfinite(shown) ? shown : correction;
        }
    }
    *predicted = coded ? value : -INFINITE;
    p.correction[q * p.memory_stride + b] = correction;
    p.mass[static_cast<i64>(q) * p.blocks + b] = now;
    if ((range.pins[i / 32] >> i % 32 & 1u) == 0) {
        sums.plain.add(now);
        sums.corrected.add(now + correction);
    }
}

// Of several lanes, of equal lane number in each `from` of them.
__device__ __forceinline__ void over_lanes(Sums& own, int from, int to) {
#pragma unroll 1
    for (int step = from; step < to; step *= 2) {
        Sums other;
        other.plain = {__shfl_xor_sync(ALL, own.plain.best, step), __shfl_xor_sync(ALL, own.plain.total, step)};
        other.corrected = {__shfl_xor_sync(ALL, own.corrected.best, step),
                           __shfl_xor_sync(ALL, own.corrected.total, step)};
        own.merge(other);
    }
}

// The sums of all warps to partial. own: in lane g that of query first_query + g of the group.
__device__ __forceinline__ void finish(const Params& p, int head, int first_query, int count, const Sums& own) {
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
    over_lanes(all, 1, WARPS);
    if (lane == 0) {
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

constexpr int ROWS = 5; // of the table that a warp has on their way, 80 in all

// of_dim[g][d] = sum over i of query[g][i] * table[d][i]; of_dim[g][most] the same with the centre. 0 for queries past
// `count`. A row of the table a warp. The constructor asks for the first rows, and for queries.
struct Projection {
    float4 row[ROWS];
    u16 own[QUERIES]; // a dim of each query, as it lies in memory

    __device__ __forceinline__ void ask(const Tables& tables, int head, int base, int i) {
#pragma unroll
        for (int k = 0; k < ROWS; k++) {
            int d = base + k * WARPS;
            const float* from = d < tables.most ? tables.query(head) + d * tables.dim : tables.centre(head);
            row[k] = i < tables.dim ? *reinterpret_cast<const float4*>(from + i) : make_float4(0, 0, 0, 0);
        }
    }
    __device__ __forceinline__ Projection(const Params& p, int head, int first_query, int count) {
        ask(p.tables, head, threadIdx.x / WARP, 4 * lane_index());
        int i = threadIdx.x;
#pragma unroll
        for (int g = 0; g < QUERIES; g++) {
            const u8* from = p.queries + (head * p.group + first_query + g) * p.query_stride;
            bool is_in = g < count && i < p.tables.dim;
            own[g] = 0;
            if (is_in) {
                own[g] = *reinterpret_cast<const u16*>(from + i * p.element_stride);
            }
        }
    }
    __device__ __forceinline__ void run(const Params& p, int head, float* of_dim) {
        __shared__ __align__(16) float queries[QUERIES][MOST_DIM]; // to the end of the last step with zeros
        const Tables& tables = p.tables;
        if (threadIdx.x < MOST_DIM) {
#pragma unroll
            for (int g = 0; g < QUERIES; g++) {
                queries[g][threadIdx.x] = half_to_float(own[g]);
            }
        }
        __syncthreads();
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
                        sums[k][g] = fmaf(query.x, row[k].x, sums[k][g]);
                        sums[k][g] = fmaf(query.y, row[k].y, sums[k][g]);
                        sums[k][g] = fmaf(query.z, row[k].z, sums[k][g]);
                        sums[k][g] = fmaf(query.w, row[k].w, sums[k][g]);
                    }
                }
            }
#pragma unroll
            for (int k = 0; k < ROWS; k++) {
                // Over the lanes, a query a quarter of them at the end.
                bool upper = (lane & 16) != 0;
#pragma unroll
                for (int g = 0; g < 2; g++) {
                    float mine = upper ? sums[k][g + 2] : sums[k][g];
                    float other = upper ? sums[k][g] : sums[k][g + 2];
                    sums[k][g] = mine + __shfl_xor_sync(ALL, other, 16);
                }
                bool odd = (lane & 8) != 0;
                float sum = odd ? sums[k][1] : sums[k][0];
                sum += __shfl_xor_sync(ALL, odd ? sums[k][0] : sums[k][1], 8);
#pragma unroll
                for (int step = 4; step > 0; step /= 2) {
                    sum += __shfl_xor_sync(ALL, sum, step);
                }
                int d = base + k * WARPS;
                if (lane % 8 == 0 && d <= tables.most) {
                    of_dim[lane / 8 * (tables.most + 1) + d] = sum;
                }
            }
        }
        __syncthreads();
    }
};
