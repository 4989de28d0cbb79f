"""The torch.compile and torch.export doors.

`compile_graph` is what ``torch.compile(model, backend="fxfuse")`` calls with each graph that Dynamo
makes: `patterns.fuse` runs on the graph, and torch's own compiler, Inductor unless another is asked
for, does the rest.  torch finds it by its entry point, so nobody has to import fxfuse.

`fuse` takes exported programs too, and `inductor` is for those who keep ``backend="inductor"``.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import hashlib
import inspect
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from fxfuse import library, nodes, ops, patterns, surgery, tuning
from fxfuse.rewrite import Fusion, FusionReport, Reason, Refusal, Site

_ALLOWED = {
    "inner": ("inductor", "aot_eager", "eager"),
    "tune": (False, True),
    "channels_last": ("keep", "eager"),
}


# ---- torch.compile --------------------------------------------------------------------------


def compile_graph(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Fuses a graph of Dynamo's and compiles what comes out: ``torch.compile(backend="fxfuse")``.

    Args:
        graph_module: The graph; it is edited.
        example_inputs: Its inputs.
        mode: One of Inductor's: ``"default"``, ``"reduce-overhead"``, ``"max-autotune"``,
            ``"max-autotune-no-cudagraphs"``.
        options: Any of Inductor's options, and ours: ``"mode"``, because torch.compile takes either
            a mode or options; ``"inner"``, the compiler that gets the fused graph: ``"inductor"``
            (default), ``"aot_eager"`` or ``"eager"``; ``"tune"``: True times each site fused and
            left to the inner compiler, on random data in the shapes of this graph, and keeps what
            is faster; ``"channels_last"``, as in `optimize`.

    Returns:
        What the inner compiler returns.

    Raises:
        ValueError: If an option is none of these, or does not suit the others.
    """
    ours, inductors = _split_options(mode, options or {})
    compiler = functools.partial(
        _INNER_COMPILERS[ours["inner"]], mode=ours["mode"], options=inductors
    )
    settings = (ours["inner"], ours["mode"], repr(sorted(inductors.items())))
    tune = functools.partial(tuning.times, compiler=compiler, settings=settings)
    # What a higher-order operator calls, such as the body of a checkpoint, is a graph of its own.
    for module in patterns.with_bodies(graph_module):
        _make_numbers_constant(module, _is_input_number)
        _record(fuse_graph(module, ours["channels_last"], tune if ours["tune"] else None))
    return compiler(graph_module, example_inputs)


def _split_options(
    mode: str | None, options: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Our options with their defaults, and Inductor's."""
    ours = {"mode": mode, "inner": "inductor", "tune": False, "channels_last": "keep"}
    inductors = {name: value for name, value in options.items() if name not in ours}
    ours |= {name: value for name, value in options.items() if name in ours}
    for name, allowed in _ALLOWED.items():
        given = ours[name]
        if not any(type(given) is type(value) and given == value for value in allowed):
            raise ValueError(
                f"fxfuse: expected options[{name!r}] to be one of {allowed}, got {given!r}"
            )
    for name in inductors:
        known = torch._inductor.list_options()
        if name.replace("-", "_") not in known:
            close = difflib.get_close_matches(name, [*ours, *known])
            hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
            raise ValueError(
                f"fxfuse: expected options of fxfuse {tuple(ours)} or of Inductor, "
                f"got {name!r}{hint}"
            )
    if ours["inner"] != "inductor" and (inductors or ours["mode"] not in (None, "default")):
        names = ", ".join(map(repr, [*inductors, *(["mode"] if ours["mode"] else [])]))
        raise ValueError(
            f"fxfuse: expected no Inductor options with inner={ours['inner']!r}, got {names}"
        )
    return ours, inductors


def _inductor(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None,
    options: dict[str, Any],
) -> Callable[..., Any]:
    # What backend="inductor" is, with the checks of its options and all that a mode means.
    wrapper: Any = torch._TorchCompileInductorWrapper
    cached = {"unsafe_marked_cacheable_functions": _cacheable_functions()}
    compiler = wrapper(mode, {**cached, **options}, None)
    compiled: Callable[..., Any] = compiler(graph_module, example_inputs)
    return compiled


def _aot_eager(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], **nothing: Any
) -> Callable[..., Any]:
    from torch._dynamo.backends.registry import lookup_backend

    compiled: Callable[..., Any] = lookup_backend("aot_eager")(graph_module, list(example_inputs))
    return compiled


