"""`Relay`: sends the events of an outbox, at least once, in order per key. Any number of relays may run.

    lock      the oldest unsent event of each key; a key whose oldest event another relay has locked is passed over
    publish   the event, and those that follow it under the same key, in their order
    mark      them as sent, in the transaction that holds the locks

A relay that dies between publishing and marking publishes again, with the same event ids: the consumer's fence makes
that one effect. An event that is given up (`dead`) blocks its key until somebody decides, or order would be lost.

What is not the event's fault (a queue that is full or cannot be reached, a store that is down) uses up no attempt.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from ragfence._extras import needs_extra
from ragfence.core.backoff import Backoff
from ragfence.core.hashing import digest
from ragfence.core.operations import Operation
from ragfence.core.policy import OutboxRules
from ragfence.engine.claim_block import is_about, is_final
from ragfence.engine.signals import stop_at_signals
from ragfence.errors import (
    Conflict,
    EffectFailed,
    FencedOut,
    PolicyError,
    Quarantined,
    RagfenceError,
    TransientError,
    TransportUnavailable,
    ValidationError,
)
from ragfence.outbox.outbox import DEAD, PENDING, SENT, Outbox, OutboxRow, row_of
from ragfence.queues.consumer import Claims, seal
from ragfence.queues.sql import clock, create_tables
from ragfence.queues.transport import Envelope, Transport

with needs_extra("sql", "A relay"):
    import sqlalchemy as sa
    from sqlalchemy.dialects import sqlite
    from sqlalchemy.engine import Connection

KIND: Final = "outbox"
BATCH: Final = 100
LEASE_MS: Final = 30_000
CALL_S: Final = 60.0
WINDOW: Final = 10
"""How many batches of due events are looked at for the oldest of each key, before all of them are."""
WHOLE_TURNS: Final = 16
"""One turn in so many looks at all due events: behind a long row of blocked ones, there may be others."""
MAX_SHARE: Final = 20
"""At most this fraction of the time is spent looking at all due events in vain."""
UPKEEP_S: Final = 60.0
MAX_GROUP: Final = 128
"""The longest name of a group that every queue takes."""
_log = logging.getLogger("ragfence.outbox")

leases = sa.Table(
    "ragfence_outbox_relays",
    sa.MetaData(),
    sa.Column("outbox", sa.String(255), primary_key=True),
    sa.Column("owner", sa.String(64), nullable=False),
    sa.Column("until_ms", sa.BigInteger, nullable=False),
)
"""SQLite has no row locks: one relay at a time, by a lease."""


class RelayReport(NamedTuple):
    """What one round did."""

    sent: int = 0
    failed: int = 0
    """Will be tried again."""
    dead: int = 0


class _Failure(NamedTuple):
    error: Exception
    counted: bool = True
    final: bool = False


class _Outcome:
    """What became of the events of a batch. An event in neither was not tried."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.failures: dict[int, _Failure] = {}


