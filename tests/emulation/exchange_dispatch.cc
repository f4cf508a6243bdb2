// The four forms of dispatch: plain, weighted, with a token format, and routed (with or without a
// format).
#include <algorithm>
#include <string>

#include "exchange.h"

namespace emulation {
namespace {

using namespace moe_a2a;

struct Moved {
  int64_t row_bytes, choice_bytes;
  std::vector<Array> in, out;

  int64_t out_bytes() const { return choice_bytes > 0 ? choice_bytes : row_bytes; }
};

struct Leaf {
  int64_t elements;
  std::vector<Array> in;                       // indexed by rank
  std::vector<Array> decoded, values, scales;  // by rank, or empty
};

class Payload : public Exchange {
 public:
  Operation operation() const override { return Operation::kDispatch; }

 protected:
  Payload(const Making& making, Random& random, int max_tokens, int max_top_k, bool may_have_parts)
      : Exchange(making.num_ranks),
        making_(making),
        routing_(making, random, max_tokens, max_top_k, may_have_parts),
        leaves_tail_(random.one_in(2)) {}

  const Shape& shape() const { return routing_.shape; }

  // Some arrays are not aligned to 16 bytes, so kernels use every access width.
  void add_moved(Random& random, int most) {
    const size_t skew = random.one_in(3) ? random.below(4) : 0;
    for (int count = 1 + random.below(most); count > 0; --count) {
      int64_t bytes = 1 + random.below(40);
      if (!random.one_in(3))
        bytes = 16 * (random.one_in(2) ? 1 + random.below(40) : 200 + random.below(300));
      add_array(random, bytes, 0, bytes % 16 == 0 ? 0 : skew);
    }
    if (random.one_in(2)) {
      const int64_t bytes = random.one_in(2) ? 4 : 1 + random.below(6);
      add_array(random, bytes * shape().top_k, bytes, skew);
    }
  }

  // Adds leaves in a random format, which represents all their numbers exactly.
  void add_encoded(Random& random) {
    encoding_.format = static_cast<TokenFormat>(1 + random.below(TokenFormats::kCount));
    encoding_.type = static_cast<ElementType>(random.below(Elements::kCount));
    encoding_.decode = random.one_in(2);
    has_encoded_ = !encoding_.decode || random.one_in(2);
    encoding_.num_leaves = random.one_in(3) ? 2 : 1;
    encoding_.global_scale = 1.f;
    if (encoding_.format == TokenFormat::kNvFp4 && random.one_in(2)) {
      for (int rank = 0; rank < shape().num_ranks; ++rank) {
        const InMemoryOf memory(rank);
        Array scales = make_array(static_cast<size_t>(shape().num_tokens) * 4, 4);
        for (int i = 0; i < shape().num_tokens; ++i) {
          scales->as<float>()[i] = std::ldexp(1.f, random.between(-3, 3));
        }
        token_scales_.push_back(scales);
      }
    }
    const size_t item = static_cast<size_t>(item_bytes(encoding_.type));
    for (int i = 0; i < encoding_.num_leaves; ++i) {
      Leaf leaf = {128 * int64_t{1 + random.below(making_.max_groups)}, {}, {}, {}, {}};
      const auto elements = static_cast<size_t>(leaf.elements);
      const auto rows = static_cast<size_t>(shape().capacity);
      for (int rank = 0; rank < shape().num_ranks; ++rank) {
        const InMemoryOf memory(rank);
        Array in = make_array(static_cast<size_t>(shape().num_tokens) * elements * item);
        for (size_t e = 0; e < static_cast<size_t>(shape().num_tokens) * elements; ++e) {
          write_number(in->data() + e * item, encoding_.type,
                       exact_number(random, static_cast<int64_t>(e)));
        }
        leaf.in.push_back(in);
        if (encoding_.decode) {
          leaf.decoded.push_back(add_output(rank, rows * elements * item, 16, kNanByte));
        }
        if (has_encoded_) {
          leaf.values.push_back(add_output(
              rank, rows * static_cast<size_t>(value_bytes(encoding_.format, leaf.elements)), 16,
              kNanByte));
          leaf.scales.push_back(add_output(
              rank, rows * static_cast<size_t>(scale_bytes(encoding_.format, leaf.elements)), 16,
              kNanByte));
        }
      }
      leaves_.push_back(leaf);
    }
    if (random.one_in(3)) add_array(random, 4 * shape().top_k, 4, 0);
  }

