"""One module's forward as a graph, or the reason why there is none.

`torch.fx` runs a forward once, with proxies for its arguments, and writes down what it calls.  What
the forward decides while it runs is decided for ever, and what it does beside calling torch is
lost.  `trace` finds both: what would be lost is a refusal, and what was decided is returned with
the graph, so that a caller can check at each call that it would be decided alike.

The module's children are leaves: their calls are nodes, whatever they do inside.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import inspect
import random
import sys
import threading
import traceback
import types
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxfuse.guards import MISSING
from fxfuse.rewrite import Reason, Refusal


class Untraceable(Exception):
    """A module's forward that cannot be a graph; `refusal` says why."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.sentence)
        self.refusal = refusal


def untraceable(error: Exception) -> Untraceable:
    """What any other exception means for the module that it came from."""
    text = " ".join(str(error).split()) or type(error).__name__
    return Untraceable(Reason.UNTRACEABLE.because(error=text[:200].rstrip(".")))


@dataclass(frozen=True)
class Trace:
    """A graph and what it takes for granted.

    Attributes:
        graph: The forward's graph; its placeholders are the tensor arguments.
        signature: The forward's, without `self`.
        tensors: The arguments that stand for tensors: those without a default.
        constants: The other arguments' values, which are their defaults.
        attributes: Plain attributes that were read: the module, the name, the value.
        optional: Parameters and buffers that were read and are not None: the module, the name.
        containers: Modules whose children were read.
        queries: Functions of torch's modes that were asked, their arguments, their answers.
    """

    graph: fx.Graph
    signature: inspect.Signature
    tensors: tuple[str, ...]
    constants: dict[str, Any]
    attributes: list[tuple[nn.Module, str, Any]] = field(default_factory=list)
    optional: list[tuple[nn.Module, str]] = field(default_factory=list)
    containers: list[nn.Module] = field(default_factory=list)
    queries: list[tuple[Callable[..., Any], tuple[Any, ...], Any]] = field(default_factory=list)


_lock = threading.RLock()  # fx patches nn.Module for every thread


def trace(module: nn.Module, inlined: Collection[nn.Module] = ()) -> Trace:
    """Traces a module's forward with its children as leaves, and leaves no mark on it.

    Args:
        module: The module, in the training mode that the graph is for.
        inlined: Modules below it that are not leaves: the graph holds what they do.

    Raises:
        Untraceable: If the forward cannot be traced, or if the graph would not do all it does.
    """
    with _lock, _unchanged(module), _same_random_state():
        return _Tracer(module, inlined).run()


def _is_library(frame: types.FrameType) -> bool:
    """Whether code of torch or of ours runs in a frame, and not the model's."""
    name: str = frame.f_globals.get("__name__", "")
    return name == "torch" or name.startswith(("torch.", "fxfuse."))


# ---- proxies --------------------------------------------------------------------------------


class _TensorProxy(fx.Proxy):
    """An argument, which is a tensor: the caller checks that at each call."""

    # isinstance believes it; fx itself asks for the type.
    __class__ = property(lambda self: Tensor)


