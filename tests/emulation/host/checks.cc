// Checks of the host code (cuda/runtime) over a fake driver, for runs under sanitizers. Usage:
// checks NAME [SECONDS].
//
//   threads      threads of one process reserve, close, send requests and read at the same time
//   processes    two processes reserve, grow, close, and map each other's memory; then one process is killed
//   requests     the socket receives random bytes
//   memory       a device has no free memory; each call of the driver fails once; memory of another process
//                arrives with a gap
//   failures     a rank that was stopped between exchanges is reported; the wait for a busy device is bounded
//   per_device   threads publish and find objects of devices
//   alignment    a leaf of a token format at an unaligned address is refused with the reason
//
// A check prints a summary. The exit status is 1 if the check has failed.
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "calls/encoded_payload.h"
#include "fake_driver.h"
#include "runtime/per_device.h"
#include "runtime/slab.h"
#include "runtime/workspace.h"

namespace {

using namespace moe_a2a;
using Clock = std::chrono::steady_clock;
using Random = std::mt19937_64;

constexpr int64_t kTimeoutNs = 5'000'000'000;

void require(bool ok, const std::string& what) {
  if (ok) return;
  std::printf("wrong: %s\n", what.c_str());
  std::fflush(stdout);
  _exit(1);
}
void require_no(const Problem& problem) { require(problem.empty(), problem); }

Topology topology_of(std::vector<int64_t> devices) {
  const int ranks = static_cast<int>(devices.size());
  return {std::move(devices), ranks};
}

int open_descriptors() {
  int count = 0;
  DIR* all = opendir("/proc/self/fd");
  while (readdir(all) != nullptr) ++count;
  closedir(all);
  return count;
}

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

Deadline within(int seconds) { return Clock::now() + std::chrono::seconds(seconds); }

void close_all(const std::vector<Topology>& topologies) {
  for (const Topology& topology : topologies) {
    for (WorkspaceKind kind : {WorkspaceKind::kWhole, WorkspaceKind::kSplit}) {
      require_no(Workspace::Get(topology, kind).Close(kTimeoutNs));
    }
  }
}

void require_nothing_left() {
  require(fake_driver::handles == 0 && fake_driver::mappings == 0,
          std::to_string(fake_driver::handles) + " handles and " +
              std::to_string(fake_driver::mappings) + " mappings are left");
}

// ---- threads

void use_at_random(const std::vector<Topology>& topologies, const Endpoint& self, uint64_t seed,
                   const std::atomic<bool>& stop, std::atomic<long>& calls) {
  Random random(seed);
  while (!stop) {
    ++calls;
    Workspace& workspace =
        Workspace::Get(topologies[random() % topologies.size()],
                       random() % 2 ? WorkspaceKind::kSplit : WorkspaceKind::kWhole);
    switch (random() % 9) {
      case 0:
      case 1:
        require_no(workspace.Reserve(static_cast<int64_t>(random() % 64) << 16, kTimeoutNs));
        break;
      case 2:
        if (random() % 6 == 0) require_no(workspace.Close(kTimeoutNs));
        break;
      case 3: {
        std::string failure;
        require_no(workspace.ReadFailure(&failure));
        require(failure.empty(), failure);
        break;
      }
      case 4: workspace.MappedBytes(); break;
      case 5:
        workspace.half_bytes();
        require_no(workspace.CheckAccess());
        break;
      case 6: {
        std::vector<CounterValues> values;
        require_no(workspace.ReadCounters(&values));
        break;
      }
      case 7: {  // a request, as another process sends it to Workspace::Serve()
        const Request request = {kProtocolVersion,
                                 static_cast<int64_t>(random() % 2),
                                 4,
                                 static_cast<int64_t>(random() % 4),
                                 static_cast<int64_t>(random() % 3),
                                 static_cast<int64_t>(random() % 3),
                                 static_cast<int64_t>(random() % 64) << 16,
                                 0,
                                 1,
                                 2,
                                 3};
        Answer answer;
        Ask(self, request, within(2), &answer);
        break;
      }
      case 8: {
        RankView view = {};
        if (workspace.is_open()) workspace.View(static_cast<int>(random() % 4), &view);
        break;
      }
    }
  }
}

void check_threads(int seconds) {
  for (int i = 0; i < 4; ++i) AddDevice(i, {0, i});
  Endpoint self;
  require_no(Listen(&Workspace::Serve, &self));
  AddProcess(0, self);
  const std::vector<Topology> topologies = {topology_of({0, 1, 2, 3}), topology_of({3, 2, 1, 0})};
  std::atomic<bool> stop{false};
  std::atomic<long> calls{0};
  std::vector<std::thread> threads;
  for (uint64_t i = 0; i < 6; ++i) {
    threads.emplace_back([&, i] { use_at_random(topologies, self, i, stop, calls); });
  }
  std::this_thread::sleep_for(std::chrono::seconds(seconds));
  stop = true;
  for (std::thread& thread : threads) thread.join();
  close_all(topologies);
  require_nothing_left();
  std::printf("threads: %ld calls\n", calls.load());
}

// ---- processes

// Messages have 64 bytes.
class Channel {
 public:
  Channel() { require(pipe(there_) == 0 && pipe(back_) == 0, "no pipe"); }
  void become(bool is_child) {
    if (is_child) std::swap(there_, back_);
    close(there_[0]);
    close(back_[1]);
  }
  void say(std::string text) const {
    text.resize(kBytes, ' ');
    if (write(there_[1], text.data(), kBytes) != kBytes) _exit(9);
  }
  // Returns "" if the other process has ended.
  std::string hear() const {
    std::string text(kBytes, '\0');
    for (ssize_t got = 0; got < kBytes;) {
      const ssize_t more = read(back_[0], &text[static_cast<size_t>(got)], kBytes - got);
      if (more <= 0) return "";
      got += more;
    }
    text.erase(text.find_last_not_of(' ') + 1);
    return text;
  }

