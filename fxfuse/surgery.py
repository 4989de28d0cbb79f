"""optimize and restore: from an nn.Module to graphs and back.

`optimize` works on the smallest modules that hold a GroupNorm.  Each is traced on its own with its
children as leaves (`tracing`), the graph is rewritten (`patterns`), and the module becomes an
instance of a subclass of its own class whose forward runs the graph as long as everything that the
graph takes for granted still holds, and the original forward otherwise.  All that is kept for this
lies in the instance, under one key, its plan (`plans`); without it the subclass behaves as the
class.
"""

from __future__ import annotations

import contextlib
import copy
import copyreg
import dataclasses
import fnmatch
import functools
import inspect
import itertools
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

from fxfuse import boundaries, library, ops, patterns, tracing
from fxfuse.plans import Key, Plan, numbered
from fxfuse.rewrite import FusionReport, Reason, Refusal, Site
from fxfuse.tracing import Untraceable

_M = TypeVar("_M", bound=nn.Module)

_PLAN = "_fxfuse_plan"


class NotFusedError(RuntimeError):
    """A GroupNorm that `optimize` with `strict=True` could not fuse.

    Attributes:
        report: What became of each GroupNorm; the message is its table.
    """

    def __init__(self, report: FusionReport) -> None:
        super().__init__(f"fxfuse.optimize: expected every GroupNorm to be fused, got\n{report}")
        self.report = report

    def __reduce__(self) -> Any:
        return type(self), (self.report,)


def optimize(
    model: _M,
    *,
    inplace: bool = False,
    channels_last: ops.ChannelsLast = "keep",
    exclude: Sequence[str] = (),
    only: Sequence[str] | None = None,
    example_inputs: Tensor | Sequence[Any] | Mapping[str, Any] | None = None,
    verify: bool = False,
    strict: bool = False,
) -> _M:
    """Fuses every GroupNorm and the activation after it in a model; nothing else changes.

    A GroupNorm that no activation follows is replaced by the same operator alone, which is faster
    than torch's and keeps channels_last.

    Args:
        model: Any module, in any mode.  What cannot be fused is left as it is; `report` says why.
        inplace: Rewrite the given model instead of a copy.
        channels_last: `"keep"` lets a channels_last input give a channels_last result on CUDA,
            `"eager"` makes it contiguous, as GroupNorm does.
        exclude: Paths of modules, as patterns of `fnmatch` (`"decoder"`, `"*.attn"`): what lies in
            them is not fused.
        only: Patterns of the same kind: what does not lie in one of them is not fused.
        example_inputs: The arguments of a call of the model: a tensor, a sequence of positional
            ones, or a mapping of keyword ones.  A copy of the model is run on them once, in the
            mode that the model is in, so that the graphs which such a call needs are there.
        verify: Compare each chain that this call reaches with its operator, by their distances
            from float64 and by their times, and leave it as it was where the operator is less
            accurate or slower.  The report has the numbers.  In training this includes the
            gradients.
        strict: Raise if a GroupNorm is left as it was, other than by `exclude` and `only`.

    Returns:
        A copy of the model that shares its parameters and buffers: the same objects, so a later
        change in place (an optimiser's step, `.half()`) shows in both.  `state_dict`, hooks,
        methods, attributes and `isinstance` are the model's; pickle writes the plain model.

    Raises:
        TypeError: If `model` is not a module.
        ValueError: If a pattern matches no module, or `verify` is given no example inputs.
        NotFusedError: If `strict` is set and a GroupNorm is left as it was.
    """
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise TypeError(f"fxfuse.optimize: expected model to be a Module, got {kind}")
    if verify and example_inputs is None:
        raise ValueError("fxfuse.optimize: expected example_inputs with verify=True, got None")
    available = library.load()
    result = model if inplace else _share(model, _tensors(model))
    untouchable = set() if inplace else set(model.modules())
    operation = _Operation(
        result, channels_last, available, untouchable, _selected(result, exclude, only)
    )
    operation.run()
    if example_inputs is not None:
        operation.try_out(example_inputs, measure=verify)
    _findings[result] = operation.findings()
    if strict:
        outcome = report(result)
        accepted = (Reason.EXCLUDED.code, Reason.ALONE.code)
        if any(not s.fused and s.code not in accepted for s in outcome.sites):
            operation.undo()
            raise NotFusedError(outcome)
    return result


def restore(model: _M) -> _M:
    """Gives a model that `optimize` returned back its own classes and forwards, in place.

    Args:
        model: The optimised model, or any other, which stays as it is.

    Returns:
        The same model.
    """
    for module in model.modules():
        _make_plain(module)
    _findings.pop(model, None)
    return model


