"""The table of fusions: the one file that knows both what nodes say and what the operator takes.

To add an activation that the operator knows, add its spellings to `nodes` and its row to
`_ACTIVATIONS` here.  To add a pattern, add a `Fusion` to `fusions`.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from fxfuse import library, nodes, ops, rewrite
from fxfuse.nodes import Attribute
from fxfuse.rewrite import Fusion, FusionReport, Match, Part, Reason, Refusal, Site


def fuse(graph_module: fx.GraphModule, *, channels_last: ops.ChannelsLast = "keep") -> FusionReport:
    """Replaces every GroupNorm and the activation after it in a graph by one operator, in place.

    Results, gradients, `state_dict` and submodules stay what they were; only nodes change.  Tensors
    are read when the graph runs; numbers such as eps and bounds, and which modules carry hooks, are
    read now.  Running it twice changes nothing.  The graphs that an operator runs, such as those
    under `torch.utils.checkpoint` or `torch.no_grad`, and the GraphModules that the graph calls are
    fused as well.

    Args:
        graph_module: What `torch.fx.symbolic_trace` returns, what Dynamo gives a backend, the graph
            of an exported program, decomposed or not, what AOT or `make_fx` returns, or a graph
            made by hand.
        channels_last: `"keep"` lets a channels_last input give a channels_last result on CUDA,
            `"eager"` makes it contiguous, as GroupNorm does.  Where the graph asks for a `view` of
            what is made from the result, it is always `"eager"`.

    Returns:
        One entry for each GroupNorm: fused, or the reason why not.

    Raises:
        TypeError: If it is another module.
    """
    if not isinstance(graph_module, fx.GraphModule):
        raise TypeError(
            "fxfuse.fuse: expected a GraphModule or an ExportedProgram, got "
            f"{type(graph_module).__name__}; fxfuse.optimize takes any model"
        )
    available, table = library.load(), fusions(channels_last)
    found: list[Site] = []
    for module in with_bodies(graph_module):
        sites = apply(module.graph, module, table, available=available)
        if any(site.match for site in sites):
            module.graph.lint()
            module.recompile()
        found += sites
    return FusionReport(tuple(found))


def with_bodies(graph_module: fx.GraphModule) -> list[fx.GraphModule]:
    """A graph module, those that it calls, and those that its operators run: checkpoint, cond."""
    found = [graph_module]
    for module in found:
        for node in module.graph.nodes:
            called = node.op == "call_module"
            body = module.get_submodule(node.target) if called else nodes.attribute(node, module)
            if isinstance(body, fx.GraphModule) and body not in found:
                found.append(body)
    return found


def apply(
    graph: fx.Graph,
    root: nn.Module,
    table: tuple[Fusion, ...],
    *,
    available: bool,
    judge: rewrite.Judge | None = None,
    named: Collection[str] = (),
) -> list[Site]:
    """`rewrite.apply` and `take_linears_in`.

    Args:
        graph: The graph, in place.
        root: The module that it addresses.
        table: The fusions.
        available: Whether the library is; if not, nothing is replaced, and the sites say so.
        judge: As in `rewrite.apply`.
        named: As in `take_linears_in`.
    """
    sites = rewrite.apply(graph, root, table, analyse_only=not available, judge=judge)
    if not available:
        return [
            site.with_reason(Reason.LIBRARY_UNAVAILABLE) if site.match else site for site in sites
        ]
    if any(site.match for site in sites) and ops.may_have_linear_kernel():
        return with_choices(sites, take_linears_in(graph, root, named=named))
    return sites


def with_choices(sites: list[Site], choices: list[LinearChoice]) -> list[Site]:
    """Sites that say what became of the Linears ahead of them."""
    sentences = {choice.linear: str(choice) for choice in choices}
    return [
        replace(site, reason=f"{site.reason} {sentences[site.match.producer]}")
        if site.match and site.match.producer in sentences
        else site
        for site in sites
    ]


def fusions(
    channels_last: ops.ChannelsLast = "keep", *, residuals: bool = True, alone: bool = False
) -> tuple[Fusion, ...]:
    """The table, the more special rows first.

    Args:
        channels_last: As in `fuse`.
        residuals: Whether to take in a residual that is added in between.  Whether the operator may
            add it depends on its size, dtype and layout, at which our function looks in each call.
        alone: Whether to replace norms that no activation follows, too.  It is worth it where
            torch's own GroupNorm would run, but a compiler may have better to do with them.

    Raises:
        ValueError: If it is neither.
    """
    if channels_last not in ("keep", "eager"):
        raise ValueError(
            f"fxfuse: expected channels_last to be 'keep' or 'eager', got {channels_last!r}"
        )
    row = functools.partial(
        Fusion,
        producer=nodes.name,
        transparent=_transparent,
        measures=nodes.measures,
        fresh=nodes.is_fresh,
        survey=nodes.viewed,
        target=ops.group_norm_activation,
        arguments=functools.partial(_arguments, channels_last=channels_last),
    )
    with_residual = functools.partial(row, target=ops.group_norm_add_activation)
    chain = (_group_norm, _activation)
    rows = [
        row(name="Linear -> GroupNorm -> activation", steps=chain, producer=_linear),
        row(name="GroupNorm -> activation", steps=chain),
    ]
    if residuals:
        steps = (_group_norm, _residual, _activation)
        rows.append(with_residual(name="GroupNorm -> add -> activation", steps=steps))
    if alone:
        rows.append(with_residual(name="GroupNorm -> add", steps=(_group_norm, _residual)))
        rows.append(
            row(
                name="GroupNorm alone",
                steps=chain[:1],
                # what is written to afterwards is the operator's result just as well
                instead=frozenset(
                    {
                        Reason.NO_ACTIVATION,
                        Reason.GRAPH_OUTPUT,
                        Reason.OTHER_READER,
                        Reason.WRITTEN_IN_PLACE,
                    }
                ),
                outcome=Reason.ALONE,
            )
        )
    return tuple(rows)


@dataclass(frozen=True)
class LinearChoice:
    """What became of a Linear that feeds a call of our operator and nothing else.

    Attributes:
        linear: Its node, which is gone from the graph if it was taken in.
        taken: Whether one call computes both.
        reason: Why, or why not, as a clause; empty where that shows only when the graph runs.
    """

    linear: fx.Node
    taken: bool
    reason: str

    def __str__(self) -> str:
        if not self.taken:
            return f"The Linear has a kernel of its own: {self.reason}."
        if not self.reason:
            return "On a GPU that can, one kernel computes the Linear as well."
        return f"Without gradients, one kernel computes the Linear as well: {self.reason}."


def take_linears_in(
    graph: fx.Graph, root: nn.Module, *, named: Collection[str] = ()
) -> list[LinearChoice]:
    """Puts one operator in the place of ours and of the Linear that feeds it, in place.

    Only where nothing else reads the Linear's result, nothing happens between the two, and nothing
    that is known before the graph runs speaks against one kernel.

    Args:
        graph: A graph in which `rewrite.apply` has replaced chains.
        root: The module that the graph addresses.
        named: Names of values that must stay.
    """
    choices: list[LinearChoice] = []
    for call in list(graph.nodes):
        if call.target is not ops.group_norm_activation:
            continue
        # As `_arguments` has them; someone else may have written anything.
        if len(call.args) != 2 or type(call.args[1]) is not int or "activation" not in call.kwargs:
            continue
        linear = call.args[0]
        if not isinstance(linear, fx.Node) or set(linear.users) != {call} or linear.name in named:
            continue
        reading = nodes.read(linear, root)
        if reading is None or reading.operation != "linear" or _obstacle(reading, linear, root):
            continue
        if linear.op != "call_module" and linear.target not in _LINEARS:
            continue  # an addmm takes biases that are no Linear's
        # The layout of the result and the dtype of the norm alone are not the operator's to choose.
        if not {"weight", "bias", "eps", "activation", "params", "verify_batch_size"}.issuperset(
            call.kwargs
        ):
            continue
        # What is written between the two, the Linear must not see.
        node = linear.next
        while node.op == "get_attr":
            node = node.next
        if node is not call:
            continue
        choice = _choose_kernel(reading, linear, call, root)
        choices.append(choice)
        if not choice.taken:
            continue
        operands = [reading.arguments[name] for name in ("input", "weight", "bias")]
        with graph.inserting_before(call):
            operands = [
                graph.create_node("get_attr", value.path) if isinstance(value, Attribute) else value
                for value in operands
            ]
            whole = graph.call_function(
                ops.linear_group_norm_activation,
                (*operands, *call.args[1:]),
                dict(call.kwargs),
                type_expr=call.type,
            )
        whole.meta = dict(call.meta)
        call.replace_all_uses_with(whole)
        graph.erase_node(call)
        graph.erase_node(linear)
    if any(choice.taken for choice in choices):
        ops.register_flops()
    return choices


_LINEARS = (F.linear, torch.ops.aten.linear.default)


def _choose_kernel(
    reading: nodes.Reading, linear: fx.Node, call: fx.Node, root: nn.Module
) -> LinearChoice:
    """What is known of a Linear and our call behind it before they run.

    A graph without values may run in any dtype and on any device, on any number of rows.
    """
    weight, bias = (_tensor(reading.arguments[name], root) for name in ("weight", "bias"))
    affine = _tensor(call.kwargs.get("weight"), root)
    result, num_groups = nodes.value(linear), cast(int, call.args[1])
    for name, given in (("weight", weight), ("bias", bias)):
        if is_traceable_wrapper_subclass(given) or ops.have_own_functions(given):
            return LinearChoice(linear, False, f"its {name} is a {type(given).__name__}")
    if weight is not None and not _are_a_linears(weight, bias):
        return LinearChoice(linear, False, "its weight or bias has not the shape of a Linear's")
    if weight is None or (result is None and not weight.is_cuda):
        return LinearChoice(linear, True, "")  # it may be moved yet
    out_features, in_features = weight.shape
    rows: Any = 1 << 20
    dtype, output_dtype = weight.dtype, None
    if result is not None:
        if result.dim() != 2:
            return LinearChoice(linear, False, "its result has not two dimensions")
        whole = nodes.value(call)
        rows = nodes.hint(result.shape[0])
        dtype, output_dtype = result.dtype, None if whole is None else whole.dtype
    if not all(type(n) is int for n in (rows, in_features, out_features)):
        return LinearChoice(linear, True, "")
    if out_features % num_groups or (affine is not None and affine.numel() != out_features):
        return LinearChoice(linear, False, "its result has not two dimensions")  # or it raises
    kernel = functools.partial(
        ops.linear_kernel,
        rows,
        in_features,
        out_features,
        num_groups,
        cast(str, call.kwargs["activation"]),
        device=weight.device,
        affine_dtype=None if affine is None else affine.dtype,
    )
    served, reason = kernel(dtype=dtype, output_dtype=output_dtype)
    if not served and result is None and dtype == torch.float32:
        served, in_16_bits = kernel(dtype=torch.bfloat16, output_dtype=torch.float32)
        if served:
            reason = f"only under autocast ({reason}), {in_16_bits}"
    return LinearChoice(linear, served, reason)


def _are_a_linears(weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether a weight and a bias have the shapes of a Linear's: `F.linear` takes others as well.

    It takes one row for its weight, and a bias that broadcasts.
    """
    if weight.dim() != 2:
        return False
    return bias is None or nodes.same_sizes(bias.shape, weight.shape[:1])


