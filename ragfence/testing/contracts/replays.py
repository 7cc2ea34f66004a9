"""Replays: documents whose live head answers them, without a claim."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ragfence.core.decisions import (
    Mode,
    Replay,
)
from ragfence.core.layout import (
    TOKEN_BYTES,
)
from ragfence.core.records import decode_record
from ragfence.testing.contracts.fence_calls import (
    FencesUnderTest,
    ask,
    claim,
    granted,
    rows_of,
    sealed,
    source_of,
    start_epoch,
    verdict,
)


class ReplayContract:
    """Documents that are answered without a claim."""

    def test_a_live_document_is_answered_without_a_claim_and_leaves_the_same_row(self, fences: FencesUnderTest) -> None:
        asked = claim(Mode.DOCUMENT, "A", metadata_hash=b"m" * 16, context=b'{"kind":"document"}')
        record = sealed(fences.store, asked, result=b"d" + b"i" * 32)
        (found,) = fences.store.replays([ask(asked)]).settled()
        assert found is not None
        assert decode_record(found) == record
        claimed = asked._replace(token=b"2" * TOKEN_BYTES)
        assert verdict(fences.store, claimed) == Replay(record)
        rows = {row.token: row for row in rows_of(fences.store)}
        by_replay, by_claim = rows[ask(asked).token], rows[claimed.token]
        assert dataclasses.replace(by_replay, token=claimed.token, ts_ms=by_claim.ts_ms) == by_claim

    @pytest.mark.parametrize(
        "other",
        [
            {"fingerprint": b"x" * 16},
            {"metadata_hash": b"x" * 16},
            {"sequence": 4},
            {"key": claim(Mode.DOCUMENT, "B").key},
            {"source": source_of("another")},
        ],
        ids=lambda other: next(iter(other)),
    )
    def test_whatever_differs_is_asked_by_a_claim(self, fences: FencesUnderTest, other: dict[str, Any]) -> None:
        asked = claim(Mode.DOCUMENT, "A", metadata_hash=b"m" * 16)
        sealed(fences.store, asked, result=b"d")
        before = rows_of(fences.store)
        assert fences.store.replays([ask(asked)._replace(**other)]).settled() == [None]
        assert rows_of(fences.store) == before

    def test_a_document_with_a_sequence_is_answered_for_just_that_sequence(self, fences: FencesUnderTest) -> None:
        asked = claim(Mode.DOCUMENT, "A", sequence=-3)
        sealed(fences.store, asked, result=b"d")
        answers = fences.store.replays(
            [ask(asked), ask(asked)._replace(sequence=None, token=b"3" * TOKEN_BYTES)]
        ).settled()
        assert [answer is not None for answer in answers] == [True, True]
        for sequence in (-4, -2):
            assert fences.store.replays([ask(asked)._replace(sequence=sequence)]).settled() == [None]

    def test_a_document_that_is_claimed_retracted_or_of_another_epoch_is_asked_by_a_claim(
        self, fences: FencesUnderTest
    ) -> None:
        asked = claim(Mode.DOCUMENT, "A")
        assert fences.store.replays([ask(asked)]).settled() == [None]
        sealed(fences.store, asked, result=b"d")
        granted(fences.store, claim(Mode.DOCUMENT, "B", by="two"))
        assert fences.store.replays([ask(asked)]).settled() == [None]
        other = claim(Mode.DOCUMENT, "A", source="other")
        sealed(fences.store, other, result=b"d")
        sealed(fences.store, claim(Mode.DOCUMENT, "", source="other", retract=True, by="three"))
        assert fences.store.replays([ask(other)]).settled() == [None]
        third = claim(Mode.DOCUMENT, "A", source="third")
        sealed(fences.store, third, result=b"d")
        fences.restart()
        assert fences.store.replays([ask(third)]).settled() == [None]
        start_epoch(fences.store, 77)
        assert fences.store.replays([ask(third)]).settled() == [None]

    def test_nothing_of_a_source_is_answered_after_what_may_move_it(self, fences: FencesUnderTest) -> None:
        first = claim(Mode.DOCUMENT, "A")
        sealed(fences.store, first, result=b"d")
        moving = ask(claim(Mode.DOCUMENT, "B"))
        found = fences.store.replays([ask(first), moving, ask(first)._replace(token=b"4" * TOKEN_BYTES)]).settled()
        assert [record is not None for record in found] == [True, False, False]

    def test_no_asks_no_answers(self, fences: FencesUnderTest) -> None:
        assert fences.store.replays([]).settled() == []
