"""What pip installs: the package with its kernels, usable from any folder."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "fxfuse", "kernels")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Builds a wheel from a copy of the sources, which leaves no build folder in the checkout."""
    for needed in ("pip", "hatchling"):
        try:  # without an import, at which pip takes distutils away from the tests after this one
            importlib.metadata.version(needed)
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"{needed} is not installed")
    source = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, source / name, ignore=ignore)
        else:
            shutil.copy(ROOT / name, source / name)
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(target), str(source)], check=True)
    (built,) = target.glob("*.whl")
    return built


def test_wheel_holds_the_package_and_every_kernel(wheel):
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("fxfuse/")}
    modules = {f"fxfuse/{file.name}" for file in (ROOT / "fxfuse").glob("*.py")}
    kernels = {
        f"fxfuse/{file.relative_to(ROOT)}"
        for file in (ROOT / "kernels").rglob("*")
        if file.suffix in (".h", ".cpp", ".cu", ".cuh")
    }
    assert kernels
    assert packed == modules | kernels | {"fxfuse/py.typed", "fxfuse/report.html"}


def test_wheel_needs_torch_but_does_not_build_with_it(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        lines = archive.read(metadata).decode().splitlines()
    assert "License-Expression: BSD-3-Clause" in lines
    assert any(line.startswith("Requires-Dist: torch<2.15,>=2.11") for line in lines)
    assert (wheel.name).endswith("py3-none-any.whl")


def run_installed(wheel: Path, folder: Path, code: str) -> str:
    """What a fresh process prints, in which the package is what the wheel holds."""
    installed = folder / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_installed_package_fuses_in_another_folder(wheel, tmp_path):
    code = """
import torch, fxfuse
model = torch.nn.Sequential(
    torch.nn.Linear(64, 64), torch.nn.GroupNorm(8, 64), torch.nn.Hardtanh(-2, 2)
)
fused = fxfuse.optimize(model)
x = torch.randn(32, 64)
torch.testing.assert_close(fused(x), model(x))
assert fxfuse.report(fused).fused == 1, fxfuse.report(fused)
print(fxfuse.__file__)
"""
    assert Path(run_installed(wheel, tmp_path, code)).is_relative_to(tmp_path)


def test_case_37_torch_finds_the_backend_in_a_process_that_never_imports_it(wheel, tmp_path):
    code = """
import sys, torch
from torch import nn

assert "fxfuse" in torch._dynamo.list_backends()
assert "fxfuse" not in sys.modules
model = nn.Sequential(nn.Linear(64, 64), nn.GroupNorm(8, 64), nn.Hardtanh(-2, 2)).double()
x = torch.randn(32, 64, dtype=torch.float64)
for keywords in ({}, {"options": {"inner": "aot_eager"}}):
    torch._dynamo.reset()
    y = torch.compile(model, backend="fxfuse", fullgraph=True, **keywords)(x)
    torch.testing.assert_close(y, model(x))
    y.sum().backward()
    assert sys.modules["fxfuse"].report().fused == 1, sys.modules["fxfuse"].report()
print(sys.modules["fxfuse"].__file__)
"""
    assert Path(run_installed(wheel, tmp_path, code)).is_relative_to(tmp_path)
