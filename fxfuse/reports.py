"""Reports for people and machines: what was fused, what was not, why, and what would change it."""

from __future__ import annotations

import dataclasses
import io
import re
from typing import TYPE_CHECKING, Any

from fxfuse.rewrite import FusionReport, Reason, Site

if TYPE_CHECKING:
    from torch import nn

FUSED = "Nothing is left to do."
NOT_FOR_A_USER = "Nothing: fusing here would change what the model computes."

# What would make a site fusible, for each reason that it is not.
REMEDIES: dict[Reason, str] = {
    Reason.FUSED: FUSED,
    Reason.ALREADY_FUSED: FUSED,
    Reason.FUSIBLE: "Call fxfuse.optimize(model), or fxfuse.fuse on a graph.",
    Reason.ALONE: "An activation right after the norm, which the norm would then take in.",
    Reason.LIBRARY_UNAVAILABLE: "Run `python -m fxfuse doctor`: it says what is missing.",
    Reason.GRAPH_OUTPUT: "Apply the activation in the module that calls the norm, or give both a "
    "common parent that can be traced.",
    Reason.OTHER_READER: "Let the activation alone read the norm's result.",
    Reason.WRITTEN_IN_PLACE: "Write to a copy instead, or after the activation.",
    Reason.NO_READER: "Remove the norm: nothing uses its result.",
    Reason.NO_ACTIVATION: "An activation right after the norm; one that fxfuse does not know can "
    "be added to its table.",
    Reason.NOT_THE_INPUT: NOT_FOR_A_USER,
    Reason.WRITTEN_MEANWHILE: "Write to a copy instead, or after the sum.",
    Reason.MODE_SWITCH: "Change the mode before the norm or after the activation.",
    Reason.DROPOUT: "Put the dropout after the activation, or p = 0.",
    Reason.OTHER_GRADIENT: "Write it as one call, or decompose it later than the pass.",
    Reason.CAST: "Cast before the norm or after the activation.",
    Reason.TENSOR_BOUND: "Give the bound as a Python number.",
    Reason.NAN_BOUND: "Give a bound that is a number.",
    Reason.CROSSED_BOUNDS: "Give bounds with min_val <= max_val: torch raises for these.",
    Reason.NO_BOUND: "Give clamp a bound: torch raises without one.",
    Reason.OUT_ARGUMENT: "Use the function's result instead of out=.",
    Reason.CLAMP_GRADIENT: "Use hardtanh, or report the torch version to fxfuse.",
    Reason.COMPUTED_ARGUMENT: "Give the argument as a Python number.",
    Reason.BAD_NUM_GROUPS: "Give a num_groups that divides the channels: torch raises otherwise.",
    Reason.OTHER_SIZES: "Keep the fake tensors that tracing records, or call group_norm.",
    Reason.BAD_AFFINE: "Give weight and bias one floating-point value per channel.",
    Reason.SUBCLASS: "Use nn.GroupNorm itself, or a forward in which F.group_norm can be traced.",
    Reason.PARAMETRIZED: "Remove the parametrization (torch.nn.utils.parametrize), if it is done "
    "with.",
    Reason.HOOKS: "Remove the hooks, or put them on a module around both.",
    Reason.OWN_FORWARD: "Define forward in the class instead of setting it on the instance.",
    Reason.UNTRACEABLE: "Move norm and activation into a module of their own, whose forward does "
    "not depend on values.",
    Reason.CONTEXT_MANAGER: "Move norm and activation into a module of their own, called inside "
    "the context.",
    Reason.RANDOM_NUMBER: "Move norm and activation into a module of their own, without the "
    "random number.",
    Reason.TENSOR_CONSTANT: "Register the tensor as a buffer, or move norm and activation into a "
    "module of their own.",
    Reason.NOT_REPEATED: "Move norm and activation into a module of their own, whose forward "
    "calls nothing but torch.",
    Reason.CHANGES_STATE: "Move norm and activation into a module of their own, whose forward "
    "sets no attribute.",
    Reason.MUTABLE_ATTRIBUTE: "Keep the attribute as a number, string or tuple, or move norm and "
    "activation into a module of their own.",
    Reason.NOT_SUBCLASSABLE: "Move norm and activation into a module of a plain class.",
    Reason.NOT_CALLED: "Nothing where it is never called; otherwise call it from a forward that "
    "can be traced.",
    Reason.SCRIPT_MODULE: "Call fxfuse.optimize on the module before torch.jit.",
    Reason.COMPILED_MODULE: "Call fxfuse.optimize on the module before torch.compile.",
    Reason.PARALLEL_WRAPPER: "Move norm and activation into the module that it wraps.",
    Reason.NOT_COPYABLE: "Call fxfuse.optimize with inplace=True.",
    Reason.EXCLUDED: "Change exclude= or only=.",
    Reason.INACCURATE: "Nothing: please report it to fxfuse, with the inputs.",
    Reason.SLOWER: "Nothing on this machine for such inputs.",
    Reason.FAILS: "Give example inputs that the model takes, or report it to fxfuse.",
    Reason.GRAPH_MODULE: "Call fxfuse.fuse on the GraphModule.",
}
_BY_CODE = {reason.code: remedy for reason, remedy in REMEDIES.items()}


