"""The fields that log lines and spans share.

They are the columns of the decision row, made by the same functions that the stores use, plus what a row does not have:
the state of the key before and after, and how long the answer is valid. Text from callers is redacted. Digests and
codes of ragfence are not, because a run of their digits may look like a card number.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from ragfence.core.decision_rows import Row, row_for_claim, row_for_seal
from ragfence.core.decisions import (
    Claim,
    ConflictVerdict,
    Fenced,
    Granted,
    HeadQuery,
    InFlightVerdict,
    LeaseRef,
    Mode,
    Replay,
    Seal,
    Sealed,
    SealOutcome,
    Verdict,
)
from ragfence.core.layout import NO_TOKEN, RELEASE_POSITION, RowKind
from ragfence.core.policy import Policy
from ragfence.core.receipts import default_effect_id
from ragfence.core.records import KeyRecord, decode_record
from ragfence.queues.loop import SettledMessage
from ragfence.telemetry.events import (
    ClaimsAnswered,
    Event,
    LeasesReleased,
    ReplaysAnswered,
    RowsRecorded,
    SealsAnswered,
)

ABSENT: Final = "absent"
OURS: Final = frozenset(
    ("row_id", "ts", "decision", "idempotency_key", "payload_hash", "fence", "winner", "index_hash")
)
"""fields that never hold text from callers"""


class DecisionFacts(NamedTuple):
    row: Row
    from_state: str | None = None
    to_state: str | None = None
    holds_ms: int | None = None
    """until a sealed key or a lease expires; None: never, or unknown"""


class DecisionFields:
    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._redact = policy.redactor.redact_text

    def decisions(self, event: Event, now_ms: int, *, all_conflicts: bool = False) -> Iterator[DecisionFacts]:
        """Yields the decisions of a call, in its order.

        `all_conflicts`: also the conflicts whose row the caller writes later, when the diff is known.
        """
        match event:
            case ClaimsAnswered(_, claims, verdicts):
                for claim, verdict in zip(claims, verdicts, strict=True):
                    if all_conflicts and isinstance(verdict, ConflictVerdict):
                        claim = claim._replace(row_on_conflict=True)
                    if (row := row_for_claim(claim, verdict, now_ms)) is not None:
                        yield self._claim_facts(row, claim, verdict, now_ms)
            case ReplaysAnswered(_, asks, records):
                for ask, record in zip(asks, records, strict=True):
                    if record is not None:
                        yield _replay_facts(ask, decode_record(record), now_ms)
            case SealsAnswered(call, seals, outcomes):
                for seal, outcome in zip(seals, outcomes, strict=True):
                    if (row := row_for_seal(seal, outcome, now_ms, solo=call.solo)) is not None:
                        yield _seal_facts(row, seal, outcome)
            case LeasesReleased(_, leases, released, error, expire):
                for lease, done in zip(leases, released, strict=True):
                    if done:
                        yield _release_facts(lease, error, expire, now_ms)
            case RowsRecorded(_, rows):
                yield from map(DecisionFacts, rows)

    def fields(self, facts: DecisionFacts, tenant: str) -> dict[str, Any]:
        """Returns the fields that the policy includes (`logging.include_fields`), and always the change of state.

        Empty and zero values are left out.
        """
        row = facts.row
        columns = row.columns() | {"tenant": tenant}
        chosen: dict[str, Any] = {"tenant": self.clean(tenant)}
        for name in self._policy.logging.include_fields:
            if value := columns.get(name):
                chosen[name] = value if name in OURS else self.clean(value)
        if "effect_id" in self._policy.logging.include_fields and _has_outcome(row) and not row.effect_id:
            chosen["effect_id"] = default_effect_id(row.key)
        if facts.from_state is not None:
            chosen |= {"from_state": facts.from_state, "to_state": facts.to_state}
        if facts.holds_ms is not None:
            chosen["ttl_remaining"] = round(max(facts.holds_ms, 0) / 1000, 3)
        return chosen

    def message_fields(self, settled: SettledMessage) -> dict[str, Any]:
        """Returns what a message says of itself, and what became of it. Empty values are left out."""
        message, result, receipt, reason = settled
        texts = ("event_id", "source_id", "revision", "dedupe_key", "route", "message_id")
        fields = {name: self.clean(value) for name in texts if (value := getattr(message, name))}
        if message.index_hash:
            fields["index_hash"] = message.index_hash
        fields |= {"attempt": message.attempt, "result": result}
        if receipt is not None:
            fields["idempotency_key"] = receipt.key
        if reason:
            fields["reason"] = self.clean(reason)
        return fields

    def clean(self, value: Any) -> Any:
        """Returns the value with secrets redacted."""
        if isinstance(value, str):
            return self._redact(value)
        return [self.clean(item) for item in value] if isinstance(value, list) else value

    def _claim_facts(self, row: Row, claim: Claim, verdict: Verdict, now_ms: int) -> DecisionFacts:
        match verdict:
            case Granted(record):
                return DecisionFacts(row, _state_before(verdict, claim), "held", claim.lease_ms)
            case Replay(record) if record is not None:
                return DecisionFacts(
                    row, _state_name(record), _state_name(record), self._left_ms(claim, record, now_ms)
                )
            case ConflictVerdict(record) if record is not None:
                return DecisionFacts(row, _state_name(record), _state_name(record))
            case InFlightVerdict(until_ms, record):
                # Until the lease expires; a quarantine does not expire.
                left_ms = until_ms - now_ms if until_ms else None
                return DecisionFacts(row, _state_name(record), _state_name(record), left_ms)
            case _:
                return DecisionFacts(row)

    def _left_ms(self, claim: Claim, record: KeyRecord, now_ms: int) -> int | None:
        """Time until a sealed record expires, if the policy has not changed since. Documents never expire."""
        if claim.mode is Mode.DOCUMENT or not record.ended:
            return None
        return record.when_ms + self._policy.for_kind(claim.kind).ttl_ms - now_ms


def _state_before(granted: Granted, claim: Claim) -> str:
    """The state of the key before a claim was granted, as far as the grant shows."""
    record = granted.record
    if granted.takeover:
        return "held"
    if granted.prior is not None:
        return _state_name(granted.prior)
    known = record.attempt > 1 or record.first_seen_ms < record.when_ms - claim.lease_ms
    return "released" if known else ABSENT


def _replay_facts(ask: HeadQuery, record: KeyRecord, now_ms: int) -> DecisionFacts:
    claim = Claim(ask.key, ask.fingerprint, ask.token, Mode.DOCUMENT, ask.source, context=ask.context)
    row = row_for_claim(claim, Replay(record), now_ms)
    assert row is not None  # every replay leaves one
    return DecisionFacts(row, _state_name(record), _state_name(record))


def _seal_facts(row: Row, seal: Seal, outcome: SealOutcome) -> DecisionFacts:
    match outcome:
        case Sealed(record):
            return DecisionFacts(row, "held", _state_name(record), seal.ttl_ms or None)
        case Fenced(record) if record is not None:
            return DecisionFacts(row, _state_name(record), _state_name(record))
        case _:
            return DecisionFacts(row)


def _release_facts(lease: LeaseRef, error: str, expire: bool, now_ms: int) -> DecisionFacts:
    """Attempt and payload are left out: only the store knows them."""
    row = Row(
        token=lease.token,
        position=RELEASE_POSITION,
        ts_ms=now_ms,
        kind=RowKind.NEW,
        key=lease.key,
        fingerprint=b"",
        winner=lease.token,
        error_code=error or "RELEASED",
        context=lease.context or b"{}",
    )
    return DecisionFacts(row, "held", "held" if expire else "released")


def _has_outcome(row: Row) -> bool:
    return row.sealed_at_ms > 0 and row.winner != NO_TOKEN


def _state_name(record: KeyRecord) -> str:
    return record.state.name.lower()
