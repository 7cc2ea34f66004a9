"""What a call wants done next, as values: the logic is written once, as generators, and does no I/O.

A generator yields a step and is sent what came of it. Two shells perform the steps: `Client` blocks, `AsyncClient`
awaits.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, TypeVar

GRACE_S: Final = 1.0
"""A server that is told `X-Request-Timeout` says so when that is over, and its answer has to come through."""


@dataclass(frozen=True, slots=True)
class Send:
    """A request. Answered by a `Reply`, or by `Lost`."""

    method: str
    url: str
    """below the address of the server, or whole"""
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    silence_s: float = 10.0
    """how long nothing may be heard"""
    whole_s: float = 10.0
    """how long all of the answer may take"""


@dataclass(frozen=True, slots=True)
class Pause:
    seconds: float


@dataclass(frozen=True, slots=True)
class Pull:
    """The next thing of what the caller passed. Answered by it, or by `END`."""

    source: Iterator[Any] | AsyncIterator[Any]


@dataclass(frozen=True, slots=True)
class Give:
    """One of many results, for who iterates."""

    value: Any


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    """names in lower case"""
    body: bytes


@dataclass(frozen=True, slots=True)
class Lost:
    """No answer, or not all of one: nobody knows what the server did."""

    what: str
    cause: Exception | None = None
    timeout: bool = False
    unconnected: bool = False
    """nothing was sent: there was no connection"""


class End:
    """`END`, and nothing else."""


END: Final = End()

Result = TypeVar("Result")
Step: TypeAlias = Send | Pause | Pull | Give
Steps: TypeAlias = Generator[Step, Any, Result]
"""`Any`, because what is sent depends on what was yielded: see the steps."""
