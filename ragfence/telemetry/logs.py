"""`Logs`: one JSON line for every decision row, through structlog.

    {"event": "sealed", "level": "info", "timestamp": "...", "tenant": "acme", "idempotency_key": "...",
     "decision": "new", "from_state": "held", "to_state": "sealed", "ttl_remaining": 172800.0, ...}

The event has the same name as in the timeline of a key (`ragfence explain`). `logging.include_fields` of the policy
chooses the fields. Many documents that are answered at once are one line with a `count`. Lines go to standard error, or
to your own logger: `Logs(policy, logger=structlog.get_logger())`.

`DuplicateRates` finds sources that are sent again abnormally often, by a client in a loop or a queue that is never
acknowledged. A source is abnormal if, within a sliding window of five minutes, it was answered as a duplicate at least
20 times, and at least ten times as often as is usual for the tenant. Usual is the median of the sources that had any
duplicate, smoothed over earlier windows. A tenant that sends everything again every night has one duplicate per source,
however many sources; one that polls has more, and so a higher threshold. Each source is reported once per window. The
source of an operation without a sequence is its key.
"""

from __future__ import annotations

import json
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, TextIO

from ragfence._extras import needs_extra
from ragfence.audit.timeline import EventType, event_type
from ragfence.core.decisions import Claim, HeadQuery, Replay
from ragfence.core.policy import Policy
from ragfence.core.receipts import Decision
from ragfence.engine.refusals import Refusal
from ragfence.errors import RagfenceError
from ragfence.queues.loop import MessagesSettled
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
MIN_DUPLICATES = 20
MIN_FACTOR = 10.0
MAX_SOURCES = 10_000
SMOOTHING = 0.3
MIN_SOURCES = 10
"""with duplicates; fewer do not show what is usual"""


class AbnormalRate(NamedTuple):
    source: bytes
    duplicates: int
    usual: float
    window_s: float


