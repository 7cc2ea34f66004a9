"""What the errors of qdrant-client mean; its local mode has only ValueError and RuntimeError."""

from __future__ import annotations

from qdrant_client.http.exceptions import ResponseHandlingException, UnexpectedResponse

from ragfence.errors import RagfenceError, StoreAuth, StoreUnavailable, ValidationError

QdrantError = (UnexpectedResponse, ResponseHandlingException, ValueError, RuntimeError)


def is_missing(error: Exception) -> bool:
    if isinstance(error, UnexpectedResponse):
        return error.status_code == 404
    return "not found" in str(error)


def is_taken(error: Exception) -> bool:
    if isinstance(error, UnexpectedResponse):
        return error.status_code == 409 or "already exists" in _said(error)
    return "already exists" in str(error)


def translate(error: Exception, what: str, where: str) -> RagfenceError:
    """The error for people: what could not be done, at which server, and what to do about it."""
    said = f"cannot {what}, {where}: {_said(error)}"
    if isinstance(error, UnexpectedResponse):
        if error.status_code in (401, 403):
            return StoreAuth(said, hint="set QDRANT_API_KEY to a key that may write and delete collections")
        if error.status_code in (400, 422):
            return ValidationError(said, hint="the server refused the request; is it as new as qdrant-client?")
        return StoreUnavailable(said)
    return StoreUnavailable(said)


def _said(error: Exception) -> str:
    if isinstance(error, UnexpectedResponse):
        body = error.content.decode(errors="replace") if error.content else error.reason_phrase
        return f"{error.status_code} {' '.join(body.split())[:300]}"
    return " ".join(str(error).split())[:300]
