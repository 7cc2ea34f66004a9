"""`ragfence swap`, `ragfence rollback`, `ragfence alias`, `ragfence reconcile` and `ragfence search`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import ragfence
from ragfence import Document
from ragfence.indexes.build_log import Attempt, BuildEntry
from tests.cli.conftest import Site, run
from tests.cli.test_process import process

LEASES = "# Leases\n\nA lease expires on the clock of the store."
FENCES = "# Fences\n\nA fence number never goes back and never repeats."
LONG = "# Long\n\n" + "Epochs are periods in which the store is known to be whole. " * 30


class Built(NamedTuple):
    folder: Path
    first: str
    second: str


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Two builds, and an alias that points at the first. For copying: nobody changes it."""
    folder = tmp_path_factory.mktemp("built")
    with ragfence.open(folder / "fences.db", owner="worker-7") as fence:
        fence.documents.ingest(Document("guide/leases.md", LEASES, source_url="https://e.example/leases"))
        fence.documents.ingest(Document("guide/fences.md", FENCES, content_type="text/markdown"))
        first = fence.indexes.build().index_hash
        fence.aliases.swap("docs", first, reason="the first")
        fence.documents.ingest(Document("guide/long.md", LONG))
        second = fence.indexes.build().index_hash
    return Built(folder, first, second)


@pytest.fixture
def place(built: Built, tmp_path: Path) -> Iterator[Site]:
    made = Site("embedded", tmp_path, (), {})
    shutil.copytree(built.folder, tmp_path / ".ragfence")
    yield made
    for fence in made.opened:
        fence.close()


def target(place: Site, alias: str = "docs") -> str:
    return str(place.open().aliases.resolve(alias).index_hash)


def shrink(place: Site) -> str:
    """A build of one document, which loses too many rows to be swapped to."""
    fence = place.open()
    for doc_id in ("guide/fences.md", "guide/long.md"):
        fence.documents.retract(doc_id)
    return str(fence.indexes.build().index_hash)


def gates_of(told: dict[str, Any]) -> dict[str, bool]:
    return {gate["gate"]: gate["ok"] for gate in told["gates"]}


def test_a_swap_moves_the_alias_and_shows_its_gates(place: Site, built: Built) -> None:
    done = place.run("swap", "docs", built.second[:8], "--reason", "more documents")
    assert (done.exit_code, done.stderr) == (0, "")
    head, *gates, last = done.stdout.splitlines()
    assert head.split() == ["gate", "verdict", "value", "limit", "detail"]
    assert [line.split()[:2] for line in gates] == [
        ["sealed", "ok"],
        ["rows", "ok"],
        ["dimension", "ok"],
        ["shrinkage", "ok"],
    ]
    assert gates[2].split() == ["dimension", "ok", "256", "256"]
    assert last == f"docs -> {built.second}, generation 2 (was {built.first})"
    assert target(place) == built.second
    again = place.run("swap", "docs", built.second)
    assert again.stdout == f"docs already points at {built.second}, generation 2\n"
    assert place.json("swap", "docs", built.second.upper())["changed"] is False


def test_latest_is_the_build_that_was_sealed_last(place: Site, built: Built) -> None:
    told = place.json("swap", "new", "latest")
    assert (told["index_hash"], told["previous"], told["generation"], told["forced"]) == (built.second, None, 2, False)
    assert gates_of(told) == {"sealed": True, "rows": True, "dimension": True}
    # A purge writes a newer entry for the older build, which does not become the latest by that.
    fence = place.open()
    entry = fence.indexes.get(built.first)
    assert entry is not None
    purged = BuildEntry(2, "purged", entry.at_ms + 86_400_000, "w", entry.token, entry.seal, "a document was purged")
    assert fence.indexes.builds_log.append(built.first, purged)
    assert place.json("swap", "other", "latest")["index_hash"] == built.second


def test_there_may_be_no_latest(tmp_path: Path) -> None:
    ragfence.open().close()
    done = run("swap", "docs", "latest")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "there is no sealed build yet" in done.stderr


def test_a_swap_happens_only_from_where_it_is_expected(place: Site, built: Built) -> None:
    for expected in ("none", built.second[:10]):
        told = place.json("swap", "docs", built.second, "--expect", expected, code=1)["error"]
        assert told["code"] == "ALIAS.moved"
    assert target(place) == built.first
    assert place.json("swap", "docs", built.second, "--expect", built.first[:10])["changed"]
    assert place.json("swap", "new", built.second, "--expect", "none")["generation"] == 3
    done = place.run("swap", "nobody", built.second, "--expect", built.first)
    assert (done.exit_code, done.stdout) == (1, "")
    assert "'nobody' does not exist" in done.stderr


