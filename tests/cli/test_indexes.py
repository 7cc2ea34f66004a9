"""`ragfence build`, `ragfence builds` and `ragfence gc`."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ragfence
from ragfence import Document, Operation
from ragfence.indexes.build_log import Attempt, BuildEntry
from tests.cli.conftest import Site, run
from tests.cli.test_process import at_a_terminal, process, read_until

TEXTS = {
    "guide/leases.md": "# Leases\n\nA lease expires on the clock of the store.",
    "guide/fences.md": "# Fences\n\nA fence number never goes back and never repeats.",
    "guide/aliases.md": "# Aliases\n\nAn alias points only at an index that was sealed.",
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three documents, a build of them, and an alias that points at it. For copying: nobody changes it."""
    folder = tmp_path_factory.mktemp("built")
    with ragfence.open(folder / "fences.db", owner="worker-7") as fence:
        receipts = fence.documents.ingest_many(
            [Document(doc_id, text, source_url=f"https://e.example/{doc_id}") for doc_id, text in TEXTS.items()]
        )
        assert not [receipt for receipt in receipts if receipt.failed]
        fence.aliases.swap("docs", fence.indexes.build().index_hash, reason="the first")
    return folder


@pytest.fixture
def place(built: Path, tmp_path: Path) -> Iterator[Site]:
    made = Site("embedded", tmp_path, (), {})
    shutil.copytree(built, tmp_path / ".ragfence")
    yield made
    for fence in made.opened:
        fence.close()


def live(place: Site) -> str:
    return str(place.open().aliases.resolve("docs").index_hash)


def edit(place: Site, doc_id: str = "guide/new.md", text: str = "# New\n\nSomething that nobody had written.") -> None:
    assert not place.open().documents.ingest(Document(doc_id, text)).failed


def test_a_build_is_made_and_told(place: Site) -> None:
    before = live(place)
    edit(place)
    done = place.run("build")
    assert (done.exit_code, done.stderr) == (0, "")
    told = dict(line.split(maxsplit=1) for line in done.stdout.replace("embedded now", "embedded_now").splitlines())
    assert {name: told[name].strip() for name in ("decision", "rows", "documents", "embedded_now")} == {
        "decision": "new",
        "rows": "4",
        "documents": "4",
        "embedded_now": "1 of 4 snippets",
    }
    assert before in done.stdout  # what it was taken from
    assert "4 of 4 rows, 4 of 4 vectors as written, self-recall 100.0% of every row" in done.stdout
    assert place.open().indexes.get(told["INDEX_HASH"].strip()) is not None


def test_the_same_build_is_only_named(place: Site) -> None:
    told = place.json("build")
    assert (told["decision"], told["index_hash"], told["embedded"]) == ("duplicate", live(place), 0)
    assert (told["rows"], told["documents"], told["dimension"], told["metric"]) == (3, 3, 256, "cosine")
    assert told["checks"]["vectors_equal"] == told["checks"]["vectors_compared"] == 3
    assert told["inputs"]["embedder"]["name"] == "wordllama"
    assert "embedded now  nothing" in place.run("build").stdout


def test_options_make_another_index(place: Site) -> None:
    told = place.json("build", "--metric", "dot", "--wait", "5")
    assert (told["decision"], told["metric"], told["embedded"]) == ("new", "dot", 0)
    assert told["index_hash"] != live(place)
    explained = place.json("build", "--index", "ivf_flat", "--param", "num_partitions=1", "--explain")
    assert explained["inputs"]["index"] == "ivf_flat"
    assert explained["inputs"]["parameters"] == {"num_partitions": 1}
    assert explained["differing"] == ["index", "parameters"]


def test_an_index_of_nothing_is_warned_of(tmp_path: Path) -> None:
    ragfence.open().close()
    done = run("build")
    assert done.exit_code == 0
    assert "the index is empty, because there are no documents" in done.stderr


def test_a_build_that_somebody_else_is_at_is_not_waited_for_longer_than_asked(place: Site) -> None:
    wanted = place.json("build", "--explain", "--metric", "dot")["index_hash"]
    build = Operation(kind="index", source_id=wanted, revision="1", index_hash=wanted, action="build")
    with contextlib.suppress(RuntimeError), place.open().claim(build) as op:
        assert op.is_new
        told = json.loads(process("build", "--metric", "dot", "--wait", "0", "--json").stdout)["error"]
        assert (told["code"], told["retryable"]) == ("IN_FLIGHT", True)
        raise RuntimeError("given up: the key is released")
    assert place.json("build", "--metric", "dot")["decision"] == "new"


