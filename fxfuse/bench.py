"""The benchmark: GroupNorm and its activation against what else there is, in one process.

Every row of the grid (`bench_grid.py`) is a tensor. Each contender first computes it and is
compared with float64; one that is wrong is reported and not timed. Then all are timed in turn,
beside a floor: one pass over the same tensor (``copy_``; for the backward ``torch.add``, which
reads two tensors and writes one as it must), or with ``--chain`` the Linear alone. Inputs, scale,
shift and gradients are random.

What is timed, all medians with quartiles:

======== =======================================================================================
cold     CUDA: one call between two events, which add some 3 us, after the L2 cache was flushed by
         writing and then reading four times its size. The flush keeps the GPU busy while the call
         is enqueued, so launching counts only where it takes longer than the flush.
hot      The same after one more call, which leaves in the cache what fits.
rotating CUDA: one of many calls in a row over several sets of tensors, so that all but small ones
         are cold, without the cost of events. In a graph this is the GPU's time; outside it is the
         larger of the GPU's and the CPU's. Left out for tensors of more than four L2 caches, where
         events cost nothing, and with ``--chain``.
host     CUDA, up to 1 MiB: the CPU's time for a call without grad that nobody waits for.
warm     CPU: one call. Its tensors are as warm as the other contenders' calls leave them.
======== =======================================================================================

The JSON file:

- ``machine`` (``device``, ``platform``, ``torch``, ``cuda``, ``threads``), ``date`` (ISO 8601),
  ``settings`` (the options), ``bandwidth`` (of a large copy in this run, in bytes read and written
  per second), and
- ``rows``, one for each tensor: ``name``, ``shape``, ``num_groups``, ``activation``, ``params``,
  ``dtype``, ``channels_last``, ``in_features`` (of the Linear, or null), ``bytes`` of the
  normalised tensor, ``group_bytes``, ``floor`` (a name in ``results``), and
- ``results``, by contender: ``status`` (``"right"``, ``"wrong"``, ``"absent"`` or ``"floor"``);
  ``reason`` where wrong or absent; ``errors`` of the output, or of the gradients of input, weight
  and bias, each with ``relative`` (2-norm over 2-norm), ``max`` (largest error over largest value)
  and ``slope`` (of the regression on the reference, minus 1; null for small tensors), all null
  where they are not finite; ``times``, by kind: ``median_s``, ``quartiles_s``, ``repeats``;
  ``ratios``, by kind: ``to_floor``, the time over the floor's, and ``bandwidth``, the fraction of
  ``bandwidth`` that is reached if each tensor is moved once (null with ``--chain``).
"""

from __future__ import annotations

import contextlib
import datetime
import fnmatch
import functools
import importlib
import json
import math
import multiprocessing
import platform
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from fxfuse import bench_output, library, ops, timing
from fxfuse.bench_grid import GRIDS, PARAMS, Row

EPS = 1e-5


@dataclass(frozen=True)
class Settings:
    """What to run, and how.

    Attributes:
        grid: `"quick"` or `"full"`.
        dtypes: Rows of other dtypes are left out; None for all.
        only: Rows whose name does not contain this glob pattern are left out.
        backward: Time the backward alone, after a forward that is not timed.
        chain: Time Linear, GroupNorm and the activation; the floor is the Linear.
        tf32: Let float32 matmuls use TF32.
        inductor: Whether Inductor takes part.
        max_autotune: Tune every row; else those of the quick grid alone.
        jobs: How many processes compile for Inductor before the timing starts.
        rounds: The greatest number of readings.
        seconds: When to stop reading the clocks of one kind in one row.
    """

    grid: str = "quick"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtypes: tuple[torch.dtype, ...] | None = None
    only: str = ""
    backward: bool = False
    chain: bool = False
    tf32: bool = False
    inductor: bool = False
    max_autotune: bool = False
    jobs: int = 1
    rounds: int = 31
    seconds: float = 5.0

    @property
    def rows(self) -> list[Row]:
        """The grid's rows that are asked for."""
        return [
            row
            for row in GRIDS[self.grid, self.chain]
            if (self.dtypes is None or row.dtype in self.dtypes)
            and fnmatch.fnmatchcase(row.name, f"*{self.only}*")
        ]

    @property
    def passes(self) -> int:
        """How often at least the tensor's bytes are moved."""
        return 3 if self.backward else 2


