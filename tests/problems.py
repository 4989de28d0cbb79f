"""The problems that the operator is tested on, and the contract that its answers keep.

`problems()` draws a shape, a layout, dtypes, an activation and a seed, never elements.  The
contract is judged against `reference`, the formula in NumPy at a precision above the operator's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import HealthCheck, settings
from torch import Tensor

from fxfuse import ops

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
HALF_DTYPES = [torch.float16, torch.bfloat16]
GROUP_SIZES = [1, 2, 3, 5, 7, 12, 31, 33, 96]  # in channels
GRADIENTS = ["dinput", "dweight", "dbias"]

# The parameters of each activation that an example tries.
PARAMS: dict[str, list[tuple[float, ...]]] = {
    "identity": [()],
    "relu": [()],
    "relu6": [()],
    "silu": [()],
    "sigmoid": [()],
    "tanh": [()],
    "gelu": [()],
    "gelu_tanh": [()],
    "hardswish": [()],
    "leaky_relu": [(0.01,), (0.3,), (-0.5,), (2.0,)],
    "hardtanh": [(-1, 1), (-2, 2), (0.1, 0.7), (-0.5, -0.5), (0, math.inf), (-math.inf, math.inf)],
    "clamp": [(-1, 1), (-0.1, 0.3), (1, -1), (-math.inf, 0.5), (-0.25, math.inf)],
    "open_clamp": [(-1, 1), (1, -1), (-0.25, math.inf)],
}

# `device` is function-scoped only so that a test may have it beside other fixtures.
checked = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    deadline=None,
)

Array = Any  # numpy.ndarray of float64 or longdouble


# ---- layouts --------------------------------------------------------------------------------


def lay_out(values: Tensor, layout: str) -> Tensor:
    """The values in memory of the given layout; `expanded` repeats the first sample."""
    if layout == "channels_last":
        memory_format = torch.channels_last if values.dim() == 4 else torch.channels_last_3d
        return values.clone(memory_format=memory_format)  # also where sizes of 1 allow both
    if layout == "sliced":
        wide = values.new_full((*values.shape[:-1], 2 * values.shape[-1] + 1), math.nan)
        wide[..., 1::2] = values
        return wide[..., 1::2]
    if layout == "narrowed":
        wide = values.new_full((values.shape[0], values.shape[1] + 3, *values.shape[2:]), math.nan)
        wide[:, 1:-2] = values
        return wide[:, 1:-2]
    if layout == "transposed":
        order = tuple(reversed(range(values.dim())))
        return values.permute(order).contiguous().permute(order)
    if layout == "expanded":
        return values[:1].clone().expand(values.shape)
    if layout == "offset":  # not aligned to 16 bytes
        flat = values.new_empty(values.numel() + 1)[1:]
        return flat.copy_(values.flatten()).view(values.shape)
    assert layout == "contiguous"
    return values.contiguous()


def layouts(rank: int) -> list[str]:
    return [
        "contiguous",
        *(["channels_last"] if rank in (4, 5) else []),
        "sliced",
        "narrowed",
        "transposed",
        "expanded",
        "offset",
    ]


# ---- problems -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operands:
    """The tensors of a call; weight and bias may be None."""

    input: Tensor
    weight: Tensor | None
    bias: Tensor | None

    def requiring_grad(self) -> Operands:
        return Operands(*(t if t is None else t.detach().requires_grad_() for t in self.as_tuple()))

    def as_tuple(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return self.input, self.weight, self.bias


@dataclass(frozen=True)
class Problem:
    """GroupNorm and an activation over random values.

    Attributes:
        wide_affine: float32 weight and bias beside a 16-bit input, where eager takes them: on
            the CPU.
        mean, spread: Of the input's values.
        grad_layout: Of the gradient of the output.
    """

    shape: tuple[int, ...]
    num_groups: int
    dtype: torch.dtype = torch.float32
    layout: str = "contiguous"
    has_weight: bool = True
    has_bias: bool = True
    wide_affine: bool = False
    activation: str = "hardtanh"
    params: tuple[float, ...] = (-1, 1)
    eps: float = 1e-5
    mean: float = 0.0
    spread: float = 1.0
    seed: int = 0
    grad_layout: str = "contiguous"

    def tensors(self, device: torch.device | str = "cpu") -> Operands:
        generator = torch.Generator().manual_seed(self.seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        values = (self.mean + self.spread * random(*self.shape)).to(device, self.dtype)
        mixed = self.wide_affine and torch.device(device).type == "cpu"
        dtype = torch.float32 if mixed and self.dtype in HALF_DTYPES else self.dtype
        channels = self.shape[1]
        weight, bias = (1 + random(channels)).to(device, dtype), random(channels).to(device, dtype)
        return Operands(
            lay_out(values, self.layout),
            weight if self.has_weight else None,
            bias if self.has_bias else None,
        )

    def reference64(self, operands: Operands, grad_output: Tensor | None = None) -> Reference:
        return reference(
            operands, self.num_groups, self.eps, self.activation, self.params, grad_output
        )

    def grad_output(self, operands: Operands) -> Tensor:
        """A random gradient that is zero wherever rounding may decide on which side z is.

        The contract lets z be 4 ulp off; within 4 ulp of a kink a right answer may have the slope
        of either side.  What happens exactly on a kink is tested on its own.
        """
        generator = torch.Generator().manual_seed(self.seed + 1)
        values = torch.randn(self.shape, generator=generator, dtype=torch.float64)
        undecided = self.reference64(operands).near_a_kink()
        if self.grad_layout == "expanded":
            undecided = np.broadcast_to(undecided.any(axis=0, keepdims=True), undecided.shape)
        values[torch.from_numpy(undecided.copy())] = 0
        return lay_out(values.to(operands.input.device, self.dtype), self.grad_layout)

    def ours(self, input: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return ops.group_norm_activation(
            input,
            self.num_groups,
            weight,
            bias,
            self.eps,
            self.activation,
            self.params,
            verify_batch_size=False,
        )

    def eager(self, input: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return eager(input, self.num_groups, weight, bias, self.eps, self.activation, self.params)

    def check(self, device: torch.device | str, *, backward: bool = True) -> None:
        """Runs the problem both ways and holds ours against the contract."""
        operands = self.tensors(device)
        grad_output = self.grad_output(operands) if backward else None
        check_contract(
            run(self.ours, operands, grad_output),
            run(self.eager, operands, grad_output),
            self.reference64(operands, grad_output),
        )


def eager(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: str,
    params: tuple[float, ...],
) -> Tensor:
    """The two operators that ours replaces."""
    if weight is None and bias is not None and bias.requires_grad:
        # Eager's CPU kernel cannot give the gradient of a bias without a weight.
        weight = torch.ones_like(bias)
    y = torch.group_norm(input, num_groups, weight, bias, eps)
    return ops.ACTIVATIONS[activation](y, *params)


@st.composite
def problems(draw: st.DrawFn, max_size: int = 1 << 15) -> Problem:
    """Problems of up to about `max_size` values, in all shapes, layouts and dtypes."""
    rank = draw(st.integers(2, 6))
    left = max_size

    def size(limit: int) -> int:
        nonlocal left
        drawn = draw(st.integers(1, max(1, min(limit, left))))
        left //= drawn
        return drawn

    batch, num_groups = size(5), size(9)
    per_group = draw(st.sampled_from(GROUP_SIZES) | st.just(0)) or size(2048)
    left //= per_group
    if rank == 3:  # one long dimension, so that a group is cut among threads
        spatial: tuple[int, ...] = (size(20_000),)
    else:
        spatial = tuple(size(13) for _ in range(rank - 2))
    activation = draw(st.sampled_from(sorted(PARAMS)))
    return Problem(
        shape=(batch, num_groups * per_group, *spatial),
        num_groups=num_groups,
        dtype=draw(st.sampled_from(DTYPES)),
        layout=draw(st.sampled_from(layouts(rank))),
        has_weight=draw(st.booleans()),
        has_bias=draw(st.booleans()),
        wide_affine=draw(st.booleans()),
        activation=activation,
        params=draw(st.sampled_from(PARAMS[activation])),
        eps=draw(st.sampled_from([1e-5, 1e-3, 1e-12])),
        mean=draw(st.sampled_from([0.0, -1.0, 100.0, 1e4])),
        spread=draw(st.sampled_from([1.0, 1e-3, 50.0])),
        seed=draw(st.integers(0, 2**16)),
        grad_layout=draw(st.sampled_from(layouts(rank))),
    )


# ---- answers --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """What a call gave; a gradient that was not asked for is None."""

    output: Tensor
    dinput: Tensor | None = None
    dweight: Tensor | None = None
    dbias: Tensor | None = None


def run(
    function: Callable[[Tensor, Tensor | None, Tensor | None], Tensor],
    operands: Operands,
    grad_output: Tensor | None = None,
) -> Answer:
    """Calls, and with a grad_output asks for the gradient of every operand."""
    if grad_output is None:
        with torch.no_grad():
            return Answer(function(*operands.as_tuple()))
    leaves = operands.requiring_grad()
    output = function(*leaves.as_tuple())
    wanted = [t for t in leaves.as_tuple() if t is not None]
    found = iter(torch.autograd.grad(output, wanted, grad_output))
    gradients = [None if t is None else next(found) for t in leaves.as_tuple()]
    return Answer(output.detach(), *gradients)


# ---- the reference --------------------------------------------------------------------------


def to_array(t: Tensor, wide: Any) -> Array:
    return t.detach().double().cpu().numpy().astype(wide)


# The activations that are clamped to bounds, with the bounds of those that have their own.
BOUNDED = {
    "hardtanh": None,
    "clamp": None,
    "open_clamp": None,
    "relu": (0.0, math.inf),
    "relu6": (0.0, 6.0),
}

SMOOTH = ["silu", "sigmoid", "tanh", "gelu", "gelu_tanh"]


def round_params(activation: str, params: tuple[float, ...], dtype: torch.dtype) -> list[float]:
    """The parameters as an activation on this dtype uses them."""
    if fixed := BOUNDED.get(activation):
        return list(fixed)
    if activation == "leaky_relu" and dtype != torch.float64:
        dtype = torch.float32  # a factor in the accumulate type
    return [torch.tensor(p, dtype=torch.float64).to(dtype).item() for p in params]


def kinks(activation: str, params: list[float]) -> list[float]:
    """Where the slope jumps."""
    if activation in BOUNDED:
        return params
    return {"hardswish": [-3.0, 3.0], "leaky_relu": [0.0]}.get(activation, [])


@dataclass(frozen=True)
class Reference:
    """The right answer, and the scale on which an answer's errors are measured.

    A scale is the size of the terms that a value is added up from, since it is those that an
    operator rounds: |x_hat w| + |b| for the output, as the contract says, and in the same way

        dinput    rstd (|dz w| + |mean(dz w)| + |x_hat mean(dz w x_hat)|)
        dweight   sum |dz x_hat|
        dbias     sum |dz|

    where dz = grad_output f'(z), whose own size is |grad_output| (|f'(z)| + |f''(z)| size of z)
    where f' is smooth: z is rounded before f' is taken of it.  Of the output there is one scale per
    group, (N, G); of a gradient one per tensor.  Where all z are near 0, that of a sigmoid is its
    result, 1/2, which is rounded too.
    """

    num_groups: int
    z: Array  # (N, C, *)
    kinks: list[float]
    dtype: torch.dtype
    output: Array
    output_scale: Array
    steepness: float  # of an activation with |f'| > 1, which multiplies the error of z
    gradients: dict[str, tuple[Array, Array]]  # name: (value, scale)

    def near_a_kink(self) -> Array:
        """Where z is within 4 ulp of a kink."""
        z = grouped(self.z, self.num_groups)
        tolerance = 4 * ulp(self.output_scale, self.dtype)[..., None]
        near = np.zeros(z.shape, dtype=bool)
        for kink in self.kinks:
            near |= np.abs(z - kink) <= np.maximum(tolerance, 4 * ulp(kink, self.dtype))
        return near.reshape(self.z.shape)


def grouped(a: Array, num_groups: int) -> Array:
    return a.reshape(a.shape[0], num_groups, -1)


def normal_cdf(z: Array) -> Array:
    """Of the standard normal distribution, to a few units of the array's own precision below 1.

    By erf x = 2 / sqrt(pi) e^(-x^2) sum 2^n x^(2n+1) / (2n+1)!!, whose terms are all positive:
    neither NumPy nor Python has an erf that is more precise than float64.
    """
    x = np.clip(z / np.sqrt(z.dtype.type(2)), -9, 9)  # beyond it erf is 1 in every type
    square = x * x
    total = term = x
    for n in range(1, 250):  # 9^2 terms grow, the others fall
        term = term * (2 * square / (2 * n + 1))
        total = total + term
    pi = 4 * np.arctan(z.dtype.type(1))
    return (1 + 2 / np.sqrt(pi) * np.exp(-square) * total) / 2


def gelu_tanh_argument(z: Array) -> tuple[Array, Array]:
    """The u in z (1 + tanh u) / 2, and its slope."""
    root, cubic = np.sqrt(2 / (4 * np.arctan(z.dtype.type(1)))), 0.044715
    return root * (z + cubic * z**3), root * (1 + 3 * cubic * z**2)


def activation_value(activation: str, z: Array, params: list[float]) -> Array:
    if activation in BOUNDED:
        return np.minimum(np.maximum(z, params[0]), params[1])  # both let NaN through
    with np.errstate(over="ignore"):
        match activation:
            case "identity":
                return z
            case "silu":
                return z / (1 + np.exp(-z))
            case "sigmoid":
                return 1 / (1 + np.exp(-z))
            case "tanh":
                return np.tanh(z)
            case "gelu":
                return z * normal_cdf(z)
            case "gelu_tanh":
                return z * (1 + np.tanh(gelu_tanh_argument(z)[0])) / 2
            case "hardswish":
                return z * np.clip(z + 3, 0, 6) / 6
            case "leaky_relu":
                return np.where(z > 0, z, z * params[0])
    raise AssertionError(activation)


def activation_slope(activation: str, z: Array, params: list[float]) -> Array:
    with np.errstate(over="ignore"):
        match activation:
            case "identity":
                return np.ones_like(z)
            case "silu":
                s = 1 / (1 + np.exp(-z))
                return s * (1 + z * (1 - s))
            case "sigmoid":
                s = 1 / (1 + np.exp(-z))
                return s * (1 - s)
            case "tanh":
                return 1 - np.tanh(z) ** 2
            case "gelu":
                pi = 4 * np.arctan(z.dtype.type(1))
                return normal_cdf(z) + z * np.exp(-z * z / 2) / np.sqrt(2 * pi)
            case "gelu_tanh":
                u, slope = gelu_tanh_argument(z)
                t = np.tanh(u)
                return (1 + t) / 2 + z * (1 - t * t) / 2 * slope
            case "hardswish":
                inside = np.where(z < 3, z / 3 + 0.5, 1)
                return np.where(z <= -3, 0, inside)
            case "leaky_relu":
                return np.where(z > 0, 1, np.asarray(params[0], z.dtype))
            case "clamp":
                return ((z >= params[0]) & (z <= params[1])).astype(z.dtype)
            case "open_clamp":
                return ((z > params[0]) & (z < params[1])).astype(z.dtype)
    assert activation in BOUNDED
    return 1 - ((z <= params[0]) | (z >= params[1])).astype(z.dtype)


def curvature(activation: str, z: Array) -> Array:
    """f'' where f' is smooth, to the few digits that a scale needs; 0 for the others."""
    if activation not in SMOOTH:
        return np.zeros_like(z)
    step = 1e-3
    above, below = (activation_slope(activation, z + d, []) for d in (step, -step))
    return (above - below) / (2 * step)


