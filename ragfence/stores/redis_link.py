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
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import redis
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.exceptions import AskError, ClusterDownError, MovedError, SlotNotCoveredError, TryAgainError
from redis.retry import Retry

_pack: Any
try:
    from hiredis import pack_command as _pack
except ImportError:  # redis-py packs as well, only slower
    _pack = None

RETRIES = 3

Command = tuple[Any, ...]
"""or, between a `ServerLink` and its server, bytes: a command that is packed already"""
_BROKEN = (redis.ConnectionError, redis.TimeoutError)


class Call(NamedTuple):
    """A command, and the shard whose server has to run it."""

    shard: int
    command: Command


class Exchange(NamedTuple):
    replies: list[Any]
    """one per call; a refusal by the server is an exception object in its place"""
    after: list[list[Any]]
    """per call: what its server answered to the commands that were sent after all of its calls"""


class Link(Protocol):
    url: str
    clustered: bool
    elects: bool
    """others decide who the primary is, and may change their minds"""
    client: Any
    """redis-py's own client, for commands on a single key"""

    def exchange(self, calls: Sequence[Call], after: Sequence[Command] = ()) -> Exchange: ...

    def primaries(self) -> list[tuple[str, Any]]:
        """Name and client of each server that takes writes."""
        ...

    def close(self) -> None: ...


class Line:
    """A connection that stays ours between exchanges, and the run_id of the server process at its other end."""

    __slots__ = ("connection", "run_id")

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.run_id = packed_parts(b"")
        """packed, as it goes into commands"""
        connection.send_packed_command(connection.pack_command("INFO", "server"))
        # Whoever needs the right to ask is told so when it matters.
        with contextlib.suppress(redis.ResponseError):
            self.run_id = packed_parts(run_id_in(connection.read_response(disable_decoding=True)))


