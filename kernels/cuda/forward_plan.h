// Which kernel solves a forward problem.
//
// Idea.  A group is read once wherever some unit of the GPU can hold it, and written once.  What
// changes with its size is which unit that is.  With the numbers of an H200 (132 multiprocessors
// with 227 KB of shared memory for a block):
//
//   way          a group, or a tile   held in                          statistics exchanged by
//   rows         up to 2 KB           registers of up to 32 lanes      shuffles
//   spans        the same, odd ones   registers of up to 32 lanes      shuffles
//   groups       up to 56 KB          shared memory of a block         a barrier
//                up to 590 KB         that of a cluster of 2 to 8      distributed shared memory
//   ring         up to 29 MB          that of all blocks together      slots in device memory
//   chunks       all others           nothing: read twice              device memory, 2 launches
//   channels_last:
//   tile         up to 50 KB          shared memory of a block         a barrier
//                up to 0.8 MB         that of a cluster of 2 to 16     distributed shared memory
//   grid tiles   from 24 MB on        that of all blocks together      slots in device memory
//   row chunks   all others           nothing: read twice              device memory, 3 launches
//
// Where channels are neighbours in memory, a tile is whole groups side by side, all rows of one
// sample: rows of 64 bytes at least.  Groups and tiles that are too few for the GPU are cut
// further. Where the ring cannot take a group (double, or groups that are not whole vectors), a
// cluster holds up to 1.7 MB.  Without clusters, a block holds what it can, and the chunks have the
// rest.
//
// Thresholds, and what was measured for them in us, with a graph of launches over rotating buffers
// (H200, 2026-11-30):
//
// A cluster leaves room for 4 blocks on a multiprocessor where it can: 128 groups of 320 KB take
// 30.2 with 8 blocks for each, 34.6 with 4; 256 of 512 KB 80 with 8, 117 with 4; 2048 of 50 KB 56.3
// with 2, 56.7 with 1.
//
// The ring, where a cluster would leave room for 2: 256 groups of 0.75 MB take 120 in the ring and
// 127 in clusters of 8; of 1 MB 152 and 223.
//
// More blocks where groups are few, with 4 KB at least: (8, 16384) in one group takes 3.4 with 8
// blocks for each, 5.3 with one.
//
// 6 vectors for a thread: 16384 float32 groups of 4 KB take 38 with 4 vectors, 54 with 2; 4096 of
// 8 KB 24.7 with 5.3, 27.7 with 8.
//
// 30 % of the ring for a slice, and no multiprocessor idle: 64 groups of 2 MB take 90 in 4 teams of
// 33, and 104 in 4 of 31.
//
// 50 KB of a tile in each block of a cluster, for 4 blocks on a multiprocessor.  With up to twice
// as much, which leaves room for 2, (4, 320, 128, 128) in 32 groups in bfloat16 takes 60, in three
// launches 46; (2, 320, 128, 128) 36 and 28.
//
// The grid takes tiles from 24 MB on.  It reads most of them once, but exchanges moments for each.
// All in 32 groups:
//
//     tiles, input                                      grid   three   copy
//     4 of 15.7 MB, (2, 960, 128, 128), bfloat16          72      64     32
//     8 of 16.8 MB, (8, 128, 256, 256), bfloat16         138     118     68
//     8 of 33.6 MB, the same in float32                  221     220    135
//     1 of 67 MB, (1, 512, 256, 256), bfloat16            59      65     34
//     1 of 134 MB, (1, 256, 512, 512), bfloat16          112     119     68
//     1 of 268 MB, (1, 128, 1024, 1024), bfloat16        214     222    134
//
// Narrow rows where tiles are few and small: (2, 1280, 8, 8) takes 4.6 in 64 tiles with rows of 80
// bytes, 6.2 in 16 of 320.
//
// 8 rows of a tile for a thread: (64, 2048, 7, 7) takes 11.3 with 128 threads, 13.0 with 96;
// (32, 1024, 14, 14) 11.8 with 256, 12.7 with 192.  More threads than 256 where that fills no more
// of the GPU: (2, 640, 64, 64) takes 14.7 with 320 and 17.3 with 256.
//
// One wave of blocks in each of three launches: (4, 320, 128, 128) takes 46 with 4 on each
// multiprocessor and 49 with 8; where 3 run at once, (1, 256, 512, 512) 119 with 3 and 133 with 4.
//
// No tiles in double: (64, 256, 28, 28) takes 108 in them, 105 in three launches.
//
// Spans are for small groups that are not whole vectors of 16 bytes, or not aligned: up to 480
// elements in float32, 992 in 16 bits, 288 in double.  With longer runs of a lane there are no
// registers for values, weight and bias.  Long runs are for what fills the GPU: (4096, 1000) in 8
// groups in bfloat16 takes 11.9 with runs of 9, 14.9 with 5 and 14.8 with 15; (33, 93) in 3 takes
// 1.5 with runs of 3, 1.6 with 9.
//
// What normalize_rows and normalize_spans do with a group of (N, C) rows is in rows.cuh and
// spans.cuh.
#pragma once
#include <numeric>

