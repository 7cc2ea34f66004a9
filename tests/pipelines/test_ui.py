"""Dagster's UI after the demo, in a headless Chromium: what a person must see there.

`make screenshots` has the pictures of docs/dagster.md taken on the way: RAGFENCE_SCREENSHOTS names their folder.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import lancedb
import pytest

import ragfence
from pipelines.demo.state import FOLDER
from pipelines.demo.story import choose_edited
from pipelines.settings import ALIAS, CORPUS
from tests.pipelines import chromium, web_server

pytestmark = pytest.mark.xdist_group("demo")

SCREENSHOTS = os.environ.get("RAGFENCE_SCREENSHOTS", "")


class Shown(NamedTuple):
    folder: Path
    url: str
    page: chromium.Page

    def opened(self, path: str) -> chromium.Page:
        self.page.open(self.url + path)
        return self.page

    def photographed(self, name: str) -> None:
        if SCREENSHOTS:
            self.page.until(lambda: "Loading" not in self.page.text, "end of loading")
            self.page.screenshot(Path(SCREENSHOTS) / f"dagster-{name}.png")


@pytest.fixture(scope="module")
def browser() -> str:
    found = chromium.found()
    if found is None:
        pytest.skip(chromium.MISSING)
    return found


@pytest.fixture(scope="module")
def shown(browser: str, ran: tuple[Path, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    """The UI on a copy of what the demo left behind: one of these tests spoils it."""
    folder = tmp_path_factory.mktemp("ui") / "demo"
    shutil.copytree(ran[0], folder)
    with web_server.ui(folder, folder.parent / "printed") as (url, _), chromium.opened(browser) as page:
        yield Shown(folder / FOLDER, url, page)


def test_the_browser_is_the_one_that_is_named_or_else_on_the_path(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(chromium.VARIABLE, raising=False)
    assert chromium.found() is None
    for name in ("google-chrome", "mine"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    assert chromium.found() == str(tmp_path / "google-chrome")
    monkeypatch.setenv(chromium.VARIABLE, str(tmp_path / "mine"))
    assert chromium.found() == str(tmp_path / "mine")


def test_the_graph_shows_the_assets_with_their_checks(shown: Shown) -> None:
    page = shown.opened("/asset-groups")
    page.sees("Global asset lineage", "documents", "vector_index", "live_alias", "1 / 1 Passed", "3 / 3 Passed")
    page.until(lambda: page.text.count("\nMaterialized\n") == 4, "fourth asset that is materialized")
    shown.photographed("lineage")


def test_a_materialization_of_documents_shows_what_was_decided_and_saved(shown: Shown) -> None:
    page = shown.opened("/assets/documents?view=events")
    page.sees("corpus_digest")
    page.until(lambda: "documents" in page.pictures, "chart")
    shown.photographed("documents")
    told = {row[0]: row[1] for row in page.rows}
    documents = str(sum(each.is_file() for each in (shown.folder / CORPUS.name).rglob("*")))
    assert {"duplicate": documents, "unread": documents, "snippets_made": "0"}.items() <= told.items()
    assert int(told["snippets_saved"]) > 2000
    assert int(told["characters_saved"]) > 1_000_000
    with ragfence.open(shown.folder) as fence:
        assert told["corpus_digest"] == fence.indexes.corpus_digest()


def test_a_materialization_of_the_index_shows_its_hash_and_what_went_into_it(shown: Shown) -> None:
    page = shown.opened("/assets/vector_index?view=events")
    page.sees("index_hash")
    page.until(lambda: "snippets" in page.pictures, "chart")
    shown.photographed("build")
    rows = page.rows
    with ragfence.open(shown.folder) as fence:
        live = fence.aliases.resolve(ALIAS).index_hash
        corpus = fence.indexes.corpus_digest()
    told = {row[0]: row[1] for row in rows}
    assert (told["index_hash"], told["attempt"], told["takeover"]) == (live, "2", "true")
    (of_corpus,) = [row for row in rows if row[0] == "corpus"]
    assert of_corpus[1] == corpus
    assert of_corpus[2].startswith("sha256:"), "what it was in the build before"
    assert of_corpus[2] != corpus


def test_a_check_that_fails_is_seen_to_fail(shown: Shown) -> None:
    """Somebody deletes a document's rows behind our back, and a person has the check executed in the UI."""
    page = shown.opened("/assets/vector_index?view=checks&checkDetail=no_duplicate_effects")
    page.sees("Evaluation result\nPassed", "0 duplicated, 0 unknown, 0 missing")
    lost = rows_lost(shown.folder, choose_edited(shown.folder / CORPUS.name))
    assert lost > 0
    page.click("Execute")
    page.sees("Evaluation result\nFailed", f"0 duplicated, 0 unknown, {lost} missing", "no_duplicate_effects\nFailed")
    assert ["missing", str(lost)] in page.rows
    shown.photographed("check")
    shown.opened("/asset-groups").sees("2 / 3 Passed")


def rows_lost(store: Path, doc_id: str) -> int:
    with ragfence.open(store) as fence:
        physical = fence.aliases.resolve(ALIAS).physical
    (folder,) = {path.parent for path in store.rglob(f"{physical}*.lance")}
    table = lancedb.connect(str(folder)).open_table(physical)
    held = table.count_rows()
    table.delete(f"doc_id = '{doc_id}'")
    return held - table.count_rows()
