"""`fence.documents.compact()`: few segments, nothing lost that is kept, nothing kept that is over."""

from __future__ import annotations

import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragfence import Decision, Document
from ragfence.core.operations import FenceNumber
from ragfence.documents import compact, rewrite
from ragfence.documents.compact import Step, survivors
from ragfence.documents.head_moves import AFTER_SNIPPETS
from ragfence.documents.rewrite import BEFORE_DELETION, REWRITING_POINTS
from ragfence.engine import crash_points
from ragfence.engine.hydration import AFTER_REWRITTEN
from ragfence.errors import FormatCorrupt, NotReady, Stale
from ragfence.testing import at_point
from tests.documents.chunkers import Paragraphs
from tests.documents.places import Place, place, rows_in, texts
from tests.engine.worlds import Crash, Process, elsewhere

A = "first paragraph\n\nsecond paragraph\n\nthird paragraph"
B = "first paragraph\n\nanother paragraph\n\nthird paragraph"
C = "something else\n\nthird paragraph"


def test_every_document_is_answered_as_before_also_when_the_fence_store_forgot(here: Place) -> None:
    chunker = Paragraphs()
    documents = here.documents(chunker)
    sent = [Document(f"d{at}", f"{A}\n\nnumber {at}", {"n": at}, source_url=f"https://x/{at}") for at in range(20)]
    first = [documents.ingest(document) for document in sent]
    documents.ingest(Document("edited", A))
    edited = documents.ingest(Document("edited", B))
    documents.ingest(Document("gone", C))
    documents.retract("gone")
    documents.ingest(Document("described", C, {"v": 1}))
    described = documents.ingest(Document("described", C, {"v": 2}))
    before = {found.doc_id: (found, documents.snippets(found.doc_id)) for found in documents.heads()}
    digest = documents.corpus_digest()
    cut = len(chunker.cut)

    report = documents.compact()

    assert (report.segments_before, report.segments_after) == (26, 1)
    assert (report.dropped_revisions, report.snippets_before) == (0, report.snippets_after)
    assert len(here.names("segments/")) == len(here.names("snippets/")) == 1
    for forget in (lambda: None, here.flush):
        forget()
        other = here.documents(chunker)
        assert [other.ingest(document) for document in sent] == first
        assert other.ingest(Document("edited", B)) == edited
        assert other.ingest(Document("described", C, {"v": 2})) == described
        assert {found.doc_id: (found, other.snippets(found.doc_id)) for found in other.heads()} == before
        assert other.get("gone") is None
        assert other.corpus_digest() == digest
        assert other.verify().ok
    assert len(chunker.cut) == cut


def test_where_there_is_nothing_to_gain_no_epoch_begins(here: Place) -> None:
    documents = here.documents()
    assert documents.compact().epoch == 0
    documents.ingest_many([Document(f"d{at}", A) for at in range(5)])
    assert documents.compact().epoch == 0, "one segment, and all of it is needed"
    documents.ingest(Document("more", A))
    report = documents.compact()
    assert (report.segments_before, report.segments_after) == (2, 1)
    before = here.names()
    again = documents.compact()
    assert (again.epoch, again.segments_before, again.segments_after, again.rows_after) == (0, 1, 1, 6)
    assert here.names() == before


def test_going_back_to_a_kept_content_revives_it_after_a_compaction(here: Place) -> None:
    chunker = Paragraphs()
    documents = here.documents(chunker, keep_superseded_days=30)
    first = documents.ingest(Document("a", A))
    documents.ingest(Document("a", B))
    here.pass_days(29)
    assert documents.compact().dropped_revisions == 0
    here.flush()
    back = documents.ingest(Document("a", A))
    assert (back, back.decision, back.flags.revived) == (first, Decision.DUPLICATE, True)
    assert texts(documents, "a") == A.split("\n\n")
    assert chunker.cut == [A, B]
    documents.compact()
    assert documents.ingest(Document("a", B)).flags.revived
    assert texts(documents, "a") == B.split("\n\n")
    assert documents.ingest(Document("a", A)) == first
    assert documents.verify().ok


