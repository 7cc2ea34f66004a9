"""The auditor: replays decision rows and proves the promises, or names the rows that break them.

one_seal         at most one sealed `new` per key and life; a life ends by its expiry or by an `ended` row
equal_receipts   everybody answered with a key's outcome got the same effect of the same attempt; for documents, whose
                 heads move to one key again and again, the same effect
fences_ascend    of two leases of a source, the later has the higher fence number
lost_epoch       the store forgot a life: `new` again in a later epoch, without an object store behind it

What the log of the aliases has to prove (every target was sealed before the swap) is in `indexes.alias_checks`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field

from ragfence.core.decisions import NOBODY
from ragfence.core.operations import Fence
from ragfence.core.rows import RELEASE_POSITION, SEAL_POSITION, Row, RowKind
from ragfence.engine.requests import DOCUMENT_ACTIONS


@dataclass(frozen=True, slots=True)
class Finding:
    invariant: str
    key: str
    text: str
    rows: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Report:
    rows: int
    keys: int
    findings: tuple[Finding, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.findings

    def __str__(self) -> str:
        if self.ok:
            return f"{self.rows} rows over {self.keys} keys: every promise kept"
        lines = [f"{len(self.findings)} findings in {self.rows} rows over {self.keys} keys"]
        lines += [f"  {found.invariant} {found.key[:18]}...: {found.text}" for found in self.findings]
        return "\n".join(lines)


@dataclass(slots=True)
class _Life:
    seal: Row | None = None
    answers: dict[tuple[str, bytes], Row] = field(default_factory=dict)
    ended: bytes | None = None
    """whose outcome an `ended` row took back; it is removed after that row, so it may be told until a new one is"""

    def goes_on_with(self, row: Row) -> bool:
        return self.ended is None or self.ended == row.winner


def check(rows: Iterable[Row]) -> Report:
    """Rows in any order, doubled or not; what counts is their content."""
    unique = {row.row_id: row for row in rows}
    ordered = sorted(unique.values(), key=lambda row: (row.ts_ms, row.fence, row.position))
    findings: list[Finding] = []
    by_key: dict[bytes, list[Row]] = {}
    for row in ordered:
        by_key.setdefault(row.key, []).append(row)
    for key, members in by_key.items():
        findings += _check_key(key, members)
    findings += _check_fences(ordered)
    return Report(len(unique), len(by_key), tuple(findings))


def _check_key(key: bytes, rows: list[Row]) -> Iterable[Finding]:
    life = _Life()
    document = _document_action(rows)
    if document in ("retract", "purge"):
        return  # a document may be taken away as often as it comes
    for row in rows:
        if row.kind is RowKind.ENDED:
            life.ended = row.winner
            continue
        if (_is_seal(row) or _is_answer(row)) and not life.goes_on_with(row):
            life = _Life()
        if _is_seal(row):
            if life.seal is not None and _expired(life.seal, row.ts_ms):
                life = _Life(ended=life.ended)
            if life.seal is not None and life.seal.winner != row.winner:
                lost = life.seal.fence.epoch < row.fence.epoch
                yield Finding(
                    "lost_epoch" if lost else "one_seal",
                    key.hex(),
                    f"sealed twice, by {life.seal.winner.hex()[:8]} and by {row.winner.hex()[:8]}"
                    + (": the fence store forgot the first" if lost else ""),
                    (life.seal.row_id, row.row_id),
                )
            life.seal = life.seal or row
        if _is_answer(row):
            if life.seal is not None and _expired(life.seal, row.ts_ms):
                life = _Life(ended=life.ended)
            # The head of a document moves to one key again and again, by other attempts: its receipt is the key's.
            answer = (row.effect_id, NOBODY if document else row.winner)
            if life.answers and answer not in life.answers:
                other = next(iter(life.answers.values()))
                yield Finding(
                    "equal_receipts",
                    key.hex(),
                    f"answered with {row.effect_id or 'the effect'} of {row.winner.hex()[:8]} and with "
                    f"{other.effect_id or 'the effect'} of {other.winner.hex()[:8]}",
                    (other.row_id, row.row_id),
                )
            life.answers.setdefault(answer, row)


def _check_fences(rows: list[Row]) -> Iterable[Finding]:
    """Grants of one source, in the order in which they were given, must ascend; no number is given twice."""
    last: dict[tuple[str, ...], Row] = {}
    given: dict[tuple[int, Fence], Row] = {}
    for row in rows:
        if row.kind is not RowKind.NEW or row.position in (SEAL_POSITION, RELEASE_POSITION) or not row.fence.epoch:
            continue
        spot = (row.key[0], row.fence)
        if spot in given and given[spot].token != row.token:
            text = f"the fence {row.fence} was given twice"
            yield Finding("fences_ascend", row.key.hex(), text, (given[spot].row_id, row.row_id))
        given[spot] = row
        source = _source_of(row)
        before = last.get(source)
        if before is not None and before.token != row.token and before.fence >= row.fence:
            text = f"the fence {before.fence} was followed by {row.fence}"
            yield Finding("fences_ascend", row.key.hex(), text, (before.row_id, row.row_id))
        last[source] = row


def _source_of(row: Row) -> tuple[str, ...]:
    """The source of a row; its key, where the row was written without a context."""
    values = json.loads(row.context or b"{}")
    if "source_id" not in values:
        return (row.key.hex(),)
    return f"{row.key[0]:02x}", values.get("kind", ""), values.get("source_type", ""), values["source_id"]


def _document_action(rows: list[Row]) -> str:
    """What is done to a document under this key; empty if it is an operation of another kind."""
    for row in rows:
        if b'"kind":"document"' in row.context:
            action = json.loads(row.context).get("action", "")
            return action if action in DOCUMENT_ACTIONS else ""
    return ""


def _is_seal(row: Row) -> bool:
    return row.kind is RowKind.NEW and row.position == SEAL_POSITION and row.sealed_at_ms > 0


def _is_answer(row: Row) -> bool:
    if row.winner == NOBODY or row.sealed_at_ms == 0:
        return False
    return row.kind is RowKind.DUPLICATE or _is_seal(row)


def _expired(seal: Row, now_ms: int) -> bool:
    return seal.expires_ms > 0 and seal.expires_ms <= now_ms
