"""Everything that happened is announced, at least once, in order per source, and not again when an epoch begins."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ragfence
from ragfence import Document, Fence, Operation, Policy
from ragfence.core.backoff import Backoff
from ragfence.engine.epochs import Epochs
from ragfence.errors import Conflict, GateFailed, Quarantined, TerminalError, TransportUnavailable, ValidationError
from ragfence.indexes.gates import Gates
from ragfence.notify import Announcement, Notifier
from ragfence.notify.notifier import NOTIFY_POINTS
from ragfence.queues.sql import SqlTransport
from ragfence.stores.objects import ObjectStore

AT_ONCE = Backoff(attempts=2, first_s=0.0, longest_s=0.0)


@pytest.fixture
def fence(tmp_path: Path) -> Iterator[Fence]:
    with ragfence.open(tmp_path / "store", policy=Policy(lease={"max_attempts": 1})) as opened:
        yield opened


class Receiver:
    """Remembers what it took; refuses or fails for some sources."""

    def __init__(self) -> None:
        self.taken: list[Announcement] = []
        self.fails: dict[str, Exception] = {}
        self.calls = 0

    def __call__(self, one: Announcement) -> None:
        self.calls += 1
        error = self.fails.get(str(one.data.get("doc_id"))) or self.fails.get("*")
        if error is not None:
            raise error
        self.taken.append(one)

    def told(self) -> list[tuple[str, str]]:
        """(type, doc_id) since the last call."""
        taken, self.taken = self.taken, []
        return [(one.type.partition(".")[2], one.data.get("doc_id", "")) for one in taken]


def put(fence: Fence, doc_id: str, text: str) -> None:
    fence.documents.ingest(Document(doc_id=doc_id, text=text))


def notifier(fence: Fence, to: Any, **given: Any) -> Notifier:
    return Notifier(fence, to=to, **{"history": True, "retry": AT_ONCE, "sample": 0, **given})


def test_documents_are_announced_once_in_the_order_of_each(fence: Fence) -> None:
    got = Receiver()
    notify = notifier(fence, got)
    for text in ("one", "two", "three"):
        put(fence, "a", text)
        put(fence, "b", text)
    fence.documents.retract("a")
    assert notify.run_once().sent == 7
    by_source = [one.data["fence"].split(".") for one in got.taken if one.data["doc_id"] == "a"]
    assert by_source == sorted(by_source, key=lambda fence: (int(fence[0]), int(fence[1])))
    assert Counter(got.told()) == {("ingested", "a"): 3, ("ingested", "b"): 3, ("retracted", "a"): 1}
    assert notify.run_once().sent == 0
    assert notifier(fence, got).run_once().sent == 0  # another process of the same name


@pytest.mark.parametrize("change", ["compact", "purge", "hydrate"])
def test_an_epoch_announces_nothing_again_and_loses_nothing(fence: Fence, change: str) -> None:
    got = Receiver()
    notify = notifier(fence, got)
    put(fence, "a", "one")
    put(fence, "x", "one")
    notify.run_once()
    got.told()
    put(fence, "a", "two")
    put(fence, "b", "one")
    if change == "compact":
        fence.documents.compact()
    elif change == "purge":
        fence.documents.purge("x")
    else:
        fence.hydrate()
    put(fence, "c", "one")
    notify.run_once()
    expected = {("ingested", "a"): 1, ("ingested", "b"): 1, ("ingested", "c"): 1}
    assert Counter(got.told()) == (expected | {("purged", "x"): 1} if change == "purge" else expected)
    fence.hydrate()
    fence.documents.compact()
    notify.run_once()
    assert got.told() == []


def test_several_epochs_between_two_rounds(fence: Fence) -> None:
    got = Receiver()
    notify = notifier(fence, got)
    put(fence, "a", "0")
    notify.run_once()
    for number in range(1, 4):
        put(fence, "a", str(number))
        put(fence, f"b{number}", "x")
        fence.documents.purge("b1") if number == 2 else fence.hydrate()
    got.told()
    notify.run_once()
    assert Counter(got.told()) == {
        ("ingested", "a"): 3,
        ("purged", "b1"): 1,
        ("ingested", "b2"): 1,
        ("ingested", "b3"): 1,
    }


def test_what_a_new_epoch_may_void_is_announced_when_its_list_is_complete(fence: Fence) -> None:
    got = Receiver()
    notify = notifier(fence, got)
    put(fence, "a", "one")
    notify.run_once()
    put(fence, "a", "two")
    objects = fence.inspector.objects
    assert objects is not None
    epochs = Epochs(fence.tenant, objects)
    epochs.begin(notify.memory.state.epoch + 1, "another process")
    assert notify.run_once().sent == 0
    fence.hydrate()
    assert notify.run_once().sent == 1


def test_the_first_round_begins_with_what_happens_from_then_on(fence: Fence) -> None:
    got = Receiver()
    put(fence, "a", "one")
    fence.hydrate()
    put(fence, "b", "one")
    notify = notifier(fence, got, history=False)
    assert notify.run_once().began
    put(fence, "b", "two")
    fence.documents.compact()
    put(fence, "c", "one")
    notify.run_once()
    assert got.told() == [("ingested", "b"), ("ingested", "c")]


def test_the_first_round_waits_for_an_epoch_that_is_beginning(fence: Fence) -> None:
    got = Receiver()
    put(fence, "a", "one")
    objects = fence.inspector.objects
    assert objects is not None
    epochs = Epochs(fence.tenant, objects)
    epochs.begin(epochs.known().newest_complete + 1, "another process")
    notify = notifier(fence, got, history=False)
    assert not notify.run_once().began
    fence.hydrate()
    assert notify.run_once().began
    put(fence, "b", "one")
    notify.run_once()
    assert got.told() == [("ingested", "b")]


def test_builds_swaps_and_refused_swaps_are_announced(fence: Fence) -> None:
    got = Receiver()
    notify = notifier(fence, got)
    for number in range(10):
        put(fence, f"d{number}", f"text number {number}")
    first = fence.indexes.build()
    fence.aliases.swap("docs", first.index_hash)
    for number in range(9):
        fence.documents.retract(f"d{number}")
    second = fence.indexes.build()
    for _ in range(2):  # the same refusal twice is one event
        with pytest.raises(GateFailed):
            fence.aliases.swap("docs", second.index_hash)
    fence.aliases.swap("docs", second.index_hash, gates=Gates(max_shrinkage=1.0))
    fence.aliases.rollback("docs")
    notify.run_once()
    found = [one for one in got.taken if not one.type.startswith("document.")]
    assert Counter(one.type for one in found) == {"index.sealed": 2, "gate.failed": 1, "alias.swapped": 3}
    (refused,) = (one for one in found if one.type == "gate.failed")
    assert (refused.data["alias"], refused.data["index_hash"]) == ("docs", second.index_hash)
    assert [each["gate"] for each in refused.data["failed"]] == ["shrinkage"]
    assert [one.data["change"] for one in found if one.type == "alias.swapped"] == ["swap", "swap", "rollback"]
    assert notify.run_once().sent == 0


def test_conflicts_quarantines_and_duplicates_are_announced(fence: Fence) -> None:
    got = Receiver()
    operation = Operation(kind="ticket", source_id="t1")
    with fence.claim(operation, payload=1) as op:
        op.seal()
    with pytest.raises(Conflict), fence.claim(operation, payload=2):
        pass
    bad = Operation(kind="ticket", source_id="t2")
    with pytest.raises(OSError, match="away"), fence.claim(bad):
        raise OSError("away")
    for _ in range(3):
        with pytest.raises(Quarantined), fence.claim(bad, wait_s=0):
            pass
    for _ in range(30):
        with fence.claim(operation, payload=1):
            pass
    notify = notifier(fence, got, sample=1)
    notify.run_once()
    kinds = Counter(one.type for one in got.taken)
    assert kinds == {
        "conflict.detected": 1,
        "key.quarantined": 1,
        "duplicate.detected": 30,
        "abnormal_duplicate_rate": 1,
    }
    (rate,) = (one for one in got.taken if one.type == "abnormal_duplicate_rate")
    assert rate.data["threshold"] == 20
    assert rate.data["suggestion"]
    fence.audit.drain(every_day=True)
    assert notifier(fence, got, sample=1).run_once().sent == 0


def test_files_of_the_ledger_that_replace_others_announce_nothing_again(tmp_path: Path) -> None:
    got = Receiver()
    with ragfence.open(tmp_path / "store", policy=Policy(audit={"min_files": 2})) as fence:
        notify = notifier(fence, got, drain_s=1e-9)
        operation = Operation(kind="ticket", source_id="t1")
        with fence.claim(operation, payload=1) as op:
            op.seal()
        for payload in range(2, 6):
            with pytest.raises(Conflict), fence.claim(operation, payload=payload):
                pass
            assert notify.run_once().sent == 1
        assert notify.run_once().sent == 0


def test_an_event_that_is_refused_holds_up_its_own_source_alone(fence: Fence) -> None:
    got = Receiver()
    notify = notifier(fence, got)
    got.fails["a"] = TerminalError("no")
    put(fence, "a", "one")
    put(fence, "b", "one")
    put(fence, "a", "two")
    assert notify.run_once()[:2] == (1, 2)
    assert got.told() == [("ingested", "b")]
    assert got.calls == 2  # the second event of a was not tried, and a refusal is not repeated
    put(fence, "c", "one")
    notify = notifier(fence, got)  # also in another process
    assert notify.run_once()[:2] == (1, 2)
    fence.hydrate()
    fence.documents.compact()
    notify.run_once()
    put(fence, "d", "one")
    got.told()
    got.fails.clear()
    notify.run_once()
    assert Counter(got.told()) == {("ingested", "a"): 2, ("ingested", "d"): 1}
    assert notify.run_once().sent == 0
    assert notify.memory.state.held == {}


def test_an_event_that_is_never_taken_is_dropped_after_its_time(fence: Fence) -> None:
    got = Receiver()
    got.fails["a"] = TerminalError("no")
    put(fence, "a", "one")
    put(fence, "a", "two")
    notify = notifier(fence, got, give_up_s=1e-9)
    reports = [notify.run_once() for _ in range(5)]
    assert sum(report.dropped for report in reports) == 2
    assert notify.memory.state.dropped == 2
    got.fails.clear()
    put(fence, "a", "three")
    assert notify.run_once().sent == 1


def test_an_outage_of_the_receiver_drops_nothing_and_does_not_try_everything(fence: Fence) -> None:
    got = Receiver()
    got.fails["*"] = TransportUnavailable("away")
    for number in range(20):
        put(fence, f"d{number}", "one")
    notify = notifier(fence, got)
    assert notify.run_once().sent == 0
    assert got.calls == 3 * AT_ONCE.attempts
    fence.hydrate()
    notify.run_once()
    got.fails.clear()
    assert notify.run_once().sent == 20
    assert len(set(got.told())) == 20


@pytest.mark.parametrize("point", NOTIFY_POINTS)
@pytest.mark.parametrize("times", [1, 3])
def test_a_notifier_that_is_killed_anywhere_loses_nothing(tmp_path: Path, point: str, times: int) -> None:
    store, file = tmp_path / "store", tmp_path / "events"
    with ragfence.open(store) as fence:
        for number in range(3):
            put(fence, f"d{number}", "one")
        fence.hydrate()
        put(fence, "d0", "two")
    if point == "notify_saved":
        times = 1
    words = [str(store), str(file), point, str(times)]
    killed = subprocess.run([sys.executable, "-m", "tests.notify.notify_worker", *words], check=False, timeout=120)
    assert killed.returncode == -9
    before = file.read_text().splitlines() if file.exists() else []
    got = Receiver()
    with ragfence.open(store) as fence:
        # The lock of the one that was killed lasts a minute.
        fence.inspector.fences.unlock("notify:default", _token_of(fence))
        fence.hydrate()
        put(fence, "d1", "two")
        notifier(fence, got).run_once()
    ids = [line.split()[0] for line in before] + [one.event_id for one in got.taken]
    documents = [line.split()[2] for line in before] + [one.data["doc_id"] for one in got.taken]
    assert len(set(ids)) == 5
    assert set(documents) == {"d0", "d1", "d2"}
    if point == "notify_saved":
        assert len(ids) == 5  # what is remembered is not sent again


def _token_of(fence: Fence) -> str:
    import sqlite3

    fences: Any = fence.inspector.fences
    with sqlite3.connect(fences.path) as db:
        row = db.execute("SELECT token FROM locks WHERE name = 'notify:default'").fetchone()
    return str(row[0]) if row else ""


def test_of_two_notifiers_of_one_name_one_is_at_work(fence: Fence) -> None:
    put(fence, "a", "one")
    reports = []

    def send(one: Announcement) -> None:
        reports.append(notifier(fence, print).run_once())

    assert notifier(fence, send).run_once().sent == 1
    assert [report.busy for report in reports] == [True]


def test_a_notifier_whose_memory_was_overtaken_reads_it_again(fence: Fence) -> None:
    """Its lock expired while it stood still."""
    got = Receiver()
    put(fence, "a", "one")

    def send(one: Announcement) -> None:
        got(one)
        slow._fences.unlock(slow._lock_name, slow._token)
        notifier(fence, got).run_once()

    slow = notifier(fence, send)
    assert slow.run_once().busy
    assert len(got.taken) == 2  # at least once
    assert slow.run_once().sent == 0


def test_each_name_has_a_memory_of_its_own(fence: Fence) -> None:
    put(fence, "a", "one")
    got = Receiver()
    assert notifier(fence, got, name="one").run_once().sent == 1
    assert notifier(fence, got, name="two").run_once().sent == 1
    assert got.taken[0].event_id == got.taken[1].event_id
    with pytest.raises(ValidationError):
        notifier(fence, got, name="../x")


def test_events_go_into_a_queue(fence: Fence, tmp_path: Path) -> None:
    queue = SqlTransport(f"sqlite:///{tmp_path / 'queue.db'}")
    put(fence, "a", "one")
    notifier(fence, queue).run_once()
    (message,) = queue.receive(1, 0)
    assert (message.source_id, message.body["type"], message.body["id"]) == (
        "a",
        "document.ingested",
        message.event_id,
    )


def test_only_some_types(fence: Fence) -> None:
    got = Receiver()
    put(fence, "a", "one")
    fence.documents.retract("a")
    assert notifier(fence, got, types=("document.retracted",)).run_once().sent == 1
    assert got.told() == [("retracted", "a")]


class Counted:
    """Counts the requests to an object store."""

    def __init__(self, inner: ObjectStore) -> None:
        self._inner, self.requests = inner, 0

    def __getattr__(self, name: str) -> Any:
        if name in ("get", "list", "put_new", "delete"):
            self.requests += 1
        return getattr(self._inner, name)


def test_a_round_costs_the_same_however_much_is_stored(tmp_path: Path) -> None:
    costs = []
    for count in (5, 200):
        with ragfence.open(tmp_path / str(count)) as fence:
            for number in range(count):
                put(fence, f"d{number}", "one")
            notify = notifier(fence, lambda one: None)
            notify.run_once()
            counted = Counted(notify.memory._objects)
            for feed in notify._feeds:
                feed._objects = counted  # type: ignore[attr-defined]
            documents: Any = notify._feeds[0]
            documents._epochs._objects = counted
            assert notify.run_once().sent == 0
            idle = counted.requests
            put(fence, "new", "one")
            assert notify.run_once().sent == 1
            costs.append((idle, counted.requests))
    assert costs[0] == costs[1]


def test_the_memory_is_read_from_its_last_checkpoint(fence: Fence, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragfence.notify.memory.SMALL_BYTES", 0)
    got = Receiver()
    for number in range(30):
        put(fence, f"d{number}", "one")
        notifier(fence, got).run_once()
    assert len(got.told()) == 30
    objects = fence.inspector.objects
    assert objects is not None
    assert len(list(objects.list("default/notify/"))) < 20


def test_no_name_of_a_document_is_in_the_memory(fence: Fence) -> None:
    put(fence, "very-private", "one")
    got = Receiver()
    got.fails["very-private"] = TerminalError("no")
    notifier(fence, got).run_once()
    objects = fence.inspector.objects
    assert objects is not None
    stored = [objects.get(entry.name) or b"" for entry in objects.list("default/notify/")]
    assert stored
    assert not any(b"very-private" in data for data in stored)
