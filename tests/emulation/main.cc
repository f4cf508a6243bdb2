// Compares random exchanges on emulated ranks with the oracle. The exit status is 0 without errors,
// 1 with errors, and 2 if an option is wrong.
#include <unistd.h>

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <deque>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "block.h"
#include "device/signal.cuh"
#include "domain.h"
#include "exchange.h"
#include "kernels/launch.h"
#include "launch.h"
#include "primitives.h"
#include "site.h"
#include "variant.h"

using namespace emulation;
using namespace moe_a2a;

namespace {

const char kUsage[] = R"(emulate [--OPTION VALUE]...
  --seed N        seed of all random choices (1)
  --ranks N       (2)
  --steps N       exchanges in the sequence (4)
  --ops LETTERS   r route, d dispatch, w weighted, f in a format, x routed, c combine (rdwfxc)
  --sms N         blocks of a launch, at most; varies from launch to launch (3)
  --resident N    blocks that run at a time on a device (all)
  --depth N       ring halves in use (2)
  --timeout S     bound of every wait (60)
  --first-timeout S  bound of a wait for a rank that was never seen (as --timeout)
  --experts N     experts of a rank, at most (4)
  --threshold 1   the first row that is dropped is that of a token that several sources have; only for r and x
  --groups N      groups of 128 numbers in an encoded row, at most (12)
  --tokens N      tokens of a rank, at most (20 or fewer, and sometimes 16 more)
Errors on purpose:
  --without F:L   leave out the barrier, fence, acquire, release or wait in this line
  --swap F:L      swap the store that begins in this line and the next one; only in the variant `plain`
  --breaks N      break this rule on all ranks (Mutation in device/signal.cuh)
  --stall RANK    a rank that is slow, in --phase N (Phase in status.h), for --delay S
  --mismatch RANK a rank that makes other exchanges in the second half of the sequence
  --heads RANK    a rank whose heads have another signature in the second half; its flags do not differ
  --other RANK    a rank that makes another call than the others; only if they share a device
  --overlap 1     two launches at a time on each rank
  --corrupt N     one in N indices of the routings is wrong
  --crowded RANK  a rank whose tokens have a slot at each rank, which must be more ranks than choices; only for c
Also:
  --sites 1       print the places that the run has reached and could leave out
)";

struct Options {
  std::map<std::string, std::string> values;

  Options(int argc, char** argv) {
    for (int i = 1; i < argc; i += 2) {
      const std::string name = argv[i];
      if (i + 1 == argc || name.rfind("--", 0) != 0 ||
          std::string(kUsage).find(name + " ") == std::string::npos) {
        std::fprintf(stderr, "%s", kUsage);
        std::exit(2);
      }
      values[name.substr(2)] = argv[i + 1];
    }
  }
  bool has(const char* name) const { return values.count(name) > 0; }
  double number(const char* name, double otherwise) const {
    return has(name) ? std::stod(values.at(name)) : otherwise;
  }
  int whole(const char* name, int otherwise) const {
    return static_cast<int>(number(name, otherwise));
  }
  std::string text(const char* name, const char* otherwise) const {
    return has(name) ? values.at(name) : otherwise;
  }
};

std::atomic<int> num_wrong{0};

void report(const char* format, ...) {
  if (num_wrong++ > 10) return;
  va_list arguments;
  va_start(arguments, format);
  std::printf("wrong: ");
  std::vprintf(format, arguments);
  std::printf("\n");
  va_end(arguments);
}

ExchangePtr make_exchange(char letter, const Making& making, Random& random) {
  switch (letter) {
    case 'r': return make_route(making, random);
    case 'd': return make_dispatch(making, random);
    case 'w': return make_weighted_dispatch(making, random);
    case 'c': return make_combine(making, random);
    case 'f': return make_format_dispatch(making, random);
    case 'x': return make_routed_dispatch(making, random);
  }
  std::fprintf(stderr, "no operation has the letter %c\n", letter);
  _exit(2);
}

std::vector<ExchangePtr> make_sequence(const Options& options, const Making& making,
                                       uint64_t seed) {
  Random random(seed);
  const std::string ops = options.text("ops", "rdwfxc");
  std::vector<ExchangePtr> sequence;
  for (int i = options.whole("steps", 4); i > 0; --i) {
    sequence.push_back(make_exchange(ops[random.below(ops.size())], making, random));
    sequence.back()->signature = uint64_t{random.next()} << 32 | random.next();
    sequence.back()->run = random.one_in(4) ? 0 : 1 + random.next();
  }
  return sequence;
}

