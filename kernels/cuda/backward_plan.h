// Which kernel solves a backward problem.
//
// Idea.  Where a group's x and dy fit on the chip, they are read once and dinput is written: three
// passes over the bytes; elsewhere they are read twice.  With the numbers of an H200 (132
// multiprocessors with 227 KB of shared memory for a block):
//
//   way         what                             up to            held in
//   rows        one element per channel          512 elements     registers of a warp
//   long rows   one element per channel          4096 elements    shared memory of a block
//                                                32768            that of a cluster of 2 to 8
//               the same in pieces               all others       nothing: read twice
//   planes      contiguous groups, x and dy      110 KB           half the shared memory of a
//                                                450 KB           multiprocessor, or of 2 to 4
//   tiles       channels_last, x and dy of       110 KB           the same
//               a range of whole groups          900 KB           of 2 to 8
//   streamed    what is left                     all others       nothing: read twice
//
// Of double, half as many elements.  Without clusters, a block stands in for the cluster.  Rows and
// long rows are in backward_rows.cuh, planes and tiles in backward_held.cuh and the rest in
// backward_streamed.cuh.
//
// Thresholds, and what was measured for them (H200, 2026-11-30):
//
// Clusters of 4 at most for planes: (4, 320, 128, 128) in 32 groups in bfloat16 takes 148 us in
// clusters of 8, 122 us read twice.
//
// Half of a multiprocessor's memory, so that two blocks share it: one alone has too few warps.
//
// As many clusters as the GPU says that it runs at once, which are 15 of 8 blocks and not 16: one
// too many in a persistent kernel takes twice the time.
#pragma once
#include <numeric>

#include "plan.h"

namespace fxfuse::cuda {

// Elements of a thread that meet the activation at once, so that its kind is asked for once.
constexpr int kElementsAtOnce = 8;

FXFUSE_EVERYWHERE bool wants_affine(const Backward& problem) {
  return problem.dweight != nullptr || problem.dbias != nullptr;
}

inline int power_of_two_from(int64_t least) {
  int result = 1;
  while (result < least) result *= 2;
  return result;
}

// So many rows at least that no thread of a kernel adds up more values of a channel than torch's
// does, or 256.
inline int64_t accurate_rows(int64_t batch) { return std::min<int64_t>(32, ceil_div(batch, 256)); }

// ---- one element per channel --------------------------------------------------------------------

// Elements of a row that a thread holds.
FXFUSE_EVERYWHERE constexpr int row_elements(size_t accumulate_size) {
  return static_cast<int>(64 / accumulate_size);
}

constexpr int kRowWarps = 4;
constexpr int kBackwardRowThreads = 32 * kRowWarps;

// Blocks of rows_backward in a multiprocessor: few with many registers beat many that spill.  Three
// only for 16-bit inputs: their rows are half as long, so more of them have to be on their way.
constexpr int row_blocks(int vector) { return vector == 8 ? 3 : 2; }

struct WarpRows {
  int lanes;        // for a group, a power of two up to 32
  int groups;       // side by side in a warp, a power of two; the rest of its lanes take more rows
  int64_t columns;  // blocks that a row takes
  int64_t slices;   // of the batch
};

struct LongRows {
  int cluster, threads;  // blocks for a group, threads of each
  int64_t pieces;        // of a group that no cluster holds; else 1
  int64_t slices;        // of the batch

