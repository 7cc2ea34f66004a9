"""An index is built once per INDEX_HASH, of the snapshot that the hash names, and nothing is embedded twice."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ragfence import Fence, Operation
from ragfence.core.receipts import Decision
from ragfence.errors import (
    BuildUnverified,
    EmbedderInvalid,
    FormatCorrupt,
    InFlight,
    NotSealed,
    SnapshotGone,
    UnknownStore,
    ValidationError,
)
from ragfence.indexes import build as building
from ragfence.indexes import index_rows
from ragfence.indexes.build import Build
from ragfence.indexes.spec import IndexSpec, compute_index_hash
from ragfence.indexes.verification import sample_size
from ragfence.testing import at_point
from tests.documents.places import Place
from tests.engine.worlds import elsewhere
from tests.indexes.building import CountingEmbedder, ingested, live_snippets, rows_of, shown, spec_in

NAMES = [f"doc-{at}" for at in range(6)]


@pytest.fixture(autouse=True, params=[1, 10_000], ids=["segment by segment", "together"])
def joined(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many documents of a segment are worth a join of their own; as it is, no test has as many."""
    monkeypatch.setattr(index_rows, "WORTH_A_JOIN", request.param)


def built(fence: Fence, place: Place, embedder: CountingEmbedder, **more: Any) -> Build:
    return fence.indexes.build(spec_in(place.folder, embedder, **more))


def test_a_build_holds_every_live_snippet_and_is_made_once(here: Place) -> None:
    fence, embedder = here.open(), CountingEmbedder()
    ingested(fence, NAMES, team="core")
    build = built(fence, here, embedder)
    rows = rows_of(fence, build)
    assert build.decision is Decision.NEW
    assert shown(rows) == live_snippets(fence)
    assert {row["metadata"] for row in rows.values()} == {'{"team":"core"}'}
    assert (build.rows, build.documents) == (18, 6)
    assert set(embedder.seen.values()) == {1}
    assert len(embedder.seen) == 18

    again = built(here.open(), here, other := CountingEmbedder())
    assert again.decision is Decision.DUPLICATE
    assert (again.index_hash, again.seal, again.receipt) == (build.index_hash, build.seal, build.receipt)
    assert not other.seen


def test_operations_with_a_sequence_are_no_part_of_the_corpus(here: Place) -> None:
    """A tenant may have documents and webhooks."""
    fence, embedder = here.open(), CountingEmbedder()
    ingested(fence, NAMES)
    digest = fence.documents.corpus_digest()
    for number in range(20):
        with fence.claim(Operation(kind="webhook", source_id=f"{number}", sequence=3), payload={"at": number}) as op:
            op.seal()
    assert fence.documents.corpus_digest() == here.open().documents.corpus_digest() == digest
    build = built(fence, here, embedder)
    assert (build.decision, build.documents) == (Decision.NEW, len(NAMES))
    assert built(here.open(), here, CountingEmbedder()).decision is Decision.DUPLICATE
    assert fence.stats().documents == len(NAMES)
    assert fence.documents.verify().ok


