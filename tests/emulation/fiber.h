// A fiber runs on its own stack until it switches back. For ThreadSanitizer, every fiber is a
// separate thread, and a switch orders no memory. Operations that order memory on a GPU call
// publish() and observe().
#pragma once

#include <cstddef>

namespace emulation {

class Fiber {
 public:
  Fiber() = default;
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;
  ~Fiber();

  // `entry` must not return: it ends with switch_back().
  void start(char* stack, size_t stack_bytes, void (*entry)());

  void switch_to();
  // Only the running fiber may call this.
  void switch_back();

 private:
  void* stack_pointer_ = nullptr;
  void* caller_stack_pointer_ = nullptr;
  void* sanitizer_ = nullptr;
  void* caller_sanitizer_ = nullptr;
};

// Accesses of a proxy, such as those of bulk copies, have no order relative to its thread's other
// accesses. For ThreadSanitizer, a proxy is a separate thread.
class Proxy {
 public:
  Proxy();
  Proxy(const Proxy&) = delete;
  Proxy& operator=(const Proxy&) = delete;
  ~Proxy();

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

// For ThreadSanitizer, publish() is a release of the word, and observe() is an acquire.
void publish(void* word);
void observe(void* word);

// For ThreadSanitizer, the running thread or proxy reads or writes these bytes.
void see_read(const void* address, size_t bytes);
void see_write(void* address, size_t bytes);

}  // namespace emulation
