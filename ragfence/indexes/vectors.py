"""Vectors: one create-only object for each object of snippets and each embedder. A snippet is embedded once.

    <tenant>/vectors/<embedder>/<epoch>/<batch>        the vectors of all snippets of that segment, as an Arrow file
    <tenant>/vectors-kept/<embedder>/<epoch>/<batch>   of some of them, copied when the log was rewritten

To make one is a claimed operation of its own, so two builds, or a builder and its successor, do not embed the same
snippets. The object is the commit: whoever finds it needs no claim.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ragfence.core.operations import Operation
from ragfence.documents.identity import SNIPPET_BYTES
from ragfence.documents.parquet import fixed_values, read_snippets
from ragfence.documents.rewriting import Switch
from ragfence.documents.segments import Address, Layout, address_in
from ragfence.engine import points
from ragfence.engine.engine import Engine
from ragfence.errors import FencedOut, FormatCorrupt, FormatTooNew, InFlight, SnapshotGone
from ragfence.indexes.corpora import id_values
from ragfence.indexes.embedders.protocol import Embedder, EmbedderId, embedded
from ragfence.stores.objects import ObjectStore

if TYPE_CHECKING:
    from ragfence.indexes.embedders.protocol import Vectors

VERSION = 1
KIND = "vectors"
BATCH = 256
"""texts that an embedder gets at once, unless it says otherwise"""
WAIT_S = 60.0
MID_EMBED = "mid_embed"
AFTER_EMBEDDED = "after_embedded"
AFTER_VECTORS = "after_vectors"
VECTOR_POINTS = (MID_EMBED, AFTER_EMBEDDED, AFTER_VECTORS)


class Texts(NamedTuple):
    """The snippets of one segment."""

    address: Address
    table: Any
    """snippet_id, text, tokens"""

    @property
    def ids(self) -> Any:
        """As an Arrow array."""
        return self.table.column("snippet_id").combine_chunks()


class VectorStore:
    """Reads vectors, and makes those that are missing."""

    def __init__(
        self,
        engine: Engine,
        objects: ObjectStore,
        embedder: Embedder,
        *,
        told: Callable[[int], None] = lambda made: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`told`: how many snippets were embedded, after each batch. `check` raises when it has become useless."""
        self._engine = engine
        self._objects = objects
        self._layout = Layout(engine.tenant)
        self._embedder = embedder
        self._id = EmbedderId.of(embedder)
        self._told = told
        self._check = check

    def of(self, texts: Texts) -> Vectors:
        """A vector for each snippet of the segment, in the order of its object."""
        name = self._name(texts.address)
        revision = 1
        while (data := self._objects.get(name)) is None:
            if not self._made(texts, name, revision):
                revision += 1  # sealed, and yet there is none: somebody deleted it
        return vectors_in(name, data, texts.ids, self._id.dimension)

    def _made(self, texts: Texts, name: str, revision: int) -> bool:
        """False: somebody made it once, and it is not there any more."""
        operation = Operation(
            kind=KIND,
            source_id=f"{self._id.digest}/{texts.address.text}",
            revision=str(revision),
            index_hash=self._id.digest,
            action="embed",
        )
        try:
            with self._engine.claim(self._engine.request(operation, None), wait_s=WAIT_S, verdict=False) as op:
                if not op.is_new:
                    return self._objects.get(name) is not None
                if self._objects.get(name) is None:  # else: put by an attempt that died before its seal
                    points.reach(MID_EMBED)
                    data = self._embedded(texts)
                    points.reach(AFTER_EMBEDDED)
                    op.lease.check()
                    self._objects.put_new(name, data)
                    points.reach(AFTER_VECTORS)
                    self._refuse_void(texts.address, name)
                op.seal(effect_id=name, result={"rows": texts.table.num_rows})
        except FencedOut:
            pass  # a successor made the same
        except InFlight:
            self._check()  # somebody is still embedding: wait on, unless nobody needs it any more
        return True

    def _refuse_void(self, address: Address, name: str) -> None:
        """The log may have been rewritten without this segment meanwhile, and what was void deleted before we put: who
        looks after the put finds the new list, who deletes after it finds the object."""
        backing = self._engine.backing
        assert backing is not None
        newest = backing.epochs.known().newest_complete
        if address.epoch >= newest or self._layout.rows_at(address) in backing.epochs.named_in(newest):
            return
        self._objects.delete([name])
        raise SnapshotGone(f"{address.text} is not in the log any more: it was compacted, or a document was purged")

    def _embedded(self, texts: Texts) -> bytes:
        import numpy as np

        ids = id_values(texts.ids)
        made = np.zeros((len(ids), self._id.dimension), dtype=np.float32)
        missing = list(range(len(ids)))
        kept_name = self._kept_name(texts.address)
        if (data := self._objects.get(kept_name)) is not None:
            kept_ids, kept = _decoded(kept_name, data, self._id.dimension)
            place = {each: at for at, each in enumerate(id_values(kept_ids))}
            missing = [at for at, each in enumerate(ids) if each not in place]
            for at, each in enumerate(ids):
                if each in place:
                    made[at] = kept[place[each]]
        column = texts.table.column("text")
        size = max(1, int(getattr(self._embedder, "batch", BATCH)))
        for first in range(0, len(missing), size):
            self._check()
            portion = missing[first : first + size]
            made[portion] = embedded(self._embedder, self._id, column.take(portion).to_pylist())
            self._told(len(portion))
        return encoded_vectors(ids, made)

    def _name(self, address: Address) -> str:
        return f"{self._layout.vectors}/{self._id.digest}/{address.text}"

    def _kept_name(self, address: Address) -> str:
        return f"{self._layout.kept_vectors}/{self._id.digest}/{address.text}"


