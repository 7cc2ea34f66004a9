"""The verdict: what callers were told, by their own files, against what the ledger and the fence store say.

A claim names its call, so the ledger's last word on the call must be what the caller was told. Operations of `once` and
documents are told apart by the life of the worker (its run_id), the source and the key: of each decision there must be
as many rows as answers. There may be more only of calls that nobody lived to be answered. A seal that came too late has
a row besides: its attempt must have been granted, and the answer is looked for among the others.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ragfence.audit.ledger import Ledger, RowQuery
from ragfence.core.decision_rows import Row
from ragfence.core.layout import FENCED_POSITION, RELEASE_POSITION, SEAL_POSITION
from ragfence.stores.objects import ObjectStore
from tests.audit.many.plan import CLAIM, MOVE
from tests.chaos.sites import Site
from tests.chaos.work import lines

AT_MOST = 20
"""problems of one kind that are told"""


class Answer(NamedTuple):
    run: str
    call: int
    how: str
    source: str
    body: int
    decision: str
    key: str
    outcome: Any
    """the same for all who were answered with a key; None where there is none"""


@dataclass(slots=True)
class Told:
    """All that the workers have written down."""

    answers: list[Answer] = field(default_factory=list)
    asked: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(run, source) -> calls that were begun"""
    answered: Counter[tuple[str, str]] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def open_calls(self, run: str, source: str) -> int:
        """Calls that were begun and never answered: by a kill, or by an error."""
        return self.asked[run, source] - self.answered[run, source]


@dataclass(slots=True)
class Verdict:
    answers: int = 0
    decisions: Counter[str] = field(default_factory=Counter)
    rows: int = 0
    keys: int = 0
    left_in_store: int = 0
    """rows that no drainer had taken when the last one died"""
    copies: int = 0
    """of rows that killed drainers left in two objects, before the last compaction; they count once"""
    unanswered: int = 0
    """rows of decisions whose caller was killed, or told of an error, before it had the answer"""
    drained: int = 0
    """rows that drainers lived to tell of"""
    late: int = 0
    """seals that were fenced out"""
    waited: int = 0
    kills: dict[str, int] = field(default_factory=dict)
    errors: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


class _Seen(NamedTuple):
    """A row, as far as it is compared."""

    run: str
    event: str
    kind: str
    source: str
    key: str
    decision: str
    position: int
    ts_ms: int
    token: bytes


def judge(site: Site, workers: Sequence[Path], drainers: Sequence[Path], *, kills: dict[str, int]) -> Verdict:
    told = gathered(workers)
    found = Verdict(len(told.answers), Counter(each.decision for each in told.answers), kills=kills)
    found.errors, found.problems = told.errors, told.problems
    for file in drainers:
        for line in lines(str(file)):
            found.drained += line.get("rows", 0)
            if "unexpected" in line:
                found.problems.append(f"{file.stem}: {line['unexpected']}")
    found.problems += _first(_unequal_outcomes(told.answers))
    with site.opened() as (fence, fences, objects):
        assert objects is not None
        found.left_in_store = sum(1 for _ in fences.rows())
        before = {row.row_id: row for row in fence.audit.rows()}
        found.rows, found.waited = len(before), sum(row.waited_ms > 0 for row in before.values())
        found.problems += _first(missing(told, before.values(), found))
        while fence.audit.drain().busy:  # the lock of the last drainer; it runs out at once
            pass
        found.problems += [f"{row.row_id} is still in the store" for row in fences.rows()]
        after = {row.row_id: row for row in fence.audit.rows()}
        found.problems += _first(f"{row_id} was lost by the last drain" for row_id in before.keys() - after.keys())
        found.problems += _first(f"{row_id} came with the last drain" for row_id in after.keys() - before.keys())
        found.problems += _first(f"{key} changed" for key in before.keys() & after.keys() if before[key] != after[key])
        found.copies = _doubled(site.tenant, objects, after, found.problems)
        shown = fence.audit.decisions().column("row_id").to_pylist()
        if len(shown) != len(after) or set(shown) != set(after):
            found.problems.append(f"{len(shown)} rows are shown, of {len(after)}")
        if (counted := sum(fence.audit.counts(by=("phase",)).column("count").to_pylist())) != len(after):
            found.problems.append(f"{counted} rows are counted, of {len(after)}")
        report = fence.audit.check()
        found.keys = report.keys
        if report.rows != len(after):
            found.problems.append(f"{report.rows} rows were audited, of {len(after)}")
        found.problems += _first(f"auditor: {each.invariant}: {each.text}" for each in report.findings)
    return found


def gathered(files: Iterable[Path]) -> Told:
    told = Told()
    for file in files:
        run, how, asked = file.stem, "", []
        for line in lines(str(file)):
            if "unexpected" in line:
                told.problems.append(f"{run}: {line['unexpected']}")
            elif "turn" in line:
                how, asked = line["how"], line["asked"]
                told.asked.update((run, source) for source, _ in asked)
            elif "error" in line:
                told.errors[line["error"]] += 1
            else:
                for source, body, decision, key, outcome, _ in line["answers"]:
                    told.answers.append(Answer(run, line["call"], how, source, body, decision, key, outcome))
                    told.answered[run, source] += 1
    return told


