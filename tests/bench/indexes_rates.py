"""The same rows into LanceDB and into Qdrant: by a build, and straight through the database's own client.

Nothing is embedded: all vectors are there from a first build. Every build is a whole one, out of the snapshot, the log
and the vectors, into a folder of its own; an index elsewhere is another index, so none of them starts from an earlier
one. The rows of the other side are those of the first build, and in memory before the clock starts.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ragfence.indexes.backends.backend import PAYLOAD
from ragfence.indexes.spec import IndexSpec
from tests import servers
from tests.bench.documents_ours import Ours, ours
from tests.bench.indexes_ours import Counted, Drawn, Timed, built
from tests.bench.indexes_scale import IndexesScale
from tests.bench.rounds import WARM_UP, Subject, clocked, interleave
from tests.bench.run import Say

DIMENSION = 256
LANCE, QDRANT = "LanceDB", "Qdrant"
BUILD, WITH_VERIFYING, WRITING, STRAIGHT = "build", "build, with verification", "its writing alone", "straight"
_QDRANT_BATCH = 512
"""points per call, as in ragfence's own backend"""


def named(what: str, database: str) -> str:
    return f"{what}, {database}"


def measure(server: servers.RedisServer, scale: IndexesScale, say: Say) -> dict[str, list[float]]:
    """Rows per second, round by round."""
    with contextlib.ExitStack() as stack:
        say(f"{scale.rows:,} rows for {LANCE} and {scale.qdrant_rows:,} for {QDRANT} are embedded")
        lance = stack.enter_context(_filled(server, LANCE, scale.rows, lambda at: f"lance:{at}"))
        qdrant = stack.enter_context(_filled(server, QDRANT, scale.qdrant_rows, lambda at: f"qdrant+{at.as_uri()}"))
        subjects = [
            Subject(named(BUILD, LANCE), lance.rows, lance.seconds),
            Subject(named(STRAIGHT, LANCE), lance.rows, _into_lance(lance)),
            Subject(named(BUILD, QDRANT), qdrant.rows, qdrant.seconds),
            Subject(named(STRAIGHT, QDRANT), qdrant.rows, _into_qdrant(qdrant)),
        ]
        rates = interleave(subjects, scale.rounds, lambda text: say(f"the same rows, {text}"))
        for database, each in ((LANCE, lance), (QDRANT, qdrant)):
            rates[named(WITH_VERIFYING, database)] = [each.rows / timed.seconds for timed in each.taken]
            rates[named(WRITING, database)] = [each.rows / timed.writing for timed in each.taken]
        return rates


class Rebuilt:
    """Builds of the same documents, over and over, each into a folder of its own."""

    def __init__(self, filled: Ours, folder: Path, place: Callable[[Path], str]) -> None:
        self._filled = filled
        self._folder = folder
        self._place = place
        self._embedder = Counted(Drawn(DIMENSION))
        self.taken: list[Timed] = []
        first = built(filled.fence, self._spec("first")).build
        self.rows = first.rows
        self.tables = list(filled.fence.indexes.backend(first.seal.backend).read(first.physical))

    def seconds(self, number: int) -> float:
        """Of all that `build()` does but reading back and verifying."""
        embedded = self._embedder.texts
        timed = built(self._filled.fence, self._spec(str(number)))
        made = timed.build.seal.made
        if self._embedder.texts != embedded or made["base"] is not None or timed.build.rows != self.rows:
            raise RuntimeError(f"this was no whole build without embedding: {made}")
        if number != WARM_UP:
            self.taken.append(timed)
        return timed.seconds - timed.verifying

    def folder(self, name: str) -> Path:
        return self._folder / name

    def _spec(self, name: str) -> IndexSpec:
        return IndexSpec(embedder=self._embedder, backend=self._place(self.folder(f"build{name}")))


@contextlib.contextmanager
def _filled(server: servers.RedisServer, database: str, count: int, place: Callable[[Path], str]) -> Iterator[Rebuilt]:
    with ours(server.url, server.folder, tenant=database.lower()) as filled:
        filled.ingest(database.lower(), count, new=count)
        yield Rebuilt(filled, server.folder / database, place)


def _into_lance(rebuilt: Rebuilt) -> Callable[[int], float]:
    import lancedb
    import pyarrow as pa

    def write(folder: Path) -> None:
        batches = (batch for table in rebuilt.tables for batch in table.to_batches())
        reader = pa.RecordBatchReader.from_batches(rebuilt.tables[0].schema, batches)
        lancedb.connect(folder).create_table("rows", reader)

    return clocked(write, prepare=lambda number: rebuilt.folder(f"straight{number}"), check=_tidied)


def _into_qdrant(rebuilt: Rebuilt) -> Callable[[int], float]:
    """The points are made before the clock starts: nothing but the client's own work is on it."""
    from qdrant_client import QdrantClient, models

    batches = [
        _points(table.slice(at, _QDRANT_BATCH))
        for table in rebuilt.tables
        for at in range(0, table.num_rows, _QDRANT_BATCH)
    ]
    how = models.VectorParams(size=DIMENSION, distance=models.Distance.COSINE, hnsw_config=models.HnswConfigDiff(m=0))

    def write(folder: Path) -> None:
        with contextlib.closing(QdrantClient(path=str(folder))) as client:
            client.create_collection("rows", vectors_config=how)
            for batch in batches:
                client.upsert("rows", batch, wait=True)

    return clocked(write, prepare=lambda number: rebuilt.folder(f"straight{number}"), check=_tidied)


def _points(table: Any) -> Any:
    from qdrant_client.models import Batch

    payloads = table.select(PAYLOAD).to_pylist()
    ids = [payload["snippet_id"] for payload in payloads]
    return Batch(ids=ids, vectors=table.column("vector").to_pylist(), payloads=payloads)


def _tidied(folder: Path) -> None:
    shutil.rmtree(folder)
