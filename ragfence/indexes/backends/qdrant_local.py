"""What is particular to Qdrant's local mode: one process per folder, and SQLite files underneath."""

from __future__ import annotations

import contextlib
import fcntl
import sqlite3
import warnings
from pathlib import Path
from typing import Any

from ragfence.errors import StoreUnavailable
from ragfence.stores.file_modes import make_folders, opener


def open_local(folder: Path) -> Any:
    from qdrant_client import QdrantClient

    silence()
    try:
        make_folders(folder)
        _refuse_second(folder)
        return QdrantClient(path=str(folder))
    except RuntimeError as error:  # somebody came between
        raise _in_use(folder) from error
    except OSError as error:
        raise StoreUnavailable(
            f"cannot keep an index in {folder}: {error.strerror or error}",
            hint="name a folder that can be made and written to",
        ) from error


def silence() -> None:
    """Local mode warns of more than 20,000 points at every step. docs/backends.md says it once."""
    warnings.filterwarnings("ignore", message="Local mode is not recommended", category=UserWarning)


def vacuum(folder: Path, physical: str) -> None:
    """Deleted points stay in the free pages of the file until it is written anew."""
    file = folder / "collection" / physical / "storage.sqlite"
    if file.exists():
        with contextlib.closing(sqlite3.connect(file, timeout=30)) as db:
            db.execute("VACUUM")


def _refuse_second(folder: Path) -> None:
    """qdrant-client would refuse as well, but leaves an open file behind."""
    with open(folder / ".lock", "a+", opener=opener) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as taken:
            raise _in_use(folder) from taken


def _in_use(folder: Path) -> StoreUnavailable:
    return StoreUnavailable(
        f"{folder} is open in another process or client: Qdrant's local mode is for one at a time",
        hint="close the other one, or run a Qdrant server: qdrant+http://host:6333",
    )
