"""What operation is this node?  One reading of every spelling.

`read` answers with a `Reading`: the operation's name and its arguments, named as
`torch.nn.functional` names them, with every default filled in.  It does not judge: whether the
arguments suit a fusion is for `patterns`.

There is one table for each kind of node: functions, methods, operators of aten, modules.  To add a
spelling, add its row: the operation and the parameters that the spelling takes, in order.  The
parameters are written down because `Node.normalized_arguments` raises on `torch.clamp` and knows no
methods; those of an operator are in its schema.

The shape and dtype of a value are known where Dynamo, export or AOT has recorded a fake tensor for
it (see `value`); nothing else in a graph tells them.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx.graph import inplace_methods
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
        index: Which of the node's results is meant; None where it has one.
    """

    operation: str
    arguments: dict[str, Any]
    obstacle: str | None = None
    index: int | None = None

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
    implied: Mapping[str, Any] = field(default_factory=dict)
    # Parameters that have another name in torch.nn.functional.
    renamed: Mapping[str, str] = field(default_factory=dict)
    index: int | None = None

    def read(self, node: fx.Node) -> Reading | None:
        arguments = _bind(self.signature, node)
        if arguments is None:
            return None
        for theirs, ours in self.renamed.items():
            arguments[ours] = arguments.pop(theirs)
        return Reading(self.operation, {**arguments, **self.implied}, index=self.index)


def _spell(operation: str, parameters: Callable[..., Any], **implied: Any) -> _Spelling:
    """A row; `parameters` is any function that takes what the spelling takes."""
    return _Spelling(operation, inspect.signature(parameters), implied)


def _clamp(input, min=None, max=None, *, out=None): ...  # type: ignore[no-untyped-def]
def _clamp_(input, min=None, max=None): ...  # type: ignore[no-untyped-def]
def _clamp_min(input, min, *, out=None): ...  # type: ignore[no-untyped-def]
def _clamp_max(input, max, *, out=None): ...  # type: ignore[no-untyped-def]
def _hardtanh_(input, min_val=-1.0, max_val=1.0): ...  # type: ignore[no-untyped-def]
def _leaky_relu_(input, negative_slope=0.01): ...  # type: ignore[no-untyped-def]
def _gelu(input, *, approximate="none"): ...  # type: ignore[no-untyped-def]
def _dropout(input, p, train): ...  # type: ignore[no-untyped-def]
def _linear(input, weight, bias=None): ...  # type: ignore[no-untyped-def]
def _unary(input): ...  # type: ignore[no-untyped-def]
def _unary_out(input, *, out=None): ...  # type: ignore[no-untyped-def]
def _binary(input, other): ...  # type: ignore[no-untyped-def]
def _to(input, dtype): ...  # type: ignore[no-untyped-def]
def _clone(input, *, memory_format=None): ...  # type: ignore[no-untyped-def]


def _group_norm(  # type: ignore[no-untyped-def]
    input, num_groups, weight=None, bias=None, eps=1e-5, cudnn_enabled=True
): ...


