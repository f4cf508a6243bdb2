// The nanobind module. It exposes functions and constants to Python, and has no logic.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <type_traits>
#include <variant>

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

// In Python, a Problem is a tuple: the text, and whether a device has too little memory.
template <>
struct nanobind::detail::type_caster<moe_a2a::Problem> {
  static constexpr auto Name = const_name("tuple[str, bool]");
  static handle from_cpp(const moe_a2a::Problem& problem, rv_policy, cleanup_list*) noexcept {
    const std::string& text = problem;
    return nanobind::make_tuple(text, problem.lacks_memory).release();
  }
};

namespace {

using namespace moe_a2a;

// Reads a call's attributes at lowering. Converts no types, because XLA's handlers convert none.
AttributeReader ReaderOf(nb::dict attributes) {
  return [attributes](const char* name, AttributePointer value) {
    const auto read_into = [&](auto* to) {
      using T = std::remove_pointer_t<decltype(to)>;
      std::conditional_t<std::is_same_v<T, float>, double, T> read;  // Python has only double
      const bool has_type = nb::try_cast(attributes[name], read, /*convert=*/false);
      if (has_type) *to = static_cast<T>(read);
      return has_type;
    };
    return attributes.contains(name) && std::visit(read_into, value);
  };
}

// A call's array in Python: XLA's name of the type, and the axes.
using ArrayType = std::pair<std::string, std::vector<int64_t>>;

// Returns arrays without data. `types` owns their dimensions.
Arrays ToArrays(const std::vector<ArrayType>& types, bool is_colocated = false) {
  Arrays arrays;
  for (const auto& [name, axes] : types) {
    Array& array = arrays.emplace_back();
    array.type = TypeNamed(name);
    array.dimensions = {axes.data(), axes.size()};
    array.bytes = NumElements(array, 0) * array.type.bytes;
    if (is_colocated) array.address_bits = array.bytes;  // the next rank's array follows
  }
  return arrays;
}

using Devices = std::vector<int64_t>;

Workspace& WorkspaceOf(Devices devices, int num_ranks, int64_t kind) {
  return Workspace::Get({std::move(devices), num_ranks}, static_cast<WorkspaceKind>(kind));
}

// Defines a Python function that calls a method. Releases the GIL, because the method may wait.
template <typename Result, typename... Args>
void Define(nb::module_& m, const char* name, Result (Workspace::*method)(Args...)) {
  m.def(
      name,
      [method](Devices devices, int num_ranks, int64_t kind, Args... args) {
        return (WorkspaceOf(std::move(devices), num_ranks, kind).*method)(args...);
      },
      nb::call_guard<nb::gil_scoped_release>());
}

// Defines a Python function that returns a method's problem and the value that the method sets.
template <typename Value>
void Define(nb::module_& m, const char* name, Problem (Workspace::*method)(Value*)) {
  m.def(
      name,
      [method](Devices devices, int num_ranks, int64_t kind) {
        std::pair<Problem, Value> found;
        found.first = (WorkspaceOf(std::move(devices), num_ranks, kind).*method)(&found.second);
        return found;
      },
      nb::call_guard<nb::gil_scoped_release>());
}

template <typename Names>
nb::list ListOf(const Names& names) {
  nb::list list;
  for (const char* name : names) list.append(name);
  return list;
}

template <typename Enum>
nb::dict NumbersOf(std::initializer_list<std::pair<const char*, Enum>> values) {
  nb::dict numbers;
  for (const auto& [name, value] : values) numbers[name] = static_cast<int64_t>(value);
  return numbers;
}

}  // namespace

