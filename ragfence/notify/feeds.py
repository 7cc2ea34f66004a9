"""Where events come from: the log of documents, the builds, the catalog, the gates, and the ledger.

Each feed yields what the memory does not know as announced, in the order of each source. What was not delivered is
yielded again in the next round.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from ragfence.audit.ledger import DAY_MS, DRAINED, Ledger, Part, RowQuery, day_of
from ragfence.core.decisions import QUARANTINED
from ragfence.core.operations import FenceNumber, encoded
from ragfence.documents.identity import SNIPPET_BYTES
from ragfence.documents.log import INGEST, METADATA, PURGE, RETRACT, REVIVE, address_in
from ragfence.documents.parquet import whole_rows
from ragfence.engine.epochs import Epochs
from ragfence.indexes.build_log import SEALED, BuildLog
from ragfence.indexes.catalog import Catalog
from ragfence.indexes.gate_log import GateLog
from ragfence.notify.announcements import Announcement, announce
from ragfence.notify.memory import NotifyMemory
from ragfence.stores.fences import FenceStore
from ragfence.stores.object_log import number_in
from ragfence.stores.objects import ObjectStore
from ragfence.telemetry.logs import MIN_DUPLICATES, MIN_FACTOR, DuplicateRates

WHOLE_S: Final = 60.0
"""How often the segments are listed although no head has moved: one may be committed and never sealed."""
BUILDS_S: Final = 30.0
ENTRIES: Final = 1000
"""Of a log, in one round."""
LOOKED_BACK_DAYS: Final = 8
"""Days of the ledger whose files are still replaced; see `audit/drain.py`."""
_TYPES: Final = {
    INGEST: "document.ingested",
    REVIVE: "document.ingested",
    METADATA: "document.ingested",
    RETRACT: "document.retracted",
    PURGE: "document.purged",
}


class PendingAnnouncement(NamedTuple):
    """An announcement, and the function that records its delivery in the memory."""

    announcement: Announcement
    delivered: Callable[[], None]


class Feed(ABC):
    @abstractmethod
    def pending(self, *, skip: bool = False) -> Iterable[PendingAnnouncement]:
        """What was not announced. `skip`: everything that is there now counts as announced, and nothing is yielded."""

    @abstractmethod
    def settle(self, undelivered: set[str], *, tried: bool = True) -> None:
        """Ends a round. `undelivered`: the ids of events that were not delivered. `tried`: each source was tried."""


class _Move(NamedTuple):
    source: bytes
    fence: FenceNumber
    segment: str
    announcement: Announcement


class DocumentFeed(Feed):
    """Head moves of documents, from the segments of the current epoch. Segments have no order; moves of a source do.

    When an epoch ends, its remaining moves are in the list of the next one, or in what that epoch rewrote.
    """

    def __init__(self, tenant: str, objects: ObjectStore, fences: FenceStore, memory: NotifyMemory) -> None:
        self._tenant, self._objects, self._fences, self._memory = tenant, objects, fences, memory
        self._epochs = Epochs(tenant, objects)
        self._versions: Sequence[object] | None = None
        self._list_at = 0.0
        self._round: dict[str, list[str]] = {}
        """Per segment that was read in this round: the ids of its events."""
        self._next: int | None = None
        self._gone: set[str] = set()

    def pending(self, *, skip: bool = False) -> Iterable[PendingAnnouncement]:
        state = self._memory.state
        self._round, self._next, self._gone = {}, None, set()
        if state.epoch < 0 or self._epochs.newer_than(state.epoch):
            newest = self._epochs.known().newest_complete
            if newest > state.epoch:
                self._next = newest
        if self._next is None and not self._has_news():
            return []
        moves = sorted(self._moves(self._names(recent=skip)), key=lambda move: (move.fence, move.source))
        if self._epochs.newer_than(state.epoch if self._next is None else self._next):
            # An epoch has begun: what it did not list any more is void. Its list will say.
            self._round, self._next, self._versions = {}, None, None
            return []
        if skip:
            for move in moves:
                self._memory.moved(move.source, move.fence)
            return []
        return [PendingAnnouncement(move.announcement, lambda move=move: self._delivered(move)) for move in moves]  # type: ignore[misc]

    def settle(self, undelivered: set[str], *, tried: bool = True) -> None:
        state = self._memory.state
        left = {name for name, ids in self._round.items() if not undelivered.isdisjoint(ids)}
        if self._next is None:
            for name in self._round.keys() - left - state.open:
                self._memory.segment_done(name)
            self._memory.set_open((state.open & left) | (state.open - self._round.keys() - self._gone))
        elif tried:  # else the round begins anew, with what was delivered in the memory
            self._begin_epoch(left)
        if left:
            self._versions = None  # look again, although nothing moves
        self._round = {}

    def _begin_epoch(self, left: set[str]) -> None:
        assert self._next is not None
        state, epoch = self._memory.state, self._next
        done = {name for name in self._round if name not in left and address_in(name).epoch == epoch}
        # While a segment is open, its sources must be known, or its other moves would be announced again.
        moves = {source: fence for source, fence in state.moves.items() if left or fence.epoch == epoch}
        self._memory.begin_epoch(epoch, done, moves)
        self._memory.set_open({name for name in left if address_in(name).epoch != epoch})
        self._versions = None

    def _has_news(self) -> bool:
        if self._memory.state.open:
            return True
        versions = self._fences.versions()
        now = time.monotonic()
        if versions == self._versions and None not in versions and now < self._list_at:
            return False
        self._versions, self._list_at = versions, now + WHOLE_S
        return True

    def _names(self, *, recent: bool) -> list[str]:
        """The segments to read. `recent`: those of the newest epoch, whose moves a later rewriting could show again."""
        state = self._memory.state
        if recent and self._next is not None:
            return self._epochs.committed_in(self._next)
        if self._next is None:
            names = self._epochs.committed_in(state.epoch)
            return [*(name for name in names if name not in state.segments), *sorted(state.open)]
        listed = [*self._epochs.named_in(self._next), *self._epochs.committed_in(self._next)]
        # Segments of earlier epochs were announced when the epoch that is ending began.
        first = max(state.epoch, 0)
        return [
            name
            for name in dict.fromkeys(listed)
            if name in state.open or (name not in state.segments and address_in(name).epoch >= first)
        ]

    def _moves(self, names: Iterable[str]) -> Iterator[_Move]:
        state = self._memory.state
        for name in names:
            data = self._objects.get(name)
            if data is None:  # rewritten: the next epoch has its rows
                self._gone.add(name)
                continue
            ids = self._round[name] = []
            for row in whole_rows(name, data):
                source = row.source
                known = state.moves.get(source)
                if known is not None and row.fence <= known:
                    continue  # announced, or overtaken before it was committed
                where = f"document:{source.hex()}"
                if (
                    known is None
                    and row.fence.epoch < state.epoch
                    and name not in state.open
                    and where not in state.held
                ):
                    continue  # announced in an earlier epoch, and rewritten since
                detail = row.detail
                data_of = {
                    "doc_id": detail.doc_id,
                    "action": detail.action,
                    "key": row.key.hex(),
                    "content_hash": detail.content_hash,
                    "sequence": row.sequence,
                    "source_url": detail.source_url,
                    "snippets": len(detail.ids) // SNIPPET_BYTES,
                    "fence": str(row.fence),
                }
                kind = _TYPES.get(detail.action, "document.ingested")
                made = announce(self._tenant, kind, where, detail.at_ms, data_of, str(row.fence))
                ids.append(made.event_id)
                yield _Move(source, row.fence, name, made)

    def _delivered(self, move: _Move) -> None:
        self._memory.moved(move.source, move.fence)


class LogFeed(Feed):
    """A log of numbered entries, followed by number: one request if there is nothing new."""

    def __init__(self, log: str, memory: NotifyMemory, head: Callable[[], int], read: Callable[[int], Any]) -> None:
        """`read` returns an announcement, "" for an entry that announces nothing, or None if there is no such entry."""
        self._log, self._memory, self._head, self._read = log, memory, head, read
        self._seen = 0
        self._numbers: dict[str, int] = {}

    def pending(self, *, skip: bool = False) -> Iterable[PendingAnnouncement]:
        state = self._memory.state
        self._seen, self._numbers = state.numbers.get(self._log, 0), {}
        if skip:
            self._seen = self._head()
            return
        for number in state.left.get(self._log, []):
            yield from self._pending(self._read(number), number)
        while self._seen - state.numbers.get(self._log, 0) < ENTRIES:
            found = self._read(self._seen + 1)
            if found is None:
                return
            self._seen += 1
            yield from self._pending(found, self._seen)

    def settle(self, undelivered: set[str], *, tried: bool = True) -> None:
        left = sorted(self._numbers[event_id] for event_id in undelivered & self._numbers.keys())
        self._memory.follow(self._log, self._seen, left)

    def _pending(self, found: Announcement | str | None, number: int) -> Iterator[PendingAnnouncement]:
        if isinstance(found, Announcement):
            self._numbers[found.event_id] = number
            yield PendingAnnouncement(found, lambda: None)


def catalog_feed(tenant: str, objects: ObjectStore, memory: NotifyMemory) -> LogFeed:
    catalog = Catalog(tenant, objects)

    def read(number: int) -> Announcement | str | None:
        entry = catalog.at(number)
        if entry is None:
            return None
        if entry.change not in ("swap", "rollback", "remove"):
            return ""
        data = {
            "alias": entry.alias,
            "change": entry.change,
            "index_hash": entry.target.index_hash if entry.target else None,
            "previous": entry.previous.index_hash if entry.previous else None,
            "generation": entry.number,
            "actor": entry.actor,
            "reason": entry.reason,
            "forced": entry.forced,
        }
        return announce(tenant, "alias.swapped", f"alias:{entry.alias}", entry.at_ms, data, str(number))

    return LogFeed("catalog", memory, lambda: catalog.head().number, read)


def gate_feed(tenant: str, objects: ObjectStore, memory: NotifyMemory) -> LogFeed:
    gates = GateLog(tenant, objects)

    def read(number: int) -> Announcement | None:
        refusal = gates.at(number)
        if refusal is None:
            return None
        data = {
            "alias": refusal.alias,
            "index_hash": refusal.index_hash,
            "actor": refusal.actor,
            "failed": list(refusal.failed),
        }
        return announce(tenant, "gate.failed", f"alias:{refusal.alias}", refusal.at_ms, data, str(number))

    return LogFeed("gates", memory, gates.head, read)


class BuildFeed(Feed):
    """Seals, from the logs of all builds. Takes one LIST, every `BUILDS_S` seconds."""

    def __init__(self, tenant: str, objects: ObjectStore, memory: NotifyMemory) -> None:
        self._tenant, self._objects, self._memory = tenant, objects, memory
        self._builds = BuildLog(tenant, objects)
        self._prefix = f"{encoded(tenant)}/builds/"
        self._list_at = 0.0
        self._round: list[tuple[str, int, str]] = []

    def pending(self, *, skip: bool = False) -> Iterable[PendingAnnouncement]:
        self._round = []
        if time.monotonic() < self._list_at:
            return
        self._list_at = time.monotonic() + BUILDS_S
        found = []
        for entry in self._objects.list(self._prefix):
            index_hash, number = entry.name.split("/")[-2], number_in(entry.name)
            if number > self._memory.state.builds.get(index_hash, 0):
                found.append((index_hash, number))
        for index_hash, number in sorted(found):
            build = None if skip else self._builds.at(index_hash, number)
            if build is None or build.kind != SEALED or build.seal is None:
                self._round.append((index_hash, number, ""))
                continue
            seal = build.seal
            data = {
                "index_hash": index_hash,
                "rows": seal.rows,
                "documents": seal.documents,
                "content_digest": seal.content_digest,
                "corpus_digest": seal.corpus_digest,
                "backend": seal.backend,
                "owner": build.owner,
            }
            where = f"index:{index_hash}"
            made = announce(self._tenant, "index.sealed", where, build.at_ms, data, str(number))
            self._round.append((index_hash, number, made.event_id))
            yield PendingAnnouncement(made, lambda: None)

    def settle(self, undelivered: set[str], *, tried: bool = True) -> None:
        stuck: set[str] = set()
        for index_hash, number, event_id in self._round:
            if event_id in undelivered:
                stuck.add(index_hash)
                self._list_at = 0.0
            if index_hash not in stuck:
                self._memory.build_done(index_hash, number)


class LedgerFeed(Feed):
    """Conflicts, quarantines and duplicates, from the files of the ledger, each read once.

    Drained rows reach it; a file that replaced others is read as well, and its rows that were announced are known.
    Duplicates are sampled, and only counted in the files that a drain made.
    """

    def __init__(
        self, tenant: str, objects: ObjectStore, memory: NotifyMemory, now_ms: Callable[[], int], sample: int
    ) -> None:
        self._tenant, self._memory, self._now_ms, self._sample = tenant, memory, now_ms, sample
        self._ledger = Ledger(tenant, objects)
        self._row_ms = 0
        self._rates = DuplicateRates(clock=lambda: self._row_ms / 1000)
        self._round: dict[tuple[str, str], list[str]] = {}
        self._rows: dict[str, tuple[str, str]] = {}

    def pending(self, *, skip: bool = False) -> Iterable[PendingAnnouncement]:
        self._round, self._rows = {}, {}
        first_ms = max(self._now_ms() - LOOKED_BACK_DAYS * DAY_MS, 0)
        self._memory.forget_days(day_of(first_ms))
        for part in self._ledger.parts(RowQuery(first_ms)):
            if part.name in self._memory.state.parts.get(part.day, ()):
                continue
            ids = self._round[part.day, part.name] = []
            for made, repeats in self._announcements(part, remember_only=skip):
                if repeats:
                    self._rows[made.event_id] = (part.day, made.event_id)
                if skip:
                    self._delivered(made.event_id)
                    continue
                ids.append(made.event_id)
                yield PendingAnnouncement(made, lambda made=made: self._delivered(made.event_id))  # type: ignore[misc]

    def settle(self, undelivered: set[str], *, tried: bool = True) -> None:
        for (day, name), ids in self._round.items():
            if undelivered.isdisjoint(ids):
                self._memory.part_done(day, name)

    def _delivered(self, event_id: str) -> None:
        if event_id in self._rows:
            self._memory.row_done(*self._rows[event_id])

    def _announcements(self, part: Part, *, remember_only: bool) -> Iterator[tuple[Announcement, bool]]:
        import pyarrow as pa
        import pyarrow.compute as pc

        names = ["row_id", "ts", "kind", "phase", "source_type", "source_id", "revision", "idempotency_key"]
        names += ["error_code", "attempt", "event_id", "effect_id", "first_seen"]
        table = self._ledger.read(part, RowQuery(), names)
        if table is None:  # replaced by one that the next round lists
            return
        stuck = pc.fill_null(pc.equal(table.column("error_code"), QUARANTINED), False)
        phase = table.column("phase")
        wanted = pc.or_(pc.equal(phase, "conflict"), stuck)
        duplicates = part.how == DRAINED and not remember_only
        if duplicates:
            wanted = pc.or_(wanted, pc.equal(phase, "replay"))
        found = table.filter(wanted).sort_by([("ts", "ascending"), ("row_id", "ascending")])
        moments = found.column("ts").cast(pa.int64()).to_pylist()
        known = self._memory.state.rows.get(part.day, set())
        for row, at_ms in zip(found.drop_columns(["ts", "first_seen"]).to_pylist(), moments, strict=True):
            if row["error_code"] == QUARANTINED:
                kind = "key.quarantined"
            elif row["phase"] == "conflict":
                kind = "conflict.detected"
            else:
                yield from self._duplicates(row, at_ms)
                continue
            made = self._of_row(kind, row, at_ms)
            if made.event_id not in known and made.event_id not in self._rows:
                yield made, True

    def _duplicates(self, row: dict[str, Any], at_ms: int) -> Iterator[tuple[Announcement, bool]]:
        key = row["idempotency_key"]
        # By the id of the row: the same ones in every attempt.
        if self._sample and int(row["row_id"][:8], 16) % self._sample == 0:
            yield self._of_row("duplicate.detected", row, at_ms), False
        self._row_ms = max(self._row_ms, at_ms)
        for rate in self._rates.count([key.encode()]):
            threshold = max(MIN_DUPLICATES, MIN_FACTOR * rate.usual)
            data = {
                **_described(row),
                "duplicates": rate.duplicates,
                "window_s": rate.window_s,
                "usual": rate.usual,
                "threshold": threshold,
                "suggestion": "see whether its sender acknowledges what it was answered, or is in a loop",
            }
            window = str(int(at_ms / 1000 // rate.window_s))
            yield announce(self._tenant, "abnormal_duplicate_rate", f"key:{key}", at_ms, data, window), False

    def _of_row(self, kind: str, row: dict[str, Any], at_ms: int) -> Announcement:
        where = f"key:{row['idempotency_key']}"
        # A key in quarantine is refused again and again: that is one event.
        what = f"attempt {row['attempt']}" if kind == "key.quarantined" else row["row_id"]
        return announce(self._tenant, kind, where, at_ms, _described(row), what)


def _described(row: dict[str, Any]) -> dict[str, Any]:
    names = ("kind", "source_type", "source_id", "revision", "idempotency_key", "attempt", "event_id", "effect_id")
    return {name: row[name] for name in names if row[name] is not None}
