"""docs/documents.md says what is so."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "documents.md").read_text()


def test_the_example_runs_in_an_empty_folder(tmp_path: Path) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.S | re.M)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", example],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_every_file_that_is_named_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)`", PAGE)
    assert named
    assert all((ROOT / name).exists() for name in named)
