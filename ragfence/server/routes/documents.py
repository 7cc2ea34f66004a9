"""The routes of documents: sent, replaced, taken away, read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any, Final, NamedTuple
from urllib.parse import quote

from fastapi import APIRouter, Path, Query, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse

from ragfence.core.canonical import canonical_json
from ragfence.core.document import CheckedDocument, Document, DocumentLimits
from ragfence.core.document import checked as checked_document
from ragfence.core.hashing import ContentKey, digest_part
from ragfence.core.layout import ids_in
from ragfence.core.operations import SEQUENCE_MAX, SEQUENCE_MIN, checked_text
from ragfence.core.receipts import Decision, Flags, Receipt, default_effect_id
from ragfence.core.redaction import REDACTED, Redaction
from ragfence.documents.claims import ANY, Expected
from ragfence.documents.identity import snippet_texts
from ragfence.documents.log import RETRACT
from ragfence.documents.reads import StoredDocument
from ragfence.engine.leases import innermost_lease
from ragfence.fence import Fence
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
    off_the_loop,
    read_answer,
    response_of,
    session_of,
)
from ragfence.server.fair_shares import UnfinishedBatch, run_in_turn
from ragfence.server.load_shedding import EXCHANGE, BoundedExchange
from ragfence.server.ndjson_batch import NDJSON, read_body
from ragfence.server.tenant_pool import TenantSession
from ragfence.wire.messages import Answer
from ragfence.wire.problems import RequestRefused, refusal
from ragfence.wire.schemas import (
    MAX_ID_CHARACTERS,
    DocumentBody,
    DocumentIn,
    DocumentOut,
    Empty,
    ReceiptOut,
    receipt_out,
)

router = APIRouter(prefix="/v1", tags=["documents"])

DocIdInPath = Annotated[str, Path(min_length=1, max_length=MAX_ID_CHARACTERS, description="may hold slashes")]
_ETAG: Final = re.compile(r'[ \t,]*+(?:(W/)?"([!#-~\x80-\xff]*+)"[ \t]*+(?=,|$)|$)')
"""The next ETag of a list (RFC 9110, 8.8.3 and 5.6.1), or the end of the list."""

IF_MATCH: Final = {
    "name": "If-Match",
    "in": "header",
    "required": False,
    "description": "the ETag that the document must have, one of several, or * for any; 412 if it has another",
    "schema": {"type": "string"},
}
IF_NONE_MATCH: Final = {
    "name": "If-None-Match",
    "in": "header",
    "required": False,
    "description": "the ETags that the caller has, or * for any: 304 if the document has one of them",
    "schema": {"type": "string"},
}


@router.post(
    "/documents",
    summary="Ingest a document",
    openapi_extra=body_schema(DocumentIn),
    responses=answers(ReceiptOut, 200, 201, write=True),
)
async def post_document(request: Request) -> Response:
    """Once per doc_id and content: sent again, under any key, it gets the same snippet_ids."""
    body = await body_of(request)
    return await _ingested(request, None, body, None)


@router.post(
    "/documents:batch",
    summary="Ingest many documents",
    openapi_extra=body_schema(DocumentIn, media_type=NDJSON),
    responses=answers(ReceiptOut, write=True)
    | {200: {"description": "one outcome per line, then a last line", "content": {NDJSON: {}}}},
)
async def post_batch(request: Request) -> Response:
    """NDJSON in, one document per line; NDJSON out, one outcome per line, in their order, and `{"done": true}` last.

    An answer without its last line was cut off: send the batch again with the same key.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != NDJSON or request.headers.get("content-encoding", "identity").lower() != "identity":
        raise RequestRefused(refusal("VALIDATION.media_type", f"a batch is {NDJSON}", hint=f"Content-Type: {NDJSON}"))
    session = session_of(request)
    try:
        unfinished = UnfinishedBatch(request.app.state.unfinished_bytes, caller_of(request).tenant)
        body = await read_body(request.stream(), session.fence.policy.http, unfinished)
    except RequestRefused as refused:
        exchange: BoundedExchange = request.scope["state"][EXCHANGE]
        exchange.refuse(refused.problem)  # closes the connection after a client that is still sending has seen it
        raise
    except ClientDisconnect:
        raise RequestRefused(refusal("VALIDATION.slow_client", "the batch ended before it was complete")) from None
    # The request itself was counted before its lines were known.
    spent = await request.app.state.quotas.spend(caller_of(request).tenant, body.lines - 1, paid=1)
    if spent.refused is not None:
        return response_of(spent.refused)
    answer = await session.batches.answer(call_of(request), caller_of(request).principal, body)
    if isinstance(answer, Answer):
        return response_of(answer)
    streamed = StreamingResponse(answer.pieces, answer.status)
    streamed.raw_headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in answer.headers]
    return streamed


