"""`ragfence explain`: everything that happened to a key, and its current state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragfence.cli import output
from ragfence.cli.options import Json, Stores, open_fence

if TYPE_CHECKING:
    from rich.console import Console

    from ragfence.audit.timeline import Timeline, TimelineEvent
    from ragfence.cli.key_lookup import CurrentState
    from ragfence.core.records import KeyRecord


def explain(
    what: Annotated[
        str,
        typer.Argument(
            metavar="KEY|SOURCE_ID",
            help="A key, its first 8 or more digits, or a source_id (for a document, its doc_id).",
        ),
    ],
    *,
    stores: Stores,
    as_json: Json = False,
    every: Annotated[
        bool, typer.Option("--all", help="Show every event; by default repeated replies are counted.")
    ] = False,
) -> None:
    """Show what happened to a key, in order, and its current state."""
    from ragfence.cli.key_lookup import current_state, find_timelines
    from ragfence.errors import ValidationError

    with open_fence(stores) as fence:
        found = [(timeline, current_state(fence, timeline)) for timeline in find_timelines(fence, what, every=every)]
        now_ms = fence.inspector.now_ms()
    if all(not timeline.events and now.record is None and now.commit is None for timeline, now in found):
        raise ValidationError(
            f"there is no key {what}", hint="`ragfence keys` lists the keys; rows of long ago may have expired"
        )
    if as_json:
        output.print_json({"what": what, "keys": [_document(timeline, now, now_ms) for timeline, now in found]})
        return
    console = output.out()
    for number, (timeline, now) in enumerate(found):
        if number:
            console.print()
        _print(console, timeline, now, now_ms)


def describe_record(record: KeyRecord, expires_ms: int | None, now_ms: int) -> str:
    """The state of a record in a sentence."""
    kept = "" if expires_ms is None else f"; kept for another {output.span(expires_ms - now_ms)}"
    error = f", last error {record.error}" if record.error else ""
    owner = record.owner or "an unknown owner"
    match record.state.name:
        case "HELD" if record.when_ms > now_ms:
            left = output.span(record.when_ms - now_ms)
            return f"held by {owner}, attempt {record.attempt}, lease ends in {left}{error}{kept}"
        case "HELD":
            return (
                f"held by {owner}, attempt {record.attempt}, lease expired "
                f"{output.ago(record.when_ms, now_ms)}: the next claim takes it over{error}{kept}"
            )
        case "LOCKED" if record.when_ms > now_ms:
            left = output.span(record.when_ms - now_ms)
            return f"locked by {owner} with fence number {record.fence}, expires in {left} unless it is renewed"
        case "LOCKED":
            return (
                f"was locked by {owner} with fence number {record.fence}, which expired "
                f"{output.ago(record.when_ms, now_ms)}: the next caller gets the lock"
            )
        case "RELEASED":
            since = output.ago(record.when_ms, now_ms)
            return f"released {since} after attempt {record.attempt}: can be claimed{error}{kept}"
        case "QUARANTINED":
            return f"quarantined after {output.pluralize(record.attempt, 'attempt')}{error}{kept}"
        case "FAILED":
            return f"sealed as a failure {output.when(record.when_ms, now_ms)}{error}{kept}"
    return f"sealed {output.when(record.when_ms, now_ms)}{kept}"


def _print(console: Console, timeline: Timeline, now: CurrentState, now_ms: int) -> None:
    lines = [("key", timeline.key)]
    if timeline.source_id:
        parts = {
            name: getattr(timeline, name) for name in ("source_type", "revision", "sequence", "index_hash", "action")
        }
        named = "".join(f", {name} {value}" for name, value in parts.items() if value)
        lines.append(("operation", f"{timeline.kind} {timeline.source_id!r}{named}"))
    _grid(console, lines)
    is_lock = _is_lock(timeline)
    events = output.Listing(console, output.Column("when", whole=True), output.Column("what", whole=True), "")
    for event in timeline.events:
        events.add(
            output.time_cell(event.ts_ms, console=console),
            event.what.replace("_", " "),
            _detail(event, now_ms, is_lock),
        )
    if timeline.events:
        console.print()
        events.print()
        console.print()
    else:
        console.print("no decision rows (they may have expired)")
    _grid(console, _now_lines(timeline, now, now_ms))


def _now_lines(timeline: Timeline, now: CurrentState, now_ms: int) -> list[tuple[str, str]]:
    from ragfence.core.receipts import default_effect_id

    lines = []
    if now.record is not None:
        lines.append(("now", describe_record(now.record, now.expires_ms, now_ms)))
    elif not now.ready:
        lines.append(
            ("now", "unknown: the fence store must be hydrated first, by the next claim or by `ragfence hydrate`")
        )
    else:
        what = (
            "free: nobody holds this lock"
            if _is_lock(timeline)
            else "no record: it expired, was deleted, or was never claimed"
        )
        lines.append(("now", what))
    if now.record is not None and now.record.ended:
        lines.append(("effect_id", now.record.effect_id or default_effect_id(bytes.fromhex(timeline.key))))
    if (now.record is not None and now.record.ended) or now.commit is not None:
        lines.append(("result", "missing" if now.result_bytes is None else output.size(now.result_bytes)))
    if now.commit is not None:
        sealed = output.when(now.commit.sealed_at_ms, now_ms)
        failed = f", as a failure ({now.commit.error})" if now.commit.failed else ""
        lines.append(("commit", f"by attempt {now.commit.attempt} with fence {now.commit.fence}, {sealed}{failed}"))
    return lines


def _is_lock(timeline: Timeline) -> bool:
    from ragfence.engine.requests import LOCK_ACTION, LOCK_KIND

    return timeline.kind == LOCK_KIND and timeline.action == LOCK_ACTION


def _detail(event: TimelineEvent, now_ms: int, is_lock: bool) -> str:
    """What is particular about an event: who, which attempt, and with what result."""
    who = f"by {event.owner}" if event.owner else ""
    run = f"(run {event.run_id})" if event.run_id else ""
    waited = f"after waiting {output.span(event.waited_ms)}" if event.waited_ms else ""
    if event.count > 1:
        last = f"{event.count} times, last {output.when(event.last_ms, now_ms)}"
        return " ".join(part for part in (last, who, run) if part)
    attempt = f"attempt {event.attempt}, fence {event.fence}" if event.fence else ""
    if is_lock:
        attempt = f"fence {event.fence}"
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
            return f"{who}: another attempt was faster".lstrip(": ")
        case "conflicted":
            return f"{who}: payload {event.payload_hash[:12]} differs from the first".lstrip(": ")
        case "ended":
            return f"{event.error_code} {who}".strip()
    return " ".join(part for part in (who, run, waited) if part)


def _grid(console: Console, lines: list[tuple[str, str]]) -> None:
    width = max((len(name) for name, _ in lines), default=0)
    for name, text in lines:
        console.print(f"{name:<{width}}  {output.plain(text)}", soft_wrap=True)


def _document(timeline: Timeline, now: CurrentState, now_ms: int) -> dict[str, Any]:
    operation = ("kind", "source_type", "source_id", "revision", "index_hash", "action", "sequence")
    return {
        "key": timeline.key,
        "operation": {name: getattr(timeline, name) for name in operation if getattr(timeline, name)},
        "events": [_event_document(event) for event in timeline.events],
        "now": _now_document(timeline.key, now, now_ms),
        "commit": _commit_document(now),
    }


def _event_document(event: TimelineEvent) -> dict[str, Any]:
    names = ("owner", "run_id", "attempt", "fence", "error_code", "waited_ms", "effect_id", "payload_hash")
    more = ("route", "event_id", "correlation_id")
    document = {name: getattr(event, name) for name in (*names, *more) if getattr(event, name)}
    if event.count > 1:
        document |= {"count": event.count, "last": output.iso(event.last_ms)}
    if event.flags:
        document["flags"] = list(event.flags)
    return {"what": event.what.value, "ts": output.iso(event.ts_ms), **document}


def _now_document(key: str, now: CurrentState, now_ms: int) -> dict[str, Any] | None:
    from ragfence.core.receipts import default_effect_id

    record = now.record
    if record is None:
        return None if now.ready else {"state": "not_ready"}
    held = record.state.name in ("HELD", "LOCKED")
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


def _commit_document(now: CurrentState) -> dict[str, Any] | None:
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
