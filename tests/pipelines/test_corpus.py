"""The documents of the demo: what is on the machine, whatever state that is in."""

from __future__ import annotations

import importlib.metadata
import sys
import time
from collections.abc import Callable
from email.message import Message
from pathlib import Path
from types import ModuleType

import pytest

from pipelines import corpus
from pipelines.corpus import MANUAL, PACKAGES, TOPICS, Corpus, ensure_corpus, has_manual, write_corpus
from ragfence.documents.sources import FolderSource
from ragfence.errors import ValidationError


class Installed:
    """A distribution, as far as its README goes."""

    def __init__(self, name: str | None, readme: object = "", content_type: str = "") -> None:
        self._fields = {"Name": name, "Description": readme, "Description-Content-Type": content_type or None}

    @property
    def metadata(self) -> dict[str, object]:
        if isinstance(self._fields["Description"], Exception):
            raise self._fields["Description"]
        return self._fields


Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """One on which this manual and these distributions are."""

    def made(*distributions: object, manual: dict[str, str] | None) -> None:
        module = ModuleType(TOPICS)
        module.topics = manual  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, TOPICS, None if manual is None else module)
        monkeypatch.setattr(importlib.metadata, "distributions", lambda: iter(distributions))

    return made


def texts(folder: Path) -> dict[str, str]:
    files = (each for each in folder.rglob("*") if each.is_file())
    return {each.relative_to(folder).as_posix(): each.read_text(encoding="utf-8") for each in files}


def test_topics_and_readmes_become_files_that_are_named_for_them(machine: Machine, tmp_path: Path) -> None:
    machine(
        Installed("My_Package.two", "# Mine\r\n\r\nIt works.\r\n", "text/markdown; charset=UTF-8"),
        Installed("other", "Other\n=====\n", "text/x-rst"),
        manual={"with": "\nThe with statement\n"},
    )
    assert write_corpus(tmp_path / "corpus") == Corpus(1, 2, {})
    assert texts(tmp_path / "corpus") == {
        "manual/with.txt": "The with statement\n",
        "packages/my-package-two.md": "# Mine\n\nIt works.\n",
        "packages/other.txt": "Other\n=====\n",
    }


def test_what_is_no_document_is_skipped_and_counted(machine: Machine, tmp_path: Path) -> None:
    multipart = Message()
    machine(
        Installed("blank", " \n"),
        Installed("none", "UNKNOWN\n\n"),
        Installed("history", "x" * (corpus.MAX_CHARACTERS + 1)),
        Installed("binary", "\x00\x01\x02" * 100),
        Installed("surrogate", "an \udcff in it"),
        Installed("parts", [multipart]),
        Installed("../outside", "A README."),
        Installed("latin", UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")),
        Installed(None, "A README."),
        Installed("gone", FileNotFoundError("METADATA")),
        Installed("good", "A README."),
        manual={},
    )
    reasons = {"empty": 2, "too long": 1, "not text": 5, "without metadata": 2}
    written = write_corpus(tmp_path / "corpus")
    assert written == Corpus(0, 1, reasons)
    assert texts(tmp_path / "corpus") == {"packages/good.txt": "A README.\n"}
    assert list(tmp_path.iterdir()) == [tmp_path / "corpus"]
    assert str(written) == (
        "no manual (this Python has none) and 1 README of installed packages; "
        "10 skipped (2 empty, 5 not text, 1 too long, 2 without metadata)"
    )


def test_all_documents_together_are_bounded(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "MAX_TOTAL_CHARACTERS", 25)
    machine(*(Installed(name, "a README\n") for name in ("c", "a", "b")), manual={"with": "blocks\n"})
    assert write_corpus(tmp_path / "corpus") == Corpus(1, 2, {"beyond the total": 1})
    assert sorted(texts(tmp_path / "corpus")) == ["manual/with.txt", "packages/a.txt", "packages/b.txt"]


def test_of_a_package_that_is_there_twice_the_one_that_would_be_imported_counts(
    machine: Machine, tmp_path: Path
) -> None:
    machine(Installed("it", "The first."), Installed("It", "The second."), manual=None)
    assert write_corpus(tmp_path / "corpus") == Corpus(0, 1, {})
    assert texts(tmp_path / "corpus") == {"packages/it.txt": "The first.\n"}


def test_without_any_document_it_says_what_to_do(machine: Machine, tmp_path: Path) -> None:
    machine(manual=None)
    with pytest.raises(ValidationError, match="neither a manual nor packages") as nothing:
        write_corpus(tmp_path / "corpus")
    assert "RAGFENCE_DEMO_SOURCE" in nothing.value.hint
    assert list(tmp_path.iterdir()) == []


def test_what_is_written_is_left_as_it_is(machine: Machine, tmp_path: Path) -> None:
    machine(Installed("it", "As it was."), manual=None)
    folder = ensure_corpus(tmp_path / "state" / "corpus")
    (folder / "packages" / "it.txt").write_text("Edited.\n")
    machine(Installed("it", "As it is now."), Installed("new", "A README."), manual=None)
    assert ensure_corpus(folder) == folder
    write_corpus(folder)  # by a process that had seen no corpus, and was slower
    assert texts(folder) == {"packages/it.txt": "Edited.\n"}
    assert list(folder.parent.iterdir()) == [folder]


def test_whether_there_is_a_manual_is_known_before_and_after_it_is_written(machine: Machine, tmp_path: Path) -> None:
    readme = Installed("it", "A README.")
    machine(readme, manual=None)
    assert not has_manual(tmp_path / "without")
    write_corpus(tmp_path / "without")
    machine(readme, manual={"with": "The with statement"})
    assert not has_manual(tmp_path / "without")
    write_corpus(tmp_path / "with")
    machine(readme, manual=None)
    assert has_manual(tmp_path / "with")


def test_a_python_without_the_package_of_the_manual_has_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delitem(sys.modules, TOPICS, raising=False)
    monkeypatch.setitem(sys.modules, "pydoc_data", None)
    assert not has_manual(tmp_path / "corpus")


def test_this_machine_has_documents_that_a_source_need_not_read_twice(tmp_path: Path) -> None:
    """Just written, they would have no state yet (docs/documents.md), and be read again by the next run."""
    began = time.time()
    written = write_corpus(tmp_path / "corpus")
    items = list(FolderSource(tmp_path / "corpus").items())
    assert len(items) == written.topics + written.readmes > 200
    assert all(item.state for item in items)
    assert all(item.load().text.strip() for item in items)
    assert all(each.stat().st_mtime < began for each in (tmp_path / "corpus").rglob("*.*"))
    assert {each.name for each in (tmp_path / "corpus").iterdir()} <= {MANUAL, PACKAGES}


def test_the_same_machine_gives_the_same_documents(tmp_path: Path) -> None:
    write_corpus(tmp_path / "one")
    write_corpus(tmp_path / "two")
    assert texts(tmp_path / "one") == texts(tmp_path / "two")