# ---- the steps of a chain -------------------------------------------------------------------


def _linear(node: fx.Node, root: nn.Module) -> str | None:
    reading = nodes.read(node, root)
    return "Linear" if reading is not None and reading.operation == "linear" else None


@dataclass(frozen=True)
class _Norm:
    num_groups: int
    eps: float
    weight: fx.Node | Attribute | None
    bias: fx.Node | Attribute | None
    verify_batch_size: bool
    autocast: bool


def _group_norm(node: fx.Node, root: nn.Module) -> Part | None:
    if node.op == "call_function" and (function := _ours(node.target)) is not None:
        return _already_fused(node, function)
    reading = nodes.read(node, root)
    if reading is None or reading.operation != "group_norm" or reading.input is None:
        return None
    arguments = reading.arguments
    norm = _norm(arguments, root)
    refusal = _obstacle(reading, node, root)
    if refusal is None and isinstance(norm, Refusal):
        refusal = norm
    if refusal is None and not _has_its_sizes(reading):
        refusal = Reason.OTHER_SIZES.because(name=node.name)
    sizes = (arguments["num_groups"], arguments.get("num_channels"))
    text = f"{_label('GroupNorm', node, root)}({', '.join(str(n) for n in sizes if n is not None)})"
    return Part(node, text, reading.input, index=reading.index, data=norm, refusal=refusal)


