#include "runtime/handoff.h"

#include <errno.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <exception>
#include <thread>
#include <utility>

namespace moe_a2a {
namespace {

constexpr int64_t kMaxWords = 1 << 16;  // in a request
constexpr int64_t kMaxText = 1 << 12;
constexpr int64_t kMaxAllocations = 1 << 12;
constexpr auto kRequestTime = std::chrono::seconds(2);  // for a request and for an answer, each

Problem Failed(const char* doing) {
  return std::string("workspace: ") + doing + ": " + strerror(errno);
}

std::string RandomHex(size_t digits) {
  std::vector<unsigned char> bytes(digits / 2);
  if (getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) return {};
  std::string text;
  for (unsigned char byte : bytes) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

// Returns false if the deadline has passed.
bool SetDeadline(int socket, Deadline deadline) {
  using std::chrono::microseconds;
  const auto left =
      std::chrono::duration_cast<microseconds>(deadline - std::chrono::steady_clock::now()).count();
  if (left <= 0) return false;
  const timeval time = {left / 1000000, left % 1000000};
  return setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &time, sizeof(time)) == 0 &&
         setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &time, sizeof(time)) == 0;
}

// Runs `call` on a socket. Fails with EAGAIN after the deadline. Repeats a call that a signal has
// interrupted, because the system never restarts a call with a time limit.
template <typename Call>
ssize_t Try(int socket, Deadline deadline, Call&& call) {
  ssize_t result;
  do {
    if (!SetDeadline(socket, deadline)) {
      errno = EAGAIN;
      return -1;
    }
    result = call();
  } while (result < 0 && errno == EINTR);
  return result;
}

bool Send(int socket, const void* data, size_t bytes, Deadline deadline) {
  const char* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t sent =
        Try(socket, deadline, [&] { return send(socket, at, bytes, MSG_NOSIGNAL); });
    if (sent <= 0) return false;
    at += sent;
    bytes -= sent;
  }
  return true;
}

bool Receive(int socket, void* data, size_t bytes, Deadline deadline) {
  char* at = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t got = Try(socket, deadline, [&] { return recv(socket, at, bytes, 0); });
    if (got <= 0) return false;
    at += got;
    bytes -= got;
  }
  return true;
}

// A message of one byte and a descriptor. It must not be copied, because it points to its members.
struct DescriptorMessage {
  char byte = 0;
  iovec data = {&byte, 1};
  alignas(cmsghdr) char space[CMSG_SPACE(sizeof(int))] = {};
  msghdr message = {};

  DescriptorMessage() {
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = space;
    message.msg_controllen = sizeof(space);
  }
  DescriptorMessage(const DescriptorMessage&) = delete;

  cmsghdr* head() { return CMSG_FIRSTHDR(&message); }
};

bool SendDescriptor(int socket, int fd, Deadline deadline) {
  DescriptorMessage carrier;
  cmsghdr* head = carrier.head();
  head->cmsg_level = SOL_SOCKET;
  head->cmsg_type = SCM_RIGHTS;
  head->cmsg_len = CMSG_LEN(sizeof(fd));
  std::memcpy(CMSG_DATA(head), &fd, sizeof(fd));
  return Try(socket, deadline, [&] { return sendmsg(socket, &carrier.message, MSG_NOSIGNAL); }) ==
         1;
}

Descriptor ReceiveDescriptor(int socket, Deadline deadline) {
  DescriptorMessage carrier;
  int fd = -1;
  const ssize_t got =
      Try(socket, deadline, [&] { return recvmsg(socket, &carrier.message, MSG_CMSG_CLOEXEC); });
  if (got != 1) return Descriptor();
  const cmsghdr* head = carrier.head();
  if (head != nullptr && head->cmsg_level == SOL_SOCKET && head->cmsg_type == SCM_RIGHTS) {
    std::memcpy(&fd, CMSG_DATA(head), sizeof(fd));
  }
  return Descriptor(fd);
}

socklen_t AddressOf(const std::string& name, sockaddr_un* address) {
  *address = {};
  address->sun_family = AF_UNIX;
  // The first byte is 0, which makes the name abstract.
  const size_t length = std::min(name.size(), sizeof(address->sun_path) - 1);
  std::memcpy(address->sun_path + 1, name.data(), length);
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
}

// Asks the operating system which process is at the other end of a connection. Returns a problem if
// the process belongs to another user, or is not `pid` (0: any process).
Problem CheckPeer(int socket, int pid) {
  ucred peer = {};
  socklen_t size = sizeof(peer);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) {
    return Failed("asking which process is at the other end");
  }
  if (peer.uid != geteuid()) {
    return Concat("its socket belongs to user ", peer.uid, ", and this process to user ",
                  geteuid());
  }
  // Some sandboxes return 0 or the calling process instead of the peer.
  const bool is_known = peer.pid != 0 && peer.pid != getpid();
  if (pid != 0 && is_known && peer.pid != pid) {
    return Concat("its socket belongs to another process now (process id ", peer.pid,
                  " instead of ", pid, ")");
  }
  return {};
}

struct AnswerHead {
  int64_t status, text_bytes, num_allocations;
};

Answer AnswerOrRefuse(const Request& request, const std::function<Answer(const Request&)>& answer) {
  try {
    return answer(request);
  } catch (const std::exception& error) {
    return {Status::kRefused, std::string("it failed while it answered: ") + error.what(), {}};
  } catch (...) {
    return {Status::kRefused, "it failed while it answered", {}};
  }
}

