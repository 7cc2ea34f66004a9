"""What callers saw, and whether any order of events explains it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Event:
    """One call: what it wanted, when it began, when its answer came (None: never), and what it was."""

    what: str
    value: str | None
    sequence: int | None
    began: int
    ended: int | None = None
    outcome: str = ""


def linearizable(events: list[Event]) -> bool:
    """The head as a register: every answered write happened at some moment between call and answer; unanswered
    writes may have happened or not; stale ones did not; every read saw the newest write."""
    events = [event for event in events if event.outcome != "stale" and not (event.what == "read" and not event.ended)]
    seen: set[tuple[int, str | None]] = set()

    def explain(done: int, value: str | None) -> bool:
        if (done, value) in seen:
            return False
        seen.add((done, value))
        rest = [(at, event) for at, event in enumerate(events) if not done >> at & 1]
        answered = [event.ended for _, event in rest if event.ended is not None]
        if not answered:
            return True
        first_answer = min(answered)
        for at, event in rest:
            if event.began > first_answer:
                continue
            if event.what == "read":
                if event.value == value and explain(done | 1 << at, value):
                    return True
            elif explain(done | 1 << at, event.value):
                return True
        return False

    return explain(0, None)
