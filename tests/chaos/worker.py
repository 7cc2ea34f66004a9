"""One worker: performs the tasks of a job until each has an answer, and writes down what it was told.

    python -m tests.chaos.worker JOB.json

It ends with 0 when every task has an answer, with 1 after an error that no caller should ever see, and with 2 when
its patience ran out. What it performs and what it is answered goes to files outside of ragfence, one write a line.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import ragfence
from ragfence.core.hashing import shard_of
from ragfence.engine import hydration
from ragfence.errors import FencedOut, LeaseLost, RagfenceError, SealUncertain, Stale
from ragfence.testing.crash_points import freeze_at, kill_at
from tests.chaos.work import KEYED, OPENING, SEQUENCED, SETTLING, Job, Task, lines

ANSWERED, BROKEN, GAVE_UP = 0, 1, 2


class OutOfPatience(Exception):
    pass


class Lines:
    """A file that many processes append to: one write per line, so that lines never mix."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def add(self, **values: Any) -> None:
        os.write(self._file, json.dumps(values).encode() + b"\n")


class Worker:
    def __init__(self, job: Job) -> None:
        self._job = job
        self._effects = Lines(job.effects)
        self._answers = Lines(job.answers)
        self._dice = random.Random()
        self._give_up_at = time.monotonic() + job.patience_s
        self._journaled = False

    def run(self) -> int:
        hydration.LOCK_MS = self._job.lock_ms
        current = OPENING
        try:
            fence = self._patiently(OPENING, lambda: _opened(self._job))
            self._record_reconciliations(fence)
            recover = self._recover if self._job.recovers else None
            perform = fence.once(kind=KEYED, key=lambda task: task["source"], recover=recover)(self._effect)
            strike = self._job.strike
            with _struck(self._job) if strike and strike.task is None else contextlib.nullcontext():
                for at, task in enumerate(self._tasks()):
                    current = task.name
                    with _struck(self._job) if strike and strike.task == at else contextlib.nullcontext():
                        self._answer(fence, perform, task)
            current = SETTLING
            self._settle(fence, run_blocking=True)
            fence.close()
            return ANSWERED
        except OutOfPatience:
            self._answers.add(task=current, gave_up=True)
            return GAVE_UP
        except BaseException:
            self._answers.add(task=current, unexpected=traceback.format_exc())
            return BROKEN

    def _tasks(self) -> Iterator[Task]:
        load = self._job.stream
        if load is None:
            yield from self._job.tasks
            return
        for task in load.tasks():
            if os.path.exists(load.until):
                return
            if load.shards is not None and shard_of(self._job.tenant, task.source) not in load.shards:
                continue
            self._give_up_at = time.monotonic() + self._job.patience_s
            yield task
            time.sleep(load.pause_s * self._dice.uniform(0.5, 1.5))

    def _answer(self, fence: Any, perform: Callable[[Any], Any], task: Task) -> None:
        def ask() -> Any:
            return perform(task.payload) if task.sequence is None else self._move(fence, task)

        asked_s = time.monotonic()
        try:
            receipt = self._patiently(task.name, ask)
        except Stale:
            if task.sequence is None:
                raise
            self._answers.add(task=task.name, stale=True, asked_s=asked_s, at_s=time.monotonic())
            return
        self._write(task, receipt, asked_s)
        if receipt.flags.journaled:
            self._journaled = True
        elif self._journaled:  # the store is back
            self._settle(fence)

    def _record_reconciliations(self, fence: Any) -> None:
        """Every report counts, also those of the thread that reconciles the journal by itself."""
        engine = fence._engine
        reconcile = engine.reconcile_journal

        def reconcile_and_record() -> Any:
            settled = reconcile()
            self._answers.add(task=SETTLING, reconciled=asdict(settled))
            return settled

        engine.reconcile_journal = reconcile_and_record

    def _settle(self, fence: Any, *, run_blocking: bool = False) -> None:
        """Seals what ran while the store was down; what cannot be settled yet is tried again at the next answer."""
        while self._journaled:
            settled = fence.reconcile_journal()
            self._journaled = bool(settled.left)
            if not run_blocking:
                return
            if time.monotonic() >= self._give_up_at:
                raise OutOfPatience
            time.sleep(0.1 if self._journaled else 0.0)

    def _write(self, task: Task, receipt: Any, asked_s: float) -> None:
        # Seconds since the machine started: the same clock for all workers, and for whoever hurts their stores.
        self._answers.add(
            task=task.name,
            asked_s=asked_s,
            at_s=time.monotonic(),
            key=receipt.key,
            effect_id=receipt.effect_id,
            result=receipt.result,
            decision=receipt.decision,
            flags={name: value for name, value in asdict(receipt.flags).items() if value},
        )

    def _move(self, fence: Any, task: Task) -> Any:
        operation = ragfence.Operation(kind=SEQUENCED, source_id=task.source, sequence=task.sequence)
        if self._job.recovers:
            once = fence.once(kind=SEQUENCED, key=lambda _: operation, recover=self._recover)
            return once(self._effect)(task.payload)
        with fence.claim(operation, payload=task.payload) as op:
            if op.is_new:
                try:
                    op.seal(result=self._effect(task.payload))
                except FencedOut as lost:
                    if lost.receipt is None:
                        raise
                    return lost.receipt
        return op.receipt

    def _recover(self, payload: dict[str, Any]) -> ragfence.Recovered | None:
        """What the foreign system knows: the first execution of the task, by whomever."""
        name = Task(**payload).name
        for line in lines(self._job.effects):
            if line["task"] == name:
                return ragfence.Recovered({"execution": line["execution"]})
        return None

    def _effect(self, payload: dict[str, Any]) -> dict[str, Any]:
        execution = uuid.uuid4().hex
        done = {"task": Task(**payload).name, "execution": execution, "pid": os.getpid()}
        try:
            lease = ragfence.current_lease()
            self._effects.add(**done, attempt=lease.attempt, fence=str(lease.fence))
        except LeaseLost:
            if self._job.journal is None:
                raise
            self._effects.add(**done, journaled=True)  # the store is down: there is no lease to be had
        time.sleep(self._job.effect_s)
        return {"execution": execution}

    def _patiently(self, what: str, ask: Callable[[], Any]) -> Any:
        """Asks again after errors that say so; anything else is not for a caller to see."""
        pause_s = 0.02
        while True:
            try:
                return ask()
            except RagfenceError as error:
                if not error.retryable:
                    raise
                self._answers.add(task=what, error=error.code)
                if isinstance(error, SealUncertain) and error.committed:
                    return error.receipt
                if time.monotonic() >= self._give_up_at:
                    raise OutOfPatience from error
            time.sleep(pause_s * self._dice.uniform(0.5, 1.5))
            pause_s = min(pause_s * 2, 0.5)


def _struck(job: Job) -> contextlib.AbstractContextManager[None]:
    assert job.strike is not None
    return (kill_at if job.strike.action == "kill" else freeze_at)(job.strike.point)


def _opened(job: Job) -> ragfence.Fence:
    policy = ragfence.Policy.from_mapping(
        {
            # Attempts end in a kill here, so there may be many; patience is the worker's, not the engine's.
            "lease": {"ttl_s": job.lease_s, "max_attempts": 1000, "seal_retry_s": 5.0},
            "wait": {"deadline_s": 20.0},
            **job.policy,
        }
    )
    objects: Any = job.objects
    if job.objects and job.s3_timeout_s:
        from ragfence.stores.s3 import S3Objects

        parts = urlsplit(job.objects)
        endpoint = parse_qs(parts.query)["endpoint_url"][0]
        objects = S3Objects(parts.netloc, parts.path.strip("/"), endpoint_url=endpoint, read_timeout_s=job.s3_timeout_s)
    return ragfence.open(job.store, objects=objects, tenant=job.tenant, policy=policy, journal=job.journal)


if __name__ == "__main__":
    sys.exit(Worker(Job.load(Path(sys.argv[1]))).run())
