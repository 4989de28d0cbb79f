// GELU of floats, without an exponential: both Phi(z) - 1/2, where Phi is the distribution function
// of the standard normal distribution, and the slope Phi(z) + z Phi'(z) - 1/2 are odd functions,
// here z P(z^2) / Q(z^2) up to a z where they are 1/2.  P and Q are minimax fits.
//
// Like eager's 1 + erf, and unlike activation.h, this loses digits far below 0: the error of the
// value is up to 3 ulp of z, that of the slope up to 3 ulp of 1.

struct NormalDistribution {  // times z it is off by 2.2e-8
  static constexpr float kLimit = 5.5f;
  static constexpr float kP[] = {0x1.988444p-2f,  0x1.1f3b4ep-5f,  0x1.37b5e6p-8f,
                                 0x1.7d8f0cp-13f, 0x1.b527dcp-18f, 0x1.7dc3f6p-26f};
  static constexpr float kQ[] = {0x1p+0f,        0x1.04a96cp-2f,  0x1.e0e608p-6f,
                                 0x1.0093a2p-9f, 0x1.4839fcp-14f, 0x1.409694p-20f};
};
struct SlopeOfGELU {  // it is off by 1.2e-7
  static constexpr float kLimit = 5.7f;
  static constexpr float kP[] = {0x1.98846ep-1f,  -0x1.fbc5ecp-6f, 0x1.d245f0p-7f,
                                 0x1.441f20p-16f, 0x1.2d88a0p-15f, 0x1.9e03b4p-23f};
  static constexpr float kQ[] = {0x1p+0f,        0x1.2d911ap-2f,  0x1.4fb72ap-5f,
                                 0x1.cdc32ap-9f, 0x1.92bc92p-13f, 0x1.2c3eb6p-17f};
};

template <>
struct GELU<Vector<float>> {
  using V = Vector<float>;
  FXFUSE_INLINE explicit GELU(const double*) {}

  template <class Fit>
  static FXFUSE_INLINE V fit(V z, V square) {
    return z * polynomial<Fit::kP>(square) / polynomial<Fit::kQ>(square);
  }

  FXFUSE_INLINE V value(V z) const {
    constexpr float kLimit = NormalDistribution::kLimit;
    // Beyond the limit it is a multiple of z.
    const V odd = fit<NormalDistribution>(z, at_most<float>(z * z, kLimit * kLimit));
    return z * clamped<float>(odd, -0.5f, 0.5f) + 0.5f * z;
  }

  FXFUSE_INLINE V grad(V z, V dy) const {
    z = clamped<float>(z, -SlopeOfGELU::kLimit, SlopeOfGELU::kLimit);
    return dy * (fit<SlopeOfGELU>(z, z * z) + 0.5f);
  }
};

template <>
struct GELU<Coarse> : GELU<Vector<float>> {
  // Not `using`: GCC compiles an inherited constructor for the wrong target.
  FXFUSE_INLINE explicit GELU(const double* params) : GELU<Vector<float>>(params) {}
};
