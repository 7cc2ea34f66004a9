"""`ragfence ingest`: what it says, how it ends, and what it leaves behind."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ragfence.documents.sources import FolderSource
from ragfence.errors import StoreUnavailable
from tests.cli.conftest import Site
from tests.cli.test_process import at_a_terminal, environment, process, read_until
from tests.servers import S3Server

LONG_AGO = 1_600_000_000


def write(path: str, text: str | bytes = "some text", *, later: int = 0) -> Path:
    """A file that was changed long ago, so that its size and mtime can be relied on."""
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    os.utime(file, (LONG_AGO + later, LONG_AGO + later))
    return file


def fill(folder: str, count: int) -> None:
    for number in range(count):
        write(f"{folder}/{number:03d}.md", f"# Page {number}\n\nWhat stands on page {number}.")


@pytest.fixture(params=["embedded", "valkey"])
def place(request: pytest.FixtureRequest) -> Iterator[Site]:
    """A site that has objects."""
    made: Site = request.getfixturevalue("embedded")
    if request.param == "valkey":
        url, tenant = request.getfixturevalue("valkey_server").url, f"ingest-{os.urandom(6).hex()}"
        stores = {"store": url, "tenant": tenant, "objects": made.folder / "o"}
        made = Site("valkey", made.folder, ("--store", url, "--tenant", tenant, "--objects", "o"), stores)
    yield made
    for fence in made.opened:
        fence.close()


def live(site: Site) -> set[str]:
    return {head.doc_id for head in site.open().documents.heads()}


def test_a_folder_is_ingested_and_the_second_time_not_even_read(place: Site) -> None:
    fill("docs", 30)
    first = place.json("ingest", "docs")
    assert (first["source"], first["listed"], first["dry_run"]) == (f"folder:{Path('docs').resolve()}", 30, False)
    assert first["decisions"] == {"new": 30, "duplicate": 0, "conflict": 0, "in_flight": 0, "stale": 0, "refused": 0}
    assert (first["snippets_made"], first["snippets_saved"], first["failures"]) == (30, 0, [])
    again = place.json("ingest", "docs")
    assert (again["decisions"]["duplicate"], again["unread"], again["snippets_saved"]) == (30, 30, 30)
    assert again["characters_saved"] == sum(file.stat().st_size for file in Path("docs").iterdir())
    assert live(place) == {f"{number:03d}.md" for number in range(30)}
    assert [row["route"] for row in place.json("decisions", "--decision", "duplicate")["decisions"]] == (
        ["unchanged"] * 30
    )
    assert place.run("audit", "check").exit_code == 0


def test_it_is_a_summary_for_people(place: Site) -> None:
    fill("docs", 3)
    place.run("ingest", "docs")
    write("docs/000.md", "changed", later=1)
    write("docs/new.md", "new")
    place.open().documents.retract("001.md")
    done = place.run("ingest", "docs")
    assert (done.exit_code, done.stderr) == (0, "")
    head, columns, *lines, saved = done.stdout.splitlines()
    assert head.startswith(f"folder:{Path('docs').resolve()}: 4 documents in ")
    assert columns.split() == ["decision", "documents"]
    assert [line.split() for line in lines] == [
        ["new", "2", "2", "snippets"],
        ["duplicate", "2", "1", "unchanged,", "not", "read,", "1", "revived"],
    ]
    assert re.fullmatch(r"saved: 2 snippets \([\d,]+ characters\) need not be embedded again", saved)


def test_the_first_ingest_makes_the_store_and_says_so(embedded: Site) -> None:
    fill("docs", 2)
    done = embedded.run("ingest", "docs")
    assert done.exit_code == 0
    assert done.stderr.startswith("created a new fence store: sqlite:///")
    assert Path(".ragfence/fences.db").exists()
    assert embedded.run("ingest", "docs").stderr == ""


def test_a_dry_run_changes_nothing(place: Site) -> None:
    fill("docs", 20)
    place.json("ingest", "docs")
    Path("docs/000.md").unlink()
    write("docs/new.md", "new")
    would = place.json("ingest", "docs", "--dry-run", "--prune", "scoped")
    assert (would["dry_run"], would["decisions"]["new"], would["pruned_ids"]) == (True, 1, ["000.md"])
    assert "would be retracted" in place.run("ingest", "docs", "--dry-run", "--prune", "scoped").stdout
    assert len(live(place)) == 20
    did = place.json("ingest", "docs", "--prune", "scoped")
    assert {**would, "seconds": 0, "dry_run": False} == {**did, "seconds": 0}


def test_a_dry_run_where_there_is_no_store_makes_none(embedded: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    fill("docs", 3)
    done = embedded.run("ingest", "docs", "--dry-run")
    assert (done.exit_code, done.stderr) == (0, "")
    assert "dry run: nothing was changed" in done.stdout
    assert embedded.json("ingest", "docs", "--dry-run", "--objects", "elsewhere")["decisions"]["new"] == 3
    monkeypatch.setenv("RAGFENCE_OBJECTS", "elsewhere")
    assert embedded.json("ingest", "docs", "--dry-run")["decisions"]["new"] == 3
    assert sorted(os.listdir()) == ["docs"]


@pytest.mark.parametrize("prune", ["scoped", "full"])
def test_a_prune_that_is_refused_ends_with_2_and_changed_nothing(place: Site, prune: str) -> None:
    fill("docs", 5)
    place.json("ingest", "docs")
    Path("docs/000.md").unlink()
    write("docs/new.md", "new")
    error = place.json("ingest", "docs", "--prune", prune, code=2)["error"]
    assert error["code"] == "VALIDATION.prune_too_large"
    done = place.run("ingest", "docs", "--prune", prune)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "would retract 1 of 5 live documents" in done.stderr
    assert "--max-prune-share 1" in done.stderr
    assert "new.md" not in live(place)
    told = place.json("ingest", "docs", "--prune", prune, "--max-prune-share", "0.2")
    assert (told["pruned_ids"], told["decisions"]["new"]) == (["000.md"], 1)


def test_what_a_prune_takes_is_told(place: Site) -> None:
    fill("docs", 8)
    place.json("ingest", "docs")
    for number in range(7):
        Path(f"docs/{number:03d}.md").unlink()
    done = place.run("ingest", "docs", "--prune", "full", "--max-prune-share", "1")
    (line,) = [line for line in done.stdout.splitlines() if "retracted" in line]
    assert line.split("no longer in the source: ")[1].strip() == "000.md, 001.md, 002.md, 003.md, 004.md ..."


def test_documents_that_fail_are_listed_and_it_ends_with_1(place: Site) -> None:
    fill("docs", 3)
    for number in range(25):
        write(f"docs/bad-{number:02d}.txt", b"\xff\xfe\x00")
    told = place.json("ingest", "docs", code=1)
    assert (told["decisions"]["new"], told["failed"], len(told["failures"])) == (3, 25, 25)
    assert set(told["failures"][0]) == {"doc_id", "code", "message", "hint"}
    done = place.run("ingest", "docs")
    assert done.exit_code == 1
    assert done.stderr.count("failed: ") == 20
    assert "bad-00.txt" in done.stderr
    assert "  -> convert it to text, or ignore it" in done.stderr
    assert "and 5 more failed" in done.stderr
    assert ["refused", "25"] in [line.split() for line in done.stdout.splitlines()]


def test_a_line_that_is_no_document_keeps_the_prune_away(place: Site) -> None:
    write("docs.jsonl", '{"id": "a", "text": "a"}\n{"id": "b", "text": "b"}')
    assert place.json("ingest", "docs.jsonl")["decisions"]["new"] == 2
    write("docs.jsonl", '{"id": "a", "text": "a"}\n{"id"')
    done = place.run("ingest", "docs.jsonl", "--prune", "full", "--max-prune-share", "1")
    assert done.exit_code == 1
    assert "warning: nothing was pruned" in done.stderr
    assert live(place) == {"a", "b"}


def test_a_doc_id_that_comes_twice_with_different_content_is_refused(place: Site) -> None:
    write("docs.jsonl", '{"id": "a", "text": "first"}\n{"id": "a", "text": "last"}')
    done = place.run("ingest", "docs.jsonl", "--name", "crm")
    assert done.exit_code == 1
    assert "jsonl:crm: 2 documents" in done.stdout
    assert (
        "warning: 1 document has a doc_id that the source lists more than once (a); the first one counts" in done.stderr
    )
    assert "failed: jsonl:crm lists a more than once, with different content" in done.stderr
    assert [snippet["text"] for snippet in place.json("snippets", "a")["snippets"]] == ["first"]


def test_two_folders_of_one_name_conflict_until_they_are_put_apart_or_taken_over(place: Site) -> None:
    write("one/docs/README.md", "of one")
    write("two/docs/README.md", "of two")
    assert place.json("ingest", "one/docs")["decisions"]["new"] == 1
    done = place.run("ingest", "two/docs")
    assert done.exit_code == 1
    assert "which owns the doc_id" in done.stderr
    assert "--prefix" in done.stderr
    told = place.json("ingest", "two/docs", code=1)
    assert (told["decisions"]["conflict"], told["failures"][0]["code"]) == (1, "CONFLICT.origin")
    assert place.json("ingest", "two/docs", "--prefix", "two/")["decisions"]["new"] == 1
    assert live(place) == {"README.md", "two/README.md"}
    assert place.json("ingest", "two/docs", "--take-over")["decisions"]["new"] == 1
    assert [snippet["text"] for snippet in place.json("snippets", "README.md")["snippets"]] == ["of two"]
    assert place.json("ingest", "one/docs", code=1)["decisions"]["conflict"] == 1


def test_a_checkout_under_another_path_keeps_its_documents_by_its_origin(place: Site) -> None:
    write("build-1/docs/a.md", "first")
    write("build-2/docs/a.md", "second")
    for build in ("build-1", "build-2"):
        assert place.json("ingest", f"{build}/docs", "--origin", "handbook")["decisions"]["new"] == 1


def test_what_a_prune_leaves_to_others_is_told(place: Site) -> None:
    write("one/a.md", "same")
    write("two/a.md", "same")
    write("two/b.md", "b")
    for folder in ("one", "two"):
        place.run("ingest", folder)
    Path("two/a.md").unlink()
    done = place.run("ingest", "two", "--prune", "scoped")
    assert done.exit_code == 0
    assert "1 document was not pruned: this source does not own it, or another source still has it" in done.stderr
    assert live(place) == {"a.md", "b.md"}
    write("two/a.md", "same")
    assert place.json("ingest", "two", "--prune", "scoped")["kept"] == 0


@pytest.mark.parametrize("name", ["one.md", "docs.jsonl.gz"])
def test_a_file_is_a_source_too(place: Site, name: str) -> None:
    text = b"# One\n\ntext"
    write(name, gzip.compress(b'{"id": "one.md", "text": "text"}') if name.endswith("gz") else text)
    assert place.json("ingest", name)["decisions"]["new"] == 1
    assert live(place) == {"one.md"}


def test_which_files_are_taken_and_how_they_are_read_can_be_said(place: Site) -> None:
    for name in ("a.md", "b.rst", "drafts/c.md", "d.txt", "e.rst.tmp"):
        write(f"docs/{name}", "Käse".encode("cp1252"))
    done = place.json(
        *("ingest", "docs", "--ext", "md", "--ext", ".rst", "--ignore", "drafts/", "--encoding", "cp1252")
    )
    assert (done["listed"], done["failed"]) == (2, 0)
    assert live(place) == {"a.md", "b.rst"}
    assert place.json("snippets", "b.rst")["snippets"][0]["text"] == "Käse"
    write("note.rst")
    assert place.json("ingest", "note.rst", code=2)["error"]["code"] == "VALIDATION"
    assert place.json("ingest", "note.rst", "--ext", "rst")["decisions"]["new"] == 1


def test_what_is_skipped_is_counted_and_told_and_strict_ends_with_1(place: Site) -> None:
    for name in ("a.md", "b.pdf", "c.pdf", "d.png", "Makefile"):
        write(f"docs/{name}")
    done = place.json("ingest", "docs")
    assert (done["listed"], done["skipped"], done["skipped_special"]) == (1, 4, 0)
    assert next(iter(done["skipped_extensions"].items())) == (".pdf", 2)
    assert done["skipped_extensions"] == {".pdf": 2, ".png": 1, "(none)": 1}
    told = place.run("ingest", "docs")
    assert told.exit_code == 0
    assert "skipped: 4 files without a reader (2 .pdf, 1 " in " ".join(told.stdout.split())
    assert place.run("ingest", "docs", "--strict").exit_code == 1
    assert place.json("ingest", "docs", "--strict", code=1)["skipped"] == 4
    ignored = ("--ignore", "*.pdf", "--ignore", "*.png", "--ignore", "Makefile")
    assert place.json("ingest", "docs", "--strict", *ignored)["skipped"] == 0


def test_an_empty_file_is_refused_and_retracts_nothing_unless_it_is_asked_for(place: Site) -> None:
    write("docs/a.md", "some words")
    write("docs/b.md", "other words")
    place.json("ingest", "docs")
    write("docs/b.md", " \n")
    told = place.json("ingest", "docs", "--prune", "scoped", "--max-prune-share", "1", code=1)
    assert (told["decisions"]["refused"], told["pruned"]) == (1, 0)
    assert [failed["message"] for failed in told["failures"]] == ["document 'b.md': its text is only white space"]
    assert place.open().documents.snippets("b.md")[0].text == "other words"
    done = place.run("ingest", "docs")
    assert done.exit_code == 1
    assert "--allow-empty-text" in done.stderr
    assert place.json("ingest", "docs", "--allow-empty-text")["decisions"]["new"] == 1
    assert place.open().documents.snippets("b.md") == []


def test_random_ids_are_noticed_and_explained_once(place: Site) -> None:
    def export() -> None:
        lines = [json.dumps({"id": str(uuid.uuid4()), "text": f"text {number}"}) for number in range(5)]
        write("export.jsonl", "\n".join(lines))

    export()
    assert place.json("ingest", "export.jsonl")["random_ids"] == 0
    export()
    done = place.run("ingest", "export.jsonl")
    assert done.exit_code == 0
    told = " ".join(done.stderr.split())
    assert told.count("5 new documents have ids that look random") == 1
    assert "-> give every document an id that stays the same" in told
    export()
    told = place.json("ingest", "export.jsonl")
    assert told["random_ids"] == 5
    assert "an id that stays the same" in told["random_ids_hint"]


def test_a_folder_of_nothing_but_what_has_no_reader_says_so(place: Site) -> None:
    write("docs/a.pdf")
    error = place.json("ingest", "docs", code=2)["error"]
    told = "contains no documents: skipped 1 file without a reader (1 .pdf)"
    assert error["message"] == f"folder:{Path('docs').resolve()} {told}"


def test_the_right_encoding_the_second_time_reads_again(place: Site) -> None:
    write("docs/a.txt", "Käse")
    place.json("ingest", "docs", "--encoding", "cp1252")
    assert place.json("ingest", "docs", "--encoding", "cp1252")["unread"] == 1
    assert place.json("ingest", "docs")["decisions"]["new"] == 1
    assert place.json("snippets", "a.txt")["snippets"][0]["text"] == "Käse"


@pytest.mark.usefixtures("s3_env")
def test_a_bucket_is_a_source_too(place: Site, moto_server: S3Server) -> None:
    prefix = f"docs-{os.urandom(4).hex()}"
    with closing(moto_server.client()) as client:
        for name in ("a.md", "b.txt", "skip.md"):
            client.put_object(Bucket=moto_server.bucket, Key=f"{prefix}/{name}", Body=b"text")
        url = f"s3://{moto_server.bucket}/{prefix}?endpoint_url={moto_server.url}"
        assert place.json("ingest", url, "--ignore", "skip.md")["decisions"]["new"] == 2
        told = place.json("ingest", url, "--ignore", "skip.md")
        assert (told["unread"], told["source"]) == (2, f"s3://{moto_server.bucket}/{prefix}")
        client.put_object(Bucket=moto_server.bucket, Key=f"{prefix}/a.md", Body=b"other")
        told = place.json("ingest", url, "--ignore", "skip.md")
        assert (told["unread"], told["decisions"]["new"]) == (1, 1)
        assert place.json("ingest", url)["unread"] == 2


@pytest.mark.parametrize(
    ("what", "code"),
    [
        ("nowhere", "VALIDATION"),
        ("empty", "VALIDATION"),
        ("picture.png", "VALIDATION"),
        ("https://example.org/a", "VALIDATION"),
        ("s3://user:pass@bucket/x", "VALIDATION.unknown_store"),
    ],
)
def test_it_ends_with_2_when_there_is_nothing_to_ingest(embedded: Site, what: str, code: str) -> None:
    Path("empty").mkdir()
    write("picture.png")
    error = embedded.json("ingest", what, code=2)["error"]
    assert error["code"] == code
    assert error["message"]
    assert error["hint"]
    done = embedded.run("ingest", what)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "error: " in done.stderr
    if what != "empty":  # which is found out only with the store
        assert not Path(".ragfence").exists()


def test_it_ends_with_2_when_the_store_is_away(embedded: Site) -> None:
    fill("docs", 2)
    store = ("--store", "redis://127.0.0.1:1/0", "--objects", "o")
    assert embedded.json("ingest", "docs", *store, code=2)["error"]["code"] == "DEPENDENCY.unavailable"


@pytest.mark.parametrize("site", ["valkey alone"], indirect=True)
def test_it_ends_with_2_without_an_object_store(site: Site) -> None:
    fill("docs", 2)
    assert site.json("ingest", "docs", code=2)["error"]["code"] == "USAGE.objects_required"


def test_what_was_done_before_an_error_is_told_and_it_ends_with_1(place: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    fill("docs", 6)
    monkeypatch.setattr("ragfence.documents.sync.sync.PAGE", 2)
    items = FolderSource.items

    def breaking(self: FolderSource) -> Iterator[Any]:
        for number, item in enumerate(items(self)):
            if number == 5:
                raise StoreUnavailable("the drive is gone", hint="mount it")
            yield item

    monkeypatch.setattr(FolderSource, "items", breaking)
    done = place.run("ingest", "docs")
    assert done.exit_code == 1
    assert f"folder:{Path('docs').resolve()}: 5 documents in" in done.stdout
    assert "error: the drive is gone\n  -> mount it\n" in done.stderr
    told = place.json("ingest", "docs", code=1)
    assert told["error"]["code"] == "DEPENDENCY.unavailable"
    assert (told["report"]["listed"], told["report"]["unread"]) == (5, 5)


@pytest.mark.parametrize(
    "words",
    [
        ["ingest"],
        ["ingest", "docs", "--prune", "all"],
        ["ingest", "docs", "--max-prune-share", "2"],
        ["ingest", "docs.jsonl", "--ext", "md"],
        ["ingest", "docs/000.md", "--ignore", "x"],
    ],
)
def test_wrong_usage_ends_with_2(embedded: Site, words: list[str]) -> None:
    fill("docs", 1)
    write("docs.jsonl", "")
    done = process(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Usage:" in done.stderr
    assert "Traceback" not in done.stderr


def test_as_a_user_would(embedded: Site) -> None:
    fill("docs", 12)
    write("docs/bad.md", b"\xff\xff")
    first = process("ingest", "docs", "--json")
    assert (first.returncode, first.stderr) == (1, "")
    assert json.loads(first.stdout)["decisions"]["new"] == 12
    Path("docs/bad.md").unlink()
    second = process("ingest", "docs")
    assert (second.returncode, second.stderr) == (0, "")
    assert "12 unchanged, not read" in second.stdout
    assert process("ingest", "nowhere").returncode == 2
    told = json.loads(process("snippets", "003.md", "--json").stdout)
    assert told["snippets"][0]["text"] == Path("docs/003.md").read_text()
    assert process("retract", "003.md").stdout == "003.md: retracted\n"
    assert "1 revived" in process("ingest", "docs").stdout


def test_progress_is_for_a_terminal_and_never_on_stdout(embedded: Site) -> None:
    fill("docs", 3)
    with at_a_terminal("ingest", "docs", "--json") as (running, terminal):
        seen = read_until(terminal, b"\x00")
        assert running.stdout is not None
        out = running.stdout.read()
        assert running.wait(60) == 0
    assert b"ingesting" in seen
    assert json.loads(out)["decisions"]["new"] == 3


def test_many_processes_ingest_a_folder_at_once(embedded: Site) -> None:
    fill("docs", 40)
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "ragfence", "ingest", "docs", "--json"],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    told = []
    for one in running:
        out, err = one.communicate(timeout=120)
        assert (one.returncode, err) == (0, "")
        told.append(json.loads(out))
    assert sum(each["decisions"]["new"] for each in told) == 40
    assert sum(each["decisions"]["duplicate"] for each in told) == 80
    assert embedded.json("ingest", "docs")["unread"] == 40


def test_names_of_files_steer_no_terminal(embedded: Site) -> None:
    write("docs/\x1b[31mred.md", b"\xff")
    done = embedded.run("ingest", "docs")
    assert done.exit_code == 1
    assert "\x1b" not in done.stdout + done.stderr
