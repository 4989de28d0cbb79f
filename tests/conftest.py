"""Settings shared by every test."""

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from fxfuse import ops

# The first example of a process may wait for the library to be built.
settings.register_profile(
    "default", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("thorough", settings.get_profile("default"), max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device of this machine; the GPU tests are the same tests with `device=cuda`."""
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _float32_convolutions() -> Iterator[None]:
    """PyTorch allows cuDNN TF32, and whether it takes it depends on the memory format."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with a kernel that takes every Linear in: nothing there needs a GPU."""
    monkeypatch.setattr(ops, "may_have_linear_kernel", lambda: True)
    monkeypatch.setattr(ops, "_with_linear_kernel", {torch.device("cpu"): True})
    monkeypatch.setattr(ops, "linear_kernel", lambda *args, **kwargs: (True, "it is a test"))
