"""The log of documents in Parquet, and what records say of it."""

from __future__ import annotations

import io
import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragfence.core.layout import State, ids_in
from ragfence.core.operations import FenceNumber
from ragfence.core.records import KeyRecord
from ragfence.documents.log import Address, Detail, Positions, address_in, result_of, stored_in
from ragfence.documents.parquet import ParquetCodec, decode_snippets, encode_snippets, whole_rows
from ragfence.engine.segment_log import LogRow
from ragfence.errors import FormatCorrupt, FormatTooNew, StoreUnsafe

HERE = Address(7, b"batch-01")
THERE = Address(3, b"batch-02")
TOKEN = HERE.batch + b"\0\0\0\1"
NAME = f"tenant/segments/{HERE.text}"
IDS = bytes(range(32))
OWNER = bytes(range(8))
GOLDEN = Path(__file__).parents[1] / "golden"


def row(*, live: bool = True, epoch: int = 7, token: bytes = TOKEN, **fields: object) -> LogRow:
    detail = Detail(
        doc_id="docs/日本語.md",
        action="ingest",
        content_hash="xxh3:00",
        size=9,
        metadata='{"a":1}',
        source_url="https://example.com",
        content_type="text/plain",
        recipe="{}",
        at_ms=1_800_000_000_123,
        ids=IDS if live else b"",
        positions=Positions([0, 5], [5, 9], ["", "A/B"]) if live else Positions([], [], []),
        dead=b"d" * 16,
        before=THERE.text,
        fresh=[(IDS[:16], "one two"), (IDS[16:], "three")],
    )._replace(**fields)
    result = result_of(detail.ids) if live else b""
    return LogRow(
        b"\x05" + b"k" * 32, b"s" * 20, FenceNumber(epoch, 9), b"f" * 16, live, 4, b"m" * 16, "", result, token, detail
    )


def record(result: bytes, *, epoch: int = 7, token: bytes = TOKEN) -> KeyRecord:
    return KeyRecord(State.SEALED, b"f" * 16, token, FenceNumber(epoch, 9), 1, 0, 0, result=result)


@given(st.binary(max_size=160).filter(lambda ids: len(ids) % 16 == 0))
def test_a_record_finds_ids_rows_and_positions(ids: bytes) -> None:
    assert stored_in(record(result_of(ids))) == (HERE, HERE, ids, b"")
    assert stored_in(record(result_of(ids, THERE))) == (HERE, THERE, ids, b"")
    assert stored_in(record(result_of(ids, THERE, HERE), epoch=2)) == (HERE, THERE, ids, b"")
    assert {ids_in(result_of(ids)), ids_in(result_of(ids, THERE)), ids_in(result_of(ids, None, HERE))} == {ids}


@given(st.binary(max_size=160).filter(lambda ids: len(ids) % 16 == 0))
def test_a_record_names_the_owner(ids: bytes) -> None:
    assert stored_in(record(result_of(ids, owner=OWNER))) == (HERE, HERE, ids, OWNER)
    assert stored_in(record(result_of(ids, THERE, owner=OWNER))) == (HERE, THERE, ids, OWNER)
    assert stored_in(record(result_of(ids, THERE, HERE, OWNER), epoch=2)) == (HERE, THERE, ids, OWNER)
    for result in (result_of(ids, owner=OWNER), result_of(ids, THERE, None, OWNER), result_of(ids, None, HERE, OWNER)):
        assert ids_in(result) == ids


def test_what_records_hold_of_documents_never_changes() -> None:
    written = {
        f"{tag}{' owned' if owner else ''}": result_of(IDS, origin, moved, owner).hex()
        for owner in (b"", OWNER)
        for tag, origin, moved in (("plain", None, None), ("elsewhere", THERE, None), ("moved", THERE, HERE))
    }
    assert written == json.loads((GOLDEN / "documents.json").read_text(encoding="utf-8"))["results"]


@pytest.mark.parametrize("version", [1, 2])
def test_rows_of_every_format_can_be_read(version: int) -> None:
    """The files were written by the code of their time."""
    owner = "" if version == 1 else OWNER.hex()
    rows = [
        row(owner=owner),
        row(live=False, action="retract", owner=owner),
        row(origin=THERE.text, positions=Positions([], [], []), owner=owner),
        row(epoch=2, token=b"x" * 12, owner=""),
    ]
    data = (GOLDEN / f"rows-{version}.parquet").read_bytes()
    assert pq.read_schema(io.BytesIO(data)).metadata[b"ragfence.version"] == str(version).encode()
    found = list(whole_rows(NAME, data))
    assert [each.detail for each in found] == [each.detail._replace(fresh=()) for each in rows]
    owned = bytes.fromhex(owner)
    expected = [
        result_of(IDS, owner=owned),
        b"",
        result_of(IDS, THERE, owner=owned),
        result_of(IDS, None, HERE),
    ]
    assert [each.result for each in found] == [each.result for each in ParquetCodec().decode(NAME, data)] == expected


