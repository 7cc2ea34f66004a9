"""Routes for webhooks: a delivery is verified, and its events are handled or put into the inbox.

`WebhookGate` has found the webhook of the request and bounded it; without one there is nothing at these addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse, Response

from ragfence.engine.aio import run_blocking
from ragfence.errors import RagfenceError, WebhookUnverified
from ragfence.server.dependencies import answers, json_answer, off_the_loop, response_of, session_of
from ragfence.server.fair_shares import run_in_turn
from ragfence.server.load_shedding import EXCHANGE, BoundedExchange
from ragfence.server.webhooks import HOOK, WebhookGate, too_long
from ragfence.webhooks.hooks import RETRY_AFTER_S, EventResult, WebhookReply, Webhooks
from ragfence.webhooks.policy_hooks import PolicyHook
from ragfence.wire.messages import first_of, headers_from
from ragfence.wire.problems import MEDIA_TYPE, Problem, RequestRefused, problem_of, refusal
from ragfence.wire.schemas import ProblemOut, WebhookAccepted, WebhookOut

router = APIRouter(prefix="/webhooks", tags=["webhooks"])

HookName = Annotated[str, Path(min_length=1, max_length=64, description="the name of the webhook in the policy")]

_PROBLEM: dict[str, Any] = {
    "description": "problem",
    "content": {MEDIA_TYPE: {"schema": {"$ref": f"#/components/schemas/{ProblemOut.__name__}"}}},
}
_ANSWERS: dict[int | str, Any] = answers(WebhookOut, 200, write=True) | {
    202: {"model": WebhookAccepted, "description": "in the inbox; a worker handles it"}
}
_DELIVERY: dict[str, Any] = {
    "security": [],
    "requestBody": {
        "required": True,
        "description": "what the provider sends, with its signature in the headers; its raw bytes are verified",
        "content": {
            "application/json": {
                "schema": {"type": "object"},
                "example": {"type": "page.updated", "page": {"id": "handbook/leave", "version": 3, "body": "Hello."}},
            }
        },
    },
}
_TEXT: dict[int | str, Any] = {200: {"description": "the challenge", "content": {"text/plain": {}}}}


@router.post("/{name}", summary="Receive a webhook", responses=_ANSWERS, openapi_extra=_DELIVERY)
async def receive(request: Request, name: HookName) -> Response:
    """Signed by the provider, without an API key. Each event is handled once: sent again, it gets the first receipt.

    503 while the same event is being handled: the provider sends it again later.
    """
    hook, gate = _hook(request), _gate(request)
    hooks = await _bound(request, hook, gate)
    body = await _body(request, hook)
    headers = headers_from(request.scope["headers"])
    try:
        events = await off_the_loop(len(body), lambda: hooks.read(hook.name, headers, body))
    except WebhookUnverified:
        gate.reject(hook, request.scope.get("client"))
        raise
    gate.accept(hook, request.scope.get("client"))
    assert events is not None
    spent = await request.app.state.quotas.spend(hook.tenant, max(1, len(events)))
    if spent.refused is not None:
        return response_of(spent.refused)
    correlation_id = first_of(headers, "x-correlation-id") or first_of(headers, "x-request-id")
    dispatched = await hooks.dispatch(hook.name, events, correlation_id=_printable(correlation_id))
    _count(request, hook, dispatched.reply, dispatched.results)
    return _response(dispatched.reply, dispatched.results)


@router.get(
    "/{name}",
    summary="Answer the challenge of a provider",
    responses={status: answer for status, answer in answers(WebhookOut).items() if status != 200} | _TEXT,
    response_class=PlainTextResponse,
    openapi_extra={"security": []},
)
async def challenge(request: Request, name: HookName) -> Response:
    """Meta (WhatsApp) checks the address by a GET with the verify token; other providers send none."""
    hook, gate = _hook(request), _gate(request)
    try:
        return PlainTextResponse(hook.provider.challenge(request.query_params))
    except WebhookUnverified as error:
        gate.reject(hook, request.scope.get("client"))
        return response_of(problem_of(error, status=403).answer())


def _hook(request: Request) -> PolicyHook:
    hook: PolicyHook | None = getattr(request.state, HOOK, None)
    if hook is None:  # a caller with an API key, at the address of a webhook that the policy does not name
        raise RequestRefused(refusal("VALIDATION.not_found"))
    return hook


def _gate(request: Request) -> WebhookGate:
    gate: WebhookGate = request.app.state.webhooks
    return gate


async def _bound(request: Request, hook: PolicyHook, gate: WebhookGate) -> Webhooks:
    session = session_of(request)
    inbox = await run_blocking(gate.inboxes.of, hook.inbox_url) if hook.inbox_url else None
    return hook.bind(session.fence, content_key=session.contract.content_key(), inbox=inbox, run=run_in_turn)


async def _body(request: Request, hook: PolicyHook) -> bytes:
    exchange: BoundedExchange = request.scope["state"][EXCHANGE]
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > hook.rules.max_body_bytes:
                problem = too_long(hook)
                exchange.refuse(problem)  # closes the connection after a client that is still sending has seen it
                raise RequestRefused(problem)
    except ClientDisconnect:
        raise RequestRefused(
            refusal("VALIDATION.slow_client", "the delivery ended before its body was complete")
        ) from None
    return bytes(body)


def _response(reply: WebhookReply, results: Sequence[EventResult]) -> Response:
    if reply.status < 300:
        return response_of(json_answer(reply.body, reply.status, {"cache-control": "no-store"}))
    return response_of(_problem(reply, results).answer())


def _problem(reply: WebhookReply, results: Sequence[EventResult]) -> Problem:
    """The problem of the event that decided the status, with the results of all of them."""
    events = [result.as_json() for result in results] or None
    worst = next((result for result in results if result.status == reply.status), None)
    retry_after = RETRY_AFTER_S if reply.status == 503 else None
    error = worst.error if worst is not None else None
    if isinstance(error, RagfenceError):
        return problem_of(error, status=reply.status, events=events, retry_after=retry_after)
    body = reply.body if isinstance(reply.body, dict) else {}
    if worst is not None and reply.status == 409:
        result = worst.receipt.result if worst.receipt is not None else {}
        body = {"code": "CONFLICT.idempotency.payload_mismatch", **(result if isinstance(result, dict) else {})}
    return Problem(
        status=reply.status,
        code=str(body.get("code", "TRANSIENT.unexpected")),
        title="The event was not applied",
        retryable=reply.status >= 500,
        detail=str(body.get("detail", "")),
        hint=str(body.get("hint", "")),
        extras={"events": events, "diff": body.get("diff"), "retry_after": retry_after},
    )


def _count(request: Request, hook: PolicyHook, reply: WebhookReply, results: Sequence[EventResult]) -> None:
    count = request.app.state.count_webhook
    if not results:
        count(hook.tenant, hook.name, "accepted" if reply.status == 202 else "refused")
    for result in results:
        count(hook.tenant, hook.name, result.decision)


def _printable(text: str) -> str:
    return text if len(text) <= 255 and text.isascii() and text.isprintable() else ""
