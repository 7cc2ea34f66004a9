"""The drivers of peers' workers: a line of JSON asks, a line answers. The worker has the clock: pipes cost nothing."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from tests.bench.rounds import Subject

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENTS = Path(".venv-bench")
"""one folder each: LlamaIndex needs an older redis-py than Powertools is measured with"""
POWERTOOLS, DOCUMENTS = "powertools", "documents"

LANGCHAIN = "LangChain"
UPSERTS, DUPLICATES_ONLY = "LlamaIndex upserts", "LlamaIndex duplicates_only"

# Nothing of ours and no switch of its own may reach a peer.
_KEPT_BACK = ("PYTHON", "POWERTOOLS_", "AWS_", "LANGCHAIN_", "LANGSMITH_", "LLAMA_", "SQLALCHEMY_", "REDIS_")


class Lines:
    """A worker on the other side of two pipes."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    @cached_property
    def versions(self) -> dict[str, str]:
        """Its first words, when it is up. Read when they are needed: workers that import for seconds start together."""
        told: dict[str, str] = self.answer()
        return told

    def wait(self) -> None:
        if not self.versions:
            raise RuntimeError("the peer's worker names no versions")

    def tell(self, question: dict[str, Any]) -> None:
        self.wait()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the peer's worker ended with {self._process.wait()}; its words stand above")
        return json.loads(line)


class Peer(Lines):
    """Powertools."""

    def seconds(self, run: str, count: int, number: int) -> float:
        """The time of `count` operations: "replay" or "new"."""
        self.tell({"run": run, "count": count, "round": number})
        return float(self.answer()["seconds"])

    def subject(self, run: str, count: int) -> Subject:
        return Subject(f"Powertools {run}", count, lambda number: self.seconds(run, count, number))


class Ingested(NamedTuple):
    seconds: float
    embeds: int
    rows: int
    ids: list[str]
    """of the rows; told of a race only"""


class IngestingPeer:
    """LangChain, or LlamaIndex with one of its strategies; see `worker.py`."""

    def __init__(self, worker: Lines, how: str = "") -> None:
        self._worker, self._how = worker, how

    @property
    def versions(self) -> dict[str, str]:
        return self._worker.versions

    def ingest(self, state: str, corpus: str, count: int, *, new: int) -> float:
        """The seconds it took; the worker has checked that so many were embedded and written."""
        self.prepare(state, corpus, count, new=new)
        self.go()
        return self.ended().seconds

    def prepare(self, state: str, corpus: str, count: int, *, new: int | None) -> None:
        """Returns when the documents are made. `new` None is a race: nobody knows how many will be."""
        self._worker.tell({"state": state, "how": self._how, "corpus": corpus, "count": count, "new": new})
        self._worker.answer()

    def go(self) -> None:
        self._worker.tell({})

    def ended(self) -> Ingested:
        return Ingested(**self._worker.answer())

    def forget(self, state: str) -> None:
        self._worker.tell({"forget": state, "how": self._how})
        self._worker.answer()


def python_of(environment: Path) -> Path | None:
    """The peer's interpreter, or None when `make bench` has not made its environment."""
    python = environment / "bin" / "python"
    return python.absolute() if python.exists() else None


@contextlib.contextmanager
def powertools(python: Path, url: str) -> Iterator[Peer]:
    with _worker(python, "powertools", url) as process:
        peer = Peer(process)
        peer.wait()  # what it asks the server to get ready is no part of what its callers count
        yield peer


@contextlib.contextmanager
def ingesting(python: Path, url: str, folder: Path) -> Iterator[dict[str, IngestingPeer]]:
    """By name. Two processes: LangChain's, which keeps its SQLite files in the folder, and LlamaIndex's."""
    folder.mkdir(exist_ok=True)
    with (
        _worker(python, "langchain_index", str(folder)) as langchain,
        _worker(python, "llamaindex_pipeline", url) as llamaindex,
    ):
        pipeline = Lines(llamaindex)
        yield {
            LANGCHAIN: IngestingPeer(Lines(langchain)),
            UPSERTS: IngestingPeer(pipeline, "upserts"),
            DUPLICATES_ONLY: IngestingPeer(pipeline, "duplicates_only"),
        }


@contextlib.contextmanager
def _worker(python: Path, module: str, *argv: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [str(python), "-m", f"{__package__}.{module}", *argv],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith(_KEPT_BACK)},
    )
    with process:  # waits, and closes the pipes
        try:
            yield process
        finally:
            process.kill()  # by its pid