def reference(
    operands: Operands,
    num_groups: int,
    eps: float,
    activation: str,
    params: tuple[float, ...],
    grad_output: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Reference:
    """GroupNorm and an activation by the formula, in float64, or wider where the input is that.

    Args:
        operands: Of any dtype; their values are taken as they are.
        num_groups: As for the operator.
        eps: As for the operator.
        activation: As for the operator.
        params: As for the operator.
        grad_output: The gradient of the output, or None for no gradients.
        dtype: Of the output; None for the input's.
    """
    dtype = operands.input.dtype if dtype is None else dtype
    wide = np.longdouble if operands.input.dtype == torch.float64 else np.float64
    x = to_array(operands.input, wide)
    channels = x.shape[1]

    def per_channel(t: Tensor | None, missing: float) -> Array:
        a = np.full(channels, missing, wide) if t is None else to_array(t, wide)
        return a.reshape(1, channels, *[1] * (x.ndim - 2))

    weight, bias = per_channel(operands.weight, 1), per_channel(operands.bias, 0)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        rows = grouped(x, num_groups)
        centred = rows - rows.mean(-1, keepdims=True)
        centred = centred - centred.mean(-1, keepdims=True)
        rstd = 1 / np.sqrt(np.square(centred).mean(-1, keepdims=True) + wide(eps))
        x_hat = (centred * rstd).reshape(x.shape)
        z = x_hat * weight + bias
        rounded = round_params(activation, params, dtype)
        size = np.abs(x_hat * weight) + np.abs(bias)
        output = activation_value(activation, z, rounded)
        scale = grouped(size, num_groups).max(-1)
        if activation in SMOOTH:
            scale = np.maximum(scale, np.abs(grouped(output, num_groups)).max(-1))
        gradients: dict[str, tuple[Array, Array]] = {}
        if grad_output is not None:
            dy = to_array(grad_output, wide)
            dz = dy * activation_slope(activation, z, rounded)
            dz_size = np.abs(dz) + np.abs(dy * curvature(activation, z)) * size
            g, h = grouped(dz * weight, num_groups), grouped(x_hat, num_groups)
            offset = g.mean(-1, keepdims=True)
            slope = (g * h).mean(-1, keepdims=True)
            dinput = (rstd * (g - offset - h * slope)).reshape(x.shape)
            g_size = grouped(dz_size * np.abs(weight), num_groups)
            terms = rstd * (g_size + np.abs(offset) + np.abs(h * slope))
            rest = (0, *range(2, x.ndim))
            gradients = {
                "dinput": (dinput, terms.max()),
                "dweight": ((dz * x_hat).sum(rest), (dz_size * np.abs(x_hat)).sum(rest).max()),
                "dbias": (dz.sum(rest), dz_size.sum(rest).max()),
            }
        return Reference(
            num_groups,
            z,
            kinks(activation, rounded),
            dtype,
            output,
            scale,
            max(1.0, abs(rounded[0])) if activation == "leaky_relu" else 1.0,
            gradients,
        )


# ---- the contract ---------------------------------------------------------------------------


def ulp(size: Array | float, dtype: torch.dtype) -> Array:
    """The distance between neighbouring numbers of the dtype at `size`."""
    info = torch.finfo(dtype)
    size = np.abs(np.asarray(size, dtype=np.float64))
    _, exponent = np.frexp(np.clip(size, info.tiny, info.max))
    return np.where(np.isnan(size), np.nan, np.ldexp(info.eps, exponent - 1))


def errors(got: Tensor, want: Array) -> Array:
    """|got - want|, NaN where only one is NaN.

    0 where both are NaN or the same infinity, and where got is the infinity that stands in its
    dtype for a value beyond the dtype's range.
    """
    a = to_array(got, want.dtype)
    assert a.shape == want.shape, f"shape {a.shape} where {want.shape} is right"
    beyond = np.abs(want) > torch.finfo(got.dtype).max
    with np.errstate(invalid="ignore"):
        same = (a == want) | (np.isnan(a) & np.isnan(want))
        same |= beyond & (a == np.copysign(np.inf, want))
        return np.where(same, 0, np.abs(a - want))


def check_contract(ours: Answer, eager: Answer, reference: Reference) -> None:
    """Raises AssertionError unless ours keeps the contract.

    The largest error, of each group for the output and of each tensor for a gradient, is at most
    the larger of eager's and 4 ulp of the scale (see `Reference`) in the dtype of the result.
    Where the right value is NaN or infinite, it must be that.
    """
    assert ours.output.dtype == eager.output.dtype == reference.dtype
    allowed = 4 * ulp(reference.output_scale, ours.output.dtype) * reference.steepness
    ours_error, eager_error = (
        grouped(errors(a.output, reference.output), reference.num_groups).max(-1)
        for a in (ours, eager)
    )
    _judge("output", ours_error, eager_error, allowed)
    for name, (value, scale) in reference.gradients.items():
        ours_gradient, eager_gradient = getattr(ours, name), getattr(eager, name)
        if ours_gradient is None:
            assert eager_gradient is None
            continue
        assert ours_gradient.dtype == eager_gradient.dtype
        allowed = 4 * ulp(scale, ours_gradient.dtype)
        ours_error, eager_error = (errors(t, value).max() for t in (ours_gradient, eager_gradient))
        _judge(name, ours_error, eager_error, allowed)


def _judge(name: str, ours: Array, eager: Array, allowed: Array) -> None:
    # Eager's error may be NaN, then it excuses nothing; ours may not, nor be infinite for a
    # finite value that eager gets right.
    bar = np.fmax(np.where(np.isnan(eager), 0, eager), np.where(np.isnan(allowed), 0, allowed))
    worst = np.argmax(np.where(np.isnan(ours), np.inf, ours - np.where(ours <= bar, ours, bar)))
    assert (ours <= bar).all(), (
        f"{name}: error {np.ravel(ours)[worst]:.3g} of ours, {np.ravel(eager)[worst]:.3g} of "
        f"eager, 4 ulp are {np.ravel(np.broadcast_to(allowed, np.shape(ours)))[worst]:.3g} "
        f"(the worst of {np.size(ours)}, at {worst})"
    )
