// The table of contents of torch.ops.fxfuse: every schema, the autograd formula, the autocast rule,
// the composition of ATen operators that serves any device, and which kernel each device has.
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <array>

#include "arguments.h"
#include "cpu/group_norm.h"
#ifdef FXFUSE_CUDA
#include "cuda/launch.h"
#endif

namespace fxfuse {

bool has_kernel(const Tensor& input) {
  const at::ScalarType dtype = input.scalar_type();
  if (dtype != at::kFloat && dtype != at::kDouble && !is_half_type(dtype)) return false;
#ifdef FXFUSE_CUDA
  if (input.is_cuda()) return cuda::is_supported(input.get_device());
#endif
  return input.is_cpu();
}

namespace {

using Triple = std::tuple<Tensor, Tensor, Tensor>;

constexpr char kOp[] = "group_norm_activation";
constexpr char kForwardOp[] = "group_norm_activation_forward";
constexpr char kBackwardOp[] = "group_norm_activation_backward";
constexpr char kAddOp[] = "group_norm_add_activation";
constexpr char kLinearOp[] = "linear_group_norm_activation";

// ---- composition of ATen operators -------------------------------------------------------

Tensor activate(const Tensor& z, const CheckedActivation& f) {
  switch (f.functor) {
    case kHardtanh:
      return at::hardtanh(z, f.params[0], f.params[1]);
    case kClamp:
    case kOpenClamp:
      return at::clamp(z, f.params[0], f.params[1]);
    case kReLU:
      return at::relu(z);
    case kSiLU:
      return at::silu(z);
    case kSigmoid:
      return at::sigmoid(z);
    case kTanh:
      return at::tanh(z);
    case kGELU:
      return at::gelu(z);
    case kGELUTanh:
      return at::gelu(z, "tanh");
    case kHardswish:
      return at::hardswish(z);
    case kLeakyReLU:
      return at::leaky_relu(z, f.params[0]);
    case kIdentity:
      break;
  }
  return z;
}

// dy * f'(z), by the rules of activation.h.
Tensor activation_grad(const Tensor& z, const Tensor& dy, const CheckedActivation& f) {
  const double low = f.params[0], high = f.params[1];
  switch (f.functor) {
    case kHardtanh:
      return dy.masked_fill(z.le(low).logical_or(z.ge(high)), 0);
    case kClamp:
      return dy.masked_fill(z.ge(low).logical_and(z.le(high)).logical_not(), 0);
    case kOpenClamp:
      return dy.masked_fill(z.gt(low).logical_and(z.lt(high)).logical_not(), 0);
    case kReLU:
      return dy.masked_fill(z.le(0), 0);
    case kSiLU: {
      const Tensor s = at::sigmoid(z);
      return dy * s * (1 + z * (1 - s));
    }
    case kSigmoid: {
      const Tensor s = at::sigmoid(z);
      return dy * s * (1 - s);
    }
    case kTanh:
      return dy * (1 - at::tanh(z).square());
    case kGELU:
      return at::gelu_backward(dy, z);
    case kGELUTanh:
      return at::gelu_backward(dy, z, "tanh");
    case kHardswish: {
      const Tensor outside = dy.masked_fill(z.le(-3), 0);
      return at::where(z.gt(-3).logical_and(z.lt(3)), dy * (z / 3 + 0.5), outside);
    }
    case kLeakyReLU:
      return at::where(z.gt(0), dy, dy * f.params[0]);
    case kIdentity:
      break;
  }
  return dy;
}

// What eager does, from operators that have every derivative and batching rule: serves double
// backward, forward-mode differentiation and torch.func.
Tensor eager(const Tensor& input, int64_t num_groups, const MaybeTensor& weight,
             const MaybeTensor& bias, double eps, c10::string_view activation,
             at::ArrayRef<double> params, MaybeDtype dtype) {
  const CheckedActivation f =
      check_arguments(kOp, input, num_groups, weight, bias, activation, params, dtype);
  const at::ScalarType output_dtype = dtype.value_or(input.scalar_type());
  const at::ScalarType wide = at::promote_types(input.scalar_type(), output_dtype);
  const auto cast = [&](const MaybeTensor& t) -> MaybeTensor {
    return defined(t) && wide != input.scalar_type() ? MaybeTensor(t->to(wide)) : t;
  };
  const Tensor y = at::group_norm(input.to(wide), num_groups, cast(weight), cast(bias), eps,
                                  /*cudnn_enabled=*/false);
  return activate(y, f).to(output_dtype);
}

// (N, C, ...) to (N, num_groups, rest), and a per-channel vector to something that broadcasts on
// it.
Tensor grouped(const Tensor& t, int64_t num_groups) {
  return t.reshape_symint({t.sym_size(0), num_groups, -1});
}

Tensor per_channel(const Tensor& t, int64_t dim) {
  std::vector<int64_t> shape(dim, 1);
  shape[1] = -1;
  return t.reshape(shape);
}

// The mean, as the sum of two, and rstd of each group.
std::pair<Tensor, Tensor> statistics(const Tensor& x, int64_t num_groups, double eps) {
  const Tensor groups = grouped(x, num_groups);
  // Two passes and a correction: the mean of what is left after the first mean was taken off.
  const Tensor first = groups.mean(-1), left = groups - first.unsqueeze(-1);
  const Tensor second = left.mean(-1);
  const Tensor variance = (left - second.unsqueeze(-1)).square().mean(-1);
  return {at::stack({first, second}), (variance + eps).rsqrt()};
}

// The normalised input, in the accumulate type.
Tensor normalized(const Tensor& x, const Tensor& mean, const Tensor& rstd, int64_t num_groups) {
  const Tensor centred = (grouped(x, num_groups) - mean[0].unsqueeze(-1)) - mean[1].unsqueeze(-1);
  return (centred * rstd.unsqueeze(-1)).view_symint(x.sym_sizes());
}

Tensor affine(Tensor z, const MaybeTensor& weight, const MaybeTensor& bias) {
  if (defined(weight)) z = z * per_channel(weight->to(z.scalar_type()), z.dim());
  if (defined(bias)) z = z + per_channel(bias->to(z.scalar_type()), z.dim());
  return z;
}

Triple forward_default(const Tensor& input, int64_t num_groups, const MaybeTensor& weight,
                       const MaybeTensor& bias, double eps, c10::string_view activation,
                       at::ArrayRef<double> params, MaybeDtype dtype) {
  const CheckedActivation f =
      check_arguments(kForwardOp, input, num_groups, weight, bias, activation, params, dtype);
  const at::ScalarType output_dtype = dtype.value_or(input.scalar_type());
  Tensor output = empty_result(input, output_dtype, f.functor);
  auto [mean, rstd] = empty_statistics(input, num_groups, output_dtype);
  if (input.numel() == 0) return {output, mean.zero_(), rstd.zero_()};
  const Tensor x = input.to(mean.scalar_type()).contiguous();
  std::tie(mean, rstd) = statistics(x, num_groups, eps);
  output.copy_(activate(affine(normalized(x, mean, rstd, num_groups), weight, bias), f));
  return {output, mean, rstd};
}

// The three gradients.  Autograd, where it is listening, knows their own gradients.
Triple gradients(const Tensor& grad_output, const Tensor& input, const Tensor& mean,
                 const Tensor& rstd, int64_t num_groups, const MaybeTensor& weight,
                 const MaybeTensor& bias, const CheckedActivation& f,
                 std::array<bool, 3> output_mask) {
  output_mask[1] &= defined(weight);
  output_mask[2] &= defined(bias);
  Tensor dinput, dweight, dbias;
  if (output_mask[0]) dinput = at::empty_like(input, input.options(), result_format(input));
  const Tensor x = input.to(mean.scalar_type()).contiguous(),
               dy = grad_output.to(mean.scalar_type()).contiguous();
  if (input.sym_numel() == 0) {
    if (output_mask[1]) dweight = at::zeros_like(*weight);
    if (output_mask[2]) dbias = at::zeros_like(*bias);
    return {dinput, dweight, dbias};
  }
  const Tensor x_hat = normalized(x, mean, rstd, num_groups);
  const Tensor dz = activation_grad(affine(x_hat, weight, bias), dy, f);
  std::vector<int64_t> all_but_channels{0};
  for (int64_t d = 2; d < input.dim(); ++d) all_but_channels.push_back(d);
  if (output_mask[1]) dweight = (dz * x_hat).sum(all_but_channels).to(weight->scalar_type());
  if (output_mask[2]) dbias = dz.sum(all_but_channels).to(bias->scalar_type());
  if (output_mask[0]) {
    const Tensor g = grouped(affine(dz, weight, {}), num_groups), h = grouped(x_hat, num_groups);
    const Tensor projected =
        g - g.mean(-1, /*keepdim=*/true) - h * (g * h).mean(-1, /*keepdim=*/true);
    dinput.copy_((projected * rstd.unsqueeze(-1)).view_symint(input.sym_sizes()));
  }
  return {dinput, dweight, dbias};
}

// The backward operator is handed what the forward one gave: a kernel would read past the end of
// anything smaller.
void check_given(const char* name, const Tensor& given, const Tensor& input, at::IntArrayRef shape,
                 at::ScalarType dtype) {
  TORCH_CHECK(
      given.sizes() == shape && given.scalar_type() == dtype && given.device() == input.device(),
      "fxfuse.", kBackwardOp, ": expected ", name, " of shape ", shape, " and dtype ", dtype,
      " on ", input.device(), ", got ", given.sizes(), ", ", given.scalar_type(), ", ",
      given.device());
}

CheckedActivation check_backward(const Tensor& grad_output, const Tensor& input, const Tensor& mean,
                                 const Tensor& rstd, int64_t num_groups, const MaybeTensor& weight,
                                 const MaybeTensor& bias, c10::string_view activation,
                                 at::ArrayRef<double> params) {
  const at::ScalarType dtype = grad_output.scalar_type();
  const CheckedActivation f =
      check_arguments(kBackwardOp, input, num_groups, weight, bias, activation, params, dtype);
  const at::ScalarType saved = accumulate_type(at::promote_types(input.scalar_type(), dtype));
  check_given("grad_output", grad_output, input, input.sizes(), dtype);
  check_given("mean", mean, input, {2, input.size(0), num_groups}, saved);
  check_given("rstd", rstd, input, {input.size(0), num_groups}, saved);
  return f;
}

Triple backward_default(const Tensor& grad_output, const Tensor& input, const Tensor& mean,
                        const Tensor& rstd, int64_t num_groups, const MaybeTensor& weight,
                        const MaybeTensor& bias, double /*eps*/, c10::string_view activation,
                        at::ArrayRef<double> params, std::array<bool, 3> output_mask) {
  const CheckedActivation f =
      check_backward(grad_output, input, mean, rstd, num_groups, weight, bias, activation, params);
  return gradients(grad_output, input, mean, rstd, num_groups, weight, bias, f, output_mask);
}

Tensor inference_default(const Tensor& input, int64_t num_groups, const MaybeTensor& weight,
                         const MaybeTensor& bias, double eps, c10::string_view activation,
                         at::ArrayRef<double> params, MaybeDtype dtype) {
  return eager(input, num_groups, weight, bias, eps, activation, params, dtype)
      .contiguous(result_format(input));
}

// ---- a residual between norm and activation ----------------------------------------------

CheckedActivation check_add(const Tensor& input, const Tensor& residual, int64_t num_groups,
                            const MaybeTensor& weight, const MaybeTensor& bias,
                            c10::string_view activation, at::ArrayRef<double> params,
                            MaybeDtype dtype) {
  const CheckedActivation f =
      check_arguments(kAddOp, input, num_groups, weight, bias, activation, params, dtype);
  const at::ScalarType output_dtype = dtype.value_or(input.scalar_type());
  TORCH_CHECK(residual.sym_sizes() == input.sym_sizes() && residual.device() == input.device() &&
                  residual.scalar_type() == output_dtype,
              "fxfuse.", kAddOp, ": expected residual of shape ", input.sym_sizes(), " and dtype ",
              output_dtype, " on ", input.device(), ", got ", residual.sym_sizes(), ", ",
              residual.scalar_type(), ", ", residual.device());
  return f;
}

// The operators one after the other: what the fused one means.  Above autograd, autocast or a
// transform of torch.func it has their derivatives and rules, below them it is only the values.
Tensor add_composition(const Tensor& input, const Tensor& residual, int64_t num_groups,
                       const MaybeTensor& weight, const MaybeTensor& bias, double eps,
                       c10::string_view activation, at::ArrayRef<double> params, MaybeDtype dtype) {
  const CheckedActivation f =
      check_add(input, residual, num_groups, weight, bias, activation, params, dtype);
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("fxfuse::group_norm_activation", "")
                             .typed<decltype(inference_default)>();
  return activate(
      op.call(input, num_groups, weight, bias, eps, "identity", {}, dtype).add(residual), f);
}

// ---- kernels -----------------------------------------------------------------------------

// The three operators of a device whose kernels are `run_forward` and `run_backward`.
template <void (*run_forward)(const Forward&), void (*run_backward)(const Backward&)>
struct Kernels {
  static Triple run(const char* op, bool save, const Tensor& input, int64_t num_groups,
                    const MaybeTensor& weight, const MaybeTensor& bias, double eps,
                    c10::string_view activation, at::ArrayRef<double> params, MaybeDtype dtype) {
    const CheckedActivation f =
        check_arguments(op, input, num_groups, weight, bias, activation, params, dtype);
    const at::ScalarType output_dtype = dtype.value_or(input.scalar_type());
    Tensor output, mean, rstd;
    if (save) std::tie(mean, rstd) = empty_statistics(input, num_groups, output_dtype);
    if (input.numel() == 0) {
      output = empty_result(input, output_dtype, f.functor);
      if (save) mean.zero_(), rstd.zero_();
      return {output, mean, rstd};
    }
    Forward p{};
    const Operands operands = fill(p, input, num_groups, weight, bias, eps, f, output_dtype);
    output = empty_result(input, to_scalar_type(p.output_dtype), f.functor);
    p.output = output.data_ptr();
    if (save) p.mean = mean.data_ptr(), p.rstd = rstd.data_ptr();
    run_forward(p);
    return {output.to(output_dtype), mean, rstd};
  }

