"""Every error ragfence raises, as one tree.

    RagfenceError                       the root; has .code, .hint, .retryable
    +-- TerminalError                   trying again cannot help
    |   +-- ValidationError             bad input; nothing was stored
    |   |   +-- NotJson                 a payload or result that canonical JSON cannot hold
    |   |   +-- InsecureUrl             an API key that would be sent over plain http to another host
    |   |   +-- DocumentInvalid         a document that cannot be ingested; .doc_id names it
    |   |   +-- PruneTooLarge           a sync would retract more documents than the policy lets go at once
    |   |   +-- ResultTooBig            a result above what the stores may hold
    |   |   +-- PolicyError             a policy or setting that would break a guarantee
    |   |   |   +-- ContentSecretError  the secret of `content_hash: hmac` is missing, too short, or another one
    |   |   +-- UnknownStore            a store URL nobody can open
    |   |   +-- EmbedderUnknown         a name of an embedder that nobody registered
    |   |   +-- AliasUnknown            an alias that was never swapped
    |   +-- WebhookUnverified           a webhook that nobody with a secret has signed, or signed too long ago
    |   +-- Conflict                    the same key with another payload; never applied
    |   |   +-- OriginConflict          other content under a doc_id that another source owns; names both
    |   +-- Stale                       a sequence older than the one already applied
    |   +-- EffectFailed                the effect was sealed as a failure; this is its replay
    |   +-- Quarantined                 too many attempts; waits for `release`
    |   +-- NestedClaim                 a claim inside the effect of its own key: it would wait for itself
    |   +-- Unsupported                 this version of ragfence does not do that
    |   +-- ObjectsRequired             asked of a fence without an object store
    |   +-- EmbedderInvalid             an embedder whose vectors cannot be used: wrong number, dimension, NaN, revision
    |   +-- NotSealed                   an index that was never sealed; no alias may point at it
    |   |   +-- BuildRetired            it was sealed once, and gc has retired it since
    |   |   +-- BuildMissing            it is sealed, but its rows are not in the backend
    |   +-- BuildUnverified             what was read back is not what was to be built; nothing was sealed
    |   +-- GateFailed                  a gate before the swap; .report has the numbers
    |   +-- AliasMoved                  the alias is not where `expect` says; .current is where it is
    |   +-- DocumentMoved               the document is not at the version that `expect` says; .current is its version
    |   +-- StoreUnsafe                 a store that cannot keep the promise (evicting Redis, S3 without If-None-Match)
    |   +-- StoreAuth                   the store refused the credentials
    |   +-- TableGone                   the table of a sync was deleted, and a newer one has been written
    |   +-- FormatTooNew                stored by a newer ragfence than this one
    |   +-- FormatCorrupt               stored bytes that are no record
    |   |   +-- SegmentUnreadable       a segment of the log is cut off, damaged or missing; .segment names it
    |   +-- ApiRefused                  an HTTP server's answer that is none of the above; also an ApiError
    |       +-- ApiUnauthorized         401: no API key, or one that is unknown, expired or revoked
    |       +-- ApiForbidden            403: the API key lacks a scope; .needed_scopes has those of which one is needed
    +-- TransientError                  trying again may help
        +-- InFlight                    somebody else performs the operation right now
        +-- LeaseLost                   the lease ran out or was taken over; stop working
        +-- FencedOut                   the seal came too late; .receipt is the winner's, if there is one
        +-- SealUncertain               the effect happened, its seal could not be written; .receipt holds it
        +-- TransportUnavailable        a queue did not answer
        +-- QueueFull                   a queue is above its high-water mark; nothing was sent
        +-- StoreUnavailable            the store did not answer
        |   +-- StoreClosed             the fence was closed by this very process; open it again
        +-- CommitUncertain             the object store did not say whether the commit happened
        +-- NotReady                    the fence store is being rebuilt from the object store
        +-- EmbedderUnavailable         the endpoint of an embedder did not answer, however often it was asked
        +-- SnapshotGone                documents of a corpus that was to be built have been purged or compacted away
        +-- ApiUnavailable              an HTTP server did not answer, or asks to come again; also an ApiError

Raise `TerminalError` (or a subclass of your own) inside an effect to seal the failure: every later call gets it
replayed. Any other exception releases the key, so that the next call tries again.

How errors with keyword-only details cross process boundaries.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal


def rebuild(kind: type[Any], message: str, hint: str, details: dict[str, Any]) -> Any:
    return kind(message, hint=hint, **details)


class Hint(str):
    """What to do next, in the words of whoever reads it.

    The text itself is for Python. `cli` is for a terminal, `http` for the caller of the API; a text without them says
    the same everywhere.

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
        """The same, with this text before it."""
        return Hint(f"{text}{self}", cli=f"{text}{self.cli}", http=f"{text}{self.http}")


