"""The operator that holds a Linear too, which is the two operators in turn."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from problems import (
    DTYPES,
    HALF_DTYPES,
    PARAMS,
    Answer,
    Operands,
    check_contract,
    checked,
    eager,
    lay_out,
    reference,
)
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode
from torch.utils import flop_counter

import fxfuse
from fxfuse import library, ops
from fxfuse.backend import compile_graph


@pytest.fixture(scope="module", autouse=True)
def _library() -> None:
    assert library.load(), library.failure()


# ---- problems -------------------------------------------------------------------------------


@dataclass(frozen=True)
class LinearProblem:
    """A Linear, GroupNorm and an activation over random values.

    Attributes:
        shape: Of the input; the last is in_features.
        out_features: The channels where the input has two dimensions.
        linear_bias, weight, bias: Which of these there are.
        wide_affine: float32 weight and bias beside a 16-bit input, on the CPU.
    """

    shape: tuple[int, ...]
    out_features: int
    num_groups: int
    dtype: torch.dtype = torch.float32
    layout: str = "contiguous"
    linear_bias: bool = True
    weight: bool = True
    bias: bool = True
    wide_affine: bool = False
    activation: str = "hardtanh"
    params: tuple[float, ...] = (-1, 1)
    mean: float = 0.0
    seed: int = 0

    def tensors(self, device: torch.device | str = "cpu") -> list[Tensor | None]:
        """Input, linear_weight, linear_bias, weight and bias."""
        generator = torch.Generator().manual_seed(self.seed)

        def random(*shape: int) -> Tensor:
            values = torch.randn(shape, generator=generator, dtype=torch.float64)
            return values.to(device, self.dtype)

        x = lay_out(random(*self.shape), self.layout)
        linear_weight = random(self.out_features, self.shape[-1]) / math.sqrt(self.shape[-1])
        linear_bias = self.mean + random(self.out_features)
        channels = self.out_features if len(self.shape) == 2 else self.shape[1]
        wide = self.wide_affine and torch.device(device).type == "cpu"
        affine = [random(channels) for _ in range(2)]
        if wide and self.dtype in HALF_DTYPES:
            affine = [t.float() for t in affine]
        return [
            x,
            linear_weight,
            linear_bias if self.linear_bias else None,
            affine[0] if self.weight else None,
            affine[1] if self.bias else None,
        ]

    def leaves(self, device: torch.device | str = "cpu") -> list[Tensor | None]:
        return [None if t is None else t.requires_grad_() for t in self.tensors(device)]

    def ours(self, *operands: Tensor | None) -> Tensor:
        """The operator itself, which the function leaves out where there is no kernel."""
        x, linear_weight, linear_bias, weight, bias = operands
        output: Tensor = torch.ops.fxfuse.linear_group_norm_activation(
            x,
            linear_weight,
            linear_bias,
            self.num_groups,
            weight,
            bias,
            1e-5,
            self.activation,
            self.params,
        )
        return output

    def two(self, *operands: Tensor | None) -> Tensor:
        """The two operators."""
        x, linear_weight, linear_bias, weight, bias = operands
        return ops.group_norm_activation(
            F.linear(x, linear_weight, linear_bias),
            self.num_groups,
            weight,
            bias,
            1e-5,
            self.activation,
            self.params,
            verify_batch_size=False,
        )

    def eager(self, *operands: Tensor | None) -> Tensor:
        """The three operators of torch."""
        x, linear_weight, linear_bias, weight, bias = operands
        z = F.linear(x, linear_weight, linear_bias)
        return eager(z, self.num_groups, weight, bias, 1e-5, self.activation, self.params)


@st.composite
def linear_problems(draw: st.DrawFn) -> LinearProblem:
    rank = draw(st.integers(2, 5))
    num_groups = draw(st.integers(1, 5))
    channels = num_groups * draw(st.integers(1, 40 if rank == 2 else 4))
    shape = (draw(st.integers(1, 9)), draw(st.integers(1, 70)))
    out_features = channels
    if rank > 2:
        spatial = tuple(draw(st.integers(1, 5)) for _ in range(rank - 3))
        shape = (shape[0], channels, *spatial, shape[1])
        out_features = draw(st.integers(1, 20))
    activation = draw(st.sampled_from(sorted(PARAMS)))
    flag = st.booleans()
    return LinearProblem(
        shape,
        out_features,
        num_groups,
        draw(st.sampled_from(DTYPES)),
        draw(st.sampled_from(["contiguous", "sliced", "narrowed", "transposed", "offset"])),
        draw(flag),
        draw(flag),
        draw(flag),
        draw(flag),
        activation,
        draw(st.sampled_from(PARAMS[activation])),
        draw(st.sampled_from([0.0, 100.0])),
        draw(st.integers(0, 2**16)),
    )


SMALL = LinearProblem((3, 7), 12, 3, torch.float64)


def smooth(rank: int, activation: str = "silu") -> LinearProblem:
    """In float64 and, for the bounds -30 and 30, far from every kink."""
    shape = {2: (3, 5), 3: (2, 4, 3)}[rank]
    params = {2: (-30.0, 30.0), 1: (0.3,), 0: ()}[len(PARAMS[activation][0])]
    out_features = {2: 8, 3: 5}[rank]
    return LinearProblem(
        shape, out_features, 2, torch.float64, activation=activation, params=params
    )


# ---- values, strides and gradients ----------------------------------------------------------


@checked
@given(problem=linear_problems())
def test_it_is_the_two_operators_to_the_last_bit(problem: LinearProblem) -> None:
    operands = problem.tensors()
    ours, two = problem.ours(*operands), problem.two(*operands)
    assert ours.dtype == two.dtype
    assert ours.stride() == two.stride() == problem.eager(*operands).stride()
    assert torch.equal(ours, two)

    results = []
    for function in (problem.ours, problem.two):
        leaves = problem.leaves()
        output = function(*leaves)
        given = [t for t in leaves if t is not None]
        gradients = torch.autograd.grad(output, given, torch.ones_like(output).cumsum(0))
        results.append([output, *gradients])
    assert all(map(torch.equal, *results))


@checked
@given(problem=linear_problems())
def test_it_agrees_with_the_formula_in_float64(
    device: torch.device, problem: LinearProblem
) -> None:
    problem = dataclasses.replace(problem, dtype=torch.float64)
    x, linear_weight, linear_bias, weight, bias = operands = problem.tensors(device)
    assert x is not None
    assert linear_weight is not None
    z = (x.unsqueeze(-2) * linear_weight).sum(-1)  # of no matrix product's making
    if linear_bias is not None:
        z = z + linear_bias
    rest = (problem.num_groups, 1e-5, problem.activation, problem.params)
    right = torch.from_numpy(reference(Operands(z, weight, bias), *rest).output.astype("float64"))
    torch.testing.assert_close(problem.ours(*operands).cpu(), right, rtol=1e-6, atol=1e-6)


def test_a_subset_of_operands_may_want_gradients(device: torch.device) -> None:
    for wanted in itertools.product((False, True), repeat=5):
        if not any(wanted):
            continue
        results = []
        for function in (SMALL.ours, SMALL.two):
            pairs = zip(SMALL.tensors(device), wanted, strict=True)
            operands = [t.requires_grad_(want) for t, want in pairs if t is not None]
            output = function(*operands)
            leaves = [t for t in operands if t.requires_grad]
            results.append(torch.autograd.grad(output.square().sum(), leaves))
        torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(0, 7), (3, 0), (0, 12, 7), (2, 12, 0, 7)])
def test_empty_tensors_are_as_in_the_two_operators(
    device: torch.device, shape: tuple[int, ...]
) -> None:
    problem = dataclasses.replace(SMALL, shape=shape)
    operands = problem.tensors(device)
    answers: list[Any] = []
    for function in (problem.two, problem.ours):
        try:
            answers.append(function(*operands))
        except RuntimeError:
            answers.append("raises")
    ours, two = answers[1], answers[0]
    if isinstance(two, str):
        assert ours == two
        return
    torch.testing.assert_close(ours, two, equal_nan=True)
    assert ours.stride() == two.stride()


@pytest.mark.parametrize("shape", [(1, 5), (1, 4, 5)])
def test_one_value_per_group_raises_where_eager_does(shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape), torch.randn(4 if len(shape) == 2 else 1, 5)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel") as theirs:
        F.group_norm(F.linear(x, weight), 4)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel") as ours:
        ops.linear_group_norm_activation(x, weight, None, 4)
    assert str(ours.value) == str(theirs.value)
    y = ops.linear_group_norm_activation(x, weight, None, 4, verify_batch_size=False)
    assert torch.equal(y, torch.zeros(y.shape))


# ---- errors ---------------------------------------------------------------------------------

BAD_ARGUMENTS: dict[str, tuple[dict[str, Callable[[torch.device], Any]], str]] = {
    "rank 1": ({"input": lambda d: torch.ones(7, device=d)}, "2 or more dimensions, got 1"),
    "another in_features": (
        {"input": lambda d: torch.ones(3, 6, device=d)},
        r"linear_weight of shape \[channels, 6\], got \[12, 7\]",
    ),
    "linear_weight of rank 1": (
        {"linear_weight": lambda d: torch.ones(7, device=d)},
        r"linear_weight of shape \[channels, 7\], got \[7\]",
    ),
    "short linear_bias": (
        {"linear_bias": lambda d: torch.ones(1, device=d)},
        r"linear_bias of shape \[12\], got \[1\]",
    ),
    "linear_weight of float64": (
        {"linear_weight": lambda d: torch.ones(12, 7, device=d, dtype=torch.float64)},
        "linear_weight of dtype Float on .*, got Double",
    ),
    "linear_bias elsewhere": (
        {"linear_bias": lambda d: torch.ones(12, device="cpu" if d.type != "cpu" else "meta")},
        "linear_bias of dtype Float on .*, got Float on",
    ),
    "num_groups not dividing": ({"num_groups": lambda d: 5}, "num_groups to divide .* 12, got 5"),
    "long weight": (
        {"weight": lambda d: torch.ones(13, device=d)},
        r"weight of shape \[12\], got \[13\]",
    ),
    "bias of float16": (
        {"bias": lambda d: torch.ones(12, device=d, dtype=torch.float16)},
        "bias of dtype Float, got Half",
    ),
    "NaN bound": ({"params": lambda d: (math.nan, 1.0)}, "bounds that are numbers, got nan"),
    "integer input": (
        {
            "input": lambda d: torch.ones(3, 7, device=d, dtype=torch.int64),
            "linear_weight": lambda d: torch.ones(12, 7, device=d, dtype=torch.int64),
            "linear_bias": lambda d: None,
        },
        "a floating-point input, got",
    ),
}


@pytest.mark.parametrize("kind", ["real", "meta", "fake", "with grad"])
@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_case_32_bad_arguments_raise(device: torch.device, name: str, kind: str) -> None:
    bad, message = BAD_ARGUMENTS[name]
    on = torch.device("meta") if kind == "meta" else device
    with FakeTensorMode() if kind == "fake" else contextlib.nullcontext():
        arguments: dict[str, Any] = {
            "input": torch.ones(3, 7, device=on, requires_grad=kind == "with grad"),
            "linear_weight": torch.ones(12, 7, device=on),
            "linear_bias": torch.ones(12, device=on),
            "num_groups": 3,
            "weight": torch.ones(12, device=on),
            "bias": torch.ones(12, device=on),
            "eps": 1e-5,
            "activation": "hardtanh",
            "params": (-1.0, 1.0),
        }
        torch.ops.fxfuse.linear_group_norm_activation(**arguments)
        arguments |= {key: make(on) for key, make in bad.items()}
        where = r"fxfuse\.linear_group_norm_activation: expected .*"
        with pytest.raises(RuntimeError, match=where + message):
            torch.ops.fxfuse.linear_group_norm_activation(**arguments)


# ---- derivatives ----------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("activation", PARAMS)
def test_gradcheck(device: torch.device, activation: str, rank: int) -> None:
    problem = smooth(rank, activation)
    if activation in ("relu", "relu6", "hardswish", "leaky_relu"):
        problem = dataclasses.replace(problem, seed=1)
    leaves = problem.leaves(device)
    assert torch.autograd.gradcheck(problem.ours, leaves, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(problem.ours, leaves)


@pytest.mark.parametrize("rank", [2, 3])
def test_torch_func_agrees_with_eager(device: torch.device, rank: int) -> None:
    problem = smooth(rank)
    operands = [t for t in problem.tensors(device) if t is not None]
    tangents = tuple(torch.randn_like(t) for t in operands)
    x, *rest = operands
    func, numbers = torch.func, tuple(range(5))

    def everything(f: Callable[..., Tensor]) -> list[Any]:
        def loss(*args: Tensor) -> Tensor:
            return f(*args).square().sum()

        return [
            func.jvp(f, tuple(operands), tangents),
            func.jvp(lambda w: f(x, w, *rest[1:]), (rest[0],), tangents[1:2]),
            func.grad(loss, argnums=numbers)(*operands),
            func.vmap(lambda t: f(t, *rest))(torch.stack([x, 2 * x])),
            func.vmap(lambda w: f(x, w, *rest[1:]))(torch.stack([rest[0], -rest[0]])),
            func.vmap(func.grad(loss), (0, *[None] * 4))(torch.stack([x, 2 * x]), *rest),
            func.jacrev(f, argnums=numbers)(*operands),
            func.jacfwd(f, argnums=(0, 1))(*operands),
            func.hessian(loss)(*operands),
        ]

    torch.testing.assert_close(everything(problem.ours), everything(problem.eager))


def test_forward_mode_has_a_tangent_in_every_operand(device: torch.device) -> None:
    problem, forward_ad = smooth(2), torch.autograd.forward_ad
    for i, with_grad in itertools.product(range(5), (False, True)):
        tangents = []
        for f in (problem.ours, problem.eager):
            with forward_ad.dual_level():
                duals = [
                    t.requires_grad_(with_grad) for t in problem.tensors(device) if t is not None
                ]
                tangent = torch.ones_like(duals[i]).cumsum(0)
                duals[i] = forward_ad.make_dual(duals[i], tangent)
                tangents.append(forward_ad.unpack_dual(f(*duals)).tangent)
        assert tangents[0].abs().sum() > 0
        torch.testing.assert_close(*tangents)


# ---- fakes, opcheck, torch.compile ----------------------------------------------------------


@checked
@given(problem=linear_problems())
def test_the_fake_has_the_dtype_shape_and_strides_of_the_real_one(
    device: torch.device, problem: LinearProblem
) -> None:
    operands = problem.tensors(device)
    real = problem.ours(*operands)
    with FakeTensorMode() as mode:
        fake = problem.ours(*(t if t is None else mode.from_tensor(t) for t in operands))
    assert (fake.dtype, fake.shape, fake.stride(), fake.device) == (
        real.dtype,
        real.shape,
        real.stride(),
        real.device,
    )


@pytest.mark.parametrize("activation", ["hardtanh", "silu"])
@pytest.mark.parametrize("rank", [2, 3])
def test_opcheck(device: torch.device, rank: int, activation: str) -> None:
    problem = dataclasses.replace(smooth(rank, activation), dtype=torch.float32)
    for operands in (problem.tensors(device), problem.leaves(device)):
        for missing in ((), (2,), (3, 4)):
            x, linear_weight, linear_bias, weight, bias = (
                None if i in missing else t for i, t in enumerate(operands)
            )
            torch.library.opcheck(
                torch.ops.fxfuse.linear_group_norm_activation.default,
                (
                    x,
                    linear_weight,
                    linear_bias,
                    2,
                    weight,
                    bias,
                    1e-5,
                    activation,
                    list(problem.params),
                ),
            )


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("with_grad", [False, True])
@pytest.mark.parametrize("door", ["optimize", "fuse", "export", "the operator"])
def test_as_many_floating_point_operations_are_counted_as_eager_s(
    door: str, with_grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator = torch.ops.fxfuse.linear_group_norm_activation
    monkeypatch.delitem(flop_counter.flop_registry, operator, raising=False)
    model = nn.Sequential(nn.Linear(12, 8), nn.GroupNorm(2, 8), nn.SiLU())
    x = torch.randn(5, 12)
    if door == "optimize":
        fused: Callable[..., Tensor] = fxfuse.optimize(model)
    elif door == "fuse":
        fused = fx.symbolic_trace(model)
        fxfuse.fuse(fused)
    elif door == "export":
        program = torch.export.export(model, (x,))
        fxfuse.fuse(program)
        fused = program.module()
    else:
        library.on_load(ops._register_flops_if_imported)
        linear, norm, _ = model

        def fused(x: Tensor) -> Tensor:
            weights = linear.weight, linear.bias, 2, norm.weight, norm.bias
            return ops.linear_group_norm_activation(x, *weights, activation="silu")

    counts = []
    for function in (fused, model):
        counter = flop_counter.FlopCounterMode(display=False)
        with counter, torch.set_grad_enabled(with_grad):
            output = function(x)
            if with_grad:
                output.sum().backward()
        counts.append(counter.get_total_flops())
        names = {str(name) for name in counter.get_flop_counts()["Global"]}
        one = function is fused and not with_grad and door != "optimize"  # which sees the hooks
        assert ("fxfuse.linear_group_norm_activation" in names) == one
    assert counts[0] == counts[1] == 2 * 5 * 12 * 8 * (2 if with_grad else 1)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_graph_breaks(device: torch.device, dynamic: bool) -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(SMALL.ours, fullgraph=True, backend=counter, dynamic=dynamic)
    for batch in (2, 3, 5, 8) if dynamic else (3,):
        problem = dataclasses.replace(SMALL, shape=(batch, 7))
        for operands in (problem.tensors(device), problem.leaves(device)):
            expected, output = SMALL.ours(*operands), compiled(*operands)
            torch.testing.assert_close(output, expected, rtol=0, atol=0)
            if output.requires_grad:
                results = [torch.autograd.grad(y.sum(), operands) for y in (output, expected)]
                torch.testing.assert_close(*results, rtol=0, atol=0)
    assert counter.frame_count == 2  # train and infer
    torch._dynamo.reset()


def test_a_compiled_graph_has_one_operator_without_gradients_and_two_with(
    device: torch.device,
) -> None:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    found: list[str] = []

    def keep(graph: fx.GraphModule, inputs: Any) -> Any:
        found.append(graph.code)
        return make_boxed_func(graph.forward)

    for operands, names in (
        (SMALL.tensors(device), ["fxfuse.linear_group_norm_activation."]),
        (SMALL.leaves(device), ["aten.addmm", "fxfuse.group_norm_activation_forward"]),
    ):
        torch._dynamo.reset()
        found.clear()
        torch.compile(SMALL.ours, fullgraph=True, backend=aot_autograd(fw_compiler=keep))(*operands)
        assert all(name in found[0] for name in names), found[0]
    torch._dynamo.reset()


# ---- the function that graphs call ----------------------------------------------------------


class Model(nn.Module):
    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return ops.linear_group_norm_activation(x, weight, None, 2, activation="relu")


def test_the_function_is_one_call_to_a_tracer(device: torch.device) -> None:
    traced = fx.symbolic_trace(Model())
    assert [n.target for n in traced.graph.nodes if n.op == "call_function"] == [
        ops.linear_group_norm_activation
    ]
    x, weight = torch.randn(3, 5, device=device), torch.randn(4, 5, device=device)
    assert torch.equal(traced(x, weight), Model()(x, weight))


@pytest.mark.parametrize("has_kernel", [False, True])
def test_the_function_leaves_a_linear_to_the_compiler_where_no_kernel_is(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, has_kernel: bool
) -> None:
    monkeypatch.setattr(ops, "_with_linear_kernel", {device: has_kernel})
    x, weight = torch.randn(3, 5, device=device), torch.randn(4, 5, device=device)
    monkeypatch.setitem(ops._with_linear_kernel, x.device, has_kernel)
    graphs: list[fx.GraphModule] = []

    def keep(graph: fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    for dynamic in (False, True):
        torch._dynamo.reset()
        graphs.clear()
        compiled = torch.compile(Model(), backend=keep, fullgraph=True, dynamic=dynamic)
        torch.testing.assert_close(compiled(x, weight), Model()(x, weight))
        (graph,) = graphs
        assert ("fxfuse.linear_group_norm_activation" in graph.code) == has_kernel
        assert ("linear(" in graph.code) != has_kernel
    torch._dynamo.reset()


def test_a_tensor_subclass_keeps_its_own_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    x, weight = torch.randn(3, 5), torch.randn(4, 5)
    monkeypatch.setattr(ops, "_with_linear_kernel", {x.device: True})
    output = Model()(x, TwoTensor(weight, 2 * weight))
    assert isinstance(output, TwoTensor)
    assert torch.equal(output.a, Model()(x, weight))
    assert torch.equal(output.b, Model()(x, 2 * weight))


class Doubling(Tensor):
    """Its Linear is twice that of a tensor, and it has no other function than torch's."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", "").startswith("fxfuse"):
            return NotImplemented
        result = super().__torch_function__(func, types, args, kwargs or {})
        return 2 * result.as_subclass(Tensor) if func is F.linear else result


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("door", ["fuse", "optimize", "compile"])
@pytest.mark.parametrize("which", ["linear.weight", "norm.weight", "input", "residual"])
def test_a_subclass_of_torch_function_keeps_its_own_functions(door: str, which: str) -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(5, 4), nn.GroupNorm(2, 4)

        def forward(self, x: Tensor, residual: Tensor) -> Tensor:
            y = F.relu(self.norm(self.linear(x)))
            return F.relu(self.norm(y) + residual)

    model = Network().requires_grad_(False)
    x, residual = torch.randn(3, 5), torch.randn(3, 4)
    for name, parameter in list(model.named_parameters()):
        if name == which:
            module = model.get_submodule(name.partition(".")[0])
            module.weight = nn.Parameter(parameter.as_subclass(Doubling), requires_grad=False)
    x = x.as_subclass(Doubling) if which == "input" else x
    residual = residual.as_subclass(Doubling) if which == "residual" else residual
    expected = model(x, residual)
    if door == "fuse":
        fused = fx.symbolic_trace(model)
        assert fxfuse.fuse(fused).matched == 2
    elif door == "optimize":
        fused = fxfuse.optimize(model)
    else:
        torch._dynamo.reset()
        fused = torch.compile(model, backend=compile_graph, options={"inner": "eager"})
    result = fused(x, residual)
    assert type(result) is type(expected)
    torch.testing.assert_close(result.as_subclass(Tensor), expected.as_subclass(Tensor))


