"""asgi-idempotency-header on the routes of `asgi_route`. Runs in an environment of its own, which has no ragfence.

argv    the folder for effects; the URL of a Redis, or "memory"; the port, or 0; how long answers are kept, in seconds
stdout  {"port": 40123, "versions": {"asgi-idempotency-header": "0.2.0", ...}} once it listens
"""

from __future__ import annotations

import sys
from pathlib import Path

import redis.asyncio
from idempotency_header_middleware import IdempotencyHeaderMiddleware
from idempotency_header_middleware.backends import MemoryBackend, RedisBackend

from tests.bench.peers.asgi_route import MEMORY, routes, serve

PACKAGES = ("asgi-idempotency-header", "redis", "hiredis")


def main() -> None:
    folder, where, port, kept_s = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    if where == MEMORY:
        backend: MemoryBackend | RedisBackend = MemoryBackend(expiry=kept_s)
    else:
        backend = RedisBackend(redis.asyncio.Redis.from_url(where), expiry=kept_s)
    app = routes(folder)
    app.add_middleware(IdempotencyHeaderMiddleware, backend=backend)
    serve(app, PACKAGES, port)


if __name__ == "__main__":
    main()
