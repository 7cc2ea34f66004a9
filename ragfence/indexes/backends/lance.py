"""LanceDB: the embedded default, in a folder or on S3. Every physical index is a table.

A table is written in one commit from a stream, so no reader sees a part of it. What a search must know of the shape is
in the metadata of the table's schema. Every call reads the newest version of the table: rows that another process
removed are not found, and an index that it dropped is missing. LanceDB 0.40 sends no telemetry.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from cachetools import LRUCache

from ragfence._extras import needs_extra
from ragfence.errors import BuildMissing, FormatCorrupt, StoreUnavailable, ValidationError
from ragfence.indexes.backends import lance_aliases, lance_indexes
from ragfence.indexes.backends.backend import PAYLOAD, PREFIX, FoundRow, NearRow, Pointer, Shape, row_schema
from ragfence.indexes.backends.lance_errors import LanceError, file_gone, lost_race, no_table, translate
from ragfence.indexes.backends.shapes import check_search, select_schema
from ragfence.stores.file_modes import make_folders

if TYPE_CHECKING:
    from ragfence.indexes.embedders.embedder import Vectors

_SHAPE = b"ragfence.shape"
_READ_ROWS = 8_192
_OPEN_TABLES = 64
_IN_ONE_FILTER = 500
_TRIES = 20
# Of the S3 client: a server that is down is reported within half a minute, not after LanceDB's three minutes.
_PATIENCE = {"connect_timeout": "5s", "client_max_retries": "5", "client_retry_timeout": "30"}
# LanceDB warns about zero; every commit of ours takes longer than this.
_AT_ONCE = timedelta(milliseconds=1)

_T = TypeVar("_T")


class _Open(NamedTuple):
    table: Any
    shape: Shape


@dataclass(slots=True)
class _Process:
    """The state of one process. A forked child starts afresh, because threads and locks do not survive a fork."""

    pid: int
    connection: Any
    folders: RemoteFolders | None = None
    tables: LRUCache[str, _Open] = field(default_factory=lambda: LRUCache(_OPEN_TABLES))
    lock: threading.Lock = field(default_factory=threading.Lock)
    removing: threading.Lock = field(default_factory=threading.Lock)


class LanceBackend:
    """A `Backend` in the folder or S3 prefix `uri`.

    `storage_options` are LanceDB's (`aws_endpoint`, `aws_region`, `allow_http`, ...). Without keys among them, LanceDB
    looks for credentials where every AWS tool does. `write` pulls its rows in a thread of LanceDB.
    """

    name = "lance"

    def __init__(self, uri: str | os.PathLike[str], storage_options: Mapping[str, str] | None = None) -> None:
        uri = os.fspath(uri)
        self._is_remote = "://" in uri
        self._uri = uri.rstrip("/") if self._is_remote else str(Path(uri).absolute())
        self._options = dict(storage_options or {})
        self._process: _Process | None = None
        self._opening = threading.Lock()

    @property
    def url(self) -> str:
        return f"lance+{self._uri}" if self._is_remote else f"lance:{self._uri}"

    def check(self, shape: Shape) -> None:
        lance_indexes.check(shape)

    def approximate(self, rows: int, dimension: int) -> tuple[str, dict[str, Any]] | None:
        return lance_indexes.approximate(rows, dimension)

    def write(self, physical: str, shape: Shape, tables: Iterable[Any]) -> int:
        import pyarrow as pa

        self.check(shape)
        schema = row_schema(shape.dimension).with_metadata({_SHAPE: _encoded(shape)})
        source = _RowCounter(tables, schema)
        if self.exists(physical):
            raise _exists_error(physical)
        try:
            made = self._mine.connection.create_table(
                physical, pa.RecordBatchReader.from_batches(schema, source.batches())
            )
        except LanceError as error:
            if source.error is not None:  # LanceDB made a RuntimeError of it
                raise source.error from None
            if "already exists" in str(error):
                raise _exists_error(physical) from error
            raise translate(error, f"write {physical}", self.url) from error
        self._cache(physical, _Open(made, shape))
        return source.rows

    def finish(self, physical: str, shape: Shape) -> None:
        if shape.index == "flat":
            return
        self.check(shape)

        def index(table: Any) -> None:
            table.create_index("vector", config=lance_indexes.config(shape), replace=True)
            table.optimize(cleanup_older_than=_AT_ONCE)

        self._act_on(physical, f"index {physical}", lambda opened: index(opened.table))

    def exists(self, physical: str) -> bool:
        try:
            self._open(physical)
        except BuildMissing:
            return False
        return True

    def count(self, physical: str) -> int:
        counted: int = self._act_on(physical, f"count {physical}", lambda opened: opened.table.count_rows())
        return counted

    def read(self, physical: str, columns: Sequence[str] | None = None) -> Iterator[Any]:
        def start(opened: _Open) -> Iterator[Any]:
            schema = select_schema(row_schema(opened.shape.dimension), columns)
            batches = opened.table.search().select(schema.names).limit(None).to_batches(_READ_ROWS)
            return self._tables(physical, opened.table.version, batches, schema)

        return self._act_on(physical, f"read {physical}", start)

    def remove(self, physical: str, doc_ids: Sequence[str]) -> None:
        """Removes rows, one process at a time: LanceDB detects conflicts by the versions between, which this deletes.

        Two processes at once would leave rows twice in the table, and files that no version refers to. A file lock
        prevents this in a folder; on S3 the caller must, see `indexes.row_purge`.
        """
        with self._mine.removing, lance_aliases.file_lock(self._lock_file("remove")):
            for at in range(0, len(doc_ids), _IN_ONE_FILTER):
                listed = ", ".join(lance_aliases.quote(doc_id) for doc_id in doc_ids[at : at + _IN_ONE_FILTER])
                self._act_on(physical, f"remove rows of {physical}", partial(_delete, f"doc_id IN ({listed})"))
            shape = self._open(physical).shape
            for attempt in range(_TRIES):
                if self._act_on(physical, f"look at {physical}", lambda opened: _is_clean(opened.table)):
                    return
                time.sleep(0.001 * attempt)
                self._act_on(physical, f"rewrite {physical}", lambda opened: _rewrite(opened.table))
                self.finish(physical, shape)
                self._act_on(physical, f"clean {physical}", lambda opened: _clean(opened.table))
            raise StoreUnavailable(
                f"other processes keep changing {physical} in {self.url}; older versions still have the removed rows",
                hint="searches do not find the rows any more; remove them again to delete their bytes, too",
            )

    def search(self, physical: str, vector: Vectors, k: int) -> list[FoundRow]:
        def find(opened: _Open) -> list[FoundRow]:
            check_search(opened.shape.dimension, opened.shape.metric, vector, k)
            query = opened.table.search(vector, vector_column_name="vector")
            query = lance_indexes.tune(query, opened.shape).select([*PAYLOAD, "_distance"]).limit(k)
            columns = query.to_arrow().to_pydict()
            metric = opened.shape.metric
            scores = (lance_indexes.score(metric, distance) for distance in columns["_distance"])
            return [FoundRow(*row) for row in zip(*(columns[name] for name in PAYLOAD), scores, strict=True)]

        return self._act_on(physical, f"search {physical}", find)

    def search_many(self, physical: str, vectors: Vectors, k: int) -> list[list[NearRow]]:
        def find(opened: _Open) -> list[list[NearRow]]:
            shape = opened.shape
            for vector in vectors:
                check_search(shape.dimension, shape.metric, vector, k)
            query = opened.table.search(vectors, vector_column_name="vector")
            query = lance_indexes.tune(query, shape).select(["snippet_id", "_distance"]).limit(k)
            table = query.to_arrow()
            ids, distances = table.column("snippet_id").to_pylist(), table.column("_distance").to_pylist()
            # LanceDB numbers the queries only if there are several.
            numbers = table.column("query_index").to_pylist() if len(vectors) > 1 else [0] * len(ids)
            found: list[list[NearRow]] = [[] for _ in vectors]
            for number, snippet_id, distance in zip(numbers, ids, distances, strict=True):
                found[number].append(NearRow(snippet_id, lance_indexes.score(shape.metric, distance)))
            for rows in found:
                rows.sort(key=lambda row: -row.score)
            return found

        if not len(vectors):
            return []
        return self._act_on(physical, f"search {physical}", find)

    def drop(self, physical: str) -> None:
        self._evict(physical)
        try:
            self._mine.connection.drop_table(physical, ignore_missing=True)
        except LanceError as error:
            if not no_table(error) and not file_gone(error):  # another process drops it, too
                raise translate(error, f"drop {physical}", self.url) from error

    def physicals(self) -> list[str]:
        """Lists also tables of interrupted writers, which cannot be opened; never an emptied folder."""
        names = [name for name in self._names() if name.startswith(PREFIX)]
        if self._is_remote:
            mine = self._mine
            with mine.lock:
                mine.folders = mine.folders or RemoteFolders(self._uri, self._options)
            names = mine.folders.holding(names)
        return sorted(names)

    def point(self, alias: str, physical: str, generation: int) -> None:
        connection = self._mine.connection
        lock = self._lock_file(lance_aliases.TABLE)
        self._retry_races("set an alias", lambda: lance_aliases.point(connection, lock, alias, physical, generation))

    def pointer(self, alias: str) -> Pointer | None:
        connection = self._mine.connection
        try:
            return self._retry_races(
                "read an alias", lambda: lance_aliases.pointer(connection.open_table(lance_aliases.TABLE), alias)
            )
        except BuildMissing:  # none was ever set
            return None

    def unpoint(self, alias: str) -> None:
        connection = self._mine.connection
        try:
            self._retry_races(
                "delete an alias", lambda: lance_aliases.unpoint(connection.open_table(lance_aliases.TABLE), alias)
            )
        except BuildMissing:
            return

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.pid == os.getpid() and process.folders is not None:
            process.folders.close()

    @property
    def _mine(self) -> _Process:
        process = self._process
        if process is None or process.pid != os.getpid():
            if process is not None:
                self._opening = threading.Lock()  # another thread may have held it when we were forked
            with self._opening:
                process = self._process
                if process is None or process.pid != os.getpid():
                    process = self._process = _Process(os.getpid(), self._connect())
        return process

    def _connect(self) -> Any:
        with needs_extra("lance", "The index backend LanceDB"):
            import lancedb
        options = {**_PATIENCE, **self._options} if self._is_remote else self._options
        try:
            if not self._is_remote:
                make_folders(Path(self._uri))  # LanceDB's own files follow the umask, so the folder has to keep them
            return lancedb.connect(self._uri, storage_options=options, read_consistency_interval=timedelta(0))
        except LanceError as error:
            raise translate(error, "open the database", self.url) from error

    def _open(self, physical: str) -> _Open:
        """Opens the newest version of a table and keeps it for later calls."""
        connection = self._mine.connection
        try:
            table = connection.open_table(physical)
            metadata = table.schema.metadata or {}
        except LanceError as error:
            if no_table(error):
                raise self._missing_error(physical) from error
            raise translate(error, f"open {physical}", self.url) from error
        opened = _Open(table, _decoded(physical, metadata.get(_SHAPE)))
        self._cache(physical, opened)
        return opened

    def _cached(self, physical: str) -> _Open | None:
        mine = self._mine
        with mine.lock:
            return mine.tables.get(physical)

    def _cache(self, physical: str, opened: _Open) -> None:
        mine = self._mine
        with mine.lock:
            mine.tables[physical] = opened

    def _evict(self, physical: str) -> None:
        mine = self._mine
        with mine.lock:
            mine.tables.pop(physical, None)

    def _act_on(self, physical: str, what: str, act: Callable[[_Open], _T]) -> _T:
        """Acts on the table; again on its newest version, if the one it saw is gone or another commit came first."""
        for attempt in range(_TRIES):
            opened = self._cached(physical) or self._open(physical)
            try:
                return act(opened)
            except ValidationError:  # a ValueError, but ours
                raise
            except LanceError as error:
                self._evict(physical)
                if no_table(error):
                    self._open(physical)  # raises if the table is gone, and not only the version that was seen
                again = no_table(error) or lost_race(error) or (file_gone(error) and attempt < 2)
                if not again or attempt == _TRIES - 1:
                    raise translate(error, what, self.url) from error
        raise AssertionError("unreachable")

    def _tables(self, physical: str, version: int, batches: Any, schema: Any) -> Iterator[Any]:
        import pyarrow as pa

        try:
            for batch in batches:
                if batch.num_rows:
                    yield pa.Table.from_batches([batch]).cast(schema)
        except LanceError as error:
            # Files go when the index is dropped, when rows are removed, or by damage.
            if file_gone(error) and self._open(physical).table.version != version:
                raise StoreUnavailable(f"{physical} was changed while it was read", hint="read it again") from error
            raise translate(error, f"read {physical}", self.url) from error

    def _lock_file(self, name: str) -> Path | None:
        return None if self._is_remote else Path(self._uri, f".{name}.lock")

    def _names(self) -> list[str]:
        names: list[str] = []
        connection, token = self._mine.connection, None
        while True:
            page = self._retry_races("list the tables", partial(connection.list_tables, page_token=token))
            names += page.tables
            token = page.page_token
            if not token:
                return names

    def _retry_races(self, what: str, act: Callable[[], _T]) -> _T:
        for attempt in range(_TRIES):
            try:
                return act()
            except LanceError as error:
                if no_table(error):
                    raise BuildMissing(f"there is no such table in {self.url}") from error
                if not lost_race(error) or attempt == _TRIES - 1:
                    raise translate(error, what, self.url) from error
        raise AssertionError("unreachable")

    def _missing_error(self, physical: str) -> BuildMissing:
        return BuildMissing(f"{physical} is not in {self.url}")


class _RowCounter:
    """Counts rows on their way into LanceDB, and keeps the error that stopped them."""

    def __init__(self, tables: Iterable[Any], schema: Any) -> None:
        self._tables, self._schema = tables, schema
        self.rows = 0
        self.error: BaseException | None = None

    def batches(self) -> Iterator[Any]:
        try:
            for table in self._tables:
                for batch in table.select(self._schema.names).cast(self._schema).to_batches():
                    self.rows += batch.num_rows
                    yield batch
        except GeneratorExit:
            raise
        except BaseException as error:
            self.error = error
            raise


def _delete(where: str, opened: _Open) -> None:
    if opened.table.count_rows(where):  # deleting nothing is a commit, too
        opened.table.delete(where)


def _rewrite(table: Any) -> None:
    """Writes all rows to new files: a deletion only marks rows, and compaction ignores files with few marks."""
    table.update(where="true", values_sql={"ordinal": "ordinal"})


def _clean(table: Any) -> None:
    """Deletes older versions, and files of interrupted rewrites: no other process is writing to the table."""
    table.optimize(cleanup_older_than=_AT_ONCE, delete_unverified=True)


def _is_clean(table: Any) -> bool:
    """Whether there is no older version, and no row in the files that is not in the table."""
    stats = table.stats()
    lengths = stats["fragment_stats"]["lengths"]
    in_files = round(lengths["mean"] * stats["fragment_stats"]["num_fragments"])
    return len(table.list_versions()) == 1 and in_files == stats["num_rows"]


def _encoded(shape: Shape) -> bytes:
    known = {"dimension": shape.dimension, "metric": shape.metric, "index": shape.index}
    return json.dumps({**known, "parameters": dict(shape.parameters)}, sort_keys=True).encode()


def _decoded(physical: str, data: bytes | None) -> Shape:
    try:
        return Shape(**json.loads(data or b""))
    except (ValueError, TypeError) as broken:
        raise FormatCorrupt(
            f"the table {physical} was not written by ragfence", hint="drop it and build the index again"
        ) from broken


def _exists_error(physical: str) -> ValidationError:
    return ValidationError(f"{physical} exists already", hint="a physical name is never used twice; build again")


WORKERS = 8


class RemoteFolders:
    """The folders of tables under an `s3://` URI, listed with LanceDB's storage options.

    LanceDB lists folders. Some S3 servers (SeaweedFS) keep the folder of a table after its last object is deleted, so a
    dropped table would be listed for ever. A table exists if it has at least one object.
    """

    def __init__(self, uri: str, options: Mapping[str, str]) -> None:
        parts = urlsplit(uri)
        self._bucket, self._root = parts.netloc, parts.path.strip("/")
        self._client = _client(options) if parts.scheme == "s3" else None

    def holding(self, names: Iterable[str]) -> list[str]:
        """Returns the names of folders with at least one object; all names, if that is unknown."""
        listed = list(names)
        if self._client is None or not listed:
            return listed
        with ThreadPoolExecutor(WORKERS, thread_name_prefix="ragfence-folders") as pool:
            return [name for name, held in zip(listed, pool.map(self._holds, listed), strict=True) if held]

    def _holds(self, name: str) -> bool:
        prefix = f"{self._root}/{name}.lance/".lstrip("/")
        from ragfence.stores.s3_errors import BotoError, translate

        assert self._client is not None
        try:
            answer = self._client.list_objects_v2(Bucket=self._bucket, Prefix=prefix, MaxKeys=2)
        except BotoError as error:
            raise translate(error, f"list {name}", self._bucket, f"s3://{self._bucket}/{self._root}") from error
        # A key that ends with a slash is only the marker of a folder.
        return any(not item["Key"].endswith("/") for item in answer.get("Contents", []))

    def close(self) -> None:
        if self._client is not None:
            self._client.close()


def _client(options: Mapping[str, str]) -> Any:
    """None without boto3: then LanceDB's listing is used as it is."""
    try:
        import boto3
        from botocore.config import Config
    except ModuleNotFoundError:
        return None
    endpoint = options.get("aws_endpoint")
    return boto3.session.Session().client(
        "s3",
        endpoint_url=endpoint,
        region_name=options.get("aws_region"),
        aws_access_key_id=options.get("aws_access_key_id"),
        aws_secret_access_key=options.get("aws_secret_access_key"),
        aws_session_token=options.get("aws_session_token"),
        config=Config(
            connect_timeout=5,
            read_timeout=30,
            retries={"mode": "standard", "total_max_attempts": 3},
            s3={"addressing_style": "path" if endpoint else "auto"},
        ),
    )
