"""explain: what it says, that it changes nothing, and how it is shown."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import textwrap
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from command import check_refusal
from command import fxfuse as fxfuse_command
from torch import Tensor, nn

import fxfuse
from fxfuse import reports
from fxfuse.rewrite import Reason

ROOT = Path(__file__).parent.parent


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.GroupNorm(4, channels)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.conv(x))) + x


class Undecided(nn.Module):
    """Branches on a value, so it cannot be traced."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(x)) if x.sum() > 0 else x


class Net(nn.Module):
    """Four norms: two fusible, one functional and fusible, one in what cannot be traced."""

    def __init__(self, channels: int = 8, depth: int = 2, undecided: bool = True) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3)
        self.blocks = nn.Sequential(*(Block(channels) for _ in range(depth)))
        self.odd = Undecided(channels) if undecided else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.odd(F.silu(F.group_norm(self.blocks(self.stem(x)), 2)))


def outcomes(report: fxfuse.FusionReport) -> dict[str, str]:
    return {site.module or "": reports.outcome(site) for site in report.sites}


EXPECTED = {
    "blocks.0.norm": "fusible",
    "blocks.1.norm": "fusible",
    "": "fusible",
    "odd.norm": "untraceable",
}


@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_every_norm_is_there_and_nothing_changes(where: str) -> None:
    with torch.device(where):
        model = Net()
    before = {name: (module, type(module)) for name, module in model.named_modules()}
    attributes = {name: dict(vars(module)) for name, module in model.named_modules()}
    state = {name: t.clone() for name, t in model.state_dict().items()}
    report = fxfuse.explain(model)
    assert outcomes(report) == EXPECTED
    assert report.coverage == 75
    assert {name: (module, type(module)) for name, module in model.named_modules()} == before
    for name, module in model.named_modules():
        assert vars(module) == attributes[name]
    if where == "cpu":
        assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    with pytest.raises(ValueError, match="optimize"):
        fxfuse.report(model)


def test_it_builds_no_library(tmp_path: Path) -> None:
    text = """
    import torch, fxfuse
    from fxfuse import library
    model = torch.nn.Sequential(torch.nn.GroupNorm(2, 4), torch.nn.ReLU())
    assert fxfuse.explain(model).sites[0].code == "fusible"
    assert not library.is_loaded()
    """
    environment = {**os.environ, "FXFUSE_CACHE": str(tmp_path), "CXX": "no-such-compiler"}
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""


def test_of_an_optimised_model() -> None:
    fused = fxfuse.optimize(Net())
    report = fxfuse.explain(fused)
    expected = {**EXPECTED, "": "fused", "blocks.0.norm": "fused", "blocks.1.norm": "fused"}
    assert outcomes(report) == expected
    assert outcomes(fxfuse.report(fused)) == expected


def test_shapes_are_those_of_a_call_that_leaves_no_trace() -> None:
    model = nn.Sequential(Net(undecided=False), nn.BatchNorm2d(8), nn.Dropout())
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    x = torch.randn(2, 3, 10, 12)
    torch.set_rng_state(state)
    report = fxfuse.explain(model, example_inputs=(x,))
    assert torch.equal(torch.get_rng_state(), state)
    for name, t in model.state_dict().items():
        assert torch.equal(t, before[name])
    assert not any(module._forward_pre_hooks for module in model.modules())
    shapes = {site.module: site.shape for site in report.sites}
    # Of a functional norm the shape is not known: no module is called for it.
    assert shapes == {"0.blocks.0.norm": (2, 8, 8, 10), "0.blocks.1.norm": (2, 8, 8, 10), "0": None}
    assert "(2, 8, 8, 10)" in str(report)


def test_inputs_that_the_model_does_not_take_cost_only_the_shapes() -> None:
    with pytest.warns(UserWarning, match="did not run on the example inputs"):
        report = fxfuse.explain(Net(), example_inputs=(torch.randn(2, 5, 10, 12),))
    assert outcomes(report) == EXPECTED
    assert all(site.shape is None for site in report.sites)


def test_no_module_no_norm() -> None:
    with pytest.raises(TypeError, match="expected model to be a Module, got int"):
        fxfuse.explain(3)  # type: ignore[arg-type]
    report = fxfuse.explain(nn.Linear(2, 2))
    assert report.sites == ()
    assert report.coverage is None


def test_every_reason_has_a_remedy() -> None:
    assert set(reports.REMEDIES) == set(Reason)
    assert all(text.endswith(".") for text in reports.REMEDIES.values())


# ---- HTML -----------------------------------------------------------------------------------


