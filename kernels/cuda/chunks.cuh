// GroupNorm + activation, forward, for contiguous groups that nothing else takes: read twice.
//
// Idea.  A long group is cut into chunks, because one block would be alone with it: moments of
// every chunk, merged in a fixed order, and a second pass over the data, in three launches.
//
// Statistics.  Moments relative to the group's first value, so that their digits are not lost
// behind a large mean, merged by Chan's formula, the chunks' in double.
//
// Work split.  A block for each chunk of a group; a block for the merging of a group.  The second
// pass goes through the chunks backwards, for the L2 cache still holds the last ones.
//
// Limits.  None but on the number of blocks; offsets have 64 bits.  As in groups.cuh, vectors are
// counted from the start of the tensor, and the elements around a group's whole ones are loose.
//
// Fallback.  Where a pointer is not aligned to 16 bytes, V is 1.
//
// Measured.  As in rows.cuh, in bfloat16 with relu: one group of 128 MB 144 us behind 68; one of
// 60000003 values 146 behind 61.
#pragma once
#include "normalize.cuh"

namespace fxfuse::cuda {

// The part of one block, and of one thread the loose element.
template <int V>
struct Chunk {
  int64_t index;       // of the group
  int64_t begin, end;  // vectors, from element `head` of the group on
  int64_t head;
  int64_t loose;  // an element, or -1

