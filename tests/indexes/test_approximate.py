"""Above the policy's limit an index is approximate; its recall is measured before the seal, and a gate judges it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ragfence import Document, Fence
from ragfence.errors import GateFailed, ValidationError
from ragfence.indexes.backends.backend import Backend, FoundRow, NearRow, Shape, row_schema
from ragfence.indexes.backends.lance import LanceBackend
from ragfence.indexes.backends.lance_indexes import approximate
from ragfence.indexes.build_log import BuildEntry
from ragfence.indexes.embedders.embedder import EmbedderId
from ragfence.indexes.gates import Candidate, Gates, judge
from ragfence.indexes.spec import IndexSpec
from ragfence.indexes.verification import ExactNeighbours, measured_recall
from ragfence.stores.object_log import Numbered
from tests.documents.chunkers import Paragraphs
from tests.documents.places import Place
from tests.indexes.building import spec_in

ROWS = 600
DIMENSION = 16
POOR = {"num_partitions": 24, "nprobes": 1, "num_sub_vectors": 2, "refine_factor": 1}


class Scattered:
    """Vectors without any order: the hardest case for what partitions them."""

    name = "scattered"
    revision = "1"
    dimension = DIMENSION

    def __init__(self, normalised: bool = False) -> None:
        self.normalised = normalised

    def embed(self, texts: Any) -> Any:
        return np.stack([_vector(text) for text in texts])


def _vector(text: str) -> Any:
    made = np.random.default_rng(list(text.encode())).standard_normal(DIMENSION).astype(np.float32)
    return made / np.linalg.norm(made)


def filled(place: Place, rows: int = ROWS, **indexes: Any) -> Fence:
    fence = place.open(indexes={"min_self_recall": 0, **indexes})
    documents = fence.documents.using(chunker=Paragraphs())
    docs = [Document(f"d{at}", "\n\n".join(f"{at} {each}" for each in range(20))) for at in range(rows // 20)]
    assert not [receipt for receipt in documents.ingest_many(docs) if receipt.failed]
    return fence


def test_a_build_above_the_limit_is_approximate_and_its_recall_is_sealed(near: Place) -> None:
    fence = filled(near, ann_above=ROWS - 1, recall_sample=50, min_ann_recall=0.6)
    build = fence.indexes.build(spec_in(near.folder, Scattered()))
    assert (build.rows, build.seal.inputs["index"]) == (ROWS, "ivf_pq")
    checks = fence.indexes.get(build.index_hash).seal.checks  # type: ignore[union-attr]
    assert (checks["recall_of"], checks["recall_k"]) == (50, 10)
    assert checks["recall"] > 0.6
    assert checks["recall"] == brute_recall(fence.indexes.backend(build.seal.backend), build.physical, "cosine", 50)
    swapped = fence.aliases.swap("docs", build.index_hash)
    (gate,) = (each for each in swapped.gates if each.gate == "recall")
    assert (gate.ok, gate.value, gate.limit) == (True, checks["recall"], 0.6)
    assert fence.search("docs", "3 4", k=1)[0].text == "3 4"
    assert fence.indexes.build(spec_in(near.folder, Scattered())).decision == "duplicate"


def test_up_to_the_limit_it_is_the_exact_index_that_it_always_was(near: Place) -> None:
    fence = filled(near, ann_above=ROWS)
    auto = fence.indexes.build(spec_in(near.folder, Scattered()))
    assert auto.seal.inputs["index"] == "flat"
    assert "recall" not in auto.seal.checks
    flat = fence.indexes.build(spec_in(near.folder, Scattered(), index="flat"))
    assert (flat.index_hash, flat.decision) == (auto.index_hash, "duplicate")
    assert "recall" not in {each.gate for each in fence.aliases.swap("docs", auto.index_hash).gates}
    small = near.open(indexes={"ann_above": 0, "min_self_recall": 0})
    assert small.indexes.build(spec_in(near.folder, Scattered(), index="flat")).index_hash == auto.index_hash
    explained = small.indexes.explain(spec_in(near.folder, Scattered()), against=auto.index_hash)
    assert (explained.differing, explained.inputs["index"]) == (("index", "parameters"), "ivf_pq")


def test_an_index_that_finds_too_little_is_not_swapped_to(near: Place) -> None:
    fence = filled(near)
    poor = fence.indexes.build(spec_in(near.folder, Scattered(), index="ivf_pq", parameters=POOR))
    recall = poor.seal.checks["recall"]
    assert recall < 0.8
    assert recall == brute_recall(fence.indexes.backend(poor.seal.backend), poor.physical, "cosine", 128)
    with pytest.raises(GateFailed) as refused:
        fence.aliases.swap("docs", poor.index_hash)
    (failed,) = (each for each in refused.value.report if not each["ok"])
    assert (failed["gate"], failed["value"], failed["limit"]) == ("recall", recall, 0.9)
    assert '"flat"' in failed["detail"]
    exact = fence.indexes.build(spec_in(near.folder, Scattered(), index="flat"))
    assert fence.aliases.swap("docs", exact.index_hash).changed
    with pytest.raises(GateFailed):
        fence.aliases.swap("docs", poor.index_hash, gates=Gates(min_ann_recall=recall + 0.001))
    assert fence.aliases.swap("docs", poor.index_hash, gates=Gates(min_ann_recall=recall)).changed
    fence.aliases.swap("docs", exact.index_hash)
    forced = fence.aliases.swap("docs", poor.index_hash, force=True, reason="on purpose")
    assert forced.forced


def test_a_build_that_was_sealed_without_its_recall_is_measured_at_the_swap(near: Place) -> None:
    fence = filled(near)
    made = fence.indexes.build(spec_in(near.folder, Scattered(), index="ivf_pq", parameters=POOR))
    entry = fence.indexes.get(made.index_hash)
    assert entry is not None
    assert entry.seal is not None
    checks = {name: value for name, value in entry.seal.checks.items() if not name.startswith("recall")}
    old = replace(entry, seal=replace(entry.seal, checks=checks))
    read = BuildEntry.decode("old", Numbered(old.number, old.encode()))
    candidate = Candidate(read, fence.indexes.backend(made.seal.backend), fence.indexes.embedder_for)
    limits = Gates().limits(fence.policy.indexes)
    results = {each.gate: each for each in judge(limits, candidate, None, None)}
    assert (results["recall"].ok, results["recall"].value) == (False, made.seal.checks["recall"])


def test_the_rows_of_a_corpus_are_counted_once_and_stored(near: Place) -> None:
    fence = filled(near, ann_above=ROWS - 1)
    first = fence.indexes.build(spec_in(near.folder, Scattered()))
    (name,) = near.names("corpora-rows/")
    values = {"version": 1, "documents": ROWS // 20, "rows": ROWS}
    assert json.loads(near.kept.get(name) or b"") == values
    near.kept.delete([name])  # as with a snapshot of an earlier version
    again = near.open(indexes={"ann_above": ROWS - 1, "min_self_recall": 0})
    assert again.indexes.build(spec_in(near.folder, Scattered())).index_hash == first.index_hash
    assert json.loads(near.kept.get(name) or b"") == values


def test_what_partitions_by_direction_is_not_chosen_for_dot_products_of_any_length(tmp_path: Path) -> None:
    backend = LanceBackend(tmp_path)
    chosen = {
        (metric, normalised): IndexSpec(metric=metric)  # type: ignore[arg-type]
        .resolved(1_000, backend, EmbedderId("e", "1", 64, normalised), 999)
        .index
        for metric in ("cosine", "dot", "l2")
        for normalised in (True, False)
    }
    assert {each for each, index in chosen.items() if index == "flat"} == {("dot", False)}


def test_what_lancedb_is_best_at_never_changes() -> None:
    """It is part of the INDEX_HASH: another choice would build every large index anew."""
    parameters = {"num_partitions": 707, "sample_rate": 64, "max_iterations": 16, "refine_factor": 10}
    assert approximate(500_000, 256) == ("ivf_pq", {**parameters, "num_sub_vectors": 32, "nprobes": 58})
    parameters["num_partitions"] = 316
    assert approximate(100_001, 100) == ("ivf_pq", {**parameters, "num_sub_vectors": 10, "nprobes": 26})


def test_parameters_need_the_name_of_an_index() -> None:
    with pytest.raises(ValidationError, match="need a named index"):
        IndexSpec(parameters={"nprobes": 3})


@pytest.mark.parametrize("metric", ["cosine", "dot", "l2"])
def test_recall_is_the_share_of_what_exact_search_finds(metric: Any, tmp_path: Path) -> None:
    """Also among equal rows, of which any may be found."""
    rng = np.random.default_rng(7)
    vectors = rng.standard_normal((1_000, DIMENSION)).astype(np.float32)
    exact, half = LanceBackend(tmp_path), _Half(tmp_path)
    shape, table = Shape(DIMENSION, metric, "flat", {}), _rows(vectors)
    exact.write("rf-a", shape, [table.slice(0, 400), table.slice(400)])
    assert measured_recall(exact, "rf-a", metric, 100, 1_000) == {"recall": 1.0, "recall_of": 100, "recall_k": 10}
    if metric != "dot":  # by which longer vectors are nearer than the row itself
        assert measured_recall(half, "rf-a", metric, 100, 1_000)["recall"] == 0.5556  # five of nine
    vectors[500:560] = vectors[500]
    exact.write("rf-b", shape, [_rows(vectors)])
    assert measured_recall(exact, "rf-b", metric, 100, 1_000)["recall"] == 1.0


def test_of_no_other_rows_everything_is_found(tmp_path: Path) -> None:
    backend = LanceBackend(tmp_path)
    backend.write("rf-a", Shape(DIMENSION, "cosine", "flat", {}), [_rows(np.ones((1, DIMENSION), np.float32))])
    assert measured_recall(backend, "rf-a", "cosine", 10, 1)["recall"] == 1.0
    assert ExactNeighbours("cosine", {}).measure(backend, "rf-a")["recall"] == 1.0


class _Half(LanceBackend):
    """Finds every other of the rows that there are to be found."""

    def search(self, physical: str, vector: Any, k: int) -> list[FoundRow]:
        own, *others = super().search(physical, vector, 2 * k)
        return [own, *others[: k - 1 : 2]]

    def search_many(self, physical: str, vectors: Any, k: int) -> list[list[NearRow]]:
        return [
            [NearRow(each.snippet_id, each.score) for each in self.search(physical, vector, k)] for vector in vectors
        ]


def _rows(vectors: Any) -> Any:
    count = len(vectors)
    texts = [f"{at:032x}" for at in range(count)]
    columns = [texts, texts, texts, [0] * count, [0] * count, [1] * count, [1] * count, texts, texts, ["{}"] * count]
    schema = row_schema(DIMENSION)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=False)]
    return pa.Table.from_arrays(
        [*arrays, pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), DIMENSION)], schema=schema
    )


def brute_recall(backend: Backend, physical: str, metric: str, size: int) -> float:
    """By comparing every sampled row with every row; the sample is evenly spread over the rows as they are read."""
    table = pa.concat_tables(backend.read(physical))
    ids = table.column("snippet_id").to_pylist()
    vectors = np.stack(table.column("vector").to_numpy(zero_copy_only=False))
    step = -(-len(ids) // size)
    shares = []
    for at in range(0, len(ids), step):
        scores = vectors @ vectors[at]
        scores[at] = -np.inf
        nearest = {ids[each] for each in np.argsort(-scores)[:9]}
        found = [each.snippet_id for each in backend.search(physical, vectors[at], 10) if each.snippet_id != ids[at]]
        shares.append(len(nearest.intersection(found[:9])) / 9)
    return round(float(np.mean(shares)), 4)
