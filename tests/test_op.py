"""The operator against the contract, and what torch's own machinery asks of an operator."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import math
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from hypothesis import example, given
from problems import (
    DTYPES,
    PARAMS,
    Answer,
    Operands,
    Problem,
    check_contract,
    checked,
    eager,
    lay_out,
    problems,
    reference,
    run,
)
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fxfuse import library, ops

ACTIVATIONS = [(name, params[0]) for name, params in PARAMS.items()]


@pytest.fixture(scope="module", autouse=True)
def _library() -> None:
    assert library.load(), library.failure()


# ---- the contract ---------------------------------------------------------------------------


@checked
@given(problem=problems())
def test_forward_keeps_the_contract(device: torch.device, problem: Problem) -> None:
    problem.check(device, backward=False)


@checked
@given(problem=problems())
@example(
    problem=Problem(  # twice the error of z, which has 4 ulp
        (1, 12824),
        8,
        torch.float64,
        has_weight=False,
        has_bias=False,
        activation="leaky_relu",
        params=(2.0,),
        eps=0.001,
        seed=1,
    )
)
def test_backward_keeps_the_contract(device: torch.device, problem: Problem) -> None:
    problem.check(device)


@checked
@given(problem=problems(max_size=1 << 10))
def test_result_has_the_dtype_shape_and_strides_of_eager(
    device: torch.device, problem: Problem
) -> None:
    operands = problem.tensors(device)
    output = problem.ours(*operands.as_tuple())
    # On CUDA a channels_last result is the documented exception: there as eager on the CPU.
    expected = problem.eager(*problem.tensors("cpu").as_tuple())
    assert output.dtype == expected.dtype
    assert output.shape == expected.shape
    assert output.stride() == expected.stride()
    assert output.device == operands.input.device


class TestChecker:
    """The checker finds what it is there to find."""

    problem = Problem(shape=(3, 8, 6), num_groups=4, params=(-2, 2))

    def answers(self) -> tuple[Operands, Tensor, Answer, Any]:
        operands = self.problem.tensors()
        grad_output = self.problem.grad_output(operands)
        reference = self.problem.reference64(operands, grad_output)
        answer = run(self.problem.eager, operands, grad_output)
        return operands, grad_output, answer, reference

    @pytest.mark.parametrize("name", ["output", "dinput", "dweight", "dbias"])
    @pytest.mark.parametrize("wrong", [1e-4, math.nan, math.inf])
    def test_it_rejects_one_wrong_value(self, name: str, wrong: float) -> None:
        *_, answer, reference = self.answers()
        check_contract(answer, answer, reference)
        spoilt = copy.deepcopy(answer)
        getattr(spoilt, name).view(-1)[-1] += wrong
        with pytest.raises(AssertionError, match=name):
            check_contract(spoilt, answer, reference)

    def test_the_error_of_one_group_does_not_excuse_another(self) -> None:
        *_, answer, reference = self.answers()
        bad_eager, bad_ours = copy.deepcopy(answer), copy.deepcopy(answer)
        bad_eager.output[0, 0, 0] += 1
        bad_ours.output[1, 0, 0] += 1e-3
        with pytest.raises(AssertionError, match="output"):
            check_contract(bad_ours, bad_eager, reference)

    @pytest.mark.parametrize("activation", PARAMS)
    def test_the_reference_differentiates_its_own_formula(self, activation: str) -> None:
        """Against central differences of its output, so that no torch formula is trusted."""
        problem = smooth_problem(activation)
        operands = problem.tensors()
        grad_output = torch.randn(2, 4, 3, dtype=torch.float64)
        gradients = problem.reference64(operands, grad_output).gradients
        for name, tensor in zip(["dinput", "dweight", "dbias"], operands.as_tuple(), strict=True):
            assert tensor is not None
            flat, found = tensor.view(-1), gradients[name][0].reshape(-1)
            for i in range(flat.numel()):
                ends = []
                for step in (1e-5, -1e-5):
                    kept = flat[i].item()
                    flat[i] += step
                    ends.append((problem.reference64(operands).output * grad_output.numpy()).sum())
                    flat[i] = kept
                assert abs((ends[0] - ends[1]) / 2e-5 - found[i]) < 1e-7


@pytest.mark.parametrize("output_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtype_is_the_dtype_of_the_result(
    device: torch.device, dtype: torch.dtype, output_dtype: torch.dtype
) -> None:
    problem = Problem((3, 12, 7, 5), 4, dtype)
    operands = problem.tensors(device)
    grad = torch.zeros(3, 12, 7, 5, device=device, dtype=output_dtype)
    find = reference(operands, 4, 1e-5, "hardtanh", (-1, 1), grad, output_dtype)
    grad.normal_()[torch.from_numpy(find.near_a_kink()).to(device)] = 0

    def ours(x: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
        return ops.group_norm_activation(x, 4, w, b, 1e-5, "hardtanh", (-1, 1), dtype=output_dtype)

    def theirs(x: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
        return ops.reference(x, 4, w, b, 1e-5, "hardtanh", (-1, 1), output_dtype)

    check_contract(
        run(ours, operands, grad),
        run(theirs, operands, grad),
        reference(operands, 4, 1e-5, "hardtanh", (-1, 1), grad, output_dtype),
    )


# ---- strides --------------------------------------------------------------------------------

STRIDED: list[tuple[str, Callable[[], Tensor]]] = [
    *(
        (f"rank {rank} {layout}", lambda rank=rank, layout=layout: lay_out(
            torch.randn(2, 6, 3, 5, 4)[(..., *[0] * (5 - rank))], layout
        ))
        for rank in (2, 3, 4, 5)
        for layout in ("contiguous", "sliced", "narrowed", "transposed", "expanded", "offset")
    ),
    *(
        (f"channels_last {shape}", lambda shape=shape: lay_out(torch.randn(shape), "channels_last"))
        for shape in itertools.chain(
            itertools.product((1, 2), (1, 2, 6), (1, 3), (1, 4)),
            itertools.product((1, 2), (1, 6), (1, 3), (1, 2), (1, 4)),
        )
    ),
    *(
        (f"contiguous {shape}", lambda shape=shape: torch.randn(shape))
        for shape in itertools.product((1, 2), (1, 6), (1, 3), (1, 4))
    ),
    ("channels_last, a slice of channels", lambda: lay_out(
        torch.randn(2, 8, 3, 4), "channels_last")[:, :6]),
    ("channels_last, a slice of pixels", lambda: lay_out(
        torch.randn(2, 6, 3, 4), "channels_last")[..., :3]),
    ("channels_last, one sample", lambda: lay_out(torch.randn(2, 6, 3, 4), "channels_last")[1:]),
]  # fmt: skip


@pytest.mark.parametrize(("activation", "params"), ACTIVATIONS)
@pytest.mark.parametrize("make", [m for _, m in STRIDED], ids=[name for name, _ in STRIDED])
def test_case_33_strides_of_real_fake_and_eager_agree(
    device: torch.device, make: Callable[[], Tensor], activation: str, params: tuple[float, ...]
) -> None:
    on_cpu = make()
    # The same strides on the device, whatever they are.
    storage = torch.zeros(on_cpu.untyped_storage().nbytes() // 4, device=device)
    x = storage.as_strided(on_cpu.size(), on_cpu.stride(), on_cpu.storage_offset())
    args = (x, 1, None, None, 1e-5, activation, params)

    output, mean, rstd = torch.ops.fxfuse.group_norm_activation_forward(*args)
    real = ops.group_norm_activation(*args, verify_batch_size=False)
    # On CUDA eager loses channels_last, we do not: the CPU is the example for both.
    expected = eager(on_cpu, 1, None, None, 1e-5, activation, params)
    assert real.stride() == output.stride() == expected.stride()

    grad = torch.ones_like(real)
    backward_args = (grad, x, mean, rstd, *args[1:], [True, False, False])
    dinput = torch.ops.fxfuse.group_norm_activation_backward(*backward_args)[0]
    with FakeTensorMode() as mode:

        def fake(values: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(mode.from_tensor(v) if isinstance(v, Tensor) else v for v in values)

        fakes = torch.ops.fxfuse.group_norm_activation_forward(*fake(args))
        for got, want in zip(fakes, (output, mean, rstd), strict=True):
            assert (got.shape, got.stride(), got.dtype, got.device) == (
                want.shape,
                want.stride(),
                want.dtype,
                want.device,
            )
        assert torch.ops.fxfuse.group_norm_activation(*fake(args)).stride() == real.stride()
        faked = torch.ops.fxfuse.group_norm_activation_backward(*fake(backward_args))[0]
        assert faked.stride() == dinput.stride()

    kept = ops.group_norm_activation(*args, channels_last="eager", verify_batch_size=False)
    theirs = eager(x, 1, None, None, 1e-5, activation, params)
    assert kept.stride() == theirs.stride()


# ---- errors ---------------------------------------------------------------------------------

PUBLIC = "group_norm_activation"  # what a user called, whichever operator found the mistake

BAD_ARGUMENTS: dict[str, tuple[Callable[[torch.device], dict[str, Any]], str]] = {
    "num_groups 0": (lambda d: {"num_groups": 0}, "num_groups of 1 or more, got 0"),
    "num_groups -1": (lambda d: {"num_groups": -1}, "num_groups of 1 or more, got -1"),
    "num_groups not dividing": (lambda d: {"num_groups": 4}, "num_groups to divide .* 6, got 4"),
    "num_groups too many": (lambda d: {"num_groups": 12}, "num_groups to divide .* 6, got 12"),
    "short weight": (lambda d: {"weight": torch.ones(5, device=d)}, r"weight of shape \[6\], got"),
    "long bias": (lambda d: {"bias": torch.ones(7, device=d)}, r"bias of shape \[6\], got \[7\]"),
    "weight of rank 2": (lambda d: {"weight": torch.ones(6, 1, device=d)}, r"got \[6, 1\]"),
    "rank 1": (lambda d: {"input": torch.ones(6, device=d)}, "2 or more dimensions, got 1"),
    "rank 0": (lambda d: {"input": torch.ones((), device=d)}, "2 or more dimensions, got 0"),
    "integer input": (
        lambda d: {"input": torch.ones(2, 6, 4, device=d, dtype=torch.int64)},
        "a floating-point input, got",
    ),
    "complex input": (
        lambda d: {"input": torch.ones(2, 6, 4, device=d, dtype=torch.complex64)},
        "a floating-point input, got",
    ),
    "integer dtype": (lambda d: {"dtype": torch.int32}, "a floating-point dtype, got"),
    "weight elsewhere": (
        lambda d: {"weight": torch.ones(6, device="cpu" if d.type != "cpu" else "meta")},
        "weight on .*, got",
    ),
    "weight of float64": (
        lambda d: {"weight": torch.ones(6, device=d, dtype=torch.float64)},
        "weight of dtype Float, got Double",
    ),
    "bias of float16": (
        lambda d: {"bias": torch.ones(6, device=d, dtype=torch.float16)},
        "bias of dtype Float, got Half",
    ),
    "unknown activation": (
        lambda d: {"activation": "softmax", "params": ()},
        "activation to be one of identity, hardtanh, .*, got softmax",
    ),
    "NaN bound": (lambda d: {"params": (math.nan, 1.0)}, "bounds that are numbers, got nan"),
    "min_val > max_val": (lambda d: {"params": (1.0, -1.0)}, "min_val <= max_val, got"),
    "one bound": (lambda d: {"params": (1.0,)}, "2 params for hardtanh, got 1"),
    "params for relu": (lambda d: {"activation": "relu"}, "0 params for relu, got 2"),
    "no slope": (
        lambda d: {"activation": "leaky_relu", "params": ()},
        "1 params for leaky_relu, got 0",
    ),
}


@pytest.mark.parametrize("kind", ["real", "meta", "fake"])
@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_case_32_bad_arguments_raise(device: torch.device, name: str, kind: str) -> None:
    make, message = BAD_ARGUMENTS[name]
    on = torch.device("meta") if kind == "meta" else device
    context = FakeTensorMode() if kind == "fake" else contextlib.nullcontext()
    with context:
        arguments = {
            "input": torch.ones(2, 6, 4, device=on),
            "num_groups": 2,
            "weight": torch.ones(6, device=on),
            "bias": torch.ones(6, device=on),
            "eps": 1e-5,
            "activation": "hardtanh",
            "params": (-1.0, 1.0),
        }
        bad = make(on)
        for op in ("group_norm_activation", "group_norm_activation_forward"):
            getattr(torch.ops.fxfuse, op)(**arguments)
            with pytest.raises(
                RuntimeError, match=rf"fxfuse\.{PUBLIC}(_forward)?: expected .*{message}"
            ):
                getattr(torch.ops.fxfuse, op)(**(arguments | bad))
        with pytest.raises(RuntimeError, match=rf"fxfuse\.{PUBLIC}: expected .*{message}"):
            ops.group_norm_activation(**(arguments | bad))


@pytest.mark.parametrize(
    "name",
    ["grad_output", "grad_output elsewhere", "mean", "mean of float64", "rstd", "rstd elsewhere"],
)
def test_case_32_the_backward_operator_reads_nothing_that_is_not_there(
    device: torch.device, name: str
) -> None:
    if "elsewhere" in name and device.type == "cpu":
        pytest.skip("there is no other device")
    x = torch.randn(4, 6, 8, device=device)
    grad_output, mean, rstd = torch.ops.fxfuse.group_norm_activation_forward(
        x, 2, None, None, 1e-5, "identity", ()
    )
    given = {"grad_output": grad_output, "input": x, "mean": mean, "rstd": rstd}
    bad = {
        "grad_output": grad_output[:1],
        "grad_output elsewhere": grad_output.cpu(),
        "mean": mean[:1],
        "mean of float64": mean.double(),
        "rstd": rstd[:2],
        "rstd elsewhere": rstd.cpu(),
    }
    argument = name.split()[0]
    rest = (2, None, None, 1e-5, "identity", (), [True, True, True])
    backward = torch.ops.fxfuse.group_norm_activation_backward
    backward(*given.values(), *rest)
    message = rf"fxfuse\.group_norm_activation_backward: expected {argument} .*, got"
    with pytest.raises(RuntimeError, match=message):
        backward(*(given | {argument: bad[name]}).values(), *rest)


@pytest.mark.parametrize("shape", [(1, 4), (1, 4, 1), (1, 4, 1, 1)])
def test_one_value_per_group_raises_where_eager_does(
    device: torch.device, shape: tuple[int, ...]
) -> None:
    x = torch.randn(shape, device=device)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel") as theirs:
        F.group_norm(x, 4)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel") as ours:
        ops.group_norm_activation(x, 4, activation="relu")
    assert str(ours.value) == str(theirs.value)
    y = ops.group_norm_activation(x, 4, activation="relu", verify_batch_size=False)
    assert torch.equal(y, torch.group_norm(x, 4).relu())
    # Two values in all are enough for F.group_norm, which takes the batch for part of a group.
    both = torch.cat([x, x])
    assert torch.equal(ops.group_norm_activation(both, 4), F.group_norm(both, 4))


# ---- derivatives ----------------------------------------------------------------------------


def smooth_problem(
    activation: str, layout: str = "contiguous", dtype: torch.dtype = torch.float64
) -> Problem:
    """A small problem whose z is far from every kink, as a numerical derivative needs it."""
    shape = {"channels_last": (2, 4, 2, 3)}.get(layout, (2, 4, 3))
    params: tuple[float, ...] = PARAMS[activation][0]
    problem = Problem(shape, 2, dtype, layout, activation=activation, params=params)
    if len(params) == 2:  # the bounds go into the widest gaps between the values of z
        z = problem.reference64(problem.tensors()).z.astype("float64")
        z = torch.from_numpy(z).flatten().sort().values
        gaps, half = z.diff(), z.numel() // 2
        widest = (gaps[:half].argmax(), half + gaps[half:].argmax())
        params = tuple((z[i] + gaps[i] / 2).item() for i in widest)
        problem = dataclasses.replace(problem, params=params)
    result = problem.reference64(problem.tensors())
    for kink in result.kinks:
        assert abs(result.z - kink).min() > 1e-3
    return problem


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "sliced", "transposed"])
@pytest.mark.parametrize("activation", PARAMS)
def test_gradcheck(device: torch.device, activation: str, layout: str) -> None:
    problem = smooth_problem(activation, layout)
    operands = problem.tensors(device).requiring_grad().as_tuple()
    # Forward mode is eager's, whose group_norm refuses channels_last.
    forward = layout != "channels_last"
    assert torch.autograd.gradcheck(problem.ours, operands, check_forward_ad=forward)
    assert torch.autograd.gradgradcheck(problem.ours, operands)


@pytest.mark.parametrize("activation", PARAMS)
def test_double_backward_is_eager_s(device: torch.device, activation: str) -> None:
    problem = smooth_problem(activation)

    def penalty(function: Callable[..., Tensor]) -> list[Tensor]:
        leaves = [t for t in problem.tensors(device).requiring_grad().as_tuple() if t is not None]
        output = function(*leaves)
        first = torch.autograd.grad(output.square().sum(), leaves, create_graph=True)
        norm = sum(g.square().sum() for g in first)
        assert isinstance(norm, Tensor)
        return [*first, *torch.autograd.grad(norm, leaves)]

    # torch's CUDA hardswish divides by 6 in float32, also of float64
    close = 1e-6 if activation == "hardswish" and device.type == "cuda" else 1e-9
    for ours, theirs in zip(penalty(problem.ours), penalty(problem.eager), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=close, atol=close)


@pytest.mark.parametrize("activation", PARAMS)
def test_torch_func_agrees_with_eager(device: torch.device, activation: str) -> None:
    problem = smooth_problem(activation)
    operands = problem.tensors(device).as_tuple()
    x, weight, bias = operands
    tangents = tuple(torch.randn_like(t) for t in operands if t is not None)
    cotangent = torch.randn_like(x)
    func = torch.func

    def everything(f: Callable[..., Tensor]) -> list[Any]:
        def loss(*args: Tensor) -> Tensor:
            return (f(*args) * cotangent).square().sum()

        stack = torch.stack([x, 2 * x, x - 1])
        weights = torch.stack([operands[1], operands[1] + 1, -operands[1]])  # type: ignore[operator]
        return [
            func.jvp(f, operands, tangents),
            func.jvp(lambda t: f(t, weight, bias), (x,), tangents[:1]),
            func.jvp(lambda t: f(x, weight, t), (bias,), tangents[2:]),
            func.vjp(f, *operands)[1](cotangent),
            func.grad(loss, argnums=(0, 1, 2))(*operands),
            func.vmap(lambda t: f(t, weight, bias))(stack),
            func.vmap(lambda t: f(t, weight, bias), in_dims=1, out_dims=1)(stack.movedim(0, 1)),
            func.vmap(lambda t, w: f(t, w, bias))(stack, weights),
            func.vmap(lambda t: func.grad(loss)(t, weight, bias))(stack),
            func.vmap(func.grad(loss, argnums=(0, 1)), (0, 0, None))(stack, weights, bias),
            func.jacrev(f, argnums=(0, 1, 2))(*operands),
            func.jacfwd(f, argnums=(0, 1, 2))(*operands),
            func.hessian(loss)(*operands),
            func.jacrev(func.jacrev(loss))(*operands),
            func.jvp(func.grad(loss, argnums=(0, 1, 2)), operands, tangents),
            func.grad(lambda *a: func.jvp(f, a, tangents)[1].sum())(*operands),
        ]

    torch.testing.assert_close(everything(problem.ours), everything(problem.eager))


def test_forward_mode_has_a_tangent_in_every_operand(device: torch.device) -> None:
    problem = smooth_problem("hardtanh")
    operands = problem.tensors(device).as_tuple()
    forward_ad = torch.autograd.forward_ad
    for i, with_grad in itertools.product(range(3), (False, True)):
        tangents = []
        for f in (problem.ours, problem.eager):
            with forward_ad.dual_level():
                duals = [t.detach().requires_grad_(with_grad) for t in operands if t is not None]
                duals[i] = forward_ad.make_dual(duals[i], torch.ones_like(duals[i]))
                tangents.append(forward_ad.unpack_dual(f(*duals)).tangent)
        assert tangents[0].abs().sum() > 0 or i == 0  # a shift of the input changes nothing
        torch.testing.assert_close(*tangents)


def test_the_private_pair_is_not_silently_differentiable(device: torch.device) -> None:
    x = torch.randn(2, 4, 3, device=device, requires_grad=True)
    output, *_ = torch.ops.fxfuse.group_norm_activation_forward(x, 2, None, None, 1e-5, "relu", ())
    with pytest.raises(RuntimeError, match="not implemented"):
        output.sum().backward()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x.detach(), torch.ones_like(x))
        with pytest.raises(NotImplementedError, match="forward AD"):
            torch.ops.fxfuse.group_norm_activation_forward(dual, 2, None, None, 1e-5, "relu", ())


# ---- opcheck and torch.compile --------------------------------------------------------------


@pytest.mark.parametrize(
    ("activation", "layout"),
    [
        ("identity", "channels_last"),
        ("hardtanh", "contiguous"),
        ("hardtanh", "channels_last"),
        ("clamp", "sliced"),
        ("relu", "transposed"),
        ("silu", "contiguous"),
        ("gelu", "channels_last"),
        ("leaky_relu", "contiguous"),
    ],
)
def test_opcheck(device: torch.device, activation: str, layout: str) -> None:
    problem = smooth_problem(activation, layout, torch.float32)
    operands = problem.tensors(device)
    rest = (problem.eps, activation, list(problem.params))
    leaves = operands.requiring_grad()
    for x, weight, bias in (
        operands.as_tuple(),
        leaves.as_tuple(),
        (leaves.input, operands.weight, None),
        (operands.input, None, leaves.bias),
    ):
        torch.library.opcheck(
            torch.ops.fxfuse.group_norm_activation.default, (x, 2, weight, bias, *rest)
        )
    x, weight, bias = operands.as_tuple()
    args = (x, 2, weight, bias, *rest)
    torch.library.opcheck(torch.ops.fxfuse.group_norm_activation_forward.default, args)
    output, mean, rstd = torch.ops.fxfuse.group_norm_activation_forward(*args)
    for mask in ([True, True, True], [False, False, True]):
        torch.library.opcheck(
            torch.ops.fxfuse.group_norm_activation_backward.default,
            (torch.ones_like(output), x, mean, rstd, *args[1:], mask),
        )


def test_opcheck_of_a_result_in_another_dtype(device: torch.device) -> None:
    x = torch.randn(3, 4, 5, device=device, dtype=torch.bfloat16)
    for leaf in (x.clone().requires_grad_(), x):
        args = (leaf, 2, None, None, 1e-5, "relu", [], torch.float32)
        torch.library.opcheck(torch.ops.fxfuse.group_norm_activation.default, args)
    torch.library.opcheck(torch.ops.fxfuse.group_norm_activation_forward.default, args)


@contextlib.contextmanager
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    try:
        yield
    finally:
        torch._dynamo.reset()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_compiles_without_graph_breaks(device: torch.device, layout: str, dynamic: bool) -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def f(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        y = ops.group_norm_activation(x * 2, 2, w, b, 1e-5, "hardtanh", (-1, 1))
        return y.sum(1)

    with fresh_compiler():
        compiled = torch.compile(f, fullgraph=True, backend=counter, dynamic=dynamic)
        for batch in (2, 3, 5, 7, 11) if dynamic else (2,):
            for train in (False, True):
                problem = Problem((batch, 4, 5, 3), 2, torch.float64, layout)
                answers = []
                for function in (f, compiled):
                    operands = problem.tensors(device)
                    if not train:
                        with torch.no_grad():
                            answers.append([function(*operands.as_tuple())])
                        continue
                    leaves = operands.requiring_grad().as_tuple()
                    output = function(*leaves)
                    answers.append([output, *torch.autograd.grad(output.square().sum(), leaves)])
                torch.testing.assert_close(*answers, rtol=0, atol=0)
        assert counter.frame_count == 2  # train and infer


# ---- determinism, threads, processes --------------------------------------------------------


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "num_groups", "layout"),
    [
        ((64, 512), 8, "contiguous"),
        ((2, 8, 40_000), 2, "contiguous"),
        ((300, 48, 30), 4, "contiguous"),
        ((2, 32, 50, 60), 8, "channels_last"),
        ((40, 24, 15, 15), 8, "channels_last"),
    ],
)
def test_the_same_bits_every_time_and_with_any_number_of_threads(
    device: torch.device,
    shape: tuple[int, ...],
    num_groups: int,
    layout: str,
    dtype: torch.dtype,
) -> None:
    problem = Problem(shape, num_groups, dtype, layout)
    operands = problem.tensors(device)
    grad_output = torch.randn(shape, device=device, dtype=dtype)
    answers = []
    for count in (1, 2, 2, 3):
        with threads(count):
            answers.append(run(problem.ours, operands, grad_output))
    for answer in answers[1:]:
        for name in ("output", "dinput", "dweight", "dbias"):
            assert torch.equal(getattr(answer, name), getattr(answers[0], name)), name


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no os.fork on this system")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_works_in_a_forked_process() -> None:
    """A data loader's worker is a fork of a process that has used its threads."""
    problem = Problem((64, 64, 64), 8)
    x, weight, bias = problem.tensors().as_tuple()
    args = (8, weight, bias, 1e-5, "silu", ())
    grad_output = torch.ones(problem.shape)

    def run() -> list[Tensor]:
        # By the operators themselves: torch's autograd engine does not survive a fork.
        output, mean, rstd = torch.ops.fxfuse.group_norm_activation_forward(x, *args)
        given = (grad_output, x, mean, rstd, *args, [True, True, True])
        return [output, *torch.ops.fxfuse.group_norm_activation_backward(*given)]

    before = run()
    child = os.fork()
    if child == 0:
        code = 2
        try:
            signal.alarm(60)  # a deadlock is a failure, not a hang
            torch.set_num_threads(1)  # as torch.utils.data's workers do
            code = 0 if all(map(torch.equal, before, run())) else 1
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