 private:
  static constexpr ssize_t kBytes = 64;
  int there_[2], back_[2];
};

Endpoint exchange_endpoints(const Channel& channel, const Endpoint& self) {
  channel.say(self.socket);
  channel.say(self.secret);
  Endpoint other;
  other.socket = channel.hear();
  other.secret = channel.hear();
  return other;
}

void check_processes(int seconds) {
  const int rounds = 10 * seconds;
  Channel channel;
  const pid_t child = fork();
  const int self = child == 0 ? 1 : 0;
  channel.become(child == 0);
  for (int i = 0; i < 4; ++i) {
    AddDevice(i, i / 2 == self ? DevicePlace{self, i} : DevicePlace{1 - self, kElsewhere});
  }
  Endpoint own;
  require_no(Listen(&Workspace::Serve, &own));
  AddProcess(1 - self, exchange_endpoints(channel, own));
  const std::vector<Topology> topologies = {topology_of({0, 1, 2, 3}), topology_of({2, 0, 3, 1})};
  Random own_random(11 + static_cast<uint64_t>(self)), common(5);
  for (int i = 0; i < rounds; ++i) {
    const WorkspaceKind kind = common() % 3 == 0 ? WorkspaceKind::kSplit : WorkspaceKind::kWhole;
    Workspace& workspace = Workspace::Get(topologies[common() % 2], kind);
    const bool closes = common() % 4 == 0;
    const int64_t bytes = static_cast<int64_t>(common() % 200) << 16;
    usleep(static_cast<useconds_t>(own_random() % 3000));
    require_no(
        workspace.Reserve(bytes + (static_cast<int64_t>(own_random() % 3) << 16), kTimeoutNs));
    channel.say("here");  // the processes wait for each other, as in an exchange
    channel.hear();
    RankView view = {};
    require_no(workspace.View(2 * self, &view));
    if (closes) require_no(workspace.Close(kTimeoutNs));
  }
  close_all(topologies);
  if (self == 1) {
    for (auto& room : fake_driver::room) room = 0;
  }
  channel.say("closed");
  channel.hear();
  if (self == 0) {  // the other process answers that it has no free memory
    Workspace& workspace = Workspace::Get(topologies[0], WorkspaceKind::kWhole);
    const Problem problem = workspace.Reserve(1 << 20, kTimeoutNs);
    require(problem.lacks_memory && problem.find("process 1") != std::string::npos,
            "another process lacks memory: " + problem);
    require_no(workspace.Close(kTimeoutNs));
  }
  channel.say("asked");
  channel.hear();
  std::printf("processes: process %d, %d rounds, %d descriptors\n", self, rounds,
              open_descriptors());
  std::fflush(stdout);
  if (child == 0) kill(getpid(), SIGKILL);
  require(channel.hear().empty(), "the other process lives");
  const auto start = Clock::now();
  const Problem problem =
      Workspace::Get(topologies[0], WorkspaceKind::kWhole).Reserve(1 << 20, kTimeoutNs);
  require(!problem.empty() && seconds_since(start) < 6,
          "memory of a dead process was reserved, or after " +
              std::to_string(seconds_since(start)) + " s");
  require(HasEnded(1 - self), "a dead process does not count as ended");
  AddProcess(1 - self, {});
  require(!HasEnded(1 - self), "a process that was started again counts as ended");
  std::printf("after the kill, within %.2f s: %s\n", seconds_since(start), problem.c_str());
  int status;
  waitpid(child, &status, 0);
}

// ---- requests

void send_bytes(const Endpoint& to, const std::string& bytes, bool reads_answer) {
  const int connection = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, to.socket.data(), to.socket.size());
  const auto length =
      static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + to.socket.size());
  const timeval limit = {3, 0};
  setsockopt(connection, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  if (connect(connection, reinterpret_cast<sockaddr*>(&address), length) == 0) {
    char answer[512];
    send(connection, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    shutdown(connection, SHUT_WR);
    while (reads_answer && recv(connection, answer, sizeof(answer), 0) > 0) {
    }
  }
  close(connection);
}

// Each item (secret, number of words, words) is correct, nearly correct, or random.
std::string random_request(const Endpoint& to, Random& random) {
  const auto odd_word = [&]() -> int64_t {
    const int64_t words[] = {0,
                             1,
                             -1,
                             2,
                             7,
                             8,
                             11,
                             64,
                             65,
                             1 << 16,
                             (1 << 16) + 1,
                             INT64_MAX,
                             INT64_MIN,
                             static_cast<int64_t>(random()),
                             int64_t{32} << 30,
                             (int64_t{32} << 30) + 1};
    return words[random() % std::size(words)];
  };
  std::string bytes = random() % 8 ? to.secret : std::string(kSecretBytes, 'x');
  const auto add = [&](int64_t word) {
    bytes.append(reinterpret_cast<const char*>(&word), sizeof(word));
  };
  const int64_t count = random() % 4 ? 7 + static_cast<int64_t>(random() % 6) : odd_word();
  add(count);
  for (int64_t i = 0; i < std::clamp<int64_t>(count, 0, 20); ++i) {
    if (i == 0 && random() % 3) {
      add(kProtocolVersion);
    } else if (i == 2 && random() % 2) {
      add(4);
    } else if (i >= 7 && random() % 2) {
      add(i - 7);
    } else {
      add(random() % 2 ? static_cast<int64_t>(random() % 5) : odd_word());
    }
  }
  if (random() % 5 == 0) bytes.resize(random() % bytes.size());
  return bytes;
}

void check_requests(int seconds) {
  for (int i = 0; i < 4; ++i) AddDevice(i, {0, i});
  for (auto& room : fake_driver::room) room = int64_t{1} << 30;
  Endpoint self;
  require_no(Listen(&Workspace::Serve, &self));
  Random random(7);
  const auto start = Clock::now();
  long requests = 0;
  for (; seconds_since(start) < seconds; ++requests) {
    send_bytes(self, random_request(self, random), random() % 4 != 0);
  }
  const Request right = {kProtocolVersion, 0, 4, 0, 0, 0, 1 << 16, 0, 1, 2, 3};
  Answer answer;
  Endpoint almost = self;
  almost.secret.back() ^= 1;
  require(!Ask(almost, right, within(3), &answer).empty(), "a wrong secret was accepted");
  require_no(Ask(self, right, within(3), &answer));
  std::printf("requests: %ld, then a right one was answered with %zu allocations\n", requests,
              answer.allocations.size());
}

// ---- memory

void check_memory(int) {
  for (int i = 0; i < 2; ++i) AddDevice(i, {0, i});
  Workspace& workspace = Workspace::Get(topology_of({0, 1}), WorkspaceKind::kWhole);
  fake_driver::room[1] = int64_t{64} << 20;
  // Only device 0 has enough memory. Reserve() must free the memory that it has got there.
  const Problem full = workspace.Reserve(int64_t{8} << 30, kTimeoutNs);
  require(!full.empty(), "8 GiB fit into 64 MiB");
  require_nothing_left();
  require_no(workspace.Close(kTimeoutNs));
  require_nothing_left();
  require(full.lacks_memory, "a lack of memory does not say so: " + full);
  require(full.find(std::to_string(int64_t{8} << 30)) != std::string::npos &&
              full.find(std::to_string(fake_driver::room[1])) != std::string::npos,
          "the message must name the requested and the free memory: " + full);
  fake_driver::room[1] = int64_t{1} << 60;
  // A different call of the driver fails in each round. Reserve() must leave no memory, and succeed
  // when called again.
  int failures = 0;
  for (int failing = 0;; ++failing) {
    fake_driver::calls_until_failure = failing;
    Problem problem = workspace.Reserve(1 << 20, kTimeoutNs);
    if (problem.empty()) problem = workspace.Reserve(8 << 20, kTimeoutNs);
    const bool reached = fake_driver::calls_until_failure < 0;
    fake_driver::calls_until_failure = -1;
    if (!reached) break;
    ++failures;
    require(!problem.empty(), "call " + std::to_string(failing) + " failed unnoticed");
    require(problem.lacks_memory, "call " + std::to_string(failing) + ": " + problem);
    if (!workspace.is_open()) require_nothing_left();
    require_no(workspace.Reserve(8 << 20, kTimeoutNs));
    require_no(workspace.Close(kTimeoutNs));
    require(fake_driver::used[0] == 0 && fake_driver::used[1] == 0, "memory is left");
  }
  // Growth must only allocate the additional memory.
  constexpr int64_t kHalf = 64 << 20;
  require_no(workspace.Reserve(kHalf / 2, kTimeoutNs));
  require_no(workspace.Reserve(kHalf, kTimeoutNs));
  require(fake_driver::used[0] == kHeaderBytes + kRingDepth * kHalf, "it has grown by more");
  require_no(workspace.Close(kTimeoutNs));
  require_nothing_left();
  // The first mappings leave a gap, and the last mappings fill it.
  PeerSlab slab({0});
  require_no(slab.Open());
  constexpr int64_t kPage = int64_t{2} << 20;
  const auto map = [&](int64_t offset, int64_t bytes) {
    std::vector<Allocation> arrived;
    arrived.push_back({offset, bytes, Descriptor(memfd_create("memory", MFD_CLOEXEC))});
    require_no(slab.Map(arrived));
  };
  map(0, kHeaderBytes);
  for (int64_t page : {0, 2}) {
    for (int half = 0; half < kRingDepth; ++half) map(half_offset(half) + page * kPage, kPage);
  }
  require(slab.holds(kPage) && !slab.holds(3 * kPage), "a gap counts as mapped memory");
  for (int half = 0; half < kRingDepth; ++half) map(half_offset(half) + kPage, kPage);
  require(slab.holds(3 * kPage) && !slab.holds(4 * kPage), "the gap was filled");
  require_no(slab.Release());
  std::printf("memory: each of %d calls failed once\n", failures);
}

// ---- failures

bool says(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

void check_failures(int) {
  require(TypeNamed("BF16").nan == 0xFF && TypeNamed("C64").nan == 0xFF &&
              TypeNamed("F8E4M3FNUZ").nan == 0x80 && TypeNamed("S32").nan == 0 &&
              TypeNamed("PRED").nan == 0,
          "a failure would fill an output with another byte");
  for (int i = 0; i < 2; ++i) AddDevice(i, {0, i});
  for (const WorkspaceKind kind : {WorkspaceKind::kWhole, WorkspaceKind::kSplit}) {
    Workspace& workspace = Workspace::Get(topology_of({0, 1}), kind);
    require_no(workspace.Wait(kTimeoutNs));  // no problem: the workspace is closed
    require_no(workspace.Reserve(1 << 20, kTimeoutNs));
    std::string failure;
    require_no(workspace.ReadFailure(&failure));
    require(failure.empty(), failure);
    // Rank 0 has poisoned rank 1, which has no error record, because no kernel runs there.
    RankView view = {};
    require_no(workspace.View(1, &view));
    Control& control = reinterpret_cast<Header*>(view.slab[1])->control;
    control.poison = make_poison(0, ErrorKind::kTimeout, Phase::kReceiveChunk, 1);
    require(workspace.Failure().empty(), "there is a record");
    require_no(workspace.ReadFailure(&failure));
    require(says(failure, "rank 1 between") && says(failure, "rank 0 has reported \"timeout\""),
            "the poison was not read: " + failure);
    // The text of an error record replaces that of the poison.
    view.error->operation = static_cast<uint32_t>(Operation::kCombine);
    view.error->kind = static_cast<uint32_t>(ErrorKind::kOverlap);
    require_no(workspace.ReadFailure(&failure));
    require(says(failure, "overlapping calls: combine"), failure);

    fake_driver::are_busy = true;
    for (const uint64_t owner : {1u, 0u}) {
      reinterpret_cast<Header*>(view.slab[0])->control.owner = owner;
      const auto start = Clock::now();
      const Problem waited = workspace.Wait(100'000'000), problem = workspace.Close(100'000'000);
      require(seconds_since(start) < 2, "it waited for " + std::to_string(seconds_since(start)));
      require(
          waited == problem && says(problem, "GPU 0 is still at work after 0.1") &&
              says(problem, kind == WorkspaceKind::kSplit ? "the side stream" : "XLA's stream") &&
              says(problem, owner ? "exchange 1 of rank 0 runs" : "other work") &&
              says(problem, "overlapping calls"),
          problem);
      require(workspace.is_open() && fake_driver::used[1] > 0, "it has given memory back");
    }
    fake_driver::are_busy = false;
    require_no(workspace.Close(kTimeoutNs));
    require_no(workspace.ReadFailure(&failure));
    require(failure.empty(), "closing clears a failure");
  }
  require_nothing_left();
  std::printf("failures: of both workspace kinds\n");
}

// ---- per_device

void check_per_device(int seconds) {
  constexpr int kDevices = 4;
  struct Object {
    int32_t ordinal;
    long number;
  };
  const Deadline end = within(seconds);
  long rounds = 0;
  while (Clock::now() < end) {
    PerDevice<Object> objects;
    std::vector<std::thread> threads;
    for (int t = 0; t < 8; ++t) {
      threads.emplace_back([&objects, t] {
        for (int i = 0; i < 200; ++i) {
          const int32_t ordinal = (t + i) % kDevices;
          const Object* found = objects.Find(ordinal);
          if (found == nullptr || i % 50 == 0) {
            found = objects.Publish(ordinal, std::make_unique<Object>(Object{ordinal, i}));
            require(found->number == i, "another object was published");
          }
          require(found->ordinal == ordinal, "found an object of another device");
          require(objects.Find(ordinal) != nullptr, "a published object is gone");
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    const Object* last = objects.Publish(1, std::make_unique<Object>(Object{1, -1}));
    require(objects.Find(1) == last, "an earlier object was found");
    require(objects.Find(kDevices) == nullptr, "found an object of an unknown device");
    ++rounds;
  }
  std::printf("per_device: %ld rounds\n", rounds);
}

// ---- alignment

void check_alignment(int) {
  const EncodedPayload payload = {{/*num_choice_arrays=*/0, /*leaves_tail=*/false},
                                  "BlockwiseFp8",
                                  /*num_leaves=*/1,
                                  /*decode=*/true,
                                  /*keeps_encoded=*/false,
                                  /*has_token_scales=*/false,
                                  /*global_scale=*/1};
  const auto describe = [&](int64_t hidden, uintptr_t in_bits, uintptr_t out_bits) {
    FormatDispatchParams params = {};
    DispatchParams& exchange = params.exchange;
    exchange.view.num_ranks = 2;
    exchange.routing.num_tokens = 6;
    exchange.routing.capacity = 40;
    const int64_t in_axes[] = {6, hidden}, out_axes[] = {40, hidden};
    const Array in = {kFloat32, {in_axes, 2}, 24 * hidden, nullptr, in_bits};
    const Array out = {kFloat32, {out_axes, 2}, 160 * hidden, nullptr, out_bits};
    return payload.Describe({}, {&in, 1}, {&out, 1}, params);
  };
  require_no(describe(128, 0x1000, 0x2000));
  const Problem ragged = describe(120, 0x1000, 0x2000);
  require(says(ragged, "whole groups; got F32[6,120]"), ragged);
  const Problem leaf = describe(128, 0x1004, 0x2000), rows = describe(128, 0x1000, 0x2002);
  require(says(leaf, "of 16 bytes; F32[6,128] begins at a multiple of 4"), leaf);
  require(says(rows, "of 16 bytes; F32[40,128] begins at a multiple of 2"), rows);
  std::printf("alignment: two addresses were refused\n");
}

}  // namespace

int main(int argc, char** argv) {
  for (auto& room : fake_driver::room) room = int64_t{1} << 60;
  const std::string name = argc > 1 ? argv[1] : "";
  const int seconds = argc > 2 ? std::atoi(argv[2]) : 5;
  const std::pair<const char*, void (*)(int)> checks[] = {
      {"threads", check_threads},     {"processes", check_processes},
      {"requests", check_requests},   {"memory", check_memory},
      {"failures", check_failures},   {"per_device", check_per_device},
      {"alignment", check_alignment},
  };
  const auto check = std::find_if(std::begin(checks), std::end(checks),
                                  [&](const auto& each) { return each.first == name; });
  if (check == std::end(checks)) {
    std::fprintf(stderr, "checks NAME [SECONDS]; the names are at the top of this file\n");
    return 2;
  }
  check->second(seconds);
  std::fflush(stdout);
  _exit(0);  // the answering thread would never end
}
