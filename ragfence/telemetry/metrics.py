"""`Metrics`: what Prometheus is told. Counters and histograms here; gauges, which ask the store, in `gauges`.

All fences of a process that use one registry share its metrics. A batch is counted first and told then: a thousand
replays cost a handful of increments. Labels are bounded, see `labels`.

Values for labels: callers choose tenants, kinds and routes, and every new value is a new time series for ever.

What an answer of a fence store means for those who count. Pure.

`decisions_total` of the metrics, log lines and the ledger agree: all count the decision rows that an answer leaves
behind. A claim that was granted is no decision yet; its seal is.
"""

from __future__ import annotations

import json
import random
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

from ragfence._extras import needs_extra
from ragfence.core.decision_rows import DECISION_TEXT, Row, performed_twice
from ragfence.core.decisions import (
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
from ragfence.telemetry.events import (
    CallFailed,
    CallFinished,
    ClaimsAnswered,
    DocumentsRefused,
    Event,
    KeyMade,
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

with needs_extra("audit", "Observing with metrics"):
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram

NEW, DUPLICATE, CONFLICT = Decision.NEW.value, Decision.DUPLICATE.value, Decision.CONFLICT.value
IN_FLIGHT, STALE = Decision.IN_FLIGHT.value, Decision.STALE.value


def decision_of_claim(claim: Claim, verdict: Verdict) -> str | None:
    """None: nothing is decided yet, or whoever claimed writes the row himself."""
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
    """None: nothing was decided by it, or whoever sent it writes the row."""
    match outcome:
        case Sealed():
            return DUPLICATE if seal.duplicate else NEW
        case Fenced(record) if performed_twice(seal, record, solo=solo):
            return DUPLICATE
        case _:
            return None


def decision_of_row(row: Row) -> str | None:
    """Of a row that was not made by a claim or a seal; None for those that answer nobody."""
    if row.kind is RowKind.ENDED or row.position == RELEASE_POSITION:
        return None
    return DECISION_TEXT[row.kind]


def doubled(seal: Seal, outcome: SealOutcome, *, solo: bool) -> bool:
    """The effect was performed, and so was, or will be, that of another attempt; this one does not count.

    A seal says it itself (FENCED_OUT) when its commit had come too late.
    """
    if seal.flags & FENCED_OUT:
        return True
    return isinstance(outcome, Fenced) and performed_twice(seal, outcome.record, solo=solo)


def outcome_of(seal: Seal) -> str:
    """Of a seal that counts: what it says of the effect."""
    if seal.duplicate:
        return "healed" if seal.flags & HEALED else "moved"
    return "failed" if seal.failed else "created"


def seen_before_ms(granted: Granted, claim: Claim) -> int:
    """How long the key had been known when the claim was granted, by the clock of the store."""
    return max(granted.record.when_ms - claim.lease_ms - granted.record.first_seen_ms, 0)


OTHER = "other"


class BoundedLabels:
    """The first `most` values as they are, every later one as `other`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: dict[str, str] = {}
        self._lock = threading.Lock()

    def __call__(self, value: str) -> str:
        known = self._known.get(value)
        if known is not None:
            return known
        with self._lock:
            if value in self._known or len(self._known) < self._most:
                return self._known.setdefault(value, value)
        return OTHER


def route_of(context: bytes) -> str:
    """The route in the context of a decision row; empty when there is none."""
    return _text(context, b'"route":"')


def kind_of(context: bytes) -> str:
    return _text(context, b'"kind":"')


def _text(context: bytes, field: bytes) -> str:
    """Without parsing the rest: a quote inside a value is written with a backslash, so this is the field itself."""
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
"""of all tenants; every further one is `other`"""
DOCUMENT = "document"

_CALL_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_KEY_S = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.01, 0.1)
_WAIT_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0)
_LONG_S = (1.0, 10.0, 60.0, 600.0, 3600.0, 6 * 3600.0, *(days * 86400.0 for days in (1, 2, 3, 7, 14, 30, 90)))


class Series(Generic[M]):
    """A metric with labels. To look up a child costs prometheus-client more than to count does, so they are kept."""

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
        self.decisions = counter(
            "decisions", "What callers were told, as in the ledger", "kind", "decision", "tenant", "endpoint"
        )
        self.documents_refused = counter(
            "documents_refused", "Invalid documents, which have no decision row", "code", "tenant", "endpoint"
        )
        self.hits = counter("hits", "Answered with the receipt of an earlier call", "kind", "tenant")
        self.misses = counter("misses", "Performed: nobody had done it before", "kind", "tenant")
        self.effects = counter("effects", "How performed effects ended", "kind", "outcome")
        self.takeovers = counter("takeovers", "Claims won from an owner whose lease had run out", "kind")
        self.acquired = counter("locks_acquired", "Claims won", "kind")
        self.refused = counter("lock_conflicts", "Claims that met somebody else's lease", "kind")
        self.quarantine = counter("quarantine_refusals", "Claims that were told of a quarantine", "kind")
        self.lost = counter("leases_lost", "Leases that could not be renewed: taken over, or run out", "tenant")
        self.doubled = counter("double_effects_detected", "Effects that were performed and fenced out", "kind")
        self.calls = counter("store_calls", "Calls to the fence store, failed ones too", "store", "method")
        self.errors = counter("store_errors", "Calls to the fence store that failed", "store", "method", "error")
        self.refused_credentials = counter(
            "auth_failures", "Requests refused for their credentials, or for a scope they lack", "reason"
        )
        self.api_key = BoundedLabels(MAX_API_KEYS)
        self.api_requests = counter(
            "api_key_requests", "Requests that were served, by the API key that sent them", "tenant", "api_key"
        )
        self.lock_wait = histogram("lock_wait", "How long those waited who met a lease first", _WAIT_S, "kind")
        self.key_generation = histogram("key_generation", "Making a key and a fingerprint", _KEY_S, "kind")
        self.dedup_check = histogram("dedup_check", "One call that asks what is known", _CALL_S, "store", "method")
        self.seal = histogram("seal", "One call that seals", _CALL_S, "store")
        self.retry_delay = histogram(
            "retry_delay", "How long after it was first seen a key was sent again", _LONG_S, "kind", "decision"
        )
        self.ttl = histogram("ttl", "How long sealed keys are kept", _LONG_S, "kind")
        self.gauges = Gauges(self.tenant, self.kind, self.store, self._failed)
        registry.register(self.gauges)

    def _failed(self, store: str, error: Exception) -> None:
        """A scrape that could not ask the store."""
        self.calls(self.store(store), "stats").inc()
        self.errors(self.store(store), "stats", self.error(name_of(error))).inc()


_instruments: weakref.WeakKeyDictionary[CollectorRegistry, Instruments] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


class Metrics:
    """Tells Prometheus. Any number of fences may share one, and those with the same registry share the metrics."""

    def __init__(
        self,
        registry: CollectorRegistry | None = None,
        *,
        max_tenants: int = MAX_TENANTS,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        """`max_tenants` counts for the first use of a registry; every further tenant is `other`."""
        self.registry = REGISTRY if registry is None else registry
        self._now_ms = now_ms
        with _lock:
            made = _instruments.get(self.registry)
            if made is None:
                made = _instruments[self.registry] = Instruments(self.registry, max_tenants)
        self._told = made

    @property
    def gauges(self) -> Gauges:
        return self._told.gauges

    def count_refusal(self, reason: str) -> None:
        """A request of the ingestion API that was refused for its credentials. Addresses are no label."""
        self._told.refused_credentials(reason).inc()

    def count_request(self, tenant: str, api_key: str) -> None:
        """A request of the ingestion API that was let in."""
        told = self._told
        told.api_requests(told.tenant(tenant), told.api_key(api_key)).inc()

    def see(self, event: Event) -> None:
        match event:
            case ReplaysAnswered():
                self._count(event.call)
                self._replays(event)
            case ClaimsAnswered():
                self._count(event.call)
                self._claims(event)
            case SealsAnswered():
                self._count(event.call)
                self._seals(event)
            case LeasesRenewed(call, _, kept):
                self._count(call)
                if lost := sum(not still for still in kept):
                    self._told.lost(self._told.tenant(call.tenant)).inc(lost)
            case RowsRecorded(call, rows):
                self._count(call)
                self._rows(call, rows)
            case LeasesReleased(call=call) | CallFinished(call):
                self._count(call)
            case CallFailed(call, error):
                self._count(call)
                told = self._told
                told.errors(told.store(call.store), call.method, told.error(name_of(error))).inc()
            case KeyMade(kind, seconds):
                self._told.key_generation(self._told.kind(kind)).observe(seconds)
            case DocumentsRefused(_, tenant, refusals):
                told = self._told
                for refusal in refusals:
                    labels = told.error(refusal.code), told.tenant(tenant), told.endpoint(refusal.route)
                    told.documents_refused(*labels).inc()
            case StoreOpened(store):
                self._told.gauges.watch(store)
            case StoreClosing(store):
                self._told.gauges.leave(store)

    def _count(self, call: StoreCall) -> None:
        self._told.calls(self._told.store(call.store), call.method).inc()

    def _claims(self, event: ClaimsAnswered) -> None:
        told, now_ms = self._told, self._now_ms()
        told.dedup_check(told.store(event.call.store), "claim").observe(event.call.seconds)
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
                    if takeover or record.attempt > 1:
                        self._sent_again(kind, NEW, seen_before_ms(verdict, claim))
                case InFlightVerdict(quarantined=True):
                    stuck[kind] += 1
                case InFlightVerdict():
                    refused[kind] += 1
                case Replay(record) if record is not None:
                    self._sent_again(kind, DUPLICATE, now_ms - record.first_seen_ms)
            if claim.waited_ms and not isinstance(verdict, InFlightVerdict):
                told.lock_wait(told.kind(kind)).observe(claim.waited_ms / 1000)
        self._decided(event.call.tenant, decided)
        for counter, tally in (
            (told.acquired, won),
            (told.takeovers, taken),
            (told.refused, refused),
            (told.quarantine, stuck),
        ):
            for kind, count in tally.items():
                counter(told.kind(kind)).inc(count)

    def _replays(self, event: ReplaysAnswered) -> None:
        """The way of every document that is sent again: nothing here is done per document."""
        told, records = self._told, event.records
        told.dedup_check(told.store(event.call.store), "replays").observe(event.call.seconds)
        if answered := len(records) - records.count(None):
            route = route_of(event.asks[0].context)
            self._decided(event.call.tenant, {(DOCUMENT, DUPLICATE, route): answered})
            # One at random: the distribution is as good, and a thousand observations cost more than the call.
            one = random.choice(records)
            if one is not None:
                self._sent_again(DOCUMENT, DUPLICATE, self._now_ms() - decode_record(one).first_seen_ms)

    def _seals(self, event: SealsAnswered) -> None:
        told = self._told
        told.seal(told.store(event.call.store)).observe(event.call.seconds)
        decided: defaultdict[tuple[str, str, str], int] = defaultdict(int)
        fenced: defaultdict[tuple[str, str, str], int] = defaultdict(int)
        ended: defaultdict[tuple[str, str], int] = defaultdict(int)
        for seal, outcome in zip(event.seals, event.outcomes, strict=True):
            kind = kind_of(seal.context)
            decision = decision_of_seal(seal, outcome, solo=event.call.solo)
            if decision is not None:
                # Answered as a duplicate, but it performed the effect, too: no hit.
                counted = fenced if isinstance(outcome, Fenced) or seal.flags & FENCED_OUT else decided
                counted[kind, decision, route_of(seal.context)] += 1
            if doubled(seal, outcome, solo=event.call.solo):
                ended[kind, "fenced_out"] += 1
            elif isinstance(outcome, Sealed):
                ended[kind, outcome_of(seal)] += 1
                if seal.ttl_ms:
                    told.ttl(told.kind(kind)).observe(seal.ttl_ms / 1000)
            elif isinstance(outcome, Fenced):
                ended[kind, "lease_lost"] += 1
        self._decided(event.call.tenant, decided)
        self._decided(event.call.tenant, fenced, hits=False)
        for (kind, outcome_text), count in ended.items():
            told.effects(told.kind(kind), outcome_text).inc(count)
            if outcome_text == "fenced_out":
                told.doubled(told.kind(kind)).inc(count)

    def _rows(self, call: StoreCall, rows: Sequence[Row]) -> None:
        decided: defaultdict[tuple[str, str, str], int] = defaultdict(int)
        for row in rows:
            if decision := decision_of_row(row):
                decided[kind_of(row.context), decision, route_of(row.context)] += 1
        self._decided(call.tenant, decided)

    def _decided(self, tenant: str, decided: Mapping[tuple[str, str, str], int], *, hits: bool = True) -> None:
        told = self._told
        tenant = told.tenant(tenant)
        for (kind, decision, endpoint), count in decided.items():
            kind = told.kind(kind)
            told.decisions(kind, decision, tenant, told.endpoint(endpoint)).inc(count)
            if decision == DUPLICATE and hits:
                told.hits(kind, tenant).inc(count)
                told.gauges.answered(tenant, hits=count)
            elif decision == NEW:
                told.misses(kind, tenant).inc(count)
                told.gauges.answered(tenant, misses=count)

    def _sent_again(self, kind: str, decision: str, after_ms: int) -> None:
        self._told.retry_delay(self._told.kind(kind), decision).observe(max(after_ms, 0) / 1000)


def name_of(error: Exception) -> str:
    return error.code if isinstance(error, RagfenceError) else type(error).__name__
