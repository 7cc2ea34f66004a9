"""One mutant, and how it is run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True, slots=True)
class Mutant:
    """One text of one file, and what replaces it."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    """Arguments of pytest: at least one of these tests must fail."""


def run(mutant: Mutant) -> str:
    """Returns "caught", "SURVIVED", or why the mutant could not be run."""
    with tempfile.TemporaryDirectory(prefix="ragfence-mutant-") as folder:
        for part in ("ragfence", "tests", "pipelines"):
            shutil.copytree(ROOT / part, Path(folder) / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", folder)
        file = Path(folder) / mutant.file
        source = file.read_text()
        if mutant.old and source.count(mutant.old) != 1:
            return f"not applied: the text occurs {source.count(mutant.old)} times"
        if mutant.old:
            file.write_text(source.replace(mutant.old, mutant.new))
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", *mutant.tests],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        # 1 is "tests failed"; any other code is a mutant that does not even run.
        if done.returncode == 1 and "error during collection" not in done.stdout:
            return "caught"
        return "SURVIVED" if done.returncode == 0 else f"broken (exit {done.returncode}): {done.stdout[-300:]}"
