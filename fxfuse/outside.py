"""What a forward finds and does outside of torch: watched while it is traced, guarded afterwards.

A graph repeats the calls of torch's functions and nothing else.  What the forward finds in global
names, closures, classes and objects is frozen in it, so each such value is guarded, and what it
writes there, or anywhere else, would be lost, so it is refused and undone.

Two things find this out.  `Surroundings` reads the code of the forward, and of each function that
it names or calls, for the places where values come from: these are compared before and after.  The
rest of the world, files, streams, the clock, other threads, is in the reach of C functions alone,
and Python announces each call of one (`sys.setprofile`).  So `Watch` needs no list of what does
harm: a C function that is not known to be harmless is stopped before it runs, if it is the model's
code that calls it, or Python's library for the model's code.  Two of the world's answers are worth
a guard instead, because forwards do ask for them: an environment variable, and whether a logger
would write.
"""

from __future__ import annotations

import contextlib
import dis
import enum
import functools
import gc
import inspect
import logging
import os
import random
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from fxfuse import guards
from fxfuse.guards import MISSING, Guard
from fxfuse.rewrite import Reason, Refusal

# ---- what a container or an object held -----------------------------------------------------


@dataclass
class Contents:
    """What a container held, or an object in its attributes.

    Attributes:
        value: The container; of an object its `__dict__`.
        name: Of the attribute or the variable that it is, or lies in.
        items: What it held.
    """

    value: Any
    name: str
    items: list[Any]

    @classmethod
    def of(cls, value: Any, name: str) -> Contents:
        """What a container holds now."""
        return cls(value, name, list(value.items() if isinstance(value, dict) else value))

    def put_back(self) -> list[str]:
        """Makes it what it was; returns the names of the attributes that had changed."""
        now = Contents.of(self.value, self.name).items
        if len(now) == len(self.items) and all(map(_alike, now, self.items)):
            return []
        if not isinstance(self.value, dict):
            self.value.clear()
            (self.value.update if isinstance(self.value, set) else self.value.extend)(self.items)
            return [self.name]
        before = dict(self.items)
        changed = [key for key, value in now if before.get(key, MISSING) is not value]
        changed += [key for key in before if key not in self.value]
        # Key by key, because another thread may be reading the others.
        for key in changed:
            if key in before:
                self.value[key] = before[key]
            else:
                del self.value[key]
        if [*self.value] != [*before]:
            for key in before:  # in the order that they had
                self.value[key] = self.value.pop(key)
        return [_attribute_name(self.name, key) for key in changed] or [self.name]


@dataclass
class _TensorContents:
    """What a tensor of the model's author held, that is not the module's."""

    value: Tensor
    name: str
    version: int
    items: Tensor

    def put_back(self) -> list[str]:
        """Makes it what it was; returns its name if it had changed."""
        if self.value._version == self.version:
            return []
        with torch.no_grad():
            self.value.copy_(self.items)
        return [self.name]


def _attribute_name(inside: str, key: Any) -> str:
    """The attribute that an entry of a dict is or lies in."""
    kinds = ("", "_parameters", "_buffers", "_modules")
    return str(key) if inside in kinds else inside


def _alike(one: Any, other: Any) -> bool:
    """Whether two items are the same object, or two entries of a dict the same key and value."""
    if type(one) is type(other) is tuple and len(one) == len(other) == 2:
        return one[0] is other[0] and one[1] is other[1]
    return one is other


def write_down(value: Any, name: str, found: dict[int, Any]) -> None:
    """Keeps what a value, and every container and plain object in it, holds.

    Args:
        value: The value.
        name: Of the attribute or the variable that it is.
        found: What is kept, by the identity of the container.
    """
    if isinstance(value, (dict, list, set, deque)):
        if id(value) in found:
            return
        found[id(value)] = Contents.of(value, name)
    if isinstance(value, dict):
        for key, item in value.items():
            write_down(item, _attribute_name(name, key), found)
    elif isinstance(value, (list, tuple, deque)):
        for item in value:
            write_down(item, name, found)
    elif _is_plain_object(value) and id(value) not in found:
        held = getattr(value, "__dict__", {})
        found[id(value)] = Contents.of(held, name)
        for item in held.values():
            write_down(item, name, found)


# ---- whose a value is -----------------------------------------------------------------------


