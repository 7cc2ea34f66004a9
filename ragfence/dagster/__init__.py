"""ragfence in Dagster: a resource, fenced assets, checks, sensors, schedules, and a component for `defs.yaml`.

The fence does the coordination, never the executor: runs may be retried, backfilled, killed and launched twice.
"""

from ragfence._extras import needs_extra

with needs_extra("dagster", "ragfence.dagster"):
    import dagster as _dagster  # noqa: F401

from ragfence.dagster.assets import ON_NEW_VERSION, build_alias_asset, build_index_asset
from ragfence.dagster.checks import corpus_matches_index, golden_queries, no_duplicate_effects
from ragfence.dagster.component import RagIndexComponent
from ragfence.dagster.fenced import fenced_asset
from ragfence.dagster.ingest_asset import SHARD_PARTITIONS, build_ingest_asset
from ragfence.dagster.maintenance import (
    JOBS,
    build_jobs,
    build_schedules,
    drain_job,
    gc_job,
    purge_expired_job,
    verify_job,
)
from ragfence.dagster.queues import build_queue_asset, build_queue_sensor
from ragfence.dagster.resource import CORRELATION_TAG, FenceResource
from ragfence.dagster.sensors import build_source_sensor
from ragfence.dagster.table_io import TableIOManager, table_io_manager
from ragfence.documents.sync.ingest_table import IngestTable

__all__ = [
    "CORRELATION_TAG",
    "JOBS",
    "ON_NEW_VERSION",
    "SHARD_PARTITIONS",
    "FenceResource",
    "IngestTable",
    "RagIndexComponent",
    "TableIOManager",
    "build_alias_asset",
    "build_index_asset",
    "build_ingest_asset",
    "build_jobs",
    "build_queue_asset",
    "build_queue_sensor",
    "build_schedules",
    "build_source_sensor",
    "corpus_matches_index",
    "drain_job",
    "fenced_asset",
    "gc_job",
    "golden_queries",
    "no_duplicate_effects",
    "purge_expired_job",
    "table_io_manager",
    "verify_job",
]
