"""Which CUDA kernel is chosen, asked without a GPU: the plans are plain C++ (tests/plan.cpp)."""

from __future__ import annotations

import ctypes
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from problems import checked
from ways import BACKWARD, CHANNELS_LAST, CHANNELS_LAST_LARGE, FORWARD

FORWARD_NAMES = {
    "rows",
    "spans",
    "groups of a block",
    "groups of a cluster",
    "ring",
    "chunks",
    "chunks of elements",
    "tile of a block",
    "tile of a cluster",
    "tiles of the grid",
    "row chunks",
    "row chunks of elements",
}
BACKWARD_NAMES = {
    "rows",
    "rows of elements",
    "rows of a block",
    "rows of a cluster",
    "pieces of rows",
    "planes of several groups",
    "planes of a group",
    "planes of a cluster",
    "tiles of a block",
    "tiles of a cluster",
    "streamed",
    "streamed by elements",
}

_PROBLEM = [
    ("device", ctypes.c_int),
    ("batch", ctypes.c_int64),
    ("channels", ctypes.c_int64),
    ("spatial", ctypes.c_int64),
    ("num_groups", ctypes.c_int64),
    ("channels_last", ctypes.c_bool),
    ("eps", ctypes.c_double),
    ("activation", ctypes.c_int),
    ("params", ctypes.c_double * 2),
    ("dtype", ctypes.c_int),
    ("output_dtype", ctypes.c_int),
    ("affine_dtype", ctypes.c_int),
    ("input", ctypes.c_void_p),
    ("weight", ctypes.c_void_p),
    ("bias", ctypes.c_void_p),
]


class Forward(ctypes.Structure):
    _fields_ = [
        *_PROBLEM,
        *((name, ctypes.c_void_p) for name in ("output", "mean", "rstd", "residual")),
    ]


class Backward(ctypes.Structure):
    _fields_ = [
        *_PROBLEM,
        *(
            (name, ctypes.c_void_p)
            for name in ("grad_output", "mean", "rstd", "dinput", "dweight", "dbias")
        ),
    ]


class LinearForward(ctypes.Structure):
    _fields_ = [
        *_PROBLEM,
        ("features", ctypes.c_int64),
        ("tf32", ctypes.c_bool),
        *((name, ctypes.c_void_p) for name in ("linear_weight", "linear_bias", "output")),
    ]


class Gpu(ctypes.Structure):
    _fields_ = [
        ("multiprocessors", ctypes.c_int),
        ("shared", ctypes.c_int),
        ("shared_of_all", ctypes.c_int),
        ("clusters", ctypes.c_bool),
        ("wgmma", ctypes.c_bool),
        ("cooperates", ctypes.c_bool),
        ("largest_cluster", ctypes.c_int),
        ("most_clusters", ctypes.c_int * 4 * 2),
    ]


def gpu(multiprocessors: int, kilobytes: int, largest_cluster: int = 1) -> Gpu:
    """With that much shared memory for a block, and 1 KB more in a multiprocessor."""
    hopper = largest_cluster > 1
    facts = Gpu(multiprocessors, kilobytes << 10, (kilobytes + 1) << 10, hopper, hopper, True)
    facts.largest_cluster = largest_cluster
    for blocks in (1, 2):
        for log2 in range(4):
            facts.most_clusters[blocks - 1][log2] = max(
                blocks * (multiprocessors >> log2) - log2, 1
            )
    return facts


