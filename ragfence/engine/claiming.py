"""`with fence.claim(operation, payload=...) as op:` for effects that are no single function."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any

from ragfence.core.receipts import Decision, Receipt
from ragfence.engine import points
from ragfence.engine.leases import Lease, current
from ragfence.engine.performing import Outcome, Performer, Won
from ragfence.engine.requests import Request
from ragfence.engine.results import checked_effect_id, failure_bytes
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
    ValidationError,
)

_DECISIONS: dict[type[RagfenceError], Decision] = {
    Conflict: Decision.CONFLICT,
    Stale: Decision.STALE,
    InFlight: Decision.IN_FLIGHT,
    Quarantined: Decision.IN_FLIGHT,
}


class Claimed:
    """A claim, and after it its outcome.

    `is_new` says whether to perform the effect; `seal` ends it with a receipt. Leaving the block without a seal
    releases the key, so that the next call tries again. A `TerminalError` out of the block is sealed as a failure.
    """

    def __init__(self, performer: Performer, request: Request, *, wait_ms: int | None, verdict: bool) -> None:
        self._performer = performer
        self._request = request
        self._wait_ms = wait_ms
        self._verdict_wanted = verdict
        self._won: Won | None = None
        self._receipt: Receipt | None = None
        self._reset: Any = None
        self.error: RagfenceError | None = None
        """why the claim was refused, when `verdict=True` asked to be told instead of raised at"""

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
            raise ValidationError(f"{self.key} has no receipt yet", hint="op.seal(...) makes one")
        return self._receipt

    def seal(self, *, effect_id: str | None = None, result: object = None) -> Receipt:
        """Commits and seals. Raises `FencedOut`, with the winner's receipt, when another attempt won."""
        if self._won is None:
            raise ValidationError(f"{self.key} was not won, it cannot be sealed", hint="look at op.is_new first")
        if self._receipt is not None:
            raise ValidationError(f"{self.key} is sealed already")
        points.reach(points.AFTER_EFFECT)
        outcome = Outcome(checked_effect_id(effect_id), self._performer.results.store(result, self.key))
        self._receipt = self._performer.complete(self._won, outcome)
        if self._receipt.flags.fenced_out:
            raise FencedOut(f"{self.key} was committed by another attempt", key=self.key, receipt=self._receipt)
        return self._receipt

    def __enter__(self) -> Claimed:
        try:
            answer = self._performer.acquire(self._request, wait_ms=self._wait_ms)
        except (Conflict, Stale, InFlight, Quarantined) as refused:
            if not self._verdict_wanted:
                raise
            self.error = refused
            return self
        if isinstance(answer, Won):
            self._won = answer
            self._reset = current.set((*current.get(), answer.lease))
            points.reach(points.IN_EFFECT)
            return self
        self._receipt = answer
        if answer.failed and not self._verdict_wanted:
            raise failed(answer)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._won is None:
            return
        current.reset(self._reset)
        if self._receipt is not None or isinstance(error, SealUncertain):
            return
        end_without_receipt(self._performer, self._won, error)

    async def __aenter__(self) -> Claimed:
        await asyncio.to_thread(_in_background, self.__enter__)
        if self._won is not None:
            self._reset = current.set((*current.get(), self._won.lease))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._won is None:
            return
        current.reset(self._reset)
        if self._receipt is None and not isinstance(error, SealUncertain):
            # Shielded: a cancelled task must still give its key back.
            await asyncio.shield(asyncio.to_thread(end_without_receipt, self._performer, self._won, error))


def _in_background(enter: Any) -> None:
    # The context of the worker thread is a copy: what it sets there is set again by the caller.
    enter()


def end_without_receipt(performer: Performer, won: Won, error: BaseException | None) -> None:
    """A terminal failure is sealed and replayed; anything else gives the key back."""
    if isinstance(error, TerminalError) and not won.commit_sent and not isinstance(error, ValidationError):
        performer.complete(won, failure_of(error, performer))
        return
    code = "RELEASED" if error is None else getattr(error, "code", None) or type(error).__name__
    performer.give_back(won, str(code)[:100])


def failure_of(error: TerminalError, performer: Performer) -> Outcome:
    kind = type(error).__name__
    message = performer.redact_text(error.message or kind)
    return Outcome(result=failure_bytes(kind, error.code, message), failed=True, error=error.code[:100])


def failed(receipt: Receipt) -> EffectFailed:
    failure = dict(receipt.failure or {})
    return EffectFailed(
        f"{receipt.key} failed for good: {failure.get('type')}: {failure.get('message')}",
        key=receipt.key,
        receipt=receipt,
    )
