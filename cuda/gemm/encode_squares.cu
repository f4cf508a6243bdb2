// Quantizes weights to BlockwiseFp8. Reads each square of 128 x 128 numbers once, and writes its
// values, their transpose, or both.
//
// Layout: a thread loads 16 bytes of each of several neighbouring rows, and transposes its values
// in blocks of 4 x 4 bytes. Shared memory then has the transposed square in rows of 128 bytes. A
// unit is the bytes that a thread stores at once. A unit's position is xored with the thread's
// column, so that stores and loads have no bank conflicts.
//
// Launch: a block for each square. Blocks share a multiprocessor, so one loads while others wait.
#include "gemm/encode_squares.h"

#include "device/element.cuh"
#include "device/format.cuh"
#include "runtime/cuda_error.h"

namespace moe_a2a {
namespace {

constexpr TokenFormat kFormat = TokenFormat::kBlockwiseFp8;
constexpr int kSide = Format<kFormat>::kGroup, kSquareThreads = 256;
constexpr int kSquareWarps = kSquareThreads / kWarpThreads;

// Transposes a block of 4 x 4 bytes. Each word is a row of the block.
__device__ __forceinline__ void transpose_bytes(const uint32_t (&from)[4], uint32_t (&to)[4]) {
  const uint32_t low01 = __byte_perm(from[0], from[1], 0x5140),
                 low23 = __byte_perm(from[2], from[3], 0x5140),
                 high01 = __byte_perm(from[0], from[1], 0x7362),
                 high23 = __byte_perm(from[2], from[3], 0x7362);
  to[0] = __byte_perm(low01, low23, 0x5410), to[1] = __byte_perm(low01, low23, 0x7632);
  to[2] = __byte_perm(high01, high23, 0x5410), to[3] = __byte_perm(high01, high23, 0x7632);
}

template <typename T>
__global__ void __launch_bounds__(kSquareThreads, sizeof(T) == 2 ? 4 : 2)
    encode_squares(const EncodeSquares p) {
  constexpr int kColumns = sizeof(uint4) / sizeof(T);            // of a thread: 8 or 4
  constexpr int kThreadsOfRow = kSide / kColumns;                // 16 or 32
  constexpr int kRows = kSide * kThreadsOfRow / kSquareThreads;  // of a thread: 8 or 16
  constexpr int kRowWords = kColumns / 4;                        // of values
  constexpr int kUnits = kSide / kRows;                          // of a row in shared memory
  constexpr int kLaneRows = kLaneElements / kColumns, kHolds = kRows / kLaneRows;
  __shared__ __align__(16) uint8_t turned[kSide * kSide];
  __shared__ uint32_t largest_of_warps[kSquareWarps];

  const auto squares_n = static_cast<uint32_t>(p.n / kSide),
             squares_k = static_cast<uint32_t>(p.k / kSide);
  const uint32_t square_n = blockIdx.x % squares_n, square_k = blockIdx.x / squares_n % squares_k,
                 matrix = blockIdx.x / squares_n / squares_k;
  const int column = threadIdx.x % kThreadsOfRow, unit = threadIdx.x / kThreadsOfRow;
  const int64_t origin = matrix * p.k * p.n + (int64_t{square_k} * kSide + unit * kRows) * p.n +
                         int64_t{square_n} * kSide + column * kColumns;
  const T* from = static_cast<const T*>(p.weights) + origin;
  LaneNumbers<T> numbers[kHolds];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    numbers[r / kLaneRows].vectors[r % kLaneRows] =
        __ldcs(reinterpret_cast<const uint4*>(from + r * p.n));
  }
  uint32_t largest = 0;
#pragma unroll
  for (const LaneNumbers<T>& lane : numbers) largest = max(largest, largest_magnitude(lane));
  largest = __reduce_max_sync(kAllLanes, largest);
  if (threadIdx.x % kWarpThreads == 0) largest_of_warps[threadIdx.x / kWarpThreads] = largest;
  __syncthreads();
#pragma unroll
  for (const uint32_t other : largest_of_warps) largest = max(largest, other);
  const GlobalScale none(1.f);
  const GroupEncoding<kFormat> encoding(largest, none);
  if (threadIdx.x == 0) {
    p.scales[(int64_t{matrix} * squares_n + square_n) * squares_k + square_k] = encoding.scale;
  }