def _augmented(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def assign_(value: Any, other: Any) -> Any:
        return function(value, other)

    assign_.__name__ = assign_.__qualname__ = f"{function.__name__}_"
    return assign_


# `a += b` and its kin as functions, by the names of the methods.  Not operator.iadd itself, which
# fx writes as a statement: that would rebind `a` where it is a number.
AUGMENTED: dict[str, Callable[[Any, Any], Any]] = {
    f"__{name}__": _augmented(getattr(operator, name))
    for name in inplace_methods
    if name != "setitem"
}


# What has the same name as a function of torch and as a method of its tensors.
_NAMES = {
    "relu": _spell("relu", _unary),
    "relu_": _spell("relu", _unary, inplace=True),
    "sigmoid": _spell("sigmoid", _unary_out),
    "sigmoid_": _spell("sigmoid", _unary, inplace=True),
    "tanh": _spell("tanh", _unary_out),
    "tanh_": _spell("tanh", _unary, inplace=True),
    "clamp": _spell("clamp", _clamp),
    "clip": _spell("clamp", _clamp),
    "clamp_": _spell("clamp", _clamp_, inplace=True),
    "clip_": _spell("clamp", _clamp_, inplace=True),
    "clamp_min": _spell("clamp", _clamp_min, max=None),
    "clamp_max": _spell("clamp", _clamp_max, min=None),
    "clamp_min_": _spell("clamp", _clamp_min, max=None, inplace=True),
    "clamp_max_": _spell("clamp", _clamp_max, min=None, inplace=True),
    "clone": _spell("clone", _clone),
    "mul": _spell("mul", _binary),
    "add": _spell("add", _binary),
}

_METHODS: dict[str, _Spelling] = {
    **_NAMES,
    "mul_": _spell("mul", _binary, inplace=True),
    "add_": _spell("add", _binary, inplace=True),
    "to": _spell("cast", _to),
    "type": _spell("cast", _to),
    "float": _spell("cast", _unary, dtype=torch.float32),
    "double": _spell("cast", _unary, dtype=torch.float64),
    "half": _spell("cast", _unary, dtype=torch.float16),
    "bfloat16": _spell("cast", _unary, dtype=torch.bfloat16),
}

# What an operator of aten is, and what it implies.  A row stands for `name_` as well.
_ATEN: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("linear", {}),
    # Like torch.group_norm, neither refuses groups of one value.
    "group_norm": ("group_norm", {"verify_batch_size": False}),
    # Autocast does not know it: the result has the dtype of the input.
    "native_group_norm": ("group_norm", {"verify_batch_size": False, "autocast": False}),
    "hardtanh": ("hardtanh", {}),
    "relu6": ("relu6", {}),
    "relu": ("relu", {}),
    "silu": ("silu", {}),
    "gelu": ("gelu", {}),
    "hardswish": ("hardswish", {}),
    "leaky_relu": ("leaky_relu", {}),
    "sigmoid": ("sigmoid", {}),
    "special_expit": ("sigmoid", {}),
    "tanh": ("tanh", {}),
    "clamp": ("clamp", {}),
    "clamp.Tensor": ("clamp", {}),
    "clip": ("clamp", {}),
    "clip.Tensor": ("clamp", {}),
    "clamp_min": ("clamp", {"max": None}),
    "clamp_min.Tensor": ("clamp", {"max": None}),
    "clamp_max": ("clamp", {"min": None}),
    "clamp_max.Tensor": ("clamp", {"min": None}),
    "dropout": ("dropout", {}),
    "feature_dropout": ("dropout", {}),
    "alpha_dropout": ("dropout", {}),
    "feature_alpha_dropout": ("dropout", {}),
    "to.dtype": ("cast", {}),
    "_to_copy": ("cast", {"copy": True}),
    "clone": ("clone", {}),
    "mul.Tensor": ("mul", {}),
    "add.Tensor": ("add", {}),
}


def _operators() -> Iterator[tuple[object, _Spelling]]:
    for key, (operation, implied) in _ATEN.items():
        name, _, overload = key.partition(".")
        for packet in (getattr(torch.ops.aten, name), getattr(torch.ops.aten, f"{name}_", None)):
            found = getattr(packet, overload or "default", None)
            if found is None:
                continue
            yield found, (spelling := _schema(operation, found, implied))
            if not overload:
                # What a forward calls that does not choose an overload.
                yield packet, spelling


def _schema(
    operation: str, overload: torch._ops.OpOverload, implied: Mapping[str, Any]
) -> _Spelling:
    """The row of an operator, with the parameters that its schema has."""
    empty = inspect.Parameter.empty
    parameters = [
        inspect.Parameter(
            argument.name,
            inspect.Parameter.KEYWORD_ONLY
            if argument.kwarg_only
            else inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=argument.default_value if argument.has_default_value() else empty,
        )
        for argument in overload._schema.arguments
    ]
    names = {"self": "input", "group": "num_groups"}
    return _Spelling(
        operation,
        inspect.Signature(parameters),
        {**implied, "inplace": True} if overload._schema.is_mutable else implied,
        {
            parameter.name: names[parameter.name]
            for parameter in parameters
            if parameter.name in names
        },
        0 if len(overload._schema.returns) > 1 else None,
    )


