"""Many replays at once: one MGET reads what they are answered with, and their rows are written meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ragfence.core.decisions import DOCUMENT, KEYED, SEQUENCED, Ask, Claim, Held, Replay, Verdict, decide
from ragfence.core.ledger import row_for_claim
from ragfence.core.records import HEADER_BYTES, KeyRecord, free_head, refuse_newer_source, short
from ragfence.core.tallies import Outcome, make_label
from ragfence.stores.fences import Replays
from ragfence.stores.redis.codec import Names, row_of_ask, row_of_replay
from ragfence.stores.redis.row_streams import NewRows, RowStreams
from ragfence.stores.redis.scans import Reader

Hold = Callable[[Claim, bytes | None, bytes | None, int | None], Held]
"""what a record and its source come to in an epoch"""
_tuple = tuple.__new__
_DUPLICATE = Outcome.DUPLICATE.value


class BulkReplays:
    def __init__(self, reader: Reader, names: Names, rows: RowStreams, hold: Hold) -> None:
        self._reader, self._names, self._rows, self._hold = reader, names, rows, hold
        self._sources = [prefix + b"s" for prefix in names.prefixes]

    def of_documents(self, asks: Sequence[Ask]) -> Replays:
        sources = self._sources
        found = self._reader.snapshot([(ask[0][0], sources[ask[0][0]] + ask[1]) for ask in asks])
        stamps = {shard: b"" if epoch is None else epoch.to_bytes(8, "big") for shard, epoch in found.epochs.items()}
        ts = found.now_ms.to_bytes(6, "big")
        rows = NewRows(found.now_ms)
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
            kind = record[HEADER_BYTES + 1 : HEADER_BYTES + 1 + record[HEADER_BYTES]]
            rows.add(key[0], row_of_ask(ask, record, ts), make_label(_DUPLICATE, "0", kind, ask[6]))
        return Replays(records, self._rows.begin(rows) if rows.encoded else None)

    def of_claims(self, claims: Sequence[Claim]) -> tuple[list[Verdict | None], NewRows]:
        """The claims that an MGET can answer: sealed, same payload, and no lease anywhere near.

        Where that is all of them, their rows are written; where not, they are returned, for whoever claims the rest.
        Documents have `of_documents`; here they are only read, so that a batch with one of a newer format in it is
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
        rows = NewRows(found.now_ms)
        answers: list[Verdict | bytes | None] = []
        epochs, ts, misses = found.epochs, found.now_ms.to_bytes(6, "big"), False
        for claim, data in zip(claims, found.values, strict=False):
            shard, mode, row = claim.key[0], claim.mode, None
            answer: Verdict | bytes | None = data
            if mode is KEYED:
                if data is not None and epochs[shard] is not None:
                    row = row_of_replay(claim, data, ts)
            elif mode is SEQUENCED:
                answer, row = self._of_source(claim, data, next(sources), epochs[shard], found.now_ms)
            elif data is not None:
                refuse_newer_source(data)
            if row is None:
                answers.append(None)
                misses = True
                continue
            answers.append(answer)
            rows.add(shard, row, make_label(_DUPLICATE, "0", short(claim.kind)[1:], claim.context))
        if misses or not rows.encoded:
            return _read(answers), rows
        # The answers are read while the server writes their rows.
        writing = self._rows.begin(rows)
        try:
            answered = _read(answers)
            writing.settle()
        finally:
            writing.drop()
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


def _read(answers: Sequence[Verdict | bytes | None]) -> list[Verdict | None]:
    decode = KeyRecord.decode
    return [_tuple(Replay, (decode(each),)) if type(each) is bytes else each for each in answers]  # type: ignore[misc]
