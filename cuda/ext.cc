// The nanobind module: it exposes names and capsules to Python and has no logic.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <type_traits>

#include "calls/products.h"
#include "calls/why_not.h"
#include "ffi/targets.h"
#include "kernels/grid.h"
#include "kernels/launch.h"
#include "layout.h"
#include "library/cublas_lt.h"
#include "params.h"
#include "runtime/workspace.h"
#include "tuning.h"

namespace nb = nanobind;

// A Problem becomes a tuple in Python: the text ('' on success), and whether a device lacks memory.
template <>
struct nanobind::detail::type_caster<moe_a2a::Problem> {
  static constexpr auto Name = const_name("tuple[str, bool]");
  static handle from_cpp(const moe_a2a::Problem& problem, rv_policy, cleanup_list*) noexcept {
    const std::string& text = problem;
    return nanobind::make_tuple(text, problem.lacks_memory).release();
  }
};

namespace {

// Reads the attributes of a call that is being lowered. Returns false if an attribute is missing or
// has the wrong type.
class AttributeReader {
 public:
  explicit AttributeReader(nb::dict attributes) : attributes_(std::move(attributes)) {}

  template <typename T>
  bool operator()(const char* name, T* value) const {
    // Does not convert, because handlers read the type that the lowering emits.
    if (!attributes_.contains(name)) return false;
    if constexpr (std::is_same_v<T, float>) {  // Python has only double
      double wide;
      const bool is_float = nb::try_cast(attributes_[name], wide, false);
      if (is_float) *value = static_cast<float>(wide);
      return is_float;
    } else {
      return nb::try_cast(attributes_[name], *value, false);
    }
  }

 private:
  nb::dict attributes_;
};

// An array of a call in Python: the type's name in XLA, and the axes.
using Type = std::pair<std::string, std::vector<int64_t>>;

// Returns arrays whose dimensions belong to `types`.
moe_a2a::Arrays ToArrays(const std::vector<Type>& types, bool is_colocated = false) {
  moe_a2a::Arrays arrays;
  for (const auto& [name, axes] : types) {
    moe_a2a::Array& array = arrays.emplace_back();
    array.type = moe_a2a::TypeNamed(name);
    array.dimensions = {axes.data(), axes.size()};
    array.bytes = moe_a2a::NumElements(array, 0) * array.type.bytes;
    if (is_colocated) array.address_bits = array.bytes;  // the next rank's array follows
  }
  return arrays;
}

}  // namespace

