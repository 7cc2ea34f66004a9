"""One contract, every fence store."""

from __future__ import annotations

from typing import Any

import pytest

from ragfence.stores.fences import FenceStore
from ragfence.testing.contract_fences import FenceStoreContract, FencesUnderTest
from ragfence.testing.faults import FaultyFences


class TestMemory(FenceStoreContract):
    @pytest.fixture
    def fences(self, memory_fences: FencesUnderTest) -> FencesUnderTest:
        return memory_fences


class TestSqlite(FenceStoreContract):
    @pytest.fixture
    def fences(self, sqlite_fences: FencesUnderTest) -> FencesUnderTest:
        return sqlite_fences


class TestRedis(FenceStoreContract):
    """Valkey, and Redis 6.2: the oldest we support."""

    @pytest.fixture
    def fences(self, redis_fences: FencesUnderTest) -> FencesUnderTest:
        return redis_fences


class TestCluster(FenceStoreContract):
    """Three Valkey nodes: every shard on its own, none of them in one call with another."""

    @pytest.fixture
    def fences(self, cluster_fences: FencesUnderTest) -> FencesUnderTest:
        return cluster_fences


class TestFaultyWithoutFaults(FenceStoreContract):
    @pytest.fixture
    def fences(self, memory_fences: FencesUnderTest) -> FencesUnderTest:
        return _Wrapped(memory_fences)


class _Wrapped:
    def __init__(self, inner: FencesUnderTest) -> None:
        self._inner = inner

    @property
    def store(self) -> FenceStore:
        return FaultyFences(self._inner.store)

    def reopen(self, tenant: str = "default", *, solo: bool = False) -> FenceStore:
        return FaultyFences(self._inner.reopen(tenant, solo=solo))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