class Lines:
    """Asking redis-py's pool for a connection costs as much as a command, so these are kept.

    One that broke goes back to the pool, which connects it again, to the server that the Sentinels then name.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._pid = os.getpid()
        self._free: list[Line] = []

    def take(self) -> Line:
        if self._pid != os.getpid():  # the child of a fork must not write into its parent's sockets
            self._pid, self._free = os.getpid(), []
        try:
            return self._free.pop()
        except IndexError:
            pass
        connection = self._pool.get_connection()
        try:
            return Line(connection)
        except BaseException:
            self._drop(connection)
            raise

    def give_back(self, line: Line) -> None:
        if line.connection.pid == self._pid:
            self._free.append(line)

    def drop(self, line: Line) -> None:
        """Replies may be on their way: nobody must read them as theirs."""
        self._drop(line.connection)

    def _drop(self, connection: Any) -> None:
        connection.disconnect()
        self._pool.release(connection)


class ServerLink:
    """One server, or whichever the Sentinels name at the time of connecting."""

    clustered = False

    def __init__(self, url: str, client: Any, *, elects: bool = False) -> None:
        self.url = url
        self.elects = elects
        self.client = client
        self.lines = Lines(client.connection_pool)
        self._retry = retry()

    def exchange(self, calls: Sequence[Call], after: Sequence[Command] = ()) -> Exchange:
        replies = self.send([*(call.command for call in calls), *after])
        rest = replies[len(calls) :]
        return Exchange(replies[: len(calls)], [rest] * len(calls))

    def ask(self, before: bytes, behind: bytes) -> Any:
        """The reply to a single command that is packed already, which most are; a refusal is an exception object.

        Between the two parts goes the run_id of the server, as of when the connection was opened, or an empty one where
        that is not known.
        """
        line = None
        try:
            line = self.lines.take()
            connection = line.connection
            connection.send_packed_command((before + line.run_id + behind,))
            reply = connection.read_response(disable_decoding=True)
        except redis.ResponseError as refused:
            reply = refused
        except BaseException as broken:
            if line is not None:
                self.lines.drop(line)
            if not isinstance(broken, _BROKEN):
                raise
            return self._again((before + packed_parts(b"") + behind,), broken)[0]
        if line is not None:
            self.lines.give_back(line)
        return reply

    def send(self, commands: Sequence[Command | bytes]) -> list[Any]:
        try:
            return self._sent(commands)
        except _BROKEN as broken:
            return self._again(commands, broken)

    def primaries(self) -> list[tuple[str, Any]]:
        line = self.lines.take()
        try:
            host, port = getattr(line.connection, "host", None), getattr(line.connection, "port", None)
            return [(f"{host}:{port}" if host else str(getattr(line.connection, "path", self.url)), self.client)]
        finally:
            self.lines.give_back(line)

    def close(self) -> None:
        self.client.close()

    def _sent(self, commands: Sequence[Command | bytes]) -> list[Any]:
        line = self.lines.take()
        try:
            _send(line.connection, commands)
            replies = _replies(line.connection, len(commands))
        except BaseException:
            self.lines.drop(line)
            raise
        self.lines.give_back(line)
        return replies

    def _again(self, commands: Sequence[Command | bytes], broken: Exception) -> list[Any]:
        first: list[Exception] = [broken]

        def attempt() -> list[Any]:
            if first:  # counts as the attempt that failed already
                raise first.pop()
            return self._sent(commands)

        answered: list[Any] = self._retry.call_with_retry(attempt, lambda _: None)
        return answered


class ClusterLink:
    """A cluster: calls go to the primaries of their slots, all servers at once."""

    clustered = True
    elects = True

    def __init__(self, url: str, connect: Callable[[], Any], hash_tags: Sequence[bytes]) -> None:
        self.url = url
        self.client = connect()
        self._slots = [self.client.keyslot(tag) for tag in hash_tags]
        self._lines: dict[str, Lines] = {}
        """by the name of the node"""
        self._backoff = ExponentialBackoff(cap=0.5, base=0.02)

    def exchange(self, calls: Sequence[Call], after: Sequence[Command] = ()) -> Exchange:
        done = Exchange([None] * len(calls), [[]] * len(calls))
        left, failures = list(range(len(calls))), 0
        while left:
            left, error = self._round(calls, left, after, done)
            if error is not None:
                failures += 1
                if failures > RETRIES:
                    raise error
                time.sleep(self._backoff.compute(failures))
                self._learn_slots()
        return done

    def primaries(self) -> list[tuple[str, Any]]:
        return [(node.name, self.client.get_redis_connection(node)) for node in self.client.get_primaries()]

    def close(self) -> None:
        self.client.close()

    def _round(
        self, calls: Sequence[Call], left: Sequence[int], after: Sequence[Command], done: Exchange
    ) -> tuple[list[int], Exception | None]:
        """Sends what is left, to all servers before any is read. Returns what has to be sent again, and why."""
        again: list[int] = []
        error: Exception | None = None
        asked: list[tuple[list[int], Lines, Line]] = []
        answered = 0
        try:
            for node, members in self._by_node(calls, left):
                try:
                    lines = self._lines_to(node)
                    line = lines.take()
                    asked.append((members, lines, line))
                    _send(line.connection, [*(calls[at].command for at in members), *after])
                except _BROKEN as broken:
                    again, error = [*again, *members], broken
            for members, lines, line in asked:
                failed = members[0] in again
                try:
                    if not failed:
                        failed = True
                        replies = _replies(line.connection, len(members) + len(after))
                        failed = False
                except _BROKEN as broken:
                    again, error = [*again, *members], broken
                finally:
                    answered += 1
                    lines.drop(line) if failed else lines.give_back(line)
                if failed:
                    continue
                for at, reply in zip(members, replies, strict=False):
                    if isinstance(reply, MovedError | ClusterDownError):
                        again, error = [*again, at], reply
                    else:
                        done.replies[at] = self._redirected(calls[at], reply)
                        done.after[at] = replies[len(members) :]
        except SlotNotCoveredError as uncovered:
            again, error = list(left), uncovered
        finally:
            for _, lines, line in asked[answered:]:
                lines.drop(line)
        return again, error

    def _lines_to(self, node: Any) -> Lines:
        lines = self._lines.get(node.name)
        if lines is None:
            lines = self._lines[node.name] = Lines(self.client.get_redis_connection(node).connection_pool)
        return lines

    def _by_node(self, calls: Sequence[Call], left: Sequence[int]) -> list[tuple[Any, list[int]]]:
        found: dict[str, tuple[Any, list[int]]] = {}
        for at in left:
            node = self.client.nodes_manager.get_node_from_slot(self._slots[calls[at].shard])
            found.setdefault(node.name, (node, []))[1].append(at)
        return list(found.values())

    def _redirected(self, call: Call, reply: Any) -> Any:
        """A slot that is on its way to another server: redis-py knows how to follow it."""
        if not isinstance(reply, AskError | TryAgainError):
            return reply
        try:
            return self.client.execute_command(*call.command)
        except redis.ResponseError as refused:
            return refused

    def _learn_slots(self) -> None:
        # What is known may still do; the next round tells.
        with contextlib.suppress(redis.RedisError, redis.exceptions.RedisClusterException):
            self.client.nodes_manager.initialize()


def _send(connection: Any, commands: Sequence[Command | bytes]) -> None:
    packed = [command if isinstance(command, bytes) else _packed(connection, command) for command in commands]
    connection.send_packed_command(packed if len(packed) == 1 else (b"".join(packed),))


def _packed(connection: Any, command: Command) -> bytes:
    packed: bytes = _pack(command) if _pack is not None else b"".join(connection.pack_command(*command))
    return packed


def packed_parts(*parts: bytes) -> bytes:
    """Some parts of a command as they travel. In front of all of them stands `*<their number>`."""
    return b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)


def _replies(connection: Any, count: int) -> list[Any]:
    replies = []
    for _ in range(count):
        try:
            replies.append(connection.read_response(disable_decoding=True))
        except redis.ResponseError as refused:
            replies.append(refused)
    return replies


def run_id_in(info: bytes) -> bytes:
    """The run_id in the answer to INFO."""
    at = info.find(b"run_id:") + 7
    return info[at : info.find(b"\r", at)]


def retry() -> Retry:
    return Retry(ExponentialBackoff(cap=0.2, base=0.01), retries=RETRIES)


def once_more() -> Retry:
    """For a connection itself: exchanges are repeated as a whole, and a server that is away should be known soon."""
    return Retry(NoBackoff(), retries=1)
