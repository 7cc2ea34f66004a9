"""The inbox: every event once, with what became of it, and its export."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import ragfence
from ragfence import Document, Operation
from ragfence.cli.app import app
from ragfence.errors import StoreUnavailable, TerminalError


@pytest.fixture
def fence(tmp_path: Path) -> Iterator[ragfence.Fence]:
    with ragfence.open(tmp_path / ".ragfence") as opened:
        yield opened


def receive(fence: ragfence.Fence, event_id: str, payload: object = 1, error: Exception | None = None) -> None:
    operation = Operation(kind="webhook", source_type="cms", source_id=event_id)
    try:
        with fence.claim(operation, payload=payload, verdict=True, wait_s=0, event_id=event_id) as claim:
            if claim.is_new:
                if error is not None:
                    raise error
                claim.seal(result=1)
    except (TerminalError, StoreUnavailable):
        pass


def fill(fence: ragfence.Fence) -> None:
    for _ in range(3):
        receive(fence, "ok")
    receive(fence, "ok", payload=2)
    receive(fence, "failed", error=TerminalError("no"))
    receive(fence, "failed")
    receive(fence, "retried", error=StoreUnavailable("away"))
    receive(fence, "retried")
    receive(fence, "pending", error=StoreUnavailable("away"))
    fence.documents.ingest(Document("d", "new", sequence=2))
    with pytest.raises(ragfence.errors.Stale):
        fence.documents.ingest(Document("d", "old", sequence=1), event_id="stale")
    receive(fence, "stale")


EXPECTED = {
    "ok": ("ok", 1, 2, 1),
    "failed": ("failed", 1, 1, 0),
    "retried": ("ok", 2, 0, 0),
    "pending": ("pending", 1, 0, 0),
    "stale": ("stale", 1, 0, 0),
}


def test_each_event_is_listed_once_with_what_became_of_it(fence: ragfence.Fence) -> None:
    fill(fence)
    for drained in (False, True):
        if drained:
            fence.audit.drain()
        events = fence.audit.inbox(since="1h")
        assert [event.event_id for event in events] == list(EXPECTED)
        found = {event.event_id: (event.result, event.attempts, event.duplicates, event.conflicts) for event in events}
        assert found == EXPECTED
        assert all(event.source == "cms" and event.payload_hash for event in events)
        assert [event.processed_ms is None for event in events] == [name == "pending" for name in EXPECTED]
    assert fence.audit.inbox(source="other") == []


def test_the_command_lists_and_exports_them(
    fence: ragfence.Fence, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    fill(fence)
    monkeypatch.chdir(tmp_path)
    run = CliRunner().invoke
    shown = run(app, ["inbox"])
    assert shown.exit_code == 0, shown.output
    assert all(name in shown.stdout for name in EXPECTED)
    told = json.loads(run(app, ["inbox", "--json", "--limit", "2"]).stdout)
    assert (told["of"], [event["event_id"] for event in told["events"]]) == (5, ["pending", "stale"])
    exported = run(app, ["inbox", "--csv", "inbox.csv"])
    assert exported.exit_code == 0, exported.output
    with (tmp_path / "inbox.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["event_id"]: row["result"] for row in rows} == {name: values[0] for name, values in EXPECTED.items()}
    assert rows[0]["received_at"].endswith("Z")
    assert sorted(os.listdir(tmp_path)) == [".ragfence", "inbox.csv"]
    assert run(app, ["inbox", "--csv", "no/such.csv"]).exit_code == 2
    assert run(app, ["inbox", "--csv", "a.csv", "--json"]).exit_code == 2
    assert "no events" in run(app, ["inbox", "--source", "other"]).stdout
