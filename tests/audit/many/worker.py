"""A process that decides, and one that drains. Both are killed at any moment, so they write down all that happens.

A worker writes a line before it asks and another when it was answered, into a file that ragfence knows nothing of, and
goes on only then. Every life of a worker is a run of its own in the rows; a claim has an event_id besides. A worker
ends with 0 when its turns are done, with 1 after an error that no caller should see, with 2 when its patience ran out.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import ragfence
from ragfence.audit import drain as draining
from ragfence.core.receipts import Receipt
from ragfence.engine import crash_points
from ragfence.errors import Conflict, FencedOut, InFlight, RagfenceError, Stale
from tests.audit.many.plan import CLAIM, DOCUMENTS, MOVE, ONCE, Ask, DrainerJob, Turn, WorkerJob
from tests.chaos.worker import ANSWERED, BROKEN, GAVE_UP, Lines, OutOfPatience
from tests.documents.attack.corpus import Paragraphs

PATIENCE_S = 120.0
"""for one turn"""
DRAIN_PAUSE_S = 0.05
REFUSALS = {Conflict: "conflict", Stale: "stale", InFlight: "in_flight"}


class LedgerWorker:
    def __init__(self, job: WorkerJob) -> None:
        self._job = job
        self._lines = Lines(job.evidence)
        self._dice = random.Random()
        self._calls = 0
        self._fence = ragfence.open(
            job.store, objects=job.objects, tenant=job.tenant, run_id=job.run_id, policy=self._policy()
        )
        self._documents = self._fence.documents.using(chunker=Paragraphs())
        self._once = self._fence.once(kind=ONCE, key=lambda source, body: source)(self._effect)

    def _policy(self) -> ragfence.Policy:
        return ragfence.Policy.from_mapping(
            {
                "lease": {"ttl_s": self._job.lease_s, "max_attempts": 1000, "seal_retry_s": 5.0},
                "wait": {"deadline_s": 20.0},
                # With diffs the row of a conflict is written by the caller, without them by the store.
                "on_conflict": {"include_diff": self._job.number % 2 == 1},
            }
        )

    def run(self) -> int:
        job = self._job
        try:
            for at, turn in enumerate(job.plan.turns()[job.number]):
                if at >= job.first_turn:
                    self._patiently(at, turn)
            self._fence.close()
            return ANSWERED
        except OutOfPatience:
            return GAVE_UP
        except BaseException:
            self._lines.add(unexpected=traceback.format_exc())
            return BROKEN

    def _patiently(self, at: int, turn: Turn) -> None:
        """Until every ask of the turn has an answer. An error that says "try again" is one more call."""
        left = list(turn.asks)
        give_up_at = time.monotonic() + PATIENCE_S
        while left:
            self._calls += 1
            self._lines.add(call=self._calls, turn=at, how=turn.how, asked=left)
            try:
                left = self._ingest(left) if turn.how == DOCUMENTS else self._answer(turn, left[0])
            except RagfenceError as error:
                if not error.retryable:
                    raise
                self._lines.add(call=self._calls, error=error.code)
            if left and time.monotonic() >= give_up_at:
                raise OutOfPatience
            time.sleep(self._dice.uniform(0.01, 0.05) if left else 0.0)

    def _answer(self, turn: Turn, ask: Ask) -> list[Ask]:
        try:
            receipt = self._once(ask.source, ask.body) if turn.how == ONCE else self._claim(turn, ask)
        except (Conflict, Stale, InFlight) as refused:
            self._lines.add(call=self._calls, answers=[[ask.source, ask.body, REFUSALS[type(refused)], "", None, {}]])
            return []
        self._lines.add(call=self._calls, answers=[_told(ask, receipt)])
        return []

    def _claim(self, turn: Turn, ask: Ask) -> Receipt:
        operation = ragfence.Operation(
            kind=CLAIM if turn.how == CLAIM else MOVE, source_id=ask.source, sequence=turn.sequence
        )
        wait_s = None if turn.patient else 0.0
        event_id = f"{self._job.run_id}/{self._calls}"
        with self._fence.claim(operation, payload=ask.body, wait_s=wait_s, event_id=event_id) as op:
            if op.is_new:
                with contextlib.suppress(FencedOut):  # the receipt is then that of the winner, if there is one
                    op.seal(result=self._effect(ask.source, ask.body))
        return op.receipt

    def _effect(self, source: str, body: int) -> str:
        if self._dice.random() < 0.25:  # long enough for others to meet it
            time.sleep(self._dice.uniform(0.0, self._job.effect_s))
        return uuid.uuid4().hex

    def _ingest(self, asks: list[Ask]) -> list[Ask]:
        sent = [ragfence.Document(ask.source, f"{ask.source} {ask.body}\n\nThe same, always.") for ask in asks]
        receipts = self._documents.ingest_many(sent)
        told = list(zip(asks, receipts, strict=True))
        self._lines.add(call=self._calls, answers=[_told(ask, receipt) for ask, receipt in told])
        return [ask for ask, receipt in told if receipt.failure is not None]


def _told(ask: Ask, receipt: Receipt) -> list[Any]:
    failed = receipt.failure["code"] if receipt.failure else None
    flags = {name: value for name, value in asdict(receipt.flags).items() if value and name != "attempt"}
    outcome = [*receipt.snippet_ids] if receipt.snippet_ids else receipt.result
    return [ask.source, ask.body, receipt.decision, receipt.key, failed or [receipt.effect_id, outcome], flags]


class LedgerDrainer:
    """Drains as if nobody else did: its lock runs out at once, since nothing may rest on that."""

    def __init__(self, job: DrainerJob) -> None:
        self._job = job
        self._lines = Lines(job.evidence)
        self._reached: Counter[str] = Counter()

    def run(self) -> int:
        job = self._job
        draining.LOCK_MS = 1
        crash_points.visitor = self._visit
        policy = ragfence.Policy.from_mapping({"audit": {"drain_batch_rows": 500, "min_files": 4}})
        try:
            with ragfence.open(job.store, objects=job.objects, tenant=job.tenant, policy=policy) as fence:
                for done in self._drained(fence):
                    self._lines.add(**asdict(done))
                    time.sleep(DRAIN_PAUSE_S)
        except BaseException:
            self._lines.add(unexpected=traceback.format_exc())
        return BROKEN

    def _drained(self, fence: ragfence.Fence) -> Iterator[draining.DrainReport]:
        while True:
            try:
                yield fence.audit.drain()
            except RagfenceError as error:
                if not error.retryable:
                    raise
                self._lines.add(error=error.code)

    def _visit(self, point: str) -> None:
        self._reached[point] += 1
        if point == self._job.point and self._reached[point] == self._job.nth:
            os.kill(os.getpid(), signal.SIGKILL)
