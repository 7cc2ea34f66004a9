"""Which INDEX_HASH an index asset stands at: its DataVersion, as Dagster recorded it."""

from __future__ import annotations

from typing import Any

import dagster as dg

DATA_VERSION_TAG = "dagster/data_version"


def recorded_version(instance: Any, key: dg.AssetKey) -> str | None:
    """The DataVersion of the newest materialization of an asset."""
    event = instance.get_latest_materialization_event(key)
    if event is None or event.asset_materialization is None:
        return None
    return (event.asset_materialization.tags or {}).get(DATA_VERSION_TAG)


def index_hash_at(context: Any, key: dg.AssetKey) -> str:
    """The INDEX_HASH of the newest build that the index asset recorded."""
    version = recorded_version(context.instance, key)
    if version is None:
        raise dg.Failure(
            description=f"{key.to_user_string()} was never materialized: there is no INDEX_HASH to go by. "
            f"Materialize it first."
        )
    return version
