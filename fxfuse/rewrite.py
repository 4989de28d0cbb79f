"""The engine: match, guard, replace, report.  It knows no operator by name.

A `Fusion` is a chain of steps, each a function that reads one node, and the function that takes
the chain's place.  `apply` follows every chain in a graph, refuses those that cannot be replaced
without changing the program, and replaces the others.  Every node that begins a chain gets a
`Site`, whether it was fused or why not.

The whole safety argument is one rule: a value inside a chain is read by the chain alone.  Then no
other node can see that it is gone, and none can write to it.  The exceptions are few: readers that
have no effect and whose own results no one reads, which go with the chain; readers that learn no
more than what its result shares with the value, such as the shape; and, where the rest of the chain
writes in place, the readers that come after the last write, which see its result.  The new node
stands where the chain began, so what the graph does to the chain's inputs afterwards comes
afterwards still.  Where a later part of the chain reads another value too, such as a residual, it
stands there instead, and nothing that the chain begins with may be written to in between.
"""

from __future__ import annotations

import bisect
import functools
import inspect
import operator
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch
from torch import fx, nn
from torch.fx.graph import inplace_methods

from fxfuse import nodes


class Reason(Enum):
    """Why a site is as it is: `code` names it, the value is the template of its sentence."""

    FUSED = "Replaced by one operator."
    FUSIBLE = "Can be replaced by one operator."
    ALONE = "No activation follows that could be fused with it: replaced alone."
    ALREADY_FUSED = "Already one operator, with {activation}."
    LIBRARY_UNAVAILABLE = "The compiled library is missing or could not be built."

    # Found by the engine.
    GRAPH_OUTPUT = "{value} is an output of the graph."
    OTHER_READER = "{value} is also read by {readers}."
    WRITTEN_IN_PLACE = "{writer} writes in place to {value}, or to a value made from it."
    NO_READER = "{value} is not read."
    NO_ACTIVATION = "{value} goes to {reader}, which no fusion knows."
    NOT_THE_INPUT = "{value} enters {reader} as another argument than its input."
    WRITTEN_MEANWHILE = "{writer} writes in place, or may, before {reader} has all that it reads."
    MODE_SWITCH = "{switch} changes the grad or autocast mode in between."

    # Found by the readers of the steps.
    DROPOUT = "A dropout with p = {p} stands in between."
    OTHER_GRADIENT = "It is {name} in parts, whose gradient at {where} is not that of {name}."
    CAST = "{cast} stands in between, and may change the dtype."
    TENSOR_BOUND = "The bound {name} is a {kind}, not a Python int or float."
    NAN_BOUND = "The bound {name} is NaN."
    CROSSED_BOUNDS = "min_val {low} is greater than max_val {high}, which raises in torch."
    NO_BOUND = "A clamp without bounds raises in torch."
    OUT_ARGUMENT = "The result is written to an out= argument."
    CLAMP_GRADIENT = "The gradient of this torch's clamp follows a rule that no kernel has."
    COMPUTED_ARGUMENT = "{name} is a {kind}, not a Python number."
    BAD_NUM_GROUPS = "{num_groups} groups cannot divide {num_channels} channels."
    OTHER_SIZES = "{name} is told sizes that may not be those of its input."
    BAD_AFFINE = "{name} is not one floating-point value per channel."
    SUBCLASS = "{module} is a subclass, whose behaviour may be its own."
    PARAMETRIZED = "{module} is parametrized."
    HOOKS = "{module} carries hooks, or a hook on all modules is set, that would not be called."
    OWN_FORWARD = "{module} has a forward of its own, set on the instance or on torch's class."

    # Found on the way from a module to its graph.
    UNTRACEABLE = "The forward around it cannot be traced: {error}."
    CONTEXT_MANAGER = "The forward around it changes the grad, autocast or checkpointing mode."
    RANDOM_NUMBER = "The forward around it draws a random number, which a graph would freeze."
    TENSOR_CONSTANT = "The forward around it makes a tensor, which a graph would freeze."
    CHANGES_STATE = "The forward around it changes {name}."
    NOT_REPEATED = "The forward around it calls {function}, which a graph would not repeat."
    MUTABLE_ATTRIBUTE = "The forward around it reads {name}, a {kind}, whose changes go unseen."
    NOT_SUBCLASSABLE = "Its module's class allows no subclass: {error}."
    NOT_CALLED = "The forward around it does not call it."
    SCRIPT_MODULE = "It lies in a ScriptModule."
    COMPILED_MODULE = "It lies in a compiled module; optimize the module before compiling it."
    GRAPH_MODULE = "It lies in a GraphModule; call fxfuse.fuse on that."
    PARALLEL_WRAPPER = "{wrapper} calls it, whose own forward is left as it is."
    NOT_COPYABLE = "It lies in {module}, which refuses to be copied; use inplace=True."

    # Asked for.
    EXCLUDED = "It was left out by exclude= or only=."
    INACCURATE = "One operator would be less accurate on the example inputs: {numbers}."
    SLOWER = "One operator would be slower on the example inputs: {numbers}."
    FAILS = "One operator fails on the example inputs: {error}."

    @property
    def code(self) -> str:
        """The name by which tests and users tell one reason from another."""
        return self.name.lower()

    def because(self, **details: object) -> Refusal:
        """This reason with its sentence filled in."""
        return Refusal(self, self.value.format(**details))


