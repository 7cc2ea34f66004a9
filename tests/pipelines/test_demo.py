"""`make demo`, run once as a user runs it: what it prints, what it leaves behind, and the commands it ends with."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import dagster as dg
import pytest

import ragfence
from pipelines.corpus import MANUAL, PACKAGES, has_manual
from pipelines.demo.state import FOLDER
from pipelines.demo.story import MANY, choose_edited, excerpt
from pipelines.settings import CORPUS
from tests.pipelines import web_server

pytestmark = pytest.mark.xdist_group("demo")


def cells(printed: str, first: str, *, last: bool = False) -> list[str]:
    """Of the row of a table that begins with these words."""
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in printed.splitlines() if "│" in line]
    found = [row[1:] for row in rows if row[0] == first]
    assert found, f"no row {first!r} in\n{printed}"
    return found[-1 if last else 0]


def count(cell: str) -> int:
    return int(cell.replace(",", ""))


def count_documents(corpus: Path) -> int:
    return sum(each.is_file() for each in corpus.rglob("*"))


class TestTheDemo:
    def test_it_reads_hundreds_of_documents_of_this_machine_and_says_which(self, ran):
        folder, printed = ran
        words = " ".join(printed.split())
        topics, readmes = (len(list((folder / CORPUS / place).glob("*"))) for place in (MANUAL, PACKAGES))
        assert (topics > 0) == has_manual(folder / CORPUS)
        assert topics + readmes > 200
        manual = f"{topics} topics of Python's manual" if topics else "no manual"
        assert f"documents: {manual}" in words
        assert f"and {readmes} READMEs of installed packages" in words
        assert f"{topics + readmes} documents -> " in words
        assert ("3 of 3 checks passed" if topics else "2 of 2 checks passed") in words

    def test_the_second_run_has_no_new_effect(self, ran):
        folder, printed = ran
        documents = str(count_documents(folder / CORPUS))
        assert "0 new effects" in printed
        assert cells(printed, "documents ingested") == [documents, "0"]
        assert cells(printed, "files not read (unchanged)") == ["0", documents]
        made, stored = cells(printed, "snippets made")[0], cells(printed, "vectors in the store")[0]
        assert cells(printed, "snippets embedded")[0] == made
        assert stored == made
        assert cells(printed, "snippets made")[1] == cells(printed, "snippets embedded")[1] == "0"
        for same in (
            "snippet_ids of all documents (digest)",
            "INDEX_HASH",
            "generation of the alias docs",
            "vectors in the store",
        ):
            first, again = cells(printed, same)
            assert first == again

    def test_an_edit_of_one_document_costs_one_document(self, ran):
        folder, printed = ran
        assert cells(printed, "documents read") == [f"1 of {count_documents(folder / CORPUS)}"]
        (embedded,) = cells(printed, "snippets embedded", last=True)
        (copied,) = cells(printed, "rows copied from the previous index")
        assert 1 <= count(embedded) <= 3
        assert count(copied) > 2000
        assert "The coffee machine is in the" in printed
        answered = [line for line in printed.splitlines() if "how do I use the coffee machine?" in line]
        assert [choose_edited(folder / CORPUS) in line for line in answered] == [True, True]

    def test_what_the_killed_run_embedded_is_not_embedded_again(self, ran):
        folder, printed = ran
        (by_it,) = cells(printed, "snippets embedded by the killed run")
        (after,) = cells(printed, "snippets embedded by the run after it")
        (added,) = cells(printed, "vectors added by both")
        assert count(by_it) >= MANY
        assert (count(after), count(added)) == (0, count(by_it))
        assert cells(printed, "documents ingested again") == [f"0 of {count_documents(folder / CORPUS)}"]
        assert cells(printed, "the index")[0].startswith("attempt 2, new")

    def test_it_ends_with_a_table_of_all_runs_and_an_auditor_who_is_content(self, ran):
        folder, printed = ran
        assert "every promise kept" in printed
        assert "stores, log, snippets and indexes agree" in printed
        ends = {run: cells(printed, run, last=True) for run in ("first run", "one edit", "killed", "resumed")}
        assert [ends[run][6] for run in ends] == ["1", "2", "2", "3"]
        assert ends["killed"][:3] == [str(MANY), "0", str(count_documents(folder / CORPUS) - MANY)]

    def test_the_commands_it_ends_with_work_as_printed(self, ran):
        folder, printed = ran
        commands = [line.strip() for line in printed.split("Now try:")[1].strip().splitlines()]
        assert commands[0] == "make ui"
        assert len(commands) == 3
        for command in commands[1:]:
            done = subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            assert choose_edited(folder / CORPUS) in done.stdout

    def test_dagster_has_its_runs_and_none_is_left_running(self, ran, monkeypatch):
        folder, _ = ran
        monkeypatch.setenv("DAGSTER_HOME", str(folder / FOLDER / "dagster"))
        with dg.DagsterInstance.get() as instance:
            runs = instance.get_runs()
            assert {run.job_name for run in runs} == {"ingest", "build_and_swap", "rollback", "verify"}
            failed = [run.job_name for run in runs if run.status is not dg.DagsterRunStatus.SUCCESS]
            assert failed == ["build_and_swap"]  # the one that was killed
            settings = instance.get_settings("telemetry")
        assert settings == {"enabled": False}

    def test_its_state_is_an_ordinary_store(self, ran):
        folder, _ = ran
        with ragfence.open(folder / FOLDER) as fence:
            assert fence.aliases.resolve("docs").generation == 5
            assert fence.documents.verify().ok


@pytest.mark.slow
def test_without_a_manual_it_tells_its_story_with_the_readmes_alone(tmp_path):
    """Some systems install Python without `pydoc_data.topics`."""
    stripped, folder = tmp_path / "stripped", tmp_path / "here"
    (stripped / "pydoc_data").mkdir(parents=True)
    (stripped / "pydoc_data" / "__init__.py").touch()
    folder.mkdir()
    paths = [str(stripped), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "pipelines.demo"]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    words = " ".join(done.stdout.split())
    assert "documents: no manual (this Python has none) and " in words
    assert "the golden queries ask about the manual, so without it they are skipped" in words
    assert "2 of 2 checks passed" in words
    assert f"{MANUAL}/" not in words
    assert "0 new effects" in words
    assert "every promise kept" in words
    assert [each.name for each in (folder / CORPUS).iterdir()] == [PACKAGES]


@pytest.mark.slow
def test_the_ui_starts_on_this_machine_alone_and_says_that_the_demo_has_not_run(tmp_path):
    with web_server.ui(tmp_path, tmp_path / "printed") as (_, answer):
        pass
    assert "build_and_swap" in answer
    said = (tmp_path / "printed").read_text()
    assert "The demo has not run yet" in said
    assert "superseded" not in said
    assert {each.name for each in tmp_path.iterdir()} == {".ragfence", "printed"}
    assert not (tmp_path / CORPUS).exists()  # nothing was materialized


@pytest.mark.slow
def test_the_race_for_tickets_runs(tmp_path):
    command = [sys.executable, "-m", "pipelines.tickets"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert "every promise kept" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_an_excerpt_is_the_line_that_answers():
    text = "About mail.\n\nNewsletters leave\non Tuesdays at noon.\n"
    assert excerpt(text, "when do newsletters leave?") == "Newsletters leave on Tuesdays at noon."
    assert re.fullmatch(r"a{90}\.\.\.", excerpt("a" * 200, "b"))