# ---- the contenders -------------------------------------------------------------------------

Function = Callable[..., Tensor]  # of the tensor, and the parameters of Linear and norm


class AbsentError(Exception):
    """This contender does not take part in this row; the message says why."""


def _whole(row: Row, norm_activation: Function) -> Function:
    """Puts the Linear before it, where the row has one."""
    if row.in_features is None:
        return norm_activation

    def chain(x: Tensor, weight: Tensor, bias: Tensor, *affine: Tensor) -> Tensor:
        return norm_activation(F.linear(x, weight, bias), *affine)

    return chain


def _activation(row: Row) -> Callable[[Tensor], Tensor]:
    function, params = ops.ACTIVATIONS[row.activation], PARAMS[row.activation]
    return lambda z: function(z, *params)


def _eager(row: Row) -> Function:
    activation = _activation(row)

    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return activation(F.group_norm(x, row.num_groups, weight, bias, EPS))

    return _whole(row, function)


def _fxfuse(row: Row) -> Function:
    """The operator as a rewritten graph calls it."""
    params = PARAMS[row.activation]

    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return ops.group_norm_activation(
            x, row.num_groups, weight, bias, EPS, row.activation, params
        )

    return _whole(row, function)


def _one_operator(row: Row) -> Function:
    """The operator that takes the Linear in: one kernel where there is one, else the two."""
    params = PARAMS[row.activation]

    def function(
        x: Tensor, linear_weight: Tensor, linear_bias: Tensor, weight: Tensor, bias: Tensor
    ) -> Tensor:
        return ops.linear_group_norm_activation(
            x,
            linear_weight,
            linear_bias,
            row.num_groups,
            weight,
            bias,
            EPS,
            row.activation,
            params,
        )

    return function


def _inductor(row: Row) -> Function:
    compiled: Function = torch.compile(_eager(row), dynamic=False)
    return compiled


def _max_autotune(row: Row) -> Function:
    # without graphs, which would copy the inputs: we capture our own
    mode = "max-autotune-no-cudagraphs"
    compiled: Function = torch.compile(_eager(row), dynamic=False, mode=mode)
    return compiled


def _liger(row: Row) -> Function:
    """Liger's GroupNorm, then the activation."""
    try:
        group_norm = importlib.import_module("liger_kernel.ops.group_norm").LigerGroupNormFunction
    except ImportError as error:
        raise AbsentError(f"cannot be imported: {error}") from None
    activation = _activation(row)

    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        flat = x.reshape(x.shape[0], x.shape[1], -1)  # older ones need three dimensions
        y = group_norm.apply(flat, weight, bias, x.shape[1], row.num_groups, EPS)
        return activation(y.view(x.shape))

    return _whole(row, function)


def _apex(row: Row) -> Function:
    """Apex's GroupNorm, with its own SiLU or any other activation after it."""
    try:
        group_norm = importlib.import_module("apex.contrib.group_norm").GroupNorm
    except ImportError as error:
        raise AbsentError(f"cannot be imported: {error}") from None
    if not row.channels_last or len(row.shape) != 4:
        raise AbsentError("for channels_last images only")
    has_silu = row.activation == "silu"
    module = group_norm(
        row.num_groups,
        row.shape[1],
        EPS,
        device="cuda",
        dtype=row.dtype,
        act="silu" if has_silu else "",
    )
    activation = _activation(row)

    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if not module._check_legality(x):  # it would run torch's
            raise AbsentError("no kernel for these channels, groups or dtype")
        y: Tensor = torch.func.functional_call(module, {"weight": weight, "bias": bias}, (x,))
        return y if has_silu else activation(y)

    return function


@dataclass(frozen=True)
class Contender:
    """One way to compute a row.

    Attributes:
        make: Returns the function, or raises AbsentError.
        graph: Call it as the replay of a CUDA graph; such contenders take no part on the CPU.
        required: It is no one else's fault if it raises.
        inductor: Takes part only where Inductor is asked for.
    """

    name: str
    make: Callable[[Row], Function]
    graph: bool = False
    required: bool = False
    inductor: bool = False


