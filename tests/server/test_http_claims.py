"""What was read once is known when it comes again; whatever differs is read anew."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ragfence import Fence
from ragfence.server.replay import RequestHead, RequestReader
from ragfence.server.responses import HttpClaim
from ragfence.wire.messages import Call, headers_from
from tests.server.conftest import OpenFence

BODY = b'{"amount": 1}'


def scope(**other: Any) -> dict[str, Any]:
    headers = {
        b"host": b"app",
        b"idempotency-key": b"k1",
        b"content-type": b"application/json",
    } | other.pop("headers", {})
    given = {
        "method": "POST",
        "path": "/refunds",
        "query_string": b"",
        "root_path": "",
        "headers": list(headers.items()),
    }
    return given | other


def read(
    reading: RequestReader, asked: dict[str, Any], body: bytes = BODY, principal: str = "me"
) -> tuple[RequestHead, HttpClaim]:
    """As whoever is asked for the first time does it."""
    head = reading.head_of(asked, principal)
    call = Call(
        asked["method"],
        asked["path"],
        query=asked["query_string"].decode(),
        headers=headers_from(asked["headers"]),
        body=body,
    )

    async def in_a_loop() -> HttpClaim | object:
        return reading.checked(call, principal, head=head)

    found = asyncio.run(in_a_loop())
    assert isinstance(found, HttpClaim)
    return head, found


def known(reading: RequestReader, asked: dict[str, Any], body: bytes = BODY, principal: str = "me") -> HttpClaim | None:
    head = reading.head_of(asked, principal)

    async def in_a_loop() -> HttpClaim | None:
        return reading.known(head, body)

    return asyncio.run(in_a_loop()) if reading.may_know(head) else None


@pytest.fixture
def reading(fence: Fence) -> RequestReader:
    return RequestReader(fence.batched_claims(), fence.policy)


def test_the_same_request_is_known_and_asks_for_the_same(reading: RequestReader) -> None:
    assert known(reading, scope()) is None
    _, first = read(reading, scope())
    again = known(reading, scope())
    assert again is not None
    assert again.request == first.request
    assert (again.key, again.place) == (first.key, first.place) == ("k1", "POST /refunds")


def test_headers_that_decide_nothing_may_be_others(reading: RequestReader) -> None:
    read(reading, scope())
    assert known(reading, scope(headers={b"host": b"other", b"user-agent": b"curl"})) is not None


@pytest.mark.parametrize(
    "other",
    [
        scope(headers={b"idempotency-key": b"k2"}),
        scope(headers={b"content-type": b"text/plain"}),
        scope(headers={b"content-encoding": b"gzip"}),
        scope(headers={b"if-match": b'"1.2"'}),
        scope(headers={b"if-none-match": b"*"}),
        scope(path="/payments"),
        scope(method="PUT"),
        scope(query_string=b"dry_run=1"),
        scope(root_path="/v2"),
    ],
)
def test_a_request_that_differs_is_not_known(reading: RequestReader, other: dict[str, Any]) -> None:
    read(reading, scope())
    assert known(reading, other) is None


def test_neither_is_another_body_or_another_principal(reading: RequestReader) -> None:
    read(reading, scope())
    assert known(reading, scope(), b'{"amount": 2}') is None
    assert known(reading, scope(), b'{ "amount": 1}') is None
    assert known(reading, scope(), principal="you") is None


def test_a_header_that_the_policy_requires_decides(open_fence: OpenFence) -> None:
    fence = open_fence(require_headers=["Idempotency-Key", "X-Team"])
    reading = RequestReader(fence.batched_claims(), fence.policy)
    read(reading, scope(headers={b"x-team": b"people"}))
    assert known(reading, scope(headers={b"x-team": b"people"})) is not None
    assert known(reading, scope()) is None


def test_patience_and_correlation_are_of_the_moment(reading: RequestReader) -> None:
    read(reading, scope(headers={b"x-request-timeout": b"9", b"x-correlation-id": b"first"}))
    patient = known(reading, scope(headers={b"x-request-timeout": b"2.5", b"x-request-id": b"second"}))
    assert patient is not None
    assert patient.budget_s == 2.5
    assert patient.give_up_at is not None
    assert b'"correlation_id":"second"' in patient.request.context
    plain = known(reading, scope())
    assert plain is not None
    assert plain.budget_s is None
    assert b"correlation_id" not in plain.request.context


def test_what_cannot_be_read_is_left_to_whoever_refuses_it(reading: RequestReader) -> None:
    read(reading, scope())
    assert known(reading, scope(headers={b"x-request-timeout": b"soon"})) is None


def test_no_more_is_remembered_than_there_is_room_for(fence: Fence) -> None:
    reading = RequestReader(fence.batched_claims(), fence.policy, max_bytes=50_000)
    requests = [scope(headers={b"idempotency-key": b"k%d" % number}) for number in range(50)]
    for each in requests:
        read(reading, each)
    remembered = [known(reading, each) is not None for each in requests]
    assert 1 <= sum(remembered) < 20
    assert remembered == sorted(remembered)  # the newest
    larger_than_the_cache = scope(headers={b"idempotency-key": b"k" * 200, b"content-type": b"x" * 60_000})
    read(reading, larger_than_the_cache)
    assert known(reading, larger_than_the_cache) is None
    assert [known(reading, each) is not None for each in requests] == remembered  # and pushed nothing out
