// GroupNorm + activation, forward.
//
// Idea.  A group that fits into the registers of a block is read once: all its loads are issued
// before any arithmetic, its statistics are computed from the registers, and what leaves is the
// result.  Where there is one element per channel (behind a Linear) and a group fits into the
// registers of a warp, the warp stays with one group of channels and walks down the batch: weight
// and bias are loaded once, and the next rows while these are worked on.  A longer group is cut
// into chunks, because one block would be alone with it: partial moments of every chunk, merged in
// a fixed order, and a second pass over the data.
//
// Statistics.  Two passes over the registers with a correction: m = p + mean(x - p), where the
// pivot p is the group's first value; d = mean(x - m), which is what rounding took from m; then
// (x - m) - d, and var = mean((x - m)^2) - d^2.  A constant group gives x - p = 0 and so exactly 0,
// which sum(x) / n does not.  Chunks keep their mean relative to p, so its digits are not lost
// behind a large p, and are merged by the formula of Chan, Golub and LeVeque (1979) in double.
//
// Work split.  normalize_rows: 1 to 32 lanes for a group of channels and a slice of the batch.
// normalize_in_registers: 1 to 32 lanes for a group of up to 128 vectors of 16 bytes,
// else a block.  moments, merge_moments, normalize_chunk: a block for each chunk of a group.
// The two kernels named ..._channels_last: a block for a tile of columns and a chunk of rows.
//
// Limits.  normalize_rows: 512 elements in a group (256 doubles), and 16-byte accesses.
// In registers: 64 KB a group, or 4096 elements (2048 doubles) where V is 1.  Any number
// and size of groups otherwise; offsets have 64 bits, everything is on grid x.
//
// Measured.  (1024, 8192) in 16 groups with hardtanh: 23.5 us in float32 and 19.3 in bfloat16,
// where torch's two operators take 148.0 and 139.6 and a copy 20.4 and 12.5; (16384, 512) in 32
// groups in bfloat16: 19.7 against 359.8; (64, 256, 56, 56) in 32 groups with ReLU in bfloat16: 184
// against 286, channels_last 152 against 624 (H200, 2026-11-30, 256 MB written before each).
//
// Fallback.  Where a pointer or a group's size forbids 16-byte accesses, V is 1: the same kernels,
// element by element.
#pragma once
#include "common.cuh"

namespace fxfuse::cuda {

// normalize_in_registers exists twice: for groups that up to 256 threads hold with few registers
// each, so that many run at once, and for longer ones (where V is 1, those go to the chunks).
struct Holding {
  int threads, vectors;  // at most in a block; of each thread

