"""documents -> vector_index -> live_alias: the first run, replays, edits, and what a materialization tells."""

from __future__ import annotations

import base64
import unicodedata
import uuid
from xml.etree import ElementTree

import dagster as dg
import pytest

from ragfence.core.document import Document
from ragfence.core.hashing import shard_of
from ragfence.dagster import SHARD_PARTITIONS, build_alias_asset, build_index_asset, build_ingest_asset
from ragfence.documents.sources import DocumentsSource
from ragfence.errors import ValidationError
from ragfence.indexes.gates import Gates
from tests.dagster.world import ALIAS, NAMES, World, checked, plain, told, version
from tests.indexes.building import text_of


def picture(markdown: str) -> ElementTree.Element:
    """The SVG in a chart."""
    return ElementTree.fromstring(base64.b64decode(markdown.split("base64,")[1].rstrip(")")))


def test_a_first_run_ingests_builds_and_points_the_alias_there(world: World) -> None:
    world.write_all()
    result = world.run()
    documents, index, alias = (told(result, name) for name in ("documents", "vector_index", "live_alias"))
    assert documents["decisions"] == [{"decision": "new", "documents": 3}]
    assert (documents["listed"], documents["snippets_made"], documents["snippets_saved"]) == (3, 9, 0)
    assert (index["decision"], index["rows"], index["embedded"], index["documents"]) == ("new", 9, 9, 3)
    assert (alias["changed"], alias["generation"], alias["previous"]) == (True, 1, "none")
    assert alias["index_hash"] == index["index_hash"] == version(result, "vector_index")
    assert alias["history"][0]["change"] == "swap"
    assert {row["gate"]: row["ok"] for row in alias["gates"]}["sealed"]
    assert version(result, "live_alias") == "1"
    with world.open() as fence:
        assert version(result, "documents") == fence.documents.corpus_digest() == documents["corpus_digest"]
        assert fence.aliases.resolve(ALIAS).index_hash == index["index_hash"]


def test_a_second_run_does_nothing_and_has_the_data_versions_of_the_first(world: World) -> None:
    world.write_all()
    first, embedded = world.run(), world.embedder.seen.total()
    again = world.run()
    for name in ("documents", "vector_index", "live_alias"):
        assert version(first, name) == version(again, name)
    documents = told(again, "documents")
    assert documents["decisions"] == [{"decision": "duplicate", "documents": 3}]
    assert (documents["unread"], documents["snippets_made"], documents["snippets_saved"]) == (3, 0, 9)
    assert documents["characters_saved"] == sum(len(text_of(name)) for name in NAMES)
    index = told(again, "vector_index")
    assert (index["decision"], index["embedded"], index["embedded_before"]) == ("duplicate", 0, 9)
    assert told(again, "live_alias")["changed"] is False
    assert world.embedder.seen.total() == embedded


def test_an_edit_embeds_one_snippet_and_the_metadata_says_what_has_changed(world: World) -> None:
    world.write_all()
    first = world.run()
    world.write("pay", text_of("pay", 1))
    again = world.run()
    assert told(again, "vector_index")["embedded"] == 1
    inputs = {row["input"]: row for row in told(again, "vector_index")["inputs"]}
    assert inputs["corpus"]["before"] == version(first, "documents")
    assert inputs["metric"]["before"] == ""
    assert inputs["documents"]["now"] == "0 added, 0 removed, 1 changed, 2 unchanged"
    alias = told(again, "live_alias")
    assert (alias["changed"], alias["previous"]) == (True, version(first, "vector_index"))
    assert [row["index_hash"] for row in alias["history"]] == [
        version(again, "vector_index"),
        version(first, "vector_index"),
    ]
    for name in ("documents", "vector_index", "live_alias"):
        assert version(first, name) != version(again, name)


def test_an_edit_that_is_reverted_comes_back_to_the_versions_of_before(world: World) -> None:
    world.write_all()
    first = world.run()
    world.write("pay", text_of("pay", 1))
    world.run()
    world.write("pay", text_of("pay"))
    back = world.run()
    assert version(back, "vector_index") == version(first, "vector_index")
    assert told(back, "vector_index")["decision"] == "duplicate"
    assert version(back, "live_alias") == "3"


