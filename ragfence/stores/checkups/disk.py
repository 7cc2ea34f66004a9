"""Looks at what is embedded: the SQLite file and the folder of objects. Creates neither."""

from __future__ import annotations

import os
import secrets
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from ragfence.errors import RagfenceError
from ragfence.stores.checkups.check import Check, fail, filesystem_check, filesystem_of, ok, refused, space_check, warn
from ragfence.stores.local import LocalObjects
from ragfence.stores.sqlite import SCHEMA_VERSION

_MOUNTS = Path("/proc/self/mounts")


def sqlite_checks(path: Path) -> Iterator[Check]:
    """What can be said of the file without a fence store on top of it."""
    subject = "sqlite"
    if not path.exists():
        yield from _absent(subject, path)
    else:
        yield from _file(subject, path)
    folder = _nearest(path)
    needs = "WAL needs shared memory, which it has only between the processes of one machine"
    yield filesystem_check(subject, _filesystem(folder), needs=needs)
    yield _space(subject, folder)


def folder_checks(root: Path) -> Iterator[Check]:
    subject = "objects"
    if not root.exists():
        yield from _absent(subject, root)
    else:
        yield _create_only(subject, root)
    yield _space(subject, _nearest(root))


MOST_EXPIRED = 10_000
"""what is counted of a backlog: counting more would take as long as purging it"""


def expired_records(path: Path, tenant: str, now_ms: int) -> int:
    """How many records and sources of the file have expired and wait to be purged: of each, up to `MOST_EXPIRED`."""
    with closing(_read_only(path)) as db:
        counted = [
            db.execute(
                f"SELECT count(*) FROM (SELECT 1 FROM {table} WHERE tenant = ? AND expires_ms <= ? LIMIT ?)",
                (tenant, now_ms, MOST_EXPIRED),
            ).fetchone()[0]
            for table in ("records", "sources")
        ]
    return sum(counted)


def _file(subject: str, path: Path) -> Iterator[Check]:
    try:
        with closing(_read_only(path)) as db:
            version = db.execute("PRAGMA user_version").fetchone()[0]
            mode = db.execute("PRAGMA journal_mode").fetchone()[0]
            damage = [row[0] for row in db.execute("PRAGMA quick_check(5)")]
    except sqlite3.Error as broken:
        yield fail(
            subject,
            f"{path} cannot be read: {broken}",
            "check its rights; if it is damaged, move it away: a new one is hydrated from the folder of objects",
        )
        return
    if version > SCHEMA_VERSION:
        yield fail(subject, f"{path} has schema {version}, this ragfence knows {SCHEMA_VERSION}", "upgrade ragfence")
        return
    if damage != ["ok"]:
        yield fail(
            subject,
            f"{path} is damaged: {'; '.join(damage)}",
            "stop what uses it and move it away: a new one is hydrated from the folder of objects",
        )
    elif not os.access(path, os.W_OK) or not os.access(path.parent, os.W_OK):
        yield fail(subject, f"{path} is not writable", "give this user write access to the file and its folder")
    else:
        yield ok(subject, f"{path}, {path.stat().st_size / 2**20:.1f} MiB, quick_check finds nothing")
    if mode == "wal":
        yield ok(subject, "journal_mode is wal")
    else:
        yield warn(subject, f"journal_mode is {mode}", "nothing to do: the next process that opens it turns WAL on")


def _create_only(subject: str, root: Path) -> Check:
    """One object, written twice: that needs rights, room, fsync and hard links."""
    name = f".probe/{secrets.token_hex(8)}"
    try:
        objects = LocalObjects(root)
        first, again = objects.put_new(name, b"first"), objects.put_new(name, b"second")
        objects.delete([name])
    except RagfenceError as error:
        return refused(subject, error)
    if not first.won or again.won or again.existing != b"first":
        return fail(
            subject, f"{root} let a second write of the same name win", "keep the objects on a local disk, or on S3"
        )
    return ok(subject, f"{root} is writable, and create-only writes work")


def _absent(subject: str, path: Path) -> Iterator[Check]:
    there = _nearest(path)
    if os.access(there, os.W_OK | os.X_OK):
        yield ok(subject, f"{path} is not there yet; it is made by the first claim")
    else:
        yield fail(
            subject,
            f"{path} is not there, and {there} is not writable",
            "name another place (--store, --objects), or give this user write access",
        )


def _nearest(path: Path) -> Path:
    """The path, or the closest folder above it that exists."""
    return next(place for place in (path, *path.parents) if place.exists())


def _filesystem(path: Path) -> str:
    try:
        return filesystem_of(str(path.resolve()), _MOUNTS.read_text(errors="replace"))
    except OSError:
        return ""


def _space(subject: str, path: Path) -> Check:
    try:
        usage = shutil.disk_usage(path)
    except OSError as broken:
        return warn(subject, f"the room on the disk of {path} cannot be seen: {broken}", "check the disk")
    return space_check(subject, usage.free, usage.total)


def _read_only(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=5.0)
