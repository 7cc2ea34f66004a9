"""What the figures were measured on. Nothing that names the machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

import redis


def facts(url: str) -> dict[str, Any]:
    with redis.Redis.from_url(url) as client:
        server = client.info("server")
    name, version = server.get("server_name", "redis"), server.get("valkey_version", server["redis_version"])
    return {
        "cores": os.cpu_count(),
        "system": platform.system(),
        "processor": platform.machine(),
        "python": platform.python_version(),
        "redis-py": importlib.metadata.version("redis"),
        "hiredis": importlib.metadata.version("hiredis"),
        "server": f"{name.title()} {version}",
        "load_before": load(),
    }


def load() -> list[float]:
    return [round(average, 2) for average in os.getloadavg()]
