"""The findings of `verify`, and what to do about each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ragfence.errors import Hint


class Trouble(StrEnum):
    HEAD_MISSING = "head_missing"
    HEAD_DIFFERS = "head_differs"
    HEAD_WITHOUT_ROW = "head_without_row"
    RECEIPT_MISSING = "receipt_missing"
    UNSETTLED = "unsettled"
    SNIPPETS_MISSING = "snippets_missing"
    POSITIONS_MISFIT = "positions_misfit"
    ROWS_UNREADABLE = "rows_unreadable"
    SNIPPETS_UNREADABLE = "snippets_unreadable"
    TOO_NEW = "too_new"
    VOID = "void"
    SETTINGS = "settings"
    SINK_MISSING = "sink_missing"
    SINK_ORPHAN = "sink_orphan"
    INDEX_MISSING = "index_missing"
    INDEX_DIFFERS = "index_differs"


IN_THE_FENCE_STORE = frozenset(
    {
        Trouble.HEAD_MISSING,
        Trouble.HEAD_DIFFERS,
        Trouble.HEAD_WITHOUT_ROW,
        Trouble.RECEIPT_MISSING,
        Trouble.UNSETTLED,
    }
)
LOST = frozenset({Trouble.SNIPPETS_MISSING, Trouble.POSITIONS_MISFIT})
BEYOND_REPAIR = frozenset({Trouble.ROWS_UNREADABLE, Trouble.TOO_NEW})
IN_THE_SINK = frozenset({Trouble.SINK_MISSING, Trouble.SINK_ORPHAN})
HARMLESS = frozenset({Trouble.VOID, Trouble.UNSETTLED})
"""Left behind by any crash or race; needs no repair."""

_RELOAD = "`ragfence verify --repair` or `ragfence hydrate` reloads the fence store"
_RELEASE = "`ragfence verify --repair` releases it; then ingest the document again, it gets the same snippet_ids"
_SETTLE = Hint(
    "`fence.documents.using(sink=...).settle(full=True)`, or its `verify(repair=True)`, repairs the sink",
    cli="settle the sink in the program that writes to it (docs/sinks.md)",
)
TO_DO = {
    Trouble.HEAD_MISSING: _RELOAD,
    Trouble.HEAD_DIFFERS: _RELOAD,
    Trouble.HEAD_WITHOUT_ROW: f"{_RELOAD}; the document can then be ingested as new",
    Trouble.RECEIPT_MISSING: _RELOAD,
    Trouble.UNSETTLED: f"nothing: the next ingest of the document settles it. {_RELOAD}, which also settles it",
    Trouble.SNIPPETS_MISSING: _RELEASE,
    Trouble.POSITIONS_MISFIT: _RELEASE,
    Trouble.ROWS_UNREADABLE: "restore this object from a backup: nothing else holds these documents. Without one, "
    "`ragfence verify --repair --accept-loss` removes it; then ingest the sources again: its documents are new, "
    "or as they were before, and get the same snippet_ids",
    Trouble.SNIPPETS_UNREADABLE: "restore this object from a backup. Otherwise, for the documents that need it: "
    + _RELEASE,
    Trouble.TOO_NEW: "upgrade ragfence on this machine",
    Trouble.VOID: "nothing: it is not part of the log. `ragfence verify --repair` and `ragfence compact` delete it",
    Trouble.SETTINGS: "set the policy to the settings the documents were hashed with, or use another tenant",
    Trouble.SINK_MISSING: _SETTLE,
    Trouble.SINK_ORPHAN: _SETTLE,
    Trouble.INDEX_MISSING: "`ragfence rollback ALIAS`, or build another index and swap to it; gc retires this one",
    Trouble.INDEX_DIFFERS: "`ragfence rollback ALIAS`, or build another index and swap to it: its rows were changed",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong."""

    trouble: Trouble
    what: str
    doc_id: str = ""
    """empty if it is unknown, or if no document is concerned"""
    key: str = ""
    """of the revision, in hex"""
    place: str = ""
    """the name of an object, or the snippet_id of an orphan in the sink"""

    @property
    def to_do(self) -> str:
        return TO_DO[self.trouble]


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of `verify`. After a repair: what was repaired, and what can still be found."""

    epoch: int
    documents: int
    """live or retracted"""
    rows: int
    snippets: int
    segments: int
    findings: tuple[Finding, ...] = ()
    repaired: tuple[Finding, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong; there may be harmless leftovers."""
        return all(finding.trouble in HARMLESS for finding in self.findings)
