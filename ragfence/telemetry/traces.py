"""`Traces`: OpenTelemetry spans around the calls that decide, with the fields of the log lines as attributes.

    ragfence.claim, ragfence.replays, ragfence.seal, ragfence.release, ragfence.message

Spans are made by the tracer provider that the process has set up; without one, there are none. A span is open during
the call to the store, so the spans of redis-py or botocore instrumentation are its children. A call with one operation
has its fields as `ragfence.<field>`; a batch has `ragfence.count` and the count of each decision.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final

from ragfence._extras import needs_extra
from ragfence._version import __version__
from ragfence.audit.timeline import event_type
from ragfence.core.policy import Policy
from ragfence.errors import RagfenceError
from ragfence.queues.loop import MessagesSettled, SettledMessage
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
        """`provider` replaces the tracer provider that the process has set up."""
        self._fields = DecisionFields(policy)
        self._tracer = trace.get_tracer("ragfence", __version__, provider)
        self._now_ms = now_ms

    def span(self, method: str) -> AbstractContextManager[object]:
        return self._span(method) if method in SPANS else nullcontext()

    def handle(self, event: Event) -> None:
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
            case MessagesSettled(queue, _, tenant, settled):
                for each in settled:
                    self._message_span(queue, tenant, each)
            case CallFailed(call, error) if call.method in SPANS:
                span = trace.get_current_span()
                code = error.code if isinstance(error, RagfenceError) else type(error).__name__
                # The message may hold text from callers; the code never does.
                span.set_status(trace.StatusCode.ERROR, code)
                span.set_attribute("error.type", code)

    def _message_span(self, queue: str, tenant: str, settled: SettledMessage) -> None:
        """A span for the settling of a message: it says what the message says of itself, and what became of it."""
        attributes = {f"ragfence.{name}": value for name, value in self._fields.message_fields(settled).items()}
        attributes |= {"ragfence.tenant": self._fields.clean(tenant), "messaging.destination.name": queue}
        span = self._tracer.start_span("ragfence.message", kind=trace.SpanKind.CONSUMER, attributes=attributes)
        if settled.result == "dead":
            span.set_status(trace.StatusCode.ERROR, "dead")
        span.end()

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
        facts = list(self._fields.decisions(event, self._now_ms(), all_conflicts=True))
        if count == 1 and facts:
            for name, value in self._fields.fields(facts[0], call.tenant).items():
                span.set_attribute(f"ragfence.{name}", value)
            span.set_attribute("ragfence.event", event_type(facts[0].row).value)
            return
        span.set_attribute("ragfence.tenant", self._fields.clean(call.tenant))
        for what, times in Counter(event_type(one.row).value for one in facts).items():
            span.set_attribute(f"ragfence.{what}", times)
