"""`Inbox`: which events were applied, in the same transaction as the rows that applying them wrote.

A consumer that dies between its own commit and ragfence's seal gets the event again; its inbox knows it.
"""

from __future__ import annotations

from typing import Any, Final

from ragfence._extras import needs_extra
from ragfence.core.canonical import canonical_payload
from ragfence.core.hashing import digest
from ragfence.errors import Conflict, ValidationError
from ragfence.queues.sql import create_tables, now_ms, open_engine

with needs_extra("sql", "An inbox"):
    import sqlalchemy as sa
    from sqlalchemy.dialects import postgresql, sqlite
    from sqlalchemy.engine import Engine

DAY_MS: Final = 24 * 3600 * 1000
KEEP_DAYS: Final = 30.0


def inbox_table(metadata: sa.MetaData, name: str = "ragfence_inbox") -> sa.Table:
    """The table, in a `MetaData` of yours, for example for Alembic."""
    return sa.Table(
        name,
        metadata,
        sa.Column("source", sa.String(255), primary_key=True),
        sa.Column("event_id", sa.String(255), primary_key=True),
        sa.Column("payload_hash", sa.String(64), nullable=False),
        sa.Column("applied_ms", sa.BigInteger, nullable=False),
        sa.Index(f"{name}_age", "applied_ms"),
    )


class Inbox:
    """Events that were applied to your database.

    >>> with engine.begin() as tx:  # doctest: +SKIP
    ...     if inbox.first(tx, event_id, payload=event):
    ...         tx.execute(orders.insert().values(...))
    """

    def __init__(self, engine: Engine | str, *, table: sa.Table | None = None, create: bool = True) -> None:
        self.engine = open_engine(engine) if isinstance(engine, str) else engine
        if self.engine.dialect.name not in ("postgresql", "sqlite"):
            raise ValidationError(
                f"an inbox in a {self.engine.dialect.name} database is not supported", hint="use PostgreSQL or SQLite"
            )
        self.table = inbox_table(sa.MetaData()) if table is None else table
        if create:
            create_tables(self.engine, self.table.metadata, [self.table])

    def first(self, tx: Any, event_id: str, *, source: str = "", payload: object = None) -> bool:
        """Whether this is the first time; from then on the event is known, if the transaction is committed.

        A transaction that applies the same event at the same time waits for the other one to end.

        Args:
            tx: A connection or a session of SQLAlchemy, with the rows that the event writes.
            source: Where event ids are unique.
            payload: Compared with that of the first time.

        Raises:
            Conflict: the event is known with another payload; it must not be applied.
        """
        if not event_id or len(event_id) > 255 or len(source) > 255:
            raise ValidationError("event_id must have 1 to 255 characters, and source at most 255")
        table = self.table
        payload_hash = digest("ragfence/inbox/1", canonical_payload(payload)).hex()
        make = postgresql.insert if self.engine.dialect.name == "postgresql" else sqlite.insert
        row = {"source": source, "event_id": event_id, "payload_hash": payload_hash, "applied_ms": now_ms(tx)}
        added = tx.execute(make(table).values(row).on_conflict_do_nothing().returning(table.c.event_id)).first()
        if added is not None:
            return True
        known = tx.execute(
            sa.select(table.c.payload_hash).where(table.c.source == source, table.c.event_id == event_id)
        ).scalar_one()
        if known != payload_hash:
            raise Conflict(f"event {event_id!r} was applied with another payload", key=event_id)
        return False

    def purge(self, keep_days: float = KEEP_DAYS, limit: int = 10_000) -> int:
        """Forgets events that were applied more than `keep_days` ago, up to `limit`. Returns how many."""
        table = self.table
        with self.engine.begin() as tx:
            before = now_ms(tx) - int(keep_days * DAY_MS)
            old = sa.select(table.c.source, table.c.event_id).where(table.c.applied_ms < before).limit(limit)
            statement = sa.delete(table).where(sa.tuple_(table.c.source, table.c.event_id).in_(old))
            return tx.execute(statement).rowcount
