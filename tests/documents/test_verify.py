"""`fence.documents.verify()`: each kind of trouble is found, named, and mended where it can be; peace is none."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from ragfence import Decision, Document
from ragfence.core.decisions import Mode
from ragfence.core.records import SourceRecord
from ragfence.documents.documents import Documents
from ragfence.documents.findings import TO_DO, Finding, Trouble
from ragfence.documents.head_moves import AFTER_SNIPPETS
from ragfence.documents.rewrite import REWRITING_POINTS
from ragfence.engine import crash_points
from ragfence.errors import (
    Conflict,
    FormatCorrupt,
    NotReady,
    PolicyError,
    RagfenceError,
    SegmentUnreadable,
    Stale,
    ValidationError,
)
from ragfence.stores.fences import Lookup
from ragfence.stores.redis.codec import Names
from ragfence.testing import at_point
from ragfence.testing.memory_sinks import ListSink
from tests.documents.chunkers import Paragraphs
from tests.documents.places import TENANT, Place, place, texts
from tests.engine.worlds import Crash, Process, elsewhere

A = "first paragraph\n\nsecond paragraph\n\nthird paragraph"
B = "first paragraph\n\nanother paragraph\n\nthird paragraph"
C = "something else"


def found_by(documents: Documents, **options: Any) -> list[tuple[Trouble, str]]:
    return sorted((finding.trouble, finding.doc_id) for finding in documents.verify(**options).findings)


def source_name(documents: Documents, doc_id: str) -> tuple[int, bytes]:
    return documents._identity.place(doc_id.encode())


def forget_source(here: Place, documents: Documents, doc_id: str) -> None:
    """By hand, as somebody with a shell might."""
    shard, source = source_name(documents, doc_id)
    if here.name == "memory":
        del here.store.content.sources[shard, source]
    elif here.name == "valkey":
        assert here.server.delete(Names(TENANT).source(shard, source)) == 1
    else:
        here._sql(f"DELETE FROM sources WHERE source = x'{source.hex()}'")


def forget_record(here: Place, key: str) -> None:
    if here.name == "memory":
        del here.store.content.records[bytes.fromhex(key)]
    elif here.name == "valkey":
        assert here.server.delete(Names(TENANT).record(bytes.fromhex(key))) == 1
    else:
        here._sql(f"DELETE FROM records WHERE key = x'{key}'")


def replace_object(here: Place, name: str, data: bytes) -> None:
    here.kept.delete([name])
    here.kept.put_new(name, data)


def change_rows(here: Place, name: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Other values in a stored Parquet object, and the same schema."""
    data = here.kept.get(name)
    assert data is not None
    table = pq.read_table(io.BytesIO(data))
    rows = table.to_pylist()
    for row in rows:
        change(row)
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), out)
    replace_object(here, name, out.getvalue())


def newer_format(here: Place, name: str) -> None:
    data = here.kept.get(name)
    assert data is not None
    table = pq.read_table(io.BytesIO(data))
    out = io.BytesIO()
    pq.write_table(table.replace_schema_metadata({**table.schema.metadata, b"ragfence.version": b"99"}), out)
    replace_object(here, name, out.getvalue())


def test_where_all_is_well_nothing_is_found(here: Place) -> None:
    documents = here.documents().using(allow_empty_text=True)
    assert documents.verify().findings == ()
    documents.ingest_many([Document("a", A, {"n": 1}, sequence=3), Document("b", A), Document("empty", "")])
    documents.ingest(Document("a", B, sequence=4))
    documents.ingest(Document("a", A, sequence=5))
    documents.ingest(Document("b", A, {"n": 2}))
    documents.retract("b")
    report = documents.verify()
    assert report.findings == ()
    assert (report.documents, report.rows, report.segments) == (3, 7, 5)
    for rewritten in (here.flush, documents.compact, lambda: documents.purge("b")):
        rewritten()
        assert documents.verify().findings == ()


def test_everything_that_can_be_found_has_a_way_out() -> None:
    assert TO_DO.keys() == set(Trouble)
    assert Finding(Trouble.VOID, "x").to_do


