"""Batches of documents: NDJSON in, an outcome for every line out, sealed before its last line is told."""

from __future__ import annotations

import asyncio
import json
import threading
import tracemalloc
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import ragfence
from ragfence import Document, Fence
from ragfence.errors import FormatTooNew, StoreUnavailable
from ragfence.server import Answer, Call, Contract
from ragfence.server import ndjson_batch as batch_module
from ragfence.server.fair_shares import Shares, UnfinishedBatch
from ragfence.server.ndjson_batch import NDJSON, NdjsonBatches, read_body
from ragfence.server.streams import Spool, Streamed
from ragfence.wire.problems import RequestRefused
from tests.server.conftest import OpenFence
from tests.servers import RedisServer


def body(*lines: Any) -> bytes:
    return b"".join((each if isinstance(each, bytes) else json.dumps(each).encode()) + b"\n" for each in lines)


def documents(*numbers: int) -> bytes:
    return body(*({"doc_id": f"d{n}", "text": f"Document {n}."} for n in numbers))


class Server:
    """The batches of a fence, as a server has them."""

    def __init__(self, fence: Fence) -> None:
        self.contract = Contract(fence, status_path="/status")
        self._fence = fence
        self._batches = NdjsonBatches(fence, self.contract)

    async def send(self, data: bytes, key: str = "k1", *headers: tuple[str, str]) -> Answer | Streamed:
        async def pieces() -> AsyncIterator[bytes]:
            for at in range(0, len(data), 1000):
                yield data[at : at + 1000]

        read = await read_body(pieces(), self._fence.policy.http, UnfinishedBatch(Shares(1 << 30), "acme"))
        call = Call(
            "POST", "/v1/documents:batch", headers=(("idempotency-key", key), ("content-type", NDJSON), *headers)
        )
        return await self._batches.answer(call, "me", read)

    async def whole(self, data: bytes, key: str = "k1", *headers: tuple[str, str]) -> tuple[int, bytes, Any]:
        sent = await self.send(data, key, *headers)
        if isinstance(sent, Answer):
            return sent.status, sent.body, dict(sent.headers)
        return sent.status, b"".join([piece async for piece in sent.pieces]), dict(sent.headers)


def lines_of(data: bytes) -> list[Any]:
    return [json.loads(line) for line in data.splitlines()]


def answered(fence: Fence, *bodies: bytes, key: str = "k1") -> list[tuple[int, bytes, Any]]:
    async def story() -> list[tuple[int, bytes, Any]]:
        server = Server(fence)
        return [await server.whole(each, key) for each in bodies]

    return asyncio.run(story())


@pytest.fixture(params=["sqlite", "valkey"])
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fence]:
    if request.param == "sqlite":
        opened = ragfence.open(tmp_path / "fence", tenant="acme")
    else:
        server: RedisServer = request.getfixturevalue("valkey_server")
        opened = ragfence.open(server.url, objects=tmp_path / "objects", tenant=tmp_path.name)
    with opened:
        yield opened


def test_every_line_has_its_outcome_and_a_replay_the_same_bytes(stored: Fence) -> None:
    sent = documents(1, 2) + documents(1)
    (status, first, told), (again_status, again, again_told) = answered(stored, sent, sent)
    one, two, twin, done = lines_of(first)
    assert status == again_status == 200
    assert [(each["line"], each["doc_id"], each["status"]) for each in (one, two, twin)] == [
        (1, "d1", 201),
        (2, "d2", 201),
        (3, "d1", 200),
    ]
    assert one["receipt"]["snippet_ids"] == twin["receipt"]["snippet_ids"] != []
    assert done == {"done": True, "lines": 3, "new": 2, "duplicate": 1, "failed": 0, "refused": 0}
    assert again == first
    assert (told["idempotency-status"], told["x-idempotency-status"]) == ("stored", "MISS")
    assert (again_told["idempotency-status"], again_told["x-idempotency-status"]) == ("replayed", "HIT")
    assert told["content-type"] == again_told["content-type"] == NDJSON


