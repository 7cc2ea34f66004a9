"""Locks through `Lock`: whatever fails, each holder has a higher number, and nobody gets in beside a holder."""

from __future__ import annotations

from typing import Any

from ragfence.core.decisions import Granted, Mode
from ragfence.core.layout import State
from ragfence.engine.lock import NO_PAYLOAD, Lock, lock_operation, lock_rules
from ragfence.engine.requests import Request
from ragfence.errors import LeaseLost, TransientError
from ragfence.stores.fences import Lookup
from tests.machine.history import Event
from tests.machine.observed import Observed, Watcher
from tests.machine.operations import POLICY, OperationWorld
from tests.machine.world import LEASE_MS, TENANT, Worker


class ObservedLocks(Observed):
    """Also what no store may do with a lock."""

    def claim(self, claims: Any) -> Any:
        before = self._store.read([Lookup(claim.key, claim.mode) for claim in claims])
        verdicts = super().claim(claims)
        now_ms = self._store.now_ms()
        for claim, held, verdict in zip(claims, before, verdicts, strict=True):
            if claim.mode is Mode.LOCK and isinstance(verdict, Granted):
                assert verdict.record.attempt == 1, "a lock counts attempts"
                other = held.record is not None and held.record.token != claim.token
                assert not (other and held.record.held_at(now_ms)), "two holders of one lock"
        return verdicts

    def renew(self, leases: Any) -> Any:
        return self._only_by_the_holder(leases, lambda: self._store.renew(leases))

    def release(self, leases: Any, error: str = "", **how: Any) -> Any:
        return self._only_by_the_holder(leases, lambda: self._store.release(leases, error, **how))

    def _only_by_the_holder(self, leases: Any, act: Any) -> Any:
        before = self._store.read([Lookup(lease.key, lease.mode) for lease in leases])
        answers = act()
        after = self._store.read([Lookup(lease.key, lease.mode) for lease in leases])
        for lease, held, done, left in zip(leases, before, answers, after, strict=True):
            if lease.mode is Mode.LOCK and held.record is not None and held.record.token != lease.token:
                assert not done, "a stranger renewed or released a lock"
                assert left.record == held.record, "a stranger changed a lock"
        return answers


class LockWorld(OperationWorld):
    def observe(self) -> None:
        if not hasattr(self, "watcher"):
            self.watcher = Watcher()
        primary = self.lineages.primary
        if not isinstance(primary.store, ObservedLocks):
            inner = primary.store._store if isinstance(primary.store, Observed) else primary.store
            primary.store = ObservedLocks(inner, self.watcher)
        self.watcher.primary = primary.store

    def hold(self, name: str) -> Worker:
        event = Event("write", name, None, self.now)
        self.events.append((name, event))

        def work(worker: Worker) -> None:
            operation = lock_operation(name).in_tenant(TENANT)
            rules = lock_rules(POLICY.for_kind("lock"), LEASE_MS / 1000, None)
            request = Request.of(operation, NO_PAYLOAD, rules, context=b"{}")
            assert request.mode is Mode.LOCK
            try:
                with Lock(self._runner(worker), request, wait_ms=10**12):
                    for _ in range(3):
                        worker.pause()
            except LeaseLost:
                event.outcome = "lost"
            except TransientError:
                event.outcome = "error"
            else:
                event.ended, event.outcome = self.now, "released"

        return self.spawn(work)

    def check(self) -> None:
        """Nothing stays of a lock that was released.

        What is left belongs to somebody who died or lost a reply, or is of an older copy of the store.
        """
        left = [each for each in self.lineages.primary.store.scan() if each.record.state is State.LOCKED]
        clean = not self.lineages.split and all(event.outcome == "released" for _, event in self.events)
        assert not (clean and left), f"{len(left)} locks were left behind"
