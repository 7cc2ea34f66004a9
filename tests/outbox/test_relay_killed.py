"""A relay dies between publishing and marking; two relays at once: nothing lost, in order per key, one effect each."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa

import ragfence
from ragfence.outbox import Outbox
from ragfence.outbox.relay import leases
from ragfence.queues import Consumer, Message, open_transport
from ragfence.queues.sql import open_engine
from tests.chaos.crew import ROOT, environment, until
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


def start(job: RelayJob, folder: Path, name: str = "relay") -> subprocess.Popen[str]:
    path = job.save(folder / f"{name}.json")
    argv = [sys.executable, "-m", "tests.outbox.crash_worker", str(path)]
    return subprocess.Popen(argv, cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> int:
    _, errors = process.communicate(timeout=90)
    assert process.returncode in (0, -signal.SIGKILL), errors
    return process.returncode


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
    assert ended(start(replace(job, strike="kill"), tmp_path)) == -signal.SIGKILL
    before = published(job)
    expire_the_lease_of_sqlite(job)
    assert ended(start(job, tmp_path, "next")) == 0
    twice = {event for event, times in Counter(published(job)).items() if times > 1}
    assert twice  # or it was not killed where it should be
    assert twice <= set(before)
    check_each_once_and_in_order(applied(job, tmp_path))


def test_two_relays_at_once_publish_everything_in_order(job: RelayJob, tmp_path: Path) -> None:
    both = [start(replace(job, batch=3), tmp_path, f"relay-{number}") for number in range(2)]
    if job.database.startswith("sqlite"):  # one of them holds the lease, and keeps it until it ends
        until(lambda: any(each.poll() is not None for each in both), "the end of the first")
        expire_the_lease_of_sqlite(job)
    assert [ended(each) for each in both] == [0, 0]
    assert Counter(published(job)) == Counter(EVENTS)  # nobody died, so nothing is published twice
    check_each_once_and_in_order(applied(job, tmp_path))


def test_one_of_two_relays_is_killed_and_the_order_stays(job: RelayJob, tmp_path: Path) -> None:
    killed = start(replace(job, batch=3, strike="kill"), tmp_path, "killed")
    other = start(replace(job, batch=3), tmp_path, "other")
    codes = ended(killed)
    expire_the_lease_of_sqlite(job)
    assert ended(other) == 0
    assert codes in (0, -signal.SIGKILL)  # the other one may have been done first
    check_each_once_and_in_order(applied(job, tmp_path))


def test_a_relay_that_is_frozen_between_publishing_and_marking_holds_up_nobody(job: RelayJob, tmp_path: Path) -> None:
    frozen = start(replace(job, strike="freeze"), tmp_path)
    stat = Path(f"/proc/{frozen.pid}/stat")
    until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "the relay is frozen", within_s=60.0)
    expire_the_lease_of_sqlite(job)
    try:
        relay_all(job)
    finally:
        frozen.send_signal(signal.SIGCONT)
    assert ended(frozen) == 0
    check_each_once_and_in_order(applied(job, tmp_path))


def test_a_function_under_a_fence_runs_once_per_event_though_its_relay_died(
    job: RelayJob, tmp_path: Path, valkey_server: RedisServer
) -> None:
    """Killed in the call of the third event: two are sealed, and not marked."""
    with valkey_server.client() as client:
        client.flushall()
    job = replace(job, queue="", store=valkey_server.url, objects=str(tmp_path / "objects"))
    assert ended(start(replace(job, strike="kill"), tmp_path)) == -signal.SIGKILL
    interrupted = published(job)[-1]
    expire_the_lease_of_sqlite(job)
    time.sleep(2.0)  # two leases
    assert ended(start(job, tmp_path, "next")) == 0
    times = Counter(published(job))
    assert times.pop(interrupted) == 2  # its outcome was not known
    assert set(times.values()) == {1}
    assert len(times) == len(EVENTS) - 1
