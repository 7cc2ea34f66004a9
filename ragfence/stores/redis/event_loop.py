"""Claims asked by an event loop itself: a connection to Redis whose replies the loop reads, and no thread in between.

For what a server is asked most, single claims without a sequence: all that are ready leave in one write, each as the
script call that it would be alone, and each reply is a verdict. Whatever is out of the ordinary (no connection yet, one
that broke, a reply that is an error, no reply in time) is no answer: whoever asked asks again the usual way, in a
thread and with the same tokens, and is told there what is wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ragfence.stores.redis.connection import Line, Lines
from ragfence.stores.redis.replies import single

_hiredis: Any
try:
    import hiredis as _hiredis
except ImportError:  # then threads do it all
    _hiredis = None

Replies = list[Any]
Told = Callable[[Replies | None], None]
"""is told the replies, or None: nobody knows"""

AGAIN_S = 1.0
"""after a connection broke: threads find out meanwhile whether there is a server"""
_READ_BYTES = 1 << 16


class _Refused(Exception):
    """The server does not answer as it should."""


class LoopConnections:
    """One connection for each event loop that asks; opened when it first does, in a thread."""

    def __init__(self, lines: Lines, timeout_s: float) -> None:
        self._lines = lines
        self._timeout_s = timeout_s
        self._of: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopConnection | float] = (
            weakref.WeakKeyDictionary()
        )
        """a time is when to try again; the loop has none until then"""
        self._closed = _hiredis is None

    def of_this_loop(self) -> LoopConnection | None:
        loop = asyncio.get_running_loop()
        found = self._of.get(loop, 0.0)
        if isinstance(found, LoopConnection):
            return found
        if not self._closed and time.monotonic() >= found:
            self._of[loop] = float("inf")
            taken = loop.run_in_executor(None, self._lines.take)
            taken.add_done_callback(lambda done: self._opened(loop, done))
        return None

    def close(self) -> None:
        """From any thread. Once it returns, no loop looks at a connection any more, and these may be closed."""
        self._closed = True
        try:
            here: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        for loop, line in list(self._of.items()):
            if not isinstance(line, LoopConnection):
                continue
            if loop is here or not loop.is_running():
                line.break_off()
                continue
            done = threading.Event()
            with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody reads any more
                loop.call_soon_threadsafe(_break_off, line, done)
                done.wait(self._timeout_s)

    def _opened(self, loop: asyncio.AbstractEventLoop, taken: asyncio.Future[Line]) -> None:
        self._of[loop] = time.monotonic() + AGAIN_S
        if taken.cancelled() or taken.exception() is not None:
            return
        line = taken.result()
        there = getattr(line.connection, "_sock", None)
        # A plain socket only: what TLS has decrypted already no loop can see.
        if self._closed or type(there) is not socket.socket:
            self._lines.give_back(line)
            return

        def broken() -> None:
            self._of[loop] = time.monotonic() + AGAIN_S
            self._lines.drop(line)

        self._of[loop] = LoopConnection(loop, there, line.run_id, self._timeout_s, broken)


def _break_off(line: LoopConnection, done: threading.Event) -> None:
    try:
        line.break_off()
    finally:
        done.set()


class LoopConnection:
    """A connection that belongs to one event loop. Replies come in the order of what was sent."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        there: socket.socket,
        run_id: bytes,
        timeout_s: float,
        broken: Callable[[], None],
    ) -> None:
        self.run_id = run_id
        self._loop = loop
        self._socket = there
        self._fileno = there.fileno()
        """a socket that was closed has forgotten it, and the loop knows it by nothing else"""
        self._timeout_s = timeout_s
        self._broken = broken
        self._reader = _hiredis.Reader()
        self._unsent = b""
        self._writing = self._over = False
        self._waiting: deque[tuple[float, int, Told]] = deque()
        """since when, for how many replies, and who is told"""
        self._replies: Replies = []
        self._timer: asyncio.TimerHandle | None = None
        there.setblocking(False)
        loop.add_reader(self._fileno, self._readable)

    def send(self, commands: Sequence[bytes], told: Told) -> None:
        """`commands` are packed."""
        if self._over:
            self._loop.call_soon(told, None)
            return
        data = b"".join(commands)
        self._waiting.append((self._loop.time(), len(commands), told))
        if self._timer is None:
            self._timer = self._loop.call_later(self._timeout_s, self._is_it_late)
        if self._unsent:
            self._unsent += data
        else:
            self._unsent = data
            self._writable()

    def break_off(self) -> None:
        """Whoever waits is told that nobody knows."""
        if self._over:
            return
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, deque()
        try:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._fileno)
                self._loop.remove_writer(self._fileno)
            self._broken()
        finally:
            for _, _, told in waiting:
                told(None)

    def _writable(self) -> None:
        try:
            sent = self._socket.send(self._unsent)
        except BlockingIOError:
            sent = 0
        except OSError:
            # Not from within `send`: its caller does not expect to be told before it returns.
            self._loop.call_soon(self.break_off)
            return
        self._unsent = self._unsent[sent:]
        if self._unsent and not self._writing:
            self._loop.add_writer(self._fileno, self._writable)
        elif self._writing and not self._unsent:
            self._loop.remove_writer(self._fileno)
        self._writing = bool(self._unsent)

    def _readable(self) -> None:
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.break_off()
            return
        try:
            self._reader.feed(data)
            while (reply := self._reader.gets()) is not False:
                self._replied(reply)
        except (_hiredis.HiredisError, _Refused):
            self.break_off()

    def _replied(self, reply: Any) -> None:
        if not self._waiting or not (single(reply) or isinstance(reply, Exception)):
            raise _Refused
        self._replies.append(reply)
        _, count, told = self._waiting[0]
        if len(self._replies) < count:
            return
        self._waiting.popleft()
        replies, self._replies = self._replies, []
        errors = [str(reply) for reply in replies if isinstance(reply, Exception)]
        told(None if errors else replies)
        # A script that is not there yet is loaded by the thread that asks next. All else may be the connection's fault.
        if not all(error.startswith("NOSCRIPT") for error in errors):
            raise _Refused

    def _is_it_late(self) -> None:
        self._timer = None
        if not self._waiting:
            return
        left_s = self._waiting[0][0] + self._timeout_s - self._loop.time()
        if left_s <= 0:
            self.break_off()
        else:
            self._timer = self._loop.call_later(left_s, self._is_it_late)