def test_a_content_that_is_over_is_new_again_with_the_same_ids(here: Place) -> None:
    chunker = Paragraphs()
    documents = here.documents(chunker, keep_superseded_days=30)
    first = documents.ingest(Document("a", A))
    documents.ingest(Document("a", B))
    here.pass_days(31)
    report = documents.compact()
    assert (report.dropped_revisions, report.rows_after, report.snippets_after) == (1, 1, 3)
    assert "second paragraph" not in here.everything()
    assert texts(documents, "a") == B.split("\n\n"), "two of its snippets were written with the first revision"
    back = documents.ingest(Document("a", A))
    assert (back, back.decision, back.flags.revived) == (first, Decision.NEW, False)
    assert texts(documents, "a") == A.split("\n\n")
    assert chunker.cut == [A, B, A]
    assert documents.verify().ok
    here.assert_no_promise_was_broken()


def test_the_days_count_from_when_a_content_was_superseded(memory: Place) -> None:
    documents = memory.documents(keep_superseded_days=30)
    documents.ingest(Document("a", A))
    memory.pass_days(100)
    documents.ingest(Document("a", B))
    memory.pass_days(29)
    assert documents.compact().dropped_revisions == 0
    memory.pass_days(2)
    assert documents.compact().dropped_revisions == 1


def test_compactions_and_changes_of_metadata_keep_no_superseded_content_alive(memory: Place) -> None:
    """The row that superseded it is kept as long: else it would always seem to have been superseded just now."""
    documents = memory.documents(keep_superseded_days=30)
    documents.ingest(Document("a", A))
    documents.ingest(Document("a", B))
    documents.ingest(Document("a", A))
    dropped = 0
    for day in range(32):
        documents.ingest(Document("a", A, {"day": day}))
        memory.pass_days(1)
        dropped += documents.compact().dropped_revisions
        assert dropped == (day >= 29), day
    assert texts(documents, "a") == A.split("\n\n")
    assert documents.ingest(Document("a", B)).decision is Decision.NEW


def test_a_retraction_stays_and_keeps_the_top_sequence(here: Place) -> None:
    documents = here.documents(keep_superseded_days=1)
    documents.ingest(Document("a", A, sequence=5))
    documents.ingest(Document("b", A))
    documents.retract("a", sequence=7)
    here.pass_days(2)
    assert documents.compact().dropped_revisions == 1
    here.flush()
    with pytest.raises(Stale):
        documents.ingest(Document("a", A, sequence=6))
    assert documents.get("a") is None
    assert documents.ingest(Document("a", A, sequence=8)).decision is Decision.NEW


def test_revisions_of_two_recipes_are_both_kept(memory: Place) -> None:
    one, two = memory.documents(Paragraphs(version="1")), memory.documents(Paragraphs(version="2"))
    first, second = one.ingest(Document("a", A)), two.ingest(Document("a", A))
    assert first.snippet_ids != second.snippet_ids
    assert two.compact().epoch
    assert two.ingest(Document("a", A)) == second
    assert texts(two, "a") == A.split("\n\n")
    assert one.ingest(Document("a", A)) == first
    assert texts(one, "a") == A.split("\n\n")


def test_segments_are_ordered_by_doc_id_and_hold_whole_documents(near: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compact, "SEGMENT_ROWS", 10)
    monkeypatch.setattr(compact, "WINDOW_ROWS", 25)
    documents = near.documents()
    order = [f"d{(at * 7) % 40:02d}" for at in range(40)]
    for text in (A, B):
        for start in range(0, 40, 4):
            documents.ingest_many([Document(doc_id, f"{text}\n\n{doc_id}") for doc_id in order[start : start + 4]])
    before = {doc_id: documents.snippets(doc_id) for doc_id in order}
    report = documents.compact()
    assert (report.segments_before, report.segments_after, report.rows_after) == (20, 8, 80)
    segments = [[row["doc_id"] for row in rows_in(near.kept, name)] for name in near.names("segments/")]
    assert sorted(doc_id for segment in segments for doc_id in segment) == sorted(2 * order)
    assert all(segment == sorted(segment) for segment in segments)
    assert sorted(segments) == sorted(segments, key=lambda segment: segment[-1])
    assert all(set(one).isdisjoint(other) for one in segments for other in segments if one is not other)
    rows = [row for name in near.names("segments/") for row in rows_in(near.kept, name)]
    assert {row["origin"] for row in rows} == {row["before"] for row in rows} == {""}
    stored = [row["snippet_id"] for name in near.names("snippets/") for row in rows_in(near.kept, name)]
    assert len(stored) == len(set(stored)) == report.snippets_after
    near.flush()
    assert {doc_id: documents.snippets(doc_id) for doc_id in order} == before
    assert documents.verify().ok


