"""Checks a Redis, the primary of a Sentinel or each primary of a cluster: does it keep what is written to it?

`look` gathers the facts of each node, also of one that `RedisFences` would refuse to open; `redis_checks` judges them
and reads nothing. What a user without rights may not see is left out, and said.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import redis

from ragfence.core.policy import DurabilityRules
from ragfence.stores.checkups.check import Check, fail, ok, warn
from ragfence.stores.redis.codec import Names
from ragfence.stores.redis.replies import understood
from ragfence.stores.redis.requirements import OLDEST, WAITAOF_SINCE, version_of
from ragfence.stores.redis.server_urls import open_link

CLOCK_OFF_MS = 1000
LAG_S = 10
LARGE_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class NodeFacts:
    node: str
    info: Mapping[str, Any]
    """INFO as parsed by redis-py; empty if the user may not call it"""
    round_trip_ms: float = 0.0
    clock_off_ms: int = 0
    """the server's clock minus ours"""
    settings: Mapping[str, str] | None = None
    """what CONFIG GET says of `save` and `appendfsync`; None: not allowed to ask, as with the documented ACL"""
    cluster_state: str = ""
    denied: tuple[str, ...] = ()
    """commands, as an ACL names them, that the user may not run"""


def look(url: str, tenant: str, durability: DurabilityRules, *, timeout_s: float = 5.0) -> list[NodeFacts]:
    """The facts of each node that takes writes. Raises what opening the store would raise when it cannot be reached."""
    names = Names(tenant)
    link = open_link(url, timeout_s=timeout_s, hash_tags=names.prefixes)
    if not link.clustered:
        # The health checks of redis-py are PINGs, and a server that cannot save refuses even those.
        link.client.connection_pool.connection_kwargs["health_check_interval"] = 0
    try:
        with understood(link.url), link.commands():
            return [_facts(node, client, names, durability) for node, client in link.primaries()]
    finally:
        link.close()


def redis_checks(nodes: Sequence[NodeFacts], durability: DurabilityRules, *, solo: bool) -> Iterator[Check]:
    """`solo`: there is no object store, so what it loses is lost permanently."""
    for facts in nodes:
        subject = f"redis {facts.node}"
        yield from _rights(subject, facts)
        if not facts.info:
            continue
        yield _server(subject, facts)
        yield from _loading(subject, facts.info)
        yield _role(subject, facts.info)
        yield from _cluster(subject, facts)
        yield _eviction(subject, facts.info)
        yield _memory(subject, facts.info)
        yield from _allocator(subject, facts.info)
        yield from _persistence(subject, facts, solo=solo)
        yield from _replicas(subject, facts.info, durability)
        yield from _waits_for_aof(subject, facts.info, durability)
        yield _clock(subject, facts.clock_off_ms)


def needed_commands(key: bytes, durability: DurabilityRules) -> dict[str, tuple[Any, ...]]:
    """What the fence store runs, by its name in an ACL, as calls that change nothing when the key is absent."""
    calls: dict[str, tuple[Any, ...]] = {
        "ping": ("PING",),
        "info": ("INFO", "server"),
        "time": ("TIME",),
        "get": ("GET", key),
        "mget": ("MGET", key),
        "set": ("SET", key, "", "XX"),
        "exists": ("EXISTS", key),
        "pttl": ("PTTL", key),
        "scan": ("SCAN", 0, "MATCH", key, "COUNT", 1),
        "xadd": ("XADD", key, "NOMKSTREAM", "*", "f", "v"),
        "xrange": ("XRANGE", key, "-", "+", "COUNT", 1),
        "xlen": ("XLEN", key),
        "hmget": ("HMGET", key, "f"),
        "hgetall": ("HGETALL", key),
        "hlen": ("HLEN", key),
        "hdel": ("HDEL", key, "f"),
        "zrem": ("ZREM", key, "m"),
        "zcount": ("ZCOUNT", key, 0, 1),
        "zrangebyscore": ("ZRANGEBYSCORE", key, 0, 1),
        "zadd": ("ZADD", key, "XX", 0, "m"),
        "script|load": ("SCRIPT", "LOAD", "return 1"),
        "evalsha": ("EVALSHA", "0" * 40, 0),
        # These write, as far as the type of the value lets them; the two after them remove the key again.
        "incr": ("INCR", key),
        "incrby": ("INCRBY", key, 1),
        "hset": ("HSET", key, "f", 1),
        "hincrby": ("HINCRBY", key, "f", 1),
        "pexpire": ("PEXPIRE", key, 1000),
        "del": ("DEL", key),
    }
    if durability.wait_aof:
        calls["waitaof"] = ("WAITAOF", 0, 0, 1)
    elif durability.wait_replicas:
        calls["wait"] = ("WAIT", 0, 1)
    return calls


