"""Verify: compares the fence store, the log, the snippets and a sink.

The log is the truth. The verifier finds where the fence store, which is only an index of it, differs (down to single
keys deleted by hand), and what the log itself lacks. Documents may be ingested meanwhile: what looks wrong is read
again before it is reported. `repair` fixes what can be fixed.

Memory: about 500 bytes a row and 24 bytes a snippet.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import Any, NamedTuple

from ragfence._progress import Meter
from ragfence.core.decisions import Mode
from ragfence.core.layout import ids_in
from ragfence.core.operations import FenceNumber
from ragfence.core.records import Head, KeyRecord, SourceRecord
from ragfence.documents.findings import BEYOND_REPAIR, Finding, Trouble, Verification
from ragfence.documents.identity import SNIPPET_BYTES, snippet_texts
from ragfence.documents.log import INGEST, Positions, address_in
from ragfence.documents.parquet import decode_snippets, whole_rows
from ragfence.documents.rewrite import LogRewrite
from ragfence.engine.hydration import TenantStores
from ragfence.engine.segment_log import LogRow
from ragfence.errors import FormatCorrupt, FormatTooNew, NotReady, PolicyError, RagfenceError, StoreUnavailable
from ragfence.stores.fences import Lookup
from ragfence.stores.objects import ObjectStore

Place = tuple[int, bytes]
"""(shard, source): the place of a document in the fence store"""


class OutlinedRow(NamedTuple):
    key: bytes
    fence: FenceNumber
    live: bool
    sequence: int | None
    metadata_hash: bytes
    ids: bytes
    made: bool
    """whether it is an `ingest` row, which has positions"""
    fits: bool
    """whether there are as many positions as ids, and the positions are possible"""
    segment: str
    before: str
    dead: bytes
    """ids"""


@dataclass(slots=True)
class LoggedDocument:
    doc_id: str
    rows: list[OutlinedRow] = field(default_factory=list)

    @property
    def head(self) -> OutlinedRow:
        return max(self.rows, key=lambda row: row.fence)

    def superseded(self, epoch: int) -> dict[bytes, OutlinedRow]:
        """Returns the newest row of each superseded revision whose receipt the fence store must have.

        These are the revisions loaded with the epoch, and those that a later row replaced as head. A row that was never
        sealed, because its owner was taken over, becomes a receipt only with the next epoch.
        """
        head = self.head
        replaced = {row.before for row in self.rows}
        newest = {row.key: row for row in sorted(self.rows, key=lambda row: row.fence) if row.live}
        return {
            key: row
            for key, row in newest.items()
            if key != head.key and (row.fence.epoch < epoch or address_in(row.segment).text in replaced)
        }


class InspectedLog:
    def __init__(self, objects: ObjectStore, snippets_at: Callable[[str], str], update: Meter) -> None:
        """`snippets_at` returns the name of the snippets object of a segment."""
        self._objects = objects
        self._snippets_at = snippets_at
        self._update = update
        self._wanted = _ExpectedSnippets()
        self._there: list[Any] = []
        """pairs of Arrow arrays: the ids of snippets, and how many characters each has"""
        self._not_for_us: set[str] = set()
        """segments whose snippets have a newer format, so that it is unknown whether any are missing"""
        self.documents: dict[Place, LoggedDocument] = {}
        self.findings: list[Finding] = []
        self.names: set[str] = set()
        self.rows = 0
        self.snippets = 0

    @property
    def unreadable(self) -> bool:
        return any(finding.trouble in BEYOND_REPAIR for finding in self.findings)

    def read(self, names: Iterable[str]) -> None:
        """Reads the segments that were not read before."""
        for name in names:
            if name not in self.names:
                self.names.add(name)
                self._read_rows(name)
                self._read_snippets(name)
                self._update(len(self.names))

    def lost(self) -> Iterator[Finding]:
        """Yields the revisions that cannot be read back as they were."""
        missing, misfitting = self._wanted.compared_with(self._there)
        for document in self.documents.values():
            if not self._not_for_us.isdisjoint(row.segment for row in document.rows):
                continue
            made = {row.key: row for row in document.rows if row.made}
            for key in dict.fromkeys(row.key for row in document.rows if row.live):
                if key in missing:
                    what = f"document {document.doc_id!r} lacks {missing[key]} of its snippets"
                    yield Finding(Trouble.SNIPPETS_MISSING, what, document.doc_id, key.hex())
                elif key not in made:
                    what = f"the log has no positions for a revision of {document.doc_id!r}"
                    yield Finding(Trouble.POSITIONS_MISFIT, what, document.doc_id, key.hex())
                elif key in misfitting or not made[key].fits:
                    what = f"the snippets of {document.doc_id!r} do not fit their positions"
                    yield Finding(Trouble.POSITIONS_MISFIT, what, document.doc_id, key.hex())

    def _read_rows(self, name: str) -> None:
        data = self._objects.get(name)
        if data is None:
            self.findings.append(Finding(Trouble.ROWS_UNREADABLE, f"{name} is listed but missing", place=name))
            return
        try:
            rows = list(whole_rows(name, data))
        except FormatTooNew as newer:
            self.findings.append(Finding(Trouble.TOO_NEW, newer.message, place=name))
            return
        except FormatCorrupt as corrupt:
            self.findings.append(Finding(Trouble.ROWS_UNREADABLE, corrupt.message, place=name))
            return
        for row in rows:
            outlined = _outlined(name, row)
            document = self.documents.setdefault((row.key[0], row.source), LoggedDocument(row.detail.doc_id))
            document.rows.append(outlined)
            if outlined.made and outlined.fits:
                self._wanted.add(outlined, row.detail.positions)
        self.rows += len(rows)

    def _read_snippets(self, segment: str) -> None:
        import pyarrow as pa

        name = self._snippets_at(segment)
        data = self._objects.get(name)
        if data is None:  # its rows made none, or they are found missing later
            return
        try:
            there = [(bytes.fromhex(each.snippet_id), len(each.text)) for each in decode_snippets(name, data)]
        except FormatTooNew as newer:
            self.findings.append(Finding(Trouble.TOO_NEW, newer.message, place=name))
            self._not_for_us.add(segment)
            return
        except FormatCorrupt as corrupt:
            self.findings.append(Finding(Trouble.SNIPPETS_UNREADABLE, corrupt.message, place=name))
            return
        self.snippets += len(there)
        ids, lengths = [each for each, _ in there], [length for _, length in there]
        self._there.append((pa.array(ids, pa.binary(SNIPPET_BYTES)), pa.array(lengths, pa.int32())))


class _ExpectedSnippets:
    """The snippets that rows name, in Arrow: there may be millions."""

    def __init__(self) -> None:
        self._keys: list[bytes] = []
        self._counts: list[int] = []
        self._ids: list[bytes] = []
        self._lengths = array("i")

    def add(self, row: OutlinedRow, positions: Positions) -> None:
        self._keys.append(row.key)
        self._counts.append(len(positions.starts))
        self._ids.append(row.ids)
        self._lengths.extend(end - start for start, end in zip(positions.starts, positions.ends, strict=True))

    def compared_with(self, there: Sequence[Any]) -> tuple[dict[bytes, int], set[bytes]]:
        """Returns how many snippets of each key are missing, and the keys that have snippets of another length."""
        import pyarrow as pa
        import pyarrow.compute as pc

        count = len(self._lengths)
        buffer = pa.py_buffer(b"".join(self._ids))
        wanted = pa.FixedSizeBinaryArray.from_buffers(pa.binary(SNIPPET_BYTES), count, [None, buffer])
        ids = pa.chunked_array([ids for ids, _ in there], pa.binary(SNIPPET_BYTES)).combine_chunks()
        found = pc.index_in(wanted, value_set=ids)
        lengths = pa.chunked_array([lengths for _, lengths in there], pa.int32()).take(found)
        update = pa.Array.from_buffers(pa.int32(), count, [None, pa.py_buffer(self._lengths)])
        ends = list(accumulate(self._counts))
        absent = pc.indices_nonzero(pc.is_null(found)).to_pylist()
        rows = Counter(bisect_right(ends, at) for at in absent)
        other = pc.indices_nonzero(pc.fill_null(pc.not_equal(lengths, update), False)).to_pylist()
        return {self._keys[at]: many for at, many in rows.items()}, {self._keys[bisect_right(ends, at)] for at in other}


def _outlined(segment: str, row: LogRow) -> OutlinedRow:
    detail = row.detail
    return OutlinedRow(
        key=row.key,
        fence=row.fence,
        live=row.live,
        sequence=row.sequence,
        metadata_hash=row.metadata_hash,
        ids=detail.ids,
        made=detail.action == INGEST,
        fits=_fits(detail.ids, detail.positions),
        segment=segment,
        before=detail.before,
        dead=detail.dead,
    )


def _fits(ids: bytes, positions: Positions) -> bool:
    starts, ends, sections = positions
    if not len(starts) == len(ends) == len(sections) == len(ids) // SNIPPET_BYTES:
        return False
    return all(0 <= start < end for start, end in zip(starts, ends, strict=True))


ATTEMPTS = 5
PAGE = 500

SinkIds = Callable[[], Iterable[str]]
"""Returns all snippet_ids that a sink holds."""


class DocumentVerifier:
    def __init__(
        self,
        stores: TenantStores,
        log_rewrite: LogRewrite,
        check_settings: Callable[[], object],
        update: Meter,
        *,
        sink_ids: SinkIds | None = None,
    ) -> None:
        """`check_settings` raises an error if the settings differ from those fixed for the tenant's documents."""
        self._fences = stores.fences
        self._objects = stores.objects
        self._epochs = stores.epochs
        self._hydrator = stores.hydrator
        self._log_rewrite = log_rewrite
        self._check_settings = check_settings
        self._update = update
        self._sink_ids = sink_ids

    def look(self) -> Verification:
        for _ in range(ATTEMPTS):
            unready = self._unready()
            epoch = self._epochs.known().newest_complete
            looked = self._look(epoch, unready)
            # The effects of a flush, a hydration or a compaction in the meantime must not be reported as trouble.
            if self._epochs.known().newest_complete == epoch and (unready or self._answers_in(epoch)):
                return looked
        raise NotReady("the log is rewritten faster than it can be verified", hint="try again")

    def _look(self, epoch: int, unready: RagfenceError | None) -> Verification:
        held_before = self._held_by_sink()
        log = InspectedLog(self._objects, self._log_rewrite.snippets_name, self._update)
        log.read(self._epochs.truth())
        if unready is not None and not log.unreadable:
            raise unready
        # First, since it may read rows that were written in the meantime.
        differences = list(self._differences(log, epoch)) if unready is None else []
        found = [*self._settings(log), *log.findings, *log.lost(), *differences, *self._sink(log, held_before)]
        found += [
            Finding(Trouble.VOID, "no epoch will ever count it", place=each.name) for each in self._log_rewrite.void()
        ]
        return Verification(epoch, len(log.documents), log.rows, log.snippets, len(log.names), tuple(found))

    def _answers_in(self, epoch: int) -> bool:
        return all(marker and marker.usable and marker.epoch == epoch for marker in self._fences.markers())

    def _unready(self) -> RagfenceError | None:
        """Returns why the fence store is not ready. If the log cannot be read, that is reported instead."""
        try:
            self._hydrator.ensure_ready()
        except (FormatCorrupt, FormatTooNew, StoreUnavailable) as unready:
            return unready
        return None

    def _settings(self, log: InspectedLog) -> Iterator[Finding]:
        if not log.rows:  # the first document fixes them
            return
        try:
            self._check_settings()
        except (PolicyError, FormatCorrupt) as wrong:
            yield Finding(Trouble.SETTINGS, wrong.message)
        except FormatTooNew as newer:
            yield Finding(Trouble.TOO_NEW, newer.message)

    def _differences(self, log: InspectedLog, epoch: int) -> Iterator[Finding]:
        """Yields where the log and the fence store differ.

        A document may have moved since the log was read. So the log is read again after the fence store: what it held
        before must be in the fence store, and what the fence store holds must be in the log now.
        """
        known = log.documents
        strangers = {(shard, source) for shard, source, _ in self._fences.all_heads() if (shard, source) not in known}
        places = iter([*known, *sorted(strangers)])
        suspects: list[_Suspect] = []
        while page := list(islice(places, PAGE)):
            expected = {place: known[place].superseded(epoch) if place in known else {} for place in page}
            now_ms = self._fences.now_ms()
            held = iter(self._fences.read(list(_lookups(expected))))
            for place, receipts in expected.items():
                source, document = next(held).source, known.get(place)
                records = [next(held).record for _ in receipts]
                head = document.head if document else None
                if document and head and _settled_as(source, head):
                    yield from _of_receipts(document, receipts, records)
                else:
                    suspects.append(_Suspect(place, head, source, now_ms))
        if suspects:
            log.read(self._epochs.truth())
        for suspect in suspects:
            yield from _of_head(suspect, known.get(suspect.place))

    def _held_by_sink(self) -> set[str]:
        return set(self._sink_ids()) if self._sink_ids else set()

    def _sink(self, log: InspectedLog, before: set[str]) -> Iterator[Finding]:
        """Yields what was wrong before the log was read and still is: a document under way may look like orphans."""
        if self._sink_ids is None:
            return
        now = self._held_by_sink()
        live: set[str] = set()
        named: set[str] = set()
        suspects = before & now
        for document in log.documents.values():
            head = document.head
            own = set(snippet_texts(head.ids)) if head.live else set()
            live |= own
            for row in document.rows if suspects else ():
                named |= suspects.intersection((*snippet_texts(row.ids), *snippet_texts(row.dead)))
            if missing := own - now - before:
                what = f"the sink lacks {len(missing)} of {len(own)} snippets of {document.doc_id!r}"
                yield Finding(Trouble.SINK_MISSING, what, document.doc_id, head.key.hex())
        # Rows that the log never named belong to others: a collection may be shared.
        for each in sorted(named - live):
            yield Finding(Trouble.SINK_ORPHAN, "no live document has this snippet of the sink", place=each)


