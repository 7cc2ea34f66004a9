"""The corpus digest: one value for all live documents, their descriptions and recipes. Equal digests, equal corpora.

Each shard has a digest of its sorted heads, which is kept until the version of the shard changes: the cost grows with
what changed. Heads are read between two equal versions, so a digest always describes one moment.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from ragfence.core.hashing import SHARDS, digest
from ragfence.core.records import Head
from ragfence.engine.hydration import TenantStores
from ragfence.errors import InFlight, ValidationError

ATTEMPTS = 20
FEW = 4
"""up to this many shards are read one by one; for more, one pass over all of them is cheaper"""

Version = tuple[int, int]
LiveHead = tuple[int, bytes, Head]
"""shard, source and live head"""


class Corpus:
    def __init__(self, stores: TenantStores) -> None:
        self._fences = stores.fences
        self._hydrator = stores.hydrator
        self._lock = threading.Lock()
        self._known: dict[int, tuple[Version, bytes]] = {}

    def digest(self) -> str:
        """Returns the digest of all live documents.

        It changes if, and only if, one comes, goes, or changes its content, description or recipe.
        """
        for _ in range(ATTEMPTS):
            before = self._versions()
            made = self._digests(before)
            if self._fences.versions() == before:
                # Stored only now: what was read while something moved belongs to no version.
                self.remember(before, made)
                return digest_of_shards(made)
        raise _too_fast()

    def digest_of(self, shard: int) -> str:
        """Returns the digest of the live documents of one shard."""
        if not 0 <= shard < SHARDS:
            raise ValidationError(f"shards are 0 to {SHARDS - 1}, not {shard!r}")
        for _ in range(ATTEMPTS):
            self.digest()
            if made := self.known_at(self._versions()):
                return f"sha256:{made[shard].hex()}"
        raise _too_fast()

    def live(self) -> tuple[str, list[LiveHead]]:
        """Returns the digest, and the heads that it covers."""
        for _ in range(ATTEMPTS):
            before = self._versions()
            # A dictionary: a scan may show a head twice.
            heads = {(shard, source): head for shard, source, head in self._fences.all_heads() if head.live}
            if self._fences.versions() == before:
                shown = [(shard, source, head) for (shard, source), head in heads.items()]
                made = shard_digests(
                    (shard, source + head.digest + head.metadata_hash) for shard, source, head in shown
                )
                self.remember(before, made)
                return digest_of_shards(made), shown
        raise _too_fast()

    def versions(self) -> list[Version]:
        """Returns the version of every shard, for which a digest is valid."""
        return self._versions()

    def known_at(self, versions: Sequence[Version]) -> list[bytes] | None:
        """Returns the digests of the shards at these versions, or None unless all are known."""
        with self._lock:
            found = [self._known.get(shard) for shard in range(SHARDS)]
        made = [each[1] for each, version in zip(found, versions, strict=True) if each and each[0] == version]
        return made if len(made) == SHARDS else None

    def remember(self, versions: Sequence[Version], made: Sequence[bytes]) -> None:
        with self._lock:
            self._known |= {shard: (versions[shard], made[shard]) for shard in range(SHARDS)}

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
        for shard, mark in self._marks(changed):
            if shard in heads:
                heads[shard].add(mark)
        for shard in changed:
            made[shard] = _shard_digest(heads[shard])
        return made

    def _marks(self, shards: list[int]) -> Iterator[tuple[int, bytes]]:
        if len(shards) > FEW:
            return self._fences.marks()
        return chain.from_iterable(self._fences.marks(shard) for shard in shards)


def digest_of_shards(made: Sequence[bytes]) -> str:
    return f"sha256:{digest('ragfence/corpus/1', *made).hex()}"


def shard_digests(heads: Iterable[tuple[int, bytes]]) -> list[bytes]:
    """Digests of (shard, source + digest of the key + metadata hash), one tuple for each live document."""
    held: dict[int, set[bytes]] = {shard: set() for shard in range(SHARDS)}
    for shard, head in heads:
        held[shard].add(head)
    return [_shard_digest(held[shard]) for shard in range(SHARDS)]


def _shard_digest(heads: set[bytes]) -> bytes:
    return digest("ragfence/corpus-shard/1", *sorted(heads))


def _too_fast() -> InFlight:
    return InFlight(
        "the corpus changes faster than it can be read",
        hint="try again when fewer documents are being ingested",
    )
