"""Sites compared with what they would replace, on the inputs that a call of the model brings.

A copy of the model is run once.  The modules with a plan run their graphs as they were before the
rewriting, and where a chain begins, the chain, the same chain in float64 and its operator are run
beside each other on what flows there.  What the comparison asks is the numerical contract: for
each group the operator may be no further from float64 than the larger of the chain's own distance
and 4 ulp of max|x_hat w| + |b|; for a gradient the same holds of the whole tensor.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fxfuse import rewrite, tracing
from fxfuse.rewrite import Check, Match, Part, Reason, Refusal, Site

Record = Callable[[Site, Check | Refusal], None]
"""Gets the result of a site's comparison: what was measured, or what speaks against it."""


# ---- one call of the model ------------------------------------------------------------------


def run(
    model: nn.Module,
    forwards: Mapping[nn.Module, Callable[..., Any]],
    example_inputs: Tensor | Sequence[Any] | Mapping[str, Any],
) -> None:
    """Calls a model with other forwards for some of its modules.

    Args:
        model: The model, which is left as the call leaves it.
        forwards: What takes the place of a module's forward, and gets the module first.
        example_inputs: The call's arguments, as for `optimize`.
    """
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = {}
    if isinstance(example_inputs, Mapping):
        kwargs = example_inputs
    elif isinstance(example_inputs, (tuple, list)):
        args = example_inputs
    else:
        args = (example_inputs,)
    for module, forward in forwards.items():
        vars(module)["forward"] = forward.__get__(module)
    random_state = tracing.RandomState()
    try:
        model(*args, **kwargs)
    finally:
        random_state.put_back()


def instrument(graph: fx.Graph, root: nn.Module, sites: Sequence[Site], record: Record) -> None:
    """Puts a comparison where each chain of a graph begins; the chains stay.

    Args:
        graph: The graph.
        root: The module that it will run on.
        sites: The chains, each with its match.
        record: Gets their results when the graph runs.
    """
    for site in sites:
        assert site.match is not None
        comparison = _Comparison(site.match, root)

        def compare(
            outside: tuple[Any, ...],
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
            site: Site = site,
            comparison: _Comparison = comparison,
        ) -> None:
            if (result := comparison(outside, args, kwargs)) is not None:
                record(site, result)

        call = rewrite.insert(graph, site.match)
        with graph.inserting_before(call):
            graph.call_function(compare, (comparison.outside, call.args, call.kwargs))
        graph.erase_node(call)


# ---- one site -------------------------------------------------------------------------------


