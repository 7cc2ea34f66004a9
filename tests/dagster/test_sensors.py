"""Sensors see whatever changes in a folder or a prefix, ask for a run, and for another if that fails."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from ragfence.dagster import build_source_sensor
from ragfence.documents.sources import source_of
from tests.dagster.world import LONG_AGO, World
from tests.servers import S3Server


class Watcher:
    """A sensor and its cursor: each tick as the daemon would have it."""

    def __init__(self, world: World, source: Any, **more: Any) -> None:
        self._world = world
        self.job = dg.Definitions(
            assets=[world.documents()],
            jobs=[dg.define_asset_job("ingest", [world.documents()])],
            resources={"fence": world.resource},
        ).resolve_job_def("ingest")
        self.sensor = build_source_sensor(source, self.job, **more)
        self.cursor: str | None = None
        self.requests: list[dg.RunRequest] = []

    def tick(self) -> bool:
        """Whether it asked for a run."""
        with dg.build_sensor_context(instance=self._world.instance, cursor=self.cursor) as context:
            answer = self.sensor(context)
        if isinstance(answer, dg.SkipReason):
            return False
        assert isinstance(answer, dg.SensorResult)
        self.cursor = answer.cursor
        self.requests = list(answer.run_requests or ())
        return bool(self.requests)

    def run(self) -> bool:
        """What was asked for."""
        (request,) = self.requests
        result = self.job.execute_in_process(instance=self._world.instance, tags=request.tags, raise_on_error=False)
        return result.success


def test_the_first_tick_asks_for_a_run_and_the_second_does_not(world: World) -> None:
    world.write_all()
    watcher = Watcher(world, str(world.source))
    assert [watcher.tick(), watcher.tick(), watcher.tick()] == [True, False, False]
    assert watcher.run()
    assert watcher.tick() is False


Change = Callable[[World], None]


def _edit_with_the_mtime_of_before(world: World) -> None:
    world.write("pay", "another text, of another length")


def _edit_of_the_same_length(world: World) -> None:
    text = (world.source / "pay.txt").read_text()
    world.write("pay", text.replace("nothing", "goodbye"), at=LONG_AGO + 1)


def _older(world: World) -> None:
    os.utime(world.source / "pay.txt", (LONG_AGO - 100, LONG_AGO - 100))


@pytest.mark.parametrize(
    "change",
    [
        _edit_with_the_mtime_of_before,
        _edit_of_the_same_length,
        _older,
        lambda world: (world.source / "pay.txt").unlink(),
        lambda world: world.write("more", "text"),
        lambda world: (world.source / "pay.txt").rename(world.source / "wages.txt") and None,
    ],
    ids=["edit", "edit of the same length", "older", "delete", "add", "rename"],
)
def test_every_change_of_a_folder_is_seen_once_and_its_reversal_too(world: World, change: Change) -> None:
    world.write_all()
    watcher = Watcher(world, str(world.source))
    watcher.tick()
    before = watcher.cursor
    change(world)
    assert [watcher.tick(), watcher.tick()] == [True, False]
    for file in world.source.iterdir():
        file.unlink()
    world.write_all()
    assert watcher.tick() is True
    assert watcher.cursor == before


def test_a_file_written_this_very_moment_is_read_and_asked_for(world: World) -> None:
    world.write_all()
    watcher = Watcher(world, str(world.source))
    watcher.tick()
    (world.source / "now.txt").write_text("one")
    assert watcher.tick()
    (world.source / "now.txt").write_text("two")  # of the same length, and perhaps within the same tick of the clock
    assert watcher.tick()


def test_a_line_of_a_jsonl_file_that_changes_is_seen(world: World) -> None:
    file = world.folder / "docs.jsonl"
    file.write_text('{"doc_id": "a", "text": "one"}\n')
    watcher = Watcher(world, str(file))
    assert [watcher.tick(), watcher.tick()] == [True, False]
    file.write_text('{"doc_id": "a", "text": "two"}\n')
    assert [watcher.tick(), watcher.tick()] == [True, False]
    file.write_text('{"doc_id": "a", "text": \n')
    assert [watcher.tick(), watcher.tick()] == [True, False]


def test_everything_deleted_is_a_change_like_any_other(world: World) -> None:
    world.write_all()
    watcher = Watcher(world, lambda: str(world.source))
    watcher.tick()
    for file in world.source.iterdir():
        file.unlink()
    assert [watcher.tick(), watcher.tick()] == [True, False]


def test_a_run_that_failed_is_asked_for_again_a_few_times(world: World) -> None:
    world.write_all()
    watcher = Watcher(world, str(world.source), tries=3)
    secret = world.folder / "fence"
    secret.write_text("no folder: the fence cannot be opened")
    asked = []
    for _ in range(5):
        asked.append(watcher.tick())
        if asked[-1]:
            assert not watcher.run()
    assert asked == [True, True, True, False, False]
    secret.unlink()
    world.write("pay", "changed")
    assert watcher.tick()
    assert watcher.run()
    assert not watcher.tick()


@pytest.mark.parametrize("worked_before", [True, False])
def test_a_listing_that_was_there_before_has_all_its_tries_again(world: World, worked_before: bool) -> None:
    world.write_all()
    watcher = Watcher(world, str(world.source), tries=2)
    fence, away = world.folder / "fence", world.folder / "away"

    def ticks(works: bool) -> list[bool]:
        if not works:
            if fence.is_dir():
                fence.rename(away)
            fence.write_text("no folder: the fence cannot be opened")
        asked = []
        for _ in range(4):
            asked.append(watcher.tick())
            if asked[-1]:
                assert watcher.run() is works
        if not works:
            fence.unlink()
            if away.is_dir():
                away.rename(fence)
        return asked

    for _ in range(2):
        assert ticks(worked_before) == [True, not worked_before, False, False]
        world.write("more", "text")
        assert ticks(True) == [True, False, False, False]
        (world.source / "more.txt").unlink()
    assert ticks(False) == [True, True, False, False]


def test_a_source_is_left_open_and_what_is_made_of_a_callable_is_closed(world: World) -> None:
    world.write_all()
    closed = []

    class Held:
        name = "held"

        def items(self) -> Any:
            return source_of(str(world.source)).items()

        def close(self) -> None:
            closed.append(1)

    assert Watcher(world, Held()).tick()
    assert closed == []
    assert Watcher(world, lambda: Held()).tick()
    assert closed == [1]


def test_a_sensor_of_assets_has_the_name_and_state_it_was_given(world: World) -> None:
    sensor = build_source_sensor(
        str(world.source), [world.documents()], name="look", minimum_interval_seconds=5, running=True
    )
    assert (sensor.name, sensor.minimum_interval_seconds) == ("look", 5)
    assert sensor.default_status is dg.DefaultSensorStatus.RUNNING


@pytest.mark.usefixtures("s3_env")
def test_a_prefix_is_watched_like_a_folder(world: World, moto_server: S3Server) -> None:
    prefix = f"docs-{secrets.token_hex(4)}"
    with closing(moto_server.client()) as client:

        def put(name: str, text: str) -> None:
            client.put_object(Bucket=moto_server.bucket, Key=f"{prefix}/{name}", Body=text.encode())

        put("a.txt", "one")
        put("b.txt", "two")
        watcher = Watcher(world, f"s3://{moto_server.bucket}/{prefix}?endpoint_url={moto_server.url}")
        assert [watcher.tick(), watcher.tick()] == [True, False]
        before = watcher.cursor
        put("a.txt", "uno")  # as long, and within the same second
        assert [watcher.tick(), watcher.tick()] == [True, False]
        put("a.txt", "one")
        assert watcher.tick()
        assert watcher.cursor == before
        client.delete_object(Bucket=moto_server.bucket, Key=f"{prefix}/b.txt")
        assert [watcher.tick(), watcher.tick()] == [True, False]
        client.delete_object(Bucket=moto_server.bucket, Key=f"{prefix}/a.txt")
        assert [watcher.tick(), watcher.tick()] == [True, False]


def test_a_folder_that_is_not_there_is_an_error_of_the_tick(world: World, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="does not exist"):
        Watcher(world, str(tmp_path / "nowhere")).tick()
