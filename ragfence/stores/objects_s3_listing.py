"""Listings in byte order, out of the pages of servers that may sort otherwise.

S3 sorts whole names. A server that keeps folders inside (SeaweedFS) sorts level by level: folder `a` with all
it holds, then `a-b`, although `a-b` < `a/`; and a StartAfter of `a` skips the folder `a`. `flat` takes the
server's word and needs a request per page; `walk` is right on both kinds and needs a request per folder.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from ragfence.stores.objects import Entry

PAGE = 1000


@dataclass(frozen=True, slots=True)
class Page:
    """`folders` are names without a trailing slash; a page has some only if it was asked for one level."""

    entries: list[Entry]
    folders: list[str]


class Pages(Protocol):
    def __call__(self, prefix: str, *, start_after: str, page_size: int, one_level: bool) -> Iterator[Page]: ...


def flat(pages: Pages, prefix: str, start_after: str, limit: int | None) -> Iterator[Entry]:
    page_size = PAGE if limit is None else min(limit, PAGE)
    for page in pages(prefix, start_after=start_after, page_size=page_size, one_level=False):
        yield from page.entries


def walk(pages: Pages, prefix: str, start_after: str, limit: int | None) -> Iterator[Entry]:
    base = prefix[: prefix.rfind("/") + 1]
    if start_after > base and not start_after.startswith(base):
        return
    # A folder belongs where its contents do, at "a/": it is held back until a bare name above that comes by.
    held: list[str] = []
    page_size = PAGE if limit is None else min(limit + 16, PAGE)
    for page in pages(prefix, start_after=_before(base, start_after), page_size=page_size, one_level=True):
        level: list[tuple[str, Entry | None]] = [(entry.name, entry) for entry in page.entries]
        level += [(folder, None) for folder in page.folders]
        for name, entry in sorted(level, key=lambda pair: pair[0]):
            while held and held[0] < name:
                yield from _descend(pages, heapq.heappop(held), start_after, limit)
            if entry is None:
                heapq.heappush(held, f"{name}/")
            elif name > start_after:
                yield entry
    while held:
        yield from _descend(pages, heapq.heappop(held), start_after, limit)


def _descend(pages: Pages, folder: str, start_after: str, limit: int | None) -> Iterator[Entry]:
    if folder > start_after or start_after.startswith(folder):
        yield from walk(pages, folder, start_after, limit)


def _before(base: str, start_after: str) -> str:
    """A StartAfter for one level that skips nothing above `start_after`, whichever way the server sorts.

    Where bare names are sorted, folder `a` comes before `a-b`, though `a/x` is above it: so start below the
    first folder that could hold such a name. That also keeps the folder which `start_after` itself is in.
    """
    if not start_after.startswith(base):
        return ""  # it is below all of this level
    first = start_after[len(base) :].partition("/")[0]
    end = next((at for at in range(1, len(first)) if first[at] < "/"), len(first))
    return base + first[: end - 1] if end > 1 else ""
