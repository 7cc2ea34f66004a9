"""`ragfence drain`, `ragfence decisions -f` and `ragfence audit savings|conflicts|anomalies|export`."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import ragfence
from ragfence import Document, Operation
from ragfence.cli.app import Commands
from ragfence.cli.audit import bars
from ragfence.cli.decisions import drain
from ragfence.cli.options import StoreCommands
from tests.cli.conftest import Site, key_of, perform

ROOT = Path(__file__).resolve().parents[2]


def drained(site: Site, *words: str, code: int = 0) -> Any:
    app = StoreCommands(cls=Commands)
    app.command("drain")(drain)
    app.command("other")(lambda: None)  # a single command would be the program itself
    done = CliRunner().invoke(app, ["drain", *words, *site.options])
    assert done.exit_code == code, done.output
    return done


def test_rows_are_drained_and_told_as_before(site: Site) -> None:
    fence = site.open()
    for source in ("a", "a", "b"):
        perform(fence, source)
    before = site.json("decisions")
    if site.name == "valkey alone":
        assert "needs an object store" in drained(site, code=1).stderr
        return
    told = json.loads(drained(site, "--json").stdout)
    assert (told["rows"], told["objects"], told["busy"]) == (5, 1, False)
    assert list(fence.inspector.fences.rows()) == []
    assert site.json("decisions") == before
    assert site.json("audit", "check")["rows"] == 5
    assert "0 rows into 0 objects" in drained(site).stdout


def test_whoever_finds_another_drainer_says_so(embedded: Site) -> None:
    fence = embedded.open()
    perform(fence, "a")
    assert fence.inspector.fences.lock("drain", "somebody", 60_000)
    assert "another process is draining" in drained(embedded).stdout


@pytest.mark.parametrize("wrong", ["soon", "0s", "-1s"])
def test_a_span_that_is_none_is_wrong_usage(embedded: Site, wrong: str) -> None:
    perform(embedded.open(), "a")
    drained(embedded, "--every", wrong, code=2)


def test_savings_count_effects_and_documents(site: Site) -> None:
    fence = site.open()
    for source in ("a", "a", "a", "b"):
        perform(fence, source)
    snippets = 0
    if site.name != "valkey alone":
        for _ in range(3):
            receipts = fence.documents.ingest_many([Document(doc_id="d", text="Rain falls.\n\nSnow falls.")])
        snippets = 2 * sum(len(receipt.snippet_ids) for receipt in receipts)
    told = site.json("audit", "savings")
    tickets = next(kind for kind in told["kinds"] if kind["kind"] == "ticket")
    assert (tickets["performed"], tickets["saved"], tickets["share"]) == (2, 2, 0.5)
    assert told["documents"] == {"characters": 48 if snippets else 0, "snippets": snippets, "unknown": 0}
    assert sum(day["saved"] for day in told["days"]) == told["saved"]
    assert "50.0%" in site.run("audit", "savings").stdout


def test_conflicts_say_what_was_refused(site: Site) -> None:
    fence = site.open(on_conflict={"include_diff": True})
    perform(fence, "a", payload={"amount": 10})
    with pytest.raises(ragfence.errors.Conflict):
        perform(fence, "a", payload={"amount": 12})
    told = site.json("audit", "conflicts")
    (case,) = told["conflicts"]
    assert (told["of"], case["source_id"], case["owner"]) == (1, "a", "worker-7")
    assert case["key"] == key_of(fence, "a")
    assert case["payload_hash"] != case["first_payload_hash"] != ""
    assert case["diff_size"] > 0
    assert site.json("audit", "conflicts", "--kind", "mail")["of"] == 0
    assert key_of(fence, "a") in site.run("audit", "conflicts").stdout


def test_anomalies_name_what_is_stuck(embedded: Site) -> None:
    from tests.cli.conftest import fail_until_quarantined

    assert embedded.open() is not None
    perform(embedded.opened[0], "a")
    assert "no anomalies since 28d" in embedded.run("audit", "anomalies").stdout
    key = fail_until_quarantined(embedded.opened[0])
    (found,) = embedded.json("audit", "anomalies")["anomalies"]
    assert (found["what"], found["kind"], found["count"], found["examples"]) == ("quarantined", "ticket", 1, [key])


def test_an_export_has_every_decision_once(site: Site, tmp_path: Path) -> None:
    fence = site.open()
    for source in ("a", "a", "b"):
        perform(fence, source)
    if site.name != "valkey alone":
        drained(site)
        perform(fence, "c")
    rows = site.json("decisions", "--limit", "0")["decisions"]
    told = site.json("audit", "export", "--parquet", str(tmp_path / "out.parquet"))
    assert told["rows"] == len(rows)
    assert pq.read_table(tmp_path / "out.parquet").column("row_id").to_pylist() == [row["row_id"] for row in rows]
    assert "decisions in" in site.run("audit", "export", "--csv", str(tmp_path / "out.csv")).stdout
    with (tmp_path / "out.csv").open() as file:
        assert [line["row_id"] for line in csv.DictReader(file)] == [row["row_id"] for row in rows]
    assert sorted(path.name for path in tmp_path.glob("out.*")) == ["out.csv", "out.parquet"]


def test_outcomes_are_exported_as_each_call_was_answered(embedded: Site, tmp_path: Path) -> None:
    fence = embedded.open()
    perform(fence, "a")
    perform(fence, "a")
    with pytest.raises(ragfence.errors.Conflict), fence.claim(Operation(kind="ticket", source_id="a"), payload="other"):
        pass
    failing = fence.once(kind="ticket", key=str)(_refuse)
    for _ in range(2):
        with pytest.raises(ragfence.errors.RagfenceError):
            failing("b")
    target = tmp_path / "out.csv"
    assert "5 outcomes in" in embedded.run("audit", "export", "--csv", str(target), "--outcomes").stdout
    with target.open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["status"], row["http_code"], row["notes"]) for row in rows] == [
        ("complete", "201", "created"),
        ("complete", "201", "replayed"),
        ("conflict", "409", rows[2]["notes"]),
        ("failed", "", "TERMINAL"),
        ("failed", "", "replayed"),
    ]
    assert rows[0]["key"] == rows[1]["key"] == rows[2]["key"] == key_of(fence, "a")
    assert rows[0]["result_id"] == rows[1]["result_id"] != ""
    assert rows[2]["result_id"] == ""
    assert rows[0]["payload_hash"] == rows[1]["payload_hash"] != rows[2]["payload_hash"]
    assert rows[2]["notes"].startswith("CONFLICT") or rows[2]["notes"] == "payload mismatch"


def _refuse(request: str) -> None:
    raise ragfence.errors.TerminalError("not possible")


def test_an_export_goes_into_one_file(embedded: Site) -> None:
    perform(embedded.open(), "a")
    assert embedded.run("audit", "export").exit_code == 2
    assert embedded.run("audit", "export", "--csv", "a", "--parquet", "b").exit_code == 2


@pytest.mark.parametrize("wrong", ["nowhere/out.csv", "."])
def test_an_export_needs_a_place_for_its_file(embedded: Site, tmp_path: Path, wrong: str) -> None:
    perform(embedded.open(), "a")
    before = sorted(tmp_path.parent.rglob("*.part"))
    told = embedded.run("audit", "export", "--csv", str(tmp_path / wrong))
    assert told.exit_code == 2
    assert "name a file" in " ".join(told.stderr.replace("│", " ").split())
    assert sorted(tmp_path.parent.rglob("*.part")) == before == []


def test_a_broken_export_leaves_nothing_behind(embedded: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    perform(embedded.open(), "a")

    def broken(*_: object) -> None:
        raise ragfence.errors.FormatCorrupt("a day of the ledger cannot be read")

    monkeypatch.setattr("ragfence.audit.audit.Audit.batches", broken)
    assert embedded.run("audit", "export", "--csv", str(tmp_path / "out.csv")).exit_code == 1
    assert list(tmp_path.glob("out.*")) == []


def test_bars_show_the_lowest_and_the_highest() -> None:
    assert bars([0.0, 0.5, 1.0]) == "▁▅█"
    assert bars([0.3, 0.3]) == "▅▅"


def test_decisions_are_followed_as_they_come_and_as_they_are_drained(embedded: Site, tmp_path: Path) -> None:
    fence = embedded.open()
    perform(fence, "above the limit")
    perform(fence, "first")
    argv = [sys.executable, "-m", "ragfence", "decisions", "-f", "--json", "--limit", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        argv,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        # In the background of a shell SIGINT is ignored, and child processes inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        assert process.stdout is not None
        assert [json.loads(process.stdout.readline())["source_id"] for _ in range(2)] == ["first"] * 2
        with fence.claim(Operation(kind="ticket", source_id="second")) as op:
            op.seal()
        fence.audit.drain()
        assert [json.loads(process.stdout.readline())["source_id"] for _ in range(2)] == ["second"] * 2
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 130
    finally:
        process.kill()
        process.wait()
        process.stdout.close() if process.stdout else None
