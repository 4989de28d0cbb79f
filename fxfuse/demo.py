"""The demo: Linear, GroupNorm and Hardtanh as the pass sees them, with errors and times.

Everything the demo prints was computed or measured in the same run, on the machine it runs on.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import torch
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table
from torch import Tensor, nn

import fxfuse
from fxfuse import timing

Function = Callable[[Tensor], Tensor]

MIN_ROUNDS, MAX_ROUNDS = 3, 100
SECONDS_PER_TABLE = 12.0


@dataclass(frozen=True)
class Settings:
    """What the demo runs: x of shape (rows, in_features), on one device, in one dtype."""

    rows: int = 1024
    in_features: int = 8192
    out_features: int = 8192
    num_groups: int = 16
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    tf32: bool = False
    inductor: bool = True

    def __str__(self) -> str:
        """One line that says what is computed, in which precision and where."""
        if self.device.type == "cuda":
            where = torch.cuda.get_device_name(self.device)
        else:
            capability = torch.backends.cpu.get_cpu_capability()
            where = f"cpu, {torch.get_num_threads()} threads, {capability}"
        precision = "TF32" if self.tf32 else str(self.dtype).removeprefix("torch.")
        return (
            f"x ({self.rows}, {self.in_features}) -> Linear {self.in_features} -> "
            f"{self.out_features} -> GroupNorm {self.num_groups} -> Hardtanh(-2, 2)\n"
            f"{precision}, {where}, torch {torch.__version__}"
        )


class Chain(nn.Module):
    """Linear, GroupNorm and Hardtanh, with a random scale and shift."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        device, dtype, channels = settings.device, settings.dtype, settings.out_features
        self.linear = nn.Linear(settings.in_features, channels, device=device, dtype=dtype)
        self.group_norm = nn.GroupNorm(settings.num_groups, channels, device=device, dtype=dtype)
        self.hardtanh = nn.Hardtanh(-2.0, 2.0)
        nn.init.normal_(self.group_norm.weight)
        nn.init.normal_(self.group_norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (rows, in_features) to (rows, out_features)."""
        x = self.linear(x)
        x = self.group_norm(x)
        x = self.hardtanh(x)
        return x


@dataclass
class Part:
    """One thing to compare: a plain module, its input, and the ways to run it."""

    name: str
    module: nn.Module
    input: Tensor
    floor_name: str
    floor: Callable[[], object]  # what no fusion of this part can beat
    runs: dict[str, Function] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)  # run -> why there is none


@dataclass(frozen=True)
class Error:
    """Distance of one run from the same computation in float64."""

    part: str
    run: str
    max_abs: float
    relative: float  # 2-norm of the difference over the 2-norm of the reference


@dataclass(frozen=True)
class Time:
    """Times of one run; `l2` says what the GPU's L2 cache held before each repeat."""

    part: str
    run: str
    l2: str | None  # "cold", "hot", or None on the CPU
    median_s: float
    quartiles_s: tuple[float, float]
    repeats: int


def run(settings: Settings, out: Console, json_file: str | None = None) -> int:
    """Runs the demo and prints it.

    Args:
        settings: What to run.
        out: Where the graphs, the report and the tables go.
        json_file: Where the figures go as JSON: a path, "-" for stdout, or None.

    Returns:
        The exit code: 0, or 1 where nothing could be fused.
    """
    torch.manual_seed(0)
    if settings.tf32:
        torch.backends.cuda.matmul.allow_tf32 = True
    stderr = Console(stderr=True)
    # Redrawn only when told: a thread that draws would take a core from what is timed.
    progress = Progress(
        console=stderr, transient=True, disable=not stderr.is_terminal, auto_refresh=False
    )
    on_device = torch.cuda.device(settings.device) if settings.device.type == "cuda" else None
    with torch.no_grad(), progress, on_device or contextlib.nullcontext():
        out.print(str(settings), highlight=False)
        step = progress.add_task("building the model", total=None)
        model = Chain(settings)
        x = torch.randn(
            settings.rows, settings.in_features, device=settings.device, dtype=settings.dtype
        )

        _show(progress, step, "fusing (the first time builds the library)")
        traced = torch.fx.symbolic_trace(model)
        _section(out, "The graph", str(traced.graph))
        fxfuse.fuse(traced)
        _section(out, "The graph after fxfuse.fuse", str(traced.graph))
        optimized = fxfuse.optimize(model)
        report = fxfuse.report(optimized)
        _section(out, "fxfuse.report", str(report))
        if not report.fused:
            print("fxfuse demo: nothing was fused; the report says why", file=sys.stderr)
            return 1

        parts = _parts(model, optimized, x)
        if settings.inductor:
            for part in parts:
                _show(progress, step, f"compiling the {part.name} with Inductor")
                _add_inductor(part)
        errors = []
        for part in parts:
            _show(progress, step, f"comparing the {part.name} with float64")
            errors += _errors(part)
        out.print("", _error_table(errors), sep="\n")
        progress.remove_task(step)

        times = []
        for part in parts:
            for l2 in ("cold", "hot") if settings.device.type == "cuda" else (None,):
                measured = _times(part, l2, progress)
                out.print("", _time_table(part, l2, measured), sep="\n")
                times += measured
    if json_file is not None:
        _write_json(json_file, settings, errors, times, parts)
    return 0


def _show(progress: Progress, step: TaskID, what: str) -> None:
    progress.update(step, description=what, refresh=True)


def _section(out: Console, title: str, text: str) -> None:
    out.print(f"\n[bold]{title}")
    out.print(text.strip("\n"), markup=False, highlight=False, soft_wrap=True)


def _parts(model: Chain, optimized: nn.Module, x: Tensor) -> list[Part]:
    """The whole chain, and GroupNorm + Hardtanh alone on what the Linear gives."""
    hidden = model.linear(x)
    copied = torch.empty_like(hidden)
    tail = nn.Sequential(model.group_norm, model.hardtanh)
    return [
        Part(
            "chain",
            model,
            x,
            floor_name="Linear",
            floor=lambda: model.linear(x),
            runs={"eager": model, "fused": optimized},
        ),
        Part(
            "tail",
            tail,
            hidden,
            floor_name="copy",
            floor=lambda: copied.copy_(hidden),
            runs={"eager": tail, "fused": fxfuse.optimize(tail)},
        ),
    ]


def _add_inductor(part: Part) -> None:
    """Adds the module under torch.compile, or the reason why it does not work here."""
    compiled = torch.compile(part.module)
    try:
        compiled(part.input)
    except Exception as error:  # whatever is missing for Inductor, the demo goes on without it
        reason = str(error).strip().splitlines() or [""]
        part.absent["inductor"] = f"{type(error).__name__}: {reason[0]}"
    else:
        part.runs = {
            "eager": part.runs["eager"],
            "inductor": compiled,
            "fused": part.runs["fused"],
        }


def _errors(part: Part, rows_at_once: int = 4096) -> list[Error]:
    """Compares every run with the module in float64, some rows at a time to bound the memory."""
    reference = copy.deepcopy(part.module).double()
    outputs = {name: function(part.input) for name, function in part.runs.items()}
    max_abs = dict.fromkeys(outputs, 0.0)
    squares = dict.fromkeys(outputs, 0.0)
    total = 0.0
    for start in range(0, len(part.input), rows_at_once):
        rows = slice(start, start + rows_at_once)
        expected = reference(part.input[rows].double())
        total += expected.square().sum().item()
        for name, output in outputs.items():
            difference = output[rows].double() - expected
            max_abs[name] = max(max_abs[name], difference.abs().max().item())
            squares[name] += difference.square().sum().item()
    return [
        Error(part.name, name, max_abs[name], (squares[name] / total) ** 0.5) for name in outputs
    ]


def _times(part: Part, l2: str | None, progress: Progress) -> list[Time]:
    """Times every run of a part and its floor, in turn."""
    works: dict[str, timing.Work] = {
        name: functools.partial(function, part.input) for name, function in part.runs.items()
    }
    works[part.floor_name] = part.floor
    if l2 is None:
        clocks = {name: timing.cpu_clock(work) for name, work in works.items()}
    else:
        flush = timing.l2_flush()
        clocks = {
            name: timing.cuda_clock(_captured(work), before=flush, hot=l2 == "hot")
            for name, work in works.items()
        }
    task = progress.add_task(f"timing the {part.name}", total=SECONDS_PER_TABLE)
    timings = timing.in_turn(
        clocks,
        seconds=SECONDS_PER_TABLE,
        rounds=(MIN_ROUNDS, MAX_ROUNDS),
        on_round=lambda elapsed: progress.update(task, completed=elapsed, refresh=True),
    )
    progress.remove_task(task)
    return [
        Time(part.name, name, l2, entry.median_s, entry.quartiles_s, entry.repeats)
        for name, entry in timings.items()
    ]


def _captured(work: timing.Work) -> timing.Work:
    return timing.capture(lambda: work)


def _error_table(errors: list[Error]) -> Table:
    table = Table(title="Error against float64", title_justify="left")
    for column in ("", "run"):
        table.add_column(column)
    for column in ("max abs", "relative 2-norm"):
        table.add_column(column, justify="right")
    for error in errors:
        table.add_row(error.part, error.run, f"{error.max_abs:.2e}", f"{error.relative:.2e}")
    return table


def _time_table(part: Part, l2: str | None, times: list[Time]) -> Table:
    what = {"chain": "Time of the whole chain", "tail": "Time of GroupNorm + Hardtanh alone"}
    cache = f", {l2} L2 cache" if l2 else ""
    median = {entry.run: entry.median_s for entry in times}
    table = Table(
        title=what[part.name] + cache,
        caption="\n".join(f"{run}: {why}" for run, why in part.absent.items()) or None,
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("run")
    for column in ("median", "quartiles", "eager / run", f"run / {part.floor_name}"):
        table.add_column(column, justify="right")
    for entry in times:
        low, high = entry.quartiles_s
        table.add_row(
            entry.run,
            timing.text(entry.median_s),
            f"{timing.text(low)} - {timing.text(high)}",
            f"{median['eager'] / entry.median_s:.2f}",
            f"{entry.median_s / median[part.floor_name]:.2f}",
        )
    return table


def _write_json(
    file: str, settings: Settings, errors: list[Error], times: list[Time], parts: list[Part]
) -> None:
    figures = {
        "torch": torch.__version__,
        "settings": asdict(settings)
        | {"device": str(settings.device), "dtype": str(settings.dtype)},
        "threads": torch.get_num_threads(),
        "errors": [asdict(error) for error in errors],
        "times": [asdict(entry) for entry in times],
        "absent": {part.name: part.absent for part in parts},
    }
    text = json.dumps(figures, indent=2)
    if file == "-":
        print(text)
    else:
        with open(file, "w", encoding="utf-8") as stream:
            stream.write(text + "\n")
