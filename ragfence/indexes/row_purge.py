"""Removes a purged document from the indexes: from sealed ones, and from those that are being built.

    builds "purged", with the digest of what stays -> its rows leave the backend -> the rows are read again

The entry comes first. If the process is killed after it, the build is not `sealed` any more and so answers no
`build()`, and the next purge of the document finds and removes its rows. Two concurrent purges may each have counted
rows that the other was about to remove, so both read again until the rows are those of the newest entry.

A running attempt may have read the document before it was removed, so an entry takes the number at which it would be
sealed: `retired`, or a copy of the seal before it, which an alias may use. This is repeated until nothing new is found,
because an attempt may have been sealed in between, and another one may have started from it. A build that begins
afterwards reads a log and indexes without the document.
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
"""in the order in which a purge reaches them, once for each index that has the document"""

ROUNDS = 20


class _PurgeScope(NamedTuple):
    rows: int
    has_document: bool


class _Remaining(NamedTuple):
    contents: ContentDigest
    """of all rows except the document's"""
    has_document: bool


class RowPurge:
    """The purge of one document from all indexes."""

    def __init__(
        self, engine: Engine, builds: BuildLog, catalog: Catalog, backend_of: Callable[[str], Backend], doc_id: str
    ) -> None:
        self._engine = engine
        self._builds = builds
        self._catalog = catalog
        self._backend_of = backend_of
        self._doc_id = doc_id
        self._clean: set[tuple[str, int]] = set()
        """seals that were checked: the hash and the number"""

    def run(self) -> None:
        for _ in range(ROUNDS):
            if not (self._remove_everywhere() + self._end_attempts()):
                return
        raise NotReady(
            "indexes are built faster than the document can be removed from them",
            hint="purge again when fewer builds are running",
        )

    def _remove_everywhere(self) -> int:
        """Removes the document from everything that was sealed and still exists. Returns the number of changes."""
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
        """Removes the document from the newest seal of a build. Returns the number of the entry that is now right."""
        touched = False
        for _ in range(ROUNDS):
            # The entry is read before the rows: a purge that appends a later one has seen what is removed here, or
            # reads again.
            entry = self._builds.newest(index_hash)
            assert entry is not None  # logs are never deleted
            if entry.seal is None:
                return entry.number  # retired meanwhile: handled among the replaced seals
            try:
                if self._step(entry, entry.seal) if touched else self._is_clean(entry, entry.seal):
                    return entry.number
            except BuildMissing:
                return entry.number  # dropped from outside: nothing is left to remove
            touched = True
        raise NotReady(
            f"the log of build {index_hash} changed {ROUNDS} times while a document was removed", hint="purge again"
        )

    def _step(self, entry: BuildEntry, seal: BuildSeal) -> bool:
        """Returns True if the rows are those of the entry, without the document. Else takes one step towards that."""
        try:
            left = self._scan_remaining(seal)
        except BuildUnverified:
            # Damaged: what stays is unknown, and `verify` reports it. The document is removed all the same.
            self._remove_unlogged(seal)
            raise
        if left.contents.digest() == seal.content_digest:
            if not left.has_document:
                return True
        elif not self._append_purged(entry, seal, left.contents):
            return False  # another process has the number, and may have removed rows that were counted here
        if left.has_document:
            crash_points.reach(AFTER_PURGED)
            self._remove(seal)
            crash_points.reach(AFTER_REMOVED)
        return False

    def _is_clean(self, entry: BuildEntry, seal: BuildSeal) -> bool:
        held = self._scan(seal)
        if held.has_document or entry.kind != PURGED:
            return not held.has_document
        # An earlier purge may have been killed when rows were not found any more but still in a file, or after another
        # purge had counted them.
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
        """Whether a replaced or retired physical index may still be in its backend."""
        if seal.physical in served:
            return True
        if seal.backend not in listed:
            try:
                listed[seal.backend] = set(self._backend_of(seal.backend).physicals())
            except RagfenceError:
                # A server that was shut down permanently must not block the removal from all others. If one is needed,
                # a seal or an alias said so above; if this one comes back, gc drops what it has.
                listed[seal.backend] = set()
        return seal.physical in listed[seal.backend]

    def _remove_unlogged(self, seal: BuildSeal) -> None:
        """Removes rows without an entry: no entry says what must be there. Also if no row is found, see above."""
        with contextlib.suppress(BuildMissing):
            self._remove(seal)

    def _remove(self, seal: BuildSeal) -> None:
        with held_lock(self._engine.fences, f"remove/{seal.physical}"):
            self._backend_of(seal.backend).remove(seal.physical, [self._doc_id])

    def _end_attempts(self) -> int:
        """Makes running attempts impossible to seal. Returns the number of changes."""
        done = 0
        for attempt in self._builds.attempts():
            history = self._builds.history(attempt.index_hash)
            if any(entry.usable and entry.token == attempt.token for entry in history):
                continue  # sealed, and handled above
            newest = history[0] if history else None
            if newest is None or newest.number < attempt.number:
                done += 1
                if not self._take_number(attempt.index_hash, newest):
                    continue  # sealed in between, or ended: the next round checks again
            # It can no longer be sealed, and its writer may be dead: its rows go now, not with the next gc.
            self._backend_of(attempt.backend).drop(attempt.physical)
        return done

    def _take_number(self, index_hash: str, newest: BuildEntry | None) -> bool:
        """Takes the number at which an attempt would be sealed. Returns False if it is taken already."""
        now_ms, owner = self._engine.fences.now_ms(), self._engine.owner
        why = "a document was purged while it was being built"
        if newest is None or not newest.usable:
            return self._builds.append(index_hash, next_retired(newest, at_ms=now_ms, owner=owner, reason=why))
        # A sealed build may be served and ends only through the catalog. So the number goes to a copy of the seal.
        after = next_repeated(newest, at_ms=now_ms, owner=owner, reason=why)
        taken = self._builds.append(index_hash, after)
        if taken and (index_hash, newest.number) in self._clean:
            self._clean.add((index_hash, after.number))
        return taken
