// One functor per activation: value(z) is f(z), grad(z, dy) is dy * f'(z).
//
// V is a scalar in CUDA code and a vector of floats or doubles in CPU code.  This file is included
// where these names are in scope for V: Scalar<V>, what a lane of it is, broadcast<V>(double),
// select(mask, a, b) (which is `mask ? a : b`, per lane), magnitude(V), divide(V, V),
// kExactQuotient<V>, whether that is off by no more than the result's rounding, where not,
// fraction(V, V), a quotient by 1 to 2, exponential(V), hyperbolic_tangent(V) and bell(V), which is
// e^(-z^2 / 2); and the macro FXFUSE_INLINE.
//
// A comparison with NaN is false, so each one is written to let NaN through where torch does. Where
// torch's scalar and vector code differ at NaN, the scalar code is followed.  1 - s and 1 - t^2 of
// saturated sigmoids and tangents are not subtracted but computed from what is left, an
// exponential. To add an activation: a functor here, its name in group_norm.h, its row in
// arguments.h, and one line in each of the two tables of kernels (cpu/kernels.h,
// cuda/dispatch.cuh).

template <class V>
struct Identity {
  FXFUSE_INLINE explicit Identity(const double*) {}
  FXFUSE_INLINE V value(V z) const { return z; }
  FXFUSE_INLINE V grad(V, V dy) const { return dy; }
};

// torch.nn.functional.hardtanh and relu6: the gradient is 0 on a bound and passes NaN.
template <class V>
struct Hardtanh {
  V low, high;
  FXFUSE_INLINE explicit Hardtanh(const double* params)
      : low(broadcast<V>(params[0])), high(broadcast<V>(params[1])) {}
  FXFUSE_INLINE V value(V z) const {
    z = select(z < low, low, z);
    return select(z > high, high, z);
  }
  FXFUSE_INLINE V grad(V z, V dy) const {
    dy = select(z <= low, V{}, dy);
    return select(z >= high, V{}, dy);
  }
};

// torch.clamp up to 2.13: the same values (upper bound last, so it wins where the bounds cross),
// but the gradient passes on a bound and is 0 at NaN.  A missing bound is an infinite one.
template <class V>
struct Clamp : Hardtanh<V> {
  // Not `using Hardtanh<V>::Hardtanh`: GCC compiles an inherited constructor for the wrong target.
  FXFUSE_INLINE explicit Clamp(const double* params) : Hardtanh<V>(params) {}
  FXFUSE_INLINE V grad(V z, V dy) const {
    dy = select(z >= this->low, dy, V{});
    return select(z <= this->high, dy, V{});
  }
};

// torch.clamp from 2.14 on: the gradient is 0 on a bound and at NaN.
template <class V>
struct OpenClamp : Hardtanh<V> {
  FXFUSE_INLINE explicit OpenClamp(const double* params) : Hardtanh<V>(params) {}
  FXFUSE_INLINE V grad(V z, V dy) const {
    dy = select(z > this->low, dy, V{});
    return select(z < this->high, dy, V{});
  }
};

template <class V>
struct ReLU {
  FXFUSE_INLINE explicit ReLU(const double*) {}
  FXFUSE_INLINE V value(V z) const { return select(z < V{}, V{}, z); }
  FXFUSE_INLINE V grad(V z, V dy) const { return select(z <= V{}, V{}, dy); }
};

// z times a distribution function, by what this leaves of 1 at |z|.  Of a large z, whose rounding
// is all that the contract has room for beside those of the norm, nothing more is lost than half an
// ulp.  Minus infinity gives NaN, as in torch.
template <class V>
FXFUSE_INLINE V gated(V z, V tail) {
  const V size = select(z > broadcast<V>(1e30), V{}, magnitude(z));
  return select(z < V{}, V{}, z) - size * tail;
}

// z times the sigmoid of z times `steepness`, which is above 0.
template <class V>
FXFUSE_INLINE V times_sigmoid(V z, V steepness) {
  const V one = broadcast<V>(1.0);
  if constexpr (kExactQuotient<V>) {
    return divide(z, one + exponential(-z * steepness));
  } else {
    const V e = exponential(-magnitude(z) * steepness);
    return gated(z, fraction(e, one + e));
  }
}

