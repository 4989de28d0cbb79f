"""Keeps only what wins: times each site fused against what the inner compiler makes of it.

Inductor fuses norm and activation too, and what lies around them, such as the addition of a
residual, to which our operator is a barrier.  Which is faster depends on shapes and machine, so
both are compiled and timed: not the whole graph, in which one site is lost in the noise, but the
window of the graph that Inductor could fuse with the norm.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator

from fxfuse import nodes, patterns, rewrite
from fxfuse.rewrite import Fusion, Match

Compiler = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
"""Takes a graph and example inputs, and returns a function of such inputs."""


@dataclass(frozen=True)
class Times:
    """What one site's window takes, in microseconds, with gradients where the model trains."""

    fused: float
    unfused: float

    def __str__(self) -> str:
        return f"{self.fused:.4g} µs, {self.unfused:.4g} µs without it"


def measure(function: Callable[[], Any], device: torch.device) -> float:
    """The time of a call in microseconds, as Inductor itself measures what it chooses among."""
    from torch._inductor.runtime.benchmarking import benchmarker

    return 1e3 * float(benchmarker.benchmark(function, device=device))


def times(
    graph_module: fx.GraphModule,
    table: tuple[Fusion, ...],
    compiler: Compiler,
    settings: Hashable,
) -> dict[fx.Node, Times]:
    """Times the sites of a graph of Dynamo's that could be fused.

    Args:
        graph_module: The graph, which stays as it is.
        table: The fusions.
        compiler: What will compile the graph.
        settings: What the compiler's work depends on.  Windows that are alike are timed once.

    Returns:
        By the last node of each chain, the times; without those that cannot be timed because their
        sizes depend on data.
    """
    sites = rewrite.apply(graph_module.graph, graph_module, table, analyse_only=True)
    matches = [site.match for site in sites if site.match is not None]
    chains = {node for match in matches for node in match.nodes}
    found = {}
    for match in matches:
        window = _Window.around(match, chains)
        try:
            found[match.parts[-1].node] = _time(window, table, compiler, settings)
        except _Unknown:
            continue
    return found


_known: dict[Hashable, Times] = {}


def reset() -> None:
    """Forgets what was timed."""
    _known.clear()


class _Unknown(Exception):
    """A size or a number that is known only when the graph runs."""


def _time(
    window: _Window, table: tuple[Fusion, ...], compiler: Compiler, settings: Hashable
) -> Times:
    given = [_example(node) for node in window.inputs]
    device = next(value.device for value in given if isinstance(value, Tensor))
    modes = (
        window.modes,
        torch.is_grad_enabled(),
        torch.is_autocast_enabled(device.type),
        torch.get_autocast_dtype(device.type),
    )
    key = (window.graph_module().code, *map(_describe, given), modes, settings)
    if key not in _known:
        unfused, fused = window.graph_module(), window.graph_module()
        patterns.apply(fused.graph, fused, table, available=True)
        fused.recompile()
        # The compilation that is going on must not take these graphs, nor a backward that is
        # compiled only when it runs, for its own.
        at_once = torch._functorch.config.patch(force_non_lazy_backward_lowering=True)
        with torch._guards.tracing(None), at_once, window.autocast():
            calls = [_call(compiler(graph, given), given) for graph in (fused, unfused)]
            _known[key] = Times(*(measure(call, device) for call in calls))
    return _known[key]


def _example(node: fx.Node) -> Any:
    """A value like the one that a node will have."""
    value = node.meta.get("example_value")
    if not isinstance(value, Tensor):
        return _hint(value)
    sizes, strides = map(_hint, value.size()), map(_hint, value.stride())
    example = torch.empty_strided(
        tuple(sizes), tuple(strides), dtype=value.dtype, device=value.device
    )
    if not value.is_floating_point():
        return example.zero_()
    return example.normal_().requires_grad_(value.requires_grad)


def _hint(value: Any) -> Any:
    """The number that a symbol stood for when Dynamo met it."""
    known = nodes.hint(value)
    if known is None and value is not None:
        raise _Unknown
    return known


