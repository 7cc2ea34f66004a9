"""Tables that are made, and worked on, in threads beside the one that hands them on."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from ragfence.indexes.prefetch import MOST, Prefetch, SideThread

LONG_S = 30.0


def test_values_come_in_their_order() -> None:
    with Prefetch(iter(range(100))) as values:
        assert list(values) == list(range(100))
        assert list(values) == []


def test_it_begins_before_anybody_asks_and_stays_a_few_ahead() -> None:
    made: list[int] = []
    enough = threading.Event()

    def source() -> Iterator[int]:
        for at in range(100):
            made.append(at)
            if len(made) == MOST:
                enough.set()
            yield at

    with Prefetch(source()) as values:
        assert enough.wait(LONG_S)
        assert next(iter(values)) == 0
    assert len(made) <= MOST + 1


def test_an_error_of_the_source_comes_in_its_turn() -> None:
    def source() -> Iterator[int]:
        yield 1
        raise LookupError("of the source")

    with Prefetch(source()) as values:
        assert next(values) == 1
        with pytest.raises(LookupError, match="of the source"):
            next(values)
        assert list(values) == []


def test_who_leaves_early_ends_the_source() -> None:
    ended = threading.Event()

    def source() -> Iterator[int]:
        try:
            while True:
                yield 1
        finally:
            ended.set()

    with Prefetch(source()) as values:
        assert next(values) == 1
    assert ended.is_set()


def test_aside_works_on_every_value_in_another_thread() -> None:
    seen: list[tuple[int, int]] = []
    aside = SideThread[int](lambda value: seen.append((value, threading.get_ident())))
    for value in range(20):
        aside.begin(value)
    aside.finish()
    aside.close()
    assert [value for value, _ in seen] == list(range(20))
    assert threading.get_ident() not in {thread for _, thread in seen}


def test_what_goes_wrong_aside_is_told_at_the_latest_when_it_is_finished() -> None:
    def refuse(value: int) -> None:
        raise LookupError(value)

    aside = SideThread(refuse)
    aside.begin(1)
    with pytest.raises(LookupError):
        aside.finish()
    aside.close()
