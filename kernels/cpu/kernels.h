// Everything that is compiled once per instruction set, and the table of it.  Included inside the
// namespace of each one.

namespace {
// clang-format off: each needs those before it.
#include "vector.h"
#include "../activation.h"
#include "statistics.h"
#include "output.h"
#include "gradient.h"
// clang-format on

// T is the type in memory.  Only the last three kernels are compiled for each activation.
template <class T, template <class> class Activation>
constexpr Kernels<Accumulate<T>> kTable = {
    statistics<T>,
    moments<T>,
    combine<Accumulate<T>>,
    output<T, Activation<Vector<Accumulate<T>>>>,
    sums<T, Activation<Vector<Accumulate<T>>>>,
    dinput<T, Activation<Vector<Accumulate<T>>>>,
};

template <class T>
const Kernels<Accumulate<T>>& table(Activation activation) {
  switch (activation) {
    case kHardtanh:
      return kTable<T, Hardtanh>;
    case kClamp:
      return kTable<T, Clamp>;
    case kOpenClamp:
      return kTable<T, OpenClamp>;
    case kReLU:
      return kTable<T, ReLU>;
    case kSiLU:
      return kTable<T, SiLU>;
    case kSigmoid:
      return kTable<T, Sigmoid>;
    case kTanh:
      return kTable<T, Tanh>;
    case kGELU:
      return kTable<T, GELU>;
    case kGELUTanh:
      return kTable<T, GELUTanh>;
    case kHardswish:
      return kTable<T, Hardswish>;
    case kLeakyReLU:
      return kTable<T, LeakyReLU>;
    case kIdentity:
      break;
  }
  return kTable<T, Identity>;
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
