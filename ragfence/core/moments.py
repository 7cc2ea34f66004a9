"""Points in time as callers write them: "24h", "7d", an ISO time, a datetime, or a timedelta back from now."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from ragfence.errors import ValidationError

Moment = str | datetime | timedelta | None

_SPAN = re.compile(r"(\d+)\s*(ms|s|m|h|d)")
_UNIT_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def parse_moment(moment: Moment, now_ms: int, default: int) -> int:
    """Milliseconds since 1970, from a moment in any of its forms.

    A span of text ("24h", "7d") and a timedelta count back from `now_ms`. None is the `default`.

    Raises:
        ValidationError: It is none of these forms.
    """
    if moment is None:
        return default
    wrong = ValidationError(
        f"{moment!r} is not a point in time", hint='"24h", "7d", "2026-01-31T12:00:00+00:00", or a datetime'
    )
    if isinstance(moment, timedelta):
        return now_ms - int(moment.total_seconds() * 1000)
    if isinstance(moment, str):
        if span := _SPAN.fullmatch(moment):
            return now_ms - int(span[1]) * _UNIT_MS[span[2]]
        try:
            moment = datetime.fromisoformat(moment)
        except ValueError:
            raise wrong from None
    if not isinstance(moment, datetime):
        raise wrong
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return int(moment.timestamp() * 1000)
