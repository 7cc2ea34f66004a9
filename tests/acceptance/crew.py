"""Consumers that are killed and replaced."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess

from tests.acceptance.forks import fork
from tests.acceptance.worker import Place, work


class Crew:
    """Keeps `size` consumers going."""

    def __init__(self, place: Place, size: int, life: Callable[[Place], None] = work) -> None:
        self._place, self._life = place, life
        self.killed = 0
        self.members = [self._start() for _ in range(size)]

    def kill_one(self, dice: random.Random) -> None:
        at = dice.randrange(len(self.members))
        member = self.members[at]
        member.kill()
        member.join()
        self.killed += 1
        self.members[at] = self._start()

    def replace_the_dead(self) -> None:
        """A consumer ends only when it is told to; one that ended otherwise is an error."""
        for member in self.members:
            if member.exitcode is not None:
                raise RuntimeError(f"a consumer ended with {member.exitcode}")

    def end(self, within_s: float = 30.0) -> None:
        for member in self.members:
            member.terminate()
        give_up_at = time.monotonic() + within_s
        for member in self.members:
            member.join(max(0.0, give_up_at - time.monotonic()))
            if member.exitcode is None:
                member.kill()
                member.join()

    def _start(self) -> BaseProcess:
        return fork(self._life, self._place)


@contextlib.contextmanager
def crew(place: Place, size: int) -> Iterator[Crew]:
    made = Crew(place, size)
    try:
        yield made
    finally:
        made.end()
