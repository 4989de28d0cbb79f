"""The operators as Python sees them: a typed wrapper, the fake kernels and a reference.

``torch.ops.fxfuse.group_norm_activation`` is registered in C++ (``kernels/library.cpp``) with its
autograd formula and its autocast rule. :func:`group_norm_activation` is what a rewritten graph
calls: it makes the checks that ``torch.nn.functional.group_norm`` makes in Python.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import handle_torch_function, has_torch_function_variadic
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fxfuse import library, sharding

ChannelsLast = Literal["keep", "eager"]


def group_norm_activation(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    activation: str = "identity",
    params: Sequence[float] = (),
    *,
    dtype: torch.dtype | None = None,
    channels_last: ChannelsLast = "keep",
    verify_batch_size: bool = True,
    autocast: bool = True,
) -> Tensor:
    r"""Group normalisation and the activation after it, in one operator.

    .. math::
        y = f\left(\frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}} \gamma + \beta\right)

    as :func:`torch.nn.functional.group_norm` (Wu and He, 2018, https://arxiv.org/abs/1803.08494)
    followed by ``activation``.

    Args:
        input: ``(N, C, *)``, two or more dimensions, floating-point.
        num_groups: Number of groups that the channels are cut into; divides ``C``.
        weight: ``(C)`` or None.
        bias: ``(C)`` or None.
        eps: Added to the variance.
        activation: ``"identity"``, ``"hardtanh"``, ``"clamp"``, ``"open_clamp"``, ``"relu"``,
            ``"relu6"``, ``"silu"``, ``"gelu"``, ``"gelu_tanh"`` (gelu with
            ``approximate="tanh"``), ``"hardswish"``, ``"leaky_relu"``, ``"sigmoid"`` or
            ``"tanh"``. ``hardtanh`` and the clamps give the same values. The gradient of
            ``hardtanh`` is 0 on a bound and passes NaN; ``clamp`` has the rule of
            ``torch.clamp`` up to torch 2.13 (it passes on a bound, and is 0 at NaN),
            ``open_clamp`` that from 2.14 on (0 at both). The others follow the functions of
            ``torch.nn.functional``.
        params: ``(min_val, max_val)`` for ``hardtanh`` and the clamps, which may be infinite;
            ``(negative_slope,)`` for ``leaky_relu``; else empty.
        dtype: Of the result; None for the input's. Statistics are float32 or wider.
        channels_last: ``"keep"`` returns a channels_last result for a channels_last input on
            every device; ``"eager"`` returns a contiguous one on CUDA, as eager does.
        verify_batch_size: Raise for one value per channel and group, as
            ``torch.nn.functional.group_norm`` does and ``torch.group_norm`` does not.
        autocast: Let CUDA autocast make the result float32, as it does with
            ``torch.nn.functional.group_norm`` and not with ``aten.native_group_norm``.

    Returns:
        ``(N, C, *)``.

    Raises:
        ValueError: If there is one value per group and ``verify_batch_size`` is set.
        RuntimeError: If an argument is not as described, or for an empty input that the installed
            torch refuses.
    """
    if has_torch_function_variadic(input, weight, bias):
        if have_own_functions(input, weight, bias):
            norm = F.group_norm if verify_batch_size else torch.group_norm
            return reference(input, num_groups, weight, bias, eps, activation, params, dtype, norm)
        # as F.group_norm does it: one call for a tracer's proxy or a mode
        result: Tensor = handle_torch_function(
            group_norm_activation,
            (input, weight, bias),
            input,
            num_groups,
            weight=weight,
            bias=bias,
            eps=eps,
            activation=activation,
            params=params,
            dtype=dtype,
            channels_last=channels_last,
            verify_batch_size=verify_batch_size,
            autocast=autocast,
        )
        return result
    if input.dim() >= 2 and num_groups > 0:
        _check_size(input, input.size(), num_groups, eps, verify_batch_size)
    if not autocast and dtype is None:
        dtype = input.dtype
    if channels_last == "eager" and input.is_cuda:
        # Flat and back, because sizes of 1 let channels_last strides pass for contiguous ones.
        input = input.contiguous().view(-1).view(input.size())
    if not library.is_loaded() and not library.load():
        return reference(input, num_groups, weight, bias, eps, activation, params, dtype)
    if type(input) is not Tensor and type(input) is not Parameter:
        sharding.register()  # of DTensor, which may have been imported after us
    output: Tensor = torch.ops.fxfuse.group_norm_activation(
        input, num_groups, weight, bias, eps, activation, params, dtype
    )
    return output


Add = Literal["out of place", "residual first", "in place"]


def group_norm_add_activation(
    input: Tensor,
    residual: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    activation: str = "identity",
    params: Sequence[float] = (),
    *,
    add: Add = "out of place",
    dtype: torch.dtype | None = None,
    channels_last: ChannelsLast = "keep",
    verify_batch_size: bool = True,
    autocast: bool = True,
) -> Tensor:
    r"""Group normalisation, a residual added to its result, and an activation, in one operator.

    .. math::
        y = f\left(\frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}} \gamma + \beta
        + r\right)

    The same as :func:`group_norm_activation`, the sum and the activation one after the other, which
    are also what runs where a gradient is asked for, and for residuals of another size, dtype or
    layout than the normalised input's.

    Args:
        input: ``(N, C, *)``, two or more dimensions, floating-point.
        residual: What is added: ``(N, C, *)``, or anything that can be added.
        num_groups: Number of groups that the channels are cut into; divides ``C``.
        weight: ``(C)`` or None.
        bias: ``(C)`` or None.
        eps: Added to the variance.
        activation: As for :func:`group_norm_activation`.
        params: As for :func:`group_norm_activation`.
        add: How eager adds: ``"out of place"`` is ``y + residual``, ``"residual first"`` is
            ``residual + y``, whose layout may be another one, and ``"in place"`` is
            ``y += residual``, which keeps the size and the dtype of ``y``.
        dtype: As for :func:`group_norm_activation`, before the sum.
        channels_last: As for :func:`group_norm_activation`.
        verify_batch_size: As for :func:`group_norm_activation`.
        autocast: As for :func:`group_norm_activation`.

    Returns:
        ``(N, C, *)``, or what eager's sum gives.

    Raises:
        ValueError: If there is one value per group and ``verify_batch_size`` is set.
        RuntimeError: If an argument is not as described, or the residual cannot be added.
    """
    tensors = input, residual, weight, bias
    own = has_torch_function_variadic(*tensors)
    if own and not (own := have_own_functions(*tensors)):
        result: Tensor = handle_torch_function(
            group_norm_add_activation,
            tensors,
            input,
            residual,
            num_groups,
            weight=weight,
            bias=bias,
            eps=eps,
            activation=activation,
            params=params,
            add=add,
            dtype=dtype,
            channels_last=channels_last,
            verify_batch_size=verify_batch_size,
            autocast=autocast,
        )
        return result
    if (
        own
        or not _takes_residual(input, residual, dtype, channels_last, autocast)
        or not (library.is_loaded() or library.load())
    ):
        y = group_norm_activation(
            input,
            num_groups,
            weight,
            bias,
            eps,
            dtype=dtype,
            channels_last=channels_last,
            verify_batch_size=verify_batch_size,
            autocast=autocast,
        )
        if add == "in place":
            y += residual
        else:
            y = residual + y if add == "residual first" else y + residual
        return ACTIVATIONS[activation](y, *params)
    _check_size(input, input.size(), num_groups, eps, verify_batch_size)
    output: Tensor = torch.ops.fxfuse.group_norm_add_activation(
        input, residual, num_groups, weight, bias, eps, activation, params, dtype
    )
    return output


def _takes_residual(
    input: Tensor,
    residual: Tensor,
    dtype: torch.dtype | None,
    channels_last: ChannelsLast,
    autocast: bool,
) -> bool:
    """Whether the operator gives what eager's sum gives: sizes, dtype and layout of the norm's.

    Subclasses, such as DTensor, have a sum of their own.
    """
    if not isinstance(residual, Tensor) or dtype is not None or input.dim() < 2:
        return False
    if is_traceable_wrapper_subclass(input) or is_traceable_wrapper_subclass(residual):
        return False
    if input.is_cuda and (channels_last == "eager" or not autocast):
        return False
    if input.device != residual.device or not _same_layout(input, residual):
        return False
    if input.is_cuda and torch.is_autocast_enabled("cuda"):
        # The norm's result is float32.
        wide = torch.float64 in (input.dtype, residual.dtype)
        return not wide and residual.is_floating_point()
    return input.dtype == residual.dtype


def _same_layout(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are known to have the same sizes and strides."""
    if type(one) is Tensor and not torch.compiler.is_dynamo_compiling():  # numbers, no symbols
        return one.size() == other.size() and one.stride() == other.stride()
    if one.dim() != other.dim():
        return False
    pairs = zip((*one.size(), *one.stride()), (*other.size(), *other.stride()), strict=True)
    return all(_holds(a == b) for a, b in pairs)


