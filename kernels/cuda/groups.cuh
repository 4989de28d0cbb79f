// GroupNorm + activation, forward, for contiguous groups that the shared memory of one block, or of
// a cluster of up to 8, holds.
//
// Idea.  All bytes of a group are asked for at once, by asynchronous copies into shared memory that
// take no registers, so that whole groups are on their way while others are worked on.  The moments
// of what has arrived are taken while the rest is on its way; the threads, warps and blocks merge
// them with one barrier, and a pass over shared memory gives the result.  Blocks of a cluster write
// their moments into each other's shared memory.
//
// Statistics.  Mean and M2 of four vectors at a time, in two passes over registers, relative to the
// group's first value; they are merged by Chan's formula in a fixed order.
//
// Work split.  A cluster for each group; its blocks take slices, its threads every blockDim-th
// vector, and each thread reads back only what it copied itself: that needs no barrier.
//
// Limits.  What a slice needs of shared memory.  Vectors are those of 16 bytes counted from the
// start of the tensor; the elements before the first and after the last whole one of a group are
// held one by one, in registers.  So any group size is read and written in vectors.
//
// Fallback.  An input that is not aligned to 16 bytes is copied in pieces of 8 or 4 bytes, or by
// elements; an output that is not, is written by elements.  Without clusters, one block.
//
// Measured.  As in rows.cuh, in bfloat16 (H200, 2026-12-01).  (64, 256, 56, 56) in 32 groups with
// relu: 59 us behind 52; (2, 320, 64, 64) in 32 groups with silu: 6.8 behind 3.8; (4, 320, 128,
// 128): 32 behind 22; (64, 2048, 7, 7) with relu: 14.4 behind 7.9; (1024, 16384) in one group: 28.8
// behind 18.2.  With a cold L2 cache small problems gain most by taking moments while copies are on
// their way: (2, 320, 64, 64) 10.3 in place of 12.0, (2, 1280, 16, 16) 7.6 of 9.2.  Bulk copies in
// place of each thread's own were no faster, nor were walks over several groups in two buffers.
#pragma once
#include "normalize.cuh"

