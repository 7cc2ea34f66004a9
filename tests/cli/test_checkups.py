"""The judgements behind `ragfence doctor`, over facts: each one can be ok, and each one can be otherwise."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import redis

from ragfence.core.policy import DurabilityRules, Policy
from ragfence.errors import StoreUnsafe
from ragfence.stores.checkups.bucket import lifecycle_checks, versioning_checks
from ragfence.stores.checkups.check import (
    Check,
    Level,
    filesystem_check,
    filesystem_of,
    journal_check,
    markers_check,
    policy_check,
    refused,
    space_check,
    worst,
)
from ragfence.stores.checkups.redis_server import NodeFacts, needed_commands, redis_checks
from ragfence.stores.fences import Marker
from ragfence.stores.redis.store import refuse_unsafe  # type: ignore[attr-defined]

OPERATIONS = (Path(__file__).resolve().parents[2] / "docs/operations.md").read_text()
GIB = 2**30
HEALTHY: dict[str, Any] = {
    "redis_version": "7.2.4",
    "role": "master",
    "maxmemory_policy": "noeviction",
    "maxmemory": 0,
    "used_memory": 1_000_000,
    "aof_enabled": 1,
    "aof_last_bgrewrite_status": "ok",
    "aof_last_write_status": "ok",
    "rdb_last_bgsave_status": "ok",
    "connected_slaves": 0,
    "cluster_enabled": 0,
    "loading": 0,
}


@pytest.mark.parametrize(
    "info", [{"used_memory": 2**30, "mem_allocator": "jemalloc-5.3.0"}, {"used_memory": 2**20, "mem_allocator": "libc"}]
)
def test_an_allocator_matters_in_a_large_store_alone(info: dict[str, Any]) -> None:
    assert not_ok(judged(info)) == []


def replica(**more: Any) -> dict[str, Any]:
    return {"ip": "10.0.0.2", "port": 6379, "state": "online", "offset": 1, "lag": 0, **more}


def judged(
    info: dict[str, Any] | None = None, *, durability: DurabilityRules | None = None, solo: bool = False, **facts: Any
) -> list[Check]:
    facts = {"settings": {"save": "", "appendfsync": "everysec"}, **facts}
    node = NodeFacts("h:1", {**HEALTHY, **(info or {})}, **facts)
    return list(redis_checks([node], durability or DurabilityRules(), solo=solo))


def not_ok(checks: Sequence[Check]) -> list[tuple[str, str]]:
    for check in checks:
        assert check.level is Level.OK or check.advice, "whoever is told of a problem is told what to do"
    return [(check.level.value, check.text) for check in checks if check.level is not Level.OK]


def test_a_healthy_server_has_nothing_but_ok() -> None:
    checks = judged()
    assert not_ok(checks) == []
    assert {check.subject for check in checks} == {"redis h:1"}
    assert any(check.text.startswith("Redis 7.2.4 answers in") for check in checks)


@pytest.mark.parametrize(
    ("info", "facts", "level", "text"),
    [
        ({"redis_version": "6.0.16"}, {}, "fail", "is Redis 6.0.16"),
        ({"redis_version": "5"}, {}, "fail", "is Redis 5"),
        ({"maxmemory_policy": "allkeys-lru"}, {}, "fail", "maxmemory-policy is allkeys-lru"),
        ({"role": "slave", "master_host": "p", "master_port": 1}, {}, "fail", "is a replica of p:1"),
        ({"used_memory": 81, "maxmemory": 100}, {}, "warn", "(81%)"),
        ({"used_memory": 96, "maxmemory": 100}, {}, "fail", "(96%)"),
        ({"used_memory": 2**30, "mem_allocator": "libc"}, {}, "warn", "allocates memory with libc"),
        ({"loading": 1}, {}, "warn", "is loading"),
        ({"rdb_last_bgsave_status": "err"}, {}, "fail", "the last snapshot (BGSAVE) failed"),
        ({"aof_last_bgrewrite_status": "err"}, {}, "fail", "the last rewrite of the append-only file failed"),
        ({"aof_last_write_status": "err"}, {}, "fail", "the last write to the append-only file failed"),
        ({"aof_enabled": 0}, {}, "warn", "no persistence: a restart forgets fences, which are hydrated"),
        ({"aof_enabled": 0}, {"solo": True}, "warn", "no persistence, and no object store behind it"),
        ({"aof_enabled": 0}, {"settings": {"save": "3600 1"}}, "warn", "snapshots only (save 3600 1)"),
        ({"aof_enabled": 0}, {"settings": None}, "warn", "cannot be seen (CONFIG GET)"),
        ({}, {"settings": {"appendfsync": "no"}, "solo": True}, "warn", "appendfsync no"),
        ({"slave0": replica(lag=60)}, {}, "warn", "10.0.0.2:6379 online, 60 s behind"),
        ({"slave0": replica(state="wait_bgsave")}, {}, "warn", "10.0.0.2:6379 wait_bgsave"),
        ({}, {"clock_off_ms": 1500}, "warn", "its clock is 1.5 s ahead of this machine's"),
        ({}, {"clock_off_ms": -90_000}, "warn", "its clock is 90.0 s behind this machine's"),
        ({}, {"denied": ("xadd", "script|load")}, "fail", "may not run xadd, script|load"),
        ({"cluster_enabled": 1}, {"cluster_state": "fail"}, "fail", "cluster_state:fail"),
        ({"cluster_enabled": 1}, {}, "warn", "could not look at the state of the cluster"),
        (
            {},
            {"durability": DurabilityRules(wait_replicas=1)},
            "fail",
            "waits for 1 replicas after a seal, and 0 are online",
        ),
        (
            {"slave0": replica(), "slave1": replica(state="wait_bgsave")},
            {"durability": DurabilityRules(wait_replicas=2)},
            "fail",
            "and 1 are online",
        ),
        (
            {"redis_version": "7.0.15"},
            {"durability": DurabilityRules(wait_aof=True)},
            "fail",
            "Redis 7.0.15 has no WAITAOF",
        ),
        ({"aof_enabled": 0}, {"durability": DurabilityRules(wait_aof=True)}, "fail", "and it is off"),
    ],
)
def test_what_is_wrong_with_a_server_is_said(
    info: dict[str, Any], facts: dict[str, Any], level: str, text: str
) -> None:
    assert any(found == level and text in said for found, said in not_ok(judged(info, **facts))), judged(info, **facts)


@pytest.mark.parametrize(
    ("info", "facts", "text"),
    [
        ({"server_name": "valkey", "valkey_version": "9.1.2"}, {}, "Valkey 9.1.2 answers"),
        ({"used_memory": 79, "maxmemory": 100}, {}, "(79%)"),
        ({}, {}, "no maxmemory"),
        ({}, {"settings": None}, "append-only file on"),
        ({}, {}, "append-only file on, appendfsync everysec"),
        (
            {"slave0": replica(), "slave1": replica()},
            {"durability": DurabilityRules(wait_replicas=2)},
            "2 replicas online",
        ),
        ({}, {"durability": DurabilityRules(wait_aof=True)}, "append-only file on"),
        ({"cluster_enabled": 1}, {"cluster_state": "ok"}, "the cluster is whole"),
        ({}, {"clock_off_ms": -900}, "its clock agrees"),
        ({"slave_read_only": 1}, {}, "no replicas"),
    ],
)
def test_what_is_right_with_a_server_is_said_too(info: dict[str, Any], facts: dict[str, Any], text: str) -> None:
    checks = judged(info, **facts)
    assert not_ok(checks) == []
    assert any(text in check.text for check in checks)


@pytest.mark.parametrize(
    "info",
    [
        {},
        {"redis_version": "6.2.14"},
        {"redis_version": "6.0.1"},
        {"maxmemory_policy": "volatile-ttl"},
        {"role": "slave"},
    ],
)
def test_the_doctor_fails_exactly_what_the_store_refuses(info: dict[str, Any]) -> None:
    try:
        refuse_unsafe("redis://h", {**HEALTHY, **info})
        safe = True
    except StoreUnsafe:
        safe = False
    assert (worst(judged(info)) is not Level.FAIL) == safe


def test_a_server_that_shows_nothing_of_itself_is_told_only_that() -> None:
    checks = list(redis_checks([NodeFacts("h:1", {}, denied=("info",))], DurabilityRules(), solo=False))
    assert [(check.level.value, "info" in check.text) for check in checks] == [("fail", True)]


def test_each_node_is_judged_for_itself() -> None:
    nodes = [NodeFacts("a:1", HEALTHY), NodeFacts("b:2", {**HEALTHY, "maxmemory_policy": "allkeys-lru"})]
    checks = list(redis_checks(nodes, DurabilityRules(), solo=False))
    assert {check.subject for check in checks if check.level is Level.FAIL} == {"redis b:2"}


@pytest.mark.parametrize("server", ["valkey_server", "redis62_server"])
def test_what_a_real_server_says_of_itself_is_understood(server: str, request: pytest.FixtureRequest) -> None:
    running = request.getfixturevalue(server)
    with redis.Redis.from_url(running.url) as client:
        info = client.info()
    name = "Valkey 9" if server == "valkey_server" else "Redis 6.2"
    checks = list(redis_checks([NodeFacts("h:1", info, settings={"save": ""})], DurabilityRules(), solo=False))
    assert [level for level, _ in not_ok(checks)] == ["warn"]  # no persistence
    assert any(check.text.startswith(name) for check in checks)


def test_the_commands_that_are_tried_are_those_that_are_documented() -> None:
    """Whoever adds a command to the documented ACL teaches the doctor to try it, and the other way round."""
    rules, *_besides = re.findall(r"^ACL SETUSER ragfence (.+)$", OPERATIONS, re.M)
    documented = {word[1:] for word in rules.split() if word.startswith("+")}
    always = set(needed_commands(b"k", DurabilityRules()))
    at_most = always | set(needed_commands(b"k", DurabilityRules(wait_aof=True)))
    at_most |= set(needed_commands(b"k", DurabilityRules(wait_replicas=1)))
    assert always <= documented
    # What redis-py asks of a cluster is tried by connecting to it.
    assert {name for name in documented if not name.startswith(("cluster", "command", "readonly"))} <= at_most


MARKED = Marker(3, ready=True, usable=True)


@pytest.mark.parametrize(
    ("markers", "solo", "level", "text"),
    [
        ([None] * 64, False, "ok", "empty"),
        ([MARKED] * 64, False, "ok", "epoch 3, all 64 shards ready"),
        ([MARKED] * 60 + [None] * 4, False, "warn", "60 of 64 shards ready"),
        ([Marker(3, ready=True, usable=False)] * 64, False, "warn", "0 of 64 shards ready"),
        ([Marker(4, ready=False, usable=False)] * 64, False, "warn", "64 being hydrated"),
        ([MARKED] * 63 + [Marker(4, ready=True, usable=True)], False, "warn", "epoch 4, 64 of 64"),
        ([MARKED] * 5 + [None] * 59, True, "ok", "5 of 64 shards in use"),
        ([MARKED] * 5 + [Marker(2, ready=True, usable=False)], True, "warn", "1 of 6 shards start a new epoch"),
    ],
)
def test_markers(markers: list[Marker | None], solo: bool, level: str, text: str) -> None:
    check = markers_check("redis", markers, solo=solo)
    assert (check.level, text in check.text) == (level, True), check
    assert bool(check.advice) == (level != "ok")


@pytest.mark.parametrize(
    ("free", "total", "level"),
    [
        (50 * GIB, 100 * GIB, "ok"),
        (4 * GIB, 100 * GIB, "warn"),
        (GIB // 2, 2 * GIB, "warn"),
        (100 * 2**20, GIB, "fail"),
        (0, 0, "fail"),
    ],
)
def test_room_on_the_disk(free: int, total: int, level: str) -> None:
    assert space_check("sqlite", free, total).level == level


MOUNTS = r"""
/dev/sda1 / ext4 rw 0 0
server:/home /home nfs4 rw 0 0
/dev/sdb1 /home/me/local xfs rw 0 0
//nas/share /mnt/with\040blank cifs rw 0 0
tmpfs /mnt/over tmpfs rw 0 0
server:/x /mnt/over nfs rw 0 0
broken line
"""


@pytest.mark.parametrize(
    ("path", "kind", "level"),
    [
        ("/var/lib", "ext4", "ok"),
        ("/home/me/fences.db", "nfs4", "fail"),
        ("/home/me/local/x", "xfs", "ok"),
        ("/home/me/locally", "nfs4", "fail"),
        ("/homes", "ext4", "ok"),
        ("/mnt/with blank/x", "cifs", "fail"),
        ("/mnt/over/x", "nfs", "fail"),
    ],
)
def test_a_network_filesystem_is_found(path: str, kind: str, level: str) -> None:
    assert filesystem_of(path, MOUNTS) == kind
    assert filesystem_check("sqlite", kind, needs="locks").level == level
    assert filesystem_of(path, "") == ""
    assert filesystem_check("sqlite", "", needs="locks").level == "ok"


def test_policy_journal_and_refusals() -> None:
    assert "ragfence.yml" in policy_check(Policy(), "ragfence.yml").text
    assert "48 h (api)" in policy_check(Policy(), None).text
    assert journal_check("/j", 0).level == "ok"
    waiting = journal_check("/j", 3, oldest_age="2 h ago")
    assert (waiting.level, "3 effects" in waiting.text, "reconcile_journal" in waiting.advice) == ("warn", True, True)
    assert refused("redis", StoreUnsafe("no", hint="do")) == Check("redis", Level.FAIL, "no", "do")
    assert worst([]) is Level.OK


def rule(**more: Any) -> dict[str, Any]:
    return {"ID": "tidy", "Status": "Enabled", "Filter": {"Prefix": ""}, "Expiration": {"Days": 30}, **more}


@pytest.mark.parametrize(
    "harmful",
    [
        rule(),
        rule(Filter={}),
        rule(Filter={"Prefix": "team/"}),
        rule(Filter={"Prefix": "team/fences/acme/"}),
        rule(Filter={"And": {"Prefix": "team/", "ObjectSizeGreaterThan": 1}}),
        rule(Filter={"ObjectSizeGreaterThan": 1}),
        {"ID": "tidy", "Status": "Enabled", "Prefix": "team", "Expiration": {"Date": "2030-01-01"}},
        rule(Expiration={}, Transitions=[{"Days": 1, "StorageClass": "DEEP_ARCHIVE"}]),
        rule(Expiration={}, Transition={"Days": 1, "StorageClass": "GLACIER"}),
    ],
)
def test_a_lifecycle_rule_that_would_unseal_is_named(harmful: dict[str, Any]) -> None:
    (check,) = lifecycle_checks([harmful], "team/fences/")
    assert (check.level, "'tidy'" in check.text, bool(check.advice)) == ("fail", True, True)


@pytest.mark.parametrize(
    "harmless",
    [
        rule(Status="Disabled"),
        rule(Filter={"Prefix": "other/"}),
        rule(Filter={"Prefix": "team/fences-old/"}),
        rule(Filter={"Prefix": "team/fences/.probe/"}),
        rule(Filter={"Tag": {"Key": "tmp", "Value": "1"}}),
        rule(Filter={"And": {"Prefix": "team/", "Tags": [{"Key": "tmp", "Value": "1"}]}}),
        rule(Expiration={"ExpiredObjectDeleteMarker": True}),
        rule(Expiration={}, NoncurrentVersionExpiration={"NoncurrentDays": 3}),
        rule(Expiration={}, AbortIncompleteMultipartUpload={"DaysAfterInitiation": 3}),
        rule(Expiration={}, Transitions=[{"Days": 1, "StorageClass": "GLACIER_IR"}]),
    ],
)
def test_a_lifecycle_rule_that_does_no_harm_is_fine(harmless: dict[str, Any]) -> None:
    (check,) = lifecycle_checks([harmless], "team/fences/")
    assert check.level == "ok"


def test_a_store_in_the_whole_bucket_is_reached_by_every_rule() -> None:
    (check,) = lifecycle_checks([rule(Filter={"Prefix": "acme/"})], "")
    assert check.level == "fail"
    assert [check.level for check in lifecycle_checks([], "")] == ["ok"]


@pytest.mark.parametrize(("status", "level"), [("Enabled", "ok"), ("Suspended", "warn"), (None, "ok")])
def test_versioning(status: str | None, level: str) -> None:
    (check,) = versioning_checks({"Status": status} if status else {})
    assert check.level == level
