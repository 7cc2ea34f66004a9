"""`once(key=..., formerly=...)`: keys change, and no effect is repeated, whoever dies and whoever is not updated."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragfence import Decision, Fence, Operation, Receipt, by_fields, by_id, compare_keys
from ragfence.engine.crash_points import OPERATION_POINTS
from ragfence.errors import Conflict, EffectFailed, InFlight, TerminalError, ValidationError
from ragfence.testing.crash_points import at_point
from tests.engine.worlds import Crash, Process, Request, Tickets, World, abandon, elsewhere

ORDER: Request = {"id": "e-1", "order": "o-7", "amount": 5}
OLD, NEW = by_fields("order", "amount"), by_id("id")
"""before the change, and after it"""


def updated(tickets: Tickets, fence: Fence, **more: object) -> Callable[[Request], Receipt]:
    return tickets.on(fence, key=NEW, formerly=OLD, **more)


def before(tickets: Tickets, fence: Fence) -> Callable[[Request], Receipt]:
    return tickets.on(fence, key=OLD)


def after(tickets: Tickets, fence: Fence) -> Callable[[Request], Receipt]:
    return tickets.on(fence, key=NEW)


def test_what_was_done_under_the_former_key_is_a_duplicate(world: World, tickets: Tickets) -> None:
    first = before(tickets, world.open())(ORDER)
    again = updated(tickets, world.open())(ORDER)
    assert (again.decision, again.result, again.effect_id) == (Decision.DUPLICATE, first.result, first.effect_id)
    assert len(tickets.made) == 1


def test_what_is_done_while_both_are_kept_is_known_by_either(world: World, tickets: Tickets) -> None:
    first = updated(tickets, world.open())(ORDER)
    assert first.decision is Decision.NEW
    for way in (before, updated, after):
        again = way(tickets, world.open())(ORDER)
        assert (again.decision, again.result, again.effect_id) == (Decision.DUPLICATE, first.result, first.effect_id)
    assert len(tickets.made) == 1


def test_the_switch_repeats_nothing_that_was_seen_while_both_were_kept(world: World, tickets: Tickets) -> None:
    before(tickets, world.open())(ORDER)
    updated(tickets, world.open())(ORDER)
    assert after(tickets, world.open())(ORDER).decision is Decision.DUPLICATE
    assert len(tickets.made) == 1


def test_an_operation_is_new_only_if_both_keys_say_so(memory: World, tickets: Tickets) -> None:
    """The former key takes two events of one order for one operation, and so they are, while both keys are kept."""
    calls = tickets.on(
        memory.open(),
        key=lambda req: req["id"],
        formerly=lambda req: f"order {req['order']}",
        payload=lambda req: req["amount"],
    )
    calls(ORDER)
    assert calls({**ORDER, "id": "e-2"}).decision is Decision.DUPLICATE
    assert calls({**ORDER, "order": "o-8"}).decision is Decision.DUPLICATE
    assert len(tickets.made) == 1


def test_one_effect_is_counted_once(memory: World, tickets: Tickets) -> None:
    fence = memory.open()
    updated(tickets, fence)(ORDER)
    seals = fence.audit.decisions(phase="seal")["decision"].to_pylist()
    assert sorted(seals) == ["duplicate", "new"]


def test_a_conflict_under_either_key_is_refused_and_poisons_none(memory: World, tickets: Tickets) -> None:
    calls = updated(tickets, memory.open())
    calls(ORDER)
    with pytest.raises(Conflict):  # the same id
        calls({**ORDER, "amount": 6})
    for _ in range(7):  # the same order under another id: more often than there are attempts
        with pytest.raises(Conflict):
            calls({**ORDER, "id": "e-2"})
    assert after(tickets, memory.open())({**ORDER, "id": "e-2"}).decision is Decision.NEW
    assert len(tickets.made) == 2


def test_waiting_for_the_former_key_uses_up_no_attempts(memory: World, tickets: Tickets) -> None:
    source_id, revision = OLD(ORDER)
    abandon(memory.open(), Operation(kind="ticket", source_id=source_id, revision=revision), ORDER)
    calls = updated(tickets, memory.open(), wait_s=0)
    for _ in range(7):
        with pytest.raises(InFlight):
            calls(ORDER)
    memory.let_leases_run_out()
    assert calls(ORDER).decision is Decision.NEW


def test_a_failure_is_final_under_both(memory: World, tickets: Tickets) -> None:
    tickets.then = [TerminalError("never")]
    with pytest.raises(TerminalError, match="never"):
        updated(tickets, memory.open())(ORDER)
    for way in (before, updated, after):
        with pytest.raises(EffectFailed, match="never"):
            way(tickets, memory.open())(ORDER)
    assert len(tickets.made) == 1


def test_another_error_leaves_both_keys_free(memory: World, tickets: Tickets) -> None:
    tickets.then = [ValueError("once more")]
    calls = updated(tickets, memory.open())
    with pytest.raises(ValueError, match="once more"):
        calls(ORDER)
    assert calls(ORDER).decision is Decision.NEW
    assert len(tickets.made) == 2


def test_an_unchanged_key_is_claimed_once(memory: World, tickets: Tickets) -> None:
    fence = memory.open()
    calls = tickets.on(fence, key=by_id("id"), formerly=lambda req: req["id"])
    assert calls(ORDER).decision is Decision.NEW
    assert calls(ORDER).decision is Decision.DUPLICATE
    assert fence.audit.decisions(phase="seal").num_rows == 1


def test_two_revisions_of_one_ordered_source_are_refused(memory: World, tickets: Tickets) -> None:
    calls = tickets.on(memory.open(), key=lambda req: ("s", "v2", 1), formerly=lambda req: ("s", "v1", 1))
    with pytest.raises(ValidationError, match="ordered source"):
        calls(ORDER)
    assert tickets.made == []


def test_async_functions_too(memory: World, tickets: Tickets) -> None:
    first = before(tickets, memory.open())(ORDER)
    calls = tickets.on_async(memory.open(), key=NEW, formerly=OLD)
    assert asyncio.run(calls(ORDER)).result == first.result
    assert asyncio.run(calls({**ORDER, "id": "e-9", "order": "o-9"})).decision is Decision.NEW
    assert asyncio.run(calls({**ORDER, "id": "e-9", "order": "o-9"})).decision is Decision.DUPLICATE
    assert len(tickets.made) == 2


@pytest.mark.parametrize("time", [1, 2], ids=["at the former key", "at the new key"])
@pytest.mark.parametrize("point", OPERATION_POINTS)
def test_a_process_that_dies_anywhere_repeats_at_most_what_was_not_committed(
    world: World, tickets: Tickets, point: str, time: int
) -> None:
    process, reached = Process(world), 0

    def die_there() -> None:
        nonlocal reached
        reached += 1
        if reached == time:
            process.die()

    died = False
    with at_point(point, die_there, times=2):
        try:
            elsewhere(lambda: updated(tickets, process.fence)(ORDER))
        except Crash:
            died = True
    made = len(tickets.made)
    for _ in range(2):
        world.let_leases_run_out()
        answers = [way(tickets, world.open())(ORDER) for way in (updated, before, after)]
        assert len({(answer.effect_id, str(answer.result)) for answer in answers}) == 1
    committed = point == "after_seal" or (time == 2 and point not in ("after_claim", "in_effect"))
    assert len(tickets.made) <= made + (0 if committed or not died else 1)


def test_old_and_updated_processes_exclude_each_other(memory: World, tickets: Tickets) -> None:
    """While an updated process runs the effect, one that knows the former key alone waits for it, and the reverse."""
    others: list[BaseException] = []

    def create(request: Request) -> str:
        for way in (before, updated):
            with pytest.raises(InFlight) as refused:
                elsewhere(lambda way=way: tickets_of(way)(request))
            others.append(refused.value)
        return "made"

    def tickets_of(way: Callable[..., Callable[[Request], Receipt]]) -> Callable[[Request], Receipt]:
        return way(Tickets(), memory.open(wait={"mode": "raise"}))

    fence = memory.open()
    fence.once(kind="ticket", key=OLD)(create)(ORDER)
    fence.once(kind="ticket", key=NEW, formerly=OLD)(create)({**ORDER, "id": "e-2", "order": "o-2"})
    assert len(others) == 4


# --- comparing two strategies ---------------------------------------------------------------------------------------


def test_a_comparison_names_what_only_one_of_them_takes_for_the_same() -> None:
    payloads = [
        {"id": "a", "order": 1},
        {"id": "b", "order": 1},
        {"id": "b", "order": 2},
        {"id": "b", "order": 2},
        {"order": 3},
    ]
    found = compare_keys(payloads, by_id("id"), by_fields("order"))
    assert (found.payloads, found.operations, found.unusable) == (5, (2, 2), (4,))
    assert found.only_first == ((1, 2), (1, 3))
    assert found.only_second == ((0, 1),)
    assert found.conflicts == (2, 1)
    assert not found.equal


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=30))
def test_strategies_are_equal_if_and_only_if_they_group_alike(pairs: list[tuple[int, int]]) -> None:
    payloads = [{"a": a, "b": b} for a, b in pairs]
    found = compare_keys(payloads, by_fields("a"), by_fields("b"))
    alike = all((p["a"] == q["a"]) == (p["b"] == q["b"]) for p in payloads for q in payloads)
    assert found.equal == alike
    assert found.operations == (len({p["a"] for p in payloads}), len({p["b"] for p in payloads}))


def test_a_former_key_that_is_in_use_is_no_failure_of_the_effect(world: World, tickets: Tickets) -> None:
    """Also if every error of the function is its last word."""
    fence = world.open()
    calls = updated(tickets, fence, terminal=(Exception,), wait_s=0)
    refused: list[bool] = []

    def call() -> None:
        with pytest.raises(InFlight):
            calls(ORDER)
        refused.append(True)

    def meanwhile(req: Request) -> object:
        elsewhere(call)
        return {"number": 1}

    fence.once(kind="ticket", key=OLD)(meanwhile)(ORDER)
    assert refused == [True]
    assert calls(ORDER).result == {"number": 1}
    assert tickets.made == []