def test_a_head_that_was_deleted_by_hand_is_found_and_brought_back(here: Place) -> None:
    chunker = Paragraphs()
    documents = here.documents(chunker)
    first = documents.ingest(Document("a", A))
    documents.ingest(Document("b", A))
    forget_source(here, documents, "a")
    assert found_by(documents) == [(Trouble.HEAD_MISSING, "a")]
    report = documents.verify(repair=True)
    assert (report.findings, [finding.trouble for finding in report.repaired]) == ((), [Trouble.HEAD_MISSING])
    assert documents.ingest(Document("a", A)) == first
    assert chunker.cut == [A, A]


def test_a_receipt_that_was_deleted_by_hand_is_found_and_brought_back(here: Place) -> None:
    documents = here.documents()
    first = documents.ingest(Document("a", A))
    documents.ingest(Document("a", B))
    forget_record(here, first.key)
    assert found_by(documents) == [(Trouble.RECEIPT_MISSING, "a")]
    assert documents.verify(repair=True).findings == ()
    assert documents.ingest(Document("a", A)).flags.revived
    documents.ingest(Document("a", B))
    here.flush()
    assert found_by(documents) == []
    forget_record(here, first.key)
    assert found_by(documents) == [(Trouble.RECEIPT_MISSING, "a")]


def test_a_head_that_is_another_than_the_log_says_is_found_and_set_right(memory: Place) -> None:
    documents = memory.documents()
    documents.ingest(Document("a", A))
    place_of = source_name(documents, "a")
    old = memory.store.content.sources[place_of]
    documents.ingest(Document("a", B))
    memory.store.content.sources[place_of] = old
    assert found_by(documents) == [(Trouble.HEAD_DIFFERS, "a")]
    assert documents.verify(repair=True).findings == ()
    assert texts(documents, "a") == B.split("\n\n")


def test_a_sequence_that_was_changed_by_hand_is_found(memory: Place) -> None:
    documents = memory.documents()
    documents.ingest(Document("a", A, sequence=5))
    place_of = source_name(documents, "a")
    record = SourceRecord.decode(memory.store.content.sources[place_of][0])
    assert record.head is not None
    changed = replace(record, head=record.head._replace(sequence=2))
    memory.store.content.sources[place_of] = (changed.encode(), None)
    assert found_by(documents) == [(Trouble.HEAD_DIFFERS, "a")]
    documents.verify(repair=True)
    with pytest.raises(Stale):
        documents.ingest(Document("a", B, sequence=3))


def test_a_head_without_a_row_is_found_and_becomes_new(near: Place) -> None:
    documents = near.documents()
    documents.ingest(Document("b", A))
    held = set(near.names("segments/"))
    receipt = documents.ingest(Document("a", A))
    (name,) = set(near.names("segments/")) - held
    near.kept.delete([name])
    (finding,) = documents.verify().findings
    assert (finding.trouble, finding.doc_id, finding.key) == (Trouble.HEAD_WITHOUT_ROW, "", receipt.key)
    report = documents.verify(repair=True)
    assert report.ok
    assert Trouble.HEAD_WITHOUT_ROW in {finding.trouble for finding in report.repaired}
    assert documents.ingest(Document("a", A)).decision is Decision.NEW


def test_a_lease_that_ran_out_is_told_and_settled(near: Place) -> None:
    documents = near.documents()
    documents.ingest(Document("a", A))
    process = Process(near)
    with at_point(crash_points.AFTER_COMMIT, process.die), pytest.raises(Crash):
        process.fence.documents.using(chunker=Paragraphs()).ingest_many([Document("a", B), Document("n", B)])
    assert found_by(documents) == [], "somebody may still be at it"
    near.let_leases_run_out()
    report = documents.verify()
    assert sorted((finding.trouble, finding.doc_id) for finding in report.findings) == [
        (Trouble.UNSETTLED, "a"),
        (Trouble.UNSETTLED, "n"),
    ]
    assert report.ok, "the next claim settles it"
    assert documents.verify(repair=True).findings == ()
    assert texts(documents, "a") == B.split("\n\n"), "the row was committed, so it counts"


