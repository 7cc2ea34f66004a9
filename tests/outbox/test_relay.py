"""What goes wrong around a relay: kills, outages, events that cannot be sent, tables with very many events."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

import ragfence
from ragfence import Policy
from ragfence.core.backoff import Backoff
from ragfence.errors import FencedOut, TerminalError, TransportUnavailable, ValidationError
from ragfence.outbox import Outbox, Relay
from ragfence.outbox import relay as relay_module
from ragfence.outbox.outbox import OutboxRow, outbox_table
from ragfence.queues.sql import SqlTransport, open_engine
from ragfence.queues.transport import Envelope
from tests.outbox.conftest import add

AT_ONCE = Backoff(attempts=100, first_s=0.0, longest_s=0.0)
MANY = 20_000


def numbers(rows: Sequence[OutboxRow]) -> list[int]:
    return [row.payload["number"] for row in rows]


def worker(outbox: Outbox, file: Path, point: str) -> subprocess.Popen[bytes]:
    url = outbox.engine.url.render_as_string(hide_password=False)
    return subprocess.Popen(
        [sys.executable, "-m", "tests.outbox.relay_worker", url, str(file), point],
        stdout=subprocess.DEVNULL,
    )


def test_a_relay_that_is_killed_between_publishing_and_marking_publishes_again_with_the_same_ids(
    outbox: Outbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [add(outbox, "ab"[number % 2], number) for number in range(4)]
    file = tmp_path / "published"
    killed = worker(outbox, file, "after_publish")
    assert killed.wait(60) == -9
    assert sorted(line.split()[2] for line in file.read_text().splitlines()) == sorted(ids)
    assert outbox.status().pending == 4
    if outbox.engine.dialect.name == "sqlite":  # its lease would last half a minute
        with outbox.engine.begin() as tx:
            tx.execute(sa.update(relay_module.leases).values(until_ms=0))
    sent: list[OutboxRow] = []
    assert Relay(outbox, to=sent.append).run_once().sent == 4
    assert [row.event_id for row in sent] == ids
    assert outbox.status().pending == 0


def test_while_a_relay_stands_still_another_leaves_its_keys_alone(outbox: Outbox, tmp_path: Path) -> None:
    first = add(outbox, "a", 1)
    frozen = worker(outbox, tmp_path / "published", "freeze")
    try:
        deadline = threading.Event()
        while not (tmp_path / "published").exists():
            assert not deadline.wait(0.05)
            assert frozen.poll() is None
        later = add(outbox, "b", 2)
        sent: list[OutboxRow] = []
        Relay(outbox, to=sent.append).run_once()
        assert first not in [row.event_id for row in sent]
        if outbox.engine.dialect.name == "postgresql":
            assert [row.event_id for row in sent] == [later]
    finally:
        frozen.kill()
        frozen.wait()


def test_of_relays_that_find_an_expired_lease_one_gets_it(tmp_path: Path) -> None:
    """With an engine of SQLAlchemy as it comes, which begins transactions late."""
    outbox = Outbox(sa.create_engine(f"sqlite:///{tmp_path / 'app.db'}", connect_args={"timeout": 30}))
    for _ in range(10):
        relays: list[Any] = [Relay(outbox, to=print) for _ in range(4)]
        with outbox.engine.begin() as tx:
            tx.execute(sa.update(relay_module.leases).values(until_ms=0))
        start, held = threading.Barrier(4), []

        def take(relay: Any, start: threading.Barrier = start, held: list[bool] = held) -> None:
            start.wait()
            held.append(outbox.run("take", relay._hold_lease))

        threads = [threading.Thread(target=take, args=(relay,)) for relay in relays]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(held) == [False, False, False, True]


def test_a_relay_that_lost_its_lease_publishes_no_more_of_its_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox = Outbox(open_engine(f"sqlite:///{tmp_path / 'app.db'}"))
    for number in range(3):
        add(outbox, "a", number)
    sent: list[OutboxRow] = []

    def send(row: OutboxRow) -> None:
        sent.append(row)
        slow._renew_at = 0.0  # as if it had taken ten seconds
        with outbox.engine.begin() as tx:
            tx.execute(sa.update(relay_module.leases).values(owner="another"))

    slow = Relay(outbox, to=send)
    assert slow.run_once().sent == 1
    assert numbers(sent) == [0]
    assert outbox.status().pending == 2


def test_an_outage_of_the_queue_kills_no_event(outbox: Outbox) -> None:
    add(outbox, "a", 1)

    class Away:
        def send(self, envelopes: Sequence[Envelope], *, delay_s: float = 0.0) -> list[str]:
            raise TransportUnavailable("away")

    queue: Any = Away()
    relay = Relay(outbox, to=queue, retry=AT_ONCE, max_attempts=2)
    for _ in range(6):
        assert relay.run_once() == (0, 1, 0)
    assert outbox.status()[:2] == (1, 0)


def test_an_event_that_the_queue_refuses_does_not_hold_up_the_others(outbox: Outbox) -> None:
    for number in range(6):
        add(outbox, "ab"[number % 2], number)

    class Picky(SqlTransport):
        def send(self, envelopes: Sequence[Envelope], *, delay_s: float = 0.0) -> list[str]:
            if any(each.body["number"] == 2 for each in envelopes):
                raise ValidationError("too large for this queue")
            return super().send(envelopes, delay_s=delay_s)

    queue = Picky(outbox.engine, "picky")
    relay = Relay(outbox, to=queue, retry=AT_ONCE)
    assert relay.run_once() == (4, 1, 1)  # 4 waits for 2, which is dead
    received: list[int] = []
    while messages := queue.receive(10, 0):  # of each key one at a time
        received += [message.body["number"] for message in messages]
        queue.ack(messages)
    assert sorted(received) == [0, 1, 3, 5]
    assert [row.payload["number"] for row in outbox.dead()] == [2]


def test_long_topics_and_keys_fit_into_the_group_of_a_queue(outbox: Outbox) -> None:
    add(outbox, "k" * 255, 1, "t" * 255)
    queue = SqlTransport(outbox.engine, "long")
    assert Relay(outbox, to=queue).run_once().sent == 1
    (message,) = queue.receive(1, 0)
    assert 0 < len(message.group) <= 128


def test_an_event_that_failed_for_good_is_dead_at_once_and_runs_again_when_it_is_revived(
    outbox: Outbox, tmp_path: Path
) -> None:
    event_id = add(outbox, "a", 1)
    broken, calls = True, []

    def send(row: OutboxRow) -> None:
        calls.append(row.event_id)
        if broken:
            raise TerminalError("no such customer")

    with ragfence.open(tmp_path / "store") as fence:
        relay = Relay(outbox, to=send, fence=fence, retry=AT_ONCE)
        assert relay.run_once() == (0, 0, 1)
        assert "no such customer" in outbox.dead()[0].error
        broken = False
        outbox.revive([event_id])
        assert relay.run_once() == (1, 0, 0)
    assert calls == [event_id] * 2


def test_a_key_in_quarantine_is_dead_with_its_own_error_and_released_when_it_is_revived(
    outbox: Outbox, tmp_path: Path
) -> None:
    event_id = add(outbox, "a", 1)
    broken = True

    def send(row: OutboxRow) -> None:
        if broken:
            raise OSError("the disk is full")

    with ragfence.open(tmp_path / "store", policy=Policy(lease={"max_attempts": 2})) as fence:
        relay = Relay(outbox, to=send, fence=fence, retry=AT_ONCE)
        assert [relay.run_once().dead for _ in range(3)] == [0, 0, 1]
        assert "the disk is full" in outbox.dead()[0].error
        broken = False
        outbox.revive([event_id])
        assert relay.run_once().sent == 1


def test_an_event_that_another_relay_is_sending_waits_without_losing_an_attempt(outbox: Outbox, tmp_path: Path) -> None:
    event_id = add(outbox, "a", 1)
    operation = ragfence.Operation(kind="outbox", source_type="orders", source_id=event_id)
    with ragfence.open(tmp_path / "store") as fence:
        relay = Relay(outbox, to=lambda row: None, fence=fence, retry=AT_ONCE, max_attempts=1)
        with fence.claim(operation, payload={"number": 1}) as op:
            with ThreadPoolExecutor(1) as other:
                assert other.submit(relay.run_once).result() == (0, 1, 0)
            op.seal()
        assert relay.run_once().sent == 1


def test_a_dead_event_blocks_its_key_also_if_an_older_one_appears_later(outbox: Outbox) -> None:
    """Ids are given when rows are written, not when they are committed."""
    table = outbox.table
    dead = add(outbox, "a", 2)
    add(outbox, "a", 3)
    with outbox.engine.begin() as tx:
        tx.execute(sa.update(table).where(table.c.event_id == dead).values(state="dead"))
        outbox.add(tx, topic="orders", key="a", payload={"number": 1})
        tx.execute(sa.update(table).where(table.c.payload == '{"number":1}').values(id=-1))
    sent: list[OutboxRow] = []
    relay = Relay(outbox, to=sent.append)
    for _ in range(3):
        relay.run_once()
    assert numbers(sent) == [1]


def test_an_event_behind_many_blocked_ones_is_found(outbox: Outbox) -> None:
    add(outbox, "a", 0)
    _fill(outbox, 3_000, key="a")
    add(outbox, "b", 1)
    sent: list[OutboxRow] = []

    def send(row: OutboxRow) -> None:
        if row.key == "a":
            raise TerminalError("never")
        sent.append(row)

    relay = Relay(outbox, to=send, batch=10)
    for _ in range(3):
        relay.run_once()
    assert numbers(sent) == [1]


def test_the_policy_says_how_often_and_how_long(outbox: Outbox, tmp_path: Path) -> None:
    def send(row: OutboxRow) -> None:
        raise OSError("away")

    add(outbox, "a", 1)
    policy = Policy(outbox={"max_attempts": 2, "keep_days": 0.5})
    with ragfence.open(tmp_path / "store", policy=policy) as fence:
        relay = Relay(outbox, to=send, fence=fence, retry=AT_ONCE)
        assert [relay.run_once().dead for _ in range(2)] == [0, 1]
        assert relay._keep_days == 0.5


def test_run_deletes_what_was_sent_long_ago_and_ends_when_it_is_asked_to(outbox: Outbox) -> None:
    add(outbox, "a", 1)
    Relay(outbox, to=lambda row: None).run_once()
    with outbox.engine.begin() as tx:
        tx.execute(sa.update(outbox.table).values(next_ms=1, sent_ms=1))
    add(outbox, "a", 2)
    relay = Relay(outbox, to=lambda row: relay.stop(), pause_s=0.01)
    running = threading.Thread(target=relay.run)
    running.start()
    running.join(60)
    assert not running.is_alive()
    with outbox.engine.connect() as connection:
        assert connection.scalar(sa.select(sa.func.count()).select_from(outbox.table)) == 1


def test_rounds_are_reported(outbox: Outbox) -> None:
    reports: list[Any] = []
    relay = Relay(outbox, to=lambda row: None, on_round=reports.append)
    relay.run_once()
    add(outbox, "a", 1)
    relay.run_once()
    assert reports == [(1, 0, 0)]


def test_a_table_in_a_schema(engine: sa.Engine) -> None:
    if engine.dialect.name == "sqlite":
        pytest.skip("SQLite has no schemas")
    with engine.begin() as tx:
        tx.execute(sa.text("DROP SCHEMA IF EXISTS shop CASCADE"))
        tx.execute(sa.text("CREATE SCHEMA shop"))
    outbox = Outbox(engine, table=outbox_table(sa.MetaData(), "events", schema="shop"))
    add(outbox, "a", 1)
    sent: list[OutboxRow] = []
    Relay(outbox, to=sent.append).run_once()
    assert numbers(sent) == [1]
    assert outbox.audit("SELECT 'b'", topic="orders") == ["b"]
    assert outbox.rebuild(["b"], lambda key: {}, topic="orders") == 1
    with engine.connect() as connection:
        assert connection.scalar(sa.text("SELECT count(*) FROM shop.events")) == 2


@pytest.mark.parametrize("pick", [lambda e: e, lambda e: "tx", lambda e: None], ids=["engine", "text", "none"])
def test_what_is_not_a_transaction_is_refused(outbox: Outbox, pick: Callable[[sa.Engine], Any]) -> None:
    with pytest.raises(ValidationError, match="not a transaction"):
        outbox.add(pick(outbox.engine), topic="t", key="k", payload=1)


def test_a_session_of_several_engines_is_refused_with_a_way_out(outbox: Outbox) -> None:
    with Session(binds={outbox.table: outbox.engine}) as session, pytest.raises(ValidationError, match="several"):
        outbox.add(session, topic="t", key="k", payload=1)


@pytest.mark.parametrize("query", ["SELECT nothing FROM nowhere", "SELEC", "SELECT :missing", ""])
def test_a_query_that_the_database_refuses_is_the_callers_mistake(outbox: Outbox, query: str) -> None:
    with pytest.raises(ValidationError):
        outbox.audit(query, topic="orders")


def test_an_audit_writes_nothing_and_holds_up_nobody(outbox: Outbox) -> None:
    with pytest.raises((ValidationError, TransportUnavailable)):
        outbox.audit("DELETE FROM orders RETURNING id", topic="orders")
    with outbox.engine.begin() as tx:
        tx.execute(sa.text("INSERT INTO orders VALUES (1), (2)"))
        assert outbox.audit("SELECT 1", topic="orders") == ["1"]  # while another transaction is writing
    assert outbox.audit("SELECT id FROM orders ORDER BY id", topic="orders", limit=1) == ["1"]


def test_two_processes_that_rebuild_at_once_add_one_event(outbox: Outbox) -> None:
    start = threading.Barrier(4)
    added: list[int] = []

    def rebuild() -> None:
        start.wait()
        added.append(outbox.rebuild(["1", "2"], lambda key: {}, topic="orders"))

    threads = [threading.Thread(target=rebuild) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(added) == 2
    assert outbox.status().pending == 2


@pytest.mark.parametrize("values", [{"topic": "a\0b"}, {"key": "\ud800"}, {"event_id": "x" * 37}])
def test_what_no_column_can_hold_is_refused(outbox: Outbox, values: dict[str, str]) -> None:
    with pytest.raises(ValidationError), outbox.engine.begin() as tx:
        outbox.add(tx, **{"topic": "t", "key": "k", **values}, payload=1)


def _fill(outbox: Outbox, count: int, *, key: str = "", state: str = "pending") -> None:
    table = outbox.table
    row = {"topic": "orders", "payload": '{"number":0}', "attempts": 0, "created_ms": 1, "next_ms": 1, "state": state}
    if state == "sent":
        row["next_ms"] = 2**42
    with outbox.engine.begin() as tx:
        for first in range(0, count, 10_000):
            rows = [
                {**row, "event_id": f"{state}-{first}-{at}", "key": key or f"k{at % 997}", "sent_ms": 1}
                for at in range(min(10_000, count - first))
            ]
            tx.execute(sa.insert(table), rows)


def _plan_of(outbox: Outbox, statement: str, parameters: Any) -> str:
    with outbox.engine.connect() as connection:
        return "\n".join(row[0] for row in connection.exec_driver_sql(f"EXPLAIN ANALYZE {statement}", parameters))


def test_the_turn_of_a_relay_scans_no_row_that_was_sent(engine: sa.Engine) -> None:
    """Every statement of a turn and of the purge is planned by PostgreSQL with the statistics of a large table."""
    if engine.dialect.name != "postgresql":
        pytest.skip("the plan of PostgreSQL")
    outbox = Outbox(engine)
    _fill(outbox, MANY, state="sent")
    for number in range(50):
        add(outbox, f"k{number % 7}", number)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("ANALYZE ragfence_outbox")
    seen: list[tuple[str, Any]] = []

    def note(connection: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        seen.append((statement, parameters))

    sa.event.listen(engine, "before_cursor_execute", note)
    Relay(outbox, to=lambda row: None).run_once()
    outbox.purge(keep_days=3650)
    outbox.audit("SELECT 'k' || n FROM generate_series(1, 500) n", topic="orders")
    sa.event.remove(engine, "before_cursor_execute", note)
    turns = [(text, given) for text, given in seen if "ragfence_outbox" in text]
    assert len(turns) >= 4
    for statement, given in turns:
        if "AS older" in statement or "count(*)" in statement or "asked" in statement or "LIMIT" in statement:
            plan = _plan_of(outbox, statement, given)
            assert "Seq Scan" not in plan, plan


def test_what_a_claim_inside_the_function_raises_does_not_mark_the_event_as_sent(
    outbox: Outbox, tmp_path: Path
) -> None:
    add(outbox, "a", 1)
    with ragfence.open(tmp_path / "store") as fence:
        other = fence.once(kind="payment", key=lambda order: order)(lambda order: {"paid": order})("o-1")
        errors = iter([FencedOut("taken over", key=other.key, receipt=other)])
        calls: list[str] = []

        def send(row: OutboxRow) -> None:
            for error in errors:
                raise error
            calls.append(row.event_id)

        relay = Relay(outbox, to=send, fence=fence, retry=AT_ONCE)
        assert relay.run_once() == (0, 1, 0)
        assert relay.run_once() == (1, 0, 0)
    assert len(calls) == 1
