// Times a grouped product and the combine that sums its rows: one after the other, and next to each other in slices of
// columns (docs/protocol_split.md). All ranks share one GPU: one product computes the rows of all ranks, and one launch
// combines them. With R ranks of T / R tokens, a GPU sums and sends as many rows as one of R GPUs with T tokens on each
// rank, but no byte crosses a link. Build and run:
//   nvcc -std=c++17 -O3 -DNDEBUG -gencode arch=compute_90a,code=sm_90a -Icuda -o sliced_combine \
//     tools/driver/sliced_combine.cu cuda/gemm/tensor_map.cc cuda/runtime/*.cc
//   ./sliced_combine [--ranks 4] [--tokens 4096] [--sms 16,24] [--slices 2,4] [--samples 9] [--reps 12] [--timeout 5]
//
// Prints the median of the samples, which take turns, and its ratio to the fastest sequence. `--sms` are those of a
// combine next to a product, which has the others; "then all": more blocks of the combine start where the product ends. The
// results of all programs must have the same bits.
//
// "exposed": the time after which all is complete, less that of the product alone, relative to the same combine alone. No
// bytes cross links here. "over links" is computed: nothing is complete before the last slice has crossed them, which
// follows the product, and a combine alone takes at least the time of its bytes.
#define MOE_A2A_COLOCATED
#include <cuda.h>
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <map>
#include <numeric>
#include <string>
#include <vector>

// Included and not linked, so that only these kernels are compiled.
#include "calls/combine.h"
#include "devices.h"
#include "driver.h"
#include "gemm/launch.cuh"
#include "kernels/combine.cu"
#include "runtime/workspace.h"

namespace moe_a2a {

const Kernels& ColocatedKernels() {
  static const Kernels kernels = {{}, {}, {}, {LoadCombine, LaunchCombine}, {}, {}};
  return kernels;
}
const Kernels& DirectKernels() { return ColocatedKernels(); }

namespace driver {

using T = __nv_bfloat16;
using Whole = gemm::Forward<gemm::Epilogue::kStore>;
using Sliced = gemm::Forward<gemm::Epilogue::kStore, true>;

constexpr int kExperts = 32, kTopK = 8, kMaxSlices = 4;
constexpr double kLinkGbPerS = 345;  // that a GPU's plain peer stores reach on H200

struct Options {
  int ranks = 4, tokens = 4096, samples = 9, reps = 12;
  std::vector<int> sms = {16, 24}, slices = {2, 4};
  double timeout_s = 5;
};

template <typename X>
X* Allocate(int64_t count) {
  X* data;
  CHECK(cudaMalloc(&data, count * sizeof(X)));
  return data;
}

template <typename X>
X* Upload(const std::vector<X>& values) {
  X* data = Allocate<X>(values.size());
  CHECK(cudaMemcpy(data, values.data(), values.size() * sizeof(X), cudaMemcpyHostToDevice));
  return data;
}

// The arrays of the routing that a combine reads, of all ranks one after the other, and the groups of the product.
struct Routing {
  int ranks, tokens, capacity = 0;  // tokens and capacity of a rank
  int64_t sent = 0;                 // partial sums for other ranks, of all ranks
  std::vector<int32_t> token_slot,
      slot_rows;  // [ranks, tokens, ranks], [ranks, ranks, tokens, kTopK]
  std::vector<int32_t> starts, sizes, matrices;  // [kExperts]

