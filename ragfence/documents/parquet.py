"""Segments as Parquet: rows and snippets. pyarrow is imported with the first of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from ragfence.core.layout import BATCH_BYTES, HERE, fence_fields, sealed_head, short, split_keys
from ragfence.core.operations import FenceNumber
from ragfence.documents.identity import KIND, SNIPPET_BYTES, snippet_texts
from ragfence.documents.log import Address, Detail, Positions, Snippet, address_in, result_of
from ragfence.engine.segment_log import LogRow, Packed
from ragfence.errors import FormatCorrupt, FormatTooNew, SegmentUnreadable

VERSION = 1
ROWS_VERSION = 2
"""of rows; rows of format 1 have no `owner`, and are read as documents without an origin"""
SNIPPETS_HINT = (
    "restore this object from a backup; without one, `ragfence verify --repair` releases the documents that need it: "
    "ingest them again then, they get the same snippet_ids"
)


class ParquetCodec:
    """Encodes and decodes rows for the engine."""

    def encode(self, rows: Sequence[LogRow]) -> bytes:
        import pyarrow as pa

        keys, sources, fences, fingerprints, live, sequences, described, _, _, tokens, details, *_ = _turned(
            rows, LogRow
        )
        epochs, counters = _turned(fences, FenceNumber)
        doc_ids, actions, hashes, sizes, metadata, urls, types, recipes, at_ms, *of_snippets = _turned(details, Detail)
        ids, positions, dead, origins, before, _, owners = of_snippets
        starts, ends, sections = _turned(positions, Positions)
        columns = {
            "doc_id": pa.array(doc_ids, pa.string()),
            "action": pa.array(actions, pa.string()),
            "key": _fixed(keys, 33),
            "source": _fixed(sources, 20),
            "epoch": pa.array(epochs, pa.int64()),
            "counter": pa.array(counters, pa.int64()),
            "token": _fixed(tokens, 12),
            "live": pa.array(live, pa.bool_()),
            "fingerprint": _fixed(fingerprints, 16),
            "content_hash": pa.array(hashes, pa.string()),
            "size": pa.array(sizes, pa.int64()),
            "metadata_hash": _fixed(described, 16),
            "sequence": pa.array(sequences, pa.int64()),
            "metadata": pa.array(metadata, pa.string()),
            "source_url": pa.array(urls, pa.string()),
            "content_type": pa.array(types, pa.string()),
            "recipe": pa.array(recipes, pa.string()),
            "at": pa.array(at_ms, pa.timestamp("ms", "UTC")),
            "snippet_ids": id_lists(ids),
            "starts": _lists(starts, pa.int64()),
            "ends": _lists(ends, pa.int64()),
            "sections": _lists(sections, pa.string()),
            "dead": id_lists(dead),
            "origin": pa.array(origins, pa.string()),
            "before": pa.array(before, pa.string()),
            "owner": pa.array(owners, pa.string()),
        }
        return _written(columns, "rows", dictionary=["action", "content_type", "recipe", "origin", "before", "owner"])

    def decode(self, name: str, data: bytes) -> Iterator[LogRow]:
        """Yields the part of each row that the fence store needs; `detail` is empty, see `whole_rows`."""
        return _rows(name, _read(name, data, "rows", [*_OF_FENCES, "at"]))

    def packed(self, name: str, data: bytes) -> Iterator[Packed]:
        return _packed(name, _read(name, data, "rows", [*_OF_FENCES, "at"]))


def _packed(name: str, table: Any) -> Iterator[Packed]:
    """Yields the packed form of each row without making objects, for a whole log. A test compares it with `_rows`."""
    import pyarrow.compute as pc

    if not table.num_rows:
        return
    here, count = address_in(name), table.num_rows
    highest = FenceNumber(pc.max(table.column("epoch")).as_py(), pc.max(table.column("counter")).as_py())
    fence_fields(highest)  # refused, if one does not fit
    kind = short(KIND)
    elsewhere = pc.max(pc.binary_length(table.column("origin"))).as_py() > 0
    owned = pc.max(pc.binary_length(table.column("owner"))).as_py() > 0
    ordered = table.column("sequence").null_count < count
    for (
        shard,
        digest,
    ), source, epoch, counter, token, live, fingerprint, described, sequence, origin, owner, ids, at_ms in zip(
        split_keys(_held(table, "key")),
        fixed_values(table, "source"),
        numbers(table, "epoch"),
        numbers(table, "counter"),
        fixed_values(table, "token"),
        table.column("live").to_pylist(),
        fixed_values(table, "fingerprint"),
        fixed_values(table, "metadata_hash"),
        table.column("sequence").to_pylist() if ordered else [None] * count,
        table.column("origin").to_pylist() if elsewhere else [""] * count,
        table.column("owner").to_pylist() if owned else [""] * count,
        list_blobs(table, "snippet_ids"),
        numbers(table, "at"),
        strict=True,
    ):
        at_home = epoch == here.epoch and token[:BATCH_BYTES] == here.batch
        tail = kind
        if live:
            plain = at_home and not origin and not owner
            tail += (HERE + ids) if plain else _result(ids, origin, here, at_home, owner)
        fields = epoch << 8 | counter >> 32, counter & 0xFFFFFFFF
        yield (
            shard + source,
            (epoch, counter),
            sealed_head(digest, live, sequence, described, fingerprint, token, fields, at_ms, tail),
        )


def _result(ids: bytes, origin: str, here: Address, at_home: bool, owner: str) -> bytes:
    positions = address_in(origin) if origin else here
    there = positions if positions != here or not at_home else None
    return result_of(ids, there, None if at_home else here, bytes.fromhex(owner))


def _rows(name: str, table: Any) -> Iterator[LogRow]:
    here = address_in(name)
    columns = [fixed_values(table, column) for column in _OF_FENCES]
    times = table.column("at").cast("int64").to_pylist()
    for (
        key,
        source,
        epoch,
        counter,
        token,
        live,
        fingerprint,
        metadata_hash,
        sequence,
        origin,
        owner,
        ids,
        at_ms,
    ) in zip(*columns, list_blobs(table, "snippet_ids"), times, strict=True):
        at_home = epoch == here.epoch and token[:BATCH_BYTES] == here.batch
        result = _result(ids, origin, here, at_home, owner) if live else b""
        fence = FenceNumber(epoch, counter)
        yield LogRow(
            key, source, fence, fingerprint, live, sequence, metadata_hash, "", result, token, None, KIND, at_ms
        )


_OF_FENCES = [
    "key",
    "source",
    "epoch",
    "counter",
    "token",
    "live",
    "fingerprint",
    "metadata_hash",
    "sequence",
    "origin",
    "owner",
]
_OF_DETAILS = [
    "doc_id",
    "action",
    "content_hash",
    "size",
    "metadata",
    "source_url",
    "content_type",
    "recipe",
    "at",
    "starts",
    "ends",
    "sections",
    "origin",
    "before",
    "owner",
]


def whole_rows(name: str, data: bytes, *, doc_id: str | None = None) -> Iterator[LogRow]:
    """Yields the rows of a segment with their details, or only those of one document."""
    import pyarrow as pa
    import pyarrow.compute as pc

    table = _read(name, data, "rows", [*_OF_FENCES, *_OF_DETAILS, "dead"])
    if doc_id is not None:
        table = table.filter(pc.equal(table.column("doc_id"), doc_id)).combine_chunks()
    table = table.set_column(table.schema.get_field_index("at"), "at", table.column("at").cast(pa.int64()))
    columns = [table.column(column).to_pylist() for column in _OF_DETAILS]
    details = zip(*columns, list_blobs(table, "snippet_ids"), list_blobs(table, "dead"), strict=True)
    for row, values in zip(_rows(name, table), details, strict=True):
        starts, ends, sections, origin, before, owner, ids, dead = values[9:]
        positions = Positions(starts, ends, sections)
        detail = Detail._make((*values[:9], ids, positions, dead, origin, before, (), owner))
        yield row._replace(detail=detail)


def encode_snippets(rows: Sequence[LogRow]) -> bytes | None:
    """Encodes the snippets that these rows make; None if they make none."""
    import pyarrow as pa
    import pyarrow.compute as pc

    fresh = [(row.detail, snippet_id, text) for row in rows for snippet_id, text in row.detail.fresh]
    if not fresh:
        return None
    texts = pa.array([text for _, _, text in fresh], pa.string())
    columns = {
        "snippet_id": _fixed([snippet_id for _, snippet_id, _ in fresh], SNIPPET_BYTES),
        "doc_id": pa.array([detail.doc_id for detail, _, _ in fresh], pa.string()),
        "recipe": pa.array([detail.recipe for detail, _, _ in fresh], pa.string()),
        "text": texts,
        "tokens": pc.divide(pc.add(pc.binary_length(texts), 3), 4),
    }
    return _written(columns, "snippets", dictionary=["doc_id", "recipe"])


def read_rows(name: str, data: bytes) -> Any:
    """Returns the rows of a segment as an Arrow table, with the columns that an index needs."""
    return _read(name, data, "rows", _OF_INDEXES)


def read_snippets(name: str, data: bytes, columns: Sequence[str] = ("text", "tokens")) -> Any:
    """Returns the snippets of a segment as an Arrow table: their ids and these columns."""
    return _read(name, data, "snippets", list(columns))


_OF_INDEXES = [
    "doc_id",
    "action",
    "key",
    "live",
    "metadata_hash",
    "metadata",
    "source_url",
    "starts",
    "ends",
    "sections",
    "before",
    "origin",
]


def decode_snippets(name: str, data: bytes) -> Iterator[Snippet]:
    table = _read(name, data, "snippets", ["doc_id", "recipe", "text", "tokens"])
    ids = [snippet_texts(each)[0] for each in table.column("snippet_id").to_pylist()]
    columns = [table.column(column).to_pylist() for column in ("doc_id", "recipe", "text", "tokens")]
    for snippet_id, *values in zip(ids, *columns, strict=True):
        yield Snippet(snippet_id, *values)


def _written(columns: dict[str, Any], what: str, *, dictionary: list[str]) -> bytes:
    import pyarrow as pa

    return table_written(pa.table(columns), what, dictionary=dictionary, statistics=["doc_id"])


def table_written(table: Any, what: str, *, dictionary: list[str], statistics: list[str]) -> bytes:
    """Encodes a table as an object that names its kind and its format version."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    named = table.replace_schema_metadata({"ragfence": what, "ragfence.version": str(_version_of(what))})
    sink = pa.BufferOutputStream()
    pq.write_table(named, sink, compression="zstd", use_dictionary=dictionary, write_statistics=statistics or False)
    return bytes(sink.getvalue())


