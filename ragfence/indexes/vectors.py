"""Vectors are stored next to the snippets they belong to, for each embedder, so that a snippet is embedded once.

    <tenant>/vectors/<embedder>/<epoch>/<batch>              of all snippets of that segment, as an Arrow file
    <tenant>/vectors-parts/<embedder>/<epoch>/<batch>/<n>-*  of some of them, one object after the other
    <tenant>/vectors-kept/<embedder>/<epoch>/<batch>         of some of them, copied when the log was rewritten

All of these objects are create-only. Only snippets that are needed are embedded: for a build, those of live documents;
for a sink, those it is given, and those of a new segment before it is committed (see `document_hooks`). Vectors of an
earlier revision of the document are reused for as long as the log keeps that revision.

Embedding the snippets of a segment is a claimed operation, so two builds, or a builder and its successor, do not embed
the same ones. Long work is stored in parts: a builder that dies, or whose segment is rewritten, loses little.
"""

from __future__ import annotations

import contextlib
import io
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from cachetools import FIFOCache, LRUCache

from ragfence.core.operations import Operation
from ragfence.documents.identity import SNIPPET_BYTES
from ragfence.documents.log import Address, Layout, address_in
from ragfence.documents.parquet import fixed_values, read_snippets
from ragfence.documents.rewrite import Switch
from ragfence.engine import crash_points
from ragfence.engine.engine import Engine
from ragfence.engine.requests import acting_as
from ragfence.errors import FencedOut, FormatCorrupt, FormatTooNew, InFlight, SnapshotGone
from ragfence.indexes.embedders.embedder import Embedder, EmbedderId, embed_texts
from ragfence.indexes.snapshots import id_values
from ragfence.stores.objects import ObjectStore

if TYPE_CHECKING:
    from ragfence.indexes.embedders.embedder import Vectors

VERSION = 1
KIND = "vectors"
BATCH = 256
"""texts passed to an embedder at once, if it has no attribute `batch`"""
PART_INTERVAL_S = 1.0
"""how long texts are embedded before the vectors are stored"""
RECENT_BYTES = 64 << 20
WAIT_S = 60.0
MID_EMBED = "mid_embed"
AFTER_EMBEDDED = "after_embedded"
AFTER_VECTORS = "after_vectors"
VECTOR_POINTS = (MID_EMBED, AFTER_EMBEDDED, AFTER_VECTORS)

Earlier = Callable[[set[bytes]], Iterable[Address]]
"""Returns the segments of earlier revisions that had some of these snippets, the likeliest first."""


class Texts(NamedTuple):
    """The snippets of one segment."""

    address: Address
    table: Any
    """snippet_id, text, tokens"""

    @property
    def ids(self) -> Any:
        """As an Arrow array."""
        return self.table.column("snippet_id").combine_chunks()


class RecentVectors:
    """Vectors that a caller embedded recently, in memory: a rewrite of the log may have voided those it stored."""

    def __init__(self, most_bytes: int = RECENT_BYTES) -> None:
        self._held: FIFOCache[bytes, Vectors] = FIFOCache(most_bytes, lambda vector: vector.nbytes)
        self._lock = threading.Lock()
        self.embedded = 0
        """how many snippets were embedded in total"""

    def add(self, ids: Sequence[bytes], vectors: Vectors) -> None:
        with self._lock:
            self.embedded += len(ids)
            for each, vector in zip(ids, vectors, strict=True):
                if each not in self._held:
                    with contextlib.suppress(ValueError):  # larger than the whole cache
                        self._held[each] = vector

    def get(self, ids: Iterable[bytes]) -> dict[bytes, Vectors]:
        with self._lock:
            return {each: self._held[each] for each in ids if each in self._held}