  // The elements of a group that a block takes.
  FXFUSE_EVERYWHERE int width(size_t accumulate_size) const {
    return threads * row_elements(accumulate_size);
  }
};

// Blocks of long_rows_backward in a multiprocessor, if they have all the threads that they may.
constexpr int long_row_blocks(size_t accumulate_size) { return accumulate_size == 4 ? 2 : 1; }

// Rows in the ring of a block.
FXFUSE_EVERYWHERE constexpr int ring_rows(size_t element_size) { return element_size == 2 ? 4 : 3; }

// Bytes of the ring of a row in the input's or the gradient's type.
FXFUSE_EVERYWHERE constexpr int ring_bytes(int width, size_t element_size) {
  return width * static_cast<int>(element_size) + 16;
}

// Slices of the batch, so that `resident` of them run at once, where each takes `rows` rows at a
// time; with as many rounds, as few slices as that takes.
inline int64_t row_slices(const Backward& p, int64_t resident, int64_t rows) {
  const int64_t most = ceil_div(p.batch, rows);
  int64_t slices = std::max(resident, ceil_div(accurate_rows(p.batch), rows));
  slices = std::max<int64_t>(std::min(slices, most), 1);
  return ceil_div(p.batch, ceil_div(p.batch, slices * rows) * rows);
}

inline WarpRows warp_rows(const Backward& p, const Gpu& gpu, int vector) {
  const int64_t size = p.channels / p.num_groups;
  WarpRows rows;
  rows.lanes = power_of_two_from(ceil_div(size, row_elements(accumulate_size(p.dtype))));
  rows.groups = std::min(32 / rows.lanes, power_of_two_from(p.num_groups));
  rows.columns = ceil_div(p.num_groups, rows.groups);
  const int64_t resident = gpu.resident(1, row_blocks(vector));
  rows.slices = row_slices(p, resident / rows.columns, kRowWarps * (32 / rows.lanes / rows.groups));
  return rows;
}

inline size_t long_rows_bytes(const Backward& p, const LongRows& rows) {
  const int width = rows.width(accumulate_size(p.dtype));
  return size_t(ring_rows(element_size(p.dtype))) *
         (ring_bytes(width, element_size(p.dtype)) +
          ring_bytes(width, element_size(p.output_dtype)));
}

inline LongRows long_rows(const Backward& p, const Gpu& gpu) {
  const int64_t size = p.channels / p.num_groups;
  const int most = kThreads * row_elements(accumulate_size(p.dtype));  // elements of a block
  LongRows rows = {1, kThreads, 1, 1};
  if (size <= most * (gpu.clusters ? 8 : 1)) {
    const auto threads = [&](int cluster) {
      return static_cast<int>(ceil_div(ceil_div(size, cluster), most / kThreads * 32) * 32);
    };
    rows.cluster = power_of_two_from(ceil_div(size, most));
    // Where groups are few, more blocks for each.
    while (gpu.clusters && rows.cluster < 8 && threads(rows.cluster) > 64 &&
           p.batch * p.num_groups * rows.cluster * 2 <= gpu.multiprocessors) {
      rows.cluster *= 2;
    }
    rows.threads = threads(rows.cluster);
  } else {
    rows.pieces = ceil_div(size, most);
  }
  const int blocks = std::min(long_row_blocks(accumulate_size(p.dtype)) * kThreads / rows.threads,
                              gpu.fitting(long_rows_bytes(p, rows)));
  rows.slices = row_slices(
      p, gpu.resident(rows.cluster, std::max(blocks, 1)) / (p.num_groups * rows.pieces), 1);
  return rows;
}

// ---- groups in shared memory --------------------------------------------------------------------

// Blocks of a cluster at most.  Every GPU with clusters has 8.
constexpr int kMostPlaneCluster = 4, kMostTileCluster = 8;

// Blocks at once in a multiprocessor: doubles take twice the registers.
constexpr int held_blocks(size_t accumulate_size) { return accumulate_size == 4 ? 2 : 1; }

struct HeldPlanes {
  int cluster;          // blocks of a tile
  int groups;           // of a tile: 1 in a cluster
  int segments, tasks;  // of a channel, and of a block: segments of its channels
  int length;           // of a segment, in vectors; the last of a channel may be shorter
  int lanes;            // of a team
  int parts;            // blocks that share a channel, so rows of partial sums of a sample
  int planes;           // channels of a sample that a block meets, at most kThreads
  int64_t tiles;

