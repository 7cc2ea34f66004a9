"""Every python block and every curl line of the page runs as it stands there, against the real application."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client.real_server import RealServer, real_server

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "client.md").read_text()


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", PAGE, re.S | re.M)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    with real_server(tmp_path_factory.mktemp("real") / ".ragfence") as server:
        yield server


def run(real: RealServer, folder: Path, *command: str) -> None:
    named = {"RAGFENCE_URL": real.url, "RAGFENCE_API_KEY": real.acme}
    done = subprocess.run(
        command, cwd=folder, env=os.environ | named, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout


def test_the_page_runs(real: RealServer, tmp_path: Path) -> None:
    run(real, tmp_path, sys.executable, "-W", "error", "-c", "\n".join(blocks("python")))
    assert shutil.which("curl"), "curl is needed to run what the page says"
    run(real, tmp_path, "bash", "-c", "\n".join(["set -euo pipefail", *blocks("bash")]))


def test_every_call_of_the_client_is_on_the_page() -> None:
    from ragfence.client import Client

    calls = {name for name, value in vars(Client).items() if callable(value) and not name.startswith("_")}
    assert calls == {name for name in calls if re.search(rf"\b(client|purged)\.{name}\(|\b{name}\(\)", PAGE)}
