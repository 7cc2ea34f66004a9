"""Every notebook runs from top to bottom, on the sample and on other stores, and is committed with what it showed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

import ragfence
from tests.notebooks.cells import NOTEBOOKS, VERDICT, code_cells, looking_at, problems
from tests.notebooks.execution import executed, settings
from tests.server.killed.places import environment

pytestmark = pytest.mark.xdist_group(__name__)
WANTED = ["01_dedupe_decisions", "02_index_lineage", "03_contention_and_ttl", "04_cost_savings"]


def test_there_are_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == WANTED


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_with_its_outputs_and_nothing_of_a_machine(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    cells = code_cells(notebook)
    assert all(cell.execution_count == number for number, cell in enumerate(cells, start=1))
    assert sum(bool(cell.outputs) for cell in cells) >= len(cells) // 2
    assert all(output.output_type != "error" for cell in cells for output in cell.outputs)
    assert not any(output.get("name") == "stderr" for cell in cells for output in cell.outputs)
    assert sum("image/png" in output.get("data", {}) for cell in cells for output in cell.outputs) >= 3
    assert VERDICT in shown(cells)
    images = re.compile(r'"image/png": "[^"]*"')
    text = images.sub("", path.read_text(encoding="utf-8"))
    assert not [mark for mark in ("/tmp/", "/home/", "/root/", "site-packages", "Traceback") if mark in text]
    told = re.sub(r"\b(sha256|xxh3):[0-9a-f]{8,}", "", shown(cells))  # a digest may begin with two digits
    assert not re.search(r"[A-Za-z][\w-]*:\d{2,}", told), "an owner that is a host and a process"


def test_notebooks_are_run_in_the_first_cell_s_settings(tmp_path: Path) -> None:
    first = code_cells(looking_at(NOTEBOOKS[0], "redis://host", "s3://bucket"))[0]
    known: dict[str, Any] = {}
    exec(first.source, known)
    assert (known["STORE"], known["OBJECTS"]) == ("redis://host", "s3://bucket")


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the notebooks run, which is not where they lie. The first of them makes the sample, the others find it."""
    return tmp_path_factory.mktemp("desk")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")  # of the kernel's own machinery
@pytest.mark.timeout(600)  # the first makes the sample, which takes its time on a busy machine
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_on_the_sample(path: Path, desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("RAGFENCE_STORE", "RAGFENCE_OBJECTS", "RAGFENCE_TENANT", "RAGFENCE_POLICY", "RAGFENCE_OBSERVE"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in settings(desk).items():
        monkeypatch.setenv(variable, value)
    notebook = executed(path, desk)
    told = shown(code_cells(notebook))
    assert VERDICT in told
    committed = nbformat.read(path, as_version=4)
    for ran, cell in zip(code_cells(notebook), code_cells(committed), strict=True):
        assert [kind(output) for output in ran.outputs] == [kind(output) for output in cell.outputs], cell.source


def test_the_notebooks_run_on_stores_with_nothing_or_little_in_them(tmp_path: Path) -> None:
    with ragfence.open(tmp_path / "few") as fence:
        for _ in range(2):
            fence.documents.ingest(ragfence.Document("leave", "Thirty days of leave a year."))
        with fence.claim(ragfence.Operation(kind="mail", source_id="1"), payload=1) as claimed:
            claimed.seal()
    assert list(problems(tmp_path, str(tmp_path / "few"), None, environment())) == []


@pytest.mark.slow
def test_the_notebooks_run_on_a_store_with_nothing_in_it(tmp_path: Path) -> None:
    assert list(problems(tmp_path, str(tmp_path / "empty"), None, environment())) == []


@pytest.mark.slow
def test_the_notebooks_run_on_redis_alone(tmp_path: Path, valkey_server: Any) -> None:
    """Without objects there are neither documents nor indexes."""
    with ragfence.open(valkey_server.url, tenant="notebooks", journal=tmp_path / "journal") as fence:
        for payload in (1, 1):
            with fence.claim(ragfence.Operation(kind="mail", source_id="1"), payload=payload) as claimed:
                if claimed.is_new:
                    claimed.seal()
    theirs = environment(RAGFENCE_TENANT="notebooks")
    assert list(problems(tmp_path, valkey_server.url, None, theirs)) == []


def test_a_notebook_that_fails_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "policy.yml").write_text("leases: {}\n", encoding="utf-8")
    broken = environment(RAGFENCE_POLICY=str(tmp_path / "policy.yml"))
    (problem,) = problems(tmp_path, str(tmp_path / "few"), None, broken)
    assert "leases" in problem


def shown(cells: list[Any]) -> str:
    names, texts = ("text/html", "text/markdown", "text/plain"), []
    for output in (output for cell in cells for output in cell.outputs):
        texts += [output.get("text", ""), *(output.get("data", {}).get(name, "") for name in names)]
    return "\n".join(text if isinstance(text, str) else json.dumps(text) for text in texts)


def kind(output: Any) -> list[str]:
    """What was shown, not what it said: waits differ from run to run."""
    return sorted(output.get("data", {output.get("name", ""): None}))