#include "plan.h"

namespace fxfuse::cuda {

// ---- contiguous groups --------------------------------------------------------------------------

constexpr int kMostRowVectors = 4;  // of a lane of normalize_rows

// How normalize_spans divides a group: each of the lanes of a team has a run of `run` elements.
struct Spans {
  int log2_lanes, run;

  // Of which there are kernels, up to the longest that has registers.
  static constexpr int kRuns[] = {1, 2, 3, 4, 5, 9, 15, 23, 31};
  static constexpr int longest(size_t element_size) {
    return element_size == 8 ? 9 : element_size == 4 ? 15 : 31;
  }

  // For groups of up to 32 of the longest runs.
  static Spans of(const Forward& p, const Gpu& gpu) {
    const int64_t size = group_size(p), groups = p.batch * p.num_groups;
    Spans best = {0, 1};
    int64_t least = 0;
    for (const int run : kRuns) {
      if (run > size || run > longest(element_size(p.dtype))) break;
      int log2_lanes = 0;
      while (int64_t(run) << log2_lanes < size) ++log2_lanes;
      if (log2_lanes > 5) continue;
      // What a lane does beside its run costs as much as 8 elements of it.
      const int64_t cost = int64_t(run + 8) << log2_lanes;
      const bool fills = groups << log2_lanes >= int64_t(gpu.multiprocessors) * 256;
      if (least == 0 || (cost < least && fills && run <= kMostWarpsRun)) {
        best = {log2_lanes, run};
        least = cost;
      }
    }
    return best;
  }

  static constexpr int kMostWarpsRun = 15;  // longer ones leave room for half the warps
};

constexpr int kMostGroupThreads = 512;
constexpr int kMostCluster = 8;       // blocks: what every chip with clusters has
constexpr int kStagedChannels = 256;  // whose weight and bias go to shared memory
constexpr int kGroupBarriers = 128;   // bytes of shared memory beside the dynamic ones, rounded up

// How normalize_groups cuts up a group, and what the host knows about it.
struct Groups {
  int log2_cluster, threads;  // blocks of a cluster; threads of a block
  int slice;                  // vectors of a block, a multiple of 8
  int shared;                 // bytes
  int channels, size;         // of a group
  int copy_width;             // bytes of a copy into shared memory
  bool staged;                // whether weight and bias go through shared memory
  bool vector_output;         // whether vectors of output and residual are aligned
  bool one_channel;           // whether a vector is always of one channel
  bool vector_affine;         // whether weight and bias can be read in vectors (no spatial size)
  Divisor spatial, num_groups;
};

constexpr int kChunkVectors = 1024;  // of 16 bytes, at most
constexpr int kStatisticsWarps = 8, kFinishWarps = 16;
constexpr int kRingThreads = 32 * (2 + kStatisticsWarps + kFinishWarps);
constexpr int kMostChunks = 16;             // in the ring
constexpr int kMostPolls = 6;               // slots that a lane of the merger polls
constexpr int kMostTeam = 32 * kMostPolls;  // blocks
constexpr int kSlotBytes = 16;              // of the moments of a slice

// How normalize_ring cuts up a problem.
struct Ring {
  int team, teams;           // blocks of a team; teams
  int vectors;               // of a group
  int slice, chunk, chunks;  // vectors of a block and of a chunk, chunks of a slice
  int capacity;              // chunks in the ring
  int ahead;                 // chunks asked into L2 before there is room for them
  Divisor channel;           // vectors of a channel
};

constexpr int64_t kMostOfChunk = 1 << 30;  // elements

// Blocks of chunks on a multiprocessor: as many as have enough registers.
constexpr int chunk_blocks(size_t element_size) { return element_size == 8 ? 3 : 4; }

// How a group is cut into chunks, and what the host knows about it.
struct ChunkPlan {
  int64_t size, channels;  // of a group, in elements
  int64_t count, chunk;    // chunks; vectors of one
  double share;            // of an element in the group, 1 / size
  bool vector_affine;      // whether weight and bias can be read in vectors
  Divisor spatial, num_groups;

