"""The command line, run as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
SMALL = ["--shape", "64", "96", "128", "16", "--device", "cpu"]


def fxfuse(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fxfuse", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def check_figures(figures: dict, runs: set[str], rtol: float) -> None:
    """Every run of both parts has an error and a time, and the errors are those of its dtype."""
    floors = {"chain": "Linear", "tail": "copy"}
    for part, floor in floors.items():
        errors = {entry["run"]: entry for entry in figures["errors"] if entry["part"] == part}
        assert set(errors) == runs
        for entry in errors.values():
            assert 0 < entry["relative"] < rtol
            assert 0 < entry["max_abs"] < 4 * rtol  # no value is beyond Hardtanh's 2
        times = {entry["run"]: entry for entry in figures["times"] if entry["part"] == part}
        assert set(times) == runs | {floor}
        for entry in times.values():
            low, high = entry["quartiles_s"]
            assert 0 < low <= entry["median_s"] <= high
            assert entry["repeats"] >= 3


def test_demo_shows_graphs_report_errors_and_times(tmp_path):
    file = tmp_path / "figures.json"
    result = fxfuse("demo", *SMALL, "--no-inductor", "--json", str(file))
    assert result.returncode == 0, result.stderr
    before, after = result.stdout.split("The graph after fxfuse.fuse")
    assert "call_module[target=group_norm]" in before
    assert "call_module[target=hardtanh]" in before
    after, report = after.split("fxfuse.report")
    assert "call_module[target=linear]" in after
    assert "call_module[target=group_norm]" not in after
    assert "call_module[target=hardtanh]" not in after
    assert "group_norm_activation" in after
    assert "Error against float64" in report
    assert "Time of the whole chain" in report
    assert "Time of GroupNorm + Hardtanh alone" in report
    figures = json.loads(file.read_text())
    assert figures["settings"]["dtype"] == "torch.float32"
    assert figures["absent"] == {"chain": {}, "tail": {}}
    check_figures(figures, {"eager", "fused"}, rtol=1e-6)


def test_demo_writes_only_json_to_stdout_if_asked():
    result = fxfuse("demo", *SMALL, "--no-inductor", "--json", "-", "--dtype", "bfloat16")
    assert result.returncode == 0, result.stderr
    check_figures(json.loads(result.stdout), {"eager", "fused"}, rtol=1e-2)
    assert "Time of the whole chain" in result.stderr


def test_demo_with_inductor_compares_it_or_says_why_not(tmp_path):
    file = tmp_path / "figures.json"
    result = fxfuse("demo", *SMALL, "--json", str(file))
    assert result.returncode == 0, result.stderr
    figures = json.loads(file.read_text())
    absent = figures["absent"]["tail"]
    if absent:
        assert absent["inductor"] in result.stdout
    check_figures(figures, {"eager", "fused"} | ({"inductor"} - set(absent)), rtol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: command"),
        (["demo", "--device", "tpu"], "expected cpu, cuda or cuda:N, got 'tpu'"),
        (["demo", "--device", "mps"], "expected cpu, cuda or cuda:N, got 'mps'"),
        (["demo", "--device", "cuda:99"], "'cuda:99' is not here"),
        (["demo", "--dtype", "int8"], "invalid choice: 'int8'"),
        (["demo", "--shape", "4", "8"], "--shape"),
        (["demo", "--shape", "4", "8", "x", "2"], "invalid int value: 'x'"),
        (["demo", "--shape", "4", "8", "9", "2"], "2 groups do not divide 9 channels"),
        (["demo", "--shape", "0", "8", "8", "2"], "expected four positive sizes"),
        (["demo", "--shape", "1", "8", "8", "8"], "more than one value per group"),
        (["demo", "--device", "cpu", "--tf32"], "needs a CUDA device and float32"),
    ],
)
def test_bad_input_gives_one_line_and_exit_code_2(arguments, message):
    result = fxfuse(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_asked_for_where_there_is_none():
    result = fxfuse("demo", "--device", "cuda")
    assert result.returncode == 2
    assert "'cuda' is not here" in result.stderr
    assert len(result.stderr.splitlines()) == 1
