"""The benchmark: it measures the rows it should, and nothing that is wrong."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import command
import pytest
import torch
from rich.console import Console
from torch._dynamo.utils import counters

from fxfuse import bench, bench_grid, bench_output, timing

ROOT = Path(__file__).parent.parent
TINY = "32x512*float32"
KINDS = {"cpu": {"warm"}, "cuda": {"cold", "hot", "rotating", "host"}}


def fxfuse(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return command.fxfuse("bench", *arguments, **environment)


def check_figures(figures: dict, contenders: set[str]) -> None:
    """Every row has errors of its dtype and times of every kind, in the documented form."""
    assert figures.keys() == {"machine", "date", "settings", "bandwidth", "rows"}
    assert figures["machine"]["torch"] == torch.__version__
    assert figures["bandwidth"] > 1e8
    device = torch.device(figures["settings"]["device"]).type
    gradients = 3 if figures["settings"]["backward"] else 1
    for row in figures["rows"]:
        results = row["results"]
        assert results[row["floor"]]["status"] == "floor"
        assert {name for name, r in results.items() if r["status"] == "right"} == contenders
        for name in contenders:
            errors = results[name]["errors"]
            assert len(errors) == gradients
            eps = torch.finfo(getattr(torch, row["dtype"])).eps
            assert all(0 < error["relative"] < 64 * eps for error in errors)
        for name in {*contenders, row["floor"]}:
            graph = device == "cuda" and (name.endswith("graph") or name == row["floor"])
            kinds = KINDS[device] - ({"host"} if graph or gradients == 3 else set())
            if row["in_features"] is not None:
                kinds -= {"rotating"}
            assert results[name]["times"].keys() == kinds
            for kind, entry in results[name]["times"].items():
                low, high = entry["quartiles_s"]
                assert 0 < low <= entry["median_s"] <= high
                assert entry["repeats"] >= 2
                if kind == "host":  # a floor that is captured has none
                    continue
                floor = results[row["floor"]]["times"][kind]["median_s"]
                ratios = results[name]["ratios"][kind]
                assert ratios["to_floor"] == pytest.approx(entry["median_s"] / floor)
                if row["in_features"] is None:
                    moved = (3 if gradients == 3 else 2) * row["bytes"] / entry["median_s"]
                    assert ratios["bandwidth"] == pytest.approx(moved / figures["bandwidth"])


def present(device: torch.device, chain: bool = False) -> set[str]:
    names = {"eager", "fxfuse", *(["fxfuse with Linear"] if chain else [])}
    return names | {f"{name} graph" for name in names if device.type == "cuda"}


# ---- the grid -------------------------------------------------------------------------------


def test_the_full_grid_covers_what_networks_have():
    rows = bench_grid.FULL
    assert len(rows) == len({row.name for row in rows}) >= 60
    assert {row.dtype for row in rows} == {
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
    }
    assert {row.activation for row in rows} == {"hardtanh", "relu", "silu"}
    for row in rows:
        assert row.shape[1] % row.num_groups == 0
        assert not row.channels_last or len(row.shape) > 2
    images = {(row.shape, row.channels_last) for row in rows if len(row.shape) > 2}
    assert {(shape, True) for shape, _ in images} | {
        (shape, False) for shape, _ in images
    } == images
    shapes = {row.shape for row in rows}
    assert {(1024, 8192), (32, 512), (128, 1024), (1000, 16381)} <= shapes
    assert {(64, 256, 56, 56), (2, 320, 64, 64), (1, 128, 1024, 1024)} <= shapes
    channels = {row.shape[1] // row.num_groups for row in rows if len(row.shape) == 2}
    assert {16, 32, 64} <= channels
    huge = [row for row in rows if row.shape[0] == 1 and row.group_bytes >= 2**24]
    assert {row.num_groups for row in huge} >= {1, 32}
    classes = [512, 8 * 2**10, 64 * 2**10, 200 * 2**10, 2**20, math.inf]  # of the kernels
    for low, high in zip([0, *classes], classes, strict=False):
        assert any(low < row.group_bytes <= high for row in rows)


@pytest.mark.parametrize("chain", [False, True])
def test_the_quick_grid_is_part_of_the_full_one(chain):
    quick, full = bench_grid.GRIDS["quick", chain], bench_grid.GRIDS["full", chain]
    assert set(quick) < set(full)
    assert len(quick) <= 10
    assert len({row.name for row in full}) == len(full) >= 24
    assert all((row.in_features is not None) == chain for row in full)


def test_rows_are_chosen_by_name_and_dtype():
    settings = bench.Settings("full", dtypes=(torch.float16,), only="64x*relu*channels_last")
    assert [row.name for row in settings.rows] == [
        "64x256x56x56/32 relu float16 channels_last",
        "64x2048x7x7/32 relu float16 channels_last",
    ]


# ---- the command ----------------------------------------------------------------------------


def test_bench_prints_tables_and_writes_figures_and_plot(device, tmp_path):
    file, plot = tmp_path / "figures.json", tmp_path / "plot.png"
    options = ["--device", str(device), "--no-inductor", "--only", TINY, "--rounds", "5"]
    plots = ["--plot", str(plot)] if importlib.util.find_spec("matplotlib") else []
    result = fxfuse(*options, "--json", str(file), *plots)
    assert result.returncode == 0, result.stderr
    assert "32x512/8 hardtanh float32" in result.stdout
    assert "geometric mean" in result.stdout
    figures = json.loads(file.read_text())
    assert len(figures["rows"]) == 1
    check_figures(figures, present(device))
    if plots:
        assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("option", ["--backward", "--chain"])
def test_bench_writes_only_json_to_stdout_if_asked(device, option, tmp_path):
    only = "2x1280x8x8*" if option == "--backward" else "128x1024->512*bfloat16"
    options = ["--device", str(device), "--no-inductor", "--grid", "full", "--only", only]
    result = fxfuse(*options, option, "--rounds", "3", "--json", "-")
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout)
    assert len(figures["rows"]) == (2 if option == "--backward" else 1)
    check_figures(figures, present(device, chain=option == "--chain"))
    assert "geometric mean" in result.stderr
    if importlib.util.find_spec("matplotlib"):
        file = tmp_path / "plot.png"
        bench_output.plot(figures, str(file))
        assert file.read_bytes().startswith(b"\x89PNG")


def test_bench_with_inductor_compiles_beforehand_and_measures_it(device):
    options = ["--device", str(device), "--inductor", "--jobs", "2", "--rounds", "3"]
    only = ["--grid", "full", "--only", "32x512/8 hardtanh float*"]
    result = fxfuse(*options, *only, "--json", "-")
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout)
    assert len(figures["rows"]) == 2
    for row in figures["rows"]:
        inductor = row["results"]["inductor"]
        assert inductor["status"] == "right", inductor["reason"]
        assert inductor["times"].keys() == KINDS[device.type]


@pytest.mark.parametrize("backward", [False, True])
def test_what_is_compiled_beforehand_is_not_compiled_again(backward, device, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    settings = bench.Settings("full", device, only=TINY, backward=backward)
    (row,) = settings.rows
    with bench._torch_settings(settings):
        torch._dynamo.reset()
        bench._compile_rows([row], settings)
        torch._dynamo.reset()
        counters.clear()
        bench._work(bench._inductor(row), bench.Inputs.random(row, settings))()
        torch._dynamo.reset()
    found = counters["inductor"]
    assert found["fxgraph_cache_hit"] == (2 if backward else 1)
    assert found["fxgraph_cache_miss"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--grid", "huge"], "invalid choice: 'huge'"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
        (["--chain", "--backward"], "--backward: not together with --chain"),
        (["--device", "cpu", "--chain", "--tf32"], "--tf32: needs a CUDA device and --chain"),
        (["--rounds", "1"], "--rounds: expected 2 or more, got 1"),
        (["--only", "no such row"], "no row of the quick grid"),
        (["--json", "no/such/folder/figures.json"], "no folder 'no/such/folder'"),
    ],
)
def test_bad_input_gives_one_line_and_exit_code_2(arguments, message):
    command.check_refusal(fxfuse(*arguments), message)


def test_a_plot_without_matplotlib_names_the_extra():
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from fxfuse.__main__ import main\n"
        "main(['bench', '--plot', 'plot.png'])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert "pip install 'fxfuse[bench]'" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_bench_without_a_library_says_so(tmp_path):
    environment = {"CXX": "no-such-compiler", "FXFUSE_CACHE": str(tmp_path)}
    result = fxfuse("--device", "cpu", "--only", TINY, **environment)
    assert result.returncode == 1
    assert "'no-such-compiler' was not found" in result.stderr
    assert "geometric mean" not in result.stdout


# ---- what is wrong is not timed -------------------------------------------------------------


def spoiled(how):
    """A contender whose result, or whose gradient of it, is spoiled."""

    def make(row):
        eager = bench._eager(row)

        def function(x, *parameters):
            return how(eager(x, *parameters))

        return function

    return bench.Contender("spoiled", make)


def first_of_last_group_is_nan(y):
    y = y.clone()
    y[-1, -1] = math.nan
    return y


def one_sample_too_large(y):
    scale = torch.ones(y.shape[0], *[1] * (y.dim() - 1), dtype=y.dtype, device=y.device)
    scale[0] = 1.5
    return y * scale


FAULTS = {
    # Less than bfloat16 rounds: the norm of the difference hides it, the slope does not.
    "variance 0.5 % off": lambda y: (y.float() * 1.005).to(y.dtype),
    "one NaN": first_of_last_group_is_nan,
    "one sample": one_sample_too_large,
    "other shape": lambda y: y[:1],
    "other dtype": lambda y: y.double(),
}


def run(settings, monkeypatch, contenders, tmp_path):
    monkeypatch.setattr(bench, "CONTENDERS", contenders)
    file = tmp_path / "figures.json"
    out = Console(file=open(os.devnull, "w"))  # noqa: SIM115
    code = bench.run(settings, out, str(file))
    return code, json.loads(file.read_text())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_contender_is_reported_and_not_timed(fault, dtype, device, monkeypatch, tmp_path):
    settings = bench.Settings("full", device, (dtype,), only="128x1024/", rounds=2)
    contenders = [bench.CONTENDERS[0], spoiled(FAULTS[fault])]
    code, figures = run(settings, monkeypatch, contenders, tmp_path)
    assert code == 1
    (row,) = figures["rows"]
    assert row["results"]["eager"]["status"] == "right"
    wrong = row["results"]["spoiled"]
    assert wrong["status"] == "wrong"
    assert "error" in wrong["reason"] or "gives" in wrong["reason"]
    assert wrong["times"] == {}
    table = bench_output.times(figures)
    assert any("WRONG" in cell for column in table.columns for cell in column.cells)


def test_a_wrong_gradient_is_reported(device, monkeypatch, tmp_path):
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.clone()

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    settings = bench.Settings("full", device, only="128x1024/*float32", backward=True, rounds=2)
    contenders = [bench.CONTENDERS[0], spoiled(Doubled.apply)]
    code, figures = run(settings, monkeypatch, contenders, tmp_path)
    assert code == 1
    assert figures["rows"][0]["results"]["eager"]["status"] == "right"
    assert figures["rows"][0]["results"]["spoiled"]["status"] == "wrong"


def test_what_raises_is_absent_and_ours_is_wrong(device, monkeypatch, tmp_path):
    def make(row):
        raise RuntimeError("no kernel\nand much more")

    contenders = [bench.Contender("theirs", make), bench.Contender("fxfuse", make, required=True)]
    settings = bench.Settings("full", device, only=TINY, rounds=2)
    code, figures = run(settings, monkeypatch, contenders, tmp_path)
    assert code == 1
    results = figures["rows"][0]["results"]
    assert [results[name]["status"] for name in ("theirs", "fxfuse")] == ["absent", "wrong"]
    assert results["theirs"]["reason"] == "RuntimeError: no kernel"


# ---- clocks ---------------------------------------------------------------------------------


def test_clocks_are_read_in_turn_and_summed_up():
    order = []

    def clock(name, values):
        readings = iter(values)

        def read():
            order.append(name)
            return next(readings)

        return read

    clocks = {"a": clock("a", [9, 1, 2, 3, 4, 5]), "b": clock("b", [9, 7, 7, 7, 7, 7])}
    timings = timing.in_turn(clocks, seconds=1e9, rounds=(2, 5))
    assert order == ["a", "b"] * 6
    assert timings["a"] == timing.Timing(3, (2, 4), 5)  # the first reading does not count
    assert timings["b"] == timing.Timing(7, (7, 7), 5)


def test_clocks_stop_in_time_but_not_before_the_least_number_of_rounds():
    timings = timing.in_turn({"a": timing.cpu_clock(lambda: None)}, seconds=0, rounds=(4, 100))
    assert timings["a"].repeats == 4


def test_many_calls_rotate():
    calls = []
    works = [lambda i=i: calls.append(i) for i in range(3)]
    bench._many(works, 7)()
    assert calls == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_replay_computes_again_and_a_flushed_cache_is_cold():
    x, y = torch.randn(2**22, device="cuda"), torch.empty(2**22, device="cuda")
    replay = timing.capture(lambda: lambda: torch.neg(x, out=y))
    x.add_(1)
    assert torch.equal(replay(), -x)
    flush = timing.l2_flush()
    clocks = {
        kind: timing.cuda_clock(replay, before=flush, hot=kind == "hot") for kind in ("cold", "hot")
    }
    timings = timing.in_turn(clocks, seconds=5, rounds=(10, 30))
    assert timings["hot"].median_s < timings["cold"].median_s
