#include "exchange.h"

namespace emulation {
namespace {

using namespace moe_a2a;

class RouteExchange : public Exchange {
 public:
  RouteExchange(const Making& making, Random& random) : Exchange(making.num_ranks) {
    name = "route";
    batch_.emplace_back(making, random, 20, kMaxTopK, false);
    Shape shape = batch_[0].shape;
    shape.group_experts = 1 + random.below(3);
    while (shape.local_experts % shape.group_experts != 0) --shape.group_experts;
    batch_[0].shape = shape;
    batch_[0].plans = plans_of(shape, batch_[0].ids);
    for (int extra = random.one_in(3) ? 1 : 0; extra > 0; --extra) {
      Routing other = batch_[0];
      for (auto& ids : other.ids) {
        for (int32_t& id : ids) id = random.one_in(4) ? -1 : random.below(shape.num_experts());
      }
      other.plans = plans_of(shape, other.ids);
      batch_.push_back(other);
    }
    // route_assign has a block for each chunk, and ThreadSanitizer supports only 8128 threads.
    const int most_chunks = std::max(1, (making.at_threshold ? 16 : 8) / shape.num_ranks);
    tokens_per_chunk_ = static_cast<int>(ceil_div(shape.num_tokens, most_chunks)) +
                        random.below(making.at_threshold ? 3 : 8);
    for (int rank = 0; rank < making.num_ranks; ++rank) ranks_.push_back(make_rank(rank));
  }

  Operation operation() const override { return Operation::kRoute; }
  int64_t zone_bytes() const override {
    return zone_bytes_of(call(), batch_[0].shape.num_ranks, arguments(0));
  }

  cudaError_t launch(const LaunchOn& on) override {
    return launch_call(call(), on, arguments(on.rank), [](RouteParams&, int) {});
  }

  std::string wrong(int rank) const override { return ranks_[rank].outputs.wrong(expected(rank)); }

 private:
  struct Rank {
    Array ids, number, all_ids, expert_counts, rank_counts;
    PlanOutputs outputs;
  };

  RouteCall call() const {
    const Shape& shape = batch_[0].shape;
    return {{},
            shape.num_experts(),
            shape.alignment,
            tokens_per_chunk_,
            shape.may_drop,
            shape.group_experts};
  }

  Arguments arguments(int rank) const {
    const Rank& own = ranks_[rank];
    const Shape& shape = batch_[0].shape;
    const auto batch = static_cast<int64_t>(batch_.size());
    Arguments a;
    a.args.add(kInt32, {batch, shape.num_tokens, shape.top_k}, own.ids);
    a.args.add(kInt32, {}, own.number);
    own.outputs.add_to(a.results, shape, batch);
    for (const Array& scratch : {own.all_ids, own.expert_counts, own.rank_counts}) {
      a.results.add(kByte, {static_cast<int64_t>(scratch->bytes())}, scratch);
    }
    return a;
  }

  int num_chunks() const {
    return static_cast<int>(ceil_div(batch_[0].shape.num_tokens, tokens_per_chunk_));
  }

  Plan expected(int rank) const {
    Plan all;
    for (const Routing& element : batch_) {
      for (int i = 0; i < kNumPlanArrays; ++i) {
        const auto& values = element.plans[rank].arrays[i];
        all.arrays[i].insert(all.arrays[i].end(), values.begin(), values.end());
      }
    }
    return all;
  }

  Rank make_rank(int rank) {
    const Shape& shape = batch_[0].shape;
    const size_t batch = batch_.size(), ranks = static_cast<size_t>(shape.num_ranks);
    const size_t chunks = static_cast<size_t>(num_chunks());
    const InMemoryOf memory(rank);
    Rank made;
    std::vector<int32_t> ids;
    for (const Routing& element : batch_) {
      ids.insert(ids.end(), element.ids[rank].begin(), element.ids[rank].end());
    }
    made.ids = make_array(ids);
    made.number = make_array(std::vector<int32_t>{rank});
    made.all_ids = make_array(ranks * ids.size() * 4, 4);
    const int levels = shape.may_drop ? shape.top_k : 1;
    const auto counts = static_cast<size_t>(levels * shape.local_experts) + 1;
    made.expert_counts = make_array(batch * ranks * chunks * counts * 4, 4);
    made.rank_counts = make_array(batch * chunks * ranks * 4, 4);
    const Plan plan = expected(rank);
    for (int i = 0; i < kNumPlanArrays; ++i) {
      const unsigned char fill = i < 8 ? 0xFF : 0;  // each byte after a failure
      made.outputs.add(add_output(rank, plan.arrays[i].size() * 4, 4, fill));
    }
    return made;
  }

  std::vector<Routing> batch_;
  int tokens_per_chunk_;
  std::vector<Rank> ranks_;
};

}  // namespace

ExchangePtr make_route(const Making& making, Random& random) {
  return std::make_unique<RouteExchange>(making, random);
}

}  // namespace emulation
