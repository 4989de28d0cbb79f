"""torch.compile: the backend, the pass for Inductor, and what they say they did."""

from __future__ import annotations

import ast
import copy
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import graphs
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import run_and_get_code
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import fxfuse
from fxfuse import backend, library, ops, tuning
from fxfuse.backend import compile_graph

INNER = ["eager", "aot_eager", "inductor"]


@pytest.fixture(autouse=True)
def _fresh_compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self, channels: int = 12, act: nn.Module | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, channels)
        self.norm = nn.GroupNorm(4, channels)
        self.act = act or nn.Hardtanh(-0.5, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.linear(x)))


class ImageBlock(nn.Module):
    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm = conv, nn.GroupNorm(4, 12)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu6(self.norm(self.conv(x))) + x


def inputs(*size: int) -> Tensor:
    return torch.randn(*(size or (5, 12)), dtype=torch.float64)


def compiled(model: Callable[..., Any], inner: str = "eager", **kwargs: Any) -> Any:
    options = {"inner": inner, **kwargs.pop("options", {})}
    kwargs = {"fullgraph": True, "backend": compile_graph, "options": options, **kwargs}
    return torch.compile(model, **kwargs)


def assert_same(model: Any, other: Any, *args: Any) -> None:
    """Outputs and gradients, in every parameter and in the arguments."""
    answers = []
    for m in (model, other):
        given = [a.detach().requires_grad_() for a in args]
        leaves = [*given, *m.parameters()]
        for leaf in leaves:
            leaf.grad = None
        output = m(*given)
        tensors = [t for t in pytree.tree_leaves(output) if t is not None]
        sum(t.square().sum() for t in tensors).backward()
        # AOTAutograd has zeros where autograd has None.
        grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        answers.append((output, grads))
    torch.testing.assert_close(answers[1], answers[0], rtol=1e-9, atol=1e-9)


def fused_calls(graph: fx.GraphModule) -> int:
    return sum(
        node.target in (ops.group_norm_activation, ops.group_norm_add_activation)
        for module in graph.modules()
        if isinstance(module, fx.GraphModule)
        for node in module.graph.nodes
    )


# ---- the backend ----------------------------------------------------------------------------


@pytest.mark.parametrize("inner", INNER)
def test_case_34_one_compile_for_every_batch_and_image_size(inner: str) -> None:
    # Inductor itself compiles a convolution on the CPU for one size.
    conv = nn.Softplus() if inner == "inductor" else nn.Conv2d(12, 12, 3, padding=1)
    model = nn.Sequential(ImageBlock(conv), ImageBlock(conv)).double()
    fast = compiled(model, inner, dynamic=True)
    for size in ((2, 12, 5, 7), (3, 12, 7, 5), (5, 12, 11, 6), (7, 12, 6, 13), (11, 12, 9, 9)):
        assert_same(model, fast, inputs(*size))
    assert counters["stats"]["unique_graphs"] == 1
    assert fxfuse.report().fused == 2


@pytest.mark.parametrize("inner", INNER)
def test_case_34_one_compile_with_bounds_that_are_inputs(inner: str) -> None:
    model = Block().double()
    fast = compiled(model, inner, dynamic=True)
    for batch in (2, 3, 5, 7, 11):
        assert_same(model, fast, inputs(batch, 12))
    assert counters["stats"]["unique_graphs"] == 1
    assert [site.activation for site in fxfuse.report().sites] == ["Hardtanh(-0.5, 0.5)"]
    model.act.max_val = 0.1
    assert_same(model, fast, inputs())
    assert fxfuse.report().sites[-1].activation == "Hardtanh(-0.5, 0.1)"


def test_a_bound_that_the_graph_computes_stays() -> None:
    def f(x: Tensor) -> Tensor:
        return F.hardtanh(F.group_norm(x, 4), -1.0, x.shape[0] / 4)

    fast = compiled(f, dynamic=True)
    for batch in (2, 3, 5, 7, 11):
        x = inputs(batch, 12)
        torch.testing.assert_close(fast(x), f(x))
    assert counters["stats"]["unique_graphs"] == 1
    assert {site.code for site in fxfuse.report().sites} == {"tensor_bound"}


