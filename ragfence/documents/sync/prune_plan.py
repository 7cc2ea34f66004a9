"""The documents that a prune may retract, determined before a sync writes anything."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Literal, NamedTuple

from ragfence.core.records import Head
from ragfence.documents.claims import version_of
from ragfence.documents.log import stored_in
from ragfence.documents.origins import Origin
from ragfence.documents.reads import DocumentReads
from ragfence.documents.sync.state import ListedIds
from ragfence.errors import ValidationError
from ragfence.stores.fences import FenceStore

Prune = Literal[False, "scoped", "full"]


class PruneCandidates(NamedTuple):
    """The documents that a prune may retract."""

    versions: dict[str, str]
    """the version at which each was seen; a document that moves later is not retracted"""
    live: int
    """how many documents are live, whoever owns them; 0 if there are no candidates and they were not counted"""
    kept: int
    """live documents missing in the source that stay: it does not own them, or another source has them"""
    gone: set[str]
    """documents whose notes the source can delete"""


class PrunePlan(NamedTuple):
    """What a plan is made with."""

    fences: FenceStore
    reads: DocumentReads
    origin: Origin
    heads: Callable[[Iterable[str]], Iterator[tuple[str, Head | None]]]
    others_naming: Callable[[Collection[str]], set[str]]
    """returns which of these documents are noted by a source of another origin"""

    def candidates(self, prune: Prune, listed: ListedIds) -> PruneCandidates:
        """Returns the candidates; `listed` has everything that the source lists now."""
        found = self._outside(listed) if prune == "full" else self._left(listed)
        if not found.versions or self.origin.take_over:
            return found
        others = self.others_naming(found.versions.keys())
        versions = {doc_id: version for doc_id, version in found.versions.items() if doc_id not in others}
        return found._replace(versions=versions, kept=found.kept + len(found.versions) - len(versions))

    def _outside(self, listed: ListedIds) -> PruneCandidates:
        """Live documents that are not listed and belong to no other origin."""
        live, kept, outside = 0, 0, {}
        for row in self.reads.live():
            live += 1
            if row.detail.doc_id in listed:
                continue
            if row.detail.owner in ("", self.origin.digest.hex()) or self.origin.take_over:
                outside[row.detail.doc_id] = str(row.fence)
            else:
                kept += 1
        gone = {doc_id for doc_id in listed.missing() if doc_id not in outside}
        return PruneCandidates(dict(sorted(outside.items())), live, kept, gone)

    def _left(self, listed: ListedIds) -> PruneCandidates:
        """Live documents that belong to this origin, which no longer has them."""
        left, kept, gone = {}, 0, set()
        for doc_id, head in self.heads(listed.missing()):
            if head and head.live and head.record and stored_in(head.record).owner == self.origin.digest:
                left[doc_id] = version_of(head)
            elif head:  # it was retracted, or it belongs to another origin or to none
                gone.add(doc_id)
                kept += head.live
        if not left:
            return PruneCandidates({}, 0, kept, gone)
        # A set: a scan may show a head twice.
        live = {(shard, source) for shard, source, head in self.fences.all_heads() if head.live}
        return PruneCandidates(dict(sorted(left.items())), len(live), kept, gone)


def check_prune(prune: object, share: object) -> None:
    if prune is not False and prune not in ("scoped", "full"):
        raise ValidationError(
            f'prune must be False, "scoped" or "full", not {prune!r}',
            hint='"scoped" retracts what this source brought and no longer has, "full" all that it does not have',
        )
    if share is None:
        return
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise ValidationError(f"max_prune_share must be from 0 to 1, not {share!r}", hint="1.0 allows any share")