  static Tensor inference(const Tensor& input, int64_t num_groups, const MaybeTensor& weight,
                          const MaybeTensor& bias, double eps, c10::string_view activation,
                          at::ArrayRef<double> params, MaybeDtype dtype) {
    if (!has_kernel(input))
      return inference_default(input, num_groups, weight, bias, eps, activation, params, dtype);
    return std::get<0>(
        run(kOp, false, input, num_groups, weight, bias, eps, activation, params, dtype));
  }

  static Triple forward(const Tensor& input, int64_t num_groups, const MaybeTensor& weight,
                        const MaybeTensor& bias, double eps, c10::string_view activation,
                        at::ArrayRef<double> params, MaybeDtype dtype) {
    if (!has_kernel(input))
      return forward_default(input, num_groups, weight, bias, eps, activation, params, dtype);
    return run(kForwardOp, true, input, num_groups, weight, bias, eps, activation, params, dtype);
  }

  static Triple backward(const Tensor& grad_output, const Tensor& input, const Tensor& mean,
                         const Tensor& rstd, int64_t num_groups, const MaybeTensor& weight,
                         const MaybeTensor& bias, double eps, c10::string_view activation,
                         at::ArrayRef<double> params, std::array<bool, 3> output_mask) {
    if (!has_kernel(input) || input.numel() == 0)
      return backward_default(grad_output, input, mean, rstd, num_groups, weight, bias, eps,
                              activation, params, output_mask);
    const CheckedActivation f = check_backward(grad_output, input, mean, rstd, num_groups, weight,
                                               bias, activation, params);
    output_mask[1] &= defined(weight);
    output_mask[2] &= defined(bias);
    Backward p{};
    const Operands operands =
        fill(p, input, num_groups, weight, bias, eps, f, grad_output.scalar_type());
    const Tensor dy =
        grad_output.to(to_scalar_type(p.output_dtype)).contiguous(result_format(input));
    const Tensor means = mean.contiguous(), rstds = rstd.contiguous();
    const at::TensorOptions affine_options = input.options().dtype(operands.affine_dtype);
    Tensor dinput, dweight, dbias;
    if (output_mask[0])
      dinput = at::empty_like(operands.input, operands.input.options(), result_format(input));
    if (output_mask[1]) dweight = at::empty({p.channels}, affine_options);
    if (output_mask[2]) dbias = at::empty({p.channels}, affine_options);
    p.grad_output = dy.const_data_ptr();
    p.mean = means.const_data_ptr();
    p.rstd = rstds.const_data_ptr();
    if (output_mask[0]) p.dinput = dinput.data_ptr();
    if (output_mask[1]) p.dweight = dweight.data_ptr();
    if (output_mask[2]) p.dbias = dbias.data_ptr();
    run_backward(p);
    if (output_mask[0]) dinput = dinput.to(input.scalar_type());
    if (output_mask[1]) dweight = dweight.to(weight->scalar_type());
    if (output_mask[2]) dbias = dbias.to(bias->scalar_type());
    return {dinput, dweight, dbias};
  }

