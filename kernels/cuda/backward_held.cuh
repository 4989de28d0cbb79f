// Backward of GroupNorm + activation where a group's x and dy fit into shared memory.
//
// Idea.  x and dy are read once: a first look gives the sums of dz and dz * x^ over each channel,
// from which the group's means follow, a second one gives dinput.  A block stays and takes one tile
// after the other, and as soon as a thread has read a vector for the last time, that of the next
// tile is on its way to the same place: the memory never waits for a reduction.
//
// Work split.  planes_backward, for contiguous groups: a tile is several groups, or one, or, in a
// cluster of up to 8 blocks, a part of one.  Teams of lanes take segments of channels, so that the
// sums of a channel meet in few shuffles.  tiles_backward, for channels_last: a tile is a range of
// whole groups, 128 bytes or more where there are so many channels, and all pixels or, in a
// cluster, a part of them; a thread stays with its column.
//
// Limits.  Half of the shared memory of a cluster's multiprocessors, for x and dy: groups of 450 KB
// on an H100, or, for channels_last, ranges of groups of 900 KB; of 110 KB and less where there are
// no clusters.
//
// Fallback.  backward_streamed.cuh, which reads x and dy twice.  Where a size or a pointer forbids
// 16-byte accesses along a channel, V is 1: planes_backward still copies 16 bytes at a time to
// shared memory, but only when all of the tile before has been read.
#pragma once
#include "gradient.cuh"

namespace fxfuse::cuda {

// Sums or means of the groups of a tile, in the shared memory of each of its blocks.
template <class A>
struct GroupSums {
  Pair<A>* of_member;  // 2 of (cluster, groups), used in turn
  Pair<A>* means;      // (groups)

  // From the weighted sums over this block's part, which sum_of(group, lane) gives as one share for
  // each lane of a warp, to the means over the groups.  Called by all threads of the cluster.
  template <class S>
  FXFUSE_INLINE void exchange(int cluster, int member, int groups, int round, A share,
                              S sum_of) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Pair<A>* here = of_member + round % 2 * cluster * groups;
    for (int group = warp; group < groups; group += static_cast<int>(blockDim.x) / 32) {
      Pair<A> sums = sum_of(group, lane);
      sum_over_lanes(sums.at, 32);
      if (cluster > 1) {
        if (lane < cluster) *of_block(&here[member * groups + group], lane) = sums;
      } else if (lane == 0) {
        means[group] = {sums.at[0] * share, sums.at[1] * share};
      }
    }
    if (cluster > 1) {
      cluster_barrier();
      for (int group = threadIdx.x; group < groups; group += blockDim.x) {
        Pair<A> sums = {};
        for (int other = 0; other < cluster; ++other) add(sums, here[other * groups + group]);
        means[group] = {sums.at[0] * share, sums.at[1] * share};
      }
    }
    __syncthreads();
  }
};

// ---- contiguous groups --------------------------------------------------------------------------

