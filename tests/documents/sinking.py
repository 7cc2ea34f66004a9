"""Sinks under attack: what a sink must hold, and a process that ingests into one and stops where it is told to.

python -m tests.documents.sinking FOLDER kill|freeze POINT STEPS

FOLDER holds SQLite, the objects and the sink; the leases are short. STEPS is JSON, [doc_id, text, views] each, all of
them one batch; a single one without a text is a retraction.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import ragfence
from ragfence import Document, Policy
from ragfence.documents.documents import Documents
from ragfence.documents.sinks.sink import SinkPending
from ragfence.stores.local import LocalObjects
from ragfence.stores.sqlite import SqliteFences
from ragfence.testing import at_point
from ragfence.testing.memory_sinks import ListSink, SqliteSink
from tests.documents.chunkers import Paragraphs

LEASE_S = 0.5
SIGNALS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}

Step = Sequence[str | int | None]
"""doc_id, text, views"""


def assert_right(documents: Documents, sink: ListSink | SqliteSink) -> None:
    """The sink holds the live snippets, all of them, nothing else, and as their documents are described now."""
    live = {
        snippet.snippet_id: (snippet, found.metadata)
        for found in documents.heads()
        for snippet in documents.snippets(found.doc_id)
    }
    held = sink.held
    assert held.keys() == live.keys()
    positions = ("start", "end", "section_id", "ordinal") if getattr(sink, "keeps_positions", False) else ()
    for snippet_id, (snippet, metadata) in live.items():
        there = held[snippet_id]
        assert there.metadata == metadata
        for field in ("doc_id", "text", "tokens", "source_url", *positions):
            assert getattr(there, field) == getattr(snippet, field), field


def send(documents: Documents, steps: Sequence[Step]) -> None:
    """All documents in one batch; or one that is taken away."""
    if len(steps) == 1 and steps[0][1] is None:
        documents.retract(steps[0][0])
        return
    receipts = documents.ingest_many([Document(doc_id, text or "", {"views": views}) for doc_id, text, views in steps])
    assert not any(receipt.failed for receipt in receipts), receipts


def opened(folder: Path) -> Documents:
    fence = ragfence.open(
        SqliteFences(folder / "fences.db"),
        objects=LocalObjects(folder / "objects"),
        policy=Policy.from_mapping({"lease": {"ttl_s": LEASE_S, "max_attempts": 100}, "wait": {"deadline_s": 60}}),
        journal=folder / "journal",
    )
    return fence.documents.using(chunker=Paragraphs(), sink=SqliteSink(folder / "sink.db"))


def main(folder: str, action: str, point: str, steps: str) -> None:
    warnings.simplefilter("error", SinkPending)
    documents = opened(Path(folder))
    with at_point(point, lambda: os.kill(os.getpid(), SIGNALS[action])):
        send(documents, json.loads(steps))
    print("done")


if __name__ == "__main__":
    main(*sys.argv[1:])
