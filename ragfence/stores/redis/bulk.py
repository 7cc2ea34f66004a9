"""Batches of claims, seals or leases as calls of one script: grouped by shard, and in parts that overlap.

Many replays at once: one MGET reads what they are answered with, and their rows are written meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from ragfence.core.decision_rows import row_for_claim
from ragfence.core.decisions import (
    DOCUMENT,
    KEYED,
    SEQUENCED,
    Claim,
    HeadQuery,
    HeldRecords,
    LeaseRef,
    Replay,
    Seal,
    Verdict,
    decide,
)
from ragfence.core.layout import KIND, KIND_SIZE, free_head, pack_ms, short, stamp_of
from ragfence.core.records import refuse_newer_source
from ragfence.core.tallies import TallyOutcome, make_label
from ragfence.stores.fences import Replays
from ragfence.stores.redis.calls import Needed, RedisCalls
from ragfence.stores.redis.codec import Names, pack_answers, read_replays, row_of_query, row_of_replay
from ragfence.stores.redis.connection import RedisCall
from ragfence.stores.redis.replies import list_of
from ragfence.stores.redis.row_streams import NewRows, RowStreams
from ragfence.stores.redis.scans import Reader

PART = 250
"""items: while the server works on one part, the next is packed, and the one before is read"""

Item = TypeVar("Item", Claim, Seal, LeaseRef)
Answer = TypeVar("Answer")
Heads = list[tuple[tuple[bytes, ...], tuple[bytes, ...]]]
"""Per shard the KEYS and the ARGV in front of those of its items."""


def heads_of(names: Names) -> dict[str, Heads]:
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


class _Group(NamedTuple):
    """The items of one shard, by their index in the batch."""

    shard: int
    members: list[int]


class ScriptBatches:
    def __init__(self, asking: RedisCalls, names: Names, *, solo: bool, most_rows: int) -> None:
        self._asking = asking
        self._names = names
        self._first = (b"1" if solo else b"0", most_rows)
        self.heads = heads_of(names)

    def run(
        self,
        script: str,
        items: Sequence[Item],
        pack: Callable[[Item], bytes],
        read: Callable[[Any], Answer],
        *common: Any,
        rows: NewRows | None = None,
        confirm: Needed | None = None,
    ) -> list[Answer]:
        """The answers, in the order of the items; `rows` are written as well.

        The items of one shard are decided in one step. Nothing more is promised: a cluster gets a call per shard.
        """
        parts = self._parts(items, rows.encoded if rows else {})
        calls = (self._calls(script, part, items, pack, common, rows) for part in parts)
        answers: dict[int, Answer] = {}
        made = self._asking.scripts[script]
        for part, replies in zip(parts, self._asking.in_parts(made, calls, confirm), strict=True):
            places = [at for group in part for at in group.members]
            replied = (one for reply in replies for one in reply)
            answers.update((at, read(one)) for at, one in zip(places, replied, strict=True))
        return [answers[at] for at in range(len(items))]

    def _parts(self, items: Sequence[Item], rows: Mapping[int, Sequence[bytes]]) -> list[list[_Group]]:
        groups: dict[int, _Group] = {shard: _Group(shard, []) for shard in rows}
        for at, item in enumerate(items):
            shard = item.key[0]
            if (group := groups.get(shard)) is None:
                group = groups[shard] = _Group(shard, [])
            group.members.append(at)
        parts: list[list[_Group]] = []
        size = PART
        for group in groups.values():
            if size >= PART:
                parts.append([])
                size = 0
            parts[-1].append(group)
            size += len(group.members)
        return parts

    def _calls(
        self,
        script: str,
        part: Sequence[_Group],
        items: Sequence[Item],
        pack: Callable[[Item], bytes],
        common: Sequence[Any],
        rows: NewRows | None,
    ) -> list[RedisCall]:
        """One call, or on a cluster one per shard."""
        return [
            self._call(script, groups, items, pack, common, rows)
            for groups in ([[group] for group in part] if self._asking.link.clustered else [part])
        ]

    def _call(
        self,
        script: str,
        groups: Sequence[_Group],
        items: Sequence[Item],
        pack: Callable[[Item], bytes],
        common: Sequence[Any],
        rows: NewRows | None,
    ) -> RedisCall:
        solo, most_rows = self._first
        heads, records, prefixes = self.heads[script], self._names.records, self._names.prefixes
        keys: list[bytes] = []
        args: list[Any] = [solo, len(groups), most_rows, *common]
        for shard, members in groups:
            before, first = heads[shard]
            keys += before
            args += first
            if rows is not None:
                args.append(b"".join(rows.encoded.get(shard, ())))
                args.append(pack_answers(rows.answers.get(shard, {})))
            args.append(len(members))
            record, prefix = records[shard], prefixes[shard] + b"s"
            for at in members:
                item = items[at]
                keys.append(record + item.key[1:])
                if item.mode is SEQUENCED or item.mode is DOCUMENT:
                    keys.append(prefix + item.source)
                args.append(pack(item))
        kinds = (bytes, int) if script == "lease" else (bytes,)
        shape = list_of(sum(len(group.members) for group in groups), *kinds)
        return RedisCall(groups[0].shard, self._asking.scripts[script].call(keys, args), shape)


Hold = Callable[[Claim, bytes | None, bytes | None, int | None], HeldRecords]
"""makes the records that count in an epoch of what was read"""
_DUPLICATE = TallyOutcome.DUPLICATE.value


class BulkReplays:
    def __init__(self, reader: Reader, names: Names, rows: RowStreams, hold: Hold) -> None:
        self._reader, self._names, self._rows, self._hold = reader, names, rows, hold
        self._sources = [prefix + b"s" for prefix in names.prefixes]

    def of_documents(self, queries: Sequence[HeadQuery]) -> Replays:
        sources = self._sources
        found = self._reader.snapshot([(query[0][0], sources[query[0][0]] + query[1]) for query in queries])
        stamps = {shard: stamp_of(epoch) for shard, epoch in found.epochs.items()}
        ts = pack_ms(found.now_ms)
        rows = NewRows(found.now_ms)
        unclear: set[bytes] = set()
        records: list[bytes | None] = []
        for query, data in zip(queries, found.values, strict=True):
            key, source, fingerprint, metadata_hash, sequence, _, context = query
            stamp = stamps[key[0]]
            record = None
            if data is not None and stamp and not (unclear and source in unclear):
                record = free_head(data, stamp, key[1:], fingerprint, metadata_hash, sequence)
            records.append(record)
            if record is None:  # it may be claimed, so later queries of its source must wait
                unclear.add(source)
                continue
            kind = record[KIND : KIND + record[KIND_SIZE]]
            rows.add(key[0], row_of_query(query, record, ts), make_label(_DUPLICATE, "0", kind, context))
        return Replays(records, self._rows.begin(rows) if rows.encoded else None)

    def of_claims(self, claims: Sequence[Claim]) -> tuple[list[Verdict | None], NewRows]:
        """The claims that an MGET can answer: sealed, same payload, and no lease anywhere near.

        If that is all of them, their rows are written; otherwise the rows are returned, to be written with the claims
        of the rest. Documents are answered by `of_documents`. Here they are only read, so that a batch with a newer
        format in it is refused before anything is granted.
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
        rows = NewRows(found.now_ms)
        answers: list[Verdict | bytes | None] = []
        epochs, ts, misses = found.epochs, pack_ms(found.now_ms), False
        for claim, data in zip(claims, found.values, strict=False):
            shard, mode, row = claim.key[0], claim.mode, None
            answer: Verdict | bytes | None = data
            if mode is KEYED:
                if data is not None and epochs[shard] is not None:
                    row = row_of_replay(claim, data, ts)
            elif mode is SEQUENCED:
                answer, row = self._of_source(claim, data, next(sources), epochs[shard], found.now_ms)
            elif mode is DOCUMENT and data is not None:
                refuse_newer_source(data)
            if row is None:
                answers.append(None)
                misses = True
                continue
            answers.append(answer)
            rows.add(shard, row, make_label(_DUPLICATE, "0", short(claim.kind)[1:], claim.context))
        if misses or not rows.encoded:
            return read_replays(answers), rows
        # The answers are read while the server writes their rows.
        writing = self._rows.begin(rows)
        try:
            answered = read_replays(answers)
            writing.settle()
        finally:
            writing.discard()
        return answered, NewRows(found.now_ms)

    def _of_source(
        self, claim: Claim, data: bytes | None, source: bytes | None, epoch: int | None, now_ms: int
    ) -> tuple[Verdict | None, bytes | None]:
        held = self._hold(claim, data, source, epoch)
        verdict = decide(held, claim, 0)
        if isinstance(verdict, Replay) and verdict.record is not None and not (held.source and held.source.lease):
            row = row_for_claim(claim, verdict, now_ms)
            return verdict, row.encode() if row else b""
        return None, None
