"""Many events, two fifths of them duplicates, eight processes; kills, a flush and a failover of the fence store.

The high-water mark of the queue holds the producer back. It is what the consumers take in a second and a half, measured
while they warm up: that is how a user would choose it, and what bounds the time from sending to sealing.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ragfence.errors import QueueFull
from ragfence.queues import Envelope, Transport, open_transport
from tests.acceptance.crew import Crew, crew
from tests.acceptance.ground import LEASE_S, VISIBILITY_S, Ground
from tests.acceptance.promise import Promise, aimed, kept, shown
from tests.acceptance.scenarios import is_empty, notes_of, place_for

NAME = "flood"
BATCH = 25
QUEUED_S = 1.5
"""How many seconds of work may wait in the queue."""
AT_MOST_S = 5.0
NEAR = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class FloodScale:
    events: int
    kills: int
    warm_up: int
    processes: int = 8
    duplicates: float = 0.4
    flushes: int = 1
    failovers: int = 1


@dataclass(slots=True)
class Stream:
    """The events in the order of sending: new ones, and duplicates of those before, near and far."""

    scale: FloodScale
    dice: random.Random
    unique: int = 0
    sent: int = 0

    def next(self, count: int) -> list[Envelope]:
        return [self._one() for _ in range(count)]

    def _one(self) -> Envelope:
        if self.unique and self.dice.random() < self.scale.duplicates:
            lowest = max(0, self.unique - NEAR) if self.dice.random() < 0.5 else 0
            number = self.dice.randrange(lowest, self.unique)
        else:
            number = self.unique
            self.unique += 1
        return Envelope(body={"id": f"e{number}", "amount": number * 7 % 1000}, event_id=f"e{number}")


@dataclass(slots=True)
class Faults:
    """What is done to the consumers and to the fence store, and when, by the share of events that was sent."""

    ground: Ground
    crew: Crew
    dice: random.Random
    due: list[tuple[float, str]]
    done: Counter[str] = field(default_factory=Counter)
    windows_ms: list[tuple[int, int]] = field(default_factory=list)
    """in which the fence store was away or empty"""

    @classmethod
    def planned(cls, ground: Ground, made: Crew, dice: random.Random, scale: FloodScale) -> Faults:
        due = [((each + dice.random()) / scale.kills, "kill") for each in range(scale.kills)]
        due += [((each + 0.4) / scale.flushes, "flush") for each in range(scale.flushes)]
        due += [((each + 0.7) / scale.failovers, "failover") for each in range(scale.failovers)]
        return cls(ground, made, dice, sorted(due))

    def strike(self, share: float) -> str:
        """Does the next one, if it is due. Returns what it was."""
        if not self.due or self.due[0][0] > share:
            return ""
        _, what = self.due.pop(0)
        began_ms = int(time.time() * 1000)
        if what == "kill":
            self.crew.kill_one(self.dice)
        elif what == "flush":
            with self.ground.fences.primary().client() as client:
                client.flushall()
        else:
            self._fail_over()
        if what != "kill":
            self.windows_ms.append((began_ms, int(time.time() * 1000)))
        self.done[what] += 1
        return what

    def _fail_over(self) -> None:
        primary = self.ground.fences.primary()
        primary.kill()
        self.ground.fences.wait_promoted(primary)
        primary.start()
        self.ground.fences.wait_replicating()


@dataclass(frozen=True, slots=True)
class Flooded:
    """What was counted, past ragfence."""

    scale: FloodScale
    unique: int
    effects: int
    distinct: int
    runs: int
    dead: int
    left: int
    faults: Counter[str]
    results: Counter[str]
    refusals: int
    high_water: int
    seconds: float
    drained_s: float
    """from the last sending to the last acknowledgement"""
    waits_ms: list[int]
    """from sending to sealing and acknowledgement, while the high-water mark held the producer back"""
    quiet_ms: list[int]
    """the same, without what was sent while the fence store was away or empty, or shortly before"""

    @property
    def doubles(self) -> int:
        return self.effects - self.distinct

    @property
    def lost(self) -> int:
        return self.unique - self.distinct


def flood(ground: Ground, scale: FloodScale, seed: int, say: Callable[[str], None]) -> Flooded:
    dice = random.Random(seed)
    place = place_for(ground, NAME)
    stream = Stream(scale, random.Random(seed + 1))
    queue = open_transport(place.queue, visibility_s=VISIBILITY_S, high_water=500)
    began = time.monotonic()
    with crew(place, scale.processes) as made:
        faults = Faults.planned(ground, made, dice, scale)
        refusals = _send(queue, stream, scale.warm_up // 4, lambda: None)
        warm_from, warm_at = stream.sent - _left(queue), time.monotonic()
        refusals += _send(queue, stream, scale.warm_up, lambda: None)
        rate = (stream.sent - _left(queue) - warm_from) / (time.monotonic() - warm_at)
        queue.close()
        high_water = max(2 * BATCH, int(QUEUED_S * rate))
        say(f"{scale.events:,} events; {rate:,.0f} a second while warming up, so at most {high_water:,} may wait")
        queue = open_transport(place.queue, visibility_s=VISIBILITY_S, high_water=high_water)
        active_ms = int(time.time() * 1000)
        progress = Progress(scale, queue, stream, faults, say)
        refusals += _send(queue, stream, scale.events, progress)
        sent_at = time.monotonic()
        _drain(queue, made, say)
        drained_s = time.monotonic() - sent_at
    seconds = time.monotonic() - began
    depth = queue.depth()
    queue.close()
    results, waits_ms, quiet_ms = _waits(ground, active_ms, faults.windows_ms)
    (rows,) = ground.query(
        "SELECT count(*), count(DISTINCT key) FROM effects WHERE place = :place AND key LIKE 'e%'", place=place.name
    )
    runs = sum(path.read_bytes().count(b"\n") for path in notes_of(ground, NAME, "runs"))
    return Flooded(
        scale=scale,
        unique=stream.unique,
        effects=rows[0],
        distinct=rows[1],
        runs=runs,
        dead=depth.dead,
        left=depth.visible + depth.in_flight,
        faults=faults.done,
        results=results,
        refusals=refusals,
        high_water=high_water,
        seconds=seconds,
        drained_s=drained_s,
        waits_ms=waits_ms,
        quiet_ms=quiet_ms,
    )


def promises(found: Flooded) -> Iterator[Promise]:
    scale = found.scale
    kills, flushes, failovers = (found.faults[name] for name in ("kill", "flush", "failover"))
    workload = (
        f"{scale.events:,} events, {scale.events - found.unique:,} of them duplicates, {scale.processes} processes, "
        f"{kills} killed, {flushes} FLUSHALL and {failovers} failover of the fence store"
    )
    happened = (kills, flushes, failovers) == (scale.kills, scale.flushes, scale.failovers)
    yield kept("double effects", workload, "0", f"{found.doubles}", found.doubles == 0 and happened)
    counted = f"{found.lost} ({found.dead} dead, {found.left} left in the queue)"
    yield kept("lost events", "the same", "0", counted, found.lost == found.dead == found.left == 0)
    again = found.runs - found.unique
    yield kept(
        "runs of a handler for an event that had one",
        "the same; a kill can interrupt one run, a flush or a failover one in each process",
        f"at most {kills + (flushes + failovers) * scale.processes}",
        f"{again}",
        0 <= again <= kills + (flushes + failovers) * scale.processes,
    )
    p99 = percentile(found.waits_ms, 0.99) / 1000
    quiet = f"; p99 apart from the faults of the fence store {percentile(found.quiet_ms, 0.99) / 1000:.1f} s"
    p50 = percentile(found.waits_ms, 0.5) / 1000
    waiting = f"from sending to acknowledgement, at most {found.high_water:,} in the queue"
    yield aimed(
        "p99 under backpressure",
        f"{waiting}; {found.refusals:,} refusals",
        f"at most {AT_MOST_S:g} s",
        f"{p99:.1f} s (median {p50:.1f} s{quiet if found.quiet_ms else ''})",
        p99 <= AT_MOST_S,
    )
    yield shown(
        "events a second",
        "producer, consumers and servers on one machine",
        f"{scale.events / found.seconds:,.0f} over {found.seconds:,.0f} s",
    )


def percentile(values: list[int], share: float) -> float:
    if not values:
        return float("nan")
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


class Progress:
    """Called after each batch: faults that are due, and a line now and then."""

    def __init__(
        self, scale: FloodScale, queue: Transport, stream: Stream, faults: Faults, say: Callable[[str], None]
    ) -> None:
        self._scale, self._queue, self._stream, self._faults, self._say = scale, queue, stream, faults, say
        self._began, self._told_at, self._first = time.monotonic(), time.monotonic(), stream.sent

    def __call__(self) -> None:
        share = self._stream.sent / self._scale.events
        if what := self._faults.strike(share):
            self._say(f"{100 * share:3.0f} %  {what}")
        self._faults.crew.replace_the_dead()
        now = time.monotonic()
        if now - self._told_at >= 5.0:
            self._told_at = now
            rate = (self._stream.sent - self._first) / (now - self._began)
            left_s = (self._scale.events - self._stream.sent) / max(rate, 1.0)
            self._say(
                f"{100 * share:3.0f} %  {self._stream.sent:,} sent, {_left(self._queue):,} in the queue, "
                f"{rate:,.0f} a second, {left_s / 60:.0f} min left"
            )


def _send(queue: Transport, stream: Stream, until_sent: int, after: Callable[[], None]) -> int:
    """Returns how often the queue refused a batch."""
    refusals = 0
    while stream.sent < until_sent:
        batch = stream.next(min(BATCH, until_sent - stream.sent))
        while True:
            try:
                queue.send(batch)
                break
            except QueueFull:
                refusals += 1
                after()
                time.sleep(0.05)
        stream.sent += len(batch)
        after()
    return refusals


def _left(queue: Transport) -> int:
    depth = queue.depth()
    return depth.visible + depth.in_flight


def _drain(queue: Transport, made: Crew, say: Callable[[str], None], within_s: float = 300.0) -> None:
    give_up_at = time.monotonic() + within_s
    while not is_empty(queue) and time.monotonic() < give_up_at:
        made.replace_the_dead()
        time.sleep(0.2)
    if not is_empty(queue):
        say(f"still in the queue after {within_s:.0f} s: {queue.depth()}")


def _waits(
    ground: Ground, active_ms: int, windows_ms: list[tuple[int, int]]
) -> tuple[Counter[str], list[int], list[int]]:
    results, waits, quiet = Counter[str](), list[int](), list[int]()
    slack_ms = int(1000 * (AT_MOST_S + 2 * LEASE_S))
    for path in notes_of(ground, NAME, "settled"):
        for line in path.read_text().splitlines():
            result, waited_ms, sent_ms = line.split()
            results[result] += 1
            if int(sent_ms) < active_ms or result in ("retried", "in_flight", "returned"):
                continue  # not settled yet: its last line counts
            waits.append(int(waited_ms))
            at = int(sent_ms)
            if not any(begin - slack_ms <= at <= end + slack_ms for begin, end in windows_ms):
                quiet.append(int(waited_ms))
    return results, waits, quiet
