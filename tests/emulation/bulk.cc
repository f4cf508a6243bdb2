#include "bulk.h"

#include <cstdlib>
#include <vector>

#include "block.h"
#include "fiber.h"

namespace emulation {
namespace {

struct Copy {
  char* to;
  const char* from;
  uint32_t bytes;
  uint64_t* barrier;  // null for a store
  int group;
  char* data;  // null until the bytes have been read
  bool is_finished;

  bool reads_from(const char* begin, uint32_t size) const {
    return data == nullptr && !is_finished && from < begin + size && begin < from + bytes;
  }
};

void check_words(const char* to, const char* from, uint32_t bytes) {
  const auto bits = reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | bytes;
  if (bits % 16 != 0 || bytes == 0) die("a bulk copy that is not of 16-byte words");
}

}  // namespace

struct BulkCopies {
  std::vector<Copy> loads, stores;
  int open_group = 0;  // the group of the next stores
  // Shared and global memory have separate proxies, because a fence for one does not order the
  // other.
  Proxy shared, global;
  char global_fence = 0, barrier_fence = 0, done = 0;
};

namespace {

BulkCopies& own_copies() {
  BulkCopies* copies = bulk_copies();
  if (copies == nullptr) die("a thread without an mbarrier makes a bulk copy");
  return *copies;
}

void make_copies() {
  BulkCopies* copies = bulk_copies() = new BulkCopies();
  for (Proxy* proxy : {&copies->shared, &copies->global}) proxy->run([] { observe_start(); });
}

void copy_unseen(char* to, const char* from, uint32_t bytes) {
  for (uint32_t i = 0; i < bytes; ++i) to[i] = from[i];
}

// observe_fences() must have run at the copy's start.
void read(BulkCopies& own, Copy& copy) {
  if (copy.data != nullptr || copy.is_finished) return;
  (copy.barrier != nullptr ? own.global : own.shared).run([&] { see_read(copy.from, copy.bytes); });
  copy.data = static_cast<char*>(std::malloc(copy.bytes));
  copy_unseen(copy.data, copy.from, copy.bytes);
}

void finish(BulkCopies& own, Copy& copy) {
  if (copy.is_finished) return;
  read(own, copy);
  (copy.barrier != nullptr ? own.shared : own.global).run([&] { see_write(copy.to, copy.bytes); });
  copy_unseen(copy.to, copy.data, copy.bytes);
  std::free(copy.data);
  copy.data = nullptr;
  copy.is_finished = true;
}

// Orders the proxies' next accesses after all accesses that fences have published.
void observe_fences(BulkCopies& own) {
  own.global.run([&] { observe(&own.global_fence); });
  own.shared.run([&] { observe(shared_fence_of_block()); });
}

// Orders the thread's next accesses after all earlier accesses of the proxies.
void observe_proxies(BulkCopies& own) {
  for (Proxy* proxy : {&own.shared, &own.global}) {
    proxy->run([&] { publish(&own.done); });
  }
  observe(&own.done);
}

}  // namespace

void end_bulk_copies(BulkCopies* copies) {
  if (copies == nullptr) return;
  if (!copies->stores.empty()) die("a thread leaves while its bulk stores are under way");
  if (!copies->loads.empty()) die("a thread leaves while its bulk loads are under way");
  delete copies;
}

// In the emulator, the value of an mbarrier is the number of its phases that have ended.
void init_load_barrier(uint64_t* barrier) {
  if (bulk_copies() == nullptr) make_copies();
  see_write(barrier, sizeof(*barrier));
  *barrier = 0;
}

void fence_load_barriers() { publish(&own_copies().barrier_fence); }

void start_load(char* to, const char* from, uint32_t bytes, uint64_t* barrier) {
  check_words(to, from, bytes);
  BulkCopies& own = own_copies();
  for (const Copy& load : own.loads) {
    if (load.barrier == barrier) die("two bulk loads at once at one mbarrier");
    if (load.to < to + bytes && to < load.to + load.bytes)
      die("two bulk loads at once into one stage");
  }
  for (const Copy& store : own.stores) {
    if (store.reads_from(to, bytes)) die("a bulk load into memory that a bulk store still reads");
  }
  Copy load = {to, from, bytes, barrier, 0, nullptr, false};
  observe_fences(own);
  own.shared.run([&] {
    observe(&own.barrier_fence);
    see_read(barrier, sizeof(*barrier));
  });
  if (one_in(2)) read(own, load);
  own.loads.push_back(load);
}

void finish_load(uint64_t* barrier, uint32_t parity) {
  BulkCopies& own = own_copies();
  for (size_t i = 0; i < own.loads.size(); ++i) {
    if (own.loads[i].barrier != barrier) continue;
    finish(own, own.loads[i]);
    own.loads.erase(own.loads.begin() + static_cast<long>(i));
    ++*barrier;
    break;
  }
  if (*barrier % 2 == parity) die("a wait for a bulk load that was not started");
  observe_proxies(own);
}

void start_store(char* to, const char* from, uint32_t bytes) {
  check_words(to, from, bytes);
  if (bulk_copies() == nullptr) {
    make_copies();
    // A thread without bulk loads has no BulkCopies before its first store, so its earlier fences
    // were not recorded. Assume that it has executed the necessary fences.
    publish(&bulk_copies()->global_fence);
  }
  BulkCopies& own = own_copies();
  Copy store = {to, from, bytes, nullptr, own.open_group, nullptr, false};
  observe_fences(own);
  if (one_in(4)) {
    finish(own, store);
  } else if (one_in(3)) {
    read(own, store);
  }
  own.stores.push_back(store);
}

void end_store_group() {
  if (bulk_copies() != nullptr) ++bulk_copies()->open_group;
}

void wait_until_read(int pending_groups) {
  BulkCopies& own = own_copies();
  for (Copy& store : own.stores) {
    if (store.group < own.open_group - pending_groups) read(own, store);
  }
  observe_proxies(own);
}

void wait_until_stored() {
  if (bulk_copies() == nullptr) return;  // the thread has made no copies
  BulkCopies& own = own_copies();
  for (Copy& store : own.stores) {
    if (store.group >= own.open_group) die("a wait for bulk stores that are in no group yet");
    finish(own, store);
  }
  own.stores.clear();
  observe_proxies(own);
}

void fence_global_for_bulk() {
  if (bulk_copies() != nullptr) publish(&bulk_copies()->global_fence);
}

void fence_shared_for_bulk() { publish(shared_fence_of_block()); }

}  // namespace emulation
