"""The same single operations with an object store behind Redis: a commit more per new operation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import redis

from ragfence.stores.local import LocalObjects
from ragfence.stores.objects import ObjectStore
from tests import servers
from tests.bench.machine import redis_server
from tests.bench.rounds import Subject
from tests.bench.scale import Scale
from tests.bench.single import guarded, raw_get


@contextlib.contextmanager
def subjects(scale: Scale) -> Iterator[list[Subject]]:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(redis_server())
        client = stack.enter_context(redis.Redis.from_url(server.url))
        alone = stack.enter_context(guarded(server.url, server.folder, tenant="alone"))
        made = [
            raw_get(client, scale.replays),
            alone.replay("replay, Redis alone", scale.replays),
            alone.new("new, Redis alone", scale.news),
        ]
        for name in scale.object_stores:
            objects = stack.enter_context(_opened(name, server))
            tenant = name.split()[0].lower()
            ours = stack.enter_context(guarded(server.url, server.folder, tenant=tenant, objects=objects))
            made.append(ours.replay(f"replay, {name}", scale.replays))
            made.append(ours.new(f"new, {name}", scale.object_news))
        yield made


@contextlib.contextmanager
def _opened(name: str, server: servers.RedisServer) -> Iterator[ObjectStore]:
    if name == "local folder":
        yield LocalObjects(server.folder / "objects")
        return
    from ragfence.stores.s3 import S3Objects

    with servers.seaweedfs() as s3:
        yield S3Objects(s3.bucket, "bench", client=s3.client())
