"""The small ones: sent five times, killed in mid-flight, out of order, retried at the boundary."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import sqlalchemy as sa

from ragfence.core.backoff import Backoff
from ragfence.errors import StoreUnavailable
from ragfence.outbox import Inbox
from ragfence.queues import Consumer, Envelope, Message, Transport, open_transport
from tests.acceptance.crew import crew
from tests.acceptance.forks import fork, wait_ended
from tests.acceptance.ground import VISIBILITY_S, Ground, effects
from tests.acceptance.promise import Promise, kept
from tests.acceptance.worker import Place
from tests.chaos.crew import until
from tests.queues import crash_worker
from tests.queues.crash_worker import ConsumerJob

PROCESSES = 3
RETRIES = 3


def place_for(ground: Ground, name: str, *, ordered: bool = False) -> Place:
    notes = ground.folder / "notes"
    notes.mkdir(exist_ok=True)
    return Place(
        name=name,
        store=ground.fences.url,
        objects=ground.objects,
        queue=ground.queue_url(name),
        database=ground.database,
        notes=str(notes / name),
        ordered=ordered,
    )


def is_empty(queue: Transport) -> bool:
    depth = queue.depth()
    return depth.visible == depth.in_flight == 0


def run(ground: Ground, dice: random.Random, *, keys: int) -> Iterator[Promise]:
    yield sent_five_times(ground, dice, keys)
    yield killed_in_mid_flight(ground)
    yield out_of_order(ground, dice, keys)
    yield retried_at_the_boundary(ground, keys)


def sent_five_times(ground: Ground, dice: random.Random, keys: int) -> Promise:
    place = place_for(ground, "five")
    queue = open_transport(place.queue, visibility_s=VISIBILITY_S)
    names = [f"k{number}" for number in range(keys)]
    sendings = [name for name in names for _ in range(5)]
    dice.shuffle(sendings)
    with crew(place, PROCESSES):
        for name in sendings:
            queue.send([Envelope(body={"id": name}, event_id=name)], delay_s=dice.uniform(0.0, 2.0))
        until(lambda: is_empty(queue), "every message is acknowledged")
    dead = queue.depth().dead
    queue.close()
    found = ground.effects_of(place.name)
    return kept(
        "the same event five times",
        f"{keys} events, each sent 5 times with delays of 0 to 2 s, {PROCESSES} consumers",
        "1 effect each",
        f"{sum(found.values())} effects of {len(found)} events, {dead} dead",
        found == dict.fromkeys(names, 1) and dead == 0,
    )


def killed_in_mid_flight(ground: Ground) -> Promise:
    """Before the effect, after it, and before the acknowledgement: a process each."""
    points = ("in_effect", "after_effect", "after_commit", "after_seal")
    crash_worker.metadata.create_all(sa.create_engine(ground.database, poolclass=sa.NullPool))
    good = 0
    for point in points:
        name = f"killed-{point}"
        job = ConsumerJob(
            store=ground.fences.url,
            objects=ground.objects,
            queue=ground.queue_url(name),
            database=ground.database,
            place=name,
            runs=str(ground.folder / name),
            strike=f"kill {point}",
        )
        queue = job.open_queue()
        queue.send([Envelope(body={"id": f"{name}-{number}"}) for number in range(3)])
        code = wait_ended(fork(crash_worker.work, job))
        hidden = queue.depth().in_flight
        time.sleep(2 * job.visibility_s)
        visible = len(queue.receive(10, 0.0)) == hidden == 3
        time.sleep(job.visibility_s)
        crash_worker.consume_all(job)
        found = ground.effects_of(name)
        queue.close()
        good += code == -signal.SIGKILL and visible and sorted(found.values()) == [1, 1, 1]
    return kept(
        "a consumer killed in mid-flight",
        f"SIGKILL at {', '.join(points)}; 3 messages each",
        "visible again, 1 effect each",
        f"{good} of {len(points)} points so",
        good == len(points),
    )


def out_of_order(ground: Ground, dice: random.Random, keys: int) -> Promise:
    place = place_for(ground, "order", ordered=True)
    queue = open_transport(place.queue, visibility_s=VISIBILITY_S)
    with crew(place, PROCESSES):
        for number in range(keys):
            versions = [1, 3, 2]
            if number:  # the first as it stands, the others in any order
                dice.shuffle(versions)
            for version in versions:
                queue.send([Envelope(body={"id": f"o{number}", "version": version})])
        until(lambda: is_empty(queue), "every message is acknowledged")
    dead = queue.depth().dead
    queue.close()
    last = ground.query(
        "SELECT DISTINCT ON (split_part(key, '@', 1)) split_part(key, '@', 1), value FROM effects "
        "WHERE place = :place ORDER BY split_part(key, '@', 1), id DESC",
        place=place.name,
    )
    threes = sum(value == 3 for _, value in last)
    twice = sum(times > 1 for times in ground.effects_of(place.name).values())
    return kept(
        "revisions 1, 3, 2",
        f"{keys} sources, {PROCESSES} consumers",
        "the state ends at 3",
        f"{threes} of {len(last)} sources at 3, {twice} revisions applied twice, {dead} dead",
        threes == keys == len(last) and twice == dead == 0,
    )


def retried_at_the_boundary(ground: Ground, keys: int) -> Promise:
    """The effect is committed and the answer is lost, three times: what the user sees happens once."""
    name = "boundary"
    queue = open_transport(ground.queue_url(name), visibility_s=VISIBILITY_S)
    engine = sa.create_engine(ground.database, poolclass=sa.NullPool)
    inbox, runs = Inbox(engine), Counter[str]()

    def handle(message: Message) -> None:
        key = message.body["id"]
        runs[key] += 1
        with engine.begin() as tx:
            if inbox.first(tx, key, source=name, payload=message.body):
                tx.execute(sa.insert(effects).values(place=name, key=key, value=0))
        if runs[key] <= RETRIES:
            raise StoreUnavailable("the answer of the effect was lost")

    names = [f"b{number}" for number in range(keys)]
    queue.send([Envelope(body={"id": key}) for key in names])
    with ground.open_fence() as fence:
        at_once = Backoff(attempts=10, first_s=0.05, longest_s=0.1)
        consumer = Consumer(fence, queue, handle, key=lambda message: message.body["id"], retry=at_once)
        while not is_empty(queue):
            consumer.run_once(0.1)
    queue.close()
    found = ground.effects_of(name)
    return kept(
        "retried three times at the boundary",
        f"{keys} events; the handler fails {RETRIES} times after its own commit",
        "applied once",
        f"{sum(runs.values())} runs, {sum(found.values())} effects of {len(found)} events",
        found == dict.fromkeys(names, 1) and set(runs.values()) == {RETRIES + 1},
    )


def notes_of(ground: Ground, name: str, what: str) -> list[Path]:
    return sorted((ground.folder / "notes").glob(f"{name}-{what}-*"))