# ---- autocast -------------------------------------------------------------------------------


@pytest.mark.parametrize("low", HALF_DTYPES)
@pytest.mark.parametrize("with_grad", [False, True])
def test_autocast_is_eager_s(device: torch.device, low: torch.dtype, with_grad: bool) -> None:
    """Every mixture of dtypes gives eager's dtype and values, or an error as in eager."""
    for x_dtype, linear_dtype, affine_dtype in itertools.product(DTYPES, repeat=3):
        if (x_dtype == torch.float64) != (linear_dtype == torch.float64):
            continue  # a Linear over both raises in every mode
        operands = []
        for i, t in enumerate(SMALL.tensors(device)):
            assert t is not None
            dtype = x_dtype if i == 0 else linear_dtype if i < 3 else affine_dtype
            operands.append(t.to(dtype).requires_grad_(with_grad))
        answers: list[Any] = []
        for function in (SMALL.eager, SMALL.ours):
            with torch.autocast(device.type, low):
                try:
                    output = function(*operands)
                except RuntimeError:
                    answers.append("raises")
                    continue
            grads = torch.autograd.grad(output.sum(), operands) if with_grad else []
            answers.append([output, *grads])
        theirs, ours = answers
        if isinstance(theirs, str):
            # The norm takes float32 beside 16 bits in any case on CUDA, where it writes float32.
            assert isinstance(ours, str) or device.type == "cuda"
            continue
        tolerance = {torch.float64: 1e-9, torch.float32: 1e-3}
        assert ours[0].dtype == theirs[0].dtype, (x_dtype, linear_dtype, affine_dtype)
        for a, b in zip(ours, theirs, strict=True):
            assert a.dtype == b.dtype
            close = 5e-2 if low in (x_dtype, low) else tolerance.get(a.dtype, 5e-2)
            torch.testing.assert_close(a, b, rtol=close, atol=close)


