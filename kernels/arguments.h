// The torch side of a call: the one place where arguments are checked, the layout and dtype of the
// result are decided, and tensors become the Problem that a device's kernel is asked.
#pragma once
#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <c10/util/env.h>

#include <cmath>
#include <limits>
#include <optional>
#include <tuple>

#include "group_norm.h"

namespace fxfuse {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;
using MaybeDtype = std::optional<at::ScalarType>;

// The 16-bit types that a kernel reads.
inline bool is_half_type(at::ScalarType dtype) {
  return dtype == at::kHalf || dtype == at::kBFloat16;
}

inline at::ScalarType accumulate_type(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

// ---- activations -------------------------------------------------------------------------

struct ActivationRow {
  const char* name;
  Activation functor;
  size_t num_params;
  double fixed[2];  // the parameters of a name that has none of its own
};

constexpr ActivationRow kActivations[] = {
    {"identity", kIdentity, 0, {}},
    {"hardtanh", kHardtanh, 2, {}},
    {"clamp", kClamp, 2, {}},
    {"open_clamp", kOpenClamp, 2, {}},
    {"relu", kReLU, 0, {}},
    {"relu6", kHardtanh, 0, {0, 6}},
    {"silu", kSiLU, 0, {}},
    {"sigmoid", kSigmoid, 0, {}},
    {"tanh", kTanh, 0, {}},
    {"gelu", kGELU, 0, {}},
    {"gelu_tanh", kGELUTanh, 0, {}},
    {"hardswish", kHardswish, 0, {}},
    {"leaky_relu", kLeakyReLU, 1, {}},
};

inline const ActivationRow& find_activation(const char* op, c10::string_view name) {
  for (const ActivationRow& row : kActivations)
    if (name == row.name) return row;
  std::string known;
  for (const ActivationRow& row : kActivations)
    known += (known.empty() ? "" : ", ") + std::string(row.name);
  TORCH_CHECK(false, "fxfuse.", op, ": expected activation to be one of ", known, ", got ", name);
}

// ---- checks ------------------------------------------------------------------------------

inline bool defined(const MaybeTensor& t) { return t.has_value() && t->defined(); }

// What the checks ask about the tensor that is normalised, which a kernel may never write.
struct Normalized {
  int64_t dim;
  c10::SymInt channels;
  at::ScalarType dtype;
  at::Device device;

  Normalized(const Tensor& t)  // every check takes the tensor itself too
      : dim(t.dim()),
        channels(dim < 2 ? c10::SymInt(0) : t.sym_size(1)),
        dtype(t.scalar_type()),
        device(t.device()) {}
};

// Eager's rule, which depends on the device: CPU group_norm takes float32 weights beside a 16-bit
// input, CUDA group_norm does not.  With an explicit dtype the affine parameters are read in their
// own, as long as that is not wider than the result's.
inline void check_affine(const char* op, const char* name, const MaybeTensor& affine,
                         const Normalized& input, at::ScalarType output_dtype) {
  if (!defined(affine)) return;
  TORCH_CHECK(affine->dim() == 1 && affine->sym_size(0) == input.channels, "fxfuse.", op,
              ": expected ", name, " of shape [", input.channels, "], got ", affine->sym_sizes());
  TORCH_CHECK(affine->device() == input.device, "fxfuse.", op, ": expected ", name, " on ",
              input.device, ", got ", affine->device());
  const at::ScalarType dtype = affine->scalar_type(), from = input.dtype;
  const bool mixed = is_half_type(from) && dtype == at::kFloat && input.device.is_cpu();
  const bool converting =
      output_dtype != from && at::isFloatingType(dtype) &&
      (dtype != at::kDouble || output_dtype == at::kDouble || from == at::kDouble);
  TORCH_CHECK(dtype == from || mixed || converting, "fxfuse.", op, ": expected ", name,
              " of dtype ", from, ", got ", dtype);
}

// A parameter as the activation will use it, after eager's own conversion to the dtype: a finite
// one that the dtype, or on CUDA float for a 16-bit one, cannot hold is an error.
inline double round_param(double param, at::ScalarType dtype, bool cpu) {
  const at::Scalar scalar(param);
  switch (dtype) {
    case at::kHalf:
      return cpu ? scalar.to<at::Half>() : at::Half(scalar.to<float>());
    case at::kBFloat16:
      return cpu ? scalar.to<at::BFloat16>() : at::BFloat16(scalar.to<float>());
    case at::kFloat:
      return scalar.to<float>();
    default:
      return param;
  }
}

struct CheckedActivation {
  Activation functor;
  double params[2];
};

// Raises for bad arguments; works on fake tensors with symbolic sizes too.
inline CheckedActivation check_arguments(const char* op, const Normalized& input,
                                         int64_t num_groups, const MaybeTensor& weight,
                                         const MaybeTensor& bias, c10::string_view activation,
                                         at::ArrayRef<double> params, MaybeDtype dtype) {
  TORCH_CHECK(input.dim >= 2, "fxfuse.", op, ": expected input of 2 or more dimensions, got ",
              input.dim);
  TORCH_CHECK(at::isFloatingType(input.dtype), "fxfuse.", op,
              ": expected a floating-point input, got ", input.dtype);
  const at::ScalarType output_dtype = dtype.value_or(input.dtype);
  TORCH_CHECK(at::isFloatingType(output_dtype), "fxfuse.", op,
              ": expected a floating-point dtype, got ", output_dtype);
  TORCH_CHECK(num_groups >= 1, "fxfuse.", op, ": expected num_groups of 1 or more, got ",
              num_groups);
  TORCH_CHECK(input.channels % num_groups == 0, "fxfuse.", op,
              ": expected num_groups to divide the number of channels, ", input.channels, ", got ",
              num_groups);
  check_affine(op, "weight", weight, input, output_dtype);
  check_affine(op, "bias", bias, input, output_dtype);
  TORCH_CHECK(!defined(weight) || !defined(bias) || weight->scalar_type() == bias->scalar_type() ||
                  output_dtype != input.dtype,
              "fxfuse.", op, ": expected weight and bias of one dtype, got ", weight->scalar_type(),
              " and ", bias->scalar_type());

  const ActivationRow& row = find_activation(op, activation);
  TORCH_CHECK(params.size() == row.num_params, "fxfuse.", op, ": expected ", row.num_params,
              " params for ", row.name, ", got ", params.size());
  CheckedActivation result{row.functor, {row.fixed[0], row.fixed[1]}};
  // Bounds are compared in the result's dtype; a slope is a factor in the accumulate type.
  const bool bounds = row.functor != kLeakyReLU;
  const at::ScalarType param_dtype = bounds ? output_dtype : accumulate_type(output_dtype);
  for (size_t i = 0; i < row.num_params; ++i) {
    TORCH_CHECK(!bounds || !std::isnan(params[i]), "fxfuse.", op,
                ": expected bounds that are numbers, got nan");
    result.params[i] = round_param(params[i], param_dtype, input.device.is_cpu());
  }
  TORCH_CHECK(row.functor != kHardtanh || row.num_params == 0 || params[0] <= params[1], "fxfuse.",
              op, ": expected min_val <= max_val, got ", params);
  return result;
}

// The same for a Linear ahead of the norm, whose result (*, channels) is what is normalised.
// Eager's Linear takes a few more shapes, of which no module makes use.
inline CheckedActivation check_linear_arguments(const char* op, const Tensor& input,
                                                const Tensor& linear_weight,
                                                const MaybeTensor& linear_bias, int64_t num_groups,
                                                const MaybeTensor& weight, const MaybeTensor& bias,
                                                c10::string_view activation,
                                                at::ArrayRef<double> params, MaybeDtype dtype) {
  Normalized result(input);
  TORCH_CHECK(input.dim() >= 2, "fxfuse.", op, ": expected input of 2 or more dimensions, got ",
              input.dim());
  TORCH_CHECK(linear_weight.dim() == 2 && linear_weight.sym_size(1) == input.sym_size(-1),
              "fxfuse.", op, ": expected linear_weight of shape [channels, ", input.sym_size(-1),
              "], got ", linear_weight.sym_sizes());
  TORCH_CHECK(!defined(linear_bias) || (linear_bias->dim() == 1 &&
                                        linear_bias->sym_size(0) == linear_weight.sym_size(0)),
              "fxfuse.", op, ": expected linear_bias of shape [", linear_weight.sym_size(0),
              "], got ", linear_bias->sym_sizes());
  const auto check_like_input = [&](const char* name, const Tensor& given) {
    TORCH_CHECK(given.scalar_type() == result.dtype && given.device() == result.device, "fxfuse.",
                op, ": expected ", name, " of dtype ", result.dtype, " on ", result.device,
                ", got ", given.scalar_type(), " on ", given.device());
  };
  check_like_input("linear_weight", linear_weight);
  if (defined(linear_bias)) check_like_input("linear_bias", *linear_bias);
  if (input.dim() == 2) result.channels = linear_weight.sym_size(0);
  return check_arguments(op, result, num_groups, weight, bias, activation, params, dtype);
}

// ---- layout ------------------------------------------------------------------------------

// Whether this library has a kernel for the device and dtype of the input; else ATen's operators
// serve it.  Defined in library.cpp, which knows what was compiled.
bool has_kernel(const Tensor& input);

// The layout that a result has.  Our kernels keep channels_last: so does eager on the CPU, but not
// on CUDA, which is the one documented difference.  Without a kernel the rule is eager's.
inline at::MemoryFormat result_format(const Tensor& input) {
  const bool keeps = has_kernel(input) || input.is_cpu() || input.is_privateuseone();
  return keeps ? input.suggest_memory_format() : at::MemoryFormat::Contiguous;
}

// An uninitialised result with the strides that eager's two operators give.  Where sizes of 1 make
// contiguous and channels_last the same order, group_norm and hardtanh write channels_last strides
// and the other activations contiguous ones.
inline Tensor empty_result(const Tensor& input, at::ScalarType dtype, Activation activation) {
  const at::MemoryFormat format = result_format(input);
  const at::TensorOptions options = input.options().dtype(dtype);
  Tensor result = at::empty_symint(input.sym_sizes(), options, format);
  const bool keeps = activation == kIdentity || activation == kHardtanh;
  if (!keeps && format != at::MemoryFormat::Contiguous && result.is_contiguous())
    result = at::empty_symint(input.sym_sizes(), options);
  return result;
}

// ---- tensors to a problem ----------------------------------------------------------------

// The kernels' four dtypes are all that ATen's group_norm has too.
inline Dtype to_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return kDouble;
    case at::kHalf:
      return kHalf;
    case at::kBFloat16:
      return kBFloat16;
    default:
      return kFloat;
  }
}

