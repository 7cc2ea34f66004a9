"""`make demo`, run once as a user runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder it ran in, and all that it printed. Stores that the environment names are none of its business.

    It takes its time: whoever looks at it is in the group "demo", and changes nothing but in a copy.
    """
    folder = tmp_path_factory.mktemp("demo")
    environment = {**os.environ, "RAGFENCE_STORE": "redis://127.0.0.1:1/0", "DAGSTER_HOME": "/nowhere"}
    command = [sys.executable, "-m", "pipelines.demo"]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert [each.name for each in folder.iterdir()] == [".ragfence"]
    return folder, done.stdout
