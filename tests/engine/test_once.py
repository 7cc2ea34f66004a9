"""`@fence.once`: one effect per key, the same receipt for everybody, another payload for nobody."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from enum import StrEnum
from pathlib import Path
from typing import Any
from uuid import UUID

import jsonpatch
import pytest

import ragfence
from ragfence import Decision, Operation, Receipt, by_fields, by_id, by_id_and_fields
from ragfence.core.redaction import REDACTED
from ragfence.errors import (
    Conflict,
    InFlight,
    NotJson,
    Stale,
    TerminalError,
    ValidationError,
)
from tests import servers
from tests.engine.worlds import REQUEST, Request, Tickets, World, eventually, key_of, record_of, rows_of


def test_the_first_call_performs_and_every_later_one_gets_its_receipt(world: World, tickets: Tickets) -> None:
    create = tickets.on(world.open())
    first, second = create(REQUEST), create(REQUEST)
    assert len(tickets.made) == 1
    assert first == second
    assert (first.decision, second.decision) == (Decision.NEW, Decision.DUPLICATE)
    assert first.key == key_of()
    assert second.result == {"number": 1}


def test_an_async_function_is_performed_once_too(world: World, tickets: Tickets) -> None:
    create = tickets.on_async(world.open())

    async def both() -> tuple[Receipt, Receipt]:
        return await create(REQUEST), await create(REQUEST)

    first, second = asyncio.run(both())
    assert len(tickets.made) == 1
    assert first == second
    assert (first.decision, second.decision) == (Decision.NEW, Decision.DUPLICATE)


def test_sync_and_async_callers_of_a_key_share_one_effect(world: World, tickets: Tickets) -> None:
    fence = world.open()
    assert tickets.on(fence)(REQUEST) == asyncio.run(tickets.on_async(fence)(REQUEST))
    assert len(tickets.made) == 1


def test_a_receipt_outlives_the_fence_that_made_it(world: World, tickets: Tickets) -> None:
    with world.open() as fence:
        first = tickets.on(fence)(REQUEST)
    assert tickets.on(world.open())(REQUEST) == first
    assert len(tickets.made) == 1


def test_the_first_caller_gets_the_result_as_every_later_one_will(world: World, tickets: Tickets) -> None:
    tickets.then = [{"pair": (1, 2), "kind": StrEnum("Kind", "BUG").BUG, "id": UUID(int=1)}]  # type: ignore[attr-defined]
    create = tickets.on(world.open())
    first = create(REQUEST)
    assert first.result == {"pair": [1, 2], "kind": "bug", "id": str(UUID(int=1))}
    assert type(first.result["kind"]) is str
    assert create(REQUEST).result == first.result


def test_two_receipts_share_nothing_that_one_caller_could_change(memory: World, tickets: Tickets) -> None:
    create = tickets.on(memory.open())
    create(REQUEST).result["number"] = "spoiled"
    assert create(REQUEST).result == {"number": 1}


@pytest.mark.parametrize("nothing", [None, "", 0, False, [], {}])
def test_an_empty_result_is_a_result(world: World, tickets: Tickets, nothing: object) -> None:
    tickets.then = [nothing]
    create = tickets.on(world.open())
    assert create(REQUEST).result == nothing
    again = create(REQUEST).result
    assert again == nothing
    assert type(again) is type(nothing)
    assert len(tickets.made) == 1


def test_sixteen_threads_perform_one_effect_and_get_equal_receipts(world: World, tickets: Tickets) -> None:
    create = tickets.on(world.open())
    start = threading.Barrier(16)

    def call(_: int) -> Receipt:
        start.wait()
        return create(REQUEST)

    with ThreadPoolExecutor(16) as pool:
        receipts = list(pool.map(call, range(16)))
    assert len(tickets.made) == 1
    assert all(receipt == receipts[0] for receipt in receipts)
    assert [receipt.decision for receipt in receipts].count(Decision.NEW) == 1


def test_two_fences_on_the_same_store_perform_one_effect(world: World) -> None:
    entered, go_on, made = threading.Event(), threading.Event(), []

    def slow(req: Request) -> int:
        made.append(req)
        entered.set()
        assert go_on.wait(20)
        return 7

    one, two = (fence.once(kind="t", key=lambda req: req["id"])(slow) for fence in (world.open(), world.open()))
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(one, REQUEST)
        assert entered.wait(20)
        second = pool.submit(two, REQUEST)
        eventually(lambda: rows_of(world.opened[1], decision="in_flight"))
        go_on.set()
        assert first.result(20) == second.result(20)
    assert len(made) == 1
    assert second.result().flags.waited_ms >= 0


def test_a_call_that_may_not_wait_is_told_who_is_at_it(world: World) -> None:
    fence = world.open(owner="worker-7")

    @fence.once(kind="t", key=lambda req: req["id"])
    def outer(req: Request) -> None:
        with pytest.raises(InFlight, match="worker-7") as busy:
            in_another_thread(lambda: impatient(req))
        assert busy.value.retry_after_ms > 0
        assert busy.value.key

    @fence.once(kind="t", key=lambda req: req["id"], wait_s=0)
    def impatient(req: Request) -> None:
        raise AssertionError("it is in flight")

    outer(REQUEST)


def in_another_thread(call: Callable[[], Any], context: contextvars.Context | None = None) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(context.run, call).result() if context else pool.submit(call).result()


@pytest.mark.parametrize("objects", ["none", "moto"])
def test_once_works_on_valkey_with_and_without_s3(
    objects: str,
    tickets: Tickets,
    valkey_server: servers.RedisServer,
    request: pytest.FixtureRequest,
    s3_env: None,
    tmp_path: Path,
) -> None:
    where = None
    if objects == "moto":
        moto = request.getfixturevalue("moto_server")
        where = f"s3://{moto.bucket}/{tmp_path.name}?endpoint_url={moto.url}"

    def opened() -> Any:
        tenant = f"{tmp_path.name}-{objects}"
        return closing(ragfence.open(valkey_server.url, objects=where, tenant=tenant, policy=ragfence.Policy()))

    with opened() as fence:
        first = tickets.on(fence)(REQUEST)
        assert tickets.on(fence)(REQUEST) == first
    with opened() as fence:
        again = tickets.on(fence)(REQUEST)
        assert again == first
        assert again.decision is Decision.DUPLICATE
        assert fence.audit.check().ok
        with pytest.raises(Conflict):
            tickets.on(fence)({**REQUEST, "text": "other"})
    assert len(tickets.made) == 1


def test_threads_of_two_fences_share_one_effect_on_valkey_and_seaweedfs(
    tickets: Tickets,
    valkey_server: servers.RedisServer,
    seaweed_server: servers.S3Server,
    s3_env: None,
    tmp_path: Path,
) -> None:
    where = f"s3://{seaweed_server.bucket}/{tmp_path.name}?endpoint_url={seaweed_server.url}"
    fences = [
        ragfence.open(valkey_server.url, objects=where, tenant=tmp_path.name, policy=ragfence.Policy())
        for _ in range(2)
    ]
    calls = [tickets.on(fence) for fence in fences] * 4
    with ThreadPoolExecutor(len(calls)) as pool:
        receipts = list(pool.map(lambda call: call(REQUEST), calls))
    assert len(tickets.made) == 1
    assert all(receipt == receipts[0] for receipt in receipts)
    assert fences[0].audit.check().ok
    for fence in fences:
        fence.close()


def test_the_decorated_function_keeps_its_name_its_doc_and_its_signature(memory: World) -> None:
    @memory.open().once(kind="t", key=lambda a, *, b: a)
    def original(a: str, *, b: int = 3) -> None:
        """What it does."""

    assert original.__name__ == "original"
    assert original.__doc__ == "What it does."
    assert list(inspect.signature(original).parameters) == ["a", "b"]
    assert not inspect.iscoroutinefunction(original)


def test_a_decorated_coroutine_function_is_still_one(memory: World) -> None:
    @memory.open().once(kind="t", key=lambda a: a)
    async def original(a: str) -> None: ...

    assert inspect.iscoroutinefunction(original)


def test_methods_can_be_fenced_and_self_is_no_part_of_the_payload(memory: World) -> None:
    fence = memory.open()

    class Desk:
        def __init__(self) -> None:
            self.made = 0

        @fence.once(kind="t", key=lambda self, req: req["id"])
        def create(self, req: Request) -> int:
            self.made += 1
            return self.made

        @fence.once(kind="s", key=by_id("id"))
        def by_strategy(self, req: Request) -> int:
            self.made += 1
            return self.made

    one, two = Desk(), Desk()
    assert one.create(REQUEST) == two.create(REQUEST)
    assert one.by_strategy(REQUEST) == two.by_strategy(REQUEST)
    assert (one.made, two.made) == (2, 0)


def generator(a: str) -> Any:
    yield a


async def async_generator(a: str) -> Any:
    yield a


@pytest.mark.parametrize("function", [generator, async_generator])
def test_a_generator_is_refused_when_it_is_decorated(memory: World, function: Any) -> None:
    with pytest.raises(ValidationError, match="generator") as refused:
        memory.open().once(kind="t", key=lambda a: a)(function)
    assert "collect" in refused.value.hint


def test_a_call_with_wrong_arguments_is_a_type_error_that_names_the_function(memory: World, tickets: Tickets) -> None:
    with pytest.raises(TypeError, match=r"Tickets.create: missing a required argument: 'req'"):
        tickets.on(memory.open())()  # type: ignore[call-arg]
    assert tickets.made == []


def test_a_call_by_keyword_is_the_same_call_whatever_the_key_function_calls_its_parameter(
    memory: World, tickets: Tickets
) -> None:
    create: Any = tickets.on(memory.open(), key=lambda r: (r["id"], r["version"]))
    assert create(REQUEST) == create(req=REQUEST)
    assert len(tickets.made) == 1


class Source(StrEnum):
    A = "t-1"


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (lambda req: req["id"], {"source_id": "t-1"}),
        (lambda req: (req["id"],), {"source_id": "t-1"}),
        (lambda req: (req["id"], req["version"]), {"source_id": "t-1", "revision": "1"}),
        (lambda req: (req["id"], None), {"source_id": "t-1"}),
        (lambda req: (req["id"], "r", 5), {"source_id": "t-1", "revision": "r", "sequence": 5}),
        (lambda req: (req["id"], None, 5), {"source_id": "t-1", "revision": "5", "sequence": 5}),
        (lambda req: (17, 2), {"source_id": "17", "revision": "2"}),
        (lambda req: Source.A, {"source_id": "t-1"}),
        (lambda req: UUID(int=7), {"source_id": str(UUID(int=7))}),
        (by_id("id"), {"source_id": "t-1"}),
        (by_fields("id", "text"), dict(zip(("source_id", "revision"), by_fields("id", "text")(REQUEST), strict=True))),
        (
            by_id_and_fields(id="id", fields=["text"]),
            {"source_id": "t-1", "revision": by_id_and_fields(id="id", fields=["text"])(REQUEST)[1]},
        ),
        (
            lambda req: Operation(kind="other", source_id=req["id"], action="close"),
            {"kind": "other", "source_id": "t-1", "action": "close"},
        ),
    ],
)
def test_every_form_of_a_key_names_the_same_operation(
    memory: World, tickets: Tickets, key: Any, expected: dict[str, Any]
) -> None:
    receipt = tickets.on(memory.open(), key=key)(REQUEST)
    operation = Operation(**{"kind": "ticket", "tenant": "default", **expected})
    assert receipt.key == operation.key.hex()


def test_source_type_action_and_index_hash_are_part_of_the_key(memory: World, tickets: Tickets) -> None:
    fence = memory.open()
    options: list[dict[str, str]] = [{}, {"source_type": "x"}, {"action": "x"}, {"index_hash": "x"}, {"kind": "x"}]
    keys = {tickets.on(fence, **more)(REQUEST).key for more in options}
    assert len(keys) == len(tickets.made) == 5


@pytest.mark.parametrize("key", [None, True, 1.5, ["t", "1"], {"id": 1}, (), ("a", "b", 3, 4), (None, "1"), b"t", ""])
def test_what_is_no_key_is_refused_before_anything_happens(memory: World, tickets: Tickets, key: object) -> None:
    create = tickets.on(memory.open(), key=lambda req: key)
    with pytest.raises(ValidationError):
        create(REQUEST)
    assert tickets.made == []
    assert rows_of(memory.opened[0]) == []


def test_another_revision_is_another_operation(world: World, tickets: Tickets) -> None:
    create = tickets.on(world.open())
    assert create(REQUEST) != create({**REQUEST, "version": "2"})
    assert len(tickets.made) == 2


def test_an_older_sequence_is_stale_and_not_performed(world: World, tickets: Tickets) -> None:
    create = tickets.on(world.open(), key=lambda req: (req["id"], None, req["n"]))
    create({"id": "a", "n": 2})
    with pytest.raises(Stale, match="is at sequence 2, 1 is older") as stale:
        create({"id": "a", "n": 1})
    assert (stale.value.sequence, stale.value.newest) == (1, 2)
    assert len(tickets.made) == 1


def test_the_same_key_with_another_payload_is_a_conflict_and_is_never_applied(world: World, tickets: Tickets) -> None:
    create = tickets.on(world.open())
    first = create(REQUEST)
    with pytest.raises(Conflict, match="known with another payload") as conflict:
        create({**REQUEST, "text": "other"})
    assert len(tickets.made) == 1
    assert conflict.value.key == first.key
    assert conflict.value.receipt == first
    assert conflict.value.diff is None
    assert create(REQUEST) == first


def test_a_conflict_is_one_also_after_a_failed_attempt(world: World, tickets: Tickets) -> None:
    tickets.then = [RuntimeError("down")]
    create = tickets.on(world.open())
    with pytest.raises(RuntimeError):
        create(REQUEST)
    with pytest.raises(Conflict):
        create({**REQUEST, "text": "other"})
    assert create(REQUEST).result == {"number": 2}


def test_an_explicit_payload_is_all_that_is_compared(memory: World, tickets: Tickets) -> None:
    create = tickets.on(memory.open(), payload=lambda req: req["text"])
    assert create(REQUEST) == create({**REQUEST, "sent_at": "later"})
    with pytest.raises(Conflict):
        create({**REQUEST, "text": "other"})


def test_all_arguments_and_their_defaults_are_the_payload(memory: World) -> None:
    @memory.open().once(kind="t", key=lambda a, *more, **named: a)
    def f(a: str, b: int = 3, *, c: int = 4) -> None: ...

    receipt = f("a")
    assert f("a", 3) == f("a", b=3, c=4) == receipt
    with pytest.raises(Conflict):
        f("a", c=5)


def test_bytes_are_compared_as_they_are(memory: World, tickets: Tickets) -> None:
    create: Any = tickets.on(memory.open(), key=lambda body: "a")
    assert create(b"\x00\xff") == create(bytearray(b"\x00\xff"))
    with pytest.raises(Conflict):
        create(b"\x00\xfe")
    with pytest.raises(Conflict):
        create("\x00")


def test_payloads_that_mean_the_same_are_the_same(memory: World, tickets: Tickets) -> None:
    create: Any = tickets.on(memory.open(), key=lambda req: "a")
    assert create({"a": 1, "b": [1.0, "e\u0301"]}) == create({"b": (1, "\u00e9"), "a": 1})


def test_a_payload_that_is_no_json_is_refused_before_the_effect(memory: World, tickets: Tickets) -> None:
    create = tickets.on(memory.open())
    with pytest.raises(NotJson, match=r"\$\.when") as refused:
        create({**REQUEST, "when": object()})
    assert "payload=" in refused.value.hint
    assert tickets.made == []


SECRET, CARD, OTHER_SECRET = "hunter2-hunter2", "4111 1111 1111 1111", "s3cr3t-s3cr3t"
DIFFS = {"on_conflict": {"include_diff": True}}


def conflicting(create: Callable[[Any], Receipt], first: Request, second: Request) -> Conflict:
    create(first)
    with pytest.raises(Conflict) as conflict:
        create(second)
    return conflict.value


def test_a_conflict_shows_what_differs_as_a_patch(world: World, tickets: Tickets) -> None:
    fence = world.open(**DIFFS)
    old, new = {**REQUEST, "tags": ["a"]}, {**REQUEST, "tags": ["a", "b"], "text": "other"}
    diff = conflicting(tickets.on(fence), old, new).diff
    assert jsonpatch.apply_patch(old, diff) == new
    (row,) = rows_of(fence, decision="conflict")
    assert row["diff_size"] == len(json.dumps(diff, separators=(",", ":")))
    assert fence.audit.check().ok


def test_a_diff_is_of_redacted_payloads_and_no_secret_is_stored_anywhere(embedded: World, tickets: Tickets) -> None:
    fence = embedded.open(**DIFFS)
    first = {**REQUEST, "password": SECRET, "note": f"card {CARD}"}
    diff = conflicting(tickets.on(fence), first, {**first, "password": OTHER_SECRET, "text": "other"}).diff
    assert diff == [{"op": "replace", "path": "/text", "value": "other"}]
    tickets.then = [TerminalError(f"password={SECRET}")]
    with pytest.raises(TerminalError):
        tickets.on(fence)({**first, "version": "2"})
    stored = b"".join(path.read_bytes() for path in embedded.folder.rglob("*") if path.is_file())
    assert REDACTED.encode() in stored
    for secret in (SECRET, CARD, OTHER_SECRET):
        assert secret.encode() not in stored
        assert secret.encode().hex().encode() not in stored


def test_a_diff_is_bounded_and_its_row_tells_the_full_size(memory: World, tickets: Tickets) -> None:
    fence = memory.open(on_conflict={"include_diff": True, "max_diff_bytes": 200})
    first = {**REQUEST, **{f"field{n}": "old" for n in range(50)}}
    diff = conflicting(tickets.on(fence), first, {**REQUEST, **{f"field{n}": "new" for n in range(50)}}).diff
    assert 0 < len(json.dumps(diff)) <= 300
    assert len(diff) < 50
    (row,) = rows_of(fence, decision="conflict")
    assert row["diff_size"] > 200


def test_payloads_too_big_to_keep_have_a_conflict_without_a_diff(memory: World, tickets: Tickets) -> None:
    first = {**REQUEST, "text": "x" * 20_000}
    assert conflicting(tickets.on(memory.open(**DIFFS)), first, REQUEST).diff is None


def test_payloads_are_kept_only_when_diffs_are_wanted(memory: World, tickets: Tickets) -> None:
    fence = memory.open()
    tickets.on(fence)(REQUEST)
    assert record_of(fence, key_of()).payload == b""


def test_a_conflict_with_an_attempt_under_way_shows_what_differs_too(memory: World, tickets: Tickets) -> None:
    tickets.then = [RuntimeError("down")]
    fence = memory.open(**DIFFS)
    create = tickets.on(fence)
    with pytest.raises(RuntimeError):
        create(REQUEST)
    with pytest.raises(Conflict) as conflict:
        create({**REQUEST, "text": "other"})
    assert conflict.value.diff == [{"op": "replace", "path": "/text", "value": "other"}]