@dataclass(frozen=True)
class Refusal:
    """A reason and its sentence."""

    reason: Reason
    sentence: str


@dataclass(frozen=True)
class Part:
    """One node of a chain, as the reader of a step understood it.

    Attributes:
        node: The node.
        text: What it is, for the report: `Hardtanh(-2, 2)`.
        input: The node whose value the chain passes through this one.
        same_tensor: Whether the result is the very tensor that came in, written over or not.
        index: Which of the node's results the chain passes on; None where it has one.
        inner: Nodes before it that are part of the same operation, where several nodes make one.
        others: Further values that it reads.  The chain may come through any of them instead,
            unless the result is the same tensor.
        exchanged: Whether it does: then `input` and one of the others have changed places.
        data: What the fusion needs to know to replace the node.
        refusal: Why the node cannot be replaced, if so.
    """

    node: fx.Node
    text: str
    input: fx.Node | None = None
    same_tensor: bool = False
    index: int | None = None
    inner: tuple[fx.Node, ...] = ()
    others: tuple[fx.Node, ...] = ()
    exchanged: bool = False
    data: Any = None
    refusal: Refusal | None = None

    def through(self, value: fx.Node) -> Part:
        """This part as the chain that has come to a value goes through it."""
        if value is self.input or value not in self.others or self.same_tensor:
            return self
        assert self.input is not None
        others = tuple(self.input if other is value else other for other in self.others)
        return replace(self, input=value, others=others, exchanged=True)


Reader = Callable[[fx.Node, nn.Module], Part | None]
"""Reads a node of a graph whose modules and attributes are those of the given root."""


@dataclass(frozen=True)
class Fusion:
    """One row of a table of fusions.

    Attributes:
        name: Its name.
        producer: Names the node that feeds the chain, or returns None where the row is not for it.
        steps: The readers of the nodes to replace, first to last.
        transparent: Reads a node that may stand between two steps because its result is its input.
        measures: Whether a node reads of a value inside the chain only what the chain's result
            shares with it, such as the shape.
        target: The function that takes the chain's place.
        arguments: Its positional and keyword arguments, from the graph, the match and the survey.
            Nodes that they need may be added to the graph; they will stand before the call.
        fresh: Whether a node's result is a new tensor, which shares its memory with no other.
        survey: What `arguments` wants to know of the graph as a whole, asked once for all chains.
        instead: Where given, the row is only for nodes at which each row before it found no second
            step, for one of these reasons.
        outcome: What the report says of a node that the row replaces.
    """

    name: str
    producer: Callable[[fx.Node, nn.Module], str | None]
    steps: tuple[Reader, ...]
    transparent: Reader
    target: Callable[..., Any]
    arguments: Callable[[fx.Graph, Match, Any], tuple[tuple[Any, ...], dict[str, Any]]]
    measures: Callable[[fx.Node], bool] = lambda node: False
    fresh: Callable[[fx.Node, nn.Module], bool] = lambda node, root: False
    survey: Callable[[fx.Graph], Any] = lambda graph: None
    instead: frozenset[Reason] = frozenset()
    outcome: Reason = Reason.FUSED


