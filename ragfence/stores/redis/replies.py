"""What each command is answered with: a reply of another shape is an error.

A connection whose replies are not those of its commands is out of step, for whatever reason, and nothing that comes
over it can be trusted. It is dropped, and the commands are sent again over another one, as after a lost reply.

What Redis says, in our words: each error says what to do next, and none shows a password.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import redis
from redis.exceptions import NoPermissionError, OutOfMemoryError, RedisClusterException
from redis.sentinel import MasterNotFoundError

from ragfence.errors import RagfenceError, StoreAuth, StoreUnavailable, StoreUnsafe

Shape = Callable[[Any], bool]
Command = tuple[Any, ...]

_TEXT = frozenset({bytes})
_VALUES_AFTER = {b"MGET": 1, b"HMGET": 2}
"""how many words of a command stand before those that have a value each"""


class OutOfStep(redis.ConnectionError):
    """A reply is not of the shape that its command is answered with."""


def text(reply: Any) -> bool:
    return type(reply) is bytes


def number(reply: Any) -> bool:
    return type(reply) is int


def single(reply: Any) -> bool:
    """One verdict: a string, or a list of one from a connection that does not know its server."""
    return type(reply) is bytes or (type(reply) is list and len(reply) == 1 and type(reply[0]) is bytes)


def list_of(count: int, *kinds: type) -> Shape:
    allowed = frozenset(kinds)

    def fits(reply: Any) -> bool:
        return type(reply) is list and len(reply) == count and allowed.issuperset(map(type, reply))

    return fits


def _entries(reply: Any) -> bool:
    """Of a stream: an id, and one field with its value."""
    return type(reply) is list and all(
        type(entry) is list
        and len(entry) == 2
        and type(entry[0]) is bytes
        and type(entry[1]) is list
        and len(entry[1]) == 2
        and _TEXT.issuperset(map(type, entry[1]))
        for entry in reply
    )


def _time(reply: Any) -> bool:
    return list_of(2, bytes)(reply) and all(part.isdigit() for part in reply)


def info(reply: Any) -> bool:
    return type(reply) is bytes and b"run_id:" in reply


def _pairs(reply: Any) -> bool:
    """Fields and values: a map, or a list where the protocol has none."""
    if type(reply) is dict:
        return _TEXT.issuperset(map(type, reply)) and _TEXT.issuperset(map(type, reply.values()))
    return type(reply) is list and len(reply) % 2 == 0 and _TEXT.issuperset(map(type, reply))


_PLAIN: dict[bytes, Shape] = {
    b"HGETALL": _pairs,
    b"HINCRBY": number,
    b"INFO": info,
    b"PEXPIRE": number,
    b"PTTL": number,
    b"SCRIPT": text,
    b"TIME": _time,
    b"WAIT": number,
    b"WAITAOF": list_of(2, int),
    b"XADD": text,
    b"XLEN": number,
    b"XRANGE": _entries,
    b"ZCOUNT": number,
}


def shape_of(command: Command | bytes) -> Shape | None:
    """Of what a plain command is answered with; None for a script, whose caller knows it."""
    if isinstance(command, bytes):
        return None
    word = command[0]
    if word in _VALUES_AFTER:
        return list_of(len(command) - _VALUES_AFTER[word], bytes, type(None))
    return _PLAIN.get(word)


def refuse_others(shapes: Sequence[Shape | None], replies: Sequence[Any]) -> None:
    """Raises OutOfStep unless each reply has its shape; a refusal by the server is an answer to any command."""
    for at, (shape, reply) in enumerate(zip(shapes, replies, strict=True)):
        if shape is not None and not isinstance(reply, redis.ResponseError) and not shape(reply):
            raise OutOfStep(f"reply {at + 1} of {len(replies)} is not what its command is answered with")


REDIS_ERRORS = (redis.RedisError, RedisClusterException)


@contextlib.contextmanager
def understood(url: str) -> Iterator[None]:
    """Redis errors as ours, each with what to do next."""
    try:
        yield
    except REDIS_ERRORS as error:
        raise in_our_words(url, error) from error


def in_our_words(url: str, error: Exception) -> RagfenceError:
    text = str(error)
    if isinstance(error, MasterNotFoundError):  # its own words are pages of connection settings
        if "AuthenticationError" in text:
            return StoreAuth(f"{url}: the Sentinels refused the login", hint="add ?sentinel_password=... to the URL")
        return StoreUnavailable(
            f"{url}: no Sentinel names a primary", hint="check the hosts and the name of the service, then try again"
        )
    if isinstance(error, redis.AuthenticationError) or "NOAUTH" in text or "WRONGPASS" in text:
        return StoreAuth(f"{url} refused the login: {text}", hint="check user and password in the URL")
    if isinstance(error, NoPermissionError):
        return StoreAuth(f"{url} refused a command: {text}", hint="grant the ACL listed in docs/operations.md")
    if isinstance(error, redis.ConnectionError | redis.TimeoutError):
        return StoreUnavailable(f"{url} did not answer: {text}")
    if isinstance(error, OutOfMemoryError) or "OOM command" in text:
        return StoreUnavailable(
            f"{url} is out of memory",
            hint="raise maxmemory; nothing was lost, and what expires makes room by itself",
        )
    if "is out of range" in text:  # said by our own scripts
        return StoreUnsafe(
            f"{url} refused a command: {text}",
            hint="its numbers are used up; with an object store `ragfence hydrate` starts a new epoch",
        )
    if isinstance(error, redis.ResponseError):
        return StoreUnavailable(f"{url} refused a command: {text}")
    return StoreUnavailable(f"{url}: {text}")
