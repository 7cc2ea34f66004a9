"""`InstrumentedStore`: wraps a fence store and notifies listeners of every call.

Calls and answers pass through unchanged. An exception of a listener never reaches the caller: the owner of a granted
claim would not learn of it, and the key would stay held until the lease expires.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

from ragfence.core.decision_rows import Row
from ragfence.core.decisions import Claim, HeadQuery, HeldRecords, LeaseRef, Seal, SealOutcome, Verdict
from ragfence.core.operations import Operation
from ragfence.core.records import Head
from ragfence.core.tallies import Tallies
from ragfence.engine.engine import Engine
from ragfence.engine.refusals import Refusal
from ragfence.engine.requests import Request
from ragfence.queues.loop import MessagesSettled, QueueStarted, QueueStopped
from ragfence.stores.fences import FenceStore, Loaded, Lookup, Marker, Replays, RowEntry, Scanned, Stats
from ragfence.telemetry.events import (
    CallFailed,
    CallFinished,
    ClaimsAnswered,
    DocumentsRefused,
    Event,
    KeyGenerated,
    LeasesReleased,
    LeasesRenewed,
    Listener,
    ReplaysAnswered,
    RowsRecorded,
    SealsAnswered,
    SpanListener,
    StoreCall,
    StoreClosing,
    StoreOpened,
)

_log = logging.getLogger("ragfence.telemetry")
_NO_SPAN = nullcontext()

Answer = TypeVar("Answer")


class _ObservedReplays:
    def __init__(self, store: InstrumentedStore, replays: Replays) -> None:
        self._store, self._replays = store, replays

    def settle(self) -> None:
        self._store.settle(self._replays)

    def discard(self) -> None:
        self._replays.discard()


class InstrumentedStore:
    """Wraps a `FenceStore`. Attributes outside the protocol (`infos`, `path`, `solo`) are those of the inner store."""

    def __init__(self, inner: FenceStore, listeners: Sequence[Listener]) -> None:
        self.inner = inner
        self._listeners = tuple(listeners)
        self._span_listeners = [listener for listener in self._listeners if isinstance(listener, SpanListener)]
        self._solo = bool(getattr(inner, "solo", False))
        self._reported: set[int] = set()
        self.notify(StoreOpened(self))

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # `copy.copy` looks up attributes before it sets any
            raise AttributeError(name)
        return getattr(self.inner, name)

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def tenant(self) -> str:
        return self.inner.tenant

    def notify(self, event: Event) -> None:
        for listener in self._listeners:
            try:
                listener.handle(event)
            except Exception:  # noqa: BLE001  # whatever it is, the caller must get the answer
                self._report_failure(listener)

    def claim(self, claims: Sequence[Claim]) -> list[Verdict]:
        return self._observe(
            "claim", lambda: self.inner.claim(claims), lambda call, verdicts: ClaimsAnswered(call, claims, verdicts)
        )

    def replays(self, queries: Sequence[HeadQuery]) -> Replays:
        found = self._observe(
            "replays",
            lambda: self.inner.replays(queries),
            lambda call, found: ReplaysAnswered(call, queries, found.records),
        )
        return Replays(found.records, _ObservedReplays(self, found))

    def settle(self, replays: Replays) -> None:
        self._observe("settle", replays.settle, _call_finished)

    def renew(self, leases: Sequence[LeaseRef]) -> list[bool]:
        return self._observe(
            "renew", lambda: self.inner.renew(leases), lambda call, renewed: LeasesRenewed(call, leases, renewed)
        )

    def seal(self, seals: Sequence[Seal]) -> list[SealOutcome]:
        return self._observe(
            "seal", lambda: self.inner.seal(seals), lambda call, outcomes: SealsAnswered(call, seals, outcomes)
        )

    def release(
        self,
        leases: Sequence[LeaseRef],
        error: str = "",
        *,
        expire: bool = False,
        refund: bool = False,
        withdraw: bool = False,
    ) -> list[bool]:
        return self._observe(
            "release",
            lambda: self.inner.release(leases, error, expire=expire, refund=refund, withdraw=withdraw),
            lambda call, released: LeasesReleased(call, leases, released, error, expire),
        )

    def reset_attempts(self, leases: Sequence[LeaseRef]) -> list[bool]:
        return self._observe("reset_attempts", lambda: self.inner.reset_attempts(leases), _call_finished)

    def read(self, lookups: Sequence[Lookup]) -> list[HeldRecords]:
        return self._observe("read", lambda: self.inner.read(lookups), _call_finished)

    def heads(self, shard: int) -> Iterator[tuple[bytes, Head]]:
        return self.inner.heads(shard)

    def all_heads(self) -> Iterator[tuple[int, bytes, Head]]:
        return self.inner.all_heads()

    def marks(self, shard: int | None = None) -> Iterator[tuple[int, bytes]]:
        return self.inner.marks(shard)

    def scan(self, shard: int | None = None) -> Iterator[Scanned]:
        return self.inner.scan(shard)

    def leases(self, shard: int | None = None) -> Iterator[Scanned]:
        return self.inner.leases(shard)

    def forget(self, keys: Sequence[bytes], *, below: int = 0, pending: bool = False) -> None:
        self._observe("forget", lambda: self.inner.forget(keys, below=below, pending=pending), _call_finished)

    def scrub(self) -> None:
        self._observe("scrub", self.inner.scrub, _call_finished)

    def stats(self) -> Stats:
        return self._observe("stats", self.inner.stats, _call_finished)

    def tallies(self, since_ms: int = 0) -> Tallies:
        return self._observe("tallies", lambda: self.inner.tallies(since_ms), _call_finished)

    def purge_expired(self, limit: int = 1000) -> int:
        return self._observe("purge_expired", lambda: self.inner.purge_expired(limit), _call_finished)

    def record(self, rows: Sequence[Row]) -> None:
        self._observe("record", lambda: self.inner.record(rows), lambda call, _: RowsRecorded(call, rows))

    def rows(self, since_ms: int = 0, shard: int | None = None) -> Iterator[Row]:
        return self.inner.rows(since_ms, shard)

    def row_entries(self, after: str = "", limit: int = 1000) -> list[RowEntry]:
        return self._observe("row_entries", lambda: self.inner.row_entries(after, limit), _call_finished)

    def drop_rows(self, entries: Sequence[RowEntry]) -> int:
        return self._observe("drop_rows", lambda: self.inner.drop_rows(entries), _call_finished)

    def now_ms(self) -> int:
        return self.inner.now_ms()

    def markers(self) -> list[Marker | None]:
        return self.inner.markers()

    def versions(self) -> list[tuple[int, int] | None]:
        return self.inner.versions()

    def begin_epoch(self, epoch: int) -> bool:
        return self._observe("begin_epoch", lambda: self.inner.begin_epoch(epoch), _call_finished)

    def load(self, epoch: int, items: Sequence[Loaded]) -> bool:
        return self._observe("load", lambda: self.inner.load(epoch, items), _call_finished)

    def finish_epoch(self, epoch: int) -> bool:
        return self._observe("finish_epoch", lambda: self.inner.finish_epoch(epoch), _call_finished)

    def forget_markers(self, below: int) -> None:
        self.inner.forget_markers(below)

    def lock(self, name: str, token: str, ttl_ms: int) -> bool:
        return self.inner.lock(name, token, ttl_ms)

    def unlock(self, name: str, token: str) -> None:
        self.inner.unlock(name, token)

    def close(self) -> None:
        self.notify(StoreClosing(self))
        self.inner.close()

    def _observe(self, method: str, act: Callable[[], Answer], event: Callable[[StoreCall, Answer], Event]) -> Answer:
        with self._spans(method) if self._span_listeners else _NO_SPAN:
            started = time.perf_counter()
            try:
                answer = act()
            except Exception as error:
                self.notify(CallFailed(self._call(method, started), error))
                raise
            self.notify(event(self._call(method, started), answer))
        return answer

    def _call(self, method: str, started: float) -> StoreCall:
        return StoreCall(self.inner.url, self.inner.tenant, self._solo, method, time.perf_counter() - started)

    @contextmanager
    def _spans(self, method: str) -> Iterator[None]:
        entered: list[tuple[Listener, AbstractContextManager[object]]] = []
        for listener in self._span_listeners:
            with self._guard(listener):
                block = listener.span(method)
                block.__enter__()
                entered.append((listener, block))
        try:
            yield
        except BaseException as error:
            self._leave(entered, error)
            raise
        self._leave(entered, None)

    def _leave(
        self, entered: Sequence[tuple[Listener, AbstractContextManager[object]]], error: BaseException | None
    ) -> None:
        for listener, block in reversed(entered):
            with self._guard(listener):
                block.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)

    @contextmanager
    def _guard(self, listener: Listener) -> Iterator[None]:
        try:
            yield
        except Exception:  # noqa: BLE001  # as in `notify`
            self._report_failure(listener)

    def _report_failure(self, listener: Listener) -> None:
        """Logs the failure once per listener: what fails for one event fails for thousands."""
        if id(listener) not in self._reported:
            self._reported.add(id(listener))
            _log.exception(
                "%s failed on an event; later failures of this listener are not logged", type(listener).__name__
            )


class InstrumentedEngine(Engine):
    """Also notifies listeners of the time it takes to make a key, and of documents that were refused."""

    def request(
        self,
        operation: Operation,
        payload: object,
        *,
        event_id: str = "",
        correlation_id: str = "",
        route: str = "",
        kept: object = None,
        include_diff: bool | None = None,
    ) -> Request:
        started = time.perf_counter()
        made = super().request(
            operation,
            payload,
            event_id=event_id,
            correlation_id=correlation_id,
            route=route,
            kept=kept,
            include_diff=include_diff,
        )
        if isinstance(self.fences, InstrumentedStore):
            self.fences.notify(KeyGenerated(operation.kind, time.perf_counter() - started))
        return made

    def notify(self, event: object) -> None:
        if isinstance(self.fences, InstrumentedStore) and isinstance(event, _OF_QUEUES):
            self.fences.notify(event)

    def note_refusals(self, refusals: Sequence[Refusal]) -> None:
        if isinstance(self.fences, InstrumentedStore) and refusals:
            self.fences.notify(DocumentsRefused(self.fences.url, self.tenant, refusals))


_OF_QUEUES = (MessagesSettled, QueueStarted, QueueStopped)


def _call_finished(call: StoreCall, _: object) -> Event:
    return CallFinished(call)
