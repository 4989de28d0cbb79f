// Vectors of the accumulate type, in the vector extensions of GCC and Clang: + - * / ?: and the
// comparisons work on them, and one source is AVX-512, AVX2, SSE2 or NEON.  Intrinsics appear only
// where the extensions have nothing: float16, the first n lanes, minimum and maximum, scaling by a
// power of two, and widening and narrowing, of which GCC 12 makes long sequences.

#define FXFUSE_INLINE inline __attribute__((always_inline))
// For loops over a few vectors that must be in registers: GCC leaves them alone at -O2.
#if defined(__clang__)
#define FXFUSE_UNROLL _Pragma("unroll")
#else
#define FXFUSE_UNROLL _Pragma("GCC unroll 16")
#endif

template <class A, class I>
struct VectorTypes {
  static constexpr int kWidth = FXFUSE_VECTOR_BYTES / sizeof(A);
  typedef A Values __attribute__((vector_size(FXFUSE_VECTOR_BYTES)));
  typedef I Integers __attribute__((vector_size(FXFUSE_VECTOR_BYTES)));
};
template <class A>
struct VectorOf;
template <>
struct VectorOf<float> : VectorTypes<float, int32_t> {};
template <>
struct VectorOf<double> : VectorTypes<double, int64_t> {};

template <class A>
using Vector = typename VectorOf<A>::Values;
template <class A>
using Integers = typename VectorOf<A>::Integers;
template <class A>
constexpr int64_t kWidth = VectorOf<A>::kWidth;

FXFUSE_INLINE int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }

// Counts items, each of which is outer * size + inner: a division takes as long as a short row.
struct Counter {
  int64_t size, outer, inner;
  Counter(int64_t item, int64_t size) : size(size), outer(item / size), inner(item % size) {}
  FXFUSE_INLINE void next() {
    if (++inner == size) {
      inner = 0;
      ++outer;
    }
  }
};

// ---- What activation.h needs -------------------------------------------------------------------

template <class V>
using Scalar = __typeof__(V{}[0] + 0);

template <class V>
FXFUSE_INLINE V broadcast(double value) {
  return static_cast<Scalar<V>>(value) - V{};  // x - 0 is x, -0 too
}

template <class Mask, class V>
FXFUSE_INLINE V select(Mask mask, V a, V b) {
  return mask ? a : b;
}

FXFUSE_INLINE Vector<float> magnitude(Vector<float> value) {
  return (Vector<float>)((Integers<float>)value & INT32_MAX);
}
FXFUSE_INLINE Vector<double> magnitude(Vector<double> value) {
  return (Vector<double>)((Integers<double>)value & INT64_MAX);
}

template <class V>
FXFUSE_INLINE V divide(V a, V b) {
  return a / b;
}
template <class V>
constexpr bool kExactQuotient = true;

// e^x = 2^n e^r with n = rint(x / ln 2), |r| <= ln(2) / 2, and e^r by its Taylor polynomial, whose
// remainder is below a tenth of an ulp.  ln 2 is split in two so that x - n ln 2 is exact enough
// (Cody and Waite).  Beyond the limits 2^n is 0 or infinite, which it is for the n of half a step
// before them too: less than the smallest normal number is lost there, and its inverse.
template <class A>
struct ExponentialOf;
template <>
struct ExponentialOf<float> {
  static constexpr float kLow = -88.029692f, kHigh = 88.722839f;  // n is -127 and 128
  static constexpr int kBias = 127, kMantissaBits = 23, kDegree = 7;
  static constexpr float kRound = 0x1.8p23f + kBias;  // adding it leaves n + bias in the low bits
  static constexpr float kLn2High = 0x1.62e4p-1f, kLn2Low = 0x1.7f7d1cp-20f;
};
template <>
struct ExponentialOf<double> {
  static constexpr double kLow = -709.08956571282405, kHigh = 709.78271289338400;
  static constexpr int kBias = 1023, kMantissaBits = 52, kDegree = 13;
  static constexpr double kRound = 0x1.8p52 + kBias;
  static constexpr double kLn2High = 0x1.62e42feep-1, kLn2Low = 0x1.a39ef35793c76p-33;
};

