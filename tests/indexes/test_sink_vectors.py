"""A sink that names an embedder, and builds with the same one: a snippet is embedded once between them."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ragfence import Document
from ragfence.documents.documents import Documents
from ragfence.documents.log import Layout, address_in
from ragfence.documents.sinks.sink import AFTER_INTENT, AFTER_UPSERT, BEFORE_DELETE, PAGE, Settled
from ragfence.engine import crash_points
from ragfence.errors import EmbedderInvalid, EmbedderUnavailable, StoreUnavailable, ValidationError
from ragfence.indexes import document_hooks, vectors
from ragfence.indexes.vectors import VectorObjects
from ragfence.testing import at_point
from ragfence.testing.memory_sinks import ListSink
from tests.documents.chunkers import Paragraphs
from tests.documents.places import Place
from tests.documents.sinking import assert_right
from tests.engine.worlds import Crash, Process
from tests.indexes import sinking
from tests.indexes.building import CountingEmbedder, ingested, live_snippets, rows_of, shown, spec_in, text_of

ROOT = Path(__file__).resolve().parents[2]
NAMES = [f"doc-{at}" for at in range(4)]
A = "one\n\ntwo\n\nthree"
B = "four\n\ntwo\n\nthree"
C = "one\n\nfive"


@pytest.fixture
def embedder() -> CountingEmbedder:
    return CountingEmbedder()


@pytest.fixture
def sink(embedder: CountingEmbedder) -> ListSink:
    return ListSink(embedder=embedder)


def guard(here: Place, sink: ListSink) -> Documents:
    """Of a process of its own."""
    return here.open(lease={"max_attempts": 1000}).documents.using(chunker=Paragraphs(), sink=sink)


def put(documents: Documents, names: Sequence[str], edition: int = 0, **metadata: Any) -> None:
    receipts = documents.ingest_many([Document(name, text_of(name, edition), metadata) for name in names])
    assert not any(receipt.failed for receipt in receipts), receipts


def assert_vectors(sink: ListSink, documents: Documents) -> None:
    """Of each live snippet the vector of its text, and nothing else."""
    assert_right(documents, sink)
    assert sink.vectors.keys() == sink.held.keys()
    quiet = CountingEmbedder()
    for snippet_id, snippet in sink.held.items():
        assert np.array_equal(sink.vectors[snippet_id], quiet.embed([snippet.text])[0]), snippet.text


@contextlib.contextmanager
def embeds(embedder: CountingEmbedder, *texts: str, count: int | None = None) -> Iterator[None]:
    """Exactly these, or so many, each once."""
    embedder.seen.clear()
    yield
    assert embedder.seen.total() == (len(texts) if count is None else count), embedder.seen
    assert set(embedder.seen.values()) <= {1}
    assert count is not None or set(embedder.seen) == set(texts)


def test_a_build_finds_what_a_sink_was_given(here: Place, embedder: CountingEmbedder, sink: ListSink) -> None:
    documents = guard(here, sink)
    with embeds(embedder, count=12):
        put(documents, NAMES[:3])
        put(documents, NAMES[3:])
    assert_vectors(sink, documents)
    assert sink.calls == {"upsert": 2}
    fence = here.open()
    with embeds(embedder):
        build = fence.indexes.build(spec_in(here.folder, embedder))
    assert shown(rows_of(fence, build)) == live_snippets(fence)
    held = {each: row["vector"] for each, row in rows_of(fence, build).items()}
    assert {each: list(vector) for each, vector in sink.vectors.items()} == held
    # One whole object beside each object of snippets, as a build would have made it.
    assert list(map(address_in, here.names("vectors/"))) == list(map(address_in, here.names("snippets/")))
    assert not here.names("vectors-parts/")


def test_a_sink_finds_what_a_build_has_embedded(here: Place, embedder: CountingEmbedder, sink: ListSink) -> None:
    fence = here.open()
    for name in NAMES:
        ingested(fence, [name])
    fence.indexes.build(spec_in(here.folder, embedder))
    documents = guard(here, sink)
    with embeds(embedder):
        assert documents.settle(full=True) == Settled(0, 0, missing=12)
    assert_vectors(sink, documents)
    with embeds(embedder):  # after a compaction, too, for another sink
        fence.documents.compact()
        other = ListSink("other", embedder=embedder)
        guard(here, other).settle(full=True)
    assert_vectors(other, documents)


def test_a_new_sink_embeds_what_nobody_has_and_the_build_finds_it(
    near: Place, embedder: CountingEmbedder, sink: ListSink
) -> None:
    fence = near.open()
    ingested(fence, NAMES[:2])
    fence.indexes.build(spec_in(near.folder, embedder))
    ingested(fence, NAMES[2:])
    with embeds(embedder, count=6):
        guard(near, sink).settle(full=True)
        guard(near, ListSink("other", embedder=embedder)).settle(full=True)
        fence.indexes.build(spec_in(near.folder, embedder))
    assert_vectors(sink, fence.documents)


def test_an_edit_embeds_its_new_snippets_alone(near: Place, embedder: CountingEmbedder, sink: ListSink) -> None:
    documents, fence = guard(near, sink), near.open()
    documents.ingest(Document("a", A))
    with embeds(embedder, "four"):
        documents.ingest(Document("a", B))
        fence.indexes.build(spec_in(near.folder, embedder))
    with embeds(embedder, "five"):  # "one" is that of the first revision
        documents.ingest(Document("a", C))
        fence.indexes.build(spec_in(near.folder, embedder))
    with embeds(embedder):
        documents.ingest(Document("a", C, {"views": 2}))
        documents.ingest(Document("a", A))
        documents.retract("a")
        fence.indexes.build(spec_in(near.folder, embedder))
        documents.ingest(Document("a", B))
        fence.indexes.build(spec_in(near.folder, embedder, metric="l2"))
    assert_vectors(sink, documents)


def test_an_edit_of_what_a_build_has_embedded(near: Place, embedder: CountingEmbedder) -> None:
    sink = ListSink(embedder=embedder, keeps_positions=True)
    fence, documents = near.open(), guard(near, sink)
    fence.documents.using(chunker=Paragraphs()).ingest(Document("a", A))
    fence.indexes.build(spec_in(near.folder, embedder))
    with embeds(embedder, "four"):
        documents.ingest(Document("a", B))
    assert_vectors(sink, documents)
    documents.retract("a")
    with embeds(embedder, "five"):
        documents.ingest(Document("a", C))  # after a retraction
    assert_vectors(sink, documents)


def crash(here: Place, sink: ListSink, point: str, act: Callable[[Documents], Any], wait: bool = True) -> None:
    """A process dies at the point. Its leases run out."""
    process = Process(here, lease={"max_attempts": 1000})
    mortal = process.fence.documents.using(chunker=Paragraphs(), sink=sink)
    with at_point(point, process.die), pytest.raises(Crash):
        act(mortal)
    if wait:
        here.let_leases_run_out()


@pytest.mark.parametrize(
    "point",
    [
        AFTER_INTENT,
        vectors.AFTER_VECTORS,
        AFTER_UPSERT,
        crash_points.AFTER_COMMIT,
        crash_points.BEFORE_SEAL,
        BEFORE_DELETE,
    ],
)
def test_what_a_killed_process_embedded_is_not_embedded_again(
    near: Place, embedder: CountingEmbedder, sink: ListSink, point: str
) -> None:
    put(guard(near, sink), NAMES[:2])
    crash(near, sink, point, lambda mortal: put(mortal, NAMES[1:], edition=1))
    documents = guard(near, sink)
    put(documents, NAMES[1:], edition=1)
    assert_vectors(sink, documents)
    fence = near.open()
    build = fence.indexes.build(spec_in(near.folder, embedder))
    assert shown(rows_of(fence, build)) == live_snippets(fence)
    assert set(embedder.seen.values()) == {1}


@pytest.mark.parametrize("point", [vectors.AFTER_VECTORS, AFTER_UPSERT, crash_points.AFTER_COMMIT])
def test_a_process_that_gets_a_sigkill_leaves_what_it_embedded(tmp_path: Path, point: str) -> None:
    argv = [sys.executable, "-m", "tests.indexes.sinking", str(tmp_path), point]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    fence, embedder = sinking.opened(tmp_path)
    with fence:
        documents = sinking.send(fence, embedder)  # waits for the lease of the dead
        build = fence.indexes.build(spec_in(tmp_path, embedder))
        assert shown(rows_of(fence, build)) == live_snippets(fence)
        assert documents.settle(full=True).left == 0
    noted = (tmp_path / "embedded").read_text().splitlines()
    assert len(noted) == len(set(noted)) == 3 * len(sinking.NAMES)


def test_a_process_that_waits_for_the_lease_of_the_dead_finds_it_too(
    near: Place, embedder: CountingEmbedder, sink: ListSink
) -> None:
    crash(near, sink, AFTER_UPSERT, lambda mortal: put(mortal, NAMES), wait=False)
    documents = guard(near, sink)
    assert documents.settle().left == 1
    near.let_leases_run_out()
    with embeds(embedder):
        put(documents, NAMES)
    assert_vectors(sink, documents)


def test_what_was_embedded_for_a_batch_that_never_was_goes_with_its_snippets(
    near: Place, embedder: CountingEmbedder, sink: ListSink
) -> None:
    put(guard(near, sink), NAMES[:1])
    crash(near, sink, AFTER_UPSERT, lambda mortal: put(mortal, NAMES[1:]))
    assert len(near.names("vectors/")) == len(near.names("snippets/")) == 2
    documents = guard(near, sink)
    documents.purge("nobody")
    documents.purge(NAMES[1])  # it was never committed
    assert len(near.names("vectors/")) == len(near.names("snippets/")) == 1
    with embeds(embedder):
        near.open().indexes.build(spec_in(near.folder, embedder))


def test_a_purge_takes_the_vectors_of_a_sink_along(here: Place, embedder: CountingEmbedder, sink: ListSink) -> None:
    documents = guard(here, sink)
    put(documents, NAMES)
    put(documents, NAMES[:2], edition=1)
    gone = {snippet.snippet_id for snippet in documents.snippets(NAMES[0])}
    assert gone <= ids_of_vectors(here)
    documents.purge(NAMES[0])
    assert not gone & ids_of_vectors(here)
    assert len(ids_of_vectors(here)) == 10, "those of the others stay"
    assert not gone & sink.vectors.keys()
    with embeds(embedder):
        fence = here.open()
        build = fence.indexes.build(spec_in(here.folder, embedder))
        assert shown(rows_of(fence, build)) == live_snippets(fence)
    assert_vectors(sink, documents)


def ids_of_vectors(here: Place) -> set[str]:
    objects = VectorObjects(here.kept, Layout("default"), "")
    names = [name for folder in ("vectors/", "vectors-parts/", "vectors-kept/") for name in here.names(folder)]
    return {each.hex() for name in names for each in (objects.read(name) or ([], None))[0]}


def test_what_a_sink_refuses_is_not_embedded_again(near: Place, embedder: CountingEmbedder, sink: ListSink) -> None:
    documents = guard(near, sink)
    sink.on("upsert").fail_before(times=2, error=ConnectionError("gone"))
    for _ in range(2):
        with pytest.raises(ConnectionError) as refused:
            put(documents, NAMES)
        assert "'list' or its embedder refused" in refused.value.__notes__[0]
    assert not list(documents.heads())
    put(documents, NAMES)
    assert set(embedder.seen.values()) == {1}
    assert_vectors(sink, documents)


@pytest.mark.parametrize("error", [EmbedderUnavailable("away"), EmbedderInvalid("NaN"), RuntimeError("broken")])
def test_an_embedder_that_fails_keeps_documents_and_sink_as_they_were(
    near: Place, embedder: CountingEmbedder, sink: ListSink, error: Exception
) -> None:
    documents = guard(near, sink)
    put(documents, NAMES[:1])

    def fail(made: object) -> object:
        raise error

    embedder.spoil = fail
    with pytest.raises(type(error)):
        put(documents, NAMES, edition=1)
    assert [head.doc_id for head in documents.heads()] == NAMES[:1]
    assert documents.settle().left == 0
    assert_vectors(sink, documents)
    documents.ingest(Document(NAMES[0], text_of(NAMES[0]), {"views": 2}))  # what is known needs no embedder
    embedder.spoil = lambda made: made
    put(documents, NAMES, edition=1)
    assert_vectors(sink, documents)


def test_many_snippets_come_in_pages_and_a_build_finds_all(
    near: Place, embedder: CountingEmbedder, sink: ListSink
) -> None:
    text = "\n\n".join(f"number {at}" for at in range(2 * PAGE + 1))
    documents, fence = guard(near, sink), near.open()
    with embeds(embedder, count=2 * PAGE + 1):
        documents.ingest(Document("big", text))
        assert sink.calls == {"upsert": 3}
        build = fence.indexes.build(spec_in(near.folder, embedder))
    assert shown(rows_of(fence, build)) == live_snippets(fence)
    assert_vectors(sink, documents)


def test_what_is_in_memory_is_bounded_by_bytes(
    near: Place, embedder: CountingEmbedder, sink: ListSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(document_hooks, "PAGE_BYTES", 5 * 4 * embedder.dimension)
    documents = guard(near, sink)
    with embeds(embedder, count=12):
        put(documents, NAMES)
        near.open().indexes.build(spec_in(near.folder, embedder))
    assert sink.calls == {"upsert": 3}
    assert_vectors(sink, documents)


@pytest.mark.parametrize(
    "point", [AFTER_INTENT, vectors.AFTER_EMBEDDED, vectors.AFTER_VECTORS, crash_points.BEFORE_SEAL]
)
def test_an_epoch_that_begins_meanwhile_costs_nothing(
    near: Place, embedder: CountingEmbedder, sink: ListSink, point: str
) -> None:
    documents, other = guard(near, sink), near.open()
    put(documents, NAMES[:2])
    with embeds(embedder, count=5), at_point(point, other.hydrate):
        put(documents, NAMES[1:3], edition=1)  # doc-1 edited: 1, doc-2 is new: 3
        put(documents, NAMES[:1], edition=1)
    other.documents.compact()
    named = {address_in(name) for name in near.names("segments/")}
    assert {address_in(name) for name in near.names("vectors/")} <= named, "what was void is gone"
    with embeds(embedder):
        build = other.indexes.build(spec_in(near.folder, embedder))
    assert shown(rows_of(other, build)) == live_snippets(other)
    assert_vectors(sink, documents)


def test_a_settle_that_a_compaction_overtakes_looks_again(
    near: Place, embedder: CountingEmbedder, sink: ListSink
) -> None:
    fence = near.open()
    for name in NAMES:
        ingested(fence, [name])
    documents = guard(near, sink)
    with embeds(embedder, count=12), at_point(vectors.AFTER_EMBEDDED, lambda: near.open().documents.compact()):  # type: ignore[arg-type]
        assert documents.settle(full=True) == Settled(0, 0, missing=12)
    assert_vectors(sink, documents)


def test_a_batch_that_a_compaction_overtakes_can_be_sent_again(
    near: Place, embedder: CountingEmbedder, sink: ListSink
) -> None:
    fence, documents = near.open(), guard(near, sink)
    for name in NAMES:
        ingested(fence, [name])
    compacts = at_point(vectors.AFTER_EMBEDDED, lambda: near.open().documents.compact())  # type: ignore[arg-type]
    with embeds(embedder, count=12):
        with compacts, pytest.raises(StoreUnavailable, match="cannot be read"):
            put(documents, NAMES, views=2)  # their snippets stand in the segments of before
        put(documents, NAMES, views=2)
    assert_vectors(sink, documents)


def test_a_sink_and_a_build_at_once_embed_each_text_once(
    near: Place, embedder: CountingEmbedder, sink: ListSink
) -> None:
    for name in NAMES:
        ingested(near.open(), [name])
    fences = [near.open() for _ in range(2)]
    documents = guard(near, sink)
    with embeds(embedder, count=12), ThreadPoolExecutor(3) as pool:
        under_way = [pool.submit(documents.settle, full=True)]
        under_way += [pool.submit(fence.indexes.build, spec_in(near.folder, embedder)) for fence in fences]  # type: ignore[arg-type]
        for each in under_way:
            each.result()
    assert_vectors(sink, documents)


def test_another_embedder_embeds_for_itself(near: Place, embedder: CountingEmbedder, sink: ListSink) -> None:
    put(guard(near, sink), NAMES)
    other = CountingEmbedder(revision="2")
    with embeds(other, count=12), embeds(embedder):
        near.open().indexes.build(spec_in(near.folder, other))


def test_a_sink_without_embedder_gets_snippets_alone(near: Place, embedder: CountingEmbedder) -> None:
    class Plain:
        name = "plain"

        def __init__(self) -> None:
            self.given: list[tuple[Any, ...]] = []

        def upsert(self, *given: Any) -> None:
            self.given.append(given)

        def delete(self, snippet_ids: Sequence[str]) -> None:
            pass

    plain = Plain()
    put(near.open().documents.using(chunker=Paragraphs(), sink=plain), NAMES)
    assert [len(given) for given in plain.given] == [1]
    assert not near.names("vectors/")


def test_an_embedder_of_another_kind_is_refused_at_once(near: Place) -> None:
    with pytest.raises(ValidationError, match="not a valid embedder: function"):
        near.open().documents.using(sink=ListSink(embedder=lambda texts: texts))  # type: ignore[arg-type]


def test_an_embedder_by_name_is_opened_when_the_first_snippet_comes(near: Place) -> None:
    sink = ListSink(embedder="wordllama")
    documents = guard(near, sink)
    documents.retract("nobody")
    put(documents, NAMES[:1])
    fence = near.open()
    build = fence.indexes.build(spec_in(near.folder, "wordllama"))
    assert build.seal.made["embedded"] == 0
    assert {len(vector) for vector in sink.vectors.values()} == {256}