  static ChunkPlan of(const Forward& p, int vector, int multiprocessors) {
    ChunkPlan plan;
    plan.channels = p.channels / p.num_groups;
    plan.size = group_size(p);
    plan.share = 1 / static_cast<double>(std::max<int64_t>(plan.size, 1));
    const int64_t vectors = std::max<int64_t>(plan.size / vector, 1);
    const int resident = chunk_blocks(element_size(p.dtype)) * std::max(multiprocessors, 1);
    const int64_t count = pieces_of(std::max<int64_t>(p.batch * p.num_groups, 1), resident);
    plan.chunk = std::clamp(ceil_div(ceil_div(vectors, count), 32) * 32, kElementsOfChunk / vector,
                            kMostOfChunk / vector);
    plan.count = ceil_div(vectors, plan.chunk);
    plan.vector_affine =
        p.spatial == 1 && (vector == 1 || (p.channels % vector == 0 && aligned(p.weight, p.bias)));
    plan.spatial = Divisor::of(p.spatial);
    plan.num_groups = Divisor::of(p.num_groups);
    return plan;
  }
};

// ---- channels_last ------------------------------------------------------------------------------

// How a problem is split.  A tile is `width` vectors of whole groups in all rows of one sample.  Of
// the blocks that work on it, its members, each has a slice of its rows.
struct Tiling {
  bool by_grid;           // else by a cluster for each tile
  int members;            // of the cluster, or of the grid
  int tiles, per_sample;  // of all samples, of one
  int width;              // of a tile, in vectors
  int groups, per_group;  // of a tile; channels of each
  int run;                // channels that lie in one vector and one group, for every vector
  int threads;            // of a block
  int lines;              // rows that they take at once
  int slice;              // rows of each of the first `whole` members
  int whole, rest;        // rows of the next one; what comes after it has none
  int of_line;            // rows of a chunk that fall to one line
  int chunks, slots;      // of a slice, and those that shared memory holds; one in a cluster
  // Between a thread's vectors in neighbouring rows, and in neighbouring chunks, in bytes: in the
  // ring, in the input and in the output.  Ready, because they are added often.
  int row_pitch, chunk_pitch;
  int64_t row_step, chunk_step, row_step_out, chunk_step_out;
  // Where the parts of shared memory behind the chunks begin, and where the last one ends, in
  // bytes.
  int scratch, list, letters, pivots, statistics, bytes;
};

// Neighbouring channels that lie in one vector and one group, for every vector: a power of two.
inline int channel_run(const Problem& p, int vector) {
  int run = vector;
  while (p.channels / p.num_groups % run != 0) run /= 2;
  return run;
}

// Blocks on a multiprocessor for the chunks of rows: as many as have enough registers.
constexpr int row_blocks(size_t element_size, int vector, int run) {
  return element_size == 8 ? 2 : vector / run > 4 || run > 4 ? 3 : 4;
}

constexpr int kTileThreads = 512;  // of a block, at most
constexpr int kMostSlots = 8;
constexpr int kMostMembers = 256;
constexpr int kPivotsKept = 4;  // a power of two: of three tiles at once

// What the rest of a tiling follows from.
struct TileChoice {
  bool by_grid;
  int members, width, threads;
  int blocks;       // that a processor should hold
  int chunk_bytes;  // about
};

// Fills in the rest, or says that the choice is impossible.
inline bool complete(const Forward& p, const Gpu& gpu, const TileChoice& choice, Tiling& t) {
  const int vector = vector_width(p.dtype), size = static_cast<int>(accumulate_size(p.dtype));
  const int64_t row = p.channels / vector;
  t.by_grid = choice.by_grid;
  t.members = choice.members;
  t.width = choice.width;
  t.threads = choice.threads;
  t.per_group = static_cast<int>(p.channels / p.num_groups);
  t.groups = t.width * vector / t.per_group;
  t.run = channel_run(p, vector);
  const int64_t slice = ceil_div(p.spatial, t.members);
  const bool fits = t.width <= t.threads && t.members <= kMostMembers &&
                    p.batch <= (1 << 26) / (row / t.width) && slice <= 1 << 29;
  if (!fits) return false;
  t.per_sample = static_cast<int>(row / t.width);
  t.tiles = static_cast<int>(p.batch) * t.per_sample;
  t.slice = static_cast<int>(slice);
  t.whole = static_cast<int>(p.spatial / slice);
  t.rest = static_cast<int>(p.spatial % slice);
  t.lines = t.threads / t.width;

  const int row_bytes = t.width * 16;
  t.chunks = choice.by_grid ? static_cast<int>(ceil_div(slice * row_bytes, choice.chunk_bytes)) : 1;
  t.of_line = static_cast<int>(ceil_div(ceil_div(slice, t.chunks), t.lines));
  const int rows = t.of_line * t.lines;
  t.chunks = static_cast<int>(ceil_div(slice, rows));
  const int64_t out = element_size(p.output_dtype), in = element_size(p.dtype);
  t.row_pitch = t.lines * row_bytes;
  t.chunk_pitch = t.of_line * t.row_pitch;
  t.row_step = t.lines * p.channels * in;
  t.chunk_step = t.of_line * t.row_step;
  t.row_step_out = t.lines * p.channels * out;
  t.chunk_step_out = t.of_line * t.row_step_out;

  const int pair = 2 * size, kept = t.by_grid ? kPivotsKept : 1;
  const auto lay_out = [&](int slots) {
    t.slots = slots;
    t.scratch = slots * rows * row_bytes;
    t.list = t.scratch + t.lines * t.width * (vector / t.run) * pair;
    t.letters = t.list + (t.by_grid ? 0 : t.members * t.groups * pair);
    t.pivots = t.letters + 8;
    t.statistics = t.pivots + kept * t.groups * size;
    t.bytes = t.statistics + 3 * t.groups * size;
  };
  lay_out(0);
  const int room = (gpu.shared + 1024) / choice.blocks - 1024 - t.bytes;
  if (room < rows * row_bytes) return false;
  const int64_t needed = int64_t(t.by_grid ? t.tiles : 1) * t.chunks;
  lay_out(static_cast<int>(
      std::min<int64_t>({room / (rows * row_bytes), int64_t(kMostSlots), needed})));
  return true;
}

// The width of tiles in vectors: whole groups that fill rows of `row_bytes` and a tile of
// `tile_bytes`, or the widest that there are up to `most`; 0 where a group is wider.
inline int tile_width(const Forward& p, int64_t row_bytes, int64_t tile_bytes, int64_t most) {
  const int64_t vector = vector_width(p.dtype), per_group = p.channels / p.num_groups;
  const int64_t unit = std::lcm(per_group, vector) / vector;  // the narrowest
  const int64_t units = p.channels / vector / unit;
  int64_t width = 0;
  for (int64_t n = 1; n <= units && n * unit <= most; ++n) {
    if (units % n != 0) continue;
    width = n * unit;
    if (width * 16 >= row_bytes && width * 16 * p.spatial >= tile_bytes) break;
  }
  return static_cast<int>(width);
}

// Who takes the tiles, by their bytes and their number; false where nobody does.
inline bool choose_tiling(const Forward& p, const Gpu& gpu, Tiling& t) {
  // In a few values the rounding of their distance from the pivot shows in the mean.
  if (gpu.multiprocessors == 0 || p.dtype == kDouble || group_size(p) < 256) return false;
  constexpr int64_t kSlice = 50 * 1024;  // of a block, where there are four on a processor

  TileChoice choice = {};
  const auto tile_bytes = [&] { return choice.width * 16 * p.spatial; };
  const auto tiles = [&] { return p.batch * (p.channels / vector_width(p.dtype) / choice.width); };
  // Rows of 128 bytes; of 64 where no cluster could hold them, or where they gave too few tiles.
  choice.width = tile_width(p, 128, 12 * 1024, kTileThreads);
  if (choice.width == 0) return false;
  if (tile_bytes() > 16 * kSlice ||
      (tile_bytes() > 64 * 1024 && tiles() * 16 < gpu.multiprocessors) ||
      (tile_bytes() < 48 * 1024 && tiles() * 2 < gpu.multiprocessors)) {
    choice.width = tile_width(p, 64, 0, kTileThreads);
  }

  if (tile_bytes() > 16 * kSlice) {
    choice.width = tile_width(p, 1024, 0, 64);
    if (choice.width == 0 || tile_bytes() < 24 << 20 || !gpu.cooperates) return false;
    choice.by_grid = true;
    choice.members = gpu.multiprocessors;
    choice.threads = kTileThreads;
    choice.blocks = 1;
    choice.chunk_bytes = 64 * 1024;
    return complete(p, gpu, choice, t);
  }

  // As few members as can hold a tile; more where processors were without work, with 8 KB at least.
  choice.members = 1;
  while (choice.members < 16 && (tile_bytes() > choice.members * kSlice ||
                                 (tile_bytes() >= 2 * choice.members * int64_t(8 * 1024) &&
                                  tiles() * choice.members < gpu.multiprocessors))) {
    choice.members *= 2;
  }
  if (choice.members > gpu.largest_cluster) return false;
  // About 8 rows for a thread, in a power of two of lines; four blocks of 256 threads share the
  // registers of a multiprocessor.
  const int64_t most = tiles() * choice.members <= 2 * gpu.multiprocessors ? 320 : 256;
  int64_t lines = 1;
  while (lines * 8 < ceil_div(p.spatial, choice.members) && 2 * lines * choice.width <= most) {
    lines *= 2;
  }
  choice.threads = static_cast<int>(std::max<int64_t>(64, ceil_div(lines * choice.width, 32) * 32));
  // The parts behind the tile are large where groups are narrow: then fewer blocks.
  for (choice.blocks = 4; choice.blocks > 0; --choice.blocks) {
    if (complete(p, gpu, choice, t)) return true;
  }
  return false;
}

// ---- the choice ---------------------------------------------------------------------------------

// How a problem is solved: what workspace_bytes and forward must agree on.
struct ForwardPlan {
  enum class Way { kRows, kSpans, kGroups, kRing, kChunks, kTile, kGridTiles, kRowChunks };

