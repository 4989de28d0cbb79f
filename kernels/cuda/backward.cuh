// GroupNorm + activation, backward.
//
// With x^ = (x - mean) * rstd, z = x^ * weight + bias and dz = dy * f'(z), over a group of M
// elements (Wu and He, "Group normalization", 2018, differentiated):
//
//   dbias_c = sum dz,  dweight_c = sum dz * x^,
//   dinput = rstd * (dz * weight - mean(dz * weight) - x^ * mean(dz * weight * x^)).
//
// Idea.  z is computed again from the input, exactly as forward computed it, instead of being kept.
// Two ways:
//
// rows_backward, where there is one element per channel (behind a Linear): a team stays with one
// group of channels and walks down the batch, so that it keeps weight, bias and its sums for
// dweight and dbias in registers.  Where the group fits into the registers of a block, dinput is
// written in the same pass.  A longer group is cut into pieces, each with a team that only adds up;
// the means come from the sums of the pieces (sum_groups), dinput from a second pass
// (input_gradient).
//
// Otherwise: the sums of dz and dz * x^ over each channel of each sample (sum_channels), from which
// both the group's means (sum_groups) and, over the batch, dweight and dbias follow; and a second
// pass over x and dy for dinput (input_gradient).  channels_last has its own two passes.
//
// sum_rows adds the partial sums for dweight and dbias.  Every order of addition is fixed by the
// problem: same input, same bits; no atomics.
//
// Work split.  rows_backward, sum_channels, sum_groups, input_gradient: a team of 1 to 32 lanes, or
// a block, for each piece.  ..._channels_last: a block for a tile of columns and a chunk of rows.
// sum_rows: a block for 32 channels and up to 256 rows, 8 rows at a time.
//
// Limits.  rows_backward: 6144 elements in a group, 3072 unaligned floats or 1536 doubles, in one
// pass.  Any number and size otherwise; offsets have 64 bits, everything is on grid x.  Its partial
// sums take 8 MB (16 for double), or up to 32 rows of all channels where channels are many; those
// of pieces 1/256 of a float32 input, 1/128 of a 16-bit one, 1/64 of a double.
//
// Measured.  (1024, 8192) in 16 groups with hardtanh: 44.4 us in float32 and 43.8 in bfloat16,
// where torch takes 164.9 and 148.9; (1024, 16384) in 1 group: 105.7 and 99.8 against 222.8 and
// 198.5; (64, 256, 56, 56) in 32 groups with ReLU in bfloat16: 237 against 432, channels_last 188
// against 678.  As slow as torch are rows with long groups that forbid 16-byte accesses:
// (1000, 16381) in 1 group in bfloat16, 198 against 194 (H200, 2026-11-30, 256 MB written before
// each).
//
// Fallback.  Where a pointer or a size forbids 16-byte accesses, V is 1: the same kernels, element
// by element.  What is not asked for is neither computed nor written.
#pragma once
#include "common.cuh"