def test_a_row_of_an_owner_that_was_taken_over_is_no_trouble(near: Place) -> None:
    slow, other = near.documents(), near.documents()
    other.ingest(Document("a", A))

    def meanwhile() -> None:
        near.let_leases_run_out()
        other.ingest(Document("a", C))

    with at_point(crash_points.BEFORE_SEAL, lambda: elsewhere(meanwhile)):
        slow.ingest(Document("a", B))
    assert found_by(other) == []
    near.flush()
    assert found_by(other) == []


def lose_snippets(here: Place, name: str) -> None:
    here.kept.delete([name])


def spoil_snippets(here: Place, name: str) -> None:
    replace_object(here, name, b"PAR1 or so")


@pytest.mark.parametrize("lose", [lose_snippets, spoil_snippets])
def test_a_document_whose_snippets_are_lost_is_released_and_comes_again_with_its_ids(
    here: Place, lose: Callable[[Place, str], None]
) -> None:
    chunker = Paragraphs()
    documents = here.documents(chunker)
    documents.ingest(Document("o", C))
    kept = set(here.names("snippets/"))
    first = documents.ingest_many([Document("a", A, {"n": 1}, sequence=5), Document("b", A)])
    (name,) = set(here.names("snippets/")) - kept
    edited = documents.ingest(Document("b", B))
    lose(here, name)
    found = [(trouble, doc_id) for trouble, doc_id in found_by(documents) if doc_id]
    assert found == [(Trouble.SNIPPETS_MISSING, doc_id) for doc_id in ("a", "b", "b")]

    report = documents.verify(repair=True)

    assert report.findings == ()
    assert {finding.doc_id for finding in report.repaired if finding.doc_id} == {"a", "b"}
    assert texts(documents, "o") == [C]
    assert (documents.get("a"), documents.get("b")) == (None, None)
    for forget in (lambda: None, here.flush):
        forget()
        with pytest.raises(Stale):
            documents.ingest(Document("a", C, sequence=3))
    again = documents.ingest_many([Document("a", A, {"n": 1}, sequence=5), Document("b", A)])
    assert again == first
    assert [receipt.decision for receipt in again] == [Decision.NEW] * 2
    assert documents.ingest(Document("b", B)) == edited
    assert [texts(documents, doc_id) for doc_id in ("a", "b")] == [A.split("\n\n"), B.split("\n\n")]
    with pytest.raises(Conflict):
        documents.ingest(Document("a", B, sequence=5))
    assert documents.verify().findings == ()
    here.assert_no_promise_was_broken()
    here.flush()
    assert documents.verify().findings == ()


def test_of_a_document_only_what_is_lost_is_given_up(near: Place) -> None:
    """Its live revision stays, with snippets that were written with the one that is lost."""
    documents = near.documents()
    documents.ingest_many([Document("a", A), Document("o", C)])
    (name,) = near.names("snippets/")
    live = documents.ingest(Document("a", B))
    table = pq.read_table(io.BytesIO(near.kept.get(name) or b""))
    out = io.BytesIO()
    pq.write_table(table.filter(pc.not_equal(table.column("text"), "second paragraph")), out)
    replace_object(near, name, out.getvalue())
    assert found_by(documents) == [(Trouble.SNIPPETS_MISSING, "a")]
    assert documents.verify(repair=True).findings == ()
    assert documents.ingest(Document("a", B)) == live
    assert live.decision is Decision.NEW
    assert texts(documents, "a") == B.split("\n\n")
    assert texts(documents, "o") == [C]
    assert documents.ingest(Document("a", A)).decision is Decision.NEW
    assert texts(documents, "a") == A.split("\n\n")


def test_snippets_that_nobody_can_read_stop_a_compaction_until_they_are_repaired(memory: Place) -> None:
    documents = memory.documents(keep_superseded_days=0)
    documents.ingest(Document("a", A))
    (name,) = memory.names("snippets/")
    documents.retract("a")
    documents.ingest(Document("o", C))
    replace_object(memory, name, b"nonsense")
    with pytest.raises(FormatCorrupt, match=name):
        documents.compact()
    assert documents.verify(repair=True).findings == ()
    assert documents.compact().epoch
    assert (documents.get("a"), texts(documents, "o")) == (None, [C])