  const Gpu& gpu;
  Way way;
  bool vectors;          // of 16 bytes make up every group, or row of channels
  bool vector_chunks;    // whether kChunks can use them, for then not all have to
  Spans spans;           // of kSpans
  Groups groups;         // of kGroups
  Ring ring;             // of kRing
  ChunkPlan chunk_plan;  // of kChunks, and of kRing, whose launch may be refused
  Tiling tiling;         // of kTile and kGridTiles
  ColumnTiles columns;   // of kRowChunks, and of kGridTiles, whose launch may be refused

  ForwardPlan(const Forward& p, const Gpu& gpu) : gpu(gpu) {
    const int width = vector_width(p.dtype);
    const int64_t size = group_size(p);
    const bool channels_last = is_channels_last(p);
    // Where channels are neighbours in memory, weight and bias are read as vectors too.
    const bool affine_vectors = p.spatial == 1 || channels_last;
    const auto have_vectors = [&](int elements) {
      const auto bytes = [&](Dtype dtype) {
        return std::min<size_t>(elements * element_size(dtype), 16);
      };
      return (channels_last ? p.channels : size) % elements == 0 &&
             aligned_to(bytes(p.dtype), p.input) &&
             aligned_to(bytes(p.output_dtype), p.output, p.residual) &&
             (!affine_vectors || aligned_to(bytes(p.affine_dtype), p.weight, p.bias));
    };
    vectors = have_vectors(width);
    if (channels_last) {
      const int vector = vectors ? width : 1;
      const int blocks = row_blocks(element_size(p.dtype), vector, channel_run(p, vector));
      columns = ColumnTiles::even(p, vector, int64_t(blocks) * std::max(gpu.multiprocessors, 1));
      way = !vectors || !choose_tiling(p, gpu, tiling) ? Way::kRowChunks
            : tiling.by_grid                           ? Way::kGridTiles
                                                       : Way::kTile;
      return;
    }
    const bool few = p.num_groups < int64_t(1) << 30;  // what rows.cuh counts in 31 bits
    vector_chunks = aligned(p.input, p.output, p.residual);
    chunk_plan = ChunkPlan::of(p, vector_chunks ? width : 1, gpu.multiprocessors);
    way = few && vectors && size / width <= 32 * kMostRowVectors                  ? Way::kRows
          : few && !vectors && size <= 32 * Spans::longest(element_size(p.dtype)) ? Way::kSpans
          : choose_groups(p)                                                      ? Way::kGroups
          : choose_ring(p)                                                        ? Way::kRing
                                                                                  : Way::kChunks;
    if (way == Way::kSpans) spans = Spans::of(p, gpu);
  }

