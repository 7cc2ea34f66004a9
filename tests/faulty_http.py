"""A reverse proxy in front of an S3 server, that misbehaves on command.

    with FaultyProxy(server.url) as proxy:
        proxy.script(Fault.drop_reply(), Fault.answer(503), method="PUT")     # the next two PUTs
        proxy.script(Fault.hang(), path="*/sealed/*")                          # queues are per script
        proxy.chaos({Fault.answer(500): 0.1, Fault.drop_reply(): 0.1}, seed=1)   # everything else, at random
        client = boto3.client("s3", endpoint_url=proxy.url, ...)

Headers are forwarded as they came, Host included, so that what the client signed is what the server checks.
`log` has every request in the order of arrival, `counts` what was done to them.
"""

from __future__ import annotations

import contextlib
import http.client
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from http.server import BaseHTTPRequestHandler
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote, urlsplit

from tests.http_server import TestServer

CODES = {
    404: "NoSuchKey",
    409: "ConditionalRequestConflict",
    412: "PreconditionFailed",
    500: "InternalError",
    503: "SlowDown",
}


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to one request: whether the server sees it, and what the client gets to hear."""

    name: str
    forward: bool = True
    delay_s: float = 0.0
    status: int | None = None  # said instead of what the server said
    drop: bool = False  # the connection is closed instead of an answer
    cut: bool = False  # ... in the middle of the answer's body
    silent: bool = False  # nothing is said, and the connection stays open

    @staticmethod
    def none() -> Fault:
        return Fault("none")

    @staticmethod
    def answer(status: int) -> Fault:
        """The server never sees the request."""
        return Fault(f"answer {status}", forward=False, status=status)

    @staticmethod
    def act_then_answer(status: int) -> Fault:
        """The server acts, and something on the way back says otherwise."""
        return Fault(f"act, then {status}", status=status)

    @staticmethod
    def drop_request() -> Fault:
        return Fault("drop request", forward=False, drop=True)

    @staticmethod
    def drop_reply() -> Fault:
        """The server acts, its reply is lost."""
        return Fault("drop reply", drop=True)

    @staticmethod
    def cut_reply() -> Fault:
        """The server acts, half of its reply's body is lost."""
        return Fault("cut reply", cut=True)

    @staticmethod
    def delay(seconds: float) -> Fault:
        return Fault("delay", delay_s=seconds)

    @staticmethod
    def hang(*, forward: bool = False) -> Fault:
        """No answer ever; the client's timeout decides."""
        return Fault("act, then hang" if forward else "hang", forward=forward, silent=True)


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str  # decoded, without the query
    headers: Mapping[str, str]  # lower-case names
    fault: Fault


class FaultyProxy:
    def __init__(self, upstream: str) -> None:
        parts = urlsplit(upstream)
        assert parts.hostname is not None
        assert parts.port is not None
        self.upstream = (parts.hostname, parts.port)
        self.log: list[Request] = []
        self.counts: Counter[str] = Counter()
        self._decide: Callable[[str, str], Fault] = lambda method, path: Fault.none()
        self._scripts: list[tuple[str, str, deque[Fault]]] = []
        self._lock = threading.Lock()
        self._server = _Server(_Handler)
        self._server.proxy = self

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def script(self, *faults: Fault, method: str = "*", path: str = "*") -> None:
        """The next requests that fit get these faults, one each; then they pass. Earlier scripts go first."""
        with self._lock:
            self._scripts.append((method, path, deque(faults)))

    def decide(self, choose: Callable[[str, str], Fault]) -> None:
        """`choose(method, path)` says what happens to all requests that no script wants."""
        self._decide = choose

    def chaos(self, odds: Mapping[Fault, float], *, seed: int) -> None:
        """A fault with its probability for each request that no script wants; repeatable, given their order."""
        dice = random.Random(seed)
        faults = [*odds, Fault.none()]
        weights = [*odds.values(), 1.0 - sum(odds.values())]
        self.decide(lambda method, path: dice.choices(faults, weights)[0])

    def heal(self) -> None:
        with self._lock:
            self._scripts.clear()
        self.decide(lambda method, path: Fault.none())

    def requests(self, method: str) -> list[Request]:
        return [request for request in self.log if request.method == method]

    def take(self, method: str, target: str, headers: Mapping[str, str]) -> Fault:
        path = unquote(urlsplit(target).path)
        with self._lock:
            fault = self._scripted(method, path) or self._decide(method, path)
            self.log.append(Request(method, path, headers, fault))
            self.counts[fault.name] += 1
        return fault

    def _scripted(self, method: str, path: str) -> Fault | None:
        for wanted_method, wanted_path, faults in self._scripts:
            if faults and fnmatchcase(method, wanted_method) and fnmatchcase(path, wanted_path):
                return faults.popleft()
        return None

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop()


class _Server(TestServer):
    proxy: FaultyProxy


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {name.lower(): value for name, value in self.headers.items()}
        fault = self.server.proxy.take(self.command, self.path, headers)
        if fault.delay_s:
            time.sleep(fault.delay_s)
        answered = self._forward(body) if fault.forward else None
        if fault.silent:
            self._wait_until_the_client_gives_up()
        elif fault.drop:
            self.close_connection = True
        elif fault.status is not None:
            self._say(fault.status)
        else:
            assert answered is not None
            self._pass_on(*answered, cut=fault.cut)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve

    def _forward(self, body: bytes) -> tuple[http.client.HTTPResponse, bytes]:
        upstream = http.client.HTTPConnection(*self.server.proxy.upstream, timeout=60)
        with contextlib.closing(upstream):
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in ("expect", "connection"):  # both are between neighbours, and not signed
                    upstream.putheader(name, value)
            upstream.endheaders(body)
            response = upstream.getresponse()
            return response, response.read()

    def _pass_on(self, response: http.client.HTTPResponse, body: bytes, *, cut: bool) -> None:
        self.send_response_only(response.status, response.reason)
        for name, value in response.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(name, value)
        length = response.getheader("Content-Length") if self.command == "HEAD" else str(len(body))
        if length is not None and response.status not in (204, 304):
            self.send_header("Content-Length", length)
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self.close_connection = True

    def _say(self, status: int) -> None:
        body = f"<?xml version='1.0'?><Error><Code>{CODES.get(status, 'Injected')}</Code></Error>".encode()
        self.send_response_only(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _wait_until_the_client_gives_up(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.recv(1)  # returns when the client, or the end of the proxy, closes the connection
