"""The FastAPI routes that everybody fences, and how they are served. Knows neither ragfence nor any peer.

`POST /v1/documents` does nothing and answers: what it costs is the floor. `POST /payments` has an effect that can be
counted from outside, and trouble on request: the header `x-trouble` says what happens to the first request of a key.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import logging
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import uvicorn
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse

PACKAGES = ("fastapi", "starlette", "uvicorn", "httptools", "uvloop")
MEMORY = "memory"
"""where the peer keeps what it has no server for"""
EFFECTS = "effects"
"""a line for every payment that was made"""
EXCEPTION, CRASH, LATE_CRASH, SLOW = "exception", "crash", "late crash", "slow"
"""before the effect, all but the second crash"""
SLOW_S = 0.3


class GatewayDown(Exception):
    """raised on request"""


def routes(folder: Path) -> FastAPI:
    app = FastAPI()
    counted = 0

    @app.post("/v1/documents", status_code=201)
    async def nothing() -> JSONResponse:
        nonlocal counted
        counted += 1
        return JSONResponse({"id": "0f1e2d3c", "decision": "new"}, 201)

    @app.get("/counted")
    async def effects() -> int:
        return counted

    @app.post("/payments", status_code=201)
    async def pay(request: Request) -> JSONResponse:
        wanted = await request.json()
        key, trouble = request.headers["idempotency-key"], request.headers.get("x-trouble", "")
        if begun(folder, key).exists():
            trouble = ""
        begun(folder, key).touch()
        if trouble == EXCEPTION:
            raise GatewayDown
        if trouble == CRASH:
            os.kill(os.getpid(), signal.SIGKILL)
        if trouble == SLOW:
            await asyncio.sleep(SLOW_S)
        number = pay_blindly(folder / EFFECTS, key, wanted["amount"])
        if trouble == LATE_CRASH:
            os.kill(os.getpid(), signal.SIGKILL)
        return JSONResponse({"payment": number, "amount": wanted["amount"]}, 201)

    return app


def begun(folder: Path, key: str) -> Path:
    """Is there once the handler has been called with that key."""
    return folder / f"begun-{key}"


def payments(folder: Path, key: str) -> list[int]:
    """The amounts that were paid under that key."""
    lines = (folder / EFFECTS).read_text().splitlines() if (folder / EFFECTS).exists() else []
    return [int(amount) for known, amount in map(str.split, lines) if known == key]


def pay_blindly(effects: Path, key: str, amount: int) -> int:
    """Paid, blindly: the second call is a second payment. Its number."""
    with effects.open("a") as file:
        file.write(f"{key} {amount}\n")
    return len(effects.read_text().splitlines())


def serve(app: object, packages: Sequence[str] = (), port: int = 0) -> None:
    """With the settings of `ragfence serve`, until it is killed. Says where, and of which versions it is made."""
    config = uvicorn.Config(
        app,  # type: ignore[arg-type]
        host="127.0.0.1",
        port=port,
        http="httptools",
        loop="uvloop",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
    )
    # The trace of what was asked for is nobody's business.
    logging.getLogger("uvicorn.error").addFilter(lambda told: not (told.exc_info and told.exc_info[0] is GatewayDown))
    listening = config.bind_socket()
    listening.listen(config.backlog)  # from now on clients wait instead of being refused
    versions = {name: importlib.metadata.version(name) for name in (*packages, *PACKAGES)}
    print(json.dumps({"port": listening.getsockname()[1], "versions": versions}), flush=True)
    uvicorn.Server(config).run([listening])
