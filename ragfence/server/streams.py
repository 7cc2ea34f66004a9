"""Answers that are sent while they are made, with a file for what does not fit into memory.

The pieces of an answer go into an `AnswerStream`, from which the client reads at its own pace. The work does not wait
for the client, and continues if it disconnects. The last piece is sent only after the answer is sealed.
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
"""Writes piece by piece, and returns the last piece, which marks the answer as complete."""


class Spool:
    """Bytes in memory, or in an unnamed file if there are many. It is closed with its last reference.

    `closed` is called then.
    """

    def __init__(self, in_memory: int = IN_MEMORY, *, closed: Callable[[], None] | None = None) -> None:
        self._file = SpooledTemporaryFile(max_size=in_memory)  # noqa: SIM115  # it outlives this block
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
        """Yields the lines with their ends; None for a line that is too long, which is skipped piece by piece."""
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
    """An answer whose body is still being made. Without its last piece it was cut off: send the request again."""

    status: int
    headers: Headers
    pieces: AsyncIterator[bytes]


class AnswerStream:
    """The body of one answer, between the handler that makes it and the client that reads it, in one event loop."""

    def __init__(self, head: Answer, produce: Produce, *, limit: int) -> None:
        """`head`: status and headers; `limit`: bytes that are stored for replays."""
        self.head = head
        self._produce: Produce | None = produce
        self._limit = limit
        self._spool = Spool()
        self._last = b""
        self._has_ended = False
        self._more = asyncio.Event()
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def perform(self) -> Answer:
        """Makes the answer, and sends all but its last piece."""
        assert self._produce is not None  # an attempt has one handler, which is called once
        # Not referenced any longer: its data may be large, and a client may take long to read the answer.
        produce, self._produce = self._produce, None
        self._last = await produce(self._write)
        del produce
        complete = self._spool.size + len(self._last) <= self._limit
        body = self._spool.read(0, self._spool.size) + self._last if complete else b""
        return Answer(self.head.status, self.head.headers, body, complete=complete)

    def settle(self, own: bool) -> None:
        if own:
            self._write(self._last)
        self.end()

    def end(self) -> None:
        self._has_ended = True
        self._more.set()

    async def pieces(self, give_up_at: float | None = None) -> AsyncIterator[bytes]:
        """Yields pieces as they come. `give_up_at`: when the client stops waiting, on the clock of the event loop."""
        loop = asyncio.get_running_loop()
        at = 0
        while True:
            while piece := self._spool.read(at, PIECE):
                at += len(piece)
                yield piece
            if self._has_ended:
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
            if not self.started.done():
                self.started.set_result(None)
