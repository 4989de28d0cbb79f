// The activations of activation.h as CUDA sees them: functors over one float or double.
#pragma once
#include <type_traits>

#include "../group_norm.h"

#define FXFUSE_INLINE __device__ __forceinline__

namespace fxfuse::cuda {

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

// A float that will be rounded to 16 bits: the chip's own exponential and quotient, whose errors
// are 2^-22 of the result (of the exponential, |value| * 2^-24 more), are exact enough for it, and
// take 5 instructions for a SiLU instead of 17.
struct Coarse {
  float value;

  Coarse() = default;
  FXFUSE_INLINE constexpr explicit Coarse(float value) : value(value) {}
  FXFUSE_INLINE constexpr explicit operator float() const { return value; }

  FXFUSE_INLINE friend Coarse operator-(Coarse a) { return Coarse(-a.value); }
  FXFUSE_INLINE friend Coarse operator+(Coarse a, Coarse b) { return Coarse(a.value + b.value); }
  FXFUSE_INLINE friend Coarse operator-(Coarse a, Coarse b) { return Coarse(a.value - b.value); }
  FXFUSE_INLINE friend Coarse operator*(Coarse a, Coarse b) { return Coarse(a.value * b.value); }
  FXFUSE_INLINE friend bool operator<(Coarse a, Coarse b) { return a.value < b.value; }
  FXFUSE_INLINE friend bool operator>(Coarse a, Coarse b) { return a.value > b.value; }
  FXFUSE_INLINE friend bool operator<=(Coarse a, Coarse b) { return a.value <= b.value; }
  FXFUSE_INLINE friend bool operator>=(Coarse a, Coarse b) { return a.value >= b.value; }
};

// What the activation of a value is computed in: A, the value's type, or coarser where the result
// is written as an O of 16 bits.
template <class A, class O>
using Precision = std::conditional_t<sizeof(O) == 2, Coarse, A>;

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

FXFUSE_INLINE double exponential(double value) { return exp(value); }
FXFUSE_INLINE float exponential(float value) { return expf(value); }
FXFUSE_INLINE float power_of_two(float exponent) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(exponent));
  return result;
}
FXFUSE_INLINE Coarse exponential(Coarse value) {
  return Coarse(power_of_two(value.value * 1.4426950408889634f));
}

FXFUSE_INLINE double magnitude(double value) { return fabs(value); }
FXFUSE_INLINE float magnitude(float value) { return fabsf(value); }
FXFUSE_INLINE Coarse magnitude(Coarse value) { return Coarse(fabsf(value.value)); }

// a / b, where a float b is not 0, nor below 2^-124.
FXFUSE_INLINE float reciprocal(float value) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}
FXFUSE_INLINE double divide(double a, double b) { return a / b; }
// One step of Newton's takes the chip's reciprocal from 1 ulp to 1/2.  It is one of b / 4, for that
// of b above 2^126 would be flushed to 0; and it is not one of the quotient, for a may be infinite.
FXFUSE_INLINE float divide(float a, float b) {
  const float quarter = 0.25f * b, estimate = reciprocal(quarter);
  const float inverse = fmaf(fmaf(-quarter, estimate, 1.0f), estimate, estimate);
  return 0.25f * a * (estimate == 0.0f ? 0.0f : inverse);  // NaN, where b is infinite
}
// The same where 1 <= b <= 2.
FXFUSE_INLINE float fraction(float a, float b) {
  const float estimate = reciprocal(b);
  return a * fmaf(fmaf(-b, estimate, 1.0f), estimate, estimate);
}
FXFUSE_INLINE Coarse divide(Coarse a, Coarse b) { return Coarse(a.value * reciprocal(b.value)); }

template <class V>
constexpr bool kExactQuotient = !std::is_same_v<V, float>;

FXFUSE_INLINE double hyperbolic_tangent(double value) { return tanh(value); }
FXFUSE_INLINE float hyperbolic_tangent(float value) { return tanhf(value); }
FXFUSE_INLINE Coarse hyperbolic_tangent(Coarse value) { return Coarse(tanhf(value.value)); }

FXFUSE_INLINE double bell(double z) { return exp(-0.5 * z * z); }
FXFUSE_INLINE float bell(float z) { return expf(-0.5f * z * z); }
FXFUSE_INLINE Coarse bell(Coarse z) {
  return Coarse(power_of_two(-0.7213475204444817f * (z.value * z.value)));
}

#include "../activation.h"

template <>
struct NormalTail<Coarse> {  // t up to 13.5; relative error of q P(u): 8.9e-6
  static constexpr bool kCorrects = false;
  static constexpr int kDegree = 5;
  static constexpr double kShift = 3.25, kA = 1.4814814814814814;
  static constexpr float kCoefficients[] = {
      0x1.b4c1aap-1f,  -0x1.0e5604p-1f, 0x1.ab340ap-3f,
      -0x1.4fd2e0p-5f, -0x1.86c896p-9f, 0x1.5c2234p-9f,
  };
};

// The activation that a problem names.  All threads take the same branch, once for a vector: so one
// kernel serves every activation, and all that surrounds it is compiled once instead of twelve
// times.  The result will be written as an O.
template <class A, class O>
class ActivationOf {
  using F = Precision<A, O>;

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
    if (kind_ == kSiLU) {  // sooner than through the table of jumps, for many networks have it
      const SiLU<F> activation(nullptr);
#pragma unroll
      for (int j = 0; j < V; ++j) z[j] = static_cast<A>(activation.value(F(z[j])));
      return;
    }
    constexpr int kAtOnce = at_once(V);
#pragma unroll
    for (int n = 0; n < V; n += kAtOnce) {
      visit([&](const auto& activation) {
#pragma unroll
        for (int j = n; j < n + kAtOnce; ++j) z[j] = static_cast<A>(activation.value(F(z[j])));
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
    constexpr int kAtOnce = at_once(V);
#pragma unroll
    for (int n = 0; n < V; n += kAtOnce) {
      visit([&](const auto& activation) {
#pragma unroll
        for (int j = n; j < n + kAtOnce; ++j) {
          gradient[j] = static_cast<A>(activation.grad(F(z[j]), F(gradient[j])));
        }
      });
    }
  }

 private:
  // How many of V values: what more of them have under way would need more registers than all else.
  static constexpr int at_once(int V) {
    const int most = std::is_same_v<F, Coarse> ? 8 : 4;
    return V % most == 0 ? most : V;
  }

  template <class Body>
  FXFUSE_INLINE void visit(Body body) const {
    const double params[] = {params_[0], params_[1]};  // which the functors turn back: no code
    switch (kind_) {
      case kIdentity:
        return body(Identity<F>(params));
      case kHardtanh:
        return body(Hardtanh<F>(params));
      case kClamp:
        return body(Clamp<F>(params));
      case kOpenClamp:
        return body(OpenClamp<F>(params));
      case kReLU:
        return body(ReLU<F>(params));
      case kSiLU:
        return body(SiLU<F>(params));
      case kSigmoid:
        return body(Sigmoid<F>(params));
      case kTanh:
        return body(Tanh<F>(params));
      case kGELU:
        return body(GELU<F>(params));
      case kGELUTanh:
        return body(GELUTanh<F>(params));
      case kHardswish:
        return body(Hardswish<F>(params));
      case kLeakyReLU:
        return body(LeakyReLU<F>(params));
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