def test_autocast_is_compiled_in(device: torch.device) -> None:
    def function(*operands: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return SMALL.ours(*operands)

    operands = [None if t is None else t.float() for t in SMALL.tensors(device)]
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    expected = function(*operands)
    assert expected.dtype == (torch.float32 if device.type == "cuda" else torch.bfloat16)
    torch.testing.assert_close(compiled(*operands), expected, rtol=0, atol=0)
    torch._dynamo.reset()


# ---- Hopper ---------------------------------------------------------------------------------

needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a GPU of compute capability 9.0",
)

# Of the kernel: M, K and N, of which none is whole tiles.
SIZES = {"linear_tiles": (3001, 328, 1088), "linear_stationary": (900, 104, 1088)}
SIZES_OF_512 = {"linear_tiles": (3001, 328, 1024), "linear_stationary": (900, 104, 1024)}


def kernels(function: Callable[[], object]) -> list[str]:
    """The names of the kernels that a call runs."""
    function()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    return [event.name for event in profile.events()]


SETTINGS: dict[str, Callable[[bool], None]] = {
    "allow_tf32": lambda on: setattr(torch.backends.cuda.matmul, "allow_tf32", on),
    "set_float32_matmul_precision": lambda on: torch.set_float32_matmul_precision(
        "high" if on else "highest"
    ),
    "fp32_precision": lambda on: setattr(
        torch.backends.cuda.matmul, "fp32_precision", "tf32" if on else "ieee"
    ),
}


