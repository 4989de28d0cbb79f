// Backward of GroupNorm + activation where there is one element per channel, as behind a Linear.
//
// Idea.  Threads stay with their channels and walk down the batch: weight, bias and the sums for
// dweight and dbias stay in their registers, and the next rows are on their way while they work on
// one.  x and dy are read once.
//
// Work split.  rows_backward, for groups that a warp holds in its registers: a block's four warps
// take the same columns of different rows, so that their sums leave as one.  long_rows_backward: a
// block, or a cluster of up to 8, for a group.  Rows wait in a ring in shared memory; each is
// looked at twice, for the group's two sums, and, when those of all the cluster's blocks have come,
// for dinput.  In between the threads add up the next row, so nobody waits for an exchange.
//
// Limits.  rows_backward: 512 elements in a group (256 doubles).  long_rows_backward: 4096 elements
// (2048 doubles) for each block of the cluster.
//
// Fallback.  Longer groups, or those over 4096 elements where there are no clusters, are cut into
// pieces that do not exchange anything: long_rows_backward gives the sums over each piece only, and
// dinput comes from a second pass (backward_streamed.cuh).  Where a pointer or a size forbids
// 16-byte accesses, V is 1: rows_backward goes element by element, long_rows_backward still copies
// 16 bytes at a time to shared memory.
#pragma once
#include "gradient.cuh"

namespace fxfuse::cuda {

constexpr int kBackwardRowStages = 4;  // rows of a warp that are on their way or worked on

// A thread's vectors of a row, and the statistics of its group.
template <class T, class O, int V, int K>
struct Row {
  using A = Accumulate<T>;
  Loaded<T, V> x[K];
  Loaded<O, V> dy[K];
  A mean, rest, rstd;
};

// The last rows of every thread of a block in shared memory, each seen by that thread alone.
template <class T, class O, int V, int K>
class RowRing {
 public:
  using A = Accumulate<T>;
  static constexpr int kBytes = kBackwardRowStages * kBackwardRowThreads *
                                (K * (sizeof(Loaded<T, V>) + sizeof(Loaded<O, V>)) + 3 * sizeof(A));

  FXFUSE_INLINE explicit RowRing(void* memory)
      : x_(static_cast<Loaded<T, V>*>(memory)),
        dy_(reinterpret_cast<Loaded<O, V>*>(x_ + kBackwardRowStages * K * kBackwardRowThreads)),
        statistics_(reinterpret_cast<A*>(dy_ + kBackwardRowStages * K * kBackwardRowThreads)) {}

  FXFUSE_INLINE Loaded<T, V>* x(int stage, int k) const { return x_ + place(stage, K, k); }
  FXFUSE_INLINE Loaded<O, V>* dy(int stage, int k) const { return dy_ + place(stage, K, k); }
  FXFUSE_INLINE A* statistics(int stage, int n) const { return statistics_ + place(stage, 3, n); }

  FXFUSE_INLINE void read(int stage, Row<T, O, V, K>& row) const {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      row.x[k] = *x(stage, k);
      row.dy[k] = *dy(stage, k);
    }
    row.mean = *statistics(stage, 0);
    row.rest = *statistics(stage, 1);
    row.rstd = *statistics(stage, 2);
  }

 private:
  FXFUSE_INLINE static int place(int stage, int count, int n) {
    return (stage * count + n) * kBackwardRowThreads + static_cast<int>(threadIdx.x);
  }

  Loaded<T, V>* x_;
  Loaded<O, V>* dy_;
  A* statistics_;
};

