"""Fuses GroupNorm and the activation after it in any traced PyTorch model."""

from fxfuse.library import library_path
from fxfuse.ops import group_norm_activation

__all__ = ["group_norm_activation", "library_path"]