class VectorObjects:
    """The vectors of one embedder in the object store."""

    def __init__(self, objects: ObjectStore, layout: Layout, embedder: str, dimension: int | None = None) -> None:
        self._objects = objects
        self._layout = layout
        self._embedder = embedder
        self._dimension = dimension

    def whole_name(self, address: Address) -> str:
        return f"{self._layout.vectors}/{self._embedder}/{address.text}"

    def part_name(self, address: Address, number: int, token: str, part: int) -> str:
        return f"{self._parts(address)}{number:06d}-{token}-{part:06d}"

    def whole(self, address: Address) -> tuple[str, bytes | None]:
        name = self.whole_name(address)
        return name, self._objects.get(name)

    def some_names(self, address: Address) -> list[str]:
        """The names of objects that may hold vectors of some snippets of the segment."""
        kept = f"{self._layout.kept_vectors}/{self._embedder}/{address.text}"
        return [kept, *(entry.name for entry in self._objects.list(self._parts(address)))]

    def read(self, name: str) -> tuple[list[bytes], Vectors] | None:
        data = self._objects.get(name)
        if data is None:
            return None
        ids, vectors = _decode(name, data, self._dimension)
        return id_values(ids), vectors

    def some(self, names: Iterable[str], wanted: set[bytes]) -> dict[bytes, Vectors]:
        """The wanted vectors in these objects."""
        found: dict[bytes, Vectors] = {}
        for name in names:
            held = self.read(name)
            if held is not None:
                found |= {each: vector for each, vector in zip(*held, strict=True) if each in wanted}
        return found

    def at(self, address: Address, wanted: set[bytes]) -> dict[bytes, Vectors]:
        """The wanted vectors that are stored for a segment."""
        found = self.some([self.whole_name(address)], wanted)
        return found if len(found) == len(wanted) else found | self.some(self.some_names(address), wanted)

    def put(self, name: str, ids: Sequence[bytes], vectors: Vectors) -> None:
        self._objects.put_new(name, encode_vectors(ids, vectors))

    def delete(self, names: Sequence[str]) -> None:
        self._objects.delete(names)

    def _parts(self, address: Address) -> str:
        return f"{self._layout.vector_parts}/{self._embedder}/{address.text}/"


