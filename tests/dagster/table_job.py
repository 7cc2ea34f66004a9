"""A job whose steps can run in processes of their own: `documents`, and two assets that use its table."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa

from ragfence.dagster import FenceResource, IngestTable, build_ingest_asset

Rows = dict[str, list[Any]]


def rows_of(table: Any) -> Rows:
    """By doc_id: content_hash, decision, snippet_ids, and the process that read them."""
    return {row["doc_id"]: [row["content_hash"], row["decision"], row["snippet_ids"]] for row in table.to_pylist()}


def job_of_table() -> dg.JobDefinition:
    """Configured by the environment, which the processes of the steps inherit."""
    env = os.environ
    out = Path(env["TABLE_OUT"])
    more = {"io_manager_key": "io_manager"} if env.get("TABLE_IO") == "default" else {}
    documents = build_ingest_asset(env["TABLE_SOURCE"], **more)

    @dg.asset
    def paged(documents: IngestTable) -> None:
        rows: Rows = {}
        for page in documents.pages():
            rows |= rows_of(page)
        (out / "paged.json").write_text(json.dumps({"pid": os.getpid(), "rows": rows}))

    assets: list[Any] = [documents, paged]
    if env.get("TABLE_EXECUTOR") != "multiprocess" and not more:  # every step is a process that imports Dagster

        @dg.asset
        def arrow(documents: pa.Table) -> None:
            (out / "arrow.json").write_text(json.dumps({"pid": os.getpid(), "rows": rows_of(documents)}))

        assets.append(arrow)
    executor = dg.multiprocess_executor if env.get("TABLE_EXECUTOR") == "multiprocess" else dg.in_process_executor
    resource = FenceResource(store=env["TABLE_STORE"], objects=env.get("TABLE_OBJECTS", ""), tenant=env["TABLE_TENANT"])
    defs = dg.Definitions(
        assets=assets,
        jobs=[dg.define_asset_job("tables", "*")],
        resources={"fence": resource},
        executor=executor,
    )
    return defs.resolve_job_def("tables")
