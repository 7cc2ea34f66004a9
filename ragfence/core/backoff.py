"""When a request to an endpoint is sent again, and after how long. Pure, but for the dice.

Only what may pass is tried again: 429, 5xx, and a connection or an answer that did not come. The pause is chosen at
random between nothing and twice the last limit ("full jitter"), so that clients who failed together do not come back
together. A server that says how long (Retry-After) is believed, up to the longest pause.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from ragfence.errors import ValidationError


@dataclass(frozen=True, slots=True)
class Backoff:
    attempts: int = 6
    first_s: float = 0.5
    longest_s: float = 60.0

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.first_s < 0 or self.longest_s < 0:
            raise ValidationError(f"at least one attempt, and no pause below 0: {self}")

    def limit_s(self, failures: int) -> float:
        """What the pause after so many failures is at most."""
        return min(self.longest_s, self.first_s * 2.0 ** min(failures - 1, 32))

    def pause_s(self, failures: int, asked_s: float | None, dice: random.Random) -> float:
        jitter = dice.uniform(0.0, self.limit_s(failures))
        # On top of what the server asked for: it says the same to everyone.
        return jitter if asked_s is None else min(self.longest_s, asked_s + jitter)


def may_pass(status: int) -> bool:
    return status == 429 or 500 <= status <= 599


def retry_after_s(header: str | None, now: datetime) -> float | None:
    """Seconds, or an HTTP date; None: nothing that can be understood. Never negative."""
    if header is None:
        return None
    text = header.strip()
    try:
        if text.replace(".", "", 1).isascii() and text.replace(".", "", 1).isdigit():
            return float(text)
        then = parsedate_to_datetime(text)
    except ValueError:
        return None
    if then.tzinfo is None:  # "-0000": UTC, as all HTTP dates are
        then = then.replace(tzinfo=UTC)
    return max(0.0, (then - now).total_seconds())