class VectorStore:
    """Reads vectors, and makes those that are missing."""

    def __init__(
        self,
        engine: Engine,
        objects: ObjectStore,
        embedder: Embedder,
        *,
        on_embedded: Callable[[int], None] = lambda made: None,
        check: Callable[[], None] = lambda: None,
        recent: RecentVectors | None = None,
        api_key: str = "",
    ) -> None:
        """Opens the vectors of an embedder.

        Args:
            engine: Claims the operations that embed.
            objects: Stores the vectors.
            embedder: Makes the missing ones.
            on_embedded: Called with the number of snippets after each batch.
            check: Raises if the vectors are not needed any more.
            recent: Vectors that were embedded by the same caller.
            api_key: Recorded as the API key of these operations, in every thread.
        """
        self._api_key = api_key
        self._engine = engine
        self._layout = Layout(engine.tenant)
        self._embedder = embedder
        self._id = EmbedderId.of(embedder)
        self._objects = VectorObjects(objects, self._layout, self._id.digest, self._id.dimension)
        self._on_embedded = on_embedded
        self._check = check
        self._recent = recent or RecentVectors()

    def vectors_of(self, texts: Texts, rows: Any, earlier: Earlier = lambda wanted: ()) -> Vectors:
        """Returns a vector for each of these rows of a segment's snippets, in their order."""
        name, data = self._objects.whole(texts.address)
        if data is not None:
            vectors = decode_vectors(name, data, texts.ids, self._id.dimension)
            return vectors if len(rows) == len(vectors) else vectors[rows]
        ids = id_values(texts.ids)
        wanted = {ids[at]: at for at in (int(row) for row in rows)}
        text = texts.table.column("text")
        return self._stack(
            list(wanted),
            self.load_or_embed(
                texts.address,
                wanted,
                lambda missing: text.take([wanted[each] for each in missing]).to_pylist(),
                earlier,
                in_all=len(ids),
            ),
        )

    def load_or_embed(
        self,
        address: Address,
        wanted: Iterable[bytes],
        texts_of: Callable[[Sequence[bytes]], list[str]],
        earlier: Earlier,
        *,
        in_all: int | None = None,
    ) -> dict[bytes, Vectors]:
        """Returns the vectors of snippets of a segment, and embeds missing ones. `in_all`: the segment's snippets."""
        order = dict.fromkeys(wanted)
        number = 1
        while True:
            names = self._objects.some_names(address)
            number = max(number, *(_group_in(name) for name in names))
            found = self._objects.some([self._objects.whole_name(address), *names], set(order))
            missing = [each for each in order if each not in found]
            if not missing:
                return found
            if not self._embed_missing(address, number, missing, texts_of, earlier, whole=len(missing) == in_all):
                number += 1  # sealed, but some are missing: other snippets were wanted then, or the object was deleted

    def find(self, address: Address, wanted: Iterable[bytes]) -> dict[bytes, Vectors]:
        """The wanted vectors that exist for snippets of this segment."""
        return self._objects.at(address, set(wanted))

    def embed_new(
        self, address: Address, texts: Mapping[bytes, str], earlier: Earlier, *, number: int, whole: bool
    ) -> dict[bytes, Vectors]:
        """Embeds snippets of a segment that is not committed yet. No other process knows it, so no claim is needed.

        If a newer epoch makes the segment void, nothing is stored; its writer notices when it commits.

        Args:
            address: The segment.
            texts: By snippet_id.
            earlier: Returns segments that may have some of the vectors.
            number: The number of this portion of the snippets.
            whole: These are all snippets of the segment, in their order.
        """

        def put(address: Address, name: str, made: Mapping[bytes, Vectors]) -> None:
            with contextlib.suppress(SnapshotGone):
                self._put(address, name, made)

        return self._embed_in_parts(
            address,
            f"new{number}",
            1,
            list(texts),
            lambda some: [texts[each] for each in some],
            earlier,
            whole,
            put=put,
        )

    def _stack(self, ids: Sequence[bytes], found: Mapping[bytes, Vectors]) -> Vectors:
        import numpy as np

        return np.stack([found[each] for each in ids]) if ids else np.zeros((0, self._id.dimension), np.float32)

    def _embed_missing(
        self,
        address: Address,
        number: int,
        missing: list[bytes],
        texts_of: Callable[[Sequence[bytes]], list[str]],
        earlier: Earlier,
        *,
        whole: bool,
    ) -> bool:
        """Returns False if this number was made already."""
        operation = Operation(
            kind=KIND,
            source_id=f"{self._id.digest}/{address.text}",
            revision=f"part {number}",
            index_hash=self._id.digest,
            action="embed",
        )
        try:
            with acting_as(self._api_key):
                request = self._engine.request(operation, None)
            with self._engine.claim(request, wait_s=WAIT_S, verdict=False, repeatable=True) as op:
                if not op.is_new:
                    return False
                found = self._objects.at(address, set(missing))  # stored by an attempt that died before its seal
                left = [each for each in missing if each not in found]
                crash_points.reach(MID_EMBED)
                token = op.lease.ref.token.hex()
                self._embed_in_parts(
                    address, token, number, left, texts_of, earlier, whole and not found, op.lease.check
                )
                op.seal(effect_id=f"{address.text}/{number}", result={"rows": len(left)})
        except FencedOut:
            pass  # a successor made the same
        except InFlight:
            self._check()  # another process is still embedding: wait on, unless the vectors are not needed any more
        return True

    def _embed_in_parts(
        self,
        address: Address,
        token: str,
        number: int,
        missing: Sequence[bytes],
        texts_of: Callable[[Sequence[bytes]], list[str]],
        earlier: Earlier,
        whole: bool,
        check: Callable[[], None] = lambda: None,
        put: Callable[[Address, str, Mapping[bytes, Vectors]], None] | None = None,
    ) -> dict[bytes, Vectors]:
        """Reuses vectors known from elsewhere, embeds the rest, and stores them in parts or as a whole."""
        put = put or self._put
        made: dict[bytes, Vectors] = dict(self._recent.get(missing))
        self._reuse_earlier(made, missing, earlier)
        done: dict[bytes, Vectors] = {}
        parts = 0
        began = time.monotonic()
        left = [each for each in missing if each not in made]
        size = max(1, int(getattr(self._embedder, "batch", BATCH)))
        for first in range(0, len(left), size):
            self._check()
            portion = left[first : first + size]
            vectors = embed_texts(self._embedder, self._id, texts_of(portion))
            self._recent.add(portion, vectors)
            self._on_embedded(len(portion))
            made |= zip(portion, vectors, strict=True)
            if time.monotonic() - began >= PART_INTERVAL_S and first + size < len(left):
                parts += 1
                put(address, self._objects.part_name(address, number, token, parts), made)
                done, made, began = done | made, {}, time.monotonic()
        crash_points.reach(AFTER_EMBEDDED)
        check()
        if made:
            ordered = {each: made[each] for each in missing if each in made}
            name = self._objects.part_name(address, number, token, parts + 1)
            put(address, self._objects.whole_name(address) if whole and not parts else name, ordered)
        crash_points.reach(AFTER_VECTORS)
        return done | made

    def _reuse_earlier(self, made: dict[bytes, Vectors], missing: Sequence[bytes], earlier: Earlier) -> None:
        """Adds vectors that an earlier revision of the same document has."""
        left = {each for each in missing if each not in made}
        for address in earlier(left) if left else ():
            found = self._objects.at(address, left)
            made |= found
            left -= found.keys()
            if not left:
                return

    def _put(self, address: Address, name: str, made: Mapping[bytes, Vectors]) -> None:
        self._objects.put(name, list(made), self._stack(list(made), made))
        self._refuse_void(address, name)

    def _refuse_void(self, address: Address, name: str) -> None:
        """Deletes the object if the log was rewritten without its segment. The rewrite may have deleted void objects
        before the put; so either this check after the put sees the new list, or the deletion sees the object."""
        backing = self._engine.backing
        assert backing is not None
        newest = backing.epochs.known().newest_complete
        if address.epoch >= newest or self._layout.rows_at(address) in backing.epochs.named_in(newest):
            return
        self._objects.delete([name])
        raise SnapshotGone(f"{address.text} is not in the log any more: it was compacted, or a document was purged")


