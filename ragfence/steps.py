"""`fence.run(run_id)`: the steps of a workflow run, each done once per input.

    step = fence.run("nightly-2026-11-18")
    rows = step("extract", extract, source="s3://bucket/day")    # run again, it returns the stored result

A step is known by tenant, run, name and the hash of its input. Another input is another step, not a conflict. A run
that is started again goes on where it was stopped.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, ParamSpec, Protocol, TypeVar, cast

from ragfence.core.canonical import canonical_payload
from ragfence.core.hashing import digest
from ragfence.core.operations import Operation
from ragfence.core.receipts import Receipt
from ragfence.engine.aio import run_blocking
from ragfence.engine.claim_block import ClaimBlock
from ragfence.errors import FencedOut, ValidationError

KIND: Final = "step"
P = ParamSpec("P")
R = TypeVar("R")


class StepClaims(Protocol):
    """What of a fence the steps need."""

    def claim(self, operation: Operation, *, payload: object = None, wait_s: float | None = None) -> ClaimBlock: ...


class Run:
    """The steps of one workflow run.

    Args:
        fence: Where the steps are claimed.
        run_id: Identifies the run, also when it is started again. A new run needs a new id.

    >>> step = Run(fence, "nightly-2026-11-18")  # doctest: +SKIP
    """

    def __init__(self, fence: StepClaims, run_id: str) -> None:
        if not run_id:
            raise ValidationError("a run needs an id that is the same when it is started again")
        self._fence, self.run_id = fence, run_id

    def __call__(
        self,
        name: str,
        function: Callable[..., R],
        *args: Any,
        volatile: Sequence[str] = (),
        wait_s: float | None = 0,
        **kwargs: Any,
    ) -> R:
        """Calls a function once per input, and returns its result; a later call returns the stored result.

        Args:
            name: Name of the step. Two steps of a run with the same function need two names.
            function: Sync or async. Its result is stored as JSON, and so is limited in size as those of `once`.
            volatile: Names of keyword arguments that are not part of the input, such as `requested_at`.
            wait_s: How long to wait for a step that is running elsewhere.

        Raises:
            InFlight: the step is running elsewhere; schedule this run again later.
            EffectFailed: the step raised a `TerminalError` before.
        """
        answer = self.receipt(name, function, *args, volatile=volatile, wait_s=wait_s, **kwargs)
        if inspect.iscoroutine(answer):
            return cast(R, _result_of(answer))
        return cast(R, answer.result)

    def receipt(
        self,
        name: str,
        function: Callable[..., Any],
        *args: Any,
        volatile: Sequence[str] = (),
        wait_s: float | None = 0,
        **kwargs: Any,
    ) -> Any:
        """As calling it, but returns the `Receipt`: `.decision` says whether the step was executed now.

        Of an async function it returns the receipt when it is awaited.
        """
        operation = self.operation(name, function, args, kwargs, volatile)
        if inspect.iscoroutinefunction(function):
            return self._execute_async(operation, function, args, kwargs, wait_s)
        try:
            with self._fence.claim(operation, wait_s=wait_s) as claim:
                if claim.is_new:
                    claim.seal(result=function(*args, **kwargs))
        except FencedOut as lost:
            return _winner(lost)
        return claim.receipt

    def operation(
        self,
        name: str,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        volatile: Sequence[str],
    ) -> Operation:
        """The operation of a step with this input."""
        if not name:
            raise ValidationError("a step needs a name")
        if unknown := set(volatile) - kwargs.keys():
            raise ValidationError(f"volatile names no keyword argument: {', '.join(sorted(unknown))}")
        named = {key: value for key, value in kwargs.items() if key not in volatile}
        hashed = digest("ragfence/step/1", canonical_payload({"args": list(args), "kwargs": named})).hex()
        return Operation(kind=KIND, source_type=self.run_id, source_id=name, revision=hashed)

    async def _execute_async(
        self,
        operation: Operation,
        function: Callable[..., Awaitable[Any]],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        wait_s: float | None,
    ) -> Receipt[Any]:
        try:
            async with self._fence.claim(operation, wait_s=wait_s) as claim:
                if claim.is_new:
                    result = await function(*args, **kwargs)
                    await run_blocking(claim.seal, result=result)
        except FencedOut as lost:
            return _winner(lost)
        return claim.receipt


async def _result_of(answer: Awaitable[Receipt[Any]]) -> Any:
    return (await answer).result


def _winner(lost: FencedOut) -> Receipt[Any]:
    """This process was frozen past its lease, and another one has finished the step: its result is the answer."""
    winner: Receipt[Any] | None = lost.receipt
    if winner is None or winner.failed:
        raise lost
    return winner
