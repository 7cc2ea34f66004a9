"""The part of the contract of fence stores about what they count as they answer: it equals what a full scan finds."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from ragfence.core.decision_rows import Row, decode_rows
from ragfence.core.decisions import Claim, Granted, Mode, Sealed
from ragfence.core.layout import CONFLICT_POSITION, TOKEN_BYTES, RowKind
from ragfence.core.tallies import DECISIONS, outcome_of
from ragfence.stores.fences import FenceStore, LoadedSource, all_of
from ragfence.testing.contracts.fence_calls import (
    ALL_MODES,
    DAY_MS,
    HOUR_MS,
    LEASE_MS,
    OPERATIONS,
    SHARD,
    FencesUnderTest,
    ask,
    claim,
    granted,
    lease,
    seal,
    sealed,
    start_epoch,
    verdict,
)

STEPS = 48
COMPARED_EVERY = 4
WITH_SEQUENCE = (Mode.SEQUENCED, Mode.DOCUMENT)


class CountContract:
    """Documents and what is pending are exact; decisions stand under their hour; ended keys are estimated."""

    def test_live_documents_are_counted_as_heads_move(self, fences: FencesUnderTest) -> None:
        store = fences.store
        assert store.stats().documents == 0
        for number in range(3):
            sealed(store, claim(Mode.DOCUMENT, "A", source=f"{number}", by=f"{number}"))
        assert store.stats().documents == 3
        sealed(store, claim(Mode.DOCUMENT, "B", source="0", by="again"))
        assert store.stats().documents == 3
        sealed(store, claim(Mode.DOCUMENT, "gone", source="0", by="retract", retract=True))
        assert store.stats().documents == 2
        sealed(store, claim(Mode.DOCUMENT, "B", source="0", by="revive"))
        sealed(store, claim(Mode.SEQUENCED, "A", source="not a document"))
        assert store.stats().documents == 3

    def test_a_repeated_seal_counts_once(self, fences: FencesUnderTest) -> None:
        for mode in OPERATIONS:
            asked = claim(mode, source=mode.name, by=mode.name)
            ended = seal(asked, granted(fences.store, asked))
            for _ in range(3):
                fences.store.seal([ended])
        assert fences.store.stats().documents == 1
        assert _decisions(fences.store) == {"new": 3}

    def test_a_store_tells_since_when_it_counts(self, fences: FencesUnderTest) -> None:
        store, began_ms = fences.store, fences.clock()
        assert store.begin_epoch(2)
        assert store.finish_epoch(2)
        begun = store.tallies().begun
        assert set(begun) == set(range(64))
        assert set(begun.values()) == {began_ms}
        sealed(store, claim(Mode.KEYED))
        fences.clock.advance(HOUR_MS)
        assert store.begin_epoch(3)
        assert store.tallies().begun == begun, "it goes on counting"
        assert store.tallies(began_ms + HOUR_MS).begun == {}, "from there on it has counted all"
        assert _decisions(store) == {"new": 1}

    def test_documents_are_counted_anew_by_a_hydration(self, fences: FencesUnderTest) -> None:
        store = fences.store
        for number in range(3):
            sealed(store, claim(Mode.DOCUMENT, source=f"{number}", by=f"{number}"))
        heads = list(store.heads(SHARD))
        assert store.begin_epoch(2)
        assert store.stats().documents == 0
        loaded = [LoadedSource(SHARD, source, head.encode()) for source, head in heads[:2]]
        for _ in range(2):  # the reply was lost
            assert store.load(2, loaded)
        assert store.finish_epoch(2)
        assert store.stats().documents == 2

    def test_a_shard_that_may_not_answer_counts_nothing(self, fences: FencesUnderTest) -> None:
        sealed(fences.store, claim(Mode.DOCUMENT))
        fences.restart()
        assert fences.store.stats().documents == 0

    def test_decisions_are_counted_by_the_hour_with_kind_and_route(self, fences: FencesUnderTest) -> None:
        store, context = fences.store, b'{"kind":"ticket","source_id":"\\",\\"route\\":\\"no","route":"/tickets"}'
        sealed(store, claim(Mode.KEYED, by="one", context=context))
        fences.clock.advance(HOUR_MS)
        since_ms = store.now_ms()
        verdict(store, claim(Mode.KEYED, by="two", context=context))
        store.claim(
            [claim(Mode.KEYED, by="three", context=context), claim(Mode.KEYED, "B", by="four", context=context)]
        )
        verdict(store, claim(Mode.KEYED, by="five", content="another", row_on_conflict=True, context=context))
        assert store.tallies(since_ms).decisions() == {
            ("duplicate", "/tickets", "ticket"): 2,
            ("conflict", "/tickets", "ticket"): 1,
        }
        assert store.tallies().decisions()["new", "/tickets", "ticket"] == 1

    def test_a_long_route_is_cut(self, fences: FencesUnderTest) -> None:
        context = b'{"kind":"ticket","route":"/%b"}' % (b"r" * 200)
        sealed(fences.store, claim(Mode.KEYED, by="one", context=context))
        for by in ("two", "three"):
            fences.store.claim(
                [claim(Mode.KEYED, by=by, context=context), claim(Mode.KEYED, by=by * 2, context=context)]
            )
        assert fences.store.tallies().decisions() == {
            ("new", "/" + "r" * 79, "ticket"): 1,
            ("duplicate", "/" + "r" * 79, "ticket"): 4,
        }

    def test_decisions_outlive_their_rows(self, fences: FencesUnderTest) -> None:
        sealed(fences.store, claim(Mode.KEYED))
        assert fences.store.drop_rows(fences.store.row_entries()) > 0
        assert (fences.store.stats().rows, _decisions(fences.store)) == (0, {"new": 1})

    def test_ended_keys_are_estimated_until_they_expire(self, fences: FencesUnderTest) -> None:
        sealed(fences.store, claim(Mode.KEYED, "A", by="one"), ttl_ms=3 * HOUR_MS)
        sealed(fences.store, claim(Mode.KEYED, "B", by="two"), ttl_ms=HOUR_MS, failed=True, error="NO")
        sealed(fences.store, claim(Mode.KEYED, "C", by="three"), ttl_ms=3 * HOUR_MS)
        stats = fences.store.stats()
        assert stats.records == {("ticket", "sealed"): 2, ("ticket", "failed"): 1}
        assert stats.average_ttl_s == pytest.approx(7 / 3 * 3600)
        fences.store.forget([claim(Mode.KEYED, "C").key])
        fences.clock.advance(HOUR_MS)
        assert fences.store.stats().records == {("ticket", "sealed"): 1}
        fences.clock.advance(2 * HOUR_MS)
        assert fences.store.stats().records == {}

    def test_what_is_pending_is_counted_and_shown_until_it_expires(self, fences: FencesUnderTest) -> None:
        store = fences.store
        first = granted(store, claim(Mode.KEYED, pending_ttl_ms=HOUR_MS))
        fences.clock.advance(1)
        granted(store, claim(Mode.SEQUENCED, source="b", by="two", source_ttl_ms=2 * HOUR_MS))
        granted(store, claim(Mode.DOCUMENT, source="c", by="three"))
        stats = store.stats()
        assert (stats.pending.count, stats.records) == (3, {("ticket", "held"): 3})
        assert stats.pending.oldest is not None
        assert stats.pending.oldest.record == first.record
        fences.clock.advance(HOUR_MS)
        store.purge_expired()
        assert store.stats().pending.count == 2
        fences.clock.advance(HOUR_MS)
        store.purge_expired()
        assert store.stats().pending.count == 1

    @ALL_MODES
    def test_what_is_sealed_is_no_longer_pending(self, fences: FencesUnderTest, mode: Mode) -> None:
        """By a call of its own and in a batch, which have different ways through a store."""
        store = fences.store
        asked = [claim(mode, source=f"{number}", by=f"{number}") for number in range(3)]
        answers = store.claim(asked)
        store.seal([seal(asked[0], answers[0])])
        assert store.stats().pending.count == 2
        store.seal([seal(asked[1], answers[1]), seal(asked[2], answers[2])])
        assert store.stats().pending.count == 0

    def test_counts_belong_to_their_tenant(self, fences: FencesUnderTest) -> None:
        other = fences.reopen("other")
        start_epoch(other, 1)
        sealed(other, claim(Mode.DOCUMENT))
        granted(other, claim(Mode.KEYED))
        stats = fences.store.stats()
        assert (stats.documents, stats.pending.count, _decisions(fences.store)) == (0, 0, {})

    @pytest.mark.parametrize("solo", [False, True], ids=["", "solo"])
    @pytest.mark.parametrize("seed", range(4))
    def test_counts_equal_a_full_scan_after_any_calls(self, fences: FencesUnderTest, seed: int, solo: bool) -> None:
        """Claims, seals, retractions, leases that end in any way, purges, hydrations, restarts, drains and time."""
        _Calls(fences, random.Random(seed), solo=solo).run()


def _decisions(store: FenceStore) -> dict[str, int]:
    counted: Counter[str] = Counter()
    for (decision, _, _), count in store.tallies().decisions().items():
        counted[decision] += count
    return dict(counted)


class _Calls:
    """Random calls, each with a token of its own, and now and then what a scan finds beside what is counted."""

    def __init__(self, fences: FencesUnderTest, dice: random.Random, *, solo: bool) -> None:
        self._fences, self._dice, self._solo = fences, dice, solo
        self._tenant = "counted" if solo else "default"
        self._store = fences.reopen(self._tenant, solo=True) if solo else fences.store
        self._granted: list[tuple[Claim, Granted]] = []
        self._drained: dict[str, Row] = {}
        self._number = 0
        self._epoch = 1

    def run(self) -> None:
        steps = (
            [self._claim] * 4 + [self._seal] * 5 + [self._batch, self._replay, self._conflict, self._pass, self._drain]
        )
        steps += [self._renew, self._release, self._pardon, self._forget, self._purge]
        steps += [] if self._solo else [self._hydrate, self._restart]
        for number in range(STEPS):
            step = self._dice.choice(steps)
            step()
            if number % COMPARED_EVERY == 0 or number > STEPS - COMPARED_EVERY:
                self._compare(step.__name__)

    def _compare(self, step: str) -> None:
        store = self._store
        stats = store.stats()
        live = {(shard, source) for shard, source, head in store.all_heads() if head.live}
        pending = {each.key: each.record for each in all_of(store) if not each.record.ended}
        assert (step, stats.documents) == (step, len(live))
        assert (step, stats.pending.count) == (step, len(pending))
        assert {each.key: each.record for each in stats.pending.seen} == pending, step
        rows = {row.row_id: row for row in store.rows()} | self._drained
        outcomes = (outcome_of(row) for row in rows.values())
        assert _decisions(store) == dict(Counter(DECISIONS[outcome] for outcome in outcomes if outcome)), step

    def _make_claim(self) -> Claim:
        dice, self._number = self._dice, self._number + 1
        mode = dice.choice(list(Mode))
        fields: dict[str, Any] = {"sequence": dice.choice([None, 1, 2, self._number])} if mode in WITH_SEQUENCE else {}
        if mode is Mode.SEQUENCED:
            fields = {"sequence": fields["sequence"] or 1, "source_ttl_ms": 3 * HOUR_MS}
        revision = dice.choice("ABC")
        return claim(
            mode,
            f"{mode.name} {revision}",
            by=f"{self._number}",
            source=f"{mode.name} {dice.randrange(3)}",
            shard=dice.choice([SHARD, SHARD + 1]),
            content=dice.choice([revision, revision, revision, "other"]),
            retract=mode is Mode.DOCUMENT and revision == "C",
            row_on_conflict=dice.random() < 0.5,
            max_attempts=2,
            pending_ttl_ms=2 * HOUR_MS,
            **fields,
        )

    def _claim(self) -> None:
        self._claim_all(1)

    def _batch(self) -> None:
        self._claim_all(self._dice.randint(2, 6))

    def _claim_all(self, count: int) -> None:
        claims = [self._make_claim() for _ in range(count)]
        for asked, answer in zip(claims, self._store.claim(claims), strict=True):
            if isinstance(answer, Granted):
                self._granted.append((asked, answer))

    def _some(self) -> tuple[Claim, Granted] | None:
        return self._dice.choice(self._granted[-6:]) if self._granted else None

    def _seal(self) -> None:
        chosen = {each[0].token: each for each in (self._some() for _ in range(self._dice.choice([1, 1, 3]))) if each}
        seals = [
            seal(
                asked,
                answer,
                # The same each time that it is repeated: its row has one id.
                failed=asked.mode is not Mode.DOCUMENT and asked.token[0] % 3 == 0,
                duplicate=asked.token[1] % 3 == 0,
                error=self._dice.choice(["", "NO"]),
                ttl_ms=self._dice.choice([HOUR_MS, DAY_MS]) if asked.mode is not Mode.DOCUMENT else 0,
                source_ttl_ms=asked.source_ttl_ms,
            )
            for asked, answer in chosen.values()
        ]
        for ended, outcome in zip(seals, self._store.seal(seals) if seals else [], strict=True):
            if not isinstance(outcome, Sealed):
                # It would be counted, and written under the same row_id, each time.
                self._granted = [each for each in self._granted if each[0].token != ended.token]

    def _replay(self) -> None:
        asks = [
            ask(each)._replace(token=_token(f"ask {self._number} {at}")) for at, each in enumerate(self._documents())
        ]
        self._store.replays(asks).settle()
        self._number += 1

    def _documents(self) -> list[Claim]:
        return [asked for asked, _ in self._granted[-6:] if asked.mode is Mode.DOCUMENT]

    def _conflict(self) -> None:
        self._number += 1
        asked, now_ms = self._make_claim(), self._store.now_ms()
        kind = self._dice.choice([RowKind.CONFLICT, RowKind.ENDED])
        row = Row(asked.token, CONFLICT_POSITION, now_ms, kind, asked.key, asked.fingerprint, context=asked.context)
        self._store.record([row])

    def _renew(self) -> None:
        if some := self._some():
            self._store.renew([lease(*some)])

    def _release(self) -> None:
        if some := self._some():
            self._store.release([lease(*some)], "NO", expire=self._dice.random() < 0.5)

    def _pardon(self) -> None:
        if some := self._some():
            self._store.reset_attempts([lease(*some)])

    def _forget(self) -> None:
        if some := self._some():
            self._store.forget([some[0].key])

    def _purge(self) -> None:
        self._store.purge_expired()

    def _pass(self) -> None:
        self._fences.clock.advance(self._dice.choice([1, LEASE_MS, HOUR_MS // 2, 2 * HOUR_MS]))

    def _drain(self) -> None:
        entries = self._store.row_entries(limit=self._dice.randint(1, 20))
        self._drained |= {row.row_id: row for entry in entries for row in decode_rows(entry.data)}
        self._store.drop_rows(entries)

    def _hydrate(self) -> None:
        heads = [
            LoadedSource(shard, source, head.encode()) for shard, source, head in self._store.all_heads() if head.record
        ]
        self._epoch += 1
        assert self._store.begin_epoch(self._epoch)
        for _ in range(self._dice.choice([1, 2])):
            assert self._store.load(self._epoch, heads)
        assert self._store.finish_epoch(self._epoch)

    def _restart(self) -> None:
        self._fences.restart()
        self._store = self._fences.store
        self._compare("restart")
        start_epoch(self._store, self._epoch + 1)
        self._epoch += 1


def _token(text: str) -> bytes:
    return claim(Mode.KEYED, by=text).token[:TOKEN_BYTES]
