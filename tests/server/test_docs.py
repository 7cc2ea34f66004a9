"""Every python block of the page runs as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ragfence import Policy

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "middleware.md").read_text()
SNIPPETS = re.findall(r"^```python\n(.*?)^```", PAGE, re.S | re.M)


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_a_snippet_runs_in_an_empty_folder(number: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SNIPPETS[number]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", ["middleware.md", "api.md"])
def test_the_settings_are_those_of_the_policy(page: str) -> None:
    (text,) = re.findall(r"^```yaml\n(.*?)^```", (DOCS / page).read_text(), re.S | re.M)
    policy = Policy.from_mapping(yaml.safe_load(text))
    assert policy.http == Policy().http
    if page == "api.md":
        assert set(yaml.safe_load(text)["http"]) == set(type(policy.http).model_fields)


def test_importing_ragfence_loads_no_web_framework() -> None:
    code = "import ragfence, ragfence.server, sys; assert not {'starlette', 'fastapi', 'httpx'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
