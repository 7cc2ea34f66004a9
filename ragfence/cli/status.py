"""`ragfence status`: the stores, their contents, and how much work the fence saved."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ragfence.cli import output
from ragfence.cli.options import Json, Since, Stores, open_fence

if TYPE_CHECKING:
    from ragfence.audit.statistics import FenceStats
    from ragfence.stores.fences import Marker, Scanned


def status(
    *,
    stores: Stores,
    as_json: Json = False,
    since: Since = "24h",
) -> None:
    """Show the stores, their contents, what is stuck, and how many calls were duplicates.

    Duplicates are counted from the beginning of the hour of --since.
    """
    with open_fence(stores) as fence:
        inspector = fence.inspector
        now_ms = inspector.now_ms()
        counted = fence.stats(since)
        document = {
            "tenant": inspector.tenant,
            "store": inspector.fences.url,
            "objects": inspector.objects.url if inspector.objects is not None else None,
            **_shards(inspector.markers()),
            "documents": counted.documents,
            "keys": counted.keys,
            "records": [
                {"kind": each.kind, "state": each.state, "count": each.count, "estimated": each.estimated}
                for each in counted.records
            ],
            "pending": {"count": counted.pending, "oldest": _oldest(counted.oldest_pending, now_ms)},
            "quarantined": counted.quarantined,
            "locks": counted.locks,
            "expired": counted.expired,
            "average_ttl_s": counted.average_ttl_s,
            "decisions": {
                "since": since,
                "new": counted.processed,
                "duplicates": counted.duplicates,
                "hit_rate": counted.hit_rate,
                "counted_since": output.iso(counted.counted_since_ms) if counted.counted_since_ms else None,
            },
            "rows": counted.rows,
            "bytes": counted.bytes,
        }
    if as_json:
        output.print_json(document)
    else:
        _print(document, counted, now_ms)


def _shards(markers: Iterable[Marker | None]) -> dict[str, Any]:
    known = list(markers)
    present = [marker for marker in known if marker is not None]
    return {
        "epoch": max((marker.epoch for marker in present), default=None),
        "shards": {
            "total": len(known),
            "ready": sum(marker.usable for marker in present),
            "hydrating": sum(not marker.ready for marker in present),
        },
    }


def _oldest(held: Scanned | None, now_ms: int) -> dict[str, Any] | None:
    if held is None:
        return None
    record = held.record
    return {
        "key": held.key.hex(),
        "kind": record.kind,
        "state": record.state.name.lower(),
        "attempt": record.attempt,
        "owner": record.owner or None,
        "first_seen": output.iso(record.first_seen_ms),
        "age_ms": now_ms - record.first_seen_ms,
    }


def _print(document: dict[str, Any], counted: FenceStats, now_ms: int) -> None:
    console, shards, oldest = output.out(), document["shards"], counted.oldest_pending
    hydrating = f", {shards['hydrating']} being hydrated" if shards["hydrating"] else ""
    operations = output.pluralize(counted.processed + counted.duplicates, "operation")
    rate = f"{operations} in {counted.since}"
    if counted.hit_rate is not None:
        rate = f"{counted.duplicates:,} of {rate} ({counted.hit_rate:.1%})"
    lines = {
        "store": document["store"],
        "objects": document["objects"] or "none; everything is in the fence store",
        "tenant": document["tenant"],
        "epoch": f"{document['epoch'] or 'none yet'}, {shards['ready']} of {shards['total']} shards ready{hydrating}",
        "documents": f"{counted.documents:,}",
        "duplicates": rate,
        "pending": f"{counted.pending:,}",
        "quarantined": f"{counted.quarantined:,}",
        "locks": f"{counted.locks:,} held",
        "expired": _expired(counted.expired),
        "decision rows": f"{counted.rows:,} not drained yet",
        "fence store": output.size(counted.bytes),
    }
    if counted.counted_since_ms:
        lines["duplicates"] += f", counted since {output.iso(counted.counted_since_ms)}: the ledger cannot be read"
    if oldest is not None:
        key = output.key(oldest.key.hex(), console=console)
        seen = output.when(oldest.record.first_seen_ms, now_ms)
        lines["pending"] += f", the oldest {key} ({oldest.record.kind}), {seen}"
    for name, text in lines.items():
        console.print(f"{name:<15} {output.plain(str(text))}", soft_wrap=True)
    listing = output.Listing(console, "kind", "state", output.Column("keys", right=True))
    for each in counted.records:
        listing.add(each.kind, each.state, f"{'about ' if each.estimated else ''}{each.count:,}")
    if counted.records:
        console.print()
        listing.print()


def _expired(count: int | None) -> str:
    if count is None:
        return "-"
    return f"{count:,}; delete with `ragfence purge-expired`" if count else "0"