def test_charts_are_pictures_that_can_be_drawn(world: World) -> None:
    world.write_all()
    result = world.run()
    for name in ("documents", "vector_index"):
        svg = picture(told(result, name)["chart"])
        assert svg.tag.endswith("svg")
        assert [each.text for each in svg.iter("{http://www.w3.org/2000/svg}text")][-1] in ("3", "9")


def test_a_document_that_fails_fails_the_check_and_spoils_nothing_else(world: World) -> None:
    world.write_all()
    world.write("bad", "this will fail")
    result = world.run()
    evaluation = checked(result, "every_document_ingested")
    assert not evaluation.passed
    assert evaluation.severity is dg.AssetCheckSeverity.WARN
    assert "1 document was not ingested" in evaluation.description
    (failure,) = told(result, "documents")["failures"]
    assert failure["doc_id"] == "bad.txt"
    assert told(result, "vector_index")["documents"] == 3
    world.write("bad", "this is good")
    assert checked(world.run(), "every_document_ingested").passed


def test_what_is_skipped_is_in_the_metadata(world: World) -> None:
    world.write_all()
    (world.source / "scan.pdf").write_bytes(b"%PDF")
    (world.source / "out").symlink_to(world.source.parent)
    result = world.run()
    metadata = told(result, "documents")
    assert (metadata["skipped"], metadata["skipped_special"]) == (2, 1)
    assert metadata["skipped_extensions"] == {".pdf": 1}
    evaluation = checked(result, "every_document_ingested")
    assert evaluation.passed
    assert evaluation.metadata["skipped"].value == 2


def test_an_empty_file_fails_the_check_unless_it_is_allowed(world: World) -> None:
    world.write_all()
    (world.source / "empty.md").write_text("")
    result = world.run()
    assert not checked(result, "every_document_ingested").passed
    assert told(result, "documents")["failures"][0]["message"] == "document 'empty.md': its text is empty"
    assert checked(world.run(world.documents(allow_empty_text=True)), "every_document_ingested").passed


def test_random_ids_are_in_the_metadata_of_the_second_run(world: World) -> None:
    def exported() -> list[Document]:
        return [Document(str(uuid.uuid4()), f"text {number}") for number in range(4)]

    documents = build_ingest_asset(exported)
    assert "random_ids" not in told(world.run(documents), "documents")
    metadata = told(world.run(documents), "documents")
    assert metadata["random_ids"] == 4
    assert "an id that stays the same" in metadata["random_ids_hint"]


def test_a_source_that_is_not_there_fails_clearly(world: World) -> None:
    with pytest.raises(ValidationError, match="does not exist"):
        world.run()


def test_a_prune_retracts_what_the_source_no_longer_has(world: World) -> None:
    world.write_all()
    documents = world.documents(prune="scoped", max_prune_share=0.5)
    world.run(documents)
    (world.source / "pay.txt").unlink()
    result = world.run(documents)
    assert {row["decision"]: row["documents"] for row in told(result, "documents")["decisions"]} == {
        "duplicate": 2,
        "retracted": 1,
    }


def test_a_callable_makes_the_source_in_the_run(world: World) -> None:
    made = build_ingest_asset(lambda: [Document("a", "one"), Document("b", "two")])
    assert told(world.run(made), "documents")["listed"] == 2


def test_keys_names_and_groups_are_what_they_are_told_to_be(world: World) -> None:
    world.write_all()
    documents = world.documents(name="pages", key_prefix=["hr", "eu"], group_name="handbook")
    index = world.index(name="vectors", key_prefix="hr", deps=[documents], group_name="handbook")
    alias = world.alias(index=index, key=dg.AssetKey(["hr", "live"]), group_name="handbook")
    result = world.run(documents, index, alias)
    assert documents.key == dg.AssetKey(["hr", "eu", "pages"])
    assert checked(result, "every_document_ingested").asset_key == documents.key
    assert (index.key.path, alias.key.path) == (["hr", "vectors"], ["hr", "live"])
    assert {each.group_names_by_key[each.key] for each in (documents, index, alias)} == {"handbook"}


def test_a_whole_key_takes_the_place_of_the_name(world: World) -> None:
    world.write_all()
    documents = world.documents(key=["hr", "pages"])
    assert checked(world.run(documents), "every_document_ingested").asset_key.path == ["hr", "pages"]