def test_a_bound_that_is_read_from_a_tensor_stays() -> None:
    def f(x: Tensor, bound: Tensor) -> Tensor:
        return F.hardtanh(F.group_norm(x, 4), -1.0, bound.item())

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        fast = compiled(f)
        for bound in (0.5, 0.25):
            args = (inputs(), torch.tensor(bound, dtype=torch.float64))
            torch.testing.assert_close(fast(*args), f(*args))
    assert counters["stats"]["unique_graphs"] == 1
    assert {site.code for site in fxfuse.report().sites} == {"tensor_bound"}


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.usefixtures("hopper")
def test_a_batch_whose_size_depends_on_data(inner: str, grad: bool) -> None:
    # Of 3 times a batch torch does not know that it is not 1, and refuses the norm itself.
    linear, norm = nn.Linear(12, 12).double(), nn.GroupNorm(3, 12).double()

    def f(x: Tensor, mask: Tensor) -> Tensor:
        y = F.relu(norm(linear(x[mask])))
        return F.relu(norm(y) + x[mask])

    def direct(x: Tensor, mask: Tensor) -> Tensor:
        affine = norm.weight, norm.bias
        y = ops.linear_group_norm_activation(
            x[mask], linear.weight, linear.bias, 3, *affine, activation="relu"
        )
        return ops.group_norm_add_activation(y, x[mask], 3, *affine, activation="relu")

    for function in (f, direct):
        torch._dynamo.reset()
        config = torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
        with config, torch.set_grad_enabled(grad):
            fast = compiled(function, inner)
            for batch in (3, 5):
                args = (inputs(), torch.arange(5) < batch)
                torch.testing.assert_close(fast(*args), f(*args))
        assert counters["stats"]["unique_graphs"] == 1
        counters.clear()
        assert fxfuse.report().fused == 2


@pytest.mark.parametrize("inner", INNER)
def test_our_function_called_with_bounds_that_are_inputs(inner: str) -> None:
    def f(x: Tensor, bound: float) -> Tensor:
        return ops.group_norm_activation(x, 4, activation="hardtanh", params=(-bound, bound))

    fast = compiled(f, inner, dynamic=True)
    for bound in (0.5, 0.25, 0.125):
        x = inputs()
        torch.testing.assert_close(fast(x, bound), f(x, bound))
    assert {site.code for site in fxfuse.report().sites} == {"already_fused"}


@pytest.mark.parametrize("inner", INNER)
def test_a_body_that_writes_before_the_residual_is_there(inner: str) -> None:
    norm = nn.GroupNorm(4, 12).double()

    def body(x: Tensor) -> Tensor:
        x.relu_()
        return x * 2

    def f(x: Tensor) -> Tensor:
        x = x * 1.5
        y = norm(x)
        return F.relu(y + checkpoint(body, x, use_reentrant=False))

    x = inputs()
    with torch.no_grad():
        torch.testing.assert_close(compiled(f, inner)(x), f(x))
    assert [site.code for site in fxfuse.report().sites] == ["written_meanwhile"]


def test_case_34_two_submodules_do_not_recompile_each_other() -> None:
    model = nn.Sequential(Block(), nn.Linear(12, 12), Block()).double()
    fast = copy.deepcopy(model)
    for i in (0, 2):
        fast[i] = compiled(fast[i], "aot_eager")
    for _ in range(3):
        assert_same(model, fast, inputs())
    assert counters["stats"]["unique_graphs"] == 1  # one class, one graph for both
    assert fxfuse.report().fused == 1

    other = compiled(model[0], "aot_eager")  # and a third time
    assert_same(model[0], other, inputs())
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("inner", INNER)
def test_case_36_training_with_nested_outputs(inner: str) -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Block(), Block(act=nn.SiLU())

        def forward(self, x: Tensor, y: Tensor | None = None) -> dict[str, Any]:
            a = self.a(x)
            return {"a": a, "rest": (self.b(a), [x * 2, None if y is None else a + y])}

    model = Nested().double()
    fast = compiled(model, inner)
    for args in ([inputs()], [inputs(), inputs()]):
        assert_same(model, fast, *args)
    assert fxfuse.report().fused == 4


@pytest.mark.parametrize("inner", INNER)
def test_case_36_no_output(inner: str) -> None:
    model = Block().double()

    def f(x: Tensor) -> None:
        model(x)

    assert compiled(f, inner)(inputs()) is None
    assert compiled(lambda x: (None, model(x), None), inner)(inputs())[::2] == (None, None)
    assert fxfuse.report().fused == 2


