"""A purged document leaves the indexes: those that are sealed, and those that are being built.

    builds "purged", with the digest of what stays -> its rows leave the backend -> what is there is read again

The entry comes first. Whoever is killed after it leaves a build that answers no `build()`, since it is not `sealed` any
more, and rows that the next purge of the document finds and removes. Two purges at once may each have counted rows that
the other was about to remove: so both look again, until what is there is what the newest entry says.

An attempt under way may have read the document before it was gone: an entry takes the number it would be sealed at,
`retired`, or the seal before it once more, which an alias may use. All is gone through until nothing new is found,
since an attempt may have been sealed in between, and another may have started from it. Whoever begins after that reads
a log and indexes that do not have the document.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NamedTuple

from ragfence.engine import crash_points
from ragfence.engine.engine import Engine
from ragfence.engine.lock import held_lock
from ragfence.errors import BuildMissing, BuildUnverified, NotReady, RagfenceError
from ragfence.indexes.backends.backend import Backend
from ragfence.indexes.build_log import (
    PURGED,
    BuildEntry,
    BuildLog,
    BuildSeal,
    next_purged,
    next_repeated,
    next_retired,
    replaced_seals,
)
from ragfence.indexes.catalog import Catalog
from ragfence.indexes.content_digest import ContentDigest
from ragfence.indexes.spec import shape_in

AFTER_PURGED = "after_purged"
AFTER_REMOVED = "after_removed"
ROW_PURGE_POINTS = (AFTER_PURGED, AFTER_REMOVED)
"""In the order in which a purge comes by them, once for each index that has the document."""

ROUNDS = 20


class _PurgeScope(NamedTuple):
    rows: int
    has_document: bool


class _Remaining(NamedTuple):
    contents: ContentDigest
    """of all rows but the document's"""
    has_document: bool


