"""What the tests of ragfence.dagster have in common: a folder of documents, a fence, an instance, and three assets."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dagster as dg

import ragfence
from ragfence.dagster import (
    FenceResource,
    build_alias_asset,
    build_index_asset,
    build_ingest_asset,
)
from ragfence.indexes.build_log import BuildSeal
from ragfence.indexes.spec import IndexSpec
from tests.documents.chunkers import Failing, Paragraphs
from tests.indexes.building import CountingEmbedder, text_of

NAMES = ("leave", "travel", "pay")
LONG_AGO = 1_600_000_000
ALIAS = "handbook"


@dataclass
class World:
    folder: Path
    instance: Any
    embedder: CountingEmbedder = field(default_factory=CountingEmbedder)
    chunker: Paragraphs = field(default_factory=Failing)

    @property
    def source(self) -> Path:
        return self.folder / "source"

    @property
    def resource(self) -> FenceResource:
        return FenceResource(store=str(self.folder / "fence"))

    def write(self, name: str, text: str, *, at: int = LONG_AGO) -> None:
        """A file whose mtime is old enough to be believed."""
        self.source.mkdir(exist_ok=True)
        file = self.source / f"{name}.txt"
        file.write_text(text)
        os.utime(file, (at, at))

    def write_all(self, names: Sequence[str] = NAMES) -> None:
        for name in names:
            self.write(name, text_of(name))

    def open(self) -> Any:
        return ragfence.open(str(self.folder / "fence"))

    def spec(self) -> IndexSpec:
        return IndexSpec(embedder=self.embedder)

    def documents(self, **more: Any) -> dg.AssetsDefinition:
        given: dict[str, Any] = {"using": lambda fence: fence.documents.using(chunker=self.chunker), **more}
        return build_ingest_asset(str(self.source), **given)

    def index(self, **more: Any) -> dg.AssetsDefinition:
        return build_index_asset(self.spec, **more)

    def alias(self, **more: Any) -> dg.AssetsDefinition:
        return build_alias_asset(ALIAS, **more)

    def assets(self) -> list[dg.AssetsDefinition]:
        return [self.documents(), self.index(), self.alias()]

    def run(self, *assets: Any, ok: bool = True, resources: Any = None, **more: Any) -> dg.ExecuteInProcessResult:
        result = dg.materialize(
            list(assets or self.assets()),
            instance=self.instance,
            resources={"fence": self.resource, **(resources or {})},
            raise_on_error=ok,
            **more,
        )
        assert result.success is ok
        return result

    def seal(self) -> BuildSeal:
        """Of the build that the alias points at."""
        with self.open() as fence:
            entry = fence.indexes.get(fence.aliases.resolve(ALIAS).index_hash)
            assert entry is not None
            assert entry.seal is not None
            return entry.seal


def told(result: dg.ExecuteInProcessResult, asset: str) -> dict[str, Any]:
    """The metadata of what a run materialized of an asset, as plain values."""
    (event,) = result.asset_materializations_for_node(asset.replace("/", "__"))
    return plain(event.metadata)


def plain(metadata: Any) -> dict[str, Any]:
    """A table is a list of rows."""
    return {
        name: [dict(record.data) for record in value.records]
        if isinstance(value, dg.TableMetadataValue)
        else value.value
        for name, value in metadata.items()
    }


def version(result: dg.ExecuteInProcessResult, asset: str) -> str:
    (event,) = result.asset_materializations_for_node(asset.replace("/", "__"))
    return (event.tags or {})["dagster/data_version"]


def checked(result: dg.ExecuteInProcessResult, name: str) -> Any:
    (evaluation,) = [each for each in result.get_asset_check_evaluations() if each.check_name == name]
    return evaluation