  size_t workspace_bytes(const Forward& p) const {
    if (way == Way::kRows || way == Way::kSpans || way == Way::kGroups || way == Way::kTile)
      return 0;
    const size_t slots = way == Way::kRing        ? int64_t(ring.team) * kSlotBytes
                         : way == Way::kGridTiles ? 2 * sizeof(float) * tiling.members
                                                  : 0;
    return std::max(partial_bytes(p) + statistics_bytes(p), p.batch * p.num_groups * slots);
  }

  // Of the ways that read twice: the moments of the chunks.
  size_t partial_bytes(const Forward& p) const {
    const size_t size = accumulate_size(p.dtype);
    return is_channels_last(p) ? p.batch * columns.chunks.count * p.channels * 2 * size
                               : p.batch * p.num_groups * chunk_plan.count * 4 * size;
  }

  // Of chunks of rows, behind those, where the caller does not keep the statistics.
  size_t statistics_bytes(const Forward& p) const {
    return p.mean != nullptr || !is_channels_last(p)
               ? 0
               : 3 * p.batch * p.num_groups * accumulate_size(p.dtype);
  }

  // For tests.
  const char* name() const {
    switch (way) {
      case Way::kRows:
        return "rows";
      case Way::kSpans:
        return "spans";
      case Way::kGroups:
        return groups.log2_cluster > 0 ? "groups of a cluster" : "groups of a block";
      case Way::kRing:
        return "ring";
      case Way::kChunks:
        return vector_chunks ? "chunks" : "chunks of elements";
      case Way::kTile:
        return tiling.members > 1 ? "tile of a cluster" : "tile of a block";
      case Way::kGridTiles:
        return "tiles of the grid";
      case Way::kRowChunks:
        return vectors ? "row chunks" : "row chunks of elements";
    }
    return "";
  }

