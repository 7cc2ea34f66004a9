"""What the figures are measured on. Nothing that names the machine."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import resource
import sys
from pathlib import Path
from typing import Any

import redis

from tests import servers

JEMALLOC = "libjemalloc.so.2"
LIBRARIES = ("/usr/lib64", "/usr/lib", "/usr/local/lib")


def redis_server() -> contextlib.AbstractContextManager[servers.RedisServer]:
    """A server like the ones that people run.

    Redis and Valkey are packaged with jemalloc nearly everywhere, but the wheels have libc's allocator, which is slower
    at what scripts and streams ask of it, and gets slower yet where a million rows have come and gone. Where
    the machine has jemalloc, the server is given it.
    """
    library = jemalloc()
    return servers.valkey(env={"LD_PRELOAD": str(library)} if library else {})


def jemalloc() -> Path | None:
    places = (found for folder in LIBRARIES for found in (Path(folder), *sorted(Path(folder).glob("*-linux-gnu"))))
    return next((place / JEMALLOC for place in places if (place / JEMALLOC).is_file()), None)


def facts(url: str) -> dict[str, Any]:
    with redis.Redis.from_url(url) as client:
        server, memory = client.info("server"), client.info("memory")
    name, version = server.get("server_name", "redis"), server.get("valkey_version", server["redis_version"])
    return {
        "cores": os.cpu_count(),
        "system": platform.system(),
        "processor": platform.machine(),
        "python": platform.python_version(),
        "redis-py": importlib.metadata.version("redis"),
        "hiredis": importlib.metadata.version("hiredis"),
        "server": f"{name.title()} {version}",
        "allocator": "jemalloc" if jemalloc() else str(memory["mem_allocator"]),
        "load_before": load(),
    }


def load() -> list[float]:
    return [round(average, 2) for average in os.getloadavg()]


def peak_bytes() -> int:
    """Of this program alone. `ru_maxrss` will not do where there is /proc: Linux carries it over `exec`, so a process
    starts with the size of whoever started it."""
    status = Path("/proc/self/status")
    if status.exists():
        kilobytes = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:")).split()[1]
        return int(kilobytes) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def cpu_s(pid: int) -> float:
    """What the process has used so far, of its user's and the system's time; 0 where nobody tells."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
