"""What Redis says, in our words: each error says what to do next, and none shows a password."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import redis

from ragfence.errors import StoreAuth, StoreUnavailable


def without_credentials(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    # The query too: redis-py takes ?password= as well.
    return f"{scheme}{separator}{rest.rpartition('@')[2].partition('?')[0]}"


@contextlib.contextmanager
def understood(url: str) -> Iterator[None]:
    """Redis errors as ours, each with what to do next."""
    try:
        yield
    except redis.AuthenticationError as refused:
        raise StoreAuth(f"{url} refused the login: {refused}", hint="check user and password in the URL") from refused
    except redis.exceptions.NoPermissionError as refused:
        raise StoreAuth(
            f"{url} refused a command: {refused}", hint="grant the ACL listed in docs/operations.md"
        ) from refused
    except (redis.ConnectionError, redis.TimeoutError) as gone:
        raise StoreUnavailable(f"{url} did not answer: {gone}") from gone
    except redis.ResponseError as refused:
        text = str(refused)
        if "NOAUTH" in text or "WRONGPASS" in text:
            raise StoreAuth(f"{url} refused the login: {text}", hint="check user and password") from refused
        if isinstance(refused, redis.exceptions.OutOfMemoryError) or "OOM command" in text:
            raise StoreUnavailable(
                f"{url} is out of memory",
                hint="raise maxmemory; nothing was lost, and what expires makes room by itself",
            ) from refused
        raise StoreUnavailable(f"{url} refused a command: {text}") from refused
    except (redis.RedisError, redis.exceptions.RedisClusterException) as broken:
        raise StoreUnavailable(f"{url}: {broken}") from broken
