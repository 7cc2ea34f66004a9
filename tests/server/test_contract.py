"""The contract without a framework."""

from __future__ import annotations

import asyncio
import json
import threading
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import pytest

from ragfence import Fence
from ragfence.errors import StoreUnavailable, TerminalError, ValidationError
from ragfence.server import Answer, Call, Contract
from tests.server.conftest import OpenFence


def call(key: str = "k1", body: Any = None, *, raw: bytes | None = None, **more: Any) -> Call:
    headers = (("idempotency-key", key), ("content-type", "application/json"), *more.pop("headers", ()))
    given = raw if raw is not None else json.dumps({"amount": 1} if body is None else body).encode()
    return Call("POST", more.pop("path", "/refunds"), headers=headers, body=given, **more)


class Handler:
    """Counts what it does; answers what it is told to."""

    def __init__(self, status: int = 201, body: bytes = b'{"id":"rf_1"}', headers: Any = (), error: Any = None) -> None:
        self.times = 0
        self.answer = Answer(status, (("content-type", "application/json"), *headers), body)
        self.error = error

    async def __call__(self) -> Answer:
        self.times += 1
        if self.error is not None:
            raise self.error
        return self.answer


def answers(contract: Contract, handler: Any, *calls: Call, principal: str = "me") -> list[Answer]:
    async def one_after_the_other() -> list[Answer]:
        return [await contract.answer(each, principal, handler) for each in calls]

    return asyncio.run(one_after_the_other())


def test_a_replay_is_the_same_answer_byte_for_byte(fence: Fence) -> None:
    handler = Handler(body='{ "id":  "rf_1", "name": "Zoë" }'.encode())
    first, again = answers(Contract(fence), handler, call(), call())
    assert handler.times == 1
    assert (first.status, first.body) == (again.status, again.body) == (201, handler.answer.body)
    assert (first.header("idempotency-status"), again.header("idempotency-status")) == ("stored", "replayed")
    assert (first.header("x-idempotency-status"), again.header("x-idempotency-status")) == ("MISS", "HIT")
    assert first.header("x-idempotency-key") == again.header("x-idempotency-key") == "k1"
    assert first.header("content-length") == again.header("content-length") == str(len(first.body))


def test_the_lifetime_of_a_key_is_announced_and_stays_the_same(fence: Fence) -> None:
    first, again = answers(Contract(fence), Handler(), call(), call())
    assert first.header("idempotency-expires") == again.header("idempotency-expires")
    left = parsedate_to_datetime(first.header("idempotency-expires")) - datetime.now(UTC)
    assert 47.9 < left.total_seconds() / 3600 <= 48


@pytest.mark.parametrize("body", [b"", b"\xff\x00\x80", b"plain", "Zoë\r\n\u2028".encode()])
def test_any_bytes_come_back(fence: Fence, body: bytes) -> None:
    first, again = answers(Contract(fence), Handler(200, body), call(), call())
    assert first.body == again.body == body


def test_no_content_comes_back_without_a_length(fence: Fence) -> None:
    first, again = answers(Contract(fence), Handler(204, b""), call(), call())
    assert first.status == again.status == 204
    assert again.header("content-length") == ""


def test_json_is_compared_by_its_meaning(fence: Fence) -> None:
    handler = Handler()
    calls = [call(raw=text) for text in (b'{"a":1,"b":[2]}', b'{ "b": [2.0],\n"a": 1 }')]
    _, again = answers(Contract(fence), handler, *calls)
    assert again.header("idempotency-status") == "replayed"
    assert handler.times == 1


@pytest.mark.parametrize(
    "other",
    [
        call(body={"amount": 2}),
        call(query="dry_run=1"),
        call(path="/refunds/2", route="/refunds"),
        Call("POST", "/refunds", headers=(("idempotency-key", "k1"),), body=b'{"amount": 1}'),
    ],
)
def test_another_request_under_the_same_key_is_a_conflict(fence: Fence, other: Call) -> None:
    handler = Handler()
    first, refused, again = answers(Contract(fence), handler, call(), other, call())
    assert handler.times == 1
    assert refused.status == 409
    assert refused.header("x-idempotency-status") == "CONFLICT"
    assert json.loads(refused.body)["code"] == "CONFLICT.idempotency.payload_mismatch"
    assert again.body == first.body


