// Functions for the instructions that C++ cannot express. The exchange kernels have no other inline
// assembly. tests/emulation has the same functions for a CPU (MOE_A2A_EMULATION), so all other
// kernel code is the same on the emulator and on GPUs.
#pragma once

#ifdef MOE_A2A_EMULATION
#include "primitives.h"  // in tests/emulation
#else

#include <cstdint>

#define MOE_A2A_DYNAMIC_SHARED(alignment, type, name) \
  extern __shared__ __align__(alignment)              \
  type name[]

// A run of the emulator can leave out one barrier, and a test must detect this. Barrier functions
// therefore have the parameter MOE_A2A_CALL_SITE, and do nothing if MOE_A2A_IS_LEFT_OUT is true.
#define MOE_A2A_CALL_SITE
#define MOE_A2A_IS_LEFT_OUT false

namespace moe_a2a {

// ---- Memory that other threads change. A function's name contains the memory order and scope.

__device__ inline uint64_t load_acquire_sys(const uint64_t* address) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

__device__ inline uint64_t load_relaxed_sys(const uint64_t* address) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

__device__ inline void store_release_sys(uint64_t* address, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ inline void store_relaxed_sys(uint64_t* address, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ inline void fence_acq_rel_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// Increments a counter, which wraps to 0 after `last`, and returns its old value. The access
// acquires and releases, so the block that increments last sees the work of all other blocks.
__device__ inline uint32_t arrive(uint32_t* counter, uint32_t last) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(last)
               : "memory");
  return before;
}

// Reads a counter that other blocks increment. Does not order other accesses.
__device__ inline uint32_t peek(const uint32_t* counter) {
  return *const_cast<const volatile uint32_t*>(counter);
}

// Reads a vector that is used once. Allocates no L1 line, and avoids the non-coherent cache.
__device__ inline uint4 load_no_allocate(const uint4* address) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address)
               : "memory");
  return v;
}

// Waits at barrier `index` for `num_threads` threads of the block. The threads must be whole warps.
__device__ inline void sync_named(int index, int num_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(index), "r"(num_threads) : "memory");
}

// ---- Bulk copies between global and shared memory.

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Initializes an mbarrier that counts one load at a time.
__device__ inline void init_load_barrier(uint64_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}
// Makes initialized mbarriers visible to bulk copies.
__device__ inline void fence_load_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Starts a bulk load. The end of the load completes a phase of `load_barrier`.
__device__ inline void bulk_load(char* shared_to, const char* from, uint32_t bytes,
                                 uint64_t* load_barrier) {
  const uint32_t barrier = shared_address(load_barrier);
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(shared_to)),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
// Waits until the phase of `load_barrier` with this parity is complete.
__device__ inline void wait_until_loaded(uint64_t* load_barrier, uint32_t parity) {
  const uint32_t barrier = shared_address(load_barrier);
  uint32_t done = 0;
  while (!done) {
    asm volatile(
        "{\n\t.reg .pred p;\n\t"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
        "selp.u32 %0, 1, 0, p;\n\t}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  }
}

// Fences: order this thread's ordinary accesses and its acquires before its later bulk copies.
__device__ inline void fence_global_for_bulk() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
__device__ inline void fence_shared_for_bulk() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The thread that starts bulk stores must end their group and wait for it.
__device__ inline void bulk_store(char* to, const char* shared_from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(shared_from)), "r"(bytes)
               : "memory");
}
__device__ inline void end_store_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until all groups except the last kPending have read their shared memory.
template <int kPending>
__device__ inline void wait_until_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// Waits until all groups are complete and visible to this thread.
__device__ inline void wait_until_stored() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

__device__ inline uint64_t global_time_ns() {
  uint64_t time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}

// Returns a * b. Subnormal factors and products become zeros of their sign.
__device__ inline float multiply_flushed(float a, float b) {
  float product;
  asm("mul.rn.ftz.f32 %0, %1, %2;" : "=f"(product) : "f"(a), "f"(b));
  return product;
}

}  // namespace moe_a2a

#endif  // MOE_A2A_EMULATION
