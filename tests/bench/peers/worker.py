"""What the workers that ingest documents have in common. Runs in the peers' environment, which has no ragfence.

    stdout   {"langchain-core": "1.7.2", ...} when it is ready for questions
    stdin    {"state": "known", "how": "upserts", "corpus": "known", "count": 10000, "new": 0}
    stdout   {"ready": true}; the documents are made, and the connections are there
    stdin    go
    stdout   {"seconds": 0.4, "embeds": 0, "rows": 0, "ids": []}
    stdin    {"forget": "known", "how": "upserts"}
    stdout   {}

A state is what a peer remembers of earlier documents, made when it is first named. `new` is how many documents must
be embedded and written; null leaves it open: a race, in which the ids of the rows are told as well, and the peer splits
documents as its documentation has it (each is one chunk all the same).
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from tests.bench.peers.corpus import Text, corpus


class Counts:
    """Filled in by the embedder and the vector store, which do nothing else."""

    def __init__(self) -> None:
        self.embeds = 0
        self.rows: list[str] = []


class Ingesting(Protocol):
    counts: Counts

    def ready(self, state: str, how: str, documents: Iterable[Text], *, race: bool) -> Callable[[], object]:
        """Makes documents, state and connections; what it returns is timed."""

    def forget(self, state: str, how: str) -> None:
        """Drops a state: what is timed next must not pay for it."""


def serve(worker: Ingesting, packages: Sequence[str]) -> None:
    _say({name: importlib.metadata.version(name) for name in packages})
    for line in sys.stdin:
        asked = json.loads(line)
        if "forget" in asked:
            worker.forget(asked["forget"], asked["how"])
            _say({})
            continue
        documents = corpus(asked["corpus"], asked["count"])
        work = worker.ready(asked["state"], asked["how"], documents, race=asked["new"] is None)
        counts = worker.counts = Counts()
        gc.collect()
        _say({"ready": True})
        sys.stdin.readline()
        started = time.perf_counter()
        work()
        taken = time.perf_counter() - started
        if asked["new"] is not None and not counts.embeds == len(counts.rows) == asked["new"]:
            raise RuntimeError(f"{asked}: {counts.embeds} embedded and {len(counts.rows)} written")
        ids = counts.rows if asked["new"] is None else []
        _say({"seconds": taken, "embeds": counts.embeds, "rows": len(counts.rows), "ids": ids})


def _say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)
