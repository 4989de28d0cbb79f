// GroupNorm + activation, forward, for contiguous groups that nothing else takes: read twice.
//
// Idea.  A long group is cut into chunks, because one block would be alone with it.  A first launch
// takes the moments of every chunk.  A second one goes over the data again; each of its blocks
// merges the moments of its group for itself, in place of a launch for that.
//
// Statistics.  Moments of some vectors in two passes over registers, merged by Chan's formula, the
// chunks' in double and in a fixed order: so all blocks of a group have the same.  As in
// groups.cuh, relative to the group's first value where input or output is wider than 16 bits.
//
// Work split.  A block for each chunk of a group, as many as run at once.  The second launch goes
// through a chunk backwards, for the L2 cache still holds its end, and has asked for that before
// the first launch is over.
//
// Limits.  None but on the number of blocks; offsets have 64 bits.  As in groups.cuh, vectors are
// counted from the start of the tensor, and the elements around a group's whole ones are loose.
//
// Fallback.  Where a pointer is not aligned to 16 bytes, V is 1.
//
// Measured.  As in rows.cuh, (1, 64, 1024, 1024) in one group with relu, where two readings and one
// writing move 1.5 times the bytes of a copy: 115 us behind 68 in bfloat16 (in three launches 171),
// 213 behind 133 in float32.  In bfloat16 with twice as many chunks 118, with a quarter fewer 137;
// with its first reading through a ring in shared memory 124 (H200, 2026-12-01).
#pragma once
#include "normalize.cuh"

namespace fxfuse::cuda {

// The part of one block, and of one thread the loose element.
template <int V>
struct Chunk {
  int64_t index;       // of the group
  int64_t number;      // of the chunk in it
  int64_t begin, end;  // vectors, from element `head` of the group on
  int64_t head;
  int64_t loose;  // an element, or -1