// partial is (batch * parts, channels).
template <class T, class O, int V>
__global__ __launch_bounds__(kThreads, held_blocks(sizeof(Accumulate<T>))) void planes_backward(
    const Backward problem, const HeldPlanes held, const int blocks,
    Pair<Accumulate<T>>* const partial) {
  using A = Accumulate<T>;
  constexpr int U = kElementsAtOnce / V;
  extern __shared__ __align__(16) char memory[];
  let_next_kernel_start();

  const int vectors = static_cast<int>(problem.spatial / V);  // of a channel
  const int per_group = static_cast<int>(problem.channels / problem.num_groups);
  const int size = per_group * static_cast<int>(problem.spatial);
  const int tile_planes = held.groups * per_group;
  const int64_t all_planes = problem.batch * problem.channels;
  const int member = static_cast<int>(blockIdx.x % held.cluster);
  const int first_task = member * held.tasks;
  // Of the tile: where this block begins.  Segments of a channel lie behind one another.
  const auto start_of = [&](int task) {
    return task / held.segments * vectors + task % held.segments * held.length;
  };
  const int begin = start_of(first_task), first_plane = first_task / held.segments;

  char* const x_room = memory;
  char* const dy_room = x_room + held.room(V, sizeof(T));
  Pair<A>* const of_task = reinterpret_cast<Pair<A>*>(dy_room + held.room(V, sizeof(O)));
  Pair<A>* const affine = of_task + held.tasks;  // weight and bias of the channels
  const GroupSums<A> sums_of_groups = {affine + held.planes,
                                       affine + held.planes + 2 * held.cluster * held.groups};
  Pair<A>* const centers = sums_of_groups.means + held.groups;  // the mean and the shift
  Pair<A>* const rstds = centers + held.groups;                 // in at[0]

  const int teams = kThreads / held.lanes, team = threadIdx.x / held.lanes;
  const int rank = threadIdx.x % held.lanes;
  const int rounds = (held.tasks + teams - 1) / teams;

  // Tasks of this block in a tile: only the last tile may have fewer than the others.
  const auto tasks_of = [&](int64_t tile) {
    const int64_t planes = min(all_planes - tile * tile_planes, int64_t(tile_planes));
    return max(min(static_cast<int>(planes) * held.segments - first_task, held.tasks), 0);
  };
  const auto end_of = [&](int task, int tasks) {  // relative to begin, as all that follow
    if (task >= tasks) return 0;
    const int segment = (first_task + task) % held.segments;
    const int plane = (first_task + task) / held.segments;
    return plane * vectors + min((segment + 1) * held.length, vectors) - begin;
  };
  const auto offset_of = [&](int64_t tile) {  // in elements
    return (tile * tile_planes * vectors + begin) * V;
  };
  const T* const input = static_cast<const T*>(problem.input);
  const O* const grad_output = static_cast<const O*>(problem.grad_output);
  const auto fetch_vector = [&](int64_t offset, int i) {
    if constexpr (V > 1) {
      copy_async(reinterpret_cast<Loaded<T, V>*>(x_room) + i, input + offset + i * V);
      copy_async(reinterpret_cast<Loaded<O, V>*>(dy_room) + i, grad_output + offset + i * V);
    }
  };
  // Calls body(task, first, end) for the segments of this thread's team, as often in every team.
  const auto over_tasks = [&](int tasks, auto body) {
    for (int round = 0; round < rounds; ++round) {
      const int task = round * teams + team;
      const int start = task < tasks ? start_of(first_task + task) - begin : 0;
      body(task, start + rank, end_of(task, tasks));
    }
  };
  // One channel for each thread, one group too.
  Pair<A> next_affine = {}, next_center = {};
  A next_rstd = 0;
  const auto fetch_parameters = [&](int64_t tile) {
    const int t = static_cast<int>(threadIdx.x);
    const int64_t plane = tile * tile_planes + first_plane + t;
    if (t < held.planes && plane < all_planes) {
      const bool wide = affine_is_wide(problem);
      const int64_t channel = plane % problem.channels;
      next_affine = {load_channel<T>(problem.weight, wide, channel, A(1)),
                     load_channel<T>(problem.bias, wide, channel, A(0))};
    }
    const int64_t group = tile * held.groups + t;
    if (t < held.groups && group < problem.batch * problem.num_groups) {
      const auto normal = load_normal<A>(problem, group);
      next_center = {normal.mean, normal.shift};
      next_rstd = normal.rstd;
    }
  };

  const int64_t first_tile = blockIdx.x / held.cluster, stride = blocks / held.cluster;
  fetch_parameters(first_tile);
  if constexpr (V > 1) {
    over_tasks(tasks_of(first_tile), [&](int, int first, int end) {
      for (int i = first; i < end; i += held.lanes) fetch_vector(offset_of(first_tile), i);
    });
  }
  // No block writes to another that has not begun.
  if (held.cluster > 1) cluster_barrier();
  const ActivationOf<A, O> activation(problem);
  int round = 0;
  for (int64_t tile = first_tile; tile < held.tiles; tile += stride, ++round) {
    const int tasks = tasks_of(tile);
    const int64_t offset = offset_of(tile);
    const T* x = reinterpret_cast<const T*>(x_room);
    const O* dy = reinterpret_cast<const O*>(dy_room);
    if constexpr (V == 1) {
      const int count = tasks > 0 ? end_of(tasks - 1, tasks) : 0;
      const int64_t elements = all_planes * problem.spatial;
      Staged<T>{x_room}.copy(input + offset, count, input + elements);
      Staged<O>{dy_room}.copy(grad_output + offset, count, grad_output + elements);
      x = Staged<T>{x_room}.begin(input + offset);
      dy = Staged<O>{dy_room}.begin(grad_output + offset);
    }
    if (threadIdx.x < held.planes) affine[threadIdx.x] = next_affine;
    if (threadIdx.x < held.groups) {
      centers[threadIdx.x] = next_center;
      rstds[threadIdx.x] = {next_rstd, 0};
    }
    wait_for_all_copies();
    __syncthreads();

    // Calls body(first of U vectors, their end, weight, group, xhat, dz).
    const auto over_vectors = [&](int task, int first, int end, auto body) {
      const int plane = (first_task + min(task, held.tasks - 1)) / held.segments;
      const int group = held.cluster > 1 ? 0 : plane / per_group;
      const Pair<A> parameters = affine[plane - first_plane];
      const Pair<A> center = centers[group];
      Normal<A> normal;
      normal.mean = center.at[0];
      normal.shift = center.at[1];
      normal.rstd = rstds[group].at[0];
      for (int base = first; base < end; base += U * held.lanes) {
        Loaded<T, V> x_data[U] = {};
        Loaded<O, V> dy_data[U] = {};
        each<U>(base, held.lanes, end, [&](int u, int i) {
          x_data[u] = load<T, V>(x + i * V);
          dy_data[u] = load<O, V>(dy + i * V);
        });
        A xhat[U * V], dz[U * V];
        differentiate(
            activation, x_data, dy_data,
            [&](int i) { return normal.only_if(base + i / V * held.lanes < end); },
            [&](int) { return parameters.at[0]; }, [&](int) { return parameters.at[1]; }, xhat, dz);
        body(base, parameters.at[0], group, normal.rstd, xhat, dz);
      }
    };
    over_tasks(tasks, [&](int task, int first, int end) {
      Pair<A> sums = {};
      over_vectors(task, first, end, [&](int, A, int, A, const A(&xhat)[U* V], const A(&dz)[U* V]) {
        Pair<A> here = {};
#pragma unroll
        for (int i = 0; i < U * V; ++i) {
          here.at[0] += dz[i];
          here.at[1] += dz[i] * xhat[i];
        }
        add(sums, here);
      });
      sum_over_lanes(sums.at, held.lanes);
      if (rank == 0 && task < held.tasks) of_task[task] = sums;  // 0 past the last
    });
    __syncthreads();

    if (wants_affine(problem)) {
      // Where blocks share channels, each has a row of its own, in which it leaves no gap.
      const bool sharing = held.parts > 1;
      const int from_plane = sharing ? 0 : first_plane;
      const int to_plane =
          static_cast<int>(min(int64_t(sharing ? tile_planes : first_plane + held.planes),
                               min(all_planes - tile * tile_planes, int64_t(tile_planes))));
      for (int plane = from_plane + static_cast<int>(threadIdx.x); plane < to_plane;
           plane += kThreads) {
        double sums[2] = {};
        const int from = max(plane * held.segments - first_task, 0);
        const int to = min((plane + 1) * held.segments - first_task, tasks);
        for (int task = from; task < to; ++task) {
          sums[0] += of_task[task].at[0];
          sums[1] += of_task[task].at[1];
        }
        const int64_t of_all = tile * tile_planes + plane;
        const int64_t row = of_all / problem.channels * held.parts + (sharing ? member : 0);
        write_partial<T>(problem, partial, row, of_all % problem.channels,
                         Pair<A>{static_cast<A>(sums[0]), static_cast<A>(sums[1])});
      }
    }
    const int64_t next_tile = tile + stride;
    const bool more = next_tile < held.tiles;
    if (more) fetch_parameters(next_tile);
    const int next_tasks = V > 1 && more ? tasks_of(next_tile) : 0;
    const int64_t next_offset = offset_of(next_tile);
    if (problem.dinput == nullptr) {
      over_tasks(next_tasks, [&](int, int first, int end) {
        for (int i = first; i < end; i += held.lanes) fetch_vector(next_offset, i);
      });
      __syncthreads();  // before the parameters are replaced
      continue;
    }
    const int of_group = held.cluster > 1 ? tasks : per_group * held.segments;
    sums_of_groups.exchange(
        held.cluster, member, held.groups, round, A(1) / size, [&](int group, int lane) {
          Pair<A> sums = {};
          const int to = min((group + 1) * of_group, tasks);
          for (int task = group * of_group + lane; task < to; task += 32) {
            const A weight = affine[(first_task + task) / held.segments - first_plane].at[0];
            sums.at[0] += of_task[task].at[0] * weight;
            sums.at[1] += of_task[task].at[1] * weight;
          }
          return sums;
        });
    T* const dinput = static_cast<T*>(problem.dinput) + offset;
    over_tasks(tasks, [&](int task, int first, int end) {
      const int next_end = end_of(task, next_tasks);
      over_vectors(
          task, first, end,
          [&](int base, A weight, int group, A rstd, const A(&xhat)[U* V], const A(&dz)[U* V]) {
            const InputGradient<A> gradient(rstd, sums_of_groups.means[group], size);
            const A scaled = weight * gradient.rstd;
            each<U>(base, held.lanes, end, [&](int u, int i) {
              Vector<T, V> dx;
#pragma unroll
              for (int j = 0; j < V; ++j) {
                const int e = u * V + j;
                dx.at[j] = static_cast<T>(gradient(dz[e], scaled, xhat[e]));
              }
              store(dinput + i * V, dx);
              if (i < next_end) fetch_vector(next_offset, i);
            });
          });
    });
    __syncthreads();  // before the parameters, and where V is 1 the data, are replaced
  }
}

