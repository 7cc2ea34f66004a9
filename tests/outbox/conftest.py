"""Databases with an outbox: SQLite and PostgreSQL, as a server of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from ragfence.outbox import Outbox
from ragfence.queues.sql import open_engine
from tests.servers.postgres import postgres

orders = sa.Table("orders", sa.MetaData(), sa.Column("id", sa.Integer, primary_key=True))


@pytest.fixture(scope="session")
def database() -> Iterator[str]:
    with postgres() as url:
        yield url


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.xdist_group("postgres"))])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[sa.Engine]:
    url = f"sqlite:///{tmp_path / 'app.db'}"
    if request.param == "postgres":
        url = request.getfixturevalue("database")
    opened = open_engine(url)
    with opened.begin() as tx:
        for name in ("orders", "ragfence_outbox", "ragfence_inbox", "ragfence_messages"):
            tx.execute(sa.text(f"DROP TABLE IF EXISTS {name}"))
    orders.metadata.create_all(opened)
    yield opened
    opened.dispose()


@pytest.fixture
def outbox(engine: sa.Engine) -> Outbox:
    return Outbox(engine)


def add(outbox: Outbox, key: str, number: int, topic: str = "orders") -> str:
    with outbox.engine.begin() as tx:
        return outbox.add(tx, topic=topic, key=key, payload={"number": number})
