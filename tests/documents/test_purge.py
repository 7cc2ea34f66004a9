"""`fence.documents.purge()`: nothing of a document is left anywhere but a tombstone, whatever happens meanwhile."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest

from ragfence import Decision, Document
from ragfence.documents.head_moves import AFTER_SNIPPETS
from ragfence.documents.rewrite import REWRITING_POINTS
from ragfence.engine import crash_points
from ragfence.errors import DocumentInvalid, FormatCorrupt, Stale
from ragfence.stores.local import LocalObjects, Temp
from ragfence.stores.objects import Put
from ragfence.testing import at_point
from ragfence.testing.memory_sinks import ListSink
from tests.documents.chunkers import Paragraphs
from tests.documents.places import Place, addresses, rows_in, texts
from tests.engine.worlds import Crash, Process, elsewhere

SECRET = "hush"
A = f"{SECRET} first\n\n{SECRET} second\n\n{SECRET} third"
B = f"{SECRET} first\n\n{SECRET} other\n\n{SECRET} third"
OPEN = "one\n\ntwo\n\nthree"
EDITED = "one\n\nzwei\n\nthree"


def secret(text: str = A, **more: object) -> Document:
    return Document("s", text, {"owner": f"{SECRET} m"}, source_url=f"https://x.example/{SECRET}", **more)  # type: ignore[arg-type]


def is_gone(here: Place) -> bool:
    """From objects and fence store; a look at documents that shows nothing would prove nothing."""
    told = here.everything()
    assert "one" in told
    return SECRET not in told


def test_text_and_metadata_are_nowhere_afterwards(here: Place) -> None:
    documents = here.documents()
    documents.ingest_many([secret(), Document("o", OPEN)])
    documents.ingest_many([secret(B), Document("p", OPEN)])
    documents.ingest(secret(A))
    documents.retract("s")
    assert SECRET in here.everything()
    report = documents.purge("s")
    assert is_gone(here)
    assert (report.known, report.rows, report.segments) == (True, 4, 5)
    assert report.epoch == here.epochs.known().newest_complete
    assert (documents.get("s"), documents.snippets("s")) == (None, [])
    assert [head.doc_id for head in documents.heads()].count("s") == 0
    (tombstone,) = [row for name in here.names("segments/") for row in rows_in(here.kept, name) if row["doc_id"] == "s"]
    assert (tombstone["action"], tombstone["live"], tombstone["metadata"], tombstone["source_url"]) == (
        "purge",
        False,
        "{}",
        "",
    )
    assert documents.verify().ok


def test_what_a_writer_left_that_was_killed_right_after_its_link_goes_too(
    here: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as killed:
        killed.setattr(Temp, "discard", lambda temp: os.close(temp.descriptor))
        here.documents().ingest_many([secret(), Document("o", OPEN)])
    here.documents().purge("s")
    assert is_gone(here)


@pytest.mark.parametrize("known", [True, False])
def test_what_a_writer_left_that_was_killed_before_there_was_an_object_goes_too(
    here: Place, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    if here.name == "memory":
        pytest.skip("nothing is written there half-way")
    documents = here.documents()
    documents.ingest(Document("o", OPEN))
    if known:
        documents.ingest(secret())
        documents.purge("s")
    with monkeypatch.context() as killed:
        killed.setattr(Temp, "discard", lambda temp: os.close(temp.descriptor))
        killed.setattr(LocalObjects, "_link", _killed)
        with pytest.raises(Crash):
            here.documents().ingest(secret(B))
    assert not is_gone(here)
    here.documents().purge("s")
    assert is_gone(here)


def _killed(*_: object) -> Put:
    raise Crash


def test_a_compacted_document_is_purged_as_well(here: Place) -> None:
    documents = here.documents()
    documents.ingest_many([secret(), Document("o", OPEN)])
    documents.ingest_many([secret(B), Document("p", OPEN)])
    assert documents.compact().epoch
    documents.purge("s")
    assert is_gone(here)
    assert [texts(documents, doc_id) for doc_id in ("o", "p")] == [OPEN.split("\n\n")] * 2
    documents.compact()
    assert documents.get("s") is None
    assert documents.verify().ok


def test_the_others_are_as_they_were_wherever_their_rows_lead(here: Place) -> None:
    """Revived, edited and described anew elsewhere: what is said of the rewritten segments still leads there."""
    documents = here.documents()
    first = documents.ingest_many([Document("revived", OPEN), Document("edited", OPEN), secret(), Document("m", OPEN)])
    documents.ingest(Document("revived", EDITED))
    documents.ingest(Document("revived", OPEN))
    edited = documents.ingest(Document("edited", EDITED))
    documents.ingest(Document("m", OPEN, {"n": 2}))
    before = {found.doc_id: (found, documents.snippets(found.doc_id)) for found in documents.heads()}
    del before["s"]
    batches = {address.batch for address in addresses(here.names("segments/"))}
    documents.purge("s")
    assert is_gone(here)
    newest = here.epochs.known().newest_complete
    kept = {address.batch: address.epoch for address in addresses(here.names("segments/"))}
    assert batches <= kept.keys(), "a rewritten segment keeps its batch"
    assert sorted(kept.values()).count(newest) == 2, "only what held the document is rewritten"
    for forget in (lambda: None, here.flush):
        forget()
        assert {found.doc_id: (found, documents.snippets(found.doc_id)) for found in documents.heads()} == before
        assert documents.ingest(Document("revived", OPEN)) == first[0]
        assert documents.ingest(Document("edited", EDITED)) == edited
    assert documents.ingest(Document("edited", OPEN)).flags.revived
    assert texts(documents, "edited") == OPEN.split("\n\n")
    assert documents.ingest(Document("edited", "one\n\nfour")).decision is Decision.NEW
    assert texts(documents, "edited") == ["one", "four"]
    assert documents.verify().ok


def test_a_segment_may_be_rewritten_by_one_purge_after_the_other(near: Place) -> None:
    documents = near.documents()
    documents.ingest_many([secret(), Document("t", f"{SECRET} too"), Document("o", OPEN)])
    documents.ingest(Document("o", EDITED))
    documents.purge("s")
    documents.purge("t")
    assert is_gone(near)
    assert texts(documents, "o") == EDITED.split("\n\n")
    documents.ingest(Document("o", OPEN))
    assert texts(documents, "o") == OPEN.split("\n\n")
    assert documents.verify().ok


def test_the_document_may_come_again_as_new_with_the_same_ids(here: Place) -> None:
    chunker = Paragraphs()
    documents = here.documents(chunker)
    first = documents.ingest(secret())
    documents.ingest(secret(B))
    documents.ingest(Document("o", OPEN))
    documents.purge("s")
    for forget in (lambda: None, here.flush):
        forget()
        again = documents.ingest(secret())
        assert (again, again.decision, again.flags.revived) == (first, Decision.NEW, False)
        assert texts(documents, "s") == A.split("\n\n")
        here.assert_no_promise_was_broken()
        documents.purge("s")
        assert is_gone(here)
    assert chunker.cut.count(A) == 3


def test_the_tombstone_keeps_the_top_sequence(here: Place) -> None:
    documents = here.documents()
    documents.ingest(Document("o", OPEN))
    documents.ingest(secret(sequence=5))
    documents.purge("s")
    for forget in (lambda: None, here.flush):
        forget()
        with pytest.raises(Stale):
            documents.ingest(secret(sequence=4))
    assert documents.ingest(secret(sequence=6)).decision is Decision.NEW


def test_a_document_that_nobody_knows_needs_no_epoch(here: Place) -> None:
    documents = here.documents()
    documents.ingest(Document("o", OPEN))
    before = here.names()
    report = documents.purge("nobody")
    ledger = set(here.names("ledger/"))  # rows are written there before they are looked through
    assert (report.known, report.epoch, report.deleted.objects) == (False, 0, 0)
    assert [name for name in here.names() if name not in ledger] == before
    with pytest.raises(DocumentInvalid):
        documents.purge("")


def test_a_purge_that_is_repeated_finds_nothing_to_do(here: Place) -> None:
    documents = here.documents()
    documents.ingest_many([secret(), Document("o", OPEN)])
    assert documents.purge("s").epoch
    ledger = set(here.names("ledger/"))
    before = [name for name in here.names() if name not in ledger]
    again = documents.purge("s")
    ledger |= set(here.names("ledger/"))
    assert (again.known, again.epoch, again.rows) == (True, 0, 0)
    assert [name for name in here.names() if name not in ledger] == before


def test_a_doc_id_is_found_however_its_accents_are_encoded(memory: Place) -> None:
    documents = memory.documents()
    documents.ingest(Document("cafe\u0301", A))
    documents.ingest(Document("o", OPEN))
    assert documents.purge("caf\u00e9").known
    assert is_gone(memory)


@pytest.mark.parametrize(
    "point", [crash_points.AFTER_CLAIM, crash_points.AFTER_COMMIT, crash_points.AFTER_SEAL, *REWRITING_POINTS]
)
def test_one_that_was_cut_off_anywhere_is_completed_by_the_next(here: Place, point: str) -> None:
    documents = here.documents()
    documents.ingest_many([secret(), Document("o", OPEN)])
    documents.ingest_many([secret(B), Document("p", OPEN)])
    process = Process(here)
    with at_point(point, process.die), pytest.raises(Crash):
        process.fence.documents.purge("s")
    here.let_leases_run_out()
    here.let_locks_run_out()
    documents = here.documents()
    assert texts(documents, "o") == OPEN.split("\n\n")
    assert documents.purge("s").known
    assert is_gone(here)
    assert documents.get("s") is None
    assert [texts(documents, doc_id) for doc_id in ("o", "p")] == [OPEN.split("\n\n")] * 2
    here.flush()
    assert documents.get("s") is None
    assert [texts(documents, doc_id) for doc_id in ("o", "p")] == [OPEN.split("\n\n")] * 2
    assert documents.verify().ok


@pytest.mark.parametrize("point", [crash_points.AFTER_COMMIT, crash_points.BEFORE_SEAL])
def test_a_writer_that_had_committed_is_purged_and_does_not_bring_it_back(here: Place, point: str) -> None:
    slow, other = here.documents(), here.documents()
    other.ingest(Document("o", OPEN))

    def meanwhile() -> None:
        here.let_leases_run_out()
        other.purge("s")

    with at_point(point, lambda: elsewhere(meanwhile)):
        receipts = slow.ingest_many([secret(), Document("p", OPEN)])
    assert [receipt.failure for receipt in receipts] == [None, None]
    assert is_gone(here)
    assert other.get("s") is None
    assert texts(other, "p") == OPEN.split("\n\n")
    assert other.verify().ok


@pytest.mark.parametrize("point", [crash_points.AFTER_CLAIM, AFTER_SNIPPETS])
def test_a_writer_that_had_not_committed_comes_after_the_purge(here: Place, point: str) -> None:
    slow, other = here.documents(), here.documents()
    other.ingest_many([secret(B), Document("o", OPEN)])

    def meanwhile() -> None:
        here.let_leases_run_out()
        other.purge("s")

    with at_point(point, lambda: elsewhere(meanwhile)):
        receipt = slow.ingest(secret())
    assert receipt.decision is Decision.NEW
    assert texts(other, "s") == A.split("\n\n")
    assert f"{SECRET} other" not in here.everything()
    other.purge("s")
    assert is_gone(here)


def test_a_document_that_comes_again_in_mid_purge_is_purged_again(here: Place) -> None:
    """Revived from receipts that are about to vanish: without its old rows it would be a document without text."""
    documents, other = here.documents(), here.documents()
    documents.ingest_many([secret(), Document("o", OPEN)])
    with at_point(crash_points.AFTER_SEAL, lambda: elsewhere(lambda: other.ingest(secret()))):  # type: ignore[arg-type]
        report = documents.purge("s")
    assert report.known
    assert is_gone(here)
    assert documents.get("s") is None
    assert documents.verify().ok


def test_what_an_attempt_left_that_never_committed_is_purged_too(here: Place) -> None:
    documents = here.documents()
    documents.ingest(Document("o", OPEN))
    process = Process(here)
    with at_point(AFTER_SNIPPETS, process.die), pytest.raises(Crash):
        process.fence.documents.ingest(secret())
    here.let_leases_run_out()
    assert SECRET in here.everything()
    here.documents().purge("s")
    assert is_gone(here)


def test_what_a_failed_attempt_left_is_purged_though_the_document_was_never_there(memory: Place) -> None:
    documents = memory.documents()
    documents.ingest(Document("o", OPEN))

    def fail() -> None:
        raise OSError("no more disk")

    with at_point(AFTER_SNIPPETS, fail), pytest.raises(OSError, match="disk"):
        documents.ingest(secret())
    assert SECRET in memory.everything()
    report = documents.purge("s")
    assert not report.known
    assert is_gone(memory)
    assert documents.purge("s").epoch == 0


def test_many_may_purge_at_once_while_others_load(near: Place) -> None:
    documents = near.documents()
    hushed = [Document(f"s{number}", f"{A}\n\n{number}") for number in range(3)]
    documents.ingest_many([*hushed, *(Document(f"o{number}", OPEN) for number in range(5))])
    failures: list[BaseException] = []

    def purge(doc_id: str) -> None:
        assert near.documents().purge(doc_id).known

    def load(_: str) -> None:
        loader = near.documents()
        for turn in range(6):
            batch = [Document(f"o{number}", (OPEN, EDITED)[turn % 2]) for number in range(5)]
            assert [receipt.failure for receipt in loader.ingest_many(batch)] == [None] * 5

    def run(work: Callable[[str], None], doc_id: str) -> None:
        try:
            work(doc_id)
        except BaseException as failure:
            failures.append(failure)

    works = [(purge, document.doc_id) for document in (*hushed, *hushed)]
    threads = [threading.Thread(target=run, args=work) for work in [*works, (load, "")]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert is_gone(near)
    assert {tuple(texts(documents, f"o{number}")) for number in range(5)} == {tuple(EDITED.split("\n\n"))}
    assert documents.verify().ok


def test_snippets_that_cannot_be_read_stop_it_before_anybody_has_to_wait(memory: Place) -> None:
    documents = memory.documents()
    documents.ingest_many([secret(), Document("o", OPEN)])
    (name,) = memory.names("snippets/")
    memory.kept.delete([name])
    memory.kept.put_new(name, b"nonsense")
    before = memory.epochs.known()
    with pytest.raises(FormatCorrupt, match=name):
        documents.purge("s")
    assert memory.epochs.known() == before
    documents.verify(repair=True)
    assert documents.purge("s").known
    assert SECRET not in memory.everything()


def test_a_sink_loses_its_snippets(memory: Place) -> None:
    sink = ListSink("live")
    documents = memory.documents().using(sink=sink)
    documents.ingest_many([secret(), Document("o", OPEN)])
    documents.purge("s")
    assert is_gone(memory)
    assert {snippet.doc_id for snippet in sink.held.values()} == {"o"}
    assert documents.verify().ok


def test_a_sink_is_given_what_a_rewritten_segment_holds(memory: Place) -> None:
    sink = ListSink("live")
    documents = memory.documents().using(sink=sink)
    documents.ingest_many([Document("o", OPEN), secret()])
    documents.ingest(Document("o", EDITED))
    documents.purge("s")
    assert documents.ingest(Document("o", OPEN)).flags.revived
    assert sorted(snippet.text for snippet in sink.held.values()) == sorted(OPEN.split("\n\n"))
    assert documents.verify().ok


def test_whoever_keeps_something_else_about_documents_is_asked_to_forget_it(memory: Place) -> None:
    from ragfence.documents.purge import Purge

    documents = memory.documents()
    documents.ingest(secret())
    forgotten: list[str] = []
    Purge(
        documents._log_rewrite,
        documents._reads,
        documents._writer,
        documents._claim_builder,
        documents._caller(),
        others=[forgotten.append],
    ).run("s")
    assert forgotten == ["s"]
