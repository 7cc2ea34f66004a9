"""Requests and answers of the ingestion API as pydantic models, which check requests and describe the API (OpenAPI)."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from ragfence.core.document import MAX_CONTENT_TYPE_BYTES, MAX_URL_BYTES, PLAIN, Document
from ragfence.core.operations import SEQUENCE_MAX, SEQUENCE_MIN
from ragfence.core.receipts import Receipt

MAX_ID_CHARACTERS: Final = 1024

DocId = Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARACTERS)]
IndexHash = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Sequence = Annotated[int, Field(ge=SEQUENCE_MIN, le=SEQUENCE_MAX)]
Reason = Annotated[str, Field(max_length=1000)]
ALIAS_PATTERN: Final = "^[a-z0-9][a-z0-9_.-]{0,63}$"


class _Taken(BaseModel):
    # Strict, without unknown fields: a mistyped `source_ulr` must not be ignored.
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class DocumentBody(_Taken):
    """A document whose id is in the address."""

    text: str
    metadata: dict[str, Any] = {}
    source_url: Annotated[str, Field(max_length=MAX_URL_BYTES)] = ""
    sequence: Sequence | None = Field(default=None, description="orders the revisions: an older one is refused")
    content_type: Annotated[str, Field(max_length=MAX_CONTENT_TYPE_BYTES)] = PLAIN

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"text": "Thirty days a year.", "metadata": {"team": "people"}}]}
    )

    def document(self, doc_id: str) -> Document:
        return Document(doc_id, self.text, self.metadata, self.source_url, self.sequence, self.content_type)


class DocumentIn(DocumentBody):
    """A document."""

    doc_id: DocId

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"doc_id": "handbook/leave", "text": "Thirty days a year.", "metadata": {"team": "people"}}]
        }
    )


class RetractIn(_Taken):
    """A document that is to be retracted: a message of a queue. In the API, it is a DELETE."""

    action: Literal["retract"]
    doc_id: DocId
    sequence: Sequence | None = None

    model_config = ConfigDict(json_schema_extra={"examples": [{"action": "retract", "doc_id": "handbook/leave"}]})


class BuildIn(_Taken):
    """Which index of all live documents; everything has a default."""

    embedder: Annotated[str, Field(max_length=200)] = "wordllama"
    backend: Annotated[str, Field(max_length=1000)] = "lance"
    metric: Literal["cosine", "dot", "l2"] = "cosine"
    index: Annotated[str, Field(max_length=100)] = "auto"
    parameters: dict[str, Any] = {}

    model_config = ConfigDict(json_schema_extra={"examples": [{}]})


class SwapIn(_Taken):
    index_hash: IndexHash
    expect: IndexHash | None = Field(
        default=None, description="the index_hash the alias must have now; null: it must not exist; left out: any"
    )
    force: bool = False
    reason: Reason = ""

    model_config = ConfigDict(json_schema_extra={"examples": [{"index_hash": "0" * 64, "reason": "release 12"}]})


class RollbackIn(_Taken):
    to: IndexHash | None = None
    expect: IndexHash | None = None
    reason: Reason = ""

    model_config = ConfigDict(json_schema_extra={"examples": [{"reason": "bad answers since noon"}]})


class PurgeIn(_Taken):
    doc_id: DocId

    model_config = ConfigDict(json_schema_extra={"examples": [{"doc_id": "handbook/leave"}]})


class PurgeExpiredIn(_Taken):
    limit: Annotated[int, Field(ge=1, le=10_000)] = 1000
    after: Annotated[str, Field(max_length=2000)] = ""

    model_config = ConfigDict(json_schema_extra={"examples": [{}]})


class Empty(_Taken):
    model_config = ConfigDict(json_schema_extra={"examples": [{}]})


class FlagsOut(BaseModel):
    attempt: int
    takeover: bool
    healed: bool
    revived: bool
    metadata_updated: bool
    fenced_out: bool
    journaled: bool
    waited_ms: int


class ReceiptOut(BaseModel):
    """The receipt of a document: key, effect_id and snippet_ids are the same for every call."""

    key: str
    doc_id: str | None = None
    decision: str
    effect_id: str
    snippet_ids: list[str]
    etag: str | None = Field(default=None, description="the version of the document, for If-Match")
    flags: FlagsOut


class DocumentOut(BaseModel):
    doc_id: str
    key: str
    content_hash: str
    size: int
    metadata: dict[str, Any]
    source_url: str
    content_type: str
    sequence: int | None
    recipe: str
    snippet_ids: list[str]
    updated: str
    etag: str
    snippets: list[dict[str, Any]] | None = None


class OutcomeOut(BaseModel):
    """The state of a key."""

    key: str
    kind: str
    source_id: str
    state: str
    attempt: int
    effect_id: str | None
    snippet_ids: list[str]
    first_seen: str | None
    sealed_at: str | None


class BuildOut(BaseModel):
    index_hash: str
    decision: str | None = None
    state: str
    rows: int | None = None
    documents: int | None = None
    dimension: int | None = None
    content_digest: str | None = None
    corpus_digest: str | None = None
    at: str
    aliases: list[str] | None = None
    inputs: dict[str, Any] = {}


class AliasOut(BaseModel):
    alias: str
    index_hash: str | None
    generation: int
    previous: str | None = None
    changed: bool | None = None
    forced: bool | None = None
    gates: list[dict[str, Any]] | None = None


class PageOut(BaseModel):
    items: list[dict[str, Any]]
    next_cursor: str | None = None


class Items(BaseModel):
    items: list[dict[str, Any]]


class Hits(BaseModel):
    alias: str
    hits: list[dict[str, Any]]


class StatsOut(BaseModel):
    tenant: str
    since: str
    documents: int = 0
    """Live documents, exact."""
    records: list[dict[str, Any]]
    """Keys by kind and state, without documents; `estimated` marks counts that are estimates."""
    keys: int = 0
    pending: int = 0
    quarantined: int = 0
    average_ttl_s: float | None = None
    """How long ended keys are still stored, on average: an estimate."""
    rows: int
    """Decision rows, or on Redis their stream entries, that are not drained yet."""
    processed: int = 0
    duplicates: int = 0
    decisions: dict[str, int]
    hit_rate: float | None
    endpoints: list[dict[str, Any]]


class Health(BaseModel):
    status: str


class ReleasedOut(BaseModel):
    key: str
    released: bool


class PurgedOut(BaseModel):
    doc_id: str
    found: bool
    report: dict[str, Any]


class PurgedExpiredOut(BaseModel):
    records: int
    commits: int
    after: str


class InProgress(BaseModel):
    """The operation is in progress: request status_url, or send the same request again."""

    key: str
    state: str
    retry_after: int
    status_url: str | None = None


class WebhookOut(BaseModel):
    """What came of each event of a delivery: new, duplicate, stale, ignored, or failed for good."""

    events: list[dict[str, Any]]


class WebhookAccepted(BaseModel):
    """How many events of a delivery are in the inbox."""

    accepted: int


class ProblemOut(BaseModel):
    """application/problem+json (RFC 9457); every code is in docs/errors.md."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    retryable: bool
    hint: str

    model_config = ConfigDict(extra="allow")


def receipt_out(receipt: Receipt, doc_id: str | None) -> dict[str, Any]:
    """Returns a receipt as JSON values. By hand, because pydantic would take as long as everything else."""
    flags = receipt.flags
    return {
        "key": receipt.key,
        "doc_id": doc_id,
        "decision": receipt.decision.value,
        "effect_id": receipt.effect_id,
        "snippet_ids": list(receipt.snippet_ids),
        "etag": receipt.fence or None,
        "flags": {name: getattr(flags, name) for name in FlagsOut.model_fields},
    }