def test_what_changed_is_explained_and_nothing_is_built(place: Site) -> None:
    edit(place)
    edit(place, "guide/leases.md", "# Leases\n\nAnother text.")
    place.open().documents.retract("guide/fences.md")
    told = place.json("build", "--explain")
    assert (told["state"], told["alias"], told["against"]) == ("not built", "docs", live(place))
    assert told["differing"] == ["corpus"]
    assert told["documents"] == {"added": 1, "removed": 1, "changed": 1, "unchanged": 1}
    done = place.run("build", "--explain", "--against", live(place)[:12], "--metric", "l2")
    assert (done.exit_code, done.stderr) == (0, "")
    lines = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line.strip()}
    assert lines["metric"] == ["l2", "changed", "cosine"]
    assert lines["embedder.name"] == ["wordllama"]
    assert lines["embedder.dimension"] == ["256"]
    assert lines["corpus"][1] == "changed"
    assert f"changed since {live(place)}: corpus, metric" in done.stdout
    assert "documents: 1 added, 1 removed, 1 changed, 1 unchanged" in done.stdout
    assert [state.index_hash for state in place.open().indexes.builds()] == [live(place)]


def test_an_index_that_did_not_change_is_said_to_be_sealed(place: Site) -> None:
    done = place.run("build", "--explain")
    assert f"{live(place)}: sealed" in done.stdout
    assert f"changed since docs, {live(place)}: nothing" in done.stdout


def test_without_one_alias_nothing_is_compared(place: Site) -> None:
    place.open().aliases.swap("other", live(place))
    assert place.json("build", "--explain")["against"] is None
    assert "not compared with another build: there are 2 aliases" in place.run("build", "--explain").stdout
    assert place.json("build", "--explain", "--against", "other")["against"] == live(place)


def test_a_retired_build_cannot_be_compared_with(place: Site) -> None:
    retired = forge(place, "ab" * 32)
    told = place.json("build", "--explain", "--against", retired, code=1)["error"]
    assert told["code"] == "INDEX.retired"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--embedder", "nobody"], 1, "'nobody' is not a known embedder"),
        (["--backend", "chroma"], 1, "'chroma' is not a known index backend"),
        (["--backend", "qdrant+http://ada:geheim@h:6333"], 1, "must not contain credentials"),
        (["--index", "nope"], 1, "lance has no index 'nope'"),
        (["--index", "flat", "--param", "x=1"], 1, "has no parameter 'x'"),
        (["--param", "x=1"], 1, "parameters need a named index"),
        (["--explain", "--against", "nobody"], 1, "'nobody' is not an INDEX_HASH"),
        (["--explain", "--against", "abcdef0123"], 1, "no build begins with abcdef0123"),
        (["--explain", "--against", "0" * 64], 1, "there is no build 000"),
        (["--metric", "hamming"], 2, "'hamming' is not one of"),
        (["--param", "x"], 2, "'x' is not NAME=VALUE"),
        (["--param", "x=1", "--param", "x=2"], 2, "x was given more than once"),
        (["--against", "docs"], 2, "--against needs --explain"),
        (["--wait", "-1"], 2, "Invalid value for '--wait'"),
    ],
)
def test_a_build_that_cannot_be_is_refused(place: Site, words: list[str], code: int, said: str) -> None:
    done = place.run("build", *words, env={"COLUMNS": "200"})
    assert (done.exit_code, done.stdout) == (code, "")
    assert said in done.stderr
    assert "geheim" not in done.stderr
    if code == 1:
        assert "  -> " in done.stderr
        assert place.json("build", *words, code=1)["error"]["message"]


def test_nothing_is_built_where_there_is_no_store() -> None:
    for words in (["build"], ["builds"], ["gc"], ["alias"], ["reconcile"], ["search", "docs", "x"]):
        done = run(*words)
        assert (done.exit_code, done.stdout) == (1, "")
        assert "there is no fence store at" in done.stderr
    assert not Path(".ragfence").exists()


def forge(place: Site, index_hash: str, number: int = 1) -> str:
    """A build that was retired, under a hash that no inputs have."""
    entry = BuildEntry(number, "retired", 1_700_000_000_000, "worker-7", "", None, "no alias can reach it")
    assert place.open().indexes.builds_log.append(index_hash, entry)
    return index_hash


def test_builds_are_listed_with_their_aliases(place: Site) -> None:
    retired = forge(place, "ab" * 32)
    attempt = Attempt("cd" * 32, "t0", "rf-cd-t0", "lance", 1, place.open().inspector.fences.now_ms(), "worker-8")
    place.open().indexes.builds_log.begin(attempt)
    told = place.json("builds")
    first, second = told["builds"]
    assert (first["index_hash"], first["state"], first["rows"], first["sealed_at"]) == (retired, "retired", None, None)
    assert (second["index_hash"], second["state"], second["aliases"]) == (live(place), "sealed", ["docs"])
    assert (second["rows"], second["documents"], second["embedder"], second["backend"]) == (3, 3, "wordllama", "lance")
    assert second["sealed_at"].endswith("Z")
    assert [(each["index_hash"], each["owner"]) for each in told["attempts"]] == [("cd" * 32, "worker-8")]
    done = place.run("builds")
    assert (done.exit_code, done.stderr) == (0, "")
    head, one, two, last = done.stdout.splitlines()
    assert head.split() == ["hash", "state", "rows", "documents", "embedder", "backend", "sealed", "at", "aliases"]
    assert one.split() == [retired, "retired", "-", "-", "-", "-", "-", "-"]
    assert two.split()[:6] == [live(place), "sealed", "3", "3", "wordllama", "lance"]
    assert two.split()[-1] == "docs"
    assert last.startswith(f"not sealed: {'cd' * 32}, started by worker-8 ")