constexpr double factorial(int n) { return n == 0 ? 1 : n * factorial(n - 1); }

// (r^0 / k! + r^1 / (k+1)! + ... ), up to the degree; k! is the factorial of the lowest term.
template <class A, int k = 0>
FXFUSE_INLINE Vector<A> taylor(Vector<A> r) {
  constexpr A coefficient = static_cast<A>(1 / factorial(k));
  if constexpr (k == ExponentialOf<A>::kDegree) {
    return coefficient - Vector<A>{};
  } else {
    return taylor<A, k + 1>(r) * r + coefficient;
  }
}

// The coefficients of a polynomial, from the constant one on.
template <const auto& kCoefficients, int k = 0, class V>
FXFUSE_INLINE V polynomial(V x) {
  if constexpr (k + 1 == sizeof kCoefficients / sizeof kCoefficients[0]) {
    return broadcast<V>(kCoefficients[k]);
  } else {
    return polynomial<kCoefficients, k + 1>(x) * x + broadcast<V>(kCoefficients[k]);
  }
}

// NaN stays: minimum and maximum return their second operand where one is NaN.
template <class A>
FXFUSE_INLINE Vector<A> at_most(Vector<A> x, A limit) {
  const Vector<A> high = limit - Vector<A>{};
#if defined(FXFUSE_AVX512)
  if constexpr (sizeof(A) == 4) {
    return (Vector<A>)_mm512_maskz_min_ps(0xffff, (__m512)high, (__m512)x);
  } else {
    return (Vector<A>)_mm512_maskz_min_pd(0xff, (__m512d)high, (__m512d)x);
  }
#elif defined(FXFUSE_AVX2)
  if constexpr (sizeof(A) == 4) {
    return (Vector<A>)_mm256_min_ps((__m256)high, (__m256)x);
  } else {
    return (Vector<A>)_mm256_min_pd((__m256d)high, (__m256d)x);
  }
#else
  return x > high ? high : x;
#endif
}
template <class A>
FXFUSE_INLINE Vector<A> at_least(Vector<A> x, A limit) {
  const Vector<A> low = limit - Vector<A>{};
#if defined(FXFUSE_AVX512)
  if constexpr (sizeof(A) == 4) {
    return (Vector<A>)_mm512_maskz_max_ps(0xffff, (__m512)low, (__m512)x);
  } else {
    return (Vector<A>)_mm512_maskz_max_pd(0xff, (__m512d)low, (__m512d)x);
  }
#elif defined(FXFUSE_AVX2)
  if constexpr (sizeof(A) == 4) {
    return (Vector<A>)_mm256_max_ps((__m256)low, (__m256)x);
  } else {
    return (Vector<A>)_mm256_max_pd((__m256d)low, (__m256d)x);
  }
#else
  return x < low ? low : x;
#endif
}
template <class A>
FXFUSE_INLINE Vector<A> clamped(Vector<A> x, A low, A high) {
  return at_least<A>(at_most<A>(x, high), low);
}

// 2^n and r of an x within the limits of ExponentialOf.
template <class A>
struct Reduced {
  Vector<A> power, r;
  explicit FXFUSE_INLINE Reduced(Vector<A> x) {
    using E = ExponentialOf<A>;
    const Vector<A> shifted = x * static_cast<A>(1.4426950408889634074) + E::kRound;
    const Vector<A> n = shifted - E::kRound;
    r = (x - n * E::kLn2High) - n * E::kLn2Low;
    power = (Vector<A>)((Integers<A>)shifted << E::kMantissaBits);
  }
};

