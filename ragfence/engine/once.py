"""`@fence.once(kind=..., key=...)`: runs a function, sync or async, once per key."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, overload

from ragfence.core.json_values import to_jsonable
from ragfence.core.key_strategies import KeyStrategy
from ragfence.core.layout import TOKEN_BYTES
from ragfence.core.operations import Operation
from ragfence.core.receipts import Receipt
from ragfence.engine import crash_points
from ragfence.engine.aio import acquire_async, run_blocking
from ragfence.engine.claim_block import end_without_receipt, failed
from ragfence.engine.leases import enter, leave
from ragfence.engine.refusals import code_of, is_outage
from ragfence.engine.requests import Request
from ragfence.engine.results import Json, checked_effect_id
from ragfence.engine.runner import EffectOutcome, WonClaim
from ragfence.errors import (
    Conflict,
    FencedOut,
    NestedClaim,
    Quarantined,
    SealUncertain,
    Stale,
    StoreClosed,
    StoreUnavailable,
    TerminalError,
    ValidationError,
)

if TYPE_CHECKING:
    from ragfence.engine.engine import Engine

P = ParamSpec("P")

_NOT_PAYLOAD = frozenset(("self", "cls"))

Key = Callable[..., "str | tuple[str, str] | tuple[str, str, int] | Operation"]


@dataclass(frozen=True, slots=True)
class Recovered:
    """Returned by `recover=` when the effect has already happened."""

    result: object = None
    effect_id: str | None = None


@dataclass(frozen=True, slots=True)
class _Returned(Recovered):
    """Returned by the function itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnceOptions:
    kind: str
    key: Key | KeyStrategy
    formerly: Key | KeyStrategy | None
    payload: Callable[..., object] | None
    source_type: str
    action: str
    index_hash: str
    effect_id: Callable[[Any], str] | None
    recover: Callable[..., Recovered | Awaitable[Recovered | None] | None] | None
    terminal: tuple[type[Exception], ...]
    wait_s: float | None
    on_store_error: str | None


class OnceDecorator(Protocol):
    """The type of `fence.once(...)`: the wrapped function takes the same arguments and returns a `Receipt`.

    `receipt.result` has the type that the function returns where that is JSON. Everything else (a model, a dataclass,
    a tuple) comes back as the JSON it was stored as, so its type is `Any`.
    """

    @overload
    def __call__(  # type: ignore[overload-overlap]  # a coroutine is an object too: the first match counts
        self, function: Callable[P, Coroutine[Any, Any, Json]], /
    ) -> Callable[P, Coroutine[Any, Any, Receipt[Json]]]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]  # as above
        self, function: Callable[P, Coroutine[Any, Any, object]], /
    ) -> Callable[P, Coroutine[Any, Any, Receipt[Any]]]: ...
    @overload
    def __call__(self, function: Callable[P, Json], /) -> Callable[P, Receipt[Json]]: ...
    @overload
    def __call__(self, function: Callable[P, object], /) -> Callable[P, Receipt[Any]]: ...


