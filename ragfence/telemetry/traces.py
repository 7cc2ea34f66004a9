"""`Traces`: OpenTelemetry spans around the calls that decide, with the fields of the log lines as attributes.

    ragfence.claim, ragfence.replays, ragfence.seal, ragfence.release

Spans are made by the tracer provider that the process has set up; where there is none, nothing is made. They are open
while the store is asked, so what the instrumentation of redis-py or botocore adds stands inside them. A call with one
operation has its fields as `ragfence.<field>`; a batch has `ragfence.count` and how often each decision was made.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final

from ragfence._extras import needs_extra
from ragfence._version import __version__
from ragfence.audit.timeline import what_of
from ragfence.core.policy import Policy
from ragfence.errors import RagfenceError
from ragfence.telemetry.events import (
    CallFailed,
    ClaimsAnswered,
    Event,
    LeasesReleased,
    ReplaysAnswered,
    SealsAnswered,
    StoreCall,
)
from ragfence.telemetry.fields import DecisionFields

with needs_extra("audit", "Observing with traces"):
    from opentelemetry import trace

SPANS: Final = frozenset(("claim", "replays", "seal", "release"))


class Traces:
    def __init__(
        self,
        policy: Policy,
        *,
        provider: trace.TracerProvider | None = None,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        """`provider`: instead of the one that the process has set up."""
        self._telling = DecisionFields(policy)
        self._tracer = trace.get_tracer("ragfence", __version__, provider)
        self._now_ms = now_ms

    def around(self, method: str) -> AbstractContextManager[object]:
        return self._span(method) if method in SPANS else nullcontext()

    def see(self, event: Event) -> None:
        match event:
            case (
                ClaimsAnswered(call, items, _)
                | ReplaysAnswered(call, items, _)
                | SealsAnswered(call, items, _)
                | LeasesReleased(call, items, _, _, _)
            ):
                span = trace.get_current_span()
                if span.is_recording():
                    self._describe(span, call, event, len(items))
            case CallFailed(call, error) if call.method in SPANS:
                span = trace.get_current_span()
                code = error.code if isinstance(error, RagfenceError) else type(error).__name__
                # Its message may hold what callers sent; the code never does.
                span.set_status(trace.StatusCode.ERROR, code)
                span.set_attribute("error.type", code)

    @contextmanager
    def _span(self, method: str) -> Iterator[None]:
        with self._tracer.start_as_current_span(
            f"ragfence.{method}",
            kind=trace.SpanKind.CLIENT,
            record_exception=False,
            set_status_on_exception=False,
        ):
            yield

    def _describe(self, span: trace.Span, call: StoreCall, event: Event, count: int) -> None:
        span.set_attribute("db.system", call.store.partition("://")[0])
        span.set_attribute("ragfence.count", count)
        told = list(self._telling.decisions(event, self._now_ms(), all_conflicts=True))
        if count == 1 and told:
            for name, value in self._telling.fields(told[0], call.tenant).items():
                span.set_attribute(f"ragfence.{name}", value)
            span.set_attribute("ragfence.event", what_of(told[0].row).value)
            return
        span.set_attribute("ragfence.tenant", self._telling.clean(call.tenant))
        for what, times in Counter(what_of(one.row).value for one in told).items():
            span.set_attribute(f"ragfence.{what}", times)