class _Suspect(NamedTuple):
    """A document that the log and the fence store describe differently."""

    place: Place
    logged: OutlinedRow | None
    """its head in the log, before the fence store was read"""
    held: SourceRecord | None
    now_ms: int


def _lookups(expected: Mapping[Place, Mapping[bytes, OutlinedRow]]) -> Iterator[Lookup]:
    for (shard, source), receipts in expected.items():
        for key in (bytes((shard,)) + bytes(32), *receipts):
            yield Lookup(key, Mode.DOCUMENT, source)


def _of_head(suspect: _Suspect, document: LoggedDocument | None) -> Iterator[Finding]:
    """Yields what is wrong with the head of one document, compared with the log as it is now."""
    held, logged = suspect.held, suspect.logged
    head, lease = (held.head, held.lease) if held else (None, None)
    if lease and lease.record.held_at(suspect.now_ms):
        return  # it is being moved right now
    doc_id = document.doc_id if document else ""
    known = f"document {doc_id!r}" if document else "a document that is not in the log"
    key = logged.key.hex() if logged else ""
    if lease and lease.may_hide_a_commit:
        what = f"{known}: a lease expired, and its owner may have written a row that was not sealed"
        yield Finding(Trouble.UNSETTLED, what, doc_id, key)
        return
    if head is None or head.record is None:
        if logged:
            yield Finding(Trouble.HEAD_MISSING, f"{known}: its head is missing in the fence store", doc_id, key)
        return
    fence = head.record.fence
    row = next((row for row in document.rows if row.fence == fence), None) if document else None
    if row is None:
        what = f"{known}: the fence store has the head {fence}, which has no row in the log"
        yield Finding(Trouble.HEAD_WITHOUT_ROW, what, doc_id, (bytes(suspect.place[:1]) + head.digest).hex())
    elif logged and logged.fence > fence:
        what = f"{known}: the fence store has the head {fence}, the log has {logged.fence}"
        yield Finding(Trouble.HEAD_DIFFERS, what, doc_id, key)
    elif not _same(head, row):
        yield Finding(Trouble.HEAD_DIFFERS, f"{known}: its head {fence} is described differently", doc_id, key)


def _settled_as(source: SourceRecord | None, row: OutlinedRow) -> bool:
    """Whether the row is the head, and no lease, held or expired, may change that."""
    if source is None or source.head is None or (source.lease and source.lease.may_hide_a_commit):
        return False
    return _same(source.head, row)


def _same(head: Head, row: OutlinedRow) -> bool:
    return (
        head.record is not None
        and (head.digest, head.live, head.sequence, head.metadata_hash, head.record.fence)
        == (row.key[1:], row.live, row.sequence, row.metadata_hash, row.fence)
        and (not row.live or ids_in(head.record.result) == row.ids)
    )


def _of_receipts(
    document: LoggedDocument, expected: Mapping[bytes, OutlinedRow], held: Sequence[KeyRecord | None]
) -> Iterator[Finding]:
    for (key, row), record in zip(expected.items(), held, strict=True):
        if record is None or ids_in(record.result) != row.ids:
            what = f"document {document.doc_id!r}: the receipt of a superseded revision is missing in the fence store"
            yield Finding(Trouble.RECEIPT_MISSING, what, document.doc_id, key.hex())
