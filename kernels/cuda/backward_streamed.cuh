// Backward of GroupNorm + activation where a group is too long to be held on the chip.
//
// Idea.  The sums of dz and dz * x^ over each channel of each sample (sum_channels...), from which
// both the group's means (sum_groups) and, over the batch, dweight and dbias follow; and a second
// pass over x and dy for dinput (input_gradient...).  It begins where the first one ended, because
// the end is what still lies in the L2 cache.
//
// Work split.  sum_channels, sum_groups, input_gradient: a team of 1 to 32 lanes, or a block, for
// each piece.  ..._channels_last: a block for a tile of columns and a chunk of rows.
//
// Limits.  None: any number and size of groups; offsets have 64 bits, everything is on grid x.
//
// Fallback.  Where a pointer or a size forbids 16-byte accesses, V is 1: the same kernels, element
// by element.
#pragma once
#include "gradient.cuh"

namespace fxfuse::cuda {

// Calls body(i, x, dy) for U of the vectors i, i + step, ... < end at a time, of which
// kElementsAtOnce elements are made; offset(i) is where vector i lies.  At least two vectors of
// each input are on their way at once.
template <int V, class T, class O, class Offset, class Body>
FXFUSE_INLINE void over_vectors(const Backward& problem, int64_t first, int64_t step, int64_t end,
                                Offset offset, Body body) {
  constexpr int U = kElementsAtOnce / V, K = U < 2 ? 2 : U;
  for (; first < end; first += K * step) {
    Loaded<T, V> x[K] = {};
    Loaded<O, V> dy[K] = {};
    each<K>(first, step, end, [&](int k, int64_t i) {
      x[k] = load<T, V>(static_cast<const T*>(problem.input) + offset(i));
      dy[k] = load<O, V>(static_cast<const O*>(problem.grad_output) + offset(i));
    });
#pragma unroll
    for (int c = 0; c < K; c += U) {
      Loaded<T, V> x_here[U];
      Loaded<O, V> dy_here[U];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        x_here[u] = x[c + u];
        dy_here[u] = dy[c + u];
      }
      if (first + c * step < end) body(first + c * step, x_here, dy_here);
    }
  }
}

// A team for each chunk of each channel of each sample.  partial is (batch, chunks, channels): the
// sums of dz and dz * x^.
template <class T, class O, int V>
__global__ __launch_bounds__(kThreads) void sum_channels(const Backward problem,
                                                         const Chunks chunks, const int lanes,
                                                         Pair<Accumulate<T>>* const partial) {
  using A = Accumulate<T>;
  constexpr int U = kElementsAtOnce / V;
  let_next_kernel_start();
  const Team team(lanes);
  const int64_t plane = team.index / chunks.count, chunk = team.index % chunks.count;
  const bool active = plane < problem.batch * problem.channels;
  const int64_t sample = plane / problem.channels, channel = plane % problem.channels;
  const int64_t begin = chunk * chunks.size, step = int64_t(team.size) * V;
  const int64_t end = active ? min(begin + chunks.size, problem.spatial) : 0;
  double sums[2] = {};  // there may be thousands of additions, each of a few terms
  if (active) {
    const bool wide = affine_is_wide(problem);
    const A weight = load_channel<T>(problem.weight, wide, channel, A(1));
    const A bias = load_channel<T>(problem.bias, wide, channel, A(0));
    const int64_t per_group = problem.channels / problem.num_groups;
    const auto normal = load_normal<A>(problem, sample * problem.num_groups + channel / per_group);
    const ActivationOf<A, O> activation(problem);
    over_vectors<V, T, O>(
        problem, begin + int64_t(team.rank) * V, step, end,
        [&](int64_t i) { return plane * problem.spatial + i; },
        [&](int64_t base, const Loaded<T, V>(&x)[U], const Loaded<O, V>(&dy)[U]) {
          A xhat[U * V], dz[U * V], here[2] = {};
          differentiate(
              activation, x, dy, [&](int i) { return normal.only_if(base + i / V * step < end); },
              [&](int) { return weight; }, [&](int) { return bias; }, xhat, dz);
#pragma unroll
          for (int i = 0; i < U * V; ++i) {
            here[0] += dz[i];
            here[1] += dz[i] * xhat[i];
          }
          sums[0] += here[0];
          sums[1] += here[1];
        });
  }
  team.sum(sums);
  if (active && team.rank == 0) {
    partial[(sample * chunks.count + chunk) * problem.channels + channel] = {
        static_cast<A>(sums[0]), static_cast<A>(sums[1])};
  }
}

