"""Fuses GroupNorm and the activation after it in any traced PyTorch model."""

from fxfuse.library import library_path
from fxfuse.ops import group_norm_activation
from fxfuse.patterns import fuse
from fxfuse.rewrite import FusionReport, Site
from fxfuse.surgery import NotFusedError, explain, optimize, report, restore

__all__ = [
    "FusionReport",
    "NotFusedError",
    "Site",
    "explain",
    "fuse",
    "group_norm_activation",
    "library_path",
    "optimize",
    "report",
    "restore",
]