NB_MODULE(_native, m) {
  m.attr("PROTOCOL_VERSION") = moe_a2a::kProtocolVersion;
  m.attr("RING_DEPTH") = moe_a2a::kRingDepth;
  m.attr("MAX_RANKS") = moe_a2a::kMaxRanks;
  m.attr("MAX_CHUNKS") = moe_a2a::kMaxChunks;
  m.attr("MAX_ARRAYS") = moe_a2a::kMaxArrays;
  m.attr("MAX_FUSED_TOKENS") = moe_a2a::kMaxFusedTokens;
  m.attr("MAX_FUSED_CHOICES") = moe_a2a::kMaxFusedChoices;
  m.attr("MAX_FUSED_EXPERTS") = moe_a2a::kMaxFusedExperts;
  m.attr("MAX_TOP_K") = moe_a2a::kMaxTopK;
  m.attr("MAX_PAIRS") = moe_a2a::kMaxPairs;
  m.attr("HEADER_BYTES") = moe_a2a::kHeaderBytes;
  m.attr("TAIL_ROW") = moe_a2a::kTailRow;
  using Kind = moe_a2a::WorkspaceKind;
  m.attr("WORKSPACE_KINDS") =
      nb::make_tuple(static_cast<int64_t>(Kind::kWhole), static_cast<int64_t>(Kind::kSplit));
  const auto names = [](const auto& list) {
    nb::list all;
    for (const char* name : list) all.append(name);
    return all;
  };
  m.attr("ROUTING_ARRAYS") = names(moe_a2a::kRoutingArrayNames);
  m.attr("PLAN_ARRAYS") = names(moe_a2a::kPlanArrayNames);
  // A tuple per format: (name, numbers in a group, bits of a value, bytes of a scale).
  nb::list formats;
  moe_a2a::for_each(moe_a2a::TokenFormats{}, [&](auto format) {
    using Format = moe_a2a::Format<format>;
    formats.append(nb::make_tuple(Format::kName, Format::kGroup, Format::kValueBits,
                                  sizeof(typename Format::Scale)));
  });
  m.attr("TOKEN_FORMATS") = formats;
  nb::dict tuning;
  for (const auto& [name, value] : moe_a2a::kLoweringTuning) tuning[name] = value;
  m.attr("tuning") = tuning;
  m.def("why_not", [](const std::string& target, nb::dict attributes,
                      const std::vector<Type>& operands, const std::vector<Type>& results,
                      int num_ranks, bool is_colocated) {
    const moe_a2a::Verdict verdict = moe_a2a::WhyNot(
        target, AttributeReader(std::move(attributes)), ToArrays(operands, is_colocated),
        ToArrays(results, is_colocated), num_ranks, is_colocated);
    return nb::make_tuple(std::string(verdict.why), verdict.why.is_unsupported, verdict.half_bytes);
  });
  m.def("array_bytes", &moe_a2a::array_bytes, nb::arg("num_slots"), nb::arg("row_bytes"));
  m.def("slots_per_chunk", &moe_a2a::slots_per_chunk, nb::arg("num_slots"));

  m.def("why_not_product", [](const std::string& target, nb::dict attributes,
                              const std::vector<Type>& operands, const std::vector<Type>& results) {
    const AttributeReader read(std::move(attributes));
    const auto args = ToArrays(operands), outs = ToArrays(results);
    std::string why = "no kernel has the target '" + target + "'";
    moe_a2a::for_each(moe_a2a::ProductCalls{}, [&](auto of) {
      using Call = typename decltype(of)::type;
      if (target != Call::kTarget) return;
      typename Call::Params params = {};
      int64_t num_sms = 0;
      why = moe_a2a::DescribeProduct<Call>(read, {args.data(), args.size()},
                                           {outs.data(), outs.size()}, &params, &num_sms);
    });
    return why;
  });
#ifdef MOE_A2A_TEST_HOOKS
  m.attr("has_test_hooks") = true;
#else
  m.attr("has_test_hooks") = false;
#endif

#ifdef MOE_A2A_GROUPED_GEMM
  m.attr("has_grouped_gemm") = true;
  m.def("why_not_grouped_gemm", &moe_a2a::WhyNotGroupedGemm);
  m.def("why_not_fp8_gemm", &moe_a2a::WhyNotFp8Gemm);
  m.def("library_version", &moe_a2a::CublasLtVersion);
  m.def("library_scratch", &moe_a2a::LibraryScratch);
  m.attr("GEMM_CAPABILITY") = moe_a2a::kGemmCapability;
  m.attr("DOT_COLUMNS") = moe_a2a::kDotColumns;
  m.attr("FP8_BLOCK") = moe_a2a::kFp8Block;
  using Product = moe_a2a::GroupedProduct;
  nb::dict products;
  for (const auto& [name, product] : {std::pair{"FORWARD", Product::kForward},
                                      {"FORWARD_FEW", Product::kForwardFew},
                                      {"TRANSPOSED", Product::kTransposed},
                                      {"WEIGHT_GRADIENT", Product::kWeightGradient}}) {
    products[name] = static_cast<int>(product);
  }
  m.attr("PRODUCTS") = products;
  using moe_a2a::Activation;
  nb::dict activations;
  for (const auto& [name, activation] : {std::pair{"silu", Activation::kSilu},
                                         {"gelu", Activation::kGelu},
                                         {"gelu_tanh", Activation::kGeluTanh},
                                         {"relu", Activation::kRelu},
                                         {"squared_relu", Activation::kSquaredRelu},
                                         {"clamped_swiglu", Activation::kClampedSwiglu},
                                         {"scaled_bias", Activation::kScaledBias}}) {
    activations[name] = static_cast<int>(activation);
  }
  m.attr("ACTIVATIONS") = activations;
#else
  m.attr("has_grouped_gemm") = false;
#endif

  using moe_a2a::Problem;
  using moe_a2a::Topology;
  using moe_a2a::Workspace;
  using moe_a2a::WorkspaceKind;
  using Devices = std::vector<int64_t>;
  m.attr("cuda_build") = MOE_A2A_CUDA_BUILD;
  m.attr("sources") = MOE_A2A_SOURCES;
  m.attr("MAX_LOCAL_EXPERTS") = moe_a2a::kMaxLocalExperts;
  m.attr("MAX_ROUTE_COUNTS") = moe_a2a::kMaxRouteCounts;
  m.attr("MAX_PLANNED_EXPERTS") = moe_a2a::kMaxPlannedExperts;
  m.attr("MAX_CHOICE_EXPERTS") = moe_a2a::kMaxChoiceExperts;

  // The arguments of jax.ffi.register_ffi_target() and register_ffi_type(), as dictionaries by
  // name.
  m.def("targets", [] {
    nb::dict targets;
    for (const moe_a2a::Target& target : moe_a2a::Targets()) {
      nb::dict stages;
      const auto add = [&](const char* stage, moe_a2a::Handler* handler) {
        if (handler != nullptr) stages[stage] = nb::capsule(reinterpret_cast<void*>(handler));
      };
      add("instantiate", target.instantiate);
      add("initialize", target.initialize);
      add("execute", target.execute);
      targets[target.name.c_str()] = stages;
    }
    return targets;
  });
  m.def("state_types", [] {
    const moe_a2a::StateType state = moe_a2a::StateOfTargets();
    nb::dict type, types;
    type["type_id"] = nb::capsule(state.id);
    type["type_info"] = nb::capsule(state.info);
    types[state.name] = type;
    return types;
  });
  m.def("colocated_blocks", &moe_a2a::colocated_blocks);
  m.def("launch_blocks", &moe_a2a::launch_blocks);
  m.def("add_device",
        [](int64_t id, int process, int ordinal) { moe_a2a::AddDevice(id, {process, ordinal}); });
  m.attr("ELSEWHERE") = moe_a2a::kElsewhere;
  m.def("add_process", [](int process, std::string socket, std::string secret, int pid) {
    moe_a2a::AddProcess(process, {std::move(socket), std::move(secret), pid});
  });
  m.def("has_ended", &moe_a2a::HasEnded);
  m.def("listen", [] {
    moe_a2a::Endpoint endpoint;
    const Problem problem = moe_a2a::Listen(&Workspace::Serve, &endpoint);
    return nb::make_tuple(problem, endpoint.socket, endpoint.secret);
  });
  auto workspace = [](Devices devices, int num_ranks, int64_t kind) -> Workspace& {
    return Workspace::Get({std::move(devices), num_ranks}, static_cast<WorkspaceKind>(kind));
  };
  m.def("failure", [=](Devices devices, int num_ranks, int64_t kind) {
    std::string failure;
    Problem problem;
    {
      nb::gil_scoped_release release;
      problem = workspace(std::move(devices), num_ranks, kind).ReadFailure(&failure);
    }
    return nb::make_tuple(problem, failure);
  });
  m.def("check_access", [=](Devices devices, int num_ranks) -> Problem {
    return workspace(std::move(devices), num_ranks, 0).CheckAccess();
  });
  m.def("reserved_bytes", [=](Devices devices, int num_ranks, int64_t kind) {
    return workspace(std::move(devices), num_ranks, kind).half_bytes();
  });
  m.def("counters", [=](Devices devices, int num_ranks, int64_t kind) {
    std::vector<moe_a2a::CounterValues> values;
    Problem problem;
    {
      nb::gil_scoped_release release;
      problem = workspace(std::move(devices), num_ranks, kind).ReadCounters(&values);
    }
    nb::list counters;
    for (const auto& v : values) {
      counters.append(nb::make_tuple(v.next_epoch, v.poison, v.credits, v.heads));
    }
    return nb::make_tuple(problem, counters);
  });
  // The next functions wait for devices or for other threads, so they release the GIL.
  m.def(
      "mapped_bytes",
      [=](Devices devices, int num_ranks, int64_t kind) {
        return workspace(std::move(devices), num_ranks, kind).MappedBytes();
      },
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "reserve",
      [=](Devices devices, int num_ranks, int64_t kind, int64_t half_bytes,
          int64_t timeout_ns) -> Problem {
        return workspace(std::move(devices), num_ranks, kind).Reserve(half_bytes, timeout_ns);
      },
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "wait",
      [=](Devices devices, int num_ranks, int64_t kind, int64_t timeout_ns) {
        return workspace(std::move(devices), num_ranks, kind).Wait(timeout_ns);
      },
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "close",
      [=](const Devices& devices, int num_ranks, const std::vector<int64_t>& kinds,
          int64_t timeout_ns) {
        std::vector<Workspace*> all;
        for (int64_t kind : kinds) {
          all.push_back(&workspace(devices, num_ranks, kind));
        }
        return Workspace::Close(all, timeout_ns);
      },
      nb::call_guard<nb::gil_scoped_release>());
#ifdef MOE_A2A_TEST_HOOKS
  m.def(
      "set_hooks",
      [=](Devices devices, int num_ranks, int64_t kind, int64_t index, uint32_t mutation,
          uint32_t delay_phase, uint64_t delay_ns, uint32_t depth) -> Problem {
        return workspace(std::move(devices), num_ranks, kind)
            .SetHooks(index, mutation, delay_phase, delay_ns, depth);
      },
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "set_epoch",
      [=](Devices devices, int num_ranks, int64_t kind, int64_t index, uint64_t epoch) -> Problem {
        return workspace(std::move(devices), num_ranks, kind).SetEpoch(index, epoch);
      },
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "set_credits",
      [=](Devices devices, int num_ranks, int64_t kind, int64_t index, uint64_t epoch) -> Problem {
        return workspace(std::move(devices), num_ranks, kind).SetCredits(index, epoch);
      },
      nb::call_guard<nb::gil_scoped_release>());
  m.def("set_uncapped", [=](Devices devices, int num_ranks, int64_t kind, bool is_uncapped) {
    workspace(std::move(devices), num_ranks, kind).SetUncapped(is_uncapped);
  });
#endif
}
