"""The ledger's columns: decision rows as Arrow tables and back, and Arrow tables as Parquet. `ragfence.ledger/2`.

A table holds everything a row does under descriptive names, so it can be read without ragfence; see docs/audit.md.
`to_rows(to_table(rows))` returns equal rows: where columns cannot hold a row exactly (a context written in another
order, a flag this version does not know), `raw` holds it as the fence store did.

Format 1 had no `phase`, `origin` and `api_key`. When its files are read, the phase is derived from the position in
`row_id` and the decision, and the other two are null.
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
"""rows in a group of a Parquet file; a lookup reads whole groups"""

_OPERATIONS = (
    *("kind", "source_type", "source_id", "revision", "index_hash", "action"),
    *("owner", "run_id", "event_id", "correlation_id", "route", "sequence"),
    *("origin", "api_key", "diff_size", "diff"),
)
_DOCUMENTS = (
    *("kind", "source_id", "revision", "index_hash", "action", "sequence", "characters"),
    *("correlation_id", "owner", "run_id", "route", "origin", "api_key"),
)
"""The orders in which contexts of operations and of documents are written: see `context_of` and `Caller`."""
_NUMBERS = frozenset({"diff_size", "saved", "characters", "sequence"})
_CONTEXT_FIELDS = tuple(dict.fromkeys((*_OPERATIONS, *_DOCUMENTS)))
_TEXTS = frozenset(_CONTEXT_FIELDS) - _NUMBERS
MAX_DIGITS = 20
_encode_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
"""as `context_of` does; `json.dumps` would make an encoder for every row"""
_KINDS = {text: kind for kind, text in DECISION_TEXT.items()}
_BITS = {text: bit for bit, text in FLAG_TEXT.items()}
_KNOWN_BITS = sum(FLAG_TEXT)
_FLAGS = {bits: [text for bit, text in FLAG_TEXT.items() if bits & bit] for bits in range(256)}
_NO_DICTIONARY = frozenset(
    {"row_id", "ts", "event_id", "correlation_id", "attempt", "waited_ms", "fence", "diff", "raw"}
)


@cache
def schema() -> pyarrow.Schema:
    """The schema of a ledger file."""
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
            # The columns below are for lookups, and for restoring the row.
            ("shard", pa.uint8()),
            ("sequence", number),
            ("characters", number),
            ("diff", text),
            ("raw", pa.binary()),
        ]
    )


DECISION_COLUMNS = 32
"""`fence.audit.decisions()` returns the first columns, up to this number"""


def decision_names() -> list[str]:
    return list(schema().names[:DECISION_COLUMNS])


def text_names() -> list[str]:
    """The columns of `decision_names()` that hold plain text."""
    import pyarrow as pa

    return [name for name in decision_names() if schema().field(name).type == pa.string()]


def to_table(rows: Iterable[Row], tenant: str) -> pyarrow.Table:
    import pyarrow as pa

    columns: list[Sequence[Any]] = list(zip(*(_encode_row(row, tenant) for row in rows), strict=True))
    columns = columns or [() for _ in schema()]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema(), strict=True)]
    return pa.Table.from_arrays(arrays, schema=schema())


def to_rows(table: pyarrow.Table) -> Iterator[Row]:
    import pyarrow as pa

    columns, names = [], schema().names
    for field in schema():
        column = table.column(field.name)
        columns.append((column.cast(pa.int64()) if pa.types.is_timestamp(field.type) else column).to_pylist())
    for values in zip(*columns, strict=True):
        raw = values[-1]
        yield _decode_row(dict(zip(names, values, strict=True))) if raw is None else next(decode_rows(raw))


def encode(table: pyarrow.Table) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    metadata = {b"ragfence": FORMAT.encode(), b"ragfence.version": b"%d" % VERSION}
    sink = pa.BufferOutputStream()
    pq.write_table(
        table.replace_schema_metadata(metadata),
        sink,
        compression="zstd",
        row_group_size=ROWS_IN_GROUP,
        use_dictionary=[name for name in schema().names if name not in _NO_DICTIONARY],
    )
    return bytes(sink.getvalue())


def open_file(name: str, source: Any, *, dictionaries: Sequence[str] = ()) -> Any:
    """Opens a Parquet file of the ledger. Columns named in `dictionaries` are read as Arrow dictionaries.

    Raises:
        FormatCorrupt: It is not a file of the ledger.
        FormatTooNew: Its format is newer than this version of ragfence.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        place = pa.BufferReader(source) if isinstance(source, bytes) else source
        file = pq.ParquetFile(place)
        if held := [name for name in dictionaries if name in file.schema_arrow.names]:
            file = pq.ParquetFile(place, metadata=file.metadata, read_dictionary=held)
        metadata = file.schema_arrow.metadata or {}
        version = int(metadata.get(b"ragfence.version", b"0"))
    except (pa.ArrowException, ValueError, OSError) as broken:
        raise FormatCorrupt(f"{name} is not a valid Parquet file: {broken}") from broken
    if metadata.get(b"ragfence") != FORMAT.encode() or version < 1:
        raise FormatCorrupt(f"{name} is not a file of the ledger")
    if version > VERSION:
        raise FormatTooNew(f"{name} has format {version}; this version of ragfence reads formats up to {VERSION}")
    return file


