"""What 1,000 operations cost in requests to the object store and bytes in Redis: `python -m tests.bench.cost`.

Counted, not estimated: requests by botocore's own events on a real S3 server, bytes by the server's `used_memory`.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table

import ragfence
from ragfence.stores.s3 import S3Objects
from tests import servers
from tests.bench.machine import redis_server

COUNT = 1_000
RESULT = "r" * 36


def main() -> None:
    with (
        redis_server() as server,
        servers.seaweedfs() as s3,
        contextlib.closing(s3.client()) as client,
        server.client() as admin,
    ):
        requests: Counter[str] = Counter()
        client.meta.events.register("before-call.s3.*", lambda model, **_: requests.update([model.name]))
        objects = S3Objects(s3.bucket, "cost", client=client)
        table = Table("1,000 operations", "S3 requests", "Redis: records", "Redis: decision rows")
        with ragfence.open(server.url, objects=objects, journal=server.folder / "journal") as fence:
            effect = fence.once(kind="ticket", key=lambda number: f"{number:012}")(lambda number: RESULT)
            ordered = fence.once(kind="event", key=lambda number: (f"{number:012}", "", 1))(lambda number: RESULT)
            for number in range(COUNT):  # the hash tables of the server have grown before anything is counted
                effect(-1 - number)
            for name, call in (("new", effect), ("replayed", effect), ("new, with a sequence", ordered)):
                table.add_row(name, *_cost(call, admin, requests))
        Console().print(table)


def _cost(call: Any, admin: Any, requests: Counter[str]) -> tuple[str, str, str]:
    _trim(admin)
    requests.clear()
    before = _used(admin)
    for number in range(COUNT):
        call(number)
    with_rows = _used(admin)
    _trim(admin)
    alone = _used(admin)
    asked = ", ".join(f"{count} {name}" for name, count in sorted(requests.items())) or "none"
    return asked, f"{max(alone - before, 0):,} bytes", f"{with_rows - alone:,} bytes"


def _trim(admin: Any) -> None:
    for name in admin.scan_iter(_type="stream"):
        admin.xtrim(name, maxlen=0, approximate=False)


def _used(admin: Any) -> int:
    return int(admin.info("memory")["used_memory"])


if __name__ == "__main__":
    main()
