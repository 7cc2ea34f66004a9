"""Arbitrary effects through `Runner`: plain and sequenced operations whose every execution is told apart."""

from __future__ import annotations

from itertools import count
from typing import Any

from ragfence.core.operations import Operation
from ragfence.core.policy import Policy
from ragfence.core.receipts import Receipt
from ragfence.engine.commits import Commits
from ragfence.engine.epochs import Epochs
from ragfence.engine.notes import EffectNotes
from ragfence.engine.requests import Request, fingerprint_of
from ragfence.engine.results import Results
from ragfence.engine.runner import EffectOutcome, Runner, RunnerStores, WonClaim
from ragfence.errors import Conflict, FencedOut, RagfenceError, Stale, TransientError
from tests.machine.history import Event
from tests.machine.lineages import Lineages
from tests.machine.observed import Observed, Watcher
from tests.machine.world import LEASE_MS, TENANT, Worker, World

POLICY = Policy.from_mapping({"lease": {"ttl_s": LEASE_MS / 1000, "max_attempts": 1000, "seal_retry_s": 0}})


class _NoWatch:
    def start(self) -> None: ...


class OperationWorld(World):
    def __init__(self, lineages: Lineages) -> None:
        super().__init__(lineages)
        self.receipts: dict[str, list[Receipt]] = {}
        self.executions: list[str] = []
        self.events: list[tuple[str, Event]] = []
        self.watcher = Watcher()
        self._numbers = count(1)
        self.observe()

    def observe(self) -> None:
        primary = self.lineages.primary
        if not isinstance(primary.store, Observed):
            primary.store = Observed(primary.store, self.watcher)
        self.watcher.primary = primary.store

    def perform(self, source: str, revision: str, sequence: int | None, payload: str) -> Worker:
        operation = Operation(kind="ticket", source_id=source, revision=revision, sequence=sequence, tenant=TENANT)
        event = Event("write", revision, sequence, self.now)
        self.events.append((source, event))

        def work(worker: Worker) -> None:
            runner = self._runner(worker)
            rules = POLICY.for_kind("ticket")
            request = Request.of(operation, fingerprint_of(payload)[0], rules, context=b"{}")
            try:
                receipt = self._perform(worker, runner, request)
            except (Conflict, Stale):
                event.ended, event.outcome = self.now, "stale"
            except TransientError:
                event.outcome = "error"
            else:
                event.ended, event.outcome = self.now, "applied" if receipt.is_new else "answered"
                self.receipts.setdefault(request.key_text, []).append(receipt)

        return self.spawn(work)

    def _perform(self, worker: Worker, runner: Runner, request: Request) -> Receipt:
        while True:
            answer = runner.acquire(request, wait_ms=10**12)
            if isinstance(answer, Receipt):
                return answer
            execution = f"{request.key_text[:6]}#{next(self._numbers)}"
            worker.pause()
            self.executions.append(request.key_text)
            try:
                return self._complete(runner, answer, execution)
            except FencedOut as lost:
                if lost.receipt is not None:
                    return lost.receipt

    def _complete(self, runner: Runner, won: WonClaim, execution: str) -> Receipt:
        try:
            return runner.complete(won, EffectOutcome(result=b'j"' + execution.encode() + b'"'))
        except FencedOut:
            raise
        except RagfenceError:
            runner.release(won, "ERROR")
            raise

    def _runner(self, worker: Worker) -> Runner:
        fences, objects = self.fences_of(worker), self.objects_of(worker)
        results = Results(TENANT, POLICY, objects)
        backing: Any = None
        if not self.lineages.primary.store.solo:
            hydrator = self.hydrator_of(worker)
            backing = RunnerStores(
                Commits(TENANT, objects),
                EffectNotes(TENANT, objects),
                Epochs(TENANT, objects),
                hydrator,
                _NoWatch(),  # type: ignore[arg-type]
            )
        return Runner(fences, backing, results, POLICY, sleep=lambda _: self._breathe(worker))

    def check(self) -> None:
        while self.late:
            self.late.pop()()
        for key, receipts in self.receipts.items():
            for receipt in receipts:
                assert receipt == receipts[0], f"two receipts for {key}: {receipts[0]} and {receipt}"
        self._check_sequences()

    def _check_sequences(self) -> None:
        """Nothing is performed after something newer was acknowledged.

        An answer may be old where servers were split: one that was left behind still knows what it sealed.
        """
        told = [(source, event) for source, event in self.events if event.outcome in ("applied", "answered")]
        for source, event in told:
            for other, later in told:
                if other != source or event.sequence is None or later.sequence is None or event.ended is None:
                    continue
                if later.outcome == "answered" and self.lineages.split:
                    continue
                if later.began > event.ended:
                    assert later.sequence >= event.sequence, f"{later} was applied after {event}"
