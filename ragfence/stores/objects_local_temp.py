"""What is being written into a folder of objects: files that nobody can see as objects, and that go in any case.

A writer that is killed leaves its file, which may hold the text of a document that somebody has to forget. So each
writer holds a lock on its file as long as it needs it, and whoever sweeps takes what no one holds. A lock says nothing
about writers on other machines (whether a network filesystem passes it on is a matter of how it is mounted), so a name
begins with the machine that wrote it; what others have left goes when it is old.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from ragfence.stores.file_modes import PRIVATE, open_file

STALE_S = 24 * 3600

Inode = tuple[int, int]
"""a device, and the number of a file on it"""


class Temp(NamedTuple):
    """A file that is finished and synced, and still held."""

    path: Path
    descriptor: int

    def drop(self) -> None:
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
            temp.drop()
            raise
        return temp

    def sweep(self, deleted: Collection[Inode] = ()) -> bool:
        """Removes what nobody writes any more, and other names of files that are to be deleted; says if it did.

        A live writer that is hit, because it is a day behind or its lock does not count, gets a transient error.
        """
        swept = False
        try:
            found = os.scandir(self._folder)
        except FileNotFoundError:  # somebody removed it by hand
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
            os.close(descriptor)  # somebody swept it before it was held


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