def test_rows_come_back_whole() -> None:
    rows = [row(), row(live=False, action="retract"), row(origin=THERE.text, positions=Positions([], [], []))]
    data = ParquetCodec().encode(rows)
    found = list(whole_rows(NAME, data))
    assert [each.detail for each in found] == [each.detail._replace(fresh=()) for each in rows]
    plain = list(ParquetCodec().decode(NAME, data))
    assert [each._replace(detail=None) for each in found] == plain
    assert [each.key for each in plain] == [each.key for each in rows]
    assert [each.result for each in plain] == [result_of(IDS), b"", result_of(IDS, THERE)]
    assert [stored_in(each.record()).row for each in plain[::2]] == [HERE, HERE]
    assert list(whole_rows(NAME, data, doc_id="another")) == []


def test_rows_that_were_moved_say_where_they_are_now() -> None:
    data = ParquetCodec().encode([row(epoch=2, token=b"x" * 12)])
    (found,) = ParquetCodec().decode(NAME, data)
    assert stored_in(found.record()) == (HERE, HERE, IDS, b"")


@settings(deadline=None)
@given(st.lists(st.tuples(*[st.booleans()] * 4, st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)), st.binary())))
def test_rows_are_packed_for_the_fence_store_as_they_are_decoded(given_rows: list[Any]) -> None:
    """At home or moved, with positions here or elsewhere, live or not, ordered or not: a store that is hydrated holds
    what the rows say."""
    rows = []
    for live, moved, at_home, long, sequence, noise in given_rows:
        fields = {"origin": THERE.text} if moved else {}
        if len(noise) % 2:
            fields["owner"] = OWNER.hex()
        made = row(live=live, epoch=7 if at_home else 2**53 - 1, token=TOKEN if at_home else b"x" * 12, **fields)
        key, source = bytes((len(noise) % 64,)) + sha256(noise).digest(), sha256(noise).digest()[:20]
        ids = sha256(noise).digest() * (5 if long else 0) if live else b""
        rows.append(
            made._replace(
                key=key,
                source=source,
                sequence=sequence,
                fence=FenceNumber(made.fence.epoch, 2**40 - 1 - len(noise)),
                detail=made.detail._replace(ids=ids, positions=Positions([], [], [])),
            )
        )
    data = ParquetCodec().encode(rows)
    decoded = list(ParquetCodec().decode(NAME, data))
    assert [each.key for each in decoded] == [each.key for each in rows]
    assert list(ParquetCodec().packed(NAME, data)) == [each.packed() for each in decoded]


def test_a_fence_that_records_cannot_hold_is_refused_when_it_is_packed() -> None:
    data = ParquetCodec().encode([row(epoch=2**53)])
    with pytest.raises(StoreUnsafe):
        list(ParquetCodec().packed(NAME, data))


def test_snippets_come_back_whole() -> None:
    data = encode_snippets([row(), row(fresh=())])
    assert data is not None
    first, second = decode_snippets("snippets", data)
    assert (first.snippet_id, first.doc_id, first.text, first.tokens) == (
        IDS[:16].hex(),
        "docs/日本語.md",
        "one two",
        2,  # of 7 bytes
    )
    assert second.text == "three"
    assert encode_snippets([row(fresh=())]) is None


def test_any_tool_can_read_them() -> None:
    table = pq.read_table(io.BytesIO(ParquetCodec().encode([row()])))
    assert table.column("doc_id").to_pylist() == ["docs/日本語.md"]
    assert table.column("snippet_ids").to_pylist() == [[IDS[:16], IDS[16:]]]
    assert table.column("at").to_pylist()[0].isoformat() == "2027-01-15T08:00:00.123000+00:00"
    assert table.column("sections").to_pylist() == [["", "A/B"]]


@pytest.mark.parametrize("data", [b"", b"PAR1", b"{}", encode_snippets([row()])], ids=["empty", "cut", "json", "other"])
def test_what_is_no_segment_is_refused(data: bytes) -> None:
    with pytest.raises(FormatCorrupt, match="segments"):
        list(ParquetCodec().decode(NAME, data))


def test_a_newer_format_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("ragfence.documents.parquet.ROWS_VERSION", 3)
        data = ParquetCodec().encode([row()])
    with pytest.raises(FormatTooNew, match="format 3"):
        list(ParquetCodec().decode(NAME, data))


@pytest.mark.parametrize("name", ["", "a/b", "segments/1/zz", f"{HERE.text}/more/x"])
def test_a_name_that_is_none_of_a_segment_is_refused(name: str) -> None:
    with pytest.raises(FormatCorrupt):
        address_in(name)
    assert address_in(NAME) == address_in(HERE.text) == HERE
