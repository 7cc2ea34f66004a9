"""`Outbox`: events in a table, added in the transaction of the business rows.

The event is there if and only if the business rows are. Its id is a UUID, so a restored or second database never
repeats one and swallows an event.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from ragfence._extras import needs_extra
from ragfence.errors import TransportUnavailable, ValidationError
from ragfence.queues.sql import create_tables, now_ms, open_engine
from ragfence.queues.transport import encode_body

with needs_extra("sql", "An outbox"):
    import sqlalchemy as sa
    from sqlalchemy.engine import Connection, Engine
    from sqlalchemy.exc import DBAPIError, SQLAlchemyError

T = TypeVar("T")

PENDING, SENT, DEAD = "pending", "sent", "dead"
DAY_MS: Final = 24 * 3600 * 1000
KEEP_DAYS: Final = 30.0


class OutboxRow(NamedTuple):
    """An event of the outbox."""

    id: int
    event_id: str
    topic: str
    key: str
    payload: Any
    created_ms: int
    state: str
    attempts: int
    error: str


class OutboxStatus(NamedTuple):
    """How far the relay is."""

    pending: int
    dead: int
    lag_s: float
    """Age of the oldest event that was not sent; 0 if there is none."""


def outbox_table(metadata: sa.MetaData, name: str = "ragfence_outbox") -> sa.Table:
    """The table, in a `MetaData` of yours, for example for Alembic."""
    return sa.Table(
        name,
        metadata,
        # SQLite numbers rows only by a column of type INTEGER.
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
        sa.Column("event_id", sa.String(36), nullable=False, unique=True),
        sa.Column("topic", sa.String(255), nullable=False),
        sa.Column("key", sa.String(255), nullable=False),
        sa.Column("payload", sa.Text, nullable=False),
        sa.Column("state", sa.String(8), nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("created_ms", sa.BigInteger, nullable=False),
        sa.Column("next_ms", sa.BigInteger, nullable=False),
        sa.Column("sent_ms", sa.BigInteger, nullable=True),
        sa.Column("error", sa.Text, nullable=True),
        sa.Index(f"{name}_turn", "state", "next_ms", "id"),
        sa.Index(f"{name}_key", "topic", "key", "state", "id"),
    )


class Outbox:
    """Events in a table of your database.

    Args:
        engine: The engine of your database, PostgreSQL or SQLite, or its URL.
        table: The table, if it is part of your own metadata; see `outbox_table`.
        create: Whether to create the table if it is missing.

    >>> with engine.begin() as tx:  # doctest: +SKIP
    ...     tx.execute(orders.insert().values(id=7))
    ...     outbox.add(tx, topic="orders", key="7", payload={"id": 7})
    """

    def __init__(self, engine: Engine | str, *, table: sa.Table | None = None, create: bool = True) -> None:
        self.engine = open_engine(engine) if isinstance(engine, str) else engine
        if self.engine.dialect.name not in ("postgresql", "sqlite"):
            raise ValidationError(
                f"an outbox in a {self.engine.dialect.name} database is not supported", hint="use PostgreSQL or SQLite"
            )
        self.table = outbox_table(sa.MetaData()) if table is None else table
        if create:
            create_tables(self.engine, self.table.metadata, [self.table])

    def add(self, tx: Any, *, topic: str, key: str, payload: object, event_id: str = "") -> str:
        """Adds an event, in a transaction of yours. Returns its id.

        Args:
            tx: A connection or a session of SQLAlchemy. Nothing is committed here.
            topic: What kind of event it is; a relay may be for one topic.
            key: Events of one topic and key are sent in the order in which they were added.
            payload: A JSON value.
            event_id: An id of your own, if the event has one. It must be unique.
        """
        if not topic or not key or len(topic) > 255 or len(key) > 255:
            raise ValidationError("topic and key of an event have 1 to 255 characters")
        event_id = event_id or str(uuid.uuid4())
        moment = now_ms(tx)
        row = {
            "event_id": event_id,
            "topic": topic,
            "key": key,
            "payload": encode_body(payload),
            "state": PENDING,
            "attempts": 0,
            "created_ms": moment,
            "next_ms": moment,
        }
        tx.execute(sa.insert(self.table).values(row))
        return event_id

    def status(self, topic: str | None = None) -> OutboxStatus:
        table = self.table

        def count(tx: Connection) -> OutboxStatus:
            unsent = table.c.state.in_((PENDING, DEAD))
            query = sa.select(
                sa.func.count().filter(table.c.state == PENDING),
                sa.func.count().filter(table.c.state == DEAD),
                sa.func.min(table.c.created_ms).filter(table.c.state == PENDING),
            ).where(unsent)
            pending, dead, oldest_ms = tx.execute(self._of(query, topic)).one()
            lag_s = 0.0 if oldest_ms is None else max(0.0, (now_ms(tx) - oldest_ms) / 1000)
            return OutboxStatus(pending, dead, lag_s)

        return self.run("count events", count)

    def dead(self, limit: int = 100, topic: str | None = None) -> list[OutboxRow]:
        """Events that were given up. Each of them blocks the later events of its key until somebody decides."""
        query = sa.select(self.table).where(self.table.c.state == DEAD).order_by(self.table.c.id).limit(limit)
        return self.run("list dead events", lambda tx: [row_of(row) for row in tx.execute(self._of(query, topic))])

    def revive(self, event_ids: Sequence[str]) -> int:
        """Sends dead events once more. Returns how many there were."""

        def change(tx: Connection) -> int:
            values = {"state": PENDING, "attempts": 0, "next_ms": now_ms(tx), "error": None}
            return tx.execute(self._dead_ones(sa.update(self.table), event_ids).values(values)).rowcount

        return self.run("revive dead events", change)

    def drop(self, event_ids: Sequence[str]) -> int:
        """Deletes dead events, so that the later events of their keys are sent. Returns how many there were."""
        statement = self._dead_ones(sa.delete(self.table), event_ids)
        return self.run("drop dead events", lambda tx: tx.execute(statement).rowcount)

    def purge(self, keep_days: float = KEEP_DAYS, limit: int = 10_000) -> int:
        """Deletes events that were sent more than `keep_days` ago, up to `limit`. Returns how many."""

        def delete(tx: Connection) -> int:
            before = now_ms(tx) - int(keep_days * DAY_MS)
            table = self.table
            old = sa.select(table.c.id).where(table.c.state == SENT, table.c.sent_ms < before).limit(limit)
            return tx.execute(sa.delete(table).where(table.c.id.in_(old))).rowcount

        return self.run("purge sent events", delete)

    def audit(self, query: Any, *, topic: str) -> list[str]:
        """The keys that a query of your business rows returns and that no event of the topic has.

        Args:
            query: A select of SQLAlchemy, or SQL text, whose first column is the key.

        >>> outbox.audit("SELECT id FROM orders", topic="orders")  # doctest: +SKIP
        ['8']
        """
        statement = sa.text(query) if isinstance(query, str) else query

        def compare(tx: Connection) -> list[str]:
            missing: list[str] = []
            rows = tx.execute(statement)
            while page := rows.fetchmany(1000):
                keys = [str(row[0]) for row in page]
                known = sa.select(self.table.c.key).where(self.table.c.topic == topic, self.table.c.key.in_(keys))
                found = set(tx.scalars(known))
                missing += [key for key in keys if key not in found]
            return missing

        return self.run("compare business rows with events", compare)

    def rebuild(self, keys: Iterable[str], payload: Callable[[str], object], *, topic: str) -> int:
        """Adds the events that `audit` found missing, each in a transaction of its own. Returns how many."""
        added = 0
        for key in keys:
            self.run("add an event", partial(self.add, topic=topic, key=key, payload=payload(key)))
            added += 1
        return added

    def run(self, what: str, work: Callable[[Connection], T]) -> T:
        """Runs work in a transaction of its own, and translates the database's errors."""
        try:
            with self.engine.begin() as tx:
                return work(tx)
        except SQLAlchemyError as error:
            reason = error.orig if isinstance(error, DBAPIError) else error
            raise TransportUnavailable(f"cannot {what}: {reason}") from error

    def _of(self, query: Any, topic: str | None) -> Any:
        return query if topic is None else query.where(self.table.c.topic == topic)

    def _dead_ones(self, statement: Any, event_ids: Sequence[str]) -> Any:
        return statement.where(self.table.c.state == DEAD, self.table.c.event_id.in_(event_ids))


def row_of(row: Any) -> OutboxRow:
    payload = json.loads(row.payload)
    return OutboxRow(
        row.id, row.event_id, row.topic, row.key, payload, row.created_ms, row.state, row.attempts, row.error or ""
    )