class _UnknownProxy(fx.Proxy):
    """A value that the graph computes.  To ask for its type is to decide by it."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        if _is_library(sys._getframe(1)):
            return type(self)
        raise Untraceable(
            Reason.UNTRACEABLE.because(error="it asks for the type of a computed value")
        )


# ---- the tracer -----------------------------------------------------------------------------

_QUERIES = (
    "is_grad_enabled",
    "is_inference_mode_enabled",
    "is_autocast_enabled",
    "is_autocast_cpu_enabled",
    "get_autocast_dtype",
    "get_autocast_cpu_dtype",
    "get_autocast_gpu_dtype",
)


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True  # a buffer's value must not decide either

    def __init__(self, module: nn.Module, inlined: Collection[nn.Module]) -> None:
        super().__init__()
        self.module = module
        self.inlined = inlined
        self.forward: Callable[..., Any] = type(module).forward
        self.thread = threading.get_ident()
        self.mode = _mode()
        self.base: types.FrameType | None = None
        self.listening = False  # while the forward runs, and not fx's own code for it
        own = (*module.parameters(), *module.buffers())
        self.own = {id(tensor) for tensor in own}
        self.containers: dict[nn.Module, None] = {}
        self.attributes: dict[tuple[nn.Module, str], Any] = {}
        self.optional: dict[tuple[nn.Module, str], None] = {}
        self.queries: list[tuple[Callable[..., Any], tuple[Any, ...], Any]] = []
        self.tensors, self.constants, self.signature = _arguments(self.forward)

    def run(self) -> Trace:
        names = {submodule: name for name, submodule in self.module.named_modules()}
        try:
            with self._recorded_queries(), self._recorded_attributes(names):
                graph = self.trace(self.module)
        except Untraceable:
            raise
        except Exception as error:
            frames = traceback.walk_tb(error.__traceback__)
            if any(f.f_globals.get("__name__") == "torch.utils.checkpoint" for f, _ in frames):
                raise Untraceable(Reason.CONTEXT_MANAGER.because()) from error
            raise untraceable(error) from error
        for (owner, name), value in self.attributes.items():
            if (kept := _snapshot(value)) is _MUTABLE:
                path = ".".join(filter(None, (names[owner], name)))
                raise Untraceable(
                    Reason.MUTABLE_ATTRIBUTE.because(name=path, kind=type(value).__name__)
                )
            self.attributes[owner, name] = kept
        return Trace(
            graph,
            self.signature,
            self.tensors,
            self.constants,
            [(owner, name, value) for (owner, name), value in self.attributes.items()],
            list(self.optional),
            list(self.containers),
            self.queries,
        )

    # -- what fx calls --

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        placeholders = {name: self._placeholder(name) for name in self.tensors}

        def forward() -> Any:
            self.base = sys._getframe()
            args, kwargs = _call_arguments(self.signature, {**self.constants, **placeholders})
            self.listening = True
            try:
                return root_fn(self.module, *args, **kwargs)
            finally:
                self.listening = False

        return forward, []

    def _placeholder(self, name: str) -> fx.Proxy:
        return _TensorProxy(self.create_node("placeholder", name, (), {}), self)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _UnknownProxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return m not in self.inlined

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if threading.get_ident() != self.thread:
            return forward(*args, **kwargs)  # another thread's model, through fx's patch
        if m is self.module:
            raise Untraceable(Reason.UNTRACEABLE.because(error="it calls itself"))
        if m in self.inlined:
            return super().call_module(m, forward, args, kwargs)
        with self._deaf():
            return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self.thread:
            return attr_val
        with self._deaf():
            return super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_arg(self, a: Any) -> Any:
        if issubclass(type(a), fx.Proxy):
            return a.node
        if isinstance(a, Tensor) and id(a) not in self.own and a not in self.tensor_attrs:
            # Not the module's, so the graph could not read it again.
            raise Untraceable(Reason.TENSOR_CONSTANT.because())
        if isinstance(a, dict) and type(a) is not dict:
            raise Untraceable(Reason.UNTRACEABLE.because(error=f"it makes a {type(a).__name__}"))
        with self._deaf():
            return super().create_arg(a)

    @contextlib.contextmanager
    def _deaf(self) -> Iterator[None]:
        """What fx reads for its own purposes is not what the forward reads."""
        listening, self.listening = self.listening, False
        try:
            yield
        finally:
            self.listening = listening

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        if _mode() != self.mode:
            raise Untraceable(Reason.CONTEXT_MANAGER.because())
        node = super().create_node(kind, *args, **kwargs)
        if line := self._source_line():
            node.meta["stack_trace"] = line
        return node

    def _hears(self) -> bool:
        return self.listening and threading.get_ident() == self.thread

    def _source_line(self) -> str | None:
        """The innermost line of the forward that is neither torch's nor ours."""
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self.base:
            if not _is_library(frame):
                code = frame.f_code
                return f'  File "{code.co_filename}", line {frame.f_lineno}, in {code.co_name}\n'
            frame = frame.f_back
        return None

    # -- what the forward reads --

    @contextlib.contextmanager
    def _recorded_attributes(self, names: dict[nn.Module, str]) -> Iterator[None]:
        """Writes down every attribute that is read of the module and of those below it."""
        classes = {module: type(module) for module in names}
        try:
            for module, cls in classes.items():
                if isinstance(module, torch.jit.ScriptModule):
                    continue  # runs no Python that could read an attribute
                try:
                    object.__setattr__(module, "__class__", self._recorder(cls, names))
                except TypeError as error:
                    raise Untraceable(Reason.NOT_SUBCLASSABLE.because(error=error)) from error
            yield
        finally:
            for module, cls in classes.items():
                object.__setattr__(module, "__class__", cls)

    def _recorder(self, cls: Any, names: dict[nn.Module, str]) -> type:
        tracer = self

        def __getattribute__(self: Any, name: str) -> Any:
            if name in _UNRECORDED or not tracer._hears():
                return cls.__getattribute__(self, name)
            if name == "_modules":
                tracer.containers[self] = None
                return cls.__getattribute__(self, name)
            try:
                value = cls.__getattribute__(self, name)
            except AttributeError:
                state = self.__dict__
                if not any(name in state[kind] for kind in ("_parameters", "_buffers", "_modules")):
                    tracer.attributes.setdefault((self, name), MISSING)
                raise  # Python goes on to __getattr__
            if type(value) is types.MethodType:
                return value
            if isinstance(value, Tensor):
                tracer.optional[self, name] = None
                path = ".".join(filter(None, (names[self], name)))
                return tracer.create_proxy("get_attr", path, (), {})
            tracer.attributes.setdefault((self, name), value)
            return value

        def __getattr__(self: Any, name: str) -> Any:
            value = cls.__getattr__(self, name)
            if tracer._hears():
                state = self.__dict__
                if name in state["_modules"]:
                    tracer.containers[self] = None
                elif value is None:
                    tracer.attributes.setdefault((self, name), None)
                elif name in state["_parameters"] or name in state["_buffers"]:
                    tracer.optional[self, name] = None
            return value

        body = {"__getattribute__": __getattribute__, "__getattr__": __getattr__}
        return subclass(cls, body)

    @contextlib.contextmanager
    def _recorded_queries(self) -> Iterator[None]:
        """Writes down every question about torch's modes."""
        original = {name: getattr(torch, name) for name in _QUERIES if hasattr(torch, name)}

        def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def ask(*args: Any) -> Any:
                answer = function(*args)
                asker = sys._getframe(1).f_globals.get("__name__", "")
                if self._hears() and not asker.startswith("torch."):
                    self.queries.append((function, args, answer))
                return answer

            return ask

        try:
            for name, function in original.items():
                setattr(torch, name, recorded(function))
            yield
        finally:
            for name, function in original.items():
                setattr(torch, name, function)