  // Bytes of a block's shared memory for its elements of that size, and all that the kernel lists.
  FXFUSE_EVERYWHERE int64_t room(int vector, size_t element_size) const {
    return (int64_t(tasks) * length * vector * static_cast<int>(element_size) + 31) / 16 * 16;
  }
  int64_t bytes(int vector, size_t x_size, size_t dy_size, size_t pair) const {
    return room(vector, x_size) + room(vector, dy_size) +
           static_cast<int64_t>(pair) * (tasks + planes + groups * (3 + 2 * cluster));
  }
};

struct HeldTiles {
  int cluster;     // blocks of a tile
  int width;       // of a tile, in vectors: whole groups
  int slots;       // threads that share a column
  int rows;        // pixels of a block
  int groups;      // of a tile
  bool fold;       // the lanes of a warp first add up what they have of a column
  int64_t across;  // tiles beside each other
  int64_t tiles;

  FXFUSE_EVERYWHERE int sums() const { return fold ? kThreads / 32 : slots; }  // of each channel
  int64_t bytes(int vector, size_t x_size, size_t dy_size, size_t pair) const {
    const int64_t channels = int64_t(width) * vector;
    return static_cast<int64_t>(rows * channels * (x_size + dy_size) +
                                pair * (channels * (sums() + 1) + groups * (1 + 2 * cluster)));
  }
};

// Whether twice the blocks for a tile would still have a multiprocessor each, and enough to do:
// `bytes` are those of a block so far.
inline bool too_few(int64_t tiles, int cluster, int most_cluster, int64_t bytes, const Gpu& gpu) {
  return cluster < most_cluster && tiles * cluster * 2 <= gpu.multiprocessors && bytes > 16 << 10;
}

// How planes_backward would hold the problem's groups; false where it cannot.
inline bool hold_planes(const Backward& p, const Gpu& gpu, int vector, HeldPlanes& held) {
  const int64_t per_group = p.channels / p.num_groups, groups = p.batch * p.num_groups;
  const int64_t vectors = p.spatial / vector;
  const size_t x_size = element_size(p.dtype), dy_size = element_size(p.output_dtype);
  const size_t pair = 2 * accumulate_size(p.dtype);
  const int most_cluster = gpu.clusters ? kMostPlaneCluster : 1;
  if (per_group > most_cluster * kThreads ||
      group_size(p) * static_cast<int64_t>(x_size + dy_size) > most_cluster * gpu.share(2)) {
    return false;
  }
  const int at_once = kElementsAtOnce / vector;
  // `planes` channels are the block's, or its cluster's.
  const auto divide = [&](int cluster, int64_t of_tile) {
    held.cluster = cluster;
    held.groups = static_cast<int>(of_tile);
    held.tiles = ceil_div(groups, of_tile);
    held.lanes = std::min(32, power_of_two_from(ceil_div(vectors, at_once)));
    const int64_t planes = of_tile * per_group;
    const int64_t teams = kThreads / held.lanes, of_round = int64_t(held.lanes) * at_once;
    // The fewest segments among the fewest rounds; a segment keeps its lanes busy.
    int64_t least = std::numeric_limits<int64_t>::max();
    for (int64_t segments = 1; segments == 1 || segments * of_round <= vectors; segments *= 2) {
      const int64_t length = ceil_div(vectors, segments);
      const int64_t tasks = ceil_div(planes * segments, cluster);
      const int64_t rounds = ceil_div(tasks, teams) * ceil_div(length, of_round);
      if (rounds >= least || (segments - 1) * length >= vectors) continue;
      least = rounds;
      held.segments = static_cast<int>(segments);
      held.length = static_cast<int>(length);
      held.tasks = static_cast<int>(tasks);
    }
    const bool whole = cluster == 1 || held.tasks % held.segments == 0;
    held.parts = whole ? 1 : cluster;
    held.planes =
        static_cast<int>(std::min(planes, whole ? ceil_div(held.tasks, held.segments)
                                                : ceil_div(held.tasks - 1, held.segments) + 1));
    return held.bytes(vector, x_size, dy_size, pair);
  };
  // Two blocks in a multiprocessor: one alone has too few warps.
  const auto fits = [&](int cluster) {
    return divide(cluster, 1) <= gpu.share(2) && held.planes <= kThreads;
  };
  int cluster = 1;
  while (!fits(cluster)) {
    if (cluster == most_cluster) return false;
    cluster *= 2;
  }
  while (too_few(groups, cluster, most_cluster, divide(cluster, 1), gpu) && fits(2 * cluster)) {
    cluster *= 2;
  }
  const int64_t bytes = divide(cluster, 1);
  if (cluster > 1) return true;
  // Small groups go together: up to half of that memory, if tiles are many.
  const int64_t together = std::min(
      {gpu.share(4) / bytes, kThreads / per_group, groups / (int64_t(4) * gpu.multiprocessors)});
  if (together > 1) divide(1, together);
  return true;
}

// How tiles_backward would hold the problem's groups; false where it cannot.
inline bool hold_tiles(const Backward& p, const Gpu& gpu, int vector, HeldTiles& held) {
  const int64_t per_group = p.channels / p.num_groups;
  const size_t x_size = element_size(p.dtype), dy_size = element_size(p.output_dtype);
  const size_t pair = 2 * accumulate_size(p.dtype);
  const int most_cluster = gpu.clusters ? kMostTileCluster : 1;
  const int64_t columns = p.channels / vector;
  const int64_t unit = per_group / std::gcd<int64_t>(per_group, vector);  // vectors: whole groups
  if (unit > kThreads || p.spatial >= int64_t(1) << 24) return false;
  const auto divide = [&](int cluster, int64_t width) {
    held.cluster = cluster;
    held.width = static_cast<int>(width);
    held.slots = kThreads / held.width;
    held.rows = static_cast<int>(ceil_div(p.spatial, cluster));
    held.groups = static_cast<int>(width * vector / per_group);
    held.fold = width <= 32 && (width & (width - 1)) == 0;
    held.across = columns / width;
    held.tiles = p.batch * held.across;
    return held.bytes(vector, x_size, dy_size, pair);
  };
  // From narrow to wide: 64 bytes of a pixel at least, then 128 if those fit too, and more while
  // the tile stays small and tiles are many.
  const auto bytes_of = [&](int64_t width) {
    return width * vector * static_cast<int64_t>(x_size);
  };
  HeldTiles best = {};
  for (int64_t width = unit; width <= std::min<int64_t>(columns, kThreads); width += unit) {
    if (columns % width != 0 || (bytes_of(width) < 64 && width < columns)) continue;
    bool fits = false;
    for (int cluster = 1; cluster <= most_cluster && !fits; cluster *= 2) {
      fits = divide(cluster, width) <= gpu.share(2);
    }
    if (!fits) break;  // and no wider tile does
    const bool small = held.cluster == 1 &&
                       held.bytes(vector, x_size, dy_size, pair) <= gpu.share(4) &&
                       held.tiles >= 2 * gpu.multiprocessors;
    const bool full_line = bytes_of(width) <= 128;
    if (best.cluster != 0 && !small && !full_line) break;
    best = held;
  }
  if (best.cluster == 0) return false;
  held = best;
  const auto bytes = [&] { return held.bytes(vector, x_size, dy_size, pair); };
  while (too_few(held.tiles, held.cluster, most_cluster, bytes(), gpu)) {
    divide(2 * held.cluster, held.width);
  }
  return true;
}

// ---- the choice ---------------------------------------------------------------------------------

constexpr int kRowsOfBlock = 256;  // of partial sums, that a block of sum_rows adds

// How a problem is solved: what workspace_bytes and backward must agree on.
struct BackwardPlan {
  enum class Way { kNothing, kRows, kLongRows, kPlanes, kTiles, kStreamed };