def test_positions_that_do_not_fit_are_found(memory: Place) -> None:
    documents = memory.documents()
    first = documents.ingest(Document("a", A))
    (name,) = memory.names("segments/")

    def longer(row: dict[str, Any]) -> None:
        row["ends"][-1] += 1

    change_rows(memory, name, longer)
    assert found_by(documents) == [(Trouble.POSITIONS_MISFIT, "a")]
    change_rows(memory, name, lambda row: row["ends"].pop())
    assert found_by(documents) == [(Trouble.POSITIONS_MISFIT, "a")]
    assert documents.verify(repair=True).findings == ()
    assert documents.ingest(Document("a", A)) == first
    assert documents.snippets("a")[-1].end == len(A)


def test_a_revision_without_its_ingest_row_is_found(memory: Place) -> None:
    documents = memory.documents()
    documents.ingest(Document("a", A))
    (name,) = memory.names("segments/")
    documents.ingest(Document("a", A, {"n": 1}))
    change_rows(memory, name, lambda row: row.update(action="metadata"))
    assert found_by(documents) == [(Trouble.POSITIONS_MISFIT, "a")]


def test_rows_that_cannot_be_read_are_told_and_nothing_is_changed(here: Place) -> None:
    documents = here.documents()
    documents.ingest(Document("a", A))
    name = here.names("segments/")[0]
    whole = here.kept.get(name)
    documents.ingest(Document("b", A))
    here.open().hydrate()
    spoilt: list[tuple[Callable[[], None], Trouble]] = [
        (lambda: replace_object(here, name, b"nonsense"), Trouble.ROWS_UNREADABLE),
        (lambda: here.kept.delete([name]), Trouble.ROWS_UNREADABLE),
        (lambda: newer_format(here, name), Trouble.TOO_NEW),
    ]
    for spoil, trouble in spoilt:
        replace_object(here, name, whole or b"")
        spoil()
        before = here.names()
        report = documents.verify(repair=True)
        assert (trouble, name) in {(finding.trouble, finding.place) for finding in report.findings}
        assert not report.ok
        assert here.names() == before
    replace_object(here, name, whole or b"")
    assert documents.verify().findings == ()


def test_a_segment_that_was_cut_off_is_named_with_what_helps(here: Place) -> None:
    """Of the documents only the one whose rows are in it fails, and nobody is sent to hydrate."""
    documents = here.documents()
    documents.ingest(Document("a", A))
    (name,) = here.names("segments/")
    (texts,) = here.names("snippets/")
    documents.ingest(Document("b", A))
    for damaged, hint in ((name, "from a backup"), (texts, "verify --repair")):
        whole = here.kept.get(damaged) or b""
        replace_object(here, damaged, whole[:-40])
        with pytest.raises(SegmentUnreadable) as unreadable:
            documents.snippets("a")
        assert unreadable.value.segment == damaged
        assert damaged in unreadable.value.message
        assert hint in unreadable.value.hint
        assert "hydrate" not in unreadable.value.hint
        assert documents.snippets("b")
        assert documents.ingest(Document("c", A)).snippet_ids
        replace_object(here, damaged, whole)
    assert documents.snippets("a")


def test_hydrating_a_store_that_answers_is_refused_while_a_segment_cannot_be_read(here: Place) -> None:
    documents = here.documents()
    first = documents.ingest(Document("a", A))
    name = here.names("segments/")[0]
    documents.ingest(Document("b", A))
    whole = here.kept.get(name) or b""
    replace_object(here, name, whole[:-40])
    epochs = here.names("epochs/")
    with pytest.raises(SegmentUnreadable, match=name):
        here.open().hydrate()
    assert here.names("epochs/") == epochs, "no epoch was begun"
    assert documents.ingest(Document("a", A)) == first, "it goes on answering"
    assert documents.ingest(Document("c", A)).is_new
    replace_object(here, name, whole)
    here.open().hydrate()
    assert documents.ingest(Document("a", A)) == first


def test_a_segment_that_cannot_be_read_does_not_pile_up_epochs(near: Place) -> None:
    documents = near.documents()
    documents.ingest(Document("a", A))
    (name,) = near.names("segments/")
    whole = near.kept.get(name) or b""
    replace_object(near, name, whole[:-40])
    near.flush()
    for _ in range(3):
        with pytest.raises(SegmentUnreadable, match=name):
            documents.ingest(Document("b", A))
    begun = near.names("epochs/")
    with pytest.raises(SegmentUnreadable):
        documents.ingest(Document("b", A))
    assert near.names("epochs/") == begun
    replace_object(near, name, whole)
    assert documents.ingest(Document("b", A)).is_new
    assert not documents.ingest(Document("a", A)).is_new