  // Where the sum has the dtype and the strides of the norm's result, which the kernel gives it.
  static Tensor add(const Tensor& input, const Tensor& residual, int64_t num_groups,
                    const MaybeTensor& weight, const MaybeTensor& bias, double eps,
                    c10::string_view activation, at::ArrayRef<double> params, MaybeDtype dtype) {
    const CheckedActivation f =
        check_add(input, residual, num_groups, weight, bias, activation, params, dtype);
    const auto parts = [&] {
      return add_composition(input, residual, num_groups, weight, bias, eps, activation, params,
                             dtype);
    };
    if (!has_kernel(input) || input.numel() == 0) return parts();
    Tensor output = empty_result(input, residual.scalar_type(), kIdentity);
    const bool two_layouts =
        result_format(input) != at::MemoryFormat::Contiguous && output.is_contiguous();
    if (two_layouts || output.strides() != residual.strides()) return parts();
    Forward p{};
    const Operands operands =
        fill(p, input, num_groups, weight, bias, eps, f, output.scalar_type());
    if (to_scalar_type(p.output_dtype) != output.scalar_type()) return parts();
    p.output = output.data_ptr();
    p.residual = residual.const_data_ptr();
    run_forward(p);
    return output;
  }

  static void bind(torch::Library& m) {
    m.impl(kOp, inference);
    m.impl(kForwardOp, forward);
    m.impl(kBackwardOp, backward);
  }
};

using CpuKernels = Kernels<cpu::forward, cpu::backward>;
#ifdef FXFUSE_CUDA
using CudaKernels = Kernels<cuda::run_forward, cuda::run_backward>;
#endif

// ---- the Linear ahead of the norm --------------------------------------------------------

// The two operators one after the other: what the fused one means.  Above autograd, autocast or a
// transform of torch.func it has their derivatives and rules, below them it is only the values.
Tensor linear_composition(const Tensor& input, const Tensor& linear_weight,
                          const MaybeTensor& linear_bias, int64_t num_groups,
                          const MaybeTensor& weight, const MaybeTensor& bias, double eps,
                          c10::string_view activation, at::ArrayRef<double> params,
                          MaybeDtype dtype) {
  check_linear_arguments(kLinearOp, input, linear_weight, linear_bias, num_groups, weight, bias,
                         activation, params, dtype);
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("fxfuse::group_norm_activation", "")
                             .typed<decltype(inference_default)>();
  return op.call(at::linear(input, linear_weight, linear_bias), num_groups, weight, bias, eps,
                 activation, params, dtype);
}

#ifdef FXFUSE_CUDA
// In one kernel, where one serves rows as they lie in memory.  A copy of x or W would cost what it
// saves, and the matrix product of torch needs none.
Tensor linear_cuda(const Tensor& input, const Tensor& linear_weight, const MaybeTensor& linear_bias,
                   int64_t num_groups, const MaybeTensor& weight, const MaybeTensor& bias,
                   double eps, c10::string_view activation, at::ArrayRef<double> params,
                   MaybeDtype dtype) {
  const CheckedActivation f =
      check_linear_arguments(kLinearOp, input, linear_weight, linear_bias, num_groups, weight, bias,
                             activation, params, dtype);
  const at::ScalarType output_dtype = dtype.value_or(input.scalar_type());
  const bool in_rows = input.dim() == 2 && input.is_contiguous() && linear_weight.is_contiguous() &&
                       (!defined(linear_bias) || linear_bias->is_contiguous());
  const bool writes = output_dtype == at::kFloat || output_dtype == input.scalar_type();
  if (in_rows && writes && has_kernel(input)) {
    LinearForward p{};
    const Operands operands = fill_linear(p, input, linear_weight, linear_bias, num_groups, weight,
                                          bias, eps, f, output_dtype);
    if (cuda::is_served(p)) {
      const Tensor output = at::empty({p.batch, p.channels}, input.options().dtype(output_dtype));
      p.output = output.data_ptr();
      cuda::run_linear(p);
      return output;
    }
  }
  return linear_composition(input, linear_weight, linear_bias, num_groups, weight, bias, eps,
                            activation, params, dtype);
}
#endif

// Whether one kernel computes a Linear of these sizes with what follows it, and why it does or does
// not: for reports, and for those who decide before there are tensors.
std::tuple<bool, std::string> linear_kernel(int64_t rows, int64_t in_features, int64_t out_features,
                                            int64_t num_groups, at::ScalarType dtype,
                                            at::ScalarType output_dtype,
                                            at::ScalarType affine_dtype,
                                            c10::string_view activation, at::Device device) {
  [[maybe_unused]] const ActivationRow& row = find_activation(kLinearOp, activation);
  TORCH_CHECK(rows >= 0 && in_features >= 0 && num_groups > 0 && out_features % num_groups == 0,
              "fxfuse.", kLinearOp, ": expected sizes that groups divide, got ", rows, ", ",
              in_features, ", ", out_features, " in ", num_groups);
#ifdef FXFUSE_CUDA
  if (!device.is_cuda()) return {false, "it is not on a GPU"};
  if (dtype != at::kFloat && !is_half_type(dtype)) {
    return {false, "the dtype is neither float32 nor a 16-bit one"};
  }
  if (output_dtype != dtype && output_dtype != at::kFloat) return {false, "the result is rounded"};
  LinearForward p{};
  p.device = device.has_index() ? device.index() : 0;
  p.batch = rows;
  p.channels = out_features;
  p.spatial = 1;
  p.features = in_features;
  p.tf32 = allows_tf32();
  p.num_groups = num_groups;
  p.activation = row.functor;
  p.dtype = to_dtype(dtype);
  p.output_dtype = to_dtype(output_dtype);
  p.affine_dtype = affine_dtype == dtype ? p.dtype : to_dtype(accumulate_type(dtype));
  return {cuda::is_served(p), cuda::why_served(p)};
#else
  return {false, "the library has no CUDA kernels"};
#endif
}

// ---- what a fake tensor needs ------------------------------------------------------------

// The same checks and the same result, without a value: the fake kernels call it, so that the real
// and the fake operator cannot differ.
Triple empty_results(const Tensor& input, int64_t num_groups, const MaybeTensor& weight,
                     const MaybeTensor& bias, double /*eps*/, c10::string_view activation,
                     at::ArrayRef<double> params, MaybeDtype dtype) {
  const CheckedActivation f =
      check_arguments(kOp, input, num_groups, weight, bias, activation, params, dtype);
  const at::ScalarType output_dtype = dtype.value_or(input.scalar_type());
  auto [mean, rstd] = empty_statistics(input, num_groups, output_dtype);
  return {empty_result(input, output_dtype, f.functor), mean, rstd};
}

Tensor empty_add_result(const Tensor& input, const Tensor& residual, int64_t num_groups,
                        const MaybeTensor& weight, const MaybeTensor& bias, double /*eps*/,
                        c10::string_view activation, at::ArrayRef<double> params,
                        MaybeDtype dtype) {
  const CheckedActivation f =
      check_add(input, residual, num_groups, weight, bias, activation, params, dtype);
  const Tensor y = empty_result(input, dtype.value_or(input.scalar_type()), kIdentity);
  return activate(y.add(residual), f);
}

Tensor empty_linear_result(const Tensor& input, const Tensor& linear_weight,
                           const MaybeTensor& linear_bias, int64_t num_groups,
                           const MaybeTensor& weight, const MaybeTensor& bias, double /*eps*/,
                           c10::string_view activation, at::ArrayRef<double> params,
                           MaybeDtype dtype) {
  const CheckedActivation f =
      check_linear_arguments(kLinearOp, input, linear_weight, linear_bias, num_groups, weight, bias,
                             activation, params, dtype);
  const Tensor normalized = at::linear(input, linear_weight, linear_bias);
  return empty_result(normalized, dtype.value_or(normalized.scalar_type()), f.functor);
}

// ---- autograd ----------------------------------------------------------------------------

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

class GroupNormActivation : public torch::autograd::Function<GroupNormActivation> {
 public:
  // Compiled autograd may trace the backward: what that reads is in the context or is an argument.
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& input, int64_t num_groups,
                        const MaybeTensor& weight, const MaybeTensor& bias, double eps,
                        c10::string_view activation, at::ArrayRef<double> params,
                        MaybeDtype dtype) {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("fxfuse::group_norm_activation_forward", "")
                               .typed<decltype(forward_default)>();
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [output, mean, rstd] =
        op.call(input, num_groups, weight, bias, eps, activation, params, dtype);
    ctx->save_for_backward({input, weight.value_or(Tensor()), bias.value_or(Tensor()), mean, rstd});
    ctx->saved_data["num_groups"] = num_groups;
    ctx->saved_data["eps"] = eps;
    ctx->saved_data["activation"] = std::string(activation);
    ctx->saved_data["params"] = params.vec();
    return output;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grad_outputs) {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("fxfuse::group_norm_activation_backward", "")
                               .typed<decltype(backward_default)>();
    const variable_list saved = ctx->get_saved_variables();
    const Tensor &input = saved[0], &weight = saved[1], &bias = saved[2], &grad = grad_outputs[0];
    const MaybeTensor maybe_weight = weight.defined() ? MaybeTensor(weight) : std::nullopt;
    const MaybeTensor maybe_bias = bias.defined() ? MaybeTensor(bias) : std::nullopt;
    const int64_t num_groups = ctx->saved_data["num_groups"].toInt();
    const double eps = ctx->saved_data["eps"].toDouble();
    const std::string activation = ctx->saved_data["activation"].toStringRef();
    const std::vector<double> params = ctx->saved_data["params"].toDoubleVector();

    // Gradients are asked of the tensors that were given, in order.
    std::array<bool, 3> mask{};
    size_t edge = 0;
    for (size_t i = 0; i < 3; ++i)
      if (saved[i].defined()) mask[i] = ctx->needs_input_grad(edge++);

    Tensor dinput, dweight, dbias;
    if (!grad.defined()) {
      // nothing flows back
    } else if (at::GradMode::is_enabled()) {
      // create_graph=True: gradients that have gradients, because ATen's operators have them.
      const CheckedActivation f =
          check_arguments(kBackwardOp, input, num_groups, maybe_weight, maybe_bias, activation,
                          params, grad.scalar_type());
      Tensor mean = saved[3], rstd = saved[4];
      if (input.sym_numel() != 0)
        std::tie(mean, rstd) = statistics(input.to(mean.scalar_type()), num_groups, eps);
      std::tie(dinput, dweight, dbias) =
          gradients(grad, input, mean, rstd, num_groups, maybe_weight, maybe_bias, f, mask);
    } else {
      std::tie(dinput, dweight, dbias) =
          op.call(grad, input, saved[3], saved[4], num_groups, maybe_weight, maybe_bias, eps,
                  activation, params, mask);
    }
    return {dinput, Tensor(), dweight, dbias, Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

bool has_forward_grad(const MaybeTensor& t) {
  return defined(t) && t->_fw_grad(/*level=*/0).defined();
}

bool requires_grad(const MaybeTensor& t) { return defined(t) && t->requires_grad(); }

Tensor autograd(const Tensor& input, int64_t num_groups, const MaybeTensor& weight,
                const MaybeTensor& bias, double eps, c10::string_view activation,
                at::ArrayRef<double> params, MaybeDtype dtype) {
  if (!has_kernel(input) || has_forward_grad(input) || has_forward_grad(weight) ||
      has_forward_grad(bias))
    return eager(input, num_groups, weight, bias, eps, activation, params, dtype);
  if (at::GradMode::is_enabled() &&
      (input.requires_grad() || requires_grad(weight) || requires_grad(bias)))
    return GroupNormActivation::apply(input, num_groups, weight, bias, eps, activation, params,
                                      dtype);
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("fxfuse::group_norm_activation", "")
                             .typed<decltype(inference_default)>();
  at::AutoDispatchBelowADInplaceOrView guard;
  return op.call(input, num_groups, weight, bias, eps, activation, params, dtype);
}

// One kernel keeps nothing for a backward: where a derivative will be asked for, the operators run
// one after the other, each with its own.
Tensor add_autograd(const Tensor& input, const Tensor& residual, int64_t num_groups,
                    const MaybeTensor& weight, const MaybeTensor& bias, double eps,
                    c10::string_view activation, at::ArrayRef<double> params, MaybeDtype dtype) {
  const MaybeTensor operands[] = {input, residual, weight, bias};
  for (const MaybeTensor& t : operands) {
    if (has_forward_grad(t) || (at::GradMode::is_enabled() && requires_grad(t)))
      return add_composition(input, residual, num_groups, weight, bias, eps, activation, params,
                             dtype);
  }
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("fxfuse::group_norm_add_activation", "")
                             .typed<decltype(add_composition)>();
  at::AutoDispatchBelowADInplaceOrView guard;
  return op.call(input, residual, num_groups, weight, bias, eps, activation, params, dtype);
}

// One kernel keeps nothing for a backward: where a derivative will be asked for, the two operators
// run, each with its own.
Tensor linear_autograd(const Tensor& input, const Tensor& linear_weight,
                       const MaybeTensor& linear_bias, int64_t num_groups,
                       const MaybeTensor& weight, const MaybeTensor& bias, double eps,
                       c10::string_view activation, at::ArrayRef<double> params, MaybeDtype dtype) {
  const MaybeTensor operands[] = {input, linear_weight, linear_bias, weight, bias};
  for (const MaybeTensor& t : operands) {
    if (has_forward_grad(t) || (at::GradMode::is_enabled() && requires_grad(t)))
      return linear_composition(input, linear_weight, linear_bias, num_groups, weight, bias, eps,
                                activation, params, dtype);
  }
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("fxfuse::linear_group_norm_activation", "")
                             .typed<decltype(linear_composition)>();
  at::AutoDispatchBelowADInplaceOrView guard;
  return op.call(input, linear_weight, linear_bias, num_groups, weight, bias, eps, activation,
                 params, dtype);
}

// ---- autocast ----------------------------------------------------------------------------

// CUDA autocast runs group_norm in float32.  A 16-bit input is read as it is and the result written
// in float32, in one pass; everything else is cast as eager casts it.
Tensor autocast_cuda(const Tensor& input, int64_t num_groups, const MaybeTensor& weight,
                     const MaybeTensor& bias, double eps, c10::string_view activation,
                     at::ArrayRef<double> params, MaybeDtype dtype) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("fxfuse::group_norm_activation", "")
                             .typed<decltype(inference_default)>();
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastCUDA);
  if (dtype.has_value())
    return op.call(input, num_groups, weight, bias, eps, activation, params, dtype);
  if (is_half_type(input.scalar_type()))
    return op.call(input, num_groups, weight, bias, eps, activation, params, at::kFloat);
  using at::autocast::cached_cast;
  return op.call(cached_cast(at::kFloat, input), num_groups, cached_cast(at::kFloat, weight),
                 cached_cast(at::kFloat, bias), eps, activation, params, dtype);
}

// The sum of a float32 and a 16-bit tensor is float32.
Tensor add_autocast_cuda(const Tensor& input, const Tensor& residual, int64_t num_groups,
                         const MaybeTensor& weight, const MaybeTensor& bias, double eps,
                         c10::string_view activation, at::ArrayRef<double> params,
                         MaybeDtype dtype) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("fxfuse::group_norm_add_activation", "")
                             .typed<decltype(add_composition)>();
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastCUDA);
  if (dtype.has_value())
    return op.call(input, residual, num_groups, weight, bias, eps, activation, params, dtype);
  using at::autocast::cached_cast;
  const Tensor wide = cached_cast(at::kFloat, residual);
  if (is_half_type(input.scalar_type()))
    return op.call(input, wide, num_groups, weight, bias, eps, activation, params, at::kFloat);
  return op.call(cached_cast(at::kFloat, input), wide, num_groups, cached_cast(at::kFloat, weight),
                 cached_cast(at::kFloat, bias), eps, activation, params, dtype);
}

