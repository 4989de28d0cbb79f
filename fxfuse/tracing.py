"""One module's forward as a graph, or the reason why there is none.

`torch.fx` runs a forward once, with proxies for its arguments, and writes down what it calls.  What
the forward decides while it runs is decided for ever, and what it does beside calling torch is
lost.  `trace` finds both: what would be lost is a refusal, and what was decided is returned with
the graph, so that a caller can check at each call that it would be decided alike.

The module's children are leaves: their calls are nodes, whatever they do inside.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import pickle
import random
import sys
import threading
import traceback
import types
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from fxfuse import guards, nodes, outside
from fxfuse.guards import MISSING, TENSOR, Guard, Path
from fxfuse.outside import is_library
from fxfuse.rewrite import Reason, Refusal

ORIGINAL = "_fxfuse_original"
"""What a class that stands for another keeps that under."""


def plain(module: nn.Module) -> Any:
    """The class of a module, or the one that it stands for: what the model was written as."""
    return vars(type(module)).get(ORIGINAL, type(module))


class Untraceable(Exception):
    """A module's forward that cannot be a graph; `refusal` says why."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.sentence)
        self.refusal = refusal


def untraceable(error: Exception) -> Untraceable:
    """What an exception means for the module that it came from."""
    if isinstance(error, Untraceable):
        return error
    text = " ".join(str(error).split()) or type(error).__name__
    return Untraceable(Reason.UNTRACEABLE.because(error=text[:200].rstrip(".")))


@dataclass(frozen=True)
class Trace:
    """A graph and what it takes for granted.

    Attributes:
        graph: The forward's graph; its placeholders are the arguments, of which those that are no
            tensors are not used.
        pattern: The pattern of the calls that it is for.
        guards: What must hold of the module.
        inlined: The paths of the modules that it goes through.
        reads_mode: Whether the forward asks for the module's `training`.
    """

    graph: fx.Graph
    pattern: str
    guards: tuple[Guard, ...] = ()
    inlined: tuple[str, ...] = ()
    reads_mode: bool = False


lock = threading.RLock()
"""Held by whoever traces, because fx patches nn.Module for every thread."""


def trace(
    module: nn.Module, inlined: Collection[nn.Module] = (), pattern: str | None = None
) -> Trace:
    """Traces a module's forward with its children as leaves, and leaves no mark on it.

    Args:
        module: The module, in the training mode that the graph is for.
        inlined: Modules below it that are not leaves: the graph holds what they do.
        pattern: Of the call (see `guards.Arguments`); None for the usual one.

    Raises:
        Untraceable: If the forward cannot be traced, or if the graph would not do all it does.
    """
    with lock, _unchanged(module), _same_random_state():
        tracer = _Tracer(module, inlined, pattern)
        try:
            return tracer.run()
        finally:
            # fx and our classes leave cycles, in which the module would live on for a while.
            vars(tracer).clear()


@functools.lru_cache(maxsize=1024)
def _asks(code: types.CodeType) -> bool:
    """Whether a function may ask for the type of a value."""
    names = {"isinstance", "__class__"}.intersection(code.co_names)
    return bool(names) or any(step.opname == "MATCH_CLASS" for step in dis.get_instructions(code))


# ---- proxies --------------------------------------------------------------------------------


class _Value(fx.Proxy):
    """A value that the graph computes.  To ask what it is would be to decide by it."""

    def _asked(self, *args: Any) -> Any:
        error = "it asks for the size, the type or the value of something computed"
        raise cast(_Tracer, self.tracer).refused(Reason.UNTRACEABLE.because(error=error))

    # Not __index__: torch's functions would ask, instead of taking it for a node.
    __len__ = __int__ = __float__ = __complex__ = _asked

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        frame = sys._getframe(1)
        if frame.f_code is torch.is_tensor.__code__:
            return self._asked()
        # torch's C++ code asks about its arguments in the name of whoever calls it.
        return type(self) if is_library(frame) or not _asks(frame.f_code) else self._asked()

    def __getattr__(self, name: str) -> fx.proxy.Attribute:
        return _Attribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("tracer", "node", "_node", "root", "attr"):  # fx's own
            error = "it sets an attribute of something computed"
            raise cast(_Tracer, self.tracer).refused(Reason.UNTRACEABLE.because(error=error))
        super().__setattr__(name, value)


