// The queries of a thread block and their products with rows of a table or of keys, for both kernels of the blocks' masses.
#pragma once
#include "codes_mass.cuh"

// The queries of a thread block in float32, zeros past the last dim and query: a quarter of the threads a query.
struct Queries {
    static constexpr int STEP = THREADS / QUERIES;
    static_assert(2 * STEP >= MOST_DIM, "two dims a thread");
    const u8* from;
    u16 own[2];

    __device__ __forceinline__ static int query() { return static_cast<int>(threadIdx.x / STEP); }
    __device__ __forceinline__ static int dim() { return static_cast<int>(threadIdx.x % STEP); }
    __device__ __forceinline__ Queries(const Params& p, int first) {
        from = pinned_here(p.queries, (first + query()) * p.query_stride + dim() * p.element_stride);
    }
    __device__ __forceinline__ void ask(const Params& p, int count) {
#pragma unroll
        for (int k = 0; k < 2; k++) {
            bool is_in = query() < count && dim() + k * STEP < p.tables.dim;
            own[k] = is_in ? *reinterpret_cast<const u16*>(from + k * STEP * p.element_stride) : 0;
        }
    }
    __device__ __forceinline__ void put(float (&queries)[QUERIES][MOST_DIM]) const {
#pragma unroll
        for (int k = 0; k < 2; k++) {
            queries[query()][dim() + k * STEP] = half_to_float(own[k]);
        }
    }
};

__device__ __forceinline__ void add_dims(float& sum, const float4& query, const float4& row) {
    sum = fmaf(query.x, row.x, sum);
    sum = fmaf(query.y, row.y, sum);
    sum = fmaf(query.z, row.z, sum);
    sum = fmaf(query.w, row.w, sum);
}

constexpr int LANES = WARP / 2; // of a row of a table, or of a key: two rows a warp
constexpr int PARTS = 2;        // of 4 dims of a lane at a time
constexpr int DIMS = LANES * PARTS * 4;

// The first of 4 dims of part k of a lane.
__device__ __forceinline__ int dim_of_part(int k) { return 4 * (k * LANES + lane() % LANES); }

// Sums of each query over the lanes of a row; lanes 4 g to 4 g + 3 of them get that of query g.
__device__ __forceinline__ float over_dims(const float (&sums)[QUERIES]) {
    bool upper = (lane() & 8) != 0, odd = (lane() & 4) != 0;
    float two[2];
#pragma unroll
    for (int g = 0; g < 2; g++) {
        float mine = upper ? sums[g + 2] : sums[g];
        two[g] = mine + __shfl_xor_sync(ALL, upper ? sums[g] : sums[g + 2], 8);
    }
    float sum = (odd ? two[1] : two[0]) + __shfl_xor_sync(ALL, odd ? two[0] : two[1], 4);
    sum += __shfl_xor_sync(ALL, sum, 2);
    return sum + __shfl_xor_sync(ALL, sum, 1);
}
// The query whose sum a lane gets, -1 for all but one lane of a query.
__device__ __forceinline__ int query_of_lane() { return lane() % 4 == 0 ? lane() % LANES / 4 : -1; }

// A lane's dims of the queries, from dim i on.
struct QueryParts {
    float4 parts[PARTS][QUERIES];
    __device__ __forceinline__ QueryParts(const float (&queries)[QUERIES][MOST_DIM], int i) {
#pragma unroll
        for (int k = 0; k < PARTS; k++) {
#pragma unroll
            for (int g = 0; g < QUERIES; g++) {
                parts[k][g] = *reinterpret_cast<const float4*>(&queries[g][i + dim_of_part(k)]);
            }
        }
    }
    __device__ __forceinline__ void add(float (&sums)[QUERIES], int k, const float4& row) const {
#pragma unroll
        for (int g = 0; g < QUERIES; g++) {
            add_dims(sums[g], parts[k][g], row);
        }
    }
};

constexpr int ROWS = 3; // of the table that a lane has a part of at a time, 96 of a thread block

// of_dim[g][d] = sum over i of query[g][i] * table[d][i]; of_dim[g][most] the same with the centre.
struct Projection {
    const float* own;    // the lane's first dims of its first row
    const float* centre; // the same of the last row
    float4 parts[ROWS][PARTS];

    // The lane's first row; the next ones are 2 * WARPS apart.
    __device__ __forceinline__ static int row() { return static_cast<int>(threadIdx.x / LANES); }
    __device__ __forceinline__ Projection(const Tables& tables, int head) {
        own = pinned_here(tables.query(head), row() * tables.dim + dim_of_part(0));
        centre = pinned_here(tables.centre(head), dim_of_part(0));
    }
    // From row `base` and dim i on.
    __device__ __forceinline__ void ask(const Tables& tables, int base, int i) {
        const float* from = own + base * tables.dim + i;
#pragma unroll
        for (int n = 0; n < ROWS; n++) {
            int d = base + row() + n * 2 * WARPS;
            const float* at = d == tables.most ? centre + i : from + n * 2 * WARPS * tables.dim;
            int left = tables.are_there() && d <= tables.most ? tables.dim - i - dim_of_part(0) : 0;
#pragma unroll
            for (int k = 0; k < PARTS; k++) {
                parts[n][k] = make_float4(0, 0, 0, 0);
                if (left > 4 * LANES * k) {
                    parts[n][k] = *reinterpret_cast<const float4*>(at + 4 * LANES * k);
                }
            }
        }
    }
    // The first of them are asked for.
    __device__ __forceinline__ void run(const Tables& tables, const float (&queries)[QUERIES][MOST_DIM], float* of_dim) {
#pragma unroll 1
        for (int base = 0; base <= tables.most; base += ROWS * 2 * WARPS) {
            float sums[ROWS][QUERIES] = {};
#pragma unroll 1
            for (int i = 0; i < tables.dim; i += DIMS) {
                if (base + i > 0) {
                    ask(tables, base, i);
                }
                QueryParts own(queries, i); // times 0 past the last dim
#pragma unroll
                for (int n = 0; n < ROWS; n++) {
#pragma unroll
                    for (int k = 0; k < PARTS; k++) {
                        own.add(sums[n], k, parts[n][k]);
                    }
                }
            }
            int g = query_of_lane();
#pragma unroll
            for (int n = 0; n < ROWS; n++) {
                float sum = over_dims(sums[n]);
                int d = base + row() + n * 2 * WARPS;
                if (g >= 0 && d <= tables.most) {
                    of_dim[g * (tables.most + 1) + d] = sum;
                }
            }
        }
    }
};
