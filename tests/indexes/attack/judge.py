"""The verdict on an attack on builds: what the processes were told, what was embedded, what the backend holds."""

from __future__ import annotations

import contextlib
import io
import signal
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import ragfence
from ragfence.core.receipts import Decision
from ragfence.indexes.backends.registry import BESIDE_ON_S3
from ragfence.indexes.build_log import SEALED, BuildSeal
from tests.chaos.crew import Worker
from tests.chaos.sites import Site
from tests.chaos.work import lines
from tests.indexes.attack.crew import IndexCrew
from tests.indexes.building import live_snippets, shown

ALIAS = "docs"


@dataclass(slots=True)
class Verdict:
    """`problems` says in words what should not be."""

    embeds: Counter[str] = field(default_factory=Counter)
    answers: int = 0
    hashes: set[str] = field(default_factory=set)
    """of which somebody was told that they are sealed"""
    receipts: set[tuple[str, str]] = field(default_factory=set)
    decisions: Counter[str] = field(default_factory=Counter)
    flags: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    searches: int = 0
    sealed: dict[str, BuildSeal] = field(default_factory=dict)
    """by INDEX_HASH, as the logs have them now"""
    problems: list[str] = field(default_factory=list)

    @property
    def twice(self) -> set[str]:
        """texts that were embedded more than once"""
        return {text for text, times in self.embeds.items() if times > 1}


@contextlib.contextmanager
def opened(site: Site, **policy: Any) -> Iterator[ragfence.Fence]:
    rules = {"lease": {"max_attempts": 1000}, **policy}
    objects, policies = site._objects(), ragfence.Policy.from_mapping(rules)
    with ragfence.open(site.store, objects=objects, tenant=site.tenant, policy=policies) as fence:
        yield fence


def judge(site: Site, crew: IndexCrew, *, purged: Sequence[str] = ()) -> Verdict:
    found = Verdict(embeds=crew.embeds())
    told: defaultdict[tuple[str, int], list[Any]] = defaultdict(list)
    searched: list[tuple[str, int, list[str]]] = []
    for worker in crew.workers:
        _ended_well(worker, found)
        for line in lines(worker.job.answers):
            match line["event"]:
                case "error":
                    found.errors[line["code"]] += 1
                case "unexpected":
                    found.problems.append(f"{worker}: {line['error']}")
                case "built":
                    told[line["hash"], line["number"]].append(line)
                case "searched":
                    found.searches += line["times"]
                    found.problems += [f"{worker}: {wrong}" for wrong in line["wrong"]]
                    searched += [(index_hash, generation, ids) for index_hash, generation, ids in line["seen"]]
    for answers in told.values():
        _equal(answers, found)
    with opened(site) as fence:
        for state in fence.indexes.builds():
            if (seal := state.entry.seal) is not None:
                found.sealed[state.index_hash] = seal
                _is_its_snapshot(fence, seal, state.entry.kind == SEALED, purged, found)
        for index_hash, number in told:
            entry = fence.indexes.builds_log.at(index_hash, number)
            if entry is None or entry.kind != SEALED:
                found.problems.append(f"{index_hash} is not sealed at {number}, and somebody was told so")
        _were_sealed(fence, searched, found)
        audited = fence.audit.check()
        found.problems += [f"the auditor: {finding}" for finding in audited.findings]
    return found


def swept(site: Site, found: Verdict, *, alias: str = ALIAS) -> None:
    """The newest corpus goes live, gc takes the rest: what is left is what an alias points at, and nothing else."""
    with opened(site) as fence:
        digest = fence.documents.corpus_digest()
        (live,) = [seal for seal in found.sealed.values() if seal.corpus_digest == digest]
        fence.aliases.swap(alias, live.index_hash)
    # Whoever began an attempt has long gone; only the clock of gc does not know.
    at_once = {"index": {"lease_ttl_s": 0.05, "max_runtime_s": 0.05}}
    with opened(site, kinds=at_once, indexes={"keep_targets": 1}) as fence:
        report = fence.indexes.gc(dry_run=False, min_age_s=0)
        found.problems += [f"gc: {failed}" for failed in (*report.failed, *report.unknown, *report.missing)]
        if (held := physicals(site)) != [live.physical]:
            found.problems.append(f"gc left {held}, and live is {live.physical}")
        if attempts := fence.indexes.builds_log.attempts():
            found.problems.append(f"gc left {attempts}")
        audited = fence.audit.check()
        found.problems += [f"the auditor, after gc: {finding}" for finding in audited.findings]


def physicals(site: Site) -> list[str]:
    """What there is anything of. SeaweedFS lists a folder when all that was in it is deleted."""
    with opened(site) as fence:
        names = fence.indexes.backend("lance").physicals()
    if site.s3 is None:
        return names
    client, bucket, root = site.s3.client(), site.s3.bucket, f"{site._prefix}/{BESIDE_ON_S3}"
    return [
        name for name in names if client.list_objects_v2(Bucket=bucket, Prefix=f"{root}/{name}.", MaxKeys=1)["KeyCount"]
    ]


