"""The fence as a resource: where it is opened, what a run leaves in the decision rows, and when it is closed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

import ragfence
from ragfence.dagster import CORRELATION_TAG, FenceResource, build_ingest_asset
from ragfence.errors import ValidationError
from ragfence.fence import Fence
from tests.dagster.world import World
from tests.indexes.building import text_of


def decision_rows(fence: Fence) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = fence.audit.decisions().to_pylist()
    return rows


def test_without_fields_and_variables_it_is_embedded(tmp_path: Path) -> None:
    with FenceResource().open() as fence:
        assert fence.tenant == "default"
    assert (tmp_path / ".ragfence" / "fences.db").exists()


def test_empty_fields_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAGFENCE_STORE", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("RAGFENCE_OBJECTS", str(tmp_path / "kept"))
    monkeypatch.setenv("RAGFENCE_TENANT", "acme")
    with FenceResource().open() as fence:
        assert fence.tenant == "acme"
        fence.documents.ingest(ragfence.Document("a", "text"))
    assert (tmp_path / "elsewhere" / "fences.db").exists()
    assert list((tmp_path / "kept").iterdir())


def test_fields_count_more_than_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAGFENCE_TENANT", "other")
    monkeypatch.setenv("RAGFENCE_STORE", "redis://127.0.0.1:1/0")
    policy = tmp_path / "short.yml"
    policy.write_text("lease: {ttl_s: 7}\n")
    resource = FenceResource(store=str(tmp_path / "mine"), tenant="acme", policy=str(policy))
    with resource.open() as fence:
        assert (fence.tenant, fence.policy.lease.ttl_s) == ("acme", 7)


def test_fields_may_be_environment_variables_of_dagster(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_FENCES", str(world.folder / "by-name"))
    world.write_all()
    world.run(world.documents(), resources={"fence": FenceResource(store=dg.EnvVar("MY_FENCES"))})
    assert (world.folder / "by-name" / "fences.db").exists()


def test_the_run_its_tag_and_its_step_are_in_the_decision_rows(world: World) -> None:
    world.write_all()
    result = world.run(tags={CORRELATION_TAG: "order-7", "dagster/backfill": "b1"})
    with world.open() as fence:
        rows = decision_rows(fence)
    assert {row["run_id"] for row in rows} == {result.run_id}
    assert {row["correlation_id"] for row in rows} == {"order-7"}
    assert {row["route"] for row in rows if row["kind"] == "index"} == {"dagster:vector_index"}


def test_without_a_tag_the_backfill_is_what_rows_are_correlated_by(world: World) -> None:
    world.write_all()
    world.run(world.documents(), tags={"dagster/backfill": "b1"})
    with world.open() as fence:
        assert {row["correlation_id"] for row in decision_rows(fence)} == {"b1"}


def test_checks_and_ops_leave_their_run_as_well(world: World) -> None:
    @dg.op
    def claims(context: dg.OpExecutionContext, fence: FenceResource) -> None:
        with fence.open(context) as opened, opened.claim(ragfence.Operation(kind="k", source_id="s")) as op:
            op.seal()

    @dg.job(resource_defs={"fence": world.resource})
    def claiming() -> None:
        claims()

    result = claiming.execute_in_process(instance=world.instance, tags={CORRELATION_TAG: "c"})
    with world.open() as fence:
        (row,) = [row for row in decision_rows(fence) if row["kind"] == "k" and row["decision"] == "new"][:1]
    assert (row["run_id"], row["correlation_id"], row["route"]) == (result.run_id, "c", "dagster:claims")


@pytest.mark.parametrize("fails", [False, True])
def test_it_is_closed_with_the_step_however_that_ends(
    world: World, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[Fence] = []
    closed: list[Fence] = []
    close = Fence.close

    def closing(fence: Fence) -> None:
        closed.append(fence)
        close(fence)

    def using(fence: Fence) -> Any:
        held.append(fence)
        if fails:
            raise RuntimeError("no")
        return fence.documents

    monkeypatch.setattr(Fence, "close", closing)
    world.write_all()
    world.run(world.documents(using=using), ok=not fails)
    assert held == closed


def test_two_steps_of_one_run_have_a_fence_each(world: World) -> None:
    world.write("a", text_of("a"))
    held: list[Fence] = []

    def using(fence: Fence) -> Any:
        held.append(fence)
        return fence.documents

    world.run(world.documents(name="one", using=using), world.documents(name="two", using=using))
    assert held[0] is not held[1]
    with world.open() as fence:
        assert fence.audit.check().ok
        assert len(list(fence.documents.heads())) == 1


def test_assets_can_be_called_directly_without_a_run(world: World) -> None:
    world.write_all()
    documents: Callable[..., Any] = world.documents()
    with dg.build_asset_context(resources={"fence": world.resource}) as context:
        result = documents(context)
    assert result.metadata["listed"] == 3


def test_another_resource_under_its_name_is_refused(world: World) -> None:
    @dg.resource
    def wrong() -> str:
        return "no fence"

    with pytest.raises(ValidationError, match="not a FenceResource"):
        world.run(build_ingest_asset([]), resources={"fence": wrong})


def test_another_name_for_the_resource(world: World) -> None:
    world.write_all()
    documents = world.documents(resource_key="fence_eu")
    world.run(documents, resources={"fence_eu": FenceResource(store=str(world.folder / "eu"))})
    assert (world.folder / "eu" / "fences.db").exists()
    assert not (world.folder / "fence").exists()
