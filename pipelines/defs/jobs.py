"""The jobs a person or a schedule starts: ingest, build_and_swap, rollback; and verify, purge_expired, gc, drain."""

from typing import Any

import dagster as dg

from pipelines.defs.assets import documents, live_alias, snippets_by_folder, vector_index
from pipelines.settings import ALIAS
from ragfence.dagster import JOBS, FenceResource
from ragfence.dagster.versions import DATA_VERSION_TAG


class Rollback(dg.Config):
    """Where an alias is to go back to, and why."""

    alias: str = ALIAS
    to: str = ""
    """an INDEX_HASH that the alias has had; empty: the build before"""
    reason: str


@dg.op(description="Points an alias at the build it had before. What was live becomes the one before.")
def roll_back(context: dg.OpExecutionContext, config: Rollback, fence: FenceResource) -> None:
    with fence.opened(context) as opened:
        swap = opened.aliases.rollback(
            config.alias, to=config.to or None, reason=config.reason, actor=f"dagster:{context.run.run_id}"
        )
    context.log.info("%s -> %s, generation %d", config.alias, swap.index_hash, swap.generation)
    if config.alias == ALIAS:  # so that the asset shows what became of it; its DataVersion is the generation
        context.log_event(
            dg.AssetMaterialization(
                live_alias.key,
                description=f"rolled back: {config.reason}",
                metadata={"alias": config.alias, "index_hash": swap.index_hash, "generation": swap.generation},
                tags={DATA_VERSION_TAG: str(swap.generation)},
            )
        )


@dg.job(description="An alias back to an earlier build; config: alias, to, reason.")
def rollback() -> None:
    roll_back()


ingest = dg.define_asset_job(
    "ingest",
    [documents, snippets_by_folder],
    description="What changed in the source, once; and who uses its snippet_ids.",
)
build_and_swap = dg.define_asset_job(
    "build_and_swap",
    dg.AssetSelection.assets(vector_index, live_alias),
    description="The index of the documents of now, checked; then the alias moves to it.",
)

jobs: list[Any] = [ingest, build_and_swap, rollback, *JOBS]
