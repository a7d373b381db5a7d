// codes_mass_any: codes_mass.cu for blocks of any number of tokens, a lane a token, without tensor cores.
//
// Grid: (x, H, query groups of QUERIES); a warp a block. Shared memory: a head's weights, a query a component,
// 256 bytes a plane, and a float a query and dim. NumPy reference: hsswap.codec.logits_of and log_mass.
#include "codes_resident.cuh"

constexpr int BLOCKS_AN_SM = 1; // 128 registers a thread

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_AN_SM)
    codes_mass_any(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) float4 weights[]; // [16 P], a query a component
    __shared__ __align__(16) float queries[QUERIES][MOST_DIM];
    __shared__ Range range;
    __shared__ Resident resident;
    follow();
    int head = blockIdx.y;
    int first_query = blockIdx.z * QUERIES;
    int count = min(QUERIES, p.group - first_query);
    int first = blockIdx.x * p.span;
    Lists lists(p, head, first);
    Queries own_queries(p, head * p.group + first_query);
    Projection projection(p.tables, head);
    lists.ask(p, head, first);
    own_queries.ask(p, count);
    projection.ask(p.tables, 0, 0);
    Items items(p, blockIdx.x);
    int planes = p.tables.are_there() ? p.tables.plane_count(head) : 0;
    float* of_dim = reinterpret_cast<float*>(weights + PLANE_BITS * p.tables.planes);
    int row = p.tables.most + 1;
    own_queries.put(queries);
    if (threadIdx.x < QUERIES) {
        resident.sums[threadIdx.x] = {-INFINITE, 0.0f};
    }
    resident.clear();
    range.clear(first);
    __syncthreads();
    items.put(p, head, resident);
    lists.put(p, range, [&](int block, int slot) { items.find(block, slot, resident); });
    __syncthreads();
    Keys keys;
    bool has_items = keys.has_items(resident);
    if (has_items) {
        keys.ask(p, resident, threadIdx.x / WARP, 0);
    }
    if (planes > 0) {
        projection.run(p.tables, queries, of_dim);
    }
    if (has_items) {
        add_keys(p, items, keys, queries, resident);
    }
    __syncthreads();
    if (threadIdx.x < PAIRS * WARP) {
        join_keys(p, head, first_query, count, resident);
    }
    for (int k = threadIdx.x; k < PLANE_BITS * planes; k += THREADS) {
        const float* from = of_dim + p.tables.dim_of(head)[k];
        float power = static_cast<float>(1 << p.tables.bit_of(head)[k]);
        weights[k] = make_float4(from[0] * power, from[row] * power, from[2 * row] * power, from[3 * row] * power);
    }
    int q = lane() < count ? head * p.group + first_query + lane() : -1;
    Sums sums{{NOTHING, 0.0f}, {NOTHING, 0.0f}};
    __syncthreads();
    for (;;) {
        int blocks = min(p.span, p.blocks - first);
        for (int i = threadIdx.x / WARP; i < blocks; i += WARPS) {
            const u16* codes = reinterpret_cast<const u16*>(range.rows[i]);
            Known known(p, q, range, first, i);
            float mine = -INFINITE;
            if (codes != nullptr) {
                Sum own[QUERIES];
#pragma unroll
                for (int g = 0; g < QUERIES; g++) {
                    own[g] = Sum{-INFINITE, 0.0f};
                }
                for (int t = lane(); t < p.block_size; t += WARP) {
                    float logits[QUERIES] = {};
                    for (int plane = 0; plane < planes; plane++) {
                        u32 word = codes[plane * p.block_size + t];
#pragma unroll
                        for (int k = 0; k < PLANE_BITS; k++) {
                            float bit = static_cast<float>(word >> k & 1u);
                            float4 four = weights[plane * PLANE_BITS + k];
                            logits[0] = fmaf(bit, four.x, logits[0]);
                            logits[1] = fmaf(bit, four.y, logits[1]);
                            logits[2] = fmaf(bit, four.z, logits[2]);
                            logits[3] = fmaf(bit, four.w, logits[3]);
                        }
                    }
#pragma unroll
                    for (int g = 0; g < QUERIES; g++) {
                        own[g].add(logits[g]);
                    }
                }
#pragma unroll
                for (int g = 0; g < QUERIES; g++) {
                    float top = own[g].best;
                    for (int step = WARP / 2; step > 0; step /= 2) {
                        top = fmaxf(top, __shfl_xor_sync(ALL, top, step));
                    }
                    float total = own[g].best == -INFINITE ? own[g].total : own[g].total * __expf(own[g].best - top);
                    for (int step = WARP / 2; step > 0; step /= 2) {
                        total += __shfl_xor_sync(ALL, total, step);
                    }
                    if (lane() == g) {
                        mine = top + __logf(total);
                    }
                }
            }
            if (q >= 0) {
                float constant = codes == nullptr ? 0.0f : of_dim[lane() * row + p.tables.most];
                float correction = p.first ? 0.0f : *remembered(p.correction, p, q, first + i);
                settle(p, q, first + i, mine + constant, correction, known, sums);
            }
        }
        first += gridDim.x * p.span;
        if (first >= p.blocks) {
            break;
        }
        stage_next(p, head, first, range);
    }
    add_more_items(p, head, first_query, count, queries, resident);
    finish(p, head, first_query, count, sums, resident);
    forget_the_rest(p, head, first_query, count);
}