template <class V>
struct SiLU {
  V one;
  FXFUSE_INLINE explicit SiLU(const double*) : one(broadcast<V>(1.0)) {}
  FXFUSE_INLINE V value(V z) const { return times_sigmoid(z, one); }
  FXFUSE_INLINE V grad(V z, V dy) const {
    V e = exponential(-z), s = divide(one, one + e);
    // 1 - s, which for large z would be what the rounding of s left, times z.
    V rest = select(z > V{}, e * s, one - s);
    return dy * s * (one + z * rest);
  }
};

template <class V>
struct Sigmoid {
  V one;
  FXFUSE_INLINE explicit Sigmoid(const double*) : one(broadcast<V>(1.0)) {}
  FXFUSE_INLINE V value(V z) const { return divide(one, one + exponential(-z)); }
  FXFUSE_INLINE V grad(V z, V dy) const {
    V e = exponential(-magnitude(z)), q = divide(one, one + e);
    return dy * (e * q * q);
  }
};

template <class V>
struct Tanh {
  V one, two;
  FXFUSE_INLINE explicit Tanh(const double*) : one(broadcast<V>(1.0)), two(broadcast<V>(2.0)) {}
  FXFUSE_INLINE V value(V z) const { return hyperbolic_tangent(z); }
  FXFUSE_INLINE V grad(V z, V dy) const {
    V e = exponential(-two * magnitude(z)), q = divide(two, one + e);
    return dy * (e * q * q);
  }
};

// The upper tail of the normal distribution is e^(-t^2 / 2) q P(u) for t >= 0, where q = 1 / (t +
// K) and u = a - b q runs over [-1, 1] while t goes from 0 to where the tail underflows.  P
// interpolates in Chebyshev's nodes.  The idea is that of M. M. Shepherd and J. G. Laframboise,
// "Chebyshev approximation of (1 + 2x) exp(x^2) erfc x in 0 <= x < infinity", Math. Comp. 36
// (1981).
//
// Where kCorrects, q gets its rounding errors back, which P would multiply, and u comes from t, for
// a - b q would lose digits.  Then t must be finite.
template <class A>
struct NormalTail;
template <>
struct NormalTail<float> {  // t up to 14.5; relative error of q P(u): 1.3e-8
  static constexpr bool kCorrects = true;
  static constexpr int kDegree = 9;
  static constexpr double kShift = 3.5, kA = 1.4827586206896552;
  static constexpr double kCoefficients[] = {
      0x1.bc001ap-1f, -0x1.217976p-1f,  0x1.00d8b2p-2f,   -0x1.0f4944p-4f, 0x1.04ff4cp-8f,
      0x1.ad5d4ep-9f, -0x1.2fd24ep-11f, -0x1.d3cdf2p-13f, 0x1.50517cp-15f, 0x1.1ed72ep-16f,
  };
};
template <>
struct NormalTail<double> {  // t up to 39; relative error of q P(u): 2.4e-17
  static constexpr bool kCorrects = true;
  static constexpr int kDegree = 21;
  static constexpr double kShift = 5, kA = 1.2564102564102564;
  static constexpr double kCoefficients[] = {
      0x1.b410aa4371b2cp-1,   -0x1.6707186ca2d97p-1, 0x1.ef9b0c175bfc6p-2,   -0x1.1bdf28be2181dp-2,
      0x1.07842bcdd870dp-3,   -0x1.789c3a7431dd6p-5, 0x1.6a971e4b6f562p-7,   -0x1.c45428dd20015p-11,
      -0x1.12e943941b2f3p-11, 0x1.953a42744aa2ap-13, 0x1.2c0da7598484ep-18,  -0x1.2accbb4d0f651p-16,
      0x1.f2525850ca607p-20,  0x1.a945ad8cb8a2cp-20, -0x1.3cb67404d85c4p-22, -0x1.58452a17d5317p-23,
      0x1.297145c63966bp-25,  0x1.41d6577606368p-26, -0x1.cc3e5cf9a04b6p-29, -0x1.2c6a9119aee50p-29,
      0x1.c90eb6c90c6c6p-33,  0x1.77d2d932c63bap-33,
  };
};

template <class V, int k = 0>
FXFUSE_INLINE V normal_tail_polynomial(V u) {
  using Tail = NormalTail<Scalar<V>>;
  const V coefficient = broadcast<V>(Tail::kCoefficients[k]);
  if constexpr (k == Tail::kDegree) {
    return coefficient;
  } else {
    return normal_tail_polynomial<V, k + 1>(u) * u + coefficient;
  }
}

