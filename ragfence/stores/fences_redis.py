"""RedisFences: the fence store for many machines, on Redis 6.2 or newer, or Valkey.

A single claim is one script call that decides and writes the decision row. A batch is one MGET, which answers the
replays, then one call that claims the rest and writes the rows of all. Expiry is decided by Redis' own TIME. Every
script is repeatable with the same token, so a call whose reply was lost is simply sent again.

Redis is the fast index, not the truth: shards answer only while their marker carries the run_id of the very server
process that answers. After a restart, failover or flush they are hydrated from the object store first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha1
from itertools import chain
from typing import Any, TypeVar

from redis.exceptions import NoScriptError

from ragfence.core.decisions import (
    DOCUMENT,
    KEYED,
    SEQUENCED,
    Ask,
    Claim,
    Held,
    LeaseRef,
    Replay,
    Seal,
    SealOutcome,
    Verdict,
    decide,
)
from ragfence.core.ledger import row_for_claim
from ragfence.core.records import (
    Head,
    KeyRecord,
    SourceRecord,
    checked_epoch,
    free_head,
    head_of_source,
    mark_of_source,
    park,
    refuse_newer_source,
    short,
    source_with,
    unpark,
)
from ragfence.core.rows import Row, decode_rows
from ragfence.errors import RagfenceError, StoreUnavailable
from ragfence.stores.fences import Loaded, LoadedSource, Lookup, Marker, RowEntry, Scanned, Stats
from ragfence.stores.redis_errors import REDIS_ERRORS, in_our_words, understood
from ragfence.stores.redis_link import Call, Link, ServerLink
from ragfence.stores.redis_loop import LoopLines
from ragfence.stores.redis_reading import Reader, Snapshot
from ragfence.stores.redis_safety import Confirmation, refuse_unsafe, refuse_without_aof
from ragfence.stores.redis_scripts import Alone, Script, scripts
from ragfence.stores.redis_urls import open_link
from ragfence.stores.redis_wire import (
    REPLAYED,
    Names,
    lease_done,
    outcome_of,
    pack_claim,
    pack_lease,
    pack_seal,
    replay_of,
    row_of_ask,
    verdict_of,
)

SOLO_ROWS_PER_SHARD = 2_000
"""Without an object store nothing drains the rows: the newest batches are kept."""

DROPPED_AT_ONCE = 200
"""entries; a script holds up everybody else"""

Item = TypeVar("Item", Claim, Seal, LeaseRef)
Answered = TypeVar("Answered", Verdict, SealOutcome)
_Needed = Callable[[list[Any]], bool]
"""Whether these replies count only once they are confirmed."""
_FOR_ONE = {"claim": (b"", b"1"), "seal": (b"1",)}
"""What stands between the ARGV of a shard and its single item: its number, and before that a claim's other rows."""
_Heads = list[tuple[tuple[bytes, ...], tuple[bytes, ...]]]
"""Per shard the KEYS and the ARGV that stand before those of its items."""


@dataclass(slots=True)
class _Group:
    """The items of one shard: what a script needs to know of them, and where they stand in the batch."""

    shard: int
    keys: list[bytes]
    args: list[Any]
    members: list[int]


def _always(_: list[Any]) -> bool:
    return True


def _tells_of_a_seal(replies: list[Any]) -> bool:
    """Whoever is answered with a seal relies on it as its owner does. The row of the answer was written after the seal,
    so whoever confirms the row has the seal, too."""
    return any(item[:1] == REPLAYED for reply in replies for item in reply)


def _heads_of(names: Names) -> dict[str, _Heads]:
    shards = range(len(names.prefixes))
    return {
        "claim": [
            ((names.markers[shard], names.counters[shard], names.rows[shard]), (bytes((shard,)), names.prefixes[shard]))
            for shard in shards
        ],
        "seal": [
            (
                (names.markers[shard], names.rows[shard], names.moves[shard]),
                (bytes((shard,)), names.prefixes[shard]),
            )
            for shard in shards
        ],
        "lease": [((names.markers[shard], names.rows[shard]), (bytes((shard,)),)) for shard in shards],
    }


