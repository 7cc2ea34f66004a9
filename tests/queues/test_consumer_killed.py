"""A consumer is killed or frozen at each point of a message: one effect each, nothing lost, nothing stuck.

The queue, the fence store and the database of the effects are three servers. Effects are rows of a table without a
unique key, written by the handler and counted by SQL.
"""

from __future__ import annotations

import contextlib
import json
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

from ragfence.queues import Envelope
from tests.acceptance.forks import end, fork, wait_ended, wait_frozen, wake
from tests.chaos.crew import until
from tests.queues.crash_worker import ConsumerJob, consume_all, effects, metadata, work
from tests.servers import RedisServer, valkey
from tests.servers.postgres import postgres

pytestmark = pytest.mark.xdist_group("postgres")

POINTS = ("in_effect", "after_effect", "after_commit", "before_seal", "after_seal")
"""before the effect; after it; and between commit, seal and acknowledgement"""
KEYS = [f"k{number}" for number in range(6)]
SENT = [*KEYS, *KEYS[1:4], KEYS[1]]
"""The first, at which the consumer is struck, is sent once: no duplicate can stand in for a message that was lost."""


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    with postgres() as url:
        metadata.create_all(sa.create_engine(url, poolclass=sa.NullPool))
        yield url


@pytest.fixture(scope="module")
def queue_server() -> Iterator[RedisServer]:
    with valkey() as server:
        yield server


@pytest.fixture(params=["streams", "postgres"])
def job(
    request: pytest.FixtureRequest, tmp_path: Path, database: str, queue_server: RedisServer, valkey_server: RedisServer
) -> ConsumerJob:
    place = uuid.uuid4().hex
    made = ConsumerJob(
        store=valkey_server.url,
        objects=str(tmp_path / "objects" / place),
        queue=f"{queue_server.url if request.param == 'streams' else database}?queue={place}",
        database=database,
        place=place,
        runs=str(tmp_path / "runs"),
    )
    Path(made.runs).touch()
    with made.open_fence() as fence:
        fence.hydrate()
    queue = made.open_queue()
    queue.send([Envelope(body={"id": key}, event_id=key) for key in SENT])
    queue.close()
    return made


def happened(job: ConsumerJob) -> Counter[str]:
    query = sa.select(effects.c.key).where(effects.c.place == job.place)
    with sa.create_engine(job.database, poolclass=sa.NullPool).connect() as connection:
        return Counter(connection.scalars(query))


def runs(job: ConsumerJob) -> Counter[str]:
    return Counter(Path(job.runs).read_text().split())


def check_everything_happened_once(job: ConsumerJob) -> None:
    assert happened(job) == Counter(KEYS)
    queue = job.open_queue()
    depth = queue.depth()
    queue.close()
    assert (depth.visible, depth.in_flight, depth.dead) == (0, 0, 0)
    with job.open_fence() as fence:
        report = fence.audit.check()
        assert report.ok, str(report)


@contextlib.contextmanager
def running(job: ConsumerJob, strike: str = "") -> Iterator[BaseProcess]:
    process = fork(work, replace(job, strike=strike))
    try:
        yield process
    finally:
        end(process)


def kill_a_consumer(job: ConsumerJob, point: str) -> None:
    with running(job, f"kill {point}") as process:
        assert wait_ended(process) == -signal.SIGKILL


def two_leases(job: ConsumerJob) -> None:
    time.sleep(2 * max(job.lease_s, job.visibility_s))


@pytest.mark.parametrize("point", POINTS)
def test_one_effect_wherever_a_consumer_is_killed(job: ConsumerJob, point: str) -> None:
    kill_a_consumer(job, point)
    two_leases(job)
    counts = consume_all(job)
    # Nothing is stuck: after two leases no message is hidden and no key is in flight.
    assert counts.get("in_flight", 0) == counts.get("retried", 0) == 0
    check_everything_happened_once(job)
    assert sum(runs(job).values()) == len(KEYS) + (point == "after_effect")


@pytest.mark.parametrize("point", POINTS)
def test_one_effect_wherever_a_consumer_is_frozen_past_visibility_and_lease(job: ConsumerJob, point: str) -> None:
    with running(job, f"freeze {point}") as frozen:
        wait_frozen(frozen)
        two_leases(job)
        counts = consume_all(job)
        assert counts.get("in_flight", 0) == counts.get("retried", 0) == 0
        before = happened(job)
        wake(frozen)
        assert wait_ended(frozen) == 0
        woken = json.loads(Path(f"{job.runs}.{frozen.pid}").read_text())
    assert happened(job) == before
    check_everything_happened_once(job)
    assert sum(runs(job).values()) == len(KEYS) + (point in ("in_effect", "after_effect"))
    # What the others did meanwhile is a duplicate to the one that was frozen, never new.
    assert woken.get("new", 0) <= 1


def test_a_consumer_that_is_killed_while_another_one_works_loses_nothing(job: ConsumerJob) -> None:
    with running(job, "kill before_seal") as killed:
        until(lambda: runs(job), "the first effect")
        with running(job) as other:  # it has to get by with what the first one holds, and then leaves behind
            assert [wait_ended(killed), wait_ended(other)] == [-signal.SIGKILL, 0]
    check_everything_happened_once(job)
    assert sum(runs(job).values()) == len(KEYS)


def test_without_an_inbox_an_effect_whose_consumer_died_before_the_commit_happens_again(job: ConsumerJob) -> None:
    """The fence gives one *outcome* per key. That the foreign row is written once needs the inbox, so this shows
    that the tests above would see a double one."""
    job = replace(job, inbox=False)
    kill_a_consumer(job, "after_effect")
    two_leases(job)
    consume_all(job)
    assert sorted(happened(job).values()) == [1] * (len(KEYS) - 1) + [2]
