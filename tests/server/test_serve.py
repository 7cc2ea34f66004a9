"""Serving with real processes: what is under way when a server is stopped, and when it is killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

import ragfence
from ragfence.errors import UnknownStore, ValidationError
from ragfence.server import IdempotencyMiddleware
from ragfence.server import serve as serving
from ragfence.server.load_shedding import LoadShedding
from ragfence.server.serve import AppSettings, ServerOptions, check
from tests.servers import certificates, wait_until

ROOT = Path(__file__).resolve().parents[2]


def slow_app() -> Any:
    """Performs a job once `go` is there, and notes in files what was begun and done."""
    folder = Path(os.environ["SERVED_FOLDER"])
    policy = ragfence.Policy.from_mapping({"lease": {"ttl_s": float(os.environ.get("SERVED_LEASE_S", "60"))}})
    fence = ragfence.open(folder / "fence", policy=policy)

    def note(what: str, name: str) -> None:
        with (folder / what).open("a") as file:
            file.write(f"{name}\n")

    async def job(request: Request) -> Response:
        name = request.path_params["name"]
        note("begun", name)
        while not (folder / "go").exists():
            await asyncio.sleep(0.01)
        note("done", name)
        return JSONResponse({"done": name, "pid": os.getpid()}, status_code=201)

    def stubborn(request: Request) -> Response:  # in a thread, which nothing can cancel
        note("begun", "stubborn")
        time.sleep(3600)
        return PlainTextResponse("never")

    async def fine(request: Request) -> Response:
        return JSONResponse({"pid": os.getpid(), "url": str(request.url)})

    @contextlib.asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        yield
        note("lifespan", "over")
        fence.close()

    app = Starlette(
        routes=[
            Route("/jobs/{name}", job, methods=["POST"]),
            Route("/stubborn", stubborn, methods=["POST"]),
            Route("/readyz", fine),
            Route("/fine", fine),
        ],
        lifespan=lifespan,
    )
    app.add_middleware(IdempotencyMiddleware, fence=fence)
    return LoadShedding(app)


def refusing_app() -> Any:
    raise UnknownStore("there is no such store", hint="name another")


class Process:
    def __init__(self, folder: Path, factory: str = "slow_app", *, lease_s: float = 60, **serving: Any) -> None:
        self.folder = folder
        code = (
            "import json, sys\n"
            "from ragfence.server import serve as api\n"
            f"api.LAST_S, api.ANSWER_S = {serving.pop('last_s', 10)}, {serving.pop('answer_s', 30)}\n"
            f"settings = api.ServerOptions(**{ {'port': 0, **serving}!r})\n"
            "ready = lambda url, port: print(json.dumps([url, port]), flush=True)\n"
            f"sys.exit(api.serve('tests.server.test_serve:{factory}', settings, ready=ready))"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "SERVED_FOLDER": str(folder), "SERVED_LEASE_S": str(lease_s)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.url, self.port = json.loads(line) if line else ("", 0)

    def post(self, path: str, key: str = "k") -> httpx.Response:
        return httpx.post(f"{self.url}{path}", headers={"Idempotency-Key": key}, timeout=60)

    def in_background(self, path: str) -> list[Any]:
        """Asks in a thread; the answer, or what went wrong, is in the list once it is there."""
        found: list[Any] = []

        def ask() -> None:
            try:
                found.append(self.post(path))
            except httpx.HTTPError as error:
                found.append(error)

        begun = len(self.notes("begun"))
        threading.Thread(target=ask, daemon=True).start()
        wait_until(lambda: len(self.notes("begun")) > begun, "the request is under way")
        return found

    def notes(self, what: str) -> list[str]:
        file = self.folder / what
        return file.read_text().split() if file.exists() else []

    def signal(self, sig: int = signal.SIGTERM) -> None:
        self.process.send_signal(sig)

    def ended(self) -> tuple[int, str]:
        """The exit code, and what was told on the way."""
        _, told = self.process.communicate(timeout=60)
        return self.process.returncode, told


@contextmanager
def running(folder: Path, factory: str = "slow_app", **settings: Any) -> Iterator[Process]:
    server = Process(folder, factory, **settings)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
        server.process.communicate()


def answered(found: list[Any]) -> Any:
    return wait_until(lambda: found, "an answer")[0]


def test_what_is_under_way_is_sealed_and_answered_while_the_server_stops(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        found = server.in_background("/jobs/a")
        server.signal()
        wait_until(lambda: _refused(server.url), "no more connections are taken")
        (tmp_path / "go").touch()
        answer = answered(found)
        assert (answer.status_code, answer.headers["idempotency-status"]) == (201, "stored")
        assert server.ended() == (0, "")
    assert server.notes("lifespan") == ["over"]
    with running(tmp_path) as server:
        again = server.post("/jobs/a")
        assert (again.content, again.headers["idempotency-status"]) == (answer.content, "replayed")
    assert server.notes("done") == ["a"]


def _refused(url: str) -> bool:
    try:
        httpx.get(f"{url}/fine", timeout=5)
    except httpx.ConnectError:
        return True
    return False


@pytest.mark.parametrize("sig", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_what_outlives_the_grace_is_given_back_and_performed_by_the_next_server(tmp_path: Path, sig: int) -> None:
    with running(tmp_path, grace_s=0.3) as server:
        found = server.in_background("/jobs/a")
        server.signal(sig)
        answer = answered(found)
        assert (answer.status_code, answer.json()["code"]) == (503, "DEPENDENCY.overloaded")
        assert int(answer.headers["retry-after"]) >= 1
        assert server.ended() == (0, "")
    assert server.notes("lifespan") == ["over"]
    (tmp_path / "go").touch()
    with running(tmp_path) as server:
        # The lease was of a minute: had it not been given back, this would be a 202.
        assert server.post("/jobs/a").status_code == 201
    assert server.notes("begun") == ["a", "a"]
    assert server.notes("done") == ["a"]


@pytest.mark.slow
def test_work_whose_client_has_left_is_sealed_too(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(b"POST /jobs/a HTTP/1.1\r\nHost: x\r\nIdempotency-Key: k\r\nContent-Length: 0\r\n\r\n")
            wait_until(lambda: server.notes("begun"), "the request is under way")
        server.signal()
        (tmp_path / "go").touch()
        assert server.ended() == (0, "")
    with running(tmp_path) as server:
        assert server.post("/jobs/a").headers["idempotency-status"] == "replayed"


def test_a_killed_server_leaves_a_key_that_is_taken_over_after_its_lease(tmp_path: Path) -> None:
    with running(tmp_path, lease_s=1.5) as server:
        found = server.in_background("/jobs/a")
        server.signal(signal.SIGKILL)
        assert isinstance(answered(found), httpx.HTTPError)
        assert server.ended()[0] == -signal.SIGKILL
    (tmp_path / "go").touch()
    with running(tmp_path, lease_s=1.5) as server:
        wait_until(lambda: server.post("/jobs/a").status_code == 201, "the lease has run out")
    assert server.notes("done") == ["a"]


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    with running(tmp_path, lease_s=1.5) as server:
        found = server.in_background("/jobs/a")
        server.signal()
        wait_until(lambda: _refused(server.url), "it is stopping")
        server.signal()
        assert server.ended()[0] == 128 + signal.SIGTERM
        assert isinstance(answered(found), httpx.HTTPError)
    assert server.notes("lifespan") == []


@pytest.mark.slow
def test_a_server_that_drains_is_not_ready_but_serves(tmp_path: Path) -> None:
    with running(tmp_path, drain_s=1) as server, httpx.Client(base_url=server.url) as client:
        assert client.get("/readyz").status_code == 200
        server.signal()
        wait_until(lambda: client.get("/readyz").status_code == 503, "it is not ready any more")
        assert httpx.get(f"{server.url}/fine").status_code == 200
        assert server.ended() == (0, "")


@pytest.mark.slow
def test_a_thread_that_does_not_end_does_not_keep_the_process(tmp_path: Path) -> None:
    with running(tmp_path, grace_s=0.2, last_s=1) as server:
        server.in_background("/stubborn")
        server.signal()
        status, told = server.ended()
        assert (status, "its leases will expire" in told) == (1, True)


@pytest.mark.slow
def test_idle_connections_do_not_hold_up_the_end(tmp_path: Path) -> None:
    with running(tmp_path, grace_s=50) as server, httpx.Client(base_url=server.url) as client:
        assert client.get("/fine").status_code == 200
        server.signal()
        assert server.ended() == (0, "")


def test_workers_share_the_port_and_stop_together(tmp_path: Path) -> None:
    with running(tmp_path, workers=2) as server:
        wait_until(lambda: len({httpx.get(f"{server.url}/fine").json()["pid"] for _ in range(8)}) == 2, "both answer")
        found = server.in_background("/jobs/a")
        server.signal()
        (tmp_path / "go").touch()
        assert answered(found).status_code == 201
        assert server.ended() == (0, "")
    assert server.notes("lifespan") == ["over", "over"]


def _workers(server: Process) -> set[int]:
    """The workers that answer now."""
    return {httpx.get(f"{server.url}/fine").json()["pid"] for _ in range(8)}


def test_sighup_replaces_each_worker_and_what_is_in_progress_is_answered(tmp_path: Path) -> None:
    with running(tmp_path, workers=2) as server:
        wait_until(lambda: len(_workers(server)) == 2, "both answer")
        before = _workers(server) | _workers(server)
        found = server.in_background("/jobs/a")
        server.signal(signal.SIGHUP)
        wait_until(lambda: _workers(server) - before, "a new worker answers while an old one finishes its request")
        assert not found, "the request is still in progress"
        (tmp_path / "go").touch()
        answer = answered(found)
        assert (answer.status_code, answer.json()["pid"] in before) == (201, True)
        wait_until(lambda: len(now := _workers(server)) == 2 and not now & before, "both workers are new")
        assert server.process.poll() is None
        assert server.notes("begun") == server.notes("done") == ["a"]
        server.signal()
        assert server.ended() == (0, "")
    assert server.notes("lifespan") == ["over"] * 4


def test_a_worker_that_dies_is_replaced(tmp_path: Path) -> None:
    with running(tmp_path, workers=2) as server:
        wait_until(lambda: len(_workers(server)) == 2, "both answer")
        killed, left = _workers(server) | _workers(server)
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: len(_workers(server) - {killed, left}) == 1, "another worker answers")
        assert left in _workers(server) | _workers(server)
        server.signal()
        status, printed = server.ended()
    assert status == 0
    assert f"worker {killed} died or did not answer; another one is started" in printed


def answer_once(config: Any, sockets: Any, pipe: Any) -> None:
    """A worker that answers one ping, late."""
    time.sleep(1)
    pipe.recv()
    pipe.send(True)
    time.sleep(3600)


def test_a_worker_may_take_longer_to_load_than_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_work", answer_once)
    monkeypatch.setattr(serving, "ANSWER_S", 0.2)
    worker = serving._Worker(None, [])  # type: ignore[arg-type]
    try:
        assert worker.is_started() is False, "it is still loading, and it is not replaced"
        wait_until(worker.is_started, "it has started")
        assert worker.is_started() is None, "it loaded long ago and does not answer"
    finally:
        worker.end(kill=True)
    monkeypatch.setattr(serving, "LOADING_S", 0)
    worker = serving._Worker(None, [])  # type: ignore[arg-type]
    try:
        assert worker.is_started() is None, "it has had its time"
    finally:
        worker.end(kill=True)


@pytest.mark.slow
def test_workers_that_cannot_start_are_not_started_again(tmp_path: Path) -> None:
    with running(tmp_path, "refusing_app", workers=2) as server:
        status, told = server.ended()
        assert status == 3
        assert "there is no such store" in told
        assert "Traceback" not in told


def test_tls_and_a_prefix(tmp_path: Path) -> None:
    pems = certificates(tmp_path / "tls")
    with running(tmp_path, tls_cert=str(pems.certfile), tls_key=str(pems.keyfile), root_path="/rag") as server:
        assert server.url.startswith("https://127.0.0.1:")
        context = ssl.create_default_context(cafile=pems.ca)
        answer = httpx.get(f"{server.url}/fine", verify=context)
        assert answer.json()["url"].endswith("/rag/fine")
        assert "server" not in answer.headers


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org", ""])
def test_without_keys_nobody_but_this_machine_is_served(host: str) -> None:
    with pytest.raises(ValidationError) as refused:
        check(ServerOptions(host=host), insecure_dev=True)
    assert "--host 127.0.0.1" in refused.value.hint


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_without_keys_this_machine_is_served(host: str) -> None:
    check(ServerOptions(host=host), insecure_dev=True)


def test_a_certificate_without_its_key_is_refused(tmp_path: Path) -> None:
    for wrong in ({"tls_cert": "a.pem"}, {"tls_key": "a.pem"}, {"tls_cert": "no.pem", "tls_key": "no.pem"}):
        with pytest.raises(ValidationError):
            check(ServerOptions(**wrong))


def test_settings_reach_the_workers_through_the_environment() -> None:
    settings = AppSettings(store="redis://h/0", objects="s3://b/p", insecure_dev=True, max_concurrent=7)
    assert AppSettings.from_environ(settings.to_environ()) == settings
    assert AppSettings.from_environ({}) == AppSettings()
