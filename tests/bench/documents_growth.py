"""One changed document among few and among many known ones, and how fast the many are hydrated."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import ragfence
from tests import servers
from tests.bench.documents_ours import Ours, document, ours
from tests.bench.documents_scale import DocumentsScale
from tests.bench.machine import redis_server
from tests.bench.memory import drop_rows
from tests.bench.peers.corpus import corpus
from tests.bench.rounds import Subject, clocked, interleave
from tests.bench.run import Say

CHARACTERS = 200
"""of the known ones; the changed ones are as long as everywhere"""
FILL_BATCH = 5_000
_KNOWN = "known"


def measure(scale: DocumentsScale, say: Say) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        few, _ = stack.enter_context(_filled(scale.few, say))
        many, server = stack.enter_context(_filled(scale.many, say))
        subjects = [_changing(few, scale.few, scale.changes), _changing(many, scale.many, scale.changes)]
        changed = interleave(subjects, scale.rounds, lambda text: say(f"one changed document, {text}"))
        say(f"hydrating {scale.many:,} receipts")
        return {"changed": changed, "hydration": _hydrated(many, server, scale)}


def among(known: int) -> str:
    return f"a changed document among {known:,}"


@contextlib.contextmanager
def _filled(known: int, say: Say) -> Iterator[tuple[Ours, servers.RedisServer]]:
    say(f"ingesting {known:,} documents")
    with (
        redis_server() as server,
        ours(server.url, server.folder, batch=FILL_BATCH) as filled,
        server.client() as admin,
    ):
        documents = map(document, corpus(_KNOWN, known, characters=CHARACTERS))
        receipts = filled.documents.ingest_many(documents, batch=FILL_BATCH, stream=True)
        if sum(receipt.is_new for receipt in receipts) != known:
            raise RuntimeError("not every document was new")
        # The rows of all these decisions are no part of the question: both servers go on without any.
        drop_rows(admin)
        yield filled, server


def _changing(filled: Ours, known: int, changes: int) -> Subject:
    """The first documents of the corpus, with another text every round: the same ones in both stores."""

    def changed(number: int) -> list[ragfence.Document]:
        return [document(each._replace(text=f"round {number}: {each.text}")) for each in corpus(_KNOWN, changes)]

    def work(documents: list[ragfence.Document]) -> None:
        ingest = filled.documents.ingest
        for each in documents:
            if not ingest(each).is_new:
                raise RuntimeError(f"{each.doc_id} was not new")

    return Subject(among(known), changes, clocked(work, prepare=changed))


def _hydrated(filled: Ours, server: servers.RedisServer, scale: DocumentsScale) -> dict[str, Any]:
    seconds = []
    with server.client(socket_timeout=60.0) as admin:
        for _ in range(scale.hydrations):
            admin.flushall()
            started = time.perf_counter()
            filled.fence.hydrate()
            seconds.append(time.perf_counter() - started)
    # All of them are known again, but for those that the rounds have changed, and those are the newest.
    rest = [document(each) for each in corpus(_KNOWN, scale.many, characters=CHARACTERS)][scale.changes :]
    filled.seconds(rest, new=0)
    return {"receipts": scale.many, "seconds": seconds}