def _home(value: Any) -> str | None:
    """The package that a module, a class or a function is of; None for any other object."""
    if isinstance(value, types.ModuleType):
        return value.__name__.partition(".")[0]
    if isinstance(value, (type, types.FunctionType)):
        return str(value.__module__).partition(".")[0]
    return None


@functools.lru_cache(maxsize=1024)
def _is_library_package(name: str) -> bool:
    """Whether a package is Python's, torch's, ours, or installed: no code of the model's author."""
    if name in sys.stdlib_module_names or name in ("torch", "fxfuse"):
        return True
    file = str(getattr(sys.modules.get(name), "__file__", None))
    return "site-packages" in file or "dist-packages" in file


def _is_plain_object(value: Any) -> bool:
    """Whether a value is an object of a class that someone wrote, neither Python nor torch."""
    cls = type(value)
    if cls.__module__ == "builtins" or isinstance(value, (nn.Module, Tensor, type, enum.Enum)):
        return False
    home = _home(cls)
    return (
        (type(getattr(value, "__dict__", None)) is dict or hasattr(cls, "__slots__"))
        and home != "torch"
        and home not in sys.stdlib_module_names
    )


def is_library(frame: types.FrameType) -> bool:
    """Whether code of torch or of ours runs in a frame, and not the model's."""
    name: str = frame.f_globals.get("__name__", "")
    return name == "torch" or name.startswith(("torch.", "fxfuse."))


# ---- what a forward finds -------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Place:
    """Where code finds a value that is not its module's: a global name, a closure, a default."""

    owner: Any
    name: str

    @property
    def key(self) -> tuple[int, str]:
        """The same for the same place."""
        return id(self.owner), self.name

    @property
    def value(self) -> Any:
        """What is there; MISSING where nothing is that is always the same object."""
        if isinstance(self.owner, types.CellType):
            try:
                return self.owner.cell_contents
            except ValueError:
                return MISSING
        if isinstance(self.owner, dict):
            return self.owner.get(self.name, MISSING)
        if isinstance(self.owner, types.FunctionType):
            return getattr(self.owner, self.name, MISSING)
        if isinstance(self.owner, types.ModuleType):
            return vars(self.owner).get(self.name, MISSING)
        value = inspect.getattr_static(self.owner, self.name, MISSING)
        if isinstance(self.owner, type):
            return MISSING if isinstance(value, types.MemberDescriptorType) else value
        if isinstance(value, types.MemberDescriptorType):  # of __slots__
            return getattr(self.owner, self.name, MISSING)
        return MISSING if hasattr(type(value), "__get__") else value

    def put_back(self, value: Any) -> None:
        """Sets it to what it was."""
        if isinstance(self.owner, types.CellType):
            self.owner.cell_contents = value
        elif isinstance(self.owner, type) and self.name not in vars(self.owner):
            pass  # it is a base's
        elif _is_plain_object(self.owner) and not isinstance(
            inspect.getattr_static(type(self.owner), self.name, None), types.MemberDescriptorType
        ):
            pass  # it is in its `__dict__`, which is put back as a whole
        elif value is MISSING:
            if isinstance(self.owner, dict):
                del self.owner[self.name]
            else:
                delattr(self.owner, self.name)
        elif isinstance(self.owner, dict):
            self.owner[self.name] = value
        else:
            setattr(self.owner, self.name, value)

    def guards(self) -> list[Guard]:
        """What tells whether the value is still the same, where a guard can tell."""
        value = self.value
        if value is MISSING and _is_plain_object(self.owner) and not hasattr(self.owner, self.name):
            return [guards.Outside(self.owner, self.name, MISSING)]
        whole = isinstance(value, (types.ModuleType, nn.Module, type(MISSING)))
        if whole or (isinstance(self.owner, types.FunctionType) and self.name.startswith("__")):
            return []
        kept = value if _is_plain_object(value) else snapshot(value, outside=True)
        return [] if kept is MUTABLE else [guards.Outside(self.owner, self.name, kept)]