// z times the distribution function of the standard normal distribution.  Far below 0 it keeps its
// digits, which 1 + erf does not.  cpu/gelu.h has another one for floats.
template <class V>
struct GELU {
  using Tail = NormalTail<Scalar<V>>;
  V one, shift, a, slope, limit, density;
  FXFUSE_INLINE explicit GELU(const double*)
      : one(broadcast<V>(1.0)),
        shift(broadcast<V>(Tail::kShift)),
        a(broadcast<V>(Tail::kA)),
        slope(broadcast<V>(Tail::kShift * (1 + Tail::kA))),
        limit(broadcast<V>(64.0)),                    // where the tail is 0
        density(broadcast<V>(0.3989422804014327)) {}  // 1 / sqrt(2 pi)
  // The distribution function at -|z|.
  FXFUSE_INLINE V tail(V z, V bell_z) const {
    V t = magnitude(z), u, q;
    if constexpr (Tail::kCorrects) {
      t = select(t > limit, limit, t);
      V sum = t + shift;
      q = divide(one, sum);
      q = q + q * ((one - q * sum) - q * (t - (sum - shift)));
      u = (a * t - shift) * q;
    } else {
      q = divide(one, t + shift);
      u = a - slope * q;
    }
    return bell_z * (q * normal_tail_polynomial<V>(u));
  }
  FXFUSE_INLINE V value(V z) const { return gated(z, tail(z, bell(z))); }
  FXFUSE_INLINE V grad(V z, V dy) const {
    V bell_z = bell(z), below = tail(z, bell_z);
    return dy * (select(z < V{}, below, one - below) + z * (density * bell_z));
  }
};

// torch.nn.functional.gelu(approximate="tanh"): z (1 + tanh u) / 2 with
// u = sqrt(2 / pi) (z + 0.044715 z^3), which is z sigmoid(2 u).
template <class V>
struct GELUTanh {
  static constexpr double kLinear = 1.5957691216057308;  // 2 sqrt(2 / pi)
  static constexpr double kCubic = kLinear * 0.044715;
  V one, linear, cubic, slope, limit;
  FXFUSE_INLINE explicit GELUTanh(const double*)
      : one(broadcast<V>(1.0)),
        linear(broadcast<V>(kLinear)),
        cubic(broadcast<V>(kCubic)),
        slope(broadcast<V>(3 * kCubic)),
        limit(broadcast<V>(32.0)) {}  // where the sigmoid is 0 or 1
  FXFUSE_INLINE V value(V z) const { return times_sigmoid(z, linear + cubic * (z * z)); }
  FXFUSE_INLINE V grad(V z, V dy) const {
    z = select(z > limit, limit,
               select(z < -limit, -limit, z));  // or a product is 0 times infinity
    V square = z * z, e = exponential(-z * (linear + cubic * square)), s = divide(one, one + e);
    V rest = select(z > V{}, e * s, one - s);
    return dy * s * (one + z * rest * (linear + slope * square));
  }
};

// torch.nn.functional.hardswish: z min(max(z + 3, 0), 6) / 6.  The gradient is 0 at -3, dy at 3,
// and passes NaN.
template <class V>
struct Hardswish {
  V three, six, sixth, third, half;
  FXFUSE_INLINE explicit Hardswish(const double*)
      : three(broadcast<V>(3.0)),
        six(broadcast<V>(6.0)),
        sixth(broadcast<V>(1.0 / 6)),
        third(broadcast<V>(1.0 / 3)),
        half(broadcast<V>(0.5)) {}
  FXFUSE_INLINE V value(V z) const {
    V t = z + three;
    t = select(t < V{}, V{}, t);
    t = select(t > six, six, t);
    return z * (t * sixth);
  }
  FXFUSE_INLINE V grad(V z, V dy) const {
    V inside = dy * (z * third + half);
    dy = select(z < three, inside, dy);
    return select(z <= -three, V{}, dy);
  }
};

// torch.nn.functional.leaky_relu: at 0 and at NaN the gradient is that of the negative side.
template <class V>
struct LeakyReLU {
  V negative_slope;
  FXFUSE_INLINE explicit LeakyReLU(const double* params)
      : negative_slope(broadcast<V>(params[0])) {}
  FXFUSE_INLINE V value(V z) const { return select(z > V{}, z, z * negative_slope); }
  FXFUSE_INLINE V grad(V z, V dy) const { return select(z > V{}, dy, dy * negative_slope); }
};
