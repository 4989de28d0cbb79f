// One functor per activation: value(z) is f(z), grad(z, dy) is dy * f'(z).
//
// V is a scalar in CUDA code and a vector of floats or doubles in CPU code.  This file is included
// where three names are in scope for V: broadcast<V>(double), select(mask, a, b) (which is
// `mask ? a : b`, per lane) and exponential(V); and the macro FXFUSE_INLINE.
//
// A comparison with NaN is false, so each one is written to let NaN through where torch does.
// To add an activation: a functor here, its name in group_norm.h, its row in arguments.h, and one
// line in each of the two tables of kernels (cpu/kernels.h, cuda/dispatch.cuh).

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
