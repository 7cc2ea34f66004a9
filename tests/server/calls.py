"""Asking an application in this process, from synchronous tests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

Requests = Callable[[httpx.AsyncClient], Awaitable[Any]]


def asking(app: Any, requests: Requests) -> Any:
    """Runs `requests(client)` against the application, in a loop of its own."""

    async def session() -> Any:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://app") as client:
            return await requests(client)

    return asyncio.run(session())


def ask(app: Any, method: str, path: str, key: str | None = None, **more: Any) -> httpx.Response:
    headers = dict(more.pop("headers", {})) | ({} if key is None else {"Idempotency-Key": key})

    async def once(client: httpx.AsyncClient) -> httpx.Response:
        return await client.request(method, path, headers=headers, **more)

    answer: httpx.Response = asking(app, once)
    return answer


def post(app: Any, path: str, key: str | None = None, **more: Any) -> httpx.Response:
    return ask(app, "POST", path, key, **more)