_FUNCTIONS: dict[object, _Spelling] = {
    F.linear: _spell("linear", _linear),
    F.group_norm: _spell("group_norm", F.group_norm),
    # Unlike F.group_norm it does not refuse groups of one value.
    torch.group_norm: _spell("group_norm", _group_norm, verify_batch_size=False),
    F.hardtanh: _spell("hardtanh", F.hardtanh),
    F.hardtanh_: _spell("hardtanh", _hardtanh_, inplace=True),
    F.relu6: _spell("relu6", F.relu6),
    F.relu: _spell("relu", F.relu),
    F.silu: _spell("silu", F.silu),
    F.gelu: _spell("gelu", _gelu),
    F.hardswish: _spell("hardswish", F.hardswish),
    F.leaky_relu: _spell("leaky_relu", F.leaky_relu),
    F.leaky_relu_: _spell("leaky_relu", _leaky_relu_, inplace=True),
    F.sigmoid: _spell("sigmoid", F.sigmoid),
    torch.special.expit: _spell("sigmoid", _unary_out),
    F.tanh: _spell("tanh", F.tanh),
    operator.mul: _spell("mul", _binary),
    **dict.fromkeys((operator.imul, AUGMENTED["__imul__"]), _spell("mul", _binary, inplace=True)),
    operator.add: _spell("add", _binary),
    **dict.fromkeys((operator.iadd, AUGMENTED["__iadd__"]), _spell("add", _binary, inplace=True)),
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
    **{getattr(torch, name): spelling for name, spelling in _NAMES.items()},
    **{getattr(torch.Tensor, name): spelling for name, spelling in _METHODS.items()},
    **dict(_operators()),
}

