"""The peak memory of a fresh process that ingests documents out of a generator.

argv     the server's URL, the folder of objects and journal, how many documents
stdout   what it took, as JSON
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.bench.documents_ours import document, ours
from tests.bench.machine import peak_bytes, redis_server
from tests.bench.peers.corpus import corpus
from tests.bench.peers.process import ROOT

CHARACTERS = 100


def measure(count: int) -> dict[str, Any]:
    with redis_server() as server:
        argv = [sys.executable, "-m", __name__, server.url, str(server.folder), str(count)]
        told = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT).stdout
        found: dict[str, Any] = json.loads(told)
        return found


def main() -> None:
    url, folder, count = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    with ours(url, folder) as empty:
        before = peak_bytes()
        started = time.perf_counter()
        documents = map(document, corpus("streamed", count, characters=CHARACTERS))
        new = sum(receipt.is_new for receipt in empty.documents.ingest_many(documents, stream=True))
        seconds = time.perf_counter() - started
    if new != count:
        raise RuntimeError(f"{new} documents were new, not {count}")
    print(json.dumps({"documents": count, "peak_bytes": peak_bytes(), "before_bytes": before, "seconds": seconds}))


if __name__ == "__main__":
    main()
