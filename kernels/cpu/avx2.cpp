// The kernels for AVX2, FMA and F16C.
#include "work.h"

#if defined(__x86_64__)
#include <immintrin.h>

// Unlike an attribute of a function, these also hold for the lambdas and templates that follow.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,bmi,bmi2"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,bmi,bmi2")
#endif

#define FXFUSE_AVX2
#define FXFUSE_VECTOR_BYTES 32

namespace fxfuse::cpu::avx2 {
#include "kernels.h"
}  // namespace fxfuse::cpu::avx2

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif  // __x86_64__
