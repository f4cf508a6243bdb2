// A run can leave out one call that orders memory or waits (site.h). A release or an acquire then
// becomes relaxed, and a fence or a wait does nothing.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstring>

#include "block.h"
#include "bulk.h"
#include "site.h"

#define MOE_A2A_DYNAMIC_SHARED(alignment, type, name) \
  type* const name = reinterpret_cast<type*>(::emulation::dynamic_shared())

#define MOE_A2A_CALL_SITE ::emulation::Site site = ::emulation::Site::here()
#define MOE_A2A_IS_LEFT_OUT ::emulation::is_left_out(site)

namespace moe_a2a {

using emulation::Site;

inline uint64_t load_acquire_sys(const uint64_t* address, Site site = Site::here()) {
  emulation::yield_sometimes();
  return __atomic_load_n(address,
                         emulation::is_left_out(site) ? __ATOMIC_RELAXED : __ATOMIC_ACQUIRE);
}

inline uint64_t load_relaxed_sys(const uint64_t* address) {
  emulation::yield_sometimes();
  return __atomic_load_n(address, __ATOMIC_RELAXED);
}

inline void store_release_sys(uint64_t* address, uint64_t value, Site site = Site::here()) {
  emulation::take_fence();
  emulation::pause_sometimes();
  __atomic_store_n(address, value,
                   emulation::is_left_out(site) ? __ATOMIC_RELAXED : __ATOMIC_RELEASE);
  emulation::pause_sometimes();
}

// The thread's first store after a fence is a release.
inline void store_relaxed_sys(uint64_t* address, uint64_t value) {
  emulation::pause_sometimes();
  __atomic_store_n(address, value, emulation::take_fence() ? __ATOMIC_RELEASE : __ATOMIC_RELAXED);
  emulation::pause_sometimes();
}

inline void fence_acq_rel_sys(Site site = Site::here()) {
  if (!emulation::is_left_out(site)) emulation::note_fence();
}

inline uint32_t arrive(uint32_t* counter, uint32_t last, Site site = Site::here()) {
  return emulation::count_up(counter, last, !emulation::is_left_out(site));
}

inline uint32_t peek(const uint32_t* counter) { return __atomic_load_n(counter, __ATOMIC_RELAXED); }

inline uint4 load_no_allocate(const uint4* address) {
  uint4 v;
  std::memcpy(&v, __builtin_assume_aligned(address, 16), sizeof(v));
  return v;
}

inline void sync_named(int index, int num_threads) {
  emulation::sync_named(index, static_cast<unsigned>(num_threads));
}

inline void init_load_barrier(uint64_t* barrier) { emulation::init_load_barrier(barrier); }
inline void fence_load_barriers(Site site = Site::here()) {
  if (!emulation::is_left_out(site)) emulation::fence_load_barriers();
}
inline void bulk_load(char* shared_to, const char* from, uint32_t bytes, uint64_t* load_barrier) {
  emulation::start_load(shared_to, from, bytes, load_barrier);
}
inline void wait_until_loaded(uint64_t* load_barrier, uint32_t parity, Site site = Site::here()) {
  if (!emulation::is_left_out(site)) emulation::finish_load(load_barrier, parity);
}

inline void fence_global_for_bulk(Site site = Site::here()) {
  if (!emulation::is_left_out(site)) emulation::fence_global_for_bulk();
}
inline void fence_shared_for_bulk(Site site = Site::here()) {
  if (!emulation::is_left_out(site)) emulation::fence_shared_for_bulk();
}

inline void bulk_store(char* to, const char* shared_from, uint32_t bytes) {
  emulation::start_store(to, shared_from, bytes);
}
inline void end_store_group() { emulation::end_store_group(); }
template <int kPending>
void wait_until_read(Site site = Site::here()) {
  if (!emulation::is_left_out(site)) emulation::wait_until_read(kPending);
}
inline void wait_until_stored(Site site = Site::here()) {
  if (!emulation::is_left_out(site)) emulation::wait_until_stored();
}

inline uint64_t global_time_ns() {
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                   std::chrono::steady_clock::now().time_since_epoch())
                                   .count());
}

inline float multiply_flushed(float a, float b) {
  const auto flushed = [](float v) { return v < 0x1p-126f && v > -0x1p-126f ? v * 0.f : v; };
  return flushed(flushed(a) * flushed(b));
}

}  // namespace moe_a2a
