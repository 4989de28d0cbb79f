// What the forward and the backward kernels share: vectors, teams of threads, affine parameters and
// statistics.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "dispatch.cuh"
#include "plan.h"

namespace fxfuse::cuda {

template <class T>
struct AccumulateOf {
  using type = float;
};
template <>
struct AccumulateOf<double> {
  using type = double;
};
template <class T>
using Accumulate = typename AccumulateOf<T>::type;

// V neighbouring elements, written as one access (two for 8 floats).
template <class T, int V>
struct alignas(V * sizeof(T) < 16 ? V * sizeof(T) : 16) Vector {
  T at[V];
};

// V neighbouring elements, read as one access and kept as they lie in memory: out of an array of
// 16-bit elements, each would be moved to a register of its own as soon as it is loaded, which
// takes twice the registers and waits for the load: 309 against 237 us for the backward of
// (64, 256, 56, 56) in bfloat16 (H200, 2026-11-30).
template <class T, int V>
class alignas(V * sizeof(T) < 16 ? V * sizeof(T) : 16) Loaded {
 public:
  FXFUSE_INLINE Accumulate<T> at(int j) const {
    if constexpr (std::is_same_v<T, __nv_bfloat16> && sizeof(Word) == 4) {
      // The upper half of a float: one instruction, where the compiler takes two for odd j.
      const uint32_t word = words_[j / 2];
      return __uint_as_float(j % 2 == 0 ? word << 16 : word & 0xffff0000u);
    }
    constexpr int kOfWord = sizeof(Word) / sizeof(T);
    Vector<T, kOfWord> elements;
    memcpy(&elements, &words_[j / kOfWord], sizeof(Word));
    return static_cast<Accumulate<T>>(elements.at[j % kOfWord]);
  }

 private:
  using Word = std::conditional_t<V * sizeof(T) % 4 == 0 && sizeof(T) < 4, uint32_t, T>;
  Word words_[V * sizeof(T) / sizeof(Word)];
};

// Two sums, or a mean and a sum of squares.
template <class A>
using Pair = Vector<A, 2>;

template <class T, int V>
FXFUSE_INLINE Loaded<T, V> load(const T* from) {
  return *reinterpret_cast<const Loaded<T, V>*>(from);
}

// By an intrinsic: the compiler may store an assigned struct element by element, or in words of 4
// bytes, where it cannot see that the address is a multiple of 16.
template <class T, int V>
FXFUSE_INLINE void store(T* to, const Vector<T, V>& values) {
  if constexpr (sizeof(values) % 16 == 0) {
    uint4 words[sizeof(values) / 16];
    memcpy(words, &values, sizeof(values));
#pragma unroll
    for (size_t i = 0; i < sizeof(values) / 16; ++i)
      __stwb(reinterpret_cast<uint4*>(to) + i, words[i]);
  } else {
    *reinterpret_cast<Vector<T, V>*>(to) = values;
  }
}

// Calls body(k, i) for the numbers i = first + k * step < end among the next K: unrolled, so that
// arrays indexed by k stay in registers.
template <int K, class I, class Body>
FXFUSE_INLINE void each(I first, I step, I end, Body body) {
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const I i = first + k * step;
    if (i < end) body(k, i);
  }
}

// Replaces each value by its sum over `lanes` neighbouring lanes, a power of two, to the same bits
// in each of them; over the warp where that is more.  All lanes of the warp take part.
template <class A, int N>
FXFUSE_INLINE void sum_over_lanes(A (&values)[N], int lanes) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    if (offset < lanes) {
#pragma unroll
      for (int n = 0; n < N; ++n) values[n] += __shfl_xor_sync(~0u, values[n], offset);
    }
  }
}

// The threads that share one piece of work: a power of two of neighbouring lanes, or a whole block.
// The last block may hold teams past the last piece of work; they come along because the shuffles
// name every lane.
struct Team {
  int size, rank;
  int64_t index;  // of the piece of work

  FXFUSE_INLINE explicit Team(int size)
      : size(size),
        rank(threadIdx.x % size),
        index(int64_t(blockIdx.x) * (blockDim.x / size) + threadIdx.x / size) {}

