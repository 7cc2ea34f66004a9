"""JSON of the wire to values of the library, and back."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from dataclasses import fields
from functools import cache
from typing import Any, Final, TypeVar, cast

from pydantic import BaseModel
from pydantic import ValidationError as Misfit

from ragfence.client.steps import Reply
from ragfence.core.canonical import canonical_json
from ragfence.core.receipts import Decision, Flags, Receipt
from ragfence.documents.document import Document, DocumentLimits, checked
from ragfence.errors import ApiRefused, DocumentInvalid, NotJson, Unsupported
from ragfence.indexes.spec import IndexSpec

_NO_LIMITS: Final = DocumentLimits(max_text_bytes=2**40, max_metadata_bytes=2**40, allow_empty_text=True)
"""how much a document may take up is the server's to say"""

Model = TypeVar("Model", bound=BaseModel)
Value = TypeVar("Value")


def document_json(document: Document, *, position: int | None = None, with_id: bool = True) -> tuple[str, bytes]:
    """doc_id and canonical JSON, or `DocumentInvalid`: what is no document need not be sent to be refused."""
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
    except NotJson as wrong:  # a sequence that JSON readers round
        raise DocumentInvalid(
            f"document {doc.doc_id!r}: {wrong.message}", hint=wrong.hint, doc_id=doc.doc_id
        ) from wrong


def spec_json(spec: IndexSpec | None) -> dict[str, Any]:
    if spec is None:
        return {}
    if not isinstance(spec.embedder, str):
        raise Unsupported(
            "the server embeds, so it must know the embedder by its name", hint='IndexSpec(embedder="wordllama")'
        )
    return {
        "embedder": spec.embedder,
        "backend": spec.backend,
        "metric": spec.metric,
        "index": spec.index,
        "parameters": dict(spec.parameters),
    }


def receipt_in(values: Mapping[str, Any]) -> Receipt:
    """`.fence` is the ETag of the document: what `if_match` takes."""
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
        raise _no_such(reply, f"no receipt: {broken!r}") from broken


def model_of(kind: type[Model], reply: Reply) -> Model:
    try:
        return kind.model_validate_json(reply.body)
    except Misfit as broken:
        raise _no_such(reply, f"no {kind.__name__}: {broken.errors()[0]['msg']}") from broken


def value_in(kind: type[Value], values: Mapping[str, Any]) -> Value:
    """A dataclass of the fields it knows: a newer server may tell more."""
    return kind(**{name: values[name] for name in _names(cast(Hashable, kind)) if name in values})


@cache
def _names(kind: Hashable) -> tuple[str, ...]:
    return tuple(each.name for each in fields(kind))  # type: ignore[arg-type]  # a dataclass; classes can be hashed


def _no_such(reply: Reply, what: str) -> ApiRefused:
    return ApiRefused(
        f"the server answered {reply.status}, but with {what}",
        hint="is this the address of a ragfence server, and as new as this client?",
        status=reply.status,
        code="API.unreadable",
    )