template <class A>
FXFUSE_INLINE Vector<A> exponential_of(Vector<A> x) {
  using E = ExponentialOf<A>;
  const Reduced<A> reduced(clamped<A>(x, E::kLow, E::kHigh));
  return taylor<A>(reduced.r) * reduced.power;
}
FXFUSE_INLINE Vector<float> exponential(Vector<float> x) { return exponential_of<float>(x); }
FXFUSE_INLINE Vector<double> exponential(Vector<double> x) { return exponential_of<double>(x); }

// tanh z = -m / (2 + m), where m = e^(-2 z) - 1 is computed as 2^n (e^r - 1) + (2^n - 1), so that
// nothing is lost for small z; for z < 0 by symmetry.
template <class A>
FXFUSE_INLINE Vector<A> hyperbolic_tangent_of(Vector<A> z) {
  const Vector<A> negative = z < Vector<A>{} ? z : -z;
  const Reduced<A> reduced(at_least<A>(2 * negative, -64));  // tanh 32 is 1
  const Vector<A> m = reduced.power * (taylor<A, 1>(reduced.r) * reduced.r) + (reduced.power - 1);
  const Vector<A> t = m / (2 + m);
  return z < Vector<A>{} ? t : -t;
}
FXFUSE_INLINE Vector<float> hyperbolic_tangent(Vector<float> z) {
  return hyperbolic_tangent_of<float>(z);
}
FXFUSE_INLINE Vector<double> hyperbolic_tangent(Vector<double> z) {
  return hyperbolic_tangent_of<double>(z);
}

// e^(-z^2 / 2).  The exponent is rounded to half of its digits, and what that lost is added to r:
// an error of half an ulp in an exponent of 80 would be one of 40 ulp in the result.
FXFUSE_INLINE Vector<double> bell(Vector<double> z) {
  z = clamped<double>(z, -37.66, 37.66);  // where it is 0
  const Vector<double> high =
      (Vector<double>)((Integers<double>)z >> 27 << 27);  // its square is exact
  Reduced<double> reduced(high * high * -0.5);
  reduced.r += (high - z) * (high + z) * 0.5;
  return taylor<double>(reduced.r) * reduced.power;
}

// Floats of which the result will be rounded to 16 bits: their exponential is off by 2^-18 of it.
struct Coarse {
  Vector<float> value;

  FXFUSE_INLINE Coarse() : value{} {}
  FXFUSE_INLINE Coarse(Vector<float> value) : value(value) {}
  FXFUSE_INLINE operator Vector<float>() const { return value; }

  FXFUSE_INLINE friend Coarse operator-(Coarse a) { return -a.value; }
  FXFUSE_INLINE friend Coarse operator+(Coarse a, Coarse b) { return a.value + b.value; }
  FXFUSE_INLINE friend Coarse operator-(Coarse a, Coarse b) { return a.value - b.value; }
  FXFUSE_INLINE friend Coarse operator*(Coarse a, Coarse b) { return a.value * b.value; }
  FXFUSE_INLINE friend auto operator<(Coarse a, Coarse b) { return a.value < b.value; }
  FXFUSE_INLINE friend auto operator>(Coarse a, Coarse b) { return a.value > b.value; }
};

template <>
FXFUSE_INLINE Coarse broadcast<Coarse>(double value) {
  return broadcast<Vector<float>>(value);
}
FXFUSE_INLINE Coarse select(Integers<float> mask, Coarse a, Coarse b) {
  return mask ? a.value : b.value;
}
FXFUSE_INLINE Coarse magnitude(Coarse a) { return magnitude(a.value); }
FXFUSE_INLINE Coarse divide(Coarse a, Coarse b) { return a.value / b.value; }
FXFUSE_INLINE Coarse hyperbolic_tangent(Coarse z) { return hyperbolic_tangent(z.value); }

// 2^f for |f| <= 1/2, to a relative error of 2.6e-6.
constexpr float kPowerOfTwo[] = {0x1.ffffe8p-1f, 0x1.62e0dcp-1f, 0x1.ec06dap-3f, 0x1.ca1440p-5f,
                                 0x1.3997d6p-7f};

