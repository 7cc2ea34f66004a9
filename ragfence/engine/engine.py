"""The engine of one tenant: its stores, its policy, and what turns calls into requests."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ragfence.core.canonical import canonical_json, parse_json
from ragfence.core.operations import Operation
from ragfence.core.policy import Policy
from ragfence.core.records import State
from ragfence.core.rows import END_POSITION, Row, RowKind, context_of
from ragfence.engine.claiming import Claimed
from ragfence.engine.commits import Commits
from ragfence.engine.epochs import Epochs
from ragfence.engine.hydration import EpochWatch, Hydrator, Progress
from ragfence.engine.journal import Journal, Reconciled
from ragfence.engine.once import Once, OnceOptions
from ragfence.engine.performing import Backing, Outcome, Performer, Won
from ragfence.engine.requests import MAX_KEPT_PAYLOAD, Request, fingerprint_of
from ragfence.engine.results import Results
from ragfence.engine.segments import PlainCodec, SegmentLoader
from ragfence.errors import InFlight, RagfenceError, ValidationError
from ragfence.stores.fences import FenceStore
from ragfence.stores.objects import ObjectStore


class Engine:
    def __init__(
        self,
        fences: FenceStore,
        objects: ObjectStore | None,
        policy: Policy,
        *,
        journal: Path,
        owner: str | None = None,
        run_id: str = "",
    ) -> None:
        self.tenant = fences.tenant
        self.fences = fences
        self.objects = objects
        self.policy = policy
        self.redaction = policy.redactor
        self._owner = owner
        self._run_id = run_id
        results = Results(self.tenant, policy, objects)
        self.backing: Backing | None = None
        if objects is not None:
            epochs = Epochs(self.tenant, objects)
            hydrator = Hydrator(fences, epochs, SegmentLoader(objects, PlainCodec()))
            self.backing = Backing(Commits(self.tenant, objects), epochs, hydrator, EpochWatch(fences, epochs))
        self.performer = Performer(fences, self.backing, results, policy)
        self.journal = Journal(journal, self.tenant, results)

    @property
    def owner(self) -> str:
        # Asked for every time: a forked child is another owner.
        return self._owner or f"{socket.gethostname()}:{os.getpid()}"

    def request(
        self,
        operation: Operation,
        payload: object,
        *,
        event_id: str = "",
        correlation_id: str = "",
        route: str = "",
    ) -> Request:
        operation = operation.in_tenant(self.tenant)
        fingerprint, text = fingerprint_of(payload)
        diff_wanted = self.policy.on_conflict.include_diff
        owner = self.owner
        return Request.of(
            operation,
            fingerprint,
            self.policy.for_kind(operation.kind),
            context=context_of(
                operation,
                owner=owner,
                run_id=self._run_id,
                event_id=event_id,
                correlation_id=correlation_id,
                route=route,
            ),
            owner=owner,
            kept_payload=self._kept(text) if diff_wanted else b"",
            diff_wanted=diff_wanted,
        )

    def claim(self, request: Request, *, wait_s: float | None, verdict: bool) -> Claimed:
        wait_ms = None if wait_s is None else int(wait_s * 1000)
        return Claimed(self.performer, request, wait_ms=wait_ms, verdict=verdict)

    def once(self, function: Callable[..., Any], options: OnceOptions) -> Callable[..., Any]:
        return Once(self, function, options).wrap()

    def release(self, operation: Operation) -> bool:
        """New attempts for a key that is quarantined, stuck or sealed as a failure. False: nothing to release."""
        request = self.request(operation, None)
        (held,) = self.fences.read([request.lookup])
        if held.record is not None and held.record.ended:
            if held.record.state is not State.FAILED:
                raise ValidationError(
                    f"{request.key_text} is sealed: its effect happened and cannot be released",
                    hint="another revision makes another key",
                )
            self._end_life(request, "release")
            return True
        return self.fences.pardon([request.lease_ref(bytes(16), epoch=0)])[0]

    def hydrate(self, progress: Progress | None = None) -> None:
        """Rebuilds the fence store from the object store, into a new epoch."""
        if self.backing is None:
            raise ValidationError("this fence has no object store to hydrate from")
        if not self.backing.hydrator.try_hydrate(progress):
            self.backing.hydrator.ensure_ready(progress)

    def reconcile_journal(self) -> Reconciled:
        """Seals what ran while the store was down."""
        sealed: list[str] = []
        doubled: list[str] = []
        left: list[str] = []
        done: set[bytes] = set()
        for entry in self.journal.entries():
            key = entry.operation.key.hex()
            request = self.request(entry.operation, None)
            request = Request.of(
                entry.operation, entry.fingerprint, request.rules, context=request.context, owner=request.owner
            )
            try:
                answer = self.performer.acquire(request, wait_ms=0, token=entry.token)
            except InFlight:
                left.append(key)
                continue
            except RagfenceError as refused:
                if refused.retryable:
                    left.append(key)
                    continue
                doubled.append(key)  # another payload, or a newer sequence: ours happened besides it
                done.add(entry.token)
                continue
            if isinstance(answer, Won):
                answer.journaled = True
                receipt = self.performer.complete(answer, Outcome(entry.effect_id, entry.result))
                (doubled if receipt.flags.fenced_out else sealed).append(key)
            elif self._sealed_by(request, entry.token):
                sealed.append(key)  # an earlier reconciliation got this far
            else:
                doubled.append(key)
            done.add(entry.token)
        if done:
            self.journal.drop(done)
        return Reconciled(tuple(sealed), tuple(doubled), tuple(left))

    def close(self) -> None:
        if self.backing:
            self.backing.watch.stop()
        self.fences.close()
        if self.objects is not None:
            self.objects.close()

    def _sealed_by(self, request: Request, token: bytes) -> bool:
        (held,) = self.fences.read([request.lookup])
        return held.record is not None and held.record.token == token

    def _end_life(self, request: Request, why: str) -> None:
        """The row first, then the object, then the record: whatever is cut off in between is still one life."""
        row = Row(
            token=os.urandom(16),
            position=END_POSITION,
            ts_ms=self.fences.now_ms(),
            kind=RowKind.ENDED,
            key=request.key,
            fingerprint=request.fingerprint,
            error_code=why,
            context=request.context,
        )
        self.fences.record([row])
        if self.backing:
            self.backing.commits.delete(request.operation)
        self.fences.forget([request.key])

    def _kept(self, text: bytes) -> bytes:
        """The payload as it may be stored: redacted, canonical, and not too big."""
        if not text:
            return b""
        kept = canonical_json(self.redaction.redact(parse_json(text)))
        return kept if len(kept) <= MAX_KEPT_PAYLOAD else b""