// Autocast runs the Linear in its 16-bit type.  The norm then runs in that on the CPU, and in
// float32 on CUDA.
template <c10::DispatchKey kAutocast, c10::DeviceType kDevice>
Tensor linear_autocast(const Tensor& input, const Tensor& linear_weight,
                       const MaybeTensor& linear_bias, int64_t num_groups,
                       const MaybeTensor& weight, const MaybeTensor& bias, double eps,
                       c10::string_view activation, at::ArrayRef<double> params, MaybeDtype dtype) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("fxfuse::linear_group_norm_activation", "")
                             .typed<decltype(linear_composition)>();
  using at::autocast::cached_cast;
  const at::ScalarType low = at::autocast::get_autocast_dtype(kDevice);
  c10::impl::ExcludeDispatchKeyGuard no_autocast(kAutocast);
  const Tensor x = cached_cast(low, input, kDevice), w = cached_cast(low, linear_weight, kDevice);
  const MaybeTensor b = cached_cast(low, linear_bias, kDevice);
  if (kDevice == at::kCPU || dtype.has_value())
    return op.call(x, w, b, num_groups, weight, bias, eps, activation, params, dtype);
  if (is_half_type(x.scalar_type()))
    return op.call(x, w, b, num_groups, weight, bias, eps, activation, params, at::kFloat);
  return op.call(x, w, b, num_groups, cached_cast(at::kFloat, weight),
                 cached_cast(at::kFloat, bias), eps, activation, params, dtype);
}

}  // namespace