def test_the_alias_needs_an_index_that_was_materialized(world: World) -> None:
    result = world.run(world.alias(), ok=False)
    failure = result.failure_data_for_node("live_alias")
    assert failure is not None
    assert "has no INDEX_HASH yet" in failure.user_failure_data.description  # type: ignore[operator]


def test_a_gate_that_fails_leaves_the_alias_where_it_was(world: World) -> None:
    world.write_all()
    world.run()
    before = world.seal().index_hash
    for name in NAMES[1:]:
        (world.source / f"{name}.txt").unlink()
    documents = world.documents(prune="scoped", max_prune_share=1.0)
    strict = world.alias(gates=Gates(max_shrinkage=0.1))
    result = world.run(documents, world.index(), strict, ok=False)
    failure = result.failure_data_for_node("live_alias")
    assert failure is not None
    assert "The alias was not moved" in failure.user_failure_data.description  # type: ignore[operator]
    assert "gates" in failure.user_failure_data.metadata
    assert world.seal().index_hash == before


def test_another_alias_name_is_refused_clearly(world: World) -> None:
    world.write_all()
    with pytest.raises(ValidationError, match="Not An Alias"):
        world.run(world.documents(), world.index(), build_alias_asset("Not An Alias"))


def test_an_index_may_be_described_by_a_plain_spec(world: World) -> None:
    world.write_all()
    result = world.run(world.documents(), build_index_asset(world.spec()))
    assert told(result, "vector_index")["rows"] == 9


def shards_of(names: list[str]) -> dict[str, list[str]]:
    by_shard: dict[str, list[str]] = {}
    for name in names:
        by_shard.setdefault(f"{shard_of('default', f'{name}.txt'):02d}", []).append(name)
    return by_shard


def test_a_shard_ingests_its_own_documents_and_its_version_is_of_them_alone(world: World) -> None:
    names = [f"d{at}" for at in range(20)]
    world.write_all(names)
    by_shard = shards_of(names)
    one, other = list(by_shard)[:2]
    documents = world.documents(shards=True)
    first = world.run(documents, partition_key=one)
    assert told(first, "documents")["listed"] == len(by_shard[one])
    world.run(documents, partition_key=other)
    assert version(world.run(documents, partition_key=one), "documents") == version(first, "documents")


@pytest.mark.parametrize("others", [[], ["00"]], ids=["alone", "with another"])
def test_a_doc_id_that_is_not_normalised_is_in_the_partition_of_the_shard_it_lives_in(
    world: World, others: list[str]
) -> None:
    doc_id = "café/menü"
    key = f"{shard_of('default', doc_id):02d}"
    raw = unicodedata.normalize("NFD", doc_id)
    assert f"{shard_of('default', raw):02d}" != key
    text = ["first"]
    documents = build_ingest_asset(lambda: [Document(raw, text[0])], shards=True)
    ends = sorted([key, *others])
    tags = {"dagster/asset_partition_range_start": ends[0], "dagster/asset_partition_range_end": ends[-1]}
    versions = []
    for text[0] in ("first", "second"):
        events = world.run(documents, tags=tags).asset_materializations_for_node("documents")
        assert events[0].metadata["listed"].value == 1
        versions.append((events[0].tags or {})["dagster/data_version"])
    assert versions[0] != versions[1]


def test_a_prefix_is_part_of_the_doc_id_that_chooses_the_shard(world: World) -> None:
    names = [f"d{at}" for at in range(12)]
    world.write_all(names)
    by_shard = shards_of([f"two/{name}" for name in names])
    documents = world.documents(shards=True, prefix="two/", prune="scoped", max_prune_share=1.0)
    for key, inside in list(by_shard.items())[:3]:
        for new in (len(inside), 0):
            metadata = told(world.run(documents, partition_key=key), "documents")
            assert (metadata["listed"], metadata["unread"]) == (len(inside), len(inside) - new)
    with world.open() as fence:
        wanted = {f"{name}.txt" for inside in list(by_shard.values())[:3] for name in inside}
        assert {head.doc_id for head in fence.documents.heads()} == wanted


