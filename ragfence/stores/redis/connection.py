"""Redis as people run it: one server, the primary that Sentinels name, or a cluster; with or without TLS.

A link carries calls, each bound to a shard, in one round trip per server: packed here and read from redis-py's
connections directly, because its command layer costs several times the round trip itself. Pools, reconnects, TLS,
Sentinel and the map of slots are redis-py's. A call may be sent again after a lost reply, so every call must be
repeatable; the scripts are, by their tokens.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import redis
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.exceptions import InvalidResponse
from redis.retry import Retry

from ragfence.errors import StoreClosed
from ragfence.stores.redis.replies import Command, OutOfStep, Shape, info, refuse_others, shape_of, single

_pack: Any
try:
    from hiredis import pack_command as _pack
except ImportError:  # redis-py packs as well, only slower
    _pack = None

RETRIES = 3

IDLE_S = 30.0
"""a connection that was not used for so long is not used again: whatever is between may have forgotten it"""

BROKEN = (redis.ConnectionError, redis.TimeoutError)


class RedisCall(NamedTuple):
    """A command, and the shard whose server has to run it."""

    shard: int
    command: Command | bytes
    """bytes: packed already, for a `ServerLink`"""
    shape: Shape | None = None
    """of its reply; None: derived from the command"""


class RedisExchange(NamedTuple):
    replies: list[Any]
    """one per call; a refusal by the server is an exception object in its place"""
    after: list[list[Any]]
    """per call: what its server answered to the commands that were sent after all of its calls"""


class PendingExchange(Protocol):
    """The servers work on it while the caller does something else."""

    def end(self) -> RedisExchange: ...

    def discard(self) -> None:
        """Stop waiting for the replies. Does nothing after `end`."""
        ...


class Link(Protocol):
    url: str
    clustered: bool
    elects: bool
    """other processes elect the primary, and may elect another one"""
    client: Any
    """redis-py's own client; use it within `commands`"""

    def exchange(self, calls: Sequence[RedisCall], after: Sequence[Command] = ()) -> RedisExchange: ...

    def begin(self, calls: Sequence[RedisCall], after: Sequence[Command] = ()) -> PendingExchange:
        """An exchange whose replies are read later. The caller ends or discards it."""
        ...

    def stream(
        self, parts: Iterable[Sequence[RedisCall]], after: Sequence[Command] = ()
    ) -> Generator[RedisExchange, None, None]:
        """An exchange per part; where that is possible, each part is sent before any reply is awaited."""
        ...

    def commands(self) -> AbstractContextManager[Any]:
        """redis-py's own client, for commands on a single key and those that are not part of an exchange."""
        ...

    def primaries(self) -> list[tuple[str, Any]]:
        """Name and client of each server that accepts writes; use them within `commands`."""
        ...

    def close(self) -> None:
        """Running calls end and leave no connection behind; every later one raises `StoreClosed`."""
        ...


class Line:
    """A connection that is kept between exchanges, and the run_id of the server process at its other end.

    redis-py's health check is never used: it reads the next reply as its own, and reconnects silently, perhaps to
    another server process. Pending replies would be lost, or later ones taken for them.
    """

    __slots__ = ("connection", "run_id", "used_at")

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.used_at = time.monotonic()
        self.run_id = packed_parts(b"")
        """packed, as it goes into commands"""
        connection.send_packed_command(connection.pack_command("INFO", "server"), check_health=False)
        # A user without the right to call INFO gets an error when it matters.
        (reply,) = replies_of(connection, (info,))
        if not isinstance(reply, redis.ResponseError):
            self.run_id = packed_parts(run_id_in(reply))

    def usable(self) -> bool:
        """Whether nothing can be read from it: the server has not closed it, nor sent an unexpected reply."""
        if time.monotonic() - self.used_at > IDLE_S:
            return False
        try:
            return not self.connection.can_read()
        except BROKEN:
            return False