def _eager(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], **nothing: Any
) -> Callable[..., Any]:
    return graph_module.forward


_INNER_COMPILERS = {"inductor": _inductor, "aot_eager": _aot_eager, "eager": _eager}


def fuse_graph(
    graph_module: fx.GraphModule,
    channels_last: ops.ChannelsLast,
    tune: Callable[[fx.GraphModule, tuple[Fusion, ...]], dict[fx.Node, tuning.Times]] | None = None,
) -> tuple[Site, ...]:
    """`patterns.fuse` for one graph of Dynamo's.

    Args:
        graph_module: The graph; it is edited.
        channels_last: As in `fuse`.
        tune: Times the sites, as `tuning.times`.  Those that are slower fused are left alone.
    """
    _make_numbers_constant(graph_module, _is_known_number)
    graph, table = graph_module.graph, patterns.fusions(channels_last)
    available = library.load()
    times = tune(graph_module, table) if tune is not None and available else {}

    def judge(site: Site) -> Refusal | None:
        found = _found(times, site)
        if found is None or found.fused <= found.unfused:
            return None
        return Reason.SLOWER.because(numbers=found)

    sites = patterns.apply(graph, graph_module, table, available=available, judge=judge)
    if any(site.match for site in sites):
        graph.lint()
        graph_module.recompile()
    return tuple(
        replace(
            site,
            module=_user_path(site.module),
            reason=" ".join(filter(None, (site.reason, _sentence(_found(times, site))))),
            match=None,
        )
        for site in sites
    )


def _found(times: Mapping[fx.Node, tuning.Times], site: Site) -> tuning.Times | None:
    return times.get(site.match.parts[-1].node) if site.match else None


def _sentence(times: tuning.Times | None) -> str | None:
    return None if times is None else f"{times}."


def _make_numbers_constant(
    graph_module: fx.GraphModule, is_constant: Callable[[torch.SymFloat], bool]
) -> None:
    """Writes numbers that Dynamo passes as inputs, as `dynamic=True` has it, into the chains.

    To read such a number is to guard on it, so that another one means another graph.
    """
    graph = graph_module.graph
    for node in graph.nodes:
        if not _belongs_to_a_chain(node, graph_module):
            continue
        numbers = {}
        for given in node.all_input_nodes:
            value = given.meta.get("example_value")
            if isinstance(value, torch.SymFloat) and is_constant(value):
                numbers[given] = float(value)
        node.args = fx.node.map_arg(node.args, functools.partial(_look_up, numbers))
        node.kwargs = fx.node.map_arg(node.kwargs, functools.partial(_look_up, numbers))
        for number in numbers:
            if not number.users and number.op == "call_method":
                graph.erase_node(number)


def _look_up(numbers: Mapping[fx.Node, float], node: fx.Node) -> Any:
    return numbers.get(node, node)


def _belongs_to_a_chain(node: fx.Node, root: nn.Module) -> bool:
    """Whether a node is a norm, or what comes straight after one."""
    around = [nodes.read(node, root), *(nodes.read(n, root) for n in node.all_input_nodes)]
    return any(reading is not None and reading.operation == "group_norm" for reading in around)


def _is_known_number(value: torch.SymFloat) -> bool:
    """Whether a number was guarded on already."""
    return bool(value.node.expr.is_number)


def _is_input_number(value: torch.SymFloat) -> bool:
    """Whether a number is an input: not computed from sizes, nor read from a tensor."""
    from torch._dynamo.source import CallMethodItemSource

    number = value.node.expr
    if _is_known_number(value) or not (number.is_symbol and value.node.has_hint()):
        return _is_known_number(value)
    sources = value.node.shape_env.var_to_sources.get(number, [])
    return not any(isinstance(source, CallMethodItemSource) for source in sources)


def _user_path(path: str | None) -> str | None:
    """A module's path without the name that Dynamo has for the root: `L['self']`."""
    return None if path is None else re.sub(r"^[LG]\['\w+'\]\.?", "", path)


