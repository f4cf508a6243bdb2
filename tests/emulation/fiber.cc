#include "fiber.h"

#ifdef MOE_A2A_EMULATION_TSAN
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void __tsan_read_range(void* address, unsigned long bytes);
void __tsan_write_range(void* address, unsigned long bytes);
}
#endif

#if !defined(__x86_64__)
#error \
    "The emulator switches stacks by x86-64 instructions. Add the few lines for this processor to fiber.cc."
#endif

// Pushes the callee-saved registers onto the old stack, and pops them from the new one.
extern "C" void moe_a2a_switch_stack(void** save, void* load);
asm(R"(.text
.globl moe_a2a_switch_stack
.type moe_a2a_switch_stack,@function
moe_a2a_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size moe_a2a_switch_stack,.-moe_a2a_switch_stack
)");

namespace emulation {
namespace {
constexpr int kSavedRegisters = 6;
constexpr unsigned kNoOrder = 1;  // of __tsan_switch_to_fiber: the switch orders no memory
}  // namespace

void Fiber::start(char* stack, size_t stack_bytes, void (*entry)()) {
  auto** top = reinterpret_cast<void**>(stack + stack_bytes - 64);
  *--top = nullptr;  // a null return address; it also aligns the stack as a call would
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < kSavedRegisters; ++i) *--top = nullptr;
  stack_pointer_ = top;
#ifdef MOE_A2A_EMULATION_TSAN
  if (sanitizer_ == nullptr) sanitizer_ = __tsan_create_fiber(0);
#endif
}

Fiber::~Fiber() {
#ifdef MOE_A2A_EMULATION_TSAN
  if (sanitizer_ != nullptr) __tsan_destroy_fiber(sanitizer_);
#endif
}

void Fiber::switch_to() {
#ifdef MOE_A2A_EMULATION_TSAN
  caller_sanitizer_ = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(sanitizer_, kNoOrder);
#endif
  moe_a2a_switch_stack(&caller_stack_pointer_, stack_pointer_);
}

void Fiber::switch_back() {
#ifdef MOE_A2A_EMULATION_TSAN
  __tsan_switch_to_fiber(caller_sanitizer_, kNoOrder);
#endif
  moe_a2a_switch_stack(&stack_pointer_, caller_stack_pointer_);
}

Proxy::Proxy() {
#ifdef MOE_A2A_EMULATION_TSAN
  sanitizer_ = __tsan_create_fiber(0);
#endif
}

Proxy::~Proxy() {
#ifdef MOE_A2A_EMULATION_TSAN
  __tsan_destroy_fiber(sanitizer_);
#endif
}

void Proxy::begin() {
#ifdef MOE_A2A_EMULATION_TSAN
  caller_ = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(sanitizer_, kNoOrder);
#endif
}

void Proxy::end() {
#ifdef MOE_A2A_EMULATION_TSAN
  __tsan_switch_to_fiber(caller_, kNoOrder);
#endif
}

void publish(void* word) {
#ifdef MOE_A2A_EMULATION_TSAN
  __tsan_release(word);
#else
  (void)word;
#endif
}

void observe(void* word) {
#ifdef MOE_A2A_EMULATION_TSAN
  __tsan_acquire(word);
#else
  (void)word;
#endif
}

void see_read(const void* address, size_t bytes) {
#ifdef MOE_A2A_EMULATION_TSAN
  __tsan_read_range(const_cast<void*>(address), bytes);
#else
  (void)address, (void)bytes;
#endif
}

void see_write(void* address, size_t bytes) {
#ifdef MOE_A2A_EMULATION_TSAN
  __tsan_write_range(address, bytes);
#else
  (void)address, (void)bytes;
#endif
}

}  // namespace emulation
