"""The verdict on a scenario, from what lies outside: the workers' files, the objects, the records, the auditor."""

from __future__ import annotations

import contextlib
import json
import signal
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import ragfence
from ragfence.core.operations import Operation, encoded
from ragfence.engine.commits import Commit
from ragfence.engine.requests import Request
from ragfence.stores.fences import FenceStore
from ragfence.stores.objects import ObjectStore
from tests.chaos.crew import Crew, Overdue, Worker, until
from tests.chaos.sites import Site
from tests.chaos.work import Task, lines


@dataclass(slots=True)
class Evidence:
    """Counts over all tasks; `problems` says in words what should not be."""

    tasks: int = 0
    executions: int = 0
    commits: int = 0
    receipts: int = 0
    """distinct receipts, over all answers of all workers"""
    answers: int = 0
    pending: int = 0
    stale: int = 0
    """revisions that nobody got a receipt for, because a newer one of their source was first"""
    double: int = 0
    """keys with two different receipts, or two commits"""
    lost: int = 0
    """keys with a receipt that a later answer, or the store in the end, does not have; or with no answer at all"""
    lost_epochs: int = 0
    """keys of which the auditor knows that they were lost; a FLUSHALL takes the decision rows along"""
    redone: int = 0
    """executions of an effect beyond its first"""
    errors: Counter[str] = field(default_factory=Counter)
    """by code: what callers were told before they had an answer"""
    flags: Counter[str] = field(default_factory=Counter)
    """how the answers came about: taken over, healed, fenced out"""
    journal: Counter[str] = field(default_factory=Counter)
    """what became of effects that ran while the store was down: sealed, doubled; left is what was so in the end"""
    spans: list[tuple[float, float]] = field(default_factory=list, repr=False)
    """of every answer: when it was asked for, and when it came"""
    problems: list[str] = field(default_factory=list)

    @property
    def expected(self) -> int:
        return self.tasks - self.stale


@dataclass(frozen=True, slots=True)
class Answers:
    receipts: dict[str, list[dict[str, Any]]]
    """what was answered to each task, by all workers, each different receipt once"""
    count: Counter[str]
    stale: Counter[str]
    errors: Counter[str]
    flags: Counter[str]
    spans: list[tuple[float, float]]
    journal: Counter[str]
    doubled: set[str]
    """keys of which the journal says that somebody else had sealed them"""
    problems: list[str]


def gather(site: Site, crew: Crew, tasks: list[Task], *, may_lose: bool = False) -> Evidence:
    """Waits until nothing is pending, two leases at the most, then looks at everything."""
    found = Evidence(tasks=len(tasks))
    answers = _answers(crew)
    found.problems += answers.problems
    found.errors, found.flags, found.answers = answers.errors, answers.flags, sum(answers.count.values())
    found.spans, found.journal = answers.spans, answers.journal
    executions = _executions(crew, found)
    with site.opened() as (fence, fences, objects):
        commits = _commits(site, fences, objects, found)
        superseded = _superseded(tasks, answers, site, commits, may_lose=may_lose)
        found.stale = len(superseded)
        found.lost += sum(task.name in answers.receipts for task in superseded)
        wanted = [task for task in tasks if task not in superseded]
        with contextlib.suppress(Overdue):
            until(lambda: not _pending(site, fences, wanted), "all is sealed", within_s=2 * crew.lease_s)
        found.pending = len(left := _pending(site, fences, wanted))
        found.problems += [f"{name} is still pending" for name in left]
        for task in wanted:
            key = _key(site, task)
            excused = (may_lose and site.solo) or key in answers.doubled
            _judge(task, found, answers, executions, commits.get(key), may_lose=excused)
        found.problems += _wrong_heads(site, fences, tasks, commits)
        for finding in fence.audit.check().findings:
            if finding.invariant == "lost_epoch" and may_lose and site.solo:
                found.lost_epochs += 1
            else:
                found.problems.append(f"auditor: {finding.invariant}: {finding.text}")
    return found


def _judge(
    task: Task,
    found: Evidence,
    answers: Answers,
    executions: dict[str, list[dict[str, Any]]],
    commit: dict[str, Any] | None,
    *,
    may_lose: bool,
) -> None:
    receipts = answers.receipts.get(task.name, [])
    found.receipts += len(receipts)
    found.lost += not receipts or any(receipt["result"] != commit for receipt in receipts)
    if not receipts:
        found.problems.append(f"{task.name} was never answered")
    if len(receipts) > 1:
        found.double += 1
        if not may_lose:
            found.problems.append(f"{task.name} has {len(receipts)} different receipts, of {_executed(receipts)}")
    if commit is None:
        found.problems.append(f"{task.name} is not committed")
    else:
        found.commits += 1
        if commit not in [receipt["result"] for receipt in receipts]:
            found.problems.append(f"{task.name} is committed as {commit}, but answered with {_executed(receipts)}")
    done = {line["execution"] for line in executions.get(task.name, [])}
    for receipt in receipts:
        if receipt["result"]["execution"] not in done:
            found.problems.append(f"{task.name} was answered with an effect that nobody performed: {receipt}")


def _executed(receipts: list[dict[str, Any]]) -> str:
    return "the executions " + ", ".join(receipt["result"]["execution"] for receipt in receipts)