void AnswerOne(int socket, const std::string& secret,
               const std::function<Answer(const Request&)>& answer) {
  const Deadline deadline = std::chrono::steady_clock::now() + kRequestTime;
  char told[kSecretBytes];
  int64_t words = 0;
  if (!CheckPeer(socket, 0).empty() || !Receive(socket, told, sizeof(told), deadline) ||
      std::memcmp(told, secret.data(), kSecretBytes) != 0 ||
      !Receive(socket, &words, sizeof(words), deadline) || words < 0 || words > kMaxWords) {
    return;
  }
  Request request(words);
  if (!Receive(socket, request.data(), words * sizeof(int64_t), deadline)) return;
  const Answer given = AnswerOrRefuse(request, answer);
  const AnswerHead head = {
      static_cast<int64_t>(given.status),
      std::min<int64_t>(given.why.size(), kMaxText),
      std::min<int64_t>(given.allocations.size(), kMaxAllocations),
  };
  const Deadline end = std::chrono::steady_clock::now() + kRequestTime;
  if (!Send(socket, &head, sizeof(head), end) ||
      !Send(socket, given.why.data(), head.text_bytes, end)) {
    return;
  }
  for (int64_t i = 0; i < head.num_allocations; ++i) {
    const Allocation& allocation = given.allocations[i];
    const int64_t place[2] = {allocation.offset, allocation.bytes};
    if (!Send(socket, place, sizeof(place), end) ||
        !SendDescriptor(socket, allocation.memory.get(), end)) {
      return;
    }
  }
}

}  // namespace

Problem Listen(std::function<Answer(const Request&)> answer, Endpoint* endpoint) {
  const std::string name = RandomHex(16);
  const std::string secret = RandomHex(kSecretBytes);
  if (name.empty() || secret.empty()) return Failed("asking for random bytes");
  endpoint->socket = kSocketPrefix + name;
  endpoint->secret = secret;
  Descriptor listener(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address;
  const socklen_t size = AddressOf(endpoint->socket, &address);
  if (!listener || bind(listener.get(), reinterpret_cast<sockaddr*>(&address), size) != 0 ||
      listen(listener.get(), SOMAXCONN) != 0) {
    return Failed("opening a unix socket");
  }
  std::thread([listener = std::move(listener), secret, answer = std::move(answer)] {
    while (true) {
      const Descriptor asker(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
      if (asker) {
        try {
          AnswerOne(asker.get(), secret, answer);
        } catch (...) {  // for example out of memory; the connection closes without an answer
        }
      } else {  // for example a signal, or too many open files
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
    }
  }).detach();
  return {};
}

Problem Ask(const Endpoint& endpoint, const Request& request, Deadline deadline, Answer* answer) {
  *answer = {};
  if (endpoint.secret.size() != kSecretBytes) {
    return Concat("the secret of its socket must have ", kSecretBytes, " bytes; got ",
                  endpoint.secret.size(), ". It may run another version of jax_moe_a2a");
  }
  sockaddr_un address;
  const socklen_t size = AddressOf(endpoint.socket, &address);
  // Try() may repeat connect(): on a unix socket, an interrupted connect() does not go on later.
  const auto join = [&](const Descriptor& socket) {
    return Try(socket.get(), deadline,
               [&] { return connect(socket.get(), reinterpret_cast<sockaddr*>(&address), size); });
  };
  const auto ended = [&]() -> Problem {
    answer->has_ended = true;
    return "it has ended";
  };
  // If a second connection is refused, the process has ended.
  const auto hung_up = [&]() -> Problem {
    const Descriptor again(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (again && join(again) != 0 && errno == ECONNREFUSED) return ended();
    return "it closed the connection before its answer was complete";
  };
  const Descriptor server(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!server) return Failed("opening a unix socket");
  if (join(server) != 0) {
    if (errno == ECONNREFUSED) return ended();
    return errno == EAGAIN ? "it has not answered in time" : strerror(errno);
  }
  // Check before the secret is sent, because another process may have taken the socket's name.
  if (Problem p = CheckPeer(server.get(), endpoint.pid); !p.empty()) {
    answer->has_ended = true;
    return "it has ended, or runs as another user: " + p;
  }
  const auto words = static_cast<int64_t>(request.size());
  AnswerHead head;
  const bool is_sent = Send(server.get(), endpoint.secret.data(), kSecretBytes, deadline) &&
                       Send(server.get(), &words, sizeof(words), deadline) &&
                       Send(server.get(), request.data(), words * sizeof(int64_t), deadline);
  if (!is_sent || !Receive(server.get(), &head, sizeof(head), deadline)) {
    const bool in_time = std::chrono::steady_clock::now() < deadline;
    return in_time ? hung_up() : "it has not answered in time";
  }
  if (head.text_bytes < 0 || head.text_bytes > kMaxText || head.num_allocations < 0 ||
      head.num_allocations > kMaxAllocations) {
    return "it sent an answer that this package does not know";
  }
  answer->status = static_cast<Status>(head.status);
  answer->why.resize(head.text_bytes);
  if (!Receive(server.get(), answer->why.data(), head.text_bytes, deadline)) return hung_up();
  for (int64_t i = 0; i < head.num_allocations; ++i) {
    int64_t place[2];
    if (!Receive(server.get(), place, sizeof(place), deadline)) return hung_up();
    Descriptor memory = ReceiveDescriptor(server.get(), deadline);
    if (!memory) return "it sent no memory; the limit of open files may be reached (ulimit -n)";
    answer->allocations.push_back({place[0], place[1], std::move(memory)});
  }
  return {};
}

}  // namespace moe_a2a
