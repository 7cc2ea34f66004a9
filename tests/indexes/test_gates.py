"""Gates: each with its numbers, in the log or in the refusal; golden queries are checked line by line."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ragfence.errors import EmbedderUnknown, GateFailed, StoreUnavailable, ValidationError
from ragfence.indexes.backends.backend import FoundRow
from ragfence.indexes.gates import Gates, GoldenQuery, load_golden
from tests.indexes.alias_world import TEXTS, AliasWorld, hash_of
from tests.indexes.folder_backend import WordEmbedder


@pytest.fixture
def world(tmp_path: Path) -> Iterator[AliasWorld]:
    made = AliasWorld(tmp_path)
    yield made
    made.close()


def report(swapped: Any) -> dict[str, tuple[bool, float | None, float | None]]:
    return {each.gate: (each.ok, each.value, each.limit) for each in swapped.gates}


def refusal(world: AliasWorld, index_hash: str, **more: Any) -> dict[str, Any]:
    """Of the one gate that failed; the log is as it was."""
    before = world.catalog.head()
    with pytest.raises(GateFailed) as refused:
        world.aliases.swap("docs", index_hash, **more)
    assert world.catalog.head() == before
    (failed,) = [each for each in refused.value.report if not each["ok"]]
    return dict(failed)


def golden_file(folder: Path, *queries: dict[str, Any]) -> str:
    file = folder / "golden.jsonl"
    file.write_text("# what must be found\n\n" + "\n".join(json.dumps(each) for each in queries), encoding="utf-8")
    return str(file)


def test_the_first_swap_has_the_gates_that_need_no_other_build(world: AliasWorld) -> None:
    swapped = world.aliases.swap("docs", world.build("one"))
    assert report(swapped) == {"sealed": (True, 1, None), "rows": (True, 5, 5), "dimension": (True, 64, 64)}
    (entry,) = world.aliases.history("docs")
    assert [each["gate"] for each in entry.gates] == ["sealed", "rows", "dimension"]
    assert not entry.forced


def test_rows_that_were_lost_are_seen(world: AliasWorld) -> None:
    one = world.build("one")
    world.backend.lose(world.physical(one), 2)
    assert refusal(world, one) == {
        "gate": "rows",
        "ok": False,
        "value": 3,
        "limit": 5,
        "detail": "not as many as were sealed",
    }


def test_vectors_of_another_length_are_seen(world: AliasWorld) -> None:
    attempt = world.begin("one")
    seal = world.write(attempt, embedder=WordEmbedder(dimension=32))
    assert world.seal(attempt, type(seal)(**{f: getattr(seal, f) for f in seal.__slots__} | {"dimension": 64}))
    failed = refusal(world, attempt.index_hash)
    assert (failed["gate"], failed["value"], failed["limit"]) == ("dimension", 32, 64)


def test_a_build_that_shrank_is_refused_and_a_larger_one_is_not(world: AliasWorld) -> None:
    five, four, three = world.build("five"), world.build("four", TEXTS[:4]), world.build("three", TEXTS[:3])
    world.aliases.swap("docs", five)
    failed = refusal(world, three)
    assert (failed["gate"], failed["value"], failed["limit"], failed["detail"]) == (
        "shrinkage",
        0.4,
        0.2,
        "5 to 3 rows",
    )
    assert report(world.aliases.swap("docs", four))["shrinkage"] == (True, 0.2, 0.2)
    assert report(world.aliases.swap("docs", five))["shrinkage"] == (True, 0.0, 0.2)
    assert report(world.aliases.swap("docs", three, gates=Gates(max_shrinkage=0.5)))["shrinkage"] == (True, 0.4, 0.5)


def test_what_is_exactly_at_the_limit_passes_every_gate(world: AliasWorld) -> None:
    ten = [f"text {at}" for at in range(10)]
    before, after = world.build("ten", ten), world.build("seven", ten[:7])
    world.aliases.swap("docs", before)
    found = frozenset({*map(hash_of, ten[:7]), "one", "two", "three"})
    world.coverage[after] = 1 / 3
    gates = Gates(
        max_shrinkage=0.3,
        min_coverage=1 / 3,
        min_overlap=0.7,
        golden=[GoldenQuery("text", found, "snippet_id", k=10, min_recall=0.7)] * 21,
        min_recall=0.7,
    )
    told = report(world.aliases.swap("docs", after, gates=gates))
    assert {gate: told[gate][:2] for gate in ("golden", "coverage", "overlap", "shrinkage")} == {
        "golden": (True, 0.7),
        "coverage": (True, 0.333333333),
        "overlap": (True, 0.7),
        "shrinkage": (True, 0.3),
    }


def test_what_is_a_little_beyond_the_limit_is_shown_to_be_so(world: AliasWorld) -> None:
    one = world.build("one")
    world.coverage[one] = 1 - 1e-7
    failed = refusal(world, one, gates=Gates(min_coverage=1.0))
    assert (failed["value"], failed["limit"]) == (0.9999999, 1.0)


def test_coverage_is_asked_for_where_there_is_a_limit(world: AliasWorld) -> None:
    one = world.build("one")
    world.coverage[one] = 0.75
    failed = refusal(world, one, gates=Gates(min_coverage=0.8))
    assert (failed["gate"], failed["value"], failed["limit"]) == ("coverage", 0.75, 0.8)
    assert report(world.aliases.swap("docs", one, gates=Gates(min_coverage=0.7)))["coverage"] == (True, 0.75, 0.7)


def test_golden_queries_must_find_what_they_must(world: AliasWorld, tmp_path: Path) -> None:
    one, two = world.build("one"), world.build("two", [*TEXTS[1:], "something else altogether"])
    golden = golden_file(
        tmp_path,
        {"query": "when do leases expire on the clock", "snippet_id": hash_of(TEXTS[0]), "k": 1},
        {"query": "fence number back", "snippet_id": [hash_of(TEXTS[1])], "k": 2, "min_recall": 1},
    )
    swapped = world.aliases.swap("docs", one, gates=Gates(golden=golden))
    assert report(swapped)["golden"] == (True, 1.0, 0.9)
    failed = refusal(world, two, gates=Gates(golden=golden))
    assert (failed["gate"], failed["value"]) == ("golden", 0.5)
    assert "1 incomplete: 'when do leases expire on the clock'" in failed["detail"]
    swapped = world.aliases.swap("docs", two, gates=Gates(golden=golden, min_recall=0.5))
    assert report(swapped)["golden"] == (True, 0.5, 0.5)
    assert report(swapped)["overlap"] == (True, 0.5, 0.0), "all of one query, nothing of the other"
    assert refusal(
        world,
        one,
        gates=Gates(golden=[GoldenQuery(TEXTS[1], frozenset({"doc-0"}), "doc_id", 1, 1.0)], min_recall=0),
    )["detail"].startswith("1 queries, 1 below their own limit: 'a fence number never goes back' 0.00 of 1")


def test_the_policy_names_the_golden_queries(tmp_path: Path) -> None:
    golden = golden_file(tmp_path, {"query": "fence number", "doc_id": "doc-4", "k": 1})
    world = AliasWorld(tmp_path, policy={"indexes": {"golden": golden, "min_recall": 0.5}})
    one = world.build("one")
    assert refusal(world, one)["limit"] == 0.5
    assert "golden" not in report(world.aliases.swap("docs", one, gates=Gates(golden="")))
    world.close()


def test_overlap_compares_what_both_builds_find(world: AliasWorld) -> None:
    one = world.build("one")
    near = world.build("near", [*TEXTS[:4], "the catalog is a log of entries"])
    far = world.build("far", [f"{text} and more words" for text in TEXTS])
    world.aliases.swap("docs", one)
    swapped = world.aliases.swap("docs", near, gates=Gates(min_overlap=0.5, overlap_queries=3))
    assert report(swapped)["overlap"] == (True, 0.8, 0.5)
    assert world.backend.searches == 6, "three queries, asked of both"
    failed = refusal(world, far, gates=Gates(min_overlap=0.5))
    assert (failed["gate"], failed["value"], failed["detail"]) == ("overlap", 0.0, "5 queries")


def test_an_empty_build_finds_nothing_of_what_the_live_one_finds(world: AliasWorld) -> None:
    full, empty, other = world.build("full"), world.build("empty", []), world.build("other", [])
    world.aliases.swap("docs", full)
    gates = Gates(min_overlap=0.5, max_shrinkage=1)
    failed = refusal(world, empty, gates=gates)
    assert (failed["gate"], failed["value"], failed["detail"]) == ("overlap", 0.0, "there are no rows to search with")
    world.aliases.swap("docs", empty, gates=gates, force=True, reason="the documents were retracted")
    assert report(world.aliases.swap("docs", other, gates=gates))["overlap"] == (True, None, 0.5)


def test_an_empty_build_may_follow_one_that_is_gone(world: AliasWorld) -> None:
    one, empty = world.build("one"), world.build("empty", [])
    world.aliases.swap("docs", one)
    world.backend.drop(world.physical(one))
    swapped = world.aliases.swap("docs", empty, gates=Gates(min_overlap=0.5, max_shrinkage=1))
    assert report(swapped)["overlap"] == (True, None, 0.5)


def test_each_build_is_asked_with_its_own_embedder(world: AliasWorld) -> None:
    one = world.build("one", embedder=WordEmbedder("1", 64))
    two = world.build("two", embedder=WordEmbedder("2", 32))
    world.aliases.swap("docs", one)
    gates = Gates(golden=[GoldenQuery(text, frozenset({hash_of(text)}), "snippet_id", 1) for text in TEXTS])
    assert report(world.aliases.swap("docs", two, gates=gates))["overlap"] == (True, 1.0, 0.0)


def test_a_live_build_that_is_gone_does_not_hold_up_its_successor(world: AliasWorld) -> None:
    one, two = world.build("one"), world.build("two")
    world.aliases.swap("docs", one)
    world.backend.drop(world.physical(one))
    swapped = world.aliases.swap("docs", two, gates=Gates(min_overlap=0.5))
    assert report(swapped)["overlap"] == (True, None, 0.5)


def test_a_forced_swap_needs_a_reason_and_is_recorded(world: AliasWorld) -> None:
    five, one = world.build("five"), world.build("one", TEXTS[:1])
    world.aliases.swap("docs", five)
    for reason in ("", "  "):
        with pytest.raises(ValidationError, match="needs a reason"):
            world.aliases.swap("docs", one, force=True, reason=reason)
    swapped = world.aliases.swap("docs", one, force=True, reason="the rest is private")
    assert swapped.forced
    entry = world.aliases.history("docs")[0]
    assert (entry.forced, entry.reason) == (True, "the rest is private")
    assert [(each["gate"], each["value"]) for each in entry.gates if not each["ok"]] == [("shrinkage", 0.8)]
    assert not world.aliases.swap("docs", five, force=True, reason="nothing to force").forced


def test_a_rollback_is_held_up_by_rows_alone(world: AliasWorld, tmp_path: Path) -> None:
    small, large = world.build("small", TEXTS[:1]), world.build("large")
    world.aliases.swap("docs", small)
    world.aliases.swap("docs", large)
    rolled = world.aliases.rollback("docs", reason="it is bad")
    assert rolled.index_hash == small
    assert report(rolled)["shrinkage"] == (False, 0.8, 0.2)
    assert not rolled.forced
    world.backend.lose(world.physical(large), 1)
    with pytest.raises(GateFailed, match="rows 4"):
        world.aliases.rollback("docs")
    world.backend.away = True
    with pytest.raises(StoreUnavailable):
        world.aliases.rollback("docs")


def test_a_rollback_works_without_embedder_and_golden_queries(tmp_path: Path) -> None:
    golden = golden_file(tmp_path, {"query": "fence number", "doc_id": "doc-1", "k": 1})
    world = AliasWorld(tmp_path, policy={"indexes": {"golden": golden, "min_overlap": 0.5}})
    one, two = world.build("one"), world.build("two")
    world.aliases.swap("docs", one)
    world.aliases.swap("docs", two)
    Path(golden).write_text("nonsense")
    with pytest.raises(ValidationError, match="line 1: not valid JSON"):
        world.aliases.swap("docs", one)
    rolled = world.aliases.rollback("docs")
    assert [(each.gate, each.ok) for each in rolled.gates if not each.ok] == [("golden", False)]

    def no_embedder(seal: object) -> Any:
        raise EmbedderUnknown("nobody registered 'words'")

    world.aliases._embedder_of = no_embedder  # type: ignore[assignment]
    golden_file(tmp_path, {"query": "fence number", "doc_id": "doc-1", "k": 1})
    with pytest.raises(EmbedderUnknown):
        world.aliases.swap("docs", two)
    rolled = world.aliases.rollback("docs")
    failed = [each for each in rolled.gates if not each.ok]
    assert [each.gate for each in failed] == ["golden", "overlap"]
    assert failed[0].detail == "could not be measured: nobody registered 'words'"
    world.close()


def test_a_golden_query_is_what_its_line_says(tmp_path: Path) -> None:
    file = golden_file(
        tmp_path,
        {"query": "a", "doc_id": "x"},
        {"query": "b", "snippet_id": ["s", "t"], "k": 3, "min_recall": 0.5},
        {"query": "c", "doc_id": [f"d{at}" for at in range(12)]},
    )
    assert load_golden(file) == [
        GoldenQuery("a", frozenset({"x"})),
        GoldenQuery("b", frozenset({"s", "t"}), "snippet_id", 3, 0.5),
        GoldenQuery("c", frozenset(f"d{at}" for at in range(12)), k=12),
    ]
    found = [FoundRow(name, "d", "", 0, 0, 0, 0, "", "", "{}", 1.0) for name in ("s", "u", "v", "t")]
    assert load_golden(file)[1].recall(found) == 0.5


@pytest.mark.parametrize(
    ("line", "mistake"),
    [
        ("nonsense", "line 3: not valid JSON"),
        ("[1]", "must be an object"),
        ('{"query": "a"}', "needs either doc_id or snippet_id"),
        ('{"query": "a", "doc_id": "x", "snippet_id": "y"}', "needs either"),
        ('{"query": " ", "doc_id": "x"}', "query must be text"),
        ('{"query": "a", "doc_id": []}', "must be an id"),
        ('{"query": "a", "doc_id": [1]}', "must be an id"),
        ('{"query": "a", "doc_id": "x", "k": 0}', "k must be 1 to 1,000"),
        ('{"query": "a", "doc_id": "x", "k": true}', "k must be"),
        ('{"query": "a", "doc_id": ["x", "y"], "k": 1}', "can never all be found"),
        ('{"query": "a", "doc_id": "x", "min_recall": 2}', "min_recall must be 0 to 1"),
        ('{"query": "a", "docid": "x"}', "no such field: 'docid'"),
    ],
)
def test_a_mistake_in_the_golden_queries_is_told_with_its_line(line: str, mistake: str, tmp_path: Path) -> None:
    file = tmp_path / "golden.jsonl"
    file.write_text(f'{{"query": "fine", "doc_id": "x"}}\n\n{line}\n')
    with pytest.raises(ValidationError, match=mistake) as refused:
        load_golden(file)
    assert refused.value.details["problems"][0].startswith("line 3: ")


def test_golden_queries_that_are_not_there_are_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="cannot read the golden queries"):
        load_golden(tmp_path / "absent.jsonl")
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(ValidationError, match="is a pipe, not a regular file"):
        load_golden(tmp_path / "pipe.jsonl")
    with pytest.raises(ValidationError, match="is a device, not a regular file"):
        load_golden("/dev/zero")
    (tmp_path / "empty.jsonl").write_text("# nothing\n")
    with pytest.raises(ValidationError, match="the file has no queries"):
        load_golden(tmp_path / "empty.jsonl")


@pytest.mark.parametrize(
    "wrong", [{"min_overlap": 1.5}, {"max_shrinkage": -0.1}, {"min_recall": 2}, {"overlap_queries": 0}]
)
def test_a_limit_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        Gates(**wrong)
