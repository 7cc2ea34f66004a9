"""Objects in a local folder: the embedded default, no server.

`<root>/objects/` holds one file per object, `<root>/.tmp/` what is being written. An object appears by
`os.link` of a finished, synced file, which fails if the name is taken: that makes it create-only, whole from
the first moment it can be seen, and (after a sync of its folder) still there after a power cut. Works between
processes; on a network filesystem as far as its links are atomic.

What is being written into a folder of objects: files that are not visible as objects, and that are removed in any case.

A writer that is killed leaves its file, which may hold the text of a document that must be deleted. So each
writer holds a lock on its file as long as it needs it, and a sweep removes the files without a lock. A lock says
nothing about writers on other machines (whether a network filesystem passes it on depends on how it is mounted), so a
name begins with the machine that wrote it; what others have left is removed when it is old.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import time
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from ragfence.errors import (
    CommitUncertain,
    RagfenceError,
    StoreUnavailable,
    StoreUnsafe,
    UnknownStore,
    ValidationError,
)
from ragfence.stores.file_modes import PRIVATE, make_folder, make_folders, modes_in, open_file
from ragfence.stores.objects import ObjectEntry, Put, check_listing, check_name, is_name

STALE_S = 24 * 3600

Inode = tuple[int, int]
"""a device, and the number of a file on it"""


class Temp(NamedTuple):
    """A file that is finished and synced, and still held."""

    path: Path
    descriptor: int

    def discard(self) -> None:
        with contextlib.suppress(OSError):  # first: a network filesystem keeps what is removed while it is open
            os.close(self.descriptor)
        with contextlib.suppress(OSError):  # the sweep gets it
            self.path.unlink()


class TempFiles:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.modes = PRIVATE

    def write(self, data: bytes) -> Temp:
        temp = self._new()
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(temp.descriptor, left) :]
            os.fsync(temp.descriptor)
        except BaseException:
            temp.discard()
            raise
        return temp

    def sweep(self, deleted: Collection[Inode] = ()) -> bool:
        """Removes files without a writer, and other names of files that are to be deleted; returns whether it did.

        A live writer that is hit, because it is a day behind or its lock does not count, gets a transient error.
        """
        swept = False
        try:
            found = os.scandir(self._folder)
        except FileNotFoundError:  # it was removed by hand
            return False
        with found:
            for item in found:
                try:
                    status = item.stat(follow_symlinks=False)
                except OSError:
                    continue
                if (status.st_dev, status.st_ino) in deleted:
                    # Its writer was killed between the link and this. Not suppressed: the content would stay readable.
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(item.path)
                    swept = True
                elif time.time() - status.st_mtime > STALE_S:
                    with contextlib.suppress(OSError):
                        os.unlink(item.path)
                        swept = True
                elif MACHINE and item.name.startswith(f"{MACHINE}-"):
                    swept |= _unlinked_if_free(item.path)
        return swept

    def _new(self) -> Temp:
        while True:
            path = self._folder / f"{MACHINE}-{secrets.token_hex(16)}"
            descriptor = open_file(path, os.O_RDWR | os.O_EXCL, self.modes)
            if _locked(descriptor) is not False and os.fstat(descriptor).st_nlink:
                return Temp(path, descriptor)
            os.close(descriptor)  # it was swept before it was locked


def _locked(descriptor: int) -> bool | None:
    """None: there are no locks here, so nobody will get one and sweep."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _unlinked_if_free(path: str) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # some network filesystems lock only what may be written
    except OSError:
        return False
    try:
        if not _locked(descriptor):
            return False
        os.unlink(path)  # while it is held: a writer that has just made it notices
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _machine() -> str:
    """This machine since it was booted; empty where it does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().replace("-", "").strip()[:16]
    except OSError:
        return ""


MACHINE = _machine()


_KNOWN_FOLDERS_MAX = 10_000
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV}
_NOT_THERE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


class LocalObjects:
    """An `ObjectStore` in the folder `root`, which is created if need be.

    Deleted objects leave their folders behind: a concurrent `put_new` may be about to link into one.
    """

    def __init__(self, root: Path) -> None:
        self._root = Path(root).absolute()
        self._objects = self._root / "objects"
        self._temp = TempFiles(self._root / ".tmp")
        self._durable: set[Path] = set()  # folders whose own entry this process has synced
        try:
            for folder in (self._objects, self._root / ".tmp"):
                make_folders(folder, made=lambda made: _sync_folder(made.parent))
            self._temp.modes = self._modes = modes_in(self._root)
            self._temp.sweep()
        except (FileExistsError, NotADirectoryError) as error:
            raise UnknownStore(
                f"cannot keep objects in {self._root}: {error.strerror}: {error.filename}",
                hint="name a folder, or a path where one can be made",
            ) from error
        except OSError as error:
            raise self._failed("open the folder", error) from error

    @property
    def url(self) -> str:
        return self._root.as_uri()

    def get(self, name: str) -> bytes | None:
        check_name(name)
        try:
            return (self._objects / name).read_bytes()
        except _NOT_THERE:
            return None
        except OSError as error:
            raise self._failed(f"read {name}", error) from error

    def check_folder(self) -> None:
        """Raises if the folder is gone, of which no `get` tells: an object that is not there is no error."""
        try:
            os.stat(self._objects)
        except OSError as error:
            raise self._failed("find the objects", error) from error

    def put_new(self, name: str, data: bytes) -> Put:
        check_name(name)
        existing = self.get(name)
        if existing is not None:
            return self._lost(name, existing)
        try:
            temp = self._temp.write(data)
        except OSError as error:
            raise self._failed(f"write {name}", error) from error
        try:
            return self._link(temp.path, name)
        finally:
            temp.discard()

    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> Iterator[ObjectEntry]:
        check_listing(prefix, limit)
        base = prefix[: prefix.rfind("/") + 1]
        return islice(self._walk(base, prefix, start_after), limit)

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            check_name(name)
        # Before the objects are deleted: a process that is killed in between finds both again.
        folders = {self._root / ".tmp"} if self._swept(names) else set()
        for name in names:
            target = self._objects / name
            try:
                if target.is_dir():
                    continue  # a folder, so no object
                target.unlink()
                folders.add(target.parent)
            except _NOT_THERE:
                continue
            except OSError as error:
                raise self._failed(f"delete {name}", error) from error
        for folder in folders:  # a purge must stay purged after a power cut
            try:
                _sync_folder(folder)
            except OSError as error:
                raise self._failed(f"sync {folder}", error) from error

    def close(self) -> None:
        """Nothing is kept open."""

    def _swept(self, deleted: Sequence[str]) -> bool:
        """What killed writers left goes, above all a second name of one of these objects."""
        twice: set[Inode] = set()
        try:
            for name in deleted:
                with contextlib.suppress(*_NOT_THERE):
                    status = os.lstat(self._objects / name)
                    if status.st_nlink > 1:
                        twice.add((status.st_dev, status.st_ino))
            return self._temp.sweep(twice)
        except OSError as error:
            raise self._failed("remove what killed writers left", error) from error

    def _link(self, temp: Path, name: str) -> Put:
        target = self._objects / name
        for again in (True, False):
            try:
                self._make_folder(target.parent)
            except OSError as error:
                raise self._failed(f"make the folder of {name}", error) from error
            try:
                os.link(temp, target)
            except FileExistsError:
                outcome = self._taken(temp, name)
                if outcome is None and again:
                    continue  # deleted since
                if outcome is None:
                    raise CommitUncertain(f"{name} keeps coming and going in {self._root}") from None
                return outcome
            except FileNotFoundError as error:
                self._durable.clear()  # folders were removed by hand
                if not again:
                    raise self._failed(f"write {name}", error) from error
                continue
            except OSError as error:
                raise self._link_failed(name, error) from error
            self._sync(target.parent, name)
            return Put(won=True)
        raise AssertionError("unreachable")

    def _taken(self, temp: Path, name: str) -> Put | None:
        target = self._objects / name
        if target.is_dir():
            raise _both(name)
        with contextlib.suppress(OSError):
            if os.path.samefile(temp, target):  # NFS: the reply to our own link was lost, its repetition got EEXIST
                self._sync(target.parent, name)
                return Put(won=True)
        existing = self.get(name)
        return None if existing is None else self._lost(name, existing)

    def _lost(self, name: str, existing: bytes) -> Put:
        # The winner may not have synced yet, and a caller that gets "lost" relies on the object for ever.
        self._sync((self._objects / name).parent, name)
        return Put(won=False, existing=existing)

    def _make_folder(self, folder: Path) -> None:
        """Makes a folder durably; also one that another process made, but may not have synced yet."""
        if folder == self._objects or folder in self._durable:
            return
        self._make_folder(folder.parent)
        with contextlib.suppress(FileExistsError):
            make_folder(folder, self._modes)
        if not folder.is_dir():
            raise _both(folder.relative_to(self._objects).as_posix())
        _sync_folder(folder.parent)
        if len(self._durable) >= _KNOWN_FOLDERS_MAX:
            self._durable.clear()
        self._durable.add(folder)

    def _sync(self, folder: Path, name: str) -> None:
        try:
            _sync_folder(folder)
        except OSError as error:
            raise CommitUncertain(f"{name} was written to {self._root}, but could not be synced: {error}") from error

    def _walk(self, base: str, prefix: str, start_after: str) -> Iterator[ObjectEntry]:
        """In full-name order, folder by folder. `base` is empty or ends with `/`."""
        try:
            with os.scandir(self._objects / base) as found:
                # A folder stands where its contents stand: at "a/", after "a-b".
                keys = sorted(
                    f"{base}{item.name}/" if item.is_dir(follow_symlinks=False) else f"{base}{item.name}"
                    for item in found
                )
        except _NOT_THERE:
            return
        except OSError as error:
            raise self._failed(f"list {base}", error) from error
        for key in keys:
            if key.endswith("/"):
                wanted = key.startswith(prefix) or prefix.startswith(key)
                if wanted and (key > start_after or start_after.startswith(key)):
                    yield from self._walk(key, prefix, start_after)
            elif key.startswith(prefix) and key > start_after and is_name(key):
                try:
                    status = os.stat(self._objects / key)
                except _NOT_THERE:
                    continue  # deleted since
                except OSError as error:
                    raise self._failed(f"list {base}", error) from error
                yield ObjectEntry(key, status.st_size, status.st_mtime_ns // 1_000_000)

    def _link_failed(self, name: str, error: OSError) -> RagfenceError:
        if error.errno in _NO_LINKS:
            return StoreUnsafe(
                f"the filesystem of {self._root} cannot link files: {error.strerror}",
                hint="create-only writes need hard links: keep the objects on a local disk, or on S3",
            )
        if error.errno in _HINTS:
            return self._failed(f"write {name}", error)
        return CommitUncertain(f"cannot say whether {name} was written to {self._root}: {error}")

    def _failed(self, what: str, error: OSError) -> StoreUnavailable:
        hint = _HINTS.get(error.errno or 0, "check the disk under {root}, then try again")
        return StoreUnavailable(
            f"cannot {what} in {self._root}: {error.strerror or error}", hint=hint.format(root=self._root)
        )


_FULL = "free some space on the disk of {root}, then try again; nothing was lost"
_DENIED = "give this user write access to {root} and everything in it"
_HINTS = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EACCES: _DENIED,
    errno.EPERM: _DENIED,
    errno.EROFS: _DENIED,
    errno.EMFILE: "raise the limit of open files (ulimit -n), then try again",
}


def _both(name: str) -> ValidationError:
    return ValidationError(
        f"{name} would be both an object and the folder of others",
        hint="choose names of which none is a folder of another",
    )


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
