"""Where a chain crosses from one module into another: which children a trace has to go through.

A child is a leaf of its parent's graph, so a norm that ends a child and the activation that
follows it in the parent, or that begins the next child, are in no graph together.  Each module's
own graph tells whether a chain may go on from its result, or may have begun before its input.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from fxfuse import nodes, rewrite, tracing
from fxfuse.rewrite import Fusion, Reader, Reason, Refusal
from fxfuse.tracing import Untraceable


@dataclass(frozen=True)
class _Leaving:
    """A chain that may go on from a value.

    Attributes:
        modules: Those to go through to it.
        step: The last step that it has come to, by its index.
    """

    modules: set[nn.Module]
    step: int


class Boundaries:
    """Finds the boundaries that the chains of a table of fusions cross."""

    def __init__(self, table: tuple[Fusion, ...]) -> None:
        self.table = table
        self.graphs: dict[nn.Module, fx.Graph | None] = {}

    def crossed(self, module: nn.Module, graph: fx.Graph) -> set[nn.Module]:
        """The modules below one that must be inlined for its graph to hold whole chains.

        Args:
            module: The module.
            graph: Its graph with its children as leaves.
        """
        found: set[nn.Module] = set()
        for node in graph.nodes:
            leaving = self._leaves(node, module)
            if leaving is None:
                continue
            entered = self._first(node, module, leaving.step)
            if entered is not None:
                found |= leaving.modules | entered
        return found

    def trace(self, module: nn.Module, pattern: str) -> tracing.Trace:
        """A module's graph, through the children whose boundary a chain crosses.

        Args:
            module: The module, in the training mode that the graph is for.
            pattern: Of the call (see `guards.Arguments`).

        Raises:
            Untraceable: If it has no graph.
        """
        trace = tracing.trace(module, (), pattern)
        if inlined := self.crossed(module, trace.graph):
            with contextlib.suppress(Untraceable):  # then the chain stays as it is
                through = tracing.trace(module, inlined, pattern)
                # The chains that do not cross are in the graphs of the children just as well.
                apart = {module: trace.graph, **{child: self.graphs[child] for child in inlined}}
                if self._matches({module: through.graph}) > self._matches(apart):
                    return through
        return trace

    def opens(self, module: nn.Module, graph: fx.Graph | None = None) -> bool:
        """Whether a chain may go on from a module's result.

        Args:
            module: The module.
            graph: Its graph, where that is at hand.
        """
        graph = _graph(module) if graph is None else graph
        return graph is not None and self._end(module, graph) is not None

    def _matches(self, graphs: Mapping[nn.Module, fx.Graph | None]) -> int:
        sites = (
            site
            for module, graph in graphs.items()
            if graph is not None
            for site in rewrite.apply(graph, module, self.table, analyse_only=True)
        )
        return sum(site.code == Reason.FUSIBLE.code for site in sites)

    def _end(self, module: nn.Module, graph: fx.Graph) -> _Leaving | None:
        """How a chain may go on from a module's result, or None."""
        output = next(iter(reversed(graph.nodes)))
        return self._leaves(output.args[0], module)

    def _leaves(self, node: Any, module: nn.Module, *, second: bool = True) -> _Leaving | None:
        """How a chain has come to a value, or None where there is none that may go on.

        Args:
            node: The value.
            module: The module in whose graph it is.
            second: Whether the chain may have come to its second step already.
        """
        if not isinstance(node, fx.Node):
            return None
        if any(_reads(step, node, module) for step in {f.steps[0] for f in self.table}):
            return _Leaving(set(), 0)
        for step in {f.steps[1] for f in self.table if len(f.steps) > 2 and second}:
            if (part := step(node, module)) is not None and part.refusal is None:
                ways = (self._leaves(n, module, second=False) for n in (part.input, *part.others))
                way = next((way for way in ways if way is not None), None)
                return None if way is None else _Leaving(way.modules, 1)
        for fusion in self.table:
            if (part := fusion.transparent(node, module)) is not None and part.input is not None:
                return self._leaves(part.input, module, second=second)
        if (opaque := self._opaque(node, module)) is None:
            return None
        child, graph = opaque
        inner = self._end(child, graph)
        if inner is None and node.args and self._passes(child, graph):
            inner = self._leaves(node.args[0], module, second=second)
        return None if inner is None else _Leaving({child, *inner.modules}, inner.step)

    def _enters(
        self, reader: fx.Node, value: fx.Node, module: nn.Module, step: int
    ) -> set[nn.Module] | None:
        """The modules to go through to what follows a step of a chain, or None where nothing does.

        Args:
            reader: Of the value.
            value: What the chain has come to.
            module: The module in whose graph they are.
            step: The last step of the chain so far, by its index.
        """
        following = {f.steps[step + 1] for f in self.table if len(f.steps) > step + 1}
        if any(_reads(step, reader, module) for step in following):
            return set()
        if any(fusion.transparent(reader, module) for fusion in self.table):
            return self._first(reader, module, step)
        if reader.args[:1] != (value,) or (opaque := self._opaque(reader, module)) is None:
            return None
        child, graph = opaque
        inner = self._first(next(iter(graph.nodes)), child, step)
        if inner is None and self._passes(child, graph):
            inner = self._first(reader, module, step)
        return None if inner is None else {child, *inner}

    def _passes(self, module: nn.Module, graph: fx.Graph) -> bool:
        """Whether a module returns its first argument, whatever it does on the way."""
        output = next(iter(reversed(graph.nodes)))
        value = output.args[0]
        while isinstance(value, fx.Node):
            if value is next(iter(graph.nodes)):
                return bool(value.op == "placeholder")
            parts = (fusion.transparent(value, module) for fusion in self.table)
            part = next((part for part in parts if part is not None), None)
            value = None if part is None else part.input
        return False

    def _first(self, value: fx.Node, module: nn.Module, step: int) -> set[nn.Module] | None:
        """The same for whatever reads a value."""
        found = (self._enters(reader, value, module, step) for reader in value.users)
        return next((modules for modules in found if modules is not None), None)

    def _opaque(self, node: fx.Node, module: nn.Module) -> tuple[nn.Module, fx.Graph] | None:
        """The child that a node calls, and its graph, where it may be inlined."""
        if node.op != "call_module":
            return None
        child = module.get_submodule(str(node.target))
        if child not in self.graphs:
            self.graphs[child] = _graph(child)
        graph = self.graphs[child]
        return None if graph is None else (child, graph)


