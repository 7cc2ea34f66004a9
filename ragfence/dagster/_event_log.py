"""Reads Dagster's event log: DataVersions and metadata of assets. The DataVersion of an index is its INDEX_HASH."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dagster as dg

DATA_VERSION_TAG = "dagster/data_version"


def recorded_version(instance: Any, key: dg.AssetKey) -> str | None:
    """The DataVersion of the newest materialization of an asset, or of its newest observation if there is none."""
    record = instance.get_latest_data_version_record(key)
    if record is None:
        return None
    # A materialization that was reported from outside may have none. Then each one is a version of its own.
    version: str = (record.event_log_entry.tags or {}).get(DATA_VERSION_TAG) or f"event {record.storage_id}"
    return version


def recorded_versions(instance: Any, key: dg.AssetKey, partitions: Sequence[str]) -> list[tuple[str, str]]:
    """The DataVersion of each of these partitions that was ever materialized, in the order of their names."""
    tags = instance.event_log_storage.get_latest_tags_by_partition(
        key, dg.DagsterEventType.ASSET_MATERIALIZATION, tag_keys=[DATA_VERSION_TAG], asset_partitions=list(partitions)
    )
    return sorted((partition, found.get(DATA_VERSION_TAG, "")) for partition, found in tags.items())


def recorded_metadata(instance: Any, key: dg.AssetKey, name: str, partitions: Sequence[str] | None) -> list[Any]:
    """One metadata entry of the newest materialization of the asset, or of each of these partitions."""
    if partitions is None:
        event = instance.get_latest_materialization_event(key)
        events = [event.asset_materialization] if event is not None else []
    else:
        storage_ids = instance.event_log_storage.get_latest_storage_id_by_partition(
            key, dg.DagsterEventType.ASSET_MATERIALIZATION, set(partitions)
        )
        wanted = dg.AssetRecordsFilter(
            key, storage_ids=[storage_ids[each] for each in partitions if each in storage_ids]
        )
        records = instance.fetch_materializations(wanted, limit=len(partitions)).records if wanted.storage_ids else []
        by_partition = {record.partition_key: record.asset_materialization for record in records}
        events = [by_partition[each] for each in partitions if each in by_partition]
    return [event.metadata[name].value for event in events if event is not None and name in event.metadata]


def index_hash_at(context: Any, key: dg.AssetKey) -> str:
    """The INDEX_HASH of the newest build that the index asset recorded."""
    version = recorded_version(context.instance, key)
    if version is None:
        raise dg.Failure(
            description=f"{key.to_user_string()} has no INDEX_HASH yet. Materialize it first.",
            allow_retries=False,
        )
    return version
