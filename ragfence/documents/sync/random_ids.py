"""Notices documents that come again under ids that were made up: each run would ingest and embed all of them anew."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ragfence.core.records import Head
from ragfence.errors import Hint

SAMPLE = 100
"""so many of the documents that the source no longer has are compared"""
MOST_CONTENTS = 100_000
"""of so many new documents the content is remembered"""

_STABLE = "give every document an id that stays the same, such as its path, its URL or its database key"
HINT = Hint(
    f"{_STABLE} (LlamaIndex: filename_as_id=True of SimpleDirectoryReader, or doc_id= of DocumentsSource); then a "
    "scoped prune retracts the documents under the old ids",
    cli=f"{_STABLE}; then `--prune scoped` retracts the documents under the old ids",
)

_UUID4 = re.compile(r"[0-9a-f]{8}-?[0-9a-f]{4}-?4[0-9a-f]{3}-?[89ab][0-9a-f]{3}-?[0-9a-f]{12}", re.IGNORECASE)


def is_random_id(doc_id: str) -> bool:
    """Whether it is a random UUID (version 4), as frameworks make up.

    >>> is_random_id("be3a10bc-3c76-4cf9-8d06-e185a94375d3"), is_random_id("handbook/leave.md")
    (True, False)
    """
    return len(doc_id) in (32, 36) and _UUID4.fullmatch(doc_id) is not None


class RandomIds:
    """The new documents of one run whose ids look random."""

    def __init__(self) -> None:
        self.count = 0
        self._contents: set[bytes] = set()

    def add(self, doc_id: str, fingerprint: bytes) -> None:
        if is_random_id(doc_id):
            self.count += 1
            if len(self._contents) < MOST_CONTENTS:
                self._contents.add(fingerprint)

    def replace(self, gone: Iterable[Head | None]) -> bool:
        """Whether they have the contents of documents whose random ids the source no longer names.

        At least half of these: a few equal texts, such as blank forms, may come and go under ids that are given.
        """
        held = [head.record.fingerprint for head in gone if head is not None and head.live and head.record is not None]
        again = sum(fingerprint in self._contents for fingerprint in held)
        return again > 0 and 2 * again >= len(held)