class _Bare:
    """A base that keeps a class's `__init_subclass__` from hearing of our subclasses of it."""

    def __init_subclass__(cls) -> None:
        pass


def subclass(cls: type, body: dict[str, Any], *marks: type) -> type:
    """A subclass that passes for the class by its names.

    Args:
        cls: The class.
        body: The subclass's own attributes.
        marks: Further bases, without instance state.

    Raises:
        TypeError: If the class allows none.
    """
    names = ("__module__", "__qualname__", "__doc__")
    body = {**{name: getattr(cls, name, None) for name in names}, **body}
    try:
        bare = () if issubclass(cls, _Bare) else (_Bare,)
        return type(cls)(cls.__name__, (*bare, *marks, cls), body)
    except Exception as error:
        raise TypeError(f"{cls.__qualname__} cannot be subclassed: {error}") from error


# What nn.Module keeps in every instance, and what Python asks for by itself.
_UNRECORDED = (frozenset(vars(nn.Module())) | {"__class__", "__dict__", "forward"}) - {
    "training",
    "_modules",
}


def _arguments(
    forward: Callable[..., Any],
) -> tuple[tuple[str, ...], dict[str, Any], inspect.Signature]:
    """The tensor arguments, the other ones' values, and the signature without `self`."""
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    signature = inspect.Signature(parameters)
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = [parameter for parameter in parameters if parameter.kind not in variadic]
    tensors = tuple(p.name for p in named if p.default is inspect.Parameter.empty)
    constants = {p.name: p.default for p in named if p.default is not inspect.Parameter.empty}
    return tensors, constants, signature


