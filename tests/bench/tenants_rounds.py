"""One tenant's latency while another attacks, and while an unrelated process takes as much of the machine instead.

In every round the victim is paced three times, in another order each time: alone, attacked, and beside processes that
have nothing to do with the server and burn what the attack took of the cores: the attacker's process and what the
server (and the Valkey behind it) took more than for the victim alone. What an attack costs because the machine has just
so many cores is the same in both; the rest is for the server to prevent.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ragfence
from ragfence.client import Client
from tests import servers
from tests.bench import api_servers
from tests.bench.api_load import percentiles
from tests.bench.api_rates import SERVE_SQLITE, SERVE_VALKEY
from tests.bench.api_servers import Generator, Running
from tests.bench.machine import cpu_s
from tests.bench.peers.corpus import corpus
from tests.bench.rounds import WARM_UP, Subject, interleave
from tests.bench.run import Say
from tests.bench.tenants_hostile import BUILDS, FORMS, REFUSED_BODIES, SLOW_BODIES
from tests.bench.tenants_scale import TenantsScale

STORES = (SERVE_SQLITE, SERVE_VALKEY)
ALONE, ATTACKED, BESIDE = "alone", "attacked", "beside an unrelated process"
HOWS = (ALONE, ATTACKED, BESIDE)
KINDS = {"write": "write_ms", "read": "read_ms"}
MALLORY, ACME = "mallory", "acme"
WARM_UP_S = 2.0
QUIET = 0.05
"""of a core: the server has done with what an attack has left behind"""
QUIET_WITHIN_S = 90.0


def named(store: str, form: str, how: str) -> str:
    return f"{store}, {form}, {how}"


def share_to_burn(attacked: Sequence[float], alone: Sequence[float], cores: int) -> float:
    """Cores' worth of work that the attack brought with it: each is a list of shares by process."""
    return min(max(sum(attacked) - sum(alone), 0.0), float(cores))


def burnt_by(share: float, burners: int) -> list[float]:
    """The share of each burner: none can take more than one core."""
    busy = min(max(math.ceil(share), 1), burners)
    return [min(share / busy, 1.0)] * busy


class Asked(NamedTuple):
    """A server that is measured."""

    store: str
    server: Running
    pids: tuple[int, ...]
    """the server, and the Valkey behind it"""


class Clients(NamedTuple):
    victim: Generator
    hostile: Generator
    burners: tuple[Generator, ...]


class Cell:
    """One attack on one server. Gathers what `interleave` does not."""

    def __init__(self, asked: Asked, form: str, clients: Clients, scale: TenantsScale) -> None:
        self.found: dict[str, list[dict[str, Any]]] = {how: [] for how in HOWS}
        self._asked, self._form, self._clients, self._scale = asked, form, clients, scale
        self._shares: dict[str, list[float]] = {}
        self._most_s = scale.lead_s + scale.seconds + 90

    def subjects(self) -> list[Subject]:
        return [Subject(how, 1, lambda number, how=how: self._seconds(how, number)) for how in HOWS]

    def _seconds(self, how: str, number: int) -> float:
        seconds = min(WARM_UP_S, self._scale.seconds) if number == WARM_UP else self._scale.seconds
        span = {ALONE: self._nothing, ATTACKED: self._attack, BESIDE: self._burning}[how]
        answers: dict[str, Any] = {}
        began = time.perf_counter()
        with span(answers) as others:
            time.sleep(self._scale.lead_s)
            pids = (*self._asked.pids, *others)
            before, started = [cpu_s(pid) for pid in pids], time.perf_counter()
            told = self._victim(do="pace", seconds=seconds, per_s=self._scale.per_s)
            took = time.perf_counter() - started
            shares = [(cpu_s(pid) - was) / took for pid, was in zip(pids, before, strict=True)]
        self._shares[how] = shares
        self._until_quiet()
        checked = self._victim(do="check")
        if number != WARM_UP:
            self.found[how].append({**told, **checked, **answers, "cores": shares, "seconds": took})
        return time.perf_counter() - began

    def _victim(self, **asked: Any) -> dict[str, Any]:
        server = self._asked.server
        return self._clients.victim.run(port=server.port, token=server.tokens[ACME], name=ACME, **asked)

    @contextlib.contextmanager
    def _nothing(self, _: dict[str, Any]) -> Iterator[tuple[int, ...]]:
        yield ()

    @contextlib.contextmanager
    def _attack(self, answers: dict[str, Any]) -> Iterator[tuple[int, ...]]:
        scale, server, hostile = self._scale, self._asked.server, self._clients.hostile
        count, every_s = {
            SLOW_BODIES: (scale.slow_bodies, scale.byte_every_s),
            BUILDS: (scale.builds, scale.refused_s),
            REFUSED_BODIES: (scale.bodies, 0.0),
        }[self._form]
        told = hostile.run(
            form=self._form,
            port=server.port,
            token=server.tokens[MALLORY],
            count=count,
            every_s=every_s,
            most_s=self._most_s,
        )
        if told["underway"] != count:
            raise RuntimeError(f"{self._form}: {told['underway']} of {count} connections were under way")
        yield (hostile.pid,)
        answers |= hostile.run(stop=True)

    @contextlib.contextmanager
    def _burning(self, answers: dict[str, Any]) -> Iterator[tuple[int, ...]]:
        """What the latest attack took: of this round, or of the one before, if the attack is still to come."""
        share = share_to_burn(self._shares[ATTACKED], self._shares[ALONE], os.cpu_count() or 1)
        each = burnt_by(share, len(self._clients.burners))
        busy = self._clients.burners[: len(each)]
        for burner, own in zip(busy, each, strict=True):
            burner.run(share=own, most_s=self._most_s)
        yield tuple(burner.pid for burner in busy)
        for burner in busy:
            burner.run(stop=True)
        answers["asked_for"] = share

    def _until_quiet(self) -> None:
        """Nothing of an attack is on the clock of who comes next."""
        give_up_at, pids = time.monotonic() + QUIET_WITHIN_S, self._asked.pids
        while time.monotonic() < give_up_at:
            before = sum(map(cpu_s, pids))
            time.sleep(0.4)
            if sum(map(cpu_s, pids)) - before <= QUIET * 0.4:
                return
        raise RuntimeError(f"{self._asked.store} is still busy {QUIET_WITHIN_S:g} s after {self._form}")


