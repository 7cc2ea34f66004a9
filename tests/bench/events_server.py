"""A server that receives webhooks: one that only verifies, or ours, which fences each event.

argv    "bare", or where the fence is
stdout  {"port": 40123, "versions": {}}
"""

from __future__ import annotations

import sys

from fastapi import FastAPI, Request
from standardwebhooks import Webhook
from starlette.responses import JSONResponse

import ragfence
from ragfence.webhooks.hooks import Webhooks
from ragfence.webhooks.providers import StandardWebhooks
from tests.bench.peers.asgi_route import serve

BARE = "bare"
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
PATH = "/webhooks/cms"


def bare() -> FastAPI:
    app, webhook = FastAPI(), Webhook(SECRET)

    @app.post(PATH)
    async def receive(request: Request) -> JSONResponse:
        event = webhook.verify(await request.body(), dict(request.headers))
        return JSONResponse({"page": event["page"]["id"]})

    return app


def fenced(fence: ragfence.Fence) -> FastAPI:
    app, hooks = FastAPI(), Webhooks(fence, {"cms": StandardWebhooks(SECRET)})

    @hooks.on("cms", "page.updated")
    async def page(event):  # type: ignore[no-untyped-def]
        return {"page": event.payload["page"]["id"]}

    app.include_router(hooks.router())
    return app


def main() -> None:
    where = sys.argv[1]
    serve(bare() if where == BARE else fenced(ragfence.open(where)), (), 0)


if __name__ == "__main__":
    main()
