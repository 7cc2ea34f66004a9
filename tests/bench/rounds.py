"""Interleaved measuring: every subject runs in every round, so that a noisy machine is noisy for all of them."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

Ready = TypeVar("Ready")

WARM_UP = -1


@dataclass(frozen=True, slots=True)
class Subject:
    name: str
    count: int
    """operations in a round"""
    seconds: Callable[[int], float]
    """does a round's work, given the round's number, and says how long that took"""


@dataclass(frozen=True, slots=True)
class Spread:
    """What many rounds say about one figure."""

    middle: float
    lowest: float
    lower: float
    """with `upper`: between them lies the middle half"""
    upper: float
    highest: float

    @classmethod
    def of(cls, values: Sequence[float], middle: float | None = None) -> Spread:
        several = values if len(values) > 1 else [*values, *values]
        lower, median, upper = statistics.quantiles(several, n=4, method="inclusive")
        return cls(median if middle is None else middle, min(values), lower, upper, max(values))


def clocked(
    work: Callable[[Ready], object],
    *,
    prepare: Callable[[int], Ready],
    check: Callable[[Ready], None] = lambda _: None,
) -> Callable[[int], float]:
    """Only `work` counts: neither making its arguments ready, nor seeing that it did what it should, nor tidying."""

    def seconds(number: int) -> float:
        ready = prepare(number)
        gc.collect()  # what others left behind is not swept up on this one's time; the peer's worker does the same
        started = time.perf_counter()
        work(ready)
        taken = time.perf_counter() - started
        check(ready)
        return taken

    return seconds


def interleave(
    subjects: Sequence[Subject], rounds: int, say: Callable[[str], None] = lambda _: None
) -> dict[str, list[float]]:
    """Operations per second of every subject, round by round."""
    for subject in subjects:
        subject.seconds(WARM_UP)  # connections, scripts and caches are warm before anything counts
    rates: dict[str, list[float]] = {subject.name: [] for subject in subjects}
    for number in range(rounds):
        for subject in in_turn(subjects, number):
            rates[subject.name].append(subject.count / subject.seconds(number))
        say(f"round {number + 1} of {rounds}")
    return rates


def in_turn(subjects: Sequence[Subject], number: int) -> list[Subject]:
    """Another beginning and another stride every round: nobody always runs behind the one that heats the machine."""
    count = len(subjects)
    strides = [stride for stride in range(1, count + 1) if math.gcd(stride, count) == 1]
    stride = strides[number % len(strides)]
    return [subjects[(number + stride * at) % count] for at in range(count)]


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Round by round: what disturbed both in the same round cancels out."""
    return [mine / other for mine, other in zip(ours, theirs, strict=True)]
