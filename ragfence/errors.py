"""Every error ragfence raises, as one tree.

    RagfenceError                       the root; has .code, .hint, .retryable
    +-- TerminalError                   trying again cannot help
    |   +-- ValidationError             bad input; nothing was stored
    |   |   +-- NotJson                 a payload or result that canonical JSON cannot hold
    |   |   +-- DocumentInvalid         a document that cannot be ingested; .doc_id names it
    |   |   +-- PruneTooLarge           a sync would retract more documents than the policy lets go at once
    |   |   +-- ResultTooBig            a result above what the stores may hold
    |   |   +-- PolicyError             a policy or setting that would break a guarantee
    |   |   +-- UnknownStore            a store URL nobody can open
    |   |   +-- EmbedderUnknown         a name of an embedder that nobody registered
    |   |   +-- AliasUnknown            an alias that was never swapped
    |   +-- Conflict                    the same key with another payload; never applied
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
    |   +-- FormatTooNew                stored by a newer ragfence than this one
    |   +-- FormatCorrupt               stored bytes that are no record
    |   +-- ApiRefused                  an HTTP server's answer that is none of the above; also an ApiError
    +-- TransientError                  trying again may help
        +-- InFlight                    somebody else performs the operation right now
        +-- LeaseLost                   the lease ran out or was taken over; stop working
        +-- FencedOut                   the seal came too late; .receipt is the winner's, if there is one
        +-- SealUncertain               the effect happened, its seal could not be written; .receipt holds it
        +-- StoreUnavailable            the store did not answer
        +-- CommitUncertain             the object store did not say whether the commit happened
        +-- NotReady                    the fence store is being rebuilt from the object store
        +-- EmbedderUnavailable         the endpoint of an embedder did not answer, however often it was asked
        +-- SnapshotGone                documents of a corpus that was to be built have been purged or compacted away
        +-- ApiUnavailable              an HTTP server did not answer, or asks to come again; also an ApiError

Raise `TerminalError` (or a subclass of your own) inside an effect to seal the failure: every later call gets it
replayed. Any other exception releases the key, so that the next call tries again.
"""

from __future__ import annotations

from typing import Any, ClassVar

from ragfence._pickling import rebuild


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


class NotJson(ValidationError):
    code = "VALIDATION.not_json"
    default_hint = "JSON is UTF-8, with each name once in an object, and with finite numbers"


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


class UnknownStore(ValidationError):
    code = "VALIDATION.unknown_store"


class EmbedderUnknown(ValidationError):
    code = "VALIDATION.embedder_unknown"


class AliasUnknown(ValidationError):
    code = "VALIDATION.alias_unknown"
    default_hint = "`ragfence alias` lists those there are; `ragfence swap ALIAS INDEX_HASH` makes one"


class Conflict(TerminalError):
    """The key is known with another payload. `diff` is the RFC 6902 patch, where the policy keeps payloads."""

    code = "CONFLICT.idempotency.payload_mismatch"
    default_hint = "use a new key (source_id or revision) for other content, or send the payload of the first call"
    carries = frozenset({"key", "diff", "receipt"})


class Stale(TerminalError):
    code = "CONFLICT.sequence.stale"
    default_hint = "a newer revision of this source is already applied; drop this one"
    carries = frozenset({"key", "sequence", "newest"})


class EffectFailed(TerminalError):
    code = "EFFECT.failed"
    default_hint = (
        "this outcome is final for the key; `fence.release(key)` or `ragfence release KEY` lets it be tried again"
    )
    carries = frozenset({"key", "receipt"})


class Quarantined(TerminalError):
    code = "QUARANTINED"
    default_hint = (
        "find out why the effect keeps failing (`ragfence explain KEY`), then `fence.release(key)` or "
        "`ragfence release KEY` gives it new attempts"
    )
    carries = frozenset({"key", "attempt", "error_code"})


class NestedClaim(TerminalError):
    code = "USAGE.nested_claim"
    default_hint = "this key is being performed further up in the same call; it would wait for itself for ever"


class Unsupported(TerminalError):
    code = "USAGE.unsupported"


class ObjectsRequired(TerminalError):
    code = "USAGE.objects_required"
    default_hint = "open the fence with an object store: ragfence.open(store, objects='s3://bucket/prefix')"


class EmbedderInvalid(TerminalError):
    code = "EMBEDDER.invalid"


class NotSealed(TerminalError):
    code = "INDEX.not_sealed"
    default_hint = "build it first: fence.indexes.build() or `ragfence build`"
    carries = frozenset({"key", "index_hash"})


class BuildRetired(NotSealed):
    code = "INDEX.retired"
    default_hint = "build it again: fence.indexes.build() or `ragfence build`"


class BuildMissing(NotSealed):
    code = "INDEX.missing"
    default_hint = "somebody dropped it behind ragfence's back: build it again, then swap to it"


class BuildUnverified(TerminalError):
    code = "INDEX.unverified"
    default_hint = "nothing was sealed; build it again, and look at the backend if it happens twice"
    carries = frozenset({"key", "checks"})


class GateFailed(TerminalError):
    """`report` is the list of gates, each with its numbers."""

    code = "ALIAS.gate_failed"
    default_hint = "the alias was not moved; mend the index, or force the swap with a reason"
    carries = frozenset({"key", "report", "alias", "index_hash"})


class AliasMoved(TerminalError):
    code = "ALIAS.moved"
    default_hint = "look where it is now (`ragfence alias`), and decide again"
    carries = frozenset({"key", "alias", "current", "generation"})


class DocumentMoved(TerminalError):
    code = "DOCUMENT.moved"
    default_hint = "read it again, and decide again"
    carries = frozenset({"key", "doc_id", "current"})


class StoreUnsafe(TerminalError):
    code = "DEPENDENCY.unsafe"


class StoreAuth(TerminalError):
    code = "AUTH.store"


class FormatTooNew(TerminalError):
    code = "FORMAT.too_new"
    default_hint = "upgrade ragfence on this machine; nothing was changed"


class FormatCorrupt(TerminalError):
    code = "FORMAT.corrupt"
    default_hint = (
        "nothing was changed; `fence.hydrate()` or `ragfence hydrate` rebuilds a fence store from its objects"
    )


class InFlight(TransientError):
    code = "IN_FLIGHT"
    default_hint = "try again later, or let the claim wait with wait_s"
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


class StoreUnavailable(TransientError):
    code = "DEPENDENCY.unavailable"
    default_hint = "check that the store is running and reachable, then try again"


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


class ApiUnavailable(ApiError, TransientError):
    code = "API.unavailable"
