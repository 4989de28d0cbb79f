"""Trains on scikit-learn's handwritten digits, then fuses the checkpoint in a fresh process.

`python examples/digits.py` trains, saves, and starts `python examples/digits.py check CHECKPOINT`,
which loads the checkpoint, fuses the model, and compares it with the plain one: predictions,
accuracy, time per batch, and the gradients of some steps of fine-tuning. It exits with 1 where the
two differ.
"""

import argparse
import copy
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import fxfuse

CONFIG = {"hidden": [256, 128], "groups": [16, 8]}
BATCH = 128


class Net(nn.Module):
    """Blocks of Linear, GroupNorm and Hardtanh, and a Linear to the ten classes."""

    def __init__(self, hidden: list[int], groups: list[int]) -> None:
        super().__init__()
        blocks, width = [], 64
        for size, num_groups in zip(hidden, groups, strict=True):
            blocks.append(
                nn.Sequential(
                    nn.Linear(width, size), nn.GroupNorm(num_groups, size), nn.Hardtanh(-2, 2)
                )
            )
            width = size
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


def digits(device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns train images, test images, train labels, test labels."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images / 16, labels, test_size=0.2, random_state=0, stratify=labels)
    train_x, test_x = (torch.tensor(part, dtype=torch.float32, device=device) for part in parts[:2])
    train_y, test_y = (torch.tensor(part, device=device) for part in parts[2:])
    return train_x, test_x, train_y, test_y


def batches(x: Tensor, y: Tensor, generator: torch.Generator) -> list[tuple[Tensor, Tensor]]:
    order = torch.randperm(len(x), generator=generator).to(x.device)
    return [(x[index], y[index]) for index in order.split(BATCH)]


def train(folder: Path, device: str) -> Path:
    torch.manual_seed(0)
    train_x, _, train_y, _ = digits(device)
    model = Net(**CONFIG).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        for x, y in batches(train_x, train_y, generator):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    checkpoint = folder / "digits.pt"
    torch.save({"config": CONFIG, "state_dict": model.state_dict()}, checkpoint)
    print(f"trained on {len(train_x)} images, saved {checkpoint}")
    return checkpoint


def check(checkpoint: Path, device: str) -> bool:
    """Compares the fused model with the plain one; prints and returns whether they agree."""
    saved = torch.load(checkpoint, map_location=device)
    plain = Net(**saved["config"]).to(device).eval()
    plain.load_state_dict(saved["state_dict"])
    # optimize() shares the parameters with the model it is given, and here each is trained alone.
    fused = fxfuse.optimize(copy.deepcopy(plain))
    report = fxfuse.report(fused)
    print(report)
    agree = verdict("blocks fused", report.fused == len(saved["config"]["hidden"]))

    train_x, test_x, train_y, test_y = digits(device)
    with torch.no_grad():
        predicted, expected = fused(test_x).argmax(1), plain(test_x).argmax(1)
        agree &= verdict("equal predictions", torch.equal(predicted, expected))
        for name, labels in (("plain", expected), ("fused", predicted)):
            print(f"{name} accuracy: {(labels == test_y).float().mean().item():.2%}")
        times = time_per_batch({"plain": plain, "fused": fused}, test_x[:BATCH])
    for name, seconds in times.items():
        print(f"{name} time for a batch of {BATCH}: {seconds * 1e6:.0f} us")
    accuracy = (predicted == test_y).float().mean().item()
    agree &= verdict("accuracy above 95 %", accuracy > 0.95)
    return agree & verdict("equal gradients", fine_tune(plain, fused, train_x, train_y))


def time_per_batch(models: dict[str, nn.Module], x: Tensor, rounds: int = 200) -> dict[str, float]:
    """Returns the median seconds of a forward pass of each model, run in turn."""
    samples: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds):
        for name, model in models.items():
            start = time.perf_counter()
            model(x)
            if x.is_cuda:
                torch.cuda.synchronize()
            samples[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in samples.items()}


def fine_tune(plain: nn.Module, fused: nn.Module, x: Tensor, y: Tensor, steps: int = 10) -> bool:
    """Trains the fused model a little; returns whether its gradients are as good as eager's.

    Both are compared with the gradients of a float64 copy, at the same parameters in each step.
    """
    fused.train()
    optimizer = torch.optim.SGD(fused.parameters(), lr=0.05)
    worst = {"plain": 0.0, "fused": 0.0}
    for step_x, step_y in batches(x, y, torch.Generator().manual_seed(1))[:steps]:
        plain.load_state_dict(fused.state_dict())
        exact = copy.deepcopy(plain).double()
        expected = gradients(exact, step_x.double(), step_y)
        for name, model in (("plain", plain), ("fused", fused)):
            for ours, reference in zip(gradients(model, step_x, step_y), expected, strict=True):
                error = (ours - reference).abs().max() / reference.abs().max()
                worst[name] = max(worst[name], error.item())
        optimizer.step()
    for name, error in worst.items():
        print(f"{name} gradients, largest relative error against float64: {error:.1e}")
    return worst["fused"] <= 2 * worst["plain"] + 4 * torch.finfo(torch.float32).eps


def gradients(model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()
    return [parameter.grad for parameter in model.parameters()]


def verdict(what: str, holds: bool) -> bool:
    print(f"{what}: {'yes' if holds else 'NO'}")
    return holds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--folder", type=Path, help="where the checkpoint stays (default: nowhere)")
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("check", help="compare").add_argument("checkpoint", type=Path)
    options = parser.parse_args()
    if options.command == "check":
        return 0 if check(options.checkpoint, options.device) else 1
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        checkpoint = train(folder, options.device)
        command = [sys.executable, __file__, "--device", options.device, "check", str(checkpoint)]
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
