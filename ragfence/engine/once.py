"""`@fence.once(kind=..., key=...)`: any function, sync or async, performed once per key."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec

from ragfence.core.operations import Operation
from ragfence.core.receipts import Receipt
from ragfence.core.strategies import KeyStrategy
from ragfence.engine import points
from ragfence.engine.claiming import end_without_receipt, failed, failure_of
from ragfence.engine.leases import current
from ragfence.engine.performing import Outcome, Won
from ragfence.engine.requests import Request
from ragfence.engine.results import checked_effect_id
from ragfence.errors import FencedOut, SealUncertain, StoreUnavailable, TerminalError, ValidationError

if TYPE_CHECKING:
    from ragfence.engine.engine import Engine

P = ParamSpec("P")

Key = Callable[..., "str | tuple[str, str] | tuple[str, str, int] | Operation"]


@dataclass(frozen=True, slots=True)
class Recovered:
    """What `recover=` returns when it finds that the effect already happened."""

    result: object = None
    effect_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OnceOptions:
    kind: str
    key: Key | KeyStrategy
    payload: Callable[..., object] | None
    source_type: str
    action: str
    index_hash: str
    effect_id: Callable[[Any], str] | None
    recover: Callable[..., Recovered | None] | None
    terminal: tuple[type[Exception], ...]
    wait_s: float | None
    on_store_error: str | None


class Once:
    """The fenced form of one function. Calling it returns a receipt."""

    def __init__(self, engine: Engine, function: Callable[..., Any], options: OnceOptions) -> None:
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise ValidationError(
                f"{function.__qualname__} is a generator: its effect has no single end to seal",
                hint="collect what it yields inside a function, and fence that",
            )
        self._engine = engine
        self._function = function
        self._options = options
        self._signature = inspect.signature(function)

    def wrap(self) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(self._function):

            @functools.wraps(self._function)
            async def fenced_async(*args: Any, **kwargs: Any) -> Receipt:
                return await self._call_async(args, kwargs)

            return fenced_async

        @functools.wraps(self._function)
        def fenced(*args: Any, **kwargs: Any) -> Receipt:
            return self._call(args, kwargs)

        return fenced

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Receipt:
        request = self._request(args, kwargs)
        while True:
            try:
                answer = self._acquire(request)
            except StoreUnavailable:
                if not self._fail_open:
                    raise
                return self._run_unfenced(request, args, kwargs)
            if isinstance(answer, Receipt):
                return _successful(answer)
            mark = current.set((*current.get(), answer.lease))
            try:
                outcome = self._recovered(answer, args, kwargs)
                if outcome is None:
                    points.reach(points.IN_EFFECT)
                    outcome = self._outcome(request, self._function(*args, **kwargs))
                points.reach(points.AFTER_EFFECT)
            except BaseException as error:
                self._failed(answer, error)
                raise
            finally:
                current.reset(mark)
            receipt = self._complete(answer, outcome)
            if receipt is not None:
                return receipt

    async def _call_async(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Receipt:
        request = self._request(args, kwargs)
        while True:
            try:
                answer = await _finish_in_thread(self._acquire, request, undo=self._abandon)
            except StoreUnavailable:
                if not self._fail_open:
                    raise
                return await self._run_unfenced_async(request, args, kwargs)
            if isinstance(answer, Receipt):
                return _successful(answer)
            mark = current.set((*current.get(), answer.lease))
            try:
                outcome = await asyncio.to_thread(self._recovered, answer, args, kwargs)
                if outcome is None:
                    points.reach(points.IN_EFFECT)
                    result = await self._function(*args, **kwargs)
                    outcome = await asyncio.to_thread(self._outcome, request, result)
                points.reach(points.AFTER_EFFECT)
            except BaseException as error:
                # In a thread that is waited for even when the task is cancelled: the key must be given back.
                await asyncio.shield(asyncio.to_thread(self._failed, answer, error))
                raise
            finally:
                current.reset(mark)
            receipt = await asyncio.shield(asyncio.to_thread(self._complete, answer, outcome))
            if receipt is not None:
                return receipt

    def _acquire(self, request: Request) -> Won | Receipt:
        if self._fail_open and (known := self._engine.journal.find(request.operation, request.fingerprint)):
            return known
        wait_ms = None if self._options.wait_s is None else int(self._options.wait_s * 1000)
        return self._engine.performer.acquire(request, wait_ms=wait_ms)

    def _abandon(self, answer: Won | Receipt) -> None:
        if isinstance(answer, Won):
            self._engine.performer.give_back(answer, "CANCELLED")

    def _recovered(self, won: Won, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outcome | None:
        """On a takeover or a retry: the effect may have happened on somebody else's side. Ask them first."""
        if self._options.recover is None or not won.may_have_happened:
            return None
        found = self._options.recover(*args, **kwargs)
        if found is None:
            return None
        if not isinstance(found, Recovered):
            raise ValidationError(
                f"recover= returned {type(found).__name__}",
                hint="return ragfence.Recovered(result=...) when the effect happened, None when it did not",
            )
        stored = self._engine.performer.results.store(found.result, won.lease.key)
        return Outcome(checked_effect_id(found.effect_id), stored)

    def _outcome(self, request: Request, result: object) -> Outcome:
        effect_id = self._options.effect_id(result) if self._options.effect_id else None
        stored = self._engine.performer.results.store(result, request.key_text)
        return Outcome(checked_effect_id(effect_id), stored)

    def _complete(self, won: Won, outcome: Outcome) -> Receipt | None:
        """None: another attempt took over and has no outcome yet; ask again, which waits for it."""
        try:
            return _successful(self._engine.performer.complete(won, outcome))
        except FencedOut as lost:
            receipt: Receipt | None = lost.receipt
            return _successful(receipt) if receipt is not None else None
        except SealUncertain:
            if self._fail_open:
                operation, fingerprint = won.request.operation, won.request.fingerprint
                return self._engine.journal.add(operation, fingerprint, outcome.effect_id, outcome.result)
            raise
        except BaseException as error:
            self._engine.performer.give_back(won, getattr(error, "code", type(error).__name__))
            raise

    def _failed(self, won: Won, error: BaseException) -> None:
        if isinstance(error, self._options.terminal) and not isinstance(error, TerminalError):
            wrapped = TerminalError(f"{type(error).__name__}: {error}")
            self._engine.performer.complete(won, failure_of(wrapped, self._engine.performer))
            return
        end_without_receipt(self._engine.performer, won, error)

    @property
    def _fail_open(self) -> bool:
        return (self._options.on_store_error or self._engine.policy.on_store_error) == "open"

    def _run_unfenced(self, request: Request, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Receipt:
        known = self._engine.journal.find(request.operation, request.fingerprint)
        return self._journaled(request, self._function(*args, **kwargs)) if known is None else known

    async def _run_unfenced_async(self, request: Request, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Receipt:
        known = self._engine.journal.find(request.operation, request.fingerprint)
        if known is not None:
            return known
        return await asyncio.to_thread(self._journaled, request, await self._function(*args, **kwargs))

    def _journaled(self, request: Request, result: object) -> Receipt:
        outcome = self._outcome(request, result)
        return self._engine.journal.add(request.operation, request.fingerprint, outcome.effect_id, outcome.result)

    def _request(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Request:
        options = self._options
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as wrong:
            raise TypeError(f"{self._function.__qualname__}: {wrong}") from None
        bound.apply_defaults()
        payload = options.payload(*args, **kwargs) if options.payload else _payload_of(bound)
        operation = self._operation(args, kwargs, payload)
        return self._engine.request(operation, payload)

    def _operation(self, args: tuple[Any, ...], kwargs: dict[str, Any], payload: object) -> Operation:
        options = self._options
        made = options.key(payload) if isinstance(options.key, KeyStrategy) else options.key(*args, **kwargs)
        if isinstance(made, Operation):
            return made
        parts: tuple[Any, ...] = made if isinstance(made, tuple) else (made,)
        if not 1 <= len(parts) <= 3:
            raise ValidationError(
                f"key= returned {len(parts)} parts", hint="return source_id, (source_id, revision) or an Operation"
            )
        source_id, revision = parts[0], parts[1] if len(parts) > 1 else ""
        return Operation(
            kind=options.kind,
            source_id=str(source_id),
            revision=str(revision),
            sequence=parts[2] if len(parts) > 2 else None,
            source_type=options.source_type,
            action=options.action,
            index_hash=options.index_hash,
        )


def _payload_of(bound: inspect.BoundArguments) -> object:
    """What the fingerprint is made of: the arguments; the argument itself where there is just one."""
    arguments = {name: value for name, value in bound.arguments.items() if name not in ("self", "cls")}
    return next(iter(arguments.values())) if len(arguments) == 1 else arguments


def _successful(receipt: Receipt) -> Receipt:
    if receipt.failed:
        raise failed(receipt)
    return receipt


async def _finish_in_thread(call: Callable[..., Any], *args: Any, undo: Callable[[Any], None]) -> Any:
    """Runs to its end even when the caller is cancelled; what it then won is given back."""
    work: Awaitable[Any] = asyncio.ensure_future(asyncio.to_thread(call, *args))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        undo(await work)
        raise