namespace fxfuse::cuda {

// Vectors of a row that a thread of rows_backward holds: 16 floats, or fewer where a double or an
// access of its own for each element takes more registers.
__host__ __device__ constexpr int row_vectors(int vector, size_t accumulate_size) {
  return static_cast<int>((vector > 1 && accumulate_size == 4 ? 64 : 32) / accumulate_size) /
         vector;
}

// At most in its block.  It bounds the registers of each at 168, so that three blocks of 128
// threads run at once; 128 registers spill.
constexpr int kRowThreads = 384;

// Lanes for a piece of a longer group.  No thread waits for the sums of a piece, so it needs no
// more than a warp: (1024, 16384) in 1 group takes 116 us with 128 of them and 105 with 32 (H200,
// 2026-11-30).
constexpr int kPieceLanes = 32;

// How rows_backward is spread over rows of num_groups groups.
struct RowTeams {
  int lanes;       // of a team
  int64_t pieces;  // of a group
  int64_t slices;  // of the batch
};

constexpr int kInFlight = 2;  // vectors of each input that a thread of the other kernels loads

// x^ and dz of one vector; statistics(j) are those of element j.
template <class T, class O, int V, class A, class S>
FXFUSE_INLINE void differentiate(const ActivationOf<A>& activation, const Loaded<T, V>& x,
                                 const Loaded<O, V>& dy, const A (&weight)[V], const A (&bias)[V],
                                 S statistics, A (&xhat)[V], A (&dz)[V]) {
  A z[V];
#pragma unroll
  for (int j = 0; j < V; ++j) {
    xhat[j] = statistics(j).normalize(x.at(j));
    z[j] = multiply_add(xhat[j], weight[j], bias[j]);
    dz[j] = dy.at(j);
  }
  activation.grad(z, dz);
}

template <class T, class A>
FXFUSE_INLINE void write_affine_gradients(const Backward& problem, int64_t channel,
                                          const Pair<A>& sums) {
  const auto write = [&](void* gradient, A value) {
    if (gradient == nullptr) return;
    if (affine_is_wide(problem)) {
      static_cast<A*>(gradient)[channel] = value;
    } else {
      static_cast<T*>(gradient)[channel] = static_cast<T>(value);
    }
  };
  write(problem.dbias, sums.at[0]);
  write(problem.dweight, sums.at[1]);
}

// A team for each slice and each piece of each group of channels; slice s takes the samples s,
// s + slices, ...  Where there is one piece, it writes dinput; where there are more, the sums of
// dz * weight and dz * weight * x^ over each: of_piece is (batch, num_groups, pieces), or null.
// partial is (slices, channels), or null where there is one slice, which writes dweight and dbias.
template <class T, class O, int V>
__global__ __launch_bounds__(kRowThreads) void rows_backward(const Backward problem,
                                                             const RowTeams teams,
                                                             Pair<Accumulate<T>>* const partial,
                                                             Pair<Accumulate<T>>* const of_piece) {
  using A = Accumulate<T>;
  constexpr int K = row_vectors(V, sizeof(A));
  const Team team(teams.lanes);
  const int64_t pieces = problem.num_groups * teams.pieces;  // of a row
  const int64_t slice = team.index / pieces, piece = team.index % pieces;
  const int64_t group = piece / teams.pieces, size = problem.channels / problem.num_groups;
  const int64_t begin = piece % teams.pieces * (team.size * K * V);
  const int64_t channel = group * size + begin;
  const int first = team.rank * V, step = team.size * V;
  const int work =
      slice < teams.slices ? static_cast<int>(min(size - begin, int64_t(K) * step)) : 0;

  A weight[K][V], bias[K][V], dweight[K][V] = {}, dbias[K][V] = {};
  each<K>(first, step, work,
          [&](int k, int i) { load_affine<T>(problem, channel + i, weight[k], bias[k]); });

  const ActivationOf<A> activation(problem);
  const A share = A(1) / size;
  // Every team makes the same number of rounds, for its lanes meet others in the shuffles.
  for (int64_t base = 0; base < problem.batch; base += teams.slices) {
    const int64_t sample = base + slice;
    const int end = sample < problem.batch ? work : 0;
    const int64_t offset = sample * problem.channels + channel;
    Loaded<T, V> x[K];
    Loaded<O, V> dy[K];
    Statistics<A> statistics{};
    each<K>(first, step, end, [&](int k, int i) {
      x[k] = load<T, V>(static_cast<const T*>(problem.input) + offset + i);
      dy[k] = load<O, V>(static_cast<const O*>(problem.grad_output) + offset + i);
    });
    if (end > 0) {
      statistics = Statistics<A>(problem.mean, problem.rstd, problem.batch * problem.num_groups,
                                 sample * problem.num_groups + group);
    }
    __syncwarp();  // keeps the loads together: forward.cuh
    A normalized[K][V], dnormalized[K][V], sums[2] = {};
    each<K>(first, step, end, [&](int k, int) {
      auto& xhat = normalized[k];
      A dz[V];
      differentiate(
          activation, x[k], dy[k], weight[k], bias[k], [&](int) { return statistics; }, xhat, dz);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        dbias[k][j] += dz[j];
        dweight[k][j] += dz[j] * xhat[j];
        dnormalized[k][j] = product(dz[j], weight[k][j]);
        sums[0] += dnormalized[k][j];
        sums[1] += dnormalized[k][j] * xhat[j];
      }
    });
    if (problem.dinput == nullptr) continue;
    team.sum(sums);
    if (of_piece != nullptr) {
      if (end > 0 && team.rank == 0) of_piece[sample * pieces + piece] = {sums[0], sums[1]};
      continue;
    }
    const A mean = sums[0] * share, slope = sums[1] * share;
    each<K>(first, step, end, [&](int k, int i) {
      Vector<T, V> dx;
#pragma unroll
      for (int j = 0; j < V; ++j) {
        dx.at[j] = static_cast<T>(statistics.rstd *
                                  ((dnormalized[k][j] - mean) - normalized[k][j] * slope));
      }
      store(static_cast<T*>(problem.dinput) + offset + i, dx);
    });
  }