class Surroundings:
    """The places where the code of a forward, and of what that names or calls, finds values.

    Whatever an object or a class is called where it is used, it is asked for its attributes by
    name.  So of each object that is found, and of the classes of the modules, those attributes are
    places that any of the code names.
    """

    def __init__(self, classes: Iterable[type], others: Iterable[type] = ()) -> None:
        """Nothing is looked at yet.

        Args:
            classes: Of the modules whose forwards run.  Their methods count as named where a
                function names an attribute like them.  Their packages and files that are not
                installed may change; other libraries are not looked at.
            others: Of further modules that the forwards may reach.
        """
        self.bases = dict.fromkeys(base for cls in classes for base in cls.__mro__)
        self.own = {*map(_home, self.bases)} - {"torch", "builtins"}
        self.places: dict[tuple[int, str], _Place] = {}
        self.unseen: tuple[str, str] | None = None  # a name, and what is there
        self._before: list[tuple[_Place, Any]] = []
        self._contents: dict[int, Any] = {}
        self._caches: dict[Any, int] = {}  # how many answers were not in them
        self._done: set[Any] = set()
        self._names: set[str] = set()
        self._strings: set[str] = set()  # those of the names that are text
        self._owners: dict[int, Any] = {}  # the objects and classes of which any name is a place
        further = (base for cls in others for base in cls.__mro__)
        for base in dict.fromkeys((*self.bases, *further)):
            if self._may_change(base):
                self._owners[id(base)] = base

    def look(self, values: Iterable[Any]) -> None:
        """Looks at the code and the objects that values are or hold, and at all that they reach."""
        waiting = list(values)
        while waiting:
            while waiting:
                waiting += self._look(waiting.pop())
            waiting += self._named_attributes()

    def enter(self, frame: types.FrameType) -> Refusal | None:
        """Looks at a function that is about to run; returns why it cannot be, if so."""
        code, scope = frame.f_code, frame.f_globals
        if code in self._done:
            return None
        home = str(scope.get("__name__", "")).partition(".")[0]
        if home not in self.own and _is_library_package(home):
            self._done.add(code)
            return None
        if set(code.co_freevars) - {"__class__"}:  # of which only the function knows the cells
            return Reason.NOT_REPEATED.because(function=code.co_name)
        self.look(self._look_at_code(code, scope, scope.get("__name__")))
        return None

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Refuses a forward that changed what it found outside of the module; that is put back."""
        try:
            yield
        finally:
            changed = [name for kept in self._contents.values() for name in kept.put_back()]
            caches = [c for c, misses in self._caches.items() if c.cache_info().misses != misses]
            for place, value in self._before:
                if place.value is not value:
                    changed.append(place.name)
                    place.put_back(value)
            if changed:  # whatever else went wrong
                for cache in caches:  # whose function is to do it again
                    cache.cache_clear()
                raise Changed(changed[0])

    def guards(self) -> list[Guard]:
        """What tells whether all that was found is still the same."""
        return [guard for place in self.places.values() for guard in place.guards()]

    def _may_change(self, value: Any) -> bool:
        home = _home(value)
        return home is None or home in self.own or not _is_library_package(home)

    def _look(self, value: Any) -> list[Any]:
        """What a value leads to: functions, objects, and containers of these."""
        if isinstance(value, (staticmethod, classmethod, types.MethodType)):
            return [value.__func__, getattr(value, "__self__", None)]
        if isinstance(value, property):
            return [value.fget]
        if isinstance(value, functools.partial):
            return [value.func, *value.args, *value.keywords.values()]
        if isinstance(value, functools._lru_cache_wrapper):
            self._caches.setdefault(value, value.cache_info().misses)
            return [value.__wrapped__]
        if isinstance(value, types.BuiltinMethodType) and not isinstance(
            value.__self__, types.ModuleType
        ):
            write_down(value.__self__, value.__name__, self._contents)
            return [value.__self__]
        if isinstance(value, types.FunctionType):
            if value in self._done or not self._may_change(value):
                return []
            self._done.add(value)
            found = [self._found(value, name) for name in ("__defaults__", "__kwdefaults__")]
            cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            found += [self._found(cell, name) for name, cell in cells if name != "__class__"]
            return found + self._look_at_code(value.__code__, value.__globals__, value.__module__)
        if isinstance(value, (dict, list, tuple, set, frozenset, deque)):
            if id(value) in self._owners or len(value) > 1000:
                return []
            if not isinstance(value, (tuple, frozenset)):
                self._owners[id(value)] = value
            return list(value.values() if isinstance(value, dict) else value)
        if isinstance(value, type) and self._may_change(value):
            self._owners[id(value)] = value
            return []
        cls = type(value)
        if _is_plain_object(value) and id(value) not in self._owners and self._may_change(cls):
            self._owners[id(value)] = value
            self._owners.update((id(base), base) for base in cls.__mro__ if self._may_change(base))
        return []

    def _look_at_code(
        self, code: types.CodeType, scope: dict[str, Any], module: str | None
    ) -> list[Any]:
        """What the global names of some code, and the methods that it names, lead to."""
        self._done.update(_codes(code))
        names, strings, chains = _named(code)
        self._names.update(names, strings)
        self._strings.update(strings)
        python = sys.modules.get(module or "")
        home = python if python is not None and vars(python) is scope else scope
        found = []
        for stored, first, *rest in chains:
            if first not in scope and not stored:
                continue  # Python's own
            value = self._found(home, str(first))
            found.append(value)
            for name in rest:
                if not (hasattr(value, "__dict__") and self._may_change(value)):
                    break
                found.append(value := self._found(value, str(name)))
        for base in filter(self._may_change, self.bases):
            for name in vars(base).keys() & set(names):
                if isinstance(vars(base)[name], types.FunctionType):
                    found.append(self._found(base, name))
        return found

    def _named_attributes(self) -> list[Any]:
        """What those attributes lead to that any code so far names of any object so far."""
        found = []
        for owner in list(self._owners.values()):
            if isinstance(owner, (dict, list, set, deque)):
                continue
            cls = owner if isinstance(owner, type) else type(owner)
            held = set(getattr(owner, "__dict__", ()) if owner is not cls else ()) & self._names
            for base in cls.__mro__:
                if self._may_change(base):
                    held |= {
                        name
                        for name in vars(base).keys() & self._names
                        if not isinstance(vars(base)[name], types.FunctionType)
                    }
            if not isinstance(owner, type):
                held |= {name for name in self._strings if not hasattr(owner, name)}
            for name in held:
                if (id(owner), name) not in self.places:
                    found.append(self._found(owner, name))
        return found

    def _found(self, owner: Any, name: str) -> Any:
        """The value of a place, which is watched from now on."""
        place = _Place(owner, name)
        if place.key in self.places:
            return self.places[place.key].value
        self.places[place.key] = place
        value = place.value
        self._before.append((place, value))
        write_down(value, name, self._contents)
        if type(value) is Tensor and isinstance(owner, (dict, types.ModuleType, types.CellType)):
            kept = _TensorContents(value, name, value._version, value.detach().clone())
            self._contents.setdefault(id(value), kept)
        if self.unseen is None and _changes_unseen(value):
            self.unseen = name, type(value).__name__
        return value


class Changed(Exception):
    """A forward has changed what it found outside; `name` says what."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def _changes_unseen(value: Any) -> bool:
    """Whether a value is data that changes without a trace: an array, an iterator, a weakref."""
    if isinstance(value, (type, nn.Module, types.ModuleType, Tensor)):
        return False
    lazy = isinstance(value, (Iterator, torch.Generator)) and not hasattr(value, "write")
    return (
        lazy
        or type(value).__module__.startswith("numpy.random")
        or hasattr(type(value), "__array_interface__")
        or isinstance(value, weakref.ref)
    )