def _has_its_sizes(reading: nodes.Reading) -> bool:
    """Whether the sizes that `native_group_norm` is told are known to be those of its input.

    It takes any that have the same product, and N and C decide which values make a group.
    """
    if "HxW" not in reading.arguments:
        return True
    value = None if reading.input is None else nodes.value(reading.input)
    told = [reading.arguments[name] for name in ("N", "C")]
    return value is not None and nodes.same_sizes(value.shape[:2], told)


def _ours(target: object) -> Callable[..., Any] | None:
    """Our function, where a target is that or its operator, as exported programs have it."""
    for function in ops.FUNCTIONS:
        if target is function:
            return function
        if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            name = str(target).partition(".default")[0]
            if name == f"fxfuse.{function.__name__}":
                return function
    return None


def _already_fused(node: fx.Node, function: Callable[..., Any]) -> Part:
    names = inspect.signature(function).parameters
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    activation = _text(str(given.get("activation", "identity")), given.get("params", ()))
    value = given.get("input")
    return Part(
        node,
        f"GroupNorm({given.get('num_groups')})",
        value if isinstance(value, fx.Node) else None,
        refusal=Reason.ALREADY_FUSED.because(activation=activation),
    )


def _norm(arguments: Mapping[str, Any], root: nn.Module) -> _Norm | Refusal:
    num_groups, eps = arguments["num_groups"], arguments["eps"]
    if type(num_groups) is not int:
        return Reason.COMPUTED_ARGUMENT.because(name="num_groups", kind=_kind(num_groups))
    if not _is_number(eps):
        return Reason.COMPUTED_ARGUMENT.because(name="eps", kind=_kind(eps))
    if num_groups < 1:
        return Reason.BAD_NUM_GROUPS.because(num_groups=num_groups, num_channels="any")
    for name in ("weight", "bias"):
        given = arguments[name]
        if given is not None and not isinstance(given, (fx.Node, Attribute)):
            return Reason.BAD_AFFINE.because(name=name)
        # A tensor that the graph computes is known only when it runs; the operator checks it then.
        value = _tensor(given, root)
        if value is not None and all(type(size) is int for size in value.shape):
            num_channels = arguments.get("num_channels", value.numel())
            if value.shape != (num_channels,) or not value.is_floating_point():
                return Reason.BAD_AFFINE.because(name=name)
            if num_channels % num_groups:
                return Reason.BAD_NUM_GROUPS.because(
                    num_groups=num_groups, num_channels=num_channels
                )
    return _Norm(
        num_groups,
        float(eps),
        arguments["weight"],
        arguments["bias"],
        arguments.get("verify_batch_size", True),
        arguments.get("autocast", True),
    )


