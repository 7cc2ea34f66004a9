"""Answers that are sent while they are made, and what is too long for memory meanwhile.

What is produced goes into an `Outflow`. The client reads from it in its own time; the work waits for no client, and one
that goes away ends nothing. The last piece is let out only once the whole is sealed.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from tempfile import SpooledTemporaryFile
from typing import Final

from ragfence.wire.messages import Answer, Headers

IN_MEMORY: Final = 1 << 20
PIECE: Final = 1 << 16

Write = Callable[[bytes], None]
Produce = Callable[[Write], Awaitable[bytes]]
"""writes piece by piece and returns the last piece, which says that the answer is complete"""


class Spool:
    """Bytes: a few are held in memory, many in a file without a name, which goes when nobody has it any more.

    `closed` is called then.
    """

    def __init__(self, in_memory: int = IN_MEMORY, *, closed: Callable[[], None] | None = None) -> None:
        self._file = SpooledTemporaryFile(max_size=in_memory)  # noqa: SIM115  # it outlives every block
        weakref.finalize(self, self._file.close)
        if closed is not None:
            weakref.finalize(self, closed)
        self.size = 0

    def append(self, piece: bytes) -> None:
        self._file.seek(self.size)
        self._file.write(piece)
        self.size += len(piece)

    def read(self, at: int, most: int) -> bytes:
        self._file.seek(at)
        return self._file.read(most)

    def lines(self, longest: int) -> Iterator[bytes | None]:
        """With their ends; None for one that is longer, which is passed over piece by piece."""
        at = 0
        while at < self.size:
            self._file.seek(at)
            line = self._file.readline(longest + 1)
            at += len(line)
            if len(line) <= longest or line.endswith(b"\n"):
                yield line
                continue
            while at < self.size:
                rest = self._file.readline(PIECE)
                at += len(rest)
                if rest.endswith(b"\n"):
                    break
            yield None


@dataclass(frozen=True, slots=True)
class Streamed:
    """An answer whose body is still being made. If it ends without its last piece it was cut off: ask again."""

    status: int
    headers: Headers
    pieces: AsyncIterator[bytes]


class Outflow:
    """The body of one answer, between those who make it and the one who reads it. All in one event loop."""

    def __init__(self, head: Answer, produce: Produce, *, limit: int) -> None:
        """`head`: status and headers; `limit`: how much is kept for replays."""
        self.head = head
        self._produce: Produce | None = produce
        self._limit = limit
        self._spool = Spool()
        self._last = b""
        self._over = False
        self._more = asyncio.Event()
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def perform(self) -> Answer:
        """Everything but the letting out of the last piece."""
        assert self._produce is not None  # an attempt has one handler, which is asked once
        # Not kept: what it is made of may be large, and a client may take long to read the answer.
        produce, self._produce = self._produce, None
        self._last = await produce(self._write)
        del produce
        complete = self._spool.size + len(self._last) <= self._limit
        body = self._spool.read(0, self._spool.size) + self._last if complete else b""
        return Answer(self.head.status, self.head.headers, body, complete=complete)

    def settle(self, kept: bool) -> None:
        if kept:
            self._write(self._last)
        self.end()

    def end(self) -> None:
        self._over = True
        self._more.set()

    async def pieces(self, give_up_at: float | None = None) -> AsyncIterator[bytes]:
        """What there is, as it comes. `give_up_at`: the time of the loop at which the client stops waiting."""
        loop = asyncio.get_running_loop()
        at = 0
        while True:
            while piece := self._spool.read(at, PIECE):
                at += len(piece)
                yield piece
            if self._over:
                return
            self._more.clear()
            try:
                async with asyncio.timeout_at(give_up_at):
                    await self._more.wait()
            except TimeoutError:
                return
            if give_up_at is not None and loop.time() >= give_up_at:
                return

    def _write(self, piece: bytes) -> None:
        if piece:
            self._spool.append(piece)
            self._more.set()
            if not self.begun.done():
                self.begun.set_result(None)
