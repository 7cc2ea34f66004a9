"""Every call of the API, written once: `Client` and `AsyncClient` execute the steps of these functions."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, fields
from functools import cache, partial
from typing import Any, Final, Protocol, TypeVar, cast
from urllib.parse import quote, urlencode

from pydantic import BaseModel
from pydantic import ValidationError as ModelError

from ragfence.client.retry import Accept, CallSettings, Keys, send_with_retries
from ragfence.client.steps import Give, Reply, Result, Send, Steps
from ragfence.core.aliases import UNSET, ExpectedTarget, Hit
from ragfence.core.canonical import canonical_json
from ragfence.core.document import Document, DocumentLimits, StoredSnippet, checked
from ragfence.core.receipts import Decision, Flags, Receipt
from ragfence.errors import ApiRefused, DocumentInvalid, NotJson, Unsupported, ValidationError
from ragfence.wire.schemas import (
    AliasOut,
    BuildOut,
    DocumentOut,
    Hits,
    Items,
    OutcomeOut,
    PageOut,
    PurgedExpiredOut,
    PurgedOut,
    ReleasedOut,
    StatsOut,
)

Model = TypeVar("Model", bound=BaseModel)
Value = TypeVar("Value")

_NO_LIMITS: Final = DocumentLimits(max_text_bytes=2**40, max_metadata_bytes=2**40, allow_empty_text=True)
"""the server decides how large a document may be"""


BUILD_WAIT_S = 3600.0
JSON_TYPE = {"Content-Type": "application/json"}


class BuildSpec(Protocol):
    """What the client sends of a `ragfence.IndexSpec`."""

    @property
    def embedder(self) -> object: ...
    @property
    def backend(self) -> str: ...
    @property
    def metric(self) -> str: ...
    @property
    def index(self) -> str: ...
    @property
    def parameters(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True)
class ClientCalls:
    """A client without its connections."""

    settings: CallSettings
    keys: Keys

    def read(self, path: str, accept: Accept[Result], query: Mapping[str, Any] | None = None) -> Steps[Result]:
        given = {name: _text(value) for name, value in (query or {}).items() if value not in (None, "")}
        url = f"{path}?{urlencode(given)}" if given else path
        return send_with_retries(self.settings, Send("GET", url), accept)

    def write(
        self,
        method: str,
        path: str,
        body: bytes | None,
        accept: Accept[Result],
        *,
        key: str | None,
        headers: Mapping[str, str] | None = None,
        budget_s: float | None = None,
    ) -> Steps[Result]:
        kind = {} if body is None else JSON_TYPE
        own = {**kind, **(headers or {}), **self.keys.header(key, method, path, body)}
        return send_with_retries(self.settings, Send(method, path, own, body), accept, budget_s=budget_s)

    def post(self, path: str, values: Mapping[str, Any], accept: Accept[Result], *, key: str | None) -> Steps[Result]:
        return self.write("POST", path, canonical_json(dict(values)), accept, key=key)


def ingest(core: ClientCalls, document: Document, *, idempotency_key: str | None = None) -> Steps[Receipt]:
    """Ingests one document. If it was ingested before, the receipt has the snippet_ids of the first time.

    >>> client.ingest(ragfence.Document("a", "some text")).decision  # doctest: +SKIP
    """
    _, body = document_json(document)
    return core.write("POST", "/v1/documents", body, receipt_of, key=idempotency_key)


def put(
    core: ClientCalls,
    document: Document,
    *,
    if_match: str | None = None,
    if_absent: bool = False,
    idempotency_key: str | None = None,
) -> Steps[Receipt]:
    """Like `ingest`, but only if the document has not changed meanwhile: otherwise raises `DocumentMoved` (412).

    Args:
        document: The document.
        if_match: The etag that the document must have now: `client.get(doc_id).etag`, or `.fence` of its receipt.
        if_absent: There must be no live document with this id.
        idempotency_key: Default: a new key for this call.

    >>> client.put(changed, if_match=client.get("a").etag)  # doctest: +SKIP
    """
    if if_absent and if_match is not None:
        raise ValidationError("if_match and if_absent exclude each other", hint="pass one of them")
    doc_id, body = document_json(document, with_id=False)
    headers = {"If-None-Match": "*"} if if_absent else _matching(if_match)
    return core.write("PUT", _address(doc_id), body, receipt_of, key=idempotency_key, headers=headers)


def retract(
    core: ClientCalls,
    doc_id: str,
    *,
    sequence: int | None = None,
    if_match: str | None = None,
    idempotency_key: str | None = None,
) -> Steps[Receipt]:
    """Retracts a document. Ingesting the same content again revives it with the same snippet_ids."""
    path = _address(doc_id) + ("" if sequence is None else f"?sequence={sequence:d}")
    return core.write("DELETE", path, None, receipt_of, key=idempotency_key, headers=_matching(if_match))


def get(core: ClientCalls, doc_id: str) -> Steps[DocumentOut | None]:
    """Returns the description of the live revision of a document; None if there is none."""
    return _found(core, doc_id, snippets=False)


def snippets(core: ClientCalls, doc_id: str) -> Steps[list[StoredSnippet]]:
    """Returns the snippets of the live revision, in their order, with text and positions."""
    found: DocumentOut | None = yield from _found(core, doc_id, snippets=True)
    return [value_in(StoredSnippet, each) for each in (found.snippets or [])] if found else []


def receipt(core: ClientCalls, key: str) -> Steps[OutcomeOut]:
    """Returns the state of a key, whichever caller used it."""
    path = f"/v1/receipts/{quote(key, safe='')}"
    return core.read(path, partial(model_of, OutcomeOut))


def build(
    core: ClientCalls,
    spec: BuildSpec | None = None,
    *,
    wait_s: float = BUILD_WAIT_S,
    idempotency_key: str | None = None,
) -> Steps[BuildOut]:
    """Builds the index of all live documents, or returns the sealed one.

    Raises `InFlight` if the build takes longer than `wait_s`; it continues on the server.

    >>> client.build().index_hash  # doctest: +SKIP
    """
    body = canonical_json(spec_json(spec))
    return core.write(
        "POST",
        "/v1/builds",
        body,
        partial(model_of, BuildOut),
        key=idempotency_key,
        budget_s=wait_s,
    )


def builds(core: ClientCalls) -> Steps[list[dict[str, Any]]]:
    return _listed(core, "/v1/builds")


def swap(
    core: ClientCalls,
    alias: str,
    index_hash: str,
    *,
    expect: ExpectedTarget = UNSET,
    force: bool = False,
    reason: str = "",
    idempotency_key: str | None = None,
) -> Steps[AliasOut]:
    """Points the alias at a sealed build. `expect`: the index_hash it must have now, None if it must not exist."""
    wanted: dict[str, Any] = {"index_hash": index_hash}
    if force:
        wanted["force"] = True
    return _moved(core, alias, "swap", wanted, expect, reason, idempotency_key)


def rollback(
    core: ClientCalls,
    alias: str,
    *,
    to: str | None = None,
    expect: ExpectedTarget = UNSET,
    reason: str = "",
    idempotency_key: str | None = None,
) -> Steps[AliasOut]:
    """Points the alias at the build before this one that is still sealed, or `to` one that it has had."""
    wanted = {} if to is None else {"to": to}
    return _moved(core, alias, "rollback", wanted, expect, reason, idempotency_key)


def resolve(core: ClientCalls, alias: str) -> Steps[AliasOut]:
    """Where the alias points: `.index_hash`, `.generation`."""
    path = f"/v1/aliases/{_name(alias)}"
    return core.read(path, partial(model_of, AliasOut))


def aliases(core: ClientCalls) -> Steps[list[dict[str, Any]]]:
    return _listed(core, "/v1/aliases")


def history(core: ClientCalls, alias: str, limit: int = 100) -> Steps[list[dict[str, Any]]]:
    """Returns the changes of the alias, the newest first."""
    return _listed(core, f"/v1/aliases/{_name(alias)}/history", {"limit": limit})


def search(core: ClientCalls, alias: str, text: str, *, k: int = 5) -> Steps[list[Hit]]:
    """Returns the k nearest snippets of the build that the alias points at, the nearest first, ready to be cited."""
    found = yield from core.read("/v1/search", partial(model_of, Hits), {"alias": alias, "q": text, "k": k})
    return [value_in(Hit, each) for each in found.hits]


def decisions(
    core: ClientCalls,
    *,
    since: str | None = None,
    until: str | None = None,
    kind: str | None = None,
    decision: str | None = None,
    phase: str | None = None,
    source_id: str | None = None,
    page: int = 100,
) -> Steps[None]:
    """Yields decision rows, the oldest first, fetched page by page.

    A claim and its seal are two rows; `phase` selects one kind ("seal": executed, "replay": answered from a receipt).

    >>> [row["decision"] for row in client.decisions(since="24h")]  # doctest: +SKIP
    """
    query = {"since": since, "until": until, "kind": kind, "decision": decision}
    query |= {"phase": phase, "source_id": source_id}
    yield from _paged(core, "/v1/decisions", query, page)


def keys(core: ClientCalls, *, kind: str | None = None, state: str | None = None, page: int = 100) -> Steps[None]:
    """Yields keys and their states, fetched page by page."""
    yield from _paged(core, "/v1/keys", {"kind": kind, "state": state}, page)


def stats(core: ClientCalls, since: str | None = None) -> Steps[StatsOut]:
    """Returns hit rate, sizes and duplicates per endpoint, by default of the last 24 hours."""
    return core.read("/v1/stats", partial(model_of, StatsOut), {"since": since})


def release(core: ClientCalls, key: str, *, idempotency_key: str | None = None) -> Steps[bool]:
    """Allows new attempts for a key that is quarantined, stuck, or sealed as a failure.

    Returns False if there was nothing to release.
    """
    path = f"/v1/admin/keys/{quote(key, safe='')}:release"
    answer = yield from core.post(path, {}, partial(model_of, ReleasedOut), key=idempotency_key)
    return answer.released


def purge(core: ClientCalls, doc_id: str, *, idempotency_key: str | None = None) -> Steps[PurgedOut]:
    """Removes text and metadata of a document permanently from everything that ragfence stores."""
    return core.post("/v1/admin/purge", {"doc_id": doc_id}, partial(model_of, PurgedOut), key=idempotency_key)


def purge_expired(
    core: ClientCalls, limit: int = 1000, *, after: str = "", idempotency_key: str | None = None
) -> Steps[PurgedExpiredOut]:
    """Removes records that have expired; call it again with the `after` of its answer until that is empty."""
    wanted = {"limit": limit, **({"after": after} if after else {})}
    return core.post("/v1/admin/purge-expired", wanted, partial(model_of, PurgedExpiredOut), key=idempotency_key)


def _found(core: ClientCalls, doc_id: str, *, snippets: bool) -> Steps[Any]:
    try:
        return (
            yield from core.read(
                _address(doc_id),
                partial(model_of, DocumentOut),
                {"snippets": "true"} if snippets else None,
            )
        )
    except ApiRefused as refused:
        if refused.code == "VALIDATION.not_found":
            return None
        raise


def _moved(
    core: ClientCalls,
    alias: str,
    how: str,
    wanted: dict[str, Any],
    expect: ExpectedTarget,
    reason: str,
    key: str | None,
) -> Steps[AliasOut]:
    if expect is not UNSET:
        wanted["expect"] = expect
    if reason:
        wanted["reason"] = reason
    path = f"/v1/aliases/{_name(alias)}:{how}"
    return core.post(path, wanted, partial(model_of, AliasOut), key=key)


def _listed(core: ClientCalls, path: str, query: Mapping[str, Any] | None = None) -> Steps[list[dict[str, Any]]]:
    found = yield from core.read(path, partial(model_of, Items), query)
    return found.items


def _paged(core: ClientCalls, path: str, query: Mapping[str, Any], page: int) -> Steps[None]:
    cursor: str | None = None
    while True:
        found = yield from core.read(path, partial(model_of, PageOut), {**query, "limit": page, "cursor": cursor})
        for each in found.items:
            yield Give(each)
        cursor = found.next_cursor
        if not cursor:
            return


def _address(doc_id: object) -> str:
    if not isinstance(doc_id, str) or not doc_id:
        raise ValidationError(f"a doc_id must be text and not empty, not {doc_id!r}")
    # An id of dots alone would be taken for a step in the path, and dropped on the way.
    part = quote(doc_id, safe="") if doc_id.strip(".") else "%2E" * len(doc_id)
    return f"/v1/documents/{part}"


def _name(alias: object) -> str:
    if not isinstance(alias, str) or not alias.strip("."):
        raise ValidationError(f"an alias is a name, not {alias!r}")
    return quote(alias, safe="")


def _matching(etag: str | None) -> dict[str, str]:
    if etag is None:
        return {}
    return {"If-Match": etag if etag == "*" or etag.startswith(('"', 'W/"')) else f'"{etag}"'}


def _text(value: object) -> str:
    return ("true" if value else "false") if isinstance(value, bool) else str(value)


def document_json(document: Document, *, position: int | None = None, with_id: bool = True) -> tuple[str, bytes]:
    """Returns doc_id and canonical JSON. Raises `DocumentInvalid` before anything is sent."""
    doc = checked(document, _NO_LIMITS, position=position)
    values: dict[str, Any] = {"text": doc.text}
    if with_id:
        values["doc_id"] = doc.doc_id
    if document.metadata:
        values["metadata"] = dict(document.metadata)
    if doc.source_url:
        values["source_url"] = doc.source_url
    if doc.sequence is not None:
        values["sequence"] = doc.sequence
    if doc.content_type != Document._field_defaults["content_type"]:
        values["content_type"] = doc.content_type
    try:
        return doc.doc_id, canonical_json(values)
    except NotJson as wrong:  # a sequence that JSON readers would round
        raise DocumentInvalid(
            f"document {doc.doc_id!r}: {wrong.message}", hint=wrong.hint, doc_id=doc.doc_id
        ) from wrong


def spec_json(spec: BuildSpec | None) -> dict[str, Any]:
    if spec is None:
        return {}
    if not isinstance(spec.embedder, str):
        raise Unsupported(
            "the server embeds, so the embedder must be given by its name", hint='IndexSpec(embedder="wordllama")'
        )
    return {
        "embedder": spec.embedder,
        "backend": spec.backend,
        "metric": spec.metric,
        "index": spec.index,
        "parameters": dict(spec.parameters),
    }


def receipt_in(values: Mapping[str, Any]) -> Receipt:
    """Returns a receipt whose `.fence` is the ETag of the document, for `if_match`."""
    flags = values.get("flags") or {}
    return Receipt(
        key=str(values["key"]),
        effect_id=str(values["effect_id"]),
        snippet_ids=tuple(values["snippet_ids"]),
        decision=Decision(values["decision"]),
        flags=Flags(**{name: flags[name] for name in _names(Flags) if name in flags}),
        fence=str(values.get("etag") or ""),
    )


def receipt_of(reply: Reply) -> Receipt:
    try:
        return receipt_in(json.loads(reply.body))
    except (KeyError, TypeError, ValueError, AttributeError) as broken:
        raise _unreadable(reply, f"something other than a receipt: {broken!r}") from broken


def model_of(kind: type[Model], reply: Reply) -> Model:
    try:
        return kind.model_validate_json(reply.body)
    except ModelError as broken:
        raise _unreadable(reply, f"something other than {kind.__name__}: {broken.errors()[0]['msg']}") from broken


def value_in(kind: type[Value], values: Mapping[str, Any]) -> Value:
    """Returns a dataclass with the fields it knows: a newer server may send more."""
    return kind(**{name: values[name] for name in _names(cast(Hashable, kind)) if name in values})


@cache
def _names(kind: Hashable) -> tuple[str, ...]:
    return tuple(each.name for each in fields(kind))  # type: ignore[arg-type]  # a dataclass; classes are hashable


def _unreadable(reply: Reply, what: str) -> ApiRefused:
    return ApiRefused(
        f"the server answered {reply.status} with {what}",
        hint="is this the address of a ragfence server, and as new as this client?",
        status=reply.status,
        code="API.unreadable",
    )
