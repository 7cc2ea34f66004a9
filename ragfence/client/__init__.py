"""The client of the HTTP API: `Client`, and `AsyncClient` with the same methods. `pip install 'ragfence[client]'`.

>>> with Client("https://ingest.example") as client:  # doctest: +SKIP
...     client.ingest(ragfence.Document("a", "some text")).snippet_ids
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ragfence.client.async_client import AsyncClient as AsyncClient
    from ragfence.client.attempts import AttemptLog as AttemptLog
    from ragfence.client.client import Client as Client
    from ragfence.client.retry import RetryPolicy as RetryPolicy
    from ragfence.client.steps import RequestAttempt as RequestAttempt
    from ragfence.errors import ApiError as ApiError
    from ragfence.errors import ApiForbidden as ApiForbidden
    from ragfence.errors import ApiRefused as ApiRefused
    from ragfence.errors import ApiUnauthorized as ApiUnauthorized
    from ragfence.errors import ApiUnavailable as ApiUnavailable

_WHERE = {
    "ApiError": "ragfence.errors",
    "ApiForbidden": "ragfence.errors",
    "ApiRefused": "ragfence.errors",
    "ApiUnauthorized": "ragfence.errors",
    "ApiUnavailable": "ragfence.errors",
    "AsyncClient": "ragfence.client.async_client",
    "AttemptLog": "ragfence.client.attempts",
    "Client": "ragfence.client.client",
    "RequestAttempt": "ragfence.client.steps",
    "RetryPolicy": "ragfence.client.retry",
}

__all__ = [
    "ApiError",
    "ApiForbidden",
    "ApiRefused",
    "ApiUnauthorized",
    "ApiUnavailable",
    "AsyncClient",
    "AttemptLog",
    "Client",
    "RequestAttempt",
    "RetryPolicy",
]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        value = getattr(import_module(_WHERE[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'ragfence.client' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
