"""Questions to a large ledger: by source_id, and counts by day; each in a process of its own, with memory of its own.

The rows are made as Arrow tables of the ledger's schema, stored as a drainer stores them (50,000 at a time, in the
order of time), and compacted as `ragfence drain` does it. A folder that is given is kept and used again.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ragfence.audit import columns
from ragfence.audit.audit import Audit
from ragfence.audit.drain import LedgerCompaction
from ragfence.audit.ledger import DAY_MS, DRAINED, Ledger, day_of
from ragfence.core.operations import Operation
from ragfence.core.policy import AuditRules
from ragfence.stores.local import LocalObjects
from ragfence.testing.memory import MemoryFences
from tests.bench.audit_scale import AuditScale
from tests.bench.machine import peak_bytes
from tests.bench.run import Say

TENANT = "default"
START_MS = 1_780_000_000_000 // DAY_MS * DAY_MS
BATCH = 50_000
CALLS_OF_A_SOURCE = 20
TIMES = 5
"""asked, and the fastest counts: the others tell of what else the machine had to do"""
BY_SOURCE, BY_DAY = "decisions of a source_id", "counts by day, kind and decision"


def measure(scale: AuditScale, say: Say = lambda _: None, *, folder: Path | None = None) -> dict[str, Any]:
    """Each question is asked in a process of its own, so that its memory is its own."""
    with tempfile.TemporaryDirectory() as made:
        place = folder or Path(made)
        say(f"a ledger of {scale.rows:,} rows")
        filled = _filled(place, scale.rows, scale.days)
        asked = {}
        for query in QUERIES:
            say(f"asked {query}")
            command = [sys.executable, "-m", "tests.bench.audit_queries", query, str(place), str(scale.days)]
            asked[query] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {"filled": filled, "asked": asked}


def _filled(folder: Path, rows: int, days: int) -> dict[str, Any]:
    ledger = Ledger(TENANT, LocalObjects(folder / "objects"))
    took = {} if ledger.parts() else _fill(ledger, rows, days)
    parts = ledger.parts()
    return {**took, "objects": len(parts), "megabytes": sum(part.size for part in parts) / 2**20}


def _fill(ledger: Ledger, rows: int, days: int) -> dict[str, float]:
    begun, rng = time.perf_counter(), np.random.default_rng(7)
    sources = max(rows // CALLS_OF_A_SOURCE, 1)
    keys = [Operation(kind="document", source_id=f"doc-{n:08d}", tenant=TENANT).key for n in range(sources)]
    known = pa.table(
        {
            "key": pa.array([key.hex() for key in keys]),
            "source_id": pa.array([f"doc-{n:08d}" for n in range(sources)]),
            "shard": pa.array([key[0] for key in keys], pa.uint8()),
        }
    )
    for start in range(0, rows, BATCH):
        at = np.arange(start, min(start + BATCH, rows))
        day = START_MS + int(at[0] * days // rows) * DAY_MS
        times = day + ((at * days * DAY_MS // rows) % DAY_MS)
        ledger.write(day_of(day), _made(known, rng, times, at), DRAINED)
    stored = time.perf_counter()
    LedgerCompaction(ledger, AuditRules()).run(START_MS + (days + 2) * DAY_MS, every_day=True)
    return {"store_s": stored - begun, "compact_s": time.perf_counter() - stored}


def _made(known: pa.Table, rng: np.random.Generator, times: np.ndarray, at: np.ndarray) -> pa.Table:
    count = len(at)
    which = pa.array(rng.integers(0, known.num_rows, count))
    picked = known.take(which)
    decisions = np.array(["new", "duplicate", "in_flight", "conflict"])[rng.choice(4, count, p=[0.3, 0.65, 0.04, 0.01])]
    tokens = rng.bytes(12 * count).hex()
    ids = [f"{tokens[24 * n : 24 * n + 24]}{250 if decisions[n] == 'new' else 0:02x}" for n in range(count)]
    time_type = pa.timestamp("ms", tz="UTC")
    values: dict[str, Any] = {
        "row_id": ids,
        "ts": pa.array(times).cast(time_type),
        "tenant": [TENANT] * count,
        "kind": ["document"] * count,
        "decision": decisions.tolist(),
        "flags": [[]] * count,
        "idempotency_key": picked.column("key"),
        "payload_hash": pa.array([text[2:34] for text in picked.column("key").to_pylist()]),
        "effect_id": pa.array([f"ef_{text[2:34]}" for text in picked.column("key").to_pylist()]),
        "source_id": picked.column("source_id"),
        "revision": pa.array([f"xxh3:{text[-32:]}" for text in picked.column("key").to_pylist()]),
        "index_hash": ["recipe-1"] * count,
        "action": ["ingest"] * count,
        "attempt": [1] * count,
        "fence": [f"1.{n}" for n in at.tolist()],
        "owner": [f"worker:{n % 8}" for n in range(count)],
        "run_id": [f"run-{times[0]}"] * count,
        "winner": [text[:24] for text in ids],
        "first_seen": pa.array(times).cast(time_type),
        "sealed_at": pa.array(times).cast(time_type),
        "waited_ms": [0] * count,
        "shard": picked.column("shard"),
        "characters": rng.integers(100, 9000, count).tolist(),
    }
    schema = columns.schema()
    arrays = []
    for field in schema:
        value = values.get(field.name)
        if value is None:
            arrays.append(pa.nulls(count, field.type))
        elif isinstance(value, pa.ChunkedArray):
            arrays.append(value.combine_chunks())
        else:
            arrays.append(value if isinstance(value, pa.Array) else pa.array(value, field.type))
    return pa.Table.from_arrays(arrays, schema=schema)


def _by_source(audit: Audit) -> int:
    return int(audit.decisions(source_id="doc-00000123").num_rows)


def _by_day(audit: Audit) -> int:
    return int(sum(audit.counts(by=("kind", "decision")).column("count").to_pylist()))


def _explain(audit: Audit) -> int:
    key = Operation(kind="document", source_id="doc-00000123", tenant=TENANT).key
    return len(audit.explain(key.hex(), every=True).events)


def _last_day(audit: Audit) -> int:
    return int(audit.decisions(since="1d").num_rows)


QUERIES = {
    BY_SOURCE: _by_source,
    BY_DAY: _by_day,
    "the history of a key": _explain,
    "decisions of the last day": _last_day,
}


def _measured(query: str, folder: Path, days: int) -> dict[str, Any]:
    fences = MemoryFences(clock=lambda: START_MS + days * DAY_MS)
    audit = Audit(fences, LocalObjects(folder / "objects"))
    audit.counts(since="1ms")  # pyarrow is loaded
    taken, used, found = [], [], 0
    for _ in range(TIMES):
        begun, busy = time.perf_counter(), time.process_time()
        found = QUERIES[query](audit)
        taken.append(time.perf_counter() - begun)
        used.append(time.process_time() - busy)
    return {"seconds": min(taken), "cpu_seconds": min(used), "peak_megabytes": peak_bytes() / 2**20, "found": found}


if __name__ == "__main__":
    asked, place, covered = sys.argv[1:]
    print(json.dumps(_measured(asked, Path(place), int(covered))))
