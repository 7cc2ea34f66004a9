"""Repair: fixes what `verify` found, by repeating what can be repeated.

- The fence store is reloaded from the log, into a new epoch. That also settles leases that expired.
- A revision whose snippets or positions are lost is released: its rows leave the log, so its content is new when it is
  ingested again, and makes the same snippets with the same ids. If the revision is live, a `release` row takes its
  place: there is no head until the next ingest, and the sequence is one below its own, so that the same document is
  accepted again and nothing older.
- Void objects are deleted.

Rows that cannot be read are beyond repair, and so are objects of a newer ragfence: then nothing is changed at all. With
`accept_loss`, segments whose rows cannot be read are removed from the log. Their contents are unknown, so their
documents are as they were before, or unknown, until they are ingested again. A retraction in them is lost, and a
sequence may start again at a lower number. Revisions that decision rows name and the log no longer holds get `ended`
rows, so that the auditor knows why they are missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from ragfence.core.layout import NO_METADATA
from ragfence.core.operations import SEQUENCE_MIN
from ragfence.documents.findings import (
    BEYOND_REPAIR,
    IN_THE_FENCE_STORE,
    IN_THE_SINK,
    LOST,
    Finding,
    Trouble,
    Verification,
)
from ragfence.documents.identity import Identity, key_tail
from ragfence.documents.log import NO_POSITIONS, Address, Layout, address_in
from ragfence.documents.rewrite import (
    ATTEMPTS,
    GIVEN_UP,
    PAUSE_S,
    RELEASED,
    EndedRevision,
    LogRewrite,
    Plan,
    RevisionQuery,
    ended_by_decisions,
    ended_revisions,
)
from ragfence.documents.verify import DocumentVerifier
from ragfence.engine.hydration import Keep, TenantStores
from ragfence.engine.segment_log import LogRow
from ragfence.errors import NotReady, SegmentUnreadable, StoreUnavailable

RELEASE = "release"
TO_BE_RELEASED = LOST | {Trouble.SNIPPETS_UNREADABLE}


class DocumentRepair:
    def __init__(
        self,
        verifier: DocumentVerifier,
        stores: TenantStores,
        log_rewrite: LogRewrite,
        identity: Callable[[], Identity],
        settle_sink: Callable[[bool], object] | None,
        find_revisions: RevisionQuery | None = None,
    ) -> None:
        """`identity` is called only to release revisions: with wrong settings there is none.

        Without `find_revisions`, no `ended` rows are written for removed segments.
        """
        self._verifier = verifier
        self._stores = stores
        self._hydrator = stores.hydrator
        self._log_rewrite = log_rewrite
        self._identity = identity
        self._settle_sink = settle_sink
        self._find_revisions: RevisionQuery = find_revisions or (lambda concerned: ())

    def run(self, *, accept_loss: bool = False) -> Verification:
        before = self._verifier.look()
        removed_segments: tuple[Finding, ...] = ()
        troubles = {finding.trouble for finding in before.findings}
        if accept_loss and Trouble.ROWS_UNREADABLE in troubles and Trouble.TOO_NEW not in troubles:
            removed_segments = tuple(each for each in before.findings if each.trouble is Trouble.ROWS_UNREADABLE)
            segments = {each.place for each in removed_segments}
            SegmentRemoval(self._stores, self._log_rewrite, segments, self._find_revisions).run()
            before = self._verifier.look()
            before = replace(before, findings=(*before.findings, *removed_segments))
            troubles = {finding.trouble for finding in before.findings} - {Trouble.ROWS_UNREADABLE} | {Trouble.VOID}
        if troubles & BEYOND_REPAIR:
            return before
        usable = Trouble.SETTINGS not in troubles
        if troubles & TO_BE_RELEASED and usable:
            RevisionRelease(self._log_rewrite, self._identity(), before.findings).run()
        elif troubles & IN_THE_FENCE_STORE and not self._hydrator.try_hydrate():
            self._hydrator.ensure_ready()  # another process is loading it already
        if troubles:
            self._log_rewrite.collect_void()
        if self._settle_sink is not None and usable:
            # Only a sink with `ids()` shows what it lacks, so pending work is done in any case.
            self._settle_sink(bool(troubles & (IN_THE_SINK | TO_BE_RELEASED)))
        if not troubles:
            return before
        after = self._verifier.look()
        left = set(after.findings)
        return replace(after, repaired=tuple(finding for finding in before.findings if finding not in left))


class SegmentRemoval:
    """Removes segments whose rows cannot be read from the log, and what belongs to them."""

    def __init__(
        self,
        stores: TenantStores,
        log_rewrite: LogRewrite,
        segments: AbstractSet[str],
        find_revisions: RevisionQuery,
    ) -> None:
        self._layout = Layout(stores.tenant)
        self._hydrator = stores.hydrator
        self._log_rewrite = log_rewrite
        self._segments = segments
        self._find_revisions = find_revisions

    def run(self) -> None:
        for attempt in range(ATTEMPTS):
            if not self._segments & set(self._log_rewrite.truth()):
                return
            if not self._hydrator.try_hydrate(rewrite=self._rewrite):
                time.sleep(PAUSE_S * (attempt + 1))  # another process rebuilds the fence store, or tries to
        if self._segments & set(self._log_rewrite.truth()):
            raise NotReady("other processes keep rebuilding the fence store", hint="try again")

    def _rewrite(self, epoch: int, segments: list[str], keep: Keep) -> list[str]:
        left = []
        for name in segments:
            keep()
            if name in self._segments and self._is_unreadable(name):
                continue
            left.append(name)
        self._log_rewrite.record_ends(self._gone({*segments} - {*left}, left, keep), GIVEN_UP)
        return left

    def _gone(self, removed_segments: AbstractSet[str], left: Sequence[str], keep: Keep) -> Iterable[EndedRevision]:
        """Returns revisions sealed in these segments, or in others rewritten into them, that are not in the log now.

        The segments cannot be read, but each sealed revision has a decision row whose fence and token name its segment.
        """
        newest = max((address_in(name).epoch for name in removed_segments), default=0)
        rewritten = self._log_rewrite.rewritten() if removed_segments else ()

        def concerned(epoch: int, batch: bytes) -> bool:
            keep()
            name = self._layout.rows_at(Address(epoch, batch))
            return name in removed_segments or (epoch < newest and name in rewritten)

        gone = ended_by_decisions(self._find_revisions(concerned)) if removed_segments else {}
        for name in left if gone else ():
            keep()
            for key in self._log_rewrite.keys(name):
                gone.pop(key, None)
        return gone.values()

    def _is_unreadable(self, name: str) -> bool:
        """Whether the segment is still unreadable: it may have been restored in the meantime."""
        try:
            self._log_rewrite.rows(name)
        except SegmentUnreadable:
            return True
        except StoreUnavailable:
            return not self._log_rewrite.has(name)
        return False


class RevisionRelease:
    """Removes lost revisions from the log."""

    def __init__(self, log_rewrite: LogRewrite, identity: Identity, findings: Sequence[Finding]) -> None:
        self._log_rewrite = log_rewrite
        self._identity = identity
        lost = [finding for finding in findings if finding.trouble in LOST]
        self._doc_ids = {finding.doc_id for finding in lost}
        self._keys = {bytes.fromhex(finding.key) for finding in lost}
        self._unreadable = {each.place for each in findings if each.trouble is Trouble.SNIPPETS_UNREADABLE}

    def run(self) -> None:
        self._log_rewrite.run(self._plan, "repaired")

    def _plan(self) -> Plan | None:
        histories, held_in = self._held(self._log_rewrite.truth(), lambda: None)
        lost = any(row.key in self._keys for rows in histories.values() for row in rows)
        return self._rewrite if lost or any(map(self._without_snippets, held_in)) else None

    def _rewrite(self, epoch: int, segments: list[str], keep: Keep) -> list[str]:
        histories, held_in = self._held(segments, keep)
        gone = (row for rows in histories.values() for row in rows if row.key in self._keys)
        self._log_rewrite.record_ends(ended_revisions(gone), RELEASED)
        left = {doc_id: self._left(rows) for doc_id, rows in histories.items()}
        lost = set(filter(self._without_snippets, held_in))
        return self._log_rewrite.take_out(epoch, segments, left, held_in, keep, lost=lost)

    def _without_snippets(self, segment: str) -> bool:
        """Whether its snippets cannot be read. Even if none is needed, they would stop every compaction."""
        return self._log_rewrite.snippets_name(segment) in self._unreadable

    def _held(self, segments: Sequence[str], keep: Keep) -> tuple[dict[str, list[LogRow]], list[str]]:
        """Returns the rows of the documents, and the segments that must be rewritten."""
        histories: dict[str, list[LogRow]] = {}
        held_in = []
        for name in segments:
            keep()
            rows = [row for row in self._log_rewrite.rows(name) if row.detail.doc_id in self._doc_ids]
            for row in rows:
                histories.setdefault(row.detail.doc_id, []).append(row)
            if rows or self._without_snippets(name):
                held_in.append(name)
        return histories, held_in

    def _left(self, rows: Sequence[LogRow]) -> list[LogRow]:
        """Returns the rows of a document that remain: not its lost revisions; a lost head becomes a `release` row."""
        head = max(rows, key=lambda row: row.fence)
        left = [row for row in rows if row.key not in self._keys]
        return [*left, self._released(head)] if head.key in self._keys else left

    def _released(self, head: LogRow) -> LogRow:
        detail = head.detail
        sequence = head.sequence
        if sequence is not None:
            sequence = sequence - 1 if sequence > SEQUENCE_MIN else None
        return head._replace(
            key=self._identity.key(head.key[0], detail.doc_id.encode(), "", key_tail("", RELEASE)),
            fingerprint=self._identity.no_content(),
            live=False,
            sequence=sequence,
            metadata_hash=NO_METADATA,
            result=b"",
            detail=detail._replace(
                action=RELEASE,
                content_hash="",
                size=0,
                metadata="{}",
                source_url="",
                content_type="",
                recipe="",
                ids=b"",
                positions=NO_POSITIONS,
                dead=detail.ids,
            ),
        )
