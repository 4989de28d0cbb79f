"""Building, finding and loading the library, each with a cache folder of its own.

What is built is a folder of one small source, through the same code as the kernels.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fxfuse
from fxfuse import library, ops

ROOT = Path(fxfuse.__file__).resolve().parent.parent
POSIX = os.name == "posix"

# A process whose kernels are the small source.  It has no operators to make fakes for.
SMALL = """
    import sys, threading, time
    from pathlib import Path
    import fxfuse
    from fxfuse import library
    library._source_folder = lambda: Path({sources!r})
    library._callbacks.clear()
"""


def script(text: str, **values: str) -> list[str]:
    for name, value in values.items():
        text = text.replace(f"{{{name}!r}}", repr(value))
    return [sys.executable, "-c", textwrap.dedent(text)]


def environment(cache: Path, **changes: str) -> dict[str, str]:
    """Of a process with its own cache folder, for which the machine has no GPU."""
    env = dict(os.environ)
    env.pop("TORCH_CUDA_ARCH_LIST", None)
    env |= {"FXFUSE_CACHE": str(cache), "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    return env | changes


def python(text: str, env: dict[str, str], **values: str) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        script(text, **values), env=env, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return result


def executable(path: Path, text: str) -> Path:
    path.write_text(textwrap.dedent(text))
    path.chmod(0o755)
    return path


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "library.cpp").write_text('extern "C" int fxfuse_small() { return 42; }\n')
    return folder


@pytest.fixture
def recording_compiler(tmp_path: Path) -> Path:
    """A compiler that notes each compilation in `compilations`, and sleeps for $PAUSE first."""
    real = library.compiler()
    assert real is not None
    return executable(
        tmp_path / "c++",
        f"""\
        #!/bin/sh
        case " $* " in
          *" -c "*) echo compiled >> {tmp_path / "compilations"}; sleep ${{PAUSE:-0}};;
        esac
        exec {real} "$@"
        """,
    )


def compilations(tmp_path: Path) -> int:
    path = tmp_path / "compilations"
    return len(path.read_text().splitlines()) if path.exists() else 0


# ---- killed and simultaneous builds ---------------------------------------------------------


@pytest.mark.skipif(not POSIX, reason="needs SIGKILL")
def test_case_39_a_killed_build_leaves_nothing_to_trip_on(
    tmp_path: Path, sources: Path, recording_compiler: Path
) -> None:
    cache = tmp_path / "cache"
    load = SMALL + "    print(library.load(), library.library_path())"
    first = subprocess.Popen(
        script(load, sources=str(sources)),
        env=environment(cache, CXX=str(recording_compiler), PAUSE="120"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 120
        while compilations(tmp_path) == 0:
            assert first.poll() is None, "the build ended before it compiled anything"
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(first.pid, signal.SIGKILL)  # its compiler lives on, as after a real kill -9
        first.wait()
        start = time.monotonic()
        second = python(load, environment(cache, CXX=str(recording_compiler)), sources=str(sources))
        assert time.monotonic() - start < 60
        loaded, path = second.stdout.split()
        assert loaded == "True"
        assert Path(path).is_file()
        assert [p.name for p in Path(path).parent.glob("build-*")] == []
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(first.pid, signal.SIGKILL)


def test_case_40_threads_and_processes_at_once_build_once(
    tmp_path: Path, sources: Path, recording_compiler: Path
) -> None:
    text = (
        SMALL
        + """
    results = []
    def load():
        results.append((library.load(), str(library.library_path())))
    threads = [threading.Thread(target=load) for _ in range(8)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert len(results) == 8 and len(set(results)) == 1, results
    import ctypes
    assert ctypes.CDLL(results[0][1]).fxfuse_small() == 42
    print(*results[0])
    """
    )
    env = environment(tmp_path / "cache", CXX=str(recording_compiler), PAUSE="1")
    processes = [
        subprocess.Popen(
            script(text, sources=str(sources)),
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    answers = [process.communicate(timeout=300) for process in processes]
    assert [p.returncode for p in processes] == [0] * 4, answers
    outputs = {out for out, _ in answers}
    assert len(outputs) == 1
    assert outputs.pop().startswith("True ")
    assert compilations(tmp_path) == 1
    said = "".join(error for _, error in answers)
    assert said.count("building the CPU library") == 1
    assert said.count("built in") == 1


# ---- where it cannot be built ---------------------------------------------------------------

UNFUSED = """
    import json, os, sys, warnings
    scenarios = json.loads({scenarios!r})
    os.environ.update(scenarios[0][1])
    with warnings.catch_warnings(record=True) as at_import:
        warnings.simplefilter("always")
        import torch
        import fxfuse
        from fxfuse import library, ops
    ours = [str(w.message) for w in at_import if "fxfuse" in str(w.message)]
    assert ours == [], ours

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 12), torch.nn.GroupNorm(3, 12), torch.nn.Hardtanh(-1, 1)
    )
    x = torch.randn(5, 8)
    found = {}
    for name, changes in scenarios:
        os.environ.update(changes)
        if name == "no ninja":
            sys.modules["ninja"] = None
        library._failure = None  # as in a process of its own
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                optimized = fxfuse.optimize(model)
                assert torch.equal(optimized(x), model(x))
            y = fxfuse.group_norm_activation(x, 2, activation="hardtanh", params=(-1, 1))
            assert torch.equal(y, torch.nn.functional.hardtanh(torch.group_norm(x, 2)))
            z = x.clone().requires_grad_()
            optimized(z).sum().backward()
        assert not library.is_loaded()
        try:
            fxfuse.library_path()
        except library.BuildError as error:
            assert str(error) == library.failure()
        else:
            raise AssertionError("there is a library")
        found[name] = [str(w.message) for w in caught if "fxfuse" in str(w.message)]
    print(json.dumps(found))
