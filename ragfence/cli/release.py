"""`ragfence release`: new attempts for a key that is stuck, or for all keys that match a query."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from ragfence.cli import output
from ragfence.cli.explain import describe_record
from ragfence.cli.options import Json, Stores, Yes, open_fence

if TYPE_CHECKING:
    from ragfence.engine.releases import Released
    from ragfence.fence import Fence

LIMIT = 10_000


class ReleasableState(StrEnum):
    QUARANTINED = "quarantined"
    RELEASED = "released"


def release(
    key: Annotated[str | None, typer.Argument(metavar="[KEY]", help="The key, or its first 8 or more digits.")] = None,
    *,
    stores: Stores,
    as_json: Json = False,
    state: Annotated[
        ReleasableState | None, typer.Option("--state", help="Release all keys in this state; quarantined by default.")
    ] = None,
    error: Annotated[
        str | None,
        typer.Option("--error", metavar="PATTERN", help="Release all keys whose last error matches: 'STORE.*'."),
    ] = None,
    kind: Annotated[
        str | None, typer.Option("--kind", metavar="KIND", help="Release all keys of this kind of operation.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, help="Release at most this many keys.")] = LIMIT,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the keys; release nothing.")] = False,
    yes: Yes = False,
) -> None:
    """Give new attempts to a key that is quarantined, stuck or sealed as a failure, or to all keys that match.

    The key of a lock takes the lock from its holder.
    """
    from ragfence.errors import ValidationError

    queried = state is not None or error is not None or kind is not None
    if queried == (key is not None):
        raise ValidationError(
            "give either a KEY or a query, not both" if queried else "give a KEY, or a query for several keys",
            hint="`ragfence release KEY`, or `ragfence release --state quarantined --error 'STORE.*'`",
        )
    with open_fence(stores) as fence:
        if key is not None:
            _release_one(fence, key, as_json=as_json, yes=yes, dry_run=dry_run)
            return
        queried_state = (state or ReleasableState.QUARANTINED).value
        release_keys = partial(fence.release_matching, state=queried_state, error=error or "*", kind=kind, limit=limit)
        asking = not (yes or as_json or dry_run) and output.is_interactive()
        if dry_run or asking:
            found = release_keys(dry_run=True)
            if dry_run:
                _print(found, released=False, as_json=as_json)
                return
            _print_listing(found, err=True)
            if found.keys and not typer.confirm(f"Release {output.pluralize(len(found.keys), 'key')}?", err=True):
                output.err().print("nothing was released")
                raise typer.Exit(1)
        _print(release_keys(), released=True, as_json=as_json)


def _release_one(fence: Fence, key: str, *, as_json: bool, yes: bool, dry_run: bool) -> None:
    from ragfence.cli.key_lookup import current_state, find_key
    from ragfence.core.layout import State
    from ragfence.errors import ValidationError

    found = find_key(fence, key).hex()
    timeline = fence.audit.explain(found)
    now = current_state(fence, timeline)
    now_ms = fence.inspector.now_ms()
    record = now.record or (now.commit.record() if now.commit else None)
    before = describe_record(record, now.expires_ms, now_ms) if record else "not in the fence store"
    is_lock = record is not None and record.state is State.LOCKED
    live = record is not None and (record.state is State.HELD or is_lock) and record.when_ms > now_ms
    if not yes and not as_json and not dry_run and output.is_interactive():
        named = f"{timeline.kind} {timeline.source_id!r} " if timeline.source_id else ""
        output.err().print(output.plain(f"{named}{found}\n  {before}"))
        if live:
            then = "hold the lock" if is_lock else "run the effect"
            output.err().print(f"  its owner seems to be alive: another process may then {then} at the same time")
        if not typer.confirm("Release it?", err=True):
            output.err().print("nothing was released")
            raise typer.Exit(1)
    if not dry_run and not fence.release(found):
        raise ValidationError(
            f"there is nothing to release: {found} is {before}", hint=f"`ragfence explain {found[:16]}` shows why"
        )
    if as_json:
        state = record.state.name.lower() if record else None
        attempts, error = (record.attempt, record.error or None) if record else (0, None)
        output.print_json(
            {"key": found, "released": not dry_run, "was": {"state": state, "attempt": attempts, "error_code": error}}
        )
    elif dry_run:
        output.echo(f"would release {found}\n  it is {before}")
    else:
        output.echo(f"released {found}\n  it was {before}")


def _print(found: Released, *, released: bool, as_json: bool) -> None:
    if as_json:
        keys = [
            {"key": each.key, "kind": each.kind, "attempt": each.attempt, "error_code": each.error_code or None}
            for each in found.keys
        ]
        output.print_json({"released": released, "count": len(keys), "more": found.more, "keys": keys})
        return
    if not released:
        _print_listing(found)
    output.echo(f"{'released' if released else 'would release'} {output.pluralize(len(found.keys), 'key')}")
    if found.more:
        output.echo("more keys match: run it again, or raise --limit")


def _print_listing(found: Released, *, err: bool = False) -> None:
    console = output.err() if err else output.out()
    listing = output.Listing(
        console,
        output.Column("key", whole=True),
        "kind",
        output.Column("attempt", right=True, whole=True),
        output.Column("error", whole=True),
    )
    for each in found.keys:
        listing.add(output.key(each.key, console=console), each.kind, each.attempt, each.error_code)
    listing.print()
