"""The same documents for the first time and again: ragfence, LangChain and LlamaIndex in turn.

Documents are made before the clock starts, anew every round, so that nobody finds one that was worked on before. What
comes for the first time goes into an empty state, another one every round; what is known stays from round to round.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from tests import servers
from tests.bench.documents_ours import CountingSink, ours
from tests.bench.documents_scale import DocumentsScale
from tests.bench.peers.process import IngestingPeer
from tests.bench.rounds import Subject

RAGFENCE, WITH_SINK = "ragfence", "ragfence with a sink"
AGAIN, FIRST = "again", "first"

_KNOWN = "known"


def named(run: str, who: str) -> str:
    return f"{run}, {who}"


@contextlib.contextmanager
def subjects(
    server: servers.RedisServer, scale: DocumentsScale, others: Mapping[str, IngestingPeer]
) -> Iterator[list[Subject]]:
    count = scale.documents
    with ours(server.url, server.folder, tenant=_KNOWN, batch=scale.batch) as known:
        known.ingest(_KNOWN, count, new=count)
        made = [
            Subject(named(AGAIN, RAGFENCE), count, lambda _: known.ingest(_KNOWN, count, new=0)),
            Subject(named(FIRST, RAGFENCE), count, lambda number: _first(server, scale, _fresh(number), None)),
            Subject(
                named(FIRST, WITH_SINK),
                count,
                lambda number: _first(server, scale, f"sink{_fresh(number)}", CountingSink()),
            ),
        ]
        for who, peer in others.items():
            peer.ingest(_KNOWN, _KNOWN, count, new=count)
            made += _of(who, peer, count)
        yield made


def _first(server: servers.RedisServer, scale: DocumentsScale, tenant: str, sink: CountingSink | None) -> float:
    with ours(server.url, server.folder, tenant=tenant, batch=scale.batch, sink=sink) as empty:
        return empty.ingest(tenant, scale.documents, new=scale.documents)


def _of(who: str, peer: IngestingPeer, count: int) -> list[Subject]:
    def first(number: int) -> float:
        state = _fresh(number)
        peer.ingest(state, "warm-up", 1, new=1)
        taken = peer.ingest(state, state, count, new=count)
        peer.forget(state)
        return taken

    return [
        Subject(named(AGAIN, who), count, lambda _: peer.ingest(_KNOWN, _KNOWN, count, new=0)),
        Subject(named(FIRST, who), count, first),
    ]


def _fresh(number: int) -> str:
    return f"first{number}".replace("-", "w")  # the warm-up's number is below zero
