#include "runtime/descriptor.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <vector>

namespace moe_a2a {
namespace {

// Never destroyed, because the thread of Listen() uses it until the process ends.
struct Registry {
  std::mutex mutex;
  std::vector<int> open;
};

Registry* all = nullptr;  // set before the handlers of fork() are registered

// fork() calls these functions. The mutex is locked during the fork, so the child's list is
// complete. The child may only make calls that are safe in a signal handler: close(), and clear(),
// which frees nothing. A descriptor that is not registered yet stays open in the child.
void BeforeFork() { all->mutex.lock(); }
void InParent() { all->mutex.unlock(); }
void InChild() {
  for (int fd : all->open) close(fd);
  all->open.clear();
  all->mutex.unlock();
}

Registry& registry() {
  static Registry& made = []() -> Registry& {
    all = new Registry();
    pthread_atfork(BeforeFork, InParent, InChild);
    return *all;
  }();
  return made;
}

}  // namespace

Descriptor::Descriptor(int fd) : fd_(fd) {
  if (fd_ < 0) return;
  std::lock_guard<std::mutex> lock(registry().mutex);
  registry().open.push_back(fd_);
}

Descriptor::~Descriptor() {
  if (fd_ < 0) return;
  // Without the lock, a child could close a new descriptor with this number.
  std::lock_guard<std::mutex> lock(registry().mutex);
  auto& open = registry().open;
  const auto at = std::find(open.begin(), open.end(), fd_);
  if (at == open.end()) return;  // in a child, InChild() has closed it
  std::swap(*at, open.back());
  open.pop_back();
  close(fd_);
}

}  // namespace moe_a2a
