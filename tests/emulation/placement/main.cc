// Reads int32 B, R, L, S, most, min_rows and the operands. Writes the results.
#include <cstdio>
#include <vector>

#include "launch.h"
#include "placement/fill_slots.h"

using namespace moe_a2a;

namespace {

std::vector<int32_t> read(size_t count) {
  std::vector<int32_t> values(count);
  if (std::fread(values.data(), sizeof(int32_t), count, stdin) != count) std::abort();
  return values;
}

}  // namespace

int main() {
  const std::vector<int32_t> sizes = read(6);
  const int batch = sizes[0], ranks = sizes[1], local = sizes[2], spare = sizes[3];
  const std::vector<int32_t> experts = read(size_t(batch) * ranks * local),
                             rows = read(experts.size());
  std::vector<int32_t> found(size_t(2) * batch * ranks * (local + spare), -7);
  const FillSlots call = {
      experts.data(), rows.data(), found.data(), found.data() + found.size() / 2,
      batch,          ranks,       local,        spare,
      sizes[4],       sizes[5]};
  if (LoadFillSlots() != cudaSuccess) return 1;
  if (!LaunchFillSlots(call, emulation::stream_of(0)).empty()) return 1;
  std::fwrite(found.data(), sizeof(int32_t), found.size(), stdout);
}
