"""What all routes of the ingestion API share: the request as a `Call`, its checked body, and its answer."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from ragfence.core.canonical import parse_json
from ragfence.errors import RagfenceError
from ragfence.server.apikeys import ApiCaller
from ragfence.server.fair_shares import LARGE_BODY, run_in_turn, run_large
from ragfence.server.scopes import KeyScope, missing_scope
from ragfence.wire.messages import Answer, Call, headers_from
from ragfence.wire.problems import MEDIA_TYPE, RequestRefused, problem_of, refusal
from ragfence.wire.schemas import InProgress, ProblemOut
from ragfence.wire.validation import Body, validated

if TYPE_CHECKING:
    from ragfence.server.replay import Write
    from ragfence.server.tenant_pool import TenantSession

Found = TypeVar("Found")
Work = Callable[[], Awaitable[Answer]]

JSON: Final = "application/json"
PIECE: Final = 32 << 10
"""Bytes of a body that are scanned at a time."""


def session_of(request: Request) -> TenantSession:
    found: TenantSession = request.state.session
    return found


def caller_of(request: Request) -> ApiCaller:
    found: ApiCaller = request.state.caller
    return found


def require(request: Request, needed: frozenset[KeyScope], what: str) -> None:
    """Raises `RequestRefused` unless the key also has one of these scopes."""
    if (problem := missing_scope(caller_of(request).scopes, needed, what)) is not None:
        raise RequestRefused(problem)


async def looked_up(call: Callable[[], Found]) -> Found:
    """Calls a blocking read in a thread."""
    return await run_in_turn(call)


async def off_the_loop(size: int, call: Callable[[], Found]) -> Found:
    """Calls the work on a body of this size: if it is large, in a thread, one at a time for each tenant."""
    return await run_large(call) if size > LARGE_BODY else call()


async def body_of(request: Request) -> bytes:
    try:
        return await request.body()
    except ClientDisconnect:
        raise RequestRefused(
            refusal("VALIDATION.slow_client", "the request ended before its body was complete")
        ) from None


def checked(body: bytes, request: Request, model: type[Body], *, max_values: int | None = None) -> Body:
    """Returns the body as a model. Raises `RequestRefused` before anything is claimed, so a mistake uses up no key.

    `max_values` is for large bodies; without it, large bodies are refused.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise RequestRefused(
            refusal("VALIDATION.media_type", "compressed bodies are not accepted", hint="send the body uncompressed")
        )
    if not body and not media_type:
        given: Any = {}
    elif media_type != JSON:
        raise RequestRefused(refusal("VALIDATION.media_type", f"the body has the type {media_type or '(none)'}"))
    elif max_values is None and len(body) > LARGE_BODY:
        raise RequestRefused(refusal("VALIDATION.body_too_large", f"at most {LARGE_BODY:,} bytes are accepted here"))
    else:
        given = parse_bounded(body, max_values)
    return validated(given, model)


def parse_bounded(body: bytes, max_values: int | None) -> Any:
    """Parses a body of JSON with at most `max_values` values, which are counted before they are parsed."""
    if max_values is not None and _holds_more_values(body, max_values):
        raise RequestRefused(refusal("VALIDATION.body", f"the body contains more than {max_values:,} values"))
    return parse_json(body)


def _holds_more_values(body: bytes, most: int) -> bool:
    """Counts piece by piece, and only until there are too many: a single call over a large body would hold the
    interpreter, and every other tenant would wait for it."""
    if len(body) <= most:  # a value takes at least one byte
        return False
    found, inside, left = 0, False, b""
    for at in range(0, len(body), PIECE):
        # Without escapes every quote begins or ends a string. A string that is cut off continues in the next piece.
        piece = (left + body[at : at + PIECE]).replace(rb"\\", b"")
        left = b"\\" if piece.endswith(b"\\") else b""
        parts = piece.removesuffix(left).replace(rb"\"", b"").split(b'"')
        outside = b"".join(parts[inside::2])
        found += outside.count(b",") + outside.count(b"[") + outside.count(b"{")
        if found > most:
            return True
        inside ^= len(parts) % 2 == 0
    return False


