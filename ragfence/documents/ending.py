"""Contents that leave the log, by a purge, a compaction or a repair, are new when they come back: the rows that say so.

Without them an auditor would see one content sealed twice, and call it a promise broken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from ragfence.core.decision_rows import Row, context_of
from ragfence.core.operations import Fence
from ragfence.core.records import FINGERPRINT_BYTES, KeyRecord, State
from ragfence.documents.identity import operation_of
from ragfence.engine.expiry import row_for_end
from ragfence.engine.segment_log import LogRow
from ragfence.stores.fences import FenceStore

COMPACTED, PURGED, RELEASED, GIVEN_UP = "COMPACTED", "PURGED", "RELEASED", "GIVEN_UP"
AT_ONCE = 1000


class Gone(NamedTuple):
    """A revision that no row of the log tells of any more."""

    doc_id: str
    key: bytes
    token: bytes
    fence: Fence
    at_ms: int


class Told(NamedTuple):
    """What a decision row tells of a revision: that it was sealed, or that its life ended."""

    of: Gone
    ended: bool


RowsTell = Callable[[Callable[[int, bytes], bool]], Iterable[Told]]
"""What the decision rows tell of documents that were sealed in some segments: those for which a function of
(epoch, batch) is true."""


def tell(fences: FenceStore, gone: Iterable[Gone], why: str) -> None:
    """To be called before they leave: cut off in between, it is still one life."""
    each = iter(gone)
    while some := list(islice(each, AT_ONCE)):
        now_ms = fences.now_ms()
        fences.record([_row(fences.tenant, one, why, now_ms) for one in some])


def gone_of(rows: Iterable[LogRow]) -> Iterator[Gone]:
    """Of rows that leave; one for each content."""
    newest = {row.key: row for row in sorted(rows, key=lambda row: row.fence) if row.live}
    return (Gone(row.detail.doc_id, key, row.token, row.fence, row.detail.at_ms) for key, row in newest.items())


def gone_by_rows(told: Iterable[Told]) -> dict[bytes, Gone]:
    """The newest outcome of each key whose life goes on, as far as its decision rows know."""
    newest: dict[bytes, Gone] = {}
    ended: dict[bytes, Fence] = {}
    for gone, is_end in told:
        if is_end:
            ended[gone.key] = max(gone.fence, ended.get(gone.key, gone.fence))
        elif gone.key not in newest or newest[gone.key].fence < gone.fence:
            newest[gone.key] = gone
    return {key: gone for key, gone in newest.items() if key not in ended or ended[key] < gone.fence}


def _row(tenant: str, gone: Gone, why: str, now_ms: int) -> Row:
    record = KeyRecord(State.SEALED, bytes(FINGERPRINT_BYTES), gone.token, gone.fence, 1, gone.at_ms, gone.at_ms)
    context = context_of(operation_of(tenant, gone.doc_id, "", ""))
    return row_for_end(gone.key, record, why=why, now_ms=now_ms, context=context)
