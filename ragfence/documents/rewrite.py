"""Rewrites of the log, for compaction, purge and repair: an epoch whose list names rewritten segments.

    epoch e begins -> new objects named with e -> put_new epochs/<e>/segments -> the fence store is reloaded -> deletion

The list is the commit point. After a crash before it, the next process skips the epoch, and what was written is void.
After a crash behind it, the next hydration completes the epoch. Nothing is deleted that an epoch could still be built
upon, so old objects may remain: `collect_void` deletes them whenever it is called.

While an epoch is rewritten, no process can claim: writers wait, as for any hydration.

Content that leaves the log by a purge, a compaction or a repair is new if it comes back. `record_ends` writes decision
rows that say so: without them an auditor would see one content sealed twice, and report a broken promise.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, TypeVar

from ragfence.core.decision_rows import Row, context_of
from ragfence.core.layout import BATCH_BYTES, FINGERPRINT_BYTES, State
from ragfence.core.operations import FenceNumber
from ragfence.core.records import KeyRecord
from ragfence.documents.identity import SNIPPET_BYTES, operation_of
from ragfence.documents.log import INGEST, Address, Layout, Snippet, address_in
from ragfence.documents.parquet import (
    ParquetCodec,
    decode_snippets,
    encode_snippets,
    fixed_values,
    read_table,
    whole_rows,
)
from ragfence.engine import crash_points
from ragfence.engine.expiry import row_for_end
from ragfence.engine.hydration import AFTER_REWRITTEN, Keep, TenantStores
from ragfence.engine.segment_log import LogRow
from ragfence.errors import CommitUncertain, FormatCorrupt, NotReady, StoreUnavailable
from ragfence.stores.objects import ObjectEntry

BEFORE_DELETION = "before_deletion"
REWRITING_POINTS = (
    crash_points.AFTER_BEGUN,
    crash_points.AFTER_MARKED,
    AFTER_REWRITTEN,
    crash_points.AFTER_LISTED,
    crash_points.AFTER_LOADED,
    BEFORE_DELETION,
)
"""In the order in which a rewrite reaches them."""

ATTEMPTS = 5
WAIT_S = 60.0
PAUSE_S = 0.05
SEGMENT_ROWS = 5_000
SEGMENT_BYTES = 32 * 2**20
"""of text: a packed segment has at most this many rows and bytes, but always at least one whole document"""
DELETED_AT_ONCE = 500


@dataclass(frozen=True, slots=True)
class Switch:
    """The argument of `before_switch`: the segments in `added` are about to replace those in `replaced`."""

    epoch: int
    replaced: tuple[str, ...]
    added: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DeletedObjects:
    """Counts of deleted objects, which no list of segments names or ever will."""

    segments: int = 0
    snippets: int = 0
    bytes: int = 0
    vectors: int = 0

    @property
    def objects(self) -> int:
        return self.segments + self.snippets + self.vectors


NOTHING = DeletedObjects()


class WrittenSegment(NamedTuple):
    name: str
    rows: int
    snippets: int
    bytes: int


T = TypeVar("T")
Plan = Callable[[int, list[str], Keep], list[str] | None]
"""A `Rewrite`. Returns None if the log changed since it was planned: nothing is rewritten, and it is planned again."""


class LogRewrite:
    def __init__(self, stores: TenantStores, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._tenant = stores.tenant
        self._fences = stores.fences
        self._objects = stores.objects
        self._epochs = stores.epochs
        self._hydrator = stores.hydrator
        self._layout = Layout(stores.tenant)
        self._sleep = sleep
        self.before_switch: list[Callable[[Switch], None]] = []
        """Called after the new segments are written and before they count, to copy what else belongs to a segment (the
        vectors of its snippets) to the new addresses. May be called again for the same segments."""

    def run(self, plan: Callable[[], Plan | None], what: str) -> int | None:
        """Starts an epoch that executes a plan, and returns its number; None if there is nothing to do.

        `plan` reads the log while other processes may write to it; the plan it returns is executed when none can.
        """
        overtaken, since, pause_s = 0, time.monotonic(), PAUSE_S
        while True:
            self._hydrator.ensure_ready()
            known = self._epochs.known().newest_begun
            epoch = 0
            try:
                wanted = plan()
            except StoreUnavailable:
                # Another process may have rewritten and deleted what it was reading.
                if not self._epochs.newer_than(known):
                    raise
            else:
                if wanted is None:
                    return None
                attempt = _Attempt(wanted, self.before_switch)
                ready = self._hydrator.try_hydrate(rewrite=attempt.rewrite)
                epoch = attempt.epoch
                # Only the object store can say that every later epoch will be built upon this one: another server may
                # have begun one that does not know it yet.
                if ready and attempt.switched and not self._epochs.newer_than(epoch):
                    return epoch
            overtaken += epoch > 0
            if self._epochs.newer_than(known):  # another process made progress: wait from here
                since, pause_s = time.monotonic(), PAUSE_S
            if overtaken == ATTEMPTS or time.monotonic() - since > WAIT_S:
                raise NotReady(
                    f"the log could not be {what}: a newer epoch began {overtaken} times, or another process holds "
                    "the lock",
                    hint="nothing is lost; try again when no other process hydrates, compacts or purges",
                )
            self._sleep(pause_s)
            pause_s = min(pause_s * 1.5, 2.0)

    def truth(self) -> list[str]:
        return self._epochs.truth()

    def rewritten(self) -> set[str]:
        """Returns the segments that were part of the log once; the rows that remain are in other segments now."""
        return {*self._epochs.listed(self.newest_epoch(), since=0)} - {*self.truth()}

    def newest_epoch(self) -> int:
        return self._epochs.known().newest_complete

    def get(self, name: str) -> bytes:
        data = self._objects.get(name)
        if data is None:
            raise StoreUnavailable(f"the segment {name} is listed but cannot be read")
        return data

    def has(self, name: str) -> bool:
        return self._objects.get(name) is not None

    def rows(self, name: str, doc_id: str | None = None) -> list[LogRow]:
        return list(whole_rows(name, self.get(name), doc_id=doc_id))

    def keys(self, name: str) -> list[bytes]:
        return fixed_values(read_table(name, self.get(name), "rows", ["key"]), "key")

    def snippets_name(self, name: str) -> str:
        """Returns the name of the snippets object of a segment; it does not exist if the rows made no snippets."""
        return self._layout.snippets_at(address_in(name))

    def snippets(self, name: str) -> list[Snippet]:
        place, data = self.snippets_object(name)
        return [] if data is None else list(decode_snippets(place, data))

    def snippets_object(self, name: str) -> tuple[str, bytes | None]:
        place = self.snippets_name(name)
        return place, self._objects.get(place)

    def write(self, epoch: int, batch: bytes, rows: Sequence[LogRow]) -> WrittenSegment:
        """Writes a segment, and the `fresh` snippets of its rows."""
        address = Address(epoch, batch)
        texts, data = encode_snippets(rows), ParquetCodec().encode(rows)
        if texts is not None:
            self._put(self._layout.snippets_at(address), texts)
        name = self._layout.rows_at(address)
        self._put(name, data)
        snippets = sum(len(row.detail.fresh) for row in rows)
        return WrittenSegment(name, len(rows), snippets, len(data) + len(texts or b""))

    def take_out(
        self,
        epoch: int,
        segments: list[str],
        taken: Mapping[str, Sequence[LogRow]],
        held_in: Collection[str],
        keep: Keep,
        *,
        lost: Collection[str] = (),
    ) -> list[str]:
        """Takes documents out of their segments (`held_in`), and writes what remains of them into new segments.

        A rewritten segment keeps its batch, so that the addresses in other rows still lead to it. `lost` names segments
        whose snippets cannot be read.
        """
        texts: dict[bytes, str] = {}
        by_batch: dict[bytes, list[str]] = {}
        for name in sorted(held_in):
            by_batch.setdefault(address_in(name).batch, []).append(name)
        added = []
        for batch, names in by_batch.items():  # two epochs may have had a part of one batch each
            rest: list[LogRow] = []
            snippets: list[Snippet] = []
            for name in names:
                keep()
                rest += [row for row in self.rows(name) if row.detail.doc_id not in taken]
                for snippet in self.snippets(name) if name not in lost else ():
                    if snippet.doc_id in taken:
                        texts[bytes.fromhex(snippet.snippet_id)] = snippet.text
                    else:
                        snippets.append(snippet)
            if rest:
                added.append(self.write(epoch, batch, _with_snippets(rest, snippets)).name)
        whole = [whole_document(taken[doc_id], texts) for doc_id in sorted(taken)]
        for portion in portions(whole, _weight, SEGMENT_ROWS, SEGMENT_BYTES):
            keep()
            added.append(self.write(epoch, new_batch(), [row for rows in portion for row in rows]).name)
        return sorted({*segments, *added} - set(held_in))

    def void(self) -> list[ObjectEntry]:
        """Lists objects of earlier epochs that the newest does not name: no epoch will ever be built upon them."""
        newest = self.newest_epoch()
        named = set(self._epochs.named_in(newest))
        # Checked after its list was read: an epoch that begins from now on starts with this list. An incomplete one
        # that began before may go back to an older list.
        if self._epochs.newer_than(newest):
            return []
        found = []
        layout = self._layout
        roots = (layout.segments, layout.snippets, layout.vectors, layout.kept_vectors, layout.vector_parts)
        for root in roots:
            for entry in self._objects.list(f"{root}/"):
                address = _address(entry.name.rpartition("/")[0] if root == layout.vector_parts else entry.name)
                # Of the newest epoch nothing is void: its writers may be between two objects of a batch.
                if address and address.epoch < newest and self._layout.rows_at(address) not in named:
                    found.append(entry)
        return found

    def collect_void(self) -> DeletedObjects:
        """Deletes void objects. Safe at any time, and in any number of processes at once."""
        void = self.void()
        crash_points.reach(BEFORE_DELETION)
        names = [entry.name for entry in void]
        # Also if nothing is void: it removes what a writer left that was killed before its object existed.
        for at in range(0, max(1, len(names)), DELETED_AT_ONCE):
            self._objects.delete(names[at : at + DELETED_AT_ONCE])
        segments = sum(name.startswith(f"{self._layout.segments}/") for name in names)
        snippets = sum(name.startswith(f"{self._layout.snippets}/") for name in names)
        size = sum(entry.size for entry in void)
        return DeletedObjects(segments, snippets, size, len(names) - segments - snippets)

    def record_ends(self, gone: Iterable[EndedRevision], why: str) -> None:
        """Writes `ended` rows, before revisions leave the log: after a crash in between, they are still one life."""
        each = iter(gone)
        while some := list(islice(each, AT_ONCE)):
            now_ms = self._fences.now_ms()
            self._fences.record([_row(self._tenant, one, why, now_ms) for one in some])

    def forget(self, gone: Iterable[EndedRevision], *, below: int) -> None:
        """Removes the receipts of these revisions from the fence store, unless an epoch from `below` on wrote them."""
        self._fences.forget([each.key for each in gone], below=below)

    def _put(self, name: str, data: bytes) -> None:
        if not self._objects.put_new(name, data).won:
            raise CommitUncertain(f"{name} was written by another process", hint="try again")


class _Attempt:
    """One attempt to execute a plan, in one epoch."""

    def __init__(self, plan: Plan, before_switch: Sequence[Callable[[Switch], None]]) -> None:
        self._plan = plan
        self._before_switch = before_switch
        self.epoch = 0
        self.switched = False

    def rewrite(self, epoch: int, segments: list[str], keep: Keep) -> list[str]:
        self.epoch = epoch
        after = self._plan(epoch, segments, keep)
        if after is None:
            return segments
        switch = Switch(epoch, tuple(sorted({*segments} - {*after})), tuple(sorted({*after} - {*segments})))
        for callback in self._before_switch:
            keep()
            callback(switch)
        self.switched = True
        return after


def new_batch() -> bytes:
    return os.urandom(BATCH_BYTES)


def portions(
    things: Iterable[T], weigh: Callable[[T], tuple[int, int]], most_rows: int, most_bytes: int
) -> Iterator[list[T]]:
    """Groups things in their order: as many at a time as the limits allow, and at least one."""
    portion: list[T] = []
    rows = size = 0
    for thing in things:
        more_rows, more_bytes = weigh(thing)
        if portion and (rows + more_rows > most_rows or size + more_bytes > most_bytes):
            yield portion
            portion, rows, size = [], 0, 0
        portion.append(thing)
        rows, size = rows + more_rows, size + more_bytes
    if portion:
        yield portion


def _weight(rows: Sequence[LogRow]) -> tuple[int, int]:
    return len(rows), sum(len(text) for row in rows for _, text in row.detail.fresh)


def split_ids(ids: bytes) -> list[bytes]:
    """Splits concatenated ids."""
    return [ids[at : at + SNIPPET_BYTES] for at in range(0, len(ids), SNIPPET_BYTES)]


def whole_document(rows: Iterable[LogRow], texts: Mapping[bytes, str]) -> list[LogRow]:
    """Returns all rows of one document for one segment, each snippet with the first row that needs it.

    Their addresses of other segments are cleared: everything that belongs to the document is in one segment now.
    """
    rows = sorted(rows, key=lambda row: row.fence)
    left = dict.fromkeys(each for row in rows if row.detail.action == INGEST for each in split_ids(row.detail.ids))
    whole = []
    for row in rows:
        fresh = []
        if row.detail.action == INGEST:
            fresh = [
                (each, texts[each])
                for each in dict.fromkeys(split_ids(row.detail.ids))
                if each in left and each in texts
            ]
            for each, _ in fresh:
                del left[each]
        whole.append(row._replace(detail=row.detail._replace(origin="", before="", fresh=fresh)))
    return whole


def _with_snippets(rows: Sequence[LogRow], snippets: Sequence[Snippet]) -> list[LogRow]:
    """Returns the rows of a segment with the snippets stored alongside them."""
    fresh: dict[tuple[str, str], list[tuple[bytes, str]]] = {}
    for snippet in snippets:
        made = (bytes.fromhex(snippet.snippet_id), snippet.text)
        fresh.setdefault((snippet.doc_id, snippet.recipe), []).append(made)
    return [
        row._replace(detail=row.detail._replace(fresh=fresh.pop((row.detail.doc_id, row.detail.recipe), ())))
        for row in rows
    ]


def _address(name: str) -> Address | None:
    try:
        return address_in(name)
    except FormatCorrupt:
        return None  # not written by ragfence


COMPACTED, PURGED, RELEASED, GIVEN_UP = "COMPACTED", "PURGED", "RELEASED", "GIVEN_UP"
AT_ONCE = 1000


class EndedRevision(NamedTuple):
    """A revision that has no row in the log any more."""

    doc_id: str
    key: bytes
    token: bytes
    fence: FenceNumber
    at_ms: int


class RevisionFact(NamedTuple):
    """A fact from a decision row: a revision was sealed, or it ended."""

    of: EndedRevision
    ended: bool


RevisionQuery = Callable[[Callable[[int, bytes], bool]], Iterable[RevisionFact]]
"""Reads facts from decision rows, about documents sealed in the segments for which a function of (epoch, batch) is
true."""


def ended_revisions(rows: Iterable[LogRow]) -> Iterator[EndedRevision]:
    """Returns the revisions of rows that leave the log, one for each content."""
    newest = {row.key: row for row in sorted(rows, key=lambda row: row.fence) if row.live}
    return (
        EndedRevision(row.detail.doc_id, key, row.token, row.fence, row.detail.at_ms) for key, row in newest.items()
    )


def ended_by_decisions(callback: Iterable[RevisionFact]) -> dict[bytes, EndedRevision]:
    """Returns the newest sealed revision of each key that did not end later, according to decision rows."""
    newest: dict[bytes, EndedRevision] = {}
    ended: dict[bytes, FenceNumber] = {}
    for gone, is_end in callback:
        if is_end:
            ended[gone.key] = max(gone.fence, ended.get(gone.key, gone.fence))
        elif gone.key not in newest or newest[gone.key].fence < gone.fence:
            newest[gone.key] = gone
    return {key: gone for key, gone in newest.items() if key not in ended or ended[key] < gone.fence}


def _row(tenant: str, gone: EndedRevision, why: str, now_ms: int) -> Row:
    record = KeyRecord(State.SEALED, bytes(FINGERPRINT_BYTES), gone.token, gone.fence, 1, gone.at_ms, gone.at_ms)
    context = context_of(operation_of(tenant, gone.doc_id, "", ""))
    return row_for_end(gone.key, record, why=why, now_ms=now_ms, context=context)