def _holds(condition: bool | torch.SymBool) -> bool:
    """Whether a condition on sizes holds; not where that depends on data that is not there yet."""
    if not (torch.compiler.is_dynamo_compiling() or isinstance(condition, torch.SymBool)):
        return condition  # to Dynamo a SymBool is a bool, of torch.jit.trace it is a tensor
    # Here, because the module that reasons about symbols takes long to import.
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(condition)


def linear_group_norm_activation(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    activation: str = "identity",
    params: Sequence[float] = (),
    *,
    dtype: torch.dtype | None = None,
    verify_batch_size: bool = True,
) -> Tensor:
    r"""A Linear, group normalisation of its result and the activation after it, in one operator.

    The same as :func:`torch.nn.functional.linear` followed by :func:`group_norm_activation`, which
    are also what runs, except where no gradient is asked for and one kernel is faster than two: see
    ``kernels/cuda/linear_plan.h``. That kernel does not round what lies between the two to the
    input's dtype. It multiplies float32 as TF32, and only in calls for which torch allows that
    (``torch.backends.cuda.matmul``).

    Args:
        input: ``(N, in_features)``, or ``(N, C, *, in_features)``, floating-point.
        linear_weight: ``(out_features, in_features)``, of the input's dtype.
        linear_bias: ``(out_features)``, of the input's dtype, or None.
        num_groups: Number of groups that dimension 1 of the Linear's result is cut into.
        weight: One value for each channel, that is for each index of dimension 1, or None.
        bias: The same.
        eps: As for :func:`group_norm_activation`.
        activation: As for :func:`group_norm_activation`.
        params: As for :func:`group_norm_activation`.
        dtype: Of the result; None for that of the Linear's. Statistics are float32 or wider.
        verify_batch_size: As for :func:`group_norm_activation`.

    Returns:
        ``(N, out_features)``, or ``(N, C, *, out_features)``.

    Raises:
        ValueError: If there is one value per group and ``verify_batch_size`` is set.
        RuntimeError: If an argument is not as described, or for an empty result that the installed
            torch refuses.
    """
    tensors = input, linear_weight, linear_bias, weight, bias
    own = has_torch_function_variadic(*tensors)
    if own and not (own := have_own_functions(*tensors)):
        result: Tensor = handle_torch_function(
            linear_group_norm_activation,
            tensors,
            input,
            linear_weight,
            linear_bias,
            num_groups,
            weight=weight,
            bias=bias,
            eps=eps,
            activation=activation,
            params=params,
            dtype=dtype,
            verify_batch_size=verify_batch_size,
        )
        return result
    # A subclass (DTensor, a quantised weight) has its own Linear and knows nothing of this one.
    # Where there is no kernel, a compiler has better to do with a Linear than to leave it alone.
    # F.linear takes one row for its weight too, and a bias that broadcasts.
    if (
        own
        or not _has_linear_kernel(input.device)
        or any(t is not None and is_traceable_wrapper_subclass(t) for t in tensors)
        or linear_weight.dim() != 2
        or (linear_bias is not None and linear_bias.size() != linear_weight.size()[:1])
        or not (library.is_loaded() or library.load())
    ):
        return group_norm_activation(
            F.linear(input, linear_weight, linear_bias),
            num_groups,
            weight,
            bias,
            eps,
            activation,
            params,
            dtype=dtype,
            verify_batch_size=verify_batch_size,
        )
    if input.dim() >= 2 and num_groups > 0:
        size = (*input.size()[:-1], linear_weight.size(0))
        _check_size(input, size, num_groups, eps, verify_batch_size)
    output: Tensor = torch.ops.fxfuse.linear_group_norm_activation(
        input, linear_weight, linear_bias, num_groups, weight, bias, eps, activation, params, dtype
    )
    return output


