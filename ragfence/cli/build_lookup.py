"""Finds the INDEX_HASH that a person named."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ragfence.errors import NotSealed, ValidationError

if TYPE_CHECKING:
    from ragfence.fence import Fence
    from ragfence.indexes.build_log import BuildEntry

LATEST = "latest"
LEAST_DIGITS, DIGITS = 8, 64
SHOWN = 10
_HEX = re.compile(rf"[0-9a-f]{{{LEAST_DIGITS},{DIGITS}}}")


def find_build(fence: Fence, text: str) -> str:
    """The INDEX_HASH for a whole one or a unique prefix."""
    prefix = text.strip().lower()
    if not _HEX.fullmatch(prefix):
        raise ValidationError(
            f"{text!r:.100} is not an INDEX_HASH or the beginning of one",
            hint=f"give an INDEX_HASH or at least {LEAST_DIGITS} hex digits of it; `ragfence builds` lists them",
        )
    if len(prefix) == DIGITS:
        return prefix
    log = fence.indexes.builds_log
    # Unsealed attempts are included, so that the error says "not sealed" instead of "no such build".
    known = {*log.hashes(), *(attempt.index_hash for attempt in log.attempts())}
    found = sorted(index_hash for index_hash in known if index_hash.startswith(prefix))
    if not found:
        raise NotSealed(f"no build begins with {prefix}", hint="`ragfence builds` lists all builds")
    if len(found) > 1:
        shown = "".join(f"\n  {index_hash}" for index_hash in found[:SHOWN])
        raise ValidationError(f"{len(found)} builds begin with {prefix}:{shown}", hint="give more of its digits")
    return found[0]


def find_build_or_latest(fence: Fence, text: str) -> str:
    return _find_latest(fence) if text.strip().lower() == LATEST else find_build(fence, text)


def _find_latest(fence: Fence) -> str:
    """The build that was sealed last, of those that an alias may point at."""
    head = fence.aliases.head()
    sealed = [
        (sealed_at_ms(fence, build.index_hash, build.entry), build.index_hash)
        for build in fence.indexes.builds()
        if build.entry.usable and not head.state.retires(build.entry, build.index_hash)
    ]
    if not sealed:
        raise NotSealed("there is no sealed build yet", hint="`ragfence build` builds one")
    return max(sealed)[1]


def sealed_at_ms(fence: Fence, index_hash: str, entry: BuildEntry) -> int:
    """When the rows of a build were sealed. A purge or a restore adds a newer entry for the same rows."""
    if entry.number == 1 or entry.seal is None:
        return entry.at_ms
    physical, history = entry.seal.physical, fence.indexes.builds_log.history(index_hash)
    return min(each.at_ms for each in (entry, *history) if each.seal and each.seal.physical == physical)