INSTRUCTION_SETS = {
    "default": "DEFAULT",
    "avx2": "AVX2",
    "avx512": "AVX512",
}


@pytest.mark.parametrize("capability", INSTRUCTION_SETS)
def test_every_instruction_set_keeps_the_contract(capability: str) -> None:
    best = torch.backends.cpu.get_cpu_capability()
    order = list(INSTRUCTION_SETS.values())
    if best not in order or order.index(best) < order.index(INSTRUCTION_SETS[capability]):
        pytest.skip(f"the machine has {best}")
    script = """
        import itertools, sys
        sys.path.insert(0, sys.argv[1])
        import torch
        from problems import DTYPES, PARAMS, Problem
        assert torch.backends.cpu.get_cpu_capability() == sys.argv[2]
        shapes = [
            ((37, 12), 4, "contiguous"),
            ((5, 33 * 3), 3, "contiguous"),
            ((2, 6, 3, 5), 6, "contiguous"),
            ((2, 6, 17, 31), 3, "transposed"),
            ((1, 4, 9973), 2, "contiguous"),
            ((2, 21, 13, 7), 7, "channels_last"),
            ((3, 40, 3, 5, 2), 8, "channels_last"),
        ]
        count = 0
        for (shape, groups, layout), dtype, activation in itertools.product(
            shapes, DTYPES, PARAMS
        ):
            problem = Problem(
                shape, groups, dtype, layout, activation=activation, params=PARAMS[activation][0]
            )
            problem.check("cpu")
            count += 1
        print(count)
    """
    result = subprocess.run(
        [
            sys.executable,
            "-c",
            textwrap.dedent(script),
            os.path.dirname(__file__),
            INSTRUCTION_SETS[capability],
        ],
        env=os.environ
        | {
            "ATEN_CPU_CAPABILITY": capability,
            "PYTHONPATH": os.path.dirname(os.path.dirname(ops.__file__)),
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    shapes = 7  # of the script
    assert result.stdout.split() == [str(shapes * len(DTYPES) * len(PARAMS))]


# ---- CUDA -----------------------------------------------------------------------------------

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_cuda
def test_runs_on_the_current_stream() -> None:
    problem = Problem((512, 1024), 16)
    operands = problem.tensors("cuda")
    expected = problem.ours(*operands.as_tuple())
    stream = torch.cuda.Stream()
    x = torch.zeros_like(operands.input)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # whoever does not wait for the stream reads zeros
        x.copy_(operands.input)
        output = problem.ours(x, operands.weight, operands.bias)
    stream.synchronize()
    assert torch.equal(output, expected)


@needs_cuda
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_can_be_captured_in_a_cuda_graph(layout: str) -> None:
    problem = Problem((8, 64, 28, 28), 8, layout=layout)
    leaves = problem.tensors("cuda").requiring_grad().as_tuple()
    grad_output = torch.randn(problem.shape, device="cuda")
    others = Problem((8, 64, 28, 28), 8, layout=layout, seed=1, mean=3.0).tensors("cuda")

    def step() -> list[Tensor]:
        output = problem.ours(*leaves)
        return [output, *torch.autograd.grad(output, leaves, grad_output)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for fresh in (problem.tensors("cuda"), others):
        with torch.no_grad():
            leaves[0].copy_(fresh.input)
        graph.replay()
        for got, want in zip(captured, step(), strict=True):
            assert torch.equal(got, want)


@needs_cuda
def test_does_not_synchronise() -> None:
    problem = Problem((64, 256), 8)
    leaves = problem.tensors("cuda").requiring_grad().as_tuple()
    grad_output = torch.randn(problem.shape, device="cuda")
    problem.ours(*leaves)
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.grad(problem.ours(*leaves), leaves, grad_output)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_runs_on_the_device_of_its_input() -> None:
    problem = Problem((64, 256), 8)
    with torch.cuda.device(0):
        operands = problem.tensors("cuda:1")
        output = problem.ours(*operands.as_tuple())
    assert output.device == torch.device("cuda:1")
    torch.testing.assert_close(output, problem.eager(*operands.as_tuple()))


def test_the_wrapper_is_one_call_to_a_tracer_and_to_dynamo(device: torch.device) -> None:
    def function(x: Tensor) -> Tensor:
        return ops.group_norm_activation(x, 2, activation="hardtanh", params=(-1.0, 1.0))

    traced = fx.symbolic_trace(function)
    assert [n.target for n in traced.graph.nodes if n.op == "call_function"] == [
        ops.group_norm_activation
    ]
    compiled = torch.compile(function, backend="eager", fullgraph=True, dynamic=True)
    for shape in ((3, 4), (5, 4), (3, 4, 5), (2, 6, 3, 7)):
        x = torch.randn(shape, device=device)
        assert torch.equal(traced(x), function(x))
        assert torch.equal(compiled(x), function(x))


class Functions(TorchFunctionMode):
    """Sees what is called in Python."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    """Sees which operators run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None):
        self.seen.append(str(operator))
        return operator(*args, **(kwargs or {}))


def test_what_watches_torch_sees_the_operators(device: torch.device) -> None:
    problem = Problem((3, 4, 5), 2, torch.float64)
    operands = problem.tensors(device).as_tuple()

    def gradients(*operands: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in operands]
        return torch.autograd.grad(problem.ours(*leaves).square().sum(), leaves)

    expected = gradients(*operands)
    pair = [f"fxfuse.group_norm_activation_{which}.default" for which in ("forward", "backward")]
    with Functions() as functions, Operators() as operators:
        torch.testing.assert_close(gradients(*operands), expected, rtol=0, atol=0)
    assert ops.group_norm_activation in functions.seen
    assert [name for name in operators.seen if "fxfuse" in name] == pair

    with torch.profiler.profile(record_shapes=True) as profile:
        gradients(*operands)
    shapes = {event.name: event.input_shapes for event in profile.events()}
    assert shapes["fxfuse::group_norm_activation"][:4] == [[3, 4, 5], [], [4], [4]]
    assert shapes["fxfuse::group_norm_activation_backward"][:4] == [
        [3, 4, 5],
        [3, 4, 5],
        [2, 3, 2],
        [3, 2],
    ]

    other = Problem((5, 4, 7), 2, torch.float64).tensors(device).as_tuple()
    traced = make_fx(gradients, tracing_mode="symbolic")(*operands)
    assert [str(n.target) for n in traced.graph.nodes if "fxfuse" in str(n.target)] == pair
    torch.testing.assert_close(traced(*other), gradients(*other), rtol=0, atol=0)
    pure = torch.func.functionalize(lambda x, weight, bias: problem.ours(x, weight, bias))
    functional = make_fx(pure, tracing_mode="symbolic")(*operands)
    torch.testing.assert_close(functional(*other), problem.ours(*other), rtol=1e-9, atol=1e-9)