def test_a_conflict_shows_what_differs_in_the_body(fence: Fence) -> None:
    _, refused = answers(Contract(fence), Handler(), call(), call(body={"amount": 2}))
    problem = json.loads(refused.body)
    assert problem["diff"] == [{"op": "replace", "path": "/amount", "value": 2}]
    assert problem["differs"] == ["body"]
    assert problem["key"] == "k1"


def test_a_conflict_never_shows_a_secret(fence: Fence) -> None:
    first, other = call(body={"password": "hunter2", "a": 1}), call(body={"password": "correct horse", "a": 2})
    _, refused, secret_only = answers(Contract(fence), Handler(), first, other, call(body={"password": "x", "a": 1}))
    for answer in (refused, secret_only):
        assert answer.status == 409
        assert b"hunter2" not in answer.body
        assert b"horse" not in answer.body
    assert json.loads(refused.body)["diff"] == [{"op": "replace", "path": "/a", "value": 2}]
    assert json.loads(secret_only.body)["diff"] == []


def test_the_policy_may_choose_422_and_no_diff(open_fence: OpenFence) -> None:
    fence = open_fence(on_conflict={"status": 422, "include_diff": False})
    _, refused = answers(Contract(fence), Handler(), call(), call(body={"amount": 2}))
    assert refused.status == 422
    problem = json.loads(refused.body)
    assert problem["status"] == 422
    assert "diff" not in problem


def test_keys_of_other_people_routes_methods_and_tenants_are_other_keys(open_fence: OpenFence) -> None:
    handler = Handler()
    here, there = Contract(open_fence()), Contract(open_fence(tenant="other"))
    answers(here, handler, call(), principal="me")
    answers(here, handler, call(body={"amount": 2}), principal="you")
    answers(here, handler, call(route="/payments"), principal="me")
    answers(there, handler, call(body={"amount": 3}), principal="me")
    assert handler.times == 4


@pytest.mark.parametrize("status", [200, 201, 204, 303, 400, 404, 410, 413, 422])
def test_a_deterministic_answer_is_kept(fence: Fence, status: int) -> None:
    handler = Handler(status)
    _, again = answers(Contract(fence), handler, call(), call())
    assert (handler.times, again.status) == (1, status)
    assert again.header("idempotency-status") == "replayed"


@pytest.mark.parametrize("status", [401, 403, 408, 409, 412, 425, 429, 500, 502, 503])
def test_an_answer_that_may_change_gives_the_key_back(fence: Fence, status: int) -> None:
    handler = Handler(status)
    first, again = answers(Contract(fence), handler, call(), call())
    assert (handler.times, first.status, again.status) == (2, status, status)
    assert again.header("idempotency-status") == ""
    assert again.header("x-idempotency-status") == "MISS"


def test_many_answers_of_429_do_not_quarantine_a_key(fence: Fence) -> None:
    handler = Handler(429)
    answers(Contract(fence), handler, *[call()] * 12)
    (last,) = answers(Contract(fence), Handler(201), call())
    assert (handler.times, last.status) == (12, 201)


def test_headers_of_a_person_or_a_moment_are_not_replayed(fence: Fence) -> None:
    fleeting = [
        ("set-cookie", "session=secret"),
        ("www-authenticate", "Basic"),
        ("date", "now"),
        ("server", "x"),
        ("connection", "x-hop"),
        ("x-hop", "1"),
    ]
    handler = Handler(headers=(*fleeting, ("location", "/refunds/rf_1"), ("link", "a"), ("link", "b")))
    first, again = answers(Contract(fence), handler, call(), call())
    assert set(fleeting) <= set(first.headers)
    assert not {name for name, _ in fleeting} & {name for name, _ in again.headers}
    assert again.header("location") == "/refunds/rf_1"
    assert [value for name, value in again.headers if name == "link"] == ["a", "b"]
    assert "secret" not in str(fence.audit.decisions(since="1h").to_pylist())


def test_an_exception_gives_the_key_back_and_is_raised(fence: Fence) -> None:
    contract = Contract(fence)
    for error in (RuntimeError("gateway"), StoreUnavailable("inner"), ValidationError("inner")):
        with pytest.raises(type(error)) as raised:
            answers(contract, Handler(error=error), call())
        assert raised.value is error
    (answer,) = answers(contract, Handler(), call())
    assert answer.header("idempotency-status") == "stored"


