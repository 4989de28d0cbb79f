// The activations of activation.h as CUDA sees them: functors over one float or double.
#pragma once
#include "../group_norm.h"

#define FXFUSE_INLINE __device__ __forceinline__

namespace fxfuse::cuda {

template <class V>
FXFUSE_INLINE V broadcast(double value) {
  return static_cast<V>(value);
}

template <class V>
FXFUSE_INLINE V select(bool condition, V yes, V no) {
  return condition ? yes : no;
}

FXFUSE_INLINE float exponential(float value) { return expf(value); }
FXFUSE_INLINE double exponential(double value) { return exp(value); }

#include "../activation.h"

// Calls body(functor) with the functor that the problem names.  All threads take the same branch,
// so one kernel serves every activation: statistics are compiled once instead of once for each.
template <class A, class Body>
FXFUSE_INLINE void with_activation(const Problem& problem, Body body) {
  const double* params = problem.params;
  switch (problem.activation) {
    case kIdentity:
      return body(Identity<A>(params));
    case kHardtanh:
      return body(Hardtanh<A>(params));
    case kClamp:
      return body(Clamp<A>(params));
    case kReLU:
      return body(ReLU<A>(params));
    case kSiLU:
      return body(SiLU<A>(params));
  }
}

}  // namespace fxfuse::cuda