@functools.lru_cache(maxsize=4096)
def _codes(code: types.CodeType) -> tuple[types.CodeType, ...]:
    """Some code, and that of the functions and comprehensions in it."""
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return (code, *(deep for const in inner for deep in _codes(const)))


@functools.lru_cache(maxsize=4096)
def _named(code: types.CodeType) -> tuple[tuple[str, ...], tuple[str, ...], tuple[Any, ...]]:
    """The names that code has.

    Returns:
        All of them; the strings that may be names, for `getattr`; and the global names, each after
        whether the code sets it, and before the attributes asked of it.
    """
    names: list[str] = []
    strings: list[str] = []
    chains: list[list[Any]] = []
    for each in _codes(code):
        names += each.co_names
        strings += [c for c in each.co_consts if isinstance(c, str) and c.isidentifier()]
        chain: list[Any] = []
        for step in dis.get_instructions(each):
            if step.opname == "LOAD_GLOBAL":
                chains.append(chain := [False, step.argval])
            elif step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                chains.append(chain := [True, step.argval])
            elif step.opname in ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR"):
                chain.append(step.argval)
            elif step.opname not in ("CACHE", "COPY", "DUP_TOP"):  # the latter for `a.b += 1`
                chain = []
    return tuple(names), tuple(strings), tuple(map(tuple, chains))


# ---- values that a guard can compare --------------------------------------------------------

MUTABLE: Any = object()
"""What stands for a value whose changes a guard would not see."""

