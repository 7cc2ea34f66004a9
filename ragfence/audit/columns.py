"""The ledger's columns: decision rows as Arrow tables and back, and Arrow tables as Parquet. `ragfence.ledger/2`.

A table tells everything a row does, under the names that people use, so it can be read without ragfence; docs/audit.md
describes it. `rows_in(table_of(rows))` gives the very rows again: where the columns cannot say it exactly (a context
that was written in another order, a flag this version does not know), `raw` holds the row as the fence store had it.

Format 1 had no `phase`, `origin` and `api_key`. Its files are read as if they had: the phase follows from the position
in `row_id` and the decision, and nobody told the other two.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from ragfence.core.decision_rows import DECISION_TEXT, FLAG_TEXT, NO_FENCE, Row, decode_rows, phase_of
from ragfence.core.layout import FENCED_OUT, NO_TOKEN, TOKEN_BYTES, RowKind
from ragfence.core.operations import FenceNumber
from ragfence.core.receipts import default_effect_id
from ragfence.errors import FormatCorrupt, FormatTooNew

if TYPE_CHECKING:
    import pyarrow

FORMAT = "ragfence.ledger"
VERSION = 2
ROWS_IN_GROUP = 8_192
"""of a Parquet file: a lookup reads whole groups"""

_OPERATIONS = (
    *("kind", "source_type", "source_id", "revision", "index_hash", "action"),
    *("owner", "run_id", "event_id", "correlation_id", "route", "sequence"),
    *("origin", "api_key", "diff_size", "diff"),
)
_DOCUMENTS = (
    *("kind", "source_id", "revision", "index_hash", "action", "sequence", "characters"),
    *("correlation_id", "owner", "run_id", "route", "origin", "api_key"),
)
"""In which order the contexts of operations, and those of documents, are written: see `context_of` and `Caller`."""
_NUMBERS = frozenset({"diff_size", "saved", "characters", "sequence"})
_TOLD = tuple(dict.fromkeys((*_OPERATIONS, *_DOCUMENTS)))
_TEXTS = frozenset(_TOLD) - _NUMBERS
MAX_DIGITS = 20
_written = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
"""as `context_of` does it; `json.dumps` would make an encoder for every row"""
_KINDS = {text: kind for kind, text in DECISION_TEXT.items()}
_BITS = {text: bit for bit, text in FLAG_TEXT.items()}
_KNOWN_BITS = sum(FLAG_TEXT)
_FLAGS = {bits: [text for bit, text in FLAG_TEXT.items() if bits & bit] for bits in range(256)}
_NO_DICTIONARY = frozenset(
    {"row_id", "ts", "event_id", "correlation_id", "attempt", "waited_ms", "fence", "diff", "raw"}
)


@cache
def schema() -> pyarrow.Schema:
    """Of a file of the ledger."""
    import pyarrow as pa

    text, number, time = pa.string(), pa.int64(), pa.timestamp("ms", tz="UTC")
    return pa.schema(
        [
            ("row_id", text),
            ("ts", time),
            ("tenant", text),
            ("kind", text),
            ("decision", text),
            ("phase", text),
            ("flags", pa.list_(text)),
            ("idempotency_key", text),
            ("payload_hash", text),
            ("effect_id", text),
            ("source_type", text),
            ("source_id", text),
            ("revision", text),
            ("index_hash", text),
            ("action", text),
            ("event_id", text),
            ("correlation_id", text),
            ("attempt", number),
            ("fence", text),
            ("owner", text),
            ("run_id", text),
            ("route", text),
            ("origin", text),
            ("api_key", text),
            ("winner", text),
            ("first_seen", time),
            ("sealed_at", time),
            ("expires_at", time),
            ("waited_ms", number),
            ("error_code", text),
            ("diff_size", number),
            ("saved", number),
            # What follows is for looking things up, and for having the row back.
            ("shard", pa.uint8()),
            ("sequence", number),
            ("characters", number),
            ("diff", text),
            ("raw", pa.binary()),
        ]
    )


DECISION_COLUMNS = 32
"""so many of them, the first ones, are what `fence.audit.decisions()` shows"""


def decision_names() -> list[str]:
    return list(schema().names[:DECISION_COLUMNS])


def text_names() -> list[str]:
    """The columns that hold plain text, of what decisions show."""
    import pyarrow as pa

    return [name for name in decision_names() if schema().field(name).type == pa.string()]


def table_of(rows: Iterable[Row], tenant: str) -> pyarrow.Table:
    import pyarrow as pa

    columns: list[Sequence[Any]] = list(zip(*(_values(row, tenant) for row in rows), strict=True))
    columns = columns or [() for _ in schema()]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema(), strict=True)]
    return pa.Table.from_arrays(arrays, schema=schema())


def rows_in(table: pyarrow.Table) -> Iterator[Row]:
    import pyarrow as pa

    columns, names = [], schema().names
    for field in schema():
        column = table.column(field.name)
        columns.append((column.cast(pa.int64()) if pa.types.is_timestamp(field.type) else column).to_pylist())
    for values in zip(*columns, strict=True):
        raw = values[-1]
        yield _row(dict(zip(names, values, strict=True))) if raw is None else next(decode_rows(raw))


def encode(table: pyarrow.Table) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    told = {b"ragfence": FORMAT.encode(), b"ragfence.version": b"%d" % VERSION}
    sink = pa.BufferOutputStream()
    pq.write_table(
        table.replace_schema_metadata(told),
        sink,
        compression="zstd",
        row_group_size=ROWS_IN_GROUP,
        use_dictionary=[name for name in schema().names if name not in _NO_DICTIONARY],
    )
    return bytes(sink.getvalue())


def opened(name: str, source: Any, *, coded: Sequence[str] = ()) -> Any:
    """The Parquet file, if it is one of the ledger in a format that is known. `coded`: read as Arrow dictionaries."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        place = pa.BufferReader(source) if isinstance(source, bytes) else source
        file = pq.ParquetFile(place)
        if held := [name for name in coded if name in file.schema_arrow.names]:
            file = pq.ParquetFile(place, metadata=file.metadata, read_dictionary=held)
        told = file.schema_arrow.metadata or {}
        version = int(told.get(b"ragfence.version", b"0"))
    except (pa.ArrowException, ValueError, OSError) as broken:
        raise FormatCorrupt(f"{name} is no Parquet object: {broken}") from broken
    if told.get(b"ragfence") != FORMAT.encode() or version < 1:
        raise FormatCorrupt(f"{name} is no part of the ledger")
    if version > VERSION:
        raise FormatTooNew(f"{name} has format {version}; this ragfence knows {VERSION}")
    return file