def report(model: nn.Module) -> FusionReport:
    """What `optimize` did to a model, and what its later calls have added to that.

    Args:
        model: What `optimize` returned, or a copy of it.

    Returns:
        One entry for each GroupNorm: fused, or the reason why not.  Of a copy of an optimised
        model, only the modules in which something was fused are known.

    Raises:
        ValueError: If nothing in the model was optimised.
    """
    modules = dict(model.named_modules())
    plans = {path: vars(m)[_PLAN] for path, m in modules.items() if _PLAN in vars(m)}
    if model in _findings:
        found = _findings[model]
    elif plans:
        inside = {_join(path, name) for path, plan in plans.items() for name in plan.inlined}
        found = {path: None for path in plans if path not in inside}
    else:
        raise ValueError("fxfuse.report: expected a model that fxfuse.optimize returned")
    by_owner = [
        [_below(path, site) for site in (sites or (plans[path].sites() if path in plans else ()))]
        for path, sites in found.items()
    ]
    # A later graph may have gone through a module that was reported on its own.
    fused = {site.module for sites in by_owner for site in sites if site.fused}
    called = {s.module for sites in by_owner for s in sites if s.code != Reason.NOT_CALLED.code}
    result = []
    for sites in by_owner:
        own = {site.module for site in sites if site.fused}
        for site in sites:
            elsewhere = called if site.code == Reason.NOT_CALLED.code else fused - own
            if site.fused or site.module not in elsewhere:
                result.append(site)
    order = {path: index for index, path in enumerate(modules)}
    return FusionReport(tuple(sorted(result, key=lambda site: order.get(site.module or "", -1))))


# Of each root, by the path of the module around the norms: their sites, or None where its plan
# knows them.
_Findings = dict[str, "tuple[Site, ...] | None"]
_findings: weakref.WeakKeyDictionary[nn.Module, _Findings] = weakref.WeakKeyDictionary()


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
    duplicate = _share(model, _tensors(model))
    operation = _Operation(duplicate, "keep", True, set(model.modules()), None)
    operation.run()
    _findings[duplicate] = operation.findings()
    sites = report(duplicate).sites
    if example_inputs is not None:
        shapes = _shapes(restore(duplicate), example_inputs)
        sites = tuple(
            dataclasses.replace(site, shape=shapes.get(site.module or "")) for site in sites
        )
    return FusionReport(
        tuple(
            site.with_reason(Reason.FUSIBLE) if site.code == Reason.FUSED.code else site
            for site in sites
        )
    )


def _shapes(model: nn.Module, example_inputs: tuple[Any, ...]) -> dict[str, tuple[int, ...]]:
    """The shapes that the norms of a model see first in a call, by their paths."""
    # On fake tensors a call computes nothing, draws no random number and changes no buffer.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    model = _share(model, _tensors(model), mode.from_tensor)
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


