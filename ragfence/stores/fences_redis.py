"""RedisFences: the fence store for many machines, on Redis 6.2 or newer, or Valkey.

A single claim is one script call that decides and writes the decision row. A batch is one MGET, which answers the
replays, then one call that claims the rest and writes the rows of all. Expiry is decided by Redis' own TIME. Every
script is repeatable with the same token, so a call whose reply was lost is simply sent again.

Redis is the fast index, not the truth: shards answer only while their marker carries the run_id of the very server
process that answers. After a restart, failover or flush they are hydrated from the object store first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files
from typing import Any, TypeVar

import redis
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

from ragfence.core.decisions import (
    Claim,
    Held,
    LeaseRef,
    Mode,
    Replay,
    Seal,
    SealOutcome,
    Verdict,
    decide,
)
from ragfence.core.ledger import row_for_claim
from ragfence.core.records import Head, KeyRecord, SourceRecord, park, short, unpark
from ragfence.core.rows import Row, decode_rows
from ragfence.errors import StoreUnavailable, StoreUnsafe
from ragfence.stores.fences import Loaded, LoadedSource, Lookup, Marker, Scanned, Stats
from ragfence.stores.redis_errors import understood, without_credentials
from ragfence.stores.redis_wire import Names, lease_done, outcome_of, pack_claim, pack_lease, pack_seal, verdict_of

OLDEST = (6, 2)
SOLO_ROWS_PER_SHARD = 2_000
"""Without an object store nothing drains the rows: the newest batches are kept."""

_LUA = files("ragfence.stores") / "lua"
_REAL_NOW = "local function now() local t = redis.call('TIME') return t[1] * 1000 + math.floor(t[2] / 1000) end"
_TEST_NOW = "local function now() return tonumber(redis.call('GET', '{}')) end"
# Redis 6 refuses writes after TIME and INFO unless a script replicates its effects; later ones always do.
_EFFECTS = "if redis.replicate_commands then redis.replicate_commands() end"

Item = TypeVar("Item", Claim, Seal, LeaseRef)


class RedisFences:
    def __init__(
        self,
        url: str,
        tenant: str = "default",
        *,
        solo: bool = False,
        client: Any = None,
        timeout_s: float = 5.0,
        test_clock: str | None = None,
    ) -> None:
        self.tenant = tenant
        self.solo = solo
        self._names = Names(tenant)
        self._most_rows = SOLO_ROWS_PER_SHARD if solo else 0
        self._test_clock = test_clock
        self.url = without_credentials(url)
        try:
            self._client: Any = client or redis.Redis.from_url(
                url,
                socket_timeout=timeout_s,
                socket_connect_timeout=min(timeout_s, 3.0),
                retry=Retry(ExponentialBackoff(cap=0.2, base=0.01), retries=3),
                health_check_interval=30,
            )
        except ValueError:
            # Not its words: they quote what was taken for the port, which may be the start of a password.
            raise StoreUnavailable(
                f"{self.url} is no Redis URL",
                hint="redis://user:password@host:6379/0, with / ? # and @ in the password percent-encoded",
            ) from None
        now_lua = _TEST_NOW.format(test_clock) if test_clock else _REAL_NOW
        records = (_LUA / "records.lua").read_text()
        self._scripts = {
            name: self._client.register_script(
                "\n".join((_EFFECTS, now_lua, records, (_LUA / f"{name}.lua").read_text()))
            )
            for name in ("claim", "seal", "lease", "epoch")
        }
        self._refuse_unsafe_server()

    def claim(self, claims: Sequence[Claim]) -> list[Verdict]:
        if len(claims) == 1:
            return self._claim_by_script(claims, {})
        now_ms, hits = self._replays(claims)
        rows: dict[int, list[bytes]] = {}
        for at, verdict in hits.items():
            if row := row_for_claim(claims[at], verdict, now_ms):
                rows.setdefault(claims[at].key[0], []).append(row.encode())
        misses = [claim for at, claim in enumerate(claims) if at not in hits]
        rest = iter(self._claim_by_script(misses, rows))
        return [hits[at] if at in hits else next(rest) for at in range(len(claims))]

    def seal(self, seals: Sequence[Seal]) -> list[SealOutcome]:
        keys, args, order = self._grouped(seals, pack_seal, with_counter=False, with_prefix=True)
        replies = self._call("seal", keys, [*self._common(order), *args])
        return _in_order(order, [outcome_of(reply) for reply in replies])

    def renew(self, leases: Sequence[LeaseRef]) -> list[bool]:
        return self._lease_call("renew", leases)

    def release(self, leases: Sequence[LeaseRef], error: str = "", *, expire: bool = False) -> list[bool]:
        return self._lease_call("expire" if expire else "release", leases, short(error)[1:])

    def pardon(self, leases: Sequence[LeaseRef]) -> list[bool]:
        return self._lease_call("pardon", leases)

    def read(self, lookups: Sequence[Lookup]) -> list[Held]:
        return self._read(lookups)[1]

    def _read(self, lookups: Sequence[Lookup]) -> tuple[int, list[Held]]:
        shards = sorted({lookup.key[0] for lookup in lookups})
        names = [self._names.record(lookup.key) for lookup in lookups]
        names += [self._names.source(lookup.key[0], lookup.source) for lookup in lookups]
        run_id, now_ms, values = self._snapshot([*(self._names.markers[shard] for shard in shards), *names])
        epochs = dict(zip(shards, (_usable(raw, run_id) for raw in values), strict=False))
        records, sources = values[len(shards) :][: len(lookups)], values[len(shards) + len(lookups) :]
        return now_ms, [
            self._held(lookup, record, source, epochs[lookup.key[0]])
            for lookup, record, source in zip(lookups, records, sources, strict=True)
        ]

    def heads(self, shard: int) -> Iterator[tuple[bytes, Head]]:
        run_id, _, (marker,) = self._snapshot([self._names.markers[shard]])
        epoch = _usable(marker, run_id)
        if epoch is None and not self.solo:
            return
        prefix = len(self._names.prefixes[shard]) + 1
        for name, data, _ in self._scan(self._names.pattern(b"s", shard)):
            source = SourceRecord.decode(data)
            if source.head and (self.solo or source.stamp == epoch):
                yield name[prefix:], source.head

    def scan(self, shard: int | None = None) -> Iterator[Scanned]:
        for name, data, expires_ms in self._scan(self._names.pattern(b"k", shard)):
            at = name.index(b"}")
            key = bytes.fromhex(name[at - 2 : at].decode()) + name[at + 2 :]
            # Parked records start with their stamp, whose first byte is 0; a record with its version.
            record = KeyRecord.decode(data) if data[0] else unpark(data, None)
            if record:
                yield Scanned(key, record, expires_ms)

    def forget(self, keys: Sequence[bytes]) -> None:
        names = [self._names.record(key) for key in keys]
        with understood(self.url):
            for name, data in zip(names, self._client.mget(names), strict=True):
                if data and data[0] and KeyRecord.decode(data).ended:
                    self._client.delete(name)

    def stats(self) -> Stats:
        counted: dict[tuple[str, str], int] = {}
        for found in self.scan():
            slot = (found.record.kind, found.record.state.name.lower())
            counted[slot] = counted.get(slot, 0) + 1
        sources = sum(1 for _ in self._scan(self._names.pattern(b"s")))
        with understood(self.url):
            rows = sum(self._client.xlen(name) for name in self._names.rows)
            used = self._client.info("memory").get("used_memory")
        return Stats(counted, sources, rows, used)

    def purge_expired(self, limit: int = 1000) -> int:
        """Redis drops what expired by itself."""
        return 0

    def record(self, rows: Sequence[Row]) -> None:
        entries: dict[int, list[bytes]] = {}
        for row in rows:
            entries.setdefault(row.key[0], []).append(row.encode())
        with understood(self.url), self._client.pipeline(transaction=False) as pipe:
            for shard, encoded in entries.items():
                most = {"maxlen": self._most_rows, "approximate": True} if self._most_rows else {}
                pipe.xadd(self._names.rows[shard], {b"d": b"".join(encoded)}, **most)
            pipe.execute()

    def rows(self, since_ms: int = 0) -> Iterator[Row]:
        # A replaced clock says nothing about the ids of the stream, so only the real one bounds the range.
        first = "-" if self._test_clock else str(since_ms)
        for name in self._names.rows:
            start = first
            while True:
                with understood(self.url):
                    page = self._client.xrange(name, start, "+", count=500)
                for entry, fields in page:
                    start = b"(" + entry
                    yield from (row for row in decode_rows(fields[b"d"]) if row.ts_ms >= since_ms)
                if len(page) < 500:
                    break

    def now_ms(self) -> int:
        return self._snapshot([self._names.markers[0]])[1]

    def markers(self) -> list[Marker | None]:
        run_id, _, values = self._snapshot(self._names.markers)
        found: list[Marker | None] = []
        for raw in values:
            if raw is None:
                found.append(None)
                continue
            state, epoch, run = raw.split(b":", 2)
            found.append(Marker(int(epoch), state == b"R", state == b"R" and run == run_id))
        return found

    def begin_epoch(self, epoch: int) -> bool:
        return bool(self._call("epoch", self._names.markers, ["begin", epoch]))

    def load(self, epoch: int, items: Sequence[Loaded]) -> bool:
        by_shard: dict[int, tuple[list[bytes], list[bytes]]] = {}
        for item in items:
            if isinstance(item, LoadedSource):
                shard, name = item.shard, self._names.source(item.shard, item.source)
                data = SourceRecord(epoch, item.head).encode()
            else:
                shard, name = item.key[0], self._names.record(item.key)
                data = park(epoch, item.record)
            names, values = by_shard.setdefault(shard, ([], []))
            names.append(name)
            values.append(data)
        return all(
            self._call("epoch", [self._names.markers[shard], *names], ["load", epoch, *values])
            for shard, (names, values) in by_shard.items()
        )

    def finish_epoch(self, epoch: int) -> bool:
        return bool(self._call("epoch", self._names.markers, ["finish", epoch]))

    def forget_markers(self, below: int) -> None:
        self._call("epoch", self._names.markers, ["forget", below])

    def lock(self, name: str, token: str, ttl_ms: int) -> bool:
        key = self._names.lock(name)
        with understood(self.url):
            if self._client.set(key, token, nx=True, px=ttl_ms):
                return True
            return bool(self._client.get(key) == token.encode() and self._client.pexpire(key, ttl_ms))

    def unlock(self, name: str, token: str) -> None:
        key = self._names.lock(name)
        with understood(self.url):
            if self._client.get(key) == token.encode():
                self._client.delete(key)

    def close(self) -> None:
        self._client.close()

    def _claim_by_script(self, claims: Sequence[Claim], rows: dict[int, list[bytes]]) -> list[Verdict]:
        keys, args, order = self._grouped(claims, pack_claim, with_counter=True, with_prefix=True, rows=rows)
        if not order and not rows:
            return []
        groups = len({claim.key[0] for claim in claims} | set(rows))
        replies = self._call("claim", keys, [*self._common(order, groups), *args])
        return _in_order(order, [verdict_of(reply) for reply in replies])

    def _replays(self, claims: Sequence[Claim]) -> tuple[int, dict[int, Verdict]]:
        """The claims that an MGET can answer: sealed, same payload, and no lease anywhere near."""
        lookups = [Lookup(claim.key, claim.mode, claim.source) for claim in claims]
        answered: dict[int, Verdict] = {}
        now_ms, found = self._read(lookups)
        unclear: set[bytes] = set()
        for at, held in enumerate(found):
            claim = claims[at]
            verdict = decide(held, claim, 0)
            free = not (held.source and held.source.lease) and claim.source not in unclear
            if free and isinstance(verdict, Replay) and verdict.record is not None:
                answered[at] = verdict
            elif claim.mode is Mode.DOCUMENT:  # it may get a lease, so whoever comes after it in this batch must see it
                unclear.add(claim.source)
        return now_ms, answered

    def _held(self, lookup: Lookup, record: bytes | None, source: bytes | None, epoch: int | None) -> Held:
        if epoch is None and not self.solo:
            return Held()
        stamp = None if self.solo else epoch
        if lookup.mode is Mode.DOCUMENT:
            found = unpark(record, stamp) if record else None
        else:
            found = KeyRecord.decode(record) if record else None
        there = SourceRecord.decode(source) if source and lookup.mode is not Mode.KEYED else None
        if there and stamp is not None and there.stamp != stamp:
            there = None
        return Held(found, there)

    def _lease_call(self, action: str, leases: Sequence[LeaseRef], error: bytes = b"") -> list[bool]:
        keys, args, order = self._grouped(leases, pack_lease, with_counter=False, with_prefix=False)
        replies = self._call("lease", keys, [*self._common(order), action, error, *args])
        return _in_order(order, [lease_done(reply) for reply in replies])

    def _common(self, order: Sequence[Sequence[int]], groups: int | None = None) -> list[Any]:
        return ["1" if self.solo else "0", len(order) if groups is None else groups, self._most_rows]

    def _grouped(
        self,
        items: Sequence[Item],
        pack: Callable[[Item], bytes],
        *,
        with_counter: bool,
        with_prefix: bool,
        rows: dict[int, list[bytes]] | None = None,
    ) -> tuple[list[bytes], list[Any], list[list[int]]]:
        """KEYS and ARGV with the items grouped by shard, and which item stands where in the reply."""
        by_shard: dict[int, list[int]] = {shard: [] for shard in rows or ()}
        for at, item in enumerate(items):
            by_shard.setdefault(item.key[0], []).append(at)
        keys: list[bytes] = []
        args: list[Any] = []
        for shard, members in by_shard.items():
            keys.append(self._names.markers[shard])
            if with_counter:
                keys.append(self._names.counters[shard])
            keys.append(self._names.rows[shard])
            args.append(bytes((shard,)))
            if with_prefix:
                args.append(self._names.prefixes[shard])
            if rows is not None:
                args.append(b"".join(rows.get(shard, ())))
            args.append(len(members))
            for at in members:
                keys += self._names.keys_of(items[at])
                args.append(pack(items[at]))
        return keys, args, list(by_shard.values())

    def _call(self, script: str, keys: Sequence[bytes], args: Sequence[Any]) -> Any:
        with understood(self.url):
            return self._scripts[script](keys=keys, args=args)

    def _snapshot(self, names: Sequence[bytes]) -> tuple[bytes, int, list[bytes | None]]:
        """The run_id of the process that answers, its time, and the values: one connection, one round trip."""
        with understood(self.url), self._client.pipeline(transaction=False) as pipe:
            pipe.info("server")
            self._ask_time(pipe)
            pipe.mget(names)
            info, now, values = pipe.execute()
        return str(info["run_id"]).encode(), self._told_ms(now), values

    def _ask_time(self, pipe: Any) -> None:
        pipe.time() if self._test_clock is None else pipe.get(self._test_clock)

    def _told_ms(self, now: Any) -> int:
        return int(now[0]) * 1000 + int(now[1]) // 1000 if self._test_clock is None else int(now)

    def _scan(self, pattern: bytes) -> Iterator[tuple[bytes, bytes, int | None]]:
        """Name, value, and when it expires."""
        with understood(self.url):
            batch: list[bytes] = []
            for name in self._client.scan_iter(pattern, count=1000):
                batch.append(name)
                if len(batch) == 500:
                    yield from self._fetch(batch)
                    batch = []
            yield from self._fetch(batch)

    def _fetch(self, names: list[bytes]) -> Iterator[tuple[bytes, bytes, int | None]]:
        if not names:
            return
        with self._client.pipeline(transaction=False) as pipe:
            self._ask_time(pipe)
            pipe.mget(names)
            for name in names:
                pipe.pttl(name)
            now, values, *ttls = pipe.execute()
        now_ms = self._told_ms(now)
        for name, data, ttl_ms in zip(names, values, ttls, strict=True):
            if data is not None:
                yield name, data, now_ms + ttl_ms if ttl_ms > 0 else None

    def _refuse_unsafe_server(self) -> None:
        with understood(self.url):
            server, memory = self._client.info("server"), self._client.info("memory")
            role = self._client.info("replication").get("role")
        version = str(server.get("redis_version", "0"))
        if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
            raise StoreUnsafe(f"{self.url} is Redis {version}", hint="ragfence needs Redis 6.2 or newer, or Valkey")
        policy = memory.get("maxmemory_policy", "noeviction")
        if policy != "noeviction":
            raise StoreUnsafe(
                f"{self.url} may evict fences: its maxmemory-policy is {policy!r}",
                hint="run `CONFIG SET maxmemory-policy noeviction`, or use a Redis of its own: an evicted fence is a "
                "repeated effect",
            )
        if role != "master":
            raise StoreUnsafe(f"{self.url} is a replica", hint="open the primary: a replica may lag behind it")


def _usable(raw: bytes | None, run_id: bytes) -> int | None:
    if raw is None:
        return None
    state, epoch, run = raw.split(b":", 2)
    return int(epoch) if state == b"R" and run == run_id else None


def _in_order(order: Sequence[Sequence[int]], replies: Sequence[Any]) -> list[Any]:
    result: list[Any] = [None] * len(replies)
    for at, reply in zip((at for members in order for at in members), replies, strict=True):
        result[at] = reply
    return result