def test_a_line_that_is_wrong_is_its_own_problem(fence: Fence) -> None:
    fence.documents.ingest(Document("old", "first", sequence=5))
    sent = (
        body(
            {"doc_id": "good", "text": "text"},
            b"{no json",
            b"",
            b'{"doc_id": "a", "doc_id": "b", "text": ""}',
            b"\xff\xfe",
            [1],
            {"doc_id": "a"},
            {"doc_id": "a", "text": "x", "txet": "y"},
            {"doc_id": "a", "text": "nul\0"},
            {"doc_id": "old", "text": "second", "sequence": 4},
            {"doc_id": "old", "text": "third", "sequence": 5},
            b"   ",
        )
        + json.dumps({"doc_id": "last", "text": "without an end"}).encode()
    )
    ((_, told, _),) = answered(fence, sent)
    *outcomes, done = lines_of(told)
    assert [(each["line"], each["status"]) for each in outcomes] == [
        (1, 201),
        (2, 400),
        (4, 400),
        (5, 400),
        (6, 422),
        (7, 422),
        (8, 422),
        (9, 422),
        (10, 409),
        (11, 409),
        (13, 201),
    ]
    assert done == {"done": True, "lines": 11, "new": 2, "duplicate": 0, "failed": 9, "refused": 7}
    assert [each["decision"] for each in outcomes] == ["new", *["refused"] * 7, "stale", "conflict", "new"]
    assert all({"code", "retryable", "hint"} <= set(each["problem"]) for each in outcomes if each["status"] > 201)
    assert [each["doc_id"] for each in outcomes] == [
        "good", None, None, None, None, "a", "a", "a", "old", "old", "last",
    ]  # fmt: skip
    assert outcomes[0]["receipt"]["decision"] == "new"


def test_another_body_under_the_same_key_is_a_conflict_and_nothing_is_ingested(fence: Fence) -> None:
    _, (status, told, headers) = answered(fence, documents(1), documents(1, 2))
    assert (status, headers["x-idempotency-status"]) == (409, "CONFLICT")
    assert json.loads(told)["code"] == "CONFLICT.idempotency.payload_mismatch"
    assert fence.documents.get("d2") is None


def test_an_empty_batch_is_done_at_once(fence: Fence) -> None:
    (_, first, _), (_, again, _) = answered(fence, b"", b"")
    assert lines_of(first) == [{"done": True, "lines": 0, "new": 0, "duplicate": 0, "failed": 0, "refused": 0}]
    assert again == first


@pytest.mark.parametrize(
    ("limits", "sent"),
    [({"max_batch_bytes": 100}, b"x" * 101), ({"max_batch_lines": 2}, b"\n\n\n"), ({"max_batch_lines": 2}, b"\n\nx")],
)
def test_a_body_that_is_too_large_is_refused_before_anything_is_claimed(
    open_fence: OpenFence, limits: Any, sent: bytes
) -> None:
    fence = open_fence(http=limits)
    with pytest.raises(RequestRefused) as refused:
        answered(fence, sent)
    assert refused.value.problem.status == 413
    assert fence.audit.decisions(since="1h").num_rows == 0
    assert answered(fence, sent[:-1])[0][0] == 200


def test_a_line_that_is_too_long_is_told_so_and_the_next_is_read(open_fence: OpenFence) -> None:
    fence = open_fence(documents={"max_text_bytes": 100, "max_metadata_bytes": 100})
    limit = NdjsonBatches(fence, Contract(fence))._longest
    sent = body({"doc_id": "long", "text": "x" * (limit + 300_000)}) + documents(1)
    ((_, told, _),) = answered(fence, sent)
    long, good, _ = lines_of(told)
    assert (long["line"], long["status"], long["problem"]["code"]) == (1, 413, "VALIDATION.body_too_large")
    assert (good["line"], good["status"]) == (2, 201)


@pytest.mark.parametrize("size", [0, 1, 9, 10, 11, 12, 200_000])
@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_spool_knows_the_lines_that_are_longer_than_allowed(size: int, end: bytes) -> None:
    spool = Spool(in_memory=100)
    for piece in (b"before\n", b"x" * size, end):
        spool.append(piece)
    line = b"x" * size + end
    expected = [b"before\n"] + ([line if size <= 10 else None] if line else [])
    assert list(spool.lines(10)) == expected


