"""Every call of the API, once: `Client` and `AsyncClient` perform the steps of these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from ragfence.client.keys import Keys
from ragfence.client.retry import Accept, RetryLoop, exchanged
from ragfence.client.steps import Give, Result, Send, Steps
from ragfence.client.values import (
    document_json,
    model_of,
    receipt_of,
    spec_json,
    value_in,
)
from ragfence.core.canonical import canonical_json
from ragfence.core.receipts import Receipt
from ragfence.documents.document import Document
from ragfence.errors import ValidationError
from ragfence.indexes.aliases import UNSET, Expected
from ragfence.indexes.spec import IndexSpec
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

if TYPE_CHECKING:
    from ragfence.documents.reads import StoredSnippet
    from ragfence.indexes.search import Hit

BUILD_WAIT_S = 3600.0
JSON_TYPE = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True)
class ClientCalls:
    """What a client is, apart from its connections."""

    conduct: RetryLoop
    keys: Keys

    def read(self, path: str, accept: Accept[Result], query: Mapping[str, Any] | None = None) -> Steps[Result]:
        given = {name: _text(value) for name, value in (query or {}).items() if value not in (None, "")}
        url = f"{path}?{urlencode(given)}" if given else path
        return exchanged(self.conduct, Send("GET", url), accept)

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
        return exchanged(self.conduct, Send(method, path, own, body), accept, budget_s=budget_s)

    def post(self, path: str, values: Mapping[str, Any], accept: Accept[Result], *, key: str | None) -> Steps[Result]:
        return self.write("POST", path, canonical_json(dict(values)), accept, key=key)


def ingest(core: ClientCalls, document: Document, *, idempotency_key: str | None = None) -> Steps[Receipt]:
    """Ingests one document, or answers with the snippet_ids of the first time.

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
    """As `ingest`, but only if nobody else was faster: otherwise it is refused (412), and nothing happens.

    if_match   the etag that the document must have now: `client.get(doc_id).etag`, or `.fence` of its receipt
    if_absent  there must be no live document of that id

    >>> client.put(changed, if_match=client.get("a").etag)  # doctest: +SKIP
    """
    if if_absent and if_match is not None:
        raise ValidationError("a document that has an etag is not absent", hint="pass if_match or if_absent")
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
    """Takes a document away. The same content after it brings it back with its snippet_ids."""
    path = _address(doc_id) + ("" if sequence is None else f"?sequence={sequence:d}")
    return core.write("DELETE", path, None, receipt_of, key=idempotency_key, headers=_matching(if_match))


def get(core: ClientCalls, doc_id: str) -> Steps[DocumentOut | None]:
    """The live revision of a document, described; None if there is none."""
    return _found(core, doc_id, snippets=False)


def snippets(core: ClientCalls, doc_id: str) -> Steps[list[StoredSnippet]]:
    """The snippets of the live revision, in their order, with text and positions."""
    from ragfence.documents.reads import StoredSnippet

    found: DocumentOut | None = yield from _found(core, doc_id, snippets=True)
    return [value_in(StoredSnippet, each) for each in (found.snippets or [])] if found else []


def receipt(core: ClientCalls, key: str) -> Steps[OutcomeOut]:
    """How a key stands, whoever used it."""
    path = f"/v1/receipts/{quote(key, safe='')}"
    return core.read(path, partial(model_of, OutcomeOut))


def build(
    core: ClientCalls,
    spec: IndexSpec | None = None,
    *,
    wait_s: float = BUILD_WAIT_S,
    idempotency_key: str | None = None,
) -> Steps[BuildOut]:
    """Builds the index of all live documents, or finds it sealed. `InFlight`: not done within `wait_s`; it goes on.

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
    expect: Expected = UNSET,
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
    expect: Expected = UNSET,
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
    """What was done to the alias, the newest first."""
    return _listed(core, f"/v1/aliases/{_name(alias)}/history", {"limit": limit})


def search(core: ClientCalls, alias: str, text: str, *, k: int = 5) -> Steps[list[Hit]]:
    """The k nearest snippets of the build that the alias points at, the nearest first, ready to be cited."""
    from ragfence.indexes.search import Hit

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
    """Decision rows, the oldest first, fetched page by page while they are read.

    A claim and its seal are two rows; `phase` tells them apart ("seal": what was performed, "replay": what was known).

    >>> [row["decision"] for row in client.decisions(since="24h")]  # doctest: +SKIP
    """
    asked = {"since": since, "until": until, "kind": kind, "decision": decision}
    asked |= {"phase": phase, "source_id": source_id}
    yield from _paged(core, "/v1/decisions", asked, page)


def keys(core: ClientCalls, *, kind: str | None = None, state: str | None = None, page: int = 100) -> Steps[None]:
    """Keys and how they stand, fetched page by page while they are read."""
    yield from _paged(core, "/v1/keys", {"kind": kind, "state": state}, page)


def stats(core: ClientCalls, since: str | None = None) -> Steps[StatsOut]:
    """Hit rate, sizes and duplicates per endpoint, since 24 hours ago unless told."""
    return core.read("/v1/stats", partial(model_of, StatsOut), {"since": since})


def release(core: ClientCalls, key: str, *, idempotency_key: str | None = None) -> Steps[bool]:
    """New attempts for a key that is quarantined, stuck, or sealed as a failure. False: nothing to release."""
    path = f"/v1/admin/keys/{quote(key, safe='')}:release"
    answer = yield from core.post(path, {}, partial(model_of, ReleasedOut), key=idempotency_key)
    return answer.released


def purge(core: ClientCalls, doc_id: str, *, idempotency_key: str | None = None) -> Steps[PurgedOut]:
    """Removes text and metadata of a document from everything that ragfence keeps, for good."""
    return core.post("/v1/admin/purge", {"doc_id": doc_id}, partial(model_of, PurgedOut), key=idempotency_key)


def purge_expired(
    core: ClientCalls, limit: int = 1000, *, after: str = "", idempotency_key: str | None = None
) -> Steps[PurgedExpiredOut]:
    """Removes what has outlived its lifetime; call it again with the `after` of its answer until that is empty."""
    wanted = {"limit": limit, **({"after": after} if after else {})}
    return core.post("/v1/admin/purge-expired", wanted, partial(model_of, PurgedExpiredOut), key=idempotency_key)


def _found(core: ClientCalls, doc_id: str, *, snippets: bool) -> Steps[Any]:
    from ragfence.errors import ApiRefused

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
    core: ClientCalls, alias: str, how: str, wanted: dict[str, Any], expect: Expected, reason: str, key: str | None
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


def _paged(core: ClientCalls, path: str, asked: Mapping[str, Any], page: int) -> Steps[None]:
    cursor: str | None = None
    while True:
        found = yield from core.read(path, partial(model_of, PageOut), {**asked, "limit": page, "cursor": cursor})
        for each in found.items:
            yield Give(each)
        cursor = found.next_cursor
        if not cursor:
            return


def _address(doc_id: object) -> str:
    if not isinstance(doc_id, str) or not doc_id:
        raise ValidationError(f"a doc_id is text, not {doc_id!r}")
    # Dots are percent-encoded where they would be taken for a step in the path, and dropped on the way.
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
