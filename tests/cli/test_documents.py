"""`ragfence retract`, `ragfence snippets`, `ragfence purge`, `ragfence verify` and `ragfence compact`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ragfence import Document
from tests.cli.conftest import Site
from tests.cli.test_process import at_a_terminal, process, read_until

TEXT = "# Leases\n\nA lease ends.\n\n## Expiry\n\n" + "The clock of the store decides. " * 60


@pytest.fixture(params=["embedded", "valkey"])
def place(request: pytest.FixtureRequest) -> Iterator[Site]:
    """A site that has objects."""
    made: Site = request.getfixturevalue("embedded")
    if request.param == "valkey":
        url, tenant = request.getfixturevalue("valkey_server").url, f"documents-{os.urandom(6).hex()}"
        stores = {"store": url, "tenant": tenant, "objects": made.folder / "o"}
        made = Site("valkey", made.folder, ("--store", url, "--tenant", tenant, "--objects", "o"), stores)
    yield made
    for fence in made.opened:
        fence.close()


def ingest(site: Site, *doc_ids: str, **more: object) -> None:
    documents = [Document(doc_id, TEXT, content_type="text/markdown", **more) for doc_id in doc_ids]  # type: ignore[arg-type]
    assert not [receipt for receipt in site.open().documents.ingest_many(documents) if receipt.failed]


def test_snippets_are_shown_with_their_places(place: Site) -> None:
    ingest(place, "guide/leases.md", metadata={"team": "store"}, source_url="https://e.example/leases", sequence=4)
    told = place.json("snippets", "guide/leases.md")
    assert (told["doc_id"], told["metadata"], told["sequence"]) == ("guide/leases.md", {"team": "store"}, 4)
    assert (told["content_type"], told["source_url"]) == ("text/markdown", "https://e.example/leases")
    assert len(told["snippets"]) == len(told["snippet_ids"]) > 1
    for ordinal, snippet in enumerate(told["snippets"]):
        assert snippet["ordinal"] == ordinal
        assert TEXT[snippet["start"] : snippet["end"]] == snippet["text"]
    done = place.run("snippets", "guide/leases.md")
    assert (done.exit_code, done.stderr) == (0, "")
    head, *lines, last = done.stdout.splitlines()
    assert head.split() == ["#", "place", "tokens", "section", "text", "snippet_id"]
    assert len(lines) == len(told["snippets"])
    first, snippet = lines[0], told["snippets"][0]
    assert first.split()[:3] == ["0", f"{snippet['start']}-{snippet['end']}", str(snippet["tokens"])]
    assert snippet["snippet_id"] in first
    assert "..." in lines[-1]
    assert "decides. " * 5 not in done.stdout
    assert last.startswith(f"guide/leases.md: {len(lines)} snippets of ")


def test_a_document_without_text_has_no_snippets(place: Site) -> None:
    place.open().documents.using(allow_empty_text=True).ingest(Document("empty", ""))
    assert place.json("snippets", "empty")["snippets"] == []
    assert "empty: 0 snippets of 0 bytes" in place.run("snippets", "empty").stdout


def test_there_are_no_snippets_of_what_is_not_live(place: Site) -> None:
    ingest(place, "a")
    place.open().documents.retract("a")
    for doc_id in ("a", "nobody"):
        done = place.run("snippets", doc_id)
        assert (done.exit_code, done.stdout) == (1, "")
        assert f"there is no live document '{doc_id}'" in done.stderr
        assert place.json("snippets", doc_id, code=1)["error"]["code"] == "VALIDATION"


def test_documents_are_retracted(place: Site) -> None:
    ingest(place, "a", "b", "c")
    done = place.run("retract", "a", "nobody")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "a: retracted\nnobody: not a live document\n", "")
    assert place.json("retract", "a", "b") == {
        "documents": [
            {"doc_id": "a", "retracted": False, "error": None},
            {"doc_id": "b", "retracted": True, "error": None},
        ]
    }
    assert {head.doc_id for head in place.open().documents.heads()} == {"c"}


def test_a_retraction_that_is_refused_does_not_keep_the_others(place: Site) -> None:
    ingest(place, "new", sequence=7)
    ingest(place, "old", sequence=3)
    done = place.run("retract", "new", "old", "--sequence", "5")
    assert (done.exit_code, done.stdout) == (1, "old: retracted\n")
    assert "sequence 5 is older than 7" in done.stderr
    told = place.json("retract", "new", "x\ny", "--sequence", "6", code=1)["documents"]
    assert [one["error"]["code"] for one in told] == ["CONFLICT.sequence.stale", "VALIDATION.document"]
    assert place.json("retract", "new", "--sequence", "8")["documents"][0]["retracted"]


def test_a_document_is_purged_for_good(place: Site) -> None:
    ingest(place, "secret", "other", metadata={"who": "Erika Mustermann"})
    error = place.json("purge", "secret", code=1)["error"]
    assert "--yes" in error["hint"]
    done = place.run("purge", "secret")
    assert (done.exit_code, done.stdout) == (1, "")
    assert {head.doc_id for head in place.open().documents.heads()} == {"secret", "other"}
    told = place.json("purge", "secret", "--yes")
    assert (told["doc_id"], told["known"]) == ("secret", True)
    assert {head.doc_id for head in place.open().documents.heads()} == {"other"}
    assert place.json("snippets", "other")["snippets"]
    assert "secret: purged" in place.run("purge", "secret", "--yes").stdout
    assert place.run("snippets", "secret").exit_code == 1


def test_a_purge_of_what_nobody_knows_ends_with_1(place: Site) -> None:
    ingest(place, "a")
    done = place.run("purge", "b", "--yes")
    assert (done.exit_code, done.stdout) == (1, "b: no such document, live or retracted\n")
    assert place.json("purge", "b", "--yes", code=1)["known"] is False


@pytest.mark.parametrize(("answer", "code"), [(b"n\n", 1), (b"y\n", 0)])
def test_a_purge_asks_on_a_terminal(embedded: Site, answer: bytes, code: int) -> None:
    ingest(embedded, "secret")
    with at_a_terminal("purge", "secret") as (running, terminal):
        read_until(terminal, b"Delete secret permanently?")
        os.write(terminal, answer)
        rest = read_until(terminal, b"\x00")
        assert running.wait(60) == code
    assert (b"nothing was purged" in rest) == (code == 1)
    assert embedded.run("snippets", "secret").exit_code == 1 - code


def test_stores_that_agree_are_verified(place: Site) -> None:
    ingest(place, "a", "b")
    told = place.json("verify")
    assert (told["ok"], told["documents"], told["findings"], told["repaired"]) == (True, 2, [], [])
    done = place.run("verify")
    assert (done.exit_code, done.stderr) == (0, "")
    assert "2 documents" in done.stdout
    assert "all is well" in done.stdout


def test_what_is_lost_is_found_told_and_repaired(place: Site) -> None:
    ingest(place, "a")
    ingest(place, "b")
    objects = Path("o" if place.name == "valkey" else ".ragfence/objects")
    lost, _ = sorted(objects.glob("**/snippets/**/*"), key=lambda file: file.is_dir())[:2]
    lost.unlink()
    told = place.json("verify", code=1)
    (finding,) = told["findings"]
    assert (finding["trouble"], finding["doc_id"] in ("a", "b")) == ("snippets_missing", True)
    assert "--repair" in finding["to_do"]
    done = place.run("verify")
    assert done.exit_code == 1
    assert "1 finding" in done.stdout
    assert "snippets_missing\n  -> `ragfence verify --repair`" in done.stdout
    assert "the first" not in done.stdout
    assert place.json("verify", "--repair")["repaired"] == told["findings"]
    assert "all is well" in place.run("verify", "--repair").stdout
    ingest(place, finding["doc_id"])
    assert len(place.json("snippets", finding["doc_id"])["snippets"]) > 1


def test_only_so_many_findings_are_shown(embedded: Site) -> None:
    ingest(embedded, "a", "b", "c")
    for file in Path(".ragfence/objects").glob("**/snippets/**/*"):
        if file.is_file():
            file.unlink()
    done = embedded.run("verify", "--limit", "2")
    assert "the first 2 of 3; show all with --limit 0" in done.stdout
    assert len(embedded.json("verify", "--limit", "1", code=1)["findings"]) == 3


def test_a_segment_that_cannot_be_read_is_given_up_only_when_that_is_said(embedded: Site) -> None:
    ingest(embedded, "a")
    (segment,) = (file for file in Path(".ragfence/objects").glob("**/segments/**/*") if file.is_file())
    ingest(embedded, "b")
    segment.chmod(0o600)
    segment.write_bytes(segment.read_bytes()[:-40])
    refused = embedded.run("hydrate")
    assert refused.exit_code == 1
    assert "verify --repair --accept-loss" in refused.stderr
    assert embedded.run("verify", "--accept-loss").exit_code == 2
    told = embedded.json("verify", "--repair", code=1)
    assert told["findings"][0]["trouble"] == "rows_unreadable"
    assert embedded.json("verify", "--repair", "--accept-loss")["ok"]
    assert embedded.run("hydrate").exit_code == 0
    ingest(embedded, "a", "b")
    assert embedded.json("verify")["documents"] == 2


def test_the_log_is_compacted(place: Site) -> None:
    fence = place.open()
    for number in range(12):
        fence.documents.ingest(Document(f"{number}", f"text {number}"))
    told = place.json("compact")
    assert (told["segments_before"], told["rows_before"]) == (12, 12)
    assert told["segments_after"] < 12
    assert told["epoch"] > 0
    assert len(place.json("snippets", "7")["snippets"]) == 1
    done = place.run("compact")
    assert (done.exit_code, done.stderr) == (0, "")
    assert "nothing to compact" in done.stdout
    for number in range(12):
        fence.documents.ingest(Document(f"{number}", f"other text {number}"))
    lines = [line.split() for line in place.run("compact").stdout.splitlines()]
    assert lines[0][-2:] == ["before", "after"]
    assert [line[0] for line in lines[1:5]] == ["segments", "rows", "snippets", "size"]


@pytest.mark.slow
def test_as_a_user_would(embedded: Site) -> None:
    ingest(embedded, "a", "b")
    assert json.loads(process("snippets", "a", "--json").stdout)["doc_id"] == "a"
    assert process("retract", "a").returncode == 0
    assert process("purge", "a", "--yes").returncode == 0
    assert process("compact").returncode == 0
    assert process("verify", "--repair").returncode == 0
    for words in (["retract"], ["snippets"], ["snippets", "a", "b"], ["purge"], ["retract", "a", "--sequence", "x"]):
        done = process(*words)
        assert (done.returncode, done.stdout, "Traceback" in done.stderr) == (2, "", False)


@pytest.mark.parametrize("command", ["retract x", "snippets x", "purge x --yes", "verify", "compact"])
def test_no_command_makes_a_store_where_there_is_none(embedded: Site, command: str) -> None:
    done = embedded.run(*command.split())
    assert (done.exit_code, done.stdout) == (1, "")
    assert "there is no f" in done.stderr
    assert not Path(".ragfence").exists()


@pytest.mark.parametrize("site", ["valkey alone"], indirect=True)
@pytest.mark.parametrize("command", ["retract x", "snippets x", "purge x --yes", "verify", "compact"])
def test_documents_need_objects(site: Site, command: str) -> None:
    assert site.json(*command.split(), code=1)["error"]["code"] == "USAGE.objects_required"