class Lines:
    """Connections that are kept, because getting one from redis-py's pool costs as much as a command.

    A broken one goes back to the pool, which reconnects it, to the server that the Sentinels name by then. `close` does
    not take away one that is in use: it is disconnected when it is released.
    """

    def __init__(self, pool: Any, url: str) -> None:
        self._pool = pool
        self._url = url
        self.closed = False
        self._pid = os.getpid()
        self._free: list[Line] = []

    def take(self) -> Line:
        refuse_closed(self._url, closed=self.closed)
        if self._pid != os.getpid():  # the child of a fork must not write into its parent's sockets
            self._pid, self._free = os.getpid(), []
        with contextlib.suppress(IndexError):
            while True:
                line = self._free.pop()
                if line.usable():
                    return line
                self.discard(line)
        connection = self._pool.get_connection()
        try:
            return Line(connection)
        except BaseException:
            self._discard(connection)
            raise

    def release(self, line: Line) -> None:
        if line.connection.pid == self._pid:
            line.used_at = time.monotonic()
            self._free.append(line)
            if self.closed:
                self.tidy()

    def discard(self, line: Line) -> None:
        """Replies may be pending: no other exchange may read them as its own."""
        self._discard(line.connection)

    def close(self) -> None:
        self.closed = True
        self.tidy()

    def tidy(self) -> None:
        """Disconnects what is not in use."""
        if self._pid == os.getpid():
            with contextlib.suppress(IndexError):
                while True:
                    self.discard(self._free.pop())
        self._pool.disconnect(inuse_connections=False)

    def _discard(self, connection: Any) -> None:
        connection.disconnect()
        self._pool.release(connection)


class ServerLink:
    """One server, or the one that the Sentinels name when a connection is made."""

    clustered = False

    def __init__(self, url: str, client: Any, *, elects: bool = False) -> None:
        self.url = url
        self.elects = elects
        self.client = client
        self.lines = Lines(client.connection_pool, url)
        self._retry = retry()

    def exchange(self, calls: Sequence[RedisCall], after: Sequence[Command] = ()) -> RedisExchange:
        return self.begin(calls, after).end()

    def begin(self, calls: Sequence[RedisCall], after: Sequence[Command] = ()) -> SentToServer:
        sent = SentToServer(self)
        sent.add(calls, after)
        return sent

    def stream(
        self, parts: Iterable[Sequence[RedisCall]], after: Sequence[Command] = ()
    ) -> Generator[RedisExchange, None, None]:
        sent, count = SentToServer(self), 0
        try:
            for calls in parts:
                sent.add(calls, after)
                count += 1
            for _ in range(count):
                yield sent.end()
        finally:
            sent.discard()

    def ask(self, before: bytes, behind: bytes) -> Any:
        """The reply to a single command that is packed already, as most are; a refusal is an exception object.

        The run_id of the server, read when the connection was opened, goes between the two parts; if it is not known,
        an empty one.
        """
        line = None
        try:
            line = self.lines.take()
            connection = line.connection
            connection.send_packed_command((before + line.run_id + behind,), check_health=False)
            (reply,) = replies_of(connection, (single,))
        except redis.ResponseError as refused:  # to connect
            return refused
        except BaseException as broken:
            if line is not None:
                self.lines.discard(line)
            if not isinstance(broken, BROKEN):
                raise
            return self.again((before + packed_parts(b"") + behind,), (single,), broken)[0]
        self.lines.release(line)
        return reply

    @contextlib.contextmanager
    def commands(self) -> Iterator[Any]:
        refuse_closed(self.url, closed=self.lines.closed)
        try:
            yield self.client
        finally:
            if self.lines.closed:
                self.lines.tidy()

    def primaries(self) -> list[tuple[str, Any]]:
        line = self.lines.take()
        try:
            host, port = getattr(line.connection, "host", None), getattr(line.connection, "port", None)
            return [(f"{host}:{port}" if host else str(getattr(line.connection, "path", self.url)), self.client)]
        finally:
            self.lines.release(line)

    def close(self) -> None:
        self.lines.close()

    def _sent(self, commands: Sequence[Command | bytes], shapes: Sequence[Shape | None]) -> list[Any]:
        line = self.lines.take()
        try:
            send_to(line.connection, commands)
            replies = replies_of(line.connection, shapes)
        except BaseException:
            self.lines.discard(line)
            raise
        self.lines.release(line)
        return replies

    def again(
        self, commands: Sequence[Command | bytes], shapes: Sequence[Shape | None], broken: Exception
    ) -> list[Any]:
        """The replies to commands whose connection broke, sent again over another one."""
        first: list[Exception] = [broken]

        def attempt() -> list[Any]:
            if first:  # counts as the attempt that failed already
                raise first.pop()
            return self._sent(commands, shapes)

        answered: list[Any] = self._retry.call_with_retry(attempt, lambda _: None)
        return answered


