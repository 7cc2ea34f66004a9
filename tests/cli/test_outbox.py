"""`ragfence outbox`: the events of a database, relayed, listed and repaired from the command line."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import sqlalchemy as sa

from ragfence.outbox import Outbox
from ragfence.outbox.outbox import outbox_table
from ragfence.queues.sql import SqlTransport, open_engine
from tests.cli.conftest import run
from tests.outbox.conftest import add, orders

DATABASE = "sqlite:///app.db"


@pytest.fixture
def outbox(tmp_path: Path) -> Outbox:
    engine = open_engine(f"sqlite:///{tmp_path / 'app.db'}")
    orders.metadata.create_all(engine)
    return Outbox(engine)


def _kill(outbox: Outbox, event_id: str) -> None:
    with outbox.engine.begin() as tx:
        tx.execute(sa.update(outbox.table).where(outbox.table.c.event_id == event_id).values(state="dead", error="no"))


def test_events_are_relayed_into_a_queue(outbox: Outbox, tmp_path: Path) -> None:
    add(outbox, "a", 1)
    add(outbox, "a", 2, "invoices")
    to = ("--to", "sqlite:///queue.db?queue=orders")
    done = run("outbox", "relay", DATABASE, *to, "--topic", "orders", "--once", "--json")
    assert (done.exit_code, json.loads(done.stdout)) == (0, {"sent": 1, "failed": 0, "dead": 0})
    (message,) = SqlTransport(f"sqlite:///{tmp_path / 'queue.db'}", "orders").receive(10, 0)
    assert message.body == {"number": 1}
    assert run("outbox", "relay", DATABASE, *to, "--once").stdout == "1 event sent, 0 failed, 0 dead\n"


def test_a_relay_ends_cleanly_when_it_is_told_to(outbox: Outbox, tmp_path: Path) -> None:
    add(outbox, "a", 1)
    words = ["outbox", "relay", DATABASE, "--to", "sqlite:///queue.db?queue=q", "--json"]
    relay = subprocess.Popen([sys.executable, "-m", "ragfence", *words], cwd=tmp_path, stdout=subprocess.PIPE)
    with relay:
        deadline = time.monotonic() + 60
        while outbox.status().pending and time.monotonic() < deadline:
            time.sleep(0.05)
        relay.send_signal(signal.SIGTERM)
        said, _ = relay.communicate(timeout=60)
    assert relay.returncode == 0
    assert json.loads(said) == {"sent": 1, "failed": 0, "dead": 0}


def test_the_status_fails_if_the_oldest_event_is_too_old(outbox: Outbox) -> None:
    add(outbox, "a", 1)
    assert run("outbox", "status", DATABASE).exit_code == 0
    with outbox.engine.begin() as tx:
        tx.execute(sa.update(outbox.table).values(created_ms=1))
    done = run("outbox", "status", DATABASE, "--json")
    found = json.loads(done.stdout)
    assert (done.exit_code, found["pending"], found["dead"], found["late"]) == (1, 1, 0, True)
    assert "too long" in run("outbox", "status", DATABASE).stdout


def test_dead_events_are_listed_revived_and_dropped(outbox: Outbox) -> None:
    first, second = add(outbox, "a", 1), add(outbox, "b", 2)
    _kill(outbox, first)
    _kill(outbox, second)
    assert first in run("outbox", "dead", "list", DATABASE).stdout
    assert [each["key"] for each in json.loads(run("outbox", "dead", "list", DATABASE, "--json").stdout)] == ["a", "b"]
    assert run("outbox", "dead", "revive", DATABASE, first).stdout == "1 event revived\n"
    refused = run("outbox", "dead", "drop", DATABASE, "--all")
    assert (refused.exit_code, outbox.status().dead) == (1, 1)
    assert "Nothing was deleted" in refused.stderr
    assert run("outbox", "dead", "drop", DATABASE, "--all", "--yes").stdout == "1 event dropped\n"
    assert outbox.status()[:2] == (1, 0)
    assert run("outbox", "dead", "list", DATABASE).stdout == "no event is dead\n"
    assert run("outbox", "dead", "revive", DATABASE, first).exit_code == 1
    assert run("outbox", "dead", "drop", DATABASE, first, "--all").exit_code == 2


def test_old_events_are_deleted(outbox: Outbox) -> None:
    add(outbox, "a", 1)
    run("outbox", "relay", DATABASE, "--to", "sqlite:///queue.db?queue=q", "--once")
    assert run("outbox", "purge", DATABASE).stdout == "0 events deleted\n"
    time.sleep(0.01)
    assert run("outbox", "purge", DATABASE, "--keep-days", "0").stdout == "1 event deleted\n"


def test_business_rows_without_an_event_are_listed(outbox: Outbox) -> None:
    with outbox.engine.begin() as tx:
        tx.execute(orders.insert(), [{"id": 1}, {"id": 2}])
        outbox.add(tx, topic="orders", key="1", payload=1)
    done = run("outbox", "audit", "SELECT id FROM orders", DATABASE, "--topic", "orders", "--json")
    assert (done.exit_code, json.loads(done.stdout)) == (1, {"missing": ["2"]})
    done = run("outbox", "audit", "SELECT id FROM missing", DATABASE, "--topic", "orders")
    assert (done.exit_code, "no such table: missing" in done.stderr) == (1, True)


def test_a_table_of_another_name(outbox: Outbox) -> None:
    other = Outbox(outbox.engine, table=outbox_table(sa.MetaData(), "events"))
    add(other, "a", 1)
    assert json.loads(run("outbox", "status", DATABASE, "--table", "events", "--json").stdout)["pending"] == 1


def test_what_is_mistyped_is_not_created(tmp_path: Path, outbox: Outbox) -> None:
    done = run("outbox", "status", "sqlite:///typo.db")
    assert (done.exit_code, "there is no database" in done.stderr) == (1, True)
    assert not (tmp_path / "typo.db").exists()
    done = run("outbox", "status", DATABASE, "--table", "typo")
    assert (done.exit_code, "has no table typo" in done.stderr) == (1, True)
    assert run("outbox", "status").exit_code == 2
    assert run("outbox", "status", DATABASE, "--database-env", "X").exit_code == 2


def test_no_password_is_shown(monkeypatch: pytest.MonkeyPatch, outbox: Outbox) -> None:
    url = "postgresql://app:hunter2@127.0.0.1:1/db"
    done = run("outbox", "status", url)
    assert done.exit_code == 1
    assert "ps" in done.stderr
    assert "hunter2" not in done.output + done.stderr
    monkeypatch.setenv("DATABASE", url)
    done = run("outbox", "relay", "--database-env", "DATABASE", "--to", "sqlite:///queue.db?queue=q", "--once")
    assert done.exit_code == 1
    assert "hunter2" not in done.output + done.stderr
    assert "WARNING" not in done.stderr
    assert run("outbox", "status", "--database-env", url).exit_code == 2
    assert "hunter2" not in run("outbox", "status", "--database-env", url).stderr