@pytest.mark.parametrize("inner", INNER)
def test_case_36_a_gradient_penalty_is_right_or_raises(inner: str) -> None:
    model = Block(act=nn.SiLU()).double()
    x = inputs()

    def penalty(m: Any) -> list[Tensor]:
        given = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(m(given).square().sum(), given, create_graph=True)
        return list(torch.autograd.grad(grad.square().sum(), list(model.parameters())))

    fast = compiled(model, inner)
    if inner == "eager":
        torch.testing.assert_close(penalty(fast), penalty(model), rtol=1e-9, atol=1e-9)
    else:  # AOTAutograd has no second derivative, and says so
        with pytest.raises(RuntimeError, match="double backward"):
            penalty(fast)
    assert fxfuse.report().fused == 1


def test_inference_mode_and_no_grad() -> None:
    model, x = Block().double(), inputs()
    expected = model(x)
    for mode in (torch.no_grad, torch.inference_mode):
        torch._dynamo.reset()
        with mode():
            torch.testing.assert_close(compiled(model, "aot_eager")(x), expected)
        assert fxfuse.report().fused == 1


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("reentrant", [False, True])
def test_the_body_of_a_checkpoint_is_fused(inner: str, reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Block(), Block()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.b, self.a(x), use_reentrant=reentrant)

    model = Checkpointed().double()
    assert_same(model, compiled(model, inner), inputs())
    report = fxfuse.report()
    assert [site.module for site in report.sites] == ["a.norm", "b.norm"]
    assert report.fused == 2


def test_a_region_that_is_compiled_once_is_fused() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor) -> Tensor:
            return region(self.block, region(self.block, x))

    @torch.compiler.nested_compile_region
    def region(block: nn.Module, x: Tensor) -> Any:
        return block(x)

    model = Twice().double()
    assert_same(model, compiled(model, "aot_eager"), inputs())
    assert fxfuse.report().fused == 1


def test_compiled_ahead_of_time(tmp_path: Path) -> None:
    def f(x: Tensor) -> Tensor:
        return F.hardtanh(F.group_norm(x, 4), -0.5, 0.5)

    x = inputs()
    fast = compiled(f, "aot_eager")
    if not hasattr(fast, "aot_compile"):
        pytest.skip("this torch has it behind a flag")
    fast = fast.aot_compile(((x,), {}))
    torch.testing.assert_close(fast(x), f(x))
    assert fxfuse.report().fused == 1
    fast.save_compiled_function(str(tmp_path / "function"))
    with (tmp_path / "function").open("rb") as file:
        loaded = torch.compiler.load_compiled_function(file)
    with torch.profiler.profile() as profile:
        torch.testing.assert_close(loaded(x), f(x))
    assert "fxfuse::group_norm_activation" in {event.name for event in profile.events()}


def test_a_match_between_graph_breaks() -> None:
    class Breaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Block(), Block()

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            torch._dynamo.graph_break()
            return self.b(x)

    model = Breaks().double()
    assert_same(model, compiled(model, fullgraph=False), inputs())
    report = fxfuse.report()
    assert report.fused == 2
    assert len({site.graph for site in report.sites}) == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(dtype: torch.dtype) -> None:
    model = Block()
    fast = compiled(model, "aot_eager")
    x = torch.randn(5, 12)
    with torch.autocast("cpu", dtype=dtype):
        expected, result = model(x), fast(x)
    assert result.dtype == expected.dtype
    torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2)

    def inside(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=dtype):
            return model(x)

    result = compiled(inside, "aot_eager")(x)
    assert result.dtype == expected.dtype
    torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2)
    assert fxfuse.report().fused == 2


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune-no-cudagraphs"])
def test_modes_and_options_reach_inductor(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    def compile_fx(graph: fx.GraphModule, example_inputs: Any, **kwargs: Any) -> Any:
        patches = kwargs["config_patches"]
        assert "fxfuse.ops.group_norm_activation" in patches.pop(
            "unsafe_marked_cacheable_functions"
        )
        seen.append(patches)
        assert fused_calls(graph) == 1
        return graph.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    model, x = Block().double(), inputs()
    torch.compile(model, backend=compile_graph, mode=mode)(x)
    torch._dynamo.reset()
    compiled(model, "inductor", options={"mode": mode, "epilogue-fusion": False})(x)
    expected = torch._inductor.list_mode_options(mode)
    assert seen == [expected, {**expected, "epilogue_fusion": False}]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"iner": "eager"}, r"expected options of fxfuse .*, got 'iner'; did you mean 'inner'"),
        ({"max_autotun": True}, "got 'max_autotun'; did you mean 'max_autotune'"),
        ({"inner": "nvfuser"}, r"expected options\['inner'\] to be one of .*, got 'nvfuser'"),
        ({"tune": 0}, r"expected options\['tune'\] to be one of \(False, True\), got 0"),
        ({"tune": 1}, r"expected options\['tune'\] to be one of \(False, True\), got 1"),
        ({"channels_last": 1}, r"expected options\['channels_last'\] to be one of .*, got 1"),
        ({"inner": "eager", "max_autotune": True}, "expected no Inductor options with .*autotune"),
        ({"inner": "eager", "mode": "max-autotune"}, "expected no Inductor options with .*'mode'"),
        ({"mode": "fastest"}, "Unrecognized mode=fastest"),
        ({"max_autotune": 3.5}, "Unexpected type of attr max_autotune"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=message):
        torch.compile(Block(), backend=compile_graph, options=options)(torch.randn(5, 12))


