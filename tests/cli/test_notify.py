"""`ragfence notify`, as a user runs it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ragfence
from ragfence.queues.sql import SqlTransport
from tests.cli.conftest import run
from tests.notify.test_receivers import NEW, Hook, hook

__all__ = ["hook"]
QUEUE = "sqlite:///queue.db?queue=events"


def put(doc_id: str) -> None:
    with ragfence.open() as fence:
        fence.documents.ingest(ragfence.Document(doc_id=doc_id, text="text"))


def test_events_are_sent_from_the_first_time_on(tmp_path: Path) -> None:
    put("a")
    done = run("notify", "--to", QUEUE, "--once")
    assert done.exit_code == 0
    assert "this was the first time" in done.stdout
    put("b")
    done = run("notify", "--to", QUEUE, "--once", "--json")
    assert json.loads(done.stdout) == {"sent": 1, "failed": 0, "dropped": 0, "busy": False, "began": False}
    (message,) = SqlTransport(f"sqlite:///{tmp_path / 'queue.db'}", "events").receive(9, 0)
    assert message.body["data"]["doc_id"] == "b"


def test_a_webhook_is_signed_by_a_secret_of_the_environment(hook: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOK_SECRET", NEW)
    put("a")
    words = ("notify", "--to", hook.url, "--secret-env", "HOOK_SECRET", "--once", "--history", "--name", "hook")
    assert run(*words).stdout == "1 event sent, 0 left, 0 dropped\n"
    assert "webhook-signature" in hook.got[0].headers
    hook.status = 400
    put("b")
    assert run(*words).exit_code == 1
    hook.status = 200
    assert run(*words).exit_code == 0
    assert len({delivery.headers["webhook-id"] for delivery in hook.got}) == 2


def test_it_runs_until_it_is_told_to_end(tmp_path: Path, hook: Hook) -> None:
    put("a")
    words = ["notify", "--to", hook.url, "--history", "--json"]
    running = subprocess.Popen([sys.executable, "-m", "ragfence", *words], cwd=tmp_path, stdout=subprocess.PIPE)
    with running:
        deadline = time.monotonic() + 60
        while not hook.got and time.monotonic() < deadline:
            time.sleep(0.05)
        running.send_signal(signal.SIGTERM)
        said, _ = running.communicate(timeout=60)
    assert running.returncode == 0
    assert json.loads(said)["sent"] == 1


def test_wrong_usage_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    put("a")
    assert run("notify").exit_code == 2
    assert run("notify", "--to", QUEUE, "--type", "document.ingest", "--once").exit_code == 2
    assert run("notify", "--to", "http://example.com/x", "--once").exit_code == 1
    assert run("notify", "--to", QUEUE, "--secret-env", "MISSING").exit_code == 2
    done = run("notify", "--to", QUEUE, "--secret-env", NEW)
    assert (done.exit_code, NEW in done.stderr) == (2, False)
    monkeypatch.setenv("SECRET", NEW)
    assert run("notify", "--to", QUEUE, "--secret-env", "SECRET").exit_code == 2
    assert run("notify", "--to", "https://app:hunter2@127.0.0.1:1/x", "--once", "--name", "../x").exit_code == 1
