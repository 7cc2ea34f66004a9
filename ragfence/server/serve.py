"""Serving: uvicorn, with connections that cannot be held for nothing, and an end that leaves no key held.

At SIGTERM or SIGINT `/readyz` answers 503; for `drain_s` everything else goes on as before. Then no connection
is taken any more, and what is under way may finish within `grace_s`. What is not done by then is cancelled, which gives
its key back, and is answered with 503. Then the application is told (its lifespan), and the process ends with 0.
A second signal ends it at once, as `kill -9` would: leases run out by themselves. So does work that cannot be cancelled
(a thread) and does not end within `LAST_S` more; the process then ends with 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from ragfence._extras import needs_extra
from ragfence.core.settings import Settings, repr_without_passwords
from ragfence.errors import RagfenceError, ValidationError
from ragfence.server.asgi import App
from ragfence.server.connections import Addresses, ConnectionLimits, quickest
from ragfence.server.edge import is_loopback
from ragfence.server.load_shedding import STOPPING

with needs_extra("api", "`ragfence serve`"):
    import uvicorn
    from uvicorn.supervisors import multiprocess

FACTORY: Final = "ragfence.server.serve:app_from_environment"
LAST_S: Final = 10.0
NOT_STARTED: Final = 3
"""how a worker ends that need not be started again; uvicorn's number"""

_log = logging.getLogger("ragfence.server")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """How to serve. `root_path` is the prefix under which a proxy shows the server, and which it takes off."""

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
    """What the application is made of, on its way to the workers: through RAGFENCE_* variables."""

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
    """What every worker runs: the ingestion API, of the settings in its environment."""
    from ragfence.server.app import create_app

    settings = AppSettings.from_environ(os.environ)
    return create_app(
        settings.store,
        objects=settings.objects,
        policy=settings.policy,
        insecure_dev=settings.insecure_dev,
        max_concurrent=settings.max_concurrent,
    )


Told = Callable[[str, int], None]
"""is told the address, once requests are answered: the URL and the port"""


def serve(app: App | str, serving: ServerOptions, *, ready: Told = lambda url, port: None) -> int:
    """Serves until a signal comes, and returns the exit code. `app` may be `module:factory`, as workers need it."""
    check(serving)
    listening = _bound(serving)
    port: int = listening.getsockname()[1]
    host = f"[{serving.host}]" if ":" in serving.host else serving.host
    config = _Config(app, serving)

    def told() -> None:
        ready(f"{serving.scheme}://{host}:{port}", port)

    with contextlib.closing(listening):
        if serving.workers > 1:
            with tempfile.TemporaryDirectory(prefix="ragfence-metrics-") as folder:
                # Where workers add up what they count; read by them when they are started.
                os.environ.setdefault("PROMETHEUS_MULTIPROC_DIR", folder)
                return _Supervisor(config, [listening], told).run_to_the_end()
        server = _Server(config, told)
        server.run([listening])
        return 0 if server.started else NOT_STARTED


def check(serving: ServerOptions, *, insecure_dev: bool = False) -> None:
    """Raises `ValidationError` for what cannot be served, or must not."""
    if insecure_dev and not is_loopback(serving.host):
        raise ValidationError(
            f"--insecure-dev asks nobody for an API key, and {serving.host} can be reached by others",
            hint="use --host 127.0.0.1, or make API keys (`ragfence apikeys create`) and leave --insecure-dev out",
        )
    if bool(serving.tls_cert) != bool(serving.tls_key):
        raise ValidationError("TLS needs a certificate and its key", hint="give both --tls-cert and --tls-key")
    for file in (serving.tls_cert, serving.tls_key):
        if file and not Path(file).is_file():
            raise ValidationError(f"there is no file {file}", hint="a PEM file, with its whole chain")


