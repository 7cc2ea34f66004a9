"""Every command and snippet of the README works as it stands there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"^```python\n(.*?)^```", README, re.S | re.M)
COMMANDS = re.findall(r"^\$ (.+)$", README, re.M)


def test_there_are_snippets_and_commands():
    assert len(SNIPPETS) >= 4
    assert COMMANDS == ["make demo", "make ui", "make test"]


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_a_snippet_runs_in_an_empty_folder(number, tmp_path):
    snippet = SNIPPETS[number]
    with served(tmp_path) if "ragfence.client" in snippet else nullcontext({}) as more:  # type: ignore[attr-defined]
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", snippet],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env=os.environ | more,
        )
    assert done.returncode == 0, done.stderr


@contextmanager
def served(folder):
    """As the README says it, on any port that is free."""
    words = [sys.executable, "-m", "ragfence", "serve", "--insecure-dev", "--port", "0", "--json"]
    with subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            yield {"RAGFENCE_URL": json.loads(server.stdout.readline())["url"]}
        finally:
            server.terminate()
            server.communicate(timeout=60)
    assert server.returncode == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_a_target_of_the_makefile(command):
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(rf"^{command.removeprefix('make ')}:", makefile, re.M)


@pytest.mark.parametrize("page", sorted({"README.md", *re.findall(r"\((docs/[\w.]+)\)", README)}))
def test_every_link_to_a_file_leads_somewhere(page):
    folder = (ROOT / page).parent
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", (ROOT / page).read_text()):
        if "://" not in target:
            assert (folder / target).exists(), f"{page} links to {target}"