def read_columns(
    file: Any, names: Sequence[str], groups: Sequence[int] | None = None, *, dictionaries: Sequence[str] = ()
) -> pyarrow.Table:
    """Reads columns of a file that `open_file` opened, in this order; of all groups of rows, or of some."""
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
            values = compute_phases(table.column("row_id"), table.column("decision"))
        else:
            values = pa.nulls(table.num_rows, schema().field(name).type)
        table = table.append_column(name, values.dictionary_encode() if name in dictionaries else values)
    return table.select(list(names))


def compute_phases(row_ids: Any, decisions: Any) -> Any:
    """Derives the phase of rows of format 1. Each distinct pair of position and decision is evaluated once."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if isinstance(decisions.type, pa.DictionaryType):
        decisions = decisions.cast(pa.string())
    joined = pc.binary_join_element_wise(
        pc.utf8_slice_codeunits(row_ids, 2 * TOKEN_BYTES, 2 * TOKEN_BYTES + 2), decisions, ""
    )
    if isinstance(joined, pa.ChunkedArray):
        joined = joined.combine_chunks()
    dictionaries = joined.dictionary_encode()
    named = [phase_of(_KINDS[text[2:]], int(text[:2], 16)).value for text in dictionaries.dictionary.to_pylist()]
    return pa.array(named, pa.string()).take(dictionaries.indices)


def _encode_row(row: Row, tenant: str) -> tuple[Any, ...]:
    """The values of a row, in the order of the schema."""
    context = _context_values(row.context)
    text = {name: _to_text(context[name]) for name in context if name in _TEXTS}
    number = {name: _to_number(context[name]) for name in context if name in _NUMBERS}
    answered = row.sealed_at_ms > 0 and row.winner != NO_TOKEN
    default = default_effect_id(row.key)
    duplicate = row.kind is RowKind.DUPLICATE and not row.flags & FENCED_OUT
    exact = (
        _encode_context(text | number) == row.context
        and "saved" not in context
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


def _decode_row(values: dict[str, Any]) -> Row:
    key, token = bytes.fromhex(values["idempotency_key"]), bytes.fromhex(values["row_id"])
    effect_id = values["effect_id"] or ""
    epoch, _, counter = (values["fence"] or "0.0").partition(".")
    context = {name: value for name in _CONTEXT_FIELDS if (value := values[name]) is not None}
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
        context=_encode_context(context),
    )


def _context_values(context: bytes) -> dict[str, Any]:
    try:
        values = json.loads(context)
    except ValueError:  # never written, but one broken context must not block the drain of all other rows
        return {}
    return values if isinstance(values, dict) else {}


def _encode_context(context: dict[str, Any]) -> bytes:
    """The context as its writer encodes it, if it holds nothing unusual."""
    order = _DOCUMENTS if context.get("characters") is not None else _OPERATIONS
    known = {name: context[name] for name in order if context.get(name) is not None}
    if "sequence" in known:
        known["sequence"] = str(known["sequence"])
    return _encode_json(known).encode()


def _to_text(value: object) -> str | None:
    if isinstance(value, str):
        # A lone surrogate cannot be stored in Arrow; `raw` keeps it.
        return value if value.isascii() else value.encode(errors="replace").decode()
    return None if value is None else json.dumps(value)


def _to_number(value: object) -> int | None:
    """An integer, also one in the form of text, as `sequence` is."""
    if isinstance(value, str) and value.isascii() and value.lstrip("-").isdigit():
        value = int(value) if len(value) <= MAX_DIGITS else None
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 1 << 63:
        return None
    return value
