"""The ingestion API on a real socket, with keys for two tenants, and a proxy before it that loses what it should."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from ragfence._open import open_objects_of
from ragfence.server.apikeys import ApiKeys, Role  # type: ignore[attr-defined]
from ragfence.server.app import create_app
from tests.faulty_http import FaultyProxy


@dataclass(frozen=True)
class RealServer:
    url: str
    proxy: FaultyProxy
    """the same server, through something that misbehaves on command"""
    acme: str
    acme_reader: str
    globex: str


@contextlib.contextmanager
def real_server(folder: Path) -> Iterator[RealServer]:
    objects = open_objects_of(folder, None)
    assert objects is not None
    keys = ApiKeys(objects)
    with socket.create_server(("127.0.0.1", 0)) as listening, _served(folder, listening):
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with FaultyProxy(url) as proxy:
            yield RealServer(
                url,
                proxy,
                keys.create("acme", Role.ADMIN).token,
                keys.create("acme", Role.READ).token,
                keys.create("globex", Role.ADMIN).token,
            )
    objects.close()


@contextlib.contextmanager
def _served(folder: Path, listening: socket.socket) -> Iterator[None]:
    config = uvicorn.Config(create_app(folder), log_level="error", lifespan="on", ws="none")
    server = _Told(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    assert server.up.wait(60)
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()


class _Told(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()
