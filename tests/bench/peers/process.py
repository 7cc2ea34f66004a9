"""The driver of a peer's worker: a line of JSON asks, a line answers. The worker has the clock: pipes cost nothing."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.bench.rounds import Subject

POWERTOOLS = Path(__file__).with_name("powertools.py")
ENVIRONMENT = Path(".venv-bench")


class Peer:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.versions: dict[str, str] = self._answer()

    def seconds(self, run: str, count: int, number: int) -> float:
        """The time of `count` operations: "replay" or "new"."""
        self._tell({"run": run, "count": count, "round": number})
        return float(self._answer()["seconds"])

    def subject(self, run: str, count: int) -> Subject:
        return Subject(f"Powertools {run}", count, lambda number: self.seconds(run, count, number))

    def _tell(self, question: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the peer's worker ended with {self._process.wait()}; its words stand above")
        return json.loads(line)


def python_of(environment: Path) -> Path | None:
    """The peer's interpreter, or None when `make bench` has not made its environment."""
    python = environment / "bin" / "python"
    return python if python.exists() else None


@contextlib.contextmanager
def powertools(python: Path, url: str) -> Iterator[Peer]:
    # Nothing of ours and no switch of its own may reach the peer.
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "POWERTOOLS_", "AWS_"))}
    process = subprocess.Popen(
        [str(python), str(POWERTOOLS), url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    )
    with process:  # waits, and closes the pipes
        try:
            yield Peer(process)
        finally:
            process.kill()  # by its pid
