"""`Fence`: what `ragfence.open()` returns. A facade; the work is in the engine, the guards and the surfaces."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ragfence.core.key_strategies import KeyStrategy
from ragfence.core.operations import Operation, key_from_text
from ragfence.core.policy import Policy
from ragfence.engine.claim_block import BatchedClaims, ClaimBlock
from ragfence.engine.engine import Engine
from ragfence.engine.expiry import Purged
from ragfence.engine.hydration import Progress
from ragfence.engine.inspector import Inspector
from ragfence.engine.journal import JournalReconciled
from ragfence.engine.once import Key, OnceDecorator, OnceOptions, Recovered
from ragfence.engine.releases import Released, ReleaseQuery
from ragfence.errors import ObjectsRequired, ValidationError

if TYPE_CHECKING:
    from ragfence.audit.audit import Audit
    from ragfence.audit.recount import Recount
    from ragfence.audit.statistics import FenceStats
    from ragfence.core.aliases import Hit
    from ragfence.documents.documents import Documents
    from ragfence.indexes.aliases import Aliases
    from ragfence.indexes.indexes import Indexes
    from ragfence.indexes.search import Search


class Fence:
    """One effect per key: whatever is claimed here happens once, and everybody gets the same receipt.

    Leases give one *effect* per key, not one execution: an owner that is frozen past its lease may execute again
    what its successor executes, but only one of them is sealed, and both are answered with that one.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def tenant(self) -> str:
        """The tenant that the fence was opened for. It is part of every key and of every stored name."""
        return self._engine.tenant

    @property
    def policy(self) -> Policy:
        """The effective policy."""
        return self._engine.policy

    @cached_property
    def inspector(self) -> Inspector:
        """The stores and records of this tenant, for reading; see `Inspector`."""
        return Inspector(self._engine)

    @cached_property
    def documents(self) -> Documents:
        """Documents, ingested once per doc_id and content. Needs an object store."""
        from ragfence.documents.documents import DocumentHooks, Documents

        hooks = DocumentHooks(
            indexes=lambda: self.indexes.maintenance(),
            bury=self._bury,
            find_revisions=lambda concerned: self.audit.told_of_documents(concerned),
        )
        return Documents(self._engine, hooks=hooks)

    @cached_property
    def indexes(self) -> Indexes:
        """Indexes of all live documents, built once per INDEX_HASH. Needs an object store."""
        from ragfence.indexes.indexes import Indexes

        self._needs_objects("indexes")
        return Indexes(self._engine, self.documents)

    @cached_property
    def aliases(self) -> Aliases:
        """Names that searches use: each points at a sealed build. Needs an object store."""
        from ragfence.indexes.aliases import Aliases

        self._needs_objects("aliases")
        indexes = self.indexes
        return Aliases(
            self._engine, indexes.builds_log, indexes.backend, indexes.embedder_for, coverage_of=indexes.coverage
        )

    def search(self, alias: str, text: str, *, k: int = 5) -> list[Hit]:
        """The k nearest snippets of the build that the alias points at, the nearest first, ready to be cited.

        >>> fence.search("docs", "how do leases expire?")[0].doc_id  # doctest: +SKIP
        """
        return self._searching.search(alias, text, k)

    @property
    def audit(self) -> Audit:
        """Decision rows and what follows from them: histories, savings, conflicts, anomalies, and the auditor."""
        from ragfence.audit.audit import Audit

        return Audit(self._engine.fences, self._engine.objects, self._engine.policy)

    def once(
        self,
        *,
        kind: str,
        key: Key | KeyStrategy,
        payload: Callable[..., object] | None = None,
        source_type: str = "",
        action: str = "",
        index_hash: str = "",
        effect_id: Callable[[Any], str] | None = None,
        recover: Callable[..., Recovered | Awaitable[Recovered | None] | None] | None = None,
        terminal: type[Exception] | tuple[type[Exception], ...] = (),
        wait_s: float | None = None,
        on_store_error: str | None = None,
    ) -> OnceDecorator:
        """Performs a function, sync or async, once per key; calling it returns a `Receipt`.

        key             makes (source_id, revision), a source_id, or an `Operation` out of the arguments
        payload         makes what is compared between calls of the same key; the arguments, unless given
        effect_id       makes the receipt's effect_id out of the result
        recover         called with the arguments when an earlier attempt may have happened; returns
                        `Recovered(result)` if it did, None if it did not; may be async if the function is
        terminal        exceptions whose failure is final: sealed, and replayed to every later call
        wait_s          how long to wait for somebody else's effect; the policy's deadline, unless given
        on_store_error  "open" runs the effect even when the fence store is down, and journals it

        >>> @fence.once(kind="ticket", key=lambda req: (req["id"], req["version"]))  # doctest: +SKIP
        ... def create_ticket(req): ...
        """
        if on_store_error not in (None, "open", "closed"):
            raise ValidationError(f'on_store_error is "open" or "closed", not {on_store_error!r}')
        options = OnceOptions(
            kind=kind,
            key=key,
            payload=payload,
            source_type=source_type,
            action=action,
            index_hash=index_hash,
            effect_id=effect_id,
            recover=recover,
            terminal=_exceptions(terminal),
            wait_s=wait_s,
            on_store_error=on_store_error,
        )
        return self._engine.once(options)

    def claim(
        self,
        operation: Operation,
        *,
        payload: object = None,
        wait_s: float | None = None,
        verdict: bool = False,
        event_id: str = "",
        correlation_id: str = "",
        route: str = "",
    ) -> ClaimBlock:
        """A block that performs an operation once; see `Claimed`. Also for `async with`.

        With `verdict=True` a conflict, a stale sequence and an operation in flight are not raised: `op.decision` and
        `op.error` tell.
        """
        request = self._engine.request(
            operation, payload, event_id=event_id, correlation_id=correlation_id, route=route
        )
        return self._engine.claim(request, wait_s=wait_s, verdict=verdict)

    def batched_claims(self) -> BatchedClaims:
        """Claims for an event loop that serves many callers, such as an HTTP server; see `BatchedClaims`."""
        return BatchedClaims(self._engine)

    def release(self, operation: Operation | str) -> bool:
        """New attempts for a key that is quarantined, stuck, or sealed as a failure. False: nothing to release."""
        if isinstance(operation, str):
            operation = self.audit.operation_of(key_from_text(operation))
        return self._engine.release(operation)

    def release_matching(
        self,
        *,
        state: str = "quarantined",
        error: str = "*",
        kind: str | None = None,
        limit: int = 10_000,
        dry_run: bool = False,
    ) -> Released:
        """New attempts for all keys that match, up to `limit`: after an outage that quarantined many, say.

        state    "quarantined", or "released" for keys that were given back and have attempts left
        error    a pattern, as in the shell, for the code of the last error: "STORE.*"
        kind     only keys of this kind of operation
        dry_run  names the keys and changes nothing

        >>> fence.release_matching(error="STORE.*")  # doctest: +SKIP
        """
        return self._engine.release_matching(ReleaseQuery(state, error, kind), limit=limit, dry_run=dry_run)

    def hydrate(self, progress: Progress | None = None) -> None:
        """Rebuilds the fence store from the object store. Happens by itself when the store forgot something."""
        self._engine.hydrate(progress)

    def purge_expired(self, limit: int = 1000, *, after: str = "") -> Purged:
        """Removes what has outlived its lifetime: up to `limit` records, and what is over of the next `limit` commits.

        A key that was purged is new again. Run it now and then; it may be stopped anywhere and run by many at once.

        >>> purged = fence.purge_expired()  # doctest: +SKIP
        >>> while purged.after:  # doctest: +SKIP
        ...     purged = fence.purge_expired(after=purged.after)
        """
        return self._engine.purge_expired(limit, after)

    def purge_expired_once(self, *, steps: int = 20, limit: int = 1000) -> bool:
        """As `purge_expired`, up to so many steps in a row, unless another process is at it: then False.

        What is left is for the next time. `ragfence serve` calls it every hour.
        """
        return self._engine.purge_expired_once(steps, limit)

    def reconcile_journal(self) -> JournalReconciled:
        """Seals the effects that ran while the fence store was down.

        That happens by itself, too, in the background, when `once` reaches the store again.
        """
        return self._engine.reconcile_journal()

    def stats(self, since: str = "24h") -> FenceStats:
        """What the fence holds and how often it spared an effect, from counts that the store keeps.

        It takes as long with a million documents as with none. `since` is a span (`24h`, `7d`) or a time, for the
        decisions; they are counted by the hour, for 35 days. What a store forgot is counted in the ledger.

        >>> stats = fence.stats()  # doctest: +SKIP
        >>> stats.processed, stats.duplicates, stats.hit_rate  # doctest: +SKIP
        """
        from ragfence.audit.statistics import collect_stats

        return collect_stats(self._engine.fences, since, self._recounting)

    def close(self) -> None:
        """Releases leases and connections. Any later call raises `StoreClosed`."""
        if "indexes" in self.__dict__:  # a cached property that was used
            self.indexes.close()
        self._engine.close()

    def __enter__(self) -> Fence:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _bury(self, doc_id: str) -> None:
        """What a purge leaves of the decision rows of a document, and of the requests that sent it."""
        from ragfence.audit.tombstones import Tombstones

        engine = self._engine
        assert engine.objects is not None  # a guard of documents has one
        Tombstones(engine.fences, engine.objects, engine.policy.audit).bury(doc_id)

    def _needs_objects(self, what: str) -> None:
        if self._engine.objects is None:
            raise ObjectsRequired(f"{what}: needs an object store, and this fence was opened without one")

    @cached_property
    def _recounting(self) -> Recount | None:
        from ragfence.audit.recount import Recount

        objects = self._engine.objects
        return Recount(self.tenant, objects) if objects is not None else None

    @cached_property
    def _searching(self) -> Search:
        from ragfence.indexes.search import Search

        self._needs_objects("search")
        indexes = self.indexes
        return Search(self.aliases, indexes.builds_log, indexes.backend, indexes.embedder_for)


def _exceptions(terminal: object) -> tuple[type[Exception], ...]:
    """Checked now: a mistake found only when the effect fails would leave its key held."""
    kinds = terminal if isinstance(terminal, tuple) else (terminal,)
    for kind in kinds:
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            raise ValidationError(f"terminal= takes exception classes, not {kind!r}", hint="terminal=(ValueError,)")
    return kinds
