"""The fx pass: every spelling, every refusal, and the engine on operators of its own."""

from __future__ import annotations

import copy
import functools
import math
import operator
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import graphs
import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from functorch.compile import aot_function, make_boxed_func
from hypothesis import HealthCheck, assume, given, settings
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.split_module import split_module
from torch.nn.utils import parametrizations, weight_norm

from fxfuse import library, nodes, ops, patterns, rewrite
from fxfuse.patterns import fuse
from fxfuse.rewrite import Fusion, FusionReport, Match, Part, Reason

FUSED = "fxfuse_ops_group_norm_"

# The first example may build the library.
run = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module", autouse=True)
def _library() -> None:
    assert library.load()


def results(model: nn.Module, x: Tensor, seed: int = 0) -> list[Tensor | None]:
    """The result of a call, and the gradients of the input and of every parameter."""
    x = x.clone().requires_grad_()
    y = model(x)
    inputs = [x, *(parameter for parameter in model.parameters() if parameter.requires_grad)]
    generator = torch.Generator().manual_seed(seed)
    grad = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype)
    return [y, *torch.autograd.grad(y, inputs, grad, allow_unused=True)]


def assert_same(fused: nn.Module, model: nn.Module, x: Tensor) -> None:
    """Values and gradients agree, in float64, where rounding leaves no room for excuses."""
    for ours, theirs in zip(results(fused, x), results(model, x), strict=True):
        if theirs is None:
            assert ours is None
        else:
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9, equal_nan=True)


def trace(function: nn.Module | Callable[..., Any]) -> fx.GraphModule:
    return fx.symbolic_trace(function)


def norms(graph_module: fx.GraphModule) -> list[fx.Node]:
    """The nodes that are still a GroupNorm."""
    readings = ((node, nodes.read(node, graph_module)) for node in graph_module.graph.nodes)
    return [node for node, reading in readings if reading and reading.operation == "group_norm"]


# ---- whole models ---------------------------------------------------------------------------


@run
@given(graphs.models())
def test_models_are_fused_and_compute_the_same(example: graphs.Model) -> None:
    fused = trace(example.model)
    keys = list(fused.state_dict())
    before = len(norms(fused))

    report = fuse(fused)

    assert report.matched == report.fused == example.planted
    assert len(report.sites) == before
    assert len(norms(fused)) == before - example.planted
    assert fused.code.count(FUSED) == example.planted
    assert list(fused.state_dict()) == keys
    assert_same(fused, example.model, *example.inputs())


@run
@given(graphs.models())
def test_a_second_run_changes_nothing(example: graphs.Model) -> None:
    fused = trace(example.model)
    first = fuse(fused)
    code = fused.code

    second = fuse(fused)

    assert fused.code == code
    assert (second.matched, second.fused) == (0, example.planted)
    assert len(second.sites) == len(first.sites)


@run
@given(graphs.near_misses())
def test_near_misses_are_left_alone(example: graphs.NearMiss) -> None:
    left = trace(example.model)
    code = left.code

    report = fuse(left)

    assert report.matched == 0
    assert tuple(site.code for site in report.sites) == example.codes
    assert left.code == code
    with torch.no_grad():
        expected, found = example.model(*example.inputs()), left(*example.inputs())
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("act", [*graphs.ACTIVATIONS, *graphs.ACTIVATION_MODULES])
@pytest.mark.parametrize("norm", [*graphs.GROUP_NORMS, *graphs.GROUP_NORM_MODULES])
def test_every_spelling(norm: str, act: str) -> None:
    torch.manual_seed(0)
    model = graphs.Chain(
        nn.Linear(5, 5), graphs.group_norm(norm, 2, 6, 0.1), graphs.activation(act)
    ).double()
    fused = trace(model)

    report = fuse(fused)

    assert (report.matched, report.refused) == (1, 0)
    assert report.sites[0].producer == "Linear"
    assert [node.op for node in fused.graph.nodes if node.op == "call_method"] == []
    assert norms(fused) == []
    assert fused.code.count(FUSED) == 1
    assert_same(fused, model, torch.randn(3, 6, 5, dtype=torch.float64))


# ---- dialects -------------------------------------------------------------------------------

SPELLINGS = [
    *(("nn.GroupNorm", act) for act in (*graphs.ACTIVATIONS, *graphs.ACTIVATION_MODULES)),
    *((norm, "nn.Hardtanh(-2, 2)") for norm in graphs.GROUP_NORMS),
    *((norm, "nn.Hardtanh(-2, 2)") for norm in graphs.GROUP_NORM_MODULES),
]


@dataclass(frozen=True)
class Fused:
    """All spellings in one dialect; one capture serves all tests of it."""

    captured: graphs.Captured
    before: int
    report: FusionReport
    x: Tensor
    ours: tuple[Tensor, ...]
    theirs: tuple[Tensor, ...]


@functools.cache
def all_spellings(dialect: str) -> Fused:
    torch.manual_seed(0)
    model = graphs.Spellings(SPELLINGS).double()
    x = torch.randn(3, 6, 5, dtype=torch.float64)
    captured = graphs.DIALECTS[dialect](model, x)
    before = len(norms(captured.graph_module))
    report = fuse(captured.graph_module)
    x = torch.randn_like(x).requires_grad_()
    return Fused(captured, before, report, x, captured(x), model(x))


def in_parts(dialect: str, act: str) -> bool:
    """Whether a dialect writes an activation as parts that have another gradient."""
    return dialect == "decomposed export" and "hardswish" in act.lower()


@pytest.mark.parametrize("dialect", graphs.DIALECTS)
def test_every_dialect_has_the_same_matches(dialect: str) -> None:
    fused = all_spellings(dialect)
    planted = sum(not in_parts(dialect, act) for _, act in SPELLINGS)
    assert len(fused.report.sites) == fused.before == len(SPELLINGS)
    assert fused.report.matched == fused.report.fused == planted
    assert len(norms(fused.captured.graph_module)) == len(SPELLINGS) - planted
    assert fused.captured.graph_module.code.count(FUSED) == planted
    fused.captured.graph_module.graph.lint()


def test_every_dialect_has_the_same_gradient_rules() -> None:
    def activations(dialect: str) -> list[Any]:
        graph_module = all_spellings(dialect).captured.graph_module
        calls = (n for n in graph_module.graph.nodes if n.target is ops.group_norm_activation)
        found = [(call.kwargs["activation"], call.kwargs.get("params")) for call in calls]
        # The same function with the same gradient, which decompositions do not tell apart.
        return [("hardtanh", (0, 6)) if name == "relu6" else (name, p) for name, p in found]

    expected = activations("symbolic_trace")
    for dialect in graphs.DIALECTS:
        decomposed = dialect == "decomposed export"
        known = [it for it in expected if not (decomposed and it[0] == "hardswish")]
        assert activations(dialect) == known


@pytest.mark.parametrize("dialect", graphs.DIALECTS)
@pytest.mark.parametrize("index", range(len(SPELLINGS)), ids=["-".join(s) for s in SPELLINGS])
def test_every_spelling_in_every_dialect(dialect: str, index: int) -> None:
    fused = all_spellings(dialect)
    site = fused.report.sites[index]
    refused = in_parts(dialect, SPELLINGS[index][1])
    assert (site.code, site.producer) == ("other_gradient" if refused else "fused", "Linear")
    ours, theirs = fused.ours[index], fused.theirs[index]
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    if not ours.requires_grad:
        assert dialect == "aot"  # its graph for inference carries no gradients
        return
    inputs = [fused.x, *fused.captured.model.chains[index].parameters()]
    inputs = [value for value in inputs if value.requires_grad]
    weight = torch.randn_like(theirs)
    for one, other in zip(
        torch.autograd.grad(ours, inputs, weight, retain_graph=True, allow_unused=True),
        torch.autograd.grad(theirs, inputs, weight, retain_graph=True, allow_unused=True),
        strict=True,
    ):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@settings(max_examples=30)
