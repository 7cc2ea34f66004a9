"""The jobs: ingest, build_and_swap and rollback; and for maintenance verify, purge_expired, gc and drain."""

from typing import Any

import dagster as dg

from pipelines.defs.assets import documents, live_alias, snippets_by_folder, vector_index
from pipelines.settings import ALIAS
from ragfence.dagster import JOBS, FenceResource
from ragfence.dagster._event_log import DATA_VERSION_TAG


class Rollback(dg.Config):
    """Which alias to roll back, to which build, and why."""

    alias: str = ALIAS
    to: str = ""
    """An earlier INDEX_HASH of the alias. Empty: the previous build."""
    reason: str


@dg.op(description="Points an alias at its previous build. A second rollback goes forward again.")
def roll_back(context: dg.OpExecutionContext, config: Rollback, fence: FenceResource) -> None:
    with fence.open(context) as opened:
        swap = opened.aliases.rollback(
            config.alias, to=config.to or None, reason=config.reason, actor=f"dagster:{context.run.run_id}"
        )
    context.log.info("%s -> %s, generation %d", config.alias, swap.index_hash, swap.generation)
    if config.alias == ALIAS:  # so that the asset shows the rollback; its DataVersion is the generation
        context.log_event(
            dg.AssetMaterialization(
                live_alias.key,
                description=f"rolled back: {config.reason}",
                metadata={"alias": config.alias, "index_hash": swap.index_hash, "generation": swap.generation},
                tags={DATA_VERSION_TAG: str(swap.generation)},
            )
        )


@dg.job(description="Points an alias at an earlier build. Config: alias, to, reason.")
def rollback() -> None:
    roll_back()


ingest = dg.define_asset_job(
    "ingest",
    [documents, snippets_by_folder],
    description="Ingests what changed in the source, and updates the assets that use its snippet_ids.",
)
build_and_swap = dg.define_asset_job(
    "build_and_swap",
    dg.AssetSelection.assets(vector_index, live_alias),
    description="Builds and checks an index of the current documents, then points the alias at it.",
)

jobs: list[Any] = [ingest, build_and_swap, rollback, *JOBS]
