"""The ingestion API: `create_app()` makes the ASGI application that `ragfence serve` runs.

EdgeMiddleware     paths, HEAD, and the headers of every response        outermost
LoadShedding       bounded work, bounded bodies, slow clients            before anything is read
WebhookGate        deliveries to webhooks, which have no API key         before their body is read
AuthMiddleware     the caller, its scopes and its quotas                 before any route is looked up
TenantShares       how much of the server a tenant may use               before any body is read
ReplayMiddleware   retries whose answer is stored                        before any route is looked up
routes             checked bodies, then the contract: one effect per key, the same answer for every retry
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

from ragfence._extras import needs_extra
from ragfence._open import EMBEDDED, open_objects_of
from ragfence._open import open as open_fence
from ragfence._version import __version__
from ragfence.core.policy import Policy
from ragfence.core.settings import Settings, load_policy
from ragfence.engine.aio import run_blocking
from ragfence.errors import ObjectsRequired, RagfenceError
from ragfence.fence import Fence

with needs_extra("api", "The HTTP API"):
    from fastapi import FastAPI, Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.openapi.utils import get_openapi
    from prometheus_client import CollectorRegistry as _Registry  # noqa: F401  # the metrics below need it
    from pydantic.json_schema import models_json_schema
    from starlette.exceptions import HTTPException
    from starlette.responses import Response

from ragfence.core.policy import for_strangers
from ragfence.server.apikeys import ApiCaller, ApiKeys, CachedKeys
from ragfence.server.asgi import App, Receive, Scope, Send, path_in
from ragfence.server.auth import OPEN, AuthMiddleware
from ragfence.server.dependencies import response_of
from ragfence.server.edge import EdgeMiddleware
from ragfence.server.fair_shares import BuildPool, Shares, TenantShares
from ragfence.server.key_log import LastUse
from ragfence.server.load_shedding import LoadShedding
from ragfence.server.quotas import Quotas
from ragfence.server.replay import ReplayMiddleware
from ragfence.server.responses import unexpected as unexpected_answer
from ragfence.server.routes import documents, health, indexes, inspect, webhooks
from ragfence.server.scopes import MEANINGS, ROUTES, KeyScope, allowed_methods, check_listed
from ragfence.server.tenant_pool import TenantPool
from ragfence.server.webhooks import WebhookGate
from ragfence.telemetry.config import OBSERVE
from ragfence.telemetry.metrics import Metrics
from ragfence.webhooks.policy_hooks import load_hooks
from ragfence.wire import schemas
from ragfence.wire.messages import Answer, headers_from
from ragfence.wire.problems import RequestRefused, problem_of, refusal
from ragfence.wire.validation import invalid

PURGE_EVERY_S = 3600.0
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
    """The routes behind our layers, which are not FastAPI's middleware: that runs inside of what FastAPI does for every
    request, and a retry that is answered before the routes needs none of that."""

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

    `insecure_dev` needs no API keys: every caller is the admin of the tenant that the environment names. Only for a
    server that listens on loopback; `ragfence serve --insecure-dev` sees to that. Requests whose `Host` does not name
    loopback, and those of other websites (`Origin`), are refused.
    """
    settings = Settings.from_env()
    rules = for_strangers(policy if isinstance(policy, Policy) else load_policy(policy or settings.policy))
    hooks = load_hooks(rules, settings.tenant)
    where = store if store is not None else settings.store or EMBEDDED
    wanted = objects if objects is not None else settings.objects
    shared = open_objects_of(where, wanted)
    if shared is None:
        raise ObjectsRequired(
            "the ingestion API needs an object store for documents and API keys, and none is given",
            hint="ragfence serve --objects s3://bucket/prefix, or RAGFENCE_OBJECTS",
        )

    named = os.environ.get(OBSERVE, "").split(",")
    observed = ("metrics", *(name.strip() for name in named if name.strip() not in ("", "metrics")))

    def opened(tenant: str) -> Fence:
        return open_fence(
            where, objects=wanted, tenant=tenant, policy=rules, owner=owner, route="http", observe=observed
        )

    sessions = TenantPool(opened)
    readiness = health.Readiness(shared, lambda: opened(settings.tenant))
    quotas = Quotas(rules, os.fspath(where))
    keys = CachedKeys(ApiKeys(shared))
    everybody = ApiCaller(settings.tenant, "dev", frozenset(KeyScope), "") if insecure_dev else None
    builds = BuildPool(threads=rules.http.build_threads, per_tenant=rules.http.max_builds)

    metrics, last_use = Metrics(), LastUse(shared)
    writing: set[asyncio.Future[None]] = set()

    def count_caller(caller: ApiCaller) -> None:
        metrics.count_request(caller.tenant, caller.key_id)
        if last_use.is_due(caller.tenant, caller.key_id):
            # In the background: the request does not wait for it.
            work = asyncio.ensure_future(run_blocking(last_use.write, caller.tenant, caller.key_id))
            writing.add(work)
            work.add_done_callback(writing.discard)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # For claims, seals and groups, which wait for a store most of the time.
        threads = ThreadPoolExecutor(THREADS, thread_name_prefix="ragfence-api")
        asyncio.get_running_loop().set_default_executor(threads)
        app.state.ready = True
        draining = asyncio.create_task(_drain_regularly(sessions, rules.audit.drain_every_s))
        purging = asyncio.create_task(_purge_every_hour(sessions))
        try:
            yield
        finally:
            app.state.ready = False
            for task in (draining, purging):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            readiness.close()
            await sessions.close()
            await quotas.close()
            await run_blocking(gate.inboxes.close)
            if writing:
                await asyncio.wait(set(writing))
            shared.close()
            builds.close()
            threads.shutdown(wait=False)

    app = Api(
        title="ragfence",
        summary="Documents ingested once, indexes built once, and the same answer for every retry.",
        version=__version__,
        lifespan=lifespan,
        docs_url="/docs",
        redoc_url=None,
        openapi_url="/openapi.json",
        # A redirect would lose the body of a PUT, and would show callers without a key which paths exist.
        redirect_slashes=False,
    )
    app.state.ready, app.state.readiness, app.state.quotas = False, readiness, quotas
    app.state.builds = builds
    app.state.unfinished_bytes = Shares(rules.http.max_unfinished_bytes, share=rules.http.tenant_share)
    for router in (documents.router, indexes.router, inspect.router, inspect.admin, health.router):
        for route in router.routes:
            for method in getattr(route, "methods", ()):
                if (path := getattr(route, "path", "")) not in OPEN:
                    check_listed(method, path)
        app.include_router(router)
    if hooks:
        app.include_router(webhooks.router)
    http = rules.http
    fair = TenantShares(
        ReplayMiddleware(app.routed),
        max_concurrent=max_concurrent,
        max_arriving=http.max_arriving,
        max_arriving_bytes=http.max_arriving_bytes,
        share=http.tenant_share,
        threads=http.tenant_threads,
    )
    authenticated = AuthMiddleware(
        fair,
        keys=keys,
        sessions=sessions,
        quotas=quotas,
        everybody=everybody,
        on_refused=metrics.count_refusal,
        on_served=count_caller,
    )
    gate = WebhookGate(authenticated, fair, hooks=hooks, sessions=sessions, on_refused=metrics.count_refusal)
    app.state.webhooks, app.state.count_webhook = gate, metrics.count_webhook
    shedding = LoadShedding(
        gate,
        max_concurrent=max_concurrent,
        max_body_bytes=http.max_body_bytes,
        max_batch_bytes=http.max_batch_bytes,
        body_timeout_s=http.body_grace_s,
        min_rate=http.min_body_rate,
        abandoned=sessions.abandoned,
    )
    app.front = EdgeMiddleware(shedding, local_only=insecure_dev)
    _answer_errors(app)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]  # as in FastAPI's documentation
    return app