class Writer:
    """What the writer of documents does, held up or broken by the test."""

    def __init__(self, fence: Fence, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.may_go_on, self.sizes = threading.Semaphore(0), threading.Semaphore(0), list[int]()
        self.errors: list[Exception | None] = []
        move = fence.documents._writer.move

        def held(moves: Sequence[Any], **more: Any) -> Any:
            self.reached.release()
            assert self.may_go_on.acquire(timeout=30)
            self.sizes.append(len(moves))
            if self.errors and (error := self.errors.pop(0)) is not None:
                raise error
            return move(moves, **more)

        monkeypatch.setattr(fence.documents._writer, "move", held)


@pytest.fixture
def writer(fence: Fence, monkeypatch: pytest.MonkeyPatch) -> Writer:
    monkeypatch.setattr(batch_module, "SLICE_LINES", 2)
    return Writer(fence, monkeypatch)


def test_lines_are_told_while_the_others_are_worked_on_and_the_last_after_the_seal(
    fence: Fence, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_seal, sealing = threading.Event(), threading.Event()
    seal = fence._engine.runner.complete

    def held(*given: Any) -> Any:
        sealing.set()
        may_seal.wait(30)
        return seal(*given)

    monkeypatch.setattr(fence._engine.runner, "complete", held)

    async def story() -> None:
        server = Server(fence)
        writer.may_go_on.release()
        streamed = await server.send(documents(1, 2, 3))
        assert isinstance(streamed, Streamed)
        first = await anext(streamed.pieces)
        assert [each["line"] for each in lines_of(first)] == [1, 2]
        twin = await server.send(documents(1, 2, 3))
        assert isinstance(twin, Answer)
        assert (twin.status, dict(twin.headers)["x-idempotency-status"]) == (202, "IN_PROGRESS")
        writer.may_go_on.release()
        assert [each["line"] for each in lines_of(await anext(streamed.pieces))] == [3]
        last = asyncio.ensure_future(anext(streamed.pieces))
        await asyncio.to_thread(sealing.wait)
        assert not last.done()
        may_seal.set()
        assert lines_of(await last)[0]["done"]
        with pytest.raises(StopAsyncIteration):
            await anext(streamed.pieces)

    asyncio.run(story())


def test_a_client_that_goes_away_ends_nothing(fence: Fence, writer: Writer) -> None:
    async def story() -> None:
        server = Server(fence)
        writer.may_go_on.release()
        streamed = await server.send(documents(1, 2, 3))
        assert isinstance(streamed, Streamed)
        await anext(streamed.pieces)
        await streamed.pieces.aclose()  # type: ignore[attr-defined]
        writer.may_go_on.release()
        await server.contract.finish()
        _, told, headers = await server.whole(documents(1, 2, 3))
        assert headers["idempotency-status"] == "replayed"
        assert lines_of(told)[-1]["new"] == 3

    asyncio.run(story())
    assert writer.sizes == [2, 1]


def test_a_client_whose_time_is_over_gets_no_last_line_and_the_rest_later(fence: Fence, writer: Writer) -> None:
    async def story() -> None:
        server = Server(fence)
        writer.may_go_on.release()
        status, told, _ = await server.whole(documents(1, 2, 3), "k1", ("x-request-timeout", "0.5"))
        assert status in (200, 202, 504)  # not 200 if the store was slower than that
        assert b'"done"' not in told
        writer.may_go_on.release()
        await server.contract.finish()
        _, again, _ = await server.whole(documents(1, 2, 3))
        assert again.startswith(told) or status != 200
        assert lines_of(again)[-1]["done"]

    asyncio.run(story())


def test_a_store_that_goes_away_cuts_the_answer_off_and_the_retry_finds_what_was_done(
    fence: Fence, writer: Writer, caplog: pytest.LogCaptureFixture
) -> None:
    writer.errors = [None, StoreUnavailable("the store did not answer")]
    for _ in range(10):
        writer.may_go_on.release()
    (_, cut_off, _), (_, whole, told) = answered(fence, documents(1, 2, 3), documents(1, 2, 3))
    assert [each["status"] for each in lines_of(cut_off)] == [201, 201]
    *outcomes, done = lines_of(whole)
    assert [each["status"] for each in outcomes] == [200, 200, 201]
    assert done == {"done": True, "lines": 3, "new": 1, "duplicate": 2, "failed": 0, "refused": 0}
    assert told["idempotency-status"] == "stored"
    assert "the store did not answer" in caplog.text


def test_a_store_that_is_away_from_the_start_is_told_as_an_error(fence: Fence, writer: Writer) -> None:
    writer.errors = [StoreUnavailable("the store did not answer")]
    for _ in range(10):
        writer.may_go_on.release()
    with pytest.raises(StoreUnavailable):
        answered(fence, documents(1))
    assert lines_of(answered(fence, documents(1))[0][1])[-1]["new"] == 1


def test_what_nobody_knows_whose_fault_it_is_falls_on_the_line_it_belongs_to(fence: Fence, writer: Writer) -> None:
    writer.errors = [FormatTooNew("from the future"), None, FormatTooNew("from the future")]
    for _ in range(10):
        writer.may_go_on.release()
    ((_, told, _),) = answered(fence, documents(1, 2))
    assert [each.get("status") for each in lines_of(told)] == [201, 500, None]


def test_who_is_overtaken_ends_without_the_last_line(open_fence: OpenFence, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lease runs out while it is frozen, and another attempt is sealed."""
    fence = open_fence(lease={"ttl_s": 0.1, "max_runtime_s": 0.1})
    writer = Writer(fence, monkeypatch)
    monkeypatch.setattr(batch_module, "SLICE_LINES", 1)

    async def story() -> None:
        server = Server(fence)
        writer.may_go_on.release()
        frozen = await server.send(documents(1, 2))
        assert isinstance(frozen, Streamed)
        first = await anext(frozen.pieces)
        for _ in range(2):
            await asyncio.to_thread(writer.reached.acquire)
        monkeypatch.undo()  # the other attempt is held up by nobody
        while (taker := await server.whole(documents(1, 2)))[0] == 202:
            await asyncio.sleep(0.05)
        assert lines_of(taker[1])[-1]["done"]
        writer.may_go_on.release()
        rest = b"".join([piece async for piece in frozen.pieces])
        assert [each["line"] for each in lines_of(first + rest)] == [1, 2]
        _, again, _ = await server.whole(documents(1, 2))
        assert again == taker[1]

    asyncio.run(story())


def test_an_answer_that_is_too_long_to_keep_is_given_once(fence: Fence, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_module, "MIN_STORED_BYTES", 0)
    monkeypatch.setattr(fence.policy.http, "__dict__", fence.policy.http.__dict__ | {"max_stored_bytes": 500})
    (_, first, _), (status, again, _) = answered(fence, documents(*range(5)), documents(*range(5)))
    assert lines_of(first)[-1]["new"] == 5
    assert (status, json.loads(again)["code"]) == (409, "PROVIDER.duplicate")


def test_a_key_may_be_optional(open_fence: OpenFence) -> None:
    fence = open_fence(require_headers=[])

    async def story() -> None:
        batches = NdjsonBatches(fence, Contract(fence))

        async def pieces() -> AsyncIterator[bytes]:
            yield documents(1)

        call = Call("POST", "/v1/documents:batch", headers=(("content-type", NDJSON),))
        streamed = await batches.answer(
            call, "me", await read_body(pieces(), fence.policy.http, UnfinishedBatch(Shares(1 << 30), "acme"))
        )
        assert isinstance(streamed, Streamed)
        assert lines_of(b"".join([piece async for piece in streamed.pieces]))[-1]["new"] == 1

    asyncio.run(story())


@pytest.mark.slow
def test_the_memory_it_takes_is_that_of_a_slice(fence: Fence, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_module, "SLICE_BYTES", 1 << 18)
    text = "All work and no play makes Jack a dull boy. " * 400
    sent = body(*({"doc_id": f"d{n}", "text": f"{n} {text}"} for n in range(500)))
    assert len(sent) > 8 << 20
    answered(fence, documents(1), key="warm")
    tracemalloc.start()
    try:
        ((_, told, _),) = answered(fence, sent)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert lines_of(told)[-1]["new"] == 500
    assert peak < 6 << 20
