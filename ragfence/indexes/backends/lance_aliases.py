"""Aliases in LanceDB, which has none: a small table, for readers that do not use ragfence.

    ragfence-aliases (alias, physical, generation)

A row changes only by a merge that compares the generation inside the commit, so an older generation never overwrites a
newer one, however many processes write. The table itself is not created so safely: if two processes find none, LanceDB
lets the later one overwrite the other's table. So a lock is held, between the threads of a process and, in a folder,
between processes. On S3 the first pointers of a database can be lost this way; `reconcile` sets them again.
"""

from __future__ import annotations

import contextlib
import fcntl
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from ragfence.indexes.backends.backend import Pointer
from ragfence.indexes.backends.lance_errors import LanceError, no_table
from ragfence.stores.file_modes import make_folders, opener

TABLE = "ragfence-aliases"
_TIDY_EVERY = 64
_KEEP = timedelta(hours=1)
_making = threading.Lock()


def point(connection: Any, lock_file: Path | None, alias: str, physical: str, generation: int) -> None:
    """Sets an alias. `lock_file` is given for databases in a folder."""
    import pyarrow as pa

    schema = pa.schema([("alias", pa.string()), ("physical", pa.string()), ("generation", pa.int64())])
    table = _table(connection, lock_file, schema)
    row = pa.table({"alias": [alias], "physical": [physical], "generation": [generation]}, schema=schema)
    (
        table.merge_insert("alias")
        .when_matched_update_all(where="target.generation <= source.generation")
        .when_not_matched_insert_all()
        .execute(row)
    )
    if table.version % _TIDY_EVERY == 0:
        with contextlib.suppress(*LanceError):  # the next one tidies up
            table.optimize(cleanup_older_than=_KEEP)


def _table(connection: Any, lock_file: Path | None, schema: Any) -> Any:
    try:
        return connection.open_table(TABLE)
    except LanceError as error:
        if not no_table(error):
            raise
    with _making, file_lock(lock_file):
        return connection.create_table(TABLE, schema=schema, exist_ok=True)


@contextlib.contextmanager
def file_lock(file: Path | None) -> Iterator[None]:
    """Holds a lock between processes. Without a file, nothing is locked."""
    if file is None:
        yield
        return
    make_folders(file.parent)
    with open(file, "a", opener=opener) as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield


def pointer(table: Any, alias: str) -> Pointer | None:
    rows = table.search().where(_is(alias)).limit(None).to_list()
    # Two first writers of an alias may both have inserted a row: the newer one counts.
    newest = max(rows, key=lambda row: row["generation"], default=None)
    return Pointer(newest["physical"], newest["generation"]) if newest else None


def unpoint(table: Any, alias: str) -> None:
    table.delete(_is(alias))


def quote(text: str) -> str:
    """Returns the text as a literal of LanceDB's SQL, whose only escape is the doubled quote."""
    return "'" + text.replace("'", "''") + "'"


def _is(alias: str) -> str:
    return f"alias = {quote(alias)}"
