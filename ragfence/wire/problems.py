"""Errors as HTTP answers: problem+json (RFC 9457) with a stable `code`, `retryable` and a `hint`.

`ERRORS` (errors of the library) and `REFUSALS` (only HTTP) are the only table of problems. `docs/errors.md` is made
from it by `python -m ragfence.wire.problems`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ragfence import errors
from ragfence.errors import RagfenceError, hint_on
from ragfence.wire.messages import Answer

if TYPE_CHECKING:  # its patterns take long to load, and a client redacts nothing
    from ragfence.core.redaction import Redaction

MEDIA_TYPE: Final = "application/problem+json"
TYPE_PREFIX: Final = "urn:ragfence:problem:"
RETRY_AFTER_S: Final = 1
"""Retry-After of answers with 429 and 503 that have no better value."""


class ProblemRow(NamedTuple):
    status: int
    title: str


class ProblemRule(NamedTuple):
    status: int
    retryable: bool
    title: str
    hint: str


ERRORS: Final[Mapping[type[RagfenceError], ProblemRow]] = {
    errors.RagfenceError: ProblemRow(500, "Something failed inside ragfence"),
    errors.TerminalError: ProblemRow(422, "Trying again cannot help"),
    errors.ValidationError: ProblemRow(400, "The request is invalid; nothing was stored"),
    errors.NotJson: ProblemRow(400, "The body is not JSON that can be compared"),
    errors.InsecureUrl: ProblemRow(502, "An API key would be sent over plain HTTP"),
    errors.DocumentInvalid: ProblemRow(422, "The document cannot be ingested"),
    errors.PruneTooLarge: ProblemRow(422, "More documents would be retracted than the policy allows in one call"),
    errors.ResultTooBig: ProblemRow(500, "The result is larger than the stores accept"),
    errors.PolicyError: ProblemRow(500, "The server's policy is refused"),
    errors.ContentSecretError: ProblemRow(
        500, "The server lacks the secret with which contents of the tenant are hashed"
    ),
    errors.UnknownStore: ProblemRow(500, "The server's store cannot be opened"),
    errors.EmbedderUnknown: ProblemRow(422, "No embedder of this name is registered"),
    errors.AliasUnknown: ProblemRow(404, "There is no such alias"),
    errors.WebhookUnverified: ProblemRow(401, "The signature of the webhook was not accepted"),
    errors.Conflict: ProblemRow(409, "The key was used with another payload"),
    errors.OriginConflict: ProblemRow(409, "Another source owns the document"),
    errors.Stale: ProblemRow(409, "A newer revision is already applied"),
    errors.EffectFailed: ProblemRow(422, "The operation failed permanently; this is its outcome, replayed"),
    errors.Quarantined: ProblemRow(409, "Too many attempts failed; the key has to be released"),
    errors.NestedClaim: ProblemRow(500, "A claim inside the effect of its own key"),
    errors.Unsupported: ProblemRow(501, "This server does not do that"),
    errors.ObjectsRequired: ProblemRow(501, "This server has no object store"),
    errors.EmbedderInvalid: ProblemRow(500, "The embedder's vectors cannot be used"),
    errors.NotSealed: ProblemRow(409, "The index was never sealed"),
    errors.BuildRetired: ProblemRow(410, "The index was retired"),
    errors.BuildMissing: ProblemRow(409, "The rows of the index are not in the backend"),
    errors.BuildUnverified: ProblemRow(500, "The built index is not what was requested"),
    errors.GateFailed: ProblemRow(409, "A gate before the swap failed"),
    errors.AliasMoved: ProblemRow(412, "The alias is not where it was expected"),
    errors.DocumentMoved: ProblemRow(412, "The document is not at the version that was expected"),
    errors.StoreUnsafe: ProblemRow(500, "The server's store cannot keep its guarantees"),
    errors.StoreAuth: ProblemRow(500, "The store refused the server's credentials"),
    errors.TableGone: ProblemRow(410, "The table was deleted; a newer one has been written"),
    errors.FormatTooNew: ProblemRow(500, "Stored by a newer ragfence than this server's"),
    errors.FormatCorrupt: ProblemRow(500, "Stored bytes are not a valid record"),
    errors.SegmentUnreadable: ProblemRow(500, "A segment of the log is cut off, damaged or missing"),
    errors.TransientError: ProblemRow(503, "Trying again may help"),
    errors.InFlight: ProblemRow(409, "The operation is in progress"),
    errors.LeaseLost: ProblemRow(503, "The lease expired during the operation"),
    errors.FencedOut: ProblemRow(503, "Another attempt was faster; send the request again for its outcome"),
    errors.SealUncertain: ProblemRow(503, "The operation happened, its outcome could not be stored yet"),
    errors.TransportUnavailable: ProblemRow(503, "A queue did not answer"),
    errors.QueueFull: ProblemRow(429, "The queue is full"),
    errors.StoreUnavailable: ProblemRow(503, "A store did not answer"),
    errors.StoreClosed: ProblemRow(503, "The server is closing its stores"),
    errors.CommitUncertain: ProblemRow(503, "The object store did not say whether the commit happened"),
    errors.NotReady: ProblemRow(503, "The fence store is being rebuilt"),
    errors.EmbedderUnavailable: ProblemRow(503, "The embedder did not answer"),
    errors.ApiRefused: ProblemRow(502, "Another server refused"),
    errors.ApiUnauthorized: ProblemRow(502, "Another server did not accept the API key"),
    errors.ApiForbidden: ProblemRow(502, "Another server requires a scope that the API key lacks"),
    errors.ApiUnavailable: ProblemRow(503, "Another server did not answer"),
    errors.SnapshotGone: ProblemRow(409, "Documents that were to be indexed are gone"),
}
"""Code, retryable and the default hint are those of the class."""

_NEW_KEY: Final = (
    "make one key per operation, the same in every retry: a UUID kept with the job, or the id of what is sent; "
    'for example Idempotency-Key: "8e03978e-40d5-43dd-bc93-6894a57f9324"'
)
_SAME_KEY: Final = "send the same request again, with the same key"

REFUSALS: Final[Mapping[str, ProblemRule]] = {
    "VALIDATION.idempotency.key_missing": ProblemRule(400, False, "The request needs an Idempotency-Key", _NEW_KEY),
    "VALIDATION.idempotency.key_malformed": ProblemRule(400, False, "The Idempotency-Key cannot be read", _NEW_KEY),
    "VALIDATION.idempotency.key_unknown": ProblemRule(404, False, "No outcome is stored for this key", _SAME_KEY),
    "VALIDATION.header": ProblemRule(400, False, "A header is missing or cannot be read", "correct the header"),
    "VALIDATION.path": ProblemRule(
        400, False, "The address cannot be read", "percent-encode the path as UTF-8; % itself is %25"
    ),
    "VALIDATION.body_too_large": ProblemRule(413, False, "The body is too large", "send less at once"),
    "VALIDATION.headers_too_large": ProblemRule(
        431, False, "There are too many headers, or they are too long", "send less in headers and in the address"
    ),
    "VALIDATION.media_type": ProblemRule(
        415, False, "The body has a type that is not accepted", "send application/json"
    ),
    "VALIDATION.not_found": ProblemRule(404, False, "There is nothing at this address", "check the address"),
    "VALIDATION.method": ProblemRule(405, False, "The address does not accept this method", "see the header Allow"),
    "VALIDATION.body": ProblemRule(422, False, "The body is not what this address accepts", "see /openapi.json"),
    "VALIDATION.parameter": ProblemRule(422, False, "A parameter of the address is wrong", "see /openapi.json"),
    "VALIDATION.slow_client": ProblemRule(408, True, "The request did not arrive in time", "send it again, faster"),
    "AUTH.missing": ProblemRule(401, False, "No credentials", "send Authorization: Bearer and an API key"),
    "AUTH.invalid": ProblemRule(401, False, "These credentials are not known", "make a new API key"),
    "AUTH.expired": ProblemRule(401, False, "The API key has expired", "create another API key"),
    "AUTH.revoked": ProblemRule(401, False, "The API key was revoked", "create another API key"),
    "AUTH.host": ProblemRule(
        403,
        False,
        "The server does not have this name",
        "use http://127.0.0.1 or http://localhost, or serve with API keys",
    ),
    "AUTH.origin": ProblemRule(403, False, "The request was made by another website", "serve with API keys"),
    "AUTH.forbidden": ProblemRule(
        403, False, "The API key lacks a scope", "use an API key with one of `needed_scopes`"
    ),
    "RATE_LIMIT.credentials": ProblemRule(
        429, True, "Too many wrong credentials", "check the API key; wait for as long as Retry-After says"
    ),
    "RATE_LIMIT.exceeded": ProblemRule(429, True, "Too many requests", "wait for as long as Retry-After says"),
    "RATE_LIMIT.share": ProblemRule(
        429, True, "The tenant uses its share of the server", "wait for its other requests"
    ),
    "RATE_LIMIT.builds": ProblemRule(429, True, "Too many builds at a time", "wait for the builds in progress"),
    "DEPENDENCY.timeout": ProblemRule(504, True, "The operation took longer than the time given", _SAME_KEY),
    "DEPENDENCY.overloaded": ProblemRule(503, True, "The server is overloaded", "wait for as long as Retry-After says"),
    "TRANSIENT.unexpected": ProblemRule(500, True, "An unexpected error occurred", _SAME_KEY),
    "PROVIDER.duplicate": ProblemRule(
        409,
        False,
        "The operation happened before, and its answer was not stored",
        "do not send it again under another key; read what it made instead",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The body of an error answer."""

    status: int
    code: str
    title: str
    retryable: bool
    detail: str = ""
    hint: str = ""
    extras: Mapping[str, Any] = field(default_factory=dict)

    @property
    def retry_after(self) -> int | None:
        """Retry-After in whole seconds."""
        given = self.extras.get("retry_after")
        if given is not None:
            return int(given)
        return RETRY_AFTER_S if self.status in (429, 503) and self.retryable else None

    def body(self) -> dict[str, Any]:
        known = {
            "type": TYPE_PREFIX + self.code,
            "title": self.title,
            "status": self.status,
            "detail": self.detail or self.title,
            "code": self.code,
            "retryable": self.retryable,
            "hint": self.hint,
        }
        wait = {} if self.retry_after is None else {"retry_after": self.retry_after}
        return known | {name: value for name, value in self.extras.items() if value is not None} | wait

    def redacted(self, redactor: Redaction) -> Problem:
        """Returns the problem as it may be stored. Values that are not JSON are redacted as text."""
        extras: Any = redactor.redact(json.loads(json.dumps(dict(self.extras), default=str)))
        return replace(
            self, detail=redactor.redact_text(self.detail), hint=redactor.redact_text(self.hint), extras=extras
        )

    def answer(self, headers: Mapping[str, str] | None = None) -> Answer:
        text = json.dumps(self.body(), ensure_ascii=True, separators=(",", ":"), default=str).encode()
        wait = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        # `no-store`: what is wrong now need not be wrong a moment later.
        own = {"content-type": MEDIA_TYPE, "content-length": str(len(text)), "cache-control": "no-store"}
        own["x-content-type-options"] = "nosniff"
        return Answer(self.status, tuple((own | wait | dict(headers or {})).items()), text)


