"""The ingestion API: `create_app()` makes the ASGI application that `ragfence serve` runs.

Shedding   bounded work, bounded bodies, slow clients            before anything is read
Gate       who asks, with which role, within which quota         before any route is looked up
Retries    what was read before and has its answer               before any route is looked up
routes     checked bodies, then the contract: one effect per key, the same answer for every retry
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from ragfence._version import __version__
from ragfence.core.policy import Policy
from ragfence.core.settings import Settings, load_policy
from ragfence.errors import ObjectsRequired, RagfenceError, Unsupported
from ragfence.fence import Fence
from ragfence.opening import EMBEDDED, open_objects_of
from ragfence.opening import open as open_fence

try:
    from fastapi import FastAPI, Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.openapi.utils import get_openapi
    from pydantic.json_schema import models_json_schema
    from starlette.exceptions import HTTPException
    from starlette.responses import Response
except ModuleNotFoundError as missing:
    raise Unsupported(f"{missing.name} is not installed", hint="pip install 'ragfence[api]'") from missing

from ragfence.api import documents, indexes, lookups, schemas, service
from ragfence.api.apikeys import ApiKeys, Asker, CachedKeys, Role
from ragfence.api.asking import invalid, response_of
from ragfence.api.gate import Gate
from ragfence.api.performing import App, Receive, Scope, Send
from ragfence.api.problems import Refused, problem_of, refusal
from ragfence.api.quotas import Quotas
from ragfence.api.retries import Retries
from ragfence.api.sessions import Sessions, for_strangers
from ragfence.api.shedding import Shedding
from ragfence.telemetry.choosing import OBSERVE

THREADS = 32

BODIES = (
    schemas.DocumentIn,
    schemas.DocumentBody,
    schemas.BuildIn,
    schemas.SwapIn,
    schemas.RollbackIn,
    schemas.PurgeIn,
    schemas.PurgeExpiredIn,
    schemas.Empty,
    schemas.ProblemOut,
)


class Api(FastAPI):
    """The routes, and what stands before them. Not as FastAPI's middleware, which is inside of what FastAPI does for
    every request: a retry that is answered before the routes needs none of that."""

    front: App

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.front(scope, receive, send)

    async def routed(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().__call__(scope, receive, send)


def create_app(
    store: str | os.PathLike[str] | None = None,
    *,
    objects: str | os.PathLike[str] | None = None,
    policy: Policy | str | os.PathLike[str] | None = None,
    insecure_dev: bool = False,
    max_concurrent: int = 256,
    owner: str | None = None,
) -> FastAPI:
    """The ingestion API as an ASGI application. Stores and policy as in `ragfence.open`; tenants come from API keys.

    `insecure_dev` needs no API keys: everybody is the admin of the tenant that the environment names. Only for a
    server that listens on loopback; `ragfence serve --insecure-dev` sees to that.
    """
    settings = Settings.from_env()
    rules = for_strangers(policy if isinstance(policy, Policy) else load_policy(policy or settings.policy))
    where = store if store is not None else settings.store or EMBEDDED
    wanted = objects if objects is not None else settings.objects
    shared = open_objects_of(where, wanted)
    if shared is None:
        raise ObjectsRequired(
            "the ingestion API keeps documents and API keys in an object store, and none is named",
            hint="ragfence serve --objects s3://bucket/prefix, or RAGFENCE_OBJECTS",
        )

    named = os.environ.get(OBSERVE, "").split(",")
    observed = ("metrics", *(name.strip() for name in named if name.strip() not in ("", "metrics")))

    def opened(tenant: str) -> Fence:
        return open_fence(
            where, objects=wanted, tenant=tenant, policy=rules, owner=owner, route="http", observe=observed
        )

    sessions = Sessions(opened)
    quotas = Quotas(rules, os.fspath(where))
    keys = CachedKeys(ApiKeys(shared))
    everybody = Asker(settings.tenant, "dev", Role.ADMIN, "") if insecure_dev else None

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # For claims, seals and groups, which all wait for a store most of the time.
        threads = ThreadPoolExecutor(THREADS, thread_name_prefix="ragfence-api")
        asyncio.get_running_loop().set_default_executor(threads)
        app.state.ready = True
        draining = asyncio.create_task(_drain_now_and_then(sessions, rules.audit.drain_every_s))
        try:
            yield
        finally:
            app.state.ready = False
            draining.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await draining
            await sessions.close()
            await quotas.close()
            shared.close()
            threads.shutdown(wait=False)

    app = Api(
        title="ragfence",
        summary="Documents ingested once, indexes built once, and the same answer for every retry.",
        version=__version__,
        lifespan=lifespan,
        docs_url="/docs",
        redoc_url=None,
        openapi_url="/openapi.json",
        # A redirect would lose the body of a PUT, and tells a stranger which addresses there are.
        redirect_slashes=False,
    )
    app.state.ready, app.state.shared, app.state.quotas = False, shared, quotas
    for router in (documents.router, indexes.router, lookups.router, lookups.admin, service.router):
        app.include_router(router)
    app.front = Shedding(
        Gate(Retries(app.routed), keys=keys, sessions=sessions, quotas=quotas, everybody=everybody),
        max_concurrent=max_concurrent,
        max_body_bytes=rules.http.max_body_bytes,
        max_batch_bytes=rules.http.max_batch_bytes,
        beside=sessions.left_behind,
    )
    _answer_errors(app)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]  # as FastAPI's documentation has it
    return app


async def _drain_now_and_then(sessions: Sessions, every_s: float) -> None:
    while every_s:
        # Spread: workers that were started together need not drain together.
        await asyncio.sleep(every_s * random.uniform(0.5, 1.5))
        await sessions.each(drain)


def drain(fence: Fence) -> None:
    fence.audit.drain()


def _answer_errors(app: FastAPI) -> None:
    """Whatever goes wrong is a problem with a code."""

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> Response:
        return response_of(error.problem.answer())

    @app.exception_handler(RagfenceError)
    async def ours(request: Request, error: RagfenceError) -> Response:
        return response_of(problem_of(error).answer())

    @app.exception_handler(RequestValidationError)
    async def wrong(request: Request, error: RequestValidationError) -> Response:
        found: Sequence[Any] = error.errors()
        return response_of(invalid(found, code="VALIDATION.parameter").answer())

    @app.exception_handler(HTTPException)
    async def routing(request: Request, error: HTTPException) -> Response:
        if error.status_code == 405:
            allowed = dict(error.headers or {})
            return response_of(refusal("VALIDATION.method").answer({"allow": allowed.get("Allow", "GET")}))
        if error.status_code == 404:
            return response_of(refusal("VALIDATION.not_found").answer())
        return response_of(refusal("VALIDATION.body", str(error.detail)).answer())

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        # Told nothing of it: a message may hold what another tenant has sent. The log has it all.
        return response_of(refusal("TRANSIENT.unexpected").answer())


def _openapi(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        made = get_openapi(
            title=app.title, version=app.version, summary=app.summary, routes=app.routes, description=_DESCRIPTION
        )
        _, definitions = models_json_schema(
            [(model, "validation") for model in BODIES], ref_template="#/components/schemas/{model}"
        )
        components = made.setdefault("components", {})
        components.setdefault("schemas", {}).update(definitions["$defs"])
        components["securitySchemes"] = {"apiKey": {"type": "http", "scheme": "bearer"}}
        for path, operations in made["paths"].items():
            for operation in operations.values():
                if path.startswith("/v1/"):
                    operation["security"] = [{"apiKey": []}]
        app.openapi_schema = made
    return app.openapi_schema


_DESCRIPTION = """\
Every write needs an `Idempotency-Key`: the same request with the same key is performed once, and answered with the
same bytes. Errors are `application/problem+json` with a stable `code`.
"""
