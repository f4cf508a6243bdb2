// Runs a random sequence of dispatches and combines on rank 0 against the player (tools/driver/player.cuh), which plays
// all other ranks. Compares all results of rank 0, and all rows that rank 0 has sent, with the expected values.
//
// Prints one line for each error, then a summary. Exit status: 0 without errors, 1 with errors, 2 for a wrong option.
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <thread>

#include "../../../tools/driver/player.cuh"
#include "domain.h"
#include "exchange.h"
#include "kernels/grid.h"
#include "kernels/launch.h"
#include "launch.h"

using namespace emulation;
using namespace moe_a2a;

namespace {

const char kUsage[] = R"(play [--OPTION VALUE]...
  --seed N      seed of all random choices (1)
  --ranks N     (2)
  --steps N     exchanges in the sequence (6)
  --sms N       blocks of a launch of rank 0, at most (3)
  --blocks N    blocks of the player (2)
  --depth N     ring halves in use (2)
  --timeout S   bound of every wait (60)
Errors on purpose:
  --breaks N    break this rule on all ranks (Mutation in device/signal.cuh)
  --fault TEXT  call: the player makes another call in place of the last exchange; missing: the player leaves the last
                exchange out; rank: rank 0 leaves the last exchange out
)";

int num_wrong = 0;

void report(const char* format, ...) {
  if (num_wrong++ > 10) return;
  va_list arguments;
  va_start(arguments, format);
  std::printf("wrong: ");
  std::vprintf(format, arguments);
  std::printf("\n");
  va_end(arguments);
}

constexpr int64_t kTemplateBytes = 2048;
constexpr ElementType kType = ElementType::kBFloat16;

// Returns rows for played ranks to send: small integers, whose sums are exact.
emulation::Array make_numbers(Random& random, int64_t count) {
  emulation::Array array = make_array(static_cast<size_t>(count) * 2);
  for (int64_t i = 0; i < count; ++i) {
    write_number(array->data() + i * 2, kType, small_integer(random));
  }
  return array;
}

float number(const char* row, int64_t i) { return read_number(row + i * 2, kType); }

// An exchange of rank 0 with played ranks.
class Step {
 public:
  Step(const Making& making, Random& random, const char* templates)
      : making_(making),
        routing_(making, random, 20, 8, /*may_have_parts=*/false),
        templates_(templates),
        is_dispatch_(random.one_in(2)),
        is_weighted_(!is_dispatch_ && random.one_in(2)) {
    const Shape& shape = routing_.shape;
    elements_ = 8 * (1 + random.below(kTemplateBytes / 16));
    const auto capacity = static_cast<size_t>(shape.capacity);
    const auto tokens = static_cast<size_t>(shape.num_tokens);
    in_ = make_numbers(random, (is_dispatch_ ? shape.num_tokens : shape.capacity) * elements_);
    out_ = make_array((is_dispatch_ ? capacity : tokens) * elements_ * 2);
    // A choice array, if its entries of a token are whole vectors.
    has_choice_array_ = !is_weighted_ && shape.top_k % 4 == 0;
    const size_t choices_in = is_dispatch_ ? tokens * shape.top_k : capacity;
    const size_t choices_out = is_dispatch_ ? capacity : tokens * shape.top_k;
    choices_in_ = make_array(choices_in * 4);
    for (size_t i = 0; i < choices_in; ++i) choices_in_->as<uint32_t>()[i] = random.next() | 1;
    choices_out_ = make_array(choices_out * 4);
    weights_ = make_array(capacity * 4);
    for (size_t i = 0; i < capacity; ++i) {
      weights_->as<float>()[i] = static_cast<float>(random.between(-1, 1));
    }
    for (const emulation::Array& array : {out_, choices_out_}) {
      std::memset(array->data(), kNanByte, array->bytes());
    }
    call.operation = is_dispatch_ ? Operation::kDispatch : Operation::kCombine;
    call.signature = uint64_t{random.next()} << 32 | random.next();
    call.num_slots = shape.num_tokens;
    add_array(elements_ * 2);
    if (has_choice_array_) add_array(4 * shape.top_k);
    for (int rank = 1; rank < shape.num_ranks; ++rank) {
      const auto& source = routing_.plans[is_dispatch_ ? rank : 0];
      const int destination = is_dispatch_ ? 0 : rank;
      for (int slot = 0; slot < shape.num_tokens; ++slot) {
        const bool is_used = source.arrays[1][destination * shape.num_tokens + slot] >= 0;
        if (is_used && call.used[rank] != slot) report("a routing with holes between slots");
        call.used[rank] += is_used;
      }
    }
  }

