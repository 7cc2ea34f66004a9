"""A server process with keys for two tenants, and what one of them does to the other, over raw sockets."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ragfence._open import open_objects_of
from ragfence.server.apikeys import ApiKeys
from ragfence.server.scopes import Role

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class ServerProcess:
    port: int
    pid: int
    mallory: str
    acme: str

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def ask(self, method: str, path: str, token: str, body: Any = None, key: str = "k", *headers: str) -> Reply:
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        with contextlib.closing(self.connect()) as connection:
            connection.sendall(head(method, path, token, *headers, key=key, length=len(data)) + data)
            return read_reply(connection, method=method)


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


def head(method: str, path: str, token: str, *headers: str, key: str = "k", length: int | None = None) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: test", *headers]
    if token:
        lines.append(f"Authorization: Bearer {token}")
    if method not in ("GET", "HEAD", "OPTIONS"):
        lines += [f"Idempotency-Key: {key}", "Content-Type: application/json", f"Content-Length: {length or 0}"]
    return "\r\n".join([*lines, "", ""]).encode()


def read_reply(connection: socket.socket, *, method: str = "GET") -> Reply:
    seen = b""
    while b"\r\n\r\n" not in seen:
        piece = connection.recv(65536)
        assert piece, f"closed after {seen!r}"
        seen += piece
    top, _, body = seen.partition(b"\r\n\r\n")
    first, *lines = top.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    length = 0 if method == "HEAD" else int(headers.get("content-length", "0"))
    while len(body) < length:
        piece = connection.recv(65536)
        assert piece, f"closed after {len(body)} of {length} bytes"
        body += piece
    return Reply(int(first.split()[1]), headers, body)


@contextmanager
def server_process(folder: Path, policy: Any = None, *options: str) -> Iterator[ServerProcess]:
    """`ragfence serve` on SQLite and a folder."""
    store, objects = folder / "fence", folder / "objects"
    rules = folder / "policy.yml"
    rules.write_text(yaml.safe_dump(policy or {}))
    shared = open_objects_of(store, objects)
    assert shared is not None
    keys = ApiKeys(shared)
    tokens = [keys.create(tenant, Role.ADMIN).token for tenant in ("mallory", "acme")]
    shared.close()
    command = [sys.executable, "-m", "ragfence", "serve", "--json", "--port", "0", "--shutdown-grace", "1"]
    command += ["--store", str(store), "--objects", str(objects), "--policy", str(rules), *options]
    process = subprocess.Popen(
        command, cwd=ROOT, env=os.environ | {"RAGFENCE_OBSERVE": ""}, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "the server did not start"
        yield ServerProcess(json.loads(line)["port"], process.pid, *tokens)
    finally:
        process.kill()
        process.communicate()


@contextmanager
def slow_bodies(server: ServerProcess, count: int, *, length: int = 1000, run: str = "") -> Iterator[list[Any]]:
    """`count` writes of one key, each with one byte of its body sent and the rest held back."""
    with contextlib.ExitStack() as stack:
        connections = []
        for number in range(count):
            connection = stack.enter_context(contextlib.closing(server.connect()))
            connection.sendall(head("POST", "/v1/documents", server.mallory, key=f"slow{run}-{number}", length=length))
            connection.sendall(b"{")
            connections.append(connection)
        yield connections


def huge_refused_body(size: int = 4 << 20) -> bytes:
    """As many unknown fields as fit: each is a mistake of its own."""
    fields = []
    left = size - 20
    number = 0
    while left > 16:
        fields.append(f'"x{number:07d}":0')
        left -= 13
        number += 1
    return ("{" + ",".join(fields) + "}").encode()
