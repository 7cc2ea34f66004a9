"""`Metrics`: counters and histograms for Prometheus. The gauges, which read the store, are in `gauges`.

All fences of a process that use one registry share its metrics. A batch is summed up before it is counted, so a
thousand replays cost a handful of increments. The values of labels are bounded (`BoundedLabels`): callers choose
tenants, kinds and routes, and every new value would be a new time series.

`decisions_total`, the log lines and the ledger agree: all of them count the decision rows that an answer leaves. A
granted claim is not a decision yet; its seal is.
"""

from __future__ import annotations

import json
import random
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from ragfence._extras import needs_extra
from ragfence.core.decision_rows import DECISION_TEXT, Row, performed_twice
from ragfence.core.decisions import (
    LOCK,
    Claim,
    ConflictVerdict,
    Fenced,
    Granted,
    InFlightVerdict,
    Replay,
    Seal,
    Sealed,
    SealOutcome,
    StaleVerdict,
    Verdict,
)
from ragfence.core.layout import FENCED_OUT, HEALED, RELEASE_POSITION, RowKind
from ragfence.core.receipts import Decision
from ragfence.core.records import decode_record
from ragfence.errors import RagfenceError
from ragfence.queues.loop import MessagesSettled, QueueStarted, QueueStopped
from ragfence.telemetry.events import (
    CallFailed,
    CallFinished,
    ClaimsAnswered,
    DocumentsRefused,
    Event,
    KeyGenerated,
    LeasesReleased,
    LeasesRenewed,
    ReplaysAnswered,
    RowsRecorded,
    SealsAnswered,
    StoreCall,
    StoreClosing,
    StoreOpened,
)
from ragfence.telemetry.gauges import Gauges
from ragfence.telemetry.outbox_gauges import OutboxGauges, WatchedOutbox

if TYPE_CHECKING:
    from ragfence.outbox.relay import RelayReport
from ragfence.telemetry.queue_metrics import QueueMetrics

with needs_extra("audit", "Observing with metrics"):
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram

NEW, DUPLICATE, CONFLICT = Decision.NEW.value, Decision.DUPLICATE.value, Decision.CONFLICT.value
IN_FLIGHT, STALE = Decision.IN_FLIGHT.value, Decision.STALE.value


def decision_of_claim(claim: Claim, verdict: Verdict) -> str | None:
    """The decision that a verdict stands for; None if it is still open, or if the caller writes the row itself."""
    match verdict:
        case Replay():
            return DUPLICATE
        case InFlightVerdict():
            return IN_FLIGHT
        case ConflictVerdict():
            return CONFLICT if claim.row_on_conflict else None
        case StaleVerdict():
            return STALE
        case _:
            return None


def decision_of_seal(seal: Seal, outcome: SealOutcome, *, solo: bool) -> str | None:
    """The decision that a seal stands for; None if it decided nothing, or if the caller writes the row itself."""
    match outcome:
        case Sealed():
            return DUPLICATE if seal.duplicate else NEW
        case Fenced(record) if performed_twice(seal, record, solo=solo):
            return DUPLICATE
        case _:
            return None


def decision_of_row(row: Row) -> str | None:
    """The decision of a row that neither a claim nor a seal made; None for rows that answer no caller."""
    if row.kind is RowKind.ENDED or row.position == RELEASE_POSITION:
        return None
    return DECISION_TEXT[row.kind]


def is_double_effect(seal: Seal, outcome: SealOutcome, *, solo: bool) -> bool:
    """Whether the effect ran, and another attempt's effect ran or will run, too, and is the one that counts.

    A seal is flagged FENCED_OUT if its commit came too late.
    """
    if seal.flags & FENCED_OUT:
        return True
    return isinstance(outcome, Fenced) and performed_twice(seal, outcome.record, solo=solo)


def outcome_of(seal: Seal) -> str:
    """The outcome of the effect, of a seal that counts."""
    if seal.duplicate:
        return "healed" if seal.flags & HEALED else "moved"
    return "failed" if seal.failed else "created"


