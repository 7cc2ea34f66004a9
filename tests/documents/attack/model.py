"""Documents as a plain dict would keep them: what each call must do, and what a crash may leave behind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

DONE, STALE, CONFLICT, IN_FLIGHT = "done", "stale", "conflict", "in_flight"


class Content(NamedTuple):
    text: str
    views: int
    """metadata: no part of the key"""
    recipe: str


class State(NamedTuple):
    """What is live of a document, and the highest sequence it ever had."""

    content: Content | None
    top: int | None
    purged: bool = False
    """nothing is live because of a purge: that is no retraction"""


NOTHING = State(None, None)


class Wanted(NamedTuple):
    """A call for one document. Without a content it is retracted."""

    doc_id: str
    content: Content | None
    sequence: int | None = None

    @property
    def key(self) -> tuple[str, str, str] | None:
        return (self.doc_id, self.content.text, self.content.recipe) if self.content else None


class Done(NamedTuple):
    outcome: str
    state: State


def apply(state: State, wanted: Wanted) -> Done:
    if wanted.sequence is not None and state.top is not None:
        if wanted.sequence < state.top:
            return Done(STALE, state)
        if wanted.sequence == state.top and not _same_revision(state, wanted.content):
            return Done(CONFLICT, state)
    return Done(DONE, State(wanted.content, state.top if wanted.sequence is None else wanted.sequence))


def _same_revision(state: State, wanted: Content | None) -> bool:
    live = state.content
    if live is None or wanted is None:
        return live is wanted and not state.purged
    return (live.text, live.recipe) == (wanted.text, wanted.recipe)


def after(states: set[State], calls: Sequence[tuple[Wanted, str]]) -> set[State]:
    """The states that these calls, in this order, can have ended in, given what they were answered."""
    for wanted, outcome in calls:
        if outcome != IN_FLIGHT:  # who was told that changed nothing
            states = {done.state for done in (apply(state, wanted) for state in states) if done.outcome == outcome}
    return states


def after_any_of(states: set[State], wanted: Sequence[Wanted]) -> set[State]:
    """Somebody died on the way: none of the calls counts, or the first, or the first two ..."""
    possible = set(states)
    for each in wanted:
        states = {apply(state, each).state for state in states}
        possible |= states
    return possible


def perhaps_twice(calls: Sequence[tuple[Wanted, str]]) -> Iterator[list[tuple[Wanted, str]]]:
    """Who has a sequence and finds a newer epoch after its commit claims again, also if the commit counts.

    It may so be told of a conflict with what came after its own move.
    """
    ways = [
        ([call], [(call[0], DONE), call])
        if call[0].sequence is not None and call[1] in (STALE, CONFLICT)
        else ([call],)
        for call in calls
    ]
    for way in product(*ways):
        yield [call for made in way for call in made]


def interleaved(
    one: Sequence[tuple[Wanted, str]], other: Sequence[tuple[Wanted, str]]
) -> Iterator[list[tuple[Wanted, str]]]:
    """Every order of the calls of two callers, each of whom makes them one after the other."""
    if not one or not other:
        yield [*one, *other]
        return
    for rest in interleaved(one[1:], other):
        yield [one[0], *rest]
    for rest in interleaved(one, other[1:]):
        yield [other[0], *rest]