def test_a_purge_does_not_make_a_build_younger(place: Site) -> None:
    fence = place.open()
    (before,) = place.json("builds")["builds"]
    newest = fence.indexes.get(live(place))
    assert newest is not None
    later = BuildEntry(
        2, "purged", newest.at_ms + 60_000, "worker-7", newest.token, newest.seal, "a document was purged"
    )
    assert fence.indexes.builds_log.append(live(place), later)
    (after,) = place.json("builds")["builds"]
    assert (after["state"], after["number"]) == ("purged", 2)
    assert after["sealed_at"] == before["sealed_at"]


def test_there_may_be_no_builds(tmp_path: Path) -> None:
    ragfence.open().close()
    assert run("builds").stdout == "there is no build yet; `ragfence build` builds one\n"
    assert json.loads(run("builds", "--json").stdout) == {"builds": [], "attempts": []}


def test_gc_only_says_what_it_would_do_until_it_is_told(place: Site) -> None:
    unused = place.json("build", "--metric", "dot")
    spared = place.json("gc")
    assert (spared["ok"], spared["dry_run"], spared["retired"]) == (True, True, [])
    assert (spared["young"], spared["kept"]) == ([unused["index_hash"]], [live(place)])
    assert "sealed within --min-age" in place.run("gc").stdout
    done = place.run("gc", "--min-age", "0s")
    assert (done.exit_code, done.stderr) == (0, "")
    assert f"would be retired  {unused['index_hash']}" in done.stdout
    assert f"would be dropped  {unused['physical']}" in done.stdout
    assert done.stdout.endswith("dry run: nothing was changed; do it with --yes\n")
    backend = place.open().indexes.backend("lance")
    assert backend.exists(unused["physical"])
    told = place.json("gc", "--min-age", "0s", "--yes")
    assert (told["dry_run"], told["retired"], told["dropped"]) == (
        False,
        [unused["index_hash"]],
        [unused["physical"]],
    )
    assert not backend.exists(unused["physical"])
    assert "retired: 0 builds; dropped: 0 physical indexes; kept: 1 build" in place.run("gc", "--yes").stdout
    assert place.run("gc", "--min-age", "0s").stdout.endswith("nothing to do\n")


def test_gc_finds_that_the_rows_of_a_live_build_are_gone(place: Site) -> None:
    fence = place.open()
    fence.indexes.backend("lance").drop(fence.aliases.resolve("docs").physical)
    done = place.run("gc")
    assert done.exit_code == 1
    assert f"missing: {live(place)} is kept for an alias" in done.stderr
    assert place.json("gc", code=1)["missing"] == [live(place)]


def test_an_age_that_is_none_is_wrong_usage(place: Site) -> None:
    done = place.run("gc", "--min-age", "soon")
    assert (done.exit_code, done.stdout) == (2, "")


def test_a_build_in_a_process_shows_its_progress_to_a_terminal_only(place: Site) -> None:
    edit(place)
    for fence in place.opened:
        fence.close()
    with at_a_terminal("build", "--json") as (running, terminal):
        seen = read_until(terminal, b"\x00")
        assert running.stdout is not None
        told: dict[str, Any] = json.loads(running.stdout.read())
        assert running.wait(60) == 0
    assert b"building" in seen
    assert b"rows" in seen
    assert (told["decision"], told["embedded"], told["rows"]) == ("new", 1, 4)
    done = process("build")
    assert (done.returncode, done.stderr) == (0, "")
    assert told["index_hash"] in done.stdout


def test_indexes_of_a_tenant_are_its_own(place: Site) -> None:
    assert place.json("builds", "--tenant", "other")["builds"] == []
    assert place.json("swap", "docs", live(place), "--tenant", "other", code=1)["error"]["code"] == "INDEX.not_sealed"


def test_a_fence_without_objects_has_no_indexes(request: pytest.FixtureRequest) -> None:
    url, tenant = request.getfixturevalue("valkey_server").url, f"indexes-{os.urandom(6).hex()}"
    for words in (["build"], ["builds"], ["alias"], ["gc"], ["reconcile"]):
        done = run(*words, "--store", url, "--tenant", tenant, "--json")
        assert done.exit_code == 1
        assert json.loads(done.stdout)["error"]["code"] == "USAGE.objects_required"
