"""The report of a sync, and the tally it is made from.

Also detects documents that come again under random ids: every run would ingest and embed all of them again.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ragfence import errors
from ragfence.core.layout import METADATA_UPDATED, REVIVED, ids_in, ids_in_record
from ragfence.core.receipts import DUPLICATE, Decision, Receipt
from ragfence.core.records import Head
from ragfence.documents.identity import SNIPPET_BYTES, snippet_texts
from ragfence.documents.log import stored_in
from ragfence.documents.readers.content import SkippedFiles
from ragfence.documents.sync.ingest_table import IngestTable
from ragfence.engine.batch_commit import MovedHead
from ragfence.errors import Hint, RagfenceError

SAMPLE = 100
"""documents missing in the source that are compared"""
MOST_CONTENTS = 100_000
"""new documents whose content is remembered"""

_STABLE = "give every document an id that stays the same, such as its path, its URL or its database key"
HINT = Hint(
    f"{_STABLE} (LlamaIndex: filename_as_id=True of SimpleDirectoryReader, or doc_id= of DocumentsSource); then a "
    "scoped prune retracts the documents under the old ids",
    cli=f"{_STABLE}; then `--prune scoped` retracts the documents under the old ids",
)

_UUID4 = re.compile(r"[0-9a-f]{8}-?[0-9a-f]{4}-?4[0-9a-f]{3}-?[89ab][0-9a-f]{3}-?[0-9a-f]{12}", re.IGNORECASE)


def is_random_id(doc_id: str) -> bool:
    """Whether it is a random UUID (version 4), as frameworks generate.

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

        At least half of those: a few equal texts, such as blank forms, may come and go under ids of their own.
        """
        held = [head.record.fingerprint for head in gone if head is not None and head.live and head.record is not None]
        again = sum(fingerprint in self._contents for fingerprint in held)
        return again > 0 and 2 * again >= len(held)


MAX_NAMED = 1000
"""failures, retractions and repetitions named in a report; all are counted"""

SHOWN_EXTENSIONS = 10

_NEW, _DUPLICATE = Decision.NEW.value, Decision.DUPLICATE.value
"""constants, since an attribute lookup for every document takes time"""


@dataclass(frozen=True, slots=True)
class SyncFailure:
    """A document that was not ingested, or not retracted."""

    doc_id: str
    code: str
    message: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class SyncReport:
    """The result of a sync, or of its dry run."""

    source: str
    dry_run: bool
    listed: int
    """how many documents the source named"""
    decisions: dict[str, int]
    """new, duplicate, conflict, in_flight, stale, refused: how many; every listed document is in one of them"""
    unread: int
    """duplicates that stayed unread"""
    revived: int
    metadata_updated: int
    failed: int
    failures: tuple[SyncFailure, ...]
    """the first ones; stale documents are not failures, since there is nothing to fix"""
    pruned: int
    pruned_ids: tuple[str, ...]
    """the first ones"""
    not_pruned: str
    """why nothing was pruned although it was requested"""
    kept: int
    """documents that a prune left alone: this source does not own them, or another source has them"""
    repeated: int
    """items whose doc_id the source had listed before; refused unless they have the content of the first"""
    repeated_ids: tuple[str, ...]
    snippets_made: int
    snippets_saved: int
    """snippets that are not embedded again"""
    characters_saved: int
    """of documents that are duplicates"""
    seconds: float
    table: IngestTable | None = None
    """doc_id, content_hash, decision and snippet_ids of every document, if requested"""
    skipped: int = 0
    """files of the source that no pattern ignores but that were skipped; not included in `listed`"""
    skipped_extensions: dict[str, int] = field(default_factory=dict)
    """skipped files without a reader, by extension, the most frequent first"""
    skipped_special: int = 0
    """skipped links that are not followed, pipes, sockets and devices"""
    random_ids: int = 0
    """new documents with ids that look random, if their texts are live under other random ids that the source no longer
    names: every run ingests them again; 0 if none were detected"""
    random_ids_hint: str = ""
    """what to do about random ids"""

    @property
    def ok(self) -> bool:
        return not self.failed and not self.not_pruned


@dataclass(slots=True)
class SyncTally:
    listed: int = 0
    decisions: Counter[str] = field(default_factory=Counter)
    unread: int = 0
    revived: int = 0
    metadata_updated: int = 0
    failed: int = 0
    failures: list[SyncFailure] = field(default_factory=list)
    pruned: int = 0
    pruned_ids: list[str] = field(default_factory=list)
    not_pruned: str = ""
    kept: int = 0
    repeated: int = 0
    repeated_ids: list[str] = field(default_factory=list)
    snippets_made: int = 0
    snippets_saved: int = 0
    characters_saved: int = 0
    table: IngestTable | None = None
    skipped: SkippedFiles = field(default_factory=SkippedFiles)
    random_ids: int = 0

    def live(self, snippets: int, characters: int) -> None:
        """Counts a document that is unchanged."""
        self.decisions[_DUPLICATE] += 1
        self.snippets_saved += snippets
        self.characters_saved += characters

    def moved(self, answer: MovedHead, characters: int, before: Head | None) -> None:
        """Counts a moved head. Snippets that the replaced head, `before`, also has are not embedded again."""
        ids = ids_in(answer.record.result)
        if answer.again:
            self.revived += bool(answer.flags & REVIVED)
            self.metadata_updated += bool(answer.flags & METADATA_UPDATED)
            self.live(len(ids) // SNIPPET_BYTES, characters)
        else:
            self._new(len(ids) // SNIPPET_BYTES, _in_both(before, snippet_texts(ids)) if before else 0)

    def answered(self, receipt: Receipt, characters: int, before: Head | None) -> None:
        """Counts a duplicate, or a document that would be moved."""
        flags, ids = receipt.flags, receipt.snippet_ids
        self.revived += flags.revived
        self.metadata_updated += flags.metadata_updated
        if receipt.decision is DUPLICATE:
            self.live(len(ids), characters)
        else:
            self._new(len(ids), _in_both(before, ids) if before else 0)

    def _new(self, snippets: int, kept: int) -> None:
        self.decisions[_NEW] += 1
        self.snippets_made += snippets - kept
        self.snippets_saved += kept

    def refused(self, failure: SyncFailure) -> None:
        self.failed += 1
        if len(self.failures) < MAX_NAMED:
            self.failures.append(failure)

    def repeat(self, doc_id: str) -> None:
        self.repeated += 1
        if len(self.repeated_ids) < MAX_NAMED and doc_id not in self.repeated_ids:
            self.repeated_ids.append(doc_id)

    def retracted(self, doc_id: str) -> None:
        self.pruned += 1
        if len(self.pruned_ids) < MAX_NAMED:
            self.pruned_ids.append(doc_id)

    def report(self, source: str, dry_run: bool, seconds: float) -> SyncReport:
        return SyncReport(
            source=source,
            dry_run=dry_run,
            listed=self.listed,
            decisions={decision.value: self.decisions[decision.value] for decision in Decision},
            unread=self.unread,
            revived=self.revived,
            metadata_updated=self.metadata_updated,
            failed=self.failed,
            failures=tuple(self.failures),
            pruned=self.pruned,
            pruned_ids=tuple(self.pruned_ids),
            not_pruned=self.not_pruned,
            kept=self.kept,
            repeated=self.repeated,
            repeated_ids=tuple(self.repeated_ids),
            snippets_made=self.snippets_made,
            snippets_saved=self.snippets_saved,
            characters_saved=self.characters_saved,
            seconds=seconds,
            table=self.table,
            skipped=self.skipped.total,
            skipped_extensions=dict(self.skipped.extensions.most_common()),
            skipped_special=self.skipped.special,
            random_ids=self.random_ids,
            random_ids_hint=HINT if self.random_ids else "",
        )


def describe_random_ids(count: int) -> str:
    documents = "1 new document has an id that looks" if count == 1 else f"{count:,} new documents have ids that look"
    return f"{documents} random, and the same texts are live under other random ids: every run ingests them again"


def describe_skipped(report: SyncReport) -> str:
    """Describes the skipped files, such as `3 files without a reader (2 .pdf, 1 .png)`."""
    parts = []
    if files := report.skipped - report.skipped_special:
        most = [f"{count:,} {extension}" for extension, count in report.skipped_extensions.items()]
        rest = " ..." if len(most) > SHOWN_EXTENSIONS else ""
        shown = ", ".join(most[:SHOWN_EXTENSIONS]) + rest
        parts.append(f"{files:,} {'file' if files == 1 else 'files'} without a reader ({shown})")
    if special := report.skipped_special:
        parts.append(f"{special:,} {'link or special file' if special == 1 else 'links and special files'}")
    return " and ".join(parts)


def _in_both(before: Head, snippet_ids: Sequence[str]) -> int:
    """How many of these snippets a live head has."""
    if not before.live or before.record is None:
        return 0
    return len(frozenset(snippet_texts(stored_in(before.record).ids)).intersection(snippet_ids))


def failure_of(doc_id: str, receipt: Receipt) -> SyncFailure:
    """The entry of a document whose receipt is a failure."""
    failure = receipt.failure or {}
    kind = getattr(errors, failure["type"], None)
    hint = kind.default_hint if isinstance(kind, type) and issubclass(kind, RagfenceError) else ""
    return SyncFailure(doc_id, failure["code"], failure["message"], hint)


def ids_of_record(record: bytes) -> bytes:
    """The concatenated snippet_ids in the encoded record of a live document."""
    return ids_in_record(record)
