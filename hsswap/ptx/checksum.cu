// checksum: CRC-32 (zlib's) of whole blocks, each from its own seed, many blocks in one launch.
//
// Polynomials over GF(2), reflected as in zlib: bit 31 is x^0. The CRC register after n more bytes B
// is  r * x^(8n) + raw(B),  so parts can be taken apart and put together:
//   - a thread block takes a block in rows of ROW bytes, thread t the 16 bytes at 16 t of each row:
//     s_t = s_t * x^(8 ROW) + raw(chunk)                       (tables; rows are read coalesced)
//   - then the threads of a row are joined, pairs of 1, 2, 4 ... neighbours: left * x^(8 n) + right
//   - the seed: register ~seed at the start is ~seed * x^(8 block_bytes) at the end; the result is ~.
// Block bytes are a multiple of 4096 (config.DISK_ALIGNMENT), so of ROW.
//
// blocks [slots, block_bytes] in mapped or device memory; slots [n] int32, seeds [n] u32; out [n] u32
// with a byte stride. Grid: any number of thread blocks of THREADS, which take blocks in turn. Shared
// memory 21.5 KiB. Tables as in slicing-by-16 (Kounavis and Berry, "A systematic approach to building
// high performance software-based CRC generators", 2005). Reference: hsswap.checksum.crc32_of_blocks.
#include "common.cuh"

struct Params {
    const u8* blocks;
    const int* slots;
    const u32* seeds;
    u8* out;
    i64 out_stride, block_bytes;
    int count;
    u32 row_shift;   // x^(8 ROW)
    u32 block_shift; // x^(8 block_bytes)
    u32 chunk_shift; // x^(8 CHUNK)
};

constexpr u32 POLYNOMIAL = 0xedb88320u;
constexpr int THREADS = 256;
constexpr int CHUNK = 16;
constexpr int ROW = THREADS * CHUNK;
constexpr int AHEAD = 4; // rows whose loads are in flight together

// a * b modulo the polynomial; as multmodp of zlib.
__device__ __forceinline__ u32 multiply(u32 a, u32 b) {
    u32 product = 0;
#pragma unroll 8
    for (int i = 31; i >= 0; i--) {
        product ^= (a >> i & 1u) != 0 ? b : 0;
        b = (b >> 1) ^ ((b & 1u) != 0 ? POLYNOMIAL : 0);
    }
    return product;
}

struct Tables {
    u32 byte[CHUNK][256]; // byte[k][v]: raw(v followed by k zero bytes)
    u32 row[4][256];      // row[k][v]: (v << 8k) * x^(8 ROW)
};

__device__ __forceinline__ void fill(Tables& tables, u32 row_shift) {
    u32 value = threadIdx.x;
#pragma unroll
    for (int bit = 0; bit < 8; bit++) {
        value = (value >> 1) ^ ((value & 1u) != 0 ? POLYNOMIAL : 0);
    }
    tables.byte[0][threadIdx.x] = value;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        tables.row[k][threadIdx.x] = multiply(threadIdx.x << (8 * k), row_shift);
    }
    __syncthreads();
    for (int k = 1; k < CHUNK; k++) {
        value = tables.byte[0][value & 0xffu] ^ (value >> 8);
        tables.byte[k][threadIdx.x] = value;
    }
    __syncthreads();
}

// raw(word followed by `after` zero bytes)
__device__ __forceinline__ u32 raw_word(const Tables& tables, u32 word, int after) {
    return tables.byte[after + 3][word & 0xffu] ^ tables.byte[after + 2][word >> 8 & 0xffu] ^
           tables.byte[after + 1][word >> 16 & 0xffu] ^ tables.byte[after][word >> 24];
}

__device__ __forceinline__ u32 next_row(const Tables& tables, u32 state, const Chunk<16>& chunk) {
    u32 moved = tables.row[0][state & 0xffu] ^ tables.row[1][state >> 8 & 0xffu] ^
                tables.row[2][state >> 16 & 0xffu] ^ tables.row[3][state >> 24];
    return moved ^ raw_word(tables, chunk.a, 12) ^ raw_word(tables, chunk.b, 8) ^
           raw_word(tables, chunk.c, 4) ^ raw_word(tables, chunk.d, 0);
}

// The register of thread 0 .. THREADS-1 joined into the row's, in thread 0.
__device__ __forceinline__ u32 join(u32 state, u32 shift, u32* parts) {
    for (int step = 1; step < WARP; step *= 2) {
        u32 right = __shfl_down_sync(ALL, state, step);
        state = multiply(state, shift) ^ right; // right only where the lane's index divides by 2 step
        shift = multiply(shift, shift);
    }
    if (lane_index() == 0) {
        parts[threadIdx.x / WARP] = state;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int warp = 1; warp < THREADS / WARP; warp++) {
            state = multiply(state, shift) ^ parts[warp];
        }
    }
    __syncthreads();
    return state;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    checksum(const __grid_constant__ Params p) {
    __shared__ Tables tables;
    __shared__ u32 parts[THREADS / WARP];
    fill(tables, p.row_shift);
    int rows = static_cast<int>(p.block_bytes / ROW);
    for (int i = blockIdx.x; i < p.count; i += gridDim.x) {
        const u8* from = p.blocks + p.slots[i] * p.block_bytes + threadIdx.x * CHUNK;
        u32 state = 0;
        for (int row = 0; row < rows; row += AHEAD) {
            Chunk<16> chunks[AHEAD];
#pragma unroll
            for (int k = 0; k < AHEAD; k++) {
                if (row + k < rows) {
                    load_chunk(chunks[k], from + static_cast<i64>(row + k) * ROW);
                }
            }
#pragma unroll
            for (int k = 0; k < AHEAD; k++) {
                if (row + k < rows) {
                    state = next_row(tables, state, chunks[k]);
                }
            }
        }
        state = join(state, p.chunk_shift, parts);
        if (threadIdx.x == 0) {
            u32 seeded = multiply(~p.seeds[i], p.block_shift) ^ state;
            *reinterpret_cast<u32*>(p.out + i * p.out_stride) = ~seeded;
        }
    }
}
