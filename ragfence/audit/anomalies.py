"""Anomalies in the decision rows and the fence store. They deserve attention, but none of them breaks a promise.

hit_rate_drop       the share of calls answered without an effect is far below that of the days before
double_effects      effects that ran twice, because an owner outlived its lease or the store was down
ttl_too_short       an operation was sent again after its key had expired, and ran again
quarantined         keys that failed too often and wait for `release`
expiry_backlog      expired records that were not purged
drain_lag           decision rows that have waited too long to be drained
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, pstdev
from typing import TYPE_CHECKING, Any

from ragfence.audit.ledger import RowQuery
from ragfence.audit.queries import has_flag
from ragfence.audit.row_reader import RowReader
from ragfence.core.decision_rows import Phase
from ragfence.core.layout import State
from ragfence.core.policy import Policy
from ragfence.stores.fences import FenceStore, Scanner, all_of

if TYPE_CHECKING:
    import pyarrow

BACKLOG = 1_000
LAG_MS = 5 * 60_000
LEAST_CALLS = 100
"""of a kind on a day; the hit rate of fewer calls is noise"""
LEAST_DAYS = 3
LEAST_DROP = 0.1
SIGMAS = 3.0


@dataclass(frozen=True, slots=True)
class Anomaly:
    what: str
    kind: str
    """of operation; empty if the anomaly is not about one kind"""
    count: int
    text: str
    examples: tuple[str, ...] = ()
    """a few keys"""


def anomalies(rows: RowReader, query: RowQuery, fences: FenceStore, policy: Policy) -> list[Anomaly]:
    names = ["kind", "decision", "phase", "flags", "ts", "sealed_at", "expires_at", "idempotency_key"]
    days = list(rows.map_days(query, names, _day_counts).items())
    return [
        *_hit_rate_drops(days),
        *_double_effects(days),
        *_early_expiries(days, policy),
        *_quarantines(fences),
        *_backlog(fences),
        *_lag(fences),
    ]


@dataclass(frozen=True, slots=True)
class _DayCounts:
    performed: Counter[str]
    saved: Counter[str]
    double_effects: dict[str, list[str]]
    seals: list[tuple[str, str, int, int]]
    """(key, kind, ts, expiry) of keys that expire"""


def _day_counts(table: pyarrow.Table) -> _DayCounts:
    import pyarrow as pa
    import pyarrow.compute as pc

    decision = table.column("decision")
    sealing = pc.equal(table.column("phase"), Phase.SEAL.value)
    sealed = pc.and_(sealing, pc.is_valid(table.column("sealed_at")))
    news = table.filter(pc.and_(pc.equal(decision, "new"), sealed))
    outlived = has_flag(table, "fenced_out")
    answered = table.filter(pc.and_(pc.equal(decision, "duplicate"), pc.invert(outlived)))
    double_effects: dict[str, list[str]] = {}
    for each in table.filter(outlived).select(["kind", "idempotency_key"]).to_pylist():
        double_effects.setdefault(each["kind"] or "", []).append(each["idempotency_key"])
    mortal = news.filter(pc.is_valid(news.column("expires_at")))
    seals = zip(
        mortal.column("idempotency_key").to_pylist(),
        mortal.column("kind").to_pylist(),
        mortal.column("ts").cast(pa.int64()).to_pylist(),
        mortal.column("expires_at").cast(pa.int64()).to_pylist(),
        strict=True,
    )
    return _DayCounts(_kinds(news), _kinds(answered), double_effects, list(seals))


def _kinds(table: pyarrow.Table) -> Counter[str]:
    return Counter(kind or "" for kind in table.column("kind").to_pylist())


def _hit_rate_drops(days: list[tuple[str, _DayCounts]]) -> list[Anomaly]:
    """Compares the last day of each kind with the days before."""
    found = []
    for kind in sorted({kind for _, day in days for kind in (*day.performed, *day.saved)}):
        rates = []
        for name, day in days:
            calls = day.performed[kind] + day.saved[kind]
            if calls >= LEAST_CALLS:
                rates.append((name, day.saved[kind] / calls, calls))
        if len(rates) <= LEAST_DAYS:
            continue
        *before, (name, rate, calls) = rates
        usual, spread = mean(each for _, each, _ in before), pstdev(each for _, each, _ in before)
        if usual - rate > max(LEAST_DROP, SIGMAS * spread):
            text = f"on {name}, {rate:.0%} of {calls:,} calls were answered without an effect; usually {usual:.0%}"
            found.append(Anomaly("hit_rate_drop", kind, calls, text))
    return found


def _double_effects(days: list[tuple[str, _DayCounts]]) -> list[Anomaly]:
    keys: dict[str, list[str]] = {}
    for _, day in days:
        for kind, each in day.double_effects.items():
            keys.setdefault(kind, []).extend(each)
    text = (
        "ran twice, because an owner outlived its lease; only one counts. Lengthen lease.ttl_s in the policy, or check "
        "the lease more often in the effect"
    )
    return [
        Anomaly("double_effects", kind, len(found), f"{_count_text(found, 'effect')} {text}", tuple(found[:3]))
        for kind, found in sorted(keys.items())
    ]


def _early_expiries(days: list[tuple[str, _DayCounts]], policy: Policy) -> list[Anomaly]:
    lives: dict[str, tuple[int, int]] = {}
    again: dict[str, list[tuple[str, int]]] = {}
    for _, day in days:
        for key, kind, ts_ms, expires_ms in sorted(day.seals, key=lambda seal: seal[2]):
            if key in lives and lives[key][1] <= ts_ms:
                again.setdefault(kind or "", []).append((key, ts_ms - lives[key][0]))
            lives[key] = ts_ms, expires_ms
    found = []
    for kind, cases in sorted(again.items()):
        horizon_ms, ttl_ms = max(age for _, age in cases), policy.for_kind(kind).ttl_ms
        text = (
            f"{_count_text(cases, 'operation')} sent again up to {_hours(horizon_ms)} after the effect, when the key "
            f"had expired, and so executed again; the TTL is {_hours(ttl_ms)}"
        )
        found.append(Anomaly("ttl_too_short", kind, len(cases), text, tuple(key for key, _ in cases[:3])))
    return found


def _quarantines(fences: Scanner) -> list[Anomaly]:
    keys: dict[str, list[str]] = {}
    for each in all_of(fences):
        if each.record.state is State.QUARANTINED:
            keys.setdefault(each.record.kind, []).append(each.key.hex())
    return [
        Anomaly(
            "quarantined",
            kind,
            len(found),
            f"{_count_text(found, 'key')} waiting for `ragfence release`",
            tuple(found[:3]),
        )
        for kind, found in sorted(keys.items())
    ]


def _backlog(fences: FenceStore) -> list[Anomaly]:
    """Only for SQLite: Redis deletes expired records itself."""
    from ragfence.stores.sqlite import SqliteFences

    inner: Any = fences
    if not isinstance(inner, SqliteFences):
        return []
    from ragfence.stores.checkups.disk import expired_records

    count = expired_records(inner.path, inner.tenant, inner.now_ms())
    text = f"{count:,} expired records were not purged; run `ragfence purge-expired`"
    return [Anomaly("expiry_backlog", "", count, text)] if count > BACKLOG else []


def _lag(fences: FenceStore) -> list[Anomaly]:
    now_ms = fences.now_ms()
    lag_ms = now_ms - min((row.ts_ms for row in fences.rows()), default=now_ms)
    text = f"the oldest decision row has waited for {lag_ms / 60_000:,.0f} minutes; run `ragfence drain`"
    return [Anomaly("drain_lag", "", 1, text)] if lag_ms > LAG_MS else []


def _count_text(things: Sequence[Any], name: str) -> str:
    return f"{len(things):,} {name}{'s' * (len(things) != 1)}"


def _hours(ms: int) -> str:
    return f"{round(ms / 3_600_000, 2):,g} h" if ms >= 60_000 else f"{round(ms / 1000, 1):,g} s"
