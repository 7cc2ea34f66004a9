"""`Logs`: JSON lines, one for every decision row, through structlog.

    {"event": "sealed", "level": "info", "timestamp": "...", "tenant": "acme", "idempotency_key": "...",
     "decision": "new", "from_state": "held", "to_state": "sealed", "ttl_remaining": 172800.0, ...}

The event is what the story of a key calls it (`ragfence explain`). `logging.include_fields` of the policy chooses the
fields. Many documents that are answered at once are one line with a `count`. Lines go to standard error, or to a logger
of your own: `Logs(policy, logger=structlog.get_logger())`.

Which sources are sent again abnormally often: a client in a loop, a queue that is never acknowledged.

Compared with the tenant's own habit. Within a sliding window of five minutes a source is abnormal when it was answered
as a duplicate at least 20 times, and at least ten times as often as the sources of this tenant usually are: the median
of those that had any duplicate, smoothed over the windows before. A tenant who sends everything again every night has
one duplicate per source, however many sources; one who polls has more, and a higher bar. It is told once per source and
window. A source is what has a sequence or is a document; of other operations it is the key.
"""

from __future__ import annotations

import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, TextIO

from ragfence._extras import needs_extra
from ragfence.audit.timeline import EventType, what_of
from ragfence.core.decisions import Claim, HeadQuery, Replay
from ragfence.core.policy import Policy
from ragfence.core.receipts import Decision
from ragfence.engine.refusals import Refusal
from ragfence.errors import RagfenceError
from ragfence.telemetry.events import (
    CallFailed,
    ClaimsAnswered,
    DocumentsRefused,
    Event,
    LeasesReleased,
    ReplaysAnswered,
    RowsRecorded,
    SealsAnswered,
    StoreCall,
)
from ragfence.telemetry.fields import DecisionFields

WINDOW_S = 300.0
LEAST = 20
TIMES = 10.0
MAX_SOURCES = 10_000
SMOOTHING = 0.3
FEWEST = 10
"""sources with duplicates: fewer say nothing about what is usual"""


class Abnormal(NamedTuple):
    source: bytes
    duplicates: int
    usual: float
    window_s: float