// ---- registration ------------------------------------------------------------------------

TORCH_LIBRARY(fxfuse, m) {
  // Inductor may bring tensors in the layout that it has chosen, such as channels_last, and asks
  // the fake kernel for that of the result; without the tag it restores the layouts of the trace,
  // with a copy before and one after every call.
  const std::vector<at::Tag> any_layout = {at::Tag::flexible_layout};
  m.def(
      "group_norm_activation(Tensor input, int num_groups, Tensor? weight, Tensor? bias, float "
      "eps, str activation, "
      "float[] params, ScalarType? dtype=None) -> Tensor",
      any_layout);
  m.def(
      "group_norm_activation_forward(Tensor input, int num_groups, Tensor? weight, Tensor? bias, "
      "float eps, str activation, "
      "float[] params, ScalarType? dtype=None) -> (Tensor output, Tensor mean, Tensor rstd)",
      any_layout);
  m.def(
      "group_norm_activation_backward(Tensor grad_output, Tensor input, Tensor mean, Tensor rstd, "
      "int num_groups, "
      "Tensor? weight, Tensor? bias, float eps, str activation, float[] params, bool[3] "
      "output_mask) "
      "-> (Tensor dinput, Tensor dweight, Tensor dbias)",
      any_layout);
  m.def(
      "group_norm_add_activation(Tensor input, Tensor residual, int num_groups, Tensor? weight, "
      "Tensor? bias, float eps, str activation, float[] params, ScalarType? dtype=None) -> Tensor",
      any_layout);
  m.def(
      "_empty_add_result(Tensor input, Tensor residual, int num_groups, Tensor? weight, Tensor? "
      "bias, float eps, str activation, float[] params, ScalarType? dtype=None) -> Tensor");
  m.def(
      "_empty_results(Tensor input, int num_groups, Tensor? weight, Tensor? bias, float eps, str "
      "activation, "
      "float[] params, ScalarType? dtype=None) -> (Tensor, Tensor, Tensor)");
  m.def(
      "linear_group_norm_activation(Tensor input, Tensor linear_weight, Tensor? linear_bias, int "
      "num_groups, Tensor? weight, Tensor? bias, float eps, str activation, float[] params, "
      "ScalarType? dtype=None) -> Tensor");
  m.def(
      "_empty_linear_result(Tensor input, Tensor linear_weight, Tensor? linear_bias, int "
      "num_groups, Tensor? weight, Tensor? bias, float eps, str activation, float[] params, "
      "ScalarType? dtype=None) -> Tensor");
  m.def(
      "_linear_kernel(int rows, int in_features, int out_features, int num_groups, ScalarType "
      "dtype, ScalarType output_dtype, ScalarType affine_dtype, str activation, Device device) -> "
      "(bool, str)",
      linear_kernel);
}