  Arguments payload(int rank) const {
    const int64_t tokens = shape().num_tokens, top_k = shape().top_k, capacity = shape().capacity;
    Arguments a;
    for (const Leaf& leaf : leaves_) {
      const DataType& type = data_type(encoding_.type);
      a.args.add(type, {tokens, leaf.elements}, leaf.in[rank]);
      if (encoding_.decode) a.results.add(type, {capacity, leaf.elements}, leaf.decoded[rank]);
    }
    for (const Leaf& leaf : leaves_) {
      if (!has_encoded_) break;
      a.results.add(kByte, {capacity, value_bytes(encoding_.format, leaf.elements)},
                    leaf.values[rank]);
      a.results.add(kByte, {capacity, scale_bytes(encoding_.format, leaf.elements)},
                    leaf.scales[rank]);
    }
    for (const Moved& moved : moved_) {
      if (moved.choice_bytes > 0) {
        a.args.add(kByte, {tokens, top_k, moved.choice_bytes}, moved.in[rank]);
      } else {
        a.args.add(kByte, {tokens, moved.row_bytes}, moved.in[rank]);
      }
      a.results.add(kByte, {capacity, moved.out_bytes()}, moved.out[rank]);
    }
    if (!token_scales_.empty()) a.args.add(kFloat32, {tokens}, token_scales_[rank]);
    return a;
  }

  MovedPayload moved() const {
    return {std::count_if(moved_.begin(), moved_.end(),
                          [](const Moved& moved) { return moved.choice_bytes > 0; }),
            leaves_tail_};
  }

  EncodedPayload encoded() const {
    return {moved(),      name_of(encoding_.format), encoding_.num_leaves,  encoding_.decode,
            has_encoded_, !token_scales_.empty(),    encoding_.global_scale};
  }

  template <typename Call>
  int64_t zone_bytes_with_routing(const Call& call) const {
    Arguments a = payload(0);
    add_routing_sizes(a.args, shape());
    return zone_bytes_of(call, shape().num_ranks, a);
  }

  template <typename Call, typename Vary>
  cudaError_t launch_with_routing(const Call& call, const LaunchOn& on, const Vary& vary) const {
    const RoutingArrays routing(making_, on.random, routing_, on.rank);
    Arguments a = payload(on.rank);
    routing.add_to(a.args, shape());
    return launch_call(call, on, a, vary);
  }

  std::string wrong_payload(int rank) const {
    const Plan& plan = routing_.plans[rank];
    for (int row = 0; row < shape().capacity; ++row) {
      for (size_t a = 0; a < moved_.size(); ++a) {
        const bool is_right = is_left(plan, row)
                                  ? is_untouched(moved_[a].out[rank], row, moved_[a].out_bytes())
                                  : is_moved_right(moved_[a], plan, rank, row);
        if (!is_right) {
          return describe_row("array", a, moved_[a].out_bytes(), plan, row);
        }
      }
      for (size_t a = 0; a < leaves_.size(); ++a) {
        const bool is_right = is_left(plan, row) ? is_leaf_untouched(leaves_[a], rank, row)
                                                 : is_leaf_right(leaves_[a], plan, rank, row);
        if (!is_right) {
          return describe_row("leaf", a, leaves_[a].elements, plan, row);
        }
      }
    }
    return "";
  }

  Making making_;
  Routing routing_;
  std::vector<Moved> moved_;
  std::vector<Leaf> leaves_;
  std::vector<Array> token_scales_;  // indexed by rank
  Encoding encoding_ = {};
  bool has_encoded_ = false;
  bool leaves_tail_;

 private:
  // True for rows of the tail that the call must not write.
  bool is_left(const Plan& plan, int row) const { return leaves_tail_ && plan.is_tail(row); }

  static bool is_untouched(const Array& out, int row, int64_t bytes) {
    const char* first = out->data() + row * bytes;
    return GuardedArray::is_untouched(first, first + bytes);
  }

