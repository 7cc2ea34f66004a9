"""Part 4: the ingest asset beside the bare call it wraps, on the same documents, interleaved."""

from __future__ import annotations

import gc
import importlib.metadata
import statistics
import time
from collections.abc import Sequence
from typing import Any

import dagster as dg
from rich.console import Console

import ragfence
from ragfence.dagster import FenceResource, _metadata, build_ingest_asset
from tests import servers
from tests.bench import machine
from tests.bench.docs import goals_lines
from tests.bench.documents_ours import OBJECTS, WholeText, document, ours
from tests.bench.goals import Goal, Measured, Verdict, judged
from tests.bench.machine import redis_server
from tests.bench.peers.corpus import corpus
from tests.bench.report import goals_table, summary
from tests.bench.rounds import Spread, ratios
from tests.bench.run import Say, as_told

DOCUMENTS, QUICK_DOCUMENTS = 10_000, 1_000
ROUNDS, QUICK_ROUNDS = 7, 3
QUIET = {"loggers": {"console": {"config": {"log_level": "ERROR"}}}}
FIRST, AGAIN = "first", "again"
ASSET, BARE, IDLE = "asset", "bare", "idle"
OPENING, STORED = "opening", "stored"
TOLD = {FIRST: "New", AGAIN: "Known"}

GOALS = (
    Goal(letter="a", what="ingest asset, new documents", beside="ingest_many", figure=FIRST, below=1.1),
    Goal(letter="a", what="ingest asset, known documents", beside="ingest_many", figure=AGAIN, below=1.1),
)

SECTION = """
## Dagster

{rounds} rounds of {documents:,} documents of 1,000 characters, on Redis and a **{objects}**; Dagster {version},
in process, on an ephemeral instance. The asset is materialized: opening the fence, a sync that records what it read,
the corpus digest, tables and chart are on its clock, and so is what Dagster does for any asset: {idle_ms:.0f} ms for
one with a check, a resource and as much metadata that does nothing. The bare call is `ingest_many` on a fence that is
open, and so is Dagster's instance: a process opens it once, an ephemeral one in {opening_ms:.0f} ms. Figures are the
asset's time over that of the call.

### Goals: {summary}

{goals}

### Other figures

{beside}
"""


def measure(*, quick: bool, rounds: int | None = None, say: Say = lambda _: None) -> dict[str, Any]:
    count, rounds = (QUICK_DOCUMENTS, rounds or QUICK_ROUNDS) if quick else (DOCUMENTS, rounds or ROUNDS)
    measured: dict[str, Any] = {"documents": count, "rounds": rounds, "objects": OBJECTS}
    measured["version"] = importlib.metadata.version("dagster")
    times: dict[str, dict[str, list[float]]] = {when: {ASSET: [], BARE: [], IDLE: []} for when in (FIRST, AGAIN)}
    dagster: dict[str, list[float]] = {OPENING: [], STORED: []}
    with dg.DagsterInstance.ephemeral() as instance, dg.instance_for_test() as stored:
        for number in range(-1, rounds):  # the first one warms up
            # A server for each: what the rounds before have left would be scanned, too, and the last be the slowest.
            with redis_server() as server:
                if number < 0:
                    measured["machine"] = machine.facts(server.url)
                taken = _round(server, instance, number, count)
            constant = {OPENING: _opening(), STORED: _idle(stored, FenceResource())}
            say(f"{count:,} documents, round {number + 1} of {rounds}")
            if number < 0:
                continue
            for when, pair in taken.items():
                for which, seconds in pair.items():
                    times[when][which].append(seconds)
            for which, seconds in constant.items():
                dagster[which].append(seconds)
    measured["seconds"] = times
    measured["idle_ms"] = 1000 * statistics.median(times[FIRST][IDLE] + times[AGAIN][IDLE])
    measured["opening_ms"] = 1000 * statistics.median(dagster[OPENING])
    measured["idle_stored_ms"] = 1000 * statistics.median(dagster[STORED])
    measured["goals"] = as_told(verdicts(measured))
    return measured


def _round(
    server: servers.RedisServer, instance: dg.DagsterInstance, number: int, count: int
) -> dict[str, dict[str, float]]:
    texts = [document(each) for each in corpus(f"dagster{number}", count)]
    taken: dict[str, dict[str, float]] = {FIRST: {}, AGAIN: {}}
    with ours(server.url, server.folder, tenant=f"bare{number + 1}") as bare:
        resource = FenceResource(store=server.url, objects=str(server.folder / "objects"), tenant=f"asset{number + 1}")
        _materialized(instance, resource, texts[:1])  # settings, hydration: as the other has them
        for when, new in ((FIRST, count), (AGAIN, 0)):
            # Whoever is first in a round is second in the next: neither always has the warmer caches.
            for which in (ASSET, IDLE, BARE) if number % 2 else (BARE, IDLE, ASSET):
                if which == BARE:
                    taken[when][BARE] = bare.seconds(texts, new=new)
                elif which == IDLE:
                    taken[when][IDLE] = _idle(instance, resource)
                else:
                    taken[when][ASSET] = _materialized(instance, resource, texts, new=new and count - 1)
    return taken