@given(graphs.models(), st.sampled_from([*graphs.DIALECTS]))
def test_models_in_every_dialect(example: graphs.Model, dialect: str) -> None:
    captured = graphs.DIALECTS[dialect](example.model, *example.inputs())
    graph_module = captured.graph_module
    before = len(norms(graph_module))

    report = fuse(graph_module)

    planted = example.planted
    if dialect == "decomposed export":
        planted -= example.hardswishes
    assert report.matched == report.fused == planted
    assert len(norms(graph_module)) == before - planted
    assert graph_module.code.count(FUSED) == planted
    code = graph_module.code
    assert (fuse(graph_module).matched, graph_module.code) == (0, code)
    if dialect == "aot":
        with torch.no_grad():
            found, expected = captured(*example.inputs()), example.model(*example.inputs())
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    else:
        assert_same(captured, example.model, *example.inputs())


@settings(max_examples=30)
@given(graphs.near_misses(), st.sampled_from([*graphs.DIALECTS]))
def test_near_misses_in_every_dialect(example: graphs.NearMiss, dialect: str) -> None:
    assume(example.model.dialects is None or dialect in example.model.dialects)
    captured = graphs.DIALECTS[dialect](example.model, *example.inputs())
    code = captured.graph_module.code

    report = fuse(captured.graph_module)

    assert report.matched == 0
    assert captured.graph_module.code == code
    assert all(site.reason for site in report.sites)


def capture(
    dialect: str, function: Callable[..., Any], *shape: int, dtype: torch.dtype = torch.float32
) -> graphs.Captured:
    """The graph of a function of a module and an input of a shape, in a dialect."""
    torch.manual_seed(0)
    model = Function(function).to(dtype)
    return graphs.DIALECTS[dialect](model, torch.randn(shape, dtype=dtype))


PRODUCERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "Linear": (lambda: nn.Linear(4, 4), (3, 4)),
    "Linear of more dimensions": (lambda: nn.Linear(5, 5), (3, 4, 5)),
    "Linear without bias": (lambda: nn.Linear(5, 5, bias=False), (3, 4, 5)),
    "Conv1d": (lambda: nn.Conv1d(4, 4, 1), (3, 4, 5)),
    "Conv2d": (lambda: nn.Conv2d(4, 4, 3, padding=1, bias=False), (3, 4, 5, 2)),
    "Conv2d with padding as a word": (lambda: nn.Conv2d(4, 4, 3, padding="same"), (3, 4, 5, 2)),
    "Conv3d": (lambda: nn.Conv3d(4, 4, 1), (3, 4, 5, 2, 3)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(4, 4, 1), (3, 4, 5, 2)),
    "input": (lambda: nn.Identity(), (3, 4)),
}


@pytest.mark.parametrize("dialect", graphs.DIALECTS)
@pytest.mark.parametrize("name", PRODUCERS)
def test_producers_have_the_same_name(name: str, dialect: str) -> None:
    make, shape = PRODUCERS[name]
    model = graphs.Chain(make(), nn.GroupNorm(2, 4), nn.ReLU())
    report = fuse(graphs.DIALECTS[dialect](model, torch.randn(shape)).graph_module)
    (site,) = report.sites
    assert site.shape == (None if dialect == "symbolic_trace" else shape)
    expected = "Identity" if (name, dialect) == ("input", "symbolic_trace") else name.split()[0]
    assert (site.code, site.producer) == ("fused", expected)


def test_a_product_that_is_no_linear() -> None:
    # Not transposed; transposed in other dimensions; not the rows of the input.
    for function, shape in (
        (lambda m, x: x @ m.square, (3, 4)),
        (lambda m, x: torch.addmm(m.bias, x, m.square, beta=2), (3, 4)),
        (lambda m, x: torch.mm(x.view(12, 4), m.square.t()).view(6, 4, 2), (3, 4, 4)),
    ):
        captured = capture("make_fx", lambda m, x, f=function: F.relu(m.norm(f(m, x))), *shape)
        (site,) = fuse(captured.graph_module).sites
        assert (site.code, site.producer) in [
            ("fused", "mm"),
            ("fused", "addmm"),
            ("fused", "view"),
        ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("act", graphs.ACTIVATION_MODULES)
def test_decompositions_of_16_bit_models(act: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = graphs.Chain(
        nn.Linear(5, 5), graphs.group_norm("nn.GroupNorm", 2, 4), graphs.activation(act)
    ).to(dtype)
    x = torch.randn(3, 4, 5, dtype=dtype)
    captured = graphs.DIALECTS["decomposed export"](model, x)
    (site,) = fuse(captured.graph_module).sites
    if "Hardswish" in act:
        assert site.code == "other_gradient"
        return
    assert site.code == "fused"
    assert "_to_copy" not in captured.graph_module.code
    result = captured(x)
    assert result.dtype is dtype
    exact = model.double()(x.double())
    tolerance = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(result.double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, y: F.silu(y.float()),
        lambda m, y: F.silu(y.float()).half(),
        lambda m, y: F.silu(y.double()).bfloat16(),
        lambda m, y: (F.silu(y.float()) * 2).bfloat16(),
        lambda m, y: F.silu(y.float()).to(torch.bfloat16) + y.float(),
    ],
)
def test_activations_in_float32_that_stay(function: Callable[..., Any]) -> None:
    captured = capture(
        "decomposed export",
        lambda m, x: function(m, m.norm(x)),
        3,
        4,
        dtype=torch.bfloat16,
    )
    code = captured.graph_module.code
    assert fuse(captured.graph_module).matched == 0
    assert captured.graph_module.code == code


def test_any_batch_and_image_size() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4), nn.SiLU()).double()
    x = torch.randn(3, 4, 6, 7, dtype=torch.float64)
    free = torch.export.Dim.DYNAMIC
    program = torch.export.export(model, (x,), dynamic_shapes=({0: free, 2: free, 3: free},))
    for exported in (program, program.run_decompositions()):
        assert fuse(exported.graph_module).matched == 1
        for shape in ((2, 4, 6, 7), (5, 4, 3, 9)):
            x = torch.randn(shape, dtype=torch.float64)
            torch.testing.assert_close(exported.module()(x), model(x))
    symbolic = make_fx(model, tracing_mode="symbolic", _allow_non_fake_inputs=True)(x)
    assert fuse(symbolic).matched == 1
    assert_same(symbolic, model, torch.randn(2, 4, 5, 3, dtype=torch.float64))


def test_an_exported_program_runs_fused() -> None:
    model = graphs.Chain(nn.Linear(5, 5), nn.GroupNorm(2, 4), nn.Hardtanh()).double()
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    program = torch.export.export(model, (x,))
    values = [node.meta["val"] for node in program.graph.nodes if "hardtanh" in node.name]
    assert fuse(program.graph_module).matched == 1
    (call,) = (n for n in program.graph.nodes if n.target is ops.group_norm_activation)
    assert call.meta["val"] is values[0]
    assert call.meta["nn_module_stack"]
    assert "norm(" in call.stack_trace
    assert_same(program.module(), model, x)


@pytest.mark.parametrize("dialect", ["dynamo", "export", "decomposed export", "make_fx"])
def test_groups_of_one_value(dialect: str) -> None:
    # F.group_norm's own check is Python; the operators below it have none.
    captured = capture(dialect, lambda m, x: F.relu(m.norm(x)), 3, 4, 2)
    assert fuse(captured.graph_module).matched == 1
    verifies = "verify_batch_size = False" not in captured.graph_module.code
    assert verifies is (dialect == "dynamo")