  bool is_leaf_untouched(const Leaf& leaf, int rank, int row) const {
    const int64_t decoded = leaf.elements * item_bytes(encoding_.type);
    const int64_t values = value_bytes(encoding_.format, leaf.elements);
    const int64_t scales = scale_bytes(encoding_.format, leaf.elements);
    return (!encoding_.decode || is_untouched(leaf.decoded[rank], row, decoded)) &&
           (!has_encoded_ || (is_untouched(leaf.values[rank], row, values) &&
                              is_untouched(leaf.scales[rank], row, scales)));
  }

  void add_array(Random& random, int64_t row_bytes, int64_t choice_bytes, size_t skew) {
    Moved moved = {row_bytes, choice_bytes, {}, {}};
    for (int rank = 0; rank < shape().num_ranks; ++rank) {
      const InMemoryOf memory(rank);
      Array in = make_array(static_cast<size_t>(shape().num_tokens * row_bytes), 16, skew);
      for (size_t i = 0; i < in->bytes(); ++i) in->data()[i] = static_cast<char>(random.next());
      moved.in.push_back(in);
      moved.out.push_back(add_output(
          rank, static_cast<size_t>(shape().capacity * moved.out_bytes()), 16, kNanByte, skew));
    }
    moved_.push_back(moved);
  }

  static bool is_moved_right(const Moved& moved, const Plan& plan, int rank, int row) {
    const int64_t bytes = moved.out_bytes();
    const char* out = moved.out[rank]->data() + row * bytes;
    if (plan.row_rank(row) < 0) return std::all_of(out, out + bytes, [](char c) { return c == 0; });
    const int64_t choice = moved.choice_bytes > 0 ? plan.row_k(row) * moved.choice_bytes : 0;
    const char* in = moved.in[plan.row_rank(row)]->data() + plan.row_token(row) * moved.row_bytes;
    return std::memcmp(out, in + choice, static_cast<size_t>(bytes)) == 0;
  }

  bool is_leaf_right(const Leaf& leaf, const Plan& plan, int rank, int row) const {
    const int64_t item = item_bytes(encoding_.type);
    const int source = plan.row_rank(row), token = plan.row_token(row);
    const int64_t values = value_bytes(encoding_.format, leaf.elements);
    const int64_t scales = scale_bytes(encoding_.format, leaf.elements);
    const float global = source < 0 || token_scales_.empty()
                             ? encoding_.global_scale
                             : token_scales_[source]->as<float>()[token];
    for (int64_t i = 0; i < leaf.elements; ++i) {
      const float expected =
          source < 0 ? 0.f
                     : read_number(leaf.in[source]->data() + (token * leaf.elements + i) * item,
                                   encoding_.type);
      if (encoding_.decode) {
        const char* decoded = leaf.decoded[rank]->data() + (row * leaf.elements + i) * item;
        if (!(read_number(decoded, encoding_.type) == expected)) return false;
      }
      if (!has_encoded_) continue;
      const float seen = decode(encoding_.format, leaf.values[rank]->data() + row * values,
                                leaf.scales[rank]->data() + row * scales, i, global);
      if (!(seen == expected)) return false;
    }
    return true;
  }

  static std::string describe_row(const char* what, size_t index, int64_t size, const Plan& plan,
                                  int row) {
    return std::string(what) + " " + std::to_string(index) + " of " + std::to_string(size) +
           ", row " + std::to_string(row) + " of token " + std::to_string(plan.row_token(row)) +
           " of rank " + std::to_string(plan.row_rank(row));
  }
};

class Dispatch : public Payload {
 public:
  Dispatch(const Making& making, Random& random) : Payload(making, random, 20, kMaxTopK, true) {
    name = "dispatch";
    add_moved(random, 3);
  }
  int64_t zone_bytes() const override { return zone_bytes_with_routing(call()); }
  cudaError_t launch(const LaunchOn& on) override {
    return launch_with_routing(
        call(), on, [&](DispatchParams& p, int blocks) { vary_roles(on.random, blocks, p.roles); });
  }
  std::string wrong(int rank) const override { return wrong_payload(rank); }