class DuplicateRates:
    """Counts duplicates of one tenant, in two half windows of at most `max_sources` sources each."""

    def __init__(
        self,
        *,
        window_s: float = WINDOW_S,
        min_duplicates: int = MIN_DUPLICATES,
        min_factor: float = MIN_FACTOR,
        max_sources: int = MAX_SOURCES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._window_s, self._min_duplicates, self._min_factor, self._max = (
            window_s,
            min_duplicates,
            min_factor,
            max_sources,
        )
        self._clock = clock
        self._lock = threading.Lock()
        self._now: dict[bytes, int] = {}
        self._before: dict[bytes, int] = {}
        self._reported: set[bytes] = set()
        self._reported_before: set[bytes] = set()
        self._usual = 1.0
        self._full = False
        self._half_ends_at = clock() + window_s / 2

    def count(self, duplicates: Iterable[bytes]) -> list[AbnormalRate]:
        """Counts sources that were answered as duplicates. Returns those that have become abnormal."""
        with self._lock:
            self._advance_window()
            found = []
            bar = max(self._min_duplicates, self._min_factor * self._usual)
            for source in duplicates:
                count = self._count(source)
                if count >= bar and source not in self._reported and source not in self._reported_before:
                    self._reported.add(source)
                    found.append(AbnormalRate(source, count, self._usual, self._window_s))
            return found

    def _count(self, source: bytes) -> int:
        here = self._now.get(source, 0) + 1
        if here == 1 and len(self._now) >= self._max and not self._make_room():
            return 0
        self._now[source] = here
        return here + self._before.get(source, 0)

    def _make_room(self) -> bool:
        """Drops sources that were seen once: one in a loop was not. If that does not help, new sources are ignored."""
        if not self._full:
            self._now = {source: count for source, count in self._now.items() if count > 1}
            self._full = len(self._now) > 0.9 * self._max
        return not self._full

    def _advance_window(self) -> None:
        now, half_s = self._clock(), self._window_s / 2
        if now < self._half_ends_at:
            return
        # The median of several sources: one in a loop must not become what is usual.
        if len(self._now) >= MIN_SOURCES:
            usual = 2 * statistics.median(self._now.values())  # twice, because these are counts of half a window
            self._usual = max(1.0, (1 - SMOOTHING) * self._usual + SMOOTHING * usual)
        missed = now >= self._half_ends_at + half_s
        self._before, self._now = ({} if missed else self._now), {}
        self._reported_before, self._reported = (set() if missed else self._reported), set()
        self._full = False
        self._half_ends_at = now + half_s


with needs_extra("audit", "Observing with logs"):
    import structlog

SINGLE_LINES_UP_TO: Final = 100
_LOUD: Final = frozenset(
    (EventType.CONFLICTED, EventType.QUARANTINED, EventType.FENCED_OUT, EventType.FAILED, EventType.TAKEN_OVER)
)
_NAMES: Final = ("kind", "source_type", "source_id", "correlation_id", "route")


def json_lines(file: TextIO | None = None) -> Any:
    """Returns a logger that writes JSON lines, however the process has configured structlog."""
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


_LOUD_RESULTS: Final = frozenset(("dead", "retried", "postponed"))


class Logs:
    def __init__(
        self,
        policy: Policy,
        *,
        logger: Any = None,
        each_up_to: int = SINGLE_LINES_UP_TO,
        rates: Callable[[], DuplicateRates] = DuplicateRates,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        """Makes a listener that logs decisions.

        Args:
            policy: Chooses and redacts the fields.
            logger: A structlog logger; None writes JSON lines to standard error.
            each_up_to: Up to this many documents that are answered together have a line each.
            rates: Makes the counters that find abnormal duplicates, one for each tenant.
            now_ms: The clock.
        """
        self._logger = json_lines() if logger is None else logger
        self._fields = DecisionFields(policy)
        self._each_up_to = each_up_to
        self._now_ms = now_ms
        self._new_rates = rates
        self._rates: dict[str, DuplicateRates] = {}
        self._lock = threading.Lock()

    def handle(self, event: Event) -> None:
        match event:
            case CallFailed(call, error):
                code = error.code if isinstance(error, RagfenceError) else type(error).__name__
                self._logger.error(
                    "store_error",
                    tenant=self._fields.clean(call.tenant),
                    store=call.store,
                    method=call.method,
                    error_code=code,
                    message=self._fields.clean(str(error)),
                    seconds=round(call.seconds, 6),
                )
            case DocumentsRefused(_, tenant, refusals):
                self._log_refusals(tenant, refusals)
            case ReplaysAnswered(call, asks, records) if len(asks) > self._each_up_to:
                answered = [ask for ask, record in zip(asks, records, strict=True) if record is not None]
                if answered:
                    self._logger.info("replayed", tenant=self._fields.clean(call.tenant), count=len(answered))
                self._check_rates(call, answered)
            case ReplaysAnswered(call, asks, records):
                self._log_decisions(call, event)
                self._check_rates(call, [ask for ask, record in zip(asks, records, strict=True) if record is not None])
            case ClaimsAnswered(call, claims, verdicts):
                self._log_decisions(call, event)
                pairs = zip(claims, verdicts, strict=True)
                self._check_rates(call, [claim for claim, verdict in pairs if isinstance(verdict, Replay)])
            case SealsAnswered(call=call) | LeasesReleased(call=call) | RowsRecorded(call=call):
                self._log_decisions(call, event)
            case MessagesSettled():
                self._log_messages(event)

    def _log_messages(self, event: MessagesSettled) -> None:
        """One line for each message that was not simply done; those that were done together are one line."""
        clean = self._fields.clean
        named = {"tenant": clean(event.tenant), "queue": clean(event.queue)}
        loud = [each for each in event.settled if each.result in _LOUD_RESULTS]
        for each in loud:
            self._logger.warning("message_settled", **named, **self._fields.message_fields(each))
        quiet = [each for each in event.settled if each.result not in _LOUD_RESULTS]
        if len(quiet) <= self._each_up_to:
            for each in quiet:
                self._logger.info("message_settled", **named, **self._fields.message_fields(each))
        else:
            for result, count in Counter(each.result for each in quiet).items():
                self._logger.info("messages_settled", **named, result=result, count=count)

    def _log_refusals(self, tenant: str, refusals: Sequence[Refusal]) -> None:
        """Many documents that are refused together are one line with a count, as many replays are."""
        clean = self._fields.clean
        logged = refusals if len(refusals) <= self._each_up_to else refusals[:1]
        more = {} if logged is refusals else {"count": len(refusals)}
        for refusal in logged:
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

    def _log_decisions(self, call: StoreCall, event: Event) -> None:
        for facts in self._fields.decisions(event, self._now_ms()):
            what = event_type(facts.row)
            log = self._logger.warning if what in _LOUD else self._logger.info
            log(what.value, **self._fields.fields(facts, call.tenant))

    def _check_rates(self, call: StoreCall, duplicates: Sequence[Claim | HeadQuery]) -> None:
        if not duplicates:
            return
        rates = self._rates.get(call.tenant)
        if rates is None:
            with self._lock:
                rates = self._rates.setdefault(call.tenant, self._new_rates())
        for rate in rates.count([claim.source or claim.key for claim in duplicates]):
            claim = next(claim for claim in duplicates if (claim.source or claim.key) == rate.source)
            context = json.loads(claim.context or b"{}")
            names = {name: self._fields.clean(context[name]) for name in _NAMES if context.get(name)}
            self._logger.warning(
                "abnormal_duplicate_rate",
                tenant=self._fields.clean(call.tenant),
                idempotency_key=claim.key.hex(),
                **names,
                duplicates=rate.duplicates,
                usual=round(rate.usual, 3),
                window_s=rate.window_s,
            )
