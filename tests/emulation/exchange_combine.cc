#include "device/signal.cuh"
#include "exchange.h"

namespace emulation {
namespace {

using namespace moe_a2a;

class Combine : public Exchange {
 public:
  Combine(const Making& making, Random& random)
      : Exchange(making.num_ranks),
        making_(making),
        form_(static_cast<Form>(random.below(5))),
        routing_(making, random, 20, max_top_k(), true) {
    name = "combine";
    type_ = static_cast<ElementType>(random.below(Elements::kCount));
    float32_wire_ = form_ == Form::kPlain && type_ != ElementType::kFloat32 && random.one_in(3);
    if (form_ == Form::kFp8 || form_ == Form::kFp4) {
      format_ =
          form_ == Form::kFp4 ? TokenFormat::kNvFp4 : static_cast<TokenFormat>(1 + random.below(2));
      elements_ = 128 * int64_t{1 + random.below(making.max_groups)};
    } else {
      elements_ = random.one_in(2) ? 8 * (1 + random.below(150)) : 1 + random.below(60);
    }
    choose_weights(random);
    num_summed_ = num_pairs_ > 0 ? 1 : 1 + random.one_in(4);
    has_addends_ = random.one_in(3);
    for (int rank = 0; rank < making.num_ranks; ++rank) ranks_.push_back(make_rank(random, rank));
  }

  Operation operation() const override { return Operation::kCombine; }
  int64_t zone_bytes() const override {
    Arguments a = arguments(0);
    add_routing_sizes(a.args, routing_.shape);
    return zone_bytes_of(call(), routing_.shape.num_ranks, a);
  }

  cudaError_t launch(const LaunchOn& on) override {
    const RoutingArrays routing(making_, on.random, routing_, on.rank);
    Arguments a = arguments(on.rank);
    routing.add_to(a.args, routing_.shape);
    return launch_call(call(), on, a, [&](CombineParams& p, int blocks) {
      vary_roles(on.random, blocks, p.roles);
    });
  }

  std::string wrong(int rank) const override {
    const Shape& shape = routing_.shape;
    for (int token = 0; token < shape.num_tokens; ++token) {
      for (int a = 0; a < num_summed_; ++a) {
        for (int64_t e = 0; e < elements_; ++e) {
          const float expected = sum(rank, token, a, e);
          const float seen = number(ranks_[rank].sums[a], token * elements_ + e);
          if (!(seen == expected)) {
            return "array " + std::to_string(a) + ", token " + std::to_string(token) +
                   ", element " + std::to_string(e) + ": expected " + std::to_string(expected) +
                   ", got " + std::to_string(seen);
          }
        }
      }
      for (int k = 0; k < shape.top_k && has_choice_array_; ++k) {
        if (!is_scalar_right(rank, token, k)) {
          return "entry of token " + std::to_string(token) + ", choice " + std::to_string(k);
        }
      }
    }
    return "";
  }

 private:
  // kWeighted has one pair of rows and weights, and kPairs has two. kFp8 and kFp4 send partial sums
  // in a format.
  enum class Form { kPlain, kWeighted, kPairs, kFp8, kFp4 };

  struct Rank {
    std::vector<Array> rows, weights;  // indexed by summed array or by pair
    std::vector<Array> sums, addends;  // indexed by summed array
    Array choices_in, choices_out;
  };

  // Every partial sum is exact in its wire dtype or format up to this top_k.
  int max_top_k() const {
    return form_ == Form::kFp4 ? 1 : form_ == Form::kFp8 || form_ == Form::kPairs ? 4 : kMaxTopK;
  }

  void choose_weights(Random& random) {
    num_pairs_ = form_ == Form::kPairs ? 2 : form_ == Form::kWeighted ? 1 : 0;
    if (form_ == Form::kFp8) num_pairs_ = random.below(2);
    weights_per_row_ = num_pairs_ > 0 ? 1 : 0;
    if (num_pairs_ > 0 && random.one_in(3)) {
      const int group = format_ == kNoFormat ? 8 : group_size(format_);
      for (int parts : {4, 3, 2}) {
        if (elements_ % parts == 0 && elements_ / parts % group == 0) {
          weights_per_row_ = parts;
          break;
        }
      }
    }
    has_choice_array_ = num_pairs_ == 0 && random.one_in(3);
  }