@dataclass(frozen=True)
class Match:
    """A chain that can be replaced.

    Attributes:
        fusion: The row that it matches.
        producer: The node that feeds it, and stays.
        parts: The nodes that its steps have read (for GroupNorm and activation: these two).
        nodes: Every node that is replaced, with the transparent ones, in the order of the chain.
        unread: Nodes that go as well, because they read what is replaced, and no one reads them.
        early: Nodes that measure what is replaced, to stand right after the call: what is done to
            its result later was not done to the value.
        trusted: Nodes that stay, and of whose modules it is taken for granted that they write in
            place to nothing, or that their result is a new tensor.
    """

    fusion: Fusion
    producer: fx.Node
    parts: tuple[Part, ...]
    nodes: tuple[fx.Node, ...]
    unread: tuple[fx.Node, ...] = ()
    early: tuple[fx.Node, ...] = ()
    trusted: tuple[fx.Node, ...] = ()

    @property
    def place(self) -> fx.Node:
        """Before which node the call stands: that all it reads is there."""
        return next((part.node for part in self.parts if part.others), self.nodes[0])


@dataclass(frozen=True)
class Check:
    """What was measured of a site on example inputs.

    Attributes:
        error: The greatest distance from the same chain in float64.
        eager_error: The same of the nodes that the operator would replace.
        seconds: The median time of a call; of forward and backward where the model is training.
        eager_seconds: The same of the nodes that the operator would replace.
    """

    error: float
    eager_error: float
    seconds: float
    eager_seconds: float

    def __str__(self) -> str:
        times = f"{self.seconds * 1e6:.4g} µs, eager {self.eager_seconds * 1e6:.4g} µs"
        return f"error {self.error:.3g}, eager {self.eager_error:.3g}; {times}"


@dataclass(frozen=True)
class Site:
    """What became of one norm in a graph.

    Attributes:
        norm: The norm, such as `GroupNorm(32, 64)`.
        producer: What feeds it: `Linear`, `Conv2d`, the name of a function, `input`.
        activation: What follows, such as `Hardtanh(-2, 2)`; empty where no activation was found.
        fused: Whether it is now one operator.
        code: The `Reason`'s code.
        reason: Its sentence.
        module: The path of the norm's module, or of the module around a functional norm.
        source: The line of the model's source, as `File "model.py", line 12`, where it is known.
        shape: Of the norm's input, where it is known.
        graph: The name that torch's logs have for the graph, where torch.compile made it.
        match: The nodes, where the chain matched.
        check: What was measured of it, where that was asked for.
    """

    norm: str
    producer: str
    activation: str
    fused: bool
    code: str
    reason: str
    module: str | None = None
    source: str | None = None
    shape: tuple[int, ...] | None = None
    graph: str | None = None
    match: Match | None = field(default=None, repr=False, compare=False)
    check: Check | None = field(default=None, compare=False)

    def refused(self, refusal: Refusal) -> Site:
        """This site left as it is, for a reason that is not in its nodes."""
        code = refusal.reason.code
        return replace(self, fused=False, code=code, reason=refusal.sentence, match=None)

    def with_reason(self, reason: Reason) -> Site:
        """This site after another outcome, whose sentence needs no details."""
        fused = reason is Reason.FUSED
        return replace(self, fused=fused, code=reason.code, reason=reason.value)


@dataclass(frozen=True)
class FusionReport:
    """What a pass found.  `str` gives a table of it.

    Attributes:
        sites: One entry per norm, in the order of the graph, without its nodes.
    """

    sites: tuple[Site, ...] = ()

    def __post_init__(self) -> None:
        # A report outlives the graph: it must not keep it alive, and must be possible to pickle.
        sites = tuple(replace(site, match=None) for site in self.sites)
        object.__setattr__(self, "sites", sites)

    @property
    def matched(self) -> int:
        """How many sites this pass fused, or could have where it only looked."""
        codes = (Reason.FUSED.code, Reason.FUSIBLE.code)
        return sum(site.code in codes for site in self.sites)

    @property
    def fused(self) -> int:
        """How many sites are fused now, by this pass or by an earlier one."""
        return sum(site.fused for site in self.sites)

    @property
    def refused(self) -> int:
        """How many sites are left as they were, each with its reason."""
        return len(self.sites) - self.fused - self.fusible - self.alone

    @property
    def fusible(self) -> int:
        """How many sites could be fused, where the pass only looked."""
        return self._count(Reason.FUSIBLE)

    @property
    def alone(self) -> int:
        """How many norms without an activation were replaced all the same."""
        return self._count(Reason.ALONE)

    @property
    def coverage(self) -> float | None:
        """How many of all norms are replaced or can be, in per cent; None where there is none."""
        if not self.sites:
            return None
        return 100 * (len(self.sites) - self.refused) / len(self.sites)

    def __str__(self) -> str:
        # Late, so that the engine itself depends on torch alone.
        from fxfuse.reports import render

        return render(self)

    def _count(self, reason: Reason) -> int:
        return sum(site.code == reason.code for site in self.sites)