@router.put(
    "/documents/{doc_id:path}",
    summary="Ingest a document at its address",
    openapi_extra=body_schema(DocumentBody) | {"parameters": [*body_schema(DocumentBody)["parameters"], IF_MATCH]},
    responses=answers(ReceiptOut, 200, 201, write=True),
)
async def put_document(request: Request, doc_id: DocIdInPath) -> Response:
    """Like POST; with If-Match only if the document still has that ETag (`*`: if there is one), with `If-None-Match: *`
    only if it is new."""
    body = await body_of(request)
    return await _ingested(request, doc_id, body, expected(request))


@router.delete(
    "/documents/{doc_id:path}",
    summary="Retract a document",
    openapi_extra={"parameters": [*body_schema(Empty)["parameters"], IF_MATCH]},
    responses=answers(ReceiptOut, 200, write=True),
)
async def delete_document(
    request: Request,
    doc_id: DocIdInPath,
    sequence: Annotated[int | None, Query(ge=SEQUENCE_MIN, le=SEQUENCE_MAX)] = None,
) -> Response:
    """Its text stays stored until it is compacted or purged; the same content revives it with its snippet_ids."""
    body = await body_of(request)
    if body:
        raise RequestRefused(refusal("VALIDATION.body", "a DELETE has no body"))
    session, expect = session_of(request), expected(request)
    checked_document(Document(doc_id, ""), DocumentLimits(allow_empty_text=True))  # of the id; there is no text

    async def work() -> Answer:
        event_id, receipt = await _earlier(session.fence, doc_id)
        if receipt is None:
            receipt = await run_in_turn(
                session.fence.documents.retract, doc_id, sequence=sequence, expect=expect, event_id=event_id
            )
        return json_answer(receipt_out(receipt, doc_id) | {"etag": None})

    return await execute_write(request, work)


@router.get(
    "/documents/{doc_id:path}",
    summary="Read a document",
    openapi_extra={"parameters": [IF_NONE_MATCH]},
    responses=answers(DocumentOut) | {304: {"description": "it still has the ETag of If-None-Match"}},
)
async def get_document(request: Request, doc_id: DocIdInPath, snippets: bool = False) -> Response:
    """The description of the live revision; with `snippets=true` also its snippets with text and positions."""
    documents = session_of(request).fence.documents
    found = await looked_up(lambda: documents.get(doc_id))
    if found is None:
        raise RequestRefused(
            refusal("VALIDATION.not_found", f"there is no document {doc_id!r}", hint="it may be retracted")
        )
    etag = f'"{found.fence}"'
    if _is_known(request, found.fence):
        return response_of(Answer(304, (("etag", etag),)))
    values = described(found)
    if snippets:
        values["snippets"] = [asdict(each) for each in await looked_up(lambda: documents.snippets(doc_id))]
    return read_answer(values, {"etag": etag})


def _is_known(request: Request, version: str) -> bool:
    """Returns whether If-None-Match names the version, by weak comparison (RFC 9110, 13.1.2)."""
    given = ",".join(request.headers.getlist("if-none-match"))
    return given.strip() == ANY or any(tag == version for _, tag in _etags(given) or ())


def _etags(given: str) -> list[tuple[bool, str]] | None:
    """Returns (is weak, text in quotes) of each ETag; None if the text is not a list of ETags."""
    found: list[tuple[bool, str]] = []
    at = 0
    while (tag := _ETAG.match(given, at)) is not None:
        if tag[2] is None:
            return found or None
        found.append((tag[1] is not None, tag[2]))
        at = tag.end()
    return None


def described(found: StoredDocument) -> dict[str, Any]:
    values = asdict(found)
    values["updated"], values["etag"] = moment(values.pop("updated_ms")), values.pop("fence")
    return values


def expected(request: Request) -> Expected | None:
    """Returns the version, or versions, that the request expects; None for any.

    A weak ETag never matches, and no other server's does (RFC 9110, 13.1.1).
    """
    given, none_match = request.headers.getlist("if-match"), request.headers.get("if-none-match")
    match = ",".join(given) if given else None
    if none_match is not None:
        if none_match.strip() != "*" or match is not None:
            raise RequestRefused(refusal("VALIDATION.header", "If-None-Match may only be *, and without If-Match"))
        return ""
    if match is None:
        return None
    if match.strip() == ANY:
        return ANY
    if (tags := _etags(match)) is None:
        raise RequestRefused(
            refusal("VALIDATION.header", "If-Match is not a list of ETags", hint='"12.34", in quotes, or *')
        )
    return frozenset(tag for weak, tag in tags if not weak)