class RowPurge:
    """One purge of one document from all indexes."""

    def __init__(
        self, engine: Engine, builds: BuildLog, catalog: Catalog, backend_of: Callable[[str], Backend], doc_id: str
    ) -> None:
        self._engine = engine
        self._builds = builds
        self._catalog = catalog
        self._backend_of = backend_of
        self._doc_id = doc_id
        self._clean: set[tuple[str, int]] = set()
        """seals that were looked at: the hash, and the number"""

    def run(self) -> None:
        for _ in range(ROUNDS):
            if not (self._remove_everywhere() + self._end_attempts()):
                return
        raise NotReady(
            "indexes are being built faster than the document can be taken out of them",
            hint="purge again when fewer builds are under way",
        )

    def _remove_everywhere(self) -> int:
        """Out of everything that was ever sealed and is still there."""
        served = {alias.target.physical for alias in self._catalog.head().state.aliases.values()}
        listed: dict[str, set[str]] = {}
        done = 0
        for index_hash in self._builds.hashes():
            history = self._builds.history(index_hash)
            if history and history[0].seal and (index_hash, history[0].number) not in self._clean:
                done += 1
                self._clean.add((index_hash, self._remove_from_build(index_hash)))
            for number, seal in ((entry.number, entry.seal) for entry in replaced_seals(history)):
                if seal and (index_hash, number) not in self._clean and self._may_exist(seal, served, listed):
                    done += 1
                    self._remove_unlogged(seal)
                    self._clean.add((index_hash, number))
        return done

    def _remove_from_build(self, index_hash: str) -> int:
        """Takes the document out of the newest seal of a build; the number of the entry that says what is there."""
        touched = False
        for _ in range(ROUNDS):
            # The entry is read before the rows: who appends a later one has seen what is removed here, or looks again.
            entry = self._builds.newest(index_hash)
            assert entry is not None  # there is a log, and nothing of it is deleted
            if entry.seal is None:
                return entry.number  # retired meanwhile: it is looked at among what was replaced
            try:
                if self._step(entry, entry.seal) if touched else self._is_clean(entry, entry.seal):
                    return entry.number
            except BuildMissing:
                return entry.number  # dropped behind our back: nothing is left to be removed
            touched = True
        raise NotReady(
            f"the log of build {index_hash} changed {ROUNDS} times while a document was taken out", hint="purge again"
        )

    def _step(self, entry: BuildEntry, seal: BuildSeal) -> bool:
        """True: all that is there is what the entry says, and the document is not. Else it comes nearer to that."""
        try:
            left = self._scan_remaining(seal)
        except BuildUnverified:
            # Damaged: nothing can be said of what stays, and `verify` tells of it. The document leaves all the same.
            self._remove_unlogged(seal)
            raise
        if left.contents.digest() == seal.content_digest:
            if not left.has_document:
                return True
        elif not self._append_purged(entry, seal, left.contents):
            return False  # somebody else has the number, and may have removed rows that were counted here
        if left.has_document:
            crash_points.reach(AFTER_PURGED)
            self._remove(seal)
            crash_points.reach(AFTER_REMOVED)
        return False

    def _is_clean(self, entry: BuildEntry, seal: BuildSeal) -> bool:
        held = self._scan(seal)
        if held.has_document or entry.kind != PURGED:
            return not held.has_document
        # A purge was here, and may have been killed: when rows were found no more, but still in a file, or when another
        # one had counted them.
        self._remove(seal)
        return held.rows == seal.rows

    def _scan(self, seal: BuildSeal) -> _PurgeScope:
        rows, has_document = 0, False
        for table in self._backend_of(seal.backend).read(seal.physical, ["doc_id"]):
            rows += table.num_rows
            has_document = has_document or self._doc_id in table.column("doc_id").to_pylist()
        return _PurgeScope(rows, has_document)

    def _scan_remaining(self, seal: BuildSeal) -> _Remaining:
        import pyarrow.compute as pc

        contents, has_document = ContentDigest(shape_in(seal.inputs)), False
        for table in self._backend_of(seal.backend).read(seal.physical):
            stays = table.filter(pc.not_equal(table.column("doc_id"), self._doc_id))
            contents.add(stays)
            has_document = has_document or stays.num_rows < table.num_rows
        return _Remaining(contents, has_document)

    def _append_purged(self, entry: BuildEntry, seal: BuildSeal, left: ContentDigest) -> bool:
        after = next_purged(
            entry,
            rows=left.rows,
            documents=left.documents,
            content_digest=left.digest(),
            at_ms=self._engine.fences.now_ms(),
            owner=self._engine.owner,
        )
        return self._builds.append(seal.index_hash, after)

    def _may_exist(self, seal: BuildSeal, served: set[str], listed: dict[str, set[str]]) -> bool:
        """Whether a physical index that was replaced, or retired, may be in its backend."""
        if seal.physical in served:
            return True
        if seal.backend not in listed:
            try:
                listed[seal.backend] = set(self._backend_of(seal.backend).physicals())
            except RagfenceError:
                # A server that was given up for good must not keep the document from leaving all the others. Where one
                # is needed, a seal or an alias says so above; if this one comes back, gc drops what it has.
                listed[seal.backend] = set()
        return seal.physical in listed[seal.backend]

    def _remove_unlogged(self, seal: BuildSeal) -> None:
        """Without an entry: nothing says what has to be there. Also when no row is found, as above."""
        with contextlib.suppress(BuildMissing):
            self._remove(seal)

    def _remove(self, seal: BuildSeal) -> None:
        with held_lock(self._engine.fences, f"remove/{seal.physical}"):
            self._backend_of(seal.backend).remove(seal.physical, [self._doc_id])

    def _end_attempts(self) -> int:
        """Attempts that could still be sealed cannot any more."""
        done = 0
        for attempt in self._builds.attempts():
            history = self._builds.history(attempt.index_hash)
            if any(entry.usable and entry.token == attempt.token for entry in history):
                continue  # sealed, and looked at
            newest = history[0] if history else None
            if newest is None or newest.number < attempt.number:
                done += 1
                if not self._take_number(attempt.index_hash, newest):
                    continue  # sealed in between, or ended: the next round looks again
            # Nobody can seal it any more, and whoever wrote it may be dead: its rows go now, not with the next gc.
            self._backend_of(attempt.backend).drop(attempt.physical)
        return done

    def _take_number(self, index_hash: str, newest: BuildEntry | None) -> bool:
        """Whether the number is ours that an attempt would have been sealed at."""
        now_ms, owner = self._engine.fences.now_ms(), self._engine.owner
        why = "a document was purged while it was being built"
        if newest is None or not newest.usable:
            return self._builds.append(index_hash, next_retired(newest, at_ms=now_ms, owner=owner, reason=why))
        # What was sealed may be served: it ends through the catalog alone. So the number goes to the same seal again.
        after = next_repeated(newest, at_ms=now_ms, owner=owner, reason=why)
        taken = self._builds.append(index_hash, after)
        if taken and (index_hash, newest.number) in self._clean:
            self._clean.add((index_hash, after.number))
        return taken