def test_how_long_to_wait_is_a_part_of_an_answer(fence: Fence) -> None:
    first, again = answers(Contract(fence), Handler(202, headers=(("retry-after", "7"),)), call(), call())
    assert (first.header("retry-after"), again.header("retry-after")) == ("7", "7")


def test_a_terminal_error_is_an_outcome_and_its_secrets_are_not_kept(fence: Fence) -> None:
    class CardRefused(TerminalError):
        code = "CARD.refused"

    refused = CardRefused(
        "the card 4111 1111 1111 1111 was refused, token=abc",
        hint="instead of 4111 1111 1111 1111, another card; password=abc",
        report={"password": "abc", "card": 4111111111111111, "cause": ValueError("password=abc")},
        current=7,
    )
    handler = Handler(error=refused)
    first, again = answers(Contract(fence), handler, call(), call())
    assert handler.times == 1
    assert (first.status, first.body) == (again.status, again.body)
    told = json.loads(first.body)
    assert (told["code"], told["current"], told["report"]["password"]) == ("CARD.refused", 7, "[redacted]")
    assert b"4111" not in first.body
    assert b"abc" not in first.body


@pytest.mark.parametrize(
    "limits", [{"http": {"max_stored_bytes": 1000}}, {"results": {"max_bytes": 1000, "inline_max_bytes": 100}}]
)
def test_an_answer_that_is_too_long_is_given_once_and_never_performed_again(open_fence: OpenFence, limits: Any) -> None:
    handler = Handler(201, b"x" * 5000, headers=(("location", "/refunds/rf_1"),))
    first, again = answers(Contract(open_fence(**limits)), handler, call(), call())
    assert handler.times == 1
    assert (first.status, len(first.body)) == (201, 5000)
    problem = json.loads(again.body)
    assert (again.status, problem["code"], problem["original_status"]) == (409, "PROVIDER.duplicate", 201)
    assert again.header("location") == "/refunds/rf_1"
    assert again.header("idempotency-status") == "replayed"


def test_a_key_may_be_optional(open_fence: OpenFence) -> None:
    contract, handler = Contract(open_fence(require_headers=[])), Handler()
    without = Call("POST", "/refunds", body=b"x")
    answers(contract, handler, without, without, call(), call())
    assert handler.times == 3


class Slow:
    def __init__(self) -> None:
        self.started, self.go_on, self.times = asyncio.Event(), asyncio.Event(), 0

    async def __call__(self) -> Answer:
        self.times += 1
        self.started.set()
        await self.go_on.wait()
        return Answer(201, (), b"done")


@pytest.mark.parametrize("in_progress", [202, 409])
def test_who_comes_while_it_is_performed_is_told_so(open_fence: OpenFence, in_progress: int) -> None:
    contract = Contract(open_fence(http={"in_progress": in_progress}), status_path="/status")

    async def story() -> None:
        slow = Slow()
        first = asyncio.create_task(contract.answer(call(), "me", slow))
        await slow.started.wait()
        twin = await contract.answer(call(), "me", slow)
        other = await contract.answer(call(body={"amount": 2}), "me", slow)
        assert twin.status == in_progress
        assert twin.header("retry-after") == "1"
        assert twin.header("x-idempotency-status") == "IN_PROGRESS"
        assert other.status == 409
        if in_progress == 202:
            path, _, query = twin.header("location").partition("?")
            assert path == "/status"
            assert json.loads(twin.body)["status_url"] == twin.header("location")
            assert (await contract.status(query, "me")).status == 202
            assert (await contract.status(query, "you")).status == 404
            slow.go_on.set()
            done = await first
            polled = await contract.status(query, "me")
            assert (polled.status, polled.body) == (done.status, done.body)
            assert (await contract.status(query, "you")).status == 404
        else:
            problem = json.loads(twin.body)
            assert (problem["code"], problem["retryable"]) == ("IN_FLIGHT", True)
            slow.go_on.set()
            await first
        assert slow.times == 1

    asyncio.run(story())


def test_a_twin_may_wait_for_the_first(open_fence: OpenFence) -> None:
    contract = Contract(open_fence(http={"wait_s": 30}))

    async def story() -> None:
        slow = Slow()
        twins = [asyncio.create_task(contract.answer(call(), "me", slow)) for _ in range(5)]
        await slow.started.wait()
        slow.go_on.set()
        answered = await asyncio.gather(*twins)
        assert {(each.status, each.body) for each in answered} == {(201, b"done")}
        assert slow.times == 1

    asyncio.run(story())


