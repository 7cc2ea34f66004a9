"""Runs that drain a queue, and the sensor that requests them, on a real instance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from ragfence.core.backoff import Backoff
from ragfence.dagster import build_queue_asset, build_queue_sensor
from ragfence.queues import Envelope, Message, open_transport
from tests.dagster.world import World, told

AT_ONCE = Backoff(attempts=100, first_s=0.0, longest_s=0.0)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'queue.db'}?queue=docs"


def send(url: str, *bodies: Any) -> None:
    queue = open_transport(url)
    queue.send([Envelope(body=body) for body in bodies])
    queue.close()


def documents(count: int) -> list[dict[str, str]]:
    return [{"doc_id": f"d{number}", "text": f"text {number}"} for number in range(count)]


def results(metadata: dict[str, Any]) -> dict[str, int]:
    return {row["result"]: row["messages"] for row in metadata["results"]}


def test_a_run_ingests_what_the_queue_holds_and_says_what_became_of_it(world: World, url: str) -> None:
    send(url, *documents(5), *documents(2), {"doc_id": "bad"})
    result = world.run(build_queue_asset(url))
    metadata = told(result, "consumed")
    assert results(metadata) == {"new": 5, "duplicate": 2, "dead": 1}
    assert (metadata["queue"], metadata["messages"], metadata["left"]) == ("docs", 8, 0)
    assert "/text" in metadata["dead_letters"][0]["reason"]
    (check,) = result.get_asset_check_evaluations()
    assert not check.passed
    with world.open() as fence:
        assert sum(1 for _ in fence.documents.heads()) == 5


def test_an_empty_queue_is_a_run_with_no_messages(world: World, url: str) -> None:
    result = world.run(build_queue_asset(url))
    assert told(result, "consumed")["messages"] == 0
    assert all(check.passed for check in result.get_asset_check_evaluations())


def test_a_run_handles_so_many_messages_and_leaves_the_rest(world: World, url: str) -> None:
    send(url, *documents(10))
    asset = build_queue_asset(url, max_messages=4)
    assert [told(world.run(asset), "consumed")["left"] for _ in range(3)] == [6, 2, 0]


def test_messages_may_be_handled_by_a_function(world: World, url: str) -> None:
    calls: list[int] = []
    send(url, {"id": 1}, {"id": 2}, {"id": 1})
    asset = build_queue_asset(
        url, handle=lambda message: calls.append(message.body["id"]), consumer={"key": lambda m: str(m.body["id"])}
    )
    assert results(told(world.run(asset), "consumed")) == {"new": 2, "duplicate": 1}
    assert sorted(calls) == [1, 2]


class QueueWatcher:
    """The sensor and its cursor: each tick as the daemon would have it."""

    def __init__(self, world: World, url: str, handle: Any = None, **more: Any) -> None:
        self._world = world
        options = {"key": lambda message: str(message.body["id"]), "retry": AT_ONCE} if handle else {}
        asset = build_queue_asset(url, handle=handle, consumer=options)
        self.job = dg.Definitions(
            assets=[asset], jobs=[dg.define_asset_job("drain", [asset])], resources={"fence": world.resource}
        ).resolve_job_def("drain")
        self.sensor = build_queue_sensor(url, self.job, **more)
        self.cursor: str | None = None
        self.reason: str | None = None

    def tick(self) -> dg.RunRequest | None:
        with dg.build_sensor_context(instance=self._world.instance, cursor=self.cursor) as context:
            answer = self.sensor(context)
        if isinstance(answer, dg.SkipReason):
            self.reason = answer.skip_message
            return None
        assert isinstance(answer, dg.SensorResult)
        self.cursor = answer.cursor
        (request,) = answer.run_requests or ()
        return request

    def run(self, request: dg.RunRequest, job: Any = None) -> bool:
        done = (job or self.job).execute_in_process(
            instance=self._world.instance, tags=request.tags, raise_on_error=False
        )
        return bool(done.success)


def test_the_sensor_requests_a_run_while_the_queue_has_messages(world: World, url: str) -> None:
    watcher = QueueWatcher(world, url)
    assert watcher.tick() is None
    assert "no messages" in str(watcher.reason)
    send(url, *documents(3))
    first = watcher.tick()
    assert first is not None
    assert watcher.run(first)
    assert watcher.tick() is None
    send(url, *documents(3))
    second = watcher.tick()
    assert second is not None
    assert second.run_key != first.run_key


def test_a_tick_whose_cursor_was_lost_requests_the_same_run(world: World, url: str) -> None:
    watcher = QueueWatcher(world, url)
    send(url, *documents(1))
    first = watcher.tick()
    watcher.cursor = None
    again = watcher.tick()
    assert first is not None
    assert again is not None
    assert first.run_key == again.run_key


def test_there_is_one_run_at_a_time(world: World, url: str) -> None:
    watcher = QueueWatcher(world, url)
    send(url, *documents(1))
    request = watcher.tick()
    assert request is not None
    world.instance.create_run_for_job(watcher.job, tags=request.tags, status=dg.DagsterRunStatus.STARTED)
    assert watcher.tick() is None
    assert "is consuming docs" in str(watcher.reason)


def test_after_a_failed_run_the_sensor_waits(world: World, url: str) -> None:
    @dg.op
    def fails() -> None:
        raise ZeroDivisionError

    @dg.job
    def broken() -> None:
        fails()

    watcher = QueueWatcher(world, url, minimum_interval_seconds=30)
    send(url, *documents(1))
    request = watcher.tick()
    assert request is not None
    assert not watcher.run(request, broken)
    assert watcher.tick() is None
    assert "the last run failed" in str(watcher.reason)
    eager = QueueWatcher(world, url, max_backoff_s=0.0)
    assert eager.tick() is not None


def test_a_message_that_fails_in_one_run_is_left_to_the_next(world: World, url: str) -> None:
    attempts: list[int] = []

    def handle(message: Message) -> None:
        attempts.append(message.attempt)
        if message.attempt < 3:
            raise ZeroDivisionError

    watcher = QueueWatcher(world, url, handle)
    send(url, {"id": 1})
    for _ in range(4):
        if (request := watcher.tick()) is not None:
            assert watcher.run(request)
    assert attempts == [1, 2, 3]
