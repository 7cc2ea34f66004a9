"""The store that fails on command must fail exactly as it was told: other tests rest on it."""

from __future__ import annotations

import pytest

from ragfence.errors import CommitUncertain, StoreUnavailable
from ragfence.stores.objects import Put
from ragfence.testing.memory import FaultyObjects, MemoryObjects


@pytest.fixture
def inner() -> MemoryObjects:
    return MemoryObjects()


@pytest.fixture
def store(inner: MemoryObjects) -> FaultyObjects:
    return FaultyObjects(inner)


def test_a_failure_before_leaves_the_store_alone(store: FaultyObjects, inner: MemoryObjects) -> None:
    store.on("put_new").fail_before()
    with pytest.raises(StoreUnavailable):
        store.put_new("t/one", b"1")
    assert inner.get("t/one") is None
    assert store.put_new("t/one", b"1") == Put(won=True)


def test_a_failure_after_a_put_is_uncertain_and_the_object_is_there(store: FaultyObjects, inner: MemoryObjects) -> None:
    store.on("put_new").fail_after()
    with pytest.raises(CommitUncertain):
        store.put_new("t/one", b"1")
    assert inner.get("t/one") == b"1"


def test_a_failure_after_a_delete_is_unavailable_and_the_object_is_gone(
    store: FaultyObjects, inner: MemoryObjects
) -> None:
    inner.put_new("t/one", b"1")
    store.on("delete", match="t/*").fail_after()
    with pytest.raises(StoreUnavailable):
        store.delete(["u/other", "t/one"])
    assert inner.get("t/one") is None


def test_only_what_matches_fails_and_only_so_often(store: FaultyObjects) -> None:
    fault = store.on("get", match="*/sealed/*").fail_before(times=2, error=TimeoutError("injected"))
    assert store.get("t/open/one") is None
    for _ in range(2):
        with pytest.raises(TimeoutError):
            store.get("t/sealed/one")
    assert store.get("t/sealed/one") is None
    assert fault.hits == 2


def test_a_listing_fails_by_its_prefix_until_healed(store: FaultyObjects) -> None:
    store.on("list", match="t/epochs/*").fail_before(times=None)
    for _ in range(3):
        with pytest.raises(StoreUnavailable):
            store.list("t/epochs/")
    assert list(store.list("t/sealed/")) == []
    store.heal()
    assert list(store.list("t/epochs/")) == []


def test_of_two_failures_the_first_given_comes_first(store: FaultyObjects) -> None:
    store.on("put_new").fail_before(error=KeyError)
    store.on("put_new", match="t/*").fail_before(error=IndexError)
    with pytest.raises(KeyError):
        store.put_new("t/one", b"1")
    with pytest.raises(IndexError):
        store.put_new("t/one", b"1")
    assert store.put_new("t/one", b"1").won


def test_a_delay_comes_before_whatever_else_happens(inner: MemoryObjects) -> None:
    slept: list[float] = []
    store = FaultyObjects(inner, sleep=slept.append)
    store.on("put_new").delay(1.5)
    store.on("put_new").fail_before()
    with pytest.raises(StoreUnavailable):
        store.put_new("t/one", b"1")
    store.put_new("t/one", b"1")
    store.get("t/one")
    assert slept == [1.5, 1.5]


def test_a_held_put_is_uncertain_and_lands_when_it_is_told_to(store: FaultyObjects, inner: MemoryObjects) -> None:
    late = store.on("put_new", match="t/*").hold()
    assert not late.caught
    with pytest.raises(LookupError):
        late.land()
    with pytest.raises(CommitUncertain):
        store.put_new("t/one", b"late")
    assert late.caught
    assert late.name == "t/one"
    assert inner.get("t/one") is None
    assert late.land() == Put(won=True)
    assert inner.get("t/one") == b"late"
    assert late.land() == Put(won=False, existing=b"late")


def test_a_held_put_that_lands_too_late_loses(store: FaultyObjects) -> None:
    late = store.on("put_new").hold()
    with pytest.raises(CommitUncertain):
        store.put_new("t/one", b"late")
    assert store.put_new("t/one", b"in time").won
    assert late.land() == Put(won=False, existing=b"in time")


def test_only_a_put_can_be_held(store: FaultyObjects) -> None:
    with pytest.raises(ValueError, match="only a put_new"):
        store.on("get").hold()


def test_calls_are_counted_also_when_they_fail(store: FaultyObjects) -> None:
    store.on("put_new").fail_before()
    with pytest.raises(StoreUnavailable):
        store.put_new("t/one", b"1")
    store.put_new("t/one", b"1")
    store.get("t/one")
    list(store.list(""))
    store.delete([])
    assert store.calls == {"put_new": 2, "get": 1, "list": 1, "delete": 1}
