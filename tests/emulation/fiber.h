// A fiber: a stack of its own, on which a thread of the operating system runs until it switches back.
//
// Under ThreadSanitizer every fiber is a thread of its own. Switching orders nothing: only what orders memory on a GPU
// calls publish() and observe().
#pragma once

#include <cstddef>

namespace emulation {

class Fiber {
 public:
  Fiber() = default;
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;
  ~Fiber();

  // Prepares to run entry() on `stack`, for the first time or again. `entry` must not return; it switches back for the
  // last time instead.
  void start(char* stack, size_t stack_bytes, void (*entry)());

  // Continues the fiber until it calls switch_back().
  void switch_to();
  // Returns to the place that called switch_to(). The fiber itself calls it.
  void switch_back();

 private:
  void* stack_pointer_ = nullptr;
  void* caller_stack_pointer_ = nullptr;
  void* sanitizer_ = nullptr;  // ThreadSanitizer's name for the fiber
  void* caller_sanitizer_ = nullptr;
};

// Something that accesses memory for a thread, but in an order of its own, as bulk copies do. To ThreadSanitizer it is
// another thread.
class Proxy {
 public:
  Proxy();
  Proxy(const Proxy&) = delete;
  Proxy& operator=(const Proxy&) = delete;
  ~Proxy();

  // Calls `act()` as this proxy.
  template <typename Act>
  void run(Act&& act) {
    begin();
    act();
    end();
  }

 private:
  void begin();
  void end();
  void *sanitizer_ = nullptr, *caller_ = nullptr;
};

// Everything that a thread has done before publish() is ordered before what another does after
// observe() of the same word.
void publish(void* word);
void observe(void* word);

// Says that the running thread or proxy reads or writes these bytes.
void see_read(const void* address, size_t bytes);
void see_write(void* address, size_t bytes);

}  // namespace emulation