@pytest.mark.parametrize("flushed", [False, True], ids=["the fence store is whole", "the fence store is lost, too"])
@pytest.mark.parametrize("gone", [False, True], ids=["cut off", "deleted"])
def test_a_segment_that_nobody_can_restore_is_given_up_and_ingested_again(
    here: Place, flushed: bool, gone: bool
) -> None:
    documents = here.documents()
    first, _ = documents.ingest_many([Document(name, A + name) for name in ("a", "b")])
    (name,) = here.names("segments/")
    here.open().hydrate()  # so that it is listed: what nobody lists is not missed when it is gone
    edited = documents.ingest(Document("b", A + "b, edited"))
    later = documents.ingest(Document("c", B))
    whole = here.kept.get(name) or b""
    here.kept.delete([name])
    if not gone:
        here.kept.put_new(name, whole[:-40])
    if flushed:
        here.flush()
    assert not documents.verify(repair=True).ok, "not without being told"
    with pytest.raises(ValidationError):
        documents.verify(accept_loss=True)
    report = documents.verify(repair=True, accept_loss=True)
    assert (report.ok, report.findings) == (True, ())
    assert (Trouble.ROWS_UNREADABLE, name) in {(each.trouble, each.place) for each in report.repaired}
    again = documents.ingest(Document("a", A + "a"))
    assert (again, again.is_new) == (first, True)
    assert documents.ingest(Document("b", A + "b, edited")) == edited
    assert not documents.ingest(Document("c", B)).is_new
    assert later.snippet_ids == tuple(each.snippet_id for each in documents.snippets("c"))
    assert [each.text for each in documents.snippets("a")]
    assert documents.verify().findings == ()
    here.open().hydrate()


@pytest.mark.parametrize("drained", [False, True], ids=["rows in the fence store", "rows in the ledger"])
@pytest.mark.parametrize("compacted", [False, True], ids=["as it was committed", "packed"])
def test_the_auditor_knows_what_was_given_up(here: Place, drained: bool, compacted: bool) -> None:
    documents, fence = here.documents(), here.open()
    documents.ingest(Document("c", C))
    here.open().hydrate()
    kept = here.names("segments/")
    documents.ingest_many([Document("a", A), Document("b", B)])
    documents.ingest(Document("b", C))
    documents.ingest(Document("b", B))
    if compacted:
        kept = []
        assert documents.compact().epoch
    here.open().hydrate()
    if drained:
        fence.audit.drain()
    for name in set(here.names("segments/")) - set(kept):
        replace_object(here, name, (here.kept.get(name) or b"")[:-40])
    assert documents.verify(repair=True, accept_loss=True).ok
    assert [each.is_new for each in documents.ingest_many([Document("a", A), Document("b", B)])] == [True, True]
    assert documents.ingest(Document("c", C)).is_new == compacted
    here.assert_no_promise_was_broken()
    ended = [row for row in fence.audit.decisions().to_pylist() if row["decision"] == "ended"]
    told = {(row["source_id"], row["error_code"]) for row in ended}
    assert told == {(doc_id, "GIVEN_UP") for doc_id in ("abc" if compacted else "ab")}
    assert len(ended) == 3 + compacted


def test_what_was_lost_by_itself_is_not_taken_for_given_up(here: Place) -> None:
    documents = here.documents()
    documents.ingest(Document("a", A))
    documents.ingest(Document("b", B))
    here.open().hydrate()
    lost, damaged = here.names("segments/")
    (row,) = here.open().audit.decisions(source_id="a", phase="seal").to_pylist()
    if row["winner"][:16] not in lost:
        lost, damaged = damaged, lost
    # As if the log had lost it behind everybody's back: the list does not name it, and nobody gave it up.
    change_list(here, lost)
    replace_object(here, damaged, (here.kept.get(damaged) or b"")[:-40])
    documents.verify(repair=True, accept_loss=True)
    assert all(each.is_new for each in documents.ingest_many([Document("a", A), Document("b", B)]))
    (found,) = here.open().audit.check().findings
    assert (found.invariant, found.key) == ("lost_epoch", row["idempotency_key"])