// The dtype in which a kernel reads the input of a call that reads `input` and writes `output`.
// Kernels convert on the way only from 16 bits to float32, and only on CUDA.
inline at::ScalarType kernel_dtype(const Tensor& input, at::ScalarType output) {
  const at::ScalarType dtype = input.scalar_type();
  if (input.device().is_cuda() && is_half_type(dtype) && output == at::kFloat) return dtype;
  return at::promote_types(dtype, output);
}

// Tensors in the dtype and layout that a kernel reads; they must outlive it.
struct Operands {
  Tensor input, weight, bias;
  at::ScalarType affine_dtype;
};

// The activation and the affine parameters, which are of the input's dtype or the accumulate type.
inline void fill_rest(Problem& p, Operands& o, at::ScalarType dtype, int64_t num_groups,
                      const MaybeTensor& weight, const MaybeTensor& bias, double eps,
                      const CheckedActivation& activation) {
  const auto is = [](const MaybeTensor& t, at::ScalarType type) {
    return !defined(t) || t->scalar_type() == type;
  };
  o.affine_dtype = is(weight, dtype) && is(bias, dtype) ? dtype : accumulate_type(dtype);
  if (defined(weight)) o.weight = weight->to(o.affine_dtype).contiguous();
  if (defined(bias)) o.bias = bias->to(o.affine_dtype).contiguous();
  p.num_groups = num_groups;
  p.eps = eps;
  p.activation = activation.functor;
  p.params[0] = activation.params[0];
  p.params[1] = activation.params[1];
  p.dtype = to_dtype(dtype);
  p.affine_dtype = to_dtype(o.affine_dtype);
  p.input = o.input.const_data_ptr();
  p.weight = o.weight.defined() ? o.weight.const_data_ptr() : nullptr;
  p.bias = o.bias.defined() ? o.bias.const_data_ptr() : nullptr;
}