// Slice s of a column takes the rows whose number is s modulo the slices, where what a block takes
// at once counts as one row.
template <class T, class O, int V>
__global__ __launch_bounds__(kBackwardRowThreads,
                             row_blocks(V)) void rows_backward(const Backward problem,
                                                               const WarpRows rows,
                                                               Pair<Accumulate<T>>* const partial) {
  using A = Accumulate<T>;
  constexpr int E = row_elements(sizeof(A)), K = E / V;
  constexpr int U = kElementsAtOnce / V;  // vectors at once
  extern __shared__ __align__(16) char memory[];
  let_next_kernel_start();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int team = lane / rows.lanes;
  const int64_t column = blockIdx.x % rows.columns, slice = blockIdx.x / rows.columns;
  const int64_t group = column * rows.groups + team % rows.groups;
  const int size = static_cast<int>(problem.channels / problem.num_groups);
  const int first = lane % rows.lanes * V, step = rows.lanes * V;
  const int work = group < problem.num_groups ? size : 0;
  const int64_t channel = group * size;
  const int rows_of_warp = 32 / rows.lanes / rows.groups;
  const int64_t stride = rows.slices * kRowWarps * rows_of_warp;
  const int64_t groups = problem.batch * problem.num_groups;
  const T* const input = static_cast<const T*>(problem.input);
  const O* const grad_output = static_cast<const O*>(problem.grad_output);
  const A* const means = static_cast<const A*>(problem.mean);
  const A* const rstds = static_cast<const A*>(problem.rstd);

  A weight[E] = {}, bias[E] = {}, dweight[E] = {}, dbias[E] = {};
  const auto load_weights = [&] {
    each<K>(first, step, work, [&](int k, int i) {
      A w[V], b[V];
      load_affine<T>(problem, channel + i, w, b);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        weight[k * V + j] = w[j];
        bias[k * V + j] = b[j];
      }
    });
  };
  const ActivationOf<A, O> activation(problem);
  const A share = A(1) / size;
  const auto work_on = [&](const Row<T, O, V, K>& row, int64_t sample) {
    const Normal<A> normal(row.mean, row.rest, row.rstd);
    A xhat[E], normalized[E];
    Pair<A> sums = {};
#pragma unroll
    for (int c = 0; c < K; c += U) {
      Loaded<T, V> x[U];
      Loaded<O, V> dy[U];
      A xhat_here[U * V], dz[U * V];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        x[u] = row.x[c + u];
        dy[u] = row.dy[c + u];
      }
      differentiate(
          activation, x, dy,
          [&](int i) { return normal.only_if(first + (c + i / V) * step < work); },
          [&](int i) { return weight[c * V + i]; }, [&](int i) { return bias[c * V + i]; },
          xhat_here, dz);
      Pair<A> here = {};
#pragma unroll
      for (int i = 0; i < U * V; ++i) {
        const int e = c * V + i;
        xhat[e] = xhat_here[i];
        dbias[e] += dz[i];
        dweight[e] += dz[i] * xhat[e];
        normalized[e] = product(dz[i], weight[e]);
        here.at[0] += normalized[e];
        here.at[1] += normalized[e] * xhat[e];
      }
      add(sums, here);
    }
    if (problem.dinput == nullptr) return;
    sum_over_lanes(sums.at, rows.lanes);
    const InputGradient<A> gradient(row.rstd, {sums.at[0] * share, sums.at[1] * share}, size);
    T* dinput = static_cast<T*>(problem.dinput) + sample * problem.channels + channel;
    each<K>(first, step, sample < problem.batch ? work : 0, [&](int k, int i) {
      Vector<T, V> dx;
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const int e = k * V + j;
        dx.at[j] = static_cast<T>(gradient(normalized[e], gradient.rstd, xhat[e]));
      }
      store(dinput + i, dx);
    });
  };

  // All lanes of a warp make the same number of rounds, because they meet in the shuffles.
  const int64_t first_of_warp = (slice * kRowWarps + warp) * rows_of_warp;
  const int64_t ahead_of_warp = team / rows.groups;
  // What does not exist, of the row or all of it, is 0: x, dy and the statistics.
  if constexpr (V > 1) {
    const RowRing<T, O, V, K> ring(memory);
    const auto fetch = [&](int stage, int64_t base) {
      const int64_t sample = base + ahead_of_warp;
      const int end = sample < problem.batch ? work : 0;
      const int64_t offset = end > 0 ? sample * problem.channels + channel : 0;
      const int64_t its_group = end > 0 ? sample * problem.num_groups + group : 0;
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const int i = first + k * step;
        const int64_t from = i < end ? offset + i : 0;
        copy_async(ring.x(stage, k), input + from, i < end);
        copy_async(ring.dy(stage, k), grad_output + from, i < end);
      }
      copy_async_value(ring.statistics(stage, 0), means + its_group, end > 0);
      copy_async_value(ring.statistics(stage, 1), means + groups + its_group, end > 0);
      copy_async_value(ring.statistics(stage, 2), rstds + its_group, end > 0);
      commit_copies();
    };
