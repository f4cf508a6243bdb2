// Reads nine int32 (T, E, K, has_mask, three numbers of groups, renormalizes, applies_log_sigmoid),
// the float32 scale, and the operands. Writes the results.
#include <cstdio>
#include <vector>

#include "launch.h"
#include "router/choose.h"

using namespace moe_a2a;

namespace {

template <typename T>
std::vector<T> read(size_t count) {
  std::vector<T> values(count);
  if (std::fread(values.data(), sizeof(T), count, stdin) != count) std::abort();
  return values;
}

template <typename T>
void write(const std::vector<T>& values) {
  std::fwrite(values.data(), sizeof(T), values.size(), stdout);
}

}  // namespace

int main() {
  const auto sizes = read<int32_t>(9);
  const float scale = read<float>(1)[0];
  const size_t tokens = sizes[0], keys_of_all = tokens * sizes[1], choices = tokens * sizes[2];
  const auto keys = read<float>(keys_of_all), values = read<float>(keys_of_all);
  const auto mask = read<uint8_t>(sizes[3] != 0 ? tokens : 0);
  std::vector<int32_t> ids(choices, -7);
  std::vector<float> weights(choices), chosen(choices);
  const Choose call = {keys.data(),
                       values.data(),
                       sizes[3] != 0 ? reinterpret_cast<const bool*>(mask.data()) : nullptr,
                       ids.data(),
                       weights.data(),
                       chosen.data(),
                       sizes[0],
                       sizes[1],
                       sizes[2],
                       sizes[4],
                       sizes[5],
                       sizes[6],
                       sizes[7] != 0,
                       sizes[8] != 0,
                       scale};
  if (LoadChoose() != cudaSuccess) return 1;
  if (!LaunchChoose(call, emulation::stream_of(0)).empty()) return 1;
  write(ids);
  write(weights);
  write(chosen);
}
