"""The verdict on an attack: from the traces of the chunker, the answers of the processes, and the objects themselves.

The log is read with pyarrow and nothing of ragfence, by what docs/formats.md says of it: what a bug of the reader hid
would not be seen by the reader.
"""

from __future__ import annotations

import io
import json
import signal
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow.parquet as pq

from ragfence.stores.objects import ObjectStore
from tests.chaos.crew import Worker
from tests.chaos.sites import Site
from tests.chaos.work import lines
from tests.documents.attack.corpus import Expected, Paragraphs, chunkings, text
from tests.documents.attack.crew import DocumentCrew


@dataclass(slots=True)
class Verdict:
    """What came of it; `problems` says in words what should not be."""

    documents: int = 0
    chunkings: Counter[tuple[str, str]] = field(default_factory=Counter)
    answers: int = 0
    receipts: set[tuple[str, str, tuple[str, ...]]] = field(default_factory=set)
    """all that was ever answered: doc_id, revision, snippet_ids"""
    committed: set[bytes] = field(default_factory=set)
    """keys with a row in the log that says where their snippets stand"""
    pending: list[str] = field(default_factory=list)
    """documents that somebody still has a lease on, or died with one"""
    decisions: Counter[str] = field(default_factory=Counter)
    flags: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    live: dict[str, str] = field(default_factory=dict)
    """doc_id -> the revision that is live"""
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Moved:
    """A row of the log."""

    fence: tuple[int, int]
    values: dict[str, Any]