def hint_on(surface: Literal["cli", "http"], hint: str) -> str:
    """The words of a hint for this surface."""
    return str(getattr(hint, surface)) if isinstance(hint, Hint) else hint


class RagfenceError(Exception):
    """The root. `code` is stable and machine-readable; `hint` says what to do next."""

    code: ClassVar[str] = "ERROR"
    retryable: ClassVar[bool] = False
    default_hint: ClassVar[str] = ""

    def __init__(self, message: str = "", *, hint: str | None = None, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.hint = self.default_hint if hint is None else hint
        self.details: dict[str, Any] = details

    def __getattr__(self, name: str) -> Any:
        # `error.receipt`, `error.key`: whatever the raiser attached, None when it had nothing to attach.
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
    default_hint = "JSON is UTF-8, with each name once in an object, and with finite numbers"


class InsecureUrl(ValidationError):
    code = "VALIDATION.insecure_url"
    default_hint = Hint(
        "use https://, or pass allow_http=True (RAGFENCE_ALLOW_HTTP=1) if nobody else can read the network",
        cli="use https://, or set RAGFENCE_ALLOW_HTTP=1 if nobody else can read the network",
    )


class DocumentInvalid(ValidationError):
    code = "VALIDATION.document"
    carries = frozenset({"key", "doc_id"})


class PruneTooLarge(ValidationError):
    """`wanted` of `live` documents would go; `doc_ids` are the first of them."""

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
        "fence.aliases.names() lists those there are; fence.aliases.swap(alias, index_hash) makes one",
        cli="`ragfence alias` lists those there are; `ragfence swap ALIAS INDEX_HASH` makes one",
        http="GET /v1/aliases lists those there are; POST /v1/aliases/ALIAS:swap makes one",
    )


class Conflict(TerminalError):
    """The key is known with another payload. `diff` is the RFC 6902 patch, where the policy keeps payloads."""

    code = "CONFLICT.idempotency.payload_mismatch"
    default_hint = Hint(
        "use a new key (source_id or revision) for other content, or send the payload of the first call",
        http="use a new Idempotency-Key for another request, or send the request of the first call",
    )
    carries = frozenset({"key", "diff", "receipt"})


class OriginConflict(Conflict):
    """`origin` has other content under `doc_id` than `owner`, the source that the document belongs to."""

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
    default_hint = "a newer revision of this source is already applied; drop this one"
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
        "find out why the effect keeps failing (`ragfence explain KEY`), then fence.release(key) gives it new attempts",
        cli="find out why the effect keeps failing (`ragfence explain KEY`), then `ragfence release KEY` gives it new "
        "attempts",
        http="find out why the effect keeps failing (on the server: `ragfence explain KEY`), then POST "
        "/v1/admin/keys/KEY:release gives it new attempts",
    )
    carries = frozenset({"key", "attempt", "error_code"})


class NestedClaim(TerminalError):
    code = "USAGE.nested_claim"
    default_hint = "this key is being performed further up in the same call; it would wait for itself for ever"


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
        "gc drops what no alias needs, so resolve the alias again (fence.aliases.resolve(name)) and use the build it "
        "names; if that is this one, its rows were deleted outside ragfence: build it again, then swap to it",
        cli="gc drops what no alias needs, so look where the alias points now (`ragfence alias NAME`) and use that "
        "build; if it is this one, its rows were deleted outside ragfence: build it again, then swap to it",
        http="gc drops what no alias needs, so look where the alias points now (GET /v1/aliases/NAME) and use that "
        "build; if it is this one, its rows were deleted outside ragfence: build it again, then swap to it",
    )


