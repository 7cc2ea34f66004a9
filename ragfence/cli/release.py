"""`ragfence release`: new attempts for a key that got stuck, or for all that a query names."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from ragfence.cli import output
from ragfence.cli.explain import present_text
from ragfence.cli.options import Json, Objects, PolicyFile, Store, StoreOptions, Tenant, opened

if TYPE_CHECKING:
    from ragfence.engine.releases import Released
    from ragfence.fence import Fence

LIMIT = 10_000


class ReleasableState(StrEnum):
    QUARANTINED = "quarantined"
    RELEASED = "released"


def release(
    key: Annotated[
        str | None, typer.Argument(metavar="[KEY]", help="The key, or 8 or more of its first digits.")
    ] = None,
    store: Store = None,
    objects: Objects = None,
    tenant: Tenant = None,
    policy: PolicyFile = None,
    as_json: Json = False,
    state: Annotated[
        ReleasableState | None, typer.Option("--state", help="All keys in this state; quarantined, unless given.")
    ] = None,
    error: Annotated[
        str | None,
        typer.Option("--error", metavar="PATTERN", help="All keys whose last error is like this: 'STORE.*'."),
    ] = None,
    kind: Annotated[str | None, typer.Option("--kind", help="All keys of this kind of operation.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="At most so many keys at a time.")] = LIMIT,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the keys, release nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Gives new attempts to a key that is quarantined, stuck, or sealed as a failure; or to all keys that match."""
    from ragfence.errors import ValidationError

    queried = state is not None or error is not None or kind is not None
    if queried == (key is not None):
        raise ValidationError(
            "give either a KEY or a query" if queried else "nothing names the keys to release",
            hint="`ragfence release KEY`, or `ragfence release --state quarantined --error 'STORE.*'`",
        )
    with opened(StoreOptions(store, objects, tenant, policy)) as fence:
        if key is not None:
            _release_one(fence, key, as_json=as_json, yes=yes, dry_run=dry_run)
            return
        queried_state = (state or ReleasableState.QUARANTINED).value
        release_keys = partial(fence.release_matching, state=queried_state, error=error or "*", kind=kind, limit=limit)
        asks = not (yes or as_json or dry_run) and output.is_interactive()
        if dry_run or asks:
            found = release_keys(dry_run=True)
            if dry_run:
                _print(found, released=False, as_json=as_json)
                return
            _print_listing(found, err=True)
            if found.keys and not typer.confirm(f"Release {_counted(found)}?", err=True):
                output.err().print("nothing was released")
                raise typer.Exit(1)
        done = release_keys()
        _print(done, released=True, as_json=as_json)


def _release_one(fence: Fence, key: str, *, as_json: bool, yes: bool, dry_run: bool) -> None:
    from ragfence.cli.key_lookup import find_key, present
    from ragfence.core.layout import State
    from ragfence.errors import ValidationError

    found = find_key(fence, key).hex()
    story = fence.audit.explain(found)
    now = present(fence, story)
    now_ms = fence.inspector.now_ms()
    record = now.record or (now.commit.record() if now.commit else None)
    before = present_text(record, now.expires_ms, now_ms) if record else "not known to the fence store"
    live = record is not None and record.state is State.HELD and record.when_ms > now_ms
    if not yes and not as_json and not dry_run and output.is_interactive():
        named = f"{story.kind} {story.source_id!r} " if story.source_id else ""
        output.err().print(output.plain(f"{named}{found}\n  {before}"))
        if live:
            output.err().print("  its owner seems to be alive: somebody else may then perform the effect besides it")
        if not typer.confirm("Release it?", err=True):
            output.err().print("nothing was released")
            raise typer.Exit(1)
    if not dry_run and not fence.release(found):
        raise ValidationError(
            f"there is nothing to release: {found} is {before}", hint=f"`ragfence explain {found[:16]}` tells more"
        )
    if as_json:
        state = record.state.name.lower() if record else None
        attempts, error = (record.attempt, record.error or None) if record else (0, None)
        output.document(
            {"key": found, "released": not dry_run, "was": {"state": state, "attempt": attempts, "error_code": error}}
        )
    elif dry_run:
        output.say(f"would release {found}\n  it is {before}")
    else:
        output.say(f"released {found}\n  it was {before}")


def _print(found: Released, *, released: bool, as_json: bool) -> None:
    if as_json:
        keys = [
            {"key": each.key, "kind": each.kind, "attempt": each.attempt, "error_code": each.error_code or None}
            for each in found.keys
        ]
        output.document({"released": released, "count": len(keys), "more": found.more, "keys": keys})
        return
    if not released:
        _print_listing(found)
    output.say(f"{'released' if released else 'would release'} {_counted(found)}")
    if found.more:
        output.say("others match as well: run it again, or raise --limit")


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


def _counted(found: Released) -> str:
    return "1 key" if len(found.keys) == 1 else f"{len(found.keys):,} keys"
