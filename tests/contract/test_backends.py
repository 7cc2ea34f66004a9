"""One contract, every index backend."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ragfence.indexes.backends.backend import Backend
from ragfence.indexes.backends.lance import LanceBackend
from ragfence.indexes.backends.qdrant import QdrantBackend
from ragfence.indexes.backends.registry import default_lance_location
from ragfence.stores.s3 import S3Objects
from ragfence.testing.contracts.backends import BackendContract
from tests.servers import S3Server


class TestLance(BackendContract):
    @pytest.fixture
    def reopen(self, tmp_path: Path) -> Callable[[], Backend]:
        return lambda: LanceBackend(tmp_path / "lance")


@pytest.mark.xdist_group("seaweedfs")  # slow to start: one worker only
class TestLanceOnSeaweedFS(BackendContract):
    lasting = 4

    @pytest.fixture
    def reopen(self, seaweed_server: S3Server, s3_env: None) -> Iterator[Callable[[], Backend]]:
        objects = S3Objects(seaweed_server.bucket, secrets.token_hex(8), endpoint_url=seaweed_server.url)
        yield lambda: LanceBackend(*default_lance_location(objects))
        objects.close()


class TestQdrantLocal(BackendContract):
    fences_pointer = False
    many = 300  # local mode commits point by point
    lasting = 3
    several_handles = False

    @pytest.fixture
    def reopen(self, tmp_path: Path) -> Callable[[], Backend]:
        return lambda: QdrantBackend(path=tmp_path / "qdrant")
