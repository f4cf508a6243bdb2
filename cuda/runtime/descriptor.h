// A file descriptor that is closed with its owner, and in a child that this process forks. The child would otherwise
// hold a socket on which it never answers, and the memory of other processes, for as long as it lives.
#ifndef MOE_A2A_RUNTIME_DESCRIPTOR_H_
#define MOE_A2A_RUNTIME_DESCRIPTOR_H_

#include <utility>

namespace moe_a2a {

class Descriptor {
 public:
  explicit Descriptor(int fd = -1);
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor();

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_;
};

}  // namespace moe_a2a

#endif  // MOE_A2A_RUNTIME_DESCRIPTOR_H_
