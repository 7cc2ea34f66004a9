"""`@fence.once`: one effect per key, the same receipt for everybody, and a clear end for every way to fail."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import json
import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from enum import StrEnum
from pathlib import Path
from typing import Any
from uuid import UUID

import jsonpatch
import pytest

import ragfence
from ragfence import Decision, Fence, Operation, Receipt, Recovered, by_fields, by_id, by_id_and_fields
from ragfence.core.records import State
from ragfence.core.redaction import REDACTED
from ragfence.errors import (
    Conflict,
    EffectFailed,
    InFlight,
    LeaseLost,
    NestedClaim,
    NotJson,
    Quarantined,
    ResultTooBig,
    Stale,
    StoreAuth,
    TerminalError,
    ValidationError,
)
from ragfence.stores.fences import Lookup
from ragfence.testing.points import at_point
from tests import servers
from tests.unit.worlds import BACKENDS, WITH_OBJECTS, World, Wrapped, abandon, eventually
from tests.unit.worlds import world as make_world

Request = dict[str, Any]
REQUEST: Request = {"id": "t-1", "version": "1", "text": "it rains in"}


@pytest.fixture(params=BACKENDS)
def world(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with make_world(request.param, tmp_path, monkeypatch) as made:
        yield made


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with make_world("memory", tmp_path, monkeypatch) as made:
        yield made


@pytest.fixture
def solo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with make_world("solo", tmp_path, monkeypatch) as made:
        yield made


class Tickets:
    """An effect that can be counted, and what it shall do next."""

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.then: list[BaseException | object] = []

    def create(self, req: Any) -> object:
        self.made.append(req)
        if self.then:
            outcome = self.then.pop(0)
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome
        return {"number": len(self.made)}

    def on(self, fence: Fence, **options: Any) -> Callable[[Request], Receipt]:
        options = {"kind": "ticket", "key": lambda req: (req["id"], req["version"]), **options}
        return fence.once(**options)(self.create)

    def on_async(self, fence: Fence, **options: Any) -> Callable[[Request], Any]:
        async def create(req: Request) -> object:
            return self.create(req)

        options = {"kind": "ticket", "key": lambda req: (req["id"], req["version"]), **options}
        return fence.once(**options)(create)


@pytest.fixture
def tickets() -> Tickets:
    return Tickets()


def record_of(fence: Fence, key: str) -> Any:
    (held,) = fence._engine.fences.read([Lookup(bytes.fromhex(key))])
    return held.record


def key_of(req: Request = REQUEST) -> str:
    operation = Operation(kind="ticket", source_id=req["id"], revision=req["version"], tenant="default")
    return operation.key.hex()


def rows_of(fence: Fence, **wanted: Any) -> list[dict[str, Any]]:
    return fence.audit.decisions(**wanted).to_pylist()


# The promise


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
    tickets.then = [{"pair": (1, 2), "kind": StrEnum("Kind", "BUG").BUG, "id": UUID(int=1)}]
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


# The decorated function


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


@pytest.mark.parametrize("made", [lambda a: (yield), type("G", (), {})])
def test_a_generator_is_refused_when_it_is_decorated(memory: World, made: Any) -> None:
    async def async_generator(a: str) -> Any:
        yield a

    function = made if inspect.isfunction(made) else async_generator
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


# Keys


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


# Payloads and conflicts


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


# Failures


class NoSuchCustomer(TerminalError):
    code = "APP.no_such_customer"


@pytest.mark.parametrize("error", [TerminalError("never"), NoSuchCustomer("never")])
def test_a_terminal_error_is_sealed_and_replayed_to_everybody(
    world: World, tickets: Tickets, error: TerminalError
) -> None:
    tickets.then = [error]
    with world.open() as fence, pytest.raises(type(error), match="never"):
        tickets.on(fence)(REQUEST)
    for fence in (world.opened[0], world.open()):
        with pytest.raises(EffectFailed, match="never") as replay:
            tickets.on(fence)(REQUEST)
        assert replay.value.receipt.failure == {"type": type(error).__name__, "code": error.code, "message": "never"}
        assert replay.value.key == key_of()
    assert len(tickets.made) == 1


def test_an_async_terminal_error_is_sealed_too(memory: World, tickets: Tickets) -> None:
    tickets.then = [NoSuchCustomer("never")]
    create = tickets.on_async(memory.open())
    with pytest.raises(NoSuchCustomer):
        asyncio.run(create(REQUEST))
    with pytest.raises(EffectFailed):
        asyncio.run(create(REQUEST))


@pytest.mark.parametrize("terminal", [(KeyError,), LookupError])
def test_exceptions_named_terminal_are_sealed_and_others_are_not(
    memory: World, tickets: Tickets, terminal: Any
) -> None:
    create = tickets.on(memory.open(), terminal=terminal)
    tickets.then = [ValueError("once more"), KeyError("gone")]
    with pytest.raises(ValueError, match="once more"):
        create(REQUEST)
    with pytest.raises(KeyError):
        create(REQUEST)
    with pytest.raises(EffectFailed, match="KeyError: 'gone'"):
        create(REQUEST)
    assert len(tickets.made) == 2


@pytest.mark.parametrize("terminal", [[KeyError], "KeyError", (KeyError("x"),), (BaseException,)])
def test_what_is_no_exception_class_cannot_be_terminal(memory: World, tickets: Tickets, terminal: Any) -> None:
    with pytest.raises(ValidationError, match="terminal="):
        tickets.on(memory.open(), terminal=terminal)


@pytest.mark.parametrize(
    "error", [StoreAuth("password"), NestedClaim("own key"), Conflict("other key"), ValidationError("bad"), Stale("x")]
)
def test_what_ragfence_itself_raises_inside_an_effect_is_not_final(
    memory: World, tickets: Tickets, error: TerminalError
) -> None:
    tickets.then = [error]
    create = tickets.on(memory.open())
    with pytest.raises(type(error)):
        create(REQUEST)
    assert create(REQUEST).is_new


def test_a_failure_message_is_redacted_before_it_is_stored(memory: World, tickets: Tickets) -> None:
    tickets.then = [TerminalError("refused: password=hunter2")]
    create = tickets.on(memory.open())
    with pytest.raises(TerminalError):
        create(REQUEST)
    with pytest.raises(EffectFailed) as replay:
        create(REQUEST)
    assert "hunter2" not in str(replay.value)
    assert "hunter2" not in repr(replay.value.receipt)


def test_any_other_exception_gives_the_key_back_at_once_and_is_remembered(world: World, tickets: Tickets) -> None:
    tickets.then = [ConnectionError("api.example.org: token=abc")]
    fence = world.open()
    create = tickets.on(fence)
    with pytest.raises(ConnectionError):
        create(REQUEST)
    record = record_of(fence, key_of())
    assert (record.state, record.attempt, record.error) == (State.RELEASED, 1, "ConnectionError")
    second = create(REQUEST)
    assert (second.decision, second.flags.attempt, second.flags.takeover) == (Decision.NEW, 2, False)
    assert [row["error_code"] for row in rows_of(fence) if row["error_code"]] == ["ConnectionError"]
    assert fence.audit.check().ok


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit("password=hunter2"), SystemExit(3), GeneratorExit()])
def test_whatever_ends_the_process_gives_the_key_back(world: World, tickets: Tickets, error: BaseException) -> None:
    tickets.then = [error]
    fence = world.open()
    create = tickets.on(fence)
    with pytest.raises(type(error)):
        create(REQUEST)
    record = record_of(fence, key_of())
    assert (record.state, record.error) == (State.RELEASED, type(error).__name__)
    assert create(REQUEST).is_new


def test_an_exit_during_the_commit_gives_the_key_back(world: World, tickets: Tickets) -> None:
    def leave() -> None:
        raise SystemExit(3)

    fence = world.open()
    create = tickets.on(fence)
    with at_point("before_seal", leave), pytest.raises(SystemExit):
        create(REQUEST)
    assert not record_of(fence, key_of()).held_at(world.clock() + 1)
    again = create(REQUEST)
    assert again.result == {"number": 1 if world.objects else 2}


def test_after_too_many_attempts_a_key_is_quarantined_until_it_is_released(world: World, tickets: Tickets) -> None:
    tickets.then = [RuntimeError("1"), RuntimeError("2")]
    fence = world.open(lease={"max_attempts": 2})
    create = tickets.on(fence)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            create(REQUEST)
    for _ in range(2):
        with pytest.raises(Quarantined, match="failed 2 times, last with RuntimeError") as stuck:
            create(REQUEST)
        assert (stuck.value.attempt, stuck.value.error_code, stuck.value.key) == (2, "RuntimeError", key_of())
    assert len(tickets.made) == 2
    assert [row["decision"] for row in rows_of(fence) if row["error_code"] == "QUARANTINED"] == ["in_flight"] * 2
    assert fence.release(key_of())
    assert create(REQUEST).result == {"number": 3}


@pytest.mark.parametrize("form", ["key", "operation"])
@pytest.mark.parametrize("sequence", [None, 0, 7])
def test_a_quarantined_key_is_released_by_its_text_and_by_its_operation(
    world: World, tickets: Tickets, sequence: int | None, form: str
) -> None:
    tickets.then = [RuntimeError("1")]
    fence = world.open(lease={"max_attempts": 1})
    create = tickets.on(fence, key=lambda req: ("a", "r", sequence))
    with pytest.raises(RuntimeError):
        create(REQUEST)
    with pytest.raises(Quarantined) as stuck:
        create(REQUEST)
    operation = Operation(kind="ticket", source_id="a", revision="r", sequence=sequence)
    assert fence.release(stuck.value.key if form == "key" else operation)
    assert create(REQUEST).is_new


def test_a_key_sealed_as_a_failure_can_be_released_into_a_second_life(world: World, tickets: Tickets) -> None:
    tickets.then = [TerminalError("never")]
    fence = world.open()
    create = tickets.on(fence)
    with pytest.raises(TerminalError):
        create(REQUEST)
    assert fence.release(key_of())
    again = create(REQUEST)
    assert (again.is_new, again.result) == (True, {"number": 2})
    assert create(REQUEST) == again
    assert [row["error_code"] for row in rows_of(fence, decision="ended")] == ["release"]
    assert fence.audit.check().ok, str(fence.audit.check())


def test_a_failure_that_only_the_object_store_knows_can_be_released(memory: World, tickets: Tickets) -> None:
    tickets.then = [TerminalError("never")]
    fence = memory.open()
    create = tickets.on(fence)
    with pytest.raises(TerminalError):
        create(REQUEST)
    memory.store.flush()
    assert fence.release(key_of())
    assert create(REQUEST).is_new
    assert fence.audit.check().ok


def test_what_is_sealed_cannot_be_released(world: World, tickets: Tickets) -> None:
    fence = world.open()
    first = tickets.on(fence)(REQUEST)
    with pytest.raises(ValidationError, match="cannot be released") as refused:
        fence.release(first.key)
    assert "revision" in refused.value.hint
    assert tickets.on(fence)(REQUEST) == first


def test_there_is_nothing_to_release_of_an_unknown_operation(world: World) -> None:
    fence = world.open()
    assert not fence.release(Operation(kind="ticket", source_id="nobody"))
    with pytest.raises(ValidationError, match="no decision row names the key"):
        fence.release(key_of())
    with pytest.raises(ValidationError, match="is no key"):
        fence.release("t-1")


# Cancellation


def cancelled(call: Callable[[], Any], when: Callable[[], Any], *, times: int = 1) -> None:
    """Runs the coroutine and cancels it once `when` holds; returns when it has been cancelled."""

    async def run() -> None:
        task = asyncio.ensure_future(call())
        while not when():
            assert not task.done(), task
            await asyncio.sleep(0.005)
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())


def test_a_cancelled_effect_gives_its_key_back(world: World, tickets: Tickets) -> None:
    fence = world.open()
    started: list[int] = []

    @fence.once(kind="ticket", key=lambda req: (req["id"], req["version"]))
    async def endless(req: Request) -> None:
        started.append(1)
        await asyncio.sleep(3600)

    cancelled(lambda: endless(REQUEST), lambda: started)
    record = record_of(fence, key_of())
    assert (record.state, record.error) == (State.RELEASED, "CancelledError")
    assert tickets.on(fence)(REQUEST).is_new


def test_a_task_cancelled_twice_gives_its_key_back_too(memory: World) -> None:
    fence = memory.open()
    started: list[int] = []

    @fence.once(kind="ticket", key=lambda req: (req["id"], req["version"]))
    async def endless(req: Request) -> None:
        started.append(1)
        await asyncio.sleep(3600)

    cancelled(lambda: endless(REQUEST), lambda: started, times=3)
    eventually(lambda: record_of(fence, key_of()).state is State.RELEASED)


def test_a_task_cancelled_while_it_waits_stops_at_once_and_holds_nothing(memory: World, tickets: Tickets) -> None:
    fence = memory.open()
    entered, go_on = threading.Event(), threading.Event()

    @fence.once(kind="ticket", key=lambda req: (req["id"], req["version"]), payload=lambda req: req)
    def slow(req: Request) -> int:
        entered.set()
        assert go_on.wait(60)
        return 7

    waiting = tickets.on_async(fence)
    with ThreadPoolExecutor(1) as pool:
        owner = pool.submit(slow, REQUEST)
        assert entered.wait(20)
        # The owner goes on only after the waiter is gone: had it waited for its claim, this would never end.
        cancelled(lambda: waiting(REQUEST), lambda: rows_of(fence, decision="in_flight"))
        go_on.set()
        first = owner.result(20)
    assert asyncio.run(waiting(REQUEST)) == first
    assert tickets.made == []
    assert fence.audit.check().ok


@pytest.mark.parametrize("times", [1, 2])
def test_a_claim_that_is_won_for_a_task_already_cancelled_is_given_back(memory: World, times: int) -> None:
    asked, go_on = threading.Event(), threading.Event()

    class Slow(Wrapped):
        def claim(self, claims: Any) -> Any:
            asked.set()
            assert go_on.wait(20)
            return self.inner.claim(claims)

    fence = memory.open(fences=Slow)
    create = Tickets().on_async(fence)

    async def run() -> None:
        task = asyncio.ensure_future(create(REQUEST))
        await asyncio.to_thread(asked.wait, 20)
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0.01)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    eventually(lambda: record_of(memory.open(), key_of()).state is State.RELEASED)


def test_a_task_cancelled_after_its_effect_is_sealed_first(memory: World, tickets: Tickets) -> None:
    asked, go_on = threading.Event(), threading.Event()

    class Slow(Wrapped):
        def seal(self, seals: Any) -> Any:
            asked.set()
            assert go_on.wait(20)
            return self.inner.seal(seals)

    create = tickets.on_async(memory.open(fences=Slow))

    async def run() -> None:
        task = asyncio.ensure_future(create(REQUEST))
        await asyncio.to_thread(asked.wait, 20)
        task.cancel()
        await asyncio.sleep(0.01)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert record_of(memory.open(), key_of()).state is State.SEALED
    assert tickets.on(memory.open())(REQUEST).result == {"number": 1}


def test_a_task_cancelled_while_its_result_is_stored_is_sealed_too(memory: World, tickets: Tickets) -> None:
    asked, go_on = threading.Event(), threading.Event()

    def slow_id(result: Any) -> str:
        asked.set()
        assert go_on.wait(20)
        return "e1"

    create = tickets.on_async(memory.open(), effect_id=slow_id)

    async def run() -> None:
        task = asyncio.ensure_future(create(REQUEST))
        await asyncio.to_thread(asked.wait, 20)
        task.cancel()
        await asyncio.sleep(0.01)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert tickets.on(memory.open())(REQUEST).effect_id == "e1"
    assert len(tickets.made) == 1


def test_a_coroutine_that_is_closed_gives_its_key_back(memory: World) -> None:
    fence = memory.open()
    started: list[int] = []

    @fence.once(kind="ticket", key=lambda req: (req["id"], req["version"]))
    async def endless(req: Request) -> None:
        started.append(1)
        await asyncio.get_running_loop().create_future()

    loop = asyncio.new_event_loop()
    coroutine = endless(REQUEST)
    task = loop.create_task(coroutine)
    while not started:
        loop.run_until_complete(asyncio.sleep(0.005))
    coroutine.close()
    assert record_of(fence, key_of()).state is State.RELEASED
    task.cancel()
    with suppress(BaseException):
        loop.run_until_complete(task)
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


def test_more_tasks_can_wait_for_a_key_than_there_are_threads(memory: World) -> None:
    fence = memory.open()
    made: list[Request] = []

    @fence.once(kind="ticket", key=lambda req: (req["id"], req["version"]))
    async def create(req: Request) -> int:
        made.append(req)
        await asyncio.sleep(0.05)
        return len(made)

    async def run() -> list[Receipt]:
        # One thread for everybody: whoever waits in it would keep the owner from sealing.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        return await asyncio.gather(*(create(REQUEST) for _ in range(40)))

    receipts = asyncio.run(run())
    assert len(made) == 1
    assert all(receipt == receipts[0] for receipt in receipts)


# recover= and effect_id=


def test_recover_is_not_asked_on_a_first_attempt(world: World, tickets: Tickets) -> None:
    create = tickets.on(world.open(), recover=lambda req: pytest.fail("nothing can have happened"))
    assert create(REQUEST).is_new
    assert create(REQUEST).decision is Decision.DUPLICATE


def test_what_recover_finds_is_sealed_instead_of_a_second_effect(world: World, tickets: Tickets) -> None:
    tickets.then = [ConnectionError("the reply was lost")]
    asked: list[Request] = []

    def recover(req: Request) -> Recovered:
        asked.append(req)
        return Recovered({"number": "found"}, effect_id="api-7")

    create = tickets.on(world.open(), recover=recover)
    with pytest.raises(ConnectionError):
        create(REQUEST)
    receipt = create(REQUEST)
    assert (receipt.result, receipt.effect_id, receipt.flags.attempt) == ({"number": "found"}, "api-7", 2)
    assert asked == tickets.made == [REQUEST]
    assert create(REQUEST) == receipt


def test_the_effect_is_performed_when_recover_finds_nothing(world: World, tickets: Tickets) -> None:
    tickets.then = [ConnectionError("down")]
    create = tickets.on(world.open(), recover=lambda req: None)
    with pytest.raises(ConnectionError):
        create(REQUEST)
    assert create(REQUEST).result == {"number": 2}


def test_recover_is_asked_on_a_takeover(world: World, tickets: Tickets) -> None:
    operation = Operation(kind="ticket", source_id="t-1", revision="1")
    abandon(world.open(), operation, REQUEST)
    world.let_leases_run_out()
    receipt = tickets.on(world.open(), recover=lambda req: Recovered("theirs"))(REQUEST)
    assert receipt.result == "theirs"
    assert receipt.flags.takeover
    assert tickets.made == []


def test_recover_is_asked_after_a_quarantined_key_was_released(world: World, tickets: Tickets) -> None:
    tickets.then = [ConnectionError("the reply was lost")]
    fence = world.open(lease={"max_attempts": 1})
    create = tickets.on(fence, recover=lambda req: Recovered("theirs"))
    with pytest.raises(ConnectionError):
        create(REQUEST)
    with pytest.raises(Quarantined):
        create(REQUEST)
    fence.release(key_of())
    assert create(REQUEST).result == "theirs"
    assert len(tickets.made) == 1


@pytest.mark.parametrize("wrong", [{"number": 1}, True, "found"])
def test_recover_must_say_recovered_or_none(memory: World, tickets: Tickets, wrong: object) -> None:
    tickets.then = [ConnectionError("down")]
    fence = memory.open()
    create = tickets.on(fence, recover=lambda req: wrong)
    with pytest.raises(ConnectionError):
        create(REQUEST)
    with pytest.raises(ValidationError, match=f"returned {type(wrong).__name__}") as refused:
        create(REQUEST)
    assert "Recovered" in refused.value.hint
    assert len(tickets.made) == 1
    assert record_of(fence, key_of()).state is State.RELEASED


def test_an_async_function_may_have_an_async_recover(memory: World, tickets: Tickets) -> None:
    async def recover(req: Request) -> Recovered:
        await asyncio.sleep(0)
        return Recovered("theirs")

    tickets.then = [ConnectionError("down")]
    create = tickets.on_async(memory.open(), recover=recover)
    with pytest.raises(ConnectionError):
        asyncio.run(create(REQUEST))
    assert asyncio.run(create(REQUEST)).result == "theirs"


def test_an_async_recover_of_a_plain_function_is_refused_when_it_is_decorated(memory: World, tickets: Tickets) -> None:
    async def recover(req: Request) -> None: ...

    with pytest.raises(ValidationError, match="is async, the function is not"):
        tickets.on(memory.open(), recover=recover)


def test_the_effect_id_is_made_out_of_the_result(world: World, tickets: Tickets) -> None:
    create = tickets.on(world.open(), effect_id=lambda result: f"ticket-{result['number']}")
    assert create(REQUEST).effect_id == create(REQUEST).effect_id == "ticket-1"


def test_the_effect_id_of_a_recovered_result_is_made_the_same_way(memory: World, tickets: Tickets) -> None:
    tickets.then = [ConnectionError("down"), ConnectionError("down")]
    found = iter([Recovered({"number": 9}), Recovered()])
    create = tickets.on(
        memory.open(), effect_id=lambda result: f"ticket-{result['number']}", recover=lambda req: next(found)
    )
    for version, expected in (("1", "ticket-9"), ("2", "ef_")):
        req = {**REQUEST, "version": version}
        with pytest.raises(ConnectionError):
            create(req)
        assert create(req).effect_id.startswith(expected)


def test_an_effect_without_an_id_gets_one_from_its_key(memory: World, solo: World, tickets: Tickets) -> None:
    one, other = tickets.on(memory.open())(REQUEST), tickets.on(solo.open())(REQUEST)
    assert one.effect_id == other.effect_id
    assert one.effect_id.startswith("ef_")
    assert tickets.on(memory.open())({**REQUEST, "version": "2"}).effect_id != one.effect_id


@pytest.mark.parametrize("bad", ["", "a\nb", "x" * 256])
def test_an_effect_id_that_cannot_be_stored_seals_nothing(memory: World, tickets: Tickets, bad: str) -> None:
    fence = memory.open()
    with pytest.raises(ValidationError, match="effect_id"):
        tickets.on(fence, effect_id=lambda result: bad)(REQUEST)
    assert record_of(fence, key_of()).state is State.RELEASED
    assert tickets.on(fence)(REQUEST).is_new


# Nested use


def test_the_same_key_inside_its_own_effect_is_refused_at_once(world: World) -> None:
    fence = world.open()

    @fence.once(kind="t", key=lambda n: "a", payload=lambda n: None)
    def recursive(n: int) -> int:
        with pytest.raises(NestedClaim, match="inside its own effect"):
            recursive(n + 1)
        with pytest.raises(NestedClaim), fence.claim(Operation(kind="t", source_id="a")):
            pass
        return n

    assert recursive(0).result == 0


def test_the_same_key_inside_its_own_async_effect_is_refused_at_once(memory: World) -> None:
    fence = memory.open()

    @fence.once(kind="t", key=lambda n: "a", payload=lambda n: None)
    async def recursive(n: int) -> int:
        with pytest.raises(NestedClaim):
            await recursive(n + 1)
        with pytest.raises(NestedClaim):
            await asyncio.create_task(recursive(n + 1))
        with pytest.raises(NestedClaim):
            async with fence.claim(Operation(kind="t", source_id="a")):
                pass
        return n

    assert asyncio.run(recursive(0)).result == 0


def test_a_helper_thread_with_the_callers_context_is_inside_the_effect_too(memory: World) -> None:
    @memory.open().once(kind="t", key=lambda n: "a", payload=lambda n: None)
    def recursive(n: int) -> int:
        with pytest.raises(NestedClaim):
            in_another_thread(lambda: recursive(n + 1), contextvars.copy_context())
        return n

    assert recursive(0).result == 0


def test_another_key_inside_an_effect_is_fine(world: World, tickets: Tickets) -> None:
    fence = world.open()
    create = tickets.on(fence)

    @fence.once(kind="outer", key=lambda req: req["id"])
    def outer(req: Request) -> Any:
        return [create(req).result, create({**req, "version": "2"}).result]

    assert outer(REQUEST).result == [{"number": 1}, {"number": 2}]


def test_another_revision_of_the_same_sequenced_source_inside_an_effect_is_refused(world: World) -> None:
    fence = world.open()

    @fence.once(kind="t", key=lambda n: ("a", None, n))
    def apply(n: int) -> int:
        with pytest.raises(NestedClaim):
            apply(n + 1)
        return n

    assert apply(1).result == 1


def test_a_key_is_free_again_for_whatever_outlives_its_effect(memory: World) -> None:
    fence = memory.open()

    @fence.once(kind="t", key=lambda: "a")
    async def effect() -> str:
        done = asyncio.Event()

        async def afterwards() -> Receipt:
            await done.wait()
            with pytest.raises(LeaseLost):
                ragfence.current_lease()
            return await effect()

        background.append((done, asyncio.create_task(afterwards())))
        return "x"

    background: list[tuple[asyncio.Event, asyncio.Task[Receipt]]] = []

    async def run() -> tuple[Receipt, Receipt]:
        first = await effect()
        done, task = background[0]
        done.set()
        return first, await task

    first, later = asyncio.run(run())
    assert later == first
    assert len(background) == 1


def test_an_effect_that_fails_by_nesting_can_be_tried_again(memory: World) -> None:
    nested = [True, False]

    @memory.open().once(kind="t", key=lambda n: "a", payload=lambda n: None)
    def recursive(n: int) -> Any:
        return recursive(n).result if nested.pop(0) else n

    with pytest.raises(NestedClaim):
        recursive(0)
    assert recursive(1).result == 1


# Results


class Opaque:
    pass


@pytest.mark.parametrize(
    "result", [Opaque(), {"a": {1, 2}}, b"bytes", {1: "key"}, math.nan, [math.inf], "\ud800", {"x": Opaque()}]
)
def test_a_result_that_is_no_json_seals_nothing_and_gives_the_key_back(
    memory: World, tickets: Tickets, result: object
) -> None:
    tickets.then = [result]
    fence = memory.open()
    create = tickets.on(fence)
    with pytest.raises(NotJson, match=key_of()):
        create(REQUEST)
    record = record_of(fence, key_of())
    assert (record.state, record.error) == (State.RELEASED, NotJson.code)
    assert [entry.name for entry in memory.objects.list("default/sealed/")] == []  # type: ignore[union-attr]
    assert create(REQUEST).flags.attempt == 2


def test_a_result_that_is_no_json_says_where_and_what_to_do(solo: World, tickets: Tickets) -> None:
    tickets.then = [{"rows": [1, Opaque()]}]
    with pytest.raises(NotJson, match=r"\$\.rows\[1\]: Opaque is no JSON") as refused:
        tickets.on(solo.open())(REQUEST)
    assert "return dicts, lists" in refused.value.hint


def test_an_async_result_that_is_no_json_gives_the_key_back_too(solo: World, tickets: Tickets) -> None:
    tickets.then = [Opaque()]
    fence = solo.open()
    with pytest.raises(NotJson):
        asyncio.run(tickets.on_async(fence)(REQUEST))
    assert record_of(fence, key_of()).state is State.RELEASED


@pytest.mark.parametrize("name", WITH_OBJECTS)
def test_a_large_result_is_an_object_named_by_its_digest(
    name: str, tickets: Tickets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = {"text": "x" * 5000}
    tickets.then = [large, large]
    with make_world(name, tmp_path, monkeypatch) as world:
        fence = world.open(results={"inline_max_bytes": 1000})
        create = tickets.on(fence)
        first = create(REQUEST)
        assert first.result == large
        assert create(REQUEST) == first
        assert create({**REQUEST, "version": "2"}).result == large
        assert len(record_of(fence, first.key).result) == 33
        assert world.objects is not None
        assert len(list(world.objects.list("default/results/"))) == 1, "equal results are one object"


def test_a_result_at_the_limit_stays_in_the_record(solo: World, tickets: Tickets) -> None:
    tickets.then = ["x" * 98, "x" * 99]
    create = tickets.on(solo.open(results={"inline_max_bytes": 100}))
    assert create(REQUEST).result == "x" * 98
    with pytest.raises(ResultTooBig):
        create({**REQUEST, "version": "2"})


def test_without_an_object_store_a_large_result_is_refused_and_the_key_given_back(
    solo: World, tickets: Tickets
) -> None:
    tickets.then = ["x" * 300_000]
    fence = solo.open()
    with pytest.raises(ResultTooBig, match="300,002 bytes; without an object store at most 262,144") as refused:
        tickets.on(fence)(REQUEST)
    assert "objects=" in refused.value.hint
    assert record_of(fence, key_of()).state is State.RELEASED


def test_a_result_above_the_policys_limit_is_refused_and_nothing_is_stored(memory: World, tickets: Tickets) -> None:
    tickets.then = ["x" * 3000]
    fence = memory.open(results={"inline_max_bytes": 1000, "max_bytes": 2000})
    with pytest.raises(ResultTooBig, match="3,002 bytes, the policy allows 2,000") as refused:
        tickets.on(fence)(REQUEST)
    assert "results.max_bytes" in refused.value.hint
    assert record_of(fence, key_of()).state is State.RELEASED
    assert [entry.name for entry in memory.objects.list("default/") if "epochs" not in entry.name] == []  # type: ignore[union-attr]


# The lease, from inside


def test_an_effect_can_see_its_lease(world: World) -> None:
    fence = world.open()
    seen: list[Any] = []

    @fence.once(kind="t", key=lambda: "a")
    def effect() -> str:
        lease = ragfence.current_lease()
        lease.check()
        seen.append(lease)
        return str(lease.fence)

    receipt = effect()
    assert (receipt.result, seen[0].key, seen[0].attempt) == (receipt.fence, receipt.key, 1)
    assert seen[0].fence.epoch > 0


def test_an_async_effect_can_see_its_lease_too(memory: World) -> None:
    @memory.open().once(kind="t", key=lambda: "a")
    async def effect() -> str:
        await asyncio.sleep(0)
        return ragfence.current_lease().key

    receipt = asyncio.run(effect())
    assert receipt.result == receipt.key


def test_outside_of_an_effect_there_is_no_lease(memory: World, tickets: Tickets) -> None:
    tickets.on(memory.open())(REQUEST)
    with pytest.raises(LeaseLost, match="no fenced effect"):
        ragfence.current_lease()


# Diffs of conflicting payloads

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


def test_a_diff_is_of_redacted_payloads_and_no_secret_is_stored_anywhere(
    tickets: Tickets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_world("embedded", tmp_path, monkeypatch) as world:
        fence = world.open(**DIFFS)
        first = {**REQUEST, "password": SECRET, "note": f"card {CARD}"}
        diff = conflicting(tickets.on(fence), first, {**first, "password": OTHER_SECRET, "text": "other"}).diff
        assert diff == [{"op": "replace", "path": "/text", "value": "other"}]
        tickets.then = [TerminalError(f"password={SECRET}")]
        with pytest.raises(TerminalError):
            tickets.on(fence)({**first, "version": "2"})
    stored = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
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