def change_list(here: Place, without: str) -> None:
    """The newest list of segments does not name one of them."""
    name = [each for each in here.names("epochs/") if each.endswith("/segments")][-1]
    values = json.loads(here.kept.get(name) or b"")
    values["segments"].remove(without)
    replace_object(here, name, json.dumps(values).encode())


def test_a_log_that_cannot_be_read_is_told_also_when_the_fence_store_is_empty(near: Place) -> None:
    documents = near.documents()
    documents.ingest(Document("a", A))
    documents.ingest(Document("b", A))
    name = near.names("segments/")[0]
    whole = near.kept.get(name)
    replace_object(near, name, b"nonsense")
    near.flush()
    assert [finding.place for finding in documents.verify().findings] == [name]
    replace_object(near, name, whole or b"")
    assert documents.verify().findings == ()


def test_snippets_of_a_newer_ragfence_are_not_given_up(memory: Place) -> None:
    documents = memory.documents()
    documents.ingest(Document("a", A))
    (name,) = memory.names("snippets/")
    newer_format(memory, name)
    before = memory.names()
    assert found_by(documents, repair=True) == [(Trouble.TOO_NEW, "")]
    assert memory.names() == before
    assert documents.get("a") is not None


def test_what_is_void_is_found_and_deleted(here: Place) -> None:
    documents = here.documents()
    documents.ingest(Document("a", A))
    process = Process(here)
    with at_point(AFTER_SNIPPETS, process.die), pytest.raises(Crash):
        process.fence.documents.ingest(Document("b", B))
    here.let_leases_run_out()
    assert Trouble.VOID not in {trouble for trouble, _ in found_by(documents)}, "of this epoch nobody can say it yet"
    here.open().hydrate()
    report = documents.verify()
    (finding,) = report.findings
    assert (finding.trouble, report.ok) == (Trouble.VOID, True)
    assert finding.place in here.names("snippets/")
    assert documents.verify(repair=True).findings == ()
    assert finding.place not in here.names()
    assert texts(documents, "a") == A.split("\n\n")


def test_settings_that_differ_are_told(memory: Place) -> None:
    memory.documents().ingest(Document("a", A))
    documents = memory.open(content_hash="sha256").documents
    with pytest.raises(PolicyError):
        documents.ingest(Document("a", A))
    assert found_by(documents, repair=True) == [(Trouble.SETTINGS, "")]


def test_a_sink_is_compared_and_put_right(memory: Place) -> None:
    sink = ListSink("live")
    documents = memory.documents().using(sink=sink)
    documents.ingest_many([Document("a", A), Document("b", B)])
    documents.ingest(Document("b", C))
    assert documents.verify().findings == ()
    lost, *_ = documents.ingest(Document("a", A)).snippet_ids
    (orphan, *_) = set(documents.ingest(Document("b", B)).snippet_ids) - set(
        documents.ingest(Document("b", C)).snippet_ids
    )
    foreign = "f" * 32
    sink.held[foreign] = replace(sink.held[lost], snippet_id=foreign)
    sink.held[orphan] = replace(sink.held.pop(lost), snippet_id=orphan)
    report = documents.verify()
    assert [(finding.trouble, finding.doc_id, finding.place) for finding in report.findings] == [
        (Trouble.SINK_MISSING, "a", ""),
        (Trouble.SINK_ORPHAN, "", orphan),
    ]
    assert documents.verify(repair=True).findings == ()
    assert lost in sink.held
    assert orphan not in sink.held
    assert foreign in sink.held, "somebody else's"


def test_a_retracted_document_belongs_into_no_sink(memory: Place) -> None:
    sink = ListSink("live")
    documents = memory.documents().using(sink=sink)
    documents.ingest(Document("a", A))
    memory.documents().retract("a")
    assert {trouble for trouble, _ in found_by(documents)} == {Trouble.SINK_ORPHAN}
    assert documents.verify(repair=True).findings == ()
    assert sink.held == {}