def _cacheable_functions() -> dict[str, str]:
    """The functions that AOTAutograd's cache may find in graphs, ours among them.

    It knows torch's own to be the same in every process; of others it wants to be told, with what
    their behaviour depends on.
    """
    ours = {f"{f.__module__}.{f.__name__}": fingerprint() for f in ops.FUNCTIONS}
    return {**torch._inductor.config.unsafe_marked_cacheable_functions, **ours}


@functools.cache
def _sources() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def fingerprint(*settings: object) -> str:
    """What a compiled graph depends on beside the graph: our sources, our library, settings."""
    built = library.library_path().parent.name if library.load() else "none"
    return hashlib.sha256(repr((_sources(), built, *settings)).encode()).hexdigest()


# ---- torch.export ---------------------------------------------------------------------------


def fuse(
    program: fx.GraphModule | ExportedProgram, *, channels_last: ops.ChannelsLast = "keep"
) -> FusionReport:
    """Replaces every GroupNorm and the activation after it in a graph by one operator, in place.

    Results, gradients, `state_dict` and submodules stay what they were; only nodes change.  Tensors
    are read when the graph runs; numbers such as eps and bounds, and which modules carry hooks, are
    read now.  Running it twice changes nothing.

    Args:
        program: What `torch.fx.symbolic_trace` or `make_fx` returns, a graph made by hand, or what
            `torch.export.export` returns, decomposed or not.  An exported program keeps its
            signature, its parameters and its dynamic shapes; one that was saved can be loaded
            where fxfuse is imported.
        channels_last: `"keep"` lets a channels_last input give a channels_last result on CUDA,
            `"eager"` makes it contiguous, as GroupNorm does.  Where the graph asks for a `view` of
            what is made from the result, it is always `"eager"`.

    Returns:
        One entry for each GroupNorm: fused, or the reason why not.

    Raises:
        TypeError: If it is neither.
    """
    if not isinstance(program, ExportedProgram):
        return patterns.fuse(program, channels_last=channels_last)
    kept = _names_in_signatures(program)
    sites: list[Site] = []
    for module in patterns.with_bodies(program.graph_module):
        named = kept if module is program.graph_module else set()
        sites += _fuse_exported(module, channels_last, named)
    program.validate()  # type: ignore[no-untyped-call]
    return FusionReport(tuple(sites))


def _names_in_signatures(program: ExportedProgram) -> set[str]:
    """The values that signatures of the program, or of modules kept in it, name."""
    signatures = [entry.signature for entry in program.module_call_graph if entry.signature]
    arguments = [
        *(spec.arg for spec in program.graph_signature.output_specs),
        *(argument for s in signatures for argument in (*s.inputs, *s.outputs)),
    ]
    return {str(argument.name) for argument in arguments}


def _fuse_exported(
    graph_module: fx.GraphModule, channels_last: ops.ChannelsLast, kept: set[str]
) -> list[Site]:
    """Fuses one graph of aten's operators into another of operators."""
    graph, table = graph_module.graph, patterns.fusions(channels_last, residuals=False)
    names: list[str] = []

    def judge(site: Site) -> Refusal | None:
        assert site.match is not None
        *inner, last = (node.name for node in site.match.nodes)
        if named := kept.intersection(inner):
            return Reason.GRAPH_OUTPUT.because(value=min(named))
        names.append(last)
        return None

    available = library.load()
    sites = patterns.apply(graph, graph_module, table, available=available, judge=judge, named=kept)
    calls = [node for node in graph.nodes if node.target in ops.FUNCTIONS]
    if calls:
        for call, name in zip(calls, names, strict=True):
            _call_operator(graph, call, name)
        graph.lint()
        graph_module.recompile()
    return sites


