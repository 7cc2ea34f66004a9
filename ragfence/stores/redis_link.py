"""Redis as people run it: one server, the primary that Sentinels name, or a cluster; with or without TLS.

A link carries calls, each bound to a shard, in one round trip per server: packed here and read from redis-py's
connections directly, because its command layer costs several times the round trip itself. Pools, reconnects, TLS,
Sentinel and the map of slots are redis-py's. A call may be sent again after a lost reply, so every call must be
repeatable; the scripts are, by their tokens.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import redis
from redis.backoff import ExponentialBackoff
from redis.exceptions import AskError, ClusterDownError, MovedError, SlotNotCoveredError, TryAgainError
from redis.retry import Retry

RETRIES = 3

Command = tuple[Any, ...]
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
    client: Any
    """redis-py's own client, for commands on a single key"""

    def exchange(self, calls: Sequence[Call], after: Sequence[Command] = ()) -> Exchange: ...

    def primaries(self) -> list[tuple[str, Any]]:
        """Name and client of each server that takes writes."""
        ...

    def close(self) -> None: ...


class ServerLink:
    """One server, or whichever the Sentinels name at the time of connecting."""

    clustered = False

    def __init__(self, url: str, client: Any) -> None:
        self.url = url
        self.client = client
        self._pool = client.connection_pool
        self._retry = retry()

    def exchange(self, calls: Sequence[Call], after: Sequence[Command] = ()) -> Exchange:
        commands = [call.command for call in calls]
        replies = self._exchange(commands if not after else [*commands, *after])
        rest = replies[len(calls) :]
        return Exchange(replies[: len(calls)], [rest] * len(calls))

    def primaries(self) -> list[tuple[str, Any]]:
        with self._borrowed() as connection:
            host = getattr(connection, "host", None)
            name = f"{host}:{connection.port}" if host else str(getattr(connection, "path", self.url))
        return [(name, self.client)]

    def close(self) -> None:
        self.client.close()

    def _exchange(self, commands: Sequence[Command]) -> list[Any]:
        try:
            return self._exchanged(commands)
        except _BROKEN as broken:
            return self._again(commands, broken)

    def _again(self, commands: Sequence[Command], broken: Exception) -> list[Any]:
        first: list[Exception] = [broken]

        def attempt() -> list[Any]:
            if first:  # counts as the attempt that failed already
                raise first.pop()
            return self._exchanged(commands)

        answered: list[Any] = self._retry.call_with_retry(attempt, lambda _: None)
        return answered

    def _exchanged(self, commands: Sequence[Command]) -> list[Any]:
        with self._borrowed() as connection:
            _send(connection, commands)
            return _replies(connection, len(commands))

    def _borrowed(self) -> _Borrowed:
        return _Borrowed(self._pool)


class ClusterLink:
    """A cluster: calls go to the primaries of their slots, all servers at once."""

    clustered = True

    def __init__(self, url: str, connect: Callable[[], Any], hash_tags: Sequence[bytes]) -> None:
        self.url = url
        self.client = connect()
        self._slots = [self.client.keyslot(tag) for tag in hash_tags]
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
        """Sends what is left. Returns what has to be sent again because of the error."""
        again: list[int] = []
        error: Exception | None = None
        asked: list[tuple[list[int], _Borrowed, Any]] = []
        try:
            for node, members in self._by_node(calls, left):
                try:
                    pool = self.client.get_redis_connection(node).connection_pool
                    borrowed = _Borrowed(pool)
                    connection = borrowed.__enter__()
                    asked.append((members, borrowed, connection))
                    _send(connection, [*(calls[at].command for at in members), *after])
                except _BROKEN as broken:
                    again, error = [*again, *members], broken
            for members, _, connection in asked:
                if members[0] in again:
                    continue
                try:
                    replies = _replies(connection, len(members) + len(after))
                except _BROKEN as broken:
                    again, error = [*again, *members], broken
                    continue
                rest = replies[len(members) :]
                for at, reply in zip(members, replies, strict=False):
                    if isinstance(reply, MovedError | ClusterDownError):
                        again, error = [*again, at], reply
                    else:
                        done.replies[at] = self._redirected(calls[at], reply)
                        done.after[at] = rest
        except SlotNotCoveredError as uncovered:
            return list(left), uncovered
        finally:
            for members, borrowed, connection in asked:
                if members[0] in again:
                    connection.disconnect()
                borrowed.__exit__(None, None, None)
        return again, error

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


@dataclass(slots=True)
class _Borrowed:
    """A connection of a pool, given back in a state in which somebody else can use it."""

    pool: Any
    connection: Any = None

    def __enter__(self) -> Any:
        self.connection = self.pool.get_connection()
        return self.connection

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:  # replies may be on their way: nobody must read them as theirs
            self.connection.disconnect()
        self.pool.release(self.connection)


def _send(connection: Any, commands: Sequence[Command]) -> None:
    pieces = [piece for command in commands for piece in connection.pack_command(*command)]
    connection.send_packed_command(pieces if len(pieces) == 1 else [b"".join(pieces)])


def _replies(connection: Any, count: int) -> list[Any]:
    replies = []
    for _ in range(count):
        try:
            replies.append(connection.read_response(disable_decoding=True))
        except redis.ResponseError as refused:
            replies.append(refused)
    return replies


def retry() -> Retry:
    return Retry(ExponentialBackoff(cap=0.2, base=0.01), retries=RETRIES)
