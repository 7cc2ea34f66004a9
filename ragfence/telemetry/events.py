"""The events that listeners receive: one for every call to a fence store, after it has returned, and those of queues.

An event holds the arguments of the call and its answer themselves, not copies: the claims and their verdicts, for
example. So a batch of a thousand claims costs one event.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from ragfence.core.decision_rows import Row
from ragfence.core.decisions import Claim, HeadQuery, LeaseRef, Seal, SealOutcome, Verdict
from ragfence.engine.refusals import Refusal
from ragfence.queues.loop import MessagesSettled, QueueStarted, QueueStopped

if TYPE_CHECKING:
    from ragfence.telemetry.instrumented_store import InstrumentedStore


class StoreCall(NamedTuple):
    store: str
    """its URL, without credentials"""
    tenant: str
    solo: bool
    """the fence has no object store"""
    method: str
    seconds: float


class ClaimsAnswered(NamedTuple):
    call: StoreCall
    claims: Sequence[Claim]
    verdicts: Sequence[Verdict]


class ReplaysAnswered(NamedTuple):
    call: StoreCall
    asks: Sequence[HeadQuery]
    """all from one caller"""
    records: Sequence[bytes | None]


class SealsAnswered(NamedTuple):
    call: StoreCall
    seals: Sequence[Seal]
    outcomes: Sequence[SealOutcome]


class LeasesRenewed(NamedTuple):
    call: StoreCall
    leases: Sequence[LeaseRef]
    renewed: Sequence[bool]


class LeasesReleased(NamedTuple):
    call: StoreCall
    leases: Sequence[LeaseRef]
    released: Sequence[bool]
    error: str
    expire: bool
    """a commit had been sent, so the lease was expired instead of released"""


class RowsRecorded(NamedTuple):
    """Decisions made outside the store, such as a conflict found in the object store."""

    call: StoreCall
    rows: Sequence[Row]


class CallFinished(NamedTuple):
    """Any other observed call."""

    call: StoreCall


class CallFailed(NamedTuple):
    call: StoreCall
    error: Exception


class KeyGenerated(NamedTuple):
    """A key and a fingerprint were computed from an operation and its payload."""

    kind: str
    seconds: float


class DocumentsRefused(NamedTuple):
    """Invalid documents, which were not claimed. They have no decision rows."""

    store: str
    tenant: str
    refusals: Sequence[Refusal]


class StoreOpened(NamedTuple):
    store: InstrumentedStore


class StoreClosing(NamedTuple):
    """Sent before the store is closed, so that a listener can stop reading from it."""

    store: InstrumentedStore


Event = (
    ClaimsAnswered
    | ReplaysAnswered
    | SealsAnswered
    | LeasesRenewed
    | LeasesReleased
    | RowsRecorded
    | CallFinished
    | CallFailed
    | KeyGenerated
    | DocumentsRefused
    | StoreOpened
    | StoreClosing
    | QueueStarted
    | QueueStopped
    | MessagesSettled
)


@runtime_checkable
class Listener(Protocol):
    def handle(self, event: Event) -> None:
        """Called in the caller's thread, and from several threads at once. It should return quickly."""
        ...


@runtime_checkable
class SpanListener(Protocol):
    """A listener that also wraps each call, as a tracer does with a span."""

    def span(self, method: str) -> AbstractContextManager[object]: ...

    def handle(self, event: Event) -> None: ...
