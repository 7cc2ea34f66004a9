"""`with fence.claim(operation, payload=...) as op:`, for effects that are not a single function."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard, overload

from ragfence.core.decisions import Claim
from ragfence.core.receipts import Decision, Receipt
from ragfence.core.records import KeyRecord
from ragfence.engine import crash_points
from ragfence.engine.aio import ClaimBatcher, QueuedClaim, acquire_async, run_blocking
from ragfence.engine.leases import Lease, enter, leave
from ragfence.engine.refusals import code_of, is_outage
from ragfence.engine.requests import Request
from ragfence.engine.results import Json, checked_effect_id, failure_bytes
from ragfence.engine.runner import EffectOutcome, Runner, WonClaim
from ragfence.errors import (
    Conflict,
    EffectFailed,
    FencedOut,
    InFlight,
    Quarantined,
    RagfenceError,
    SealUncertain,
    Stale,
    TerminalError,
    TransientError,
    ValidationError,
)

if TYPE_CHECKING:
    from ragfence.engine.engine import Engine

_DECISIONS: dict[type[RagfenceError], Decision] = {
    Conflict: Decision.CONFLICT,
    Stale: Decision.STALE,
    InFlight: Decision.IN_FLIGHT,
    Quarantined: Decision.IN_FLIGHT,
}


class ReplayedClaim(NamedTuple):
    """A claim whose answer is a sealed record."""

    runner: Runner
    request: Request
    claim: Claim
    record: KeyRecord

    def receipt(self) -> Receipt:
        return self.runner.replay(self.request, self.claim, self.record)


class ClaimBlock:
    """A claim, and then its outcome, for `with` and `async with`.

    `is_new` says whether to run the effect; `seal` ends it with a receipt. Leaving the block without a seal releases
    the key, so that the next call tries again. A `TerminalError` raised in the block is sealed as a failure.
    """

    def __init__(
        self,
        runner: Runner,
        request: Request,
        *,
        wait_ms: int | None,
        verdict: bool,
        batcher: ClaimBatcher | None = None,
        repeatable: bool = False,
    ) -> None:
        """`batcher`: sends the claims of `async with` in batches. `repeatable`: an outage uses up no attempt."""
        self._runner = runner
        self._batcher = batcher
        self._queued: QueuedClaim | None = None
        self._request = request
        self._wait_ms = wait_ms
        self._verdict_wanted = verdict
        self._repeatable = repeatable
        self._won: WonClaim | None = None
        self._receipt: Receipt | None = None
        self._open = False
        self._is_uncertain = False
        self.failure: RagfenceError | None = None
        """why a block that ends normally seals nothing: an error that its owner has already reported"""
        self.error: RagfenceError | None = None
        """why the claim was refused; only with `verdict=True`, otherwise it is raised"""

    @property
    def key(self) -> str:
        return self._request.key_text

    @property
    def is_new(self) -> bool:
        return self._won is not None

    @property
    def decision(self) -> Decision:
        if self.error is not None:
            return _DECISIONS[type(self.error)]
        if self._receipt is not None:
            return self._receipt.decision
        return Decision.NEW

    @property
    def lease(self) -> Lease:
        if self._won is None:
            raise ValidationError(f"{self.key} was not won, there is no lease", hint="look at op.is_new first")
        return self._won.lease

    @property
    def receipt(self) -> Receipt:
        if self._receipt is None:
            raise ValidationError(f"{self.key} has no receipt yet", hint="call op.seal(...) first")
        return self._receipt

    @overload
    def seal(self, *, effect_id: str | None = None, result: Json) -> Receipt[Json]: ...
    @overload
    def seal(self, *, effect_id: str | None = None, result: object = None) -> Receipt[Any]: ...
    def seal(self, *, effect_id: str | None = None, result: object = None) -> Receipt[Any]:
        """Commits and seals the effect.

        Args:
            effect_id: What the effect created in another system, for the receipt. By default, derived from the key.
            result: What every later call gets as `receipt.result`; must be JSON.

        Raises:
            FencedOut: Another attempt won; `.receipt` is the winner's.
            SealUncertain: The effect happened, but the seal could not be written.
        """
        won, outcome = self._outcome(effect_id, result)
        try:
            self._receipt = self._runner.complete(won, outcome)
        except FencedOut as lost:
            self._receipt = lost.receipt
            raise
        except SealUncertain:
            self._is_uncertain = True  # the effect happened, so the block must not release the key
            raise
        if self._receipt.flags.fenced_out:
            raise FencedOut(f"{self.key} was committed by another attempt", key=self.key, receipt=self._receipt)
        return self._receipt

    def _outcome(self, effect_id: str | None, result: object) -> tuple[WonClaim, EffectOutcome]:
        """Returns what to seal. Raises if the block may not seal."""
        if self._won is None:
            raise ValidationError(f"{self.key} was not won, it cannot be sealed", hint="look at op.is_new first")
        if self._receipt is not None:
            raise ValidationError(f"{self.key} is sealed already", hint="seal once; op.receipt is the outcome")
        if not self._open:
            raise ValidationError(
                f"{self.key} was released when its block ended", hint="call op.seal(...) inside the with block"
            )
        crash_points.reach(crash_points.AFTER_EFFECT)
        return self._won, EffectOutcome(checked_effect_id(effect_id), self._runner.results.store(result, self.key))

    def __enter__(self) -> ClaimBlock:
        self._refuse_second_use()
        try:
            answer = self._runner.acquire(self._request, wait_ms=self._wait_ms)
        except (Conflict, Stale, InFlight, Quarantined) as refused:
            return self._refused(refused)
        return self._answered(answer)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if won := self._leave():
            end_without_receipt(self._runner, won, error or self.failure)

    async def try_replay(self, timeout_s: float | None = None) -> ReplayedClaim | None:
        """Returns the replay, if there is one within `timeout_s` and it needs no store; else None.

        The claim is sent, and `async with` continues with it. A caller that does not enter the block calls `discard`.
        """
        self._refuse_second_use()
        if self._batcher is None:
            return None
        if self._queued is None:
            self._queued = self._batcher.submit(self._request)
        pending = await self._queued.wait(timeout_s)
        record = self._runner.replay_without_io(pending) if pending is not None else None
        if pending is None or record is None:
            return None
        return ReplayedClaim(self._runner, self._request, pending.claim, record)

    def discard(self) -> None:
        """Releases what the claim of `try_replay` wins, unless the block was entered."""
        if self._queued is not None:
            queued, self._queued = self._queued, None
            queued.discard()

    async def __aenter__(self) -> ClaimBlock:
        self._refuse_second_use()
        try:
            if (replayed := await self.try_replay()) is not None:
                return self._answered(replayed.receipt())
            queued, self._queued = self._queued, None
            pending = await queued.wait() if queued else None
            answer: WonClaim | Receipt | None = None
            if pending is not None:
                answer = self._runner.win_without_io(self._request, pending)
            if answer is None:
                answer = await acquire_async(self._runner, self._request, self._wait_ms, pending)
        except (Conflict, Stale, InFlight, Quarantined) as refused:
            return self._refused(refused)
        return self._answered(answer)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if won := self._leave():
            if isinstance(error, GeneratorExit):  # the loop has ended: nothing can be awaited
                end_without_receipt(self._runner, won, error)
            else:
                await run_blocking(end_without_receipt, self._runner, won, error or self.failure)

    def _refuse_second_use(self) -> None:
        if self._won or self._receipt or self.error:
            raise ValidationError(f"this claim of {self.key} was used already", hint="call fence.claim(...) again")

    def _refused(self, error: RagfenceError) -> ClaimBlock:
        if not self._verdict_wanted:
            raise error
        self.error = error
        return self

    def _answered(self, answer: WonClaim | Receipt) -> ClaimBlock:
        if isinstance(answer, Receipt):
            self._receipt = answer
            if answer.failed and not self._verdict_wanted:
                raise failed(answer)
            return self
        self._won, self._open = answer, True
        answer.entered, answer.repeatable = True, self._repeatable
        enter(answer.lease)
        crash_points.reach(crash_points.IN_EFFECT)
        return self

    def _leave(self) -> WonClaim | None:
        """Returns the lease that has not been ended yet."""
        if not self._won or not self._open:
            return None
        self._open = False
        leave(self._won.lease)
        return None if self._receipt or self._is_uncertain else self._won


class BatchedClaims:
    """Claims for an event loop that serves many callers: those that arrive together share a call to the store.

    >>> claims = fence.batched_claims()  # doctest: +SKIP
    >>> async with claims.block(claims.request(operation, payload)) as op: ...  # doctest: +SKIP
    """

    def __init__(self, engine: Engine) -> None:
        self.tenant = engine.tenant
        self.request = engine.request
        self.with_call = engine.with_call
        self.content_key = engine.content_hash.key
        self._runner = engine.runner
        self._batcher = ClaimBatcher(engine.fences)

    def block(self, request: Request, *, wait_ms: int | None = None, repeatable: bool = False) -> ClaimBlock:
        """As `fence.claim(..., verdict=True)`.

        Args:
            request: What to claim.
            wait_ms: How long to wait for another owner; the policy's deadline, unless given.
            repeatable: The effect may run again without harm, so an outage does not use up attempts.
        """
        return ClaimBlock(
            self._runner, request, wait_ms=wait_ms, verdict=True, batcher=self._batcher, repeatable=repeatable
        )


def end_without_receipt(runner: Runner, won: WonClaim, error: BaseException | None) -> Receipt | None:
    """Seals a terminal failure; releases the key after anything else.

    Returns a receipt only if another attempt succeeded first: then that is the answer of this one too.
    """
    if is_final(error) and not won.commit_sent and not won.lease.inherited:
        try:
            receipt = runner.complete(won, failure_of(error, runner))
            return None if receipt.failed else receipt
        except FencedOut as lost:
            winner: Receipt | None = lost.receipt
            return None if winner is None or winner.failed else winner
        except SealUncertain:
            return None  # committed or not, the record stays; the next caller finds out
        except (TransientError, Conflict, Stale) as unsettled:
            # The caller gets the effect's own error; this one only means that it is not final yet.
            runner.release(won, code_of(unsettled))
            return None
        except BaseException as broken:
            runner.release(won, code_of(broken))
            raise
    if is_not_started(error):
        won.entered = False
    runner.release(won, "RELEASED" if error is None else code_of(error), outage=is_outage(error))
    return None


def not_started(busy: InFlight) -> InFlight:
    """The error of a block whose effect cannot start, as another key is in use. The attempt does not count."""
    return InFlight(busy.message, hint=busy.hint, **{**busy.details, "started": False})


def is_not_started(error: BaseException | None) -> bool:
    return isinstance(error, InFlight) and error.details.get("started") is False


def is_about(error: RagfenceError, claim: ClaimBlock) -> bool:
    """Whether an error that ended a block is about its own claim, and not about one that was made inside."""
    return error.details.get("key") == claim.key


def is_final(error: BaseException | None) -> TypeGuard[TerminalError]:
    """Whether an error is a `TerminalError`, or a subclass that is not ragfence's.

    What ragfence raises inside an effect (a nested claim, a store that refuses the password) says nothing about it.
    """
    return isinstance(error, TerminalError) and (type(error) is TerminalError or not _is_ours(type(error)))


def _is_ours(kind: type) -> bool:
    return kind.__module__ == TerminalError.__module__


def failure_of(error: TerminalError, runner: Runner) -> EffectOutcome:
    kind = type(error).__name__
    message = runner.redact_text(error.message or kind)
    return EffectOutcome(result=failure_bytes(kind, error.code, message), failed=True, error=error.code[:100])


def failed(receipt: Receipt) -> EffectFailed:
    failure = dict(receipt.failure or {})
    return EffectFailed(
        f"{receipt.key} failed for good: {failure.get('type')}: {failure.get('message')}",
        key=receipt.key,
        receipt=receipt,
    )
