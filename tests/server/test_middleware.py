"""The middleware on applications of Starlette and FastAPI: the same contract, whatever the routes do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, BackgroundTasks, Depends, FastAPI
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Host, Mount, Route, Router, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocket

from ragfence import Fence, current_lease
from ragfence.errors import ValidationError
from ragfence.server import IdempotencyMiddleware
from ragfence.server.asgi import template_of
from tests.server.calls import ask, asking, post
from tests.server.conftest import OpenFence


def fenced(fence: Fence, endpoint: Any, path: str = "/do", **options: Any) -> Starlette:
    return Starlette(
        routes=[Route(path, endpoint, methods=["GET", "POST", "PUT", "PATCH", "DELETE"])],
        middleware=[Middleware(IdempotencyMiddleware, fence=fence, **options)],
    )


def counting(**counts: Any) -> tuple[list[int], Any]:
    done: list[int] = []

    async def endpoint(request: Request) -> Response:
        done.append(len(await request.body()))
        return PlainTextResponse(f"done {len(done)}", status_code=201, **counts)

    return done, endpoint


def test_one_effect_and_one_answer_for_a_key(fence: Fence) -> None:
    done, endpoint = counting()
    app = fenced(fence, endpoint)
    first, again = post(app, "/do", "k", content=b"abc"), post(app, "/do", '"k"', content=b"abc")
    assert done == [3]
    assert first.content == again.content == b"done 1"
    assert first.headers["idempotency-status"] == "stored"
    assert again.headers["idempotency-status"] == "replayed"
    assert again.headers["content-type"] == first.headers["content-type"]


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_a_write_needs_a_key(fence: Fence, method: str) -> None:
    done, endpoint = counting()
    refused = ask(fenced(fence, endpoint), method, "/do")
    problem = refused.json()
    assert (refused.status_code, problem["code"]) == (400, "VALIDATION.idempotency.key_missing")
    assert refused.headers["content-type"] == "application/problem+json"
    assert "Idempotency-Key:" in problem["hint"]
    assert done == []


def test_reads_and_other_paths_pass_through(fence: Fence) -> None:
    done, endpoint = counting()
    assert ask(fenced(fence, endpoint), "GET", "/do").status_code == 201
    assert post(fenced(fence, endpoint, paths=["/refunds*"]), "/do").status_code == 201
    assert post(fenced(fence, endpoint, exclude=["/d*"]), "/do").status_code == 201
    assert ask(fenced(fence, endpoint, methods=["POST"]), "PUT", "/do").status_code == 201
    assert len(done) == 4


def test_a_mistake_in_the_options_is_told_at_once(fence: Fence) -> None:
    with pytest.raises(ValidationError, match="needs no key"):
        IdempotencyMiddleware(lambda *_: None, fence, methods=["GET"])  # type: ignore[arg-type, return-value]
    with pytest.raises(ValidationError, match="a list of patterns"):
        IdempotencyMiddleware(lambda *_: None, fence, paths="/refunds")  # type: ignore[arg-type, return-value]


def test_sync_routes_have_the_lease_too(fence: Fence) -> None:
    app, seen = FastAPI(), []
    app.add_middleware(IdempotencyMiddleware, fence=fence)

    @app.post("/sync")
    def sync_route() -> dict[str, str]:
        seen.append(threading.current_thread().name)
        return {"key": current_lease().key}

    @app.post("/async")
    async def async_route() -> dict[str, str]:
        return {"key": current_lease().key}

    for path in ("/sync", "/async"):
        first, again = post(app, path, "k"), post(app, path, "k")
        assert first.json() == again.json()
        assert len(first.json()["key"]) == 66
    assert len(seen) == 1


def test_a_validation_error_of_the_framework_is_kept(fence: Fence) -> None:
    app = FastAPI()
    app.add_middleware(IdempotencyMiddleware, fence=fence)

    @app.post("/n")
    def route(n: int) -> int:
        return n

    first, again = post(app, "/n?n=x", "k"), post(app, "/n?n=x", "k")
    assert first.status_code == again.status_code == 422
    assert first.content == again.content
    assert again.headers["idempotency-status"] == "replayed"


def test_an_exception_gives_the_key_back(fence: Fence) -> None:
    tries = []

    async def endpoint(_: Request) -> Response:
        tries.append(1)
        if len(tries) == 1:
            raise RuntimeError("broken")
        return PlainTextResponse("fine")

    for app in (
        fenced(fence, endpoint),
        IdempotencyMiddleware(Starlette(routes=[Route("/do", endpoint, methods=["POST"])]), fence),
    ):
        tries.clear()
        key = f"k{type(app).__name__}"
        assert post(app, "/do", key).status_code == 500
        assert post(app, "/do", key).text == "fine"
        assert post(app, "/do", key).headers["idempotency-status"] == "replayed"
        assert len(tries) == 2


def test_background_tasks_run_once_and_after_the_seal(fence: Fence) -> None:
    app, ran = FastAPI(), []
    app.add_middleware(IdempotencyMiddleware, fence=fence)

    def later() -> None:
        ran.append({row["decision"] for row in fence.audit.decisions(since="1h").to_pylist() if row["sealed_at"]})

    @app.post("/do")
    def route(tasks: BackgroundTasks) -> str:
        tasks.add_task(later)
        return "done"

    for _ in range(3):
        assert post(app, "/do", "k").json() == "done"
    assert ran == [{"new"}]


def test_the_background_tasks_of_an_overtaken_attempt_do_not_run(open_fence: OpenFence) -> None:
    fence, ran = open_fence(lease={"ttl_s": 0.1, "max_runtime_s": 0.1}), []
    started, go_on = asyncio.Event(), asyncio.Event()
    app = FastAPI()
    app.add_middleware(IdempotencyMiddleware, fence=fence)

    @app.post("/do")
    async def route(tasks: BackgroundTasks) -> int:
        tasks.add_task(ran.append, attempt := current_lease().attempt)
        if attempt == 1:
            started.set()
            await go_on.wait()
        return attempt

    async def story(client: httpx.AsyncClient) -> None:
        first = asyncio.create_task(client.post("/do", headers={"Idempotency-Key": "k"}))
        await started.wait()
        while (taker := await client.post("/do", headers={"Idempotency-Key": "k"})).status_code == 202:
            await asyncio.sleep(0.05)
        go_on.set()
        assert (await first).json() == taker.json() == 2

    asking(app, story)
    assert ran == [2]


def test_an_answer_that_is_not_kept_has_background_tasks_each_time(fence: Fence) -> None:
    ran: list[int] = []

    async def endpoint(_: Request) -> Response:
        return PlainTextResponse("later", 503, background=BackgroundTask(ran.append, current_lease().attempt))

    app = fenced(fence, endpoint)
    assert [post(app, "/do", "k").status_code for _ in range(2)] == [503, 503]
    assert ran == [1, 2]


def test_a_streamed_answer_is_kept_as_a_whole(fence: Fence) -> None:
    times = []

    async def pieces() -> AsyncIterator[bytes]:
        times.append(1)
        for number in range(5):
            yield f"{number},".encode()

    async def endpoint(_: Request) -> Response:
        return StreamingResponse(pieces())

    app = fenced(fence, endpoint)
    assert post(app, "/do", "k").content == post(app, "/do", "k").content == b"0,1,2,3,4,"
    assert len(times) == 1


def test_a_stream_beyond_the_limit_is_passed_on_and_not_kept(open_fence: OpenFence) -> None:
    times = []

    async def pieces() -> AsyncIterator[bytes]:
        times.append(1)
        for _ in range(100):
            yield b"x" * 100

    async def endpoint(_: Request) -> Response:
        return StreamingResponse(pieces())

    app = fenced(open_fence(http={"max_stored_bytes": 1000}), endpoint)
    first, again = post(app, "/do", "k"), post(app, "/do", "k")
    assert len(first.content) == 10_000
    assert (again.status_code, again.json()["code"]) == (409, "PROVIDER.duplicate")
    assert len(times) == 1


@pytest.mark.parametrize("told", [True, False])
def test_a_body_beyond_the_limit_is_refused(open_fence: OpenFence, told: bool) -> None:
    done, endpoint = counting()
    app = fenced(open_fence(http={"max_body_bytes": 1000}), endpoint)

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"x" * 100

    refused = post(app, "/do", "k", content=b"x" * 10_000 if told else pieces())
    assert (refused.status_code, refused.json()["code"]) == (413, "VALIDATION.body_too_large")
    assert done == []
    assert post(app, "/do", "k", content=b"x" * 1000).status_code == 201


def test_principals_do_not_share_keys_and_credentials_are_not_stored(fence: Fence, tmp_path: Any) -> None:
    done, endpoint = counting()
    app = fenced(fence, endpoint)
    one, other = ({"Authorization": f"Bearer token-of-{who}"} for who in ("one", "other"))
    assert post(app, "/do", "k", headers=one).text == "done 1"
    assert post(app, "/do", "k", headers=other, content=b"else").text == "done 2"
    assert post(app, "/do", "k", headers=one).text == "done 1"
    everything = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert b"token-of" not in everything
    assert len(done) == 2


@pytest.mark.parametrize("is_async", [True, False])
def test_the_application_may_say_who_asks(fence: Fence, is_async: bool) -> None:
    done, endpoint = counting()

    def sync_who(connection: HTTPConnection) -> str:
        return connection.headers["x-account"]

    async def async_who(connection: HTTPConnection) -> str:
        return connection.headers["x-account"]

    app = fenced(fence, endpoint, principal=async_who if is_async else sync_who)
    for token, account in (("t1", "a"), ("t2", "a"), ("t2", "b")):
        post(app, "/do", "k", headers={"Authorization": token, "X-Account": account})
    assert len(done) == 2


def test_a_key_is_scoped_by_the_template_of_its_route(fence: Fence) -> None:
    done, endpoint = counting()
    app = fenced(fence, endpoint, "/refunds/{id}")
    assert post(app, "/refunds/1", "k").status_code == 201
    refused = post(app, "/refunds/2", "k")
    assert (refused.status_code, refused.json()["code"]) == (409, "CONFLICT.idempotency.payload_mismatch")
    assert len(done) == 1


def test_a_key_is_scoped_by_the_host_where_hosts_have_routes_of_their_own(fence: Fence) -> None:
    def of(team: str) -> Host:
        async def endpoint(_: Request) -> Response:
            return PlainTextResponse(team)

        return Host(f"{team}.example", Router([Route("/do", endpoint, methods=["POST"])]))

    app = Starlette(routes=[of("red"), of("blue")])
    app.add_middleware(IdempotencyMiddleware, fence=fence)
    told = [post(app, "/do", "k", headers={"Host": f"{team}.example"}) for team in ("red", "blue", "red")]
    assert [answer.text for answer in told] == ["red", "blue", "red"]
    assert [answer.headers["x-idempotency-status"] for answer in told] == ["MISS", "MISS", "HIT"]


def test_templates_are_found_wherever_routes_are() -> None:
    router, app, sub = APIRouter(prefix="/v1"), FastAPI(), FastAPI()

    @router.post("/x/{a}")
    def route(a: int) -> int:
        return a

    app.include_router(router, prefix="/p")
    sub.include_router(router)
    app.mount("/sub", sub)
    app.router.routes.append(Mount("/raw", routes=[Route("/y/{b}", lambda _: None, methods=["POST"])]))

    def template(path: str, host: str = "") -> str:
        headers = [(b"host", host.encode())] if host else []
        return template_of(
            {"type": "http", "method": "POST", "path": path, "headers": headers, "root_path": "", "app": app}
        )

    assert template("/p/v1/x/3") == "/p/v1/x/{a}"
    assert template("/sub/v1/x/3") == "/sub/v1/x/{a}"
    assert template("/raw/y/3") == "/raw/y/{b}"
    assert template("/nowhere") == ""
    app.router.routes.insert(0, Host("{team}.example", sub))
    app.router.routes.insert(1, Host("raw.test", PlainTextResponse("ok")))
    assert template("/v1/x/3", "Blue.example:8000") == "//blue.example/v1/x/{a}"
    assert template("/v1/x/3", "red.example") == "//red.example/v1/x/{a}"
    assert template("/v1/x/3", "raw.test") == "//raw.test/v1/x/3"
    assert template("/p/v1/x/3", "other.test") == "/p/v1/x/{a}"
    assert template_of({"type": "http", "path": "/"}) == ""


def test_a_request_in_progress_is_told_where_to_ask(fence: Fence) -> None:
    started, go_on = asyncio.Event(), asyncio.Event()

    async def endpoint(_: Request) -> Response:
        started.set()
        await go_on.wait()
        return PlainTextResponse("done")

    async def story(client: httpx.AsyncClient) -> None:
        first = asyncio.create_task(client.post("/do", headers={"Idempotency-Key": "k"}))
        await started.wait()
        twin = await client.post("/do", headers={"Idempotency-Key": "k"})
        assert twin.status_code == 202
        assert (await client.get(twin.headers["location"])).status_code == 202
        stranger = await client.get(twin.headers["location"], headers={"Authorization": "Bearer stranger"})
        assert stranger.status_code == 404
        go_on.set()
        answer = await first
        polled = await client.get(twin.headers["location"])
        assert polled.content == answer.content == b"done"

    asking(fenced(fence, endpoint), story)


def test_a_client_with_little_time_finds_the_outcome_later(fence: Fence) -> None:
    go_on, ran = asyncio.Event(), []
    app = FastAPI()
    app.add_middleware(IdempotencyMiddleware, fence=fence)

    @app.post("/do")
    async def route(tasks: BackgroundTasks) -> str:
        tasks.add_task(ran.append, 1)
        await go_on.wait()
        return "done"

    async def story(client: httpx.AsyncClient) -> None:
        key = {"Idempotency-Key": "k"}
        while (late := await client.post("/do", headers=key | {"X-Request-Timeout": "0.05"})).status_code == 504:
            pass  # the store was slower than that
        assert late.status_code == 202
        go_on.set()
        while (polled := await client.get(late.headers["location"])).status_code == 202:
            await asyncio.sleep(0.01)
        assert polled.json() == "done"
        assert (await client.post("/do", headers=key)).json() == "done"
        while not ran:
            await asyncio.sleep(0.01)

    asking(app, story)
    assert ran == [1]


def test_other_middleware_may_stand_on_either_side(fence: Fence) -> None:
    done, endpoint = counting()

    class Stamp(BaseHTTPMiddleware):
        async def dispatch(self, request: Request, call_next: Any) -> Response:
            answer: Response = await call_next(request)
            answer.headers["x-stamp"] = answer.headers.get("x-stamp", "") + "s"
            return answer

    app = Starlette(
        routes=[Route("/do", endpoint, methods=["POST"])],
        middleware=[Middleware(Stamp), Middleware(IdempotencyMiddleware, fence=fence), Middleware(Stamp)],
    )
    first, again = post(app, "/do", "k", content=b"x"), post(app, "/do", "k", content=b"x")
    assert first.headers["x-stamp"] == again.headers["x-stamp"] == "ss"
    assert done == [1]


def test_lifespan_and_websockets_pass_through(fence: Fence) -> None:
    began = []

    async def lifespan(_: Any) -> AsyncIterator[None]:
        began.append("up")
        yield
        began.append("down")

    async def echo(socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_text(await socket.receive_text())
        await socket.close()

    app = Starlette(
        routes=[WebSocketRoute("/ws", echo)],
        middleware=[Middleware(IdempotencyMiddleware, fence=fence)],
        lifespan=asynccontextmanager(lifespan),
    )
    with TestClient(app) as client, client.websocket_connect("/ws") as socket:
        socket.send_text("hello")
        assert socket.receive_text() == "hello"
    assert began == ["up", "down"]


def test_a_client_that_goes_while_it_sends_has_claimed_nothing(fence: Fence) -> None:
    done, endpoint = counting()
    sent: list[Any] = []
    messages = iter([{"type": "http.request", "body": b"a", "more_body": True}, {"type": "http.disconnect"}])

    async def receive() -> Any:
        return next(messages)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/do",
        "query_string": b"",
        "headers": [(b"idempotency-key", b"k")],
        "root_path": "",
    }
    asyncio.run(fenced(fence, endpoint)(scope, receive, send))
    assert (sent, done) == ([], [])
    assert not fence.audit.decisions(since="1h").to_pylist()


def test_an_application_without_an_answer_gives_the_key_back(fence: Fence) -> None:
    async def silent(scope: Any, receive: Any, send: Any) -> None:
        await receive()

    assert post(IdempotencyMiddleware(silent, fence), "/do", "k").status_code == 500
    _, endpoint = counting()
    assert post(fenced(fence, endpoint), "/do", "k").status_code == 201


def test_a_prefix_of_the_server_is_part_of_the_status_address(fence: Fence) -> None:
    go_on = asyncio.Event()

    async def endpoint(_: Request) -> Response:
        await go_on.wait()
        return PlainTextResponse("done")

    app = fenced(fence, endpoint, paths=["/do"])

    async def story() -> None:
        transport = httpx.ASGITransport(app=app, root_path="/api")
        async with httpx.AsyncClient(transport=transport, base_url="http://app") as client:
            headers = {"Idempotency-Key": "k", "X-Request-Timeout": "50ms"}
            while (late := await client.post("/api/do", headers=headers)).status_code == 504:
                pass  # the store was slower than that
            assert late.headers["location"].startswith("/api/idempotency-status?")
            go_on.set()
            while (polled := await client.get(late.headers["location"])).status_code == 202:
                await asyncio.sleep(0.01)
            assert polled.text == "done"

    asyncio.run(story())


def test_what_a_dependency_commits_before_the_answer_is_sealed_with_it(fence: Fence) -> None:
    app, order = FastAPI(), []
    app.add_middleware(IdempotencyMiddleware, fence=fence)

    def session() -> Iterator[str]:
        yield "session"
        order.append("committed")

    @app.post("/do")
    def route(_: str = Depends(session, scope="function")) -> str:
        order.append("performed")
        return "done"

    @app.middleware("http")
    async def outside(request: Request, call_next: Any) -> Response:
        answer: Response = await call_next(request)
        order.append("answered")
        return answer

    post(app, "/do", "k")
    assert order == ["performed", "committed", "answered"]


def test_a_conflict_shows_what_differs_unless_the_policy_says_otherwise(open_fence: OpenFence) -> None:
    async def echo(request: Request) -> Response:
        return PlainTextResponse("done")

    for policy, shown in (({}, True), ({"include_diff": False}, False)):
        app = fenced(open_fence(tenant=f"diff-{shown}".lower(), on_conflict=policy), echo)
        assert post(app, "/do", "k", json={"amount": 1, "password": "hunter2"}).status_code == 200
        conflict = post(app, "/do", "k", json={"amount": 2, "password": "hunter3"})
        assert conflict.status_code == 409
        patch = [{"op": "replace", "path": "/amount", "value": 2}] if shown else None
        assert conflict.json().get("diff") == patch


def test_an_unhandled_500_carries_the_idempotency_headers(fence: Fence) -> None:
    async def fails(request: Request) -> Response:
        raise RuntimeError("secret detail")

    refused = post(fenced(fence, fails), "/do", "k")
    assert refused.status_code == 500
    assert refused.headers["x-idempotency-key"] == "k"
    assert refused.headers["x-idempotency-status"] == "MISS"
    assert refused.json()["code"] == "TRANSIENT.unexpected"
    assert "secret" not in refused.text


def test_an_application_answers_its_errors_itself(fence: Fence) -> None:
    async def fails(request: Request) -> Response:
        raise RuntimeError

    async def handler(request: Request, error: Exception) -> Response:
        return PlainTextResponse("our own", 500)

    app = fenced(fence, fails)
    app.add_exception_handler(Exception, handler)
    assert post(app, "/do", "k").text == "our own"
