// What the kernels of the backward share: the arithmetic of a few elements, sums, and how dweight
// and dbias leave.
#pragma once
#include "async.cuh"
#include "backward_plan.h"
#include "launch.cuh"

namespace fxfuse::cuda {

// The statistics of a group as the backward uses them: x^ = (x - mean) * rstd + shift, where the
// shift is what the low part of the mean takes.  The mean goes first, as in Statistics::normalize.
template <class A>
struct Normal {
  A mean, rstd, shift;

  Normal() = default;
  FXFUSE_INLINE Normal(A mean, A rest, A rstd) : mean(mean), rstd(rstd), shift(-rest * rstd) {}

  FXFUSE_INLINE A normalize(A x) const { return multiply_add(x - mean, rstd, shift); }

  // What every element of it becomes 0 under, or the same.
  FXFUSE_INLINE Normal only_if(bool exists) const {
    Normal result = *this;
    if (!exists) result.rstd = result.shift = 0;
    return result;
  }
};

template <class A>
FXFUSE_INLINE Normal<A> load_normal(const Backward& problem, int64_t group) {
  const A* mean = static_cast<const A*>(problem.mean);
  return {mean[group], mean[problem.batch * problem.num_groups + group],
          static_cast<const A*>(problem.rstd)[group]};
}

// x^ and dz of U vectors; normal(i), weight(i) and bias(i) are those of element i of them all.
// An element that does not exist has dy = 0 and x^ = 0, so it adds 0 to every sum.
template <int U, class T, class O, int V, class A, class N, class W, class B>
FXFUSE_INLINE void differentiate(const ActivationOf<A, O>& activation, const Loaded<T, V> (&x)[U],
                                 const Loaded<O, V> (&dy)[U], N normal, W weight, B bias,
                                 A (&xhat)[U * V], A (&dz)[U * V]) {
  A z[U * V];
#pragma unroll
  for (int i = 0; i < U * V; ++i) {
    xhat[i] = normal(i).normalize(x[i / V].at(i % V));
    z[i] = multiply_add(xhat[i], weight(i), bias(i));
    dz[i] = dy[i / V].at(i % V);
  }
  activation.grad(z, dz);
}

// dinput = rstd * (dz * weight - mean(dz * weight) - x^ * mean(dz * weight * x^)), multiplied out:
// two instructions for an element.  A group of one element has no gradient, which the rounding of
// the products would hide.
template <class A>
struct InputGradient {
  A rstd, shift, slope;

  InputGradient() = default;
  FXFUSE_INLINE InputGradient(A rstd, const Pair<A>& means, int64_t size)
      : rstd(size == 1 ? A(0) : rstd),
        shift(this->rstd * means.at[0]),
        slope(this->rstd * means.at[1]) {}

  // `scaled` is weight * rstd.
  FXFUSE_INLINE A operator()(A dz, A scaled, A xhat) const {
    return multiply_add(-xhat, slope, multiply_add(dz, scaled, -shift));
  }
};

template <class A>
FXFUSE_INLINE void add(Pair<A>& sums, const Pair<A>& others) {
  sums.at[0] += others.at[0];
  sums.at[1] += others.at[1];
}

// `sums` are those of dz and of dz * x^ over a channel.
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

// The same into row `row` of partial sums, (rows, channels), or, where there are none, as they are.
template <class T, class A>
FXFUSE_INLINE void write_partial(const Backward& problem, Pair<A>* partial, int64_t row,
                                 int64_t channel, const Pair<A>& sums) {
  if (partial == nullptr) {
    write_affine_gradients<T>(problem, channel, sums);
  } else {
    partial[row * problem.channels + channel] = sums;
  }
}

}  // namespace fxfuse::cuda
