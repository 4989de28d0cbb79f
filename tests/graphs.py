"""Hypothesis strategies for models: `models()` hold chains to fuse, `near_misses()` hold none.

`DIALECTS` gives the graph of a model as each tracer writes it.

A model is made of spellings that are drawn by name from the two tables below, so that what
Hypothesis prints says what was run, and every model can be pickled.  Shapes and a seed are drawn,
never elements.  Everything is float64.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import hypothesis.strategies as st
import torch
import torch.nn.functional as F
from functorch.compile import aot_function, make_boxed_func
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

# ---- spellings ------------------------------------------------------------------------------

# Called with the input, the number of groups, a weight, a bias and an eps.
GROUP_NORMS: dict[str, Callable[..., Tensor]] = {
    "F.group_norm(x, g, w, b, eps)": lambda x, g, w, b, e: F.group_norm(x, g, w, b, e),
    "F.group_norm(x, g, w, b)": lambda x, g, w, b, e: F.group_norm(x, g, w, b),
    "F.group_norm(x, g, w, eps=)": lambda x, g, w, b, e: F.group_norm(x, g, w, eps=e),
    "F.group_norm(x, g, bias=)": lambda x, g, w, b, e: F.group_norm(x, g, bias=b),
    "F.group_norm(x, g)": lambda x, g, w, b, e: F.group_norm(x, g),
    "F.group_norm(eps=, bias=, num_groups=, weight=, input=)": lambda x, g, w, b, e: F.group_norm(
        eps=e, bias=b, num_groups=g, weight=w, input=x
    ),
    "torch.group_norm(x, g, w, b, eps)": lambda x, g, w, b, e: torch.group_norm(x, g, w, b, e),
    "torch.group_norm(x, g, w, b, eps, cudnn)": lambda x, g, w, b, e: torch.group_norm(
        x, g, w, b, e, False
    ),
    "torch.group_norm(x, g, None, b)": lambda x, g, w, b, e: torch.group_norm(x, g, None, b),
    "torch.group_norm(x, g)": lambda x, g, w, b, e: torch.group_norm(x, g),
    "torch.group_norm(cudnn_enabled=, eps=, weight=, num_groups=, input=)": (
        lambda x, g, w, b, e: torch.group_norm(
            cudnn_enabled=True, eps=e, weight=w, num_groups=g, input=x
        )
    ),
}

# The CPU backward of torch 2.13 raises where the bias has a gradient and there is no weight.
_BIAS_ALONE = ("F.group_norm(x, g, bias=)", "torch.group_norm(x, g, None, b)")


def without_bias(module: nn.Module) -> nn.Module:
    """What the argument `bias=False`, which not every torch has, makes of a norm."""
    module.register_parameter("bias", None)
    return module


# Called with the number of groups, the number of channels and an eps.
GROUP_NORM_MODULES: dict[str, Callable[..., nn.Module]] = {
    "nn.GroupNorm": lambda g, c, e: nn.GroupNorm(g, c, e),
    "nn.GroupNorm(affine=False)": lambda g, c, e: nn.GroupNorm(g, c, e, affine=False),
    "nn.GroupNorm without bias": lambda g, c, e: without_bias(nn.GroupNorm(g, c, e)),
}

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "F.hardtanh(y)": lambda y: F.hardtanh(y),
    "F.hardtanh(y, 0, 1)": lambda y: F.hardtanh(y, 0, 1),
    "F.hardtanh(y, -0.5)": lambda y: F.hardtanh(y, -0.5),
    "F.hardtanh(y, max_val=, min_val=)": lambda y: F.hardtanh(y, max_val=2, min_val=-1),
    "F.hardtanh(inplace=, max_val=, input=)": lambda y: F.hardtanh(
        inplace=True, max_val=0.25, input=y
    ),
    "F.hardtanh(y, 0.5, 0.5)": lambda y: F.hardtanh(y, 0.5, 0.5),
    "F.hardtanh(y, -inf, inf)": lambda y: F.hardtanh(y, -math.inf, math.inf),
    "F.hardtanh_(y)": lambda y: F.hardtanh_(y),
    "F.hardtanh_(y, -2, 0)": lambda y: F.hardtanh_(y, -2, 0),
    "F.hardtanh_(y, max_val=)": lambda y: F.hardtanh_(y, max_val=0.5),
    "F.relu6(y)": lambda y: F.relu6(y),
    "F.relu6(y, inplace=True)": lambda y: F.relu6(y, inplace=True),
    "F.relu(y)": lambda y: F.relu(y),
    "F.relu(y, inplace=True)": lambda y: F.relu(y, inplace=True),
    "F.relu_(y)": lambda y: F.relu_(y),
    "torch.relu(y)": lambda y: torch.relu(y),
    "torch.relu(input=)": lambda y: torch.relu(input=y),
    "torch.relu_(y)": lambda y: torch.relu_(y),
    "y.relu()": lambda y: y.relu(),
    "y.relu_()": lambda y: y.relu_(),
    "F.silu(y)": lambda y: F.silu(y),
    "F.silu(y, inplace=True)": lambda y: F.silu(y, inplace=True),
    "F.gelu(y)": lambda y: F.gelu(y),
    "F.gelu(y, approximate='none')": lambda y: F.gelu(y, approximate="none"),
    "F.gelu(approximate='tanh', input=)": lambda y: F.gelu(approximate="tanh", input=y),
    "F.hardswish(y)": lambda y: F.hardswish(y),
    "F.hardswish(y, True)": lambda y: F.hardswish(y, True),
    "F.leaky_relu(y)": lambda y: F.leaky_relu(y),
    "F.leaky_relu(y, 0.2)": lambda y: F.leaky_relu(y, 0.2),
    "F.leaky_relu(inplace=, negative_slope=, input=)": lambda y: F.leaky_relu(
        inplace=True, negative_slope=0.5, input=y
    ),
    "F.leaky_relu_(y)": lambda y: F.leaky_relu_(y),
    "F.leaky_relu_(y, negative_slope=)": lambda y: F.leaky_relu_(y, negative_slope=2),
    "F.sigmoid(y)": lambda y: F.sigmoid(y),
    "torch.sigmoid(input=)": lambda y: torch.sigmoid(input=y),
    "torch.sigmoid_(y)": lambda y: torch.sigmoid_(y),
    "torch.special.expit(y)": lambda y: torch.special.expit(y),
    "y.sigmoid()": lambda y: y.sigmoid(),
    "y.sigmoid_()": lambda y: y.sigmoid_(),
    "F.tanh(y)": lambda y: F.tanh(y),
    "torch.tanh(y)": lambda y: torch.tanh(y),
    "torch.tanh_(y)": lambda y: torch.tanh_(y),
    "y.tanh()": lambda y: y.tanh(),
    "y.tanh_()": lambda y: y.tanh_(),
    "torch.ops.aten.gelu(y, approximate=)": lambda y: torch.ops.aten.gelu(y, approximate="tanh"),
    "torch.ops.aten.hardtanh_(self=)": lambda y: torch.ops.aten.hardtanh_(self=y, max_val=0.5),
    "torch.ops.aten.clamp.default(y, None, 1)": lambda y: torch.ops.aten.clamp.default(y, None, 1),
    "y * torch.sigmoid(y)": lambda y: y * torch.sigmoid(y),
    "y.sigmoid() * y": lambda y: y.sigmoid() * y,
    "torch.mul(y, F.sigmoid(y))": lambda y: torch.mul(y, F.sigmoid(y)),
    "y.mul_(y.sigmoid())": lambda y: y.mul_(y.sigmoid()),
    "torch.clamp(y, -1, 1)": lambda y: torch.clamp(y, -1, 1),
    "torch.clamp(y, max=, min=)": lambda y: torch.clamp(y, max=0.5, min=-2),
    "torch.clamp(max=, input=)": lambda y: torch.clamp(max=0.5, input=y),
    "torch.clamp(y, min=)": lambda y: torch.clamp(y, min=-0.5),
    "torch.clamp(y, None, 1)": lambda y: torch.clamp(y, None, 1),
    "torch.clamp(y, 1, -1)": lambda y: torch.clamp(y, 1, -1),
    "torch.clamp_(y, -1, 1)": lambda y: torch.clamp_(y, -1, 1),
    "torch.clip(y, -1, 1)": lambda y: torch.clip(y, -1, 1),
    "torch.clip_(y, max=)": lambda y: torch.clip_(y, max=1),
    "torch.clamp_min(y, 0)": lambda y: torch.clamp_min(y, 0),
    "torch.clamp_min(y, min=)": lambda y: torch.clamp_min(y, min=0.5),
    "torch.clamp_max(y, 0)": lambda y: torch.clamp_max(y, 0),
    "torch.clamp_min_(y, 0)": lambda y: torch.clamp_min_(y, 0),
    "torch.clamp_max_(y, max=)": lambda y: torch.clamp_max_(y, max=0.5),
    "y.clamp(-1, 1)": lambda y: y.clamp(-1, 1),
    "y.clamp(0)": lambda y: y.clamp(0),
    "y.clamp(max=)": lambda y: y.clamp(max=0.5),
    "y.clamp(1, max=0)": lambda y: y.clamp(1, max=0),
    "y.clamp(-inf, 1)": lambda y: y.clamp(-math.inf, 1),
    "y.clamp_(-1, 1)": lambda y: y.clamp_(-1, 1),
    "y.clip(max=, min=)": lambda y: y.clip(max=1, min=-0.5),
    "y.clip_(0)": lambda y: y.clip_(0),
    "y.clamp_min(0)": lambda y: y.clamp_min(0),
    "y.clamp_min_(min=)": lambda y: y.clamp_min_(min=-0.5),
    "y.clamp_max(0)": lambda y: y.clamp_max(0),
    "y.clamp_max_(0)": lambda y: y.clamp_max_(0),
}

ACTIVATION_MODULES: dict[str, Callable[[], nn.Module]] = {
    "nn.Hardtanh()": lambda: nn.Hardtanh(),
    "nn.Hardtanh(-2, 2)": lambda: nn.Hardtanh(-2, 2),
    "nn.Hardtanh(max_val=, inplace=)": lambda: nn.Hardtanh(max_val=0.5, inplace=True),
    "nn.ReLU6()": lambda: nn.ReLU6(),
    "nn.ReLU6(inplace=True)": lambda: nn.ReLU6(inplace=True),
    "nn.ReLU()": lambda: nn.ReLU(),
    "nn.ReLU(inplace=True)": lambda: nn.ReLU(inplace=True),
    "nn.SiLU()": lambda: nn.SiLU(),
    "nn.SiLU(inplace=True)": lambda: nn.SiLU(inplace=True),
    "nn.GELU()": lambda: nn.GELU(),
    "nn.GELU('tanh')": lambda: nn.GELU("tanh"),
    "nn.Hardswish()": lambda: nn.Hardswish(),
    "nn.Hardswish(inplace=True)": lambda: nn.Hardswish(inplace=True),
    "nn.LeakyReLU()": lambda: nn.LeakyReLU(),
    "nn.LeakyReLU(0.3, inplace=True)": lambda: nn.LeakyReLU(0.3, inplace=True),
    "nn.Sigmoid()": lambda: nn.Sigmoid(),
    "nn.Tanh()": lambda: nn.Tanh(),
}

# What may stand between the two and does nothing.
TRANSPARENT: dict[str, Callable[[], nn.Module]] = {
    "nn.Identity": lambda: nn.Identity(),
    "nn.Dropout(0)": lambda: nn.Dropout(0),
    "nn.Dropout(0.0, inplace=True)": lambda: nn.Dropout(0.0, inplace=True),
    "F.dropout(y, 0.0, training=)": lambda: NoDropout(),
    "y.clone()": lambda: Clone(),
}


class GroupNorm(nn.Module):
    """A functional spelling; symbolic tracing goes inside."""

    def __init__(self, spelling: str, num_groups: int, num_channels: int, eps: float) -> None:
        super().__init__()
        self.spelling, self.num_groups, self.eps = spelling, num_groups, eps
        self.weight = nn.Parameter(torch.randn(num_channels))
        trainable = spelling not in _BIAS_ALONE
        self.bias = nn.Parameter(torch.randn(num_channels), requires_grad=trainable)

    def forward(self, x: Tensor) -> Tensor:
        return GROUP_NORMS[self.spelling](x, self.num_groups, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.spelling}, {self.num_groups}, eps={self.eps}"


class Activation(nn.Module):
    """A functional spelling; symbolic tracing goes inside."""

    def __init__(self, spelling: str) -> None:
        super().__init__()
        self.spelling = spelling

    def forward(self, y: Tensor) -> Tensor:
        return ACTIVATIONS[self.spelling](y)

    def extra_repr(self) -> str:
        return self.spelling


class NoDropout(nn.Module):
    def forward(self, y: Tensor) -> Tensor:
        return F.dropout(y, 0.0, training=self.training)


class Clone(nn.Module):
    def forward(self, y: Tensor) -> Tensor:
        return y.clone()


def group_norm(spelling: str, num_groups: int, num_channels: int, eps: float = 1e-5) -> nn.Module:
    """A module of either table, with an affine map that is not the identity."""
    if spelling in GROUP_NORMS:
        return GroupNorm(spelling, num_groups, num_channels, eps)
    module = GROUP_NORM_MODULES[spelling](num_groups, num_channels, eps)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


def activation(spelling: str) -> nn.Module:
    """A module of either table."""
    return Activation(spelling) if spelling in ACTIVATIONS else ACTIVATION_MODULES[spelling]()


# ---- models ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """A model, what to call it with, and how many chains it holds.

    Attributes:
        model: In float64.  Each module that holds a chain is called once per forward.
        shape: Of its one input.
        seed: Of the input's values.
        planted: How many chains can be fused.
    """

    model: nn.Module
    shape: tuple[int, ...]
    seed: int
    planted: int

    @property
    def hardswishes(self) -> int:
        """How many of the chains that can be fused end in a hardswish."""
        return sum(
            isinstance(module, nn.Hardswish) or "hardswish" in getattr(module, "spelling", "")
            for module in self.model.modules()
        )

    @property
    def residuals(self) -> int:
        """How many of the chains that can be fused add a residual."""
        return sum(isinstance(module, Added) for module in self.model.modules())

    def inputs(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor]:
        """The arguments of a call; the same values each time."""
        generator = torch.Generator().manual_seed(self.seed)
        x = torch.randn(self.shape, generator=generator, dtype=torch.float64)
        return (x.to(dtype),)


class Chain(nn.Module):
    """A chain written as calls."""

    def __init__(self, producer: nn.Module, norm: nn.Module, activation: nn.Module) -> None:
        super().__init__()
        self.producer, self.norm, self.activation = producer, norm, activation

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.norm(self.producer(x)))


class BareStatement(nn.Module):
    """An activation in place whose result is not used by name."""

    def __init__(self, producer: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.producer, self.norm = producer, norm

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.producer(x))
        F.hardtanh(y, -0.5, 0.5, inplace=True)
        return y * 2 + y


class Measured(nn.Module):
    """The norm's result is also asked for its shape, dtype and device."""

    def __init__(self, producer: nn.Module, norm: nn.Module, activation: nn.Module) -> None:
        super().__init__()
        self.producer, self.norm, self.activation = producer, norm, activation

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.producer(x))
        batch, channels, dtype = y.size(0), y.shape[1], y.dtype
        z = self.activation(y)
        return z.reshape(batch, channels, -1).to(dtype).reshape_as(z)


