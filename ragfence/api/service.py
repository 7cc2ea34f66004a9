"""The routes for whoever runs the server: is it alive, may it be sent requests, what does it count."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import os
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ragfence.api.asking import answers, read_answer, response_of
from ragfence.api.gate import bearer_of
from ragfence.api.problems import refusal
from ragfence.api.schemas import Health
from ragfence.engine.background import to_the_end
from ragfence.errors import RagfenceError

router = APIRouter(tags=["service"])

METRICS_TOKEN = "RAGFENCE_METRICS_TOKEN"
PROBE = "ragfence-ready"
"""a name that nobody writes: asking for it proves that the store answers"""


@router.get("/healthz", summary="Is the process alive", responses=answers(Health))
async def healthz() -> Response:
    return read_answer({"status": "alive"})


@router.get("/readyz", summary="May it be sent requests", responses=answers(Health))
async def readyz(request: Request) -> Response:
    """503 while it starts, stops, or cannot reach its object store."""
    state = request.app.state
    if not state.ready:
        return response_of(refusal("DEPENDENCY.overloaded", "the server is starting or stopping").answer())
    try:
        async with asyncio.timeout(2):
            await to_the_end(state.shared.get, PROBE)
    except (RagfenceError, TimeoutError):
        return response_of(refusal("DEPENDENCY.overloaded", "the object store does not answer").answer())
    return read_answer({"status": "ready"})


@router.get("/metrics", summary="For Prometheus", responses={200: {"content": {"text/plain": {}}}, **answers(Health)})
async def metrics(request: Request) -> Response:
    """To loopback, or with RAGFENCE_METRICS_TOKEN as bearer: the figures name tenants."""
    if not _may_read_metrics(request):
        return response_of(refusal("AUTH.missing", hint=f"ask from loopback, or with {METRICS_TOKEN}").answer())
    from ragfence.telemetry import exposition

    page, content_type = await to_the_end(exposition)
    return Response(page, media_type=content_type)


def _may_read_metrics(request: Request) -> bool:
    token = os.environ.get(METRICS_TOKEN, "")
    if token:
        return hmac.compare_digest(bearer_of(request.scope).encode(), token.encode())
    client: Any = request.client
    try:
        return client is not None and ipaddress.ip_address(client.host).is_loopback
    except ValueError:
        return False