def test_a_gate_that_fails_is_shown_with_the_others_and_can_be_forced(place: Site, built: Built) -> None:
    place.run("swap", "docs", built.second)
    small = shrink(place)
    done = place.run("swap", "docs", small)
    assert done.exit_code == 1
    lines = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}
    assert lines["rows"][0] == "ok"
    assert (lines["shrinkage"][0], lines["shrinkage"][2]) == ("failed", "0.2")
    assert done.stderr.startswith(f"error: 'docs' was not moved to {small}: shrinkage ")
    assert "  -> " in done.stderr
    told = place.json("swap", "docs", small, code=1)
    assert told["error"]["code"] == "ALIAS.gate_failed"
    assert gates_of(told) == {"sealed": True, "rows": True, "dimension": True, "shrinkage": False}
    refused = place.run("swap", "docs", small, "--force", env={"COLUMNS": "200"})
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "--force needs a --reason" in refused.stderr
    assert target(place) == built.second
    forced = place.run("swap", "docs", small, "--force", "--reason", "most was wrong")
    assert (forced.exit_code, forced.stderr) == (0, "")
    assert f"docs -> {small}, generation 3, forced (was {built.second})" in forced.stdout
    newest = place.json("alias", "docs", "--history")["history"][0]
    assert (newest["forced"], newest["reason"], gates_of(newest)["shrinkage"]) == (True, "most was wrong", False)
    assert "swap, forced" in place.run("alias", "docs", "--history").stdout
    assert "failed: shrinkage" in place.run("alias", "docs", "--history").stdout


def test_golden_queries_decide(place: Site, built: Built) -> None:
    good = {"query": "when does a lease expire", "doc_id": "guide/leases.md", "k": 1}
    Path("golden.jsonl").write_text(json.dumps(good) + "\n")
    Path("wrong.jsonl").write_text(json.dumps({**good, "doc_id": "guide/nobody.md"}) + "\n")
    told = place.json("swap", "docs", built.second, "--golden", "wrong.jsonl", code=1)
    assert gates_of(told)["golden"] is False
    assert gates_of(place.json("swap", "docs", built.second, "--golden", "golden.jsonl"))["golden"] is True
    done = place.run("swap", "docs", built.first, "--golden", "nowhere.jsonl")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "cannot read the golden queries nowhere.jsonl" in done.stderr


def test_a_hash_that_names_no_build_is_refused(place: Site, built: Built) -> None:
    log = place.open().indexes.builds_log
    twins = [f"abcdef01{digit * 56}" for digit in "12"]
    for index_hash in twins:
        assert log.append(index_hash, BuildEntry(1, "retired", 1, "worker-7", "", None, "forged"))
    log.begin(Attempt("cd" * 32, "t0", "rf-cd-t0", "lance", 1, 1, "worker-8"))
    for text, code, said in (
        (built.second[:7], "VALIDATION", "is not an INDEX_HASH or the beginning of one"),
        ("newest", "VALIDATION", "'newest' is not an INDEX_HASH"),
        ("abcdef01", "VALIDATION", f"2 builds begin with abcdef01:\n  {twins[0]}\n  {twins[1]}"),
        ("0123456789", "INDEX.not_sealed", "no build begins with 0123456789"),
        ("0" * 64, "INDEX.not_sealed", "this tenant has no build 000"),
        ("cdcdcdcd", "INDEX.not_sealed", "worker-8 began to build it"),
    ):
        done = place.run("swap", "docs", text)
        assert (done.exit_code, done.stdout) == (1, "")
        assert said in done.stderr
        assert place.json("swap", "docs", text, code=1)["error"]["code"] == code
    assert place.json("rollback", "docs", "--to", "latest", code=1)["error"]["code"] == "VALIDATION"
    assert place.json("swap", "docs", built.second, "--expect", "abcdef01", code=1)["error"]["code"] == "VALIDATION"
    assert target(place) == built.first


