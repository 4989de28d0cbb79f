"""What a rewritten module keeps: its graphs, when each may run, and what became of its norms.

A graph is for one pattern of arguments (see `guards.Arguments`), one training mode, and, where the
forward asks torch for its modes, such as whether gradients are enabled, for one set of answers.
`optimize` learns the usual pattern; the others are learned when a call first has them, if it is a
good moment to trace, and a trace that fails is not tried again.  What a plan refuses, because it
was excluded or found wrong or slower, it refuses in every graph.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import linecache
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import fx, nn
from torch.nn.modules.module import _has_any_global_hook

from fxfuse import boundaries, guards, ops, patterns, rewrite, tracing
from fxfuse.rewrite import Check, Reason, Refusal, Site
from fxfuse.tracing import Untraceable

Situation = tuple[str, tuple[Any, ...]]
"""What a graph is for beside the training mode: a pattern of arguments, and answers of torch."""

Key = tuple[str, "str | None"]
"""A norm from one trace to the next: its path, and its line where it is not a module."""


def key_of(module: nn.Module, site: Site) -> Key:
    """The norm of a site, whose path begins at a module."""
    path = site.module or ""
    is_module = path and isinstance(module.get_submodule(path), nn.GroupNorm)
    return path, None if is_module else site.source


def numbered(module: nn.Module, sites: Iterable[Site]) -> dict[tuple[Key, int], Site]:
    """Sites by their norms, of which each may be called several times."""
    found: dict[tuple[Key, int], Site] = {}
    for site in sites:
        key = key_of(module, site)
        found[key, sum(other == key for other, _ in found)] = site
    return found


@dataclasses.dataclass(frozen=True)
class Variant:
    """One graph of a module, as a function, and when it may run.

    Attributes:
        run: Takes the module and its arguments in the order of `guards.Arguments.names`.
        code: The source of `run`.
        guards: What must hold.
        inlined: The paths of the modules below that it goes through.
    """

    run: Callable[..., Any]
    code: str
    guards: guards.Guards
    inlined: tuple[str, ...]

    @classmethod
    def of(
        cls, module: nn.Module, trace: tracing.Trace, sites: list[Site], taken: list[fx.Node]
    ) -> Variant:
        """The variant of a module whose graph was rewritten.

        Args:
            module: The module.
            trace: Its graph.
            sites: What was replaced there.
            taken: The Linears that were taken in.
        """
        matches = [site.match for site in sites if site.match is not None]

        def called(nodes: Iterable[fx.Node]) -> dict[str, nn.Module]:
            paths = (str(node.target) for node in nodes if node.op == "call_module")
            return {path: module.get_submodule(path) for path in paths}

        replaced = called([*(node for match in matches for node in match.nodes), *taken])
        trusted = called(node for match in matches for node in match.trusted)
        run, code = _compile(trace.graph, type(module))
        types = dict.fromkeys(tracing.plain(m) for m in replaced.values())
        found = (
            *trace.guards,
            *(guards.Outside(cls, "forward", cls.forward) for cls in types),
            *(guards.Replaced.fused(guards.Path(path), m) for path, m in replaced.items()),
            *(
                guards.Replaced.trusted(guards.Path(path), m)
                for path, m in trusted.items()
                if path not in replaced
            ),
        )
        return cls(run, code, guards.Guards(found), trace.inlined)


@dataclasses.dataclass
class Outcome:
    """What became of the norms of a module in one graph of it.

    Attributes:
        when: In which calls, where not in the usual ones.
        sites: The norms (see `numbered`).
        refusal: Why there is no graph, if so.
        opens: Whether a chain may go on from the module's result.
    """

    when: str
    sites: dict[tuple[Key, int], Site] = dataclasses.field(default_factory=dict)
    refusal: Refusal | None = None
    opens: bool = False

    def site(self, key: tuple[Key, int], known: Site) -> Site | None:
        """What became of a norm that is known from another graph; None if it is not called."""
        if self.refusal is not None and not self.sites:
            return known.refused(self.refusal)
        return self.sites.get(key)


_Learned = tuple[Outcome, "tracing.Trace | None"]


class Plan:
    """What the instance of a rewritten module keeps: its graphs, and what became of its norms.

    Attributes:
        graphs: For eval mode and for training, by the situation; None where the original forward
            runs.
        questions: What the forward asks torch: functions and their arguments.
        hopeful: Whether calls of further patterns may have something to fuse that none has so far.
        checks: What was measured, or what speaks against a site, where that was asked for.
    """

    limit = 4  # patterns to trace: a forward that is called in ever new ways is not worth more

    def __init__(
        self,
        module: nn.Module,
        channels_last: ops.ChannelsLast,
        refused: dict[Key, Refusal],
        own_graphs: set[str],
    ) -> None:
        self.arguments = guards.arguments(tracing.plain(module).forward)
        self.channels_last = channels_last
        self.refused = refused
        self.own_graphs = own_graphs
        self.training = bool(module.training)
        self.graphs: tuple[dict[Situation, Variant | None], ...] = ({}, {})
        self.questions: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self.patterns: list[str] = []
        self.outcomes: list[Outcome] = []
        self.checks: dict[Key, Check | Refusal] | None = None  # None until asked for
        self.hopeful = False

    # -- what a call asks --

    def find(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
        """The graph that a call may run, and the arguments to run it on."""
        if torch._C._get_tracing_state() is not None:
            return None  # jit.trace, which should see what the model was written as
        try:
            call = self.arguments.bind(*args, **kwargs)
        except TypeError:
            return None  # the original forward raises it
        if call is None:
            return None
        pattern, values = call
        graphs = self.graphs[1 if module.training else 0]
        situation = self.situation(pattern)
        if situation not in graphs:
            if torch.compiler.is_compiling():
                return None
            self._meet(module, pattern)
        variant = graphs.get(situation)
        if variant is None or not variant.guards.hold(module):
            return None
        return variant.run, values

    def situation(self, pattern: str) -> Situation:
        """The situation of a call of a pattern that comes now."""
        return pattern, tuple([function(*args) for function, args in self.questions])

    def _meet(self, module: nn.Module, pattern: str) -> None:
        """Traces what a call is the first to need, unless this is no time for it."""
        if not _may_trace_now():
            return
        with tracing.lock:
            if self.situation(pattern) not in self.graphs[bool(module.training)]:
                self.learn(module, pattern)

    # -- what fills it --

    @property
    def variants(self) -> list[Variant]:
        """Every graph."""
        found = [v for graphs in self.graphs for v in graphs.values() if v is not None]
        return list({id(variant): variant for variant in found}.values())

    @property
    def code(self) -> str:
        """The source of every graph."""
        return "\n".join(variant.code for variant in self.variants)

    @property
    def inlined(self) -> set[str]:
        """The modules that some graph goes through."""
        return {path for variant in self.variants for path in variant.inlined}

    def learn_usual(self, module: nn.Module, bounds: boundaries.Boundaries) -> list[_Learned]:
        """Learns the usual pattern, or another if there is nothing to fuse in that."""
        learned: list[_Learned] = []
        for pattern in (self.arguments.usual, *self.arguments.others()):
            learned += self.learn_in_both_modes(module, pattern, bounds)
            if self.variants:
                break
        return learned

    def learn_in_both_modes(
        self, module: nn.Module, pattern: str, bounds: boundaries.Boundaries | None = None
    ) -> list[_Learned]:
        """Learns a pattern in the mode that a module is in, and in the other if that differs."""
        learned = [self.learn(module, pattern, bounds)]
        if self.situation(pattern) not in self.graphs[not module.training]:
            before = {m: m.training for m in module.modules()}
            try:
                for m in before:
                    m.training = not before[module]
                learned.append(self.learn(module, pattern, bounds))
            finally:
                for m, training in before.items():
                    m.training = training
        return learned

    def learn_again(self, module: nn.Module) -> None:
        """Traces every pattern anew, because what is refused has changed."""
        known, self.patterns, self.outcomes = self.patterns, [], []
        for graphs in self.graphs:
            graphs.clear()
        for pattern in known:
            self.learn_in_both_modes(module, pattern)

    def learn(
        self, module: nn.Module, pattern: str, bounds: boundaries.Boundaries | None = None
    ) -> _Learned:
        """Traces a module for calls of a pattern, in the mode that it is in."""
        mode = bool(module.training)
        self.graphs[mode][self.situation(pattern)] = None
        is_call = guards.TENSOR in pattern and guards.OTHER not in pattern
        if pattern not in self.patterns:
            if not is_call or len(self.patterns) == self.limit:
                return Outcome(""), None
            self.patterns.append(pattern)
        outcome = Outcome(self._when(pattern, mode))
        self.outcomes.append(outcome)
        try:
            bounds = bounds or self._boundaries()
            trace = bounds.trace(module, pattern)
            self._note_questions(trace)
            situation = self.situation(pattern)
            self.graphs[mode][situation] = None
            outcome.opens = bounds.opens(module, trace.graph)
            sites = rewrite.apply(trace.graph, module, bounds.table, judge=self._judge(module))
            if any(site.match for site in sites):
                # Not after a verification, which compares the chains without their Linears.
                taking = self.checks is None and ops.may_have_linear_kernel()
                choices = patterns.take_linears_in(trace.graph, module) if taking else []
                sites = patterns.with_choices(sites, choices)
                taken = [choice.linear for choice in choices if choice.taken]
                self.graphs[mode][situation] = Variant.of(module, trace, sites, taken)
        except Untraceable as error:
            outcome.refusal = error.refusal
            return outcome, None
        except Exception as error:  # whatever it is, the original forward runs
            outcome.refusal = tracing.untraceable(error).refusal
            return outcome, None
        norms = (dataclasses.replace(s, match=None) for s in sites if self._is_norm(s))
        outcome.sites = numbered(module, norms)
        if not trace.reads_mode:
            self.graphs[not mode][situation] = self.graphs[mode][situation]
        return outcome, trace

    def _note_questions(self, trace: tracing.Trace) -> None:
        asked = (g for g in trace.guards if isinstance(g, guards.Query))
        for question in dict.fromkeys((query.function, query.args) for query in asked):
            if question not in self.questions:
                self.questions.append(question)

    def _boundaries(self) -> boundaries.Boundaries:
        return boundaries.Boundaries(patterns.fusions(self.channels_last, alone=True))

    def _when(self, pattern: str, mode: bool) -> str:
        other = "" if mode == self.training else "in training" if mode else "in eval mode"
        given = self.arguments.text(pattern)
        return " ".join(filter(None, (f"with {given}" if given else "", other)))

    def _is_norm(self, site: Site) -> bool:
        # A subclass of GroupNorm whose own graph has a norm is not a norm but a module.
        return site.code != Reason.SUBCLASS.code or site.module not in self.own_graphs

    def _judge(self, module: nn.Module) -> rewrite.Judge:
        def judge(site: Site) -> Refusal | None:
            key = key_of(module, site)
            return self.refused.get(key) or self.refused.get((key[0], None))

        return judge

    # -- what it is asked afterwards --

    def sites(self) -> tuple[Site, ...]:
        """What became of each norm, in all graphs together."""
        known: dict[tuple[Key, int], Site] = {}
        for outcome in self.outcomes:
            known = {**outcome.sites, **known}
        return tuple(self._summary(key, site) for key, site in known.items())

    def _summary(self, key: tuple[Key, int], known: Site) -> Site:
        found = [(outcome.when, outcome.site(key, known)) for outcome in self.outcomes]
        fused = [(when, site) for when, site in found if site and site.fused]
        others = [(when, site) for when, site in found if site and not site.fused]
        if not fused:
            return known
        when, site = fused[0]
        reason = site.reason.removesuffix(".")
        if self.checks is not None:
            check = self.checks.get(key[0])
            reason += f": {check}" if check else "; the example inputs did not reach it"
            if isinstance(check, Check):
                site = dataclasses.replace(site, check=check)
        reason += f" ({when})." if when else "."
        reason += "".join(f" Not {w or 'otherwise'}: {other.reason}" for w, other in others)
        return dataclasses.replace(site, reason=reason)

    # -- verification --

    def observer(self, module: nn.Module, measure: bool) -> Callable[..., Any]:
        """A forward for a plain copy of a module, which learns from its calls.

        Args:
            module: The module whose plan this is.
            measure: Whether to compare the sites that a call reaches with their operators.
        """
        if measure:
            self.checks = {}
            if ops.may_have_linear_kernel():
                self.learn_again(module)  # without what the comparison leaves out

        def forward(around: nn.Module, *args: Any, **kwargs: Any) -> Any:
            run, given = type(around).forward, args
            if (call := self.arguments.bind(*args, **kwargs)) is not None:
                pattern, values = call
                graphs = self.graphs[bool(module.training)]
                if self.situation(pattern) not in graphs:
                    self.learn_in_both_modes(module, pattern)
                if measure and graphs.get(self.situation(pattern)) is not None:
                    run, given, kwargs = self._comparing(module, around, pattern), values, {}
            return run(around, *given, **kwargs)

        return forward

    def _comparing(self, module: nn.Module, around: nn.Module, pattern: str) -> Callable[..., Any]:
        """A module's graph as it was before rewriting, with a comparison at each new site."""
        from fxfuse import verify  # late: importing fxfuse should not wait for it

        assert self.checks is not None
        bounds = self._boundaries()
        trace = bounds.trace(module, pattern)
        sites = rewrite.apply(
            trace.graph, module, bounds.table, analyse_only=True, judge=self._judge(module)
        )
        new = [s for s in sites if s.match and key_of(module, s) not in self.checks]
        verify.instrument(trace.graph, around, new, functools.partial(self._note, module))
        run, _ = _compile(trace.graph, type(module))
        return run

    def _note(self, module: nn.Module, site: Site, result: Check | Refusal) -> None:
        assert self.checks is not None
        key = key_of(module, site)
        if not isinstance(self.checks.get(key), Refusal):
            self.checks[key] = result

    def refuse(self, path: str, refused: Mapping[Key, Refusal]) -> bool:
        """Takes over what is refused in a module; returns whether anything is.

        Args:
            path: The module's.
            refused: By the norms' paths and lines, from where the module's path begins.
        """
        prefix = path and f"{path}."
        found = {
            (norm.removeprefix(path).removeprefix("."), line): refusal
            for (norm, line), refusal in refused.items()
            if norm == path or norm.startswith(prefix)
        }
        self.refused = {**self.refused, **found}
        return bool(found)


def _may_trace_now() -> bool:
    """Whether the forward may be traced amid a call, in plain eager mode."""
    return not (
        _has_any_global_hook()  # type: ignore[no-untyped-call]
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or (torch.cuda._initialized and torch.cuda.is_current_stream_capturing())
    )


_serial = itertools.count()


def _compile(graph: fx.Graph, cls: type) -> tuple[Callable[..., Any], str]:
    """A graph as a function of the module and its arguments."""
    graph.lint()
    python = graph.python_code("self")
    filename = f"<fxfuse {cls.__qualname__} {next(_serial)}>"
    # So that a traceback shows the line.
    linecache.cache[filename] = (len(python.src), None, python.src.splitlines(True), filename)
    scope = dict(python.globals)
    exec(compile(python.src, filename, "exec"), scope)
    return cast("Callable[..., Any]", scope["forward"]), python.src
