"""What documents cost in the server's memory and in requests to the object store. Counted, not estimated."""

from __future__ import annotations

import contextlib
import statistics
from collections import Counter
from typing import Any

import redis

from ragfence.stores.s3 import S3Objects
from tests import servers
from tests.bench.documents_ours import Thirds, ours
from tests.bench.machine import redis_server
from tests.bench.memory import drop_rows, used_memory

SNIPPETS = 3
S3 = "SeaweedFS"
_SAMPLED = 1_000


def weighed(count: int) -> dict[str, Any]:
    """A document with three snippets: all of its keys, and what the server needs beside them."""
    with (
        redis_server() as server,
        redis.Redis.from_url(server.url) as client,
        ours(server.url, server.folder, chunker=Thirds()) as filled,
    ):
        filled.ingest("warm", 1_000, new=1_000)  # markers, counters, scripts and buffers are there
        drop_rows(client)
        names_before, used_before = set(client.scan_iter(count=1_000)), used_memory(client)
        filled.ingest("weighed", count, new=count)
        drop_rows(client)
        taken = used_memory(client) - used_before
        names = sorted(set(client.scan_iter(count=1_000)) - names_before)
        with client.pipeline(transaction=False) as pipe:
            for name in names[:: max(1, len(names) // _SAMPLED)]:
                pipe.memory_usage(name, samples=0)
            sizes = pipe.execute()
    return {
        "documents": count,
        "snippets": SNIPPETS,
        "keys_per_document": len(names) / count,
        "document_bytes": statistics.mean(sizes) * len(names) / count,
        "server_bytes_per_document": taken / count,
    }


def requests(count: int) -> dict[str, Any]:
    """Requests to a real S3 server, by botocore's own events, in batches of the default size."""
    asked: Counter[str] = Counter()
    with (
        redis_server() as server,
        servers.seaweedfs() as s3,
        contextlib.closing(s3.client()) as client,
    ):
        client.meta.events.register("before-call.s3.*", lambda model, **_: asked.update([model.name]))
        objects = S3Objects(s3.bucket, "bench", client=client)
        with ours(server.url, server.folder, objects=objects) as filled:
            found: dict[str, Any] = {"documents": count, "object_store": S3}
            for run, new in (("first", count), ("again", 0)):
                asked.clear()
                filled.ingest("requested", count, new=new)
                found[run] = dict(asked)
    return found
