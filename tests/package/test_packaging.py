"""What is installed: the wheel, and the environment that `make` sets up from uv.lock."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests import wheel

ROOT = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCK: dict[str, Any] = tomllib.loads((ROOT / "uv.lock").read_text())
HOSTS = {"https://pypi.org", "https://files.pythonhosted.org"}


def test_the_lock_knows_every_dependency_of_the_project() -> None:
    """Else `make` installs something else than pyproject.toml says: `make lock` writes it anew."""
    (locked,) = (package for package in LOCK["package"] if package["name"] == PROJECT["name"])
    metadata = locked["metadata"]
    extras = PROJECT["optional-dependencies"]
    assert set(metadata["provides-extras"]) == set(extras)
    written = PROJECT["dependencies"] + [one for many in extras.values() for one in many]
    wanted = {_name(one) for one in written} - {PROJECT["name"]}
    assert {one["name"] for one in metadata["requires-dist"]} - {PROJECT["name"]} == wanted
    specifiers = {(one["name"], one.get("specifier", "")) for one in metadata["requires-dist"]}
    for one in written:
        if _name(one) != PROJECT["name"]:
            asked = set(re.sub(r"\[.*?\]", "", one.partition(";")[0])[len(_name(one)) :].replace(" ", "").split(","))
            assert any(set(kept.split(",")) == asked for name, kept in specifiers if name == _name(one)), one


def test_the_lock_names_no_server_but_the_package_index_itself() -> None:
    text = (ROOT / "uv.lock").read_text()
    assert set(re.findall(r"https?://[^/\"]+", text)) <= HOSTS
    assert "http://" not in text


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="what belongs to the package is read from git")
def test_the_wheel_is_the_package_and_nothing_else(tmp_path: Path) -> None:
    """Built without a network. `make wheel-check` installs it, too."""
    wheel.check_contents(wheel.build(tmp_path))


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="what belongs to the repository is read from git")
def test_the_code_location_to_copy_has_nobody_s_documents_in_it() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "pipelines"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    assert {"pipelines/definitions.py", "pipelines/corpus.py", "pipelines/golden.jsonl"} <= set(listed)
    assert {Path(name).suffix for name in listed} <= {".py", ".jsonl", ".yml"}


def _name(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found is not None
    return found[0].lower().replace("_", "-").replace(".", "-")