def test_results_that_autograd_saves_are_kept() -> None:
    graph_modules = []

    def compiler(graph_module: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graph_modules.append(graph_module)
        return make_boxed_func(graph_module.forward)

    def function(x: Tensor, weight: Tensor) -> Tensor:
        return F.relu(torch.group_norm(x, 2, weight))

    inputs = torch.randn(3, 4, requires_grad=True), torch.randn(4, requires_grad=True)
    aot_function(function, fw_compiler=compiler)(*inputs)
    (site,) = fuse(graph_modules[0]).sites
    assert site.code in ("graph_output", "other_reader")


def native_group_norm(
    after: Callable[[fx.Graph, fx.Node], Any],
    sizes: tuple[Any, ...] = (3, 4, 5),
    shape: tuple[int, ...] | None = (3, 4, 5),
) -> fx.GraphModule:
    """A graph made by hand around the operator, whose input may have a recorded shape."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    if shape is not None:
        with FakeTensorMode():
            x.meta["val"] = torch.empty(shape)
    target = torch.ops.aten.native_group_norm.default
    graph.output(after(graph, graph.call_function(target, (x, None, None, *sizes, 2, 1e-5))))
    return fx.GraphModule(nn.Module(), graph)


def pick(graph: fx.Graph, node: fx.Node, index: int) -> fx.Node:
    return graph.call_function(operator.getitem, (node, index))


def relu(graph: fx.Graph, node: fx.Node) -> fx.Node:
    return graph.call_function(torch.ops.aten.relu.default, (pick(graph, node, 0),))


def test_sizes_that_are_not_those_of_the_input() -> None:
    for sizes, shape in (
        ((3, 4, 5), None),
        ((3, 4, 5), (3, 20)),
        ((6, 2, 5), (3, 4, 5)),
        ((1, 4, 15), (3, 4, 5)),
        ((3, None, 5), (3, 4, 5)),
    ):
        (site,) = fuse(native_group_norm(relu, sizes, shape)).sites
        assert site.code == "other_sizes"
    fused = native_group_norm(relu)
    assert fuse(fused).matched == 1
    x = torch.randn(3, 4, 5)
    torch.testing.assert_close(fused(x), F.relu(torch.group_norm(x, 2)))


def test_statistics_that_are_read() -> None:
    def mean(graph: fx.Graph, norm: fx.Node) -> tuple[fx.Node, ...]:
        statistic = pick(graph, norm, 1)
        return relu(graph, norm), statistic

    def rstd_later(graph: fx.Graph, norm: fx.Node) -> tuple[fx.Node, ...]:
        y = pick(graph, norm, 0)
        graph.call_function(torch.ops.aten.relu_.default, (y,))
        return y, graph.call_function(torch.ops.aten.detach.default, (pick(graph, norm, 2),))

    def all_of_them(graph: fx.Graph, norm: fx.Node) -> tuple[fx.Node, ...]:
        return relu(graph, norm), norm

    def twice(graph: fx.Graph, norm: fx.Node) -> tuple[fx.Node, ...]:
        return relu(graph, norm), relu(graph, norm)

    for after in (mean, rstd_later, all_of_them, twice):
        graph_module = native_group_norm(after)
        code = graph_module.code
        (site,) = fuse(graph_module).sites
        assert site.code in ("other_reader", "graph_output")
        assert graph_module.code == code


def test_what_no_one_reads_goes_with_the_chain() -> None:
    def after(graph: fx.Graph, norm: fx.Node) -> fx.Node:
        mean = pick(graph, norm, 1)
        graph.call_function(torch.ops.aten.detach.default, (mean,))
        pick(graph, norm, 2)
        y = pick(graph, norm, 0)
        pick(graph, norm, 0)
        graph.call_function(torch.ops.aten.clone.default, (y,))
        return graph.call_function(torch.ops.aten.hardtanh_.default, (y, 0, 1))

    graph_module = native_group_norm(after)
    x = torch.randn(3, 4, 5)
    expected = graph_module(x)
    assert fuse(graph_module).matched == 1
    assert [node.op for node in graph_module.graph.nodes if node.op != "get_attr"] == [
        "placeholder",
        "call_function",
        "output",
    ]
    torch.testing.assert_close(graph_module(x), expected)


def test_only_a_statistic_is_read() -> None:
    (site,) = fuse(native_group_norm(lambda graph, norm: pick(graph, norm, 1))).sites
    assert site.code == "no_reader"


def test_write_through_a_clone() -> None:
    def function(m: Any, x: Tensor) -> Any:
        y = m.norm(x).clone()
        z = y.relu_()
        return y + z

    model = Function(function)
    fused = trace(model)
    assert fuse(fused).matched == 1
    assert "clone" not in fused.code
    x = torch.randn(2, 4, 3)
    torch.testing.assert_close(fused(x), model(x))


def test_autocast_knows_the_norm_of_the_dialect(device: torch.device) -> None:
    x = torch.randn(3, 4, 5, dtype=torch.bfloat16, device=device)
    model = nn.Sequential(nn.GroupNorm(2, 4), nn.ReLU()).to(device, torch.bfloat16)
    for dialect in ("export", "make_fx"):
        graph_module = graphs.DIALECTS[dialect](model, x).graph_module
        plain = copy.deepcopy(graph_module)
        assert fuse(graph_module).matched == 1
        inputs = [*model.parameters(), x]
        inputs = inputs if dialect == "export" else inputs[-1:]
        with torch.autocast(device.type):
            ours, theirs = graph_module(*inputs), plain(*inputs)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0.02)  # eager's are in bfloat16


def test_graphs_inside_the_graph() -> None:
    def function(x: Tensor) -> Tensor:
        y = torch.utils.checkpoint.checkpoint(
            lambda x: F.relu(F.group_norm(x, 2)), x, use_reentrant=False
        )
        return y + F.silu(F.group_norm(x, 1))

    captured = graphs.DIALECTS["dynamo"](function, x := torch.randn(3, 4))
    report = fuse(captured.graph_module)
    assert (report.matched, len(report.sites)) == (2, 2)
    torch.testing.assert_close(captured(x), function(x))
    assert fuse(captured.graph_module).matched == 0


# ---- time -----------------------------------------------------------------------------------


def someones(x: Tensor) -> Tensor:
    """A function that might write to what it is given."""
    return x * 2


def large(kind: str, number: int) -> fx.GraphModule:
    """A graph of about as many nodes."""
    graph = fx.Graph()
    x = first = graph.placeholder("x")
    far = []
    for _ in range(number // 3):
        y = graph.call_function(F.group_norm, (x, 2))
        if kind == "refused":
            x = graph.call_function(operator.add, (graph.call_function(F.relu, (y,)), y))
        elif kind == "in place":
            x = graph.call_function(F.relu, (y,), {"inplace": True})
            x = graph.call_function(operator.add, (x, first))
        elif kind == "summed":
            y = graph.call_function(F.group_norm, (first, 2))
            other = graph.call_function(someones, (x,))
            x = graph.call_function(F.relu, (graph.call_function(operator.add, (y, other)),))
        elif kind == "viewed":
            x = graph.call_method("view", (graph.call_function(F.relu, (y,)), -1))
        else:
            assert kind in ("far", "read far off")
            far.append(y)
            if kind == "read far off":
                x = graph.call_function(operator.add, (graph.call_function(F.relu, (y,)), x))
    for y in far:
        z = y if kind == "read far off" else graph.call_function(F.relu, (y,))
        x = graph.call_function(operator.add, (x, z))
    graph.output(x)
    return fx.GraphModule(nn.Module(), graph)


def test_graph_modules_that_the_graph_calls() -> None:
    model = nn.Sequential(chain(), chain(), nn.Linear(4, 4)).double()
    whole = fx.symbolic_trace(model)
    parts = split_module(whole, None, lambda node: int(str(node.target)[0]))  # type: ignore[arg-type]
    assert fuse(parts).matched == 2
    assert_same(parts, model, torch.randn(3, 4, dtype=torch.float64))


@pytest.mark.parametrize("kind", ["a module", "unflattened"])
def test_what_has_no_graph_of_its_own_is_named(kind: str) -> None:
    model: nn.Module = nn.Sequential(chain())
    if kind == "unflattened":
        model = torch.export.unflatten(torch.export.export(model, (torch.randn(3, 4),)))
    with pytest.raises(TypeError, match=f"got {type(model).__name__}; fxfuse.optimize takes"):
        fuse(model)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["refused", "in place", "summed", "viewed", "far", "read far off"])
def test_time_grows_linearly(kind: str) -> None:
    def seconds(number: int) -> float:
        graph_module = large(kind, number)
        start = time.process_time()
        fuse(graph_module)
        return time.process_time() - start

    # Up to 0.7 s on two cores of an AMD EPYC; four times the time for four times the nodes.
    small = min(seconds(2_500) for _ in range(3))
    big = min(seconds(10_000) for _ in range(2))
    assert big < 2
    assert big < 12 * small


@pytest.mark.parametrize("act", [*graphs.ACTIVATIONS, *graphs.ACTIVATION_MODULES])
def test_gradient_on_a_bound_and_at_nan(act: str) -> None:
    # With a weight of 0 the norm's result is the bias: each bound that a spelling uses, and NaN.
    bias = torch.tensor([-2, -1, -0.5, 0, 0.25, 0.5, 1, 2, 6, math.nan], dtype=torch.float64)
    model = nn.Sequential(nn.GroupNorm(1, len(bias)), graphs.activation(act)).double()
    model[0].weight = nn.Parameter(torch.zeros_like(bias))
    model[0].bias = nn.Parameter(bias)
    fused = trace(model)
    assert fuse(fused).matched == 1

    y = fused(torch.randn(1, len(bias), dtype=torch.float64))
    (grad,) = torch.autograd.grad(y.sum(), fused.get_parameter("0.bias"))

    # torch's own gradient at NaN depends on a tensor's length; one value alone obeys the rule.
    for value, ours in zip(bias, grad, strict=True):
        x = value.reshape(1).requires_grad_()
        (theirs,) = torch.autograd.grad(model[1](x * 1).sum(), x)
        torch.testing.assert_close(ours.reshape(1), theirs, equal_nan=True)


def test_bounds_are_read_when_the_graph_is_fused() -> None:
    model = nn.Sequential(nn.GroupNorm(2, 4), nn.ReLU6())
    model[1].max_val = 3
    fused = trace(model)
    assert fuse(fused).sites[0].activation == "ReLU6(0, 3)"
    x = torch.randn(2, 4) * 10
    torch.testing.assert_close(fused(x), model(x))


# ---- refusals: calls ------------------------------------------------------------------------


class Function(nn.Module):
    """What a function does with an input and a module's tensors."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.norm = nn.GroupNorm(2, 4)
        self.weight, self.bias = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))
        self.long = nn.Parameter(torch.randn(6))
        self.square = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("integers", torch.ones(4, dtype=torch.int64))

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def assert_refused(function: Callable[[Any, Tensor], Any], *codes: str) -> None:
    graph_module = trace(Function(function))
    before = graph_module.code
    report = fuse(graph_module)
    assert tuple(site.code for site in report.sites) == codes
    assert report.refused == len(codes)
    assert graph_module.code == before


