"""The documents that every contender gets: the same text, id and metadata, out of a seed. Needs nothing but Python."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

CHARACTERS = 1_000
_SEED = 20_240_229
_ALPHABET = "abcdefghijklmnopqrstuvwxyz"


class Text(NamedTuple):
    doc_id: str
    text: str

    @property
    def metadata(self) -> dict[str, str]:
        return {"source": self.doc_id}


def corpus(name: str, count: int, *, characters: int = CHARACTERS) -> Iterator[Text]:
    """`count` documents that are found under no other name, made one by one."""
    dice, words = random.Random(f"{_SEED} {name}"), _words()
    # A page of words, cut anew for every document: as varied as drawing each word, and a hundred times faster.
    page = " ".join(dice.choices(words, k=20_000))
    last = len(page) - characters
    for number in range(count):
        doc_id = f"{name}/{number:07d}.txt"
        start = dice.randrange(last)
        yield Text(doc_id, f"{doc_id} {page[start : start + characters - len(doc_id) - 1]}")


def _words() -> list[str]:
    dice = random.Random(_SEED)
    return ["".join(dice.choices(_ALPHABET, k=dice.randint(2, 10))) for _ in range(2_000)]