  each<K>(first, step, work, [&](int k, int i) {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const Pair<A> sums = {dbias[k][j], dweight[k][j]};
      if (partial == nullptr) {
        write_affine_gradients<T>(problem, channel + i + j, sums);
      } else {
        partial[slice * problem.channels + channel + i + j] = sums;
      }
    }
  });
}

// ---- sums over the elements of a channel --------------------------------------------------------

// A team for each chunk of each channel of each sample.  partial is (batch, chunks, channels): the
// sums of dz and dz * x^.
template <class T, class O, int V>
__global__ __launch_bounds__(kThreads) void sum_channels(const Backward problem,
                                                         const Chunks chunks, const int lanes,
                                                         Pair<Accumulate<T>>* const partial) {
  using A = Accumulate<T>;
  constexpr int K = kInFlight;
  const Team team(lanes);
  const int64_t plane = team.index / chunks.count, chunk = team.index % chunks.count;
  const bool active = plane < problem.batch * problem.channels;
  const int64_t sample = plane / problem.channels, channel = plane % problem.channels;
  const int64_t per_group = problem.channels / problem.num_groups;
  const int64_t begin = chunk * chunks.size, step = int64_t(team.size) * V;
  const int64_t end = active ? min(begin + chunks.size, problem.spatial) : 0;
  double sums[2] = {};  // there may be thousands of additions, each of a few terms
  if (active) {
    const bool wide = affine_is_wide(problem);
    const A channel_weight = load_channel<T>(problem.weight, wide, channel, A(1));
    const A channel_bias = load_channel<T>(problem.bias, wide, channel, A(0));
    A weight[V], bias[V];
#pragma unroll
    for (int j = 0; j < V; ++j) {
      weight[j] = channel_weight;
      bias[j] = channel_bias;
    }
    const Statistics<A> statistics(problem.mean, problem.rstd, problem.batch * problem.num_groups,
                                   sample * problem.num_groups + channel / per_group);
    const T* x = static_cast<const T*>(problem.input) + plane * problem.spatial;
    const O* dy = static_cast<const O*>(problem.grad_output) + plane * problem.spatial;
    const ActivationOf<A> activation(problem);
    for (int64_t first = begin + int64_t(team.rank) * V; first < end; first += K * step) {
      Loaded<T, V> x_data[K];
      Loaded<O, V> dy_data[K];
      each<K>(first, step, end, [&](int k, int64_t i) {
        x_data[k] = load<T, V>(x + i);
        dy_data[k] = load<O, V>(dy + i);
      });
      A here[2] = {};
      each<K>(first, step, end, [&](int k, int64_t) {
        A xhat[V], dz[V];
        differentiate(
            activation, x_data[k], dy_data[k], weight, bias, [&](int) { return statistics; }, xhat,
            dz);
#pragma unroll
        for (int j = 0; j < V; ++j) {
          here[0] += dz[j];
          here[1] += dz[j] * xhat[j];
        }
      });
      sums[0] += here[0];
      sums[1] += here[1];
    }
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
  constexpr int K = kInFlight;
  const Column<V> column(problem, tiles);
  Pair<A> sums[V] = {};
  if (column.active) {
    const ColumnParameters<T, V> parameters(problem, column);
    const T* x = static_cast<const T*>(problem.input);
    const O* dy = static_cast<const O*>(problem.grad_output);
    const ActivationOf<A> activation(problem);
    const int64_t step = column.slots;
    for (int64_t row = column.begin + column.slot; row < column.end; row += K * step) {
      Loaded<T, V> x_data[K];
      Loaded<O, V> dy_data[K];
      each<K>(row, step, column.end, [&](int k, int64_t i) {
        x_data[k] = load<T, V>(x + column.offset(problem, i));
        dy_data[k] = load<O, V>(dy + column.offset(problem, i));
      });
      each<K>(row, step, column.end, [&](int k, int64_t) {
        A xhat[V], dz[V];
        differentiate(
            activation, x_data[k], dy_data[k], parameters.weight, parameters.bias,
            [&](int j) { return parameters.statistics[j]; }, xhat, dz);
#pragma unroll
        for (int j = 0; j < V; ++j) {
          sums[j].at[0] += dz[j];
          sums[j].at[1] += dz[j] * xhat[j];
        }
      });
    }
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

// dinput of one vector, the group's means being known; statistics(j) and means(j) as above.
template <class T, class O, int V, class A, class S, class M>
FXFUSE_INLINE Vector<T, V> finish(const ActivationOf<A>& activation, const Loaded<T, V>& x,
                                  const Loaded<O, V>& dy, const A (&weight)[V], const A (&bias)[V],
                                  S statistics, M means) {
  A xhat[V], dz[V];
  differentiate(activation, x, dy, weight, bias, statistics, xhat, dz);
  Vector<T, V> dx;
#pragma unroll
  for (int j = 0; j < V; ++j) {
    const A centered = product(dz[j], weight[j]) - means(j).at[0];
    dx.at[j] = static_cast<T>(statistics(j).rstd * (centered - xhat[j] * means(j).at[1]));
  }
  return dx;
}

// A team for each chunk of each group.
template <class T, class O, int V>
__global__ __launch_bounds__(kThreads) void input_gradient(const Backward problem,
                                                           const Chunks chunks, const int lanes,
                                                           const Pair<Accumulate<T>>* const means) {
  using A = Accumulate<T>;
  constexpr int K = kInFlight;
  const Team team(lanes);
  const int64_t groups = problem.batch * problem.num_groups;
  const int64_t channels = problem.channels / problem.num_groups;
  const int64_t size = channels * problem.spatial;
  const int64_t index = team.index / chunks.count, chunk = team.index % chunks.count;
  if (index >= groups) return;
  const int64_t end = min((chunk + 1) * chunks.size, size), step = int64_t(team.size) * V;
  const int64_t channel = index % problem.num_groups * channels;
  const Statistics<A> statistics(problem.mean, problem.rstd, groups, index);
  const Pair<A> of_group = means[index];
  const T* x = static_cast<const T*>(problem.input) + index * size;
  const O* dy = static_cast<const O*>(problem.grad_output) + index * size;
  T* dx = static_cast<T*>(problem.dinput) + index * size;
  const ActivationOf<A> activation(problem);
  for (int64_t first = chunk * chunks.size + int64_t(team.rank) * V; first < end;
       first += K * step) {
    Loaded<T, V> x_data[K];
    Loaded<O, V> dy_data[K];
    each<K>(first, step, end, [&](int k, int64_t i) {
      x_data[k] = load<T, V>(x + i);
      dy_data[k] = load<O, V>(dy + i);
    });
    each<K>(first, step, end, [&](int k, int64_t i) {
      A weight[V], bias[V];
      load_affine<T>(problem, channel, i, weight, bias);
      store(dx + i, finish(
                        activation, x_data[k], dy_data[k], weight, bias,
                        [&](int) { return statistics; }, [&](int) { return of_group; }));
    });
  }
}

template <class T, class O, int V>
__global__ __launch_bounds__(kThreads, 2) void input_gradient_channels_last(
    const Backward problem, const ColumnTiles tiles, const Pair<Accumulate<T>>* const means) {
  using A = Accumulate<T>;
  constexpr int K = kInFlight;
  const Column<V> column(problem, tiles);
  if (!column.active) return;
  const ColumnParameters<T, V> parameters(problem, column);
  Pair<A> of_group[V];
#pragma unroll
  for (int j = 0; j < V; ++j) of_group[j] = means[column.group(problem, j)];
  const T* x = static_cast<const T*>(problem.input);
  const O* dy = static_cast<const O*>(problem.grad_output);
  T* dx = static_cast<T*>(problem.dinput);
  const ActivationOf<A> activation(problem);
  const int64_t step = column.slots;
  for (int64_t row = column.begin + column.slot; row < column.end; row += K * step) {
    Loaded<T, V> x_data[K];
    Loaded<O, V> dy_data[K];
    each<K>(row, step, column.end, [&](int k, int64_t i) {
      x_data[k] = load<T, V>(x + column.offset(problem, i));
      dy_data[k] = load<O, V>(dy + column.offset(problem, i));
    });
    each<K>(row, step, column.end, [&](int k, int64_t i) {
      store(
          dx + column.offset(problem, i),
          finish(
              activation, x_data[k], dy_data[k], parameters.weight, parameters.bias,
              [&](int j) { return parameters.statistics[j]; }, [&](int j) { return of_group[j]; }));
    });
  }
}

// ---- dweight and dbias --------------------------------------------------------------------------

constexpr int kRowsOfBlock = 256, kRowSlots = kThreads / 32;

// A block for 32 channels and kRowsOfBlock rows, or all of them in the last round: (rows, channels)
// becomes (blocks of rows, channels) in `next`, or dweight and dbias where next is null.
template <class T>
__global__ __launch_bounds__(kThreads) void sum_rows(const Backward problem, const int64_t rows,
                                                     const Pair<Accumulate<T>>* const partial,
                                                     Pair<Accumulate<T>>* const next) {
  using A = Accumulate<T>;
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
  for (int other = 1; other < kRowSlots; ++other) {
    sum.at[0] += of_slot[other][lane].at[0];
    sum.at[1] += of_slot[other][lane].at[1];
  }
  const Pair<A> result = {static_cast<A>(sum.at[0]), static_cast<A>(sum.at[1])};
  if (next != nullptr) {
    next[part * problem.channels + channel] = result;
  } else {
    write_affine_gradients<T>(problem, channel, result);
  }
}

// ---- host ---------------------------------------------------------------------------------------

// How a problem is solved: what workspace_bytes and backward must agree on.
struct BackwardPlan {
  bool channels_last, by_rows, affine;  // affine: dweight or dbias is asked for
  bool vectors;          // 16-byte accesses along rows, groups, or rows of all channels
  bool channel_vectors;  // and along one channel's elements
  RowTeams teams = {};   // of rows_backward
  Chunks chunks = {};    // of a channel's elements
  int64_t rows;          // of partial sums, each of all channels

  explicit BackwardPlan(const Backward& p) {
    const int width = vector_width(p.dtype);
    const int64_t size = group_size(p);
    by_rows = p.spatial == 1;
    channels_last = is_channels_last(p);
    affine = p.dweight != nullptr || p.dbias != nullptr;
    const bool all_aligned = aligned(p.input, p.grad_output, p.dinput);
    vectors = (channels_last ? p.channels : size) % width == 0 && all_aligned &&
              ((p.spatial > 1 && !channels_last) || aligned(p.weight, p.bias));
    channel_vectors = p.spatial % width == 0 && all_aligned;
    const int V = vectors ? width : 1;
    if (by_rows) {
      teams = row_teams(p, size / V, row_vectors(V, accumulate_size(p.dtype)));
      rows = affine && teams.slices > 1 ? teams.slices : 0;
    } else {
      chunks =
          channels_last ? ColumnTiles::of(p, V).chunks : Chunks::of(p.spatial, kElementsOfChunk);
      rows = p.batch * chunks.count;
    }
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

  // Pairs that dinput needs: the means of every group and, by rows, the sums over its pieces.
  int64_t means(const Backward& p) const {
    if (p.dinput == nullptr || teams.pieces == 1) return 0;
    return p.batch * p.num_groups * (1 + teams.pieces);
  }

  size_t bytes(const Backward& p) const {
    return (partial_rows() * p.channels + means(p)) * 2 * accumulate_size(p.dtype);
  }

 private:
  // `vectors`: of a group; `held`: by a thread.
  RowTeams row_teams(const Backward& p, int64_t vectors, int held) const {
    RowTeams teams = {kPieceLanes, 1, p.batch};
    if (vectors <= kRowThreads * held) {
      teams.lanes = holding_team_size(vectors, held);
    } else {
      teams.pieces = ceil_div(vectors, kPieceLanes * held);
    }
    if (affine) {
      // 65536 threads fill the largest GPUs of 2026 once, at the registers this kernel needs.  But
      // the longest sums of one thread are no longer than torch's, or 256.
      const int64_t filling = 65536 / (p.num_groups * teams.pieces * teams.lanes);
      const int64_t accurate = std::min<int64_t>(32, ceil_div(p.batch, 256));
      teams.slices = std::min(std::max(filling, accurate), p.batch);
    }
    return teams;
  }
};

template <class T>
cudaError_t sum_all_rows(const Backward& p, int64_t rows, Pair<Accumulate<T>>* partial,
                         cudaStream_t stream) {
  const int64_t tiles = ceil_div(p.channels, 32);
  while (rows > 2 * kRowsOfBlock) {
    const int64_t parts = ceil_div(rows, kRowsOfBlock);
    auto* next = partial + rows * p.channels;
    const cudaError_t error =
        launch(sum_rows<T>, parts * tiles, kThreads, stream, p, rows, partial, next);
    if (error != cudaSuccess) return error;
    rows = parts;
    partial = next;
  }
  return launch(sum_rows<T>, tiles, kThreads, stream, p, rows, partial,
                static_cast<Pair<Accumulate<T>>*>(nullptr));
}

template <class T, class O>
cudaError_t backward_typed(const Backward& p, void* workspace, cudaStream_t stream) {
  using A = Accumulate<T>;
  constexpr int W = 16 / sizeof(T);
  const BackwardPlan plan(p);
  if (p.dinput == nullptr && !plan.affine) return cudaSuccess;
  const int64_t groups = p.batch * p.num_groups, size = group_size(p);
  const ColumnTiles tiles = ColumnTiles::of(p, plan.vectors ? W : 1);
  auto* partial = static_cast<Pair<A>*>(workspace);
  auto* means = plan.means(p) > 0 ? partial + plan.partial_rows() * p.channels : nullptr;
  auto* of_piece = means == nullptr ? nullptr : means + groups;
  cudaError_t error;

  if (plan.by_rows) {
    error = launch_teams(plan.vectors ? rows_backward<T, O, W> : rows_backward<T, O, 1>,
                         plan.teams.slices * p.num_groups * plan.teams.pieces, plan.teams.lanes,
                         128, stream, p, plan.teams, plan.rows > 0 ? partial : nullptr, of_piece);
  } else if (plan.channels_last) {
    error = launch(plan.vectors ? sum_channels_last<T, O, W> : sum_channels_last<T, O, 1>,
                   tiles.blocks(p), kThreads, stream, p, tiles, partial);
  } else {
    const int V = plan.channel_vectors ? W : 1;
    const int lanes = team_size(std::min(plan.chunks.size, p.spatial) / V, 256);
    error = launch_teams(plan.channel_vectors ? sum_channels<T, O, W> : sum_channels<T, O, 1>,
                         plan.rows * p.channels, lanes, kThreads, stream, p, plan.chunks, lanes,
                         partial);
  }
  if (error != cudaSuccess) return error;

  if (means != nullptr) {
    const int64_t rows = plan.by_rows ? 1 : plan.chunks.count;
    const int64_t per_group = plan.by_rows ? plan.teams.pieces : p.channels / p.num_groups;
    int lanes = team_size(rows * per_group, 128);
    error = launch_teams(sum_groups<T>, groups, lanes, kThreads, stream, p,
                         plan.by_rows ? nullptr : p.weight, rows, per_group, lanes,
                         plan.by_rows ? of_piece : partial, means);
    if (error != cudaSuccess) return error;
    if (plan.channels_last) {
      error = launch(plan.vectors ? input_gradient_channels_last<T, O, W>
                                  : input_gradient_channels_last<T, O, 1>,
                     tiles.blocks(p), kThreads, stream, p, tiles, means);
    } else {
      const Chunks chunks = Chunks::of(size, kElementsOfChunk);
      lanes = team_size(std::min(chunks.size, size) / (plan.vectors ? W : 1), 256);
      error = launch_teams(plan.vectors ? input_gradient<T, O, W> : input_gradient<T, O, 1>,
                           groups * chunks.count, lanes, kThreads, stream, p, chunks, lanes, means);
    }
    if (error != cudaSuccess) return error;
  }
  if (!plan.affine || plan.rows == 0) return cudaSuccess;
  return sum_all_rows<T>(p, plan.rows, partial, stream);
}

}  // namespace fxfuse::cuda
