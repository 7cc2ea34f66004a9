"""The events of two weeks, from Monday to the Friday after next: requests, kills, and mistakes.

python -m notebooks.sample.history FOLDER
"""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from notebooks.sample import END
from notebooks.sample.workers import Clock, Worker
from pipelines.corpus import write_corpus

# In the future, because the files of the object store have today's date and must be older than the fence store's clock.
MONDAY = datetime(2030, 1, 7, tzinfo=UTC)
DAYS = 12
HOURS = (9, 13, 17)
SEED = 7
HANDBOOK, SITE = 41, 14
"""How many pages each has, taken from the corpus of `make demo`."""
REDELIVERED = ((4, 0.45), (24, 0.25), (48, 0.12), (72, 0.06))
"""A shop that repeats deliveries without a reply: hours after the first delivery, and the probability."""


class History:
    def __init__(self, home: Path) -> None:
        self._home = home
        self._clock = Clock()
        self._random = random.Random(SEED)
        self._pages = home / "handbook"
        self._site = home / "site"
        self._workers: dict[str, Worker] = {}
        self._deliveries: dict[datetime, list[str]] = {}
        self._orders = 0
        self._tickets: dict[int, list[dict[str, Any]]] = {}

    def run(self) -> None:
        self._write_pages()
        for day in range(DAYS):
            for hour in HOURS:
                self._hour(day, hour)
            if day < DAYS - 1:  # the rows of the last day stay in the fence store
                self._night(day)
        verdict = self._worker("auditor").do("check")
        assert "every promise kept" in verdict, verdict
        for worker in self._workers.values():
            worker.stop()
        (self._home / END).write_text(str(self._clock()))

    def _write_pages(self) -> None:
        documents = self._home / "documents"
        write_corpus(documents)
        pages = list_files(documents)
        for folder, share in ((self._pages, pages[:HANDBOOK]), (self._site, pages[HANDBOOK : HANDBOOK + SITE])):
            for page in share:
                place = folder / page.relative_to(documents)
                place.parent.mkdir(parents=True, exist_ok=True)
                page.rename(place)
        shutil.rmtree(documents)

    def _hour(self, day: int, hour: int) -> None:
        now = MONDAY + timedelta(days=day, hours=hour)
        self._clock.move_to(int(now.timestamp() * 1000))
        weekend = day % 7 >= 5
        self._edit(day, hour)
        self._worker("loader-1").do("sync", self._pages)
        self._deliver(now, 4 if weekend else 14)
        if not weekend and hour == HOURS[0]:
            self._raced("tickets", self._new_tickets(day), by=("api-1", "api-2", "api-3"))
        if special := SPECIAL.get((day, hour)):
            special(self)

    def _night(self, day: int) -> None:
        self._clock.move_to(int((MONDAY + timedelta(days=day, hours=23)).timestamp() * 1000))
        self._worker("keeper").do("purge")
        if day == 3:
            self._worker("keeper").begin("drain", kill="drain_committed")
            self._gone("keeper")
        else:
            self._worker("keeper").do("drain")

    def _edit(self, day: int, hour: int) -> None:
        """Edits two pages a day. On the last day, a site generator writes the time on all pages."""
        pages = list_files(self._pages)
        if day == DAYS - 1:
            for page in pages:
                text = page.read_text(encoding="utf-8").partition("\n\nBuilt on day ")[0]
                page.write_text(f"{text}\n\nBuilt on day {day} at {hour} o'clock.\n", encoding="utf-8")
        elif day and hour == HOURS[1]:
            for page in self._random.sample(pages, 2):
                with page.open("a", encoding="utf-8") as file:
                    file.write(f"\n\nNote {day}\n======\n\nAdded on day {day}, after a question.\n")
        if (day, hour) == (8, HOURS[0]):
            pages[-1].unlink()

    def _deliver(self, now: datetime, count: int) -> None:
        """Sends new and repeated webhooks to two processes, as a load balancer might."""
        new = [f"order-{number}" for number in range(self._orders + 1, self._orders + count + 1)]
        self._orders += count
        for order in new:
            for hours, share in REDELIVERED:
                if self._random.random() < share:
                    self._deliveries.setdefault(now + timedelta(hours=hours), []).append(order)
        self._raced("webhooks", [*new, *self._deliveries.pop(now, [])], by=("hook-1", "hook-2"))

    def _new_tickets(self, day: int) -> list[dict[str, Any]]:
        self._tickets[day] = [
            {
                "id": f"T-{100 * day + number}",
                "from": f"customer{number}@example.org",
                "text": "The printer is on fire.",
                "team": "support",
                "takes_ms": self._random.choice((1, 2, 5, 20, 60)),
            }
            for number in range(14)
        ]
        return self._tickets[day]

    def _raced(self, what: str, work: Any, *, by: tuple[str, ...]) -> None:
        workers = [self._worker(name).begin(what, work) for name in by]
        for worker in workers:
            worker.end()

    def _worker(self, name: str) -> Worker:
        if name not in self._workers:
            self._workers[name] = Worker(name, self._home, self._clock)
        return self._workers[name]

    def _gone(self, name: str) -> None:
        self._workers.pop(name).wait_until_killed()

    def first_index(self) -> None:
        self._live = self._worker("builder-1").do("build")
        for alias in ("staging", "handbook"):
            self._worker("builder-1").do("swap", alias, self._live, "the first one")

    def next_index(self) -> None:
        self._live = self._worker("builder-1").do("build")
        self._worker("builder-1").do("swap", "staging", self._live, "nightly")

    def publish(self) -> None:
        self._worker("builder-1").do("swap", "handbook", self._live, "looked good on staging")

    def killed_while_building(self) -> None:
        """Another builder waits until the lease has expired, and takes over."""
        self._worker("builder-2").begin("build", kill="before_verify")
        self._gone("builder-2")
        self.next_index()

    def experiment(self) -> None:
        builder = self._worker("builder-1")
        for alias in ("staging", "handbook"):
            builder.do("swap", alias, builder.do("build", metric="l2"), "euclidean distance")

    def taken_back(self) -> None:
        for alias in ("handbook", "staging"):
            self._worker("builder-1").do("rollback", alias, "answers got worse")

    def killed_in_a_ticket(self) -> None:
        """Killed before its effect, another process executes it; killed after its commit, it is healed."""
        for number, point in enumerate(("in_effect", "after_commit")):
            urgent = {"id": f"T-urgent-{number}", "text": "The roof leaks.", "takes_ms": 30}
            self._worker("api-1").begin("tickets", [urgent], kill=point)
            self._gone("api-1")
            self._raced("tickets", [urgent], by=("api-2", "api-3"))

    def frozen_in_a_ticket(self) -> None:
        """Frozen until its lease has expired. When it continues, another process has run the effect."""
        slow = {"id": "T-slow", "text": "The lift is stuck.", "takes_ms": 20}
        frozen = self._worker("api-1").begin("tickets", [slow], freeze="in_effect")
        frozen.wait_until_frozen()
        self._worker("api-2").do("tickets", [slow])
        frozen.go_on()
        frozen.end()

    def another_payload(self) -> None:
        """Ids that are used again for another payload, and a price list that arrives after a newer one."""
        self._worker("loader-1").do("prices", [1, 3, 2])
        for request in self._tickets[2][:3]:
            other = request | {
                "text": "The printer is on fire again.",
                "from": "somebody@example.org",
                "team": "facility",
            }
            self._worker("api-2").do("tickets", [other])

    def replayed_late(self) -> None:
        """Repeats tickets after two days, although they are remembered for one."""
        self._worker("api-3").do("tickets", self._tickets[5 + 2][:9])

    def broken(self) -> None:
        for _ in range(4):
            self._worker("api-1").do("tickets", [{"id": "T-broken", "text": "No connection.", "broken": True}])

    def crawled_twice(self) -> None:
        """Two crawlers send all pages. One is killed after its commit and before its seal."""
        self._worker("crawler-1").begin("ingest", self._site, kill="after_commit")
        self._gone("crawler-1")
        self._worker("crawler-2").do("ingest", self._site)

    def crawled_again(self) -> None:
        self._raced("ingest", self._site, by=("crawler-1", "crawler-2"))

    def drained_at_noon(self) -> None:
        self._worker("keeper").do("drain")


def list_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


SPECIAL: dict[tuple[int, int], Callable[[History], None]] = {
    (0, 13): History.crawled_twice,
    (0, 17): History.first_index,
    (1, 13): History.killed_in_a_ticket,
    (2, 13): History.another_payload,
    (2, 17): History.next_index,
    (3, 9): History.publish,
    (3, 13): History.frozen_in_a_ticket,
    (4, 13): History.crawled_again,
    (4, 17): History.killed_while_building,
    (7, 9): History.publish,
    (7, 13): History.broken,
    (8, 13): History.experiment,
    (9, 9): History.taken_back,
    (9, 13): History.replayed_late,
    (10, 13): History.crawled_again,
    (10, 17): History.next_index,
    (11, 9): History.publish,
    (11, 13): History.drained_at_noon,
    (11, 17): History.next_index,
}
"""Additional events, by day and hour."""


if __name__ == "__main__":
    History(Path(sys.argv[1])).run()