@pytest.fixture
def tf32() -> Iterator[None]:
    """PyTorch allows it for matmuls."""
    SETTINGS["allow_tf32"](True)
    yield
    SETTINGS["allow_tf32"](False)


def on_hopper(
    kernel: str, group: int, dtype: torch.dtype = torch.bfloat16, **kwargs: Any
) -> LinearProblem:
    m, k, n = (SIZES_OF_512 if group > 64 else SIZES)[kernel]
    return LinearProblem((m, k), n, n // group, dtype, **kwargs)


@needs_hopper
@pytest.mark.parametrize("kernel", SIZES)
@pytest.mark.parametrize("group", [32, 64, 128, 256, 512])
@pytest.mark.parametrize(
    ("dtype", "output_dtype"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float16),
        (torch.float16, torch.float32),
    ],
)
def test_one_kernel_keeps_the_contract(
    kernel: str, group: int, dtype: torch.dtype, output_dtype: torch.dtype
) -> None:
    number = [32, 64, 128, 256, 512].index(group)
    missing = [(), (2,), (3,), (4,), (2, 3, 4)][number]
    activation = ["hardtanh", "identity", "clamp", "relu", "relu6"][number]
    problem = on_hopper(
        kernel,
        group,
        dtype,
        activation=activation,
        params=PARAMS[activation][0],
        mean=100.0 * (number % 2),
    )
    operands = [None if i in missing else t for i, t in enumerate(problem.tensors("cuda"))]
    x, linear_weight, linear_bias, weight, bias = operands
    rest = (problem.num_groups, weight, bias, 1e-5, activation, problem.params, output_dtype)

    def ours() -> Tensor:
        output: Tensor = torch.ops.fxfuse.linear_group_norm_activation(
            x, linear_weight, linear_bias, *rest
        )
        return output

    assert any(kernel in name for name in kernels(ours))
    output = ours()
    assert torch.equal(output, ours())
    theirs = ops.reference(F.linear(x, linear_weight, linear_bias), *rest)  # type: ignore[arg-type]
    # Rows have nothing to do with each other: a few, of every place in a tile, are enough.
    rows = torch.arange(0, len(output), 13, device="cuda")
    z = F.linear(*(None if t is None else t.double() for t in operands[:3]))[rows]
    right = reference(
        Operands(*(None if t is None else t.cpu() for t in (z, weight, bias))),  # type: ignore[arg-type]
        problem.num_groups,
        1e-5,
        activation,
        problem.params,
        dtype=output_dtype,
    )
    check_contract(Answer(output[rows].cpu()), Answer(theirs[rows].cpu()), right)