@pytest.mark.parametrize(("in_progress", "status"), [(202, 202), (409, 504)])
def test_a_budget_ends_the_waiting_and_not_the_work(open_fence: OpenFence, in_progress: int, status: int) -> None:
    contract = Contract(open_fence(http={"in_progress": in_progress}))

    async def story() -> None:
        slow = Slow()
        hasty = call(headers=(("x-request-timeout", "50ms"),))
        late = await contract.answer(hasty, "me", slow)
        assert late.status in (504, status)  # 504, too, if the store was slower than that
        await slow.started.wait()
        assert late.header("retry-after") == "1"
        slow.go_on.set()
        await contract.finish()
        replay = await contract.answer(call(), "me", slow)
        assert (replay.status, replay.body, slow.times) == (201, b"done", 1)

    asyncio.run(story())


def test_who_is_out_of_time_before_the_claim_is_decided_is_not_told_202(
    fence: Fence, monkeypatch: pytest.MonkeyPatch
) -> None:
    contract, handler, may_claim = Contract(fence), Handler(), threading.Event()
    claim = fence.inspector.fences.claim

    def slow_store(claims: Any) -> Any:
        may_claim.wait()
        return claim(claims)

    monkeypatch.setattr(fence.inspector.fences, "claim", slow_store)

    async def story() -> None:
        late = await contract.answer(call(headers=(("x-request-timeout", "20ms"),)), "me", handler)
        may_claim.set()
        assert (late.status, json.loads(late.body)["code"]) == (504, "DEPENDENCY.timeout")
        await contract.finish()
        assert (await contract.answer(call(), "me", handler)).header("idempotency-status") == "replayed"

    asyncio.run(story())
    assert handler.times == 1


def test_a_client_that_goes_away_ends_nothing(fence: Fence) -> None:
    contract = Contract(fence)

    async def story() -> None:
        slow = Slow()
        first = asyncio.create_task(contract.answer(call(), "me", slow))
        await slow.started.wait()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        slow.go_on.set()
        await contract.finish()
        replay = await contract.answer(call(), "me", slow)
        assert (replay.status, replay.body, slow.times) == (201, b"done", 1)

    asyncio.run(story())


def test_a_server_that_ends_gives_the_key_back(fence: Fence) -> None:
    contract = Contract(fence)

    async def cut_off() -> None:
        slow = Slow()
        task = asyncio.create_task(contract.answer(call(), "me", slow))
        await slow.started.wait()
        task.cancel()

    asyncio.run(cut_off())
    handler = Handler()
    (answer,) = answers(Contract(fence), handler, call())
    assert (answer.status, handler.times) == (201, 1)


def test_an_attempt_that_was_overtaken_answers_with_the_winner(open_fence: OpenFence) -> None:
    """Its lease runs out while it is frozen: one answer is kept, and both get that one."""
    fence = open_fence(lease={"ttl_s": 0.1, "max_runtime_s": 0.1})
    contract = Contract(fence)

    async def story() -> None:
        slow, settled = Slow(), []
        first = asyncio.create_task(contract.answer(call(), "me", slow, settled.append))
        await slow.started.wait()
        while (taker := await contract.answer(call(), "me", Handler(201, b"by the taker"))).status == 202:
            await asyncio.sleep(0.05)
        slow.go_on.set()
        overtaken = await first
        assert overtaken.body == taker.body == b"by the taker"
        assert overtaken.header("idempotency-status") == "replayed"
        assert settled == [False]

    asyncio.run(story())


def test_a_store_that_is_away_is_told_as_503(fence: Fence, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: Any) -> Any:
        raise StoreUnavailable("the store did not answer")

    handler = Handler()
    monkeypatch.setattr(fence.inspector.fences, "claim", away)
    (answer,) = answers(Contract(fence), handler, call())
    problem = json.loads(answer.body)
    assert (answer.status, problem["code"], problem["retryable"]) == (503, "DEPENDENCY.unavailable", True)
    assert answer.header("retry-after") == "1"
    assert handler.times == 0


def test_a_row_tells_the_route_and_whose_request_it_was(fence: Fence) -> None:
    answers(Contract(fence), Handler(), call(route="/refunds/{id}", headers=(("x-correlation-id", "trace-7"),)))
    rows = fence.audit.decisions(since="1h").to_pylist()
    assert {(row["kind"], row["source_id"], row["source_type"]) for row in rows} == {("http", "k1", "me")}
    assert {(row["route"], row["correlation_id"]) for row in rows} == {("POST /refunds/{id}", "trace-7")}


