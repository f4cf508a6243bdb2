#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

namespace moe_a2a {

// An object for each device. A thread may call Find() while another thread calls Publish().
template <typename T>
class PerDevice {
 public:
  ~PerDevice() {
    for (const Node* node = newest_; node != nullptr;) delete std::exchange(node, node->older);
  }

  const T* Find(int32_t ordinal) const {
    const Node* node = newest_.load(std::memory_order_acquire);
    while (node != nullptr && node->ordinal != ordinal) node = node->older;
    return node == nullptr ? nullptr : node->object.get();
  }

  // Does not destroy the device's earlier objects, because other threads may use them.
  const T* Publish(int32_t ordinal, std::unique_ptr<const T> object) {
    auto* node = new Node{ordinal, std::move(object), newest_.load(std::memory_order_relaxed)};
    while (!newest_.compare_exchange_weak(node->older, node, std::memory_order_release,
                                          std::memory_order_relaxed)) {
    }
    return node->object.get();
  }

 private:
  struct Node {
    const int32_t ordinal;
    const std::unique_ptr<const T> object;
    const Node* older;
  };

  std::atomic<const Node*> newest_{nullptr};
};

}  // namespace moe_a2a
