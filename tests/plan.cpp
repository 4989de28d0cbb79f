// The plans of the CUDA kernels (kernels/cuda/forward_plan.h, backward_plan.h, linear_plan.h) for
// test_plan.py, which compiles this file: their names, and what every plan must keep for its kernel
// to be right.
#include <algorithm>
#include <iterator>

#include "cuda/backward_plan.h"
#include "cuda/forward_plan.h"
#include "cuda/linear_plan.h"

using namespace fxfuse;
using namespace fxfuse::cuda;

#define MUST(condition) \
  if (!(condition)) return #condition

namespace {

bool is_cluster(int blocks, int most) {
  return blocks >= 1 && blocks <= most && (blocks & (blocks - 1)) == 0;
}

const char* fault(const Forward& p, const ForwardPlan& plan) {
  using Way = ForwardPlan::Way;
  const Gpu& gpu = plan.gpu;
  const int width = vector_width(p.dtype);
  const int64_t size = group_size(p), groups = p.batch * p.num_groups;
  // Whether vectors of so many elements, or their parts of 16 bytes, may be read and written.
  const auto accesses = [&](int elements) {
    const auto bytes = [&](Dtype dtype) {
      return std::min<size_t>(elements * element_size(dtype), 16);
    };
    return aligned_to(bytes(p.dtype), p.input) &&
           aligned_to(bytes(p.output_dtype), p.output, p.residual);
  };
  switch (plan.way) {
    case Way::kRows:
      MUST(size % width == 0 && size / width <= 32 * kMostRowVectors);
      MUST(accesses(width));
      break;
    case Way::kSpans: {
      // Every lane of a team has a run inside the group, and together they have all of it.
      const Spans& spans = plan.spans;
      MUST(std::count(std::begin(Spans::kRuns), std::end(Spans::kRuns), spans.run) == 1);
      MUST(spans.run <= size && spans.run <= Spans::longest(element_size(p.dtype)));
      MUST(spans.log2_lanes >= 0 && spans.log2_lanes <= 5);
      MUST(int64_t(spans.run) << spans.log2_lanes >= size);
      break;
    }
    case Way::kGroups: {
      const Groups& g = plan.groups;
      MUST(is_cluster(1 << g.log2_cluster, gpu.clusters ? kMostCluster : 1));
      MUST(g.size == size && g.slice % 8 == 0);
      MUST(int64_t(g.slice) * width << g.log2_cluster >= size - size % width);
      MUST(g.threads % 32 == 0 && g.threads >= 32 && g.threads <= kMostGroupThreads);
      MUST(g.shared >= g.slice * 16 && g.shared <= gpu.shared - kGroupBarriers);
      MUST(aligned_to(g.copy_width, p.input));
      MUST(!g.vector_output || aligned(p.output, p.residual));
      break;
    }
    case Way::kRing: {
      const Ring& r = plan.ring;
      MUST(gpu.clusters && p.dtype != kDouble && accesses(width) && p.spatial % width == 0);
      MUST(r.team >= 1 && r.teams >= 1 && r.team * r.teams <= gpu.multiprocessors);
      MUST(r.team <= kMostTeam && r.teams <= groups);
      MUST(int64_t(r.vectors) * width == size && int64_t(r.slice) * r.team >= r.vectors);
      MUST(r.chunk <= kChunkVectors && r.chunk * r.chunks >= r.slice && r.chunks <= r.capacity);
      MUST(r.capacity <= kMostChunks && r.capacity * kChunkVectors * 16 <= gpu.shared - 2048);
      MUST(plan.workspace_bytes(p) >= static_cast<size_t>(groups * r.team * kSlotBytes));
      break;
    }
    case Way::kTile:
    case Way::kGridTiles: {
      const Tiling& t = plan.tiling;
      MUST(accesses(width) && p.dtype != kDouble);
      MUST(t.by_grid ? gpu.cooperates && t.members <= gpu.multiprocessors
                     : is_cluster(t.members, gpu.largest_cluster));
      MUST(int64_t(t.width) * t.per_sample * width == p.channels);
      MUST(t.groups * t.per_group == t.width * width && t.tiles == p.batch * t.per_sample);
      MUST(t.lines >= 1 && t.lines * t.width <= t.threads && t.threads <= kTileThreads);
      MUST(t.threads % 32 == 0 && t.per_group % t.run == 0 && width % t.run == 0);
      MUST(int64_t(t.whole) * t.slice + t.rest == p.spatial && t.whole <= t.members);
      MUST(t.whole < t.members || t.rest == 0);
      MUST(t.chunks * t.of_line * t.lines >= t.slice && t.slots >= 1 && t.slots <= kMostSlots);
      MUST(t.bytes <= gpu.shared && t.scratch >= t.slots * t.chunk_pitch);
      break;
    }
    case Way::kChunks: {
      const ChunkPlan& c = plan.chunk_plan;
      const int vector = plan.vector_chunks ? width : 1;
      MUST(accesses(vector) && c.count >= 1 && c.chunk * vector <= kMostOfChunk);
      MUST(c.count * c.chunk * vector > size - vector);
      MUST(plan.workspace_bytes(p) >= groups * c.count * 4 * accumulate_size(p.dtype));
      break;
    }
    case Way::kRowChunks: {
      const ColumnTiles& t = plan.columns;
      MUST(accesses(plan.vectors ? width : 1));
      MUST(t.width >= 1 && t.slots >= 1 && t.width * t.slots <= kThreads);
      MUST(t.width * t.count * (plan.vectors ? width : 1) >= p.channels);
      MUST(t.width * (t.count - 1) * (plan.vectors ? width : 1) < p.channels);
      MUST(t.chunks.count >= 1 && t.chunks.count * t.chunks.size >= p.spatial);
      MUST((t.chunks.count - 1) * t.chunks.size < p.spatial);
      break;
    }
  }
  return nullptr;
}

const char* fault(const Backward& p, const BackwardPlan& plan) {
  using Way = BackwardPlan::Way;
  const Gpu& gpu = plan.gpu;
  const int width = vector_width(p.dtype);
  const int64_t size = group_size(p);
  const size_t wide = accumulate_size(p.dtype);
  const size_t x_size = element_size(p.dtype), dy_size = element_size(p.output_dtype);
  switch (plan.way) {
    case Way::kNothing:
      MUST(p.dinput == nullptr && !wants_affine(p));
      break;
    case Way::kRows: {
      const WarpRows& rows = plan.warp_rows;
      MUST(rows.lanes * rows.groups <= 32 && rows.lanes * row_elements(wide) >= size);
      MUST(rows.columns * rows.groups >= p.num_groups);
      MUST(rows.slices >= 1 && rows.slices <= p.batch);
      break;
    }
    case Way::kLongRows: {
      const LongRows& rows = plan.long_rows;
      MUST(is_cluster(rows.cluster, gpu.clusters ? 8 : 1));
      MUST(rows.threads % 32 == 0 && rows.threads <= kThreads);
      MUST(rows.width(wide) * rows.cluster * rows.pieces >= size);
      MUST(rows.pieces == 1 || rows.cluster == 1);
      MUST(static_cast<int64_t>(long_rows_bytes(p, rows)) <= gpu.share(1));
      MUST(rows.slices >= 1 && rows.slices <= p.batch);
      break;
    }
    case Way::kPlanes: {
      const HeldPlanes& held = plan.planes;
      MUST(is_cluster(held.cluster, gpu.clusters ? kMostPlaneCluster : 1));
      MUST(held.groups == 1 || held.cluster == 1);
      MUST(held.groups * held.tiles >= p.batch * p.num_groups);
      MUST(int64_t(held.tasks) * held.cluster >=
           p.channels / p.num_groups * held.groups * held.segments);
      MUST(int64_t(held.length) * held.segments * (plan.plane_vectors ? width : 1) >= p.spatial);
      MUST(held.planes <= kThreads && (held.lanes & (held.lanes - 1)) == 0 && held.lanes <= 32);
      MUST(held.bytes(plan.plane_vectors ? width : 1, x_size, dy_size, 2 * wide) <= gpu.share(1));
      break;
    }
    case Way::kTiles: {
      const HeldTiles& held = plan.tiles;
      MUST(is_cluster(held.cluster, gpu.clusters ? kMostTileCluster : 1));
      MUST(plan.vectors && held.width * held.across * width == p.channels);
      MUST(held.groups * (p.channels / p.num_groups) == int64_t(held.width) * width);
      MUST(int64_t(held.rows) * held.cluster >= p.spatial && held.slots * held.width <= kThreads);
      MUST(held.bytes(width, x_size, dy_size, 2 * wide) <= gpu.share(1));
      break;
    }
    case Way::kStreamed:
      MUST(plan.chunks.count * plan.chunks.size >= p.spatial);
      break;
  }
  MUST(plan.rows >= 0 && plan.pieces >= 0);
  return nullptr;
}

const char* fault(const LinearForward& p, const LinearPlan& plan) {
  using Way = LinearPlan::Way;
  if (plan.way == Way::kNone) return nullptr;
  const LinearTiling& t = plan.tiling;
  const bool stays = plan.way == Way::kStationary;
  const int64_t element = element_size(p.dtype);
  MUST(plan.gpu.wgmma && (p.dtype == kFloat ? p.tf32 : element == 2));
  MUST(p.output_dtype == kFloat || p.affine_dtype == p.dtype);
  MUST(aligned(p.input, p.linear_weight, p.linear_bias, p.weight, p.bias));
  MUST(p.features * element % 16 == 0 && p.channels % 32 == 0);
  MUST(int64_t(plan.group) * p.num_groups == p.channels && 512 % plan.group == 0);
  // Whole groups in the columns of a cluster, and all of the output in its tiles.
  const bool pair = plan.group > kTileColumns;
  const int64_t columns = pair ? 512 : 256, rows = stays ? 64 : pair ? 128 : 256;
  MUST(plan.cluster == (stays && !pair ? 1 : 2));
  MUST(columns % plan.group == 0 && t.column_tiles * columns >= p.channels);
  MUST(t.row_tiles * rows >= p.batch && int64_t(t.row_tiles) * t.column_tiles == t.tiles);
  MUST(t.steps * kStepBytes >= p.features * element && (!stays || t.steps <= 4));
  MUST(t.band >= 1 && plan.clusters >= 1 && plan.clusters <= t.tiles);
  MUST(int64_t(plan.clusters) <= plan.gpu.resident(plan.cluster, 1));
  return nullptr;
}

}  // namespace

extern "C" {

size_t size_of(int what) {
  const size_t sizes[] = {sizeof(Forward), sizeof(Backward), sizeof(Gpu), sizeof(LinearForward)};
  return sizes[what];
}

const char* forward_name(const Forward* p, const Gpu* gpu) { return plan_name(*p, *gpu); }
const char* backward_name(const Backward* p, const Gpu* gpu) { return plan_name(*p, *gpu); }

const char* linear_name(const LinearForward* p, const Gpu* gpu) { return plan_name(*p, *gpu); }
const char* linear_reason(const LinearForward* p, const Gpu* gpu) {
  return LinearPlan(*p, *gpu).reason;
}

// What is wrong with the plan; null if nothing is.
const char* linear_fault(const LinearForward* p, const Gpu* gpu, bool judged) {
  return fault(*p, LinearPlan(*p, *gpu, judged));
}
const char* forward_fault(const Forward* p, const Gpu* gpu) {
  return fault(*p, ForwardPlan(*p, *gpu));
}
const char* backward_fault(const Backward* p, const Gpu* gpu) {
  return fault(*p, BackwardPlan(*p, *gpu));
}

}  // extern "C"
