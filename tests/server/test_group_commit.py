"""Group commit: documents of different clients in one segment, each answered as if it had come alone."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ragfence
from ragfence import Document, Fence
from ragfence.core.receipts import Receipt
from ragfence.documents.chunking.chunker import Piece
from ragfence.documents.documents import Documents
from ragfence.errors import Conflict, DocumentInvalid, FormatTooNew, InFlight, Stale, StoreUnavailable
from ragfence.server.group_commit import GroupCommit
from ragfence.wire.problems import RequestRefused
from tests.documents.chunkers import Failing, Paragraphs
from tests.server.conftest import OpenFence
from tests.servers import RedisServer


def segments_of(fence: Fence) -> int:
    assert fence.inspector.objects is not None
    return sum("/segments/" in f"/{each.name}" for each in fence.inspector.objects.list(""))


async def outcome(grouping: GroupCommit, document: Document) -> Receipt | Exception:
    try:
        return await grouping.ingest(document)
    except Exception as error:  # that is what is asked for
        return error


def told(outcome: Receipt | Exception) -> object:
    """What a caller learns."""
    if isinstance(outcome, Receipt):
        return (*outcome[:5], outcome.decision, outcome.flags.revived, outcome.flags.metadata_updated)
    return type(outcome), outcome.args, getattr(outcome, "hint", None), getattr(outcome, "details", None)


@pytest.fixture(params=["sqlite", "valkey"])
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fence]:
    if request.param == "sqlite":
        opened = ragfence.open(tmp_path / "fence", tenant="acme")
    else:
        server: RedisServer = request.getfixturevalue("valkey_server")
        opened = ragfence.open(server.url, objects=tmp_path / "objects", tenant=tmp_path.name)
    with opened:
        yield opened


def test_documents_that_come_together_become_few_segments_and_are_durable_when_answered(stored: Fence) -> None:
    async def story() -> None:
        grouping = GroupCommit(stored.documents)
        receipts = await asyncio.gather(*(grouping.ingest(Document(f"d{n}", f"Document {n}.")) for n in range(100)))
        assert all(receipt.is_new for receipt in receipts)

    asyncio.run(story())
    assert 1 <= segments_of(stored) <= 2
    stored.hydrate()  # from the object store alone
    assert {document.doc_id for document in stored.documents.heads()} == {f"d{n}" for n in range(100)}


def test_one_that_comes_alone_gets_what_a_plain_ingest_gets(stored: Fence) -> None:
    async def story() -> None:
        grouping = GroupCommit(stored.documents)
        first, again = await grouping.ingest(Document("a", "text")), await grouping.ingest(Document("a", "text"))
        assert first.is_new
        assert again == first
        assert not again.is_new
        assert stored.documents.ingest(Document("a", "text")) == first

    asyncio.run(story())


IDS = st.sampled_from(["a", "b", "Caf\u00e9", "Cafe\u0301"])
DOCUMENTS = st.one_of(
    st.builds(
        Document,
        IDS,
        st.sampled_from(["one", "two", "three"]),
        st.sampled_from([{}, {"n": 1}]),
        st.just(""),
        st.sampled_from([None, 1, 2]),
    ),
    st.sampled_from(
        [Document("", "no id"), Document("a", "nul\0"), Document("b", "x" * 300), Document("c", 7), Document(7, "x")]  # type: ignore[arg-type]
    ),
)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(DOCUMENTS, min_size=1, max_size=8), min_size=1, max_size=4))
def test_every_document_is_answered_as_in_a_plain_loop(together: list[list[Document]]) -> None:
    """Whatever comes together with it. Documents of one doc_id are ingested in the order they were sent in."""
    policy = ragfence.Policy.from_mapping({"documents": {"max_text_bytes": 200}})
    with TemporaryDirectory() as folder:
        with ragfence.open(Path(folder) / "plain", policy=policy) as fence:
            plain = [told(one(fence.documents, each)) for group in together for each in group]
        with ragfence.open(Path(folder) / "grouped", policy=policy) as fence:

            async def story() -> list[object]:
                grouping = GroupCommit(fence.documents, max_documents=5, max_bytes=20)
                found = [
                    told(each)
                    for group in together
                    for each in await asyncio.gather(*(outcome(grouping, document) for document in group))
                ]
                await grouping.finish()
                return found

            assert asyncio.run(story()) == plain


def one(documents: Documents, document: Document) -> Receipt | Exception:
    try:
        return documents.ingest(document)
    except Exception as error:  # that is what is asked for
        return error


def test_one_bad_document_does_not_spoil_its_group(fence: Fence) -> None:
    fence.documents.ingest(Document("old", "first", sequence=5))

    async def story() -> None:
        grouping = GroupCommit(fence.documents)
        good, invalid, stale, clash = await asyncio.gather(
            outcome(grouping, Document("good", "text")),
            outcome(grouping, Document("bad", "nul\0")),
            outcome(grouping, Document("old", "second", sequence=4)),
            outcome(grouping, Document("old", "third", sequence=5)),
        )
        assert isinstance(good, Receipt)
        assert isinstance(invalid, DocumentInvalid)
        assert (invalid.doc_id, "position" in invalid.message) == ("bad", False)
        assert isinstance(stale, Stale)
        assert isinstance(clash, Conflict)
        assert clash.hint == "give the changed document a higher sequence"

    asyncio.run(story())


class Gate:
    """Holds up what the writer of documents does."""

    def __init__(self, documents: Documents, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.reached, self.sizes = threading.Event(), threading.Event(), list[int]()
        move = documents._writer.move

        def held(moves: Sequence[Any], **more: Any) -> Any:
            self.sizes.append(len(moves))
            self.reached.set()
            self.open.wait(30)
            return move(moves, **more)

        monkeypatch.setattr(documents._writer, "move", held)


def test_what_comes_while_a_group_is_under_way_goes_with_the_next(
    fence: Fence, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(fence.documents, monkeypatch)

    async def story() -> None:
        grouping = GroupCommit(fence.documents, max_documents=6)
        first = asyncio.create_task(grouping.ingest(Document("first", "text")))
        await asyncio.to_thread(gate.reached.wait)
        others = [asyncio.create_task(grouping.ingest(Document(f"d{n}", "text"))) for n in range(8)]
        await asyncio.sleep(0)
        gate.open.set()
        await asyncio.gather(first, *others)

    asyncio.run(story())
    assert gate.sizes == [1, 6, 2]


def test_who_is_cancelled_does_not_cancel_the_group(fence: Fence, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(fence.documents, monkeypatch)

    async def story() -> None:
        grouping = GroupCommit(fence.documents)
        goes = asyncio.create_task(grouping.ingest(Document("goes", "text")))
        stays = asyncio.create_task(grouping.ingest(Document("stays", "text")))
        await asyncio.to_thread(gate.reached.wait)
        waits = asyncio.create_task(grouping.ingest(Document("waits", "text")))
        await asyncio.sleep(0)
        goes.cancel()
        waits.cancel()
        gate.open.set()
        assert (await stays).is_new
        await grouping.finish()
        assert (await grouping.ingest(Document("goes", "text"))).decision == "duplicate"
        assert (await grouping.ingest(Document("waits", "text"))).is_new

    asyncio.run(story())


def test_more_than_may_wait_are_refused_and_those_inside_are_not(fence: Fence, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(fence.documents, monkeypatch)

    async def story() -> None:
        grouping = GroupCommit(fence.documents, max_waiting=3)
        inside = [asyncio.create_task(grouping.ingest(Document(f"d{n}", "text"))) for n in range(3)]
        await asyncio.to_thread(gate.reached.wait)
        with pytest.raises(RequestRefused) as refused:
            await grouping.ingest(Document("d3", "text"))
        assert (refused.value.problem.code, refused.value.problem.status) == ("DEPENDENCY.overloaded", 503)
        gate.open.set()
        await asyncio.gather(*inside)
        assert (await grouping.ingest(Document("d3", "text"))).is_new

    asyncio.run(story())


@dataclass
class Held(Paragraphs):
    """Takes as long as the test wants: somebody else who is working on the document."""

    begun: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)

    def split(self, text: str) -> Sequence[Piece]:
        self.begun.set()
        self.go_on.wait(30)
        return super().split(text)


@contextmanager
def somebody_at_work_on(fence: Fence, doc_id: str) -> Iterator[Held]:
    held = Held()
    theirs = threading.Thread(
        target=fence.documents.using(chunker=held).ingest, args=(Document(doc_id, "theirs"),), daemon=True
    )
    theirs.start()
    assert held.begun.wait(30)
    try:
        yield held
    finally:
        held.go_on.set()
        theirs.join()


def test_a_document_that_somebody_else_is_working_on_delays_nobody_and_keeps_its_order(fence: Fence) -> None:
    with somebody_at_work_on(fence, "busy") as held:

        async def story() -> None:
            grouping = GroupCommit(fence.documents)
            first = asyncio.create_task(grouping.ingest(Document("busy", "ours")))
            second = asyncio.create_task(grouping.ingest(Document("busy", "ours, later")))
            others = await asyncio.gather(*(grouping.ingest(Document(f"d{n}", "text")) for n in range(5)))
            assert all(receipt.is_new for receipt in others)
            assert not first.done()
            assert not second.done()
            held.go_on.set()
            await asyncio.gather(first, second)

        asyncio.run(story())
    assert [snippet.text for snippet in fence.documents.snippets("busy")] == ["ours, later"]


def test_who_waited_long_enough_is_told_in_flight(open_fence: OpenFence) -> None:
    fence = open_fence(wait={"deadline_s": 0.05})
    with somebody_at_work_on(fence, "busy"):

        async def story() -> None:
            started = time.monotonic()
            busy = await outcome(GroupCommit(fence.documents), Document("busy", "ours"))
            took_ms = (time.monotonic() - started) * 1000
            assert isinstance(busy, InFlight)
            assert took_ms >= 50
            assert 0 < int(busy.message.rpartition("waited ")[2].removesuffix(" ms")) <= took_ms

        asyncio.run(story())


def test_a_chunker_that_fails_fails_for_its_own_document(fence: Fence) -> None:
    async def story() -> None:
        grouping = GroupCommit(fence.documents.using(chunker=Failing()))
        good, bad = await asyncio.gather(
            outcome(grouping, Document("good", "text")), outcome(grouping, Document("bad", "fail"))
        )
        assert isinstance(good, Receipt)
        assert isinstance(bad, RuntimeError)

    asyncio.run(story())


def failing_for(fence: Fence, monkeypatch: pytest.MonkeyPatch, error: Exception, *, only_with: str = "") -> None:
    move = fence.documents._writer.move

    def broken(moves: Sequence[Any], **more: Any) -> Any:
        if any(each.subject.doc.doc_id.startswith(only_with) for each in moves):
            raise error
        return move(moves, **more)

    monkeypatch.setattr(fence.documents._writer, "move", broken)


def test_what_nobody_knows_whose_fault_it_is_falls_on_the_one_it_belongs_to(
    fence: Fence, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_for(fence, monkeypatch, FormatTooNew("from the future"), only_with="bad")

    async def story() -> None:
        grouping = GroupCommit(fence.documents)
        ids = ["a", "bad", "b"]
        a, bad, b = await asyncio.gather(*(outcome(grouping, Document(each, "text")) for each in ids))
        assert isinstance(bad, FormatTooNew)
        assert isinstance(a, Receipt)
        assert isinstance(b, Receipt)

    asyncio.run(story())


def test_a_store_that_is_away_is_told_to_everybody(fence: Fence, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_for(fence, monkeypatch, StoreUnavailable("the store did not answer"))

    async def story() -> None:
        grouping = GroupCommit(fence.documents)
        errors = await asyncio.gather(*(outcome(grouping, Document(each, "text")) for each in "abc"))
        assert [type(each) for each in errors] == [StoreUnavailable] * 3
        await grouping.finish()

    asyncio.run(story())
