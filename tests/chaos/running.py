"""Runs scenarios, some at a time, and stops every process of theirs whatever happens."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path

from tests import servers
from tests.chaos import crew
from tests.chaos.scenarios import Outcome, Scenario, run
from tests.chaos.sites import VALKEY_S3


def outcomes(chosen: Sequence[Scenario], *, seed: int, jobs: int, keep: Path | None = None) -> Iterator[Outcome]:
    """In the order in which they end."""
    with contextlib.ExitStack() as stack:
        # Servers die with the thread that starts them: the shared one is started here, the others by their scenario.
        needs_s3 = any(scenario.backend == VALKEY_S3 for scenario in chosen)
        s3 = stack.enter_context(servers.seaweedfs()) if needs_s3 else None
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ragfence-chaos-", ignore_cleanup_errors=True))
        nursery = stack.enter_context(crew.nursery(Path(folder)))
        pool = stack.enter_context(ThreadPoolExecutor(jobs))
        runs: list[Future[Outcome]] = [
            pool.submit(run, scenario, seed=seed, nursery=nursery, s3=s3, keep=keep) for scenario in chosen
        ]
        try:
            for future in as_completed(runs):
                yield future.result()
        except BaseException:
            crew.stopping.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