TORCH_LIBRARY_IMPL(fxfuse, CompositeExplicitAutograd, m) {
  m.impl(kOp, inference_default);
  m.impl(kForwardOp, forward_default);
  m.impl(kBackwardOp, backward_default);
  m.impl(kAddOp, add_composition);
  m.impl(kLinearOp, linear_composition);
}

TORCH_LIBRARY_IMPL(fxfuse, CompositeImplicitAutograd, m) {
  m.impl("_empty_results", empty_results);
  m.impl("_empty_add_result", empty_add_result);
  m.impl("_empty_linear_result", empty_linear_result);
}

TORCH_LIBRARY_IMPL(fxfuse, CPU, m) { CpuKernels::bind(m); }

#ifdef FXFUSE_CUDA
TORCH_LIBRARY_IMPL(fxfuse, CUDA, m) {
  CudaKernels::bind(m);
  m.impl(kAddOp, CudaKernels::add);
  m.impl(kLinearOp, linear_cuda);
}
#endif

TORCH_LIBRARY_IMPL(fxfuse, Autograd, m) {
  m.impl(kOp, autograd);
  m.impl(kAddOp, add_autograd);
  m.impl(kForwardOp, torch::autograd::autogradNotImplementedFallback());
  m.impl(kBackwardOp, torch::autograd::autogradNotImplementedFallback());
  m.impl(kLinearOp, linear_autograd);
}

TORCH_LIBRARY_IMPL(fxfuse, AutocastCUDA, m) {
  m.impl(kOp, autocast_cuda);
  m.impl(kAddOp, add_autocast_cuda);
  m.impl(kLinearOp, linear_autocast<c10::DispatchKey::AutocastCUDA, at::kCUDA>);
}

TORCH_LIBRARY_IMPL(fxfuse, AutocastCPU, m) {
  m.impl(kLinearOp, linear_autocast<c10::DispatchKey::AutocastCPU, at::kCPU>);
}

// torch.func, which refuses an autograd formula in C++, sees eager's operators instead.
TORCH_LIBRARY_IMPL(fxfuse, FuncTorchDynamicLayerFrontMode, m) {
  m.impl(kOp, eager);
  m.impl(kAddOp, add_composition);
  m.impl(kLinearOp, linear_composition);
}

}  // namespace fxfuse