@pytest.mark.parametrize(
    ("code", "activation"),
    [
        ("tensor_bound", lambda m, y, x: F.hardtanh(y, m.bias, 2)),
        ("tensor_bound", lambda m, y, x: F.hardtanh(y, 0, x.size(0))),
        ("tensor_bound", lambda m, y, x: torch.clamp(y, max=x.max())),
        ("tensor_bound", lambda m, y, x: y.clamp(True, 2)),
        ("tensor_bound", lambda m, y, x: torch.ops.aten.clamp(y, x.min())),
        ("tensor_bound", lambda m, y, x: torch.ops.aten.clamp_min.Tensor(y, m.bias)),
        ("tensor_bound", lambda m, y, x: y.clamp(max=2**64)),
        ("nan_bound", lambda m, y, x: F.hardtanh(y, math.nan, 1)),
        ("nan_bound", lambda m, y, x: F.hardtanh_(y, max_val=math.nan)),
        ("nan_bound", lambda m, y, x: torch.clamp(y, min=math.nan)),
        ("crossed_bounds", lambda m, y, x: F.hardtanh(y, 1, -1)),
        ("crossed_bounds", lambda m, y, x: F.hardtanh_(y, 2)),
        ("no_bound", lambda m, y, x: torch.clamp(y)),
        ("no_bound", lambda m, y, x: y.clip(None, max=None)),
        ("out_argument", lambda m, y, x: torch.clamp(y, 0, 1, out=x)),
        ("out_argument", lambda m, y, x: torch.clamp_min(y, 0, out=x)),
        ("not_the_input", lambda m, y, x: torch.clamp(x, y, y)),
        ("not_the_input", lambda m, y, x: F.hardtanh(x, 0, y)),
        ("no_activation", lambda m, y, x: F.elu(y)),
        ("computed_argument", lambda m, y, x: F.leaky_relu(y, x.mean())),
        ("computed_argument", lambda m, y, x: F.gelu(y, approximate=x)),
        ("out_argument", lambda m, y, x: torch.sigmoid(y, out=x)),
        ("out_argument", lambda m, y, x: y * torch.sigmoid(y, out=x)),
        ("other_gradient", lambda m, y, x: y * torch.clamp(y + 3, 0, 6) / 6),
        ("no_activation", lambda m, y, x: y.relu(3)),
        ("no_activation", lambda m, y, x: y + 1),
        ("written_in_place", lambda m, y, x: torch.nn.init.zeros_(y)),
        ("dropout", lambda m, y, x: F.relu(F.dropout(y, 0.5))),
        ("dropout", lambda m, y, x: F.relu(F.dropout(y, 0.5, False))),
        ("dropout", lambda m, y, x: F.relu(F.dropout(y, x.mean()))),
        ("dropout", lambda m, y, x: F.relu(F.alpha_dropout(y, 0.1))),
        ("dropout", lambda m, y, x: F.relu(torch.dropout(y, 1.0, True))),
        ("cast", lambda m, y, x: F.relu(y.float())),
        ("cast", lambda m, y, x: F.relu(y.to(torch.float32))),
        ("cast", lambda m, y, x: F.relu(y.type(x.dtype))),
        ("cast", lambda m, y, x: F.relu(y.to("cpu"))),
        ("cast", lambda m, y, x: F.relu(y.to(None))),
        ("graph_output", lambda m, y, x: [y]),
    ],
)
def test_refused_activations(code: str, activation: Callable[..., Any]) -> None:
    assert_refused(lambda m, x: activation(m, m.norm(x), x), code)


@pytest.mark.parametrize(
    ("code", "norm"),
    [
        ("computed_argument", lambda m, x: F.group_norm(x, x.size(2))),
        ("computed_argument", lambda m, x: F.group_norm(x, True)),
        ("computed_argument", lambda m, x: F.group_norm(x, 2.0)),
        ("computed_argument", lambda m, x: torch.group_norm(x, 2, eps=x.var())),
        ("bad_num_groups", lambda m, x: F.group_norm(x, 0)),
        ("bad_num_groups", lambda m, x: F.group_norm(x, -2, m.weight)),
        ("bad_num_groups", lambda m, x: F.group_norm(x, 3, bias=m.bias)),
        ("bad_affine", lambda m, x: F.group_norm(x, 2, m.square)),
        ("bad_affine", lambda m, x: F.group_norm(x, 2, None, m.integers)),
        ("bad_affine", lambda m, x: F.group_norm(x, 2, 1.0)),
    ],
)
def test_refused_norms(code: str, norm: Callable[..., Any]) -> None:
    assert_refused(lambda m, x: F.relu(norm(m, x)), code)


def test_a_norm_of_nothing_is_no_norm() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(F.group_norm, (1.0, 2))
    graph.output(graph.call_function(F.relu, (graph.call_function(F.group_norm, (x,)),)))
    assert fuse(fx.GraphModule(nn.Module(), graph)).sites == ()


# ---- refusals: modules ----------------------------------------------------------------------


