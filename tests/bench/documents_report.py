"""A measured run of part 2, on the terminal and as a section of `docs/benchmarks.md`."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping

from rich.console import Console
from rich.table import Table

from tests.bench.docs import goals_lines
from tests.bench.documents_goals import said_of, verdicts
from tests.bench.documents_rates import AGAIN, FIRST, RAGFENCE, WITH_SINK, named
from tests.bench.goals import Measured
from tests.bench.peers.process import DUPLICATES_ONLY, LANGCHAIN, UPSERTS
from tests.bench.report import goals_table, rates_table, summary
from tests.bench.rounds import Spread, ratios
from tests.bench.scale import note_on

CONTENDERS = (RAGFENCE, LANGCHAIN, UPSERTS, DUPLICATES_ONLY)

SECTION = """
## Documents

Measured as above, in {rounds} rounds: {documents:,} documents of 1,000 characters, ragfence on Redis with a
**{objects}** as its object store, the audit on, in batches of {batch:,}; compared with {peers}.
The machine's load average was {load_before} before the rounds and {load_after} at the end.{scale_note}

### Goals: {summary}

{goals}

### Documents per second

Medians of the rounds, to be read as ratios.

{rates}

### Two processes ingest the same {raced:,} documents at once

Counted outside ragfence and outside the peers, in {races}. ragfence has a sink here, which embeds and writes; its texts
chunked and its snippets in the object store are counted too (judged, with the rest). Rows left are those with different
ids, which no later run overwrites. No call of a peer returns the ids of a document that it skips.

{race}

### Other figures

{notes}

### What is compared

- **again, first**: `ingest_many` of documents that are all known, or all new to an empty store; one snippet each, made
  by a chunker that does nothing. Every answer is checked: decision, snippet_ids, texts chunked. The peers feed their
  vector store in the same call; ragfence does that with a sink, so new documents are judged without one and with one.
- **LangChain**: `index()` with `SQLRecordManager` on SQLite, batches of 1,000, SHA-256 keys, `cleanup="incremental"`,
  which drops the old version of a changed document, as the others do; without it, new documents may cost it less.
- **LlamaIndex**: `IngestionPipeline` with `RedisDocumentStore` on the same server, writes pipelined by 1,000 instead of
  one by one, no cache of transformations. In the race its `SentenceSplitter` comes first, as in its documentation.
- Both have an embedder and a vector store that do nothing but count, and run in an environment and processes of their
  own, with their own clocks. All documents are made before the clock starts, the same text, id and metadata for all.
- ragfence writes every new document's snippets and rows to the disk, synced, before it answers; LangChain commits to
  SQLite; LlamaIndex leaves the documents in the memory of the server.
- **a changed document**: `ingest`, one by one, in two stores that differ in how many documents they know. Ratio of the
  medians.
- **hydration**: `FLUSHALL`, then `fence.hydrate()`; afterwards all but the changed documents are sent again, and each
  is answered as a duplicate.
- **peak memory**: the highest resident memory of a fresh process that reads all of
  `ingest_many(generator, stream=True)`.
