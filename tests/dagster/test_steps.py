"""Steps in Dagster belong to the root run: a re-execution returns what its parent stored, unless it starts anew."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import dagster as dg
import pytest

import ragfence
from ragfence.dagster import FenceResource
from ragfence.errors import ValidationError
from tests.dagster.steps_job import steps_job

JOB = dg.reconstructable(steps_job)


class Finished(NamedTuple):
    run_id: str
    success: bool
    output: Any


class Site:
    def __init__(self, folder: Path, instance: dg.DagsterInstance) -> None:
        self.folder, self.instance = folder, instance

    def execute(self, options: dg.ReexecutionOptions | None = None, *, fresh: bool = False) -> Finished:
        config: Any = {"ops": {"nightly": {"config": {"fresh": fresh}}}}
        # From failure, Dagster takes the configuration of the parent.
        given = {"run_config": config} if fresh or options is None else {}
        with dg.execute_job(JOB, self.instance, reexecution_options=options, raise_on_error=False, **given) as result:
            return Finished(
                result.run_id, result.success, result.output_for_node("nightly") if result.success else None
            )

    def executions(self) -> list[str]:
        file = self.folder / "executions"
        return file.read_text().split() if file.exists() else []


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("STEPS_FOLDER", str(tmp_path))
    monkeypatch.setenv("STEPS_STORE", str(tmp_path / "store"))
    (tmp_path / "dagster").mkdir()
    with dg.DagsterInstance.local_temp(str(tmp_path / "dagster")) as instance:
        yield Site(tmp_path, instance)


def _from_failure(site: Site, parent: Finished) -> dg.ReexecutionOptions:
    return dg.ReexecutionOptions.from_failure(parent.run_id, site.instance)


def test_a_reexecution_from_failure_executes_only_what_is_missing(site: Site) -> None:
    first = site.execute()
    assert not first.success
    assert site.executions() == ["extract", "clean", "load"]
    second = site.execute(_from_failure(site, first))
    assert not second.success
    (site.folder / "target").touch()
    third = site.execute(_from_failure(site, second))
    assert third.success, "a re-execution of a re-execution has the same root"
    assert third.output == 4
    assert site.executions() == ["extract", "clean", "load", "load", "load"]


def test_a_reexecution_of_everything_repeats_nothing_and_a_new_run_all(site: Site) -> None:
    (site.folder / "target").touch()
    first = site.execute()
    again = site.execute(dg.ReexecutionOptions(parent_run_id=first.run_id))
    assert first.output == again.output == 4
    assert site.executions() == ["extract", "clean", "load"]
    site.execute()
    assert site.executions() == ["extract", "clean", "load"] * 2


def test_fresh_starts_anew(site: Site) -> None:
    (site.folder / "target").touch()
    first = site.execute()
    for _ in range(2):
        site.execute(dg.ReexecutionOptions(parent_run_id=first.run_id), fresh=True)
    assert site.executions() == ["extract", "clean", "load"] * 3
    site.execute(dg.ReexecutionOptions(parent_run_id=first.run_id))
    assert site.executions() == ["extract", "clean", "load"] * 3


def test_the_rows_of_steps_name_the_run_that_executed_them(site: Site) -> None:
    first = site.execute()
    second = site.execute(_from_failure(site, first))
    with ragfence.open(site.folder / "store") as fence:
        rows = [row.columns() for row in fence.audit.rows()]
    assert {row["source_type"] for row in rows} == {f"dagster:{first.run_id}"}
    assert {row["run_id"] for row in rows} == {first.run_id, second.run_id}
    assert {row["source_id"] for row in rows} == {"extract", "clean", "load"}


def test_steps_need_a_run(tmp_path: Path) -> None:
    resource = FenceResource(store=str(tmp_path / "store"))
    with pytest.raises(ValidationError, match="no Dagster run"), resource.run(dg.build_op_context()):
        pass
