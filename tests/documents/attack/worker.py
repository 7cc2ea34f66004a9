"""One process that ingests: sends the parts of a job until each has its answers, and writes down what it was told.

It ends with 0 when every document has a receipt, with 1 after an error that no caller should see, and with 2 when its
patience ran out. Errors that say "try again" are written down, and it does.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import ragfence
from ragfence.core.receipts import Receipt
from ragfence.engine import hydration
from ragfence.errors import RagfenceError
from tests.chaos.worker import ANSWERED, BROKEN, GAVE_UP, Lines, OutOfPatience
from tests.documents.attack.corpus import Paragraphs, Part, doc_id
from tests.documents.attack.strikes import CutSeals, WatchedObjects, struck
from tests.documents.attack.work import DONE, READY, DocumentJob

SIGNALS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}
AGAIN = frozenset({"IN_FLIGHT"})
"""failures of single documents after which a caller asks again"""


class DocumentWorker:
    def __init__(self, job: DocumentJob) -> None:
        self._job = job
        self._answers = Lines(job.answers)
        self._dice = random.Random()
        self._give_up_at = time.monotonic() + job.patience_s

    def run(self) -> int:
        job = self._job
        hydration.LOCK_MS = job.lock_ms
        try:
            fence = self._patiently(self._opened)
            documents = fence.documents.using(chunker=Paragraphs(job.trace))
            self._answers.add(event=READY)
            while not os.path.exists(job.go):
                time.sleep(0.002)
            for at, part in enumerate([*job.parts] * job.rounds):
                with self._struck(fence) if job.strike and job.strike.task in (at, None) else contextlib.nullcontext():
                    self._send(documents, part)
            fence.close()
            self._answers.add(event=DONE)
            return ANSWERED
        except OutOfPatience:
            self._answers.add(event="gave up")
            return GAVE_UP
        except BaseException:
            self._answers.add(event="unexpected", error=traceback.format_exc())
            return BROKEN

    def _opened(self) -> ragfence.Fence:
        job = self._job
        policy = ragfence.Policy.from_mapping(
            {"lease": {"ttl_s": job.lease_s, "max_attempts": 1000}, "wait": {"deadline_s": 60.0}}
        )
        plain = ragfence.open(job.store, objects=job.objects, tenant=job.tenant, policy=policy)
        fences, objects = CutSeals(plain.inspector.fences), WatchedObjects(plain.inspector.objects)
        return ragfence.open(fences, objects=objects, tenant=job.tenant, policy=policy)  # type: ignore[arg-type]

    def _struck(self, fence: Any) -> contextlib.AbstractContextManager[None]:
        strike = self._job.strike
        assert strike is not None
        number = SIGNALS[strike.action]
        engine = fence._engine
        return struck(strike.point, lambda: os.kill(os.getpid(), number), engine.fences, engine.objects)

    def _send(self, documents: Any, part: Part) -> None:
        """Every document of the part, until it has a receipt."""
        left = list(part.numbers)
        while left:
            wanted = dict(zip(part.numbers, part.documents(), strict=True))
            sent = [wanted[number] for number in left]
            receipts = self._patiently(lambda sent=sent: documents.ingest_many(sent, batch=len(sent)))
            self._write(part, left, receipts)
            left = [
                number
                for number, receipt in zip(left, receipts, strict=True)
                if receipt.failure is not None and receipt.failure["code"] in AGAIN
            ]
            self._wait_a_little() if left else None

    def _write(self, part: Part, numbers: Sequence[int], receipts: Sequence[Receipt]) -> None:
        answers = [
            {
                "doc": doc_id(number),
                "ids": list(receipt.snippet_ids),
                "decision": receipt.decision,
                "failure": dict(receipt.failure) if receipt.failure else None,
                "flags": {name: value for name, value in asdict(receipt.flags).items() if value},
            }
            for number, receipt in zip(numbers, receipts, strict=True)
        ]
        self._answers.add(event="answers", revision=part.revision, answers=answers)

    def _patiently(self, ask: Callable[[], Any]) -> Any:
        while True:
            try:
                return ask()
            except RagfenceError as error:
                if not error.retryable:
                    raise
                self._answers.add(event="error", code=error.code)
            self._wait_a_little()

    def _wait_a_little(self) -> None:
        if time.monotonic() >= self._give_up_at:
            raise OutOfPatience
        time.sleep(self._dice.uniform(0.02, 0.1))
