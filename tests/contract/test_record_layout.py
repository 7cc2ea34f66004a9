"""The stored form of key records: what is empty takes no room, and Lua writes the bytes that Python would write."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ragfence
from ragfence.core.decision_rows import Row
from ragfence.core.decisions import Claim, Granted, HeldRecords, Mode, Replay, Sealed
from ragfence.core.layout import MAX_COUNTER, MAX_EPOCH, SEAL_POSITION, TOKEN_BYTES, RowKind, State
from ragfence.core.operations import FenceNumber
from ragfence.core.records import KeyRecord, decode_record
from ragfence.engine.epochs import Epochs
from ragfence.engine.hydration import Hydrator
from ragfence.engine.segment_log import PlainCodec, SegmentLoader
from ragfence.errors import FormatCorrupt, StoreUnsafe
from ragfence.stores.redis.codec import Names, pack_lease, pack_seal
from ragfence.stores.redis.store import RedisFences
from ragfence.testing.clock import START_MS, VirtualClock
from ragfence.testing.contracts.fence_calls import ALL_MODES, SHARD, claim, granted, lease, read, seal, start_epoch
from ragfence.testing.memory import MemoryFences, MemoryObjects
from tests.contract.conftest import CLOCK_KEY
from tests.servers import RedisServer

NAMES = Names("default")
BYTES_IN_REDIS = 200
RECORD = KeyRecord(
    State.HELD,
    b"f" * 16,
    b"t" * TOKEN_BYTES,
    FenceNumber(MAX_EPOCH, MAX_COUNTER),
    65_535,
    2**48 - 1,
    2**48 - 2,
    "ticket",
)
OPTIONAL = {"owner": "höst:1", "error": "CARD.declined", "effect_id": "ef_1", "payload": b'{"a":1}'}
COMBINATIONS = [
    dict(itertools.compress(OPTIONAL.items(), kept)) for kept in itertools.product((True, False), repeat=len(OPTIONAL))
]
COMBINED = pytest.mark.parametrize("optional", COMBINATIONS, ids=lambda fields: "+".join(fields) or "nothing")


class Twins:
    """The same calls to Redis and to the pure rules, and what both then hold."""

    def __init__(self, server: RedisServer) -> None:
        self.client = server.client()
        self.client.flushall()
        self.clock = VirtualClock(on_change=lambda now: self.client.set(CLOCK_KEY, now))
        self.theirs = RedisFences(server.url, test_clock=CLOCK_KEY)
        self.ours = MemoryFences(clock=self.clock)
        for store in (self.ours, self.theirs):
            start_epoch(store, MAX_EPOCH)

    def call(self, name: str, items: list[Any], *args: Any) -> list[Any]:
        answers = [getattr(store, name)(items, *args) for store in (self.ours, self.theirs)]
        assert answers[0] == answers[1]
        return answers[0]

    def stored(self, asked: Claim) -> bytes:
        """The bytes that hold the record, the same in both."""
        if asked.mode is Mode.KEYED:
            ours, theirs = self.ours.content.records[asked.key][0], self.client.get(NAMES.record(asked.key))
        else:
            ours = self.ours.content.sources[SHARD, asked.source][0]
            theirs = self.client.get(NAMES.source(SHARD, asked.source))
        assert theirs == ours
        return ours

    def row(self, token: bytes, position: int) -> Row:
        """The row, the same in both, byte for byte."""
        wanted = [
            [row for row in store.rows() if (row.token, row.position) == (token, position)]
            for store in (self.ours, self.theirs)
        ]
        assert wanted[0] == wanted[1]
        (row,) = wanted[0]
        return row

    def close(self) -> None:
        self.theirs.close()
        self.client.close()


@pytest.fixture
def twins(any_redis: RedisServer) -> Iterator[Twins]:
    twins = Twins(any_redis)
    yield twins
    twins.close()


@COMBINED
@pytest.mark.parametrize("state", list(State), ids=lambda state: state.name.lower())
@pytest.mark.parametrize("result", [b"", b"j1", bytes(300)], ids=len)
def test_a_record_comes_back_as_it_was(optional: dict[str, Any], state: State, result: bytes) -> None:
    record = RECORD._replace(state=state, result=result, **optional)
    data = record.encode()
    assert decode_record(data) == record
    lengths = sum(4 if field == "payload" else 1 for field in optional)
    values = sum(len(value if isinstance(value, bytes) else value.encode()) for value in optional.values())
    assert len(data) == 56 + 1 + len("ticket") + lengths + values + len(result)


@COMBINED
def test_a_record_that_was_cut_off_is_refused(optional: dict[str, Any]) -> None:
    data = RECORD._replace(**optional).encode()
    for size in range(len(data)):
        with pytest.raises(FormatCorrupt):
            decode_record(data[:size])


@COMBINED
@ALL_MODES
@pytest.mark.parametrize("failed", [False, True], ids=["sealed", "failed"])
def test_lua_writes_what_python_would_write(twins: Twins, optional: dict[str, Any], mode: Mode, failed: bool) -> None:
    """A claim, a release that leaves an error, a second claim that keeps it, a takeover, a renewal, a seal, replays."""
    claimed = {field: optional[field] for field in ("owner", "payload") if field in optional}
    error, effect_id = optional.get("error", ""), optional.get("effect_id", "")
    first, second, third = (claim(mode, by=by, **claimed) for by in ("one", "two", "three"))
    (won,) = twins.call("claim", [first])
    twins.stored(first)
    twins.call("release", [lease(first, won)], error)
    (again,) = twins.call("claim", [second])
    assert (again.record.owner, again.record.error) == (optional.get("owner", ""), error)
    twins.stored(second)
    twins.clock.advance(second.lease_ms)
    (taken,) = twins.call("claim", [third])
    assert taken.takeover
    assert taken.record == again.record._replace(
        token=third.token, fence=FenceNumber(MAX_EPOCH, 3), attempt=3, when_ms=twins.clock() + third.lease_ms
    )
    twins.stored(third)
    twins.clock.advance(1)
    assert twins.call("renew", [lease(third, taken)]) == [True]
    twins.stored(third)
    end = seal(third, taken, failed=failed, error=error, effect_id=effect_id, result=b"j1")
    (outcome,) = twins.call("seal", [end])
    assert isinstance(outcome, Sealed)
    assert outcome.record == taken.record._replace(
        state=State.FAILED if failed else State.SEALED,
        when_ms=twins.clock(),
        owner="",
        error=error,
        effect_id=effect_id,
        result=b"j1",
    )
    twins.stored(third)
    row = twins.row(third.token, SEAL_POSITION)
    assert (row.effect_id, row.error_code, row.fence) == (effect_id, error if failed else "", taken.record.fence)
    # Alone it is answered by claim.lua, in a batch by an MGET and `row_of_replay`.
    alone, *batch = (claim(mode, by=by, **claimed) for by in ("four", "five", "six"))
    assert twins.call("claim", [alone]) + twins.call("claim", batch) == [Replay(outcome.record)] * 3
    for replayed in (alone, *batch):
        row = twins.row(replayed.token, 0)
        assert (row.kind, row.effect_id, row.winner) == (RowKind.DUPLICATE, effect_id, third.token)
        assert (row.fence, row.attempt, row.sealed_at_ms) == (taken.record.fence, 3, twins.clock())


@COMBINED
def test_a_batch_is_written_as_single_calls_are(twins: Twins, optional: dict[str, Any]) -> None:
    """Claims and seals of one shard that are read ahead."""
    claimed = {field: optional[field] for field in ("owner", "payload") if field in optional}
    ending = {field: optional[field] for field in ("error", "effect_id") if field in optional}
    asked = [claim(Mode.KEYED, f"r{n}", by=f"by {n}", **claimed) for n in range(4)]
    answers = twins.call("claim", asked)
    assert [answer.record.fence.counter for answer in answers] == [1, 2, 3, 4]
    for each in asked:
        twins.stored(each)
    twins.call("seal", [seal(each, answer, **ending) for each, answer in zip(asked, answers, strict=True)])
    for each in asked:
        assert decode_record(twins.stored(each)).payload == optional.get("payload", b"")
        assert twins.row(each.token, SEAL_POSITION).effect_id == optional.get("effect_id", "")


@pytest.mark.parametrize("objects", [True, False], ids=["objects", "solo"])
def test_a_sealed_record_takes_at_most_200_bytes(any_redis: RedisServer, tmp_path: Path, objects: bool) -> None:
    """A kind of six letters and a result of 36 characters; the keys' names are part of it."""
    with any_redis.client() as client:
        client.flushall()
        fence = ragfence.open(any_redis.url, objects=tmp_path / "objects" if objects else None)

        @fence.once(kind="ticket", key=lambda request: request["id"])
        def create(request: dict[str, Any]) -> str:
            return f"{request['id']:036d}"

        for number in range(100):
            assert create({"id": number}).result == f"{number:036d}"
        names = list(client.scan_iter(NAMES.pattern(b"k")))
        assert len(names) == 100
        assert {decode_record(client.get(name)).state for name in names} == {State.SEALED}
        # Not every one: these servers were built with libc's malloc, which hands out a larger piece now and then.
        assert statistics.median(client.memory_usage(name, samples=0) for name in names) <= BYTES_IN_REDIS
        fence.close()


