"""What is particular to SQLite: the file, the processes that share it, and the ways a file can go wrong."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sqlite3
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ragfence.core.decisions import Granted, HeldRecords, InFlightVerdict, Mode, NotReadyVerdict, Replay
from ragfence.errors import FormatCorrupt, FormatTooNew, StoreUnavailable
from ragfence.stores.fences import Marker
from ragfence.stores.sqlite import SCHEMA_VERSION, SqliteFences
from ragfence.testing.contracts.fence_calls import (
    claim,
    granted,
    lease,
    read,
    rows_of,
    seal,
    sealed,
    start_epoch,
    verdict,
)

PROCESSES, KEYS = 8, 100


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "down" / "fences.db"


@pytest.fixture
def store(file: Path) -> Iterator[SqliteFences]:
    store = SqliteFences(file)
    start_epoch(store, 1)
    yield store
    store.close()


def test_the_file_is_written_through_to_the_disk(store: SqliteFences) -> None:
    db = store._connections.of_this_thread().db
    assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert db.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL


def _claim_all(file: Path, number: int) -> list[str]:
    """In a process of its own: which keys it was granted, and that everybody else's were in flight or sealed."""
    store = SqliteFences(file)
    won = []
    for key in range(KEYS):
        asked = claim(Mode.KEYED, f"{key}", by=f"{number} {key}", lease_ms=600_000)
        answer = verdict(store, asked)
        if isinstance(answer, Granted):
            assert answer.record.attempt == 1
            store.seal([seal(asked, answer, result=asked.token)])
            won.append(f"{key}")
        else:
            assert isinstance(answer, InFlightVerdict | Replay)
    store.close()
    return won


def test_of_many_processes_one_is_granted_each_key(store: SqliteFences, file: Path) -> None:
    # Not multiprocessing's own pool, which waits for ever when one of its processes dies.
    with ProcessPoolExecutor(PROCESSES, mp_context=multiprocessing.get_context("spawn")) as pool:
        won = list(pool.map(_claim_all, [file] * PROCESSES, range(PROCESSES)))
    assert sorted(key for keys in won for key in keys) == sorted(f"{key}" for key in range(KEYS))
    for number, keys in enumerate(won):
        for key in keys:
            record = read(store, claim(Mode.KEYED, key)).record
            assert record is not None
            assert record.result == claim(Mode.KEYED, by=f"{number} {key}").token
    rows = list(store.rows())
    assert len(rows) == len({row.row_id for row in rows}) == PROCESSES * KEYS + KEYS
    fences = {record.record.fence for record in store.scan()}
    assert fences == {(1, counter) for counter in range(1, KEYS + 1)}


def test_a_file_replaced_by_a_copy_is_another_run(store: SqliteFences, file: Path) -> None:
    sealed(store, claim(Mode.KEYED))
    store.close()
    shutil.copy(file, file.with_suffix(".copy"))
    file.with_suffix(".copy").replace(file)
    reopened = SqliteFences(file)
    assert verdict(reopened, claim(Mode.KEYED, by="two")) == NotReadyVerdict()
    assert set(reopened.markers()) == {Marker(1, ready=True, usable=False)}
    reopened.close()


def test_a_file_moved_within_its_disk_is_the_same_run(store: SqliteFences, file: Path) -> None:
    receipt = sealed(store, claim(Mode.KEYED))
    store.close()
    file.rename(file.with_name("moved.db"))
    moved = SqliteFences(file.with_name("moved.db"))
    assert verdict(moved, claim(Mode.KEYED, by="two")) == Replay(receipt)
    moved.close()


@pytest.mark.parametrize("how", ["replaced", "deleted"])
def test_an_open_store_notices_that_its_file_is_another_one(store: SqliteFences, file: Path, how: str) -> None:
    """Else it would go on deciding in a file that nobody else can see."""
    sealed(store, claim(Mode.KEYED))
    db = store._connections.of_this_thread().db
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    if how == "replaced":
        shutil.copy(file, file.with_suffix(".copy"))
        file.with_suffix(".copy").replace(file)
    else:
        for path in file.parent.glob("fences.db*"):
            path.unlink()
    assert verdict(store, claim(Mode.KEYED, by="two")) == NotReadyVerdict()
    start_epoch(store, 2)
    other = SqliteFences(file)
    first = granted(store, claim(Mode.KEYED, "B", by="one"))
    assert verdict(other, claim(Mode.KEYED, "B", by="two")) == InFlightVerdict(first.record.when_ms, first.record)
    other.close()