def known_for_ms(granted: Granted, claim: Claim) -> int:
    """How long the key had been known when the claim was granted, by the clock of the store."""
    return max(granted.record.when_ms - claim.lease_ms - granted.record.first_seen_ms, 0)


OTHER = "other"


class BoundedLabels:
    """Returns the first `limit` values as they are, and `other` for every later one."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: dict[str, str] = {}
        self._lock = threading.Lock()

    def __call__(self, value: str) -> str:
        known = self._known.get(value)
        if known is not None:
            return known
        with self._lock:
            if value in self._known or len(self._known) < self._limit:
                return self._known.setdefault(value, value)
        return OTHER


def route_of(context: bytes) -> str:
    """Returns the route in the context of a decision row, or "" if it has none."""
    return _text(context, b'"route":"')


def kind_of(context: bytes) -> str:
    return _text(context, b'"kind":"')


def _text(context: bytes, field: bytes) -> str:
    """Finds a field without parsing the rest: a quote inside a value is escaped, so a match is the field itself."""
    start = context.find(field)
    if start < 0:
        return ""
    start += len(field)
    value = context[start : context.index(b'"', start)]
    if b"\\" in value:
        return str(json.loads(context)[field[1:-3].decode()])
    return value.decode()


M = TypeVar("M", Counter, Histogram)

MAX_TENANTS = 100
MAX_API_KEYS = 500
"""of all tenants together; every further key is `other`"""
MAX_WEBHOOKS = 200
DOCUMENT = "document"

_CALL_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_KEY_S = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.01, 0.1)
_WAIT_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0)
_LONG_S = (1.0, 10.0, 60.0, 600.0, 3600.0, 6 * 3600.0, *(days * 86400.0 for days in (1, 2, 3, 7, 14, 30, 90)))


class Series(Generic[M]):
    """A metric with labels. Keeps the children: to look one up in prometheus-client costs more than to count."""

    def __init__(self, metric: M) -> None:
        self._metric: M = metric
        self._children: dict[tuple[str, ...], M] = {}

    def __call__(self, *labels: str) -> M:
        child = self._children.get(labels)
        if child is None:
            child = self._children[labels] = self._metric.labels(*labels)
        return child


class Instruments:
    """The metrics of one registry."""

    def __init__(self, registry: CollectorRegistry, max_tenants: int) -> None:
        def counter(name: str, text: str, *labels: str) -> Series[Counter]:
            return Series(Counter(f"ragfence_{name}", text, labels, registry=registry))

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Series[Histogram]:
            return Series(Histogram(f"ragfence_{name}_seconds", text, labels, buckets=buckets, registry=registry))

        self.tenant, self.kind, self.endpoint = BoundedLabels(max_tenants), BoundedLabels(100), BoundedLabels(200)
        self.store, self.error = BoundedLabels(100), BoundedLabels(100)
        self.decisions = counter("decisions", "Decisions, as in the ledger", "kind", "decision", "tenant", "endpoint")
        self.documents_refused = counter(
            "documents_refused", "Invalid documents, which have no decision row", "code", "tenant", "endpoint"
        )
        self.hits = counter("hits", "Answered with the receipt of an earlier call", "kind", "tenant")
        self.misses = counter("misses", "Operations that were executed, because none had been before", "kind", "tenant")
        self.effects = counter("effects", "Outcomes of effects", "kind", "outcome")
        self.takeovers = counter("takeovers", "Claims granted after the lease of another owner expired", "kind")
        self.locks_acquired = counter("locks_acquired", "Claims granted", "kind")
        self.lock_conflicts = counter("lock_conflicts", "Claims refused because another owner held the lease", "kind")
        self.quarantine_refusals = counter(
            "quarantine_refusals", "Claims refused because the key is in quarantine", "kind"
        )
        self.leases_lost = counter(
            "leases_lost", "Leases that could not be renewed, because they were taken over or had expired", "tenant"
        )
        self.is_double_effect = counter("double_effects_detected", "Effects that ran and were fenced out", "kind")
        self.calls = counter("store_calls", "Calls to the fence store, including those that failed", "store", "method")
        self.errors = counter("store_errors", "Calls to the fence store that failed", "store", "method", "error")
        self.refused_credentials = counter(
            "auth_failures", "Requests refused for their credentials or a missing scope", "reason"
        )
        self.webhook = BoundedLabels(MAX_WEBHOOKS)
        self.webhook_events = counter(
            "webhook_events", "Events of verified deliveries, by what became of them", "tenant", "webhook", "result"
        )
        self.api_key = BoundedLabels(MAX_API_KEYS)
        self.api_requests = counter("api_key_requests", "Requests served, by API key", "tenant", "api_key")
        self.lock_wait = histogram(
            "lock_wait", "Time that claims waited for the lease of another owner", _WAIT_S, "kind"
        )
        self.key_generation = histogram("key_generation", "Time to compute a key and a fingerprint", _KEY_S, "kind")
        self.dedup_check = histogram("dedup_check", "Time of one call that looks up keys", _CALL_S, "store", "method")
        self.seal = histogram("seal", "Time of one call that seals", _CALL_S, "store")
        self.retry_delay = histogram(
            "retry_delay", "Time from the first call with a key to a repeated one", _LONG_S, "kind", "decision"
        )
        self.ttl = histogram("ttl", "Time for which sealed keys are kept", _LONG_S, "kind")
        self.relayed = counter("outbox_relayed", "Outcomes of attempts to relay an event", "outbox", "outcome")
        self.outboxes = OutboxGauges()
        registry.register(self.outboxes)
        self.gauges = Gauges(self.tenant, self.kind, self.store, self._count_failure)
        registry.register(self.gauges)
        self.queues = QueueMetrics(registry, BoundedLabels(100))

    def _count_failure(self, store: str, error: Exception) -> None:
        """Counts a scrape that could not read the store."""
        self.calls(self.store(store), "stats").inc()
        self.errors(self.store(store), "stats", self.error(name_of(error))).inc()


_instruments: weakref.WeakKeyDictionary[CollectorRegistry, Instruments] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


class Metrics:
    """Counts for Prometheus. Several fences may share one; those with the same registry share their metrics."""

    def __init__(
        self,
        registry: CollectorRegistry | None = None,
        *,
        max_tenants: int = MAX_TENANTS,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        """Makes or finds the metrics of a registry.

        Args:
            registry: None is the default registry of prometheus-client.
            max_tenants: Further tenants are counted as `other`. The first use of a registry decides.
            now_ms: The clock.
        """
        self.registry = REGISTRY if registry is None else registry
        self._now_ms = now_ms
        with _lock:
            made = _instruments.get(self.registry)
            if made is None:
                made = _instruments[self.registry] = Instruments(self.registry, max_tenants)
        self._instruments = made

    @property
    def gauges(self) -> Gauges:
        return self._instruments.gauges

    def count_refusal(self, reason: str) -> None:
        """Counts a request of the HTTP API that was refused for its credentials. Addresses are not a label."""
        self._instruments.refused_credentials(reason).inc()

    def count_request(self, tenant: str, api_key: str) -> None:
        """Counts a request of the HTTP API that was served."""
        instruments = self._instruments
        instruments.api_requests(instruments.tenant(tenant), instruments.api_key(api_key)).inc()

    def watch_outbox(self, outbox: WatchedOutbox, name: str = "default") -> Callable[[RelayReport], None]:
        """Exposes how many events of an outbox wait, and counts what a relay does.

        Args:
            outbox: Its status is read in the background.
            name: The label. Up to 100 outboxes are told apart.

        Returns:
            What to pass to the relay as `on_round`.

        >>> Relay(outbox, to=queue, on_round=Metrics().watch_outbox(outbox)).run()  # doctest: +SKIP
        """
        instruments = self._instruments
        label = instruments.outboxes.watch(name, outbox)

        def count(report: RelayReport) -> None:
            for outcome, number in report._asdict().items():
                if number:
                    instruments.relayed(label, outcome).inc(number)

        return count

    def count_webhook(self, tenant: str, webhook: str, result: str) -> None:
        """Counts an event of a webhook that was received over HTTP: new, duplicate, stale, accepted (inbox), ..."""
        instruments = self._instruments
        instruments.webhook_events(instruments.tenant(tenant), instruments.webhook(webhook), result).inc()

    def handle(self, event: Event) -> None:
        match event:
            case ReplaysAnswered():
                self._count_call(event.call)
                self._count_replays(event)
            case ClaimsAnswered():
                self._count_call(event.call)
                self._count_claims(event)
            case SealsAnswered():
                self._count_call(event.call)
                self._count_seals(event)
            case LeasesRenewed(call, _, renewed):
                self._count_call(call)
                if lost := sum(not done for done in renewed):
                    self._instruments.leases_lost(self._instruments.tenant(call.tenant)).inc(lost)
            case RowsRecorded(call, rows):
                self._count_call(call)
                self._count_rows(call, rows)
            case LeasesReleased(call=call) | CallFinished(call):
                self._count_call(call)
            case CallFailed(call, error):
                self._count_call(call)
                instruments = self._instruments
                instruments.errors(instruments.store(call.store), call.method, instruments.error(name_of(error))).inc()
            case KeyGenerated(kind, seconds):
                self._instruments.key_generation(self._instruments.kind(kind)).observe(seconds)
            case DocumentsRefused(_, tenant, refusals):
                instruments = self._instruments
                for refusal in refusals:
                    labels = (
                        instruments.error(refusal.code),
                        instruments.tenant(tenant),
                        instruments.endpoint(refusal.route),
                    )
                    instruments.documents_refused(*labels).inc()
            case StoreOpened(store):
                self._instruments.gauges.add_store(store)
            case StoreClosing(store):
                self._instruments.gauges.remove_store(store)
            case MessagesSettled():
                self._instruments.queues.count(event)
            case QueueStarted(transport):
                self._instruments.queues.add(transport)
            case QueueStopped(transport):
                self._instruments.queues.remove(transport)

    def _count_call(self, call: StoreCall) -> None:
        self._instruments.calls(self._instruments.store(call.store), call.method).inc()

    def _count_claims(self, event: ClaimsAnswered) -> None:
        instruments, now_ms = self._instruments, self._now_ms()
        instruments.dedup_check(instruments.store(event.call.store), "claim").observe(event.call.seconds)
        decided: defaultdict[tuple[str, str, str], int] = defaultdict(int)
        won: defaultdict[str, int] = defaultdict(int)
        taken: defaultdict[str, int] = defaultdict(int)
        refused: defaultdict[str, int] = defaultdict(int)
        stuck: defaultdict[str, int] = defaultdict(int)
        for claim, verdict in zip(event.claims, event.verdicts, strict=True):
            kind = claim.kind or kind_of(claim.context)
            decision = decision_of_claim(claim, verdict)
            if decision is not None:
                decided[kind, decision, route_of(claim.context)] += 1
            match verdict:
                case Granted(record, takeover):
                    won[kind] += 1
                    taken[kind] += takeover
                    if claim.mode is LOCK:
                        instruments.lock_wait(instruments.kind(kind)).observe(claim.waited_ms / 1000)
                    elif takeover or record.attempt > 1:
                        self._observe_retry(kind, NEW, known_for_ms(verdict, claim))
                case InFlightVerdict(quarantined=True):
                    stuck[kind] += 1
                case InFlightVerdict():
                    refused[kind] += 1
                case Replay(record) if record is not None:
                    self._observe_retry(kind, DUPLICATE, now_ms - record.first_seen_ms)
            if claim.waited_ms and claim.mode is not LOCK and not isinstance(verdict, InFlightVerdict):
                instruments.lock_wait(instruments.kind(kind)).observe(claim.waited_ms / 1000)
        self._count_decisions(event.call.tenant, decided)
        for counter, tally in (
            (instruments.locks_acquired, won),
            (instruments.takeovers, taken),
            (instruments.lock_conflicts, refused),
            (instruments.quarantine_refusals, stuck),
        ):
            for kind, count in tally.items():
                counter(instruments.kind(kind)).inc(count)

    def _count_replays(self, event: ReplaysAnswered) -> None:
        """The fast path of documents that are sent again: nothing here costs time per document."""
        instruments, records = self._instruments, event.records
        instruments.dedup_check(instruments.store(event.call.store), "replays").observe(event.call.seconds)
        if answered := len(records) - records.count(None):
            route = route_of(event.asks[0].context)
            self._count_decisions(event.call.tenant, {(DOCUMENT, DUPLICATE, route): answered})
            # One at random: the distribution is as good, and a thousand observations would cost more than the call.
            one = random.choice(records)
            if one is not None:
                self._observe_retry(DOCUMENT, DUPLICATE, self._now_ms() - decode_record(one).first_seen_ms)

    def _count_seals(self, event: SealsAnswered) -> None:
        instruments = self._instruments
        instruments.seal(instruments.store(event.call.store)).observe(event.call.seconds)
        decided: defaultdict[tuple[str, str, str], int] = defaultdict(int)
        fenced: defaultdict[tuple[str, str, str], int] = defaultdict(int)
        ended: defaultdict[tuple[str, str], int] = defaultdict(int)
        for seal, outcome in zip(event.seals, event.outcomes, strict=True):
            kind = kind_of(seal.context)
            decision = decision_of_seal(seal, outcome, solo=event.call.solo)
            if decision is not None:
                # Answered as a duplicate, but its effect ran, too: not a hit.
                counted = fenced if isinstance(outcome, Fenced) or seal.flags & FENCED_OUT else decided
                counted[kind, decision, route_of(seal.context)] += 1
            if is_double_effect(seal, outcome, solo=event.call.solo):
                ended[kind, "fenced_out"] += 1
            elif isinstance(outcome, Sealed):
                ended[kind, outcome_of(seal)] += 1
                if seal.ttl_ms:
                    instruments.ttl(instruments.kind(kind)).observe(seal.ttl_ms / 1000)
            elif isinstance(outcome, Fenced):
                ended[kind, "lease_lost"] += 1
        self._count_decisions(event.call.tenant, decided)
        self._count_decisions(event.call.tenant, fenced, hits=False)
        for (kind, outcome_text), count in ended.items():
            instruments.effects(instruments.kind(kind), outcome_text).inc(count)
            if outcome_text == "fenced_out":
                instruments.is_double_effect(instruments.kind(kind)).inc(count)

    def _count_rows(self, call: StoreCall, rows: Sequence[Row]) -> None:
        decided: defaultdict[tuple[str, str, str], int] = defaultdict(int)
        for row in rows:
            if decision := decision_of_row(row):
                decided[kind_of(row.context), decision, route_of(row.context)] += 1
        self._count_decisions(call.tenant, decided)

    def _count_decisions(self, tenant: str, decided: Mapping[tuple[str, str, str], int], *, hits: bool = True) -> None:
        instruments = self._instruments
        tenant = instruments.tenant(tenant)
        for (kind, decision, endpoint), count in decided.items():
            kind = instruments.kind(kind)
            instruments.decisions(kind, decision, tenant, instruments.endpoint(endpoint)).inc(count)
            if decision == DUPLICATE and hits:
                instruments.hits(kind, tenant).inc(count)
                instruments.gauges.count_answers(tenant, hits=count)
            elif decision == NEW:
                instruments.misses(kind, tenant).inc(count)
                instruments.gauges.count_answers(tenant, misses=count)

    def _observe_retry(self, kind: str, decision: str, after_ms: int) -> None:
        self._instruments.retry_delay(self._instruments.kind(kind), decision).observe(max(after_ms, 0) / 1000)


def name_of(error: Exception) -> str:
    return error.code if isinstance(error, RagfenceError) else type(error).__name__