  Routing(int num_ranks, int num_tokens) : ranks(num_ranks), tokens(num_tokens), sizes(kExperts) {
    const int local = kExperts / ranks;
    std::vector<int> ids(ranks * tokens * kTopK);
    for (int i = 0; i < ranks * tokens; ++i) {
      std::vector<int> experts(kExperts);
      std::iota(experts.begin(), experts.end(), 0);
      for (int k = 0; k < kTopK; ++k) {
        std::swap(experts[k], experts[k + Hash(i, k) % (kExperts - k)]);
        ids[i * kTopK + k] = experts[k];
        ++sizes[experts[k]];
      }
    }
    for (int rank = 0; rank < ranks; ++rank) {
      const auto first = sizes.begin() + rank * local;
      capacity = std::max<int>(capacity, round_up(std::accumulate(first, first + local, 0), 128));
    }
    for (int expert = 0; expert < kExperts; ++expert) {
      const bool is_first = expert % local == 0;
      starts.push_back(is_first ? expert / local * capacity : starts.back() + sizes[expert - 1]);
      matrices.push_back(expert);
    }
    token_slot.assign(ranks * tokens * ranks, -1);
    slot_rows.assign(ranks * ranks * tokens * kTopK, -1);
    std::vector<int> next_row = starts;
    for (int source = 0; source < ranks; ++source) {
      std::vector<int> next_slot(ranks);
      for (int token = 0; token < tokens; ++token) {
        const int at = source * tokens + token;
        for (int k = 0; k < kTopK; ++k) {
          const int expert = ids[at * kTopK + k], rank = expert / local;
          int32_t& slot = token_slot[at * ranks + rank];
          if (slot < 0) {
            slot = next_slot[rank]++;
            sent += rank != source;
          }
          slot_rows[((rank * ranks + source) * tokens + slot) * kTopK + k] =
              next_row[expert]++ - rank * capacity;
        }
      }
    }
  }
};

class Bench {
 public:
  Bench(const Options& o, const std::string& name, int k, int n)
      : options_(o), name_(name), k_(k), n_(n), routing_(o.ranks, o.tokens / o.ranks) {
    CHECK(cudaDeviceGetAttribute(&num_sms_, cudaDevAttrMultiProcessorCount, 0));
    const int64_t rows = int64_t{routing_.ranks} * routing_.capacity;
    a_ = Random(rows * k, 1);
    b_ = Random(int64_t{kExperts} * k * n, 2);
    d_ = Allocate<T>(rows * n);
    out_bytes_ = int64_t{o.tokens} * n * sizeof(T);
    out_ = Allocate<char>(out_bytes_);
    starts_ = Upload(routing_.starts);
    sizes_ = Upload(routing_.sizes);
    matrices_ = Upload(routing_.matrices);
    token_slot_ = Upload(routing_.token_slot);
    slot_rows_ = Upload(routing_.slot_rows);
    unread_ = Allocate<int32_t>(rows);
    counters_ = Allocate<uint32_t>(1 + kMaxSlices);
    sum_ = Allocate<unsigned long long>(1);
    CHECK((gemm::Load<T, Whole>()));
    CHECK((gemm::Load<T, Sliced>()));
    MakeCombine();
    CHECK(cudaStreamCreateWithPriority(&side_, cudaStreamNonBlocking, -5));
    for (cudaEvent_t* event : {&zeroed_, &combined_}) {
      CHECK(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
    }
    void* library = dlopen("libcuda.so.1", RTLD_NOW);
    CHECK(library != nullptr);
    wait_value_ = reinterpret_cast<decltype(wait_value_)>(dlsym(library, "cuStreamWaitValue32_v2"));
    CHECK(wait_value_ != nullptr);
  }
  ~Bench() {
    for (void* data :
         std::initializer_list<void*>{a_, b_, d_, out_, starts_, sizes_, matrices_, token_slot_,
                                      slot_rows_, unread_, counters_, sum_}) {
      CHECK(cudaFree(data));
    }
  }

  // Returns whether all programs have the same results.
  bool Run() {
    struct Program {
      std::string name;
      std::function<void()> launch;
      bool is_sequence;
      bool has_results = true;
      int sms = 0, slices = 0;  // of a combine: 1 alone, more next to its product
      std::vector<double> us = {};
    };
    std::vector<Program> programs;
    for (int sms : {64, 128}) {
      programs.push_back({"product, then combine on " + std::to_string(sms) + " SMs",
                          [=] {
                            Multiply(num_sms_, 1);
                            Combine(stream_, sms, 1);
                          },
                          true});
    }
    programs.push_back({"product alone", [=] { Multiply(num_sms_, 1); }, false, false});
    for (int sms : options_.sms) {
      const std::string on = " on " + std::to_string(sms) + " SMs";
      programs.push_back(
          {"combine alone" + on, [=] { Combine(stream_, sms, 1); }, false, true, sms, 1});
      programs.push_back({"product alone on the other SMs, combine" + on,
                          [=] { Multiply(num_sms_ - sms, 1); }, false, false});
      for (int slices : options_.slices) {
        for (bool is_late : {false, true}) {
          programs.push_back(
              {std::to_string(slices) + " slices, combine" + on + (is_late ? ", then all" : ""),
               [=] { Together(sms, slices, is_late); }, false, true, sms, slices});
        }
      }
    }
    std::printf("\n%s: %d ranks with %d tokens and %d rows of capacity, k %d, n %d\n",
                name_.c_str(), routing_.ranks, routing_.tokens, routing_.capacity, k_, n_);
    std::fflush(stdout);
    CHECK(cudaMemset(out_, 0xFF, out_bytes_));
    const uint64_t unwritten = FingerprintOfResults();
    uint64_t expected = 0;
    bool is_right = true;
    for (Program& p : programs) {
      // Also the rows: a combine that reads them too early finds NaN.
      if (p.has_results && p.name.rfind("combine", 0) != 0) {
        CHECK(cudaMemset(d_, 0xFF, routing_.ranks * int64_t{routing_.capacity} * n_ * sizeof(T)));
      }
      CHECK(cudaMemset(out_, 0xFF, out_bytes_));
      CHECK(cudaDeviceSynchronize());
      p.launch();
      CHECK(cudaDeviceSynchronize());
      CHECK(workspace_->Failure());
      if (!p.has_results) continue;
      const uint64_t found = FingerprintOfResults();
      if (expected == 0) expected = found;
      const bool is_equal = found == expected && found != unwritten;
      is_right = is_right && is_equal;
      std::printf("  %s: %s\n", is_equal ? "equal" : "WRONG", p.name.c_str());
      std::fflush(stdout);
    }
    for (int sample = 0; sample < options_.samples; ++sample) {
      for (Program& p : programs) {
        p.launch();
        stream_.Begin();
        for (int i = 0; i < options_.reps; ++i) p.launch();
        stream_.End();
        p.us.push_back(stream_.Microseconds() / options_.reps);
      }
    }
    CHECK(workspace_->Failure());
    double sequence = 1e9, product = 0;
    std::map<int, double> alone;  // a combine on these SMs
    for (const Program& p : programs) {
      if (p.is_sequence) sequence = std::min(sequence, Summary(p.us).median);
      if (p.name == "product alone") product = Summary(p.us).median;
      if (p.slices == 1) alone[p.sms] = Summary(p.us).median;
    }
    const double links = routing_.sent * n_ * sizeof(T) / (kLinkGbPerS * 1e3);
    std::printf(
        "  over links, a combine takes at least %.1f us, and the sequence %.1f us (computed)\n",
        links, std::max(sequence, product + links));
    for (const Program& p : programs) {
      const Summary us(p.us);
      std::printf("  %-52s %8.1f us (%.1f to %.1f), %.3f of the sequence", p.name.c_str(),
                  us.median, us.least, us.greatest, us.median / sequence);
      if (p.slices > 1) {
        const double end = std::max(us.median, product + links / p.slices);
        std::printf(", exposed %.3f; over links %.3f of their sequence, exposed %.3f",
                    (us.median - product) / alone[p.sms], end / std::max(sequence, product + links),
                    (end - product) / std::max(alone[p.sms], links));
      }
      std::printf("\n");
    }
    std::fflush(stdout);
    return is_right;
  }

 private:
  static T* Random(int64_t count, uint64_t seed) {
    auto* data = Allocate<uint16_t>(count);
    FillRandom<uint16_t><<<1024, 256>>>(data, count, seed);
    return reinterpret_cast<T*>(data);
  }

  void MakeCombine() {
    const int ranks = routing_.ranks, tokens = routing_.tokens, capacity = routing_.capacity;
    const CombineCall call = {0, 0, kBFloat16.name, 1.f};
    const auto array = [](const DataType& type, std::vector<int64_t> axes) {
      moe_a2a::Array made = {type, std::move(axes), 0, 0};
      made.bytes = NumElements(made, 0) * type.bytes;
      return made;
    };
    const std::vector<moe_a2a::Array> args = {
        array(kBFloat16, {capacity, n_}),      array(kInt32, {tokens, ranks}),
        array(kInt32, {ranks, tokens}),        array(kInt32, {tokens, kTopK}),
        array(kInt32, {ranks, tokens, kTopK}), array(kInt32, {capacity})};
    const std::vector<moe_a2a::Array> results = {array(kBFloat16, {tokens, n_})};
    Topology topology = {std::vector<int64_t>(ranks, 0), ranks, ranks};
    AddDevice(0, {0, 0});
    workspace_ = &Workspace::Get(topology, WorkspaceKind::kSplit);
    CHECK(workspace_->Reserve(ranks * array_bytes(tokens, n_ * sizeof(T)), 0));
    RankView view = {};
    CHECK(workspace_->View(0, &view));
    view.operation = CombineCall::kOperation;
    view.signature = n_;
    view.launch = 1;
    view.timeout_ns = view.first_timeout_ns = static_cast<uint64_t>(options_.timeout_s * 1e9);
    std::memset(static_cast<void*>(params_), 0, sizeof(params_));
    CHECK(call.Describe({view, false, true, 1}, {args.data(), args.size()},
                        {results.data(), results.size()}, &params_[0]));
    std::memcpy(static_cast<void*>(&params_[1]), &params_[0], sizeof(CombineParams));
    for (int rank = 0; rank < 2; ++rank) {
      params_[rank].view.rank += rank;
      params_[rank].view.error += rank;
      const auto of_rank = [&](auto* data, int64_t count) {
        return reinterpret_cast<char*>(data + rank * count);
      };
      const std::vector<char*> in = {of_rank(d_, int64_t{capacity} * n_),
                                     of_rank(token_slot_, tokens * ranks),
                                     of_rank(unread_, 0),
                                     of_rank(unread_, 0),
                                     of_rank(slot_rows_, ranks * tokens * kTopK),
                                     of_rank(unread_, 0)};
      const std::vector<char*> out = {of_rank(out_, out_bytes_ / ranks)};
      call.Point({in.data(), in.size()}, {out.data(), out.size()}, &params_[rank]);
    }
  }

  // One slice: as always.
  void Multiply(int sms, int slices) {
    const ColumnSlices sliced = {slices, counters_ + 1};
    GroupedGemm gemm = {GroupedProduct::kForward,
                        ElementType::kBFloat16,
                        a_,
                        b_,
                        d_,
                        int64_t{routing_.ranks} * routing_.capacity,
                        kExperts,
                        k_,
                        n_,
                        starts_,
                        sizes_,
                        matrices_,
                        kExperts,
                        reinterpret_cast<int32_t*>(counters_),
                        sms};
    gemm.slices = &sliced;
    const Problem problem = slices == 1 ? gemm::Launch<T, Whole>(gemm, stream_)
                                        : gemm::Launch<T, Sliced>(gemm, stream_);
    CHECK(problem);
  }

  // `sms`: of all ranks together. Late blocks get the multiprocessors that the product leaves.
  void Combine(cudaStream_t stream, int sms, int slices, bool has_late = false) {
    Grid grid = grid_of(params_[0], std::max(1, sms / routing_.ranks));
    if (has_late) {
      grid.roles.late_blocks = grid.blocks;
      grid.blocks = std::max(grid.blocks, (num_sms_ - 4) / routing_.ranks);
    }
    for (CombineParams& p : params_) {
      p.roles = grid.roles;
      p.sliced = {};
      if (slices > 1) {
        p.sliced = {slices, kExperts, slice_columns(n_, slices), counters_ + 1, sizes_};
      }
    }
    CHECK(LaunchCombine(params_, grid.blocks, stream));
  }

  void Together(int sms, int slices, bool is_late) {
    CHECK(cudaMemsetAsync(counters_, 0, (1 + kMaxSlices) * sizeof(uint32_t), stream_));
    CHECK(cudaEventRecord(zeroed_, stream_));
    Multiply(num_sms_ - sms, slices);
    // The combine starts when every cluster of the product has taken a tile, or has found none. Otherwise its blocks could
    // be where the product's clusters need two neighbouring multiprocessors.
    const int clusters = (num_sms_ - sms) / Whole::kBlocks;
    CHECK(cudaStreamWaitEvent(side_, zeroed_));
    CHECK(wait_value_(side_, reinterpret_cast<CUdeviceptr>(counters_), clusters,
                      CU_STREAM_WAIT_VALUE_GEQ) == CUDA_SUCCESS);
    Combine(side_, sms, slices, is_late);
    CHECK(cudaEventRecord(combined_, side_));
    CHECK(cudaStreamWaitEvent(stream_, combined_));
  }

  uint64_t FingerprintOfResults() {
    unsigned long long found;
    CHECK(cudaMemset(sum_, 0, sizeof(*sum_)));
    Fingerprint<<<1024, 256>>>(reinterpret_cast<uint32_t*>(out_), out_bytes_ / 4, sum_);
    CHECK(cudaMemcpy(&found, sum_, sizeof(found), cudaMemcpyDeviceToHost));
    return found;
  }

  const Options& options_;
  const std::string name_;
  const int k_, n_;
  const Routing routing_;
  int num_sms_;
  T *a_, *b_, *d_;  // [ranks * capacity, k], [kExperts, k, n], [ranks * capacity, n]
  char* out_;       // [tokens, n]
  int64_t out_bytes_;
  int32_t *starts_, *sizes_, *matrices_, *token_slot_, *slot_rows_;
  int32_t* unread_;     // stands for arrays that the kernel does not read
  uint32_t* counters_;  // the product's next tile, then its finished tiles
  unsigned long long* sum_;
  Workspace* workspace_;
  CombineParams params_[2];  // of ranks 0 and 1
  TimedStream stream_;
  cudaStream_t side_;
  cudaEvent_t zeroed_, combined_;
  CUresult (*wait_value_)(CUstream, CUdeviceptr, cuuint32_t, unsigned);
};

int Main(int argc, char** argv) {
  Options o;
  ReadOptions(argc, argv,
              {{"--ranks", &o.ranks},
               {"--tokens", &o.tokens},
               {"--sms", &o.sms},
               {"--slices", &o.slices},
               {"--samples", &o.samples},
               {"--reps", &o.reps},
               {"--timeout", &o.timeout_s}});
  CHECK(o.ranks >= 2 && kExperts % o.ranks == 0 && o.tokens % o.ranks == 0 && o.tokens > 0);
  for (int slices : o.slices) CHECK(slices == 2 || slices == 4);
  cudaDeviceProp properties;
  CHECK(cudaGetDeviceProperties(&properties, 0));
  std::printf("%s, %d SMs\n", properties.name, properties.multiProcessorCount);
  bool is_right = true;
  for (const auto& [name, k, n] : {std::tuple{"A", 1536, 4096}, {"B", 2048, 7168}}) {
    is_right = Bench(o, name, k, n).Run() && is_right;
  }
  std::printf("%s\n", is_right ? "all results are equal" : "results differ");
  return is_right ? 0 : 1;
}

}  // namespace driver
}  // namespace moe_a2a

int main(int argc, char** argv) {
  // Loading a kernel while a combine waits for a product would wait for the combine's end.
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  return moe_a2a::driver::Main(argc, argv);
}
