"""Aliases, gates and gc over LanceDB instead of the toy."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragfence.errors import BuildMissing, BuildRetired
from ragfence.indexes.alias_checks import alias_findings
from ragfence.indexes.gates import Gates, GoldenQuery
from tests.indexes.alias_world import TEXTS, AliasWorld, hash_of


def test_an_alias_over_lancedb_is_swapped_rolled_back_reconciled_and_collected(tmp_path: Path) -> None:
    from ragfence.indexes.backends.lance import LanceBackend

    world = AliasWorld(tmp_path, policy={"indexes": {"keep_targets": 1}})
    lance = LanceBackend(str(tmp_path / "lance"))
    world.backend = lance  # type: ignore[assignment]
    hashes = [world.build(name, [*TEXTS, f"and {name}"]) for name in ("one", "two", "three")]
    golden = [GoldenQuery(text, frozenset({hash_of(text)}), "snippet_id", 1) for text in TEXTS]
    for index_hash in hashes:
        swapped = world.aliases.swap("docs", index_hash, gates=Gates(golden=golden, min_recall=1, min_overlap=0.5))
        assert swapped.applied
        assert all(each.ok for each in swapped.gates), swapped.gates
    assert [each.gate for each in swapped.gates] == ["sealed", "rows", "dimension", "golden", "overlap", "shrinkage"]
    assert lance.pointer("docs@default").physical == world.physical(hashes[2])  # type: ignore[union-attr]

    lance.unpoint("docs@default")
    assert world.aliases.reconcile().pointed == ("docs",)
    assert world.aliases.rollback("docs").index_hash == hashes[1]
    first = world.physical(hashes[0])
    assert world.collecting.gc(dry_run=False).dropped == [first]
    assert not lance.exists(first)
    with pytest.raises(BuildRetired):
        world.aliases.swap("docs", hashes[0])
    lance.drop(world.physical(hashes[2]))
    with pytest.raises(BuildMissing):
        world.aliases.swap("docs", hashes[2])
    assert world.collecting.gc(dry_run=False).missing == [hashes[2]]
    assert world.aliases.remove("docs", "the end").applied
    assert lance.pointer("docs@default") is None
    assert [str(finding) for finding in alias_findings(world.catalog, world.builds)] == []
    lance.close()
    world.close()