  // `vector`: elements in a vector; `bytes`: size of the accumulate type.
  static constexpr Holding small(int vector, int bytes) {
    return {256, vector == 1 ? 64 / bytes : vector == 8 ? 2 : 4};
  }
  static constexpr Holding large(int vector, int bytes) {
    return vector == 1 ? small(vector, bytes) : Holding{512, 8};
  }
  constexpr int64_t capacity() const { return int64_t(threads) * vectors; }
};

// Vectors of a row that a thread of normalize_rows holds at most: 16 floats or 8 doubles.
constexpr int most_row_vectors(int vector, size_t accumulate_size) {
  return static_cast<int>(64 / accumulate_size) / vector;
}

constexpr int kVectorsInFlight = 4;  // that a thread of the other kernels loads at once

// Statistics and affine parameters applied to one vector; statistics(j) are those of element j.
template <class O, class T, int V, class A, class S>
FXFUSE_INLINE Vector<O, V> finish(const ActivationOf<A>& activation, const Loaded<T, V>& x,
                                  const A (&weight)[V], const A (&bias)[V], S statistics) {
  A z[V];
#pragma unroll
  for (int j = 0; j < V; ++j) {
    z[j] = multiply_add(statistics(j).normalize(x.at(j)), weight[j], bias[j]);
  }
  activation.value(z);
  Vector<O, V> y;
#pragma unroll
  for (int j = 0; j < V; ++j) y.at[j] = static_cast<O>(z[j]);
  return y;
}

// Of R groups at once, one in each of the arrays; `end` as for each().
template <class A, class T, int V, int K, int R>
FXFUSE_INLINE void measure(const Team& team, const Loaded<T, V> (&data)[R][K], const A (&pivot)[R],
                           int first, int step, int end, int size, double eps,
                           Statistics<A> (&groups)[R]) {
  const A share = A(1) / size;
  A total[R] = {};
#pragma unroll
  for (int r = 0; r < R; ++r) {
    each<K>(first, step, end, [&](int k, int) {
#pragma unroll
      for (int j = 0; j < V; ++j) total[r] += data[r][k].at(j) - pivot[r];
    });
  }
  team.sum(total);
  A totals[2 * R] = {};
#pragma unroll
  for (int r = 0; r < R; ++r) {
    groups[r].mean = pivot[r] + total[r] * share;
    each<K>(first, step, end, [&](int k, int) {
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const A centered = data[r][k].at(j) - groups[r].mean;
        totals[2 * r] += centered;
        totals[2 * r + 1] += centered * centered;
      }
    });
  }
  team.sum(totals);
#pragma unroll
  for (int r = 0; r < R; ++r) {
    groups[r].rest = totals[2 * r] * share;
    const A variance = totals[2 * r + 1] * share - groups[r].rest * groups[r].rest;
    // Rounding can leave it below 0.  No maximum: that would swallow NaN.
    groups[r].rstd = A(1) / sqrt((variance < A(0) ? A(0) : variance) + static_cast<A>(eps));
  }
}

// Keeps the statistics of a group for backward, if it will come.
template <class A>
FXFUSE_INLINE void save(const Forward& problem, int64_t group, const Statistics<A>& statistics) {
  if (problem.mean == nullptr) return;
  A* mean = static_cast<A*>(problem.mean);
  mean[group] = statistics.mean;
  mean[problem.batch * problem.num_groups + group] = statistics.rest;
  static_cast<A*>(problem.rstd)[group] = statistics.rstd;
}

template <class T, class O, int V, int K, int kMaxThreads>
__global__ __launch_bounds__(kMaxThreads) void normalize_in_registers(const Forward problem,
                                                                      const int lanes) {
  using A = Accumulate<T>;
  const Team team(lanes);
  const int64_t groups = problem.batch * problem.num_groups;
  const int channels = static_cast<int>(problem.channels / problem.num_groups);  // of a group
  const int size = channels * static_cast<int>(problem.spatial);
  const int end = team.index < groups ? size : 0;
  const int first = team.rank * V, step = team.size * V;
  const T* x = static_cast<const T*>(problem.input) + team.index * size;

  Loaded<T, V> data[1][K];
  const A pivot[] = {end > 0 ? static_cast<A>(x[0]) : A(0)};
  each<K>(first, step, end, [&](int k, int i) { data[0][k] = load<T, V>(x + i); });
  // ptxas may sink a load below the first arithmetic, for two latencies instead of one: 72 against
  // 58 us for 2048 groups of 50 KB in bfloat16 (H200, 2026-11-30).
  __syncwarp();
  Statistics<A> statistics[1];
  measure(team, data, pivot, first, step, end, size, problem.eps, statistics);
  if (end > 0 && team.rank == 0) save(problem, team.index, statistics[0]);

  const int64_t channel = team.index % problem.num_groups * channels;
  O* y = static_cast<O*>(problem.output) + team.index * size;
  const ActivationOf<A> activation(problem);
  each<K>(first, step, end, [&](int k, int i) {
    A weight[V], bias[V];
    load_affine<T>(problem, channel, i, weight, bias);
    store(y + i,
          finish<O>(activation, data[0][k], weight, bias, [&](int) { return statistics[0]; }));
  });
}

