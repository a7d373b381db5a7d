// What is known of the blocks of a thread block from lists, and of one of them before its codes are used, for both kernels
// of the blocks' masses.
#pragma once
#include "codes_mass.cuh"

// The blocks of a thread block: where their codes of its head are (0: nowhere), as which entry the last
// step attended them (-1: not), whether they are pinned, and whether the cache holds them.
struct Range {
    u64 rows[THREADS];
    short entries[THREADS];
    u32 pins[THREADS / WARP], held[THREADS / WARP];
    int first;

    // Nothing is known of any block yet.
    __device__ __forceinline__ void clear(int block) {
        int i = threadIdx.x;
        entries[i] = -1;
        if (i < THREADS / WARP) {
            pins[i] = 0;
            held[i] = 0;
        }
        first = block;
    }
    __device__ __forceinline__ void mark(u32 (&bits)[THREADS / WARP], int block, int span) {
        u32 at = static_cast<u32>(block - first);
        if (block >= 0 && at < static_cast<u32>(span)) {
            atomicOr(&bits[at / 32], 1u << at % 32);
        }
    }
    // The last step attended it as this entry.
    __device__ __forceinline__ void attend(int block, int entry, int span) {
        u32 at = static_cast<u32>(block - first);
        if (block >= 0 && at < static_cast<u32>(span)) {
            entries[at] = static_cast<short>(entry);
        }
    }
    __device__ __forceinline__ static u64 row_of(const Params& p, int index) {
        u32 page = static_cast<u32>(index) / PAGE_BLOCKS;
        u64 base = p.pages == nullptr ? p.few_pages[page] : p.pages[page];
        return base + static_cast<u32>(index) % PAGE_BLOCKS * p.row_bytes;
    }
    // Whether block i counts with its exact logits: codes_resident.cuh.
    __device__ __forceinline__ bool is_exact(int i) const { return (pins[i / 32] & held[i / 32]) >> i % 32 & 1u; }
};

// Lists that say what a range has. Half of the threads take what the last step attended and what is pinned, the other
// half what the cache holds; the first two items of each are asked for before any is used.
struct Lists {
    static constexpr int HALF = THREADS / 2;
    const int* first;  // chosen, or owner
    const int* second; // pinned, or slots
    const int* index;
    int count, more; // items of both
    int values[2], others[2], row;
    int plane;

    __device__ __forceinline__ static bool is_upper() { return threadIdx.x >= HALF; }
    __device__ __forceinline__ static int place() { return static_cast<int>(threadIdx.x % HALF); }
    __device__ __forceinline__ Lists(const Params& p, int head, int block) {
        bool upper = is_upper();
        count = upper ? p.places : p.chosen == nullptr ? 0 : p.entries;
        more = upper ? p.places : p.pinned_count;
        first = pinned_here(upper ? p.owner : p.chosen, head * (upper ? p.owner_stride : p.chosen_stride) + place());
        second = pinned_here(upper ? p.slots : p.pinned, (upper ? head * p.slot_stride : 0) + place());
        index = pinned_here(p.code_index, block + static_cast<int>(threadIdx.x));
    }
    // All of it is on its way.
    __device__ __forceinline__ void ask(const Params& p, int head, int block) {
        bool is_coded = p.tables.are_there();
        bool is_in = static_cast<int>(threadIdx.x) < min(p.span, p.blocks - block);
        row = is_coded && is_in ? *index : -1;
#pragma unroll
        for (int k = 0; k < 2; k++) {
            values[k] = place() + k * HALF < count ? first[k * HALF] : -1;
            others[k] = place() + k * HALF < more ? second[k * HALF] : -1;
        }
        plane = is_coded ? p.tables.first_plane(head) : 0;
    }
    // Puts it into a range that is cleared, when all threads have met; they meet before it is read. `found`: takes a block
    // that the cache holds and its slot.
    template <class Found>
    __device__ __forceinline__ void put(const Params& p, Range& range, const Found& found) {
        range.rows[threadIdx.x] = row < 0 ? 0 : range.row_of(p, row) + 2ll * plane * p.block_size;
        if (is_upper()) {
            hold(p, range, found, 0);
            hold(p, range, found, 1);
        } else {
            mark(p, range, 0, 0);
            mark(p, range, 1, HALF);
        }
#pragma unroll 1
        for (int at = place() + 2 * HALF; at < max(count, more); at += HALF) {
            values[0] = at < count ? first[at - place()] : -1;
            others[0] = at < more ? second[at - place()] : -1;
            if (is_upper()) {
                hold(p, range, found, 0);
            } else {
                mark(p, range, 0, at - place());
            }
        }
    }

  private:
    template <class Found>
    __device__ __forceinline__ void hold(const Params& p, Range& range, const Found& found, int k) const {
        range.mark(range.held, values[k], p.span);
        if (values[k] >= 0 && values[k] < p.blocks) {
            found(values[k], others[k]);
        }
    }
    __device__ __forceinline__ void mark(const Params& p, Range& range, int k, int base) const {
        range.attend(values[k], base + place(), p.span);
        range.mark(range.pins, others[k], p.span);
    }
};

// The next range of a thread block, once all have read the last one.
__device__ __noinline__ void stage_next(const Params& p, int head, int first, Range& range) {
    Lists lists(p, head, first);
    lists.ask(p, head, first);
    __syncthreads();
    range.clear(first);
    __syncthreads();
    lists.put(p, range, [](int, int) {});
    __syncthreads();
}

// What is known of block i of a range before its codes are used. entry: as which the last step attended it, -1: not, or
// no query; seen and before: what that showed to a query, and what had been predicted.
struct Known {
    bool is_coded, is_exact;
    int entry;
    float seen, before;
    __device__ __forceinline__ Known(const Params& p, int query, const Range& range, int first, int i) {
        entry = query >= 0 ? range.entries[i] : -1;
        is_coded = range.rows[i] != 0;
        is_exact = range.is_exact(i);
        seen = before = 0;
        if (entry >= 0) {
            seen = load_float(p.lse + query * p.lse_stride + entry);
            before = load_float(remembered(p.predicted, p, query, first + i));
        }
    }
};

// What block b is worth to a query in this step, and what is remembered of it. value: what its codes say; correction: of
// the step before.
__device__ __forceinline__ void settle(const Params& p, int query, int b, float value, float correction, const Known& known,
                                       Sums& sums) {
    float now = known.is_coded ? value : -INFINITE;
    correction = known.is_coded ? FADE * correction : 0.0f;
    *remembered(p.predicted, p, query, b) = now;
    if (known.entry >= 0) {
        if (!known.is_coded) {
            now = known.seen == known.seen ? known.seen : now;
        } else if (!p.first) {
            float error = TRUST * (known.seen - known.before);
            correction = isfinite(error) ? error : correction;
        }
    }
    *remembered(p.correction, p, query, b) = known.is_exact ? 0.0f : correction;
    if (!known.is_exact) { // else its mass is put there by whoever has its logits
        p.mass[static_cast<u64>(static_cast<u32>(query)) * static_cast<u32>(p.blocks) + b] = now;
        sums.plain.join(now);
        sums.corrected.join(now + correction);
    }
}