FXFUSE_INLINE Coarse exponential(Coarse x) {
  using E = ExponentialOf<float>;
  constexpr float kLog2E = 1.44269504f;
  const Vector<float> limited = clamped<float>(x, E::kLow, E::kHigh);
  const Vector<float> shifted = limited * kLog2E + E::kRound;
  const Vector<float> f = limited * kLog2E - (shifted - E::kRound);
  return polynomial<kPowerOfTwo>(f) * (Vector<float>)((Integers<float>)shifted << E::kMantissaBits);
}

// ---- Types in memory ---------------------------------------------------------------------------

struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

typedef uint32_t Bits32 __attribute__((vector_size(FXFUSE_VECTOR_BYTES)));
typedef uint16_t Bits16 __attribute__((vector_size(FXFUSE_VECTOR_BYTES / 2)));
typedef uint16_t Bits16x2 __attribute__((vector_size(FXFUSE_VECTOR_BYTES)));

// The masked forms stand for the plain ones, which make GCC 12 warn of an uninitialised variable.
FXFUSE_INLINE Bits32 extend(Bits16 v) {
#if defined(FXFUSE_AVX512)
  return (Bits32)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)v);
#elif defined(FXFUSE_AVX2)
  return (Bits32)_mm256_cvtepu16_epi32((__m128i)v);
#else
  return __builtin_convertvector(v, Bits32);
#endif
}

FXFUSE_INLINE Bits16 truncate(Bits32 v) {  // values below 65536
#if defined(FXFUSE_AVX512)
  return (Bits16)_mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)v);
#elif defined(FXFUSE_AVX2)
  __m256i packed = _mm256_packus_epi32((__m256i)v, (__m256i)v);
  return (Bits16)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
#else
  return __builtin_convertvector(v, Bits16);
#endif
}

FXFUSE_INLINE Bits16 upper_halves(Bits32 v) {
#if defined(FXFUSE_AVX512)
  Bits16x2 odd;
  for (int i = 0; i < 2 * kWidth<float>; ++i) odd[i] = 2 * i + 1;
  const __m512i sorted = _mm512_maskz_permutexvar_epi16(~0u, (__m512i)odd, (__m512i)v);
  return (Bits16)_mm512_maskz_extracti64x4_epi64(0xf, sorted, 0);
#elif defined(FXFUSE_AVX2)
  const __m256i odd = _mm256_setr_epi8(2, 3, 6, 7, 10, 11, 14, 15, -1, -1, -1, -1, -1, -1, -1, -1,
                                       2, 3, 6, 7, 10, 11, 14, 15, -1, -1, -1, -1, -1, -1, -1, -1);
  const __m256i sorted = _mm256_shuffle_epi8((__m256i)v, odd);
  return (Bits16)_mm256_castsi256_si128(_mm256_permute4x64_epi64(sorted, 0x08));
#else
  return __builtin_convertvector(v >> 16, Bits16);
#endif
}

// Storage<T> turns a vector of T, as it lies in memory, into the accumulate type and back.
template <class T>
struct Storage {
  using Accumulate = T;
  using Raw = Vector<T>;
  static FXFUSE_INLINE Vector<T> widen(Raw v) { return v; }
  static FXFUSE_INLINE Raw narrow(Vector<T> v) { return v; }
};

template <>
struct Storage<BFloat16> {
  using Accumulate = float;
  using Raw = Bits16;
  static FXFUSE_INLINE Vector<float> widen(Raw v) { return (Vector<float>)(extend(v) << 16); }
  // To nearest, ties to even.  NaN is not rounded: having been computed, it has its highest bit
  // set.
  static FXFUSE_INLINE Raw narrow(Vector<float> v) {
    const Bits32 bits = (Bits32)v, rounding = 0x7fffu + ((bits >> 16) & 1u);
    return upper_halves(bits + (v == v ? rounding : Bits32{}));
  }
};

