"""Routes that read keys, decisions and statistics of a tenant, and routes for administration."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import Response

from ragfence.core.decision_rows import Phase
from ragfence.core.hashing import SHARDS
from ragfence.core.layout import State, ids_in
from ragfence.core.operations import key_from_text
from ragfence.documents.identity import snippet_texts
from ragfence.engine.inspector import Inspector
from ragfence.errors import ValidationError
from ragfence.fence import Fence
from ragfence.server.dependencies import (
    answers,
    body_of,
    body_schema,
    checked,
    execute_write,
    json_answer,
    looked_up,
    moment,
    read_answer,
    require,
    response_of,
    session_of,
)
from ragfence.server.fair_shares import run_in_turn
from ragfence.server.scopes import ROUTES
from ragfence.server.tenant_pool import STATUS_PATH
from ragfence.wire.messages import Answer
from ragfence.wire.problems import RequestRefused, refusal
from ragfence.wire.schemas import (
    Empty,
    InProgress,
    OutcomeOut,
    PageOut,
    PurgedExpiredOut,
    PurgedOut,
    PurgeExpiredIn,
    PurgeIn,
    ReleasedOut,
    StatsOut,
)

router = APIRouter(prefix="/v1", tags=["looking"])
admin = APIRouter(prefix="/v1/admin", tags=["admin"])

MOST: Final = 1000
KEY: Final = "[0-3][0-9a-f]{65}"
ROW_ID: Final = "[0-9a-f]+"
KeyInPath = Annotated[str, Path(pattern=f"^{KEY}$", description="as in a receipt")]
Limit = Annotated[int, Query(ge=1, le=MOST)]
Cursor = Annotated[str, Query(max_length=200, description="next_cursor of the page before")]


@router.get(STATUS_PATH.removeprefix("/v1"), summary="How far a 202 is", responses=answers(InProgress, 200, 202))
async def get_status(
    request: Request,
    key: Annotated[str, Query(max_length=255)],
    method: Annotated[str, Query(max_length=10)],
    route: Annotated[str, Query(max_length=500)],
) -> Response:
    """202 while the operation is being executed, then its answer. The address is the Location of a 202.

    It needs a scope that the operation itself needs.
    """
    if (needed := ROUTES.get((method.upper(), route))) is not None:
        require(request, needed, f"the status of {method.upper()} {route}")
    session, query = session_of(request), request.scope["query_string"].decode("latin-1")
    principal = request.state.caller.principal
    return response_of(await session.contract.status(query, principal, root=request.scope.get("root_path", "")))


@router.get("/receipts/{key}", summary="The state of a key", responses=answers(OutcomeOut))
async def get_receipt(request: Request, key: KeyInPath) -> Response:
    fence = session_of(request).fence
    return read_answer(await looked_up(lambda: _outcome(fence, key)))


@router.get("/decisions", summary="Why each call got what it got", responses=answers(PageOut))
async def get_decisions(
    request: Request,
    since: Annotated[str, Query(max_length=40, description="24h, 7d, or a time")] = "24h",
    until: Annotated[str | None, Query(max_length=40)] = None,
    kind: Annotated[str | None, Query(max_length=100)] = None,
    decision: Literal["new", "duplicate", "conflict", "in_flight", "stale", "ended"] | None = None,
    phase: Annotated[Phase | None, Query(description="a claim and its seal are two rows")] = None,
    source_id: Annotated[str | None, Query(max_length=2000)] = None,
    limit: Limit = 100,
    cursor: Cursor = "",
) -> Response:
    """Decision rows, oldest first. To count answers, leave out the phases claim, release, late_seal and end."""
    fence, after = session_of(request).fence, _cursor(cursor, ROW_ID)

    def page() -> dict[str, Any]:
        import pyarrow.compute as pc

        table = fence.audit.decisions(
            after[0] if after else since, until, kind=kind, decision=decision, phase=phase, source_id=source_id
        )
        table = table.sort_by([("ts", "ascending"), ("row_id", "ascending")])
        if after:  # a page begins in the millisecond in which the previous one ended
            earliest = pc.min(table.column("ts"))
            seen = pc.and_(pc.equal(table.column("ts"), earliest), pc.less_equal(table.column("row_id"), after[1]))
            ended_here = table.num_rows and _ts({"ts": earliest.as_py()}) == after[0]
            table = table.filter(pc.invert(seen)) if ended_here else table
        # Only the rows of this page become Python objects: there may be millions.
        shown = table.slice(0, limit).to_pylist()
        more = _as_cursor(_ts(shown[-1]), shown[-1]["row_id"]) if table.num_rows > limit else None
        return {"items": [_jsonable(row) for row in shown], "next_cursor": more}

    return read_answer(await looked_up(page))


@router.get("/keys", summary="Which keys are held", responses=answers(PageOut))
async def get_keys(
    request: Request,
    kind: Annotated[str | None, Query(max_length=100)] = None,
    state: Literal["held", "released", "quarantined", "sealed", "failed"] | None = None,
    limit: Limit = 100,
    cursor: Cursor = "",
) -> Response:
    """Records of operations other than documents, in the order of their keys."""
    inspector, after = session_of(request).fence.inspector, _cursor(cursor, KEY)
    return read_answer(await looked_up(lambda: _keys(inspector, kind, state, limit, after[1] if after else "")))


@router.get("/stats", summary="Hit rate, sizes, duplicates per endpoint", responses=answers(StatsOut))
async def get_stats(request: Request, since: Annotated[str, Query(max_length=40)] = "24h") -> Response:
    fence = session_of(request).fence
    return read_answer(await looked_up(lambda: _stats(fence, since)))


@admin.post(
    "/keys/{key}:release",
    summary="New attempts for a stuck key",
    openapi_extra=body_schema(Empty, required=False),
    responses=answers(ReleasedOut, 200, write=True),
)
async def post_release(request: Request, key: KeyInPath) -> Response:
    """For a key that is quarantined, stuck, or sealed as a failure."""
    body = await body_of(request)
    checked(body, request, Empty)
    fence = session_of(request).fence

    async def work() -> Answer:
        return json_answer({"key": key, "released": await run_in_turn(fence.release, key)})

    return await execute_write(request, work, body)


@admin.post(
    "/purge-expired",
    summary="Remove what has outlived its lifetime",
    openapi_extra=body_schema(PurgeExpiredIn, required=False),
    responses=answers(PurgedExpiredOut, 200, write=True),
)
async def post_purge_expired(request: Request) -> Response:
    """In bounded batches: call it again with `after` until that is empty."""
    body = await body_of(request)
    given = checked(body, request, PurgeExpiredIn)
    fence = session_of(request).fence

    async def work() -> Answer:
        purged = await run_in_turn(fence.purge_expired, given.limit, after=given.after)
        return json_answer({"records": purged.records, "commits": purged.objects, "after": purged.after})

    return await execute_write(request, work, body)


@admin.post(
    "/purge",
    summary="Remove a document for good",
    openapi_extra=body_schema(PurgeIn),
    responses=answers(PurgedOut, 200, write=True),
)
async def post_purge(request: Request) -> Response:
    """Removes its text, metadata and vectors from everything that ragfence stores; a tombstone stays."""
    body = await body_of(request)
    given = checked(body, request, PurgeIn)
    fence = session_of(request).fence

    async def work() -> Answer:
        report = await run_in_turn(fence.documents.purge, given.doc_id)
        return json_answer({"doc_id": report.doc_id, "found": report.known, "report": asdict(report)})

    return await execute_write(request, work, body)


def _outcome(fence: Fence, key: str) -> dict[str, Any]:
    try:
        operation = fence.audit.operation_of(key_from_text(key))
    except ValidationError as unknown:
        raise RequestRefused(
            refusal("VALIDATION.not_found", f"the key {key} is unknown", hint=unknown.hint)
        ) from unknown
    record = fence.inspector.key_state(key_from_text(key), operation).record
    if record is None:
        raise RequestRefused(
            refusal("VALIDATION.not_found", f"no record is stored for {key}", hint="it may have expired")
        )
    ids = snippet_texts(ids_in(record.result)) if operation.kind == "document" and record.ended else ()
    return {
        "key": key,
        "kind": operation.kind,
        "source_id": operation.source_id,
        "state": record.state.name.lower(),
        "attempt": record.attempt,
        "effect_id": record.effect_id or None,
        "snippet_ids": list(ids),
        "first_seen": moment(record.first_seen_ms),
        "sealed_at": moment(record.when_ms) if record.ended else None,
    }


def _keys(inspector: Inspector, kind: str | None, state: str | None, limit: int, after: str) -> dict[str, Any]:
    def found() -> Iterator[dict[str, Any]]:
        # One shard at a time, because a store has no order of its own: memory is bounded by the largest shard.
        for shard in range(int(after[:2], 16) if after else 0, SHARDS):
            for each in sorted(inspector.records(shard), key=lambda each: each.key):
                record, key = each.record, each.key.hex()
                shown = State(record.state).name.lower()
                if key > after and (kind is None or record.kind == kind) and (state is None or shown == state):
                    yield {
                        "key": key,
                        "kind": record.kind,
                        "state": shown,
                        "attempt": record.attempt,
                        "error_code": record.error or None,
                        "first_seen": moment(record.first_seen_ms),
                        "expires_at": moment(each.expires_ms),
                    }

    items: list[dict[str, Any]] = []
    for item in found():
        if len(items) == limit:
            return {"items": items, "next_cursor": _as_cursor(0, items[-1]["key"])}
        items.append(item)
    return {"items": items, "next_cursor": None}


def _stats(fence: Fence, since: str) -> dict[str, Any]:
    counted = fence.stats(since)
    return {
        "tenant": counted.tenant,
        "since": counted.since,
        "documents": counted.documents,
        "records": [asdict(each) for each in counted.records],
        "keys": counted.keys,
        "pending": counted.pending,
        "quarantined": counted.quarantined,
        "average_ttl_s": counted.average_ttl_s,
        "rows": counted.rows,
        "processed": counted.processed,
        "duplicates": counted.duplicates,
        "decisions": dict(counted.decisions),
        "hit_rate": counted.hit_rate,
        "endpoints": [{"route": each.route, "kind": each.kind, **each.decisions} for each in counted.endpoints],
    }


def _ts(row: dict[str, Any]) -> str:
    text: str = row["ts"].isoformat(timespec="milliseconds")
    return text


def _jsonable(row: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.isoformat(timespec="milliseconds") if hasattr(value, "isoformat") else value
        for name, value in row.items()
    }


def _as_cursor(moment: object, last: str) -> str:
    return base64.urlsafe_b64encode(f"{moment} {last}".encode()).decode().rstrip("=")


def _cursor(text: str, pattern: str) -> tuple[str, str] | None:
    """`pattern` matches the last item of a page."""
    if not text:
        return None
    try:
        padded = text + "=" * (-len(text) % 4)
        moment, _, last = base64.b64decode(padded, altchars=b"-_", validate=True).decode().partition(" ")
    except (binascii.Error, ValueError):
        moment = last = ""
    if not moment or re.fullmatch(pattern, last) is None:
        raise RequestRefused(
            refusal("VALIDATION.parameter", "cursor is none that this server gave", hint="leave it out")
        )
    return moment, last
