"""What listeners see of queues: metrics by queue, a log line and a span per message."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from prometheus_client import CollectorRegistry

from ragfence import Policy
from ragfence.core.backoff import Backoff
from ragfence.errors import TransportUnavailable
from ragfence.queues import Consumer, DocumentConsumer, Envelope, Message
from ragfence.queues.sql import SqlTransport
from ragfence.telemetry import Logs, Metrics, Traces
from ragfence.telemetry.logs import json_lines

AT_ONCE = Backoff(attempts=100, first_s=0.0, longest_s=0.0)
POLICY = Policy.from_mapping({"lease": {"ttl_s": 1.0}})
FULL = Envelope(
    body={"doc_id": "a", "text": "x"},
    event_id="e-1",
    source_id="s-1",
    revision="r-1",
    index_hash="ab" * 32,
    dedupe_key="k-1",
    tenant="default",
    route="webhooks/cms",
)
OF_MESSAGE = ("event_id", "source_id", "revision", "index_hash", "dedupe_key", "tenant", "route")


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[SqlTransport]:
    opened = SqlTransport(f"sqlite:///{tmp_path / 'queue.db'}", "docs", visibility_s=2.0)
    yield opened
    opened.close()


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"ragfence_queue_{name}", {"queue": "docs", **labels})


def test_messages_are_counted_by_queue_and_result(open_fence: Any, registry: Any, queue: SqlTransport) -> None:
    fence = open_fence(observe=Metrics(registry), policy=POLICY)
    queue.send([FULL, FULL, Envelope(body={"doc_id": "bad"}), Envelope(body={"doc_id": "b", "text": "y"})])
    DocumentConsumer(fence, queue, retry=AT_ONCE).run_once(1.0)
    counted = {result: value(registry, "messages_total", result=result) for result in ("new", "duplicate", "dead")}
    assert counted == {"new": 2, "duplicate": 1, "dead": 1}
    assert value(registry, "seal_seconds_count") == 2
    assert value(registry, "latency_seconds_count") == 2


def test_what_waits_is_read_while_a_consumer_runs(open_fence: Any, registry: Any, queue: SqlTransport) -> None:
    fence = open_fence(observe=Metrics(registry), policy=POLICY)
    seen: list[tuple[float | None, ...]] = []
    queue.send([Envelope(body={"id": number}) for number in range(5)])

    def handle(message: Message) -> None:
        if not seen:
            states = [value(registry, "depth", state=state) for state in ("visible", "in_flight", "dead")]
            seen.append((*states, value(registry, "age_of_oldest_seconds")))

    Consumer(fence, queue, handle, batch=2, wait_s=0.1).run(until_empty=True)
    ((*states, age),) = seen
    assert states == [3, 2, 0]
    assert age is not None
    assert value(registry, "depth", state="visible") is None, "nobody reads a queue that has no consumer"


def test_a_queue_that_does_not_answer_has_no_depth(
    open_fence: Any, registry: Any, queue: SqlTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away() -> None:
        raise TransportUnavailable("away")

    fence = open_fence(observe=Metrics(registry), policy=POLICY)
    monkeypatch.setattr(queue, "depth", away)
    seen: list[float | None] = []
    queue.send([Envelope(body={"id": 1})])
    handle = lambda message: seen.append(value(registry, "depth", state="visible"))  # noqa: E731
    Consumer(fence, queue, handle, wait_s=0.1).run(until_empty=True)
    assert seen == [None]


def test_a_log_line_and_a_span_have_all_that_a_message_says_of_itself(
    open_fence: Any, lines: Any, queue: SqlTransport
) -> None:
    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    fence = open_fence(
        observe=(Logs(POLICY, logger=json_lines(lines)), Traces(POLICY, provider=provider)), policy=POLICY
    )
    queue.send([FULL])
    DocumentConsumer(fence, queue, retry=AT_ONCE).run_once(1.0)
    (line,) = lines.of("message_settled")
    (span,) = [span for span in exporter.get_finished_spans() if span.name == "ragfence.message"]
    assert span.attributes is not None
    for name in OF_MESSAGE:
        assert line[name] == getattr(FULL, name), name
        assert span.attributes[f"ragfence.{name}"] == getattr(FULL, name), name
    assert (line["attempt"], line["result"], line["queue"]) == (1, "new", "docs")
    assert (span.attributes["ragfence.attempt"], span.attributes["ragfence.result"]) == (1, "new")
    provider.shutdown()


def test_a_dead_letter_is_a_warning_and_a_failed_span_with_the_reason(
    open_fence: Any, lines: Any, queue: SqlTransport
) -> None:
    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    fence = open_fence(
        observe=(Logs(POLICY, logger=json_lines(lines)), Traces(POLICY, provider=provider)), policy=POLICY
    )
    queue.send([Envelope(body={"doc_id": "a"})])
    DocumentConsumer(fence, queue, retry=AT_ONCE).run_once(1.0)
    (line,) = lines.of("message_settled")
    (span,) = [span for span in exporter.get_finished_spans() if span.name == "ragfence.message"]
    assert line["level"] == "warning"
    assert "/text" in line["reason"]
    assert span.status.status_code is StatusCode.ERROR
    provider.shutdown()
