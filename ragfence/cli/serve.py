"""`ragfence serve`: the ingestion API over HTTP."""

from __future__ import annotations

import os
import shlex
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Annotated

import typer

from ragfence.cli import output
from ragfence.cli.options import Json, Stores
from ragfence.wire import SERVE_HOST, SERVE_PORT

if TYPE_CHECKING:
    from ragfence.server.serve import ServerOptions


def serve(
    *,
    stores: Stores,
    as_json: Json = False,
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS", help="The address to listen on.")] = SERVE_HOST,
    port: Annotated[
        int, typer.Option("--port", metavar="PORT", min=0, max=65535, help="The port to listen on; 0 for any free one.")
    ] = SERVE_PORT,
    workers: Annotated[
        int, typer.Option("--workers", metavar="N", min=1, max=64, help="How many processes to run.")
    ] = 1,
    insecure_dev: Annotated[
        bool,
        typer.Option("--insecure-dev", help="No API keys: anyone who can connect may do everything. On loopback only."),
    ] = False,
    tls_cert: Annotated[
        str | None, typer.Option("--tls-cert", metavar="FILE", help="The TLS certificate with its chain, PEM.")
    ] = None,
    tls_key: Annotated[
        str | None, typer.Option("--tls-key", metavar="FILE", help="The private key of --tls-cert, PEM.")
    ] = None,
    root_path: Annotated[
        str,
        typer.Option(
            "--root-path", metavar="PREFIX", help="The path prefix that a proxy in front of the server removes."
        ),
    ] = "",
    max_concurrent: Annotated[
        int,
        typer.Option(
            "--max-concurrent", metavar="N", min=1, help="Requests at the same time per process; others get 503."
        ),
    ] = 256,
    shutdown_grace: Annotated[
        float,
        typer.Option(
            "--shutdown-grace", metavar="SECONDS", min=0, help="How long running requests may take after a stop."
        ),
    ] = 30.0,
    drain: Annotated[
        float,
        typer.Option(
            "--drain", metavar="SECONDS", min=0, help="After a stop, keep serving this long with /readyz at 503."
        ),
    ] = 0.0,
) -> None:
    """Serve the HTTP API.

    SIGTERM or Ctrl-C lets running requests finish and releases the keys of the others. A second one exits at once.
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
        store=stores.store,
        objects=stores.objects,
        policy=stores.policy,
        insecure_dev=insecure_dev,
        max_concurrent=max_concurrent,
    )
    # Workers are new processes. The options reach them through the environment.
    os.environ.update(settings.to_environ())
    if stores.tenant:
        os.environ["RAGFENCE_TENANT"] = stores.tenant
    if insecure_dev:
        output.err().print(
            "WARNING: --insecure-dev: no API keys. Anyone who can connect to this port may read and change everything."
        )

    def ready(url: str, port: int) -> None:
        if as_json:
            output.print_json({"url": url, "host": host, "port": port, "pid": os.getpid(), "workers": workers})
        else:
            _print(url, serving, insecure_dev=insecure_dev)
        sys.stdout.flush()

    if code := api.serve(api.FACTORY, serving, ready=ready):
        raise typer.Exit(code)


def _print(url: str, serving: ServerOptions, *, insecure_dev: bool) -> None:
    output.echo(f"listening on {url}, {output.pluralize(serving.workers, 'worker')}; stop with Ctrl-C")
    words = ["curl", *(["--cacert", serving.tls_cert] if serving.tls_cert else []), f"{url}/v1/documents"]
    words += [] if insecure_dev else ["-H", "Authorization: Bearer rf_..."]
    words += ["-H", "Idempotency-Key: first-1", "-H", "Content-Type: application/json"]
    words += ["-d", '{"doc_id": "first", "text": "Hello."}']
    output.echo(f"  {shlex.join(words)}")
    if not insecure_dev:
        output.echo("  (create an API key with `ragfence apikeys create`)")
