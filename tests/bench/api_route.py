"""The routes of `peers.asgi_route` as they are, or behind `IdempotencyMiddleware`; a server of its own.

argv    the folder for effects; where the fence is, or "bare"; the port, or 0; how long answers are kept, in seconds;
        and the lease, in seconds
stdout  as its peer's
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from fastapi import FastAPI, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse

import ragfence
from ragfence.core.policy import KindPolicy, Policy
from ragfence.server import IdempotencyMiddleware
from tests.bench.peers.asgi_route import EFFECTS, LATE_CRASH, begun, pay_blindly, payments, routes, serve

BARE = "bare"
PACKAGES = ("redis", "hiredis")


def policy_for(kept_s: float, lease_s: float) -> Policy:
    policy = Policy.from_mapping({"lease": {"ttl_s": lease_s}})
    # Past the check of what is too short for a client that retries: nobody can watch a day go by.
    return policy.model_copy(update={"kinds": {"http": KindPolicy(ttl_hours=kept_s / 3600)}})


def recovered(app: FastAPI, fence: ragfence.Fence, folder: Path) -> None:
    """`POST /recovered-payments`: the same effect behind `fence.once`, which is told how to find an earlier one."""

    def earlier(key: str, amount: int, trouble: str) -> ragfence.Recovered | None:
        return ragfence.Recovered(result=1) if payments(folder, key) else None

    @fence.once(
        kind="payment", key=lambda key, *_: key, payload=lambda key, amount, trouble: [key, amount], recover=earlier
    )
    def pay_once(key: str, amount: int, trouble: str) -> int:
        number = pay_blindly(folder / EFFECTS, key, amount)
        if trouble == LATE_CRASH:
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    @app.post("/recovered-payments", status_code=201)
    async def pay(request: Request) -> JSONResponse:
        wanted = await request.json()
        key, trouble = request.headers["idempotency-key"], request.headers.get("x-trouble", "")
        trouble = "" if begun(folder, key).exists() else trouble
        begun(folder, key).touch()
        receipt = await run_in_threadpool(pay_once, key, wanted["amount"], trouble)
        return JSONResponse({"payment": receipt.result, "amount": wanted["amount"]}, 201)


def main() -> None:
    folder, where, port = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    app = routes(folder)
    if where != BARE:
        policy = policy_for(kept_s=float(sys.argv[4]), lease_s=float(sys.argv[5]))
        fence = ragfence.open(where, policy=policy, journal=folder / "journal")
        app.add_middleware(IdempotencyMiddleware, fence=fence)
        recovered(app, fence, folder)
    serve(app, PACKAGES, port)


if __name__ == "__main__":
    main()
