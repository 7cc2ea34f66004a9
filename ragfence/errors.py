"""Every error ragfence raises, as one tree.

    RagfenceError                       the root; has .code, .hint, .retryable
    +-- TerminalError                   trying again cannot help
    |   +-- ValidationError             invalid input; nothing was stored
    |   |   +-- NotJson                 a payload or result that canonical JSON cannot represent
    |   |   +-- InsecureUrl             an API key would be sent over plain http to another host
    |   |   +-- DocumentInvalid         a document cannot be ingested; .doc_id names it
    |   |   +-- PruneTooLarge           a sync would retract more documents than the policy allows at once
    |   |   +-- ResultTooBig            a result is larger than the policy or the store allows
    |   |   +-- PolicyError             a policy or setting would break a guarantee
    |   |   |   +-- ContentSecretError  the secret of `content_hash: hmac` is missing, too short or wrong
    |   |   +-- UnknownStore            a store URL that ragfence cannot open
    |   |   +-- EmbedderUnknown         no embedder is registered under the name
    |   |   +-- AliasUnknown            the alias was never swapped
    |   +-- WebhookUnverified           the signature of a webhook is missing, wrong or too old
    |   +-- Conflict                    the key is known with another payload; never applied
    |   |   +-- OriginConflict          other content for a doc_id that another source owns; names both
    |   +-- Stale                       the sequence is older than the one already applied
    |   +-- EffectFailed                the effect was sealed as a failure; this is its replay
    |   +-- Quarantined                 too many attempts failed; waits for `release`
    |   +-- NestedClaim                 a claim inside the effect of its own key: it would deadlock
    |   +-- Unsupported                 this version of ragfence does not support it
    |   +-- ObjectsRequired             the call needs an object store, and the fence has none
    |   +-- EmbedderInvalid             an embedder's vectors cannot be used: wrong count, dimension or revision, NaN
    |   +-- NotSealed                   the index was never sealed; no alias may point at it
    |   |   +-- BuildRetired            it was sealed, and gc has retired it since
    |   |   +-- BuildMissing            it is sealed, but its rows are missing in the backend
    |   +-- BuildUnverified             the rows read back differ from those built; nothing was sealed
    |   +-- GateFailed                  a gate rejected the swap; .report has the numbers
    |   +-- AliasMoved                  the alias is not at `expect`; .current is where it is
    |   +-- DocumentMoved               the document is not at version `expect`; .current is its version
    |   +-- StoreUnsafe                 the store cannot keep the guarantees (evicting Redis, S3 without If-None-Match)
    |   +-- StoreAuth                   the store refused the credentials
    |   +-- TableGone                   the table of a sync was deleted, and a newer one exists
    |   +-- FormatTooNew                stored by a newer ragfence than this one
    |   +-- FormatCorrupt               stored bytes are not a valid record
    |   |   +-- SegmentUnreadable       a segment of the log is truncated, damaged or missing; .segment names it
    |   +-- ApiRefused                  another error response of an HTTP server; also an ApiError
    |       +-- ApiUnauthorized         401: the API key is missing, unknown, expired or revoked
    |       +-- ApiForbidden            403: the API key lacks a scope; any of .needed_scopes would do
    +-- TransientError                  trying again may help
        +-- InFlight                    another caller is executing the operation now
        +-- LeaseLost                   the lease expired or was taken over; stop working
        +-- FencedOut                   another attempt won before the seal; .receipt is the winner's, if known
        +-- SealUncertain               the effect happened, but its seal could not be written; .receipt holds it
        +-- TransportUnavailable        a queue did not answer
        +-- QueueFull                   a queue is above its high-water mark; nothing was sent
        +-- StoreUnavailable            the store did not answer
        |   +-- StoreClosed             this process closed the fence; open it again
        +-- CommitUncertain             the object store did not say whether the commit happened
        +-- NotReady                    the fence store is being rebuilt from the object store
        +-- EmbedderUnavailable         the endpoint of an embedder did not answer, after all retries
        +-- SnapshotGone                documents of the corpus being built were purged or compacted
        +-- ApiUnavailable              an HTTP server did not answer, or said to retry; also an ApiError

Raise `TerminalError` (or a subclass of your own) inside an effect to seal the failure: every later call replays it.
Any other exception releases the key, so that the next call tries again. Errors can be pickled, with their details.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal


def rebuild(kind: type[Any], message: str, hint: str, details: dict[str, Any]) -> Any:
    return kind(message, hint=hint, **details)


class Hint(str):
    """What to do next, worded for each surface.

    The text itself is for Python, `cli` is for the terminal and `http` for a caller of the HTTP API. Without them, the
    text is the same everywhere.

    >>> hint = Hint("build it first: fence.indexes.build()", cli="build it first: `ragfence build`")
    >>> hint, hint_on("cli", hint), hint_on("cli", "make room")
    ('build it first: fence.indexes.build()', 'build it first: `ragfence build`', 'make room')
    """

    cli: str
    http: str

    def __new__(cls, python: str, *, cli: str = "", http: str = "") -> Hint:
        made = super().__new__(cls, python)
        made.cli = cli or python
        made.http = http or made.cli
        return made

    def after(self, text: str) -> Hint:
        """Returns the hint with `text` before it."""
        return Hint(f"{text}{self}", cli=f"{text}{self.cli}", http=f"{text}{self.http}")


def hint_on(surface: Literal["cli", "http"], hint: str) -> str:
    """Returns the wording of a hint for this surface."""
    return str(getattr(hint, surface)) if isinstance(hint, Hint) else hint


class RagfenceError(Exception):
    """The base class of all errors. `code` is stable and machine-readable; `hint` says what to do next."""

    code: ClassVar[str] = "ERROR"
    retryable: ClassVar[bool] = False
    default_hint: ClassVar[str] = ""

    def __init__(self, message: str = "", *, hint: str | None = None, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.hint = self.default_hint if hint is None else hint
        self.details: dict[str, Any] = details

    def __getattr__(self, name: str) -> Any:
        # `error.receipt`, `error.key`: what was attached when the error was raised, or None.
        if name in type(self).carries:
            return self.__dict__.get("details", {}).get(name)
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    carries: ClassVar[frozenset[str]] = frozenset({"key"})

    def __str__(self) -> str:
        text = self.message or type(self).__name__
        return f"{text} [{self.code}]" + (f"\n  -> {self.hint}" if self.hint else "")

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild, (type(self), self.message, self.hint, self.details)


class TerminalError(RagfenceError):
    code = "TERMINAL"


class TransientError(RagfenceError):
    code = "TRANSIENT"
    retryable = True


class ValidationError(TerminalError, ValueError):
    code = "VALIDATION"


class WebhookUnverified(TerminalError):
    """A webhook whose signature, timestamp or challenge was not accepted; nothing in it was read."""

    code = "AUTH.webhook"
    default_hint = "check the secret of the provider, and that the body arrives as it was sent"


class NotJson(ValidationError):
    code = "VALIDATION.not_json"
    default_hint = "use UTF-8, finite numbers, and each name once per object"


class InsecureUrl(ValidationError):
    code = "VALIDATION.insecure_url"
    default_hint = Hint(
        "use https://, or pass allow_http=True (RAGFENCE_ALLOW_HTTP=1) if no one else can read the network",
        cli="use https://, or set RAGFENCE_ALLOW_HTTP=1 if no one else can read the network",
    )


class DocumentInvalid(ValidationError):
    code = "VALIDATION.document"
    carries = frozenset({"key", "doc_id"})


class PruneTooLarge(ValidationError):
    """`wanted` of `live` documents would be retracted; `doc_ids` are the first of them."""

    code = "VALIDATION.prune_too_large"
    carries = frozenset({"key", "doc_ids", "wanted", "live"})


class ResultTooBig(ValidationError):
    code = "VALIDATION.result_too_big"


class PolicyError(ValidationError):
    code = "VALIDATION.policy"


class ContentSecretError(PolicyError):
    code = "VALIDATION.content_secret"
    default_hint = "name a file or an environment variable that holds it, as content_secret in the policy"


class UnknownStore(ValidationError):
    code = "VALIDATION.unknown_store"


class EmbedderUnknown(ValidationError):
    code = "VALIDATION.embedder_unknown"


class AliasUnknown(ValidationError):
    code = "VALIDATION.alias_unknown"
    default_hint = Hint(
        "fence.aliases.names() lists all aliases; fence.aliases.swap(alias, index_hash) creates one",
        cli="`ragfence alias` lists all aliases; `ragfence swap ALIAS INDEX_HASH` creates one",
        http="GET /v1/aliases lists all aliases; POST /v1/aliases/ALIAS:swap creates one",
    )


class Conflict(TerminalError):
    """The key is known with another payload. `diff` is the RFC 6902 patch, if the policy stores payloads."""

    code = "CONFLICT.idempotency.payload_mismatch"
    default_hint = Hint(
        "use a new key (source_id or revision) for other content, or send the payload of the first call",
        http="use a new Idempotency-Key for another request, or send the request of the first call",
    )
    carries = frozenset({"key", "diff", "receipt"})


class OriginConflict(Conflict):
    """`origin` has other content for `doc_id` than `owner`, the source that owns the document."""

    code = "CONFLICT.origin"
    default_hint = Hint(
        "give one of the sources a prefix (prefix=), leave the document out of one of them, or replace the other's "
        "content (take_over=True)",
        cli="give one of the sources a prefix (--prefix), leave the file out of one of them, or replace the other's "
        "content (--take-over)",
        http="use another doc_id, or change the document in the source that owns it",
    )
    carries = frozenset({"key", "diff", "receipt", "doc_id", "origin", "owner"})


class Stale(TerminalError):
    code = "CONFLICT.sequence.stale"
    default_hint = "a newer revision of this source is already applied; discard this one"
    carries = frozenset({"key", "sequence", "newest"})


class EffectFailed(TerminalError):
    code = "EFFECT.failed"
    default_hint = Hint(
        "this outcome is final for the key; fence.release(key) allows another attempt",
        cli="this outcome is final for the key; `ragfence release KEY` allows another attempt",
        http="this outcome is final for the key; POST /v1/admin/keys/KEY:release allows another attempt",
    )
    carries = frozenset({"key", "receipt"})


class Quarantined(TerminalError):
    code = "QUARANTINED"
    default_hint = Hint(
        "find out why the effect keeps failing (`ragfence explain KEY`), then allow new attempts: fence.release(key)",
        cli="find out why the effect keeps failing (`ragfence explain KEY`), then allow new attempts: `ragfence "
        "release KEY`",
        http="find out why the effect keeps failing (on the server: `ragfence explain KEY`), then allow new "
        "attempts: POST /v1/admin/keys/KEY:release",
    )
    carries = frozenset({"key", "attempt", "error_code"})


class NestedClaim(TerminalError):
    code = "USAGE.nested_claim"
    default_hint = "this key is being executed further up the call stack; the claim would wait for itself forever"


class Unsupported(TerminalError):
    code = "USAGE.unsupported"


class ObjectsRequired(TerminalError):
    code = "USAGE.objects_required"
    default_hint = Hint(
        "open the fence with an object store: ragfence.open(store, objects='s3://bucket/prefix')",
        cli="name an object store: --objects s3://bucket/prefix, or RAGFENCE_OBJECTS",
        http="start the server with an object store: --objects s3://bucket/prefix, or RAGFENCE_OBJECTS",
    )


class EmbedderInvalid(TerminalError):
    code = "EMBEDDER.invalid"


class NotSealed(TerminalError):
    code = "INDEX.not_sealed"
    default_hint = Hint(
        "build it first: fence.indexes.build()",
        cli="build it first: `ragfence build`",
        http="build it first: POST /v1/builds",
    )
    carries = frozenset({"key", "index_hash"})


class BuildRetired(NotSealed):
    code = "INDEX.retired"
    default_hint = Hint(
        "build it again: fence.indexes.build()",
        cli="build it again: `ragfence build`",
        http="build it again: POST /v1/builds",
    )


class BuildMissing(NotSealed):
    code = "INDEX.missing"
    default_hint = Hint(
        "gc drops builds that no alias needs, so resolve the alias again (fence.aliases.resolve(name)) and use the "
        "build it names; if that is this one, its rows were deleted outside ragfence: build it again, then swap to it",
        cli="gc drops builds that no alias needs, so check where the alias points now (`ragfence alias NAME`) and use "
        "that build; if it is this one, its rows were deleted outside ragfence: build it again, then swap to it",
        http="gc drops builds that no alias needs, so check where the alias points now (GET /v1/aliases/NAME) and use "
        "that build; if it is this one, its rows were deleted outside ragfence: build it again, then swap to it",
    )


class BuildUnverified(TerminalError):
    code = "INDEX.unverified"
    default_hint = "nothing was sealed; build it again, and check the backend if it happens twice"
    carries = frozenset({"key", "checks"})


class GateFailed(TerminalError):
    """`report` is the list of gates, each with its numbers."""

    code = "ALIAS.gate_failed"
    default_hint = Hint(
        "the alias was not moved; repair the index, or force the swap: swap(..., force=True, reason=...)",
        cli="the alias was not moved; repair the index, or force the swap: --force --reason TEXT",
        http='the alias was not moved; repair the index, or force the swap: {"force": true, "reason": "..."}',
    )
    carries = frozenset({"key", "report", "alias", "index_hash"})


class AliasMoved(TerminalError):
    code = "ALIAS.moved"
    default_hint = Hint(
        "check where it points now (fence.aliases.resolve(name)), and decide again",
        cli="check where it points now (`ragfence alias NAME`), and decide again",
        http="check where it points now (GET /v1/aliases/NAME), and decide again",
    )
    carries = frozenset({"key", "alias", "current", "generation"})


class DocumentMoved(TerminalError):
    code = "DOCUMENT.moved"
    default_hint = "read the document again, and decide again"
    carries = frozenset({"key", "doc_id", "current"})


class StoreUnsafe(TerminalError):
    code = "DEPENDENCY.unsafe"


class StoreAuth(TerminalError):
    code = "AUTH.store"


class TableGone(TerminalError):
    code = "TABLE.gone"
    default_hint = "ingest the source again: that rewrites its table, with the same snippet_ids"


REHYDRATE = Hint(
    "nothing was changed; fence.hydrate() rebuilds the fence store from its objects",
    cli="nothing was changed; `ragfence hydrate` rebuilds the fence store from its objects",
    http="nothing was changed; on the server, `ragfence hydrate` rebuilds the fence store from its objects",
)
"""The hint for damage in the fence store, which is only an index of the object store."""


class FormatTooNew(TerminalError):
    code = "FORMAT.too_new"
    default_hint = "upgrade ragfence on this machine; nothing was changed"


class FormatCorrupt(TerminalError):
    code = "FORMAT.corrupt"
    default_hint = "nothing was changed; restore the damaged data from a backup"


class SegmentUnreadable(FormatCorrupt):
    """`segment` is the name of the object."""

    code = "FORMAT.segment_unreadable"
    default_hint = Hint(
        "restore this object from a backup; only documents with rows in it are affected. Without a backup, "
        "fence.documents.verify(repair=True, accept_loss=True) gives up what only this object holds: then ingest the "
        "sources again",
        cli="restore this object from a backup; only documents with rows in it are affected. Without a backup, "
        "`ragfence verify --repair --accept-loss` gives up what only this object holds: then ingest the sources again",
        http="the object has to be restored from a backup on the server; only documents with rows in it are affected. "
        "Without a backup, `ragfence verify --repair --accept-loss` gives up what only this object holds: then ingest "
        "the sources again",
    )
    carries = frozenset({"key", "segment"})


class InFlight(TransientError):
    code = "IN_FLIGHT"
    default_hint = Hint(
        "try again later, or let the claim wait with wait_s",
        cli="try again later",
        http="try again later, with the same key",
    )
    carries = frozenset({"key", "retry_after_ms", "waited_ms", "holder"})


class LeaseLost(TransientError):
    code = "LEASE.lost"
    default_hint = "stop: another owner may be executing this operation now"


class FencedOut(TransientError):
    code = "LEASE.fenced_out"
    default_hint = "another attempt won; use its receipt"
    carries = frozenset({"key", "receipt"})


class SealUncertain(TransientError):
    code = "LEASE.seal_uncertain"
    default_hint = "the effect happened; call again to get what was sealed"
    carries = frozenset({"key", "receipt", "committed"})


class TransportUnavailable(TransientError):
    """A queue did not answer. Sending the same messages again, with the same event ids, is safe."""

    code = "DEPENDENCY.queue"
    default_hint = "try again; a message that was sent twice takes effect once"


class QueueFull(TransientError):
    """A queue is above its high-water mark; nothing was sent. `.retry_after_ms` says when to try again."""

    code = "RATE_LIMIT.queue"
    carries = TransientError.carries | {"retry_after_ms"}
    default_hint = "send less, or run more consumers"


class StoreUnavailable(TransientError):
    code = "DEPENDENCY.unavailable"
    default_hint = "check that the store is running and reachable, then try again"


class StoreClosed(StoreUnavailable):
    """Never a reason to run an effect without a fence: `on_store_error: open` is for stores that are down."""

    code = "DEPENDENCY.closed"
    default_hint = Hint(
        "close a fence once all its work is done; ragfence.open(...) opens it again",
        cli="run the command again",
        http="the server is shutting down: try again, with the same key",
    )


class CommitUncertain(TransientError):
    code = "DEPENDENCY.commit_uncertain"
    default_hint = "call again: an effect that was committed is found and not repeated"


class NotReady(TransientError):
    code = "DEPENDENCY.not_ready"
    default_hint = "the fence store is being rebuilt from the object store; try again"


class EmbedderUnavailable(TransientError):
    code = "EMBEDDER.unavailable"
    default_hint = "check the endpoint and its limits, then try again: finished embeddings are kept"


class SnapshotGone(TransientError):
    code = "INDEX.snapshot_gone"
    default_hint = "build again: the current corpus has another INDEX_HASH"


class ApiError(Exception):
    """An error response of an HTTP server, or no response; `.status` is its status. Raised as one of the subclasses."""

    carries: ClassVar[frozenset[str]] = frozenset({"key", "status", "retry_after_s", "status_url"})

    def __init__(self, message: str = "", *, hint: str | None = None, **details: Any) -> None:
        super().__init__(message, hint=hint, **details)  # type: ignore[call-arg]  # the next is a RagfenceError
        # Elsewhere a class has one code. Here it comes with the response: a server may send any.
        vars(self)["code"] = str(details.get("code") or type(self).code)  # type: ignore[attr-defined]  # as above


class ApiRefused(ApiError, TerminalError):
    code = "API.refused"


class ApiUnauthorized(ApiRefused):
    """`.code` says why: AUTH.missing, AUTH.invalid, AUTH.expired or AUTH.revoked."""

    code = "API.unauthorized"


class ApiForbidden(ApiRefused):
    code = "API.forbidden"
    carries: ClassVar[frozenset[str]] = ApiError.carries | {"needed_scopes", "scopes"}


class ApiUnavailable(ApiError, TransientError):
    code = "API.unavailable"
