"""Finds, builds and loads the compiled library behind ``torch.ops.fxfuse``.

``import fxfuse`` loads a library that already lies in the package or in the per-user cache and
never builds one. The first ``optimize``, ``fuse`` or look at an operator does, once per machine:
the cache is keyed by everything that the binary depends on, a lock that dies with its process lets
one process build while the others wait, and a library appears under its final name only after it
was loaded successfully.

Environment:
    FXFUSE_CACHE: the cache folder; default ``$XDG_CACHE_HOME/fxfuse`` or ``~/.cache/fxfuse``.
    CXX, CUDA_HOME, TORCH_CUDA_ARCH_LIST, MAX_JOBS: as for ``torch.utils.cpp_extension``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

_PACKAGE = Path(__file__).resolve().parent
_LOCK_TIMEOUT = 1800  # seconds; the lock is the kernel's, so it cannot outlive its owner

# Compiled in a process of its own: torch.utils.cpp_extension changes process-wide state, and a
# crash or an interrupt there must not be one here.
_COMPILE = """
import json, sys
from torch.utils.cpp_extension import load
load(**json.load(sys.stdin))
"""


class BuildError(RuntimeError):
    """The library cannot be built here; the message says what is missing and what to do."""


# ---- what to build --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Everything that the binary depends on.

    Attributes:
        sources: The folder with the kernels' sources.
        architectures: The GPU architectures in ``TORCH_CUDA_ARCH_LIST`` form; empty for a
            library without CUDA kernels.
    """

    sources: Path
    architectures: str

    @property
    def cuda(self) -> bool:
        """Whether CUDA kernels are part of it."""
        return bool(self.architectures)

    @property
    def targets(self) -> str:
        """The architectures as the compiler is told them.

        For 9.0 that is 9.0a, which has instructions that no other has. Code in PTX stays that of
        9.0, because later GPUs do not take the other.
        """
        names = []
        for name in re.split(r"[;\s]+", self.architectures):
            names += {"9.0": ["9.0a"], "9.0+PTX": ["9.0a", "9.0+PTX"]}.get(name, [name])
        return ";".join(names)

    @property
    def files(self) -> list[Path]:
        """The translation units."""
        patterns = ["*.cpp", "cpu/*.cpp"] + (["cuda/*.cpp", "cuda/*.cu"] if self.cuda else [])
        return sorted(path for pattern in patterns for path in self.sources.glob(pattern))

    @property
    def cflags(self) -> list[str]:
        """What the C++ compiler is told."""
        # -O3 takes a third longer to compile and makes nothing faster: the loops that matter are
        # written with vectors.
        # Without -fopenmp at::parallel_for is serial and says nothing. It is not passed to the
        # linker: the library then takes the OpenMP runtime that torch brought.
        flags = ["-O2", "-Wall"] + (["-fopenmp"] if sys.platform == "linux" else [])
        # c10/cuda's headers otherwise want a file that only torch's own build has.
        return flags + (
            ["-DFXFUSE_CUDA", "-DC10_CUDA_NO_CMAKE_CONFIGURE_FILE"] if self.cuda else []
        )

    @property
    def cuda_cflags(self) -> list[str]:
        """What nvcc is told."""
        # torch turns the 16-bit types' conversions off; the kernels are written with them.
        kept = ["-U__CUDA_NO_HALF_CONVERSIONS__", "-U__CUDA_NO_BFLOAT16_CONVERSIONS__"]
        return ["-O3", *kept] if self.cuda else []

    @property
    def folder_name(self) -> str:
        """A digest of all but the architectures, which are in the file's name."""
        digest = hashlib.sha256()
        for path in sorted(self.sources.rglob("*")):
            if path.suffix in {".h", ".cpp", ".cuh", ".cu"}:
                digest.update(path.relative_to(self.sources).as_posix().encode())
                digest.update(path.read_bytes())
        facts = [
            torch.__version__,
            torch.version.cuda,
            sys.implementation.cache_tag,
            platform.machine(),
            _identity(compiler()),
            _identity(find_nvcc()) if self.cuda else None,
            self.cflags,
            self.cuda_cflags,
        ]
        digest.update(json.dumps(facts).encode())
        return digest.hexdigest()[:16]

    @property
    def file_name(self) -> str:
        """The library's name in that folder."""
        if not self.cuda:
            return "fxfuse-cpu.so"
        return f"fxfuse-cuda-{re.sub(r'[^0-9A-Za-z.+]+', '_', self.architectures)}.so"

    def __str__(self) -> str:
        return f"CPU and CUDA ({self.architectures})" if self.cuda else "CPU"


def _source_folder() -> Path:
    """The kernels: beside the modules when installed, beside the package in a checkout."""
    for folder in (_PACKAGE / "kernels", _PACKAGE.parent / "kernels"):
        if (folder / "library.cpp").is_file():
            return folder
    raise BuildError(f"the kernels' sources are missing from {_PACKAGE}; reinstall fxfuse")