Judge = Callable[[Site], Refusal | None]
"""Says why a chain that could be replaced shall not be."""


def apply(
    graph: fx.Graph,
    root: nn.Module,
    fusions: Sequence[Fusion],
    *,
    analyse_only: bool = False,
    judge: Judge | None = None,
) -> list[Site]:
    """Replaces every chain of a graph that matches one of the fusions, in place.

    Neither lints the graph nor recompiles its module.

    Args:
        graph: The graph to edit.
        root: The module whose submodules and attributes the graph addresses.
        fusions: The table.  Of the rows that a node begins, the first that matches is taken.
        analyse_only: Find and report only; the graph stays as it is.
        judge: Says of each chain that could be replaced why it shall not be, or None.

    Returns:
        One site for each node that begins a chain, in the order of the graph.
    """
    context = _Context(graph, root)
    sites = [
        site for node in context.order if (site := _inspect(node, fusions, context)) is not None
    ]
    if judge is not None:
        sites = [site.refused(no) if site.match and (no := judge(site)) else site for site in sites]
    if analyse_only:
        return sites
    matches = [site.match for site in sites if site.match is not None]
    surveys = {survey: survey(graph) for survey in {match.fusion.survey for match in matches}}
    # All calls first: the input of a chain may be the end of another, and replacing that one
    # afterwards updates the new call as it does every other reader.
    calls = [insert(graph, match, surveys[match.fusion.survey]) for match in matches]
    for match, call in zip(matches, calls, strict=True):
        for node in match.unread:
            graph.erase_node(node)
        for node in match.early:
            call.append(node)
        for node in reversed(match.nodes):
            # What other readers may see is in the call's result (see `_Chain._may_stay`).
            node.replace_all_uses_with(call)
            graph.erase_node(node)
    return [site.with_reason(site.match.fusion.outcome) if site.match else site for site in sites]


class _Context:
    """What is asked of a graph again and again, found out once, so that a pass takes linear time.

    Attributes:
        root: The module that the graph addresses.
        order: The place of each node.
        known_writes: What `written` has found.
        unread: The nodes without effect whose results no one reads, or only others of these.
        switches: The places of the nodes that change a mode, in order.
        taken: The nodes of the chains that will be replaced: a sum of two norms is part of one.
    """

    def __init__(self, graph: fx.Graph, root: nn.Module) -> None:
        self.root = root
        self.order = {node: index for index, node in enumerate(graph.nodes)}
        self.unread: set[fx.Node] = set()
        for node in reversed(graph.nodes):
            if _has_no_effect(node) and self.unread.issuperset(node.users):
                self.unread.add(node)
        self.nodes: list[fx.Node] = list(self.order)
        self.known_writes: dict[fx.Node, set[fx.Node]] = {}
        self.switches = [index for node, index in self.order.items() if _switches_mode(node)]
        self.taken: set[fx.Node] = set()

    def written(self, node: fx.Node) -> set[fx.Node]:
        """As the function, which takes its time."""
        if node not in self.known_writes:
            self.known_writes[node] = written(node, self.root)
        return self.known_writes[node]

    @functools.cached_property
    def writers(self) -> list[int]:
        """The places of the nodes that write to a value in place, in order."""
        return [index for node, index in self.order.items() if self.written(node)]

    @functools.cached_property
    def parameter_writes(self) -> list[tuple[fx.Node, Any]]:
        """The nodes that write to a tensor of the module's, or a view of one, and that tensor."""
        found = []
        for writer in (self.nodes[index] for index in self.writers):
            for value in self.written(writer):
                while nodes.is_view(value):
                    value = value.all_input_nodes[0]
                if (tensor := nodes.attribute(value, self.root)) is not None:
                    found.append((writer, tensor))
        return found

    @functools.cached_property
    def unknown(self) -> list[int]:
        """The places of the nodes that may write to a value unseen, in order."""
        return [index for node, index in self.order.items() if not _is_known(node, self.root)]

    @functools.cached_property
    def modules(self) -> list[int]:
        """The places of the nodes that call modules, in order."""
        return [index for node, index in self.order.items() if node.op == "call_module"]

    def between(self, places: Sequence[int], first: fx.Node, last: fx.Node) -> Iterator[fx.Node]:
        """Those of the nodes at the given places that lie between two."""
        for found in range(bisect.bisect_right(places, self.order[first]), len(places)):
            if places[found] >= self.order[last]:
                return
            yield self.nodes[places[found]]


