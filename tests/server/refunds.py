"""The example: refunds through a payment gateway, each with an entry in a ledger, and their reversal.

The gateway and the ledger are files of SQLite, so that they outlive a server that is killed. `uvicorn` runs it by
`tests.server.refunds:from_environment`.
"""

from __future__ import annotations

import os
import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

import ragfence
from ragfence import Fence, Recovered, current_lease
from ragfence.server import IdempotencyMiddleware


class GatewayTimeout(Exception):
    pass


class Books:
    """A payment gateway that knows idempotency keys of its own, and a ledger whose entries have an id."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._do("CREATE TABLE IF NOT EXISTS payouts (id INTEGER PRIMARY KEY, reference TEXT UNIQUE, amount INT)")
        self._do("CREATE TABLE IF NOT EXISTS ledger (reference TEXT PRIMARY KEY, amount INT)")
        self.after_payout: Callable[[], None] = lambda: None

    def pay_out(self, reference: str, amount: int) -> str:
        """As gateways do it: the same reference is the same payout."""
        self._do("INSERT OR IGNORE INTO payouts (reference, amount) VALUES (?, ?)", reference, amount)
        self.after_payout()
        return self.find(reference) or ""

    def pay_out_blindly(self, reference: str, amount: int) -> str:
        """A gateway that knows no keys: every call is a payout. It can be searched, though."""
        rows = self._do("SELECT count(*) FROM payouts WHERE reference LIKE ?", f"{reference}%")
        self._do("INSERT INTO payouts (reference, amount) VALUES (?, ?)", f"{reference}#{rows[0][0]}", amount)
        self.after_payout()
        return self.find(reference) or ""

    def find(self, reference: str) -> str | None:
        rows = self._do("SELECT id FROM payouts WHERE reference = ? OR reference LIKE ?", reference, f"{reference}#%")
        return f"rf_{rows[0][0]}" if rows else None

    def enter(self, reference: str, amount: int) -> None:
        self._do("INSERT OR IGNORE INTO ledger VALUES (?, ?)", reference, amount)

    def payouts(self) -> list[int]:
        return [amount for (amount,) in self._do("SELECT amount FROM payouts ORDER BY id")]

    def ledger(self) -> list[int]:
        return [amount for (amount,) in self._do("SELECT amount FROM ledger ORDER BY rowid")]

    def _do(self, sql: str, *values: Any) -> list[Any]:
        with closing(sqlite3.connect(self._path, timeout=30)) as connection, connection:
            return connection.execute(sql, values).fetchall()


class Refund(BaseModel):
    charge: str
    amount: int


def refund_app(fence: Fence, books: Books) -> FastAPI:
    app = FastAPI()
    app.add_middleware(IdempotencyMiddleware, fence=fence)

    @app.post("/refunds", status_code=201)
    def refund(wanted: Refund) -> dict[str, Any]:
        # The key of the lease is the same in every attempt, so the gateway recognises a second one.
        key = current_lease().key
        payout = books.pay_out(key, wanted.amount)
        books.enter(key, -wanted.amount)
        return {"id": payout, "amount": wanted.amount}

    @app.post("/refunds/{refund_id}/reversal", status_code=201)
    def reverse(refund_id: str, wanted: Refund) -> dict[str, Any]:
        key = current_lease().key
        books.enter(key, wanted.amount)
        return {"reversed": refund_id}

    # The other way, for a gateway that knows no keys but can be asked.
    def already_paid(key: str, amount: int) -> Recovered | None:
        found = books.find(key)
        return Recovered(result=found) if found else None

    @fence.once(kind="payout", key=lambda key, amount: key, recover=already_paid)
    def pay_out_once(key: str, amount: int) -> str:
        return books.pay_out_blindly(key, amount)

    @app.post("/careful-refunds", status_code=201)
    def careful_refund(wanted: Refund) -> dict[str, Any]:
        key = current_lease().key
        payout = pay_out_once(key, wanted.amount).result
        books.enter(key, -wanted.amount)
        return {"id": payout, "amount": wanted.amount}

    return app


def from_environment() -> FastAPI:
    """What uvicorn runs in the test with kills: dies after the payout, if the file that says so is there."""
    folder = Path(os.environ["REFUNDS_FOLDER"])
    books = Books(folder / "books.db")

    def perhaps_die() -> None:
        if (order := folder / "die").exists():
            order.unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    books.after_payout = perhaps_die
    policy = ragfence.Policy.from_mapping({"lease": {"ttl_s": 0.5}})
    return refund_app(ragfence.open(folder / "fence", policy=policy), books)