def read(
    file: Any, names: Sequence[str], groups: Sequence[int] | None = None, *, coded: Sequence[str] = ()
) -> pyarrow.Table:
    """These columns of a file that was opened so, in this order; of all groups of rows, or of some."""
    import pyarrow as pa

    held = set(file.schema_arrow.names)
    missing = [name for name in names if name not in held]
    needed = list(dict.fromkeys([name for name in names if name in held]))
    if "phase" in missing:
        needed = list(dict.fromkeys((*needed, "row_id", "decision")))
    needed = needed or ["row_id"]  # a table without columns has no rows
    table = file.read(columns=needed) if groups is None else file.read_row_groups(list(groups), columns=needed)
    for name in missing:
        if name == "phase":
            values = phases(table.column("row_id"), table.column("decision"))
        else:
            values = pa.nulls(table.num_rows, schema().field(name).type)
        table = table.append_column(name, values.dictionary_encode() if name in coded else values)
    return table.select(list(names))


def phases(row_ids: Any, decisions: Any) -> Any:
    """The phase of each row, from what rows of format 1 tell; the few different pairs are decided once."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if isinstance(decisions.type, pa.DictionaryType):
        decisions = decisions.cast(pa.string())
    told = pc.binary_join_element_wise(
        pc.utf8_slice_codeunits(row_ids, 2 * TOKEN_BYTES, 2 * TOKEN_BYTES + 2), decisions, ""
    )
    if isinstance(told, pa.ChunkedArray):
        told = told.combine_chunks()
    coded = told.dictionary_encode()
    named = [phase_of(_KINDS[text[2:]], int(text[:2], 16)).value for text in coded.dictionary.to_pylist()]
    return pa.array(named, pa.string()).take(coded.indices)


def _values(row: Row, tenant: str) -> tuple[Any, ...]:
    """In the order of the schema."""
    told = _told(row.context)
    text = {name: _text(told[name]) for name in told if name in _TEXTS}
    number = {name: _number(told[name]) for name in told if name in _NUMBERS}
    answered = row.sealed_at_ms > 0 and row.winner != NO_TOKEN
    default = default_effect_id(row.key)
    duplicate = row.kind is RowKind.DUPLICATE and not row.flags & FENCED_OUT
    exact = (
        _context(text | number) == row.context
        and "saved" not in told
        and row.effect_id != default
        and not row.flags & ~_KNOWN_BITS
        and (row.fence.epoch > 0 or row.fence == NO_FENCE)
    )
    get = text.get
    return (
        row.row_id,
        row.ts_ms,
        tenant,
        get("kind"),
        DECISION_TEXT[row.kind],
        row.phase.value,
        _FLAGS[row.flags],
        row.key.hex(),
        row.fingerprint.hex(),
        row.effect_id or (default if answered else None),
        get("source_type"),
        get("source_id"),
        get("revision"),
        get("index_hash"),
        get("action"),
        get("event_id"),
        get("correlation_id"),
        row.attempt,
        str(row.fence) if row.fence.epoch else None,
        get("owner"),
        get("run_id"),
        get("route"),
        get("origin"),
        get("api_key"),
        row.winner.hex() if row.winner != NO_TOKEN else None,
        row.first_seen_ms or None,
        row.sealed_at_ms or None,
        row.expires_ms or None,
        row.waited_ms,
        row.error_code or None,
        number.get("diff_size"),
        number.get("saved", number.get("characters") if duplicate else None),
        row.key[0],
        number.get("sequence"),
        number.get("characters"),
        get("diff"),
        None if exact else row.encode(),
    )


def _row(values: dict[str, Any]) -> Row:
    key, token = bytes.fromhex(values["idempotency_key"]), bytes.fromhex(values["row_id"])
    effect_id = values["effect_id"] or ""
    epoch, _, counter = (values["fence"] or "0.0").partition(".")
    told = {name: value for name in _TOLD if (value := values[name]) is not None}
    return Row(
        token=token[:TOKEN_BYTES],
        position=token[TOKEN_BYTES],
        ts_ms=values["ts"],
        kind=_KINDS[values["decision"]],
        key=key,
        fingerprint=bytes.fromhex(values["payload_hash"]),
        flags=sum(_BITS[text] for text in values["flags"]),
        attempt=values["attempt"],
        fence=FenceNumber(int(epoch), int(counter)),
        first_seen_ms=values["first_seen"] or 0,
        sealed_at_ms=values["sealed_at"] or 0,
        expires_ms=values["expires_at"] or 0,
        waited_ms=values["waited_ms"],
        winner=bytes.fromhex(values["winner"]) if values["winner"] else NO_TOKEN,
        effect_id="" if effect_id == default_effect_id(key) else effect_id,
        error_code=values["error_code"] or "",
        context=_context(told),
    )


def _told(context: bytes) -> dict[str, Any]:
    try:
        told = json.loads(context)
    except ValueError:  # nobody writes such a context; it must not keep all others from being drained
        return {}
    return told if isinstance(told, dict) else {}


def _context(told: dict[str, Any]) -> bytes:
    """As whoever wrote it does, if it holds nothing unusual."""
    order = _DOCUMENTS if told.get("characters") is not None else _OPERATIONS
    known = {name: told[name] for name in order if told.get(name) is not None}
    if "sequence" in known:
        known["sequence"] = str(known["sequence"])
    return _written(known).encode()


def _text(value: object) -> str | None:
    if isinstance(value, str):
        # A lone surrogate cannot be stored; `raw` has it as it is.
        return value if value.isascii() else value.encode(errors="replace").decode()
    return None if value is None else json.dumps(value)


def _number(value: object) -> int | None:
    """`sequence` is a number in the form of text."""
    if isinstance(value, str) and value.isascii() and value.lstrip("-").isdigit():
        value = int(value) if len(value) <= MAX_DIGITS else None
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 1 << 63:
        return None
    return value
