"""A queue in a table: PostgreSQL for many machines, SQLite for one, without any other server.

A message is one row. Receiving takes rows that no other consumer holds (`SKIP LOCKED` on PostgreSQL; SQLite has one
writer at a time), hides them until a moment on the database's clock, and gives each delivery a handle of its own;
every later call compares the handle. What is waiting for its turn is found by an index, so no call but `depth`
takes longer with more messages.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from ragfence._extras import needs_extra
from ragfence.core.urls import show_url
from ragfence.errors import QueueFull, TransportUnavailable, ValidationError
from ragfence.queues.transport import DeadLetter, Depth, Envelope, Message, check_texts, decode_body, encode_body

with needs_extra("sql", "A queue in a SQL database"):
    import sqlalchemy as sa
    from sqlalchemy.engine import Connection, Engine
    from sqlalchemy.exc import DBAPIError, IntegrityError, ProgrammingError, SQLAlchemyError

T = TypeVar("T")

VISIBILITY_S: Final = 60.0
HIGH_WATER: Final = 1_000_000
DEPTH_SECONDS: Final = 1.0
"""How long a count is believed when a message is sent."""
MAX_LANES: Final = 64
"""How many tenants one call of `receive` serves at most. The next call begins with the next tenant."""
LONGEST: Final = {"tenant": 256, "group": 256}
"""The columns of these fields are in indexes, and bounded."""
RETRY_AFTER_MS: Final = 5_000
READ_ONLY: Final = "ragfence_read_only"
"""The execution option of a connection that takes no write lock of SQLite."""
_CHANNEL: Final = "ragfence_queue"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5

metadata = sa.MetaData()
messages = sa.Table(
    "ragfence_messages",
    metadata,
    # SQLite numbers rows only by a column of type INTEGER.
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
    sa.Column("queue", sa.String(128), nullable=False),
    sa.Column("lane", sa.String(256), nullable=False),
    sa.Column("dead", sa.Boolean, nullable=False, default=False),
    sa.Column("visible_ms", sa.BigInteger, nullable=False),
    sa.Column("grp", sa.String(256), nullable=False),
    sa.Column("message_id", sa.String(36), nullable=False, unique=True),
    sa.Column("handle", sa.String(36), nullable=True),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("sent_ms", sa.BigInteger, nullable=False),
    sa.Column("body", sa.Text, nullable=False),
    sa.Column("event_id", sa.Text, nullable=False),
    sa.Column("source_id", sa.Text, nullable=False),
    sa.Column("revision", sa.Text, nullable=False),
    sa.Column("index_hash", sa.Text, nullable=False),
    sa.Column("dedupe_key", sa.Text, nullable=False),
    sa.Column("route", sa.Text, nullable=False),
    sa.Column("reason", sa.Text, nullable=True),
    sa.Column("died_ms", sa.BigInteger, nullable=True),
    sa.Index("ragfence_messages_turn", "queue", "dead", "lane", "visible_ms", "id"),
    sa.Index("ragfence_messages_group", "queue", "grp", "dead", "id"),
    sa.Index("ragfence_messages_handle", "handle"),
)
"""One table for all queues of a database. Create it by a migration if the consumer may not create tables."""


class SqlTransport:
    """A queue in a SQL database.

    Args:
        engine: An engine of SQLAlchemy, or a URL. SQLite is for the processes of one machine.
        queue: Name of the queue.
        visibility_s: How long a delivered message is hidden from other consumers.
        high_water: With more messages than this, `send` raises `QueueFull`.

    >>> queue = SqlTransport("sqlite:///queue.db")  # doctest: +SKIP
    """

    def __init__(
        self,
        engine: Engine | str,
        queue: str = "default",
        *,
        visibility_s: float = VISIBILITY_S,
        high_water: int = HIGH_WATER,
    ) -> None:
        if not queue or len(queue) > 128:
            raise ValidationError("the name of a queue has 1 to 128 characters")
        self._owns_engine = isinstance(engine, str)
        self._engine = open_engine(engine) if isinstance(engine, str) else engine
        dialect = self._engine.dialect.name
        if dialect not in ("postgresql", "sqlite"):
            raise ValidationError(f"a queue in a {dialect} database is not supported", hint="use PostgreSQL or SQLite")
        self._postgres = dialect == "postgresql"
        self._queue, self._visibility_s, self._high_water = queue, visibility_s, high_water
        self._lane_after: str | None = None
        self._counted: tuple[float, int] = (0.0, 0)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        create_tables(self._engine, metadata)

    @property
    def url(self) -> str:
        return show_url(self._engine.url.render_as_string(hide_password=True))

    @property
    def name(self) -> str:
        return self._queue

    @property
    def visibility_s(self) -> float:
        return self._visibility_s

    def send(self, envelopes: Sequence[Envelope], *, delay_s: float = 0.0) -> list[str]:
        if not envelopes:
            return []
        rows = [self._row(envelope) for envelope in envelopes]
        self._refuse_above_high_water(len(rows))

        def insert(tx: Connection) -> None:
            moment = now_ms(tx)
            moments = {"sent_ms": moment, "visible_ms": moment + int(delay_s * 1000)}
            tx.execute(sa.insert(messages), [row | moments for row in rows])
            if self._postgres:
                tx.execute(sa.select(sa.func.pg_notify(_CHANNEL, self._queue)))

        self._run("send", insert)
        with self._lock:
            self._counted = (self._counted[0], self._counted[1] + len(rows))
        return [row["message_id"] for row in rows]

    def receive(self, limit: int, wait_s: float) -> list[Message]:
        if limit < 1:
            raise ValidationError(f"limit must be at least 1, not {limit}")
        give_up_at = time.monotonic() + wait_s
        pause_s = _FIRST_PAUSE_S
        while True:
            found = self._run("receive", lambda tx: self._take(tx, limit))
            left_s = give_up_at - time.monotonic()
            if found or left_s <= 0 or self._closed.is_set():
                return found
            self._pause(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def ack(self, messages_: Sequence[Message]) -> list[bool]:
        handles = [message.handle for message in messages_]
        statement = sa.delete(messages).where(messages.c.handle.in_(handles)).returning(messages.c.handle)
        gone = set(self._run("ack", lambda tx: tx.scalars(statement).all())) if handles else set()
        with self._lock:
            self._counted = (self._counted[0], max(0, self._counted[1] - len(gone)))
        return [handle in gone for handle in handles]

    def retry(self, message: Message, delay_s: float, *, counted: bool = True) -> bool:
        def give_back(tx: Connection) -> bool:
            visible_ms = now_ms(tx) + int(delay_s * 1000)
            attempt = messages.c.attempt if counted else messages.c.attempt - 1
            values = {"handle": None, "visible_ms": visible_ms, "attempt": attempt}
            return self._update(tx, [message], values) == {message.handle}

        return self._run("retry", give_back)

    def extend(self, messages_: Sequence[Message], visibility_s: float | None = None) -> list[bool]:
        seconds = self._visibility_s if visibility_s is None else visibility_s

        def hide(tx: Connection) -> set[str]:
            return self._update(tx, messages_, {"visible_ms": now_ms(tx) + int(seconds * 1000)})

        kept = self._run("extend", hide) if messages_ else set()
        return [message.handle in kept for message in messages_]

    def dead(self, message: Message, reason: str) -> bool:
        def bury(tx: Connection) -> bool:
            values = {"dead": True, "handle": None, "reason": reason[:2000], "died_ms": now_ms(tx)}
            return self._update(tx, [message], values) == {message.handle}

        return self._run("bury", bury)

    def depth(self) -> Depth:
        """Counts the rows of the queue: its cost grows with them."""

        def count(tx: Connection) -> Depth:
            moment = now_ms(tx)
            mine = messages.c.queue == self._queue
            hidden = sa.and_(messages.c.handle.is_not(None), messages.c.visible_ms > moment)
            query = sa.select(
                sa.func.count().filter(~messages.c.dead),
                sa.func.count().filter(sa.and_(~messages.c.dead, hidden)),
                sa.func.count().filter(messages.c.dead),
                sa.func.min(messages.c.sent_ms).filter(~messages.c.dead),
            ).where(mine)
            live, in_flight, dead, oldest_ms = tx.execute(query).one()
            age_s = None if oldest_ms is None else max(0.0, (moment - oldest_ms) / 1000)
            return Depth(live - in_flight, in_flight, dead, age_s)

        return self._run("count", count)

    def dead_letters(self, limit: int = 100, after: str = "") -> list[DeadLetter]:
        query = sa.select(messages).where(messages.c.queue == self._queue, messages.c.dead)
        if after:
            place = sa.select(messages.c.id).where(messages.c.message_id == after).scalar_subquery()
            query = query.where(messages.c.id > sa.func.coalesce(place, 0))
        query = query.order_by(messages.c.id).limit(limit)
        rows = self._run("list dead letters", lambda tx: tx.execute(query).all())
        return [DeadLetter(_message(row), row.reason or "", row.died_ms) for row in rows]

    def replay_dead(self, message_ids: Sequence[str]) -> int:
        def revive(tx: Connection) -> int:
            values = {"dead": False, "attempt": 0, "visible_ms": now_ms(tx), "reason": None, "died_ms": None}
            return tx.execute(sa.update(messages).where(*self._dead(message_ids)).values(values)).rowcount

        return self._run("replay dead letters", revive)

    def drop_dead(self, message_ids: Sequence[str]) -> int:
        statement = sa.delete(messages).where(*self._dead(message_ids))
        return self._run("drop dead letters", lambda tx: tx.execute(statement).rowcount)

    def close(self) -> None:
        self._closed.set()
        if self._owns_engine:
            self._engine.dispose()

    def _row(self, envelope: Envelope) -> dict[str, Any]:
        body = encode_body(envelope.body)
        check_texts(envelope, longest=LONGEST)
        return {
            "queue": self._queue,
            "lane": envelope.tenant,
            "dead": False,
            "grp": envelope.group,
            "message_id": str(uuid.uuid4()),
            "attempt": 0,
            "body": body,
            "event_id": envelope.event_id or str(uuid.uuid4()),
            "source_id": envelope.source_id,
            "revision": envelope.revision,
            "index_hash": envelope.index_hash,
            "dedupe_key": envelope.dedupe_key,
            "route": envelope.route,
        }

    def _refuse_above_high_water(self, more: int) -> None:
        with self._lock:
            counted_at, known = self._counted
        if known + more > self._high_water or time.monotonic() - counted_at > DEPTH_SECONDS:
            # Not more than is needed to know: a full queue is counted as far as its high-water mark.
            counted = sa.select(messages.c.id).where(messages.c.queue == self._queue, ~messages.c.dead)
            query = sa.select(sa.func.count()).select_from(counted.limit(self._high_water + 1).subquery())
            known = self._run("count", lambda tx: tx.scalar(query)) or 0
            with self._lock:
                self._counted = (time.monotonic(), known)
        if known + more > self._high_water:
            raise QueueFull(
                f"queue {self._queue!r} holds {known} messages, its limit is {self._high_water}",
                retry_after_ms=RETRY_AFTER_MS,
            )

    def _take(self, tx: Connection, limit: int) -> list[Message]:
        moment = now_ms(tx)
        lanes = self._lanes(tx)
        ids: list[int] = []
        for at, lane in enumerate(lanes):
            # What one lane does not use is left to the others.
            share = -(-(limit - len(ids)) // (len(lanes) - at))
            if share > 0:
                ids += tx.scalars(self._turn(lane, moment, share)).all()
        if len(lanes) > 1:
            for lane in lanes:
                if len(ids) < limit:
                    ids += tx.scalars(self._turn(lane, moment, limit - len(ids), without=ids)).all()
            with self._lock:
                self._lane_after = lanes[0]
        if not ids:
            return []
        hidden_ms = moment + int(self._visibility_s * 1000)
        handles = {row_id: str(uuid.uuid4()) for row_id in ids}
        hide = (
            sa.update(messages)
            .where(messages.c.id.in_(ids))
            .values(
                visible_ms=hidden_ms,
                attempt=messages.c.attempt + 1,
                handle=sa.case(handles, value=messages.c.id),
            )
            .returning(messages)
        )
        rows = {row.id: row for row in tx.execute(hide)}
        return [_message(rows[row_id]) for row_id in ids]

    def _lanes(self, tx: Connection) -> list[str]:
        """The tenants that have messages, from the one after the last that began. One index look-up for each."""
        with self._lock:
            start = self._lane_after
        found: list[str] = []
        for after, up_to in ((None, None),) if start is None else ((start, None), (None, start)):
            lane: str | None = after
            while len(found) < MAX_LANES and (lane := tx.scalar(self._lane_behind(lane, up_to))) is not None:
                found.append(lane)
        return found

    def _lane_behind(self, lane: str | None, up_to: str | None) -> Any:
        query = sa.select(sa.func.min(messages.c.lane)).where(messages.c.queue == self._queue, ~messages.c.dead)
        if lane is not None:
            query = query.where(messages.c.lane > lane)
        return query if up_to is None else query.where(messages.c.lane <= up_to)

    def _turn(self, lane: str, moment: int, limit: int, without: Sequence[int] = ()) -> Any:
        """The oldest visible messages of a lane; of a group only its oldest, and only if nobody holds it."""
        older = messages.alias("older")
        first_of_group = ~sa.exists().where(
            older.c.queue == self._queue, older.c.grp == messages.c.grp, ~older.c.dead, older.c.id < messages.c.id
        )
        query = (
            sa.select(messages.c.id)
            .where(
                messages.c.queue == self._queue,
                ~messages.c.dead,
                messages.c.lane == lane,
                messages.c.visible_ms <= moment,
                sa.or_(messages.c.grp == "", first_of_group),
            )
            .order_by(messages.c.visible_ms, messages.c.id)
            .limit(limit)
            .with_for_update(skip_locked=True)
        )
        return query.where(messages.c.id.not_in(without)) if without else query

    def _update(self, tx: Connection, messages_: Sequence[Message], values: dict[str, Any]) -> set[str]:
        handles = [message.handle for message in messages_]
        # The handle is compared first: `retry` and `dead` end it.
        held = sa.select(messages.c.id, messages.c.handle).where(messages.c.handle.in_(handles)).with_for_update()
        rows = tx.execute(held).all()
        if rows:
            tx.execute(sa.update(messages).where(messages.c.id.in_([row.id for row in rows])).values(values))
        return {row.handle for row in rows}

    def _dead(self, message_ids: Sequence[str]) -> tuple[Any, ...]:
        return messages.c.queue == self._queue, messages.c.dead, messages.c.message_id.in_(message_ids)

    def _pause(self, seconds: float) -> None:
        if not self._postgres:
            self._closed.wait(seconds)
            return
        with contextlib.suppress(SQLAlchemyError, OSError), self._engine.connect() as connection:
            raw: Any = connection.execution_options(isolation_level="AUTOCOMMIT").connection.dbapi_connection
            if not hasattr(raw, "notifies"):  # not psycopg 3: poll
                self._closed.wait(seconds)
                return
            connection.execute(sa.text(f"LISTEN {_CHANNEL}"))
            try:
                for _ in raw.notifies(timeout=seconds, stop_after=1):
                    pass
            finally:
                connection.execute(sa.text(f"UNLISTEN {_CHANNEL}"))

    def _run(self, what: str, work: Callable[[Connection], T]) -> T:
        if self._closed.is_set():
            raise TransportUnavailable(f"queue {self._queue!r} is closed")
        try:
            with self._engine.begin() as tx:
                return work(tx)
        except SQLAlchemyError as error:
            reason = error.orig if isinstance(error, DBAPIError) else error
            raise TransportUnavailable(f"cannot {what}, {self.url}: {reason}") from error


def open_engine(url: str) -> Engine:
    """An engine whose SQLite waits for other writers instead of failing, and begins by taking the write lock."""
    try:
        parsed = sa.make_url(url)
    except SQLAlchemyError as error:
        raise ValidationError("the URL of the database cannot be read") from error
    if parsed.drivername == "postgresql":
        parsed = parsed.set(drivername="postgresql+psycopg")
    if parsed.get_backend_name() != "sqlite":
        with needs_extra("sql", "A queue in PostgreSQL"):
            return sa.create_engine(parsed, pool_pre_ping=True)
    engine = sa.create_engine(parsed, connect_args={"timeout": 30})

    @sa.event.listens_for(engine, "connect")
    def configure(connection: Any, record: Any) -> None:
        connection.isolation_level = None  # or sqlite3 begins transactions by itself, and too late
        for pragma in ("journal_mode=WAL", "synchronous=FULL"):
            connection.execute(f"PRAGMA {pragma}")

    @sa.event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        reads = connection.get_execution_options().get(READ_ONLY, False)
        connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")

    return engine


def now_ms(tx: Any) -> int:
    """The time by the database's clock: those of its clients may differ. `tx` is a connection or a session."""
    dialect = tx.get_bind().dialect if hasattr(tx, "get_bind") else tx.dialect
    return int(tx.scalar(sa.select(clock(dialect.name))) or 0)


