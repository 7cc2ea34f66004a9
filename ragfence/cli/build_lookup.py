"""From what a person typed to an INDEX_HASH."""

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


def pick(fence: Fence, text: str) -> str:
    """The build that is meant: a whole INDEX_HASH, or the only one that begins like this."""
    prefix = text.strip().lower()
    if not _HEX.fullmatch(prefix):
        raise ValidationError(
            f"{text!r:.100} is no INDEX_HASH, and no beginning of one",
            hint=f"give an INDEX_HASH or at least {LEAST_DIGITS} hex digits of it; `ragfence builds` lists them",
        )
    if len(prefix) == DIGITS:
        return prefix
    log = fence.indexes.builds_log
    # With what is not sealed yet: whoever means that one should be told so, not that there is no such build.
    known = {*log.hashes(), *(attempt.index_hash for attempt in log.attempts())}
    found = sorted(index_hash for index_hash in known if index_hash.startswith(prefix))
    if not found:
        raise NotSealed(f"no build begins with {prefix}", hint="`ragfence builds` lists those there are")
    if len(found) > 1:
        shown = "".join(f"\n  {index_hash}" for index_hash in found[:SHOWN])
        raise ValidationError(f"{len(found)} builds begin with {prefix}:{shown}", hint="give more of its digits")
    return found[0]


def pick_or_latest(fence: Fence, text: str) -> str:
    return latest(fence) if text.strip().lower() == LATEST else pick(fence, text)


def latest(fence: Fence) -> str:
    """The build that was sealed last, of those that an alias may be moved to."""
    head = fence.aliases.head()
    sealed = [
        (sealed_at_ms(fence, build.index_hash, build.entry), build.index_hash)
        for build in fence.indexes.builds()
        if build.entry.usable and not head.state.retires(build.entry, build.index_hash)
    ]
    if not sealed:
        raise NotSealed("there is no sealed build yet")
    return max(sealed)[1]


def sealed_at_ms(fence: Fence, index_hash: str, entry: BuildEntry) -> int:
    """When the rows of a build were sealed. A purge, or a restore, made a newer entry of the same rows."""
    if entry.number == 1 or entry.seal is None:
        return entry.at_ms
    physical, history = entry.seal.physical, fence.indexes.builds_log.history(index_hash)
    return min(each.at_ms for each in (entry, *history) if each.seal and each.seal.physical == physical)