// The same over rows of all channels.
template <class T, class O, int V>
__global__ __launch_bounds__(kThreads,
                             2) void sum_channels_last(const Backward problem,
                                                       const ColumnTiles tiles,
                                                       Pair<Accumulate<T>>* const partial) {
  using A = Accumulate<T>;
  constexpr int U = kElementsAtOnce / V;
  let_next_kernel_start();
  const Column<V> column(problem, tiles);
  Pair<A> sums[V] = {};
  if (column.active) {
    const ColumnParameters<T, V> parameters(problem, column);
    Normal<A> normal[V];
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const auto& its = parameters.statistics[j];
      normal[j] = Normal<A>(its.mean, its.rest, its.rstd);
    }
    const ActivationOf<A, O> activation(problem);
    const int64_t step = column.slots;
    over_vectors<V, T, O>(
        problem, column.begin + column.slot, step, column.end,
        [&](int64_t row) { return column.offset(problem, row); },
        [&](int64_t base, const Loaded<T, V>(&x)[U], const Loaded<O, V>(&dy)[U]) {
          A xhat[U * V], dz[U * V];
          differentiate(
              activation, x, dy,
              [&](int i) { return normal[i % V].only_if(base + i / V * step < column.end); },
              [&](int i) { return parameters.weight[i % V]; },
              [&](int i) { return parameters.bias[i % V]; }, xhat, dz);
#pragma unroll
          for (int i = 0; i < U * V; ++i) {
            sums[i % V].at[0] += dz[i];
            sums[i % V].at[1] += dz[i] * xhat[i];
          }
        });
  }
  // One thread for each channel of the tile adds its slots, in double: they are added one by one.
  __shared__ Pair<A> of_slot[kThreads * V];
#pragma unroll
  for (int j = 0; j < V; ++j) of_slot[threadIdx.x * V + j] = sums[j];
  __syncthreads();
  const int width = tiles.width * V;
  const int64_t channel = blockIdx.x % tiles.count * width + threadIdx.x;
  if (static_cast<int>(threadIdx.x) >= width || channel >= problem.channels) return;
  double total[2] = {};
  for (int slot = 0; slot < tiles.slots; ++slot) {
    total[0] += of_slot[slot * width + threadIdx.x].at[0];
    total[1] += of_slot[slot * width + threadIdx.x].at[1];
  }
  partial[column.part * problem.channels + channel] = {static_cast<A>(total[0]),
                                                       static_cast<A>(total[1])};
}

// A team for each group: the means of dz * weight and of dz * weight * x^ over its elements.  A row
// of partial holds `per_group` entries of every group, sums over channels or, where weight is null,
// over pieces of the group that have been multiplied by it; `rows` of them belong to a sample.
template <class T>
__global__ __launch_bounds__(kThreads) void sum_groups(const Backward problem,
                                                       const void* const weight, const int64_t rows,
                                                       const int64_t per_group, const int lanes,
                                                       const Pair<Accumulate<T>>* const partial,
                                                       Pair<Accumulate<T>>* const means) {
  using A = Accumulate<T>;
  wait_for_previous_kernel();
  let_next_kernel_start();
  const Team team(lanes);
  const bool active = team.index < problem.batch * problem.num_groups;
  const int64_t sample = team.index / problem.num_groups, group = team.index % problem.num_groups;
  const int64_t entries = active ? rows * per_group : 0;
  A sums[2] = {};
  for (int64_t entry = team.rank; entry < entries; entry += team.size) {
    const int64_t row = sample * rows + entry / per_group;
    const int64_t column = group * per_group + entry % per_group;
    const A factor = load_channel<T>(weight, affine_is_wide(problem), column, A(1));
    const Pair<A> sum = partial[row * problem.num_groups * per_group + column];
    sums[0] += sum.at[0] * factor;
    sums[1] += sum.at[1] * factor;
  }
  team.sum(sums);
  if (!active || team.rank > 0) return;
  const A size = static_cast<A>(problem.channels / problem.num_groups * problem.spatial);
  means[team.index] = {sums[0] / size, sums[1] / size};
}

// ---- the second pass ----------------------------------------------------------------------------

