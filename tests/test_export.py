"""Exported programs: fused, saved, loaded, packaged."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import graphs
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import fxfuse

ROOT = Path(__file__).parent.parent
CALL = "torch.ops.fxfuse.group_norm_activation.default"


class Network(nn.Module):
    """Two chains, the second at the end; buffers, one of them written to; two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(12, 12), nn.GroupNorm(4, 12)
        self.conv = nn.Conv1d(12, 12, 3, padding=1)
        self.weight = nn.Parameter(torch.randn(12))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, scale: Tensor | None = None) -> dict[str, Tensor]:
        self.calls += 1
        x = F.hardtanh(self.norm(self.linear(x)), -0.5, 0.5)
        x = self.conv(x[:, :, None].expand(-1, -1, 5) * (1 if scale is None else scale))
        return {"early": x.mean(), "late": F.silu(F.group_norm(x, 3, self.weight))}


def inputs(batch: int = 5) -> tuple[Tensor, ...]:
    return (torch.randn(batch, 12, dtype=torch.float64),)


def exported(model: nn.Module, decomposed: bool, strict: bool = False) -> ExportedProgram:
    shapes = ({0: Dim("batch", min=2)},)
    program = torch.export.export(model, inputs(), dynamic_shapes=shapes, strict=strict)
    return program.run_decompositions() if decomposed else program


@pytest.fixture(params=[False, True], ids=["training", "decomposed"])
def decomposed(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize("strict", [False, True])
def test_a_fused_program_keeps_all_but_its_nodes(decomposed: bool, strict: bool) -> None:
    model = Network().double()
    program = exported(model, decomposed, strict)
    before = copy.deepcopy(program)
    report = fxfuse.fuse(program)
    assert report.matched == len(report.sites) == 2
    assert {site.module for site in report.sites} >= {"norm"}
    assert program.graph_module.code.count(CALL) == 2
    assert "norm.default(" not in program.graph_module.code
    assert str(program.graph_signature) == str(before.graph_signature)
    assert program.range_constraints == before.range_constraints
    assert program.call_spec == before.call_spec
    assert program.state_dict.keys() == before.state_dict.keys()
    assert all(program.state_dict[k] is p for k, p in model.named_parameters())
    again = fxfuse.fuse(program)
    assert (again.matched, again.fused) == (0, 2)

    ours, theirs = program.module(), before.module()
    for batch in (2, 7):
        x = inputs(batch)
        torch.testing.assert_close(ours(*x), theirs(*x), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(dict(ours.named_buffers()), dict(theirs.named_buffers()))


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=graphs.models())
def test_random_models(decomposed: bool, case: graphs.Model) -> None:
    program = torch.export.export(case.model, case.inputs())
    program = program.run_decompositions() if decomposed else program
    expected = program.module()(*case.inputs())
    # Of a hardswish in parts the gradients would not be the same.
    planted = case.planted - case.hardswishes * decomposed - case.residuals
    assert fxfuse.fuse(program).matched == planted
    assert program.graph_module.code.count(CALL) == planted
    torch.testing.assert_close(program.module()(*case.inputs()), expected, rtol=1e-9, atol=1e-9)


def test_a_fused_program_trains() -> None:
    model = Network().double()
    program = exported(model, decomposed=False)
    fxfuse.fuse(program)
    x = inputs()
    grads = []
    for m in (model, program.module()):
        output = m(*x)
        loss = output["early"] + output["late"].square().sum()
        grads.append(torch.autograd.grad(loss, list(m.parameters())))
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-9, atol=1e-9)


def test_a_program_fused_before_its_decomposition_is_still_fused_after() -> None:
    model = Network().double()
    program = exported(model, decomposed=False)
    fxfuse.fuse(program)
    later = program.run_decompositions()
    assert later.graph_module.code.count("torch.ops.fxfuse.group_norm_activation") == 2
    x = inputs()
    torch.testing.assert_close(later.module()(*x), model(*x), rtol=1e-9, atol=1e-9)


def test_what_a_kept_module_returns_stays() -> None:
    model = nn.Sequential(nn.Linear(12, 12), nn.Sequential(nn.GroupNorm(4, 12)), nn.ReLU()).double()
    program = torch.export.export(model, inputs(), preserve_module_call_signature=("1",))
    report = fxfuse.fuse(program)
    assert [site.code for site in report.sites] == ["graph_output"]
    x = inputs()
    torch.testing.assert_close(torch.export.unflatten(program)(*x), model(*x))


