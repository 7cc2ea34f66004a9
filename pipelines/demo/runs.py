"""Runs of the code location's jobs, in this process or in one that will be killed, and what they came to."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa

from ragfence.documents.sync.ingest_table import IngestTable

QUIET = {"loggers": {"console": {"config": {"log_level": "WARNING"}}}}


@dataclass(slots=True)
class Facts:
    """What one round of the jobs came to, out of the metadata that Dagster has of it."""

    title: str
    documents: Mapping[str, int] = field(default_factory=dict)
    """new, duplicate and the other decisions"""
    unread: int = 0
    snippet_ids: str = ""
    """a digest of the snippet_ids of all documents, as the assets downstream get them"""
    snippets_made: int = 0
    snippets_saved: int = 0
    characters_saved: int = 0
    embedded: int = 0
    rows: int = 0
    build: str = ""
    """the decision: new, duplicate"""
    index_hash: str = ""
    generation: int = 0
    checks: tuple[int, int] = (0, 0)
    """passed, of so many"""
    seconds: float = 0.0

    @property
    def new(self) -> int:
        return self.documents.get("new", 0)


class Runner:
    """Runs jobs on the Dagster instance of the demo, so that `make ui` shows them."""

    def __init__(self) -> None:
        # Not before the environment is set: the definitions read it when they are loaded.
        from pipelines.definitions import defs

        self._defs = defs
        self.instance = dg.DagsterInstance.get()

    def run(self, job: str, config: Mapping[str, Any] | None = None) -> dg.ExecuteInProcessResult:
        return self._defs.resolve_job_def(job).execute_in_process(
            run_config={**QUIET, **(config or {})}, instance=self.instance
        )

    def round(self, title: str) -> Facts:
        """Documents, index, alias: what a schedule would start."""
        began = time.monotonic()
        facts = Facts(title)
        ingested = self.run("ingest")
        _take_documents(facts, _metadata(ingested, "documents"))
        facts.snippet_ids = _digest(ingested.output_for_node("documents"))
        _take_index(facts, self.run("build_and_swap"))
        facts.seconds = time.monotonic() - began
        return facts

    def close_killed_runs(self, facts: Facts) -> None:
        """A run whose process is gone stays 'started' in Dagster until somebody says otherwise.

        In a deployment `run_monitoring` does; here nothing else is watching. What it materialized before, Dagster has.
        """
        for run in self.instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.STARTED])):
            self.instance.report_run_failed(run, "its process was killed")
        event = self.instance.get_latest_materialization_event(dg.AssetKey("documents"))
        if event is not None and event.asset_materialization is not None:
            _take_documents(facts, event.asset_materialization.metadata)


def killed_at(point: str) -> float:
    """A round in a process of its own that gets SIGKILL at a point of the protocol. Returns its seconds."""
    began = time.monotonic()
    command = [sys.executable, "-m", "pipelines.demo", "--die-at", point]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != -signal.SIGKILL:
        raise RuntimeError(f"it was to be killed at {point}, and ended with {done.returncode}:\n{done.stderr}")
    return time.monotonic() - began


def stored_vectors(*folders: Path) -> int:
    """How many vectors there are, counted in the files: whatever was embedded is there, and once."""
    return sum(_rows(file) for folder in folders for file in folder.rglob("*") if file.is_file())


def _rows(file: Path) -> int:
    with pa.memory_map(str(file)) as data, pa.ipc.open_file(data) as reader:
        return sum(reader.get_batch(each).num_rows for each in range(reader.num_record_batches))


def _digest(table: IngestTable) -> str:
    digest = sha256()
    for page in table.pages():
        for row in page.select(["doc_id", "snippet_ids"]).to_pylist():
            digest.update(json.dumps([row["doc_id"], row["snippet_ids"]]).encode())
    return digest.hexdigest()


def _take_documents(facts: Facts, told: Mapping[str, Any]) -> None:
    facts.documents = {str(row.data["decision"]): int(row.data["documents"]) for row in told["decisions"].records}
    facts.unread = told["unread"].value
    facts.snippets_made = told["snippets_made"].value
    facts.snippets_saved = told["snippets_saved"].value
    facts.characters_saved = told["characters_saved"].value


def _take_index(facts: Facts, result: dg.ExecuteInProcessResult) -> None:
    index, alias = _metadata(result, "vector_index"), _metadata(result, "live_alias")
    facts.build = index["decision"].value
    facts.embedded = index["embedded"].value
    facts.rows = index["rows"].value
    facts.index_hash = index["index_hash"].value
    facts.generation = alias["generation"].value
    checks = [each.passed for each in result.get_asset_check_evaluations()]
    facts.checks = (sum(checks), len(checks))


def _metadata(result: dg.ExecuteInProcessResult, asset: str) -> Mapping[str, Any]:
    (made,) = result.asset_materializations_for_node(asset)
    return made.metadata