def _facts(node: str, client: Any, names: Names, durability: DurabilityRules) -> NodeFacts:
    denied = tuple(_denied(client, names, durability))
    if "info" in denied:
        return NodeFacts(node, {}, denied=denied)
    info = client.info()
    measured = [_asked_the_time(client) for _ in range(5)] if "time" not in denied else [(0.0, 0)]
    round_trip_ms, clock_off_ms = min(measured)
    return NodeFacts(
        node,
        info,
        round_trip_ms=round_trip_ms,
        clock_off_ms=clock_off_ms,
        settings=_settings(client),
        cluster_state=_cluster_state(client) if info.get("cluster_enabled") else "",
        denied=denied,
    )


def _denied(client: Any, names: Names, durability: DurabilityRules) -> Iterator[str]:
    key = names.lock(f"doctor-{secrets.token_hex(8)}")
    for name, call in needed_commands(key, durability).items():
        try:
            client.execute_command(*call)
        except redis.exceptions.NoPermissionError:
            yield name
        except redis.ResponseError:
            continue  # allowed, and then something else: no such script, another node's slot, a replica


def _asked_the_time(client: Any) -> tuple[float, int]:
    """How long a round trip took, and how far off the server's clock is; the shortest trip knows best."""
    before = time.time()
    seconds, micros = client.time()
    after = time.time()
    return (after - before) * 1000, int(seconds * 1000 + micros / 1000 - (before + after) / 2 * 1000)


def _settings(client: Any) -> dict[str, str] | None:
    try:
        return {name: client.config_get(name).get(name, "") for name in ("save", "appendfsync")}
    except redis.ResponseError:
        return None


def _cluster_state(client: Any) -> str:
    try:
        said = client.execute_command("CLUSTER INFO")
    except redis.ResponseError:
        return ""
    # A plain client answers with the text, one that belongs to a cluster with a dict.
    info = said if isinstance(said, dict) else dict(_pairs(said))
    return str(info.get("cluster_state", ""))


def _pairs(said: bytes | str) -> Iterator[tuple[str, str]]:
    for line in (said.decode() if isinstance(said, bytes) else said).splitlines():
        name, colon, value = line.partition(":")
        if colon:
            yield name, value.strip()


def _rights(subject: str, facts: NodeFacts) -> Iterator[Check]:
    if facts.denied:
        yield fail(
            subject,
            f"this user may not run {', '.join(facts.denied)}",
            "grant " + " ".join(f"+{name}" for name in facts.denied) + " on ~rf{*, as docs/operations.md lists it",
        )
    else:
        yield ok(subject, "this user may run every command that is needed")


def _server(subject: str, facts: NodeFacts) -> Check:
    info = facts.info
    valkey = info.get("server_name") == "valkey"
    shown = f"Valkey {info.get('valkey_version')}" if valkey else f"Redis {info.get('redis_version')}"
    if version_of(info) < OLDEST:
        return fail(subject, f"is {shown}", "ragfence needs Redis 6.2 or newer, or Valkey")
    return ok(subject, f"{shown} answers in {facts.round_trip_ms:.1f} ms")


def _loading(subject: str, info: Mapping[str, Any]) -> Iterator[Check]:
    if info.get("loading"):
        yield warn(subject, "it is loading its data from disk", "wait: it answers when it is done")


def _role(subject: str, info: Mapping[str, Any]) -> Check:
    role = info.get("role")
    if role != "master":
        return fail(
            subject,
            f"is a replica of {info.get('master_host')}:{info.get('master_port')}",
            "open the primary: a replica may lag behind it, and takes no writes",
        )
    return ok(subject, "is a primary")


def _cluster(subject: str, facts: NodeFacts) -> Iterator[Check]:
    if not facts.info.get("cluster_enabled"):
        return
    if facts.cluster_state == "ok":
        yield ok(subject, "the cluster is whole")
    elif facts.cluster_state:
        yield fail(
            subject,
            f"the cluster says cluster_state:{facts.cluster_state}",
            "see CLUSTER INFO and CLUSTER NODES: slots without a server answer nothing",
        )
    else:
        yield warn(subject, "could not look at the state of the cluster", "grant +cluster|info, and run this again")


def _eviction(subject: str, info: Mapping[str, Any]) -> Check:
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        return fail(
            subject,
            f"may evict fences: maxmemory-policy is {policy}",
            "run `CONFIG SET maxmemory-policy noeviction` (and in redis.conf): an evicted fence is a repeated effect",
        )
    return ok(subject, "maxmemory-policy is noeviction")


