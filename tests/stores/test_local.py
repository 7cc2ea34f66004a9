"""The local store where the contract does not reach: other processes, full disks, odd filesystems."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragfence.errors import CommitUncertain, StoreUnavailable, StoreUnsafe, UnknownStore, ValidationError
from ragfence.stores import local
from ragfence.stores.local import MACHINE, LocalObjects, Temp, TempFiles
from ragfence.stores.objects import Put
from tests.stores.racing_objects import NAMES, race, self_evident, watch

WRITERS, READERS = 8, 2


@pytest.fixture
def store(tmp_path: Path) -> LocalObjects:
    return LocalObjects(tmp_path / "store")


def temp_files(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "store" / ".tmp").iterdir())


def names(store: LocalObjects, prefix: str = "", **asked: Any) -> list[str]:
    return [entry.name for entry in store.list(prefix, **asked)]


def test_of_many_processes_one_wins_each_name_and_readers_see_only_whole_objects(tmp_path: Path) -> None:
    processes = multiprocessing.get_context("spawn")
    together, finished = processes.Barrier(WRITERS), processes.Event()
    won, seen = processes.SimpleQueue(), processes.SimpleQueue()
    writers = [processes.Process(target=race, args=(tmp_path, number, together, won)) for number in range(WRITERS)]
    readers = [processes.Process(target=watch, args=(tmp_path, finished, seen)) for _ in range(READERS)]
    try:
        for process in (*writers, *readers):
            process.start()
        for process in writers:
            process.join()
        finished.set()
        for process in readers:
            process.join()
        assert [process.exitcode for process in (*writers, *readers)] == [0] * (WRITERS + READERS)
        winners = sorted((number, writer) for writer, mine in (won.get() for _ in writers) for number in mine)
        assert [number for number, _ in winners] == list(range(NAMES))
        store = LocalObjects(tmp_path)
        for number, writer in winners:
            assert store.get(f"race/{number % 3}/{number}") == self_evident(writer, number)
        assert [seen.get() for _ in readers] == [(NAMES, [])] * READERS
        assert list((tmp_path / ".tmp").iterdir()) == []
    finally:
        for process in (*writers, *readers):
            process.kill()
            process.join()
            process.close()
        won.close()
        seen.close()


def test_what_is_being_written_is_not_listed(
    store: LocalObjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, seen = os.link, []

    def linking(source: Path, target: Path) -> None:
        seen.append((len(temp_files(tmp_path)), names(store), store.get("t/one")))
        link(source, target)

    monkeypatch.setattr(os, "link", linking)
    store.put_new("t/one", b"1")
    assert seen == [(1, [], None)]
    assert names(store) == ["t/one"]


def test_neither_winners_nor_losers_leave_temporary_files(store: LocalObjects, tmp_path: Path) -> None:
    store.put_new("t/one", b"1")
    store.put_new("t/one", b"2")
    assert temp_files(tmp_path) == []


def test_a_loser_at_the_last_moment_gets_the_winners_bytes(
    store: LocalObjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_temp = TempFiles.write

    def somebody_is_faster(self: TempFiles, data: bytes) -> Temp:
        temp = write_temp(self, data)
        (tmp_path / "store" / "objects" / "one").write_bytes(b"theirs")
        return temp

    monkeypatch.setattr(TempFiles, "write", somebody_is_faster)
    assert store.put_new("one", b"mine") == Put(won=False, existing=b"theirs")
    assert store.get("one") == b"theirs"
    assert temp_files(tmp_path) == []


def test_data_and_folders_are_synced_before_a_put_is_answered(
    store: LocalObjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, link = os.fsync, os.link

    def syncing(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        done.append("data" if path.parent.name == ".tmp" else f"sync {path.name}")
        fsync(descriptor)

    def linking(source: Path, target: Path) -> None:
        done.append("link")
        link(source, target)

    monkeypatch.setattr(os, "fsync", syncing)
    monkeypatch.setattr(os, "link", linking)
    store.put_new("t/u/one", b"1")
    assert done == ["data", "sync objects", "sync t", "link", "sync u"]
    done.clear()
    store.put_new("t/u/two", b"2")
    assert done == ["data", "link", "sync u"]


def test_a_folder_that_somebody_else_made_is_synced_as_well(
    store: LocalObjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "store" / "objects" / "t").mkdir()
    synced: list[Path] = []
    monkeypatch.setattr(local, "_sync_folder", synced.append)
    store.put_new("t/one", b"1")
    assert [folder.name for folder in synced] == ["objects", "t"]


def test_a_loser_makes_the_winners_object_durable_before_it_answers(
    store: LocalObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put_new("t/one", b"1")
    synced: list[Path] = []
    monkeypatch.setattr(local, "_sync_folder", synced.append)
    assert not store.put_new("t/one", b"2").won
    assert [folder.name for folder in synced] == ["t"]


def test_a_delete_is_durable(store: LocalObjects, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put_new("t/one", b"1")
    store.put_new("t/two", b"2")
    synced: list[Path] = []
    monkeypatch.setattr(local, "_sync_folder", synced.append)
    store.delete(["t/one", "t/two", "u/absent"])
    assert [folder.name for folder in synced] == ["t"]


def test_stale_temporary_files_are_swept_at_open_and_young_ones_are_not(tmp_path: Path) -> None:
    LocalObjects(tmp_path)
    old, young = tmp_path / ".tmp" / "old", tmp_path / ".tmp" / "young"
    for path in (old, young):
        path.write_bytes(b"half")
    two_days_ago = time.time() - 2 * 24 * 3600
    os.utime(old, (two_days_ago, two_days_ago))
    LocalObjects(tmp_path)
    assert list((tmp_path / ".tmp").iterdir()) == [young]


def test_a_delete_also_removes_the_name_that_a_killed_writer_left(
    store: LocalObjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as killed:
        killed.setattr(Temp, "discard", lambda temp: os.close(temp.descriptor))
        store.put_new("t/one", b"secret")
    (left,) = temp_files(tmp_path)
    of_another_machine = left.rename(left.with_name("0123-another"))
    store.put_new("t/two", b"2")
    store.delete(["t/two"])
    assert temp_files(tmp_path) == [of_another_machine]
    synced: list[Path] = []
    monkeypatch.setattr(local, "_sync_folder", synced.append)
    store.delete(["t/one"])
    assert temp_files(tmp_path) == []
    assert {folder.name for folder in synced} == {"t", ".tmp"}


def test_what_a_killed_writer_left_half_written_goes_with_the_next_delete_and_that_of_a_live_one_stays(
    store: LocalObjects, tmp_path: Path
) -> None:
    writing = TempFiles(tmp_path / "store" / ".tmp")
    dead, alive = writing.write(b"secret"), writing.write(b"mine")
    os.close(dead.descriptor)  # as the kernel does when it kills
    store.delete([])
    assert temp_files(tmp_path) == [alive.path]
    alive.discard()


def test_what_another_machine_writes_is_young_for_a_day_whoever_locks_it(store: LocalObjects, tmp_path: Path) -> None:
    theirs = tmp_path / "store" / ".tmp" / f"{MACHINE[::-1]}-1"
    theirs.write_bytes(b"half")
    store.delete([])
    assert temp_files(tmp_path) == [theirs]
    yesterday = time.time() - 25 * 3600
    os.utime(theirs, (yesterday, yesterday))
    store.delete([])
    assert temp_files(tmp_path) == []


def test_a_writer_whose_file_is_swept_before_it_is_held_takes_another(
    store: LocalObjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock, swept = fcntl.flock, []

    def locking(descriptor: int, how: int) -> None:
        if not swept:
            swept.extend(temp_files(tmp_path))
            swept[0].unlink()
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", locking)
    assert store.put_new("one", b"1").won
    assert store.get("one") == b"1"
    assert len(swept) == 1


def test_where_there_are_no_locks_objects_are_written_and_nothing_young_is_swept(
    store: LocalObjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", failing(errno.ENOLCK))
    temp = TempFiles(tmp_path / "store" / ".tmp").write(b"mine")
    assert store.put_new("one", b"1").won
    store.delete(["one"])
    assert temp_files(tmp_path) == [temp.path]
    temp.discard()


def test_a_second_name_that_cannot_be_removed_is_told(
    store: LocalObjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put_new("one", b"secret")
    os.link(tmp_path / "store" / "objects" / "one", tmp_path / "store" / ".tmp" / "left")
    with monkeypatch.context() as broken:
        broken.setattr(os, "unlink", failing(errno.EACCES))
        with pytest.raises(StoreUnavailable, match="killed writers left"):
            store.delete(["one"])
    store.delete(["one"])
    assert temp_files(tmp_path) == []


@pytest.mark.parametrize(("first", "second"), [("a/b", "a/b/c"), ("a/b", "a/b/c/d"), ("a/b/c", "a/b"), ("a/b/c", "a")])
def test_a_name_that_would_be_object_and_folder_is_refused(
    store: LocalObjects, tmp_path: Path, first: str, second: str
) -> None:
    store.put_new(first, b"1")
    with pytest.raises(ValidationError, match="both an object and the folder"):
        store.put_new(second, b"2")
    assert names(store) == [first]
    assert temp_files(tmp_path) == []


def failing(code: int) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize(
    ("code", "hint"),
    [(errno.ENOSPC, "free some space"), (errno.EDQUOT, "free some space"), (errno.EACCES, "write access")],
)
@pytest.mark.parametrize("call", ["fsync", "link"])
def test_a_disk_that_refuses_is_a_transient_error_with_a_hint_and_leaves_nothing(
    store: LocalObjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int, hint: str
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(os, call, failing(code))
        with pytest.raises(StoreUnavailable) as caught:
            store.put_new("one", b"1")
    assert hint in caught.value.hint
    assert str(tmp_path) in caught.value.hint
    assert store.get("one") is None
    assert temp_files(tmp_path) == []
    assert store.put_new("one", b"1").won


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.EXDEV])
def test_a_filesystem_without_links_is_refused(store: LocalObjects, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(os, "link", failing(code))
    with pytest.raises(StoreUnsafe, match="cannot link"):
        store.put_new("one", b"1")


def test_a_link_nobody_can_vouch_for_is_uncertain(store: LocalObjects, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", failing(errno.EIO))
    with pytest.raises(CommitUncertain):
        store.put_new("one", b"1")


def test_an_object_whose_folder_cannot_be_synced_is_uncertain_and_stays(
    store: LocalObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(local, "_sync_folder", failing(errno.EIO))
        with pytest.raises(CommitUncertain, match="could not be synced"):
            store.put_new("one", b"1")
    assert store.put_new("one", b"1") == Put(won=False, existing=b"1")


def test_our_own_link_whose_reply_was_lost_is_won(store: LocalObjects, monkeypatch: pytest.MonkeyPatch) -> None:
    """An NFS client repeats the call and gets EEXIST for what it did itself."""
    link = os.link

    def linking(source: Path, target: Path) -> None:
        link(source, target)
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(os, "link", linking)
    assert store.put_new("one", b"1") == Put(won=True)
    assert store.get("one") == b"1"


def test_folders_removed_by_hand_are_made_again(store: LocalObjects, tmp_path: Path) -> None:
    store.put_new("t/u/one", b"1")
    store.delete(["t/u/one"])
    (tmp_path / "store" / "objects" / "t" / "u").rmdir()
    (tmp_path / "store" / "objects" / "t").rmdir()
    assert store.put_new("t/u/one", b"2").won
    assert store.get("t/u/one") == b"2"


def test_a_file_is_no_folder_to_open(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UnknownStore, match="cannot keep objects in"):
            LocalObjects(root)


def test_a_folder_that_may_not_be_written_is_said_at_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "mkdir", failing(errno.EACCES))
    with pytest.raises(StoreUnavailable) as caught:
        LocalObjects(tmp_path / "new")
    assert "write access" in caught.value.hint


def test_files_of_others_are_not_listed(store: LocalObjects, tmp_path: Path) -> None:
    store.put_new("t/one", b"1")
    (tmp_path / "store" / "objects" / "t" / "read me.txt").write_text("by hand")
    assert names(store) == ["t/one"]


def test_the_url_is_a_file_url(tmp_path: Path) -> None:
    assert LocalObjects(tmp_path / "a b").url == (tmp_path / "a b").as_uri()


def test_a_listing_reads_only_the_folders_it_needs(
    store: LocalObjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a/1/x", "a/2/x", "a/3/x", "b/1/x", "ab/1/x"):
        store.put_new(name, b"")
    read: list[str] = []
    scandir = os.scandir

    def scanning(folder: Path) -> Any:
        read.append(Path(folder).relative_to(tmp_path / "store" / "objects").as_posix())
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", scanning)
    assert names(store, "a/2/") == ["a/2/x"]
    assert read == ["a/2"]
    read.clear()
    assert names(store, "a/", start_after="a/2") == ["a/2/x", "a/3/x"]
    assert read == ["a", "a/2", "a/3"]
    read.clear()
    assert names(store, "a/", start_after="a/2/z", limit=1) == ["a/3/x"]
    assert read == ["a", "a/2", "a/3"]
    read.clear()
    assert names(store, "a", limit=1) == ["a/1/x"]
    assert read == [".", "a", "a/1"]


PART = st.text(st.sampled_from("aB0-.%~"), min_size=1, max_size=3).filter(lambda part: part.strip("."))
NAME = st.lists(PART, min_size=1, max_size=3).map("/".join)


@settings(deadline=None)
@given(st.sets(NAME, max_size=20), NAME, st.text(st.sampled_from("aB0-.%~/"), max_size=4), st.integers(0, 5))
def test_a_listing_equals_the_sorted_names(
    tmp_path_factory: pytest.TempPathFactory, wanted: set[str], prefix: str, after: str, limit: int
) -> None:
    """For all names, prefixes, starts and limits: what is listed is what sorting the names would give."""
    store = LocalObjects(tmp_path_factory.mktemp("objects"))
    there = sorted(name for name in wanted if not any(other.startswith(f"{name}/") for other in wanted))
    for name in there:
        path = store._objects / name  # not by put_new, which would sync
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    for beginning in ("", prefix[:1], prefix):
        expected = [name for name in there if name.startswith(beginning) and name > after]
        assert names(store, beginning, start_after=after) == expected
        assert names(store, beginning, start_after=after, limit=limit) == expected[:limit]
