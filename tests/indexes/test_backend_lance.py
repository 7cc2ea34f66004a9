"""LanceDB: what the contract does not ask for. Indexes, files on disk, forks, processes, damage."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ragfence.errors import BuildMissing, FormatCorrupt, StoreAuth, StoreUnavailable, UnknownStore, ValidationError
from ragfence.indexes.backends.backend import Pointer, Shape
from ragfence.indexes.backends.lance import LanceBackend
from ragfence.indexes.backends.registry import default_lance_location
from ragfence.stores.s3 import S3Objects
from ragfence.testing.contracts.backends import nearness, read_all, rows, vectors_of
from tests.servers import S3Server

PARAMETERS: dict[str, dict[str, Any]] = {
    "ivf_flat": {"num_partitions": 4, "nprobes": 4},
    "ivf_pq": {"num_partitions": 4, "num_sub_vectors": 8, "nprobes": 4, "refine_factor": 40},
    "ivf_hnsw_sq": {"num_partitions": 1, "m": 12, "ef_construction": 60, "ef": 60},
}


@pytest.fixture
def backend(tmp_path: Path) -> LanceBackend:
    return LanceBackend(tmp_path / "lance")


@pytest.mark.parametrize("index", PARAMETERS)
@pytest.mark.parametrize("metric", ["cosine", "dot", "l2"])
def test_an_approximate_index_finds_nearly_what_an_exact_one_does(
    backend: LanceBackend, index: str, metric: Any
) -> None:
    table = rows(1_500, dimension=16)
    shape = Shape(16, metric, index, PARAMETERS[index])
    backend.write("rf-a", shape, [table])
    backend.finish("rf-a", shape)
    hits = 0
    for query in vectors_of(rows(10, dimension=16, seed=4), 16):
        scores = nearness(metric, vectors_of(table, 16), query)
        found = backend.search("rf-a", query, 10)
        hits += len({each.ordinal for each in found} & set(np.argsort(-scores)[:10].tolist()))
        assert max(abs(each.score - scores[each.ordinal]) for each in found) < 1e-3
        assert [each.score for each in found] == sorted((each.score for each in found), reverse=True)
    assert hits >= 80


@pytest.mark.parametrize(
    ("index", "parameters"),
    [
        ("ivf_pq", {"num_partitions": 40, "nprobes": 1, "num_sub_vectors": 2, "refine_factor": 1}),
        ("ivf_hnsw_sq", {"num_partitions": 40, "nprobes": 1, "m": 4, "ef_construction": 10, "ef": 10}),
    ],
)
@pytest.mark.parametrize("metric", ["cosine", "dot", "l2"])
def test_many_searches_of_an_approximate_index_miss_what_each_misses_alone(
    backend: LanceBackend, index: str, parameters: Any, metric: Any
) -> None:
    """Recall is measured by many at once, and readers search for one: the figure must be theirs."""
    table, shape = rows(1_500, dimension=16), Shape(16, metric, index, parameters)
    backend.write("rf-a", shape, [table])
    backend.finish("rf-a", shape)
    queries = vectors_of(rows(40, dimension=16, seed=4), 16)
    alone = [[each.snippet_id for each in backend.search("rf-a", query, 10)] for query in queries]
    exact = [np.argsort(-nearness(metric, vectors_of(table, 16), query))[:10] for query in queries]
    assert alone != [[f"{at:032x}" for at in nearest] for nearest in exact]
    assert [[each.snippet_id for each in found] for found in backend.search_many("rf-a", queries, 10)] == alone


@pytest.mark.parametrize("index", PARAMETERS)
@pytest.mark.parametrize("count", [0, 1, 100])
def test_too_few_rows_to_train_are_compared_one_by_one(backend: LanceBackend, index: str, count: int) -> None:
    table = rows(count)
    shape = Shape(8, index=index)
    backend.write("rf-a", shape, [table])
    backend.finish("rf-a", shape)
    query = np.ones(8, np.float32)
    expected = np.argsort(-nearness("cosine", vectors_of(table), query))[:5].tolist() if count else []
    assert [each.ordinal for each in backend.search("rf-a", query, 5)] == expected


def test_an_unknown_parameter_is_refused_with_the_known_ones(backend: LanceBackend) -> None:
    with pytest.raises(ValidationError) as refused:
        backend.check(Shape(8, index="ivf_flat", parameters={"n_probes": 3}))
    assert "max_iterations, nprobes, num_partitions, sample_rate" in refused.value.hint
    for index, parameters in (
        ("flat", {"nprobes": 3}),
        ("ivf_pq", {"num_sub_vectors": 3}),
        ("ivf_pq", {"num_bits": 5}),
        ("ivf_flat", {"num_partitions": "4"}),
        ("ivf_flat", {"num_partitions": True}),
        ("ivf_flat", {"num_partitions": 0}),
    ):
        with pytest.raises(ValidationError):
            backend.check(Shape(8, index=index, parameters=parameters))


@pytest.mark.parametrize("index", ["flat", "ivf_flat"])
@pytest.mark.parametrize("documents", [2, 40])
def test_no_file_keeps_the_text_of_a_removed_document(tmp_path: Path, index: str, documents: int) -> None:
    """Also of one that was a small part of the rows, which compaction alone would leave where they are."""
    backend, secret, kept = LanceBackend(tmp_path), secrets.token_hex(20), secrets.token_hex(20)
    table = rows(40, documents=documents)
    texts = [secret if number % documents == 1 else kept for number in range(40)]
    table = table.set_column(table.schema.get_field_index("text"), "text", pa.array(texts))
    shape = Shape(8, index=index)
    backend.write("rf-a", shape, [table])
    backend.finish("rf-a", shape)
    gone = vectors_of(table)[1].tobytes()
    before = _files_with(tmp_path, gone)
    assert _files_with(tmp_path, secret.encode())
    assert before
    backend.remove("rf-a", ["doc-1"])
    assert not _files_with(tmp_path, secret.encode())
    assert not _files_with(tmp_path, gone)
    assert not set(before) & set(_files_with(tmp_path, kept.encode()))
    assert secret not in read_all(backend, "rf-a", ["text"]).column("text").to_pylist()
    assert backend.count("rf-a") == texts.count(kept)


def test_removing_what_is_not_there_rewrites_nothing(tmp_path: Path) -> None:
    backend = LanceBackend(tmp_path)
    for index in ("flat", "ivf_flat"):
        backend.write(f"rf-{index[:3]}", Shape(8, index=index), [rows(300)])
        backend.finish(f"rf-{index[:3]}", Shape(8, index=index))
        before = _files_with(tmp_path, b"")
        backend.remove(f"rf-{index[:3]}", ["no such document", *map(str, range(1_200))])
        assert _files_with(tmp_path, b"") == before


def test_a_removal_that_was_cut_off_is_finished_by_the_next(tmp_path: Path) -> None:
    backend, secret = LanceBackend(tmp_path), secrets.token_hex(20)
    table = rows(40)
    texts = [secret if number % 5 == 1 else "other" for number in range(40)]
    table = table.set_column(table.schema.get_field_index("text"), "text", pa.array(texts))
    backend.write("rf-a", Shape(8), [table])
    backend._open("rf-a").table.delete("doc_id = 'doc-1'")  # and there it was killed
    assert _files_with(tmp_path, secret.encode())
    LanceBackend(tmp_path).remove("rf-a", ["doc-1"])
    assert not _files_with(tmp_path, secret.encode())


def test_removals_at_the_same_moment_keep_every_other_row_once_and_leave_no_file_with_their_text(
    tmp_path: Path,
) -> None:
    """Each handle is what another process has. LanceDB alone would double rows: a version it needs to find a conflict
    is deleted meanwhile."""
    handles = [LanceBackend(tmp_path) for _ in range(3)]
    for attempt in range(12):
        physical, doomed = f"rf-{attempt}", {f"doc-{at}": secrets.token_hex(20) for at in range(len(handles))}
        table = rows(60, documents=10)
        texts = [doomed.get(doc_id, "other") for doc_id in table.column("doc_id").to_pylist()]
        handles[0].write(
            physical, Shape(8), [table.set_column(table.schema.get_field_index("text"), "text", pa.array(texts))]
        )
        with ThreadPoolExecutor(len(handles)) as pool:
            jobs = [
                pool.submit(handle.remove, physical, [doc_id]) for handle, doc_id in zip(handles, doomed, strict=True)
            ]
            for job in jobs:
                job.result()
        assert handles[0].count(physical) == texts.count("other")
        for secret in doomed.values():
            assert not _files_with(tmp_path, secret.encode())


def test_a_rewrite_that_was_cut_off_leaves_no_file_after_the_next_removal(tmp_path: Path) -> None:
    backend, secret = LanceBackend(tmp_path), secrets.token_hex(20)
    table = rows(40)
    texts = [secret if number % 5 == 1 else "other" for number in range(40)]
    backend.write("rf-a", Shape(8), [table.set_column(table.schema.get_field_index("text"), "text", pa.array(texts))])
    (made,) = _files_with(tmp_path, secret.encode())
    file = tmp_path / made
    file.with_name(f"{secrets.token_hex(25)}.lance").write_bytes(file.read_bytes())  # which was never committed
    LanceBackend(tmp_path).remove("rf-a", ["doc-1"])
    assert not _files_with(tmp_path, secret.encode())


def test_a_version_that_is_cleaned_away_under_a_reader_is_not_a_missing_index(tmp_path: Path) -> None:
    reader, remover = LanceBackend(tmp_path), LanceBackend(tmp_path)
    reader.write("rf-a", Shape(8), [rows(40)])
    gone = RuntimeError("Not found: rf-a.lance/_versions/1.manifest")
    answers: list[Any] = [gone]

    def count(opened: Any) -> int:
        if answers:
            raise answers.pop()
        return int(opened.table.count_rows())

    remover.remove("rf-a", ["doc-1"])
    assert reader._act_on("rf-a", "count", count) == remover.count("rf-a")
    remover.drop("rf-a")
    answers.append(gone)
    with pytest.raises(BuildMissing):
        reader._act_on("rf-a", "count", count)


def test_a_writer_that_was_cut_off_leaves_a_name_that_can_be_dropped(backend: LanceBackend) -> None:
    def cut_off() -> Any:
        yield rows(500)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        backend.write("rf-a", Shape(8), cut_off())
    assert not backend.exists("rf-a")
    with pytest.raises(BuildMissing):
        backend.count("rf-a")
    backend.drop("rf-a")
    assert backend.physicals() == []


def test_a_zero_vector_is_near_to_nothing(backend: LanceBackend) -> None:
    table = rows(3)
    zero = pa.array([np.zeros(8, np.float32), *vectors_of(table)[1:]], table.schema.field("vector").type)
    backend.write("rf-a", Shape(8), [table.set_column(10, "vector", zero)])
    found = backend.search("rf-a", vectors_of(table)[1], 3)
    assert found[0].ordinal == 1
    assert all(np.isfinite(each.score) for each in found)


def test_damage_is_said_to_be_damage(tmp_path: Path) -> None:
    backend = LanceBackend(tmp_path)
    for name, folder, data in (("rf-a", "data", b"rubbish"), ("rf-b", "data", None), ("rf-c", "_versions", b"rubbish")):
        backend.write(name, Shape(8), [rows(20)])
        for file in (tmp_path / f"{name}.lance" / folder).iterdir():
            file.write_bytes(data) if data is not None else file.unlink()
        fresh = LanceBackend(tmp_path)
        with pytest.raises(FormatCorrupt):
            list(fresh.read(name))
    (tmp_path / "rf-other.lance").mkdir()
    with pytest.raises(BuildMissing):
        backend.count("rf-other")


def test_a_table_of_somebody_else_is_no_index(tmp_path: Path) -> None:
    import lancedb

    lancedb.connect(tmp_path).create_table("rf-foreign", pa.table({"x": [1]}))
    with pytest.raises(FormatCorrupt):
        LanceBackend(tmp_path).count("rf-foreign")


def test_of_several_processes_that_point_at_once_the_newest_generation_stays(tmp_path: Path) -> None:
    code = """
        me = int(sys.argv[2])
        for generation in range(me, 40, 4):
            backend.point("docs", f"rf-{generation}", generation)
            seen = backend.pointer("docs")
            assert seen.generation >= generation and seen.physical == f"rf-{seen.generation}", seen
        """
    processes = [_start(code, tmp_path, str(number)) for number in range(4)]
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, out + err
    assert LanceBackend(tmp_path).pointer("docs") == Pointer("rf-39", 39)


@pytest.mark.xdist_group("seaweedfs")  # slow to start: one worker only
def test_wrong_keys_buckets_and_endpoints_are_told_apart(seaweed_server: S3Server, s3_env: None) -> None:
    objects = S3Objects(seaweed_server.bucket, secrets.token_hex(8), endpoint_url=seaweed_server.url)
    uri, options = default_lance_location(objects)
    objects.close()
    with pytest.raises(StoreAuth) as refused:
        LanceBackend(uri, {**options, "aws_secret_access_key": "wrong"}).count("rf-a")
    assert "wrong" not in str(refused.value)
    with pytest.raises(StoreAuth):
        LanceBackend(uri, {**options, "aws_access_key_id": "wrong"}).physicals()
    with pytest.raises(UnknownStore):
        LanceBackend("s3://no-such-bucket/lance", options).write("rf-a", Shape(8), [rows(3)])
    nobody = {**options, "aws_endpoint": "http://127.0.0.1:9", "client_max_retries": "0"}
    with pytest.raises(StoreUnavailable):
        LanceBackend(uri, nobody).count("rf-a")


def _files_with(folder: Path, data: bytes) -> list[str]:
    files = (file for file in folder.rglob("*") if file.is_file() and file.suffix != ".lock")
    return sorted(str(file.relative_to(folder)) for file in files if data in file.read_bytes())


def _start(code: str, folder: Path, *argv: str) -> subprocess.Popen[str]:
    lines = [
        "import os, sys",
        "from ragfence.indexes.backends.lance import LanceBackend",
        "from ragfence.indexes.backends.backend import Shape",
        "from ragfence.testing.contracts.backends import rows, vectors_of",
        "backend = LanceBackend(sys.argv[1])",
        *(line.removeprefix("        ") for line in code.splitlines()),
    ]
    command = [sys.executable, "-c", "\n".join(lines), str(folder), *argv]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ})


def _run(code: str, folder: Path) -> str:
    process = _start(code, folder)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, json.dumps([out, err])
    return out