// A team of up to 32 lanes for each slice of the batch and each group of channels; slice s takes
// the samples s, s + slices, ..., R at a time.  Past the last sample the arithmetic goes on with
// whatever the registers hold, and nothing of it is stored.
template <class T, class O, int V, int K>
__global__ __launch_bounds__(kThreads, 2) void normalize_rows(const Forward problem,
                                                              const int lanes,
                                                              const int64_t slices) {
  constexpr int R = kVectorsInFlight / K;
  using A = Accumulate<T>;
  const Team team(lanes);
  const int64_t slice = team.index / problem.num_groups, group = team.index % problem.num_groups;
  const int size = static_cast<int>(problem.channels / problem.num_groups);
  const int first = team.rank * V, step = team.size * V;
  const int work = slice < slices ? size : 0;
  const int64_t channel = group * size;
  // Row r of the round that begins with sample `base`: calls body(k, offset in memory).
  const auto over_row = [&](int64_t base, int r, auto body) {
    const int64_t sample = base + r * slices + slice, offset = sample * problem.channels + channel;
    each<K>(first, step, sample < problem.batch ? work : 0,
            [&](int k, int i) { body(k, offset + i); });
  };
  const T* input = static_cast<const T*>(problem.input);
  Loaded<T, V> next[R][K];
  const auto fetch = [&](int64_t base) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      over_row(base, r, [&](int k, int64_t i) { next[r][k] = load<T, V>(input + i); });
    }
  };
  fetch(0);
  A weight[K][V], bias[K][V];
  each<K>(first, step, work,
          [&](int k, int i) { load_affine<T>(problem, channel + i, weight[k], bias[k]); });
  const ActivationOf<A> activation(problem);

  // Every team makes the same number of rounds, for its lanes meet others in the shuffles.
  for (int64_t base = 0; base < problem.batch; base += R * slices) {
    Loaded<T, V> data[R][K];
    A pivot[R];
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int k = 0; k < K; ++k) data[r][k] = next[r][k];
      pivot[r] = __shfl_sync(~0u, data[r][0].at(0), 0, team.size);
    }
    fetch(base + R * slices);  // in flight during all that follows
    Statistics<A> statistics[R];
    measure(team, data, pivot, first, step, work, size, problem.eps, statistics);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int64_t sample = base + r * slices + slice;
      if (work > 0 && sample < problem.batch && team.rank == 0) {
        save(problem, sample * problem.num_groups + group, statistics[r]);
      }
      over_row(base, r, [&](int k, int64_t i) {
        store(static_cast<O*>(problem.output) + i,
              finish<O>(activation, data[r][k], weight[k], bias[k],
                        [&](int) { return statistics[r]; }));
      });
    }
  }
}

// ---- moments of chunks --------------------------------------------------------------------------

// Mean (relative to the pivot) and sum of squared deviations of `count` values.
template <class A>
struct Moments {
  A mean, m2;

  // `share` is other_count / (count + other_count), the counts those before the merge.
  FXFUSE_INLINE void merge(const Moments& other, A count, A share) {
    const A distance = other.mean - mean;
    mean += distance * share;
    m2 += other.m2 + distance * distance * (count * share);
  }
};