#pragma unroll
    for (int stage = 0; stage < kBackwardRowStages - 1; ++stage)
      fetch(stage, first_of_warp + stage * stride);
    load_weights();
    int stage = 0;
    for (int64_t base = first_of_warp; base < problem.batch; base += stride) {
      fetch((stage + kBackwardRowStages - 1) % kBackwardRowStages,
            base + (kBackwardRowStages - 1) * stride);
      wait_for_copies<kBackwardRowStages - 1>();
      Row<T, O, V, K> row;
      ring.read(stage, row);
      work_on(row, base + ahead_of_warp);
      stage = (stage + 1) % kBackwardRowStages;
    }
    wait_for_all_copies();
  } else {
    const auto fetch = [&](Row<T, O, V, K>& row, int64_t base) {
      const int64_t sample = base + ahead_of_warp;
      const int end = sample < problem.batch ? work : 0;
      const int64_t offset = sample * problem.channels + channel;
      row = {};
      each<K>(first, step, end, [&](int k, int i) {
        row.x[k] = load<T, V>(input + offset + i);
        row.dy[k] = load<O, V>(grad_output + offset + i);
      });
      if (end > 0) {
        const int64_t its_group = sample * problem.num_groups + group;
        row.mean = means[its_group];
        row.rest = means[groups + its_group];
        row.rstd = rstds[its_group];
      }
      // ptxas may sink a load below the first arithmetic, for two latencies instead of one.
      __syncwarp();
    };
    Row<T, O, V, K> even, odd;
    fetch(even, first_of_warp);
    load_weights();
    for (int64_t base = first_of_warp; base < problem.batch;) {
      fetch(odd, base + stride);  // in flight during all that follows
      work_on(even, base + ahead_of_warp);
      base += stride;
      if (base >= problem.batch) break;
      fetch(even, base + stride);
      work_on(odd, base + ahead_of_warp);
      base += stride;
    }
  }

  if (!wants_affine(problem)) return;
  Pair<A>* const of_thread = reinterpret_cast<Pair<A>*>(memory);  // (E, threads)
  __syncthreads();                                                // the ring has been read
#pragma unroll
  for (int e = 0; e < E; ++e)
    of_thread[e * kBackwardRowThreads + threadIdx.x] = {dbias[e], dweight[e]};
  __syncthreads();
  const int apart = rows.lanes * rows.groups;  // lanes that have the same channels
  for (int n = threadIdx.x; n < E * apart; n += kBackwardRowThreads) {
    const int e = n / apart, from = n % apart;
    const int64_t its_group = column * rows.groups + from / rows.lanes;
    const int i = (from % rows.lanes + e / V * rows.lanes) * V + e % V;
    if (its_group >= problem.num_groups || i >= size) continue;
    Pair<A> sums = {};
    for (int other = from; other < kBackwardRowThreads; other += apart) {
      add(sums, of_thread[e * kBackwardRowThreads + other]);
    }
    write_partial<T>(problem, partial, slice, its_group * size + i, sums);
  }
}

// Bytes of shared memory: the ring, or the threads' sums.
template <class T, class O, int V>
constexpr int rows_bytes() {
  constexpr int kElements = row_elements(sizeof(Accumulate<T>));
  constexpr int kSums = kElements * kBackwardRowThreads * sizeof(Pair<Accumulate<T>>);
  if constexpr (V == 1) return kSums;
  return std::max(kSums, RowRing<T, O, V, kElements / V>::kBytes);
}

// ---- long rows ----------------------------------------------------------------------------------

