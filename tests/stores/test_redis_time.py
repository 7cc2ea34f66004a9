"""Leases run out by Redis' own clock, whatever the clocks of its clients say."""

from __future__ import annotations

import time

import pytest
import redis

from ragfence.core.decisions import Claim, Granted, InFlightVerdict
from ragfence.core.layout import TOKEN_BYTES
from ragfence.stores.redis.store import RedisFences


def claim(token: int, lease_ms: int) -> Claim:
    return Claim(key=b"\x01" + b"k" * 32, fingerprint=b"f" * 16, token=bytes((token,)) * TOKEN_BYTES, lease_ms=lease_ms)


@pytest.fixture
def fences(valkey_server):
    with redis.Redis.from_url(valkey_server.url) as server:
        server.flushall()
    store = RedisFences(valkey_server.url, solo=True)
    yield store
    store.close()


def test_a_client_whose_clock_is_years_ahead_does_not_steal_a_lease(fences, monkeypatch):
    fences.claim([claim(1, 600_000)])
    monkeypatch.setattr(time, "time", lambda: 4e9)
    monkeypatch.setattr(time, "time_ns", lambda: 4 * 10**18)
    assert isinstance(fences.claim([claim(2, 600_000)])[0], InFlightVerdict)


def test_a_lease_runs_out_when_redis_says_so(fences, monkeypatch):
    fences.claim([claim(1, 50)])
    monkeypatch.setattr(time, "time", lambda: 1.0)
    monkeypatch.setattr(time, "time_ns", lambda: 10**9)
    for _ in range(600):
        (verdict,) = fences.claim([claim(2, 600_000)])
        if isinstance(verdict, Granted):
            assert verdict.takeover
            return
        time.sleep(0.01)
    pytest.fail("the lease never ran out")