def clock(dialect: str) -> sa.ColumnElement[int]:
    """An expression that is the time by the database's clock, in milliseconds, for a statement that needs it."""
    if dialect == "postgresql":
        return sa.literal_column("(extract(epoch FROM clock_timestamp()) * 1000)::bigint", sa.BigInteger)
    return sa.literal_column("CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)", sa.BigInteger)


def create_tables(engine: Engine, metadata: sa.MetaData, tables: Sequence[sa.Table] | None = None) -> None:
    """Creates tables that are missing, also while other processes do the same."""
    for attempt in range(3):
        try:
            metadata.create_all(engine, tables)
        except (IntegrityError, ProgrammingError):  # PostgreSQL: another process created one of them meanwhile
            if attempt == 2:
                raise
        except SQLAlchemyError as error:
            reason = error.orig if isinstance(error, DBAPIError) else error
            raise TransportUnavailable(f"cannot create the tables of the queue: {reason}") from error
        else:
            return


def _message(row: Any) -> Message:
    return Message(
        body=decode_body(row.body),
        event_id=row.event_id,
        source_id=row.source_id,
        revision=row.revision,
        index_hash=row.index_hash,
        dedupe_key=row.dedupe_key,
        tenant=row.lane,
        route=row.route,
        group=row.grp,
        message_id=row.message_id,
        handle=row.handle or "",
        attempt=row.attempt,
        sent_ms=row.sent_ms,
    )