def _memory(subject: str, info: Mapping[str, Any]) -> Check:
    used, most = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    if not most:
        return ok(subject, f"{used / 2**20:.1f} MiB used, no maxmemory: the memory of its machine is the limit")
    share = used / most
    text = f"{used / 2**20:.1f} MiB used of {most / 2**20:.1f} ({share:.0%})"
    advice = "raise maxmemory, or shorten stores.ttl in the policy: when it is full every claim is refused"
    if share > 0.95:
        return fail(subject, text, advice)
    return warn(subject, text, advice) if share > 0.80 else ok(subject, text)


def _allocator(subject: str, info: Mapping[str, Any]) -> Iterator[Check]:
    """In a large store whose rows come and go, scripts spend half their time in libc's allocator."""
    if str(info.get("mem_allocator", "")).startswith("libc") and int(info.get("used_memory", 0)) > LARGE_BYTES:
        yield warn(
            subject,
            "allocates memory with libc, which gets slow in a large store",
            "run a server that was built with jemalloc, as packages and images of Redis and Valkey are",
        )


def _persistence(subject: str, facts: NodeFacts, *, solo: bool) -> Iterator[Check]:
    info, settings = facts.info, facts.settings
    for field, what in (
        ("rdb_last_bgsave_status", "the last snapshot (BGSAVE)"),
        ("aof_last_bgrewrite_status", "the last rewrite of the append-only file"),
        ("aof_last_write_status", "the last write to the append-only file"),
    ):
        if info.get(field, "ok") != "ok":
            yield fail(
                subject,
                f"{what} failed",
                "see the server's log: disk full, or no rights; it may refuse writes until then",
            )
    lost = (
        "a restart forgets the newest fences, and their effects can happen again"
        if solo
        else "a restart forgets fences, which are hydrated from the objects again"
    )
    if info.get("aof_enabled"):
        fsync = settings.get("appendfsync") if settings else None
        text = "append-only file on" + (f", appendfsync {fsync}" if fsync else "")
        if fsync == "no" and solo:
            yield warn(subject, f"{text}: {lost}", "set appendfsync to everysec or always")
        else:
            yield ok(subject, text)
        return
    advice = "run `CONFIG SET appendonly yes` (and in redis.conf)"
    if settings is None:
        yield warn(
            subject, f"append-only file off, and whether it makes snapshots cannot be seen (CONFIG GET): {lost}", advice
        )
    elif settings.get("save"):
        yield warn(subject, f"snapshots only (save {settings['save']}): {lost}", advice)
    elif solo:
        yield warn(subject, f"no persistence, and no object store behind it: {lost}", f"{advice}, or give --objects")
    else:
        yield warn(subject, f"no persistence: {lost}", advice)


def _replicas(subject: str, info: Mapping[str, Any], durability: DurabilityRules) -> Iterator[Check]:
    if info.get("role") != "master":
        return
    replicas = [value for name, value in info.items() if _is_replica(name, value)]
    online = [replica for replica in replicas if replica.get("state") == "online"]
    slow = [replica for replica in online if int(replica.get("lag", 0)) > LAG_S]
    if slow or len(online) < len(replicas):
        behind = ", ".join(
            f"{replica.get('ip')}:{replica.get('port')} {replica.get('state')}, {replica.get('lag', 0)} s behind"
            for replica in replicas
            if replica in slow or replica not in online
        )
        yield warn(subject, f"replicas lag: {behind}", "a failover to one of them forgets what it does not have yet")
    else:
        yield ok(subject, f"{len(online)} replicas online" if online else "no replicas")
    if durability.wait_replicas > len(online):
        yield fail(
            subject,
            f"the policy waits for {durability.wait_replicas} replicas after a seal, and {len(online)} are online",
            "add replicas, or lower durability.wait_replicas: every seal would be in doubt",
        )


def _is_replica(name: str, value: Any) -> bool:
    return name.startswith("slave") and name[5:].isdigit() and isinstance(value, Mapping)


def _waits_for_aof(subject: str, info: Mapping[str, Any], durability: DurabilityRules) -> Iterator[Check]:
    if not durability.wait_aof:
        return
    if version_of(info) < WAITAOF_SINCE:
        yield fail(
            subject,
            f"the policy waits for the append-only file, and Redis {info.get('redis_version')} has no WAITAOF",
            "upgrade to Redis 7.2 or Valkey, or remove durability.wait_aof",
        )
    elif not info.get("aof_enabled"):
        yield fail(
            subject,
            "the policy waits for the append-only file, and it is off",
            "run `CONFIG SET appendonly yes` (and in redis.conf), or remove durability.wait_aof",
        )


def _clock(subject: str, off_ms: int) -> Check:
    text = f"its clock is {abs(off_ms) / 1000:.1f} s {'ahead of' if off_ms > 0 else 'behind'} this machine's"
    if abs(off_ms) > CLOCK_OFF_MS:
        return warn(
            subject, text, "set one of them (NTP): leases go by the server's clock, so only logs and ages disagree"
        )
    return ok(subject, "its clock agrees with this machine's")
