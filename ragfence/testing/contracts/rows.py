"""Decision rows: which answer leaves which row."""

from __future__ import annotations

import pytest

from ragfence.core.decision_rows import Row
from ragfence.core.decisions import (
    Fenced,
    Mode,
)
from ragfence.core.layout import (
    FENCED_OUT,
    FENCED_POSITION,
    HEALED,
    NO_TOKEN,
    RELEASE_POSITION,
    SEAL_POSITION,
    TAKEOVER,
    TOKEN_BYTES,
    RowKind,
)
from ragfence.testing.contracts.fence_calls import (
    ALL_MODES,
    DAY_MS,
    LEASE_MS,
    WITH_A_SOURCE,
    FencesUnderTest,
    claim,
    granted,
    lease,
    row_id,
    rows_of,
    seal,
    sealed,
    verdict,
)


class RowContract:
    """Exactly one decision row per answer, in the store before the answer is."""

    @ALL_MODES
    def test_every_answer_to_a_claim_leaves_one_row(self, fences: FencesUnderTest, mode: Mode) -> None:
        receipt = sealed(fences.store, claim(mode, "sealed", source="sealed"), effect_id="ef_1")
        held = granted(fences.store, claim(mode, "held", source="held"))
        fences.clock.advance(7)
        for name, content, kind, winner, sealed_at in (
            ("new", "", RowKind.NEW, b"", 0),
            ("sealed", "", RowKind.DUPLICATE, receipt.token, receipt.when_ms),
            ("sealed", "other", RowKind.CONFLICT, NO_TOKEN, receipt.when_ms),
            ("held", "", RowKind.IN_FLIGHT, held.record.token, 0),
        ):
            before = rows_of(fences.store)
            asked = claim(mode, name, by=f"{kind}", source=name, content=content, position=3, waited_ms=12)
            verdict(fences.store, asked)
            (row,) = [row for row in rows_of(fences.reopen()) if row not in before]
            assert (row.kind, row.key, row.fingerprint) == (kind, asked.key, asked.fingerprint)
            assert (row.token, row.position, row.row_id) == (asked.token, 3, f"{asked.token.hex()}03")
            assert (row.ts_ms, row.waited_ms, row.context) == (fences.clock(), 12, asked.context)
            assert (row.winner, row.sealed_at_ms) == (winner or asked.token, sealed_at)
            assert row.effect_id == ("ef_1" if name == "sealed" else "")

    @WITH_A_SOURCE
    def test_a_stale_answer_leaves_one_row(self, fences: FencesUnderTest, mode: Mode) -> None:
        sealed(fences.store, claim(mode, "A", sequence=5))
        asked = claim(mode, "B", by="two", sequence=4)
        verdict(fences.store, asked)
        (row,) = [row for row in rows_of(fences.store) if row.token == asked.token]
        assert (row.kind, row.winner) == (RowKind.STALE, NO_TOKEN)

    @ALL_MODES
    def test_a_row_tells_of_takeover_and_quarantine(self, fences: FencesUnderTest, mode: Mode) -> None:
        for by in ("one", "two", "three"):
            verdict(fences.store, claim(mode, by=by, max_attempts=2))
            fences.clock.advance(LEASE_MS)
        written = [(row.kind, row.attempt, row.flags, row.error_code) for row in rows_of(fences.store)]
        assert written == [
            (RowKind.NEW, 1, 0, ""),
            (RowKind.NEW, 2, TAKEOVER, ""),
            (RowKind.IN_FLIGHT, 2, 0, "QUARANTINED"),
        ]

    @ALL_MODES
    def test_a_conflict_whose_caller_writes_the_row_leaves_none(self, fences: FencesUnderTest, mode: Mode) -> None:
        sealed(fences.store, claim(mode, by="one"))
        before = rows_of(fences.store)
        verdict(fences.store, claim(mode, by="two", content="other", row_on_conflict=False))
        assert rows_of(fences.store) == before

    @ALL_MODES
    def test_a_batch_leaves_one_row_per_claim(self, fences: FencesUnderTest, mode: Mode) -> None:
        sealed(fences.store, claim(mode, "A", source="0", shard=0))
        before = {row.row_id for row in rows_of(fences.store)}
        batch = [claim(mode, "A", by=f"{n}", source=f"{n}", shard=n % 3) for n in range(9)]
        fences.store.claim(batch)
        written = {row.row_id: row.kind for row in rows_of(fences.reopen()) if row.row_id not in before}
        kinds = [RowKind.DUPLICATE] + [RowKind.NEW] * 8
        assert written == {f"{each.token.hex()}00": kind for each, kind in zip(batch, kinds, strict=True)}

    @ALL_MODES
    def test_a_call_sent_again_is_the_same_row(self, fences: FencesUnderTest, mode: Mode) -> None:
        asked = claim(mode, by="one")
        first = granted(fences.store, asked)
        fences.clock.advance(3)
        granted(fences.store, asked)
        for _ in range(2):
            fences.store.seal([seal(asked, first)])
        assert [(row.position, row.ts_ms) for row in rows_of(fences.store)] == [
            (0, fences.clock() - 3),
            (SEAL_POSITION, fences.clock()),
        ]

    @ALL_MODES
    def test_a_seal_leaves_the_row_of_the_outcome(self, fences: FencesUnderTest, mode: Mode) -> None:
        asked = claim(mode, by="one")
        first = granted(fences.store, asked)
        fences.clock.advance(5)
        fences.store.seal([seal(asked, first, effect_id="ef_1", ttl_ms=DAY_MS, flags=HEALED, waited_ms=4)])
        (row,) = [row for row in rows_of(fences.store) if row.position == SEAL_POSITION]
        assert (row.kind, row.key, row.token, row.winner) == (RowKind.NEW, asked.key, asked.token, asked.token)
        assert (row.effect_id, row.flags, row.waited_ms) == ("ef_1", HEALED, 4)
        assert (row.fence, row.attempt, row.error_code) == (first.record.fence, 1, "")
        assert (row.first_seen_ms, row.sealed_at_ms) == (fences.clock() - 5, fences.clock())
        assert row.expires_ms == fences.clock() + DAY_MS

    @ALL_MODES
    def test_a_sealed_failure_leaves_its_error_in_the_row(self, fences: FencesUnderTest, mode: Mode) -> None:
        sealed(fences.store, claim(mode), failed=True, error="CARD.declined")
        (row,) = [row for row in rows_of(fences.store) if row.position == SEAL_POSITION]
        assert (row.kind, row.error_code, row.expires_ms) == (RowKind.NEW, "CARD.declined", 0)

    @ALL_MODES
    def test_a_seal_of_an_effect_that_was_found_leaves_a_duplicate(self, fences: FencesUnderTest, mode: Mode) -> None:
        asked = claim(mode, by="one")
        sealed(fences.store, asked, duplicate=True, winner=b"w" * TOKEN_BYTES)
        (row,) = [row for row in rows_of(fences.store) if row.position == SEAL_POSITION]
        assert (row.kind, row.token, row.winner) == (RowKind.DUPLICATE, asked.token, b"w" * TOKEN_BYTES)

    @ALL_MODES
    def test_a_stale_owner_that_seals_leaves_a_row_that_says_so(self, fences: FencesUnderTest, mode: Mode) -> None:
        stale = claim(mode, by="one")
        first = granted(fences.store, stale)
        fences.clock.advance(LEASE_MS)
        winner = sealed(fences.store, claim(mode, by="two"))
        fences.store.seal([seal(stale, first)])
        (row,) = [row for row in rows_of(fences.store) if row.token == stale.token and row.position]
        assert row.position == FENCED_POSITION, "a seal that counts has the other, whoever writes its row"
        assert (row.kind, row.flags, row.error_code) == (RowKind.DUPLICATE, FENCED_OUT, "LEASE.fenced_out")
        assert (row.winner, row.fence, row.sealed_at_ms) == (winner.token, winner.fence, winner.when_ms)

    @ALL_MODES
    def test_a_seal_that_came_too_late_leaves_no_row_where_a_commit_may_still_count(
        self, fences: FencesUnderTest, mode: Mode
    ) -> None:
        """Behind this store stands an object store: the successor finds the commit, and performs nothing."""
        stale = claim(mode, by="one")
        first = granted(fences.store, stale)
        fences.clock.advance(LEASE_MS)
        granted(fences.store, claim(mode, by="two"))
        assert isinstance(fences.store.seal([seal(stale, first)])[0], Fenced)
        assert [row.position for row in rows_of(fences.store)] == [0, 0]

    @ALL_MODES
    def test_what_two_have_healed_was_performed_once(self, fences: FencesUnderTest, mode: Mode) -> None:
        slow, found = claim(mode, by="one"), b"w" * TOKEN_BYTES
        first = granted(fences.store, slow)
        fences.clock.advance(LEASE_MS)
        sealed(fences.store, claim(mode, by="two"), duplicate=True, flags=HEALED, winner=found)
        late = seal(slow, first, duplicate=True, flags=HEALED, winner=found)
        assert isinstance(fences.store.seal([late])[0], Fenced)
        assert [row for row in rows_of(fences.store) if row.flags & FENCED_OUT] == []

    @ALL_MODES
    @pytest.mark.parametrize("expire", [False, True])
    def test_a_release_leaves_a_row_with_its_error(self, fences: FencesUnderTest, mode: Mode, expire: bool) -> None:
        for error, code in (("TIMEOUT", "TIMEOUT"), ("", "RELEASED")):
            asked = claim(mode, by=code)
            fences.store.release([lease(asked, granted(fences.store, asked))], error, expire=expire)
            (row,) = [row for row in rows_of(fences.store) if row.row_id == f"{asked.token.hex()}{RELEASE_POSITION:x}"]
            assert (row.kind, row.error_code, row.sealed_at_ms) == (RowKind.NEW, code, 0)

    def test_rows_can_be_written_by_the_caller(self, fences: FencesUnderTest) -> None:
        rows = [
            Row(
                bytes((n,)) * TOKEN_BYTES,
                n,
                fences.clock(),
                RowKind.ENDED,
                bytes((n,)) + b"k" * 32,
                b"f" * 16,
                error_code="why",
            )
            for n in (1, 2, 3)
        ]
        for _ in range(2):
            fences.store.record(rows)
        assert sorted(rows_of(fences.store), key=row_id) == rows

    def test_rows_can_be_read_from_a_moment_on(self, fences: FencesUnderTest) -> None:
        asked = [claim(Mode.KEYED, f"{n}", by=f"{n}", shard=n) for n in range(3)]
        for each in asked:
            fences.clock.advance(10)
            verdict(fences.store, each)
        assert {row.token for row in fences.store.rows(fences.clock() - 10)} == {each.token for each in asked[1:]}
        assert list(fences.store.rows(fences.clock() + 1)) == []

    def test_rows_of_one_shard_can_be_read_alone(self, fences: FencesUnderTest) -> None:
        asked = [claim(Mode.KEYED, f"{n}", by=f"{n}", shard=n) for n in (0, 1, 63)]
        for each in asked:
            verdict(fences.store, each)
        for each in asked:
            assert {row.token for row in fences.store.rows(shard=each.key[0])} == {each.token}
        assert list(fences.store.rows(shard=2)) == []
