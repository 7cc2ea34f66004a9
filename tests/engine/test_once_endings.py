"""`@fence.once`: every way in which an effect can fail, be given up, be released or turn out to have happened."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ragfence import Decision, Operation, Recovered
from ragfence.core.layout import State
from ragfence.errors import (
    Conflict,
    EffectFailed,
    NestedClaim,
    Quarantined,
    Stale,
    StoreAuth,
    TerminalError,
    ValidationError,
)
from ragfence.testing.crash_points import at_point
from tests.engine.worlds import REQUEST, Request, Tickets, World, abandon, key_of, record_of, rows_of


class NoSuchCustomer(TerminalError):
    code = "APP.no_such_customer"


@pytest.mark.parametrize("error", [TerminalError("never"), NoSuchCustomer("never")])
def test_a_terminal_error_is_sealed_and_replayed_to_everybody(
    world: World, tickets: Tickets, error: TerminalError
) -> None:
    tickets.then = [error]
    first = world.open()
    with pytest.raises(type(error), match="never"):
        tickets.on(first)(REQUEST)
    for fence in (first, world.open()):
        with pytest.raises(EffectFailed, match="never") as replay:
            tickets.on(fence)(REQUEST)
        assert replay.value.receipt.failure == {"type": type(error).__name__, "code": error.code, "message": "never"}
        assert replay.value.key == key_of()
    assert len(tickets.made) == 1


def test_an_async_terminal_error_is_sealed_too(memory: World, tickets: Tickets) -> None:
    tickets.then = [NoSuchCustomer("never")]
    create = tickets.on_async(memory.open())
    with pytest.raises(NoSuchCustomer):
        asyncio.run(create(REQUEST))
    with pytest.raises(EffectFailed):
        asyncio.run(create(REQUEST))


@pytest.mark.parametrize("terminal", [(KeyError,), LookupError])
def test_exceptions_named_terminal_are_sealed_and_others_are_not(
    memory: World, tickets: Tickets, terminal: Any
) -> None:
    create = tickets.on(memory.open(), terminal=terminal)
    tickets.then = [ValueError("once more"), KeyError("gone")]
    with pytest.raises(ValueError, match="once more"):
        create(REQUEST)
    with pytest.raises(KeyError):
        create(REQUEST)
    with pytest.raises(EffectFailed, match="KeyError: 'gone'"):
        create(REQUEST)
    assert len(tickets.made) == 2


@pytest.mark.parametrize("terminal", [[KeyError], "KeyError", (KeyError("x"),), (BaseException,)])
def test_what_is_no_exception_class_cannot_be_terminal(memory: World, tickets: Tickets, terminal: Any) -> None:
    with pytest.raises(ValidationError, match="terminal="):
        tickets.on(memory.open(), terminal=terminal)


@pytest.mark.parametrize(
    "error", [StoreAuth("password"), NestedClaim("own key"), Conflict("other key"), ValidationError("bad"), Stale("x")]
)
def test_what_ragfence_itself_raises_inside_an_effect_is_not_final(
    memory: World, tickets: Tickets, error: TerminalError
) -> None:
    tickets.then = [error]
    create = tickets.on(memory.open())
    with pytest.raises(type(error)):
        create(REQUEST)
    assert create(REQUEST).is_new


def test_a_failure_message_is_redacted_before_it_is_stored(memory: World, tickets: Tickets) -> None:
    tickets.then = [TerminalError("refused: password=hunter2")]
    create = tickets.on(memory.open())
    with pytest.raises(TerminalError):
        create(REQUEST)
    with pytest.raises(EffectFailed) as replay:
        create(REQUEST)
    assert "hunter2" not in str(replay.value)
    assert "hunter2" not in repr(replay.value.receipt)


def test_any_other_exception_gives_the_key_back_at_once_and_is_remembered(world: World, tickets: Tickets) -> None:
    tickets.then = [ConnectionError("api.example.org: token=abc")]
    fence = world.open()
    create = tickets.on(fence)
    with pytest.raises(ConnectionError):
        create(REQUEST)
    record = record_of(fence, key_of())
    assert (record.state, record.attempt, record.error) == (State.RELEASED, 1, "ConnectionError")
    second = create(REQUEST)
    assert (second.decision, second.flags.attempt, second.flags.takeover) == (Decision.NEW, 2, False)
    assert [row["error_code"] for row in rows_of(fence) if row["error_code"]] == ["ConnectionError"]
    assert fence.audit.check().ok


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit("password=hunter2"), SystemExit(3), GeneratorExit()])
def test_whatever_ends_the_process_gives_the_key_back(world: World, tickets: Tickets, error: BaseException) -> None:
    tickets.then = [error]
    fence = world.open()
    create = tickets.on(fence)
    with pytest.raises(type(error)):
        create(REQUEST)
    record = record_of(fence, key_of())
    assert (record.state, record.error) == (State.RELEASED, type(error).__name__)
    assert create(REQUEST).is_new


def test_an_exit_during_the_commit_gives_the_key_back(world: World, tickets: Tickets) -> None:
    def leave() -> None:
        raise SystemExit(3)

    fence = world.open()
    create = tickets.on(fence)
    with at_point("before_seal", leave), pytest.raises(SystemExit):
        create(REQUEST)
    assert not record_of(fence, key_of()).held_at(world.clock() + 1)
    again = create(REQUEST)
    assert again.result == {"number": 1 if world.objects else 2}


def test_after_too_many_attempts_a_key_is_quarantined_until_it_is_released(world: World, tickets: Tickets) -> None:
    tickets.then = [RuntimeError("1"), RuntimeError("2")]
    fence = world.open(lease={"max_attempts": 2})
    create = tickets.on(fence)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            create(REQUEST)
    for _ in range(2):
        with pytest.raises(Quarantined, match="failed 2 times, last with RuntimeError") as stuck:
            create(REQUEST)
        assert (stuck.value.attempt, stuck.value.error_code, stuck.value.key) == (2, "RuntimeError", key_of())
    assert len(tickets.made) == 2
    assert [row["decision"] for row in rows_of(fence) if row["error_code"] == "QUARANTINED"] == ["in_flight"] * 2
    assert fence.release(key_of())
    assert create(REQUEST).result == {"number": 3}


@pytest.mark.parametrize("form", ["key", "operation"])
@pytest.mark.parametrize("sequence", [None, 0, 7])
def test_a_quarantined_key_is_released_by_its_text_and_by_its_operation(
    world: World, tickets: Tickets, sequence: int | None, form: str
) -> None:
    tickets.then = [RuntimeError("1")]
    fence = world.open(lease={"max_attempts": 1})
    create = tickets.on(fence, key=lambda req: ("a", "r", sequence))
    with pytest.raises(RuntimeError):
        create(REQUEST)
    with pytest.raises(Quarantined) as stuck:
        create(REQUEST)
    operation = Operation(kind="ticket", source_id="a", revision="r", sequence=sequence)
    assert fence.release(stuck.value.key if form == "key" else operation)
    assert create(REQUEST).is_new


def test_a_key_sealed_as_a_failure_can_be_released_into_a_second_life(world: World, tickets: Tickets) -> None:
    tickets.then = [TerminalError("never")]
    fence = world.open()
    create = tickets.on(fence)
    with pytest.raises(TerminalError):
        create(REQUEST)
    assert fence.release(key_of())
    again = create(REQUEST)
    assert (again.is_new, again.result) == (True, {"number": 2})
    assert create(REQUEST) == again
    assert [row["error_code"] for row in rows_of(fence, decision="ended")] == ["release"]
    assert fence.audit.check().ok, str(fence.audit.check())


def test_a_failure_that_only_the_object_store_knows_can_be_released(memory: World, tickets: Tickets) -> None:
    tickets.then = [TerminalError("never")]
    fence = memory.open()
    create = tickets.on(fence)
    with pytest.raises(TerminalError):
        create(REQUEST)
    memory.store.flush()
    assert fence.release(key_of())
    assert create(REQUEST).is_new
    assert fence.audit.check().ok


def test_what_is_sealed_cannot_be_released(world: World, tickets: Tickets) -> None:
    fence = world.open()
    first = tickets.on(fence)(REQUEST)
    with pytest.raises(ValidationError, match="cannot be released") as refused:
        fence.release(first.key)
    assert "revision" in refused.value.hint
    assert tickets.on(fence)(REQUEST) == first


def test_there_is_nothing_to_release_of_an_unknown_operation(world: World) -> None:
    fence = world.open()
    assert not fence.release(Operation(kind="ticket", source_id="nobody"))
    with pytest.raises(ValidationError, match="no decision row names the key"):
        fence.release(key_of())
    with pytest.raises(ValidationError, match="is not a key"):
        fence.release("t-1")


def test_recover_is_not_asked_on_a_first_attempt(world: World, tickets: Tickets) -> None:
    create = tickets.on(world.open(), recover=lambda req: pytest.fail("nothing can have happened"))
    assert create(REQUEST).is_new
    assert create(REQUEST).decision is Decision.DUPLICATE


def test_what_recover_finds_is_sealed_instead_of_a_second_effect(world: World, tickets: Tickets) -> None:
    tickets.then = [ConnectionError("the reply was lost")]
    asked: list[Request] = []

    def recover(req: Request) -> Recovered:
        asked.append(req)
        return Recovered({"number": "found"}, effect_id="api-7")

    create = tickets.on(world.open(), recover=recover)
    with pytest.raises(ConnectionError):
        create(REQUEST)
    receipt = create(REQUEST)
    assert (receipt.result, receipt.effect_id, receipt.flags.attempt) == ({"number": "found"}, "api-7", 2)
    assert asked == tickets.made == [REQUEST]
    assert create(REQUEST) == receipt


def test_the_effect_is_performed_when_recover_finds_nothing(world: World, tickets: Tickets) -> None:
    tickets.then = [ConnectionError("down")]
    create = tickets.on(world.open(), recover=lambda req: None)
    with pytest.raises(ConnectionError):
        create(REQUEST)
    assert create(REQUEST).result == {"number": 2}


def test_recover_is_asked_on_a_takeover(world: World, tickets: Tickets) -> None:
    operation = Operation(kind="ticket", source_id="t-1", revision="1")
    abandon(world.open(), operation, REQUEST)
    world.let_leases_run_out()
    receipt = tickets.on(world.open(), recover=lambda req: Recovered("theirs"))(REQUEST)
    assert receipt.result == "theirs"
    assert receipt.flags.takeover
    assert tickets.made == []


def test_recover_is_asked_after_a_quarantined_key_was_released(world: World, tickets: Tickets) -> None:
    tickets.then = [ConnectionError("the reply was lost")]
    fence = world.open(lease={"max_attempts": 1})
    create = tickets.on(fence, recover=lambda req: Recovered("theirs"))
    with pytest.raises(ConnectionError):
        create(REQUEST)
    with pytest.raises(Quarantined):
        create(REQUEST)
    fence.release(key_of())
    assert create(REQUEST).result == "theirs"
    assert len(tickets.made) == 1


@pytest.mark.parametrize("wrong", [{"number": 1}, True, "found"])
def test_recover_must_say_recovered_or_none(memory: World, tickets: Tickets, wrong: object) -> None:
    tickets.then = [ConnectionError("down")]
    fence = memory.open()
    create = tickets.on(fence, recover=lambda req: wrong)
    with pytest.raises(ConnectionError):
        create(REQUEST)
    with pytest.raises(ValidationError, match=f"returned {type(wrong).__name__}") as refused:
        create(REQUEST)
    assert "Recovered" in refused.value.hint
    assert len(tickets.made) == 1
    assert record_of(fence, key_of()).state is State.RELEASED


def test_an_async_function_may_have_an_async_recover(memory: World, tickets: Tickets) -> None:
    async def recover(req: Request) -> Recovered:
        await asyncio.sleep(0)
        return Recovered("theirs")

    tickets.then = [ConnectionError("down")]
    create = tickets.on_async(memory.open(), recover=recover)
    with pytest.raises(ConnectionError):
        asyncio.run(create(REQUEST))
    assert asyncio.run(create(REQUEST)).result == "theirs"


def test_an_async_recover_of_a_plain_function_is_refused_when_it_is_decorated(memory: World, tickets: Tickets) -> None:
    async def recover(req: Request) -> None: ...

    with pytest.raises(ValidationError, match="is async, the function is not"):
        tickets.on(memory.open(), recover=recover)


def test_the_effect_id_is_made_out_of_the_result(world: World, tickets: Tickets) -> None:
    create = tickets.on(world.open(), effect_id=lambda result: f"ticket-{result['number']}")
    assert create(REQUEST).effect_id == create(REQUEST).effect_id == "ticket-1"


def test_the_effect_id_of_a_recovered_result_is_made_the_same_way(memory: World, tickets: Tickets) -> None:
    tickets.then = [ConnectionError("down"), ConnectionError("down")]
    found = iter([Recovered({"number": 9}), Recovered()])
    create = tickets.on(
        memory.open(), effect_id=lambda result: f"ticket-{result['number']}", recover=lambda req: next(found)
    )
    for version, expected in (("1", "ticket-9"), ("2", "ef_")):
        req = {**REQUEST, "version": version}
        with pytest.raises(ConnectionError):
            create(req)
        assert create(req).effect_id.startswith(expected)


def test_an_effect_without_an_id_gets_one_from_its_key(memory: World, solo: World, tickets: Tickets) -> None:
    one, other = tickets.on(memory.open())(REQUEST), tickets.on(solo.open())(REQUEST)
    assert one.effect_id == other.effect_id
    assert one.effect_id.startswith("ef_")
    assert tickets.on(memory.open())({**REQUEST, "version": "2"}).effect_id != one.effect_id


@pytest.mark.parametrize("bad", ["", "a\nb", "x" * 256])
def test_an_effect_id_that_cannot_be_stored_seals_nothing(memory: World, tickets: Tickets, bad: str) -> None:
    fence = memory.open()
    with pytest.raises(ValidationError, match="effect_id"):
        tickets.on(fence, effect_id=lambda result: bad)(REQUEST)
    assert record_of(fence, key_of()).state is State.RELEASED
    assert tickets.on(fence)(REQUEST).is_new