def vector_objects(site: Site) -> dict[str, bytes]:
    """By name, as they lie there."""
    objects = site._objects()
    assert objects is not None
    names = [entry.name for entry in objects.list(f"{site.tenant}/vectors")]
    return {name: data for name in names if (data := objects.get(name)) is not None}


def snippets_with_vectors(site: Site) -> set[str]:
    tables = [pa.ipc.open_file(pa.py_buffer(data)).read_all() for data in vector_objects(site).values()]
    return {each.hex() for table in tables for each in table.column("snippet_id").to_pylist()}


def files_with(folder: Path, text: str) -> list[str]:
    """Whose bytes have the text, or whose rows: Parquet and Arrow are unpacked."""
    return [
        str(file.relative_to(folder))
        for file in sorted(folder.rglob("*"))
        if file.is_file() and any(text.encode() in part for part in _unpacked(file.read_bytes()))
    ]


def _unpacked(data: bytes) -> Iterator[bytes]:
    yield data
    if data.startswith(b"PAR1"):
        yield repr(pq.read_table(io.BytesIO(data)).to_pylist()).encode()


def _ended_well(worker: Worker, found: Verdict) -> None:
    strike = worker.job.strike
    killed = strike is not None and strike.action == "kill" and worker.status == -signal.SIGKILL
    if worker.status != 0 and not killed:
        said = worker.path.with_suffix(".err").read_text(errors="replace")[-2000:]
        found.problems.append(f"{worker} ended with {worker.status} {said}")


def _equal(answers: Sequence[dict[str, Any]], found: Verdict) -> None:
    """Whoever asks for the same inputs is told the same; one of them at most was told that it is new."""
    first = answers[0]
    for answer in answers:
        found.answers += 1
        found.hashes.add(answer["hash"])
        found.receipts.add((answer["receipt"]["key"], answer["receipt"]["effect_id"]))
        found.decisions[answer["decision"]] += 1
        found.flags.update(name for name in answer["flags"] if name not in ("attempt", "waited_ms"))
        for name in ("seal", "receipt"):
            if answer[name] != first[name]:
                found.problems.append(f"{answer['hash']}: told {answer[name]}, and somebody else {first[name]}")
        if answer["receipt"]["effect_id"] != answer["seal"]["physical"]:
            found.problems.append(f"{answer['hash']}: receipt and seal tell of different indexes")
    if sum(answer["decision"] == Decision.NEW for answer in answers) > 1:
        found.problems.append(f"{first['hash']} was new to several")


def _is_its_snapshot(
    fence: ragfence.Fence, seal: BuildSeal, whole: bool, purged: Sequence[str], found: Verdict
) -> None:
    """What the backend has of a sealed build is what was to be in it: the stored snapshot, not what is live now."""
    snapshot = fence.indexes._corpora.get(seal.corpus_digest)
    if snapshot is None:
        found.problems.append(f"{seal.index_hash}: there is no snapshot {seal.corpus_digest}")
        return
    tables = list(fence.indexes.backend(seal.backend).read(seal.physical))
    rows = [row for table in tables for row in table.to_pylist()]
    ids, wanted = Counter(row["snippet_id"] for row in rows), Counter(snapshot.text_ids().to_pylist())
    if (ids != wanted) if whole else (ids - wanted):
        found.problems.append(
            f"{seal.index_hash}: {(ids - wanted).total()} rows too many, {(wanted - ids).total()} lost"
        )
    if len(rows) != seal.rows:
        found.problems.append(f"{seal.index_hash}: {len(rows)} rows, and {seal.rows} are sealed")
    found.problems += [f"{seal.index_hash} has {row['doc_id']}" for row in rows if row["doc_id"] in purged]
    if seal.corpus_digest == fence.documents.corpus_digest():
        by_id = {row["snippet_id"]: row for row in rows}
        if shown(by_id) != live_snippets(fence):
            found.problems.append(f"{seal.index_hash} does not hold what is live")


def _were_sealed(fence: ragfence.Fence, searched: Sequence[tuple[str, int, list[str]]], found: Verdict) -> None:
    """Every hit is of a build that the alias pointed at, in that generation, and of a snippet of that build."""
    generations = {entry.number: entry for entry in fence.aliases.history(ALIAS, limit=100_000)} if searched else {}
    for index_hash, generation, ids in searched:
        entry = generations.get(generation)
        if entry is None or entry.target is None or entry.target.index_hash != index_hash:
            found.problems.append(f"hits of {index_hash} in generation {generation}, which has another build")
        if (seal := found.sealed.get(index_hash)) is None:
            found.problems.append(f"hits of {index_hash}, which is not sealed")
            continue
        snapshot = fence.indexes._corpora.get(seal.corpus_digest)
        assert snapshot is not None
        if strange := set(ids) - set(snapshot.text_ids().to_pylist()):
            found.problems.append(f"hits of {index_hash} that are not in it: {sorted(strange)[:3]}")