class RequestRefused(Exception):
    """A request that is answered with a problem before anything is claimed."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.code)
        self.problem = problem


def refusal(code: str, detail: str = "", *, hint: str | None = None, **extras: Any) -> Problem:
    """Returns a problem that only HTTP knows, by its code in `REFUSALS`."""
    row = REFUSALS[code]
    return Problem(
        status=row.status,
        code=code,
        title=row.title,
        retryable=row.retryable,
        detail=detail,
        hint=row.hint if hint is None else hint_on("http", hint),
        extras=extras,
    )


def problem_of(error: RagfenceError, *, status: int | None = None, **extras: Any) -> Problem:
    """Returns the problem of an error. Of a class of the user it is that of the nearest base class in `ERRORS`."""
    row = next(ERRORS[kind] for kind in type(error).__mro__ if kind in ERRORS)
    carried = {name: error.details[name] for name in _SHOWN if error.details.get(name) is not None}
    if (left_ms := error.details.get("retry_after_ms")) is not None:
        carried["retry_after"] = whole_seconds(left_ms)
    return Problem(
        status=status or row.status,
        code=error.code,
        title=row.title,
        retryable=error.retryable,
        detail=error.message,
        hint=hint_on("http", error.hint),
        extras=carried | extras,
    )


_SHOWN: Final = (
    "key",
    "doc_id",
    "diff",
    "alias",
    "index_hash",
    "current",
    "generation",
    "sequence",
    "newest",
    "report",
)
"""Details of an error that a caller may see. Receipts are not: they may belong to another caller."""


def whole_seconds(milliseconds: int) -> int:
    """Rounds up: a client that returns a moment too early waits twice."""
    return max(1, -(-milliseconds // 1000))


def table() -> list[tuple[str, int, bool, str, str]]:
    """Returns (code, status, retryable, title, class) of all problems, sorted by code."""
    rows = [(kind.code, row.status, kind.retryable, row.title, kind.__name__) for kind, row in ERRORS.items()]
    rows += [(code, row.status, row.retryable, row.title, "") for code, row in REFUSALS.items()]
    return sorted(rows)


_PAGE: Final = """\
# Errors