inline int device_index(const Tensor& t) { return t.device().has_index() ? t.device().index() : 0; }

inline Operands fill(Problem& p, const Tensor& input, int64_t num_groups, const MaybeTensor& weight,
                     const MaybeTensor& bias, double eps, const CheckedActivation& activation,
                     at::ScalarType output_dtype) {
  const at::ScalarType dtype = kernel_dtype(input, output_dtype);
  const at::MemoryFormat format = result_format(input);
  Operands o;
  o.input = input.to(dtype).contiguous(format);
  p.device = device_index(input);
  p.batch = input.size(0);
  p.channels = input.size(1);
  p.spatial = c10::multiply_integers(input.sizes().slice(2));
  p.channels_last = format != at::MemoryFormat::Contiguous && p.spatial > 1 && p.channels > 1;
  fill_rest(p, o, dtype, num_groups, weight, bias, eps, activation);
  p.output_dtype =
      dtype == input.scalar_type() && is_half_type(dtype) ? to_dtype(output_dtype) : p.dtype;
  return o;
}

// Whether the products of float32 matrices on CUDA may be of TF32: torch's setting, in whichever
// way it was set last, as its own products read it with every call, and that of the CUDA libraries.
inline bool allows_tf32() {
  static const bool overridden = c10::utils::check_env("NVIDIA_TF32_OVERRIDE") == false;
  return !overridden && !at::NoTF32Guard::should_disable_tf32() &&
         at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) ==
             at::Float32Precision::TF32;
}

