"""The engine of one tenant: its stores and policy, requests made from calls, and the upkeep of keys."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from ragfence.core.canonical import canonical_json, canonical_payload, parse_json
from ragfence.core.decision_rows import context_of
from ragfence.core.decisions import Mode
from ragfence.core.layout import NO_TOKEN, State
from ragfence.core.operations import Operation
from ragfence.core.policy import Policy
from ragfence.core.receipts import Receipt
from ragfence.core.records import KeyRecord
from ragfence.engine.claim_block import ClaimBlock
from ragfence.engine.commits import Commits
from ragfence.engine.content_hash import ContentHash, Secret
from ragfence.engine.epochs import Epochs
from ragfence.engine.expiry import Expiry, Purged, row_for_end
from ragfence.engine.hydration import EpochWatch, Hydrator, Progress
from ragfence.engine.journal import Journal, JournalEntry, JournalReconciled
from ragfence.engine.lock import NO_PAYLOAD, Lock, lock_operation, lock_rules, wait_ms_of
from ragfence.engine.notes import EffectNotes
from ragfence.engine.once import MigratingOnce, Once, OnceDecorator, OnceOptions
from ragfence.engine.refusals import Refusal, code_of
from ragfence.engine.releases import Released, ReleaseQuery, release_matching
from ragfence.engine.requests import MAX_KEPT_PAYLOAD, Request, acting_key, fingerprint_of
from ragfence.engine.results import Results
from ragfence.engine.runner import EffectOutcome, Runner, RunnerStores, WonClaim
from ragfence.engine.segment_log import Codec, PlainCodec, SegmentLoader
from ragfence.errors import (
    Conflict,
    FencedOut,
    ObjectsRequired,
    RagfenceError,
    Stale,
    TransientError,
    ValidationError,
)
from ragfence.stores.fences import FenceStore
from ragfence.stores.objects import ObjectStore

PURGE_LOCK = "purge-expired"
PURGE_LOCK_MS = 60_000
CLOSING_S = 5.0
"""How long `close` waits for the journal to be reconciled."""
_log = logging.getLogger("ragfence")


class Engine:
    def __init__(
        self,
        fences: FenceStore,
        objects: ObjectStore | None,
        policy: Policy,
        *,
        journal: Path,
        codec: Codec | None = None,
        secret: Secret | None = None,
        owner: str | None = None,
        run_id: str = "",
        correlation_id: str = "",
        route: str = "",
    ) -> None:
        """Args:
        fences: The fence store, which names the tenant.
        objects: The object store, if there is one.
        policy: The rules of the tenant.
        journal: The folder for effects that ran while the fence store was down.
        codec: Reads the segments that a guard has written.
        secret: Finds the secret of a tenant with `content_hash: hmac`, when it is needed.
        owner: Names this process in records and rows. By default, host and process id.
        run_id: Stored in the decision rows, as are correlation_id and route.
        """
        self.tenant = fences.tenant
        self.fences = fences
        self.objects = objects
        self.policy = policy
        self.content_hash = ContentHash(
            self.tenant, objects, policy.content_hash, secret, also=policy.content_hash_also
        )
        self.redaction = policy.redactor
        self._owner = owner
        self.run_id = run_id
        self.correlation_id = correlation_id
        self.route = route
        results = Results(self.tenant, policy, objects)
        self.backing: RunnerStores | None = None
        if objects is not None:
            epochs = Epochs(self.tenant, objects)
            hydrator = Hydrator(fences, epochs, SegmentLoader(objects, codec or PlainCodec()))
            commits, notes = Commits(self.tenant, objects), EffectNotes(self.tenant, objects)
            self.backing = RunnerStores(commits, notes, epochs, hydrator, EpochWatch(fences, epochs))
        self.runner = Runner(fences, self.backing, results, policy)
        self.journal = Journal(journal, self.tenant, results)
        self._reconciling = threading.Lock()
        self._settling_journal = threading.Lock()
        self._reconciler: threading.Thread | None = None

    @property
    def owner(self) -> str:
        # Computed every time: a forked child is another owner.
        return self._owner or f"{_host()}:{os.getpid()}"

    def request(
        self,
        operation: Operation,
        payload: object,
        *,
        event_id: str = "",
        correlation_id: str = "",
        route: str = "",
        kept: object = None,
        include_diff: bool | None = None,
    ) -> Request:
        """Makes a request of an operation.

        `kept` is the part of the payload that may be stored for the diff of a later conflict; by default, all of it.
        `include_diff` says whether a conflict shows the difference; by default, the policy does.
        """
        operation = operation.in_tenant(self.tenant)
        fingerprint, text = fingerprint_of(payload, self.content_hash.key())
        diff_wanted = self.policy.on_conflict.include_diff if include_diff is None else include_diff
        if diff_wanted and kept is not None:
            text = canonical_payload(kept)
        owner = self.owner
        return Request.of(
            operation,
            fingerprint,
            self.policy.for_kind(operation.kind),
            context=self._context(operation, owner, event_id, correlation_id, route),
            owner=owner,
            kept_payload=self._kept(text) if diff_wanted else b"",
            diff_wanted=diff_wanted,
            store_tells_conflicts=self.backing is None,
        )

    def with_call(self, request: Request, *, correlation_id: str, route: str) -> Request:
        """The same request, made by another call: its decision rows name that call."""
        context = self._context(request.operation, request.owner, "", correlation_id, route)
        return request._replace(context=context)

    def _context(self, operation: Operation, owner: str, event_id: str, correlation_id: str, route: str) -> bytes:
        return context_of(
            operation,
            owner=owner,
            run_id=self.run_id,
            event_id=event_id,
            correlation_id=correlation_id or self.correlation_id,
            route=route or self.route,
            # As text: the row is the only place that stores it, and 0 is a sequence too.
            sequence="" if operation.sequence is None else str(operation.sequence),
            api_key=acting_key.get(),
        )

    def claim(self, request: Request, *, wait_s: float | None, verdict: bool, repeatable: bool = False) -> ClaimBlock:
        """Claims a request. `repeatable`: the effect may run again without harm, so an outage uses up no attempt."""
        wait_ms = None if wait_s is None else int(wait_s * 1000)
        return ClaimBlock(self.runner, request, wait_ms=wait_ms, verdict=verdict, repeatable=repeatable)

    def lock(self, name: str, *, ttl_s: float, wait_s: float, timeout_s: float | None) -> Lock:
        request = self.request(lock_operation(name), None)
        rules = lock_rules(request.rules, ttl_s, timeout_s)
        return Lock(self.runner, request._replace(fingerprint=NO_PAYLOAD, rules=rules), wait_ms=wait_ms_of(wait_s))

    def once(self, options: OnceOptions) -> OnceDecorator:
        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            made = Once if options.formerly is None else MigratingOnce
            return made(self, function, options).wrap()

        return cast(OnceDecorator, decorate)

    def release(self, operation: Operation) -> bool:
        """Allows new attempts for a key that is quarantined, stuck or failed. False: there is nothing to release.

        A lock is taken from its holder.
        """
        request = self.request(operation, None)
        ended = self._ended_record(request)
        failed = ended is not None and ended.state is State.FAILED
        if ended is not None and failed:
            self._end_life(request, ended, "release")
        # A pending record too: if its effect was committed it will be healed, if not it gets new attempts.
        (reset,) = self.fences.reset_attempts([request.lease_ref(NO_TOKEN, epoch=0)])
        if ended is not None and not failed and not reset:
            raise ValidationError(
                f"{request.key_text} is sealed: its effect happened and cannot be released",
                hint="another revision makes another key",
            )
        return reset or failed

    def release_matching(self, query: ReleaseQuery, *, limit: int, dry_run: bool) -> Released:
        """Does the same for all pending keys that match a query; see `releases`."""
        if self.backing:
            self.backing.hydrator.ensure_ready()
        return release_matching(self.fences, self.policy, query, limit=limit, dry_run=dry_run)

    def hydrate(self, progress: Progress | None = None) -> None:
        """Rebuilds the fence store from the object store, into a new epoch."""
        if self.backing is None:
            raise ObjectsRequired("there is nothing to hydrate from: this fence was opened without an object store")
        if not self.backing.hydrator.try_hydrate(progress):
            self.backing.hydrator.ensure_ready(progress)

    def purge_expired(self, limit: int, after: str) -> Purged:
        """Removes expired data; see `expiry`."""
        if limit < 1:
            raise ValidationError(f"limit must be at least 1, not {limit}")
        records = self.fences.purge_expired(limit)
        if self.backing is None:
            return Purged(records, objects=0, scanned=0, after="")
        expiry = Expiry(self.fences, self.backing, self.policy, owner=self.owner, run_id=self.run_id)
        return expiry.purge_next(records, limit, after)

    def note_refusals(self, refusals: Sequence[Refusal]) -> None:
        """Called by a guard with what it refused before any claim; `InstrumentedEngine` overrides it."""

    def notify(self, event: object) -> None:
        """Called by a guard with an event of its own; `InstrumentedEngine` passes it to the listeners."""

    def purge_expired_once(self, steps: int, limit: int) -> bool:
        """Runs up to `steps` steps under a lock. False: another process has it."""
        token = secrets.token_hex(8)
        if not self.fences.lock(PURGE_LOCK, token, PURGE_LOCK_MS):
            return False
        try:
            after = ""
            for _ in range(steps):
                purged = self.purge_expired(limit, after)
                after = purged.after
                if not after and purged.records < limit:
                    break
                if not self.fences.lock(PURGE_LOCK, token, PURGE_LOCK_MS):
                    break
        finally:
            with contextlib.suppress(TransientError):
                self.fences.unlock(PURGE_LOCK, token)
        return True

    def reconcile_in_background(self) -> None:
        """Seals the journaled effects in one background thread of the process, now that the store answers again."""
        if not self.journal.has_entries():
            return
        with self._reconciling:
            if self._reconciler is not None and self._reconciler.is_alive():
                return
            self._reconciler = threading.Thread(target=self._reconcile_all, name="ragfence-journal", daemon=True)
            self._reconciler.start()

    def _reconcile_all(self) -> None:
        try:
            done = self.reconcile_journal()
        except RagfenceError as error:  # the next call tries again
            _log.warning("the journal could not be reconciled: %s", error)
            return
        if done.doubled:
            _log.error("effects that ran twice, since the fence store was down: %s", ", ".join(done.doubled))

    def reconcile_journal(self) -> JournalReconciled:
        """Seals the effects that ran while the store was down; one thread of the process at a time."""
        with self._settling_journal:
            return self._settle_journal()

    def _settle_journal(self) -> JournalReconciled:
        settled: dict[str, list[str]] = {"sealed": [], "doubled": [], "left": []}
        done: set[bytes] = set()
        for entry in self.journal.entries():
            outcome = self._reconcile(entry)
            settled[outcome].append(entry.operation.key.hex())
            if outcome != "left":
                done.add(entry.token)
        if done:
            self.journal.drop(done)
        return JournalReconciled(**{name: tuple(keys) for name, keys in settled.items()})

    def close(self) -> None:
        if self._reconciler is not None and self._reconciler is not threading.current_thread():
            self._reconciler.join(CLOSING_S)
        if self.backing:
            self.backing.watch.stop()
            self.backing.notes.flush()
        self.fences.close()
        if self.objects is not None:
            self.objects.close()

    def _reconcile(self, entry: JournalEntry) -> Literal["sealed", "doubled", "left"]:
        request = self.request(entry.operation, None)._replace(fingerprint=entry.fingerprint)
        won: WonClaim | None = None
        try:
            answer = self.runner.acquire(request, wait_ms=0, token=entry.token)
            if isinstance(answer, Receipt):
                # An earlier reconciliation may have got this far.
                return "sealed" if self._sealed_by(request, entry.token) else "doubled"
            won = answer
            won.journaled = True
            receipt = self.runner.complete(won, EffectOutcome(entry.effect_id, entry.result))
            return "doubled" if receipt.flags.fenced_out else "sealed"
        except (Conflict, Stale):
            return "doubled"  # another payload, or a newer sequence: our effect happened in addition
        except FencedOut as lost:
            return "left" if lost.receipt is None else "doubled"
        except BaseException as unsettled:
            if won is not None:
                self.runner.release(won, code_of(unsettled))
            if not isinstance(unsettled, RagfenceError):
                raise
            # A store that is down or refuses the login, a lease, a quarantine: nothing is known to be doubled.
            return "left"

    def _sealed_by(self, request: Request, token: bytes) -> bool:
        (held,) = self.fences.read([request.lookup])
        return held.record is not None and held.record.token == token

    def _ended_record(self, request: Request) -> KeyRecord | None:
        """Returns the ended record of a key, even if only the object store has it. None for documents."""
        if request.mode is Mode.DOCUMENT:
            return None
        if self.backing:
            self.backing.hydrator.ensure_ready()
        (held,) = self.fences.read([request.lookup])
        if held.record is not None and held.record.ended:
            return held.record
        commit = self.backing.commits.find(request.operation) if self.backing else None
        return commit.record() if commit else None

    def _end_life(self, request: Request, ended: KeyRecord, why: str) -> None:
        """Ends the life of a key. The row comes first: if a crash cuts the rest off, it is still one life."""
        now_ms = self.fences.now_ms()
        self.fences.record([row_for_end(request.key, ended, why=why, now_ms=now_ms, context=request.context)])
        if self.backing:
            self.backing.commits.delete(request.operation, self.backing.notes.name(request.operation))
        self.fences.forget([request.key])

    def _kept(self, text: bytes) -> bytes:
        """Returns the payload as it may be stored: redacted and canonical; empty if it is too large."""
        if not text:
            return b""
        kept = canonical_json(self.redaction.redact(parse_json(text)))
        return kept if len(kept) <= MAX_KEPT_PAYLOAD else b""


@functools.cache
def _host() -> str:
    return socket.gethostname()
