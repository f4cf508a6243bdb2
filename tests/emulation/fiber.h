// A fiber has a separate stack. When a thread of the operating system switches to a fiber, it runs
// on this stack until the fiber switches back.
//
// For ThreadSanitizer, every fiber is a separate thread, and a switch orders no memory. Operations
// that order memory on a GPU call publish() and observe().
#pragma once

#include <cstddef>

namespace emulation {

class Fiber {
 public:
  Fiber() = default;
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;
  ~Fiber();

  // Prepares to run entry() on `stack`, for the first time or again. `entry` must not return: it
  // ends with switch_back().
  void start(char* stack, size_t stack_bytes, void (*entry)());

  // Continues the fiber until it calls switch_back().
  void switch_to();
  // Returns to the caller of switch_to(). Only the running fiber may call this.
  void switch_back();

 private:
  void* stack_pointer_ = nullptr;
  void* caller_stack_pointer_ = nullptr;
  void* sanitizer_ = nullptr;  // ThreadSanitizer's handle of the fiber
  void* caller_sanitizer_ = nullptr;
};

// A proxy makes accesses of a thread that have no order relative to its other accesses, such as
// those of bulk copies. ThreadSanitizer treats a proxy as a separate thread.
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

// ThreadSanitizer sees publish() as a release of the word, and observe() as an acquire of the word.
void publish(void* word);
void observe(void* word);

// Tells ThreadSanitizer that the running thread or proxy reads or writes these bytes.
void see_read(const void* address, size_t bytes);
void see_write(void* address, size_t bytes);

}  // namespace emulation
