"""`with fence.claim(...)`: effects that are no single function, verdicts, and revisions with a sequence."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import ragfence
from ragfence import Decision, Fence, Operation, Receipt
from ragfence.core.layout import State
from ragfence.errors import (
    Conflict,
    EffectFailed,
    FencedOut,
    InFlight,
    NestedClaim,
    NotJson,
    Quarantined,
    RagfenceError,
    Stale,
    TerminalError,
    ValidationError,
)
from ragfence.stores.fences import Lookup
from tests import servers
from tests.engine.worlds import World, Wrapped, abandon, eventually

EVENT = Operation(kind="webhook", source_id="evt_1", tenant="default")


def apply(fence: Fence, operation: Operation = EVENT, payload: object = None, **options: Any) -> Receipt:
    with fence.claim(operation, payload=payload, **options) as op:
        if op.is_new:
            op.seal(result=f"{operation.sequence}:{operation.revision}")
    return op.receipt


def revision(sequence: int, name: str = "", **more: Any) -> Operation:
    return Operation(kind="webhook", source_id="evt_1", revision=name, sequence=sequence, tenant="default", **more)


def record_of(fence: Fence, operation: Operation = EVENT) -> Any:
    (held,) = fence.inspector.fences.read([Lookup(operation.key)])
    return held.record


def test_the_first_block_is_new_and_every_later_one_has_its_receipt(world: World) -> None:
    fence = world.open()
    with fence.claim(EVENT, payload={"a": 1}) as op:
        assert (op.is_new, op.decision, op.key) == (True, Decision.NEW, EVENT.key.hex())
        sealed = op.seal(effect_id="e1", result={"pair": (1, 2)})
    assert op.receipt is sealed
    assert (sealed.effect_id, sealed.result, sealed.decision) == ("e1", {"pair": [1, 2]}, Decision.NEW)
    with fence.claim(EVENT, payload={"a": 1}) as again:
        assert (again.is_new, again.decision) == (False, Decision.DUPLICATE)
    assert again.receipt == sealed


def test_a_block_can_be_async(world: World) -> None:
    async def claimed() -> Receipt:
        async with world.open().claim(EVENT) as op:
            if op.is_new:
                assert ragfence.current_lease() is op.lease
                op.seal(result=7)
        return op.receipt

    first, second = asyncio.run(claimed()), asyncio.run(claimed())
    assert first == second
    assert (first.decision, second.decision) == (Decision.NEW, Decision.DUPLICATE)


def test_a_block_left_without_a_seal_gives_the_key_back(world: World) -> None:
    fence = world.open()
    with fence.claim(EVENT) as op:
        assert op.is_new
    assert (record_of(fence).state, record_of(fence).error) == (State.RELEASED, "RELEASED")
    with pytest.raises(ValidationError, match="has no receipt yet"):
        op.receipt  # noqa: B018
    assert apply(fence).flags.attempt == 2


def test_an_async_block_left_without_a_seal_gives_the_key_back(world: World) -> None:
    fence = world.open()

    async def claimed() -> None:
        async with fence.claim(EVENT) as op:
            assert op.is_new

    asyncio.run(claimed())
    assert record_of(fence).state is State.RELEASED


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RuntimeError("x"), "RuntimeError"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (SystemExit("password=x"), "SystemExit"),
        (ValidationError("x"), "VALIDATION"),
    ],
)
def test_an_exception_out_of_a_block_gives_the_key_back(world: World, error: BaseException, code: str) -> None:
    fence = world.open()
    with pytest.raises(type(error)), fence.claim(EVENT):
        raise error
    assert (record_of(fence).state, record_of(fence).error) == (State.RELEASED, code)


def test_a_terminal_error_out_of_a_block_is_sealed(world: World) -> None:
    fence = world.open()
    with pytest.raises(TerminalError, match="never"), fence.claim(EVENT):
        raise TerminalError("never")
    with pytest.raises(EffectFailed, match="never"), fence.claim(EVENT):
        pytest.fail("it must not be entered")


def test_an_exception_after_the_seal_changes_nothing(world: World) -> None:
    fence = world.open()

    def fail_late() -> None:
        with fence.claim(EVENT) as op:
            op.seal(result=1)
            raise RuntimeError("too late")

    with pytest.raises(RuntimeError):
        fail_late()
    assert apply(fence).result == 1


def test_a_cancelled_async_block_gives_the_key_back(world: World) -> None:
    fence = world.open()

    async def run() -> None:
        entered = asyncio.Event()

        async def endless() -> None:
            async with fence.claim(EVENT):
                entered.set()
                await asyncio.sleep(3600)

        task = asyncio.ensure_future(endless())
        await entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert (record_of(fence).state, record_of(fence).error) == (State.RELEASED, "CancelledError")


def test_a_claim_that_is_won_for_a_block_never_entered_is_given_back(memory: World) -> None:
    asked, go_on = threading.Event(), threading.Event()

    class Slow(Wrapped):
        def claim(self, claims: Any) -> Any:
            asked.set()
            assert go_on.wait(20)
            return self.inner.claim(claims)

    async def run() -> None:
        async def enter() -> None:
            async with memory.open(fences=Slow).claim(EVENT):
                pytest.fail("it was cancelled before")

        task = asyncio.ensure_future(enter())
        await asyncio.to_thread(asked.wait, 20)
        task.cancel()
        await asyncio.sleep(0.01)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    eventually(lambda: record_of(memory.open()).state is State.RELEASED)


def test_a_block_may_be_left_in_another_context_than_it_was_entered_in(memory: World) -> None:
    fence = memory.open()
    op = fence.claim(EVENT)
    contextvars.copy_context().run(op.__enter__)
    op.__exit__(None, None, None)
    assert record_of(fence).state is State.RELEASED


def test_a_block_is_sealed_once(world: World) -> None:
    fence = world.open()
    with fence.claim(EVENT) as op:
        first = op.seal(result=1)
        with pytest.raises(ValidationError, match="sealed already"):
            op.seal(result=2)
    assert apply(fence) == first


def test_what_was_not_won_cannot_be_sealed_and_has_no_lease(world: World) -> None:
    fence = world.open()
    apply(fence)
    with fence.claim(EVENT) as op:
        for wrong in (lambda: op.seal(result=2), lambda: op.lease):
            with pytest.raises(ValidationError, match="was not won") as refused:
                wrong()
            assert "op.is_new" in refused.value.hint


def test_a_seal_after_the_block_is_refused(world: World) -> None:
    fence = world.open()
    with fence.claim(EVENT) as op:
        pass
    with pytest.raises(ValidationError, match="released when its block ended"):
        op.seal(result="too late")
    assert apply(fence).result == "None:"


def test_a_claim_is_used_once(world: World) -> None:
    fence = world.open()
    op = fence.claim(EVENT)
    with op:
        op.seal()
    with pytest.raises(ValidationError, match="used already"):
        op.__enter__()


def test_a_result_that_cannot_be_stored_leaves_the_block_open_for_another(world: World) -> None:
    fence = world.open()
    with fence.claim(EVENT) as op:
        with pytest.raises(NotJson):
            op.seal(result=object())
        op.seal(result="an id")
    assert apply(fence).result == "an id"


def test_the_key_of_a_sealed_block_can_be_claimed_inside_it(memory: World) -> None:
    fence = memory.open()
    with fence.claim(EVENT) as op:
        with pytest.raises(NestedClaim):
            apply(fence)
        op.seal(result=1)
        assert apply(fence) == op.receipt


def test_what_the_caller_says_of_a_claim_stands_in_its_row(memory: World) -> None:
    fence = memory.open()
    apply(fence, event_id="e-1", correlation_id="c-1", route="/hooks")
    for row in fence.audit.decisions().to_pylist():
        assert (row["event_id"], row["correlation_id"], row["route"]) == ("e-1", "c-1", "/hooks")


def conflict(fence: Fence) -> Any:
    apply(fence, payload=1)
    return fence.claim(EVENT, payload=2, verdict=True)


def stale(fence: Fence) -> Any:
    apply(fence, revision(2))
    return fence.claim(revision(1), verdict=True)


def in_flight(fence: Fence) -> Any:
    abandon(fence, EVENT)
    return fence.claim(EVENT, wait_s=0, verdict=True)


def quarantined(fence: Fence) -> Any:
    with fence.claim(EVENT):
        pass
    return fence.claim(EVENT, verdict=True)


@pytest.mark.parametrize(
    ("prepare", "decision", "error"),
    [
        (conflict, Decision.CONFLICT, Conflict),
        (stale, Decision.STALE, Stale),
        (in_flight, Decision.IN_FLIGHT, InFlight),
        (quarantined, Decision.IN_FLIGHT, Quarantined),
    ],
)
def test_whoever_asks_for_the_verdict_is_told_instead_of_raised_at(
    world: World, prepare: Callable[[Fence], Any], decision: Decision, error: type[RagfenceError]
) -> None:
    fence = world.open(lease={"max_attempts": 1})
    claim = prepare(fence)
    with claim as op:
        assert not op.is_new
        assert op.decision is decision
        assert type(op.error) is error
        with pytest.raises(ValidationError):
            op.seal()
    assert fence.audit.decisions(decision=decision.value).num_rows == 1


@pytest.mark.parametrize("prepare", [conflict, stale, in_flight, quarantined])
def test_an_async_block_is_told_the_verdict_too(memory: World, prepare: Callable[[Fence], Any]) -> None:
    claim = prepare(memory.open(lease={"max_attempts": 1}))

    async def run() -> None:
        async with claim as op:
            assert not op.is_new
            assert op.error is not None

    asyncio.run(run())


def test_the_verdict_of_a_failed_effect_is_its_receipt(world: World) -> None:
    fence = world.open()
    with pytest.raises(TerminalError), fence.claim(EVENT):
        raise TerminalError("never")
    with fence.claim(EVENT, verdict=True) as op:
        assert (op.is_new, op.error) == (False, None)
    assert op.receipt.failed
    assert op.receipt.failure is not None
    assert op.receipt.failure["message"] == "never"


def test_a_conflict_shows_the_receipt_that_stands(world: World) -> None:
    fence = world.open()
    first = apply(fence, payload=1)
    with pytest.raises(Conflict) as refused:
        apply(fence, payload=2)
    assert refused.value.receipt == first


def test_revisions_are_applied_in_the_order_of_their_sequence(world: World) -> None:
    fence = world.open()
    one, three = apply(fence, revision(1)), apply(fence, revision(3))
    with pytest.raises(Stale) as refused:
        apply(fence, revision(2))
    assert (refused.value.sequence, refused.value.newest) == (2, 3)
    assert apply(fence, revision(3)) == three
    with pytest.raises(Stale):
        apply(fence, revision(1))
    assert one.result == "1:1"
    assert fence.audit.check().ok


FORGETTING: dict[str, Callable[[Any, Any], None]] = {
    "nothing": lambda store, before: None,
    "flush": lambda store, before: store.flush(),
    "restart": lambda store, before: store.restart(),
    "failover": lambda store, before: store.fail_over(before),
}


@pytest.fixture(params=FORGETTING)
def forget(request: pytest.FixtureRequest, memory: World) -> Callable[[], None]:
    """The fence store loses something, or everything; the objects remain."""
    before = memory.store.snapshot()
    return lambda: FORGETTING[request.param](memory.store, before)


def test_a_replay_with_a_higher_sequence_moves_its_source(world: World) -> None:
    """3:A, 5:A, 4:B: without the move, B would be applied over an A that was confirmed after it."""
    fence = world.open()
    first = apply(fence, revision(3, "A"))
    again = apply(fence, revision(5, "A"))
    assert again == first
    assert (again.decision, again.flags.healed) == (Decision.DUPLICATE, False)
    with pytest.raises(Stale) as refused:
        apply(fence, revision(4, "B"))
    assert refused.value.newest == 5
    assert apply(fence, revision(6, "B")).is_new
    assert fence.audit.check().ok, str(fence.audit.check())


def test_the_raised_sequence_survives_whatever_the_store_forgets(memory: World, forget: Callable[[], None]) -> None:
    fence = memory.open()
    first = apply(fence, revision(3, "A"))
    forget()
    assert apply(fence, revision(5, "A")) == first
    forget()
    with pytest.raises(Stale) as refused:
        apply(fence, revision(4, "B"))
    assert refused.value.newest == 5
    forget()
    assert apply(fence, revision(5, "A")) == first
    assert fence.audit.check().ok, str(fence.audit.check())


def test_every_answer_survives_whatever_the_store_forgets(memory: World, forget: Callable[[], None]) -> None:
    fence = memory.open()
    keyed, newest = apply(fence, payload=1), apply(fence, revision(3, "A"), payload=1)
    with pytest.raises(TerminalError), fence.claim(Operation(kind="webhook", source_id="failing")):
        raise TerminalError("never")
    for _ in range(2):
        forget()
        assert apply(fence, payload=1) == keyed
        with pytest.raises(EffectFailed, match="never"):
            apply(fence, Operation(kind="webhook", source_id="failing"))
        assert apply(fence, revision(3, "A"), payload=1) == newest
        with pytest.raises(Stale):
            apply(fence, revision(2, "B"))
        with pytest.raises(Conflict):
            apply(fence, revision(3, "B"))
    assert fence.audit.check().ok, str(fence.audit.check())


@pytest.mark.parametrize("operation", [EVENT, revision(3, "A")])
def test_a_conflicting_call_after_a_flush_does_not_take_the_key_from_its_payload(
    memory: World, operation: Operation
) -> None:
    fence = memory.open(lease={"max_attempts": 2})
    first = apply(fence, operation, payload="right")
    memory.store.flush()
    for turn in range(4):
        with pytest.raises(Conflict):
            apply(fence, operation, payload="wrong", event_id=f"wrong {turn}")
        again = apply(fence, operation, payload="right", event_id=f"right {turn}")
        assert again == first
        assert again.decision is Decision.DUPLICATE
        rows = [(row["event_id"], row["decision"]) for row in fence.audit.decisions().to_pylist()]
        passing = ("new", "in_flight")  # granted, or quarantined: not the last word
        told = [each for each in rows if each[0] and each[0].endswith(str(turn)) and each[1] not in passing]
        assert sorted(told) == [(f"right {turn}", "duplicate"), (f"wrong {turn}", "conflict")]
    assert fence.audit.check().ok, str(fence.audit.check())


def test_a_stale_call_after_a_flush_is_stale_however_often_it_comes(memory: World) -> None:
    fence = memory.open(lease={"max_attempts": 2})
    apply(fence, revision(3))
    memory.store.flush()
    for _ in range(4):
        with pytest.raises(Stale):
            apply(fence, revision(2))


def test_a_conflicting_call_after_a_flush_does_not_raise_the_sequence(memory: World) -> None:
    fence = memory.open()
    apply(fence, revision(3, "A"), payload="right")
    memory.store.flush()
    with pytest.raises(Conflict):
        apply(fence, revision(5, "A"), payload="wrong")
    assert apply(fence, revision(4, "B")).is_new


def test_a_superseded_revision_is_stale_whatever_the_store_forgets(memory: World, forget: Callable[[], None]) -> None:
    """Many sources: what counts must not depend on the order in which the revisions are listed."""
    fence = memory.open()
    revisions = [
        [
            Operation(kind="webhook", source_id=f"evt_{n}", revision=name, sequence=at)
            for name, at in (("A", 3), ("B", 4))
        ]
        for n in range(8)
    ]
    for older, newer in revisions:
        apply(fence, older)
        apply(fence, newer)
    forget()
    for older, _ in revisions:
        with pytest.raises(Stale):
            apply(fence, older)


def test_whoever_loses_its_commit_to_a_lower_sequence_raises_it_before_it_is_answered(world: World) -> None:
    slow = abandon(world.open(), revision(5, "A"))
    world.let_leases_run_out()
    first = apply(world.open(), revision(3, "A"))
    with pytest.raises(FencedOut) as lost:
        slow.seal(result="zombie")
    assert lost.value.receipt == first
    with pytest.raises(Stale):
        apply(world.open(), revision(4, "B"))


def test_the_sequence_of_another_revision_is_a_conflict(world: World) -> None:
    fence = world.open()
    apply(fence, revision(3, "A"))
    with pytest.raises(Conflict, match="sequence taken by another revision"):
        apply(fence, revision(3, "B"))


def test_a_source_has_one_writer_whatever_the_revision(world: World) -> None:
    fence = world.open()
    owner = abandon(fence, revision(1))
    with pytest.raises(InFlight):
        apply(fence, revision(2), wait_s=0)
    world.let_leases_run_out()
    taken = apply(fence, revision(2))
    assert taken.flags.takeover
    with pytest.raises(RagfenceError):
        owner.seal(result="zombie")
    with pytest.raises(Stale):
        apply(fence, revision(1))


def test_sequences_of_another_source_or_kind_are_their_own(world: World) -> None:
    fence = world.open()
    apply(fence, revision(5))
    for other in ({"source_id": "evt_2"}, {"kind": "api"}, {"source_type": "x"}):
        operation = Operation(**{"kind": "webhook", "source_id": "evt_1", "sequence": 1, **other})
        assert apply(fence, operation).is_new


def test_without_a_sequence_revisions_do_not_exclude_each_other(world: World) -> None:
    fence = world.open()
    with fence.claim(Operation(kind="webhook", source_id="evt_1", revision="1")) as op:
        assert apply(fence, Operation(kind="webhook", source_id="evt_1", revision="2")).is_new
        op.seal()


def test_sequences_have_64_bits(world: World) -> None:
    fence = world.open()
    numbers = [-(2**63), -1, 0, 2**53, 2**53 + 1, 2**63 - 1]
    for older, newer in zip([None, *numbers], numbers, strict=False):
        assert apply(fence, revision(newer)).is_new
        if older is not None:
            with pytest.raises(Stale) as refused:
                apply(fence, revision(older))
            assert refused.value.newest == newer


def test_sequences_have_64_bits_also_when_only_the_objects_know_them(memory: World) -> None:
    fence = memory.open()
    apply(fence, revision(2**53, "A"))
    apply(fence, revision(2**63 - 1, "A"))
    memory.store.flush()
    with pytest.raises(Stale) as refused:
        apply(fence, revision(2**63 - 2, "B"))
    assert refused.value.newest == 2**63 - 1


@pytest.mark.parametrize("sequence", [2**63, -(2**63) - 1, True, 1.0, "1"])
def test_a_sequence_that_is_no_64_bit_integer_is_refused(sequence: Any) -> None:
    with pytest.raises(ValidationError, match="sequence"):
        revision(sequence)


def test_the_answers_survive_a_flush_of_valkey(tmp_path: Path, moto_server: servers.S3Server, s3_env: None) -> None:
    import redis

    where = f"s3://{moto_server.bucket}/{tmp_path.name}?endpoint_url={moto_server.url}"
    with (
        servers.valkey() as server,
        closing(ragfence.open(server.url, objects=where, policy=ragfence.Policy())) as fence,
        redis.Redis.from_url(server.url) as client,
    ):
        keyed, first = apply(fence), apply(fence, revision(3, "A"))
        assert apply(fence, revision(2**60, "A")) == first
        client.flushall()
        assert apply(fence) == keyed
        with pytest.raises(Stale) as refused:
            apply(fence, revision(4, "B"))
        assert refused.value.newest == 2**60
        server.restart()
        assert apply(fence, revision(2**60, "A")) == first
        assert apply(fence, revision(2**60 + 1, "C")).is_new
