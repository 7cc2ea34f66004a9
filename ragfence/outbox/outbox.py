"""`Outbox`: events in a table, added in the transaction of the business rows.

The event is there if and only if the business rows are. Its id is a UUID, so a restored or second database never
repeats one and swallows an event.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from ragfence._extras import needs_extra
from ragfence.core.urls import show_url
from ragfence.errors import TransportUnavailable, ValidationError
from ragfence.queues.sql import READ_ONLY, clock, create_tables, now_ms, open_engine
from ragfence.queues.transport import encode_body

with needs_extra("sql", "An outbox"):
    import sqlalchemy as sa
    from sqlalchemy.engine import Connection, Engine
    from sqlalchemy.exc import (
        ArgumentError,
        DataError,
        DBAPIError,
        OperationalError,
        ProgrammingError,
        ResourceClosedError,
        SQLAlchemyError,
        StatementError,
        UnboundExecutionError,
    )

T = TypeVar("T")

PENDING, SENT, DEAD = "pending", "sent", "dead"
DAY_MS: Final = 24 * 3600 * 1000
KEEP_DAYS: Final = 30.0
PAGE: Final = 1000
"""Rows of one statement."""


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


def outbox_table(metadata: sa.MetaData, name: str = "ragfence_outbox", *, schema: str | None = None) -> sa.Table:
    """The table, in a `MetaData` of yours, for example for Alembic. A schema must exist before the table is created."""
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
        schema=schema,
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
            event_id: An id of your own, if the event has one. It must be unique, and have at most 36 characters.

        The order of a key is that of the calls. If two transactions add events of one key at the same time, and nothing
        else makes one wait for the other, their events have no order.
        """
        dialect = _dialect_of(tx)
        row = self._row(dialect, topic, key, payload, event_id)
        tx.execute(sa.insert(self.table).values(row))
        return str(row["event_id"])

    def _row(self, dialect: str, topic: str, key: str, payload: object, event_id: str = "") -> dict[str, Any]:
        _check_text("the topic of an event", topic, 255)
        _check_text("the key of an event", key, 255)
        if event_id:
            _check_text("the id of an event", event_id, 36)
        moment = clock(dialect)  # by the database: its clients' clocks may differ
        return {
            "event_id": event_id or str(uuid.uuid4()),
            "topic": topic,
            "key": key,
            "payload": encode_body(payload),
            "state": PENDING,
            "attempts": 0,
            "created_ms": moment,
            "next_ms": moment,
        }

    def exists(self) -> bool:
        """Whether the table is there; see `create`."""
        table = self.table

        def look(tx: Connection) -> bool:
            return bool(sa.inspect(tx).has_table(table.name, schema=table.schema))

        return self.run("look for the table", look, read_only=True)

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

        return self.run("count events", count, read_only=True)

    def dead(self, limit: int = 100, topic: str | None = None) -> list[OutboxRow]:
        """Events that were given up. Each of them blocks the later events of its key until somebody decides."""
        query = sa.select(self.table).where(self.table.c.state == DEAD).order_by(self.table.c.id).limit(limit)
        query = self._of(query, topic)
        return self.run("list dead events", lambda tx: [row_of(row) for row in tx.execute(query)], read_only=True)

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
            # Of a row that was sent, `next_ms` is when; and it is in an index.
            aged = (table.c.state == SENT, table.c.next_ms < before, table.c.sent_ms < before)
            old = list(tx.scalars(sa.select(table.c.id).where(*aged).order_by(table.c.next_ms).limit(limit)))
            # By their ids: as a subquery, PostgreSQL would read the whole table for them.
            pages = (old[first : first + PAGE] for first in range(0, len(old), PAGE))
            return sum(tx.execute(sa.delete(table).where(table.c.id.in_(page))).rowcount for page in pages)

        return self.run("purge sent events", delete)

    def audit(self, query: Any, *, topic: str, limit: int | None = None) -> list[str]:
        """The keys that a query of your business rows returns and that no event of the topic has.

        Nothing is written, and nobody waits for it. Events that were purged are gone: leave out business rows that are
        older than `keep_days`, or they are named as well.

        Args:
            query: A select of SQLAlchemy, or SQL text, whose first column is the key.
            limit: Return at most this many keys.

        Raises:
            ValidationError: the database does not understand the query.

        >>> outbox.audit("SELECT id FROM orders", topic="orders")  # doctest: +SKIP
        ['8']
        """
        statement = sa.text(query) if isinstance(query, str) else query
        table = self.table

        def compare(tx: Connection) -> list[str]:
            missing: dict[str, None] = {}
            try:
                rows = tx.execute(statement, execution_options={"stream_results": True})
                if not rows.returns_rows:
                    raise ValidationError("the query returns no rows", hint="it must be a SELECT of the keys")
                while page := rows.fetchmany(PAGE):
                    keys = [str(row[0]) for row in page]
                    # One look into the index for each, however many events a key has.
                    asked = sa.values(sa.column("key", sa.String), name="asked").data([(key,) for key in keys]).cte()
                    has_event = sa.exists().where(table.c.topic == topic, table.c.key == asked.c.key)
                    without = set(tx.scalars(sa.select(asked.c.key).where(~has_event)))
                    missing |= dict.fromkeys(key for key in keys if key in without)
                    if limit is not None and len(missing) >= limit:
                        rows.close()
                        return list(missing)[:limit]
            except (ArgumentError, ProgrammingError, DataError, ResourceClosedError) as error:
                raise _refused_query(error) from error
            except OperationalError as error:
                if self.engine.dialect.name == "sqlite" and "locked" not in str(error.orig):
                    raise _refused_query(error) from error  # as SQLite says "no such table"
                raise
            except DBAPIError:
                raise
            except StatementError as error:
                raise _refused_query(error) from error
            return list(missing)

        return self.run("compare business rows with events", compare, read_only=True)

    def rebuild(self, keys: Iterable[str], payload: Callable[[str], object], *, topic: str) -> int:
        """Adds the events that `audit` found missing, each in a transaction of its own. Returns how many.

        A key that has an event by now gets no other one, also if two processes rebuild at the same time.
        """
        return sum(self._add_if_missing(topic, key, payload(key)) for key in keys)

    def _add_if_missing(self, topic: str, key: str, payload: object) -> bool:
        table, dialect = self.table, self.engine.dialect.name
        row = self._row(dialect, topic, key, payload)
        known = sa.exists().where(table.c.topic == topic, table.c.key == key)
        values = [
            value if isinstance(value, sa.ColumnElement) else sa.literal(value, table.c[name].type)
            for name, value in row.items()
        ]
        statement = sa.insert(table).from_select(list(row), sa.select(*values).where(~known))

        def add(tx: Connection) -> bool:
            if dialect == "postgresql":  # its statements do not see each other's rows before they are committed
                one = sa.func.hashtextextended(f"{table.fullname}:{topic}:{key}", 0)
                tx.execute(sa.select(sa.func.pg_advisory_xact_lock(one)))
            return tx.execute(statement.returning(table.c.id)).first() is not None

        return self.run("add an event", add)

    def run(self, what: str, work: Callable[[Connection], T], *, read_only: bool = False) -> T:
        """Runs work in a transaction of its own, and translates the database's errors."""
        try:
            with self.engine.connect() as connection:
                if not read_only:
                    with connection.begin():
                        return work(connection)
                if self.engine.dialect.name == "postgresql":
                    connection.execution_options(postgresql_readonly=True)
                    return work(connection)
                connection.execution_options(**{READ_ONLY: True})
                connection.exec_driver_sql("PRAGMA query_only = ON")
                try:
                    return work(connection)
                finally:
                    connection.rollback()
                    connection.exec_driver_sql("PRAGMA query_only = OFF")
        except SQLAlchemyError as error:
            reason = error.orig if isinstance(error, DBAPIError) else error
            place = show_url(self.engine.url.render_as_string(hide_password=True))
            raise TransportUnavailable(f"cannot {what}, {place}: {reason}") from error

    def _of(self, query: Any, topic: str | None) -> Any:
        return query if topic is None else query.where(self.table.c.topic == topic)

    def _dead_ones(self, statement: Any, event_ids: Sequence[str]) -> Any:
        return statement.where(self.table.c.state == DEAD, self.table.c.event_id.in_(event_ids))


