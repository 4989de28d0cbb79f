"""The examples, run as a user runs them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)]


def example(name: str, *arguments: str, cwd: Path) -> str:
    """Runs an example and returns its output; it must succeed."""
    result = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


def test_quickstart(tmp_path):
    assert "GroupNorm" in example("quickstart.py", cwd=tmp_path)


@pytest.mark.parametrize("device", DEVICES)
def test_digits(device, tmp_path):
    output = example("digits.py", "--device", device, "--folder", str(tmp_path), cwd=tmp_path)
    for verdict in ("blocks fused", "equal predictions", "accuracy above 95 %", "equal gradients"):
        assert f"{verdict}: yes" in output
    # The checkpoint is plain torch: no code runs when it is loaded.
    saved = torch.load(tmp_path / "digits.pt", weights_only=True)
    assert "blocks.0.1.weight" in saved["state_dict"]
