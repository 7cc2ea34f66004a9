"""Sinks: a live vector store that gets exactly the new snippets of each document and loses exactly the dead ones.

    upsert new snippets -> commit -> seal -> delete dead snippets

New before old, always: whoever searches meanwhile finds the old revision or the new one, never neither. Nothing in a
sink can be fenced, so what a batch owes it is written down first (`intents.py`), every step may be repeated, and
whoever finds that a document moved on while he wrote puts the sink right (`reconciling.py`). See docs/sinks.md.
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
"""reached in batches that owe the sink something; the last two after the seal, also if there is nothing to delete"""

PAGE = 1000
MAX_NAME_BYTES = 80
"""three times as many when encoded: it is one part of an object's name"""


Foreign = Literal["keep", "delete"]
"""what becomes of rows in a sink that ragfence did not write"""


class SinkPending(UserWarning):
    """The documents are ingested, but the sink is behind: what it is owed is kept, and done by a later call."""


@dataclass(frozen=True, slots=True)
class SinkSnippet:
    """A snippet on its way into a sink. An id stands for the same text for ever; all else may change."""

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
    """Where live snippets are kept besides. Called from many threads and processes at once, in any order.

    Both calls may be repeated, and may come too late: `upsert` replaces what it finds under a snippet_id, `delete` is
    content with ids that are not there. What raises is tried again. At most 1,000 snippets or ids a call.

    Two more members are optional:

    `ids(doc_ids: Sequence[str] | None = None) -> Iterable[str]`
        the snippet_ids that the sink holds, of these documents or of all. `settle(full=True)` and `verify` ask for all
        of them: a live one that is absent is missing; one that is not live, and that the log has or had, is an orphan.
        One that the log never had is somebody else's and is left alone, unless `settle` is told `foreign="delete"`.
    `keeps_positions: bool`
        True: an edit that only moves a snippet within its document upserts it again. Otherwise start, end, section_id
        and ordinal are those of the revision that brought the snippet in, or of the last change of metadata.
    """

    @property
    def name(self) -> str:
        """Stable: it says whose the intents are. Two sinks of one tenant must not share it."""
        ...

    def upsert(self, snippets: Sequence[SinkSnippet]) -> None: ...

    def delete(self, snippet_ids: Sequence[str]) -> None: ...


class VectorSink(Protocol):
    """A sink that names an embedder, and gets the vectors too. All else is as in `Sink`.

    They are the vectors that builds with the same embedder use: whoever asks first embeds, the other one finds them.
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
    """What `settle` came to."""

    intents: int
    """left behind by somebody, and done with now"""
    left: int
    """what has to wait, because somebody is writing these documents right now; settle again later"""
    missing: int = 0
    """live snippets that the sink was given again; with `full=True`"""
    orphaned: int = 0
    """snippets that were deleted from the sink because no live document has them; with `full=True`"""
    foreign: int = 0
    """rows of the sink that the log does not know: somebody else's, left alone; with `full=True`"""


def validate_sink(sink: Sink | VectorSink) -> Sink | VectorSink:
    """The sink, if it can be one."""
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
            hint="use a name or an embedder of ragfence; a sink that embeds by itself calls its own something else",
        )
    return sink


def delete_all(sink: Sink | VectorSink, snippet_ids: Sequence[str]) -> None:
    for at in range(0, len(snippet_ids), PAGE):
        sink.delete(snippet_ids[at : at + PAGE])
