"""Qdrant: a server, or its local mode in a folder. Every physical index is a collection.

A point's id is its snippet_id, which is a UUID; the payload has all columns. Cosine vectors are returned normalised.
What a search must know is in the configuration of the collection. Qdrant's aliases have no generation and no
compare-and-swap, so `point` simply sets them, and the caller reads them again.

Local mode allows one process per folder, stores points in SQLite files, and raises only ValueError and RuntimeError.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from uuid import UUID

from ragfence._extras import missing_package
from ragfence.errors import BuildMissing, RagfenceError, StoreAuth, StoreUnavailable, Unsupported, ValidationError
from ragfence.indexes.backends.backend import PAYLOAD, PREFIX, FoundRow, Metric, Pointer, Shape, row_schema
from ragfence.indexes.backends.shapes import Between, Kinds, check_search, check_shape, select_schema
from ragfence.stores.file_modes import make_folders, opener

if TYPE_CHECKING:
    from qdrant_client.http.exceptions import UnexpectedResponse

    from ragfence.indexes.embedders.embedder import Vectors

KINDS: Kinds = {
    "flat": {},
    "hnsw": {"m": Between(2, 2_048), "ef_construct": Between(4, 100_000), "ef": Between(1, 100_000)},
}
_BATCH = 512
_READ_ROWS = 2_048
_INDEXED_WITHIN_S = 3_600.0
_EF = "ragfence_ef"

_T = TypeVar("_T")


class _CollectionConfig(NamedTuple):
    dimension: int
    metric: Metric
    exact: bool
    ef: int | None


class QdrantBackend:
    """A `Backend` on the server at `url`, or in the folder `path` (one process at a time)."""

    name = "qdrant"

    def __init__(
        self,
        url: str | None = None,
        *,
        path: str | os.PathLike[str] | None = None,
        api_key: str | None = None,
        timeout_s: int = 60,
    ) -> None:
        if (url is None) == (path is None):
            raise ValidationError("QdrantBackend takes either the url of a server or the path of a folder")
        if find_spec("qdrant_client") is None:  # looked for, not imported: that takes a second
            raise missing_package("qdrant_client", "ragfence[qdrant]", "The index backend Qdrant")
        self._server, self._path = url, Path(path).absolute() if path is not None else None
        self._api_key, self._timeout_s = api_key, timeout_s
        self._connection: tuple[int, Any] | None = None
        # Local mode is plain Python with shared lists: one call at a time. A server needs no such lock.
        self._lock: contextlib.AbstractContextManager[Any] = (
            threading.RLock() if self._path is not None else contextlib.nullcontext()
        )
        self._opening = threading.Lock()

    @property
    def url(self) -> str:
        return f"qdrant+{self._path.as_uri()}" if self._path is not None else f"qdrant+{self._server}"

    def check(self, shape: Shape) -> None:
        check_shape("qdrant", KINDS, shape)

    def approximate(self, rows: int, dimension: int) -> tuple[str, dict[str, Any]] | None:
        """None in local mode, which always compares with every point."""
        return None if self._path is not None else ("hnsw", {"m": 16, "ef_construct": 128, "ef": 128})

    def write(self, physical: str, shape: Shape, tables: Iterable[Any]) -> int:
        self.check(shape)
        try:
            self._call(f"create {physical}", lambda client: self._create(client, physical, shape), raw=is_taken)
        except Exception as error:
            if is_taken(error):
                raise ValidationError(
                    f"{physical} exists already", hint="a physical name is never used twice; build again"
                ) from error
            raise
        if self._path is not None:
            silence()
        rows = 0
        for table in tables:
            for at in range(0, table.num_rows, _BATCH):
                self._on(physical, "write", partial(_upsert, physical, table.slice(at, _BATCH), shape.dimension))
            rows += table.num_rows
        return rows

    def finish(self, physical: str, shape: Shape) -> None:
        """Waits until the server has built the graph. Points that are not indexed yet are compared one by one."""
        if shape.index == "flat":
            return
        from qdrant_client.models import CollectionStatus

        deadline = time.monotonic() + _INDEXED_WITHIN_S
        while (status := self._on(physical, "look at", lambda client: client.get_collection(physical)).status) in (
            CollectionStatus.YELLOW,
            CollectionStatus.GREY,
        ):
            if time.monotonic() > deadline:
                raise StoreUnavailable(f"{physical} in {self.url} is not indexed after an hour ({status})")
            time.sleep(0.2)

    def exists(self, physical: str) -> bool:
        return bool(self._call(f"look for {physical}", lambda client: client.collection_exists(physical)))

    def count(self, physical: str) -> int:
        return int(self._on(physical, "count", lambda client: client.count(physical, exact=True).count))

    def read(self, physical: str, columns: Sequence[str] | None = None) -> Iterator[Any]:
        return self._scroll(physical, select_schema(row_schema(self._read_config(physical).dimension), columns))

    def remove(self, physical: str, doc_ids: Sequence[str]) -> None:
        """Deletes points. Local mode rewrites its file; a server drops the bytes when it merges segments."""
        from qdrant_client import models

        if not doc_ids:
            return
        condition = models.FieldCondition(key="doc_id", match=models.MatchAny(any=list(doc_ids)))
        chosen = models.FilterSelector(filter=models.Filter(must=[condition]))
        with self._lock:
            self._on(physical, "remove rows of", lambda client: client.delete(physical, chosen, wait=True))
            if self._path is not None:
                vacuum(self._path, physical)

    def search(self, physical: str, vector: Vectors, k: int) -> list[FoundRow]:
        from qdrant_client import models

        known = self._read_config(physical)
        check_search(known.dimension, known.metric, vector, k)
        # Local mode is always exact, and warns about parameters it does not need.
        how = None if self._path is not None else models.SearchParams(exact=known.exact, hnsw_ef=known.ef)
        answer = self._on(
            physical,
            "search",
            lambda client: client.query_points(
                physical, query=vector.tolist(), limit=k, search_params=how, with_payload=True
            ),
        )
        return [
            FoundRow(**{name: point.payload[name] for name in PAYLOAD}, score=_score(known.metric, point.score))
            for point in answer.points
        ]

    def drop(self, physical: str) -> None:
        with contextlib.suppress(BuildMissing):
            self._on(physical, "drop", lambda client: client.delete_collection(physical))

    def physicals(self) -> list[str]:
        listed = self._call("list the collections", lambda client: client.get_collections()).collections
        return sorted(each.name for each in listed if each.name.startswith(PREFIX))

    def point(self, alias: str, physical: str, generation: int) -> None:
        from qdrant_client import models

        change = models.CreateAliasOperation(
            create_alias=models.CreateAlias(collection_name=physical, alias_name=alias)
        )
        self._on(physical, "point an alias at", lambda client: client.update_collection_aliases([change]))

    def pointer(self, alias: str) -> Pointer | None:
        listed = self._call("read the aliases", lambda client: client.get_aliases()).aliases
        found = next((each.collection_name for each in listed if each.alias_name == alias), None)
        return Pointer(found, None) if found is not None else None

    def unpoint(self, alias: str) -> None:
        from qdrant_client import models

        change = models.DeleteAliasOperation(delete_alias=models.DeleteAlias(alias_name=alias))
        with contextlib.suppress(BuildMissing):
            self._on(alias, "delete the alias", lambda client: client.update_collection_aliases([change]))

    def close(self) -> None:
        with self._opening:
            opened, self._connection = self._connection, None
        if opened is not None and opened[0] == os.getpid():
            with self._lock:
                opened[1].close()

    def _create(self, client: Any, physical: str, shape: Shape) -> None:
        from qdrant_client import models

        distances = {"cosine": models.Distance.COSINE, "dot": models.Distance.DOT, "l2": models.Distance.EUCLID}
        given = dict(shape.parameters)
        ef = given.pop("ef", None)
        # m = 0: no graph is built, and every search is exact.
        graph = models.HnswConfigDiff(m=0) if shape.index == "flat" else models.HnswConfigDiff(**given)
        client.create_collection(
            physical,
            vectors_config=models.VectorParams(
                size=shape.dimension, distance=distances[shape.metric], hnsw_config=graph
            ),
            metadata={_EF: ef} if ef is not None else None,
        )
        if self._path is None:  # for `remove`; local mode does not need it, and warns about it
            client.create_payload_index(physical, "doc_id", models.PayloadSchemaType.KEYWORD, wait=True)

    def _read_config(self, physical: str) -> _CollectionConfig:
        config = self._on(physical, "open", lambda client: client.get_collection(physical)).config
        vectors = config.params.vectors
        metrics: dict[str, Metric] = {"Cosine": "cosine", "Dot": "dot", "Euclid": "l2"}
        graph = vectors.hnsw_config
        return _CollectionConfig(
            vectors.size,
            metrics[vectors.distance.value],
            graph is not None and graph.m == 0,
            (config.metadata or {}).get(_EF),
        )

    def _scroll(self, physical: str, schema: Any) -> Iterator[Any]:
        import pyarrow as pa

        offset: Any = None
        payload = [name for name in schema.names if name != "vector"]
        vectors = "vector" in schema.names
        while True:
            how = {"with_payload": payload or False, "with_vectors": vectors, "offset": offset}
            points, offset = self._on(physical, "read", partial(_page, physical, how))
            if points:
                values = {name: [point.payload[name] for point in points] for name in payload}
                if vectors:
                    values["vector"] = [point.vector for point in points]
                yield pa.table([pa.array(values[field.name], field.type) for field in schema], schema=schema)
            if offset is None:
                return

    def _on(self, physical: str, what: str, act: Callable[[Any], _T]) -> _T:
        """Like `_call`, for a collection that may be missing."""
        try:
            return self._call(f"{what} {physical}", act, raw=is_missing)
        except Exception as error:
            if is_missing(error):
                raise BuildMissing(f"{physical} is not in {self.url}") from error
            raise

    def _call(self, what: str, act: Callable[[Any], _T], *, raw: Callable[[Exception], bool] | None = None) -> _T:
        """Calls the client and translates its errors, except those that the caller wants `raw`."""
        client = self._client
        try:
            with self._lock:
                return act(client)
        except Exception as error:
            ours = isinstance(error, ValidationError) or not isinstance(error, _client_errors())
            if ours or (raw is not None and raw(error)):
                raise
            raise translate(error, what, self.url) from error

    @property
    def _client(self) -> Any:
        opened = self._connection
        if opened is None or opened[0] != os.getpid():
            with self._opening:
                opened = self._connection
                if opened is None:
                    opened = self._connection = (os.getpid(), self._connect())
                elif opened[0] != os.getpid():
                    if self._path is not None:
                        raise Unsupported(
                            f"{self.url} was opened before this process was forked; local mode allows one process",
                            hint="open it after the fork, or run a Qdrant server: qdrant+http://host:6333",
                        )
                    opened = self._connection = (os.getpid(), self._connect())
        return opened[1]

    def _connect(self) -> Any:
        if self._path is not None:
            return open_local(self._path)
        from qdrant_client import QdrantClient

        key = self._api_key or os.environ.get("QDRANT_API_KEY")
        return QdrantClient(url=self._server, api_key=key, timeout=self._timeout_s, check_compatibility=False)


def _upsert(physical: str, table: Any, dimension: int, client: Any) -> None:
    client.upsert(physical, _points(table, dimension), wait=True)


def _page(physical: str, how: dict[str, Any], client: Any) -> Any:
    return client.scroll(physical, limit=_READ_ROWS, **how)


def _points(table: Any, dimension: int) -> Any:
    import numpy as np
    from qdrant_client.models import Batch

    columns = {name: table.column(name).to_pylist() for name in PAYLOAD}
    vectors = np.asarray(table.column("vector").combine_chunks().flatten(), dtype=np.float32)
    rows = zip(*columns.values(), strict=True)
    return Batch(
        ids=[_point_id(snippet_id) for snippet_id in columns["snippet_id"]],
        vectors=vectors.reshape(-1, dimension).tolist(),
        payloads=[dict(zip(PAYLOAD, row, strict=True)) for row in rows],
    )


def _point_id(snippet_id: str) -> str:
    try:
        return str(UUID(hex=snippet_id))
    except ValueError as other:
        raise ValidationError(f"{snippet_id!r} is not a valid snippet_id, which has 32 hex digits") from other


def _score(metric: Metric, score: float) -> float:
    """Converts Qdrant's score, which is a similarity, or for l2 the distance."""
    return -(score * score) if metric == "l2" else score