CONTENDERS = [
    Contender("eager", _eager, required=True),
    Contender("eager graph", _eager, graph=True, required=True),
    Contender("inductor", _inductor, inductor=True),
    Contender("inductor graph", _inductor, graph=True, inductor=True),
    Contender("max-autotune graph", _max_autotune, graph=True, inductor=True),
    Contender("liger graph", _liger, graph=True),
    Contender("apex graph", _apex, graph=True),
    Contender("fxfuse", _fxfuse, required=True),
    Contender("fxfuse graph", _fxfuse, graph=True, required=True),
    Contender("fxfuse with Linear", _one_operator, required=True),
    Contender("fxfuse with Linear graph", _one_operator, graph=True, required=True),
]


def _contenders(row: Row, settings: Settings) -> Iterator[Contender]:
    quick = GRIDS["quick", settings.chain]
    for contender in CONTENDERS:
        if contender.graph and settings.device.type != "cuda":
            continue
        if contender.inductor and not settings.inductor:
            continue
        if contender.make is _one_operator and row.in_features is None:
            continue
        if contender.make is _max_autotune and not (settings.max_autotune or row in quick):
            continue
        yield contender


# ---- the work -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inputs:
    """The tensor, the parameters (of the Linear first, if any), and the gradient of the output."""

    tensors: tuple[Tensor, ...]
    grad_output: Tensor | None

    @classmethod
    def empty(cls, row: Row, settings: Settings) -> Inputs:
        """Makes room for them."""
        empty = functools.partial(torch.empty, device=settings.device, dtype=row.dtype)
        channels = row.shape[1]
        affine = (empty(channels), empty(channels))
        if row.in_features is not None:
            linear = (empty(channels, row.in_features), empty(channels))
            return cls((empty(row.shape[0], row.in_features), *linear, *affine), None)
        x = empty(row.shape)
        if row.channels_last:
            formats = {4: torch.channels_last, 5: torch.channels_last_3d}
            x = x.contiguous(memory_format=formats[x.dim()])
        return cls((x, *affine), torch.empty_like(x) if settings.backward else None)

    @classmethod
    def random(cls, row: Row, settings: Settings) -> Inputs:
        """Draws them. The gradient is 0 where rounding decides whether the activation passes it."""
        inputs = cls.empty(row, settings)
        for tensor in inputs.tensors:
            tensor.normal_()
        if row.in_features is not None:
            for tensor in inputs.tensors[1:3]:
                tensor.mul_(row.in_features**-0.5)
        if inputs.grad_output is not None:
            inputs.grad_output.normal_()
            x, weight, bias = inputs.tensors
            margin = 4 * torch.finfo(row.dtype).eps
            bounds = {"hardtanh": PARAMS["hardtanh"], "relu": (0.0,)}.get(row.activation, ())
            for part, grad in zip(_samples(x), _samples(inputs.grad_output), strict=True):
                z = F.group_norm(part.double(), row.num_groups, weight.double(), bias.double(), EPS)
                for bound in bounds:
                    grad.masked_fill_((z - bound).abs() < margin * max(1.0, abs(bound)), 0)
        return inputs

    def again(self) -> Inputs:
        """The same with the tensor and the gradient elsewhere in memory."""
        x, *parameters = self.tensors
        grad_output = None if self.grad_output is None else self.grad_output.clone()
        return Inputs((x.clone(), *parameters), grad_output)