  const Gpu& gpu;
  Way way = Way::kNothing;
  bool affine;         // dweight or dbias is asked for
  bool vectors;        // 16-byte accesses along rows, groups, or rows of all channels
  bool plane_vectors;  // and along one channel's elements
  WarpRows warp_rows;  // each set where its way is taken
  LongRows long_rows;
  HeldPlanes planes;
  HeldTiles tiles;
  Chunks chunks;       // of a channel's elements
  int64_t rows = 0;    // of partial sums, each of all channels
  int64_t pieces = 0;  // of a group that is read twice, by rows
  bool means = false;  // dinput comes from a second pass, which needs the groups' means

  BackwardPlan(const Backward& p, const Gpu& gpu) : gpu(gpu) {
    affine = wants_affine(p);
    if (p.dinput == nullptr && !affine) return;
    const int width = vector_width(p.dtype);
    const bool by_rows = p.spatial == 1, last = is_channels_last(p);
    const bool all_aligned = aligned(p.input, p.grad_output, p.dinput);
    vectors = (last ? p.channels : group_size(p)) % width == 0 && all_aligned &&
              ((!by_rows && !last) || aligned(p.weight, p.bias));
    plane_vectors = p.spatial % width == 0 && all_aligned;
    if (by_rows) {
      plan_rows(p);
    } else if (last && vectors && hold_tiles(p, gpu, width, tiles)) {
      way = Way::kTiles;
      rows = p.batch * tiles.cluster;
    } else if (!last && hold_planes(p, gpu, plane_vectors ? width : 1, planes)) {
      way = Way::kPlanes;
      rows = p.batch * planes.parts;
    } else {
      way = Way::kStreamed;
      chunks = last ? ColumnTiles::of(p, vectors ? width : 1).chunks
                    : Chunks::of(p.spatial, kElementsOfChunk);
      rows = p.batch * chunks.count;
      means = p.dinput != nullptr;
    }
    // One row is dweight and dbias already, unless it is needed for the means too.
    if (way != Way::kStreamed && (!affine || rows == 1)) rows = 0;
  }