def test_a_newer_schema_is_refused_and_left_alone(store: SqliteFences, file: Path) -> None:
    receipt = sealed(store, claim(Mode.KEYED))
    store.close()
    _set_schema(file, SCHEMA_VERSION + 1)
    with pytest.raises(FormatTooNew, match=f"schema {SCHEMA_VERSION + 1}.*knows {SCHEMA_VERSION}"):
        SqliteFences(file)
    _set_schema(file, SCHEMA_VERSION)
    reopened = SqliteFences(file)
    assert verdict(reopened, claim(Mode.KEYED, by="two")) == Replay(receipt)
    reopened.close()


def test_a_child_does_not_use_the_connection_of_its_parent(store: SqliteFences) -> None:
    asked = claim(Mode.KEYED, "parent")
    first = granted(store, asked)
    parents = store._connections.of_this_thread().db
    said = _in_a_child(
        lambda: [
            store._connections.of_this_thread().db is not parents,
            verdict(store, claim(Mode.KEYED, "parent", by="child"))
            == InFlightVerdict(first.record.when_ms, first.record),
            isinstance(verdict(store, claim(Mode.KEYED, "child", by="child")), Granted),
            store.close() is None,
            parents.execute("SELECT 1").fetchone() == (1,),  # left open: only its owner may close it
        ]
    )
    assert said == "[True, True, True, True, True]"
    assert store._connections.of_this_thread().db is parents
    assert store.renew([lease(asked, first)]) == [True]
    assert isinstance(verdict(store, claim(Mode.KEYED, "child", by="parent")), InFlightVerdict)
    assert parents.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_child_made_while_other_threads_write_is_not_locked_out(tmp_path: Path) -> None:
    """SQLite remembers the locks of its process: a child must not be made in the middle of a transaction."""
    store = SqliteFences(tmp_path / "fences.db", solo=True, busy_timeout_s=3.0)
    inside = threading.Event()

    def write_slowly() -> None:
        with store._transaction() as shelf:
            shelf.next_counter(1)
            inside.set()
            time.sleep(0.5)  # the fork begins in here

    thread = threading.Thread(target=write_slowly)
    thread.start()
    inside.wait()
    said = _in_a_child(lambda: type(verdict(store, claim(Mode.KEYED, by="child"))).__name__)
    thread.join()
    assert "Granted" in said
    store.close()


def test_the_connection_of_a_thread_ends_with_the_thread(store: SqliteFences) -> None:
    for _ in range(10):
        thread = threading.Thread(target=store.markers)
        thread.start()
        thread.join()
    assert len(store._connections._open) <= 2


def test_a_thread_has_a_connection_of_its_own_and_close_closes_all(store: SqliteFences) -> None:
    seen: list[sqlite3.Connection] = []
    thread = threading.Thread(target=lambda: seen.append(store._connections.of_this_thread().db))
    thread.start()
    thread.join()
    mine = store._connections.of_this_thread().db
    assert seen[0] is not mine
    store.close()
    for connection in (mine, seen[0]):
        with pytest.raises(sqlite3.ProgrammingError):
            connection.execute("SELECT 1")


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StoreUnavailable, match="cannot create the folder") as refused:
        SqliteFences(tmp_path / "file" / "fences.db")
    assert str(tmp_path / "file") in str(refused.value)


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(StoreUnavailable) as refused:
        SqliteFences(tmp_path / "locked" / "fences.db")
    assert "writable" in refused.value.hint


def test_a_path_that_is_no_file_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="did not answer") as refused:
        SqliteFences(tmp_path)
    assert "writable" in refused.value.hint
    assert refused.value.retryable


def test_a_file_that_is_no_database_is_a_clear_error_and_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "fences.db"
    file.write_bytes(b"something else" * 1000)
    with pytest.raises(FormatCorrupt, match="not a database") as refused:
        SqliteFences(file)
    assert not refused.value.retryable
    assert file.read_bytes() == b"something else" * 1000


def test_a_full_disk_is_an_error_that_writes_nothing_and_passes(store: SqliteFences) -> None:
    db = store._connections.of_this_thread().db
    pages = db.execute("PRAGMA page_count").fetchone()[0]
    db.execute(f"PRAGMA max_page_count = {pages + 1}")
    batch = [claim(Mode.KEYED, f"{n}", by=f"{n}", payload=b"x" * 4000) for n in range(20)]
    with pytest.raises(StoreUnavailable, match="full"):
        store.claim(batch)
    assert [read(store, each) for each in batch] == [HeldRecords()] * 20
    assert rows_of(store) == []
    db.execute("PRAGMA max_page_count = 1000000")
    assert all(isinstance(answer, Granted) for answer in store.claim(batch))


def test_a_commit_that_fails_leaves_no_transaction_open(store: SqliteFences) -> None:
    db = store._connections.of_this_thread().db
    db.execute("PRAGMA foreign_keys = ON")
    db.execute("CREATE TABLE parent (id INTEGER PRIMARY KEY)")
    db.execute("CREATE TABLE child (id INTEGER REFERENCES parent DEFERRABLE INITIALLY DEFERRED)")
    with pytest.raises(StoreUnavailable), store._transaction() as shelf:
        shelf.db.execute("INSERT INTO child VALUES (1)")  # found out at the COMMIT
    assert isinstance(verdict(store, claim(Mode.KEYED)), Granted)


