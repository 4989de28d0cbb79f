"""The operator that adds a residual between norm and activation, against its parts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from problems import DTYPES, PARAMS, Problem, errors, grouped, lay_out, to_array, ulp
from torch import Tensor, fx
from ways import CHANNELS_LAST, FORWARD

from fxfuse import library, ops

SHAPE, GROUPS = (3, 8, 5, 4), 2


@pytest.fixture(scope="module", autouse=True)
def _library() -> None:
    assert library.load(), library.failure()


def tensors(
    device: torch.device, dtype: torch.dtype = torch.float64, layout: str = "contiguous"
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    operands = Problem(SHAPE, GROUPS, dtype, layout).tensors(device)
    residual = Problem(SHAPE, GROUPS, dtype, layout, seed=1).tensors(device).input
    return operands.input, residual, operands.weight, operands.bias


def parts(
    x: Tensor, residual: Any, weight: Any, bias: Any, add: str = "out of place", act: str = "relu"
) -> Tensor:
    y = ops.group_norm_activation(x, GROUPS, weight, bias)
    if add == "in place":
        y += residual
    else:
        y = residual + y if add == "residual first" else y + residual
    result: Tensor = ops.ACTIVATIONS[act](y, *PARAMS[act][0])
    return result


def ours(
    x: Tensor, residual: Any, weight: Any, bias: Any, add: Any = "out of place", act: str = "relu"
) -> Tensor:
    return ops.group_norm_add_activation(
        x, residual, GROUPS, weight, bias, activation=act, params=PARAMS[act][0], add=add
    )


# ---- values ---------------------------------------------------------------------------------


def check(problem: Problem, device: torch.device, residual_layout: str | None = None) -> None:
    """Holds the output against float64: 4 ulp of |x_hat w| + |b| + |residual|, or eager's error."""
    operands = problem.tensors(device)
    generator = torch.Generator().manual_seed(problem.seed + 2)
    values = torch.randn(problem.shape, generator=generator, dtype=torch.float64)
    residual = lay_out(values.to(device, problem.dtype), residual_layout or problem.layout)
    with torch.no_grad():
        got = ops.group_norm_add_activation(
            operands.input,
            residual,
            problem.num_groups,
            operands.weight,
            operands.bias,
            activation="relu",
            verify_batch_size=False,
        )
        eager = torch.relu(
            torch.group_norm(
                operands.input, problem.num_groups, operands.weight, operands.bias, problem.eps
            )
            + residual
        )
    reference = problem.reference64(operands)
    added = to_array(residual, reference.z.dtype)
    exact = np.maximum(reference.z + added, 0)
    scale = reference.output_scale + np.abs(grouped(added, problem.num_groups)).max(-1)
    ours_error, eager_error = (
        grouped(errors(t, exact), problem.num_groups).max(-1) for t in (got, eager)
    )
    assert (ours_error <= np.maximum(eager_error, 4 * ulp(scale, problem.dtype))).all()
    assert got.dtype == eager.dtype
    if device.type == "cpu":
        assert got.stride() == eager.stride()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "offset", "sliced"])
