"""`optimize` with `verify`, `strict`, `exclude` and `only`: what is fused, and what is undone."""

from __future__ import annotations

import copy
import functools
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxfuse
from fxfuse import ops, verify

OPERATOR = ops.group_norm_activation


class Two(nn.Module):
    """A module norm and a functional one, told apart by their numbers of groups."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)
        self.norm = nn.GroupNorm(4, 12)
        self.act = nn.Hardtanh(-0.5, 0.5, inplace=True)
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.act(self.norm(self.linear(x)))
        if mask is not None:
            y = y * mask
        return F.relu(F.group_norm(y + x, 3, self.norm.weight, eps=1e-3))


def inputs(*shape: int) -> Tensor:
    return torch.randn(shape or (6, 12, 5), generator=torch.Generator().manual_seed(1))


def x() -> Tensor:
    return inputs(6, 12)


def operator(num_groups: int, change: Callable[[Tensor], Any]) -> Callable[..., Any]:
    """The operator, except that what it gives for a number of groups is changed."""

    @functools.wraps(OPERATOR)
    def changed(input: Tensor, groups: int, *args: Any, **kwargs: Any) -> Any:
        result = OPERATOR(input, groups, *args, **kwargs)
        return change(result) if groups == num_groups else result

    return changed


def slow(result: Tensor) -> Tensor:
    time.sleep(0.1)
    return result


def broken(result: Tensor) -> Tensor:
    raise RuntimeError("no kernel for this shape.")


CHANGES: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "wrong": (lambda y: y + 1e-3, "inaccurate"),
    "wrong in one element": (lambda y: y + F.pad(y.new_tensor([1e-3]), (0, 71)).view(6, 12), "i"),
    "NaN": (lambda y: y * torch.nan, "inaccurate"),
    "of another dtype": (lambda y: y.double(), "fails"),
    "of another shape": (lambda y: y[None], "fails"),
    "broken": (broken, "fails"),
    "slow": (slow, "slower"),
}


@pytest.fixture
def never_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of other things than time, which a busy machine must not decide."""
    monkeypatch.setattr(verify, "_MARGIN", 1e9)


def codes(model: nn.Module) -> dict[str, str]:
    return {f"{s.module} {s.norm}": s.code for s in fxfuse.report(model).sites}


