// Parameters of project and score (score.cu), and of both in one launch (score_tiled.cu).
#pragma once
#include "common.cuh"

struct Params {
    const u8* queries;
    i64 query_stride, element_stride; // bytes
    const u16* matrix;
    float* projected;
    const u16* codes;
    const int* index;
    float* scores;
    i64 score_stride; // floats
    int count, heads, q_heads, block_size, rank, dim;
    float scale;
    int pad;
};
