// What all kernels share: integer types, BF16, 16-byte accesses, warp reductions. No CUDA header is
// needed, so that a first start compiles in tens of milliseconds.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

constexpr int WARP = 32;
constexpr u32 ALL = 0xffffffffu;

// BF16 is the upper half of a float32 (hsswap/bf16.py).
__device__ __forceinline__ float bf16_low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float bf16_high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ float bf16_to_float(u16 code) {
    return __uint_as_float(static_cast<u32>(code) << 16);
}

// An item of K, V or queries: FP16 if that is 1, else BF16.
#ifndef FP16
#define FP16 0
#endif
__device__ __forceinline__ float half_to_float(u16 code) {
#if FP16
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(code));
    return wide;
#else
    return bf16_to_float(code);
#endif
}

// To nearest, ties to even; NaN stays NaN. As hsswap.bf16.from_float32.
__device__ __forceinline__ u16 float_to_bf16(float value) {
    u32 bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return static_cast<u16>((bits >> 16) | 0x40u);
    }
    return static_cast<u16>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Loads and stores of N bytes, N one of 2 and 16. `volatile` and the clobber keep loads ahead of the
// stores that follow them in the source, and so in flight together.
template <int N> struct Chunk;
template <> struct Chunk<2> { u16 a; };
template <> struct Chunk<16> { u32 a, b, c, d; };

__device__ __forceinline__ void load_chunk(Chunk<16>& out, const u8* from) {
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out.a), "=r"(out.b), "=r"(out.c), "=r"(out.d)
                 : "l"(from)
                 : "memory");
}
__device__ __forceinline__ void load_chunk(Chunk<2>& out, const u8* from) {
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(out.a) : "l"(from) : "memory");
}
__device__ __forceinline__ void store_chunk(u8* to, const Chunk<16>& value) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(value.a), "r"(value.b),
                 "r"(value.c), "r"(value.d)
                 : "memory");
}
__device__ __forceinline__ void store_chunk(u8* to, const Chunk<2>& value) {
    asm volatile("st.global.u16 [%0], %1;" ::"l"(to), "h"(value.a) : "memory");
}

// For kernels that are launched to follow (programmatic dependent launch, sm_90), in two parts: what was
// launched before has run, and its writes are seen; and what is launched next may take its place on the
// chip, where it waits here. Launched otherwise they change nothing.
__device__ __forceinline__ void wait_for_last() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void launch_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Words by which a kernel tells the next one, which has begun early. Each says no more than itself, and until it is known
// what nothing else is: select_few, of what is chosen, its slot, and whether it is missing.
constexpr int UNTOLD = -(1 << 30), MISSING_UNTOLD = 2;
__device__ __forceinline__ int load_relaxed(const int* from) {
    int value;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}
__device__ __forceinline__ u8 load_relaxed(const u8* from) {
    u32 value;
    asm volatile("ld.relaxed.gpu.global.u8 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return static_cast<u8>(value);
}
__device__ __forceinline__ void store_relaxed(u8* to, u32 value) {
    asm volatile("st.relaxed.gpu.global.u8 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
__device__ __forceinline__ void store_relaxed(int* to, int value) {
    asm volatile("st.relaxed.gpu.global.s32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

// While a kernel waits for the one ahead: its own read of the place finds the way there known, and the parameters that say
// where it is. What lies there may still change.
__device__ __forceinline__ void prefetch(const void* place) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(place) : "memory");
}

// Both, before a kernel touches memory.
__device__ __forceinline__ void follow() {
    wait_for_last();
    launch_next();
}

// The larger one, NaN if either is (as NumPy's maximum).
__device__ __forceinline__ float max_nan(float a, float b) {
    float out;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
    return out;
}

__device__ __forceinline__ int lane_index() { return static_cast<int>(threadIdx.x) % WARP; }
