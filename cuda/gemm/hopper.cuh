// Instructions of compute capability 9.0 for grouped GEMMs. device/ptx.cuh has all others.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "device/ptx.cuh"
#include "device/team.cuh"
#include "gemm/form.h"

namespace moe_a2a::gemm {

__device__ inline uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ inline void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
}

// Returns the address that `pointer` has in the shared memory of block `rank` of the cluster.
__device__ inline uint32_t shared_address_of(const void* pointer, uint32_t rank) {
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(address)
               : "r"(shared_address(pointer)), "r"(rank));
  return address;
}

__device__ inline void init_barrier(uint64_t* barrier, int num_arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(num_arrivals)
               : "memory");
}

__device__ inline void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

__device__ inline void prefetch(const void* data) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(data));
}

// Arrives at `barrier` of block `rank`, with block scope. This scope is enough, because the reads
// of the memory that is overwritten next are complete. Cluster scope needs a fence of all global
// memory, which takes as long as a step of products.
__device__ inline void arrive_at(uint64_t* barrier, uint32_t rank) {
  asm volatile(
      "mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(shared_address_of(barrier, rank))
      : "memory");
}

// Arrives at `barrier` of block `rank`, with cluster scope (slow). Earlier reads of this thread,
// and of threads synchronized with it, precede accesses of block `rank` after its `wait_for<true>`.
__device__ inline void arrive_in_cluster_order(uint64_t* barrier, uint32_t rank) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(
                   shared_address_of(barrier, rank))
               : "memory");
}

// Arrives at this block's barrier, whose phase then also waits for `bytes` of asynchronous copies.
__device__ inline void expect_bytes(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

// Waits for the phase of this block's barrier with this parity. All lanes of a warp call it. All
// see the phase before any lane lets the next phase begin. With kInClusterOrder, later accesses
// come after all accesses that another block made before send() or arrive_in_cluster_order().
// This order is slow.
template <bool kInClusterOrder = false>
__device__ inline void wait_for(uint64_t* barrier, uint32_t parity) {
  if constexpr (kInClusterOrder) {
    uint32_t done = 0;
    while (!done) {
      asm volatile(
          "{\n\t.reg .pred p;\n\t"
          "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n\t"
          "selp.u32 %0, 1, 0, p;\n\t}"
          : "=r"(done)
          : "r"(shared_address(barrier)), "r"(parity)
          : "memory");
    }
  } else {
    wait_until_loaded(barrier, parity);
  }
  __syncwarp();
}

// Returns true if the phase of this block's barrier with this parity is complete. Does not wait.
__device__ inline bool is_complete(uint64_t* barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n\t.reg .pred p;\n\tmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
      "selp.u32 %0, 1, 0, p;\n\t}"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

// A position in a circular buffer of kSize entries, and the parity of the phase of its barriers.
template <int kSize>
struct Cursor {
  int place = 0;
  uint32_t parity = 0;

  __device__ void advance() {
    if (++place == kSize) {
      place = 0;
      parity ^= 1;
    }
  }
};

// Stores `value` in block `rank` of the cluster, and completes a phase of `barrier` there.
__device__ inline void send(int4* to, uint64_t* barrier, uint32_t rank, int4 value) {
  const uint32_t barrier_address = shared_address_of(barrier, rank);
  asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], 16;" ::"r"(barrier_address)
               : "memory");
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.s32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(shared_address_of(to, rank)),
      "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(barrier_address)
      : "memory");
}

// ---- Boxes of tensors of four axes. The first axis is contiguous.

struct Box {
  int32_t c0, c1, c2, c3;
};

__device__ inline void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ inline void load_box(void* to, const CUtensorMap* map, const Box& box,
                                uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(box.c0), "r"(box.c1), "r"(box.c2), "r"(box.c3)
      : "memory");
}

// Loads into both blocks of the cluster. `to` and the barrier have the same address in both.
__device__ inline void load_box_for_both(void* to, const CUtensorMap* map, const Box& box,
                                         uint64_t* barrier) {
  constexpr uint16_t kBoth = 3;
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(box.c0), "r"(box.c1), "r"(box.c2), "r"(box.c3),
      "h"(kBoth)
      : "memory");
}

__device__ inline void store_box(const CUtensorMap* map, const Box& box, const void* from) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
          map),
      "r"(shared_address(from)), "r"(box.c0), "r"(box.c1), "r"(box.c2), "r"(box.c3)
      : "memory");
}

// ---- Matrix products of a warp group: d[64, n] += a[64, 16] b[16, n]; a, b in shared memory.

constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
constexpr uint64_t kEightRows = uint64_t{8 * 128 >> 4} << 32;  // distance of eight rows
constexpr uint64_t kHigh = kSwizzle128 | kEightRows;

// Tells the compiler that all lanes have the same value. Descriptors of operands are then in
// uniform registers, so products need no instructions that move them there.
__device__ inline uint32_t uniform(uint32_t value) { return __shfl_sync(kAllLanes, value, 0); }