template <>
struct Storage<Half> {
  using Accumulate = float;
  using Raw = Bits16;
#if defined(FXFUSE_AVX512)
  static FXFUSE_INLINE Vector<float> widen(Raw v) {
    return (Vector<float>)_mm512_maskz_cvtph_ps(0xffff, (__m256i)v);
  }
  static FXFUSE_INLINE Raw narrow(Vector<float> v) {
    return (Raw)_mm512_maskz_cvtps_ph(0xffff, (__m512)v, _MM_FROUND_TO_NEAREST_INT);
  }
#elif defined(FXFUSE_AVX2)
  static FXFUSE_INLINE Vector<float> widen(Raw v) {
    return (Vector<float>)_mm256_cvtph_ps((__m128i)v);
  }
  static FXFUSE_INLINE Raw narrow(Vector<float> v) {
    return (Raw)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT);
  }
#else
  static FXFUSE_INLINE Vector<float> widen(Raw v) {
    Bits32 half = extend(v);
    Bits32 magnitude = (half & 0x7fffu) << 13;
    // Moves the exponent; exact for subnormals too.
    Bits32 scaled = (Bits32)((Vector<float>)magnitude * 0x1p112f);
    scaled = magnitude >= (0x7c00u << 13) ? magnitude | 0x7f800000u : scaled;
    return (Vector<float>)(scaled | ((half & 0x8000u) << 16));
  }
  static FXFUSE_INLINE Raw narrow(Vector<float> v) {
    Bits32 sign = (Bits32)v & 0x80000000u;
    Bits32 magnitude = (Bits32)v ^ sign;
    // A subnormal is rounded by adding a number whose last bit is its last bit.
    Bits32 subnormal = (Bits32)((Vector<float>)magnitude + 0.5f) - 0x3f000000u;
    Bits32 half = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    half = magnitude < (113u << 23) ? subnormal : half;
    half = magnitude >= 0x477ff000u ? 0x7c00u + Bits32{} : half;  // 65520 rounds to infinity
    half = magnitude > 0x7f800000u ? 0x7e00u + Bits32{} : half;   // NaN
    return truncate(half | (sign >> 16));
  }
#endif
};

template <class T>
using Accumulate = typename Storage<T>::Accumulate;

// ---- Loads and stores --------------------------------------------------------------------------
// Of a whole vector, or of its first `count` lanes where a run ends.

struct Whole {};
struct First {
  int64_t count;  // 1 to width - 1
};

template <class A>
FXFUSE_INLINE Integers<A> first_lanes(int64_t count) {  // all bits set in the lanes below count
  Integers<A> lane;
  for (int i = 0; i < kWidth<A>; ++i) lane[i] = i;
  return lane < static_cast<__typeof__(lane[0] + 0)>(count) + Integers<A>{};
}

#if !defined(FXFUSE_AVX512)
// Copies fewer than 2 * kPiece bytes, in pieces of halving size: no call, no loop.
template <int kPiece>
FXFUSE_INLINE void copy_pieces(char* to, const char* from, int64_t bytes) {
  if constexpr (kPiece > 1) {
    if (bytes & kPiece) {
      __builtin_memcpy(to, from, kPiece);
      to += kPiece;
      from += kPiece;
    }
    copy_pieces<kPiece / 2>(to, from, bytes);
  }
}
#endif

template <class T>
FXFUSE_INLINE Vector<Accumulate<T>> load(const T* from, Whole = {}) {
  typename Storage<T>::Raw raw;
  __builtin_memcpy(&raw, from, sizeof raw);
  return Storage<T>::widen(raw);
}

