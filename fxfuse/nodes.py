"""What operation is this node?  One reading of every spelling.

`read` answers with a `Reading`: the operation's name and its arguments, named as
`torch.nn.functional` names them, with every default filled in.  It does not judge: whether the
arguments suit a fusion is for `patterns`.

There is one table for each kind of node (functions, methods, modules).  To add a spelling, add its
row: the operation and the parameters that the spelling takes, in order.  The parameters are
written down because `Node.normalized_arguments` raises on `torch.clamp` and knows no methods.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.nn.utils import parametrize


@dataclass(frozen=True)
class Attribute:
    """A tensor that a module holds: it is read by its path when the graph runs, never before."""

    path: str
    value: torch.Tensor


@dataclass(frozen=True)
class Reading:
    """One node, read.

    Attributes:
        operation: The name of the operation, the same for all its spellings.
        arguments: All its arguments by name.  A tensor is a node, or an `Attribute` of a module.
        obstacle: What keeps a module from being just its operation: `"subclass"`,
            `"parametrized"`, `"hooks"` or `"own_forward"`.
    """

    operation: str
    arguments: dict[str, Any]
    obstacle: str | None = None

    @property
    def input(self) -> fx.Node | None:
        """The node that the operation is applied to."""
        value = self.arguments.get("input")
        return value if isinstance(value, fx.Node) else None

    @property
    def inplace(self) -> bool:
        """Whether the result is written over the input."""
        return self.arguments.get("inplace") is True


@dataclass(frozen=True)
class _Spelling:
    operation: str
    signature: inspect.Signature
    # What the spelling itself says: `relu_` is in place.
    implied: dict[str, Any] = field(default_factory=dict)


def _spell(operation: str, parameters: Callable[..., Any], **implied: Any) -> _Spelling:
    """A row; `parameters` is any function that takes what the spelling takes."""
    return _Spelling(operation, inspect.signature(parameters), implied)


def _clamp(input, min=None, max=None, *, out=None): ...  # type: ignore[no-untyped-def]
def _clamp_(input, min=None, max=None): ...  # type: ignore[no-untyped-def]
def _clamp_min(input, min, *, out=None): ...  # type: ignore[no-untyped-def]
def _clamp_max(input, max, *, out=None): ...  # type: ignore[no-untyped-def]
def _hardtanh_(input, min_val=-1.0, max_val=1.0): ...  # type: ignore[no-untyped-def]
def _dropout(input, p, train): ...  # type: ignore[no-untyped-def]
def _linear(input, weight, bias=None): ...  # type: ignore[no-untyped-def]
def _unary(input): ...  # type: ignore[no-untyped-def]
def _to(input, dtype): ...  # type: ignore[no-untyped-def]


def _group_norm(  # type: ignore[no-untyped-def]
    input, num_groups, weight=None, bias=None, eps=1e-5, cudnn_enabled=True
): ...


_CLAMPS = {
    "clamp": _spell("clamp", _clamp),
    "clip": _spell("clamp", _clamp),
    "clamp_": _spell("clamp", _clamp_, inplace=True),
    "clip_": _spell("clamp", _clamp_, inplace=True),
    "clamp_min": _spell("clamp", _clamp_min, max=None),
    "clamp_max": _spell("clamp", _clamp_max, min=None),
    "clamp_min_": _spell("clamp", _clamp_min, max=None, inplace=True),
    "clamp_max_": _spell("clamp", _clamp_max, min=None, inplace=True),
}

_FUNCTIONS: dict[object, _Spelling] = {
    F.linear: _spell("linear", _linear),
    F.group_norm: _spell("group_norm", F.group_norm),
    # Unlike F.group_norm it does not refuse groups of one value.
    torch.group_norm: _spell("group_norm", _group_norm, verify_batch_size=False),
    F.hardtanh: _spell("hardtanh", F.hardtanh),
    F.hardtanh_: _spell("hardtanh", _hardtanh_, inplace=True),
    F.relu6: _spell("relu6", F.relu6),
    F.relu: _spell("relu", F.relu),
    torch.relu: _spell("relu", _unary),
    torch.relu_: _spell("relu", _unary, inplace=True),
    F.silu: _spell("silu", F.silu),
    **{getattr(torch, name): spelling for name, spelling in _CLAMPS.items()},
    torch.dropout: _spell("dropout", _dropout),
    **{
        dropout: _spell("dropout", dropout)
        for dropout in (
            F.dropout,
            F.dropout1d,
            F.dropout2d,
            F.dropout3d,
            F.alpha_dropout,
            F.feature_alpha_dropout,
        )
    },
}

_METHODS: dict[str, _Spelling] = {
    "relu": _spell("relu", _unary),
    "relu_": _spell("relu", _unary, inplace=True),
    **_CLAMPS,
    "to": _spell("cast", _to),
    "type": _spell("cast", _to),
    "float": _spell("cast", _unary, dtype=torch.float32),
    "double": _spell("cast", _unary, dtype=torch.float64),
    "half": _spell("cast", _unary, dtype=torch.float16),
    "bfloat16": _spell("cast", _unary, dtype=torch.bfloat16),
}

# The operation of a module, and those of its attributes that are the operation's arguments.
_MODULES: dict[type[nn.Module], tuple[str, tuple[str, ...]]] = {
    nn.Linear: ("linear", ("weight", "bias")),
    nn.GroupNorm: ("group_norm", ("num_groups", "num_channels", "weight", "bias", "eps")),
    nn.Hardtanh: ("hardtanh", ("min_val", "max_val", "inplace")),
    nn.ReLU6: ("hardtanh", ("min_val", "max_val", "inplace")),
    nn.ReLU: ("relu", ("inplace",)),
    nn.SiLU: ("silu", ("inplace",)),
    nn.Identity: ("identity", ()),
    **dict.fromkeys(
        (
            nn.Dropout,
            nn.Dropout1d,
            nn.Dropout2d,
            nn.Dropout3d,
            nn.AlphaDropout,
            nn.FeatureAlphaDropout,
        ),
        ("dropout", ("p", "inplace")),
    ),
}


def read(node: fx.Node, root: nn.Module) -> Reading | None:
    """Reads one node.

    Args:
        node: A node of a graph.
        root: The module whose submodules the graph addresses.

    Returns:
        The reading, or None where the node is no operation of the tables or its arguments are not
        those that the operation takes.
    """
    if node.op == "call_module":
        return _read_module(str(node.target), root, node)
    if node.op == "call_function":
        spelling = _FUNCTIONS.get(node.target)
    elif node.op == "call_method":
        spelling = _METHODS.get(str(node.target))
    else:
        return None
    if spelling is None:
        return None
    arguments = _bind(spelling.signature, node)
    if arguments is None:
        return None
    return Reading(spelling.operation, {**arguments, **spelling.implied})


def _read_module(path: str, root: nn.Module, node: fx.Node) -> Reading | None:
    module = root.get_submodule(path)
    known = next((cls for cls in type(module).__mro__ if cls in _MODULES), None)
    arguments = _bind(inspect.signature(_unary), node)
    if known is None or arguments is None:
        return None
    operation, names = _MODULES[known]
    for name in names:
        value = getattr(module, name, None)
        if isinstance(value, torch.Tensor):
            value = Attribute(f"{path}.{name}", value)
        arguments[name] = value
    return Reading(operation, arguments, obstacle(module, known))


def _bind(signature: inspect.Signature, node: fx.Node) -> dict[str, Any] | None:
    try:
        bound = signature.bind(*node.args, **node.kwargs)
    except TypeError:
        return None
    bound.apply_defaults()
    return dict(bound.arguments)


def obstacle(module: nn.Module, known: type[nn.Module]) -> str | None:
    """What a module does beside its class's forward, as in `Reading`; None if nothing.

    Args:
        module: The module.
        known: The class that it is taken for.
    """
    # Parametrization swaps the module's class, so it is asked about first.
    if parametrize.is_parametrized(module):
        return "parametrized"
    if type(module) is not known:
        return "subclass"
    if "forward" in vars(module):
        return "own_forward"
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    if any(hooks) or _has_any_global_hook():  # type: ignore[no-untyped-call]
        return "hooks"
    return None


def name(node: fx.Node, root: nn.Module) -> str:
    """What a node is called in a report: `Conv2d`, `add`, `input`."""
    if node.op == "call_module":
        return type(root.get_submodule(str(node.target))).__name__
    if node.op == "placeholder":
        return "input"
    return str(getattr(node.target, "__name__", node.target))


def attribute(node: fx.Node, root: nn.Module) -> Any:
    """What a `get_attr` node reads now; None for any other node."""
    if node.op != "get_attr":
        return None
    value: Any = root
    for part in str(node.target).split("."):
        value = getattr(value, part, None)
    return value


def dtype(node: fx.Node, root: nn.Module) -> torch.dtype | None:
    """The dtype of a node's result, where every run of the graph must give it that one.

    It is known from a cast, from the fake value that export and Dynamo record, and for a float32
    that goes through a norm: outside autocast that keeps the dtype, and under it gives float32.
    """
    if isinstance(value := node.meta.get("val"), torch.Tensor):
        return value.dtype
    reading = read(node, root)
    if reading is None or reading.obstacle or reading.input is None:
        return None
    if reading.operation == "cast":
        return _dtype_or_none(reading.arguments["dtype"])
    if reading.operation == "group_norm":
        return torch.float32 if dtype(reading.input, root) is torch.float32 else None
    return None


def _dtype_or_none(value: object) -> torch.dtype | None:
    return value if isinstance(value, torch.dtype) else None


def viewed(nodes: Iterable[fx.Node]) -> bool:
    """Whether a `view` may be asked for on something made from the results of nodes.

    `view` fails where the strides do not suit it, so whoever changes strides asks this first.
    What lies between is not judged, except that `contiguous` makes any strides good.
    """
    seen = set(nodes)
    waiting = list(seen)
    while waiting:
        for reader in waiting.pop().users:
            if reader in seen:
                continue
            if reader.target == "view" or reader.target is torch.Tensor.view:
                return True
            seen.add(reader)
            if reader.target != "contiguous":
                waiting.append(reader)
    return False