"""


def test_case_41_models_run_unfused_after_one_warning(tmp_path: Path) -> None:
    regular_file = tmp_path / "file"
    regular_file.write_text("")
    failing = executable(
        tmp_path / "failing-c++", "#!/bin/sh\necho 'error: no such luck'\nexit 1\n"
    )
    tools = tmp_path / "bin"  # everything but ninja
    tools.mkdir()
    compiler = library.compiler()
    assert compiler is not None
    for tool in (compiler, shutil.which("sh")):
        assert tool is not None
        (tools / Path(tool).name).symlink_to(tool)
    cache = {"FXFUSE_CACHE": str(tmp_path / "cache")}
    working = {"CXX": compiler}
    scenarios: list[tuple[str, dict[str, str]]] = [
        ("no compiler", cache | {"CXX": "/nonexistent/c++"}),
        ("cache not writable", working | {"FXFUSE_CACHE": str(regular_file / "cache")}),
        ("compiler fails", cache | {"CXX": str(failing)}),
        ("no ninja", cache | working | {"PATH": str(tools)}),
    ]
    result = python(UNFUSED, environment(tmp_path / "cache"), scenarios=json.dumps(scenarios))
    found = json.loads(result.stdout.splitlines()[-1])
    expected = {
        "no compiler": ["'/nonexistent/c++' was not found", "install g++ or set CXX"],
        "cache not writable": [str(regular_file / "cache"), "set FXFUSE_CACHE"],
        "compiler fails": ["the compilation failed", "all of it: "],
        "no ninja": ["ninja was not found", "pip install ninja"],
    }
    for name, parts in expected.items():
        assert len(found[name]) == 1, (name, found[name])
        for part in ["models run unfused", *parts]:
            assert part in found[name][0], (name, found[name])


@pytest.fixture
def fake_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A torch for CUDA 12.8 beside an nvcc of CUDA 13.0."""
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    executable(nvcc, "#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.48'\n")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    return nvcc


