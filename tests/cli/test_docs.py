"""Every command line in the README and in docs/cli.md is one that exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from tests.cli.conftest import run

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    name: (ROOT / name).read_text()
    for name in ("README.md", "docs/cli.md", "docs/tenants.md", "docs/outbox.md", "docs/notify.md")
}
LINES = [
    line.partition("#")[0].strip()
    for text in PAGES.values()
    for block in re.findall(r"^```sh\n(.*?)^```", text, re.S | re.M)
    for line in block.splitlines()
    if line.startswith("ragfence ")
]
GROUPS = {
    **dict.fromkeys(("audit", "policy", "apikeys", "tenants", "outbox", "queue"), 2),
    **dict.fromkeys(("outbox dead", "queue dead"), 3),
}
"""how many words name a command of a group"""


def test_there_are_lines() -> None:
    assert len(LINES) >= 15


@pytest.mark.parametrize("line", LINES)
def test_a_command_and_its_options_exist(line: str) -> None:
    _, *words = shlex.split(line)
    path = words[: GROUPS.get(" ".join(words[:2]), GROUPS.get(words[0], 1))]
    told = run(*path, "--help", env={"COLUMNS": "200"})
    assert told.exit_code == 0, told.output
    for option in (word for word in words if word.startswith("--")):
        assert re.search(rf"(?<!\S){option}(?!\S)", told.stdout), f"{path} has no {option}"


def commands_of(group: typer.Typer, path: str = "") -> set[str]:
    named = {f"{path}{command.name}" for command in group.registered_commands}
    for inner in group.registered_groups:
        assert inner.typer_instance is not None
        named |= commands_of(inner.typer_instance, f"{path}{inner.name} ")
    return named


def test_the_page_names_every_command() -> None:
    from ragfence.cli.app import app

    named = commands_of(app)
    # What stands in capitals or brackets is what the command takes.
    listed = set(re.findall(r"^\| `([a-z-]+(?: [a-z]+)*)[^`]*`", PAGES["docs/cli.md"], re.M))
    assert named == listed