def measure(folder: Path, valkey: servers.RedisServer, scale: TenantsScale, say: Say) -> dict[str, Any]:
    cells: dict[str, Any] = {}
    with _clients() as clients, _servers(folder, valkey) as every:
        for asked in every:
            say(f"{asked.store}: {scale.built:,} documents of the tenant that builds")
            _fill(asked.server, scale.built)
            for form in FORMS:
                cell = Cell(asked, form, clients, scale)
                interleave(
                    cell.subjects(), scale.rounds, lambda text, on=f"{asked.store}, {form}": say(f"{on}, {text}")
                )
                cells |= {named(asked.store, form, how): summed_up(found) for how, found in cell.found.items()}
    return {"cells": cells}


def summed_up(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What is kept of the rounds: percentiles of each, and of all of them together."""
    told: dict[str, Any] = {"answers": {}, "failed": {}}
    for kind, key in KINDS.items():
        each = [_percentiles(one[key]) for one in found]
        together = _percentiles([taken for one in found for taken in one[key]])
        told[kind] = {name: [one[name] for one in each] for name in together}
        told[f"{kind}, all rounds"] = together
    for one in found:
        for name in ("answers", "failed"):
            for status, count in one.get(name, {}).items():
                told[name][status] = told[name].get(status, 0) + count
    told["requests"] = sum(len(one[key]) for one in found for key in KINDS.values())
    told["stored"] = sum(one["stored"] for one in found)
    told["missing"] = sum(one["missing"] for one in found)
    told["cores"] = [[round(share, 3) for share in one["cores"]] for one in found]
    told["burn"] = statistics.median(one["asked_for"] for one in found) if "asked_for" in found[0] else None
    return told


def _percentiles(taken_ms: list[float]) -> dict[str, float]:
    found = percentiles([taken / 1000 for taken in taken_ms])
    return {"p50_ms": found["p50_ms"], "p99_ms": found["p99_ms"], "most_ms": max(taken_ms)}


@contextlib.contextmanager
def _clients() -> Iterator[Clients]:
    with contextlib.ExitStack() as stack:

        def start(module: str) -> Generator:
            return stack.enter_context(api_servers.generator(f"tests.bench.{module}"))

        burners = tuple(start("tenants_burner") for _ in range(os.cpu_count() or 1))
        yield Clients(start("tenants_victim"), start("tenants_hostile"), burners)


@contextlib.contextmanager
def _servers(folder: Path, valkey: servers.RedisServer) -> Iterator[list[Asked]]:
    tenants = (MALLORY, ACME)
    with contextlib.ExitStack() as stack:

        def serve(store: str, objects: Path) -> Running:
            return stack.enter_context(api_servers.ragfence_serve(store, objects, tenants=tenants))

        on_sqlite = serve(str(folder / "fence"), folder / "objects")
        on_valkey = serve(valkey.url, folder / "objects-valkey")
        yield [
            Asked(SERVE_SQLITE, on_sqlite, (on_sqlite.process.pid,)),
            Asked(SERVE_VALKEY, on_valkey, (on_valkey.process.pid, valkey.pid)),
        ]


def _fill(server: Running, count: int) -> None:
    """What the hostile tenant has to build from, embedded once before anything is measured."""
    with Client(f"http://127.0.0.1:{server.port}", api_key=server.tokens[MALLORY]) as client:
        receipts = client.ingest_many(ragfence.Document(each.doc_id, each.text) for each in corpus("built", count))
        if not all(receipt.is_new for receipt in receipts):
            raise RuntimeError("not every document was new")
        client.build()
