"""`ragfence keys`: the records in the fence store, oldest first."""

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
    Kind,
    Limit,
    SourceId,
    Stores,
    check_moment,
    open_fence,
    to_ms,
)

if TYPE_CHECKING:
    from ragfence.cli.key_lookup import StoredKey
    from ragfence.fence import Fence


class StateName(StrEnum):
    HELD = "held"
    RELEASED = "released"
    QUARANTINED = "quarantined"
    SEALED = "sealed"
    FAILED = "failed"
    LOCKED = "locked"


def _hex(text: str | None) -> str | None:
    if text is not None and not re.fullmatch("[0-9a-fA-F]{2,66}", text):
        raise typer.BadParameter("a prefix of a key has 2 to 66 hex digits")
    return text.lower() if text else None


def keys(
    *,
    stores: Stores,
    as_json: Json = False,
    kind: Kind = None,
    state: Annotated[StateName | None, typer.Option("--state", help="Only keys in this state.")] = None,
    older_than: Annotated[
        str | None,
        typer.Option(
            "--older-than", metavar="SPAN", callback=check_moment, help="Only keys first seen longer ago: 1h, 7d."
        ),
    ] = None,
    younger_than: Annotated[
        str | None,
        typer.Option(
            "--younger-than", metavar="SPAN", callback=check_moment, help="Only keys first seen since then: 1h, 7d."
        ),
    ] = None,
    prefix: Annotated[
        str | None,
        typer.Option("--prefix", metavar="HEX", callback=_hex, help="Only keys that begin with these digits."),
    ] = None,
    source_id: SourceId = None,
    limit: Limit = 100,
) -> None:
    """List the keys in the fence store, oldest first. Documents are not listed: see `ragfence explain DOC_ID`.

    With --json, each key is a line.
    """
    with open_fence(stores) as fence:
        now_ms = fence.inspector.now_ms()
        before, since = to_ms(older_than, now_ms, 2**62), to_ms(younger_than, now_ms, 0)

        def matches(stored: StoredKey) -> bool:
            return (
                (kind is None or stored.kind == kind)
                and (state is None or stored.state.name.lower() == state)
                and since <= stored.first_seen_ms < before
                and (prefix is None or stored.key.hex().startswith(prefix))
            )

        shard = int(prefix[:2], 16) if prefix else None
        selection = _Selection(fence, matches, limit)
        found = selection.of_source(source_id, shard) if source_id else selection.of_all(shard)
    if as_json:
        for stored in found.shown:
            output.print_json(_columns(stored, now_ms))
        return
    _print(found, now_ms)


@dataclass(frozen=True, slots=True)
class KeyPage:
    shown: list[StoredKey]
    matching: int


class _Selection:
    """The oldest `limit` of the keys that match, and how many match."""

    def __init__(self, fence: Fence, matches: Callable[[StoredKey], bool], limit: int) -> None:
        self._fence = fence
        self._matches = matches
        self._limit = limit
        self._matching = 0

    def of_all(self, shard: int | None) -> KeyPage:
        from ragfence.cli.key_lookup import scan_keys

        oldest = self._oldest(
            self._count_matching(output.track(scan_keys(self._fence.inspector.fences, shard), "reading records"))
        )
        names = {stored.key: stored.source_id for stored in oldest}
        for row in output.track(self._fence.audit.rows(), "reading rows"):
            if names.get(row.key) == "":
                names[row.key] = str(row.columns()["source_id"] or "")
        return KeyPage([replace(stored, source_id=names[stored.key]) for stored in oldest], self._matching)

    def of_source(self, source_id: str, shard: int | None) -> KeyPage:
        from ragfence.cli.key_lookup import SourceFilter, scan_keys

        source = SourceFilter(source_id)
        keys: set[bytes] = set()
        for row in output.track(self._fence.audit.rows(), "reading rows"):
            if source.matches(row):
                keys.add(row.key)
        if keys and shard is None:
            shard = next(iter(keys))[0]  # all keys of a source are in one shard
        found = [
            replace(stored, source_id=source.source_id)
            for stored in output.track(scan_keys(self._fence.inspector.fences, shard), "reading records")
            if stored.key in keys and self._matches(stored)
        ]
        return KeyPage(self._oldest(found), len(found))

    def _count_matching(self, keys: Iterable[StoredKey]) -> Iterable[StoredKey]:
        for stored in keys:
            if self._matches(stored):
                self._matching += 1
                yield stored

    def _oldest(self, keys: Iterable[StoredKey]) -> list[StoredKey]:
        def age(stored: StoredKey) -> tuple[int, bytes]:
            return stored.first_seen_ms, stored.key

        return heapq.nsmallest(self._limit, keys, key=age) if self._limit else sorted(keys, key=age)


def _columns(stored: StoredKey, now_ms: int) -> dict[str, Any]:
    return {
        "key": stored.key.hex(),
        "kind": stored.kind,
        "source_id": stored.source_id or None,
        "state": stored.state.name.lower(),
        "attempt": stored.attempt,
        "owner": stored.owner or None,
        "error_code": stored.error or None,
        "fence": stored.fence,
        "first_seen": output.iso(stored.first_seen_ms),
        "age_ms": now_ms - stored.first_seen_ms,
        "lease_left_ms": max(stored.when_ms - now_ms, 0) if stored.holds else None,
        "ttl_left_ms": None if stored.expires_ms is None else max(stored.expires_ms - now_ms, 0),
    }


def _print(found: KeyPage, now_ms: int) -> None:
    console = output.out()
    listing = output.Listing(
        console,
        output.Column("key", whole=True),
        "kind",
        output.Column("source_id", cut=True),
        output.Column("state", whole=True),
        output.Column("attempt", right=True, whole=True),
        output.Column("age", right=True, whole=True),
        output.Column("ttl", right=True, whole=True),
        output.Column("first seen", whole=True, wide=True),
        output.Column("owner", wide=True),
        output.Column("error", wide=True),
    )
    if not found.shown:
        output.echo("no keys")
        return
    for stored in found.shown:
        listing.add(
            output.key(stored.key.hex(), console=console),
            stored.kind,
            stored.source_id,
            state_text(stored, now_ms),
            stored.attempt,
            output.span(now_ms - stored.first_seen_ms),
            "" if stored.expires_ms is None else output.span(stored.expires_ms - now_ms),
            output.moment(stored.first_seen_ms),
            stored.owner,
            stored.error,
        )
    listing.print()
    if len(found.shown) < found.matching:
        console.print(f"the oldest {len(found.shown)} of {found.matching:,}; show all with --limit 0")


def state_text(stored: StoredKey, now_ms: int) -> str:
    """An expired lease is still `held` or `locked` in the store, until the next claim takes it over."""
    if stored.holds and stored.when_ms <= now_ms:
        return "lapsed"
    return stored.state.name.lower()