  // Replaces each value by its sum over the team, to the same bits in every thread.
  template <class A, int N>
  FXFUSE_INLINE void sum(A (&values)[N]) const {
    sum_over_lanes(values, size);
    if (size <= 32) return;
    __shared__ A of_warp[N][32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    __syncthreads();  // an earlier sum has been read
    if (lane == 0) {
#pragma unroll
      for (int n = 0; n < N; ++n) of_warp[n][warp] = values[n];
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < N; ++n) values[n] = lane < warps ? of_warp[n][lane] : A(0);
    sum_over_lanes(values, 32);
  }
};

// Weight or bias of the V channels from `channel` on.  `wide`: held in the accumulate type.
template <class T, int V, class A>
FXFUSE_INLINE void load_channels(const void* values, bool wide, int64_t channel, A otherwise,
                                 A (&result)[V]) {
  if (values == nullptr) {
#pragma unroll
    for (int j = 0; j < V; ++j) result[j] = otherwise;
  } else if (wide) {
    const auto vector = load<A, V>(static_cast<const A*>(values) + channel);
#pragma unroll
    for (int j = 0; j < V; ++j) result[j] = vector.at(j);
  } else {
    const auto vector = load<T, V>(static_cast<const T*>(values) + channel);
#pragma unroll
    for (int j = 0; j < V; ++j) result[j] = vector.at(j);
  }
}

template <class T, class A = Accumulate<T>>
FXFUSE_INLINE A load_channel(const void* values, bool wide, int64_t channel, A otherwise) {
  A result[1];
  load_channels<T>(values, wide, channel, otherwise, result);
  return result[0];
}

FXFUSE_INLINE bool affine_is_wide(const Problem& problem) {
  return problem.affine_dtype != problem.dtype;
}

// Weight and bias of the V channels from `channel` on.
template <class T, int V, class A>
FXFUSE_INLINE void load_affine(const Problem& problem, int64_t channel, A (&weight)[V],
                               A (&bias)[V]) {
  const bool wide = affine_is_wide(problem);
  load_channels<T>(problem.weight, wide, channel, A(1), weight);
  load_channels<T>(problem.bias, wide, channel, A(0), bias);
}

// Weight and bias of the V elements from `i` on, in a contiguous group whose first channel is
// `channel`.  I is int where a group is known to be small: 64-bit division is slow.
template <class T, int V, class I, class A>
FXFUSE_INLINE void load_affine(const Problem& problem, int64_t channel, I i, A (&weight)[V],
                               A (&bias)[V]) {
  if (problem.spatial == 1) return load_affine<T>(problem, channel + i, weight, bias);
  const bool wide = affine_is_wide(problem);
  const I spatial = static_cast<I>(problem.spatial);
  channel += i / spatial;
  I left = spatial - i % spatial;  // elements of this channel
  A w = load_channel<T>(problem.weight, wide, channel, A(1));
  A b = load_channel<T>(problem.bias, wide, channel, A(0));
#pragma unroll
  for (int j = 0; j < V; ++j) {
    if (left == 0) {
      ++channel;
      left = spatial;
      w = load_channel<T>(problem.weight, wide, channel, A(1));
      b = load_channel<T>(problem.bias, wide, channel, A(0));
    }
    --left;
    weight[j] = w;
    bias[j] = b;
  }
}

// V neighbouring elements at any address, of a tensor that ends at `end`, read as whole 16 bytes,
// one more than they take, and shifted.  What is read beside them belongs to the same allocation:
// where the tensor may end before it, they are read one by one.
template <int V, class T>
FXFUSE_INLINE Loaded<T, V> load_across(const T* from, const T* end) {
  if (end - from < V + static_cast<int>(16 / sizeof(T)) - 1) {
    T elements[V];
#pragma unroll
    for (int j = 0; j < V; ++j) elements[j] = from[j];
    Loaded<T, V> result;
    memcpy(&result, elements, sizeof(result));
    return result;
  }
  constexpr int W = V * sizeof(T) / 4;  // words
  static_assert(W % 4 == 0, "whole 16 bytes");
  const int skipped = static_cast<int>(reinterpret_cast<uintptr_t>(from) % 16);
  const auto* const base =
      reinterpret_cast<const uint4*>(reinterpret_cast<const char*>(from) - skipped);
  uint32_t words[W + 4];
#pragma unroll
  for (int i = 0; i <= W / 4; ++i) {
    const uint4 four = base[i == W / 4 && skipped == 0 ? i - 1 : i];
    memcpy(words + 4 * i, &four, 16);
  }
#pragma unroll
  for (int i = 0; i < W + 2; ++i) words[i] = (skipped & 8) != 0 ? words[i + 2] : words[i];
  if constexpr (sizeof(T) <= 4) {
#pragma unroll
    for (int i = 0; i < W + 1; ++i) words[i] = (skipped & 4) != 0 ? words[i + 1] : words[i];
  }
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int i = 0; i < W; ++i) {
      words[i] = __funnelshift_r(words[i], words[i + 1], 8 * (skipped & 2));
    }
  }
  Loaded<T, V> result;
  memcpy(&result, words, sizeof(result));
  return result;
}

