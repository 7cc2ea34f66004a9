"""What happens to vectors and indexes when documents are compacted, purged or verified.

A purged document leaves them too.

Vectors: the log is rewritten without the document, and its vectors with it; what stays is copied, the old objects go.

Indexes: its rows are taken out of every physical index, and the build's log gets a `purged` entry with the digest of
what is left. An attempt under way may have read the document before it was gone: a `retired` entry takes the number it
would be sealed at. That is gone through until nothing new is found, since an attempt may have been sealed in between,
and another may have started from it. Whoever begins after that reads a log and indexes that do not have the document.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ragfence.documents.findings import Finding, Trouble
from ragfence.documents.rewriting import Switch
from ragfence.documents.segments import Layout
from ragfence.engine.engine import Engine
from ragfence.errors import BuildMissing, BuildUnverified, NotReady
from ragfence.indexes.backends.protocol import Backend
from ragfence.indexes.builds import BuildEntry, Builds, purged, retired
from ragfence.indexes.catalog import Catalog
from ragfence.indexes.contents import Contents
from ragfence.indexes.spec import shape_in
from ragfence.indexes.vectors import VectorCopier
from ragfence.stores.objects import ObjectStore

ROUNDS = 20


class BesideDocuments:
    """What indexes do when documents are compacted or purged."""

    def __init__(
        self, engine: Engine, objects: ObjectStore, builds: Builds, layout: Layout, backend_of: Callable[[str], Backend]
    ) -> None:
        self._engine = engine
        self._builds = builds
        self._copier = VectorCopier(objects, layout)
        self._catalog = Catalog(engine.tenant, objects)
        self._backend_of = backend_of

    def copy(self, switch: Switch) -> None:
        self._copier.copy(switch)

    def findings(self) -> Iterator[Finding]:
        """Of the indexes that aliases point at: is what their seals say still there?"""
        aliases = self._catalog.head().state.aliases
        for index_hash in sorted({held.target.index_hash for held in aliases.values()}):
            names = ", ".join(name for name, held in aliases.items() if held.target.index_hash == index_hash)
            entry = self._builds.newest(index_hash)
            seal = entry.seal if entry else None
            if seal is None:
                yield Finding(Trouble.INDEX_MISSING, f"{names} points at a build that is not sealed", place=index_hash)
                continue
            try:
                contents = Contents(shape_in(seal.inputs))
                for table in self._backend_of(seal.backend).read(seal.physical):
                    contents.add(table)
            except BuildMissing:
                yield Finding(Trouble.INDEX_MISSING, f"the rows behind {names} are gone", place=seal.physical)
                continue
            except BuildUnverified as wrong:
                yield Finding(Trouble.INDEX_DIFFERS, f"behind {names}: {wrong.message}", place=seal.physical)
                continue
            if contents.digest() != seal.content_digest:
                what = f"behind {names} are {contents.rows:,} rows that are not the {seal.rows:,} that were sealed"
                yield Finding(Trouble.INDEX_DIFFERS, what, place=seal.physical)

    def forget(self, doc_id: str) -> None:
        clean: set[tuple[str, int]] = set()
        for _ in range(ROUNDS):
            if not (self._taken_out(doc_id, clean) + self._fenced(clean)):
                return
        raise NotReady(
            "indexes are being built faster than the document can be taken out of them",
            hint="purge again when fewer builds are under way",
        )

    def _taken_out(self, doc_id: str, clean: set[tuple[str, int]]) -> int:
        done = 0
        for index_hash in self._builds.hashes():
            entry = self._builds.newest(index_hash)
            if entry is None or entry.seal is None or (index_hash, entry.number) in clean:
                continue
            done += 1
            after = self._without(doc_id, entry)
            clean.add((index_hash, (after or entry).number))
        return done

    def _without(self, doc_id: str, entry: BuildEntry) -> BuildEntry | None:
        """The entry of the build without the document; None if it does not have it."""
        seal = entry.seal
        assert seal is not None
        backend = self._backend_of(seal.backend)
        try:
            if not any(
                doc_id in table.column("doc_id").to_pylist() for table in backend.read(seal.physical, ["doc_id"])
            ):
                return None
            backend.remove(seal.physical, [doc_id])
            contents = Contents(shape_in(seal.inputs))
            for table in backend.read(seal.physical):
                contents.add(table)
        except BuildMissing:
            return None  # dropped behind our back: nothing is left to be removed
        after = purged(
            entry,
            rows=contents.rows,
            documents=seal.documents - 1,
            content_digest=contents.digest(),
            at_ms=self._engine.fences.now_ms(),
            owner=self._engine.owner,
        )
        if not self._builds.append(seal.index_hash, after):
            raise NotReady(
                f"the log of build {seal.index_hash} changed while a document was taken out", hint="purge again"
            )
        return after

    def _fenced(self, clean: set[tuple[str, int]]) -> int:
        """Attempts that could still be sealed cannot any more."""
        done = 0
        for attempt in self._builds.attempts():
            history = self._builds.history(attempt.index_hash)
            if any(entry.usable and entry.token == attempt.token for entry in history):
                continue  # sealed, and looked at
            newest = history[0] if history else None
            if newest is None or newest.number < attempt.number:
                now_ms, owner = self._engine.fences.now_ms(), self._engine.owner
                why = "a document was purged while it was being built"
                done += 1
                if not self._builds.append(attempt.index_hash, retired(newest, at_ms=now_ms, owner=owner, reason=why)):
                    continue  # sealed in between, or ended: the next round looks again
            # Nobody can seal it any more, and whoever wrote it may be dead: its rows go now, not with the next gc.
            self._backend_of(attempt.backend).drop(attempt.physical)
        return done
