// The activations of activation.h as CUDA sees them: functors over one float or double.
#pragma once
#include "../group_norm.h"

#define FXFUSE_INLINE __device__ __forceinline__

namespace fxfuse::cuda {

template <class V>
using Scalar = V;

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
FXFUSE_INLINE float hyperbolic_tangent(float value) { return tanhf(value); }
FXFUSE_INLINE double hyperbolic_tangent(double value) { return tanh(value); }
FXFUSE_INLINE float bell(float z) { return expf(-0.5f * z * z); }
FXFUSE_INLINE double bell(double z) { return exp(-0.5 * z * z); }

#include "../activation.h"

// The activation that a problem names.  All threads take the same branch, once for a vector: so one
// kernel serves every activation, and all that surrounds it is compiled once instead of twelve
// times.
template <class A>
class ActivationOf {
 public:
  FXFUSE_INLINE explicit ActivationOf(const Problem& problem)
      : kind_(problem.activation),
        params_{static_cast<A>(problem.params[0]), static_cast<A>(problem.params[1])} {}

  // Replaces z by f(z).
  template <int V>
  FXFUSE_INLINE void value(A (&z)[V]) const {
    visit([&](const auto& activation) {
#pragma unroll
      for (int j = 0; j < V; ++j) z[j] = activation.value(z[j]);
    });
  }

  // Replaces the gradient for f(z) by that for z.
  template <int V>
  FXFUSE_INLINE void grad(const A (&z)[V], A (&gradient)[V]) const {
    visit([&](const auto& activation) {
#pragma unroll
      for (int j = 0; j < V; ++j) gradient[j] = activation.grad(z[j], gradient[j]);
    });
  }

 private:
  template <class Body>
  FXFUSE_INLINE void visit(Body body) const {
    const double params[] = {params_[0], params_[1]};  // which the functors turn back: no code
    switch (kind_) {
      case kIdentity:
        return body(Identity<A>(params));
      case kHardtanh:
        return body(Hardtanh<A>(params));
      case kClamp:
        return body(Clamp<A>(params));
      case kOpenClamp:
        return body(OpenClamp<A>(params));
      case kReLU:
        return body(ReLU<A>(params));
      case kSiLU:
        return body(SiLU<A>(params));
      case kSigmoid:
        return body(Sigmoid<A>(params));
      case kTanh:
        return body(Tanh<A>(params));
      case kGELU:
        return body(GELU<A>(params));
      case kGELUTanh:
        return body(GELUTanh<A>(params));
      case kHardswish:
        return body(Hardswish<A>(params));
      case kLeakyReLU:
        return body(LeakyReLU<A>(params));
    }
  }

  Activation kind_;
  A params_[2];
};

}  // namespace fxfuse::cuda
