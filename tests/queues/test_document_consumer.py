"""Documents of a queue: ingested together, acknowledged after the seal, refused as the HTTP API refuses them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import ragfence
from ragfence.core.backoff import Backoff
from ragfence.core.policy import Policy
from ragfence.errors import DocumentInvalid, StoreUnavailable, TransportUnavailable
from ragfence.queues import DocumentConsumer, Envelope, Message
from ragfence.queues.sql import SqlTransport
from ragfence.telemetry.events import Event

AT_ONCE = Backoff(attempts=100, first_s=0.0, longest_s=0.0)
POLICY = Policy.from_mapping({"lease": {"ttl_s": 1.0}})


class Events:
    def __init__(self) -> None:
        self.seen: list[Event] = []

    def handle(self, event: Event) -> None:
        self.seen.append(event)


@pytest.fixture
def fence(tmp_path: Path) -> Iterator[ragfence.Fence]:
    with ragfence.open(tmp_path / "store", policy=POLICY) as opened:
        yield opened


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[SqlTransport]:
    opened = SqlTransport(f"sqlite:///{tmp_path / 'queue.db'}", "docs", visibility_s=2.0)
    yield opened
    opened.close()


def document(doc_id: str, text: str = "some text", **fields: Any) -> Envelope:
    return Envelope(body={"doc_id": doc_id, "text": text, **fields})


def retraction(doc_id: str, **fields: Any) -> Envelope:
    return Envelope(body={"action": "retract", "doc_id": doc_id, **fields})


def drain(fence: ragfence.Fence, queue: SqlTransport, **options: Any) -> DocumentConsumer:
    consumer = DocumentConsumer(fence, queue, **({"retry": AT_ONCE} | options))
    empty = 0
    while empty < 2:
        empty = 0 if consumer.run_once(0.1) else empty + 1
    return consumer


def test_documents_are_ingested_once_and_all_of_them_acknowledged_in_one_call(
    fence: ragfence.Fence, queue: SqlTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    ack = queue.ack

    def counted(messages: Sequence[Message]) -> list[bool]:
        calls.append(len(messages))
        return ack(messages)

    monkeypatch.setattr(queue, "ack", counted)
    queue.send([document(str(number)) for number in range(20)] * 2)
    consumer = drain(fence, queue)
    assert consumer.counts == {"new": 20, "duplicate": 20}
    assert calls == [40]
    assert sum(1 for _ in fence.documents.heads()) == 20
    assert queue.depth().visible == queue.depth().in_flight == 0


def test_nothing_is_acknowledged_before_it_is_sealed(
    fence: ragfence.Fence, queue: SqlTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    ack, ingest = queue.ack, fence.documents.ingest_each

    def acknowledge(messages: Sequence[Message]) -> list[bool]:
        order.append("ack")
        return ack(messages)

    monkeypatch.setattr(queue, "ack", acknowledge)

    def ingest_each(given: Sequence[Any], **options: Any) -> Any:
        outcomes = ingest(given, **options)
        order.append("sealed")
        return outcomes

    monkeypatch.setattr(fence.documents, "ingest_each", ingest_each)
    queue.send([document("a"), document("b")])
    drain(fence, queue)
    assert order == ["sealed", "ack"]


def test_a_document_can_be_retracted_and_comes_back(fence: ragfence.Fence, queue: SqlTransport) -> None:
    queue.send([document("a"), document("b"), retraction("a"), retraction("c")])
    assert drain(fence, queue).counts == {"new": 3, "duplicate": 1}
    assert fence.documents.get("a") is None
    assert fence.documents.get("b") is not None
    queue.send([retraction("b"), document("b"), document("a")])
    drain(fence, queue)
    assert {each.doc_id for each in fence.documents.heads()} == {"a", "b"}


def test_revisions_one_three_two_end_at_three(fence: ragfence.Fence, queue: SqlTransport) -> None:
    for sequence in (1, 3, 2):
        queue.send([document("a", f"revision {sequence}", sequence=sequence)])
    queue.send([retraction("a", sequence=2)])
    consumer = drain(fence, queue, batch=1)
    assert consumer.counts == {"new": 2, "stale": 2}
    assert [snippet.text for snippet in fence.documents.snippets("a")] == ["revision 3"]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("text", "VALIDATION.body"),
        (None, "VALIDATION.body"),
        ({"doc_id": "a"}, "/text"),
        ({"doc_id": "a", "text": "x", "source_ulr": "typo"}, "source_ulr"),
        ({"doc_id": "a", "text": 7}, "/text"),
        ({"doc_id": "", "text": "x"}, "/doc_id"),
        ({"doc_id": "a", "text": " "}, "white space"),
        ({"doc_id": "a", "text": "x", "sequence": "7"}, "/sequence"),
        ({"action": "retract"}, "/doc_id"),
        ({"action": "delete", "doc_id": "a"}, "/action"),
        ({"action": "retract", "doc_id": "a", "text": "x"}, "/text"),
    ],
)
def test_a_message_that_is_no_document_is_a_dead_letter_with_the_reason(
    fence: ragfence.Fence, queue: SqlTransport, body: Any, reason: str
) -> None:
    queue.send([Envelope(body=body), document("good")])
    assert drain(fence, queue).counts == {"dead": 1, "new": 1}
    (letter,) = queue.dead_letters()
    assert reason in letter.reason
    assert letter.message.body == body
    assert fence.documents.get("good") is not None


def test_a_conflict_is_a_dead_letter_and_not_applied(fence: ragfence.Fence, queue: SqlTransport) -> None:
    queue.send([document("a", "one", sequence=1)])
    drain(fence, queue)
    queue.send([document("a", "two", sequence=1)])
    assert drain(fence, queue).counts == {"dead": 1}
    (letter,) = queue.dead_letters()
    assert "CONFLICT" in letter.reason
    assert [snippet.text for snippet in fence.documents.snippets("a")] == ["one"]


def test_a_document_of_another_tenant_is_not_ingested_here(fence: ragfence.Fence, queue: SqlTransport) -> None:
    queue.send([Envelope(body=document("a").body, tenant="globex"), document("b")])
    assert drain(fence, queue).counts == {"dead": 1, "new": 1}
    assert "globex" in queue.dead_letters()[0].reason
    assert fence.documents.get("a") is None


def test_tenants_have_fences_of_their_own(tmp_path: Path, queue: SqlTransport) -> None:
    fences = {name: ragfence.open(tmp_path / "many", tenant=name, policy=POLICY) for name in ("acme", "globex")}
    queue.send([Envelope(body=document("a", tenant).body, tenant=tenant) for tenant in ("acme", "globex")])
    consumer = DocumentConsumer(fences.__getitem__, queue, retry=AT_ONCE)
    consumer.run_once(1.0)
    for tenant, fence in fences.items():
        assert [snippet.text for snippet in fence.documents.snippets("a")] == [tenant]
        fence.close()


def test_a_document_that_another_process_ingests_is_put_back_uncounted(
    fence: ragfence.Fence, queue: SqlTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ragfence.errors import InFlight

    ingest = fence.documents.ingest_each
    monkeypatch.setattr(fence.documents, "ingest_each", lambda given, **_: [InFlight("elsewhere")] * len(given))
    queue.send([document("a")])
    consumer = DocumentConsumer(fence, queue, retry=AT_ONCE, max_attempts=2)
    for _ in range(4):
        assert consumer.run_once(1.0) == 1
    assert consumer.counts == {"in_flight": 4}
    monkeypatch.setattr(fence.documents, "ingest_each", ingest)
    attempts: list[int] = []
    drain(fence, queue, on_result=lambda message, *_: attempts.append(message.attempt))
    assert attempts == [1]


def test_an_outage_of_a_store_is_not_the_fault_of_the_messages(
    fence: ragfence.Fence, queue: SqlTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(given: Sequence[Any], **_: Any) -> Any:
        raise StoreUnavailable("away")

    monkeypatch.setattr(fence.documents, "ingest_each", away)
    queue.send([document("a"), document("b")])
    consumer = DocumentConsumer(fence, queue, retry=AT_ONCE, max_attempts=2)
    for _ in range(5):
        consumer.run_once(1.0)
    assert consumer.counts == {"postponed": 10}
    monkeypatch.undo()
    assert drain(fence, queue, max_attempts=2).counts == {"new": 2}
    assert queue.dead_letters() == []


def test_one_document_that_fails_does_not_fail_the_others(
    fence: ragfence.Fence, queue: SqlTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    ingest = fence.documents.ingest_each

    def picky(given: Sequence[Any], **options: Any) -> Any:
        if any(each.document.doc_id == "bad" for each in given):
            raise ZeroDivisionError("a bug of a chunker")
        return ingest(given, **options)

    monkeypatch.setattr(fence.documents, "ingest_each", picky)
    queue.send([document("a"), document("bad"), document("b")])
    consumer = drain(fence, queue, max_attempts=3)
    assert consumer.counts == {"new": 2, "retried": 2, "dead": 1}
    (letter,) = queue.dead_letters()
    assert "given up after 3 attempts" in letter.reason
    assert "ZeroDivisionError" in letter.reason


def test_acknowledgements_that_are_lost_leave_duplicates(
    fence: ragfence.Fence, queue: SqlTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(messages: Sequence[Message]) -> list[bool]:
        raise TransportUnavailable("the reply is lost")

    queue.send([document("a"), document("b")])
    monkeypatch.setattr(queue, "ack", lost)
    DocumentConsumer(fence, queue, retry=AT_ONCE).run_once(1.0)
    monkeypatch.undo()
    time.sleep(queue.visibility_s + 0.2)
    assert drain(fence, queue).counts == {"duplicate": 2}
    assert queue.depth().visible == queue.depth().in_flight == 0


def test_a_consumer_that_is_stopped_gives_back_what_it_has_not_begun(
    fence: ragfence.Fence, queue: SqlTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.send([document(str(number)) for number in range(5)])
    consumer = DocumentConsumer(fence, queue, retry=AT_ONCE, wait_s=0.1)
    receive = queue.receive

    def receive_and_stop(limit: int, wait_s: float) -> list[Message]:
        consumer.stop()
        return receive(limit, wait_s)

    monkeypatch.setattr(queue, "receive", receive_and_stop)
    thread = threading.Thread(target=consumer.run)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert consumer.counts == {"returned": 5}
    assert {message.attempt for message in receive(5, 1)} == {1}


def test_rows_say_which_event_route_and_key_of_the_sender_a_document_came_with(
    fence: ragfence.Fence, queue: SqlTransport
) -> None:
    for _ in range(2):
        queue.send([Envelope(body=document("a").body, event_id="e-1", dedupe_key="k-1", route="webhooks/cms")])
        drain(fence, queue)
    queue.send([Envelope(body=retraction("a").body, event_id="e-2", dedupe_key="k-2")])
    drain(fence, queue)
    rows = fence.audit.decisions(since="1h").to_pylist()
    answers = [row for row in rows if row["phase"] in ("seal", "replay")]
    seen = {
        (row["source_id"], row["event_id"], row["correlation_id"], row["route"], row["decision"]) for row in answers
    }
    assert seen == {
        ("a", "e-1", "k-1", "webhooks/cms", "new"),
        ("a", "e-1", "k-1", "webhooks/cms", "duplicate"),
        ("a", "e-2", "k-2", "queue:docs", "new"),
    }
    assert {row["attempt"] for row in answers if row["phase"] == "seal"} == {1}
    assert {row["tenant"] for row in answers} == {"default"}


def test_an_event_id_that_no_row_can_hold_is_a_dead_letter(fence: ragfence.Fence, queue: SqlTransport) -> None:
    queue.send([Envelope(body=document("a").body, event_id="a\x00b"), document("b")])
    assert drain(fence, queue).counts == {"dead": 1, "new": 1}


def test_the_quota_of_a_tenant_holds_up_its_messages_and_no_others(tmp_path: Path, queue: SqlTransport) -> None:
    fences = {name: ragfence.open(tmp_path / "many", tenant=name, policy=POLICY) for name in ("few", "many")}
    left = {"many": 5, "few": 100}

    def admit(tenant: str, cost: int) -> float:
        if left[tenant] < cost:
            return 30.0
        left[tenant] -= cost
        return 0.0

    queue.send([Envelope(body=document(f"m{number}").body, tenant="many") for number in range(50)])
    queue.send([Envelope(body=document(f"f{number}").body, tenant="few") for number in range(10)])
    consumer = DocumentConsumer(fences.__getitem__, queue, retry=AT_ONCE, admit=admit)
    while consumer.run_once(0.1):
        pass
    assert consumer.counts == {"new": 15, "throttled": 45}
    assert sum(1 for _ in fences["few"].documents.heads()) == 10
    assert queue.dead_letters() == []
    assert queue.depth().visible == 45
    for fence in fences.values():
        fence.close()


def test_documents_may_be_made_by_a_function_of_your_own(fence: ragfence.Fence, queue: SqlTransport) -> None:
    queue.send([Envelope(body={"page": {"id": 7, "html": "text"}}), Envelope(body={"page": {}})])

    def page(message: Message) -> ragfence.Document:
        return ragfence.Document(f"page/{message.body['page']['id']}", message.body["page"]["html"])

    assert drain(fence, queue, document=page).counts == {"new": 1, "dead": 1}
    assert fence.documents.get("page/7") is not None


def test_a_document_that_the_policy_refuses_is_a_dead_letter_that_names_it(tmp_path: Path, queue: SqlTransport) -> None:
    queue.send([document("a", "x" * 100)])
    small = Policy.from_mapping({"lease": {"ttl_s": 1.0}, "documents": {"max_text_bytes": 10}})
    with ragfence.open(tmp_path / "small", policy=small) as fence:
        drain(fence, queue)
    (letter,) = queue.dead_letters()
    assert letter.reason.startswith(DocumentInvalid.code)
    assert "'a'" in letter.reason