  std::string name() const { return is_dispatch_ ? "dispatch" : "combine"; }

  cudaError_t launch(RankView view, int num_sms, Random& random) {
    view.operation = call.operation;
    view.signature = call.signature;
    const RoutingArrays routing(making_, random, routing_, 0);
    const LaunchOn on = {0, view, num_sms, random, DirectKernels(), /*joint=*/nullptr};
    const Shape& shape = routing_.shape;
    const auto vary = [&](auto& p, int blocks) { vary_roles(random, blocks, p.roles); };
    Arguments a;
    const auto of_tokens = [&](Bound& arrays, const emulation::Array& rows,
                               const emulation::Array& choices) {
      arrays.add(kBFloat16, {shape.num_tokens, elements_}, rows);
      if (has_choice_array_) arrays.add(kFloat32, {shape.num_tokens, shape.top_k}, choices);
    };
    const auto of_rows = [&](Bound& arrays, const emulation::Array& rows,
                             const emulation::Array& choices) {
      arrays.add(kBFloat16, {shape.capacity, elements_}, rows);
      if (has_choice_array_) arrays.add(kFloat32, {shape.capacity}, choices);
    };
    if (is_dispatch_) {
      of_tokens(a.args, in_, choices_in_);
      of_rows(a.results, out_, choices_out_);
      routing.add_to(a.args, shape);
      return launch_call(DispatchCall{{has_choice_array_, /*leaves_tail=*/false}}, on, a, vary);
    }
    of_rows(a.args, in_, choices_in_);
    if (is_weighted_) a.args.add(kFloat32, {shape.capacity}, weights_);
    of_tokens(a.results, out_, choices_out_);
    routing.add_to(a.args, shape);
    return launch_call(CombineCall{has_choice_array_, is_weighted_, kBFloat16.name, 1.f}, on, a,
                       vary);
  }

  bool is_failure() const {
    for (size_t i = 0; i < out_->bytes(); ++i) {
      if (static_cast<unsigned char>(out_->data()[i]) != kNanByte) return false;
    }
    return true;
  }

  // Returns the first error in the results of rank 0 or in the rows that its peers have received, or "".
  std::string wrong(const RankView& view, int ring_half) const {
    std::string what = is_dispatch_ ? wrong_rows() : wrong_sums();
    for (int rank = 1; rank < view.num_ranks && what.empty(); ++rank) {
      what = wrong_at(rank, view.slab[rank] + half_offset(ring_half));
    }
    return what;
  }

  PlayedCall call = {};

 private:
  void add_array(int64_t row_bytes) {
    call.zone_offset[call.num_arrays] = call.zone_bytes;
    call.row_bytes[call.num_arrays++] = row_bytes;
    call.zone_bytes += array_bytes(call.num_slots, row_bytes);
  }

  const char* template_row(int rank, int slot) const {
    return templates_ + template_of(rank, slot) * kTemplateBytes;
  }

  std::string wrong_rows() const {
    const Shape& shape = routing_.shape;
    const Plan& plan = routing_.plans[0];
    for (int row = 0; row < shape.capacity; ++row) {
      const int source = plan.row_rank(row), token = plan.row_token(row);
      uint32_t entry = 0;
      for (int64_t e = 0; e < elements_; ++e) {
        const char* from = source < 0    ? nullptr
                           : source == 0 ? in_->data() + token * elements_ * 2
                                         : template_row(source, plan.arrays[5][row]);
        const float expected = source < 0 ? 0.f : number(from, e);
        if (!(number(out_->data() + row * elements_ * 2, e) == expected)) {
          return "row " + std::to_string(row) + " from rank " + std::to_string(source);
        }
      }
      if (!has_choice_array_) continue;
      const int k = plan.row_k(row);
      if (source == 0) entry = choices_in_->as<uint32_t>()[token * shape.top_k + k];
      if (source > 0) {
        std::memcpy(&entry, template_row(source, plan.arrays[5][row]) + 4 * k, 4);
      }
      if (choices_out_->as<uint32_t>()[row] != entry) return "choice of row " + std::to_string(row);
    }
    return "";
  }

