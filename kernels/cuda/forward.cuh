// GroupNorm + activation, forward: launches the kernels that forward_plan.h chooses, which has the
// table of sizes, thresholds and measurements.
//
// Idea, statistics, work split, limits and fallback are in the file of each way: rows.cuh,
// spans.cuh, groups.cuh, ring.cuh and chunks.cuh for contiguous groups, channels_last.cuh for the
// other layout.
//
// A residual is added to the normalised values in the accumulate type.  It does not depend on the
// statistics, but there are no registers in which it could wait for them: so it is asked for as far
// as the L2 cache (groups, the ring, tiles) or shared memory (rows, spans) meanwhile.  What reads
// twice loads it with the second reading.
#pragma once
#include "channels_last.cuh"
#include "chunks.cuh"
#include "groups.cuh"
#include "ring.cuh"
#include "rows.cuh"
#include "spans.cuh"

namespace fxfuse::cuda {

template <class T, class O, bool kResidual>
cudaError_t launch_groups(const Forward& p, const ForwardPlan& plan, cudaStream_t stream) {
  const Groups& groups = plan.groups;
  Shape shape = {(p.batch * p.num_groups) << groups.log2_cluster, groups.threads, groups.shared};
  shape.cluster = 1 << groups.log2_cluster;
  shape.early = plan.gpu.clusters;
  return launch_shared<normalize_groups<T, O, kResidual>>(p.device, shape, stream, p, groups);
}

template <class T, class O, bool kResidual>
cudaError_t launch_ring(const Forward& p, const ForwardPlan& plan, void* workspace,
                        cudaStream_t stream) {
  const Ring& ring = plan.ring;
  Shape shape = {ring.team * ring.teams, kRingThreads, ring.capacity * kChunkVectors * 16};
  shape.cooperative = true;
  return launch_shared<normalize_ring<T, O, kResidual>>(
      p.device, shape, stream, p, ring, Divisor::of(p.num_groups), static_cast<Slot*>(workspace));
}

template <class T, class O, bool kResidual, int kRun = 16 / sizeof(T)>
cudaError_t launch_tiles(const Forward& p, const ForwardPlan& plan, void* workspace,
                         cudaStream_t stream) {
  const Tiling& tiling = plan.tiling;
  if constexpr (kRun > 1) {
    if (tiling.run < kRun)
      return launch_tiles<T, O, kResidual, kRun / 2>(p, plan, workspace, stream);
  }
  Shape shape = {tiling.members, tiling.threads, tiling.bytes};
  if (tiling.by_grid) {
    shape.cooperative = true;
    return launch_shared<normalize_tiles<T, O, kRun, kResidual>>(
        p.device, shape, stream, p, tiling, static_cast<Pair<Accumulate<T>>*>(workspace));
  }
  shape.blocks *= tiling.tiles;
  shape.cluster = tiling.members;
  shape.early = plan.gpu.clusters;
  return launch_shared<normalize_tile<T, O, kRun, kResidual>>(p.device, shape, stream, p, tiling);
}

// ---- what reads twice ---------------------------------------------------------------------------

template <class T, class O, bool kResidual, int V>
cudaError_t launch_chunks(const Forward& p, const ForwardPlan& plan, void* workspace,
                          cudaStream_t stream) {
  auto* const partial = static_cast<CountedMoments<Accumulate<T>>*>(workspace);
  const ChunkPlan& chunks = plan.chunk_plan;
  Shape shape = {p.batch * p.num_groups * chunks.count, kThreads};
  shape.early = plan.gpu.clusters;
  const cudaError_t error =
      launch(measure_chunks<T, V, kHasPivot<T, O>>, shape, stream, p, chunks, partial);
  if (error != cudaSuccess) return error;
  return launch(normalize_chunks<T, O, V, kResidual>, shape, stream, p, chunks, partial);
}

template <class T, class O, bool kResidual, int V, int kRun = V>
cudaError_t launch_row_chunks(const Forward& p, const ForwardPlan& plan, void* workspace,
                              cudaStream_t stream) {
  const int64_t per_group = p.channels / p.num_groups;
  if constexpr (kRun > 1) {
    if (per_group % kRun != 0) {
      return launch_row_chunks<T, O, kResidual, V, kRun / 2>(p, plan, workspace, stream);
    }
  }
  auto* const partial = static_cast<Moments<Accumulate<T>>*>(workspace);
  const ColumnTiles& tiles = plan.columns;
  const Divisor group = Divisor::of(per_group);
  // Where there are many chunks, a block merges the runs of a group if it has them all.
  const int64_t runs = per_group / kRun;
  const bool folds = tiles.chunks.count >= 8 && runs <= 16 &&
                     (tiles.count == 1 || tiles.width * V % per_group == 0);
  const int fold = folds ? static_cast<int>(runs) : 1;
  const int lanes = team_size(tiles.chunks.count * (runs / fold), 128);
  Shape of_tiles = {tiles.blocks(p), kThreads}, of_groups = of_teams(p.batch * p.num_groups, lanes);
  of_tiles.early = of_groups.early = plan.gpu.clusters;
  cudaError_t error =
      launch(measure_row_chunks<T, O, V, kRun>, of_tiles, stream, p, tiles, group, fold, partial);
  if (error != cudaSuccess) return error;
  error = launch(merge_row_chunks<T, O>, of_groups, stream, p, tiles.chunks,
                 Divisor::of(p.num_groups), Divisor::of(runs / fold), kRun * fold, lanes, partial);
  if (error != cudaSuccess) return error;
  return launch(normalize_row_chunks<T, O, V, kRun, kResidual>, of_tiles, stream, p, tiles, group);
}

template <class T, class O, bool kResidual, int V>
cudaError_t launch_two_passes(Forward p, const ForwardPlan& plan, void* workspace,
                              cudaStream_t stream) {
  if (!is_channels_last(p)) return launch_chunks<T, O, kResidual, V>(p, plan, workspace, stream);
  if (p.mean == nullptr) {
    auto* const statistics = static_cast<char*>(workspace) + plan.partial_bytes(p);
    p.mean = statistics;
    p.rstd = reinterpret_cast<Accumulate<T>*>(statistics) + 2 * p.batch * p.num_groups;
  }
  return launch_row_chunks<T, O, kResidual, V>(p, plan, workspace, stream);
}

// ---- all ----------------------------------------------------------------------------------------

// kResidual: whether the problem has a residual.  That takes kernels of its own, for most have no
// register to spare; they are in files of their own, to be compiled in parallel.
template <class T, class O, bool kResidual>
cudaError_t forward_typed(const Forward& p, const ForwardPlan& plan, void* workspace,
                          cudaStream_t stream) {
  using Way = ForwardPlan::Way;
  constexpr int V = 16 / sizeof(T);
  cudaError_t error = cudaErrorCooperativeLaunchTooLarge;
  switch (plan.way) {
    case Way::kRows:
      return launch_rows<T, O, kResidual>(p, plan.gpu, stream);
    case Way::kSpans:
      return launch_spans<T, O, kResidual>(p, plan.spans, plan.gpu, stream);
    case Way::kGroups:
      return launch_groups<T, O, kResidual>(p, plan, stream);
    case Way::kRing:
      if constexpr (sizeof(T) <= 4)
        error = launch_ring<T, O, kResidual>(p, plan, workspace, stream);
      break;
    case Way::kTile:
    case Way::kGridTiles:
      if constexpr (sizeof(T) <= 4)
        error = launch_tiles<T, O, kResidual>(p, plan, workspace, stream);
      break;
    case Way::kChunks:
    case Way::kRowChunks:
      break;
  }
  // Where the process may use only a part of the GPU, a cooperative launch is refused.
  if (error != cudaErrorCooperativeLaunchTooLarge) return error;
  cudaGetLastError();
  return (is_channels_last(p) ? plan.vectors : plan.vector_chunks)
             ? launch_two_passes<T, O, kResidual, V>(p, plan, workspace, stream)
             : launch_two_passes<T, O, kResidual, 1>(p, plan, workspace, stream);
}

}  // namespace fxfuse::cuda