def _tensor(given: Any, root: nn.Module) -> torch.Tensor | None:
    """The tensor that an argument is, or one like it, where that is known before the graph runs."""
    found = given.value if isinstance(given, Attribute) else None
    if isinstance(given, fx.Node):
        found = nodes.attribute(given, root)
        found = nodes.value(given) if found is None else found
    return found if isinstance(found, torch.Tensor) else None


def _residual(node: fx.Node, root: nn.Module) -> Part | None:
    """The sum with another tensor."""
    reading = nodes.read(node, root)
    if reading is None or reading.operation != "add" or reading.input is None:
        return None
    other = reading.arguments["other"]
    if not isinstance(other, fx.Node) or reading.arguments.get("alpha", 1) != 1:
        return None
    if reading.arguments.get("out") is not None:
        return None
    return Part(node, "+", reading.input, reading.inplace, others=(other,))


@dataclass(frozen=True)
class _Activation:
    name: str
    params: tuple[float, ...] = ()


def _activation(node: fx.Node, root: nn.Module) -> Part | None:
    reading = nodes.read(node, root)
    if reading is None or reading.input is None:
        return None
    part = None
    if reading.operation == "cast":
        part = _widened(reading, node, root)
    elif reading.operation == "sigmoid":
        part = _silu_in_parts(reading, node, root)
    elif reading.operation == "add":
        part = _hardswish_in_parts(reading, node, root)
    if part is not None or reading.operation not in _ACTIVATIONS:
        return part
    activation = _ACTIVATIONS[reading.operation](reading.arguments)
    refusal = _obstacle(reading, node, root)
    if refusal is None and isinstance(activation, Refusal):
        refusal = activation
    if refusal is None and reading.arguments.get("out") is not None:
        refusal = Reason.OUT_ARGUMENT.because()
    params = () if isinstance(activation, Refusal) else activation.params
    text = _text(_label(_LABELS[reading.operation], node, root), params)
    return Part(node, text, reading.input, reading.inplace, data=activation, refusal=refusal)


