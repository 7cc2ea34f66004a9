"""One contract, every object store."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from ragfence.stores import s3 as objects_s3_listing
from ragfence.stores.local import LocalObjects
from ragfence.stores.objects import ObjectStore
from ragfence.stores.s3 import S3Objects
from ragfence.testing.contracts.objects import ObjectListingContract, ObjectStoreContract
from ragfence.testing.memory import FaultyObjects, MemoryObjects
from tests.servers import S3Server


class TestLocal(ObjectStoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        return LocalObjects(tmp_path)


class TestMemory(ObjectStoreContract):
    @pytest.fixture
    def store(self) -> ObjectStore:
        return MemoryObjects()


class TestFaultyWithoutFaults(ObjectListingContract):
    """A wrapper that only passes calls on; `test_objects_faulty.py` has the rest of its calls."""

    @pytest.fixture
    def store(self) -> ObjectStore:
        return FaultyObjects(MemoryObjects())


class TestMoto(ObjectStoreContract):
    concurrent_writers = 1
    no_race_reason = "moto's conditional put is not atomic: it checks, then puts, without a lock"

    @pytest.fixture
    def store(self, moto_server: S3Server, s3_env: None) -> Iterator[ObjectStore]:
        with closing(S3Objects(moto_server.bucket, secrets.token_hex(8), endpoint_url=moto_server.url)) as store:
            yield store


class TestMotoWithoutProbeInSmallPages(ObjectListingContract):
    """Listings that trust no order of the server's, and every listing many pages long."""

    @pytest.fixture
    def store(self, moto_server: S3Server, s3_env: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
        monkeypatch.setattr(objects_s3_listing, "PAGE", 2)
        prefix = secrets.token_hex(8)
        with closing(S3Objects(moto_server.bucket, prefix, endpoint_url=moto_server.url, probe=False)) as store:
            yield store


@pytest.mark.xdist_group("seaweedfs")  # slow to start: one worker only
class TestSeaweedFS(ObjectStoreContract):
    race_rounds = 2

    @pytest.fixture
    def store(self, seaweed_server: S3Server, s3_env: None) -> Iterator[ObjectStore]:
        with closing(S3Objects(seaweed_server.bucket, secrets.token_hex(8), endpoint_url=seaweed_server.url)) as store:
            yield store


@pytest.mark.xdist_group("seaweedfs")  # slow to start: one worker only
class TestSeaweedFSInSmallPages(ObjectListingContract):
    @pytest.fixture
    def store(self, seaweed_server: S3Server, s3_env: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
        monkeypatch.setattr(objects_s3_listing, "PAGE", 2)
        prefix = secrets.token_hex(8)
        with closing(S3Objects(seaweed_server.bucket, prefix, endpoint_url=seaweed_server.url, probe=False)) as store:
            yield store