def _unequal_outcomes(answers: Iterable[Answer]) -> Iterator[str]:
    """Whoever got a receipt for a key got the same one."""
    outcomes: dict[str, Any] = {}
    for each in answers:
        if isinstance(each.outcome, list) and outcomes.setdefault(each.key, each.outcome) != each.outcome:
            yield f"{each.run} was told {each.outcome} for {each.source}, and others {outcomes[each.key]}"


def missing(told: Told, rows: Iterable[Row], found: Verdict) -> Iterator[str]:
    """What callers were told and no row tells; and rows of decisions that nobody can have missed."""
    by_event: dict[str, list[_Seen]] = defaultdict(list)
    by_place: Counter[tuple[str, str, str, str]] = Counter()
    granted: set[bytes] = set()
    late: list[_Seen] = []
    for each in map(_seen, rows):
        if each.position == FENCED_POSITION:
            late.append(each)
            continue
        if each.position == RELEASE_POSITION or (each.decision == "new" and each.position != SEAL_POSITION):
            if each.position != RELEASE_POSITION:
                granted.add(each.token)
            continue  # granted, or given back: what came of it is another row
        if each.event:
            by_event[each.event].append(each)
        else:
            by_place[each.run, each.source, each.key, each.decision] += 1
    found.late += len(late)
    yield from _without_a_last_word(told, by_event, found)
    yield from _uncounted(told, by_place, found)
    yield from (f"{each} was fenced out, and never granted" for each in late if each.token not in granted)


def _without_a_last_word(told: Told, by_event: dict[str, list[_Seen]], found: Verdict) -> Iterator[str]:
    """Claims: the last row of the call tells what the caller was told."""
    for each in told.answers:
        if each.how not in (CLAIM, MOVE):
            continue
        rows = by_event.pop(f"{each.run}/{each.call}", [])
        last = max(rows, key=lambda row: (row.ts_ms, row.position), default=None)
        if last is None:
            yield f"{each} has no row"
        elif (last.decision, last.source, last.key) != (each.decision, each.source, each.key or last.key):
            yield f"{each} has rows {rows}"
        elif sum(row.decision != "in_flight" for row in rows) > 1:
            yield f"{each} was decided twice: {rows}"
    for event, rows in by_event.items():
        run, source = rows[0].run, rows[0].source
        found.unanswered += 1
        if not told.open_calls(run, source):
            yield f"{event}, {rows}, was told to nobody, and nobody died of it"


def _uncounted(told: Told, by_place: Counter[tuple[str, str, str, str]], found: Verdict) -> Iterator[str]:
    """`once` and documents: as many rows as answers. A refusal by `once` does not say the key, so its source stands."""
    rows: Counter[tuple[str, str, str]] = Counter()
    for (run, source, _, decision), count in by_place.items():
        rows[run, source, decision] += count
    answers: Counter[tuple[str, str, str]] = Counter()
    keyed: Counter[tuple[str, str, str, str]] = Counter()
    for each in told.answers:
        if each.how not in (CLAIM, MOVE):
            answers[each.run, each.source, each.decision] += 1
            keyed[each.run, each.source, each.key, each.decision] += bool(each.key)
    for place, count in keyed.items():
        if by_place[place] < count:
            yield f"{place} was told {count} times, and has {by_place[place]} rows"
    for told_of, count in answers.items():
        if rows[told_of] < count:
            yield f"{told_of} was told {count} times, and has {rows[told_of]} rows"
    for (run, source, decision), count in rows.items():
        if decision == "in_flight":
            continue  # whoever waits leaves one each time it looks
        surplus = count - answers[run, source, decision]
        found.unanswered += max(surplus, 0)
        if surplus > told.open_calls(run, source):
            yield f"{run} has {surplus} rows of {decision} for {source} that were told to nobody, and nobody died of it"


def _doubled(tenant: str, objects: ObjectStore, known: dict[str, Row], problems: list[str]) -> int:
    """Objects hold a row once each; several hold it only until they are compacted, and then say the same of it."""
    ledger = Ledger(tenant, objects)
    times: Counter[str] = Counter()
    unequal = []
    for part in ledger.parts():
        table = ledger.read(part, RowQuery(), ["row_id", "idempotency_key", "decision"])
        assert table is not None
        ids = table.column("row_id").to_pylist()
        if len(set(ids)) != len(ids):
            problems.append(f"{part.name} holds a row twice")
        times.update(ids)
        keys = table.column("idempotency_key").to_pylist()
        unequal += [row_id for row_id, key in zip(ids, keys, strict=True) if known[row_id].key.hex() != key]
    problems += _first(f"{row_id} is not the same everywhere" for row_id in unequal)
    return times.total() - len(times)


def _seen(row: Row) -> _Seen:
    told = row.columns()
    return _Seen(
        told.get("run_id") or "",
        told.get("event_id") or "",
        told.get("kind") or "",
        told.get("source_id") or "",
        row.key.hex(),
        told["decision"],
        row.position,
        row.ts_ms,
        row.token,
    )


def _first(problems: Iterable[str]) -> list[str]:
    found = list(problems)
    return found[:AT_MOST] + ([f"... and {len(found) - AT_MOST} more of these"] if len(found) > AT_MOST else [])