// Returns the lower word of an operand's descriptor. kHigh is the upper word.
__device__ inline uint32_t operand_descriptor(const void* shared, Major major) {
  const uint32_t leading = major == Major::kK ? 1 : kBoxBytes >> 4;
  // Higher bits of the address are the block's rank in its cluster.
  const uint32_t address = shared_address(shared) & 0x3FFFF;
  return leading << 16 | address >> 4;
}
// The number to add to a descriptor for the next 16 elements of k.
template <Major kMajor>
constexpr uint32_t kDescriptorStep = (kMajor == Major::kK ? 32 : 16 * 128) >> 4;

__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void end_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until all groups of products except the last kPending are complete.
template <int kPending>
__device__ inline void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Makes the compiler read the first kFirst numbers after this call, and so after an earlier wait.
template <int kFirst, int kSize>
__device__ inline void fence_registers(float (&d)[kSize]) {
#pragma unroll
  for (int i = 0; i < kFirst; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

#define MOE_A2A_REGISTERS_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define MOE_A2A_REGISTERS_32 \
  MOE_A2A_REGISTERS_16       \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define MOE_A2A_REGISTERS_48 \
  MOE_A2A_REGISTERS_32       \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define MOE_A2A_REGISTERS_56 MOE_A2A_REGISTERS_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define MOE_A2A_REGISTERS_60 MOE_A2A_REGISTERS_56 ", %56, %57, %58, %59"
#define MOE_A2A_REGISTERS_64 MOE_A2A_REGISTERS_60 ", %60, %61, %62, %63"
#define MOE_A2A_REGISTERS_68 MOE_A2A_REGISTERS_64 ", %64, %65, %66, %67"
#define MOE_A2A_REGISTERS_72 MOE_A2A_REGISTERS_68 ", %68, %69, %70, %71"
#define MOE_A2A_REGISTERS_80 MOE_A2A_REGISTERS_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define MOE_A2A_REGISTERS_96 \
  MOE_A2A_REGISTERS_80       \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define MOE_A2A_REGISTERS_128                                                          \
  MOE_A2A_REGISTERS_96                                                                 \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, " \
  "%110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, "     \
  "%123, %124, %125, %126, %127"
#define MOE_A2A_OUT_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define MOE_A2A_OUT_8(i) MOE_A2A_OUT_4(i), MOE_A2A_OUT_4(i + 4)
#define MOE_A2A_OUT_16(i) MOE_A2A_OUT_8(i), MOE_A2A_OUT_8(i + 8)
#define MOE_A2A_OUT_32(i) MOE_A2A_OUT_16(i), MOE_A2A_OUT_16(i + 16)
#define MOE_A2A_OUT_48(i) MOE_A2A_OUT_32(i), MOE_A2A_OUT_16(i + 32)
#define MOE_A2A_OUT_56(i) MOE_A2A_OUT_48(i), MOE_A2A_OUT_8(i + 48)
#define MOE_A2A_OUT_60(i) MOE_A2A_OUT_56(i), MOE_A2A_OUT_4(i + 56)
#define MOE_A2A_OUT_64(i) MOE_A2A_OUT_32(i), MOE_A2A_OUT_32(i + 32)
#define MOE_A2A_OUT_68(i) MOE_A2A_OUT_64(i), MOE_A2A_OUT_4(i + 64)
#define MOE_A2A_OUT_72(i) MOE_A2A_OUT_64(i), MOE_A2A_OUT_8(i + 64)
#define MOE_A2A_OUT_96(i) MOE_A2A_OUT_64(i), MOE_A2A_OUT_32(i + 64)
#define MOE_A2A_OUT_128(i) MOE_A2A_OUT_64(i), MOE_A2A_OUT_64(i + 64)
// The asm operands after the registers of `d` have the numbers `a_` to `tb_`.
#define MOE_A2A_PRODUCT(type, n, registers, outputs, a_, b_, p_, ta_, tb_)                   \
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %" p_                                   \
               ", 0;\n\t"                                                                    \
               "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {" registers \
               "}, %" a_ ", %" b_ ", p, 1, 1, %" ta_ ", %" tb_ ";\n\t}"                      \
               : outputs                                                                     \
               : "l"(kHigh | a), "l"(kHigh | b), "r"(static_cast<int32_t>(adds)),            \
                 "n"(static_cast<int>(kA == Major::kMN)), "n"(static_cast<int>(kB == Major::kMN)))

// Starts a product. a and b are descriptors. Unless `adds`, overwrites d[0] to d[kN / 2 - 1].
template <typename T, Major kA, Major kB, int kN, int kSize>
__device__ inline void multiply(float (&d)[kSize], uint32_t a, uint32_t b, bool adds) {
  constexpr bool kIsBf16 = std::is_same_v<T, __nv_bfloat16>;
  static_assert(kIsBf16 || std::is_same_v<T, __half>);
  static_assert(2 * kSize >= kN);
#define MOE_A2A_PRODUCTS(type, n, half, a_, b_, p_, ta_, tb_)                                 \
  else if constexpr (kN == n) {                                                               \
    MOE_A2A_PRODUCT(type, #n, MOE_A2A_REGISTERS_##half, MOE_A2A_OUT_##half(0), #a_, #b_, #p_, \
                    #ta_, #tb_);                                                              \
  }
#define MOE_A2A_EACH_PRODUCT(type)                    \
  if constexpr (false) {                              \
  }                                                   \
  MOE_A2A_PRODUCTS(type, 32, 16, 16, 17, 18, 19, 20)  \
  MOE_A2A_PRODUCTS(type, 64, 32, 32, 33, 34, 35, 36)  \
  MOE_A2A_PRODUCTS(type, 96, 48, 48, 49, 50, 51, 52)  \
  MOE_A2A_PRODUCTS(type, 112, 56, 56, 57, 58, 59, 60) \
  MOE_A2A_PRODUCTS(type, 120, 60, 60, 61, 62, 63, 64) \
  MOE_A2A_PRODUCTS(type, 128, 64, 64, 65, 66, 67, 68) \
  MOE_A2A_PRODUCTS(type, 136, 68, 68, 69, 70, 71, 72) \
  MOE_A2A_PRODUCTS(type, 144, 72, 72, 73, 74, 75, 76) \
  MOE_A2A_PRODUCTS(type, 256, 128, 128, 129, 130, 131, 132)
  if constexpr (kIsBf16) {
    MOE_A2A_EACH_PRODUCT("bf16")
  } else {
    MOE_A2A_EACH_PRODUCT("f16")
  }
#undef MOE_A2A_EACH_PRODUCT
#undef MOE_A2A_PRODUCTS
}
#undef MOE_A2A_PRODUCT

// The asm operands after the registers of `d` have the numbers `a_`, `b_` and `p_`.
#define MOE_A2A_PRODUCT(n, registers, outputs, a_, b_, p_)                                     \
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %" p_                                     \
               ", 0;\n\t"                                                                      \
               "wgmma.mma_async.sync.aligned.m64n" n "k32.f32.e4m3.e4m3 {" registers "}, %" a_ \
               ", %" b_ ", p, 1, 1;\n\t}"                                                      \
               : outputs                                                                       \
               : "l"(kHigh | a), "l"(kHigh | b), "r"(static_cast<int32_t>(adds)))

// Starts a product of FP8 numbers (E4M3): d[64, n] += a[64, 32] b[32, n]. Operands are K-major.
template <int kSize>
__device__ inline void multiply_fp8(float (&d)[kSize], uint32_t a, uint32_t b, bool adds) {
  static_assert(kSize == 32 || kSize == 96);
  if constexpr (kSize == 32) {
    MOE_A2A_PRODUCT("64", MOE_A2A_REGISTERS_32, MOE_A2A_OUT_32(0), "32", "33", "34");
  } else {
    MOE_A2A_PRODUCT("192", MOE_A2A_REGISTERS_96, MOE_A2A_OUT_96(0), "96", "97", "98");
  }
}
#undef MOE_A2A_PRODUCT

// Stores four matrices of 8 x 8 elements to shared memory. Lane i has the address of row i % 8 of
// matrix i / 8. Registers have the layout of a product's results, or of their transpose.
template <bool kTransposed>
__device__ inline void store_matrices(void* row, const uint4& r) {
  if constexpr (kTransposed) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     shared_address(row)),
                 "r"(r.x), "r"(r.y), "r"(r.z), "r"(r.w)
                 : "memory");
  } else {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     shared_address(row)),
                 "r"(r.x), "r"(r.y), "r"(r.z), "r"(r.w)
                 : "memory");
  }
}

__device__ inline void load_matrices(const void* row, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

// Rounds two numbers to T; `low` comes first in memory.
template <typename T>
__device__ inline uint32_t pack(float low, float high) {
  uint32_t bits;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  }
  return bits;
}

template <typename T>
__device__ inline float2 unpack(uint32_t word) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return {__uint_as_float(word << 16), __uint_as_float(word & 0xFFFF0000u)};
  } else {
    return __half22float2(*reinterpret_cast<const __half2*>(&word));
  }
}

// Loads a number, or returns 0 without a load.
__device__ inline float load_if(bool loads, const float* from) {
  float x;
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %2, 0;\n\tmov.f32 %0, 0f00000000;\n\t"
      "@p ld.global.nc.f32 %0, [%1];\n\t}"
      : "=f"(x)
      : "l"(from), "r"(static_cast<int32_t>(loads)));
  return x;
}

// ---- Registers of a warp group. The launch bounds determine the number at the start.

template <int kRegisters>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void release_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace moe_a2a::gemm
