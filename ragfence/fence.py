"""`Fence`: what `ragfence.open()` returns. A facade over the engine, the guards and the audit."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ragfence._progress import without_stop_iteration
from ragfence.core.key_strategies import KeyStrategy
from ragfence.core.operations import Operation, key_from_text
from ragfence.core.policy import Policy
from ragfence.engine.claim_block import BatchedClaims, ClaimBlock
from ragfence.engine.engine import Engine
from ragfence.engine.expiry import Purged
from ragfence.engine.hydration import Progress
from ragfence.engine.inspector import Inspector
from ragfence.engine.journal import JournalReconciled
from ragfence.engine.lock import Lock
from ragfence.engine.once import Key, OnceDecorator, OnceOptions, Recovered
from ragfence.engine.releases import Released, ReleaseQuery
from ragfence.errors import ObjectsRequired, ValidationError

if TYPE_CHECKING:
    from ragfence.audit.audit import Audit
    from ragfence.audit.statistics import FenceStats, Recount
    from ragfence.core.aliases import Hit
    from ragfence.documents.documents import Documents
    from ragfence.indexes.aliases import Aliases
    from ragfence.indexes.indexes import Indexes
    from ragfence.indexes.search import Search
    from ragfence.steps import Run


class Fence:
    """One effect per key: an operation takes effect once, and every caller gets the same receipt.

    Leases give one *effect* per key, not one execution: an owner that is frozen past the end of its lease may run the
    same effect as its successor, but only one of the two is sealed, and both get that receipt.
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
        """Ingests documents, once per doc_id and content. Needs an object store."""
        from ragfence.documents.documents import DocumentHooks, Documents

        hooks = DocumentHooks(
            indexes=lambda: self.indexes.maintenance(),
            bury=self._bury,
            find_revisions=lambda concerned: self.audit.revision_facts(concerned),
        )
        return Documents(self._engine, hooks=hooks)

    @cached_property
    def indexes(self) -> Indexes:
        """Builds indexes of all live documents, once per INDEX_HASH. Needs an object store."""
        from ragfence.indexes.indexes import Indexes

        self._needs_objects("indexes")
        return Indexes(self._engine, self.documents)

    @cached_property
    def aliases(self) -> Aliases:
        """The names used in searches; each points at a sealed build. Needs an object store."""
        from ragfence.indexes.aliases import Aliases

        self._needs_objects("aliases")
        indexes = self.indexes
        return Aliases(
            self._engine, indexes.builds_log, indexes.backend, indexes.embedder_for, coverage_of=indexes.coverage
        )

    def search(self, alias: str, text: str, *, k: int = 5) -> list[Hit]:
        """Returns the k nearest snippets of the build that the alias points at, nearest first, with citations.

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
        formerly: Key | KeyStrategy | None = None,
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
        """Decorates a function, sync or async, so that it runs once per key. A call returns a `Receipt`.

        Args:
            kind: The kind of operation; policies set TTLs and retries per kind.
            key: Takes the arguments; returns a source_id, (source_id, revision), or an `Operation`.
            formerly: The key before a change of keys: an operation is new only if both keys say so. Remove it when
                the lifetime of the kind has passed since every process uses `key`; see docs/key-migration.md.
            payload: Takes the arguments; returns the payload that calls with the same key must share. By default, the
                arguments.
            source_type: What the source_id names, for example "jira".
            action: What is done, for example "create".
            index_hash: The index that the operation belongs to, if any.
            effect_id: Takes the result; returns the effect_id of the receipt.
            recover: Called with the arguments when an earlier attempt may have taken effect. Returns
                `Recovered(result)` if it has, None if not. May be async if the function is.
            terminal: Exceptions that make a failure final: it is sealed, and replayed to every later call.
            wait_s: How long to wait for another owner of the key. By default, the policy's deadline.
            on_store_error: "open" runs the function even if the fence store is down, and journals its effect.

        Raises:
            Conflict: The key is known with another payload.
            Stale: A higher sequence of the source is already applied.
            InFlight: Another owner is still running the effect.
            EffectFailed: The effect was sealed as a failure.
            Quarantined: Too many attempts failed.

        >>> @fence.once(kind="ticket", key=lambda req: (req["id"], req["version"]))  # doctest: +SKIP
        ... def create_ticket(req): ...
        """
        if on_store_error not in (None, "open", "closed"):
            raise ValidationError(f'on_store_error is "open" or "closed", not {on_store_error!r}')
        options = OnceOptions(
            kind=kind,
            key=key,
            formerly=formerly,
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
        """Claims an operation for a `with` or `async with` block; see `ClaimBlock`.

        Args:
            operation: What to execute once.
            payload: What calls with the same key must share.
            wait_s: How long to wait for another owner of the key. By default, the policy's deadline.
            verdict: Do not raise `Conflict`, `Stale`, `InFlight` and `Quarantined`, but set `op.decision` and
                `op.error`.
            event_id: Stored in the decision rows, as are correlation_id and route.

        >>> with fence.claim(operation, payload=body) as op:  # doctest: +SKIP
        ...     if op.is_new:
        ...         op.seal(result=apply(body))
        """
        request = self._engine.request(
            operation, payload, event_id=event_id, correlation_id=correlation_id, route=route
        )
        return self._engine.claim(request, wait_s=wait_s, verdict=verdict)

    def notify(self, event: object) -> None:
        """Passes an event, such as what became of the messages of a queue, to the listeners of `observe=`."""
        self._engine.notify(event)

    def batched_claims(self) -> BatchedClaims:
        """Claims for an event loop that serves many callers, such as an HTTP server; see `BatchedClaims`."""
        return BatchedClaims(self._engine)

    def run(self, run_id: str) -> Run:
        """The steps of a workflow run, each executed once per input; see `Run`.

        >>> step = fence.run("nightly-2026-11-18")  # doctest: +SKIP
        >>> rows = step("extract", extract, source="s3://bucket/day")  # doctest: +SKIP
        """
        from ragfence.steps import Run

        return Run(self, run_id)

    def lock(self, name: str, *, ttl_s: float = 30.0, wait_s: float = 0.0, timeout_s: float | None = None) -> Lock:
        """A lock, for a `with` or `async with` block, which gets its lease; see `Lock`.

        The heartbeat of this process renews it while the block runs. It expires `ttl_s` after the last renewal, so the
        lock of a process that died is free again by then. Only a system that compares `lease.fence` is safe from a
        holder that was frozen past that.

        Args:
            name: What is locked. Locks of different tenants have nothing to do with each other.
            ttl_s: How long the lock outlives its last renewal, from 0.1 s to a day.
            wait_s: How long to wait for another holder.
            timeout_s: When the platform kills this function, counted from now. `ttl_s` must be below it by a tenth of
                it, and nothing is renewed past that, so that the lock is free once the function was killed.

        Raises:
            InFlight: Another holder has it; `.holder`, `.retry_after_ms` and `.waited_ms` say more.
            LeaseLost: It was lost meanwhile; raised by `lease.check()`, and at the end of the block.

        >>> with fence.lock("reindex:docs", ttl_s=30, wait_s=5) as lease:  # doctest: +SKIP
        ...     write(rows, fence=lease.fence)
        """
        return self._engine.lock(name, ttl_s=ttl_s, wait_s=wait_s, timeout_s=timeout_s)

    def release(self, operation: Operation | str) -> bool:
        """Allows new attempts for a key that is quarantined, stuck, or sealed as a failure.

        A lock is taken from its holder, whose lease is lost at its next renewal.
        Returns False if there is nothing to release. Raises `ValidationError` if the effect was sealed.
        """
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
        """Allows new attempts for all keys that match, for example after an outage that quarantined many.

        Args:
            state: "quarantined", or "released" for keys that were released and have attempts left.
            error: A shell pattern for the code of the last error: "STORE.*".
            kind: Only keys of this kind of operation.
            limit: At most this many keys.
            dry_run: Return the keys and change nothing.

        >>> fence.release_matching(error="STORE.*")  # doctest: +SKIP
        """
        return self._engine.release_matching(ReleaseQuery(state, error, kind), limit=limit, dry_run=dry_run)

    def hydrate(self, progress: Progress | None = None) -> None:
        """Rebuilds the fence store from the object store. This happens automatically when the fence store lost data."""
        self._engine.hydrate(without_stop_iteration(progress) if progress else None)

    def purge_expired(self, limit: int = 1000, *, after: str = "") -> Purged:
        """Removes expired data: up to `limit` records, and those of the next `limit` commits that have expired.

        A purged key is new again. Run this regularly; it may be interrupted anywhere and run by many processes at once.

        >>> purged = fence.purge_expired()  # doctest: +SKIP
        >>> while purged.after:  # doctest: +SKIP
        ...     purged = fence.purge_expired(after=purged.after)
        """
        return self._engine.purge_expired(limit, after)

    def purge_expired_once(self, *, steps: int = 20, limit: int = 1000) -> bool:
        """Runs up to `steps` steps of `purge_expired`, unless another process is doing it: then returns False.

        The rest is left to the next call. `ragfence serve` calls this every hour.
        """
        return self._engine.purge_expired_once(steps, limit)

    def reconcile_journal(self) -> JournalReconciled:
        """Seals the effects that ran while the fence store was down.

        It also happens automatically, in the background, when `once` reaches the store again.
        """
        return self._engine.reconcile_journal()

    def stats(self, since: str = "24h") -> FenceStats:
        """Returns what the fence stores and how many effects it saved, from counters in the fence store.

        The call takes as long with a million documents as with none. `since` is a span (`24h`, `7d`) or a time; it
        limits the decisions, which are counted per hour, for 35 days. Older counts, and those a store has lost, come
        from the ledger.

        >>> stats = fence.stats()  # doctest: +SKIP
        >>> stats.processed, stats.duplicates, stats.hit_rate  # doctest: +SKIP
        """
        from ragfence.audit.statistics import collect_stats

        return collect_stats(self._engine.fences, since, self._recount)

    def close(self) -> None:
        """Closes both stores and stops background work. Any later call raises `StoreClosed`."""
        if "indexes" in self.__dict__:  # a cached property: only if it was used
            self.indexes.close()
        self._engine.close()

    def __enter__(self) -> Fence:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _bury(self, doc_id: str) -> None:
        """Removes a purged document from decision rows and stored requests, and leaves a tombstone."""
        from ragfence.audit.tombstones import Tombstones

        engine = self._engine
        assert engine.objects is not None  # a guard of documents has one
        Tombstones(engine.fences, engine.objects, engine.policy.audit).bury(doc_id)

    def _needs_objects(self, what: str) -> None:
        if self._engine.objects is None:
            raise ObjectsRequired(f"{what}: needs an object store, and this fence was opened without one")

    @cached_property
    def _recount(self) -> Recount | None:
        from ragfence.audit.statistics import Recount

        objects = self._engine.objects
        return Recount(self.tenant, objects) if objects is not None else None

    @cached_property
    def _searching(self) -> Search:
        from ragfence.indexes.search import Search

        self._needs_objects("search")
        indexes = self.indexes
        return Search(self.aliases, indexes.builds_log, indexes.backend, indexes.embedder_for)


def _exceptions(terminal: object) -> tuple[type[Exception], ...]:
    """Checked at once: if a mistake were found only when the effect fails, its key would stay held."""
    kinds = terminal if isinstance(terminal, tuple) else (terminal,)
    for kind in kinds:
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            raise ValidationError(f"terminal= takes exception classes, not {kind!r}", hint="terminal=(ValueError,)")
    return kinds
