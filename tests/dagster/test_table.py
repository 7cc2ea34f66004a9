"""The value of the ingest asset: what the assets downstream of it get, in this run and in later ones."""

from __future__ import annotations

import json
import os
import pickle
import uuid
import warnings
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest

import ragfence
from ragfence.core.document import Document
from ragfence.dagster import SHARD_PARTITIONS, IngestTable, build_ingest_asset
from ragfence.documents.sync.sync import PAGE
from tests.dagster.table_job import Rows, job_of_table, rows_of
from tests.dagster.test_assets import shards_of
from tests.dagster.world import NAMES, World, plain, told
from tests.indexes.building import text_of


@pytest.fixture(params=["sqlite and a folder", "valkey and seaweedfs"])
def stores(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TABLE_STORE", str(tmp_path / "fence"))
    monkeypatch.setenv("TABLE_TENANT", f"table-{uuid.uuid4().hex[:12]}")
    if request.param != "sqlite and a folder":
        request.getfixturevalue("s3_env")
        s3 = request.getfixturevalue("seaweed_server")
        monkeypatch.setenv("TABLE_STORE", request.getfixturevalue("valkey_server").url)
        monkeypatch.setenv("TABLE_OBJECTS", f"s3://{s3.bucket}/dagster-table?endpoint_url={s3.url}")


def ran(world: World, name: str, tmp_path: Path) -> Rows:
    """What the asset downstream got of a run of the whole job."""
    with (
        dg.DagsterInstance.get() as instance,
        dg.execute_job(dg.reconstructable(job_of_table), instance=instance, raise_on_error=True) as result,
    ):
        assert result.success
    answer = json.loads((tmp_path / f"{name}.json").read_text())
    alone = os.environ["TABLE_EXECUTOR"] == "multiprocess"
    assert (answer["pid"] != os.getpid()) is alone
    rows: Rows = answer["rows"]
    return rows


@pytest.mark.parametrize(
    ("executor", "io"), [("in process", "ours"), ("multiprocess", "ours"), ("in process", "default")]
)
def test_a_downstream_asset_gets_the_snippet_ids_of_the_first_run(
    stores: None, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, executor: str, io: str
) -> None:
    world.write_all()
    for name, value in (("SOURCE", str(world.source)), ("OUT", str(tmp_path)), ("EXECUTOR", executor), ("IO", io)):
        monkeypatch.setenv(f"TABLE_{name}", value)
    first = ran(world, "paged", tmp_path)
    assert set(first) == {f"{name}.txt" for name in NAMES}
    env = os.environ
    objects = env.get("TABLE_OBJECTS")
    with ragfence.open(env["TABLE_STORE"], objects=objects, tenant=env["TABLE_TENANT"]) as fence:
        for doc_id, (content_hash, decision, snippet_ids) in first.items():
            stored = fence.documents.get(doc_id)
            assert stored is not None
            assert decision == "new"
            assert content_hash == stored.content_hash
            assert snippet_ids == list(stored.snippet_ids) != []
    again = ran(world, "paged", tmp_path)  # not even read
    assert {doc_id: (row[0], row[2]) for doc_id, row in again.items()} == {
        doc_id: (row[0], row[2]) for doc_id, row in first.items()
    }
    assert {row[1] for row in again.values()} == {"duplicate"}
    if (executor, io) == ("in process", "ours"):
        assert json.loads((tmp_path / "arrow.json").read_text())["rows"] == again


def taking(kind: Any, seen: list[Any], **more: Any) -> dg.AssetsDefinition:
    def report(documents: Any) -> None:
        seen.append(documents)

    report.__annotations__ = {"documents": kind, "return": None}
    made = dg.asset(**more)(report)
    assert isinstance(made, dg.AssetsDefinition)
    return made


def test_an_edited_document_alone_has_other_ids(world: World) -> None:
    world.write_all()
    seen: list[Any] = []
    world.run(world.documents(), taking(pa.Table, seen))
    world.write("pay", text_of("pay", 1))
    world.run(world.documents(), taking(pa.Table, seen))
    before, after = map(rows_of, seen)
    changed = {doc_id for doc_id in before if before[doc_id][2] != after[doc_id][2]}
    assert changed == {"pay.txt"}
    assert {doc_id: row[1] for doc_id, row in after.items()} == {
        "leave.txt": "duplicate",
        "pay.txt": "new",
        "travel.txt": "duplicate",
    }
    assert len(set(before["pay.txt"][2]) & set(after["pay.txt"][2])) == 2  # unchanged snippets keep their ids


def test_documents_that_were_refused_are_rows_without_ids(world: World) -> None:
    documents = build_ingest_asset([Document("good", "Some text."), Document("bad\0", "Some text.")])
    seen: list[Any] = []
    world.run(documents, taking(pa.Table, seen))
    rows = rows_of(seen[0])
    assert rows["good"][1:] == ["new", rows["good"][2]]
    assert rows["bad\0"] == ["", "refused", []]


def test_an_asset_that_runs_later_gets_the_table_of_the_newest_run(world: World) -> None:
    world.write_all()
    world.run(world.documents())
    world.write("sick", text_of("sick"))
    world.run(world.documents())
    seen: list[Any] = []
    report = taking(IngestTable, seen)
    world.run(world.documents(), report, selection=[report])
    assert set(rows_of(seen[0].to_arrow())) == {f"{name}.txt" for name in (*NAMES, "sick")}


def test_an_asset_before_the_first_run_is_told_to_materialize_the_documents(world: World) -> None:
    report = taking(IngestTable, [])
    result = world.run(world.documents(), report, selection=[report], ok=False)
    (failed,) = [event for event in result.all_events if event.is_step_failure]
    assert "has no table yet. Materialize it first." in str(failed.step_failure_data.error)


def test_a_data_frame_is_to_be_had(world: World) -> None:
    pd = pytest.importorskip("pandas", reason="pandas comes with ragfence[dev]")
    world.write_all()
    seen: list[Any] = []
    world.run(world.documents(), taking(pd.DataFrame, seen))
    (frame,) = seen
    assert list(frame.columns) == ["doc_id", "content_hash", "decision", "snippet_ids"]
    assert sorted(frame.doc_id) == sorted(f"{name}.txt" for name in NAMES)
    assert frame.snippet_ids.map(len).tolist() == [3, 3, 3]


def test_a_large_corpus_is_read_page_by_page_and_its_value_stays_small(world: World) -> None:
    documents = build_ingest_asset([Document(f"d{at:05}", f"Text {at}.") for at in range(2 * PAGE + 10)])
    seen: list[Any] = []
    world.run(documents, taking(IngestTable, seen))
    (table,) = seen
    assert [page.num_rows for page in table.pages()] == [PAGE, PAGE, 10]
    assert len(table) == table.rows == table.snippets == 2 * PAGE + 10
    assert len(pickle.dumps(table)) < 1000
    assert table.to_reader().read_all() == table.to_arrow()


ALL_SHARDS = {
    "dagster/asset_partition_range_start": SHARD_PARTITIONS.get_first_partition_key() or "",
    "dagster/asset_partition_range_end": SHARD_PARTITIONS.get_last_partition_key() or "",
}


def test_a_backfill_in_one_run_gives_each_partition_its_own_rows(world: World) -> None:
    names = [f"d{at}" for at in range(40)]
    world.write_all(names)
    documents = world.documents(shards=True)
    world.run(documents, tags=ALL_SHARDS)
    by_shard = shards_of(names)
    seen: list[Any] = []
    same = taking(IngestTable, seen, partitions_def=SHARD_PARTITIONS)
    for shard, held in list(by_shard.items())[:3]:
        world.run(documents, same, selection=[same], partition_key=shard)
        assert sorted(rows_of(seen.pop().to_arrow())) == sorted(f"{name}.txt" for name in held)
    whole = taking(IngestTable, seen)  # not partitioned: it depends on all of them
    world.run(documents, whole, selection=[whole])
    first = rows_of(seen.pop().to_arrow())
    assert sorted(first) == sorted(f"{name}.txt" for name in names)
    world.run(documents, tags=ALL_SHARDS)  # again
    world.run(documents, whole, selection=[whole])
    again = rows_of(seen.pop().to_arrow())
    assert {doc_id: row[2] for doc_id, row in again.items()} == {doc_id: row[2] for doc_id, row in first.items()}
    assert {row[1] for row in again.values()} == {"duplicate"}


def test_partitions_that_run_one_by_one_work_with_the_default_io_manager(world: World) -> None:
    names = [f"d{at}" for at in range(10)]
    world.write_all(names)
    documents = world.documents(shards=True, io_manager_key="io_manager")
    shard, held = next(iter(shards_of(names).items()))
    seen: list[Any] = []
    policy = documents.backfill_policy
    assert policy is not None
    assert policy.max_partitions_per_run == 1  # Dagster's own IO manager takes no more
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dg.BetaWarning)  # backfill policies
        same = taking(IngestTable, seen, partitions_def=SHARD_PARTITIONS, backfill_policy=policy)
    storage = {"io_manager": dg.FilesystemIOManager(base_dir=str(world.folder / "storage"))}
    world.run(documents, same, partition_key=shard, resources=storage)
    assert sorted(rows_of(seen[0].to_arrow())) == sorted(f"{name}.txt" for name in held)


def test_the_metadata_shows_the_first_rows(world: World) -> None:
    world.write_all()
    result = world.run(world.documents())
    (event,) = result.asset_materializations_for_node("documents")
    shown = plain(event.metadata)["preview"]
    assert [row["doc_id"] for row in shown] == sorted(f"{name}.txt" for name in NAMES)
    assert {row["snippets"] for row in shown} == {3}
    with world.open() as fence:
        stored = fence.documents.get("leave.txt")
        assert shown[0]["snippet_ids"] == ", ".join(stored.snippet_ids)
    assert told(result, "documents")["dagster/row_count"] == 3
    schema = event.metadata["dagster/column_schema"]
    assert [column.name for column in schema.value.columns] == ["doc_id", "content_hash", "decision", "snippet_ids"]
    value: Any = result.output_for_node("documents")
    assert IngestTable.from_json(event.metadata["table"].value) == value