def _describe(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return (value.shape, value.stride(), value.dtype, value.device, value.requires_grad)


def _call(function: Callable[..., Any], given: list[Any]) -> Callable[[], Any]:
    """One step: the forward, and the backward where there are gradients."""
    leaves = [t for t in given if isinstance(t, Tensor) and t.requires_grad]
    outputs = [t for t in function(*given) if t.requires_grad]
    if not (leaves and outputs):
        return lambda: function(*given)
    cotangents = [torch.ones_like(t) for t in outputs]

    def step() -> Any:
        results = [t for t in function(*given) if t.requires_grad]
        return torch.autograd.grad(results, leaves, cotangents, allow_unused=True)

    return step


@dataclass(frozen=True)
class _Window:
    """The part of a graph around one chain that a compiler could fuse with it.

    Attributes:
        nodes: Its nodes, in order.
        inputs: The nodes outside whose values it reads.
        outputs: Its nodes whose values are read outside.
        modes: The arguments of the autocast regions that the chain lies in.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    modes: tuple[tuple[Any, ...], ...]

    @classmethod
    def around(cls, match: Match, chains: set[fx.Node]) -> _Window:
        inside = set(match.nodes)
        waiting = list(match.nodes)
        while waiting:
            node = waiting.pop()
            for other in (*node.all_input_nodes, *node.users):
                if other not in inside and other not in chains and _may_be_fused(other):
                    inside.add(other)
                    waiting.append(other)
        ordered = tuple(node for node in match.nodes[0].graph.nodes if node in inside)
        inputs = dict.fromkeys(n for node in ordered for n in node.all_input_nodes)
        return cls(
            ordered,
            tuple(node for node in inputs if node not in inside),
            tuple(node for node in ordered if not inside.issuperset(node.users)),
            _autocast_modes(match.nodes[0]),
        )

    def graph_module(self) -> fx.GraphModule:
        """A copy of it as a graph, in which names tell nothing of where it comes from."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for i, node in enumerate(self.inputs):
            copies[node] = graph.placeholder(f"x{i}")
        for i, node in enumerate(self.nodes):
            copies[node] = graph.create_node(
                node.op,
                node.target,
                fx.node.map_arg(node.args, copies.__getitem__),
                fx.node.map_arg(node.kwargs, copies.__getitem__),
                f"y{i}",
            )
        for node, copy in copies.items():
            if "example_value" in node.meta:
                copy.meta["example_value"] = node.meta["example_value"]
        graph.output(tuple(copies[node] for node in self.outputs))
        return fx.GraphModule({}, graph)

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """The modes that it runs under."""
        with contextlib.ExitStack() as stack:
            for device_type, dtype, enabled, cache_enabled in self.modes:
                stack.enter_context(torch.autocast(device_type, dtype, enabled, cache_enabled))
            yield


def _autocast_modes(node: fx.Node) -> tuple[tuple[Any, ...], ...]:
    modes: dict[fx.Node, tuple[Any, ...]] = {}
    for before in node.graph.nodes:
        if before is node:
            break
        name = getattr(before.target, "__name__", "")
        if name == "_enter_autocast":
            modes[before] = before.args
        elif name == "_exit_autocast":
            modes.pop(before.args[0], None)
    return tuple(modes.values())


def _may_be_fused(node: fx.Node) -> bool:
    """Whether a node is one whose time is that of its memory traffic.

    What counts as floating-point operations for torch, such as a matrix product, is not; nor are
    operators that call graphs, those whose sizes depend on data, and what is no tensor.
    """
    from torch.utils.flop_counter import FlopCounterMode

    if node.op not in ("call_function", "call_method") or nodes.value(node) is None:
        return False
    if isinstance(node.target, HigherOrderOperator) or node.meta.get("unbacked_bindings"):
        return False
    args = fx.node.map_arg(node.args, lambda n: n.meta.get("example_value"))
    kwargs = fx.node.map_arg(node.kwargs, lambda n: n.meta.get("example_value"))
    target: Any = node.target
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            if node.op == "call_method":
                getattr(args[0], target)(*args[1:], **kwargs)
            else:
                target(*args, **kwargs)
    except Exception:  # such as one that needs a mode: the window ends there
        return False
    return bool(counter.get_total_flops() == 0)
