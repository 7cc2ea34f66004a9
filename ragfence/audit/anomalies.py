"""What somebody should look at, from the decision rows and the fence store. Nothing here is a broken promise.

hit_rate_drop       the share of calls answered without an effect is far below what it was on the days before
double_effects      effects that were performed twice, because an owner outlived its lease or the store was down
ttl_too_short       the same operation came again after its key was forgotten, and was performed again
quarantined         keys that failed too often, and wait for `release`
expiry_backlog      records that had their time and were not purged
drain_lag           rows that wait to be drained for too long
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, pstdev
from typing import TYPE_CHECKING, Any

from ragfence.audit.ledger import Wanted
from ragfence.audit.queries import _flagged
from ragfence.audit.row_reader import Rows
from ragfence.core.decision_rows import Phase
from ragfence.core.layout import State
from ragfence.core.policy import Policy
from ragfence.stores.fences import FenceStore, Scanner, all_of

if TYPE_CHECKING:
    import pyarrow

BACKLOG = 1_000
LAG_MS = 5 * 60_000
LEAST_CALLS = 100
"""of a kind on a day, for its hit rate to mean something"""
LEAST_DAYS = 3
LEAST_DROP = 0.1
SIGMAS = 3.0


@dataclass(frozen=True, slots=True)
class Anomaly:
    what: str
    kind: str
    """of operation; empty if it is not about one"""
    count: int
    text: str
    examples: tuple[str, ...] = ()
    """keys, a few"""


def anomalies(rows: Rows, wanted: Wanted, fences: FenceStore, policy: Policy) -> list[Anomaly]:
    names = ["kind", "decision", "phase", "flags", "ts", "sealed_at", "expires_at", "idempotency_key"]
    days = list(rows.by_day(wanted, names, _seen).items())
    return [
        *_hit_rate_drops(days),
        *_double_effects(days),
        *_forgotten_too_early(days, policy),
        *_quarantined(fences),
        *_backlog(fences),
        *_lag(fences),
    ]


@dataclass(frozen=True, slots=True)
class _SourceFigures:
    performed: Counter[str]
    saved: Counter[str]
    doubled: dict[str, list[str]]
    seals: list[tuple[str, str, int, int]]
    """(key, kind, ts, expiry) of what is forgotten one day"""


def _seen(table: pyarrow.Table) -> _SourceFigures:
    import pyarrow as pa
    import pyarrow.compute as pc

    decision = table.column("decision")
    sealing = pc.equal(table.column("phase"), Phase.SEAL.value)
    sealed = pc.and_(sealing, pc.is_valid(table.column("sealed_at")))
    news = table.filter(pc.and_(pc.equal(decision, "new"), sealed))
    outlived = _flagged(table, "fenced_out")
    answered = table.filter(pc.and_(pc.equal(decision, "duplicate"), pc.invert(outlived)))
    doubled: dict[str, list[str]] = {}
    for each in table.filter(outlived).select(["kind", "idempotency_key"]).to_pylist():
        doubled.setdefault(each["kind"] or "", []).append(each["idempotency_key"])
    mortal = news.filter(pc.is_valid(news.column("expires_at")))
    seals = zip(
        mortal.column("idempotency_key").to_pylist(),
        mortal.column("kind").to_pylist(),
        mortal.column("ts").cast(pa.int64()).to_pylist(),
        mortal.column("expires_at").cast(pa.int64()).to_pylist(),
        strict=True,
    )
    return _SourceFigures(_kinds(news), _kinds(answered), doubled, list(seals))


def _kinds(table: pyarrow.Table) -> Counter[str]:
    return Counter(kind or "" for kind in table.column("kind").to_pylist())


def _hit_rate_drops(days: list[tuple[str, _SourceFigures]]) -> list[Anomaly]:
    """The last day of each kind against its own days before."""
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
            text = f"{rate:.0%} of {calls:,} calls were answered without an effect on {name}; usually {usual:.0%}"
            found.append(Anomaly("hit_rate_drop", kind, calls, text))
    return found


def _double_effects(days: list[tuple[str, _SourceFigures]]) -> list[Anomaly]:
    keys: dict[str, list[str]] = {}
    for _, day in days:
        for kind, each in day.doubled.items():
            keys.setdefault(kind, []).extend(each)
    text = (
        "executed twice, since an owner outlived its lease; one counts. Lengthen lease.ttl_s in the policy, or let the "
        "effect check its lease more often"
    )
    return [
        Anomaly("double_effects", kind, len(found), f"{_many(found, 'effect')} {text}", tuple(found[:3]))
        for kind, found in sorted(keys.items())
    ]


def _forgotten_too_early(days: list[tuple[str, _SourceFigures]], policy: Policy) -> list[Anomaly]:
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
            f"{_many(cases, 'operation')} came again up to {_hours(horizon_ms)} after the effect, when the key was "
            f"forgotten, and performed it again; the ttl is {_hours(ttl_ms)}"
        )
        found.append(Anomaly("ttl_too_short", kind, len(cases), text, tuple(key for key, _ in cases[:3])))
    return found


def _quarantined(fences: Scanner) -> list[Anomaly]:
    keys: dict[str, list[str]] = {}
    for each in all_of(fences):
        if each.record.state is State.QUARANTINED:
            keys.setdefault(each.record.kind, []).append(each.key.hex())
    return [
        Anomaly(
            "quarantined", kind, len(found), f"waiting for `ragfence release`: {_many(found, 'key')}", tuple(found[:3])
        )
        for kind, found in sorted(keys.items())
    ]


def _backlog(fences: FenceStore) -> list[Anomaly]:
    """Redis drops what expired by itself."""
    from ragfence.stores.sqlite import SqliteFences

    inner: Any = fences
    if not isinstance(inner, SqliteFences):
        return []
    from ragfence.stores.checkups.disk import expired_records

    count = expired_records(inner.path, inner.tenant, inner.now_ms())
    text = f"{count:,} records had their time; run `ragfence purge-expired`"
    return [Anomaly("expiry_backlog", "", count, text)] if count > BACKLOG else []


def _lag(fences: FenceStore) -> list[Anomaly]:
    now_ms = fences.now_ms()
    lag_ms = now_ms - min((row.ts_ms for row in fences.rows()), default=now_ms)
    text = f"the oldest decision row waits for {lag_ms / 60_000:,.0f} minutes; run `ragfence drain`"
    return [Anomaly("drain_lag", "", 1, text)] if lag_ms > LAG_MS else []


def _many(things: Sequence[Any], name: str) -> str:
    return f"{len(things):,} {name}{'s' * (len(things) != 1)}"


def _hours(ms: int) -> str:
    return f"{round(ms / 3_600_000, 2):,g} h" if ms >= 60_000 else f"{round(ms / 1000, 1):,g} s"
