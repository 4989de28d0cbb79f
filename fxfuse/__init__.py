"""Fuses GroupNorm and the activation after it in any traced PyTorch model."""

from typing import Any

from fxfuse.backend import fuse, inductor, report
from fxfuse.library import library_path
from fxfuse.ops import group_norm_activation, linear_group_norm_activation
from fxfuse.rewrite import FusionReport, Site
from fxfuse.surgery import NotFusedError, explain, optimize, restore

__all__ = [
    "FusionReport",
    "NotFusedError",
    "Site",
    "explain",
    "fuse",
    "group_norm_activation",
    "inductor",
    "inductor_pass",
    "library_path",
    "linear_group_norm_activation",
    "optimize",
    "report",
    "restore",
]


def __getattr__(name: str) -> Any:
    if name == "inductor_pass":  # late, because Inductor takes seconds to import
        from fxfuse.pregrad import inductor_pass

        return inductor_pass
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