# ---- verify ---------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.usefixtures("never_slower")
def test_right_sites_stay_and_the_report_has_the_numbers(
    training: bool, device: torch.device
) -> None:
    model = Two().train(training).to(device)
    optimized = fxfuse.optimize(model, example_inputs=x().to(device), verify=True, strict=True)
    report = fxfuse.report(optimized)
    assert report.fused == report.matched == 2
    for site in report.sites:
        assert site.check is not None
        # Some gradients of a group norm are sums that cancel.
        assert 0 < site.check.error < (1e-4 if training else 1e-5)
        assert 0 < site.check.eager_error < 1e-3
        assert 0 < site.check.seconds < 1
        assert 0 < site.check.eager_seconds < 1
        assert str(site.check) in site.reason
        assert "µs" in site.reason
    torch.testing.assert_close(optimized(x().to(device)), model(x().to(device)))


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("num_groups", [3, 4])
def test_a_bad_site_is_undone_and_no_other(
    name: str, training: bool, num_groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, code = CHANGES[name]
    if code == "slower" and training:
        pytest.skip("what is slow is so in either mode")
    # A busy machine must not decide about the others.
    monkeypatch.setattr(verify, "_MARGIN", 3 if code == "slower" else 1e9)
    monkeypatch.setattr(ops, "group_norm_activation", operator(num_groups, change))
    model = Two().train(training)
    optimized = fxfuse.optimize(model, example_inputs=x(), verify=True)
    report = fxfuse.report(optimized)
    bad, good = sorted(report.sites, key=lambda site: site.fused)
    assert bad.code.startswith(code), report
    assert bad.norm == f"GroupNorm({'4, 12' if num_groups == 4 else 3})"
    if code in ("inaccurate", "slower"):
        assert "µs" in bad.reason
    assert good.fused, report
    torch.testing.assert_close(optimized(x()), model(x()))
    # Nor is it fused in the graphs that come later: for another mode, for other arguments.
    mask = torch.rand(12)
    torch.testing.assert_close(optimized(x(), mask), model(x(), mask))
    for m in (model, optimized):
        m.train(not training)
    torch.testing.assert_close(optimized(x(), mask), model(x(), mask))
    torch.testing.assert_close(copy.deepcopy(optimized)(x()), model(x()))


def test_a_wrong_gradient_is_undone_in_training(
    monkeypatch: pytest.MonkeyPatch, never_slower: None
) -> None:
    def twice(y: Tensor) -> Tensor:
        return (2 * y) - y.detach()

    monkeypatch.setattr(ops, "group_norm_activation", operator(4, twice))
    for training, code in ((False, "fused"), (True, "inaccurate")):
        model = Two().train(training)
        optimized = fxfuse.optimize(model, example_inputs=x(), verify=True)
        assert codes(optimized)["norm GroupNorm(4, 12)"] == code


def test_a_gradient_that_is_wrong_on_the_bounds_alone(
    monkeypatch: pytest.MonkeyPatch, never_slower: None
) -> None:
    @functools.wraps(OPERATOR)
    def leaking(input: Tensor, groups: int, *args: Any, **kwargs: Any) -> Tensor:
        y = OPERATOR(input, groups, *args, **kwargs)
        return y + (input - input.detach()) * (y.abs() == 0.5) if groups == 4 else y

    monkeypatch.setattr(ops, "group_norm_activation", leaking)
    optimized = fxfuse.optimize(Two(), example_inputs=x(), verify=True)
    assert codes(optimized) == {"norm GroupNorm(4, 12)": "inaccurate", " GroupNorm(3)": "fused"}


@pytest.mark.usefixtures("never_slower")
def test_verification_changes_nothing_else() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.batch_norm = nn.BatchNorm1d(12)
            self.two = Two()
            self.calls = 0
            self.seen: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.seen.append(x)
            return self.two(F.dropout(self.batch_norm(x), 0.5, self.training))

    model = Model()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    optimized = fxfuse.optimize(model, example_inputs=(x(),), verify=True, inplace=True)
    assert optimized is model
    assert fxfuse.report(model).fused == 2
    assert (model.calls, model.seen) == (0, [])
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(p.grad is None for p in model.parameters())
    assert "forward" not in vars(model.two)


@pytest.mark.usefixtures("never_slower")
@pytest.mark.parametrize("shape", [(2, 12, 5), (3, 12, 4, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("training", [True, False])
def test_chains_across_boundaries_in_every_dtype(
    shape: tuple[int, ...], dtype: torch.dtype, training: bool
) -> None:
    conv = {3: nn.Conv1d, 4: nn.Conv2d}[len(shape)]
    model = nn.Sequential(
        nn.Sequential(conv(12, 12, 1), nn.GroupNorm(4, 12)),
        nn.Sequential(nn.ReLU(inplace=True), conv(12, 12, 1)),
        nn.Sequential(nn.GroupNorm(3, 12, affine=False), nn.Identity(), nn.ReLU6()),
    )
    model = model.to(dtype).train(training)
    optimized = fxfuse.optimize(model, example_inputs=inputs(*shape).to(dtype), verify=True)
    report = fxfuse.report(optimized)
    assert report.fused == 2, report
    assert all(site.check is not None for site in report.sites)


@pytest.mark.usefixtures("never_slower")
@pytest.mark.parametrize("training", [True, False])
def test_an_activation_of_several_nodes(training: bool) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = F.group_norm(x, 4)
            y = F.group_norm(y * torch.sigmoid(y), 3)
            return F.gelu(y, approximate="tanh")

    optimized = fxfuse.optimize(Model().train(training), example_inputs=x(), verify=True)
    report = fxfuse.report(optimized)
    assert report.fused == 2, report
    assert all(site.check is not None for site in report.sites)


@pytest.mark.usefixtures("never_slower")
def test_sites_that_the_inputs_do_not_reach() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Two(), Two()

        def forward(self, x: Tensor, second: bool = False) -> Tensor:
            return self.b(x) if second else self.a(x)

    optimized = fxfuse.optimize(Model(), example_inputs=x(), verify=True)
    sites = fxfuse.report(optimized).sites
    assert [site.fused for site in sites] == [True] * 4
    for site in sites:
        reached = str(site.module).startswith("a")
        assert (site.check is not None) == reached
        assert ("did not reach it" in site.reason) == (not reached)


@pytest.mark.usefixtures("never_slower")
def test_a_module_with_nothing_left_is_plain_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Sequential(nn.GroupNorm(4, 12), nn.ReLU()), nn.Tanh())
    monkeypatch.setattr(ops, "group_norm_activation", operator(4, lambda y: y + 1))
    optimized = fxfuse.optimize(model, example_inputs=x(), verify=True)
    assert [type(m) for m in optimized.modules()] == [type(m) for m in model.modules()]
    assert codes(optimized) == {"0.0 GroupNorm(4, 12)": "inaccurate"}


@pytest.mark.parametrize(
    "example_inputs",
    [
        lambda: x(),
        lambda: (x(),),
        lambda: [x(), torch.rand(12)],
        lambda: {"x": x(), "mask": torch.rand(12)},
    ],
)
def test_example_inputs_alone_trace_the_graphs_of_the_call(
    example_inputs: Callable[[], Any],
) -> None:
    model = Two()
    given = example_inputs()
    optimized = fxfuse.optimize(model, example_inputs=given)
    assert all(site.check is None for site in fxfuse.report(optimized).sites)
    args = (
        given if isinstance(given, (tuple, list)) else () if isinstance(given, dict) else (given,)
    )
    kwargs = given if isinstance(given, dict) else {}
    # Known before the first call, as torch.compile needs it.
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, example_inputs: Any) -> Any:
        seen.append(graph.code)
        return graph.forward

    compiled = torch.compile(optimized, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(*args, **kwargs), model(*args, **kwargs))
    assert seen[0].count("torch.ops.fxfuse.group_norm_activation") == 2


def test_a_model_that_fails_on_its_example_inputs_raises_its_own_error() -> None:
    model = Two()
    kinds = [type(m) for m in model.modules()]
    with pytest.raises(RuntimeError, match="shapes"):
        fxfuse.optimize(model, example_inputs=inputs(3, 5), verify=True, inplace=True)
    assert [type(m) for m in model.modules()] == kinds
    with pytest.raises(ValueError, match="expected example_inputs with verify=True, got None"):
        fxfuse.optimize(model, verify=True)


def test_times_take_turns_and_leave_a_margin() -> None:
    cpu = torch.device("cpu")

    def wait(seconds: float) -> Callable[[], None]:
        return lambda: time.sleep(seconds)

    *medians, slower = verify._times(wait(0.004), wait(0.002), cpu)
    assert slower
    assert medians[0] > medians[1] >= 0.002
    assert not verify._times(wait(0.002), wait(0.004), cpu)[2]
    assert not verify._times(wait(0.02), wait(0.02), cpu)[2]


def test_disturbed_rounds_do_not_undo_a_site() -> None:
    calls = iter(range(10**6))

    def ours() -> None:
        time.sleep(0.001 if next(calls) % 5 < 2 else 0.012)  # slower in the median

    ours_s, eager_s, slower = verify._times(ours, lambda: time.sleep(0.006), torch.device("cpu"))
    assert ours_s > 1.1 * eager_s
    assert not slower


@pytest.mark.usefixtures("never_slower")
def test_a_verdict_holds_for_every_graph_with_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = nn.Sequential(nn.GroupNorm(4, 12), nn.ReLU(), nn.Linear(12, 12), nn.GroupNorm(3, 12))
    model = nn.Sequential(inner, nn.ReLU())
    monkeypatch.setattr(ops, "group_norm_activation", operator(4, lambda y: y + 1))
    optimized = fxfuse.optimize(model, example_inputs=x(), verify=True)
    assert codes(optimized) == {
        "0.0 GroupNorm(4, 12)": "inaccurate",
        "0.3 GroupNorm(3, 12)": "fused",
    }
    torch.testing.assert_close(optimized(x()), model(x()))
    torch.testing.assert_close(optimized[0](x()), model[0](x()))


@pytest.mark.usefixtures("never_slower")
def test_what_an_earlier_call_has_fused_is_verified_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "group_norm_activation", operator(4, lambda y: y + 1))
    model = fxfuse.optimize(Two())
    optimized = fxfuse.optimize(model, example_inputs=x(), verify=True)
    assert codes(optimized) == {"norm GroupNorm(4, 12)": "inaccurate", " GroupNorm(3)": "fused"}
    assert fxfuse.report(model).fused == 2
    excluded = fxfuse.optimize(nn.Sequential(model), exclude=["0"])
    assert type(excluded[0]) is Two
    assert {site.code for site in fxfuse.report(excluded).sites} == {"excluded"}


# ---- strict ---------------------------------------------------------------------------------


def test_strict() -> None:
    model = nn.Sequential(Two(), nn.GroupNorm(4, 12), nn.Dropout(0.1), nn.ReLU())
    kinds = [type(m) for m in model.modules()]
    with pytest.raises(fxfuse.NotFusedError, match="dropout") as caught:
        fxfuse.optimize(model, strict=True, inplace=True)
    report = caught.value.report
    assert [site.code for site in report.sites] == ["fused", "fused", "dropout"]
    assert [type(m) for m in model.modules()] == kinds
    assert pickle.loads(pickle.dumps(caught.value)).report == report
    with pytest.raises(ValueError, match=r"fxfuse\.report: expected a model"):
        fxfuse.report(model)
    # What was left out is not missed.
    assert fxfuse.report(fxfuse.optimize(model, strict=True, exclude=["1"])).fused == 2
    assert fxfuse.report(fxfuse.optimize(model[0], strict=True)).fused == 2


@pytest.mark.usefixtures("never_slower")
def test_strict_minds_what_verify_has_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "group_norm_activation", operator(4, lambda y: y + 1))
    with pytest.raises(fxfuse.NotFusedError, match="inaccurate"):
        fxfuse.optimize(Two(), example_inputs=x(), verify=True, strict=True)


