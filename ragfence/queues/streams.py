"""A queue on Redis Streams, for Redis 6.2 or newer, Valkey, and their clusters.

Every tenant has a stream with one consumer group. A message is delivered by XREADGROUP, and again by XAUTOCLAIM when
its delivery has been idle for longer than the visibility of the queue. A message that waits for its time is in a
sorted set: one script takes it out of its stream and puts it there (XACK, XDEL, ZADD), another one puts it back
(ZREM, XADD), so it is never in both places and never in none. Each call is one Lua script, one atomic step by the
clock of Redis; what ends or extends a delivery compares the consumer and the delivery first.

A queue is as durable as its Redis. With `appendfsync everysec`, the default of an append-only file, a crash of the
server loses up to a second of messages that were already accepted. What accepts an event on behalf of a sender that
will not send it again (an inbox of webhooks) needs `appendfsync always` or `wait_replicas`: see `check_durability`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Final

from ragfence._extras import needs_extra
from ragfence.core.urls import show_url
from ragfence.errors import QueueFull, RagfenceError, TransportUnavailable, ValidationError
from ragfence.queues.transport import (
    TEXT_FIELDS,
    DeadLetter,
    Depth,
    Envelope,
    Message,
    check_texts,
    decode_body,
    encode_body,
)
from ragfence.stores.checkups.check import Check, fail, ok, warn

with needs_extra("redis", "A queue in Redis"):
    import redis

    from ragfence.stores.redis.server_urls import open_link

VISIBILITY_S: Final = 60.0
HIGH_WATER: Final = 100_000
"""Lower than that of a database: these messages are in memory."""
MAX_LANES: Final = 64
"""How many tenants one call of `receive` serves at most. The next call begins with the next tenant."""
MAX_DUE: Final = 128
"""How many delayed messages one call of `receive` moves into their lanes at most."""
RETRY_AFTER_MS: Final = 5_000
REPLICAS_TIMEOUT_MS: Final = 1_000
"""Below the usual time-outs of a client, so that what is answered is the number of replicas."""
_BLOCK_MS: Final = 250
"""How long a consumer waits for a new message before it looks for delayed and expired ones."""
_TIMEOUT_S: Final = 5.0
_SCRIPTS = ("send", "receive", "settle", "dead", "depth")


class RedisStreamTransport:
    """A queue on Redis Streams.

    Args:
        client: A client of redis-py, or a URL: `redis://`, `rediss://`, `redis+sentinel://`, `redis+cluster://`.
        queue: Name of the queue. All its keys have the hash tag `{queue}`: a cluster keeps them on one node.
        group: Name of the consumer group. A queue has one; all its clients use the same.
        consumer: Name of this consumer, as in XINFO CONSUMERS. Made of host and process if it is missing.
        visibility_s: How long a delivered message is hidden from other consumers.
        high_water: With more messages than this, `send` raises `QueueFull`.
        wait_replicas: `send` returns when so many replicas have the messages. Not on a cluster.

    Messages of one group are delivered one at a time, in the order they were sent.

    >>> queue = RedisStreamTransport("redis://localhost:6379/0", "orders")  # doctest: +SKIP
    """

    def __init__(
        self,
        client: Any,
        queue: str = "default",
        *,
        group: str = "ragfence",
        consumer: str | None = None,
        visibility_s: float = VISIBILITY_S,
        high_water: int = HIGH_WATER,
        wait_replicas: int = 0,
    ) -> None:
        if not queue or len(queue) > 128 or "{" in queue or "}" in queue:
            raise ValidationError("the name of a queue has 1 to 128 characters, and no braces")
        if not group:
            raise ValidationError("the name of the consumer group is empty")
        self._link = _open(client) if isinstance(client, str) else None
        self._client = client if self._link is None else self._link.client
        self._clustered = isinstance(self._client, redis.RedisCluster)
        if wait_replicas and self._clustered:
            raise ValidationError("wait_replicas is not supported on a cluster", hint="use appendfsync always")
        self._url = _url_of(self._client) if self._link is None else self._link.url
        self._queue, self._group = queue, group
        self._consumer = consumer or f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self._visibility_s, self._high_water, self._wait_replicas = visibility_s, high_water, wait_replicas
        self._prefix = f"rfq{{{queue}}}:"
        self._scripts = {name: self._client.register_script(_source(name)) for name in _SCRIPTS}
        self._closed = threading.Event()

    @property
    def url(self) -> str:
        return self._url

    @property
    def name(self) -> str:
        return self._queue

    @property
    def visibility_s(self) -> float:
        return self._visibility_s

    def send(self, envelopes: Sequence[Envelope], *, delay_s: float = 0.0) -> list[str]:
        if not envelopes:
            return []
        ids = [str(uuid.uuid4()) for _ in envelopes]
        arguments: list[Any] = [self._group, self._high_water, int(delay_s * 1000), len(envelopes)]
        for message_id, envelope in zip(ids, envelopes, strict=True):
            fields = _fields(message_id, envelope)
            arguments += [len(fields), *fields]
        sent, live = self._durably(arguments) if self._wait_replicas else self._call("send", *arguments)
        if not sent:
            raise QueueFull(
                f"queue {self._queue!r} holds {live} messages, its limit is {self._high_water}",
                retry_after_ms=RETRY_AFTER_MS,
            )
        return ids

    def receive(self, limit: int, wait_s: float) -> list[Message]:
        if limit < 1:
            raise ValidationError(f"limit must be at least 1, not {limit}")
        give_up_at = time.monotonic() + wait_s
        while True:
            bell, found = self._call(
                "receive", self._group, self._consumer, int(self._visibility_s * 1000), limit, MAX_LANES, MAX_DUE
            )
            left_s = give_up_at - time.monotonic()
            if found or left_s <= 0 or self._closed.is_set():
                return [self._delivered(_text(entry), int(count), fields) for entry, count, fields in found]
            self._wait(_text(bell), min(_BLOCK_MS, max(1, int(left_s * 1000))))

    def ack(self, messages: Sequence[Message]) -> list[bool]:
        return self._settle(messages, "ack", "", "")

    def retry(self, message: Message, delay_s: float, *, counted: bool = True) -> bool:
        return self._settle([message], "retry", int(delay_s * 1000), int(counted))[0]

    def extend(self, messages: Sequence[Message], visibility_s: float | None = None) -> list[bool]:
        seconds = self._visibility_s if visibility_s is None else visibility_s
        return self._settle(messages, "extend", int(seconds * 1000), int(self._visibility_s * 1000))

    def dead(self, message: Message, reason: str) -> bool:
        return self._settle([message], "dead", reason[:2000], "")[0]

    def depth(self) -> Depth:
        """Counts without reading the messages. An expired delivery is in flight until it is delivered again."""
        live, in_flight, dead, age_ms = self._call("depth")
        return Depth(live - in_flight, in_flight, dead, None if age_ms < 0 else age_ms / 1000)

    def dead_letters(self, limit: int = 100, after: str = "") -> list[DeadLetter]:
        found = self._call("dead", self._group, "list", limit, after)
        return [
            DeadLetter(_message(fields, handle="", count=0), _text(reason), int(died_ms))
            for reason, died_ms, fields in found
        ]

    def replay_dead(self, message_ids: Sequence[str]) -> int:
        return int(self._call("dead", self._group, "replay", *message_ids))

    def drop_dead(self, message_ids: Sequence[str]) -> int:
        return int(self._call("dead", self._group, "drop", *message_ids))

    def check_durability(self) -> Check:
        """Whether a message is durable when `send` returns, as an inbox needs it: fail, warn (cannot be seen) or ok.

        It is if every primary writes its append-only file before it answers (`appendfsync always`), or if `send`
        waits for replicas.
        """
        subject = f"queue {self._queue}"
        if self._wait_replicas:
            return ok(subject, f"send waits for {self._wait_replicas} replica{'s' * (self._wait_replicas != 1)}")
        advice = "run `CONFIG SET appendonly yes` and `CONFIG SET appendfsync always`, or give wait_replicas"
        with self._understood("check"):
            try:
                settings = [_persistence(client) for client in self._primaries()]
            except redis.ResponseError as error:
                return warn(subject, f"whether it is durable cannot be seen (CONFIG GET): {error}", advice)
        for appendonly, appendfsync in settings:
            if appendonly != "yes":
                return fail(subject, "no append-only file: a restart loses messages that were accepted", advice)
            if appendfsync != "always":
                return fail(subject, f"appendfsync {appendfsync}: a crash loses messages that were accepted", advice)
        return ok(subject, "appendfsync always: what was accepted is on disk")

    def close(self) -> None:
        self._closed.set()
        if self._link is not None:
            self._link.close()

    def _settle(self, messages: Sequence[Message], action: str, option: object, more: object) -> list[bool]:
        if not messages:
            return []
        deliveries: list[str] = []
        for message in messages:
            entry, _, rest = message.handle.partition(" ")
            count, _, consumer = rest.partition(" ")
            deliveries += [message.tenant, entry, count, consumer, message.message_id]
        return [bool(done) for done in self._call("settle", self._group, action, option, more, *deliveries)]

    def _delivered(self, entry: str, count: int, fields: Sequence[Any]) -> Message:
        return _message(fields, handle=f"{entry} {count} {self._consumer}", count=count)

    def _call(self, script: str, *arguments: Any) -> Any:
        with self._understood(script):
            return self._scripts[script](keys=[f"{self._prefix}state"], args=arguments)

    def _durably(self, arguments: Sequence[Any]) -> Any:
        """Sends, and waits on the same connection: WAIT is about what its own connection has written."""
        with self._understood("send"), self._client.pipeline(transaction=False) as pipeline:
            self._scripts["send"](keys=[f"{self._prefix}state"], args=arguments, client=pipeline)
            pipeline.wait(self._wait_replicas, REPLICAS_TIMEOUT_MS)
            reply, replicas = pipeline.execute()
        if reply[0] and replicas < self._wait_replicas:
            raise TransportUnavailable(
                f"queue {self._queue!r}: {replicas} of {self._wait_replicas} replicas have the messages"
            )
        return reply

    def _wait(self, bell: str, block_ms: int) -> None:
        """Until the next message enters a lane, but not for long: a delay or a visibility may end meanwhile."""
        with self._understood("receive"), contextlib.suppress(redis.TimeoutError):
            self._client.xread({f"{self._prefix}bell": bell}, block=block_ms)

    def _primaries(self) -> list[Any]:
        if not self._clustered:
            return [self._client]
        return [self._client.get_redis_connection(node) for node in self._client.get_primaries()]

    @contextlib.contextmanager
    def _understood(self, what: str) -> Iterator[None]:
        if self._closed.is_set():
            raise TransportUnavailable(f"queue {self._queue!r} is closed")
        try:
            yield
        except redis.ResponseError as error:
            if "OTHERGROUP" in str(error):
                raise ValidationError(
                    f"queue {self._queue!r} has another consumer group than {self._group!r}",
                    hint="all clients of a queue use the same group",
                ) from error
            raise TransportUnavailable(f"cannot {what}, {self._url}: {error}") from error
        except (redis.RedisError, OSError) as error:
            raise TransportUnavailable(f"cannot {what}, {self._url}: {error}") from error


@cache
def _source(name: str) -> str:
    folder = files("ragfence.queues") / "lua"
    return "\n".join((folder / f"{each}.lua").read_text() for each in ("base", name))


def _open(url: str) -> Any:
    try:
        return open_link(url, timeout_s=_TIMEOUT_S, hash_tags=[])
    except RagfenceError as error:
        raise TransportUnavailable(error.message, hint=error.hint) from error


def _url_of(client: Any) -> str:
    if isinstance(client, redis.RedisCluster):
        node: Any = client.get_default_node()  # type: ignore[no-untyped-call]  # redis-py's
        return f"redis+cluster://{node.host}:{node.port}"
    options: Mapping[str, Any] = client.connection_pool.connection_kwargs
    if "path" in options:
        return show_url(f"unix://{options['path']}")
    return f"redis://{options.get('host', 'localhost')}:{options.get('port', 6379)}/{options.get('db') or 0}"


def _persistence(client: Any) -> tuple[str, str]:
    settings: Mapping[Any, Any] = client.config_get("append*")
    found = {_text(name): _text(value) for name, value in settings.items()}
    return found.get("appendonly", ""), found.get("appendfsync", "")


def _fields(message_id: str, envelope: Envelope) -> list[str]:
    check_texts(envelope)
    values = {name: getattr(envelope, name) for name in TEXT_FIELDS}
    values |= {"event_id": envelope.event_id or str(uuid.uuid4())}
    present = [part for name, value in values.items() if value for part in (name, value)]
    return ["id", message_id, *present, "body", encode_body(envelope.body)]


def _message(flat: Sequence[Any], *, handle: str, count: int) -> Message:
    texts = [_text(part) for part in flat]
    fields = dict(zip(texts[::2], texts[1::2], strict=True))
    known: dict[str, Any] = {name: fields.get(name, "") for name in TEXT_FIELDS}
    return Message(
        body=decode_body(fields.get("body", "")),
        message_id=fields.get("id", ""),
        handle=handle,
        attempt=int(fields.get("attempts", "0")) + count,
        sent_ms=int(fields["sent_ms"]) if "sent_ms" in fields else None,
        **known,
    )


def _text(value: Any) -> str:
    """A client may be one that decodes replies."""
    return value.decode() if isinstance(value, bytes) else str(value)
