"""Measures whole networks: eager, fused, and compiled with and without fxfuse.

    python examples/networks.py --json networks.json
    python examples/networks.py --show networks.json --markdown

Every case is a network in a precision, without grad (forward) or with a backward for all its
parameters (training), and has a process of its own.  First all processes compile, several at a
time, and compare outputs and gradients with float64; then each has the device for itself and times
its contenders in turn.  One that is wrong is named, not timed, and the exit code is 1.  Inputs, and
the scale and shift of every norm, are random.  The networks are in eval mode: of these, only the
detector's BatchNorms would do something else in training, and they are frozen there too.

The contenders are ``eager``, ``optimize`` (``fxfuse.optimize``), ``inductor`` (``torch.compile``)
and ``backend`` (``torch.compile(backend="fxfuse")``); the last two also with other settings.

What is timed, all medians with quartiles:

- call: one of several calls in a row: the larger of the device's time and Python's.
- graph: one replay of a CUDA graph of the call, with a cold L2 cache: the device's time alone.

The JSON file has ``machine``, ``date``, ``settings`` and ``rows``; each row has ``network``,
``precision``, ``mode``, ``status`` (``"timed"``, ``"absent"`` or ``"failed"``) with its ``reason``,
``norms`` (how many GroupNorms; how many ``optimize`` fused, and how many it replaced ``alone``),
``prepare_s``, ``host_bytes`` (of the process, at most), and ``contenders``, by name: ``status``
(``"right"``, ``"wrong"`` or ``"failed"``), ``reason``, ``first_call_s`` (with compiling), ``sites``
(GroupNorms that it replaced), ``error`` (the largest relative 2-norm of a tensor's distance from
float64), ``times``, by kind: ``median_s``, ``quartiles_s``, ``repeats``; and ``ratios``, by kind:
the other contenders' times over its own.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import fnmatch
import functools
import gc
import importlib
import itertools
import json
import math
import multiprocessing
import os
import platform
import resource
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fxfuse
from fxfuse import backend, library, timing

# ---- the networks ---------------------------------------------------------------------------

Built = tuple[nn.Module, tuple[Tensor, ...]]  # a network and its inputs, in batches


def timm_network(name: str, small: bool) -> Built:
    model: nn.Module = importlib.import_module("timm").create_model(name)
    return model, (torch.randn(2, 3, 64, 64) if small else torch.randn(64, 3, 224, 224),)


class Heads(nn.Module):
    """A detector up to its heads: what follows sorts boxes, which rounding may reorder."""

    def __init__(self, detector: Any) -> None:
        super().__init__()
        self.backbone, self.head = detector.backbone, detector.head

    def forward(self, x: Tensor) -> Any:
        return self.head(list(self.backbone(x).values()))


def fcos(small: bool) -> Built:
    detection = importlib.import_module("torchvision.models.detection")
    detector = detection.fcos_resnet50_fpn(weights=None, weights_backbone=None)
    return Heads(detector), (torch.randn(1, 3, 64, 64) if small else torch.randn(8, 3, 512, 512),)


def diffusers_unet(small: bool) -> Built:
    unet = importlib.import_module("diffusers").UNet2DConditionModel
    if small:
        model = unet(block_out_channels=(32,) * 4, layers_per_block=1, cross_attention_dim=16)
        return model, (torch.randn(2, 4, 16, 16), torch.rand(2), torch.randn(2, 5, 16))
    model = unet(cross_attention_dim=768)  # Stable Diffusion 1.5
    return model, (torch.randn(2, 4, 64, 64), 1000 * torch.rand(2), torch.randn(2, 77, 768))


class ResBlock(nn.Module):
    """GroupNorm -> SiLU -> Conv, twice, with the time in between."""

    def __init__(self, in_channels: int, channels: int, time_features: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(32, in_channels)
        self.conv1 = nn.Conv2d(in_channels, channels, 3, padding=1)
        self.time = nn.Linear(time_features, channels)
        self.norm2 = nn.GroupNorm(32, channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        same = in_channels == channels
        self.skip = nn.Identity() if same else nn.Conv2d(in_channels, channels, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        y = y + self.time(F.silu(time))[:, :, None, None]
        y = self.conv2(F.silu(self.norm2(y)))
        return self.skip(x) + y  # type: ignore[no-any-return]


class UNet(nn.Module):
    """The convolutions of a diffusion UNet; it has no attention."""

    def __init__(self, widths: tuple[int, ...], depth: int = 2) -> None:
        super().__init__()
        features = 4 * widths[0]
        self.time = nn.Sequential(
            nn.Linear(widths[0], features), nn.SiLU(), nn.Linear(features, features)
        )
        channels = widths[0]
        self.stem = nn.Conv2d(4, channels, 3, padding=1)
        skips = [channels]
        self.down = nn.ModuleList()
        for level, width in enumerate(widths):
            if level:
                self.down.append(nn.Conv2d(channels, channels, 3, stride=2, padding=1))
                skips.append(channels)
            for _ in range(depth):
                self.down.append(ResBlock(channels, width, features))
                channels = width
                skips.append(channels)
        self.middle = nn.ModuleList(ResBlock(channels, channels, features) for _ in range(2))
        self.up = nn.ModuleList()
        for level, width in reversed(list(enumerate(widths))):
            for _ in range(depth + 1):
                self.up.append(ResBlock(channels + skips.pop(), width, features))
                channels = width
            if level:
                self.up.append(nn.Conv2d(channels, channels, 3, padding=1))
        self.norm = nn.GroupNorm(32, channels)
        self.head = nn.Conv2d(channels, 4, 3, padding=1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        time = self.time(time)
        x = self.stem(x)
        skips = [x]
        for layer in self.down:
            x = layer(x, time) if isinstance(layer, ResBlock) else layer(x)
            skips.append(x)
        for layer in self.middle:
            x = layer(x, time)
        for layer in self.up:
            if isinstance(layer, ResBlock):
                x = layer(torch.cat([x, skips.pop()], dim=1), time)
            else:
                x = layer(F.interpolate(x, scale_factor=2.0))
        return self.head(F.silu(self.norm(x)))  # type: ignore[no-any-return]


def unet(small: bool) -> Built:
    widths, size = ((32, 64), 8) if small else ((320, 640, 1280), 64)
    return UNet(widths), (torch.randn(2, 4, size, size), torch.randn(2, widths[0]))


def block(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.GroupNorm(16, width), nn.Hardtanh(-2, 2))


class MLP(nn.Module):
    """Residual blocks of Linear -> GroupNorm -> Hardtanh."""

    def __init__(self, width: int, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block(width) for _ in range(depth))
        self.head = nn.Linear(width, 16)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.blocks:
            x = x + layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def of_rows(make: Callable[[int], nn.Module], small: bool) -> Built:
    rows, width = (16, 64) if small else (1024, 8192)
    return make(width), (torch.randn(rows, width),)


NETWORKS: dict[str, Callable[[bool], Built]] = {
    "timm resnet50_gn": functools.partial(timm_network, "resnet50_gn"),
    "timm resnetv2_50x1_bit": functools.partial(timm_network, "resnetv2_50x1_bit"),
    "timm efficientnet_b0_gn": functools.partial(timm_network, "efficientnet_b0_gn"),
    "torchvision fcos_resnet50_fpn": fcos,
    "diffusers UNet": diffusers_unet,
    "UNet without attention": unet,
    "MLP": functools.partial(of_rows, MLP),
    "chain": functools.partial(of_rows, block),
}


def randomise(model: nn.Module) -> None:
    """Draws what a new network has as ones and zeros, which hide mistakes."""
    for module in model.modules():
        if isinstance(module, (nn.GroupNorm, nn.BatchNorm2d)) and module.affine:
            nn.init.normal_(module.weight, 1, 0.2)
            nn.init.normal_(module.bias, 0, 0.2)
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, 0, parameter[0].numel() ** -0.5)


# ---- the contenders -------------------------------------------------------------------------

# What backend="fxfuse" finds by its entry point; a checkout that is not installed has none.
_OURS = backend.compile_graph
# Without Inductor's own CUDA graphs, which would copy the inputs: we capture ours.
_TUNED = "max-autotune-no-cudagraphs"

CONTENDERS: dict[str, Callable[[nn.Module], Callable[..., Any]]] = {
    "eager": lambda model: model,
    "optimize": fxfuse.optimize,
    "inductor": torch.compile,
    "backend": functools.partial(torch.compile, backend=_OURS),
    "backend, tune": functools.partial(torch.compile, backend=_OURS, options={"tune": True}),
    "inductor, max-autotune": functools.partial(torch.compile, mode=_TUNED),
    "backend, max-autotune": functools.partial(torch.compile, backend=_OURS, mode=_TUNED),
}
# Whose time over whose is shown, beside that of eager.
RIVALS = {
    "backend": "inductor",
    "backend, tune": "inductor",
    "backend, max-autotune": "inductor, max-autotune",
}
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "tf32": torch.float32}
MODES = ("training", "forward")


@dataclass(frozen=True)
class Case:
    """What one process measures."""

    network: str
    precision: str
    mode: str

    def __str__(self) -> str:
        return f"{self.network}, {self.precision}, {self.mode}"


@dataclass(frozen=True)
class Settings:
    """How to measure it.

    Attributes:
        device: `"cpu"` or `"cuda"`.
        small: Make small networks, for a test of this script.
        contenders: Who takes part; eager must.
        calls: How many calls in a row one reading of a clock takes.
        rounds: The greatest number of readings.
        seconds: When to stop reading the clocks of one kind.
    """

    device: str
    small: bool
    contenders: tuple[str, ...]
    calls: int
    rounds: int
    seconds: float


@dataclass
class Entry:
    """What is known of one contender in one case."""

    status: str
    reason: str | None = None
    first_call_s: float | None = None
    sites: int | None = None
    error: float | None = None
    times: dict[str, timing.Timing] = field(default_factory=dict)


@dataclass
class Row:
    """What is known of a case."""

    network: str
    precision: str
    mode: str
    status: str = "timed"
    reason: str | None = None
    norms: dict[str, int] = field(default_factory=dict)
    prepare_s: float | None = None
    host_bytes: int | None = None
    contenders: dict[str, Entry] = field(default_factory=dict)

    @property
    def bad(self) -> bool:
        """Whether something went wrong; a library that is not there is not wrong."""
        wrong = any(entry.status != "right" for entry in self.contenders.values())
        return wrong or self.status == "failed"


# ---- one case, in its own process -----------------------------------------------------------

Results = tuple[list[Tensor], list[Tensor]]  # outputs, and the parameters' gradients if any
Step = Callable[[], Results]


def step(function: Callable[..., Any], model: nn.Module, inputs: Any, weights: Any) -> Step:
    """A call of a contender: a forward; with weights of the outputs, a backward too."""
    parameters = list(model.parameters())

    def run() -> Results:
        with torch.set_grad_enabled(bool(weights)):
            outputs = pytree.tree_leaves(function(*inputs))
        if not weights:
            return outputs, []
        gradients = torch.autograd.grad(outputs, parameters, weights)
        return [output.detach() for output in outputs], list(gradients)

    return run


def reference(model: nn.Module, inputs: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
    """The results in float64, some samples at a time to bound the memory that they take."""
    exact = copy.deepcopy(model).double()
    size = max(1, len(inputs[0]) // 8)
    outputs: list[list[Tensor]] = []
    sums: list[Tensor] = []
    for start in range(0, len(inputs[0]), size):
        part = slice(start, start + size)
        of_part = step(
            exact, exact, [t[part].double() for t in inputs], [w[part].double() for w in weights]
        )
        some, gradients = of_part()
        outputs.append(some)
        sums = [a.add_(b) for a, b in zip(sums, gradients, strict=True)] if sums else gradients
    return [torch.cat(parts) for parts in zip(*outputs, strict=True)] + sums


def distances(got: list[Tensor], expected: list[Tensor]) -> list[float]:
    """How far each tensor is from what is expected, in the 2-norm, relative to that.

    One that should be 0 but for rounding, as the gradient of a bias before its norm may be, is
    compared with the others' usual norm.
    """
    norms = [tensor.double().norm().item() for tensor in expected]
    usual = statistics.median(norms)
    return [
        torch.dist(a.double(), b.double()).item() / (norm if norm > 1e-6 * usual else usual)
        for a, b, norm in zip(got, expected, norms, strict=True)
    ]


# A relative error below this is nobody's fault: convolution algorithms differ in accuracy.
OUTPUTS = 1e-5
# Where rounding moves a value across an activation's kink, a gradient jumps: by 4e-3 of one on
# resnet50_gn in float32 with two images of 64 x 64 (CPU, 2026-11-30).
GRADIENTS = 1e-2


def allowances(eager: list[float], outputs: int) -> list[float]:
    """How far from float64 each output, and then each gradient, may be where eager is so far.

    A short tensor may have luck, so that each is allowed what is usual for the others too.
    """

    def of(errors: list[float], least: float) -> list[float]:
        return [max(least, 2 * error + 4 * statistics.median(errors)) for error in errors]

    return of(eager[:outputs], OUTPUTS) + of(eager[outputs:], GRADIENTS)


def fault(errors: list[float], allowed: list[float]) -> str | None:
    """Says which result is too far from what is expected, or returns None."""
    for i, (error, limit) in enumerate(zip(errors, allowed, strict=True)):
        if not error <= limit:
            return f"result {i + 1} of {len(errors)} is off by {error:.1e}, allowed {limit:.1e}"
    return None


class Measurement:
    """A case, ready to be timed."""

    def __init__(self, case: Case, settings: Settings) -> None:
        self.settings, self.row = settings, Row(**asdict(case))
        self.on_cuda = settings.device == "cuda"
        tf32 = case.precision == "tf32"
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
        torch.manual_seed(0)
        with torch.device(settings.device):
            model, inputs = NETWORKS[case.network](settings.small)
        randomise(model)
        dtype = DTYPES[case.precision]
        model = model.eval().to(dtype)
        given = [tensor.to(dtype) for tensor in inputs]
        if dtype == torch.bfloat16 and given[0].dim() == 4:
            channels_last: Any = {"memory_format": torch.channels_last}
            model = model.to(**channels_last)
            given[0] = given[0].to(**channels_last)
        weights: list[Tensor] = []
        if case.mode == "training":
            outputs, _ = step(model, model, given, weights)()
            weights = [torch.randn_like(output) for output in outputs]

        self.works: dict[str, Step] = {}
        expected = reference(model, given, weights)
        for name in settings.contenders:
            entry = self.row.contenders[name] = Entry("right")
            try:
                self._prepare(name, entry, model, given, weights, expected)
            except Exception as error:
                entry.status, entry.reason = "failed", first_line(error)
                if name == "eager":
                    raise

    def _prepare(
        self,
        name: str,
        entry: Entry,
        model: nn.Module,
        inputs: list[Tensor],
        weights: list[Tensor],
        expected: list[Tensor],
    ) -> None:
        sites, start = fxfuse.report().fused, time.perf_counter()
        function = CONTENDERS[name](model)
        work = step(function, model, inputs, weights)
        work()
        self.synchronize()
        entry.first_call_s = time.perf_counter() - start
        if name == "optimize":
            assert isinstance(function, nn.Module)
            report = fxfuse.report(function)
            counts = {"all": len(report.sites), "fused": report.fused, "alone": report.alone}
            self.row.norms = counts
            entry.sites = report.fused + report.alone
        else:
            entry.sites = fxfuse.report().fused - sites
        outputs, gradients = work()
        errors = distances(outputs + gradients, expected)
        if name == "eager":
            self.allowed = allowances(errors, len(outputs))
        if all(map(math.isfinite, errors)):  # JSON has no NaN
            entry.error = max(errors)
        if why := fault(errors, self.allowed):
            entry.status, entry.reason = "wrong", why
        else:
            self.works[name] = work

    def synchronize(self) -> None:
        """Waits for the device."""
        if self.on_cuda:
            torch.cuda.synchronize()

    def release(self) -> None:
        """Gives back the memory that the next call would use again."""
        gc.collect()
        if self.on_cuda:
            torch.cuda.empty_cache()

    def time(self) -> None:
        """Times those that are right."""
        for kind, clocks in self._clocks():
            times = timing.in_turn(
                clocks,
                seconds=self.settings.seconds,
                rounds=(min(3, self.settings.rounds), self.settings.rounds),
            )
            for name, entry in times.items():
                self.row.contenders[name].times[kind] = entry

    def _clocks(self) -> Iterator[tuple[str, dict[str, timing.Clock]]]:
        if not self.on_cuda:
            yield "call", {name: timing.cpu_clock(work) for name, work in self.works.items()}
            return
        calls = self.settings.calls

        def several(work: Step) -> timing.Work:
            def run() -> None:
                for _ in range(calls):
                    work()

            return run

        yield (
            "call",
            {
                name: timing.cuda_clock(several(work), before=self.synchronize, calls=calls)
                for name, work in self.works.items()
            },
        )
        self.release()
        graphs = {name: self._graph(name, work) for name, work in self.works.items()}
        flush = timing.l2_flush()  # also keeps the device busy while a graph is launched
        yield (
            "graph",
            {
                name: timing.cuda_clock(graph, before=flush)
                for name, graph in graphs.items()
                if graph
            },
        )

    def _graph(self, name: str, work: Step) -> timing.Work | None:
        """A CUDA graph of a call, if it can be captured and does what the call does."""
        entry = self.row.contenders[name]
        try:
            graph = timing.capture(lambda: work)
        except Exception as error:
            entry.reason = f"no graph: {first_line(error)}"
            return None
        results, expected = list(itertools.chain(*graph())), list(itertools.chain(*work()))
        for tensor in results:
            tensor.fill_(math.nan)  # see that a replay writes it
        graph()
        if why := fault(distances(results, expected), self.allowed):
            entry.status, entry.reason = "wrong", f"in a graph, {why}"
            return None
        return graph


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def measure(case: Case, settings: Settings, pipe: Connection) -> None:
    """The life of a process: prepare, say so, wait for the turn, measure."""
    warnings.simplefilter("ignore")  # Inductor has some for float32 and for small machines
    start = time.monotonic()
    row = Row(**asdict(case), status="failed")
    try:
        measurement = Measurement(case, settings)
        measurement.release()
        row = measurement.row
        row.prepare_s = time.monotonic() - start
        pipe.send(None)
        pipe.recv()
        measurement.time()
        row.host_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    except ImportError as error:
        row.status, row.reason = "absent", first_line(error)
    except Exception as error:
        row.status, row.reason = "failed", first_line(error)
    pipe.send(row)


# ---- all cases ------------------------------------------------------------------------------


class Worker:
    """A case and its process, which may crash or hang."""

    def __init__(self, case: Case, settings: Settings, deadline: float) -> None:
        self.case, self.row = case, None
        self.process: Any = None
        if time.monotonic() < deadline:
            context = multiprocessing.get_context("spawn")  # a fork could not use CUDA
            self.pipe, theirs = context.Pipe()
            self.process = context.Process(
                target=measure, args=(case, settings, theirs), daemon=True
            )
            self.process.start()
            theirs.close()
        self.row = self._answer(deadline)
        note(f"{case}: {self.row.reason if self.row else 'ready'}")

    def time(self, seconds: float) -> Row:
        """Lets it have the device, for some seconds at most."""
        if self.row is None:
            note(f"{self.case}: timing")
            self.pipe.send(None)
            self.row = self._answer(time.monotonic() + seconds)
            assert self.row is not None
        return self.row

    def _answer(self, deadline: float) -> Row | None:
        """A row, or None from one that is ready."""
        failed = Row(**asdict(self.case), status="failed")
        try:
            if self.process and self.pipe.poll(max(0.0, deadline - time.monotonic())):
                answer: Row | None = self.pipe.recv()
                return answer
            failed.reason = "not done in time"
        except (EOFError, OSError):
            self.process.join(10)
            failed.reason = f"its process ended with exit code {self.process.exitcode}"
        if self.process:
            self.process.kill()
        return failed


def note(text: str) -> None:
    print(f"{time.strftime('%X')} {text}", file=sys.stderr, flush=True)


def run(cases: list[Case], settings: Settings, jobs: int, limit: float) -> Iterator[Row]:
    """Prepares all cases, some at a time, until the limit in seconds; then times each."""
    jobs = min(jobs, len(cases))
    threads = str(max(1, (os.cpu_count() or 1) // jobs))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", threads)
    start = functools.partial(Worker, settings=settings, deadline=time.monotonic() + limit)
    with ThreadPoolExecutor(jobs) as pool:
        workers = list(pool.map(start, cases))
    for worker in workers:
        yield worker.time(60 + 20 * settings.seconds)


def as_dict(row: Row) -> dict[str, Any]:
    """A row of the JSON file."""
    figures = asdict(row)
    times = {name: entry.times for name, entry in row.contenders.items()}
    for name, entry in figures["contenders"].items():
        entry["ratios"] = {
            kind: {
                other: theirs[kind].median_s / mine.median_s
                for other, theirs in times.items()
                if other != name and kind in theirs
            }
            for kind, mine in times[name].items()
        }
    return figures


# ---- what is shown --------------------------------------------------------------------------

TIMES = "\N{MULTIPLICATION SIGN}"


def cells(row: dict[str, Any], kind: str, names: list[str]) -> Iterator[str]:
    """The time of each contender in ms, with half the interquartile range, and its ratio."""
    for name in names:
        entry = row["contenders"].get(name)
        if entry is None or kind not in entry["times"]:
            yield "" if entry is None or entry["status"] == "right" else entry["status"].upper()
            continue
        low, high = entry["times"][kind]["quartiles_s"]
        text = f"{entry['times'][kind]['median_s'] * 1e3:.4g} ±{(high - low) * 500:.1g}"
        for other in ("eager", RIVALS.get(name)):
            if other in entry["ratios"][kind]:
                text += f"  {entry['ratios'][kind][other]:.2f}{TIMES}"
        yield text


def contenders_of(figures: dict[str, Any]) -> list[str]:
    found = {name for row in figures["rows"] for name in row["contenders"]}
    return [name for name in CONTENDERS if name in found]


def table(figures: dict[str, Any]) -> Table:
    """All rows that were measured."""
    names, result = contenders_of(figures), Table()
    for column in ("network", "GroupNorms", "precision", "mode", ""):
        result.add_column(column)
    for name in names:
        result.add_column(name, justify="right")
    for row in figures["rows"]:
        if row["status"] != "timed":
            continue
        kinds = dict.fromkeys(k for entry in row["contenders"].values() for k in entry["times"])
        norms = row["norms"]
        fused = f"{norms['all']}: {norms['fused']} fused, {norms['alone']} alone" if norms else ""
        first = [row["network"], fused, row["precision"], row["mode"]]
        for i, kind in enumerate(kinds or [""]):
            result.add_row(
                *(first if i == 0 else [""] * 4),
                kind,
                *cells(row, kind, names),
                end_section=i == len(kinds) - 1,
            )
    return result


def remarks(figures: dict[str, Any]) -> Iterator[str]:
    """One line for each reason why something is missing or wrong."""
    where: dict[str, list[str]] = {}
    for row in figures["rows"]:
        case = f"{row['network']}, {row['precision']}, {row['mode']}"
        for who, entry in {"": row, **row["contenders"]}.items():
            if entry["reason"]:
                where.setdefault(entry["reason"], []).append(f"{case}, {who}".rstrip(", "))
    for reason, places in where.items():
        more = f" and {len(places) - 1} more" if len(places) > 1 else ""
        yield f"{places[0]}{more}: {reason}"


def markdown(figures: dict[str, Any]) -> Iterator[str]:
    """A table for a README: ms of a call, and in parentheses in a CUDA graph; then ratios."""
    names = contenders_of(figures)
    pairs = [("optimize", "eager"), *RIVALS.items()]
    pairs = [(ours, theirs) for ours, theirs in pairs if ours in names and theirs in names]
    ratios = [f"{theirs} : {ours}" for ours, theirs in pairs]
    head = ["network", "GroupNorms", "fused + alone", "precision", "mode", *names, *ratios]
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    for row in figures["rows"]:
        if row["status"] != "timed":
            continue
        norms = row["norms"]
        line = [row["network"]]
        line += [str(norms["all"]), f"{norms['fused']} + {norms['alone']}"] if norms else ["", ""]
        line += [row["precision"], row["mode"]]
        for name in names:
            times = row["contenders"].get(name, {}).get("times", {})
            line.append(by_kind({k: f"{t['median_s'] * 1e3:.3g}" for k, t in times.items()}))
        for ours, theirs in pairs:
            ratio = row["contenders"].get(ours, {}).get("ratios", {})
            found = {k: f"{r[theirs]:.2f}" for k, r in ratio.items() if theirs in r}
            line.append(by_kind(found, f" {TIMES}"))
        yield f"| {' | '.join(line)} |"


def by_kind(values: dict[str, str], unit: str = "") -> str:
    call, graph = values.get("call"), values.get("graph")
    return " ".join(filter(None, [call and call + unit, graph and f"({graph}{unit})"]))


# ---- the command line -----------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flag = argparse.BooleanOptionalAction
    has_gpu = torch.cuda.is_available()
    parser.add_argument(
        "--only", nargs="+", metavar="GLOB", default=[""], help="networks with this in their name"
    )
    parser.add_argument(
        "--precision", nargs="+", choices=DTYPES, help="of these alone (tf32: on CUDA only)"
    )
    parser.add_argument("--mode", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if has_gpu else "cpu")
    parser.add_argument("--small", action="store_true", help="small networks, to try the script")
    parser.add_argument("--compile", action=flag, default=True, help="time torch.compile too")
    parser.add_argument("--tune", action="store_true", help='the backend with {"tune": True} too')
    parser.add_argument("--max-autotune", action="store_true", help="both with this mode too")
    parser.add_argument(
        "--jobs",
        type=int,
        default=os.cpu_count() or 1,
        help="how many cases are prepared at a time (%(default)s): fewer if memory is short",
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=330,
        metavar="SECONDS",
        help="give cases up that are not prepared after this time (%(default)s)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=1.0,
        help="for the times of one case called, and again in graphs (%(default)s)",
    )
    parser.add_argument("--rounds", type=int, default=31, help="readings, at most (%(default)s)")
    parser.add_argument("--calls", type=int, default=3, help="calls in a row (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures, row by row")
    parser.add_argument("--show", type=Path, metavar="FILE", help="measure nothing, show such")
    parser.add_argument("--markdown", action="store_true", help="print a table for a README too")
    options = parser.parse_args()

    if options.show:
        figures = json.loads(options.show.read_text(encoding="utf-8"))
        show(figures, options.markdown)
        return 0
    if min(options.jobs, options.calls, options.rounds - 1) < 1:
        parser.error("expected --jobs and --calls of 1 or more, and --rounds of 2 or more")
    networks = [
        name
        for name in NETWORKS
        if any(fnmatch.fnmatchcase(name, f"*{pattern}*") for pattern in options.only)
    ]
    precisions = options.precision or [
        name for name in DTYPES if name != "tf32" or options.device == "cuda"
    ]
    if not networks or (options.device == "cpu" and "tf32" in precisions):
        parser.error("no network has that name" if not networks else "tf32 needs a CUDA device")
    if not library.load():
        parser.error(str(library.failure()))
    names = ["eager", "optimize"]
    names += ["inductor", "backend"] if options.compile else []
    names += ["backend, tune"] if options.tune else []
    names += ["inductor, max-autotune", "backend, max-autotune"] if options.max_autotune else []
    settings = Settings(
        options.device, options.small, tuple(names), options.calls, options.rounds, options.seconds
    )
    # What compiles longest comes first.
    cases = [
        Case(network, precision, mode)
        for precision, mode, network in itertools.product(precisions, MODES, networks)
        if mode in options.mode
    ]
    figures = {
        "machine": {
            "device": torch.cuda.get_device_name()
            if options.device == "cuda"
            else f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
            "platform": platform.platform(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
        },
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "settings": asdict(settings),
        "rows": [],
    }
    bad = False
    for row in run(cases, settings, options.jobs, options.limit):
        bad |= row.bad
        figures["rows"].append(as_dict(row))
        if options.json:
            options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    show(figures, options.markdown)
    return int(bad)


def show(figures: dict[str, Any], as_markdown: bool) -> None:
    order, machine = list(NETWORKS), figures["machine"]
    figures["rows"].sort(key=lambda row: order.index(row["network"]))
    # In a file or a pipe the wide table is not folded.
    Console(width=None if sys.stdout.isatty() else 240).print(table(figures))
    print(
        f"{machine['device']}, torch {machine['torch']}, {figures['date'][:10]}: ms ± half the "
        "interquartile range; eager's time over it; for the backend, Inductor's time over it"
    )
    for lines in (list(remarks(figures)), list(markdown(figures)) if as_markdown else []):
        if lines:
            print("", *lines, sep="\n")


if __name__ == "__main__":
    sys.exit(main())