class _Prepared(NamedTuple):
    doc_id: str
    document: CheckedDocument
    compared: dict[str, Any]
    kept: dict[str, Any]


def _prepare(request: Request, session: TenantSession, doc_id: str | None, body: bytes) -> _Prepared:
    """Returns the document in a body; its id is in the body or in the address."""
    max_values = session.fence.policy.documents.max_metadata_bytes  # a value takes at least one byte
    if doc_id is None:
        given = checked(body, request, DocumentIn, max_values=max_values)
        document = given.document(given.doc_id)
    else:
        document = checked(body, request, DocumentBody, max_values=max_values).document(doc_id)
    stored = session.fence.documents.check(document)
    key = session.contract.content_key()
    compared = _compared(document, key)
    return _Prepared(document.doc_id, stored, compared, compared | _kept(document, session.fence.policy.redactor, key))


async def _ingested(request: Request, doc_id: str | None, body: bytes, expect: Expected | None) -> Response:
    session = session_of(request)
    given_id, document, compared, kept = await off_the_loop(len(body), lambda: _prepare(request, session, doc_id, body))

    async def work() -> Answer:
        event_id, receipt = await _earlier(session.fence, given_id)
        if receipt is None and expect is None:
            receipt = await session.grouping.ingest(document, event_id=event_id)
        elif receipt is None:
            receipt = await run_in_turn(session.fence.documents.ingest, document, expect=expect, event_id=event_id)
        return receipt_answer(receipt, given_id)

    return await execute_write(request, work, body, compared=compared, kept=kept)


async def _earlier(fence: Fence, doc_id: str) -> tuple[str, Receipt | None]:
    """Returns the event id of this request, and the receipt of an earlier attempt that was interrupted.

    The document may have changed since that attempt: moving it again would be a second effect of the same key.
    """
    lease = innermost_lease()
    if lease is None:  # the policy allows requests without a key
        return "", None
    if not lease.may_have_happened:
        return lease.key, None
    return lease.key, await looked_up(lambda: _moved_to(fence, doc_id, lease.key))


def _moved_to(fence: Fence, doc_id: str, event_id: str) -> Receipt | None:
    row = fence.audit.find_cause(checked_text("doc_id", doc_id), event_id)
    if row is None:
        return None
    ids = b""
    if json.loads(row.context).get("action") != RETRACT:
        record = fence.inspector.key_state(row.key, fence.audit.operation_of(row.key)).record
        if record is None or not record.ended:  # compacted or purged since, so it is new again
            return None
        ids = ids_in(record.result)
    return Receipt(
        row.key.hex(),
        default_effect_id(row.key),
        snippet_texts(ids),
        decision=Decision.DUPLICATE,
        flags=Flags(attempt=row.attempt, healed=True),
        fence=str(row.fence),
        first_seen_ms=row.first_seen_ms,
        sealed_at_ms=row.sealed_at_ms,
    )


def _compared(document: Document, key: ContentKey | None) -> dict[str, Any]:
    """Returns what a second request with the same key must have: text and metadata as digests.

    Most of it is stored with the key, to show what differs, and no text may remain of a document that is purged.
    """
    return {
        "doc_id": document.doc_id,
        "text": digest_part(document.text.encode("utf-8", "surrogatepass"), key),
        "metadata": _digests(document.metadata, key),
        "source_url": digest_part(document.source_url.encode("utf-8", "surrogatepass"), key),
        "sequence": document.sequence,
        "content_type": document.content_type,
    }


def _kept(document: Document, redactor: Redaction, key: ContentKey | None) -> dict[str, Any]:
    """Returns what may be stored of parts that can contain secrets: a digest of a secret would confirm a guess."""
    parts: dict[str, Any] = {"metadata": dict(document.metadata), "source_url": document.source_url}
    # In the structure of the request: a rule may name a field by its path.
    clean: Any = redactor.redact({"body": parts})
    if clean["body"] == REDACTED:
        return dict.fromkeys(parts, REDACTED)
    metadata, source_url = (clean["body"][name] for name in parts)
    return {
        "metadata": REDACTED if metadata == REDACTED else _digests(metadata, key),
        "source_url": digest_part(source_url.encode("utf-8", "surrogatepass"), key),
    }


def _digests(values: Mapping[str, Any], key: ContentKey | None) -> dict[str, str]:
    return {name: digest_part(canonical_json(value), key) for name, value in values.items()}


def receipt_answer(receipt: Receipt, doc_id: str) -> Answer:
    location = f"/v1/documents/{quote(doc_id, safe='/')}"
    status = 201 if receipt.is_new else 200
    return json_answer(receipt_out(receipt, doc_id), status, {"etag": f'"{receipt.fence}"', "location": location})