class VectorCopier:
    """Copies vectors when segments are rewritten, so that nothing is embedded again because it was moved."""

    OPEN = 8

    def __init__(self, objects: ObjectStore, layout: Layout) -> None:
        self._objects = objects
        self._layout = layout
        self._open: OrderedDict[str, tuple[list[bytes], Vectors]] = OrderedDict()

    def copy(self, switch: Switch) -> None:
        """Before the new segments count: what is known of their snippets goes to the new addresses."""
        for embedder in self._embedders():
            place: dict[bytes, tuple[str, int]] = {}
            for segment in switch.replaced:
                for root in (self._layout.vectors, self._layout.kept_vectors):
                    name = f"{root}/{embedder}/{address_in(segment).text}"
                    for at, each in enumerate(self._read(name)[0]):
                        place[each] = (name, at)
            if place:
                for segment in switch.added:
                    self._copy_to(embedder, address_in(segment), place)
        self._open.clear()

    def _copy_to(self, embedder: str, address: Address, place: dict[bytes, tuple[str, int]]) -> None:
        import numpy as np

        name = self._layout.snippets_at(address)
        data = self._objects.get(name)
        if data is None:
            return
        ids = fixed_values(read_snippets(name, data, ()), "snippet_id")
        known = [each for each in ids if each in place]
        if not known:
            return
        by_name: dict[str, list[tuple[int, int]]] = {}
        for at, each in enumerate(known):
            by_name.setdefault(place[each][0], []).append((at, place[each][1]))
        held = {name: self._read(name)[1][[there for _, there in places]] for name, places in by_name.items()}
        vectors = np.zeros((len(known), next(iter(held.values())).shape[1]), dtype=np.float32)
        for name, places in by_name.items():
            vectors[[here for here, _ in places]] = held[name]
        root = self._layout.vectors if len(known) == len(ids) else self._layout.kept_vectors
        self._objects.put_new(f"{root}/{embedder}/{address.text}", encoded_vectors(known, vectors))

    def _embedders(self) -> Iterator[str]:
        seen = set()
        for root in (self._layout.vectors, self._layout.kept_vectors):
            after = ""
            while entry := next(iter(self._objects.list(f"{root}/", start_after=after, limit=1)), None):
                embedder = entry.name[len(root) + 1 :].partition("/")[0]
                after = f"{root}/{embedder}/~"
                if embedder not in seen:
                    seen.add(embedder)
                    yield embedder

    def _read(self, name: str) -> tuple[list[bytes], Vectors]:
        if name in self._open:
            self._open.move_to_end(name)
            return self._open[name]
        data = self._objects.get(name)
        found: tuple[list[bytes], Vectors] = [], _no_vectors()
        if data is not None:
            ids, vectors = _decoded(name, data)
            found = id_values(ids), vectors
        self._open[name] = found
        while len(self._open) > self.OPEN:
            self._open.popitem(last=False)
        return found


def encoded_vectors(ids: Sequence[bytes], vectors: Vectors) -> bytes:
    import pyarrow as pa

    dimension = int(vectors.shape[1])
    values = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), dimension)
    told = {"ragfence": "vectors", "ragfence.version": str(VERSION)}
    table = pa.table({"snippet_id": pa.array(ids, pa.binary(16)), "vector": values}).replace_schema_metadata(told)
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def vectors_in(name: str, data: bytes, ids: Any, dimension: int) -> Vectors:
    """The vectors of an object, which must be those of these snippets (an Arrow array), in their order."""
    found, vectors = _decoded(name, data, dimension)
    if not found.equals(ids):
        raise FormatCorrupt(
            f"{name} does not hold the vectors of its snippets", hint="delete it: it is made again by the next build"
        )
    return vectors


def _decoded(name: str, data: bytes, dimension: int | None = None) -> tuple[Any, Vectors]:
    """Ids, as an Arrow array, and vectors: both where they stand in the bytes of the object."""
    import numpy as np
    import pyarrow as pa

    try:
        table = pa.ipc.open_file(pa.py_buffer(data)).read_all().combine_chunks()
        told = table.schema.metadata or {}
        if told.get(b"ragfence") != b"vectors":
            raise FormatCorrupt(f"{name} holds no vectors of ragfence")
        if int(told[b"ragfence.version"]) > VERSION:
            raise FormatTooNew(f"{name} is of a newer format than this ragfence knows ({VERSION})")
        width = table.schema.field("vector").type.list_size
        if dimension not in (None, width):
            raise FormatCorrupt(f"{name} holds vectors of {width} dimensions, not of {dimension}")
        flat = table.column("vector").combine_chunks().flatten().cast(pa.float32())
        vectors = np.asarray(flat.to_numpy(zero_copy_only=False)).reshape(-1, width)
        return table.column("snippet_id").combine_chunks().cast(pa.binary(SNIPPET_BYTES)), vectors
    except (pa.ArrowException, KeyError, ValueError, OSError) as broken:
        raise FormatCorrupt(f"{name} is no object of vectors: {broken}") from broken


def _no_vectors() -> Vectors:
    import numpy as np

    return np.zeros((0, 0), dtype=np.float32)