def compiler() -> str | None:
    """The path of the C++ compiler, or None."""
    return shutil.which(os.environ.get("CXX", "c++"))


def find_nvcc() -> str | None:
    """The path of the CUDA compiler, or None."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    candidates = [Path(home) / "bin" / "nvcc"] if home else []
    if found := shutil.which("nvcc"):
        candidates.append(Path(found))
    candidates.append(Path("/usr/local/cuda/bin/nvcc"))
    return next((str(path) for path in candidates if path.is_file()), None)


def _identity(executable: str | None) -> str | None:
    """Changes when the program does; reading the version would cost a process at each import."""
    if executable is None:
        return None
    path = Path(executable).resolve()
    stat = path.stat()
    return f"{path}:{stat.st_size}:{stat.st_mtime_ns}"


def _wants_cuda() -> bool:
    """Whether torch has CUDA, nvcc is there, and a GPU is visible or an architecture is named.

    Counts GPUs without initialising CUDA.
    """
    if torch.version.cuda is None or find_nvcc() is None:
        return False
    return bool(os.environ.get("TORCH_CUDA_ARCH_LIST")) or torch.cuda.device_count() > 0


def _architectures() -> str:
    if listed := os.environ.get("TORCH_CUDA_ARCH_LIST"):
        return listed
    found = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    return ";".join(f"{major}.{minor}" for major, minor in sorted(found))


def recipe() -> Recipe:
    """What this machine needs.

    Raises:
        BuildError: If the kernels' sources are missing.
    """
    return Recipe(_source_folder(), _architectures() if _wants_cuda() else "")


def cache_folder() -> Path:
    """Where libraries are built: ``$FXFUSE_CACHE``, else ``fxfuse`` in the user's cache folder."""
    if folder := os.environ.get("FXFUSE_CACHE"):
        return Path(folder)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fxfuse"


def existing() -> Path | None:
    """A library that fits this machine, without building or initialising CUDA."""
    try:
        listed = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
        wanted = Recipe(_source_folder(), (listed or "*") if _wants_cuda() else "")
        # Without a list the visible GPUs decide, and to ask them would initialise CUDA.
        name = "fxfuse-cuda-*.so" if wanted.architectures == "*" else wanted.file_name
        for folder in (_PACKAGE / "lib", cache_folder()):
            if found := list((folder / wanted.folder_name).glob(name)):
                return max(found, key=lambda path: path.stat().st_mtime)
    except (OSError, RuntimeError):
        pass  # an import never fails for want of a library
    return None


# ---- building -------------------------------------------------------------------------------


def check_tools(what: Recipe) -> None:
    """Looks for what a build needs.

    Raises:
        BuildError: If something is missing or does not fit the installed torch.
    """
    if compiler() is None:
        name = os.environ.get("CXX", "c++")
        raise BuildError(f"no C++ compiler, {name!r} was not found; install g++ or set CXX")
    if _ninja_folder() is None:
        raise BuildError("ninja was not found; run 'pip install ninja'")
    if what.cuda:
        nvcc = find_nvcc()
        assert nvcc is not None  # _wants_cuda
        text = subprocess.run(
            [nvcc, "--version"], capture_output=True, text=True, check=True
        ).stdout
        release = re.search(r"release (\d+)\.", text)
        torch_major = str(torch.version.cuda).split(".")[0]
        if release is None or release.group(1) != torch_major:
            got = release.group(1) if release else "an unknown version"
            raise BuildError(
                f"torch was built for CUDA {torch.version.cuda} but {nvcc} is of CUDA {got}; "
                f"set CUDA_HOME to a CUDA {torch_major} toolkit"
            )


def _ninja_folder() -> str | None:
    """Where ninja lies; in an environment that was not activated it is not on PATH."""
    try:
        import ninja

        return str(ninja.BIN_DIR)
    except ImportError:
        found = shutil.which("ninja")
        return str(Path(found).parent) if found else None