def test_a_writer_that_waits_too_long_for_the_file_gets_a_clear_error(store: SqliteFences, file: Path) -> None:
    impatient = SqliteFences(file, busy_timeout_s=0.05)
    with store._transaction(), pytest.raises(StoreUnavailable, match="locked"):
        impatient.claim([claim(Mode.KEYED)])
    assert isinstance(verdict(impatient, claim(Mode.KEYED)), Granted)
    impatient.close()


def _set_schema(file: Path, version: int) -> None:
    db = sqlite3.connect(file)
    db.execute(f"PRAGMA user_version = {version}")
    db.close()


def _in_a_child(act: Callable[[], object]) -> str:
    """What `act()` returned in a forked child, as text."""
    read_end, write_end = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: threads do not survive a fork, as we know
        pid = os.fork()
    if pid == 0:
        try:
            os.write(write_end, repr(act()).encode())
        except BaseException as error:
            os.write(write_end, repr(error).encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    return said


def test_many_open_a_new_file_at_once(tmp_path: Path) -> None:
    """Turning on WAL fails at once when somebody else is at it, whatever the busy timeout."""
    for turn in range(5):
        begin = threading.Barrier(8)

        def start(path: Path = tmp_path / f"{turn}.db", begin: threading.Barrier = begin) -> None:
            begin.wait()
            SqliteFences(path).close()

        with ThreadPoolExecutor(8) as pool:
            for started in [pool.submit(start) for _ in range(8)]:
                started.result()


def test_a_file_that_was_made_before_there_were_counts_is_counted_once(store: SqliteFences, file: Path) -> None:
    for number in range(3):
        sealed(store, claim(Mode.DOCUMENT, source=f"{number}", by=f"{number}"))
    sealed(store, claim(Mode.DOCUMENT, "gone", source="0", by="retract", retract=True))
    sealed(store, claim(Mode.SEQUENCED, source="not a document", by="sequence"))
    sealed(store, claim(Mode.KEYED, "key", by="key"), ttl_ms=3_600_000)
    granted(store, claim(Mode.KEYED, "held", by="held"))
    before, decisions = store.stats(), store.tallies().decisions()
    store.close()
    db = sqlite3.connect(file)
    for statement in ("INDEX records_pending", "INDEX sources_leased", "TABLE documents", "TABLE tallies"):
        db.execute(f"DROP {statement}")
    db.execute("DROP TABLE row_counts")
    db.execute("DROP INDEX decision_rows_order")
    db.close()
    _set_schema(file, 1)
    upgraded = SqliteFences(file)
    after = upgraded.stats()
    assert (after.documents, after.pending.count, after.rows) == (2, 1, before.rows)
    assert upgraded.tallies().decisions() == decisions
    sealed(upgraded, claim(Mode.DOCUMENT, source="another", by="another"))
    assert upgraded.stats().documents == 3
    upgraded.close()


def _steps(store: SqliteFences, call: Callable[[], Any]) -> int:
    """How much SQLite does for it, in units of ten instructions of its virtual machine."""
    taken = 0

    def step() -> None:
        nonlocal taken
        taken += 1

    db = store._connections.of_this_thread().db
    db.set_progress_handler(step, 10)
    call()
    db.set_progress_handler(None, 0)
    return taken


def _fill(store: SqliteFences, numbers: range) -> None:
    for mode in (Mode.DOCUMENT, Mode.KEYED):
        claims = [claim(mode, f"{n}", source=f"{n}", by=f"{mode} {n}", shard=n % 64) for n in numbers]
        answers = store.claim(claims)
        store.seal([seal(asked, answer) for asked, answer in zip(claims, answers, strict=True)])


def test_stats_take_as_many_steps_with_many_records_as_with_few(store: SqliteFences) -> None:
    _fill(store, range(100))
    few = _steps(store, store.stats)
    _fill(store, range(100, 2_000))
    assert store.stats().documents == 2_000
    assert _steps(store, store.stats) <= few * 1.1


def test_a_page_of_rows_takes_as_many_steps_among_many_rows_as_among_few(store: SqliteFences) -> None:
    """A drain reads all rows page by page, and the gauges read the first of them at every scrape."""
    _fill(store, range(100))
    few = _steps(store, lambda: store.row_entries(limit=100))
    _fill(store, range(100, 2_000))
    assert _steps(store, lambda: store.row_entries(limit=100)) <= few * 1.1
    middle = store.row_entries(limit=1_000)[-1].place
    assert _steps(store, lambda: store.row_entries(middle, limit=100)) <= few * 1.1
