"""Canonical JSON without secrets, of the metadata of a million documents in a row."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ragfence.core.canonical import canonical_json, parse_json
from ragfence.core.redaction import Redaction

_quoted: Callable[[str], str] = json.encoder.encode_basestring
_KNOWN_AT_MOST = 1024

Shape = tuple[tuple[str, str], ...]
"""names in their order, each with what stands before its value"""


class CleanJson:
    """What is left of canonical JSON after `redaction.redact(...)`, as canonical JSON.

    Most metadata is flat: a few names, always the same ones, with texts and numbers in which nothing is a secret. What
    the names come to is worked out once, and such a dict is then written in one pass, in half the time.
    """

    def __init__(self, redaction: Redaction) -> None:
        self.redaction = redaction
        self._shapes: dict[tuple[Any, ...], Shape] = {}

    def write(self, given: dict[str, Any]) -> bytes:
        """Raises `NotJson`."""
        names = tuple(given)
        shape = self._shapes.get(names)
        if shape is None:
            shape = self._learnt(names)
        harmless, below, text = self.redaction.is_harmless, self.redaction.harmless_below, ""
        for name, start in shape:
            value = given[name]
            if type(value) is str and value.isascii() and harmless(value):
                text += start + _quoted(value)
            elif type(value) is int and -below < value < below:
                text += f"{start}{value}"
            else:
                break
        else:
            if text:
                return f"{text}}}".encode("ascii")
        # Written first, which refuses what is no JSON, and read again: a secret is looked for in what would be stored,
        # where names and texts are in NFC, tuples are lists, and whole numbers have no point.
        return canonical_json(self.redaction.redact(parse_json(canonical_json(given))))

    def _learnt(self, names: tuple[Any, ...]) -> Shape:
        """Empty, if one of them may be a secret itself, or make one of its value, or is no plain name."""
        shape: Shape = ()
        if all(type(name) is str and name.isascii() and self.redaction.is_harmless_name(name) for name in names):
            marks = "{" + "," * len(names)
            shape = tuple((name, f"{mark}{_quoted(name)}:") for mark, name in zip(marks, sorted(names), strict=False))
        if len(self._shapes) >= _KNOWN_AT_MOST:  # names come from callers
            self._shapes.clear()
        self._shapes[names] = shape
        return shape
