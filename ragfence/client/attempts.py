"""What a client reports of each request it sends: `Client(on_attempt=...)`.

Client(on_attempt=print)                         one line per request
Client(on_attempt=AttemptLog("attempts.csv"))    the same, as rows of a CSV file
"""

from __future__ import annotations

import csv
import io
import threading
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Literal, TypeAlias

Status: TypeAlias = Literal["success", "in_progress", "unavailable", "refused", "timeout", "lost"]


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
    status: Status
    """`in_progress`: another request executes the operation; `lost`: there was no complete answer"""
    code: int | None
    """the HTTP status, if there was an answer"""
    notes: str
    """the code of the error, or what happened to the answer"""


OnAttempt: TypeAlias = Callable[[RequestAttempt], object]
"""Called after each request, in the thread or event loop of the call. What it raises ends the call."""


class AttemptLog:
    """Appends each attempt to a CSV file, with a header if the file is new. Threads may share one.

    Args:
        path: The file; its folder must exist.

    >>> client = Client(on_attempt=AttemptLog("attempts.csv"))  # doctest: +SKIP
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._lock = threading.Lock()

    def __call__(self, attempt: RequestAttempt) -> None:
        # One write in append mode for the whole row, so that processes that share the file do not mix their rows.
        with self._lock, self._path.open("a", encoding="utf-8", newline="") as file:
            text = io.StringIO()
            rows = csv.writer(text)
            if file.tell() == 0:
                rows.writerow(field.name for field in fields(RequestAttempt))
            rows.writerow("" if value is None else value for value in astuple(attempt))
            file.write(text.getvalue())