def _materialized(
    instance: dg.DagsterInstance, resource: FenceResource, texts: Sequence[ragfence.Document], new: int | None = None
) -> float:
    asset = build_ingest_asset(lambda: list(texts), using=lambda fence: fence.documents.using(chunker=WholeText()))
    gc.collect()
    started = time.perf_counter()
    result = dg.materialize([asset], resources={"fence": resource}, instance=instance, run_config=QUIET)
    taken = time.perf_counter() - started
    if new is not None:
        (event,) = result.get_asset_materialization_events()
        made = event.materialization.metadata["snippets_made"].value
        if made != new:
            raise RuntimeError(f"{made} snippets were made, not {new}")
    return taken


def _idle(instance: dg.DagsterInstance, resource: FenceResource) -> float:
    """Of an asset that Dagster has as much to do for, and that does nothing: it never opens its resource."""

    def idle(context):  # Dagster looks for its types, and here they are but names
        context.log.info("nothing")
        told = {"decisions": _metadata.decisions({"new": 1}), "chart": _metadata.chart("documents", {"new": 1})}
        counted = dict.fromkeys(("listed", "unread", "snippets_made", "snippets_saved", "characters_saved"), 1)
        return dg.MaterializeResult(
            data_version=dg.DataVersion("1"),
            metadata={**told, **counted, "corpus_digest": "1"},  # type: ignore[dict-item]
            check_results=[dg.AssetCheckResult(check_name="nothing", passed=True)],
        )

    gc.collect()
    started = time.perf_counter()
    check = dg.AssetCheckSpec("nothing", asset="idle")
    asset = dg.asset(name="idle", required_resource_keys={"fence"}, check_specs=[check])(idle)
    dg.materialize([asset], resources={"fence": resource}, instance=instance, run_config=QUIET)
    return time.perf_counter() - started


def _opening() -> float:
    gc.collect()
    started = time.perf_counter()
    with dg.DagsterInstance.ephemeral():
        return time.perf_counter() - started


def verdicts(measured: Measured) -> list[Verdict]:
    times = measured["seconds"]
    return judged(GOALS, {when: Spread.of(ratios(times[when][ASSET], times[when][BARE])) for when in (FIRST, AGAIN)})


def beside(measured: Measured) -> list[str]:
    """What is not judged: the asset without what Dagster takes for any asset, which no ingest can change."""
    lines = []
    for when, times in measured["seconds"].items():
        if IDLE not in times:  # a file of an older measurement
            continue
        own = [taken - idle for taken, idle in zip(times[ASSET], times[IDLE], strict=True)]
        spread = Spread.of(ratios(own, times[BARE]))
        lines.append(
            f"{TOLD[when]} documents: {statistics.median(times[ASSET]):.2f} s for the asset, "
            f"{statistics.median(times[IDLE]):.2f} s for an asset that does nothing, "
            f"{statistics.median(times[BARE]):.2f} s for the call. With that of the asset that does nothing subtracted "
            f"(not judged): {spread.middle:.2f}x ({spread.lowest:.2f} to {spread.highest:.2f})."
        )
    if "idle_stored_ms" in measured:
        lines.append(
            f"An asset that does nothing takes {measured['idle_stored_ms']:.0f} ms on an instance that keeps its "
            f"events in SQLite files, {measured['idle_ms']:.0f} ms on this one."
        )
    return lines


def _said(goal: Goal) -> tuple[str, str]:
    return goal.what, goal.beside


def show(console: Console, measured: Measured) -> None:
    found = verdicts(measured)
    console.print(goals_table(found, _said))
    for line in beside(measured):
        console.print(f"- {line}", markup=False, highlight=False)
    console.print(f"bench, Dagster: {summary(found)}", markup=False, highlight=False)


def section(measured: Measured) -> str:
    found = verdicts(measured)
    return SECTION.format(
        rounds=measured["rounds"],
        documents=measured["documents"],
        objects=measured["objects"],
        version=measured["version"],
        idle_ms=measured["idle_ms"],
        opening_ms=measured["opening_ms"],
        summary=summary(found),
        goals=goals_lines(found, _said),
        beside="\n".join(f"- {line}" for line in beside(measured)),
    )