def _widened(reading: nodes.Reading, node: fx.Node, root: nn.Module) -> Part | None:
    """An activation that a 16-bit value goes through in float32, as decompositions have it.

    The kernels compute in float32 anyway.
    """
    given, made = _cast(reading, root)
    if given not in (torch.float16, torch.bfloat16) or made is not torch.float32:
        return None
    part = next((part for reader in node.users if (part := _activation(reader, root))), None)
    if part is None or part.input is not node:
        return None
    if part.refusal is not None:
        return Part(node, part.text, reading.input, refusal=part.refusal)
    for last in part.node.users:
        back = nodes.read(last, root)
        if back is not None and back.operation == "cast" and _cast(back, root) == (made, given):
            inner = (node, *part.inner, part.node)
            return Part(last, part.text, reading.input, inner=inner, data=part.data)
    return None


def _cast(reading: nodes.Reading, root: nn.Module) -> tuple[torch.dtype | None, Any]:
    """The dtypes before and after a cast that changes nothing else; two None for any other."""
    harmless = {"input", "dtype", "copy", "non_blocking"}
    if reading.input is None or any(
        value for name, value in reading.arguments.items() if name not in harmless
    ):
        return None, None
    return nodes.dtype(reading.input, root), reading.arguments["dtype"]


def _silu_in_parts(reading: nodes.Reading, node: fx.Node, root: nn.Module) -> Part | None:
    """`y * sigmoid(y)`, of which the sigmoid comes first."""
    if reading.inplace or reading.obstacle or reading.arguments.get("out") is not None:
        return None
    for last in node.users:
        product = nodes.read(last, root)
        if product is not None and _factors(product) == {reading.input, node}:
            same_tensor = product.inplace and product.input is reading.input
            data = _Activation("silu")
            return Part(last, "SiLU", reading.input, same_tensor, inner=(node,), data=data)
    return None


def _hardswish_in_parts(reading: nodes.Reading, node: fx.Node, root: nn.Module) -> Part | None:
    """`y * clamp(y + 3, 0, 6) / 6`, of which the sum comes first; the clamp may be two."""
    ends, bounded = [node], False
    for _ in range(2):
        for reader in ends[-1].users:
            found = nodes.read(reader, root)
            if found is not None and found.operation in ("clamp", "hardtanh", "relu6"):
                ends.append(reader)
                bounded = True
                break
    products = (nodes.read(reader, root) for reader in ends[-1].users)
    wanted = {reading.input, ends[-1]}
    if not bounded or not any(product and _factors(product) == wanted for product in products):
        return None
    # torch's kernel has a gradient of 0 at -3 and of 1 at 3, autograd makes -0.5 and 1.5.
    refusal = Reason.OTHER_GRADIENT.because(name="hardswish", where="-3 and 3")
    return Part(node, "Hardswish", reading.input, refusal=refusal)


