// A fiber has a separate stack. A thread of the operating system runs on this stack until the fiber
// switches back.
//
// For ThreadSanitizer, every fiber is a separate thread. A switch orders no memory: only operations
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
  // Returns to the caller of switch_to(). The fiber itself calls this function.
  void switch_back();

 private:
  void* stack_pointer_ = nullptr;
  void* caller_stack_pointer_ = nullptr;
  void* sanitizer_ = nullptr;  // ThreadSanitizer's handle of the fiber
  void* caller_sanitizer_ = nullptr;
};

// A proxy accesses memory for a thread, but without order relative to the thread's other accesses,
// like a bulk copy. ThreadSanitizer treats a proxy as a separate thread.
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

// For ThreadSanitizer, publish() is a release of a word, and observe() is an acquire of the same
// word.
void publish(void* word);
void observe(void* word);

// Tells ThreadSanitizer that the running thread or proxy reads or writes these bytes.
void see_read(const void* address, size_t bytes);
void see_write(void* address, size_t bytes);

}  // namespace emulation