  FXFUSE_INLINE Chunk(const ChunkPlan& plan, int64_t block)
      : index(block / plan.count), number(block - index * plan.count) {
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
template <class T, int V, bool kPivot>
__global__ __launch_bounds__(kThreads, chunk_blocks(sizeof(T))) void measure_chunks(
    const Problem problem, const ChunkPlan plan, CountedMoments<Accumulate<T>>* const partial) {
  using A = Accumulate<T>;
  constexpr int U = kVectorsInFlight;
  wait_for_previous_kernel();
  let_next_kernel_start();
  const Chunk<V> chunk(plan, blockIdx.x);
  const T* const x = static_cast<const T*>(problem.input) + chunk.index * plan.size;
  const A pivot = kPivot ? static_cast<A>(x[0]) : A(0);
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

// Of one group, by a block, from the moments of its chunks: the same to the bit in every block.
template <class A>
FXFUSE_INLINE Statistics<A> merge_chunks(const Forward& problem, const ChunkPlan& plan,
                                         const CountedMoments<A>* of_group, A pivot) {
  const Team team(kThreads);
  double mean[1] = {}, m2[1] = {};
  const double some = of_group->mean;
#pragma unroll 1
  for (int64_t i = threadIdx.x; i < plan.count; i += kThreads) {
    mean[0] += (of_group[i].mean - some) * of_group[i].count;
  }
  team.sum(mean);
  mean[0] = some + mean[0] * plan.share;
#pragma unroll 1
  for (int64_t i = threadIdx.x; i < plan.count; i += kThreads) {
    const double distance = of_group[i].mean - mean[0];
    m2[0] += of_group[i].m2 + distance * distance * of_group[i].count;
  }
  team.sum(m2);
  __shared__ Statistics<A> result;
  if (threadIdx.x == 0) {
    result =
        round_statistics<A>(static_cast<double>(pivot), mean[0], m2[0] * plan.share, problem.eps);
  }
  __syncthreads();
  return result;
}

// Vectors of one thread on their way through shared memory.  It reads back only what it copied
// itself, so no barrier is needed.
template <class T, int V, int kDepth>
class Arriving {
 public:
  FXFUSE_INLINE explicit Arriving(Loaded<T, V>* of_block) : slots_(of_block + threadIdx.x) {}

  FXFUSE_INLINE void ask(int slot, const T* from) { copy_vector(slots_ + slot * kThreads, from); }
  FXFUSE_INLINE void put(int slot, const Loaded<T, V>& vector) { slots_[slot * kThreads] = vector; }
  FXFUSE_INLINE Loaded<T, V> get(int slot) const { return slots_[slot * kThreads]; }

 private:
  Loaded<T, V>* const slots_;
};

template <class T, class O, int V, bool kResidual>
__global__ __launch_bounds__(kThreads, chunk_blocks(sizeof(T))) void normalize_chunks(
    const Forward problem, const ChunkPlan plan,
    const CountedMoments<Accumulate<T>>* const partial) {
  using A = Accumulate<T>;
  constexpr bool kPivot = kHasPivot<T, O>;
  // Where vectors are whole, 32 KB of a block are on their way.
  constexpr int kDepth = 128 / (16 + (kResidual ? 16 * sizeof(O) / sizeof(T) : 0));
  __shared__ Loaded<T, V> input[kDepth * kThreads];
  [[maybe_unused]] __shared__ Loaded<O, V> residual[kResidual ? kDepth * kThreads : 1];
  Arriving<T, V, kDepth> data(input);
  [[maybe_unused]] Arriving<O, V, kDepth> added(residual);
  const Chunk<V> chunk(plan, gridDim.x - 1 - blockIdx.x);
  const int64_t sample = plan.num_groups.quotient(chunk.index);
  const int64_t channel = (chunk.index - sample * problem.num_groups) * plan.channels;
  const T* const x = static_cast<const T*>(problem.input) + chunk.index * plan.size;
  O* const y = static_cast<O*>(problem.output) + chunk.index * plan.size;
  const int64_t start = chunk.head + chunk.begin * V;  // of the chunk, in elements
  const int size = static_cast<int>(chunk.end - chunk.begin);

  // Backwards.  The first ones are asked for before the launch ahead has ended: that is ours too,
  // and has begun only after whatever wrote the input.
  int left = size <= 0 ? 0 : (size + kThreads - 1) / kThreads;  // of this thread, or one less
  const auto exists = [&](int number) {
    return number >= 0 && number * kThreads + static_cast<int>(threadIdx.x) < size;
  };
  const auto place_of = [&](int number) {
    return start + int64_t(number * kThreads + static_cast<int>(threadIdx.x)) * V;
  };
  // Single elements of 16 bits are too small for such copies: all slots are filled at once instead.
  constexpr bool kCopies = V * sizeof(T) >= 4;
  const auto ask = [&](int slot, int number) {
    if constexpr (kCopies) {
      if (exists(number)) {
        data.ask(slot, x + place_of(number));
        if constexpr (kResidual) added.ask(slot, residual_of(problem, y + place_of(number)));
      }
      commit_copies();
    }
  };
  const auto fill = [&](int number) {
    Loaded<T, V> loaded[kDepth];
    [[maybe_unused]] Loaded<O, V> others[kDepth];
#pragma unroll
    for (int slot = 0; slot < kDepth; ++slot) {
      if (exists(number - slot)) {
        const int64_t at = place_of(number - slot);
        loaded[slot] = load<T, V>(x + at);
        if constexpr (kResidual) others[slot] = load<O, V>(residual_of(problem, y + at));
      }
    }
#pragma unroll
    for (int slot = 0; slot < kDepth; ++slot) {
      data.put(slot, loaded[slot]);
      if constexpr (kResidual) added.put(slot, others[slot]);
    }
  };
#pragma unroll 1
  for (int slot = 0; slot < kDepth; ++slot) ask(slot, left - 1 - slot);
  const A pivot = kPivot ? static_cast<A>(x[0]) : A(0);
  wait_for_previous_kernel();
  let_next_kernel_start();
  const Statistics<A> group =
      merge_chunks(problem, plan, partial + chunk.index * plan.count, pivot);
  if (chunk.number == 0 && threadIdx.x == 0) save(problem, chunk.index, group);

  const bool wide = affine_is_wide(problem);
  const ActivationOf<A, O> activation(problem);
  const auto scale_of = [&](int64_t c) {
    return group.rstd * load_channel<T>(problem.weight, wide, channel + c, A(1));
  };
  const auto bias_of = [&](int64_t c) {
    return load_channel<T>(problem.bias, wide, channel + c, A(0));
  };
  const auto center = [&](A value) {
    return kPivot ? (value - group.mean) - group.rest : value - group.mean;
  };
  if (chunk.loose >= 0) {
    const int64_t c = plan.spatial.quotient(chunk.loose);
    A z[1] = {multiply_add(center(static_cast<A>(x[chunk.loose])), scale_of(c), bias_of(c))};
    if constexpr (kResidual) z[0] += static_cast<A>(*residual_of(problem, y + chunk.loose));
    activation.value(z);
    y[chunk.loose] = static_cast<O>(z[0]);
  }
  // Channels are counted from the chunk's first one.  Within a chunk 31 bits are enough, also where
  // a channel is longer.
  const int64_t first_channel = plan.spatial.quotient(start);
  const int spatial = static_cast<int>(min(problem.spatial, kMostOfChunk));
  const int of_first =
      static_cast<int>(min((first_channel + 1) * problem.spatial - start, kMostOfChunk));
  const auto channel_of = [&](int n) {
    return n < of_first ? 0 : 1 + plan.spatial.quotient(n - of_first);
  };
  int slot = 0;
#pragma unroll 1
  while (--left >= 0) {
    if constexpr (kCopies) {
      wait_for_copies<kDepth - 1>();
    } else {
      if (slot == 0) fill(left);
    }
    if (exists(left)) {
      const int64_t at = place_of(left);
      const int i = static_cast<int>(at - start);
      A scale[V], bias[V];
      if (plan.vector_affine) {
        load_affine<T>(problem, channel + at, scale, bias);
#pragma unroll
        for (int j = 0; j < V; ++j) scale[j] *= group.rstd;
      } else if (V <= spatial) {  // a vector is of one or of two channels
        const int c = channel_of(i), rest = of_first + c * spatial - i;
        const A w = scale_of(first_channel + c), b = bias_of(first_channel + c);
        A next_w = w, next_b = b;
        if (rest < V) {
          next_w = scale_of(first_channel + c + 1);
          next_b = bias_of(first_channel + c + 1);
        }
#pragma unroll
        for (int j = 0; j < V; ++j) {
          scale[j] = j < rest ? w : next_w;
          bias[j] = j < rest ? b : next_b;
        }
      } else {
#pragma unroll
        for (int j = 0; j < V; ++j) {
          const int64_t c = first_channel + channel_of(i + j);
          scale[j] = scale_of(c);
          bias[j] = bias_of(c);
        }
      }
      const Loaded<T, V> its_data = data.get(slot);
      A z[V];
#pragma unroll
      for (int j = 0; j < V; ++j) z[j] = multiply_add(center(its_data.at(j)), scale[j], bias[j]);
      if constexpr (kResidual) {
        const Loaded<O, V> its_added = added.get(slot);
#pragma unroll
        for (int j = 0; j < V; ++j) z[j] += its_added.at(j);
      }
      activation.value(z);
      Vector<O, V> result;
#pragma unroll
      for (int j = 0; j < V; ++j) result.at[j] = static_cast<O>(z[j]);
      store(y + at, result);
    }
    ask(slot, left - kDepth);
    if (++slot == kDepth) slot = 0;
  }
}

}  // namespace fxfuse::cuda