def test_what_a_build_needs_of_the_stores_does_not_grow_with_the_corpus(
    near: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is new finds the digest that another has made."""
    calls: list[str] = []
    for name in ("get", "put_new", "list", "delete"):
        plain = getattr(near.kept, name)

        def counted(*args: Any, plain: Any = plain, name: str = name, **more: Any) -> Any:
            calls.append(name)
            return plain(*args, **more)

        monkeypatch.setattr(near.kept, name, counted)
    counts = []
    for count in (3, 60):
        ingested(near.open(), [f"doc-{at}" for at in range(count)])
        built(near.open(), near, CountingEmbedder())
        calls.clear()
        assert built(near.open(), near, CountingEmbedder()).decision is Decision.DUPLICATE
        counts.append(list(calls))
    assert counts[0] == counts[1]
    assert len(counts[0]) < 10


def test_a_corpus_that_is_edited_and_reverted_finds_its_earlier_build(here: Place) -> None:
    fence, embedder = here.open(), CountingEmbedder()
    ingested(fence, NAMES)
    first = built(fence, here, embedder)
    ingested(fence, NAMES[:1], edition=1)
    second = built(fence, here, embedder)
    assert second.index_hash != first.index_hash
    ingested(fence, NAMES[:1])
    seen = embedder.seen.total()
    third = built(fence, here, embedder)
    assert third.decision is Decision.DUPLICATE
    assert third.seal == first.seal
    assert embedder.seen.total() == seen


def test_coverage_is_of_the_documents_of_now_also_after_a_build_that_was_there_already(near: Place) -> None:
    fence, embedder = near.open(), CountingEmbedder()
    ingested(fence, NAMES)
    first = built(fence, near, embedder)
    ingested(fence, NAMES[:1], edition=1)
    built(fence, near, embedder)
    ingested(fence, NAMES[:1])
    assert built(fence, near, embedder).index_hash == first.index_hash
    ingested(fence, [f"later-{at}" for at in range(2 * len(NAMES))])
    assert fence.indexes.coverage(first.seal) == pytest.approx(1 / 3)


def test_a_document_that_was_purged_and_came_back_is_not_covered_until_it_is_built_anew(near: Place) -> None:
    fence, embedder = near.open(), CountingEmbedder()
    ingested(fence, NAMES)
    first = built(fence, near, embedder)
    fence.documents.purge(NAMES[3])
    assert fence.indexes.coverage(first.seal) == 1, "what is live is in it"
    ingested(fence, [NAMES[3]])
    assert fence.documents.corpus_digest() == first.seal.corpus_digest
    assert fence.indexes.coverage(first.seal) == pytest.approx(5 / 6)
    ingested(fence, [NAMES[0]], edition=1)
    assert fence.indexes.coverage(first.seal) == pytest.approx(4 / 6)
    ingested(fence, [NAMES[0]])
    assert fence.indexes.coverage(built(fence, near, embedder).seal) == 1


def test_an_edited_document_costs_its_new_snippets_and_the_rest_comes_from_the_build_before(here: Place) -> None:
    fence, embedder = here.open(), CountingEmbedder()
    ingested(fence, NAMES)
    first = built(fence, here, embedder)
    embedder.seen.clear()
    ingested(fence, NAMES[:2], edition=1)
    fence.documents.retract(NAMES[-1])
    second = built(fence, here, embedder)
    assert second.seal.made["base"] == first.index_hash
    assert second.seal.made["documents_read"] == 2
    assert set(embedder.seen) == {f"the beginning of {name} was written anew, edition 1" for name in NAMES[:2]}
    assert shown(rows_of(fence, second)) == live_snippets(fence)
    assert second.rows == 15


def test_metadata_alone_is_new_in_the_rows_and_embeds_nothing(here: Place) -> None:
    fence, embedder = here.open(), CountingEmbedder()
    ingested(fence, NAMES, year=2025)
    first = built(fence, here, embedder)
    embedder.seen.clear()
    ingested(fence, NAMES[:1], year=2026)
    second = built(fence, here, embedder)
    assert second.index_hash != first.index_hash
    assert not embedder.seen
    years = {row["doc_id"]: row["metadata"] for row in rows_of(fence, second).values()}
    assert years[NAMES[0]] == '{"year":2026}'
    assert years[NAMES[1]] == '{"year":2025}'


def test_a_whole_build_finds_what_was_edited_described_anew_revived_and_moved(near: Place) -> None:
    """Its rows stand elsewhere than its snippets, or its snippets in several objects."""
    fence = near.open()
    ingested(fence, NAMES)
    ingested(fence, NAMES[:1], edition=1)  # keeps two snippets
    ingested(fence, NAMES[1:2], team="core")
    fence.documents.retract(NAMES[2])
    ingested(fence, NAMES[2:3])
    fence.documents.retract(NAMES[3])
    ingested(fence, [f"later-{at}" for at in range(3)])
    for revision in ("before", "after"):  # a compaction has rewritten the log
        build = built(fence, near, CountingEmbedder(revision))
        assert build.seal.made["base"] is None
        rows = rows_of(fence, build)
        assert shown(rows) == live_snippets(fence)
        told = {row["doc_id"]: row["metadata"] for row in rows.values()}
        assert {doc_id for doc_id, metadata in told.items() if metadata != "{}"} == {NAMES[1]}
        assert fence.documents.compact().segments_after or revision == "after"


def test_a_log_that_is_compacted_while_it_is_built_is_found_where_it_is_now(near: Place) -> None:
    fence, embedder = near.open(), CountingEmbedder()
    for edition in (0, 1):
        ingested(fence, NAMES, edition=edition)
    digest = fence.indexes.corpus_digest()
    fence.indexes._corpora.now()  # the snapshot of another builder, who died
    fence.documents.compact()
    build = fence.indexes.build(spec_in(near.folder, embedder), corpus=digest)
    assert build.seal.corpus_digest == digest
    assert shown(rows_of(fence, build)) == live_snippets(fence)


def test_another_metric_is_another_build_of_the_same_vectors(near: Place) -> None:
    fence, embedder = near.open(), CountingEmbedder()
    ingested(fence, NAMES)
    one = built(fence, near, embedder)
    two = built(fence, near, embedder, metric="l2")
    assert one.index_hash != two.index_hash
    assert set(embedder.seen.values()) == {1}


def test_another_revision_of_the_embedder_embeds_anew(near: Place) -> None:
    fence = near.open()
    ingested(fence, NAMES)
    one = built(fence, near, CountingEmbedder())
    two = built(fence, near, newer := CountingEmbedder("2"))
    assert one.index_hash != two.index_hash
    assert len(newer.seen) == 18


def test_the_index_hash_stands_still() -> None:
    """A changed digest would silently build, and pay for, everything again."""
    inputs = {
        "tenant": "default",
        "corpus": "sha256:00",
        "embedder": {"name": "wordllama", "revision": "1", "dimension": 256, "normalised": False},
        "backend": "lance",
        "metric": "cosine",
        "index": "flat",
        "parameters": {},
        "analyzer": "none",
        "schema": 1,
    }
    known = compute_index_hash(inputs)
    assert known == GOLDEN
    for name in inputs:
        assert compute_index_hash(inputs | {name: "other"}) != known


GOLDEN = "f8e733087ee2020c295f3feb9cdeb3a6bfd30452c098587aab6337411b74368e"


@pytest.mark.parametrize(
    "wrong",
    [
        {"metric": "hamming"},
        {"analyzer": "english"},
        {"backend": ""},
        {"parameters": [1]},
        {"parameters": {"a": float("nan")}},
    ],
)
def test_a_spec_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        IndexSpec(**wrong)


def test_an_empty_corpus_has_an_index_too(near: Place) -> None:
    build = built(near.open(), near, CountingEmbedder())
    assert (build.rows, build.documents) == (0, 0)


def test_documents_without_text_count_and_have_no_rows(near: Place) -> None:
    from ragfence import Document

    fence = near.open()
    fence.documents.using(allow_empty_text=True).ingest(Document("empty", ""))
    ingested(fence, NAMES[:1])
    build = built(fence, near, CountingEmbedder())
    assert (build.rows, build.documents) == (3, 2)


def _nan(made: Any) -> Any:
    made[0, 0] = np.nan
    return made


@pytest.mark.parametrize(
    "spoil",
    [_nan, lambda made: made[:-1], lambda made: made[:, :-1], lambda made: None],
    ids=["nan", "count", "size", "none"],
)
def test_vectors_that_cannot_be_used_seal_nothing(near: Place, spoil: Any) -> None:
    fence = near.open()
    ingested(fence, NAMES)
    with pytest.raises(EmbedderInvalid):
        built(fence, near, CountingEmbedder(spoil=spoil))
    assert not list(fence.indexes.builds())
    assert not near.names("vectors/")
    assert not near.names("attempts/")
    assert built(fence, near, CountingEmbedder()).decision is Decision.NEW


def test_an_index_in_a_folder_is_the_same_for_processes_that_run_elsewhere(
    near: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative one was another place there, and the live build was retired as lost."""
    fence, relative = near.open(), IndexSpec(embedder=CountingEmbedder(), backend="lance:idx")
    ingested(fence, NAMES)
    monkeypatch.chdir(near.folder)
    with pytest.raises(UnknownStore, match="another folder") as refused:
        fence.indexes.build(relative)
    assert not list(fence.indexes.builds())
    there = refused.value.hint.removeprefix("use ").partition(",")[0]
    spec = IndexSpec(embedder=CountingEmbedder(), backend=there)
    assert fence.indexes.build(spec).decision is Decision.NEW
    monkeypatch.chdir("/")
    assert near.open().indexes.build(spec).decision is Decision.DUPLICATE


@pytest.mark.parametrize(("factor", "what"), [(0, "length 0"), (1e-30, "too small"), (1e30, "too large")])
def test_a_vector_without_a_direction_is_not_sealed_for_cosine(near: Place, factor: float, what: str) -> None:
    """No search would ever find the text."""

    def spoil(made: Any) -> Any:
        made[[text.startswith("paragraph 1 of doc-2") for text in texts]] *= factor
        return made

    class Spoiling(CountingEmbedder):
        def embed(self, asked: Any) -> Any:
            texts[:] = asked
            return super().embed(asked)

    fence, texts = near.open(), list[str]()
    ingested(fence, NAMES)
    with pytest.raises(EmbedderInvalid, match=f"{what}.*text number 1 of document 'doc-2'"):
        built(fence, near, Spoiling(spoil=spoil))
    assert not list(fence.indexes.builds())
    assert not near.names("attempts/")
    if factor == 0:
        dot = fence.indexes.build(spec_in(near.folder, Spoiling(spoil=spoil), metric="dot"))
        assert dot.rows == 3 * len(NAMES), "other metrics have use for it"


@pytest.mark.parametrize("start", ["whole", "from a base"])
@pytest.mark.parametrize("fault", ["missing", "foreign", "vector", "nan", "no id"])
def test_what_is_not_read_back_as_it_was_written_is_not_sealed(
    near: Place, fault: str, start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fence, embedder = near.open(), CountingEmbedder()
    ingested(fence, NAMES)
    spec = spec_in(near.folder, embedder)
    backend: Any = fence.indexes.backend(spec.backend)
    before = [fence.indexes.build(spec).physical] if start == "from a base" else []
    if before:
        ingested(fence, NAMES[:1], edition=1)
    plain, read = backend.read, []

    def spoiled(physical: str, columns: Any = None) -> Any:
        read.append(physical)
        for table in plain(physical, columns):
            if physical in before:
                yield table
            elif fault == "missing":
                yield pa.concat_tables([table.slice(0, 1), table.slice(2)])
            elif fault == "foreign":
                ids = table.column("snippet_id").to_pylist()
                yield table.set_column(0, "snippet_id", [[ids[0], "0" * 32, *ids[2:]]])
            elif fault == "no id":
                yield table.set_column(0, "snippet_id", [["no id", *table.column("snippet_id").to_pylist()[1:]]])
            elif fault == "nan":
                values = np.stack(table.column("vector").to_numpy(zero_copy_only=False))
                values[-1, -1] = np.nan
                yield table.set_column(table.num_columns - 1, "vector", [list(values)]).cast(table.schema)
            else:
                values = np.stack(table.column("vector").to_numpy(zero_copy_only=False))[::-1]
                yield table.set_column(table.num_columns - 1, "vector", [list(values)]).cast(table.schema)

    monkeypatch.setattr(backend, "read", spoiled)
    with pytest.raises(BuildUnverified) as refused:
        fence.indexes.build(spec)
    # The row that is wrong is none of the sample.
    wrong = {"missing": (1, 0), "foreign": (1, 1)}.get(fault)
    seen = refused.value.checks
    assert wrong is None or (seen["missing"], seen["foreign"]) == wrong
    assert read[:-1] == before, "what is copied was read, then what was written"
    assert len(list(fence.indexes.builds())) == len(before)
    assert backend.physicals() == before


@pytest.mark.parametrize("metric", ["cosine", "dot", "l2"])
def test_every_vector_is_compared_also_where_a_sample_is_searched_for(
    near: Place, metric: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One coordinate of one vector of many is wrong, in a row that nobody searches for."""
    fence, embedder = near.open(indexes={"max_self_recall_sample": 2}), CountingEmbedder()
    ingested(fence, [f"doc-{at}" for at in range(40)])
    spec = spec_in(near.folder, embedder, metric=metric)
    sound = fence.indexes.build(spec)
    assert (sound.seal.checks["vectors_compared"], sound.seal.checks["vectors_equal"]) == (sound.rows, sound.rows)
    assert sound.seal.checks["self_recall_of"] == 2
    ingested(fence, ["one-more"])
    backend: Any = fence.indexes.backend(spec.backend)
    plain = backend.read

    def spoiled(physical: str, columns: Any = None) -> Any:
        for table in plain(physical, columns):
            if physical == sound.physical:
                yield table
                continue
            values = np.stack(table.column("vector").to_numpy(zero_copy_only=False))
            values[-2, 3] += 0.01 * np.linalg.norm(values[-2])
            yield table.set_column(table.num_columns - 1, "vector", [list(values)]).cast(table.schema)

    monkeypatch.setattr(backend, "read", spoiled)
    with pytest.raises(BuildUnverified, match=f"{sound.rows + 2:,} of {sound.rows + 3:,} vectors"):
        fence.indexes.build(spec)


@pytest.mark.parametrize(
    ("rows", "exact", "size"),
    [(0, True, 0), (3, True, 3), (1_000, True, 64), (38_595, True, 51), (500_000, True, 4), (500_000, False, 64)],
)
def test_the_sample_that_is_searched_for_goes_by_the_size_of_the_index(rows: int, exact: bool, size: int) -> None:
    assert sample_size(rows, 64, exact=exact) == size


def test_a_snapshot_that_was_changed_is_not_built(near: Place) -> None:
    fence, embedder = near.open(), CountingEmbedder()
    ingested(fence, NAMES[:1])
    built(fence, near, embedder)
    (name,) = near.names("corpora/")
    data = near.kept.get(name)
    assert data is not None
    ingested(fence, NAMES[1:])
    digest = fence.documents.corpus_digest()
    near.kept.put_new(f"default/corpora/{digest.removeprefix('sha256:')}", data)
    with pytest.raises(FormatCorrupt):
        built(fence, near, embedder)


def test_a_takeover_after_an_hour_of_edits_builds_the_snapshot_that_the_hash_names(near: Place) -> None:
    fence, embedder = near.open(owner="one"), CountingEmbedder()
    ingested(fence, NAMES)
    before, digest = live_snippets(fence), fence.documents.corpus_digest()
    taken: list[Build] = []

    def overtake() -> None:
        other = near.open(owner="two")
        ingested(other, NAMES[:3], edition=1)
        other.documents.retract(NAMES[4])
        ingested(other, ["new-one"])
        near.clock.advance(3_600_000)
        spec = spec_in(near.folder, embedder)
        taken.append(elsewhere(lambda: other.indexes.build(spec, corpus=digest)))

    with at_point(building.BEFORE_SEALING, overtake):
        build = elsewhere(lambda: built(fence, near, embedder))
    assert build.seal == taken[0].seal
    assert taken[0].receipt.flags.takeover
    assert shown(rows_of(fence, build)) == before
    assert set(embedder.seen.values()) == {1}
    # The zombie has dropped what it wrote.
    assert fence.indexes.backend(build.seal.backend).physicals() == [build.physical]
    assert not near.names("attempts/")


def test_an_unknown_corpus_cannot_be_built(near: Place) -> None:
    fence = near.open()
    with pytest.raises(SnapshotGone):
        fence.indexes.build(spec_in(near.folder, CountingEmbedder()), corpus="sha256:" + "0" * 64)


def test_who_comes_while_it_is_built_waits_or_is_told(memory: Place) -> None:
    fence, embedder = memory.open(), CountingEmbedder()
    ingested(fence, NAMES)
    answers: list[Any] = []

    def ask() -> None:
        try:
            memory.open().indexes.build(spec_in(memory.folder, embedder), wait_s=0)
        except InFlight as refused:
            answers.append(refused)

    def visit() -> None:
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()

    with at_point(building.BEFORE_VERIFY, visit):
        built(fence, memory, embedder)
    assert [type(answer) for answer in answers] == [InFlight]


def test_explain_says_which_input_changed(near: Place) -> None:
    fence, embedder = near.open(), CountingEmbedder()
    ingested(fence, NAMES)
    first = built(fence, near, embedder)
    ingested(fence, NAMES[:2], edition=1)
    ingested(fence, ["more"])
    fence.documents.retract(NAMES[5])
    told = fence.indexes.explain(spec_in(near.folder, embedder, metric="dot"), against=first.index_hash)
    assert told.differing == ("corpus", "metric")
    assert told.state == "not built"
    assert told.documents is not None
    assert (told.documents.added, told.documents.removed, told.documents.changed) == (1, 1, 2)
    same = fence.indexes.explain(spec_in(near.folder, CountingEmbedder("2")), against=first.index_hash)
    assert same.differing == ("corpus", "embedder")


def test_two_builds_are_compared_also_when_one_is_retired(near: Place) -> None:
    fence, embedder = near.open(), CountingEmbedder()
    ingested(fence, NAMES)
    first = built(fence, near, embedder)
    ingested(fence, NAMES[:2], edition=1)
    second = fence.indexes.build(spec_in(near.folder, embedder, metric="l2"))
    fence.indexes.gc(dry_run=False, min_age_s=0)
    told = fence.indexes.compare(second.index_hash, first.index_hash)
    assert told.state == "retired"
    assert told.differing == ("corpus", "metric")
    assert told.documents is not None
    assert told.documents.changed == 2
    with pytest.raises(NotSealed, match="no build"):
        fence.indexes.compare(second.index_hash, "0" * 64)


def test_rows_that_were_dropped_behind_our_back_are_built_again(near: Place) -> None:
    fence, embedder = near.open(), CountingEmbedder()
    ingested(fence, NAMES)
    first = built(fence, near, embedder)
    fence.indexes.backend(first.seal.backend).drop(first.physical)
    again = built(fence, near, embedder)
    assert (again.index_hash, again.decision) == (first.index_hash, Decision.NEW)
    assert shown(rows_of(fence, again)) == live_snippets(fence)
    assert set(embedder.seen.values()) == {1}


def test_gc_knows_from_the_lease_that_a_builder_is_dead(near: Place) -> None:
    fence, embedder = near.open(), CountingEmbedder()
    ingested(fence, NAMES)
    seen: list[int] = []

    def collect() -> None:
        """While it builds it is left alone."""
        report = elsewhere(lambda: near.open().indexes.gc(dry_run=False, min_age_s=0))
        seen.append(len(report.pending))

    with at_point(building.BEFORE_VERIFY, collect):
        build = built(fence, near, embedder)
    assert seen == [1]
    fence.aliases.swap("docs", build.index_hash)
    backend = fence.indexes.backend(build.seal.backend)
    ingested(fence, NAMES[:1], edition=1)

    def freeze() -> None:
        near.let_leases_run_out()
        report = elsewhere(lambda: near.open().indexes.gc(dry_run=False, min_age_s=0))
        assert len(report.dropped) == 1

    with at_point(building.BEFORE_SEALING, freeze):
        second = built(fence, near, embedder)  # loses its number, and is made again
    assert second.number == 2
    assert sorted(backend.physicals()) == sorted([build.physical, second.physical])