_CONSTANT = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
    functools.partial,
    torch._ops.OpOverload,
    torch._ops.OpOverloadPacket,
    nn.Module,
    type(MISSING),
)


def snapshot(value: Any, *, outside: bool = False) -> Any:
    """A value to compare with later, or `MUTABLE` where a change would not be seen.

    Args:
        value: The value.
        outside: Whether an object that someone wrote may stand for itself, because what is asked
            of it is guarded on its own.
    """
    if isinstance(value, _CONSTANT) or (outside and _is_plain_object(value)):
        return value
    if type(value) in (tuple, list, set, frozenset):
        items = [snapshot(item, outside=outside) for item in value]
        return MUTABLE if any(item is MUTABLE for item in items) else type(value)(items)
    if type(value) is dict:
        copies = {key: snapshot(item, outside=outside) for key, item in value.items()}
        return MUTABLE if any(item is MUTABLE for item in copies.values()) else copies
    return MUTABLE


# ---- what a forward does --------------------------------------------------------------------


class Stop(BaseException):
    """Ends a forward at a call that must not be made, so that no `except Exception` goes on."""


def environment(name: str) -> str | None:
    """A variable of the environment; None where it is not set."""
    return os.environ.get(name)


def logs(logger: str, level: int) -> bool:
    """Whether a logger writes what has a level."""
    return logging.getLogger(logger).isEnabledFor(level)