def test_long_texts_make_more_segments(memory: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compact, "SEGMENT_BYTES", 1000)
    monkeypatch.setattr(compact, "WINDOW_BYTES", 1500)
    documents = memory.documents()
    for at_ in range(12):
        documents.ingest(Document(f"d{at_:02d}", str(at_) * 300))
    documents.ingest(Document("long", "x" * 5000))
    before = {found.doc_id: documents.snippets(found.doc_id) for found in documents.heads()}
    assert documents.compact().segments_after == 6
    assert {found.doc_id: documents.snippets(found.doc_id) for found in documents.heads()} == before


@pytest.mark.parametrize("point", REWRITING_POINTS)
def test_one_that_was_killed_anywhere_is_done_by_the_next(here: Place, point: str) -> None:
    documents = here.documents()
    first = [documents.ingest(Document(f"d{at_}", f"{A}\n\n{at_}")) for at_ in range(4)]
    process = Process(here)
    with at_point(point, process.die), pytest.raises(Crash):
        process.fence.documents.compact()
    here.let_locks_run_out()
    assert here.documents().ingest(Document("d4", B)).decision is Decision.NEW, "life goes on without a compaction"
    documents = here.documents()
    documents.compact()
    assert len(here.names("segments/")) <= 2
    assert [documents.ingest(Document(f"d{at_}", f"{A}\n\n{at_}")) for at_ in range(4)] == first
    assert documents.verify().ok
    here.flush()
    documents = here.documents()
    assert [documents.ingest(Document(f"d{at_}", f"{A}\n\n{at_}")) for at_ in range(4)] == first
    assert texts(documents, "d4") == B.split("\n\n")
    assert documents.verify().ok


WORKER = """
import os, signal, sys
from ragfence.engine import crash_points, hydration
import ragfence

hydration.LOCK_MS = 200  # it stays behind
store, point = sys.argv[1:]

def killed(reached):
    if reached == point:
        os.kill(os.getpid(), signal.SIGKILL)

crash_points.visitor = killed
ragfence.open(store).documents.compact()
"""


@pytest.mark.parametrize("point", [AFTER_REWRITTEN, crash_points.AFTER_LISTED, BEFORE_DELETION])
def test_a_process_that_is_killed_leaves_a_log_that_the_next_completes(tmp_path: Path, point: str) -> None:
    import ragfence

    with ragfence.open(tmp_path / "store") as fence:
        documents = fence.documents
        first = [documents.ingest(Document(f"d{at_}", f"{A}\n\n{at_}")) for at_ in range(6)]
        done = subprocess.run([sys.executable, "-c", WORKER, str(tmp_path / "store"), point], timeout=120)
        assert done.returncode == -9
        documents.compact()
        assert [documents.ingest(Document(f"d{at_}", f"{A}\n\n{at_}")) for at_ in range(6)] == first
        assert documents.verify().ok
        names = [entry.name for entry in fence.inspector.objects.list("default/segments/")]  # type: ignore[union-attr]
        assert len(names) == 1


WRITING = (
    crash_points.AFTER_CLAIM,
    crash_points.AFTER_EFFECT,
    AFTER_SNIPPETS,
    crash_points.AFTER_COMMIT,
    crash_points.BEFORE_SEAL,
)


