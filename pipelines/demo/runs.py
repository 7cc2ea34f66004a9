"""Runs the jobs of the code location, in this process or in one that is killed, and collects their results."""

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
    """The results of one round of the jobs, from the metadata of its materializations."""

    title: str
    documents: Mapping[str, int] = field(default_factory=dict)
    """How many documents there are per decision."""
    unread: int = 0
    snippet_ids: str = ""
    """A digest of the snippet_ids of all documents, as downstream assets get them."""
    snippets_made: int = 0
    snippets_saved: int = 0
    characters_saved: int = 0
    embedded: int = 0
    rows: int = 0
    build: str = ""
    """The decision: new or duplicate."""
    index_hash: str = ""
    generation: int = 0
    checks: tuple[int, int] = (0, 0)
    """How many passed, and how many there are."""
    seconds: float = 0.0

    @property
    def new(self) -> int:
        return self.documents.get("new", 0)


class Runner:
    """Runs jobs on the Dagster instance of the demo, so that `make ui` shows them."""

    def __init__(self) -> None:
        # Imported here, because the definitions read the environment when they are loaded.
        from pipelines.definitions import defs

        self._defs = defs
        self.instance = dg.DagsterInstance.get()

    def run(self, job: str, config: Mapping[str, Any] | None = None) -> dg.ExecuteInProcessResult:
        return self._defs.resolve_job_def(job).execute_in_process(
            run_config={**QUIET, **(config or {})}, instance=self.instance
        )

    def round(self, title: str) -> Facts:
        """Runs the jobs that a schedule would start: documents, index and alias."""
        began = time.monotonic()
        facts = Facts(title)
        ingested = self.run("ingest")
        _take_documents(facts, _metadata(ingested, "documents"))
        facts.snippet_ids = _digest(ingested.output_for_node("documents"))
        _take_index(facts, self.run("build_and_swap"))
        facts.seconds = time.monotonic() - began
        return facts

    def close_killed_runs(self, facts: Facts) -> None:
        """Marks runs whose process was killed as failed. In a deployment, Dagster's `run_monitoring` does this.

        The assets that such a run materialized before are recorded in Dagster.
        """
        for run in self.instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.STARTED])):
            self.instance.report_run_failed(run, "its process was killed")
        event = self.instance.get_latest_materialization_event(dg.AssetKey("documents"))
        if event is not None and event.asset_materialization is not None:
            _take_documents(facts, event.asset_materialization.metadata)


def killed_at(point: str) -> float:
    """Runs a round in another process, which gets SIGKILL at a crash point. Returns how many seconds it ran."""
    began = time.monotonic()
    command = [sys.executable, "-m", "pipelines.demo", "--die-at", point]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != -signal.SIGKILL:
        raise RuntimeError(f"the process was not killed at {point}, but exited with {done.returncode}:\n{done.stderr}")
    return time.monotonic() - began


def stored_vectors(*folders: Path) -> int:
    """How many vectors are stored, counted in the files."""
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


def _take_documents(facts: Facts, metadata: Mapping[str, Any]) -> None:
    facts.documents = {str(row.data["decision"]): int(row.data["documents"]) for row in metadata["decisions"].records}
    facts.unread = metadata["unread"].value
    facts.snippets_made = metadata["snippets_made"].value
    facts.snippets_saved = metadata["snippets_saved"].value
    facts.characters_saved = metadata["characters_saved"].value


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
    (materialization,) = result.asset_materializations_for_node(asset)
    return materialization.metadata
