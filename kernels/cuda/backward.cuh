// GroupNorm + activation, backward.
//
// With x^ = (x - mean) * rstd, z = x^ * weight + bias and dz = dy * f'(z), over a group of M
// elements (Wu and He, "Group normalization", 2018, differentiated):
//
//   dbias_c = sum dz,  dweight_c = sum dz * x^,
//   dinput = rstd * (dz * weight - mean(dz * weight) - x^ * mean(dz * weight * x^)).
//
// Idea.  z is computed again from the input, as forward computed it but for one rounding, instead
// of being kept.  Where a group fits on the chip, x and dy are read once and dinput is written:
// three passes over the bytes.  Which kernel holds it: see backward_plan.h.  sum_rows adds the
// partial sums for dweight and dbias.  Every order of addition is fixed by the problem and the
// device: same input, same bits; no atomics.
//
// Work split.  See backward_rows.cuh, backward_held.cuh and backward_streamed.cuh.  sum_rows: a
// block for 32 channels and up to 256 rows, 8 rows at a time.
//
// Limits.  None: any number and size of groups; offsets have 64 bits, everything is on grid x.
//
// Measured.  Microseconds in a chain of launches over buffers that are not in the L2 cache, the
// least that a copy of the same bytes takes (3/2 of a copy of the input), and what the kernels took
// that read everything twice (H200, 2026-11-30):
//
//   (65536, 1024), 2 groups, hardtanh, bfloat16             115    97   208
//   (1024, 8192), 16 groups, hardtanh, bfloat16              24.4  15    40.7
//   (1024, 16384), 1 group, hardtanh, float32 / bfloat16     75    51   119   /   66   27   99
//   (1000, 16381), 1 group, hardtanh, bfloat16               93    39   201
//   (64, 256, 56, 56), 32 groups, ReLU, float32 / bfloat16  185   149   286   /  120   76  245
//   the same, channels_last                                 195   150   283   /  131   77  205
//   (64, 2048, 7, 7), 32 groups, ReLU, bfloat16, NHWC        25.8  12.5  39.6
//   (1, 128, 1024, 1024), 32 groups, SiLU, bfloat16         650   193   679
//
// Fallback.  Where a pointer or a size forbids 16-byte accesses, V is 1.  What is not asked for is
// neither computed nor written.
#pragma once
#include "backward_held.cuh"
#include "backward_rows.cuh"
#include "backward_streamed.cuh"

