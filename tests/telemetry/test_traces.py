"""Spans, where there is a provider."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from ragfence import Document, Operation, Policy
from ragfence.errors import Conflict, StoreUnavailable
from ragfence.telemetry import Traces
from ragfence.testing import FaultyFences, MemoryFences, MemoryObjects


@pytest.fixture
def provider():
    made = TracerProvider()
    made.exporter = InMemorySpanExporter()  # type: ignore[attr-defined]
    made.add_span_processor(SimpleSpanProcessor(made.exporter))  # type: ignore[attr-defined]
    yield made
    made.shutdown()


def spans_of(provider, name):
    return [span for span in provider.exporter.get_finished_spans() if span.name == name]


def test_claims_and_seals_are_spans_with_the_fields_of_the_log(open_fence, provider):
    fence = open_fence(observe=Traces(Policy(), provider=provider))
    operation = Operation(kind="ticket", source_type="jira", source_id="a")
    with provider.get_tracer("app").start_as_current_span("request") as outer, fence.claim(operation) as op:
        op.seal(effect_id="ticket-9")
    (seal,) = spans_of(provider, "ragfence.seal")
    claim = spans_of(provider, "ragfence.claim")[-1]
    assert {claim.parent.span_id, seal.parent.span_id} == {outer.get_span_context().span_id}
    assert seal.attributes["ragfence.decision"] == "new"
    assert seal.attributes["ragfence.effect_id"] == "ticket-9"
    assert (seal.attributes["ragfence.from_state"], seal.attributes["ragfence.to_state"]) == ("held", "sealed")
    assert seal.attributes["ragfence.idempotency_key"] == operation.in_tenant("default").key.hex()
    assert claim.attributes["ragfence.event"] == "claimed"
    assert claim.attributes["ragfence.source_type"] == "jira"


def test_what_the_store_does_stands_inside_the_span(open_fence, provider):
    class Instrumented(MemoryFences):
        def claim(self, claims):
            with provider.get_tracer("driver").start_as_current_span("EVALSHA"):
                return super().claim(claims)

    fence = open_fence(Instrumented(), objects=MemoryObjects(), observe=Traces(Policy(), provider=provider))
    with fence.claim(Operation(kind="ticket", source_id="a")) as op:
        op.seal()
    inside, span = spans_of(provider, "EVALSHA")[-1], spans_of(provider, "ragfence.claim")[-1]
    assert inside.parent.span_id == span.context.span_id


def test_a_batch_is_one_span_that_counts(open_fence, provider):
    fence = open_fence(observe=Traces(Policy(), provider=provider))
    documents = [Document(f"d{at}", f"text {at}") for at in range(3)]
    fence.documents.ingest_many(documents)
    fence.documents.ingest_many(documents)
    replays = spans_of(provider, "ragfence.replays")[-1]
    assert (replays.attributes["ragfence.count"], replays.attributes["ragfence.replayed"]) == (3, 3)


def test_an_error_is_its_code_and_never_its_message(open_fence, provider):
    fences = FaultyFences(MemoryFences())
    fence = open_fence(fences, objects=MemoryObjects(), observe=Traces(Policy(), provider=provider))
    fences.on("claim").fail_before(error=StoreUnavailable("the password is hunter2"))
    with pytest.raises(StoreUnavailable):
        fence.claim(Operation(kind="ticket", source_id="a")).__enter__()
    (span,) = spans_of(provider, "ragfence.claim")
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, StoreUnavailable.code)
    assert "hunter2" not in span.to_json()


def test_without_a_provider_nothing_is_made(open_fence, provider):
    fence = open_fence(observe="traces")
    with fence.claim(Operation(kind="ticket", source_id="a")) as op:
        op.seal()
    assert op.receipt.decision == "new"
    assert provider.exporter.get_finished_spans() == ()


@pytest.mark.parametrize("include_diff", [True, False])
def test_the_span_of_a_conflict_has_its_key_and_decision(open_fence, provider, include_diff):
    policy = Policy(on_conflict={"include_diff": include_diff})
    fence = open_fence(policy=policy, observe=Traces(policy, provider=provider))
    operation = Operation(kind="ticket", source_type="jira", source_id="a")
    with fence.claim(operation, payload={"n": 1}) as op:
        op.seal()
    provider.exporter.clear()
    with pytest.raises(Conflict), fence.claim(operation, payload={"n": 2}):
        pass
    told = spans_of(provider, "ragfence.claim")[-1].attributes
    assert told["ragfence.decision"] == "conflict"
    assert told["ragfence.event"] == "conflicted"
    assert told["ragfence.idempotency_key"] == operation.in_tenant("default").key.hex()