  // Returns the sum of rank 0's rows of a slot of `source`. Sets `is_taken` if the slot has a choice.
  float partial_sum(int source, int slot, int64_t element, bool* is_taken) const {
    const Shape& shape = routing_.shape;
    float sum = 0;
    for (int k = 0; k < shape.top_k; ++k) {
      const int row = routing_.plans[0].slot_row(shape, source, slot, k);
      *is_taken = *is_taken || row != -1;
      if (row < 0) continue;
      const float weight = is_weighted_ ? weights_->as<float>()[row] : 1.f;
      sum += weight * number(in_->data() + row * elements_ * 2, element);
    }
    return sum;
  }

  std::string wrong_sums() const {
    const Shape& shape = routing_.shape;
    const Plan& plan = routing_.plans[0];
    for (int token = 0; token < shape.num_tokens; ++token) {
      for (int64_t e = 0; e < elements_; ++e) {
        float expected = 0;
        for (int rank = 0; rank < shape.num_ranks; ++rank) {
          const int slot = plan.token_slot(shape, token, rank);
          bool is_taken = false;
          if (slot < 0) continue;
          expected +=
              rank == 0 ? partial_sum(0, slot, e, &is_taken) : number(template_row(rank, slot), e);
        }
        const float seen = number(out_->data() + token * elements_ * 2, e);
        if (!(seen == expected)) {
          return "token " + std::to_string(token) + ", element " + std::to_string(e) +
                 ": expected " + std::to_string(expected) + ", got " + std::to_string(seen);
        }
      }
      for (int k = 0; k < shape.top_k && has_choice_array_; ++k) {
        const int at = plan.choice_rank(shape, token, k);
        uint32_t expected = 0;
        if (at >= 0) {
          const int slot = plan.token_slot(shape, token, at);
          if (at > 0) std::memcpy(&expected, template_row(at, slot) + 4 * k, 4);
          const int row = at == 0 ? plan.slot_row(shape, 0, slot, k) : -1;
          if (row >= 0) expected = choices_in_->as<uint32_t>()[row];
        }
        if (choices_out_->as<uint32_t>()[token * shape.top_k + k] != expected) {
          return "entry of token " + std::to_string(token) + ", choice " + std::to_string(k);
        }
      }
    }
    return "";
  }

  // Returns the first error in what `rank` has received. `zone`: the zone of rank 0 in the slab of that rank.
  std::string wrong_at(int rank, const char* zone) const {
    const Shape& shape = routing_.shape;
    for (int slot = 0; slot < shape.num_tokens; ++slot) {
      const int token = routing_.plans[0].arrays[1][rank * shape.num_tokens + slot];
      if (is_dispatch_ && token < 0) continue;
      for (int64_t e = 0; e < elements_; ++e) {
        bool is_taken = is_dispatch_;
        const float expected = is_dispatch_ ? number(in_->data() + token * elements_ * 2, e)
                                            : partial_sum(rank, slot, e, &is_taken);
        const float seen = number(zone + slot * row_stride(elements_ * 2), e);
        if (is_taken && !(seen == expected)) {
          return "slot " + std::to_string(slot) + " at rank " + std::to_string(rank);
        }
      }
    }
    return "";
  }

  Making making_;
  Routing routing_;
  const char* templates_;
  bool is_dispatch_, is_weighted_, has_choice_array_;
  int64_t elements_;
  emulation::Array in_, out_, choices_in_, choices_out_, weights_;
};