class Relay:
    """Sends the events of an outbox to a queue or to a function.

    Args:
        outbox: Where the events are.
        to: A `Transport`, or a function that is called with each `OutboxRow`.
        fence: Makes the function's effect happen once per event. A queue needs none: its consumer has one.
        topic: Only events of this topic; all, unless given.
        batch: How many events are sent in one round.
        max_attempts: After how many failures an event is given up; by default, what the policy of the fence says.
        keep_days: `run` deletes events that were sent longer ago; by default, what the policy of the fence says.
        call_s: How long one call of the function or the queue may take. After that PostgreSQL ends the transaction, so
            that a relay that hangs or is frozen does not keep its events from the others.
        retry: The delays of an event that failed.
        on_round: Called with the report of each round that sent or failed something, for example to count.

    >>> Relay(outbox, to=queue).run()  # until SIGTERM  # doctest: +SKIP
    """

    def __init__(
        self,
        outbox: Outbox,
        *,
        to: Transport | Callable[[OutboxRow], Any],
        fence: Claims | None = None,
        topic: str | None = None,
        batch: int = BATCH,
        max_attempts: int | None = None,
        keep_days: float | None = None,
        pause_s: float = 0.5,
        call_s: float = CALL_S,
        retry: Backoff = Backoff(attempts=100, first_s=1.0, longest_s=300.0),  # noqa: B008  # frozen
        on_round: Callable[[RelayReport], None] | None = None,
    ) -> None:
        rules = fence.policy.outbox if fence is not None else OutboxRules()
        max_attempts = rules.max_attempts if max_attempts is None else max_attempts
        if batch < 1 or max_attempts < 1:
            raise PolicyError("batch and max_attempts must be at least 1")
        if call_s <= 0:
            raise PolicyError("call_s must be more than 0")
        self._outbox, self._to, self._fence, self._topic = outbox, to, fence, topic
        self._batch, self._max_attempts, self._pause_s, self._retry = batch, max_attempts, pause_s, retry
        self._call_s = call_s
        self._keep_days = rules.keep_days if keep_days is None else keep_days
        self._lag_alert_s = rules.lag_alert_s
        self._on_round = on_round
        self._dialect = outbox.engine.dialect.name
        self._postgres = self._dialect == "postgresql"
        self._owner = f"{os.getpid()}:{os.urandom(8).hex()}"
        self._dice = random.Random()
        self._stopping = threading.Event()
        self._outages = 0
        """Rounds in a row with a failure that is not the event's fault."""
        self._turns = 0
        self._whole_after = 0.0
        self._renew_at = 0.0
        self._locks: Connection | None = None
        """The transaction whose locks hold the events that are being published, on PostgreSQL."""
        if not self._postgres:
            create_tables(outbox.engine, leases.metadata, [leases])

    def run(self) -> None:
        """Relays until `stop()` is called, or until SIGTERM or SIGINT if this is the main thread.

        Meanwhile, events that were sent longer ago than `keep_days` are deleted.
        """
        failures, upkeep_at = 0, time.monotonic()
        with stop_at_signals(self.stop):
            try:
                while not self._stopping.is_set():
                    try:
                        report = self.run_once()
                        if time.monotonic() >= upkeep_at:
                            upkeep_at = time.monotonic() + (1.0 if self._upkeep() else UPKEEP_S)
                        failures = 0
                    except TransportUnavailable as error:
                        failures += 1
                        _log.warning("the outbox cannot be read: %s", error.message)
                        self._stopping.wait(self._retry.pause_s(failures, None, self._dice))
                        continue
                    if not report.sent:
                        self._stopping.wait(self._pause_s)
            finally:
                self.close()

    def run_once(self) -> RelayReport:
        """Sends one batch: one statement that locks, one call of a queue, one statement that marks."""
        if self._postgres:
            report = self._outbox.run("relay events", self._relay_locked)
        else:
            # SQLite: nothing is published while the one write lock is held, or every business transaction would wait.
            rows = self._outbox.run("take events", self._take_under_lease)
            if not rows:
                return RelayReport()
            outcome = self._publish(rows)
            report = self._outbox.run("mark events", lambda tx: self._mark(tx, rows, outcome))
        if self._on_round is not None and any(report):
            self._on_round(report)
        return report

    def stop(self) -> None:
        """Ends `run` after the batch. May be called from any thread."""
        self._stopping.set()

    def close(self) -> None:
        """Lets another relay continue at once, on SQLite. `run` does so when it ends."""
        with contextlib.suppress(TransportUnavailable):  # then it expires
            self._give_up_lease()

    def _upkeep(self) -> int:
        """Deletes old events, and warns if new ones wait. Returns how many were deleted."""
        if (status := self._outbox.status(self._topic)).lag_s > self._lag_alert_s:
            _log.warning("the oldest of %d unsent events waits for %.0f s", status.pending, status.lag_s)
        return self._outbox.purge(self._keep_days)

    def _relay_locked(self, tx: Connection) -> RelayReport:
        timeout_ms = max(1, int(self._call_s * 1000))
        tx.execute(sa.text(f"SET LOCAL idle_in_transaction_session_timeout = {timeout_ms}"))
        rows = self._take(tx)
        if not rows:
            return RelayReport()
        self._locks, self._renew_at = tx, time.monotonic() + self._call_s / 3
        try:
            return self._mark(tx, rows, self._publish(rows))
        finally:
            self._locks = None

    def _take_under_lease(self, tx: Connection) -> list[OutboxRow]:
        return self._take(tx) if self._hold_lease(tx) else []

    def _hold_lease(self, tx: Connection) -> bool:
        """Gets or renews the lease, in one statement: of two relays that find it expired, one gets it."""
        asked = time.monotonic()
        moment = clock(self._dialect)
        row = {"outbox": self._outbox.table.fullname, "owner": self._owner, "until_ms": moment + LEASE_MS}
        insert = sqlite.insert(leases).values(row)
        upsert = insert.on_conflict_do_update(
            index_elements=[leases.c.outbox],
            set_={"owner": insert.excluded.owner, "until_ms": insert.excluded.until_ms},
            where=sa.or_(leases.c.owner == self._owner, leases.c.until_ms <= moment),
        )
        held = tx.execute(upsert.returning(leases.c.owner)).first() is not None
        if held:
            self._renew_at = asked + LEASE_MS / 3000
        return held

    def _give_up_lease(self) -> None:
        if not self._postgres:
            mine = sa.delete(leases).where(
                leases.c.outbox == self._outbox.table.fullname, leases.c.owner == self._owner
            )
            self._outbox.run("give up the relay's lease", lambda tx: tx.execute(mine))

    def _still_ours(self) -> bool:
        """Renews the lease while a batch takes long. False: another relay has the events now.

        On PostgreSQL the transaction holds the locks: it is kept, or this raises because it has ended.
        """
        if time.monotonic() < self._renew_at:
            return True
        if self._locks is not None:
            self._locks.execute(sa.select(1))
            self._renew_at = time.monotonic() + self._call_s / 3
            return True
        return self._outbox.run("renew the relay's lease", self._hold_lease)

    def _take(self, tx: Connection) -> list[OutboxRow]:
        """Locks and returns events whose turn it is. The cost does not grow with what was sent.

        First among the events that are due for the longest time. All are looked at only if most of those are blocked,
        and now and then.
        """
        self._turns += 1
        if self._turns % WHOLE_TURNS:
            rows = self._take_among(tx, WINDOW * self._batch)
            if len(rows) >= self._batch or self._due(tx, WINDOW * self._batch) < WINDOW * self._batch:
                return rows
            if time.monotonic() < self._whole_after:
                return rows
        started = time.monotonic()
        rows = self._take_among(tx, None)
        ended = time.monotonic()
        if len(rows) < self._batch:
            self._whole_after = ended + MAX_SHARE * (ended - started)
        return rows

    def _due_events(self) -> Any:
        table = self._outbox.table
        # As a subquery: PostgreSQL calls it once then, and can use the index.
        moment = sa.select(clock(self._dialect)).scalar_subquery()
        due = (table.c.state == PENDING, table.c.next_ms <= moment)
        return due if self._topic is None else (*due, table.c.topic == self._topic)

    def _due(self, tx: Connection, most: int) -> int:
        window = sa.select(self._outbox.table.c.id).where(*self._due_events()).limit(most).subquery()
        return int(tx.scalar(sa.select(sa.func.count()).select_from(window)) or 0)

    def _take_among(self, tx: Connection, window: int | None) -> list[OutboxRow]:
        table = self._outbox.table
        older = table.alias("older")
        # Dead ones count as unsent, and so block what follows them.
        unsent_before = sa.exists().where(
            older.c.topic == table.c.topic,
            older.c.key == table.c.key,
            older.c.state.in_((PENDING, DEAD)),
            older.c.id < table.c.id,
        )
        due = self._due_events()
        oldest = sa.select(table).where(~unsent_before)
        if window is None:
            oldest = oldest.where(*due)
        else:
            # The state once more, for rows that another relay has marked meanwhile. Hidden from the planner, which
            # would read all pending rows for it.
            oldest = oldest.where(sa.func.lower(table.c.state) == PENDING)
            first = sa.select(table.c.id).where(*due).order_by(table.c.next_ms, table.c.id).limit(window).subquery()
            oldest = oldest.join(first, first.c.id == table.c.id)
        oldest = oldest.order_by(table.c.next_ms, table.c.id).limit(self._batch)
        oldest = oldest.with_for_update(skip_locked=True, of=table)
        heads = [row_of(row) for row in tx.execute(oldest)]
        if not heads or len(heads) == self._batch:
            return sorted(heads)
        # Who holds the oldest event of a key holds the key: nobody else takes what follows.
        keys = sa.tuple_(table.c.topic, table.c.key).in_([(row.topic, row.key) for row in heads])
        following = (
            sa.select(table)
            .where(table.c.state.in_((PENDING, DEAD)), keys, table.c.id.not_in([row.id for row in heads]))
            .order_by(table.c.id)
            .limit(self._batch - len(heads))
        )
        return sorted([*heads, *_before_the_dead(row_of(row) for row in tx.execute(following))])

    def _publish(self, rows: Sequence[OutboxRow]) -> _Outcome:
        """Publishes in order. After a failure, nothing more of its key is published."""
        outcome = _Outcome()
        if callable(self._to):
            self._one_by_one(rows, self._to if self._fence is None else self._call, outcome)
            return outcome
        queue = self._to
        try:
            queue.send([self._envelope(row) for row in rows])
            outcome.sent += [row.id for row in rows]
        except TransientError as error:  # some may have been sent: all of them are sent again
            outcome.failures = dict.fromkeys((row.id for row in rows), _Failure(error, counted=False))
        except Exception:  # noqa: BLE001  # one event that the queue refuses must not hold up the others
            self._one_by_one(rows, lambda row: queue.send([self._envelope(row)]), outcome)
        return outcome

    def _one_by_one(self, rows: Sequence[OutboxRow], send: Callable[[OutboxRow], Any], outcome: _Outcome) -> None:
        blocked: dict[tuple[str, str], _Failure] = {}
        for row in rows:
            place = (row.topic, row.key)
            if place in blocked:
                outcome.failures[row.id] = blocked[place]
                continue
            if not self._still_ours():
                _log.warning("another relay took over: this one was too slow, or stood still")
                return
            try:
                send(row)
                outcome.sent.append(row.id)
            except Exception as error:  # noqa: BLE001  # whatever the function raises is the event's failure
                outcome.failures[row.id] = blocked[place] = self._failure(error)

    def _failure(self, error: Exception) -> _Failure:
        final = is_final(error) or isinstance(error, EffectFailed | Quarantined | Conflict)
        refused = not callable(self._to) and isinstance(error, ValidationError)
        return _Failure(error, counted=not isinstance(error, TransientError), final=final or refused)

    def _call(self, row: OutboxRow) -> None:
        assert callable(self._to)
        assert self._fence is not None
        operation = Operation(kind=KIND, source_type=row.topic, source_id=row.event_id)
        try:
            self._claim_and_call(operation, row, self._to)
        except (EffectFailed, Quarantined):
            # No event is relayed for the first time with a key that failed: it was dead, and somebody revived it.
            release = getattr(self._fence, "release", None)
            if row.attempts or release is None or not release(operation):
                raise
            self._claim_and_call(operation, row, self._to)

    def _claim_and_call(self, operation: Operation, row: OutboxRow, function: Callable[[OutboxRow], Any]) -> None:
        assert self._fence is not None
        claim = self._fence.claim(
            operation, payload=row.payload, wait_s=0, event_id=row.event_id, route=f"outbox:{row.topic}"
        )
        try:
            with claim as op:
                if op.is_new:
                    seal(op, function(row))
        except FencedOut as lost:
            if lost.receipt is None or lost.receipt.failed or not is_about(lost, claim):
                raise

    def _envelope(self, row: OutboxRow) -> Envelope:
        group = f"{row.topic}:{row.key}"
        if len(group) > MAX_GROUP:
            group = digest("ragfence/outbox/group/1", group.encode()).hex()
        return Envelope(
            body=row.payload,
            event_id=row.event_id,
            source_id=row.key,
            dedupe_key=f"outbox:{row.event_id}",
            tenant=self._fence.tenant if self._fence is not None else "",
            route=f"outbox:{row.topic}",
            group=group,
        )

    def _mark(self, tx: Connection, rows: Sequence[OutboxRow], outcome: _Outcome) -> RelayReport:
        table, moment = self._outbox.table, clock(self._dialect)
        if outcome.sent:
            values = {"state": SENT, "sent_ms": moment, "next_ms": moment, "error": None}
            tx.execute(sa.update(table).where(table.c.id.in_(outcome.sent), table.c.state == PENDING).values(values))
        failures = outcome.failures
        self._outages = self._outages + 1 if any(not each.counted for each in failures.values()) else 0
        dead, seen = 0, set[tuple[str, str]]()
        for row in rows:
            if (failure := failures.get(row.id)) is None or (row.topic, row.key) in seen:
                continue
            seen.add((row.topic, row.key))  # of a key only the first failed; the others were not tried
            attempts = row.attempts + failure.counted
            given_up = failure.final or attempts >= self._max_attempts
            dead += given_up
            streak = attempts if failure.counted else self._outages
            delay_ms = int(1000 * self._retry.pause_s(max(streak, 1), None, self._dice))
            change = {
                "attempts": attempts,
                "state": DEAD if given_up else PENDING,
                "next_ms": moment + delay_ms,
                "error": _describe(failure.error, row.error),
            }
            tx.execute(sa.update(table).where(table.c.id == row.id, table.c.state == PENDING).values(change))
            what = "was given up" if given_up else "could not be relayed"
            _log.warning("event %s %s (attempt %d): %s", row.event_id, what, attempts, change["error"])
        return RelayReport(len(outcome.sent), len(failures) - dead, dead)


def _before_the_dead(rows: Iterator[OutboxRow]) -> Iterator[OutboxRow]:
    """Of each key, what comes before its first dead event. It may be dead while an older one is not: see `add`."""
    blocked: set[tuple[str, str]] = set()
    for row in rows:
        if row.state == DEAD:
            blocked.add((row.topic, row.key))
        elif (row.topic, row.key) not in blocked:
            yield row


def _describe(error: Exception, before: str) -> str:
    if isinstance(error, Quarantined) and before:
        return before  # it says why the key failed
    return f"{type(error).__name__}: {error.message if isinstance(error, RagfenceError) else error}"[:2000]
