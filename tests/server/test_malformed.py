"""Hundreds of malformed requests: each gets a clear 4xx, nothing is claimed, nothing is performed."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

from ragfence import Fence
from ragfence.server import IdempotencyMiddleware

KEY = (b"idempotency-key", b"k1")
JSON = (b"content-type", b"application/json")


def bad_keys(chance: random.Random) -> list[list[tuple[bytes, bytes]]]:
    fixed = [
        b"",
        b'""',
        b'"',
        b'"a',
        b"a,b",
        b'"a","b"',
        b'"a";p',
        b"x" * 256,
        b"\xff\xfe",
        b"\x00",
        b"a\x7f",
        b'"a\\b"',
    ]
    control = [bytes([number]) + b"key" for number in (*range(0x09), *range(0x0A, 0x20), *range(0x7F, 0x100))]
    noise = [bytes(chance.choices(range(0x80, 0x100), k=chance.randint(1, 300))) for _ in range(100)]
    return [
        [],
        [KEY, KEY],
        [KEY, (b"Idempotency-Key", b"other")],
        *[[(b"idempotency-key", key)] for key in (*fixed, *control, *noise)],
    ]


def bad_bodies(chance: random.Random) -> list[bytes]:
    good = json.dumps({"amount": 10, "items": [1, {"a": None}], "name": "Zoë"}, ensure_ascii=False).encode()
    cut = [good[:size] for size in range(1, len(good))]
    fixed = [
        b"{",
        b"nul",
        b'{"a":1,"a":2}',
        b'{"a":NaN}',
        b'{"a":Infinity}',
        b'{"a":1e999}',
        b'{"a":12345678901234567890}',
        b'"\\ud800"',
        b"[" * 5000 + b"]" * 5000,
        b"\xef\xbb\xbf{}",
        '{"a":1}'.encode("utf-16"),
        '{"a":1}'.encode("utf-32"),
        b"\x1f\x8b\x08\x00",
        b'{"a":1}garbage',
        b"{'a':1}",
        b'{"a":01}',
        b"\x00",
        b" ",
    ]
    broken = []
    for _ in range(150):
        at = chance.randrange(len(good))
        broken.append(good[:at] + bytes([chance.randrange(0x80, 0xC0)]) * 2 + good[at + 1 :])
    return [*cut, *fixed, *broken]


def requests() -> list[tuple[list[tuple[bytes, bytes]], bytes]]:
    chance = random.Random(7)
    found = [(headers, b"{}") for headers in bad_keys(chance)]
    found += [([KEY, JSON], body) for body in bad_bodies(chance)]
    found += [([KEY, (b"Content-Type", b"Application/Vnd.X+JSON; charset=x")], b"{") for _ in range(1)]
    found += [
        ([KEY, (b"x-request-timeout", value)], b"") for value in (b"", b"-1", b"0", b"\xff", b"soon", b"1e3", b"NaN")
    ]
    found += [([KEY], b"x" * 3000)]
    return found


def test_a_malformed_request_gets_a_clear_4xx_and_leaves_nothing(open_fence: Any) -> None:
    fence: Fence = open_fence(http={"max_body_bytes": 2000})
    performed: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        performed.append(scope)

    middleware = IdempotencyMiddleware(app, fence)

    async def ask(headers: list[tuple[bytes, bytes]], body: bytes) -> tuple[int, dict[str, Any]]:
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/do", "query_string": b"\xff=%zz", "headers": headers}
        await middleware(scope, receive, send)
        return sent[0]["status"], json.loads(sent[1]["body"])

    async def all_of_them() -> None:
        for headers, body in requests():
            status, problem = await ask(headers, body)
            assert 400 <= status < 500, (headers, body)
            assert problem["status"] == status
            assert problem["code"].startswith("VALIDATION."), problem
            assert problem["detail"], problem
            assert not problem["retryable"]

    asyncio.run(all_of_them())
    assert len(requests()) >= 500
    assert performed == []
    assert fence.audit.decisions(since="1h").num_rows == 0
