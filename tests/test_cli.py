"""The command line, run as a user runs it."""

import json
from pathlib import Path

import pytest
import torch
from command import check_refusal, fxfuse

SMALL = ["--shape", "64", "96", "128", "16"]
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)]


def check_figures(figures: dict, runs: set[str], rtol: float) -> None:
    """Every run of both parts has an error and a time, and the errors are those of its dtype."""
    floors = {"chain": "Linear", "tail": "copy"}
    for part, floor in floors.items():
        errors = {entry["run"]: entry for entry in figures["errors"] if entry["part"] == part}
        assert set(errors) == runs
        for entry in errors.values():
            assert 0 < entry["relative"] < rtol
            assert 0 < entry["max_abs"] < 4 * rtol  # no value is beyond Hardtanh's 2
        times = [entry for entry in figures["times"] if entry["part"] == part]
        caches = ("cold", "hot") if figures["settings"]["device"].startswith("cuda") else (None,)
        expected = {(run, cache) for run in runs | {floor} for cache in caches}
        assert {(entry["run"], entry["l2"]) for entry in times} == expected
        for entry in times:
            low, high = entry["quartiles_s"]
            assert 0 < low <= entry["median_s"] <= high
            assert entry["repeats"] >= 3


@pytest.mark.parametrize("device", DEVICES)
def test_demo_shows_graphs_report_errors_and_times(device, tmp_path):
    file = tmp_path / "figures.json"
    options = ["--no-inductor", "--device", device, "--json", str(file)]
    result = fxfuse("demo", *SMALL, *options)
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
    options = ["--no-inductor", "--device", "cpu", "--dtype", "bfloat16", "--json", "-"]
    result = fxfuse("demo", *SMALL, *options)
    assert result.returncode == 0, result.stderr
    check_figures(json.loads(result.stdout), {"eager", "fused"}, rtol=1e-2)
    assert "Time of the whole chain" in result.stderr


@pytest.mark.parametrize("device", DEVICES)
def test_demo_with_inductor_compares_it_or_says_why_not(device, tmp_path):
    file = tmp_path / "figures.json"
    result = fxfuse("demo", *SMALL, "--device", device, "--json", str(file))
    assert result.returncode == 0, result.stderr
    figures = json.loads(file.read_text())
    absent = figures["absent"]["tail"]
    if absent:
        assert absent["inductor"] in result.stdout
    check_figures(figures, {"eager", "fused"} | ({"inductor"} - set(absent)), rtol=1e-6)


@NEEDS_CUDA
def test_demo_with_tf32_multiplies_with_fewer_digits():
    options = ["--no-inductor", "--device", "cuda", "--json", "-", "--tf32"]
    result = fxfuse("demo", "--shape", "256", "1024", "1024", "16", *options)
    assert result.returncode == 0, result.stderr
    errors = {(e["part"], e["run"]): e["relative"] for e in json.loads(result.stdout)["errors"]}
    assert 1e-5 < errors["chain", "fused"] < 1e-2
    assert errors["tail", "fused"] < 1e-6


def test_build_prints_the_library_and_doctor_finds_it():
    built = fxfuse("build")
    assert built.returncode == 0, built.stderr
    path = built.stdout.split()[0]
    assert Path(path).is_file()
    doctor = fxfuse("doctor")
    assert doctor.returncode == 0
    assert path in doctor.stdout
    assert torch.__version__ in doctor.stdout


def test_build_and_doctor_say_what_is_missing(tmp_path):
    environment = {"CXX": "no-such-compiler", "FXFUSE_CACHE": str(tmp_path)}
    built = fxfuse("build", **environment)
    assert built.returncode == 1
    assert "'no-such-compiler' was not found" in built.stderr
    assert len(built.stderr.splitlines()) == 1
    doctor = fxfuse("doctor", **environment)
    assert doctor.returncode == 1
    assert "'no-such-compiler' was not found" in doctor.stdout


def test_demo_where_nothing_can_be_built_says_so(tmp_path):
    environment = {"CXX": "no-such-compiler", "FXFUSE_CACHE": str(tmp_path)}
    result = fxfuse("demo", *SMALL, "--device", "cpu", **environment)
    assert result.returncode == 1
    assert "'no-such-compiler' was not found" in result.stderr
    assert "nothing was fused; the report says why" in result.stderr
    assert "0 fused" in result.stdout


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
    check_refusal(fxfuse(*arguments), message)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_cuda_asked_for_where_there_is_none():
    result = fxfuse("demo", "--device", "cuda")
    assert result.returncode == 2
    assert "'cuda' is not here" in result.stderr
    assert len(result.stderr.splitlines()) == 1
