"""`InstrumentedStore`: a fence store that tells listeners of every call, between the engine and the store it wraps.

It passes everything on as it came and answers what the store answered. What a listener raises never reaches the caller:
a claim that was won and not told to its owner would be held until it runs out.
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
from ragfence.stores.fences import FenceStore, Loaded, Lookup, Marker, Replays, RowEntry, Scanned, Stats
from ragfence.telemetry.events import (
    CallFailed,
    CallFinished,
    ClaimsAnswered,
    DocumentsRefused,
    Event,
    KeyMade,
    LeasesReleased,
    LeasesRenewed,
    Listener,
    ReplaysAnswered,
    RowsRecorded,
    SealsAnswered,
    StoreCall,
    StoreClosing,
    StoreOpened,
    Surrounding,
)

_log = logging.getLogger("ragfence.telemetry")
_NOTHING_AROUND = nullcontext()

Answer = TypeVar("Answer")


class _WatchedRows:
    def __init__(self, watched: InstrumentedStore, replays: Replays) -> None:
        self._watched, self._replays = watched, replays

    def settle(self) -> None:
        self._watched.settle(self._replays)

    def discard(self) -> None:
        self._replays.discard()


class InstrumentedStore:
    """Wraps a `FenceStore`. What a store has beside the protocol (`infos`, `path`, `solo`) is found here as well."""

    def __init__(self, inner: FenceStore, listeners: Sequence[Listener]) -> None:
        self.inner = inner
        self._listeners = tuple(listeners)
        self._surrounding = [listener for listener in self._listeners if isinstance(listener, Surrounding)]
        self._solo = bool(getattr(inner, "solo", False))
        self._complained: set[int] = set()
        self.tell(StoreOpened(self))

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # a copy that is not filled yet
            raise AttributeError(name)
        return getattr(self.inner, name)

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def tenant(self) -> str:
        return self.inner.tenant

    def tell(self, event: Event) -> None:
        for listener in self._listeners:
            try:
                listener.see(event)
            except Exception:  # noqa: BLE001  # whatever it is, the caller must have the answer
                self._complain(listener)

    def claim(self, claims: Sequence[Claim]) -> list[Verdict]:
        return self._watched(
            "claim", lambda: self.inner.claim(claims), lambda call, verdicts: ClaimsAnswered(call, claims, verdicts)
        )

    def replays(self, asks: Sequence[HeadQuery]) -> Replays:
        found = self._watched(
            "replays", lambda: self.inner.replays(asks), lambda call, found: ReplaysAnswered(call, asks, found.records)
        )
        return Replays(found.records, _WatchedRows(self, found))

    def settle(self, replays: Replays) -> None:
        self._watched("settle", replays.settle, _called)

    def renew(self, leases: Sequence[LeaseRef]) -> list[bool]:
        return self._watched(
            "renew", lambda: self.inner.renew(leases), lambda call, kept: LeasesRenewed(call, leases, kept)
        )

    def seal(self, seals: Sequence[Seal]) -> list[SealOutcome]:
        return self._watched(
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
        return self._watched(
            "release",
            lambda: self.inner.release(leases, error, expire=expire, refund=refund, withdraw=withdraw),
            lambda call, released: LeasesReleased(call, leases, released, error, expire),
        )

    def reset_attempts(self, leases: Sequence[LeaseRef]) -> list[bool]:
        return self._watched("reset_attempts", lambda: self.inner.reset_attempts(leases), _called)

    def read(self, lookups: Sequence[Lookup]) -> list[HeldRecords]:
        return self._watched("read", lambda: self.inner.read(lookups), _called)

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
        self._watched("forget", lambda: self.inner.forget(keys, below=below, pending=pending), _called)

    def scrub(self) -> None:
        self._watched("scrub", self.inner.scrub, _called)

    def stats(self) -> Stats:
        return self._watched("stats", self.inner.stats, _called)

    def tallies(self, since_ms: int = 0) -> Tallies:
        return self._watched("tallies", lambda: self.inner.tallies(since_ms), _called)

    def purge_expired(self, limit: int = 1000) -> int:
        return self._watched("purge_expired", lambda: self.inner.purge_expired(limit), _called)

    def record(self, rows: Sequence[Row]) -> None:
        self._watched("record", lambda: self.inner.record(rows), lambda call, _: RowsRecorded(call, rows))

    def rows(self, since_ms: int = 0, shard: int | None = None) -> Iterator[Row]:
        return self.inner.rows(since_ms, shard)

    def row_entries(self, after: str = "", limit: int = 1000) -> list[RowEntry]:
        return self._watched("row_entries", lambda: self.inner.row_entries(after, limit), _called)

    def drop_rows(self, entries: Sequence[RowEntry]) -> int:
        return self._watched("drop_rows", lambda: self.inner.drop_rows(entries), _called)

    def now_ms(self) -> int:
        return self.inner.now_ms()

    def markers(self) -> list[Marker | None]:
        return self.inner.markers()

    def versions(self) -> list[tuple[int, int] | None]:
        return self.inner.versions()

    def begin_epoch(self, epoch: int) -> bool:
        return self._watched("begin_epoch", lambda: self.inner.begin_epoch(epoch), _called)

    def load(self, epoch: int, items: Sequence[Loaded]) -> bool:
        return self._watched("load", lambda: self.inner.load(epoch, items), _called)

    def finish_epoch(self, epoch: int) -> bool:
        return self._watched("finish_epoch", lambda: self.inner.finish_epoch(epoch), _called)

    def forget_markers(self, below: int) -> None:
        self.inner.forget_markers(below)

    def lock(self, name: str, token: str, ttl_ms: int) -> bool:
        return self.inner.lock(name, token, ttl_ms)

    def unlock(self, name: str, token: str) -> None:
        self.inner.unlock(name, token)

    def close(self) -> None:
        self.tell(StoreClosing(self))
        self.inner.close()

    def _watched(self, method: str, act: Callable[[], Answer], event: Callable[[StoreCall, Answer], Event]) -> Answer:
        with self._around(method) if self._surrounding else _NOTHING_AROUND:
            started = time.perf_counter()
            try:
                answer = act()
            except Exception as error:
                self.tell(CallFailed(self._call(method, started), error))
                raise
            self.tell(event(self._call(method, started), answer))
        return answer

    def _call(self, method: str, started: float) -> StoreCall:
        return StoreCall(self.inner.url, self.inner.tenant, self._solo, method, time.perf_counter() - started)

    @contextmanager
    def _around(self, method: str) -> Iterator[None]:
        entered: list[tuple[Listener, AbstractContextManager[object]]] = []
        for listener in self._surrounding:
            with self._complaining(listener):
                block = listener.around(method)
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
            with self._complaining(listener):
                block.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)

    @contextmanager
    def _complaining(self, listener: Listener) -> Iterator[None]:
        try:
            yield
        except Exception:  # noqa: BLE001  # as in `tell`
            self._complain(listener)

    def _complain(self, listener: Listener) -> None:
        """Once: what fails for one event fails for thousands."""
        if id(listener) not in self._complained:
            self._complained.add(id(listener))
            _log.exception("%s failed, and may have missed more than this", type(listener).__name__)


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
            self.fences.tell(KeyMade(operation.kind, time.perf_counter() - started))
        return made

    def note_refusals(self, refusals: Sequence[Refusal]) -> None:
        if isinstance(self.fences, InstrumentedStore) and refusals:
            self.fences.tell(DocumentsRefused(self.fences.url, self.tenant, refusals))


def _called(call: StoreCall, _: object) -> Event:
    return CallFinished(call)
