"""The command line, run as a user runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def fxfuse(
    *arguments: str, cwd: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`python -m fxfuse` of this checkout, in a folder."""
    return subprocess.run(
        [sys.executable, "-m", "fxfuse", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def check_refusal(result: subprocess.CompletedProcess[str], message: str) -> None:
    """Bad input gives one line, nothing on stdout, and exit code 2."""
    assert result.returncode == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""