def _samples(tensor: Tensor) -> tuple[Tensor, ...]:
    """Some samples at a time, to bound the memory that float64 takes."""
    return torch.split(tensor, max(1, 2**26 // math.prod(tensor.shape[1:])))


def _work(function: Function, inputs: Inputs) -> Callable[[], tuple[Tensor, ...]]:
    """The forward; or the backward alone, of a forward that is run here."""
    if inputs.grad_output is None:
        return lambda: (function(*inputs.tensors),)
    # Leaves of its own: autograd ties a leaf to the stream that uses it first, and a capture of the
    # backward on another one fails.
    leaves = tuple(t.detach().requires_grad_() for t in inputs.tensors)
    output = function(*leaves)
    # a gradient comes in the layout of the output
    grad_output = torch.empty_like(output).copy_(inputs.grad_output)

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(output, leaves, grad_output, retain_graph=True)

    return backward


Prepare = Callable[[Inputs], timing.Work]


def _floors(row: Row, settings: Settings) -> dict[str, Prepare]:
    """What no kernel can beat; the first one is what others are compared with."""

    def linear(inputs: Inputs) -> timing.Work:
        return functools.partial(F.linear, *inputs.tensors[:3])

    def add(inputs: Inputs) -> timing.Work:
        x, grad_output = inputs.tensors[0], inputs.grad_output
        assert grad_output is not None
        out = torch.empty_like(x)
        return lambda: torch.add(x, grad_output, out=out)

    def copy(inputs: Inputs) -> timing.Work:
        out = torch.empty_like(inputs.tensors[0])
        return lambda: out.copy_(inputs.tensors[0])

    def clone(inputs: Inputs) -> timing.Work:
        return inputs.tensors[0].clone

    if row.in_features is not None:
        return {"linear": linear}
    if settings.backward:
        return {"add": add}
    # on the CPU a fresh output costs page faults, which a copy into a warm one does not have
    return {"copy": copy} if settings.device.type == "cuda" else {"copy": copy, "clone": clone}


def _many(works: list[Callable[[], object]], calls: int) -> timing.Work:
    """Calls the works in turn and keeps the latest result of each, so that outputs rotate too."""
    results: list[object] = [None] * len(works)

    def run() -> None:
        for i in range(calls):
            results[i % len(works)] = works[i % len(works)]()

    return run


# ---- correctness ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Error:
    """Distance of a tensor from the same one computed in float64."""

    relative: float
    max: float
    slope: float | None


@torch.enable_grad()
def reference(row: Row, inputs: Inputs) -> tuple[Tensor, ...]:
    """The output, or the gradients of the tensor and the parameters, in float64."""
    function = _eager(row)
    x, *narrow = inputs.tensors
    parameters = [t.double().requires_grad_() for t in narrow]
    if inputs.grad_output is None:
        outputs = [function(part.double(), *parameters).detach() for part in _samples(x)]
        return (torch.cat(outputs),)
    sums = [torch.zeros_like(t) for t in parameters]
    dinputs = []
    for part, grad in zip(_samples(x), _samples(inputs.grad_output), strict=True):
        wide = part.double().requires_grad_()
        output = function(wide, *parameters)
        dinput, *dparameters = torch.autograd.grad(output, (wide, *parameters), grad.double())
        dinputs.append(dinput)
        for total, gradient in zip(sums, dparameters, strict=True):
            total += gradient
    return (torch.cat(dinputs), *sums)


def compare(result: Tensor, expected: Tensor) -> Error:
    """Compares a result with the float64 reference."""
    square = norm = dot = largest = scale = 0.0
    for got, want in zip(_samples(result), _samples(expected), strict=True):
        got = got.double()
        difference = got - want
        square += difference.square().sum().item()
        norm += want.square().sum().item()
        dot += (difference * want).sum().item()
        # not the builtin: it would drop a NaN
        largest = torch.tensor([largest, difference.abs().max().item()]).max().item()
        scale = max(scale, want.abs().max().item())
    enough = expected.numel() >= 2**14  # for the rounding errors to cancel
    return Error(math.sqrt(square / norm), largest / scale, dot / norm if enough else None)


def fault(error: Error, row: Row, settings: Settings) -> str | None:
    """Says what is wrong, or returns None.

    The norm of the difference alone would not see a variance that is off by less than the dtype
    rounds: hence the slope, in which rounding cancels.  Not that of the statistics, which eager's
    CUDA kernel keeps in the input's dtype: 4.5e-4 with 64 groups (bfloat16, H200, 2026-11-30).
    """
    tf32 = settings.tf32 and row.dtype == torch.float32
    eps = 2.0**-10 if tf32 else torch.finfo(row.dtype).eps
    # float32 results differ by the order of their sums too, 16-bit ones are accumulated wider
    factor = 1 if row.dtype.itemsize == 2 or tf32 else 16
    if row.in_features is not None or settings.backward:
        factor *= 4
    limits = {
        "relative": factor * eps,
        "max": 4 * factor * eps,
        "slope": factor * max(eps / (4 if row.dtype.itemsize == 2 else 32), 1e-7),
    }
    for name, limit in limits.items():
        value = getattr(error, name)
        if value is not None and not abs(value) <= limit:
            return f"{name} error {value:.1e}, allowed {limit:.1e}"
    return None


# ---- one row --------------------------------------------------------------------------------


@dataclass
class Result:
    """What is known of one contender in one row."""

    status: str
    reason: str | None = None
    errors: list[Error] = field(default_factory=list)
    times: dict[str, timing.Timing] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """What is timed: a floor, or a contender that is right."""

    prepare: Prepare
    graph: bool

    def work(self, inputs: Inputs) -> timing.Work:
        """One call."""
        if self.graph:
            return timing.capture(lambda: self.prepare(inputs))
        return self.prepare(inputs)

    def rotating(self, sets: list[Inputs], calls: int) -> timing.Work:
        """Many calls in a row."""

        def prepare() -> timing.Work:
            return _many([self.prepare(inputs) for inputs in sets], calls)

        return timing.capture(prepare, warm_ups=1) if self.graph else prepare()


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def run_row(row: Row, settings: Settings, show: Callable[[str], None]) -> dict[str, Result]:
    """Checks and times every contender of one row."""
    inputs = Inputs.random(row, settings)
    expected = reference(row, inputs)
    results: dict[str, Result] = {}
    jobs: dict[str, Job] = {}
    works: dict[str, timing.Work] = {}
    on_cuda = settings.device.type == "cuda"
    for name, prepare in _floors(row, settings).items():
        results[name] = Result("floor")
        jobs[name] = Job(prepare, graph=on_cuda)
        works[name] = jobs[name].work(inputs)

    make = functools.cache(lambda maker: maker(row))  # a graph is of the function outside of one
    for contender in _contenders(row, settings):
        show(f"checking {contender.name}")
        try:
            job = Job(functools.partial(_work, make(contender.make)), contender.graph)
            work = job.work(inputs)
            result = _check(work, job.graph, expected, row, settings)
        except AbsentError as error:
            result = Result("absent", str(error))
        except Exception as error:  # others may fail, the benchmark goes on
            status = "wrong" if contender.required else "absent"
            result = Result(status, _first_line(error))
        results[contender.name] = result
        if result.status == "right":
            jobs[contender.name], works[contender.name] = job, work
    del expected

    for kind, clocks in _clocks(row, settings, inputs, jobs, works):
        show(f"timing, {kind}")
        timings = timing.in_turn(
            clocks, seconds=settings.seconds, rounds=(min(3, settings.rounds), settings.rounds)
        )
        for name, entry in timings.items():
            results[name].times[kind] = entry
    return results


def _check(
    work: timing.Work, graph: bool, expected: tuple[Tensor, ...], row: Row, settings: Settings
) -> Result:
    outputs = work()
    assert isinstance(outputs, tuple)
    if graph:  # the tensors hold what was computed before: see that they are written
        for output in outputs:
            output.fill_(math.nan)
        work()
    for got, want in zip(outputs, expected, strict=True):
        if got.shape != want.shape or got.dtype != row.dtype:
            return Result("wrong", f"gives {got.dtype} of shape {tuple(got.shape)}")
    errors = [compare(got, want) for got, want in zip(outputs, expected, strict=True)]
    faults = [why for error in errors if (why := fault(error, row, settings))]
    return Result("wrong" if faults else "right", "; ".join(faults) or None, errors)


def _clocks(
    row: Row,
    settings: Settings,
    inputs: Inputs,
    jobs: dict[str, Job],
    works: dict[str, timing.Work],
) -> Iterator[tuple[str, dict[str, timing.Clock]]]:
    """The clocks of each kind of time; made when asked for, for they hold memory."""
    if settings.device.type == "cpu":
        yield "warm", {name: timing.cpu_clock(work) for name, work in works.items()}
        return
    flush = timing.l2_flush()
    for kind in ("cold", "hot"):
        yield (
            kind,
            {
                name: timing.cuda_clock(work, before=flush, hot=kind == "hot")
                for name, work in works.items()
            },
        )
    if row.bytes <= 2**20 and not settings.backward:
        yield (
            "host",
            {
                name: timing.host_clock(works[name], calls=200)
                for name, job in jobs.items()
                if not job.graph
            },
        )
    cache = torch.cuda.get_device_properties().L2_cache_size
    if row.bytes <= 4 * cache and row.in_features is None:
        # input and output of all sets together are three caches or more, but for tiny tensors
        sets = [inputs.again() for _ in range(min(12, max(3, math.ceil(1.5 * cache / row.bytes))))]
        calls = min(40, max(8, 10**9 // row.bytes))
        yield (
            "rotating",
            {
                name: timing.cuda_clock(
                    job.rotating(sets, calls),
                    # What keeps the GPU busy would hide the launches of calls without a graph.
                    before=flush if job.graph else torch.cuda.synchronize,
                    calls=calls,
                )
                for name, job in jobs.items()
            },
        )


# ---- Inductor, beforehand -------------------------------------------------------------------


def _compile_rows(rows: list[Row], settings: Settings) -> None:
    """Puts Inductor's kernels for these rows into its cache on disk."""
    from torch._inductor import config

    for row in rows:
        torch._dynamo.reset()
        with (
            # What fails here fails again where it is reported.
            contextlib.suppress(Exception),
            # Each kernel has a few variants. The fastest is not written down here, where others
            # disturb it: the process that has the GPU for itself tries them again.
            config.patch(autotune_local_cache=False, compile_threads=1),
            _torch_settings(settings),
        ):
            _work(_inductor(row), Inputs.empty(row, settings))()


@contextlib.contextmanager
def _torch_settings(settings: Settings) -> Iterator[None]:
    from torch._functorch import config

    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = settings.tf32
    # a backward that is called again must not write over what the forward saved
    with torch.set_grad_enabled(settings.backward), config.patch(donated_buffer=False):
        yield
    torch.backends.cuda.matmul.allow_tf32 = before


def _compile_beforehand(settings: Settings) -> None:
    """Compiles the rows for Inductor in several processes; alone, one takes seconds for each."""
    rows = settings.rows
    jobs = min(settings.jobs, len(rows))
    if jobs < 2:
        return
    # Spawned: a fork cannot use the CUDA context that this process has.
    context = multiprocessing.get_context("spawn")
    work = functools.partial(_compile_rows, settings=settings)
    with (
        contextlib.suppress(BrokenProcessPool),  # then the rest is compiled when its row comes
        ProcessPoolExecutor(jobs, mp_context=context) as pool,
    ):
        list(pool.map(work, [rows[i::jobs] for i in range(jobs)]))


# ---- all of it ------------------------------------------------------------------------------


def run(
    settings: Settings,
    out: Console,
    json_file: str | None = None,
    plot_file: str | None = None,
) -> int:
    """Runs the benchmark and prints its tables.

    Args:
        settings: What to run.
        out: Where the tables go.
        json_file: Where the figures go as JSON (see the module's docstring), after every row: a
            path, "-" for stdout at the end, or None.
        plot_file: Where the plot goes, or None. The format is that of the name's suffix.

    Returns:
        The exit code: 1 if a contender was wrong, or there is no library to measure.
    """
    if problem := _missing_library(settings.device):
        print(f"fxfuse bench: {problem}", file=sys.stderr)
        return 1
    stderr = Console(stderr=True)
    torch.manual_seed(0)
    # Redrawn only when told: a thread that draws would take a core from what is timed.
    progress = Progress(
        console=stderr, transient=True, disable=not stderr.is_terminal, auto_refresh=False
    )
    on_cuda = settings.device.type == "cuda"
    on_device = torch.cuda.device(settings.device) if on_cuda else contextlib.nullcontext()
    rows = settings.rows
    wrong = False
    with progress, on_device, _torch_settings(settings):
        task = progress.add_task("", total=len(rows))
        if settings.inductor:
            progress.update(task, description="compiling for Inductor", refresh=True)
            _compile_beforehand(settings)
        figures = _machine(settings) | {"rows": []}
        for row in rows:

            def show(what: str, row: Row = row) -> None:
                progress.update(task, description=f"{row.name}: {what}", refresh=True)

            if progress.disable:  # a sign of life in a log
                done = len(figures["rows"])
                print(f"{done + 1} of {len(rows)}: {row.name}", file=sys.stderr, flush=True)
            results = run_row(row, settings, show)
            wrong |= any(result.status == "wrong" for result in results.values())
            figures["rows"].append(_figures(row, settings, results, figures["bandwidth"]))
            if json_file not in (None, "-"):
                _write(str(json_file), figures)
            progress.advance(task)
            torch._dynamo.reset()
            if on_cuda:
                torch.cuda.empty_cache()
    for table in (bench_output.times(figures), bench_output.summary(figures)):
        out.print("", table, sep="\n")
    if json_file == "-":
        print(json.dumps(figures, indent=1))
    if plot_file is not None:
        bench_output.plot(figures, plot_file)
    return int(wrong)


def _missing_library(device: torch.device) -> str | None:
    if not library.load():
        return str(library.failure())
    key = "CUDA" if device.type == "cuda" else "CPU"
    if not torch._C._dispatch_has_kernel_for_dispatch_key("fxfuse::group_norm_activation", key):
        return f"the library was built without kernels for {key}; see 'python -m fxfuse doctor'"
    return None


def _machine(settings: Settings) -> dict[str, Any]:
    """Everything in the JSON file but the rows."""
    cuda = settings.device.type == "cuda"
    device = (
        torch.cuda.get_device_name()
        if cuda
        else f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    )
    source = torch.empty(2**30 if cuda else 2**28, dtype=torch.uint8, device=settings.device)
    source.random_()
    target = torch.empty_like(source)
    copy = functools.partial(target.copy_, source)
    clock = timing.cuda_clock(copy) if cuda else timing.cpu_clock(copy)
    timings = timing.in_turn({"copy": clock}, seconds=5.0, rounds=(3, 11))
    options = asdict(settings) | {"device": str(settings.device)}
    if settings.dtypes is not None:
        options["dtypes"] = [str(dtype) for dtype in settings.dtypes]
    return {
        "machine": {
            "device": device,
            "platform": platform.platform(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda if cuda else None,
            "threads": torch.get_num_threads(),
        },
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "settings": options,
        "bandwidth": 2 * source.nbytes / timings["copy"].median_s,
    }


def _figures(
    row: Row, settings: Settings, results: dict[str, Result], bandwidth: float
) -> dict[str, Any]:
    """One row of the JSON file."""
    floor = next(name for name, result in results.items() if result.status == "floor")
    least = None if row.in_features is not None else settings.passes * row.bytes / bandwidth
    entries: dict[str, Any] = {}
    for name, result in results.items():
        entries[name] = asdict(result)
        for error in entries[name]["errors"]:  # JSON has no NaN
            error.update({k: None for k, v in error.items() if v is None or not math.isfinite(v)})
        entries[name]["ratios"] = {
            kind: {
                "to_floor": entry.median_s / results[floor].times[kind].median_s,
                "bandwidth": None if least is None else least / entry.median_s,
            }
            for kind, entry in result.times.items()
            if kind in results[floor].times
        }
    return {
        "name": row.name,
        "shape": row.shape,
        "num_groups": row.num_groups,
        "activation": row.activation,
        "params": PARAMS[row.activation],
        "dtype": row.precision,
        "channels_last": row.channels_last,
        "in_features": row.in_features,
        "bytes": row.bytes,
        "group_bytes": row.group_bytes,
        "floor": floor,
        "results": entries,
    }


def _write(file: str, figures: dict[str, Any]) -> None:
    with open(file, "w", encoding="utf-8") as stream:
        json.dump(figures, stream, indent=1)
        stream.write("\n")
