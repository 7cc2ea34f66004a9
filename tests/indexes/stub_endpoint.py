"""An OpenAI-compatible /embeddings server that answers as told.

    with StubEndpoint(dimension=4) as endpoint:
        endpoint.script(Reply(429, headers={"Retry-After": "1"}), Reply.hang())    # the next two requests
        EndpointEmbedder(endpoint.url, "stub").embed(["a", "b"])                   # then vectors of `vector_of`

`requests` has every request in the order of arrival.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import struct
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from types import TracebackType
from typing import Any, Self

from tests.http_server import TestServer

Answer = dict[str, Any]


def vector_of(text: str, dimension: int) -> list[float]:
    bits = hashlib.shake_128(text.encode()).digest(4 * dimension)
    return [value / 2**32 for value in struct.unpack(f">{dimension}I", bits)]


@dataclass(frozen=True, slots=True)
class Reply:
    """What one request gets: an answer of its own, the right answer with a change, or none."""

    status: int = 200
    body: bytes | None = None  # None: vectors
    headers: Mapping[str, str] = field(default_factory=dict)
    change: Callable[[Answer], None] = lambda answer: None
    silent: bool = False
    drop: bool = False

    @staticmethod
    def hang() -> Reply:
        return Reply(silent=True)

    @staticmethod
    def hang_up() -> Reply:
        return Reply(drop=True)

    @staticmethod
    def error(status: int, message: str = "", **headers: str) -> Reply:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return Reply(status, json.dumps({"error": {"message": message}}).encode(), named)


@dataclass(frozen=True, slots=True)
class Request:
    path: str
    headers: Mapping[str, str]  # lower-case names
    body: Any


class StubEndpoint:
    def __init__(self, *, dimension: int = 4, model: str = "stub") -> None:
        self.dimension = dimension
        self.model = model
        self.requests: list[Request] = []
        self.most_at_once = 0
        self.gate: threading.Barrier | None = None  # answers wait here for each other
        self._now = 0
        self._script: deque[Reply] = deque()
        self._lock = threading.Lock()
        self._server = _Server(_Handler)
        self._server.endpoint = self

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    @property
    def texts(self) -> list[list[str]]:
        """Of each request."""
        return [request.body["input"] for request in self.requests]

    def script(self, *replies: Reply) -> None:
        self._script.extend(replies)

    def take(self, request: Request) -> Reply:
        with self._lock:
            self.requests.append(request)
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
            reply = self._script.popleft() if self._script else Reply()
        if self.gate is not None:
            self.gate.wait(30)
        return reply

    def leave(self) -> None:
        with self._lock:
            self._now -= 1

    def answer(self, body: Any) -> Answer:
        vectors = [vector_of(text, self.dimension) for text in body["input"]]
        data = [{"object": "embedding", "index": at, "embedding": vector} for at, vector in enumerate(vectors)]
        return {"object": "list", "model": self.model, "data": data}

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop()


class _Server(TestServer):
    endpoint: StubEndpoint


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        headers = {name.lower(): value for name, value in self.headers.items()}
        endpoint = self.server.endpoint
        reply = endpoint.take(Request(self.path, headers, body))
        endpoint.leave()  # before the client knows: it may send its next request at once
        self._say(reply, body)

    def _say(self, reply: Reply, body: Any) -> None:
        if reply.silent or reply.drop:
            self.close_connection = True
            if reply.silent:
                with contextlib.suppress(OSError):
                    self.connection.recv(1)  # until the client gives up, or the server ends
            return
        said = reply.body
        if said is None:
            answer = self.server.endpoint.answer(body)
            reply.change(answer)
            said = json.dumps(answer).encode()
        self.send_response_only(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)