def _call_arguments(
    signature: inspect.Signature, values: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    bound = inspect.BoundArguments(signature, OrderedDict())
    for name in signature.parameters:
        if name in values:
            bound.arguments[name] = values[name]
    return bound.args, bound.kwargs


# ---- what must not change while a forward is traced -----------------------------------------


_is_grad_enabled = torch.is_grad_enabled
_is_inference_mode_enabled = torch.is_inference_mode_enabled
_is_autocast_enabled = torch.is_autocast_enabled
_get_autocast_dtype = torch.get_autocast_dtype


def _mode() -> tuple[Any, ...]:
    """The state that context managers switch and that fx does not write down.

    Activation checkpointing is seen by the hooks on saved tensors that it installs.
    """
    return (
        _is_grad_enabled(),
        _is_inference_mode_enabled(),
        *((_is_autocast_enabled(d), _get_autocast_dtype(d)) for d in ("cpu", "cuda")),
        torch._C._autograd._top_saved_tensors_default_hooks(True),
    )


@contextlib.contextmanager
def _same_random_state() -> Iterator[None]:
    """Refuses a forward that drew a random number; the generators are put back."""
    numpy = sys.modules.get("numpy")

    def numpy_state() -> Any:
        return numpy.random.get_state(legacy=False) if numpy else None

    python_before, torch_before, numpy_before = (
        random.getstate(),
        torch.get_rng_state(),
        numpy_state(),
    )
    try:
        yield
    finally:
        drawn = (
            random.getstate() != python_before
            or not torch.equal(torch.get_rng_state(), torch_before)
            or repr(numpy_state()) != repr(numpy_before)
        )
        random.setstate(python_before)
        torch.set_rng_state(torch_before)
        if numpy:
            numpy.random.set_state(numpy_before)
        if drawn:  # whatever else went wrong
            raise Untraceable(Reason.RANDOM_NUMBER.because())


@contextlib.contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Refuses a forward that changed an attribute; the attributes are put back."""
    before = {m: {k: (v, _contents(v)) for k, v in vars(m).items()} for m in module.modules()}
    try:
        yield
    finally:
        changed = None
        for submodule, state in before.items():
            now = vars(submodule)
            for name in [*state, *(name for name in now if name not in state)]:
                value, contents = state.get(name, (MISSING, None))
                if now.get(name, MISSING) is value and _same(_contents(value), contents):
                    continue
                changed = changed or name
                if value is MISSING:
                    del now[name]
                    continue
                now[name] = value
                _put_back(value, contents)
        if changed:  # whatever else went wrong
            raise Untraceable(Reason.CHANGES_STATE.because(name=changed))


def _contents(value: Any) -> Any:
    """A shallow copy of a container, to see later whether it was changed."""
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, (list, set)):
        return list(value)
    return None


def _same(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    return len(one) == len(other) and all(
        a is b or (type(a) is type(b) is tuple and all(map(_is, a, b)))
        for a, b in zip(one, other, strict=True)
    )


def _is(one: Any, other: Any) -> bool:
    return one is other


def _put_back(value: Any, contents: Any) -> None:
    if contents is not None:
        value.clear()
        (value.extend if isinstance(value, list) else value.update)(contents)


# ---- values that a guard can compare --------------------------------------------------------

_MUTABLE: Any = object()
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


def _snapshot(value: Any) -> Any:
    """A value to compare with later, or `_MUTABLE` where a change would not be seen."""
    if isinstance(value, _CONSTANT):
        return value
    if type(value) in (tuple, list, set, frozenset):
        items = [_snapshot(item) for item in value]
        return _MUTABLE if any(item is _MUTABLE for item in items) else type(value)(items)
    if type(value) is dict:
        copies = {key: _snapshot(item) for key, item in value.items()}
        return _MUTABLE if any(item is _MUTABLE for item in copies.values()) else copies
    return _MUTABLE