def row_of(row: Any) -> OutboxRow:
    payload = json.loads(row.payload)
    return OutboxRow(
        row.id, row.event_id, row.topic, row.key, payload, row.created_ms, row.state, row.attempts, row.error or ""
    )


def _dialect_of(tx: Any) -> str:
    """The name of the dialect of a connection or a session."""
    if isinstance(tx, sa.engine.Engine) or not hasattr(tx, "execute") or not hasattr(tx, "in_transaction"):
        raise ValidationError(
            f"{type(tx).__name__} is not a transaction",
            hint="pass the connection of `with engine.begin() as tx`, or a Session",
        )
    if hasattr(tx, "run_sync"):
        raise ValidationError(
            f"{type(tx).__name__} is asynchronous", hint="await tx.run_sync(lambda sync: outbox.add(sync, ...))"
        )
    if not hasattr(tx, "get_bind"):
        return str(tx.dialect.name)
    try:
        return str(tx.get_bind().dialect.name)
    except UnboundExecutionError as error:
        raise ValidationError(
            "the session has several engines, and the outbox could be in any of them",
            hint="pass session.connection(bind_arguments={'mapper': Model}), with a model of the outbox's database",
        ) from error


def _check_text(what: str, text: object, longest: int) -> None:
    if not isinstance(text, str) or not 1 <= len(text) <= longest or "\0" in text:
        raise ValidationError(f"{what} must have 1 to {longest} characters, none of them NUL")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValidationError(f"{what} is not valid Unicode") from error


def _refused_query(error: Exception) -> ValidationError:
    reason = error.orig if isinstance(error, DBAPIError) else error
    first = next(iter(str(reason).splitlines()), type(error).__name__)
    return ValidationError(f"the database refuses the query: {first}", hint="for example SELECT id FROM orders")
