"""NFC as the standard library has it, without its quadratic time."""

from __future__ import annotations

import random
import sys
import unicodedata
from itertools import pairwise
from typing import Any

import pytest

from ragfence.core import normalization
from ragfence.core.document import normalised
from ragfence.core.normalization import SHORT, nfc

ABOVE, BELOW = "\u0315", "\u0323"


def test_marks_in_the_wrong_order_are_sorted_before_the_standard_library_sees_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []
    normalize = unicodedata.normalize

    def spy(form: Any, text: str) -> str:
        seen.append(text)
        return normalize(form, text)

    text = "a" + ABOVE * 2000 + BELOW * 2000
    monkeypatch.setattr(unicodedata, "normalize", spy)
    assert normalised(text) == "ạ" + BELOW * 1999 + ABOVE * 2000
    for each in seen:
        wrong = sum(unicodedata.combining(a) > unicodedata.combining(b) > 0 for a, b in pairwise(each))
        assert len(each) <= SHORT or not wrong


@pytest.mark.parametrize("piece", [3, 16 << 10])
def test_every_text_is_as_the_standard_library_has_it(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(normalization, "PIECE", piece)
    dice = random.Random(piece)
    characters = [
        chr(at)
        for at in range(sys.maxunicode + 1)
        if unicodedata.combining(chr(at)) or unicodedata.normalize("NFD", chr(at)) != chr(at)
    ]
    characters += [chr(at) for at in range(0x1100, 0x1200)] * 3
    marks = [each for each in characters if unicodedata.combining(each)]
    for _ in range(1000):
        text = "".join(dice.choices(characters, k=80)) + "".join(dice.choices(marks, k=dice.randrange(3 * SHORT)))
        assert nfc(text) == unicodedata.normalize("NFC", text)