def _call_operator(graph: fx.Graph, call: fx.Node, name: str) -> None:
    """Puts the operator in the place of our function, which no saved program could name.

    It gets the name of the node that the function was put in place of, by which signatures know it.
    """
    function = call.target
    assert callable(function)
    given = inspect.signature(function).bind(*call.args, **call.kwargs)
    given.apply_defaults()
    arguments = dict(given.arguments)
    value = arguments["input"].meta["val"]
    with graph.inserting_before(call):
        copies = arguments.get("channels_last") == "eager"
        if copies and value.is_cuda and not value.is_contiguous():
            keywords: dict[str, Any] = {"memory_format": torch.contiguous_format}
            copy = graph.call_function(
                torch.ops.aten.clone.default, (arguments["input"],), keywords
            )
            copy.meta = {**call.meta, "val": value.contiguous()}
            arguments["input"] = copy
        operator = getattr(torch.ops.fxfuse, function.__name__).default
        *names, _ = (argument.name for argument in operator._schema.arguments)  # dtype is the last
        node = graph.call_function(
            operator,
            tuple(list(v) if isinstance(v := arguments[n], tuple) else v for n in names),
            # A norm that autocast does not know keeps its dtype under it.
            {} if arguments.get("autocast", True) else {"dtype": value.dtype},
        )
    node.meta = call.meta
    call.replace_all_uses_with(node)
    graph.erase_node(call)
    node.name = name


# ---- reports --------------------------------------------------------------------------------


@dataclass
class _Compilation:
    """What was found in the graph, or the parts of a graph, that one compilation had.

    Dynamo begins some compilations again, which is another attempt in the same context.
    """

    context: weakref.ref[Any]
    attempt: int
    sites: tuple[Site, ...] = ()


_compilations: dict[str, _Compilation] = {}  # by the names that torch's logs have: `[0/1]`


def _record(sites: tuple[Site, ...]) -> None:
    """Adds sites to the compilation that is going on."""
    context = torch._guards.CompileContext.try_get()
    if context is None:  # someone calls us as a function
        context = _outside
    name = f"[{context.compile_id}]"
    known = _compilations.get(name)
    if known is None or (known.context(), known.attempt) != (context, context.attempt):
        known = _compilations[name] = _Compilation(weakref.ref(context), context.attempt)
    known.sites += sites


_outside = torch._guards.CompileContext(None)


def reset() -> None:
    """Forgets every compiled graph and what was timed; `torch._dynamo.reset` calls it."""
    _compilations.clear()
    tuning.reset()


compile_graph.reset = reset  # type: ignore[attr-defined]


def report(model: nn.Module | None = None) -> FusionReport:
    """What `optimize` did to a model, or torch.compile to every graph.

    Args:
        model: What `optimize` returned, or a copy of it.  None asks for what
            ``torch.compile`` had fused in this process, by the backend or the pass, since it
            began or since ``torch._dynamo.reset``.  Graphs that Inductor took from its cache did
            not go through the pass.

    Returns:
        One entry for each GroupNorm: fused, or the reason why not.  Of a copy of an optimised
        model, only the modules in which something was fused are known.

    Raises:
        ValueError: If nothing in the model was optimised.
    """
    if model is not None:
        try:
            return surgery.report(model)
        except ValueError as error:
            if not hasattr(model, "_orig_mod"):
                raise
            message = f"{error}, got a compiled one; fxfuse.report() has what was compiled"
            raise ValueError(message) from None
    return FusionReport(
        tuple(replace(site, graph=name) for name, c in _compilations.items() for site in c.sites)
    )


# ---- backend="inductor" ---------------------------------------------------------------------


def fuse_pre_grad_graph(graph: fx.Graph, channels_last: ops.ChannelsLast) -> None:
    """What `pregrad.InductorPass` does.

    A bound that is an input stays one: the cache, which is asked before the pass runs, would take
    graphs with other bounds for the same.
    """
    assert isinstance(graph.owning_module, fx.GraphModule)
    _record(fuse_graph(graph.owning_module, channels_last))


@contextlib.contextmanager
def inductor(*, channels_last: ops.ChannelsLast = "keep") -> Iterator[None]:
    """Has ``torch.compile(backend="inductor")`` fuse what it compiles inside the context.

    A compilation happens at the first call of what ``torch.compile`` returns, and at a later one
    that needs another graph.  A pass that is installed already runs first.

    Args:
        channels_last: As in `optimize`.
    """
    from fxfuse.pregrad import InductorPass, chain

    config = torch._inductor.config
    passes = chain(config.pre_grad_custom_pass, InductorPass(channels_last))
    with config.patch(
        pre_grad_custom_pass=passes, unsafe_marked_cacheable_functions=_cacheable_functions()
    ):
        yield
