"""Whatever is interleaved with whatever, when all is quiet and settled the sink holds exactly the live snippets.

A process may die at any point of a batch, or freeze there while others go on, its leases running out or not, and the
fence store may forget everything. Time is virtual and everything in memory.
"""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from ragfence import Document
from ragfence.documents.documents import Documents
from ragfence.documents.head_moves import DOCUMENT_POINTS
from ragfence.documents.sinks.sink import SINK_POINTS, Settled, SinkPending
from ragfence.errors import InFlight
from ragfence.testing import MemoryFences, at_point
from ragfence.testing.memory_sinks import ListSink, SinkMethod
from tests.documents.chunkers import Paragraphs
from tests.documents.sinking import assert_right
from tests.engine.worlds import Crash, Process, World
from tests.engine.worlds import world as make_world

POINTS = (*DOCUMENT_POINTS, *SINK_POINTS)
TEXTS = ("one\n\ntwo\n\nthree", "zero\n\none\n\nthree", "one\n\nthree\n\nfour", "")
MODEL = {0: TEXTS[0], 1: TEXTS[1], 2: TEXTS[2]}
"""what is ingested in the end, when all is quiet"""
POLICY = {"wait": {"mode": "raise"}, "lease": {"max_attempts": 10_000}}


class Write(NamedTuple):
    """Documents by their numbers: the number of their text, or None to retract them; and their metadata."""

    texts: dict[int, int | None]
    views: int
    stops_at: str | None
    then: Dies | Freezes | None
    fails: SinkMethod | None
    """the sink refuses its first call of this method"""


class Dies(NamedTuple):
    pass


class Freezes(NamedTuple):
    meanwhile: Sequence[Step]
    expires: bool


class Settle(NamedTuple):
    pass


class Forget(NamedTuple):
    """FLUSHALL"""


class Wait(NamedTuple):
    """until all leases have run out"""


Step = Write | Settle | Forget | Wait

quiet = st.one_of(st.just(Settle()), st.just(Forget()), st.just(Wait()))


def writes(then: st.SearchStrategy[Dies | Freezes]) -> st.SearchStrategy[Write]:
    return st.builds(
        Write,
        st.dictionaries(st.integers(0, 2), st.none() | st.integers(0, len(TEXTS) - 1), min_size=1, max_size=3),
        st.integers(0, 2),
        st.sampled_from(POINTS),
        st.none() | then,
        st.none() | st.sampled_from(["upsert", "delete"]),
    )


inner = st.lists(writes(st.builds(Dies)) | quiet, max_size=3)
outer = writes(st.builds(Dies) | st.builds(Freezes, inner, st.booleans())) | quiet


class Site:
    def __init__(self, world: World) -> None:
        self.world = world
        self.sink = ListSink()
        self.old_hand = self.documents()
        """a process that is there all the time"""

    def documents(self) -> Documents:
        return self.world.open(**POLICY).documents.using(chunker=Paragraphs(), sink=self.sink)

    def run(self, steps: Sequence[Step]) -> None:
        for step in steps:
            match step:
                case Settle():
                    self.documents().settle()
                case Forget():
                    assert isinstance(self.world.store, MemoryFences)
                    self.world.store.flush()
                case Wait():
                    self.world.let_leases_run_out()
                case Write(_, _, point, Dies()):
                    process = Process(self.world, **POLICY)
                    with at_point(point, process.die), contextlib.suppress(Crash):
                        self.write(process.fence.documents.using(chunker=Paragraphs(), sink=self.sink), step)
                        event("outlived its death")
                case Write(_, _, point, Freezes(meanwhile, expires)):

                    def freeze(meanwhile: Sequence[Step] = meanwhile, expires: bool = expires) -> None:
                        if expires:
                            self.world.let_leases_run_out()
                        self.run(meanwhile)

                    with at_point(point, freeze):
                        self.write(self.documents(), step)
                case Write():
                    self.write(self.old_hand, step)

    def write(self, documents: Documents, step: Write) -> None:
        gone = [doc for doc, text in step.texts.items() if text is None]
        there = [(doc, TEXTS[text]) for doc, text in step.texts.items() if text is not None]
        with self.failing(step.fails), contextlib.suppress(ConnectionError):
            documents.ingest_many([Document(str(doc), text, {"views": step.views}) for doc, text in there])
            for doc in gone:
                with contextlib.suppress(InFlight):
                    documents.retract(str(doc))

    @contextlib.contextmanager
    def failing(self, method: SinkMethod | None) -> Iterator[None]:
        if method is None:
            yield
            return
        fault = self.sink.on(method).fail_after(error=ConnectionError())
        try:
            yield
        finally:
            fault.times = fault.hits


@contextlib.contextmanager
def site() -> Iterator[Site]:
    with (
        tempfile.TemporaryDirectory() as folder,
        pytest.MonkeyPatch.context() as patch,
        make_world("memory", Path(folder), patch) as world,
    ):
        yield Site(world)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(outer, max_size=6))
def test_the_sink_ends_as_the_live_documents_are(steps: list[Step]) -> None:
    with site() as made, warnings.catch_warnings():
        warnings.simplefilter("ignore", SinkPending)  # nobody waits here
        made.run(steps)
        made.world.let_leases_run_out()
        last = made.documents()
        assert last.settle().left == 0
        assert_right(last, made.sink)
        assert last.settle(full=True) == Settled(0, 0, 0, 0)
        assert not list(made.world.objects.list("default/sinks/"))
        last.ingest_many([Document(str(doc), text) for doc, text in MODEL.items()])
        held = {(int(snippet.doc_id), snippet.text) for snippet in made.sink.held.values()}
        assert held == {(doc, part) for doc, text in MODEL.items() for part in text.split("\n\n")}