class Leaves(fx.Tracer):
    """Keeps every module that is not the root as one call, as a pass that works by module does."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


class GroupNormAct(nn.GroupNorm):
    """A subclass with an activation inside, as timm has it."""

    def __init__(self, num_groups: int, num_channels: int) -> None:
        super().__init__(num_groups, num_channels)
        self.drop, self.act = nn.Identity(), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)
        return self.act(self.drop(x))


class Softer(nn.ReLU):
    def forward(self, input: Tensor) -> Tensor:
        return F.softplus(input)


class Twice(nn.Identity):
    def forward(self, input: Tensor) -> Tensor:
        return input * 2


def chain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.GroupNorm(2, 4), nn.Identity(), nn.Hardtanh(-2, 2))


def traced_by_leaves(model: nn.Module) -> fx.GraphModule:
    return fx.GraphModule(model, Leaves().trace(model))


@pytest.mark.parametrize(
    ("index", "module"), [(1, GroupNormAct(2, 4)), (2, Twice()), (3, Softer())]
)
def test_subclass_is_not_its_base(index: int, module: nn.Module) -> None:
    model = chain()
    model[index] = module
    fused = traced_by_leaves(model)
    report = fuse(fused)
    assert [site.code for site in report.sites] == ["subclass"]
    assert type(module).__name__ in report.sites[0].reason
    x = torch.randn(3, 4)
    torch.testing.assert_close(fused(x), model(x), rtol=0, atol=0)


def test_subclass_is_traced_inside() -> None:
    model = nn.Sequential(nn.Linear(4, 4), GroupNormAct(2, 4)).double()
    fused = trace(model)
    assert fuse(fused).matched == 1
    assert fused.code.count(FUSED) == 1
    assert_same(fused, model, torch.randn(3, 4, dtype=torch.float64))


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "forward": lambda m: m.register_forward_hook(lambda *_: None),
    "pre-forward": lambda m: m.register_forward_pre_hook(lambda *_: None),
    "backward": lambda m: m.register_full_backward_hook(lambda *_: None),
    "pre-backward": lambda m: m.register_full_backward_pre_hook(lambda *_: None),
}


@pytest.mark.parametrize("index", [1, 2, 3])
@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_are_kept(kind: str, index: int) -> None:
    model = chain()
    fused = trace(model)
    handle = HOOKS[kind](model[index])
    assert [site.code for site in fuse(fused).sites] == ["hooks"]
    handle.remove()
    assert fuse(fused).matched == 1


def test_a_hook_of_the_producer_stays() -> None:
    model = chain()
    calls = []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    fused = trace(model)
    assert fuse(fused).matched == 1
    fused(torch.randn(2, 4))
    assert calls == [1]


def test_global_hooks_are_kept() -> None:
    fused = trace(chain())
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert [site.code for site in fuse(fused).sites] == ["hooks"]
    finally:
        handle.remove()


@pytest.mark.parametrize("index", [1, 2, 3])
def test_own_forward_is_kept(index: int) -> None:
    model = chain()
    model[index].forward = lambda x: x * 2
    assert [site.code for site in fuse(trace(model)).sites] == ["own_forward"]


def test_parametrized_norm_is_kept() -> None:
    model = chain()
    torch.nn.utils.parametrize.register_parametrization(model[1], "weight", nn.Softplus())
    assert [site.code for site in fuse(traced_by_leaves(model)).sites] == ["parametrized"]


def test_weight_norm_of_the_norm_is_kept() -> None:
    model = chain()
    model[1].weight = nn.Parameter(torch.randn(4))
    with pytest.warns(FutureWarning):
        weight_norm(model[1], dim=None)
    assert [site.code for site in fuse(trace(model)).sites] == ["hooks"]


def test_weight_norm_of_the_producer_is_recomputed() -> None:
    model = chain().double()
    parametrizations.weight_norm(model[0])
    fused = traced_by_leaves(model)
    assert fuse(fused).matched == 1
    with torch.no_grad():
        model[0].parametrizations.weight.original0.mul_(3)
    assert_same(fused, model, torch.randn(3, 4, dtype=torch.float64))


def test_bad_modules_are_left_alone() -> None:
    model = chain()
    model[1].weight = nn.Parameter(torch.randn(6))
    assert [site.code for site in fuse(trace(model)).sites] == ["bad_affine"]
    model = chain()
    model[1].num_groups = 3
    assert [site.code for site in fuse(trace(model)).sites] == ["bad_num_groups"]
    model = chain()
    model[3].max_val = nn.Parameter(torch.ones(()))
    assert [site.code for site in fuse(trace(model)).sites] == ["tensor_bound"]


def test_dropout_module_between() -> None:
    model = nn.Sequential(nn.GroupNorm(2, 4), nn.Dropout(0.1), nn.ReLU()).eval()
    # The graph may be run in training later.
    assert [site.code for site in fuse(trace(model)).sites] == ["dropout"]


# ---- in place -------------------------------------------------------------------------------


def test_result_of_an_activation_in_place_under_both_names() -> None:
    def function(m: Any, x: Tensor) -> Any:
        y = m.norm(x)
        z = F.hardtanh(y, -0.1, 0.1, inplace=True)
        return y, z, y.sum() + z.mean()

    model = Function(function)
    fused = trace(model)
    assert fuse(fused).matched == 1
    x = torch.randn(2, 4, 3)
    torch.testing.assert_close(fused(x), model(x))


def test_activation_in_place_behind_an_alias() -> None:
    def function(m: Any, x: Tensor) -> Any:
        y = m.norm(x)
        z = F.dropout(y, 0.0)
        z.clamp_(-0.1, 0.1)
        return y * z

    model = Function(function)
    fused = trace(model)
    assert fuse(fused).matched == 1
    assert "dropout" not in fused.code
    x = torch.randn(2, 4, 3)
    torch.testing.assert_close(fused(x), model(x))


def test_reader_before_an_activation_in_place() -> None:
    def function(m: Any, x: Tensor) -> Any:
        y = m.norm(x)
        z = y * 2
        F.relu(y, inplace=True)
        return y + z

    assert_refused(function, "other_reader")


def test_reader_between_an_alias_and_an_activation_in_place() -> None:
    def function(m: Any, x: Tensor) -> Any:
        y = m.norm(x)
        z = F.dropout(y, 0.0)
        w = y * 2
        z.relu_()
        return w + y

    assert_refused(function, "other_reader")


def test_reader_that_was_added_last_and_stands_first() -> None:
    graph = fx.Graph()
    y = graph.call_module("norm", (graph.placeholder("x"),))
    z = graph.call_method("relu_", (y,))
    with graph.inserting_before(z):
        w = graph.call_function(operator.mul, (y, 2))
    graph.output((w, z))
    report = fuse(fx.GraphModule(nn.ModuleDict({"norm": nn.GroupNorm(2, 4)}), graph))
    assert [site.code for site in report.sites] == ["other_reader"]


def test_activation_in_place_that_was_added_last_and_stands_first() -> None:
    graph = fx.Graph()
    y = graph.call_module("norm", (graph.placeholder("x"),))
    z = graph.call_function(operator.mul, (y, 2))
    with graph.inserting_before(z):
        graph.call_method("relu_", (y,))
    graph.output(z)
    fused = fx.GraphModule(nn.ModuleDict({"norm": nn.GroupNorm(2, 4)}), graph)
    x = torch.randn(2, 4)
    expected = fused(x)
    assert fuse(fused).matched == 1
    torch.testing.assert_close(fused(x), expected)


def test_view_before_an_activation_in_place() -> None:
    def function(m: Any, x: Tensor) -> Any:
        y = m.norm(x)
        rows = y.flatten(1)
        y.relu_()
        return rows

    assert_refused(function, "other_reader")


def test_write_after_the_activation_to_the_norm() -> None:
    def function(m: Any, x: Tensor) -> Any:
        y = m.norm(x)
        z = y.relu()
        y.add_(1)
        return z

    assert_refused(function, "other_reader")


def test_write_to_the_input_in_between() -> None:
    def function(m: Any, x: Tensor) -> Any:
        x = x * 1
        y = m.norm(x)
        x.exp_()
        return F.hardtanh(y) + x

    model = Function(function)
    fused = trace(model)
    assert fuse(fused).matched == 1
    x = torch.randn(2, 4, 3)
    with torch.no_grad():
        torch.testing.assert_close(fused(x), model(x))


def test_what_may_write_unseen_before_the_residual_is_there() -> None:
    class Branch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x.relu_()
            return x * 2

    def unseen(x: Tensor) -> Tensor:
        return x.relu_() * 2

    writes = torch.ops.aten.relu_  # of which the overload is not chosen yet
    inplace = nn.Sequential(nn.ReLU(inplace=True), nn.Conv1d(4, 4, 1))
    pure = nn.Sequential(nn.ReLU(), nn.Conv1d(4, 4, 1))
    hooked = nn.Sequential(nn.ReLU())
    hooked.register_forward_pre_hook(lambda module, args: (args[0].relu_(),))
    for branch, from_conv, expected in (
        (Branch(), False, "written_meanwhile"),
        (unseen, False, "written_meanwhile"),
        (writes, False, "written_meanwhile"),
        (inplace, False, "written_meanwhile"),
        (hooked, False, "written_meanwhile"),
        (pure, False, "written_meanwhile"),  # not looked into
        (nn.Conv1d(4, 4, 1), False, "fused"),
        (torch.sin, False, "fused"),
        # Nothing but the norm reads what it reads.
        (Branch(), True, "fused"),
        (inplace, True, "fused"),
    ):
        root = nn.ModuleDict({"norm": nn.GroupNorm(2, 4), "conv": nn.Conv1d(4, 4, 1)})
        graph = fx.Graph()
        x = graph.call_function(operator.mul, (graph.placeholder("x"), 1.0))
        y = graph.call_module("norm", (graph.call_module("conv", (x,)) if from_conv else x,))
        if isinstance(branch, nn.Module):
            root["branch"] = branch
            residual = graph.call_module("branch", (x,))
        else:
            residual = graph.call_function(branch, (x,))
        graph.output(graph.call_function(F.relu, (graph.call_function(torch.add, (y, residual)),)))
        fused = fx.GraphModule(root, graph)
        x = torch.randn(2, 4, 3)
        with torch.no_grad():
            right = fused(x)
            (site,) = fuse(fused).sites
            assert site.code == expected, branch
            torch.testing.assert_close(fused(x), right)


@pytest.mark.parametrize("op", ["placeholder", "get_attr"])
def test_a_residual_of_the_same_tensor(op: str) -> None:
    """A caller may hand in one tensor twice, and a graph read one attribute twice."""
    branch = nn.Sequential(nn.ReLU(inplace=True), nn.Conv1d(4, 4, 1))
    root = nn.ModuleDict({"norm": nn.GroupNorm(2, 4), "branch": branch})
    root.register_buffer("tensor", torch.randn(2, 4, 3))
    graph = fx.Graph()
    x, other = (graph.create_node(op, "tensor", name=name) for name in "xy")
    y = graph.call_module("norm", (x,))
    residual = graph.call_module("branch", (other,))
    graph.output(graph.call_function(F.relu, (graph.call_function(torch.add, (y, residual)),)))
    if op == "placeholder":
        other.target = "other"
    fused = fx.GraphModule(root, graph)
    assert [site.code for site in fuse(fused).sites] == ["written_meanwhile"]


def test_measured_before_and_after() -> None:
    def function(m: Any, x: Tensor) -> Any:
        y = m.norm(x)
        batch = y.size(0)
        z = F.hardtanh(y, -0.1, 0.1)
        z.unsqueeze_(0)
        return z.to(y.dtype) + y.shape[0], y.dim(), z.dim(), batch

    model = Function(function)
    fused = trace(model)
    assert fuse(fused).matched == 1
    x = torch.randn(2, 4, 3)
    torch.testing.assert_close(fused(x), model(x))


def test_measured_after_an_activation_in_place() -> None:
    def function(m: Any, x: Tensor) -> Any:
        y = m.norm(x).clone()
        y.relu_().unsqueeze_(0)
        return y, y.dim()

    model = Function(function)
    fused = trace(model)
    assert fuse(fused).matched == 1
    x = torch.randn(2, 4, 3)
    torch.testing.assert_close(fused(x), model(x))


@pytest.mark.parametrize(
    "write",
    [
        lambda g, y: g.call_function(operator.iadd, (y, 1)),
        lambda g, y: g.call_function(operator.setitem, (y, 0, 1)),
        lambda g, y: g.call_function(torch.add, (y, 1), {"out": y}),
        lambda g, y: g.call_function(F.elu, (y, 0.1, True)),
        lambda g, y: g.call_function(torch.ops.aten.add_.Tensor, (y, y)),
        lambda g, y: g.call_function(torch.ops.aten.add.out, (y, y), {"out": y}),
        lambda g, y: g.call_method("__iadd__", (y, 1)),
        lambda g, y: g.call_method("zero_", (y,)),
        lambda g, y: g.call_method("mul_", (g.call_method("view", (y, -1)), 2)),
        lambda g, y: g.call_module("elu", (y,)),
    ],
)
def test_every_way_to_write(write: Callable[[fx.Graph, fx.Node], fx.Node]) -> None:
    graph = fx.Graph()
    y = graph.call_module("norm", (graph.placeholder("x"),))
    write(graph, y)
    graph.output(graph.call_function(F.relu, (y,)))
    root = nn.ModuleDict({"norm": nn.GroupNorm(2, 4), "elu": nn.ELU(inplace=True)})
    report = fuse(fx.GraphModule(root, graph))
    assert [site.code for site in report.sites] == ["written_in_place"]


def test_looking_at_a_value_is_not_writing() -> None:
    graph = fx.Graph()
    y = graph.call_module("norm", (graph.placeholder("x"),))
    graph.call_function(operator.is_, (y, None))
    graph.call_method("__invert__", (y,))
    graph.output(graph.call_function(F.relu, (y,)))
    report = fuse(fx.GraphModule(nn.ModuleDict({"norm": nn.GroupNorm(2, 4)}), graph))
    assert [site.code for site in report.sites] == ["other_reader"]


# ---- what stays -----------------------------------------------------------------------------


def test_hand_made_graph() -> None:
    torch.manual_seed(0)
    root = nn.Module()
    root.weight, root.act = nn.Parameter(torch.randn(4)), nn.Hardtanh(-1, 1)
    graph = fx.Graph()
    x = graph.placeholder("x")
    weight = graph.get_attr("weight") if hasattr(root, "weight") else None
    gain = graph.call_function(operator.mul, (weight, 2))
    linear = graph.call_function(F.linear, (x, graph.call_function(torch.diag, (gain,))))
    y = graph.call_function(F.group_norm, (), {"weight": gain, "num_groups": 2, "input": linear})
    z = graph.call_module("act", (), {"input": y})
    graph.output({"result": graph.call_method("clamp_min", (z,), {"min": 0})})
    model = fx.GraphModule(root, graph).double()
    fused = copy.deepcopy(model)

    report = fuse(fused)

    assert [site.producer for site in report.sites] == ["Linear"]
    assert (report.matched, fused.code.count(FUSED)) == (1, 1)
    x = torch.randn(3, 4, dtype=torch.float64)
    torch.testing.assert_close(fused(x), model(x))


def test_parameters_are_read_when_the_graph_runs() -> None:
    model = chain()
    fused = trace(copy.deepcopy(model))
    assert fuse(fused).matched == 1
    torch.nn.init.normal_(model[1].weight)
    fused.load_state_dict(model.state_dict(), assign=True)
    x = torch.randn(3, 4)
    torch.testing.assert_close(fused(x), model(x))
    x = x.double()
    torch.testing.assert_close(fused.double()(x), model.double()(x))


def test_unused_and_aliased_modules_stay() -> None:
    model = chain()
    model.unused, model.alias = nn.Linear(2, 2), model[1]
    fused = trace(model)
    # Tracing leaves out what is not called; a GraphModule may hold more all the same.
    fused.add_module("unused", model.unused)
    fused.add_module("alias", model.alias)
    state = fused.state_dict()
    assert fuse(fused).matched == 1
    assert list(fused.state_dict()) == list(state)
    fused.load_state_dict(model.state_dict())
    model.load_state_dict(fused.state_dict())


@pytest.mark.parametrize(
    "again",
    [copy.deepcopy, lambda fused: pickle.loads(pickle.dumps(fused)), trace],
    ids=["deepcopy", "pickle", "trace"],
)
def test_fused_module_is_a_graph_module_like_any_other(
    again: Callable[[fx.GraphModule], fx.GraphModule],
) -> None:
    model = chain().double()
    fused = trace(model)
    fuse(fused)
    other = again(fused)
    assert other.code.count(FUSED) == 1
    assert [site.code for site in fuse(other).sites] == ["already_fused"]
    assert_same(other, model, torch.randn(3, 4, dtype=torch.float64))


def test_jit_trace_of_a_fused_graph(tmp_path: Path) -> None:
    model = chain().double()
    fused = trace(model)
    fuse(fused)
    x = torch.randn(3, 4, dtype=torch.float64)
    torch.jit.trace(fused, x, check_trace=False).save(str(tmp_path / "traced.pt"))
    loaded = torch.jit.load(str(tmp_path / "traced.pt"))
    assert "fxfuse::group_norm_activation" in str(loaded.inlined_graph)
    assert_same(loaded, model, x)
    assert_same(loaded, model, torch.randn(5, 4, dtype=torch.float64))


@pytest.mark.usefixtures("hopper")
def test_a_linear_is_taken_in() -> None:
    model = chain().double()
    fused = trace(model)
    (site,) = fuse(fused).sites
    assert site.fused
    assert site.reason.endswith("On a GPU that can, one kernel computes the Linear as well.")
    assert [n.target for n in fused.graph.nodes if n.op.startswith("call_")] == [
        ops.linear_group_norm_activation
    ]
    assert_same(fused, model, torch.randn(3, 4, dtype=torch.float64))


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("shape", "weight", "bias"),
    [
        ((3, 4, 5), (5,), None),
        ((3, 4, 5), (5,), ()),
        ((3, 5), (4, 5), (1,)),
        ((3, 5), (4, 5), ()),
        ((3, 5), (4, 5), (3, 4)),
        ((2, 4, 5), (3, 5), (1,)),
    ],
)
@pytest.mark.parametrize("known", [False, True])
def test_what_f_linear_takes_that_no_linear_has(
    shape: tuple[int, ...],
    weight: tuple[int, ...],
    bias: tuple[int, ...] | None,
    known: bool,
) -> None:
    tensors = [None if size is None else torch.randn(size) for size in (weight, bias)]

    class Functional(nn.Module):
        def forward(self, x: Tensor, *given: Tensor | None) -> Tensor:
            return F.relu(F.group_norm(F.linear(x, *(tensors if known else given)), 2))

    x, model = torch.randn(shape), Functional()
    given = [] if known else [t for t in tensors if t is not None]
    if known:
        fused = torch.export.export(model, (x,)).module()
    else:
        graph = fx.Graph()
        z = graph.call_function(F.linear, tuple(map(graph.placeholder, "xwb"[: 1 + len(given)])))
        graph.output(graph.call_function(F.relu, (graph.call_function(F.group_norm, (z, 2)),)))
        fused = fx.GraphModule(nn.Module(), graph)
    assert isinstance(fused, fx.GraphModule)
    assert fuse(fused).matched == 1
    torch.testing.assert_close(fused(x, *given), model(x, *given))


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("affine", [False, True])
def test_channels_that_are_not_the_linear_s(monkeypatch: pytest.MonkeyPatch, affine: bool) -> None:
    """On a GPU a graph without values is told from its parameters alone."""

    def linear_kernel(*args: Any, **kwargs: Any) -> tuple[bool, str]:
        raise AssertionError("such sizes raise")

    monkeypatch.setattr(ops, "linear_kernel", linear_kernel)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    model = nn.Sequential(
        nn.Linear(5, 10 if affine else 9), nn.GroupNorm(2, 4, affine=affine), nn.ReLU()
    )
    (site,) = fuse(trace(model)).sites
    assert site.reason.endswith("a kernel of its own: its result has not two dimensions.")


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_float32_linear_is_taken_in_for_tf32_or_for_autocast(
    monkeypatch: pytest.MonkeyPatch, tf32: bool, autocast: bool
) -> None:
    def linear_kernel(*args: Any, **kwargs: Any) -> tuple[bool, str]:
        if kwargs["dtype"] == torch.float32:
            return tf32, "in TF32" if tf32 else "float32 without TF32"
        assert (kwargs["dtype"], kwargs["output_dtype"]) == (torch.bfloat16, torch.float32)
        return autocast, "W stays" if autocast else "there are too few rows"

    monkeypatch.setattr(ops, "linear_kernel", linear_kernel)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    fused = trace(nn.Sequential(nn.Linear(5, 4), nn.GroupNorm(2, 4), nn.ReLU()))
    (site,) = fuse(fused).sites
    if tf32:
        assert site.reason.endswith("one kernel computes the Linear as well: in TF32.")
    elif autocast:
        reason = "only under autocast (float32 without TF32), W stays."
        assert site.reason.endswith(f"one kernel computes the Linear as well: {reason}")
    else:
        assert site.reason.endswith("a kernel of its own: float32 without TF32.")
    taken = any(n.target is ops.linear_group_norm_activation for n in fused.graph.nodes)
    assert taken == (tf32 or autocast)


@pytest.mark.usefixtures("hopper")
def test_our_functions_in_a_graph_of_someone_else() -> None:
    def function(x: Tensor, weight: Tensor, scale: Tensor, bound: Any, groups: Any) -> Tensor:
        y = F.relu(F.group_norm(x, 2))
        for args, kwargs in (
            ((), {"activation": "relu", "num_groups": 2, "weight": scale}),
            ((2,), {"activation": "hardtanh", "params": (-1.0, bound)}),
            ((groups,), {"activation": "relu"}),
            ((2,), {}),
            ((2, scale, None, 1e-5, "relu"), {}),
        ):
            y = F.linear(y, weight)
            given = {"input": y} if not args else {}
            y = ops.group_norm_activation(*([y] if args else []), *args, **kwargs, **given)
        return y

    fused = fx.symbolic_trace(function)
    report = fuse(fused)
    assert [site.code for site in report.sites] == ["fused", *5 * ["already_fused"]]
    assert report.sites[1].producer == "Linear"
    assert "hardtanh(-1, bound)" in report.sites[2].reason
    args = torch.randn(3, 4), torch.randn(4, 4), torch.randn(4), 0.5, 2
    torch.testing.assert_close(fused(*args), function(*args))


@pytest.mark.parametrize("operator", [False, True])
def test_a_linear_that_was_taken_in_is_reported_as_fused(operator: bool) -> None:
    fused = trace(chain())
    fuse(fused)
    assert patterns.take_linears_in(fused.graph, fused)
    (call,) = (n for n in fused.graph.nodes if n.target is ops.linear_group_norm_activation)
    if operator:
        call.target = torch.ops.fxfuse.linear_group_norm_activation.default
    (site,) = fuse(fused).sites
    assert (site.code, site.norm) == ("already_fused", f"GroupNorm({call.args[3]})")


def test_dropout_beside_a_match_still_drops() -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        return F.dropout(F.relu(m.norm(x)), 0.5, training=m.training)

    model = Function(function)
    fused = trace(model)
    assert fuse(fused).matched == 1
    x = torch.randn(4, 4, 50)
    torch.manual_seed(0)
    expected = model(x)
    torch.manual_seed(0)
    torch.testing.assert_close(fused(x), expected)


def test_dead_nodes_with_side_effects_stay() -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        counter = m.long.mul_(1)
        counter.add_(1)
        return F.relu(m.norm(x))

    fused = trace(Function(function))
    before = len(fused.graph.nodes)
    assert fuse(fused).matched == 1
    # Norm and activation went; the call and the two weights that it reads came.
    assert len(fused.graph.nodes) == before + 1
    assert "add_" in fused.code


def test_raises_where_torch_raises() -> None:
    x = torch.randn(1, 4)
    for norm, raises in (("F.group_norm(x, g)", True), ("torch.group_norm(x, g)", False)):
        model = nn.Sequential(graphs.group_norm(norm, 4, 4), nn.ReLU())
        fused = trace(model)
        assert fuse(fused).matched == 1
        if raises:
            with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
                fused(x)
        else:
            torch.testing.assert_close(fused(x), model(x))


def test_meta_is_kept() -> None:
    tracer = fx.Tracer()
    tracer.record_stack_traces = True
    model = chain()
    fused = fx.GraphModule(model, tracer.trace(model))
    with FakeTensorMode() as mode:
        value = mode.from_tensor(torch.empty(3, 4))
    act = next(node for node in fused.graph.nodes if node.target == "3")
    norm = next(node for node in fused.graph.nodes if node.target == "1")
    act.meta["val"] = value
    fuse(fused)
    call = next(n for n in fused.graph.nodes if n.target is ops.group_norm_activation)
    assert call.meta["val"] is value
    assert call.meta["nn_module_stack"] == norm.meta["nn_module_stack"]
    assert call.stack_trace == norm.stack_trace


# ---- looking through ------------------------------------------------------------------------


def test_casts_that_change_nothing() -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        return F.silu(m.norm(x.float()).to(torch.float32).to(dtype=torch.float32))

    model = Function(function)
    fused = trace(model)
    assert fuse(fused).matched == 1
    assert [node.target for node in fused.graph.nodes if node.op == "call_method"] == ["float"]
    x = torch.randn(2, 4)
    torch.testing.assert_close(fused(x), model(x))


def test_casts_that_autocast_or_a_hook_would_make_real() -> None:
    # Under CUDA autocast group_norm gives float32 whatever it is given.
    assert_refused(lambda m, x: F.relu(m.norm(x.half()).half()), "cast")
    model = nn.Sequential(nn.GroupNorm(2, 4), nn.GroupNorm(2, 4))
    model[0].register_forward_hook(lambda module, args, y: y.double())
    root = Function(lambda m, x: F.relu(m.model(x.float()).float()))
    root.model = model
    assert [site.code for site in fuse(trace(root)).sites] == ["hooks", "cast"]


def test_casts_known_from_meta() -> None:
    graph_module = trace(Function(lambda m, x: F.relu(m.norm(x).half())))
    norm = norms(graph_module)[0]
    with FakeTensorMode():
        norm.meta["val"] = torch.empty(2, 4, dtype=torch.float16)
    assert fuse(graph_module).matched == 1


@pytest.mark.parametrize(
    ("after", "kept"),
    [
        (lambda z: (z * 2).view(-1), False),
        (lambda z: torch.cat([z.sin(), z]).view(-1).sum(), False),
        (lambda z: z.reshape(-1), True),
        (lambda z: z.contiguous().view(-1), True),
        (lambda z: z, True),
    ],
)
def test_view_of_the_result(after: Callable[[Tensor], Tensor], kept: bool) -> None:
    fused = trace(Function(lambda m, x: after(F.relu(m.norm(x)))))
    assert fuse(fused).matched == 1
    assert ("channels_last = 'eager'" in fused.code) is not kept


def test_view_called_as_a_function() -> None:
    graph = fx.Graph()
    y = graph.call_module("norm", (graph.placeholder("x"),))
    z = graph.call_function(F.relu, (y,))
    graph.output(graph.call_function(torch.Tensor.view, (z, -1)))
    fused = fx.GraphModule(nn.ModuleDict({"norm": nn.GroupNorm(2, 4)}), graph)
    assert fuse(fused).matched == 1
    assert "channels_last = 'eager'" in fused.code


def test_view_after_an_activation_in_place() -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        y = m.norm(x)
        y.relu_()
        return y.view(-1)

    fused = trace(Function(function))
    assert fuse(fused).matched == 1
    assert "channels_last = 'eager'" in fused.code


def test_channels_last_for_all() -> None:
    fused = trace(chain())
    fuse(fused, channels_last="eager")
    assert "channels_last = 'eager'" in fused.code


def test_a_mode_switch_in_between() -> None:
    graph = fx.Graph()
    y = graph.call_module("norm", (graph.placeholder("x"),))
    graph.call_function(torch._C._set_grad_enabled, (False,))
    graph.output(graph.call_function(F.relu, (y,)))
    report = fuse(fx.GraphModule(nn.ModuleDict({"norm": nn.GroupNorm(2, 4)}), graph))
    assert [site.code for site in report.sites] == ["mode_switch"]


# ---- the gradient of clamp ------------------------------------------------------------------


def test_clamp_is_asked_whatever_the_mode() -> None:
    probe = patterns.clamp_activation.__wrapped__
    expected = probe()
    assert expected in ("clamp", "open_clamp", "hardtanh")
    with torch.no_grad():
        assert probe() == expected
    with torch.inference_mode():
        assert probe() == expected
    with FakeTensorMode():
        assert probe() == expected


def test_clamp_follows_the_installed_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "clamp_activation", lambda: "hardtanh")
    fused = trace(Function(lambda m, x: m.norm(x).clamp(-1, 1)))
    assert fuse(fused).matched == 1
    assert "activation = 'hardtanh'" in fused.code
    monkeypatch.setattr(patterns, "clamp_activation", lambda: None)
    assert_refused(lambda m, x: m.norm(x).clamp(-1, 1), "clamp_gradient")


# ---- reports --------------------------------------------------------------------------------


def test_without_the_library_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "load", lambda: False)
    fused = trace(nn.Sequential(chain(), nn.GroupNorm(1, 4)))
    code = fused.code
    report = fuse(fused)
    assert [site.code for site in report.sites] == ["library_unavailable", "graph_output"]
    assert (report.matched, report.fused, report.refused) == (0, 0, 2)
    assert fused.code == code


def test_analysis_changes_nothing_and_names_the_nodes() -> None:
    model = nn.Sequential(chain(), nn.GroupNorm(1, 4))
    graph_module = trace(model)
    code = graph_module.code
    sites = rewrite.apply(graph_module.graph, graph_module, patterns.fusions(), analyse_only=True)
    assert [site.code for site in sites] == ["fusible", "graph_output"]
    graph_module.recompile()
    assert graph_module.code == code
    match = sites[0].match
    assert match is not None
    assert match.producer.target == "0.0"
    assert [part.node.target for part in match.parts] == ["0.1", "0.3"]
    assert [node.target for node in match.nodes] == ["0.1", "0.2", "0.3"]
    report = FusionReport(tuple(sites))
    assert (report.matched, report.fused, report.refused) == (1, 0, 1)
    assert report.sites[0].match is None


def test_a_graph_without_a_module_of_its_own() -> None:
    model = chain()
    graph = fx.Tracer().trace(model)
    (site,) = rewrite.apply(graph, model, patterns.fusions())
    assert site.fused
    assert fx.GraphModule(model, graph).code.count(FUSED) == 1


def test_report_says_what_and_where() -> None:
    tracer = fx.Tracer()
    tracer.record_stack_traces = True
    model = nn.Sequential(chain(), nn.Conv1d(4, 4, 1), nn.GroupNorm(1, 4, eps=0.1), nn.Softplus())
    root = Function(lambda m, x: model(x))
    root.model = model
    fused = fx.GraphModule(root, tracer.trace(root))

    report = fuse(fused)

    first, second = report.sites
    assert (first.norm, first.producer) == ("GroupNorm(2, 4)", "Linear")
    assert (first.activation, first.module) == ("Hardtanh(-2, 2)", "model.0.1")
    assert first.source is not None
    assert first.source.startswith(f'File "{__file__}", line ')
    assert (second.norm, second.producer) == ("GroupNorm(1, 4)", "Conv1d")
    assert (second.fused, second.code, second.activation) == (False, "no_activation", "")
    assert "model_3" in second.reason
    text = str(report)
    for part in ("model.0.1", "Hardtanh(-2, 2)", "Conv1d", "no_activation", "1 fused"):
        assert part in text


def test_reports_merge_and_travel() -> None:
    one, two = fuse(trace(chain())), fuse(trace(nn.Sequential(chain(), nn.GroupNorm(1, 4))))
    merged = FusionReport((*one.sites, *two.sites))
    assert merged.sites == one.sites + two.sites
    assert (merged.matched, merged.refused) == (2, 1)
    assert pickle.loads(pickle.dumps(merged)) == merged
    assert str(FusionReport()) == "0 GroupNorms: 0 fused, 0 left as they were"


# ---- the engine, on operators of its own ----------------------------------------------------


def scaled_negative(x: Tensor, factor: float) -> Tensor:
    return -(x * factor)


def toy(producer: str | None = None) -> Fusion:
    """`-(x * factor)` as one call; absolute values count as nothing."""

    def reads(target: Callable[..., Any]) -> rewrite.Reader:
        def reader(node: fx.Node, root: nn.Module) -> Part | None:
            if node.target is not target:
                return None
            return Part(node, target.__name__, node.args[0], data=node.args[1:])

        return reader

    def arguments(
        graph: fx.Graph, match: Match, survey: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (match.producer, *match.parts[0].data), {}

    return Fusion(
        name="scaled negative",
        producer=lambda node, root: node.name if producer in (None, node.name) else None,
        steps=(reads(operator.mul), reads(operator.neg)),
        transparent=reads(operator.abs),
        target=scaled_negative,
        arguments=arguments,
    )


def test_engine_knows_no_operator() -> None:
    def function(x: Tensor) -> Tensor:
        left = -(x * 2)
        right = -operator.abs(left * 3)
        return right + x * 4

    graph_module = trace(function)
    sites = rewrite.apply(graph_module.graph, graph_module, [toy()])
    graph_module.graph.lint()
    graph_module.recompile()
    assert [(site.producer, site.code) for site in sites] == [
        ("x", "fused"),
        ("neg", "fused"),
        ("x", "no_activation"),
    ]
    assert graph_module.code.count("scaled_negative(") == 2
    assert "abs" not in graph_module.code
    torch.testing.assert_close(graph_module(torch.ones(2)), torch.full((2,), 10.0))


def test_engine_takes_the_first_row_that_matches() -> None:
    graph_module = trace(lambda x: -(x * 2))
    rows = [toy("nobody"), toy("x"), toy()]
    (site,) = rewrite.apply(graph_module.graph, graph_module, rows, analyse_only=True)
    assert site.match is not None
    assert site.match.fusion is rows[1]
    assert rewrite.apply(graph_module.graph, graph_module, rows[:1]) == []


def test_reasons_are_sentences() -> None:
    for reason in Reason:
        assert reason.value.endswith(".")
        assert reason.code == reason.name.lower()
    assert Reason.DROPOUT.because(p=0.5).sentence == "A dropout with p = 0.5 stands in between."
