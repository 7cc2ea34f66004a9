"""What "already built" costs, with few documents and with many: round trips on the wire and requests to S3, counted."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ragfence
from ragfence.indexes.spec import IndexSpec
from ragfence.stores.s3 import S3Objects
from tests import servers
from tests.bench.documents_cost import S3
from tests.bench.documents_growth import CHARACTERS, FILL_BATCH
from tests.bench.documents_ours import document, ours
from tests.bench.indexes_ours import Drawn, built
from tests.bench.indexes_scale import IndexesScale
from tests.bench.machine import redis_server
from tests.bench.peers.corpus import corpus
from tests.bench.run import Say
from tests.bench.trips import Turns, relay

DIMENSION = 8
FRESH, WARM = "a new process", "a warm one"
TRIPS, REQUESTS = "trips", "requests"


def measure(scale: IndexesScale, say: Say) -> dict[str, Any]:
    # All servers first: a process that has LanceDB running had better not fork.
    with servers.seaweedfs() as s3, redis_server() as small, redis_server() as large:
        found = {
            str(known): _among(known, server, s3, scale.calls, say)
            for known, server in ((scale.few, small), (scale.many, large))
        }
    return {"object_store": S3, "among": found}


class Asking:
    """Everything that is asked: turns on the wire to Redis, and requests to S3 by botocore's own events."""

    def __init__(self, turns: Turns, client: Any) -> None:
        self._turns = turns
        self._before = 0
        self._asked: Counter[str] = Counter()
        client.meta.events.register("before-call.s3.*", lambda model, **_: self._asked.update([model.name]))

    def begin(self) -> None:
        self._before = self._turns.count
        self._asked.clear()

    def so_far(self) -> dict[str, Any]:
        return {TRIPS: self._turns.count - self._before, REQUESTS: dict(self._asked)}


def _among(known: int, server: servers.RedisServer, s3: Any, calls: int, say: Say) -> dict[str, Any]:
    with relay(server.host, server.port) as turns, contextlib.closing(s3.client()) as client:
        spec = IndexSpec(embedder=Drawn(DIMENSION), backend=f"lance:{server.folder / 'lance'}")

        def objects() -> S3Objects:
            return S3Objects(s3.bucket, f"known{known}", client=client)

        say(f"ingesting and building {known:,} documents")
        with ours(server.url, server.folder, objects=objects()) as filled:
            documents = map(document, corpus("known", known, characters=CHARACTERS))
            for receipt in filled.documents.ingest_many(documents, batch=FILL_BATCH, stream=True):
                if not receipt.is_new:
                    raise RuntimeError(f"{receipt.key} was not new")
            sealed = built(filled.fence, spec).build
        asking, fresh, warm = Asking(turns, client), [], []
        for _ in range(calls):
            asking.begin()
            # A fence of its own has nothing in memory, as a process that was just started; opening it counts.
            with _opened(turns.url, server.folder, objects()) as fence:
                _answered(fence, spec, sealed.index_hash)
                fresh.append(asking.so_far())
                asking.begin()
                _answered(fence, spec, sealed.index_hash)
                warm.append(asking.so_far())
        return {"rows": sealed.rows, FRESH: _least(fresh), WARM: _least(warm)}


@contextlib.contextmanager
def _opened(url: str, folder: Path, objects: S3Objects) -> Iterator[ragfence.Fence]:
    with ragfence.open(url, objects=objects, journal=folder / "journal") as fence:
        yield fence


def _answered(fence: ragfence.Fence, spec: IndexSpec, index_hash: str) -> None:
    build = fence.indexes.build(spec)
    if build.index_hash != index_hash or build.decision is not ragfence.Decision.DUPLICATE:
        raise RuntimeError(f"not answered with the build that is there: {build.decision}")


def _least(counted: list[dict[str, Any]]) -> dict[str, Any]:
    """Of some calls: an answer that comes in parts, or the thread that looks for epochs, may add one; none is lost."""
    return {
        TRIPS: min(each[TRIPS] for each in counted),
        REQUESTS: min((each[REQUESTS] for each in counted), key=lambda asked: sum(asked.values())),
    }