// A cluster for each slice and each group of channels; slice s takes the samples s, s + slices, ...
// Where groups have pieces, a block for each, which gives its sums of dz * weight and of
// dz * weight * x^: of_piece is (batch, num_groups, pieces), or null.
template <class T, class O, int V>
__global__
__launch_bounds__(kThreads, long_row_blocks(sizeof(Accumulate<T>))) void long_rows_backward(
    const Backward problem, const LongRows rows, Pair<Accumulate<T>>* const partial,
    Pair<Accumulate<T>>* const of_piece) {
  using A = Accumulate<T>;
  constexpr int E = row_elements(sizeof(A)), K = E / V;
  constexpr int U = V == 1 ? kElementsAtOnce / 2 : kElementsAtOnce / V;  // or registers spill
  constexpr int kStages = ring_rows(sizeof(T));
  extern __shared__ __align__(16) char ring[];
  // Of the last rows, because the fastest thread is that far ahead of the slowest: by one barrier
  // in a block, by two exchanges in a cluster.
  constexpr int kOfWarp = 3, kOfBlock = 4;
  __shared__ Pair<A> of_warp[kOfWarp][kThreads / 32];
  __shared__ Pair<A> of_member[kOfBlock][8];
  __shared__ SharedBarrier arrivals[kOfBlock];
  let_next_kernel_start();

  const int thread = threadIdx.x, threads = blockDim.x, warp = thread / 32, warps = threads / 32;
  const int blocks = rows.cluster * static_cast<int>(rows.pieces);  // of a group
  const int block = static_cast<int>(blockIdx.x % blocks);
  const int num_groups = static_cast<int>(problem.num_groups);  // they are long, so not that many
  const int group = static_cast<int>(blockIdx.x) / blocks % num_groups;
  const int slice = static_cast<int>(blockIdx.x) / blocks / num_groups;
  const int64_t size = problem.channels / num_groups;
  const int width = rows.width(sizeof(A));
  const int64_t begin = int64_t(block) * width, channel = group * size + begin;
  const int work = static_cast<int>(max(min(size - begin, int64_t(width)), int64_t(0)));
  const int first = thread * V, step = threads * V;
  const int count = static_cast<int>((problem.batch - slice + rows.slices - 1) / rows.slices);
  const bool exchanging = rows.cluster > 1 && problem.dinput != nullptr;

  // Where the elements of a row begin, and its group among all.
  const int64_t start = slice * problem.channels + channel, stride = rows.slices * problem.channels;
  const auto input = [&](int row) {
    return static_cast<const T*>(problem.input) + start + row * stride;
  };
  const auto grad_output = [&](int row) {
    return static_cast<const O*>(problem.grad_output) + start + row * stride;
  };
  const int64_t elements = problem.batch * problem.channels;
  const auto group_of = [&](int row) { return (slice + row * rows.slices) * num_groups + group; };
  const int x_bytes = ring_bytes(width, sizeof(T)), dy_bytes = ring_bytes(width, sizeof(O));
  const auto x_room = [&](int row) { return ring + row % kStages * (x_bytes + dy_bytes); };
  const auto dy_room = [&](int row) { return x_room(row) + x_bytes; };
  const auto fetch = [&](int row) {
    if (row < count) {
      if constexpr (V > 1) {
        each<K>(first, step, work, [&](int, int i) {
          copy_async(reinterpret_cast<Loaded<T, V>*>(x_room(row)) + i / V, input(row) + i);
          copy_async(reinterpret_cast<Loaded<O, V>*>(dy_room(row)) + i / V, grad_output(row) + i);
        });
      } else {
        Staged<T>{x_room(row)}.copy(input(row), work,
                                    static_cast<const T*>(problem.input) + elements);
        Staged<O>{dy_room(row)}.copy(grad_output(row), work,
                                     static_cast<const O*>(problem.grad_output) + elements);
      }
    }
    commit_copies();
  };
  const auto normal_of = [&](int row) {
    if (row >= count) return Normal<A>(0, 0, 0);
    return load_normal<A>(problem, group_of(row));
  };

  if (exchanging) {
    if (thread < kOfBlock) {
      arrivals[thread].init(rows.cluster);
      fence_barrier_init();
    }
    __syncthreads();
  }
  for (int row = 0; row < kStages - 2; ++row) fetch(row);
  Normal<A> now, next(0, 0, 0), after_next(0, 0, 0);
  if constexpr (V > 1) after_next = normal_of(0);
  A weight[E] = {}, bias[E] = {}, dweight[E] = {}, dbias[E] = {};
  each<K>(first, step, work, [&](int k, int i) {
    A w[V], b[V];
    load_affine<T>(problem, channel + i, w, b);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      weight[k * V + j] = w[j];
      bias[k * V + j] = b[j];
    }
  });
  if (exchanging) cluster_barrier();  // no block arrives at another that has not begun

  const ActivationOf<A, O> activation(problem);
  // Calls body(c, xhat, dz) for the vectors c to c + U of those that the thread has of a row.
  const auto over_row = [&](int row, const Normal<A>& normal, auto body) {
    const T* x = reinterpret_cast<const T*>(x_room(row));
    const O* dy = reinterpret_cast<const O*>(dy_room(row));
    if constexpr (V == 1) {
      x = Staged<T>{x_room(row)}.begin(input(row));
      dy = Staged<O>{dy_room(row)}.begin(grad_output(row));
    }
#pragma unroll
    for (int c = 0; c < K; c += U) {
      Loaded<T, V> x_data[U] = {};
      Loaded<O, V> dy_data[U] = {};
      each<U>(first + c * step, step, work, [&](int u, int i) {
        x_data[u] = load<T, V>(x + i);
        dy_data[u] = load<O, V>(dy + i);
      });
      A xhat[U * V], dz[U * V];
      differentiate(
          activation, x_data, dy_data,
          [&](int i) { return normal.only_if(first + (c + i / V) * step < work); },
          [&](int i) { return weight[c * V + i]; }, [&](int i) { return bias[c * V + i]; }, xhat,
          dz);
      body(c, xhat, dz);
    }
  };

  // Round r adds up row r + 1 and finishes row r.
  for (int row = -1; row < count; ++row) {
    const int ahead = row + 1;
    now = next;
    if constexpr (V > 1) {
      next = after_next;
      after_next = normal_of(row + 2);
      fetch(row + kStages - 1);  // where row - 1 was, which this thread alone has read
      wait_for_copies<kStages - 2>();
    } else {
      next = normal_of(ahead);  // no register is left to ask for it earlier
      wait_for_copies<kStages - 3>();
      __syncthreads();
    }
    if (ahead < count) {
      Pair<A> sums = {};
      over_row(ahead, next, [&](int c, const A(&xhat)[U* V], const A(&dz)[U* V]) {
        Pair<A> here = {};
#pragma unroll
        for (int i = 0; i < U * V; ++i) {
          const int e = c * V + i;
          dbias[e] += dz[i];
          dweight[e] += dz[i] * xhat[i];
          const A normalized = product(dz[i], weight[e]);
          here.at[0] += normalized;
          here.at[1] += normalized * xhat[i];
        }
        add(sums, here);
      });
      sum_over_lanes(sums.at, 32);
      if (thread % 32 == 0) of_warp[ahead % kOfWarp][warp] = sums;
    }
    __syncthreads();
    if constexpr (V == 1) fetch(row + kStages - 1);  // row - 1 has been read by all
    if (problem.dinput == nullptr) continue;
    const auto of_this_block = [&](int row) {
      Pair<A> sums = {};
      for (int i = 0; i < warps; ++i) add(sums, of_warp[row % kOfWarp][i]);
      return sums;
    };
    if (exchanging && ahead < count && thread < rows.cluster) {
      *of_block(&of_member[ahead % kOfBlock][block], thread) = of_this_block(ahead);
      arrivals[ahead % kOfBlock].arrive_at(thread);
    }
    if (row < 0) continue;
    if (of_piece != nullptr) {
      if (thread == 0) of_piece[group_of(row) * rows.pieces + block] = of_this_block(row);
      continue;
    }
    Pair<A> sums = {};
    if (exchanging) {
      arrivals[row % kOfBlock].wait_for_cluster(row / kOfBlock & 1);
      for (int i = 0; i < rows.cluster; ++i) add(sums, of_member[row % kOfBlock][i]);
    } else {
      sums = of_this_block(row);
    }
    const A share = A(1) / size;
    const InputGradient<A> gradient(now.rstd, {sums.at[0] * share, sums.at[1] * share}, size);
    T* dinput = static_cast<T*>(problem.dinput) + start + row * stride;
    over_row(row, now, [&](int c, const A(&xhat)[U* V], const A(&dz)[U* V]) {
      each<U>(first + c * step, step, work, [&](int u, int i) {
        Vector<T, V> dx;
#pragma unroll
        for (int j = 0; j < V; ++j) {
          const A normalized = product(dz[u * V + j], weight[(c + u) * V + j]);
          dx.at[j] = static_cast<T>(gradient(normalized, gradient.rstd, xhat[u * V + j]));
        }
        store(dinput + i, dx);
      });
    });
  }
  if (wants_affine(problem)) {
    each<K>(first, step, work, [&](int k, int i) {
#pragma unroll
      for (int j = 0; j < V; ++j) {
        write_partial<T>(problem, partial, slice, channel + i + j,
                         Pair<A>{dbias[k * V + j], dweight[k * V + j]});
      }
    });
  }
  if (exchanging) cluster_barrier();  // the others may still write to this block's memory
}

}  // namespace fxfuse::cuda
