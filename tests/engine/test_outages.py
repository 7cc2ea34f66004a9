"""An outage of the object store uses up attempts only where an effect may have happened."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ragfence import Decision, Operation, Receipt
from ragfence.engine.refusals import STORE_CODES, code_of, is_outage
from ragfence.errors import Quarantined, RagfenceError, StoreUnavailable, TransientError
from ragfence.testing import FaultyObjects
from tests.engine.jobs import COMMITS, JOB, Job, record_of
from tests.engine.worlds import World, rows_of

ATTEMPTS = 5


@pytest.mark.parametrize("sequence", [None, 1])
@pytest.mark.parametrize("how", ["sync", "async", "block", "async block"])
def test_an_effect_that_was_not_entered_uses_up_no_attempt(
    backed: World, job: Job, how: str, sequence: int | None
) -> None:
    objects = FaultyObjects(backed.objects)  # type: ignore[arg-type]
    fence = backed.open(objects=objects)
    fence.hydrate()
    objects.on("get" if sequence is None else "list", COMMITS).fail_before(times=None)

    def call() -> Receipt:
        if how == "sync":
            return job.on(fence, sequence)()
        operation = Operation(kind="job", source_id="j1", revision="r" if sequence else "", sequence=sequence)
        if how == "block":
            with fence.claim(operation) as op:
                if op.is_new:
                    op.seal(result=job.effect())
            return op.receipt
        return asyncio.run(later(operation))

    async def later(operation: Operation) -> Receipt:
        if how == "async":

            async def effect() -> str:
                return job.effect()

            key = "j1" if sequence is None else ("j1", "r", sequence)
            receipt: Receipt = await fence.once(kind="job", key=lambda: key)(effect)()
            return receipt
        async with fence.claim(operation) as op:
            if op.is_new:
                op.seal(result=job.effect())
        return op.receipt

    for _ in range(2 * ATTEMPTS):
        with pytest.raises(StoreUnavailable):
            call()
    assert job.done == 0
    assert {row["error_code"] for row in rows_of(fence)} - {None, ""} == {"STORE.unavailable"}
    objects.heal()
    receipt = call()
    assert (receipt.decision, receipt.flags.attempt, job.done) == (Decision.NEW, 1, 1)
    assert fence.audit.check().ok


def test_an_effect_that_happened_and_cannot_be_committed_uses_up_its_attempts(backed: World, job: Job) -> None:
    objects = FaultyObjects(backed.objects)  # type: ignore[arg-type]
    fence = backed.open(objects=objects)
    objects.on("put_new", COMMITS).fail_before(times=None)
    for _ in range(ATTEMPTS):
        with pytest.raises(StoreUnavailable):
            job.on(fence)()
    with pytest.raises(Quarantined) as refused:
        job.on(fence)()
    assert job.done == ATTEMPTS
    assert refused.value.error_code == "STORE.unavailable"


def test_an_effect_that_raises_the_error_of_a_store_counts(world: World, job: Job) -> None:
    """It was entered, and nobody knows what it did before."""
    fence = world.open()

    def fail() -> None:
        raise StoreUnavailable("some other store of the user's own")

    for _ in range(ATTEMPTS):
        job.during.append(fail)
        with pytest.raises(StoreUnavailable):
            job.on(fence)()
    with pytest.raises(Quarantined):
        job.on(fence)()


def test_a_recovery_that_fails_counts(world: World, job: Job) -> None:
    fence = world.open()
    job.during.append(lambda: (_ for _ in ()).throw(TimeoutError()))
    with pytest.raises(TimeoutError):
        job.on(fence)()

    def recover() -> Any:
        raise ConnectionError

    for _ in range(ATTEMPTS - 1):
        with pytest.raises(ConnectionError):
            job.on(fence, recover=recover)()
    with pytest.raises(Quarantined):
        job.on(fence, recover=recover)()


def test_a_caller_that_is_cancelled_before_its_effect_uses_up_no_attempt(backed: World) -> None:
    fence = backed.open()

    async def story() -> None:
        for _ in range(2 * ATTEMPTS):
            task = asyncio.ensure_future(fence.claim(JOB).__aenter__())
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(story())
    record = record_of(backed)
    assert record is None or record.attempt == 0
    with fence.claim(JOB) as op:
        assert op.lease.attempt == 1


def test_a_failure_of_a_store_has_a_code_of_its_own() -> None:
    for kind, code in STORE_CODES.items():
        assert code.startswith("STORE.")
        assert code_of(kind("away")) == code
        assert is_outage(kind("away"))
    assert code_of(ValueError()) == "ValueError"
    assert code_of(TransientError("busy")) == "TRANSIENT"
    assert not is_outage(RagfenceError("broken"))
    assert not is_outage(None)
