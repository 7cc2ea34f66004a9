"""The whole log as `verify` needs it: every row in outline, and whether each revision can be read back.

Memory: about 500 bytes a row and 24 bytes a snippet.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

from ragfence.core.operations import Fence
from ragfence.documents.findings import BEYOND_REPAIR, Finding, Trouble
from ragfence.documents.identity import SNIPPET_BYTES
from ragfence.documents.log import INGEST, Positions, address_in
from ragfence.documents.parquet import decode_snippets, whole_rows
from ragfence.documents.progress import Meter
from ragfence.engine.segment_log import LogRow
from ragfence.errors import FormatCorrupt, FormatTooNew
from ragfence.stores.objects import ObjectStore

Place = tuple[int, bytes]
"""(shard, source): where a document is in the fence store"""


class OutlinedRow(NamedTuple):
    key: bytes
    fence: Fence
    live: bool
    sequence: int | None
    metadata_hash: bytes
    ids: bytes
    made: bool
    """it is an `ingest` row: it has positions"""
    fits: bool
    """positions and ids are equally many, and the positions are possible"""
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
        """The newest rows of the revisions whose receipts the fence store must have.

        Those that were loaded with the epoch, and those that a later row replaced as head. A row that nobody sealed,
        because its owner was taken over, becomes a receipt with the next epoch only.
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
    def __init__(self, objects: ObjectStore, snippets_at: Callable[[str], str], told: Meter) -> None:
        """`snippets_at`: what the object with the snippets of a segment is called."""
        self._objects = objects
        self._snippets_at = snippets_at
        self._told = told
        self._wanted = _Wanted()
        self._there: list[Any] = []
        """pairs of Arrow arrays: the ids of snippets, and how many characters each has"""
        self._not_for_us: set[str] = set()
        """segments whose snippets have a newer format: nobody here can say that they are missing"""
        self.documents: dict[Place, LoggedDocument] = {}
        self.findings: list[Finding] = []
        self.names: set[str] = set()
        self.rows = 0
        self.snippets = 0

    @property
    def unreadable(self) -> bool:
        return any(finding.trouble in BEYOND_REPAIR for finding in self.findings)

    def read(self, names: Iterable[str]) -> None:
        """Those that were not read before."""
        for name in names:
            if name not in self.names:
                self.names.add(name)
                self._read_rows(name)
                self._read_snippets(name)
                self._told(len(self.names))

    def lost(self) -> Iterator[Finding]:
        """The revisions that cannot be read back as they were."""
        missing, misfitting = self._wanted.compared_with(self._there)
        for document in self.documents.values():
            if not self._not_for_us.isdisjoint(row.segment for row in document.rows):
                continue
            made = {row.key: row for row in document.rows if row.made}
            for key in dict.fromkeys(row.key for row in document.rows if row.live):
                if key in missing:
                    what = f"{missing[key]} snippets of {document.doc_id!r} are nowhere"
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
            self.findings.append(Finding(Trouble.ROWS_UNREADABLE, f"{name} is listed and not there", place=name))
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
        if data is None:  # its rows made none, or somebody misses them
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


class _Wanted:
    """The snippets that rows say exist, in Arrow: there may be millions."""

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
        """Of each key how many of its snippets are missing, and the keys with snippets of another length."""
        import pyarrow as pa
        import pyarrow.compute as pc

        count = len(self._lengths)
        buffer = pa.py_buffer(b"".join(self._ids))
        wanted = pa.FixedSizeBinaryArray.from_buffers(pa.binary(SNIPPET_BYTES), count, [None, buffer])
        ids = pa.chunked_array([ids for ids, _ in there], pa.binary(SNIPPET_BYTES)).combine_chunks()
        found = pc.index_in(wanted, value_set=ids)
        lengths = pa.chunked_array([lengths for _, lengths in there], pa.int32()).take(found)
        told = pa.Array.from_buffers(pa.int32(), count, [None, pa.py_buffer(self._lengths)])
        ends = list(accumulate(self._counts))
        absent = pc.indices_nonzero(pc.is_null(found)).to_pylist()
        rows = Counter(bisect_right(ends, at) for at in absent)
        other = pc.indices_nonzero(pc.fill_null(pc.not_equal(lengths, told), False)).to_pylist()
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
