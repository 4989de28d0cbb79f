// What group_norm.cpp asks of the kernels.
//
// The kernels are compiled once per instruction set and may include no header with inline code:
// the linker keeps one copy of an inline function, which might be the one with AVX-512 in it.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "../group_norm.h"

namespace fxfuse::cpu {

// A row is one group of one sample; rows are numbered n * groups + g.
enum class Layout {
  kElements,  // spatial is 1: a row is contiguous, and each value has its own weight and bias
  kRuns,      // a row is contiguous, and a channel is a run of `spatial` values in it
  kPixels,    // channels_last: a pixel is a run of `channels` values
};

struct Moments {
  double mean, m2;  // m2 is the sum of the squared differences from the mean
};

struct Sums {
  double dz, dz_x_hat;  // of dz, and of dz * (x - mean) * rstd
};

// An activation that is called for n values in memory.
template <class A>
struct Function {
  void (*value)(const A* z, void* y, int64_t n, const double* params);
  // dz is also written to `kept`, in the type of dy; where that is A, both are the same memory.
  // `input` is where the values lie that z comes from, in the type of dy too.
  void (*grad)(const A* z, const void* input, const void* dy, A* dz, void* kept, int64_t n,
               const double* params);
};

// A is the accumulate type.  With scale = weight * rstd, z = (x - mean) * scale + bias and
// dz = grad_output * f'(z), the gradient is
//   dinput = dz * scale - offset - (x - mean) * slope,
// where offset is the mean of dz * scale over the row, and slope that of dz * scale * (x - mean),
// times rstd^2.
template <class A>
struct Work {
  Layout layout;
  int64_t batch, channels, groups, spatial;
  double eps;
  double params[2];
  const Function<A>* function;  // null for an activation that is compiled into the kernels
  const void* input;
  const A* weight;  // (channels), never null
  const A* bias;
  A *mean, *mean_low, *rstd;  // (rows), written by the forward kernels and read by all others

  // Forward.  `extent` is what is cut in chunks: the values of a row, or the pixels of a sample.
  void* output;
  int64_t extent, chunk, chunks;  // chunks = ceil(extent / chunk)
  Moments* moments;               // (rows, chunks)

  // Backward.
  const void* grad_output;
  void* dinput;
  // dz of an activation that is called, in the type of dinput, whose memory it may share: the sums
  // write it, dinput reads it.
  void* dz;
  A *offset, *slope;  // (rows); but for kElements, for an x - mean without the low part
  // Parts of the affine gradients, added up in A.  kElements: (slices, channels), a slice being
  // `slice` samples, or null where not asked for.  kPixels: (batch, chunks, channels), dweight
  // without the factor rstd and the low part of the mean.
  A *dweight, *dbias;
  int64_t slice;
  Sums* sums;  // kRuns, kPixels: (batch, channels)
};

template <class A>
using Kernel = void (*)(const Work<A>&, int64_t begin, int64_t end);  // works on items [begin, end)

// A chunk is (row, index) or, of pixels, (sample, index).
template <class A>
struct Kernels {
  Kernel<A> statistics;  // rows, not for kPixels: mean, mean_low and rstd
  Kernel<A> moments;     // chunks: moments
  Kernel<A> combine;     // rows: mean, mean_low and rstd from moments
  Kernel<A> output;      // chunks
  // kElements: rows; adds to dweight and dbias, sets offset and slope.  kRuns: the channels of each
  // sample; sets sums.  kPixels: chunks; sets dweight and dbias.
  Kernel<A> sums;
  Kernel<A> dinput;      // the same items
  Function<A> function;  // null, or what `output` and `sums` want to find in Work
};

// The values of a row whose mean and squares are added up from L1 (16 KiB of float).
constexpr int64_t kChunk = 4096;

namespace plain {
template <class A>
const Kernels<A>& kernels(Dtype dtype, Activation activation);
}
namespace avx2 {
template <class A>
const Kernels<A>& kernels(Dtype dtype, Activation activation);
}
namespace avx512 {
template <class A>
const Kernels<A>& kernels(Dtype dtype, Activation activation);
}

}  // namespace fxfuse::cpu
