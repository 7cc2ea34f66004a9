"""`ragfence explain`: the whole story of a key, and how it stands now."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragfence.cli import output
from ragfence.cli.options import Json, Objects, PolicyFile, Store, StoreOptions, Tenant, opened

if TYPE_CHECKING:
    from rich.console import Console

    from ragfence.audit.timeline import Timeline, TimelineEvent
    from ragfence.cli.key_lookup import KeyPresent
    from ragfence.core.records import KeyRecord


def explain(
    what: Annotated[
        str, typer.Argument(metavar="KEY|SOURCE_ID", help="A key, 8 or more of its first digits, or a source_id.")
    ],
    store: Store = None,
    objects: Objects = None,
    tenant: Tenant = None,
    policy: PolicyFile = None,
    as_json: Json = False,
    every: Annotated[bool, typer.Option("--all", help="Show each answer, also those that repeat each other.")] = False,
) -> None:
    """What happened to a key, in the order in which it happened, and how it stands now."""
    from ragfence.cli.key_lookup import find_stories, present
    from ragfence.errors import ValidationError

    with opened(StoreOptions(store, objects, tenant, policy)) as fence:
        told = [(story, present(fence, story)) for story in find_stories(fence, what, every=every)]
        now_ms = fence.inspector.now_ms()
    if all(not story.events and now.record is None and now.commit is None for story, now in told):
        raise ValidationError(
            f"nothing is known of {what}", hint="`ragfence keys` lists what is held; rows may be gone"
        )
    if as_json:
        output.document({"what": what, "keys": [_document(story, now, now_ms) for story, now in told]})
        return
    console = output.out()
    for at, (story, now) in enumerate(told):
        if at:
            console.print()
        _print(console, story, now, now_ms)


def present_text(record: KeyRecord, expires_ms: int | None, now_ms: int) -> str:
    """The state of a record in a sentence."""
    kept = "" if expires_ms is None else f"; kept for another {output.span(expires_ms - now_ms)}"
    error = f", last error {record.error}" if record.error else ""
    match record.state.name:
        case "HELD" if record.when_ms > now_ms:
            left = output.span(record.when_ms - now_ms)
            return f"held by {record.owner or 'somebody'}, attempt {record.attempt}, lease ends in {left}{error}{kept}"
        case "HELD":
            return (
                f"held by {record.owner or 'somebody'}, attempt {record.attempt}, lease ran out "
                f"{output.ago(record.when_ms, now_ms)}: the next claim takes it over{error}{kept}"
            )
        case "RELEASED":
            since = output.ago(record.when_ms, now_ms)
            return f"released {since} after attempt {record.attempt}: free to claim{error}{kept}"
        case "QUARANTINED":
            return f"quarantined after {record.attempt} attempts{error}{kept}"
        case "FAILED":
            return f"sealed as a failure {output.when(record.when_ms, now_ms)}{error}{kept}"
    return f"sealed {output.when(record.when_ms, now_ms)}{kept}"


def _print(console: Console, story: Timeline, now: KeyPresent, now_ms: int) -> None:
    lines = [("key", story.key)]
    if story.source_id:
        parts = {name: getattr(story, name) for name in ("source_type", "revision", "sequence", "index_hash", "action")}
        named = "".join(f", {name} {value}" for name, value in parts.items() if value)
        lines.append(("operation", f"{story.kind} {story.source_id!r}{named}"))
    _grid(console, lines)
    events = output.Listing(console, output.Column("when", whole=True), output.Column("what", whole=True), "")
    for event in story.events:
        events.add(output.moment(event.ts_ms), event.what.replace("_", " "), _detail(event, now_ms))
    if story.events:
        console.print()
        events.print()
        console.print()
    else:
        console.print("no decision row names it (any more)")
    _grid(console, _now_lines(story.key, now, now_ms))


def _now_lines(key: str, now: KeyPresent, now_ms: int) -> list[tuple[str, str]]:
    from ragfence.core.receipts import default_effect_id

    lines = []
    if now.record is not None:
        lines.append(("now", present_text(now.record, now.expires_ms, now_ms)))
    elif not now.ready:
        lines.append(("now", "the fence store waits to be hydrated: the next claim does it, or `ragfence hydrate`"))
    else:
        lines.append(("now", "no record: expired, ended, or never granted"))
    if now.record is not None and now.record.ended:
        lines.append(("effect_id", now.record.effect_id or default_effect_id(bytes.fromhex(key))))
    if (now.record is not None and now.record.ended) or now.commit is not None:
        lines.append(("result", "missing" if now.result_bytes is None else output.size(now.result_bytes)))
    if now.commit is not None:
        sealed = output.when(now.commit.sealed_at_ms, now_ms)
        failed = f", as a failure ({now.commit.error})" if now.commit.failed else ""
        lines.append(("commit", f"by attempt {now.commit.attempt} with fence {now.commit.fence}, {sealed}{failed}"))
    return lines


def _detail(event: TimelineEvent, now_ms: int) -> str:
    """What is particular about an event, in the words of somebody who tells it."""
    who = f"by {event.owner}" if event.owner else ""
    run = f"(run {event.run_id})" if event.run_id else ""
    waited = f"after waiting {output.span(event.waited_ms)}" if event.waited_ms else ""
    if event.count > 1:
        last = f"{event.count} times, last {output.when(event.last_ms, now_ms)}"
        return " ".join(part for part in (last, who, run) if part)
    attempt = f"attempt {event.attempt}, fence {event.fence}" if event.fence else ""
    match event.what:
        case "claimed" | "taken_over":
            return " ".join(part for part in (f"{who}, {attempt}".lstrip(", "), run, waited) if part)
        case "released":
            return f"{attempt}, {event.error_code}" if event.error_code != "RELEASED" else attempt
        case "sealed" | "healed" | "moved":
            return f"{attempt}, effect_id {event.effect_id}"
        case "failed":
            return f"{attempt}, {event.error_code}"
        case "fenced_out":
            return f"{who}: another attempt had won"
        case "conflicted":
            return f"{who}: payload {event.payload_hash[:12]} differs from the first".lstrip(": ")
        case "ended":
            return f"{event.error_code} {who}".strip()
    return " ".join(part for part in (who, run, waited) if part)


def _grid(console: Console, lines: list[tuple[str, str]]) -> None:
    width = max((len(name) for name, _ in lines), default=0)
    for name, text in lines:
        console.print(f"{name:<{width}}  {output.plain(text)}", soft_wrap=True)


def _document(story: Timeline, now: KeyPresent, now_ms: int) -> dict[str, Any]:
    operation = ("kind", "source_type", "source_id", "revision", "index_hash", "action", "sequence")
    return {
        "key": story.key,
        "operation": {name: getattr(story, name) for name in operation if getattr(story, name)},
        "events": [_event_document(event) for event in story.events],
        "now": _now_document(story.key, now, now_ms),
        "commit": _commit_document(now),
    }


def _event_document(event: TimelineEvent) -> dict[str, Any]:
    names = ("owner", "run_id", "attempt", "fence", "error_code", "waited_ms", "effect_id", "payload_hash")
    more = ("route", "event_id", "correlation_id")
    told = {name: getattr(event, name) for name in (*names, *more) if getattr(event, name)}
    if event.count > 1:
        told |= {"count": event.count, "last": output.iso(event.last_ms)}
    if event.flags:
        told["flags"] = list(event.flags)
    return {"what": event.what.value, "ts": output.iso(event.ts_ms), **told}


def _now_document(key: str, now: KeyPresent, now_ms: int) -> dict[str, Any] | None:
    from ragfence.core.receipts import default_effect_id

    record = now.record
    if record is None:
        return None if now.ready else {"state": "not_ready"}
    held = record.state.name == "HELD"
    return {
        "state": record.state.name.lower(),
        "attempt": record.attempt,
        "owner": record.owner or None,
        "fence": str(record.fence),
        "error_code": record.error or None,
        "effect_id": (record.effect_id or default_effect_id(bytes.fromhex(key))) if record.ended else None,
        "first_seen": output.iso(record.first_seen_ms),
        "sealed_at": output.iso(record.when_ms) if record.ended else None,
        "lease_left_ms": max(record.when_ms - now_ms, 0) if held else None,
        "ttl_left_ms": None if now.expires_ms is None else max(now.expires_ms - now_ms, 0),
        "result_bytes": now.result_bytes if record.ended else None,
    }


def _commit_document(now: KeyPresent) -> dict[str, Any] | None:
    if now.commit is None:
        return None
    commit = now.commit
    return {
        "attempt": commit.attempt,
        "fence": commit.fence,
        "sealed_at": output.iso(commit.sealed_at_ms),
        "sequence": commit.sequence,
        "failed": commit.failed,
        "error_code": commit.error or None,
        "effect_id": commit.effect_id or None,
        "result_bytes": now.result_bytes,
    }
