"""What a listener is told: one event for every call to a fence store, when it is over, with all that it was about.

An event holds what the store was given and what it answered, as they are: the claims and their verdicts, never a copy.
So a batch of a thousand costs one event, and what a listener makes of it is its own affair.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from ragfence.core.decision_rows import Row
from ragfence.core.decisions import Claim, HeadQuery, LeaseRef, Seal, SealOutcome, Verdict
from ragfence.engine.refusals import Refusal

if TYPE_CHECKING:
    from ragfence.telemetry.instrumented_store import InstrumentedStore


class StoreCall(NamedTuple):
    store: str
    """its URL, without credentials"""
    tenant: str
    solo: bool
    """no object store stands behind it"""
    method: str
    seconds: float


class ClaimsAnswered(NamedTuple):
    call: StoreCall
    claims: Sequence[Claim]
    verdicts: Sequence[Verdict]


class ReplaysAnswered(NamedTuple):
    call: StoreCall
    asks: Sequence[HeadQuery]
    """all of one caller"""
    records: Sequence[bytes | None]


class SealsAnswered(NamedTuple):
    call: StoreCall
    seals: Sequence[Seal]
    outcomes: Sequence[SealOutcome]


class LeasesRenewed(NamedTuple):
    call: StoreCall
    leases: Sequence[LeaseRef]
    kept: Sequence[bool]


class LeasesReleased(NamedTuple):
    call: StoreCall
    leases: Sequence[LeaseRef]
    released: Sequence[bool]
    error: str
    expire: bool
    """a commit was sent, so the lease was ended, not taken away"""


class RowsRecorded(NamedTuple):
    """Decisions that the store did not make itself, such as a conflict found in the object store."""

    call: StoreCall
    rows: Sequence[Row]


class CallFinished(NamedTuple):
    """Any other call that is watched."""

    call: StoreCall


class CallFailed(NamedTuple):
    call: StoreCall
    error: Exception


class KeyMade(NamedTuple):
    """An operation and its payload became a key and a fingerprint."""

    kind: str
    seconds: float


class DocumentsRefused(NamedTuple):
    """Documents that were not even claimed, because they are invalid. No decision row tells of them."""

    store: str
    tenant: str
    refusals: Sequence[Refusal]


class StoreOpened(NamedTuple):
    store: InstrumentedStore


class StoreClosing(NamedTuple):
    """Told before it is closed: whoever still reads from it can end that."""

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
    | KeyMade
    | DocumentsRefused
    | StoreOpened
    | StoreClosing
)


@runtime_checkable
class Listener(Protocol):
    def see(self, event: Event) -> None:
        """Called in the thread of whoever called the fence, and by many at once. It should be quick."""
        ...


@runtime_checkable
class Surrounding(Protocol):
    """A listener that also wants to be there while the call is under way, such as the span of a trace."""

    def around(self, method: str) -> AbstractContextManager[object]: ...

    def see(self, event: Event) -> None: ...
