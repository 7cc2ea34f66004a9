"""A relay dies between publishing and marking; two relays at once: nothing lost, in order per key, one effect each."""

from __future__ import annotations

import contextlib
import signal
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import sqlalchemy as sa

import ragfence
from ragfence.errors import PolicyError
from ragfence.outbox import Outbox, Relay
from ragfence.outbox.outbox import OutboxRow
from ragfence.outbox.relay import leases
from ragfence.queues import Consumer, Message, open_transport
from ragfence.queues.sql import open_engine
from tests.acceptance.forks import end, fork, wait_ended, wait_frozen, wake
from tests.outbox.crash_worker import RelayJob, relay_all
from tests.servers import RedisServer
from tests.servers.postgres import postgres

pytestmark = pytest.mark.xdist_group("postgres")

KEYS = ("a", "b", "c", "d", "e")
EACH = 12
EVENTS = [(key, number) for number in range(EACH) for key in KEYS]


@pytest.fixture(scope="module")
def postgres_url() -> Iterator[str]:
    with postgres() as url:
        yield url


@pytest.fixture(params=["postgres", "sqlite"])
def job(request: pytest.FixtureRequest, tmp_path: Path, valkey_server: RedisServer) -> RelayJob:
    on_postgres = request.param == "postgres"
    database = request.getfixturevalue("postgres_url") if on_postgres else f"sqlite:///{tmp_path / 'app.db'}"
    made = RelayJob(
        database=database,
        published=str(tmp_path / "published"),
        queue=f"{valkey_server.url}?queue={uuid.uuid4().hex}",
        expected=len(EVENTS),
    )
    engine = open_engine(database)
    outbox = Outbox(engine)
    with engine.begin() as tx:
        tx.execute(sa.delete(outbox.table))
    for key, number in EVENTS:
        with engine.begin() as tx:
            outbox.add(tx, topic="t", key=key, payload={"key": key, "number": number}, event_id=uuid.uuid4().hex)
    engine.dispose()
    return made


@contextlib.contextmanager
def running(job: RelayJob, strike: str = "") -> Iterator[BaseProcess]:
    process = fork(relay_all, replace(job, strike=strike))
    try:
        yield process
    finally:
        end(process)


def relay_the_rest(job: RelayJob) -> None:
    expire_the_lease_of_sqlite(job)
    with running(job) as process:
        assert wait_ended(process) == 0


def kill_a_relay(job: RelayJob) -> None:
    with running(job, "kill") as process:
        assert wait_ended(process) == -signal.SIGKILL


def expire_the_lease_of_sqlite(job: RelayJob) -> None:
    """Its lease is half a minute; a test need not wait for it."""
    if job.database.startswith("sqlite"):
        engine = open_engine(job.database)
        with engine.begin() as tx:
            tx.execute(sa.update(leases).values(until_ms=0))
        engine.dispose()


def published(job: RelayJob) -> list[tuple[str, int]]:
    lines = Path(job.published).read_text().splitlines()
    return [(key, int(number)) for _, key, number in (line.split() for line in lines)]


def applied(job: RelayJob, folder: Path) -> list[tuple[str, int]]:
    """What a consumer of the queue does with it: the effects, in their order."""
    effects: list[tuple[str, int]] = []
    queue = open_transport(job.queue, visibility_s=60)

    def handle(message: Message) -> None:
        effects.append((message.body["key"], message.body["number"]))

    with ragfence.open(folder / "consumer") as fence:
        consumer = Consumer(fence, queue, handle, key=lambda message: message.event_id)
        while consumer.run_once(0.3):
            pass
    depth = queue.depth()
    queue.close()
    assert (depth.visible, depth.in_flight, depth.dead) == (0, 0, 0)
    return effects


def check_each_once_and_in_order(effects: list[tuple[str, int]]) -> None:
    assert Counter(effects) == Counter(EVENTS)
    for key in KEYS:
        assert [number for each, number in effects if each == key] == list(range(EACH))


def test_a_relay_that_is_killed_between_publishing_and_marking_publishes_again_and_the_consumer_applies_once(
    job: RelayJob, tmp_path: Path
) -> None:
    kill_a_relay(job)
    before = published(job)
    relay_the_rest(job)
    twice = {event for event, times in Counter(published(job)).items() if times > 1}
    assert twice  # or it was not killed where it should be
    assert twice <= set(before)
    check_each_once_and_in_order(applied(job, tmp_path))


def test_two_relays_at_once_publish_everything_in_order(job: RelayJob, tmp_path: Path) -> None:
    job = replace(job, batch=3)
    with running(job) as one, running(job) as other:
        assert [wait_ended(one), wait_ended(other)] == [0, 0]
    assert Counter(published(job)) == Counter(EVENTS)  # nobody died, so nothing is published twice
    check_each_once_and_in_order(applied(job, tmp_path))


def test_one_of_two_relays_is_killed_and_the_order_stays(job: RelayJob, tmp_path: Path) -> None:
    job = replace(job, batch=3)
    with running(job, "kill") as killed, running(job) as other:
        code = wait_ended(killed)
        expire_the_lease_of_sqlite(job)
        assert wait_ended(other) == 0
    assert code in (0, -signal.SIGKILL)  # the other one may have been done first
    check_each_once_and_in_order(applied(job, tmp_path))


def test_a_relay_that_is_frozen_between_publishing_and_marking_does_not_block_the_others(
    job: RelayJob, tmp_path: Path
) -> None:
    with running(job, "freeze") as frozen:
        wait_frozen(frozen)
        relay_the_rest(job)
        wake(frozen)
        assert wait_ended(frozen) == 0
    check_each_once_and_in_order(applied(job, tmp_path))


def test_a_batch_that_takes_longer_than_one_call_may_is_not_interrupted(postgres_url: str) -> None:
    engine = open_engine(postgres_url)
    outbox = Outbox(engine)
    with engine.begin() as tx:
        tx.execute(sa.delete(outbox.table))
        for number in range(6):
            outbox.add(tx, topic="slow", key="k", payload={"number": number})
    seen: list[int] = []

    def slowly(row: OutboxRow) -> None:
        seen.append(row.payload["number"])
        time.sleep(0.5)

    assert Relay(outbox, to=slowly, call_s=2.0).run_once().sent == 6
    assert seen == list(range(6))
    engine.dispose()


def test_a_call_that_may_take_no_time_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="call_s"):
        Relay(Outbox(f"sqlite:///{tmp_path / 'app.db'}"), to=print, call_s=0)


def test_a_function_under_a_fence_runs_once_per_event_though_its_relay_died(
    job: RelayJob, tmp_path: Path, valkey_server: RedisServer
) -> None:
    """Killed in the call of the third event: two are sealed, and not marked."""
    with valkey_server.client() as client:
        client.flushall()
    job = replace(job, queue="", store=valkey_server.url, objects=str(tmp_path / "objects"))
    kill_a_relay(job)
    interrupted = published(job)[-1]
    time.sleep(2.0)  # two leases
    relay_the_rest(job)
    times = Counter(published(job))
    assert times.pop(interrupted) == 2  # its outcome was not known
    assert set(times.values()) == {1}
    assert len(times) == len(EVENTS) - 1
