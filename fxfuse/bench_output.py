"""What the benchmark shows of its figures: tables and a plot.

Both are made from what is in the JSON file (see `fxfuse/bench.py`), so they can be made again.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from typing import Any

from rich.table import Table

Figures = dict[str, Any]


def _headline(figures: Figures) -> str:
    machine = figures["machine"]
    what = "Backward" if figures["settings"]["backward"] else "Forward"
    return f"{what}, {machine['device']}, torch {machine['torch']}, {figures['date'][:10]}"


def _size(count: float) -> str:
    for unit, scale in (("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} B"


# ---- tables ---------------------------------------------------------------------------------


def times(figures: Figures) -> Table:
    """Every row of the grid with the times of every contender."""
    rows = figures["rows"]
    present = dict.fromkeys(
        name
        for row in rows
        for name, result in row["results"].items()
        if result["status"] != "absent"
    )
    table = Table(
        title=f"{_headline(figures)}: medians in us ± half the interquartile range; "
        f"a large copy moves {figures['bandwidth'] / 1e12:.3g} TB/s",
        caption="\n".join(_remarks(rows)) or None,
        title_justify="left",
        caption_justify="left",
    )
    for column in ("row", "group", ""):
        table.add_column(column)
    for name in present:
        table.add_column(name.replace(" ", "\n"), justify="right")
    for row in rows:
        results = row["results"]
        kinds = dict.fromkeys(kind for result in results.values() for kind in result["times"])
        for i, kind in enumerate(kinds):
            first = [row["name"], _size(row["group_bytes"])] if i == 0 else ["", ""]
            cells = [_cell(results.get(name), kind) for name in present]
            table.add_row(*first, kind, *cells, end_section=i == len(kinds) - 1)
    return table


def _cell(result: Figures | None, kind: str) -> str:
    if result is None:
        return ""
    if result["status"] == "wrong":
        return "WRONG"
    if kind not in result["times"]:
        return ""
    entry = result["times"][kind]
    low, high = entry["quartiles_s"]
    return f"{_microseconds(entry['median_s'], 4)} ±{_microseconds((high - low) / 2, 2)}"


def _microseconds(seconds: float, digits: int) -> str:
    value = seconds * 1e6
    return f"{value:.{digits}g}" if value < 10**digits else f"{value:.0f}"


def _remarks(rows: list[Figures]) -> Iterator[str]:
    """One line for each reason why someone was wrong or absent."""
    where: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        for name, result in row["results"].items():
            if result["reason"]:
                key = (name, result["status"], result["reason"])
                where.setdefault(key, []).append(row["name"])
    for (name, status, reason), names in where.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"{name} {status} in {names[0]}{more}: {reason}"


def summary(figures: Figures) -> Table:
    """How many times as fast fxfuse is as each of the others, on average and at least.

    What runs in a CUDA graph is compared with fxfuse in one, what does not with fxfuse called.
    """
    table = Table(title="The other's time over that of fxfuse", title_justify="left")
    for column in ("other", "", "geometric mean", "least", "in"):
        table.add_column(
            column, justify="right" if column in ("geometric mean", "least") else "left"
        )
    ratios: dict[tuple[str, str], dict[str, float]] = {}
    for row in figures["rows"]:
        for name, result in row["results"].items():
            in_graph = result["status"] == "floor" or name.endswith(" graph")
            ours = row["results"].get("fxfuse graph" if in_graph else "fxfuse")
            ours = ours or row["results"].get("fxfuse")
            if ours is None or name.startswith("fxfuse"):
                continue
            for kind in result["times"].keys() & ours["times"].keys():
                ratio = result["times"][kind]["median_s"] / ours["times"][kind]["median_s"]
                ratios.setdefault((name, kind), {})[row["name"]] = ratio
    for (name, kind), by_row in sorted(ratios.items()):
        least = min(by_row, key=by_row.__getitem__)
        mean = statistics.geometric_mean(by_row.values())
        table.add_row(name, kind, f"{mean:.2f}", f"{by_row[least]:.2f}", least)
    return table


# ---- the plot -------------------------------------------------------------------------------

_FLOORS = {"copy": "a copy", "add": "an addition", "linear": "the Linear"}


def plot(figures: Figures, file: str) -> None:
    """Draws how near each contender comes to the floor, against the bytes of a group.

    With `--chain` it is the time over that of the Linear alone, against the features that it sums
    over, and of what runs both ways that in graphs.  A point is a row; a line goes through the
    medians of the rows that are about as large, to the nearest power of two.

    Args:
        figures: As in the JSON file.
        file: Where the plot goes; its suffix says in which format.

    Raises:
        ImportError: If matplotlib is missing; it is in the extra `bench`.
    """
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter

    rows = figures["rows"]
    on_cpu, chain = figures["settings"]["device"] == "cpu", figures["settings"]["chain"]
    kind = "warm" if on_cpu else "cold"
    points: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        for name, result in row["results"].items():
            in_graph_too = chain and f"{name} graph" in row["results"]
            if name == row["floor"] or in_graph_too or kind not in result["ratios"]:
                continue
            ratio = result["ratios"][kind]["to_floor"]
            point = (row["in_features"], ratio) if chain else (row["group_bytes"], 1 / ratio)
            points.setdefault(name, []).append(point)
    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    families = list(dict.fromkeys(name.removesuffix(" graph") for name in points))
    for name, pairs in points.items():
        classes: dict[int, list[float]] = {}
        for size, fraction in pairs:
            classes.setdefault(2 ** round(math.log2(size)), []).append(fraction)
        sizes = sorted(classes)
        medians = [statistics.median(classes[size]) for size in sizes]
        width = 2.5 if name.startswith("fxfuse") else 1
        style = "-" if on_cpu or name.endswith(" graph") else ":"
        color = f"C{families.index(name.removesuffix(' graph'))}"
        axes.plot(sizes, medians, style, label=name, linewidth=width, color=color)
        axes.scatter([x for x, _ in pairs], [y for _, y in pairs], s=8, color=color, alpha=0.5)
    floor = " or ".join(dict.fromkeys(_FLOORS[row["floor"]] for row in rows))
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    text = "{:g}".format if chain else _size
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))
    if chain:
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))
        axes.set_xlabel("features of the Linear's input, K")
        axes.set_ylabel(f"time over that of {floor} alone")
    else:
        axes.set_ylim(bottom=0)
        axes.set_xlabel("bytes of a group")
        axes.set_ylabel(f"fraction of the speed of {floor} of the same tensor")
    axes.set_title(_headline(figures) + ("" if on_cpu else ", cold L2 cache"), fontsize=10)
    axes.legend(fontsize=8)
    figure.savefig(file, dpi=150)
    pyplot.close(figure)
