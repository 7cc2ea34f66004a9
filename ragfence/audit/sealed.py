"""Which contents of documents were sealed in which segments, as the decision rows have it.

The fence and the token of a sealed document name the segment that it was committed in, so the rows still know what was
in one that nobody can read any more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ragfence.audit.ledger import Wanted
from ragfence.audit.row_reader import Rows
from ragfence.core.decision_rows import DECISION_TEXT
from ragfence.core.layout import BATCH_BYTES, RowKind
from ragfence.core.operations import FenceNumber
from ragfence.documents.rewrite import EndedRevision, RevisionFact

if TYPE_CHECKING:
    import pyarrow

_NAMES = ("idempotency_key", "source_id", "decision", "winner", "fence", "sealed_at")
_INGESTED = Wanted(values=(("kind", "document"), ("action", "ingest")))


def told_of_documents(rows: Rows, concerned: Callable[[int, bytes], bool]) -> list[RevisionFact]:
    """A day at a time; `concerned` is asked once for each segment that a day names, by its epoch and batch."""
    days = rows.by_day(_INGESTED, _NAMES, lambda table: _told(table, concerned))
    return [told for day in days.values() for told in day]


def _told(table: pyarrow.Table, concerned: Callable[[int, bytes], bool]) -> list[RevisionFact]:
    import pyarrow as pa
    import pyarrow.compute as pc

    ended = pc.equal(table.column("decision"), DECISION_TEXT[RowKind.ENDED])
    outcome = pc.and_(pc.is_valid(table.column("winner")), pc.is_valid(table.column("fence")))
    table = table.filter(pc.and_(outcome, pc.or_(ended, pc.is_valid(table.column("sealed_at")))))
    epochs = pc.list_element(pc.split_pattern(table.column("fence"), ".", max_splits=1), 0)
    batches = pc.utf8_slice_codeunits(table.column("winner"), 0, 2 * BATCH_BYTES)
    segments = pc.binary_join_element_wise(epochs, batches, ".")
    asked = [text for text in pc.unique(segments).to_pylist() if _asked(text, concerned)]
    table = table.filter(pc.is_in(segments, pa.array(asked, pa.string())))
    sealed_at = table.column("sealed_at").cast(pa.int64()).to_pylist()
    columns = (table.column(name).to_pylist() for name in _NAMES[:-1])
    return [
        RevisionFact(
            EndedRevision(source_id or "", bytes.fromhex(key), bytes.fromhex(winner), _fence(fence), at_ms or 0),
            decision == DECISION_TEXT[RowKind.ENDED],
        )
        for key, source_id, decision, winner, fence, at_ms in zip(*columns, sealed_at, strict=True)
    ]


def _asked(text: str, concerned: Callable[[int, bytes], bool]) -> bool:
    epoch, _, batch = text.partition(".")
    return concerned(int(epoch), bytes.fromhex(batch))


def _fence(text: str) -> FenceNumber:
    epoch, _, counter = text.partition(".")
    return FenceNumber(int(epoch), int(counter))