# ---- exclude and only -----------------------------------------------------------------------


def network() -> nn.Module:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(12, 12), nn.GroupNorm(4, 12), nn.ReLU())

    return nn.ModuleDict(
        {"stem": block(), "body": nn.Sequential(block(), block()), "head": block()}
    )


@pytest.mark.parametrize(
    ("arguments", "left"),
    [
        ({"exclude": ["body"]}, {"body.0.1", "body.1.1"}),
        ({"exclude": ["body.1.1"]}, {"body.1.1"}),
        ({"exclude": ["body.*"]}, {"body.0.1", "body.1.1"}),
        ({"exclude": ["*.1.1", "stem"]}, {"body.1.1", "stem.1"}),
        ({"exclude": "head"}, {"head.1"}),
        ({"exclude": [""]}, {"stem.1", "body.0.1", "body.1.1", "head.1"}),
        ({"only": ["body"]}, {"stem.1", "head.1"}),
        ({"only": ["body.1.1"]}, {"stem.1", "head.1", "body.0.1"}),
        ({"only": ["body", "head"], "exclude": ["body.0"]}, {"stem.1", "body.0.1"}),
        ({"only": []}, {"stem.1", "body.0.1", "body.1.1", "head.1"}),
    ],
)
def test_exclude_and_only(arguments: dict[str, Any], left: set[str]) -> None:
    optimized = fxfuse.optimize(network(), **arguments)
    sites = fxfuse.report(optimized).sites
    assert {site.module for site in sites if site.code == "excluded"} == left
    assert {site.module for site in sites if site.fused} == {
        "stem.1", "body.0.1", "body.1.1", "head.1"
    } - left  # fmt: skip
    assert sum(type(m) is nn.Sequential for m in optimized.modules()) == len(left) + 1