def have_own_functions(*operands: object) -> bool:
    """Whether an operand is of a subclass of Tensor that says what each of torch's functions does.

    It knows those that the model was written with, and none of ours.  Dynamo, which does in its own
    way what they say, takes ours for none of them.
    """
    # Not isinstance, which a tracer's proxy may answer as a tensor would.
    kinds: list[type[Any]] = [type(operand) for operand in operands]
    kinds = [kind for kind in kinds if issubclass(kind, Tensor)]
    if torch.compiler.is_dynamo_compiling():
        none = torch._C._disabled_torch_function_impl
        return any(kind is not Tensor and kind.__torch_function__ is not none for kind in kinds)
    own = (kind.__torch_function__ for kind in kinds)
    return any(getattr(function, "__func__", None) not in _TORCHS for function in own)


# That of Tensor, and none of Parameter and of subclasses that have only a __torch_dispatch__.
_TORCHS = (getattr(Tensor.__torch_function__, "__func__", None), None)


def linear_kernel(
    rows: int,
    in_features: int,
    out_features: int,
    num_groups: int,
    activation: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    output_dtype: torch.dtype | None = None,
    affine_dtype: torch.dtype | None = None,
) -> tuple[bool, str]:
    """Whether `linear_group_norm_activation` is one kernel for such tensors, without gradients.

    Args:
        rows: Of the input, ``(rows, in_features)``.
        in_features: Of the Linear.
        out_features: Of the Linear.
        num_groups: Of the GroupNorm.
        activation: Its name.
        dtype: Of the input and the Linear's parameters. float32 only where torch lets matmuls use
            TF32, as it is set now.
        device: Of the input.
        output_dtype: Of the result; None for `dtype`.
        affine_dtype: Of the GroupNorm's parameters; None for `dtype`.

    Returns:
        Whether it is, and why it is or is not, as a clause.
    """
    if not library.load():
        return False, "the compiled library is missing"
    served, reason = torch.ops.fxfuse._linear_kernel(
        rows,
        in_features,
        out_features,
        num_groups,
        dtype,
        output_dtype or dtype,
        affine_dtype or dtype,
        activation,
        device,
    )
    return bool(served), str(reason)