// ---- channels_last ------------------------------------------------------------------------------

// partial is (batch * cluster, channels).  A vector lies within S groups, 1 or, for all one knows,
// V.
template <class T, class O, int V, int S>
__global__ __launch_bounds__(kThreads, held_blocks(sizeof(Accumulate<T>))) void tiles_backward(
    const Backward problem, const HeldTiles held, const int blocks,
    Pair<Accumulate<T>>* const partial) {
  using A = Accumulate<T>;
  extern __shared__ __align__(16) char memory[];
  let_next_kernel_start();
  const int channels = held.width * V;  // of a tile
  const int per_group = static_cast<int>(problem.channels / problem.num_groups);
  const int size = per_group * static_cast<int>(problem.spatial);
  Loaded<T, V>* const x = reinterpret_cast<Loaded<T, V>*>(memory);
  Loaded<O, V>* const dy = reinterpret_cast<Loaded<O, V>*>(x + held.rows * held.width);
  Pair<A>* const of_slot = reinterpret_cast<Pair<A>*>(dy + held.rows * held.width);
  Pair<A>* const of_channel = of_slot + held.sums() * channels;  // times the weight
  const GroupSums<A> sums_of_groups = {of_channel + channels,
                                       of_channel + channels + 2 * held.cluster * held.groups};

  const int member = static_cast<int>(blockIdx.x % held.cluster);
  const int slot = static_cast<int>(threadIdx.x) / held.width;
  const int column = static_cast<int>(threadIdx.x) % held.width;
  const int first_row = member * held.rows;
  const int end =
      slot < held.slots ? max(min(static_cast<int>(problem.spatial) - first_row, held.rows), 0) : 0;
  // Of the first vector of this thread, in elements; its next rows are `step` further.
  const auto offset_of = [&](int64_t tile) {
    return (tile / held.across * problem.spatial + first_row) * problem.channels +
           tile % held.across * channels + column * V;
  };
  const auto fetch = [&](int64_t offset, int row) {
    const int64_t from = offset + row * problem.channels;
    const int i = row * held.width + column;
    copy_async(x + i, static_cast<const T*>(problem.input) + from);
    copy_async(dy + i, static_cast<const O*>(problem.grad_output) + from);
  };
  const int64_t first_tile = blockIdx.x / held.cluster, stride = blocks / held.cluster;
  for (int row = slot; row < end; row += held.slots) fetch(offset_of(first_tile), row);

  // No block writes to another that has not begun.
  if (held.cluster > 1) cluster_barrier();
  const ActivationOf<A, O> activation(problem);
  int round = 0;
  for (int64_t tile = first_tile; tile < held.tiles; tile += stride, ++round) {
    const int64_t sample = tile / held.across, offset = offset_of(tile);
    const int64_t channel = tile % held.across * channels + column * V;
    A weight[V], bias[V];
    load_affine<T>(problem, channel, weight, bias);
    const int64_t first_group = sample * problem.num_groups + tile % held.across * held.groups;
    Normal<A> normal[S];
#pragma unroll
    for (int s = 0; s < S; ++s) {
      normal[s] = load_normal<A>(problem, first_group + (column * V + s) / per_group);
    }
    Pair<A> sums[V] = {};
    const auto derive = [&](int row, A(&xhat)[V], A(&dz)[V]) {
      const Loaded<T, V> x_data[1] = {x[row * held.width + column]};
      const Loaded<O, V> dy_data[1] = {dy[row * held.width + column]};
      differentiate(
          activation, x_data, dy_data, [&](int j) { return normal[j % S]; },
          [&](int j) { return weight[j]; }, [&](int j) { return bias[j]; }, xhat, dz);
    };
    wait_for_all_copies();
    for (int row = slot; row < end; row += held.slots) {
      A xhat[V], dz[V];
      derive(row, xhat, dz);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        sums[j].at[0] += dz[j];
        sums[j].at[1] += dz[j] * xhat[j];
      }
    }
    if (held.fold) {
#pragma unroll
      for (int j = 0; j < V; ++j) {
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) {
          if (offset >= held.width) {
            sums[j].at[0] += __shfl_xor_sync(~0u, sums[j].at[0], offset);
            sums[j].at[1] += __shfl_xor_sync(~0u, sums[j].at[1], offset);
          }
        }
      }
    }
    if (held.fold ? static_cast<int>(threadIdx.x) % 32 < held.width : slot < held.slots) {
      const int row = held.fold ? static_cast<int>(threadIdx.x) / 32 : slot;
#pragma unroll
      for (int j = 0; j < V; ++j) of_slot[row * channels + column * V + j] = sums[j];
    }
    __syncthreads();
    for (int c = static_cast<int>(threadIdx.x); c < channels; c += kThreads) {
      Pair<A> total = {};
#pragma unroll 8
      for (int row = 0; row < held.sums(); ++row) add(total, of_slot[row * channels + c]);
      const int64_t its = tile % held.across * channels + c;
      if (wants_affine(problem)) {
        write_partial<T>(problem, partial, sample * held.cluster + member, its, total);
      }
      const A w = load_channel<T>(problem.weight, affine_is_wide(problem), its, A(1));
      of_channel[c] = {total.at[0] * w, total.at[1] * w};
    }
    __syncthreads();
    const int64_t next_tile = tile + stride;
    const int next_end = next_tile < held.tiles ? end : 0;
    const int64_t next_offset = offset_of(next_tile);
    if (problem.dinput == nullptr) {
      for (int row = slot; row < next_end; row += held.slots) fetch(next_offset, row);
      continue;
    }
    sums_of_groups.exchange(held.cluster, member, held.groups, round, A(1) / size,
                            [&](int group, int lane) {
                              Pair<A> total = {};
                              for (int c = lane; c < per_group; c += 32) {
                                add(total, of_channel[group * per_group + c]);
                              }
                              return total;
                            });
    InputGradient<A> gradient[S];
#pragma unroll
    for (int s = 0; s < S; ++s) {
      const Pair<A> means = sums_of_groups.means[(column * V + s) / per_group];
      gradient[s] = InputGradient<A>(normal[s].rstd, means, size);
    }
    T* const dinput = static_cast<T*>(problem.dinput) + offset;
    for (int row = slot; row < end; row += held.slots) {
      A xhat[V], dz[V];
      derive(row, xhat, dz);
      Vector<T, V> dx;
#pragma unroll
      for (int j = 0; j < V; ++j) {
        dx.at[j] =
            static_cast<T>(gradient[j % S](dz[j], weight[j] * gradient[j % S].rstd, xhat[j]));
      }
      store(dinput + row * problem.channels, dx);
      if (next_end > 0) fetch(next_offset, row);
    }
  }
}

}  // namespace fxfuse::cuda