 private:
  DispatchCall call() const { return {{{}, moved()}}; }
};

class FormatDispatch : public Payload {
 public:
  FormatDispatch(const Making& making, Random& random)
      : Payload(making, random, 20, kMaxTopK, true) {
    name = "format_dispatch";
    add_encoded(random);
  }
  int64_t zone_bytes() const override { return zone_bytes_with_routing(call()); }
  cudaError_t launch(const LaunchOn& on) override {
    return launch_with_routing(call(), on, [&](FormatDispatchParams& p, int blocks) {
      vary_roles(on.random, blocks, p.exchange.roles);
    });
  }
  std::string wrong(int rank) const override { return wrong_payload(rank); }

 private:
  FormatDispatchCall call() const { return {{{}, encoded()}}; }
};

class RoutedDispatch : public Payload {
 public:
  RoutedDispatch(const Making& making, Random& random)
      : Payload(making, random, 12, kMaxTopK, false) {
    const bool is_encoded = random.one_in(3);
    name = is_encoded ? "routed_dispatch in a format" : "routed_dispatch";
    if (is_encoded) {
      add_encoded(random);
    } else {
      add_moved(random, 2);
    }
    for (int rank = 0; rank < making.num_ranks; ++rank) {
      const InMemoryOf memory(rank);
      ids_.push_back(make_array(routing_.ids[rank]));
      numbers_.push_back(make_array(std::vector<int32_t>{rank}));
      PlanOutputs outputs;
      for (int i = 0; i < kNumPlanArrays; ++i) {
        const size_t bytes = routing_.plans[rank].arrays[i].size() * 4;
        outputs.add(add_output(rank, bytes, 4, i < 8 ? 0xFF : 0));
      }
      plans_.push_back(outputs);
    }
  }
  Operation operation() const override { return Operation::kRoutedDispatch; }
  int64_t zone_bytes() const override {
    return zone_bytes_of(call(), shape().num_ranks, arguments(0));
  }
  cudaError_t launch(const LaunchOn& on) override {
    return launch_call(call(), on, arguments(on.rank), [](RoutedDispatchParams&, int) {});
  }
  std::string wrong(int rank) const override {
    const std::string plan = plans_[rank].wrong(routing_.plans[rank]);
    return plan.empty() ? wrong_payload(rank) : plan;
  }

 private:
  RoutedDispatchCall call() const {
    return {{},
            shape().num_experts(),
            shape().alignment,
            shape().may_drop,
            leaves_.empty() ? EncodedPayload{moved()} : encoded()};
  }

  Arguments arguments(int rank) const {
    const Arguments of_payload = payload(rank);
    Arguments a;
    a.args.add(kInt32, {shape().num_tokens, shape().top_k}, ids_[rank]);
    a.args.add(kInt32, {}, numbers_[rank]);
    a.args.append(of_payload.args);
    plans_[rank].add_to(a.results, shape(), 1);
    a.results.append(of_payload.results);
    return a;
  }

  std::vector<Array> ids_, numbers_;  // indexed by rank
  std::vector<PlanOutputs> plans_;
};

// The destination rank multiplies each row by a weight, computes its inner product with another
// array's row, or does both.
class WeightedDispatch : public Exchange {
 public:
  WeightedDispatch(const Making& making, Random& random)
      : Exchange(making.num_ranks),
        making_(making),
        routing_(making, random, 20, kMaxTopK, true),
        type_(static_cast<ElementType>(random.below(Elements::kCount))) {
    name = "weighted dispatch";
    const bool scales = random.one_in(2), dots = !scales || random.one_in(2);
    elements_ = 8 * (1 + random.below(random.one_in(3) ? 200 : 12));
    const size_t item = static_cast<size_t>(item_bytes(type_)), row = elements_ * item;
    const auto capacity = static_cast<size_t>(routing_.shape.capacity);
    const auto tokens = static_cast<size_t>(routing_.shape.num_tokens);
    for (int rank = 0; rank < making.num_ranks; ++rank) {
      const InMemoryOf memory(rank);
      Rank made;
      made.in = make_numbers(random, tokens * elements_);
      if (scales) {
        made.out = add_output(rank, capacity * row, 16, kNanByte);
        made.weights = make_array(capacity * 4, 4);
        for (size_t i = 0; i < capacity; ++i) {
          made.weights->as<float>()[i] = static_cast<float>(random.between(-1, 2));
        }
      }
      if (dots) {
        made.rows = make_numbers(random, capacity * elements_);
        made.dotted = add_output(rank, capacity * 4, 4, kNanByte);
      }
      ranks_.push_back(made);
    }
  }

