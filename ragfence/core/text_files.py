"""Small files that users write for us, read with a bound: a policy, the URL of a store, golden queries."""

from __future__ import annotations

import os
import stat

_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


class UnreadableFile(ValueError):
    """A file that cannot be what was asked for: it is not a regular one, too big, or not text.

    For the reader to translate; `limit` is the number of bytes that was exceeded.
    """

    def __init__(self, problem: str, limit: int | None = None) -> None:
        super().__init__(problem)
        self.limit = limit


def read_text_file(path: str | os.PathLike[str], limit_bytes: int) -> str:
    """The text of a regular file of at most `limit_bytes`; refuses what `read_regular_file` refuses."""
    data = read_regular_file(path, limit_bytes)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as broken:
        raise UnreadableFile(f"cannot be read: {broken}") from broken


def read_regular_file(path: str | os.PathLike[str], limit_bytes: int) -> bytes:
    """What is in a regular file of at most `limit_bytes`.

    A pipe or a device is refused before anything is read: it may never end, or never begin. Raises `UnreadableFile`,
    or the `OSError` of a file that is not there or not readable.
    """
    # Without O_NONBLOCK the open itself waits for a writer of a pipe.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise UnreadableFile(f"is {_KINDS.get(stat.S_IFMT(mode), 'a device')}, not a regular file")
        data = bytearray()
        # Not by its size: some filesystems report none, and a file may grow meanwhile.
        while len(data) <= limit_bytes and (more := os.read(descriptor, limit_bytes + 1 - len(data))):
            data += more
    finally:
        os.close(descriptor)
    if len(data) > limit_bytes:
        raise UnreadableFile(f"is larger than {limit_bytes:,} bytes, the limit for such a file", limit_bytes)
    return bytes(data)