@pytest.mark.usefixtures("hopper")
def test_a_linear_is_taken_in(tmp_path: Path) -> None:
    model = Network().double()
    program = exported(model, decomposed=False)
    first, second = fxfuse.fuse(program).sites
    assert first.reason.endswith("one kernel computes the Linear as well: it is a test.")
    assert second.reason == "Replaced by one operator."
    code = program.graph_module.code
    assert code.count("torch.ops.fxfuse.linear_group_norm_activation.default") == 1
    assert "aten.linear" not in code
    torch.export.save(program, tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2")
    for batch in (5, 9):
        x = inputs(batch)
        torch.testing.assert_close(loaded.module()(*x), model(*x))


@pytest.mark.usefixtures("hopper")
def test_a_linear_that_a_signature_names_stays() -> None:
    model = nn.Sequential(nn.Linear(12, 12), nn.GroupNorm(4, 12), nn.ReLU()).double()
    program = torch.export.export(model, inputs(), preserve_module_call_signature=("0",))
    assert fxfuse.fuse(program).matched == 1
    x = inputs()
    torch.testing.assert_close(torch.export.unflatten(program)(*x), model(*x))


def test_a_decomposed_norm_keeps_its_dtype_under_autocast(device: torch.device) -> None:
    model = nn.Sequential(nn.GroupNorm(4, 12), nn.ReLU()).to(device, torch.bfloat16)
    x = torch.randn(5, 12, dtype=torch.bfloat16, device=device)
    results = []
    for fused in (False, True):
        program = torch.export.export(model, (x,)).run_decompositions()
        assert not fused or fxfuse.fuse(program).matched == 1
        with torch.autocast(device.type, torch.bfloat16):
            results.append(program.module()(x))
    theirs, ours = results
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


def test_a_region_under_autocast_is_fused_inside() -> None:
    class Region(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.GroupNorm(4, 12)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return F.relu(self.norm(x @ x.T.expand(12, -1)[:, :12]))

    model, x = Region(), torch.randn(12, 12)
    program = torch.export.export(model, (x,))
    assert fxfuse.fuse(program).matched == 1
    result, expected = program.module()(x), model(x)
    assert result.dtype == expected.dtype
    torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2)


def test_without_the_library_a_program_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fxfuse.library, "load", lambda: False)
    program = exported(Network().double(), decomposed=False)
    code = program.graph_module.code
    report = fxfuse.fuse(program)
    assert {site.code for site in report.sites} == {"library_unavailable"}
    assert program.graph_module.code == code


# ---- saved and packaged ---------------------------------------------------------------------

LOAD = """
import sys, torch
{imports}
program = torch.export.load(sys.argv[1])
x, expected = torch.load(sys.argv[2])
assert program.graph_module.code.count("fxfuse.group_norm_activation") == 2
torch.testing.assert_close(program.module()(*x), expected, rtol=1e-9, atol=1e-9)
"""

RUN = """
import sys, torch
{imports}
run = torch._inductor.aoti_load_package(sys.argv[1])
x, expected = torch.load(sys.argv[2])
torch.testing.assert_close(run(*x), expected, rtol=1e-9, atol=1e-9)
"""


def fresh_process(
    code: str, *arguments: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("imports", ["fxfuse", "fxfuse, with nothing built", "nothing"])
def test_a_saved_program_opens_where_fxfuse_is_imported(imports: str, tmp_path: Path) -> None:
    decomposed = imports == "fxfuse"
    model = Network().double()
    program = exported(model, decomposed)
    fxfuse.fuse(program)
    torch.export.save(program, tmp_path / "program.pt2")
    x = inputs(7)
    torch.save((x, model(*x)), tmp_path / "data.pt")
    code, environment = {
        "fxfuse": ("import fxfuse", {}),
        "fxfuse, with nothing built": (
            "from fxfuse import library; assert not library.is_loaded(); "
            f"library.build = lambda: {str(fxfuse.library_path())!r}",  # what it would find
            {"FXFUSE_CACHE": str(tmp_path / "cache")},
        ),
        "nothing": ("", {}),
    }[imports]
    files = (tmp_path / "program.pt2", tmp_path / "data.pt")
    result = fresh_process(LOAD.format(imports=code), *files, **environment)
    if imports != "nothing":
        assert result.returncode == 0, result.stderr
    else:
        assert result.returncode != 0
        assert "failed to resolve torch.ops.fxfuse.group_norm_activation" in result.stderr
        assert "Please import" in result.stderr


def test_a_packaged_program_runs(tmp_path: Path) -> None:
    model = Network().double()
    program = exported(model, decomposed=False)
    fxfuse.fuse(program)
    package = tmp_path / "package.pt2"
    torch._inductor.aoti_compile_and_package(program, package_path=str(package))
    x = inputs(7)
    torch.save((x, model(*x)), tmp_path / "data.pt")
    without, as_from_cpp = (
        """
try:
    torch._inductor.aoti_load_package(sys.argv[1])(*torch.load(sys.argv[2])[0])
except RuntimeError as error:
    assert "fxfuse::group_norm_activation" in str(error), error
else:
    raise AssertionError("it ran without us")
""",
        f"torch.ops.load_library({str(fxfuse.library_path())!r})",
    )
    for imports in ("import fxfuse", without + as_from_cpp):
        result = fresh_process(RUN.format(imports=imports), package, tmp_path / "data.pt")
        assert result.returncode == 0, result.stderr
