"""The verdict: what the clients were answered, against the log of the documents, the builds, the aliases, the auditor.

One effect per key: a document goes through the states that were asked for, in their order and each of them once. An
owner who dies between commit and seal leaves a row that his successor writes again, with the same outcome: rows of one
state in a row are one move, as whoever reads the document sees it.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

from ragfence.core.layout import FENCED_OUT, SEAL_POSITION
from ragfence.core.operations import encoded
from ragfence.stores.objects import ObjectStore
from tests.documents.attack.judge import Moved, read_log
from tests.server.killed.asking import MISMATCH, NDJSON, STALE, Ask, Notes, Reply
from tests.server.killed.places import Place
from tests.server.killed.sequences import ALIAS, Step

KEPT = frozenset({200, 201})


@dataclass(slots=True)
class Verdict:
    requests: int = 0
    """different ones"""
    answers: int = 0
    moves: int = 0
    """head moves of documents, as a reader sees them"""
    rows: int = 0
    """of the log; what is beyond the moves was written again by a successor"""
    commits: int = 0
    """answers that are kept in the object store"""
    kills: int = 0
    double: int = 0
    lost: int = 0
    met: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def __add__(self, other: Verdict) -> Verdict:
        summed = {name: getattr(self, name) + getattr(other, name) for name in self.__slots__}
        return Verdict(**summed)


def judge(place: Place, steps: Sequence[Step], notes: Notes) -> Verdict:
    found = Verdict(answers=len(notes.answers), met=notes.met, problems=list(notes.problems))
    outcomes = _outcomes(notes, found)
    found.requests = len(outcomes)
    _judge_keys(outcomes, found)
    _judge_ids(outcomes, found)
    with place.opened() as (fence, objects):
        fence.documents.corpus_digest()  # into an epoch that is whole, before the log is read
        log = read_log(objects, place.site.tenant)
        found.rows = sum(map(len, log.values()))
        _judge_moves(expected_moves(steps, outcomes), log, sealed_moves(fence), found)
        _judge_aliases(fence, steps, outcomes, found)
        _judge_commits(objects, place.site.tenant, outcomes, found)
        found.problems += [f"auditor: {each.invariant}: {each.text}" for each in fence.audit.check().findings]
        verified = fence.documents.verify()
        if not verified.ok:
            found.problems += [f"verify: {each.trouble}: {each.what}" for each in verified.findings]
    return found


Outcomes = Mapping[Ask, Reply]


def _outcomes(notes: Notes, found: Verdict) -> Outcomes:
    """What each request came to. All who sent it were answered alike, status and bytes."""
    heard: dict[Ask, set[tuple[int, bytes]]] = defaultdict(set)
    first: dict[Ask, Reply] = {}
    for ask, reply in notes.answers:
        first.setdefault(ask, reply)
        heard[ask].add((reply.status, _told(reply)))
        if reply.status not in KEPT and reply.code not in (MISMATCH, STALE):
            found.problems.append(f"{ask.method} {ask.path} {ask.key} got {reply.status} {reply.body[:300]!r}")
    for ask, different in heard.items():
        if len(different) > 1:
            found.double += 1
            found.problems.append(f"{ask.key} was answered in {len(different)} ways: {sorted(different)}"[:1500])
    return first


def _told(reply: Reply) -> bytes:
    # A refusal is made anew every time; what counts is what it refuses.
    return reply.body if reply.status in KEPT else reply.code.encode()


def _judge_keys(outcomes: Outcomes, found: Verdict) -> None:
    """One payload of every key was performed, and only the others are conflicts."""
    by_key: dict[tuple[str, str], list[Ask]] = defaultdict(list)
    for ask in outcomes:
        by_key[ask.method, ask.key].append(ask)
    for (_, key), asks in by_key.items():
        refused = [ask for ask in asks if outcomes[ask].code == MISMATCH]
        if len(asks) - len(refused) != 1:
            found.double += 1
            found.problems.append(f"{key}: of {len(asks)} payloads {len(refused)} were refused")


def _judge_ids(outcomes: Outcomes, found: Verdict) -> None:
    """Equal documents have equal snippet_ids, whoever asked and whenever."""
    ids: dict[tuple[str, str], set[tuple[str, ...]]] = defaultdict(set)
    for ask, reply in outcomes.items():
        if reply.status in KEPT and ask.body:
            for name, text, receipt in _receipts(ask, reply, found):
                ids[name, text].add(tuple(receipt["snippet_ids"]))
    for (name, _), different in ids.items():
        if len(different) > 1 or not next(iter(different)):
            found.problems.append(f"{name}: one text has the snippet_ids {different}")


def _receipts(ask: Ask, reply: Reply, found: Verdict) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    if ask.media_type == NDJSON:
        sent = [json.loads(line) for line in ask.body.splitlines()]
        *lines, last = [json.loads(line) for line in reply.body.splitlines()]
        if not last.get("done") or len(lines) != len(sent) or last["failed"] != sum("text" not in it for it in sent):
            found.problems.append(f"batch {ask.key} was answered with {last}, {len(lines)} lines")
        for document, line in zip(sent, lines, strict=True):
            if "receipt" in line:
                yield document["doc_id"], document["text"], line["receipt"]
    elif ask.path.startswith("/v1/documents"):
        document = json.loads(ask.body)
        name = document.get("doc_id") or ask.path.rpartition("/")[2]
        yield name, document["text"], json.loads(reply.body)


class Wanted(NamedTuple):
    """A state that a document shall come to. Not certain is only a numbered revision that was told to be stale: its
    server may have died after it was applied."""

    state: str | None
    certain: bool = True


class Happened(NamedTuple):
    """A row of the log. One that was not sealed may never have been seen by anybody: its owner died, and who came next
    did not know of it. Or it has been, since the fence store was rebuilt from the log."""

    state: str | None
    seen: bool = True


def expected_moves(steps: Sequence[Step], outcomes: Outcomes) -> dict[str, list[Wanted]]:
    """The states of every document, in their order."""
    moves: dict[str, list[Wanted]] = defaultdict(list)
    seen: set[Ask] = set()
    for step in steps:
        fresh = [ask for ask in step.asks if ask not in seen and ask in outcomes]
        seen.update(fresh)
        for ask in sorted(fresh, key=_sequence):
            if outcomes[ask].status in KEPT:
                for name, state in ask.wants:
                    moves[name].append(Wanted(state))
            elif outcomes[ask].code == STALE:
                for name, state in ask.wants:
                    moves[name].append(Wanted(state, certain=False))
    return moves


def sealed_moves(fence: Any) -> set[tuple[bytes, tuple[int, int]]]:
    """(key, fence) of every seal, by the decision rows."""
    rows = (row for row in fence.audit.rows() if row.position == SEAL_POSITION and not row.flags & FENCED_OUT)
    return {(row.key, tuple(row.fence)) for row in rows}


def _sequence(ask: Ask) -> int:
    if ask.media_type == NDJSON or not ask.body or b'"sequence"' not in ask.body:
        return 0
    return int(json.loads(ask.body)["sequence"])


def _judge_moves(
    expected: Mapping[str, Sequence[Wanted]],
    log: Mapping[str, Sequence[Moved]],
    sealed: Collection[tuple[bytes, tuple[int, int]]],
    found: Verdict,
) -> None:
    for name in sorted({*expected, *log}):
        if name.startswith("@"):
            continue
        rows = sorted(log.get(name, ()), key=lambda row: row.fence)
        if len({row.fence for row in rows}) < len(rows):
            found.problems.append(f"{name} has two rows with the same fence")
        happened = [Happened(_state(row), (row.values["key"], row.fence) in sealed) for row in rows]
        found.moves += sum(1 for _ in groupby(each.state for each in happened if each.seen))
        _compare(name, expected.get(name, ()), happened, found)


def _compare(name: str, expected: Sequence[Wanted], happened: Sequence[Happened], found: Verdict) -> None:
    wanted = [next(iter(each)) for _, each in groupby([Wanted(None), *expected])]
    if follows(wanted, happened):
        return
    missing = {each.state for each in wanted if each.certain} - {None, *(each.state for each in happened)}
    found.lost += len(missing)
    found.double += 0 if missing else 1
    found.problems.append(f"{name} went through {happened}, and should have through {wanted}")


def follows(wanted: Sequence[Wanted], happened: Sequence[Happened]) -> bool:
    """Whether what happened is what was wanted, each state once: all ways to read it are tried side by side."""
    at = {0}
    for row in happened:
        then = {place for place in at if wanted[place].state == row.state}
        for place in at:
            for next_place in range(place + 1, len(wanted)):
                if wanted[next_place].state == row.state:
                    then.add(next_place)
                if wanted[next_place].certain:
                    break
        at = then if row.seen else then | at
    return any(not any(each.certain for each in wanted[place + 1 :]) for place in at)


def _state(row: Moved) -> str | None:
    if not row.values["live"]:
        return None
    return str(json.loads(row.values["metadata"])["state"])


def _judge_aliases(fence: Any, steps: Sequence[Step], outcomes: Outcomes, found: Verdict) -> None:
    built = {json.loads(reply.body)["index_hash"] for ask, reply in outcomes.items() if ask.path == "/v1/builds"}
    if not built:
        return
    for index_hash in built:
        newest = fence.indexes.builds_log.newest(index_hash)
        if newest is None or (newest.kind, newest.number) != ("sealed", 1):
            found.double += 1
            found.problems.append(f"the build {index_hash} was sealed as {newest}")
    swaps = expected_moves(steps, outcomes).get(f"@{ALIAS}", [])
    history = [entry.target.index_hash for entry in reversed(fence.aliases.history(ALIAS))]
    _compare(f"alias {ALIAS}", swaps, [Happened(each) for each in history], found)


def _judge_commits(objects: ObjectStore, tenant: str, outcomes: Outcomes, found: Verdict) -> None:
    """As many answers are kept as there were keys with an outcome."""
    found.commits = sum(1 for _ in objects.list(f"{encoded(tenant)}/sealed/http/"))
    kept = len({(ask.method, ask.key) for ask, reply in outcomes.items() if reply.status in KEPT})
    if found.commits != kept:
        found.problems.append(f"{found.commits} answers are kept, of {kept} keys")