class Page(HTMLParser):
    """Checks that tags close in order, and keeps what a reader needs."""

    VOID = frozenset({"br", "meta", "link", "img", "input", "hr"})
    IMPLIED = frozenset({"tr", "td", "th", "p"})  # HTML lets these end without a tag

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.covered: list[bool] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.links += [v for k in ("src", "href") if (v := attributes.get(k)) is not None]
        classes = (attributes.get("class") or "").split()
        if "site" in classes:
            self.covered.append("covered" in classes)
        if tag not in self.VOID | self.IMPLIED:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.IMPLIED:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_stands_alone_and_shows_the_tree() -> None:
    class Shown(Net):
        def extra_repr(self) -> str:
            return "<script>"

    model = Shown()
    text = reports.to_html(fxfuse.explain(model), model, "a & b")
    page = Page(text)
    assert page.links == []
    assert "http" not in text
    assert sorted(page.covered) == [False, True, True, True]
    for name in ("a & b", "75 %", "blocks", "Undecided", "untraceable", "<script>", "test_explain"):
        assert name in page.text
    assert "<script>" not in text


def test_the_page_of_a_shared_and_of_an_empty_model() -> None:
    shared = nn.Sequential(nn.GroupNorm(2, 4), nn.ReLU())
    model = nn.ModuleDict({"one": shared, "two": nn.Sequential(shared)})
    page = Page(reports.to_html(fxfuse.explain(model), model, "m"))
    assert page.covered == [True]
    page = Page(reports.to_html(fxfuse.explain(nn.ReLU()), nn.ReLU(), "m"))
    assert page.covered == []


# ---- the command line -----------------------------------------------------------------------


def explain(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `python -m fxfuse explain` where a module `nets` lies in the current folder."""
    text = """
        from test_explain import *

        model = Net()
        number = 3

        def broken(*args):
            raise RuntimeError("no")

        def needs_values(channels):
            bound = float(torch.linspace(0, channels, 5)[-1])  # not on the meta device
            return nn.Sequential(nn.GroupNorm(2, channels), nn.Hardtanh(0, bound))
    """
    (tmp_path / "nets.py").write_text(textwrap.dedent(text))
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return fxfuse_command("explain", *arguments, cwd=tmp_path, PYTHONPATH=path)


def test_explain_prints_a_table_and_writes_the_page(tmp_path: Path) -> None:
    result = explain(
        tmp_path, "nets:Net", "--args", "16", "undecided=False", "--input", "2,3,9,9",
        "--html", "page.html",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "3 GroupNorms: 0 fused, 3 fusible" in result.stdout
    assert "Coverage: 100 %" in result.stdout
    assert "GroupNorm(4, 16)" in result.stdout
    assert Page((tmp_path / "page.html").read_text()).covered == [True] * 3


@pytest.mark.parametrize("factory", ["nets:Net", "nets:model"])
def test_explain_prints_json(tmp_path: Path, factory: str) -> None:
    result = explain(tmp_path, factory, "--json")
    assert result.returncode == 0, result.stderr
    printed: dict[str, Any] = json.loads(result.stdout)
    assert printed["model"] == factory
    assert (printed["norms"], printed["fusible"], printed["coverage"]) == (4, 3, 75)
    assert {s["module"]: s["code"] for s in printed["sites"]} == EXPECTED
    assert all(site["remedy"] for site in printed["sites"])


def test_explain_builds_on_the_cpu_what_needs_values(tmp_path: Path) -> None:
    result = explain(tmp_path, "nets:needs_values", "--args", "4", "--input", "3,4")
    assert result.returncode == 0, result.stderr
    assert "Hardtanh(0, 4)" in result.stdout
    assert "(3, 4)" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nets:broken"], "nets:broken raised RuntimeError: no"),
        (["nets:number"], "nets:number cannot be called"),
        (["nets:F.relu", "--args", "3"], "nets:F.relu raised"),
        (["nets:dict"], "has no attribute 'dict'"),
        (["nets"], "package.module:factory"),
        (["no_such_module:f"], "No module named 'no_such_module'"),
        (["nets:Net", "--input", "a,b"], "expected sizes such as 1,3,224,224"),
        (["nets:Net", "--input", "2:int65"], "expected sizes such as 1,3,224,224"),
        (["nets:textwrap.dedent", "--args", "x"], "gave a str, not a torch.nn.Module"),
        (["nets:Net", "--html", "no/such/folder.html"], "argument --html: "),
    ],
)
def test_bad_input_gives_one_line_and_exit_code_2(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    check_refusal(explain(tmp_path, *arguments), message)