// Of contiguous rows, for a result of their dtype or float32.
inline Operands fill_linear(LinearForward& p, const Tensor& input, const Tensor& linear_weight,
                            const MaybeTensor& linear_bias, int64_t num_groups,
                            const MaybeTensor& weight, const MaybeTensor& bias, double eps,
                            const CheckedActivation& activation, at::ScalarType output_dtype) {
  Operands o;
  o.input = input;
  p.device = device_index(input);
  p.batch = input.size(0);
  p.channels = linear_weight.size(0);
  p.spatial = 1;
  p.features = input.size(1);
  p.tf32 = allows_tf32();
  fill_rest(p, o, input.scalar_type(), num_groups, weight, bias, eps, activation);
  p.output_dtype = to_dtype(output_dtype);
  p.linear_weight = linear_weight.const_data_ptr();
  p.linear_bias = defined(linear_bias) ? linear_bias->const_data_ptr() : nullptr;
  return o;
}

inline at::ScalarType to_scalar_type(Dtype dtype) {
  constexpr at::ScalarType types[] = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16};
  return types[dtype];
}

// Saved statistics: mean is (2, N, num_groups), the high and low parts of each mean; rstd (N,
// num_groups).
inline std::tuple<Tensor, Tensor> empty_statistics(const Tensor& input, int64_t num_groups,
                                                   at::ScalarType output_dtype) {
  const at::ScalarType type = accumulate_type(at::promote_types(input.scalar_type(), output_dtype));
  const at::TensorOptions options = input.options().dtype(type);
  const c10::SymInt batch = input.sym_size(0), groups = num_groups;
  return {at::empty_symint({2, batch, groups}, options),
          at::empty_symint({batch, groups}, options)};
}

}  // namespace fxfuse
