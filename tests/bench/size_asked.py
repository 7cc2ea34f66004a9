"""What a store is asked for as a whole, empty and with many documents: seconds, and seconds of a core.

    status          `ragfence status --json`, a process from its start to its end
    stats           `fence.stats()` in a process that has the store open
    /v1/stats       over HTTP: the first request of the tenant in a new server, and later ones
    /metrics        over HTTP: the first scrape of a new server, which waits for the figures, and later ones

Of a core is what the process took that was asked, and the Valkey behind it. Servers are new in every round.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ragfence
from tests.bench import api_servers
from tests.bench.documents_ours import WholeText, document
from tests.bench.machine import cpu_s, redis_server
from tests.bench.peers.corpus import corpus
from tests.bench.peers.process import ROOT
from tests.bench.rounds import WARM_UP, Subject, interleave
from tests.bench.run import Say
from tests.bench.size_scale import SizeScale

SQLITE, VALKEY = "SQLite", "Valkey"
STORES = (SQLITE, VALKEY)
EMPTY, LARGE = "empty", "large"
STATUS, STATS = "ragfence status", "fence.stats()"
FIRST_HTTP, HTTP = "/v1/stats, first of a server", "/v1/stats"
FIRST_METRICS, METRICS = "/metrics, first of a server", "/metrics"
QUESTIONS = (STATUS, STATS, FIRST_HTTP, HTTP, FIRST_METRICS, METRICS)
SECONDS, CPU = "seconds", "cpu_s"
TENANT = "default"
CHARACTERS = 200
FILL_BATCH = 5_000


def named(question: str, store: str, size: str) -> str:
    return f"{question}, {store}, {size}"


@dataclass(frozen=True, slots=True)
class Place:
    """A store, with what is found out about it."""

    store: str
    size: str
    documents: int
    url: str
    objects: Path
    valkey: int | None
    """the pid of the server, if there is one"""
    found: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.store}, {self.size}"

    def note(self, question: str, seconds: float, cpu: float) -> None:
        told = self.found.setdefault(question, {SECONDS: [], CPU: []})
        told[SECONDS].append(seconds)
        told[CPU].append(cpu)

    def cpu_behind(self) -> float:
        return cpu_s(self.valkey) if self.valkey else 0.0


def measure(scale: SizeScale, say: Say) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        places = [
            stack.enter_context(_filled(store, size, count, say))
            for store in STORES
            for size, count in ((EMPTY, 0), (LARGE, scale.documents))
        ]
        subjects = [Subject(place.name, 1, _asking(place, scale.calls)) for place in places]
        interleave(subjects, scale.rounds, lambda text: say(f"asked as a whole, {text}"))
        return {named(question, p.store, p.size): told for p in places for question, told in p.found.items()}


@contextlib.contextmanager
def _filled(store: str, size: str, count: int, say: Say) -> Iterator[Place]:
    with contextlib.ExitStack() as stack:
        if store == VALKEY:
            server = stack.enter_context(redis_server())
            folder, url, pid = server.folder, server.url, server.pid
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            url, pid = str(folder / "fence"), None
        if count:
            say(f"ingesting {count:,} documents on {store} and a folder")
        began = time.perf_counter()
        with ragfence.open(url, objects=folder / "objects", tenant=TENANT, journal=folder / "journal") as fence:
            documents = map(document, corpus("known", count, characters=CHARACTERS))
            whole = fence.documents.using(chunker=WholeText())
            receipts = whole.ingest_many(documents, batch=FILL_BATCH, stream=True)
            if sum(receipt.is_new for receipt in receipts) != count:
                raise RuntimeError("not every document was new")
        if count:
            say(f"that took {time.perf_counter() - began:,.0f} s")
        yield Place(store, size, count, url, folder / "objects", pid)


def _asking(place: Place, calls: int) -> Callable[[int], float]:
    def seconds(number: int) -> float:
        began = time.perf_counter()
        asked = [*_status(place), *_stats(place, calls), *_over_http(place, calls)]
        if number != WARM_UP:
            for question, seconds, cpu in asked:
                place.note(question, seconds, cpu)
        return time.perf_counter() - began

    return seconds


Asked = tuple[str, float, float]
"""a question, seconds, seconds of a core"""


def _status(place: Place) -> Iterator[Asked]:
    argv = [sys.executable, "-m", "ragfence", "status", "--json", "--store", place.url, "--objects", str(place.objects)]
    behind, began, used = place.cpu_behind(), time.perf_counter(), os.times()
    done = subprocess.run(argv, check=True, capture_output=True, text=True, cwd=ROOT)
    seconds, now = time.perf_counter() - began, os.times()
    cpu = now.children_user - used.children_user + now.children_system - used.children_system
    _check(place, json.loads(done.stdout)["documents"])
    yield STATUS, seconds, cpu + place.cpu_behind() - behind


def _stats(place: Place, calls: int) -> Iterator[Asked]:
    with ragfence.open(place.url, objects=place.objects, tenant=TENANT) as fence:
        _check(place, fence.stats().documents)  # connected
        behind, began, used = place.cpu_behind(), time.perf_counter(), time.process_time()
        for _ in range(calls):
            fence.stats()
        cpu = time.process_time() - used + place.cpu_behind() - behind
        yield STATS, (time.perf_counter() - began) / calls, cpu / calls


def _over_http(place: Place, calls: int) -> Iterator[Asked]:
    with api_servers.ragfence_serve(place.url, place.objects, tenants=(TENANT,)) as server:
        address, headers = server.port, {"Authorization": f"Bearer {server.token}"}
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", address, timeout=60)) as connection:

            def get(path: str) -> bytes:
                connection.request("GET", path, headers=headers)
                answer = connection.getresponse()
                body = answer.read()
                if answer.status != 200:
                    raise RuntimeError(f"{path}: {answer.status} {body[:500]!r}")
                return body

            def timed(path: str, times: int) -> tuple[float, float]:
                pid = server.process.pid
                used, began = cpu_s(pid) + place.cpu_behind(), time.perf_counter()
                for _ in range(times):
                    get(path)
                seconds = time.perf_counter() - began
                return seconds / times, (cpu_s(pid) + place.cpu_behind() - used) / times

            get("/healthz")
            yield FIRST_HTTP, *timed("/v1/stats", 1)
            yield HTTP, *timed("/v1/stats", calls)
            _check(place, json.loads(get("/v1/stats"))["documents"])
            yield FIRST_METRICS, *timed("/metrics", 1)
            yield METRICS, *timed("/metrics", calls)
            page = get("/metrics").decode()
            told = [line for line in page.splitlines() if line.startswith("ragfence_documents{")]
            _check(place, int(float(told[0].split()[-1])) if told else -1)


def _check(place: Place, documents: int) -> None:
    if documents != place.documents:
        raise RuntimeError(f"{place.name}: {documents:,} documents are told, {place.documents:,} are there")