async def _drain_regularly(sessions: TenantPool, every_s: float) -> None:
    while every_s:
        # Random, so that workers that were started together do not drain together.
        await asyncio.sleep(every_s * random.uniform(0.5, 1.5))
        await sessions.each(drain)


async def _purge_every_hour(sessions: TenantPool) -> None:
    """Purges the tenants that are served; of several servers, one does it at a time."""
    while True:
        await asyncio.sleep(PURGE_EVERY_S * random.uniform(0.5, 1.5))
        await sessions.each(purge_expired)


def purge_expired(fence: Fence) -> None:
    fence.purge_expired_once()


def drain(fence: Fence) -> None:
    fence.audit.drain()


def _answer_errors(app: FastAPI) -> None:
    """Answers every error with a problem."""

    @app.exception_handler(RequestRefused)
    async def refused(request: Request, error: RequestRefused) -> Response:
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
            # Of all routes at this path: Starlette names only the methods of the first one.
            path = path_in(request.scope)
            allowed = {"allow": ", ".join(("GET", "HEAD", "OPTIONS") if path in OPEN else allowed_methods(path))}
            if request.method == "OPTIONS":
                return response_of(Answer(204, tuple(allowed.items())))
            return response_of(refusal("VALIDATION.method").answer(allowed))
        if error.status_code == 404:
            return response_of(refusal("VALIDATION.not_found").answer())
        return response_of(refusal("VALIDATION.body", str(error.detail)).answer())

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        return response_of(unexpected_answer(headers_from(request.scope["headers"])))


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
        components["securitySchemes"] = {"apiKey": {"type": "http", "scheme": "bearer", "description": _SCOPES}}
        for (method, path), scopes in ROUTES.items():
            # One scope is enough, so each is a requirement of its own; where all are listed, any key will do.
            wanted = [[scope.value] for scope in KeyScope if scope in scopes] if len(scopes) < len(KeyScope) else [[]]
            operation = made["paths"][path.replace(":path}", "}")][method.lower()]
            operation["security"] = [{"apiKey": each} for each in wanted]
        app.openapi_schema = made
    return app.openapi_schema


_SCOPES = "An API key has scopes, and an operation needs one of those it names: " + "; ".join(
    f"`{scope}`: {MEANINGS[scope]}" for scope in KeyScope
)
_DESCRIPTION = """\
Every write needs an `Idempotency-Key`: the same request with the same key is executed once, and answered with the
same bytes. Errors are `application/problem+json` with a stable `code`. Every path that accepts GET accepts HEAD, and
every path answers OPTIONS with the methods that it accepts, in `Allow`.
"""
