"""What a graph takes for granted of a call and of the module it was traced from.

A call's arguments say which graph it may run (`Arguments`), and the module's state whether that
graph still does what the forward would do (`Guards`).  Both are generated functions, because a
call to a method for each argument and each guard would cost more than what they check.  Neither
holds a module: guards address modules by path, from the one that is called, so a copy or a replica
is checked itself, and nothing keeps a model alive.
"""

from __future__ import annotations

import copy
import enum
import functools
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


class _Missing(enum.Enum):  # which deepcopy gives back as it is
    MISSING = "missing"


MISSING: Any = _Missing.MISSING
"""The value of an attribute that a forward asked for and that is not there."""


# ---- the arguments of a call ----------------------------------------------------------------

TENSOR, NONE, DEFAULT, OTHER = "t", "n", "d", "?"
"""What an argument is: a tensor, None, its default (if that is not None), anything else."""


class Arguments:
    """How the calls of a forward differ: a letter for each argument makes a call's pattern.

    Attributes:
        names: The arguments, without `self`, `*args` and `**kwargs`.
        usual: The pattern of a call that gives a tensor for every argument without a default.
        bind: Takes a call's arguments as the forward does, and raises TypeError as it does.
            Returns the call's pattern and the arguments in the order of `names`; None where
            `*args` or `**kwargs` are not empty.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        parameters = list(inspect.signature(forward).parameters.values())[1:]
        named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        self._signature = inspect.Signature(
            [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
        )
        self.names = tuple(p.name for p in named)
        self.defaults = {p.name: p.default for p in named if p.default is not p.empty}
        self.usual = "".join(
            TENSOR if p.default is p.empty else NONE if p.default is None else DEFAULT
            for p in named
        )
        self.bind: Callable[..., tuple[str, tuple[Any, ...]] | None] = self._binder()

    def others(self) -> tuple[str, ...]:
        """Further patterns that are usual: None for what has no default and is not the first."""
        fewer = self.usual[:1] + self.usual[1:].replace(TENSOR, NONE)
        return () if fewer == self.usual else (fewer,)

    def values(
        self, pattern: str, tensors: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The positional and keyword arguments of a call of a pattern with the given tensors."""
        bound = self._signature.bind_partial()
        for name, kind in zip(self.names, pattern, strict=True):
            given = {TENSOR: tensors, DEFAULT: self.defaults}.get(kind, {})
            bound.arguments[name] = given.get(name)
        return bound.args, bound.kwargs

    def text(self, pattern: str) -> str:
        """What a call of a pattern gives, for the report: `mask as a tensor`."""
        kinds = {TENSOR: "a tensor", NONE: "None", DEFAULT: "its default"}
        return ", ".join(
            f"{name} as {kinds[kind]}"
            for name, kind, usual in zip(self.names, pattern, self.usual, strict=True)
            if kind != usual
        )

    def _binder(self) -> Callable[..., Any]:
        scope: dict[str, Any] = {"_Tensor": Tensor, "_same": _same}
        parameters, extra, kinds = [], [], []
        for index, parameter in enumerate(self._signature.parameters.values()):
            name = parameter.name
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                extra.append(name)
            else:
                kind = f"{TENSOR!r} if isinstance({name}, _Tensor) else {NONE!r} if {name} is None"
                if name in self.defaults:
                    default = f"_default_{index}"
                    scope[default] = parameter.default
                    parameter = parameter.replace(default=_Name(default))
                    if scope[default] is not None:
                        kind += f" else {DEFAULT!r} if {name} is {default}"
                        if isinstance(scope[default], (bool, int, float, str)):
                            kind += f" or _same({name}, {default})"
                kinds.append(f"({kind} else {OTHER!r})")
            parameters.append(parameter)
        source = f"def bind{inspect.Signature(parameters)}:\n"
        if extra:
            source += f"    if {' or '.join(extra)}:\n        return None\n"
        values = "".join(f"{name}, " for name in self.names)
        source += f"    return {' + '.join(kinds) or repr('')}, ({values})\n"
        exec(source, scope)
        return scope["bind"]  # type: ignore[no-any-return]

    def __deepcopy__(self, memo: dict[int, Any]) -> Arguments:
        return self


