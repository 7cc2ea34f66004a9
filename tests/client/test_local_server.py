"""`Client()` finds the server of this machine, and says how to start one where there is none."""

from __future__ import annotations

import inspect
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ragfence import Document
from ragfence.cli.serve import serve
from ragfence.client import ApiUnavailable, AsyncClient, Client, RetryPolicy, session


@pytest.fixture(autouse=True)
def without_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAGFENCE_URL", raising=False)
    monkeypatch.delenv("RAGFENCE_API_KEY", raising=False)


def test_a_client_without_an_address_asks_where_serve_listens_by_default() -> None:
    given = {name: parameter.default for name, parameter in inspect.signature(serve).parameters.items()}
    with Client() as client:
        assert repr(client) == f"Client('http://{given['host']}:{given['port']}')"
    assert repr(AsyncClient()) == f"AsyncClient('http://{given['host']}:{given['port']}')"


def test_an_empty_setting_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAGFENCE_URL", "")
    assert repr(Client()) == f"Client({session.LOCAL_URL!r})"


def test_a_client_without_an_address_is_answered_by_the_server_that_runs_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [sys.executable, "-m", "ragfence", "serve", "--insecure-dev", "--port", "0", "--json"]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            # The default port may be taken on this machine.
            monkeypatch.setattr(session, "LOCAL_URL", json.loads(server.stdout.readline())["url"])
            with Client() as client:
                assert client.ingest(Document("a", "some text")).decision == "new"
        finally:
            server.terminate()
            server.communicate(timeout=60)


def test_where_nobody_listens_the_error_names_the_address_and_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as held:  # bound, and not listening: a connection is refused
        held.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{held.getsockname()[1]}"
        monkeypatch.setattr(session, "LOCAL_URL", address)
        with Client(retry=RetryPolicy(budget_s=0)) as client, pytest.raises(ApiUnavailable) as raised:
            client.ingest(Document("a", "some text"))
    assert address in raised.value.message
    assert address in raised.value.hint
    assert "`ragfence serve`" in raised.value.hint
    assert "RAGFENCE_URL" in raised.value.hint