def test_without_the_library_the_model_is_compiled_unfused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(library, "load", lambda: False)
    model = Block().double()
    assert_same(model, compiled(model, "aot_eager"), inputs())
    assert [site.code for site in fxfuse.report().sites] == ["library_unavailable"]


def test_an_optimized_model_under_the_backend() -> None:
    model = Block().double()
    optimized = fxfuse.optimize(model)
    assert_same(model, compiled(optimized, "aot_eager"), inputs())
    assert fxfuse.report(optimized).fused == 1
    (site,) = fxfuse.report().sites
    assert (site.code, site.fused) == ("already_fused", True)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=graphs.models())
def test_random_models(case: graphs.Model) -> None:
    torch._dynamo.reset()
    assert_same(case.model, compiled(case.model, "aot_eager"), *case.inputs())
    assert fxfuse.report().matched == case.planted, fxfuse.report()


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "2 dimensions": lambda: torch.randn(5, 12),
    "3 dimensions": lambda: torch.randn(5, 12, 7),
    "4 dimensions": lambda: torch.randn(5, 12, 7, 3),
    "channels_last": lambda: torch.randn(5, 12, 7, 3).to(memory_format=torch.channels_last),
    "5 dimensions": lambda: torch.randn(5, 12, 2, 7, 3),
    "channels_last_3d": lambda: torch.randn(5, 12, 2, 7, 3).to(
        memory_format=torch.channels_last_3d
    ),
    "sliced": lambda: torch.randn(5, 24, 7, 3)[:, ::2],
    "transposed": lambda: torch.randn(5, 7, 12).transpose(1, 2),
    "expanded": lambda: torch.randn(5, 12, 1, 1).expand(-1, -1, 7, 3),
    "1 x 1": lambda: torch.randn(5, 12, 1, 1),
    "1 x 1, channels_last": lambda: torch.randn(5, 12, 1, 1).to(memory_format=torch.channels_last),
    "one channel": lambda: torch.randn(5, 1, 7, 3),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_case_33_strides_are_those_of_eager_on_the_cpu(name: str) -> None:
    x = LAYOUTS[name]()
    groups = min(4, x.shape[1])

    def f(x: Tensor) -> Tensor:
        return F.hardtanh(F.group_norm(x, groups), -0.5, 0.5)

    expected, result = f(x), compiled(f, "aot_eager")(x)
    torch.testing.assert_close(result, expected)
    assert result.stride() == expected.stride()
    assert fxfuse.report().fused == 1


