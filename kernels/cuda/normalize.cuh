// What the forward kernels share: moments and their merging, and the arithmetic that ends in the
// output.
#pragma once
#include "async.cuh"
#include "forward_plan.h"
#include "launch.cuh"

namespace fxfuse::cuda {

constexpr int kVectorsInFlight = 4;  // that a thread loads at once, where it says nothing else

// sum / count, where share is 1 / count: one step of Newton's makes the product the quotient, so
// that equal values have themselves as their mean.
template <class A>
FXFUSE_INLINE A quotient(A sum, A count, A share) {
  const A estimate = sum * share;
  return multiply_add(multiply_add(-estimate, count, sum), share, estimate);
}

// The chip's own has an error of 2 ulp; one step of Newton's leaves less than 1.
FXFUSE_INLINE float reciprocal_root(float value) {
  const float root = rsqrtf(value), error = multiply_add(-value * root, root, 1.0f);
  return error == error ? multiply_add(0.5f * root, error, root) : root;  // at 0 and infinity
}
FXFUSE_INLINE double reciprocal_root(double value) { return rsqrt(value); }

// 1 / sqrt(variance + eps).  Rounding can leave a variance below 0.  No maximum: that would swallow
// NaN.
template <class A>
FXFUSE_INLINE A rstd_of(A variance, A eps) {
  return reciprocal_root((variance < A(0) ? A(0) : variance) + eps);
}

// pivot + mean as a high and a low part, by Knuth's two-sum.
template <class A>
FXFUSE_INLINE void split_mean(A pivot, A mean, Statistics<A>& statistics) {
  const A sum = pivot + mean, added = sum - pivot;
  statistics.mean = sum;
  statistics.rest = (pivot - (sum - added)) + (mean - added);
}

// The residual of what is written to `output`: as far into its tensor.
template <class O>
FXFUSE_INLINE const O* residual_of(const Forward& problem, const O* output) {
  return reinterpret_cast<const O*>(
      static_cast<const char*>(problem.residual) +
      (reinterpret_cast<const char*>(output) - static_cast<const char*>(problem.output)));
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

// From sums in double.
template <class A>
FXFUSE_INLINE Statistics<A> round_statistics(double pivot, double mean, double variance,
                                             double eps) {
  Statistics<double> wide;
  split_mean(pivot, mean, wide);
  Statistics<A> statistics;
  statistics.mean = static_cast<A>(wide.mean);
  statistics.rest = static_cast<A>((wide.mean - static_cast<double>(statistics.mean)) + wide.rest);
  statistics.rstd = static_cast<A>(1 / sqrt(variance + eps));
  return statistics;
}

// ---- moments ------------------------------------------------------------------------------------

// Mean (relative to a pivot) and sum of squared deviations of `count` values, the count kept
// elsewhere.
template <class A>
struct alignas(2 * sizeof(A)) Moments {
  A mean, m2;

  // `share` is other_count / (count + other_count), the counts those before the merge.  By the
  // formula of Chan, Golub and LeVeque (1979).
  FXFUSE_INLINE void merge(const Moments& other, A count, A share) {
    const A distance = other.mean - mean;
    mean += distance * share;
    m2 += other.m2 + distance * distance * (count * share);
  }
};

// The same with the count; 0 values are no values.
template <class A>
struct alignas(4 * sizeof(A) < 16 ? 4 * sizeof(A) : 16) CountedMoments {
  A mean, m2, count, unused;

  FXFUSE_INLINE void merge(const CountedMoments& other) {
    if (!(count > A(0))) {  // not by the formula: its share would be a rounded 1
      *this = other;
    } else if (other.count > A(0)) {
      const A distance = other.mean - mean, share = divide(other.count, count + other.count);
      mean += distance * share;
      m2 += other.m2 + distance * distance * (count * share);
      count += other.count;
    }
  }

  // Replaces the moments of each lane by those of the warp, to the same bits in every lane.  In two
  // passes around the mean of lane 0, which has values if any lane has.
  FXFUSE_INLINE void merge_warp() {
    const A pivot = __shfl_sync(~0u, mean, 0);
    A total = count, sum = count > A(0) ? count * (mean - pivot) : A(0);
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      total += __shfl_xor_sync(~0u, total, offset);
      sum += __shfl_xor_sync(~0u, sum, offset);
    }
    const A distance = total > A(0) ? divide(sum, total) : A(0), from = (mean - pivot) - distance;
    A squares = count > A(0) ? multiply_add(count * from, from, m2) : A(0);
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      squares += __shfl_xor_sync(~0u, squares, offset);
    }
    mean = pivot + distance;
    m2 = squares;
    count = total;
  }

  // Adds those of the U vectors, of which `loaded` exist; kAll: all of them.  Each of the two
  // passes is over registers.
  template <bool kAll, class T, int V, int U>
  FXFUSE_INLINE void add(const Loaded<T, V> (&data)[U], int loaded, A pivot) {
    const A values = kAll ? A(U * V) : static_cast<A>(loaded * V);
    A sums[4] = {};  // several, for the additions of one wait for each other
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (kAll || u < loaded) {
#pragma unroll
        for (int j = 0; j < V; ++j) sums[j % 4] += data[u].at(j) - pivot;
      }
    }
    const A sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    CountedMoments here = {quotient(sum, values, kAll ? A(1) / (U * V) : divide(A(1), values)),
                           A(0), values, A(0)};
    A squares[4] = {};
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (kAll || u < loaded) {
#pragma unroll
        for (int j = 0; j < V; ++j) {
          const A centered = (data[u].at(j) - pivot) - here.mean;
          squares[j % 4] = multiply_add(centered, centered, squares[j % 4]);
        }
      }
    }
    here.m2 = (squares[0] + squares[1]) + (squares[2] + squares[3]);
    merge(here);
  }
};

// The values whose distance from the group's first one the moments are kept of.  16-bit values need
// none where the output has 16 bits too: sums of up to 2^13 equal ones are exact, and what a mean
// near them loses in float is far below their spacing.
template <class T, class O>
constexpr bool kHasPivot = sizeof(T) > 2 || sizeof(O) > 2;

}  // namespace fxfuse::cuda
