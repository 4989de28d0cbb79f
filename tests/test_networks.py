"""`examples/networks.py`: that it measures, and what it says of what is wrong, crashes or hangs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "examples" / "networks.py"
QUICK = ("--small", "--rounds", "3", "--seconds", "0.2", "--calls", "2")

# Networks and contenders that fail, in a script whose processes all see them.
FAULTY = f"""
import os, sys, time

sys.path.insert(0, {str(SCRIPT.parent)!r})
import networks


def ends(small):
    os._exit(7)


def hangs(small):
    time.sleep(3600)


def raises(small):
    raise RuntimeError("broken\\nin two lines")


def missing(small):
    import no_such_library


def off(model):
    return lambda x: 1.001 * model(x)


def refuses(model):
    raise TypeError("not this model")


networks.NETWORKS = {{
    "ends": ends,
    "hangs": hangs,
    "raises": raises,
    "missing": missing,
    "chain": networks.NETWORKS["chain"],
}}
networks.CONTENDERS |= {{"inductor": off, "backend": refuses}}
if __name__ == "__main__":
    sys.exit(networks.main())
"""


def run(script: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(script), *QUICK, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_it_measures(device, tmp_path):
    precisions = ["bfloat16", *(["tf32"] if device.type == "cuda" else [])]
    arguments = ("--device", device.type, "--no-compile", "--json", "n.json", "--markdown")
    arguments += ("--only", "without", "MLP", "--precision", *precisions)
    result = run(SCRIPT, tmp_path, *arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    figures = json.loads((tmp_path / "n.json").read_text())
    norms = {"UNet without attention": 25, "MLP": 4}
    cases = {
        (network, precision, mode)
        for network in norms
        for precision in precisions
        for mode in ("forward", "training")
    }
    rows = {(row["network"], row["precision"], row["mode"]): row for row in figures["rows"]}
    assert rows.keys() == cases
    kinds = {"call", "graph"} if device.type == "cuda" else {"call"}
    for (network, _, _), row in rows.items():
        assert row["status"] == "timed"
        assert row["norms"] == {"all": norms[network], "fused": norms[network], "alone": 0}
        assert row["contenders"].keys() == {"eager", "optimize"}
        eager, ours = row["contenders"]["eager"], row["contenders"]["optimize"]
        for entry in (eager, ours):
            assert (entry["status"], entry["reason"]) == ("right", None)
            assert 0 < entry["error"] < 1
            assert entry["times"].keys() == kinds
        assert (eager["sites"], ours["sites"]) == (0, norms[network])
        for kind, ratio in ours["ratios"].items():
            expected = eager["times"][kind]["median_s"] / ours["times"][kind]["median_s"]
            assert ratio == {"eager": pytest.approx(expected)}
    lines = [line for line in result.stdout.splitlines() if line.startswith("| ")]
    assert len(lines) == 1 + len(cases)
    assert lines[1].startswith("| UNet without attention | 25 | 25 + 0 | bfloat16 | training | ")

    again = run(SCRIPT, tmp_path, "--show", "n.json", "--markdown")
    assert (again.returncode, again.stdout) == (0, result.stdout)


def test_compiled_contenders(tmp_path):
    arguments = ("--only", "chain", "--precision", "float32", "--mode", "training")
    result = run(SCRIPT, tmp_path, "--device", "cpu", *arguments, "--tune", "--json", "n.json")
    assert result.returncode == 0, result.stdout + result.stderr
    (row,) = json.loads((tmp_path / "n.json").read_text())["rows"]
    contenders = row["contenders"]
    assert contenders.keys() == {"eager", "optimize", "inductor", "backend", "backend, tune"}
    assert contenders["inductor"]["sites"] == 0
    assert contenders["backend"]["sites"] == 1
    assert contenders["backend"]["ratios"]["call"].keys() == contenders.keys() - {"backend"}


def test_faults_are_named(tmp_path):
    script = tmp_path / "faulty.py"
    script.write_text(FAULTY)
    arguments = ("--precision", "float32", "--mode", "forward", "--json", "n.json")
    result = run(
        script,
        tmp_path,
        "--device",
        "cpu",
        "--only",
        "ends",
        "raises",
        "missing",
        "chain",
        *arguments,
    )
    assert result.returncode == 1, result.stdout + result.stderr
    rows = json.loads((tmp_path / "n.json").read_text())["rows"]
    found = {row["network"]: (row["status"], row["reason"]) for row in rows}
    assert found == {
        "ends": ("failed", "its process ended with exit code 7"),
        "raises": ("failed", "RuntimeError: broken"),
        "missing": ("absent", "ModuleNotFoundError: No module named 'no_such_library'"),
        "chain": ("timed", None),
    }
    contenders = next(row["contenders"] for row in rows if row["network"] == "chain")
    assert contenders["inductor"]["status"] == "wrong"
    assert "result 1 of 1 is off by 1.0e-03" in contenders["inductor"]["reason"]
    assert contenders["backend"]["status"] == "failed"
    assert contenders["backend"]["reason"] == "TypeError: not this model"
    timed = {name for name, entry in contenders.items() if entry["times"]}
    assert timed == {"eager", "optimize"}
    assert "WRONG" in result.stdout
    assert "chain, float32, forward, backend: TypeError: not this model" in result.stdout


def test_a_network_that_hangs_is_given_up(tmp_path):
    script = tmp_path / "faulty.py"
    script.write_text(FAULTY)
    arguments = ("--only", "hangs", "--precision", "float32", "--mode", "forward", "--limit", "2")
    result = run(script, tmp_path, "--device", "cpu", *arguments)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "hangs, float32, forward: not done in time" in result.stdout


def test_a_missing_library_alone_is_no_fault(tmp_path):
    script = tmp_path / "faulty.py"
    script.write_text(FAULTY)
    arguments = ("--only", "missing", "--precision", "float32", "--mode", "forward")
    result = run(script, tmp_path, "--device", "cpu", *arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "No module named 'no_such_library'" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--only", "nothing"), "no network has that name"),
        (("--device", "cpu", "--precision", "tf32"), "tf32 needs a CUDA device"),
        (("--jobs", "0"), "expected --jobs and --calls of 1 or more"),
    ],
)
def test_it_refuses(arguments, message, tmp_path):
    result = run(SCRIPT, tmp_path, *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stdout == ""


def test_the_unet_has_the_widths_of_stable_diffusion():
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        import networks
    finally:
        sys.path.remove(str(SCRIPT.parent))
    with torch.device("meta"):
        model, inputs = networks.unet(small=False)
    assert model(*inputs).shape == (2, 4, 64, 64)
    blocks = [module for module in model.modules() if isinstance(module, networks.ResBlock)]
    assert {block.norm2.num_channels for block in blocks} == {320, 640, 1280}
