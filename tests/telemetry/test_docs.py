"""Every snippet of docs/observability.md runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = (Path(__file__).resolve().parents[2] / "docs" / "observability.md").read_text()
SNIPPETS = re.findall(r"^```python\n(.*?)^```", DOCS, re.S | re.M)


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_a_snippet_runs_in_an_empty_folder(number, tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SNIPPETS[number]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
