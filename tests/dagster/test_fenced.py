"""`@fenced_asset`: over any asset function; performed once for what goes into it, and replayed with all it returned.

Annotations are text here, as in many a module: Dagster by itself would not take those of a context.
"""

from __future__ import annotations

import asyncio
from typing import Any

import dagster as dg
import pytest

from ragfence.dagster import FenceResource, fenced_asset
from ragfence.errors import TerminalError, ValidationError
from tests.dagster.world import World, checked, told, version


class Calls(list[Any]):
    """What a function was called with; `fails` times it fails."""

    fails = 0

    def add(self, what: Any = None) -> int:
        self.append(what)
        if len(self) <= self.fails:
            raise RuntimeError(f"attempt {len(self)} fails")
        return len(self)


@pytest.fixture
def calls() -> Calls:
    return Calls()


def decided(result: dg.ExecuteInProcessResult, asset: str) -> str:
    decision: str = told(result, asset)["decision"]
    return decision


class Tone(dg.Config):
    loud: bool = False


class Desk(dg.ConfigurableResource):  # type: ignore[type-arg]
    name: str = "desk"


def test_a_function_without_a_context_is_performed_once(world: World, calls: Calls) -> None:
    @fenced_asset
    def invoices() -> dict[str, int]:
        return {"count": calls.add()}

    first, again = world.run(invoices), world.run(invoices)
    assert len(calls) == 1
    assert (decided(first, "invoices"), decided(again, "invoices")) == ("new", "duplicate")
    assert first.output_for_node("invoices") == again.output_for_node("invoices") == {"count": 1}
    assert version(first, "invoices") == version(again, "invoices")
    assert told(first, "invoices")["key"] == told(again, "invoices")["key"]


def test_a_function_may_have_the_context_inputs_config_and_resources(world: World, calls: Calls) -> None:
    @dg.asset(code_version="1")
    def orders() -> list[int]:
        return [1, 2, 3]

    @fenced_asset(group_name="billing")
    def invoices(
        context: dg.AssetExecutionContext, orders: list[int], config: Tone, desk: Desk, fence: FenceResource
    ) -> dict[str, Any]:
        with fence.open(context) as opened:
            tenant = opened.tenant
        calls.add()
        return {"orders": orders, "loud": config.loud, "desk": desk.name, "asset": context.asset_key.path, "of": tenant}

    resources = {"desk": Desk(name="d")}
    first = world.run(orders, invoices, resources=resources)
    assert first.output_for_node("invoices") == {
        "orders": [1, 2, 3],
        "loud": False,
        "desk": "d",
        "asset": ["invoices"],
        "of": "default",
    }
    world.run(orders, invoices, resources=resources)
    assert len(calls) == 1
    config = {"ops": {"invoices": {"config": {"loud": True}}}}
    loud = world.run(orders, invoices, resources=resources, run_config=config)
    assert (len(calls), loud.output_for_node("invoices")["loud"]) == (2, True)


def test_what_comes_after_it_gets_its_value_also_from_a_replay(world: World, calls: Calls) -> None:
    @fenced_asset
    def invoices() -> list[int]:
        return [calls.add(), 7]

    got = []

    @dg.asset
    def report(invoices: list[int]) -> None:
        got.append(invoices)

    world.run(invoices, report)
    world.run(invoices, report)
    assert got == [[1, 7], [1, 7]]


def test_another_code_version_performs_it_again(world: World, calls: Calls) -> None:
    def made(code_version: str) -> dg.AssetsDefinition:
        @fenced_asset(code_version=code_version)
        def invoices() -> int:
            return calls.add()

        return invoices

    for code_version, count in (("1", 1), ("1", 1), ("2", 2), ("1", 2)):
        world.run(made(code_version))
        assert len(calls) == count


def test_another_data_version_upstream_performs_it_again_and_a_mere_run_does_not(world: World, calls: Calls) -> None:
    state = ["v1"]

    @dg.asset
    def orders() -> dg.MaterializeResult:  # type: ignore[type-arg]
        return dg.MaterializeResult(data_version=dg.DataVersion(state[0]))

    @fenced_asset(deps=[orders])
    def invoices() -> int:
        return calls.add()

    world.run(orders, invoices)
    world.run(orders, invoices)
    assert len(calls) == 1
    state[0] = "v2"
    assert decided(world.run(orders, invoices), "invoices") == "new"
    state[0] = "v1"
    assert decided(world.run(orders, invoices), "invoices") == "duplicate"
    assert len(calls) == 2


