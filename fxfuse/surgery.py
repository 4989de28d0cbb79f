"""optimize and restore: from an nn.Module to graphs and back.

`optimize` works on the smallest modules that hold a GroupNorm.  Each is traced on its own with its
children as leaves (`tracing`), the graph is rewritten (`patterns`), and the module becomes an
instance of a subclass of its own class whose forward runs the graph as long as everything that the
graph takes for granted still holds, and the original forward otherwise.  All that is kept for this
lies in the instance, under one key; without it the subclass behaves as the class.
"""

from __future__ import annotations

import contextlib
import copy
import copyreg
import dataclasses
import functools
import inspect
import itertools
import linecache
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

from fxfuse import boundaries, guards, library, ops, patterns, rewrite, tracing
from fxfuse.rewrite import FusionReport, Reason, Refusal, Site
from fxfuse.tracing import Untraceable

_M = TypeVar("_M", bound=nn.Module)

_PLAN = "_fxfuse_plan"
_reports: weakref.WeakKeyDictionary[nn.Module, FusionReport] = weakref.WeakKeyDictionary()


def optimize(model: _M, *, inplace: bool = False, channels_last: ops.ChannelsLast = "keep") -> _M:
    """Fuses every GroupNorm and the activation after it in a model; nothing else changes.

    Args:
        model: Any module, in any mode.  What cannot be fused is left as it is; `report` says why.
        inplace: Rewrite the given model instead of a copy.
        channels_last: `"keep"` lets a channels_last input give a channels_last result on CUDA,
            `"eager"` makes it contiguous, as GroupNorm does.

    Returns:
        A copy of the model that shares its parameters and buffers: the same objects, so a later
        change in place (an optimiser's step, `.half()`) shows in both.  `state_dict`, hooks,
        methods, attributes and `isinstance` are the model's; pickle writes the plain model.

    Raises:
        TypeError: If `model` is not a module.
    """
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise TypeError(f"fxfuse.optimize: expected model to be a Module, got {kind}")
    available = library.load()
    result = model if inplace else _share(model)
    table = patterns.fusions(channels_last)
    _reports[result] = FusionReport(_Operation(result, table, available).run())
    return result


def restore(model: _M) -> _M:
    """Gives a model that `optimize` returned back its own classes and forwards, in place.

    Args:
        model: The optimised model, or any other, which stays as it is.

    Returns:
        The same model.
    """
    for module in model.modules():
        if isinstance(module, _Fused):
            vars(module).pop(_PLAN, None)
            object.__setattr__(module, "__class__", _original(type(module)))
    _reports.pop(model, None)
    return model


def report(model: nn.Module) -> FusionReport:
    """What `optimize` did to a model.

    Args:
        model: What `optimize` returned, or a copy of it.

    Returns:
        One entry for each GroupNorm: fused, or the reason why not.  Of a copy of an optimised
        model, only the modules in which something was fused are known.

    Raises:
        ValueError: If nothing in the model was optimised.
    """
    if model in _reports:
        return _reports[model]
    plans = [(n, vars(m)[_PLAN]) for n, m in model.named_modules() if _PLAN in vars(m)]
    if not plans:
        raise ValueError("fxfuse.report: expected a model that fxfuse.optimize returned")
    return FusionReport(tuple(_below(name, site) for name, plan in plans for site in plan.sites))


def explain(model: nn.Module, *, example_inputs: tuple[Any, ...] | None = None) -> FusionReport:
    """What `optimize` would do to a model, which stays as it is.

    Needs no compiled library, no GPU and no weights: the model may lie on the meta device.

    Args:
        model: Any module.
        example_inputs: The positional arguments of a call.  Where given, the model's forward runs
            once on fake tensors, so that the report has the shapes that the norms see.

    Returns:
        One entry for each GroupNorm: fusible, already fused, or the reason why neither.

    Raises:
        TypeError: If `model` is not a module.
    """
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise TypeError(f"fxfuse.explain: expected model to be a Module, got {kind}")
    duplicate = _share(model)
    sites = _Operation(duplicate, patterns.fusions("keep"), available=True).run()
    sites = tuple(
        site.with_reason(Reason.FUSIBLE) if site.code == Reason.FUSED.code else site
        for site in sites
    )
    if example_inputs is not None:
        shapes = _shapes(restore(duplicate), example_inputs)
        sites = tuple(
            dataclasses.replace(site, shape=shapes.get(site.module or "")) for site in sites
        )
    return FusionReport(sites)