def test_an_alias_goes_back_and_forth(place: Site, built: Built) -> None:
    place.run("swap", "docs", "latest")
    done = place.run("rollback", "docs", "--reason", "it found nothing")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.endswith(f"docs -> {built.first}, generation 3 (was {built.second})\n")
    assert place.json("rollback", "docs")["index_hash"] == built.second
    assert place.json("rollback", "docs", "--to", built.first[:8])["index_hash"] == built.first
    changes = [(one["generation"], one["change"]) for one in place.json("alias", "docs", "--history")["history"]]
    assert changes == [(5, "rollback"), (4, "rollback"), (3, "rollback"), (2, "swap"), (1, "swap")]


def test_there_must_be_something_to_go_back_to(place: Site, built: Built) -> None:
    done = place.run("rollback", "docs")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "'docs' has no earlier build that is still sealed" in done.stderr
    told = place.json("rollback", "docs", "--to", built.second, code=1)["error"]
    assert "is not among the recent builds of" in told["message"]
    assert place.json("rollback", "nobody", code=1)["error"]["code"] == "VALIDATION.alias_unknown"


def test_aliases_are_listed(place: Site, built: Built) -> None:
    place.run("swap", "beta", built.second)
    told = place.json("alias")
    assert (told["generation"], [one["alias"] for one in told["aliases"]]) == (2, ["beta", "docs"])
    beta, docs = told["aliases"]
    assert (docs["index_hash"], docs["generation"], docs["rows"]) == (built.first, 1, 2)
    assert (beta["index_hash"], beta["documents"], beta["backend"]) == (built.second, 3, "lance")
    assert docs["since"].endswith("Z")
    head, *lines = place.run("alias").stdout.splitlines()
    assert head.split() == ["alias", "target", "generation", "rows", "since", "backend"]
    assert [line.split()[:4] for line in lines] == [
        ["beta", built.second, "2", str(beta["rows"])],
        ["docs", built.first, "1", "2"],
    ]


def test_one_alias_is_told_with_what_it_had_before(place: Site, built: Built) -> None:
    place.run("swap", "docs", built.second)
    told = place.json("alias", "docs")
    assert (told["index_hash"], told["before"], "history" in told) == (built.second, [built.first], False)
    done = place.run("alias", "docs", "--history", "--limit", "1")
    assert done.exit_code == 0
    assert [line.split()[1] for line in done.stdout.splitlines() if line.startswith("before")] == [built.first]
    assert done.stdout.count("swap") == 1
    assert len(place.json("alias", "docs", "--history", "--limit", "0")["history"]) == 2


def test_a_removed_alias_leaves_its_history(place: Site, built: Built) -> None:
    done = place.run("alias", "docs", "--remove", "--reason", "nobody reads it")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == f"docs: removed, generation 2 (was {built.first})\n"
    assert place.run("alias").stdout == "there is no alias yet; `ragfence swap ALIAS HASH` creates one\n"
    told = place.json("alias", "docs", "--history")
    assert (told["index_hash"], [one["change"] for one in told["history"]]) == (None, ["remove", "swap"])
    assert told["history"][0]["reason"] == "nobody reads it"
    assert place.run("alias", "docs", "--history").stdout.startswith("docs: this alias was removed\n")
    for words in (["alias", "docs"], ["search", "docs", "leases"], ["alias", "docs", "--remove", "--reason", "x"]):
        assert place.json(*words, code=1)["error"]["code"] == "VALIDATION.alias_unknown"


@pytest.mark.parametrize(
    "words",
    [
        ["alias", "--history"],
        ["alias", "--remove", "--reason", "x"],
        ["alias", "docs", "--remove"],
        ["alias", "docs", "--reason", "x"],
        ["alias", "docs", "--remove", "--history", "--reason", "x"],
        ["alias", "docs", "--history", "--limit", "-1"],
        ["swap", "docs"],
        ["search", "docs"],
        ["search", "docs", "leases", "-k", "0"],
        ["rollback"],
    ],
)
def test_wrong_usage_ends_with_2(place: Site, built: Built, words: list[str]) -> None:
    done = place.run(*words)
    assert (done.exit_code, done.stdout) == (2, "")
    assert target(place) == built.first


@pytest.mark.parametrize("words", [["alias", "nobody"], ["alias", "nobody", "--history"], ["search", "nobody", "x"]])
def test_an_alias_that_nobody_made_is_unknown(place: Site, words: list[str]) -> None:
    done = place.run(*words)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("error: there is no alias 'nobody'\n  -> `ragfence alias` lists")