class Once:
    """The fenced form of one function. Calling it returns a receipt."""

    _counts_attempts = True

    def __init__(self, engine: Engine, function: Callable[..., Any], options: OnceOptions) -> None:
        self._name = getattr(function, "__qualname__", repr(function))
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise ValidationError(
                f"{self._name} is a generator: its effect has no single end to seal",
                hint="collect what it yields inside a function, and decorate that",
            )
        self._is_async = inspect.iscoroutinefunction(function)
        if inspect.iscoroutinefunction(options.recover) and not self._is_async:
            raise ValidationError(
                f"recover= of {self._name} is async, the function is not", hint="make both async, or neither"
            )
        self._engine = engine
        self._runner = engine.runner
        self._fail_open = (options.on_store_error or engine.policy.on_store_error) == "open"
        self._wait_ms = None if options.wait_s is None else int(options.wait_s * 1000)
        self._function = function
        self._options = options
        self._signature = inspect.signature(function)
        self._plain_arguments = _plain_arguments(self._signature)
        self._is_method = not _NOT_PAYLOAD.isdisjoint(self._signature.parameters)

    def wrap(self) -> Callable[..., Any]:
        if self._is_async:

            @functools.wraps(self._function)
            async def fenced_async(*args: Any, **kwargs: Any) -> Receipt:
                return await self._call_async(args, kwargs)

            return fenced_async

        @functools.wraps(self._function)
        def fenced(*args: Any, **kwargs: Any) -> Receipt:
            return self._call(args, kwargs)

        return fenced

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Receipt:
        request, recover = self._request(args, kwargs), self._options.recover
        found: Recovered | None
        while True:
            known = self._engine.journal.find(request) if self._fail_open else None
            try:
                answer = known or self._runner.acquire(request, wait_ms=self._wait_ms)
            except StoreUnavailable as away:
                if not self._fail_open or isinstance(away, StoreClosed):
                    raise
                if committed := self._runner.find_committed(request):
                    return _successful(committed)
                token, asks = self._prepare_alone(request)
                found = self._checked(recover(*args, **kwargs)) if asks and recover else None
                if found is None:
                    crash_points.reach(crash_points.IN_EFFECT)
                    found = _Returned(self._function(*args, **kwargs))
                return self._journal(request, found, token)
            if self._fail_open and known is None:
                self._engine.reconcile_in_background()
            if isinstance(answer, Receipt):
                return _successful(answer)
            enter(answer.lease)
            try:
                found = None
                asks = recover is not None and self._runner.announce(answer)
                answer.entered = self._counts_attempts
                if asks and recover:
                    found = self._checked(recover(*args, **kwargs))
                    answer.entered = found is None
                if found is None:
                    crash_points.reach(crash_points.IN_EFFECT)
                    found = _Returned(self._function(*args, **kwargs))
            except BaseException as error:
                if winner := self._failed(answer, error):
                    return winner
                raise
            finally:
                leave(answer.lease)
            receipt = self._complete(answer, found)
            if receipt is not None:
                return receipt

    async def _call_async(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Receipt:
        request, recover = self._request(args, kwargs), self._options.recover
        found: Recovered | None
        while True:
            known = await run_blocking(self._engine.journal.find, request) if self._fail_open else None
            try:
                answer = known or await acquire_async(self._runner, request, self._wait_ms)
            except StoreUnavailable as away:
                if not self._fail_open or isinstance(away, StoreClosed):
                    raise
                if committed := await run_blocking(self._runner.find_committed, request):
                    return _successful(committed)
                token, asks = await run_blocking(self._prepare_alone, request)
                found = None
                if asks and recover:
                    found = await self._recover_async(args, kwargs)
                if found is None:
                    crash_points.reach(crash_points.IN_EFFECT)
                    found = _Returned(await self._function(*args, **kwargs))
                return await run_blocking(self._journal, request, found, token)
            if self._fail_open and known is None:
                self._engine.reconcile_in_background()
            if isinstance(answer, Receipt):
                return _successful(answer)
            enter(answer.lease)
            try:
                found = None
                asks = recover is not None and await run_blocking(self._runner.announce, answer)
                answer.entered = self._counts_attempts
                if asks and recover:
                    found = await self._recover_async(args, kwargs)
                    answer.entered = found is None
                if found is None:
                    crash_points.reach(crash_points.IN_EFFECT)
                    found = _Returned(await self._function(*args, **kwargs))
            except GeneratorExit as abandoned:  # the loop has ended: nothing can be awaited
                self._failed(answer, abandoned)
                raise
            except BaseException as error:
                # Awaited even if the task is cancelled: the key must be released.
                if winner := await run_blocking(self._failed, answer, error):
                    return winner
                raise
            finally:
                leave(answer.lease)
            # The effect has happened: from here on, a cancelled task is cancelled after the seal.
            receipt = await run_blocking(self._complete, answer, found)
            if receipt is not None:
                return receipt

    async def _recover_async(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recovered | None:
        """Calls `recover=` in a thread, as it may block, and awaits what it returns if it is async."""
        assert self._options.recover is not None
        found = await run_blocking(self._options.recover, *args, **kwargs)
        return self._checked(await found if inspect.isawaitable(found) else found)

    def _checked(self, found: object) -> Recovered | None:
        if found is not None and not isinstance(found, Recovered):
            raise ValidationError(
                f"recover= of {self._name} returned {type(found).__name__}",
                hint="return ragfence.Recovered(result=...) when the effect happened, None when it did not",
            )
        return found

    def _outcome(self, request: Request, done: Recovered) -> EffectOutcome:
        effect_id, make = done.effect_id, self._options.effect_id
        if effect_id is None and make and (isinstance(done, _Returned) or done.result is not None):
            effect_id = make(done.result)
        stored = self._runner.results.store(done.result, request.key_text)
        return EffectOutcome(checked_effect_id(effect_id), stored)

    def _complete(self, won: WonClaim, done: Recovered) -> Receipt | None:
        """Commits and seals. None: another attempt took over and has no outcome yet; claim again to wait."""
        outcome = None
        try:
            outcome = self._outcome(won.request, done)
            crash_points.reach(crash_points.AFTER_EFFECT)
            return _successful(self._runner.complete(won, outcome))
        except FencedOut as lost:
            receipt: Receipt | None = lost.receipt
            return _successful(receipt) if receipt is not None else None
        except SealUncertain as unsure:
            if not self._fail_open or outcome is None:
                raise
            if unsure.committed:
                committed: Receipt = unsure.receipt
                return _successful(committed)
            return self._engine.journal.add(won.request, outcome, token=won.granted.record.token)
        except BaseException as error:
            self._runner.release(won, code_of(error))
            raise

    def _failed(self, won: WonClaim, error: BaseException) -> Receipt | None:
        """Seals or releases a failure. Returns the receipt of another attempt if that succeeded first."""
        if isinstance(error, self._options.terminal) and not isinstance(error, TerminalError):
            error = TerminalError(f"{type(error).__name__}: {error}")
        return end_without_receipt(self._runner, won, error)

    def _prepare_alone(self, request: Request) -> tuple[bytes, bool]:
        """Prepares an effect without a lease: returns its token, and whether `recover=` must be called first."""
        self._engine.journal.prepare()
        token = os.urandom(TOKEN_BYTES)
        return token, self._options.recover is not None and self._runner.announce_without_lease(request, token)

    def _journal(self, request: Request, done: Recovered, token: bytes) -> Receipt:
        return self._engine.journal.add(request, self._outcome(request, done), token=token)

    def _request(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Request:
        options = self._options
        if len(args) == self._plain_arguments and not kwargs:
            payload = options.payload(*args) if options.payload else self._payload(args)
            made = options.key(payload) if isinstance(options.key, KeyStrategy) else options.key(*args)
            return self._engine.request(self._operation(made), payload)
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as wrong:
            raise TypeError(f"{self._name}: {wrong}") from None
        # As bound: `f(req)` and `f(req=req)` are the same call, whatever names key= gives its parameters.
        args, kwargs = bound.args, bound.kwargs
        bound.apply_defaults()
        payload = options.payload(*args, **kwargs) if options.payload else _payload_of(bound.arguments)
        made = options.key(payload) if isinstance(options.key, KeyStrategy) else options.key(*args, **kwargs)
        return self._engine.request(self._operation(made), payload)

    def _payload(self, args: tuple[Any, ...]) -> object:
        if len(args) == 1 and not self._is_method:
            return args[0]
        return _payload_of(dict(zip(self._signature.parameters, args, strict=True)))

    def _operation(self, made: object) -> Operation:
        if isinstance(made, Operation):
            return made
        parts: tuple[Any, ...] = made if isinstance(made, tuple) else (made,)
        if not 1 <= len(parts) <= 3:
            raise ValidationError(
                f"key= of {self._name} returned {len(parts)} parts",
                hint="return source_id, (source_id, revision), (source_id, revision, sequence) or an Operation",
            )
        source_id, revision, sequence = (*parts, None, None)[:3]
        options = self._options
        return Operation(
            kind=options.kind,
            source_id=self._text("source_id", source_id),
            revision="" if revision is None else self._text("revision", revision),
            sequence=sequence,
            source_type=options.source_type,
            action=options.action,
            index_hash=options.index_hash,
            tenant=self._engine.tenant,
        )

    def _text(self, what: str, part: object) -> str:
        if type(part) is str:
            return part
        # Not str(): a missing id would be "None" for all callers, and an object would be its address.
        plain = part if part is None else to_jsonable(part)
        if isinstance(plain, bool) or not isinstance(plain, str | int):
            raise ValidationError(
                f"key= of {self._name} returned a {type(part).__name__} as {what}",
                hint="an id is text or a whole number that is the same in every retry",
            )
        return str(plain)


class MigratingOnce(Once):
    """The fenced form of a function whose keys are being changed: an operation is new only if both of its keys say so.

    The effect of the new key is a call under the former key. So a caller that claims only the former key and a caller
    that claims both exclude each other. A caller that dies between the two seals leaves a new key whose next owner
    finds the former one sealed. The new key is always claimed first, so two callers never wait for each other.
    """

    # Attempts are those of the former key, under which the function runs.
    _counts_attempts = False

    def __init__(self, engine: Engine, function: Callable[..., Any], options: OnceOptions) -> None:
        assert options.formerly is not None
        self._former = Once(engine, function, replace(options, key=options.formerly, formerly=None))
        super().__init__(engine, self._former.wrap(), replace(options, recover=None, effect_id=None))

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Receipt:
        if self._key_is_unchanged(args, kwargs):
            return self._former._call(args, kwargs)
        return super()._call(args, kwargs)

    async def _call_async(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Receipt:
        if self._key_is_unchanged(args, kwargs):
            return await self._former._call_async(args, kwargs)
        return await super()._call_async(args, kwargs)

    def _key_is_unchanged(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        new, former = self._request(args, kwargs), self._former._request(args, kwargs)
        if new.key != former.key and new.source and new.source == former.source:
            raise ValidationError(
                f"key= and formerly= of {self._name} name two revisions of the ordered source "
                f"{new.operation.source_id!r}, which exclude each other",
                hint="let key= return another source_id, or a source_type= of its own",
            )
        return new.key == former.key

    def _failed(self, won: WonClaim, error: BaseException) -> Receipt | None:
        # `terminal=` is about the function. What the claim of the former key raises is not the effect's outcome.
        if isinstance(error, Conflict | Stale | Quarantined | NestedClaim) or is_outage(error):
            return end_without_receipt(self._runner, won, error)
        return super()._failed(won, error)

    def _outcome(self, request: Request, done: Recovered) -> EffectOutcome:
        receipt = done.result
        if not isinstance(receipt, Receipt):  # from the journal of calls that the store did not answer
            return super()._outcome(request, done)
        stored = self._runner.results.store(receipt.result, request.key_text)
        return EffectOutcome(checked_effect_id(receipt.effect_id), stored, duplicate=True)

    def _complete(self, won: WonClaim, done: Recovered) -> Receipt | None:
        receipt = super()._complete(won, done)
        if receipt is None or not isinstance(done.result, Receipt):
            return receipt
        return receipt._replace(decision=done.result.decision)


def _payload_of(arguments: Mapping[str, object]) -> object:
    """Returns what the fingerprint is made of: the arguments, or the argument itself if there is only one."""
    named = {name: value for name, value in arguments.items() if name not in _NOT_PAYLOAD}
    return next(iter(named.values())) if len(named) == 1 else named


def _plain_arguments(signature: inspect.Signature) -> int:
    """Returns the number of arguments of a call that needs no binding: all by position. -1: every call needs it."""
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = signature.parameters.values()
    return len(parameters) if all(each.kind in plain for each in parameters) else -1


def _successful(receipt: Receipt) -> Receipt:
    if receipt.failed:
        raise failed(receipt)
    return receipt