@pytest.mark.parametrize("point", WRITING)
def test_a_writer_that_is_overtaken_by_a_compaction_loses_nothing(here: Place, point: str) -> None:
    documents, other = here.documents(), here.documents()
    for text in (A, C):
        documents.ingest(Document("a", text))
        documents.ingest(Document("b", text))
    with at_point(point, lambda: elsewhere(other.compact)):  # type: ignore[arg-type]
        written = documents.ingest_many([Document("a", B), Document("b", A), Document("new", B)])
    assert [receipt.failure for receipt in written] == [None] * 3
    assert other.ingest_many([Document("a", B), Document("b", A), Document("new", B)]) == written
    for forget in (lambda: None, here.flush, other.compact):
        forget()
        assert [texts(other, doc_id) for doc_id in ("a", "b", "new")] == [text.split("\n\n") for text in (B, A, B)]
        assert other.verify().ok
    assert other.compact().epoch == 0


@pytest.mark.parametrize("often", [False, True])
@pytest.mark.parametrize("point", [crash_points.AFTER_COMMIT, crash_points.BEFORE_SEAL])
def test_a_writer_whose_row_was_compacted_does_not_move_the_head_again(here: Place, point: str, often: bool) -> None:
    """Its move counted, and somebody has replaced it since: to make it again would bring the old content back."""
    slow, other = here.documents(), here.documents()
    other.ingest(Document("b", A))

    def meanwhile() -> None:
        here.let_leases_run_out()
        other.compact()
        assert other.get("a") is not None
        other.ingest(Document("a", B))
        if often:
            other.compact()

    with at_point(point, lambda: elsewhere(meanwhile)):
        receipt = slow.ingest(Document("a", A))
    assert receipt.decision is Decision.NEW
    assert texts(other, "a") == B.split("\n\n")
    assert other.verify().ok


@pytest.mark.parametrize(
    "point", [crash_points.AFTER_BEGUN, crash_points.AFTER_MARKED, AFTER_REWRITTEN, crash_points.AFTER_LISTED]
)
def test_one_that_is_overtaken_by_a_hydration_is_tried_again(near: Place, point: str) -> None:
    documents, other = near.documents(), near.open()
    first = [documents.ingest(Document(f"d{at_}", f"{A}\n\n{at_}")) for at_ in range(4)]

    def overtake() -> None:
        near.let_locks_run_out()
        other.hydrate()

    with at_point(point, lambda: elsewhere(overtake)):
        report = documents.compact()
    assert report.segments_after == 1
    assert len(near.names("segments/")) == 1
    assert [documents.ingest(Document(f"d{at_}", f"{A}\n\n{at_}")) for at_ in range(4)] == first
    assert documents.verify().ok


def test_one_that_is_overtaken_every_time_gives_up_and_says_so(memory: Place) -> None:
    documents, other = memory.documents(), memory.open()
    first = [documents.ingest(Document(f"d{at_}", A)) for at_ in range(4)]

    def overtake() -> None:
        memory.let_locks_run_out()
        other.hydrate()

    with at_point(AFTER_REWRITTEN, lambda: elsewhere(overtake), times=100), pytest.raises(NotReady, match="compacted"):
        documents.compact()
    assert [documents.ingest(Document(f"d{at_}", A)) for at_ in range(4)] == first
    assert {finding.trouble for finding in documents.verify(repair=True).repaired} == {"void"}
    assert len(memory.names("segments/")) == 4


def test_a_segment_that_cannot_be_read_stops_it_before_anybody_has_to_wait(memory: Place) -> None:
    documents = memory.documents()
    for at_ in range(3):
        documents.ingest(Document(f"d{at_}", A))
    name = memory.names("segments/")[0]
    memory.kept.delete([name])
    memory.kept.put_new(name, b"nonsense")
    before = memory.epochs.known()
    with pytest.raises(FormatCorrupt, match=name):
        documents.compact()
    assert memory.epochs.known() == before


def test_whoever_belongs_to_a_segment_is_told_before_the_switch(memory: Place) -> None:
    documents = memory.documents()
    for at_ in range(3):
        documents.ingest(Document(f"d{at_}", A))
    old = memory.names("segments/")
    told: list[rewrite.Switch] = []

    def copy_vectors(switch: rewrite.Switch) -> None:
        told.append(switch)
        assert set(memory.names("segments/")) >= {*switch.replaced, *switch.added}
        if len(told) == 1:
            raise RuntimeError("no vectors today")

    documents._log_rewrite.before_switch.append(copy_vectors)
    with pytest.raises(RuntimeError):
        documents.compact()
    assert documents.get("d0") is not None
    report = documents.compact()
    assert [switch.replaced for switch in told] == [tuple(old)] * 2
    assert told[-1].epoch == report.epoch
    assert memory.names("segments/") == list(told[-1].added)


