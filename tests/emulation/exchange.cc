#include "exchange.h"

namespace emulation {

using namespace moe_a2a;

namespace {

// Sometimes all ids are -1 or equal, or some are -1 or out of range.
std::vector<int32_t> make_ids(const Shape& shape, Random& random) {
  enum { kSomeMissing, kSomeInvalid, kAllTheSame, kNone, kPlain };
  const int kind = random.below(6);
  std::vector<int32_t> ids;
  for (int i = 0; i < shape.num_choices(); ++i) {
    int32_t id = random.below(shape.num_experts());
    if (kind == kSomeMissing && random.one_in(2)) id = -1;
    if (kind == kSomeInvalid && random.one_in(3)) id = static_cast<int32_t>(random.next());
    if (kind == kAllTheSame) id = 0;
    if (kind == kNone) id = -1;
    ids.push_back(id);
  }
  return ids;
}

// The value may be outside of the index's range.
int32_t corrupt(int32_t index, const Shape& shape, Random& random) {
  switch (random.below(6)) {
    case 0: return static_cast<int32_t>(random.next());
    case 1: return -1;
    case 2: return index + 1;
    case 3: return random.below(shape.capacity + 2);
    case 4: return random.below(shape.num_tokens + 2);
    default: return INT32_MAX - random.below(3);
  }
}

}  // namespace

Routing::Routing(const Making& making, Random& random, int max_tokens, int max_top_k,
                 bool may_have_parts) {
  max_tokens = std::min(max_tokens, making.max_tokens);
  shape.num_ranks = making.num_ranks;
  shape.top_k = 1 + random.below(std::min(max_top_k, random.one_in(5) ? kMaxTopK : 4));
  shape.num_tokens = 1 + random.below(shape.top_k > 8 ? std::min(5, max_tokens) : max_tokens);
  // If there are more than kMaxChunks tokens, adjacent tokens share a flag.
  if (may_have_parts && shape.top_k <= 4 && random.one_in(5) && making.max_tokens > kMaxChunks) {
    shape.num_tokens += kMaxChunks;
  }
  shape.local_experts = 1 + random.below(making.max_local_experts);
  shape.alignment = random.one_in(2) ? 1 : 1 + random.below(5);
  if (may_have_parts && random.one_in(4)) {
    shape.parts = 2;
    shape.num_tokens = 2 * ((shape.num_tokens + 1) / 2);
  }
  const int most = shape.num_ranks * shape.num_choices();
  const bool is_tight = random.one_in(3);
  const int padding = std::min(shape.local_experts, most) * (shape.alignment - 1);
  shape.capacity =
      std::max(1, is_tight ? random.below(most + 1) : most + padding + random.below(8));
  const bool holds_all =
      shape.capacity >= static_cast<int>(round_up(most + padding, shape.alignment));
  shape.may_drop = !holds_all || random.one_in(2);
  for (int rank = 0; rank < shape.num_ranks; ++rank) ids.push_back(make_ids(shape, random));
  if (making.at_threshold) move_to_threshold(random, max_tokens);
  plans = plans_of(shape, ids);
}

// Draws ids and sizes until splits_sources() is true (oracle.h).
void Routing::move_to_threshold(Random& random, int max_tokens) {
  shape.parts = 1;
  do {
    shape.top_k = random.between(2, 4);
    shape.num_tokens = random.between(4, std::max(4, max_tokens));
    shape.alignment = random.one_in(2) ? 1 : random.between(2, 4);
    shape.may_drop = true;
    shape.capacity = random.between(1, shape.num_ranks * shape.num_choices());
    const int popular = random.below(shape.num_ranks);
    for (auto& of_source : ids) {
      of_source.clear();
      for (int i = 0; i < shape.num_choices(); ++i) {
        const int rank = random.one_in(3) ? random.below(shape.num_ranks) : popular;
        of_source.push_back(rank * shape.local_experts + random.below(shape.local_experts));
      }
    }
  } while (!splits_sources(shape, ids));
}

RoutingArrays::RoutingArrays(const Making& making, Random& random, const Routing& routing,
                             int rank) {
  const InMemoryOf memory(rank);
  for (int i : {0, 1, 2, 3, 5}) {  // the arrays that exchanges read
    std::vector<int32_t> values = routing.plans[rank].arrays[i];
    if (i == 0 && rank == making.crowded_rank) {
      for (int32_t& slot : values) slot = std::max(slot, 0);
    }
    if (making.corrupt_one_in > 0 && random.one_in(2)) {
      for (int32_t& value : values) {
        if (random.one_in(making.corrupt_one_in)) value = corrupt(value, routing.shape, random);
      }
    }
    arrays_.push_back(make_array(values));
  }
}

namespace {

void add_routing(Bound& args, const Shape& s, char* const* data) {
  args.add(kInt32, {s.num_tokens, s.num_ranks}, data[0]);
  args.add(kInt32, {s.num_ranks, s.num_tokens}, data[1]);
  args.add(kInt32, {s.num_tokens, s.top_k}, data[2]);
  args.add(kInt32, {s.num_ranks, s.num_tokens, s.top_k}, data[3]);
  args.add(kInt32, {s.capacity}, data[4]);
}

}  // namespace

void RoutingArrays::add_to(Bound& args, const Shape& shape) const {
  std::vector<char*> data;
  for (const Array& array : arrays_) data.push_back(array->data());
  add_routing(args, shape, data.data());
}

void add_routing_sizes(Bound& args, const Shape& shape) {
  char* const none[kNumRoutingArrays] = {};
  add_routing(args, shape, none);
}

void PlanOutputs::add_to(Bound& results, const Shape& shape, int64_t batch) const {
  for (int i = 0; i < kNumPlanArrays; ++i) {
    const bool is_of_rows =
        kPlanArrays[i] == &RoutePlan::row_rank;  // its last axis is the capacity
    const auto count = static_cast<int64_t>(arrays_[i]->bytes() / sizeof(int32_t));
    results.add(kInt32, {is_of_rows ? count / batch : count}, arrays_[i]);
  }
}

std::string PlanOutputs::wrong(const Plan& expected) const {
  for (int i = 0; i < kNumPlanArrays; ++i) {
    for (size_t j = 0; j < expected.arrays[i].size(); ++j) {
      const int32_t seen = arrays_[i]->as<int32_t>()[j];
      if (seen != expected.arrays[i][j]) {
        return "array " + std::to_string(i) + " of the plan [" + std::to_string(j) +
               "]: expected " + std::to_string(expected.arrays[i][j]) + ", got " +
               std::to_string(seen);
      }
    }
  }
  return "";
}

const DataType& data_type(ElementType type) {
  for (const DataType* known : {&kBFloat16, &kFloat16}) {
    ElementType element;
    if (ToElementType(*known, &element) && element == type) return *known;
  }
  return kFloat32;
}

std::string name_of(TokenFormat format) {
  std::string name;
  for_each(TokenFormats{}, [&](auto each) {
    constexpr TokenFormat kEach = decltype(each)::value;
    if (kEach == format) name = Format<kEach>::kName;
  });
  return name;
}

void Bound::add(const DataType& type, std::vector<int64_t> axes, char* data) {
  const auto& owned =
      dimensions.emplace_back(std::make_shared<const std::vector<int64_t>>(std::move(axes)));
  moe_a2a::Array& array = arrays.emplace_back();
  array.type = type;
  array.dimensions = {owned->data(), owned->size()};
  array.bytes = NumElements(array, 0) * type.bytes;
  array.data = data;
  array.address_bits = reinterpret_cast<uintptr_t>(data);
}

void vary_roles(Random& random, int num_blocks, Roles& roles) {
  if (random.one_in(2)) return;
  const auto some_teams = [&] {
    int teams = 1;
    while (teams < kMaxTeams && random.one_in(2)) teams *= 2;
    return teams;
  };
  roles = {1 + random.below(num_blocks), some_teams(), some_teams()};
}

}  // namespace emulation
