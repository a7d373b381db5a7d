// Bulk copies into shared memory that complete on barriers, and shared loads (sm_90 and newer).
#pragma once

__device__ __forceinline__ void init_barriers(u32 at, int count) {
  for (int i = 0; i < count; i++) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at + i * 8) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nAGAIN:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra AGAIN;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Units are read once: they should leave the second-level cache first (1 to 3 %).
__device__ __forceinline__ u64 evict_first() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ void copy_bulk(u32 to, const u8* from, u32 bytes, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// Shared memory that bulk copies filled, and whose barrier was waited for, to global memory.
__device__ __forceinline__ void store_bulk(u8* to, u32 from, u32 bytes) {
  asm volatile(
      "fence.proxy.async.shared::cta;\ncp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n"
      "cp.async.bulk.commit_group;" ::"l"(to),
      "r"(from), "r"(bytes)
      : "memory");
}

// What this thread stored so was read: its place may be written again.
__device__ __forceinline__ void wait_stored() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

__device__ __forceinline__ uint2 load_shared8(u32 at) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at) : "memory");
  return v;
}

__device__ __forceinline__ uint4 load_shared16(u32 at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
  return v;
}

__device__ __forceinline__ void swap_if(bool swap, uint2& a, uint2& b) {
  const uint2 old = a;
  a = make_uint2(swap ? b.x : a.x, swap ? b.y : a.y);
  b = make_uint2(swap ? old.x : b.x, swap ? old.y : b.y);
}

__device__ __forceinline__ void swap_if(bool swap, uint4& a, uint4& b) {
  const uint4 old = a;
  a = make_uint4(swap ? b.x : a.x, swap ? b.y : a.y, swap ? b.z : a.z, swap ? b.w : a.w);
  b = make_uint4(swap ? old.x : b.x, swap ? old.y : b.y, swap ? old.z : b.z, swap ? old.w : b.w);
}

// An 8 x 8 matrix of 16-bit elements over a warp, transposed.
__device__ __forceinline__ u32 transpose(u32 a) {
  u32 r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(a));
  return r;
}

// Not sunk to its use, as a plain load would be.
__device__ __forceinline__ int load_int(const int* from) {
  int v;
  asm volatile("ld.global.s32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}
