"""One mutant, and how it is run."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
WITHIN_S = 600.0
NOT_RUN = 70
"""exit status if pytest itself failed; pytest has none above 5"""

# What tests import besides ragfence takes most of the time of a run: a process that has it all is forked for each.
_fork = multiprocessing.get_context("forkserver")
_fork.set_forkserver_preload(
    [
        *("pytest", "hypothesis", "pydantic", "rich.console", "typer.testing", "yaml", "xxhash", "redis", "boto3"),
        *("pyarrow.compute", "pyarrow.parquet", "sqlalchemy", "httpx", "fastapi", "prometheus_client"),
    ]
)


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
    with tempfile.TemporaryDirectory(prefix="ragfence-mutant-") as name:
        folder = Path(name)
        for part in ("ragfence", "tests", "pipelines"):
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", folder)
        file = folder / mutant.file
        source = file.read_text()
        if mutant.old and source.count(mutant.old) != 1:
            return f"not applied: the text occurs {source.count(mutant.old)} times"
        if mutant.old:
            file.write_text(source.replace(mutant.old, mutant.new))
        process = _fork.Process(target=_run_tests, args=(name, mutant.tests))
        process.start()
        process.join(WITHIN_S)
        if process.is_alive():
            process.kill()
            process.join()
            return f"broken: not done within {WITHIN_S:.0f} s"
        printed = (folder / "printed").read_text(errors="replace") if (folder / "printed").exists() else ""
        # 1 is "tests failed"; any other code is a mutant that does not even run.
        if process.exitcode == 1 and "error during collection" not in printed:
            return "caught"
        return "SURVIVED" if process.exitcode == 0 else f"broken (exit {process.exitcode}): {printed[-300:]}"


def _run_tests(folder: str, tests: tuple[str, ...]) -> None:
    """Runs tests on the copy in the folder, as `python -m pytest` there would. Called in a process of its own."""
    printed = os.open(os.path.join(folder, "printed"), os.O_WRONLY | os.O_CREAT, 0o600)
    for stream in (1, 2):
        os.dup2(printed, stream)
    os.chdir(folder)
    os.environ |= {"PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    sys.path[:] = [folder, *(place for place in sys.path if place not in ("", folder, str(ROOT))), str(ROOT)]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "ragfence", "pipelines")]:
        del sys.modules[name]
    sys.argv[:] = ["pytest"]

    import pytest

    code = NOT_RUN
    try:
        # Plugins of pytest are among what was imported before.
        code = int(pytest.main(["-x", "-q", "--no-header", "-W", "ignore::pytest.PytestAssertRewriteWarning", *tests]))
    finally:
        sys.stdout.flush()
        os._exit(code)  # what a test left running must not hold up the verdict