  FXFUSE_INLINE Chunk(const ChunkPlan& plan, int64_t block) : index(block / plan.count) {
    const int64_t number = block - index * plan.count;
    head = min(-(index * plan.size) & (V - 1), plan.size);
    const int64_t vectors = (plan.size - head) / V, tail = head + vectors * V;
    begin = number * plan.chunk;
    end = min(begin + plan.chunk, vectors);
    const int thread = threadIdx.x;
    loose = thread < head ? thread : thread - head + tail;
    if (number != 0 || loose >= plan.size || (thread >= head && loose < tail)) loose = -1;
  }
};

// partial is (groups, chunks).
template <class T, int V>
__global__ __launch_bounds__(kThreads) void moments(const Problem problem, const ChunkPlan plan,
                                                    CountedMoments<Accumulate<T>>* const partial) {
  using A = Accumulate<T>;
  constexpr int U = kVectorsInFlight;
  const Chunk<V> chunk(plan, blockIdx.x);
  const T* const x = static_cast<const T*>(problem.input) + chunk.index * plan.size;
  const A pivot = static_cast<A>(x[0]);
  CountedMoments<A> running = {};
  if (chunk.loose >= 0) running = {static_cast<A>(x[chunk.loose]) - pivot, A(0), A(1), A(0)};
  const T* const body = x + chunk.head;
  int64_t i = chunk.begin + threadIdx.x;
  for (; i + (U - 1) * kThreads < chunk.end; i += U * kThreads) {
    Loaded<T, V> data[U];
#pragma unroll
    for (int u = 0; u < U; ++u) data[u] = load<T, V>(body + (i + u * kThreads) * V);
    running.template add<true>(data, U, pivot);
  }
  for (; i < chunk.end; i += kThreads) {
    const Loaded<T, V> data[1] = {load<T, V>(body + i * V)};
    running.template add<true>(data, 1, pivot);
  }
  running.merge_warp();
  __shared__ CountedMoments<A> of_warp[kThreads / 32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (lane == 0) of_warp[warp] = running;
  __syncthreads();
  if (warp > 0) return;
  running = {};
  if (lane < kThreads / 32) running = of_warp[lane];
  running.merge_warp();
  if (lane == 0) partial[blockIdx.x] = running;
}

// A block for each group.
template <class T>
__global__ __launch_bounds__(kThreads) void merge_chunks(
    const Forward problem, const ChunkPlan plan,
    const CountedMoments<Accumulate<T>>* const partial) {
  using A = Accumulate<T>;
  const Team team(kThreads);
  const auto* const of_group = partial + team.index * plan.count;
  double mean[1] = {}, m2[1] = {};
  for (int64_t i = team.rank; i < plan.count; i += kThreads) {
    mean[0] += static_cast<double>(of_group[i].mean) * of_group[i].count;
  }
  team.sum(mean);
  mean[0] /= static_cast<double>(plan.size);
  for (int64_t i = team.rank; i < plan.count; i += kThreads) {
    const double distance = of_group[i].mean - mean[0];
    m2[0] += of_group[i].m2 + distance * distance * of_group[i].count;
  }
  team.sum(m2);
  if (team.rank > 0) return;
  const T first = static_cast<const T*>(problem.input)[team.index * plan.size];
  save_wide<A>(problem, team.index, static_cast<double>(static_cast<A>(first)), mean[0],
               m2[0] / static_cast<double>(plan.size));
}

template <class T, class O, int V, bool kResidual>
__global__ __launch_bounds__(kThreads,
                             sizeof(T) == 8 ? 2 : 0) void normalize_chunk(const Forward problem,
                                                                          const ChunkPlan plan) {
  using A = Accumulate<T>;
  constexpr int U = kVectorsInFlight;
  const Chunk<V> chunk(plan, gridDim.x - 1 - blockIdx.x);  // from the end: it is still in L2
  const int64_t sample = plan.num_groups.quotient(chunk.index);
  const int64_t channel = (chunk.index - sample * problem.num_groups) * plan.channels;
  const Statistics<A> group(problem.mean, problem.rstd, problem.batch * problem.num_groups,
                            chunk.index);
  const T* const x = static_cast<const T*>(problem.input) + chunk.index * plan.size;
  O* const y = static_cast<O*>(problem.output) + chunk.index * plan.size;
  const bool wide = affine_is_wide(problem);
  const ActivationOf<A, O> activation(problem);
  const auto weight_of = [&](int64_t c) {
    return load_channel<T>(problem.weight, wide, channel + c, A(1));
  };
  const auto bias_of = [&](int64_t c) {
    return load_channel<T>(problem.bias, wide, channel + c, A(0));
  };
  for (int64_t first = chunk.begin + threadIdx.x; first < chunk.end; first += U * kThreads) {
    Loaded<T, V> data[U];
    Loaded<O, V> added[U];
    each<U>(first, int64_t(kThreads), chunk.end, [&](int u, int64_t i) {
      const int64_t at = chunk.head + i * V;
      data[u] = load<T, V>(x + at);
      if constexpr (kResidual) added[u] = load<O, V>(residual_of(problem, y + at));
    });
    each<U>(first, int64_t(kThreads), chunk.end, [&](int u, int64_t i) {
      const int64_t at = chunk.head + i * V;
      A weight[V], bias[V];
      if (plan.vector_affine) {
        load_affine<T>(problem, channel + at, weight, bias);
      } else {
        int64_t c = plan.spatial.quotient(at), left = (c + 1) * problem.spatial - at;
        A w = weight_of(c), b = bias_of(c);
#pragma unroll
        for (int j = 0; j < V; ++j) {
          if (j == left) {
            left += problem.spatial;
            w = weight_of(++c);
            b = bias_of(c);
          }
          weight[j] = w;
          bias[j] = b;
        }
      }
      store(y + at, finish<kResidual>(activation, data[u], weight, bias, group, added[u]));
    });
  }
  if (chunk.loose >= 0) {
    const int64_t c = plan.spatial.quotient(chunk.loose);
    A z[1] = {
        multiply_add(group.normalize(static_cast<A>(x[chunk.loose])), weight_of(c), bias_of(c))};
    if constexpr (kResidual) z[0] += static_cast<A>(*residual_of(problem, y + chunk.loose));
    activation.value(z);
    y[chunk.loose] = static_cast<O>(z[0]);
  }
}

}  // namespace fxfuse::cuda