  // Rows of partial sums, those of the rounds of sum_rows included.
  int64_t partial_rows() const {
    int64_t total = rows;
    for (int64_t left = rows; affine && left > 2 * kRowsOfBlock;) {
      left = ceil_div(left, kRowsOfBlock);
      total += left;
    }
    return total;
  }

  size_t workspace_bytes(const Backward& p) const {
    const int64_t of_groups = means ? p.batch * p.num_groups * (1 + pieces) : 0;
    return (partial_rows() * p.channels + of_groups) * 2 * accumulate_size(p.dtype);
  }

  // For tests.
  const char* name() const {
    switch (way) {
      case Way::kNothing:
        return "nothing";
      case Way::kRows:
        return vectors ? "rows" : "rows of elements";
      case Way::kLongRows:
        return long_rows.pieces > 1    ? "pieces of rows"
               : long_rows.cluster > 1 ? "rows of a cluster"
                                       : "rows of a block";
      case Way::kPlanes:
        return planes.cluster > 1  ? "planes of a cluster"
               : planes.groups > 1 ? "planes of several groups"
                                   : "planes of a group";
      case Way::kTiles:
        return tiles.cluster > 1 ? "tiles of a cluster" : "tiles of a block";
      case Way::kStreamed:
        return vectors ? "streamed" : "streamed by elements";
    }
    return "";
  }

 private:
  void plan_rows(const Backward& p) {
    const int64_t size = p.channels / p.num_groups;
    if (size <= 32 * row_elements(accumulate_size(p.dtype))) {
      way = Way::kRows;
      warp_rows = cuda::warp_rows(p, gpu, vectors ? vector_width(p.dtype) : 1);
      rows = warp_rows.slices;
    } else {
      way = Way::kLongRows;
      long_rows = cuda::long_rows(p, gpu);
      rows = long_rows.slices;
      means = p.dinput != nullptr && long_rows.pieces > 1;
      pieces = means ? long_rows.pieces : 0;
    }
  }
};

// Which way the plan takes.
inline const char* plan_name(const Backward& problem, const Gpu& gpu) {
  return BackwardPlan(problem, gpu).name();
}

}  // namespace fxfuse::cuda
