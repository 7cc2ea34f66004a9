"""Expiry from end to end on real servers: Valkey and Redis 6.2 hold the fences, SeaweedFS and moto the objects."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import ragfence
from ragfence import Policy
from ragfence.errors import InFlight, Stale
from ragfence.stores.s3 import S3Objects
from tests.contract.conftest import RedisUnderTest
from tests.engine.ages import SOURCE_TTL_MS, TTL_MS, Meeting, assert_audited, perform, purge_all, ticket

pytestmark = pytest.mark.xdist_group("seaweedfs")


@dataclass
class Site:
    redis: RedisUnderTest
    objects: S3Objects
    folder: Path

    def open(self, **stores: Any) -> ragfence.Fence:
        """Another fence on the same servers; a test may put something in front of either store."""
        fences, objects = stores.get("fences", self.redis.store), stores.get("objects", self.objects)
        return ragfence.open(fences, objects=objects, policy=Policy(), journal=self.folder)

    def grow_old(self, ms: int) -> None:
        self.redis.clock.advance(ms + 60_000)

    def let_records_go(self) -> None:
        """What a purger gives back lives for one more millisecond of the server's own time."""
        time.sleep(0.05)

    def names(self) -> list[str]:
        return [entry.name for entry in self.objects.list("default/sealed/")]

    def held(self) -> list[Any]:
        return list(self.redis.store.scan())


@pytest.fixture(params=["valkey+seaweedfs", "redis6.2+moto"])
def site(request: pytest.FixtureRequest, s3_env: None, tmp_path: Path) -> Iterator[Site]:
    fences, objects = request.param.split("+")
    server = request.getfixturevalue("valkey_server" if fences == "valkey" else "redis62_server")
    s3 = request.getfixturevalue("seaweed_server" if objects == "seaweedfs" else "moto_server")
    redis = RedisUnderTest(server)
    # Not before the machine's: that is the clock by which the object server dates what it keeps.
    redis.clock.advance(max(time.time_ns() // 1_000_000 - redis.clock(), 0))
    store = S3Objects(s3.bucket, secrets.token_hex(8), endpoint_url=s3.url)
    try:
        yield Site(redis, store, tmp_path / "journal")
    finally:
        store.close()
        redis.close()


def test_a_purged_key_is_new_again_and_a_protected_one_is_not(site: Site) -> None:
    fence = site.open()
    for number in range(5):
        perform(fence, ticket(str(number)), result="first")
    site.grow_old(TTL_MS)
    perform(fence, ticket("0"))  # healed: its record answers for another lifetime
    purged = purge_all(fence, limit=2)
    assert (purged.objects, purged.scanned, purged.after) == (4, 5, "")
    site.let_records_go()
    assert len(site.names()) == len(site.held()) == 1
    assert perform(fence, ticket("0"), result="second").result == "first"
    for number in range(1, 5):
        receipt = perform(fence, ticket(str(number)), payload="another", result="second")
        assert (receipt.result, receipt.is_new, receipt.flags.attempt) == ("second", True, 1)
    assert_audited(fence)


def test_a_source_loses_its_lower_revisions_first_and_its_highest_last(site: Site) -> None:
    fence = site.open()
    for sequence, revision in ((1, "A"), (2, "B"), (3, "C"), (4, "A")):  # A is raised: it has a mark at 4
        perform(fence, ticket(sequence=sequence, revision=revision), result=sequence)
    assert len(site.names()) == 4
    site.grow_old(TTL_MS)
    assert fence.purge_expired().objects == 2
    site.redis.flush()
    with pytest.raises(Stale):
        perform(fence, ticket(sequence=3, revision="C"))
    site.grow_old(SOURCE_TTL_MS)
    assert fence.purge_expired().objects == 2
    site.let_records_go()
    assert site.names() == []
    assert perform(fence, ticket(sequence=3, revision="C"), payload="another", result="new").is_new
    assert_audited(fence)


@pytest.mark.parametrize("sequence", [None, 3])
def test_nobody_gets_in_while_a_key_is_removed_and_a_late_delete_is_made_good(site: Site, sequence: int | None) -> None:
    fence, operation = site.open(), ticket(sequence=sequence)
    perform(fence, operation, result="first")
    site.grow_old(SOURCE_TTL_MS)

    def freeze() -> Any:
        with pytest.raises(InFlight):
            perform(site.open(), operation)
        site.redis.clock.advance(30_001)  # the lease runs out
        return perform(site.open(), operation, result="second")

    meeting = Meeting("delete", freeze)
    assert site.open(objects=meeting.on(site.objects)).purge_expired().objects == 0
    assert meeting.met.result == "first"
    site.redis.flush()
    assert perform(fence, operation, result="third").result == "first"


def test_a_server_that_forgot_everything_is_hydrated_and_purged(site: Site) -> None:
    fence = site.open()
    perform(fence, ticket(), result="first")
    site.grow_old(TTL_MS)
    site.redis.flush()
    assert fence.purge_expired().objects == 1
    site.let_records_go()
    assert perform(fence, ticket(), result="second").result == "second"
