// Codes on their way to the tiles of codes_mass.cu.
#pragma once
#include "codes_weights.cuh"

constexpr int TILE = 8;   // blocks of a warp at a time
constexpr int STAGES = 2; // of a warp's codes
constexpr int CHUNKS = 4 * ROUND; // of 16 bytes, of a block

// What is on its way: 16 tokens of a round's planes of a warp's blocks, half a plane a chunk, in an order in which lanes
// neither write nor read one bank together; and, with the last of a block, what is remembered of it.
struct Part {
    uint4 codes[WARPS][TILE][CHUNKS];
    float correction[THREADS];

    __device__ __forceinline__ static int place(int block, int chunk) { return chunk ^ (block % 2 + chunk / 8 * 2); }
};

// `bytes` of N bytes, zeros for the others.
template <int N> __device__ __forceinline__ void copy(u32 to, const void* from, int bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(N), "r"(bytes) : "memory");
}

// STAGES parts of a head's codes in turns, asked for in the order in which they are needed: for 8 blocks, 16 tokens at a
// time, the rounds of planes. A head of several rounds has two turns of all of them, each for half of the tokens:
// registers hold the logits of no more.
struct Ring {
    Part* parts;
    int planes, stage;
    int tile, token, turn; // of the part to be asked for next

    __device__ __forceinline__ void ask(const Params& p, const Range& range, int first, int query) {
        int chunk = lane() % CHUNKS, upper = lane() / CHUNKS; // of blocks 2 k + upper
        int rounds = rounds_of(planes);
        int plane = 2 * ROUND * (turn < rounds ? turn : turn - rounds) + chunk / 2;
        u32 bytes = plane < planes ? 16 : 0;
        int offset = 2 * (plane * p.block_size + token) + chunk % 2 * 16;
        const uint4* own = &parts[stage].codes[threadIdx.x / WARP][upper][Part::place(upper, chunk)];
        u32 to = static_cast<u32>(__cvta_generic_to_shared(own));
        if (tile < p.span) {
            u64 rows[TILE / 2];
#pragma unroll
            for (int k = 0; k < TILE / 2; k++) {
                rows[k] = range.rows[tile + 2 * k + upper];
            }
#pragma unroll
            for (int k = 0; k < TILE / 2; k++) {
                copy<16>(to + k * 2 * CHUNKS * 16, reinterpret_cast<const u8*>(rows[k]) + offset, rows[k] != 0 ? bytes : 0);
            }
        }
        turn++;
        if (turn >= (rounds > 1 ? 2 * rounds : 1)) {
            turn = 0;
            token += 16;
            if (token >= p.block_size) {
                int i = tile + lane() / 4;
                bool is_there = query >= 0 && p.first == 0 && first + i < p.blocks;
                u32 at = static_cast<u32>(__cvta_generic_to_shared(&parts[stage].correction[threadIdx.x]));
                copy<4>(at, remembered(p.correction, p, query, first + i), is_there ? 4 : 0);
                token = 0;
                tile += TILE * WARPS;
            }
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    __device__ __forceinline__ void begin(const Params& p, const Range& range, int first, int query) {
        tile = static_cast<int>(threadIdx.x / WARP) * TILE;
        token = turn = 0;
#pragma unroll 1
        for (int k = 0; k < STAGES - 1; k++) {
            ask(p, range, first, query);
        }
    }
    // The next part; the one taken before it is given up.
    __device__ __forceinline__ const Part& take(const Params& p, const Range& range, int first, int query) {
        __syncwarp(); // it was read by all lanes
        ask(p, range, first, query);
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
        __syncwarp(); // lanes read what others asked for
        return parts[stage]; // the oldest of them
    }
};
