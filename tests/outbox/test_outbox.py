"""An event is there if and only if its business rows are; it is sent at least once, in order per key."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

import ragfence
from ragfence.core.backoff import Backoff
from ragfence.errors import Conflict, ValidationError
from ragfence.outbox import Inbox, Outbox, Relay
from ragfence.outbox.outbox import OutboxRow
from ragfence.queues.consumer import Consumer
from ragfence.queues.sql import SqlTransport
from tests.outbox.conftest import add, orders

AT_ONCE = Backoff(attempts=100, first_s=0.0, longest_s=0.0)


def relayed(relay: Relay, rounds: int = 10) -> tuple[int, int, int]:
    reports = [relay.run_once() for _ in range(rounds)]
    return sum(r.sent for r in reports), sum(r.failed for r in reports), sum(r.dead for r in reports)


def test_an_event_is_there_if_and_only_if_its_business_row_is(outbox: Outbox) -> None:
    with outbox.engine.begin() as tx:
        tx.execute(orders.insert().values(id=1))
        outbox.add(tx, topic="orders", key="1", payload={"id": 1})
    with pytest.raises(ZeroDivisionError), outbox.engine.begin() as tx:  # noqa: PT012  # the transaction is what fails
        tx.execute(orders.insert().values(id=2))
        outbox.add(tx, topic="orders", key="2", payload={"id": 2})
        raise ZeroDivisionError
    assert outbox.status().pending == 1
    sent: list[OutboxRow] = []
    assert relayed(Relay(outbox, to=sent.append)) == (1, 0, 0)
    assert [(row.key, row.payload) for row in sent] == [("1", {"id": 1})]


def test_a_session_of_the_orm_is_a_transaction_too(outbox: Outbox) -> None:
    with Session(outbox.engine) as session, session.begin():
        outbox.add(session, topic="orders", key="1", payload=None)
    assert outbox.status().pending == 1


def test_events_of_a_key_are_sent_in_their_order(outbox: Outbox) -> None:
    for number in range(30):
        add(outbox, "ab"[number % 2], number)
    sent: list[OutboxRow] = []
    relayed(Relay(outbox, to=sent.append, batch=7))
    for key in "ab":
        numbers = [row.payload["number"] for row in sent if row.key == key]
        assert numbers == sorted(numbers)
    assert len(sent) == 30


def test_after_a_failure_nothing_more_of_its_key_is_sent_and_everything_of_others(outbox: Outbox) -> None:
    for number in range(6):
        add(outbox, "ab"[number % 2], number)
    sent: list[int] = []
    broken = True

    def send(row: OutboxRow) -> None:
        if broken and row.payload["number"] == 2:
            raise OSError("away")
        sent.append(row.payload["number"])

    relay = Relay(outbox, to=send, retry=AT_ONCE)
    relay.run_once()
    assert sorted(sent) == [0, 1, 3, 5]
    broken = False
    relayed(relay)
    assert sent[-2:] == [2, 4]


def test_a_dead_event_blocks_its_key_until_somebody_decides(outbox: Outbox) -> None:
    first, second = add(outbox, "a", 1), add(outbox, "a", 2)
    sent: list[str] = []
    broken = True

    def send(row: OutboxRow) -> None:
        if broken and row.event_id == first:
            raise OSError("away")
        sent.append(row.event_id)

    relay = Relay(outbox, to=send, retry=AT_ONCE, max_attempts=3)
    assert relayed(relay)[2] == 1
    assert sent == []
    (dead,) = outbox.dead()
    assert (dead.event_id, dead.attempts) == (first, 3)
    assert "away" in dead.error
    assert (outbox.status().pending, outbox.status().dead) == (1, 1)
    broken = False
    assert outbox.revive([first, second]) == 1
    relayed(relay)
    assert sent == [first, second]


def test_a_dead_event_that_is_dropped_lets_the_others_go_on(outbox: Outbox) -> None:
    first, second = add(outbox, "a", 1), add(outbox, "a", 2)
    sent: list[str] = []

    def send(row: OutboxRow) -> None:
        if row.event_id == first:
            raise OSError("away")
        sent.append(row.event_id)

    relay = Relay(outbox, to=send, retry=AT_ONCE, max_attempts=1)
    relayed(relay)
    assert outbox.drop([first]) == 1
    relayed(relay)
    assert sent == [second]


def test_several_relays_at_once_keep_the_order_and_send_nothing_twice(outbox: Outbox) -> None:
    for number in range(120):
        add(outbox, "abcde"[number % 5], number)
    sent: list[OutboxRow] = []
    lock = threading.Lock()

    def send(row: OutboxRow) -> None:
        with lock:
            sent.append(row)

    def run() -> None:
        relay = Relay(outbox, to=send, batch=4)
        for _ in range(200):
            relay.run_once()
            if outbox.status().pending == 0:
                break
        relay._give_up_lease()

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    Relay(outbox, to=send).run_once()
    for key in "abcde":
        numbers = [row.payload["number"] for row in sent if row.key == key]
        assert numbers == sorted(set(numbers))
    assert len(sent) == 120


def test_a_relay_for_one_topic_leaves_the_others_alone(outbox: Outbox) -> None:
    add(outbox, "a", 1, "orders")
    add(outbox, "a", 2, "invoices")
    sent: list[str] = []
    relayed(Relay(outbox, to=lambda row: sent.append(row.topic), topic="invoices"))
    assert sent == ["invoices"]


def test_what_was_published_and_not_marked_is_published_again_and_takes_effect_once(
    outbox: Outbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = SqlTransport(outbox.engine, "events", visibility_s=60)
    event_id = add(outbox, "a", 1)
    relay = Relay(outbox, to=queue)

    def dies(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(relay, "_mark", dies)
    with pytest.raises(KeyboardInterrupt):
        relay.run_once()
    monkeypatch.undo()
    relayed(relay)
    calls: list[str] = []
    with ragfence.open(tmp_path / "store") as fence:
        consumer = Consumer(fence, queue, lambda m: calls.append(m.event_id), key=lambda m: m.dedupe_key)
        for _ in range(4):
            consumer.run_once()
    assert calls == [event_id]
    assert consumer.counts == {"new": 1, "duplicate": 1}


def test_a_function_is_called_once_per_event_if_there_is_a_fence(
    outbox: Outbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(outbox, "a", 1)
    calls: list[str] = []
    with ragfence.open(tmp_path / "store") as fence:
        relay = Relay(outbox, to=lambda row: calls.append(row.event_id), fence=fence)

        def dies(*_: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(relay, "_mark", dies)
        with pytest.raises(KeyboardInterrupt):
            relay.run_once()
        monkeypatch.undo()
        assert relayed(relay)[0] == 1
    assert len(calls) == 1


def test_business_rows_without_an_event_are_named_and_their_events_made(outbox: Outbox) -> None:
    with outbox.engine.begin() as tx:
        for number in range(3):
            tx.execute(orders.insert().values(id=number))
        outbox.add(tx, topic="orders", key="1", payload={"id": 1})
    missing = outbox.audit("SELECT id FROM orders ORDER BY id", topic="orders")
    assert missing == ["0", "2"]
    assert outbox.rebuild(missing, lambda key: {"id": int(key)}, topic="orders") == 2
    assert outbox.audit(sa.select(orders.c.id), topic="orders") == []


def test_events_that_were_sent_are_forgotten_after_their_time(outbox: Outbox) -> None:
    add(outbox, "a", 1)
    relayed(Relay(outbox, to=lambda row: None))
    add(outbox, "a", 2)
    assert outbox.purge(keep_days=1) == 0
    assert outbox.purge(keep_days=-1) == 1
    assert outbox.status().pending == 1


@pytest.mark.parametrize(("topic", "key", "payload"), [("", "a", 1), ("t", "", 1), ("t", "a", object())])
def test_an_event_that_cannot_be_sent_is_refused_at_once(outbox: Outbox, topic: str, key: str, payload: object) -> None:
    with pytest.raises(ValidationError), outbox.engine.begin() as tx:
        outbox.add(tx, topic=topic, key=key, payload=payload)


def test_an_inbox_knows_what_was_applied_and_only_that(engine: sa.Engine) -> None:
    inbox = Inbox(engine)
    with pytest.raises(ZeroDivisionError), engine.begin() as tx:  # noqa: PT012
        assert inbox.first(tx, "e1", payload={"a": 1})
        raise ZeroDivisionError
    for expected in (True, False, False):
        with engine.begin() as tx:
            assert inbox.first(tx, "e1", payload={"a": 1}) is expected
    with engine.begin() as tx:
        assert inbox.first(tx, "e1", source="other", payload={"a": 1})
    with pytest.raises(Conflict), engine.begin() as tx:
        inbox.first(tx, "e1", payload={"a": 2})
    assert inbox.purge(keep_days=1) == 0
    assert inbox.purge(keep_days=-1) == 2


def test_of_transactions_that_apply_the_same_event_one_is_the_first(engine: sa.Engine) -> None:
    inbox = Inbox(engine)
    firsts: list[bool] = []
    start = threading.Barrier(6)

    def apply() -> None:
        start.wait()
        with engine.begin() as tx:
            firsts.append(inbox.first(tx, "e1"))

    threads = [threading.Thread(target=apply) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(firsts) == [False] * 5 + [True]