def _share(
    model: _M,
    tensors: Iterable[Tensor],
    stand_in: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> _M:
    """A copy of the module tree around the same tensors, and whatever refuses to be copied.

    Args:
        model: The root of the tree.
        tensors: The tensors.
        stand_in: Gives what takes the place of each.
    """
    memo: dict[int, Any] = {id(tensor): stand_in(tensor) for tensor in tensors}
    try:
        return copy.deepcopy(model, dict(memo))
    except Exception:  # a lock, a process group
        for module in model.modules():
            for name, value in vars(module).items():
                if name != "_modules":
                    _share_what_refuses(value, memo)
    try:
        return copy.deepcopy(model, dict(memo))
    except Exception:  # FSDP's modules
        for module in reversed(list(model.modules())):
            try:
                copy.deepcopy(module, dict(memo))
            except Exception:
                memo[id(module)] = module
        return copy.deepcopy(model, memo)


def _share_what_refuses(value: Any, memo: dict[int, Any]) -> None:
    """Puts into the memo what of a value cannot be copied."""
    if id(value) in memo or isinstance(value, nn.Module):
        return
    with contextlib.suppress(Exception):
        copy.deepcopy(value, dict(memo))
        return
    if isinstance(value, types.MethodType):
        _share_what_refuses(value.__self__, memo)
    elif isinstance(value, (dict, list, tuple, set, frozenset)):
        for item in list(value.values() if isinstance(value, dict) else value):
            _share_what_refuses(item, memo)
    else:
        memo[id(value)] = value


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


def _selected(
    model: nn.Module, exclude: Sequence[str], only: Sequence[str] | None
) -> set[nn.Module] | None:
    """The modules that may be touched; None for all.

    Raises:
        ValueError: If a pattern matches no module.
    """
    if not exclude and only is None:
        return None
    paths = list(model.named_modules(remove_duplicate=False))

    def matching(argument: str, given: Sequence[str]) -> set[nn.Module]:
        found: set[nn.Module] = set()
        for pattern in [given] if isinstance(given, str) else given:
            matches = [module for path, module in paths if fnmatch.fnmatchcase(path, pattern)]
            if not matches:
                raise ValueError(
                    f"fxfuse.optimize: expected {argument} to match modules, "
                    f"got {pattern!r}, which matches none"
                )
            found.update(below for module in matches for below in module.modules())
        return found

    selected = set(model.modules()) if only is None else matching("only", only)
    return selected - matching("exclude", exclude)


# ---- the operation --------------------------------------------------------------------------


class _Operation:
    """Gives plans to the modules of a tree, children first, and keeps what became of each norm."""

    def __init__(
        self,
        root: nn.Module,
        channels_last: ops.ChannelsLast,
        available: bool,
        untouchable: set[nn.Module],
        selected: set[nn.Module] | None,
    ) -> None:
        self.root = root
        self.channels_last = channels_last
        self.available = available
        self.untouchable = untouchable
        self.selected = selected
        self.boundaries = boundaries.Boundaries(patterns.fusions(channels_last, alone=True))
        self.waiting: dict[nn.Module, list[nn.Module]] = {}  # what each module leaves undecided
        self.settled: set[nn.Module] = set()  # norms that some module's graph calls
        self.open: set[nn.Module] = set()  # modules whose result a chain may go on from
        self.sites: dict[nn.Module, list[Site]] = {}  # by the module whose graph has them
        self.plans: dict[nn.Module, Plan] = {}  # the new ones
        self.kept: dict[nn.Module, Plan] = {}  # those of an earlier call

    def run(self) -> None:
        """Goes through the tree."""
        self._visit(self.root)

    def findings(self) -> _Findings:
        """What became of the norms in each module's graph, and which norms are in none."""
        paths = {module: path for path, module in self.root.named_modules()}
        found: _Findings = {}
        for module, sites in self.sites.items():
            planned = _PLAN in vars(module) and module not in self.kept
            found[paths[module]] = None if planned else tuple(sites)
        for module, path in paths.items():
            if isinstance(module, nn.GroupNorm) and module not in self.settled:
                found[path] = (_norm_site(module, "", Reason.NOT_CALLED.because()),)
        return found

    def undo(self) -> None:
        """Leaves the tree as it was."""
        for module in self.plans:
            _make_plain(module)
        _findings.pop(self.root, None)

    def try_out(self, example_inputs: Any, *, measure: bool) -> None:
        """Runs a copy of the model, and undoes what it shows to be wrong or slower."""
        from fxfuse import verify  # late: importing fxfuse should not wait for it

        buffers = {id(buffer) for buffer in self.root.buffers()}
        shared = (tensor for tensor in _tensors(self.root) if id(tensor) not in buffers)
        probe = restore(_share(self.root, shared))
        paths = {module: path for path, module in self.root.named_modules()}
        plans = {**self.kept, **self.plans}
        self.kept = {}  # their report is a new one
        forwards = {
            probe.get_submodule(paths[module]): plan.observer(module, measure)
            for module, plan in plans.items()
        }
        try:
            verify.run(probe, forwards, example_inputs)
        except BaseException:
            self.undo()
            raise
        # A norm may lie in the graphs of several modules.
        refused = {
            (_join(paths[module], path), line): check
            for module, plan in plans.items()
            for (path, line), check in (plan.checks or {}).items()
            if isinstance(check, Refusal)
        }
        for module, plan in plans.items():
            if plan.refuse(paths[module], refused):
                plan.learn_again(module)
            if not (plan.variants or plan.hopeful):
                _make_plain(module)
                self.sites[module] = list(plan.sites())

    def _visit(self, module: nn.Module) -> list[nn.Module]:
        """Treats a module; returns the norms and open modules in it that a parent may go on with.

        A module with two parents is treated once.
        """
        if module not in self.waiting:
            self.waiting[module] = []
            self.sites[module] = []
            if (refusal := self._not_entered(module)) is not None:
                if refusal.reason is Reason.EXCLUDED:
                    restore(module)  # an earlier call may not have excluded it
                self._refuse(module, refusal)
            else:
                below = dict.fromkeys(m for c in module.children() for m in self._visit(c))
                self._treat(module, list(below))
                self.waiting[module] = [module, *below]
        self.waiting[module] = [m for m in self.waiting[module] if self._is_undecided(m)]
        return self.waiting[module]

    def _is_undecided(self, module: nn.Module) -> bool:
        norm = isinstance(module, nn.GroupNorm) and module not in self.settled
        return norm or module in self.open

    def _not_entered(self, module: nn.Module) -> Refusal | None:
        if self.selected is not None and self.selected.isdisjoint(module.modules()):
            return Reason.EXCLUDED.because()
        if module in self.untouchable:
            return Reason.NOT_COPYABLE.because(module=type(module).__name__)
        return boundaries.not_entered(module)

    def _treat(self, module: nn.Module, below: list[nn.Module]) -> None:
        if (plan := vars(module).get(_PLAN)) is not None:
            self._keep(module, plan)
        elif self._may_hold_a_site(module, below):
            try:
                self._rewrite(module)
            except Untraceable as error:
                self._refuse(module, error.refusal)
            except Exception as error:  # one odd layer costs its own fusions, not the model
                self._refuse(module, tracing.untraceable(error).refusal)

    def _may_hold_a_site(self, module: nn.Module, below: list[nn.Module]) -> bool:
        """Whether to trace: for a norm that no graph has called, or a chain that may go on."""
        if type(module).forward in (nn.Module.forward, nn.GroupNorm.forward):
            return False
        return any(map(self._is_undecided, below)) or _mentions_group_norm(module)

    def _keep(self, module: nn.Module, plan: Plan) -> None:
        """Takes over what an earlier call has done."""
        sites = plan.sites()
        self.kept[module] = plan
        self.sites[module] = [_already(site) for site in sites]
        self._leave_out(module, plan)
        self._settle(module, sites)
        self._goes_on(module, self.boundaries.opens(module))

    def _goes_on(self, module: nn.Module, opens: bool) -> None:
        """Keeps whether a chain may go on from a module, which ends those inside of it."""
        self.open.difference_update(module.modules())
        if opens:
            self.open.add(module)

    def _rewrite(self, module: nn.Module) -> None:
        """Gives a module a plan if its graph has a site to fuse.

        Raises:
            Untraceable: If it has no graph.
        """
        if "forward" in vars(module):
            raise Untraceable(Reason.OWN_FORWARD.because(module=type(module).__name__))
        if boundaries.is_wrapper(module):
            wrapper = type(module).__name__
            raise Untraceable(Reason.PARALLEL_WRAPPER.because(wrapper=wrapper))
        if not isinstance(inspect.getattr_static(type(module), "forward"), types.FunctionType):
            raise Untraceable(Reason.UNTRACEABLE.because(error="it is not a plain method"))
        plan = Plan(module, self.channels_last, self._refusals(module), self._own_graphs(module))
        learned = plan.learn_usual(module, self.boundaries)
        # Where it takes further arguments, other calls may have more to fuse.
        sites = plan.sites()
        norms = {m for m in module.modules() if isinstance(m, nn.GroupNorm)} - self.settled
        left = norms.difference(module.get_submodule(site.module or "") for site in sites)
        plan.hopeful = len(plan.arguments.names) > 1 and (
            bool(left)
            or not all(site.fused for site in sites)
            or (not sites and _mentions_group_norm(module))
        )
        if self.available and (plan.variants or plan.hopeful):
            try:
                object.__setattr__(module, "__class__", _fused_class(type(module)))
            except TypeError as error:
                raise Untraceable(Reason.NOT_SUBCLASSABLE.because(error=error)) from error
            vars(module)[_PLAN] = self.plans[module] = plan
        traced = [outcome for outcome, trace in learned if trace is not None]
        if not traced:
            outcome, _ = learned[0]
            assert outcome.refusal is not None
            self._refuse(module, outcome.refusal)
            outcome.sites = numbered(module, self.sites[module])
            return
        self._goes_on(module, traced[0].opens)
        self.sites[module] = list(plan.sites())
        self._leave_out(module, plan)
        self._settle(module, self.sites[module])

    def _settle(self, module: nn.Module, sites: Iterable[Site]) -> None:
        """Keeps whose graph has the norms of some sites, of which nothing else is to report."""
        norms = {module.get_submodule(site.module or "") for site in sites}
        self.settled |= norms
        for norm in norms:
            if isinstance(norm, nn.GroupNorm) and norm is not module:
                self.sites.pop(norm, None)  # why it is excluded

    def _leave_out(self, module: nn.Module, plan: Plan) -> None:
        """Leaves out of the report what is part of a module's graphs."""
        for path in plan.inlined:
            self.sites.pop(module.get_submodule(path), None)

    def _refusals(self, module: nn.Module) -> dict[Key, Refusal]:
        """Why the norms of some of the modules below one are left alone."""
        if not self.available:
            refusal = Reason.LIBRARY_UNAVAILABLE.because()
            return {(path, None): refusal for path, _ in module.named_modules()}
        if self.selected is None:
            return {}
        excluded = Reason.EXCLUDED.because()
        return {(p, None): excluded for p, m in module.named_modules() if m not in self.selected}

    def _own_graphs(self, module: nn.Module) -> set[str]:
        """The GroupNorms below a module that are not norms but modules with one."""
        return {
            path
            for path, m in module.named_modules()
            if isinstance(m, nn.GroupNorm) and m is not module and self.sites.get(m)
        }

    def _refuse(self, module: nn.Module, refusal: Refusal) -> None:
        """A site for each norm that a module would have called."""
        # A chain that might have gone on in it ends for the same reason.
        for child in self.open.intersection(module.modules()):
            for outcome in self.plans[child].outcomes if child in self.plans else ():
                outcome.sites = {k: _ends(site, refusal) for k, site in outcome.sites.items()}
            self.sites[child] = [_ends(site, refusal) for site in self.sites[child]]
            self.open.remove(child)
        norms = [
            (path, m)
            for path, m in module.named_modules()
            if _is_group_norm(m) and m not in self.settled
        ]
        self.settled.update(norm for _, norm in norms)
        sites = [_norm_site(norm, path, refusal) for path, norm in norms]
        # Code may name the function, or an attribute of that name, which may be None.
        if not norms and _mentions_group_norm(module) and not hasattr(module, "group_norm"):
            sites = [Site("group_norm", "", "", False, refusal.reason.code, refusal.sentence)]
        self.sites[module] = sites


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


def _is_group_norm(module: nn.Module) -> bool:
    scripted = isinstance(module, torch.jit.ScriptModule)
    return isinstance(module, nn.GroupNorm) or (
        scripted and getattr(module, "original_name", "") == nn.GroupNorm.__name__
    )


def _norm_site(norm: Any, path: str, refusal: Refusal) -> Site:
    name = getattr(norm, "original_name", type(norm).__name__)
    text = f"{name}({norm.num_groups}, {norm.num_channels})"
    return Site(text, "", "", False, refusal.reason.code, refusal.sentence, path)


def _join(path: str, name: str) -> str:
    return ".".join(filter(None, (path, name)))


def _below(path: str, site: Site) -> Site:
    return dataclasses.replace(site, module=_join(path, site.module or ""))


def _ends(site: Site, refusal: Refusal) -> Site:
    return site.refused(refusal) if site.code == Reason.GRAPH_OUTPUT.code else site


def _already(site: Site) -> Site:
    if not site.fused:
        return site
    sentence = Reason.ALREADY_FUSED.because(activation=site.activation).sentence
    return dataclasses.replace(site, code=Reason.ALREADY_FUSED.code, reason=sentence)


# ---- the subclass ---------------------------------------------------------------------------


class _Fused:
    """What marks a subclass whose forward may run a plan."""


def _make_plain(module: nn.Module) -> None:
    """Takes a module's plan away and gives it its own class back."""
    if isinstance(module, _Fused):
        vars(module).pop(_PLAN, None)
        object.__setattr__(module, "__class__", tracing.plain(module))


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

    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # torch.compile goes through here and keeps the fusion and its guards; an exported program
        # is to run where there is no fxfuse.  The flag itself, because Dynamo of torch 2.11 takes
        # is_exporting() for true wherever it compiles.
        if not torch.compiler._is_exporting_flag:
            plan = self.__dict__.get(_PLAN)
            if plan is not None and (found := plan.find(self, args, kwargs)) is not None:
                run, values = found
                return run(self, *values)
        return cls.forward(self, *args, **kwargs)  # which may be another one by now

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
        tracing.ORIGINAL: cls,
    }
    _classes[cls] = tracing.subclass(cls, body, _Fused)
    return _classes[cls]


def _plain_reduction(module: Any, reduction: Any) -> Any:
    """A module's pickle without its plan, so that a process without fxfuse can load it."""
    if isinstance(reduction, str):
        return reduction
    fused, plain = type(module), tracing.plain(module)
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