def _inspect(node: fx.Node, fusions: Sequence[Fusion], context: _Context) -> Site | None:
    """The site of the chain that begins at a node, or None where none does."""
    chains: list[_Chain] = []
    heads: dict[Reader, Part | None] = {}
    for fusion in fusions:
        if fusion.instead and not (chains and chains[0].ends_for(fusion.instead)):
            continue
        step = fusion.steps[0]
        if step not in heads:
            heads[step] = step(node, context.root)
        head = heads[step]
        chain = None if head is None else _Chain.follow(fusion, head, context)
        if chain is None:
            continue
        if chain.refusal is None:
            context.taken.update(chain.nodes)
            return chain.site()
        chains.append(chain)
    if not chains:
        return None
    return max(chains, key=lambda chain: len(chain.parts)).site()  # the first of the longest


@dataclass
class _Chain:
    """A chain that is being followed.

    Attributes:
        parts: What its steps have read.
        nodes: Its nodes so far, in order.
        inside: Those whose result is not what the chain passes on: it is one of several, or the
            node is only part of an operation.
        written_over: Those whose result is the same tensor as the last one's.
        early: As in `Match`.
        trusted: As in `Match`.
    """

    fusion: Fusion
    context: _Context
    producer: str
    parts: list[Part]
    nodes: list[fx.Node]
    inside: set[fx.Node] = field(default_factory=set)
    written_over: set[fx.Node] = field(default_factory=set)
    early: list[fx.Node] = field(default_factory=list)
    trusted: list[fx.Node] = field(default_factory=list)
    refusal: Refusal | None = None

    @classmethod
    def follow(cls, fusion: Fusion, head: Part, context: _Context) -> _Chain | None:
        producer = "" if head.input is None else fusion.producer(head.input, context.root)
        if producer is None:
            return None
        chain = cls(fusion, context, producer, [head], [], refusal=head.refusal)
        chain._append(head)
        if chain.refusal is None:
            chain.refusal = chain._extend()
        return chain

    def ends_for(self, reasons: Collection[Reason]) -> bool:
        """Whether no second step was found, for one of the given reasons."""
        return len(self.parts) == 1 and self.refusal is not None and self.refusal.reason in reasons

    def _append(self, part: Part) -> None:
        """Takes the nodes of a part in."""
        self.nodes += [*part.inner, part.node]
        self.inside.update(part.inner)
        if part.index is not None:
            self.inside.add(part.node)
            picks = [node for node in self._others(part.node) if _picks(node, part.index)]
            self.nodes += picks[:1]
        if not part.same_tensor:
            self.written_over.clear()
        self.written_over.add(self.nodes[-1])

    def _extend(self) -> Refusal | None:
        """Reads the rest of the chain, or says why there is none."""
        for step in self.fusion.steps[1:]:
            refusal = self._advance(step)
            if refusal is not None:
                return refusal
        head, tail = self.nodes[0], self.nodes[-1]
        for value in self.nodes[:-1]:
            if not all(self._may_stay(reader, value, tail) for reader in self._others(value)):
                return self._shared(value)
        switch = next(self.context.between(self.context.switches, head, tail), None)
        if switch is not None:
            return Reason.MODE_SWITCH.because(switch=switch.name)
        if (writer := self._parameter_writer(head)) is not None:
            return Reason.WRITTEN_IN_PLACE.because(writer=writer.name, value="a parameter of it")
        place = next((part.node for part in self.parts if part.others), head)
        return self._hastened(place)

    def _parameter_writer(self, head: fx.Node) -> fx.Node | None:
        """A node after the first that writes to a parameter of that one.

        The operator reads its parameters where the last of the chain stands, and again for the
        gradient of all of it, of which the first node alone does so in eager.
        """
        if not self.context.parameter_writes:
            return None
        root = self.context.root
        own = {id(nodes.attribute(node, root)) for node in head.all_input_nodes} - {id(None)}
        if head.op == "call_module":
            own.update(map(id, root.get_submodule(str(head.target)).parameters()))
        return next(
            (
                writer
                for writer, tensor in self.context.parameter_writes
                if id(tensor) in own and self._before(head, writer)
            ),
            None,
        )

    def _hastened(self, place: fx.Node) -> Refusal | None:
        """What does not let the call wait until the chain comes to a place."""
        for value in self.nodes[: self.nodes.index(place)]:
            if any(self._before(reader, place) for reader in self._others(value)):
                return self._shared(value)
        writers, unknown, modules = (
            [n for n in self.context.between(places, self.nodes[0], place) if n not in self.nodes]
            for places in (self.context.writers, self.context.unknown, self.context.modules)
        )
        if not (writers or unknown or modules):
            return None
        feeding = self.parts[0].input
        if feeding is not None and self._is_private(feeding, place):
            self.trusted = [feeding]
        else:
            writers = writers or unknown
            self.trusted = modules
        if writers:
            return Reason.WRITTEN_MEANWHILE.because(writer=writers[0].name, reader=place.name)
        return None

    def _is_private(self, value: fx.Node, place: fx.Node) -> bool:
        """Whether the chain alone has a hold of what feeds it until it comes to a place."""
        return self.fusion.fresh(value, self.context.root) and not any(
            self._before(reader, place) and not self.fusion.measures(reader)
            for reader in self._others(value)
        )

    def _may_stay(self, reader: fx.Node, value: fx.Node, tail: fx.Node) -> bool:
        """Whether a reader outside the chain may read the chain's result in place of a value."""
        if value in self.inside:
            return False
        if value in self.written_over and self._before(tail, reader):
            return True
        if not self.fusion.measures(reader) or self._may_differ(value):
            return False
        if self._before(tail, reader):
            self.early.append(reader)
            return reader.all_input_nodes == [value]
        return True

    def _may_differ(self, value: fx.Node) -> bool:
        """Whether the chain's result may have another size or dtype than a value in it."""
        at = self.nodes.index(value)
        return any(
            part.others and not part.same_tensor and at < self.nodes.index(part.node)
            for part in self.parts
        )

    def _advance(self, step: Reader) -> Refusal | None:
        """Appends the node that a step reads, and the transparent ones before it."""
        while True:
            value = self.nodes[-1]
            if value in self.inside:
                return Reason.NO_READER.because(value=value.name)
            readers = [node for node in self._others(value) if not self.fusion.measures(node)]
            readers.sort(key=self.context.order.__getitem__)
            if not readers:
                return Reason.NO_READER.because(value=value.name)
            reader = readers[0]
            part = None
            if reader not in self.context.taken:
                part = step(reader, self.context.root)
            found = part is not None
            if part is None:
                part = self.fusion.transparent(reader, self.context.root)
            if part is None:
                return self._lost(value, readers, step)
            part = part.through(value)
            if found:
                self.parts.append(part)
            self._append(part)
            if part.input is not value:
                return Reason.NOT_THE_INPUT.because(value=value.name, reader=reader.name)
            if value in part.others:
                return Reason.OTHER_READER.because(value=value.name, readers=reader.name)
            if part.refusal is not None:
                return part.refusal
            if found:
                return None

    def _lost(self, value: fx.Node, readers: list[fx.Node], step: Reader) -> Refusal:
        """Why the first reader of a value does not continue the chain."""
        if len(readers) > 1:
            # A later reader may be the step: then the chain ends there, for the report.
            for reader in readers[1:]:
                part = step(reader, self.context.root)
                if part is not None and part.input is value:
                    self.parts.append(part)
                    self._append(part)
                    break
            return self._shared(value)
        (reader,) = readers
        if reader.op == "output":
            return Reason.GRAPH_OUTPUT.because(value=value.name)
        if value in self.context.written(reader):
            return Reason.WRITTEN_IN_PLACE.because(writer=reader.name, value=value.name)
        return Reason.NO_ACTIVATION.because(value=value.name, reader=reader.name)

    def _shared(self, value: fx.Node) -> Refusal:
        """Why a value that has other readers cannot go."""
        others = self._others(value)
        end = max([*others, self.nodes[-1]], key=self.context.order.__getitem__)
        if self.nodes[-1] is not value:
            end = self.nodes[-1]
        writer = self._writer(value, end)
        if writer is not None:
            return Reason.WRITTEN_IN_PLACE.because(writer=writer.name, value=value.name)
        if any(reader.op == "output" for reader in others):
            return Reason.GRAPH_OUTPUT.because(value=value.name)
        names = ", ".join(reader.name for reader in others)
        return Reason.OTHER_READER.because(value=value.name, readers=names)

    def _writer(self, value: fx.Node, end: fx.Node) -> fx.Node | None:
        """The first node up to `end` that writes to a value or to what was made from it."""
        # Which functions return views is not known here, so each might.  Only the report needs to
        # know, for which a writer far off is just another reader: so the pass takes linear time.
        made = {value}
        first, last = self.context.order[value], self.context.order[end]
        for node in self.context.nodes[first + 1 : min(last, first + _FAR) + 1]:
            if node in self.nodes or made.isdisjoint(node.all_input_nodes):
                continue
            if not made.isdisjoint(self.context.written(node)):
                return node
            made.add(node)
        return None

    def _others(self, value: fx.Node) -> list[fx.Node]:
        """The readers of a value outside the chain that are not nothing."""
        return [
            reader
            for reader in value.users
            if reader not in self.nodes and reader not in self.context.unread
        ]

    def _before(self, first: fx.Node, second: fx.Node) -> bool:
        return self.context.order[first] < self.context.order[second]

    def _unread(self) -> tuple[fx.Node, ...]:
        """The nodes that read the chain before its end to no purpose, last first."""
        found: dict[fx.Node, None] = {}
        waiting = self.nodes[:-1]
        while waiting:
            for reader in waiting.pop().users:
                if reader in self.context.unread and reader not in found:
                    found[reader] = None
                    waiting.append(reader)
        return tuple(sorted(found, key=self.context.order.__getitem__, reverse=True))

    def site(self) -> Site:
        head = self.parts[0]
        match = None
        if self.refusal is None:
            assert head.input is not None
            match = Match(
                self.fusion,
                head.input,
                tuple(self.parts),
                tuple(self.nodes),
                self._unread(),
                tuple(self.early),
                tuple(self.trusted),
            )
        outcome = self.fusion.outcome
        possible = Reason.FUSIBLE if outcome is Reason.FUSED else outcome
        refusal = self.refusal or possible.because()
        return Site(
            norm=head.text,
            producer=self.producer,
            activation=" ".join(part.text for part in self.parts[1:]),
            fused=refusal.reason is Reason.ALREADY_FUSED,
            code=refusal.reason.code,
            reason=refusal.sentence,
            module=_module_path(head.node),
            source=_source_line(head.node),
            shape=_shape(head.input),
            match=match,
        )


