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

// The chip's own exponential and quotient: four instructions instead of eighteen.  Their errors are
// a few ulp of the result, relative |value| * 2^-24 for the exponential; in z / (1 + e^-z) and its
// kin that is less than one ulp of the largest |z| (the error is weighted by z * s * (1 - s)).
FXFUSE_INLINE float exponential(float value) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value * 1.4426950408889634f));
  return result;
}
FXFUSE_INLINE double exponential(double value) { return exp(value); }
FXFUSE_INLINE float hyperbolic_tangent(float value) { return tanhf(value); }
FXFUSE_INLINE double hyperbolic_tangent(double value) { return tanh(value); }
FXFUSE_INLINE float bell(float z) { return expf(-0.5f * z * z); }
FXFUSE_INLINE double bell(double z) { return exp(-0.5 * z * z); }

// 0 where the divisor is above 2^126.
FXFUSE_INLINE float divide(float a, float b) { return __fdividef(a, b); }
FXFUSE_INLINE double divide(double a, double b) { return a / b; }

// Maximum and minimum through which NaN passes: one instruction each.
FXFUSE_INLINE float larger(float a, float b) {
  float result;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
#else
  result = a < b ? b : a;
#endif
  return result;
}
FXFUSE_INLINE float smaller(float a, float b) {
  float result;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
#else
  result = a > b ? b : a;
#endif
  return result;
}
FXFUSE_INLINE double larger(double a, double b) { return a < b ? b : a; }
FXFUSE_INLINE double smaller(double a, double b) { return a > b ? b : a; }

#include "../activation.h"

// The activation that a problem names.  All threads take the same branch, once for a vector: so one
// kernel serves every activation, and all that surrounds it is compiled once instead of twelve
// times.
template <class A>
class ActivationOf {
 public:
  FXFUSE_INLINE explicit ActivationOf(const Problem& problem)
      : kind_(problem.activation),
        params_{static_cast<A>(problem.params[0]), static_cast<A>(problem.params[1])} {
    const A none = static_cast<A>(__longlong_as_double(0x7ff8000000000000));
    gates_[0] = kind_ == kHardtanh ? params_[0] : kind_ == kReLU ? A(0) : none;
    gates_[1] = kind_ == kHardtanh ? params_[1] : none;
    stays(gates_[0]);
    stays(gates_[1]);
  }

  // Replaces z by f(z).
  template <int V>
  FXFUSE_INLINE void value(A (&z)[V]) const {
    if (kind_ == kIdentity || kind_ == kHardtanh || kind_ == kClamp || kind_ == kOpenClamp ||
        kind_ == kReLU) {
      // The values of all these are bounded ones: one piece of code, which every kernel has inside.
      const A infinity = static_cast<A>(__longlong_as_double(0x7ff0000000000000));
      const A low = kind_ == kIdentity ? -infinity : kind_ == kReLU ? A(0) : params_[0];
      const A high = kind_ == kIdentity || kind_ == kReLU ? infinity : params_[1];
#pragma unroll
      for (int j = 0; j < V; ++j) z[j] = smaller(larger(z[j], low), high);
      return;
    }
    // At most 8 at once: what more of them have under way would need more registers than all else.
    constexpr int kAtOnce = V % 8 == 0 ? 8 : V;
#pragma unroll
    for (int n = 0; n < V; n += kAtOnce) {
      visit([&](const auto& activation) {
#pragma unroll
        for (int j = n; j < n + kAtOnce; ++j) z[j] = activation.value(z[j]);
      });
    }
  }

  // Replaces the gradient for f(z) by that for z.
  template <int V>
  FXFUSE_INLINE void grad(const A (&z)[V], A (&gradient)[V]) const {
    if (kind_ == kIdentity || kind_ == kHardtanh || kind_ == kReLU) {
      // All these are a hardtanh to it, without a jump: a bound that is NaN closes no gate.
      const double gates[] = {gates_[0], gates_[1]};
      const Hardtanh<A> activation(gates);
#pragma unroll
      for (int j = 0; j < V; ++j) gradient[j] = activation.grad(z[j], gradient[j]);
      return;
    }
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

  // Keeps a value in its register: it would be converted from double anew wherever it is used.
  FXFUSE_INLINE static void stays(float& value) { asm volatile("" : "+f"(value)); }
  FXFUSE_INLINE static void stays(double& value) { asm volatile("" : "+d"(value)); }

  Activation kind_;
  A params_[2];
  A gates_[2];  // the bounds of the gradient
};

}  // namespace fxfuse::cuda
