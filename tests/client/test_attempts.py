"""What a client reports of its requests."""

from __future__ import annotations

import csv
import threading
from pathlib import Path

import pytest

from ragfence import Document, errors
from ragfence.client import ApiRefused, AttemptLog, Client, RequestAttempt
from tests.client.conftest import Opening, Slept
from tests.client.scripted import RECEIPT, Said, Scripted, problem, said

DOCUMENT = Document("a", "some text", {"team": "people"})
DONE = said(RECEIPT, 201)


def test_every_request_of_a_call_is_reported_with_its_pause(opened: Opening, server: Scripted, slept: Slept) -> None:
    seen: list[RequestAttempt] = []
    client = opened(server.url, "rf_secret", slept=slept, on_attempt=seen.append)
    server.script(Said(lost=True), Said(502, b"<html>oh</html>"), problem("RATE_LIMIT.exceeded", retry_after="3"), DONE)
    client.ingest(DOCUMENT)
    assert [(one.attempt, one.status, one.code) for one in seen] == [
        (1, "lost", None),
        (2, "unavailable", 502),
        (3, "unavailable", 429),
        (4, "success", 201),
    ]
    assert [one.delay_ms for one in seen] == [0, *(round(pause * 1000) for pause in slept.pauses)]
    assert seen[2].notes == "RATE_LIMIT.exceeded"
    assert {(one.method, one.path) for one in seen} == {("POST", "/v1/documents")}
    assert {one.idempotency_key for one in seen} == {server.asked[0].key.strip('"')}
    assert "rf_secret" not in repr(seen)


def test_a_refusal_and_an_unfinished_operation_are_reported(opened: Opening, server: Scripted, slept: Slept) -> None:
    seen: list[RequestAttempt] = []
    client = opened(server.url, slept=slept, on_attempt=seen.append)
    server.script(problem(errors.InFlight("another request"), status=409), Said(403, b"no"))
    with pytest.raises(ApiRefused):
        client.ingest(DOCUMENT)
    assert [(one.status, one.code) for one in seen] == [("in_progress", 409), ("refused", 403)]


def test_a_log_is_a_csv_file_with_one_header(server: Scripted, tmp_path: Path) -> None:
    path = tmp_path / "attempts.csv"
    for _ in range(2):
        server.script(Said(503, b""), DONE)
        with Client(server.url, on_attempt=AttemptLog(path)) as client:
            client.ingest(DOCUMENT)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["attempt"], row["status"], row["code"]) for row in rows] == [
        ("1", "unavailable", "503"),
        ("2", "success", "201"),
    ] * 2


def test_threads_share_a_log(tmp_path: Path) -> None:
    log = AttemptLog(tmp_path / "attempts.csv")
    attempt = RequestAttempt("GET", "/v1/x", "", 1, 0, "lost", None, 'a "quoted", long\nnote')
    threads = [threading.Thread(target=lambda: [log(attempt) for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with (tmp_path / "attempts.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 200
    assert {row["notes"] for row in rows} == {attempt.notes}