def _answers(crew: Crew) -> Answers:
    answers = Answers(defaultdict(list), Counter(), Counter(), Counter(), Counter(), [], Counter(), set(), [])
    for worker in crew.workers:
        answers.problems.extend(_bad_end(worker))
        left: list[str] = []
        for line in lines(worker.job.answers):
            task = line.pop("task")
            if "error" in line:
                answers.errors[line["error"]] += 1
            elif "reconciled" in line:
                left = line["reconciled"]["left"]
                answers.journal.update({name: len(line["reconciled"][name]) for name in ("sealed", "doubled")})
                answers.doubled.update(line["reconciled"]["doubled"])
            elif "stale" in line:
                answers.stale[task] += 1
                answers.spans.append((line["asked_s"], line["at_s"]))
            elif "unexpected" in line:
                answers.problems.append(f"{worker} at {task}: {line['unexpected']}")
            elif "gave_up" in line:
                answers.problems.append(f"{worker} ran out of patience at {task}")
            else:
                answers.count[task] += 1
                answers.flags.update(name for name in line["flags"] if name not in ("attempt", "waited_ms"))
                answers.spans.append((line["asked_s"], line["at_s"]))
                receipt = {name: line[name] for name in ("key", "effect_id", "result")}
                if receipt not in answers.receipts[task]:
                    answers.receipts[task].append(receipt)
        answers.journal["left"] += len(left)
        answers.problems.extend(f"{worker} has {key} still in its journal" for key in left)
    return answers


def _bad_end(worker: Worker) -> list[str]:
    killed = worker.job.strike is not None and worker.job.strike.action == "kill"
    if worker.status == 0 or (killed and worker.status == -signal.SIGKILL):
        return []
    said = worker.path.with_suffix(".err").read_text(errors="replace")[-2000:]
    return [f"{worker} ended with {worker.status} {said}"]


def _executions(crew: Crew, found: Evidence) -> dict[str, list[dict[str, Any]]]:
    """By task. An attempt executes at most once: no two executions have the same fence, or the same attempt."""
    by_task: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in lines(str(crew.effects)):
        by_task[line["task"]].append(line)
        found.executions += 1
    found.redone = found.executions - len(by_task)
    for task, done in by_task.items():
        fenced = [line for line in done if "journaled" not in line]
        fences = Counter(line["fence"] for line in fenced)
        attempts = Counter((line["fence"].split(".")[0], line["attempt"]) for line in fenced)
        if any(count > 1 for count in (*fences.values(), *attempts.values())):
            found.problems.append(f"{task} was executed more often than it was attempted: {done}")
    return by_task


def _commits(
    site: Site, fences: FenceStore, objects: ObjectStore | None, judged: Evidence
) -> dict[str, dict[str, Any]]:
    """The outcome of each key as it is stored for ever."""
    if objects is None:
        return {item.key.hex(): json.loads(item.record.result[1:]) for item in fences.scan() if item.record.ended}
    found: dict[str, dict[str, Any]] = {}
    for entry in objects.list(f"{encoded(site.tenant)}/sealed/"):
        if "@" not in entry.name:
            commit = Commit.decode(entry.name, objects.get(entry.name) or b"")
            if commit.key in found:
                judged.double += 1
                judged.problems.append(f"there are two commits of {commit.key}")
            found[commit.key] = json.loads(commit.result[1:])
    return found


def _pending(site: Site, fences: FenceStore, tasks: list[Task]) -> list[str]:
    """Tasks that have a record which is not ended; a revision in flight stands in the record of its source.

    A revision below the head is not pending, whatever its record says: every claim of it is answered `stale`.
    """
    open_keys = {item.key for item in fences.scan() if not item.record.ended}
    requests = {task: _request(site, task) for task in tasks}
    held = fences.read([request.lookup for request in requests.values()])
    left = []
    for (task, request), there in zip(requests.items(), held, strict=True):
        head, lease = (there.source.head, there.source.lease) if there.source else (None, None)
        if head is not None and (head.sequence or 0) > (task.sequence or 0):
            continue
        if request.key in open_keys or (lease is not None and lease.digest == request.key[1:]):
            left.append(task.name)
    return left


def _superseded(
    tasks: list[Task], answers: Answers, site: Site, commits: dict[str, dict[str, Any]], *, may_lose: bool
) -> set[Task]:
    """Of which everybody was told `stale`, and rightly: a higher revision of the source is committed.

    Where Redis alone lost what it had acknowledged, some may have got a receipt before.
    """
    committed = {task for task in tasks if task.sequence is not None and _key(site, task) in commits}
    tops: dict[str, int] = {}
    for task in committed:
        tops[task.source] = max(tops.get(task.source, 0), task.sequence or 0)

    def superseded(task: Task) -> bool:
        if task.sequence is None or not answers.stale[task.name]:
            return False
        if task.name in answers.receipts and not (may_lose and site.solo and task not in committed):
            return False
        return tops.get(task.source, 0) > task.sequence

    return {task for task in tasks if superseded(task)}


def _wrong_heads(site: Site, fences: FenceStore, tasks: list[Task], commits: dict[str, dict[str, Any]]) -> list[str]:
    """The head of a source is its highest committed revision."""
    tops: dict[str, Task] = {}
    for task in tasks:
        if task.sequence is not None and _key(site, task) in commits:
            tops[task.source] = max(tops.get(task.source, task), task, key=lambda task: task.sequence or 0)
    held = fences.read([_request(site, task).lookup for task in tops.values()])
    wrong = []
    for task, there in zip(tops.values(), held, strict=True):
        at = there.source.head.sequence if there.source and there.source.head else None
        if at != task.sequence:
            wrong.append(f"the head of {task.source} is {at}, but {task.sequence} is committed")
    return wrong


_RULES = ragfence.Policy().for_kind("")


def _request(site: Site, task: Task) -> Request:
    operation = Operation(kind=task.kind, source_id=task.source, sequence=task.sequence, tenant=site.tenant)
    return Request.of(operation, b"", _RULES)


def _key(site: Site, task: Task) -> str:
    return _request(site, task).key_text