def deviation(output: Tensor, right: Tensor) -> Tensor:
    """The root of the mean square, and the largest."""
    difference = output.double() - right
    return torch.stack([difference.square().mean().sqrt(), difference.abs().max()])


@needs_hopper
@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("kernel", SIZES)
@pytest.mark.parametrize("group", [32, 64, 128, 256, 512])
@pytest.mark.parametrize("mean", [0.0, 1e5])
def test_tf32_is_as_exact_as_eager_s(kernel: str, group: int, mean: float) -> None:
    """Both round the same products; in which group which of the two is nearer is chance."""
    problem = on_hopper(kernel, group, torch.float32, activation="identity", params=(), mean=mean)
    number = [32, 64, 128, 256, 512].index(group)
    missing = [(), (2,), (3,), (4,), (2, 3, 4)][number]
    operands = [None if i in missing else t for i, t in enumerate(problem.tensors("cuda"))]
    assert any(kernel in name for name in kernels(lambda: problem.ours(*operands)))
    output = problem.ours(*operands)
    assert torch.equal(output, problem.ours(*operands))
    right = problem.eager(*(None if t is None else t.double() for t in operands))
    ours, theirs = deviation(output, right), deviation(problem.eager(*operands), right)
    assert (ours <= torch.tensor([1.05, 1.5], device="cuda") * theirs).all(), (ours, theirs)