def test_an_excluded_norm_is_reported_once() -> None:
    class Shortcut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(
                nn.Linear(12, 12), nn.GroupNorm(4, 12), nn.ReLU(), nn.GroupNorm(4, 12)
            )

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.body(x) + x)

    report = fxfuse.report(fxfuse.optimize(Shortcut(), exclude=["body.3"]))
    assert [(s.module, s.code) for s in report.sites] == [
        ("body.1", "fused"),
        ("body.3", "excluded"),
    ]


def test_what_is_left_out_is_not_even_traced() -> None:
    class Loud(Two):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            raise AssertionError("traced")

    model = nn.ModuleDict({"a": Loud(), "b": Two()})
    assert codes(fxfuse.optimize(model, exclude=["a"])) == {
        "a.norm GroupNorm(4, 12)": "excluded",
        "b.norm GroupNorm(4, 12)": "fused",
        "b GroupNorm(3)": "fused",
    }


def test_left_out_across_a_boundary_and_by_an_alias() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(12, 12), nn.GroupNorm(4, 12)), nn.ReLU())
    model.alias = model[0][1]
    for pattern in ("0", "0.1", "alias"):
        optimized = fxfuse.optimize(model, exclude=[pattern])
        assert {s.code for s in fxfuse.report(optimized).sites} == {"excluded"}
    assert fxfuse.report(fxfuse.optimize(model, only=["0"])).fused == 1


def test_left_out_in_later_graphs_too() -> None:
    model = Two()
    optimized = fxfuse.optimize(model, exclude=["norm"])
    mask = torch.rand(12)
    torch.testing.assert_close(optimized(x(), mask), model(x(), mask))
    assert codes(optimized) == {"norm GroupNorm(4, 12)": "excluded", " GroupNorm(3)": "fused"}
    plan = vars(optimized)["_fxfuse_plan"]
    assert len(plan.variants) == 2
    assert "self.norm(" in plan.variants[1].code


@pytest.mark.parametrize("argument", ["exclude", "only"])
def test_a_pattern_that_matches_nothing(argument: str) -> None:
    with pytest.raises(ValueError, match=rf"expected {argument} to match modules, got 'bod'"):
        fxfuse.optimize(network(), **{argument: ["stem", "bod"]})
