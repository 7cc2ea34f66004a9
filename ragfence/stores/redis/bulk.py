"""Batches of claims, seals or leases as calls of one script: grouped by shard, and in parts that overlap."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from ragfence.core.decisions import KEYED, Claim, LeaseRef, Seal
from ragfence.stores.redis.calls import Asking, Needed
from ragfence.stores.redis.codec import Names, pack_answers
from ragfence.stores.redis.connection import Call
from ragfence.stores.redis.replies import list_of
from ragfence.stores.redis.row_streams import NewRows

PART = 250
"""items: while the server works on one part, the next is packed, and the one before is read"""

Item = TypeVar("Item", Claim, Seal, LeaseRef)
Answer = TypeVar("Answer")
Heads = list[tuple[tuple[bytes, ...], tuple[bytes, ...]]]
"""Per shard the KEYS and the ARGV that stand before those of its items."""


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
    """The items of one shard, by where they stand in the batch."""

    shard: int
    members: list[int]


class ScriptBatches:
    def __init__(self, asking: Asking, names: Names, *, solo: bool, most_rows: int) -> None:
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
        """The answers, in the order of the items; `rows` are written besides.

        What is of one shard is decided in one step, and nothing else is promised: a cluster has a call for each.
        """
        parts = self._parts(items, rows.encoded if rows else {})
        calls = (self._calls(script, part, items, pack, common, rows) for part in parts)
        answers: dict[int, Answer] = {}
        made = self._asking.scripts[script]
        for part, replies in zip(parts, self._asking.in_parts(made, calls, confirm), strict=True):
            places = [at for group in part for at in group.members]
            told = (one for reply in replies for one in reply)
            answers.update((at, read(one)) for at, one in zip(places, told, strict=True))
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
    ) -> list[Call]:
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
    ) -> Call:
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
                if item.mode is not KEYED:
                    keys.append(prefix + item.source)
                args.append(pack(item))
        kinds = (bytes, int) if script == "lease" else (bytes,)
        shape = list_of(sum(len(group.members) for group in groups), *kinds)
        return Call(groups[0].shard, self._asking.scripts[script].call(keys, args), shape)