def _factors(reading: nodes.Reading) -> set[object]:
    if reading.operation != "mul":
        return set()
    factors = (reading.arguments["input"], reading.arguments["other"])
    return {factor for factor in factors if isinstance(factor, fx.Node)}


def _hardtanh(arguments: Mapping[str, Any]) -> _Activation | Refusal:
    bounds = _bounds(min_val=arguments["min_val"], max_val=arguments["max_val"])
    if isinstance(bounds, Refusal):
        return bounds
    low, high = bounds
    if low > high:
        return Reason.CROSSED_BOUNDS.because(low=low, high=high)
    return _Activation("hardtanh", bounds)


def _clamp(arguments: Mapping[str, Any]) -> _Activation | Refusal:
    low, high = arguments["min"], arguments["max"]
    if low is None and high is None:
        return Reason.NO_BOUND.because()
    bounds = _bounds(
        min=-math.inf if low is None else low,
        max=math.inf if high is None else high,
    )
    if isinstance(bounds, Refusal):
        return bounds
    name = clamp_activation()
    return Reason.CLAMP_GRADIENT.because() if name is None else _Activation(name, bounds)


def _gelu(arguments: Mapping[str, Any]) -> _Activation | Refusal:
    names = {"none": "gelu", "tanh": "gelu_tanh"}
    approximate = arguments["approximate"]
    if isinstance(approximate, str) and approximate in names:
        return _Activation(names[approximate])
    return Reason.COMPUTED_ARGUMENT.because(name="approximate", kind=_kind(approximate))


def _leaky_relu(arguments: Mapping[str, Any]) -> _Activation | Refusal:
    slope = arguments["negative_slope"]
    if not _is_number(slope):
        return Reason.COMPUTED_ARGUMENT.because(name="negative_slope", kind=_kind(slope))
    return _Activation("leaky_relu", (float(slope),))


_ACTIVATIONS: dict[str, Callable[[Mapping[str, Any]], _Activation | Refusal]] = {
    "hardtanh": _hardtanh,
    "clamp": _clamp,
    "relu": lambda arguments: _Activation("relu"),
    "relu6": lambda arguments: _Activation("relu6"),
    "silu": lambda arguments: _Activation("silu"),
    "gelu": _gelu,
    "hardswish": lambda arguments: _Activation("hardswish"),
    "leaky_relu": _leaky_relu,
    "sigmoid": lambda arguments: _Activation("sigmoid"),
    "tanh": lambda arguments: _Activation("tanh"),
}

_LABELS = {
    "hardtanh": "Hardtanh",
    "clamp": "clamp",
    "relu": "ReLU",
    "relu6": "ReLU6",
    "silu": "SiLU",
    "gelu": "GELU",
    "hardswish": "Hardswish",
    "leaky_relu": "LeakyReLU",
    "sigmoid": "Sigmoid",
    "tanh": "Tanh",
}


def _bounds(**bounds: Any) -> tuple[float, ...] | Refusal:
    for name, bound in bounds.items():
        if not _is_number(bound):
            return Reason.TENSOR_BOUND.because(name=name, kind=_kind(bound))
        if math.isnan(bound):
            return Reason.NAN_BOUND.because(name=name)
    return tuple(float(bound) for bound in bounds.values())


@functools.cache
def clamp_activation() -> str | None:
    """The activation whose gradient is that of the installed torch's clamp.

    Returns:
        `"clamp"` where the gradient passes on a bound and not at NaN (torch 2.11 to 2.13),
        `"open_clamp"` where it passes at neither (torch 2.14), `"hardtanh"` where it passes at NaN
        only, None where it is none of these.
    """
    clamps: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
        lambda x: x.clamp(0, 1),
        lambda x: x.clamp(min=1),
        lambda x: x.clamp(max=1),
        lambda x: x.clamp_min(1),
        lambda x: x.clamp_max(1),
    )
    rules: set[tuple[float, ...]] = set()
    # Whoever calls may be tracing, or have turned gradients off.
    with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad():
        for clamp in clamps:
            x = torch.tensor([1.0, math.nan], device="cpu", requires_grad=True)
            (grad,) = torch.autograd.grad(clamp(x).sum(), x)
            rules.add(tuple(grad.tolist()))
    names: dict[tuple[float, ...], str] = {
        (1.0, 0.0): "clamp",
        (0.0, 0.0): "open_clamp",
        (0.0, 1.0): "hardtanh",
    }
    return names.get(rules.pop()) if len(rules) == 1 else None


