"""What Redis says, in our words: each error says what to do next, and none shows a password."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import redis
from redis.exceptions import NoPermissionError, OutOfMemoryError, RedisClusterException
from redis.sentinel import MasterNotFoundError

from ragfence.errors import RagfenceError, StoreAuth, StoreUnavailable, StoreUnsafe

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