// The other lanes are 0.
template <class T>
FXFUSE_INLINE Vector<Accumulate<T>> load(const T* from, First part) {
  typename Storage<T>::Raw raw{};
#if defined(FXFUSE_AVX512)
  unsigned mask = (1u << part.count) - 1;
  if constexpr (sizeof(T) == 8) raw = (Vector<T>)_mm512_maskz_loadu_epi64(mask, from);
  if constexpr (sizeof(T) == 4) raw = (Vector<T>)_mm512_maskz_loadu_epi32(mask, from);
  if constexpr (sizeof(T) == 2) raw = (Bits16)_mm256_maskz_loadu_epi16(mask, from);
#else
#if defined(FXFUSE_AVX2)
  if constexpr (sizeof(T) == 2) {
    // Pairs, and the last value once more: where the count is odd it is not in a pair.
    const __m128i lane = _mm_set_epi16(7, 6, 5, 4, 3, 2, 1, 0);
    const __m128i last = _mm_cmpeq_epi16(lane, _mm_set1_epi16(part.count - 1));
    const __m128i pairs =
        _mm_cmpgt_epi32(_mm_set1_epi32(part.count / 2), _mm_set_epi32(3, 2, 1, 0));
    raw = (Bits16)_mm_maskload_epi32((const int*)from, pairs);
    raw |= (Bits16)_mm_and_si128(last, _mm_set1_epi16(from[part.count - 1].bits));
    return Storage<T>::widen(raw);
  }
  auto mask = (__m256i)first_lanes<Accumulate<T>>(part.count);
  if constexpr (sizeof(T) == 8) return (Vector<T>)_mm256_maskload_pd(from, mask);
  if constexpr (sizeof(T) == 4) return (Vector<T>)_mm256_maskload_ps(from, mask);
#else
  copy_pieces<sizeof raw / 2>((char*)&raw, (const char*)from, part.count * sizeof(T));
#endif
#endif
  return Storage<T>::widen(raw);
}

template <class T>
FXFUSE_INLINE void store(T* to, Vector<Accumulate<T>> v, Whole = {}) {
  auto raw = Storage<T>::narrow(v);
  __builtin_memcpy(to, &raw, sizeof raw);
}

template <class T>
FXFUSE_INLINE void store(T* to, Vector<Accumulate<T>> v, First part) {
  auto raw = Storage<T>::narrow(v);
#if defined(FXFUSE_AVX512)
  unsigned mask = (1u << part.count) - 1;
  if constexpr (sizeof(T) == 8) _mm512_mask_storeu_epi64(to, mask, (__m512i)raw);
  if constexpr (sizeof(T) == 4) _mm512_mask_storeu_epi32(to, mask, (__m512i)raw);
  if constexpr (sizeof(T) == 2) _mm256_mask_storeu_epi16(to, mask, (__m256i)raw);
#else
#if defined(FXFUSE_AVX2)
  if constexpr (sizeof(T) >= 4) {
    auto mask = (__m256i)first_lanes<T>(part.count);
    if constexpr (sizeof(T) == 8) return _mm256_maskstore_pd(to, mask, (__m256d)raw);
    if constexpr (sizeof(T) == 4) return _mm256_maskstore_ps(to, mask, (__m256)raw);
  }
#endif
  copy_pieces<sizeof raw / 2>((char*)to, (const char*)&raw, part.count * sizeof(T));
#endif
}

// v with 0 in the lanes that lie beyond the run, whatever was computed there.
template <class A>
FXFUSE_INLINE Vector<A> keep(Vector<A> v, Whole) {
  return v;
}
template <class A>
FXFUSE_INLINE Vector<A> keep(Vector<A> v, First part) {
  return first_lanes<A>(part.count) ? v : Vector<A>{};
}

// Calls f(i, part) for the vectors that cover [0, n).
template <class A, class F>
FXFUSE_INLINE void for_vectors(int64_t n, F f) {
  int64_t i = 0;
  for (; i + kWidth<A> <= n; i += kWidth<A>) f(i, Whole{});
  if (i < n) f(i, First{n - i});
}

// Writes f(i, part) to the vectors that cover a run of n values.  The last vector is a whole one
// too, and what it covers a second time is written twice: its parts would cost more, and a masked
// store would hold up the next run's loads from beside it.  It is computed first, so that f may
// read the memory that is written.
template <class T, class F>
FXFUSE_INLINE void write_run(T* to, int64_t n, F f) {
  constexpr int64_t w = kWidth<Accumulate<T>>;
  if (n < w) return store(to, f(0, First{n}), First{n});
  const auto last = f(n - w, Whole{});
  for (int64_t i = 0; i < n - w; i += w) store(to + i, f(i, Whole{}));
  store(to + (n - w), last);
}