- **a document in Redis**: `MEMORY USAGE key SAMPLES 0` of a sample of all keys that {weighed:,} documents made.
- **S3 requests**: botocore's own events, against {s3}, in batches of the default size.
"""


def show(console: Console, measured: Measured) -> None:
    found, scale = verdicts(measured), measured["scale"]
    console.print(f"documents: Redis and a {measured['objects']}, audit on", markup=False, highlight=False)
    console.print(goals_table(found, lambda goal: said_of(goal, scale)))
    console.print(rates_table("documents per second", measured["rates"]))
    console.print(_race_table(measured))
    for line in notes(measured):
        console.print(line, markup=False, highlight=False)
    console.print(f"bench, documents: {summary(found)}", markup=False, highlight=False)


def section(measured: Measured) -> str:
    machine, scale, race = measured["machine"], measured["scale"], measured["race"]
    found = verdicts(measured)
    return SECTION.format(
        rounds=scale["rounds"],
        documents=scale["documents"],
        objects=measured["objects"],
        batch=scale["batch"],
        peers=_peers(measured["peers"]) or "no peer: none was measured",
        load_before=machine["load_before"][0],
        load_after=machine["load_after"][0],
        scale_note=note_on(scale["full"]),
        summary=summary(found),
        goals=goals_lines(found, lambda goal: said_of(goal, scale)),
        rates=_rates_lines(measured["rates"]),
        raced=race["documents"],
        races="one race" if race["races"] == 1 else f"each of {race['races']} races",
        race=_race_lines(measured),
        notes="\n".join(f"- {line}" for line in notes(measured)),
        weighed=scale["weighed"],
        s3=measured["requests"]["object_store"],
    )


def notes(measured: Measured) -> list[str]:
    """What is reported and not judged, in sentences."""
    stored, requests, memory = measured["bytes"], measured["requests"], measured["memory"]
    changed, rates = measured["growth"]["changed"], measured["rates"]
    sink = Spread.of(ratios(rates[named(FIRST, WITH_SINK)], rates[named(FIRST, RAGFENCE)]))
    return [
        f"New documents with a sink that counts and does nothing, for which a batch records what it owes: "
        f"{sink.middle:.2f}x ({sink.lowest:.2f} to {sink.highest:.2f}) of the rate without.",
        f"A document with {stored['snippets']} snippets has {stored['keys_per_document']:.3g} keys in Redis with "
        f"{stored['document_bytes']:.0f} bytes (judged); used_memory grew by {stored['server_bytes_per_document']:.0f} "
        f"bytes a document, its decision rows trimmed away.",
        f"Requests to {requests['object_store']} for {requests['documents']:,} new documents: "
        f"{_counts(requests['first'])}; for the same ones again: {_counts(requests['again'])}.",
        f"{memory['documents']:,} documents out of a generator took {memory['seconds']:.0f} s "
        f"({memory['documents'] / memory['seconds']:,.0f} a second); the process had "
        f"{memory['before_bytes'] / 1e6:.0f} MB before the first and {memory['peak_bytes'] / 1e6:.0f} MB at its peak.",
        "One by one: "
        + "; ".join(f"{what} {1_000 / statistics.median(each):.1f} ms" for what, each in changed.items())
        + ".",
    ]


def _counts(asked: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(asked.items())) or "none"


def _peers(versions: Mapping[str, Mapping[str, str]]) -> str:
    """Every package once: two workers may have the same."""
    packages = {name: version for found in versions.values() for name, version in found.items()}
    return ", ".join(f"{name} {version}" for name, version in packages.items())


def _rates_lines(rates: Mapping[str, list[float]]) -> str:
    lines = ["| | again | first |", "|---|---|---|"]
    for who in (RAGFENCE, WITH_SINK, *CONTENDERS[1:]):
        if named(FIRST, who) in rates:
            again, first = (
                f"{statistics.median(rates[named(run, who)]):,.0f}" if named(run, who) in rates else ""
                for run in (AGAIN, FIRST)
            )
            lines.append(f"| {who} | {again} | {first} |")
    return "\n".join(lines)


_RACE_COLUMNS = ("", "embedded", "rows written", "rows left")


def _race_rows(measured: Measured) -> Iterator[tuple[str, ...]]:
    for who in CONTENDERS:
        races = measured["race"].get(who)
        if races is not None:
            cells = (_range([each[name] for each in races]) for name in ("embeds", "rows", "left"))
            yield (who, *cells)


def _range(values: list[int]) -> str:
    lowest, highest = min(values), max(values)
    return f"{lowest:,}" if lowest == highest else f"{lowest:,} to {highest:,}"


def _race_table(measured: Measured) -> Table:
    race = measured["race"]
    table = Table(
        title=f"{race['processes']} processes, the same {race['documents']:,} documents", title_justify="left"
    )
    for name in _RACE_COLUMNS:
        table.add_column(name, justify="right" if name else "left")
    for row in _race_rows(measured):
        table.add_row(*row)
    return table


def _race_lines(measured: Measured) -> str:
    lines = [f"| {' | '.join(_RACE_COLUMNS)} |", "|---" * len(_RACE_COLUMNS) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in _race_rows(measured))])