  Rank make_rank(Random& random, int rank) {
    const Shape& shape = routing_.shape;
    const Plan& plan = routing_.plans[rank];
    const auto capacity = static_cast<size_t>(shape.capacity);
    const auto elements = static_cast<size_t>(elements_);
    const auto item = static_cast<size_t>(item_bytes(type_));
    const InMemoryOf memory(rank);
    Rank made;
    for (int i = 0; i < std::max(num_summed_, num_pairs_); ++i) {
      Array rows = make_array(capacity * elements * item);
      for (size_t e = 0; e < capacity * elements; ++e) {
        // Rows without a token are NaN, and kernels must not add them.
        const bool is_used = plan.row_rank(static_cast<int>(e / elements)) >= 0;
        float v = small_integer(random);
        // MxFp8 saturates if the largest number of a group is more than 1.75 times a power of two,
        // like 15. Sums of four integers up to 3 are at most 12, so none saturates.
        if (form_ == Form::kFp8) v = std::fmin(std::fmax(v, -3.f), 3.f);
        if (form_ == Form::kFp4) v = exact_number(random, static_cast<int64_t>(e));
        write_number(rows->data() + e * item, type_, is_used ? v : NAN);
      }
      made.rows.push_back(rows);
    }
    for (int i = 0; i < num_pairs_; ++i) {
      const auto per_row = static_cast<size_t>(weights_per_row_);
      Array weights = make_array(capacity * per_row * 4, 4);
      for (size_t w = 0; w < capacity * per_row; ++w) {
        const bool is_used = plan.row_rank(static_cast<int>(w / per_row)) >= 0;
        weights->as<float>()[w] = is_used ? static_cast<float>(random.between(-1, 1)) : NAN;
      }
      made.weights.push_back(weights);
    }
    for (int i = 0; i < num_summed_; ++i) {
      made.sums.push_back(
          add_output(rank, static_cast<size_t>(shape.num_tokens) * elements * item, 16, kNanByte));
      if (!has_addends_) continue;
      const size_t numbers = static_cast<size_t>(shape.num_tokens) * elements;
      made.addends.push_back(make_array(numbers * item));
      for (size_t e = 0; e < numbers; ++e) {
        write_number(made.addends.back()->data() + e * item, type_, small_integer(random));
      }
    }
    if (has_choice_array_) {
      made.choices_in = make_array(capacity * 4, 4);
      for (size_t i = 0; i < capacity; ++i) made.choices_in->as<uint32_t>()[i] = random.next() | 1;
      made.choices_out =
          add_output(rank, static_cast<size_t>(shape.num_choices()) * 4, 4, kNanByte);
    }
    return made;
  }

  CombineCall call() const {
    const bool is_encoded = format_ != kNoFormat;
    const DataType& wire = float32_wire_ ? kFloat32 : data_type(type_);
    return {{},
            has_choice_array_,
            num_pairs_,
            has_addends_ ? num_summed_ : 0,
            is_encoded ? name_of(format_) : wire.name,
            1.f};
  }

  Arguments arguments(int rank) const {
    const Rank& own = ranks_[rank];
    const Shape& shape = routing_.shape;
    Arguments a;
    for (const Array& rows : own.rows) {
      a.args.add(data_type(type_), {shape.capacity, elements_}, rows);
    }
    for (const Array& weights : own.weights) {
      a.args.add(kFloat32, {shape.capacity, weights_per_row_}, weights);
    }
    for (const Array& sums : own.sums) {
      a.results.add(data_type(type_), {shape.num_tokens, elements_}, sums);
    }
    if (has_choice_array_) {
      a.args.add(kFloat32, {shape.capacity}, own.choices_in);
      a.results.add(kFloat32, {shape.num_tokens, shape.top_k}, own.choices_out);
    }
    for (const Array& addend : own.addends) {
      a.args.add(data_type(type_), {shape.num_tokens, elements_}, addend);
    }
    return a;
  }

  // Sets `at` to the rank of the choice. Returns the choice's row there, or -1 if it has none.
  int row_of(int rank, int token, int k, int* at) const {
    const Shape& shape = routing_.shape;
    *at = routing_.plans[rank].choice_rank(shape, token, k);
    if (*at < 0) return -1;
    const int slot = routing_.plans[rank].token_slot(shape, token, *at);
    return std::max(-1, routing_.plans[*at].slot_row(shape, rank, slot, k));
  }

  float sum(int rank, int token, int array, int64_t element) const {
    float sum = 0.f;
    for (int k = 0; k < routing_.shape.top_k; ++k) {
      int at;
      const int64_t row = row_of(rank, token, k, &at);
      if (row < 0) continue;
      for (int i = 0; i < std::max(1, num_pairs_); ++i) {
        const Array& rows = ranks_[at].rows[num_pairs_ > 0 ? i : array];
        float v = number(rows, row * elements_ + element);
        if (num_pairs_ > 0) {
          const int64_t weight = element / (elements_ / weights_per_row_);
          v *= ranks_[at].weights[i]->as<float>()[row * weights_per_row_ + weight];
        }
        sum += v;
      }
    }
    if (has_addends_) sum += number(ranks_[rank].addends[array], token * elements_ + element);
    return sum;
  }

  bool is_scalar_right(int rank, int token, int k) const {
    int at;
    const int row = row_of(rank, token, k, &at);
    const uint32_t expected = row < 0 ? 0 : ranks_[at].choices_in->as<uint32_t>()[row];
    const int choice = token * routing_.shape.top_k + k;
    return ranks_[rank].choices_out->as<uint32_t>()[choice] == expected;
  }

  float number(const Array& array, int64_t i) const {
    return read_number(array->data() + i * item_bytes(type_), type_);
  }

  Making making_;
  Form form_;
  Routing routing_;
  ElementType type_;
  TokenFormat format_ = {};
  bool float32_wire_, has_choice_array_, has_addends_;
  int64_t elements_;
  int num_pairs_, weights_per_row_, num_summed_;
  std::vector<Rank> ranks_;
};

}  // namespace

ExchangePtr make_combine(const Making& making, Random& random) {
  return std::make_unique<Combine>(making, random);
}

}  // namespace emulation
