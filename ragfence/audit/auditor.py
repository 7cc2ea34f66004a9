"""The auditor: replays decision rows and checks the invariants. A finding names the rows that break one.

one_seal         at most one sealed `new` per key and life; a life ends with its expiry or an `ended` row
equal_receipts   all calls answered with a key's outcome got the same effect of the same attempt; for documents, whose
                 heads can move to the same key repeatedly, the same effect
fences_ascend    of two leases of a source, the later one has the higher fence number
lost_epoch       a store without an object store forgot a life: `new` again in a later epoch
same_payload     a call answered with an outcome had sent the payload that the outcome belongs to
own_lease        an effect is sealed by the attempt that was granted, with the fence number of the grant
known_winner     a call was answered with an outcome that was sealed, and not before it was
own_key          a row has the key of the operation that it names

`known_winner` requires a row to exist. But a fence store that loses rows starts a new epoch, old days expire, and a
Redis without an object store keeps only its newest rows. So a seal is required only for outcomes of the newest epoch
that were sealed after the first row of the shard, and only if there is a ledger. The newest epoch comes from the object
store: a fence store that forgot everything and answers only duplicates grants nothing in its new epoch, so no row shows
it. What a store of a later epoch answers was loaded from the object store, so an outcome of a document without a seal
must be in the log of documents (`AuditReport.unproven`; `Audit.check` looks it up).

`indexes.alias_checks` checks the log of the aliases: every target was sealed before the swap.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ragfence.core.decision_rows import Row
from ragfence.core.hashing import shard_of
from ragfence.core.layout import HEALED, NO_TOKEN, RELEASE_POSITION, SEAL_POSITION, RowKind
from ragfence.core.operations import FenceNumber, Operation
from ragfence.engine.requests import DOCUMENT_ACTIONS
from ragfence.errors import ValidationError
from ragfence.stores.objects import ObjectStore

DOCUMENT = "document"
LOG_READS = 5
CLOCK_SLACK_MS = 60_000
"""tolerance for a clock that is set back, or differs between a server and its successor"""


@dataclass(frozen=True, slots=True)
class AuditFinding:
    invariant: str
    key: str
    text: str
    rows: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AuditReport:
    rows: int
    keys: int
    findings: tuple[AuditFinding, ...] = ()
    unproven: tuple[AuditFinding, ...] = ()
    """findings unless the log of documents has the key: no row is left that proves the answer"""

    @property
    def ok(self) -> bool:
        return not self.findings

    def __add__(self, other: AuditReport) -> AuditReport:
        """Joins two reports about different keys."""
        findings, unproven = self.findings + other.findings, self.unproven + other.unproven
        return AuditReport(self.rows + other.rows, self.keys + other.keys, findings, unproven)

    def __str__(self) -> str:
        if self.ok:
            return f"{self._counts()}: every promise kept"
        count = len(self.findings)
        lines = [f"{count} finding{'s' * (count != 1)} in {self._counts()}"]
        lines += [f"  {found.invariant} {found.key[:18]}...: {found.text}" for found in self.findings]
        return "\n".join(lines)

    def _counts(self) -> str:
        rows, keys = f"row{'s' * (self.rows != 1)}", f"key{'s' * (self.keys != 1)}"
        return f"{self.rows} {rows} over {self.keys} {keys}"


@dataclass(slots=True)
class _Life:
    seal: Row | None = None
    answers: dict[tuple[str, bytes], Row] = field(default_factory=dict)
    ended: bytes | None = None
    """winner of the outcome that an `ended` row ended; the outcome is removed after that row is written, so calls may
    still be answered with it until there is a new one"""

    def continues_with(self, row: Row) -> bool:
        return self.ended is None or self.ended == row.winner


def check(
    rows: Iterable[Row],
    *,
    tenant: str | None = None,
    whole: bool = False,
    newest_epoch: Callable[[], int] = lambda: 0,
) -> AuditReport:
    """Checks rows and returns what they break.

    Args:
        rows: All rows of some shards, in any order; duplicates do not matter.
        tenant: The owner of the rows. If given, keys are compared with operations.
        whole: No rows were trimmed, so a missing row is a finding.
        newest_epoch: Returns the newest epoch of the object store. Called after all rows were read, because the fence
            store may forget rows meanwhile.
    """
    unique = {row.row_id: row for row in rows}
    ordered = sorted(unique.values(), key=lambda row: (row.ts_ms, row.fence, row.position))
    findings: list[AuditFinding] = []
    by_key: dict[bytes, list[Row]] = {}
    for row in ordered:
        by_key.setdefault(row.key, []).append(row)
    for key, members in by_key.items():
        findings += _check_key(key, members)
    findings += _check_fences(ordered)
    unproven: list[AuditFinding] = []
    if whole:
        missing, unproven = _check_winners(ordered, newest_epoch())
        findings += missing
    if tenant is not None:
        findings += _check_names(by_key, tenant)
    return AuditReport(len(unique), len(by_key), tuple(findings), tuple(unproven))


def _check_key(key: bytes, rows: list[Row]) -> Iterable[AuditFinding]:
    yield from _check_leases(key, rows)
    life = _Life()
    document = _document_action(rows)
    if document in ("retract", "purge"):
        return  # a document may be retracted again and again
    for row in rows:
        if row.kind is RowKind.ENDED:
            life.ended = row.winner
            continue
        if (_is_seal(row) or _is_answer(row)) and not life.continues_with(row):
            life = _Life()
        if _is_seal(row):
            if life.seal is not None and _expired(life.seal, row.ts_ms):
                life = _Life(ended=life.ended)
            if life.seal is not None and life.seal.winner != row.winner:
                lost = life.seal.fence.epoch < row.fence.epoch
                yield AuditFinding(
                    "lost_epoch" if lost else "one_seal",
                    key.hex(),
                    f"sealed twice, by {life.seal.winner.hex()[:8]} and by {row.winner.hex()[:8]}"
                    + ("; the fence store forgot the first seal" if lost else ""),
                    (life.seal.row_id, row.row_id),
                )
            life.seal = life.seal or row
        if _is_answer(row):
            if life.seal is not None and _expired(life.seal, row.ts_ms):
                life = _Life(ended=life.ended)
            # The head of a document may move to the same key repeatedly, by other attempts; the receipt is the key's.
            answer = (row.effect_id, NO_TOKEN if document else row.winner)
            if life.answers and answer not in life.answers:
                other = next(iter(life.answers.values()))
                yield AuditFinding(
                    "equal_receipts",
                    key.hex(),
                    f"answered with {row.effect_id or 'the effect'} of {row.winner.hex()[:8]} and with "
                    f"{other.effect_id or 'the effect'} of {other.winner.hex()[:8]}",
                    (other.row_id, row.row_id),
                )
            first = life.seal or next(iter(life.answers.values()), row)
            if first.fingerprint != row.fingerprint:
                text = (
                    f"payload {row.fingerprint.hex()[:8]} was answered with the outcome of payload "
                    f"{first.fingerprint.hex()[:8]}"
                )
                yield AuditFinding("same_payload", key.hex(), text, (first.row_id, row.row_id))
            life.answers.setdefault(answer, row)


def _check_leases(key: bytes, rows: list[Row]) -> Iterable[AuditFinding]:
    granted: dict[bytes, list[Row]] = {}
    for row in rows:
        if _is_grant(row):
            granted.setdefault(row.token, []).append(row)
    for row in rows:
        if not _is_seal(row):
            continue
        leases = granted.get(row.token, [])
        if row.winner != row.token:
            text = f"{row.token.hex()[:8]} sealed as new what {row.winner.hex()[:8]} had executed"
            yield AuditFinding("own_lease", key.hex(), text, (row.row_id, row.row_id))
        elif leases and all(lease.fence != row.fence for lease in leases):
            text = f"granted with fence number {leases[-1].fence}, sealed with {row.fence}"
            yield AuditFinding("own_lease", key.hex(), text, (leases[-1].row_id, row.row_id))


def _check_winners(rows: list[Row], newest_epoch: int) -> tuple[list[AuditFinding], list[AuditFinding]]:
    """Returns the findings, and those that are findings unless the log of documents has the key."""
    findings: list[AuditFinding] = []
    unproven: list[AuditFinding] = []
    first_ms: dict[int, int] = {}
    newest: dict[int, int] = {}
    sealed: dict[tuple[bytes, bytes], Row] = {}
    for row in rows:
        shard = row.key[0]
        first_ms[shard] = min(first_ms.get(shard, row.ts_ms), row.ts_ms)
        newest[shard] = max(newest.get(shard, newest_epoch), row.fence.epoch)
        if row.position == SEAL_POSITION and row.sealed_at_ms:  # also when an attempt sealed a commit that it found
            sealed.setdefault((row.key, row.winner), row)
    for row in rows:
        shard = row.key[0]
        if not _is_answer(row) or row.position == SEAL_POSITION:
            continue
        if row.flags & HEALED:  # answered with a commit that had not been sealed: the object is the proof
            continue
        seal = sealed.get((row.key, row.winner))
        rows_may_be_lost = row.fence.epoch < newest[shard]
        if seal is None and row.sealed_at_ms >= first_ms[shard]:
            text = f"answered with the outcome of {row.winner.hex()[:8]}, which was never sealed"
            if not rows_may_be_lost:
                findings.append(AuditFinding("known_winner", row.key.hex(), text, (row.row_id,)))
            elif _document_action([row]) not in ("", "retract", "purge"):
                text += " and is not in the log of documents"
                unproven.append(AuditFinding("known_winner", row.key.hex(), text, (row.row_id,)))
        elif seal is not None and not rows_may_be_lost and row.ts_ms + CLOCK_SLACK_MS < seal.ts_ms:
            text = f"answered {seal.ts_ms - row.ts_ms} ms before {row.winner.hex()[:8]} sealed it"
            findings.append(AuditFinding("known_winner", row.key.hex(), text, (seal.row_id, row.row_id)))
    return findings, unproven


def keys_in_log(tenant: str, objects: ObjectStore, wanted: set[bytes]) -> set[bytes]:
    """Returns which keys the log of documents has; all of them, if it is rewritten faster than it can be read."""
    from ragfence.documents.parquet import fixed_values, read_table
    from ragfence.engine.epochs import Epochs

    for _ in range(LOG_READS):
        found: set[bytes] = set()
        for name in Epochs(tenant, objects).truth():
            if (data := objects.get(name)) is None:
                break  # a compaction or a purge has begun a new epoch, which lists what replaced it
            found |= wanted.intersection(fixed_values(read_table(name, data, "rows", ["key"]), "key"))
        else:
            return found
    return wanted


def _check_names(by_key: dict[bytes, list[Row]], tenant: str) -> Iterable[AuditFinding]:
    """Checks each key and context once: most rows of a key have the same context."""
    for key, members in by_key.items():
        for row in {row.context: row for row in members}.values():
            context = json.loads(row.context or b"{}")
            if (named := _named_key(context, tenant)) is not None and not key.startswith(named):
                text = f"the row names {context['kind']} {context['source_id']!r}, which has another key"
                yield AuditFinding("own_key", key.hex(), text, (row.row_id,))


def _named_key(context: dict[str, str], tenant: str) -> bytes | None:
    """Returns the key, or its start, that follows from the context; None if the context does not name an operation."""
    if not context.get("kind") or not context.get("source_id"):
        return None
    if context["kind"] == DOCUMENT and context.get("action", "") in DOCUMENT_ACTIONS:
        return bytes((shard_of(tenant, context["source_id"]),))  # the rest follows from the document's content
    try:
        return Operation(
            kind=context["kind"],
            source_id=context["source_id"],
            revision=context.get("revision", ""),
            source_type=context.get("source_type", ""),
            index_hash=context.get("index_hash", ""),
            action=context.get("action", ""),
            tenant=tenant,
        ).key
    except ValidationError:
        return b"\xff"  # not the key of any operation


def _check_fences(rows: list[Row]) -> Iterable[AuditFinding]:
    """Fence numbers of the grants of a source must ascend in time, and none may be granted twice."""
    last: dict[tuple[str, ...], Row] = {}
    given: dict[tuple[int, FenceNumber], Row] = {}
    for row in rows:
        if not _is_grant(row) or not row.fence.epoch:
            continue
        spot = (row.key[0], row.fence)
        if spot in given and given[spot].token != row.token:
            text = f"fence number {row.fence} was granted twice"
            yield AuditFinding("fences_ascend", row.key.hex(), text, (given[spot].row_id, row.row_id))
        given[spot] = row
        source = _source_of(row)
        before = last.get(source)
        if before is not None and before.token != row.token and before.fence >= row.fence:
            text = f"fence number {before.fence} was followed by {row.fence}"
            yield AuditFinding("fences_ascend", row.key.hex(), text, (before.row_id, row.row_id))
        last[source] = row


def _source_of(row: Row) -> tuple[str, ...]:
    """The source of a row, or its key if the row has no context."""
    values = json.loads(row.context or b"{}")
    if "source_id" not in values:
        return (row.key.hex(),)
    return f"{row.key[0]:02x}", values.get("kind", ""), values.get("source_type", ""), values["source_id"]


def _document_action(rows: list[Row]) -> str:
    """The action on a document that the key stands for; "" if the operation is not about a document."""
    for row in rows:
        if b'"kind":"document"' in row.context:
            action = json.loads(row.context).get("action", "")
            return action if action in DOCUMENT_ACTIONS else ""
    return ""


def _is_grant(row: Row) -> bool:
    return row.kind is RowKind.NEW and row.position not in (SEAL_POSITION, RELEASE_POSITION)


def _is_seal(row: Row) -> bool:
    return row.kind is RowKind.NEW and row.position == SEAL_POSITION and row.sealed_at_ms > 0


def _is_answer(row: Row) -> bool:
    if row.winner == NO_TOKEN or row.sealed_at_ms == 0:
        return False
    return row.kind is RowKind.DUPLICATE or _is_seal(row)


def _expired(seal: Row, now_ms: int) -> bool:
    return seal.expires_ms > 0 and seal.expires_ms <= now_ms