Made from the table in `ragfence/wire/problems.py` by `python -m ragfence.wire.problems > docs/errors.md`; do not edit.

Every error is answered as `application/problem+json` (RFC 9457):

```json
{sample}
```

`code` is stable. `retryable` says whether the same request, with the same key, may succeed later; where `retry_after`
(and the header `Retry-After`) is given, not before that number of seconds. `hint` says what to do next, as a request
or as a command on the server. Other fields depend on the code: `key`, `diff` (an RFC 6902 patch from the body
sent first to this one), `status_url`, `needed_scopes` (the API key needs one of them).

| family | meaning | retry? |
|---|---|---|
| `VALIDATION.*` | the request is wrong; nothing was stored | no: correct it |
| `AUTH.*` | credentials are missing, unknown or not enough | no: other credentials |
| `CONFLICT.idempotency.payload_mismatch` | the key was used for another request | no: another key for another request |
| `RATE_LIMIT.exceeded` | too many requests | yes, after `Retry-After` |
| `RATE_LIMIT.credentials` | too many wrong credentials came from the same address | yes, with the right API key |
| `DEPENDENCY.timeout`, `DEPENDENCY.unavailable` | a store or a service did not answer in time, or at all | yes |
| `TRANSIENT.*`, `LEASE.*`, `IN_FLIGHT` | the outcome is not known yet | yes, with the same key |
| `PROVIDER.duplicate` | it happened before | no: use what is stored |

The status is the usual one: the policy may choose 422 for a conflict (`on_conflict.status`), and an operation in
progress is answered with 202 unless it says 409 (`http.in_progress`).

| code | status | retryable | title | class in `ragfence.errors` |
|---|---|---|---|---|
{rows}
"""


def page() -> str:
    """docs/errors.md."""
    conflict = errors.Conflict(
        "the key 'refund-17' was used before with another request", key="refund-17", diff=_SAMPLE_DIFF
    )
    rows = "\n".join(
        f"| `{code}` | {status} | {'yes' if retryable else 'no'} | {title} | {f'`{kind}`' if kind else 'HTTP only'} |"
        for code, status, retryable, title, kind in table()
    )
    return _PAGE.format(sample=json.dumps(problem_of(conflict).body(), indent=2), rows=rows)


_SAMPLE_DIFF: Final = [{"op": "replace", "path": "/amount", "value": 2000}]

if __name__ == "__main__":
    sys.stdout.write(page())