@pytest.mark.parametrize(
    "fence",
    [
        FenceNumber(MAX_EPOCH + 1, 1),
        FenceNumber(2**56, 1),
        FenceNumber(-1, 1),
        FenceNumber(1, MAX_COUNTER + 1),
        FenceNumber(1, -1),
    ],
    ids=str,
)
def test_numbers_that_do_not_fit_are_refused_not_cut_off(fence: FenceNumber) -> None:
    asked = claim(Mode.KEYED)
    won = Granted(RECORD._replace(fence=fence))
    row = Row(asked.token, 0, START_MS, RowKind.NEW, asked.key, asked.fingerprint, fence=fence)
    for write in (won.record.encode, row.encode, lambda: pack_seal(seal(asked, won))):
        with pytest.raises(StoreUnsafe, match="out of range"):
            write()
    if fence.epoch != 1:
        with pytest.raises(StoreUnsafe, match="out of range"):
            pack_lease(lease(asked, won))


@ALL_MODES
def test_a_shard_that_counted_to_the_end_grants_nothing_more(any_redis: RedisServer, mode: Mode) -> None:
    with any_redis.client() as client:
        client.flushall()
        store = RedisFences(any_redis.url)
        start_epoch(store, 1)
        client.set(NAMES.counters[SHARD], MAX_COUNTER - 1)
        with pytest.raises(StoreUnsafe, match=r"fence number .* is out of range"):
            store.claim([claim(Mode.KEYED, name, by=name) for name in "ABC"])
        assert list(store.scan()) == []  # none of them
        client.set(NAMES.counters[SHARD], MAX_COUNTER - 1)
        assert granted(store, claim(mode, by="last")).record.fence == FenceNumber(1, MAX_COUNTER)
        beyond = claim(mode, by="beyond", source="another")
        with pytest.raises(StoreUnsafe, match=r"fence number .* is out of range"):
            store.claim([beyond])
        assert read(store, beyond) == HeldRecords()
        store.close()