def _group_in(name: str) -> int:
    """The number of the claim under which a part was made; 1 if the object is not a part."""
    number, _, rest = name.rpartition("/")[2].partition("-")
    return int(number) if rest and number.isdigit() else 1


class VectorCopier:
    """Copies vectors when segments are rewritten, so that moved snippets are not embedded again."""

    OPEN = 8

    def __init__(self, objects: ObjectStore, layout: Layout) -> None:
        self._objects = objects
        self._layout = layout
        self._open: LRUCache[str, tuple[list[bytes], Vectors]] = LRUCache(self.OPEN)

    def copy(self, switch: Switch) -> None:
        """Copies the vectors of the new segments' snippets to their addresses, before these segments count."""
        for embedder in self._embedders():
            place: dict[bytes, tuple[str, int]] = {}
            held = VectorObjects(self._objects, self._layout, embedder)
            for address in map(address_in, switch.replaced):
                for name in (held.whole_name(address), *held.some_names(address)):
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
        self._objects.put_new(f"{root}/{embedder}/{address.text}", encode_vectors(known, vectors))

    def _embedders(self) -> Iterator[str]:
        seen = set()
        for root in (self._layout.vectors, self._layout.kept_vectors, self._layout.vector_parts):
            after = ""
            while entry := next(iter(self._objects.list(f"{root}/", start_after=after, limit=1)), None):
                embedder = entry.name[len(root) + 1 :].partition("/")[0]
                after = f"{root}/{embedder}/~"
                if embedder not in seen:
                    seen.add(embedder)
                    yield embedder

    def _read(self, name: str) -> tuple[list[bytes], Vectors]:
        if name in self._open:
            return self._open[name]
        data = self._objects.get(name)
        found: tuple[list[bytes], Vectors] = [], _no_vectors()
        if data is not None:
            ids, vectors = _decode(name, data)
            found = id_values(ids), vectors
        self._open[name] = found
        return found


def encode_vectors(ids: Sequence[bytes], vectors: Vectors) -> bytes:
    import pyarrow as pa

    dimension = int(vectors.shape[1])
    values = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), dimension)
    metadata = {"ragfence": "vectors", "ragfence.version": str(VERSION)}
    table = pa.table({"snippet_id": pa.array(ids, pa.binary(16)), "vector": values}).replace_schema_metadata(metadata)
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def decode_vectors(name: str, data: bytes, ids: Any, dimension: int) -> Vectors:
    """Returns the vectors of an object, which must belong to these snippets (an Arrow array), in their order."""
    found, vectors = _decode(name, data, dimension)
    if not found.equals(ids):
        raise FormatCorrupt(
            f"{name} does not hold the vectors of its snippets", hint="delete it: the next build makes it again"
        )
    return vectors


def _decode(name: str, data: bytes, dimension: int | None = None) -> tuple[Any, Vectors]:
    """Returns ids (an Arrow array) and vectors, both views of the object's bytes."""
    import numpy as np
    import pyarrow as pa

    try:
        table = pa.ipc.open_file(pa.py_buffer(data)).read_all().combine_chunks()
        metadata = table.schema.metadata or {}
        if metadata.get(b"ragfence") != b"vectors":
            raise FormatCorrupt(f"{name} does not hold vectors of ragfence")
        if int(metadata[b"ragfence.version"]) > VERSION:
            raise FormatTooNew(f"{name} has a newer format than this version of ragfence reads ({VERSION})")
        width = table.schema.field("vector").type.list_size
        if dimension not in (None, width):
            raise FormatCorrupt(f"{name} holds vectors of {width} dimensions, not of {dimension}")
        flat = table.column("vector").combine_chunks().flatten().cast(pa.float32())
        vectors = np.asarray(flat.to_numpy(zero_copy_only=False)).reshape(-1, width)
        return table.column("snippet_id").combine_chunks().cast(pa.binary(SNIPPET_BYTES)), vectors
    except (pa.ArrowException, KeyError, ValueError, OSError) as broken:
        raise FormatCorrupt(f"{name} is not a valid object of vectors: {broken}") from broken


def _no_vectors() -> Vectors:
    import numpy as np

    return np.zeros((0, 0), dtype=np.float32)
