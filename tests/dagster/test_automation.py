"""The alias follows the DataVersion of the index, not the number of its materializations; jobs and schedules run."""

from __future__ import annotations

import dagster as dg
import pytest

from ragfence.dagster import JOBS, build_jobs, build_schedules, gc_job, purge_expired_job, verify_job
from ragfence.dagster.resource import FenceResource
from tests.dagster.world import World
from tests.indexes.building import text_of


class Daemon:
    """Evaluates the conditions as the daemon does, tick after tick."""

    def __init__(self, world: World) -> None:
        self._world, self._cursor = world, None
        self._defs = dg.Definitions(assets=world.assets(), resources={"fence": world.resource})

    def tick(self) -> int:
        result = dg.evaluate_automation_conditions(
            self._defs, self._world.instance, asset_selection=dg.AssetSelection.all(), cursor=self._cursor
        )
        self._cursor = result.cursor  # type: ignore[assignment]
        return result.get_num_requested(dg.AssetKey("live_alias"))


def test_it_runs_when_the_version_of_the_index_has_changed_and_not_when_that_was_merely_materialized(
    world: World,
) -> None:
    world.write_all()
    daemon = Daemon(world)
    assert daemon.tick() == 0  # there is no index
    world.run(world.documents(), world.index())
    assert daemon.tick() == 1
    world.run(world.alias())
    assert daemon.tick() == 0
    world.run(world.documents(), world.index())
    assert [daemon.tick(), daemon.tick()] == [0, 0]
    world.write("pay", text_of("pay", 1))
    world.run(world.documents(), world.index())
    assert daemon.tick() == 1
    world.run(world.alias())
    assert daemon.tick() == 0


def test_an_index_that_was_there_before_the_daemon_gets_its_alias(world: World) -> None:
    world.write_all()
    world.run(world.documents(), world.index())
    daemon = Daemon(world)
    assert daemon.tick() == 1
    world.run(world.alias())
    assert daemon.tick() == 0


def test_an_alias_that_was_there_before_the_daemon_is_let_alone(world: World) -> None:
    world.write_all()
    world.run()
    daemon = Daemon(world)
    assert [daemon.tick(), daemon.tick()] == [0, 0]


def run(world: World, job: dg.JobDefinition) -> dg.ExecuteInProcessResult:
    return job.execute_in_process(instance=world.instance, resources={"fence": world.resource}, raise_on_error=False)


def test_every_job_runs(world: World) -> None:
    world.write_all()
    world.run()
    assert [run(world, job).success for job in JOBS] == [True] * 4
    with world.open() as fence:  # gc has let live what is live
        assert fence.aliases.resolve("handbook").physical


def test_verify_fails_on_a_planted_fault(world: World) -> None:
    world.write_all()
    world.run()
    with world.open() as fence:
        fence.indexes.backend("lance").drop(fence.aliases.resolve("handbook").physical)
    result = run(world, verify_job)
    assert not result.success
    failure = result.failure_data_for_node("verify_documents")
    assert failure is not None
    assert "1 finding" in failure.user_failure_data.description  # type: ignore[operator]
    assert not result.failure_data_for_node("audit_decisions")


def test_verify_fails_on_a_broken_promise(world: World) -> None:
    world.write_all()
    world.run()
    with world.open() as fence:
        objects = fence.inspector.objects
        (entry,) = objects.list("default/catalog/")
        broken = (objects.get(entry.name) or b"").replace(world.seal().index_hash.encode(), b"0" * 64)
        objects.delete([entry.name])
        assert objects.put_new(entry.name, broken)
    assert run(world, verify_job).failure_data_for_node("audit_decisions")


def test_schedules_are_for_the_jobs_and_can_be_left_out() -> None:
    schedules = {each.name: each for each in build_schedules(gc="", running=True)}
    assert set(schedules) == {"verify_schedule", "purge_expired_schedule", "drain_schedule"}
    assert schedules["purge_expired_schedule"].cron_schedule == "0 * * * *"
    assert schedules["verify_schedule"].default_status is dg.DefaultScheduleStatus.RUNNING


def test_a_schedule_asks_for_a_run_of_its_job(world: World) -> None:
    defs = dg.Definitions(jobs=list(JOBS), schedules=build_schedules(), resources={"fence": world.resource})
    for name in ("verify", "purge_expired", "gc", "drain"):
        with dg.build_schedule_context(instance=world.instance) as context:
            tick = defs.resolve_schedule_def(f"{name}_schedule").evaluate_tick(context)
        assert len(tick.run_requests or ()) == 1
        assert defs.resolve_job_def(name).execute_in_process(instance=world.instance).success


def test_jobs_of_another_fence_have_other_names(world: World) -> None:
    jobs = build_jobs(resource_key="eu_fence", prefix="eu_")
    assert [job.name for job in jobs] == ["eu_verify", "eu_purge_expired", "eu_gc", "eu_drain"]
    defs = dg.Definitions(
        jobs=[*JOBS, *jobs],
        schedules=[*build_schedules(), *build_schedules(jobs=jobs)],
        resources={"fence": world.resource, "eu_fence": FenceResource(store=str(world.folder / "eu"))},
    )
    dg.Definitions.validate_loadable(defs)
    assert defs.resolve_job_def("eu_gc").execute_in_process(instance=world.instance).success
    assert (world.folder / "eu").exists()
    assert not (world.folder / "fence").exists()


@pytest.mark.parametrize("job", [gc_job, purge_expired_job])
def test_upkeep_of_an_empty_fence_does_nothing(world: World, job: dg.JobDefinition) -> None:
    assert run(world, job).success


def test_only_the_schedule_that_purges_what_expired_runs_by_default():
    schedules = {each.name: each.default_status for each in build_schedules()}
    on = [name for name, status in schedules.items() if status is dg.DefaultScheduleStatus.RUNNING]
    assert (on, len(schedules)) == (["purge_expired_schedule"], 4)