  Operation operation() const override { return Operation::kDispatch; }
  int64_t zone_bytes() const override {
    Arguments a = arguments(0);
    add_routing_sizes(a.args, routing_.shape);
    return zone_bytes_of(call(), routing_.shape.num_ranks, a);
  }

  cudaError_t launch(const LaunchOn& on) override {
    const RoutingArrays routing(making_, on.random, routing_, on.rank);
    Arguments a = arguments(on.rank);
    routing.add_to(a.args, routing_.shape);
    return launch_call(call(), on, a, [&](DispatchParams& p, int blocks) {
      vary_roles(on.random, blocks, p.roles);
    });
  }

  std::string wrong(int rank) const override {
    const Plan& plan = routing_.plans[rank];
    const Rank& own = ranks_[rank];
    for (int row = 0; row < routing_.shape.capacity; ++row) {
      const int source = plan.row_rank(row);
      float dot = 0.f;
      for (size_t e = 0; e < elements_; ++e) {
        const float x =
            source < 0 ? 0.f : number(ranks_[source].in, plan.row_token(row) * elements_ + e);
        if (own.weights != nullptr && !(number(own.out, row * elements_ + e) ==
                                        (source < 0 ? 0.f : x * own.weights->as<float>()[row]))) {
          return "scaled row " + std::to_string(row) + ", element " + std::to_string(e);
        }
        if (own.rows != nullptr) dot += x * number(own.rows, row * elements_ + e);
      }
      if (own.rows != nullptr && !(own.dotted->as<float>()[row] == dot)) {
        return "inner product " + std::to_string(row);
      }
    }
    return "";
  }

 private:
  struct Rank {
    Array in, rows, weights, out, dotted;
  };

  WeightedDispatchCall call() const {
    return {{}, ranks_[0].rows != nullptr, ranks_[0].weights != nullptr};
  }

  Arguments arguments(int rank) const {
    const Rank& own = ranks_[rank];
    const int64_t capacity = routing_.shape.capacity, elements = static_cast<int64_t>(elements_);
    const DataType& type = data_type(type_);
    Arguments a;
    a.args.add(type, {routing_.shape.num_tokens, elements}, own.in);
    if (own.rows != nullptr) a.args.add(type, {capacity, elements}, own.rows);
    if (own.weights != nullptr) {
      a.args.add(kFloat32, {capacity}, own.weights);
      a.results.add(type, {capacity, elements}, own.out);
    }
    if (own.rows != nullptr) a.results.add(kFloat32, {capacity}, own.dotted);
    return a;
  }

  Array make_numbers(Random& random, size_t count) const {
    const size_t item = static_cast<size_t>(item_bytes(type_));
    Array array = make_array(count * item);
    for (size_t i = 0; i < count; ++i) {
      write_number(array->data() + i * item, type_, small_integer(random));
    }
    return array;
  }
  float number(const Array& array, size_t i) const {
    return read_number(array->data() + i * static_cast<size_t>(item_bytes(type_)), type_);
  }

  Making making_;
  Routing routing_;
  ElementType type_;
  size_t elements_;
  std::vector<Rank> ranks_;
};

}  // namespace

ExchangePtr make_dispatch(const Making& making, Random& random) {
  return std::make_unique<Dispatch>(making, random);
}
ExchangePtr make_weighted_dispatch(const Making& making, Random& random) {
  return std::make_unique<WeightedDispatch>(making, random);
}
ExchangePtr make_format_dispatch(const Making& making, Random& random) {
  return std::make_unique<FormatDispatch>(making, random);
}
ExchangePtr make_routed_dispatch(const Making& making, Random& random) {
  return std::make_unique<RoutedDispatch>(making, random);
}

}  // namespace emulation
