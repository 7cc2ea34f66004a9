"""`Relay`: sends the events of an outbox, at least once, in order per key. Any number of relays may run.

    lock      the oldest unsent event of each key; a key whose oldest event another relay has locked is passed over
    publish   the event, and those that follow it under the same key, in their order
    mark      them as sent, in the transaction that holds the locks

A relay that dies between publishing and marking publishes again, with the same event ids: the consumer's fence makes
that one effect. An event that is given up (`dead`) blocks its key until somebody decides, or order would be lost.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from ragfence._extras import needs_extra
from ragfence.core.backoff import Backoff
from ragfence.core.operations import Operation
from ragfence.errors import PolicyError, QueueFull, RagfenceError, TransportUnavailable
from ragfence.outbox.outbox import DEAD, PENDING, SENT, Outbox, OutboxRow, row_of
from ragfence.queues.consumer import Claims, seal
from ragfence.queues.sql import create_tables, now_ms
from ragfence.queues.transport import Envelope, Transport

with needs_extra("sql", "A relay"):
    import sqlalchemy as sa
    from sqlalchemy.engine import Connection

KIND: Final = "outbox"
BATCH: Final = 100
LEASE_MS: Final = 30_000
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


class Relay:
    """Sends the events of an outbox to a queue or to a function.

    Args:
        outbox: Where the events are.
        to: A `Transport`, or a function that is called with each `OutboxRow`.
        fence: Makes the function's effect happen once per event. A queue needs none: its consumer has one.
        topic: Only events of this topic; all, unless given.
        max_attempts: After how many failures an event is given up.
        retry: The delays of an event that failed.

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
        max_attempts: int = 20,
        pause_s: float = 0.5,
        retry: Backoff = Backoff(attempts=100, first_s=1.0, longest_s=300.0),  # noqa: B008  # frozen
    ) -> None:
        if batch < 1 or max_attempts < 1:
            raise PolicyError("batch and max_attempts must be at least 1")
        self._outbox, self._to, self._fence, self._topic = outbox, to, fence, topic
        self._batch, self._max_attempts, self._pause_s, self._retry = batch, max_attempts, pause_s, retry
        self._postgres = outbox.engine.dialect.name == "postgresql"
        self._owner = f"{os.getpid()}:{os.urandom(8).hex()}"
        self._dice = random.Random()
        self._stopping = threading.Event()
        if not self._postgres:
            create_tables(outbox.engine, leases.metadata, [leases])

    def run(self) -> None:
        """Relays until `stop()` is called, or until SIGTERM or SIGINT if this is the main thread."""
        if threading.current_thread() is threading.main_thread():
            for sig in (signal.SIGTERM, signal.SIGINT):
                signal.signal(sig, lambda *_: self.stop())
        failures = 0
        while not self._stopping.is_set():
            try:
                report = self.run_once()
                failures = 0
            except TransportUnavailable as error:
                failures += 1
                _log.warning("the outbox cannot be read: %s", error.message)
                self._stopping.wait(self._retry.pause_s(failures, None, self._dice))
                continue
            if not report.sent:
                self._stopping.wait(self._pause_s)
        self._give_up_lease()

    def run_once(self) -> RelayReport:
        """Sends one batch."""
        if self._postgres:
            return self._outbox.run("relay events", self._relay_locked)
        # SQLite: nothing is published while the one write lock is held, or every business transaction would wait.
        rows = self._outbox.run("take events", self._take_under_lease)
        if not rows:
            return RelayReport()
        failures = self._publish(rows)
        return self._outbox.run("mark events", lambda tx: self._mark(tx, rows, failures))

    def stop(self) -> None:
        """Ends `run` after the batch. May be called from any thread."""
        self._stopping.set()

    def _relay_locked(self, tx: Connection) -> RelayReport:
        rows = self._take(tx)
        return self._mark(tx, rows, self._publish(rows)) if rows else RelayReport()

    def _take_under_lease(self, tx: Connection) -> list[OutboxRow]:
        moment, name = now_ms(tx), self._outbox.table.name
        held = tx.execute(sa.select(leases).where(leases.c.outbox == name)).one_or_none()
        if held is not None and held.owner != self._owner and held.until_ms > moment:
            return []
        lease = {"owner": self._owner, "until_ms": moment + LEASE_MS}
        if held is None:
            tx.execute(sa.insert(leases).values(outbox=name, **lease))
        else:
            tx.execute(sa.update(leases).where(leases.c.outbox == name).values(lease))
        return self._take(tx)

    def _give_up_lease(self) -> None:
        if not self._postgres:
            mine = sa.delete(leases).where(leases.c.outbox == self._outbox.table.name, leases.c.owner == self._owner)
            self._outbox.run("give up the relay's lease", lambda tx: tx.execute(mine))

    def _take(self, tx: Connection) -> list[OutboxRow]:
        table, moment = self._outbox.table, now_ms(tx)
        older = table.alias("older")
        # Dead ones count as unsent, and so block what follows them.
        unsent_before = sa.exists().where(
            older.c.topic == table.c.topic,
            older.c.key == table.c.key,
            older.c.state.in_((PENDING, DEAD)),
            older.c.id < table.c.id,
        )
        oldest = (
            sa.select(table)
            .where(table.c.state == PENDING, table.c.next_ms <= moment, ~unsent_before)
            .order_by(table.c.next_ms, table.c.id)
            .limit(self._batch)
            .with_for_update(skip_locked=True)
        )
        if self._topic is not None:
            oldest = oldest.where(table.c.topic == self._topic)
        first = [row_of(row) for row in tx.execute(oldest)]
        if not first or len(first) == self._batch:
            return sorted(first)
        # Who holds the oldest event of a key holds the key: nobody else takes what follows.
        keys = sa.tuple_(table.c.topic, table.c.key).in_([(row.topic, row.key) for row in first])
        following = (
            sa.select(table)
            .where(table.c.state == PENDING, keys, table.c.id.not_in([row.id for row in first]))
            .order_by(table.c.id)
            .limit(self._batch - len(first))
        )
        return sorted([*first, *(row_of(row) for row in tx.execute(following))])

    def _publish(self, rows: Sequence[OutboxRow]) -> dict[int, RagfenceError | Exception]:
        """Publishes in order. Returns what failed; after a failure, nothing more of its key is published."""
        if not callable(self._to):
            try:
                self._to.send([self._envelope(row) for row in rows])
            except RagfenceError as error:  # some may have been sent: all of them are sent again
                return dict.fromkeys((row.id for row in rows), error)
            return {}
        failures: dict[int, RagfenceError | Exception] = {}
        blocked: dict[tuple[str, str], Exception] = {}
        for row in rows:
            place = (row.topic, row.key)
            if place in blocked:
                failures[row.id] = blocked[place]
                continue
            try:
                self._call(self._to, row)
            except Exception as error:  # noqa: BLE001  # whatever the function raises is the event's failure
                failures[row.id] = blocked[place] = error
        return failures

    def _call(self, function: Callable[[OutboxRow], Any], row: OutboxRow) -> None:
        if self._fence is None:
            function(row)
            return
        operation = Operation(kind=KIND, source_type=row.topic, source_id=row.event_id)
        with self._fence.claim(
            operation, payload=row.payload, event_id=row.event_id, route=f"outbox:{row.topic}"
        ) as op:
            if op.is_new:
                seal(op, function(row))

    def _envelope(self, row: OutboxRow) -> Envelope:
        return Envelope(
            body=row.payload,
            event_id=row.event_id,
            source_id=row.key,
            dedupe_key=f"outbox:{row.event_id}",
            tenant=self._fence.tenant if self._fence is not None else "",
            route=f"outbox:{row.topic}",
            group=f"{row.topic}:{row.key}",
        )

    def _mark(self, tx: Connection, rows: Sequence[OutboxRow], failures: dict[int, Exception]) -> RelayReport:
        table, moment = self._outbox.table, now_ms(tx)
        sent = [row.id for row in rows if row.id not in failures]
        if sent:
            values = {"state": SENT, "sent_ms": moment, "error": None}
            tx.execute(sa.update(table).where(table.c.id.in_(sent), table.c.state == PENDING).values(values))
        dead, seen = 0, set[tuple[str, str]]()
        for row in rows:
            if (error := failures.get(row.id)) is None or (row.topic, row.key) in seen:
                continue
            seen.add((row.topic, row.key))  # of a key only the first failed; the others were not tried
            attempts = row.attempts if isinstance(error, QueueFull) else row.attempts + 1
            given_up = attempts >= self._max_attempts
            dead += given_up
            delay_ms = int(1000 * self._retry.pause_s(max(attempts, 1), None, self._dice))
            values = {
                "attempts": attempts,
                "state": DEAD if given_up else PENDING,
                "next_ms": moment + delay_ms,
                "error": f"{type(error).__name__}: {error}"[:2000],
            }
            tx.execute(sa.update(table).where(table.c.id == row.id, table.c.state == PENDING).values(values))
            _log.warning("event %s could not be relayed (attempt %d): %s", row.event_id, attempts, error)
        return RelayReport(len(sent), len(failures) - dead, dead)
