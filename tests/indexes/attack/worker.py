"""One process that builds, edits, purges or searches, as its job says, and writes down what it was told.

It ends as one that ingests: with 0 when all is done, 1 after an error that no caller should see, 2 out of patience.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import threading
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lancedb  # noqa: F401  (takes seconds: the nursery has it, and whoever is forked off it)

import ragfence
from ragfence.engine import hydration
from ragfence.indexes.build import AFTER_SEALING, Build
from ragfence.indexes.spec import IndexSpec
from ragfence.testing.crash_points import at_point
from tests.chaos.work import Strike
from tests.chaos.worker import ANSWERED, BROKEN, GAVE_UP, OutOfPatience
from tests.documents.attack.strikes import Passing
from tests.documents.attack.work import DONE, READY
from tests.documents.attack.worker import DocumentWorker
from tests.indexes.attack.work import OF_THE_BUILD, IndexJob
from tests.indexes.building import CountingEmbedder, ingested

warnings.filterwarnings("ignore", message="lancedb fork")  # nothing of it was used before: there is nothing to break


class TracingEmbedder(CountingEmbedder):
    """Appends a line for each text to a file that ragfence knows nothing of."""

    def __init__(self, trace: str) -> None:
        super().__init__()
        self._trace = os.open(trace, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def embed(self, texts: Sequence[str]) -> Any:
        # One write for all: what others embed meanwhile never comes in between.
        os.write(self._trace, "".join(f"{text}\n" for text in texts).encode())
        return super().embed(texts)


class IndexWorker(DocumentWorker):
    def __init__(self, job: IndexJob) -> None:
        super().__init__(job)
        self._todo = job
        self._embedder = TracingEmbedder(job.trace)
        self._fence: ragfence.Fence

    def run(self) -> int:
        job = self._todo
        hydration.LOCK_MS = job.lock_ms
        try:
            self._fence = self._patiently(self._opened)
            self._fence.indexes.use(self._embedder)
            self._answers.add(event=READY)
            while not os.path.exists(job.go):
                time.sleep(0.002)
            for at, step in enumerate(job.steps):
                with self._struck(self._fence) if self._hits(at) else contextlib.nullcontext():
                    getattr(self, step["do"])(**{name: value for name, value in step.items() if name != "do"})
            self._fence.close()
            self._answers.add(event=DONE)
            return ANSWERED
        except OutOfPatience:
            self._answers.add(event="gave up")
            return GAVE_UP
        except BaseException:
            self._answers.add(event="unexpected", error=traceback.format_exc())
            return BROKEN

    def build(self, times: int, pause_s: float, seed: int, spec: dict[str, Any]) -> None:
        dice = random.Random(seed)
        for _ in range(times):
            time.sleep(dice.uniform(0, pause_s))
            self._build(spec)

    def ingest(self, names: list[str], edition: int) -> None:
        self._patiently(lambda: ingested(self._fence, names, edition))

    def purge(self, name: str, pause_s: float, seed: int) -> None:
        time.sleep(random.Random(seed).uniform(0, pause_s))
        self._patiently(lambda: self._fence.documents.purge(name))
        self._answers.add(event="purged", doc=name)

    def publish(self, alias: str) -> None:
        build = self._build({})
        swapped = self._patiently(lambda: self._fence.aliases.swap(alias, build.index_hash))
        self._answers.add(event="swapped", hash=build.index_hash, generation=swapped.generation)

    def tell(self, file: str) -> None:
        Path(file).touch()

    def search(self, alias: str, words: list[str], times: int, threads: int, until: str) -> None:
        searchers = [_Searcher(self._fence, alias, words, times, until, seed) for seed in range(threads)]
        for searcher in searchers:
            searcher.start()
        for searcher in searchers:
            searcher.join()
            seen = [[*target, sorted(ids)] for target, ids in searcher.seen.items()]
            self._answers.add(event="searched", times=searcher.count, seen=seen, wrong=searcher.wrong)

    def _hits(self, step: int) -> bool:
        strike = self._todo.strike
        return strike is not None and strike.task in (step, None)

    def _struck(self, fence: Any) -> contextlib.AbstractContextManager[None]:
        assert self._todo.strike is not None
        return struck(self._todo.strike, fence.inspector.fences)

    def _opened(self) -> ragfence.Fence:
        job = self._todo
        policy = ragfence.Policy.from_mapping(
            {
                "lease": {"ttl_s": job.lease_s, "max_attempts": 1000},
                "wait": {"deadline_s": 60.0},
                "indexes": {"embed_workers": job.embed_workers},
            }
        )
        plain = ragfence.open(job.store, objects=job.objects, tenant=job.tenant, policy=policy)
        fences: Any = OneAtATime(plain.inspector.fences)
        return ragfence.open(fences, objects=plain.inspector.objects, tenant=job.tenant, policy=policy)

    def _build(self, spec: dict[str, Any]) -> Build:
        made = IndexSpec(embedder=self._embedder, **spec)
        build: Build = self._patiently(lambda: self._fence.indexes.build(made))
        receipt = build.receipt
        self._answers.add(
            event="built",
            hash=build.index_hash,
            number=build.number,
            seal=asdict(build.seal),
            receipt={"key": receipt.key, "effect_id": receipt.effect_id, "result": receipt.result},
            decision=receipt.decision,
            flags={name: value for name, value in asdict(receipt.flags).items() if value},
        )
        return build


class _Searcher(threading.Thread):
    """Each answer must be of one build; which snippets were seen of which build is told at the end."""

    def __init__(self, fence: ragfence.Fence, alias: str, words: list[str], times: int, until: str, seed: int) -> None:
        super().__init__(name=f"searcher-{seed}")
        self._fence, self._alias, self._words = fence, alias, words
        self._times, self._until, self._dice = times, until, random.Random(seed)
        self.count = 0
        self.seen: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
        self.wrong: list[str] = []

    def run(self) -> None:
        while self.count < self._times or not os.path.exists(self._until):
            self.count += 1
            try:
                hits = self._fence.search(self._alias, f"where is {self._dice.choice(self._words)} told of?", k=5)
            except Exception:
                self.wrong.append(traceback.format_exc())
                continue
            of = {(hit.index_hash, hit.generation) for hit in hits}
            if len(of) != 1 or len(hits) != 5:
                self.wrong.append(f"{len(hits)} hits of {sorted(of)}")
            for hit in hits:
                self.seen[hit.index_hash, hit.generation].add(hit.snippet_id)


class OneAtATime(Passing):
    """A fence store that one thread of this process calls at a time, so that nobody is in mid-call in a process that is
    frozen: with the lock of SQLite in its hands it would freeze everybody."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.calling = threading.RLock()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if not callable(found):
            return found

        @functools.wraps(found)
        def called(*args: Any, **more: Any) -> Any:
            with self.calling:
                return found(*args, **more)

        return called


@contextlib.contextmanager
def struck(strike: Strike, fences: OneAtATime) -> Iterator[None]:
    """Strikes the first time that this process comes by the point."""
    number = signal.SIGKILL if strike.action == "kill" else signal.SIGSTOP
    point = strike.point.removeprefix(OF_THE_BUILD)
    with contextlib.ExitStack() as stack:

        def act() -> None:
            with fences.calling:
                # This thread, and not any: one that is not the main one would go on a little.
                signal.pthread_kill(threading.get_ident(), number)

        def arm() -> None:
            stack.enter_context(at_point(point, act))

        if point == strike.point:
            arm()
        else:
            stack.enter_context(at_point(AFTER_SEALING, arm))
        yield
