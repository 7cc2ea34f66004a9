"""The auditor of aliases: a catalog that the logs do not bear out is named, whatever is wrong with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ragfence.indexes.alias_checks import alias_findings
from ragfence.indexes.build_log import BuildEntry, next_retired
from ragfence.indexes.catalog import Alias, CatalogEntry, CatalogState, Target
from tests.indexes.alias_world import AliasWorld


@pytest.fixture
def world(tmp_path: Path) -> Iterator[AliasWorld]:
    made = AliasWorld(tmp_path)
    made.aliases.swap("docs", made.build("one"))
    made.aliases.swap("docs", made.build("two"))
    made.build("three")
    made.collecting.gc(dry_run=False)
    made.aliases.rollback("docs")
    yield made
    made.close()


def found(world: AliasWorld) -> list[str]:
    return [finding.invariant for finding in alias_findings(world.catalog, world.builds)]


def forge(world: AliasWorld, number: int = 0, **wrong: Any) -> None:
    """An entry as no ragfence would write it, in place of the head or after it."""
    head = world.catalog.head()
    at = number or head.number + 1
    values: dict[str, Any] = {"change": "swap", "at_ms": head.at_ms + 1, "alias": "docs", "state": head.state}
    assert world.catalog.append(CatalogEntry(at, **{**values, **wrong}))


def pointing(head: CatalogEntry, target: Target) -> CatalogState:
    return CatalogState({"docs": head.state.aliases["docs"].move_to(target, 3)}, head.state.retiring)


def newest(world: AliasWorld, index_hash: str) -> BuildEntry:
    entry = world.builds.newest(index_hash)
    assert entry is not None
    return entry


def test_a_catalog_as_it_should_be_has_no_findings(world: AliasWorld) -> None:
    assert found(world) == []


def test_a_number_that_was_left_out_is_found(world: AliasWorld) -> None:
    forge(world, world.catalog.head().number + 2, change="remove", alias="staging")
    assert found(world) == ["no_gap"]


def test_a_target_that_was_never_sealed_is_found(world: AliasWorld) -> None:
    head = world.catalog.head()
    target = Target("0" * 64, 1, "rf-x", "folder", head.number + 1)
    forge(world, target=target, state=pointing(head, target))
    assert found(world) == ["sealed_before", "not_retired"]


@pytest.mark.parametrize("wrong", ["seal", "physical", "late"])
def test_a_target_that_was_not_sealed_like_that_is_found(world: AliasWorld, wrong: str) -> None:
    head = world.catalog.head()
    target = Target.of(newest(world, world.build("four")), head.number + 1)
    at_ms = head.at_ms + 10**6
    if wrong == "seal":
        target = replace(target, seal=2)
    elif wrong == "physical":
        target = replace(target, physical="rf-other")
    else:
        at_ms = 5
    forge(world, target=target, state=pointing(head, target), at_ms=at_ms)
    assert found(world) == ["sealed_before"]


def test_a_state_that_does_not_follow_is_found(world: AliasWorld) -> None:
    target = Target.of(newest(world, world.build("four")), world.catalog.head().number + 1)
    forge(world, target=target, at_ms=target.seal + 10**15)
    assert found(world) == ["state_follows"]


def test_an_alias_that_comes_from_nowhere_is_found(world: AliasWorld) -> None:
    head = world.catalog.head()
    strange = {**head.state.aliases, "strange": Alias(head.state.aliases["docs"].target)}
    forge(world, change="remove", alias="staging", state=CatalogState(strange, head.state.retiring))
    assert found(world) == ["state_follows"]


def test_a_retirement_that_was_forgotten_is_found(world: AliasWorld) -> None:
    head = world.catalog.head()
    target = Target.of(newest(world, world.build("four")))
    forge(world, change="retire", alias="", target=target, at_ms=head.at_ms + 10**6)
    assert found(world) == ["state_follows"]


def test_an_alias_to_a_build_that_is_retired_is_found(world: AliasWorld) -> None:
    live = world.aliases.resolve("docs").index_hash
    world.builds.append(live, next_retired(newest(world, live), at_ms=1, owner="somebody", reason=""))
    (finding,) = alias_findings(world.catalog, world.builds)
    assert str(finding).startswith("not_retired docs@4: ")
