"""`Logs`: JSON lines, one for every decision row, through structlog.

    {"event": "sealed", "level": "info", "timestamp": "...", "tenant": "acme", "idempotency_key": "...",
     "decision": "new", "from_state": "held", "to_state": "sealed", "ttl_remaining": 172800.0, ...}

The event is what the story of a key calls it (`ragfence explain`). `logging.include_fields` of the policy chooses the
fields. Many documents that are answered at once are one line with a `count`. Lines go to standard error, or to a logger
of your own: `Logs(policy, logger=structlog.get_logger())`.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TextIO

from ragfence._extras import needs_extra
from ragfence.audit.timeline import What, what_of
from ragfence.core.decisions import Ask, Claim, Replay
from ragfence.core.policy import Policy
from ragfence.core.receipts import Decision
from ragfence.engine.refusals import Refusal
from ragfence.errors import RagfenceError
from ragfence.telemetry.events import (
    Call,
    CallFailed,
    ClaimsAnswered,
    DocumentsRefused,
    Event,
    LeasesReleased,
    ReplaysAnswered,
    RowsRecorded,
    SealsAnswered,
)
from ragfence.telemetry.fields import Telling
from ragfence.telemetry.rates import DuplicateRates

with needs_extra("audit", "Observing with logs"):
    import structlog

EACH_UP_TO: Final = 100
_LOUD: Final = frozenset((What.CONFLICTED, What.QUARANTINED, What.FENCED_OUT, What.FAILED, What.TAKEN_OVER))
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
        self._telling = Telling(policy)
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

    def _say_each(self, call: Call, event: Event) -> None:
        for told in self._telling.decisions(event, self._now_ms()):
            what = what_of(told.row)
            say = self._logger.warning if what in _LOUD else self._logger.info
            say(what.value, **self._telling.fields(told, call.tenant))

    def _watch(self, call: Call, duplicates: Sequence[Claim | Ask]) -> None:
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
