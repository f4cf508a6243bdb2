// Checks grouped products over a fake cuBLASLt in the program's folder. Usage: library --seed N.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "cuda_bf16.h"
#include "launch.h"
#include "library/cublas_lt.h"
#include "library/fake_cublas_lt.h"
#include "library/library_gemm.h"

using namespace moe_a2a;

namespace {

std::mt19937_64 randomly;
int random_int(int least, int most) {
  return static_cast<int>(least + randomly() % (most - least + 1));
}

void require(bool ok, const std::string& what) {
  if (ok) return;
  std::printf("wrong: %s\n", what.c_str());
  std::exit(1);
}

using Numbers = std::vector<__nv_bfloat16>;
Numbers numbers(size_t count) {
  Numbers made(count);
  for (auto& number : made) number = __float2bfloat16_rn(static_cast<float>(random_int(-4, 4)));
  return made;
}

struct Product {
  GroupedProduct product = static_cast<GroupedProduct>(random_int(0, 2));
  int k = 8 * random_int(1, 3), n = 8 * random_int(1, 3), num_weights = random_int(1, 5);
  bool is_gradient = product == GroupedProduct::kWeightGradient;
  int num_spare = is_gradient ? 0 : random_int(0, 2), num_rows = 0;
  std::vector<int32_t> starts, sizes, weights;
  Numbers a, b, spare, d;
  std::vector<int32_t> scratch;

  Product() {
    for (int g = 0; g < num_weights + num_spare; ++g) add(random_int(0, 1) * random_int(1, 9), g);
    if (!is_gradient) add(random_int(0, 9), -1);
    const bool transposes = product == GroupedProduct::kTransposed;
    a = numbers(size_t(num_rows) * (transposes ? n : k));
    b = numbers(is_gradient ? size_t(num_rows) * n : size_t(num_weights) * k * n);
    spare = numbers(size_t(num_spare) * k * n);
    const size_t of_rows = size_t(num_rows) * (transposes ? k : n);
    d.assign(is_gradient ? size_t(num_weights) * k * n : of_rows, {0x7FC0});
    scratch.assign(LibraryScratch(static_cast<int64_t>(sizes.size())), -1);
  }

  void add(int rows, int index) {
    starts.push_back(num_rows), sizes.push_back(rows), weights.push_back(index);
    num_rows += rows;
  }

  Problem Launch(int64_t mean_rows = 7) {
    LibraryGemm gemm = {};
    gemm.mean_rows = mean_rows;
    gemm.product = product;
    gemm.type = ElementType::kBFloat16;
    gemm.a = a.data(), gemm.b = b.data(), gemm.d = d.data();
    gemm.num_rows = num_rows, gemm.num_weights = num_weights, gemm.k = k, gemm.n = n;
    gemm.starts = starts.data(), gemm.sizes = sizes.data(), gemm.weights = weights.data();
    gemm.num_groups = static_cast<int32_t>(sizes.size());
    gemm.counter = scratch.data();
    gemm.spare = spare.data(), gemm.num_spare = num_spare;
    return LaunchLibraryGemm(gemm, 3, emulation::stream_of(0));
  }

  void Check() const {
    const auto at = [](const Numbers& from, int64_t index) {
      return __bfloat162float(from[index]);
    };
    for (size_t g = 0; g < sizes.size(); ++g) {
      const auto weight = [&](int i, int j) {
        if (weights[g] < 0) return 0.0f;
        const int spare_index = weights[g] - num_weights;
        const int64_t in = int64_t{i} * n + j, matrix = int64_t{k} * n;
        return spare_index < 0 ? at(b, weights[g] * matrix + in)
                               : at(spare, spare_index * matrix + in);
      };
      const int first = starts[g], end = first + sizes[g];
      const auto require_equal = [&](float sum, int64_t index) {
        require(__float2bfloat16_rn(sum).bits == d[index].bits,
                "product " + std::to_string(static_cast<int>(product)) + ", group " +
                    std::to_string(g) + ": a number is not the sum of its products");
      };
      if (is_gradient) {
        for (int i = 0; i < k * n; ++i) {
          float sum = 0;
          for (int r = first; r < end; ++r) sum += at(a, r * k + i / n) * at(b, r * n + i % n);
          require_equal(sum, int64_t(g) * k * n + i);
        }
        continue;
      }
      const bool transposes = product == GroupedProduct::kTransposed;
      const int columns = transposes ? k : n, inner = transposes ? n : k;
      for (int r = first; r < end; ++r) {
        for (int c = 0; c < columns; ++c) {
          float sum = 0;
          for (int i = 0; i < inner; ++i) {
            sum += at(a, r * inner + i) * (transposes ? weight(c, i) : weight(i, c));
          }
          require_equal(sum, r * columns + c);
        }
      }
    }
  }
};

}  // namespace

int main(int argc, char** argv) {
  randomly.seed(std::strtoull(argv[argc - 1], nullptr, 10));
  require(LoadGroupArrays() == cudaSuccess, "the kernel is not loaded");
  require(CublasLtVersion() == 0, "there is a library before it is loaded");
  require(Product().Launch().find("has no cuBLASLt") != std::string::npos, "no error without it");
  const std::string path = argv[0];
  const std::string folder = path.substr(0, path.rfind('/'));
  void* const fake = dlopen((folder + "/libcublasLt.so.13").c_str(), RTLD_NOW);
  require(fake != nullptr, "no fake");
  auto& counts = *static_cast<FakeCounts*>(dlsym(fake, "fake_counts"));
  require(CublasLtVersion() == 130405, "the version is not the library's");

  // Call N fails in round N, until a round has no failure.
  for (long call = 0, has_failed = 1; has_failed; ++call) {
    Product product;
    counts.calls_until_failure = call;
    const Problem problem = product.Launch(1000 + call);
    has_failed = counts.calls_until_failure < 0;
    counts.calls_until_failure = -1;
    require(has_failed != problem.empty(), "an error is lost: " + problem);
    if (has_failed) {
      require(problem.find("cuBLASLt 130405: cublasLt") == 0 &&
                  problem.find("returned status 7") != std::string::npos,
              "an error does not name its call: " + problem);
    } else {
      require(call >= 15, "there are only " + std::to_string(call) + " calls");
    }
  }
  require(Product().Launch(0).find("has no algorithm") != std::string::npos, "no algorithm");
  for (int i = 0; i < 60; ++i) {
    Product product;
    require(product.Launch().empty(), product.Launch());
    product.Check();
    const long before = counts.searches;
    require(product.Launch().empty() && counts.searches == before, "an algorithm is found again");
  }
  std::puts("right");
}
