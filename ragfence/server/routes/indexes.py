"""The routes of indexes: built, named by aliases, searched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import Response

from ragfence.core.aliases import UNSET
from ragfence.indexes.aliases import Swap
from ragfence.indexes.build_log import BuildEntry
from ragfence.indexes.catalog import CatalogEntry
from ragfence.indexes.search import MAX_TEXT
from ragfence.indexes.spec import IndexSpec
from ragfence.server.dependencies import (
    answers,
    body_of,
    body_schema,
    call_of,
    caller_of,
    checked,
    execute_write,
    json_answer,
    looked_up,
    moment,
    read_answer,
    require,
    session_of,
)
from ragfence.server.fair_shares import run_in_turn
from ragfence.server.scopes import KeyScope
from ragfence.wire.messages import Answer
from ragfence.wire.problems import RequestRefused, refusal
from ragfence.wire.schemas import ALIAS_PATTERN, AliasOut, BuildIn, BuildOut, Hits, Items, RollbackIn, SwapIn

router = APIRouter(prefix="/v1", tags=["indexes"])

HashInPath = Annotated[str, Path(pattern="^[0-9a-f]{64}$")]
AliasInPath = Annotated[str, Path(pattern=ALIAS_PATTERN)]


@router.post(
    "/builds",
    summary="Build an index",
    openapi_extra=body_schema(BuildIn, required=False),
    responses=answers(BuildOut, 200, 201, write=True),
)
async def post_build(request: Request) -> Response:
    """Of all live documents, once per INDEX_HASH: a repeated call gets the sealed build. 202 if it takes long."""
    body = await body_of(request)
    given = checked(body, request, BuildIn)
    session = session_of(request)
    rules = session.fence.policy.http
    _check_allowed("backend", given.backend, rules.backends)
    _check_allowed("embedder", given.embedder, rules.embedders)
    spec = IndexSpec(given.embedder, given.backend, given.metric, given.index, given.parameters)

    tenant, pool = caller_of(request).tenant, request.app.state.builds
    place = pool.reserve(tenant)
    if place is None and not request.state.write.is_claimed:
        # A replay, or a request for a build in progress, needs no further place.
        known = await session.contract.is_known(call_of(request, body), caller_of(request).principal)
        if not known:
            raise pool.refusal()

    async def work() -> Answer:
        own = place if place is not None and not place.has_ended else pool.reserve(tenant)
        if own is None:
            raise pool.refusal()
        own.is_running = True
        try:
            build = await pool.run(session.fence.indexes.build, spec)
        finally:
            own.end()
        entry = await looked_up(lambda: session.fence.indexes.get(build.index_hash))
        assert entry is not None
        values = built(build.index_hash, entry) | {"decision": build.decision.value}
        return json_answer(values, 201 if build.receipt.is_new else 200, {"location": f"/v1/builds/{build.index_hash}"})

    try:
        return await execute_write(request, work, body)
    finally:
        if place is not None and not place.is_running:
            place.end()


@router.get("/builds", summary="List the builds", responses=answers(Items))
async def get_builds(request: Request) -> Response:
    indexes = session_of(request).fence.indexes
    found = await looked_up(lambda: list(indexes.builds()))
    return read_answer(
        {"items": [built(each.index_hash, each.entry) | {"aliases": list(each.aliases)} for each in found]}
    )


@router.get("/builds/{index_hash}", summary="Read a build", responses=answers(BuildOut))
async def get_build(request: Request, index_hash: HashInPath) -> Response:
    indexes = session_of(request).fence.indexes
    entry = await looked_up(lambda: indexes.get(index_hash))
    if entry is None:
        raise RequestRefused(refusal("VALIDATION.not_found", f"there is no build {index_hash}"))
    return read_answer(built(index_hash, entry))


@router.post(
    "/aliases/{alias}:swap",
    summary="Point an alias at a sealed build",
    openapi_extra=body_schema(SwapIn),
    responses=answers(AliasOut, 200, write=True),
)
async def post_swap(request: Request, alias: AliasInPath) -> Response:
    """Only at a build that is sealed, and only past the gates. `force` passes a failed gate: it needs the scope `admin`
    as well, and a reason, and is recorded."""
    body = await body_of(request)
    given = checked(body, request, SwapIn)
    if given.force:
        require(request, frozenset({KeyScope.ADMIN}), "`force`")
    aliases = session_of(request).fence.aliases
    expect = given.expect if "expect" in given.model_fields_set else UNSET
    return await _moved(
        request,
        body,
        lambda: aliases.swap(
            alias,
            given.index_hash,
            expect=expect,
            force=given.force,
            reason=given.reason,
            actor=caller_of(request).principal,
        ),
    )


@router.post(
    "/aliases/{alias}:rollback",
    summary="Point an alias at the build it had before",
    openapi_extra=body_schema(RollbackIn, required=False),
    responses=answers(AliasOut, 200, write=True),
)
async def post_rollback(request: Request, alias: AliasInPath) -> Response:
    body = await body_of(request)
    given = checked(body, request, RollbackIn)
    aliases = session_of(request).fence.aliases
    expect = given.expect if "expect" in given.model_fields_set else UNSET
    return await _moved(
        request,
        body,
        lambda: aliases.rollback(
            alias, to=given.to, expect=expect, reason=given.reason, actor=caller_of(request).principal
        ),
    )


@router.get("/aliases", summary="List the aliases", responses=answers(Items))
async def get_aliases(request: Request) -> Response:
    aliases = session_of(request).fence.aliases
    head = await looked_up(aliases.head)
    return read_answer(
        {
            "items": [
                {"alias": name, "index_hash": held.target.index_hash, "generation": head.number}
                for name, held in sorted(head.state.aliases.items())
            ]
        }
    )


@router.get("/aliases/{alias}", summary="Read an alias", responses=answers(AliasOut))
async def get_alias(request: Request, alias: AliasInPath) -> Response:
    aliases = session_of(request).fence.aliases

    def resolved() -> dict[str, Any]:
        head = aliases.head()
        return {"alias": alias, "index_hash": aliases.resolve(alias).index_hash, "generation": head.number}

    return read_answer(await looked_up(resolved))


@router.get("/aliases/{alias}/history", summary="What an alias has pointed at", responses=answers(Items))
async def get_history(
    request: Request, alias: AliasInPath, limit: Annotated[int, Query(ge=1, le=1000)] = 100
) -> Response:
    aliases = session_of(request).fence.aliases
    entries = await looked_up(lambda: aliases.history(alias, limit))
    return read_answer({"items": [_entry(each) for each in entries]})


@router.get("/search", summary="Search an alias", responses=answers(Hits))
async def get_search(
    request: Request,
    alias: Annotated[str, Query(pattern=ALIAS_PATTERN)],
    q: Annotated[str, Query(min_length=1, max_length=MAX_TEXT)],
    k: Annotated[int, Query(ge=1, le=1000)] = 5,
) -> Response:
    """The k nearest snippets, the nearest first, ready to be cited; all of one sealed build."""
    fence = session_of(request).fence
    hits = await looked_up(lambda: fence.search(alias, q, k=k))
    return read_answer({"alias": alias, "hits": [asdict(hit) for hit in hits]})


def built(index_hash: str, entry: BuildEntry) -> dict[str, Any]:
    values: dict[str, Any] = {"index_hash": index_hash, "state": entry.kind, "at": moment(entry.at_ms)}
    if (seal := entry.seal) is not None:
        values |= {
            "rows": seal.rows,
            "documents": seal.documents,
            "dimension": seal.dimension,
            "content_digest": seal.content_digest,
            "corpus_digest": seal.corpus_digest,
            "inputs": seal.inputs,
        }
    return values


async def _moved(request: Request, body: bytes, move: Callable[[], Swap]) -> Response:
    async def work() -> Answer:
        swap = await run_in_turn(move)
        return json_answer(
            {
                "alias": swap.alias,
                "index_hash": swap.index_hash,
                "generation": swap.generation,
                "previous": swap.previous.index_hash if swap.previous else None,
                "changed": swap.changed,
                "forced": swap.forced,
                "gates": [asdict(gate) for gate in swap.gates],
            }
        )

    return await execute_write(request, work, body)


def _entry(each: CatalogEntry) -> dict[str, Any]:
    return {
        "generation": each.number,
        "change": each.change,
        "at": moment(each.at_ms),
        "alias": each.alias,
        "index_hash": each.target.index_hash if each.target else None,
        "previous": each.previous.index_hash if each.previous else None,
        "actor": each.actor,
        "reason": each.reason,
        "forced": each.forced,
        "gates": [dict(gate) for gate in each.gates],
    }


def _check_allowed(what: str, given: str, allowed: tuple[str, ...]) -> None:
    if given not in allowed:
        raise RequestRefused(
            refusal(
                "VALIDATION.body",
                f"this server builds with the {what}s {', '.join(allowed)}, not with {given!r}",
                hint=f"the operator of the server may allow it: http.{what}s in its policy",
            )
        )