_FAR = 100
"""How many nodes ahead a report looks for the writer to a value."""


def insert(graph: fx.Graph, match: Match, survey: Any = None) -> fx.Node:
    """Puts the call that will take the place of a chain where the chain begins (`Match.place`)."""
    if survey is None:
        survey = match.fusion.survey(graph)
    head, tail = match.nodes[0], match.nodes[-1]
    with graph.inserting_before(match.place):
        args, kwargs = match.fusion.arguments(graph, match, survey)
        call = graph.call_function(match.fusion.target, args, kwargs, type_expr=tail.type)
    # What it computes is what the last node computed; where it comes from is where the first did.
    value = head if match.parts[0].index is None else match.nodes[1]
    call.meta = {**value.meta, **tail.meta}
    for key in ("nn_module_stack", "stack_trace"):
        if key in head.meta:
            call.meta[key] = head.meta[key]
    return call


def _picks(node: fx.Node, index: int) -> bool:
    """Whether a node picks one result out of several."""
    return node.target is operator.getitem and node.args[1:] == (index,)


_NO_EFFECT = frozenset(
    {
        operator.getitem,
        torch.ops.aten.alias.default,
        torch.ops.aten.clone.default,
        torch.ops.aten.detach.default,
    }
)


def _has_no_effect(node: fx.Node) -> bool:
    """Whether a node does nothing but give a result; what autograd leaves in a graph."""
    return node.op == "call_function" and node.target in _NO_EFFECT