def _compile(what: Recipe, folder: Path, log: Path) -> Path:
    """Compiles and test-loads the library in a fresh folder; the log stays where that fails."""
    environment = dict(os.environ)
    environment["PATH"] = os.pathsep.join(filter(None, [_ninja_folder(), environment.get("PATH")]))
    if what.cuda:
        nvcc = find_nvcc()
        assert nvcc is not None
        environment["CUDA_HOME"] = str(Path(nvcc).parent.parent)
        environment["TORCH_CUDA_ARCH_LIST"] = what.targets
    arguments = {
        "name": "fxfuse",
        "sources": [str(path) for path in what.files],
        "extra_cflags": what.cflags,
        "extra_cuda_cflags": what.cuda_cflags,
        "extra_include_paths": [str(what.sources)],
        "build_directory": str(folder),
        "with_cuda": what.cuda,
        "is_python_module": False,
        "verbose": True,
    }
    process = subprocess.run(
        [sys.executable, "-c", _COMPILE],
        input=json.dumps(arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    built = folder / "fxfuse.so"
    if process.returncode != 0 or not built.is_file():
        log.write_text(process.stdout)
        raise BuildError(_failed(log))
    return built


def _failed(log: Path) -> str:
    lines = log.read_text().splitlines()
    first = next((line.strip() for line in lines if "error" in line.lower()), "no library was made")
    return (
        f"the compilation failed: {first} (all of it: {log}; 'python -m fxfuse build' tries again)"
    )


def build(*, again: bool = False) -> Path:
    """Builds the library for this machine unless it is built already.

    Says once, on stderr, what it builds and how long it took. Processes that come at the same
    time wait for one of them; a build that was killed leaves nothing that a later one trips on.

    Args:
        again: Compile even if the compilation of the same sources has failed here before; else
            every process would wait for it to fail once more.

    Returns:
        The path of the library.

    Raises:
        BuildError: If it cannot be built; the message says what is missing.
    """
    from filelock import FileLock, Timeout

    what = recipe()
    folder = cache_folder() / what.folder_name
    target = folder / what.file_name
    if target.is_file():
        return target
    check_tools(what)
    lock, log = folder / ".lock", folder / f"{what.file_name}.log"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(lock, timeout=_LOCK_TIMEOUT):
            if target.is_file():
                return target
            if log.is_file() and not again:
                raise BuildError(_failed(log))
            for stale in folder.glob("build-*"):
                shutil.rmtree(stale, ignore_errors=True)
            print(
                f"fxfuse: building the {what} library, once, in {folder}",
                file=sys.stderr,
                flush=True,
            )
            start = time.monotonic()
            scratch = Path(tempfile.mkdtemp(prefix="build-", dir=folder))
            try:
                os.replace(_compile(what, scratch, log), target)
                log.unlink(missing_ok=True)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
            _say(f"built in {time.monotonic() - start:.0f} s")
    except Timeout:
        raise BuildError(
            f"another process has held {lock} for {_LOCK_TIMEOUT} s; stop it and try again"
        ) from None
    except OSError as error:
        raise BuildError(
            f"the cache folder {folder} cannot be written ({error}); set FXFUSE_CACHE"
        ) from error
    return target


def _say(text: str) -> None:
    print(f"fxfuse: {text}", file=sys.stderr, flush=True)


# ---- loading --------------------------------------------------------------------------------

_lock = threading.RLock()
_loaded: Path | None = None
_failure: str | None = None
_callbacks: list[Callable[[], None]] = []


def _open(path: Path) -> None:
    global _loaded
    torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
    _loaded = path
    for callback in _callbacks:
        callback()


def on_load(callback: Callable[[], None]) -> None:
    """Calls ``callback`` once the operators exist: now, or when the library is loaded."""
    with _lock:
        _callbacks.append(callback)
        if _loaded is not None:
            callback()


def is_loaded() -> bool:
    """Whether ``torch.ops.fxfuse`` is there."""
    return _loaded is not None


def failure() -> str | None:
    """Why the library could not be built or loaded in this process, if that was tried."""
    return _failure


def load_existing() -> bool:
    """Loads a library that was built before; never builds. Returns whether there is one."""
    with _lock:
        if _loaded is None and (path := existing()) is not None:
            try:
                _open(path)
            except (OSError, RuntimeError) as error:
                warnings.warn(
                    f"fxfuse: {path} cannot be loaded: {error}", RuntimeWarning, stacklevel=2
                )
        return _loaded is not None


def load() -> bool:
    """Makes the operators available, building the library if this machine has none yet.

    Returns:
        Whether they are. False after one warning that says what is missing; models then run
        unfused.
    """
    global _failure
    if _loaded is not None:
        return True
    with _lock:
        if _loaded is None and _failure is None:
            try:
                _open(build())
            except (BuildError, OSError, RuntimeError) as error:
                _failure = str(error)
                message = f"fxfuse: the library cannot be built, models run unfused: {_failure}"
                warnings.warn(message, RuntimeWarning, stacklevel=3)
        return _loaded is not None


class _Namespace(torch._ops._OpNamespace):
    """``torch.ops.fxfuse``, which makes the operators available when one is first asked for.

    So a saved program opens, or torch's error comes after our warning, which says what is missing.
    """

    __module__ = torch._ops.__name__  # by which torch finds operators

    def __getattr__(self, op_name: str) -> torch._ops.OpOverloadPacket:
        if not op_name.startswith("_"):
            load()
        return super().__getattr__(op_name)


torch.ops.fxfuse = _Namespace("fxfuse")  # type: ignore[attr-defined]


def library_path() -> Path:
    """The path of the compiled library, for C++ users and for packaging.

    Raises:
        BuildError: If there is none and it cannot be built.
    """
    if not load():
        raise BuildError(str(_failure))
    assert _loaded is not None
    return _loaded