def _client_errors() -> tuple[type[Exception], ...]:
    from qdrant_client.http.exceptions import ResponseHandlingException, UnexpectedResponse

    return UnexpectedResponse, ResponseHandlingException, ValueError, RuntimeError


def _response(error: Exception) -> UnexpectedResponse | None:
    """The server's response, if the error is one."""
    from qdrant_client.http.exceptions import UnexpectedResponse

    return error if isinstance(error, UnexpectedResponse) else None


def is_missing(error: Exception) -> bool:
    if response := _response(error):
        return response.status_code == 404
    return "not found" in str(error)


def is_taken(error: Exception) -> bool:
    if response := _response(error):
        return response.status_code == 409 or "already exists" in _said(error)
    return "already exists" in str(error)


def translate(error: Exception, what: str, where: str) -> RagfenceError:
    """Returns the error with what could not be done, at which server, and what to do about it."""
    said = f"cannot {what}, {where}: {_said(error)}"
    if response := _response(error):
        if response.status_code in (401, 403):
            return StoreAuth(said, hint="set QDRANT_API_KEY to a key that may write and delete collections")
        if response.status_code in (400, 422):
            return ValidationError(said, hint="the server refused the request; is it as new as qdrant-client?")
        return StoreUnavailable(said)
    return StoreUnavailable(said)


