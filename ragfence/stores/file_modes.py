"""Who may read what ragfence keeps on a disk: its owner, and a group if the folder was made for one.

Files get 0600 and folders 0700, whatever the umask. Only in a folder that has the setgid bit and that its group, but
not everyone, may write to (2770, 2775) they get 0660 and 2770: such a folder was made for a team. What exists
keeps the mode it has.

The umask is never changed: it belongs to the whole process, so other threads would make their files under it.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

_TEAM = stat.S_ISGID | stat.S_IWGRP


class Modes(NamedTuple):
    """What is made in a folder gets these."""

    file: int = 0o600
    folder: int = 0o700
    for_group: bool = False
    """the umask would take some of it away, so it is set once more"""


PRIVATE, TEAM = Modes(), Modes(0o660, 0o2770, for_group=True)


def modes_in(folder: str | os.PathLike[str]) -> Modes:
    """The modes of what is made in a folder that exists."""
    return TEAM if os.stat(folder).st_mode & (_TEAM | stat.S_IWOTH) == _TEAM else PRIVATE


def make_folder(folder: str | os.PathLike[str], modes: Modes) -> None:
    os.mkdir(folder, modes.folder)
    if modes.for_group:
        os.chmod(folder, modes.folder)


def make_folders(folder: Path, made: Callable[[Path], None] = lambda folder: None) -> None:
    """Makes the folder and its missing parents; calls `made` with each."""
    if folder.is_dir():
        return
    if folder.parent != folder:
        make_folders(folder.parent, made)
    try:
        make_folder(folder, modes_in(folder.parent))
    except FileExistsError:
        if not folder.is_dir():
            raise
    made(folder)


def open_file(path: str | os.PathLike[str], flags: int, modes: Modes) -> int:
    """As `os.open`; a file that is not there is made."""
    if modes.for_group:
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, modes.file)
            os.fchmod(descriptor, modes.file)
            return descriptor
    return os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, modes.file)


def opener(path: str, flags: int) -> int:
    """For the `opener` of Python's `open`."""
    return open_file(path, flags, modes_in(os.path.dirname(path) or "."))


def make_empty_file(path: Path) -> None:
    """An empty file, unless there is one; it is never open here.

    Closing a file that SQLite has open in another thread would end the locks of the whole process on it.
    """
    file = os.path.realpath(path)  # also where a link leads to
    if os.path.exists(file):
        return
    modes = modes_in(os.path.dirname(file))
    try:
        os.mknod(file, stat.S_IFREG | modes.file)
    except FileExistsError:
        return
    except (OSError, AttributeError):  # not every system lets everybody make files this way
        try:
            os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, modes.file))
        except FileExistsError:
            return
    if modes.for_group:
        os.chmod(file, modes.file)