// A block for each chunk of each group.  partial is (batch, chunks, num_groups).
template <class T, int V>
__global__ __launch_bounds__(kThreads) void moments(const Problem problem, const Chunks chunks,
                                                    Pair<Accumulate<T>>* const partial) {
  using A = Accumulate<T>;
  constexpr int K = kVectorsInFlight;
  const Team team(blockDim.x);
  const int64_t size = problem.channels / problem.num_groups * problem.spatial;
  const int64_t index = team.index / chunks.count, chunk = team.index % chunks.count;
  const T* x = static_cast<const T*>(problem.input) + index * size;
  const A pivot = static_cast<A>(x[0]);
  const int64_t begin = chunk * chunks.size, end = min(begin + chunks.size, size);
  const int64_t step = int64_t(kThreads) * V;

  Moments<A> running = {};
  A count = 0;
  for (int64_t first = begin + int64_t(team.rank) * V; first < end; first += K * step) {
    Loaded<T, V> data[K];
    each<K>(first, step, end, [&](int k, int64_t i) { data[k] = load<T, V>(x + i); });
    A sum = 0, added = 0;
    each<K>(first, step, end, [&](int k, int64_t) {
      added += V;
#pragma unroll
      for (int j = 0; j < V; ++j) sum += data[k].at(j) - pivot;
    });
    Moments<A> here = {sum / added, 0};
    each<K>(first, step, end, [&](int k, int64_t) {
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const A centered = (data[k].at(j) - pivot) - here.mean;
        here.m2 += centered * centered;
      }
    });
    running.merge(here, count, added / (count + added));
    count += added;
  }
  // All threads at once: the mean of all, then every thread's distance from it.
  const A elements = static_cast<A>(end - begin);
  A mean[1] = {running.mean * count}, m2[1];
  team.sum(mean);
  mean[0] /= elements;
  const A distance = running.mean - mean[0];
  m2[0] = running.m2 + distance * distance * count;
  team.sum(m2);
  if (team.rank == 0) {
    const int64_t row = index / problem.num_groups * chunks.count + chunk;
    partial[row * problem.num_groups + index % problem.num_groups] = {mean[0], m2[0]};
  }
}

// The same over rows of all channels.  partial is (batch, chunks, channels).
template <class T, int V>
__global__ __launch_bounds__(kThreads,
                             2) void moments_channels_last(const Problem problem,
                                                           const ColumnTiles tiles,
                                                           Pair<Accumulate<T>>* const partial) {
  using A = Accumulate<T>;
  constexpr int K = kVectorsInFlight;
  const Column<V> column(problem, tiles);
  Moments<A> running[V] = {};
  if (column.active) {
    const int64_t per_group = problem.channels / problem.num_groups;
    const T* input = static_cast<const T*>(problem.input);
    const T* sample = input + column.sample * problem.spatial * problem.channels;
    A pivot[V];
#pragma unroll
    for (int j = 0; j < V; ++j) {
      pivot[j] = static_cast<A>(sample[(column.channel + j) / per_group * per_group]);
    }
    A count = 0;
    const int64_t step = column.slots;
    for (int64_t row = column.begin + column.slot; row < column.end; row += K * step) {
      Loaded<T, V> data[K];
      A added = 0;
      each<K>(row, step, column.end, [&](int k, int64_t i) {
        data[k] = load<T, V>(input + column.offset(problem, i));
        added += 1;
      });
      const A share = added / (count + added), inverse = A(1) / added;
#pragma unroll
      for (int j = 0; j < V; ++j) {
        A sum = 0;
        each<K>(row, step, column.end, [&](int k, int64_t) { sum += data[k].at(j) - pivot[j]; });
        Moments<A> here = {sum * inverse, 0};
        each<K>(row, step, column.end, [&](int k, int64_t) {
          const A centered = (data[k].at(j) - pivot[j]) - here.mean;
          here.m2 += centered * centered;
        });
        running[j].merge(here, count, share);
      }
      count += added;
    }
  }
  // One thread for each channel of the tile merges its slots.
  __shared__ Moments<A> of_slot[kThreads * V];
#pragma unroll
  for (int j = 0; j < V; ++j) of_slot[threadIdx.x * V + j] = running[j];
  __syncthreads();
  const int width = tiles.width * V;
  const int64_t channel = blockIdx.x % tiles.count * width + threadIdx.x;
  if (static_cast<int>(threadIdx.x) >= width || channel >= problem.channels) return;
  A mean = 0, m2 = 0;
  for (int slot = 0; slot < tiles.slots; ++slot) {
    mean += of_slot[slot * width + threadIdx.x].mean * static_cast<A>(column.rows_of(slot));
  }
  mean /= static_cast<A>(column.end - column.begin);
  for (int slot = 0; slot < tiles.slots; ++slot) {
    const Moments<A> of = of_slot[slot * width + threadIdx.x];
    const A distance = of.mean - mean;
    m2 += of.m2 + distance * distance * static_cast<A>(column.rows_of(slot));
  }
  partial[column.part * problem.channels + channel] = {mean, m2};
}