class Added(nn.Module):
    """A residual between norm and activation, as ResNets have it."""

    SPELLINGS: ClassVar[dict[str, Callable[[Tensor, Tensor], Tensor]]] = {
        "y + x": lambda y, x: y + x,
        "x + y": lambda y, x: x + y,
        "torch.add": torch.add,
        "add_": lambda y, x: y.add_(x),
        "iadd": operator.iadd,
        "the residual is computed later": lambda y, x: y + x.tanh(),
        "broadcast": lambda y, x: y + x[:1],
    }

    def __init__(
        self, producer: nn.Module, norm: nn.Module, activation: nn.Module, spelling: str
    ) -> None:
        super().__init__()
        self.producer, self.norm, self.activation = producer, norm, activation
        self.spelling = spelling

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.SPELLINGS[self.spelling](self.norm(self.producer(x)), x))

    def extra_repr(self) -> str:
        return self.spelling


class SharedNorm(nn.Module):
    """One norm called twice, an activation behind the first call only."""

    def __init__(self, producer: nn.Module, norm: nn.Module, activation: nn.Module) -> None:
        super().__init__()
        self.producer, self.norm, self.activation = producer, norm, activation

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.norm(self.producer(x))) + self.norm(x).sin()


class SharedProducer(nn.Module):
    """One producer called twice, a norm behind the first call only."""

    def __init__(self, producer: nn.Module, norm: nn.Module, activation: nn.Module) -> None:
        super().__init__()
        self.producer, self.norm, self.activation = producer, norm, activation

    def forward(self, x: Tensor) -> Tensor:
        return self.producer(self.activation(self.norm(self.producer(x))))


