"""Clocks: what `demo` and `bench` time with, in one place.

A clock runs a piece of work once and returns the seconds it took. Clocks are read in turn, one
reading of each per round, so that a change of the machine's clocks or load meets all alike; what is
reported is a median with its quartiles.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

Work = Callable[[], object]
Clock = Callable[[], float]
T = TypeVar("T")


@dataclass(frozen=True)
class Timing:
    """The readings of one clock: their median and quartiles, in seconds, and how many."""

    median_s: float
    quartiles_s: tuple[float, float]
    repeats: int

    @classmethod
    def of(cls, readings: list[float]) -> Timing:
        """Sums up two or more readings."""
        low, median, high = statistics.quantiles(readings, n=4, method="inclusive")
        return cls(median, (low, high), len(readings))


def in_turn(
    clocks: Mapping[str, Clock],
    *,
    seconds: float,
    rounds: tuple[int, int],
    on_round: Callable[[float], None] = lambda elapsed: None,
) -> dict[str, Timing]:
    """Reads every clock once per round, after one reading of each that does not count.

    Args:
        clocks: The clocks by name.
        seconds: When to stop, after the round that is under way.
        rounds: The least number of rounds (two or more), and the greatest.
        on_round: Told before each round how many seconds have passed.
    """
    for clock in clocks.values():
        clock()
    readings: dict[str, list[float]] = {name: [] for name in clocks}
    start = time.perf_counter()
    for done in range(rounds[1]):
        elapsed = time.perf_counter() - start
        on_round(elapsed)
        if done >= rounds[0] and elapsed > seconds:
            break
        for name, clock in clocks.items():
            readings[name].append(clock())
    return {name: Timing.of(values) for name, values in readings.items()}


def cpu_clock(work: Work) -> Clock:
    """Times one call on the CPU."""

    def clock() -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    return clock


def host_clock(work: Work, calls: int) -> Clock:
    """Times the CPU's side of a CUDA call: the mean of calls in a row that nobody waits for.

    The GPU must be no slower than the CPU, or its queue (about 1000 launches) must not fill up.
    """

    def clock() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            work()
        seconds = time.perf_counter() - start
        torch.cuda.synchronize()
        return seconds / calls

    return clock


def cuda_clock(
    work: Work, *, before: Work = lambda: None, hot: bool = False, calls: int = 1
) -> Clock:
    """Times work on the GPU with a pair of events, which add some 3 us.

    Args:
        work: What to time: best a replay of :func:`capture`, so that only the GPU's work counts.
        before: Enqueued before the first event, not timed. What it enqueues keeps the GPU busy
            while the CPU enqueues the rest; without it, launching counts too.
        hot: Do the work once more, not timed, between `before` and the first event.
        calls: How often `work` does what is to be timed once.
    """
    start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    stop = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def clock() -> float:
        before()
        if hot:
            work()
        start.record()
        work()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) * 1e-3 / calls

    return clock


def capture(prepare: Callable[[], Callable[[], T]], warm_ups: int = 3) -> Callable[[], T]:
    """Captures work in a CUDA graph.

    Args:
        prepare: Returns the work. Called on the stream of the capture, so that the backward of a
            forward that it runs is on that stream too.
        warm_ups: How often the work is done before the capture.

    Returns:
        A function that replays the graph. It returns what the work returned at capture: the
        tensors that a replay writes.
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work = prepare()
        for _ in range(warm_ups):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        result = work()
    kept = (work, result)  # the work holds tensors that the graph reads

    def replay() -> T:
        graph.replay()
        return kept[1]

    return replay


def l2_flush() -> Work:
    """Returns work that empties the L2 cache of the current GPU.

    Four times its size is written, then as much read: what stays behind are clean lines, whose
    eviction costs no write that the next kernel would be charged with.
    """
    size = 4 * torch.cuda.get_device_properties().L2_cache_size
    written = torch.empty(size, dtype=torch.uint8, device="cuda")
    read = torch.zeros(size // 4, dtype=torch.float32, device="cuda")

    def flush() -> object:
        written.zero_()
        return read.sum()

    return capture(lambda: flush)


def text(seconds: float) -> str:
    """A time to three digits, in the unit that suits it."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
