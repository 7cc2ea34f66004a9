"""A consumer is killed or frozen at each point of a message: one effect each, nothing lost, nothing stuck.

The queue, the fence store and the database of the effects are three servers. Effects are rows of a table without a
unique key, written by the handler and counted by SQL.
"""

from __future__ import annotations

import json
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

from ragfence.queues import Envelope
from tests.chaos.crew import ROOT, environment, until
from tests.queues.crash_worker import ConsumerJob, consume_all, effects, metadata
from tests.servers import RedisServer, valkey
from tests.servers.postgres import postgres

pytestmark = pytest.mark.xdist_group("postgres")

POINTS = ("in_effect", "after_effect", "after_commit", "before_seal", "after_seal")
"""before the effect; after it; and between commit, seal and acknowledgement"""
RUNS_AGAIN = {"kill": {"in_effect", "after_effect"}, "freeze": {"in_effect", "after_effect"}}
"""where the outcome is not committed yet, so that another consumer has to run the handler"""
KEYS = [f"k{number}" for number in range(6)]
SENT = [*KEYS, *KEYS[:3], KEYS[0]]


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


def start(job: ConsumerJob, folder: Path, name: str = "worker") -> subprocess.Popen[str]:
    path = job.save(folder / f"{name}.json")
    argv = [sys.executable, "-m", "tests.queues.crash_worker", str(path)]
    return subprocess.Popen(
        argv, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


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


def wait_killed(process: subprocess.Popen[str]) -> None:
    _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, errors


def wait_stopped(process: subprocess.Popen[str]) -> None:
    stat = Path(f"/proc/{process.pid}/stat")
    until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "the consumer is frozen", within_s=60.0)


def two_leases(job: ConsumerJob) -> None:
    time.sleep(2 * max(job.lease_s, job.visibility_s))


@pytest.mark.parametrize("point", POINTS)
def test_one_effect_wherever_a_consumer_is_killed(job: ConsumerJob, point: str, tmp_path: Path) -> None:
    killed = start(replace(job, strike=f"kill {point}"), tmp_path)
    wait_killed(killed)
    two_leases(job)
    counts = consume_all(job)
    # Nothing is stuck: after two leases no message is hidden and no key is in flight.
    assert counts.get("in_flight", 0) == counts.get("retried", 0) == 0
    check_everything_happened_once(job)
    assert sum(runs(job).values()) == len(KEYS) + (point == "after_effect")


@pytest.mark.parametrize("point", POINTS)
def test_one_effect_wherever_a_consumer_is_frozen_past_visibility_and_lease(
    job: ConsumerJob, point: str, tmp_path: Path
) -> None:
    frozen = start(replace(job, strike=f"freeze {point}"), tmp_path)
    wait_stopped(frozen)
    two_leases(job)
    counts = consume_all(job)
    assert counts.get("in_flight", 0) == counts.get("retried", 0) == 0
    before = happened(job)
    frozen.send_signal(signal.SIGCONT)
    said, errors = frozen.communicate(timeout=60)
    assert frozen.returncode == 0, errors
    assert happened(job) == before
    check_everything_happened_once(job)
    assert sum(runs(job).values()) == len(KEYS) + (point in RUNS_AGAIN["freeze"])
    # What the others did meanwhile is a duplicate to the one that was frozen, never new.
    assert json.loads(said).get("new", 0) <= 1


def test_a_consumer_that_is_killed_while_another_one_works_loses_nothing(job: ConsumerJob, tmp_path: Path) -> None:
    killed = start(replace(job, strike="kill before_seal"), tmp_path, "killed")
    other = start(job, tmp_path, "other")
    wait_killed(killed)
    _, errors = other.communicate(timeout=60)
    assert other.returncode == 0, errors
    check_everything_happened_once(job)
    assert sum(runs(job).values()) == len(KEYS)


def test_without_an_inbox_an_effect_whose_consumer_died_before_the_commit_happens_again(
    job: ConsumerJob, tmp_path: Path
) -> None:
    """The fence gives one *outcome* per key. That the foreign row is written once needs the inbox, so this shows
    that the tests above would see a double one."""
    job = replace(job, inbox=False)
    killed = start(replace(job, strike="kill after_effect"), tmp_path)
    wait_killed(killed)
    two_leases(job)
    consume_all(job)
    assert sorted(happened(job).values()) == [1] * (len(KEYS) - 1) + [2]
