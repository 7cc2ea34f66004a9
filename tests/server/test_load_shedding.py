"""Backpressure at real sockets: too much at once, bodies too large or too slow, heads that never end, and noise."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from ragfence.server import serve as api
from ragfence.server.connections import ConnectionLimits, H11Connection, HttpToolsConnection
from ragfence.server.load_shedding import STOPPING, LoadShedding
from ragfence.server.serve import ServerOptions
from tests.servers import wait_until

KIB, MIB = 1 << 10, 1 << 20


class Site:
    """An application whose handlers wait until they may go on."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.begun = 0
        self.bodies: list[int] = []
        routes = [
            Route("/slow", self.slow, methods=["GET", "POST"]),
            Route("/take", self.take, methods=["POST"]),
            Route("/v1/documents:batch", self.take, methods=["POST"]),
            Route("/large", self.large),
            Route("/whole", self.whole),
            *(Route(path, self.fine) for path in ("/healthz", "/readyz", "/metrics", "/fine")),
        ]
        self.app = Starlette(routes=routes)

    async def slow(self, request: Request) -> Response:
        self.begun += 1
        while not self.may_go_on.is_set():
            await asyncio.sleep(0.01)
        return PlainTextResponse("done")

    async def take(self, request: Request) -> Response:
        self.bodies.append(len(await request.body()))
        return PlainTextResponse("taken")

    async def large(self, request: Request) -> Response:
        async def pieces() -> Any:
            self.begun += 1
            try:
                for _ in range(1024):
                    yield b"x" * (64 * KIB)
            finally:
                self.begun -= 1

        return StreamingResponse(pieces())

    async def whole(self, request: Request) -> Response:
        """Much more than the buffers of two sockets hold."""
        self.begun += 1
        return Response(b"x" * (16 * MIB))

    async def fine(self, request: Request) -> Response:
        return PlainTextResponse("fine")


PROTOCOLS = [H11Connection, HttpToolsConnection]