namespace fxfuse::cuda {

// ---- dweight and dbias --------------------------------------------------------------------------

// A block for 32 channels and kRowsOfBlock rows, or all of them in the last round: (rows, channels)
// becomes (blocks of rows, channels) in `next`, or dweight and dbias where next is null.
constexpr int kRowSlots = kThreads / 32;

template <class T>
__global__ __launch_bounds__(kThreads) void sum_rows(const Backward problem, const int64_t rows,
                                                     const Pair<Accumulate<T>>* const partial,
                                                     Pair<Accumulate<T>>* const next) {
  using A = Accumulate<T>;
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t tiles = (problem.channels + 31) / 32;
  const int64_t part = blockIdx.x / tiles;
  const int lane = threadIdx.x % 32, slot = static_cast<int>(threadIdx.x) / 32;
  const int64_t channel = blockIdx.x % tiles * 32 + lane;
  const int64_t end = next == nullptr ? rows : min((part + 1) * kRowsOfBlock, rows);
  Pair<double> sum = {};  // the additions are few, so they need not be fast
  if (channel < problem.channels) {
#pragma unroll 4
    for (int64_t row = part * kRowsOfBlock + slot; row < end; row += kRowSlots) {
      const Pair<A> added = partial[row * problem.channels + channel];
      sum.at[0] += added.at[0];
      sum.at[1] += added.at[1];
    }
  }
  __shared__ Pair<double> of_slot[kRowSlots][32];
  of_slot[slot][lane] = sum;
  __syncthreads();
  if (slot > 0 || channel >= problem.channels) return;
  for (int other = 1; other < kRowSlots; ++other) add(sum, of_slot[other][lane]);
  const Pair<A> result = {static_cast<A>(sum.at[0]), static_cast<A>(sum.at[1])};
  write_partial<T>(problem, next, part, channel, result);
}

// ---- host ---------------------------------------------------------------------------------------

// Of a kernel that begins with wait_for_previous_kernel.
inline Shape next_kernel(const Gpu& gpu, int64_t blocks) {
  Shape shape = {blocks, kThreads};
  shape.early = gpu.clusters;
  return shape;
}

template <class T>
cudaError_t sum_all_rows(const Backward& p, const Gpu& gpu, int64_t rows,
                         Pair<Accumulate<T>>* partial, cudaStream_t stream) {
  const int64_t tiles = ceil_div(p.channels, 32);
  while (rows > 2 * kRowsOfBlock) {
    const int64_t parts = ceil_div(rows, kRowsOfBlock);
    auto* next = partial + rows * p.channels;
    const cudaError_t error =
        launch(sum_rows<T>, next_kernel(gpu, parts * tiles), stream, p, rows, partial, next);
    if (error != cudaSuccess) return error;
    rows = parts;
    partial = next;
  }
  return launch(sum_rows<T>, next_kernel(gpu, tiles), stream, p, rows, partial,
                static_cast<Pair<Accumulate<T>>*>(nullptr));
}

// planes_backward or tiles_backward: as many blocks as run at once, or fewer where that takes as
// many rounds.
template <auto kKernel, class H, class A>
cudaError_t launch_held(const Backward& p, const Gpu& gpu, const H& held, int64_t bytes,
                        Pair<A>* partial, cudaStream_t stream) {
  const int at_once = std::min(std::max(gpu.fitting(bytes), 1), held_blocks(sizeof(A)));
  const int64_t resident = gpu.resident(held.cluster, at_once);
  const int64_t rounds = ceil_div(held.tiles, resident);
  const int64_t blocks = ceil_div(held.tiles, rounds) * held.cluster;
  const Shape shape = {blocks, kThreads, bytes, held.cluster};
  return launch_shared<kKernel>(p.device, shape, stream, p, held, static_cast<int>(blocks),
                                partial);
}

// The second pass: the means of the groups from `sums`, and dinput from those.
template <class T, class O>
cudaError_t finish_streamed(const Backward& p, const BackwardPlan& plan,
                            const Pair<Accumulate<T>>* sums, Pair<Accumulate<T>>* means,
                            cudaStream_t stream) {
  constexpr int W = 16 / sizeof(T);
  const bool by_rows = plan.pieces > 0;
  const int64_t groups = p.batch * p.num_groups, size = group_size(p);
  const int64_t rows = by_rows ? 1 : plan.chunks.count;
  const int64_t per_group = by_rows ? plan.pieces : p.channels / p.num_groups;
  int lanes = team_size(rows * per_group, 128);
  const cudaError_t error =
      launch(sum_groups<T>, next_kernel(plan.gpu, ceil_div(groups, kThreads / lanes)), stream, p,
             by_rows ? nullptr : p.weight, rows, per_group, lanes, sums, means);
  if (error != cudaSuccess) return error;
  if (is_channels_last(p)) {
    const ColumnTiles tiles = ColumnTiles::of(p, plan.vectors ? W : 1);
    return launch(plan.vectors ? input_gradient_channels_last<T, O, W>
                               : input_gradient_channels_last<T, O, 1>,
                  next_kernel(plan.gpu, tiles.blocks(p)), stream, p, tiles, means);
  }
  const Chunks chunks = Chunks::of(size, kElementsOfChunk);
  lanes = team_size(std::min(chunks.size, size) / (plan.vectors ? W : 1), 256);
  return launch(plan.vectors ? input_gradient<T, O, W> : input_gradient<T, O, 1>,
                next_kernel(plan.gpu, ceil_div(groups * chunks.count, kThreads / lanes)), stream, p,
                chunks, lanes, means);
}

template <class T, class O>
cudaError_t backward_typed(const Backward& p, const BackwardPlan& plan, void* workspace,
                           cudaStream_t stream) {
  using A = Accumulate<T>;
  using Way = BackwardPlan::Way;
  constexpr int W = 16 / sizeof(T);
  if (plan.way == Way::kNothing) return cudaSuccess;
  auto* const partial = plan.rows > 0 ? static_cast<Pair<A>*>(workspace) : nullptr;
  auto* const means = static_cast<Pair<A>*>(workspace) + plan.partial_rows() * p.channels;
  auto* const of_piece = plan.pieces > 0 ? means + p.batch * p.num_groups : nullptr;
  const auto by_vector = [&](bool vectors, auto launch) {
    return vectors ? launch(std::integral_constant<int, W>())
                   : launch(std::integral_constant<int, 1>());
  };
  cudaError_t error = cudaSuccess;

  switch (plan.way) {
    case Way::kNothing:
      break;
    case Way::kRows: {
      const auto& rows = plan.warp_rows;
      error = by_vector(plan.vectors, [&](auto v) {
        constexpr int V = decltype(v)::value;
        const Shape shape = {rows.columns * rows.slices, kBackwardRowThreads,
                             rows_bytes<T, O, V>()};
        return launch_shared<rows_backward<T, O, V>>(p.device, shape, stream, p, rows, partial);
      });
      break;
    }
    case Way::kLongRows: {
      const auto& rows = plan.long_rows;
      error = by_vector(plan.vectors, [&](auto v) {
        const Shape shape = {rows.slices * p.num_groups * rows.pieces * rows.cluster, rows.threads,
                             static_cast<int64_t>(long_rows_bytes(p, rows)), rows.cluster};
        return launch_shared<long_rows_backward<T, O, decltype(v)::value>>(
            p.device, shape, stream, p, rows, partial, of_piece);
      });
      break;
    }
    case Way::kPlanes:
      error = by_vector(plan.plane_vectors, [&](auto v) {
        constexpr int V = decltype(v)::value;
        return launch_held<planes_backward<T, O, V>>(
            p, plan.gpu, plan.planes, plan.planes.bytes(V, sizeof(T), sizeof(O), sizeof(Pair<A>)),
            partial, stream);
      });
      break;
    case Way::kTiles:
      error = by_vector(p.channels / p.num_groups % W != 0, [&](auto groups) {
        return launch_held<tiles_backward<T, O, W, decltype(groups)::value>>(
            p, plan.gpu, plan.tiles, plan.tiles.bytes(W, sizeof(T), sizeof(O), sizeof(Pair<A>)),
            partial, stream);
      });
      break;
    case Way::kStreamed:
      if (is_channels_last(p)) {
        const ColumnTiles tiles = ColumnTiles::of(p, plan.vectors ? W : 1);
        error = launch(plan.vectors ? sum_channels_last<T, O, W> : sum_channels_last<T, O, 1>,
                       {tiles.blocks(p), kThreads}, stream, p, tiles, partial);
      } else {
        const int V = plan.plane_vectors ? W : 1;
        const int lanes = team_size(std::min(plan.chunks.size, p.spatial) / V, 256);
        error =
            launch(plan.plane_vectors ? sum_channels<T, O, W> : sum_channels<T, O, 1>,
                   of_teams(plan.rows * p.channels, lanes), stream, p, plan.chunks, lanes, partial);
      }
      break;
  }
  if (error == cudaSuccess && plan.means) {
    error = finish_streamed<T, O>(p, plan, of_piece != nullptr ? of_piece : partial, means, stream);
  }
  if (error != cudaSuccess || !plan.affine || plan.rows == 0) return error;
  return sum_all_rows<T>(p, plan.gpu, plan.rows, partial, stream);
}

}  // namespace fxfuse::cuda