def test_values(device: torch.device, dtype: torch.dtype, layout: str) -> None:
    check(Problem(SHAPE, GROUPS, dtype, layout), device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("residual_layout", ["contiguous", "offset"])
@pytest.mark.parametrize("way", FORWARD)
def test_every_way(
    device: torch.device, way: str, residual_layout: str, dtype: torch.dtype
) -> None:
    shape, num_groups = FORWARD[way]
    if device.type == "cpu" and math.prod(shape) > 100_000:
        pytest.skip("no way of its own on a CPU")
    check(Problem(shape, num_groups, dtype), device, residual_layout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", CHANNELS_LAST)
def test_channels_last_in_every_way(device: torch.device, way: str, dtype: torch.dtype) -> None:
    shape, num_groups = CHANNELS_LAST[way]
    if device.type == "cpu" and math.prod(shape) > 2**20:
        pytest.skip("no way of its own on a CPU")
    check(Problem(shape, num_groups, dtype, "channels_last"), device)


@pytest.mark.parametrize("activation", PARAMS)
def test_every_activation(device: torch.device, activation: str) -> None:
    operands = tensors(device)
    with torch.no_grad():
        torch.testing.assert_close(
            ours(*operands, act=activation), parts(*operands, act=activation), rtol=1e-7, atol=1e-7
        )


def test_nan_and_infinity_stay_in_the_residuals_place(device: torch.device) -> None:
    x, residual, weight, bias = tensors(device)
    residual[0, 0, 0, 0], residual[1, 2, 0, 1], residual[2, 0, 0, 0] = math.nan, math.inf, -math.inf
    with torch.no_grad():
        y = ours(x, residual, weight, bias)
    assert y[0, 0, 0, 0].isnan()
    assert (y[1, 2, 0, 1], y[2, 0, 0, 0]) == (math.inf, 0)
    assert int((~y.isfinite()).sum()) == 2


# ---- as eager adds --------------------------------------------------------------------------

OTHERS = {
    "the same": lambda r: r,
    "a channel": lambda r: r[:, :1],
    "a sample": lambda r: r[:1],
    "a scalar": lambda r: r[0, 0, 0, 0],
    "a number": lambda r: 0.5,
    "narrower": lambda r: r.half(),
    "wider": lambda r: r.double(),
    "integers": lambda r: (4 * r).int(),
    "another layout": lambda r: r.contiguous(memory_format=torch.channels_last),
    "transposed": lambda r: r.transpose(0, 1).contiguous().transpose(0, 1),
    "a parameter": torch.nn.Parameter,
    "more samples": lambda r: torch.stack([r, -r]),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("add", ["out of place", "residual first", "in place"])
@pytest.mark.parametrize("other", OTHERS)
def test_as_eager_adds(device: torch.device, other: str, add: str, grad: bool) -> None:
    x, residual, weight, bias = tensors(device, torch.float32)
    residual = OTHERS[other](residual)
    with torch.set_grad_enabled(grad):
        if add == "in place" and other == "more samples":
            for function in (parts, ours):
                with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
                    function(x, residual, weight, bias, add)
            return
        expected, got = (f(x, residual, weight, bias, add) for f in (parts, ours))
    assert (got.dtype, got.shape, got.stride()) == (
        expected.dtype,
        expected.shape,
        expected.stride(),
    )
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wide", [False, True])
def test_autocast(device: torch.device, dtype: torch.dtype, wide: bool) -> None:
    x, residual, weight, bias = tensors(device, torch.float32)
    with torch.autocast(device.type, dtype), torch.no_grad():
        residual = residual if wide else residual.to(dtype)
        for given in (x, x.to(dtype)):
            got, expected = (f(given, residual, weight, bias) for f in (ours, parts))
            assert got.dtype == expected.dtype
            torch.testing.assert_close(got, expected)


# ---- what torch asks of an operator ---------------------------------------------------------


def test_derivatives_are_those_of_the_parts(device: torch.device) -> None:
    leaves = [t.detach().requires_grad_() for t in tensors(device) if t is not None]
    assert torch.autograd.gradcheck(
        lambda *args: ours(*args, act="silu"), leaves, check_forward_ad=True
    )
    assert torch.autograd.gradgradcheck(lambda *args: ours(*args, act="silu"), leaves)
    for wanted in leaves:
        others = [t if t is wanted else t.detach() for t in leaves]
        grads = [torch.autograd.grad(f(*others).square().sum(), wanted) for f in (ours, parts)]
        torch.testing.assert_close(*grads)

    def loss(f: Any) -> Any:
        return lambda *args: f(*args).square().sum()

    given = [t.detach() for t in leaves]
    for transform in (torch.func.grad, lambda f: torch.func.jacrev(f, argnums=1)):
        torch.testing.assert_close(transform(loss(ours))(*given), transform(loss(parts))(*given))
    stacked = torch.stack([given[1], -given[1]])
    mapped = [
        torch.func.vmap(lambda r, f=f: f(given[0], r, *given[2:]))(stacked) for f in (ours, parts)
    ]
    torch.testing.assert_close(*mapped)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_opcheck(device: torch.device, layout: str) -> None:
    operands = tensors(device, torch.float32, layout)
    leaves = [t if t is None else t.detach().requires_grad_() for t in operands]
    for x, residual, weight, bias in (operands, leaves, (*operands[:2], None, None)):
        for activation, params in (("relu", []), ("hardtanh", [-1.0, 1.0])):
            args = (x, residual, GROUPS, weight, bias, 1e-5, activation, params)
            torch.library.opcheck(torch.ops.fxfuse.group_norm_add_activation.default, args)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_inference_has_the_operator_and_training_its_parts(
    device: torch.device, dynamic: bool
) -> None:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    seen: list[str] = []

    def compiler(graph: fx.GraphModule, inputs: Any) -> Any:
        seen.append(graph.code)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *args: ours(*args), backend=aot_autograd(fw_compiler=compiler), dynamic=dynamic
    )
    operands = tensors(device)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*operands), parts(*operands))
    assert "fxfuse.group_norm_add_activation" in seen[-1]
    leaves = [t.detach().requires_grad_() for t in operands if t is not None]
    grads = [torch.autograd.grad(f(*leaves).square().sum(), leaves) for f in (compiled, parts)]
    torch.testing.assert_close(*grads)
    assert not any("group_norm_add_activation" in code for code in seen[1:])
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"residual": torch.ones(3, 8, 5)}, "expected residual of shape"),
        ({"residual": torch.ones(3, 8, 5, 4, dtype=torch.half)}, "and dtype float, got|Float"),
        ({"num_groups": 3}, "expected num_groups to divide"),
        ({"activation": "softmax"}, "softmax"),
        ({"params": [1.0]}, "params"),
    ],
)
def test_bad_arguments(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "input": torch.ones(3, 8, 5, 4),
        "residual": torch.ones(3, 8, 5, 4),
        "num_groups": GROUPS,
        "weight": None,
        "bias": None,
        "eps": 1e-5,
        "activation": "relu",
        "params": [],
    }
    for device in ("cpu", "meta"):
        moved = {
            k: v.to(device) if isinstance(v, Tensor) else v for k, v in {**given, **change}.items()
        }
        with pytest.raises(RuntimeError, match=f"fxfuse.group_norm_add_activation: .*({message})"):
            torch.ops.fxfuse.group_norm_add_activation(**moved)