struct Expectation {
  bool may_fail = false;   // ranks may fail, and then have the results of a failure
  bool must_fail = false;  // at least one rank must report a failure
  bool has_results = true;
};

class Sequence {
 public:
  Sequence(const Options& options, const Making& making)
      : options_(options),
        exchanges_(make_sequence(options, making, seed())),
        mismatched_rank_(options.whole("mismatch", -1)) {
    if (mismatched_rank_ >= 0) others_ = make_sequence(options, making, seed() + 1000003);
    const bool stalls = options.has("stall");
    const bool differs = mismatched_rank_ >= 0 || options.has("heads") || options.has("other");
    for (size_t i = 0; i < exchanges_.size(); ++i) joint_launches_.emplace_back(making.num_ranks);
    // Only the first exchange has first_timeout().
    const double patience = options.whole("steps", 4) > 1 ? timeout() : first_timeout();
    expect_.must_fail =
        differs || options.has("crowded") || (stalls && options.number("delay", 0) > patience);
    expect_.may_fail = expect_.must_fail || options.has("overlap");
    expect_.has_results = !options.has("corrupt");
    int64_t half_bytes = 0;
    for (const auto* list : {&exchanges_, &others_}) {
      for (const ExchangePtr& exchange : *list) {
        half_bytes = std::max(half_bytes, exchange->zone_bytes() * making.num_ranks);
      }
    }
    domain_ = std::make_unique<Domain>(making.num_ranks, half_bytes);
    for (int rank = 0; rank < making.num_ranks; ++rank) {
      Control& control = domain_->control(rank);
      control.mutation = static_cast<uint32_t>(options.whole("breaks", 0));
      if (options.whole("other", -1) == rank) control.mutation = kOtherCall;
      control.depth = static_cast<uint32_t>(options.whole("depth", 0));
      if (options.whole("stall", -1) == rank) {
        control.delay_phase = static_cast<uint32_t>(options.whole("phase", 3));
        control.delay_ns = static_cast<uint64_t>(options.number("delay", 0) * 1e9);
      }
    }
  }