def not_entered(module: nn.Module) -> Refusal | None:
    """Why neither a module nor what lies below it is touched."""
    if isinstance(module, torch.jit.ScriptModule):
        return Reason.SCRIPT_MODULE.because()
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if module._compiled_call_impl is not None or (
        dynamo is not None and isinstance(module, dynamo.OptimizedModule)
    ):
        return Reason.COMPILED_MODULE.because()
    if isinstance(module, fx.GraphModule):
        return Reason.GRAPH_MODULE.because()
    return None


def is_wrapper(module: nn.Module) -> bool:
    """Whether a module only calls another, and what it does beside that is not the model's."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # takes a while to import
    sharded = () if fsdp is None else fsdp.FullyShardedDataParallel
    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    return isinstance(module, (*wrappers, sharded))


def _reads(step: Reader, node: fx.Node, module: nn.Module) -> bool:
    """Whether a step could take a node as it is, and not only what is inside of it."""
    part = step(node, module)
    return part is not None and part.refusal is None


def _graph(module: nn.Module) -> fx.Graph | None:
    """The graph of a module that may be inlined: with nothing beside its class's forward."""
    library = type(module).__module__.startswith(("torch.nn.", "torch.ao.nn."))
    if (
        (library and not isinstance(module, nn.Sequential))
        or not_entered(module) is not None
        or nodes.obstacle(module, type(module)) is not None
    ):
        return None
    try:
        return tracing.trace(module).graph
    except Untraceable:
        return None