class TiedWeights(nn.Module):
    """Two chains whose norms share their parameters."""

    def __init__(self, norm: GroupNorm, activation: nn.Module) -> None:
        super().__init__()
        self.first, self.activation = norm, activation
        self.second = GroupNorm(norm.spelling, norm.num_groups, len(norm.weight), norm.eps)
        self.second.weight, self.second.bias = norm.weight, norm.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.relu6(self.second(self.activation(self.first(x)) + x))


class Residual(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(x)


class Branches(nn.Module):
    def __init__(self, left: nn.Module, right: nn.Module) -> None:
        super().__init__()
        self.left, self.right = left, right

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) * torch.sigmoid(self.right(x))


class Ramp(nn.Module):
    """Adds a different number to each value of a sample.

    A clamp may leave a group of equal values, whose normalised value is 0 or nearly 0 depending on
    the order of a sum, and so on either side of a bound at 0.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        sample = shape[1:]
        ramp = torch.linspace(-1, 1, math.prod(sample)).reshape(sample)
        self.register_buffer("ramp", ramp)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ramp


_CONVOLUTIONS = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}


@st.composite
def shapes(draw: st.DrawFn) -> tuple[tuple[int, ...], int]:
    """The shape of an input and a number of groups that suits it."""
    num_groups, per_group = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    rest = draw(st.lists(st.integers(1, 4), max_size=3))
    # Groups of one value raise in torch.
    return (draw(st.integers(2, 3)), num_groups * per_group, *rest), num_groups


def seeds() -> st.SearchStrategy[int]:
    return st.integers(0, 2**31 - 1)


@st.composite
def _group_norms(
    draw: st.DrawFn, shape: tuple[int, ...], num_groups: int, *, functional: bool = False
) -> nn.Module:
    tables = [GROUP_NORMS] if functional else [GROUP_NORM_MODULES, GROUP_NORMS]
    spelling = draw(st.sampled_from([name for table in tables for name in table]))
    return group_norm(spelling, num_groups, shape[1], draw(st.sampled_from([1e-5, 0.1])))


def _activations() -> st.SearchStrategy[nn.Module]:
    return st.sampled_from([*ACTIVATION_MODULES, *ACTIVATIONS]).map(activation)


@st.composite
def _producers(draw: st.DrawFn, shape: tuple[int, ...]) -> nn.Module:
    kinds = ["Linear", "Tanh"] if len(shape) == 2 else ["Linear", "convolution", "Tanh"]
    kind = draw(st.sampled_from(kinds))
    if kind == "Linear":
        return nn.Linear(shape[-1], shape[-1])
    if kind == "Tanh":
        return nn.Tanh()
    return _CONVOLUTIONS[len(shape)](shape[1], shape[1], 1)


@st.composite
def _blocks(
    draw: st.DrawFn, shape: tuple[int, ...], num_groups: int, depth: int
) -> tuple[nn.Module, int]:
    """A module that keeps the shape, and how many chains it holds."""
    kinds = ["chain", "sequential", "bare", "measured", "shared norm", "shared producer", "tied"]
    kinds.append("added")
    kind = draw(
        st.sampled_from(kinds + ["none"] + ["residual", "branches", "nested"] * (depth > 0))
    )
    if kind == "none":
        return draw(_producers(shape)), 0
    if kind in ("residual", "branches", "nested"):
        parts = [
            draw(_blocks(shape, num_groups, depth - 1)) for _ in range(1 + (kind != "residual"))
        ]
        outer = {"residual": Residual, "branches": Branches, "nested": nn.Sequential}[kind]
        return outer(*(block for block, _ in parts)), sum(planted for _, planted in parts)
    norm = draw(_group_norms(shape, num_groups, functional=kind == "tied"))
    act, producer = draw(_activations()), draw(_producers(shape))
    planted = 1
    if kind == "tied":
        block: nn.Module = TiedWeights(norm, act)
        planted = 2
    elif kind == "bare":
        block = BareStatement(producer, norm)
    elif kind == "added":
        block = Added(producer, norm, act, draw(st.sampled_from(list(Added.SPELLINGS))))
    elif kind == "sequential":
        between = draw(st.lists(st.sampled_from(list(TRANSPARENT)), max_size=2))
        block = nn.Sequential(producer, norm, *(TRANSPARENT[name]() for name in between), act)
    else:
        written = {
            "chain": Chain,
            "measured": Measured,
            "shared norm": SharedNorm,
            "shared producer": SharedProducer,
        }
        block = written[kind](producer, norm, act)
    return nn.Sequential(Ramp(shape), block), planted


@st.composite
def models(draw: st.DrawFn) -> Model:
    """Models with any number of chains, in every spelling, nested and side by side."""
    shape, num_groups = draw(shapes())
    seed = draw(seeds())
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        blocks = draw(st.lists(_blocks(shape, num_groups, depth=2), min_size=1, max_size=3))
    model = nn.Sequential(*(block for block, _ in blocks)).double()
    return Model(model, shape, seed, sum(planted for _, planted in blocks))


# ---- near misses ----------------------------------------------------------------------------


@dataclass(frozen=True)
class NearMiss(Model):
    """A model that holds no chain, and why.

    Attributes:
        codes: The reason code of each of its norms.
    """

    codes: tuple[str, ...] = ()


class Miss(nn.Module):
    """A norm and an activation that may not become one.

    Attributes:
        codes: The reason code of each norm.
        dialects: Those whose graphs have what keeps them apart; None for all.
    """

    codes: tuple[str, ...]
    dialects: tuple[str, ...] | None = None

    def __init__(self, norm: nn.Module, activation: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.producer = nn.Linear(shape[-1], shape[-1])
        self.norm, self.activation = norm, activation
        self.other = nn.GroupNorm(1, shape[1])
        self.bound = nn.Parameter(torch.tensor(0.25))
        self.register_buffer("bounds", torch.full((shape[-1],), 0.5))

    def forward(self, x: Tensor) -> Any:
        return self.after(self.norm(self.producer(x)), x)

    def after(self, y: Tensor, x: Tensor) -> Any:
        """What follows the norm."""
        raise NotImplementedError


class AlsoAdded(Miss):
    codes = ("other_reader",)

    def after(self, y: Tensor, x: Tensor) -> Any:
        z = y * 2
        return self.activation(y) + z


class SecondActivation(Miss):
    codes = ("other_reader",)

    def after(self, y: Tensor, x: Tensor) -> Any:
        return F.softplus(y) - self.activation(y)


class AlsoInAList(Miss):
    codes = ("other_reader",)

    def after(self, y: Tensor, x: Tensor) -> Any:
        z = y.sin()
        return torch.cat([x, z, self.activation(y)])


class AlsoAskedForStrides(Miss):
    codes = ("other_reader",)
    dialects = ("symbolic_trace",)  # in the others it is a number

    def after(self, y: Tensor, x: Tensor) -> Any:
        stride = y.stride(0)
        return self.activation(y) * stride


class GatedByAnother(Miss):
    codes = ("other_reader",)

    def after(self, y: Tensor, x: Tensor) -> Any:
        return y * torch.sigmoid(y + x)


class GatedAndAdded(Miss):
    codes = ("other_reader",)

    def after(self, y: Tensor, x: Tensor) -> Any:
        gate = torch.sigmoid(y)
        return y * gate + gate


class HardswishInParts(Miss):
    codes = ("other_gradient",)

    def after(self, y: Tensor, x: Tensor) -> Any:
        return y * F.relu6(y + 3) / 6


class ClonedInAnotherFormat(Miss):
    codes = ("no_activation",)

    def after(self, y: Tensor, x: Tensor) -> Any:
        return self.activation(y.clone(memory_format=torch.contiguous_format))


class WrittenBesideAClone(Miss):
    codes = ("written_in_place",)

    def after(self, y: Tensor, x: Tensor) -> Any:
        z = y.clone()
        y.add_(1)
        return self.activation(z) + y


class ReadBesideAClone(Miss):
    codes = ("other_reader",)

    def after(self, y: Tensor, x: Tensor) -> Any:
        z = y.clone()
        z.relu_()
        return z + y


class AlsoReturned(Miss):
    codes = ("graph_output",)

    def after(self, y: Tensor, x: Tensor) -> Any:
        # Not in place: then the two results would be one, and could be fused.
        return y, F.hardtanh(y)


class AlsoInADict(Miss):
    codes = ("graph_output",)

    def after(self, y: Tensor, x: Tensor) -> Any:
        return {"normalised": y, "result": torch.clamp(y, min=0)}


class OnlyReturned(Miss):
    codes = ("graph_output",)

    def after(self, y: Tensor, x: Tensor) -> Any:
        return y


class Unused(Miss):
    codes = ("no_reader",)

    def after(self, y: Tensor, x: Tensor) -> Any:
        return self.activation(x.sin())


class Written(Miss):
    codes = ("written_in_place",)

    def after(self, y: Tensor, x: Tensor) -> Any:
        y.add_(1)
        return self.activation(y)


class WrittenAndNamed(Miss):
    codes = ("written_in_place",)

    def after(self, y: Tensor, x: Tensor) -> Any:
        y = torch.exp_(y)
        return self.activation(y)


class WrittenThroughAView(Miss):
    codes = ("written_in_place",)

    def after(self, y: Tensor, x: Tensor) -> Any:
        y[0].transpose(0, -1).mul_(2)
        return self.activation(y)


class WrittenByAnotherActivation(Miss):
    codes = ("written_in_place",)

    def after(self, y: Tensor, x: Tensor) -> Any:
        F.elu(y, 0.1, True)
        return self.activation(y)


class NotAnActivation(Miss):
    codes = ("no_activation",)

    def after(self, y: Tensor, x: Tensor) -> Any:
        return self.activation(y.sin())


class Dropped(Miss):
    codes = ("dropout",)
    dialects = ("symbolic_trace", "dynamo", "export")  # the others know that it does not drop

    def after(self, y: Tensor, x: Tensor) -> Any:
        return self.activation(F.dropout(y, 0.5, training=self.training))


class Cast(Miss):
    codes = ("cast",)

    def after(self, y: Tensor, x: Tensor) -> Any:
        return self.activation(y.float()).double()


class IsABound(Miss):
    codes = ("not_the_input",)

    def after(self, y: Tensor, x: Tensor) -> Any:
        return torch.clamp(x, min=y)


class ParameterBound(Miss):
    codes = ("tensor_bound",)

    def after(self, y: Tensor, x: Tensor) -> Any:
        return torch.clamp(y, max=self.bound)


class BufferBound(Miss):
    codes = ("tensor_bound",)

    def after(self, y: Tensor, x: Tensor) -> Any:
        return y.clamp(self.bounds)


class ComputedBound(Miss):
    codes = ("tensor_bound",)

    def after(self, y: Tensor, x: Tensor) -> Any:
        return y.clamp(min=x.mean())


class TwoNorms(Miss):
    codes = ("no_activation", "no_activation")

    def after(self, y: Tensor, x: Tensor) -> Any:
        return self.activation(torch.sub(y, self.other(x)))


class AddedTwice(Miss):
    codes = ("no_activation",)

    def after(self, y: Tensor, x: Tensor) -> Any:
        return self.activation(torch.add(y, x, alpha=2))


class AddedToItself(Miss):
    codes = ("other_reader",)

    def after(self, y: Tensor, x: Tensor) -> Any:
        return self.activation(y + y)


class AddedToTheResidual(Miss):
    codes = ("not_the_input",)
    dialects = ("symbolic_trace", "dynamo")  # the others write nothing in place

    def after(self, y: Tensor, x: Tensor) -> Any:
        residual = x * 2
        residual.add_(y)
        return self.activation(residual) + residual


class AddedAndRead(Miss):
    codes = ("other_reader",)

    def after(self, y: Tensor, x: Tensor) -> Any:
        y = y + x
        return y.exp() + self.activation(y)


class AddedAfterAWrite(Miss):
    codes = ("written_meanwhile",)
    dialects = ("symbolic_trace", "dynamo")  # the others write nothing in place

    def after(self, y: Tensor, x: Tensor) -> Any:
        residual = x * 2
        residual.mul_(3)  # to what may be a view of what the norm reads
        return self.activation(y + residual)


class AddedAndMeasured(Miss):
    codes = ("other_reader",)
    dialects = ("symbolic_trace",)  # in the others they are numbers

    def after(self, y: Tensor, x: Tensor) -> Any:
        z = y + torch.stack([x, x]).float()  # the sum has another size
        return self.activation(z) * y.dim()


class TwoNormsInOneClamp(Miss):
    codes = ("tensor_bound", "not_the_input")

    def after(self, y: Tensor, x: Tensor) -> Any:
        return torch.clamp(y, self.other(x))


NEAR_MISSES = tuple(Miss.__subclasses__())


@st.composite
def near_misses(draw: st.DrawFn) -> NearMiss:
    """Models without a chain, each in every spelling of norm and activation."""
    shape, num_groups = draw(shapes())
    seed = draw(seeds())
    miss = draw(st.sampled_from(NEAR_MISSES))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = miss(draw(_group_norms(shape, num_groups)), draw(_activations()), shape)
    # Dropout must not draw: the results of two runs are compared.
    return NearMiss(model.double().eval(), shape, seed, 0, miss.codes)


# ---- dialects -------------------------------------------------------------------------------


class Captured(nn.Module):
    """The graph of a model, called as the model is; its parameters are the model's.

    Attributes:
        graph_module: The graph.
        arguments: What the graph takes in place of the model's one input.
    """

    def __init__(
        self,
        model: nn.Module,
        graph_module: fx.GraphModule,
        arguments: Callable[[Tensor], Sequence[Tensor]],
    ) -> None:
        super().__init__()
        self.model, self.graph_module, self.arguments = model, graph_module, arguments

    def forward(self, x: Tensor) -> Any:
        result = self.graph_module(*self.arguments(x))
        # All but symbolic tracing and make_fx give a flat list of results.
        one = isinstance(result, (tuple, list)) and len(result) == 1
        return result[0] if one else result


def _symbolic_trace(model: nn.Module, x: Tensor) -> Captured:
    return Captured(model, fx.symbolic_trace(model), lambda x: [x])


def _dynamo(model: nn.Module, x: Tensor) -> Captured:
    captured: list[Captured] = []

    def backend(graph_module: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        given = list(inputs)
        captured.append(
            Captured(model, graph_module, lambda new: [new if it is x else it for it in given])
        )
        return graph_module.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend, fullgraph=True, dynamic=False)(x)
    return captured[0]


def _exported(model: nn.Module, program: torch.export.ExportedProgram) -> Captured:
    def arguments(x: Tensor) -> list[Tensor]:
        tensors = {**program.constants, **dict(model.named_buffers())}
        tensors.update(model.named_parameters(remove_duplicate=False))
        specs = program.graph_signature.input_specs
        return [x if spec.target is None else tensors[spec.target] for spec in specs]

    return Captured(model, program.graph_module, arguments)


def _export(model: nn.Module, x: Tensor) -> Captured:
    return _exported(model, torch.export.export(model, (x,)))


def _decomposed(model: nn.Module, x: Tensor) -> Captured:
    return _exported(model, torch.export.export(model, (x,)).run_decompositions())


def _make_fx(model: nn.Module, x: Tensor) -> Captured:
    return Captured(model, make_fx(model)(x), lambda x: [x])


def _aot(model: nn.Module, x: Tensor) -> Captured:
    """The graph that AOTAutograd makes for inference."""
    graph_modules: list[fx.GraphModule] = []

    def compiler(graph_module: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graph_modules.append(graph_module)
        return make_boxed_func(graph_module.forward)

    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    with torch.no_grad():
        aot_function(
            lambda tensors, x: torch.func.functional_call(model, tensors, (x,)),
            fw_compiler=compiler,
            inference_compiler=compiler,
        )(tensors, x)
    return Captured(model, graph_modules[0], lambda x: [*tensors.values(), x])


DIALECTS: dict[str, Callable[[nn.Module, Tensor], Captured]] = {
    "symbolic_trace": _symbolic_trace,
    "dynamo": _dynamo,
    "export": _export,
    "decomposed export": _decomposed,
    "make_fx": _make_fx,
    "aot": _aot,
}


class Spellings(nn.Module):
    """A chain for each spelling, side by side."""

    def __init__(self, spellings: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self.chains = nn.ModuleList(
            Chain(nn.Linear(5, 5), group_norm(norm, 2, 6, 0.1), activation(act))
            for norm, act in spellings
        )

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(chain(x) for chain in self.chains)