@needs_hopper
@pytest.mark.parametrize("setting", SETTINGS)
def test_tf32_is_taken_where_torch_allows_it_in_that_call(setting: str) -> None:
    layers = nn.Linear(328, 1088), nn.GroupNorm(34, 1088), nn.Hardtanh(-3, 3)
    model = nn.Sequential(*layers).cuda().requires_grad_(False)
    x = torch.randn(3001, 328, device="cuda")
    right = copy.deepcopy(model).double()(x.double())
    try:
        SETTINGS[setting](True)
        doors = list(fused_by_every_door(model, x))
        for door, _, report in doors:
            *_, site = report.sites  # that of torch.compile has the graphs before it too
            assert "the Linear as well: in TF32, " in site.reason, door
        for allowed in (True, False, True):
            SETTINGS[setting](allowed)
            for door, function, _ in doors:
                names = kernels(functools.partial(function, x))
                assert any("linear_tiles" in name for name in names) == allowed, (door, allowed)
                error = deviation(function(x), right)[1]
                assert (error < 1e-4) != allowed, (door, allowed, error)
                assert error < 2e-2, (door, allowed, error)
        SETTINGS[setting](False)
        for door, function, report in fused_by_every_door(model, x):
            *_, site = report.sites
            assert "float32 without TF32" in site.reason, door
            assert deviation(function(x), right)[1] < 1e-4, door
    finally:
        SETTINGS["allow_tf32"](False)