  void run() {
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < domain_->num_ranks(); ++rank) {
      ranks.emplace_back([this, rank] { run_rank(rank); });
    }
    std::atomic<bool> is_over{false};
    std::thread host([&] { watch_records(is_over); });
    for (std::thread& rank : ranks) rank.join();
    is_over = true;
    host.join();
    int failures = 0;
    for (int rank = 0; rank < domain_->num_ranks(); ++rank) {
      const ErrorRecord& record = domain_->record(rank);
      if (record.kind == 0) continue;
      ++failures;
      if (expect_.may_fail || options_.has("corrupt")) {
        std::printf("record: %s\n", describe(record).c_str());
      } else {
        report("rank %d has failed: %s", rank, describe(record).c_str());
      }
    }
    if (expect_.must_fail && failures == 0) report("no rank has reported the failure");
    const int crowded = options_.whole("crowded", -1);
    if (crowded >= 0 &&
        domain_->record(crowded).kind != static_cast<uint32_t>(ErrorKind::kBounds)) {
      report("no rank has reported the slots");
    }
    if (const std::string damage = domain_->damage(); !damage.empty()) report("%s", damage.c_str());
  }

 private:
  double timeout() const { return options_.number("timeout", 60); }
  double first_timeout() const { return options_.number("first-timeout", timeout()); }
  uint64_t seed() const { return static_cast<uint64_t>(options_.whole("seed", 1)); }

  // The host reads records while ranks run. A record whose kind is not 0 must be complete.
  void watch_records(const std::atomic<bool>& is_over) {
    // Kernels set the kind by a volatile store, which ThreadSanitizer reports as a race.
    if (kHasSanitizer) return;
    std::map<int, std::string> seen;  // indexed by rank
    while (!is_over) {
      for (int rank = 0; rank < domain_->num_ranks(); ++rank) {
        const ErrorRecord& record = domain_->record(rank);
        if (seen.count(rank) == 0 && __atomic_load_n(&record.kind, __ATOMIC_ACQUIRE) != 0) {
          seen[rank] = describe(record);
        }
      }
      usleep(10);
    }
    for (const auto& [rank, text] : seen) {
      if (text != describe(domain_->record(rank))) report("an incomplete record: %s", text.c_str());
    }
  }

  void run_rank(int rank) {
    const size_t count = exchanges_.size();
    const size_t at_a_time = options_.has("overlap") ? 2 : 1;
    for (size_t first = 0; first < count; first += at_a_time) {
      std::vector<std::thread> launches;
      for (size_t i = first; i < std::min(first + at_a_time, count); ++i) {
        if (at_a_time == 1) {
          run_step(rank, i);
        } else {
          launches.emplace_back([this, rank, i, first] {
            // The rank's second launch may begin before or during its first.
            if (i > first) usleep(static_cast<useconds_t>((seed() * 7 + i) % 5 * 100));
            run_step(rank, i);
          });
        }
      }
      for (std::thread& launch : launches) launch.join();
    }
  }

  void run_step(int rank, size_t step) {
    const bool is_other = rank == mismatched_rank_ && step >= exchanges_.size() / 2;
    Exchange& exchange = *(is_other ? others_ : exchanges_)[step];
    // Parameters of ranks on one device may only differ in addresses and rank.
    Random random(seed() * 131 + (kColocated ? 0 : static_cast<uint64_t>(rank) * 17) + step);
    const bool is_late = step >= exchanges_.size() / 2;
    const bool has_other_head = is_late && options_.whole("heads", -1) == rank;
    // Flags contain only the lowest 16 bits of a signature, so bit 40 only changes the heads.
    const uint64_t signature = exchange.signature ^ uint64_t{has_other_head} << 40;
    RankView view =
        domain_->view(rank, exchange.operation(), signature, timeout(), first_timeout());
    view.launch = step + 1;
    view.run = exchange.run;
    const cudaError_t error =
        exchange.launch({rank, view, 1 + random.below(options_.whole("sms", 3)), random,
                         variant_kernels(), kColocated ? &joint_launches_[step] : nullptr});
    const auto where = [&](const std::string& what) {
      report("step %zu, %s, rank %d: %s", step, exchange.name.c_str(), rank, what.c_str());
    };
    if (error != cudaSuccess) where("the launch failed");
    if (!exchange.is_intact_around(rank)) where("memory around a result was written");
    if (!expect_.has_results) return;
    // If one rank makes a different call, all ranks must fail, also those that it sends nothing.
    const bool must_fail = (is_late && options_.has("heads")) || options_.has("other");
    if (must_fail && !exchange.is_failure(rank)) where("it has succeeded");
    if (expect_.may_fail && domain_->is_poisoned(rank) && exchange.is_failure(rank)) return;
    if (const std::string what = exchange.wrong(rank); !what.empty()) where(what);
  }

  const Options& options_;
  std::vector<ExchangePtr> exchanges_, others_;
  std::deque<JointLaunch> joint_launches_;  // one for each step
  int mismatched_rank_;
  Expectation expect_;
  std::unique_ptr<Domain> domain_;
};

}  // namespace

int main(int argc, char** argv) {
  const Options options(argc, argv);
  if (options.has("without")) leave_out(options.text("without", "").c_str());
  if (options.has("swap")) swap(options.text("swap", "").c_str());
  set_residency(options.whole("resident", 1 << 20));
  set_seed(static_cast<uint64_t>(options.whole("seed", 1)));
  const uint64_t start = global_time_ns();
  Making making;
  making.num_ranks = options.whole("ranks", 2);
  making.max_local_experts = options.whole("experts", 4);
  making.max_groups = options.whole("groups", 12);
  making.max_tokens = options.whole("tokens", 1 << 20);
  making.at_threshold = options.has("threshold");
  making.crowded_rank = options.whole("crowded", -1);
  making.corrupt_one_in = options.whole("corrupt", 0);
  if (variant_kernels().load() != cudaSuccess) return 2;
  Sequence sequence(options, making);
  sequence.run();
  if (options.has("sites")) print_sites();
  std::printf("ranks %d, seed %d: %d wrong, %.1f s\n", making.num_ranks, options.whole("seed", 1),
              num_wrong.load(), static_cast<double>(global_time_ns() - start) * 1e-9);
  std::fflush(stdout);
  return num_wrong > 0 ? 1 : 0;
}
