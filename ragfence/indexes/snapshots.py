"""Snapshots: the documents, and their revisions, that a corpus digest stands for.

    <tenant>/corpora/<digest>        the live heads that were hashed, as Parquet; stored before a build is claimed
    <tenant>/corpora-rows/<digest>   how many documents and rows an index of it has, without reading the snapshot
    <tenant>/corpora-at/<versions>   a cache: the digests of the shards at these versions, for new processes

A build reads its snapshot and never the live heads, so it does not matter what is ingested meanwhile, or which process
finishes it. A snapshot holds only digests and ids: keys, snippet_ids, and where a head was in the log. It has neither
text nor metadata, so a purge has nothing to remove here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from ragfence.core.hashing import SHARDS
from ragfence.core.operations import encoded
from ragfence.documents.corpus_digest import Corpus, LiveHead, Version, digest_of_shards, shard_digests
from ragfence.documents.identity import SNIPPET_BYTES
from ragfence.documents.log import stored_in
from ragfence.documents.parquet import fixed_matrix, fixed_values, id_lists, read_table, table_written
from ragfence.engine.gc_pause import gc_paused
from ragfence.errors import REHYDRATE, FormatCorrupt
from ragfence.stores.objects import ObjectStore

WHAT = "corpus"
_COLUMNS = ["key", "source", "metadata_hash", "row", "origin", "snippet_ids"]


@dataclass(frozen=True, slots=True)
class Snapshot:
    digest: str
    table: Any
    """sorted by key: key, source, metadata_hash, row and origin (addresses of segments), snippet_ids"""

    @property
    def documents(self) -> int:
        return int(self.table.num_rows)

    @property
    def rows(self) -> int:
        return len(self.flat_ids())

    def flat_ids(self) -> Any:
        """Every snippet_id as an Arrow array of 16 bytes, in the order of the documents."""
        import pyarrow.compute as pc

        return pc.list_flatten(self.table.column("snippet_ids").combine_chunks())

    def text_ids(self) -> Any:
        """Every snippet_id as indexes store it: an Arrow array of text."""
        return to_text_ids(self.flat_ids())

    def ids(self) -> list[bytes]:
        return id_values(self.flat_ids())

    def heads(self) -> Any:
        """Key and metadata hash of each document, joined in one Arrow array: together they identify a head."""
        return head_keys(self.table)

    def share_in(self, other: Snapshot, left: Any = None) -> float:
        """The share of these documents that the other snapshot has in the same revision.

        `left`: the snippet_ids, as text, that are left in an index of the other; only complete documents count.
        """
        import pyarrow.compute as pc

        there = pc.is_in(self.heads(), value_set=other.heads())
        if left is not None:
            there = pc.and_(there, self._whole_in(left))
        return float(pc.mean(there).as_py() or 0.0)

    def _whole_in(self, left: Any) -> Any:
        """For each document, whether all its snippets are left; True for documents without text."""
        import numpy as np
        import pyarrow as pa
        import pyarrow.compute as pc

        document = pc.list_parent_indices(self.table.column("snippet_ids").combine_chunks())
        whole = np.ones(self.documents, dtype=bool)
        whole[document.filter(pc.invert(pc.is_in(self.text_ids(), value_set=left))).to_numpy()] = False
        return pa.array(whole)

    def compared_with(self, earlier: Snapshot) -> tuple[int, int, int, int]:
        """The numbers of documents that were added, removed, changed and unchanged."""
        import pyarrow.compute as pc

        def common(one: Any, other: Any) -> int:
            return int(pc.sum(pc.is_in(one, value_set=other)).as_py() or 0)

        same = common(self.heads(), earlier.heads())
        known = common(_sources(self.table), _sources(earlier.table))
        return self.documents - known, earlier.documents - known, known - same, same


def to_text_ids(ids: Any) -> Any:
    """Converts an Arrow array of snippet_ids of 16 bytes to one of text in hex, all at once."""
    import numpy as np
    import pyarrow as pa

    digits = 2 * SNIPPET_BYTES
    ends = np.arange(0, digits * (len(ids) + 1), digits, dtype=np.int32)
    held = fixed_matrix(pa.table({"id": ids}), "id").tobytes()
    return pa.StringArray.from_buffers(len(ids), pa.py_buffer(ends), pa.py_buffer(held.hex().encode()))


def id_values(ids: Any) -> list[bytes]:
    """Converts an Arrow array of snippet_ids to Python objects."""
    import pyarrow as pa

    return fixed_values(pa.table({"id": ids}), "id")


def head_keys(table: Any) -> Any:
    """Key and metadata hash of each row, joined, of any table with these columns."""
    import pyarrow as pa
    import pyarrow.compute as pc

    parts = [table.column(name).combine_chunks().cast(pa.binary()) for name in ("key", "metadata_hash")]
    return pc.binary_join_element_wise(*parts, b"")


def _sources(table: Any) -> Any:
    import pyarrow as pa

    return table.column("source").combine_chunks().cast(pa.binary())


class Snapshots:
    def __init__(self, tenant: str, objects: ObjectStore, corpus: Corpus) -> None:
        self._objects = objects
        self._corpus = corpus
        self._root = f"{encoded(tenant)}/corpora"
        self._cache = f"{encoded(tenant)}/corpora-at"
        self._counts = f"{encoded(tenant)}/corpora-rows"
        self._known_rows: tuple[str, int] | None = None
        self._read: tuple[str, list[LiveHead]] | None = None

    @gc_paused()
    def digest(self, *, to_build: bool = False) -> str:
        """The digest of the current corpus. If it is cached, costs two requests, however many documents there are.

        `to_build`: if it is not cached, the heads that are read for it are kept for the snapshot that will follow.
        """
        versions = self._corpus.versions()
        if known := self._corpus.known_at(versions):
            return digest_of_shards(known)
        name = f"{self._cache}/{_named(versions)}"
        if (data := self._objects.get(name)) is not None and (made := _shards_in(data)):
            self._corpus.remember(versions, made)
            return digest_of_shards(made)
        if to_build:
            self._read = self._corpus.live()
            digest = self._read[0]
        else:
            digest = self._corpus.digest()
        self._keep()
        return digest

    @gc_paused()
    def now(self, *, of: str | None = None) -> Snapshot:
        """Stores and returns the current corpus, or the one with the digest `of` if its heads were just read."""
        read, self._read = self._read, None
        # Heads that were read for a build that was already sealed may be old.
        digest, shown = read if read and read[0] == of else self._corpus.live()
        self._keep()
        snapshot = Snapshot(digest, _table(shown))
        self._objects.put_new(
            self._name(digest), table_written(snapshot.table, WHAT, dictionary=["row", "origin"], statistics=[])
        )
        self._keep_rows(snapshot)
        return snapshot

    @gc_paused()
    def rows(self, digest: str) -> int | None:
        """The number of rows in an index of this corpus; None if it is neither stored nor the current one."""
        if self._known_rows and self._known_rows[0] == digest:
            return self._known_rows[1]
        data = self._objects.get(f"{self._counts}/{_hex(digest)}")
        rows = _rows_in(data) if data is not None else None
        if rows is None and (snapshot := self.get(digest)) is not None:
            self._keep_rows(snapshot)  # stored by a version that did not count rows
            rows = snapshot.rows
        if rows is None:
            self._read = self._read if self._read and self._read[0] == digest else self._corpus.live()
            if self._read[0] != digest:
                return None
            held = (stored_in(head.record).ids for _, _, head in self._read[1] if head.record)
            rows = sum(map(len, held)) // SNIPPET_BYTES
        self._known_rows = digest, rows
        return rows

    def _keep_rows(self, snapshot: Snapshot) -> None:
        values = {"version": 1, "documents": snapshot.documents, "rows": snapshot.rows}
        self._objects.put_new(f"{self._counts}/{_hex(snapshot.digest)}", json.dumps(values).encode())

    @gc_paused()
    def get(self, digest: str) -> Snapshot | None:
        name = self._name(digest)
        data = self._objects.get(name)
        if data is None:
            return None
        snapshot = Snapshot(digest, read_table(name, data, WHAT, _COLUMNS))
        if _digest_of(snapshot.table) != digest:
            raise FormatCorrupt(f"{name} does not hold the corpus that its name says", hint="delete it and build again")
        return snapshot

    def _name(self, digest: str) -> str:
        return f"{self._root}/{_hex(digest)}"

    def _keep(self) -> None:
        """Caches the digests for later processes. Only the newest is useful; without it, the heads are read."""
        versions = self._corpus.versions()
        if (made := self._corpus.known_at(versions)) is None:
            return
        name = f"{self._cache}/{_named(versions)}"
        self._objects.put_new(name, json.dumps({"version": 1, "shards": [each.hex() for each in made]}).encode())
        self._objects.delete([entry.name for entry in self._objects.list(f"{self._cache}/") if entry.name != name])


def _table(shown: Sequence[LiveHead]) -> Any:
    import pyarrow as pa

    rows = sorted((bytes((shard,)) + head.digest, source, head) for shard, source, head in shown)
    stored = [stored_in(head.record) for _, _, head in rows if head.record]
    # There are far fewer addresses than documents.
    addresses = {each.row for each in stored} | {each.origin for each in stored}
    text = {address: address.text for address in addresses}
    return pa.table(
        {
            "key": _fixed([key for key, _, _ in rows], 33),
            "source": _fixed([source for _, source, _ in rows], 20),
            "metadata_hash": _fixed([head.metadata_hash for _, _, head in rows], 16),
            "row": pa.array([text[each.row] for each in stored], pa.string()),
            "origin": pa.array([text[each.origin] for each in stored], pa.string()),
            "snippet_ids": id_lists([each.ids for each in stored]),
        }
    )


def _fixed(values: Sequence[bytes], width: int) -> Any:
    import pyarrow as pa

    held = b"".join(values)
    if len(held) != width * len(values):
        raise FormatCorrupt(f"a head in the fence store has a digest that is not of {width} bytes", hint=REHYDRATE)
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(width), len(values), [None, pa.py_buffer(held)])


def _digest_of(table: Any) -> str:
    import numpy as np

    key, source, metadata = (fixed_matrix(table, column) for column in ("key", "source", "metadata_hash"))
    heads = np.hstack([source, key[:, 1:], metadata])
    held, width = heads.tobytes(), heads.shape[1]
    each = (held[at : at + width] for at in range(0, len(held), width))
    return digest_of_shards(shard_digests(zip(key[:, 0].tolist(), each, strict=True)))


def _hex(digest: str) -> str:
    return digest.removeprefix("sha256:")


def _rows_in(data: bytes) -> int | None:
    try:
        values = json.loads(data)
        return int(values["rows"]) if values["version"] == 1 else None
    except (ValueError, KeyError, TypeError):
        return None  # the snapshot itself has the number


def _named(versions: Sequence[Version]) -> str:
    return sha256(json.dumps(versions).encode()).hexdigest()


def _shards_in(data: bytes) -> list[bytes] | None:
    try:
        values = json.loads(data)
        made = [bytes.fromhex(each) for each in values["shards"]] if values["version"] == 1 else []
    except (ValueError, KeyError, TypeError):
        return None  # only a cache: the heads are read instead
    return made if len(made) == SHARDS else None
