// What the choice of a kernel needs, in plain C++: facts about a GPU, and how sizes are cut.  No
// CUDA header may be included here or in the two plans, so that a test without a GPU, or without
// nvcc, can ask them for any GPU (forward_plan.h, backward_plan.h).
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "../group_norm.h"

// A function for the plan and for the kernels.
#ifdef __CUDACC__
#define FXFUSE_EVERYWHERE __host__ __device__ __forceinline__
#else
#define FXFUSE_EVERYWHERE inline
#endif

namespace fxfuse::cuda {

// ---- the GPU ------------------------------------------------------------------------------------

// What the launch path has to know about a GPU.
struct Gpu {
  int multiprocessors = 0;   // 0 where the binary has no code for it
  int shared = 0;            // bytes of shared memory that a block can have
  int shared_of_all = 0;     // that the blocks of a multiprocessor have together
  bool clusters = false;     // whether code and GPU have clusters, early launches, bulk copies
  bool wgmma = false;        // whether code and GPU have the products of hopper.cuh
  bool cooperates = false;   // whether all blocks of a grid can meet
  int largest_cluster = 1;   // of blocks with all the shared memory: a power of two up to 16
  int most_clusters[2][4] = {// at once with 1 or 2 blocks in a multiprocessor: of 1, 2, 4, 8
                             {1, 1, 1, 1},
                             {1, 1, 1, 1}};

  // What a multiprocessor keeps of its shared memory for every block, and what a kernel may declare
  // beside what it is launched with.
  static constexpr int kOfBlock = 1024, kDeclared = 1024;

  // Blocks that run at once in a multiprocessor, judged by their shared memory.
  int fitting(int64_t bytes) const { return static_cast<int>(shared_of_all / (bytes + kOfBlock)); }

  // The shared memory of a block when `blocks` of them are to run at once.
  int64_t share(int blocks) const {
    return std::min(shared_of_all / blocks - kOfBlock, shared - kDeclared);
  }

  // Clusters that run at once when `blocks` blocks do in a multiprocessor.  Fewer than the blocks
  // would allow: a cluster stays within a GPC, and those differ in size.  One cluster too many in a
  // persistent kernel takes twice the time (H200, 2026-11-30: 15 clusters of 8, not 16).
  int64_t resident(int cluster, int blocks) const {
    if (cluster == 1) return int64_t(multiprocessors) * blocks;
    const int index = cluster == 2 ? 1 : cluster == 4 ? 2 : 3;
    return blocks < 2 ? most_clusters[0][index] : most_clusters[1][index] * (blocks / 2);
  }
};

// ---- sizes --------------------------------------------------------------------------------------

constexpr int kThreads = 256;  // of a block, where a kernel does not say otherwise

FXFUSE_EVERYWHERE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline size_t element_size(Dtype dtype) { return dtype == kDouble ? 8 : dtype == kFloat ? 4 : 2; }

inline size_t accumulate_size(Dtype dtype) { return dtype == kDouble ? 8 : 4; }

// Elements of a 16-byte access to the input.
inline int vector_width(Dtype dtype) { return static_cast<int>(16 / element_size(dtype)); }

template <class... Pointers>
bool aligned_to(size_t bytes, Pointers... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) % bytes == 0) && ...);
}

template <class... Pointers>
bool aligned(Pointers... pointers) {
  return aligned_to(16, pointers...);
}

// Where dimension 1 is the innermost in memory and a row is not just one value.
inline bool is_channels_last(const Problem& problem) {
  return problem.channels_last && problem.spatial > 1 && problem.channels > 1;
}

inline int64_t group_size(const Problem& problem) {
  return problem.channels / problem.num_groups * problem.spatial;
}

// A division by a number that the host knows: three instructions where the dividend has 31 bits
// (Granlund and Montgomery, 1994), instead of twenty or, with 64 bits, a hundred.
struct Divisor {
  int64_t divisor;
  uint32_t factor, shift;

  static Divisor of(int64_t divisor) {
    if (divisor >= int64_t(1) << 31) return {divisor, 1, 31};  // gives 0 for 31 bits
    uint32_t shift = 0;
    while ((int64_t(1) << shift) < divisor) ++shift;
    const uint64_t rest = (uint64_t(1) << shift) - static_cast<uint64_t>(divisor);
    return {divisor, static_cast<uint32_t>((rest << 32) / divisor + 1), shift};
  }

  FXFUSE_EVERYWHERE int quotient(int n) const {
    const auto dividend = static_cast<uint32_t>(n);
    const auto high = static_cast<uint32_t>((uint64_t(dividend) * factor) >> 32);
    return static_cast<int>((high + dividend) >> shift);
  }
  FXFUSE_EVERYWHERE int64_t quotient(int64_t n) const {
    return n >> 31 == 0 ? quotient(static_cast<int>(n)) : n / divisor;
  }
};

constexpr int64_t kElementsOfChunk = 8192;

// A long dimension cut into parts: at most 1024, so that their partial results are few.
struct Chunks {
  int64_t count, size;

  // The size is a multiple of 16, which keeps vectors whole.
  static Chunks of(int64_t total, int64_t smallest) {
    const int64_t size = ceil_div(std::max(smallest, ceil_div(total, 1024)), 16) * 16;
    return {ceil_div(total, size), size};
  }
};

// Lanes for a piece of work of that many vectors: few enough that none idles, or a whole block.
inline int team_size(int64_t vectors, int64_t largest_in_warp) {
  if (vectors > largest_in_warp) return kThreads;
  int size = 1;
  while (size < 32 && size < vectors) size *= 2;
  return size;
}

// Into how many pieces to cut each of `parts`, so that blocks fill a GPU, which runs `resident` of
// them at once, once or, where that would leave it idle, a few times.
inline int64_t pieces_of(int64_t parts, int64_t resident) {
  int64_t count = 1;
  for (int64_t waves = 1; waves <= 4; ++waves) {
    count = std::max<int64_t>(waves * resident / parts, 1);
    if (count * parts * 10 >= waves * resident * 9) break;
  }
  return count;
}

// Rows of all channels: a block takes a tile of columns (vectors of channels) through one chunk of
// one sample's rows.  Its threads form `slots` rows of `width` columns, so that a warp reads up to
// 512 neighbouring bytes.
struct ColumnTiles {
  int width, slots;
  int64_t count;  // tiles in a row
  Chunks chunks;

  static ColumnTiles of(const Problem& problem, int vector) {
    const int64_t columns = problem.channels / vector;
    const int width = team_size(columns, columns);
    return {width, kThreads / width, ceil_div(columns, width), Chunks::of(problem.spatial, 128)};
  }

  // Tiles of the same width, and chunks of at least 4 rows for a thread, as many as fill the GPU.
  static ColumnTiles even(const Problem& problem, int vector, int64_t resident) {
    const int64_t columns = problem.channels / vector;
    ColumnTiles tiles;
    tiles.count = ceil_div(columns, 64);
    tiles.width = static_cast<int>(ceil_div(columns, tiles.count));
    tiles.slots = kThreads / tiles.width;
    const int64_t count = pieces_of(problem.batch * tiles.count, resident);
    const int64_t rows = std::max<int64_t>(ceil_div(problem.spatial, count), 4 * tiles.slots);
    tiles.chunks.count = ceil_div(problem.spatial, rows);
    tiles.chunks.size = ceil_div(problem.spatial, tiles.chunks.count);
    tiles.chunks.count = ceil_div(problem.spatial, tiles.chunks.size);
    return tiles;
  }

  int64_t blocks(const Problem& problem) const { return problem.batch * chunks.count * count; }
};

}  // namespace fxfuse::cuda
