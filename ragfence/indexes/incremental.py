"""Incremental builds: rows that did not change are copied from the nearest sealed build, the base.

The base is read once and its digest is computed on the way. If the base is not what was sealed, nothing copied from it
is sealed.
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
from ragfence.indexes.index_rows import Descriptions, LogRows, assemble_rows
from ragfence.indexes.prefetch import Prefetch, SideThread
from ragfence.indexes.snapshots import Snapshot, Snapshots
from ragfence.indexes.spec import shape_in
from ragfence.indexes.vectors import VectorStore

SAME_ROWS = ("embedder", "backend", "metric", "analyzer", "schema")
"""inputs that decide what the rows are; the type of index and its parameters may differ"""
LOOKED_AT = 20
WORTH = 0.3
"""the share of documents that must be in the base, unchanged"""


class BaseBroken(Exception):
    """The base is not what was sealed."""


@dataclass(frozen=True, slots=True)
class BaseBuild:
    entry: BuildEntry
    seal: BuildSeal
    unchanged: int
    changed: Any
    """the documents of the new snapshot that the base does not have, as a table like the snapshot's"""
    gone: Any
    """ids of snippets of the base whose documents changed or were removed: an Arrow array of text"""


def find_base(
    builds: BuildLog, corpora: Snapshots, inputs: dict[str, Any], snapshot: Snapshot, known: Iterable[str]
) -> BaseBuild | None:
    """Returns the sealed build with the most documents in common, if they are enough.

    `known`: hashes to try first, such as the live one.
    """
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
            continue  # not usable as a base; a call that asks for this build raises the error
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


class BaseCopy:
    """The rows of a new build: those of the base that stay, and those of the documents that changed.

    New rows are embedded while the base is read, and read rows are hashed while the new index is written. So only after
    all its rows were read is it known whether the base is what was sealed: `prove` must be called before the seal.
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
        # A snippet that an edited document kept is in the base, with its text and vector: only its position is new.
        self._kept = {each: place.pop(each) for each in _raw(base.gone) if each in place}
        self._fresh = assemble_rows(log, described, place, vectors, workers)
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
        """Raises `BaseBroken` unless the rows that were read are the sealed ones."""
        with _is_the_bases_fault():
            self._hashing.finish()
        if self._kept or self._contents.digest() != self._base.seal.content_digest:
            raise BaseBroken

    def __enter__(self) -> BaseCopy:
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
    """The rows of a table of the base that stay. `kept`: snippets that stay at another position; removed when found."""
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