def judge(
    site: Site,
    crew: DocumentCrew,
    expected: Expected,
    *,
    revisions: Collection[str] = ("v1",),
) -> Verdict:
    """`revisions`: those that may be live. If there is but one, the corpus must be the expected one."""
    found = Verdict(chunkings=chunkings(crew.trace))
    for worker in crew.workers:
        _answered(worker, expected, found)
    numbers = {name for name, _ in expected.ids}
    found.documents = len(numbers)
    with site.opened() as (fence, _, objects):
        assert objects is not None
        fence.documents.corpus_digest()  # into an epoch that is whole, before the log is read
        log = read_log(objects, site.tenant)
        texts = read_snippets(objects, site.tenant)
        for name in sorted(numbers):
            if name in log:
                _judge_document(name, log[name], texts, expected, revisions, found)
            else:
                found.problems.append(f"{name} is lost: the log has no row of it")
        documents = fence.documents.using(chunker=Paragraphs())
        found.pending = [name for name in sorted(numbers) if _leased(documents, name)]
        found.problems += [f"{name} is still pending" for name in found.pending]
        heads = Counter(each.doc_id for each in documents.heads())
        if heads != Counter(found.live.keys()):
            found.problems.append(f"the fence store has {heads.total()} live documents, the log {len(found.live)}")
        if len(revisions) == 1 and documents.corpus_digest() != expected.digest:
            found.problems.append("the corpus is not the one it would be if nothing had happened")
        for name in sorted(found.live)[:: max(len(found.live) // 5, 1)]:  # reading each would cost more than the attack
            _judge_reader(documents, name, found)
    return found


def _leased(documents: Any, name: str) -> bool:
    source = documents._reads.source(name)
    return source is not None and source.lease is not None


def _answered(worker: Worker, expected: Expected, found: Verdict) -> None:
    strike = worker.job.strike
    killed = strike is not None and strike.action == "kill" and worker.status == -signal.SIGKILL
    if worker.status != 0 and not killed:
        said = worker.path.with_suffix(".err").read_text(errors="replace")[-2000:]
        found.problems.append(f"{worker} ended with {worker.status} {said}")
    for line in lines(worker.job.answers):
        match line["event"]:
            case "error":
                found.errors[line["code"]] += 1
            case "unexpected":
                found.problems.append(f"{worker}: {line['error']}")
            case "answers":
                for answer in line["answers"]:
                    _judge_answer(worker, line["revision"], answer, expected, found)


def _judge_answer(worker: Worker, revision: str, answer: dict[str, Any], expected: Expected, found: Verdict) -> None:
    found.answers += 1
    found.decisions[answer["decision"]] += 1
    found.flags.update(name for name in answer["flags"] if name not in ("attempt", "waited_ms"))
    if answer["failure"]:
        found.errors[answer["failure"]["code"]] += 1
        return
    found.receipts.add((answer["doc"], revision, tuple(answer["ids"])))
    if answer["ids"] != expected.ids[answer["doc"], revision]:
        found.problems.append(f"{worker} was answered other ids for {answer['doc']} {revision}")


def _judge_document(
    name: str,
    rows: Sequence[Moved],
    texts: dict[bytes, dict[str, Any]],
    expected: Expected,
    revisions: Collection[str],
    found: Verdict,
) -> None:
    """The row with the highest fence is the head; it is whole if all of its snippets are there and in their place."""
    found.committed |= {row.values["key"] for row in rows if row.values["action"] == "ingest"}
    fences = [row.fence for row in rows]
    if len(set(fences)) < len(fences):
        found.problems.append(f"{name} has two rows with the same fence")
    head = max(rows, key=lambda row: row.fence).values
    if not head["live"]:
        found.problems.append(f"{name} is lost: its newest row says {head['action']}")
        return
    ids = [each.hex() for each in head["snippet_ids"]]
    is_of = [revision for revision in revisions if expected.ids.get((name, revision)) == ids]
    if len(is_of) != 1:
        found.problems.append(f"{name} is live with ids of no revision: {ids}")
        return
    found.live[name] = is_of[0]
    made = [row.values for row in rows if row.values["action"] == "ingest" and row.values["key"] == head["key"]]
    if not made:
        found.problems.append(f"{name} has no row that says where its snippets stand")
        return
    body = text(int(name.rpartition("-")[2]), is_of[0])
    for snippet_id, start, end in zip(made[0]["snippet_ids"], made[0]["starts"], made[0]["ends"], strict=True):
        stored = texts.get(snippet_id)
        if stored is None:
            found.problems.append(f"{name} has lost its snippet {snippet_id.hex()}")
        elif stored["text"] != body[start:end] or stored["doc_id"] != name:
            found.problems.append(f"{name}: {snippet_id.hex()} is {stored['text']!r}, not {body[start:end]!r}")


def _judge_reader(documents: Any, name: str, found: Verdict) -> None:
    body = text(int(name.rpartition("-")[2]), found.live[name])
    for snippet in documents.snippets(name):
        if snippet.text != body[snippet.start : snippet.end]:
            found.problems.append(f"{name} is read as {snippet}")
    described = documents.get(name)
    if described is None or described.metadata != {"number": int(name.rpartition("-")[2])}:
        found.problems.append(f"{name} is described as {described}")


def read_log(objects: ObjectStore, tenant: str) -> dict[str, list[Moved]]:
    """Every row that counts, by document."""
    complete = [entry.name for entry in objects.list(f"{tenant}/epochs/") if entry.name.endswith("/segments")]
    if not complete:
        return {}
    newest = complete[-1]
    listed = json.loads(objects.get(newest) or b"")["segments"]
    own = [entry.name for entry in objects.list(f"{tenant}/segments/{newest.split('/')[-2]}/")]
    log: dict[str, list[Moved]] = defaultdict(list)
    for name in dict.fromkeys([*listed, *own]):
        for values in _table(objects, name):
            log[values["doc_id"]].append(Moved((values["epoch"], values["counter"]), values))
    return log


def read_snippets(objects: ObjectStore, tenant: str) -> dict[bytes, dict[str, Any]]:
    """Every snippet that is stored. Written twice, by an owner and by who took over, it must be the same."""
    found: dict[bytes, dict[str, Any]] = {}
    for entry in objects.list(f"{tenant}/snippets/"):
        for values in _table(objects, entry.name):
            assert found.setdefault(values["snippet_id"], values) == values
    return found


def snippets_written(objects: ObjectStore, tenant: str = "default") -> int:
    """Rows in all snippets objects, whether they count or not."""
    names = [entry.name for entry in objects.list(f"{tenant}/snippets/")]
    return sum(pq.ParquetFile(io.BytesIO(objects.get(name) or b"")).metadata.num_rows for name in names)


def _table(objects: ObjectStore, name: str) -> Iterator[dict[str, Any]]:
    data = objects.get(name)
    assert data is not None, f"{name} is listed and cannot be read"
    yield from pq.read_table(io.BytesIO(data)).to_pylist()