def _version_of(what: str) -> int:
    return ROWS_VERSION if what == "rows" else VERSION


def _read(name: str, data: bytes, what: str, columns: list[str]) -> Any:
    # Each name once: Arrow would return a column twice.
    wanted = list(dict.fromkeys([*columns, "snippet_ids" if what == "rows" else "snippet_id"]))
    table = read_table(name, data, what, wanted)
    if "owner" in wanted and "owner" not in table.column_names:  # format 1
        import pyarrow as pa

        table = table.append_column("owner", pa.repeat("", table.num_rows))
    return table


def read_table(name: str, data: bytes, what: str, columns: list[str]) -> Any:
    """Decodes an object; raises an error unless it is of this kind and of a known format."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(pa.BufferReader(data))
        stored = file.schema_arrow.metadata or {}
        version = int(stored.get(b"ragfence.version", b"0"))
        if stored.get(b"ragfence") != what.encode() or version < 1:
            raise _unreadable(name, what, "it was not written by ragfence")
        if version > _version_of(what):
            raise FormatTooNew(f"{name} has format {version}; this ragfence knows {_version_of(what)}")
        return file.read(columns=columns).combine_chunks()
    except (pa.ArrowException, KeyError, ValueError, OSError) as broken:
        raise _unreadable(name, what, str(broken)) from broken


def _unreadable(name: str, what: str, why: str) -> FormatCorrupt:
    if what not in ("rows", "snippets"):
        return FormatCorrupt(f"{name} is not a Parquet object of {what}: {why}")
    hint = SNIPPETS_HINT if what == "snippets" else None
    return SegmentUnreadable(f"the {what} of the segment {name} cannot be read: {why}", hint=hint, segment=name)


def id_lists(blobs: Sequence[bytes]) -> Any:
    """Turns blobs of concatenated ids into an Arrow list per blob, without a Python object per id."""
    import pyarrow as pa

    offsets, end = [0], 0
    for blob in blobs:
        end += len(blob) // SNIPPET_BYTES
        offsets.append(end)
    values = pa.FixedSizeBinaryArray.from_buffers(pa.binary(SNIPPET_BYTES), end, [None, pa.py_buffer(b"".join(blobs))])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values)


def list_blobs(table: Any, column: str) -> Iterator[bytes]:
    """The inverse of `id_lists`."""
    lists = table.column(column)
    for chunk in lists.chunks:
        offsets = chunk.offsets.to_pylist()
        values = chunk.values
        start = values.offset * SNIPPET_BYTES
        buffer = values.buffers()[1]
        held = buffer.to_pybytes() if buffer is not None else b""
        for begin, end in pairwise(offsets):
            yield held[start + begin * SNIPPET_BYTES : start + end * SNIPPET_BYTES]


def fixed_values(table: Any, column: str) -> list[Any]:
    """Returns a column as Python objects. Digests are sliced from their buffer, five times faster than one by one."""
    import pyarrow as pa

    values = table.column(column)
    kind = values.type
    if not pa.types.is_fixed_size_binary(kind) or values.null_count:
        return list(values.to_pylist())
    width, held = kind.byte_width, _held(table, column)
    return [held[at : at + width] for at in range(0, len(held), width)]


def fixed_matrix(table: Any, column: str) -> Any:
    """Returns a column of fixed width without nulls as a numpy array of bytes: a row for each value."""
    import numpy as np

    return np.frombuffer(_held(table, column), np.uint8).reshape(-1, table.schema.field(column).type.byte_width)


def numbers(table: Any, column: str) -> list[int]:
    """Returns a column of 64-bit integers or times without nulls as Python integers."""
    held: list[int] = memoryview(_held(table, column)).cast("q").tolist()
    return held


def _held(table: Any, column: str) -> bytes:
    """Returns all values of a column of fixed width, concatenated."""
    values = table.column(column)
    width = values.type.bit_width // 8
    pieces = [
        chunk.buffers()[1].to_pybytes()[chunk.offset * width : (chunk.offset + len(chunk)) * width]
        for chunk in values.chunks
    ]
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _turned(rows: Sequence[Any], kind: type[Any]) -> list[Sequence[Any]]:
    """Transposes named tuples into columns, in the order of the fields of their type."""
    return list(zip(*rows, strict=True)) or [()] * len(kind._fields)


def _fixed(values: Sequence[bytes], width: int) -> Any:
    """Makes an Arrow array of one joined buffer, three times faster than value by value."""
    import pyarrow as pa

    held = b"".join(values)
    if len(held) != width * len(values):
        raise ValueError(f"{len(values)} values of {width} bytes have {len(held)}")
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(width), len(values), [None, pa.py_buffer(held)])


def _lists(values: Sequence[Sequence[Any]], kind: Any) -> Any:
    import pyarrow as pa

    offsets = [0]
    flat: list[Any] = []
    for each in values:
        flat.extend(each)
        offsets.append(len(flat))
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(flat, kind))