 private:
  // Whether shared memory holds a group; fills `groups`.
  bool choose_groups(const Forward& p) {
    const int width = vector_width(p.dtype);
    const int64_t total = p.batch * p.num_groups, size = group_size(p);
    const int64_t per_group = p.channels / p.num_groups, count = size / width;
    if (count > int64_t(kMostCluster) * gpu.shared / 16) return false;
    const int most = gpu.clusters ? 3 : 0;  // log2 of kMostCluster
    Groups g = {};
    g.channels = static_cast<int>(std::min<int64_t>(per_group, size));
    g.size = static_cast<int>(size);
    g.staged = per_group <= kStagedChannels && p.spatial > 1;
    const int bytes = static_cast<int>(accumulate_size(p.dtype));
    const auto cut = [&](int log2_cluster) {
      g.log2_cluster = log2_cluster;
      g.slice = static_cast<int>(ceil_div(ceil_div(count, 1 << log2_cluster), 8) * 8);
      g.threads = std::clamp<int>(ceil_div(g.slice, 32) * 32, 64, kMostGroupThreads);
      g.shared = g.slice * 16 + ((g.threads / 32 * 4) << log2_cluster) * bytes +
                 (g.staged ? 2 * g.channels * bytes : 0);
    };
    const auto blocks_at_once = [&] { return gpu.fitting(g.shared); };
    cut(0);
    // Several blocks at once, so that some read while others write: 4 where clusters allow that.
    while (g.log2_cluster < most && blocks_at_once() < 4) cut(g.log2_cluster + 1);
    if (g.shared > gpu.shared - kGroupBarriers) return false;
    if (blocks_at_once() < 3 && choose_ring(p)) return false;
    // Groups too few for the GPU.
    while (g.log2_cluster < most && g.slice > 256 &&
           total << (g.log2_cluster + 1) <= gpu.multiprocessors) {
      cut(g.log2_cluster + 1);
    }
    if (!gpu.clusters && total * 2 <= gpu.multiprocessors && g.slice > 4096) return false;
    if (total << g.log2_cluster > gpu.multiprocessors) {
      // About 6 vectors for each thread: with fewer, fewer blocks share a multiprocessor, with
      // more, they take longer.  At most 1024 threads at once, for the registers.
      const int most_threads = 1024 / std::clamp<int>(blocks_at_once(), 2, 4) / 32 * 32;
      g.threads = std::clamp<int>(ceil_div(g.slice, 6 * 32) * 32, 64, most_threads);
    }
    const size_t element = element_size(p.dtype), address = reinterpret_cast<size_t>(p.input);
    g.copy_width = 16;
    while (address % g.copy_width != 0 && g.copy_width > 2) g.copy_width /= 2;
    if (g.copy_width < static_cast<int>(element)) return false;  // no tensor of that type
    g.vector_output = aligned(p.output, p.residual);
    g.one_channel = p.spatial % width == 0;
    g.vector_affine = p.spatial == 1 && p.channels % width == 0 && aligned(p.weight, p.bias);
    g.spatial = Divisor::of(p.spatial);
    g.num_groups = Divisor::of(p.num_groups);
    groups = g;
    return true;
  }