// A team for each group.  A row of partial holds `per_group` entries of every group, each of which
// stands for `per_entry` elements in all chunks but the last; a group's chunks cut `total` into
// pieces of chunks.size.
template <class T>
__global__ __launch_bounds__(kThreads) void merge_moments(
    const Forward problem, const Chunks chunks, const Pair<Accumulate<T>>* const partial,
    const int lanes, const int64_t per_group, const int64_t total, const int64_t pivot_stride) {
  using A = Accumulate<T>;
  const Team team(lanes);
  const int64_t groups = problem.batch * problem.num_groups;
  const int64_t sample = team.index / problem.num_groups, group = team.index % problem.num_groups;
  const int64_t entries = team.index < groups ? chunks.count * per_group : 0;
  const int64_t row_size = problem.num_groups * per_group;

  const auto over_entries = [&](auto body) {
    for (int64_t entry = team.rank; entry < entries; entry += team.size) {
      const int64_t chunk = entry / per_group;
      const int64_t row = sample * chunks.count + chunk;
      const auto moments = partial[row * row_size + group * per_group + entry % per_group];
      body(moments.at[0], moments.at[1], min(chunks.size, total - chunk * chunks.size));
    }
  };
  const double elements = static_cast<double>(total) * per_group;
  double mean[1] = {}, m2[1] = {};
  over_entries([&](double entry_mean, double, int64_t count) { mean[0] += entry_mean * count; });
  team.sum(mean);
  mean[0] /= elements;
  over_entries([&](double entry_mean, double entry_m2, int64_t count) {
    const double distance = entry_mean - mean[0];
    m2[0] += entry_m2 + distance * distance * count;
  });
  team.sum(m2);
  if (entries == 0 || team.rank > 0) return;

  // pivot + mean as a high and a low part: Knuth's two-sum, for double has no wider type.
  const double pivot = static_cast<double>(static_cast<A>(static_cast<const T*>(
      problem.input)[sample * problem.channels * problem.spatial + group * pivot_stride]));
  const double sum = pivot + mean[0], added = sum - pivot;
  const double lost = (pivot - (sum - added)) + (mean[0] - added);
  const A high = static_cast<A>(sum);
  A* means = static_cast<A*>(problem.mean);
  means[team.index] = high;
  means[groups + team.index] = static_cast<A>((sum - static_cast<double>(high)) + lost);
  static_cast<A*>(problem.rstd)[team.index] =
      static_cast<A>(1 / sqrt(m2[0] / elements + problem.eps));
}

// ---- the second pass ----------------------------------------------------------------------------

template <class T, class O, int V>
__global__ __launch_bounds__(kThreads) void normalize_chunk(const Forward problem,
                                                            const Chunks chunks) {
  using A = Accumulate<T>;
  constexpr int K = kVectorsInFlight;
  const int64_t channels = problem.channels / problem.num_groups;
  const int64_t size = channels * problem.spatial;
  const int64_t index = blockIdx.x / chunks.count, chunk = blockIdx.x % chunks.count;
  const int64_t end = min((chunk + 1) * chunks.size, size), step = int64_t(kThreads) * V;
  const int64_t channel = index % problem.num_groups * channels;
  const Statistics<A> group(problem.mean, problem.rstd, problem.batch * problem.num_groups, index);
  const T* x = static_cast<const T*>(problem.input) + index * size;
  O* y = static_cast<O*>(problem.output) + index * size;
  const ActivationOf<A> activation(problem);
  for (int64_t first = chunk * chunks.size + int64_t(threadIdx.x) * V; first < end;
       first += K * step) {
    Loaded<T, V> data[K];
    each<K>(first, step, end, [&](int k, int64_t i) { data[k] = load<T, V>(x + i); });
    each<K>(first, step, end, [&](int k, int64_t i) {
      A weight[V], bias[V];
      load_affine<T>(problem, channel, i, weight, bias);
      store(y + i, finish<O>(activation, data[k], weight, bias, [&](int) { return group; }));
    });
  }
}

