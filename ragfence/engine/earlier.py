"""What the object store already knows of an operation: commits by owners who died, or that the fence store forgot."""

from __future__ import annotations

from ragfence.core.decision_rows import RowKind
from ragfence.core.decisions import Claim, Mode
from ragfence.core.ledger import row_for_answer
from ragfence.core.records import Head, KeyRecord
from ragfence.engine.commits import Commit, Commits
from ragfence.engine.refusals import Refusals
from ragfence.engine.requests import Request
from ragfence.stores.fences import FenceStore, Lookup


class EarlierCommits:
    def __init__(self, fences: FenceStore, commits: Commits, refusals: Refusals) -> None:
        self._fences = fences
        self._commits = commits
        self._refusals = refusals

    def find(self, request: Request, head: Head | None, claim: Claim) -> Commit | None:
        """The commit of this very operation. Raises what a claim would: conflict, or stale."""
        if request.mode is Mode.KEYED:
            found = self._commits.find(request.operation)
        else:
            found = self._newest_of_source(request, head, claim)
        if found is not None and found.fingerprint != request.fingerprint.hex():
            raise self._refusals.conflict(request, claim, found.record())
        return found

    def _newest_of_source(self, request: Request, head: Head | None, claim: Claim) -> Commit | None:
        """Our own commit, if there is one. A higher sequence than ours anywhere in the source makes us stale."""
        commits, own, sequence = self._commits, None, request.operation.sequence
        assert sequence is not None
        listed = list(commits.of_source(request.operation))
        names = sorted({key for key, _ in listed})
        known = self._fences.read([Lookup(bytes.fromhex(key), Mode.SEQUENCED, request.source) for key in names])
        top: tuple[int, str] | None = None
        if head is not None and head.sequence is not None:
            top = (head.sequence, (request.key[:1] + head.digest).hex())
        has_head = top is not None
        for key, marked in listed:
            number = marked
            if marked is None:
                if key == request.key_text:
                    own = commits.read(request.operation, key)
                    number = own.sequence if own else None
                elif not has_head or not _sealed_here(known[names.index(key)].record):
                    # The head covers whatever this store has sealed; only strangers have to be read. Without a head
                    # (the store has restarted) its records cover nothing, however much is sealed there.
                    other = commits.read(request.operation, key)
                    number = other.sequence if other else None
            if number is not None and (top is None or number > top[0]):
                top = (number, key)
        if top is not None and top[0] > sequence:
            self._fences.record([row_for_answer(claim, RowKind.STALE, None, self._fences.now_ms())])
            raise self._refusals.stale(request, top[0])
        if top is not None and top[0] == sequence and top[1] != request.key_text:
            raise self._refusals.conflict(request, claim, None)
        return own


def _sealed_here(record: KeyRecord | None) -> bool:
    return record is not None and record.ended
