"""The rows that the benchmark measures, as data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

# What the networks use that have these tensors.
PARAMS: dict[str, tuple[float, ...]] = {"hardtanh": (-2.0, 2.0), "relu": (), "silu": ()}


@dataclass(frozen=True)
class Row:
    """One tensor to normalise, or with `in_features` the Linear that gives it, too."""

    shape: tuple[int, ...]
    num_groups: int
    activation: str
    dtype: torch.dtype
    channels_last: bool = False
    in_features: int | None = None

    @property
    def name(self) -> str:
        """Such as `64x256x56x56/32 relu bfloat16 channels_last`; what `--only` is matched with."""
        shape = "x".join(map(str, self.shape))
        if self.in_features is not None:
            shape = f"{self.shape[0]}x{self.in_features}->{self.shape[1]}"
        layout = " channels_last" if self.channels_last else ""
        return f"{shape}/{self.num_groups} {self.activation} {self.precision}{layout}"

    @property
    def precision(self) -> str:
        """The dtype's name."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def bytes(self) -> int:
        """Of the tensor that is normalised."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def group_bytes(self) -> int:
        """Of what is normalised together."""
        return self.bytes // (self.shape[0] * self.num_groups)


HALF = (torch.bfloat16, torch.float16)
MAIN = (torch.float32, torch.bfloat16)
ALL = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def _rows(
    shape: tuple[int, ...],
    num_groups: int,
    activation: str,
    dtypes: Sequence[torch.dtype],
    layouts: Sequence[bool] = (False,),
    in_features: int | None = None,
) -> list[Row]:
    return [
        Row(shape, num_groups, activation, dtype, channels_last, in_features)
        for dtype in dtypes
        for channels_last in layouts
    ]


BOTH_LAYOUTS = (False, True)
BF16 = (torch.bfloat16,)
FULL = [
    # what a Linear gives: the headline shape, launch-bound ones, larger ones
    *_rows((1024, 8192), 16, "hardtanh", ALL),
    *_rows((32, 512), 8, "hardtanh", (torch.float32, *HALF)),
    *_rows((128, 1024), 32, "hardtanh", ALL),
    *_rows((8192, 4096), 32, "hardtanh", MAIN),
    *_rows((65536, 1024), 2, "hardtanh", MAIN),
    *_rows((65536, 4096), 8, "hardtanh", MAIN),
    # small groups: 64, 32 and 16 channels
    *_rows((16384, 512), 8, "hardtanh", ALL),
    *_rows((16384, 512), 16, "hardtanh", MAIN),
    *_rows((16384, 512), 32, "hardtanh", (torch.float32, *HALF)),
    *_rows((65536, 1024), 64, "silu", BF16),
    # sizes that are no multiple of anything
    *_rows((1000, 16381), 1, "hardtanh", (torch.float32, *HALF)),
    *_rows((1023, 8190), 18, "hardtanh", MAIN),
    *_rows((4095, 1023), 31, "relu", MAIN),
    *_rows((7, 333, 55, 57), 9, "relu", MAIN, BOTH_LAYOUTS),
    # ResNet-50 with GroupNorm, batch 64, 224 x 224
    *_rows((64, 64, 112, 112), 32, "relu", BF16, BOTH_LAYOUTS),
    *_rows((64, 64, 56, 56), 32, "relu", BF16, BOTH_LAYOUTS),
    *_rows((64, 256, 56, 56), 32, "relu", (torch.float32, *HALF), BOTH_LAYOUTS),
    *_rows((64, 512, 28, 28), 32, "relu", BF16, BOTH_LAYOUTS),
    *_rows((64, 1024, 14, 14), 32, "relu", MAIN, BOTH_LAYOUTS),
    *_rows((64, 2048, 7, 7), 32, "relu", HALF, BOTH_LAYOUTS),
    # diffusion: UNet and autoencoder
    *_rows((2, 320, 64, 64), 32, "silu", ALL, BOTH_LAYOUTS),
    *_rows((2, 640, 32, 32), 32, "silu", BF16, BOTH_LAYOUTS),
    *_rows((2, 1280, 16, 16), 32, "silu", HALF, BOTH_LAYOUTS),
    *_rows((2, 1280, 8, 8), 32, "silu", BF16, BOTH_LAYOUTS),
    *_rows((4, 320, 128, 128), 32, "silu", BF16, BOTH_LAYOUTS),
    *_rows((8, 128, 256, 256), 32, "silu", BF16, BOTH_LAYOUTS),
    *_rows((1, 512, 128, 128), 32, "silu", MAIN, BOTH_LAYOUTS),
    # batch 1, few and huge groups; the last is a video
    *_rows((1, 128, 1024, 1024), 32, "silu", MAIN, BOTH_LAYOUTS),
    *_rows((1, 256, 1024, 1024), 32, "silu", BF16, BOTH_LAYOUTS),
    *_rows((1, 64, 1024, 1024), 1, "relu", BF16, BOTH_LAYOUTS),
    *_rows((1, 128, 16, 256, 256), 32, "silu", BF16, BOTH_LAYOUTS),
]
QUICK = [
    *_rows((1024, 8192), 16, "hardtanh", MAIN),
    *_rows((32, 512), 8, "hardtanh", (torch.float32,)),
    *_rows((16384, 512), 32, "hardtanh", BF16),
    *_rows((64, 256, 56, 56), 32, "relu", BF16, BOTH_LAYOUTS),
    *_rows((2, 320, 64, 64), 32, "silu", BF16, BOTH_LAYOUTS),
    *_rows((1, 128, 1024, 1024), 32, "silu", BF16),
]
CHAIN_QUICK = _rows((1024, 8192), 16, "hardtanh", MAIN, in_features=8192)
CHAIN_FULL = [
    *_rows((1024, 8192), 16, "hardtanh", ALL, in_features=8192),
    *_rows((128, 512), 8, "hardtanh", (torch.float32, *HALF), in_features=1024),
    *_rows((8192, 4096), 32, "hardtanh", MAIN, in_features=4096),
    *_rows((65536, 1024), 2, "hardtanh", MAIN, in_features=1024),
    *_rows((65536, 4096), 8, "hardtanh", MAIN, in_features=256),
    # the Linear in the kernel: from long to short products, from large to small groups
    *_rows((1024, 8192), 32, "hardtanh", HALF, in_features=8192),
    *_rows((16384, 2048), 4, "hardtanh", MAIN, in_features=2048),
    *_rows((65536, 1024), 16, "relu", MAIN, in_features=1024),
    *_rows((65536, 2048), 4, "hardtanh", MAIN, in_features=512),
    *_rows((65536, 4096), 32, "hardtanh", MAIN, in_features=256),
    *_rows((65536, 4096), 16, "hardtanh", MAIN, in_features=128),
    *_rows((16384, 512), 32, "silu", (torch.float32, *HALF), in_features=512),
]
GRIDS = {
    ("quick", False): QUICK,
    ("full", False): FULL,
    ("quick", True): CHAIN_QUICK,
    ("full", True): CHAIN_FULL,
}
