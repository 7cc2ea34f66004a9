"""The steps of a call, as values: the logic is written once, as generators, and does no I/O.

A generator yields a step and is sent its result. `Client` executes the steps and blocks, `AsyncClient` executes them
and awaits.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias, TypeVar

GRACE_S: Final = 1.0
"""Added to `X-Request-Timeout`: when that has expired the server says so, and its answer needs time to arrive."""


@dataclass(frozen=True, slots=True)
class Send:
    """A request. Its result is a `Reply` or `Lost`."""

    method: str
    url: str
    """a path below the address of the server, or a whole URL"""
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    silence_s: float = 10.0
    """the longest time without a byte from the server"""
    whole_s: float = 10.0
    """the longest time until the answer is complete"""


@dataclass(frozen=True, slots=True)
class Pause:
    seconds: float


@dataclass(frozen=True, slots=True)
class Pull:
    """Reads the next item of what the caller passed. Its result is the item, or `END`."""

    source: Iterator[Any] | AsyncIterator[Any]


@dataclass(frozen=True, slots=True)
class Give:
    """One of many results, for a caller that iterates."""

    value: Any


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    """names in lower case"""
    body: bytes


@dataclass(frozen=True, slots=True)
class Lost:
    """There was no answer, or only part of one: what the server did is unknown."""

    what: str
    cause: Exception | None = None
    timeout: bool = False
    unconnected: bool = False
    """nothing was sent: there was no connection"""


AttemptStatus: TypeAlias = Literal["success", "in_progress", "unavailable", "refused", "timeout", "lost"]


@dataclass(frozen=True, slots=True)
class RequestAttempt:
    """One request of a call, and how it ended. It contains neither the API key nor the content of a document."""

    method: str
    path: str
    """without the address of the server and without the query"""
    idempotency_key: str
    """the same in all attempts of a call; empty for calls that change nothing"""
    attempt: int
    """1 for the first request of the call"""
    delay_ms: int
    """the pause before this request"""
    status: AttemptStatus
    """`in_progress`: another request executes the operation; `lost`: there was no complete answer"""
    code: int | None
    """the HTTP status, if there was an answer"""
    notes: str
    """the code of the error, or what happened to the answer"""


OnAttempt: TypeAlias = Callable[[RequestAttempt], object]
"""Called after each request, in the thread or event loop of the call. What it raises ends the call."""


class End:
    """The type of `END`."""


END: Final = End()

Result = TypeVar("Result")
Step: TypeAlias = Send | Pause | Pull | Give
Steps: TypeAlias = Generator[Step, Any, Result]
"""`Any`, because what is sent in depends on the step that was yielded."""
