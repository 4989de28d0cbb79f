"""What a graph takes for granted of the module it was traced from, checked at each call.

Each guard is one Python expression.  All of a graph's guards are compiled into one function,
because a call to a method for each would cost more than what they check.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

MISSING: Any = type("Missing", (), {"__repr__": lambda self: "<missing>"})()
"""The value of an attribute that a forward asked for and that is not there."""

Name = Callable[[object], str]
"""Gives an object a name in the expression."""


@dataclass
class Children:
    """A module whose children the forward reads has the same ones."""

    owner: nn.Module
    children: dict[str, nn.Module | None]

    def expression(self, name: Name) -> str:
        """True while it holds."""
        return f"{name(self.owner)}._modules == {name(self.children)}"


@dataclass
class Attribute:
    """A plain attribute that the forward reads has the same value."""

    owner: nn.Module
    name: str
    value: Any

    def expression(self, name: Name) -> str:
        """True while it holds."""
        if self.value is MISSING:
            return f"not hasattr({name(self.owner)}, {self.name!r})"
        return _equal(f"getattr({name(self.owner)}, {self.name!r})", self.value, name)


@dataclass
class Present:
    """A tensor that the forward reads is there."""

    owner: nn.Module
    name: str

    def expression(self, name: Name) -> str:
        """True while it holds."""
        return f"getattr({name(self.owner)}, {self.name!r}) is not None"


@dataclass
class Replaced:
    """A module that is no longer called has the same type and settings and no hooks."""

    module: nn.Module
    type: type
    settings: dict[str, Any]

    @classmethod
    def of(cls, module: nn.Module) -> Replaced:
        """The guard of a module as it is now."""
        settings = {
            name: value
            for name, value in vars(module).items()
            if name not in _MODULE_STATE and isinstance(value, (bool, int, float, str))
        }
        return cls(module, type(module), settings)

    def expression(self, name: Name) -> str:
        """True while it holds."""
        module = name(self.module)
        hooks = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
        return " and ".join(
            [
                f"type({module}) is {name(self.type)}",
                *(f"not {module}._{kind}" for kind in hooks),
                f"'forward' not in {module}.__dict__",
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


Guard = Children | Attribute | Present | Replaced | Query

_MODULE_STATE = frozenset(vars(nn.Module()))

# Hooks on every module would not be called for those that a graph no longer calls.
_NO_GLOBAL_HOOKS = " and ".join(
    f"not hooks._global_{kind}"
    for kind in ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
)


class Guards:
    """The guards of one graph.

    Attributes:
        items: The guards.
        hold: Whether all of them hold.
    """

    def __init__(self, items: tuple[Guard, ...]) -> None:
        self.items = items
        scope: dict[str, Any] = {"hooks": nn.modules.module}

        def name(value: object) -> str:
            known = next((key for key, other in scope.items() if other is value), None)
            key = known or f"object_{len(scope)}"
            scope[key] = value
            return key

        checks = "\n        and ".join(
            [_NO_GLOBAL_HOOKS, *(item.expression(name) for item in items)]
        )
        source = f"""
def hold():
    try:
        return (
        {checks}
        )
    except AttributeError:
        return False
"""
        exec(source, scope)
        self.hold: Callable[[], bool] = scope["hold"]

    def __deepcopy__(self, memo: dict[int, Any]) -> Guards:
        # Of the copied modules, which the memo has or gets.
        return Guards(copy.deepcopy(self.items, memo))


def _equal(expression: str, value: Any, name: Name) -> str:
    """An expression that is true where another has a value, and its type: 1 is not 1.0 or True."""
    if value is None or isinstance(value, bool):
        return f"{expression} is {value}"
    known = name(value)
    if callable(value):
        return f"{expression} is {known}"
    return f"({expression} is {known} or {name(_same)}({expression}, {known}))"


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)
