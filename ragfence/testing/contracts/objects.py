"""What every `ObjectStore` must do, as tests. A store of your own proves itself with a few lines:

    class TestMyObjects(ObjectStoreContract):
        concurrent_writers = 16

        @pytest.fixture
        def store(self, tmp_path):
            return MyObjects(tmp_path)          # empty, and of its own for each test

Call `pytest.register_assert_rewrite("ragfence.testing.contracts.objects")` in your conftest for readable failures.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest

from ragfence.errors import ValidationError
from ragfence.stores.objects import ObjectStore, Put

# In byte order, in which "-" and "." come before "/", and "0" after it: a walk over folders gets this wrong.
TRICKY_NAMES = (
    *("a%41", "a-b", "a-b-c/d", "a-c-d", "a-c/e", "a.b", "a/b", "a/b-c", "a/c-d", "a/c/d"),
    *("a0", "a=b", "a@b", "a~"),
)

NO_NAMES = (
    *("", "/", "/a", "a/", "a//b", ".", "..", "a/.", "a/../b", "../a", "a b", "ä", "a\n", "a\\b", "a*", "a\x00"),
    *("a" * 256, "a/" * 450 + "a"),
)


class ObjectListingContract:
    """The part about `list`, for whoever has several ways of listing."""

    @pytest.fixture
    def store(self) -> ObjectStore:
        raise NotImplementedError("override the fixture `store` in the subclass")

    def test_an_entry_tells_size_and_time(self, store: ObjectStore) -> None:
        store.put_new("t/one", b"12345")
        (entry,) = store.list("t/")
        assert (entry.name, entry.size) == ("t/one", 5)
        assert abs(entry.modified_ms - time.time() * 1000) < 24 * 3600 * 1000  # milliseconds, since 1970

    def test_a_listing_is_in_byte_order_whatever_the_folders(self, store: ObjectStore) -> None:
        _put_all(store, TRICKY_NAMES)
        assert _names(store) == sorted(TRICKY_NAMES)

    def test_a_listing_starts_after_any_name_there_is_or_could_be(self, store: ObjectStore) -> None:
        _put_all(store, TRICKY_NAMES)
        for after in (*TRICKY_NAMES, "a", "a/", "a-", "a-b/", "a/c", "a/c/d0", "a/~", "A", "b", "zz/z"):
            expected = sorted(name for name in TRICKY_NAMES if name > after)
            assert _names(store, start_after=after) == expected, after

    def test_a_prefix_may_end_inside_a_name(self, store: ObjectStore) -> None:
        _put_all(store, TRICKY_NAMES)
        for prefix in ("", "a", "a-", "a-b", "a-b/", "a/", "a/b", "a/c", "a/c/", "a/c/d", "a0", "b", "b/", "a0/"):
            expected = sorted(name for name in TRICKY_NAMES if name.startswith(prefix))
            assert _names(store, prefix) == expected, prefix

    def test_prefix_start_and_limit_work_together(self, store: ObjectStore) -> None:
        _put_all(store, TRICKY_NAMES)
        for prefix, after in (("a", "a-b"), ("a/", "a-b"), ("a/", "a/b"), ("a-b", "a-b"), ("a/", "a0"), ("a/c/", "a")):
            expected = sorted(name for name in TRICKY_NAMES if name.startswith(prefix) and name > after)
            for limit in (1, 2, 100):
                got = _names(store, prefix, start_after=after, limit=limit)
                assert got == expected[:limit], (prefix, after, limit)

    def test_a_limit_cuts_the_listing(self, store: ObjectStore) -> None:
        _put_all(store, TRICKY_NAMES)
        for limit in (0, 1, 5, len(TRICKY_NAMES), 100):
            assert _names(store, limit=limit) == sorted(TRICKY_NAMES)[:limit]

    def test_a_log_is_read_from_its_end_with_one_entry(self, store: ObjectStore) -> None:
        _put_all(store, [f"t/catalog/{10**20 - 1 - n:020d}" for n in range(12)])
        assert _names(store, "t/catalog/", limit=1) == [f"t/catalog/{10**20 - 12:020d}"]

    def test_what_was_put_is_in_the_next_listing(self, store: ObjectStore) -> None:
        expected: list[str] = []
        for number in range(10):
            name = f"t/epochs/{number:020d}/begun"
            store.put_new(name, b"")
            expected.append(name)
            assert _names(store, "t/epochs/") == expected

    def test_a_prefix_no_name_can_have_is_refused_at_once(self, store: ObjectStore) -> None:
        for prefix in ("/", "/a", "a//", "../", "a/./b", "a b", "ä"):
            with pytest.raises(ValidationError):
                store.list(prefix)  # also if nobody iterates


class ObjectStoreContract(ObjectListingContract):
    """Subclass it and provide the fixture `store`: an empty store for each test.

    `concurrent_writers` is how many threads race for a name; 1 skips the races, with `no_race_reason`.
    """

    concurrent_writers: ClassVar[int] = 16
    race_rounds: ClassVar[int] = 10
    no_race_reason: ClassVar[str] = "this store does not claim to be safe under races"

    def test_what_was_put_is_what_is_got(self, store: ObjectStore) -> None:
        assert store.put_new("t/one", b"1") == Put(won=True)
        assert store.get("t/one") == b"1"

    def test_an_absent_object_is_none(self, store: ObjectStore) -> None:
        assert store.get("t/nothing") is None

    def test_a_folder_is_no_object(self, store: ObjectStore) -> None:
        store.put_new("t/folder/one", b"1")
        assert store.get("t/folder") is None
        assert store.get("t/folder/one/below") is None

    def test_a_second_put_loses_and_gets_the_bytes_of_the_first(self, store: ObjectStore) -> None:
        store.put_new("t/one", b"first")
        assert store.put_new("t/one", b"second") == Put(won=False, existing=b"first")
        assert store.get("t/one") == b"first"

    def test_a_second_put_of_the_same_bytes_loses_too(self, store: ObjectStore) -> None:
        store.put_new("t/one", b"same")
        assert store.put_new("t/one", b"same") == Put(won=False, existing=b"same")

    def test_an_empty_object_exists(self, store: ObjectStore) -> None:
        assert store.put_new("t/empty", b"").won
        assert store.get("t/empty") == b""
        assert [entry.size for entry in store.list("t/")] == [0]
        assert store.put_new("t/empty", b"full") == Put(won=False, existing=b"")

    def test_every_byte_comes_back(self, store: ObjectStore) -> None:
        data = bytes(range(256)) + b"\r\n\x00\r\n"
        store.put_new("t/binary", data)
        assert store.get("t/binary") == data

    def test_a_large_object_comes_back_whole(self, store: ObjectStore) -> None:
        data = bytes(range(251)) * (5 * 1024 * 1024 // 251 + 1)
        assert store.put_new("t/large", data).won
        assert store.get("t/large") == data
        assert [entry.size for entry in store.list("t/")] == [len(data)]

    def test_a_deleted_name_can_be_put_again(self, store: ObjectStore) -> None:
        store.put_new("t/one", b"1")
        store.delete(["t/one"])
        assert store.get("t/one") is None
        assert list(store.list("t/")) == []
        assert store.put_new("t/one", b"2").won
        assert store.get("t/one") == b"2"

    def test_deleting_what_is_absent_is_fine(self, store: ObjectStore) -> None:
        store.put_new("t/one", b"1")
        store.delete(["t/one", "t/never", "u/never/either"])
        store.delete(["t/one"])
        store.delete([])
        assert list(store.list("")) == []

    def test_a_delete_takes_nothing_else_along(self, store: ObjectStore) -> None:
        for name in ("t/a", "t/a-b", "t/ab", "t/b/a"):
            store.put_new(name, b"1")
        store.delete(["t/a", "t/b"])
        assert _names(store) == ["t/a-b", "t/ab", "t/b/a"]

    def test_a_name_that_is_none_is_refused(self, store: ObjectStore) -> None:
        for name in NO_NAMES:
            with pytest.raises(ValidationError):
                store.put_new(name, b"1")
            with pytest.raises(ValidationError):
                store.get(name)
            with pytest.raises(ValidationError):
                store.delete(["t/fine", name])
        assert list(store.list("")) == []

    def test_a_name_may_be_long_and_odd(self, store: ObjectStore) -> None:
        names = ["a" * 255, "/".join(["b" * 89] * 10), ".hidden", "...", "c.", "~", "%2F", "@="]
        for name in names:
            assert store.put_new(name, b"1").won, name
            assert store.get(name) == b"1"
        assert _names(store) == sorted(names)

    def test_names_differ_by_case(self, store: ObjectStore) -> None:
        assert store.put_new("t/a", b"small").won
        assert store.put_new("t/A", b"large").won
        assert _names(store) == ["t/A", "t/a"]

    def test_the_url_is_for_people(self, store: ObjectStore) -> None:
        assert "://" in store.url
        assert "@" not in store.url

    def test_of_many_writers_one_wins_and_all_others_get_its_bytes(self, store: ObjectStore) -> None:
        if self.concurrent_writers < 2:
            pytest.skip(self.no_race_reason)
        start = threading.Barrier(self.concurrent_writers)

        def write(number: int, round_: int) -> tuple[bytes, Put]:
            data = b"%d:" % number + bytes([number]) * 50_000
            start.wait()
            return data, store.put_new(f"t/race/{round_}", data)

        with ThreadPoolExecutor(self.concurrent_writers) as pool:
            for round_ in range(self.race_rounds):
                writers = range(self.concurrent_writers)
                outcomes = list(pool.map(write, writers, [round_] * len(writers)))
                winners = [data for data, put in outcomes if put.won]
                assert len(winners) == 1
                assert {put.existing for _, put in outcomes if not put.won} == {winners[0]}
                assert store.get(f"t/race/{round_}") == winners[0]


def _put_all(store: ObjectStore, names: tuple[str, ...] | list[str]) -> None:
    for name in reversed(names):
        assert store.put_new(name, name.encode()).won


def _names(store: ObjectStore, prefix: str = "", *, start_after: str = "", limit: int | None = None) -> list[str]:
    return [entry.name for entry in store.list(prefix, start_after=start_after, limit=limit)]