@pytest.mark.parametrize("point", REWRITING_POINTS)
def test_a_repair_that_was_killed_anywhere_is_done_by_the_next(near: Place, point: str) -> None:
    documents = near.documents()
    documents.ingest(Document("o", C))
    kept = set(near.names("snippets/"))
    first = documents.ingest(Document("a", A))
    (name,) = set(near.names("snippets/")) - kept
    near.kept.delete([name])
    process = Process(near)
    with at_point(point, process.die), pytest.raises(Crash):
        process.fence.documents.verify(repair=True)
    near.let_locks_run_out()
    documents = near.documents()
    assert documents.verify(repair=True).findings == ()
    assert documents.ingest(Document("a", A)) == first
    assert [texts(documents, doc_id) for doc_id in ("a", "o")] == [A.split("\n\n"), [C]]
    near.flush()
    assert documents.verify().findings == ()


def test_an_ingest_between_the_look_and_the_repair_is_not_undone(near: Place) -> None:
    documents, other = near.documents(), near.documents()
    documents.ingest(Document("a", A))
    (name,) = near.names("snippets/")
    near.kept.delete([name])
    run = documents._log_rewrite.run

    def late(*args: Any, **options: Any) -> Any:
        other.ingest(Document("a", C))
        return run(*args, **options)

    documents._log_rewrite.run = late  # type: ignore[method-assign]
    report = documents.verify(repair=True)
    assert report.findings == ()
    assert texts(documents, "a") == [C]
    assert documents.ingest(Document("a", A)).decision is Decision.NEW


@pytest.mark.parametrize("backend", ["embedded", "valkey"])
def test_documents_that_are_ingested_meanwhile_are_no_trouble(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    with place(backend, tmp_path, monkeypatch, lambda: request.getfixturevalue("valkey_server")) as here:
        failures: list[BaseException] = []
        over = threading.Event()

        def load(name: str) -> None:
            try:
                documents = here.documents()
                turn = 0
                while not over.is_set():
                    turn += 1
                    documents.ingest_many([Document(f"{name}{at_}", f"{(A, B, C)[turn % 3]}") for at_ in range(5)])
                    if turn % 4 == 0:
                        documents.retract(f"{name}0")
            except BaseException as failure:
                failures.append(failure)

        loaders = [threading.Thread(target=load, args=[name]) for name in "xy"]
        for loader in loaders:
            loader.start()
        documents = here.documents()
        try:
            for turn in range(8):
                assert documents.verify().findings == ()
                if turn == 4:
                    documents.compact()
        finally:
            over.set()
            for loader in loaders:
                loader.join()
        assert failures == []
        assert documents.verify().ok


def test_a_store_that_forgets_in_mid_look_is_loaded_and_looked_at_again(near: Place) -> None:
    documents = near.documents()
    documents.ingest_many([Document(f"d{at_}", A) for at_ in range(3)])
    flushed: list[int] = []

    def told(done: int) -> None:
        if not flushed:
            flushed.append(done)
            near.flush()

    assert documents.verify(progress=told).findings == ()
    assert flushed


def test_a_log_that_is_rewritten_all_the_time_cannot_be_verified(memory: Place) -> None:
    documents, other = memory.documents(), memory.open()
    documents.ingest(Document("a", A))
    with pytest.raises(NotReady, match="verified"):
        documents.verify(progress=lambda _: other.hydrate())


def test_a_fence_store_that_is_down_is_an_error_and_no_finding(memory: Place) -> None:
    process = Process(memory)
    documents = process.fence.documents
    documents.ingest(Document("a", A))
    process.dead.set()
    with pytest.raises(RagfenceError):
        documents.verify()


def test_released_documents_keep_others_from_seeing_receipts(memory: Place) -> None:
    documents = memory.documents()
    first = documents.ingest(Document("a", A))
    (name,) = memory.names("snippets/")
    memory.kept.delete([name])
    documents.verify(repair=True)
    shard, source = source_name(documents, "a")
    (held,) = memory.store.read([Lookup(bytes.fromhex(first.key), Mode.DOCUMENT, source)])
    assert held.record is None
    assert held.source is not None
    assert held.source.head is not None
    assert not held.source.head.live
    assert shard == bytes.fromhex(first.key)[0]
