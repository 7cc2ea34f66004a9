"""`RagIndexComponent`: the assets documents, vector_index and live_alias, declared in a `defs.yaml`.

type: ragfence.dagster.RagIndexComponent
attributes:
  source: handbook/
  alias: handbook
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import dagster as dg
from pydantic import Field

from ragfence.dagster.assets import build_alias_asset, build_index_asset
from ragfence.dagster.checks import corpus_matches_index, golden_queries, no_duplicate_effects
from ragfence.dagster.ingest_asset import build_ingest_asset
from ragfence.dagster.maintenance import JOBS, build_jobs, build_schedules
from ragfence.dagster.resource import FENCE, FenceResource, without_passwords
from ragfence.dagster.sensors import build_source_sensor
from ragfence.errors import ValidationError
from ragfence.indexes.catalog import check_alias
from ragfence.indexes.gates import Gates
from ragfence.indexes.spec import IndexSpec


class RagIndexComponent(dg.Component, dg.Model, dg.Resolvable):
    """A source of documents, an index of them, and an alias that searches use.

    A prefix is put in front of the names of everything: assets, jobs, sensor, schedules and resource (`<prefix>fence`).
    Several components, each with its own fence, can then be in one code location.
    """

    source: str = Field(description="A folder (relative to the defs.yaml), a .jsonl file, or s3://bucket/prefix.")
    alias: str = Field(description="The name that searches use.")
    embedder: str = "wordllama"
    backend: str = "lance"
    metric: Literal["cosine", "dot", "l2"] = "cosine"
    index: str = "auto"
    parameters: dict[str, Any] = Field(default_factory=dict)
    prune: Literal["", "scoped", "full"] = Field(
        default="", description="Retract documents that the source no longer has."
    )
    allow_empty_text: bool = Field(default=False, description="Accept documents without text.")
    shards: bool = Field(default=False, description="Partition the documents by the 64 shards.")
    golden: str = Field(default="", description="A golden.jsonl for a blocking check; relative to the defs.yaml.")
    min_recall: float | None = None
    group: str | None = None
    prefix: str = Field(default="", description="Put in front of all names, if there are several components.")
    store: str = Field(default="", description="The fence store. Empty: RAGFENCE_STORE, or embedded.")
    objects: str = ""
    tenant: str = ""
    policy: str = ""
    sensor: bool = Field(default=True, description="Start a run when the source changes.")
    schedules: bool = Field(default=True, description="Add schedules for verify, purge_expired, gc and drain.")
    running: bool = Field(default=False, description="Start the sensor and the schedules with the code location.")

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        return without_passwords(super().__repr_args__())

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        here = Path(context.path)
        alias = check_alias(self.alias)
        if self.shards and self.prune == "full":
            raise ValidationError("prune: full cannot be combined with shards", hint="use prune: scoped, or no shards")
        source = self._place(self.source, here)
        resource_key = f"{self.prefix}{FENCE}"
        named = {name: f"{self.prefix}{name}" for name in ("documents", "vector_index", "live_alias")}
        common: dict[str, Any] = {"resource_key": resource_key}
        if self.group:
            common["group_name"] = self.group
        spec = IndexSpec(
            embedder=self.embedder,
            backend=self.backend,
            metric=self.metric,
            index=self.index,
            parameters=self.parameters,
        )
        documents = build_ingest_asset(
            source,
            name=named["documents"],
            prune=self.prune or False,
            allow_empty_text=self.allow_empty_text,
            shards=self.shards,
            **common,
        )
        index = build_index_asset(spec, name=named["vector_index"], deps=[documents], **common)
        golden = self._place(self.golden, here) if self.golden else ""
        gates = Gates(golden=golden or None, min_recall=self.min_recall)
        live = build_alias_asset(alias, index=index, name=named["live_alias"], gates=gates, **common)
        checks = [
            no_duplicate_effects(index, resource_key=resource_key),
            corpus_matches_index(index, resource_key=resource_key),
        ]
        if golden:
            checks.append(golden_queries(golden, index, min_recall=self.min_recall, resource_key=resource_key))
        ingest = dg.define_asset_job(f"{self.prefix}ingest", [documents])
        build_and_swap = dg.define_asset_job(f"{self.prefix}build_and_swap", dg.AssetSelection.assets(index, live))
        maintenance = build_jobs(resource_key=resource_key, prefix=self.prefix) if self.prefix else JOBS
        sensors = [build_source_sensor(source, [documents], name=f"{named['documents']}_changed", running=self.running)]
        return dg.Definitions(
            assets=[documents, index, live],
            asset_checks=checks,
            jobs=[ingest, build_and_swap, *(maintenance if self.schedules else ())],
            # A run of a partitioned asset needs a partition, which a listing does not name.
            sensors=sensors if self.sensor and not self.shards else [],
            schedules=build_schedules(running=self.running, jobs=maintenance) if self.schedules else [],
            resources={
                resource_key: FenceResource(
                    store=self.store, objects=self.objects, tenant=self.tenant, policy=self.policy
                )
            },
        )

    @staticmethod
    def _place(given: str, here: Path) -> str:
        """Resolves a path relative to the YAML file. A URL stays as it is."""
        return given if "://" in given or Path(given).is_absolute() else str((here / given).resolve())
