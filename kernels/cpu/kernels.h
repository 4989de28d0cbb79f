// Everything that is compiled once per instruction set, and the table of it.  Included inside the
// namespace of each one.

namespace {
// clang-format off: each needs those before it.
#include "vector.h"
#include "../activation.h"
#include "gelu.h"
#include "sigmoid.h"
#include "statistics.h"
#include "output.h"
#include "gradient.h"
// clang-format on

// Activations for which a function is called: the loops are compiled once for all of them.
template <class T, class Value, class Grad>
constexpr Kernels<Accumulate<T>> kCalling = {
    statistics<T>,
    moments<T>,
    combine<Accumulate<T>>,
    output<T, CalledOutput<T>>,
    sums<T, CalledGradient<T>>,
    dinput<T, KeptGradient<T>>,
    {value_of<T, Value>, grad_of<T, Grad>},
};

// T is the type in memory.  Value and Grad are activations that cost less than a call for a block
// of values, and are compiled into the loops; but not for SSE2, the baseline that hardly a machine
// with torch is left with, whose kernels would take a quarter of the library's build.
#if defined(__SSE2__) && FXFUSE_VECTOR_BYTES == 16
template <class T, template <class> class Value, template <class> class Grad = Value>
constexpr Kernels<Accumulate<T>> kInlined =
    kCalling<T, Value<Vector<Accumulate<T>>>, Grad<Vector<Accumulate<T>>>>;
#else
template <class T, template <class> class Value, template <class> class Grad = Value>
constexpr Kernels<Accumulate<T>> kInlined = {
    statistics<T>,
    moments<T>,
    combine<Accumulate<T>>,
    output<T, InlinedOutput<T, Value<Vector<Accumulate<T>>>>>,
    sums<T, InlinedGradient<T, Grad<Vector<Accumulate<T>>>>>,
    dinput<T, InlinedGradient<T, Grad<Vector<Accumulate<T>>>>>,
    {},
};
#endif

// The others cost so much more than a load and a store that a call is nothing beside it.
template <class T, template <class> class Activation>
constexpr Kernels<Accumulate<T>> kCalled =
    kCalling<T, Activation<Precision<T>>, Activation<Precision<T>>>;

template <class T>
const Kernels<Accumulate<T>>& table(Activation activation) {
  switch (activation) {
    case kClamp:
      return kInlined<T, Hardtanh, Clamp>;
    case kOpenClamp:  // of a torch to come
      return kCalling<T, Hardtanh<Vector<Accumulate<T>>>, OpenClamp<Vector<Accumulate<T>>>>;
    case kSiLU:
      return kCalled<T, SiLU>;
    case kSigmoid:
      return kCalled<T, Sigmoid>;
    case kTanh:
      return kCalled<T, Tanh>;
    case kGELU:
      return kCalled<T, GELU>;
    case kGELUTanh:
      return kCalled<T, GELUTanh>;
    case kHardswish:
      return kInlined<T, Hardswish>;
    case kLeakyReLU:
      return kInlined<T, LeakyReLU>;
    case kIdentity:
    case kReLU:
    case kHardtanh:
      break;
  }
  return kInlined<T, Hardtanh>;
}
}  // namespace

template <>
const Kernels<float>& kernels(Dtype dtype, Activation activation) {
  switch (dtype) {
    case kHalf:
      return table<Half>(activation);
    case kBFloat16:
      return table<BFloat16>(activation);
    default:
      return table<float>(activation);
  }
}

template <>
const Kernels<double>& kernels(Dtype, Activation activation) {
  return table<double>(activation);
}