def _shapes(model: nn.Module, example_inputs: tuple[Any, ...]) -> dict[str, tuple[int, ...]]:
    """The shapes that the norms of a model see first in a call, by their paths."""
    # On fake tensors a call computes nothing, draws no random number and changes no buffer.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    model = _share(model, mode.from_tensor)
    shapes: dict[str, tuple[int, ...]] = {}

    def look(path: str, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor):
            shapes.setdefault(path, tuple(args[0].shape))

    for path, module in model.named_modules():
        if isinstance(module, nn.GroupNorm):
            module.register_forward_pre_hook(lambda _, args, path=path: look(path, args))
    try:
        with mode, torch.no_grad():
            model(*pytree.tree_map_only(Tensor, mode.from_tensor, example_inputs))
    except Exception as error:
        message = f"fxfuse.explain: the model did not run on the example inputs: {error}"
        warnings.warn(message, stacklevel=3)
    return shapes


# ---- the copy -------------------------------------------------------------------------------


def _share(model: _M, stand_in: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> _M:
    """A copy of the module tree around the same tensors, or around what stands in for each."""
    memo: dict[int, Any] = {id(tensor): stand_in(tensor) for tensor in _tensors(model)}
    try:
        return copy.deepcopy(model, dict(memo))
    except Exception:
        # Some attribute refuses to be copied (a lock, a process group): then that is shared too.
        for value in itertools.chain.from_iterable(vars(m).values() for m in model.modules()):
            if isinstance(value, nn.Module) or id(value) in memo:
                continue
            try:
                copy.deepcopy(value, dict(memo))
            except Exception:
                if not _holds_modules(value):
                    memo[id(value)] = value
        return copy.deepcopy(model, memo)


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    for module in model.modules():
        yield from _tensors_in(vars(module))


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from _tensors_in(item)


def _holds_modules(value: Any) -> bool:
    items = value.values() if isinstance(value, dict) else value
    return isinstance(value, (dict, list, tuple)) and any(isinstance(i, nn.Module) for i in items)


# ---- the operation --------------------------------------------------------------------------


class _Operation:
    """Rewrites the modules of a tree, children first, and keeps what became of each norm."""

    def __init__(self, root: nn.Module, table: tuple[rewrite.Fusion, ...], available: bool) -> None:
        self.root = root
        self.table = table
        self.available = available
        self.settled: set[nn.Module] = set()  # norms that some module's graph calls
        self.open: set[nn.Module] = set()  # modules whose result a chain may go on from
        self.sites: dict[nn.Module, list[Site]] = {}  # by the module whose graph has them
        self.boundaries = boundaries.Boundaries(table)

    def run(self) -> tuple[Site, ...]:
        """One site for each norm, in the order of the tree."""
        paths = {module: path for path, module in self.root.named_modules()}
        self._visit(self.root)
        sites = [_below(paths[m], site) for m, found in self.sites.items() for site in found]
        for module, path in paths.items():
            if isinstance(module, nn.GroupNorm) and module not in self.settled:
                sites.append(_norm_site(module, path, Reason.NOT_CALLED.because()))
        order = {path: index for index, path in enumerate(paths.values())}
        return tuple(sorted(sites, key=lambda site: order.get(site.module or "", -1)))

    def _visit(self, module: nn.Module) -> None:
        if module in self.sites:
            return
        self.sites[module] = []
        if (refusal := boundaries.not_entered(module)) is not None:
            self._refuse(module, refusal)
            return
        for child in module.children():
            self._visit(child)
        if plan := vars(module).get(_PLAN):
            self.settled.update(plan.norms)
            self.sites[module] = [_already(site) for site in plan.sites]
        elif self._may_hold_a_site(module):
            try:
                self._rewrite(module)
            except Untraceable as error:
                self._refuse(module, error.refusal)
            except Exception as error:  # one odd layer costs its own fusions, not the model
                self._refuse(module, tracing.untraceable(error).refusal)

    def _may_hold_a_site(self, module: nn.Module) -> bool:
        """Whether to trace: for a norm that no graph has called, or a chain that may go on."""
        if type(module).forward in (nn.Module.forward, nn.GroupNorm.forward):
            return False
        below = (m for m in module.modules() if m is not module)
        return _mentions_group_norm(module) or any(
            m in self.open or (isinstance(m, nn.GroupNorm) and m not in self.settled) for m in below
        )

    def _rewrite(self, module: nn.Module) -> None:
        """Gives a module a plan if its graph has a site to fuse.

        Raises:
            Untraceable: If it has no graph.
        """
        if "forward" in vars(module):
            raise Untraceable(Reason.OWN_FORWARD.because(module=type(module).__name__))
        if not isinstance(inspect.getattr_static(type(module), "forward"), types.FunctionType):
            raise Untraceable(Reason.UNTRACEABLE.because(error="it is not a plain method"))
        variants: list[Variant] = []
        found: list[Site] = []
        entered: set[nn.Module] = set()
        for mode in (module.training, not module.training):
            try:
                trace, inlined = self._trace(module, mode)
            except Untraceable:
                if mode == module.training:
                    raise
                break  # fused in one mode only
            if mode == module.training:
                self.open -= {module.get_submodule(str(n.target)) for n in _calls(trace.graph)}
                if self.boundaries.opens(module, trace.graph) is not None:
                    self.open.add(module)
            sites = patterns.apply(trace.graph, module, self.table, available=self.available)
            if any(site.fused for site in sites):
                variants.append(Variant.of(module, trace, sites, inlined))
            if mode == module.training:
                found, entered = sites, inlined
            if not any(m is module and name == "training" for m, name, _ in trace.attributes):
                break
        found = [
            dataclasses.replace(site, match=None)
            for site in found
            # A subclass of GroupNorm whose own graph has a norm is not a norm but a module.
            if site.code != Reason.SUBCLASS.code or not self._has_sites(module, site)
        ]
        # A functional norm's module is the one around it, which may be a kind of GroupNorm.
        norms = {module.get_submodule(site.module or "") for site in found}
        if variants:
            plan = Plan(tuple(variants), tuple(found), norms)
            try:
                object.__setattr__(module, "__class__", _fused_class(type(module)))
            except TypeError as error:
                raise Untraceable(Reason.NOT_SUBCLASSABLE.because(error=error)) from error
            vars(module)[_PLAN] = plan
        self.sites[module] = found
        for child in entered:
            self.sites[child] = []  # its graph is part of this one
        self.settled |= norms

    def _trace(self, module: nn.Module, training: bool) -> tuple[tracing.Trace, set[nn.Module]]:
        """A module's graph in a mode, through the children whose boundary a chain crosses."""
        before = module.training
        module.training = training
        try:
            trace = tracing.trace(module)
            inlined = self.boundaries.crossed(module, trace.graph)
            if inlined:
                with contextlib.suppress(Untraceable):  # then the chain stays as it is
                    through = tracing.trace(module, inlined)
                    if self._matches(module, through) > self._matches(module, trace):
                        return through, inlined
            return trace, set()
        finally:
            module.training = before

    def _matches(self, module: nn.Module, trace: tracing.Trace) -> int:
        sites = rewrite.apply(trace.graph, module, self.table, analyse_only=True)
        return sum(site.match is not None for site in sites)

    def _has_sites(self, module: nn.Module, site: Site) -> bool:
        return bool(self.sites.get(module.get_submodule(site.module or "")))

    def _refuse(self, module: nn.Module, refusal: Refusal) -> None:
        """A site for each norm that a module would have called."""
        # A chain that might have gone on in it ends for the same reason.
        for child in self.open.intersection(module.modules()):
            self.sites[child] = [_ends(site, refusal) for site in self.sites[child]]
            self.open.remove(child)
        norms = [
            (path, m)
            for path, m in module.named_modules()
            if isinstance(m, nn.GroupNorm) and m not in self.settled
        ]
        self.settled.update(norm for _, norm in norms)
        sites = [_norm_site(norm, path, refusal) for path, norm in norms]
        # Code may name the function, or an attribute of that name, which may be None.
        if not norms and _mentions_group_norm(module) and not hasattr(module, "group_norm"):
            sites = [Site("group_norm", "", "", False, refusal.reason.code, refusal.sentence)]
        self.sites[module] = sites


def _calls(graph: fx.Graph) -> Iterator[fx.Node]:
    return (node for node in graph.nodes if node.op == "call_module")


# ---- a look at the code ---------------------------------------------------------------------


def _mentions_group_norm(module: nn.Module) -> bool:
    """Whether a module's code names group_norm, or functions that it names do."""
    held = itertools.chain.from_iterable(map(_functions, vars(module).values()))
    return _code_names_group_norm(cast(Any, type(module))) or any(map(_names_group_norm, held))


@functools.cache
def _code_names_group_norm(cls: Any) -> bool:
    own = (base for base in cls.__mro__ if not base.__module__.startswith("torch.nn.modules."))
    held = itertools.chain.from_iterable(_functions(v) for base in own for v in vars(base).values())
    return any(map(_names_group_norm, held))


def _names_group_norm(function: types.FunctionType) -> bool:
    """Whether a function's code, or that of a function it refers to by name, names group_norm."""
    waiting, done = [function], set()
    while waiting:
        function = waiting.pop()
        if function.__name__ == "group_norm":
            return True
        module = function.__module__ or ""
        if function.__code__ in done or module == "torch" or module.startswith("torch."):
            continue
        done.add(function.__code__)
        codes = [function.__code__]
        for code in codes:
            if "group_norm" in code.co_names:
                return True
            codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
            for name in code.co_names:
                value = function.__globals__.get(name)
                if isinstance(value, types.ModuleType) and not value.__name__.startswith("torch"):
                    value = [vars(value).get(attribute) for attribute in code.co_names]
                waiting += _functions(value)
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # not bound yet
                waiting += _functions(cell.cell_contents)
    return False


def _functions(value: Any) -> Iterator[types.FunctionType]:
    """The Python functions that a value is or holds."""
    if isinstance(value, types.FunctionType):
        yield value
    elif isinstance(value, (staticmethod, classmethod)):
        yield from _functions(value.__func__)
    elif isinstance(value, functools.partial):
        yield from _functions(value.func)
    elif isinstance(value, (list, tuple, dict)):
        items = list(value.values()) if isinstance(value, dict) else list(value)
        yield from (item for item in items if isinstance(item, types.FunctionType))


# ---- sites ----------------------------------------------------------------------------------


def _norm_site(norm: nn.GroupNorm, path: str, refusal: Refusal) -> Site:
    text = f"{type(norm).__name__}({norm.num_groups}, {norm.num_channels})"
    return Site(text, "", "", False, refusal.reason.code, refusal.sentence, path)


def _below(path: str, site: Site) -> Site:
    return dataclasses.replace(site, module=".".join(filter(None, (path, site.module))))


def _ends(site: Site, refusal: Refusal) -> Site:
    if site.code != Reason.GRAPH_OUTPUT.code:
        return site
    return dataclasses.replace(site, code=refusal.reason.code, reason=refusal.sentence)


def _already(site: Site) -> Site:
    if not site.fused:
        return site
    sentence = Reason.ALREADY_FUSED.because(activation=site.activation).sentence
    return dataclasses.replace(site, code=Reason.ALREADY_FUSED.code, reason=sentence)


# ---- the plan of one module -----------------------------------------------------------------


@dataclasses.dataclass
class Variant:
    """One graph of a module, as a function, and when it may run.

    Attributes:
        run: Takes the module and its tensor arguments.
        code: The source of `run`.
        signature: The forward's, without `self`.
        tensors: The arguments that must be tensors.
        constants: The values that the other arguments must have.
        leading: Whether `tensors` come first and may be given by position alone.
        guards: What must hold.
    """

    run: Callable[..., Any]
    code: str
    signature: inspect.Signature
    tensors: tuple[str, ...]
    constants: dict[str, Any]
    leading: bool
    guards: guards.Guards

    @classmethod
    def of(
        cls, module: nn.Module, trace: tracing.Trace, sites: list[Site], inlined: set[nn.Module]
    ) -> Variant:
        """The variant of a module whose graph was rewritten at the given sites."""
        replaced = [
            module.get_submodule(str(node.target))
            for site in sites
            if site.match is not None
            for node in site.match.nodes
            if node.op == "call_module"
        ]
        taken_for_granted = guards.Guards(
            (
                # Attributes first: `training` is what tells one variant from the other.
                *(guards.Attribute(*read) for read in trace.attributes),
                *(guards.Query(*query) for query in trace.queries),
                *(guards.Present(*read) for read in trace.optional),
                *(guards.Children(owner, dict(owner._modules)) for owner in trace.containers),
                *(guards.Replaced.of(m) for m in dict.fromkeys(replaced)),
                *(guards.Replaced(m, type(m), {}) for m in inlined),
            )
        )
        run, code = _compile(trace.graph, type(module))
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        first = list(trace.signature.parameters.values())[: len(trace.tensors)]
        leading = all(
            p.kind in positional and p.name == name
            for p, name in zip(first, trace.tensors, strict=False)
        )
        return cls(
            run,
            code,
            trace.signature,
            trace.tensors,
            trace.constants,
            leading,
            taken_for_granted,
        )

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        """The tensors of a call, or None where the graph is not for such a call."""
        if not (self.leading and not kwargs and len(args) == len(self.tensors)):
            try:
                given = self.signature.bind(*args, **kwargs).arguments
            except TypeError:
                return None  # the original forward raises it
            for name, value in given.items():
                if name in self.constants:
                    if not _equal(value, self.constants[name]):
                        return None
                elif name not in self.tensors:
                    return None  # *args or **kwargs
            args = tuple(given[name] for name in self.tensors)
        for value in args:
            if not isinstance(value, Tensor):
                return None
        return args


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    simple = (bool, int, float, str)
    return type(one) is type(other) and isinstance(one, simple) and one == other


@dataclasses.dataclass
class Plan:
    """What the instance of a rewritten module keeps: its graphs, and what became of its norms."""

    variants: tuple[Variant, ...]
    sites: tuple[Site, ...]
    norms: set[nn.Module]

    @property
    def code(self) -> str:
        """The source of every graph."""
        return "\n".join(variant.code for variant in self.variants)

    def find(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
        """The graph that a call may run, and the tensors to run it on."""
        if torch._C._get_tracing_state() is not None:
            return None  # jit.trace, which should see what the model was written as
        for variant in self.variants:
            if (tensors := variant.bind(args, kwargs)) is not None and variant.guards.hold():
                return variant.run, tensors
        return None


_serial = itertools.count()


def _compile(graph: fx.Graph, cls: type) -> tuple[Callable[..., Any], str]:
    """A graph as a function of the module and its tensors."""
    graph.lint()
    python = graph.python_code("self")
    filename = f"<fxfuse {cls.__qualname__} {next(_serial)}>"
    # So that a traceback shows the line.
    linecache.cache[filename] = (len(python.src), None, python.src.splitlines(True), filename)
    scope = dict(python.globals)
    exec(compile(python.src, filename, "exec"), scope)
    return cast("Callable[..., Any]", scope["forward"]), python.src


# ---- the subclass ---------------------------------------------------------------------------


class _Fused:
    """What marks a subclass whose forward may run a plan."""


def _original(cls: type) -> type:
    """The class that a fused class stands for."""
    return cast(type, vars(cls)["_fxfuse_original"])


_classes: weakref.WeakKeyDictionary[type, type] = weakref.WeakKeyDictionary()


def _fused_class(cls: Any) -> type:
    """The subclass of a module's class that runs its instance's plan.

    Raises:
        TypeError: If the class allows no subclass.
    """
    if issubclass(cls, _Fused):
        return cast(type, cls)
    if cls in _classes:
        return _classes[cls]
    original = cls.forward

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # torch.compile goes through here and keeps the fusion and its guards; an exported program
        # is to run where there is no fxfuse.  The flag itself, because Dynamo of torch 2.11 takes
        # is_exporting() for true wherever it compiles.
        if not torch.compiler._is_exporting_flag:
            plan = self.__dict__.get(_PLAN)
            if plan is not None and (found := plan.find(args, kwargs)) is not None:
                run, tensors = found
                return run(self, *tensors)
        return original(self, *args, **kwargs)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        return _plain_reduction(self, cls.__reduce_ex__(self, protocol))

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        if hasattr(cls, "__deepcopy__"):
            return cls.__deepcopy__(self, memo)
        # As copy.deepcopy does it, with the plan, whose modules the memo maps to their copies.
        return copy._reconstruct(self, memo, *cls.__reduce_ex__(self, 4))  # type: ignore[attr-defined]

    def __prepare_scriptable__(self: Any) -> Any:
        return copy.copy(self)  # by __reduce_ex__: the plain class around the same state

    body = {
        "forward": forward,
        "__reduce_ex__": __reduce_ex__,
        "__deepcopy__": __deepcopy__,
        "__prepare_scriptable__": __prepare_scriptable__,
        "_fxfuse_original": cls,
    }
    _classes[cls] = tracing.subclass(cls, body, _Fused)
    return _classes[cls]


def _plain_reduction(module: Any, reduction: Any) -> Any:
    """A module's pickle without its plan, so that a process without fxfuse can load it."""
    if isinstance(reduction, str):
        return reduction
    fused, plain = type(module), _original(type(module))
    function, args, *rest = reduction
    if function is copyreg.__newobj__:  # type: ignore[attr-defined]
        # pickle insists on the object's own class there; these two it takes as they are.
        if len(args) == 1:
            function, args = copyreg._reconstructor, (plain, object, None)  # type: ignore[attr-defined]
        else:
            function, args = plain.__new__, (plain, *args[1:])
    else:
        args = tuple(plain if arg is fused else arg for arg in args)
        function = plain if function is fused else function
    if rest and isinstance(rest[0], dict):
        rest[0] = {name: value for name, value in rest[0].items() if name != _PLAN}
    elif rest and isinstance(rest[0], tuple) and rest[0] and isinstance(rest[0][0], dict):
        state = {name: value for name, value in rest[0][0].items() if name != _PLAN}
        rest[0] = (state, *rest[0][1:])
    return (function, args, *rest)
