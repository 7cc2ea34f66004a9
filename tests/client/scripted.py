"""A server that answers what it is told to, in order, and loses, cuts off or withholds answers on command."""

from __future__ import annotations

import contextlib
import json
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from types import TracebackType
from typing import Any, Self

from ragfence.errors import RagfenceError
from ragfence.wire.problems import MEDIA_TYPE, problem_of, refusal
from tests.http_server import TestServer

RECEIPT: dict[str, Any] = {
    "key": "2a" + "ab" * 32,
    "doc_id": "a",
    "decision": "new",
    "effect_id": "ef_1",
    "snippet_ids": ["sn_1", "sn_2"],
    "etag": "1.7",
    "flags": {"attempt": 2, "takeover": True, "a flag of tomorrow": 1},
}


@dataclass(frozen=True)
class Asked:
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def key(self) -> str:
        return self.headers["idempotency-key"]

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.body.splitlines()]


@dataclass(frozen=True)
class Said:
    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    lost: bool = False
    """the connection is closed instead"""
    cut: int | None = None
    """only so many bytes of the body come, then the connection is closed"""
    silent: bool = False
    """nothing is said until the client gives up"""


Answer = Said | Callable[[Asked], Said]


def said(value: object, status: int = 200, **headers: str) -> Said:
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    return Said(status, json.dumps(value).encode(), {"content-type": "application/json"} | named)


def problem(error: RagfenceError | str, status: int | None = None, **headers: str) -> Said:
    found = refusal(error) if isinstance(error, str) else problem_of(error)
    answer = found.answer({name.replace("_", "-"): text for name, text in headers.items()})
    return Said(status or answer.status, answer.body, {"content-type": MEDIA_TYPE} | dict(answer.headers))


def outcomes(asked: Asked) -> Said:
    """Each line of a batch was new."""
    return ndjson([outcome(at, line["doc_id"]) for at, line in enumerate(asked.lines(), 1)])


def outcome(line: int, doc_id: str, **more: Any) -> dict[str, Any]:
    receipt = RECEIPT | {"doc_id": doc_id, "effect_id": f"ef_{doc_id}"}
    return {"line": line, "doc_id": doc_id, "status": 201, "receipt": receipt} | more


def ndjson(lines: list[dict[str, Any]], *, done: bool = True) -> Said:
    end = [{"done": True, "lines": len(lines), "new": len(lines), "duplicate": 0, "failed": 0}] if done else []
    body = "".join(json.dumps(line) + "\n" for line in [*lines, *end]).encode()
    return Said(200, body, {"content-type": "application/x-ndjson"})


class Scripted:
    """With no answers left, the last one is said again."""

    def __init__(self, *answers: Answer) -> None:
        self.asked: list[Asked] = []
        self._answers = deque(answers)
        self._lock = threading.Lock()
        self._server = _Server(_Handler)
        self._server.scripted = self

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def script(self, *answers: Answer) -> None:
        self._answers = deque(answers)

    def take(self, asked: Asked) -> Said:
        with self._lock:
            self.asked.append(asked)
            answer = self._answers[0] if len(self._answers) == 1 else self._answers.popleft()
        return answer if isinstance(answer, Said) else answer(asked)

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop()


class _Server(TestServer):
    scripted: Scripted


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # headers and body in one packet, or the client's kernel waits 40 ms with its acknowledgement
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {name.lower(): value for name, value in self.headers.items()}
        answer = self.server.scripted.take(Asked(self.command, self.path, headers, body))
        if answer.silent:
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.connection.recv(1)  # returns when the client hangs up
            return
        if answer.lost:
            self.close_connection = True
            return
        self.send_response_only(answer.status)
        for name, value in answer.headers.items():
            if name != "content-length":
                self.send_header(name, value)
        self.send_header("content-length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body if answer.cut is None else answer.body[: answer.cut])
        if answer.cut is not None:
            self.close_connection = True

    do_GET = do_PUT = do_POST = do_DELETE = _serve