class _Name:
    """Prints as a name, where a signature prints a default."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


@functools.lru_cache(maxsize=256)
def arguments(forward: Callable[..., Any]) -> Arguments:
    """The `Arguments` of a forward, as the function that its class has."""
    return Arguments(forward)


# ---- the state of a module ------------------------------------------------------------------

Name = Callable[[object], str]
"""Gives an object a name in the expression; of a path, that of the module there."""


@dataclass(frozen=True)
class Path:
    """A module, by its path from the one that is called."""

    text: str


@dataclass
class Children:
    """A module whose children the forward reads has children of the same names and classes."""

    owner: Path
    types: dict[str, type]

    @classmethod
    def of(cls, owner: Path, module: nn.Module) -> Children:
        """The guard of a module as it is now."""
        return cls(owner, {name: type(child) for name, child in module._modules.items()})

    def expression(self, name: Name) -> str:
        """True while it holds."""
        children = f"{name(self.owner)}._modules"
        return (
            f"[*{children}] == {[*self.types]!r}"
            f" and [*map(type, {children}.values())] == {name([*self.types.values()])}"
        )


@dataclass
class Attribute:
    """A plain attribute that the forward reads has the same value."""

    owner: Path
    name: str
    value: Any

    def expression(self, name: Name) -> str:
        """True while it holds."""
        if self.value is MISSING:
            return f"not hasattr({name(self.owner)}, {self.name!r})"
        return _equal(f"getattr({name(self.owner)}, {self.name!r})", self.value, name)


@dataclass
class Outside:
    """What code finds outside of the module's state is the same.

    Attributes:
        owner: Of a closure its cell; otherwise what has the name: a module of Python's, the scope
            of a function without one, a class, an object.
    """

    owner: Any
    name: str
    value: Any

    def expression(self, name: Name) -> str:
        """True while it holds."""
        owner = name(self.owner)
        if self.value is MISSING:
            return f"not hasattr({owner}, {self.name!r})"
        found = f"{owner}.{self.name}"
        if isinstance(self.owner, dict):
            found = f"{owner}[{self.name!r}]"
        elif isinstance(self.owner, types.CellType):
            found = f"{owner}.cell_contents"
        return _equal(found, self.value, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Outside:
        return self


@dataclass
class Method:
    """A method of a module that the forward calls is the same."""

    owner: Path
    name: str
    function: Callable[..., Any]

    def expression(self, name: Name) -> str:
        """True while it holds."""
        return f"{name(self.owner)}.{self.name}.__func__ is {name(self.function)}"


@dataclass
class Present:
    """A tensor that the forward reads is there."""

    owner: Path
    name: str

    def expression(self, name: Name) -> str:
        """True while it holds."""
        owner = name(self.owner)
        # The second is the rule, the first is faster and true of most.
        return (
            f"({owner}._parameters.get({self.name!r}) is not None"
            f" or getattr({owner}, {self.name!r}) is not None)"
        )


@dataclass
class Replaced:
    """A module that the graph knows from inside has the same type and settings and no hooks."""

    module: Path
    type: type
    settings: dict[str, Any]
    absent: tuple[str, ...]

    @classmethod
    def inlined(cls, path: Path, module: nn.Module) -> Replaced:
        """The guard of a module whose forward was traced, which says what it reads."""
        return cls(path, type(module), {}, ())

    @classmethod
    def trusted(cls, path: Path, module: nn.Module) -> Replaced:
        """The guard of a module that is called, and of which is known what it writes to."""
        inplace = getattr(module, "inplace", None)
        return cls(path, type(module), {} if inplace is None else {"inplace": inplace}, ())

    @classmethod
    def fused(cls, path: Path, module: nn.Module) -> Replaced:
        """The guard of a module that a fused operator stands for."""
        settings = {
            name: value
            for name, value in vars(module).items()
            if not (name.startswith("_") or name == "training")
            and isinstance(value, (bool, int, float, str))
        }
        absent = tuple(name for name, value in module._parameters.items() if value is None)
        return cls(path, type(module), settings, absent)

    def expression(self, name: Name) -> str:
        """True while it holds."""
        module = name(self.module)
        hooks = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
        return " and ".join(
            [
                f"type({module}) is {name(self.type)}",
                *(f"not {module}._{kind}" for kind in hooks),
                f"'forward' not in {module}.__dict__",
                # DataParallel's replicas have their parameters among the attributes.
                *(
                    f"{module}._parameters.get({key!r}) is None"
                    f" and {module}.__dict__.get({key!r}) is None"
                    for key in self.absent
                ),
                *(_equal(f"{module}.{key}", value, name) for key, value in self.settings.items()),
            ]
        )


@dataclass
class Query:
    """A mode of torch that the forward asks for is the same."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    answer: Any

    def expression(self, name: Name) -> str:
        """True while it holds."""
        return f"{name(self.function)}(*{name(self.args)}) == {name(self.answer)}"


Guard = Children | Attribute | Outside | Method | Present | Replaced | Query

# Hooks on every module would not be called for those that a graph no longer calls.
_NO_GLOBAL_HOOKS = " and ".join(
    f"not hooks._global_{kind}"
    for kind in ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
)


class Guards:
    """The guards of one graph.

    Attributes:
        items: The guards.
        hold: Whether all of them hold of a module.
    """

    def __init__(self, items: tuple[Guard, ...]) -> None:
        self.items = items
        scope: dict[str, Any] = {"hooks": nn.modules.module}
        paths = {"": "self"}
        lines = []

        def name(value: object) -> str:
            if isinstance(value, Path):
                return module(value.text)
            known = next((key for key, other in scope.items() if other is value), None)
            key = known or f"object_{len(scope)}"
            scope[key] = value
            return key

        def module(path: str) -> str:
            if path not in paths:
                above, _, last = path.rpartition(".")
                child = f"{module(above)}._modules[{last!r}]"
                paths[path] = f"module_{len(paths)}"
                lines.append(f"{paths[path]} = {child}")
            return paths[path]

        checks = [_NO_GLOBAL_HOOKS, *(item.expression(name) for item in items)]
        source = "\n".join(
            [
                "def hold(self):",
                "    try:",
                *(f"        {line}" for line in lines),
                "        return (",
                "            " + "\n            and ".join(checks),
                "        )",
                "    except (AttributeError, KeyError, ValueError):",
                "        return False",
            ]
        )
        exec(source, scope)
        self.hold: Callable[[nn.Module], bool] = scope["hold"]

    def __deepcopy__(self, memo: dict[int, Any]) -> Guards:
        # The values of attributes may be modules, which the memo has or gets.
        return Guards(copy.deepcopy(self.items, memo))


def _equal(expression: str, value: Any, name: Name) -> str:
    """An expression that is true where another has a value, and its type: 1 is not 1.0 or True."""
    if value is None or isinstance(value, bool):
        return f"{expression} is {value}"
    known = name(value)
    if callable(value) or not isinstance(value, _BY_VALUE):
        return f"{expression} is {known}"
    return f"({expression} is {known} or {name(_same)}({expression}, {known}))"


# Any other object is itself alone: an equal one may be asked for other attributes.
_BY_VALUE = (
    *(int, float, complex, str, bytes, tuple, list, dict, set, frozenset, enum.Enum),
    torch.device,
)


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)