namespace fxfuse::cuda {

template <class T, class O, bool kResidual>
__global__ __launch_bounds__(kMostGroupThreads,
                             sizeof(T) == 8 ? 1 : 2) void normalize_groups(const Forward problem,
                                                                           const Groups plan) {
  using A = Accumulate<T>;
  constexpr int V = 16 / sizeof(T);
  constexpr bool kPivot = kHasPivot<T, O>;
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ SharedBarrier received;
  const int thread = threadIdx.x, threads = blockDim.x, warps = threads / 32;
  const int cluster = 1 << plan.log2_cluster, rank = cluster > 1 ? rank_in_cluster() : 0;
  auto* const held = reinterpret_cast<Loaded<T, V>*>(memory);
  auto* const of_warp = reinterpret_cast<CountedMoments<A>*>(memory + plan.slice * 16);
  A* const staged = reinterpret_cast<A*>(of_warp + cluster * warps);

  const int size = plan.size, channels = plan.channels;
  const int64_t group = blockIdx.x >> plan.log2_cluster;
  const int64_t sample = plan.num_groups.quotient(group);
  const int64_t channel = (group - sample * problem.num_groups) * channels;  // the first
  const int64_t begin = group * size;
  const T* const x = static_cast<const T*>(problem.input) + begin;
  O* const y = static_cast<O*>(problem.output) + begin;

  // The whole vectors: `vectors` from element `head` on; and one loose element for some threads.
  const int head = min(static_cast<int>(-begin & (V - 1)), size), vectors = (size - head) / V;
  const int tail = head + vectors * V;
  const int first = rank * plan.slice, mine = max(0, min(plan.slice, vectors - first));
  const int start = head + first * V;  // of my slice, in elements
  const int loose = thread < head ? thread : thread - head + tail;
  const bool is_loose = rank == 0 && loose < size && (thread < head || loose >= tail);

  if (thread == 0 && cluster > 1) {
    received.init(1);
    fence_barrier_init();
  }
  if (cluster > 1) arrive_at_cluster_barrier();  // "I run, and can be sent to"
  wait_for_previous_kernel();
  let_next_kernel_start();
  // In sets, so that the moments of the first are taken while the others are on their way.
  constexpr int U = sizeof(T) == 8 ? 8 : kVectorsInFlight;
  const int sets = (mine + U * threads - 1) / (U * threads);
#pragma unroll 1
  for (int first = thread; first < sets * U * threads; first += U * threads) {
    each<U>(first, threads, mine, [&](int, int i) {
      if (plan.copy_width == 16) {
        copy_piece<16>(held + i, x + start + i * V);
      } else {
        copy_unaligned(held + i, x + start + i * V, plan.copy_width);
      }
    });
    commit_copies();
  }
  // The residual meanwhile as far as L2, for which neither registers nor shared memory are needed.
  if (kResidual && plan.vector_output && thread == 0 && mine > 0) {
    prefetch_bulk(residual_of(problem, y + start), mine * V * static_cast<int>(sizeof(O)));
  }
  const A pivot = kPivot ? static_cast<A>(x[0]) : A(0);
  const A single = is_loose ? static_cast<A>(x[loose]) : A(0);
  const bool wide = affine_is_wide(problem);
  if (plan.staged) {
#pragma unroll 1
    for (int c = thread; c < channels; c += threads) {
      staged[c] = load_channel<T>(problem.weight, wide, channel + c, A(1));
      staged[channels + c] = load_channel<T>(problem.bias, wide, channel + c, A(0));
    }
  }

  CountedMoments<A> moments = {};
  if (is_loose) moments = {single - pivot, A(0), A(1), A(0)};
  int ahead = sets;
#pragma unroll 1
  for (int first = thread; first < sets * U * threads; first += U * threads) {
    wait_for_copies(--ahead);
    Loaded<T, V> data[U];
    if (first + (U - 1) * threads < mine) {
#pragma unroll
      for (int u = 0; u < U; ++u) data[u] = held[first + u * threads];
      moments.template add<true>(data, U, pivot);
    } else {
#pragma unroll 1
      for (int i = first; i < mine; i += threads) {
        const Loaded<T, V> one[1] = {held[i]};
        moments.template add<true>(one, 1, pivot);
      }
    }
  }
  moments.merge_warp();
  const int lane = thread % 32, place = rank * warps + thread / 32;
  if (cluster > 1) {
    wait_at_cluster_barrier();  // all blocks run
    if (lane < cluster) send_to_block(lane, of_warp + place, &received, moments);
    if (thread == 0) {  // bytes that came before they were announced count too
      received.arrive_and_expect(cluster * warps * static_cast<int>(sizeof(CountedMoments<A>)));
    }
    if (plan.staged) __syncthreads();
    received.wait(0);
  } else {
    if (lane == 0) of_warp[place] = moments;
    __syncthreads();
  }
  moments = {};
#pragma unroll 1
  for (int k = lane; k < cluster * warps; k += 32) moments.merge(of_warp[k]);
  moments.merge_warp();

  Statistics<A> statistics;
  split_mean(pivot, moments.mean, statistics);
  statistics.rstd = rstd_of(moments.m2 / static_cast<A>(size), static_cast<A>(problem.eps));
  if (rank == 0 && thread == 0) save(problem, group, statistics);

  const ActivationOf<A, O> activation(problem);
  const auto center = [&](A value) {
    return kPivot ? (value - statistics.mean) - statistics.rest : value - statistics.mean;
  };
  // The residual of the thread's next vector is on its way while one is worked on, where registers
  // allow.
  constexpr bool kAhead = kResidual && sizeof(O) == sizeof(T);
  [[maybe_unused]] Loaded<O, V> added, next;
  const auto load_residual = [&](int i, Loaded<O, V>& to) {
    if (plan.vector_output && i < mine) to = load<O, V>(residual_of(problem, y + start + i * V));
  };
  if (kAhead) load_residual(thread, next);
  const auto finish = [&](int i, const A(&scale)[V], const A(&shift)[V]) {
    const Loaded<T, V> data = held[i];
    if constexpr (kAhead) {
      added = next;
      load_residual(i + threads, next);
    } else if constexpr (kResidual) {
      load_residual(i, added);
    }
    A z[V];
#pragma unroll
    for (int j = 0; j < V; ++j) {
      z[j] = multiply_add(center(data.at(j)), scale[j], shift[j]);
    }
    if constexpr (kResidual) {
      const O* const from = residual_of(problem, y + start + i * V);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        z[j] += plan.vector_output ? added.at(j) : static_cast<A>(from[j]);
      }
    }
    activation.value(z);
    Vector<O, V> result;
#pragma unroll
    for (int j = 0; j < V; ++j) result.at[j] = static_cast<O>(z[j]);
    O* const to = y + start + i * V;
    if (plan.vector_output) {
      store(to, result);
    } else {
#pragma unroll
      for (int j = 0; j < V; ++j) to[j] = result.at[j];
    }
  };
  const auto weight_of = [&](int c) {
    return statistics.rstd *
           (plan.staged ? staged[c] : load_channel<T>(problem.weight, wide, channel + c, A(1)));
  };
  const auto bias_of = [&](int c) {
    return plan.staged ? staged[channels + c]
                       : load_channel<T>(problem.bias, wide, channel + c, A(0));
  };
  A scale[V], shift[V];
  if (plan.one_channel && plan.staged) {
#pragma unroll 2
    for (int i = thread; i < mine; i += threads) {
      const int c = plan.spatial.quotient(start + i * V);
      const A w = statistics.rstd * staged[c], b = staged[channels + c];
#pragma unroll
      for (int j = 0; j < V; ++j) {
        scale[j] = w;
        shift[j] = b;
      }
      finish(i, scale, shift);
    }
  } else {
    const int spatial = static_cast<int>(problem.spatial);
#pragma unroll 1
    for (int i = thread; i < mine; i += threads) {
      const int at = start + i * V;
      if (plan.vector_affine) {
        load_affine<T>(problem, channel + at, scale, shift);
#pragma unroll
        for (int j = 0; j < V; ++j) scale[j] *= statistics.rstd;
      } else if (spatial == 1) {
        load_channels_across<T>(problem.weight, wide, channel + at, problem.channels, A(1), scale);
        load_channels_across<T>(problem.bias, wide, channel + at, problem.channels, A(0), shift);
#pragma unroll
        for (int j = 0; j < V; ++j) scale[j] *= statistics.rstd;
      } else if (spatial >= V) {  // a vector is of one or of two channels
        const int c = plan.spatial.quotient(at), next = min(c + 1, channels - 1);
        const int left = (c + 1) * spatial - at;
        const A w = weight_of(c), next_w = weight_of(next), b = bias_of(c), next_b = bias_of(next);
#pragma unroll
        for (int j = 0; j < V; ++j) {
          scale[j] = j < left ? w : next_w;
          shift[j] = j < left ? b : next_b;
        }
      } else {
#pragma unroll
        for (int j = 0; j < V; ++j) {
          const int c = plan.spatial.quotient(at + j);
          scale[j] = weight_of(c);
          shift[j] = bias_of(c);
        }
      }
      finish(i, scale, shift);
    }
  }
  if (is_loose) {
    const int c = plan.spatial.quotient(loose);
    A z[1] = {multiply_add(center(single), weight_of(c), bias_of(c))};
    if constexpr (kResidual) z[0] += static_cast<A>(*residual_of(problem, y + loose));
    activation.value(z);
    y[loose] = static_cast<O>(z[0]);
  }
}

}  // namespace fxfuse::cuda