def _bound(serving: ServerOptions) -> socket.socket:
    try:
        found = socket.getaddrinfo(serving.host, serving.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
    except OSError as wrong:
        raise ValidationError(f"{serving.host} is no address of this machine: {wrong}", hint="correct --host") from None
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.set_inheritable(True)
    except OSError as taken:
        listening.close()
        raise ValidationError(
            f"cannot listen on {serving.host}, port {serving.port}: {taken.strerror}",
            hint="choose another --port (0 for any that is free), or stop who has it",
        ) from None
    return listening


class _Config(uvicorn.Config):
    def __init__(self, app: App | str, serving: ServerOptions) -> None:
        super().__init__(
            app,
            factory=isinstance(app, str),
            host=serving.host,
            port=serving.port,
            http=quickest(),
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
        self.addresses = Addresses(most=limits.most, max_held_bytes=limits.max_held_bytes, share=limits.address_share)

    def load(self) -> None:
        try:
            super().load()
        except RagfenceError as refused:  # told in words by whoever started us, if it is not a worker
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
        self._standing: set[asyncio.Task[Any]] = set()
        """tasks that last as long as the server: its own, the lifespan, what that has started"""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._standing = asyncio.all_tasks()
        self._ready()

    def handle_exit(self, sig: int, frame: Any) -> None:
        if sig == signal.SIGINT and self._serving.workers > 1:
            return  # Ctrl-C reaches all processes of a terminal; the supervisor tells its workers, and once is enough
        if self.should_exit:
            os._exit(128 + sig)
        # Not remembered by uvicorn, which would end the process by the same signal once more.
        self.should_exit = True
        most_s = self._serving.drain_s + self._serving.grace_s + LAST_S
        threading.Thread(target=_end_anyway, args=(most_s,), daemon=True).start()

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
        await self._ended(ends_at)
        await self._cancel_what_runs()
        # It waits for what goes on for clients that have left.
        told = asyncio.create_task(self.lifespan.shutdown())
        await asyncio.wait({told}, timeout=max(0.0, ends_at - time.monotonic()))
        if not told.done():
            self._cancel(asyncio.all_tasks() - {told})
        await told

    async def _cancel_what_runs(self) -> None:
        requests = set(self.server_state.tasks)
        if requests:
            # First the work, so that its key is given back and its request answered; then requests that are left.
            self._cancel(asyncio.all_tasks() - requests)
            await self._ended(time.monotonic() + LAST_S / 4)
            self._cancel(set(self.server_state.tasks))
            await self._ended(time.monotonic() + LAST_S / 4)

    def _cancel(self, tasks: set[asyncio.Task[Any]]) -> None:
        for task in tasks - self._standing:
            task.cancel()

    async def _ended(self, at: float) -> None:
        """Until no request is under way, or that moment has come."""
        # A connection goes when its answer is out; those of clients that wait for nothing were closed.
        while (self.server_state.tasks or self.server_state.connections) and time.monotonic() < at:
            await asyncio.sleep(0.02)


def _end_anyway(after_s: float) -> None:
    time.sleep(after_s)
    _log.error("something does not end; its lease will run out")
    os._exit(1)


class _Worker(multiprocess.Process):
    """A process of the supervisor, with our server in it."""

    config: _Config

    @property
    def server(self) -> _Server:
        if self._server is None:
            self._server = _Server(self.config)
        assert isinstance(self._server, _Server)
        return self._server

    def pong(self) -> None:
        self.child_conn.recv()
        self.child_conn.send(self.server.started)

    def ping(self, timeout: float = 5) -> bool:
        return self._asked(timeout) is not None

    def has_started(self) -> bool:
        return bool(self._asked(5))

    def _asked(self, timeout_s: float) -> bool | None:
        """Whether it has started; None if it does not say. Who has died is not waited for."""
        give_up_at = time.monotonic() + timeout_s
        with contextlib.suppress(OSError, EOFError):
            self.parent_conn.send(b"ping")
            while self.process.is_alive() and time.monotonic() < give_up_at:
                if self.parent_conn.poll(0.1):
                    return bool(self.parent_conn.recv())
        return None


class _Supervisor(multiprocess.Multiprocess):
    config: _Config

    def __init__(self, config: _Config, sockets: list[socket.socket], ready: Callable[[], None]) -> None:
        multiprocess.Process = _Worker  # type: ignore[misc]  # it has no other place to say so
        super().__init__(config, sockets)
        self._ready: Callable[[], None] | None = ready
        self._told_to_stop = False
        for sig in (signal.SIGINT, signal.SIGTERM):
            signal.signal(sig, self._stop)

    def run_to_the_end(self) -> int:
        self.run()
        return NOT_STARTED if any(process.exitcode == NOT_STARTED for process in self.processes) else 0

    def keep_subprocess_alive(self) -> None:
        super().keep_subprocess_alive()
        if self._ready is not None and all(
            isinstance(process, _Worker) and process.has_started() for process in self.processes
        ):
            self._ready()
            self._ready = None

    def _stop(self, sig: int, frame: Any) -> None:
        if self._told_to_stop:
            for process in self.processes:
                process.process.kill()
            os._exit(128 + sig)
        self._told_to_stop = True
        self.should_exit.set()