// A team for each chunk of each group, the last ones first.
template <class T, class O, int V>
__global__ __launch_bounds__(kThreads, sizeof(T) == 8 ? 1 : 0) void input_gradient(
    const Backward problem, const Chunks chunks, const int lanes,
    const Pair<Accumulate<T>>* const means) {
  using A = Accumulate<T>;
  constexpr int U = kElementsAtOnce / V;
  wait_for_previous_kernel();
  let_next_kernel_start();
  const Team team(lanes);
  const int64_t groups = problem.batch * problem.num_groups;
  const int64_t channels = problem.channels / problem.num_groups;
  const int64_t size = channels * problem.spatial;
  const int64_t piece = groups * chunks.count - 1 - team.index;
  if (piece < 0) return;
  const int64_t index = piece / chunks.count, chunk = piece % chunks.count;
  const int64_t end = min((chunk + 1) * chunks.size, size), step = int64_t(team.size) * V;
  const int64_t channel = index % problem.num_groups * channels;
  const auto normal = load_normal<A>(problem, index);
  const InputGradient<A> gradient(normal.rstd, means[index], size);
  const ActivationOf<A, O> activation(problem);
  over_vectors<V, T, O>(
      problem, chunk * chunks.size + int64_t(team.rank) * V, step, end,
      [&](int64_t i) { return index * size + i; },
      [&](int64_t base, const Loaded<T, V>(&x)[U], const Loaded<O, V>(&dy)[U]) {
        A weight[U * V] = {}, bias[U * V] = {}, xhat[U * V], dz[U * V];
        each<U>(base, step, end, [&](int u, int64_t i) {
          A w[V], b[V];
          load_affine<T>(problem, channel, i, w, b);
#pragma unroll
          for (int j = 0; j < V; ++j) {
            weight[u * V + j] = w[j];
            bias[u * V + j] = b[j];
          }
        });
        differentiate(
            activation, x, dy, [&](int) { return normal; }, [&](int i) { return weight[i]; },
            [&](int i) { return bias[i]; }, xhat, dz);
        each<U>(base, step, end, [&](int u, int64_t i) {
          Vector<T, V> dx;
#pragma unroll
          for (int j = 0; j < V; ++j) {
            const int e = u * V + j;
            dx.at[j] = static_cast<T>(gradient(dz[e], weight[e] * gradient.rstd, xhat[e]));
          }
          store(static_cast<T*>(problem.dinput) + index * size + i, dx);
        });
      });
}

// The same over rows of all channels.
template <class T, class O, int V>
__global__ __launch_bounds__(kThreads, 2) void input_gradient_channels_last(
    const Backward problem, const ColumnTiles tiles, const Pair<Accumulate<T>>* const means) {
  using A = Accumulate<T>;
  constexpr int U = kElementsAtOnce / V;
  wait_for_previous_kernel();
  let_next_kernel_start();
  const Column<V> column(problem, tiles, gridDim.x - 1 - blockIdx.x);
  if (!column.active) return;
  const ColumnParameters<T, V> parameters(problem, column);
  Normal<A> normal[V];
#pragma unroll
  for (int j = 0; j < V; ++j) {
    const auto& its = parameters.statistics[j];
    normal[j] = Normal<A>(its.mean, its.rest, its.rstd);
  }
  InputGradient<A> gradient[V];
#pragma unroll
  for (int j = 0; j < V; ++j) {
    gradient[j] = InputGradient<A>(parameters.statistics[j].rstd, means[column.group(problem, j)],
                                   problem.channels / problem.num_groups * problem.spatial);
  }
  const ActivationOf<A, O> activation(problem);
  const int64_t step = column.slots;
  over_vectors<V, T, O>(
      problem, column.begin + column.slot, step, column.end,
      [&](int64_t row) { return column.offset(problem, row); },
      [&](int64_t base, const Loaded<T, V>(&x)[U], const Loaded<O, V>(&dy)[U]) {
        A xhat[U * V], dz[U * V];
        differentiate(
            activation, x, dy, [&](int i) { return normal[i % V]; },
            [&](int i) { return parameters.weight[i % V]; },
            [&](int i) { return parameters.bias[i % V]; }, xhat, dz);
        each<U>(base, step, column.end, [&](int u, int64_t row) {
          Vector<T, V> dx;
#pragma unroll
          for (int j = 0; j < V; ++j) {
            const int e = u * V + j;
            dx.at[j] = static_cast<T>(
                gradient[j](dz[e], parameters.weight[j] * gradient[j].rstd, xhat[e]));
          }
          store(static_cast<T*>(problem.dinput) + column.offset(problem, row), dx);
        });
      });
}

}  // namespace fxfuse::cuda