NB_MODULE(_native, m) {
  m.attr("cuda_build") = MOE_A2A_CUDA_BUILD;
  m.attr("sources") = MOE_A2A_SOURCES;
  m.attr("PROTOCOL_VERSION") = kProtocolVersion;
  m.attr("RING_DEPTH") = kRingDepth;
  m.attr("MAX_RANKS") = kMaxRanks;
  m.attr("MAX_CHUNKS") = kMaxChunks;
  m.attr("MAX_ARRAYS") = kMaxArrays;
  m.attr("MAX_FUSED_TOKENS") = kMaxFusedTokens;
  m.attr("MAX_FUSED_CHOICES") = kMaxFusedChoices;
  m.attr("MAX_FUSED_EXPERTS") = kMaxFusedExperts;
  m.attr("MAX_TOP_K") = kMaxTopK;
  m.attr("MAX_PAIRS") = kMaxPairs;
  m.attr("MAX_LOCAL_EXPERTS") = kMaxLocalExperts;
  m.attr("MAX_ROUTE_COUNTS") = kMaxRouteCounts;
  m.attr("MAX_PLANNED_EXPERTS") = kMaxPlannedExperts;
  m.attr("MAX_CHOICE_EXPERTS") = kMaxChoiceExperts;
  m.attr("HEADER_BYTES") = kHeaderBytes;
  m.attr("TAIL_ROW") = kTailRow;
  m.attr("ELSEWHERE") = kElsewhere;
  m.attr("WORKSPACE_KINDS") = nb::make_tuple(static_cast<int64_t>(WorkspaceKind::kWhole),
                                             static_cast<int64_t>(WorkspaceKind::kSplit));
  m.attr("ROUTING_ARRAYS") = ListOf(kRoutingArrayNames);
  m.attr("PLAN_ARRAYS") = ListOf(kPlanArrayNames);
  // A tuple per format: (name, numbers in a group, bits of a value, bytes of a scale).
  nb::list formats;
  for_each(TokenFormats{}, [&](auto format) {
    using F = Format<format>;
    formats.append(nb::make_tuple(F::kName, F::kGroup, F::kValueBits, sizeof(typename F::Scale)));
  });
  m.attr("TOKEN_FORMATS") = formats;
  nb::dict tuning;
  for (const auto& [name, value] : kLoweringTuning) tuning[name] = value;
  m.attr("tuning") = tuning;
  m.def("array_bytes", &array_bytes);
  m.def("slots_per_chunk", &slots_per_chunk);
  m.def("colocated_blocks", &colocated_blocks);
  m.def("launch_blocks", &launch_blocks);

  m.def("why_not", [](const std::string& target, nb::dict attributes,
                      const std::vector<ArrayType>& operands, const std::vector<ArrayType>& results,
                      int num_ranks, bool is_colocated) {
    const Verdict verdict = WhyNot(target, ReaderOf(attributes), ToArrays(operands, is_colocated),
                                   ToArrays(results, is_colocated), num_ranks, is_colocated);
    return nb::make_tuple(std::string(verdict.why), verdict.why.is_unsupported, verdict.half_bytes);
  });
  m.def("why_not_product",
        [](const std::string& target, nb::dict attributes, const std::vector<ArrayType>& operands,
           const std::vector<ArrayType>& results) {
          const auto args = ToArrays(operands), outs = ToArrays(results);
          std::string why = "no kernel has the target '" + target + "'";
          for_each(ProductCalls{}, [&](auto of) {
            using Call = typename decltype(of)::type;
            if (target != Call::kTarget) return;
            typename Call::Params params = {};
            int64_t num_sms = 0;
            why = DescribeProduct<Call>(ReaderOf(attributes), {args.data(), args.size()},
                                        {outs.data(), outs.size()}, &params, &num_sms);
          });
          return why;
        });

#ifdef MOE_A2A_GROUPED_GEMM
  m.attr("has_grouped_gemm") = true;
  m.def("why_not_grouped_gemm", &WhyNotGroupedGemm);
  m.def("why_not_fp8_gemm", &WhyNotFp8Gemm);
  m.def("library_version", &CublasLtVersion);
  m.def("library_scratch", &LibraryScratch);
  m.attr("GEMM_CAPABILITY") = kGemmCapability;
  m.attr("DOT_COLUMNS") = kDotColumns;
  m.attr("FP8_BLOCK") = kFp8Block;
  m.attr("PRODUCTS") =
      NumbersOf<GroupedProduct>({{"FORWARD", GroupedProduct::kForward},
                                 {"TRANSPOSED", GroupedProduct::kTransposed},
                                 {"WEIGHT_GRADIENT", GroupedProduct::kWeightGradient}});
  m.attr("ACTIVATIONS") = NumbersOf<Activation>({{"silu", Activation::kSilu},
                                                 {"gelu", Activation::kGelu},
                                                 {"gelu_tanh", Activation::kGeluTanh},
                                                 {"relu", Activation::kRelu},
                                                 {"squared_relu", Activation::kSquaredRelu},
                                                 {"clamped_swiglu", Activation::kClampedSwiglu},
                                                 {"scaled_bias", Activation::kScaledBias}});
#else
  m.attr("has_grouped_gemm") = false;
#endif

  // The arguments of jax.ffi.register_ffi_target() and register_ffi_type(), by name.
  m.def("targets", [] {
    nb::dict targets;
    for (const Target& target : Targets()) {
      nb::dict stages;
      for (const auto& [stage, handler] :
           {std::pair{"instantiate", target.instantiate},
            std::pair{"initialize", target.initialize}, std::pair{"execute", target.execute}}) {
        if (handler != nullptr) stages[stage] = nb::capsule(reinterpret_cast<void*>(handler));
      }
      targets[target.name.c_str()] = stages;
    }
    return targets;
  });
  m.def("state_types", [] {
    const StateType state = StateOfTargets();
    nb::dict type, types;
    type["type_id"] = nb::capsule(state.id);
    type["type_info"] = nb::capsule(state.info);
    types[state.name] = type;
    return types;
  });

  m.def("add_device",
        [](int64_t id, int process, int ordinal) { AddDevice(id, {process, ordinal}); });
  m.def("add_process", [](int process, std::string socket, std::string secret, int pid) {
    AddProcess(process, {std::move(socket), std::move(secret), pid});
  });
  m.def("has_ended", &HasEnded);
  m.def("listen", [] {
    Endpoint endpoint;
    const Problem problem = Listen(&Workspace::Serve, &endpoint);
    return nb::make_tuple(problem, endpoint.socket, endpoint.secret);
  });
  m.def("check_access", [](Devices devices, int num_ranks) {
    return WorkspaceOf(std::move(devices), num_ranks, 0).CheckAccess();
  });
  m.def("reserved_bytes", [](Devices devices, int num_ranks, int64_t kind) {
    return WorkspaceOf(std::move(devices), num_ranks, kind).half_bytes();
  });
  Define(m, "failure", &Workspace::ReadFailure);
  Define(m, "counters", &Workspace::ReadCounters);
  Define(m, "mapped_bytes", &Workspace::MappedBytes);
  Define(m, "reserve", &Workspace::Reserve);
  Define(m, "wait", &Workspace::Wait);
  m.def(
      "close",
      [](const Devices& devices, int num_ranks, const std::vector<int64_t>& kinds,
         int64_t timeout_ns) {
        std::vector<Workspace*> all;
        for (int64_t kind : kinds) all.push_back(&WorkspaceOf(devices, num_ranks, kind));
        return Workspace::Close(all, timeout_ns);
      },
      nb::call_guard<nb::gil_scoped_release>());
#ifdef MOE_A2A_TEST_HOOKS
  m.attr("has_test_hooks") = true;
  Define(m, "set_hooks", &Workspace::SetHooks);
  Define(m, "set_epoch", &Workspace::SetEpoch);
  Define(m, "set_credits", &Workspace::SetCredits);
  Define(m, "set_uncapped", &Workspace::SetUncapped);
#else
  m.attr("has_test_hooks") = false;
#endif
}