class BuildUnverified(TerminalError):
    code = "INDEX.unverified"
    default_hint = "nothing was sealed; build it again, and look at the backend if it happens twice"
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
        "look where it is now (fence.aliases.resolve(name)), and decide again",
        cli="look where it is now (`ragfence alias NAME`), and decide again",
        http="look where it is now (GET /v1/aliases/NAME), and decide again",
    )
    carries = frozenset({"key", "alias", "current", "generation"})


class DocumentMoved(TerminalError):
    code = "DOCUMENT.moved"
    default_hint = "read it again, and decide again"
    carries = frozenset({"key", "doc_id", "current"})


class StoreUnsafe(TerminalError):
    code = "DEPENDENCY.unsafe"


class StoreAuth(TerminalError):
    code = "AUTH.store"


class TableGone(TerminalError):
    code = "TABLE.gone"
    default_hint = "ingest the source again: that writes its table anew, with the same snippet_ids"


REHYDRATE = Hint(
    "nothing was changed; fence.hydrate() rebuilds the fence store from its objects",
    cli="nothing was changed; `ragfence hydrate` rebuilds the fence store from its objects",
    http="nothing was changed; on the server, `ragfence hydrate` rebuilds the fence store from its objects",
)
"""the hint for damage in the fence store, which is only an index of the object store"""


class FormatTooNew(TerminalError):
    code = "FORMAT.too_new"
    default_hint = "upgrade ragfence on this machine; nothing was changed"


class FormatCorrupt(TerminalError):
    code = "FORMAT.corrupt"
    default_hint = "nothing was changed; restore what is damaged from a backup"


class SegmentUnreadable(FormatCorrupt):
    """`segment` is the name of the object."""

    code = "FORMAT.segment_unreadable"
    default_hint = Hint(
        "restore this object from a backup; only documents that have rows in it are concerned. Without a backup, "
        "fence.documents.verify(repair=True, accept_loss=True) gives up what only this object knows: then ingest the "
        "sources again",
        cli="restore this object from a backup; only documents that have rows in it are concerned. Without a backup, "
        "`ragfence verify --repair --accept-loss` gives up what only this object knows: then ingest the sources again",
        http="the object has to be restored from a backup on the server; only documents that have rows in it are "
        "concerned. Without a backup, `ragfence verify --repair --accept-loss` gives up what only this object knows: "
        "then ingest the sources again",
    )
    carries = frozenset({"key", "segment"})


class InFlight(TransientError):
    code = "IN_FLIGHT"
    default_hint = Hint(
        "try again later, or let the claim wait with wait_s",
        cli="try again later",
        http="try again later, with the same key",
    )
    carries = frozenset({"key", "retry_after_ms", "waited_ms"})


class LeaseLost(TransientError):
    code = "LEASE.lost"
    default_hint = "stop: somebody else may be performing this operation now"


class FencedOut(TransientError):
    code = "LEASE.fenced_out"
    default_hint = "another attempt won; use its receipt"
    carries = frozenset({"key", "receipt"})


class SealUncertain(TransientError):
    code = "LEASE.seal_uncertain"
    default_hint = "the effect happened; call again to learn what was sealed"
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
    """Never a reason to perform an effect without a fence: `on_store_error: open` is about stores that are away."""

    code = "DEPENDENCY.closed"
    default_hint = Hint(
        "close a fence when nothing is under way any more; ragfence.open(...) opens it again",
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
    default_hint = "check the endpoint and its limits, then try again: what was embedded is kept"


class SnapshotGone(TransientError):
    code = "INDEX.snapshot_gone"
    default_hint = "build again: the corpus of now has another INDEX_HASH"


class ApiError(Exception):
    """What an HTTP server answered, or that it did not; `.status` is the answer's. One of the two below."""

    carries: ClassVar[frozenset[str]] = frozenset({"key", "status", "retry_after_s", "status_url"})

    def __init__(self, message: str = "", *, hint: str | None = None, **details: Any) -> None:
        super().__init__(message, hint=hint, **details)  # type: ignore[call-arg]  # the next is a RagfenceError
        # What is one of a class elsewhere in the tree is one of the answer here: there is no end of codes.
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