def test_what_is_only_observed_counts_as_well(world: World, calls: Calls) -> None:
    orders = dg.AssetSpec("orders")

    @fenced_asset(deps=[orders])
    def invoices() -> int:
        return calls.add()

    def observe(state: str) -> None:
        tags = {"dagster/data_version": state}
        world.instance.report_runless_asset_event(dg.AssetObservation("orders", tags=tags))

    for state, count in (("a", 1), ("a", 1), ("b", 2)):
        observe(state)
        world.run(invoices)
        assert len(calls) == count


def test_every_partition_is_performed_once_by_the_version_of_the_partition_before(world: World, calls: Calls) -> None:
    days = dg.StaticPartitionsDefinition(["mon", "tue", "wed"])
    state = {"mon": "1", "tue": "1", "wed": "1"}

    @dg.asset(partitions_def=days)
    def orders(context):  # type: ignore[no-untyped-def]
        return dg.MaterializeResult(data_version=dg.DataVersion(state[context.partition_key]))

    @fenced_asset(partitions_def=days, deps=[orders])
    def invoices(context: dg.AssetExecutionContext) -> str:
        calls.add(context.partition_key)
        return context.partition_key

    @fenced_asset(deps=[orders])
    def week() -> int:
        return calls.add("week")

    for day in ("mon", "tue", "mon"):
        world.run(orders, invoices, partition_key=day)
    assert calls == ["mon", "tue"]
    state["tue"] = "2"
    world.run(orders, invoices, partition_key="tue")
    world.run(orders, invoices, partition_key="mon")
    assert calls == ["mon", "tue", "tue"]
    for count in (4, 4):
        world.run(orders, week, selection=[week])
        assert len(calls) == count
    world.run(orders, partition_key="wed")
    world.run(orders, week, selection=[week])
    assert calls[-2:] == ["week", "week"]


def test_several_partitions_in_one_run_are_performed_for_all_of_them(world: World, calls: Calls) -> None:
    days = dg.StaticPartitionsDefinition(["mon", "tue", "wed"])

    @fenced_asset(partitions_def=days)
    def invoices(context: dg.AssetExecutionContext) -> None:
        calls.add(list(context.partition_keys))

    for start, end in (("mon", "tue"), ("tue", "wed"), ("mon", "tue")):
        tags = {"dagster/asset_partition_range_start": start, "dagster/asset_partition_range_end": end}
        world.run(invoices, tags=tags)
    assert calls == [["mon", "tue"], ["tue", "wed"]]


def test_a_partition_with_a_comma_in_its_name_is_not_two_of_them(world: World, calls: Calls) -> None:
    parts = dg.StaticPartitionsDefinition(["mon", "tue", "mon,tue"])

    @fenced_asset(partitions_def=parts)
    def invoices(context: dg.AssetExecutionContext) -> None:
        calls.add(list(context.partition_keys))

    both = {"dagster/asset_partition_range_start": "mon", "dagster/asset_partition_range_end": "tue"}
    for _ in range(2):
        world.run(invoices, partition_key="mon,tue")
        world.run(invoices, tags=both)
    assert calls == [["mon,tue"], ["mon", "tue"]]


@pytest.mark.parametrize(
    ("partition", "key"),
    [
        ("mon", "3ea28db317c7c0c6654b121f6d066011c42b39e04ec4f11f4dde1f0ae0b0e883fb"),
        ("mon,tue", "24c5ad8606af674fd568d6efb894aa8ed4ad814628673e6a40f6f8934775e8f56b"),
        ("long" * 60, "16e8ce0cb7fd675952e5047202ff6a23a4893e709ef7e1947d83ef7a1c1b9baaf2"),
    ],
    ids=["short", "with a comma", "long"],
)
def test_a_partition_keeps_its_key(world: World, calls: Calls, partition: str, key: str) -> None:
    """Of all versions: another key would perform it again."""

    @fenced_asset(partitions_def=dg.StaticPartitionsDefinition([partition]))
    def invoices() -> int:
        return calls.add()

    assert told(world.run(invoices, partition_key=partition), "invoices")["key"] == key


