"""Delivered at least once, handled once; acknowledged only after the seal."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

import ragfence
from ragfence.core.backoff import Backoff
from ragfence.core.policy import Policy
from ragfence.errors import FencedOut, StoreUnavailable, TerminalError, TransportUnavailable, ValidationError
from ragfence.queues.consumer import Consumer
from ragfence.queues.sql import SqlTransport, messages
from ragfence.queues.transport import Envelope, Message

AT_ONCE = Backoff(attempts=100, first_s=0.0, longest_s=0.0)
POLICY = Policy.from_mapping({"lease": {"ttl_s": 1.0}})


@pytest.fixture
def fence(tmp_path: Path) -> Iterator[ragfence.Fence]:
    with ragfence.open(tmp_path / "store", policy=POLICY) as opened:
        yield opened


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[SqlTransport]:
    opened = SqlTransport(f"sqlite:///{tmp_path / 'queue.db'}", "orders", visibility_s=2.0)
    yield opened
    opened.close()


def key(message: Message) -> str:
    return str(message.body["id"])


def consumer(fence: ragfence.Fence, queue: SqlTransport, handle: Callable[[Message], Any], **options: Any) -> Consumer:
    return Consumer(fence, queue, handle, **({"key": key, "retry": AT_ONCE} | options))


def drain(consumer: Consumer, rounds: int = 20) -> None:
    """Until nothing came twice in a row."""
    empty = 0
    for _ in range(rounds):
        empty = 0 if consumer.run_once(0.1) else empty + 1
        if empty == 2:
            return


def test_a_message_that_was_sent_twice_is_handled_once_and_answered_with_the_first_receipt(
    fence: ragfence.Fence, queue: SqlTransport
) -> None:
    calls: list[str] = []
    results: list[tuple[str, Any]] = []

    def handle(message: Message) -> dict[str, int]:
        calls.append(key(message))
        return {"call": len(calls)}

    queue.send([Envelope(body={"id": "a"}, event_id="e1")] * 5)
    drain(consumer(fence, queue, handle, on_result=lambda m, result, receipt: results.append((result, receipt.result))))
    assert calls == ["a"]
    assert sorted(result for result, _ in results) == ["duplicate"] * 4 + ["new"]
    assert all(receipt == {"call": 1} for _, receipt in results)
    assert queue.depth().visible == queue.depth().in_flight == 0


def test_a_handler_that_fails_is_tried_again_until_its_attempts_are_used_up(
    fence: ragfence.Fence, queue: SqlTransport
) -> None:
    calls: list[int] = []

    def handle(message: Message) -> None:
        calls.append(message.attempt)
        raise ZeroDivisionError("a bug")

    queue.send([Envelope(body={"id": "a"})])
    worker = consumer(fence, queue, handle, max_attempts=3)
    drain(worker)
    assert calls == [1, 2, 3]
    (letter,) = queue.dead_letters()
    assert "given up after 3 attempts" in letter.reason
    assert "ZeroDivisionError" in letter.reason
    assert worker.counts == {"retried": 2, "dead": 1}


def test_a_transient_error_is_handled_later_and_once(fence: ragfence.Fence, queue: SqlTransport) -> None:
    calls: list[int] = []

    def handle(message: Message) -> str:
        calls.append(message.attempt)
        if len(calls) < 3:
            raise StoreUnavailable("away")
        return "done"

    queue.send([Envelope(body={"id": "a"})])
    drain(consumer(fence, queue, handle))
    assert calls == [1, 2, 3]
    assert queue.dead_letters() == []


def test_a_terminal_error_is_sealed_and_every_twin_is_buried_with_the_reason(
    fence: ragfence.Fence, queue: SqlTransport
) -> None:
    calls: list[str] = []

    def handle(message: Message) -> None:
        calls.append(key(message))
        raise TerminalError("no such order")

    queue.send([Envelope(body={"id": "a"})] * 3)
    drain(consumer(fence, queue, handle))
    assert calls == ["a"]
    letters = queue.dead_letters()
    assert len(letters) == 3
    assert all("no such order" in letter.reason for letter in letters)


def test_revisions_one_three_two_end_at_three(fence: ragfence.Fence, queue: SqlTransport) -> None:
    state: dict[str, int] = {}

    def handle(message: Message) -> None:
        state[key(message)] = message.body["version"]

    for version in (1, 3, 2):
        queue.send([Envelope(body={"id": "a", "version": version})])
    worker = consumer(fence, queue, handle, sequence=lambda message: message.body["version"], batch=1)
    drain(worker)
    assert state == {"a": 3}
    assert worker.counts == {"new": 2, "stale": 1}


def test_the_same_key_with_another_body_is_buried_and_not_applied(fence: ragfence.Fence, queue: SqlTransport) -> None:
    calls: list[int] = []
    queue.send([Envelope(body={"id": "a", "amount": 1}), Envelope(body={"id": "a", "amount": 2})])
    drain(consumer(fence, queue, lambda message: calls.append(message.body["amount"]), batch=1))
    assert calls == [1]
    (letter,) = queue.dead_letters()
    assert "CONFLICT" in letter.reason


def test_a_message_without_a_key_is_buried(fence: ragfence.Fence, queue: SqlTransport) -> None:
    queue.send([Envelope(body={"no": "id"}), Envelope(body="text"), Envelope(body={"id": ""})])
    drain(consumer(fence, queue, lambda message: None))
    assert len(queue.dead_letters()) == 3


def test_a_message_whose_key_is_in_flight_elsewhere_is_put_back_without_being_counted(
    fence: ragfence.Fence, queue: SqlTransport
) -> None:
    attempts: list[int] = []
    operation = ragfence.Operation(kind="queue", source_type="orders", source_id="a")
    queue.send([Envelope(body={"id": "a"})])
    worker = consumer(fence, queue, lambda message: attempts.append(message.attempt), max_attempts=2)
    with fence.claim(operation, payload={"id": "a"}) as claim:
        for _ in range(5):
            worker.run_once(1.0)
        assert claim.is_new
        assert attempts == []
        assert worker.counts == {"in_flight": 5}
    drain(worker)
    assert attempts == [1]


def test_what_takes_longer_than_its_visibility_is_not_delivered_to_another(
    fence: ragfence.Fence, queue: SqlTransport
) -> None:
    calls: list[str] = []

    def handle(message: Message) -> None:
        calls.append(key(message))
        time.sleep(2 * queue.visibility_s)

    queue.send([Envelope(body={"id": "a"}), Envelope(body={"id": "b"})])
    first = consumer(fence, queue, handle)
    thread = threading.Thread(target=first.run_once, args=(1.0,))
    thread.start()
    time.sleep(0.5)
    other = consumer(fence, queue, handle)
    give_up_at = time.monotonic() + 3 * queue.visibility_s
    while thread.is_alive() and time.monotonic() < give_up_at:
        # b waits for its turn behind a, and is extended as well.
        assert other.run_once(0.2) == 0
    thread.join()
    assert sorted(calls) == ["a", "b"]
    assert first.counts == {"new": 2}


def test_a_consumer_that_is_stopped_gives_back_what_it_has_not_begun(
    fence: ragfence.Fence, queue: SqlTransport
) -> None:
    entered = threading.Event()
    calls: list[str] = []

    def handle(message: Message) -> None:
        calls.append(key(message))
        entered.set()
        time.sleep(0.3)

    queue.send([Envelope(body={"id": str(number)}) for number in range(5)])
    worker = consumer(fence, queue, handle, batch=5, wait_s=0.1)
    thread = threading.Thread(target=worker.run)
    thread.start()
    assert entered.wait(10)
    worker.stop()
    thread.join(10)
    assert not thread.is_alive()
    assert len(calls) == 1
    assert worker.counts == {"new": 1, "returned": 4}
    depth = queue.depth()
    assert (depth.visible, depth.in_flight) == (4, 0)
    assert {message.attempt for message in queue.receive(5, 1)} == {1}


def test_an_acknowledgement_that_is_lost_leaves_a_duplicate_and_no_second_effect(
    fence: ragfence.Fence, queue: SqlTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def lost(messages: Any) -> list[bool]:
        raise TransportUnavailable("the reply is lost")

    queue.send([Envelope(body={"id": "a"})])
    worker = consumer(fence, queue, lambda message: calls.append(key(message)))
    monkeypatch.setattr(queue, "ack", lost)
    worker.run_once(1.0)
    monkeypatch.undo()
    time.sleep(queue.visibility_s + 0.2)
    drain(worker)
    assert calls == ["a"]
    assert queue.depth().visible == queue.depth().in_flight == 0


def test_a_visibility_below_the_lease_is_refused(tmp_path: Path, queue: SqlTransport) -> None:
    with (
        ragfence.open(tmp_path / "other", policy=Policy.from_mapping({"lease": {"ttl_s": 30.0}})) as fence,
        pytest.raises(ValidationError, match="less than a lease of 30 s"),
    ):
        consumer(fence, queue, lambda message: None)


def test_tenants_have_fences_of_their_own(tmp_path: Path, queue: SqlTransport) -> None:
    fences = {name: ragfence.open(tmp_path / "store", tenant=name, policy=POLICY) for name in ("acme", "globex")}
    calls: list[str] = []
    queue.send([Envelope(body={"id": "a"}, tenant=name) for name in ("acme", "globex", "acme")])
    drain(Consumer(fences.__getitem__, queue, lambda message: calls.append(message.tenant), key=key, retry=AT_ONCE))
    assert sorted(calls) == ["acme", "globex"]
    for fence in fences.values():
        fence.close()


def test_a_result_that_no_receipt_can_hold_does_not_repeat_the_effect(
    fence: ragfence.Fence, queue: SqlTransport
) -> None:
    calls: list[str] = []

    def handle(message: Message) -> object:
        calls.append(key(message))
        return object()

    queue.send([Envelope(body={"id": "a"})] * 2)
    drain(consumer(fence, queue, handle))
    assert calls == ["a"]


def test_messages_that_are_done_are_acknowledged_in_one_call(
    fence: ragfence.Fence, queue: SqlTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    ack = queue.ack

    def counted(messages: Sequence[Message]) -> list[bool]:
        calls.append(len(messages))
        return ack(messages)

    monkeypatch.setattr(queue, "ack", counted)
    queue.send([Envelope(body={"id": str(number)}) for number in range(20)])
    consumer(fence, queue, lambda message: None, workers=4, batch=20).run_once(1.0)
    assert sum(calls) == 20
    assert len(calls) < 20
    assert queue.depth().visible == queue.depth().in_flight == 0


def test_a_message_that_is_done_is_acknowledged_while_another_is_still_handled(
    fence: ragfence.Fence, queue: SqlTransport
) -> None:
    finish = threading.Event()

    def handle(message: Message) -> None:
        if key(message) == "slow":
            assert finish.wait(20)

    queue.send([Envelope(body={"id": name}) for name in ("slow", "a", "b")])
    worker = consumer(fence, queue, handle, workers=3)
    thread = threading.Thread(target=worker.run_once, args=(1.0,))
    thread.start()
    give_up_at = time.monotonic() + 10
    while worker.counts["new"] < 2 and time.monotonic() < give_up_at:
        time.sleep(0.05)
    depth = queue.depth()
    finish.set()
    thread.join()
    assert depth.visible + depth.in_flight == 1
    assert worker.counts == {"new": 3}


def test_nothing_is_acknowledged_before_it_is_sealed(
    fence: ragfence.Fence, queue: SqlTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    states: list[str] = []
    ack = queue.ack

    def watched(messages: list[Message]) -> list[bool]:
        for message in messages:
            with fence.claim(operation(message), payload=message.body, wait_s=0, verdict=True) as claim:
                states.append(str(claim.decision))
        return ack(messages)

    def operation(message: Message) -> ragfence.Operation:
        return ragfence.Operation(kind="queue", source_type="orders", source_id=key(message))

    monkeypatch.setattr(queue, "ack", watched)
    queue.send([Envelope(body={"id": str(number)}) for number in range(5)])
    drain(consumer(fence, queue, lambda message: None))
    assert states == ["duplicate"] * 5


def test_an_async_handler_runs_in_the_event_loop_of_its_caller(fence: ragfence.Fence, queue: SqlTransport) -> None:
    loops: list[asyncio.AbstractEventLoop] = []
    keys: list[str] = []

    async def handle(message: Message) -> str:
        await asyncio.sleep(0.01)
        loops.append(asyncio.get_running_loop())
        keys.append(ragfence.current_lease().key)
        if len(loops) == 10:
            worker.stop()
        return "done"

    queue.send([Envelope(body={"id": str(number)}) for number in range(10)])
    worker = consumer(fence, queue, handle, workers=5, wait_s=0.1)

    async def main() -> asyncio.AbstractEventLoop:
        await asyncio.wait_for(worker.arun(), 30)
        return asyncio.get_running_loop()

    loop = asyncio.run(main())
    assert set(loops) == {loop}
    assert len(set(keys)) == 10, "the handler has the lease of its message"
    assert worker.counts == {"new": 10}


def test_an_async_handler_needs_no_event_loop_of_the_caller(fence: ragfence.Fence, queue: SqlTransport) -> None:
    results: list[Any] = []

    async def handle(message: Message) -> str:
        await asyncio.sleep(0.01)
        if key(message) == "bad":
            raise TerminalError("no such order")
        return "done"

    queue.send([Envelope(body={"id": "a"}), Envelope(body={"id": "bad"})])
    drain(consumer(fence, queue, handle, on_result=lambda m, result, receipt: results.append((key(m), result))))
    assert sorted(results) == [("a", "new"), ("bad", "dead")]


def test_a_cancelled_async_consumer_finishes_what_it_handles(fence: ragfence.Fence, queue: SqlTransport) -> None:
    finished: list[str] = []

    async def main() -> None:
        entered = asyncio.Event()

        async def handle(message: Message) -> None:
            entered.set()
            await asyncio.sleep(0.3)
            finished.append(key(message))

        worker = consumer(fence, queue, handle, wait_s=0.1)
        task = asyncio.create_task(worker.arun())
        await asyncio.wait_for(entered.wait(), 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert worker.counts == {"new": 1, "returned": 2}

    queue.send([Envelope(body={"id": str(number)}) for number in range(3)])
    asyncio.run(main())
    assert len(finished) == 1
    assert queue.depth().visible == 2


def test_a_fence_store_that_does_not_answer_is_not_the_fault_of_the_message(
    fence: ragfence.Fence, queue: SqlTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: Any, **__: Any) -> Any:
        raise StoreUnavailable("away")

    queue.send([Envelope(body={"id": "a"})])
    worker = consumer(fence, queue, lambda message: None, max_attempts=2)
    monkeypatch.setattr("ragfence.engine.runner.Runner.acquire", away)
    for _ in range(4):
        worker.run_once(1.0)
    assert worker.counts == {"postponed": 4}
    monkeypatch.undo()
    drain(worker)
    assert worker.counts == {"postponed": 4, "new": 1}
    assert queue.dead_letters() == []


def test_a_callback_that_fails_does_not_stop_the_others(fence: ragfence.Fence, queue: SqlTransport) -> None:
    seen: list[str] = []

    def on_result(message: Message, result: str, receipt: object) -> None:
        seen.append(result)
        raise ZeroDivisionError

    queue.send([Envelope(body={"id": str(number)}) for number in range(5)])
    drain(consumer(fence, queue, lambda message: None, on_result=on_result))
    assert seen == ["new"] * 5
    assert queue.depth().in_flight == 0


def test_rows_have_what_the_message_says_of_itself(fence: ragfence.Fence, queue: SqlTransport) -> None:
    queue.send(
        [
            Envelope(
                body={"id": "a"},
                event_id="e-1",
                source_id="a",
                revision="r-1",
                index_hash="ab" * 32,
                dedupe_key="k-1",
                route="webhooks/cms",
            )
        ]
    )
    worker = consumer(fence, queue, lambda message: None, key=lambda message: (message.source_id, message.revision))
    drain(worker)
    (row,) = [row for row in fence.audit.decisions(since="1h").to_pylist() if row["phase"] == "seal"]
    names = ("event_id", "source_id", "revision", "index_hash", "correlation_id", "attempt", "tenant", "route")
    assert [row[name] for name in names] == ["e-1", "a", "r-1", "ab" * 32, "k-1", 1, "default", "webhooks/cms"]


def test_what_a_claim_inside_the_handler_raises_is_a_failure_of_the_handler(
    fence: ragfence.Fence, queue: SqlTransport
) -> None:
    other = fence.once(kind="payment", key=lambda order: order)(lambda order: {"paid": order})("o-1")
    errors = iter([FencedOut("taken over", key=other.key, receipt=other), SystemExit(3), asyncio.CancelledError()])
    calls: list[int] = []

    def handle(message: Message) -> str:
        calls.append(message.attempt)
        for error in errors:
            raise error
        return "done"

    running = consumer(fence, queue, handle)
    queue.send([Envelope(body={"id": "a"})])
    drain(running)
    assert calls == [1, 2, 3, 4]
    assert running.counts == {"retried": 3, "new": 1}


@pytest.mark.parametrize(
    "body",
    [
        '{"id": "a", "x": NaN}',
        '{"id": "a", "x": "\\ud800"}',
        '{"id": "a", "x": 1e999}',
        f'{{"id": "a", "x": {"9" * 400}}}',
        f'{{"id": "a", "x": {"[" * 900}{"]" * 900}}}',
        "[" * 100_000 + "]" * 100_000,
        '{"id": "a", "version": "second"}',
        '{"id": "\\ud800", "refuse": true}',
    ],
)
def test_a_hostile_message_becomes_a_dead_letter_and_holds_up_no_other(
    fence: ragfence.Fence, queue: SqlTransport, body: str
) -> None:
    queue.send([Envelope(body={"id": "hostile"}, event_id="hostile"), Envelope(body={"id": "b"}, event_id="good")])
    with queue._engine.begin() as tx:  # as another program may have written it
        tx.execute(sa.update(messages).where(messages.c.event_id == "hostile").values(body=body))
    handled: list[str] = []

    def handle(message: Message) -> None:
        if message.body.get("refuse"):
            raise TerminalError(f"refused: {message.body['id']}\0")
        handled.append(message.event_id)

    def name(message: Message) -> str:
        return "refused" if message.body.get("refuse") else key(message)

    drain(consumer(fence, queue, handle, key=name, sequence=lambda message: int(message.body.get("version", 1))))
    assert handled == ["good"]
    (letter,) = queue.dead_letters()
    assert letter.message.event_id == "hostile"
    assert letter.reason
    assert queue.depth().in_flight == 0


def test_a_store_that_cannot_be_opened_for_a_tenant_is_not_the_fault_of_its_messages(
    fence: ragfence.Fence, queue: SqlTransport
) -> None:
    outages = iter(range(7))

    def opened(tenant: str) -> ragfence.Fence:
        if next(outages, None) is not None:
            raise StoreUnavailable("away")
        return fence

    running = Consumer(opened, queue, lambda message: None, key=key, retry=AT_ONCE)
    queue.send([Envelope(body={"id": "a"})])
    drain(running)
    assert running.counts == {"postponed": 7, "new": 1}