class RedisFences:
    def __init__(
        self,
        url: str,
        tenant: str = "default",
        *,
        solo: bool = False,
        confirm: Confirmation | None = None,
        timeout_s: float = 5.0,
        test_clock: str | None = None,
    ) -> None:
        self.tenant = tenant
        self.solo = solo
        self._names = Names(tenant)
        self._most_rows = SOLO_ROWS_PER_SHARD if solo else 0
        self._solo = b"1" if solo else b"0"
        self._common = (self._solo, b"1", b"%d" % self._most_rows)
        """what stands before the single group of a batch of one"""
        self._heads = _heads_of(self._names)
        self._test_clock = test_clock
        self._confirm = confirm or Confirmation()
        self._waits_for = (self._confirm.command,) if self._confirm.command else ()
        patience_s = max(timeout_s, self._confirm.timeout_ms / 1000 + 1)
        self._link: Link = open_link(url, timeout_s=patience_s, hash_tags=self._names.prefixes)
        self.url = self._link.url
        self._scripts = scripts(test_clock, clustered=self._link.clustered)
        self._server = self._link if isinstance(self._link, ServerLink) and not self._waits_for else None
        """what can be asked by a call that was packed ahead"""
        self._ahead = {name: self._packed_ahead(name) for name in ("claim", "seal")}
        self._reader = Reader(self._link, self._names, test_clock)
        self._loop_lines = LoopLines(self._server.lines, patience_s) if self._server else None
        try:
            self._refuse_unsafe_servers()
        except BaseException:
            self._link.close()
            raise

    def claim(self, claims: Sequence[Claim]) -> list[Verdict]:
        if len(claims) == 1:
            return [verdict_of(self._alone("claim", claims[0], pack_claim(claims[0]), _tells_of_a_seal))]
        hits, rows = self._replays(claims) if claims else ([], {})
        misses = [claim for claim, hit in zip(claims, hits, strict=True) if hit is None]
        if rows and not misses:
            self._add_rows(rows)
            return [hit for hit in hits if hit is not None]
        groups = self._grouped(misses, pack_claim, self._heads["claim"], rows)
        replies = self._run("claim", groups, b"", confirm=_always if rows else _tells_of_a_seal)
        rest = iter([verdict_of(reply) for reply in replies])
        return [hit or next(rest) for hit in hits]

    def claim_soon(self, claims: Sequence[Claim], told: Callable[[list[Verdict] | None], None]) -> bool:
        return self._soon("claim", claims, pack_claim, verdict_of, told)

    def seal_soon(self, seals: Sequence[Seal], told: Callable[[list[SealOutcome] | None], None]) -> bool:
        return self._soon("seal", seals, pack_seal, outcome_of, told)

    def replays(self, asks: Sequence[Ask]) -> list[bytes | None]:
        if not asks:
            return []
        prefixes = [prefix + b"s" for prefix in self._names.prefixes]
        found = self._reader.snapshot([(ask[0][0], prefixes[ask[0][0]] + ask[1]) for ask in asks])
        stamps = {shard: b"" if epoch is None else epoch.to_bytes(8, "big") for shard, epoch in found.epochs.items()}
        ts = found.now_ms.to_bytes(6, "big")
        rows: dict[int, list[bytes]] = {}
        unclear: set[bytes] = set()
        records: list[bytes | None] = []
        for ask, data in zip(asks, found.values, strict=True):
            key, source, fingerprint, metadata_hash, sequence, _, _ = ask
            stamp = stamps[key[0]]
            record = None
            if data is not None and stamp and not (unclear and source in unclear):
                record = free_head(data, stamp, key[1:], fingerprint, metadata_hash, sequence)
            records.append(record)
            if record is None:  # it may be claimed: whoever comes after it in this batch must wait for that
                unclear.add(source)
                continue
            row = row_of_ask(ask, record, ts)
            if (written := rows.get(key[0])) is None:
                rows[key[0]] = [row]
            else:
                written.append(row)
        if rows:
            self._add_rows(rows)
        return records

    def _add_rows(self, rows: Mapping[int, Sequence[bytes]]) -> None:
        """Confirmed where seals are: the rows were written after the seals they tell of."""
        batches = [[shard] for shard in rows] if self._link.clustered else [list(rows)]
        script, names = self._scripts["rows"], self._names.rows
        calls = []
        for shards in batches:
            given = (self._most_rows, *(b"".join(rows[shard]) for shard in shards))
            calls.append(Call(shards[0], script.call([names[shard] for shard in shards], given)))
        self._called(script, calls, _always)

    def seal(self, seals: Sequence[Seal]) -> list[SealOutcome]:
        if len(seals) == 1:
            return [outcome_of(self._alone("seal", seals[0], pack_seal(seals[0]), _always))]
        groups = self._grouped(seals, pack_seal, self._heads["seal"])
        return [outcome_of(reply) for reply in self._run("seal", groups, b"", confirm=_always)]

    def renew(self, leases: Sequence[LeaseRef]) -> list[bool]:
        return self._lease_call("renew", leases)

    def release(self, leases: Sequence[LeaseRef], error: str = "", *, expire: bool = False) -> list[bool]:
        return self._lease_call("expire" if expire else "release", leases, short(error)[1:])

    def pardon(self, leases: Sequence[LeaseRef]) -> list[bool]:
        return self._lease_call("pardon", leases)

    def read(self, lookups: Sequence[Lookup]) -> list[Held]:
        if not lookups:
            return []
        found = self._snapshot(lookups)
        sources = iter(found.values[len(lookups) :])
        return [
            self._held(lookup, data, next(sources) if lookup.source else None, found.epochs[lookup.key[0]])
            for lookup, data in zip(lookups, found.values, strict=False)
        ]

    def heads(self, shard: int) -> Iterator[tuple[bytes, Head]]:
        return ((source, head) for _, source, head in self._heads_in(shard))

    def all_heads(self) -> Iterator[tuple[int, bytes, Head]]:
        return self._heads_in(None)

    def marks(self, shard: int | None = None) -> Iterator[tuple[int, bytes]]:
        for held_in, source, data, stamp in self._sources_in(shard):
            mark = mark_of_source(data, stamp)
            if mark is not None:
                yield held_in, source + mark

    def _heads_in(self, wanted: int | None) -> Iterator[tuple[int, bytes, Head]]:
        for shard, source, data, stamp in self._sources_in(wanted):
            head = head_of_source(data, stamp)
            if head is not None:
                yield shard, source, head

    def _sources_in(self, wanted: int | None) -> Iterator[tuple[int, bytes, bytes, bytes | None]]:
        """Shard, source, its record, and the stamp that this must have; None: any will do."""
        shards = range(len(self._names.markers)) if wanted is None else [wanted]
        epochs = self._reader.snapshot([], shards).epochs
        # A shard that may not answer has the empty stamp, which no record carries.
        stamps = {shard: b"" if epoch is None else epoch.to_bytes(8, "big") for shard, epoch in epochs.items()}
        start = len(self._names.prefixes[0]) + 1
        for shard, name, data in self._reader.scan(b"s", wanted):
            yield shard, name[start:], data, None if self.solo else stamps[shard]

    def scan(self, shard: int | None = None) -> Iterator[Scanned]:
        for held_in, name, data, expires_ms in self._reader.scan_expiring(b"k", shard):
            key = bytes((held_in,)) + name[name.index(b"}") + 2 :]
            # Parked records start with their stamp, whose first byte is 0; a record with its version.
            record = KeyRecord.decode(data) if data[0] else unpark(data, None)
            if record:
                yield Scanned(key, record, expires_ms)

    def forget(self, keys: Sequence[bytes]) -> None:
        by_shard: dict[int, list[bytes]] = {}
        for key in keys:
            by_shard.setdefault(key[0], []).append(self._names.record(key))
        self._epoch_call("forget_ended", {shard: (names, []) for shard, names in by_shard.items()})

    def stats(self) -> Stats:
        counted: dict[tuple[str, str], int] = {}
        for found in self.scan():
            slot = (found.record.kind, found.record.state.name.lower())
            counted[slot] = counted.get(slot, 0) + 1
        sources = sum(1 for _ in self._reader.scan(b"s"))
        lengths = self._exchange([Call(shard, (b"XLEN", name)) for shard, name in enumerate(self._names.rows)])
        return Stats(counted, sources, sum(lengths), sum(int(info.get("used_memory", 0)) for info in self.infos()))

    def infos(self) -> list[dict[str, Any]]:
        """What each server that takes writes says of itself: its INFO, and `node`, its address."""
        with understood(self.url):
            return [{**client.info(), "node": name} for name, client in self._link.primaries()]

    def purge_expired(self, limit: int = 1000) -> int:
        """Redis drops what expired by itself."""
        return 0

    def record(self, rows: Sequence[Row]) -> None:
        entries: dict[int, list[bytes]] = {}
        for row in rows:
            entries.setdefault(row.key[0], []).append(row.encode())
        if entries:
            self._add_rows(entries)

    def rows(self, since_ms: int = 0, shard: int | None = None) -> Iterator[Row]:
        # A replaced clock says nothing about the ids of the stream, so only the real one bounds the range.
        first = "-" if self._test_clock else str(since_ms)
        streams = self._names.rows
        shards = range(len(streams)) if shard is None else range(shard, min(shard + 1, len(streams)))
        lengths = self._exchange([Call(at, (b"XLEN", streams[at])) for at in shards]) if shards else []
        for at in (at for at, length in zip(shards, lengths, strict=True) if length):
            start: str | bytes = first
            while True:
                (page,) = self._exchange([Call(at, (b"XRANGE", streams[at], start, b"+", b"COUNT", 500))])
                for entry, (_, data) in page:
                    start = b"(" + entry
                    yield from (row for row in decode_rows(data) if row.ts_ms >= since_ms)
                if len(page) < 500:
                    break

    def row_entries(self, after: str = "", limit: int = 1000) -> list[RowEntry]:
        """Two trips: how long the streams are, then as many of them at once as the limit lets."""
        first, _, behind = after.partition(":")
        here, streams = int(first or "0", 16), self._names.rows
        shards = range(here, len(streams))
        lengths = self._exchange([Call(shard, (b"XLEN", streams[shard])) for shard in shards])
        calls, left = [], limit
        for shard, length in zip(shards, lengths, strict=True):
            if not length or left <= 0:
                continue
            start = f"({behind}" if shard == here and behind else "-"
            calls.append(Call(shard, (b"XRANGE", streams[shard], start, b"+", b"COUNT", left)))
            left -= 0 if start != "-" else length  # how much of the first stream lies behind the place is not known
        pages = self._exchange(calls) if calls else []
        found = [
            RowEntry(f"{call.shard:02x}:{entry.decode()}", data)
            for call, page in zip(calls, pages, strict=True)
            for entry, (_, data) in page
        ]
        return found[:limit]

    def drop_rows(self, entries: Sequence[RowEntry]) -> int:
        by_shard: dict[int, list[Any]] = {}
        for entry in entries:
            shard, _, there = entry.place.partition(":")
            digest = sha1(entry.data, usedforsecurity=False).hexdigest()
            by_shard.setdefault(int(shard, 16), []).extend((there, digest))
        script, step = self._scripts["drop_rows"], 2 * DROPPED_AT_ONCE
        calls = [
            Call(shard, script.call([self._names.rows[shard]], given[start : start + step]))
            for shard, given in by_shard.items()
            for start in range(0, len(given), step)
        ]
        return sum(self._called(script, calls)) if calls else 0

    def now_ms(self) -> int:
        return self._reader.snapshot([], [0]).now_ms

    def markers(self) -> list[Marker | None]:
        shards = range(len(self._names.markers))
        snapshot = self._reader.snapshot([], shards)
        found: list[Marker | None] = []
        for shard in shards:
            if (raw := snapshot.markers[shard]) is None:
                found.append(None)
                continue
            state, epoch, _ = raw.split(b":", 2)
            found.append(Marker(int(epoch), state == b"R", snapshot.epochs[shard] is not None))
        return found

    def versions(self) -> list[tuple[int, int] | None]:
        found = self._reader.snapshot(list(enumerate(self._names.moves)))
        return [
            None if (epoch := found.epochs[shard]) is None else (epoch, int(moves or 0))
            for shard, moves in enumerate(found.values)
        ]

    def begin_epoch(self, epoch: int) -> bool:
        self._refuse_unsafe_servers()  # after a failover it is another server than the one that was opened
        return self._epoch_call("begin", self._every_shard(), checked_epoch(epoch))

    def load(self, epoch: int, items: Sequence[Loaded]) -> bool:
        by_shard: dict[int, tuple[list[bytes], list[bytes]]] = {}
        for item in items:
            if isinstance(item, LoadedSource):
                shard, name = item.shard, self._names.source(item.shard, item.source)
                data = source_with(epoch, item.head)
            else:
                shard, name = item.key[0], self._names.record(item.key)
                data = park(epoch, item.record)
            names, values = by_shard.setdefault(shard, ([], []))
            names.append(name)
            values.append(data)
        return self._epoch_call("load", by_shard, epoch)

    def finish_epoch(self, epoch: int) -> bool:
        return self._epoch_call("finish", self._every_shard(), epoch)

    def forget_markers(self, below: int) -> None:
        self._epoch_call("forget", self._every_shard(), below)

    def lock(self, name: str, token: str, ttl_ms: int) -> bool:
        key = self._names.lock(name)
        with understood(self.url):
            if self._link.client.set(key, token, nx=True, px=ttl_ms):
                return True
            return bool(self._link.client.get(key) == token.encode() and self._link.client.pexpire(key, ttl_ms))

    def unlock(self, name: str, token: str) -> None:
        key = self._names.lock(name)
        with understood(self.url):
            if self._link.client.get(key) == token.encode():
                self._link.client.delete(key)

    def close(self) -> None:
        if self._loop_lines is not None:
            self._loop_lines.close()
        self._link.close()

    def _replays(self, claims: Sequence[Claim]) -> tuple[list[Verdict | None], dict[int, list[bytes]]]:
        """The claims that an MGET can answer: sealed, same payload, and no lease anywhere near. And their rows.

        Documents have `replays` for that; here they are only read, so that a batch with one of a newer format in it is
        refused before anything is granted.
        """
        names, records = self._names, self._names.records
        wanted, behind = [], []
        for claim in claims:
            key, mode = claim.key, claim.mode
            shard = key[0]
            if mode is DOCUMENT:
                wanted.append((shard, names.source(shard, claim.source)))
                continue
            wanted.append((shard, records[shard] + key[1:]))
            if mode is SEQUENCED:
                behind.append((shard, names.source(shard, claim.source)))
        found = self._reader.snapshot(wanted + behind)
        sources = iter(found.values[len(claims) :])
        rows: dict[int, list[bytes]] = {}
        answers: list[Verdict | None] = []
        epochs, ts = found.epochs, found.now_ms.to_bytes(6, "big")
        for claim, data in zip(claims, found.values, strict=False):
            shard, mode, replay = claim.key[0], claim.mode, None
            if mode is KEYED:
                if data is not None and epochs[shard] is not None:
                    replay = replay_of(claim, data, ts)
            elif mode is SEQUENCED:
                replay = self._replay_of_source(claim, data, next(sources), epochs[shard], found.now_ms)
            elif data is not None:
                refuse_newer_source(data)
            if replay is None:
                answers.append(None)
                continue
            answers.append(replay[0])
            if (written := rows.get(shard)) is None:
                written = rows[shard] = []
            written.append(replay[1])
        return answers, rows

    def _replay_of_source(
        self, claim: Claim, data: bytes | None, source: bytes | None, epoch: int | None, now_ms: int
    ) -> tuple[Replay, bytes] | None:
        held = self._held(claim, data, source, epoch)
        verdict = decide(held, claim, 0)
        if isinstance(verdict, Replay) and verdict.record is not None and not (held.source and held.source.lease):
            row = row_for_claim(claim, verdict, now_ms)
            return verdict, row.encode() if row else b""
        return None

    def _snapshot(self, asked: Sequence[Lookup] | Sequence[Claim]) -> Snapshot:
        """All records, then the sources of those who have one."""
        record = self._names.record
        wanted = [(each.key[0], record(each.key)) for each in asked]
        wanted += [(each.key[0], self._names.source(each.key[0], each.source)) for each in asked if each.source]
        return self._reader.snapshot(wanted)

    def _held(self, lookup: Lookup | Claim, record: bytes | None, source: bytes | None, epoch: int | None) -> Held:
        if epoch is None and not self.solo:
            return Held()
        stamp = None if self.solo else epoch
        if lookup.mode is DOCUMENT:
            found = unpark(record, stamp) if record else None
        else:
            found = KeyRecord.decode(record) if record else None
        there = SourceRecord.decode(source) if source and lookup.mode is not KEYED else None
        if there and stamp is not None and there.stamp != stamp:
            there = None
        return Held(found, there)

    def _lease_call(self, action: str, leases: Sequence[LeaseRef], error: bytes = b"") -> list[bool]:
        groups = self._grouped(leases, pack_lease, self._heads["lease"])
        return [lease_done(reply) for reply in self._run("lease", groups, action, error)]

    def _alone(self, script: str, item: Claim | Seal, packed: bytes, confirm: _Needed) -> Any:
        """The reply to a batch of one, which most are: nothing to group, nothing to put in order."""
        if self._server is not None and item.mode is KEYED:
            try:
                answered = self._server.ask(*self._around_run_id(script, item, packed))
            except REDIS_ERRORS as error:
                raise in_our_words(self.url, error) from error
            if type(answered) is bytes:
                return answered
            if not isinstance(answered, Exception):  # asked again, without a run_id
                return answered[0]
        shard, made = item.key[0], self._scripts[script]
        keys, args = self._heads[script][shard]
        given = (*self._common, b"", *args, *_FOR_ONE[script], packed)
        return self._called(made, [Call(shard, made.call((*keys, *self._names.keys_of(item)), given))], confirm)[0][0]

    def _packed_ahead(self, script: str) -> list[Alone]:
        return [
            Alone.of(self._scripts[script], keys, prefix, self._common, (*args, *_FOR_ONE[script]))
            for (keys, args), prefix in zip(self._heads[script], self._names.records, strict=True)
        ]

    def _soon(
        self,
        script: str,
        items: Sequence[Item],
        pack: Callable[[Item], bytes],
        read: Callable[[bytes], Answered],
        told: Callable[[list[Answered] | None], None],
    ) -> bool:
        line = self._loop_lines.of_this_loop() if self._loop_lines else None
        if line is None or any(item.mode is not KEYED for item in items):
            return False
        commands = [line.run_id.join(self._around_run_id(script, item, pack(item))) for item in items]

        def answered(replies: list[Any] | None) -> None:
            found = None
            if replies is not None:
                with contextlib.suppress(RagfenceError):  # a record that cannot be read: found again, one by one
                    # One string; of a connection that does not know its server, a list of one.
                    found = [read(reply if type(reply) is bytes else reply[0]) for reply in replies]
            told(found)

        line.send(commands, answered)
        return True

    def _around_run_id(self, script: str, item: Claim | Seal | LeaseRef, packed: bytes) -> tuple[bytes, bytes]:
        """The call of a batch of one, packed, in two parts: the run_id of the server goes between them."""
        to_digest, to_run_id, to_item = self._ahead[script][item.key[0]]
        return to_digest + item.key[1:] + to_run_id, b"%b$%d\r\n%b\r\n" % (to_item, len(packed), packed)

    def _grouped(
        self,
        items: Sequence[Item],
        pack: Callable[[Item], bytes],
        heads: _Heads,
        rows: dict[int, list[bytes]] | None = None,
    ) -> list[_Group]:
        """KEYS and ARGV with the items grouped by shard; with the `rows` that are to be written besides."""
        groups: dict[int, _Group] = {}
        for shard in rows or ():
            groups[shard] = _Group(shard, list(heads[shard][0]), [], [])
        records = self._names.records
        for at, item in enumerate(items):
            key = item.key
            shard = key[0]
            group = groups.get(shard)
            if group is None:
                group = groups[shard] = _Group(shard, list(heads[shard][0]), [], [])
            group.keys.append(records[shard] + key[1:])
            if item.mode is not KEYED:
                group.keys.append(self._names.source(shard, item.source))
            group.args.append(pack(item))
            group.members.append(at)
        for group in groups.values():
            before: list[Any] = list(heads[group.shard][1])
            if rows is not None:
                before.append(b"".join(rows.get(group.shard, ())))
            before.append(len(group.members))
            group.args = before + group.args
        return list(groups.values())

    def _run(self, script: str, groups: Sequence[_Group], *common: Any, confirm: _Needed | None = None) -> list[Any]:
        """The replies of a script in the order of the items: one call, or on a cluster one per shard."""
        if not groups:
            return []
        batches = [[group] for group in groups] if self._link.clustered else [groups]
        calls = []
        for batch in batches:
            keys = list(chain.from_iterable(group.keys for group in batch))
            args = chain.from_iterable(group.args for group in batch)
            given = (self._solo, len(batch), self._most_rows, *common, *args)
            calls.append(Call(batch[0].shard, self._scripts[script].call(keys, given)))
        answered = self._called(self._scripts[script], calls, confirm)
        replies: list[Any] = [None] * sum(len(group.members) for group in groups)
        order = chain.from_iterable(group.members for group in groups)
        for at, reply in zip(order, chain.from_iterable(answered), strict=True):
            replies[at] = reply
        return replies

    def _every_shard(self) -> dict[int, tuple[list[bytes], list[bytes]]]:
        return {shard: ([], []) for shard in range(len(self._names.markers))}

    def _epoch_call(self, action: str, shards: dict[int, tuple[list[bytes], list[bytes]]], epoch: int = 0) -> bool:
        """For each shard its marker, then names and values. All of one server at once, unless there are values."""
        script = self._scripts["epoch"]
        if self._link.clustered or action in ("load", "forget_ended"):
            calls = [
                Call(shard, script.call([self._names.markers[shard], *names], (action, epoch, *values)))
                for shard, (names, values) in shards.items()
            ]
        else:
            calls = [Call(0, script.call([self._names.markers[shard] for shard in shards], (action, epoch)))]
        return all(self._called(script, calls))

    def _called(self, script: Script, calls: Sequence[Call], confirm: _Needed | None = None) -> list[Any]:
        after = self._waits_for if confirm else ()
        try:
            done = self._link.exchange(calls, after)
            for reply in done.replies:
                if isinstance(reply, NoScriptError):
                    # On every server concerned; what was answered already is answered the same again.
                    self._link.exchange(self._loads(script, calls))
                    done = self._link.exchange(calls, after)
                    break
            for reply in done.replies:
                if isinstance(reply, Exception):
                    raise reply
        except REDIS_ERRORS as error:
            raise in_our_words(self.url, error) from error
        if after and confirm and confirm(done.replies):
            self._refuse_unconfirmed(done.after)
        return done.replies

    def _loads(self, script: Script, calls: Sequence[Call]) -> list[Call]:
        """A server that does not know one script knows none, and gets all; those of a cluster get the one they lack."""
        if self._link.clustered:
            return [Call(call.shard, script.load) for call in calls]
        return [Call(calls[0].shard, each.load) for each in self._scripts.values()]

    def _refuse_unconfirmed(self, answers: Sequence[Sequence[Any]]) -> None:
        for (reply,) in answers:
            if isinstance(reply, Exception):
                raise in_our_words(self.url, reply) from reply
            if missing := self._confirm.missing(reply):
                raise StoreUnavailable(
                    f"{self.url} has the seal, but {missing} did not confirm it within {self._confirm.timeout_ms} ms",
                    hint="check the replicas and durability: in the policy, then try again",
                )

    def _exchange(self, calls: Sequence[Call]) -> list[Any]:
        with understood(self.url):
            replies = self._link.exchange(calls).replies
            for reply in replies:
                if isinstance(reply, Exception):
                    raise reply
        return replies

    def _refuse_unsafe_servers(self) -> None:
        for info in self.infos():
            if info.get("role") != "master" and self._link.elects:
                raise StoreUnavailable(
                    f"{self.url}: {info['node']} was named as a primary and is a replica",
                    hint="a failover is under way; try again",
                )
            refuse_unsafe(self.url, info)
            if self._confirm.aof:
                refuse_without_aof(self.url, info)
