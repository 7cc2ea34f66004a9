"""Where a scenario takes place: a fence store and an object store of its own, on real servers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import ragfence
from ragfence.stores.fences import FenceStore
from ragfence.stores.objects import ObjectStore
from tests import servers

SQLITE, VALKEY, VALKEY_FOLDER, VALKEY_S3 = "sqlite+folder", "valkey", "valkey+folder", "valkey+seaweedfs"
REDIS62, REDIS62_FOLDER = "redis6.2", "redis6.2+folder"
VALKEY_FSYNC = "valkey, appendfsync always"
PAIR, PAIR_FOLDER, CLUSTER_FOLDER = "valkey pair", "valkey pair+folder", "valkey cluster+folder"
TWO_REGIONS = "two valkeys+folder"

_one_start_at_a_time = threading.Lock()
"""Two servers started at once could choose the same port, and the first would answer for both."""


@dataclass(frozen=True, slots=True)
class Site:
    backend: str
    folder: Path
    store: str
    objects: str | None
    tenant: str = "chaos"
    redis: servers.RedisServer | None = None
    far: servers.RedisServer | None = None
    """the server of another region, which has the same object store"""
    pair: servers.SentinelPair | None = None
    cluster: servers.RedisCluster | None = None
    s3: servers.S3Server | None = field(default=None, repr=False)
    s3_timeout_s: float | None = None

    @property
    def solo(self) -> bool:
        """Without an object store: what the fence store loses is lost."""
        return self.objects is None

    def prepare(self) -> None:
        """Into its first epoch, so that workers do not race for who begins it."""
        if not self.solo:
            with self.opened() as (fence, _, _):
                fence.hydrate()

    def epochs(self) -> list[tuple[int, bool] | None]:
        """Of every shard: its epoch, and whether it may answer. What was rebuilt has others than before."""
        with self.opened() as (_, fences, _):
            return [(marker.epoch, marker.usable) if marker else None for marker in fences.markers()]

    def forget(self) -> None:
        """The fence store loses everything."""
        if self.redis is not None:
            with self.redis.client() as client:
                client.flushall()
            return
        assert self.pair is None
        assert self.cluster is None
        for end in ("-shm", "-wal", ""):
            Path(self.store + end).unlink(missing_ok=True)

    def restart(self) -> None:
        assert self.redis is not None
        self.redis.stop()
        self.redis.start()

    def crash(self) -> None:
        assert self.redis is not None
        self.redis.kill()
        self.redis.start()

    def far_region(self) -> Site:
        """The same object store, and the fence store of the other region."""
        assert self.far is not None
        return replace(self, store=self.far.url, redis=self.far, far=self.redis)

    def through(self, endpoint_url: str, *, timeout_s: float) -> Site:
        """The same stores, with the object store behind a proxy."""
        assert self.s3 is not None
        assert self.objects is not None
        objects = self.objects.replace(self.s3.url, endpoint_url)
        return replace(self, objects=objects, s3_timeout_s=timeout_s)

    @contextlib.contextmanager
    def opened(self) -> Iterator[tuple[ragfence.Fence, FenceStore, ObjectStore | None]]:
        """The stores as the judge sees them: past every proxy."""
        objects = self._objects()
        with ragfence.open(self.store, objects=objects, tenant=self.tenant, policy=ragfence.Policy()) as fence:
            yield fence, fence.inspector.fences, objects

    def _objects(self) -> ObjectStore | None:
        if self.s3 is not None:
            from ragfence.stores.s3 import S3Objects

            return S3Objects(self.s3.bucket, self._prefix, client=self.s3.client(), probe=False)
        if self.objects is None:
            return None
        from ragfence.stores.local import LocalObjects

        return LocalObjects(Path(self.objects))

    @property
    def _prefix(self) -> str:
        return self.folder.name


@contextlib.contextmanager
def site(backend: str, folder: Path, *, s3: servers.S3Server | None = None) -> Iterator[Site]:
    """Redis servers are started for the scenario alone, since it will flush and kill them; S3 is shared."""
    objects: str | None = str(folder / "objects") if backend.endswith("+folder") else None
    if backend == SQLITE:
        yield Site(backend, folder, str(folder / "fences.db"), objects)
        return
    if backend == VALKEY_S3:
        assert s3 is not None
        objects = f"s3://{s3.bucket}/{folder.name}?endpoint_url={s3.url}"
    with contextlib.ExitStack() as stack:
        with _one_start_at_a_time:
            if backend.startswith(PAIR):
                pair = stack.enter_context(servers.valkey_pair(data_dir=folder / "servers"))
                place = Site(backend, folder, pair.url, objects, pair=pair)
            elif backend == CLUSTER_FOLDER:
                cluster = stack.enter_context(servers.valkey_cluster(data_dir=folder / "servers"))
                place = Site(backend, folder, cluster.url, objects, cluster=cluster)
            else:
                start = servers.redis62 if backend.startswith(REDIS62) else servers.valkey
                args = ("--appendfsync", "always") if backend == VALKEY_FSYNC else ()
                server = stack.enter_context(start(appendonly=True, args=args))
                s3 = s3 if backend == VALKEY_S3 else None
                far = stack.enter_context(start(appendonly=True)) if backend == TWO_REGIONS else None
                place = Site(backend, folder, server.url, objects, redis=server, far=far, s3=s3)
        yield place