# C functions with no effect but on what they are given, and the same answer each time.
_HARMLESS_PACKAGES = frozenset(
    {"torch", "numpy", "math", "cmath", "operator", "itertools", "functools", "collections"}
    | {"_operator", "_functools", "_collections", "_abc", "_sre", "_struct", "_json", "_weakref"}
    | {"_typing", "_heapq", "_bisect", "_string"}
)
_HARMLESS_TYPES = (
    *(type(None), bool, int, float, complex, str, bytes, tuple, list, dict, set, frozenset),
    *(slice, range, deque, bytearray, types.MappingProxyType, types.GeneratorType),
    *(types.FunctionType, types.MethodType, property),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_HARMLESS_FUNCTIONS = frozenset((sys.intern, sys._getframe, sys.exc_info))
_HARMFUL_BUILTINS = frozenset(
    {"print", "input", "open", "exec", "eval", "compile", "breakpoint", "globals", "vars"}
)
# Of Python's library, what only looks at objects or makes classes, whatever that takes.
_HARMLESS_CALLERS = frozenset(
    {"inspect", "collections", "enum", "dataclasses", "typing", "abc", "re", "copy", "functools"}
)


def _is_harmless(function: Any) -> bool:
    """Whether a C function has no effect but on what it is given, and always the same answer."""
    owner = function.__self__
    if isinstance(owner, Tensor):  # not a proxy: what is done to it, the graph does not do again
        name = function.__name__
        return name.startswith("__") or not name.endswith("_")
    if owner is None or isinstance(owner, types.ModuleType):
        home = str(function.__module__ or "torch")
        if function in _HARMLESS_FUNCTIONS:
            return True
        if home == "builtins":
            return function.__name__ not in _HARMFUL_BUILTINS
        return not home.startswith("numpy.random") and (
            home.partition(".")[0] in _HARMLESS_PACKAGES
        )
    if isinstance(owner, type):
        home = owner.__module__.partition(".")[0]
        return home == "builtins" or home in _HARMLESS_PACKAGES
    home = type(owner).__module__
    if home.startswith("numpy.random"):
        return False
    if function.__qualname__.startswith("object."):
        return True
    home = home.partition(".")[0]
    return isinstance(owner, _HARMLESS_TYPES) or home == "re" or home in _HARMLESS_PACKAGES


# What `torch.backends` asks when its settings are read.
_SETTINGS = frozenset(
    function
    for name, function in vars(torch._C).items()
    if name.startswith(
        ("_get_cublas", "_get_cudnn", "_get_mkldnn", "_get_onednn", "_get_deterministic")
    )
)


class Watch:
    """Stops a forward at the first call that a graph would not repeat.

    Attributes:
        questions: What it has asked the world: functions, their arguments and the answers.
    """

    def __init__(
        self,
        surroundings: Surroundings,
        hears: Callable[[], bool],
        refuse: Callable[[Refusal], object],
    ) -> None:
        """A watch that is not on.

        Args:
            surroundings: Look at each function that is called.
            hears: Whether the forward runs, and not fx's own code for it.
            refuse: Keeps why the forward was stopped.
        """
        self.surroundings = surroundings
        self.hears = hears
        self.refuse = refuse
        self.questions: list[guards.Query] = []
        self.asking: types.FrameType | None = None  # what is run to answer a question

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Watches what this thread calls meanwhile; a profiler that was on goes on afterwards."""
        before = sys.getprofile()
        collects = gc.isenabled()
        gc.disable()  # or what finalizers do would be taken for the forward's doing
        sys.setprofile(self._hear)
        try:
            yield
        finally:
            sys.setprofile(None)
            if collects:
                gc.enable()
            if callable(before):
                sys.setprofile(before)
            elif before is not None:  # cProfile's, which only it can set
                before.enable()

    def _hear(self, frame: types.FrameType, event: str, function: Any) -> None:
        if self.asking is not None:
            if event == "return" and frame is self.asking:
                self.asking = None
            return
        if event == "c_call":
            if function in _SETTINGS and self.hears() and self._model_asks(frame):
                self.questions.append(guards.Query(function, (), function()))
            elif not (is_library(frame) or _is_harmless(function)):
                self._judge(frame, function)
        elif event == "call" and not is_library(frame) and self.hears():
            if (ask := _QUESTIONS.get(frame.f_code)) is not None:
                if self._model_calls(frame):
                    self._ask(frame, ask)
            elif (refusal := self.surroundings.enter(frame)) is not None:
                self._stop(refusal)

    def _judge(self, frame: types.FrameType, function: Any) -> None:
        caller = frame.f_globals.get("__name__", "").partition(".")[0]
        if caller in _HARMLESS_CALLERS or not (self.hears() and self._model_calls(frame)):
            return
        owner = function.__self__
        if isinstance(owner, random.Random) or "numpy.random" in (
            f"{type(owner).__module__} {function.__module__}"
        ):
            self._stop(Reason.RANDOM_NUMBER.because())
        called = function.__qualname__
        while _is_stdlib(frame):
            called, frame = frame.f_code.co_name, cast(types.FrameType, frame.f_back)
        self._stop(Reason.NOT_REPEATED.because(function=called))

    def _model_calls(self, frame: types.FrameType) -> bool:
        """Whether it is the model's code that has called, directly or through Python's library."""
        caller: types.FrameType | None = frame
        while caller is not None and _is_stdlib(caller):
            if caller.f_globals.get("__name__", "").startswith("importlib."):
                return False  # done only once anyway
            caller = caller.f_back
        return caller is not None and not is_library(caller)

    def _model_asks(self, frame: types.FrameType | None) -> bool:
        """Whether it is the model's code that reads one of `torch.backends`' settings."""
        while frame is not None and frame.f_globals["__name__"].startswith("torch.backends"):
            frame = frame.f_back
        return frame is not None and not is_library(frame)

    def _ask(self, frame: types.FrameType, ask: Callable[[dict[str, Any]], Any]) -> None:
        question = ask(frame.f_locals)
        if question is None:
            self._stop(Reason.NOT_REPEATED.because(function=frame.f_code.co_name))
        function, *args = question
        self.asking = frame
        self.questions.append(guards.Query(function, tuple(args), function(*args)))

    def _stop(self, refusal: Refusal) -> None:
        self.refuse(refusal)
        raise Stop


def _is_stdlib(frame: types.FrameType) -> bool:
    home: str = frame.f_globals.get("__name__", "")
    return home.partition(".")[0] in sys.stdlib_module_names


def _ask_environment(given: dict[str, Any]) -> Any:
    return (environment, given["key"]) if given["self"] is os.environ else None


def _ask_logger(given: dict[str, Any]) -> Any:
    logger, level = given["self"], given["level"]
    known = logger is logging.getLogger(logger.name)
    return (logs, logger.name, level) if known else None


_Environment: Any = type(os.environ)

# What to write down of a call of Python's library, from its arguments; None: that stops it.
_QUESTIONS: dict[types.CodeType, Callable[[dict[str, Any]], Any]] = {
    _Environment.__getitem__.__code__: _ask_environment,
    **{
        getattr(_Environment, name).__code__: lambda given: None
        for name in ("__setitem__", "__delitem__", "__iter__", "__len__", "copy")
    },
    logging.Logger.isEnabledFor.__code__: _ask_logger,
}