def may_have_linear_kernel() -> bool:
    """Whether this machine may have a GPU with the kernel of `linear_group_norm_activation`."""
    return torch.cuda.is_available()  # which, unlike a look at the GPU, does not initialise CUDA


def _has_linear_kernel(device: torch.device) -> bool:
    """Whether a device may have the kernel that computes a Linear too."""
    if device not in _with_linear_kernel:
        _with_linear_kernel[device] = (
            device.type == "cuda"
            and torch.cuda.is_available()
            and torch.cuda.get_device_capability(device) == (9, 0)
        )
    return _with_linear_kernel[device]


_with_linear_kernel: dict[torch.device, bool] = {}
# Dynamo runs it instead of tracing it.
_has_linear_kernel._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _check_size(
    like: Tensor, size: Sequence[int], num_groups: int, eps: float, verify_batch_size: bool
) -> None:
    """Raises for a tensor to normalise, of two or more dimensions, that torch does not take."""
    values = size[0] * (size[1] // num_groups)
    count = size[0] * size[1]
    for extent in size[2:]:  # math.prod is nothing that Dynamo can trace
        values *= extent
        count *= extent
    if _holds(count == 0) or (verify_batch_size and _holds(values == 1)):
        # F.group_norm has the rules, which are not the same in every torch, and the messages.
        # Asked on the CPU: CUDA's fails for C = 0 and stays failed.
        F.group_norm(like.new_empty(size, device="cpu"), num_groups, eps=eps)


# Reference activations, from the name and its parameters.
ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "identity": lambda z: z,
    "hardtanh": F.hardtanh,
    "clamp": torch.clamp,
    "open_clamp": torch.clamp,
    "relu": F.relu,
    "relu6": F.relu6,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "hardswish": F.hardswish,
    "leaky_relu": F.leaky_relu,
}