def remedy(site: Site) -> str:
    """What would make a site fusible, in a sentence."""
    return _BY_CODE[site.code]


def outcome(site: Site) -> str:
    """What became of a site in a word: `fused`, `fusible`, or the code of the reason why not."""
    return "fused" if site.fused else site.code


def summary(report: FusionReport) -> str:
    """The counts, in a line."""
    counts = {
        "fused": report.fused,
        "fusible": report.fusible,
        "replaced alone": report.alone,
        "left as they were": report.refused,
    }
    always = ("fused", "left as they were")
    text = ", ".join(f"{n} {what}" for what, n in counts.items() if n or what in always)
    return f"{len(report.sites)} GroupNorms: {text}"


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
    shapes = any(site.shape is not None for site in report.sites)
    headings = ("", "site", "producer", "norm", *(["input"] if shapes else []), "activation")
    for heading in (*headings, "reason"):
        table.add_column(heading, overflow="fold")
    for site in report.sites:
        table.add_row(
            outcome(site),
            "\n".join(filter(None, (site.graph, site.module, site.source))),
            site.producer,
            site.norm,
            *([_shape(site)] if shapes else []),
            site.activation,
            site.reason,
        )
    console = Console(file=io.StringIO(), width=width, markup=False, highlight=False)
    if report.sites:
        console.print(table)
    console.print(summary(report))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines())


def _shape(site: Site) -> str:
    return "" if site.shape is None else str(site.shape)


def as_dict(report: FusionReport) -> dict[str, Any]:
    """A report as JSON has it.

    Returns:
        `coverage` in per cent (None without a norm), the counts `norms`, `fused`, `fusible`,
        `alone` and `refused`, and `sites`: a list of the fields of `Site` (without `match`) with
        `remedy`.
    """
    sites = []
    for site in report.sites:
        fields = {field.name: getattr(site, field.name) for field in dataclasses.fields(site)}
        del fields["match"]
        sites.append({**fields, "remedy": remedy(site)})
    return {
        "coverage": report.coverage,
        "norms": len(report.sites),
        "fused": report.fused,
        "fusible": report.fusible,
        "alone": report.alone,
        "refused": report.refused,
        "sites": sites,
    }


# ---- HTML -----------------------------------------------------------------------------------


@dataclasses.dataclass
class Branch:
    """One module of the tree that the page shows.

    Attributes:
        name: Its name in its parent.
        kind: Its class, and what its `extra_repr` says.
        sites: What became of the norms that it is, or that its forward calls as functions.
        children: The modules in it.
        total: How many sites are in it and below.
        covered: How many of those are fused or fusible.
    """

    name: str
    kind: str
    sites: list[Site]
    children: list[Branch]
    total: int = 0
    covered: int = 0

    def __post_init__(self) -> None:
        self.total = len(self.sites) + sum(child.total for child in self.children)
        self.covered = sum(map(covered, self.sites)) + sum(c.covered for c in self.children)


def covered(site: Site) -> bool:
    """Whether a site is replaced, or would be."""
    return site.fused or site.code in (Reason.FUSIBLE.code, Reason.ALONE.code)


def to_html(report: FusionReport, model: nn.Module, title: str) -> str:
    """A report as one page that needs nothing else: the module tree, coloured by outcome.

    Args:
        report: What `explain` or `report` said of the model.
        model: The model.
        title: Its name.
    """
    import jinja2  # late, as in `render`

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fxfuse", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters.update(remedy=remedy, covered=covered, shape=_shape)
    reasons: dict[str, list[Site]] = {}
    for site in report.sites:
        reasons.setdefault(outcome(site), []).append(site)
    return environment.get_template("report.html").render(
        title=title,
        coverage=report.coverage,
        summary=summary(report),
        root=_tree(report, model),
        reasons=sorted(reasons.items(), key=lambda item: -len(item[1])),
    )


def _tree(report: FusionReport, model: nn.Module) -> Branch:
    by_module: dict[str, list[Site]] = {}
    for site in report.sites:
        by_module.setdefault(site.module or "", []).append(site)

    def branch(module: nn.Module, name: str, path: str, above: frozenset[int]) -> Branch:
        # A module may hold one of those it lies in, through a shared attribute.
        inside = {} if id(module) in above else dict(module.named_children())
        children = [
            branch(child, child_name, f"{path}.{child_name}".lstrip("."), above | {id(module)})
            for child_name, child in inside.items()
        ]
        extra = re.sub(r"\s+", " ", module.extra_repr())
        kind = type(module).__name__ + (f"({extra})" if extra else "")
        return Branch(name, kind, by_module.pop(path, []), children)

    root = branch(model, "", "", frozenset())
    root.sites += [site for sites in by_module.values() for site in sites]  # of unknown modules
    root.__post_init__()
    return root
