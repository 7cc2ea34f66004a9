"""The judge sees what is lost and what is double; else the sequences would prove nothing."""

from __future__ import annotations

import pytest

from tests.server.killed.judge import Happened, Wanted, follows
from tests.server.killed.load import sent
from tests.server.killed.sequences import Plan

NONE, A, B = Wanted(None), Wanted("a"), Wanted("b")
MAYBE_A = Wanted("a", certain=False)


def rows(told: str) -> list[Happened]:
    """`a` was sealed, `(a)` was not, `-` is retracted."""
    return [Happened(None if "-" in each else each.strip("()"), "(" not in each) for each in told.split()]


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ([NONE], ""),
        ([NONE, A, B], "a b"),
        ([NONE, A, B], "(a) a b b"),  # written again by who took over
        ([NONE, A, B], "(b) a b"),  # committed, never sealed, and overtaken by who came next
        ([NONE, A, B], "a (b)"),  # found in the log when the fence store was rebuilt
        ([NONE, MAYBE_A, B], "b"),
        ([NONE, MAYBE_A, B], "a b"),
        ([NONE, A, NONE, A], "a - a"),
    ],
)
def test_what_was_asked_for_happened_once(wanted: list[Wanted], told: str) -> None:
    assert follows(wanted, rows(told))


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ([NONE, A], ""),  # lost
        ([NONE, A, B], "b"),
        ([NONE, A, B], "a"),
        ([NONE, A, B], "b a"),  # the other way round
        ([NONE, A, B], "a b a"),  # double
        ([NONE, A, B], "a b a b"),
        ([NONE, A, NONE], "a - a -"),
        ([NONE, A], "a c"),  # refused, and performed all the same
        ([NONE, MAYBE_A, B], "b a"),
    ],
)
def test_lost_and_double_are_seen(wanted: list[Wanted], told: str) -> None:
    assert not follows(wanted, rows(told))


def test_a_seed_makes_the_same_sequence_every_time() -> None:
    assert list(map(str, Plan(7, builds=1).made())) == list(map(str, Plan(7, builds=1).made()))
    assert list(map(str, Plan(7).made())) != list(map(str, Plan(8).made()))


def test_three_in_ten_requests_of_a_load_are_duplicates() -> None:
    kinds = [sent(1, number).kind for number in range(5000)]
    assert 0.27 < 1 - kinds.count("new") / len(kinds) < 0.33
    assert set(kinds) == {"new", "again", "other key", "other payload"}
    assert all(sent(1, sent(1, number).first).kind == "new" for number in range(300))
