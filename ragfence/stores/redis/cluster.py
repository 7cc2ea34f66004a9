"""A Redis Cluster: calls go to the primaries of their slots, and follow them when they move."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

import redis
from redis.backoff import ExponentialBackoff
from redis.exceptions import AskError, ClusterDownError, MovedError, SlotNotCoveredError, TryAgainError

from ragfence.stores.redis.connection import (
    BROKEN,
    RETRIES,
    Line,
    Lines,
    RedisCall,
    RedisExchange,
    refuse_closed,
    replies_of,
    send_to,
    shapes_of,
)
from ragfence.stores.redis.replies import Command, refuse_others


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
        self._closed = False
        self._backoff = ExponentialBackoff(cap=0.5, base=0.02)

    def exchange(self, calls: Sequence[RedisCall], after: Sequence[Command] = ()) -> RedisExchange:
        done = RedisExchange([None] * len(calls), [[]] * len(calls))
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

    def begin(self, calls: Sequence[RedisCall], after: Sequence[Command] = ()) -> AnsweredByCluster:
        return AnsweredByCluster(self.exchange(calls, after))

    def stream(
        self, parts: Iterable[Sequence[RedisCall]], after: Sequence[Command] = ()
    ) -> Generator[RedisExchange, None, None]:
        for calls in parts:
            yield self.exchange(calls, after)

    def primaries(self) -> list[tuple[str, Any]]:
        return [(node.name, self.client.get_redis_connection(node)) for node in self.client.get_primaries()]

    @contextlib.contextmanager
    def commands(self) -> Iterator[Any]:
        refuse_closed(self.url, closed=self._closed)
        try:
            yield self.client
        finally:
            self._tidy_if_closed()

    def close(self) -> None:
        self._closed = True
        for lines in list(self._lines.values()):
            lines.close()
        self._tidy_if_closed()

    def _tidy_if_closed(self) -> None:
        """redis-py's own connections, such as those that asked for the map of slots."""
        if self._closed:
            for node in self.client.get_nodes():
                if node.redis_connection:
                    node.redis_connection.connection_pool.disconnect(inuse_connections=False)

    def _round(
        self, calls: Sequence[RedisCall], left: Sequence[int], after: Sequence[Command], done: RedisExchange
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
                    send_to(line.connection, [*(calls[at].command for at in members), *after])
                except BROKEN as broken:
                    again, error = [*again, *members], broken
            for members, lines, line in asked:
                failed = members[0] in again
                try:
                    if not failed:
                        failed = True
                        replies = replies_of(line.connection, shapes_of([calls[at] for at in members], after))
                        failed = False
                except BROKEN as broken:
                    again, error = [*again, *members], broken
                finally:
                    answered += 1
                    lines.discard(line) if failed else lines.release(line)
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
                lines.discard(line)
        return again, error

    def _lines_to(self, node: Any) -> Lines:
        lines = self._lines.get(node.name)
        if lines is None:
            pool = self.client.get_redis_connection(node).connection_pool
            lines = self._lines[node.name] = Lines(pool, self.url)
        if self._closed:  # maybe before these were there to be closed
            lines.close()
        return lines

    def _by_node(self, calls: Sequence[RedisCall], left: Sequence[int]) -> list[tuple[Any, list[int]]]:
        found: dict[str, tuple[Any, list[int]]] = {}
        for at in left:
            node = self.client.nodes_manager.get_node_from_slot(self._slots[calls[at].shard])
            found.setdefault(node.name, (node, []))[1].append(at)
        return list(found.values())

    def _redirected(self, call: RedisCall, reply: Any) -> Any:
        """A slot that is on its way to another server: redis-py knows how to follow it."""
        if not isinstance(reply, AskError | TryAgainError):
            return reply
        try:
            with self.commands() as client:
                reply = client.execute_command(*call.command)
        except redis.ResponseError as refused:
            return refused
        refuse_others([call.shape], [reply])
        return reply

    def _learn_slots(self) -> None:
        # What is known may still do; the next round tells.
        with self.commands() as client, contextlib.suppress(redis.RedisError, redis.exceptions.RedisClusterException):
            client.nodes_manager.initialize()


class AnsweredByCluster:
    """Slots may move while replies are awaited, so a cluster's are awaited at once."""

    def __init__(self, exchange: RedisExchange) -> None:
        self._exchange = exchange

    def end(self) -> RedisExchange:
        return self._exchange

    def discard(self) -> None:
        pass