template <class T, class O, int V>
__global__ __launch_bounds__(kThreads, 2) void normalize_channels_last(const Forward problem,
                                                                       const ColumnTiles tiles) {
  using A = Accumulate<T>;
  constexpr int K = kVectorsInFlight;
  const Column<V> column(problem, tiles);
  if (!column.active) return;
  const T* x = static_cast<const T*>(problem.input);
  O* y = static_cast<O*>(problem.output);
  const ColumnParameters<T, V> parameters(problem, column);
  const ActivationOf<A> activation(problem);
  const int64_t step = column.slots;
  for (int64_t row = column.begin + column.slot; row < column.end; row += K * step) {
    Loaded<T, V> data[K];
    each<K>(row, step, column.end,
            [&](int k, int64_t i) { data[k] = load<T, V>(x + column.offset(problem, i)); });
    each<K>(row, step, column.end, [&](int k, int64_t i) {
      store(y + column.offset(problem, i),
            finish<O>(activation, data[k], parameters.weight, parameters.bias,
                      [&](int j) { return parameters.statistics[j]; }));
    });
  }
}

// ---- host ---------------------------------------------------------------------------------------

// How a problem is solved: what workspace_bytes and forward must agree on.
struct ForwardPlan {
  bool channels_last, vectors, by_rows, in_registers, is_small;
  int lanes = 0;    // of normalize_in_registers
  Chunks chunks;    // of a group, or of a sample's rows
  int64_t entries;  // partial moments in a row: of groups, or of channels
  int64_t rows;     // batch * chunks

  explicit ForwardPlan(const Forward& p) {
    const int width = vector_width(p.dtype);
    const int64_t size = group_size(p);
    channels_last = is_channels_last(p);
    // Where channels are neighbours in memory, weight and bias are read as vectors too.
    vectors = (channels_last ? p.channels : size) % width == 0 && aligned(p.input, p.output) &&
              (p.spatial > 1 && !channels_last || aligned(p.weight, p.bias));
    const int V = vectors ? width : 1;
    const int64_t pieces = size / V;
    const int bytes = static_cast<int>(accumulate_size(p.dtype));
    const Holding small = Holding::small(V, bytes), large = Holding::large(V, bytes);
    by_rows = p.spatial == 1 && vectors && pieces <= 32 * most_row_vectors(V, bytes);
    is_small = pieces <= small.capacity();
    in_registers = !channels_last && pieces <= large.capacity();
    if (in_registers) lanes = holding_team_size(pieces, (is_small ? small : large).vectors);
    chunks = channels_last ? ColumnTiles::of(p, V).chunks : Chunks::of(size, kElementsOfChunk);
    entries = channels_last ? p.channels : p.num_groups;
    rows = p.batch * chunks.count;
  }

  size_t partial_bytes(const Forward& p) const {
    return in_registers ? 0 : rows * entries * 2 * accumulate_size(p.dtype);
  }

  // Where the caller does not keep the statistics, the second pass still has to find them.
  size_t statistics_bytes(const Forward& p) const {
    if (in_registers || p.mean != nullptr) return 0;
    return 3 * p.batch * p.num_groups * accumulate_size(p.dtype);
  }
};

