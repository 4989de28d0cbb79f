// One functor per activation: value(z) is f(z), grad(z, dy) is dy * f'(z).
//
// V is a scalar in CUDA code and a vector of floats or doubles in CPU code.  This file is included
// where these names are in scope for V: broadcast<V>(double), select(mask, a, b) (which is
// `mask ? a : b`, per lane), exponential(V), hyperbolic_tangent(V), normal_cdf(V) and
// normal_density(V), of the standard normal distribution; and the macro FXFUSE_INLINE.
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

template <class V>
struct SiLU {
  V one;
  FXFUSE_INLINE explicit SiLU(const double*) : one(broadcast<V>(1.0)) {}
  FXFUSE_INLINE V value(V z) const { return z / (one + exponential(-z)); }
  FXFUSE_INLINE V grad(V z, V dy) const {
    V e = exponential(-z), s = one / (one + e);
    // 1 - s, which for large z would be what the rounding of s left, times z.
    V rest = select(z > V{}, e * s, one - s);
    return dy * s * (one + z * rest);
  }
};

template <class V>
struct Sigmoid {
  V one;
  FXFUSE_INLINE explicit Sigmoid(const double*) : one(broadcast<V>(1.0)) {}
  FXFUSE_INLINE V value(V z) const { return one / (one + exponential(-z)); }
  FXFUSE_INLINE V grad(V z, V dy) const {
    V e = exponential(select(z < V{}, z, -z)), q = one / (one + e);
    return dy * (e * q * q);
  }
};

template <class V>
struct Tanh {
  V one, two;
  FXFUSE_INLINE explicit Tanh(const double*) : one(broadcast<V>(1.0)), two(broadcast<V>(2.0)) {}
  FXFUSE_INLINE V value(V z) const { return hyperbolic_tangent(z); }
  FXFUSE_INLINE V grad(V z, V dy) const {
    V e = exponential(two * select(z < V{}, z, -z)), q = two / (one + e);
    return dy * (e * q * q);
  }
};

template <class V>
struct GELU {
  FXFUSE_INLINE explicit GELU(const double*) {}
  FXFUSE_INLINE V value(V z) const { return z * normal_cdf(z); }
  FXFUSE_INLINE V grad(V z, V dy) const { return dy * (normal_cdf(z) + z * normal_density(z)); }
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
  FXFUSE_INLINE V value(V z) const {
    return z / (one + exponential(-z * (linear + cubic * (z * z))));
  }
  FXFUSE_INLINE V grad(V z, V dy) const {
    z = select(z > limit, limit,
               select(z < -limit, -limit, z));  // or a product is 0 times infinity
    V square = z * z, e = exponential(-z * (linear + cubic * square)), s = one / (one + e);
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