  uint32_t words[kRows][kRowWords];
#pragma unroll
  for (int i = 0; i < kHolds; ++i) {
    const Values<kFormat> values = encode_lane(numbers[i], encoding, none);
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      words[i * kLaneRows + w / kRowWords][w % kRowWords] = values.words[w];
    }
  }
  if (p.plain != nullptr) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      uint8_t* to = p.plain + origin + r * p.n;
      if constexpr (kRowWords == 2) {
        *reinterpret_cast<uint2*>(to) = {words[r][0], words[r][1]};
      } else {
        *reinterpret_cast<uint32_t*>(to) = words[r][0];
      }
    }
  }
  if (p.turned == nullptr) return;
#pragma unroll
  for (int w = 0; w < kRowWords; ++w) {
    uint32_t columns[4][kRows / 4];
#pragma unroll
    for (int i = 0; i < kRows / 4; ++i) {
      const uint32_t block[4] = {words[4 * i][w], words[4 * i + 1][w], words[4 * i + 2][w],
                                 words[4 * i + 3][w]};
      uint32_t transposed[4];
      transpose_bytes(block, transposed);
#pragma unroll
      for (int c = 0; c < 4; ++c) columns[c][i] = transposed[c];
    }
    const int place = (unit ^ column % kUnits) * kRows;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      uint8_t* to = turned + (column * kColumns + 4 * w + c) * kSide + place;
      if constexpr (kRows == 8) {
        *reinterpret_cast<uint2*>(to) = {columns[c][0], columns[c][1]};
      } else {
        *reinterpret_cast<uint4*>(to) = {columns[c][0], columns[c][1], columns[c][2],
                                         columns[c][3]};
      }
    }
  }
  __syncthreads();
  constexpr int kVectors = kSide / static_cast<int>(sizeof(uint4));  // of a row in shared memory
  constexpr int kVectorUnits = kUnits / kVectors;                    // 2 or 1
  const int vector = threadIdx.x % kVectors;
#pragma unroll
  for (int row = threadIdx.x / kVectors; row < kSide; row += kSquareThreads / kVectors) {
    const int swizzle = row / kColumns % kUnits;
    uint4 found =
        reinterpret_cast<const uint4*>(turned + row * kSide)[vector ^ swizzle / kVectorUnits];
    if (kVectorUnits == 2 && swizzle % 2 == 1) found = {found.z, found.w, found.x, found.y};
    uint8_t* to = p.turned + matrix * p.k * p.n + (int64_t{square_n} * kSide + row) * p.k +
                  int64_t{square_k} * kSide;
    reinterpret_cast<uint4*>(to)[vector] = found;
  }
}

}  // namespace

cudaError_t LoadEncodeSquares() {
  cudaError_t error = cudaSuccess;
  for_each(Types<__nv_bfloat16, float>{}, [&](auto element) {
    cudaFuncAttributes attributes;
    if (error != cudaSuccess) return;
    error = cudaFuncGetAttributes(&attributes, encode_squares<typename decltype(element)::type>);
  });
  return error;
}

Problem LaunchEncodeSquares(const EncodeSquares& call, cudaStream_t stream) {
  const int64_t squares = call.num_matrices * (call.k / kSide) * (call.n / kSide);
  if (squares == 0) return "";
  if (squares >= int64_t{1} << 31) return "there are too many squares for one launch";
  for_each(Types<__nv_bfloat16, float>{}, [&](auto element) {
    using T = typename decltype(element)::type;
    if (call.type != Element<T>::kType) return;
    encode_squares<T><<<static_cast<unsigned>(squares), kSquareThreads, 0, stream>>>(call);
  });
  return ProblemOf(cudaGetLastError(), "launching encode_squares");
}

}  // namespace moe_a2a
