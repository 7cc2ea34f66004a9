"""Serving: uvicorn, with limits for slow and idle connections, and a shutdown that leaves no key claimed.

At SIGTERM or SIGINT `/readyz` answers 503; for `drain_s` everything else continues. Then no connection is accepted any
more, and requests in progress may finish within `grace_s`. Those that have not finished by then are cancelled, which
releases their keys, and are answered with 503. Then the lifespan of the application ends, and the process exits with 0.
A second signal ends it immediately, like `kill -9`: leases expire. If work that cannot be cancelled (a thread) does not
end within another `LAST_S`, the process exits with 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from ragfence._extras import needs_extra
from ragfence.core.settings import Settings, repr_without_passwords
from ragfence.core.urls import is_loopback
from ragfence.errors import RagfenceError, ValidationError
from ragfence.server.asgi import App
from ragfence.server.connections import Addresses, ConnectionLimits, fastest_protocol
from ragfence.server.full_collections import short_full_collections
from ragfence.server.load_shedding import STOPPING

with needs_extra("api", "`ragfence serve`"):
    import uvicorn

FACTORY: Final = "ragfence.server.serve:app_from_environment"
LAST_S: Final = 10.0
ANSWER_S: Final = 5.0
"""A worker that does not answer the supervisor for this long is replaced."""
LOADING_S: Final = 60.0
"""A worker may take this long until it answers for the first time."""
NOT_STARTED: Final = 3
"""Exit code of a worker that would not start a second time either; the same as uvicorn's."""

_log = logging.getLogger("ragfence.server")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """How to serve. `root_path` is the prefix under which a proxy publishes the server, and which it removes."""

    host: str = "127.0.0.1"
    port: int = 8080
    workers: int = 1
    tls_cert: str | None = None
    tls_key: str | None = None
    root_path: str = ""
    grace_s: float = 30.0
    drain_s: float = 0.0
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)

    @property
    def scheme(self) -> str:
        return "https" if self.tls_cert else "http"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class AppSettings:
    """Settings of the application. They reach the workers through RAGFENCE_* variables."""

    store: str | None = None
    objects: str | None = None
    policy: str | None = None
    insecure_dev: bool = False
    max_concurrent: int = 256

    def __repr__(self) -> str:
        return repr_without_passwords(self)

    def to_environ(self) -> dict[str, str]:
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            f"RAGFENCE_{name.upper()}": str(int(value)) if isinstance(value, int) else value
            for name, value in given.items()
            if value is not None
        }

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> AppSettings:
        known = Settings.from_env(environ)
        return cls(
            store=known.store,
            objects=known.objects,
            policy=known.policy,
            insecure_dev=environ.get("RAGFENCE_INSECURE_DEV", "0") == "1",
            max_concurrent=int(environ.get("RAGFENCE_MAX_CONCURRENT", "256")),
        )


def app_from_environment() -> App:
    """Makes the ingestion API from the environment: the application of every worker."""
    from ragfence.server.app import create_app

    settings = AppSettings.from_environ(os.environ)
    return create_app(
        settings.store,
        objects=settings.objects,
        policy=settings.policy,
        insecure_dev=settings.insecure_dev,
        max_concurrent=settings.max_concurrent,
    )


SWITCH_INTERVAL_S: Final = 0.001
"""Python's own is 0.005."""

OnReady = Callable[[str, int], None]
"""Called with the URL and the port, once requests are answered."""


def serve(app: App | str, serving: ServerOptions, *, ready: OnReady = lambda url, port: None) -> int:
    """Serves until a signal comes, and returns the exit code. For workers `app` has to be `module:factory`."""
    check(serving)
    listening = _listen(serving)
    port: int = listening.getsockname()[1]
    host = f"[{serving.host}]" if ":" in serving.host else serving.host
    config = _Config(app, serving)

    def report() -> None:
        ready(f"{serving.scheme}://{host}:{port}", port)

    with contextlib.closing(listening):
        if serving.workers > 1:
            with tempfile.TemporaryDirectory(prefix="ragfence-metrics-") as folder:
                # Where workers add up their metrics; they read it when they start.
                os.environ.setdefault("PROMETHEUS_MULTIPROC_DIR", folder)
                return _Supervisor(config, [listening], report).run()
        server = _Server(config, report)
        server.run([listening])
        return 0 if server.started else NOT_STARTED


