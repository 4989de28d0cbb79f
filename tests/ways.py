"""Shapes for each way in which the CUDA kernels solve a problem, of which the CPU knows nothing.

The ways are those of kernels/cuda/forward_plan.h and backward_plan.h, and of dividing the work
within them, on a GPU of 132 multiprocessors with clusters.  test_plan.py asks the plans without a
GPU whether every way is reached; test_op_numbers.py holds each shape against the contract.
"""

from __future__ import annotations

# What it is for: shape, num_groups.
FORWARD: dict[str, tuple[tuple[int, ...], int]] = {
    "a lane": ((65, 40), 10),
    "lanes, one vector in each": ((41, 64), 4),
    "lanes, some idle": ((41, 96), 4),
    "a warp, two vectors in each lane": ((7, 1024), 4),
    "a warp, four vectors in each lane": ((7, 1024), 2),
    "a warp, four vectors of a 16-bit type in each lane": ((7, 2048), 2),
    "a warp, up to four vectors in each lane": ((7, 800), 2),
    "many rounds for each team": ((5001, 256), 2),
    "spans, an element in each lane": ((65, 6), 3),
    "spans, a lane for a group": ((77, 93), 31),
    "spans, all of even groups": ((77, 90), 9),
    "spans, lanes that share elements": ((77, 93), 3),
    "spans, a warp for a group": ((33, 3 * 455), 3),
    "spans, the longest runs of 16-bit types": ((7, 2 * 991), 2),
    "spans, many rounds for each team": ((20_001, 99), 3),
    "spans, groups of two that a lane has several of": ((5003, 18), 9),
    "spans, groups of four that a lane has several of": ((9001, 20), 5),
    "spans, a spatial size": ((70, 8, 5, 3), 2),
    "a block": ((150, 8, 20, 20), 2),
    "a block, a vector of two channels": ((150, 16, 7, 7), 1),
    "a block, a vector of many channels": ((3, 3000, 3), 2),
    "a block, more channels than are staged": ((2, 700, 12), 2),
    "a block, loose elements": ((150, 6, 1001), 2),
    "a block, no spatial size": ((200, 3000), 1),
    "a block, no spatial size, an odd group": ((50, 2 * 3001), 2),
    "a cluster": ((1, 4, 40, 300), 2),
    "a cluster, loose elements": ((1, 6, 12_001), 2),
    "a cluster, no spatial size": ((3, 20_000), 1),
    "the ring, all blocks in a team": ((1, 1, 400_000), 1),
    "the ring, several teams": ((1, 2, 330_000), 2),
    "chunks": ((1, 1, 940_001), 1),
}

CHANNELS_LAST: dict[str, tuple[tuple[int, ...], int]] = {
    "a block for a tile": ((3, 64, 9, 11), 4),
    "a block for several groups": ((3000, 16, 6, 8), 1),
    "a cluster for a tile": ((2, 64, 30, 41), 8),
    "a cluster, with rows of several tiles": ((2, 320, 32, 31), 32),
    "a cluster for each of many tiles": ((70, 64, 29, 31), 4),
    "a cluster, with members that have no rows": ((1, 2048, 7, 7), 1),
    "the grid": ((1, 32, 627, 637), 8),
    "the grid for several tiles": ((2, 32, 627, 637), 8),
    "three launches": ((1, 32, 347, 401), 8),
    "three launches, with groups of odd vectors": ((1, 40, 149, 151), 4),
    "three launches, with more channels than a block takes": ((1, 640, 37, 41), 1),
    "three launches, by elements": ((2, 13, 40, 50), 13),
    "three launches, with small groups": ((3, 64, 3, 5), 16),
}

# More than the chip's shared memory holds.
CHANNELS_LAST_LARGE: tuple[tuple[int, ...], int] = ((1, 32, 1024, 1061), 4)

# What it is for: shape, num_groups, layout.
BACKWARD: dict[str, tuple[tuple[int, ...], int, str]] = {
    "a warp, several groups and rows in one": ((700, 8), 4, "contiguous"),
    "a warp, all lanes for one": ((66, 2048), 4, "contiguous"),
    "a warp, element by element": ((40, 3 * 141), 3, "contiguous"),
    "a block, walking down the batch": ((300, 1536), 1, "contiguous"),
    "a cluster, walking down the batch": ((30, 1536), 1, "contiguous"),
    "a cluster, an odd part of a row": ((9, 2 * 10_008), 2, "contiguous"),
    "a cluster, element by element": ((40, 6007), 1, "contiguous"),
    "a cluster, unaligned": ((7, 4104), 1, "offset"),
    "pieces": ((3, 40_000), 1, "contiguous"),
    "planes, many groups in a tile": ((300, 64, 6, 6), 32, "contiguous"),
    "planes, tiles in turn": ((70, 64, 7, 7), 32, "contiguous"),
    "planes, one group in a tile": ((150, 12, 20, 50), 3, "contiguous"),
    "planes, parts of each group": ((4, 12, 40, 50), 3, "contiguous"),
    "planes, parts of one group": ((2, 10, 64, 48), 1, "contiguous"),
    "planes, parts of channels": ((1, 3, 121, 125), 1, "contiguous"),
    "planes, many channels": ((2, 300, 10, 2), 1, "contiguous"),
    "tiles, columns in powers of two": ((80, 256, 5, 5), 8, "channels_last"),
    "tiles in turn, columns that are none": ((70, 640, 4, 5), 64, "channels_last"),
    "tiles, parts of one": ((2, 64, 40, 50), 8, "channels_last"),
    "tiles, parts of one, columns of half a group": ((2, 40, 30, 30), 4, "channels_last"),
    "read twice": ((1, 2, 800, 800), 1, "contiguous"),
    "read twice, by rows of channels": ((1, 16, 310, 310), 1, "channels_last"),
    "read twice, by elements": ((2, 9, 50, 60), 3, "channels_last"),
}
