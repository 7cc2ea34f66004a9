"""Routes for operators: liveness, readiness and metrics."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import os
import time
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ragfence.engine.aio import run_blocking
from ragfence.errors import RagfenceError
from ragfence.fence import Fence
from ragfence.server.auth import bearer_of
from ragfence.server.dependencies import answers, read_answer, response_of
from ragfence.stores.local import LocalObjects
from ragfence.stores.objects import ObjectStore
from ragfence.wire.problems import refusal
from ragfence.wire.schemas import Health

router = APIRouter(tags=["service"])

METRICS_TOKEN = "RAGFENCE_METRICS_TOKEN"
FORWARDED = (
    "forwarded",
    "via",
    "x-forwarded-for",
    "x-forwarded-host",
    "x-forwarded-proto",
    "x-real-ip",
    "x-client-ip",
    "cf-connecting-ip",
    "true-client-ip",
)
"""Headers of a proxy: the connection is local, but the request may not be."""
KEPT_S = 1.0
"""How long an answer about the stores is cached."""
PATIENCE_S = 2.0
PROBE = "ragfence-ready"
"""A name that is never written: reading it shows that the store answers."""


@router.get("/healthz", summary="Is the process alive", responses=answers(Health))
async def healthz() -> Response:
    return read_answer({"status": "alive"})


class Readiness:
    """Whether the stores answer. They are called at most once a second, by one thread."""

    def __init__(self, objects: ObjectStore, open_fence: Callable[[], Fence]) -> None:
        self._objects, self._open_fence = objects, open_fence
        self._fence: Fence | None = None
        self._asking: asyncio.Future[str] | None = None
        self._answered: tuple[float, str] = (0.0, "")

    async def trouble(self) -> str:
        """Returns what is wrong; empty if both stores answer."""
        at, known = self._answered
        if at and time.monotonic() - at < KEPT_S:
            return known
        if self._asking is None or self._asking.done():
            self._asking = asyncio.get_running_loop().run_in_executor(None, self._ask)
        done, _ = await asyncio.wait({self._asking}, timeout=PATIENCE_S)
        trouble = self._asking.result() if done else "a store does not answer in time"
        self._answered = (time.monotonic(), trouble)
        return trouble

    def close(self) -> None:
        if self._fence is not None:
            self._fence.close()

    def _ask(self) -> str:
        try:
            if isinstance(self._objects, LocalObjects):
                self._objects.check_folder()
            self._objects.get(PROBE)
        except RagfenceError:
            return "the object store does not answer"
        try:
            if self._fence is None:
                self._fence = self._open_fence()
            self._fence.inspector.markers()
        except RagfenceError:
            return "the fence store does not answer"
        return ""


@router.get("/readyz", summary="May it be sent requests", responses=answers(Health))
async def readyz(request: Request) -> Response:
    """503 while it starts, stops, or cannot reach its fence store or its object store."""
    state = request.app.state
    if not state.ready:
        return response_of(refusal("DEPENDENCY.overloaded", "the server is starting or stopping").answer())
    if trouble := await state.readiness.trouble():
        return response_of(refusal("DEPENDENCY.overloaded", trouble).answer())
    return read_answer({"status": "ready"})


class MetricsPage(Response):
    media_type = "text/plain; version=0.0.4"


_METRICS_ANSWERS = {status: answer for status, answer in answers(Health).items() if status != 200}


@router.get("/metrics", summary="For Prometheus", response_class=MetricsPage, responses=_METRICS_ANSWERS)
async def metrics(request: Request) -> Response:
    """For loopback without a proxy, or with RAGFENCE_METRICS_TOKEN as bearer: the metrics name tenants."""
    if not _may_read_metrics(request):
        return response_of(
            refusal(
                "AUTH.missing", hint=f"send the request from loopback without a proxy, or with {METRICS_TOKEN}"
            ).answer()
        )
    from ragfence.telemetry import exposition

    page, _ = await run_blocking(exposition)
    return MetricsPage(page)


def _may_read_metrics(request: Request) -> bool:
    token = os.environ.get(METRICS_TOKEN, "")
    if token:
        return hmac.compare_digest(bearer_of(request.scope).encode(), token.encode())
    if any(name in request.headers for name in FORWARDED):
        return False
    client: Any = request.client
    try:
        return client is not None and ipaddress.ip_address(client.host).is_loopback
    except ValueError:
        return False