// Sets n values, and up to a vector after them.
template <class A>
FXFUSE_INLINE void fill(A* to, int64_t n, A value) {
  for (int64_t i = 0; i < n; i += kWidth<A>) store(to + i, broadcast<Vector<A>>(value));
}

// ---- Arithmetic --------------------------------------------------------------------------------

// Sum of the lanes, as a tree: the vector is folded in halves.
template <class A, int kBytes>
struct LaneSum {
  typedef A Values __attribute__((vector_size(kBytes)));
  typedef A Half __attribute__((vector_size(kBytes / 2)));
  static FXFUSE_INLINE A of(Values v) {
    if constexpr (kBytes == 2 * sizeof(A)) {
      return v[0] + v[1];
    } else {
      Half low, high;
      __builtin_memcpy(&low, &v, sizeof low);
      __builtin_memcpy(&high, reinterpret_cast<const char*>(&v) + sizeof low, sizeof high);
      return LaneSum<A, kBytes / 2>::of(low + high);
    }
  }
};
template <class A>
FXFUSE_INLINE A sum_lanes(Vector<A> v) {
  return LaneSum<A, FXFUSE_VECTOR_BYTES>::of(v);
}

#if defined(__clang__)
template <class A, int kHalf, int kFirst, int... kLanes>
FXFUSE_INLINE Vector<A> halves(Vector<A> a, Vector<A> b, std::integer_sequence<int, kLanes...>) {
  return __builtin_shufflevector(a, b, (kLanes / kHalf * 2 * kHalf + kLanes % kHalf + kFirst)...);
}
#endif

// The low (kFirst = 0) or high (kFirst = kHalf) halves of all segments of 2 * kHalf lanes of a,
// then of b.
template <class A, int kHalf, int kFirst>
FXFUSE_INLINE Vector<A> halves(Vector<A> a, Vector<A> b) {
#if defined(__clang__)
  return halves<A, kHalf, kFirst>(a, b, std::make_integer_sequence<int, kWidth<A>>{});
#else
  Integers<A> lanes;
  for (int i = 0; i < kWidth<A>; ++i) lanes[i] = i / kHalf * 2 * kHalf + i % kHalf + kFirst;
  return __builtin_shuffle(a, b, lanes);
#endif
}

// sum_lanes of each of kWidth vectors, which are overwritten, as the lanes of one.
template <class A, int kHalf = kWidth<A> / 2>
FXFUSE_INLINE Vector<A> sum_rows(Vector<A>* rows) {
  FXFUSE_UNROLL
  for (int i = 0; i < kHalf; ++i) {
    const Vector<A> a = rows[2 * i], b = rows[2 * i + 1];
    rows[i] = halves<A, kHalf, 0>(a, b) + halves<A, kHalf, kHalf>(a, b);
  }
  if constexpr (kHalf > 1) return sum_rows<A, kHalf / 2>(rows);
  return rows[0];
}

// Keeps the compiler from making a product part of a fused multiply-add.
template <class A>
FXFUSE_INLINE Vector<A> rounded(Vector<A> v) {
#if defined(FXFUSE_AVX512)
  __asm__("" : "+v"(v));
#elif defined(__x86_64__)
  __asm__("" : "+x"(v));
#elif defined(__aarch64__)
  __asm__("" : "+w"(v));
#else
  __asm__("" : "+m"(v));
#endif
  return v;
}

// Scratch memory.
template <class A>
class Buffer {
 public:
  explicit Buffer(int64_t size) : data_(new A[size]) {}
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { delete[] data_; }
  A* data() const { return data_; }
  A& operator[](int64_t i) const { return data_[i]; }

 private:
  A* data_;
};