def _said(error: Exception) -> str:
    if response := _response(error):
        body = response.content.decode(errors="replace") if response.content else response.reason_phrase
        return f"{response.status_code} {' '.join(body.split())[:300]}"
    return " ".join(str(error).split())[:300]


def open_local(folder: Path) -> Any:
    from qdrant_client import QdrantClient

    silence()
    try:
        make_folders(folder)
        _refuse_second(folder)
        return QdrantClient(path=str(folder))
    except RuntimeError as error:  # another process was faster
        raise _in_use(folder) from error
    except OSError as error:
        raise StoreUnavailable(
            f"cannot keep an index in {folder}: {error.strerror or error}",
            hint="name a folder that can be created and written to",
        ) from error


def silence() -> None:
    """Silences the warning about more than 20,000 points, which local mode repeats at every step."""
    warnings.filterwarnings("ignore", message="Local mode is not recommended", category=UserWarning)


def vacuum(folder: Path, physical: str) -> None:
    """Rewrites the file of a collection: deleted points stay in its free pages until then."""
    file = folder / "collection" / physical / "storage.sqlite"
    if file.exists():
        with contextlib.closing(sqlite3.connect(file, timeout=30)) as db:
            db.execute("VACUUM")


def _refuse_second(folder: Path) -> None:
    """Refuses a second process. qdrant-client would, too, but leaves an open file behind."""
    with open(folder / ".lock", "a+", opener=opener) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as taken:
            raise _in_use(folder) from taken


def _in_use(folder: Path) -> StoreUnavailable:
    return StoreUnavailable(
        f"{folder} is open in another process or client; Qdrant's local mode allows one at a time",
        hint="close the other one, or run a Qdrant server: qdrant+http://host:6333",
    )