def _augment(name: str, function: Callable[[Any, Any], Any]) -> None:
    def record(self: _Value, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    setattr(_Value, name, record)


# fx has none of them, and Python would take `a = a + b` for `a += b`: another tensor.
for _name, _function in nodes.AUGMENTED.items():
    _augment(_name, _function)


class _Attribute(_Value, fx.proxy.Attribute):
    """An attribute of a value, or a method that is about to be called."""


class _TensorArgument(_Value):
    """An argument, which is a tensor: the caller checks that at each call."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        # The model believes it.  To torch it must not be one: its C++ code would crash.
        frame = sys._getframe(1)
        believes = frame.f_code is torch.is_tensor.__code__ or not is_library(frame)
        return Tensor if believes else type(self)


# ---- the tracer -----------------------------------------------------------------------------

_QUERIES = (
    "is_grad_enabled",
    "is_inference_mode_enabled",
    "is_autocast_enabled",
    "is_autocast_cpu_enabled",
    "get_autocast_dtype",
    "get_autocast_cpu_dtype",
    "get_autocast_gpu_dtype",
    "get_default_dtype",
    "are_deterministic_algorithms_enabled",
    "is_deterministic_algorithms_warn_only_enabled",
    "get_float32_matmul_precision",
    "get_num_threads",
    "get_num_interop_threads",
    "initial_seed",
)

# What context managers call.  That the mode is what it was before proves nothing: it may be
# another one when the graph runs.
_SWITCHES = tuple(
    (owner, name)
    for owner, prefixes in (
        (
            torch._C,
            (
                "_InferenceMode",
                "_set_cublas",
                "_set_cudnn",
                "_set_deterministic",
                "_set_float32",
                "_set_fwd_grad",
                "_set_grad",
                "_set_mkldnn",
                "_set_onednn",
                "_set_sdp",
            ),
        ),
        (torch, ("set_autocast_dtype", "set_autocast_enabled", "set_autocast_cpu_enabled")),
    )
    for name in dir(owner)
    if name.startswith(prefixes)
)


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True  # a buffer's value must not decide either
    thread = 0
    listening = False  # while the forward runs, and not fx's own code for it

    def __init__(
        self, module: nn.Module, inlined: Collection[nn.Module], pattern: str | None
    ) -> None:
        super().__init__()
        self.module = module
        self.inlined = inlined
        self.forward: Callable[..., Any] = plain(module).forward
        self.arguments = guards.arguments(self.forward)
        self.pattern = self.arguments.usual if pattern is None else pattern
        self.names = {submodule: name for name, submodule in module.named_modules()}
        self.thread = threading.get_ident()
        self.mode = _mode()
        self.base: types.FrameType | None = None
        self.refusal: Refusal | None = None  # the first, which the forward may have caught
        own = (*module.parameters(), *module.buffers())
        self.own = {id(tensor) for tensor in own}
        self.containers: dict[nn.Module, None] = {}
        self.attributes: dict[tuple[nn.Module, str], Any] = {}
        self.methods: dict[tuple[nn.Module, str], Callable[..., Any]] = {}
        self.optional: dict[tuple[nn.Module, str], None] = {}
        self.queries: list[guards.Query] = []
        reached = dict.fromkeys(plain(m) for m in (module, *inlined))
        others = dict.fromkeys(map(plain, self.names))
        self.outside = outside.Surroundings(reached, others)
        self.watch = outside.Watch(self.outside, self._hears, self.refused)

    def run(self) -> Trace:
        classes = dict.fromkeys(plain(module) for module in (self.module, *self.inlined))
        own: list[Guard] = [guards.Outside(cls, "forward", cls.forward) for cls in classes]
        try:
            self.outside.look(cls.forward for cls in classes)
            self._refuse_unseen()
            with self.outside.unchanged(), self._recorded_modes(), self._recorded_attributes():
                graph = self.trace(self.module)
        except outside.Stop:
            assert self.refusal is not None
        except outside.Changed as change:
            raise Untraceable(Reason.CHANGES_STATE.because(name=change.name)) from change
        except Exception as error:
            frames = traceback.walk_tb(error.__traceback__)
            if any(f.f_globals.get("__name__") == "torch.utils.checkpoint" for f, _ in frames):
                raise Untraceable(Reason.CONTEXT_MANAGER.because()) from error
            if isinstance(error, Untraceable):
                raise
            raise untraceable(error) from error
        if self.refusal is not None:
            raise Untraceable(self.refusal)
        self._refuse_unseen()
        return Trace(
            graph,
            self.pattern,
            (
                # Attributes first: `training` is what tells one variant from the other.
                *(self._attribute(*read) for read in self.attributes.items()),
                *self.queries,
                *self.watch.questions,
                *own,
                *self.outside.guards(),
                *(guards.Method(self._path(m), name, f) for (m, name), f in self.methods.items()),
                *(guards.Present(self._path(owner), name) for owner, name in self.optional),
                *(guards.Children.of(self._path(owner), owner) for owner in self.containers),
                *(guards.Replaced.inlined(self._path(m), m) for m in self.inlined),
            ),
            tuple(self.names[m] for m in self.inlined),
            any(name == "training" for _, name in self.attributes),
        )

    def _refuse_unseen(self) -> None:
        if self.outside.unseen is not None:
            name, kind = self.outside.unseen
            raise Untraceable(Reason.MUTABLE_ATTRIBUTE.because(name=name, kind=kind))

    def _path(self, module: nn.Module) -> Path:
        return Path(self.names[module])

    def _attribute(self, read: tuple[nn.Module, str], value: Any) -> guards.Attribute:
        owner, name = read
        if (kept := outside.snapshot(value)) is outside.MUTABLE:
            path = ".".join(filter(None, (self.names[owner], name)))
            kind = type(value).__name__
            raise Untraceable(Reason.MUTABLE_ATTRIBUTE.because(name=path, kind=kind))
        return guards.Attribute(self._path(owner), name, kept)

    def refused(self, refusal: Refusal) -> Untraceable:
        """What to raise, kept in mind should the forward catch it."""
        self.refusal = self.refusal or refusal
        return Untraceable(refusal)

    # -- what fx calls --

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        tensors = {
            name: self._placeholder(name, kind)
            for name, kind in zip(self.arguments.names, self.pattern, strict=True)
        }

        def forward() -> Any:
            self.base = sys._getframe()
            args, kwargs = self.arguments.values(self.pattern, tensors)
            self.listening = True
            try:
                with self.watch.on():
                    return root_fn(self.module, *args, **kwargs)
            finally:
                self.listening = False
                self.base = None

        return forward, []

    def _placeholder(self, name: str, kind: str) -> fx.Proxy:
        proxy = _TensorArgument if kind == TENSOR else _Value
        return proxy(self.create_node("placeholder", name, (), {}), self)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Value(node, self)

    def create_proxy(self, *args: Any, **kwargs: Any) -> fx.Proxy:
        try:
            return super().create_proxy(*args, **kwargs)
        except Exception as error:
            raise self.refused(untraceable(error).refusal) from error

    def to_bool(self, obj: fx.Proxy) -> bool:
        raise self.refused(Reason.UNTRACEABLE.because(error="a branch depends on what it computes"))

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        raise self.refused(Reason.UNTRACEABLE.because(error="it iterates over what it computes"))

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
            raise self.refused(Reason.UNTRACEABLE.because(error="it calls itself"))
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
            raise self.refused(Reason.TENSOR_CONSTANT.because())
        if isinstance(a, dict) and type(a) is not dict:
            kind = type(a).__name__
            raise self.refused(Reason.UNTRACEABLE.because(error=f"it makes a {kind}"))
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
            raise self.refused(Reason.CONTEXT_MANAGER.because())
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
            if not is_library(frame):
                code = frame.f_code
                return f'  File "{code.co_filename}", line {frame.f_lineno}, in {code.co_name}\n'
            frame = frame.f_back
        return None

    # -- what the forward reads --

    @contextlib.contextmanager
    def _recorded_attributes(self) -> Iterator[None]:
        """Writes down every attribute that is read of the module and of those below it.

        Meanwhile each is of the class that it was written as, whatever it stands for now.
        """
        classes = {module: type(module) for module in self.names}
        recorders: dict[type, type] = {}
        try:
            for module in classes:
                if isinstance(module, torch.jit.ScriptModule):
                    continue  # runs no Python that could read an attribute
                cls = plain(module)
                try:
                    if cls not in recorders:
                        recorders[cls] = self._recorder(cls)
                    object.__setattr__(module, "__class__", recorders[cls])
                except TypeError as error:
                    raise Untraceable(Reason.NOT_SUBCLASSABLE.because(error=error)) from error
            yield
        finally:
            for module, cls in classes.items():
                object.__setattr__(module, "__class__", cls)

    def _recorder(self, cls: Any) -> type:
        """A subclass that records what is read from the modules of the tree.

        A container that the forward makes, such as a slice of a ModuleList, is of this class too
        but not of the tree: it holds what the forward has read there.
        """
        tracer = self

        def __getattribute__(self: Any, name: str) -> Any:
            if name in _UNRECORDED or not tracer._hears() or self not in tracer.names:
                return cls.__getattribute__(self, name)
            if name in ("__dict__", "forward") and is_library(sys._getframe(1)):
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
                owner = value.__self__
                if isinstance(owner, type) or (
                    isinstance(owner, nn.Module) and owner in tracer.names
                ):
                    tracer.methods[cast(nn.Module, self), name] = value.__func__
                    return value
            if isinstance(value, Tensor):
                tracer.optional[self, name] = None
                path = ".".join(filter(None, (tracer.names[self], name)))
                return tracer.create_proxy("get_attr", path, (), {})
            tracer.attributes.setdefault((self, name), value)
            tracer.outside.look([value])
            return value

        def __getattr__(self: Any, name: str) -> Any:
            value = cls.__getattr__(self, name)
            if tracer._hears() and self in tracer.names:
                state = self.__dict__
                if name in state["_modules"]:
                    tracer.containers[self] = None
                elif value is None:
                    tracer.attributes.setdefault((self, name), None)
                elif name in state["_parameters"] or name in state["_buffers"]:
                    tracer.optional[self, name] = None
            return value

        def _named_members(self: Any, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
            """What parameters() and buffers() are made of: tensors here as by their names."""
            prefix = kwargs.get("prefix")
            for name, member in cls._named_members(self, *args, **kwargs):
                if isinstance(member, Tensor) and tracer._hears() and self in tracer.names:
                    path = name.removeprefix(f"{prefix}.") if prefix else name
                    owner, _, last = path.rpartition(".")
                    member = getattr(cls.get_submodule(self, owner), last)
                yield name, member

        body = {
            "__getattribute__": __getattribute__,
            "__getattr__": __getattr__,
            "_named_members": _named_members,
        }
        return subclass(cls, body)

    @contextlib.contextmanager
    def _recorded_modes(self) -> Iterator[None]:
        """Writes down every question about torch's modes, and refuses to switch one."""
        queries: list[tuple[Any, str]] = [(torch, n) for n in _QUERIES if hasattr(torch, n)]
        if torch.distributed.is_available():
            queries.append((torch.distributed, "is_initialized"))
        originals = {(owner, name): getattr(owner, name) for owner, name in (*queries, *_SWITCHES)}

        def asked(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def ask(*args: Any) -> Any:
                answer = function(*args)
                if self._hears() and not is_library(sys._getframe(1)):
                    self.queries.append(guards.Query(function, args, answer))
                return answer

            return ask

        def switched(function: Callable[..., Any]) -> Callable[..., Any]:
            def switch(*args: Any) -> Any:
                if self._hears():
                    raise self.refused(Reason.CONTEXT_MANAGER.because())
                return function(*args)

            return switch

        apply = vars(torch.autograd.Function)["apply"]

        def applied(cls: type, *args: Any, **kwargs: Any) -> Any:
            if self._hears():
                error = f"it applies {cls.__name__}, a torch.autograd.Function"
                raise self.refused(Reason.UNTRACEABLE.because(error=error))
            return apply.__get__(None, cls)(*args, **kwargs)

        try:
            torch.autograd.Function.apply = classmethod(applied)  # type: ignore[method-assign, assignment]
            for owner, name in queries:
                setattr(owner, name, asked(originals[owner, name]))
            for owner, name in _SWITCHES:
                setattr(owner, name, switched(originals[owner, name]))
            yield
        finally:
            torch.autograd.Function.apply = apply  # type: ignore[method-assign]
            for (owner, name), function in originals.items():
                setattr(owner, name, function)


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
_UNRECORDED = (frozenset(vars(nn.Module())) | {"__class__", "_named_members"}) - {
    "training",
    "_modules",
}


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


class RandomState:
    """The state of every generator that a forward may draw from without naming it."""

    def __init__(self) -> None:
        cuda = torch.cuda.default_generators  # empty until CUDA is used
        self._torch = [(g, g.get_state()) for g in (torch.default_generator, *cuda)]
        self._numpy = sys.modules.get("numpy")  # for whoever has not imported it has not drawn
        self._numpy_state = self._ask_numpy()
        self._python_state = random.getstate()

    def put_back(self) -> bool:
        """Sets the generators back; returns whether that changed one."""
        drawn = False
        if random.getstate() != self._python_state:
            drawn = True
            random.setstate(self._python_state)
        if self._ask_numpy() != self._numpy_state:
            drawn = True
            assert self._numpy is not None
            self._numpy.random.set_state(pickle.loads(self._numpy_state))
        for generator, state in self._torch:
            if not torch.equal(generator.get_state(), state):
                drawn = True
                generator.set_state(state)
        return drawn

    def _ask_numpy(self) -> bytes:
        # As bytes, because arrays have no one answer to ==.
        return pickle.dumps(self._numpy and self._numpy.random.get_state(legacy=False))


@contextlib.contextmanager
def _same_random_state() -> Iterator[None]:
    """Refuses a forward that drew a random number; the generators are put back."""
    before = RandomState()
    try:
        yield
    finally:
        if before.put_back():  # whatever else went wrong
            raise Untraceable(Reason.RANDOM_NUMBER.because())


@contextlib.contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Refuses a forward that changed an attribute; the attributes are put back."""
    before: dict[int, Any] = {}
    for submodule in module.modules():
        outside.write_down(vars(submodule), "", before)
    try:
        yield
    finally:
        changed = [name for container in before.values() for name in container.put_back()]
        if changed:  # whatever else went wrong
            raise Untraceable(Reason.CHANGES_STATE.because(name=changed[0]))