def test_a_name_that_no_alias_can_have_is_refused(place: Site, built: Built) -> None:
    for words in (["swap", "My Docs", built.second], ["alias", "My Docs"], ["search", "My Docs", "x"]):
        assert "is not a valid name for an alias" in place.json(*words, code=1)["error"]["message"]


def test_a_backend_that_is_behind_is_reconciled(place: Site) -> None:
    done = place.run("reconcile")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "generation 1: all is well\n", "")
    place.open().indexes.backend("lance").unpoint("docs@default")
    done = place.run("reconcile")
    assert done.exit_code == 0
    assert "the backend's alias was behind" in done.stdout
    assert done.stdout.endswith("generation 1: 1 repaired\n")
    told = place.json("reconcile")
    assert (told["ok"], told["generation"], told["pointed"], told["failed"]) == (True, 1, [], [])


def test_a_search_is_told_with_its_citations(place: Site, built: Built) -> None:
    done = place.run("search", "docs", "when does a lease expire?", "-k", "1")
    assert (done.exit_code, done.stderr) == (0, "")
    first, url, text, foot = done.stdout.splitlines()
    assert first.startswith(" 1. 0.")
    assert first.split()[2] == "guide/leases.md"
    assert first.endswith(f"0-{len(LEASES)}")
    assert url.strip() == "https://e.example/leases"
    assert text.strip() == "# Leases A lease expires on the clock of the store."
    assert foot == f"1 snippet from docs: INDEX_HASH {built.first}, generation 1"
    told = place.json("search", "docs", "fence number", "-k", "2")
    assert (told["alias"], told["k"], told["index_hash"], told["generation"]) == ("docs", 2, built.first, 1)
    nearest, other = told["hits"]
    assert (nearest["doc_id"], nearest["section_id"], other["doc_id"]) == (
        "guide/fences.md",
        "Fences",
        "guide/leases.md",
    )
    assert nearest["score"] > other["score"]
    assert FENCES[nearest["start"] : nearest["end"]] == nearest["text"]


def test_a_long_text_is_cut_where_the_terminal_ends(place: Site, built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    place.run("swap", "docs", built.second)
    whole = place.json("search", "docs", "epochs", "-k", "1")["hits"][0]["text"]
    assert " ".join(whole.split()) in place.run("search", "docs", "epochs", "-k", "1").stdout
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    lines = place.run("search", "docs", "epochs", "-k", "1", env={"COLUMNS": "60"}).stdout.splitlines()
    assert len(lines) == 3
    assert lines[1].endswith("…")
    assert len(lines[1]) == 60


def test_an_index_of_nothing_finds_nothing(tmp_path: Path) -> None:
    with ragfence.open() as fence:
        index_hash = fence.indexes.build().index_hash
        fence.aliases.swap("docs", index_hash)
    done = run("search", "docs", "leases")
    assert (done.exit_code, done.stdout) == (0, f"0 snippets from docs: INDEX_HASH {index_hash}, generation 1\n")
    assert json.loads(run("search", "docs", "leases", "--json").stdout)["hits"] == []


def test_what_a_search_finds_cannot_steer_the_terminal(tmp_path: Path) -> None:
    with ragfence.open() as fence:
        fence.documents.ingest(Document("a[red].md", "Leases \x1b[2J [bold]expire[/bold]."))
        fence.aliases.swap("docs", fence.indexes.build().index_hash)
    told = run("search", "docs", "leases").stdout
    assert "\x1b" not in told
    assert "  a[red].md  " in told
    assert "[bold]expire[/bold]" in told


def test_a_build_whose_rows_are_gone_is_said_to_be_missing(place: Site, built: Built) -> None:
    fence = place.open()
    entry = fence.indexes.get(built.second)
    assert entry is not None
    assert entry.seal is not None
    fence.indexes.backend("lance").drop(entry.seal.physical)
    assert place.json("swap", "docs", built.second, code=1)["error"]["code"] == "INDEX.missing"
    assert target(place) == built.first


def test_a_swap_and_a_search_as_processes(place: Site, built: Built) -> None:
    for fence in place.opened:
        fence.close()
    done = process("swap", "docs", "latest", "--expect", built.first, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["index_hash"] == built.second
    found = process("search", "docs", "when does a lease expire?", "-k", "1", "--json")
    assert (found.returncode, found.stderr) == (0, "")
    assert json.loads(found.stdout)["hits"][0]["doc_id"] == "guide/leases.md"
