"""torch's own samples of group_norm and the activations, through the fused operator."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from problems import (
    DTYPES,
    Operands,
    Reference,
    check_contract,
    eager,
    reference,
    run,
)
from torch import Tensor

pytest.importorskip("expecttest")  # torch's samples import it

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.opinfo.core import OpInfo

from fxfuse import library, ops


def op_info(name: str) -> OpInfo:
    (found,) = (info for info in op_db if info.name == f"nn.functional.{name}")
    return found


GROUP_NORM, HARDTANH = op_info("group_norm"), op_info("hardtanh")


@pytest.fixture(scope="module", autouse=True)
def _library() -> None:
    assert library.load(), library.failure()


def group_norm_samples(
    device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[Tensor, int, Tensor | None, Tensor | None, float]]:
    for sample in GROUP_NORM.sample_inputs(device, dtype, requires_grad=True):
        given: dict[str, Any] = dict(
            zip(("num_groups", "weight", "bias", "eps"), sample.args, strict=False)
        )
        given |= sample.kwargs
        yield (
            sample.input,
            given["num_groups"],
            given.get("weight"),
            given.get("bias"),
            given.get("eps", 1e-5),
        )


def hardtanh_bounds(device: torch.device, dtype: torch.dtype) -> set[tuple[float, float]]:
    bounds = {(-1.0, 1.0)}
    for sample in HARDTANH.sample_inputs(device, dtype):
        low, high = (*sample.args, *(sample.kwargs.values()), -1.0, 1.0)[:2]
        bounds.add((float(low), float(high)))
    return bounds


def undecided(reference: Reference) -> Tensor:
    return torch.from_numpy(reference.near_a_kink().copy())


@pytest.mark.parametrize("dtype", DTYPES)
def test_sample_inputs(device: torch.device, dtype: torch.dtype) -> None:
    count = 0
    for x, num_groups, weight, bias, eps in group_norm_samples(device, dtype):
        for bounds in sorted(hardtanh_bounds(device, dtype)):
            operands = Operands(x, weight, bias)
            rest = (eps, "hardtanh", bounds)

            def ours(
                x: Tensor,
                w: Tensor | None,
                b: Tensor | None,
                num_groups: int = num_groups,
                rest: tuple[Any, ...] = rest,
            ) -> Tensor:
                return ops.group_norm_activation(x, num_groups, w, b, *rest)

            def theirs(
                x: Tensor,
                w: Tensor | None,
                b: Tensor | None,
                num_groups: int = num_groups,
                rest: tuple[Any, ...] = rest,
            ) -> Tensor:
                return eager(x, num_groups, w, b, *rest)

            grad_output = torch.randn_like(x.detach())
            if x.numel():
                near = undecided(reference(operands, num_groups, *rest))
                grad_output[near.to(device)] = 0
                check_contract(
                    run(ours, operands, grad_output),
                    run(theirs, operands, grad_output),
                    reference(operands, num_groups, *rest, grad_output),
                )
            else:
                answer, expected = run(ours, operands, grad_output), theirs(x, weight, bias)
                assert answer.output.shape == expected.shape
                assert answer.output.stride() == expected.stride()
            count += 1
    assert count >= 10


@pytest.mark.parametrize("dtype", DTYPES)
def test_sample_inputs_of_hardtanh(device: torch.device, dtype: torch.dtype) -> None:
    """Normalisation leaves a bias alone: the sample is the bias of an input of one value."""
    count = 0
    for sample in HARDTANH.sample_inputs(device, dtype, requires_grad=True):
        values = sample.input.detach().flatten()
        if values.numel() == 0:
            continue
        expected = F.hardtanh(values, *sample.args, **sample.kwargs)
        low, high = (*sample.args, *sample.kwargs.values(), -1.0, 1.0)[:2]
        bias = values.clone().requires_grad_()
        y = ops.group_norm_activation(
            torch.ones(2, len(values), device=device, dtype=dtype),
            len(values),
            torch.ones_like(values),
            bias,
            1e-5,
            "hardtanh",
            (low, high),
        )
        assert torch.equal(y[0], expected)
        assert torch.equal(y[1], expected)
        y[0].sum().backward()
        leaf = values.clone().requires_grad_()
        F.hardtanh(leaf, *sample.args, **sample.kwargs).sum().backward()
        assert torch.equal(bias.grad, leaf.grad)
        count += 1
    assert count >= 1


OTHERS = {
    "silu": "nn.functional.silu",
    "gelu": "nn.functional.gelu",
    "hardswish": "nn.functional.hardswish",
    "leaky_relu": "nn.functional.leaky_relu",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", OTHERS)
def test_sample_inputs_of_other_activations(
    device: torch.device, activation: str, dtype: torch.dtype
) -> None:
    info = next(info for info in op_db if info.name == OTHERS[activation])  # silu has two
    count = 0
    for sample in info.sample_inputs(device, dtype, requires_grad=True):
        values = sample.input.detach().flatten()
        given = {"negative_slope": 0.01} | sample.kwargs
        if values.numel() == 0:
            continue
        approximate = given.get("approximate", "none") == "tanh"
        name = "gelu_tanh" if approximate else activation
        params = (given["negative_slope"],) if activation == "leaky_relu" else ()
        assert not sample.args
        bias = values.clone().requires_grad_()
        expected = info.op(values, **sample.kwargs)
        # In 16 bits eager has the slope from its rounded result.
        wide = values.double().requires_grad_()
        info.op(wide, **sample.kwargs).sum().backward()
        y = ops.group_norm_activation(
            torch.ones(2, len(values), device=device, dtype=dtype),
            len(values),
            torch.ones_like(values),
            bias,
            1e-5,
            name,
            params,
        )
        torch.testing.assert_close(y[1], expected)
        y[1].sum().backward()
        torch.testing.assert_close(bias.grad, wide.grad.to(dtype))
        count += 1
    assert count >= 1


def test_error_inputs(device: torch.device) -> None:
    count = 0
    for error in GROUP_NORM.error_inputs(device):
        sample = error.sample_input
        with pytest.raises(error.error_type):
            F.group_norm(sample.input, *sample.args, **sample.kwargs)
        with pytest.raises((error.error_type, RuntimeError)):
            ops.group_norm_activation(sample.input, *sample.args, **sample.kwargs)
        count += 1
    for error in HARDTANH.error_inputs(device) if HARDTANH.error_inputs_func else ():
        sample = error.sample_input
        with pytest.raises((error.error_type, RuntimeError)):
            ops.group_norm_activation(
                torch.randn(2, 4, device=device),
                2,
                activation="hardtanh",
                params=(*sample.args, *sample.kwargs.values()),
            )
        count += 1
    assert count >= 1
