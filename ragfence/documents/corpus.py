"""The corpus digest: one value for all live documents, their descriptions and recipes. Equal digests, equal corpora.

Per shard a digest over its sorted heads, kept as long as the shard's version stands: what it costs grows with what
changed. Heads are read between two equal versions, so a digest is never of a moment that did not exist.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

from ragfence.core.hashing import SHARDS, digest
from ragfence.core.records import Head
from ragfence.engine.hydration import Hydrator
from ragfence.errors import InFlight
from ragfence.stores.fences import FenceStore

ATTEMPTS = 20
FEW = 4
"""as many shards are read one by one; for more, one pass over all costs less"""

Version = tuple[int, int]


class Corpus:
    def __init__(self, fences: FenceStore, hydrator: Hydrator) -> None:
        self._fences = fences
        self._hydrator = hydrator
        self._lock = threading.Lock()
        self._known: dict[int, tuple[Version, bytes]] = {}

    def digest(self) -> str:
        """Changes if, and only if, a live document comes, goes, or changes its content, description or recipe."""
        for _ in range(ATTEMPTS):
            before = self._versions()
            made = self._digests(before)
            if self._fences.versions() == before:
                # Kept only now: what was read while something moved is of no version at all.
                with self._lock:
                    self._known |= {shard: (before[shard], made[shard]) for shard in range(SHARDS)}
                return f"sha256:{digest('ragfence/corpus/1', *made).hex()}"
        raise InFlight(
            "the corpus changes faster than it can be read",
            hint="try again when fewer documents are being ingested",
        )

    def _versions(self) -> list[Version]:
        while True:
            found = self._fences.versions()
            ready = [version for version in found if version is not None]
            if len(ready) == SHARDS:
                return ready
            self._hydrator.ensure_ready()

    def _digests(self, versions: list[Version]) -> list[bytes]:
        with self._lock:
            known = dict(self._known)
        made = [known[at][1] if at in known and known[at][0] == version else b"" for at, version in enumerate(versions)]
        changed = [shard for shard in range(SHARDS) if not made[shard]]
        # A set: a scan may show a head twice. The digest of the head's key covers doc_id, content_hash and recipe.
        heads: dict[int, set[bytes]] = {shard: set() for shard in changed}
        for shard, source, head in self._heads(changed):
            if head.live and shard in heads:
                heads[shard].add(source + head.digest + head.metadata_hash)
        for shard in changed:
            made[shard] = digest("ragfence/corpus-shard/1", *sorted(heads[shard]))
        return made

    def _heads(self, shards: list[int]) -> Iterator[tuple[int, bytes, Head]]:
        if len(shards) > FEW:
            yield from self._fences.all_heads()
            return
        for shard in shards:
            for source, head in self._fences.heads(shard):
                yield shard, source, head