GPUS = {
    "H200": gpu(132, 227, 16),
    "as few as a slice of one has": gpu(16, 227, 8),
    "A100": gpu(108, 163),
    "RTX 3090": gpu(82, 99),
}
DTYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}
ALIGNED, OFFSET = 1 << 20, (1 << 20) + 8  # addresses; eight bytes are whole elements of all types


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    tests = Path(__file__).parent
    library = tmp_path_factory.mktemp("plan") / "plan.so"
    compiler = os.environ.get("CXX", "g++")
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    sources = [f"-I{tests.parent / 'kernels'}", str(tests / "plan.cpp"), "-o", str(library)]
    subprocess.run([compiler, *flags, *sources], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.size_of.restype = ctypes.c_size_t
    for direction in ("forward", "backward"):
        for what in ("name", "fault"):
            getattr(loaded, f"{direction}_{what}").restype = ctypes.c_char_p
    for what in ("name", "reason", "fault"):
        getattr(loaded, f"linear_{what}").restype = ctypes.c_char_p
    for number, structure in enumerate((Forward, Backward, Gpu, LinearForward)):
        assert loaded.size_of(number) == ctypes.sizeof(structure)
    return loaded


def name(
    plans: ctypes.CDLL,
    facts: Gpu,
    shape: tuple[int, ...],
    num_groups: int,
    dtype: torch.dtype,
    *,
    channels_last: bool = False,
    backward: bool = False,
    address: int = ALIGNED,
    wide: bool = False,
    residual: int | None = None,
) -> str:
    """Of the plan for a problem; fails if the plan is wrong for its kernel.

    A residual lies as many elements behind an aligned address as it says.
    """
    problem = (Backward if backward else Forward)()
    problem.batch, problem.channels, problem.spatial = *shape[:2], math.prod(shape[2:])
    problem.num_groups, problem.channels_last = num_groups, channels_last
    problem.dtype = problem.output_dtype = problem.affine_dtype = DTYPES[dtype]
    if wide and dtype.itemsize == 2:
        problem.output_dtype = problem.affine_dtype = DTYPES[torch.float32]
    problem.eps = 1e-5
    for field, kind in problem._fields_:
        if kind is ctypes.c_void_p:
            setattr(problem, field, ALIGNED)
    problem.input = address
    if not backward:
        size = 4 if wide and dtype.itemsize == 2 else dtype.itemsize
        problem.residual = None if residual is None else ALIGNED + residual * size
    direction = "backward" if backward else "forward"
    arguments = ctypes.byref(problem), ctypes.byref(facts)
    fault = getattr(plans, f"{direction}_fault")(*arguments)
    found: str = getattr(plans, f"{direction}_name")(*arguments).decode()
    assert fault is None, (found, fault.decode(), shape, num_groups, dtype)
    return found


def test_every_way_of_the_forward_is_reached_by_the_shapes_of_the_tests(
    plans: ctypes.CDLL,
) -> None:
    facts, found = GPUS["H200"], set()
    for dtype in (torch.float32, torch.bfloat16):
        for address in (ALIGNED, OFFSET):
            for shape, num_groups in FORWARD.values():
                found.add(name(plans, facts, shape, num_groups, dtype, address=address))
        for shape, num_groups in [*CHANNELS_LAST.values(), CHANNELS_LAST_LARGE]:
            found.add(name(plans, facts, shape, num_groups, dtype, channels_last=True))
    assert found == FORWARD_NAMES


def test_every_way_of_the_backward_is_reached_by_the_shapes_of_the_tests(
    plans: ctypes.CDLL,
) -> None:
    found = {
        name(
            plans,
            GPUS["H200"],
            shape,
            num_groups,
            dtype,
            channels_last=layout == "channels_last",
            backward=True,
            address=OFFSET if layout == "offset" else ALIGNED,
        )
        for shape, num_groups, layout in BACKWARD.values()
        for dtype in (torch.float32, torch.bfloat16)
    }
    assert found == BACKWARD_NAMES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_residual_changes_the_way_only_where_its_address_forbids_vectors(
    plans: ctypes.CDLL, dtype: torch.dtype
) -> None:
    facts = GPUS["H200"]
    shapes = [(*value, False) for value in FORWARD.values()]
    shapes += [(*value, True) for value in [*CHANNELS_LAST.values(), CHANNELS_LAST_LARGE]]
    changed = set()
    for shape, num_groups, channels_last in shapes:
        arguments = plans, facts, shape, num_groups, dtype
        plain = name(*arguments, channels_last=channels_last)
        assert name(*arguments, channels_last=channels_last, residual=0) == plain
        way = name(*arguments, channels_last=channels_last, residual=1)
        if way != plain:
            changed.add((plain, way))
    assert changed == {
        ("rows", "spans"),
        ("rows", "groups of a block"),
        ("ring", "groups of a cluster"),
        ("chunks", "chunks of elements"),
        *(
            (plain, "row chunks of elements")
            for plain in ("tile of a block", "tile of a cluster", "tiles of the grid", "row chunks")
        ),
    }


@st.composite
def sizes(draw: st.DrawFn) -> tuple[tuple[int, int, int], int]:
    """(batch, channels, spatial) and num_groups, up to groups of 2^32 elements."""

    def size(largest: int) -> int:
        exponent = draw(st.integers(0, largest))
        exact = st.just(2**exponent)
        return draw(st.one_of(exact, st.integers(max(2**exponent // 2, 1), 2**exponent)))

    num_groups = size(7)
    return (
        size(14),
        num_groups * size(14),
        draw(st.sampled_from([1, size(6), size(20)])),
    ), num_groups


@settings(checked, max_examples=3000)  # microseconds each
@given(
    sizes=sizes(),
    dtype=st.sampled_from(list(DTYPES)),
    which=st.sampled_from(list(GPUS)),
    channels_last=st.booleans(),
    backward=st.booleans(),
    address=st.sampled_from([ALIGNED, OFFSET]),
    wide=st.booleans(),
    residual=st.sampled_from([None, 0, 1, 2]),
)
def test_every_size_has_a_plan_that_its_kernel_can_keep(
    plans: ctypes.CDLL,
    sizes: tuple[tuple[int, int, int], int],
    dtype: torch.dtype,
    which: str,
    channels_last: bool,
    backward: bool,
    address: int,
    wide: bool,
    residual: int | None,
) -> None:
    found = name(
        plans,
        GPUS[which],
        *sizes,
        dtype,
        channels_last=channels_last,
        backward=backward,
        address=address,
        wide=wide,
        residual=residual,
    )
    assert found in (BACKWARD_NAMES if backward else FORWARD_NAMES)


# ---- with the Linear ------------------------------------------------------------------------


def linear(
    plans: ctypes.CDLL,
    facts: Gpu,
    sizes: tuple[int, int, int],
    group: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    output: torch.dtype | None = None,
    affine: torch.dtype | None = None,
    activation: int = 1,  # hardtanh
    tf32: bool = True,
    address: int = ALIGNED,
) -> tuple[str, str]:
    """The name of the plan for (M, K, N) and groups of that size, and its reason."""
    problem = LinearForward()
    problem.batch, problem.features, problem.channels = sizes
    problem.spatial, problem.num_groups, problem.eps = 1, sizes[2] // group, 1e-5
    problem.activation, problem.tf32 = activation, tf32
    problem.dtype = DTYPES[dtype]
    problem.output_dtype = DTYPES[output or dtype]
    problem.affine_dtype = DTYPES[affine or dtype]
    for field in ("input", "weight", "bias", "linear_weight", "linear_bias", "output"):
        setattr(problem, field, ALIGNED)
    problem.linear_weight = address
    arguments = ctypes.byref(problem), ctypes.byref(facts)
    for judged in (True, False):
        fault = plans.linear_fault(*arguments, judged)
        assert fault is None, (fault.decode(), sizes, group, dtype)
    return plans.linear_name(*arguments).decode(), plans.linear_reason(*arguments).decode()


@pytest.mark.parametrize(
    ("sizes", "group", "name"),
    [
        ((1024, 8192, 8192), 512, "tiles"),
        ((1024, 8192, 8192), 32, "tiles"),
        ((65536, 1024, 1024), 256, "tiles"),
        ((768, 1024, 4096), 512, "tiles"),  # one round, of which a quarter is idle
        ((768, 2048, 4096), 512, "none"),
        ((1024, 2048, 3328), 128, "tiles"),
        ((1024, 4096, 3840), 128, "tiles"),
        ((1024, 8192, 3840), 128, "none"),
        ((4096, 32768, 4096), 512, "tiles"),
        ((4096, 65536, 4096), 512, "none"),
        ((768, 8192, 8192), 128, "none"),  # a second round that is half empty
        ((64, 1024, 4096), 512, "none"),
        ((65536, 256, 4096), 512, "stationary"),
        ((65536, 8, 32), 32, "stationary"),
        ((512, 256, 1024), 128, "stationary"),
        ((64, 256, 1024), 128, "none"),
    ],
)
def test_a_linear_is_in_the_kernel_where_that_was_faster(
    plans: ctypes.CDLL, sizes: tuple[int, int, int], group: int, name: str
) -> None:
    assert linear(plans, GPUS["H200"], sizes, group)[0] == name


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        ((65536, 8192, 1024), "tiles"),
        ((65536, 132, 1024), "tiles"),
        ((65536, 128, 1024), "stationary"),
        ((65536, 4, 1024), "stationary"),
        ((64, 128, 1024), "none"),
    ],
)
def test_floats_are_multiplied_as_tf32_where_they_may_be(
    plans: ctypes.CDLL, sizes: tuple[int, int, int], name: str
) -> None:
    found, reason = linear(plans, GPUS["H200"], sizes, 128, torch.float32)
    assert found == name
    assert reason.startswith("in TF32, ") == (name != "none")
    strict = linear(plans, GPUS["H200"], sizes, 128, torch.float32, tf32=False)
    assert strict == ("none", "float32 without TF32")


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"dtype": torch.float64}, "neither float32 nor a 16-bit one"),
        ({"dtype": torch.float32, "tf32": False}, "float32 without TF32"),
        ({"dtype": torch.float32, "sizes": (3072, 1026, 3072)}, "units of 16 bytes"),
        ({"group": 48}, "groups are not of"),
        ({"group": 1024}, "groups are not of"),
        ({"sizes": (3072, 1028, 3072)}, "units of 16 bytes"),
        ({"address": OFFSET}, "not aligned"),
        ({"activation": 5}, "takes more than bounds"),
        ({"affine": torch.float32}, "weight and bias are wider"),
        ({"sizes": (64, 1024, 3072)}, "idle"),
        ({"sizes": (0, 1024, 3072)}, "empty"),
        ({"sizes": (3072, 0, 3072)}, "empty"),
        ({"sizes": (2**30, 8, 2**20)}, "too large"),
        ({"facts": "A100"}, "not Hopper"),
    ],
)
def test_what_the_kernel_of_a_linear_does_not_take(
    plans: ctypes.CDLL, kwargs: dict[str, Any], reason: str
) -> None:
    given = {"sizes": (3072, 1024, 3072), "group": 128, "facts": "H200"}
    assert linear(plans, GPUS["H200"], (3072, 1024, 3072), 128)[0] == "tiles"
    given |= kwargs
    facts = GPUS[str(given.pop("facts"))]
    found = linear(plans, facts, **given)  # type: ignore[arg-type]
    assert found[0] == "none"
    assert reason in found[1]


@settings(checked, max_examples=3000)
@given(
    rows=st.integers(0, 18).flatmap(lambda n: st.integers(1, 2**n)),
    features=st.integers(0, 14).flatmap(lambda n: st.integers(1, 2**n)),
    groups=st.integers(0, 8).flatmap(lambda n: st.integers(1, 2**n)),
    group=st.sampled_from([8, 32, 33, 64, 96, 128, 256, 512, 1024]),
    dtype=st.sampled_from(list(DTYPES)),
    wide=st.booleans(),
    tf32=st.booleans(),
    which=st.sampled_from(list(GPUS)),
)
def test_every_linear_has_a_plan_that_its_kernel_can_keep(
    plans: ctypes.CDLL,
    rows: int,
    features: int,
    groups: int,
    group: int,
    dtype: torch.dtype,
    wide: bool,
    tf32: bool,
    which: str,
) -> None:
    wider = torch.float32 if wide and dtype.itemsize == 2 else dtype
    sizes = rows, features, groups * group
    name, reason = linear(
        plans, GPUS[which], sizes, group, dtype, output=wider, affine=wider, tf32=tf32
    )
    assert name in ("none", "tiles", "stationary")
    assert reason
