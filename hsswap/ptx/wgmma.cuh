// Matrix steps of a warpgroup, tensor-map copies and register shares (sm_90a).
#pragma once

// 128 bytes, made by cuTensorMapEncodeTiled.
struct __align__(64) TensorMap {
  u64 words[16];
};

#define F4(x, n) "+f"(x[n][0]), "+f"(x[n][1]), "+f"(x[n][2]), "+f"(x[n][3])
#define F16(x, n) F4(x, n), F4(x, n + 1), F4(x, n + 2), F4(x, n + 3)
#define F64(x) F16(x, 0), F16(x, 4), F16(x, 8), F16(x, 12)
#define NAMES_64 \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29," \
  "%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57," \
  "%58,%59,%60,%61,%62,%63}"

// An operand in shared memory of 128-byte rows, swizzled: bytes to the next 64 elements across, to the next 8 rows. The
// low word is `place_of` and a number of bytes, by one addition: a longer way to each step's operand takes longer than
// the step.
__device__ __forceinline__ u32 place_of(u32 at, u32 across) { return (at & 0x3ffff) >> 4 | across >> 4 << 16; }

__device__ __forceinline__ u64 operand(u32 place, u32 bytes, u32 down) {
  return (u64)(place + (bytes >> 4)) | (u64)(down >> 4 | 1u << 30) << 32;
}

// The same in every lane, which the compiler should know.
__device__ __forceinline__ u32 uniform(u32 x) { return __shfl_sync(0xffffffffu, x, 0); }

#define S4(x, n) "=f"(x[n][0]), "=f"(x[n][1]), "=f"(x[n][2]), "=f"(x[n][3])
#define S16(x, n) S4(x, n), S4(x, n + 1), S4(x, n + 2), S4(x, n + 3)
#define S64(x) S16(x, 0), S16(x, 4), S16(x, 8), S16(x, 12)
#define STEP "wgmma.mma_async.sync.aligned.m64n128k16.f32." ITEM "." ITEM " " NAMES_64

// c[64 x 128] += a b, both in shared memory, K along the rows' bytes.
__device__ __forceinline__ void step_shared(float (&c)[16][4], u64 a, u64 b) {
  asm volatile(STEP ", %64, %65, 1, 1, 1, 0, 0;" : F64(c) : "l"(a), "l"(b));
}

// c = a b
__device__ __forceinline__ void first_step_shared(float (&c)[16][4], u64 a, u64 b) {
  asm volatile(STEP ", %64, %65, 0, 1, 1, 0, 0;" : S64(c) : "l"(a), "l"(b));
}

// The same with a from registers and b with K along the rows.
__device__ __forceinline__ void step_registers(float (&c)[16][4], const u32 (&a)[4], u64 b) {
  asm volatile(STEP ", {%64,%65,%66,%67}, %68, 1, 1, 1, 1;" : F64(c) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ void first_step_registers(float (&c)[16][4], const u32 (&a)[4], u64 b) {
  asm volatile(STEP ", {%64,%65,%66,%67}, %68, 0, 1, 1, 1;" : S64(c) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ void begin_steps() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_steps() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until the steps are done; c is read only behind this.
__device__ __forceinline__ void wait_steps(float (&c)[16][4]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" : F64(c)::"memory");
}

__device__ __forceinline__ void copy_box(u32 to, const TensorMap* map, int x, int y, int z, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(
          to),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void init_barrier(u32 at, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory");
}