  // Whether the GPU holds a group; fills `ring`.
  bool choose_ring(const Forward& p) {
    const int width = vector_width(p.dtype);
    if (!gpu.clusters || p.dtype == kDouble || !vectors || p.spatial % width != 0) return false;
    const int64_t total = p.batch * p.num_groups, count = group_size(p) / width;
    const int most = std::min(gpu.multiprocessors, kMostTeam);
    Ring r = {};
    r.capacity = std::min((gpu.shared - 2048) / (kChunkVectors * 16), kMostChunks);
    const int64_t room = int64_t(r.capacity) * kChunkVectors;
    if (r.capacity < 4 || count > most * room) return false;
    // A slice of 30 % of the ring, so that two groups more are on their way.  No multiprocessor
    // idle.
    const int64_t team = std::max(ceil_div(count * 10, room * 3), most / total);
    r.teams = static_cast<int>(std::clamp<int64_t>(gpu.multiprocessors / team, 1, total));
    r.team = std::min(gpu.multiprocessors / r.teams, most);
    r.vectors = static_cast<int>(count);
    r.slice = static_cast<int>(ceil_div(ceil_div(count, r.team), 8) * 8);
    r.chunks = static_cast<int>(ceil_div(r.slice, kChunkVectors));
    r.chunk = static_cast<int>(ceil_div(ceil_div(r.slice, r.chunks), 8) * 8);
    r.ahead = 2;
    r.channel = Divisor::of(p.spatial / width);
    ring = r;
    return r.chunks <= r.capacity;
  }
};

// Which way the plan takes.
inline const char* plan_name(const Forward& problem, const Gpu& gpu) {
  return ForwardPlan(problem, gpu).name();
}

}  // namespace fxfuse::cuda
