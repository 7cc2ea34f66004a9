"""What being observed costs: `ingest_many` of 20,000 known documents, switched on against off, interleaved.

    python -m tests.telemetry.overhead

Processor time of this process, and the best of all rounds: what else the machine does is not to be measured.
"""

from __future__ import annotations

import gc
import io
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry

import ragfence
from ragfence import Document, Policy
from ragfence.telemetry import Listener, Logs, Metrics, Traces
from ragfence.telemetry.logs import json_lines
from tests import servers

DOCUMENTS = 20_000
ROUNDS = 9


def measured(store: str | Path, objects: Path, documents: Sequence[Document]) -> dict[str, float]:
    """How much longer each takes than nothing does."""
    policy = Policy()
    listeners: dict[str, tuple[Listener, ...]] = {
        "off": (),
        "metrics": (Metrics(CollectorRegistry()),),
        "logs": (Logs(policy, logger=json_lines(io.StringIO())),),
        "traces": (Traces(policy),),
    }
    fences = {name: ragfence.open(store, objects=objects, policy=policy, observe=on) for name, on in listeners.items()}
    taken: dict[str, list[float]] = {name: [] for name in fences}
    try:
        fences["off"].documents.ingest_many(documents)
        for _ in range(ROUNDS):
            for name, fence in fences.items():
                gc.collect()
                started = time.process_time()
                receipts = fence.documents.ingest_many(documents)
                taken[name].append(time.process_time() - started)
                assert {receipt.decision for receipt in receipts} == {"duplicate"}
    finally:
        for fence in fences.values():
            fence.close()
    best = {name: min(each) for name, each in taken.items()}
    off = best.pop("off")
    print(f"  off: {1e6 * off / len(documents):.1f} microseconds of processor time per document")
    return {name: on / off for name, on in best.items()}


def main() -> None:
    documents = [Document(f"doc-{at}", f"the text of document {at}, which says little") for at in range(DOCUMENTS)]
    with tempfile.TemporaryDirectory() as folder, servers.valkey() as server:
        for name, store in (("sqlite", Path(folder) / "fences.db"), ("valkey", server.url)):
            print(name)
            for what, ratio in measured(store, Path(folder) / f"objects-{name}", documents).items():
                print(f"  {what}: {ratio - 1:+.1%}")


if __name__ == "__main__":
    main()
