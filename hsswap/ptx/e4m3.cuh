// FP8 E4M3 codes and the scales of rows of them: the rules of hsswap/e4m3.py, in its words.
#pragma once
#include "common.cuh"

#ifndef E4M3
#define E4M3 0 // 1: K and V in units are E4M3
#endif

// A key of a unit, E4M3 as the FP16 that it is without its scale.
__device__ __forceinline__ float key_to_float(u16 code) {
#if E4M3
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(code));
    return wide;
#else
    return half_to_float(code);
#endif
}

// Two codes, the first one in the low byte, as FP16: exactly.
__device__ __forceinline__ u32 e4m3_to_f16x2(u16 codes) {
    u32 halves;
#if __CUDA_ARCH__ >= 890
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(codes));
#else
    // A code in the upper byte of 16 bits has one bit of exponent less than FP16, and a bias 8 lower.
    u32 wide = __byte_perm(codes, 0, 0x1404);
    u32 is_nan = ((wide & 0x7f007f00u) + 0x01000100u) & 0x80008000u;
    halves = (wide & 0x80008000u) | ((wide & 0x7f007f00u) >> 1);
    asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(halves) : "r"(0x5c005c00u)); // 2^8
    halves |= (is_nan >> 15) * 0x7fffu;
#endif
    return halves;
}

__device__ __forceinline__ float e4m3_to_float(u8 code) {
    u16 half = static_cast<u16>(e4m3_to_f16x2(code));
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(half));
    return wide;
}

// To nearest, ties to even; what is larger than 448 becomes 448, NaN stays NaN.
__device__ __forceinline__ u8 float_to_e4m3(float value) {
    u32 bits = __float_as_uint(value) & 0x7fffffffu;
    u32 sign = __float_as_uint(value) >> 31 << 7;
    u32 code;
    if (bits > 0x7f800000u) {
        code = 0x7f;
    } else if (bits < 0x3c800000u) { // 2^-6: subnormal codes count 2^-9
        code = static_cast<u32>(rintf(__uint_as_float(bits) * 512.0f));
    } else {
        code = ((bits + 0x7ffffu + (bits >> 20 & 1u)) >> 20) - (120u << 3);
        code = code < 0x7eu ? code : 0x7eu;
    }
    return static_cast<u8>(sign | code);
}

// The scale of a row by its largest finite size.
__device__ __forceinline__ float scale_by(float largest) {
    return largest == 0 ? 1.0f : fmaxf(__fdiv_rn(largest, 448.0f), __int_as_float(0x00800000));
}

// 2^exponent, from -126 to 127.
__device__ __forceinline__ float power_of_two(int exponent) {
    return __int_as_float((exponent + 127) << 23);
}
