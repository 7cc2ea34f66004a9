"""The documents of the attack: in groups, each of which is ingested by a call, and has a segment, of its own."""

from __future__ import annotations

from collections.abc import Sequence

from tests.chaos.sites import Site
from tests.indexes.attack.judge import opened
from tests.indexes.building import ingested, text_of

PARAGRAPHS = 3
"""of every document, and each is a snippet"""


def groups(count: int, size: int) -> list[list[str]]:
    return [[f"g{group:02d}d{at:03d}" for at in range(size)] for group in range(count)]


def prepared(site: Site, names: Sequence[Sequence[str]]) -> None:
    site.prepare()
    with opened(site) as fence:
        for group in names:
            ingested(fence, group)


def texts_of(names: Sequence[str], edition: int = 0) -> set[str]:
    return {text for name in names for text in text_of(name, edition, PARAGRAPHS).split("\n\n")}
