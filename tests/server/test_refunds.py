"""Refunds: one payout and one ledger entry per key, whatever is sent, repeated, lost or killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ragfence import Fence
from tests.server.calls import post
from tests.server.refunds import Books, GatewayTimeout, refund_app

REFUND = {"charge": "ch_9", "amount": 1000}
ROUTES = ["/refunds", "/careful-refunds"]


@pytest.fixture
def books(tmp_path: Path) -> Books:
    return Books(tmp_path / "books.db")


@pytest.mark.parametrize("route", ROUTES)
def test_the_same_key_twice_is_one_refund_and_one_entry(fence: Fence, books: Books, route: str) -> None:
    app = refund_app(fence, books)
    first, again = post(app, route, "r1", json=REFUND), post(app, route, "r1", json=REFUND)
    assert first.status_code == again.status_code == 201
    assert first.json() == again.json() == {"id": "rf_1", "amount": 1000}
    assert again.headers["idempotency-status"] == "replayed"
    assert (books.payouts(), books.ledger()) == ([1000], [-1000])


def test_another_key_is_another_refund(fence: Fence, books: Books) -> None:
    app = refund_app(fence, books)
    assert post(app, "/refunds", "r1", json=REFUND).json() != post(app, "/refunds", "r2", json=REFUND).json()
    assert books.payouts() == [1000, 1000]


def test_another_amount_under_the_same_key_is_refused_with_the_difference(fence: Fence, books: Books) -> None:
    app = refund_app(fence, books)
    post(app, "/refunds", "r1", json=REFUND)
    refused = post(app, "/refunds", "r1", json=REFUND | {"amount": 2000})
    problem = refused.json()
    assert (refused.status_code, problem["code"]) == (409, "CONFLICT.idempotency.payload_mismatch")
    assert problem["diff"] == [{"op": "replace", "path": "/amount", "value": 2000}]
    assert (books.payouts(), books.ledger()) == ([1000], [-1000])


@pytest.mark.parametrize("route", ROUTES)
def test_a_gateway_that_times_out_after_the_payout_pays_once(fence: Fence, books: Books, route: str) -> None:
    app = refund_app(fence, books)

    def lost() -> None:
        raise GatewayTimeout

    books.after_payout = lost
    assert post(app, route, "r1", json=REFUND).status_code == 500
    assert (books.payouts(), books.ledger()) == ([1000], [])
    books.after_payout = lambda: None
    assert post(app, route, "r1", json=REFUND).json() == {"id": "rf_1", "amount": 1000}
    assert (books.payouts(), books.ledger()) == ([1000], [-1000])


def test_the_reversal_is_fenced_as_well(fence: Fence, books: Books) -> None:
    app = refund_app(fence, books)
    refund = post(app, "/refunds", "r1", json=REFUND).json()["id"]
    for _ in range(3):
        assert post(app, f"/refunds/{refund}/reversal", "r1", json=REFUND).json() == {"reversed": refund}
    assert books.ledger() == [-1000, 1000]
    assert post(app, "/refunds/rf_2/reversal", "r1", json=REFUND).status_code == 409


class Server:
    """uvicorn in a process of its own, on a port that stays the same when it is started again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self._port = found.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "uvicorn", "--factory", "tests.server.refunds:from_environment"]
        self.process = subprocess.Popen(
            [*command, "--port", str(self._port), "--log-level", "error"],
            env=os.environ | {"REFUNDS_FOLDER": str(self._folder)},
            cwd=Path(__file__).resolve().parents[2],
        )
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                httpx.get(f"{self.url}/openapi.json", timeout=5)
                return
            except httpx.TransportError:
                assert self.process.poll() is None, "the server ended"
                time.sleep(0.05)
        raise AssertionError("the server did not start")

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    try:
        yield server
    finally:
        server.stop()


def answered(server: Server, route: str, key: str) -> Any:
    """As a client does: the same request with the same key, until there is an answer."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        answer = httpx.post(f"{server.url}{route}", json=REFUND, headers={"Idempotency-Key": key}, timeout=30)
        if answer.status_code != 202:
            return answer
        time.sleep(0.1)
    raise AssertionError("no answer")


def test_a_server_killed_in_the_handler_pays_once(server: Server, tmp_path: Path) -> None:
    server.start()
    for number, route in enumerate(ROUTES, start=1):
        (tmp_path / "die").touch()
        with pytest.raises(httpx.TransportError):
            httpx.post(f"{server.url}{route}", json=REFUND, headers={"Idempotency-Key": "r1"}, timeout=30)
        assert server.process is not None
        assert server.process.wait() == -signal.SIGKILL
        server.start()
        first, again = answered(server, route, "r1"), answered(server, route, "r1")
        assert first.status_code == again.status_code == 201
        assert first.content == again.content
        books = Books(tmp_path / "books.db")
        assert (books.payouts(), books.ledger()) == ([1000] * number, [-1000] * number)