@needs_hopper
def test_the_switch_of_the_cuda_libraries_forbids_tf32_too() -> None:
    program = """
import torch
from fxfuse import ops
torch.backends.cuda.matmul.allow_tf32 = True
cuda = torch.device("cuda")
print(ops.linear_kernel(4096, 4096, 4096, 32, "relu", dtype=torch.float32, device=cuda))
"""
    for override, reason in (("0", "float32 without TF32"), ("1", "in TF32, ")):
        environment = os.environ | {"NVIDIA_TF32_OVERRIDE": override}
        command = [sys.executable, "-c", program]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert reason in run.stdout


@needs_hopper
@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("kernel", SIZES)
@pytest.mark.parametrize("group", [32, 128, 512])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_case_27_a_value_that_is_no_number_poisons_its_row(
    kernel: str, group: int, value: float, dtype: torch.dtype
) -> None:
    problem = on_hopper(kernel, group, dtype)
    operands = problem.tensors("cuda")
    expected = problem.ours(*operands)
    x = operands[0]
    assert x is not None
    x[70, 3] = value
    output = problem.ours(*operands)
    assert output[70].isnan().all()
    output[70] = expected[70]
    assert torch.equal(output, expected)


@needs_hopper
@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("kernel", SIZES)
@pytest.mark.parametrize("group", [32, 128, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_case_23_a_constant_group_is_the_bias(kernel: str, group: int, dtype: torch.dtype) -> None:
    problem = on_hopper(kernel, group, dtype, activation="identity", params=())
    operands = problem.tensors("cuda")
    _, linear_weight, linear_bias, _, bias = operands
    assert linear_weight is not None
    assert linear_bias is not None
    assert bias is not None
    linear_weight[:group], linear_bias[:group] = 0, 1000
    output = problem.ours(*operands)
    assert torch.equal(output[:, :group], bias[:group].expand(len(output), group))


@needs_hopper
@pytest.mark.parametrize(
    "name", ["silu", "strided", "offset", "group of 48", "float32", "rank 3", "few rows"]
)
def test_what_the_kernel_does_not_take_runs_as_the_two_operators(name: str) -> None:
    problem = on_hopper("linear_tiles", 128)
    if name == "silu":
        problem = dataclasses.replace(problem, activation="silu", params=())
    if name == "group of 48":
        problem = dataclasses.replace(problem, out_features=1152, num_groups=24)
    if name == "float32":
        problem = dataclasses.replace(problem, dtype=torch.float32)
    if name == "few rows":
        problem = dataclasses.replace(problem, shape=(65, 328))
    if name in ("strided", "offset"):
        layout = {"strided": "transposed"}.get(name, name)
        problem = dataclasses.replace(problem, layout=layout)
    if name == "rank 3":
        problem = dataclasses.replace(problem, shape=(3, 1024, 328), num_groups=8)
    operands = problem.tensors("cuda")
    assert not any("linear_" in found for found in kernels(lambda: problem.ours(*operands)))
    assert torch.equal(problem.ours(*operands), problem.two(*operands))


def fused_by_every_door(
    model: nn.Module, x: Tensor
) -> Iterator[tuple[str, Callable[[Tensor], Tensor], fxfuse.FusionReport]]:
    """What a door makes of a model, by its name, and the report that it gives."""
    optimized = fxfuse.optimize(model)
    yield "optimize", optimized, fxfuse.report(optimized)
    traced = fx.symbolic_trace(model)
    yield "fuse", traced, fxfuse.fuse(traced)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("rows")},))
    report = fxfuse.fuse(program)
    yield "export", program.module(), report
    for inner in ("eager", "inductor"):
        torch._dynamo.reset()
        compiled = torch.compile(
            model, backend=compile_graph, dynamic=True, options={"inner": inner}
        )
        compiled(x)
        yield inner, compiled, fxfuse.report()
    torch._dynamo.reset()


