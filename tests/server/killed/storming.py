"""A load on a server that dies again and again, or whose Redis stands still; and the verdict on it."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ragfence.core.operations import encoded
from tests.chaos.crew import ROOT, environment, until
from tests.documents.attack.judge import Moved, read_log
from tests.server.killed.asking import MISMATCH
from tests.server.killed.judge import Verdict, sealed_moves
from tests.server.killed.load import Sent, sent
from tests.server.killed.loader import LoadJob
from tests.server.killed.places import Launched, Place

CLIENTS, CONNECTIONS = 2, 12
WITHIN_S = 3600.0


@dataclass(frozen=True, slots=True)
class Answered:
    sent: Sent
    status: int
    code: str
    body: str
    ids: tuple[str, ...]
    at: float


@dataclass(slots=True)
class Heard:
    """What all clients have written down."""

    answers: list[Answered] = field(default_factory=list)
    met: Counter[str] = field(default_factory=Counter)
    unavailable: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class Storm:
    """Client processes under way against one server."""

    def __init__(self, place: Place, *, seed: int, requests: int | None, honours: bool = False) -> None:
        """`requests`: None goes on until `finish`."""
        self.place, self.seed, self.requests = place, seed, requests
        self.server = Launched(place)
        self._honours = honours
        self._end = place.folder / "end-of-load"
        self._files = [place.folder / f"client-{number}.answers" for number in range(CLIENTS)]
        self._sizes = [0] * CLIENTS
        self._count = 0
        self.kills = 0
        self._clients: list[subprocess.Popen[bytes]] = []

    def begin(self) -> None:
        self.server.start()
        self.server.wait_listening()
        for number, file in enumerate(self._files):
            job = LoadJob(
                port=self.place.port,
                token=self.place.token,
                seed=self.seed,
                numbers=(number, self.requests, CLIENTS),
                connections=CONNECTIONS,
                answers=str(file),
                end=str(self._end),
                honours=self._honours,
            )
            path = file.with_suffix(".json")
            job.save(path)
            with file.with_suffix(".err").open("wb") as errors:
                argv = [sys.executable, "-m", "tests.server.killed.loader", str(path)]
                self._clients.append(
                    subprocess.Popen(argv, cwd=ROOT, env=environment(), stderr=errors, start_new_session=True)
                )

    def kill_server(self) -> None:
        self.server.kill()
        self.kills += 1
        self.server.start()

    def until_answered(self, enough: int) -> None:
        until(lambda: self.answered() >= enough or self.over, f"{enough} requests are answered", within_s=WITHIN_S)

    def some_more(self, count: int) -> None:
        self.until_answered(self.answered() + count)

    def answered(self) -> int:
        """So far. Asked again and again, so only what is new is read."""
        for number, file in enumerate(self._files):
            if file.exists():
                with file.open("rb") as lines:
                    lines.seek(self._sizes[number])
                    new = lines.read()
                self._sizes[number] += len(new)
                self._count += new.count(b"\n")
        return self._count

    @property
    def over(self) -> bool:
        if self.server.status not in (None, -signal.SIGKILL):
            raise AssertionError(f"the server ended with {self.server.status}: {self.server.said}")
        return all(client.poll() is not None for client in self._clients)

    def finish(self) -> None:
        self._end.touch()
        until(lambda: self.over, "all clients are done", within_s=WITHIN_S)

    def end(self) -> None:
        for client in self._clients:
            if client.poll() is None:
                client.kill()
            client.wait()
        self.server.end()

    def heard(self) -> Heard:
        found = Heard()
        for client, file in zip(self._clients, self._files, strict=True):
            if client.returncode != 0:
                said = file.with_suffix(".err").read_text(errors="replace")[-2000:]
                found.problems.append(f"a client ended with {client.returncode}: {said}")
            for line in file.read_text().splitlines():
                told: dict[str, Any] = json.loads(line)
                if "met" in told:
                    found.met.update(told["met"])
                    found.unavailable += told["unavailable"]
                    found.problems += told["problems"]
                else:
                    found.answers.append(
                        Answered(
                            sent(self.seed, told["number"]),
                            told["status"],
                            told["code"],
                            told["body"],
                            tuple(told["ids"]),
                            told["at"],
                        )
                    )
        return found


@contextlib.contextmanager
def storm(place: Place, **more: Any) -> Iterator[Storm]:
    made = Storm(place, **more)
    try:
        made.begin()
        yield made
    finally:
        made.end()


def killed_often(place: Place, *, seed: int, requests: int, kills: int) -> tuple[Verdict, float]:
    """The server is killed at moments spread over the load. With the verdict, how many seconds the load took."""
    dice = random.Random(f"ragfence/storm/{seed}")
    began = time.monotonic()
    with storm(place, seed=seed, requests=requests) as load:
        for enough in sorted(dice.sample(range(requests // 20, requests - requests // 20), kills)):
            load.until_answered(enough)
            load.kill_server()
        load.finish()
        took_s = time.monotonic() - began
    found = judged(load, requests)
    found.kills = load.kills
    return found, took_s


def redis_away(place: Place, *, seed: int, seconds: float) -> Verdict:
    """Redis stands still, then is killed and started again, for so long each, while clients go on."""
    redis = place.site.redis
    assert redis is not None
    began: list[float] = []

    def away(stop: Callable[[], None], start: Callable[[], None]) -> None:
        began.append(time.monotonic())
        stop()
        until(lambda: time.monotonic() >= began[-1] + seconds, "it was away for long enough", within_s=seconds + 60)
        start()

    with storm(place, seed=seed, requests=None, honours=True) as load:
        load.some_more(200)
        away(redis.freeze, redis.thaw)
        load.some_more(200)
        away(redis.kill, redis.start)
        load.some_more(200)
        load.finish()
    found = judged(load, None)
    unavailable = load.heard().unavailable
    frozen = sum(began[0] <= at < began[1] for at in unavailable)
    killed = sum(began[1] <= at for at in unavailable)
    found.met.update({"503 while it stood still": frozen, "503 while it was gone": killed})
    # Of one that stands still nobody knows that it does: requests wait for it, for `http.answer_within_s` at most.
    if not killed:
        found.problems.append(f"nobody was told 503 while Redis was gone, for {seconds:g} s")
    return found


def judged(load: Storm, requests: int | None) -> Verdict:
    heard = load.heard()
    found = Verdict(answers=len(heard.answers), met=heard.met, problems=heard.problems)
    found.requests = len({each.sent.number for each in heard.answers})
    if requests is not None and found.requests != requests:
        found.lost += requests - found.requests
        found.problems.append(f"{requests - found.requests} requests were never answered")
    applied = _judge_answers(heard.answers, found)
    place = load.place
    with place.opened() as (fence, objects):
        fence.documents.corpus_digest()
        log = read_log(objects, place.site.tenant)
        _judge_log(log, applied, sealed_moves(fence), found)
        found.commits = sum(1 for _ in objects.list(f"{encoded(place.site.tenant)}/sealed/http/"))
        keys = len({each.sent.key for each in heard.answers if each.status < 300})
        if found.commits != keys:
            found.problems.append(f"{found.commits} answers are kept, of {keys} keys")
        found.problems += [f"auditor: {each.invariant}: {each.text}" for each in fence.audit.check().findings]
        verified = fence.documents.verify()
        if not verified.ok:
            found.problems += [f"verify: {each.trouble}: {each.what}" for each in verified.findings][:20]
    return found


def _judge_answers(answers: Sequence[Answered], found: Verdict) -> set[str]:
    """Equal answers for equal requests; of each key one document. Returns the documents that must be there."""
    by_key: dict[str, dict[str, set[tuple[int, str]]]] = defaultdict(lambda: defaultdict(set))
    ids: dict[str, set[tuple[str, ...]]] = defaultdict(set)
    for each in answers:
        if each.status >= 300 and each.code != MISMATCH:
            found.problems.append(f"request {each.sent.number} got {each.status} {each.code}")
        by_key[each.sent.key][each.sent.name].add((each.status, each.body))
        if each.status < 300:
            ids[each.sent.name].add(each.ids)
    for key, documents in by_key.items():
        performed = [name for name, told in documents.items() if any(status < 300 for status, _ in told)]
        if len(performed) != 1 or any(len(told) > 1 for told in documents.values()):
            found.double += 1
            found.problems.append(f"{key} was answered with {dict(documents)}")
    for name, different in ids.items():
        if len(different) > 1 or () in different:
            found.problems.append(f"{name} has the snippet_ids {different}")
    return set(ids)


def _judge_log(
    log: dict[str, list[Moved]], applied: set[str], sealed: set[tuple[bytes, tuple[int, int]]], found: Verdict
) -> None:
    for name in applied - set(log):
        found.lost += 1
        found.problems.append(f"{name} was answered, and is not there")
    for name, rows in log.items():
        found.rows += len(rows)
        states = {json.loads(row.values["metadata"])["state"] for row in rows if row.values["live"]}
        moved = {(row.values["key"], row.fence) for row in rows} & sealed
        found.moves += 1
        if name not in applied or states != {name} or len(moved) > 1:
            found.double += 1
            found.problems.append(f"{name}: {len(rows)} rows, {len(moved)} sealed, states {states}, {name in applied=}")


def tell(found: Verdict, took_s: float) -> str:
    """One line of figures."""
    return (
        f"{found.requests:,} requests in {took_s:.0f} s ({found.requests / took_s:.0f}/s), {found.kills} kills: "
        f"{found.moves:,} documents, {found.rows - found.moves} rows written again, {found.commits:,} kept answers, "
        f"{found.double} double, {found.lost} lost; met {dict(found.met.most_common(8))}"
    )