# The operation of a module, and those of its attributes that are the operation's arguments.
_MODULES: dict[type[nn.Module], tuple[str, tuple[str, ...]]] = {
    nn.Linear: ("linear", ("weight", "bias")),
    nn.GroupNorm: ("group_norm", ("num_groups", "num_channels", "weight", "bias", "eps")),
    nn.Hardtanh: ("hardtanh", ("min_val", "max_val", "inplace")),
    nn.ReLU6: ("hardtanh", ("min_val", "max_val", "inplace")),
    nn.ReLU: ("relu", ("inplace",)),
    nn.SiLU: ("silu", ("inplace",)),
    nn.GELU: ("gelu", ("approximate",)),
    nn.Hardswish: ("hardswish", ("inplace",)),
    nn.LeakyReLU: ("leaky_relu", ("negative_slope", "inplace")),
    nn.Sigmoid: ("sigmoid", ()),
    nn.Tanh: ("tanh", ()),
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


# As torch has them: a program may give a class of torch's another.
_FORWARDS = {cls: cls.forward for cls in _MODULES}


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
        return _read_linear(node) if spelling is None else spelling.read(node)
    if node.op == "call_method" and (spelling := _METHODS.get(str(node.target))) is not None:
        return spelling.read(node)
    return None


def _read_module(path: str, root: nn.Module, node: fx.Node) -> Reading | None:
    module = root.get_submodule(path)
    known = next((cls for cls in type(module).__mro__ if cls in _MODULES), None)
    arguments = None if known is None else _bind(_UNARY, node)
    if known is None or arguments is None:
        return None
    operation, names = _MODULES[known]
    for name in names:
        value = getattr(module, name, None)
        if isinstance(value, torch.Tensor):
            value = Attribute(f"{path}.{name}", value)
        arguments[name] = value
    return Reading(operation, arguments, obstacle(module, known))


_UNARY = inspect.signature(_unary)

_aten = torch.ops.aten
_VIEWS = frozenset({_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default})
_PRODUCTS = frozenset({_aten.mm.default, _aten.addmm.default})


def _read_linear(node: fx.Node) -> Reading | None:
    """A Linear in parts.

    That is the product with a transposed matrix, and for an input of more than two dimensions two
    views around it, which make its rows one dimension and undo that.
    """
    product = node.args[0] if node.target in _VIEWS else node
    if not isinstance(product, fx.Node) or product.target not in _PRODUCTS or product.kwargs:
        return None
    *bias, rows, matrix = product.args
    weight = _transposed(matrix)
    if weight is None or not isinstance(rows, fx.Node):
        return None
    input = rows
    if product is not node:
        if rows.target not in _VIEWS or not isinstance(rows.args[0], fx.Node):
            return None
        input = rows.args[0]
        given, made = value(input), value(node)
        if given is None or made is None or not same_sizes(given.shape[:-1], made.shape[:-1]):
            return None
    return Reading("linear", {"input": input, "weight": weight, "bias": bias[0] if bias else None})


def _transposed(node: Any) -> fx.Node | None:
    """The matrix that a node transposes."""
    if not isinstance(node, fx.Node) or not node.args:
        return None
    target, (matrix, *dimensions) = node.target, node.args
    swaps = (
        target is _aten.t.default
        or (target is _aten.permute.default and dimensions == [[1, 0]])
        or (target is _aten.transpose.int and dimensions in ([0, 1], [1, 0]))
    )
    return matrix if swaps and isinstance(matrix, fx.Node) else None


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
    if "forward" in vars(module) or known.forward is not _FORWARDS.get(known, known.forward):
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


_CONVOLUTIONS = {
    f"conv{kind}{rank}d": f"Conv{kind.title().strip('_')}{rank}d"
    for kind in ("", "_transpose")
    for rank in (1, 2, 3)
}


def name(node: fx.Node, root: nn.Module) -> str:
    """What a node is called in a report: `Conv2d`, `add`, `input`."""
    if node.op == "call_module":
        return type(root.get_submodule(str(node.target))).__name__
    if node.op == "placeholder":
        return "input"
    if node.target is _aten.convolution.default:
        _, _, _, stride, _, _, transposed, *_ = node.args
        return f"Conv{'Transpose' if transposed else ''}{len(cast('list[int]', stride))}d"
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        target = target.overloadpacket
    known = str(getattr(target, "__name__", target))
    return _CONVOLUTIONS.get(known, known) if node.op == "call_function" else known


def attribute(node: fx.Node, root: nn.Module) -> Any:
    """What a `get_attr` node reads now; None for any other node."""
    if node.op != "get_attr":
        return None
    value: Any = root
    for part in str(node.target).split("."):
        value = getattr(value, part, None)
    return value


def is_view(node: fx.Node) -> bool:
    """Whether a node gives the tensor that it reads, or a part or another view of it."""
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    return (
        node.op != "get_attr"
        and len(node.all_input_nodes) == 1
        and (name in _GIVE_VIEWS or str(name).endswith("_"))
    )


_GIVE_VIEWS = frozenset(
    {"getattr", "getitem", "detach", "view", "view_as", "reshape", "flatten", "t", "transpose"}
    | {"permute", "squeeze", "unsqueeze", "expand", "narrow", "select", "chunk", "split", "unbind"}
)


def value(node: fx.Node) -> torch.Tensor | None:
    """The fake tensor that export, AOT (`val`) or Dynamo (`example_value`) has recorded."""
    recorded = node.meta.get("val", node.meta.get("example_value"))
    return recorded if isinstance(recorded, torch.Tensor) else None


def hint(number: Any) -> Any:
    """The number itself, or what a symbol stood for when it was traced; None if that is unknown."""
    if isinstance(number, (torch.SymInt, torch.SymFloat)):
        return number.node.hint if number.node.has_hint() else None
    return number


def same_sizes(ours: Sequence[Any], theirs: Sequence[Any]) -> bool:
    """Whether sizes are known to be the same: numbers, symbols, or nodes that compute them."""
    return len(ours) == len(theirs) and all(map(_same_size, ours, theirs))


def _same_size(one: Any, other: Any) -> bool:
    if isinstance(other, fx.Node):
        other = other.meta.get("val")
    if type(one) is int and type(other) is int:
        return one == other
    if not isinstance(other, (int, torch.SymInt)):
        return False
    # Here, because the module that reasons about symbols takes long to import.
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(one == other)


def dtype(node: fx.Node, root: nn.Module) -> torch.dtype | None:
    """The dtype of a node's result, where every run of the graph must give it that one.

    It is known from a cast, from the fake value that export and Dynamo record, and for a float32
    that goes through a norm: outside autocast that keeps the dtype, and under it gives float32.
    """
    if (recorded := value(node)) is not None:
        return recorded.dtype
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


# What the result of an activation shares with its input, and what reads no more than that.
_MEASURES = frozenset({"shape", "ndim", "dtype", "device", "is_cuda", "is_cpu"})
_MEASURING_METHODS = frozenset(
    {"size", "dim", "ndimension", "numel", "nelement", "get_device", "is_floating_point"}
)
_MEASURING_FUNCTIONS = frozenset(
    {
        torch.numel,
        torch.is_floating_point,
        _aten.sym_size.int,
        _aten.sym_size.default,
        _aten.sym_numel.default,
    }
)


def measures(node: fx.Node) -> bool:
    """Whether a node reads of its input only the shape, the dtype or the device."""
    if node.target is getattr:
        return len(node.args) > 1 and node.args[1] in _MEASURES
    if node.op == "call_method":
        return node.target in _MEASURING_METHODS
    if node.target is _aten._assert_tensor_metadata.default:
        _, _, stride, *_ = *node.args, None, None
        return stride is None and node.kwargs.get("stride") is None
    return node.op == "call_function" and node.target in _MEASURING_FUNCTIONS


# What gives a new tensor, unless it is told to write to an old one.
_FRESH = frozenset(
    {"linear", "relu", "relu6", "hardtanh", "clamp", "silu", "gelu", "hardswish", "leaky_relu"}
    | {"sigmoid", "tanh", "mul", "add"}
)
_FRESH_FUNCTIONS = frozenset(
    {_aten.convolution.default}
    | {getattr(torch, function) for function in _CONVOLUTIONS}
    | {getattr(_aten, function).default for function in _CONVOLUTIONS if "trans" not in function}
)
_FRESH_MODULES = frozenset(getattr(nn, module) for module in _CONVOLUTIONS.values())


def is_fresh(node: fx.Node, root: nn.Module) -> bool:
    """Whether a node's result is a new tensor: a product, a convolution, an activation, a sum."""
    if node.op == "call_function" and node.target in _FRESH_FUNCTIONS:
        return True
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        if type(module) in _FRESH_MODULES:
            return obstacle(module, type(module)) is None
    reading = read(node, root)
    if reading is None or reading.obstacle or reading.operation not in _FRESH:
        return False
    given = reading.arguments
    return given.get("out") is None and given.get("inplace", False) is False


# They fail where the strides do not suit them.
_STRICT_METHODS = frozenset({"view", "view_as"})
_STRICT_FUNCTIONS = frozenset(
    {torch.Tensor.view, torch.Tensor.view_as, _aten.view.default, _aten._unsafe_view.default}
)


def viewed(graph: fx.Graph) -> frozenset[fx.Node]:
    """The nodes from whose results something is made on which a `view` is asked for.

    `view` fails where the strides do not suit it, so whoever changes strides asks this first.
    What lies between is not judged, except that `contiguous` makes any strides good.
    """
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "call_method":
            strict = node.target in _STRICT_METHODS
        else:
            strict = node.op == "call_function" and node.target in _STRICT_FUNCTIONS
        if node in found and node.target != "contiguous" and not measures(node):
            found.update(node.all_input_nodes)
        elif strict:
            found.update(node.all_input_nodes[:1])
    return frozenset(found)