def test_a_key_of_ones_own_decides(world: World, calls: Calls) -> None:
    day = ["monday"]

    @fenced_asset(key=lambda context: (f"invoices of {context.asset_key.to_user_string()}", day[0]))
    def invoices() -> int:
        return calls.add()

    for today, count in (("monday", 1), ("monday", 1), ("tuesday", 2)):
        day[0] = today
        world.run(invoices)
        assert len(calls) == count


@pytest.mark.parametrize("wrong", [None, "", 7, ("a", ""), ("a", "b", "c"), (1, "a")])
def test_a_key_that_is_none_is_refused(world: World, calls: Calls, wrong: Any) -> None:
    @fenced_asset(key=lambda context: wrong)
    def invoices() -> int:
        return calls.add()

    with pytest.raises(ValidationError, match="must return a revision"):
        world.run(invoices)
    assert not calls


def test_an_async_function_is_performed_to_its_end(world: World, calls: Calls) -> None:
    @fenced_asset
    async def invoices(context: dg.AssetExecutionContext) -> dict[str, Any]:
        await asyncio.sleep(0)
        return {"count": calls.add(), "asset": context.asset_key.path}

    for _ in range(2):
        assert world.run(invoices).output_for_node("invoices") == {"count": 1, "asset": ["invoices"]}
    assert len(calls) == 1


def test_generators_are_refused() -> None:
    def invoices() -> Any:
        yield 1

    async def more() -> Any:
        yield 1

    for each in (invoices, more):
        with pytest.raises(ValidationError, match="is a generator"):
            fenced_asset(each)


def test_an_asset_is_no_function() -> None:
    @dg.asset
    def invoices() -> None: ...

    @dg.multi_asset(specs=[dg.AssetSpec("a"), dg.AssetSpec("b")])
    def several():  # type: ignore[no-untyped-def]
        ...

    for each in (invoices, several):
        with pytest.raises(ValidationError, match="takes a function"):
            fenced_asset(each)


@pytest.mark.parametrize("wrong", [{1: "a"}, object(), float("nan"), b"bytes"])
def test_what_is_not_json_is_refused_and_nothing_is_sealed(world: World, calls: Calls, wrong: Any) -> None:
    returned = [wrong, "mended"]

    @fenced_asset
    def invoices() -> Any:
        return returned[calls.add() - 1]

    with pytest.raises(ValidationError, match="must be JSON"):
        world.run(invoices)
    assert world.run(invoices).output_for_node("invoices") == "mended"


def test_retries_perform_it_until_it_succeeds_and_it_is_sealed_once(world: World, calls: Calls) -> None:
    calls.fails = 2

    @fenced_asset(retry_policy=dg.RetryPolicy(max_retries=3))
    def invoices() -> int:
        return calls.add()

    first = world.run(invoices)
    assert (first.output_for_node("invoices"), len(calls)) == (3, 3)
    assert (told(first, "invoices")["decision"], told(first, "invoices")["attempt"]) == ("new", 3)
    assert world.run(invoices).output_for_node("invoices") == 3
    assert len(calls) == 3
    with world.open() as fence:
        report = fence.audit.check()
        sealed = [row for row in fence.audit.decisions().to_pylist() if row["sealed_at"] is not None]
    assert report.ok
    assert {row["effect_id"] for row in sealed if row["effect_id"]} != set()


def test_a_terminal_failure_is_not_retried_and_is_replayed(world: World, calls: Calls) -> None:
    @fenced_asset(retry_policy=dg.RetryPolicy(max_retries=3))
    def invoices() -> int:
        calls.add()
        raise TerminalError("there is no such customer")

    for _ in range(2):
        result = world.run(invoices, ok=False)
        failure = result.failure_data_for_node("invoices")
        assert failure is not None
        assert "no such customer" in failure.user_failure_data.description  # type: ignore[operator]
    assert failure.user_failure_data.metadata["decision"].value == "duplicate"
    assert len(calls) == 1


