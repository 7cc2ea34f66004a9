"""Two processes ingest the same documents at once: how often one is embedded and written. Counted outside everybody.

What is embedded and written, the embedder and the vector store count: those of the peers, and ragfence's sink, which is
both. With ragfence, the texts that were chunked are counted as well, and the snippets in its object store.
"""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet

from ragfence.stores.local import LocalObjects
from tests import servers
from tests.bench.documents_rates import RAGFENCE
from tests.bench.documents_scale import DocumentsScale
from tests.bench.peers.process import ROOT, IngestingPeer

PROCESSES = 2


def measure(
    server: servers.RedisServer, scale: DocumentsScale, pairs: Mapping[str, Sequence[IngestingPeer]]
) -> dict[str, Any]:
    """`pairs`: two processes of each peer, by its name."""
    numbers = range(scale.races)
    found: dict[str, Any] = {"processes": PROCESSES, "documents": scale.raced, "races": scale.races}
    found[RAGFENCE] = [_ours(server, f"race{number}", scale.raced) for number in numbers]
    for who, pair in pairs.items():
        found[who] = [_theirs(pair, f"race{number}", scale.raced) for number in numbers]
    return found


def _theirs(racers: Sequence[IngestingPeer], name: str, count: int) -> dict[str, int]:
    for racer in racers:
        racer.prepare(name, name, count, new=None)
    for racer in racers:
        racer.go()
    ended = [racer.ended() for racer in racers]
    return {
        "embeds": sum(each.embeds for each in ended),
        "rows": sum(each.rows for each in ended),
        "left": len({row for each in ended for row in each.ids}),
    }


def _ours(server: servers.RedisServer, tenant: str, count: int) -> dict[str, int]:
    with contextlib.ExitStack() as stack:
        racers = [stack.enter_context(_racer(server, tenant, count)) for _ in range(PROCESSES)]
        for racer in racers:
            _line(racer)  # "ready"
        for racer in racers:
            assert racer.stdin is not None
            racer.stdin.write("go\n")
            racer.stdin.flush()
        ended = [json.loads(_line(racer)) for racer in racers]
    if any(each["ids"] != ended[0]["ids"] for each in ended):
        raise RuntimeError("two processes were answered with different snippet_ids")
    rows = [row for each in ended for row in each["rows"]]
    return {
        "embeds": len(rows),
        "rows": len(rows),
        "left": len(set(rows)),
        "chunked": sum(each["chunked"] for each in ended),
        "stored": len(_snippets(server.folder / "objects", tenant)),
    }


def _snippets(folder: Path, tenant: str) -> list[str]:
    """The ids of all snippet rows, whoever wrote them, whether they count or not."""
    with contextlib.closing(LocalObjects(folder)) as objects:
        found = []
        for entry in objects.list(f"{tenant}/snippets/"):
            table = pyarrow.parquet.read_table(io.BytesIO(objects.get(entry.name) or b""))
            found += table.column("snippet_id").to_pylist()
        return found


@contextlib.contextmanager
def _racer(server: servers.RedisServer, tenant: str, count: int) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-m", "tests.bench.documents_racer", server.url, str(server.folder), tenant, str(count)]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    with process:
        try:
            yield process
        finally:
            process.kill()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a racer ended with {process.wait()}; its words stand above")
    return line
