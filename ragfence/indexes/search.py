"""`fence.search`: the nearest snippets of the build behind an alias, each with what is needed to cite it.

The alias is resolved once per request, and the physical index that it names is searched. So a search never mixes two
builds, even if the alias is swapped meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable

from ragfence.core.aliases import Hit
from ragfence.core.canonical import parse_json
from ragfence.errors import BuildMissing, NotSealed, ValidationError
from ragfence.indexes.aliases import Aliases
from ragfence.indexes.backends.backend import Backend, FoundRow
from ragfence.indexes.build_log import BuildLog, BuildSeal
from ragfence.indexes.catalog import Target
from ragfence.indexes.embedders.embedder import Embedder, EmbedderId, embed_texts
from ragfence.indexes.ranking import find_nearest

MAX_K = 10_000
MAX_TEXT = 100_000


class Search:
    def __init__(
        self,
        aliases: Aliases,
        builds: BuildLog,
        backend_of: Callable[[str], Backend],
        embedder_of: Callable[[BuildSeal], Embedder],
    ) -> None:
        self._aliases = aliases
        self._builds = builds
        self._backend_of = backend_of
        self._embedder_of = embedder_of
        self._seals: dict[tuple[str, int], BuildSeal] = {}

    def search(self, alias: str, text: str, k: int) -> list[Hit]:
        _check(text, k)
        target = self._aliases.resolve(alias)
        try:
            return self._search(target, text, k)
        except BuildMissing as missing:
            # The alias may have moved since it was resolved, and gc may have dropped the build it left.
            now = self._aliases.resolve(alias)
            if now.physical == target.physical:
                raise self._missing(alias, target) from missing
        try:
            return self._search(now, text, k)
        except BuildMissing as missing:
            raise self._missing(alias, now) from missing

    def _search(self, target: Target, text: str, k: int) -> list[Hit]:
        seal = self._seal(target)
        embedder = self._embedder_of(seal)
        vector = embed_texts(embedder, EmbedderId.of(embedder), [text])[0]
        found = find_nearest(self._backend_of(seal.backend), seal, vector, k)
        return [_hit(each, seal.index_hash, target.generation) for each in found]

    def _missing(self, alias: str, target: Target) -> BuildMissing:
        """The error for a build whose rows are gone, with what its log says about it."""
        index_hash = target.index_hash
        newest = self._builds.newest(index_hash)
        what = f"{alias!r} points at build {index_hash}, whose rows are not in the backend"
        hint: str | None = None
        if newest is not None and newest.seal is not None and newest.seal.physical != target.physical:
            what = f"{alias!r} points at rows of build {index_hash} that are gone; it was built again since"
            hint = f"swap the alias to it again: `ragfence swap {alias} {index_hash}`"
        elif newest is not None and newest.seal is None:
            what += f": it was retired ({newest.reason or 'no reason was given'})"
        return BuildMissing(what, hint=hint, index_hash=index_hash)

    def _seal(self, target: Target) -> BuildSeal:
        """The seal of a target. Entries of a log never change, so each is read once."""
        at = (target.index_hash, target.seal)
        if at not in self._seals:
            entry = self._builds.at(*at)
            if entry is None or entry.seal is None:
                raise NotSealed(f"build {target.index_hash} has no seal {target.seal}", index_hash=target.index_hash)
            if len(self._seals) > 256:
                self._seals.clear()
            self._seals[at] = entry.seal
        return self._seals[at]


def _check(text: object, k: object) -> None:
    if not isinstance(text, str) or not text.strip() or len(text) > MAX_TEXT:
        raise ValidationError(f"text must have 1 to {MAX_TEXT:,} characters, not all of them spaces")
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= MAX_K:
        raise ValidationError(f"k must be 1 to {MAX_K:,}, not {k!r}")


def _hit(found: FoundRow, index_hash: str, generation: int) -> Hit:
    metadata = parse_json(found.metadata.encode())
    return Hit(
        found.snippet_id,
        found.doc_id,
        found.section_id,
        found.ordinal,
        found.start,
        found.end,
        found.tokens,
        found.text,
        found.source_url,
        metadata if isinstance(metadata, dict) else {},
        found.score,
        index_hash,
        generation,
    )