// `vectors`: of a row of a group.
template <class T, class O, int V>
cudaError_t launch_rows(const Forward& p, int64_t vectors, cudaStream_t stream) {
  constexpr int most = most_row_vectors(V, sizeof(Accumulate<T>));
  const int held = vectors > 64 ? most : vectors > 32 ? 2 : 1;
  const auto kernel = held == most ? normalize_rows<T, O, V, most>
                      : held == 2  ? normalize_rows<T, O, V, 2>
                                   : normalize_rows<T, O, V, 1>;
  const int lanes = team_size(vectors, vectors);
  // 65536 threads fill the largest GPUs of 2026 once, at the registers this kernel needs.  At most
  // 8 rounds of each, because longer ones end at different times.
  const int64_t rows = std::clamp<int64_t>(ceil_div(p.batch * p.num_groups * lanes, 65536), 1,
                                           8 * kVectorsInFlight / held);
  const int64_t slices = ceil_div(p.batch, rows);
  return launch_teams(kernel, slices * p.num_groups, lanes, kThreads, stream, p, lanes, slices);
}

template <class T, class O, int V>
cudaError_t forward_as(Forward p, const ForwardPlan& plan, void* workspace, cudaStream_t stream) {
  using A = Accumulate<T>;
  const int64_t groups = p.batch * p.num_groups;
  if constexpr (V > 1) {
    if (plan.by_rows) return launch_rows<T, O, V>(p, group_size(p) / V, stream);
  }
  if (plan.in_registers) {
    constexpr Holding small = Holding::small(V, sizeof(A)), large = Holding::large(V, sizeof(A));
    const auto kernel = plan.is_small
                            ? normalize_in_registers<T, O, V, small.vectors, small.threads>
                            : normalize_in_registers<T, O, V, large.vectors, large.threads>;
    return launch_teams(kernel, groups, plan.lanes, kThreads, stream, p, plan.lanes);
  }
  auto* partial = static_cast<Pair<A>*>(workspace);
  if (p.mean == nullptr) {
    A* statistics = reinterpret_cast<A*>(partial + plan.rows * plan.entries);
    p.mean = statistics;
    p.rstd = statistics + 2 * groups;
  }
  cudaError_t error;
  const int64_t per_group = plan.entries / p.num_groups;
  const int lanes = team_size(plan.chunks.count * per_group, 128);
  if (plan.channels_last) {
    const ColumnTiles tiles = ColumnTiles::of(p, V);
    const int64_t blocks = tiles.blocks(p);
    error = launch(moments_channels_last<T, V>, blocks, kThreads, stream, p, tiles, partial);
    if (error != cudaSuccess) return error;
    error = launch_teams(merge_moments<T>, groups, lanes, kThreads, stream, p, plan.chunks, partial,
                         lanes, per_group, p.spatial, per_group);
    if (error != cudaSuccess) return error;
    return launch(normalize_channels_last<T, O, V>, blocks, kThreads, stream, p, tiles);
  }
  const int64_t blocks = groups * plan.chunks.count;
  error = launch(moments<T, V>, blocks, kThreads, stream, p, plan.chunks, partial);
  if (error != cudaSuccess) return error;
  error = launch_teams(merge_moments<T>, groups, lanes, kThreads, stream, p, plan.chunks, partial,
                       lanes, int64_t(1), group_size(p), group_size(p));
  if (error != cudaSuccess) return error;
  return launch(normalize_chunk<T, O, V>, blocks, kThreads, stream, p, plan.chunks);
}

template <class T, class O>
cudaError_t forward_typed(const Forward& problem, void* workspace, cudaStream_t stream) {
  const ForwardPlan plan(problem);
  if (plan.vectors) return forward_as<T, O, 16 / sizeof(T)>(problem, plan, workspace, stream);
  return forward_as<T, O, 1>(problem, plan, workspace, stream);
}

}  // namespace fxfuse::cuda
