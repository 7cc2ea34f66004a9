"""`ragfence keys`: which records there are, oldest first."""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragfence.cli import output
from ragfence.cli.options import (
    Json,
    Objects,
    PolicyFile,
    Store,
    StoreOptions,
    Tenant,
    _moment,
    opened,
)

if TYPE_CHECKING:
    from ragfence.cli.records import Holding
    from ragfence.fence import Fence


class StateName(StrEnum):
    HELD = "held"
    RELEASED = "released"
    QUARANTINED = "quarantined"
    SEALED = "sealed"
    FAILED = "failed"


def _hex(text: str | None) -> str | None:
    if text is not None and not re.fullmatch("[0-9a-fA-F]{2,66}", text):
        raise typer.BadParameter("a prefix is 2 to 66 hex digits, as a key begins")
    return text.lower() if text else None


def keys(
    store: Store = None,
    objects: Objects = None,
    tenant: Tenant = None,
    policy: PolicyFile = None,
    as_json: Json = False,
    kind: Annotated[str | None, typer.Option("--kind", help="Only this kind of operation.")] = None,
    state: Annotated[StateName | None, typer.Option("--state", help="Only records in this state.")] = None,
    older_than: Annotated[
        str | None, typer.Option("--older-than", metavar="SPAN", callback=_moment, help="First seen before: 1h, 7d.")
    ] = None,
    younger_than: Annotated[
        str | None, typer.Option("--younger-than", metavar="SPAN", callback=_moment, help="First seen since: 1h, 7d.")
    ] = None,
    prefix: Annotated[
        str | None, typer.Option("--prefix", metavar="HEX", callback=_hex, help="Only keys that begin like this.")
    ] = None,
    source_id: Annotated[str | None, typer.Option("--source-id", help="Only keys of this source.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=0, help="At most so many, the oldest; 0 for all.")] = 100,
) -> None:
    """The records in the fence store, oldest first; with --json one line each."""
    from ragfence.audit.audit import _moment_ms

    with opened(StoreOptions(store, objects, tenant, policy)) as fence:
        now_ms = fence.inspector.now_ms()
        before, since = _moment_ms(older_than, now_ms, 2**62), _moment_ms(younger_than, now_ms, 0)

        def wanted(held: Holding) -> bool:
            return (
                (kind is None or held.kind == kind)
                and (state is None or held.state.name.lower() == state)
                and since <= held.first_seen_ms < before
                and (prefix is None or held.key.hex().startswith(prefix))
            )

        shard = int(prefix[:2], 16) if prefix else None
        chosen = _Chosen(fence, wanted, limit)
        found = chosen.of_source(source_id, shard) if source_id else chosen.of_all(shard)
    if as_json:
        for held in found.shown:
            output.document(_columns(held, now_ms))
        return
    _print(found, now_ms)


@dataclass(frozen=True, slots=True)
class KeyPage:
    shown: list[Holding]
    matching: int


class _Chosen:
    """The oldest `limit` of the records that are wanted, and how many there are."""

    def __init__(self, fence: Fence, wanted: Callable[[Holding], bool], limit: int) -> None:
        self._fence = fence
        self._wanted = wanted
        self._limit = limit
        self._matching = 0

    def of_all(self, shard: int | None) -> KeyPage:
        from ragfence.cli.records import scanned

        oldest = self._oldest(
            self._matched(output.counted(scanned(self._fence.inspector.fences, shard), "reading records"))
        )
        names = {held.key: held.source_id for held in oldest}
        for row in output.counted(self._fence.audit.rows(), "reading rows"):
            if names.get(row.key) == "":
                names[row.key] = str(row.columns()["source_id"] or "")
        return KeyPage([replace(held, source_id=names[held.key]) for held in oldest], self._matching)

    def of_source(self, source_id: str, shard: int | None) -> KeyPage:
        from ragfence.cli.records import NamedSource, scanned

        named = NamedSource(source_id)
        theirs: set[bytes] = set()
        for row in output.counted(self._fence.audit.rows(), "reading rows"):
            if named.has(row):
                theirs.add(row.key)
        if theirs and shard is None:
            shard = next(iter(theirs))[0]  # all keys of a source are in one shard
        kept = [
            replace(held, source_id=named.source_id)
            for held in output.counted(scanned(self._fence.inspector.fences, shard), "reading records")
            if held.key in theirs and self._wanted(held)
        ]
        return KeyPage(self._oldest(kept), len(kept))

    def _matched(self, holdings: Iterable[Holding]) -> Iterable[Holding]:
        for held in holdings:
            if self._wanted(held):
                self._matching += 1
                yield held

    def _oldest(self, holdings: Iterable[Holding]) -> list[Holding]:
        def age(held: Holding) -> tuple[int, bytes]:
            return held.first_seen_ms, held.key

        return heapq.nsmallest(self._limit, holdings, key=age) if self._limit else sorted(holdings, key=age)


def _columns(held: Holding, now_ms: int) -> dict[str, Any]:
    return {
        "key": held.key.hex(),
        "kind": held.kind,
        "source_id": held.source_id or None,
        "state": held.state.name.lower(),
        "attempt": held.attempt,
        "owner": held.owner or None,
        "error_code": held.error or None,
        "fence": held.fence,
        "first_seen": output.iso(held.first_seen_ms),
        "age_ms": now_ms - held.first_seen_ms,
        "lease_left_ms": max(held.when_ms - now_ms, 0) if held.state.name == "HELD" else None,
        "ttl_left_ms": None if held.expires_ms is None else max(held.expires_ms - now_ms, 0),
    }


def _print(found: KeyPage, now_ms: int) -> None:
    console = output.out()
    listing = output.Listing(
        console,
        output.Column("key", whole=True),
        "kind",
        "source_id",
        output.Column("state", whole=True),
        output.Column("attempt", right=True, whole=True),
        output.Column("age", right=True, whole=True),
        output.Column("ttl", right=True, whole=True),
        output.Column("first seen", whole=True, wide=True),
        output.Column("owner", wide=True),
        output.Column("error", wide=True),
    )
    for held in found.shown:
        listing.add(
            output.key(held.key.hex(), console=console),
            held.kind,
            held.source_id,
            state_text(held, now_ms),
            held.attempt,
            output.span(now_ms - held.first_seen_ms),
            "" if held.expires_ms is None else output.span(held.expires_ms - now_ms),
            output.moment(held.first_seen_ms),
            held.owner,
            held.error,
        )
    listing.print()
    if len(found.shown) < found.matching:
        console.print(f"the oldest {len(found.shown)} of {found.matching:,}; --limit 0 shows all")


def state_text(held: Holding, now_ms: int) -> str:
    """A lease that ran out is still called held in the store; the next claim takes it over."""
    if held.state.name == "HELD" and held.when_ms <= now_ms:
        return "lapsed"
    return held.state.name.lower()
