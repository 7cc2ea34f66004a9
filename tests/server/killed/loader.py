"""A client process: `python -m tests.server.killed.loader JOB.json` sends its share of a load until all is answered.

One line for every request that was answered: number, status, code, a digest of the body, snippet_ids, when. What else
it met comes last. Ends when all is sent, or after `end` is there, with what is under way.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tests.server.killed.asking import Client, Notes
from tests.server.killed.load import sent


@dataclass(frozen=True, slots=True)
class LoadJob:
    port: int
    token: str
    seed: int
    numbers: tuple[int, int | None, int]
    """from, to (None: until the end is told), step"""
    connections: int
    answers: str
    end: str
    honours: bool = False

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> LoadJob:
        values: dict[str, Any] = json.loads(path.read_text())
        values["numbers"] = tuple(values["numbers"])
        return cls(**{field.name: values[field.name] for field in fields(cls)})


class Loader:
    def __init__(self, job: LoadJob) -> None:
        self._job = job
        first, last, step = job.numbers
        self._numbers = iter(range(first, last, step)) if last is not None else itertools.count(first, step)
        self._lock = threading.Lock()
        self._end = Path(job.end)
        self._file = Path(job.answers).open("w", buffering=1)  # noqa: SIM115  # closed at the end of run
        self._met: Counter[str] = Counter()
        self._unavailable: list[float] = []
        self._problems: list[str] = []

    def run(self) -> None:
        threads = [threading.Thread(target=self._connection) for _ in range(self._job.connections)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        last = {"met": self._met, "unavailable": self._unavailable, "problems": self._problems}
        self._file.write(json.dumps(last) + "\n")
        self._file.close()

    def _connection(self) -> None:
        notes = Notes()
        client = Client(self._job.port, self._job.token, notes, honours=self._job.honours)
        while (number := self._next()) is not None:
            asked_at = time.monotonic()
            reply = client.answered(sent(self._job.seed, number).ask)
            if reply is None:
                continue
            notes.answers.clear()
            good = reply.status < 300
            line = {
                "number": number,
                "status": reply.status,
                "code": reply.code,
                "body": hashlib.sha256(reply.body).hexdigest()[:24] if good else "",
                "ids": json.loads(reply.body)["snippet_ids"] if good else [],
                "asked": asked_at,
                "at": time.monotonic(),
            }
            with self._lock:
                self._file.write(json.dumps(line) + "\n")
        client.close()
        with self._lock:
            self._met += notes.met
            self._unavailable += notes.unavailable
            self._problems += notes.problems

    def _next(self) -> int | None:
        with self._lock:
            if self._job.numbers[1] is None and self._end.exists():
                return None
            return next(self._numbers, None)


if __name__ == "__main__":
    Loader(LoadJob.load(Path(sys.argv[1]))).run()
