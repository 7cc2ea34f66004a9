"""Interleaved measuring: every subject runs in every round, so that a noisy machine is noisy for all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Subject:
    name: str
    run: Callable[[int], int]
    """does a round's work, given its number, and returns how many operations that were"""


@dataclass(frozen=True, slots=True)
class Measured:
    name: str
    rates: tuple[float, ...]

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)


def interleave(subjects: Sequence[Subject], rounds: int) -> dict[str, Measured]:
    for subject in subjects:
        subject.run(-1)  # connections, scripts and caches are warm before anything counts
    rates: dict[str, list[float]] = {subject.name: [] for subject in subjects}
    for number in range(rounds):
        # Another order every round: nobody always runs behind the one that heats the machine.
        turn = number % len(subjects)
        for subject in [*subjects[turn:], *subjects[:turn]]:
            started = time.perf_counter()
            done = subject.run(number)
            rates[subject.name].append(done / (time.perf_counter() - started))
    return {name: Measured(name, tuple(measured)) for name, measured in rates.items()}


def ratio(ours: Measured, theirs: Measured) -> tuple[float, float, float]:
    """Median, lowest and highest of the ratios round by round."""
    each = [mine / other for mine, other in zip(ours.rates, theirs.rates, strict=True)]
    return statistics.median(each), min(each), max(each)
