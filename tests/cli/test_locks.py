"""A lock on the command line: who holds it, since when, and how it is taken away."""

from __future__ import annotations

import json
import time

import pytest

from ragfence.errors import LeaseLost
from tests.cli.conftest import Site


def test_a_held_lock_is_shown_in_plain_words(site: Site) -> None:
    fence = site.open()
    lock = fence.lock("reindex:docs", ttl_s=30)
    with lock as lease:
        (shown,) = [json.loads(line) for line in site.run("keys", "--state", "locked", "--json").stdout.splitlines()]
        assert (shown["key"], shown["kind"], shown["source_id"]) == (lock.key, "lock", "reindex:docs")
        assert 20_000 < shown["lease_left_ms"] <= 30_000
        explained = site.run("explain", "reindex:docs").stdout
        assert f"with fence number {lease.fence}, expires in" in explained
        assert "locked by" in explained
        assert "attempt" not in explained
        told = site.json("status")
        assert (told["locks"], told["pending"], told["keys"]) == (1, {"count": 0, "oldest": None}, 1)
        assert {"kind": "lock", "state": "locked", "count": 1, "estimated": False} in told["records"]
        assert "1 held" in site.run("status").stdout
    assert "free: nobody holds this lock" in site.run("explain", lock.key).stdout
    assert site.json("status")["locks"] == 0


def test_the_lock_of_a_holder_that_died_is_lapsed(site: Site) -> None:
    fence = site.open()
    lock = fence.lock("reindex:docs", ttl_s=0.1, timeout_s=0.112)  # not renewed
    with pytest.raises(LeaseLost), lock:  # noqa: PT012
        time.sleep(0.2)
        assert "lapsed" in site.run("keys").stdout
        assert "the next caller gets the lock" in site.run("explain", lock.key).stdout
        with fence.lock("reindex:docs"):
            pass


def test_release_takes_a_lock_from_its_holder(site: Site) -> None:
    fence = site.open()
    lock = fence.lock("reindex:docs", ttl_s=30)
    with pytest.raises(LeaseLost), lock:  # noqa: PT012
        done = site.run("release", lock.key, "--dry-run")
        assert (done.exit_code, "would release" in done.stdout) == (0, True)
        done = site.run("release", lock.key, "--yes")
        assert done.exit_code == 0, done.output
        assert "it was locked by" in done.stdout
        with fence.lock("reindex:docs"):
            pass
        assert site.run("release", lock.key, "--yes").exit_code == 1


def test_a_query_releases_no_locks(site: Site) -> None:
    fence = site.open()
    with fence.lock("reindex:docs") as lease:
        for state in ("quarantined", "released"):
            assert site.json("release", "--state", state, "--kind", "lock")["count"] == 0
        lease.check()
