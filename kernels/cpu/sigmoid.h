// The slopes of sigmoid and tanh of which the result will be rounded to 16 bits.
//
// Eager saves what the activation gave, from which the slope is two products.  Here it takes an
// exponential, so the exponent, which is never above 0, is not held below anything.

// The slope at z of sigmoid (kFactor = 1) or tanh (kFactor = 2): e (kFactor / (1 + e))^2 with
// e = e^-|kFactor z|.
template <int kFactor>
FXFUSE_INLINE Vector<float> sigmoid_slope(Vector<float> z) {
  using E = ExponentialOf<float>;
  constexpr float kLog2E = 1.44269504f * kFactor;
  const Vector<float> x = at_most<float>(magnitude(z), -E::kLow / kFactor);
  const Vector<float> shifted = E::kRound - x * kLog2E;
  const Vector<float> f = (E::kRound - shifted) - x * kLog2E;
  const Vector<float> e =
      polynomial<kPowerOfTwo>(f) * (Vector<float>)((Integers<float>)shifted << E::kMantissaBits);
  const Vector<float> q = broadcast<Vector<float>>(kFactor) / (1 + e);
  return e * q * q;
}

template <>
struct Sigmoid<Coarse> {
  FXFUSE_INLINE explicit Sigmoid(const double*) {}
  FXFUSE_INLINE Coarse value(Coarse z) const {
    const Coarse one = broadcast<Coarse>(1.0);
    return divide(one, one + exponential(-z));
  }
  FXFUSE_INLINE Coarse grad(Coarse z, Coarse dy) const { return dy * sigmoid_slope<1>(z); }
};

template <>
struct Tanh<Coarse> {
  FXFUSE_INLINE explicit Tanh(const double*) {}
  FXFUSE_INLINE Coarse value(Coarse z) const { return hyperbolic_tangent(z); }
  FXFUSE_INLINE Coarse grad(Coarse z, Coarse dy) const { return dy * sigmoid_slope<2>(z); }
};
