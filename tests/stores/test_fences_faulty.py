"""The fence store that fails on command must fail exactly as it was told: other tests rest on it."""

from __future__ import annotations

import typing

import pytest

from ragfence.core.decisions import Granted, HeldRecords, Mode, Replay, Sealed
from ragfence.errors import StoreUnavailable
from ragfence.stores.fences import FenceStore
from ragfence.testing.contracts.fence_calls import claim, granted, lease, read, rows_of, seal, start_epoch, verdict
from ragfence.testing.faults import FaultyFences, FenceMethod
from ragfence.testing.memory import MemoryFences


@pytest.fixture
def inner() -> MemoryFences:
    inner = MemoryFences()
    start_epoch(inner, 1)
    return inner


@pytest.fixture
def store(inner: MemoryFences) -> FaultyFences:
    return FaultyFences(inner)


def test_every_method_of_a_fence_store_can_be_made_to_fail(store: FaultyFences) -> None:
    methods = {name for part in FenceStore.__mro__[:5] for name in vars(part) if not name.startswith("_")} - {
        "url",
        "tenant",
        "close",
    }
    assert set(typing.get_args(FenceMethod)) == methods
    arguments = {
        **dict.fromkeys(
            ("claim", "replays", "renew", "seal", "release", "reset_attempts", "read", "forget", "record", "drop_rows"),
            ([],),
        ),
        **dict.fromkeys(("heads", "begin_epoch", "finish_epoch", "forget_markers"), (2,)),
        "load": (2, []),
        "lock": ("name", "token", 1),
        "unlock": ("name", "token"),
    }
    for method in typing.get_args(FenceMethod):
        store.on(method).fail_before()
        with pytest.raises(StoreUnavailable, match=f"{method} .*injected, before"):
            getattr(store, method)(*arguments.get(method, ()))
    assert store.calls == dict.fromkeys(methods, 1)


def test_a_failure_before_leaves_the_store_alone(store: FaultyFences, inner: MemoryFences) -> None:
    store.on("claim").fail_before()
    with pytest.raises(StoreUnavailable):
        store.claim([claim(Mode.KEYED)])
    assert read(inner, claim(Mode.KEYED)) == HeldRecords()
    assert rows_of(inner) == []
    assert isinstance(verdict(store, claim(Mode.KEYED)), Granted)


def test_a_failure_after_is_a_lost_reply(store: FaultyFences) -> None:
    asked = claim(Mode.KEYED)
    first = granted(store, asked)
    store.on("seal").fail_after()
    with pytest.raises(StoreUnavailable):
        store.seal([seal(asked, first)])
    assert isinstance(verdict(store, claim(Mode.KEYED, by="two")), Replay)
    assert isinstance(store.seal([seal(asked, first)])[0], Sealed)


def test_only_what_matches_fails_and_only_so_often(store: FaultyFences) -> None:
    fault = store.on("claim", match="2a*").fail_before(times=2, error=TimeoutError("injected"))
    assert isinstance(verdict(store, claim(Mode.KEYED, shard=41)), Granted)
    for _ in range(2):
        with pytest.raises(TimeoutError):
            store.claim([claim(Mode.KEYED, "B", shard=41), claim(Mode.KEYED, shard=42)])
    assert isinstance(verdict(store, claim(Mode.KEYED, shard=42)), Granted)
    assert fault.hits == 2


def test_a_lock_fails_by_its_name(store: FaultyFences) -> None:
    store.on("lock", match="hydration").fail_before(times=None)
    assert store.lock("compaction", "token", 1000)
    for _ in range(3):
        with pytest.raises(StoreUnavailable):
            store.lock("hydration", "token", 1000)
    store.heal()
    assert store.lock("hydration", "token", 1000)


def test_a_delay_comes_before_whatever_else_happens(inner: MemoryFences) -> None:
    slept: list[float] = []
    store = FaultyFences(inner, sleep=slept.append)
    store.on("renew").delay(1.5, times=2)
    store.on("renew").fail_after()
    asked = claim(Mode.KEYED)
    first = granted(store, asked)
    with pytest.raises(StoreUnavailable):
        store.renew([lease(asked, first)])
    assert [store.renew([lease(asked, first)]) for _ in range(2)] == [[True], [True]]
    assert slept == [1.5, 1.5]


def test_calls_are_counted_also_when_they_fail(store: FaultyFences) -> None:
    store.on("claim").fail_before()
    with pytest.raises(StoreUnavailable):
        store.claim([claim(Mode.KEYED)])
    store.claim([claim(Mode.KEYED), claim(Mode.KEYED, "B")])
    list(store.rows())
    assert store.calls == {"claim": 2, "rows": 1}
