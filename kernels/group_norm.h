// What a kernel is asked to do, on either device.  No torch header may be included here: the CPU
// kernels are compiled once per instruction set and the CUDA kernels by nvcc, both without torch.
#pragma once
#include <cstdint>

namespace fxfuse {

enum Dtype : int { kFloat, kDouble, kHalf, kBFloat16 };

// The functors of activation.h.  `relu6` is Hardtanh with the bounds 0 and 6.
enum Activation : int {
  kIdentity,
  kHardtanh,
  kClamp,
  kOpenClamp,
  kReLU,
  kSiLU,
  kSigmoid,
  kTanh,
  kGELU,
  kGELUTanh,
  kHardswish,
  kLeakyReLU,
};

// GroupNorm followed by an activation, y = f((x - mean) * rstd * weight + bias), over an input seen
// as (batch, channels, spatial); spatial is the product of the dimensions after the channels.
// Every tensor is dense.  In memory the order is (batch, channels, spatial), or
// (batch, spatial, channels) where `channels_last` is set; grad_output, output and dinput have the
// layout of the input.  No size is 0.
//
// Statistics are computed and saved in the accumulate type: double for double, else float.
struct Problem {
  int device;  // index of the GPU; unused on the CPU
  int64_t batch, channels, spatial;
  int64_t num_groups;  // divides channels
  bool channels_last;
  double eps;
  Activation activation;
  double params[2];    // Hardtanh and its kin: the bounds, already rounded to output_dtype;
                       // LeakyReLU: the negative slope, rounded to the accumulate type
  Dtype dtype;         // of input and dinput
  Dtype output_dtype;  // of output and grad_output: dtype, or kFloat where dtype is a 16-bit type
  Dtype affine_dtype;  // of weight, bias, dweight and dbias: dtype or the accumulate type
  const void* input;
  const void* weight;  // (channels), or null for 1
  const void* bias;    // (channels), or null for 0
};

struct Forward : Problem {
  void* output;
  // Both null where no gradient will be asked for.
  // mean is (2, batch, num_groups): the mean rounded to the accumulate type, then what the rounding
  // lost, so that (x - mean[0]) - mean[1] is exact where the mean is large and the spread small.
  void* mean;
  void* rstd;  // (batch, num_groups)
  // Added to the normalised value before the activation, where it is not null: of output_dtype, in
  // the shape and the layout of the output.  On CUDA only, and without a backward.
  const void* residual;
};

// With a Linear ahead of the GroupNorm: what is normalised is x W^T + b, a row of `channels` values
// for each row of x, which are in no memory.  spatial is 1, and `input` is x, (batch, features).
struct LinearForward : Problem {
  int64_t features;
  bool tf32;                  // whether the products of floats may be of TF32
  const void* linear_weight;  // W, (channels, features), of dtype
  const void* linear_bias;    // b, (channels), of dtype, or null for 0
  void* output;               // (batch, channels)
};

struct Backward : Problem {
  const void* grad_output;
  const void* mean;  // as saved by Forward
  const void* rstd;
  void* dinput;  // each null where it is not asked for
  void* dweight;
  void* dbias;
};

}  // namespace fxfuse
