"""The holder of a lock is killed or frozen: the next one gets in after the ttl, and is not harmed by the first."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

import ragfence
from ragfence.core.operations import FenceNumber
from ragfence.errors import InFlight
from tests import servers

NAME, TTL_S = "reindex:docs", 1.0
WAIT_S = 60


@pytest.fixture(params=["sqlite", "valkey"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return str(tmp_path / "store")
    server: servers.RedisServer = request.getfixturevalue("valkey_server")
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
    return server.url


class Holder:
    """Another process that holds the lock."""

    def __init__(self, url: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.lock_worker", url, NAME, str(TTL_S)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        epoch, counter = self._line().split()
        self.fence = FenceNumber(int(epoch), int(counter))

    def ask(self, what: str) -> str:
        assert self._process.stdin
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        return self._line()

    def send(self, number: signal.Signals) -> None:
        os.kill(self._process.pid, number)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.send(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def _line(self) -> str:
        assert self._process.stdout
        return self._process.stdout.readline().strip()


@pytest.fixture
def holder(url: str) -> Iterator[Holder]:
    made = Holder(url)
    yield made
    made.end()


def test_the_lock_of_a_killed_holder_is_free_after_its_ttl(url: str, holder: Holder) -> None:
    with ragfence.open(url) as fence:
        with pytest.raises(InFlight), fence.lock(NAME):
            pass
        holder.send(signal.SIGKILL)
        with fence.lock(NAME, wait_s=WAIT_S) as lease:
            assert lease.takeover
            assert lease.fence > holder.fence
            lease.check()


def test_a_holder_that_was_frozen_learns_it_and_frees_nothing(url: str, holder: Holder) -> None:
    assert holder.ask("check") == "held"
    with ragfence.open(url) as fence:
        holder.send(signal.SIGSTOP)
        with fence.lock(NAME, ttl_s=30, wait_s=WAIT_S) as lease:
            assert lease.fence > holder.fence
            holder.send(signal.SIGCONT)
            assert holder.ask("check") == "lost"
            assert holder.ask("leave") == "left without the lock"
            lease.check()
            with pytest.raises(InFlight), fence.lock(NAME):
                pass
        with fence.lock(NAME) as third:
            assert third.fence > lease.fence


def test_a_flush_lets_the_next_one_in_with_a_higher_number(url: str, holder: Holder) -> None:
    if not url.startswith("redis"):
        pytest.skip("nothing flushes SQLite")
    with redis.Redis.from_url(url) as client, ragfence.open(url) as fence:
        client.flushall()
        with fence.lock(NAME) as lease:
            assert lease.fence > holder.fence
            assert holder.ask("leave") == "left without the lock"
            lease.check()
            with pytest.raises(InFlight), fence.lock(NAME):
                pass
