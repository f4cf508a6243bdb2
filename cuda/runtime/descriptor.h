// A file descriptor. The destructor closes it, and so does a forked child. The child would
// otherwise keep memory of other processes, and a socket on which it never answers.
#pragma once

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
