"""One process that runs documents -> vector_index -> live_alias once, as its job says.

It writes down what its run materialized; it ends with 0 if the run succeeded. SIGTERM and SIGINT are what they are to
the processes that Dagster starts for runs.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import botocore.loaders
import botocore.session
import dagster as dg
from dagster._utils.interrupts import setup_interrupt_handlers

from ragfence.dagster import FenceResource, build_alias_asset, build_index_asset, build_ingest_asset
from ragfence.indexes.spec import IndexSpec
from ragfence.testing import kill_at
from tests.dagster.work import RunJob
from tests.dagster.world import plain
from tests.documents.chunkers import Paragraphs
from tests.indexes.attack.worker import TracingEmbedder


class FickleEmbedder(TracingEmbedder):
    def __init__(self, job: RunJob) -> None:
        super().__init__(job.trace)
        self._fails, self._hold = job.fails, job.hold
        self._steps = 0

    def spec(self) -> IndexSpec:
        """Called once in each attempt of the step."""
        self._steps += 1
        return IndexSpec(embedder=self)

    def embed(self, texts: Sequence[str]) -> Any:
        if self._steps <= self._fails:
            raise RuntimeError("the embedder is away")
        if self._hold:
            held, self._hold = Path(self._hold), ""
            held.touch()
            while held.exists():
                time.sleep(0.01)
        return super().embed(texts)


def assets_of(job: RunJob) -> list[dg.AssetsDefinition]:
    embedder = FickleEmbedder(job)
    documents = [
        build_ingest_asset(
            source, name=Path(source).name, using=lambda fence: fence.documents.using(chunker=Paragraphs())
        )
        for source in job.sources
    ]
    retries = dg.RetryPolicy(max_retries=job.retries) if job.retries else None
    index = build_index_asset(embedder.spec, deps=documents, retry_policy=retries)
    return [*documents, index, build_alias_asset(job.alias)]


NOT_JSON = ("chart", "dagster/column_schema")


def main(job: RunJob) -> int:
    os.environ["DAGSTER_HOME"] = job.home
    # Every step opens a fence, and every boto3 session parses the same megabytes again.
    botocore.session.create_loader = functools.cache(botocore.loaders.create_loader)
    setup_interrupt_handlers()
    assets = assets_of(job)
    resource = FenceResource(store=job.store, objects=job.objects, tenant=job.tenant, policy=job.policy)
    with dg.DagsterInstance.get() as instance:
        Path(job.ready).touch()
        while not os.path.exists(job.go):
            time.sleep(0.002)
        with kill_at(job.kill_at) if job.kill_at else contextlib.nullcontext():
            result = dg.materialize(assets, instance=instance, resources={"fence": resource}, raise_on_error=False)
    told = {}
    for asset in assets:
        for event in result.asset_materializations_for_node(asset.op.name):
            known = plain(event.metadata).items()
            told[asset.op.name] = {name: value for name, value in known if name not in NOT_JSON}
    Path(job.answer).write_text(json.dumps({"run_id": result.run_id, "success": result.success, "told": told}))
    return 0 if result.success else 1
