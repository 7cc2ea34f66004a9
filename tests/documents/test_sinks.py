"""A sink holds exactly the live snippets, whatever happens to whoever writes to it."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ragfence import Decision, Document
from ragfence.documents.documents import Documents
from ragfence.documents.sinks.sink import (
    AFTER_INTENT,
    AFTER_UPSERT,
    BEFORE_DELETE,
    SINK_POINTS,
    Settled,
    SinkPending,
    SinkSnippet,
)
from ragfence.engine import crash_points
from ragfence.errors import FormatTooNew, Stale, StoreUnavailable, ValidationError
from ragfence.testing import FaultyObjects, at_point
from ragfence.testing.memory_sinks import ListSink, SqliteSink
from tests.contract.conftest import RedisUnderTest
from tests.documents.chunkers import Paragraphs
from tests.documents.sinking import assert_right
from tests.engine.worlds import Crash, PassingClock, Process, World, Wrapped
from tests.engine.worlds import world as make_world

A = "first paragraph\n\nsecond paragraph\n\nthird paragraph"
B = "another paragraph\n\nfirst paragraph\n\nthird paragraph"
C = "first paragraph\n\nfourth paragraph"


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with make_world("memory", tmp_path, monkeypatch) as made:
        yield made


@pytest.fixture
def sink() -> ListSink:
    return ListSink()


def guard(world: World, sink: Any, **policy: Any) -> Documents:
    """Of a process of its own, on the same stores."""
    policy = {"wait": {"mode": "raise"}, "lease": {"max_attempts": 1000}, **policy}
    return world.open(**policy).documents.using(chunker=Paragraphs(), sink=sink, allow_empty_text=True)


def crash(world: World, sink: Any, point: str, *documents: Document) -> None:
    """A process ingests these documents and dies at the point. Its leases run out."""
    process = Process(world, lease={"max_attempts": 1000})
    mortal = process.fence.documents.using(chunker=Paragraphs(), sink=sink)
    with at_point(point, process.die), pytest.raises(Crash):
        mortal.ingest_many(documents)
    world.let_leases_run_out()


def intents(world: World) -> list[str]:
    assert world.objects is not None
    return [entry.name for entry in world.objects.list("default/sinks/")]


@pytest.fixture
def documents(world: World, sink: ListSink) -> Documents:
    return guard(world, sink)


def ids_of(documents: Documents, doc_id: str) -> list[str]:
    return [snippet.snippet_id for snippet in documents.snippets(doc_id)]


def test_a_new_document_is_given_whole(documents: Documents, sink: ListSink) -> None:
    url = "https://a.example/1"
    documents.ingest(Document("a", "# One\n\nsome words here", {"lang": "en"}, source_url=url))
    first, second = documents.snippets("a")
    assert sink.held[second.snippet_id] == SinkSnippet(
        second.snippet_id, "a", "some words here", 7, 22, "", 1, second.tokens, url, {"lang": "en"}
    )
    assert sink.upserted == [first.snippet_id, second.snippet_id]
    assert sink.calls == {"upsert": 1}
    assert_right(documents, sink)


def test_a_replay_gives_the_sink_nothing(documents: Documents, sink: ListSink) -> None:
    for _ in range(2):
        documents.ingest(Document("a", A))
        documents.ingest_many([Document("a", A)])
    assert sink.calls == {"upsert": 1}


def test_an_edit_gives_exactly_the_new_snippets_and_takes_exactly_the_dead(
    documents: Documents, sink: ListSink
) -> None:
    documents.ingest(Document("a", A))
    before = ids_of(documents, "a")
    del sink.upserted[:]
    documents.ingest(Document("a", B))
    after = ids_of(documents, "a")
    assert sink.upserted == [after[0]]
    assert sink.deleted == [before[1]]
    assert_right(documents, sink)


def test_a_sink_that_keeps_positions_gets_what_an_edit_moved(world: World) -> None:
    sink = ListSink(keeps_positions=True)
    documents = guard(world, sink)
    documents.ingest(Document("a", A))
    documents.ingest(Document("a", B))
    assert len(sink.upserted) == 6
    assert_right(documents, sink)
    documents.ingest(Document("a", A))
    assert_right(documents, sink)


def test_going_back_gives_the_dead_ones_again(documents: Documents, sink: ListSink) -> None:
    documents.ingest(Document("a", A))
    documents.ingest(Document("a", B))
    del sink.upserted[:]
    documents.ingest(Document("a", A))
    assert sink.upserted == [ids_of(documents, "a")[1]]
    assert_right(documents, sink)


def test_a_retracted_document_is_taken_away_and_comes_back_whole(documents: Documents, sink: ListSink) -> None:
    documents.ingest(Document("a", A))
    documents.retract("a")
    assert sink.held == {}
    documents.retract("a")
    assert sink.calls["delete"] == 1
    documents.ingest(Document("a", A))
    assert len(sink.held) == 3
    assert_right(documents, sink)


def test_new_metadata_is_given_with_all_snippets(documents: Documents, sink: ListSink) -> None:
    documents.ingest(Document("a", A, {"views": 1}))
    documents.ingest(Document("a", B, {"views": 1}))
    documents.ingest(Document("a", B, {"views": 2}))
    assert_right(documents, sink)
    documents.ingest(Document("a", C, {"views": 3}, source_url="https://a.example/3"))
    assert {snippet.source_url for snippet in sink.held.values()} == {"https://a.example/3"}
    assert_right(documents, sink)
    documents.ingest(Document("a", A, {"views": 4}))
    assert_right(documents, sink)


def test_a_higher_sequence_alone_owes_the_sink_nothing(world: World, sink: ListSink) -> None:
    assert world.objects is not None
    objects = FaultyObjects(world.objects)
    documents = world.open(objects=objects).documents.using(chunker=Paragraphs(), sink=sink)
    documents.ingest(Document("a", A, sequence=1))
    objects.on("put_new", match="*/sinks/*").fail_before(times=None)
    assert documents.ingest(Document("a", A, sequence=2)).decision is Decision.DUPLICATE
    assert sink.calls == {"upsert": 1}


def test_an_empty_document_owes_the_sink_nothing(documents: Documents, sink: ListSink) -> None:
    documents.ingest(Document("a", ""))
    assert sink.calls == {}


def test_texts_are_found_over_many_revisions_and_a_rebuilt_fence_store(world: World, sink: ListSink) -> None:
    fence = world.open()
    documents = fence.documents.using(chunker=Paragraphs(), sink=sink)
    kept = "kept since the beginning"
    for number in range(5):
        documents.ingest_many([Document(doc_id, f"{kept}\n\n{doc_id} {number}") for doc_id in "abc"])
    fence.hydrate()
    documents.ingest_many([Document(doc_id, f"{kept}\n\n{doc_id} 4", {"x": 1}) for doc_id in "abc"])
    assert_right(documents, sink)
    sink.held.clear()
    assert documents.settle(full=True) == Settled(intents=0, left=0, missing=6, orphaned=0)
    assert_right(documents, sink)


def test_a_batch_is_given_in_pages_and_new_comes_before_old(world: World) -> None:
    happened: list[tuple[str, int]] = []

    class Watching(ListSink):
        def upsert(self, snippets: Any) -> None:  # type: ignore[override]
            happened.append(("upsert", len(snippets)))
            super().upsert(snippets)

        def delete(self, snippet_ids: Any) -> None:
            happened.append(("delete", len(snippet_ids)))
            assert other.ingest(Document("big", new)).decision is Decision.DUPLICATE, "it is sealed"
            super().delete(snippet_ids)

    other = guard(world, ListSink("other"))
    old, new = ("\n\n".join(f"{number} {word}" for number in range(2500)) for word in ("old", "new"))
    documents = guard(world, Watching())
    documents.ingest(Document("big", old))
    documents.ingest(Document("big", new))
    pages = [1000, 1000, 500]
    assert happened == [*(("upsert", n) for n in pages * 2), *(("delete", n) for n in pages)]


def test_a_sync_goes_to_the_sink_too(world: World, documents: Documents, sink: ListSink, tmp_path: Path) -> None:
    folder = tmp_path / "handbook"
    folder.mkdir()
    for name in ("one", "two"):
        (folder / f"{name}.txt").write_text(A)
    documents.sync(folder)
    assert_right(documents, sink)
    assert len(sink.held) == 6
    (folder / "one.txt").unlink()
    documents.sync(folder, prune="scoped", max_prune_share=1.0)
    assert_right(documents, sink)
    assert len(sink.held) == 3


def test_a_dry_run_gives_nothing(documents: Documents, sink: ListSink) -> None:
    documents.ingest(Document("a", A), dry_run=True)
    documents.ingest_many([Document("a", A)], dry_run=True)
    assert sink.calls == {}


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_the_sink_refuses_is_not_ingested(world: World, documents: Documents, sink: ListSink, when: str) -> None:
    documents.ingest(Document("a", A))
    orders = sink.on("upsert", match="b")
    fault = (orders.fail_before if when == "before" else orders.fail_after)(error=ConnectionError("gone"))
    with pytest.raises(ConnectionError, match="gone") as refused:
        documents.ingest_many([Document("a", B), Document("b", B)])
    assert "'list' refused" in refused.value.__notes__[0]
    assert fault.hits == 1
    assert [head.doc_id for head in documents.heads()] == ["a"]
    assert intents(world) != []
    receipts = documents.ingest_many([Document("a", B), Document("b", B)])
    assert [receipt.decision.value for receipt in receipts] == ["new", "new"]
    assert_right(documents, sink)
    assert intents(world) == []


def test_what_was_refused_and_never_sent_again_is_taken_out_by_the_next_call(
    world: World, documents: Documents, sink: ListSink
) -> None:
    sink.on("upsert").fail_after(error=ConnectionError("gone"))
    with pytest.raises(ConnectionError):
        documents.ingest(Document("a", A))
    assert len(sink.held) == 3
    documents.ingest(Document("b", ""))
    assert sink.held == {}
    assert intents(world) == []


def test_a_delete_that_fails_once_is_repeated(world: World, documents: Documents, sink: ListSink) -> None:
    documents.ingest(Document("a", A))
    for orders in (sink.on("delete").fail_before, sink.on("delete").fail_after):
        orders(error=ConnectionError("gone"))
        documents.ingest(Document("a", B))
        assert_right(documents, sink)
        documents.ingest(Document("a", A))
    assert intents(world) == []


def test_a_delete_that_keeps_failing_is_told_and_done_by_a_later_call(
    world: World, documents: Documents, sink: ListSink
) -> None:
    documents.ingest(Document("a", A))
    sink.on("delete").fail_before(times=None, error=ConnectionError("gone"))
    with pytest.warns(SinkPending, match="behind with 1 document.*gone.*default/sinks/list"):
        receipt = documents.ingest(Document("a", B))
    assert receipt.snippet_ids == tuple(ids_of(documents, "a"))
    assert len(sink.held) == 4
    assert len(intents(world)) == 1
    sink.heal()
    documents.ingest(Document("b", ""))
    assert_right(documents, sink)
    assert intents(world) == []


def test_what_a_failing_delete_left_is_done_by_another_process(
    world: World, documents: Documents, sink: ListSink
) -> None:
    documents.ingest(Document("a", A))
    sink.on("delete").fail_before(times=None, error=ConnectionError("gone"))
    with pytest.warns(SinkPending):
        documents.retract("a")
    with pytest.warns(SinkPending, match="could not be completed"):
        guard(world, sink).ingest_many([])
    with pytest.raises(ConnectionError):
        guard(world, sink).settle()
    sink.heal()
    guard(world, sink).ingest_many([])
    assert sink.held == {}
    assert intents(world) == []


@pytest.mark.parametrize("method", ["put_new", "get", "list", "delete"])
def test_an_object_store_that_fails_costs_no_snippet(world: World, sink: ListSink, method: Any) -> None:
    assert world.objects is not None
    documents = guard(world, sink)
    documents.ingest_many([Document("a", A), Document("b", A)])
    for times in range(1, 4):
        objects = FaultyObjects(world.objects)
        struck = world.open(objects=objects, wait={"mode": "raise"}).documents.using(chunker=Paragraphs(), sink=sink)
        objects.on(method, match="*/sinks/*").fail_before(times=times)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SinkPending)
            for text in (B, A):
                with contextlib.suppress(StoreUnavailable):
                    struck.ingest_many([Document("a", text, {"views": times}), Document("b", text)])
        world.let_leases_run_out()
        assert documents.settle().left == 0
        assert_right(documents, sink)


@pytest.mark.parametrize(
    "point", [*SINK_POINTS, crash_points.AFTER_COMMIT, crash_points.BEFORE_SEAL, crash_points.AFTER_SEAL]
)
def test_whoever_comes_after_a_crash_puts_the_sink_right(world: World, sink: ListSink, point: str) -> None:
    documents = guard(world, sink)
    documents.ingest_many([Document("edit", A), Document("back", A), Document("views", A, {"views": 1})])
    documents.ingest(Document("back", B))
    batch = [Document("edit", B), Document("back", A), Document("views", A, {"views": 2}), Document("new", C)]
    crash(world, sink, point, *batch)
    after = guard(world, sink)
    assert len(intents(world)) == 1
    assert after.settle() == Settled(intents=1, left=0)
    assert_right(after, sink)
    assert intents(world) == []
    receipts = after.ingest_many(batch)
    assert not any(receipt.failed for receipt in receipts)
    assert_right(after, sink)
    assert after.settle(full=True) == Settled(0, 0, 0, 0)
    assert len(sink.held) == 3 + 3 + 3 + 2


@pytest.mark.parametrize("point", SINK_POINTS)
def test_a_rerun_after_a_crash_needs_no_settle(world: World, sink: ListSink, point: str) -> None:
    documents = guard(world, sink)
    documents.ingest(Document("a", A))
    crash(world, sink, point, Document("a", B), Document("b", B))
    guard(world, sink).ingest_many([Document("a", C)])
    assert_right(documents, sink)
    assert intents(world) == []


@pytest.mark.parametrize("point", SINK_POINTS)
def test_a_process_that_was_there_before_the_crash_settles_when_it_takes_over(
    world: World, sink: ListSink, point: str
) -> None:
    documents = guard(world, sink)
    documents.ingest_many([Document("a", A), Document("b", A)])
    crash(world, sink, point, Document("a", B), Document("b", B))
    documents.ingest(Document("a", C))
    if point in (BEFORE_DELETE, SINK_POINTS[-1]):  # after the seal there is nothing to take over
        assert documents.settle().intents == 1
    assert_right(documents, sink)
    assert intents(world) == []


def test_a_document_that_is_being_written_is_left_alone(world: World, sink: ListSink) -> None:
    writer, other = guard(world, sink), guard(world, sink)
    found: list[Settled] = []
    with at_point(AFTER_UPSERT, lambda: found.append(other.settle())):
        writer.ingest(Document("a", A))
    assert found == [Settled(intents=0, left=1)]
    assert_right(other, sink)
    assert intents(world) == []


def test_a_takeover_for_the_sink_never_brings_an_old_head_back(world: World, sink: ListSink) -> None:
    """Another process is faster: its edit, its retraction, its first revision must stand."""
    documents = guard(world, sink)
    documents.ingest_many([Document("edited", A), Document("retracted", A)])
    crash(world, sink, AFTER_UPSERT, *(Document(doc_id, B) for doc_id in ("edited", "retracted", "first")))

    class Late(Wrapped):
        def claim(self, claims: Any) -> Any:
            if not moved:
                moved.append(True)
                other.ingest_many([Document("edited", C), Document("first", C)])
                other.retract("retracted")
            return self.inner.claim(claims)

    moved: list[bool] = []
    other = guard(world, sink)
    late = world.open(fences=Late, wait={"mode": "raise"}).documents.using(chunker=Paragraphs(), sink=sink)
    assert late.settle().left == 0
    assert moved == [True]
    assert sorted(head.doc_id for head in other.heads()) == ["edited", "first"]
    assert [snippet.text for snippet in other.snippets("edited")] == C.split("\n\n")
    assert_right(other, sink)


@pytest.mark.parametrize(
    "point", [*SINK_POINTS, crash_points.AFTER_COMMIT, crash_points.BEFORE_SEAL, crash_points.AFTER_SEAL]
)
@pytest.mark.parametrize("meanwhile", ["back", "on", "retract", "metadata", "same"])
def test_a_zombie_puts_right_what_it_did_too_late(memory: World, sink: ListSink, point: str, meanwhile: str) -> None:
    world = memory
    frozen, other = guard(world, sink), guard(world, sink)
    frozen.ingest(Document("a", A))
    frozen.ingest(Document("a", B))

    def freeze() -> None:
        world.let_leases_run_out()
        match meanwhile:
            case "retract":
                other.retract("a")
            case "metadata":
                other.ingest(Document("a", B, {"views": 2}))
            case _:
                other.ingest(Document("a", {"back": A, "on": C, "same": A}[meanwhile]))
        assert other.settle().left == 0

    with at_point(point, freeze):
        frozen.ingest(Document("a", A, {"views": 1} if meanwhile == "same" else {}))
    assert_right(other, sink)
    assert intents(world) == []


@pytest.mark.parametrize("point", [AFTER_INTENT, AFTER_UPSERT, crash_points.AFTER_COMMIT, crash_points.BEFORE_SEAL])
def test_a_zombie_that_is_stale_takes_out_what_it_put_in_and_nothing_else(
    world: World, sink: ListSink, point: str
) -> None:
    frozen, other = guard(world, sink), guard(world, sink)
    frozen.ingest(Document("a", A, sequence=1))

    def freeze() -> None:
        world.let_leases_run_out()
        other.ingest(Document("a", A, sequence=3))

    with at_point(point, freeze), pytest.raises(Stale):
        frozen.ingest(Document("a", B, sequence=2))
    assert not sink.held.keys() & set(sink.deleted), "what is live was never away"
    assert_right(other, sink)
    assert intents(world) == []


def test_a_settle_that_is_overtaken_looks_again(world: World) -> None:
    class Met(ListSink):
        meeting: Any = None

        def upsert(self, snippets: Any) -> None:  # type: ignore[override]
            meeting, self.meeting = self.meeting, None
            if meeting:
                meeting()
            super().upsert(snippets)

    sink = Met()
    other = guard(world, sink)
    other.ingest(Document("a", A))
    crash(world, sink, AFTER_UPSERT, Document("a", B))
    sink.meeting = lambda: other.ingest(Document("a", B))
    assert guard(world, sink).settle() == Settled(intents=1, left=0)
    assert sink.meeting is None
    assert [snippet.text for snippet in other.snippets("a")] == B.split("\n\n")
    assert_right(other, sink)


def test_a_fence_store_that_forgot_is_not_taken_for_one_without_documents(memory: World, sink: ListSink) -> None:
    class Forgetful(Wrapped):
        def read(self, lookups: Any) -> Any:
            if not forgot:
                forgot.append(True)
                self.inner.flush()
            return self.inner.read(lookups)

    forgot: list[bool] = []
    guard(memory, sink).ingest(Document("a", A))
    crash(memory, sink, AFTER_UPSERT, Document("a", B))
    settler = memory.open(fences=Forgetful).documents.using(chunker=Paragraphs(), sink=sink)
    assert settler.settle() == Settled(intents=1, left=0)
    assert forgot == [True]
    assert not sink.held.keys() & set(sink.deleted)
    assert_right(settler, sink)


@pytest.mark.parametrize("settles", [True, False])
def test_a_late_delete_does_not_hit_who_brings_the_snippet_back_meanwhile(
    world: World, sink: ListSink, settles: bool
) -> None:
    """The one who deletes looks again while the other holds a lease and has upserted already: he must come back.

    `settles`: it is the other's first call, which settles the intent before the delete that it is there for.
    """
    documents, other = guard(world, sink), guard(world, sink)
    documents.ingest(Document("a", A))
    if not settles:
        other.ingest(Document("b", ""))
    deleter, looked = threading.current_thread(), threading.Event()
    upserted = threading.Event()

    def visit(point: str) -> None:
        if threading.current_thread() is deleter:
            if point == BEFORE_DELETE and not upserted.is_set():
                reviving.append(pool.submit(other.ingest, Document("a", A)))
                assert upserted.wait(30)
        elif point == AFTER_UPSERT and not looked.is_set():
            upserted.set()
            assert looked.wait(30)

    reviving: list[Any] = []
    crash_points.visitor = visit
    try:
        with ThreadPoolExecutor(1) as pool:
            with pytest.warns(SinkPending, match="'a': another process is writing"):
                documents.ingest(Document("a", B))
            looked.set()
            assert reviving[0].result().flags.revived
    finally:
        crash_points.visitor = None
    assert len(sink.held) == 2, "this is what the intent is still there for"
    assert len(intents(world)) == 1
    documents.ingest(Document("c", ""))
    assert_right(documents, sink)
    assert intents(world) == []


def test_two_racing_writers_leave_the_sink_as_the_live_documents_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_world("embedded", tmp_path, monkeypatch, clock=PassingClock()) as world:
        sink = SqliteSink(tmp_path / "sink.db")
        start = threading.Barrier(2)

        def write(revision: str) -> None:
            documents = guard(world, sink, wait={"deadline_s": 60})
            for round_ in range(3):
                start.wait()
                texts = [f"shared\n\nround {round_ % 2} of {revision}\n\n{at}" for at in range(40)]
                batch = [Document(f"doc-{at}", text, {"by": revision}) for at, text in enumerate(texts)]
                receipts = documents.ingest_many(batch, batch=7)
                assert not any(receipt.failed for receipt in receipts)

        with ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(write, revision) for revision in ("v1", "v2")]:
                done.result()
        documents = guard(world, sink)
        assert_right(documents, sink)
        assert len(sink.held) == 3 * 40
        assert intents(world) == []
        assert documents.settle(full=True) == Settled(0, 0, 0, 0)


def test_a_purged_document_is_gone_from_the_sink_and_others_are_still_found(
    world: World, documents: Documents, sink: ListSink
) -> None:
    documents.ingest_many([Document("a", A), Document("b", A)])
    documents.purge("a")
    assert {snippet.doc_id for snippet in sink.held.values()} == {"b"}
    documents.ingest(Document("b", A, {"views": 2}))
    assert_right(documents, sink)
    documents.ingest(Document("a", A))
    assert_right(documents, sink)


def test_a_compaction_is_nothing_to_a_sink(world: World, documents: Documents, sink: ListSink) -> None:
    for text in (A, B, C):
        documents.ingest_many([Document("a", text), Document("b", text)])
    calls = dict(sink.calls)
    documents.compact()
    assert sink.calls == calls
    documents.ingest(Document("a", C, {"views": 2}))
    documents.ingest(Document("b", A, {"views": 2}))
    assert_right(documents, sink)


def test_on_valkey_crashes_and_edits_end_the_same(
    valkey_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sink: ListSink
) -> None:
    redis = RedisUnderTest(valkey_server)
    redis.flush()  # its epoch is none that the objects know of
    with make_world("embedded", tmp_path, monkeypatch) as world:
        on_valkey = replace(world, clock=redis.clock, make_fences=redis.reopen, opened=world.opened)
        documents = guard(on_valkey, sink)
        documents.ingest_many([Document("edit", A), Document("views", A)])
        for number, point in enumerate((*SINK_POINTS, crash_points.AFTER_COMMIT)):
            crash(on_valkey, sink, point, Document("edit", (A, B)[number % 2 - 1]), Document("views", A, {"n": number}))
            if number == 1:
                redis.flush()
            assert guard(on_valkey, sink).settle() == Settled(intents=1, left=0)
            assert_right(documents, sink)
        documents.retract("edit")
        documents.ingest(Document("edit", A))
        assert_right(documents, sink)
        assert len(sink.held) == 6
    redis.close()


def test_a_full_settle_fills_a_new_sink_and_finds_orphans(world: World, sink: ListSink) -> None:
    world.open().documents.using(chunker=Paragraphs()).ingest_many([Document("a", A), Document("b", B)])
    documents = guard(world, sink)
    documents.ingest(Document("c", C))
    before = documents.ingest(Document("c", A)).snippet_ids
    dead = min(set(before) - set(documents.ingest(Document("c", C)).snippet_ids))
    sink.upsert([SinkSnippet(dead, "c", "left by a killed zombie", 0, 4, "", 0, 5, "", {})])
    assert documents.settle(full=True) == Settled(intents=0, left=0, missing=6, orphaned=1)
    assert_right(documents, sink)
    assert documents.settle(full=True) == Settled(0, 0, 0, 0)


def test_a_full_settle_touches_nothing_of_a_batch_under_way(world: World, sink: ListSink) -> None:
    writer, other = guard(world, sink), guard(world, sink)
    writer.ingest(Document("a", A))
    found: list[Settled] = []
    for point in (AFTER_INTENT, AFTER_UPSERT, crash_points.AFTER_COMMIT):
        with at_point(point, lambda: found.append(other.settle(full=True))):
            writer.ingest(Document("a", B if len(found) % 2 == 0 else A))
        assert_right(writer, sink)
    assert found == [Settled(intents=0, left=1)] * 3


def test_a_sink_that_cannot_list_is_given_everything(world: World) -> None:
    class Mute:
        name = "mute"

        def __init__(self) -> None:
            self.inner = ListSink()
            self.upsert, self.delete = self.inner.upsert, self.inner.delete

    world.open().documents.using(chunker=Paragraphs()).ingest_many([Document("a", A), Document("b", B)])
    sink = Mute()
    documents = guard(world, sink)
    assert documents.settle(full=True) == Settled(intents=0, left=0, missing=6, orphaned=0)
    assert_right(documents, sink.inner)


def test_what_one_sink_is_owed_is_no_concern_of_another(world: World, sink: ListSink) -> None:
    crash(world, sink, AFTER_UPSERT, Document("a", A))
    other = ListSink("an/other ~sink")
    assert guard(world, other).settle() == Settled(intents=0, left=0)
    assert len(intents(world)) == 1
    crash(world, other, AFTER_INTENT, Document("b", A))
    assert any("/an%2Fother%20%7Esink/" in name for name in intents(world))
    assert guard(world, sink).settle() == Settled(intents=1, left=0)
    assert len(intents(world)) == 1


def test_an_intent_holds_ids_and_no_text(world: World, sink: ListSink) -> None:
    crash(world, sink, AFTER_INTENT, Document("a", A, {"secret": "very"}))
    assert world.objects is not None
    (name,) = intents(world)
    data = world.objects.get(name) or b""
    assert b'"a"' in data
    assert b"paragraph" not in data
    assert b"very" not in data


def test_an_intent_of_a_newer_ragfence_stays_and_keeps_no_other_back(world: World, sink: ListSink) -> None:
    assert world.objects is not None
    newer = f"default/sinks/list/{0:020d}/{'00' * 8}"
    world.objects.put_new(newer, b'{"version":2}')
    with pytest.warns(SinkPending, match="could not be completed"):
        crash(world, sink, AFTER_UPSERT, Document("a", A))
    with pytest.raises(FormatTooNew):
        guard(world, sink).settle()
    assert intents(world) == [newer]
    assert sink.held == {}
    world.objects.delete([newer])
    world.objects.put_new(newer, b"no json")
    with pytest.warns(SinkPending, match="is not a valid intent"):
        guard(world, sink).ingest(Document("a", A))
    assert len(sink.held) == 3


def test_a_sink_must_have_a_name_and_both_methods(world: World) -> None:
    documents = world.open().documents

    class Nameless(ListSink):
        name = ""

        def __init__(self) -> None:
            pass

    for wrong in (object(), Nameless(), Wrapped(None), ListSink("x" * 81), ListSink("line\nbreak")):
        with pytest.raises((ValidationError, AttributeError)):
            documents.using(sink=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match="no sink to settle"):
        documents.settle()