class DuplicateRates:
    """Of one tenant. Two half windows of counts, at most `max_sources` in each, are all it remembers."""

    def __init__(
        self,
        *,
        window_s: float = WINDOW_S,
        least: int = LEAST,
        times: float = TIMES,
        max_sources: int = MAX_SOURCES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._window_s, self._least, self._times, self._max = window_s, least, times, max_sources
        self._clock = clock
        self._lock = threading.Lock()
        self._now: dict[bytes, int] = {}
        self._before: dict[bytes, int] = {}
        self._told: set[bytes] = set()
        self._told_before: set[bytes] = set()
        self._usual = 1.0
        self._full = False
        self._half_ends_at = clock() + window_s / 2

    def saw(self, duplicates: Iterable[bytes]) -> list[Abnormal]:
        """Sources that were answered as duplicates; those among them that are abnormal now."""
        with self._lock:
            self._turn()
            found = []
            bar = max(self._least, self._times * self._usual)
            for source in duplicates:
                count = self._count(source)
                if count >= bar and source not in self._told and source not in self._told_before:
                    self._told.add(source)
                    found.append(Abnormal(source, count, self._usual, self._window_s))
            return found

    def _count(self, source: bytes) -> int:
        here = self._now.get(source, 0) + 1
        if here == 1 and len(self._now) >= self._max and not self._room():
            return 0
        self._now[source] = here
        return here + self._before.get(source, 0)

    def _room(self) -> bool:
        """Forgets those that were seen once: whoever is in a loop was not. If that is no help, newcomers wait."""
        if not self._full:
            self._now = {source: count for source, count in self._now.items() if count > 1}
            self._full = len(self._now) > 0.9 * self._max
        return not self._full

    def _turn(self) -> None:
        now, half_s = self._clock(), self._window_s / 2
        if now < self._half_ends_at:
            return
        # The median, and of several: a source in a loop must not become its own habit.
        if len(self._now) >= FEWEST:
            usual = 2 * statistics.median(self._now.values())  # of a half, so twice for a window
            self._usual = max(1.0, (1 - SMOOTHING) * self._usual + SMOOTHING * usual)
        missed = now >= self._half_ends_at + half_s
        self._before, self._now = ({} if missed else self._now), {}
        self._told_before, self._told = (set() if missed else self._told), set()
        self._full = False
        self._half_ends_at = now + half_s


with needs_extra("audit", "Observing with logs"):
    import structlog

EACH_UP_TO: Final = 100
_LOUD: Final = frozenset(
    (EventType.CONFLICTED, EventType.QUARANTINED, EventType.FENCED_OUT, EventType.FAILED, EventType.TAKEN_OVER)
)
_NAMES: Final = ("kind", "source_type", "source_id", "correlation_id", "route")


def json_lines(file: TextIO | None = None) -> Any:
    """A logger that writes JSON lines, whatever else the process does with structlog."""
    return structlog.wrap_logger(
        structlog.WriteLogger(file or sys.stderr),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(0),
        context_class=dict,
        cache_logger_on_first_use=True,
    )


class Logs:
    def __init__(
        self,
        policy: Policy,
        *,
        logger: Any = None,
        each_up_to: int = EACH_UP_TO,
        rates: Callable[[], DuplicateRates] = DuplicateRates,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        """`each_up_to`: so many documents, answered together, still have a line each."""
        self._logger = json_lines() if logger is None else logger
        self._telling = DecisionFields(policy)
        self._each_up_to = each_up_to
        self._now_ms = now_ms
        self._new_rates = rates
        self._rates: dict[str, DuplicateRates] = {}
        self._lock = threading.Lock()

    def see(self, event: Event) -> None:
        match event:
            case CallFailed(call, error):
                code = error.code if isinstance(error, RagfenceError) else type(error).__name__
                self._logger.error(
                    "store_error",
                    tenant=self._telling.clean(call.tenant),
                    store=call.store,
                    method=call.method,
                    error_code=code,
                    message=self._telling.clean(str(error)),
                    seconds=round(call.seconds, 6),
                )
            case DocumentsRefused(_, tenant, refusals):
                self._say_refused(tenant, refusals)
            case ReplaysAnswered(call, asks, records) if len(asks) > self._each_up_to:
                answered = [ask for ask, record in zip(asks, records, strict=True) if record is not None]
                if answered:
                    self._logger.info("replayed", tenant=self._telling.clean(call.tenant), count=len(answered))
                self._watch(call, answered)
            case ReplaysAnswered(call, asks, records):
                self._say_each(call, event)
                self._watch(call, [ask for ask, record in zip(asks, records, strict=True) if record is not None])
            case ClaimsAnswered(call, claims, verdicts):
                self._say_each(call, event)
                pairs = zip(claims, verdicts, strict=True)
                self._watch(call, [claim for claim, verdict in pairs if isinstance(verdict, Replay)])
            case SealsAnswered(call=call) | LeasesReleased(call=call) | RowsRecorded(call=call):
                self._say_each(call, event)

    def _say_refused(self, tenant: str, refusals: Sequence[Refusal]) -> None:
        """Many that are refused together are one line with a count, as are many replays."""
        clean = self._telling.clean
        told = refusals if len(refusals) <= self._each_up_to else refusals[:1]
        more = {} if told is refusals else {"count": len(refusals)}
        for refusal in told:
            named = {"source_id": clean(refusal.doc_id), "route": clean(refusal.route)}
            self._logger.warning(
                "refused",
                tenant=clean(tenant),
                kind="document",
                decision=Decision.REFUSED.value,
                **{name: value for name, value in named.items() if value},
                error_code=refusal.code,
                message=clean(refusal.message),
                **more,
            )

    def _say_each(self, call: StoreCall, event: Event) -> None:
        for told in self._telling.decisions(event, self._now_ms()):
            what = what_of(told.row)
            say = self._logger.warning if what in _LOUD else self._logger.info
            say(what.value, **self._telling.fields(told, call.tenant))

    def _watch(self, call: StoreCall, duplicates: Sequence[Claim | HeadQuery]) -> None:
        if not duplicates:
            return
        rates = self._rates.get(call.tenant)
        if rates is None:
            with self._lock:
                rates = self._rates.setdefault(call.tenant, self._new_rates())
        for found in rates.saw([asked.source or asked.key for asked in duplicates]):
            asked = next(asked for asked in duplicates if (asked.source or asked.key) == found.source)
            named = json.loads(asked.context or b"{}")
            names = {name: self._telling.clean(named[name]) for name in _NAMES if named.get(name)}
            self._logger.warning(
                "abnormal_duplicate_rate",
                tenant=self._telling.clean(call.tenant),
                idempotency_key=asked.key.hex(),
                **names,
                duplicates=found.duplicates,
                usual=round(found.usual, 3),
                window_s=found.window_s,
            )
