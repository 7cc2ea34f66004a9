"""Compaction: the log is rewritten into a few large segments, without rows that are no longer needed.

What remains of a document, decided from the log alone:

- its head row, live or not (a tombstone keeps the top sequence), and the `ingest` row with the head's key, which has
  the positions;
- of every revision that was superseded less than `keep_superseded_days` ago, the `ingest` row and the newest row, so
  that its receipt and its snippets survive, and the row that superseded it, which says when.

Everything else is dropped, receipt and snippets together: that content is new if it comes back.

No epoch is started unless a row can be dropped or the number of segments is at least halved.

Memory: about 400 bytes a row of the log for the plan (less than the hydration that follows needs), and the texts of one
window of `WINDOW_BYTES`. Documents are written in the order of their ids; if that differs much from the order in which
they were ingested, segments are read once per window instead of once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ragfence._progress import Meter
from ragfence.core.operations import FenceNumber
from ragfence.documents.log import INGEST
from ragfence.documents.parquet import decode_snippets, whole_rows
from ragfence.documents.rewrite import (
    COMPACTED,
    NOTHING,
    SEGMENT_BYTES,
    SEGMENT_ROWS,
    DeletedObjects,
    EndedRevision,
    LogRewrite,
    Plan,
    WrittenSegment,
    new_batch,
    portions,
    split_ids,
    whole_document,
)
from ragfence.engine.hydration import Keep
from ragfence.engine.segment_log import LogRow
from ragfence.stores.fences import FenceStore

DAY_MS = 24 * 3_600_000
WINDOW_ROWS = 50_000
WINDOW_BYTES = 128 * 2**20
"""of document texts, sorted at a time"""


@dataclass(frozen=True, slots=True)
class CompactReport:
    """The result of a compaction. `epoch` is 0 if there was nothing to gain and nothing was changed."""

    epoch: int = 0
    segments_before: int = 0
    segments_after: int = 0
    rows_before: int = 0
    rows_after: int = 0
    snippets_before: int = 0
    snippets_after: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    dropped_revisions: int = 0
    """superseded revisions, whose content is new if it comes back"""
    deleted: DeletedObjects = NOTHING


class Step(NamedTuple):
    """The part of a row that decides whether it remains."""

    key: bytes
    token: bytes
    fence: FenceNumber
    live: bool
    made: bool
    """whether it is an `ingest` row, which has positions"""
    at_ms: int
    size: int
    segment: str


def survivors(history: Sequence[Step], kept_since_ms: int) -> list[Step]:
    """Returns the rows of one document that remain; `history` is in the order of fences."""
    newest = {step.key: at for at, step in enumerate(history) if step.live}
    made = {step.key: at for at, step in enumerate(history) if step.made}
    head = len(history) - 1
    stay = {head}
    superseded_ms = 0
    for key, at in sorted(newest.items(), key=lambda entry: entry[1]):
        if at == head:
            stay.add(made.get(key, head))
            continue
        # Never earlier than the time before it: otherwise a clock that jumped could keep a row that supersedes and drop
        # the revision that the row belongs to.
        superseded_ms = max(superseded_ms, history[at + 1].at_ms)
        if superseded_ms > kept_since_ms:
            stay |= {at, at + 1, made.get(key, at)}
    return [history[at] for at in sorted(stay)]


class _KeptDocument(NamedTuple):
    """A document that goes into a new segment."""

    doc_id: str
    steps: list[Step]
    held_in: frozenset[str]
    """every segment with a row of it: each may have snippets that a later revision still uses"""

    def weight(self) -> tuple[int, int]:
        return len(self.steps), sum(step.size for step in self.steps if step.made)


class _Survey:
    """An outline of the rows of some segments. Segments never change, so each is read once."""

    def __init__(self, log_rewrite: LogRewrite) -> None:
        self._log_rewrite = log_rewrite
        self._histories: dict[str, list[Step]] = {}
        self.names: set[str] = set()
        self.rows = 0
        self.bytes = 0

    def look_at(self, segments: Sequence[str], keep: Keep) -> None:
        for name in segments:
            if name not in self.names:
                keep()
                self._outline(name)

    def kept(self, kept_since_ms: int) -> Iterator[_KeptDocument]:
        """Yields every document, in the order of ids."""
        for doc_id in sorted(self._histories):
            history = sorted(self._histories[doc_id], key=lambda step: step.fence)
            yield _KeptDocument(doc_id, survivors(history, kept_since_ms), frozenset(step.segment for step in history))

    def gone(self, kept: _KeptDocument) -> list[EndedRevision]:
        """Returns the revisions of a document that are dropped."""
        stay = {step.key for step in kept.steps if step.live}
        steps = sorted(self._histories[kept.doc_id], key=lambda step: step.fence)
        newest = {step.key: step for step in steps if step.live and step.key not in stay}
        return [EndedRevision(kept.doc_id, key, step.token, step.fence, step.at_ms) for key, step in newest.items()]

    def _outline(self, name: str) -> None:
        data = self._log_rewrite.get(name)
        for row in whole_rows(name, data):
            detail = row.detail
            step = Step(
                row.key, row.token, row.fence, row.live, detail.action == INGEST, detail.at_ms, detail.size, name
            )
            self._histories.setdefault(detail.doc_id, []).append(step)
            self.rows += 1
        self.bytes += len(data)
        self.names.add(name)


class Compaction:
    """One compaction of the log."""

    def __init__(self, log_rewrite: LogRewrite, fences: FenceStore, keep_superseded_days: float, update: Meter) -> None:
        self._log_rewrite = log_rewrite
        self._fences = fences
        self._keep_ms = round(keep_superseded_days * DAY_MS)
        self._update = update
        self._survey = _Survey(log_rewrite)
        self._report = CompactReport()

    def run(self) -> CompactReport:
        self._log_rewrite.run(self._plan, "compacted")
        # Also if there was nothing to gain: an interrupted compaction may have left what it replaced.
        return replace(self._report, deleted=self._log_rewrite.collect_void())

    def _plan(self) -> Plan | None:
        names = self._log_rewrite.truth()
        groups = self._groups(names, _nobody_waits)
        rows = sum(len(kept.steps) for group in groups for kept in group)
        if rows < self._survey.rows or 0 < 2 * len(groups) <= len(names):
            return self._rewrite
        if not self._report.epoch:
            size = len(names), self._survey.rows
            self._report = CompactReport(0, size[0], size[0], size[1], size[1])
        return None

    def _groups(self, segments: Sequence[str], keep: Keep) -> list[list[_KeptDocument]]:
        """Groups the documents by their new segments."""
        if not self._survey.names <= set(segments):  # another process rewrote the log in the meantime
            self._survey = _Survey(self._log_rewrite)
        self._survey.look_at(segments, keep)
        kept = self._survey.kept(self._fences.now_ms() - self._keep_ms)
        return list(portions(kept, _KeptDocument.weight, SEGMENT_ROWS, SEGMENT_BYTES))

    def _rewrite(self, epoch: int, segments: list[str], keep: Keep) -> list[str]:
        groups = self._groups(segments, keep)
        snippets = _Snippets(self._log_rewrite)
        written: list[WrittenSegment] = []
        for window in portions(groups, _weight_of_all, WINDOW_ROWS, WINDOW_BYTES):
            rows = self._rows([kept for group in window for kept in group], keep)
            texts = snippets.needed_by(
                rows, {name for group in window for kept in group for name in kept.held_in}, keep
            )
            for group in window:
                keep()
                packed = [row for kept in group for row in whole_document(rows[kept.doc_id], texts)]
                written.append(self._log_rewrite.write(epoch, new_batch(), packed))
                self._update(sum(each.rows for each in written))
        gone = [each for group in groups for kept in group for each in self._survey.gone(kept)]
        self._log_rewrite.record_ends(gone, COMPACTED)
        self._report = CompactReport(
            epoch=epoch,
            segments_before=len(segments),
            segments_after=len(written),
            rows_before=self._survey.rows,
            rows_after=sum(each.rows for each in written),
            snippets_before=snippets.seen,
            snippets_after=sum(each.snippets for each in written),
            bytes_before=self._survey.bytes + snippets.bytes,
            bytes_after=sum(each.bytes for each in written),
            dropped_revisions=len(gone),
        )
        return sorted(each.name for each in written)

    def _rows(self, documents: Sequence[_KeptDocument], keep: Keep) -> dict[str, list[LogRow]]:
        wanted = {(kept.doc_id, step.fence) for kept in documents for step in kept.steps}
        rows: dict[str, list[LogRow]] = {kept.doc_id: [] for kept in documents}
        for name in sorted({step.segment for kept in documents for step in kept.steps}):
            keep()
            for row in self._log_rewrite.rows(name):
                if (row.detail.doc_id, row.fence) in wanted:
                    rows[row.detail.doc_id].append(row)
        return rows


class _Snippets:
    """The snippet texts of the old segments."""

    def __init__(self, log_rewrite: LogRewrite) -> None:
        self._log_rewrite = log_rewrite
        self._counted: set[str] = set()
        self.seen = 0
        self.bytes = 0

    def needed_by(self, rows: dict[str, list[LogRow]], segments: Iterable[str], keep: Keep) -> dict[bytes, str]:
        needed = {
            each
            for own in rows.values()
            for row in own
            if row.detail.action == INGEST
            for each in split_ids(row.detail.ids)
        }
        texts: dict[bytes, str] = {}
        for segment in sorted(segments):
            keep()
            name, data = self._log_rewrite.snippets_object(segment)
            count = 0
            for snippet in decode_snippets(name, data) if data is not None else ():
                count += 1
                if (made := bytes.fromhex(snippet.snippet_id)) in needed:
                    texts[made] = snippet.text
            if segment not in self._counted:
                self._counted.add(segment)
                self.seen, self.bytes = self.seen + count, self.bytes + len(data or b"")
        return texts


def _weight_of_all(group: Sequence[_KeptDocument]) -> tuple[int, int]:
    weights = [kept.weight() for kept in group]
    return sum(rows for rows, _ in weights), sum(size for _, size in weights)


def _nobody_waits() -> None:
    """No lock is held while a plan is made."""
