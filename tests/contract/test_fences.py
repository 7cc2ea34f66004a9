"""One contract, every fence store."""

from __future__ import annotations

from typing import Any

import pytest

from ragfence.core.decision_rows import Row
from ragfence.core.layout import TOKEN_BYTES, RowKind
from ragfence.stores.fences import FenceStore
from ragfence.testing.contracts.batches import BatchContract
from ragfence.testing.contracts.fences import FenceStoreContract, FencesUnderTest, SealContract
from ragfence.testing.contracts.replays import ReplayContract
from ragfence.testing.faults import FaultyFences


class _NeverClosed:
    """A store in memory is its own server: fences are opened on it and closed, one after the other."""

    test_a_closed_store_refuses_every_call = None
    test_calls_under_way_while_a_store_is_closed_end_or_are_refused = None


class TestMemory(_NeverClosed, FenceStoreContract):
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

    def test_a_script_that_one_node_forgot_is_run_once_on_the_others(self, fences: FencesUnderTest) -> None:
        store = fences.store
        for shard in range(0, 64, 4):
            token = shard.to_bytes(TOKEN_BYTES, "big")
            store.record([Row(token, 0, store.now_ms(), RowKind.NEW, bytes((shard,)) + b"k" * 32, b"f" * 16)])
        entries = store.row_entries()
        assert len(entries) == 16
        store.drop_rows([each._replace(data=b"another") for each in entries])  # every node knows the script
        _, node = store._link.primaries()[0]  # type: ignore[attr-defined]
        node.script_flush()
        assert store.drop_rows(entries) == len(entries)


class TestFaultyWithoutFaults(SealContract, BatchContract, ReplayContract):
    """A wrapper that only passes calls on: a part of the contract shows that answers come through it unchanged."""

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