_WRITING_OPERATORS = frozenset(
    getattr(operator, name) for name in (*inplace_methods, "delitem", "iconcat")
)

_WRITING_METHODS = frozenset(f"__{function.__name__}__" for function in _WRITING_OPERATORS)


def written(node: fx.Node, root: nn.Module) -> set[fx.Node]:
    """The values that a node writes to in place, as far as conventions tell.

    The conventions are Python's (augmented assignment, item assignment) and torch's (a trailing
    underscore, `inplace=True`, `out=`, an operator's schema).
    """
    values: list[Any] = [node.kwargs.get("out")]
    if _writes_first_argument(node, root):
        values.append(node.args[0] if node.args else node.kwargs.get("input"))
    for operator_ in _operators(node.target):
        for index, argument in enumerate(operator_._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = index < len(node.args)
                values.append(node.args[index] if given else node.kwargs.get(argument.name))
    found: set[fx.Node] = set()
    fx.node.map_arg(values, found.add)
    return found


def _operators(target: object) -> list[torch._ops.OpOverload]:
    """The operators that a target is, or is one of."""
    if isinstance(target, torch._ops.OpOverloadPacket):
        names = target.overloads()  # type: ignore[no-untyped-call]
        return [getattr(target, name) for name in names]
    return [target] if isinstance(target, torch._ops.OpOverload) else []


def _is_known(node: fx.Node, root: nn.Module) -> bool:
    """Whether it is known of a node to what it writes (see `written`).

    It is not of what calls code that is not torch's, such as a module with others in it.
    """
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        hooked = module._forward_hooks or module._forward_pre_hooks
        own = "forward" in vars(module) or next(module.children(), None) is not None
        return type(module).__module__.startswith("torch.nn.modules.") and not (hooked or own)
    if node.op != "call_function":
        return True
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return False  # it runs a graph
    home = getattr(node.target, "__module__", None) or "torch"
    return home.partition(".")[0] in _KNOWN


_KNOWN = frozenset({"torch", "_operator", "builtins", "math", __name__.partition(".")[0]})


def _writes_first_argument(node: fx.Node, root: nn.Module) -> bool:
    target = node.target
    if node.op == "call_module":
        return bool(getattr(root.get_submodule(str(target)), "inplace", False))
    if node.op == "call_method":
        name = str(target)
        return name in _WRITING_METHODS if name.startswith("__") else name.endswith("_")
    if node.op != "call_function" or not callable(target):
        return False
    if getattr(target, "__module__", None) == operator.add.__module__:
        return target in _WRITING_OPERATORS
    if getattr(target, "__name__", "").endswith("_"):
        return True
    try:
        arguments = inspect.signature(target).bind(*node.args, **node.kwargs).arguments
    except (TypeError, ValueError):  # a builtin, or a call that would fail
        arguments = node.kwargs
    return bool(arguments.get("inplace", False))


# What Dynamo writes for context managers; symbolic tracing records none.
_MODE_SWITCHES = frozenset(
    {
        "_set_grad_enabled",
        "set_grad_enabled",
        "_enter_autocast",
        "_exit_autocast",
        "_enter_inference_mode",
        "_exit_inference_mode",
    }
)


def _switches_mode(node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", "")
    return node.op == "call_function" and name in _MODE_SWITCHES


def _shape(node: fx.Node | None) -> tuple[int, ...] | None:
    """The shape that tracing has recorded of a value, if it is always that."""
    meta = {} if node is None else node.meta
    value = meta.get("val", meta.get("example_value"))
    if not isinstance(value, torch.Tensor) or any(type(size) is not int for size in value.shape):
        return None
    return tuple(value.shape)


def _module_path(node: fx.Node) -> str | None:
    if node.op == "call_module":
        return str(node.target)
    stack = node.meta.get("nn_module_stack")
    return str(list(stack.values())[-1][0]) if stack else None


_TORCH = os.path.dirname(torch.__file__) + os.sep


def _source_line(node: fx.Node) -> str | None:
    """The innermost line of a node's stack trace that is not torch's own."""
    frames: Iterable[tuple[str, str]] = re.findall(
        r'File "([^"]+)", line (\d+)', node.stack_trace or ""
    )
    lines = [f'File "{path}", line {line}' for path, line in frames if not path.startswith(_TORCH)]
    return lines[-1] if lines else None