@needs_hopper
@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("kernel", SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@torch.no_grad()
def test_every_door_leads_to_the_kernel_and_says_so(kernel: str, dtype: torch.dtype) -> None:
    m, k, n = SIZES[kernel]
    layers = nn.Linear(k, n), nn.GroupNorm(n // 32, n), nn.Hardtanh(-0.5, 0.5)
    model = nn.Sequential(*layers).to("cuda", dtype)
    x = torch.randn(m, k, device="cuda", dtype=dtype)
    served, reason = ops.linear_kernel(m, k, n, n // 32, "hardtanh", dtype=x.dtype, device=x.device)
    assert served
    expected = torch.ops.fxfuse.linear_group_norm_activation(
        x, *layers[0].parameters(), n // 32, *layers[1].parameters(), 1e-5, "hardtanh", [-0.5, 0.5]
    )
    for door, function, report in fused_by_every_door(model, x):
        assert any(kernel in name for name in kernels(functools.partial(function, x))), door
        assert torch.equal(function(x), expected), door
        (site,) = report.sites
        assert site.reason.endswith(f"one kernel computes the Linear as well: {reason}."), door


@needs_hopper
def test_a_site_says_why_its_linear_stays() -> None:
    model = nn.Sequential(nn.Linear(64, 96), nn.GroupNorm(2, 96), nn.Hardtanh())
    model = model.to("cuda", torch.bfloat16)
    x = torch.randn(512, 64, device="cuda", dtype=torch.bfloat16)
    for door, function, report in fused_by_every_door(model, x):
        torch.testing.assert_close(function(x), model(x), rtol=2e-2, atol=2e-2, msg=door)
        (site,) = report.sites
        assert "The Linear has a kernel of its own: groups are not of 32" in site.reason, door


@needs_hopper
@pytest.mark.parametrize("kernel", SIZES)
def test_the_kernel_under_autocast(kernel: str) -> None:
    problem = on_hopper(kernel, 128, torch.float32)
    operands = problem.tensors("cuda")
    with torch.autocast("cuda", torch.bfloat16):
        output = problem.ours(*operands)
        expected = problem.eager(*operands)
        assert any(kernel in name for name in kernels(lambda: problem.ours(*operands)))
    assert output.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(output, expected, rtol=0.05, atol=0.05)


@needs_hopper
@pytest.mark.parametrize("kernel", SIZES)
def test_the_kernel_in_a_stream_and_in_a_cuda_graph(kernel: str) -> None:
    problem = on_hopper(kernel, 512)
    operands = problem.tensors("cuda")
    expected = problem.ours(*operands)
    x, *rest = operands
    assert x is not None
    late = torch.zeros_like(x)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)  # whoever does not wait for the stream reads zeros
            late.copy_(x)
            output = problem.ours(late, *rest)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream.synchronize()
    assert torch.equal(output, expected)

    late.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = problem.ours(late, *rest)
    late.copy_(x)
    graph.replay()
    assert torch.equal(output, expected)
