"""A copy of a tenant in a folder, which a fence can be opened on."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragfence.core.operations import encoded
from ragfence.engine.epochs import Epochs
from ragfence.errors import ObjectsRequired, StoreUnavailable, ValidationError
from ragfence.server.apikeys import FOLDER as APIKEYS
from ragfence.server.tenants.stores import Progress, parts_of
from ragfence.stores.file_modes import make_folders, opener
from ragfence.stores.objects import MAX_PART_BYTES, ObjectEntry

if TYPE_CHECKING:
    from ragfence.fence import Fence

WORKERS = 8
PASSES = 5
ROWS = ".decisions.parquet"
PART = ".part"
"""The ending of a file that is being written."""


@dataclass(slots=True)
class TenantExported:
    tenant: str
    folder: str
    objects: int = 0
    bytes: int = 0
    copied: int = 0
    """Objects copied by this call; the others existed already."""
    rows: int = 0
    """Decision rows."""
    passes: int = 0


class TenantExport:
    """Copies a tenant to a folder for `ragfence.open(objects=folder)`. An export that was interrupted is continued.

        <folder>/objects/<tenant>/...              the objects, with their names
        <folder>/exports/<tenant>.json             the source, and whether the export is complete
        <folder>/exports/<tenant>.decisions.parquet

    The last two have a digest in their names if the name of the tenant is too long for a file name.

    Objects are copied before those that they refer to, so every object that is named in the copy is in it. A compaction
    or purge meanwhile causes another pass. API keys are not copied by default, because a copy of the data should not
    accept requests. Physical indexes are not copied either; their vectors are, so building them again embeds nothing.
    """

    _FIRST = ("catalog", "builds", "attempts", "sealed", "epochs", "segments")
    """Commit points and logs; the objects that they name are in the other folders."""

    def __init__(self, fence: Fence, folder: str | os.PathLike[str], *, with_apikeys: bool = False) -> None:
        from ragfence.stores.local import LocalObjects

        self._fence = fence
        if (objects := fence.inspector.objects) is None:
            raise ObjectsRequired("export: needs an object store, and this fence was opened without one")
        self._from = objects
        self._root = f"{encoded(fence.tenant)}/"
        self._left_out = () if with_apikeys else (APIKEYS,)
        self._to = LocalObjects(Path(folder))
        self._manifest = Path(folder).absolute() / "exports" / f"{_file_name(fence.tenant)}.json"
        self._folder = str(Path(folder).absolute())

    def run(self, progress: Progress = lambda done: None) -> TenantExported:
        self._begin()
        report = TenantExported(self._fence.tenant, self._folder)
        epochs = Epochs(self._fence.tenant, self._from)
        while True:
            before = epochs.known()
            report.passes, report.objects, report.bytes = report.passes + 1, 0, 0
            self._pass(report, progress)
            if epochs.known() == before:
                break
            if report.passes == PASSES:
                raise StoreUnavailable(
                    f"tenant {self._fence.tenant!r} was compacted or hydrated in each of {PASSES} passes",
                    hint="run the export again when it is quieter; what is copied stays",
                )
        report.rows = self._rows()
        self._note(complete=True, objects=report.objects, bytes=report.bytes, rows=report.rows)
        return report

    def _begin(self) -> None:
        if next(parts_of(self._from, self._root), None) is None:
            raise ValidationError(
                f"{self._from.url} has no objects of tenant {self._fence.tenant!r}",
                hint="`ragfence tenants list` shows the tenants",
            )
        try:
            known: dict[str, Any] | None = json.loads(self._manifest.read_bytes())
        except FileNotFoundError:
            known = None
        except (OSError, ValueError) as broken:
            raise ValidationError(f"{self._manifest} cannot be read: {broken}", hint="export to a new folder") from None
        if known is None:
            if next(iter(self._to.list(self._root, limit=1)), None) is not None:
                raise ValidationError(
                    f"{self._folder} already contains tenant {self._fence.tenant!r}, and not as an export",
                    hint="export to a new folder: this one may be the store of a fence",
                )
            self._note(complete=False)
        elif known.get("complete") or known.get("from") != self._from.url:
            what = "complete" if known.get("complete") else f"of {known.get('from')}, not of {self._from.url}"
            raise ValidationError(
                f"the export of tenant {self._fence.tenant!r} in {self._folder} is {what}",
                hint="export to a new folder: this one may be in use",
            )

    def _pass(self, report: TenantExported, progress: Progress) -> None:
        there = {*parts_of(self._from, self._root), *parts_of(self._to, self._root)}.difference(self._left_out)
        rest = sorted(there.difference(self._FIRST))
        with ThreadPoolExecutor(WORKERS, thread_name_prefix="ragfence-export") as pool:
            for folder in (*self._FIRST, *rest):
                prefix = f"{self._root}{folder}/"
                pairs = _paired(self._from.list(prefix), self._to.list(prefix))
                while batch := list(islice(pairs, WORKERS * 8)):
                    # Deleted from the tenant since an earlier run or pass, for example by a purge.
                    self._to.delete([copy.name for entry, copy in batch if copy is not None and not _same(entry, copy)])
                    for size, copied in pool.map(self._copy, batch):
                        report.objects += size is not None
                        report.bytes += size or 0
                        report.copied += copied
                    progress(report.objects)

    def _copy(self, pair: tuple[ObjectEntry | None, ObjectEntry | None]) -> tuple[int | None, bool]:
        entry, copy = pair
        if entry is None:
            return None, False
        if _same(entry, copy):
            return entry.size, False
        data = self._from.get(entry.name)
        if data is None:
            return None, False  # deleted since it was listed
        if len(data) != entry.size:
            raise StoreUnavailable(
                f"{entry.name} has {entry.size} bytes, and {len(data)} were read", hint="run it again"
            )
        put = self._to.put_new(entry.name, data)
        if not put.won and put.existing != data:
            raise StoreUnavailable(
                f"another process writes {entry.name} in {self._folder}", hint="export to a new folder"
            )
        return entry.size, True

    def _rows(self) -> int:
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = self._fence.audit.decisions()
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression="zstd")
        _write(self._manifest.with_suffix(ROWS), sink.getvalue().to_pybytes())
        return int(table.num_rows)

    def _note(self, **more: Any) -> None:
        known = {
            "version": 1,
            "tenant": self._fence.tenant,
            "from": self._from.url,
            "at_ms": time.time_ns() // 1_000_000,
        }
        _write(self._manifest, json.dumps(known | more, ensure_ascii=False).encode())


def _file_name(tenant: str) -> str:
    """Returns the name of the files about a tenant, without the ending. No encoded name contains `~`."""
    name = encoded(tenant)
    fits = len(f"{name}{ROWS}{PART}") <= MAX_PART_BYTES
    return name if fits else f"~{hashlib.sha256(tenant.encode()).hexdigest()}"


def _same(entry: ObjectEntry | None, copy: ObjectEntry | None) -> bool:
    """Compares sizes, which is enough: an object never changes."""
    return entry is not None and copy is not None and entry.size == copy.size


def _paired(
    left: Iterator[ObjectEntry], right: Iterator[ObjectEntry]
) -> Iterator[tuple[ObjectEntry | None, ObjectEntry | None]]:
    """Merges two sorted listings: yields the entries of each name."""
    one, other = next(left, None), next(right, None)
    while one is not None or other is not None:
        if other is None or (one is not None and one.name < other.name):
            yield one, None
            one = next(left, None)
        elif one is None or other.name < one.name:
            yield None, other
            other = next(right, None)
        else:
            yield one, other
            one, other = next(left, None), next(right, None)


def _write(file: Path, data: bytes) -> None:
    """Writes a file atomically."""
    try:
        make_folders(file.parent)
        part = file.with_name(f"{file.name}{PART}")
        with open(part, "wb", opener=opener) as opened:
            opened.write(data)
            opened.flush()
            os.fsync(opened.fileno())
        part.replace(file)
    except OSError as broken:
        raise StoreUnavailable(
            f"cannot write {file}: {broken}", hint="free some space, then run the export again"
        ) from broken
