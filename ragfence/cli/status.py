"""`ragfence status`: what the stores are, what they hold, and how much work the fence saved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ragfence.cli import show
from ragfence.cli.opening import Json, Objects, Place, PolicyFile, Since, Store, Tenant, engine_of, opened, rows_of

if TYPE_CHECKING:
    from ragfence.cli.holdings import Holding
    from ragfence.core.rows import Row
    from ragfence.engine.engine import Engine
    from ragfence.stores.fences import FenceStore, Marker


@dataclass(slots=True)
class Held:
    """What a scan found."""

    records: Counter[tuple[str, str]] = field(default_factory=Counter)
    pending: int = 0
    quarantined: int = 0
    oldest: Holding | None = None

    def see(self, held: Holding) -> None:
        state = held.state.name.lower()
        self.records[held.kind, state] += 1
        self.quarantined += state == "quarantined"
        if held.pending:
            self.pending += 1
            if self.oldest is None or held.first_seen_ms < self.oldest.first_seen_ms:
                self.oldest = held


@dataclass(slots=True)
class Decided:
    """What the rows tell: all of them, and how often an effect was saved since a moment."""

    since_ms: int
    rows: int = 0
    new: int = 0
    duplicates: int = 0

    def see(self, row: Row) -> None:
        from ragfence.audit.story import What, what_of

        self.rows += 1
        if row.ts_ms < self.since_ms:
            return
        what = what_of(row)
        self.new += what in (What.SEALED, What.FAILED)
        # Not those that were fenced out: they performed the effect, too.
        self.duplicates += what in (What.REPLAYED, What.HEALED, What.MOVED)

    @property
    def hit_rate(self) -> float | None:
        asked = self.new + self.duplicates
        return self.duplicates / asked if asked else None


def status(
    store: Store = None,
    objects: Objects = None,
    tenant: Tenant = None,
    policy: PolicyFile = None,
    as_json: Json = False,
    since: Since = "24h",
) -> None:
    """What the stores are and hold, what is stuck, and how much was saved."""
    from ragfence.audit.decisions import _moment_ms

    with opened(Place(store, objects, tenant, policy)) as fence:
        engine = engine_of(fence)
        now_ms = engine.fences.now_ms()
        decided = Decided(_moment_ms(since, now_ms, 0))
        held = _held(engine, decided)
        document = {
            "tenant": engine.tenant,
            "store": engine.fences.url,
            "objects": engine.objects.url if engine.objects is not None else None,
            **_shards(engine.fences.markers()),
            "records": [
                {"kind": kind, "state": state, "count": count} for (kind, state), count in sorted(held.records.items())
            ],
            "pending": {"count": held.pending, "oldest": _oldest(held.oldest, now_ms)},
            "quarantined": held.quarantined,
            "expired": _expired(engine.fences, now_ms),
            "decisions": {
                "since": since,
                "new": decided.new,
                "duplicates": decided.duplicates,
                "hit_rate": decided.hit_rate,
            },
            "rows": decided.rows,
            "bytes": _stored_bytes(engine.fences),
        }
    if as_json:
        show.document(document)
    else:
        _print(document, held, decided, now_ms)


def _held(engine: Engine, decided: Decided) -> Held:
    from ragfence.cli.holdings import scanned

    held = Held()
    for row in show.counted(rows_of(engine), "reading rows"):
        decided.see(row)
    for found in show.counted(scanned(engine.fences), "reading records"):
        held.see(found)
    return held


def _shards(markers: Iterable[Marker | None]) -> dict[str, Any]:
    known = list(markers)
    there = [marker for marker in known if marker is not None]
    return {
        "epoch": max((marker.epoch for marker in there), default=None),
        "shards": {
            "total": len(known),
            "ready": sum(marker.usable for marker in there),
            "hydrating": sum(not marker.ready for marker in there),
        },
    }


def _oldest(held: Holding | None, now_ms: int) -> dict[str, Any] | None:
    if held is None:
        return None
    return {
        "key": held.key.hex(),
        "kind": held.kind,
        "state": held.state.name.lower(),
        "attempt": held.attempt,
        "owner": held.owner or None,
        "first_seen": show.iso(held.first_seen_ms),
        "age_ms": now_ms - held.first_seen_ms,
    }


def _expired(fences: FenceStore, now_ms: int) -> int | None:
    """What had its time and waits for `purge-expired`. Redis drops it by itself, and no other store can be asked."""
    from ragfence.stores.fences_sqlite import SqliteFences

    fences = getattr(fences, "inner", fences)  # of one that is observed
    if not isinstance(fences, SqliteFences):
        return None
    from ragfence.stores.disk_checkup import expired_records

    return expired_records(fences.path, fences.tenant, now_ms)


def _stored_bytes(fences: FenceStore) -> int | None:
    from ragfence.stores.fences_sqlite import SqliteFences

    fences = getattr(fences, "inner", fences)
    # Not `stats` where there is another way: it would look at every record once more.
    if isinstance(fences, SqliteFences):
        files = (fences.path, fences.path.with_name(f"{fences.path.name}-wal"))
        return sum(file.stat().st_size for file in files if file.exists())
    if infos := getattr(fences, "infos", None):
        return sum(int(info.get("used_memory", 0)) for info in infos())
    return fences.stats().bytes


def _print(document: dict[str, Any], held: Held, decided: Decided, now_ms: int) -> None:
    console, shards, oldest = show.out(), document["shards"], held.oldest
    hydrating = f", {shards['hydrating']} being hydrated" if shards["hydrating"] else ""
    rate = (
        "no operations"
        if decided.hit_rate is None
        else f"{decided.hit_rate:.1%} of {decided.new + decided.duplicates:,}"
    )
    lines = {
        "store": document["store"],
        "objects": document["objects"] or "none: as durable as the fence store",
        "tenant": document["tenant"],
        "epoch": f"{document['epoch'] or 'none yet'}, {shards['ready']} of {shards['total']} shards ready{hydrating}",
        "answered again": f"{rate} in {document['decisions']['since']} ({decided.duplicates:,} without an effect)",
        "pending": f"{held.pending:,}",
        "quarantined": f"{held.quarantined:,}",
        "expired": "-" if document["expired"] is None else f"{document['expired']:,} wait for `ragfence purge-expired`",
        "decision rows": f"{decided.rows:,} kept",
        "fence store": show.size(document["bytes"]),
    }
    if oldest is not None:
        key = show.key(oldest.key.hex(), console=console)
        lines["pending"] += f", the oldest {key} ({oldest.kind}), {show.when(oldest.first_seen_ms, now_ms)}"
    for name, text in lines.items():
        console.print(f"{name:<15} {show.plain(str(text))}", soft_wrap=True)
    listing = show.Listing(console, "kind", "state", show.Column("records", right=True))
    for (kind, state), count in sorted(held.records.items()):
        listing.add(kind, state, f"{count:,}")
    if held.records:
        console.print()
        listing.print()