// Weight or bias of the V channels from any one on, of `channels`.
template <class T, int V, class A>
FXFUSE_INLINE void load_channels_across(const void* values, bool wide, int64_t channel,
                                        int64_t channels, A otherwise, A (&result)[V]) {
  const auto keep = [&](const auto* of_type) {
    const auto vector = load_across<V>(of_type + channel, of_type + channels);
#pragma unroll
    for (int j = 0; j < V; ++j) result[j] = vector.at(j);
  };
  if (values == nullptr) {
#pragma unroll
    for (int j = 0; j < V; ++j) result[j] = otherwise;
  } else if (wide) {
    keep(static_cast<const A*>(values));
  } else {
    keep(static_cast<const T*>(values));
  }
}

FXFUSE_INLINE float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
FXFUSE_INLINE double multiply_add(double a, double b, double c) { return fma(a, b, c); }

// A product that is rounded before anything is added to it: nvcc contracts a * b + c otherwise, and
// a group of one element would get a gradient of one rounding error instead of 0.
FXFUSE_INLINE float product(float a, float b) { return __fmul_rn(a, b); }
FXFUSE_INLINE double product(double a, double b) { return __dmul_rn(a, b); }

// Statistics of one group: the mean as a high and a low part.
template <class A>
struct Statistics {
  A mean, rest, rstd;

  Statistics() = default;
  FXFUSE_INLINE Statistics(const void* means, const void* rstds, int64_t groups, int64_t group)
      : mean(static_cast<const A*>(means)[group]),
        rest(static_cast<const A*>(means)[groups + group]),
        rstd(static_cast<const A*>(rstds)[group]) {}

  // The mean goes first: scaling before it would lose the digits that x and the mean share.
  FXFUSE_INLINE A normalize(A x) const { return ((x - mean) - rest) * rstd; }
};

// ---- channels_last ------------------------------------------------------------------------------

// The part of one thread.
template <int V>
struct Column {
  int64_t part;  // sample * chunks + chunk: the row of the partial results
  int64_t sample;
  int64_t channel;     // the first of V
  int64_t begin, end;  // rows of the chunk
  int slot, slots;
  bool active;

  // Of block number `block`.
  FXFUSE_INLINE Column(const Problem& problem, const ColumnTiles& tiles,
                       unsigned block = blockIdx.x)
      : slots(tiles.slots) {
    // There are as many blocks as parts and tiles, so all of these have 31 bits.
    const auto tile_count = static_cast<unsigned>(tiles.count);
    const auto chunk_count = static_cast<unsigned>(tiles.chunks.count);
    const unsigned row = block / tile_count, its_sample = row / chunk_count;
    const unsigned width = tiles.width, at = threadIdx.x / width;
    part = row;
    channel = (int64_t(block - row * tile_count) * width + (threadIdx.x - at * width)) * V;
    slot = static_cast<int>(at);
    sample = its_sample;
    begin = int64_t(row - its_sample * chunk_count) * tiles.chunks.size;
    end = min(begin + tiles.chunks.size, problem.spatial);
    active = channel < problem.channels && slot < slots;
  }

  // Of row `row`, in elements.
  FXFUSE_INLINE int64_t offset(const Problem& problem, int64_t row) const {
    return (sample * problem.spatial + row) * problem.channels + channel;
  }

  // Index of the group of channel + j among all of the batch.
  FXFUSE_INLINE int64_t group(const Problem& problem, int j) const {
    const int64_t per_group = problem.channels / problem.num_groups;
    return sample * problem.num_groups + (channel + j) / per_group;
  }

  // The same rows in every slot but for the last few: how many of the chunk's fall to one.
  FXFUSE_INLINE int64_t rows_of(int slot) const {
    const int64_t left = end - begin - slot;
    return left <= 0 ? 0 : (left + slots - 1) / slots;
  }
};

// What a thread keeps about its channels while it walks down the rows.
template <class T, int V>
struct ColumnParameters {
  using A = Accumulate<T>;
  A weight[V], bias[V];
  Statistics<A> statistics[V];

  template <class P>  // Forward or Backward
  FXFUSE_INLINE ColumnParameters(const P& problem, const Column<V>& column) {
    load_affine<T>(problem, column.channel, weight, bias);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      statistics[j] = Statistics<A>(problem.mean, problem.rstd, problem.batch * problem.num_groups,
                                    column.group(problem, j));
    }
  }
};

}  // namespace fxfuse::cuda
