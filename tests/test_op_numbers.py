"""The inputs under "Numbers" that broke projects like this one, each as a test of its kind."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from problems import (
    DTYPES,
    GROUP_SIZES,
    HALF_DTYPES,
    PARAMS,
    SMOOTH,
    Answer,
    Operands,
    Problem,
    check_contract,
    eager,
    lay_out,
    layouts,
    reference,
    run,
)
from torch import Tensor
from torch._subclasses import FakeTensorMode
from ways import BACKWARD, CHANNELS_LAST, CHANNELS_LAST_LARGE, FORWARD

from fxfuse import library, ops
from fxfuse.patterns import clamp_activation

INF, NAN = math.inf, math.nan
OUR_BOUNDS = {
    "hardtanh": (-1.0, 1.0),
    "clamp": (-1.0, 1.0),
    "open_clamp": (-1.0, 1.0),
    "relu": (),
    "relu6": (),
}


@pytest.fixture(scope="module", autouse=True)
def _library() -> None:
    assert library.load(), library.failure()


def check(
    operands: Operands,
    num_groups: int,
    activation: str = "hardtanh",
    params: tuple[float, ...] = (-1, 1),
    eps: float = 1e-5,
    grad_output: Tensor | None = None,
) -> Answer:
    """Holds ours against the contract on these very values, and returns it."""
    rest = (eps, activation, params)

    def ours(x: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
        return ops.group_norm_activation(x, num_groups, w, b, *rest, verify_batch_size=False)

    def theirs(x: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
        return eager(x, num_groups, w, b, *rest)

    answer = run(ours, operands, grad_output)
    check_contract(
        answer,
        run(theirs, operands, grad_output),
        reference(operands, num_groups, *rest, grad_output),
    )
    return answer


# ---- shapes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_groups", [1, 3, 16])
@pytest.mark.parametrize("channels_per_group", GROUP_SIZES)
def test_case_19_channels_per_group(
    device: torch.device, channels_per_group: int, num_groups: int, dtype: torch.dtype
) -> None:
    channels = channels_per_group * num_groups
    for spatial, layout in [
        ((), "contiguous"),
        ((7,), "contiguous"),
        ((17,), "offset"),
        ((3, 5), "channels_last"),
    ]:
        problem = Problem((3, channels, *spatial), num_groups, dtype, layout, grad_layout=layout)
        problem.check(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_groups", [1, 7])
@pytest.mark.parametrize("rank", [2, 3, 4, 5, 6])
def test_case_20_every_rank_with_distinct_primes(
    device: torch.device, rank: int, num_groups: int, dtype: torch.dtype
) -> None:
    for layout in layouts(rank):
        Problem((2, 7, 3, 13, 5, 11)[:rank], num_groups, dtype, layout).check(device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("mean", "spread"), [(1e2, 1e-2), (1e3, 1e-2), (1e4, 1e-2), (1e4, 1e-3)])
@pytest.mark.parametrize("size", [2, 33, 1000, 65_537])
def test_case_21_mean_far_above_the_spread(
    device: torch.device, size: int, mean: float, spread: float, dtype: torch.dtype
) -> None:
    for shape in ((2, 3 * size), (2, 3, size)):
        Problem(shape, 3, dtype, mean=mean, spread=spread).check(device)


@pytest.mark.parametrize(("shape", "layout"), [
    ((1, 10_000_000), "contiguous"),
    ((1, 2, 5_000_000), "contiguous"),
    ((1, 4, 1250, 2000), "channels_last"),
])  # fmt: skip
def test_case_21_mean_far_above_the_spread_in_ten_million_values(
    device: torch.device, shape: tuple[int, ...], layout: str
) -> None:
    problem = Problem(shape, 1, layout=layout, mean=1e4, spread=1e-2)
    problem.check(device, backward=False)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_case_22_the_range_of_half(device: torch.device, dtype: torch.dtype, layout: str) -> None:
    def both(values: Tensor, eps: float = 1e-5) -> None:
        values = lay_out(values.to(device, dtype), layout)
        weight = torch.linspace(-2, 2, values.shape[1], device=device).to(dtype)
        grad_output = torch.ones_like(values)
        check(Operands(values, weight, None), 2, "identity", (), eps, grad_output)

    index = torch.arange(16).view(-1, 1) + torch.arange(24)
    checkerboard = (index % 2 * 1024.0 - 512).expand(2, 4, 16, 24)
    both(checkerboard)
    both(checkerboard.sign() * 6e4)
    both(torch.full((2, 4, 16, 24), 6e4) + 32 * torch.randn(2, 4, 16, 24).sign())
    for constant in (0.0, 0.1, 1.0, 512.0, 6e4):
        both(torch.full((2, 4, 5, 7), constant), eps=1e-12)
    both(torch.randn(1, 4, 200, 201))  # 80 400 values in a group; 65 504 is the largest float16


@pytest.mark.parametrize("constant", [0.1, 100.0, 1234.567, 6e4, 1e7])
@pytest.mark.parametrize("dtype", DTYPES)
def test_case_23_a_constant_is_normalised_to_zero(
    device: torch.device, dtype: torch.dtype, constant: float
) -> None:
    if constant > torch.finfo(dtype).max:
        pytest.skip("infinite in this dtype")
    for shape, layout in [
        ((3, 12), "contiguous"),
        ((2, 12, 1), "contiguous"),
        ((2, 12, 31), "contiguous"),
        ((1, 12, 25_000), "contiguous"),
        ((2, 12, 7, 9), "channels_last"),
        ((1, 12, 100, 250), "channels_last"),
    ]:
        bias = torch.linspace(-2, 2, 12, device=device).to(dtype)
        x = lay_out(torch.full(shape, constant, device=device, dtype=dtype), layout)
        weight = torch.full((12,), 3.0, device=device, dtype=dtype)
        y = ops.group_norm_activation(x, 4, weight, bias, 1e-5, "hardtanh", (-1, 1))
        expected = bias.clamp(-1, 1).view(1, 12, *[1] * (len(shape) - 2)).expand(shape)
        assert torch.equal(y, expected)


# ---- which gradients are asked for ----------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "layout"), [
    ((5, 12), "contiguous"),
    ((2, 12, 40), "contiguous"),
    ((2, 12, 5, 7), "channels_last"),
])  # fmt: skip
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_weight", [False, True])
def test_case_24_any_affine_and_any_subset_of_gradients(
    device: torch.device,
    has_weight: bool,
    has_bias: bool,
    shape: tuple[int, ...],
    layout: str,
    dtype: torch.dtype,
) -> None:
    for wide_affine in {False, dtype in HALF_DTYPES}:
        problem = Problem(
            shape,
            4,
            dtype,
            layout,
            has_weight=has_weight,
            has_bias=has_bias,
            wide_affine=wide_affine,
        )
        operands = problem.tensors(device)
        grad_output = problem.grad_output(operands)
        everything = check(operands, 4, grad_output=grad_output)
        present = [i for i, t in enumerate(operands.as_tuple()) if t is not None]
        for count in range(len(present) + 1):
            for wanted in itertools.combinations(present, count):
                leaves = tuple(
                    t if t is None else t.detach().requires_grad_(i in wanted)
                    for i, t in enumerate(operands.as_tuple())
                )
                y = problem.ours(*leaves)
                assert y.requires_grad == bool(wanted)
                assert torch.equal(y.detach(), everything.output)
                if wanted:
                    y.backward(grad_output)
                for i, name in enumerate(("dinput", "dweight", "dbias")):
                    leaf, expected = leaves[i], getattr(everything, name)
                    if leaf is None or i not in wanted:
                        assert leaf is None or leaf.grad is None
                    else:
                        # One gradient alone may take another path than all three.
                        assert leaf.grad is not None
                        assert leaf.grad.dtype == leaf.dtype
                        torch.testing.assert_close(leaf.grad, expected)


@pytest.mark.parametrize("activation", ["identity", "hardtanh", "clamp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("shape", "num_groups"),
    [
        ((0, 6), 2),
        ((0, 6, 5), 2),
        ((2, 6, 0), 3),
        ((2, 6, 0, 4), 3),
        ((2, 6, 4, 0), 6),
        ((0, 6, 0, 3), 1),
        ((0, 6, 3, 4), 2),
        ((2, 6, 0, 3, 2), 2),
        ((2, 0, 3), 1),
    ],
)
def test_case_25_nothing_in_it(
    device: torch.device,
    shape: tuple[int, ...],
    num_groups: int,
    dtype: torch.dtype,
    activation: str,
) -> None:
    params = OUR_BOUNDS.get(activation, ())
    for memory_format in (torch.contiguous_format, torch.channels_last):
        if memory_format is torch.channels_last and len(shape) != 4:
            continue
        x = torch.empty(shape, device=device, dtype=dtype).to(memory_format=memory_format)
        weight = torch.ones(shape[1], device=device, dtype=dtype, requires_grad=True)
        bias = torch.ones(shape[1], device=device, dtype=dtype, requires_grad=True)
        x.requires_grad_()
        args = (x, num_groups, weight, bias, 1e-5, activation, params)
        try:
            theirs = eager(x.cpu(), num_groups, weight.cpu(), bias.cpu(), 1e-5, activation, params)
        except RuntimeError:  # torch 2.14 where nothing follows the channels
            with pytest.raises(RuntimeError, match="Expected"):
                ops.group_norm_activation(*args)
            continue
        y = ops.group_norm_activation(*args)
        assert (y.shape, y.stride(), y.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fakes = [mode.from_tensor(t.detach()) for t in (x, weight, bias)]
            fake = ops.group_norm_activation(
                fakes[0], num_groups, *fakes[1:], 1e-5, activation, params
            )
        assert (fake.shape, fake.stride()) == (y.shape, y.stride())
        dx, dweight, dbias = torch.autograd.grad(y.sum(), (x, weight, bias))
        assert dx.shape == x.shape
        assert torch.equal(dweight, torch.zeros_like(weight))
        assert torch.equal(dbias, torch.zeros_like(bias))


def bytes_of(t: Tensor) -> Tensor:
    """The whole storage, with what lies between and around the values."""
    storage = t.detach().untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=t.device).set_(storage).clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [2, 3, 4, 5])
def test_case_26_a_gradient_of_any_layout_is_read_right_and_not_written_to(
    device: torch.device, rank: int, dtype: torch.dtype
) -> None:
    shape = (3, 8, 5, 4, 3)[:rank]
    for layout, grad_layout in itertools.product(layouts(rank), repeat=2):
        problem = Problem(shape, 4, dtype, layout, grad_layout=grad_layout)
        operands = problem.tensors(device)
        grad_output = problem.grad_output(operands)
        given = [t for t in (*operands.as_tuple(), grad_output) if t is not None]
        before = [bytes_of(t) for t in given]
        answer = run(problem.ours, operands, grad_output)
        for t, kept in zip(given, before, strict=True):
            assert torch.equal(bytes_of(t), kept)
        check_contract(
            answer,
            run(problem.eager, operands, grad_output),
            problem.reference64(operands, grad_output),
        )
        expected = run(problem.ours, operands, grad_output.contiguous())
        assert torch.equal(answer.dinput, expected.dinput)


@pytest.mark.parametrize("rank", [2, 3, 4, 5])
def test_case_26_the_gradient_of_a_sum(device: torch.device, rank: int) -> None:
    problem = Problem((3, 8, 5, 4, 3)[:rank], 4, activation="silu", params=())
    gradients = []
    for f in (problem.ours, problem.eager):
        leaves = problem.tensors(device).requiring_grad().as_tuple()
        f(*leaves).sum().backward()
        gradients.append([t.grad for t in leaves if t is not None])
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


# ---- values that are no numbers -------------------------------------------------------------


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("activation", "params"), [(a, p[0]) for a, p in PARAMS.items()])
def test_case_27_a_bad_value_poisons_its_own_group(
    device: torch.device,
    activation: str,
    params: tuple[float, ...],
    dtype: torch.dtype,
    value: float,
) -> None:
    for shape, layout in [
        ((3, 12), "contiguous"),
        ((2, 12, 37), "contiguous"),
        ((1, 12, 6000), "contiguous"),
        ((2, 12, 7, 9), "channels_last"),
    ]:
        problem = Problem(shape, 4, dtype, layout, activation=activation, params=params)
        operands = problem.tensors(device)
        grad_output = problem.grad_output(operands)
        clean = run(problem.ours, operands, grad_output)
        sample, channel = shape[0] - 1, 4
        operands.input[sample, channel].view(-1)[-1] = value
        got = run(problem.ours, operands, grad_output)
        hit = torch.zeros(shape, dtype=torch.bool, device=device)
        hit[sample, 3:6] = True  # the channels of its group
        for ours, before in ((got.output, clean.output), (got.dinput, clean.dinput)):
            assert ours is not None
            assert before is not None
            assert ours[hit].isnan().all()
            assert torch.equal(ours[~hit], before[~hit])
        others = [c for c in range(12) if c not in (3, 4, 5)]
        for ours, before in ((got.dweight, clean.dweight), (got.dbias, clean.dbias)):
            assert ours is not None
            assert before is not None
            assert torch.equal(ours[others], before[others])


INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["hardtanh", "silu", "sigmoid", "tanh", "gelu"])
@pytest.mark.parametrize("place", ["input", "weight", "bias", "grad_output"])
def test_case_27_every_nan_is_one(
    device: torch.device, place: str, activation: str, dtype: torch.dtype
) -> None:
    """A NaN may have any digits: rounding to 16 bits must not carry them into its sign."""
    params = (-1, 1) if activation == "hardtanh" else ()
    problem = Problem((2, 12, 37), 4, dtype, activation=activation, params=params, wide_affine=True)

    def gives_nan(sign: int | None) -> list[Tensor]:
        operands = problem.tensors(device)
        grad_output = problem.grad_output(operands)
        found = grad_output if place == "grad_output" else getattr(operands, place)
        found.view(-1)[3:9] = NAN
        if sign is not None:  # all digits are ones
            bits = found.view(INTEGERS[found.element_size()]).view(-1)
            bits[3:9] = -1 if sign < 0 else torch.iinfo(bits.dtype).max
        answer = run(problem.ours, operands, grad_output)
        return [t.isnan() for t in vars(answer).values() if t is not None]

    usual = gives_nan(None)
    assert any(t.any() for t in usual)
    for sign in (-1, 1):
        torch.testing.assert_close(gives_nan(sign), usual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", OUR_BOUNDS)
def test_case_27_the_gradient_at_nan_at_every_length(
    device: torch.device, activation: str, dtype: torch.dtype
) -> None:
    """A NaN bias makes z NaN and leaves x_hat a number, so every gradient shows the rule."""
    passes = activation not in ("clamp", "open_clamp")
    for length in range(1, 41):
        for shape in ((2, 2, length), (2, 2 * length)):
            channels = shape[1]
            bad = list(range(channels // 2))
            x = torch.randn(shape, device=device).to(dtype)
            weight = torch.zeros(channels, device=device, dtype=dtype)
            bias = torch.full((channels,), 0.5, device=device, dtype=dtype)
            bias[bad] = NAN
            leaves = Operands(x, weight, bias).requiring_grad().as_tuple()
            y = ops.group_norm_activation(
                leaves[0], 1, *leaves[1:], 1e-5, activation, OUR_BOUNDS[activation]
            )
            assert y[:, bad].isnan().all()
            _, dweight, dbias = torch.autograd.grad(y, leaves, torch.ones_like(y))
            count = float(2 * math.prod(shape[2:]))
            assert dbias[bad].tolist() == [count if passes else 0.0] * len(bad), length
            assert dbias[channels // 2 :].tolist() == [count] * (channels - len(bad))
            assert dweight.isfinite().all()


def test_case_27_and_28_the_rules_are_those_of_the_installed_torch(device: torch.device) -> None:
    """If this fails, torch has changed its rule and activation.h must follow it."""

    def slopes(f: Callable[[Tensor], Tensor], *values: float) -> list[float]:
        z = torch.tensor(values, device=device, dtype=torch.float32, requires_grad=True)
        return torch.autograd.grad(f(z).sum(), z)[0].tolist()

    clamp = {"clamp": [1, 1, 1, 0, 0], "open_clamp": [0, 1, 0, 0, 0]}[str(clamp_activation())]
    assert slopes(lambda z: torch.clamp(z, -1, 1), -1, 0, 1, 2, NAN) == clamp
    assert slopes(lambda z: F.hardtanh(z, -1, 1), -1, 0, 1, 2) == [0, 1, 0, 0]
    assert slopes(F.relu6, 0, 3, 6, 7) == [0, 1, 0, 0]
    assert slopes(F.relu, -1, 0, 1, NAN) == [0, 0, 1, 1]
    assert slopes(F.hardswish, -3, 3, 4, NAN) == [0, 1, 1, 1]
    assert slopes(lambda z: F.leaky_relu(z, 0.25), -1, 0, 1, NAN) == [0.25, 0.25, 1, 0.25]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("activation", "params", "bound", "passes"), [
    ("hardtanh", (-1.0, 1.0), -1.0, False),
    ("hardtanh", (-1.0, 1.0), 1.0, False),
    ("hardtanh", (-0.1, 0.1), 0.1, False),  # no float16 number: rounded first
    ("hardtanh", (0.5, 0.5), 0.5, False),
    ("clamp", (-1.0, 1.0), -1.0, True),
    ("clamp", (-1.0, 1.0), 1.0, True),
    ("clamp", (-INF, 1.0), 1.0, True),
    ("clamp", (-0.1, 0.1), -0.1, True),
    ("clamp", (0.5, 0.5), 0.5, True),
    ("open_clamp", (-1.0, 1.0), -1.0, False),
    ("open_clamp", (-1.0, 1.0), 1.0, False),
    ("open_clamp", (0.5, 0.5), 0.5, False),
    ("relu", (), 0.0, False),
    ("relu6", (), 0.0, False),
    ("relu6", (), 6.0, False),
])  # fmt: skip
def test_case_28_exactly_on_a_bound(
    device: torch.device,
    activation: str,
    params: tuple[float, ...],
    bound: float,
    passes: bool,
    dtype: torch.dtype,
) -> None:
    for shape, layout in [
        ((3, 12), "contiguous"),
        ((2, 12, 1), "contiguous"),
        ((2, 12, 37), "contiguous"),
        ((2, 12, 5, 7), "channels_last"),
    ]:
        x = lay_out(torch.randn(shape, device=device).to(dtype), layout)
        weight = torch.zeros(12, device=device, dtype=dtype)
        bias = torch.full((12,), bound, device=device, dtype=dtype)
        leaves = Operands(x, weight, bias).requiring_grad().as_tuple()
        y = ops.group_norm_activation(leaves[0], 4, *leaves[1:], 1e-5, activation, params)
        assert torch.equal(y, torch.full_like(y, bound))
        dinput, _, dbias = torch.autograd.grad(y, leaves, torch.ones_like(y))
        assert not dinput.any()
        count = float(shape[0] * math.prod(shape[2:]))
        assert dbias.tolist() == [count if passes else 0.0] * 12


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("activation", "params", "kink", "slope"), [
    ("hardswish", (), -3.0, 0.0),
    ("hardswish", (), 3.0, 1.0),
    ("hardswish", (), NAN, 1.0),
    ("leaky_relu", (0.25,), 0.0, 0.25),
    ("leaky_relu", (0.25,), NAN, 0.25),
    ("leaky_relu", (-0.5,), 0.0, -0.5),
])  # fmt: skip
def test_case_28_exactly_on_a_kink(
    device: torch.device,
    activation: str,
    params: tuple[float, ...],
    kink: float,
    slope: float,
    dtype: torch.dtype,
) -> None:
    for shape, layout in [
        ((3, 12), "contiguous"),
        ((2, 12, 37), "contiguous"),
        ((2, 12, 5, 7), "channels_last"),
    ]:
        x = lay_out(torch.randn(shape, device=device).to(dtype), layout)
        weight = torch.zeros(12, device=device, dtype=dtype)
        bias = torch.full((12,), kink, device=device, dtype=dtype)
        leaves = Operands(x, weight, bias).requiring_grad().as_tuple()
        y = ops.group_norm_activation(leaves[0], 4, *leaves[1:], 1e-5, activation, params)
        expected = ops.ACTIVATIONS[activation](torch.full_like(y, kink), *params)
        torch.testing.assert_close(y, expected, equal_nan=True)
        (dbias,) = torch.autograd.grad(y, leaves[2:], torch.ones_like(y))
        assert dbias.tolist() == [slope * shape[0] * math.prod(shape[2:])] * 12


# ---- every number ---------------------------------------------------------------------------

EXACT = {  # float64 formulas that lose nothing where the result is small
    "silu": lambda z: z * torch.special.expit(z),
    "sigmoid": torch.special.expit,
    "tanh": torch.tanh,
    "gelu": lambda z: z * torch.special.erfc(-z * math.sqrt(0.5)) / 2,
    "gelu_tanh": lambda z: (
        z * torch.special.expit(math.sqrt(8 / math.pi) * (z + 0.044715 * z.pow(3)))
    ),
}


def activate(activation: str, z: Tensor, params: tuple[float, ...] = ()) -> tuple[Tensor, Tensor]:
    """The activation at these very values, and its slope there, by way of the bias."""
    bias = z.clone().requires_grad_()
    x = torch.randn(1, len(z), device=z.device, dtype=z.dtype)
    y = ops.group_norm_activation(x, 1, torch.zeros_like(z), bias, 1e-5, activation, params)
    (slope,) = torch.autograd.grad(y, bias, torch.ones_like(y))
    return y[0].detach(), slope


@pytest.mark.parametrize("activation", SMOOTH)
def test_smooth_activations_are_exact_for_every_size_of_number(
    device: torch.device, activation: str
) -> None:
    """In float32, against float64."""
    small = torch.logspace(-37, 0, 3000)
    z = torch.cat([small, -small, torch.linspace(-14, 14, 20_011), torch.linspace(-1.01, 1, 999)])
    got, slope = (t.cpu().double() for t in activate(activation, z.to(device)))
    leaf = z.double().requires_grad_()
    want = EXACT[activation](leaf)
    (want_slope,) = torch.autograd.grad(want.sum(), leaf)
    want = want.detach()
    normal = want.abs() > 1e-37
    assert normal.sum() > 20_000
    # An exponent that was rounded is wrong by half an ulp of itself.
    exponent = {"gelu_tanh": z.double().abs() ** 3 / 10 + 2 * z.abs(), "gelu": z.double() ** 2 / 2}
    allowed = (8 + 2 * exponent.get(activation, torch.zeros_like(z))) * want.abs()
    if activation == "gelu" and device.type == "cpu":  # has no exponent; 1 - Phi is subtracted
        allowed = 8 * torch.where(z < 0, z.double().abs(), want)
    assert ((got - want).abs() <= 2.0**-24 * allowed)[normal].all()
    assert ((got - want).abs() < 1e-37)[~normal].all()
    assert (slope - want_slope).abs().max() < 4 * 2.0**-23
    if activation in ("sigmoid", "tanh"):  # 1 - s and 1 - t^2 are not subtracted
        exact = torch.cosh(z.double() / (2 if activation == "sigmoid" else 1)).pow(-2)
        exact /= 4 if activation == "sigmoid" else 1
        assert ((slope - exact).abs() <= 8 * 2.0**-24 * exact)[exact > 1e-37].all()


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("activation", SMOOTH)
def test_smooth_activations_in_16_bits_have_no_error_but_the_rounding(
    device: torch.device, activation: str, dtype: torch.dtype
) -> None:
    """For every number of the type; each is computed in float32 with fewer than its digits."""
    z = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    z = z[z.abs() < 1e4]
    got, slope = (t.cpu().double() for t in activate(activation, z.to(device)))
    leaf = z.double().requires_grad_()
    want = EXACT[activation](leaf)
    (want_slope,) = torch.autograd.grad(want.sum(), leaf)
    info = torch.finfo(dtype)

    def ulp(size: Tensor) -> Tensor:
        return info.eps * size.clamp(min=info.smallest_normal).log2().floor().exp2()

    # The tails of the normal distribution are 1 - Phi on the CPU; what is all but 0 may be 0.
    tail = 2.0**-21 if activation == "gelu" and device.type == "cpu" else 0
    allowed = 0.52 * ulp(want.detach().abs()) + tail * z.double().abs() + 2.0**-119
    assert ((got - want.detach()).abs() <= allowed).all()
    defined = want_slope.isfinite()
    assert ((slope - want_slope).abs() <= 0.52 * ulp(want_slope.abs()) + 2.0**-17)[defined].all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("activation", [*SMOOTH, "hardswish", "leaky_relu"])
def test_activations_of_huge_numbers(
    device: torch.device, activation: str, dtype: torch.dtype
) -> None:
    params = PARAMS[activation][0]
    huge = torch.logspace(2, 37, 100, device=device, dtype=dtype)
    z = torch.cat([huge, -huge])
    y, slope = activate(activation, z, params)
    theirs = ops.ACTIVATIONS[activation](z, *params)
    torch.testing.assert_close(y, theirs)
    left, right = 0.0, 1.0
    if activation in ("sigmoid", "tanh"):
        right = 0.0
    elif activation == "leaky_relu":
        left = params[0]
    expected = torch.where(z > 0, right, left).to(dtype)
    torch.testing.assert_close(slope, expected)
    # At infinity: the limit, or NaN where eager's formula has no limit.
    ends = torch.tensor([INF, -INF], device=device, dtype=dtype)
    y, _ = activate(activation, ends, params)
    limits = {"sigmoid": [1, 0], "tanh": [1, -1], "leaky_relu": [INF, -INF]}
    expected = ends.new_tensor(limits.get(activation, [INF, NAN]))
    torch.testing.assert_close(y, expected, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_slope_of_leaky_relu_is_rounded_to_float32_at_most(
    device: torch.device, dtype: torch.dtype
) -> None:
    z = -torch.linspace(0.5, 200, 1000, device=device).to(dtype)
    for slope in (0.01, 0.1, -0.3, INF):
        y, gradient = activate("leaky_relu", z, (slope,))
        assert torch.equal(y, F.leaky_relu(z, slope))
        factor = torch.tensor(slope, dtype=torch.float64).to(
            torch.float64 if dtype == torch.float64 else torch.float32
        )
        assert torch.equal(gradient, factor.to(device, dtype).expand(1000))
    assert activate("leaky_relu", z, (NAN,))[0].isnan().all()
    with pytest.raises(RuntimeError, match="overflow"):
        activate("leaky_relu", z.float(), (1e300,))


# ---- bounds ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("activation", "params"), [
    ("hardtanh", (-INF, INF)),
    ("hardtanh", (-INF, 0.3)),
    ("hardtanh", (0.25, INF)),
    ("hardtanh", (INF, INF)),
    ("hardtanh", (0.5, 0.5)),
    ("hardtanh", (-0.1, 0.1)),
    ("hardtanh", (-1e30, 1e30)),
    ("hardtanh", (-6e4, 7e4)),
    ("clamp", (-INF, INF)),
    ("clamp", (-INF, -INF)),
    ("clamp", (1.0, -1.0)),
    ("clamp", (INF, -INF)),
    ("clamp", (0.1, 0.1)),
    ("clamp", (-1e30, 0.0)),
    ("clamp", (-1e300, 1e300)),
])  # fmt: skip
def test_case_29_bounds(
    device: torch.device, activation: str, params: tuple[float, ...], dtype: torch.dtype
) -> None:
    for shape in ((4, 6), (2, 6, 33)):
        problem = Problem(shape, 2, dtype, activation=activation, params=params)
        operands = problem.tensors(device)
        try:
            theirs = problem.eager(*operands.as_tuple())
        except RuntimeError:  # a bound that the dtype cannot hold
            with pytest.raises(RuntimeError):
                problem.ours(*operands.as_tuple())
            continue
        problem.check(device)
        # A value that was cut is the very number that eager cuts it to.
        ours = problem.ours(*operands.as_tuple())
        low, high = problem.reference64(operands).kinks
        if theirs.min() == low:
            assert ours.min() == low
        if theirs.max() == high:
            assert ours.max() == high


@pytest.mark.parametrize("bound", [1e30, 70_000.0])
def test_case_29_a_bound_beyond_float16_raises_on_the_cpu_as_eager(bound: float) -> None:
    x = torch.randn(4, 6).half()
    with pytest.raises(RuntimeError, match="overflow"):
        F.hardtanh(x, -bound, bound)
    for activation in ("hardtanh", "clamp"):
        with pytest.raises(RuntimeError, match="overflow"):
            ops.group_norm_activation(x, 2, None, None, 1e-5, activation, (-bound, bound))


def test_case_29_min_above_max_through_each_entry(device: torch.device) -> None:
    x = torch.randn(4, 6, device=device)
    with pytest.raises(ValueError, match="min_val"):
        F.hardtanh(x, 1, -1)
    with pytest.raises(RuntimeError, match="expected min_val <= max_val, got"):
        ops.group_norm_activation(x, 2, None, None, 1e-5, "hardtanh", (1, -1))
    y = ops.group_norm_activation(x, 2, None, None, 1e-5, "clamp", (1, -1))
    assert torch.equal(y, torch.full_like(y, -1))
    assert torch.equal(y, torch.clamp(torch.group_norm(x, 2), 1, -1))


# ---- dtypes and autocast --------------------------------------------------------------------


@contextlib.contextmanager
def autocast(kind: str | None) -> Iterator[None]:
    if kind is None:
        yield
        return
    device_type, dtype = kind.split()
    with torch.autocast(device_type, getattr(torch, dtype)):
        yield


AUTOCASTS = [
    None,
    "cpu bfloat16",
    *(["cuda float16", "cuda bfloat16"] if torch.cuda.is_available() else []),
]


@pytest.mark.parametrize("kind", AUTOCASTS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_case_30_dtypes_and_autocast_as_eager(
    device: torch.device, dtype: torch.dtype, kind: str | None
) -> None:
    def outcome(f: Callable[..., Tensor], operands: Operands) -> tuple[str, Any]:
        leaves = operands.requiring_grad().as_tuple()
        try:
            with autocast(kind):
                y = f(*leaves)
        except RuntimeError:
            return "raises", None
        given = [t for t in leaves if t is not None]
        return "gives", [y.detach(), *torch.autograd.grad(y, given, torch.ones_like(y))]

    base = Problem((3, 8, 5), 4, torch.float64, params=(-1.5, 0.5)).tensors(device)
    raised = 0
    for weight_dtype, bias_dtype in itertools.product([None, *DTYPES], repeat=2):

        def cast(t: Tensor | None, to: torch.dtype | None) -> Tensor | None:
            return None if t is None or to is None else t.to(to)

        operands = Operands(
            base.input.to(dtype), cast(base.weight, weight_dtype), cast(base.bias, bias_dtype)
        )
        where = f"{dtype}, weight {weight_dtype}, bias {bias_dtype}, autocast {kind}"
        problem = Problem((3, 8, 5), 4, params=(-1.5, 0.5))
        ours, theirs = outcome(problem.ours, operands), outcome(problem.eager, operands)
        assert ours[0] == theirs[0], f"{where}: ours {ours[0]}, eager {theirs[0]}"
        raised += ours[0] == "raises"
        for got, want in zip(ours[1] or [], theirs[1] or [], strict=True):
            assert got.dtype == want.dtype, where
            low = torch.finfo(want.dtype).eps if want.dtype in HALF_DTYPES else 1e-5
            torch.testing.assert_close(
                got, want, rtol=4 * low, atol=16 * low, msg=f"{where}: ours {got}, eager {want}"
            )
    assert 0 < raised < 25  # both outcomes were seen


# ---- every way of the CUDA kernels ----------------------------------------------------------


@pytest.mark.parametrize("layout", ["contiguous", "offset"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", FORWARD)
def test_forward_in_every_way(
    device: torch.device, way: str, dtype: torch.dtype, layout: str
) -> None:
    shape, num_groups = FORWARD[way]
    if device.type == "cpu" and math.prod(shape) > 100_000:
        pytest.skip("no way of its own on a CPU")
    Problem(shape, num_groups, dtype, layout, activation="silu", params=()).check(
        device, backward=False
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", CHANNELS_LAST)
def test_channels_last_in_every_way(device: torch.device, way: str, dtype: torch.dtype) -> None:
    shape, num_groups = CHANNELS_LAST[way]
    if math.prod(shape) > 2**20 and (
        device.type == "cpu" or dtype in (torch.float64, torch.float16)
    ):
        pytest.skip("float32 and bfloat16 on a GPU are enough of this size")
    for activation, mean, has_weight in [("silu", 0.0, True), ("hardtanh", 1e3, False)]:
        problem = Problem(
            shape,
            num_groups,
            dtype,
            "channels_last",
            has_weight=has_weight,
            activation=activation,
            params=PARAMS[activation][0],
            mean=mean,
            grad_layout="channels_last",
        )
        problem.check(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", CHANNELS_LAST)
def test_channels_last_in_every_way_with_a_constant_and_a_nan(
    device: torch.device, way: str, dtype: torch.dtype
) -> None:
    shape, num_groups = CHANNELS_LAST[way]
    x = torch.randn(shape, device=device).to(dtype, memory_format=torch.channels_last)
    groups = x.unflatten(1, (num_groups, -1))
    groups[-1, 0] = 1234.567
    groups[0, -1, -1, -1, -1] = NAN

    def normalized() -> Tensor:
        y = ops.group_norm_activation(x, num_groups, None, None, 1e-12, "identity", ())
        return y.unflatten(1, (num_groups, -1))

    y = normalized()
    assert y[0, -1].isnan().all()
    hit = torch.zeros(y.shape[:2], dtype=torch.bool, device=device)
    hit[0, -1] = True
    assert y[~hit].isfinite().all()
    if (shape[0], num_groups) != (1, 1):
        assert (y[-1, 0] == 0).all()
    assert torch.equal(y[~hit], normalized()[~hit])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_channels_last_larger_than_the_chips_shared_memory(
    device: torch.device, dtype: torch.dtype
) -> None:
    if device.type == "cpu":
        pytest.skip("the CPU has one way")
    shape, num_groups = CHANNELS_LAST_LARGE
    problem = Problem(shape, num_groups, dtype, "channels_last", mean=10.0, seed=1)
    problem.check(device, backward=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", BACKWARD)
def test_backward_in_every_way(device: torch.device, way: str, dtype: torch.dtype) -> None:
    if device.type == "cpu":
        pytest.skip("chosen for the GPU")
    shape, num_groups, layout = BACKWARD[way]
    for activation, has_weight, has_bias in (
        ("hardtanh", True, True),
        ("silu", True, False),
        ("relu", False, True),
    ):
        Problem(
            shape,
            num_groups,
            dtype,
            layout,
            has_weight=has_weight,
            has_bias=has_bias,
            activation=activation,
            params=(-1, 1) if activation == "hardtanh" else (),
            grad_layout=layout,
        ).check(device)


# ---- sizes beyond 32 bits -------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "channels", "num_groups"), [
    (70_000, 12, 4),
    (70_000, 3, 3),
    (3_000_000, 2, 1),
    (3_000_000, 1, 1),
])  # fmt: skip
def test_case_31_a_large_batch(
    device: torch.device, batch: int, channels: int, num_groups: int
) -> None:
    problem = Problem((batch, channels), num_groups)
    problem.check(device)


@pytest.mark.huge
@pytest.mark.parametrize("elements", [2**31, 2**31 + 512])
@pytest.mark.parametrize(("shape", "num_groups", "layout", "dim"), [
    ((1, 512), 16, "contiguous", 0),
    ((1, 16, 32), 4, "contiguous", 0),
    ((1, 16, 4, 8), 4, "channels_last", 0),
    ((1, 2, 256), 1, "contiguous", 2),
    ((1, 2, 1, 256), 1, "channels_last", 3),
])  # fmt: skip
def test_case_31_more_elements_than_32_bits_count(
    device: torch.device,
    shape: tuple[int, ...],
    num_groups: int,
    layout: str,
    dim: int,
    elements: int,
) -> None:
    """A small problem over and over: along the batch, or along a group, where it changes no mean.

    So the small one's reference is the big one's.
    """
    if device.type == "cpu":
        pytest.skip("takes minutes on a CPU")
    if torch.cuda.mem_get_info(device)[0] < 30e9:
        pytest.skip("needs 30 GB of GPU memory")
    small = Problem(shape, num_groups, torch.bfloat16, layout)
    operands = small.tensors(device)
    grad_output = small.grad_output(operands)
    want = small.reference64(operands, grad_output)
    theirs = run(small.eager, operands, grad_output)
    count = elements // math.prod(shape)

    def many(t: Tensor) -> Tensor:
        repeated = t.repeat([count if d == dim else 1 for d in range(t.dim())])
        return lay_out(repeated, "channels_last") if layout == "channels_last" else repeated

    def one(t: Tensor | None) -> Tensor:
        """The first period, after a look at whether all of them are the same."""
        assert t is not None
        assert t.numel() == elements
        periods = t.unflatten(dim, (count, shape[dim]))
        first = periods.narrow(dim, 0, 1)
        step = 2**27 // math.prod(shape)
        for start in range(0, count, step):
            assert (periods.narrow(dim, start, min(step, count - start)) == first).all()
        return first.squeeze(dim)

    got = run(
        small.ours, dataclasses.replace(operands, input=many(operands.input)), many(grad_output)
    )
    check_contract(
        Answer(one(got.output), one(got.dinput)), Answer(theirs.output, theirs.dinput), want
    )
    for name, gradient in (("dweight", got.dweight), ("dbias", got.dbias)):
        value, scale = want.gradients[name]
        assert gradient is not None
        error = abs(gradient.double().cpu().numpy() - count * value).max()
        assert error <= 2**-7 * count * scale  # 4 ulp of bfloat16
