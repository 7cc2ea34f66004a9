"""Opens files and folders of a source, without following links and without waiting.

A source may hold what other users put there: links that lead out of it, named pipes that never end an `open`,
devices. Between the listing of a folder and the reading of a file, any folder on the way may be swapped for a link.
So every component of a path is opened relative to the one before it, never through a link, and only regular files
are read.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class NotRegularFileError(OSError):
    """The path names a pipe, a device or a socket; `kind` says which."""

    def __init__(self, kind: str) -> None:
        super().__init__(errno.EINVAL, "it is not a regular file")
        self.kind = kind


@contextmanager
def open_root(root: str) -> Iterator[int]:
    """The descriptor of the root. The root itself may be reached through links: its owner named it."""
    descriptor = os.open(root, _FOLDER)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def open_folder(root: int, relative: str) -> Iterator[int]:
    """The descriptor of a folder below the root, reached without following any link.

    Raises:
        NotADirectoryError: a component of the path is a link or a file.
    """
    folder = os.dup(root)
    try:
        for name in relative.split("/"):
            if name:
                inner = _open_inner(name, folder)
                os.close(folder)
                folder = inner
        yield folder
    finally:
        os.close(folder)


def _open_inner(name: str, folder: int) -> int:
    try:
        return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:  # the code of some systems where others use ENOTDIR
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from error
        raise


def open_regular_file(path: str, *, folder: int | None = None, follow_links: bool = False) -> BinaryIO:
    """Opens a regular file for reading, and nothing else.

    Args:
        path: The path, or the name inside `folder`.
        folder: The descriptor of the folder that `path` is relative to.
        follow_links: Whether `path` may be a link; for a path that the caller's user named.

    Raises:
        IsADirectoryError: it is a folder.
        NotRegularFileError: it is something else; nothing of it was read.
    """
    flags = _FILE if follow_links else _FILE | os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket
            raise NotRegularFileError("a socket") from error
        raise
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(mode):
            raise NotRegularFileError(_kind(mode))
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _kind(mode: int) -> str:
    if stat.S_ISFIFO(mode):
        return "a named pipe"
    return "a device" if stat.S_ISCHR(mode) or stat.S_ISBLK(mode) else "something else"
