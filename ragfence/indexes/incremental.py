"""A build that starts from the nearest sealed one: what did not change is copied out of it, not made again.

The base is read once, and its digest is made on the way. If it is not what was sealed, nothing of it is sealed again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ragfence.errors import BuildMissing, BuildUnverified, FormatCorrupt, FormatTooNew
from ragfence.indexes.backends.backend import Backend
from ragfence.indexes.build_log import SEALED, BuildEntry, BuildLog, BuildSeal
from ragfence.indexes.content_digest import ContentDigest, matrix
from ragfence.indexes.index_rows import Descriptions, LogRows, assembled
from ragfence.indexes.prefetch import Prefetch, SideThread
from ragfence.indexes.snapshots import Snapshot, Snapshots
from ragfence.indexes.spec import shape_in
from ragfence.indexes.vectors import VectorStore

SAME_ROWS = ("embedder", "backend", "metric", "analyzer", "schema")
"""inputs that decide what the rows are; the type of index and its parameters may differ"""
LOOKED_AT = 20
WORTH = 0.3
"""of the documents must be in the base, unchanged"""


class BaseBroken(Exception):
    """The base is not what was sealed."""


@dataclass(frozen=True, slots=True)
class BaseBuild:
    entry: BuildEntry
    seal: BuildSeal
    unchanged: int
    changed: Any
    """the documents of the new snapshot that the base does not have, as a table of it"""
    gone: Any
    """ids of snippets of the base whose documents changed or went: an Arrow array of text"""


def nearest(
    builds: BuildLog, corpora: Snapshots, inputs: dict[str, Any], snapshot: Snapshot, known: Iterable[str]
) -> BaseBuild | None:
    """The sealed build with the most documents in common. `known`: hashes to look at first, such as the live one."""
    best: BaseBuild | None = None
    looked_at = 0
    for index_hash in dict.fromkeys((*known, *builds.hashes())):
        if looked_at == LOOKED_AT:
            break
        looked_at += 1
        try:
            entry = builds.newest(index_hash)
            seal = entry.seal if entry and entry.kind == SEALED else None
            if entry is None or seal is None or any(seal.inputs.get(name) != inputs[name] for name in SAME_ROWS):
                continue
            earlier = corpora.get(seal.corpus_digest)
        except (FormatCorrupt, FormatTooNew):
            continue  # of no use to us; whoever asks for it is told
        if earlier is None:
            continue
        base = _compared(entry, seal, snapshot, earlier)
        if best is None or base.unchanged > best.unchanged:
            best = base
        if best.unchanged == snapshot.documents:
            break
    return best if best and best.unchanged >= WORTH * snapshot.documents else None


def _compared(entry: BuildEntry, seal: BuildSeal, snapshot: Snapshot, earlier: Snapshot) -> BaseBuild:
    import pyarrow.compute as pc

    now, then = snapshot.heads(), earlier.heads()
    same = pc.is_in(now, value_set=then)
    left = Snapshot("", earlier.table.filter(pc.invert(pc.is_in(then, value_set=now))))
    changed = snapshot.table.filter(pc.invert(same)).combine_chunks()
    return BaseBuild(entry, seal, snapshot.documents - int(changed.num_rows), changed, left.text_ids())


class Copied:
    """The rows of a new build: those of the base that stay, and those of the documents that changed.

    What is new is embedded while the base is read, and what was read is hashed while the new index is written. So the
    base may turn out not to be what was sealed only when all its rows have gone by: `prove` comes before the seal.
    """

    def __init__(
        self,
        log: LogRows,
        base: BaseBuild,
        backend: Backend,
        described: Descriptions,
        vectors: VectorStore,
        workers: int,
    ) -> None:
        self._base = base
        self._backend = backend
        self._described = described
        place = described.places()
        # A snippet that an edited document kept is in the base, with its text and its vector: only its place is new.
        self._kept = {each: place.pop(each) for each in _raw(base.gone) if each in place}
        self._fresh = assembled(log, described, place, vectors, workers)
        self._contents = ContentDigest(shape_in(base.seal.inputs))
        self._hashing = SideThread(self._contents.add)

    def rows(self) -> Generator[Any, None, None]:
        with Prefetch(self._fresh) as fresh:
            with _is_the_bases_fault(), Prefetch(self._backend.read(self._base.seal.physical)) as tables:
                for table in tables:
                    self._hashing.begin(table)
                    yield from _staying(table, self._base.gone, self._described, self._kept)
            yield from fresh

    def prove(self) -> None:
        """Raises `BaseBroken` unless the rows that were read are those that were sealed."""
        with _is_the_bases_fault():
            self._hashing.finish()
        if self._kept or self._contents.digest() != self._base.seal.content_digest:
            raise BaseBroken

    def __enter__(self) -> Copied:
        return self

    def __exit__(self, *_: object) -> None:
        self._hashing.close()


@contextlib.contextmanager
def _is_the_bases_fault() -> Iterator[None]:
    try:
        yield
    except (BuildMissing, BuildUnverified, FormatCorrupt) as broken:
        raise BaseBroken from broken


def _staying(table: Any, gone: Any, described: Descriptions, kept: dict[bytes, int]) -> Iterator[Any]:
    """Of a table of the base. `kept`: snippets that stay at another place; taken out as they are found."""
    import pyarrow.compute as pc

    changed = pc.is_in(table.column("snippet_id"), value_set=gone)
    yield table.filter(pc.invert(changed))
    again = table.filter(changed)
    taken = [(row, kept.pop(each)) for row, each in enumerate(_raw(again.column("snippet_id"))) if each in kept]
    if taken:
        some = again.take([row for row, _ in taken]).combine_chunks()
        text, tokens = some.column("text").combine_chunks(), some.column("tokens").combine_chunks()
        vectors = matrix(some, some.schema.field("vector").type.list_size)
        yield described.rows([at for _, at in taken], text, tokens, vectors)


def _raw(ids: Any) -> list[bytes]:
    return [bytes.fromhex(each) for each in ids.to_pylist()]