def test_a_fence_without_objects_refuses_an_epoch_that_records_cannot_hold(any_redis: RedisServer) -> None:
    """A marker of another run, left behind by a clock that was far ahead."""
    ours = MemoryFences(solo=True)
    ours.content.markers[SHARD] = (True, MAX_EPOCH, "another run")
    with pytest.raises(StoreUnsafe, match=r"epoch .* is out of range"):
        ours.claim([claim(Mode.KEYED)])
    with any_redis.client() as client:
        client.flushall()
        client.set(NAMES.markers[SHARD], f"R:{MAX_EPOCH}:{'0' * 40}")
        theirs = RedisFences(any_redis.url, solo=True)
        with pytest.raises(StoreUnsafe, match=r"epoch .* is out of range"):
            theirs.claim([claim(Mode.KEYED)])
        theirs.close()
        assert list(client.scan_iter(NAMES.pattern(b"k"))) == []


def test_no_epoch_begins_that_records_cannot_hold() -> None:
    objects = MemoryObjects()
    epochs = Epochs("default", objects)
    assert epochs.begin(MAX_EPOCH, "token")
    before = [entry.name for entry in objects.list("")]
    hydrator = Hydrator(MemoryFences(), epochs, SegmentLoader(objects, PlainCodec()))
    with pytest.raises(StoreUnsafe, match=r"epoch .* is out of range"):
        hydrator.try_hydrate()
    assert [entry.name for entry in objects.list("")] == before
