"""Sinks: live vector stores that receive exactly the new snippets of each document and lose exactly the dead ones.

    upsert new snippets -> commit -> seal -> delete dead snippets

New before old, always: a search meanwhile finds the old revision or the new one, never neither. Writes to a sink cannot
be fenced, so the work of a batch is written down first (`intents`), every step may be repeated, and a writer that finds
that a document moved on in the meantime reconciles the sink (`reconciliation`). See docs/sinks.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ragfence.core.operations import checked_text
from ragfence.errors import ValidationError

if TYPE_CHECKING:
    from ragfence.indexes.embedders.embedder import Embedder, Vectors

AFTER_INTENT = "after_intent"
AFTER_UPSERT = "after_upsert"
BEFORE_DELETE = "before_delete"
AFTER_DELETE = "after_delete"
SINK_POINTS = (AFTER_INTENT, AFTER_UPSERT, BEFORE_DELETE, AFTER_DELETE)
"""reached in batches with work for the sink; the last two after the seal, even if there is nothing to delete"""

PAGE = 1000
MAX_NAME_BYTES = 80
"""up to three times as many when encoded, as one part of an object's name"""


Foreign = Literal["keep", "delete"]
"""what to do with rows of a sink that ragfence did not write"""


class SinkPending(UserWarning):
    """The documents are ingested, but the sink is behind: the pending work is stored, and a later call completes it."""


@dataclass(frozen=True, slots=True)
class SinkSnippet:
    """A snippet for a sink. The text of an id never changes; everything else may."""

    snippet_id: str
    """32 hex digits, which is also a UUID"""
    doc_id: str
    text: str
    start: int
    end: int
    section_id: str
    ordinal: int
    tokens: int
    source_url: str
    metadata: Mapping[str, Any]
    """the document's"""


class Sink(Protocol):
    """A store that holds the live snippets as well. Called from many threads and processes at once, in any order.

    Both calls may be repeated, and may come late: `upsert` replaces the row of a snippet_id, `delete` ignores ids that
    do not exist. A call that raises is repeated later. A call has at most 1,000 snippets or ids.

    Two more members are optional:

    `ids(doc_ids: Sequence[str] | None = None) -> Iterable[str]`
        the snippet_ids that the sink holds, of these documents or of all. `settle(full=True)` and `verify` request all
        of them: a live id that the sink lacks is missing; an id that is not live, but that the log names or named, is
        an orphan. An id that the log never named is foreign and left alone, unless `settle` gets `foreign="delete"`.
    `keeps_positions: bool`
        True: an edit that only moves a snippet within its document upserts it again. Otherwise start, end, section_id
        and ordinal are those of the revision that brought the snippet in, or of the last change of metadata.
    """

    @property
    def name(self) -> str:
        """A stable name, which identifies the intents of the sink. Two sinks of one tenant must not share it."""
        ...

    def upsert(self, snippets: Sequence[SinkSnippet]) -> None: ...

    def delete(self, snippet_ids: Sequence[str]) -> None: ...


class VectorSink(Protocol):
    """A sink that names an embedder and also receives vectors. Everything else is as in `Sink`.

    Builds with the same embedder use the same vectors: a snippet is embedded once, by whichever needs it first.
    """

    @property
    def name(self) -> str: ...

    @property
    def embedder(self) -> str | Embedder:
        """As in an `IndexSpec`: a name, or an object. Read once, when the sink is first used."""
        ...

    def upsert(self, snippets: Sequence[SinkSnippet], vectors: Vectors) -> None:
        """`vectors`: an array (snippets, dimension) of float32, in their order. It is the sink's to keep."""
        ...

    def delete(self, snippet_ids: Sequence[str]) -> None: ...


@dataclass(frozen=True, slots=True)
class Settled:
    """The result of `settle`."""

    intents: int
    """intents left by crashes or errors, and completed now"""
    left: int
    """intents that must wait, because their documents are being written right now; settle again later"""
    missing: int = 0
    """live snippets that were added to the sink again; with `full=True`"""
    orphaned: int = 0
    """snippets deleted from the sink because no live document has them; with `full=True`"""
    foreign: int = 0
    """rows of the sink that the log never named, left alone; with `full=True`"""


def validate_sink(sink: Sink | VectorSink) -> Sink | VectorSink:
    """Returns the sink if it is a valid one."""
    name = checked_text("the name of a sink", getattr(sink, "name", None), MAX_NAME_BYTES)
    if not name:
        raise ValidationError("a sink needs a name", hint='one that stays the same, such as name = "qdrant:docs"')
    for method in ("upsert", "delete"):
        if not callable(getattr(sink, method, None)):
            raise ValidationError(f"the sink {name!r} has no {method}()", hint="see ragfence.documents.sinks.sink.Sink")
    embedder = getattr(sink, "embedder", None)
    if not (embedder is None or isinstance(embedder, str) or callable(getattr(embedder, "embed", None))):
        raise ValidationError(
            f"the sink {name!r} has an `embedder` that is not a valid embedder: {type(embedder).__name__}",
            hint="use a name or an embedder of ragfence; a sink that embeds on its own needs another attribute name",
        )
    return sink


def delete_all(sink: Sink | VectorSink, snippet_ids: Sequence[str]) -> None:
    for at in range(0, len(snippet_ids), PAGE):
        sink.delete(snippet_ids[at : at + PAGE])
