"""Purge: removes the text and the metadata of a document permanently from everything ragfence stores.

    the head is retracted (a `purge` row, under a lease) -> an epoch without the document's other rows -> deletion

A tombstone remains, with the doc_id and the top sequence: no text, no metadata, no address and no snippet ids. The
document's receipts are removed from the fence store. Decision rows and stored HTTP requests about the document become
tombstones as well, see `audit.tombstones`. An interrupted purge is completed by the next one. The document may be
ingested again later, as new.

A writer that is ingesting the document at the same time comes either before the purge (and its text is purged) or after
it (and the document exists again). If the document must stay gone, stop its loaders first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ragfence.core.decisions import Granted, Replay
from ragfence.documents.claims import Caller, ClaimBuilder, PreparedDocument
from ragfence.documents.head_moves import error_of, retract_effect
from ragfence.documents.identity import key_tail
from ragfence.documents.log import PURGE
from ragfence.documents.reads import DocumentReads
from ragfence.documents.rewrite import NOTHING, PURGED, DeletedObjects, LogRewrite, Plan, ended_revisions
from ragfence.engine.batch_commit import BatchCommitter, FinishedEffect, Move, MovedHead, batch_tokens
from ragfence.engine.hydration import Keep
from ragfence.engine.segment_log import LogRow

Forget = Callable[[str], None]
"""Removes what another part of ragfence stores about a doc_id; may be called again for the same one."""


@dataclass(frozen=True, slots=True)
class PurgeReport:
    """The result of a purge. `known` is False if the doc_id was never ingested, or was compacted away."""

    doc_id: str
    known: bool
    epoch: int = 0
    """0 if no epoch was needed: an earlier purge had removed everything"""
    rows: int = 0
    """removed from the log; the tombstone remains"""
    segments: int = 0
    """rewritten"""
    deleted: DeletedObjects = NOTHING


class Purge:
    """One purge of one document.

    `others` remove what is stored about documents outside the log, such as the notes of a sync about its files.
    """

    def __init__(
        self,
        log_rewrite: LogRewrite,
        reads: DocumentReads,
        writer: BatchCommitter,
        claim_builder: ClaimBuilder,
        caller: Caller,
        *,
        others: Sequence[Forget] = (),
    ) -> None:
        self._log_rewrite = log_rewrite
        self._reads = reads
        self._writer = writer
        self._claim_builder = claim_builder
        self._caller = caller
        self._others = others
        self._report = PurgeReport("", known=False)
        self._clean: set[str] = set()
        """segments without the document; segments never change, so these are not read again while writers wait"""

    def run(self, doc_id: str) -> PurgeReport:
        doc_id = self._prepared(doc_id).doc.doc_id
        self._report = PurgeReport(doc_id, known=False)
        self._log_rewrite.run(lambda: self._plan(doc_id), "purged")
        for forget in self._others:
            forget(doc_id)
        # Also for an unknown document: a writer that died may have left its snippets in an earlier epoch.
        return replace(self._report, deleted=self._log_rewrite.collect_void())

    def _plan(self, doc_id: str) -> Plan | None:
        source = self._reads.source(doc_id)
        known = self._retract(doc_id)
        if not known and (source is None or source.lease is None):
            return None
        self._report = replace(self._report, known=known or self._report.known)
        rows, held_in = self._held(doc_id, self._log_rewrite.truth())
        if known and _settled(rows, self._log_rewrite.newest_epoch()):
            return None
        for name in held_in:
            self._log_rewrite.snippets(name)  # fails here if it cannot be read, before writers have to wait
        return lambda epoch, segments, keep: self._rewrite(doc_id, epoch, segments, keep)

    def _rewrite(self, doc_id: str, epoch: int, segments: list[str], keep: Keep) -> list[str] | None:
        rows, held_in = self._held(doc_id, segments, keep)
        if not rows:  # an attempt that never committed: the new epoch voids what it left
            self._report = replace(self._report, epoch=epoch)
            return segments
        tombstone = rows[-1]
        if tombstone.detail.action != PURGE:
            return None  # it was ingested again in the meantime: retract its head first
        self._log_rewrite.record_ends(ended_revisions(rows), PURGED)
        # Their receipts hold snippet ids, and no epoch would overwrite them.
        self._log_rewrite.forget(ended_revisions(rows), below=epoch)
        self._report = replace(self._report, epoch=epoch, rows=len(rows) - 1, segments=len(held_in))
        # The sink received the dead ids when the head moved. They are made from the text, so none is kept.
        bare = tombstone._replace(detail=tombstone.detail._replace(dead=b""))
        return self._log_rewrite.take_out(epoch, segments, {doc_id: [bare]}, held_in, keep)

    def _held(self, doc_id: str, segments: Sequence[str], keep: Keep = lambda: None) -> tuple[list[LogRow], list[str]]:
        """Returns the rows of the document in the order of fences, and the segments that hold them."""
        rows: list[LogRow] = []
        held_in = []
        for name in segments:
            if name in self._clean:
                continue
            keep()
            found = self._log_rewrite.rows(name, doc_id)
            if found:
                rows += found
                held_in.append(name)
            else:
                self._clean.add(name)
        return sorted(rows, key=lambda row: row.fence), held_in

    def _retract(self, doc_id: str) -> bool:
        """Retracts the head, unless a purge did already. Returns False if there is no head."""
        prepared = self._prepared(doc_id)
        wait_s = self._claim_builder.kind_rules.wait_ms / 1000
        (answer,) = self._writer.move([Move(prepared.claim, _effect, prepared)], wait_s=wait_s)
        if isinstance(answer, MovedHead | Replay):
            return answer.record is not None
        raise error_of(prepared, answer, wait_s)

    def _prepared(self, doc_id: str) -> PreparedDocument:
        prepared = self._claim_builder.retract(doc_id, None, next(batch_tokens()), self._caller)
        name, claim = prepared.doc.doc_id, prepared.claim
        key = self._claim_builder.identity.key(claim.key[0], name.encode(), "", key_tail("", PURGE))
        context = self._caller.context(name, "", "", None, 0, action=PURGE)
        return prepared._replace(claim=claim._replace(key=key, context=context))


def _effect(subject: PreparedDocument, grant: Granted) -> FinishedEffect:
    effect = retract_effect(subject, grant)
    return effect._replace(detail=effect.detail._replace(action=PURGE))


def _settled(rows: Sequence[LogRow], newest_epoch: int) -> bool:
    """Whether only the tombstone is left, and an epoch has begun since, which voids uncommitted writes."""
    return len(rows) == 1 and rows[0].fence.epoch < newest_epoch