def test_inductor_copies_nothing_into_another_layout(device: torch.device) -> None:
    """It runs convolutions in channels_last, and the operator takes what it gets."""
    model = nn.Sequential(*(ImageBlock(nn.Conv2d(12, 12, 3, padding=1)) for _ in range(3))).to(
        device
    )
    x = torch.randn(2, 12, 9, 7, device=device)
    with torch.no_grad():
        result, code = run_and_get_code(compiled(model, "inductor"), x)
        torch.testing.assert_close(result, model(x))
    assert fxfuse.report().fused == 3
    assert result.stride() == model(x).stride()
    assert "fxfuse.group_norm_activation" in code[0]
    assert "fused_group_norm_activation" not in code[0]  # the name of a copy for its sake


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("features", [4096, 16384])
def test_case_35_cuda_graphs_and_a_side_stream(features: int) -> None:
    model = nn.Sequential(nn.Linear(features, features), nn.GroupNorm(16, features), nn.Hardtanh())
    model = model.to("cuda", torch.bfloat16).requires_grad_(False)
    inputs = [torch.randn(64, features, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    expected = [model(x) for x in inputs]

    def check(function: Callable[[Tensor], Tensor]) -> None:
        for x, y in zip(inputs, expected, strict=True):
            torch.testing.assert_close(function(x).clone(), y, rtol=2e-2, atol=2e-2)

    fast = torch.compile(model, backend=compile_graph, mode="reduce-overhead", fullgraph=True)
    check(fast)
    assert fxfuse.report().fused == 1
    optimized = fxfuse.optimize(model)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        check(optimized)
    stream.synchronize()
    static, graph = inputs[0].clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = optimized(static)

    def replay(x: Tensor) -> Tensor:
        static.copy_(x)
        graph.replay()
        return output

    check(replay)


# ---- backend="inductor" ---------------------------------------------------------------------


class Counted(CustomGraphPass):
    """A pass of another library."""

    def __init__(self, version: str | None = "1") -> None:
        self.version, self.seen = version, 0

    def __call__(self, graph: fx.Graph) -> None:
        self.seen += sum(node.target is F.group_norm for node in graph.nodes)

    def uuid(self) -> str | None:
        return self.version


def test_case_38_the_pass_runs_after_one_that_is_installed_already() -> None:
    model = Block().double()
    theirs = Counted()
    config = torch._inductor.config
    with config.patch(pre_grad_custom_pass=theirs, force_disable_caches=True):
        with fxfuse.inductor():
            fast = torch.compile(model, backend="inductor", fullgraph=True)
            assert_same(model, fast, inputs())
        assert config.pre_grad_custom_pass is theirs
        assert (theirs.seen, fxfuse.report().fused) == (1, 1)
        with fxfuse.inductor(), pytest.raises(KeyError):
            raise KeyError
        assert config.pre_grad_custom_pass is theirs


def test_case_38_the_key_changes_when_either_pass_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def keys(installed: Any, **settings: Any) -> list[Any]:
        config = torch._inductor.config
        with config.patch(pre_grad_custom_pass=installed), fxfuse.inductor(**settings):
            found = config.pre_grad_custom_pass
        assert isinstance(found, CustomGraphPass)
        return [found.uuid(), pickle.dumps(found)]

    plain, theirs = keys(None), keys(Counted())
    assert keys(None) == plain
    assert keys(Counted()) == theirs
    changed = [plain, theirs, keys(Counted("2")), keys(None, channels_last="eager")]
    monkeypatch.setattr(backend, "_sources", lambda: "other sources")
    changed += [keys(None), keys(Counted())]
    monkeypatch.setattr(library, "library_path", lambda: Path("other/library.so"))
    changed += [keys(None), keys(Counted())]
    for values in zip(*changed, strict=True):
        assert len(set(values)) == len(values)
    assert keys(Counted(None))[0] is None  # of a pass that will not say, nothing is cached
    assert keys(print)[0] is None


def test_inductor_pass_is_a_pass_for_the_config() -> None:
    model = Block().double()
    with torch._inductor.config.patch(
        pre_grad_custom_pass=fxfuse.inductor_pass, force_disable_caches=True
    ):
        assert_same(model, torch.compile(model, fullgraph=True), inputs())
    assert fxfuse.report().fused == 1


# ---- tuning ---------------------------------------------------------------------------------


class Residual(nn.Module):
    """What lies between the products can be fused, the rest cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv1d(12, 12, 3, padding=1), nn.Conv1d(12, 12, 3, padding=1)
        self.norm = nn.GroupNorm(4, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.relu(self.norm(self.a(x) + 1)) * 2 + x)


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("train", [False, True])
def test_tuning_keeps_what_is_faster(
    inner: str, train: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[str] = []

    def measure(function: Callable[[], Any], device: torch.device) -> float:
        """Takes the fused calls in every second window for slow ones."""
        assert device == torch.device("cpu")
        with torch.profiler.profile() as profile:
            function()
        names = {event.name for event in profile.events()}
        assert not any("conv" in name for name in names)
        assert any("ackward" in name for name in names) == train
        fused = any(name.startswith("fxfuse::group_norm_activation") for name in names)
        assert fused == (len(timed) % 2 == 0)
        timed.append("fused" if fused else "unfused")
        return (10.0 if len(timed) <= 2 else 30.0) if fused else 20.0

    monkeypatch.setattr(tuning, "measure", measure)
    # Two alike and one more: two windows to time.
    model = nn.Sequential(Residual(), Residual(), ImageBlock(nn.Conv1d(12, 12, 1))).double()
    fast = compiled(model, inner, options={"tune": True}, dynamic=True)
    x = inputs(3, 12, 5)
    if train:
        assert_same(model, fast, x)
    else:
        with torch.no_grad():
            torch.testing.assert_close(fast(x), model(x))
    assert timed == ["fused", "unfused"] * 2
    sites = fxfuse.report().sites
    assert [site.code for site in sites] == ["fused", "fused", "slower"]
    assert [site.module for site in sites] == ["0.norm", "1.norm", "2.norm"]
    assert sites[0].reason == "Replaced by one operator. 10 µs, 20 µs without it."
    assert sites[2].reason.endswith("30 µs, 20 µs without it.")
    assert sites[2].activation == "ReLU6"


def test_tuning_under_autocast_times_what_will_run(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def measure(function: Callable[[], Any], device: torch.device) -> float:
        function()
        seen.append(torch.is_autocast_enabled("cpu"))
        return 1.0

    monkeypatch.setattr(tuning, "measure", measure)
    norm = nn.GroupNorm(4, 12)

    def f(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = F.relu(norm(x * 2))
        return F.relu6(norm(x - 1))

    compiled(f, "eager", options={"tune": True})(torch.randn(5, 12))
    assert seen == [True, True, False, False]
    assert fxfuse.report().fused == 2  # a tie is no loss


def test_a_site_of_unknown_size_is_fused_untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "measure", None)

    def f(x: Tensor) -> Tensor:
        rows = x[x[:, 0] > 0]
        torch._check(rows.shape[0] >= 2)
        return torch.relu(torch.group_norm(rows, 4))

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        fast = compiled(f, "eager", options={"tune": True})
        x = inputs(9, 12)
        torch.testing.assert_close(fast(x), f(x))
    assert fxfuse.report().fused == 1


def test_tuning_measures() -> None:
    model = Block().double()
    fast = compiled(model, "aot_eager", options={"tune": True})
    assert_same(model, fast, inputs())
    (site,) = fxfuse.report().sites
    assert site.code in ("fused", "slower")
    fused, unfused = map(float, re.findall(r"([\d.e+]+) µs", site.reason))
    assert fused > 0
    assert unfused > 0
    assert (site.code == "slower") == (fused > unfused) or fused == unfused


# ---- optimize and the rest of torch ---------------------------------------------------------


def forward_calls(run: Callable[[], Any]) -> int:
    """How often the kernel that saves for a backward ran."""
    with torch.profiler.profile() as profile:
        run()
    # A mode sees each call too, which is then an event around that of the kernel or around nothing.
    return sum(
        event.name == "fxfuse::group_norm_activation_forward"
        and any(child.name.startswith("aten::empty") for child in event.cpu_children)
        for event in profile.events()
    )


@pytest.mark.parametrize("door", ["optimize", "eager", "aot_eager"])
@pytest.mark.parametrize(
    ("saved", "count"),
    [
        (None, 2),  # plain checkpointing runs the forward twice
        ([torch.ops.aten.addmm.default], 2),
        (["fxfuse::group_norm_activation_forward"], 1),
    ],
)
def test_selective_checkpointing_by_operator(
    door: str, saved: list[Any] | None, count: int
) -> None:
    library.load()
    named = {"fxfuse::group_norm_activation_forward"}
    if saved is not None and named.intersection(map(str, saved)):
        saved = [torch.ops.fxfuse.group_norm_activation_forward.default]

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(saved)

    keywords = {} if saved is None else {"context_fn": contexts}

    class Checkpointed(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, x, use_reentrant=False, **keywords)

    model = Checkpointed(Block()).double()
    fast = fxfuse.optimize(model) if door == "optimize" else compiled(model, door)
    assert_same(model, fast, inputs())
    x = inputs().requires_grad_()
    # Plain checkpointing is not there with "eager", and AOTAutograd saves where that is cheaper.
    if door == "optimize" or saved is not None:
        assert forward_calls(lambda: fast(x).sum().backward()) == count


def test_compiled_autograd_traces_the_backward() -> None:
    def first(m: nn.Module, x: Tensor) -> list[Tensor]:
        x = x.clone().requires_grad_()
        return list(torch.autograd.grad(m(x).square().sum(), [x, *m.parameters()]))

    def second(m: nn.Module, x: Tensor) -> list[Tensor]:
        x = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(m(x).square().sum(), x, create_graph=True)
        return list(torch.autograd.grad(grad.square().sum(), list(m.parameters())))

    compiler = torch.compile(backend="eager", fullgraph=True)  # type: ignore[call-overload]
    affine, without = nn.GroupNorm(3, 12, eps=0.1), nn.GroupNorm(4, 12, affine=False)
    all_kinds = nn.Sequential(graphs.without_bias(affine), nn.SiLU(), without, nn.Hardtanh(-1, 1))
    for derivatives, model, batch in (
        (first, Block(), 3),
        (first, all_kinds, 3),
        (first, all_kinds, 5),
        (second, all_kinds[:2], 3),
    ):
        model.double()
        optimized, x = fxfuse.optimize(model), inputs(batch, 12)
        assert fxfuse.report(optimized).fused > 0
        with torch._dynamo.compiled_autograd._enable(compiler):
            found = derivatives(optimized, x)
        torch.testing.assert_close(found, derivatives(model, x), rtol=1e-9, atol=1e-9)
    assert counters["compiled_autograd"]["captures"] > 0


def test_torch_func_of_an_optimized_model() -> None:
    model = Block(act=nn.SiLU()).double()
    optimized = fxfuse.optimize(model)
    parameters = dict(model.named_parameters())
    x, tangent = inputs(), inputs()
    func = torch.func

    def everything(m: nn.Module) -> list[Any]:
        def f(p: dict[str, Tensor], x: Tensor) -> Tensor:
            return func.functional_call(m, p, (x,))

        def loss(p: dict[str, Tensor], x: Tensor) -> Tensor:
            return f(p, x).square().sum()

        stacked = {k: torch.stack([p, 2 * p]) for k, p in parameters.items()}
        return [
            func.grad(loss)(parameters, x),
            func.vmap(f, (0, None))(stacked, x),
            func.vmap(func.grad(loss), (None, 0))(parameters, torch.stack([x, -x])),
            func.jvp(lambda t: f(parameters, t), (x,), (tangent,)),
            func.jacrev(lambda t: f(parameters, t))(x),
            func.hessian(lambda t: loss(parameters, t))(x),
        ]

    torch.testing.assert_close(everything(optimized), everything(model), rtol=1e-9, atol=1e-9)


def test_second_derivatives_and_forward_mode_of_an_optimized_model() -> None:
    model = Block(act=nn.SiLU()).double()
    optimized = fxfuse.optimize(model)
    forward_ad = torch.autograd.forward_ad
    x, tangent = inputs(), inputs()
    answers = []
    for m in (model, optimized):
        given = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(m(given).square().sum(), given, create_graph=True)
        second = torch.autograd.grad(grad.square().sum(), list(m.parameters()))
        with forward_ad.dual_level():
            dual = m(forward_ad.make_dual(x, tangent))
            answers.append([*second, *forward_ad.unpack_dual(dual)])
    torch.testing.assert_close(answers[1], answers[0], rtol=1e-9, atol=1e-9)
    assert answers[1][-1].abs().max() > 0


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_torch_func_inside_a_compiled_function(inner: str) -> None:
    model, x = Block(act=nn.SiLU()).double(), inputs()

    def f(x: Tensor) -> list[Tensor]:
        return [
            torch.func.grad(lambda t: model(t).square().sum())(x),
            torch.func.vmap(lambda t: model(t))(torch.stack([x, -x])),
        ]

    torch.testing.assert_close(compiled(f, inner)(x), f(x), rtol=1e-9, atol=1e-9)
    assert fxfuse.report().fused > 0


def test_report_on_a_compiled_model() -> None:
    with pytest.raises(ValueError, match=r"got a compiled one; fxfuse\.report\(\) has what was"):
        fxfuse.report(compiled(Block()))
    assert fxfuse.report(compiled(fxfuse.optimize(Block()))).fused == 1


# ---- reports --------------------------------------------------------------------------------


def test_report_names_graph_module_and_line() -> None:
    model = nn.ModuleDict({"a": Block(), "b": Block(act=nn.Softplus())}).double()
    model.forward = lambda x: model["b"](model["a"](x))  # type: ignore[method-assign]
    compiled(model)(inputs())
    report = fxfuse.report()
    assert [(site.module, site.code) for site in report.sites] == [
        ("a.norm", "fused"),
        ("b.norm", "no_activation"),
    ]
    assert {site.graph for site in report.sites} == {"[0/0]"}
    assert all(str(site.source).startswith(f'File "{__file__}"') for site in report.sites)
    for part in ("[0/0]", "a.norm", "Hardtanh(-0.5, 0.5)", "1 fused"):
        assert part in str(report)
    torch._dynamo.reset()
    assert fxfuse.report().sites == ()


# ---- the Linear ahead of the norm -----------------------------------------------------------


@pytest.mark.usefixtures("hopper")
def test_a_linear_is_taken_in() -> None:
    model = Block().double()
    run = compiled(model, "inductor", dynamic=True)
    with torch.no_grad():
        _, code = run_and_get_code(run, inputs())
        assert "fxfuse.linear_group_norm_activation" in code[0]
        assert "addmm" not in code[0]
        for x in (inputs(), inputs(7, 12)):
            torch.testing.assert_close(run(x), model(x))
    (site,) = fxfuse.report().sites
    assert site.reason.endswith("one kernel computes the Linear as well: it is a test.")
    assert_same(model, run, inputs())


@pytest.mark.usefixtures("hopper")
def test_a_linear_that_is_better_alone_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: set[int] = set()

    def linear_kernel(n: int, *args: Any, **kwargs: Any) -> tuple[bool, str]:
        rows.add(n)
        return False, "there are too few rows"

    monkeypatch.setattr(ops, "linear_kernel", linear_kernel)
    model = Block().double()
    with torch.no_grad():
        x = inputs()
        result, code = run_and_get_code(compiled(model, "inductor", dynamic=True), x)
        torch.testing.assert_close(result, model(x))
    assert rows == {5}
    assert "fxfuse.group_norm_activation" in code[0]
    assert "addmm" in code[0]
    (site,) = fxfuse.report().sites
    assert site.reason.endswith("The Linear has a kernel of its own: there are too few rows.")


# ---- across processes -----------------------------------------------------------------------

COMPILE = """
import sys, torch
from torch import nn
import torch.nn.functional as F
from torch._dynamo.utils import counters
import fxfuse
from fxfuse.backend import compile_graph

torch.manual_seed(0)
linear, norm, x = nn.Linear(12, 12), nn.GroupNorm(4, 12), torch.randn(5, 12, requires_grad=True)

def run(door, bound):
    def model(x):
        return F.hardtanh(norm(linear(x)), -0.5, bound) + F.relu(norm(x) + x)
    torch._dynamo.reset()
    counters.clear()
    if door == "backend":
        output = torch.compile(model, backend=compile_graph)(x)
    else:
        with fxfuse.inductor(channels_last=door):
            output = torch.compile(model)(x)
    torch.testing.assert_close(output, model(x))
    found = [torch.autograd.grad(y.square().sum(), x) for y in (output, model(x))]
    torch.testing.assert_close(*found)
    return {**counters["aot_autograd"], **counters["inductor"]}

print([run(door, bound) for door, bound in eval(sys.argv[1])])
"""


def test_the_caches_of_torch_take_our_graphs(tmp_path: Path) -> None:
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}

    def run(*what: tuple[str, float]) -> list[dict[str, int]]:
        """What a fresh process counts for each door and bound."""
        result = subprocess.run(
            [sys.executable, "-c", COMPILE, repr(what)],
            env=environment,
            cwd=Path(__file__).parent.parent,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        return ast.literal_eval(result.stdout.splitlines()[-1])  # type: ignore[no-any-return]

    doors = [("backend", 0.5), ("keep", 0.5)]
    cold = run(*doors)
    # What another bound or setting makes is not taken for it.
    warm = run(*doors, ("backend", 0.25), ("eager", 0.5))
    for counts in cold:
        assert (counts["autograd_cache_miss"], counts["autograd_cache_saved"]) == (1, 1), counts
    assert [counts.get("autograd_cache_hit") for counts in warm] == [1, 1, None, None], warm
    assert not any("bypass" in name for counts in (*cold, *warm) for name in counts)
