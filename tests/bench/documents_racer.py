"""One of the processes that ingest the same documents.

argv     the server's URL, the folder of objects and journal, the tenant, how many documents
stdout   "ready", and after a line on stdin has said go and all is done, what it saw, as JSON
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import ragfence
from tests.bench.documents_ours import CountingSink, WholeText, document
from tests.bench.peers.corpus import corpus


def main() -> None:
    url, folder, tenant, count = sys.argv[1:]
    root, chunker, sink = Path(folder), WholeText(), CountingSink()
    documents = [document(each) for each in corpus(tenant, int(count))]
    with ragfence.open(url, objects=root / "objects", tenant=tenant, journal=root / "journal") as fence:
        ingesting = fence.documents.using(chunker=chunker, sink=sink)
        ingesting.get("nobody")  # connected and hydrated, and not a document more
        print("ready", flush=True)
        sys.stdin.readline()
        receipts = ingesting.ingest_many(documents)
    failed = [receipt.failure for receipt in receipts if receipt.failed]
    if failed:
        raise RuntimeError(f"{len(failed)} failed, the first with {failed[0]}")
    ids = [receipt.snippet_ids for receipt in receipts]
    print(json.dumps({"chunked": chunker.chunked, "rows": sink.rows, "ids": ids}), flush=True)


if __name__ == "__main__":
    main()