@pytest.mark.parametrize(
    "query", ["", "key=a", "key=a&method=POST", "%FF=%00&&&", "key=%00&method=POST&route=/x", "&" * 50]
)
def test_an_address_that_no_202_told_is_refused(fence: Fence, query: str) -> None:
    assert asyncio.run(Contract(fence).status(query, "me")).status in (400, 404)


def test_a_route_that_is_long_or_strange_is_scoped_by_its_digest(fence: Fence) -> None:
    handler = Handler()
    for route in ("/" + "x" * 3000, "/zo\u00eb\x00\ud800"):
        first, again = answers(Contract(fence), handler, call(path=route, raw=b""), call(path=route, raw=b""))
        assert (first.status, again.header("idempotency-status")) == (201, "replayed")
    assert handler.times == 2


def test_a_seal_that_cannot_be_written_is_told_and_found_by_the_retry(
    open_fence: OpenFence, monkeypatch: pytest.MonkeyPatch
) -> None:
    fence = open_fence(lease={"ttl_s": 0.1, "seal_retry_s": 0}, http={"wait_s": 30})
    contract, handler = Contract(fence), Handler()

    def away(*_: Any) -> Any:
        raise StoreUnavailable("the store did not answer")

    with monkeypatch.context() as patch:
        patch.setattr(fence.inspector.fences, "seal", away)
        (unsure,) = answers(contract, handler, call())
    problem = json.loads(unsure.body)
    assert (unsure.status, problem["code"], problem["retryable"]) == (503, "LEASE.seal_uncertain", True)
    (again,) = answers(contract, handler, call())
    assert (again.status, again.body, again.header("idempotency-status")) == (201, b'{"id":"rf_1"}', "replayed")
    assert handler.times == 1


def test_a_client_that_goes_away_before_the_claim_is_decided_has_claimed_nothing(
    fence: Fence, monkeypatch: pytest.MonkeyPatch
) -> None:
    contract, handler, asked, may_claim = Contract(fence), Handler(), threading.Event(), threading.Event()
    fence.hydrate()
    claim = fence.inspector.fences.claim

    def slow_store(claims: Any) -> Any:
        asked.set()
        may_claim.wait()
        return claim(claims)

    async def story() -> None:
        gone = asyncio.create_task(contract.answer(call(), "me", handler))
        await asyncio.to_thread(asked.wait)
        gone.cancel()
        may_claim.set()
        with pytest.raises(asyncio.CancelledError):
            await gone

    with monkeypatch.context() as patch:
        patch.setattr(fence.inspector.fences, "claim", slow_store)
        asyncio.run(story())
    assert handler.times == 0
    (answer,) = answers(contract, handler, call())
    assert (answer.status, answer.header("idempotency-status"), handler.times) == (201, "stored", 1)


def test_a_server_that_ends_before_the_handler_has_begun_gives_the_key_back(fence: Fence) -> None:
    contract, handler = Contract(fence), Handler()
    fence.hydrate()

    async def cut_off() -> None:
        ending = asyncio.create_task(contract.answer(call(), "me", handler))
        while not contract._tasks:  # the one that would perform it, before its first step
            await asyncio.sleep(0)
        for task in (ending, *contract._tasks):
            task.cancel()

    asyncio.run(cut_off())
    (answer,) = answers(Contract(fence), handler, call())
    assert (answer.status, handler.times) == (201, 1)


def test_requests_that_arrive_together_are_claimed_together(fence: Fence, monkeypatch: pytest.MonkeyPatch) -> None:
    fence.hydrate()
    contract, sizes, claim = Contract(fence), list[int](), fence.inspector.fences.claim

    def counted(claims: Any) -> Any:
        sizes.append(len(claims))
        return claim(claims)

    monkeypatch.setattr(fence.inspector.fences, "claim", counted)

    async def story() -> None:
        for status in ("stored", "replayed"):
            told = await asyncio.gather(*(contract.answer(call(f"k{n}"), "me", Handler()) for n in range(10)))
            assert {each.header("idempotency-status") for each in told} == {status}

    asyncio.run(story())
    assert sizes == [10, 10]
