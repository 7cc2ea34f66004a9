"""`ragfence serve`: the ingestion API over HTTP, until it is told to stop."""

from __future__ import annotations

import os
import shlex
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Annotated

import typer

from ragfence.cli import output
from ragfence.cli.options import Json, Objects, PolicyFile, Store, Tenant
from ragfence.wire import SERVE_HOST, SERVE_PORT

if TYPE_CHECKING:
    from ragfence.server.serve import ServerOptions


def serve(
    store: Store = None,
    objects: Objects = None,
    tenant: Tenant = None,
    policy: PolicyFile = None,
    as_json: Json = False,
    host: Annotated[str, typer.Option("--host", help="The address to listen on.")] = SERVE_HOST,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 for any that is free.")] = SERVE_PORT,
    workers: Annotated[int, typer.Option("--workers", min=1, max=64, help="How many processes.")] = 1,
    insecure_dev: Annotated[
        bool,
        typer.Option("--insecure-dev", help="No API keys: everybody who can connect may do everything. Loopback only."),
    ] = False,
    tls_cert: Annotated[str | None, typer.Option("--tls-cert", metavar="FILE", help="PEM, with its chain.")] = None,
    tls_key: Annotated[str | None, typer.Option("--tls-key", metavar="FILE", help="PEM.")] = None,
    root_path: Annotated[
        str, typer.Option("--root-path", metavar="PREFIX", help="The path prefix that a proxy in front of it removes.")
    ] = "",
    max_concurrent: Annotated[
        int, typer.Option("--max-concurrent", min=1, help="Requests under way in one process; others get 503.")
    ] = 256,
    shutdown_grace: Annotated[
        float,
        typer.Option("--shutdown-grace", metavar="SECONDS", min=0, help="For requests under way when it is stopped."),
    ] = 30.0,
    drain: Annotated[
        float,
        typer.Option("--drain", metavar="SECONDS", min=0, help="Go on for so long with /readyz at 503, then stop."),
    ] = 0.0,
) -> None:
    """Serves the ingestion API.

    SIGTERM or Ctrl-C lets requests under way finish, and gives back what does not; a second one ends it at once.
    """
    from ragfence.server import serve as api

    import_module("ragfence.server.app")  # a missing package is an error of this command, not of its workers

    serving = api.ServerOptions(
        host=host,
        port=port,
        workers=workers,
        tls_cert=tls_cert,
        tls_key=tls_key,
        root_path=root_path,
        grace_s=shutdown_grace,
        drain_s=drain,
    )
    api.check(serving, insecure_dev=insecure_dev)
    settings = api.AppSettings(
        store=store, objects=objects, policy=policy, insecure_dev=insecure_dev, max_concurrent=max_concurrent
    )
    # Workers are new processes: what was said here has to reach them, over what the environment says.
    os.environ.update(settings.to_environ())
    if tenant:
        os.environ["RAGFENCE_TENANT"] = tenant
    if insecure_dev:
        output.err().print(
            "WARNING: --insecure-dev: no API keys. Whoever reaches this port may read and change everything."
        )

    def ready(url: str, port: int) -> None:
        if as_json:
            output.document({"url": url, "host": host, "port": port, "pid": os.getpid(), "workers": workers})
        else:
            _print(url, serving, insecure_dev=insecure_dev)
        sys.stdout.flush()

    if code := api.serve(api.FACTORY, serving, ready=ready):
        raise typer.Exit(code)


def _print(url: str, serving: ServerOptions, *, insecure_dev: bool) -> None:
    output.say(f"listening on {url}, {serving.workers} worker{'s' * (serving.workers > 1)}; Ctrl-C stops")
    words = ["curl", *(["--cacert", serving.tls_cert] if serving.tls_cert else []), f"{url}/v1/documents"]
    words += [] if insecure_dev else ["-H", "Authorization: Bearer rf_..."]
    words += ["-H", "Idempotency-Key: first-1", "-H", "Content-Type: application/json"]
    words += ["-d", '{"doc_id": "first", "text": "Hello."}']
    output.say(f"  {shlex.join(words)}")
    if not insecure_dev:
        output.say("  (an API key: ragfence apikeys create)")