class SentToServer:
    """Exchanges that were sent over a line of their own. They end in the order in which they were sent."""

    __slots__ = ("_broken", "_line", "_link", "_waiting")

    def __init__(self, link: ServerLink) -> None:
        self._link = link
        self._line: Line | None = None
        self._broken: Exception | None = None
        self._waiting: deque[tuple[list[Command | bytes], list[Shape | None], int]] = deque()

    def add(self, calls: Sequence[RedisCall], after: Sequence[Command]) -> None:
        commands = [*(call.command for call in calls), *after]
        self._waiting.append((commands, shapes_of(calls, after), len(calls)))
        if self._broken is not None:
            return
        try:
            if self._line is None:
                self._line = self._link.lines.take()
            send_to(self._line.connection, commands)
        except BaseException as broken:
            self.discard()
            if not isinstance(broken, BROKEN):
                raise
            self._broken = broken

    def end(self) -> RedisExchange:
        commands, shapes, calls = self._waiting.popleft()
        replies = self._replies(commands, shapes)
        rest = replies[calls:]
        return RedisExchange(replies[:calls], [rest] * calls)

    def discard(self) -> None:
        if self._line is not None:
            self._link.lines.discard(self._line)
            self._line = None

    def _replies(self, commands: Sequence[Command | bytes], shapes: Sequence[Shape | None]) -> list[Any]:
        if self._line is not None:
            try:
                replies = replies_of(self._line.connection, shapes)
            except BaseException as broken:
                self.discard()
                if not isinstance(broken, BROKEN):
                    raise
                self._broken = broken
            else:
                if not self._waiting:
                    self._link.lines.release(self._line)
                    self._line = None
                return replies
        assert self._broken is not None, "an exchange ends once"
        return self._link.again(commands, shapes, self._broken)


def refuse_closed(url: str, *, closed: bool) -> None:
    if closed:
        raise StoreClosed(f"{url} was closed here")


def send_to(connection: Any, commands: Sequence[Command | bytes]) -> None:
    packed = [command if isinstance(command, bytes) else _packed(connection, command) for command in commands]
    connection.send_packed_command(packed if len(packed) == 1 else (b"".join(packed),), check_health=False)


def _packed(connection: Any, command: Command) -> bytes:
    packed: bytes = _pack(command) if _pack is not None else b"".join(connection.pack_command(*command))
    return packed


def packed_parts(*parts: bytes) -> bytes:
    """Some parts of a command as they are sent. `*<number of parts>` precedes all of them."""
    return b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)


def shapes_of(calls: Sequence[RedisCall], after: Sequence[Command]) -> list[Shape | None]:
    return [*(call.shape or shape_of(call.command) for call in calls), *map(shape_of, after)]


def replies_of(connection: Any, shapes: Sequence[Shape | None]) -> list[Any]:
    """One for each shape; a refusal by the server is an exception object in its place."""
    replies: list[Any] = []
    for _ in shapes:
        try:
            replies.append(connection.read_response(disable_decoding=True))
        except redis.ResponseError as refused:
            replies.append(refused)
        except InvalidResponse as broken:
            raise OutOfStep(f"a reply is not of the protocol: {broken}") from broken
    refuse_others(shapes, replies)
    return replies


def run_id_in(info: bytes) -> bytes:
    """The run_id in the answer to INFO."""
    at = info.find(b"run_id:") + 7
    return info[at : info.find(b"\r", at)]


def retry() -> Retry:
    return Retry(ExponentialBackoff(cap=0.2, base=0.01), retries=RETRIES)


def once_more() -> Retry:
    """For connecting: exchanges are repeated as a whole, and a server that is down should be noticed quickly."""
    return Retry(NoBackoff(), retries=1)