def check(serving: ServerOptions, *, insecure_dev: bool = False) -> None:
    """Raises `ValidationError` for options that cannot be served, or must not be."""
    if insecure_dev and not is_loopback(serving.host):
        raise ValidationError(
            f"--insecure-dev requires no API key, and {serving.host} can be reached from other machines",
            hint="use --host 127.0.0.1, or create API keys (`ragfence apikeys create`) and leave --insecure-dev out",
        )
    if bool(serving.tls_cert) != bool(serving.tls_key):
        raise ValidationError("TLS needs a certificate and its key", hint="give both --tls-cert and --tls-key")
    for file in (serving.tls_cert, serving.tls_key):
        if file and not Path(file).is_file():
            raise ValidationError(f"there is no file {file}", hint="a PEM file, with its whole chain")


def _listen(serving: ServerOptions) -> socket.socket:
    try:
        found = socket.getaddrinfo(serving.host, serving.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
    except OSError as wrong:
        raise ValidationError(
            f"{serving.host} is not an address of this machine: {wrong}", hint="correct --host"
        ) from None
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.set_inheritable(True)
    except OSError as taken:
        listening.close()
        raise ValidationError(
            f"cannot listen on {serving.host}, port {serving.port}: {taken.strerror}",
            hint="choose another --port (0 for any that is free), or stop the process that uses it",
        ) from None
    return listening


class _Config(uvicorn.Config):
    def __init__(self, app: App | str, serving: ServerOptions) -> None:
        super().__init__(
            app,
            factory=isinstance(app, str),
            host=serving.host,
            port=serving.port,
            http=fastest_protocol(),
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            workers=serving.workers,
            proxy_headers=False,
            server_header=False,
            root_path=serving.root_path,
            ssl_certfile=serving.tls_cert,
            ssl_keyfile=serving.tls_key,
            h11_max_incomplete_event_size=serving.connections.max_head_bytes,
        )
        self.serving = serving
        limits = serving.connections
        self.addresses = Addresses(
            max_connections=limits.max_connections, max_held_bytes=limits.max_held_bytes, share=limits.address_share
        )

    def load(self) -> None:
        try:
            super().load()
        except RagfenceError as refused:  # reported by the caller, unless this is a worker
            if self.serving.workers == 1:
                raise
            _log.error("%s", refused)
            sys.exit(NOT_STARTED)


class _Server(uvicorn.Server):
    config: _Config

    def __init__(self, config: _Config, ready: Callable[[], None] = lambda: None) -> None:
        super().__init__(config)
        self._ready = ready
        self._serving = config.serving
        self._stop_at = 0.0
        self._permanent: set[asyncio.Task[Any]] = set()
        """Tasks that last as long as the server: its own, the lifespan, and those that the lifespan has started."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        # After this time a thread that computes (a build) gives the interpreter back to the event loop, which needs it
        # several times for each request.
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        await super().startup(sockets)
        self._permanent = asyncio.all_tasks()
        self._ready()

    async def main_loop(self) -> None:
        with short_full_collections():
            await super().main_loop()

    def handle_exit(self, sig: int, frame: Any) -> None:
        if sig == signal.SIGINT and self._serving.workers > 1:
            return  # Ctrl-C reaches all processes of a terminal, and the supervisor ends its workers as well
        if self.should_exit:
            os._exit(128 + sig)
        # Not passed to uvicorn, which would end the process by the same signal once more.
        self.should_exit = True
        longest_s = self._serving.drain_s + self._serving.grace_s + LAST_S
        threading.Thread(target=_exit_after, args=(longest_s,), daemon=True).start()

    async def on_tick(self, counter: int) -> bool:
        over = await super().on_tick(counter)
        if not self.should_exit:
            return over
        if not self._stop_at:
            self._stop_at = time.monotonic() + self._serving.drain_s
            self.lifespan.state[STOPPING] = True
        return time.monotonic() >= self._stop_at

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.lifespan.state[STOPPING] = True
        ends_at = time.monotonic() + self._serving.grace_s
        for server in self.servers:
            server.close()
        for listening in sockets or []:
            listening.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await self._wait_for_requests(ends_at)
        await self._cancel_requests()
        # It waits for work that continues for clients that have disconnected.
        ended = asyncio.create_task(self.lifespan.shutdown())
        await asyncio.wait({ended}, timeout=max(0.0, ends_at - time.monotonic()))
        if not ended.done():
            self._cancel(asyncio.all_tasks() - {ended})
        await ended

    async def _cancel_requests(self) -> None:
        requests = set(self.server_state.tasks)
        if requests:
            # First the work, which releases its key and answers its request; then the remaining requests.
            self._cancel(asyncio.all_tasks() - requests)
            await self._wait_for_requests(time.monotonic() + LAST_S / 4)
            self._cancel(set(self.server_state.tasks))
            await self._wait_for_requests(time.monotonic() + LAST_S / 4)

    def _cancel(self, tasks: set[asyncio.Task[Any]]) -> None:
        for task in tasks - self._permanent:
            task.cancel()

    async def _wait_for_requests(self, until: float) -> None:
        """Waits until no request is in progress, but not longer than `until`."""
        # A connection ends once its answer is sent; idle connections were closed before.
        while (self.server_state.tasks or self.server_state.connections) and time.monotonic() < until:
            await asyncio.sleep(0.02)


def _exit_after(seconds: float) -> None:
    time.sleep(seconds)
    _log.error("some work does not end; the process exits, and its leases will expire")
    os._exit(1)


class _Worker:
    """A process with a server, and a pipe by which it answers whether the server has started."""

    def __init__(self, config: _Config, sockets: list[socket.socket]) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, inner = spawn.Pipe()
        self.process = spawn.Process(target=_work, args=(config, sockets, inner))
        self.process.start()
        inner.close()
        self._loaded_by = time.monotonic() + LOADING_S
        self._loading = True
        self._asked = False

    def is_started(self) -> bool | None:
        """Returns whether its server has started; None if the process has died or does not answer."""
        # On a busy machine, a new process takes longer to import the application than a living one takes to answer.
        give_up_at = time.monotonic() + (0.0 if self._loading else ANSWER_S)
        with contextlib.suppress(OSError, EOFError):
            if not self._asked:
                self._pipe.send(None)
                self._asked = True
            while self.process.is_alive():
                if self._pipe.poll(0.1):
                    self._asked = self._loading = False
                    return bool(self._pipe.recv())
                if time.monotonic() >= give_up_at:
                    break
        loading = self._loading and self.process.is_alive() and time.monotonic() < self._loaded_by
        return False if loading else None

    def end(self, *, kill: bool = False) -> None:
        if kill:
            self.process.kill()
        else:
            self.process.terminate()
        self.process.join()
        self._pipe.close()


def _work(config: _Config, sockets: list[socket.socket], pipe: Connection) -> None:
    config.configure_logging()
    server = _Server(config)
    threading.Thread(target=_answer_pings, args=(server, pipe), daemon=True).start()
    server.run(sockets)
    if not server.started:
        sys.exit(NOT_STARTED)


def _answer_pings(server: _Server, pipe: Connection) -> None:
    with contextlib.suppress(OSError, EOFError):
        while True:
            pipe.recv()
            pipe.send(server.started)


class _Supervisor:
    """Runs the workers: replaces those that die or hang, and ends all of them at a signal. SIGHUP replaces each."""

    def __init__(self, config: _Config, sockets: list[socket.socket], ready: Callable[[], None]) -> None:
        self._config = config
        self._sockets = sockets
        self._ready: Callable[[], None] | None = ready
        self._workers: list[_Worker] = []
        self._stopping = threading.Event()
        self._replacing = threading.Event()

    def run(self) -> int:
        for sig in (signal.SIGINT, signal.SIGTERM):
            signal.signal(sig, self._stop)
        signal.signal(signal.SIGHUP, lambda sig, frame: self._replacing.set())
        self._workers = [_Worker(self._config, self._sockets) for _ in range(self._config.workers)]
        while not self._stopping.wait(0.5):
            self._tend()
        for worker in self._workers:
            worker.process.terminate()
        for worker in self._workers:
            worker.process.join()
        return NOT_STARTED if any(worker.process.exitcode == NOT_STARTED for worker in self._workers) else 0

    def _tend(self) -> None:
        started = [self._is_started(at) for at in range(len(self._workers))]
        if self._ready is not None and all(started):
            self._ready()
            self._ready = None
        if self._replacing.is_set():
            self._replacing.clear()
            for at, worker in enumerate(self._workers):
                self._workers[at] = _Worker(self._config, self._sockets)
                worker.end()

    def _is_started(self, at: int) -> bool:
        worker = self._workers[at]
        started = worker.is_started()
        if started is None and not self._stopping.is_set():
            worker.end(kill=True)
            if worker.process.exitcode == NOT_STARTED:  # another one would not start either
                self._stopping.set()
            else:
                _log.error("worker %s died or did not answer; another one is started", worker.process.pid)
                self._workers[at] = _Worker(self._config, self._sockets)
        return bool(started)

    def _stop(self, sig: int, frame: Any) -> None:
        if self._stopping.is_set():
            for worker in self._workers:
                worker.process.kill()
            os._exit(128 + sig)
        self._stopping.set()
