"""Six things that happen to requests with an Idempotency-Key, to the same route behind two middlewares.

Counted outside of both: what the client was answered, and how many payments there are in a file that only the handler
writes. The client sends the same request again as long as it is told to wait, to come back or that something went
wrong, until its patience ends: 202, 409, 5xx, or no answer at all.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ragfence
from tests import servers
from tests.bench import api_servers
from tests.bench.api_rates import MIDDLEWARE_SQLITE, MIDDLEWARE_VALKEY, PEER_MEMORY, PEER_REDIS
from tests.bench.api_route import policy_for
from tests.bench.api_scale import ApiScale
from tests.bench.api_servers import Running
from tests.bench.peers.asgi_route import CRASH, EXCEPTION, LATE_CRASH, MEMORY, SLOW, begun, payments
from tests.bench.run import Say
from tests.servers import free_ports, wait_until

OTHER_PAYLOAD, HANDLER_EXCEPTION, EXPIRED = "other payload", "handler exception", "expired TTL"
CRASHED, CRASHED_LATE = "crash in the handler, before its effect", "crash in the handler, after its effect"
CRASHED_RECOVERED = "the same, the effect behind `fence.once(recover=)`"
TWINS, LOST_REPLY = "concurrent twins", "lost reply"

LEASE_S = 1.0
KEPT_S = 1
"""where the TTL is to expire"""
PAUSE_S = 0.25
AMOUNT = 12
_keys = (f"key-{number}" for number in itertools.count())


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    """0: none"""
    body: str = ""
    replayed: bool = False
    retry_after_s: float = 0.0

    @property
    def is_final(self) -> bool:
        return bool(self.status) and self.status not in (202, 409) and self.status < 500


@dataclass(frozen=True, slots=True)
class Told:
    """What happened: answers in their order, payments made."""

    replies: tuple[str, ...]
    effects: int
    note: str = ""


class Site:
    """One middleware on one store: a server that can be killed and started again on its port."""

    def __init__(
        self,
        folder: Path,
        start: Callable[[int, int], contextlib.AbstractContextManager[Running]],
        scale: ApiScale,
        *,
        forget: Callable[[], None] | None = None,
    ) -> None:
        """`start`: with a port and how long answers are kept. `forget`: what an operator does with what has expired."""
        self.folder, self.forget, self.scale = folder, forget, scale
        self._start = start
        self._port = free_ports(1)[0]
        self._open = contextlib.ExitStack()

    @contextlib.contextmanager
    def running(self, kept_s: int = api_servers.KEPT_S) -> Iterator[Site]:
        with self._open:
            self._server = self._open.enter_context(self._start(self._port, kept_s))
            self._kept_s = kept_s
            self._until_it_answers()
            yield self

    def wait_killed(self) -> None:
        """The server has killed itself."""
        self._server.process.wait(timeout=30)

    def restart(self) -> None:
        self._open.close()
        self._server = self._open.enter_context(self._start(self._port, self._kept_s))
        self._until_it_answers()

    def ask(self, key: str, amount: int = AMOUNT, trouble: str = "", path: str = "/payments") -> Reply:
        connection = self._connected()
        with contextlib.closing(connection):
            try:
                self._send(connection, key, amount, trouble, path)
                answer = connection.getresponse()
                body = answer.read().decode()
            except (ConnectionError, http.client.HTTPException):
                return Reply(0)
            again = answer.headers.get("idempotency-status") == "replayed" or "idempotent-replayed" in answer.headers
            return Reply(answer.status, body, again, float(answer.headers.get("retry-after", 0)))

    def leave(self, key: str, trouble: str) -> None:
        """Hangs up while the handler is at work."""
        connection = self._connected()
        self._send(connection, key, AMOUNT, trouble, "/payments")
        wait_until(begun(self.folder, key).exists, "the handler has begun")
        connection.close()

    def until_final(self, key: str, path: str = "/payments") -> list[Reply]:
        """Everything the client is answered, the last of which ends it, or its patience has ended."""
        ends_at, replies = time.monotonic() + self.scale.patience_s, [self.ask(key, path=path)]
        while not replies[-1].is_final and time.monotonic() < ends_at:
            time.sleep(replies[-1].retry_after_s or PAUSE_S)
            replies.append(self.ask(key, path=path))
        return replies

    def effects(self, key: str) -> int:
        return len(payments(self.folder, key))

    def _connected(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)

    def _until_it_answers(self) -> None:
        def answers() -> bool:
            with contextlib.closing(self._connected()) as connection:
                connection.request("GET", "/counted")
                return connection.getresponse().status == 200

        wait_until(answers, "the server answers")

    @staticmethod
    def _send(connection: http.client.HTTPConnection, key: str, amount: int, trouble: str, path: str) -> None:
        headers = {"Idempotency-Key": key, "Content-Type": "application/json", "X-Trouble": trouble}
        connection.request("POST", path, json.dumps({"amount": amount}), headers)


def other_payload(site: Site) -> Told:
    key = next(_keys)
    replies = [site.ask(key), site.ask(key, amount=2 * AMOUNT)]
    claimed = replies[1].status < 300
    return _told(site, key, replies, "the answer names the other amount" if claimed else "")


def handler_exception(site: Site) -> Told:
    key = next(_keys)
    return _told(site, key, [site.ask(key, trouble=EXCEPTION), *site.until_final(key)])


def expired(site: Site) -> Told:
    """Sent again after its TTL. Where an object outlives that: once more, after both are cleared away."""
    key = next(_keys)
    replies = [site.ask(key)]
    time.sleep(2 * KEPT_S)
    replies += site.until_final(key)
    if site.forget is None:
        return _told(site, key, replies)
    time.sleep(2 * KEPT_S)  # the answer was remembered anew
    site.forget()
    return _told(site, key, [*replies, site.ask(key)], "the last one after purge-expired")


def crashed(site: Site) -> Told:
    return _after_a_crash(site, CRASH)


def crashed_late(site: Site) -> Told:
    return _after_a_crash(site, LATE_CRASH)


def crashed_recovered(site: Site) -> Told:
    return _after_a_crash(site, LATE_CRASH, "/recovered-payments")


def twins(site: Site) -> Told:
    """At the same moment; then each of those who were not served asks again."""
    key, gate = next(_keys), threading.Barrier(site.scale.twins)

    def twin(_: int) -> Reply:
        gate.wait()
        return site.ask(key, trouble=SLOW)

    with ThreadPoolExecutor(site.scale.twins) as pool:
        replies = list(pool.map(twin, range(site.scale.twins)))
    replies.sort(key=lambda reply: reply.status)
    return _told(site, key, [*replies, *site.until_final(key)])


def lost_reply(site: Site) -> Told:
    key = next(_keys)
    site.leave(key, SLOW)
    return _told(site, key, [Reply(0), *site.until_final(key)])


SCENARIOS: dict[str, Callable[[Site], Told]] = {
    OTHER_PAYLOAD: other_payload,
    HANDLER_EXCEPTION: handler_exception,
    EXPIRED: expired,
    CRASHED: crashed,
    CRASHED_LATE: crashed_late,
    CRASHED_RECOVERED: crashed_recovered,
    TWINS: twins,
    LOST_REPLY: lost_reply,
}


def measure(
    folder: Path, valkey: servers.RedisServer, python: Path | None, scale: ApiScale, say: Say
) -> dict[str, Any]:
    """By scenario and subject."""
    found: dict[str, dict[str, Any]] = {name: {} for name in SCENARIOS}
    for subject, site in _sites(folder, valkey.url, python, scale).items():
        say(f"six scenarios, {subject}")
        for kept_s, names in (
            (api_servers.KEPT_S, [name for name in SCENARIOS if name != EXPIRED]),
            (KEPT_S, [EXPIRED]),
        ):
            with site.running(kept_s):
                for name in names:
                    if name != CRASHED_RECOVERED or subject in (MIDDLEWARE_SQLITE, MIDDLEWARE_VALKEY):
                        found[name][subject] = asdict(SCENARIOS[name](site))
    return found


def _sites(folder: Path, url: str, python: Path | None, scale: ApiScale) -> dict[str, Site]:
    embedded = folder / "scenario-fence"

    def clear_away() -> None:
        with ragfence.open(embedded, policy=policy_for(KEPT_S, LEASE_S), journal=folder / "journal") as fence:
            fence.purge_expired()

    def ours(name: str, store: str, forget: Callable[[], None] | None = None) -> Site:
        effects = _made(folder / name)
        return Site(
            effects,
            lambda port, kept_s: api_servers.fenced(effects, store, port=port, kept_s=kept_s, lease_s=LEASE_S),
            scale,
            forget=forget,
        )

    def theirs(name: str, where: str, python: Path) -> Site:
        effects = _made(folder / name)
        return Site(
            effects, lambda port, kept_s: api_servers.peer(python, effects, where, port=port, kept_s=kept_s), scale
        )

    sites = {
        MIDDLEWARE_SQLITE: ours("scenarios-sqlite", str(embedded), clear_away),
        MIDDLEWARE_VALKEY: ours("scenarios-valkey", url),
    }
    if python is not None:
        sites |= {
            PEER_MEMORY: theirs("scenarios-memory", MEMORY, python),
            PEER_REDIS: theirs("scenarios-redis", url, python),
        }
    return sites


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _after_a_crash(site: Site, trouble: str, path: str = "/payments") -> Told:
    key = next(_keys)
    replies = [site.ask(key, trouble=trouble, path=path)]
    site.wait_killed()
    site.restart()
    return _told(site, key, [*replies, *site.until_final(key, path)])


def _told(site: Site, key: str, replies: list[Reply], note: str = "") -> Told:
    """Equal answers in a row are counted."""
    words = [_word(reply) for reply in replies]
    told = tuple(
        word if (count := len(list(same))) == 1 else f"{count} x {word}" for word, same in itertools.groupby(words)
    )
    return Told(told, site.effects(key), note)


def _word(reply: Reply) -> str:
    if not reply.status:
        return "no answer"
    return f"{reply.status} replayed" if reply.replayed else str(reply.status)