@pytest.mark.parametrize("backend", ["embedded", "valkey"])
def test_ingests_that_race_with_compactions_lose_nothing(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    with place(backend, tmp_path, monkeypatch, lambda: request.getfixturevalue("valkey_server")) as here:
        first: dict[tuple[str, str], tuple[str, ...]] = {}
        failures: list[BaseException] = []

        def load(name: str) -> None:
            try:
                documents = here.documents(keep_superseded_days=0)
                for turn in range(12):
                    batch = [Document(f"{name}{at_}", f"{A if turn % 2 else B}\n\n{at_}") for at_ in range(6)]
                    for document, receipt in zip(batch, documents.ingest_many(batch), strict=True):
                        assert receipt.failure is None, receipt
                        known = first.setdefault((document.doc_id, document.text), receipt.snippet_ids)
                        assert known == receipt.snippet_ids
            except BaseException as failure:
                failures.append(failure)

        loaders = [threading.Thread(target=load, args=[name]) for name in "xy"]
        for loader in loaders:
            loader.start()
        compactor = here.documents(keep_superseded_days=0)
        while any(loader.is_alive() for loader in loaders):
            compactor.compact()
        for loader in loaders:
            loader.join()
        assert failures == []
        for forget in (lambda: None, compactor.compact, here.flush):
            forget()
            assert compactor.verify().ok
            for name in "xy":
                for at_ in range(6):
                    assert texts(compactor, f"{name}{at_}") == [*A.split("\n\n"), str(at_)]


def test_readers_find_documents_while_their_segments_are_moved_away(near: Place) -> None:
    documents, other = near.documents(keep_superseded_days=0), near.documents(keep_superseded_days=0)
    for at_ in range(6):
        documents.ingest(Document(f"d{at_}", f"{A}\n\n{at_}"))
    heads = documents.heads()
    found = [next(heads).doc_id]
    other.ingest(Document("d5", B))
    other.compact()
    found += [head.doc_id for head in heads]
    assert sorted(found) == [f"d{at_}" for at_ in range(6)]


def test_progress_is_told(memory: Place) -> None:
    documents = memory.documents()
    for at_ in range(3):
        documents.ingest(Document(f"d{at_}", A))
    told: list[int] = []
    documents.compact(progress=told.append)
    assert told == [3]


def steps(rows: list[tuple[str, int, bool]]) -> list[Step]:
    """Head moves: to a content, or to none; the first with a content makes it, unless it is cut again."""
    history: list[Step] = []
    now_ms = 0
    for counter, (content, wait, cut) in enumerate(rows):
        now_ms += wait
        made = content != "-" and (cut or content not in {step.key.decode() for step in history if step.made})
        history.append(Step(content.encode(), b"", FenceNumber(1, counter), content != "-", made, now_ms, 0, ""))
    return history


HISTORIES = st.lists(st.tuples(st.sampled_from("ABC-"), st.integers(0, 5), st.booleans()), min_size=1, max_size=12)


@given(HISTORIES, st.integers(0, 40))
def test_what_stays_is_enough_to_answer_and_stays_for_the_same_reasons(
    rows: list[tuple[str, int, bool]], kept_since_ms: int
) -> None:
    """The head stays; each revision stays with its positions or not at all; younger ones stay; to do it again, also
    later, gives what doing it then alone would give."""
    history = steps(rows)
    stay = survivors(history, kept_since_ms)
    assert stay[-1] == history[-1]
    live = {step.key for step in stay if step.live}
    assert live <= {step.key for step in stay if step.made}
    for at_, (step, superseding) in enumerate(pairwise(history)):
        last = step.live and step.key not in {later.key for later in history[at_ + 1 :]}
        if last and superseding.at_ms > kept_since_ms:
            assert step in stay
        elif last and step.key != history[-1].key:
            assert step.key not in live
    assert survivors(stay, kept_since_ms) == stay
    assert survivors(stay, kept_since_ms + 3) == survivors(history, kept_since_ms + 3)