def test_checks_metadata_tags_and_the_version_are_the_same_in_a_replay(world: World, calls: Calls) -> None:
    @fenced_asset(check_specs=[dg.AssetCheckSpec("all_paid", asset="invoices")])
    def invoices() -> Any:
        calls.add()
        return dg.MaterializeResult(
            value={"paid": 3},
            metadata={
                "count": 3,
                "share": 0.5,
                "note": dg.MetadataValue.md("**paid**"),
                "where": dg.MetadataValue.url("https://example.com"),
                "rows": dg.MetadataValue.table([dg.TableRecord({"a": 1})]),
                "detail": {"a": [1, 2]},
            },
            data_version=dg.DataVersion("v7"),
            tags={"team": "billing"},
            check_results=[
                dg.AssetCheckResult(
                    check_name="all_paid",
                    passed=False,
                    severity=dg.AssetCheckSeverity.WARN,
                    description="one is late",
                    metadata={"late": 1},
                )
            ],
        )

    first, again = world.run(invoices), world.run(invoices)
    assert len(calls) == 1
    events = [run.asset_materializations_for_node("invoices")[0] for run in (first, again)]
    kept = [{name: value for name, value in event.metadata.items() if name != "decision"} for event in events]
    assert kept[0] == kept[1]
    assert isinstance(kept[1]["note"], dg.MarkdownMetadataValue)
    assert [(event.tags or {})["team"] for event in events] == ["billing", "billing"]
    assert version(first, "invoices") == version(again, "invoices") == "v7"
    for run in (first, again):
        check = checked(run, "all_paid")
        assert (check.passed, check.severity, check.description) == (
            False,
            dg.AssetCheckSeverity.WARN,
            "one is late",
        )
        assert check.metadata["late"].value == 1


def test_an_output_is_kept_like_a_result(world: World, calls: Calls) -> None:
    @fenced_asset
    def invoices() -> Any:
        calls.add()
        return dg.Output({"paid": 3}, metadata={"count": 3}, tags={"team": "billing"})

    for _ in range(2):
        result = world.run(invoices)
        assert result.output_for_node("invoices") == {"paid": 3}
        assert told(result, "invoices")["count"] == 3
    assert len(calls) == 1


def test_checks_of_a_result_without_a_value_are_kept_as_well(world: World, calls: Calls) -> None:
    @fenced_asset(check_specs=[dg.AssetCheckSpec("all_paid", asset="invoices")])
    def invoices() -> dg.MaterializeResult:  # type: ignore[type-arg]
        calls.add()
        return dg.MaterializeResult(check_results=[dg.AssetCheckResult(check_name="all_paid", passed=True)])

    for _ in range(2):
        assert checked(world.run(invoices), "all_paid").passed
    assert len(calls) == 1


def test_what_returns_nothing_needs_no_io_manager(world: World, calls: Calls) -> None:
    @fenced_asset
    def invoices() -> None:
        calls.add()

    for _ in range(2):
        events = world.run(invoices).all_events
        assert not [event for event in events if event.is_handled_output]
    assert len(calls) == 1


def test_metadata_that_is_richer_than_json_is_text_in_both(world: World, calls: Calls) -> None:
    @fenced_asset
    def invoices() -> dg.MaterializeResult:  # type: ignore[type-arg]
        calls.add()
        return dg.MaterializeResult(metadata={"share": float("nan"), "where": world.folder})

    for _ in range(2):
        result = told(world.run(invoices), "invoices")
        assert (result["share"], result["where"]) == ("nan", str(world.folder))
    assert len(calls) == 1


def test_equal_values_have_equal_versions_whatever_the_metadata(world: World, calls: Calls) -> None:
    @fenced_asset(key=lambda context: f"{len(calls)}")
    def invoices() -> Any:
        return dg.MaterializeResult(value=[1, 2], metadata={"took": calls.add()})

    first, second = world.run(invoices), world.run(invoices)
    assert len(calls) == 2
    assert version(first, "invoices") == version(second, "invoices")


def test_two_assets_of_one_code_location_do_not_share_a_key(world: World, calls: Calls) -> None:
    @fenced_asset(key_prefix="eu")
    def invoices() -> int:
        return calls.add()

    @fenced_asset(name="invoices", key_prefix="us")
    def others() -> int:
        return calls.add()

    world.run(invoices, others)
    assert len(calls) == 2
