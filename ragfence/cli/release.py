"""`ragfence release`: new attempts for a key that got stuck."""

from __future__ import annotations

from typing import Annotated

import typer

from ragfence.cli import show
from ragfence.cli.explain import present_text
from ragfence.cli.opening import Json, Objects, Place, PolicyFile, Store, Tenant, engine_of, opened


def release(
    key: Annotated[str, typer.Argument(metavar="KEY", help="The key, or 8 or more of its first digits.")],
    store: Store = None,
    objects: Objects = None,
    tenant: Tenant = None,
    policy: PolicyFile = None,
    as_json: Json = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Gives a key new attempts: one that is quarantined, stuck, or sealed as a failure."""
    from ragfence.cli.finding import find_key, present
    from ragfence.core.records import State
    from ragfence.errors import ValidationError

    with opened(Place(store, objects, tenant, policy)) as fence:
        engine = engine_of(fence)
        found = find_key(engine, key).hex()
        story = fence.audit.explain(found)
        now = present(engine, story)
        now_ms = engine.fences.now_ms()
        record = now.record or (now.commit.record() if now.commit else None)
        before = present_text(record, now.expires_ms, now_ms) if record else "not known to the fence store"
        live = record is not None and record.state is State.HELD and record.when_ms > now_ms
        if not yes and not as_json and show.is_interactive():
            named = f"{story.kind} {story.source_id!r} " if story.source_id else ""
            show.err().print(show.plain(f"{named}{found}\n  {before}"))
            if live:
                show.err().print("  its owner seems to be alive: somebody else may then perform the effect besides it")
            if not typer.confirm("Release it?", err=True):
                show.err().print("nothing was released")
                raise typer.Exit(1)
        if not fence.release(found):
            raise ValidationError(
                f"there is nothing to release: {found} is {before}", hint=f"`ragfence explain {found[:16]}` tells more"
            )
    if as_json:
        state = record.state.name.lower() if record else None
        attempts, error = (record.attempt, record.error or None) if record else (0, None)
        show.document(
            {"key": found, "released": True, "was": {"state": state, "attempt": attempts, "error_code": error}}
        )
    else:
        show.say(f"released {found}\n  it was {before}")
