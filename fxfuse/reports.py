"""Reports as text: what was fused, what was not, and why."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fxfuse.rewrite import FusionReport


def render(report: FusionReport, width: int = 120) -> str:
    """A report as a table for a terminal.

    Args:
        report: The report.
        width: The table's greatest width, in characters.
    """
    # Here, because importing fxfuse should not wait for what only a report needs.
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("", "site", "producer", "norm", "activation", "reason"):
        table.add_column(heading, overflow="fold")
    for site in report.sites:
        table.add_row(
            "fused" if site.fused else site.code,
            "\n".join(filter(None, (site.module, site.source))),
            site.producer,
            site.norm,
            site.activation,
            site.reason,
        )
    counts = (
        f"{len(report.sites)} GroupNorms: {report.fused} fused, {report.refused} left as they were"
    )
    console = Console(file=io.StringIO(), width=width, markup=False, highlight=False)
    if report.sites:
        console.print(table)
    console.print(counts)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines())