@pytest.fixture(params=PROTOCOLS, ids=lambda protocol: protocol.__name__)
def protocol(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def site() -> Site:
    return Site()


@contextmanager
def served(app: Any, protocol: Any = None, **limits: Any) -> Iterator[int]:
    """On a free port, in a thread of its own."""
    settings = replace(ServerOptions(port=0, grace_s=5), connections=ConnectionLimits(**limits))
    config = api._Config(app, settings)
    config.http = protocol or config.http
    ready = threading.Event()
    server = api._Server(config, ready.set)
    with closing(api._listen(settings)) as listening:
        port = listening.getsockname()[1]
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            assert ready.wait(30)
            yield port
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()


def connected(port: int, source: str = "127.0.0.1") -> socket.socket:
    """`source`: any address of 127/8 is this machine, and one of its own for the server."""
    return socket.create_connection(("127.0.0.1", port), timeout=30, source_address=(source, 0))


def head(method: str, path: str, *headers: str) -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: test", *headers, "", ""]).encode()


def answer(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of one answer; as many bytes as its Content-Length says."""
    seen = b""
    while b"\r\n\r\n" not in seen:
        piece = connection.recv(65536)
        assert piece, f"closed after {seen!r}"
        seen += piece
    top, _, body = seen.partition(b"\r\n\r\n")
    status, *lines = top.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    while len(body) < int(headers.get("content-length", "0")):
        piece = connection.recv(65536)
        assert piece, f"closed after {body!r}"
        body += piece
    return int(status.split()[1]), headers, body


def is_closed(connection: socket.socket) -> bool:
    """Once the other side has closed it, whatever came before."""
    try:
        while connection.recv(65536):
            pass
    except ConnectionError:
        pass
    return True


def asked(port: int, request: bytes) -> tuple[int, dict[str, str], bytes]:
    with connected(port) as connection:
        connection.sendall(request)
        return answer(connection)


def code(body: bytes) -> str:
    told: str = json.loads(body)["code"]
    return told


def test_writes_are_shed_at_the_high_watermark_and_reads_at_the_limit(site: Site) -> None:
    app = LoadShedding(site.app, max_concurrent=4, high_watermark=0.5)
    with served(app) as port, ExitStack() as stack:

        def begin(method: str) -> socket.socket:
            connection = stack.enter_context(connected(port))
            underway = site.begun
            connection.sendall(head(method, "/slow", "Content-Length: 0"))
            wait_until(lambda: site.begun > underway, "the request is under way")
            return connection

        waiting = [begin("POST"), begin("POST")]
        status, headers, body = asked(port, head("POST", "/slow", "Content-Length: 0"))
        assert (status, code(body)) == (503, "DEPENDENCY.overloaded")
        assert 1 <= int(headers["retry-after"]) <= 4
        waiting += [begin("GET"), begin("GET")]
        assert asked(port, head("GET", "/slow"))[0] == 503
        for path in ("/healthz", "/readyz", "/metrics"):
            assert asked(port, head("GET", path))[0] == 200
        assert (app.in_progress, app.shed) == (4, 2)
        site.may_go_on.set()
        assert [answer(connection)[0] for connection in waiting] == [200] * 4
        wait_until(lambda: app.in_progress == 0, "all are done")
        assert asked(port, head("POST", "/slow", "Content-Length: 0"))[0] == 200


def test_work_that_nobody_waits_for_counts_as_well(site: Site) -> None:
    left_behind = [2]
    app = LoadShedding(site.app, max_concurrent=4, high_watermark=0.5, abandoned=lambda: left_behind[0])
    with served(app) as port:
        assert asked(port, head("POST", "/take", "Content-Length: 0"))[0] == 503
        assert asked(port, head("GET", "/fine"))[0] == 200
        left_behind[0] = 1
        assert asked(port, head("POST", "/take", "Content-Length: 0"))[0] == 200


def test_what_is_shed_is_refused_before_its_body_has_come(site: Site, protocol: Any) -> None:
    app = LoadShedding(site.app, max_concurrent=1, abandoned=lambda: 1)
    with served(app, protocol) as port, connected(port) as connection:
        connection.sendall(head("POST", "/take", "Content-Length: 1000000", "Expect: 100-continue"))
        status, headers, _ = answer(connection)
        assert (status, headers["connection"]) == (503, "close")
        # A small one may be thrown away, and the connection used again: reconnecting is work, too.
    with served(app, protocol) as port, connected(port) as connection:
        for _ in range(3):
            connection.sendall(head("POST", "/take", "Content-Length: 5") + b"hello")
            assert answer(connection)[0] == 503
    assert site.bodies == []


@pytest.mark.parametrize("path", ["/take", "/v1/documents:batch"])
@pytest.mark.parametrize("form", ["length", "chunked"])
def test_a_body_above_the_limit_is_refused_and_the_client_sees_it(
    site: Site, protocol: Any, form: str, path: str
) -> None:
    app = LoadShedding(site.app, max_body_bytes=100 * KIB, max_batch_bytes=300 * KIB)
    limit = 100 * KIB if path == "/take" else 300 * KIB

    def request(size: int) -> bytes:
        if form == "length":
            return head("POST", path, f"Content-Length: {size}") + b"x" * size
        pieces = [min(10_000, size - at) for at in range(0, size, 10_000)]
        chunks = b"".join(b"%x\r\n" % piece + b"x" * piece + b"\r\n" for piece in pieces)
        return head("POST", path, "Transfer-Encoding: chunked") + chunks + b"0\r\n\r\n"

    with served(app, protocol) as port:
        assert asked(port, request(limit))[0] == 200
        # All of it is sent before anything is read, as simple clients do it.
        status, _, body = asked(port, request(limit + 1))
        assert (status, code(body)) == (413, "VALIDATION.body_too_large")
        assert f"{limit:,}" in json.loads(body)["detail"]
        assert asked(port, request(2 * MIB))[0] == 413
    assert site.bodies == [limit]


def test_a_body_that_does_not_come_is_given_up(site: Site, protocol: Any) -> None:
    app = LoadShedding(site.app, body_timeout_s=0.3)
    with served(app, protocol) as port, connected(port) as connection:
        connection.sendall(head("POST", "/take", "Content-Length: 100") + b"some")
        status, _, body = answer(connection)
        assert (status, code(body)) == (408, "VALIDATION.slow_client")
        assert asked(port, head("GET", "/fine"))[0] == 200
        assert app.in_progress == 0
    assert site.bodies == []


def test_a_body_that_drips_is_given_up_and_one_that_flows_is_not() -> None:
    """A piece every 20 ms, of a clock that nobody has to wait for."""

    async def pieces(size: int) -> int:
        sent: list[Any] = []

        async def receive() -> Any:
            await asyncio.sleep(0.02)
            return {"type": "http.request", "body": b"x" * size, "more_body": True}

        async def send(message: Any) -> None:
            sent.append(message)

        async def app(scope: Any, receive: Any, send: Any) -> None:
            for _ in range(30):
                if (await receive())["type"] == "http.disconnect":
                    return
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})

        scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"content-length", b"9")]}
        await LoadShedding(app, body_timeout_s=0.1, min_rate=10_000)(scope, receive, send)
        status: int = sent[0]["status"]
        return status

    assert asyncio.run(pieces(1)) == 408
    assert asyncio.run(pieces(1000)) == 200


def test_too_many_or_too_long_headers_are_refused(site: Site, protocol: Any) -> None:
    app = LoadShedding(site.app, max_headers=20, max_header_bytes=2000)
    with served(app, protocol) as port:
        assert asked(port, head("GET", "/fine", *(f"X-{n}: y" for n in range(15))))[0] == 200
        for request in (
            head("GET", "/fine", *(f"X-{n}: y" for n in range(25))),
            head("GET", "/fine", "X-Long: " + "y" * 2000),
            head("GET", "/fine?" + "y" * 2000),
        ):
            status, _, body = asked(port, request)
            assert (status, code(body)) == (431, "VALIDATION.headers_too_large")


def test_a_head_that_never_ends_is_given_up(site: Site, protocol: Any) -> None:
    with served(site.app, protocol, header_timeout_s=0.3) as port, connected(port) as slow, connected(port) as silent:
        slow.sendall(b"GET /fine HTTP/1.1\r\nHost: te")
        status, headers, body = answer(slow)
        assert (status, code(body), headers["connection"]) == (408, "VALIDATION.slow_client", "close")
        assert is_closed(slow)
        assert silent.recv(1) == b""


def test_a_second_head_on_the_same_connection_has_no_more_time(site: Site, protocol: Any) -> None:
    with served(site.app, protocol, header_timeout_s=0.3) as port, connected(port) as connection:
        connection.sendall(head("GET", "/fine"))
        assert answer(connection)[0] == 200
        connection.sendall(b"GET /fine HT")
        # In silence: what came now could be taken for the answer to something else.
        assert is_closed(connection)


def test_a_request_may_take_longer_than_its_head(site: Site, protocol: Any) -> None:
    with served(site.app, protocol, header_timeout_s=0.2) as port, connected(port) as connection:
        connection.sendall(head("GET", "/slow"))
        wait_until(lambda: site.begun, "the request is under way")
        threading.Timer(0.5, site.may_go_on.set).start()
        assert answer(connection)[0] == 200


def test_a_head_without_end_is_not_collected(site: Site, protocol: Any) -> None:
    with served(site.app, protocol, max_head_bytes=64 * KIB) as port, connected(port) as connection:
        connection.sendall(b"GET /fine HTTP/1.1\r\nX-Long: ")
        with pytest.raises(OSError):
            connection.sendall(b"y" * 80 * MIB)
        assert asked(port, head("GET", "/fine"))[0] == 200


def test_a_client_that_does_not_read_is_given_up(site: Site, protocol: Any) -> None:
    app = LoadShedding(site.app)
    with served(app, protocol, send_timeout_s=0.3) as port, connected(port) as connection:
        connection.sendall(head("GET", "/large"))
        wait_until(lambda: site.begun == 1, "the answer is on its way")
        wait_until(lambda: site.begun == 0 and app.in_progress == 0, "it was given up")


def test_a_client_that_reads_slowly_gets_everything(site: Site, protocol: Any) -> None:
    with served(site.app, protocol, send_timeout_s=0.2) as port, connected(port) as connection:
        connection.sendall(head("GET", "/large", "Connection: close"))
        size = 0
        while piece := connection.recv(MIB):
            size += len(piece)
            threading.Event().wait(0.005)
        assert size > 64 * MIB


def test_there_are_so_many_connections_and_no_more(site: Site, protocol: Any) -> None:
    with served(site.app, protocol, max_connections=3, address_share=3) as port, ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(connected(port)).sendall(head("GET", "/slow"))
        wait_until(lambda: site.begun == 3, "three requests are under way")
        for source in ("127.0.0.1", HOSTILE):
            status, _, body = answer(stack.enter_context(connected(port, source)))
            assert (status, code(body)) == (503, "DEPENDENCY.overloaded")
        site.may_go_on.set()


HOSTILE = "127.0.0.66"


def test_idle_connections_of_one_address_leave_room_for_others(site: Site, protocol: Any) -> None:
    with served(site.app, protocol, max_connections=20, header_timeout_s=600) as port, ExitStack() as stack:
        idle = [stack.enter_context(connected(port, HOSTILE)) for _ in range(40)]
        for _ in range(5):
            other = stack.enter_context(connected(port))
            other.sendall(head("GET", "/fine"))
            assert answer(other)[0] == 200
        # Those that were idle for longest made room for the others of their address.
        assert all(connection.recv(1) == b"" for connection in idle[:20])
        idle[-1].sendall(head("GET", "/fine"))
        assert answer(idle[-1])[0] == 200


def test_an_address_with_its_share_of_connections_in_use_gets_no_more(site: Site, protocol: Any) -> None:
    with served(site.app, protocol, max_connections=20) as port, ExitStack() as stack:
        busy = [stack.enter_context(connected(port, HOSTILE)) for _ in range(10)]
        for connection in busy:
            connection.sendall(head("GET", "/slow"))
        wait_until(lambda: site.begun == 10, "ten requests are under way")
        status, headers, body = answer(stack.enter_context(connected(port, HOSTILE)))
        assert (status, code(body)) == (503, "DEPENDENCY.overloaded")
        assert headers["connection"] == "close"
        assert int(headers["retry-after"]) >= 1
        assert asked(port, head("GET", "/fine"))[0] == 200
        # None that is in use is closed for it; and one that has ended makes room.
        site.may_go_on.set()
        assert [answer(connection)[0] for connection in busy] == [200] * 10
        busy[0].close()
        again = stack.enter_context(connected(port, HOSTILE))
        again.sendall(head("GET", "/fine"))
        assert answer(again)[0] == 200


def test_unfinished_heads_of_one_address_are_bounded_by_their_bytes(site: Site, protocol: Any) -> None:
    with served(site.app, protocol, max_held_bytes=256 * KIB) as port, ExitStack() as stack:
        patient = stack.enter_context(connected(port))
        patient.sendall(b"GET /fine HTTP/1.1\r\nHost: test\r\nX-Long: " + b"y" * 20 * KIB)
        heads = [stack.enter_context(connected(port, HOSTILE)) for _ in range(20)]
        for connection in heads:
            connection.sendall(b"GET /fine HTTP/1.1\r\nHost: test\r\nX-Long: " + b"y" * 40 * KIB)
            assert asked(port, head("GET", "/fine"))[0] == 200
        # The first to be held back were the first to go; the last one, and that of another address, were not touched.
        assert is_closed(heads[0])
        for connection in (heads[-1], patient):
            connection.sendall(b"\r\n\r\n")
            assert answer(connection)[0] == 200


def test_answers_that_one_address_does_not_read_are_bounded_by_their_bytes(site: Site, protocol: Any) -> None:
    with served(site.app, protocol, max_held_bytes=64 * MIB) as port, ExitStack() as stack:
        patient = stack.enter_context(connected(port))
        patient.sendall(head("GET", "/whole"))
        hostile = [stack.enter_context(connected(port, HOSTILE)) for _ in range(6)]
        for number, connection in enumerate(hostile, start=2):
            connection.sendall(head("GET", "/whole"))
            wait_until(lambda: site.begun == number, "the answer is made")  # noqa: B023
            assert asked(port, head("GET", "/fine"))[0] == 200
        with pytest.raises((AssertionError, ConnectionError)):
            answer(hostile[0])
        assert len(answer(hostile[-1])[2]) == 16 * MIB
        assert len(answer(patient)[2]) == 16 * MIB


NOISE: list[Callable[[random.Random], bytes]] = [
    lambda rng: rng.randbytes(rng.randint(1, 2000)),
    lambda rng: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(200),
    lambda rng: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    lambda rng: b"GET / HTTP/9.9\r\n\r\n",
    lambda rng: b"CONNECT host:1 HTTP/1.1\r\nHost: x\r\n\r\n",
    lambda rng: b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
    lambda rng: b"GET http://[::bad HTTP/1.1\r\nHost: x\r\n\r\n",
    lambda rng: b"GET /\xff\xfe%zz HTTP/1.1\r\nHost: x\r\n\r\n",
    lambda rng: b"GET / HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
    lambda rng: head("POST", "/take", "Content-Length: -1"),
    lambda rng: head("POST", "/take", "Content-Length: 5", "Content-Length: 6") + b"hello",
    lambda rng: head("POST", "/take", "Content-Length: " + "9" * 40),
    lambda rng: head("POST", "/take", "Content-Length: 4", "Transfer-Encoding: chunked") + b"0\r\n\r\n",
    lambda rng: head("POST", "/take", "Transfer-Encoding: chunked") + b"zz\r\nhello\r\n",
    lambda rng: head("POST", "/take", "Transfer-Encoding: chunked") + b"ffffffffffffffffff\r\n",
    lambda rng: head("GET", "/fine") + rng.randbytes(300),
    lambda rng: head("GET", "/fine", "X: \x00\x01"),
    lambda rng: head("GET", "/fine", "no colon at all"),
]


def test_no_bytes_break_the_server(site: Site, protocol: Any, caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(7)
    limits = {"header_timeout_s": 0.2}
    with served(LoadShedding(site.app, body_timeout_s=0.2), protocol, **limits) as port:
        for make in NOISE * 6:
            with connected(port) as connection:
                connection.sendall(make(rng))
                connection.shutdown(socket.SHUT_WR)
                is_closed(connection)
        assert asked(port, head("GET", "/fine"))[0] == 200
    told = [record.getMessage() for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]
    assert told == []


def test_a_server_that_stops_is_not_ready_and_tells_cancelled_requests_to_come_back() -> None:
    async def story() -> list[tuple[int, str]]:
        state: dict[str, Any] = {}
        told: list[tuple[int, str]] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http":
                raise asyncio.CancelledError

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = dict(message["headers"])
                told.append((message["status"], headers.get(b"retry-after", b"").decode()))

        async def receive() -> Any:
            return {"type": "http.request"}

        shedding = LoadShedding(app)
        await shedding({"type": "lifespan", "state": state}, receive, send)
        scope = {"type": "http", "method": "POST", "headers": []}
        with pytest.raises(asyncio.CancelledError):
            await shedding(scope | {"path": "/"}, receive, send)
        state[STOPPING] = True
        await shedding(scope | {"path": "/"}, receive, send)
        await shedding(scope | {"path": "/readyz"}, receive, send)
        assert shedding.in_progress == 0
        return told

    told = asyncio.run(story())
    assert [status for status, _ in told] == [503, 503]
    assert all(1 <= int(wait) <= 4 for _, wait in told)
