"""`make ui`, started as a user starts it, on a port that is free."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

JOBS = {"query": "{ repositoriesOrError { ... on RepositoryConnection { nodes { jobs { name } } } } }"}


@contextmanager
def ui(folder: Path, printed: Path) -> Iterator[tuple[str, str]]:
    """On the state in this folder: where it is, and the jobs that it names once it is up."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAGFENCE_")}
    with printed.open("w") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "pipelines.ui"],
            cwd=folder,
            env={**environment, "PORT": str(port), "PYTHONUNBUFFERED": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        yield url, _answered(f"{url}/graphql", server, printed)
    finally:
        # All of its processes: asked to end, Dagster interrupts its children, who may have been told to ignore that.
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _answered(url: str, server: subprocess.Popen[bytes], printed: Path) -> str:
    """Once it is up, which on a busy machine takes its time."""
    request = urllib.request.Request(url, json.dumps(JOBS).encode(), {"Content-Type": "application/json"})
    while True:
        assert server.poll() is None, f"it ended:\n{printed.read_text()}"
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                return response.read().decode()
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.2)
