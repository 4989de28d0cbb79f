// The kernels for AVX-512 (F, BW, DQ and VL).
#include "work.h"

#if defined(__x86_64__)
#include <immintrin.h>

// Unlike an attribute of a function, these also hold for the lambdas and templates that follow.
#if defined(__clang__)
#pragma clang attribute push(                                                             \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi,bmi2"))), \
    apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi,bmi2")
#endif

#define FXFUSE_AVX512
#define FXFUSE_VECTOR_BYTES 64

namespace fxfuse::cpu::avx512 {
#include "kernels.h"
}  // namespace fxfuse::cpu::avx512

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif  // __x86_64__
