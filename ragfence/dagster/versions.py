"""Which DataVersion an asset stands at, as Dagster recorded it. That of an index asset is its INDEX_HASH.

Here alone is Dagster's event log read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dagster as dg

DATA_VERSION_TAG = "dagster/data_version"


def recorded_version(instance: Any, key: dg.AssetKey) -> str | None:
    """The DataVersion of the newest materialization of an asset, or observation, if it is never materialized."""
    record = instance.get_latest_data_version_record(key)
    if record is None:
        return None
    # Whoever reports a materialization from outside may leave it out; then each one is a version.
    version: str = (record.event_log_entry.tags or {}).get(DATA_VERSION_TAG) or f"event {record.storage_id}"
    return version


def recorded_versions(instance: Any, key: dg.AssetKey, partitions: Sequence[str]) -> list[tuple[str, str]]:
    """Of each of these partitions that was ever materialized, in the order of their names."""
    tags = instance.event_log_storage.get_latest_tags_by_partition(
        key, dg.DagsterEventType.ASSET_MATERIALIZATION, tag_keys=[DATA_VERSION_TAG], asset_partitions=list(partitions)
    )
    return sorted((partition, held.get(DATA_VERSION_TAG, "")) for partition, held in tags.items())


def index_hash_at(context: Any, key: dg.AssetKey) -> str:
    """The INDEX_HASH of the newest build that the index asset recorded."""
    version = recorded_version(context.instance, key)
    if version is None:
        raise dg.Failure(
            description=f"{key.to_user_string()} was never materialized: there is no INDEX_HASH to go by. "
            f"Materialize it first.",
            allow_retries=False,
        )
    return version