def _transparent(node: fx.Node, root: nn.Module) -> Part | None:
    reading = nodes.read(node, root)
    if reading is None or reading.operation not in ("identity", "dropout", "cast", "clone"):
        return None
    if reading.arguments.get("memory_format") not in (None, torch.preserve_format):
        return None
    text = nodes.name(node, root)
    refusal = _obstacle(reading, node, root)
    if refusal is None and reading.operation == "dropout":
        # Whether it is training decides when the graph runs, so only p = 0 is nothing.
        p = reading.arguments["p"]
        if isinstance(p, fx.Node) or p != 0:
            refusal = Reason.DROPOUT.because(p=p)
    if refusal is None and reading.operation == "cast":
        given, made = _cast(reading, root)
        if given is None or given is not made:
            refusal = Reason.CAST.because(cast=text)
    copies = reading.operation == "clone" or bool(reading.arguments.get("copy"))
    return Part(node, text, reading.input, same_tensor=not copies, refusal=refusal)


def _obstacle(reading: nodes.Reading, node: fx.Node, root: nn.Module) -> Refusal | None:
    if reading.obstacle is None:
        return None
    return Reason[reading.obstacle.upper()].because(module=nodes.name(node, root))


def _label(name: str, node: fx.Node, root: nn.Module) -> str:
    """The module's class for a module, else a name."""
    return nodes.name(node, root) if node.op == "call_module" else name


def _text(label: str, params: Any) -> str:
    if isinstance(params, fx.Node):  # someone has written our call with bounds that are computed
        params = [params]
    texts = (f"{param:g}" if _is_number(param) else str(param) for param in params)
    return f"{label}({', '.join(texts)})" if params else label


def _is_number(value: object) -> bool:
    """Whether a value is a number that torch takes for a scalar; a bool is not meant as one."""
    return type(value) is float or (type(value) is int and -(2**63) <= value < 2**63)


def _kind(value: object) -> str:
    return "value that the graph computes" if isinstance(value, fx.Node) else type(value).__name__


# ---- the call that takes their place --------------------------------------------------------


def _arguments(
    graph: fx.Graph, match: Match, viewed: frozenset[fx.Node], channels_last: ops.ChannelsLast
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the operator, without those that are its defaults."""
    norm: _Norm = match.parts[0].data
    activation = _Activation("identity")
    residual: tuple[fx.Node, ...] = ()
    kwargs: dict[str, Any] = {}
    for part in match.parts[1:]:
        if not part.others:
            activation = part.data
            continue
        residual = part.others
        if part.same_tensor:
            kwargs["add"] = "in place"
        elif part.exchanged:
            kwargs["add"] = "residual first"
    for name, value in (("weight", norm.weight), ("bias", norm.bias)):
        if isinstance(value, Attribute):
            # Not graph.get_attr: it looks the path up for a warning, which lint does as well.
            kwargs[name] = graph.create_node("get_attr", value.path)
        elif value is not None:
            kwargs[name] = value
    if norm.eps != 1e-5:
        kwargs["eps"] = norm.eps
    kwargs["activation"] = activation.name
    if activation.params:
        kwargs["params"] = activation.params
    if channels_last == "eager" or not viewed.isdisjoint(match.nodes):
        kwargs["channels_last"] = "eager"
    if not norm.verify_batch_size:
        kwargs["verify_batch_size"] = False
    if not norm.autocast:
        kwargs["autocast"] = False
    return (match.parts[0].input, *residual, norm.num_groups), kwargs
