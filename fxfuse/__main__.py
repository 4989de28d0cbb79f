"""The command line: `python -m fxfuse demo`, `explain`, `bench`, `build` and `doctor`."""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import itertools
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import torch
from rich.console import Console
from torch import nn

import fxfuse
from fxfuse import bench, demo, library, reports

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


class Parser(argparse.ArgumentParser):
    """An argument parser that answers bad input with one line and exit code 2."""

    def error(self, message: str) -> NoReturn:
        """Says what is wrong, without the usage text, and exits."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(arguments: list[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    parser = Parser(prog="python -m fxfuse", description="Fuses GroupNorm and activations.")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_demo(commands.add_parser("demo", help="fuse one chain; show graphs, errors and times"))
    _add_explain(commands.add_parser("explain", help="say of each GroupNorm of a model: fused?"))
    _add_bench(commands.add_parser("bench", help="time GroupNorm + activation against others"))
    build = commands.add_parser("build", help="build the library now; print where it lies")
    build.set_defaults(run=_build)
    doctor = commands.add_parser("doctor", help="print what fxfuse finds here and what is missing")
    doctor.set_defaults(run=_doctor)
    options = parser.parse_args(arguments)
    return int(options.run(options))


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.description = "Fuses Linear -> GroupNorm -> Hardtanh; shows graphs, errors and times."
    _add_device(parser)
    parser.add_argument(
        "--dtype", choices=DTYPES, default="float32", help="of x and the weights (%(default)s)"
    )
    parser.add_argument(
        "--shape",
        type=int,
        nargs=4,
        metavar=("ROWS", "IN", "OUT", "GROUPS"),
        default=(1024, 8192, 8192, 16),
        help="x is (ROWS, IN), the Linear gives (ROWS, OUT) (default: 1024 8192 8192 16)",
    )
    parser.add_argument("--tf32", action="store_true", help="let CUDA matmuls use TF32")
    parser.add_argument("--no-inductor", action="store_true", help="leave torch.compile out")
    parser.add_argument("--json", metavar="FILE", help="write the figures too; - for stdout")
    parser.set_defaults(run=lambda options: _demo(parser, options))


def _add_bench(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Checks and times GroupNorm + activation: eager, Inductor, Liger, apex and fxfuse, each "
        "also in a CUDA graph, beside a copy of the same tensor."
    )
    parser.add_argument(
        "--grid", choices=("quick", "full"), default="quick", help="which rows (%(default)s)"
    )
    _add_device(parser)
    parser.add_argument(
        "--dtype", choices=DTYPES, nargs="+", help="rows of these alone (default: of all)"
    )
    parser.add_argument(
        "--only", metavar="PATTERN", default="", help="rows with this in their name; * and ? match"
    )
    parser.add_argument("--backward", action="store_true", help="time the backward, alone")
    parser.add_argument("--chain", action="store_true", help="with a Linear before the norm")
    parser.add_argument("--tf32", action="store_true", help="let CUDA matmuls use TF32")
    parser.add_argument(
        "--inductor",
        action=argparse.BooleanOptionalAction,
        help="whether Inductor takes part (default: on CUDA; its CPU compiles are slow)",
    )
    parser.add_argument(
        "--max-autotune",
        action="store_true",
        help="Inductor's max-autotune in every row, not only in those of the quick grid",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=min(16, os.cpu_count() or 1),
        help="processes that compile for Inductor beforehand (default: %(default)s)",
    )
    parser.add_argument(
        "--rounds", type=int, default=31, help="readings of each time, at most (%(default)s)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures too; - for stdout")
    parser.add_argument("--plot", metavar="FILE", help="draw them too; needs matplotlib")
    parser.set_defaults(run=lambda options: _bench(parser, options))


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        type=_device,
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cpu, cuda or cuda:N (default: %(default)s)",
    )


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"expected cpu, cuda or cuda:N, got {text!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise argparse.ArgumentTypeError(
            f"{text!r} is not here: torch {torch.__version__} sees "
            f"{torch.cuda.device_count()} CUDA GPUs"
        )
    return device


def _demo(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    rows, in_features, out_features, num_groups = options.shape
    if min(options.shape) < 1:
        parser.error(f"argument --shape: expected four positive sizes, got {options.shape}")
    if out_features % num_groups:
        parser.error(f"argument --shape: {num_groups} groups do not divide {out_features} channels")
    if rows * out_features == num_groups:
        parser.error("argument --shape: GroupNorm needs more than one value per group")
    if options.tf32 and (options.device.type != "cuda" or options.dtype != "float32"):
        parser.error("argument --tf32: needs a CUDA device and float32")
    settings = demo.Settings(
        rows,
        in_features,
        out_features,
        num_groups,
        options.device,
        DTYPES[options.dtype],
        options.tf32,
        inductor=not options.no_inductor,
    )
    # With the figures on stdout, the text goes to stderr.
    return demo.run(settings, Console(stderr=options.json == "-"), options.json)


def _add_explain(parser: Parser) -> None:
    parser.description = (
        "Says of each GroupNorm of a model whether fxfuse.optimize would fuse it, or why not. "
        "Needs no GPU and no compiler; the model is built without weights where it allows that."
    )
    parser.add_argument(
        "factory",
        metavar="package.module:factory",
        help="what to call for the model, or the model itself",
    )
    parser.add_argument(
        "--args",
        nargs="*",
        default=[],
        metavar="ARG",
        help="its arguments: Python literals or strings, by position or as name=value",
    )
    parser.add_argument(
        "--input",
        type=_example,
        action="append",
        metavar="SHAPE[:DTYPE]",
        help="shape of an argument of a call, such as 1,3,224,224 or 1,77:int64, for the "
        "report's shapes; may be repeated",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--html", metavar="FILE", help="write a page with the module tree")
    parser.set_defaults(run=lambda options: _explain(parser, options))


def _example(text: str) -> tuple[tuple[int, ...], torch.dtype]:
    sizes, _, name = text.partition(":")
    dtype = getattr(torch, name or "float32", None)
    try:
        shape = tuple(int(size) for size in sizes.split(",") if size)
        if min(shape, default=0) < 0 or not isinstance(dtype, torch.dtype):
            raise ValueError
    except ValueError:
        message = f"expected sizes such as 1,3,224,224 or 1,77:int64, got {text!r}"
        raise argparse.ArgumentTypeError(message) from None
    return shape, dtype


def _explain(parser: Parser, options: argparse.Namespace) -> int:
    model = _model(parser, options)
    inputs = None
    if options.input is not None:
        first = next(itertools.chain(model.parameters(), model.buffers()), None)
        device = "meta" if first is None else first.device
        inputs = tuple(torch.empty(s, dtype=dtype, device=device) for s, dtype in options.input)
    report = fxfuse.explain(model, example_inputs=inputs)
    if options.html is not None:
        page = reports.to_html(report, model, options.factory)
        try:
            Path(options.html).write_text(page, encoding="utf-8")
        except OSError as error:
            parser.error(f"argument --html: {error}")
    if options.json:
        print(json.dumps({"model": options.factory, **reports.as_dict(report)}, indent=2))
        return 0
    width = Console().width if sys.stdout.isatty() else 120
    print(reports.render(report, width))
    if report.coverage is not None:
        print(f"Coverage: {report.coverage:.0f} %")
    remedies = {reports.outcome(s): reports.remedy(s) for s in report.sites if not s.fused}
    for outcome, remedy in remedies.items():
        print(f"{outcome}: {remedy}")
    return 0


def _model(parser: Parser, options: argparse.Namespace) -> nn.Module:
    """The model that the command line names, on the meta device if it can be made there."""
    module, _, attribute = options.factory.partition(":")
    sys.path.insert(0, "")  # a factory in the current folder, as `python -m` has it
    try:
        factory: Any = importlib.import_module(module)
        for name in attribute.split("."):
            factory = getattr(factory, name)
    except (ImportError, AttributeError, ValueError) as error:
        parser.error(f"argument package.module:factory: {error}")
    args, kwargs = [], {}
    for text in options.args:
        name, equals, value = text.partition("=")
        if equals and name.isidentifier():
            kwargs[name] = _literal(value)
        else:
            args.append(_literal(text))
    model = factory
    if not isinstance(factory, nn.Module):
        if not callable(factory):
            parser.error(f"argument package.module:factory: {options.factory} cannot be called")
        try:
            with torch.device("meta"):
                model = factory(*args, **kwargs)
        except Exception:  # some constructors read the values that they make
            try:
                model = factory(*args, **kwargs)
            except Exception as error:
                parser.error(f"{options.factory} raised {type(error).__name__}: {error}")
    if not isinstance(model, nn.Module):
        parser.error(f"{options.factory} gave a {type(model).__name__}, not a torch.nn.Module")
    return model


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _bench(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    on_cuda = options.device.type == "cuda"
    settings = bench.Settings(
        grid=options.grid,
        device=options.device,
        dtypes=options.dtype and tuple(DTYPES[name] for name in options.dtype),
        only=options.only,
        backward=options.backward,
        chain=options.chain,
        tf32=options.tf32,
        inductor=on_cuda if options.inductor is None else options.inductor,
        max_autotune=options.max_autotune,
        jobs=options.jobs,
        rounds=options.rounds,
    )
    if options.chain and options.backward:
        parser.error("argument --backward: not together with --chain")
    if options.tf32 and not (on_cuda and options.chain):
        parser.error("argument --tf32: needs a CUDA device and --chain")
    if options.rounds < 2:
        parser.error(f"argument --rounds: expected 2 or more, got {options.rounds}")
    if not settings.rows:
        parser.error(f"no row of the {options.grid} grid has that dtype and a name with --only")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("argument --plot: needs matplotlib, run pip install 'fxfuse[bench]'")
    for file in (options.json, options.plot):
        folder = os.path.dirname(file) if file not in (None, "-") else ""
        if folder and not os.path.isdir(folder):
            parser.error(f"there is no folder {folder!r}")
    terminal = sys.stderr.isatty() if options.json == "-" else sys.stdout.isatty()
    # In a file or a pipe the wide table is not folded.
    out = Console(stderr=options.json == "-", width=None if terminal else 240)
    return bench.run(settings, out, options.json, options.plot)


def _build(_: argparse.Namespace) -> int:
    start = time.monotonic()
    try:
        path = library.build(again=True)
    except library.BuildError as error:
        print(f"python -m fxfuse build: error: {error}", file=sys.stderr)
        return 1
    print(f"{path} ({time.monotonic() - start:.1f} s)")
    return 0


def _doctor(_: argparse.Namespace) -> int:
    """Prints what the library depends on; returns 1 where it can be neither found nor built."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    wanted, problem = "none", None
    try:
        recipe = library.recipe()
        wanted = str(recipe)
        library.check_tools(recipe)
    except library.BuildError as error:
        problem = str(error)
    existing = library.existing()
    facts = {
        "Python": f"{platform.python_version()} on {platform.platform()}",
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}",
        "GPUs": ", ".join(gpus) or "none",
        "C++ compiler": _version(library.compiler()),
        "nvcc": _version(library.find_nvcc()),
        "cache folder": str(library.cache_folder()),
        "library wanted": wanted,
        "library": str(existing or "not built yet"),
        "missing": problem or "nothing",
    }
    for name, value in facts.items():
        print(f"{name:15}{value}")
    return 0 if existing or problem is None else 1


def _version(executable: str | None) -> str:
    """The path of a compiler and the line of its version text that has the number."""
    if executable is None:
        return "none"
    result = subprocess.run([executable, "--version"], capture_output=True, text=True, check=False)
    lines = [line for line in result.stdout.splitlines() if any(map(str.isdigit, line))]
    release = next((line for line in lines if "release" in line), lines[0] if lines else "")
    return f"{executable}: {release}"


if __name__ == "__main__":
    sys.exit(main())