void run(std::map<std::string, std::string>& options) {
  const auto number_of = [&](const char* name, double otherwise) {
    return options.count(name) > 0 ? std::stod(options[name]) : otherwise;
  };
  const auto whole = [&](const char* name, int otherwise) {
    return static_cast<int>(number_of(name, otherwise));
  };
  const int seed = whole("seed", 1), steps = whole("steps", 6), blocks = whole("blocks", 2);
  const std::string fault = options["fault"];
  set_seed(static_cast<uint64_t>(seed));
  Random random(static_cast<uint64_t>(seed));
  Making making;
  making.num_ranks = whole("ranks", 2);
  if (making.num_ranks < 2 || making.num_ranks > kMaxPlayedRanks || steps < 2) std::exit(2);

  const emulation::Array templates = make_numbers(random, kTemplates * kTemplateBytes / 2);
  std::vector<std::unique_ptr<Step>> sequence;
  std::vector<PlayedCall> calls;
  std::vector<int32_t> order;
  int64_t half_bytes = 0;
  for (int i = 0; i < steps; ++i) {
    sequence.push_back(std::make_unique<Step>(making, random, templates->data()));
    calls.push_back(sequence.back()->call);
    order.push_back(i);
    half_bytes = std::max(half_bytes, calls.back().zone_bytes * making.num_ranks);
  }
  if (fault == "call")
    calls.back().signature += uint64_t{1} << 40;  // flags contain only the 16 lowest bits
  Domain domain(making.num_ranks, half_bytes, kMaxRanks);
  std::vector<ErrorRecord> records(making.num_ranks);
  for (int rank = 0; rank < making.num_ranks; ++rank) {
    domain.control(rank).depth = static_cast<uint32_t>(whole("depth", 0));
    domain.control(rank).mutation = static_cast<uint32_t>(whole("breaks", 0));
  }
  const double timeout = number_of("timeout", 60);
  RankView view = domain.view(0, Operation::kDispatch, 0, timeout, timeout);
  view.error = records.data();

  uint32_t arrived[2] = {0, 0};
  std::vector<uint64_t> started(blocks);
  std::vector<PlayedTime> times(static_cast<size_t>(steps) * blocks);
  PlayerParams p = {};
  p.view = view;
  p.calls = calls.data();
  p.order = order.data();
  p.num_launches = steps - (fault == "missing");
  p.first_epoch = 1;
  p.templates = templates->data();
  p.template_bytes = kTemplateBytes;
  p.ns_per_byte = random.one_in(2) ? 0 : 10;
  p.arrived = arrived;
  p.started = started.data();
  p.times = times.data();
  std::thread player([&] {
    if (LaunchPlayer(p, blocks, player_shared_bytes(p), stream_of(1)) != cudaSuccess)
      report("the player's launch failed");
  });
  const int launches = steps - (fault == "rank");
  int failed = 0;
  for (int i = 0; i < launches; ++i) {
    view.launch = static_cast<uint64_t>(i) + 1;
    Step& step = *sequence[i];
    if (step.launch(view, 1 + random.below(whole("sms", 3)), random) != cudaSuccess) {
      report("step %d: the launch failed", i);
    }
    const bool is_last = i == steps - 1;
    if (is_last && (fault == "call" || fault == "missing")) {
      failed += step.is_failure();
      continue;
    }
    const int depth = whole("depth", 0) == 0 ? kRingDepth : whole("depth", 0);
    const std::string what = step.wrong(view, (i + 1) % depth);
    if (!what.empty()) report("step %d, %s: %s", i, step.name().c_str(), what.c_str());
  }
  player.join();
  int reported = 0;
  for (const ErrorRecord& record : records) {
    if (record.kind == 0) continue;
    ++reported;
    if (fault.empty()) {
      report("has failed: %s", describe(record).c_str());
    } else {
      std::printf("record: %s\n", describe(record).c_str());
    }
  }
  if (!fault.empty() && reported == 0) report("no rank has reported the fault");
  if ((fault == "call" || fault == "missing") && failed == 0) {
    report("rank 0's results of the faulty exchange look right");
  }
  if (const std::string damage = domain.damage(); !damage.empty()) report("%s", damage.c_str());
  // The player must not store faster than the rate that it was given.
  for (int i = 0; i < steps && fault.empty(); ++i) {
    uint64_t end = 0, begin = UINT64_MAX;
    for (int b = 0; b < blocks; ++b) {
      begin = std::min(begin, times[i * blocks + b].begin);
      end = std::max(end, times[i * blocks + b].end);
    }
    const int64_t bytes = played_bytes(calls[i], making.num_ranks);
    const int64_t last = played_row_bytes(calls[i]) * slots_per_chunk(calls[i].num_slots);
    const double least = static_cast<double>(std::max<int64_t>(0, bytes - last)) * p.ns_per_byte;
    if (static_cast<double>(end - begin) < least) report("step %d: too fast", i);
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::map<std::string, std::string> options;
  for (int i = 1; i < argc; i += 2) {
    const std::string name = argv[i];
    if (i + 1 == argc || name.rfind("--", 0) != 0 ||
        std::string(kUsage).find(name + " ") == std::string::npos) {
      std::fprintf(stderr, "%s", kUsage);
      return 2;
    }
    options[name.substr(2)] = argv[i + 1];
  }
  if (DirectKernels().load() != cudaSuccess || LoadPlayer(kTemplates * kTemplateBytes) != 0) {
    return 2;
  }
  run(options);
  std::printf("%d wrong\n", num_wrong);
  std::fflush(stdout);
  return num_wrong > 0 ? 1 : 0;
}
