// A file descriptor that is closed with its owner.
#ifndef MOE_A2A_RUNTIME_DESCRIPTOR_H_
#define MOE_A2A_RUNTIME_DESCRIPTOR_H_

#include <unistd.h>

#include <utility>

namespace moe_a2a {

class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_;
};

}  // namespace moe_a2a

#endif  // MOE_A2A_RUNTIME_DESCRIPTOR_H_
