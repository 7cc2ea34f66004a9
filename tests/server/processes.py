"""The ingestion API in this process, with keys for two tenants."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI
from starlette.testclient import TestClient

from ragfence import Policy
from ragfence._open import open_objects_of
from ragfence.server.apikeys import ApiKeys
from ragfence.server.app import create_app
from ragfence.server.scopes import Role

_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Caller:
    """Somebody with an API key. A write without a key of its own gets a new one."""

    client: TestClient
    token: str

    def ask(self, method: str, path: str, key: str | None = None, **more: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.token}"} | dict(more.pop("headers", {}))
        if method not in ("GET", "HEAD"):
            headers.setdefault("Idempotency-Key", key or f"key-{next(_numbers)}")
        answer: httpx.Response = self.client.request(method, path, headers=headers, **more)  # type: ignore[assignment]
        return answer

    def get(self, path: str, **more: Any) -> httpx.Response:
        return self.ask("GET", path, **more)

    def post(self, path: str, body: Any = None, key: str | None = None, **more: Any) -> httpx.Response:
        if body is not None:
            more["json"] = body
        return self.ask("POST", path, key, **more)

    def put(self, path: str, body: Any, key: str | None = None, **more: Any) -> httpx.Response:
        return self.ask("PUT", path, key, json=body, **more)

    def delete(self, path: str, key: str | None = None, **more: Any) -> httpx.Response:
        return self.ask("DELETE", path, key, **more)


@dataclass(frozen=True, slots=True)
class Served:
    app: FastAPI
    client: TestClient
    keys: ApiKeys
    place: Path

    def caller(self, tenant: str = "acme", role: Role = Role.ADMIN, principal: str = "") -> Caller:
        return Caller(self.client, self.keys.create(tenant, role, principal=principal).token)

    def scoped(self, *scopes: str, tenant: str = "acme", principal: str = "") -> Caller:
        return Caller(self.client, self.keys.create(tenant, scopes=scopes, principal=principal).token)


@contextmanager
def served(place: Path, store: str | Path | None = None, **policy: Any) -> Iterator[Served]:
    store = store or place / "fence"
    objects = place / "objects"
    app = create_app(store, objects=objects, policy=Policy.from_mapping(policy))
    shared = open_objects_of(store, objects)
    assert shared is not None
    with TestClient(app, base_url="http://app", raise_server_exceptions=False) as client:
        yield Served(app, client, ApiKeys(shared), place)
    shared.close()