def reference(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: str,
    params: Sequence[float],
    dtype: torch.dtype | None = None,
    group_norm: Callable[..., Tensor] = torch.group_norm,
) -> Tensor:
    """What the operator computes, from torch's own: used where the library cannot be built.

    Also for tensors that know only torch's functions, of which `group_norm` is one.
    """
    wide = input.dtype if dtype is None else torch.promote_types(input.dtype, dtype)
    if wide != input.dtype:
        input = input.to(wide)
        weight = None if weight is None else weight.to(wide)
        bias = None if bias is None else bias.to(wide)
    y = group_norm(input, num_groups, weight, bias, eps)
    y = ACTIVATIONS[activation](y, *params)
    return y if dtype is None else y.to(dtype)


# ---- fake kernels ---------------------------------------------------------------------------
# The checks, dtypes, shapes and strides are those of the real operator because it is the same C++
# code that makes them: `_empty_results` is a composition, so it runs on fake tensors.


def _fake_inference(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: str,
    params: Sequence[float],
    dtype: torch.dtype | None = None,
) -> Tensor:
    return _fake_forward(input, num_groups, weight, bias, eps, activation, params, dtype)[0]


def _fake_forward(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: str,
    params: Sequence[float],
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    output, mean, rstd = torch.ops.fxfuse._empty_results(
        input, num_groups, weight, bias, eps, activation, params, dtype
    )
    return output, mean, rstd


def _fake_backward(
    grad_output: Tensor,
    input: Tensor,
    mean: Tensor,
    rstd: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: str,
    params: Sequence[float],
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    # The gradient has the layout that group_norm without an activation gives its result.
    dinput = torch.ops.fxfuse._empty_results(
        input, num_groups, weight, bias, eps, "identity", (), grad_output.dtype
    )[0]
    return (
        # not empty_like: where sizes of 1 allow two orders it may choose the other one
        dinput.new_empty_strided(dinput.size(), dinput.stride(), dtype=input.dtype)
        if output_mask[0]
        else None,
        torch.empty_like(weight) if output_mask[1] and weight is not None else None,
        torch.empty_like(bias) if output_mask[2] and bias is not None else None,
    )


def _fake_add(
    input: Tensor,
    residual: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: str,
    params: Sequence[float],
    dtype: torch.dtype | None = None,
) -> Tensor:
    output: Tensor = torch.ops.fxfuse._empty_add_result(
        input, residual, num_groups, weight, bias, eps, activation, params, dtype
    )
    return output


def _fake_linear(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: str,
    params: Sequence[float],
    dtype: torch.dtype | None = None,
) -> Tensor:
    output: Tensor = torch.ops.fxfuse._empty_linear_result(
        input, linear_weight, linear_bias, num_groups, weight, bias, eps, activation, params, dtype
    )
    return output


def _register_fakes() -> None:
    torch.library.register_fake("fxfuse::group_norm_activation", _fake_inference)
    torch.library.register_fake("fxfuse::group_norm_activation_forward", _fake_forward)
    torch.library.register_fake("fxfuse::group_norm_activation_backward", _fake_backward)
    torch.library.register_fake("fxfuse::group_norm_add_activation", _fake_add)
    torch.library.register_fake("fxfuse::linear_group_norm_activation", _fake_linear)


# ---- what torch.utils.flop_counter counts ----------------------------------------------------


def register_flops() -> None:
    """Has the operator that computes a Linear counted as one; the others are nothing, as eager's.

    Called when a Linear is taken into an operator, and not at import, because the counter looks for
    Triton, which takes longer to import than we do.
    """
    from torch.utils import flop_counter

    if not library.is_loaded():
        return
    operator = torch.ops.fxfuse.linear_group_norm_activation
    if operator not in flop_counter.flop_registry:
        flop_counter.register_flop_formula(operator)(_linear_flops)


def _linear_flops(
    input_shape: torch.Size, linear_weight_shape: torch.Size, *args: Any, **kwargs: Any
) -> int:
    return 2 * math.prod(input_shape) * linear_weight_shape[0]


def _register_flops_if_imported() -> None:
    if "torch.utils.flop_counter" in sys.modules:
        register_flops()


FUNCTIONS = (group_norm_activation, group_norm_add_activation, linear_group_norm_activation)
"""What rewritten graphs call."""

library.on_load(_register_fakes)
library.on_load(_register_flops_if_imported)
library.load_existing()  # at import, so that saved programs open
