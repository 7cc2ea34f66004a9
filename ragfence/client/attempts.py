"""`AttemptLog`: the requests of a client as rows of a CSV file."""

from __future__ import annotations

import csv
import io
import threading
from dataclasses import astuple, fields
from pathlib import Path

from ragfence.client.steps import RequestAttempt


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