@dataclass
class _Comparison:
    """Compares a chain with its operator.

    Attributes:
        outside: The nodes that feed the chain.
    """

    match: Match
    root: nn.Module
    outside: tuple[fx.Node, ...] = field(init=False)

    def __post_init__(self) -> None:
        feeds = (n for node in self.match.nodes for n in node.all_input_nodes)
        inside = set(self.match.nodes)
        self.outside = tuple(dict.fromkeys(n for n in feeds if n not in inside))

    def __call__(
        self, outside: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Check | Refusal | None:
        """What was measured, what speaks against the operator, or None for an empty input."""
        target = self.match.fusion.target
        operands = inspect.signature(target).bind(*args, **kwargs).arguments
        input = operands["input"]
        if not input.numel():
            return None
        training = self.root.training
        with torch.set_grad_enabled(training):
            # A leaf of its own, so that the gradients end here.
            leaf = input.detach().requires_grad_(training)

            def own(value: Any) -> Any:
                return pytree.tree_map(lambda v: leaf if v is input else v, value)

            values = dict(zip(self.outside, own(outside), strict=True))
            args, kwargs = own(args), own(kwargs)
            wanted = {"input": leaf} if training else {}
            for name in ("weight", "bias"):
                value = operands.get(name)
                if training and isinstance(value, Tensor) and value.requires_grad:
                    wanted[name] = value
            leaves = list(wanted.values())

            def ours() -> Tensor:
                result: Tensor = target(*args, **kwargs)
                return result

            def eager() -> Tensor:
                return self._chain(values)

            expected = eager()
            try:
                got = ours()
            except Exception as error:
                return Reason.FAILS.because(error=tracing.untraceable(error))
            kinds = [(str(t.dtype), tuple(t.shape)) for t in (got, expected)]
            if kinds[0] != kinds[1]:
                return Reason.FAILS.because(error=f"it gives {kinds[0]}, eager {kinds[1]}")
            reference = _Reference(self, values, own(dict(operands)))
            judged = [reference.output(got, expected)]
            grad_output = None
            if training:
                grad_output = reference.grad_output(got)
                both = [torch.autograd.grad(y, leaves, grad_output) for y in (got, expected)]
                judged += reference.gradients(both[0], both[1], wanted, grad_output)
            del got, expected, reference
            seconds, eager_seconds, slower = _times(
                _call(ours, leaves, grad_output), _call(eager, leaves, grad_output), input.device
            )
        check = Check(
            max(error for error, _, _ in judged),
            max(error for _, error, _ in judged),
            seconds,
            eager_seconds,
        )
        if not all(right for _, _, right in judged):
            return Reason.INACCURATE.because(numbers=check)
        return Reason.SLOWER.because(numbers=check) if slower else check

    def _chain(self, values: dict[fx.Node, Any]) -> Tensor:
        """The chain's own nodes, one after the other."""
        values = dict(values)
        for node in self.match.nodes:
            values[node] = _run(node, values, self.root.get_submodule)
        result: Tensor = values[self.match.nodes[-1]]
        return result


def _run(
    node: fx.Node, values: dict[fx.Node, Any], module: Callable[[str], Callable[..., Any]]
) -> Any:
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
    if node.op == "call_module":
        return module(str(node.target))(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _run_part(
    part: Part, values: dict[fx.Node, Any], module: Callable[[str], Callable[..., Any]]
) -> Any:
    values = dict(values)
    for node in part.inner:
        values[node] = _run(node, values, module)
    result = _run(part.node, values, module)
    return result if part.index is None else result[part.index]


_Judgement = tuple[float, float, bool]
"""The error of ours, the error of eager, and whether ours is allowed."""


class _Reference:
    """The chain in float64, of the values as they are."""

    def __init__(
        self, comparison: _Comparison, values: dict[fx.Node, Any], operands: Mapping[str, Any]
    ) -> None:
        self.wide: dict[int, Tensor] = {}
        # Not every device has float64.
        self.device = torch.device("cpu") if operands["input"].device.type == "mps" else None
        self.num_groups: int = operands["num_groups"]
        input, weight, bias = (self.widen(operands.get(k)) for k in ("input", "weight", "bias"))
        local = {node: pytree.tree_map(self.widen, value) for node, value in values.items()}
        steps: list[Tensor] = []
        with torch.autocast(input.device.type, enabled=False):
            # Without the nodes between them, which may be casts.
            for part in comparison.match.parts:
                assert part.input is not None
                if steps:
                    local[part.input] = steps[-1].clone()  # it may be written to
                steps.append(_run_part(part, local, self._module(comparison.root)))
        self.result: Tensor = steps[-1]
        self.normalised: Tensor = steps[0]
        self.rest = comparison.match.parts[1:]
        self.again = functools.partial(self._rest, comparison, local)
        with torch.no_grad():
            channels = (1, -1) + (1,) * (input.dim() - 2)
            x_hat = F.group_norm(input, self.num_groups, eps=operands.get("eps", 1e-5))
            self.x_hat = x_hat
            size = x_hat if weight is None else x_hat * weight.view(channels)
            size = size.abs() if bias is None else size.abs() + bias.abs().view(channels)
            self.scale = self._grouped(size).amax(-1)
            self.weight = 1 if weight is None else weight.view(channels)
            variance = self._grouped(input).var(-1, correction=0)
            self.rstd = (variance + operands.get("eps", 1e-5)).rsqrt()

    def widen(self, value: Any) -> Any:
        """A tensor in float64, the same one each time; anything else as it is."""
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        if id(value) not in self.wide:
            wide = value.detach().to(self.device or value.device, torch.float64)
            self.wide[id(value)] = wide.clone().requires_grad_(torch.is_grad_enabled())
        return self.wide[id(value)]

    def output(self, got: Tensor, expected: Tensor) -> _Judgement:
        """How the results compare, by the largest error of each group."""
        allowed = 4 * _ulp(self.scale, got.dtype)
        ours, eager = (self._grouped(_errors(t, self.result)).amax(-1) for t in (got, expected))
        return _judge(ours, eager, allowed)

    def grad_output(self, like: Tensor) -> Tensor:
        """A random gradient, 0 where the activation's depends on the last bits of its input."""
        generator = torch.Generator().manual_seed(0)
        grad = torch.randn(like.shape, generator=generator).to(like.device, like.dtype)
        margin = 4 * _ulp(self.scale, like.dtype)
        shape = self.normalised.shape
        spread = self._grouped(torch.ones_like(self.normalised)) * margin[..., None]
        slopes = []
        for offset in (-1, 1):
            z = self.normalised.detach() + offset * spread.view(shape)
            z.requires_grad_()
            (slope,) = torch.autograd.grad(self.again(z).sum(), z)
            slopes.append(slope)
        unsteady = (slopes[0] - slopes[1]).abs() > 0.01
        return grad.masked_fill_(unsteady.to(grad.device), 0)

    def gradients(
        self,
        got: Sequence[Tensor],
        expected: Sequence[Tensor],
        wanted: Mapping[str, Tensor],
        grad_output: Tensor,
    ) -> Iterator[_Judgement]:
        """How the gradients compare, by the largest error of each tensor.

        A scale is the size of the terms that a value is added up from.
        """
        grad = grad_output.to(self.result.device, torch.float64)
        leaves = [self.wide[id(tensor)] for tensor in wanted.values()]
        *references, dz = torch.autograd.grad(self.result, [*leaves, self.normalised], grad)
        g, h = self._grouped(dz * self.weight), self._grouped(self.x_hat)
        offset, slope = g.mean(-1, keepdim=True), (g * h).mean(-1, keepdim=True)
        rest = (0, *range(2, dz.dim()))
        scales = {
            "input": (self.rstd[..., None] * (g.abs() + offset.abs() + (h * slope).abs())).max(),
            "weight": (dz * self.x_hat).abs().sum(rest).max(),
            "bias": dz.abs().sum(rest).max(),
        }
        for name, reference, ours, eager in zip(wanted, references, got, expected, strict=True):
            errors = _errors(ours, reference).amax(), _errors(eager, reference).amax()
            yield _judge(*errors, 4 * _ulp(scales[name], ours.dtype))

    def _module(self, root: nn.Module) -> Callable[[str], nn.Module]:
        def wide(path: str) -> nn.Module:
            module = root.get_submodule(path)
            tensors = (*module.parameters(), *module.buffers())
            return copy.deepcopy(module, {id(t): self.widen(t) for t in tensors})

        return wide

    def _rest(self, comparison: _Comparison, local: dict[fx.Node, Any], z: Tensor) -> Tensor:
        for part in self.rest:
            assert part.input is not None
            values = {**local, part.input: z.clone()}
            z = _run_part(part, values, self._module(comparison.root))
        return z

    def _grouped(self, t: Tensor) -> Tensor:
        return t.reshape(t.shape[0], self.num_groups, -1)


def _errors(got: Tensor, want: Tensor) -> Tensor:
    """|got - want|; infinite where only one is NaN.

    0 where both are NaN or the same infinity, and where got is the infinity that stands in its
    dtype for a value beyond the dtype's range.
    """
    want = want.detach()
    a = got.detach().to(want.device, torch.float64)
    same = (a == want) | (a.isnan() & want.isnan())
    beyond = want.abs() > torch.finfo(got.dtype).max
    same |= beyond & (a == torch.copysign(torch.full_like(want, math.inf), want))
    return (a - want).abs().masked_fill(same, 0).nan_to_num(nan=math.inf, posinf=math.inf)


def _ulp(size: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance between neighbouring numbers of a dtype at a size."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(size.abs().clamp(info.tiny, info.max))
    return torch.ldexp(torch.full_like(size, info.eps), exponent - 1).nan_to_num(nan=0)


def _judge(ours: Tensor, eager: Tensor, allowed: Tensor) -> _Judgement:
    # Where eager is infinitely wrong it excuses nothing.
    bar = torch.maximum(eager.masked_fill(eager.isinf(), 0), allowed)
    return ours.max().item(), eager.max().item(), bool((ours <= bar).all())


# ---- times ----------------------------------------------------------------------------------

_ROUND_S = 1e-3  # the least that one round of calls takes
_SITE_S = 0.5  # about what a site may take
_ROUNDS = (5, 25)
_MARGIN = 1.05  # slower by less may be noise


def _call(
    function: Callable[[], Tensor], wanted: Sequence[Tensor], grad_output: Tensor | None
) -> Callable[[], object]:
    """A call as it is timed: forward, or forward and backward."""
    if grad_output is None:
        return function
    return lambda: torch.autograd.grad(function(), wanted, grad_output)


def _times(
    ours: Callable[[], object], eager: Callable[[], object], device: torch.device
) -> tuple[float, float, bool]:
    """The median seconds of each, and whether ours is slower.

    The rounds of the two take turns, so that what disturbs one disturbs the other.  Slower means
    that ours loses three rounds out of four, and by the margin in the median.
    """

    def seconds(function: Callable[[], object], calls: int) -> float:
        _synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            function()
        _synchronize(device)
        return (time.perf_counter() - start) / calls

    for function in (ours, eager):
        function()
    once = max(seconds(ours, 3), seconds(eager, 3), 1e-7)
    calls = max(1, min(1000, round(_ROUND_S / once)))
    least, most = _ROUNDS
    rounds = max(least, min(most, int(_SITE_S / (2 * calls * once))))
    pairs = []
    for index in range(rounds):
        if index % 2:
            second, first = seconds(eager, calls), seconds(ours, calls)
        else:
            first, second = seconds(ours, calls), seconds(eager, calls)
        pairs.append((first, second))
    ratios = sorted(first / second for first, second in pairs)
    slower = statistics.median(ratios) > _MARGIN and ratios[len(ratios) // 4] > 1
    medians = [statistics.median(times) for times in zip(*pairs, strict=True)]
    return medians[0], medians[1], slower


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
