"""Every check fails on a planted fault; a blocking one keeps the alias where it is."""

from __future__ import annotations

from typing import Any

import dagster as dg
import pytest

from ragfence.dagster import corpus_matches_index, golden_queries, no_duplicate_effects
from ragfence.errors import ValidationError
from ragfence.indexes.gates import GoldenQuery
from tests.dagster.world import ALIAS, World, checked, plain
from tests.indexes.building import text_of


@pytest.fixture
def built(world: World) -> World:
    world.write_all()
    world.run()
    return world


def judged(world: World, check: dg.AssetChecksDefinition, name: str) -> Any:
    """The check alone, of what was built before."""
    job = dg.Definitions(
        assets=world.assets(),
        asset_checks=[check],
        jobs=[dg.define_asset_job("check", dg.AssetSelection.checks(check))],
        resources={"fence": world.resource},
    ).resolve_job_def("check")
    result = job.execute_in_process(instance=world.instance, raise_on_error=False)
    return checked(result, name)


def table_of(world: World) -> Any:
    """The rows behind the alias, to be spoilt."""
    import lancedb

    with world.open() as fence:
        physical = fence.aliases.resolve(ALIAS).physical
        (folder,) = {path.parent for path in world.folder.rglob(f"{physical}*.lance")}
    return lancedb.connect(str(folder)).open_table(physical)


def test_what_was_built_passes_all_of_them(built: World) -> None:
    for check in (no_duplicate_effects(), corpus_matches_index()):
        (name,) = [key.name for key in check.check_keys]
        assert judged(built, check, name).passed
    golden = golden_queries(
        [GoldenQuery(query=text_of("pay").split("\n\n")[0], expected=frozenset({"pay.txt"}), k=3)], spec=built.spec
    )
    assert judged(built, golden, "golden_queries").passed


def test_a_row_that_is_missing_in_the_vector_store_is_found(built: World) -> None:
    table = table_of(built)
    some = table.search().limit(1).to_list()[0]["snippet_id"]
    table.delete(f"snippet_id = '{some}'")
    found = judged(built, no_duplicate_effects(), "no_duplicate_effects")
    assert not found.passed
    assert (plain(found.metadata)["missing"], plain(found.metadata)["ids"]) == (1, 8)


def test_a_doubled_row_is_found(built: World) -> None:
    table = table_of(built)
    table.add(table.to_arrow().slice(0, 1))
    found = judged(built, no_duplicate_effects(), "no_duplicate_effects")
    assert not found.passed
    assert plain(found.metadata)["duplicated"] == 1


def test_a_row_of_a_stranger_is_found_also_if_the_count_is_right(built: World) -> None:
    table = table_of(built)
    rows = table.to_arrow().slice(0, 1)
    table.delete(f"snippet_id = '{rows.column('snippet_id')[0].as_py()}'")
    import pyarrow as pa

    at = rows.schema.get_field_index("snippet_id")
    table.add(rows.set_column(at, rows.schema.field(at), pa.array(["f" * 32], rows.schema.field(at).type)))
    found = judged(built, no_duplicate_effects(), "no_duplicate_effects")
    assert not found.passed
    assert plain(found.metadata)["unknown"] == 1


def test_an_index_that_somebody_dropped_is_found(built: World) -> None:
    with built.open() as fence:
        fence.indexes.backend("lance").drop(fence.aliases.resolve(ALIAS).physical)
    assert not judged(built, no_duplicate_effects(), "no_duplicate_effects").passed


def test_a_promise_that_the_auditor_finds_broken_fails_it(built: World) -> None:
    with built.open() as fence:
        objects = fence.inspector.objects
        (entry,) = objects.list("default/catalog/")
        broken = (objects.get(entry.name) or b"").replace(fence.aliases.resolve(ALIAS).index_hash.encode(), b"0" * 64)
        objects.delete([entry.name])
        assert objects.put_new(entry.name, broken)
    found = judged(built, no_duplicate_effects(), "no_duplicate_effects")
    assert not found.passed
    assert plain(found.metadata)["findings"]


def test_a_document_that_came_after_the_build_is_told(built: World) -> None:
    built.write("more", text_of("more"))
    built.run(built.documents())
    found = judged(built, corpus_matches_index(), "corpus_matches_index")
    assert (found.passed, found.severity) == (False, dg.AssetCheckSeverity.WARN)
    assert plain(found.metadata)["coverage"] == pytest.approx(0.75)
    built.run()
    assert judged(built, corpus_matches_index(), "corpus_matches_index").passed


def test_a_document_that_was_purged_and_came_back_is_told(built: World) -> None:
    """The corpus is the one that was sealed, and the index lacks it all the same."""
    with built.open() as fence:
        fence.documents.purge("pay.txt")
    assert not judged(built, corpus_matches_index(), "corpus_matches_index").passed
    with built.open() as fence:
        fence.documents.using(chunker=built.chunker).sync(str(built.source))
        assert fence.documents.corpus_digest() == built.seal().corpus_digest
    found = judged(built, corpus_matches_index(), "corpus_matches_index")
    assert (found.passed, found.severity) == (False, dg.AssetCheckSeverity.WARN)
    assert "purged" in found.description
    assert plain(found.metadata)["coverage"] == pytest.approx(2 / 3)
    built.run()
    assert judged(built, corpus_matches_index(), "corpus_matches_index").passed


WRONG = [GoldenQuery(query="paragraph 0 of pay", expected=frozenset({"nowhere.txt"}), k=3)]


def test_a_blocking_check_that_fails_keeps_the_alias_where_it_is(built: World) -> None:
    before = built.seal().index_hash
    built.write("pay", text_of("pay", 1))
    result = built.run(*built.assets(), golden_queries(WRONG, spec=built.spec), ok=False)
    found = checked(result, "golden_queries")
    assert (found.passed, found.blocking) == (False, True)
    assert "golden" in plain(found.metadata)
    assert result.asset_materializations_for_node("vector_index")
    assert result.asset_materializations_for_node("live_alias") == []
    assert built.seal().index_hash == before
    with built.open() as fence:
        assert len(list(fence.aliases.history(ALIAS))) == 1
    # Mended, the same build goes live: nothing is built again.
    right = golden_queries(
        [GoldenQuery(query="paragraph 1 of pay tells of pay1", expected=frozenset({"pay.txt"}), k=3)], spec=built.spec
    )
    built.run(*built.assets(), right)
    assert built.seal().index_hash != before


def test_golden_queries_may_be_asked_without_blocking(built: World) -> None:
    result = built.run(*built.assets(), golden_queries(WRONG, spec=built.spec, blocking=False))
    assert not checked(result, "golden_queries").passed


def test_a_golden_file_that_is_not_there_is_told(built: World) -> None:
    with pytest.raises(ValidationError, match=r"nowhere.jsonl"):
        built.run(*built.assets(), golden_queries("nowhere.jsonl"))


def test_checks_of_an_index_that_was_never_built_say_so(world: World) -> None:
    world.write_all()
    check = corpus_matches_index()
    job = dg.Definitions(
        assets=world.assets(),
        asset_checks=[check],
        jobs=[dg.define_asset_job("check", dg.AssetSelection.checks(check))],
        resources={"fence": world.resource},
    ).resolve_job_def("check")
    result = job.execute_in_process(instance=world.instance, raise_on_error=False)
    (failure,) = [event for event in result.all_events if event.is_step_failure]
    assert "has no INDEX_HASH yet" in str(failure.step_failure_data.user_failure_data)
