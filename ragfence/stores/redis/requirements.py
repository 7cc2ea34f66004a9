"""What a Redis server must be like to keep a promise, and what a seal may wait for before it counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ragfence.errors import StoreUnsafe
from ragfence.stores.redis.replies import Command

OLDEST = (6, 2)
WAITAOF_SINCE = (7, 2)


@dataclass(frozen=True, slots=True)
class Confirmation:
    """What a seal waits for before it counts: replicas that have it, and disks that have it."""

    replicas: int = 0
    aof: bool = False
    timeout_ms: int = 1000

    @property
    def command(self) -> Command | None:
        if self.aof:
            return (b"WAITAOF", 1, self.replicas, self.timeout_ms)
        return (b"WAIT", self.replicas, self.timeout_ms) if self.replicas else None

    def missing(self, reply: Any) -> str:
        """What did not come in time, in words; empty when all did."""
        disks, replicas = (reply[0], reply[1]) if self.aof else (1, reply)
        if disks < 1:
            return "its own append-only file"
        return f"{self.replicas - replicas} of {self.replicas} replicas" if replicas < self.replicas else ""


def refuse_without_aof(url: str, info: Mapping[str, Any]) -> None:
    """Refuses a server that can never confirm what the policy waits for."""
    if version_of(info) < WAITAOF_SINCE:
        raise StoreUnsafe(
            f"{url} is Redis {info.get('redis_version')} and has no WAITAOF",
            hint="durability.wait_aof needs Redis 7.2 or newer, or Valkey",
        )
    if not info.get("aof_enabled"):
        raise StoreUnsafe(
            f"{url} keeps no append-only file to wait for",
            hint="run `CONFIG SET appendonly yes`, or leave durability.wait_aof out of the policy",
        )


def version_of(info: Mapping[str, Any]) -> tuple[int, ...]:
    digits = str(info.get("redis_version", "0")).split(".")[:2]
    return tuple(int(part) if part.isdigit() else 0 for part in digits)


def refuse_unsafe(url: str, info: Mapping[str, Any]) -> None:
    """Refuses a server that could forget a fence behind our back."""
    version = info.get("redis_version", "0")
    if version_of(info) < OLDEST:
        raise StoreUnsafe(f"{url} is Redis {version}", hint="ragfence needs Redis 6.2 or newer, or Valkey")
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise StoreUnsafe(
            f"{url} may evict fences: its maxmemory-policy is {policy!r}",
            hint="run `CONFIG SET maxmemory-policy noeviction`, or use a Redis of its own: an evicted fence is a "
            "repeated effect",
        )
    if info.get("role") != "master":
        raise StoreUnsafe(f"{url} is a replica", hint="open the primary: a replica may lag behind it")