@pytest.mark.skipif(not POSIX, reason="needs a shell")
def test_case_41_an_nvcc_of_another_cuda_is_named(
    fake_cuda: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(library.BuildError, match=r"CUDA 12\.8 but .*nvcc is of CUDA 13; set CUDA"):
        library.check_tools(library.Recipe(sources, "9.0"))
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    library.check_tools(library.Recipe(sources, "9.0"))


def test_case_41_cuda_is_built_only_for_a_gpu_or_a_list(
    fake_cuda: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert not library.recipe().cuda
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0")
    assert library.recipe().architectures == "8.0;9.0"
    monkeypatch.setattr(torch.version, "cuda", None)
    assert not library.recipe().cuda


@pytest.mark.parametrize(
    ("listed", "targets"),
    [
        ("8.0;9.0", "8.0;9.0a"),
        ("9.0 10.0+PTX", "9.0a;10.0+PTX"),
        ("9.0+PTX", "9.0a;9.0+PTX"),
        ("9.0a;12.0", "9.0a;12.0"),
        ("8.9", "8.9"),
    ],
)
def test_hopper_is_compiled_for_with_all_its_instructions(listed: str, targets: str) -> None:
    assert library.Recipe(Path(), listed).targets == targets


# ---- what a cached library depends on -------------------------------------------------------


@contextlib.contextmanager
def changed(sources: Path, what: str, monkeypatch: pytest.MonkeyPatch, tmp: Path) -> Iterator[None]:
    with monkeypatch.context() as patch:
        if what == "torch":
            patch.setattr(torch, "__version__", "2.99.0+cpu")
        elif what == "CUDA":
            patch.setattr(torch.version, "cuda", "99.0")
        elif what == "Python":
            patch.setattr(sys.implementation, "cache_tag", "cpython-399")
        elif what == "compiler":
            patch.setenv("CXX", str(executable(tmp / "another-c++", "#!/bin/sh\n")))
        elif what == "flags":
            patch.setattr(library.Recipe, "cflags", ["-O0"])
        elif what == "source":
            (sources / "library.cpp").write_text("// other\n")
        elif what == "new header":
            (sources / "new.h").write_text("")
        yield


@pytest.mark.parametrize(
    "what", ["torch", "CUDA", "Python", "compiler", "flags", "source", "new header"]
)
def test_case_42_another_environment_is_another_library(
    tmp_path: Path, sources: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FXFUSE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(library, "_source_folder", lambda: sources)
    monkeypatch.setattr(library, "_wants_cuda", lambda: False)
    recipe = library.recipe()
    name = recipe.folder_name  # computed anew each time
    built = library.cache_folder() / name / recipe.file_name
    assert library.existing() is None
    built.parent.mkdir(parents=True)
    built.write_text("")
    assert library.existing() == built
    assert library.build() == built  # and nothing is compiled
    with changed(sources, what, monkeypatch, tmp_path):
        assert library.recipe().folder_name != name
        assert library.existing() is None


# ---- import and load ------------------------------------------------------------------------

IMPORT = """
    import subprocess, sys, time
    import torch
    def no_process(*args, **kwargs):
        raise AssertionError("import fxfuse started a process")
    subprocess.Popen = no_process
    start = time.perf_counter()
    import fxfuse
    took = time.perf_counter() - start
    from fxfuse import library
    assert "torch.utils.cpp_extension" not in sys.modules
    print(took, library.is_loaded())
"""


def imports(env: dict[str, str]) -> tuple[float, set[str]]:
    """The least time of three processes, since other work on the machine only adds to it."""
    lines: list[Any] = [python(IMPORT, env).stdout.split() for _ in range(3)]
    return min(float(took) for took, _ in lines), {loaded for _, loaded in lines}


def test_import_never_builds(tmp_path: Path) -> None:
    took, loaded = imports(environment(tmp_path / "cache"))
    assert loaded == {"False"}
    assert not (tmp_path / "cache").exists()
    assert took < 0.3  # 0.05 on an idle machine


def test_the_next_process_loads_the_library_at_import() -> None:
    library.library_path()
    took, loaded = imports(os.environ | {"PYTHONPATH": str(ROOT)})
    assert loaded == {"True"}
    assert took < 1.0  # 0.3 on an idle machine


def test_library_path_is_what_was_loaded() -> None:
    path = fxfuse.library_path()
    assert path.is_file()
    assert path == library.existing() == fxfuse.library_path()
    assert library.is_loaded()
    assert library.failure() is None
    assert torch.ops.fxfuse.group_norm_activation.default is not None
    x = torch.randn(4, 6)
    assert torch.equal(
        ops.group_norm_activation(x, 2),
        torch.ops.fxfuse.group_norm_activation(x, 2, None, None, 1e-5, "identity", ()),
    )
