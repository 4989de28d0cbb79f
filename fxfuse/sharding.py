"""The operators on DTensors: which shards each process computes by itself, and the rest.

Groups of one sample are normalised on their own.  So shards of the batch need nothing from each
other, and neither do shards of the channels where each holds whole groups, as after a column-wise
parallel Linear: weight and bias are cut along with them, and the operator is told its share of the
groups.  Any other sharding is gathered first.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fxfuse import library

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement

_rules: torch.library.Library | None = None


def register() -> None:
    """Lets DTensors through the operators, once both are there; does nothing until then."""
    global _rules
    # Not imported for its own sake: it takes longer than the rest of us.
    dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    if _rules is not None or dtensor is None or not library.is_loaded():
        return
    _rules = torch.library.Library("fxfuse", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name, rule in (("", _inference), ("_forward", _forward), ("_backward", _backward)):
        torch.library.register_torch_dispatch(
            f"fxfuse::group_norm_activation{name}", dtensor, rule, lib=_rules
        )


# Dynamo runs it instead of tracing it.
register._dynamo_marked_constant = True  # type: ignore[attr-defined]


@dataclass(frozen=True)
class _Plan:
    """How the operator runs on a mesh: one letter for each of its dimensions.

    Attributes:
        mesh: The processes.
        letters: "N" where the batch is sharded, "C" where the channels are, " " where each process
            has all.
        num_groups: Those of each process.
    """

    mesh: DeviceMesh
    letters: str
    num_groups: int

    @classmethod
    def of(cls, input: Any, num_groups: int) -> _Plan:
        from torch.distributed.tensor import Shard

        letters = ""
        for size, placement in zip(input.device_mesh.shape, input.placements, strict=True):
            # Not a subclass of Shard, which cuts in another order.
            dim = placement.dim if type(placement) is Shard else None
            if dim == 1 and num_groups % size == 0:
                num_groups //= size
                letters += "C"
            else:
                letters += "N" if dim == 0 else " "
        return cls(input.device_mesh, letters, num_groups)

    def placements(self, batch: int | str | None, channels: int | None) -> tuple[Placement, ...]:
        """Of a tensor, from its dimensions of samples and of channels or groups.

        `batch` is "sum" for what is summed over the samples, None for what has none of them.
        """
        from torch.distributed.tensor import Partial, Replicate, Shard

        def placement(dim: int | str | None) -> Placement:
            if dim == "sum":
                return Partial()
            return Replicate() if dim is None else Shard(int(dim))

        dims = {"N": batch, "C": channels, " ": None}
        return tuple(placement(dims[letter]) for letter in self.letters)

    def local(self, tensor: Any, batch: int | None, channels: int) -> Tensor | None:
        """This process' part of an operand."""
        if tensor is None:
            return None
        if not hasattr(tensor, "redistribute"):
            raise RuntimeError(
                "fxfuse.group_norm_activation: expected DTensors or Tensors, got both"
            )
        wanted = self.placements(batch, channels)
        if tensor.placements != wanted:
            tensor = tensor.detach().redistribute(self.mesh, wanted)
        part: Tensor = tensor.to_local()
        return part

    def whole(
        self, part: Tensor | None, shape: Any, batch: int | str | None, channels: int
    ) -> Tensor | None:
        """The DTensor of which this process computed a part."""
        from torch.distributed.tensor import DTensor

        if part is None:
            return None
        formats = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
        ranks = {torch.channels_last: 4, torch.channels_last_3d: 5}
        layout = next(
            f
            for f in formats
            if ranks.get(f, part.dim()) == part.dim() and part.is_contiguous(memory_format=f)
        )
        stride = torch.empty(shape, device="meta", memory_format=layout).stride()
        return DTensor.from_local(
            part,
            self.mesh,
            self.placements(batch, channels),
            run_check=False,
            shape=torch.Size(shape),
            stride=stride,
        )


def _without_grad(rule: Callable[..., Any]) -> Callable[..., Any]:
    """The rules run below autograd, so what they call must not build a graph."""

    @functools.wraps(rule)
    def run(
        cls: Any,
        operator: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        with torch.no_grad():
            return rule(operator, *args, **(kwargs or {}))

    return run


@_without_grad
def _inference(
    operator: Any, input: Any, num_groups: int, weight: Any, bias: Any, *args: Any, **kwargs: Any
) -> Any:
    plan = _Plan.of(input, num_groups)
    operands = plan.local(weight, None, 0), plan.local(bias, None, 0)
    part = operator(plan.local(input, 0, 1), plan.num_groups, *operands, *args, **kwargs)
    return plan.whole(part, input.shape, 0, 1)


@_without_grad
def _forward(
    operator: Any, input: Any, num_groups: int, weight: Any, bias: Any, *args: Any, **kwargs: Any
) -> Any:
    plan = _Plan.of(input, num_groups)
    operands = plan.local(weight, None, 0), plan.local(bias, None, 0)
    output, mean, rstd = operator(
        plan.local(input, 0, 1), plan.num_groups, *operands, *args, **kwargs
    )
    statistics = (input.shape[0], num_groups)
    return (
        plan.whole(output, input.shape, 0, 1),
        plan.whole(mean, (2, *statistics), 1, 2),
        plan.whole(rstd, statistics, 0, 1),
    )


@_without_grad
def _backward(
    operator: Any,
    grad_output: Any,
    input: Any,
    mean: Any,
    rstd: Any,
    num_groups: int,
    weight: Any,
    bias: Any,
    *args: Any,
) -> Any:
    plan = _Plan.of(input, num_groups)
    dinput, dweight, dbias = operator(
        plan.local(grad_output, 0, 1),
        plan.local(input, 0, 1),
        plan.local(mean, 1, 2),
        plan.local(rstd, 0, 1),
        plan.num_groups,
        plan.local(weight, None, 0),
        plan.local(bias, None, 0),
        *args,
    )
    channels = (input.shape[1],)
    return (
        plan.whole(dinput, input.shape, 0, 1),
        plan.whole(dweight, channels, "sum", 0),
        plan.whole(dbias, channels, "sum", 0),
    )


library.on_load(register)
