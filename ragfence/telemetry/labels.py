"""Values for labels: callers choose tenants, kinds and routes, and every new value is a new time series for ever."""

from __future__ import annotations

import json
import threading

OTHER = "other"


class Bounded:
    """The first `most` values as they are, every later one as `other`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: dict[str, str] = {}
        self._lock = threading.Lock()

    def __call__(self, value: str) -> str:
        known = self._known.get(value)
        if known is not None:
            return known
        with self._lock:
            if value in self._known or len(self._known) < self._most:
                return self._known.setdefault(value, value)
        return OTHER


def route_of(context: bytes) -> str:
    """The route in the context of a decision row; empty when there is none."""
    return _text(context, b'"route":"')


def kind_of(context: bytes) -> str:
    return _text(context, b'"kind":"')


def _text(context: bytes, field: bytes) -> str:
    """Without parsing the rest: a quote inside a value is written with a backslash, so this is the field itself."""
    start = context.find(field)
    if start < 0:
        return ""
    start += len(field)
    value = context[start : context.index(b'"', start)]
    if b"\\" in value:
        return str(json.loads(context)[field[1:-3].decode()])
    return value.decode()