def test_the_shards_of_one_source_are_one_origin_and_another_source_conflicts(world: World) -> None:
    names = [f"d{at}" for at in range(6)]
    world.write_all(names)
    by_shard = shards_of(names)
    documents = world.documents(shards=True)
    for key in by_shard:
        world.run(documents, partition_key=key)
    world.write(names[0], "edited")
    whole = told(world.run(world.documents()), "documents")  # the same source, without shards
    assert whole["listed"] == 6
    other = build_ingest_asset(lambda: DocumentsSource([Document("d1.txt", "other")], name="crm"))
    taking = build_ingest_asset(lambda: DocumentsSource([Document("d1.txt", "other")], name="crm"), take_over=True)
    with world.open() as fence:
        world.run(other)
        assert [snippet.text for snippet in fence.documents.snippets("d1.txt")] != ["other"]
        world.run(taking)
        assert [snippet.text for snippet in fence.documents.snippets("d1.txt")] == ["other"]


def test_what_a_prune_leaves_to_another_source_is_in_the_metadata(world: World) -> None:
    def brought(origin: str, *names: str) -> dg.AssetsDefinition:
        given = [Document(name, "same text") for name in names]
        return build_ingest_asset(lambda: DocumentsSource(given, name=origin), prune="scoped", max_prune_share=1.0)

    assert "kept" not in told(world.run(brought("one", "a", "b")), "documents")
    world.run(brought("two", "b", "c"))
    assert told(world.run(brought("one", "a")), "documents")["kept"] == 1
    with world.open() as fence:
        assert {head.doc_id for head in fence.documents.heads()} == {"a", "b", "c"}


def test_a_backfill_of_all_shards_run_twice_ingests_every_document_once(world: World) -> None:
    names = [f"d{at}" for at in range(90)]
    world.write_all(names)
    documents = world.documents(shards=True)
    tags = {
        "dagster/asset_partition_range_start": SHARD_PARTITIONS.get_first_partition_key() or "",
        "dagster/asset_partition_range_end": SHARD_PARTITIONS.get_last_partition_key() or "",
    }
    first = world.run(documents, tags=tags)
    events = first.asset_materializations_for_node("documents")
    assert len(events) == 64
    assert events[0].metadata["listed"].value == 90
    assert plain(events[0].metadata)["decisions"] == [{"decision": "new", "documents": 90}]
    cut = len(world.chunker.cut)
    again = world.run(documents, tags=tags).asset_materializations_for_node("documents")
    assert plain(again[0].metadata)["decisions"] == [{"decision": "duplicate", "documents": 90}]
    assert again[0].metadata["unread"].value == 90
    assert {(each.tags or {})["dagster/data_version"] for each in (*events, *again)} == {
        events[0].metadata["corpus_digest"].value
    }
    assert cut == len(world.chunker.cut) == 90
    # A shard by itself knows what the backfill knew of it.
    key = next(iter(shards_of(names)))
    alone = told(world.run(documents, partition_key=key), "documents")
    assert alone["unread"] == alone["listed"] == len(shards_of(names)[key])
    with world.open() as fence:
        assert sorted(head.doc_id for head in fence.documents.heads()) == sorted(f"{name}.txt" for name in names)
        assert fence.audit.check().ok


def test_a_shard_prunes_its_own_documents_alone(world: World) -> None:
    names = [f"d{at}" for at in range(30)]
    world.write_all(names)
    documents = world.documents(shards=True, prune="scoped")
    tags = {"dagster/asset_partition_range_start": "00", "dagster/asset_partition_range_end": "63"}
    world.run(documents, tags=tags)
    gone, other = [group[0] for group in shards_of(names).values()][:2]
    for name in (gone, other):
        (world.source / f"{name}.txt").unlink()
    result = world.run(documents, partition_key=f"{shard_of('default', f'{gone}.txt'):02d}")
    assert {row["decision"]: row["documents"] for row in told(result, "documents")["decisions"]}["retracted"] == 1
    with world.open() as fence:
        assert fence.documents.get(f"{gone}.txt") is None
        assert fence.documents.get(f"{other}.txt") is not None


def test_a_full_prune_by_shards_is_refused() -> None:
    with pytest.raises(ValidationError, match="all other shards"):
        build_ingest_asset("anywhere", shards=True, prune="full")
