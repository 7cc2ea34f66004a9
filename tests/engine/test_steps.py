"""A step of a run is executed once per input; a run that is started again goes on where it was stopped."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ragfence
from ragfence.errors import EffectFailed, InFlight, TerminalError, ValidationError


@pytest.fixture
def fence(tmp_path: Path) -> Iterator[ragfence.Fence]:
    with ragfence.open(tmp_path / "store") as opened:
        yield opened


def test_a_step_that_is_done_returns_the_stored_result(fence: ragfence.Fence) -> None:
    calls: list[str] = []

    def extract(source: str) -> list[int]:
        calls.append(source)
        return [1, 2, 3]

    for _ in range(3):
        step = fence.run("nightly")
        assert step("extract", extract, source="a") == [1, 2, 3]
    assert calls == ["a"]


def test_another_run_step_or_input_is_another_effect(fence: ragfence.Fence) -> None:
    calls: list[Any] = []
    run = fence.run("monday")
    run("extract", calls.append, 1)
    run("extract", calls.append, 2)
    run("load", calls.append, 1)
    fence.run("tuesday")("extract", calls.append, 1)
    run("extract", calls.append, 1)
    assert calls == [1, 2, 1, 1]


def test_volatile_fields_are_left_out_of_the_input_by_name(fence: ragfence.Fence) -> None:
    calls: list[str] = []

    def extract(source: str, requested_at: str) -> None:
        calls.append(requested_at)

    run = fence.run("nightly")
    for moment in ("noon", "later"):
        run("extract", extract, source="a", requested_at=moment, volatile=("requested_at",))
    assert calls == ["noon"]
    with pytest.raises(ValidationError, match="requested_on"):
        run("extract", extract, source="a", requested_at="x", volatile=("requested_on",))


def test_a_run_that_was_stopped_goes_on_where_it_was(fence: ragfence.Fence) -> None:
    calls: list[str] = []

    def workflow(broken: bool) -> str:
        step = fence.run("nightly")
        rows = step("extract", lambda: calls.append("extract") or [1, 2])
        if broken:
            raise KeyboardInterrupt
        return step("load", lambda rows: calls.append("load") or f"{len(rows)} rows", rows)

    with pytest.raises(KeyboardInterrupt):
        workflow(broken=True)
    assert workflow(broken=False) == "2 rows"
    assert calls == ["extract", "load"]


def test_a_step_that_is_running_elsewhere_raises_in_flight(fence: ragfence.Fence) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def slow() -> str:
        entered.set()
        go_on.wait(10)
        return "done"

    thread = threading.Thread(target=lambda: fence.run("r")("slow", slow))
    thread.start()
    entered.wait(10)
    with pytest.raises(InFlight):
        fence.run("r")("slow", slow)
    go_on.set()
    thread.join()
    assert fence.run("r")("slow", slow) == "done"


def test_a_step_that_fails_is_executed_again_unless_it_failed_for_good(fence: ragfence.Fence) -> None:
    calls: list[str] = []

    def broken() -> None:
        calls.append("broken")
        raise OSError("away")

    def hopeless() -> None:
        calls.append("hopeless")
        raise TerminalError("no such bucket")

    run = fence.run("r")
    for _ in range(2):
        with pytest.raises(OSError, match="away"):
            run("broken", broken)
    with pytest.raises(TerminalError):
        run("hopeless", hopeless)
    with pytest.raises(EffectFailed, match="no such bucket"):
        run("hopeless", hopeless)
    assert calls == ["broken", "broken", "hopeless"]


def test_an_async_step_is_awaited(fence: ragfence.Fence) -> None:
    calls: list[int] = []

    async def extract(number: int) -> int:
        calls.append(number)
        return number + 1

    async def workflow() -> list[int]:
        step = fence.run("r")
        return [await step("extract", extract, 1), await step("extract", extract, 1)]

    assert asyncio.run(workflow()) == [2, 2]
    assert calls == [1]


def test_receipts_of_steps_say_whether_they_were_executed_now(fence: ragfence.Fence) -> None:
    def extract(source: str, requested_at: str) -> str:
        return source

    async def load(number: int) -> int:
        return number

    step = fence.run("r")
    receipts = [
        step.receipt("extract", extract, source="a", requested_at=at, volatile=["requested_at"]) for at in ("1", "2")
    ]
    assert [(receipt.decision, receipt.result) for receipt in receipts] == [("new", "a"), ("duplicate", "a")]
    awaited = asyncio.run(step.receipt("load", load, 7))
    assert (awaited.decision, awaited.result) == ("new", 7)
    assert asyncio.run(step.receipt("load", load, 7)) == awaited


def test_a_step_that_was_finished_elsewhere_meanwhile_returns_that_result(fence: ragfence.Fence) -> None:
    results: list[str] = []

    def frozen() -> str:
        if not results:
            results.append("frozen")
            operation = fence.run("r").operation("slow", frozen, (), {}, ())
            fence.release(operation)  # as if its lease had expired
            other = threading.Thread(target=lambda: results.append(fence.run("r")("slow", frozen)))
            other.start()
            other.join()
            return "too late"
        return "by another process"

    assert fence.run("r")("slow", frozen) == "by another process"
    assert results == ["frozen", "by another process"]


@pytest.mark.parametrize("result", [b"bytes", {1: "a key that is not text"}, float("nan"), object()])
def test_a_result_that_is_not_json_is_refused_and_the_step_stays_free(fence: ragfence.Fence, result: Any) -> None:
    step = fence.run("r")
    with pytest.raises(ValidationError):
        step("extract", lambda: result)
    assert step("extract", lambda: "json") == "json"


def test_a_run_and_a_step_need_names(fence: ragfence.Fence) -> None:
    with pytest.raises(ValidationError):
        fence.run("")
    with pytest.raises(ValidationError):
        fence.run("r")("", print)


def test_steps_are_kept_for_a_day_and_messages_for_two_weeks(fence: ragfence.Fence) -> None:
    day_ms = 24 * 3600 * 1000
    assert fence.policy.for_kind("step").ttl_ms == day_ms
    assert fence.policy.for_kind("queue").ttl_ms == 14 * day_ms
    assert fence.policy.for_kind("outbox").ttl_ms == 30 * day_ms
    assert fence.policy.for_kind("webhook").ttl_ms == 14 * day_ms
    assert fence.policy.for_kind("payment_request").ttl_ms == 14 * day_ms