async def execute_write(
    request: Request, work: Work, body: bytes = b"", *, compared: object = None, kept: object = None
) -> Response:
    """Executes a write once for its key, and answers it as the contract says.

    Args:
        request: The request.
        work: Executes it.
        body: Its body.
        compared: What is compared with a later request of the same key, instead of the body.
        kept: The part of `compared` that may be stored, if not all of it.
    """
    write: Write = request.state.write
    call = call_of(request, body, compared=compared, kept=kept)
    return response_of(await write.answer(call, lambda: _outcome(work)))


def call_of(request: Request, body: bytes = b"", *, compared: object = None, kept: object = None) -> Call:
    scope = request.scope
    return Call(
        method=request.method,
        path=scope["path"],
        route=scope["route"].path,
        query=scope["query_string"].decode("latin-1"),
        headers=headers_from(scope["headers"]),
        body=body,
        root=scope.get("root_path", ""),
        compared=compared,
        kept=kept,
    )


async def _outcome(work: Work) -> Answer:
    """Turns errors into answers; `is_stored` decides which of them are stored as the outcome."""
    try:
        return await work()
    except RagfenceError as error:
        return replace(problem_of(error).answer(), error=error)
    except RequestRefused as refused:
        return refused.problem.answer()


class AnswerResponse(Response):
    """An `Answer` for Starlette; its headers are complete."""

    def __init__(self, answer: Answer) -> None:
        self.status_code = answer.status
        self.body = answer.body
        self.background = None
        self.raw_headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in answer.headers]


def response_of(answer: Answer) -> Response:
    return AnswerResponse(answer)


def json_answer(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
    body = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    own = {"content-type": JSON, "content-length": str(len(body))}
    return Answer(status, tuple((own | dict(headers or {})).items()), body)


def read_answer(value: Any, headers: Mapping[str, str] | None = None) -> Response:
    """Returns the answer to a read: only for now, and for one tenant."""
    return response_of(json_answer(value, headers={"cache-control": "no-store"} | dict(headers or {})))


def moment(milliseconds: int | None) -> str | None:
    if not milliseconds:
        return None
    return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec="milliseconds")


def body_schema(model: type[BaseModel], *, required: bool = True, media_type: str = JSON) -> dict[str, Any]:
    """Returns `openapi_extra` for a body: the routes parse bodies themselves, more strictly than FastAPI."""
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    parameters = [
        {
            "name": "Idempotency-Key",
            "in": "header",
            "required": True,
            "description": "one per operation, the same in every retry; at most 255 printable ASCII characters",
            "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[!#-+\\--~]+$"},
            "example": "8e03978e-40d5-43dd-bc93-6894a57f9324",
        },
        {
            "name": "X-Request-Timeout",
            "in": "header",
            "required": False,
            "description": "for how many seconds the client will wait",
            "schema": {"type": "string", "pattern": "^[1-9][0-9]{0,2}$"},
        },
    ]
    examples = model.model_config.get("json_schema_extra")
    sample = examples.get("examples", [{}]) if isinstance(examples, dict) else [{}]
    content: dict[str, Any] = {"schema": schema if media_type == JSON else {"type": "string"}}
    if isinstance(sample, list):
        content["example"] = sample[0] if media_type == JSON else f"{json.dumps(sample[0])}\n"
    return {"parameters": parameters, "requestBody": {"required": required, "content": {media_type: content}}}


def answers(
    model: type[BaseModel], *statuses: int, write: bool = False, **more: type[BaseModel]
) -> dict[int | str, Any]:
    """Returns `responses` for a route: every status that it may answer with."""
    given: dict[int | str, Any] = {status: {"model": model} for status in statuses or (200,)}
    problems = [400, 401, 403, 404, 422, 429, 500, 501, 503]
    if write:
        given[202] = {"model": InProgress, "description": "in progress; the outcome will be at Location"}
        problems += [408, 409, 410, 412, 413, 415, 504]
    for status in problems:
        given[status] = {
            "description": "problem",
            "content": {MEDIA_TYPE: {"schema": {"$ref": f"#/components/schemas/{ProblemOut.__name__}"}}},
        }
    return given
